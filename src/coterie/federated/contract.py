"""What the owner of a node has set, and what a server may therefore make of its data.

The node configuration is read once, by one parser: a key that does not exist, or a value of another
type, is refused with the nearest key that does. Settings of the owner's own data function are named
`args.NAME`. Every question passes the contract: what a server's recipe says of users, target,
columns and their types must be what the owner has set, which is checked before rows are read; and
of the levels of a column only those are told apart that the node itself has introduced. A column
that the owner has left out, a level that too few rows have, and a node without data of its owner
answer nothing.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from coterie.base.errors import CoterieError, InvalidInput, Refused, require
from coterie.data.encoding import Recipe
from coterie.data.summary import MOST_LEVELS, TASKS
from coterie.data.users import Users
from coterie.data.validation import show, split_names, suggest
from coterie.federated.agreement import Agreement, Introduction
from coterie.federated.private.policy import check as check_budget
from coterie.federated.protocol.messages import KINDS
from coterie.federated.settings import by_present_names, key_of
from coterie.federated.sources import Encoded, Table

log = logging.getLogger("coterie.federated")
PUBLIC = "public"  # the split key of an owner to whom it does not matter which rows are held out
ARGS = "args."  # begins the names of settings of the owner's own data function
#: Rows that a level needs to be told apart, unless the owner says otherwise: means of one or two
#: rows are the rows.
LEAST_ROWS = 3
_NUMBER, _TEXT = "number", "text"
_KINDS_OF = {_NUMBER: ("number", "flag", "date", "duration"), _TEXT: ("category",)}
_ORDINARY: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float),
                                          "bool": (bool,)}
_IN_WORDS = {"str": "a text", "int": "an integer", "float": "a number", "bool": "true or false"}


@dataclass(frozen=True, kw_only=True)
class Contract:
    """The configuration of a node, with hyphens in the names of the keys.

    Parameters
    ----------
    data, path, user, target, separator, split, dataset, dataset_options : where the owner's data
        are; see `Deployment`.
    columns : the columns that may be learned from, with what they hold where that is to be fixed:
        "age=number, sex=f|m, note=text". A list of levels makes these the only ones.
    features, drop : without `columns`, those that may be learned from, and those that may not.
    min_count : rows of this node that a level needs to be told apart; 0 for the default, 3, or 1
        with consent.
    task, holdout : the only task, and the only share of rows held out, that are answered; any task
        if empty.
    loss : "module:name" of a loss that a server may name.
    models_dir, return_models : where models of users are kept, and whether newcomers send theirs.
    ledger_dir : folder of the ledger; needed with a budget, otherwise one below $XDG_STATE_HOME or
        ~/.local/state, by the data.
    allow : kinds of questions that are answered, separated by commas. If empty: with a budget,
        those of a private federation; otherwise all.
    consent : "hessians" if users with no more rows than coordinates send Hessians and second
        moments too.
    max_questions, max_hessians : how many questions about the same rows of a user are answered, one
        for every d numbers of the answers, and how many Hessians; 0 for the defaults.
    max_seconds : how long one message may keep the node busy.
    split_key : a secret from which it follows which rows are held out; random if empty, and by the
        server's seed if "public".
    budget_epsilon, budget_delta : what all noisy releases of a user may cost together; none are
        made without it.
    budget_unit : what the budget protects: "row", or "user", all rows of a user.
    simulation : whether a server names the data, which are its own.
    partition_id, num_partitions : of a node that takes a part.
    state_dir : of earlier versions, without effect.
    args : settings of the owner's own data function.
    given : the keys that the owner has set, as they are written.

    Raises
    ------
    InvalidInput : a key or a value that cannot be used.

    Example
    -------
    >>> Contract.of({"data": "csv", "user": "ward", "columns": "age, sex=f|m"}).kinds_of_columns
    {'age': '', 'sex': ('f', 'm')}
    """

    data: str = ""
    path: str = ""
    user: str = ""
    target: str = ""
    columns: str = ""
    features: str = ""
    drop: str = ""
    separator: str = ""
    min_count: int = 0
    split: bool = False
    dataset: str = ""
    dataset_options: str = ""
    task: str = ""
    holdout: float = 0.2
    loss: str = ""
    models_dir: str = ""
    return_models: bool = False
    ledger_dir: str = ""
    allow: str = ""
    consent: str = ""
    max_questions: int = 0
    max_hessians: int = 0
    max_seconds: float = 300.0
    split_key: str = ""
    budget_epsilon: float | None = None
    budget_delta: float | None = None
    budget_unit: str = "row"
    simulation: bool = False
    partition_id: int = 0
    num_partitions: int = 1
    state_dir: str = ""
    args: Mapping[str, Any] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = set(self.allowed_kinds) - set(KINDS)
        if unknown:
            raise InvalidInput(f"`allow` names {sorted(unknown)[0]!r}, which is no kind of "
                               "question", remedy=f"Kinds are: {', '.join(KINDS)}")
        require(self.consent in ("", "hessians"),
                f"consent can be given to hessians, got {self.consent!r}", "Use hessians")
        for name in ("max_questions", "max_hessians", "min_count"):
            require(getattr(self, name) >= 0, f"{key_of(name)} must not be negative",
                    "Use 0 for the default")
        require(0 < self.max_seconds < float("inf"), "max-seconds must be a positive number, got "
                f"{self.max_seconds!r}", "Use for example 300")
        require(0 <= self.holdout < 1,
                f"holdout must be a share in [0, 1), got {self.holdout!r}", "Use 0.2")
        require(self.task in ("", "auto", *TASKS), f"there is no task {self.task!r}",
                f"Choose one of: {', '.join(TASKS)}")
        require(not (self.columns and self.features), "columns and features say the same twice",
                "Give one of them")
        require(not self.simulation or not self.data, "with simulation the server names the data, "
                f"and data is {self.data!r}", "Leave one of them out")
        _ = self.kinds_of_columns
        self._check_budget()

    def _check_budget(self) -> None:
        require((self.budget_epsilon is None) == (self.budget_delta is None),
                "a budget has both an epsilon and a delta", "Set budget-epsilon and budget-delta")
        require(self.budget_unit in ("row", "user"), "budget-unit must be row or user, got "
                f"{self.budget_unit!r}", "Use row")
        if self.budget_epsilon is None or self.budget_delta is None:
            return
        check_budget(self.budget_epsilon, self.budget_delta)
        require(self.ledger_dir, "a budget needs a ledger-dir: without one, a copy of the file "
                "would have a budget of its own",
                "Name a folder that all nodes with these data share, for example "
                'ledger-dir="/var/lib/coterie/ledger"')

    @classmethod
    def of(cls, own: Mapping[str, Any]) -> Self:
        """From a node's configuration.

        Parameters
        ----------
        own : keys and values, as Flower gives them to a node.

        Raises
        ------
        InvalidInput : a key that does not exist, or a value of another type.
        """
        own = by_present_names(own)
        types = {key_of(f.name): str(f.type).removesuffix(" | None") for f in fields(cls)
                 if f.name not in ("args", "given")}
        given: dict[str, Any] = {"args": {}, "given": own}
        for key, value in own.items():
            if key.startswith(ARGS):
                given["args"][key.removeprefix(ARGS)] = value
                continue
            if key not in types:
                raise InvalidInput(f"the node configuration has {key!r}, which is no setting",
                                   remedy=f"{_nearest(key, types)}A setting of your own data "
                                   f"function is called {ARGS}{key}")
            wanted = types[key]
            if isinstance(value, bool) != (wanted == "bool") or not isinstance(
                    value, _ORDINARY[wanted]):
                raise InvalidInput(f"{key} of the node is {value!r}",
                                   remedy=f"Give {_IN_WORDS[wanted]}")
            given[key.replace("-", "_")] = value
        return cls(**given)

    # -- what follows from it

    @property
    def owned(self) -> bool:
        """Whether the data are the owner's."""
        return bool(self.data)

    @property
    def private(self) -> bool:
        """Whether there is a budget: then nothing depends on rows but through a release."""
        return self.budget_epsilon is not None

    @property
    def splits(self) -> bool:
        """Whether the owner, and not a server, chooses which rows are held out."""
        return self.owned and self.split_key != PUBLIC

    @property
    def allowed_kinds(self) -> tuple[str, ...]:
        """The kinds that `allow` names."""
        return tuple(word for word in self.allow.replace(",", " ").split() if word)

    @property
    def least_rows(self) -> int:
        """Rows of this node that a level needs to be told apart."""
        return self.min_count or (1 if self.consent else LEAST_ROWS)

    @cached_property
    def kinds_of_columns(self) -> dict[str, Any]:
        """The columns that `columns` names, with "number", "text", levels, or "" for any."""
        named: dict[str, Any] = {}
        for part in split_names(self.columns):
            name, sign, holds = (text.strip() for text in part.partition("="))
            levels = tuple(text.strip() for text in holds.split("|"))
            good = (not sign or holds in _KINDS_OF or len(levels) > 1) and name not in named
            require(good and name and all(levels) == bool(sign), "columns cannot be read at "
                    f"{part!r}", "Use for example columns=\"age=number, sex=f|m, note=text\"")
            named[name] = levels if len(levels) > 1 else holds
        return named

    @cached_property
    def config(self) -> dict[str, Any]:
        """What is said of the data, for `sources.load`."""
        said = {key: value for key, value in self.given.items()
                if key not in _NOT_OF_DATA and not key.startswith(ARGS)}
        if self.columns:
            said["features"] = ", ".join(self.kinds_of_columns)
        if self.owned:
            said["min-count"] = self.least_rows
        return {**said, **self.args}

    def require_data(self, simulated: bool) -> None:
        """Refuse to answer from data that only a server has named, except in a simulation.

        Raises
        ------
        Refused : the owner has set none.
        """
        if not (self.owned or self.simulation or simulated):
            raise Refused("the owner of this node has set no data, so it answers nothing",
                          remedy='Set data in the node configuration, for example data="csv" '
                          'path="/data/visits.csv" user="patient"')

    # -- before rows are read

    def permit(self, agreement: Agreement) -> None:
        """Refuse what a server makes of the data, unless the owner's configuration says the same.

        Raises
        ------
        Refused : other users, another target or task, a column that is left out, or of another
            type; by name.
        """
        recipe = agreement.recipe
        if not self.owned or recipe is None:
            return
        for what, said, own in (("users", recipe.user or "", self.user),
                                ("the target", recipe.target or "", self.target)):
            if said != own:
                raise Refused(f"the recipe takes {_named(said)} as the column of {what}, and the "
                              f"owner of the node has set {_named(own)}",
                              remedy="Give all nodes the same user and target")
        if self.task not in ("", "auto", recipe.task):
            raise Refused(f"the recipe is for {recipe.task}, and the owner of the node has set "
                          f"task = {self.task!r}")
        names = [column.name for column in recipe.columns]
        twice = {name for name, many in Counter(names).items() if many > 1}
        allowed = {*self.kinds_of_columns, *split_names(self.features)}
        left_out = {self.user, self.target, *split_names(self.drop)}
        for column in recipe.columns:
            name = column.name
            if name in twice or name in left_out or (allowed and name not in allowed):
                raise Refused(f"the recipe uses the column {name!r}, which the owner of the node "
                              f"{'allows once' if name in twice else 'does not allow'}",
                              remedy="Name it in columns, or leave it out of the run")
            self._permit_kind(column.name, column.kind, (*column.levels, *(
                () if column.reference is None else (column.reference,))))

    def _permit_kind(self, name: str, kind: str, levels: tuple[str, ...]) -> None:
        """Refuse a column of another type, or levels that are too many or not the owner's."""
        if len(levels) > MOST_LEVELS:
            raise Refused(f"the recipe names {len(levels)} levels of the column {name!r}, and at "
                          f"most {MOST_LEVELS} are told apart")
        own = self.kinds_of_columns.get(name, "")
        wanted = _TEXT if isinstance(own, tuple) else own
        if wanted and kind not in _KINDS_OF[wanted]:
            raise Refused(f"the recipe takes the column {name!r} as a {kind}, and the owner of the "
                          f"node has set {wanted}")
        strange = [level for level in levels if isinstance(own, tuple) and level not in own]
        if strange:
            raise Refused(f"the recipe names the level {strange[0]!r} of the column {name!r}, and "
                          f"the owner of the node has set {'|'.join(own)}")

    # -- of the rows

    def introduction(self, source: Users | Table, agreed: bool, private: bool) -> Introduction:
        """What the node says of itself: with a budget nothing that depends on values, but names.

        Parameters
        ----------
        source : the data.
        agreed : whether names are enough.
        private : whether the run is private.
        """
        if agreed:
            return Introduction(source.names)
        if not self.private:
            return Introduction.of(source, private=private)
        if isinstance(source, Table):
            return Introduction(source.names, targets="table", user=self.user, target=self.target,
                                features=tuple(name for name, kind in self.kinds_of_columns.items()
                                               if kind == _NUMBER))
        targets = ("none" if source.targets is None
                   else "signs" if self.task == "classification" else "numbers")
        return Introduction(source.names, source.feature_names, targets=targets)

    def levels(self, recipe: Recipe | None,
               source: Users | Table) -> dict[str, frozenset[str]] | None:
        """The levels that are told apart of every column of texts: those that the node introduces.

        Those that only other nodes have are as if no row had them, whether one has or not.

        Raises
        ------
        Refused : the recipe leaves out levels that this node introduces, as none does that is made
            of the introductions of all nodes.
        """
        names = [column.name for column in recipe.columns if column.kind == "category"] \
            if recipe is not None and self.owned and not self.private else []
        if recipe is None or not names or not isinstance(source, Table):
            return None
        facts = {one.name: frozenset(one.levels.counts) for one in replace(
            source, features=tuple(names), drop=()).summary().columns}
        for column in recipe.columns:
            named = {*column.levels, *([] if column.reference is None else [column.reference])}
            missing = sorted(facts.get(column.name, frozenset()) - named)
            if column.kind == "category" and missing and len(named) < MOST_LEVELS:
                raise Refused(f"the recipe leaves out the level {missing[0]!r} of the column "
                              f"{column.name!r}, which this node has introduced",
                              remedy="Begin the run again in another folder")
        return facts

    def users(self, agreement: Agreement, source: Users | Table | Encoded) -> Users:
        """The rows as numbers, by a recipe that is permitted."""
        if isinstance(source, Encoded):
            return source.users
        if not self.private:
            if self.owned and isinstance(source, Table) and agreement.recipe is not None:
                source = source.without_groups_of(self.least_rows, agreement.recipe.columns)
            known = self.levels(agreement.recipe, source)
            return agreement.given(source, known=known)
        if isinstance(source, Users):
            source = _harmless(source, agreement.signs)
        elif agreement.recipe is not None:
            try:
                agreement.recipe.check_levels(source.frame)
            except CoterieError as error:  # a fact of the rows, for the owner alone
                log.error("a release will be of nothing: %s", error)
        return agreement.given(source, lenient=True)


#: Keys that say nothing of where the data are.
_NOT_OF_DATA = {"columns", "holdout", "ledger-dir", "allow", "consent", "max-questions",
                "max-hessians", "max-seconds", "split-key", "simulation", "min-count"}


def _harmless(users: Users, signs: bool) -> Users:
    """Prepared numbers with targets that are signs where signs were agreed on."""
    if not signs or users.targets is None:
        return users
    return replace(users, targets=np.where(users.targets > 0, 1.0, -1.0))


def _nearest(key: str, known: Mapping[str, Any]) -> str:
    first, mark, _ = suggest(key, known).partition("? ")
    return f"{first}{mark}" if mark else ""


def _named(name: str) -> str:
    return show(name) if name else "none"
