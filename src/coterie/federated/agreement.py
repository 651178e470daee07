"""What a federation agrees on before its first round: who takes part, what the columns are, how
they are scaled.

Every node introduces itself with the names of its users and, where it has a table, a summary of it:
names and kinds of the columns, levels and their counts, never a row. The server merges the
summaries into one recipe and refuses columns that are not the same kind of thing at all nodes.
Every user then describes its encoded rows by counts, means and sums of squares, from which the
units follow. So a table that is spread over nodes means the same task, encoding, scaling and
intercept as the same table in one file.

The agreement goes to the nodes with every query, since a node starts a new process for each of
them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from coterie.base.errors import Incompatible, InvalidInput, located
from coterie.base.machine import free_memory
from coterie.base.storage import json_ready, write_atomically
from coterie.data.encoding import Recipe
from coterie.data.merging import merge
from coterie.data.participants import Participants
from coterie.data.scaling import Standardizer
from coterie.data.users import Moments, Users
from coterie.data.validation import show
from coterie.federated import plausible
from coterie.federated.client import Data
from coterie.federated.config import DataSettings
from coterie.federated.introduction import Introduction
from coterie.federated.protocol.messages import REFUSES, Batch, Message
from coterie.federated.runtimes.in_process import Runtime
from coterie.federated.sources import Table, in_order, make_loss
from coterie.fitting.units import LARGEST_COUNT, Units, UserStatistics
from coterie.losses import Loss, Multinomial, Samples, SquaredDistance

# Rounds in which users describe their rows; no round of a run has such a number.
_DESCRIBE = 1 << 30
_TRIES = 10
_MOST_CLASSES = 1_000  # of prepared numbers

log = logging.getLogger("coterie.federated")


@dataclass(frozen=True, kw_only=True, eq=False)
class Agreement:
    """What all nodes know before the first round.

    Parameters
    ----------
    names : of all users, in order.
    features : of the encoded columns.
    run : a name for the run, which users keep with what they remember.
    recipe, units : how a table becomes what the solver sees; None for prepared numbers.
    loss, loss_options : of prepared numbers, by name and as JSON.
    mean, scale : of prepared numbers that are standardised.
    task, n_classes : where a fit is made: then users answer from all their rows, and held-out rows
        judge.
    train_units : of the rows that are not held out, where a fit asks about these.
    signs : whether classes of prepared numbers are -1 and 1 and count as 0 and 1; only where a fit
        is made.
    refused : nodes and users who do not take part, since what they say of themselves cannot be
        true, with the reason; the others are not told.
    """

    names: tuple[Any, ...]
    features: tuple[str, ...]
    run: str
    recipe: Recipe | None = None
    units: Units | None = None
    loss: str = ""
    loss_options: str = ""
    mean: tuple[float, ...] = ()
    scale: tuple[float, ...] = ()
    task: Any = ""
    n_classes: int = 0
    signs: bool = False
    train_units: Units | None = None
    refused: Mapping[Any, str] = field(default_factory=dict)

    def without(self, reasons: Mapping[Any, str]) -> Agreement:
        """The agreement of the others, with a word in the log about these users."""
        for name, reason in reasons.items():
            log.warning("user %r takes no part: %s", name, reason)
        names = tuple(name for name in self.names if name not in reasons)
        if not names:
            raise Incompatible(f"All users were refused, so nothing is left to solve; the last: "
                               f"{list(reasons.values())[-1]}.")
        return replace(self, names=names, refused={**self.refused, **reasons})

    @property
    def participants(self) -> Participants:
        """The users, by name."""
        return Participants(self.names, self.features)

    def make_loss(self) -> Loss:
        """The loss of all users."""
        return make_loss(self.loss, self.loss_options) if self.units is None else self.units.loss

    def data(self, source: Users | Table, held_out: float, seed: int, least: int = 0) -> Data:
        """A node's data as its users answer from them; without units yet, in the table's own units.
        """
        return self.data_of(self.given(source), held_out, seed, least)

    def given(self, source: Users | Table) -> Users:
        """A node's rows as numbers, in the table's own units."""
        if isinstance(source, Table) != (self.recipe is not None):
            raise InvalidInput("this node has " + ("a table, and the federation agreed on prepared "
                                                   "numbers" if self.recipe is None else "prepared "
                                                   "numbers, and the federation agreed on a table"),
                               remedy="Give all nodes the same kind of data")
        if isinstance(source, Users):
            users = source
        else:
            with located(source.place):
                users = _recipe(self).encode(source.frame)
        return (replace(users, targets=0.5 * (users.targets + 1.0)) if self.signs
                and users.targets is not None else users)

    def data_of(self, users: Users, held_out: float, seed: int, least: int = 0) -> Data:
        """The data of users whose rows are numbers, as they answer from them; see `Users.hold_out`.
        """
        held, inner = None, self._inner()
        if self.task:
            return self._data_for_fit(users, held_out, seed, least)
        if held_out > 0:
            users, _, held = users.hold_out(held_out, seed=seed, least=least)
        users, held = inner(users), None if held is None else inner(held)
        # Users only describe their rows, which needs no loss.
        if self.recipe is not None and self.units is None:
            return Data(SquaredDistance(), Samples(users, users.n_features), held)
        loss = self.make_loss()
        return Data(loss, loss.prepare(users), held)

    def _data_for_fit(self, users: Users, held_out: float, seed: int, least: int) -> Data:
        """All rows, and those that are held out; without units, in the table's own units."""
        inner, judged, split = self._inner(), None, None
        if held_out > 0 and self.task != "clustering":
            split = users.hold_out(held_out, stratify=self.task == "classification", seed=seed,
                                   least=least)
        units = self.units if self.train_units is None else self.train_units
        if split is not None and units is not None:
            judged = units, split.test
        trained = inner if units is None else units.inner
        train, held = (None, None) if split is None else (trained(split.train), trained(split.test))
        users = inner(users)
        if self.units is None:  # users only describe their rows, which needs no loss
            return Data(SquaredDistance(), Samples(users, users.n_features), held, train=train,
                        fits=True)
        loss = self.make_loss()
        return Data(loss, loss.prepare(users), held, train=train, judged=judged, fits=True)

    def _inner(self) -> Callable[[Users], Users]:
        if self.units is not None:
            return self.units.inner
        if self.scale:
            return Standardizer(np.array(self.mean), np.array(self.scale)).transform
        return lambda users: users

    @cached_property
    def digest(self) -> str:
        """A name for what users' answers depend on: all but the names of the run and of its users.
        """
        return hashlib.sha256(replace(self, run="", names=()).to_json().encode()).hexdigest()[:32]

    def to_json(self) -> str:
        """As text, for the wire and for the checkpoint."""
        said = {name: getattr(self, name)
                for name in ("names", "features", "run", "loss", "loss_options", "mean", "scale",
                             "task", "n_classes", "signs")}
        return json.dumps({**said, "recipe": None if self.recipe is None else self.recipe.to_json(),
                           "units": None if self.units is None else json_ready(self.units.state()),
                           "train_units": None if self.train_units is None else
                           json_ready(self.train_units.state())}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """From what `to_json` gives."""
        said = json.loads(text)
        recipe, units, trained = said.pop("recipe"), said.pop("units"), \
            said.pop("train_units", None)
        said = {name: tuple(value) if isinstance(value, list) else value
                for name, value in said.items()}
        return cls(**said, recipe=None if recipe is None else Recipe.from_json(recipe),
                   units=None if units is None else Units.from_state(units),
                   train_units=None if trained is None else Units.from_state(trained))


def read_aside(folder: Path) -> dict[Any, str]:
    """Who was refused before, with the reason, from the folder of a checkpoint."""
    file = folder / "aside.json"
    return dict(json.loads(file.read_text("utf-8"))) if file.exists() else {}


def write_aside(folder: Path, aside: Mapping[Any, str]) -> None:
    """Keep who was refused, if anybody was."""
    if aside:
        write_atomically(folder / "aside.json", json.dumps(list(aside.items())).encode(),
                         durable=True)


def _recipe(agreement: Agreement) -> Recipe:
    assert agreement.recipe is not None
    return agreement.recipe


class Carrier(Runtime, Protocol):
    """A runtime that finds its users itself."""

    refused: dict[Any, str]  # nodes whose introduction cannot be true, with the reason

    def gather(self, n_users: int, wait: float) -> list[tuple[str, Introduction]]:
        """Wait for so many users: what their nodes say of themselves, each with a name for the
        node.
        """

    def use(self, agreement: Agreement) -> None:
        """Send this agreement with every query from now on."""


def agree(runtime: Carrier, data: DataSettings, n_users: int = 0, wait: float = 120.0) -> Agreement:
    """Find the users, and agree on the columns, their scaling and the loss.

    Parameters
    ----------
    runtime : finds the users and carries the queries.
    data : what is asked of the data.
    n_users, wait : how many users to wait for, and how many seconds.

    Raises
    ------
    Incompatible : fewer users came, some do not answer, or the nodes' data do not fit together.
    InvalidInput : a column is not the same kind of thing at all nodes; both are named.
    """
    nodes, agreement = introduced(runtime, n_users, wait)
    tables = [node.summary for _, node in nodes if node.summary is not None]
    if not tables:
        return _agree_on_numbers(runtime, data, agreement, nodes)
    if data.loss_options:
        raise InvalidInput("loss-options are for prepared numbers, and the nodes have tables",
                           remedy="Use loss and ridge, as in coterie fit")
    recipe = Recipe.from_summary(merge(tables, tables=[label for label, _ in nodes]))
    agreement, statistics = _describe(runtime, replace(agreement, recipe=recipe,
                                                       features=recipe.feature_names))
    units = Units.from_moments(statistics, recipe.task, loss=data.loss, ridge=data.ridge,
                               n_classes=len(recipe.classes), standardize=data.scaled(table=True))
    return replace(agreement, units=units)


def introduced(runtime: Carrier, n_users: int, wait: float) -> tuple[list[tuple[str, Introduction]],
        Agreement]:
    """What the nodes say of themselves, and an agreement on who takes part; of prepared numbers
    also on columns.
    """
    nodes = runtime.gather(n_users, wait)
    names = in_order(name for _, node in nodes for name in node.names)
    tables = sum(node.summary is not None for _, node in nodes)
    if 0 < tables < len(nodes):
        with_table, without = (next(label for label, node in nodes
                                    if (node.summary is None) is none) for none in (False, True))
        raise Incompatible(f"{with_table} has a table, and {without} prepared numbers. Give all "
                           "nodes the same kind of data.")
    return nodes, Agreement(names=names, features=() if tables else _columns(nodes),
                            run=uuid.uuid4().hex, refused=dict(runtime.refused))


def bounded_classes(agreement: Agreement, nodes: Sequence[tuple[str, Introduction]]) -> tuple[int,
        Agreement]:
    """How many classes there are at nodes with prepared numbers, and the agreement of those who can
    be believed.

    A node that declares more classes than can be meant, or more than there is memory for, is
    refused if others declare fewer.

    Raises
    ------
    InvalidInput : all nodes declare too many.
    """
    kept, reasons = list(nodes), dict[Any, str]()
    while True:
        known = max(node.n_classes for _, node in kept)
        dim = (len(agreement.features) + 1) * max(known - 1, 1)
        if known <= _MOST_CLASSES and 8.0 * (20 * len(agreement.names) * dim
                                             + dim**2) <= free_memory():
            return known, agreement.without(reasons) if reasons else agreement
        fewer = [(label, node) for label, node in kept if node.n_classes < known]
        if not fewer:
            raise InvalidInput(f"the targets are {known:,} classes, "
                               f"which is more than {_MOST_CLASSES:,} or than there is memory for",
                               remedy="Name another loss, or give the nodes tables")
        for label, node in kept:
            if node.n_classes == known:
                reasons |= dict.fromkeys(node.names, f"{label} declares {known:,} classes")
        kept = fewer


def _agree_on_numbers(runtime: Carrier, data: DataSettings, agreement: Agreement,
                      nodes: Sequence[tuple[str, Introduction]]) -> Agreement:
    loss, kinds = data.loss, {node.targets for _, node in nodes}
    if loss == "auto":
        if len(kinds) > 1 or kinds == {"numbers"}:
            raise InvalidInput(
                "the targets are numbers, which may be classes, counts or measurements",
                remedy="Name the loss, for example loss = 'squared', or give the nodes tables")
        loss = {"none": "squared_distance", "signs": "logistic"}[kinds.pop()]
    built, options = make_loss(loss, data.loss_options), data.loss_options
    if isinstance(built, Multinomial) and built.n_classes is None:
        known, agreement = bounded_classes(agreement, nodes)
        options = json.dumps({**json.loads(options or "{}"), "n_classes": known})
    agreement = replace(agreement, loss=loss, loss_options=options)
    if not data.scaled(table=False):
        return agreement
    agreement, statistics = _describe(runtime, agreement)
    scaler = Standardizer.from_moments(statistics.features, feature_names=agreement.features)
    return replace(agreement, mean=tuple(scaler.mean.tolist()), scale=tuple(scaler.scale.tolist()))


def _columns(nodes: Sequence[tuple[str, Introduction]]) -> tuple[str, ...]:
    """The columns of prepared numbers, which must be the same everywhere."""
    (first, one), *others = nodes
    for label, node in others:
        if node.features != one.features:
            raise Incompatible(f"The nodes have different columns: {', '.join(one.features)} "
                               f"({first}) and {', '.join(node.features)} ({label}). Give all of "
                               "them the same features in the same order.")
    return one.features


def _describe(runtime: Carrier, agreement: Agreement) -> tuple[Agreement, UserStatistics]:
    """Every user's count, means and centred sums of squares; those who do not answer are asked
    again.

    Users who describe rows that cannot exist, or are out of all proportion, are refused; the
    agreement is the others'.
    """
    runtime.use(agreement)
    n, p = len(agreement.names), len(agreement.features)
    counts, (means, m2), target = np.zeros(n), np.zeros((2, n, p)), np.zeros((n, 3))
    known, with_target, reasons = np.zeros(n, dtype=bool), np.zeros(n, dtype=bool), dict[int, str]()
    for turn in range(_DESCRIBE, _DESCRIBE + _TRIES):
        replies = runtime.exchange(Batch("describe", turn, np.flatnonzero(~known)))
        reasons |= {user: reason for user, reason in replies.refused if reason.startswith(REFUSES)}
        pairs = [*replies.singles, *(pair for batch in replies.batches for pair in batch.items())]
        for user, reply in pairs:
            if not _describes(reply, p):
                reasons[user] = "it does not describe the columns that were agreed on"
                continue
            counts[user], means[user], m2[user] = (reply.arrays[name]
                                                   for name in ("count", "means", "m2"))
            with_target[user], target[user] = "target" in reply.arrays, \
                reply.arrays.get("target", 0.0)
            reasons.pop(user, None)
            known[user] = True
        known[list(reasons)] = True
        if known.all():
            break
    else:
        silent = [agreement.names[user] for user in np.flatnonzero(~known)[:3]]
        raise Incompatible(f"{int((~known).sum())} user(s) did not describe their columns "
                           f"({show(*silent)}), so "
                           "nothing can be scaled. Start their nodes, or lower `n-users`.")
    wrong = plausible.wrong_moments(counts, means, m2, target if with_target.any() else None)
    if agreement.recipe is not None:
        task, classes = agreement.recipe.task, len(agreement.recipe.classes)
        odd = plausible.wrong_targets(task, target[:, 2], target[:, 0], classes, LARGEST_COUNT)
        wrong = [one or other for one, other in zip(wrong, odd, strict=True)]
    reasons = {user: reason for user, reason in enumerate(wrong) if reason} | reasons
    stay = np.setdiff1d(np.arange(n), list(reasons))
    far = stay[plausible.outlying(counts[stay], means[stay], m2[stay])]
    reasons |= dict.fromkeys(far.tolist(), "it describes numbers out of all proportion to those of "
                             "the others")
    if reasons:
        agreement = agreement.without({agreement.names[user]: reason
                                       for user, reason in reasons.items()})
        runtime.use(agreement)
        stay = np.setdiff1d(stay, far)
    rows = counts[stay].astype(np.int64)
    targets = (Moments(rows, target[stay, :1], target[stay, 1:2]) if with_target[stay].all()
               else None)
    features, targets = (None if part is None else plausible.without_dominant(part)
                         for part in (Moments(rows, means[stay], m2[stay]), targets))
    assert features is not None
    return agreement, UserStatistics(agreement.features, features, targets, target[stay, 2])


def _describes(reply: Message, n_features: int) -> bool:
    shapes = {"count": (), "means": (n_features,), "m2": (n_features,), "target": (3,)}
    return reply.kind == "describe" and set(reply.arrays) >= {
        "count", "means", "m2"} and all(array.shape == shapes.get(name) and np.isfinite(array).all()
                                        for name, array in reply.arrays.items())
