"""What is said first of a result: what was found, how much better it is and for whom, and how sure
that is.

The page, the console and run.json all have these sentences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from coterie.base.labels import many, plural
from coterie.base.types import Array, Ints
from coterie.convex.path import Path
from coterie.fitting.inference import STABLE
from coterie.fitting.result import Fit
from coterie.fitting.scores import Scores, mean_and_error
from coterie.losses import Loss, name_of
from coterie.output.plots.along import curves_of
from coterie.output.report.effects import (
    about,
    describe_curves,
    describe_groups,
    describe_shared,
    noun_of,
)
from coterie.problem.solution import Solution

KIND_NAMES = {"one model": "one model for all", "groups": "one model per group",
              "personal": "personal models around one centre",
              "personal in groups": "personal models around the centre of each group",
              "alone": "models from each user's own rows only"}
_LISTED = 6  # most groups whose sizes are listed
_SEEN = 3  # users who did not take part that are named
_TOLD = 12  # groups that have a sentence, at most
_LITTLE = 0.005  # share of the error below which a gain is less than 1 %


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
