"""One federated run: over any runtime, and with all users in this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from coterie.base.errors import InvalidInput, interruptible
from coterie.data.users import Users
from coterie.federated.algorithms.base import Algorithm, Federation
from coterie.federated.algorithms.proof import Proof
from coterie.federated.client import Data
from coterie.federated.runtimes.in_process import Faults, LocalRuntime, Runtime
from coterie.federated.session import Round
from coterie.federated.settings import FederationSettings
from coterie.federated.stages import Stages
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
    run = Stages(federation, settings, runtime, progress)
    with interruptible(lambda: finish(run, problem, interrupted=True)):
        run.run()
        return finish(run, problem)


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


def check_start(start: Any, algorithm: Algorithm, n_users: int) -> None:
    """Refuse to start from a run of another kind.

    Raises
    ------
    InvalidInput : it is by another algorithm, or of another number of users.
    """
    if not isinstance(start, Solution) or start.account is None:
        return
    if start.solver != algorithm.name or len(start.state.asked) != n_users:
        raise InvalidInput(f"the run to start from is by {start.solver} with "
                           f"{len(start.state.asked)} users, this one by {algorithm.name} with "
                           f"{n_users}", remedy="Give start=run.models instead")


def finish(run: Stages, problem: Problem | None = None, *, interrupted: bool = False) -> Solution:
    """The result of a run; where the data are in this process, with the problem that has them."""
    session, state, federation, settings = run.session, run.state, run.federation, run.settings
    active, names, history = ~state.aside, federation.names, tuple(session.history)
    if problem is None:
        solved = federation.problem(active)
    elif active.all() and problem.graph is federation.graph and problem.lam == federation.lam:
        solved = problem
    else:
        solved = Problem(problem.users.take(active), problem.loss, federation.lam,
                         federation.graph if active.all() else federation.graph.take(active))
    proof, proven = Proof(federation), run.proof()
    certificate = proof.certificate(proven)
    status = (Status.CONVERGED if certificate.relative_gap <= settings.tol else
              Status.INTERRUPTED if interrupted else
              Status.UNANSWERED if not proof.finished(proven) else
              Status.INACCURATE if np.isfinite(certificate.bound) else Status.NO_BOUND)
    reasons = {user: reason for _, user, reason in session.refused}
    aside = {names[user]: reasons[user] for user in np.flatnonzero(state.aside).tolist()}
    account = Account(ledger=session.ledger, history=history, refusals=session.refusals,
                      aside=aside, scores=run.now.scores, state=state, federation=federation)
    return Solution(problem=solved, models=proven.now[active], duals=certificate.duals,
                    certificate=certificate, status=status, solver=settings.algorithm.name,
                    seconds=time.perf_counter() - session.began, history=history, account=account)
