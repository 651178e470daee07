"""One model for all (FedAvg) and the squared penalty (L2GD): starts and baselines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from coterie.base.errors import require
from coterie.base.types import Array, Ints
from coterie.federated.algorithms.base import Algorithm, Federation, Method, State
from coterie.federated.protocol.messages import Batch


@dataclass(frozen=True, kw_only=True)
class FedAvg(Algorithm):
    """McMahan et al., 2017: the users take some gradient steps from the common model, and the
    server averages.

    Parameters
    ----------
    steps : number of gradient steps per user and round.
    rate : length of a step.
    rounds : number of rounds; the result is certified as it is.

    Raises
    ------
    InvalidInput : a setting that cannot be used.

    Example
    -------
    >>> FedAvg(steps=1, rounds=20)
    FedAvg(steps=1, rate=0.1, rounds=20)
    """

    steps: int = 5
    rate: float = 0.1
    rounds: int = 50

    def __post_init__(self) -> None:
        _check(self.steps, self.rate, self.rounds)

    def on(self, federation: Federation, tol: float = 1e-6) -> TrainMethod:
        return TrainMethod(federation, self.rate, self.rounds, lambda turn: self.steps)


@dataclass(frozen=True, kw_only=True)
class SquaredPenalty(Algorithm):
    """L2GD (Hanzely and Richtarik, 2020): a squared penalty on the distance of each model from the
    mean.

    It minimises sum_i f_i(x_i) + strength/2 sum_i ||x_i - mean||^2. Every step is at random either
    a gradient step of all users or a step towards the mean; only the latter needs the server. A
    round consists of the gradient steps between two of them, at the users, and then the step to the
    mean.

    Parameters
    ----------
    strength : penalty strength; None: lam times the number of users, because for the complete graph
        lam sum_{i<j} 1/2 ||x_i - x_j||^2 = lam N / 2 sum_i ||x_i - mean||^2.
    rate : length of a step (alpha).
    chance : probability of a step towards the mean (p).
    rounds : number of rounds.

    Raises
    ------
    InvalidInput : a setting that cannot be used.

    Example
    -------
    >>> SquaredPenalty(strength=0.5).strength
    0.5
    """

    strength: float | None = None
    rate: float = 0.1
    chance: float = 0.2
    rounds: int = 200

    def __post_init__(self) -> None:
        _check(1, self.rate, self.rounds)
        require(0 < self.chance < 1,
                f"chance must be in (0, 1), got {self.chance!r}", "Use for example 0.2")
        require(self.strength is None or (np.isfinite(self.strength) and self.strength >= 0),
                f"strength must be a finite number >= 0, got {self.strength!r}", "Use 1.0")

    def on(self, federation: Federation, tol: float = 1e-6) -> TrainMethod:
        def steps(turn: int) -> int:
            return int(np.random.default_rng([federation.seed, turn, 2]).geometric(self.chance)) - 1

        strength = federation.lam * federation.n_users if self.strength is None else self.strength
        # The step to the mean is x - (rate strength / chance) (x - mean); beyond the mean it would
        # oscillate.
        pull = min(self.rate * strength / self.chance, 1.0)
        return TrainMethod(federation, self.rate / (1.0 - self.chance), self.rounds, steps, pull)


def _check(steps: int, rate: float, rounds: int) -> None:
    require(not any(isinstance(count, bool)
                    or int(count) != count or count < 1 for count in (steps, rounds)),
            "steps and rounds must be integers >= 1", "Use for example 5 and 50")
    require(np.isfinite(rate) and rate > 0,
            f"rate must be a finite number > 0, got {rate!r}", "Use for example 0.1")


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainState(State):
    trained: int  # number of rounds with replies


class TrainMethod(Method):
    """Rounds of gradient steps at the users, and of an update at the server.

    Parameters
    ----------
    federation : whose users train.
    rate, rounds : length of a step, and number of rounds.
    steps : the number of steps of each user in a round.
    pull : how far the users who replied go to the mean of all; None: all get the mean of those.
    """

    kind = "train"

    def __init__(self, federation: Federation, rate: float, rounds: int,
                 steps: Callable[[int], int], pull: float | None = None) -> None:
        super().__init__(federation)
        self.rate, self.rounds, self.steps, self.pull = rate, rounds, steps, pull

    def begin(self, models: Array) -> TrainState:
        return TrainState(**self.fresh, now=models, trained=0)

    def rounds_within(self, share: float) -> int:
        return self.rounds

    def finished(self, state: TrainState) -> bool:
        return state.trained >= self.rounds

    def _ask(self, state: TrainState, users: Ints) -> Batch:
        steps = np.full(len(users), self.steps(state.round))
        return Batch(self.kind, state.round, users, {"model": state.now[users], "steps": steps},
                     shared={"rate": np.array(self.rate)})

    def _tell(self, state: TrainState, replies: Batch) -> TrainState:
        now, points = state.now.copy(), replies.arrays["point"]
        if self.pull is None:
            now[:] = points.mean(axis=0)
        else:
            now[replies.users] = points
            mean = now[~state.aside].mean(axis=0)
            now[replies.users] += self.pull * (mean - now[replies.users])
        return replace(state, now=now, trained=state.trained + 1)
