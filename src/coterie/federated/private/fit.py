"""The fit of users who are known by noisy summaries only.

The summaries become least-squares problems (`coterie.federated.private.effective`), which go
through the fit of a table. Two things differ. Groups are also searched among models and mean
features together, because users of a group often agree in both, and noise leaves little of a model.
And groups are kept where a personal model for each user is not clearly better: noise averages out
in groups.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np

from coterie.base.errors import CoterieWarning
from coterie.base.types import Array, Ints
from coterie.data.scaling import Standardizer
from coterie.federated.private.effective import Effective, with_means
from coterie.fitting.fit import fit, fit_source
from coterie.fitting.judge import Chosen
from coterie.fitting.kinds import Comparison, choose
from coterie.fitting.result import Fit
from coterie.fitting.settings import Settings
from coterie.fitting.sources import FitSource, RowsFitSource
from coterie.fitting.units import learn_units
from coterie.fitting.work import FitProgress, Work
from coterie.groups.partitions import Judge
from coterie.groups.search import SearchOptions, search, shortest
from coterie.groups.summaries import Summaries
from coterie.losses import Loss

# Share of what a continuous spread of models and mean features explains that groups must explain.
_NEARLY = 0.85
_CLEARLY = 2.0  # standard errors by which other kinds must be better than groups


def fit_summaries(known: Effective, settings: Settings, progress: FitProgress | None = None) -> Fit:
    """Groups and models, in the units of `known.users`.

    Parameters
    ----------
    known : what the summaries say.
    settings : of the fit; its task, ridge and scaling are those of `known`.
    progress : called with what is being done.
    """
    settings = replace(settings, task="regression", loss="squared", holdout=0.0, standardize=False,
                       ridge=known.ridge, n_classes=0, average="off")
    units = learn_units(known.users, settings)  # an average would cost a budget of its own
    if known.users.n_users < 2:
        return fit(known.users, settings, progress=progress)

    def judge(source: FitSource, settings: Settings, work: Work) -> list[Chosen]:
        inner = source.parts[0]
        labels, sentence = search_groups(known, inner, source.loss, settings)
        summaries = Summaries.exact(inner, source.loss)
        compared = choose(summaries, labels, settings)
        compared = replace(compared, chosen=_prefer_groups(compared))
        return [Chosen(labels, sentence, compared.sharing, compared.means, compared.errors,
                       summaries)]

    with warnings.catch_warnings(action="ignore", category=CoterieWarning):
        return fit_source(RowsFitSource(units, known.users), settings,
                          Work(progress or (lambda *_: None)), judge)


def search_groups(known: Effective, inner: Any, loss: Loss, settings: Settings) -> tuple[Ints, str]:
    """The groups, and a sentence about them.

    Candidates are the best groups by models, and by models and mean features together; the latter
    if users hardly vary within them. The one that describes the models shorter is taken.
    """
    options = SearchOptions(max_groups=settings.max_groups, k=settings.k)
    everyone, by_models = np.zeros(inner.n_users, dtype=np.int64), _standardised(inner)
    candidates = [search(Summaries.exact(by_models, loss), options).best.labels]
    wide = with_means(known)
    if wide is not None:
        units = learn_units(wide, settings)
        examined = search(Summaries.exact(_standardised(units.inner(wide)), units.loss),
                          options).examined
        grouped = [partition for partition in examined if partition.labels.any()]
        ungrouped = [partition for partition in examined if not partition.labels.any()]
        together = max(partition.length for partition in ungrouped)
        gain = together - shortest(ungrouped).length  # by one centre with spread
        if grouped and together - shortest(grouped).length > _NEARLY * gain:
            candidates.append(shortest(grouped).labels)
    judge = Judge.of(Summaries.exact(by_models, loss))
    labels = min((labels for labels in candidates if labels.any()), key=judge.criterion,
                 default=everyone)
    if not labels.any():
        return labels, "No groups stand out from the noise."
    sizes = ", ".join(map(str, np.bincount(labels)))
    return labels, (f"{int(labels.max()) + 1} groups of {sizes} users describe the released "
                    "statistics better than one "
                    "group.")


def _standardised(users: Any) -> Any:
    """Features and targets with mean 0 and variance 1, as the search wants them."""
    scaled = Standardizer.from_moments(users.moments(),
                                       feature_names=users.feature_names).transform(users)
    column = replace(users, features=users.targets[:, None], targets=None,
                     feature_names=("target",))
    scaler = Standardizer.from_moments(column.moments(), feature_names=("target",))
    return replace(scaled, targets=(users.targets - scaler.mean.item()) / scaler.scale.item())


def _prefer_groups(compared: Comparison) -> int:
    """The kind taken: groups, unless another one is clearly better."""
    kinds = [option.kind for option in compared.options]
    if "groups" not in kinds or kinds[compared.chosen] in ("groups", "one model",
                                                           "personal in groups"):
        return compared.chosen
    groups = kinds.index("groups")
    judged = np.log(np.maximum(compared.losses, 1e-300))
    difference: Array = judged[groups] - judged[compared.chosen]
    error = float(difference.std(ddof=1) / np.sqrt(len(difference)))
    return groups if float(difference.mean()) <= _CLEARLY * error else compared.chosen
