"""What the groups of a fit are, in the units and the words of its table.

Of a group those coefficients are told in which its centre differs most from that of the others:

    size of a difference = |standardised coefficient - mean of the others, by users|

What is typical is the prediction where all columns have their mean.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import numpy as np

from coterie.base.errors import InvalidInput
from coterie.base.labels import many, plural
from coterie.base.types import Array, Ints
from coterie.fitting.result import Fit
from coterie.fitting.units import Units
from coterie.output.plots.along import Curves, DrawnCurve, is_binary

_TOLD, _LISTED = 3, 4  # coefficients of a sentence, and names of a group, at most
_SMALLER = 0.15  # of the largest difference, below which another one is not told
_NAMES = re.compile(r"[A-Za-z]{3,20}")
_ENDINGS = re.compile(r"[\W_]*(id|no|nr|number|name|code|key)$", re.I)
_NO_NOUN = ("user", "who", "owner", "index", "row", "uid")
_TURN = 0.1  # of the size of a curve that it rises or falls at least before a turn that is told
_QUICK = 500_000  # numbers in the rows up to which errors are computed


class GroupWords(NamedTuple):
    """What is said of one group: its number from 1, who is in it, and how it differs."""

    number: int
    users: int
    names: str
    differs: str

    def line(self, noun: str) -> str:
        """One sentence."""
        what = f": {self.differs}" if self.differs else ""
        return f"Group {self.number}, {many(self.users, noun)} ({self.names}){what}."


def columns_of(fit: Fit) -> tuple[str, str]:
    """The names of the target and of the user column; empty where there is none."""
    recipe, table = fit.recipe, fit.table
    if recipe is not None:
        return recipe.target or "", recipe.user or ""
    return ("", "") if table is None else (table.target, table.user)


def noun_of(fit: Fit) -> str:
    """What a user is called: the user column's name where it is a word, else "user" or "point"."""
    if fit.noun != "user":
        return fit.noun
    word = _ENDINGS.sub("", columns_of(fit)[1]).lower()
    if re.search(r"[^s]s$", word) and not word.endswith(("us", "is")):
        word = word[:-1]
    return word if _NAMES.fullmatch(word) and word not in _NO_NOUN else "user"


def describe_groups(fit: Fit) -> list[GroupWords]:
    """A line for each group, in the order of the labels; empty where users share nothing, or one
    model.
    """
    sizes = np.bincount(fit.labels)
    if not 1 < len(sizes) < len(fit.labels):
        return []
    out = []
    texts = _differences(fit, sizes)
    for k, size in enumerate(sizes):
        members = np.flatnonzero(fit.labels == k)
        names = ", ".join(str(fit.names[i]) for i in members[:_LISTED])
        out.append(GroupWords(k + 1, int(size), names + ", ..." * bool(size > _LISTED), texts[k]))
    return out


def describe_shared(fit: Fit) -> str:
    """The largest effects of the one model, or the one centre, that all users share."""
    if fit.n_clusters > 1 or fit.units.loss.multiclass \
            or fit.units.task == "clustering":
        return ""
    words = _Words(fit)
    own = _standardised(fit.units, fit.centres)[0]
    order = np.argsort(-np.abs(own[:-1]), kind="stable")[:_TOLD]
    told = [words.effect(int(j), fit.centres[0], None) for j in order
            if abs(own[j]) > _SMALLER * abs(own[order[0]])]
    return "; ".join([*told, words.level(fit.centres[0], None)])


def _differences(fit: Fit, sizes: Ints) -> list[str]:
    units, centres = fit.units, fit.centres
    own = _standardised(units, centres)
    shares = sizes / sizes.sum()
    others = (shares @ own - shares[:, None] * own) / (1.0 - shares)[:, None]
    away = np.abs(own - others)
    if units.loss.multiclass:
        away = away.reshape(len(centres), -1, units.n_classes).max(axis=2)
        names = [*units.feature_names, "its level"]
        return ["differs most in " + ", ".join(names[j] for j in _largest(row)) for row in away]
    rest = (shares @ centres - shares[:, None] * centres) / (1.0 - shares)[:, None]
    words, out = _Words(fit), []
    for k, row in enumerate(away):
        told = [words.level(centres[k], rest[k]) if j == len(row) - 1 and words.has_level
                else words.effect(int(j), centres[k], rest[k]) for j in _largest(row)]
        out.append("; ".join(told))
    return out


def _largest(away: Array) -> list[int]:
    """Positions of the largest differences, largest first."""
    order = np.argsort(-away, kind="stable")[:_TOLD]
    return [int(j) for j in order if away[j] > _SMALLER * away[order[0]] or j == order[0]]


def _standardised(units: Units, models: Array) -> Array:
    """(n, coefficients) of standardised features, the level last."""
    return units.standardized(models).reshape(len(models), -1)


class _Words:
    """Coefficients of a fit as texts."""

    def __init__(self, fit: Fit) -> None:
        self.units, (self.target, _) = fit.units, columns_of(fit)
        self.points = fit.units.task == "clustering"
        self.errors = errors_of(fit)
        self.has_level = not self.points
        self.others = "others"
        classes = fit.recipe.classes if fit.recipe is not None else ()
        self.yes = str(classes[1]) if len(classes) == 2 else "class 1"

    def effect(self, j: int, centre: Array, rest: Array | None) -> str:
        """One coefficient, and that of the others."""
        units, name = self.units, self.units.feature_names[j]
        both = [float(units.coefficients(each[None])[0, j, 0]) for each in (centre, rest)
                if each is not None]
        if self.points:
            return f"{name} {self._pair(both, sign=False)}"
        binary = is_binary(units, j)
        step = 1.0 if binary else _step(float(units.scale[j]))
        per = f"with {name.replace('=', ' = ')}" if binary else (
            f"per unit of {name}" if step == 1.0 else f"per {step:,g} of {name}")
        both = [value * step for value in both]
        if units.task == "counts" or (units.task == "classification" and units.loss.log_odds):
            texts = [_ratio(value) for value in both]
            what = f"odds of {self.yes} " if units.task == "classification" else ""
            rest_text = f" ({self.others} {texts[1]})" if len(texts) > 1 else ""
            return f"{what}{texts[0]} {per}{rest_text}"
        return self._pair(both, step * self.errors.get(name, 0.0), after=per)

    def level(self, centre: Array, rest: Array | None) -> str:
        """The prediction where all columns have their mean."""
        units = self.units
        X = units.mean[None]
        if units.n_classes:
            if not units.loss.log_odds:
                return ""
            both = [100 * float(units.probabilities(X, each[None])[0, 1])
                    for each in (centre, rest) if each is not None]
            texts = [f"{value:.0f} %" for value in both]
            rest_text = f" ({self.others} {texts[1]})" if len(texts) > 1 else ""
            return f"typically {texts[0]} {self.yes}{rest_text}"
        both = [float(units.predict(X, each[None])[0]) for each in (centre, rest)
                if each is not None]
        return f"{self.target or 'the target'} is typically {self._pair(both, sign=False)}"

    def _pair(self, both: list[float], error: float = 0.0, *, sign: bool = True,
              after: str = "") -> str:
        texts = rounded(both, error, sign=sign)
        rest = f" ({self.others} {texts[1]})" if len(texts) > 1 else ""
        return f"{texts[0]}{' ' * bool(after)}{after}{rest}"


def errors_of(fit: Fit) -> dict[str, float]:
    """The largest standard error of each coefficient, over groups; none where they are not known,
    or would take long.
    """
    users = fit.solution.problem.users
    if fit.account is not None or int(users.sizes.sum()) * users.n_features > _QUICK:
        return {}
    try:
        known = fit.summary().coefficients
    except (InvalidInput, np.linalg.LinAlgError):
        return {}
    out = dict[str, float]()
    for each in known:
        out[each.name] = max(out.get(each.name, 0.0), each.error)
    return out


def _step(scale: float) -> float:
    """How many units of a column an effect is told for: about a standard deviation of it, if this
    is far from 1.
    """
    power = math.floor(math.log10(max(scale, 1e-300)))
    return 10.0**power if power >= 1 or power <= -2 else 1.0


def _ratio(value: float) -> str:
    """exp(value), as a change in percent or as a factor."""
    with np.errstate(over="ignore"):
        factor = float(np.exp(value))
    if 0.5 < factor < 2.0:
        return f"{100 * (factor - 1):+.0f} %"
    return f"times {factor:.2g}"


def rounded(values: list[float], error: float = 0.0, *, sign: bool = False) -> list[str]:
    """Values with the decimals that the first digit of their error has; without an error, with
    those that two digits of the largest need.
    """
    size = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    if not 1e-6 < size < 1e7:
        return [f"{value:+.2g}" if sign else f"{value:.2g}" for value in values]
    first = error if 0 < error < size else size / 10
    decimals = max(0, -math.floor(math.log10(first)))
    texts = [f"{round(value, decimals) + 0.0:{'+' if sign else ''},.{decimals}f}"
             for value in values]
    return [text for text in texts]


def describe_curves(curves: Curves | None, noun: str) -> str | None:
    """Which columns bend, how, and whether for everybody alike."""
    if curves is None or not curves.columns:
        return None
    bent = [curve for curve in curves.columns if curve.bends]
    straight = [curve.name for curve in curves.columns if not curve.bends]
    told = [_describe_curve(curve, curves.target, noun) for curve in bent[:_TOLD]]
    if straight:
        told.append(f"Straight: {', '.join(straight)}.")
    return " ".join(told)


def _describe_curve(curve: DrawnCurve, target: str, noun: str) -> str:
    x, y = curve.x, curve.everyone
    step, third = _step(float(np.ptp(x)) / 4), len(x) // 3
    slopes = [step * float((y[b] - y[a]) / (x[b] - x[a]))
              for a, b in ((0, third), (len(x) - 1 - third, len(x) - 1))]
    share = 100.0 if target.startswith("probability of ") else 1.0
    first, last = rounded([share * slope for slope in slopes], sign=True)
    unit = " points" if share > 1 else ""
    who = f"differently by {noun}" if curve.differs else f"alike for all {plural(noun)}"
    turns = _turning(x, y)
    if turns:
        return f"{curve.name} bends, {who}: {turns}."
    per = f"unit of {curve.name}" if step == 1.0 else f"{step:,g} of {curve.name}"
    return (f"{curve.name} bends, {who}: {first}{unit} per {per} at its low end, {last}{unit} at "
            "its high end.")


def _turning(x: Array, y: Array) -> str:
    """Where a curve is highest and lowest, if that is clearly inside its range."""
    size, told = float(np.ptp(y)), []
    for word, k in (("highest", int(y.argmax())), ("lowest", int(y.argmin()))):
        if min(abs(float(y[k] - y[0])), abs(float(y[k] - y[-1]))) > _TURN * size:
            told.append(f"{word} near {rounded([float(x[k])])[0]}")
    return " and ".join(told)


def about(fit: Fit) -> str:
    """The title of a page: "sold, by shop"."""
    target, user = columns_of(fit)
    noun = plural(noun_of(fit))
    return ", ".join(filter(None, [target, f"by {user}" if user else ""])) or noun
