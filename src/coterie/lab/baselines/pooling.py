"""From a model per user to one model for all: by exact fits, which are separate, pooled, or with
penalties on how models differ; and by averaged gradient steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import numpy as np

from coterie.base.errors import InvalidInput
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


# One common model from averaged gradient steps, and what users make of it by steps of their own.
#
# A rate of 1 is a step of length 1 / L, with L = loss.lipschitz; every such step decreases the
# loss. If the loss has no such bound (Poisson), L is twice the curvature at the start of the steps,
# and a step that would not decrease the loss of a user is halved until it does.

_UNCHANGED = 1e-10


@dataclass(frozen=True, kw_only=True)
class FedAvgBaseline(Baseline):
    """x <- mean_i (`steps` gradient steps on f_i from x), repeated every round.

    McMahan et al., 2017, "Communication-efficient learning of deep networks from decentralized
    data": 10% of the users per round, 5 epochs with minibatches of 10, averages weighted by
    samples. With one step this is gradient descent on mean_i f_i; with more steps, the fixed point
    is biased towards users with large curvature.

    Traffic: dim numbers down and up per user and round.

    Parameters
    ----------
    steps
        Number of gradient steps per user and round.
    rate
        Length of these steps times max_i L_i.
    rounds
        Largest number of rounds; the method stops earlier if nothing changes.
    """

    name: ClassVar[str] = "fedavg"
    choices: ClassVar[Choices] = {"steps": (1, 5, 20), "rate": (0.3, 1.0, 1.9)}
    steps: int = 5
    rate: float = 1.0
    rounds: int = 200

    def _fit(self, run: BaselineRun) -> Outcome:
        def train_users(models: Array) -> Array:
            length = self.rate / curvature(run.loss, run.samples, models).max()
            return descend(run.loss, run.samples, models, length, self.steps)

        model = run.once(self, lambda: average_rounds(run, train_users, self.rounds))
        return np.repeat(model, run.n_users, axis=0), model, None


@dataclass(frozen=True, kw_only=True)
class FineTuning(Baseline):
    """The model of FedAvg, then `steps` gradient steps on f_i at every user i.

    Wang et al., 2019, "Federated evaluation of on-device personalization": a few epochs, with tuned
    number and rate.

    Traffic: that of FedAvg.

    Parameters
    ----------
    steps
        Number of gradient steps of every user at the end.
    rate
        Length of these steps times L_i.
    common
        Settings of FedAvg for the common model.
    """

    name: ClassVar[str] = "fine_tuning"
    choices: ClassVar[Choices] = {"steps": (0, 1, 2, 5, 10, 20, 50, 100, 200, 500)}
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {"steps": (0, np.inf)}
    steps: int = 10
    rate: float = 1.0
    common: FedAvgBaseline = field(default_factory=FedAvgBaseline)

    def _fit(self, run: BaselineRun) -> Outcome:
        models, common, _ = self.common._fit(run)
        lengths = self.rate / curvature(run.loss, run.samples, models)
        return descend(run.loss, run.samples, models, lengths, self.steps), common, None


@dataclass(frozen=True, kw_only=True)
class PerFedAvg(Baseline):
    """minimise_w mean_i F_i(w),  F_i(w) = f_i(w - alpha grad f_i(w)); user i's model is w - alpha
    grad f_i(w).

    Fallah, Mokhtari and Ozdaglar, 2020, "Personalized federated learning with theoretical
    guarantees". The paper has minibatches, and chooses alpha, rate and the number of local steps
    per round for each data set. The models of the users are averaged, as in FedAvg, after steps
    along

        grad F_i(w) = (I - alpha hess f_i(w)) grad f_i(w - alpha grad f_i(w))

    with the Hessian itself (variant "hessian"; their HF approximates its product with a vector by
    differences), or without the first factor ("first_order", their FO).

    Traffic: dim numbers down and up per user and round.

    Parameters
    ----------
    adapt
        alpha times max_i L_i.
    rate
        Length of the steps on F_i times max_i L_i; if f_i is quadratic and adapt <= 2, a rate of 1
        decreases F_i.
    steps
        Number of steps on F_i per user and round.
    rounds
        Largest number of rounds; the method stops earlier if nothing changes.
    variant
        "hessian" or "first_order".
    """

    name: ClassVar[str] = "per_fedavg"
    choices: ClassVar[Choices] = {"adapt": (0.1, 0.3, 0.6, 1.0, 1.8),
                                  "variant": ("hessian", "first_order")}
    adapt: float = 1.0
    rate: float = 1.0
    steps: int = 5
    rounds: int = 200
    variant: Literal["hessian", "first_order"] = "hessian"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.variant not in ("hessian", "first_order"):
            raise InvalidInput(f"unknown variant {self.variant!r}",
                               remedy="Choose 'hessian' or 'first_order'")

    def _fit(self, run: BaselineRun) -> Outcome:
        bound = 0.0

        def train_users(models: Array) -> Array:
            nonlocal bound
            bound = float(curvature(run.loss, run.samples, models).max())
            for _ in range(self.steps):
                models = self._step(run.loss, run.samples, models, bound)
            return models

        model = average_rounds(run, train_users, self.rounds)
        models = np.repeat(model, run.n_users, axis=0)
        return descend(run.loss, run.samples, models, self.adapt / bound, 1), model, None

    def _step(self, loss: Loss, samples: Samples, points: Array, bound: float) -> Array:
        order = 2 if self.variant == "hessian" else 1
        value, gradients, hessians = loss.evaluate(samples, points, order)
        alpha, checked = np.full((len(points), 1), self.adapt / bound), unbounded(loss, samples)
        if checked:
            full = alpha
            alpha = full * backtrack(
                lambda size: loss.values(samples, points - size * full * gradients), value)
        value, outer, _ = loss.evaluate(samples, points - alpha * gradients, 1)
        if self.variant == "hessian":
            outer = outer - alpha * np.einsum("nde,ne->nd", hessians, outer)
        step = self.rate / bound * outer

        def value_after(size: Array) -> Array:
            trial = points - size * step
            return loss.values(samples, trial - alpha * loss.gradients(samples, trial))

        return points - (backtrack(value_after, value) * step if checked else step)


def average_rounds(run: BaselineRun, train_users: Callable[[Array], Array], rounds: int) -> Array:
    """(1, dim) from zero: every user trains the common model, and the mean is the next one."""
    model = np.zeros((1, run.dim))
    for _ in range(rounds):
        before = model
        model = train_users(np.repeat(model, run.n_users, axis=0)).mean(axis=0, keepdims=True)
        run.exchange(down=run.dim, up=run.dim)
        if unchanged(before, model):
            break
    return model


def unbounded(loss: Loss, samples: Samples) -> bool:
    """Whether the curvature of some user has no bound, so that the length of each step must be
    checked.
    """
    return not bool(np.isfinite(loss.lipschitz(samples)).all())


def curvature(loss: Loss, samples: Samples, models: Array) -> Array:
    """(n_users,) L_i, or twice the largest eigenvalue of the Hessian at `models` if there is no
    L_i.
    """
    bounds = loss.lipschitz(samples)
    if not np.isfinite(bounds).all():
        estimates = 2.0 * np.linalg.eigvalsh(loss.hessians(samples, models))[:, -1]
        bounds = np.where(np.isfinite(bounds), bounds, estimates)
    return np.maximum(bounds, 1e-300)


def descend(loss: Loss, samples: Samples, models: Array, lengths: Array | float,
            steps: int) -> Array:
    """Repeat models - lengths * gradient `steps` times."""
    lengths = np.broadcast_to(np.asarray(lengths, dtype=float), (samples.n_users,))[:, None]
    checked = unbounded(loss, samples)
    for _ in range(steps):
        value, gradient, _ = loss.evaluate(samples, models, 1)
        step = lengths * gradient
        if checked:
            step = backtrack(partial(_value_after, loss, samples, models, step), value) * step
        models = models - step
    return models


def _value_after(loss: Loss, samples: Samples, models: Array, step: Array, size: Array) -> Array:
    return loss.values(samples, models - size * step)


def backtrack(value_after: Callable[[Array], Array], value: Array) -> Array:
    """(n_users, 1) for each user the first size of 1, 1/2, 1/4, ... with value_after(size) <=
    value; 0 if none.

    `value_after` gives the value of every user after a step of this size.
    """
    size = np.ones((len(value), 1))
    for _ in range(60):
        with np.errstate(over="ignore", invalid="ignore"):  # a step with overflow is rejected
            worse = ~(value_after(size) <= value + 1e-14 * np.abs(value))
        if not worse.any():
            return size
        size[worse] *= 0.5
    return np.where(worse[:, None], 0.0, size)


def unchanged(before: Array, after: Array) -> bool:
    """Whether a round changed the models by no more than rounding errors."""
    change, size = float(np.abs(after - before).max()), float(np.abs(after).max())
    return change <= _UNCHANGED * (1.0 + size)
