"""A federation from its settings to its result: in this process, or over any runtime.

`federate` is for users whose data are here, `serve` for the server of a deployed federation, and
`write` gives its result as a run folder. None of them holds a part of an algorithm.

Rounds can be watched by other programs, as JSON lines, with TensorBoard or MLflow. A writer is a
function of a `Round`, so it serves as `progress` of any run:

    ct.federate(..., progress=writer("tensorboard:logs"))
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from coterie.base.errors import InvalidInput, interruptible, require, require_extra
from coterie.base.storage import json_ready, open_private, private_folder
from coterie.data.files import fingerprint
from coterie.data.users import Users
from coterie.federated.agreement import Carrier, agree
from coterie.federated.algorithms.base import Algorithm
from coterie.federated.algorithms.newton import Newton
from coterie.federated.fit import fit_federation
from coterie.federated.private.policy import Privacy
from coterie.federated.run import check_start, in_process, run_federation, run_path
from coterie.federated.runtimes.in_process import Faults, LocalNodes
from coterie.federated.session import Round
from coterie.federated.settings import Deployment, FederationSettings, complete
from coterie.fitting.result import Fit, TableSource
from coterie.fitting.settings import Settings
from coterie.losses import LOSSES, Loss
from coterie.output.runs import save
from coterie.problem.graph import Graph
from coterie.problem.solution import Solution

Writer = Callable[[Round], None]
_NUMBERS = ("objective", "gap", "estimate", "n_clusters", "asked", "answered", "bytes_up",
            "bytes_down", "seconds")


@overload
def federate(users: Users, loss: Loss | str | None = None, lam: Literal["auto"] = "auto", *,
             graph: Graph | str | None = None, weights: str = "unit",
             algorithm: Algorithm | None = None, participation: Any = 1.0, seed: int = 0,
             tol: float = 1e-6, max_rounds: int | None = None,
             start: npt.ArrayLike | Algorithm | Solution | None = None,
             holdout: Users | float | None = None, faults: Faults | None = None,
             patience: int | None = None, checkpoint: str | os.PathLike[str] | None = None,
             every: int = 1, settings: Settings | None = None, privacy: Privacy | None = None,
             progress: Callable[[Round], None] | None = None,
             held_out: Users | float | None = None) -> Fit: ...


@overload
def federate(users: Users, loss: Loss, lam: float, *,
             graph: Graph | str | None = None, weights: str = "unit",
             algorithm: Algorithm | None = None, participation: Any = 1.0, seed: int = 0,
             tol: float = 1e-6, max_rounds: int | None = None,
             start: npt.ArrayLike | Algorithm | Solution | None = None,
             holdout: Users | float | None = None, faults: Faults | None = None,
             patience: int | None = None, checkpoint: str | os.PathLike[str] | None = None,
             every: int = 1, settings: Settings | None = None, privacy: Privacy | None = None,
             progress: Callable[[Round], None] | None = None,
             held_out: Users | float | None = None) -> Solution: ...


def federate(users: Users, loss: Loss | str | None = None, lam: float | Literal["auto"] = "auto", *,
             graph: Graph | str | None = None, weights: str = "unit",
             algorithm: Algorithm | None = None, participation: Any = 1.0, seed: int = 0,
             tol: float = 1e-6, max_rounds: int | None = None,
             start: npt.ArrayLike | Algorithm | Solution | None = None,
             holdout: Users | float | None = None, faults: Faults | None = None,
             patience: int | None = None, checkpoint: str | os.PathLike[str] | None = None,
             every: int = 1, settings: Settings | None = None, privacy: Privacy | None = None,
             progress: Callable[[Round], None] | None = None,
             held_out: Users | float | None = None) -> Fit | Solution:
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
    holdout, held_out : rows of the same users on which models are scored, or the share of its rows
        that every user holds out; 0.2 by default with lam="auto". `held_out` is the earlier name.
    faults : what goes wrong on the way; nothing unless given.
    patience : queries in a row that a user may leave unanswered before it is set aside; None for
        100, and for no limit where half of all users or more are silent.
    checkpoint, every : a folder in which the run is saved every so many rounds; called again, the
        run continues.
    settings : of the fit with lam="auto"; the arguments `seed`, `tol`, `holdout` and `loss` come
        first.
    privacy : with lam="auto", what is promised to users: a `Privacy`. Nothing leaves them but noisy
        releases.
    progress : called after every round with a `Round`.

    Returns
    -------
    A `Fit` with lam="auto", a `Solution` with a number; both have an `account` of what it took.

    Raises
    ------
    InvalidInput : a setting that cannot be used, or a checkpoint of another run.
    Interrupted : on Ctrl-C; with a lam, its `best` is the run as far as it got. The
        checkpoint is kept.

    Example
    -------
    >>> import coterie as ct
    >>> from coterie.datasets import clustered
    >>> ct.federate(clustered("logistic", n_users=6, samples=20).users, ct.Logistic(),
    ...             lam=10.0).n_clusters
    1
    """
    holdout = held_out if holdout is None else holdout
    _check(lam, privacy, {"graph": graph, "algorithm": algorithm, "start": start,
                          "max_rounds": max_rounds, "patience": patience})
    graph, weights = (None, graph) if isinstance(graph, str) else (graph, weights)
    run = FederationSettings(lam=0.0 if isinstance(lam, str) else lam, weights=weights,
                             algorithm=algorithm or Newton(), participation=participation,
                             seed=seed, tol=tol, max_rounds=max_rounds, start=start,
                             patience=patience, checkpoint=checkpoint, every=every,
                             score=holdout is not None)
    if isinstance(lam, str):
        return _fit(users, loss, settings or Settings(), holdout, run, faults, privacy, progress)
    if not isinstance(loss, Loss):
        raise InvalidInput(f"with a given lam a loss such as Logistic() is needed, got {loss!r}",
                           remedy="Give one")
    check_start(start, run.algorithm, users.n_users)
    problem, runtime = in_process(users, loss, run, graph, holdout, faults)
    return run_federation(run.federation(problem.users, loss, problem.graph), run, runtime,
                          progress, problem)


def _check(lam: Any, privacy: Privacy | None, given: dict[str, Any]) -> None:
    if not isinstance(lam, str):
        require(privacy is None, "a private federation chooses its lam, because every question "
                "costs", "Leave lam out")
        return
    require(lam == "auto", f"lam must be a number >= 0, or 'auto', got {lam!r}", "Use auto")
    for name, value in given.items():
        require(value is None, f"{name} is for a given lam, and lam is 'auto'", "Give lam a number")


@interruptible()
def _fit(users: Users, loss: Loss | str | None, settings: Settings, holdout: Users | float | None,
         run: FederationSettings, faults: Faults | None, privacy: Privacy | None,
         progress: Callable[[Round], None] | None) -> Fit:
    if holdout is not None and not isinstance(holdout, (int, float)):
        raise InvalidInput("holdout must be a share of each user's rows where lam is 'auto'",
                           remedy="Use 0.2")
    if holdout and privacy is not None:
        raise InvalidInput("rows that are held out would need a budget of their own",
                           remedy="Leave holdout out; users can score their models at home")
    users.require_samples()
    share = settings.holdout if holdout is None else float(holdout)
    share = share if privacy is None else 0.0
    name, ridge = _named(loss, settings)
    settings = replace(settings, loss=name, ridge=ridge, seed=run.seed, tol=run.tol, holdout=share)
    deployment = Deployment(loss=name, ridge=ridge, standardize=str(settings.standardize),
                            holdout=share)
    nodes = LocalNodes([users], share, run.seed, faults)
    return fit_federation(nodes, deployment, settings, run, privacy, progress)


def _named(loss: Loss | str | None, settings: Settings) -> tuple[str, float]:
    """The name and the ridge of a loss."""
    if loss is None or isinstance(loss, str):
        return (settings.loss if loss is None else loss), settings.ridge
    name = next((name for name, kind in LOSSES.items() if type(loss) is kind), "")
    if not name or (loss.affine and not loss.intercept):
        raise InvalidInput(f"a fit makes its own loss, with an intercept, and {loss!r} is another "
                           "one", remedy="Give lam a number, or one of: " + ", ".join(LOSSES))
    return name, loss.ridge if loss.affine else settings.ridge


# -- deployed


@interruptible()
def serve(runtime: Carrier, deployment: Deployment,
          progress: Callable[[Round], None] | None = None) -> Fit | Solution:
    """Wait for the users, agree, run, certify; a run with a checkpoint continues where it was.

    Parameters
    ----------
    runtime : finds the users and carries the queries.
    deployment : the run configuration.
    progress : called after every round.

    Raises
    ------
    Incompatible : users who did not come, or nodes whose data do not fit together.
    InvalidInput : settings that cannot be used.
    Interrupted : on Ctrl-C, or when Flower stops the run; started again, it continues.
    """
    run, path = deployment.settings, None
    assert run.checkpoint is not None
    require(not run.algorithm.in_process,
            f"users of {run.algorithm!r} remember their edges between rounds, "
            "and nodes remember nothing", 'Use edge_state="server", which gives the same iterates')
    found: Fit | Solution
    if deployment.fit is not None:
        found = fit_federation(runtime, deployment, deployment.fit, run, deployment.privacy,
                               progress)
        agreement = agree(runtime, deployment, folder=Path(run.checkpoint))
    else:
        agreement = agree(runtime, deployment, folder=Path(run.checkpoint))
        runtime.use(agreement)
        federation = run.federation(agreement.participants, agreement.make_loss())
        path = None if run.lams is None else run_path(federation, run, runtime, progress)
        found = run_federation(federation, run, runtime, progress) if path is None else path.best()
    assert found.account is not None
    aside = {**agreement.refused, **found.account.aside}
    return replace(found, account=replace(found.account, agreement=agreement, path=path,
                                          aside=aside))


def describe(found: Fit | Solution) -> str:
    """What was found and what it took, in a line or two."""
    return str(found) if isinstance(found, Solution) else f"{found.why} {found.account}"


def write(found: Fit | Solution, out: Path, config: Mapping[str, Any]) -> None:
    """The result of `serve` as a run folder.

    Of a table with its recipe, and models in the table's own units; of a fit as `coterie fit`
    writes it, with the page.
    """
    assert found.account is not None
    path, agreement = found.account.path, found.account.agreement
    recipe, units, columns, shown = agreement.recipe, agreement.units, None, None
    if isinstance(found, Fit):
        if recipe is not None:
            table = _table_of(complete(config))
            if found.privacy is not None:  # who knows all rows but one would find it by trying
                table = replace(table, fingerprint="")
            found = replace(found, table=table)
        save.write_run(found, out)
        return
    more: dict[str, Any] = {}
    if path is not None:
        columns = {"lam": path.lams.tolist(), "n_clusters": path.n_clusters.tolist(),
                   "gap": path.gaps.tolist(), "held_out_loss": path.scores.tolist(),
                   "n_rounds": [one.n_rounds for one in path.runs],
                   "bytes": [one.ledger.bytes for one in path.runs]}
    if recipe is not None and units is not None:
        coefficients = units.coefficients(found.models)
        models = coefficients.reshape(len(coefficients), -1)
        first = np.unique(found.labels, return_index=True)[1]
        shown = save.Shown(models, models[first], save.model_columns(units, recipe.classes))
        more = {"task": recipe.task, "notes": list(recipe.notes), "recipe": recipe.to_json(),
                "units": json_ready(units.state())}
    save.write(out, found, config, shown=shown, path=columns, more=more)


def _table_of(config: Mapping[str, Any]) -> TableSource:
    """The table of a fit. A file is the table of all only where nodes take their parts of it."""
    one = bool(config["split"]) and Path(str(config["path"])).is_file()
    file = str(config["path"]) if one else ""
    names = {name: str(config[name])
             for name in ("user", "target", "features", "drop", "separator")}
    return TableSource(data=file, fingerprint=fingerprint(file) if file else "", **names)


def values(line: Round) -> dict[str, Any]:
    """A round as JSON knows it: no nan, no inf."""
    ready: dict[str, Any] = json_ready(line._asdict())
    return ready


def writer(spec: str) -> Writer:
    """A writer by name: "jsonl:FILE", "tensorboard:FOLDER", "mlflow" or "mlflow:URI"."""
    kind, _, where = spec.partition(":")
    require(kind in _WRITERS,
            f"unknown metrics {spec!r}", "Use jsonl:FILE, tensorboard:FOLDER or mlflow:URI")
    return _WRITERS[kind](where)


def _jsonl(where: str) -> Writer:
    path = Path(where or "rounds.jsonl")
    private_folder(path.parent)

    def write(line: Round) -> None:
        with open_private(path, "a") as file:
            file.write(json.dumps(values(line)) + "\n")

    return write


def _tensorboard(where: str) -> Writer:
    with require_extra("tensorboardX", "metrics", "Writing for TensorBoard"):
        from tensorboardX import SummaryWriter
    # It writes in another thread: close it at the end.
    board = SummaryWriter(where or "logs", flush_secs=1)
    atexit.register(board.close)

    def write(line: Round) -> None:
        for name, value in values(line).items():
            if name in _NUMBERS and value is not None:
                board.add_scalar(f"coterie/{name}", value, line.iteration)

    return write


def _mlflow(where: str) -> Writer:
    with require_extra("mlflow-skinny", "metrics", "Writing for MLflow"):
        import mlflow
    if where:
        mlflow.set_tracking_uri(where)

    def write(line: Round) -> None:
        numbers = {name: float(value) for name, value in values(line).items() if name in _NUMBERS
                   and value is not None}
        mlflow.log_metrics(numbers, step=line.iteration)

    return write


_WRITERS: dict[str, Callable[[str], Writer]] = {"jsonl": _jsonl, "tensorboard": _tensorboard,
                                                "mlflow": _mlflow}
