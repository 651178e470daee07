"""What a user that lies consistently can still do: how far it moves the models of the others.

A user whose answers agree with each other describes some convex loss, and no server can tell it
from one with other data. The lie here is a loss with a slope of the liar's choice,

    f(x) + strength <v, x> + lift,     v a random direction of length 1,

with the values, gradients and conjugates of this very function; the lift keeps it from falling
below zero, where losses never are. In (C) the pull on another user is at most lam w_ij, so from
some strength on more of it moves nobody further.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from coterie.base.errors import CoterieWarning
from coterie.base.types import Array
from coterie.data.users import Users
from coterie.federated.algorithms.base import Replies
from coterie.federated.algorithms.forms import between
from coterie.federated.algorithms.newton import Newton
from coterie.federated.client import Data
from coterie.federated.protocol.messages import Batch, Message, Reply
from coterie.federated.run import run_federation
from coterie.federated.runtimes.in_process import LocalRuntime
from coterie.federated.settings import FederationSettings
from coterie.losses import Loss
from coterie.problem.problem import Problem
from coterie.problem.solution import Solution

# Of the loss, times strength^2: more than the slope takes from a loss with a ridge of 1e-3.
_LIFT = 1e3


class PoisonedRuntime(LocalRuntime):
    """Users in this process, of whom one answers for another loss than its own.

    Parameters
    ----------
    data : of all users.
    liar : the index of the user who lies.
    slope : (dim,) what it adds to the gradient of its loss.
    """

    def __init__(self, data: Data, liar: int, slope: Array) -> None:
        super().__init__(data)
        self.liar, self.slope = liar, slope
        self.lift = _LIFT * float(slope @ slope)

    def exchange(self, queries: Batch) -> Replies:
        if "slope" in queries.arrays:  # f*(u) of f + <s, x> is that of f at u - s
            slopes = queries.arrays["slope"] - np.where((queries.users == self.liar)[:, None],
                                                        self.slope, 0.0)
            queries = replace(queries, arrays={**queries.arrays, "slope": slopes})
        replies = [pair for batch in super().exchange(queries).batches for pair in batch.items()]
        return Replies(singles=tuple((user, self._lie(queries[user].arrays, reply)
                                      if user == self.liar else reply) for user, reply in replies))

    def _lie(self, query: Mapping[str, Any], reply: Message) -> Message:
        arrays, at = dict(reply.arrays), query["model"]
        if reply.kind == "certify":
            arrays["conjugate"] = arrays["conjugate"] - self.slope @ query["anchor"] - self.lift
        elif "share" in arrays:
            start = query["anchor"] if "anchor" in query else np.zeros((1, len(at)))
            at = between(start, at[None], np.asarray(arrays["share"]))[0]
        arrays["value"] = arrays["value"] + self.slope @ at + self.lift
        if "gradient" in arrays:
            arrays["gradient"] = arrays["gradient"] + self.slope
        return Reply(reply.kind, reply.round, arrays)


def influence(users: Users, loss: Loss, lam: float, strength: float, seed: int = 0) -> float:
    """The largest movement of a coordinate of another user's model that one liar of this strength
    causes.

    Parameters
    ----------
    users, loss, lam : the federation, solved by `Newton`; all pairs have weight 1.
    strength : length of the slope that the liar adds to its loss.
    seed : of who lies, and in which direction.

    Returns
    -------
    The largest absolute change of the others' models. If the server sets the liar aside, this is
    what its absence changes.

    Raises
    ------
    InvalidInput : settings that cannot be used.

    Example
    -------
    >>> import coterie as ct
    >>> users = ct.Users.from_arrays([[0.0], [1.0], [2.0], [3.0]])
    >>> [round(influence(users, ct.SquaredDistance(), 0.1, strength, seed=1), 3)
    ...  for strength in (0.0, 1.0, 1e3, 1e6)]
    [0.0, 0.1, 0.2, 0.2]
    """
    rng = np.random.default_rng(seed)
    problem = Problem(users, loss, lam)
    liar, direction = int(rng.integers(users.n_users)), rng.standard_normal(problem.dim)
    slope = direction / np.linalg.norm(direction)
    honest, poisoned = (_run(problem, liar, size * slope) for size in (0.0, strength))
    theirs = dict(zip(poisoned.problem.users.names, poisoned.models, strict=True))
    others = zip(users.names, honest.models, strict=True)
    return max(float(np.abs(theirs[name] - model).max())
               for k, (name, model) in enumerate(others) if k != liar)


def _run(problem: Problem, liar: int, slope: Array) -> Solution:
    settings = FederationSettings(lam=problem.lam, algorithm=Newton(), tol=1e-9)
    runtime = PoisonedRuntime(Data(problem.loss, problem.samples), liar, slope)
    federation = settings.federation(problem.users, problem.loss, problem.graph)
    with warnings.catch_warnings(action="ignore", category=CoterieWarning):
        return run_federation(federation, settings, runtime, problem=problem)
