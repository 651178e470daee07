"""What is given to a fit: its settings, with the one list of their defaults; where it reports its
progress, and where it keeps its finished parts.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from coterie.base.errors import InvalidInput
from coterie.data.encoding import Task
from coterie.problem.problem import check_lam
from coterie.problem.weights import KINDS

#: Called with what is being done, how many steps are done, of how many, and a text.
FitProgress = Callable[[str, int, int, str], None]
#: Finished parts of a fit by name: arrays, numbers and texts only.
FinishedParts = MutableMapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a fit. All have defaults, and the command and the estimators take theirs from
    here.

    Parameters
    ----------
    task : what the targets are: classes 0, 1, ..., numbers, counts, or none.
    loss : a name in LOSSES that fits the task.
    lam : the penalty strength: a number; "auto", which takes the groups found (on weights other
        than "auto": as "score"); or "score", the least mean loss on held-out rows.
    weights : "auto" leaves them to the fit, see `coterie.fitting.fit`; "unit" for
        weight 1 on all pairs, the paper's case; or "wald", "gaussian", "inverse" for the k nearest
        users of each user.
    count : what counts alike in the model of a group: "rows", so that a user with few rows has
        little influence, or "users", as in the convex problem.
    ridge : L2 strength, intercept included.
    n_lams : number of points of the path; with lam "auto" and more than 10,000 numbers in all
        models, fewer.
    max_groups : largest number of groups; None for no limit.
    k : number of nearest users that each user is connected to.
    tol : the certified relative gap to reach.
    holdout : the share of every user's rows that is held out for validation; 0 for none.
    standardize : whether features are standardised.
    n_classes : number of classes, where not all of them are among the samples.
    seed : of the choice of held-out rows.
    average : "auto", which averages several kinds of models where that predicts better than one
        (`coterie.fitting.average`); or "off" for the one kind that was chosen.
    curves : of an average: "auto" for curves of columns and users' own means of columns, or "off"
        for straight columns.
    scale : of an average: "auto", which also tries logarithms of positive targets and columns;
        "level" for none, or "log" for these only.

    Raises
    ------
    InvalidInput : a value that is not possible.

    Example
    -------
    >>> Settings(task="regression", holdout=0.0).ridge
    0.001
    """

    task: Task = "regression"
    loss: str = "auto"
    lam: float | Literal["auto", "score"] = "auto"
    weights: str = "auto"
    count: Literal["rows", "users"] = "rows"
    ridge: float = 1e-3
    n_lams: int = 24
    max_groups: int | None = None
    k: int = 5
    tol: float = 1e-6
    holdout: float = 0.2
    standardize: bool = True
    n_classes: int = 0
    seed: int = 0
    average: str = "auto"
    curves: str = "auto"
    scale: str = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.lam, str):
            if self.lam not in ("auto", "score"):
                raise InvalidInput(
                    f"lam must be a number >= 0, 'auto' or 'score', got {self.lam!r}",
                    remedy="Use auto")
        else:
            check_lam(self.lam)
        if self.weights not in KINDS:
            raise InvalidInput(f"unknown weights {self.weights!r}",
                               remedy=f"Choose one of: {', '.join(KINDS)}")
        for name, values in (("average", ("auto", "off")), ("curves", ("auto", "off")),
                             ("scale", ("auto", "level", "log"))):
            if getattr(self, name) not in values:
                raise InvalidInput(f"{name} must be {' or '.join(map(repr, values))}, got "
                                   f"{getattr(self, name)!r}", remedy="Use auto")
        if self.count not in ("rows", "users"):
            raise InvalidInput(f"count must be 'rows' or 'users', got {self.count!r}",
                               remedy="Use rows")
        if not 0 <= self.holdout < 1:
            raise InvalidInput(f"holdout must be a share in [0, 1), got {self.holdout!r}",
                               remedy="Use for example 0.2")
        for name, least in (("n_lams", 2), ("max_groups", 1), ("k", 1), ("seed", 0)):
            number = getattr(self, name)
            if name == "max_groups" and number is None:
                continue
            if isinstance(number, bool) or not isinstance(number, (int, np.integer)) \
                or number < least:
                raise InvalidInput(f"{name} must be a whole number >= {least}, got {number!r}",
                                   remedy="Leave it out")
        if not (np.isfinite(self.tol) and self.tol > 0):
            raise InvalidInput(f"tol must be a finite number > 0, got {self.tol!r}",
                               remedy="Use for example 1e-6")


@dataclass(frozen=True, eq=False)
class Work:
    """Where a fit reports its progress, and where it keeps its finished parts.

    Parameters
    ----------
    report : called with the progress.
    parts : the finished parts.
    prefix : tells the parts of one plan from those of another.
    """

    report: FitProgress = lambda *_: None
    parts: FinishedParts = field(default_factory=dict)
    prefix: str = ""

    def show(self, what: str, done: int = 0, total: int = 1, text: str = "") -> None:
        """Report what is being done."""
        self.report(self.prefix + what, done, total, text)

    def once(self, name: str, compute: Callable[[], Any]) -> Any:
        """The part of this name; computed and kept if it is not there yet."""
        if self.prefix + name not in self.parts:
            self.keep(name, compute())
        return self.parts[self.prefix + name]

    def keep(self, name: str, value: Any) -> None:
        """Keep a part."""
        self.parts[self.prefix + name] = value

    def get(self, name: str, default: Any = None) -> Any:
        """A part, or the default."""
        return self.parts.get(self.prefix + name, default)
