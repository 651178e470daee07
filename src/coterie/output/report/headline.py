"""What the report says first: what was found, whether it helps and whom, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from coterie.base.labels import many
from coterie.base.types import Array, Ints
from coterie.convex.path import Path
from coterie.fitting.result import Fit
from coterie.fitting.scores import Scores, mean_and_error
from coterie.fitting.stability import STABLE
from coterie.losses import Loss, name_of
from coterie.problem.solution import Solution

KIND_NAMES = {"one model": "one model for all", "groups": "one model per group",
              "personal": "personal models around one centre",
              "personal in groups": "personal models around the centre of each group",
              "alone": "models from each user's own rows only"}
_SHARING = {"one model": "One model for all", "groups": "Sharing within groups",
            "personal": "A personal model around the centre of all users",
            "personal in groups": "A personal model around the centre of the group",
            "alone": "A model from the user's own rows"}
_LISTED = 6  # most groups whose sizes are listed


def title_of(source: Fit | Path | Solution, n_groups: int, n_users: int) -> str:
    """The title of the page where none is given."""
    users = many(n_users, source.noun if isinstance(source, Fit) else "user")
    if isinstance(source, Fit) and source.kind == "personal":
        return f"Personal models of {users}"
    if n_users == 1:
        return f"One {users.split()[1]}"
    if n_groups == 1:
        return f"One model for {users}"
    return (f"No groups among {users}" if n_groups == n_users
            else f"{many(n_groups, 'group')} of {users}")


def headline(source: Fit | Path | Solution, labels: Ints, task: str,
             noun: str) -> dict[str, str | None]:
    """What was `found`, for how many users it is `better`, how it `helps` on held-out rows, and how
    `sure` that is.

    Parameters
    ----------
    source : the result.
    labels : (n_users,) the groups shown first.
    task : of the models.
    noun : what a user is: "user" or "point".

    Returns
    -------
    dict
        None for what is not known.
    """
    kind, scores, better, helps, sure = "", None, None, None, None
    if isinstance(source, Fit):
        kind, scores = "" if source.settings.task == "clustering" else source.kind, source.scores
        sure = _describe_certainty(source) if len(labels) > 1 else None
    if not isinstance(source, Fit):
        helps = _describe_federation(source, task)
    elif scores is not None and len(labels) == 1:
        helps = (f"On {many(scores.n_rows, 'held-out row')}, the {scores.metric} is "
                 f"{scores.text(scores.fitted[0], 3)}.")
    elif scores is not None:
        better = _count_better(source.kind, scores)
        helps = _describe_scores(source.kind, scores)
    elif kind and len(labels) > 1:
        helps = "No rows were held out, so it is not known whether sharing helps."
    found = _describe_groups(kind, labels, noun)
    if isinstance(source, Fit) and source.average is not None and source.average.used:
        found = f"{found} {source.average.described(kind)}"
    return {"found": found + _describe_aside(source), "better": better, "helps": helps,
            "sure": sure}


def _describe_aside(source: Fit | Path | Solution) -> str:
    """Who did not take part in a federation, where somebody did not; the reasons are further down.
    """
    account = None if isinstance(source, Path) else source.account
    if account is None or not account.aside:
        return ""
    names = [str(name) for name in account.aside][:3]
    return (f" Set aside: {', '.join(names)}{', ...' * (len(account.aside) > 3)}; the reasons are "
            "with the rounds below.")


def _describe_groups(kind: str, labels: Ints, noun: str) -> str:
    sizes = np.bincount(labels)
    n, k = many(len(labels), noun), len(sizes)
    if kind == "personal":
        return (f"No groups among {n}: each has a model of its own, around a centre that all of "
                "them share.")
    if k == len(labels) > 1:
        return f"No groups among {n}: each has a model of its own."
    if k == 1:
        return (f"One group: all {n} share one model." if len(labels) > 1
                else f"There is one {noun}, so there is nothing to share.")
    order = np.sort(sizes)[::-1]
    listed = ", ".join(f"{size:,}" for size in order[:-1]) + f" and {order[-1]:,} {noun}s"
    if k > _LISTED:
        least = "" if order[-1] == order[0] else f"{order[-1]:,} to "
        listed = f"{least}{many(int(order[0]), noun)} each"
    end = ("; each user has a model of its own around the centre of its group"
           if kind == "personal in groups" else "")
    return f"{many(k, 'group')} among {n} ({listed}){end}."


def _compute_gains(kind: str, scores: Scores) -> Array:
    """(n_judged,) what users gain over models from own rows; where they have these, over one model
    for all.
    """
    return scores.gains_over(scores.together if kind == "alone" else scores.alone)


def _count_better(kind: str, scores: Scores) -> str:
    """For how many users predictions are better; worse, or neither clearly better nor worse, where
    that is so.
    """
    gains = _compute_gains(kind, scores)
    gain, error = mean_and_error(gains)
    other = "one model for all" if kind == "alone" else "a model from the user's own rows"
    counts = {"better": int((gains > 0).sum()), "equally well": int((gains == 0).sum()),
              "worse": int((gains < 0).sum())}
    users = many(len(gains), "user")
    if not abs(gain) <= 2 * error:
        what, equal = "worse" if gain < 0 else "better", counts["equally well"]
        same, comma = f", and equally well for {equal:,}" * bool(equal), "," * (kind == "alone")
        return (f"{_SHARING[kind]} predicts {what} than {other}{comma} for {counts[what]:,} of "
                f"{users}{same}.")
    first, *rest = [f"{name} for {count:,}" for name, count in counts.items() if count]
    more = "".join([*(f", {part}" for part in rest[:-1]), *(f" and {part}" for part in rest[-1:])])
    return (f"{_SHARING[kind]} predicts neither clearly better nor worse than {other}: {first} of "
            f"{users}{more}.")


def _describe_scores(kind: str, scores: Scores) -> str:
    """How good the models are on held-out rows, and how many users are worse off."""
    alone = kind == "alone"
    fitted, own, pooled = (scores.text(float(np.nanmean(m)), 3)
                           for m in (scores.fitted, scores.alone, scores.together))
    others = [f"{own} with users' own models"] * (not alone)
    others += [f"{pooled} with one model for all"] * (kind != "one model")
    sentences = [f"On {many(scores.n_rows, 'held-out row')}, the {scores.metric} is {fitted} on "
                 f"average over users, instead of {' and '.join(others)}"
                 f"{'' if scores.larger else ' (smaller is better)'}.",
                 _describe_gain(scores, "one model for all" if alone else "own models",
                                *mean_and_error(_compute_gains(kind, scores)))]
    if len(scores.worse) and not alone:
        worse = int(scores.worse.sum())
        sentences.append(f"{f'{worse:,}' if worse else 'No'} user{'s are' if worse > 1 else ' is'} "
                         "worse off than with their own model by more than chance.")
    return " ".join(filter(None, sentences))


def _describe_gain(scores: Scores, other: str, gain: float, error: float) -> str:
    """The gain over other models, with its standard error and what that means."""
    if not np.isfinite(error):
        return ""
    size, sure = (f"{100 * x:.1f}" if scores.metric == "accuracy" else f"{x:.2g}"
                  for x in (abs(gain), error))
    points = " percentage points" if scores.metric == "accuracy" else ""
    chance = "more than chance" if abs(gain) > 2 * error else "this can be chance"
    if gain == 0:
        return f"Compared with {other}, this is the same on average."
    what = "better" if gain > 0 else "worse"
    return (f"Compared with {other}, this is {what} by {size}{points}, with a standard error of "
            f"{sure}: {chance}.")


def _describe_certainty(fit: Fit) -> str:
    stability, compared, kind = fit.stability, fit.compared, fit.kind
    if stability is not None:
        again, found = "", stability.searched
        if np.isfinite(found):
            same = "about the same" if found >= STABLE else "other"
            again = (", and a new search without the held-out rows finds "
                     f"{'the same' if found > 0.995 else same} groups")
        return (f"The groups are {'stable' if stability.stable else 'unstable'}: with other rows "
                f"of the same users, {stability.stays.mean():.0%} of the users stay in their "
                f"group{again}.")
    if not isinstance(fit.settings.lam, str):
        return "The penalty strength was given, not chosen by the data."
    others = {name: loss for name, loss in compared.items() if name != kind}
    if not others or kind not in compared:
        return fit.why
    name = min(others, key=others.__getitem__)
    excess, error = others[name] - compared[kind], fit.compared_errors.get(name, np.nan)
    values = f"estimated loss on new rows {others[name]:.3g} instead of {compared[kind]:.3g}"
    best = "The next best choice" if excess >= 0 else "The best choice"
    what = f"worse by more than chance ({values})"
    if abs(excess) <= 2 * error:
        what = f"about as good ({values}); the difference can be chance"
    elif excess < 0:
        what = f"only a little better ({values}), so the simpler one is taken"
    return f"{best}, {KIND_NAMES[name]}, is {what}."


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
