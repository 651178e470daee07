"""What is chosen for each part of the rows: the groups, and what users share.

It is chosen on summaries: how many partitions and kinds are compared costs no questions. The first
part is all rows; the second, if there is one, those that are not held out. The same choices are
made anew for it, so that the held-out rows judge what has not seen them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from coterie.base.labels import one_group
from coterie.base.types import Array, Ints
from coterie.convex.path import Path
from coterie.data.users import Users
from coterie.fitting.kinds import Sharing, choose, choose_wide
from coterie.fitting.settings import Settings, Work
from coterie.fitting.sources import FitSource
from coterie.groups.find import describe_better, describe_sizes
from coterie.groups.random_effects import search_summaries
from coterie.groups.search import SearchOptions, SearchResult, kind_of, search, search_parts
from coterie.groups.summaries import OneCentre, Summaries, summarise
from coterie.groups.wide import search_wide
from coterie.losses import Loss


@dataclass(frozen=True, eq=False)
class Chosen:
    """What was chosen for a part of the rows.

    Parameters
    ----------
    labels : (n_users,) the groups that the search found.
    sentence : about them.
    sharing : what users share.
    means, errors : of the kinds that were compared, by name; empty where none were.
    known : the summaries; None for wide models.
    path : that proposed the groups, on the summaries; of a sample if there are many users.
    models : (n_users, dim) that say who is near whom, where there are no summaries.
    """

    labels: Ints
    sentence: str
    sharing: Sharing
    means: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    known: Summaries | None = None
    path: Path | None = None
    models: Array | None = None

    def state(self) -> dict[str, Any]:
        """What was chosen, as arrays, numbers and texts."""
        shared, one = self.sharing, None if self.known is None else self.known.one
        near = {} if self.known is None else {
            f"near {k}": self.known.near.get(labels.tobytes())
            for k, labels in enumerate((np.zeros_like(shared.labels), shared.labels))}
        return {**near, "labels": self.labels, "sentence": self.sentence, "kind": shared.kind,
                "groups": shared.labels, "covariance": shared.covariance, "gain": shared.gain,
                "noise": shared.noise, "means": self.means, "errors": self.errors,
                "models": self.models,
                "one": None if one is None else {"covariance": one.covariance, "noise": one.noise,
                                                 "prior": one.prior, "gain": one.gain}}

    @classmethod
    def of(cls, state: dict[str, Any], count: Any, known: Summaries | None) -> Chosen:
        """The choice whose `state` this is; its path is not known."""
        arrays = {name: None if state[name] is None else np.asarray(state[name])
                  for name in ("covariance", "noise", "models")}
        sharing = Sharing(state["kind"], np.asarray(state["groups"], dtype=np.int64),
                          arrays["covariance"], count, float(state["gain"]), arrays["noise"])
        if known is not None and state["one"] is not None:
            one = dict(state["one"])
            near = {labels.tobytes(): np.asarray(state[f"near {k}"]) for k, labels in
                    enumerate((np.zeros_like(sharing.labels), sharing.labels))
                    if state[f"near {k}"] is not None}
            known = replace(known, near=near, one=OneCentre(
                covariance=np.asarray(one.pop("covariance")), **one))
        return cls(np.asarray(state["labels"], dtype=np.int64), str(state["sentence"]), sharing,
                   dict(state["means"]), dict(state["errors"]), known, None, arrays["models"])


# Chooses for all parts of the rows.
ChooseParts = Callable[[FitSource, Settings, Work], list[Chosen]]


def judge_summaries(source: FitSource, settings: Settings, work: Work) -> list[Chosen]:
    """Take summaries, search groups in each part, and compare kinds of models."""
    work.show("summaries of the users")
    summaries, searched = _take(source)
    kept = [work.get(f"choice {k}") for k in range(len(summaries))]
    if all(state is not None for state in kept):  # continued
        return [Chosen.of(state, settings.count, known)
                for state, known in zip(kept, summaries, strict=True)]
    work.show("searching for groups")
    options = SearchOptions(
        max_groups=settings.max_groups, k=settings.k,
        progress=lambda solution, _: work.show("searching for groups",
                                               text=f"{solution.n_clusters} groups"))
    if summaries[0].one is None:
        found = [search(known, options) for known in searched]
    else:
        summaries, found = search_parts(source, summaries, options)
    work.show("comparing kinds of models")
    choices = [_choose(known, result, settings)
               for known, result in zip(summaries, found, strict=True)]
    for k, choice in enumerate(choices):
        work.keep(f"choice {k}", choice.state())
    return choices


def _take(source: FitSource) -> tuple[list[Summaries], list[Summaries]]:
    """The summaries, and those that groups are searched on; users whose losses are not squared are
    asked.
    """
    if not source.exact:
        summaries = summarise(source)
        return summaries, summaries
    searched = [search_summaries(part, source.loss) for part in source.parts]
    if not source.loss.quadratic:
        return searched, searched
    return [Summaries.exact(part, source.loss) for part in source.parts], searched


def _choose(known: Summaries, found: SearchResult, settings: Settings) -> Chosen:
    """The kind of models for the groups that were found."""
    labels, sentence, n_groups = found.best.labels, _describe(found), found.best.n_groups
    at_limit = 1 < n_groups < len(labels) and n_groups == settings.max_groups
    limit = " The search stopped at this number." if at_limit else ""
    if settings.task == "clustering":
        return Chosen(labels, sentence + limit,
                      Sharing("groups" if labels.any() else "one model", labels),
                      known=known, path=found.path)
    compared = choose(known, labels, settings)
    return Chosen(labels, _used(labels, compared.sharing, sentence) + limit, compared.sharing,
                  compared.means, compared.errors, known, found.path)


def _used(labels: Ints, sharing: Sharing, sentence: str) -> str:
    """What is said of the groups that the search found, if users share these or not."""
    if labels.any() and (sharing.kind == "alone" or not sharing.labels.any()):
        return (f"The search found {int(labels.max()) + 1} groups, but they are not needed to "
                "predict.")
    return sentence


def _describe(found: SearchResult) -> str:
    """A sentence about a search."""
    best, n, many = found.best, len(found.best.labels), len(found.examined)
    if n == 1 or kind_of(best) == "one model":
        return one_group(n, many)
    if kind_of(best) == "one centre with spread":
        return (f"Users differ, but continuously: no groups stand out (none of {many} descriptions "
                f"of the {n} users is better than one centre with a spread of models).")
    if best.n_groups == n:
        return f"No two of the {n} users are alike: every model differs clearly from the others."
    one = min(p.length for p in found.examined if not p.labels.any())
    within = " Models also vary within groups." if best.spread is not None else ""
    return (f"{best.n_groups} groups of {describe_sizes(best.labels)} users "
            f"{describe_better(one - best.length)}.{within}")


# -- wide models, which have no curvatures to summarise


def judge_wide(source: FitSource, settings: Settings, work: Work) -> list[Chosen]:
    """Search groups among wide models, and compare kinds by rows left out of the part."""
    for k, users in enumerate(source.parts):
        if work.get(f"choice {k}") is None:
            work.keep(f"choice {k}", _choose_wide(users, source.loss, settings, work).state())
    return [Chosen.of(work.get(f"choice {k}"), settings.count, None)
            for k in range(len(source.parts))]


def _choose_wide(users: Users, loss: Loss, settings: Settings, work: Work) -> Chosen:
    work.show("searching for groups")
    found = search_wide(users, loss, settings.max_groups,
                        lambda count: work.show("searching for groups", text=f"{count} groups"))
    labels = found.best.labels
    work.show("comparing kinds of models")
    compared = choose_wide(users, loss, labels, settings)
    return Chosen(labels, _used(labels, compared.sharing, found.sentence), compared.sharing,
                  compared.means, compared.errors, models=found.models)
