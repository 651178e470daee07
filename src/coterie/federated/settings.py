"""What can be chosen about a federation, and about its deployment: one object each, and one name
for each choice.

The Python keyword `max_rounds` is the option `--max-rounds` of the command and the key `max-rounds`
of a run configuration. `federate`, `federate_path`, the command and the Flower ServerApp all make a
`FederationSettings`; a run configuration is a `Deployment` as texts, numbers and truth values. TOML
has no None, so an empty text, and 0 where 0 makes no sense, stand for the default, which may depend
on `lam`. `CONFIG` lists every key with its default.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from coterie.base.errors import InvalidInput, require
from coterie.data.summary import TASKS
from coterie.data.users import Participants
from coterie.federated.algorithms import ALGORITHMS
from coterie.federated.algorithms.base import (
    Algorithm,
    Federation,
    Participation,
    check_seed_and_patience,
)
from coterie.federated.algorithms.newton import Newton
from coterie.federated.private.policy import Privacy, parse_clip
from coterie.fitting.settings import Settings
from coterie.losses import Loss
from coterie.problem.graph import Graph
from coterie.problem.problem import check_lam
from coterie.problem.weights import KINDS

_SCALED = {"auto": None, "true": True, "false": False}
#: Keys of version 0.1, and what they are called now.
RENAMED = {"rounds": "max-rounds", "users": "n-users"}
# Keys with two names, of which the first is that of messages to nodes of all versions.
_SAME = {"held-out": "holdout"}


@dataclass(frozen=True, kw_only=True, eq=False)
class FederationSettings:
    """All choices of a federated run, or of a path of them.

    Parameters
    ----------
    algorithm : Newton(), Splitting(), PDMM(), FedAvg() or SquaredPenalty().
    lam : penalty strength, as in `Problem`.
    lams : several penalty strengths, solved from the largest to the smallest; "auto" takes `n_lams`
        of them, from the smallest at which all users share one model down to `ratio` of it; None
        for the one `lam`.
    n_lams, ratio : of lams="auto".
    weights : "unit", weight 1 for all pairs of users; or "wald", "gaussian", "inverse": the nearest
        users of each user, from one round of local models, as in `adaptive_graph` ("auto" is
        "wald").
    participation : who is asked in a round: a share (0.4), a number (12), an array of who is
        available when (n_rounds, n_users), or a `Participation`.
    seed : of everything random; the same seed gives the same result.
    tol : the certified relative gap at which the run ends.
    max_rounds : rounds after which it ends in any case; None for the algorithm's own limit.
    patience : queries in a row that a user may leave unanswered before it is set aside; None for
        no limit.
    start : models to start from, (dim,) or (n_users, dim); an algorithm that finds them; or the
        state of a run of the same algorithm. Zero models unless given.
    score : whether every user scores its model at the end, on rows that it holds out.
    checkpoint : a folder in which the run is saved; started again with the same folder and
        settings, it continues.
    every : how many rounds lie between two saves.

    Raises
    ------
    InvalidInput : a value that cannot be used.

    Example
    -------
    >>> FederationSettings(lam=0.1, participation=0.4).participation.fraction
    0.4
    """

    algorithm: Algorithm = field(default_factory=Newton)
    lam: float = 0.02
    lams: tuple[float, ...] | Literal["auto"] | None = None
    n_lams: int = 10
    ratio: float = 1e-2
    weights: str = "unit"
    participation: Any = 1.0
    seed: int = 0
    tol: float = 1e-6
    max_rounds: int | None = None
    patience: int | None = None
    start: Any = None
    score: bool = False
    checkpoint: str | os.PathLike[str] | None = None
    every: int = 1

    def __post_init__(self) -> None:
        require(isinstance(self.algorithm, Algorithm),
                f"expected an algorithm such as Newton(), got {self.algorithm!r}",
                "Create it by calling its class; coterie.ALGORITHMS lists them")
        require(self.weights in KINDS,
                f"unknown weights {self.weights!r}", f"Choose one of: {', '.join(KINDS)}")
        require(np.isfinite(self.tol) and self.tol > 0,
                f"tol must be a finite number > 0, got {self.tol!r}", "Use for example 1e-6")
        if self.max_rounds is not None and self.max_rounds < 1:
            raise InvalidInput(f"max_rounds must be at least 1, got {self.max_rounds!r}",
                               remedy="Leave it at None")
        if self.every < 1:
            raise InvalidInput(f"every must be at least 1 round, got {self.every!r}",
                               remedy="Use 1")
        if isinstance(self.start, str):
            raise InvalidInput(f"start must be models or an algorithm, got {self.start!r}",
                               remedy="Leave it out to start from zero, or give FedAvg()")
        check_seed_and_patience(self.seed, self.patience)
        object.__setattr__(self, "lam", check_lam(self.lam))
        object.__setattr__(self, "participation", Participation.of(self.participation))
        self._check_path()

    def _check_path(self) -> None:
        if self.n_lams < 1 or not 0 < self.ratio < 1:
            raise InvalidInput("n_lams must be at least 1 and ratio in (0, 1), got "
                               f"{self.n_lams!r} and {self.ratio!r}",
                               remedy="Use for example 10 and 0.01")
        if self.lams is None or (isinstance(self.lams, str) and self.lams == "auto"):
            return
        lams = [check_lam(lam) for lam in np.asarray(self.lams, dtype=float).ravel().tolist()]
        require(lams, "there are no lams", "Give at least one, or leave them out")
        object.__setattr__(self, "lams", tuple(sorted(lams, reverse=True)))

    def replace(self, **changes: Any) -> Self:
        """The same settings but for these."""
        return replace(self, **changes)

    def federation(self, users: Participants, loss: Loss, graph: Graph | None = None) -> Federation:
        """The federation of these users with these settings; on all pairs of them unless a graph is
        given.

        Raises
        ------
        InvalidInput : availability given for another number of users.
        """
        self.participation.available(0, users.n_users)
        return Federation(names=users.names, features=users.feature_names, dim=loss.dim(users),
                          loss=loss, lam=self.lam,
                          graph=Graph.complete(users.n_users) if graph is None else graph,
                          participation=self.participation, seed=self.seed, patience=self.patience)


@dataclass(frozen=True, kw_only=True, eq=False)
class Deployment:
    """A run configuration: where the users' data are, what is made of them, how the server runs.

    The server sends `FOR_NODES` to every node; what a node's owner says in its node configuration
    comes first. A table takes the road of `coterie fit`: its recipe and scaling are agreed by all
    nodes, and its loss follows from the task. Prepared numbers (`npz`, `dataset`, a function that
    returns Users) are used as they are.

    Parameters
    ----------
    algorithm, algorithm_options : with a given lam, a name in ALGORITHMS, and its settings as JSON.
    lam, lams : "auto", a number, or several as text; see `FederationSettings`.
    n_lams, ratio, weights, participation, tol, max_rounds, patience, seed : see
        `FederationSettings`.
    max_groups, count, average, curves, scale : of a fit; see `Settings`.
    checkpoint, every : a folder, by default in `out`; how many rounds lie between two saves.
    n_users : how many users to wait for before the first round; 0 for those there at the start.
    max_users : how many users one node may hold; a node that says it holds more is set aside.
    wait : seconds to wait for them.
    round_timeout : seconds a round may last.
    poll : seconds between two looks for replies.
    out : folder for the results.
    metrics : where else rounds are written: tensorboard:FOLDER, mlflow:URI, jsonl:FILE.
    sites : a file with the names of nodes, which `coterie federate start` keeps.
    join : the folder of a finished run that newcomers join, instead of a run; `out` then gets
        joined.csv.
    data : "csv", "parquet", "npz", "dataset", or "module:function", which on Flower only the owner
        of a node names.
    path : the file; {partition} in it is replaced by the node's partition-id.
    user, target : columns of a table: the owner of a row, and what is to be predicted.
    features, drop : columns of a table to learn from, and to leave out, separated by commas.
    separator : between the cells of a CSV file; detected if empty.
    min_count : levels of a table's columns with fewer rows at a node are pooled before the node
        sends them.
    split : whether a node takes only its part: every num-partitions-th user, from the
        partition-id-th.
    dataset, dataset_options : of data="dataset": "ellipses" or "clustered", and its arguments as
        JSON.
    task : of a table: "auto", or one of TASKS.
    loss : "auto", or a name in LOSSES; for prepared numbers also the "module:name" that the owners
        of all nodes name.
    loss_options : settings of the loss as JSON, for prepared numbers.
    ridge : of a table's loss: L2 strength, intercept included.
    standardize : "true", "false", or "auto": tables are standardised, prepared numbers are not.
    holdout : the share of its rows that every user holds out to score its model; "auto" for that of
        a fit.
    epsilon, delta : what is promised to users, see `Privacy`; 0 for no noise.
    clip : public bounds of columns as text, for example "age=0:100, sex=f|m, y=0:1", or one number;
        if empty, bounds are found with a part of the budget.
    unit : "row" or "user".

    Raises
    ------
    InvalidInput : a value that cannot be used.
    """

    algorithm: str = ""
    algorithm_options: str = ""
    lam: Any = "auto"
    lams: str = ""
    n_lams: Any = "auto"
    ratio: float = 0.01
    weights: str = ""
    max_groups: int = 0
    count: Any = Settings.count
    average: str = Settings.average
    curves: str = Settings.curves
    scale: str = Settings.scale
    participation: float = 1.0
    tol: float = 1e-6
    max_rounds: int = 0
    patience: int = 0
    seed: int = 0
    checkpoint: str = ""
    every: int = 1
    n_users: int = 0
    max_users: int = 10_000
    wait: float = 120.0
    round_timeout: float = 60.0
    poll: float = 0.1
    out: str = "run"
    metrics: str = ""
    sites: str = ""
    join: str = ""
    data: str = ""
    path: str = ""
    user: str = ""
    target: str = ""
    features: str = ""
    drop: str = ""
    separator: str = ""
    min_count: int = 1
    split: bool = False
    dataset: str = ""
    dataset_options: str = ""
    task: str = "auto"
    loss: str = "auto"
    loss_options: str = ""
    ridge: float = 1e-3
    standardize: str = "auto"
    holdout: Any = "auto"
    epsilon: float = 0.0
    delta: float = 1e-5
    clip: str = ""
    unit: Any = "row"

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)
        if self.holdout == "auto":
            put("holdout", Settings.holdout if self.chooses and not self.epsilon else 0.0)
        elif self.epsilon and self.holdout:
            raise InvalidInput("rows that are held out would need a budget of their own",
                               remedy="Leave holdout out")
        require(self.task in ("auto", *TASKS),
                f"unknown task {self.task!r}", f"Choose one of: auto, {', '.join(TASKS)}")
        put("standardize", str(self.standardize).lower())  # TOML may say true
        require(self.standardize in _SCALED,
                f"standardize must be auto, true or false, got {self.standardize!r}", "Use auto")
        require(0 <= self.holdout < 1,
                f"holdout must be a share in [0, 1), got {self.holdout!r}", "Use 0.2")

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """From a run configuration.

        Raises
        ------
        InvalidInput : a key that does not exist, or a value that cannot be used.
        """
        config = complete(config)
        made = cls(**{f.name: config[key_of(f.name)] for f in fields(cls)})
        if made.privacy is not None and not made.chooses:
            raise InvalidInput("a private federation chooses its lam, because every question costs",
                               remedy="Leave lam and lams out")
        _ = made.settings, made.fit  # refuse at once what they cannot use
        return made

    @property
    def chooses(self) -> bool:
        """Whether lam, groups and models are chosen, as `coterie fit` does."""
        return self.lam == "auto" and not self.lams

    def scaled(self, table: bool) -> bool:
        """Whether features are standardised."""
        choice = _SCALED[self.standardize]
        return table if choice is None else choice

    @cached_property
    def settings(self) -> FederationSettings:
        """Of the federated run; of a fit only who is asked, the tolerance, the seed and the
        checkpoint count.
        """
        share = self.participation
        run = FederationSettings(
            seed=int(self.seed), tol=float(self.tol), every=int(self.every),
            participation=share if isinstance(share, int) and share > 1 else float(share),
            checkpoint=self.checkpoint or Path(self.out) / "checkpoint")
        if self.chooses:
            return run
        lams = _lams(str(self.lams))
        require(lams is None or self.holdout > 0,
                "a path is chosen from by rows held out, and there are none", "Set holdout = 0.2")
        n_lams = FederationSettings.n_lams if self.n_lams == "auto" else int(self.n_lams)
        return run.replace(algorithm=algorithm_of(self.algorithm, self.algorithm_options),
                           lam=0.0 if self.lam == "auto" else _number(self.lam), lams=lams,
                           n_lams=n_lams, ratio=float(self.ratio),
                           weights=str(self.weights) or "unit",
                           max_rounds=int(self.max_rounds) or None,
                           patience=int(self.patience) or None, score=self.holdout > 0)

    @cached_property
    def fit(self) -> Settings | None:
        """Of a fit, whose task follows from the data; None where lam is given."""
        if not self.chooses:
            return None
        for name in ("algorithm", "algorithm_options", "weights", "max_rounds", "patience",
                     "loss_options"):
            value = getattr(self, name)
            if value and not (name == "weights" and value == "auto"):
                key = key_of(name)
                raise InvalidInput(f"{key} is for a given lam, and lam is auto", remedy="Give "
                                   f"lam a number, for example --lam 0.05, or leave {key} out")
        n_lams = Settings.n_lams if self.n_lams == "auto" else int(self.n_lams)
        return Settings(loss=self.loss, ridge=self.ridge, n_lams=n_lams, count=self.count,
                        average=self.average, curves=self.curves, scale=self.scale,
                        max_groups=int(self.max_groups) or None, tol=float(self.tol),
                        holdout=self.holdout, seed=int(self.seed),
                        standardize=self.scaled(table=True))

    @cached_property
    def privacy(self) -> Privacy | None:
        """What is promised to users; None without noise."""
        if self.epsilon == 0:
            require(not self.clip,
                    "clip is for a private run, and there is no epsilon", "Give epsilon a number")
            return None
        return Privacy(epsilon=float(self.epsilon), delta=float(self.delta),
                       clip=parse_clip(self.clip), unit=self.unit)


def key_of(name: str) -> str:
    """The key of a run configuration, and with two hyphens before it the option of the command."""
    return name.replace("_", "-")


#: Every key of a run configuration and its default.
CONFIG: dict[str, Any] = {key_of(f.name): f.default for f in fields(Deployment)}
#: What is said of data.
DATA = tuple(CONFIG)[list(CONFIG).index("data"):list(CONFIG).index("holdout") + 1]
#: What is sent to the nodes.
FOR_NODES = ("seed", "epsilon", *DATA)


def by_present_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with the present name of keys that have two."""
    return {_SAME.get(key, key): value for key, value in config.items()}


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with defaults for what it does not say; refuses what is not a setting."""
    config = by_present_names(config)
    unknown = sorted(set(config) - set(CONFIG))
    if unknown and unknown[0] in RENAMED:
        raise InvalidInput(f"the setting {unknown[0]!r} is called {RENAMED[unknown[0]]!r}",
                           remedy="Use that name")
    if unknown:
        raise InvalidInput(f"unknown setting {unknown[0]!r}",
                           remedy=f"Settings are: {', '.join(CONFIG)}")
    return {**CONFIG, **{key: value for key, value in config.items() if value != ""}}


def for_nodes(config: Mapping[str, Any]) -> dict[str, Any]:
    """What is sent to the nodes, under names that nodes of all versions know."""
    config = complete(config)
    config["holdout"] = Deployment(**{f.name: config[key_of(f.name)]
                                      for f in fields(Deployment)}).holdout
    names = {present: first for first, present in _SAME.items()}
    return {names.get(key, key): config[key] for key in FOR_NODES}


def algorithm_of(name: str, options: str = "") -> Algorithm:
    """An algorithm by its name in ALGORITHMS, with its settings as JSON."""
    name = str(name) or "newton"
    require(name in ALGORITHMS,
            f"unknown algorithm {name!r}", f"Choose one of: {', '.join(ALGORITHMS)}")
    try:
        return ALGORITHMS[name](**json.loads(str(options) or "{}"))
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"the algorithm {name!r} cannot be made with {options!r}: {error}",
                           remedy='Give its settings as JSON, such as {"rank": 5}') from error


def _number(lam: Any) -> float:
    try:
        return float(lam)
    except ValueError:
        raise InvalidInput(f"lam must be a number, or auto, got {lam!r}",
                           remedy="Use auto") from None


def _lams(text: str) -> Any:
    """The lams of a path: numbers, "auto", or None for an empty text."""
    if not text or text == "auto":
        return text or None
    try:
        return tuple(float(word) for word in text.replace(",", " ").split())
    except ValueError as error:
        raise InvalidInput(f"lams must be numbers, or auto, got {text!r}",
                           remedy="For example 1 0.1 0.01") from error
