"""Models related by a covariance that is learned with them: multi-task learning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from coterie.base.types import Array
from coterie.data.users import Users
from coterie.lab.baselines.base import Baseline, Outcome, check
from coterie.lab.baselines.run import BaselineRun
from coterie.losses import Loss

_TOL = 1e-7


@dataclass(frozen=True, kw_only=True)
class Mocha(Baseline):
    """minimise over W = [x_1 ... x_n] and Omega >= 0, tr Omega = 1:  sum_i f_i(x_i) + strength/2
    tr(W Omega^-1 W')

    Smith, Chiang, Sanjabi and Talwalkar, 2017, "Federated multi-task learning", with the learned
    task relationship of Zhang and Yeung, 2010; strength from {1e-5, 1e-4, ..., 10}. They alternate
    between W and Omega, whose optimal value is (W'W)^(1/2) / tr (W'W)^(1/2). Inserted, the penalty
    is strength/2 ||W||_*^2, the squared sum of singular values. This problem is convex in W.
    Alternation is slow when Omega is nearly singular, so W is computed by splitting:

        x_i = argmin f_i(x) + rho/2 ||x - (z_i - u_i)||^2          at the users
        Z   = argmin strength/2 ||Z||_*^2 + rho/2 ||Z - (X + U)||^2,    U = U + X - Z      at the
            server

    where the step for Z shrinks singular values. All coordinates, intercepts included, are
    penalised. Newcomers get the mean model, because the paper does not treat them.

    Traffic: dim numbers down and up per user and round.

    Parameters
    ----------
    strength
        Penalty strength.
    rounds
        Largest number of rounds; the method stops earlier when X and Z agree and do not change.
    """

    name: ClassVar[str] = "mocha"
    strength: float = 0.01
    rounds: int = 1000

    def __post_init__(self) -> None:
        check(strength=(self.strength, 0.0, np.inf), rounds=(self.rounds, 1, np.inf))

    @classmethod
    def grid(cls, users: Users, loss: Loss) -> tuple[Self, ...]:
        return tuple(cls(strength=s) for s in (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0))

    def _fit(self, run: BaselineRun) -> Outcome:
        if self.strength == 0:
            return Outcome(run.own(), run.own().mean(axis=0, keepdims=True))
        z = x = u = np.zeros((run.n_users, run.dim))
        rho = float(np.trace(run.loss.hessians(run.samples, x), axis1=1, axis2=2).mean()) \
            / run.dim + 1e-12
        for turn in range(1, self.rounds + 1):
            x = run.loss.prox(run.samples, None, rho, z - u, start=x).points
            run.exchange(down=run.dim, up=run.dim)
            before, relaxed = z, 1.6 * x - 0.6 * z  # over-relaxation
            z = _shrunk(relaxed + u, self.strength / rho)
            u = u + relaxed - z
            primal, dual = float(np.linalg.norm(x - z)), float(np.linalg.norm(z - before))
            if max(primal, dual) <= _TOL * float(np.linalg.norm(z) + np.linalg.norm(u)):
                break
            if turn % 10 == 0 and turn <= self.rounds // 2 and max(primal, dual) > 5 \
                * min(primal, dual):
                factor = 2.0 if primal > dual else 0.5
                rho, u = rho * factor, u / factor
        return Outcome(z, z.mean(axis=0, keepdims=True))


def _shrunk(points: Array, weight: float) -> Array:
    """argmin_Z weight/2 ||Z||_*^2 + 1/2 ||Z - points||^2.

    The singular values v_1 >= v_2 >= ... become max(v_j - weight S, 0) with S their new sum. If the
    first k remain positive, S = (v_1 + ... + v_k) / (1 + k weight), and k is the largest with v_k >
    weight S.
    """
    left, values, right = np.linalg.svd(points, full_matrices=False)
    sums = np.cumsum(values) / (1.0 + weight * np.arange(1, len(values) + 1))
    k = max(int((values > weight * sums).sum()), 1)
    return (left * np.maximum(values - weight * sums[k - 1], 0.0)) @ right
