"""Federated runs at a given lam, and along lambda: over any runtime, and with all users in this
process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.base.errors import InvalidInput, interruptible, require
from coterie.base.types import Array
from coterie.convex.choice import best_mean
from coterie.convex.consensus import lam_max
from coterie.convex.path import Path
from coterie.data.users import Users
from coterie.federated.algorithms.base import Algorithm, Federation, Runtime
from coterie.federated.algorithms.newton import Newton, NewtonState
from coterie.federated.algorithms.proof import Proof
from coterie.federated.client import Data
from coterie.federated.runtimes.in_process import Faults, LocalRuntime
from coterie.federated.session import Round
from coterie.federated.settings import FederationSettings
from coterie.federated.stages import Stages
from coterie.losses import Loss
from coterie.problem.account import Account
from coterie.problem.graph import Graph
from coterie.problem.problem import Problem
from coterie.problem.solution import Solution, Status

_SEARCHES = 8  # for the smallest lam at which all users share one model

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
               holdout: Users | float | None = None,
               faults: Faults | None = None) -> tuple[Problem, LocalRuntime]:
    """The problem of users whose data are in this process, and the runtime that asks them."""
    if isinstance(holdout, (int, float)):
        users, _, holdout = users.hold_out(holdout, seed=settings.seed)
    if holdout is not None and holdout.names != users.names:
        raise InvalidInput("the held-out rows are of other users, or in another order",
                           remedy="Use users.split(...), which keeps all users in order")
    problem = Problem(users, loss, settings.lam, graph)  # type: ignore[arg-type]  # None: all pairs
    return problem, LocalRuntime(Data(loss, problem.samples, holdout), faults)


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


@dataclass(frozen=True, kw_only=True, eq=False)
class FederatedPath(Path):
    """A `Path` of runs from the largest lam to the smallest, each started from the one before.

    Parameters
    ----------
    problem, solutions, tol, solver : as of every `Path`, at decreasing lams; every solution has the
        account of its run.
    spent : the runs that found the largest lam, where it was not given.

    Example
    -------
    >>> import coterie as ct
    >>> users = ct.Users.from_arrays([[0.0], [1.0], [9.0]])
    >>> path = ct.federate_path(users, ct.SquaredDistance(), lams=[9.0, 1.0, 0.1])
    >>> path.n_clusters.tolist()
    [1, 2, 3]
    """

    spent: tuple[Solution, ...] = field(repr=False, default=())

    @property
    def runs(self) -> tuple[Solution, ...]:
        """The solutions, one for each lam."""
        return self.solutions

    @property
    def n_rounds(self) -> int:
        """The number of rounds of all runs together."""
        return sum(run.n_rounds for run in (*self.spent, *self.runs))

    @property
    def bytes(self) -> int:
        """What was sent in all runs, up and down."""
        return sum(run.ledger.bytes for run in (*self.spent, *self.runs))

    @property
    def scores(self) -> Array:
        """(n_lams,) the mean over users of their mean held-out loss; nan where nothing was held
        out.
        """
        return np.array([np.nan if run.scores is None else _means(run.scores).mean()
                         for run in self.runs])

    def __repr__(self) -> str:
        lams, counts = self.lams, self.n_clusters
        return (f"FederatedPath({len(self)} lams from {lams[0]:.4g} to {lams[-1]:.4g}, "
                f"{counts[0]} -> {counts[-1]} groups, {self.n_rounds} rounds, "
                f"{self.bytes:,} bytes)")

    def best(self, one_standard_error: bool = True) -> Solution:
        """The run with the least held-out loss, or the one with the fewest groups within one
        standard error of it.

        Parameters
        ----------
        one_standard_error : whether fewer groups are preferred within one standard error.

        Returns
        -------
        The run.

        Raises
        ------
        InvalidInput : no rows were held out.

        Example
        -------
        >>> import coterie as ct
        >>> from coterie.datasets import clustered
        >>> users = clustered("squared", n_users=6, n_clusters=2, samples=20, seed=0).users
        >>> path = ct.federate_path(users, ct.Squared(ridge=1e-3), [10.0, 0.1], holdout=0.3)
        >>> path.best().lam in path.lams
        True
        """
        require(not any(run.scores is None for run in self.runs),
                "nothing was held out along this path", "Give federate_path(..., holdout=rows)")
        losses = np.stack([_means(run.scores) for run in self.runs])
        return self.runs[best_mean(losses, self.n_clusters, one_standard_error)]


def _means(scores: Array) -> Array:
    held = scores[:, 2] > 0
    return np.asarray(scores[held, 0] / scores[held, 2])


def federate_path(users: Users, loss: Loss, lams: npt.ArrayLike | None = None, *, n_lams: int = 10,
                  ratio: float = 1e-2, graph: Graph | str | None = None,
                  holdout: Users | float | None = None, faults: Faults | None = None,
                  progress: Callable[[Round], None] | None = None,
                  **settings: Any) -> FederatedPath:
    """Runs at several lams, from the largest to the smallest, each started from the one before.

    Parameters
    ----------
    users, loss, graph : the problem, as for `federate`; weights are made once.
    lams : the penalty strengths; without them, n_lams from the smallest at which all users share
        one model, found by some rounds of Newton's method, down to `ratio` of it.
    n_lams, ratio : how many lams, and the smallest divided by the largest, where none are given.
    holdout : as for `federate`; with rows held out, `.best()` chooses.
    faults, progress : as for `federate`.
    settings : other fields of `FederationSettings`, such as algorithm, weights or checkpoint; a
        checkpoint has a folder for every run.

    Returns
    -------
    FederatedPath

    Raises
    ------
    InvalidInput : a setting that cannot be used, or a checkpoint of another run.
    Interrupted : on Ctrl-C; its `best` is the FederatedPath of the runs that were finished, None
        before the first.

    Example
    -------
    >>> import coterie as ct
    >>> from coterie.datasets import clustered
    >>> users = clustered("logistic", n_users=6, samples=20, seed=0).users
    >>> path = ct.federate_path(users, ct.Logistic(), [0.01, 10.0], tol=1e-4)
    >>> min(run.n_clusters for run in path.runs)
    1
    """
    graph, kinds = (None, {"weights": graph}) if isinstance(graph, str) else (graph, {})
    holdout = settings.pop("held_out", holdout)  # the name of earlier versions
    algorithm = settings.pop("algorithm", None) or Newton()
    start = settings.pop("start", None)
    check_start(start, algorithm, users.n_users)
    given: Any = "auto" if lams is None else np.asarray(lams, dtype=float).ravel()
    chosen = FederationSettings(lams=given, n_lams=n_lams, ratio=ratio, algorithm=algorithm,
                                start=start, score=holdout is not None, **settings | kinds)
    problem, runtime = in_process(users, loss, chosen, graph, holdout, faults)
    return run_path(chosen.federation(problem.users, loss, problem.graph), chosen, runtime,
                    progress, problem)


def run_path(federation: Federation, settings: FederationSettings, runtime: Runtime,
             progress: Callable[[Round], None] | None = None,
             problem: Problem | None = None) -> FederatedPath:
    """The runs of a path over any runtime, one after the other.

    Parameters
    ----------
    federation, settings, runtime, progress, problem : as for `run_federation`; `settings.lams` says
        which runs.

    Raises
    ------
    Interrupted : on Ctrl-C; its `best` is the FederatedPath of the runs that were finished, None
        before the first.
    """
    spent, runs = list[Solution](), list[Solution]()

    def run(lam: float, name: str, **changes: Any) -> Solution:
        before = (spent + runs)[-1] if spent or runs else None
        graph = federation.graph if before is None else before.federation.graph
        if before is not None:
            changes["weights"] = "unit"  # the graph is made once
            changes["start"] = before if runs or settings.start is None else settings.start
        folder = None if settings.checkpoint is None else FilePath(settings.checkpoint) / name
        runtime.begin(name)
        one = settings.replace(lam=lam, lams=None, checkpoint=folder, **changes)
        return run_federation(replace(federation, lam=lam, graph=graph), one, runtime, progress,
                              problem)

    def path() -> FederatedPath:
        return FederatedPath(problem=runs[0].problem, solutions=tuple(runs), tol=settings.tol,
                             solver=settings.algorithm.name, spent=tuple(spent))

    with interruptible(lambda: path() if runs else None):
        lams = settings.lams
        if lams is None or isinstance(lams, str):
            # 1. The smallest lam at which all users share one model.
            spent.append(run(1.0, "first", algorithm=Newton(), score=False))
            lam = together(spent[-1])
            for k in range(_SEARCHES):
                spent.append(run(lam, f"together-{k}", algorithm=Newton(), score=False))
                n_parts = int(spent[-1].problem.graph.components.max()) + 1
                smallest = together(spent[-1])
                if spent[-1].n_clusters == n_parts and smallest <= lam * (1 + 1e-3):
                    break
                lam = smallest
            # 2. The others lie below it.
            lams = tuple((lam * np.geomspace(1.0, settings.ratio, settings.n_lams)).tolist())
        for k, lam in enumerate(lams):
            runs.append(run(lam, f"lam-{k:02d}"))
    return path()


def together(run: Solution) -> float:
    """The smallest lam at which all users share one model, estimated from the users' last replies.
    """
    state = run.state
    require(isinstance(state, NewtonState),
            f"second-order models come from Newton's method, and this run is by {run.solver}")
    active = ~state.aside
    forms = state.forms.take(active)
    curvature = forms.traces().mean() / run.problem.dim
    forms = forms.shifted(np.full(int(active.sum()), 1e-9 * max(float(curvature), 1e-300)))
    loss = forms.quadratic(state.points[active], state.values[active], state.gradients[active])
    return lam_max(Problem(run.problem.users, loss, 0.0, run.problem.graph), rtol=1e-3).upper
