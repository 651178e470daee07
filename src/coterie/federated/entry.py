"""`federate`: a federation with all users in this process, with a given lam or with nothing to choose."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy.typing as npt

from coterie.data.users import Users
from coterie.errors import InvalidInput, interruptible
from coterie.federated.algorithms.base import Algorithm
from coterie.federated.algorithms.newton import Newton
from coterie.federated.algorithms.participation import Participation
from coterie.federated.config import DataSettings
from coterie.federated.driver import Round
from coterie.federated.fit import Carriage, FederatedFit, fit_federation
from coterie.federated.run import Federated, in_process, run_federation, state_of
from coterie.federated.runtimes.in_process import Faults
from coterie.federated.runtimes.nodes import LocalNodes
from coterie.federated.settings import FederationSettings
from coterie.fitting.settings import Settings
from coterie.graph import Graph
from coterie.losses import LOSSES, AffineLoss, Loss


def federate(users: Users, loss: Loss | str | None = None, lam: float | Literal["auto"] = "auto", *,
             graph: Graph | str | None = None, weights: str = "unit",
             algorithm: Algorithm | None = None, participation: Any = 1.0, seed: int = 0, tol: float = 1e-6,
             max_rounds: int | None = None, start: npt.ArrayLike | Algorithm | Federated | None = None,
             held_out: Users | float | None = None, faults: Faults | None = None, patience: int | None = None,
             checkpoint: str | os.PathLike[str] | None = None, every: int = 1, settings: Settings | None = None,
             progress: Callable[[Round], None] | None = None) -> Any:
    """Learn in a federation: the server receives replies to its queries, never the data.

    Without lam, everything is chosen as in `coterie fit`: groups, what users share, and lam. Answers are the same
    whoever takes part in which round, and so is the result. With a lam, problem (C) is solved by the algorithm.

    Parameters
    ----------
    users : their data; each user's rows are used only to reply for this user.
    loss : of all users. Without lam it may be a name, or omitted: then it is logistic for targets -1 and 1, squared
        for other targets, and squared distance without targets; of a loss, its kind and its ridge are used.
    lam : penalty strength, as for `Problem`, or "auto".
    graph : pairs and their weights; None for all pairs with weight 1.
    weights : "wald", "gaussian" or "inverse" makes the graph from one round of local models; a name given as `graph`
        means the same.
    algorithm : Newton() unless given; Splitting(), PDMM(), FedAvg(), SquaredPenalty().
    participation : who is asked in a round: a share (0.4), a number (12), an array of who is available when
        (n_rounds, n_users), or a `Participation`.
    seed : of everything random; the same seed gives the same result.
    tol : the certified relative gap at which the run ends.
    max_rounds : rounds after which it ends in any case; the algorithm's own limit unless given.
    start : models to start from, (dim,) or (n_users, dim); an algorithm that finds them, such as FedAvg(); or a run of
        the same users and algorithm at another lam. Zero unless given.
    held_out : rows of the same users, in the same order, on which each user's model is scored at the end; or the share
        of its rows that every user holds out, 0.2 by default where lam is "auto".
    faults : what goes wrong on the way; nothing unless given.
    patience : how many queries in a row a user may leave unanswered before it is excluded; None for no limit.
    checkpoint : a folder in which the run is saved every `every` rounds. Called again with the same folder and
        settings, the run continues where it was.
    every : rounds between two saves.
    settings : of the fit, where lam is "auto"; `seed`, `tol`, `held_out` and `loss` come first.
    progress : called after every round with a `Round`.

    Returns
    -------
    FederatedFit : where lam is "auto", a `Fit` with the rounds and the ledger.
    Federated : with a lam, a `Solution` with the rounds, the ledger and the scores.

    Raises
    ------
    InvalidInput : a setting that cannot be used, or a checkpoint of another run.
    Interrupted : on Ctrl-C; with a lam, its `best` is the `Federated` run as far as it got. The checkpoint is kept.

    Example
    -------
    >>> import coterie as ct
    >>> from coterie.datasets import clustered
    >>> users = clustered("logistic", n_users=6, samples=20, seed=0).users
    >>> run = ct.federate(users, ct.Logistic(), lam=10.0, participation=0.5)
    >>> run.status.name, run.n_clusters
    ('CONVERGED', 1)
    """
    if isinstance(lam, str):
        if lam != "auto":
            raise InvalidInput(f"lam must be a number >= 0, or 'auto', got {lam!r}", remedy="Use auto")
        given = {"graph": graph, "algorithm": algorithm, "start": start, "max_rounds": max_rounds, "patience": patience}
        for name, value in given.items():
            if value is not None:
                raise InvalidInput(f"{name} is for a given lam, and lam is 'auto'", remedy="Give lam a number")
        carriage = Carriage(participation=Participation.of(participation), seed=seed, checkpoint=checkpoint,
                            progress=progress)
        return _fit(users, loss, settings or Settings(), held_out, seed, tol, faults, carriage)
    if not isinstance(loss, Loss):
        raise InvalidInput(f"with a given lam a loss such as Logistic() is needed, got {loss!r}", remedy="Give one")
    graph, weights = (None, graph) if isinstance(graph, str) else (graph, weights)
    algorithm = Newton() if algorithm is None else algorithm
    run = FederationSettings(
        lam=lam, weights=weights, algorithm=algorithm, participation=participation, seed=seed, tol=tol,
        max_rounds=max_rounds, start=state_of(start, algorithm, users.n_users), patience=patience,
        checkpoint=checkpoint, every=every, score=held_out is not None)
    problem, runtime = in_process(users, loss, run, graph, held_out, faults)
    return run_federation(run.federation(problem.users, loss, problem.graph), run, runtime, progress, problem)


@interruptible()
def _fit(users: Users, loss: Loss | str | None, settings: Settings, held_out: Users | float | None, seed: int,
         tol: float, faults: Faults | None, carriage: Carriage) -> FederatedFit:
    if held_out is not None and not isinstance(held_out, (int, float)):
        raise InvalidInput("held_out must be a share of each user's rows where lam is 'auto'", remedy="Use 0.2")
    users.require_samples()
    share = settings.holdout if held_out is None else float(held_out)
    name, ridge = _named(loss, settings)
    settings = replace(settings, loss=name, ridge=ridge, seed=seed, tol=tol, holdout=share)
    return fit_federation(LocalNodes([users], share, seed, faults), DataSettings(
        loss=name, ridge=ridge, standardize=str(settings.standardize), held_out=share), settings, carriage)


def _named(loss: Loss | str | None, settings: Settings) -> tuple[str, float]:
    """The name and the ridge of a loss."""
    if loss is None or isinstance(loss, str):
        return (settings.loss if loss is None else loss), settings.ridge
    name = next((name for name, kind in LOSSES.items() if type(loss) is kind), "")
    if not name or (isinstance(loss, AffineLoss) and not loss.intercept):
        raise InvalidInput(f"a fit makes its own loss, with an intercept, and {loss!r} is another one",
                           remedy="Give lam a number, or one of: " + ", ".join(LOSSES))
    return name, loss.ridge if isinstance(loss, AffineLoss) else settings.ridge
