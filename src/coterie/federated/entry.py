"""`federate`: a federation with all users in this process, with a given lam or with nothing to
choose.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy.typing as npt

from coterie.base.errors import InvalidInput, interruptible
from coterie.data.users import Users
from coterie.federated.algorithms.base import Algorithm, Participation
from coterie.federated.algorithms.newton import Newton
from coterie.federated.config import DataSettings
from coterie.federated.fit import Carriage, fit_federation
from coterie.federated.private.federation import fit_privately
from coterie.federated.private.policy import Privacy
from coterie.federated.run import check_start, in_process, run_federation
from coterie.federated.runtimes.in_process import Faults
from coterie.federated.runtimes.nodes import LocalNodes
from coterie.federated.session import Round
from coterie.federated.settings import FederationSettings
from coterie.fitting.result import Fit
from coterie.fitting.settings import Settings
from coterie.losses import LOSSES, AffineLoss, Loss
from coterie.problem.graph import Graph
from coterie.problem.solution import Solution


def federate(users: Users, loss: Loss | str | None = None, lam: float | Literal["auto"] = "auto", *,
             graph: Graph | str | None = None, weights: str = "unit",
             algorithm: Algorithm | None = None, participation: Any = 1.0, seed: int = 0,
             tol: float = 1e-6, max_rounds: int | None = None,
             start: npt.ArrayLike | Algorithm | Solution | None = None,
             held_out: Users | float | None = None, faults: Faults | None = None,
             patience: int | None = None, checkpoint: str | os.PathLike[str] | None = None,
             every: int = 1, settings: Settings | None = None, privacy: Privacy | None = None,
             progress: Callable[[Round], None] | None = None) -> Any:
    """Learn in a federation: the server receives replies to its queries, never the data.

    Parameters
    ----------
    users : their data; each user's rows are used only to reply for this user.
    loss : of all users. With lam="auto" it may be a name, or omitted: logistic for targets -1 and
        1, squared for other targets, squared distance without targets; of a loss, its kind and its
        ridge are used.
    lam : "auto" chooses everything as `coterie fit` does; or a penalty strength, with which problem
        (C) is solved.
    graph, weights : pairs and their weights; all pairs with weight 1 unless given. "wald",
        "gaussian" or "inverse" makes the graph from one round of local models.
    algorithm : Newton() unless given; Splitting(), PDMM(), FedAvg(), SquaredPenalty().
    participation : who is asked in a round: a share (0.4), a number (12), an array of who is
        available when (n_rounds, n_users), or a `Participation`. With lam="auto" the result does
        not depend on it.
    seed : of everything random; the same seed gives the same result.
    tol, max_rounds : the certified relative gap, and the number of rounds, at which the run ends.
    start : models to start from, an algorithm that finds them, or a run at another lam. Zero unless
        given.
    held_out : rows of the same users on which models are scored, or the share of its rows that
        every user holds out; 0.2 by default with lam="auto".
    faults : what goes wrong on the way; nothing unless given.
    patience : how many queries in a row a user may leave unanswered before it is excluded; None for
        no limit.
    checkpoint, every : a folder in which the run is saved every so many rounds; called again, the
        run continues.
    settings : of the fit with lam="auto"; the arguments `seed`, `tol`, `held_out` and `loss` come
        first.
    privacy : with lam="auto", what is promised to users: a `Privacy`. Nothing leaves them but noisy
        releases.
    progress : called after every round with a `Round`.

    Returns
    -------
    A `Fit` with lam="auto"; a `Solution`
    with a number. Both have an `account` of what it took.

    Raises
    ------
    InvalidInput : a setting that cannot be used, or a checkpoint of another run.
    Interrupted : on Ctrl-C; with a lam, its `best` is the `Federated` run as far as it got. The
        checkpoint is kept.

    Example
    -------
    >>> import coterie as ct
    >>> from coterie.datasets import clustered
    >>> ct.federate(clustered("logistic", n_users=6, samples=20).users, ct.Logistic(),
    ...             lam=10.0).n_clusters
    1
    """
    _check(lam, privacy, {"graph": graph, "algorithm": algorithm, "start": start,
                          "max_rounds": max_rounds, "patience": patience})
    if isinstance(lam, str):
        carriage = Carriage(participation=Participation.of(participation), seed=seed,
                            checkpoint=checkpoint, progress=progress)
        return _fit(users, loss, settings or Settings(), held_out, (seed, tol), faults, carriage,
                    privacy)
    graph, weights = (None, graph) if isinstance(graph, str) else (graph, weights)
    run = FederationSettings(lam=lam, weights=weights, algorithm=algorithm or Newton(),
                             participation=participation, seed=seed, tol=tol, max_rounds=max_rounds,
                             start=start, patience=patience, checkpoint=checkpoint, every=every,
                             score=held_out is not None)
    return _solve(users, loss, run, graph, held_out, faults, progress)


def _check(lam: Any, privacy: Privacy | None, given: dict[str, Any]) -> None:
    if not isinstance(lam, str):
        if privacy is not None:
            raise InvalidInput("a private federation chooses its lam, because every question costs",
                               remedy="Leave lam out")
        return
    if lam != "auto":
        raise InvalidInput(f"lam must be a number >= 0, or 'auto', got {lam!r}", remedy="Use auto")
    for name, value in given.items():
        if value is not None:
            raise InvalidInput(f"{name} is for a given lam, and lam is 'auto'",
                               remedy="Give lam a number")


def _solve(users: Users, loss: Any, settings: FederationSettings, graph: Graph | None,
           held_out: Users | float | None,
           faults: Faults | None, progress: Callable[[Round], None] | None) -> Solution:
    if not isinstance(loss, Loss):
        raise InvalidInput(f"with a given lam a loss such as Logistic() is needed, got {loss!r}",
                           remedy="Give one")
    check_start(settings.start, settings.algorithm, users.n_users)
    problem, runtime = in_process(users, loss, settings, graph, held_out, faults)
    return run_federation(settings.federation(problem.users, loss, problem.graph), settings,
                          runtime, progress, problem)


@interruptible()
def _fit(users: Users, loss: Loss | str | None, settings: Settings, held_out: Users | float | None,
         numbers: tuple[int, float], faults: Faults | None, carriage: Carriage,
         privacy: Privacy | None) -> Fit:
    if held_out is not None and not isinstance(held_out, (int, float)):
        raise InvalidInput("held_out must be a share of each user's rows where lam is 'auto'",
                           remedy="Use 0.2")
    if held_out and privacy is not None:
        raise InvalidInput("rows that are held out would need a budget of their own",
                           remedy="Leave held_out out; users can score their models at home")
    users.require_samples()
    (seed, tol), share = numbers, settings.holdout if held_out is None else float(held_out)
    share = share if privacy is None else 0.0
    name, ridge = _named(loss, settings)
    settings = replace(settings, loss=name, ridge=ridge, seed=seed, tol=tol, holdout=share)
    nodes, data = LocalNodes([users], share, seed, faults), DataSettings(
        loss=name, ridge=ridge, standardize=str(settings.standardize), held_out=share)
    return (fit_federation(nodes, data, settings, carriage) if privacy is None
            else fit_privately(nodes, data, settings, privacy, carriage))


def _named(loss: Loss | str | None, settings: Settings) -> tuple[str, float]:
    """The name and the ridge of a loss."""
    if loss is None or isinstance(loss, str):
        return (settings.loss if loss is None else loss), settings.ridge
    name = next((name for name, kind in LOSSES.items() if type(loss) is kind), "")
    if not name or (isinstance(loss, AffineLoss) and not loss.intercept):
        raise InvalidInput(f"a fit makes its own loss, with an intercept, and {loss!r} is another "
                           "one", remedy="Give lam a number, or one of: " + ", ".join(LOSSES))
    return name, loss.ridge if isinstance(loss, AffineLoss) else settings.ridge
