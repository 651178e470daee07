"""A run configuration: the settings of a federation as texts, numbers and truth values.

A key is the Python keyword with hyphens: `max_rounds` is `max-rounds`. TOML has no None, so an
empty text, and 0 where 0 makes no sense, stand for the default, which may depend on `lam`. `CONFIG`
lists every key with its default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from coterie.base.errors import InvalidInput
from coterie.data.summary import TASKS
from coterie.federated.algorithms import ALGORITHMS
from coterie.federated.algorithms.base import Algorithm
from coterie.federated.private.policy import Privacy, parse_clip
from coterie.federated.settings import FederationSettings
from coterie.fitting.settings import Settings

#: Keys of earlier versions, and what they are called now.
RENAMED = {"rounds": "max-rounds", "users": "n-users"}
_AUTO = {"auto": None, "true": True, "false": False}


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Where the users' data are, and how they become numbers. The server sends them to every node.

    What a node's owner says in its node configuration comes first. A table takes the road of
    `coterie fit`: its recipe and scaling are agreed by all nodes, and its loss follows from the
    task. Prepared numbers (`npz`, `dataset`, a function that returns Users) are used as they are.

    Parameters
    ----------
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
    held_out : the share of its rows that every user holds out to score its model.
    """

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
    held_out: float = 0.0

    def __post_init__(self) -> None:
        if self.task not in ("auto", *TASKS):
            raise InvalidInput(f"unknown task {self.task!r}",
                               remedy=f"Choose one of: auto, {', '.join(TASKS)}")
        object.__setattr__(self, "standardize", str(self.standardize).lower())  # TOML may say true
        if self.standardize not in _AUTO:
            raise InvalidInput(f"standardize must be auto, true or false, got {self.standardize!r}",
                               remedy="Use auto")
        if not 0 <= self.held_out < 1:
            raise InvalidInput(f"held_out must be a share in [0, 1), got {self.held_out!r}",
                               remedy="Use 0.2")

    def scaled(self, table: bool) -> bool:
        """Whether features are standardised."""
        choice = _AUTO[self.standardize]
        return table if choice is None else choice


@dataclass(frozen=True, kw_only=True)
class PrivacySettings:
    """What is promised to users, as texts and numbers; see `Privacy`.

    Parameters
    ----------
    epsilon, delta : the budget; 0 for no noise.
    clip : public bounds of columns as text, for example "age=0:100, sex=f|m, y=0:1", or one number;
        if empty, bounds are found with a part of the budget.
    unit : "row" or "user".
    """

    epsilon: float = 0.0
    delta: float = 1e-5
    clip: str = ""
    unit: str = "row"

    def privacy(self) -> Privacy | None:
        """The promise; None without noise.

        Raises
        ------
        InvalidInput : a promise that cannot be made.
        """
        if self.epsilon == 0:
            if self.clip:
                raise InvalidInput("clip is for a private run, and there is no epsilon",
                                   remedy="Give epsilon a number")
            return None
        unit: Any = self.unit
        return Privacy(epsilon=float(self.epsilon), delta=float(self.delta),
                       clip=parse_clip(self.clip), unit=unit)


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What concerns the server of a deployed federation only.

    Parameters
    ----------
    n_users : how many users to wait for before the first round; 0 for those there at the start.
    wait : seconds to wait for them.
    round_timeout : seconds a round may last.
    poll : seconds between two looks for replies.
    out : folder for the results.
    metrics : where else rounds are written: tensorboard:FOLDER, mlflow:URI, jsonl:FILE.
    join : the folder of a finished run that newcomers join, instead of a run; `out` then gets
        joined.csv.
    """

    n_users: int = 0
    wait: float = 120.0
    round_timeout: float = 60.0
    poll: float = 0.1
    out: str = "run"
    metrics: str = ""
    join: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class RunConfig:
    """A run configuration as objects.

    Parameters
    ----------
    settings : of the federated run; of a fit only who is asked, the tolerance, the seed and the
        checkpoint count.
    data : of the users' data.
    server : of the server.
    fit : of a fit, where lam is "auto"; None for a run at a given lam, or at several.
    privacy : what is promised to users; None without noise.
    """

    settings: FederationSettings = field(default_factory=FederationSettings)
    data: DataSettings = field(default_factory=DataSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
    fit: Settings | None = None
    privacy: Privacy | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """From a run configuration.

        Raises
        ------
        InvalidInput : a key that does not exist, or a value that cannot be used.
        """
        config = resolved(config)
        data = DataSettings(**{f.name: config[key_of(f.name)] for f in fields(DataSettings)})
        server = ServerSettings(**{f.name: config[key_of(f.name)] for f in fields(ServerSettings)})
        private = PrivacySettings(**{f.name: config[key_of(f.name)]
                                     for f in fields(PrivacySettings)}).privacy()
        share = config["participation"]
        common: dict[str, Any] = {
            "seed": int(config["seed"]), "tol": float(config["tol"]), "every": int(config["every"]),
            "participation": share if isinstance(share, int) and share > 1 else float(share),
            "checkpoint": config["checkpoint"] or Path(server.out) / "checkpoint"}
        if chooses(config):
            return cls(settings=FederationSettings(**common), data=data, server=server,
                       fit=_fit(config, data), privacy=private)
        if private is not None:
            raise InvalidInput("a private federation chooses its lam, because every question costs",
                               remedy="Leave lam and lams out")
        lams = _lams(str(config["lams"]))
        if lams is not None and not data.held_out > 0:
            raise InvalidInput("a path is chosen from by rows held out, and there are none",
                               remedy="Set held-out = 0.2")
        settings = FederationSettings(
            algorithm=algorithm_of(config),
            lam=0.0 if config["lam"] == "auto" else _number(config["lam"]),
            lams=lams, n_lams=int(config["n-lams"]), ratio=float(config["ratio"]),
            weights=str(config["weights"]), max_rounds=int(config["max-rounds"]) or None,
            patience=int(config["patience"]) or None, score=data.held_out > 0, **common)
        return cls(settings=settings, data=data, server=server)


def key_of(name: str) -> str:
    """The key of a run configuration, and with two hyphens before it the option of the command."""
    return name.replace("_", "-")


#: Every key of a run configuration and its default.
CONFIG: dict[str, Any] = {
    "algorithm": "", "algorithm-options": "", "lam": "auto", "lams": "", "n-lams": "auto",
    "ratio": 0.01, "weights": "", "max-groups": 0, "count": Settings.count, "participation": 1.0,
    "tol": 1e-6, "max-rounds": 0, "patience": 0, "seed": 0, "checkpoint": "", "every": 1,
    **{key_of(f.name): f.default for kind in (ServerSettings, DataSettings, PrivacySettings)
       for f in fields(kind)}, "held-out": "auto"}
#: What a given lam is needed for.
_FOR_A_LAM = ("algorithm", "algorithm-options", "weights", "max-rounds", "patience", "loss-options")
#: What is sent to the nodes.
FOR_NODES = ("seed", "epsilon", *(key_of(f.name) for f in fields(DataSettings)))


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with defaults for what it does not say; refuses what is not a setting."""
    unknown = sorted(set(config) - set(CONFIG))
    if unknown and unknown[0] in RENAMED:
        raise InvalidInput(f"the setting {unknown[0]!r} is called {RENAMED[unknown[0]]!r}",
                           remedy="Use that name")
    if unknown:
        raise InvalidInput(f"unknown setting {unknown[0]!r}",
                           remedy=f"Settings are: {', '.join(CONFIG)}")
    return {**CONFIG, **{key: value for key, value in config.items() if value != ""}}


def chooses(config: Mapping[str, Any]) -> bool:
    """Whether the run chooses its lam, groups and models by itself, as `coterie fit` does."""
    return config["lam"] == "auto" and not config["lams"]


def resolved(config: Mapping[str, Any]) -> dict[str, Any]:
    """The complete configuration, with defaults that depend on `lam` as values."""
    config = complete(config)
    fit = chooses(config)
    if config["held-out"] == "auto":
        config["held-out"] = Settings.holdout if fit and not config["epsilon"] else 0.0
    elif config["epsilon"] and config["held-out"]:
        raise InvalidInput("rows that are held out would need a budget of their own",
                           remedy="Leave held-out out")
    if config["n-lams"] == "auto":
        config["n-lams"] = Settings.n_lams if fit else FederationSettings.n_lams
    if not fit:
        config["algorithm"], config["weights"] = config["algorithm"] or "newton", \
            config["weights"] or "unit"
    return config


def for_nodes(config: Mapping[str, Any]) -> dict[str, Any]:
    """What is sent to the nodes."""
    config = resolved(config)
    return {key: config[key] for key in FOR_NODES}


def algorithm_of(config: Mapping[str, Any]) -> Algorithm:
    """The algorithm of a run configuration."""
    name = str(config["algorithm"]) or "newton"
    if name not in ALGORITHMS:
        raise InvalidInput(f"unknown algorithm {name!r}",
                           remedy=f"Choose one of: {', '.join(ALGORITHMS)}")
    try:
        return ALGORITHMS[name](**json.loads(str(config["algorithm-options"]) or "{}"))
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"the algorithm {name!r} cannot be made with "
                           f"{config['algorithm-options']!r}: {error}",
                           remedy='Give its settings as JSON, such as {"rank": 5}') from error


def _fit(config: Mapping[str, Any], data: DataSettings) -> Settings:
    """The settings of a fit; its task follows from the data."""
    for key in _FOR_A_LAM:
        if config[key] and not (key == "weights" and config[key] == "auto"):
            raise InvalidInput(f"{key} is for a given lam, and lam is auto", remedy="Give lam a "
                               f"number, for example --lam 0.05, or leave {key} out")
    return Settings(loss=data.loss, ridge=data.ridge, n_lams=int(config["n-lams"]),
                    count=config["count"], max_groups=int(config["max-groups"]) or None,
                    tol=float(config["tol"]), holdout=data.held_out, seed=int(config["seed"]),
                    standardize=data.scaled(table=True))


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
