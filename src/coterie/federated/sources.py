"""Where a node's data come from: a table, prepared numbers in a file, a data set, or a function of
your own.

A table (CSV, Parquet, or a polars frame that a function returns) becomes numbers by the recipe that
all nodes agree on. Users (an .npz file, a data set, or what a function returns) are numbers
already, and are used as they are.
"""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from coterie.base.errors import CoterieError, InvalidInput, located, require
from coterie.base.storage import pack, unpack, write_atomically
from coterie.data import simulated as datasets
from coterie.data.columns import Column, as_texts
from coterie.data.files import read_table, row_place
from coterie.data.frames import as_frame, infer_names, read_cells, row_names
from coterie.data.summary import TableSummary, summarise, target_cells
from coterie.data.users import Users
from coterie.data.validation import split_names, suggest
from coterie.losses import LOSSES, Loss

Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """A node's table, not encoded yet.

    Parameters
    ----------
    frame : a polars frame, one row per sample.
    user, target : the columns that name the owner of a row, and what is to be predicted; without
        target users are clustered.
    features, drop : columns to learn from (all others unless named) and to leave out.
    task : "auto", or one of TASKS.
    min_count : levels with fewer rows are pooled before they leave the node.
    place : where a row is in its file, in words, for messages; None where there is no file.
    private : whether nothing that is said of the table may depend on its values but the names of
        users, who are then all that are named in the table.
    """

    frame: Any
    user: str
    target: str | None = None
    features: tuple[str, ...] | None = None
    drop: tuple[str, ...] = ()
    task: str = "auto"
    min_count: int = 1
    place: Callable[[int], str] | None = None
    private: bool = False

    @property
    def names(self) -> tuple[Any, ...]:
        """The users who have a row that counts."""
        return in_order(owner for owner in self.owners if owner is not None)

    @property
    def owners(self) -> list[Any]:
        """The user of every row that counts, and None for the others: a row counts with a user and,
        where there is one, with a target; whether there is, is not said of private tables.
        """
        with located(self.place):
            owners = row_names(self.frame[self.user])
            if self.private or self.target is None:
                return owners
            missing = target_cells(self.frame[self.target], self.target, self.task).missing
        return [None if gone else owner for owner, gone in zip(owners, missing, strict=True)]

    def without_groups_of(self, fewer: int, columns: Iterable[Column]) -> Table:
        """The table in which no cell tells a few rows apart: where fewer rows have no value, they
        have the usual one, and so where fewer have a rare level.

        Parameters
        ----------
        fewer : rows that are a group.
        columns : of which it is to be so.
        """
        changed = dict[str, Any]()
        kept = np.array([owner is not None for owner in self.owners], dtype=bool)
        for column in columns:
            if column.name not in self.frame.columns:
                continue
            cells = read_cells(self.frame[column.name], parse=column.kind != "category")
            # The usual cell: of texts the most frequent one, of numbers the middle one.
            order, rare, share = cells.values, np.zeros_like(kept), 0.5
            if column.kind == "category":
                codes = as_texts(cells)[1]
                order = np.bincount(codes[kept & ~cells.missing], minlength=codes.max() + 1)[codes]
                rare, share = (order < fewer) & ~cells.missing, 1.0
            usual = np.flatnonzero(kept & ~cells.missing & ~rare)
            usual = usual[np.argsort(order[usual], kind="stable")]
            rows = np.arange(len(kept))
            for group in (cells.missing, rare):
                if 0 < (group & kept).sum() < fewer and len(usual):
                    rows[group] = usual[int(share * (len(usual) - 1))]
            if (rows != np.arange(len(rows))).any():
                changed[column.name] = self.frame[column.name].gather(rows)
        return replace(self, frame=self.frame.with_columns(**changed)) if changed else self

    @property
    def n_columns(self) -> int:
        """The number of columns to learn from, before they are encoded."""
        if self.features is not None:
            return len(self.features)
        return len(set(self.frame.columns) - {self.user, self.target, *self.drop})

    def summary(self) -> TableSummary:
        """What the node tells of its table, for the recipe of all."""
        with located(self.place):
            return summarise(self.frame, user=self.user, target=self.target, features=self.features,
                             drop=self.drop, task=self.task, min_count=self.min_count)

    def number_columns(self) -> tuple[str, ...]:
        """The columns of numbers to learn from."""
        wanted = self.features or [name for name in self.frame.columns
                                   if name not in (self.user, self.target, *self.drop)]
        return tuple(name for name in wanted if name in self.frame.columns
                     and read_cells(self.frame[name]).kind in ("number", "flag"))

    def take(self, names: Iterable[Any]) -> Table:
        """The rows of these users."""
        wanted = set(names)
        rows = [k for k, owner in enumerate(row_names(self.frame[self.user])) if owner in wanted]
        place = self.place
        return replace(self, frame=self.frame[rows],
                       place=None if place is None else lambda k: place(rows[k]))


@dataclass(frozen=True, kw_only=True, eq=False)
class Encoded:
    """The rows of a table as numbers, which a node keeps between two messages.

    Parameters
    ----------
    users : the numbers.
    n_columns : of the table, before they were encoded.
    digests : of every user's rows as they are in the table.
    """

    users: Users
    n_columns: int
    digests: dict[Any, str]

    @property
    def names(self) -> tuple[Any, ...]:
        """Of the users."""
        return self.users.names

    def write(self, file: Path) -> None:
        """Keep them in a file, instead of those in other files of its folder."""
        users = self.users
        write_atomically(file, pack({
            "features": users.features, "offsets": users.offsets, "names": list(users.names),
            "targets": users.targets, "columns": list(users.feature_names),
            "n_columns": self.n_columns, "digests": list(self.digests.items())}))
        for other in file.parent.glob("*.coterie"):
            if other != file:
                other.unlink(missing_ok=True)

    @classmethod
    def read(cls, file: Path) -> Encoded | None:
        """Those in a file; None where there is none, or it is damaged."""
        with contextlib.suppress(OSError, CoterieError, KeyError, TypeError, ValueError):
            kept = unpack(file.read_bytes(), str(file))
            users = Users(kept["features"], kept["targets"], kept["offsets"],
                          tuple(kept["names"]), tuple(kept["columns"]))
            return cls(users=users, n_columns=int(kept["n_columns"]),
                       digests=dict(map(tuple, kept["digests"])))
        return None


def state_of(config: Config) -> str:
    """A text that is another one when the table is another one; empty where nothing says so."""
    if str(config.get("data", "")) not in ("csv", "parquet"):
        return ""
    try:
        file = Path(_path(config)).resolve()
        state = file.stat()
    except OSError:
        return ""
    return json.dumps([version("coterie"), str(file), state.st_ino, state.st_size,
                       state.st_mtime_ns, state.st_ctime_ns])


def in_order(names: Iterable[Any]) -> tuple[Any, ...]:
    """Different names in the order `Users` has them: sorted; names of different types by type
    first.
    """
    different = set(names)
    try:
        return tuple(sorted(different))
    except TypeError:
        return tuple(sorted(different, key=lambda name: (type(name).__name__, str(name))))


class TableReader:
    """Reads tables, and remembers the last one: the virtual nodes of a simulation share a process
    and often a file.
    """

    def __init__(self) -> None:
        self._last: tuple[Any, Any] = None, None  # a version of a file, and what it holds

    def __call__(self, file: Path, separator: str, by_cell: bool = False) -> Any:
        state = file.stat() if file.exists() else None
        version = file, separator, by_cell, state and (state.st_mtime_ns, state.st_size)
        if self._last[0] != version:
            self._last = version, read_table(str(file), separator or None, by_cell=by_cell)
        return self._last[1]


def table(config: Config, read: TableReader | None = None) -> Table:
    """A file: `path`, `user` and `target` name the file and its columns."""
    _need(config, "user")  # asked for before the file is read
    file, separator = Path(_path(config)), str(config.get("separator", ""))
    place = row_place(file, separator or None)
    frame = (read or TableReader())(file, separator, _private(config))
    # Messages may leave the node: no folders.
    return replace(_table(frame, config),
                   place=lambda row: place(row).replace(f" of {file}", f" of {file.name}"))


def npz(config: Config) -> Users:
    """A NumPy archive with arrays X, user and, where there are targets, y."""
    with np.load(_path(config), allow_pickle=False) as file:
        missing = {"X", "user"} - set(file.files)
        if missing:
            raise InvalidInput(f"{_path(config)} holds no array {sorted(missing)[0]!r}",
                               remedy="Save X, y and user in it")
        names = file["feature_names"].tolist() if "feature_names" in file.files else None
        X, y = file["X"], file["y"] if "y" in file.files else None
        if _private(config):  # whether all numbers are finite is a fact of the rows
            X, y = (array if array is None else np.nan_to_num(array, posinf=0.0, neginf=0.0)
                    for array in (X, y))
        return Users.from_arrays(X, y, file["user"], feature_names=names)


def dataset(config: Config) -> Users:
    """A data set of `coterie.data.simulated`: `dataset` is its name, `dataset-options` its
    arguments as JSON.
    """
    name = str(_need(config, "dataset"))
    makers: dict[str, Callable[..., Any]] = {"ellipses": datasets.ellipses,
                                             "clustered": datasets.clustered}
    require(name in makers, f"unknown data set {name!r}", f"Choose one of: {', '.join(makers)}")
    return makers[name](**json.loads(str(config.get("dataset-options", "") or "{}"))).users


#: Ready sources by the name used for `data`.
SOURCES: dict[str, Callable[[Config], Users | Table]] = {"csv": table, "parquet": table, "npz": npz,
                                                         "dataset": dataset}


def load(config: Config, read: TableReader | None = None) -> Users | Table:
    """The data of a node.

    Parameters
    ----------
    config : what the server says of the data, and over it what the node's owner says. `data` is a
        name in SOURCES or "module:function", a function of the configuration that returns Users or
        a polars frame. With `split` the node takes its part of the users: every num-partitions-th,
        from the partition-id-th.
    read : reads tables; one that is shared remembers the last.

    Raises
    ------
    InvalidInput : a file, a column or a function that cannot be used.
    """
    spec = str(_need(config, "data"))
    source = SOURCES[spec] if spec in SOURCES else resolve(spec, "data")
    loaded = table(config, read) if source is table else source(config)
    if hasattr(loaded, "columns"):
        loaded = _table(loaded, config)
    if not isinstance(loaded, (Users, Table)):
        raise InvalidInput(f"the data function {spec!r} gave a {type(loaded).__name__}, not Users "
                           "or a table",
                           remedy="Return Users.from_arrays(X, y, user), or a polars frame")
    if config.get("split"):
        part, parts = int(_need(config, "partition-id")), int(_need(config, "num-partitions"))
        loaded = (loaded.take(np.arange(part, loaded.n_users, parts)) if isinstance(loaded, Users)
                  else loaded.take(loaded.names[part::parts]))
    return loaded


def resolve(spec: str, what: str) -> Any:
    """What "module:name" names."""
    module, _, name = spec.partition(":")
    if not module or not name:
        raise InvalidInput(f"{what} is {spec!r}, and neither a known name nor module:name", remedy=(
            f"Use one of {', '.join(SOURCES)}, or for example my_data:load" if what == "data"
                else "Look at the docs"))
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InvalidInput(f"{what} {spec!r} cannot be found: {error}", remedy="Install the module "
                           "where the node runs, or correct the name") from error


def make_loss(name: str, options: str = "") -> Loss:
    """A loss by its name in LOSSES or module:name, with its settings as JSON."""
    kind = LOSSES[name] if name in LOSSES else resolve(name, "loss")
    try:
        settings = json.loads(options or "{}")
        loss = kind(**settings) if callable(kind) else kind
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"the loss {name!r} cannot be made with {options!r}: {error}",
                           remedy='Give its settings as JSON, such as {"ridge": 0.001}') from error
    if not isinstance(loss, Loss):
        raise InvalidInput(f"{name!r} is not a loss", remedy=f"Choose one of: {', '.join(LOSSES)}")
    return loss


def _table(frame: Any, config: Config) -> Table:
    frame, user, target = as_frame(frame), str(_need(config, "user")), \
        str(config.get("target", "")) or None
    for name in (user, target):
        if name is not None and name not in frame.columns:
            raise InvalidInput(f"There is no column {name!r}", remedy=suggest(name, frame.columns))
    return Table(frame=infer_names(frame, user) if _private(config) else frame, user=user,
                 target=target, features=split_names(str(config.get("features", ""))) or None,
                 drop=split_names(str(config.get("drop", ""))),
                 task=str(config.get("task", "auto")), min_count=int(config.get("min-count", 1)),
                 private=_private(config))


def _private(config: Config) -> bool:
    """Whether there is a budget."""
    return "budget-epsilon" in config


def _need(config: Config, key: str) -> Any:
    value = config.get(key, "")
    require(value != "", f"the configuration has no {key!r}",
            f"Give it, for example with --node-config '{key}=...'")
    return value


def _path(config: Config) -> str:
    """The file; {partition} in its name is replaced by the number of the node."""
    return str(_need(config, "path")).replace("{partition}", str(config.get("partition-id", "")))
