"""What a federation agrees on before its first round: who takes part, what the columns are, how
they are scaled, which loss they have.

Every node introduces itself with the names of its users and, where it has a table, a summary of it:
names and kinds of the columns, levels and their counts, never a row. The server merges the
summaries into one recipe and refuses columns that are not the same kind of thing at all nodes; in a
private federation the recipe is made from what is public. Every user then describes its encoded
rows by counts, means and sums of squares, from which the units follow. So a table that is spread
over nodes means the same task, encoding, scaling and intercept as the same table in one file.

`agree` settles all of it, for fits, private fits and runs at a given lam, at the first start of a
run; later starts find it in the checkpoint. The agreement goes to the nodes with every query, since
a node starts a new process for each of them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from coterie.base.errors import Incompatible, InvalidInput, located, require
from coterie.base.machine import free_memory
from coterie.base.storage import json_ready, write_atomically
from coterie.data.columns import Column, number_key
from coterie.data.encoding import Recipe
from coterie.data.moments import Standardizer
from coterie.data.participants import Participants
from coterie.data.users import Moments, Users
from coterie.data.validation import show, split_names
from coterie.federated import plausible
from coterie.federated.admission import Introduction as Introduction
from coterie.federated.admission import columns_of, of_one_kind, recipe_of
from coterie.federated.algorithms.base import Runtime
from coterie.federated.client import Data
from coterie.federated.private.policy import Privacy
from coterie.federated.protocol.messages import REFUSES, Batch, Message
from coterie.federated.settings import Deployment
from coterie.federated.sources import Table, in_order, make_loss
from coterie.fitting.settings import Settings
from coterie.fitting.units import LARGEST_COUNT, Units, UserStatistics
from coterie.losses import LOSSES, Loss, Samples, SquaredDistance

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

    def given(self, source: Users | Table, *, lenient: bool = False,
              known: Mapping[str, Collection[str]] | None = None) -> Users:
        """A node's rows as numbers, in the table's own units; see `Recipe.encode`."""
        if isinstance(source, Table) != (self.recipe is not None):
            said = ("a table, and the federation agreed on prepared numbers" if self.recipe is None
                    else "prepared numbers, and the federation agreed on a table")
            raise InvalidInput(f"this node has {said}",
                               remedy="Give all nodes the same kind of data")
        if isinstance(source, Users):
            users = source
        else:
            with located(source.place):
                assert self.recipe is not None
                users = self.recipe.encode(source.frame, lenient=lenient, known=known)
        if not self.signs or users.targets is None:
            return users
        return replace(users, targets=0.5 * (users.targets + 1.0))

    def data(self, source: Users | Table, holdout: float, seed: int, least: int = 0) -> Data:
        """A node's data as its users answer from them; without units yet, in the table's own units.
        """
        return self.data_of(self.given(source), holdout, seed, least)

    def data_of(self, users: Users, holdout: float, seed: int, least: int = 0, *,
                own: bool = False) -> Data:
        """The data of users whose rows are numbers, as they answer from them; see `Users.hold_out`.

        Parameters
        ----------
        users : their rows.
        holdout, seed, least : which rows are held out.
        own : whether these are the owner's own choice: then they are the same whatever the server
            takes the target for, and in whatever order it names the classes.
        """
        # 1. Held-out rows: a run learns from the others only, a fit from all, which include them.
        fits, split, train, held, judged = bool(self.task), None, None, None, None
        if holdout > 0 and self.task != "clustering":
            by_class = self._in_own_order(users) if own else None
            split = users.hold_out(holdout, seed=seed, least=least, stratify=(
                self.task == "classification" if by_class is None else by_class))
        # 2. The units of the models, and those of models found without the held-out rows.
        units, inner = self.train_units or self.units, self._inner
        if split is not None:
            trained = inner if units is None else units.inner
            train, held = trained(split.train) if fits else None, trained(split.test)
            judged = (units, split.test) if fits and units is not None else None
            users = users if fits else split.train
        given = (users,) if split is None else (users, split.train)
        users = inner(users)
        # 3. The loss; users who only describe their rows need none.
        loss: Loss = SquaredDistance()
        samples = Samples(users, users.n_features)
        if self.units is not None or not (fits or self.recipe is not None):
            loss = self.make_loss()
            samples = loss.prepare(users)
        return Data(loss, samples, held, train=train, judged=judged, fits=fits,
                    given=given if fits else ())

    def _in_own_order(self, users: Users) -> Any:
        """(n_rows,) numbers in the order of the targets as they are in the table."""
        classes = () if self.recipe is None else self.recipe.classes
        if users.targets is None or not classes:
            return users.targets
        order = sorted(range(len(classes)), key=lambda k: number_key(classes[k]))
        return np.argsort(order)[users.targets.astype(np.int64)].astype(float)

    def _inner(self, users: Users) -> Users:
        """Users in the units of the models."""
        if self.units is not None:
            return self.units.inner(users)
        if self.scale:
            return Standardizer(np.array(self.mean), np.array(self.scale)).transform(users)
        return users

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
        recipe = None if self.recipe is None else self.recipe.to_json()
        units, train_units = (None if part is None else json_ready(part.state())
                              for part in (self.units, self.train_units))
        return json.dumps({**said, "recipe": recipe, "units": units, "train_units": train_units},
                          ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """From what `to_json` gives."""
        said: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value
                                for name, value in json.loads(text).items()}
        made: dict[str, Any] = {"recipe": Recipe.from_json, "units": Units.from_state,
                                "train_units": Units.from_state}
        said |= {name: make(said[name]) for name, make in made.items()
                 if said.get(name) is not None}
        return cls(**said)



class Carrier(Runtime, Protocol):
    """A runtime that finds its users itself."""

    refused: dict[Any, str]  # nodes whose introduction cannot be true, with the reason

    def gather(self, n_users: int, wait: float) -> list[tuple[str, Introduction]]:
        """Wait for so many users: what their nodes say of themselves, each with a name for the
        node.
        """

    def use(self, agreement: Agreement) -> None:
        """Send this agreement with every query from now on."""


def agree(runtime: Carrier, deployment: Deployment, fit: Settings | None = None,
          privacy: Privacy | None = None, folder: Path | None = None) -> Agreement:
    """Find the users, and agree on the columns, their scaling, the task and the loss.

    Parameters
    ----------
    runtime : finds the users and carries the queries.
    deployment : what is asked of the data, and how many users to wait for.
    fit : the settings of a fit, whose questions find units and loss; None for a run at a given lam.
    privacy : what a private fit promises: then only what is public is agreed on.
    folder : of the checkpoint; what was settled there at an earlier start is settled.

    Raises
    ------
    Incompatible : fewer users came, some do not answer, or the nodes' data do not fit together.
    InvalidInput : a column is not the same kind of thing at all nodes; both are named.
    """
    if folder is not None and (folder / "federation.json").exists():
        text = (folder / "federation.json").read_text(encoding="utf-8")
        return replace(Agreement.from_json(text), refused=read_aside(folder))
    # 1. Who is there.
    nodes, agreement = introduce(runtime, deployment.n_users, deployment.wait)
    tables = [node for _, node in nodes if node.targets == "table"]
    # 2. How tables become numbers.
    recipe = None
    if privacy is not None and tables:
        recipe = public_recipe(tables, deployment, privacy)
    elif nodes[0][1].summary is not None:
        recipe, nodes, reasons = recipe_of(nodes, getattr(runtime, "apart", False))
        agreement = agreement.without(reasons) if reasons else agreement
    if recipe is not None:
        agreement = replace(agreement, recipe=recipe, features=recipe.feature_names)
    # 3. The task of a fit; or units and loss of a run.
    if fit is None:
        settle = _settle_numbers if recipe is None else _settle_table
        agreement = settle(runtime, deployment, agreement, nodes)
    elif recipe is not None:
        agreement = replace(agreement, task=recipe.task, n_classes=len(recipe.classes))
    else:
        agreement = _settle_task(agreement, nodes, fit.loss, deployment.task, privacy)
    # 4. It is settled for later starts, too.
    if folder is not None:
        write_agreement(folder, agreement)
        write_aside(folder, agreement.refused)
    return agreement


def introduce(runtime: Carrier, n_users: int,
              wait: float) -> tuple[list[tuple[str, Introduction]], Agreement]:
    """What the nodes say of themselves, and an agreement on who takes part; of prepared numbers
    also on columns.
    """
    apart: bool = getattr(runtime, "apart", False)
    nodes, reasons = of_one_kind(runtime.gather(n_users, wait), apart)
    names = in_order(name for _, node in nodes for name in node.names)
    return nodes, Agreement(names=names, features=columns_of(nodes[0][1]) or (),
                            run=uuid.uuid4().hex, refused={**runtime.refused, **{
                                name: reason for name, reason in reasons.items()
                                if name not in names}})


def _settle_table(runtime: Carrier, deployment: Deployment, agreement: Agreement,
                  nodes: Sequence[tuple[str, Introduction]]) -> Agreement:
    """The units of a table, for a run at a given lam."""
    if deployment.loss_options:
        raise InvalidInput("loss-options are for prepared numbers, and the nodes have tables",
                           remedy="Use loss and ridge, as in coterie fit")
    agreement, statistics = _describe(runtime, agreement)
    recipe = agreement.recipe
    assert recipe is not None
    units = Units.from_moments(statistics, recipe.task, loss=deployment.loss,
                               ridge=deployment.ridge, n_classes=len(recipe.classes),
                               standardize=deployment.scaled(table=True))
    return replace(agreement, units=units)


def _settle_numbers(runtime: Carrier, deployment: Deployment, agreement: Agreement,
                    nodes: Sequence[tuple[str, Introduction]]) -> Agreement:
    """The loss and the scaling of prepared numbers, for a run at a given lam."""
    loss, kinds = deployment.loss, {node.targets for _, node in nodes}
    if loss == "auto":
        if len(kinds) > 1 or kinds == {"numbers"}:
            raise InvalidInput("the targets are numbers, which may be classes, counts or "
                               "measurements", remedy="Name the loss, for example loss = "
                               "'squared', or give the nodes tables")
        loss = {"none": "squared_distance", "signs": "logistic"}[kinds.pop()]
    built, options = make_loss(loss, deployment.loss_options), deployment.loss_options
    if built.multiclass and built.n_classes is None:
        known, agreement = _bounded_classes(agreement, nodes)
        options = json.dumps({**json.loads(options or "{}"), "n_classes": known})
    agreement = replace(agreement, loss=loss, loss_options=options)
    if not deployment.scaled(table=False):
        return agreement
    agreement, statistics = _describe(runtime, agreement)
    scaler = Standardizer.from_moments(statistics.features, feature_names=agreement.features)
    return replace(agreement, mean=tuple(scaler.mean.tolist()), scale=tuple(scaler.scale.tolist()))


def _settle_task(agreement: Agreement, nodes: Sequence[tuple[str, Introduction]], loss: str,
                 asked: str, privacy: Privacy | None) -> Agreement:
    """The task of prepared numbers in a fit: that of the loss named, or by the targets."""
    kinds = {node.targets for _, node in nodes}
    signs = kinds == {"signs"}
    require(privacy is None or ("none" not in kinds and asked != "clustering"
                                and loss in ("auto", "squared", "logistic", "poisson")),
            "a private fit predicts numbers (squared loss), two classes (logistic loss) or counts "
            "(Poisson loss)",
            "Use the loss 'squared', 'logistic' or 'poisson', or leave epsilon out")
    if "none" in kinds:
        if len(kinds) > 1:
            raise InvalidInput("some nodes have targets and others have none",
                               remedy="Give all of them targets")
        return replace(agreement, task="clustering")
    task = LOSSES[loss].task if loss in LOSSES else None
    if privacy is not None and asked == "counts" and loss == "auto":
        task = "counts"
    if task is None or task == "clustering":
        task = "classification" if signs else "regression"
    n_classes = 2 * (task == "classification")
    if privacy is None and task == "classification":
        n_classes, agreement = _bounded_classes(agreement, nodes)
    return replace(agreement, task=task, signs=signs and task == "classification",
                   n_classes=2 if signs and privacy is None else n_classes)


def _bounded_classes(agreement: Agreement, nodes: Sequence[tuple[str, Introduction]],
                     ) -> tuple[int, Agreement]:
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
        needed = 8.0 * (20 * len(agreement.names) * dim + dim**2)
        if known <= _MOST_CLASSES and needed <= free_memory():
            return known, agreement.without(reasons) if reasons else agreement
        fewer = [(label, node) for label, node in kept if node.n_classes < known]
        require(fewer, f"the targets are {known:,} classes, which is more than {_MOST_CLASSES:,} "
                "or than there is memory for", "Name another loss, or give the nodes tables")
        for label, node in kept:
            if node.n_classes == known:
                reasons |= dict.fromkeys(node.names, f"{label} declares {known:,} classes")
        kept = fewer


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
    # 1. Ask until everybody has answered.
    for turn in range(_DESCRIBE, _DESCRIBE + _TRIES):
        replies = runtime.exchange(Batch("describe", turn, np.flatnonzero(~known)))
        reasons |= {user: reason for user, reason in replies.refused if reason.startswith(REFUSES)}
        pairs = [*replies.singles, *(pair for batch in replies.batches for pair in batch.items())]
        for user, reply in pairs:
            if not _describes(reply, p):
                reasons[user] = "it does not describe the columns that were agreed on"
                continue
            said = reply.arrays
            counts[user], means[user], m2[user] = said["count"], said["means"], said["m2"]
            with_target[user], target[user] = "target" in said, said.get("target", 0.0)
            reasons.pop(user, None)
            known[user] = True
        known[list(reasons)] = True
        if known.all():
            break
    else:
        silent = [agreement.names[user] for user in np.flatnonzero(~known)[:3]]
        raise Incompatible(f"{int((~known).sum())} user(s) did not describe their columns "
                           f"({show(*silent)}), so nothing can be scaled. Start their nodes, or "
                           "lower `n-users`.")
    # 2. Refuse who cannot be believed.
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
    # 3. What is left.
    rows, targets = counts[stay].astype(np.int64), None
    features = plausible.without_dominant(Moments(rows, means[stay], m2[stay]))
    if with_target[stay].all():
        targets = plausible.without_dominant(Moments(rows, target[stay, :1], target[stay, 1:2]))
    return agreement, UserStatistics(agreement.features, features, targets, target[stay, 2])


def _describes(reply: Message, n_features: int) -> bool:
    shapes = {"count": (), "means": (n_features,), "m2": (n_features,), "target": (3,)}
    return (reply.kind == "describe" and set(reply.arrays) >= {"count", "means", "m2"}
            and all(array.shape == shapes.get(name) and np.isfinite(array).all()
                    for name, array in reply.arrays.items()))


def public_recipe(tables: Sequence[Introduction], deployment: Deployment,
                  privacy: Privacy) -> Recipe:
    """How tables become numbers in a private federation, from what is public: bounds and levels of
    columns.

    Raises
    ------
    InvalidInput : a column of which too little is public.
    """
    user, target = (_one_column(tables, what, getattr(deployment, what))
                    for what in ("user", "target"))
    task = deployment.task
    require(target, "a private fit needs a target",
            "Set target in the configuration of the nodes, or give --target COLUMN")
    numbers = set.intersection(*(set(table.features) for table in tables))
    given = dict(privacy.clip) if isinstance(privacy.clip, Mapping) else {}
    named, drop = split_names(deployment.features), (target, user, *split_names(deployment.drop))
    for name in named:
        require(name in given or (not given and name in numbers),
                f"too little of the column {name!r} is public",
                f"Name its bounds or its levels in clip, for example {name}=0:100 or {name}=no|yes")
    names = [name for name in (named or given or tables[0].features)
             if name not in drop and (name in given or name in numbers)]
    require(names,
            "no column is left to learn from", "Name columns and their bounds or levels in clip")
    why = (", which clip names." if given
           else "; texts would need their levels in clip, to be public.")
    columns = tuple(_column(name, privacy.range_of(name), privacy.levels_of(name))
                    for name in names)
    classes = privacy.levels_of(target)
    if len(classes) > 2:
        raise InvalidInput("a private fit predicts two classes, numbers or counts, and "
                           f"{target!r} has {len(classes)} classes",
                           remedy="Predict one class against the others")
    require(classes or task != "classification",
            f"the classes of {target!r} are not public", f"Name them in clip: {target}=no|yes")
    fit = deployment.fit
    counts = task == "counts" or (fit is not None and fit.loss == "poisson")
    require(not (classes and counts), f"clip names classes of {target!r}, which is to be counts",
            f"Give its bounds, for example {target}=0:100")
    return Recipe(user=user, target=target,
                  task="classification" if classes else "counts" if counts else "regression",
                  classes=classes, class_kind="str", columns=columns,
                  notes=(f"Private: only the columns {show(*names)} are used{why}",))


def _one_column(tables: Sequence[Introduction], what: str, given: str) -> str:
    """The column of users or of targets: that of the run, or the one that all nodes have set."""
    named = sorted({getattr(table, what) for table in tables} - {""})
    if not given and len(named) > 1:
        raise InvalidInput(f"nodes have set different columns as {what}: {show(*named)}",
                           remedy="Give all nodes the same user and target")
    return given or next(iter(named), "")


def _column(name: str, bounds: Any, levels: tuple[str, ...]) -> Column:
    if levels:
        two = len(levels) == 2
        return Column(name=name, kind="category", levels=levels[1:] if two else levels,
                      reference=levels[0] if two else None, fill=0.5 if two else 0.0)
    fill = 0.0 if bounds is None else 0.5 * (bounds[0] + bounds[1])
    return Column(name=name, kind="number", fill=fill)


def write_agreement(folder: Path, agreement: Agreement) -> None:
    """Keep what was agreed on in the folder of a checkpoint."""
    write_atomically(folder / "federation.json", agreement.to_json().encode(), durable=True)


def read_aside(folder: Path) -> dict[Any, str]:
    """Who was refused before, with the reason, from the folder of a checkpoint."""
    file = folder / "aside.json"
    return dict(json.loads(file.read_text("utf-8"))) if file.exists() else {}


def write_aside(folder: Path, aside: Mapping[Any, str]) -> None:
    """Keep who was refused, if anybody was."""
    if aside:
        write_atomically(folder / "aside.json", json.dumps(list(aside.items())).encode(),
                         durable=True)
