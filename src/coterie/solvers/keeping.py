"""What a solve keeps beside its iterate: the best certified point, and the rule that adapts sigma.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from coterie.base.types import Array
from coterie.problem.certificates import certify, judge
from coterie.problem.problem import Problem
from coterie.problem.solution import Certificate

if TYPE_CHECKING:
    from coterie.solvers.engines import Engine

_TURN = 3.0  # first factor of a change of sigma
# Limits of ||B x - z|| / ||change of z|| outside which sigma is changed.
_TOO_LOW, _TOO_HIGH = 2.0, 1.03 / 1.8
# Tol from which rough bounds are enough, and the share of it that they may miss.
LOOSE, _ENOUGH = 1e-4, 0.1


class BestPoint:
    """The best certified point so far.

    Attributes
    ----------
    problem, tol : what is solved, and how accurately.
    models, certificate : the point; no certificate as long as there is none.
    enough : by how much bounds may be too low, relative to the losses.
    repair_at : the passes before which duals without a finite bound are not repaired.
    unbounded : how many certificates had no finite bound even after a repair.
    """

    def __init__(self, problem: Problem, tol: float, models: Array) -> None:
        self.problem, self.tol, self.models = problem, tol, models
        self.certificate: Certificate | None = None
        self.enough = _ENOUGH * tol if tol >= LOOSE else 0.0
        self.repair_at = self.unbounded = 0

    @property
    def gap(self) -> float:
        return np.inf if self.certificate is None else self.certificate.relative_gap

    @property
    def done(self) -> bool:
        """Whether the tolerance is certified."""
        return self.gap <= self.tol

    def judge(self, models: Array, duals: Array, passes: int, prefer: bool = False) -> bool:
        """Certify a point, and keep it if it is the best so far, or as good and preferred; whether
        that is enough.
        """
        if not (np.isfinite(models).all() and np.isfinite(duals).all()):
            return False  # a step that overflowed
        certificate = judge(self.problem, models, duals, self.enough)
        if not np.isfinite(certificate.bound) and passes >= self.repair_at:
            # The duals may be only slightly outside the domain of a conjugate: repair them, but not
            # every time.
            certificate = certify(self.problem, models, duals)
            self.repair_at = 0 if np.isfinite(certificate.bound) else 2 * passes
            self.unbounded += not np.isfinite(certificate.bound)
        as_good = self.gap + 4.0 * certificate.rounding / max(abs(certificate.objective),
            certificate.floor, 1e-300)
        if self.certificate is None or certificate.relative_gap < (as_good if prefer else self.gap):
            self.certificate, self.models = certificate, models
        return self.done

    def build(self, models: Array | None = None) -> bool:
        """Certify the best point, or these models, with duals built for their groups; whether that
        is enough.
        """
        models = self.models if models is None else models
        built = certify(self.problem, models)
        if self.certificate is None or built.relative_gap < self.gap:
            self.certificate, self.models = built, models
        return self.done


class SigmaBalance:
    """The rule that adapts sigma: residual balancing, with the residuals of the last pass.

    Attributes
    ----------
    first : sigma at the start; it stays within 1e5 times of it.
    factor : of the next change; smaller after every change of direction.
    last, changes, next_change : the direction of the last change, their number, and the passes
        before the next.
    """

    def __init__(self, sigma: float, patience: int) -> None:
        self.first, self.factor, self.last, self.changes, self.next_change = sigma, _TURN, 0, 0, \
            patience

    def turn(self, primal: float, moved: float) -> int:
        """1 to increase sigma, if z is behind B x; -1 to decrease it; else 0."""
        ratio = np.sqrt(primal / (moved + 1e-300))
        return 1 if ratio > _TOO_LOW else -1 if ratio < _TOO_HIGH else 0

    def apply(self, turn: int, engine: Engine, passes: int) -> None:
        """Change the engine's sigma in this direction, if it is time to."""
        if turn and self.factor > 1.3 and passes >= self.next_change:
            self.factor = np.sqrt(self.factor) if self.last and turn != self.last else self.factor
            self.last, self.changes = turn, self.changes + 1
            engine.retune(float(np.clip(engine.sigma * self.factor**turn, self.first / 1e5,
                                        self.first * 1e5)))
            self.next_change = passes + 20 * (1 + self.changes // 2)
