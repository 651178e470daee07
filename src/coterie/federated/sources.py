"""Where a node's users come from: files, data sets, or a function of your own."""

from __future__ import annotations

import importlib
import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from coterie import datasets
from coterie.data.users import Split, Users
from coterie.errors import InvalidInput
from coterie.losses import LOSSES, Loss

Config = Mapping[str, Any]


def csv(config: Config) -> Users:
    """A CSV file: `path`, `user` and `target` name the file and its columns."""
    return Users.from_csv(_path(config), user=str(_need(config, "user")), target=_target(config))


def parquet(config: Config) -> Users:
    """A Parquet file, likewise."""
    return Users.from_parquet(_path(config), user=str(_need(config, "user")), target=_target(config))


def npz(config: Config) -> Users:
    """A NumPy archive with arrays X, user and, where there are targets, y."""
    with np.load(_path(config), allow_pickle=False) as file:
        missing = {"X", "user"} - set(file.files)
        if missing:
            raise InvalidInput(f"{_path(config)} holds no array {sorted(missing)[0]!r}",
                               remedy="Save X, y and user in it")
        names = file["feature_names"].tolist() if "feature_names" in file.files else None
        return Users.from_arrays(file["X"], file["y"] if "y" in file.files else None, file["user"], feature_names=names)


def dataset(config: Config) -> Users:
    """A data set of `coterie.datasets`: `dataset` is its name, `dataset-options` its arguments as JSON."""
    name = str(_need(config, "dataset"))
    makers: dict[str, Callable[..., Any]] = {"ellipses": datasets.ellipses, "clustered": datasets.clustered}
    if name not in makers:
        raise InvalidInput(f"unknown data set {name!r}", remedy=f"Choose one of: {', '.join(makers)}")
    return makers[name](**json.loads(str(config.get("dataset-options", "") or "{}"))).users


#: Ready sources by the name used for `data`.
SOURCES: dict[str, Callable[[Config], Users]] = {"csv": csv, "parquet": parquet, "npz": npz, "dataset": dataset}


def load(config: Config) -> Users:
    """The users of a node.

    `data` is a name in SOURCES or "module:function", a function that takes the node's configuration and returns Users.
    With `split` = true the node takes its part of them: every num-partitions-th user, from the partition-id-th.
    """
    spec = str(_need(config, "data"))
    users = (SOURCES[spec] if spec in SOURCES else resolve(spec, "data"))(config)
    if not isinstance(users, Users):
        raise InvalidInput(f"the data function {spec!r} gave a {type(users).__name__}, not Users",
                           remedy="Return Users.from_arrays(X, y, user)")
    if config.get("split"):
        part, parts = int(_need(config, "partition-id")), int(_need(config, "num-partitions"))
        users = users.take(np.arange(part, users.n_users, parts))
    return users


def resolve(spec: str, what: str) -> Any:
    """What "module:name" names."""
    module, _, name = spec.partition(":")
    if not module or not name:
        raise InvalidInput(f"{what} is {spec!r}, and neither a known name nor module:name", remedy=(
            f"Use one of {', '.join(SOURCES)}, or for example my_data:load" if what == "data" else "Look at the docs"))
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InvalidInput(f"{what} {spec!r} cannot be found: {error}",
                           remedy="Install the module where the node runs, or correct the name") from error


def loss(name: str, options: str = "") -> Loss:
    """A loss by its name in LOSSES or module:name, with its settings as JSON."""
    made = LOSSES[name] if name in LOSSES else resolve(name, "loss")
    try:
        settings = json.loads(options or "{}")
        found = made(**settings) if callable(made) else made
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"the loss {name!r} cannot be made with {options!r}: {error}",
                           remedy='Give its settings as JSON, such as {"ridge": 0.001}') from error
    if not isinstance(found, Loss):
        raise InvalidInput(f"{name!r} is not a loss", remedy=f"Choose one of: {', '.join(LOSSES)}")
    return found


def held_out(users: Users, share: float, seed: int) -> Split:
    """Every user's rows split by itself, so that it does not matter who shares a node with whom."""
    parts = [users.take([k]).split(test=share, seed=np.random.default_rng([seed, zlib.crc32(repr(name).encode())]))
             for k, name in enumerate(users.names)]
    return Split(*(join([part[k] for part in parts]) for k in range(3)))


def join(parts: list[Users]) -> Users:
    """Users of several parts as one, in the order given."""
    counts = np.concatenate([part.counts for part in parts])
    targets = [part.targets for part in parts if part.targets is not None]
    return Users(np.concatenate([part.features for part in parts]), np.concatenate(targets) if targets else None,
                 np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
                 tuple(name for part in parts for name in part.names), parts[0].feature_names)


def _need(config: Config, key: str) -> Any:
    value = config.get(key, "")
    if value == "":
        raise InvalidInput(f"the configuration has no {key!r}",
                           remedy=f"Give it, for example with --node-config '{key}=...'")
    return value


def _path(config: Config) -> str:
    """The file; {partition} in its name stands for the number of the node."""
    return str(_need(config, "path")).replace("{partition}", str(config.get("partition-id", "")))


def _target(config: Config) -> str | None:
    return str(config["target"]) if config.get("target") else None
