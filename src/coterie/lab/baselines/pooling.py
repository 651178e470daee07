"""From a model per user to one model for all, by exact fits: separate fits, pooled ones, and
penalties on how models differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from coterie.base.types import Array, Indices
from coterie.lab.baselines import base
from coterie.lab.baselines.base import BUDGET, Baseline, BaselineRun, Choices, Outcome
from coterie.losses import Loss, Samples
from coterie.losses.newton import minimise

_TOL = 1e-7  # relative, of the splitting that fits Mocha
_STRENGTHS = np.geomspace(1e-4, 10.0, BUDGET).tolist()


@dataclass(frozen=True, kw_only=True)
class Local(Baseline):
    """minimise_x f_i(x) for every user i separately.

    Traffic: none.

    Parameters
    ----------
    ridge
        Ridge, added to that of the loss.
    """

    name: ClassVar[str] = "local"
    choices: ClassVar[Choices] = {"ridge": base.ridges}
    ridge: float = 0.0

    def _fit(self, run: BaselineRun) -> Outcome:
        models = run.own(self.ridge)
        return models, models.mean(axis=0, keepdims=True), None


@dataclass(frozen=True, kw_only=True)
class Global(Baseline):
    """minimise_x sum_i f_i(x), the goal of FedAvg (McMahan et al., 2017), here by Newton's method.

    Traffic: as in `BaselineRun.pool`.

    Parameters
    ----------
    ridge
        Ridge, added to that of the loss.
    """

    name: ClassVar[str] = "global"
    choices: ClassVar[Choices] = {"ridge": base.ridges}
    ridge: float = 0.0

    def _fit(self, run: BaselineRun) -> Outcome:
        model = run.pool_all(self.ridge)
        return np.repeat(model, run.n_users, axis=0), model, None


@dataclass(frozen=True, kw_only=True)
class Oracle(Global):
    """minimise_x sum_{i in C_k} f_i(x) for each true cluster C_k, the goal of every method that
    finds clusters.

    Traffic: as in `BaselineRun.pool`.

    Parameters
    ----------
    ridge
        Ridge, added to that of the loss.
    """

    name: ClassVar[str] = "oracle"
    needs_clusters: ClassVar[bool] = True

    def _fit(self, run: BaselineRun) -> Outcome:
        assert run.clusters is not None  # checked by `Baseline.fit`
        models = run.pool(run.clusters, int(run.clusters.max()) + 1, self.ridge)
        return models[run.clusters], models, run.clusters


@dataclass(frozen=True, kw_only=True)
class SquaredPenaltyBaseline(Baseline):
    """minimise sum_i f_i(x_i) + strength/2 sum_i ||x_i - mean||^2, exactly.

    Hanzely and Richtarik, 2020, "Federated learning of a mixture of global and local models"; their
    L2GD uses random gradient steps, and their strength is chosen for each data set.

    Traffic: a round is one Newton step for the mean: dim numbers down, 1 + dim + dim (dim + 1) / 2
    up.

    Parameters
    ----------
    strength
        Penalty strength; gamma/2 sum_{i<j} ||x_i - x_j||^2 is the same with strength = gamma *
        n_users.
    """

    name: ClassVar[str] = "squared_penalty"
    choices: ClassVar[Choices] = {"strength": _STRENGTHS}
    strength: float = 0.1

    def _fit(self, run: BaselineRun) -> Outcome:
        if self.strength == 0:
            return run.own(), run.own().mean(axis=0, keepdims=True), None
        s, loss, samples, n, d = self.strength, run.loss, run.samples, run.n_users, run.dim
        last: Array = np.zeros((n, d))

        # The mean also minimises the sum over m: minimise_m sum_i min_x f_i(x) + s/2 ||x - m||^2.
        # With x_i the inner minimum and H_i = hess f_i(x_i), the gradient is sum_i grad f_i(x_i)
        # and, by the Schur complement of the arrow-shaped Hessian in (x_1, ..., x_n, m), the
        # Hessian is sum_i s I - s^2 (H_i + s I)^-1 = s (H_i + s)^-1 H_i
        def evaluate(only: Indices, mean: Array, order: int) -> tuple[Array, Array, Array]:
            nonlocal last
            run.exchange(down=d, up=base.length_of_answer(d, order))
            inner = loss.prox(samples, None, s, np.repeat(mean, n, axis=0), start=last)
            last = inner.points
            _, g, h = loss.evaluate(samples, last, order)
            gradient, hessian = np.empty(0), np.empty(0)
            if order > 0:
                gradient = g.sum(axis=0)[None]
            if order > 1:
                parts = s * np.linalg.solve(h + s * np.eye(d), h)
                hessian = (0.5 * (parts + parts.swapaxes(1, 2))).sum(axis=0)[None]
            return inner.values.sum(keepdims=True), gradient, hessian

        mean = minimise(evaluate, np.zeros((1, d))).points
        return pull_to_centre(loss, samples, s, mean, last), mean, None


@dataclass(frozen=True, kw_only=True)
class Ditto(SquaredPenaltyBaseline):
    """minimise_v f_i(v) + strength/2 ||v - w||^2 for every user i, with w the minimum of sum_i f_i.

    Li, Hu, Beirami and Smith, 2021, "Ditto: fair and robust federated learning through
    personalization". In the paper w is trained by FedAvg and v by a few gradient steps per round,
    with the strength tuned for each data set; here both are exact. In contrast to the squared
    penalty, w does not depend on v.

    Traffic: as in `BaselineRun.pool`.

    Parameters
    ----------
    strength
        Strength of the pull, lambda in the paper.
    """

    name: ClassVar[str] = "ditto"

    def _fit(self, run: BaselineRun) -> Outcome:
        w = run.once("pooled", run.pool_all)
        return pull_to_centre(run.loss, run.samples, self.strength, w), w, None


def pull_to_centre(loss: Loss, samples: Samples, strength: float, centre: Array,
                   start: Array | None = None) -> Array:
    """(n_users, dim) minimise_v f_i(v) + strength/2 ||v - centre||^2 for each user."""
    if strength == 0:
        return base.own_models(loss, samples)
    centres = np.repeat(centre, samples.n_users, axis=0)
    return loss.prox(samples, None, strength, centres, start=start).points


@dataclass(frozen=True, kw_only=True)
class Mocha(Baseline):
    """minimise over W = [x_1 ... x_n] and Omega >= 0, tr Omega = 1:  sum_i f_i(x_i) + strength/2
    tr(W Omega^-1 W')

    Smith, Chiang, Sanjabi and Talwalkar, 2017, "Federated multi-task learning", with the learned
    task relationship of Zhang and Yeung, 2010; strength from {1e-5, 1e-4, ..., 10}. They alternate
    between W and Omega, whose optimal value is (W'W)^(1/2) / tr (W'W)^(1/2). Inserted, the penalty
    is strength/2 ||W||_*^2, the squared sum of singular values. This problem is convex in W.
    Alternation is slow when Omega is nearly singular, so W is computed by splitting:

        x_i = argmin f_i(x) + rho/2 ||x - (z_i - u_i)||^2               at the users
        Z   = argmin strength/2 ||Z||_*^2 + rho/2 ||Z - (X + U)||^2,
        U   = U + X - Z                                                 at the server

    where the step for Z shrinks singular values. All coordinates, intercepts included, are
    penalised.

    Traffic: dim numbers down and up per user and round.

    Parameters
    ----------
    strength
        Penalty strength.
    rounds
        Largest number of rounds; the method stops earlier when X and Z agree and do not change.
    """

    name: ClassVar[str] = "mocha"
    choices: ClassVar[Choices] = {"strength": (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0)}
    strength: float = 0.01
    rounds: int = 1000

    def _fit(self, run: BaselineRun) -> Outcome:
        if self.strength == 0:
            return run.own(), run.own().mean(axis=0, keepdims=True), None
        z = x = u = np.zeros((run.n_users, run.dim))
        traces = np.trace(run.loss.hessians(run.samples, x), axis1=1, axis2=2)
        rho = float(traces.mean()) / run.dim + 1e-12
        for turn in range(1, self.rounds + 1):
            # 1. At the users.
            x = run.loss.prox(run.samples, None, rho, z - u, start=x).points
            run.exchange(down=run.dim, up=run.dim)
            # 2. At the server, with over-relaxation.
            before, relaxed = z, 1.6 * x - 0.6 * z
            z = shrink(relaxed + u, self.strength / rho)
            u = u + relaxed - z
            # 3. Stop, or balance the two residuals by rho.
            primal, dual = float(np.linalg.norm(x - z)), float(np.linalg.norm(z - before))
            largest = max(primal, dual)
            if largest <= _TOL * float(np.linalg.norm(z) + np.linalg.norm(u)):
                break
            if turn % 10 == 0 and turn <= self.rounds // 2 and largest > 5 * min(primal, dual):
                factor = 2.0 if primal > dual else 0.5
                rho, u = rho * factor, u / factor
        return z, z.mean(axis=0, keepdims=True), None


def shrink(points: Array, weight: float) -> Array:
    """argmin_Z weight/2 ||Z||_*^2 + 1/2 ||Z - points||^2.

    The singular values v_1 >= v_2 >= ... become max(v_j - weight S, 0) with S their new sum. If the
    first k remain positive, S = (v_1 + ... + v_k) / (1 + k weight), and k is the largest with v_k >
    weight S.
    """
    left, values, right = np.linalg.svd(points, full_matrices=False)
    sums = np.cumsum(values) / (1.0 + weight * np.arange(1, len(values) + 1))
    k = max(int((values > weight * sums).sum()), 1)
    return (left * np.maximum(values - weight * sums[k - 1], 0.0)) @ right
