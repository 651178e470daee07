"""What is said first of a result: what was found, how much better it is and for whom, and how sure
that is.

The page, the console and run.json all have these sentences. They are in the units and the words of
the table. Of a group those coefficients are told in which its centre differs most from that of the
others:

    size of a difference = |standardised coefficient - mean of the others, by users|

What is typical is the prediction where all columns have their mean.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from coterie.base.errors import InvalidInput
from coterie.base.labels import many, plural
from coterie.base.types import Array, Ints
from coterie.convex.path import Path
from coterie.fitting.inference import STABLE
from coterie.fitting.result import Fit
from coterie.fitting.scores import Scores, mean_and_error
from coterie.fitting.units import Units
from coterie.losses import Loss, name_of
from coterie.output.plots.along import Curves, DrawnCurve, curves_of, is_binary
from coterie.problem.solution import Solution

KIND_NAMES = {"one model": "one model for all", "groups": "one model per group",
              "personal": "personal models around one centre",
              "personal in groups": "personal models around the centre of each group",
              "alone": "models from each user's own rows only"}
_LISTED = 6  # most groups whose sizes are listed
_SEEN = 3  # users who did not take part that are named
_TOLD = 12  # groups that have a sentence, at most
_LITTLE = 0.005  # share of the error below which a gain is less than 1 %
_COEFFICIENTS, _MEMBERS = 3, 4  # of a sentence, and names of a group, at most
_SMALLER = 0.15  # of the largest difference, below which another one is not told
_NAMES = re.compile(r"[A-Za-z]{3,20}")
_ENDINGS = re.compile(r"[\W_]*(id|no|nr|number|name|code|key)$", re.I)
_NO_NOUN = ("user", "who", "owner", "index", "row", "uid")
_TURN = 0.1  # of the size of a curve that it rises or falls at least before a turn that is told
_QUICK = 500_000  # numbers in the rows up to which errors are computed


def title_of(source: Fit | Path | Solution, n_groups: int, n_users: int) -> str:
    """The title of the page where none is given."""
    if isinstance(source, Fit) and source.recipe is not None and source.recipe.user:
        return about(source)
    users = many(n_users, source.noun if isinstance(source, Fit) else "user")
    if isinstance(source, Fit) and source.kind == "personal":
        return f"Personal models of {users}"
    if n_users == 1:
        return f"One {users.split()[1]}"
    if n_groups == 1:
        return f"One model for {users}"
    return (f"No groups among {users}" if n_groups == n_users
            else f"{many(n_groups, 'group')} of {users}")


def headline(source: Fit | Path | Solution, labels: Ints, task: str = "") -> dict[str, Any]:
    """What was `found`, what the `groups` are or all users share (`shared`), how much `better` that
    is, how `sure`, what predictions are an average of (`average`) and which columns bend
    (`curves`), what privacy costs (`private`), and who did not take part (`aside`).

    Parameters
    ----------
    source : the result.
    labels : (n_users,) the groups shown first.
    task : of the models.

    Returns
    -------
    dict
        Sentences; None for what is not known.
    """
    said: dict[str, Any] = dict.fromkeys(("found", "shared", "better", "sure", "average", "curves",
                                          "private", "aside"))
    said["groups"] = []
    account = None if isinstance(source, Path) else source.account
    if account is not None and account.aside:
        said["aside"] = _describe_aside(account.aside)
    if not isinstance(source, Fit):
        said["found"] = _describe_found("", labels, "user")
        said["better"] = _describe_federation(source, task)
        return said
    noun, kind = noun_of(source), "" if source.settings.task == "clustering" else source.kind
    said["found"] = _describe_found(kind, labels, noun)
    words = describe_groups(source)
    said["groups"] = [{**each._asdict(), "sentence": each.line(noun)} for each in words[:_TOLD]]
    said["better"] = _describe_gain(source, kind, noun)
    if len(labels) > 1:
        said["sure"] = _describe_certainty(source, noun)
    if source.average is not None and source.average.used:
        said["average"] = _describe_average(source, kind, len(words) > 0)
        said["curves"] = describe_curves(curves_of(source), noun)
    elif kind in ("one model", "personal"):
        said["shared"] = describe_shared(source) or None
    if account is not None and account.privacy is not None:
        said["private"] = _describe_private(source, noun)
    return said


def lines_of(said: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The headline as lines of a console, with the name of each."""
    groups = [("", each["sentence"]) for each in said["groups"]]
    names = {"private": "Private", "aside": "Set aside", "shared": "All share",
             "average": "Predicts", "curves": "Curves", "better": "Better?", "sure": "Sure?"}
    return groups + [(name, said[key]) for key, name in names.items() if said.get(key)]


def _describe_aside(aside: Mapping[Any, Any]) -> str:
    """Who did not take part in a federation, and why."""
    told = "; ".join(f"{name} ({reason})" for name, reason in list(aside.items())[:_SEEN])
    more = f"; and {len(aside) - _SEEN:,} more" if len(aside) > _SEEN else ""
    return f"{len(aside):,} did not take part: {told}{more}."


def _describe_found(kind: str, labels: Ints, noun: str) -> str:
    sizes = np.bincount(labels)
    n, k, nouns = many(len(labels), noun), len(sizes), plural(noun)
    if len(labels) == 1:
        return f"There is one {noun}, so there is nothing to share."
    if kind == "personal":
        return (f"No groups among {n}: each has a model of its own, around a centre that all of "
                "them share.")
    if k == len(labels):
        return f"No groups among {n}: each has a model of its own, and nothing is shared."
    if k == 1:
        return f"One group: all {n} share one model."
    listed = ", ".join(f"{size:,}" for size in sizes[:-1]) + f" and {sizes[-1]:,} {nouns}"
    order = np.sort(sizes)[::-1]
    if k > _LISTED:
        least = "" if order[-1] == order[0] else f"{order[-1]:,} to "
        listed = f"{least}{many(int(order[0]), noun)} each"
    end = {"groups": f". The {nouns} of a group share one model",
           "personal in groups": f". Each {noun} has a model of its own around the centre of its "
                                 "group"}.get(kind, "")
    return f"{many(k, 'group')} among {n} ({listed}){end}."


def _describe_gain(fit: Fit, kind: str, noun: str) -> str | None:
    """How much less error there is on held-out rows than with simpler models, and for whom."""
    scores, nouns = fit.scores, plural(noun)
    if scores is None:
        return ("Not known: no rows were held out." if kind and len(fit.labels) > 1 else None)
    if len(fit.labels) == 1:
        return (f"On {many(scores.n_rows, 'held-out row')}, the {scores.metric} is "
                f"{scores.text(scores.fitted[0], 3)}.")
    parts = []
    if kind != "alone":
        parts.append(f"{_share(scores, scores.alone)} than each {noun}'s own model"
                     f"{_counted(scores, scores.alone, nouns)}")
        worse = int(scores.worse.sum())
        parts[-1] += (f", {worse:,} worse beyond chance" if worse else
                      ", none worse beyond chance") * bool(len(scores.worse))
    if kind != "one model":
        counted = _counted(scores, scores.together, nouns) if kind == "alone" else ""
        parts.append(f"{_share(scores, scores.together)} than one model for all{counted}")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]} (on {many(scores.n_rows, 'row')} held out from the fit)."


def _share(scores: Scores, others: Array) -> str:
    """The gain over others as a share of their error, and whether it may be chance."""
    fitted, other = (float(np.nanmean(values)) for values in (scores.fitted, others))
    if scores.larger:
        fitted, other = 1.0 - fitted, 1.0 - other
    gain, error = mean_and_error(scores.gains_over(others))
    share = (other - fitted) / other if other > 0 else 0.0
    if not np.isfinite(share) or gain == 0:
        return "no more or less error"
    size = f"{abs(share):.0%}" if abs(share) >= _LITTLE else "less than 1%"
    size = size.replace("%", " %")
    chance = ", which can be chance," if not abs(gain) > 2 * error else ""
    if share < -1:
        return f"{fitted / other:.2g} times the error{chance}"
    return f"{size} {'less' if gain > 0 else 'more'} error{chance}"


def _counted(scores: Scores, others: Array, nouns: str) -> str:
    gains = scores.gains_over(others)
    return f": better for {int((gains > 0).sum()):,} of {len(gains):,} {nouns}"


def _describe_average(fit: Fit, kind: str, grouped: bool) -> str:
    """Of what predictions are an average, and what the groups are then."""
    assert fit.average is not None
    named = "; ".join(f"{weight:.0%} {KIND_NAMES.get(kind, kind) if name == 'kind' else name}"
                      for name, weight in _by_weight(fit.average.weights)).replace("%", " %")
    groups = " The groups shown are the most likely ones." if grouped else ""
    return f"An average of several models: {named}.{groups}"


def _by_weight(weights: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(weights.items(), key=lambda item: -item[1])


def _describe_private(fit: Fit, noun: str) -> str:
    """What is promised, what is noisy, and what cannot be seen."""
    said = fit.statement
    who = f"one row of a {noun}" if said.unit == "row" else f"all rows of a {noun}"
    missing = ""
    if "experiment" in said.noise:
        missing = " This noise has a known seed, for an experiment: it protects nobody."
    if fit.n_clusters == 1:
        missing += (f" No groups stand out from this noise: that does not mean that the "
                   f"{plural(noun)} are alike.")
    return (f"Noise hides {who} (epsilon = {said.epsilon:g}, delta = {said.delta:g}). All "
            f"coefficients and groups are noisy.{missing}")


def _describe_certainty(fit: Fit, noun: str) -> str:
    stability, compared, kind, nouns = fit.stability, fit.compared, fit.kind, plural(noun)
    if stability is not None and 1 < fit.n_clusters < len(fit.labels):
        again, found = "", stability.searched
        if np.isfinite(found):
            same = "about the same" if found >= STABLE else "other"
            again = (", and a search without the held-out rows finds "
                     f"{'the same' if found > 0.995 else same} groups")
        return (f"The groups are {'stable' if stability.stable else 'unstable'}: with other rows "
                f"of the same {nouns}, {100 * stability.stays.mean():.0f} % of them stay in their "
                f"group{again}.")
    if fit.average is not None and fit.average.used:
        return _describe_sure_average(fit)
    if fit.settings.task == "clustering":
        return ("No other number of groups lasts longer when all are pulled together harder."
                if "persist" in fit.why else fit.why)
    if not isinstance(fit.settings.lam, str):
        return "The penalty strength was given, not chosen by the data."
    others = {name: loss for name, loss in compared.items() if name != kind}
    if not others or kind not in compared:
        return fit.why
    name = min(others, key=others.__getitem__)
    excess, error = others[name] - compared[kind], fit.compared_errors.get(name, np.nan)
    share = f"{100 * abs(excess) / max(abs(compared[kind]), 1e-300):.2g} %"
    other = KIND_NAMES[name]
    if abs(excess) <= 2 * error:
        than = "worse" if excess >= 0 else "better"
        return (f"The next best choice, {other}, is about as good on new rows ({share} {than}, "
                "which can be chance).")
    if excess < 0:
        return (f"{other[0].upper()}{other[1:]} would do {share} better on new rows: too little to "
                "give up the simpler choice.")
    return (f"The next best choice, {other}, is expected to do {share} worse on new rows, which is "
            "more than chance.")


def _describe_sure_average(fit: Fit) -> str:
    """How much better an average is than the one kind that would predict otherwise."""
    average = fit.average
    assert average is not None
    what = f"than {KIND_NAMES[fit.kind]} alone, on rows left out in turn"
    if fit.settings.task != "regression":
        return f"The average is better {what}, by more than chance."
    gain, error = 100 * (1 - np.exp(-average.gain)), 100 * average.error
    return (f"The average has {gain:.0f} % less error {what} (give or take {error:.0f} %, by users)"
            ".")


def _describe_federation(source: Path | Solution, task: str) -> str | None:
    """How many held-out rows are right, where users of a federation have said so."""
    account = source.account if isinstance(source, Solution) else None
    scores = None if account is None else account.scores
    if scores is None or task != "classification":
        return None
    right, count = scores[:, 1].sum(), scores[:, 2].sum()
    if not count > 0:
        return None
    return f"On {many(int(count), 'held-out row')}, {right / count:.1%} are predicted right."


def loss_words(loss: Loss) -> str:
    """The name of a loss in words; for a loss of the caller's own, that of its class."""
    return (name_of(loss.own_loss) or type(loss.own_loss).__name__).replace("_", " ")


def settings_sentence(source: Fit | Path | Solution, settings: Mapping[str, Any]) -> str:
    """The settings of a fit in words; other settings as they are."""
    if not isinstance(source, Fit):
        return ", ".join(f"{name} {value}" for name, value in settings.items())
    s, units = source.settings, source.units
    scaled = "standardised features" if s.standardize else "features as given"
    parts = [f"{s.task} with the loss {loss_words(units.loss)}", scaled, f"L2 strength {s.ridge:g}"]
    if s.weights == "unit":
        parts.append("weight 1 on all pairs")
    elif s.weights != "auto":
        parts.append(f"{s.weights} weights of the {s.k} nearest users")
    if not isinstance(s.lam, str):
        parts.append(f"penalty strength {s.lam:g} as given")
    elif s.lam == "score" or s.weights != "auto":
        by = "persistence of clusters" if s.task == "clustering" else "held-out rows"
        parts.append(f"penalty strength chosen by {by}")
    else:
        parts.append("groups and penalty strength chosen automatically")
    parts += [f"at most {s.max_groups} groups"] * (s.max_groups is not None)
    parts += ["every user has the same weight in its group's model"] * (s.count == "users")
    parts.append(f"{s.holdout:.0%} of the rows held out" if source.scores is not None
                 else "no rows held out")
    sentence = f"{'; '.join(parts)}; tolerance {s.tol:g}; seed {s.seed}."
    return sentence[0].upper() + sentence[1:]


# -- what the groups are, in the units and the words of the table


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
        names = ", ".join(str(fit.names[i]) for i in members[:_MEMBERS])
        out.append(GroupWords(k + 1, int(size), names + ", ..." * bool(size > _MEMBERS), texts[k]))
    return out


def describe_shared(fit: Fit) -> str:
    """The largest effects of the one model, or the one centre, that all users share."""
    if fit.n_clusters > 1 or fit.units.loss.multiclass \
            or fit.units.task == "clustering":
        return ""
    words = _Words(fit)
    own = _standardised(fit.units, fit.centres)[0]
    order = np.argsort(-np.abs(own[:-1]), kind="stable")[:_COEFFICIENTS]
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
    order = np.argsort(-away, kind="stable")[:_COEFFICIENTS]
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
    told = [_describe_curve(curve, curves.target, noun) for curve in bent[:_COEFFICIENTS]]
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
