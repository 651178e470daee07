"""One common model from averaged gradient steps, and what users make of it by steps of their own.

A rate of 1 is a step of length 1 / L, with L = loss.lipschitz; every such step decreases the loss.
If the loss has no such bound (Poisson), L is twice the curvature at the start of the steps, and a
step that would not decrease the loss of a user is halved until it does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import numpy as np

from coterie.base.errors import InvalidInput
from coterie.base.types import Array
from coterie.lab.baselines.base import Baseline, BaselineRun, Choices, Outcome
from coterie.losses import Loss, Samples

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
