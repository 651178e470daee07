"""One federated run: over any runtime, and with all users in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from coterie.base.errors import InvalidInput, interruptible
from coterie.data.users import Users
from coterie.federated.algorithms.base import Algorithm, Federation
from coterie.federated.client import Data
from coterie.federated.driver import Driver, DriverResult, Round
from coterie.federated.runtimes.in_process import Faults, LocalRuntime, Runtime
from coterie.federated.settings import FederationSettings
from coterie.losses import Loss
from coterie.problem.account import Account
from coterie.problem.graph import Graph
from coterie.problem.problem import Problem
from coterie.problem.solution import Solution, Status

# The name of earlier versions for the `Solution` of a run, which has an account.
Federated = Solution


def run_federation(federation: Federation, settings: FederationSettings, runtime: Runtime,
                   progress: Callable[[Round], None] | None = None,
                   problem: Problem | None = None) -> Solution:
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
    if not isinstance(start, Solution) or start.account is None:
        return start
    if start.solver != algorithm.name or len(start.state.asked) != n_users:
        raise InvalidInput(f"the run to start from is by {start.solver} with "
                           f"{len(start.state.asked)} users, this one by {algorithm.name} with "
                           f"{n_users}", remedy="Give start=run.models instead")
    return start.state


def finish(result: DriverResult, settings: FederationSettings, problem: Problem | None = None, *,
           interrupted: bool = False) -> Solution:
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
    account = Account(ledger=result.ledger, history=result.history, refusals=refusals,
                      aside={names[k]: reasons[names[k]] for k in np.flatnonzero(state.aside)},
                      scores=result.scores, state=state, federation=federation)
    return Solution(problem=solved, models=result.models, duals=result.certificate.duals,
                    certificate=result.certificate, status=status, solver=settings.algorithm.name,
                    seconds=result.seconds, history=result.history, account=account)
