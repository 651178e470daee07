"""`federate`: a whole federated run in this process."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie._typing import Array
from coterie.data.users import Users
from coterie.errors import InvalidInput
from coterie.federated.algorithms.base import Algorithm, Federation, State
from coterie.federated.algorithms.newton import Newton
from coterie.federated.algorithms.participation import Participation
from coterie.federated.checkpoint import Checkpoint
from coterie.federated.client import Data
from coterie.federated.driver import Driver, DriverResult, Round
from coterie.federated.protocol.ledger import Ledger
from coterie.federated.runtimes.in_process import Faults, LocalRuntime
from coterie.graph import Graph
from coterie.graph.weights import KINDS
from coterie.losses import Loss
from coterie.problem import Problem, check_lam
from coterie.solution import Solution, Status


@dataclass(frozen=True, kw_only=True, eq=False)
class Federated(Solution):
    """A `Solution` found by a federation, with the account of what it took.

    The problem is that of the users who were not set aside; `aside` names the others, and why.
    """

    ledger: Ledger = field(repr=False)
    state: State = field(repr=False)  # of the algorithm; another run can begin from it
    scores: Array | None = field(repr=False, default=None)  # (n_users, 3) held-out loss, right predictions, rows
    n_rounds: int
    aside: dict[Any, str] = field(repr=False, default_factory=dict)
    refusals: tuple[tuple[int, Any, str], ...] = field(repr=False, default=())  # round, user, reason

    def __str__(self) -> str:
        left = f" {len(self.aside)} user(s) were set aside." if self.aside else ""
        return f"{super().__str__()} {self.n_rounds} rounds, {self.ledger}.{left}"


def federate(users: Users, loss: Loss, lam: float, *, graph: Graph | str | None = None,
             algorithm: Algorithm | None = None, participation: Any = 1.0, seed: int = 0, tol: float = 1e-6,
             max_rounds: int | None = None, start: npt.ArrayLike | Algorithm | Federated | None = None,
             held_out: Users | None = None, faults: Faults | None = None, patience: int | None = None,
             checkpoint: str | os.PathLike[str] | None = None, every: int = 1,
             progress: Callable[[Round], None] | None = None) -> Federated:
    """Solve (C) as a federation does: the server sees answers to its questions, never the data.

    Parameters
    ----------
    users, loss, lam : the problem, as for `Problem`.
    graph : pairs and weights; None for all pairs with weight 1. A kind of weights ("wald", "gaussian", ...) makes the
        graph from one round of local optima, as `adaptive_graph` does.
    algorithm : Newton() unless given; Splitting(), PDMM(), FedAvg(), SquaredPenalty().
    participation : who is asked in a round: a share (0.4), a number (12), an array of who is available when
        (n_rounds, n_users), or a `Participation`.
    seed : of all that is random; one seed gives one result.
    tol : the certified relative gap at which the run ends.
    max_rounds : rounds after which it ends at any rate; the algorithm's own limit unless given.
    start : models to begin from, (dim,) or (n_users, dim); an algorithm that finds them, such as FedAvg(); or a run of
        the same users and algorithm at another lam. Zero unless given.
    held_out : rows of the same users, in the same order, on which each user's model is scored at the end.
    faults : what goes wrong on the way; nothing unless given.
    patience : how many questions in a row a user may leave unanswered before it is set aside; None: any number.
    checkpoint : a directory the run is saved in after every `every` rounds. Called again with the same directory and
        settings, the run goes on where it was.
    progress : called after every round with a `Round`. Ctrl-C ends the run with what there is.
    """
    if not (np.isfinite(tol) and tol > 0):
        raise InvalidInput(f"tol must be a finite number > 0, got {tol!r}", remedy="Use for example 1e-6")
    weights = graph if isinstance(graph, str) else None
    if weights is not None and weights not in KINDS:
        raise InvalidInput(f"unknown weights {weights!r}", remedy=f"Choose one of: {', '.join(KINDS)}")
    problem = Problem(users, loss, check_lam(lam), None if isinstance(graph, str) else graph)  # type: ignore[arg-type]
    algorithm = Newton() if algorithm is None else algorithm
    if not isinstance(algorithm, Algorithm):
        raise InvalidInput(f"expected an algorithm such as Newton(), got {algorithm!r}",
                           remedy="Create it by calling its class; coterie.ALGORITHMS lists them")
    if held_out is not None and held_out.names != users.names:
        raise InvalidInput("the held-out rows are of other users, or in another order",
                           remedy="Use users.split(...), which keeps all users in order")
    if isinstance(start, Federated) and (start.solver != algorithm.name or len(start.state.asked) != users.n_users):
        raise InvalidInput(f"the run to begin from is by {start.solver} with {len(start.state.asked)} users, this one "
                           f"by {algorithm.name} with {users.n_users}", remedy="Give start=run.models instead")
    if every < 1:
        raise InvalidInput(f"every must be at least 1 round, got {every!r}", remedy="Use 1")
    if isinstance(start, str):
        raise InvalidInput(f"start must be models or an algorithm, got {start!r}",
                           remedy="Leave it out to begin from zero, or give FedAvg()")
    federation = Federation.of(problem, seed=seed, participation=Participation.of(participation), patience=patience)
    federation.participation.available(0, federation.n_users)  # a trace of another size is refused here
    runtime = LocalRuntime(Data(loss, problem.samples, held_out), faults)
    driver = Driver(federation, algorithm, runtime, tol=tol, max_rounds=max_rounds,
                    weights=weights, score=held_out is not None,
                    start=(start.state if isinstance(start, Federated) else
                           start if start is None or isinstance(start, Algorithm) else np.asarray(start)),
                    checkpoint=None if checkpoint is None else Checkpoint(checkpoint), every=every, progress=progress,
                    fingerprint=fingerprint(federation, algorithm, tol, graph=weights or digest(problem.graph.weights,
                                            problem.graph.pairs), data=_data_digest(users), start=_start_text(start)))
    return finish(driver.run(), algorithm, tol, problem)


def finish(outcome: DriverResult, algorithm: Algorithm, tol: float, problem: Problem | None = None) -> Federated:
    """The result of a run; where the data are at hand, with the whole problem."""
    state, federation = outcome.state, outcome.federation
    active = ~state.aside
    if problem is None:
        judged = federation.problem(active)
    elif active.all() and problem.graph is federation.graph:
        judged = problem
    else:
        judged = Problem(problem.users.take(active), problem.loss, problem.lam,
                         federation.graph if active.all() else federation.graph.take(active))
    gap = outcome.certificate.relative_gap
    status = (Status.CONVERGED if gap <= tol else Status.INTERRUPTED if outcome.interrupted else
              Status.UNANSWERED if not outcome.proven else
              Status.INACCURATE if np.isfinite(outcome.certificate.bound) else Status.NO_BOUND)
    reasons = {federation.names[user]: reason for _, user, reason in state.refusals if 0 <= user < federation.n_users}
    return Federated(
        problem=judged, models=outcome.models, duals=outcome.certificate.duals, certificate=outcome.certificate,
        status=status, solver=algorithm.name, seconds=outcome.seconds, history=outcome.history,
        ledger=outcome.ledger, state=outcome.state, scores=outcome.scores, n_rounds=len(outcome.history),
        aside={federation.names[k]: reasons[federation.names[k]] for k in np.flatnonzero(state.aside)},
        refusals=tuple((turn, federation.names[user] if 0 <= user < federation.n_users else user, reason)
                       for turn, user, reason in state.refusals))


def fingerprint(federation: Federation, algorithm: Algorithm, tol: float, **more: str) -> dict[str, Any]:
    """What must agree for a saved run to be continued."""
    given = federation.participation
    trace = None if given.trace is None else digest(np.asarray(given.trace))
    who = f"{given.fraction} {given.count} {given.order} {trace}"
    return {"algorithm": repr(algorithm), "loss": repr(federation.loss), "lam": federation.lam, "tol": tol,
            "seed": federation.seed, "participation": who, "number of users": federation.n_users,
            "length of a model": federation.dim,
            "patience": federation.patience, **more}


def digest(*arrays: npt.NDArray[Any] | None) -> str:
    """A short name for these numbers."""
    sums = hashlib.sha256()
    for array in arrays:
        sums.update(b"none" if array is None else np.ascontiguousarray(array).tobytes())
    return sums.hexdigest()[:16]


def _data_digest(users: Users) -> str:
    return digest(users.features, users.targets, users.offsets, np.frombuffer(repr(users.names).encode(), np.uint8))


def _start_text(start: Any) -> str:
    if isinstance(start, Federated):
        return digest(start.models, np.array(start.lam))
    return repr(start) if start is None or isinstance(start, Algorithm) else digest(np.asarray(start, dtype=float))
