"""One federated run: over any runtime, and with all users in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coterie.base.errors import InvalidInput, interruptible
from coterie.base.labels import many
from coterie.base.types import Array
from coterie.data.users import Users
from coterie.federated.algorithms.base import Algorithm, Federation, State
from coterie.federated.client import Data
from coterie.federated.driver import Driver, DriverResult, Round
from coterie.federated.protocol.ledger import Ledger
from coterie.federated.runtimes.in_process import Faults, LocalRuntime, Runtime
from coterie.federated.settings import FederationSettings
from coterie.losses import Loss
from coterie.problem.graph import Graph
from coterie.problem.problem import Problem
from coterie.problem.solution import Solution, Status, outline


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Federated(Solution):
    """A `Solution` found by a federation, with the account of what it took.

    The problem is that of the users who were not excluded.

    Parameters
    ----------
    ledger : everything that was sent.
    state : of the algorithm; another run can start from it.
    federation : what the server knew, with the graph over all users.
    scores : (n_users, 3) held-out loss, correct predictions and rows of every user; None where none
        were held out.
    n_rounds : of the run, certificates included.
    aside : the users who were excluded, and why.
    refusals : round, user and reason of every reply that was rejected.

    Example
    -------
    >>> import coterie as ct
    >>> run = ct.federate(ct.Users.from_arrays([[0.0], [1.0], [9.0]]), ct.SquaredDistance(),
    ...                   lam=1.0)
    >>> run.n_clusters, run.status.name
    (2, 'CONVERGED')
    """

    ledger: Ledger = field(repr=False)
    state: State = field(repr=False)
    federation: Federation = field(repr=False)
    scores: Array | None = field(repr=False, default=None)
    n_rounds: int
    aside: dict[Any, str] = field(repr=False, default_factory=dict)
    refusals: tuple[tuple[int, Any, str], ...] = field(repr=False, default=())

    def __repr__(self) -> str:
        found = outline(self.n_clusters, self.problem.n_users, self.lam, self.gap)
        return f"Federated({found}, {self.n_rounds} rounds, {self.ledger.bytes:,} bytes)"

    def __str__(self) -> str:
        left = f" {many(len(self.aside), 'user')} excluded." if self.aside else ""
        return f"{super().__str__()} {self.n_rounds} rounds, {self.ledger}.{left}"


def run_federation(federation: Federation, settings: FederationSettings, runtime: Runtime,
                   progress: Callable[[Round], None] | None = None,
                   problem: Problem | None = None) -> Federated:
    """One run over any runtime.

    Parameters
    ----------
    federation, settings : what is solved, and how.
    runtime : carries queries and replies.
    progress : called after every round with a `Round`.
    problem : with the users' data, where they are in this process; the result then has it.

    Raises
    ------
    Interrupted : on Ctrl-C; its `best` is the run as far as it got.
    """
    driver = Driver(federation, settings, runtime, progress)
    with interruptible(lambda: finish(driver.result(), settings, problem, interrupted=True)):
        return finish(driver.run(), settings, problem)


def in_process(users: Users, loss: Loss, settings: FederationSettings, graph: Graph | None = None,
               held_out: Users | float | None = None,
               faults: Faults | None = None) -> tuple[Problem, LocalRuntime]:
    """The problem of users whose data are in this process, and the runtime that asks them."""
    if isinstance(held_out, (int, float)):
        users, _, held_out = users.hold_out(held_out, seed=settings.seed)
    if held_out is not None and held_out.names != users.names:
        raise InvalidInput("the held-out rows are of other users, or in another order",
                           remedy="Use users.split(...), which keeps all users in order")
    problem = Problem(users, loss, settings.lam, graph)  # type: ignore[arg-type]  # None: all pairs
    return problem, LocalRuntime(Data(loss, problem.samples, held_out), faults)


def state_of(start: Any, algorithm: Algorithm, n_users: int) -> Any:
    """The state of a run to start from; anything else as it is."""
    if not isinstance(start, Federated):
        return start
    if start.solver != algorithm.name or len(start.state.asked) != n_users:
        raise InvalidInput(f"the run to start from is by {start.solver} with "
                           f"{len(start.state.asked)} users, this one by {algorithm.name} with "
                           f"{n_users}", remedy="Give start=run.models instead")
    return start.state


def finish(result: DriverResult, settings: FederationSettings, problem: Problem | None = None, *,
           interrupted: bool = False) -> Federated:
    """The result of a run; where the data are in this process, with the problem that has them."""
    state, federation = result.state, result.federation
    active = ~state.aside
    if problem is None:
        solved = federation.problem(active)
    elif active.all() and problem.graph is federation.graph and problem.lam == federation.lam:
        solved = problem
    else:
        solved = Problem(problem.users.take(active), problem.loss, federation.lam,
                         federation.graph if active.all() else federation.graph.take(active))
    gap = result.certificate.relative_gap
    status = (Status.CONVERGED if gap <= settings.tol else Status.INTERRUPTED if interrupted else
              Status.UNANSWERED if not result.proven else
              Status.INACCURATE if np.isfinite(result.certificate.bound) else Status.NO_BOUND)
    names = federation.names
    refusals = tuple((turn, names[user] if 0 <= user < len(names) else user, reason)
                     for turn, user, reason in state.refusals)
    reasons = {names[user]: reason for _, user, reason in state.refusals if 0 <= user < len(names)}
    return Federated(
        problem=solved, models=result.models, duals=result.certificate.duals,
        certificate=result.certificate, status=status, solver=settings.algorithm.name,
        seconds=result.seconds, history=result.history, ledger=result.ledger, state=state,
        federation=federation, scores=result.scores, n_rounds=len(result.history),
        aside={names[k]: reasons[names[k]] for k in np.flatnonzero(state.aside)}, refusals=refusals)
