"""A private fit: every user releases noisy sums (`coterie.federated.private.release`), and nothing
else leaves it.

1. Nodes say who their users are, and which columns they have. What texts mean is public: levels are
   given.
2. Without public bounds of the columns, users release noisy counts of magnitudes, which bound them.
3. Users release noisy sums, which centre and scale the columns.
4. Users release the noisy summary. All that a fit chooses follows from it
   (`coterie.federated.private.fit`), and costs nothing.
5. Every user gets the centre of its group and how models vary around it, and finishes its model at
   home.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from coterie.base.errors import Incompatible, InvalidInput
from coterie.base.storage import write_atomically
from coterie.base.types import Array
from coterie.data.columns import Column
from coterie.data.encoding import Recipe
from coterie.data.validation import show, split_names
from coterie.federated.agreement import Agreement, Carrier, introduced
from coterie.federated.config import DataSettings
from coterie.federated.fit import Carriage, account_of, without_refusers
from coterie.federated.introduction import Introduction
from coterie.federated.private.effective import Effective, Summaries, effective
from coterie.federated.private.fit import fit_summaries
from coterie.federated.private.policy import TARGET, Privacy
from coterie.federated.private.release import (
    CENTRES,
    HIGHEST,
    KAPPA,
    LOWEST,
    RANGES,
    SUMMARY,
    W0,
    ReleaseQuestion,
)
from coterie.federated.protocol.messages import triangle
from coterie.federated.releasing import query_of
from coterie.federated.runtimes.nodes import LocalNodes
from coterie.federated.session import Session
from coterie.fitting.estimate import Fit
from coterie.fitting.result import SentModels
from coterie.fitting.settings import Settings
from coterie.fitting.units import Units, make_loss
from coterie.losses import Personal
from coterie.problem.solution import Status

PrivateTask = Literal["regression", "classification"]
_WITHIN = 0.99  # share of the values that bounds are found for
_STANDS_OUT = 4.5  # standard errors: hardly ever one of the thousands of bins without a value
_WIDTH = 2.0  # standard deviations of a target that count
# Scale of a column at least, and its usual variance, in half widths of its bounds.
_LEAST_SCALE, _USUAL = 0.02, 0.1
_ABSURD = 1e4  # times the typical release: more than users differ
_AROUND = 0.1  # variance of models around centres that is offered for finishing at home


def fit_privately(runtime: Carrier, data: DataSettings, settings: Settings, privacy: Privacy,
                  carriage: Carriage) -> Fit:
    """Agree, ask for releases, fit and send centres, over any runtime.

    Parameters
    ----------
    runtime : finds the users and carries the queries.
    data : what is asked of the data.
    settings : of the fit.
    privacy : what is promised.
    carriage : how the questions are carried.

    Raises
    ------
    Incompatible : users who do not come or do not answer, or nodes whose data do not fit together.
    InvalidInput : data or settings that cannot be private.
    Refused : nodes whose owners do not allow it.
    """
    if isinstance(runtime, LocalNodes):
        runtime.private, runtime.experiment = True, privacy.experiment
    _check_promise(privacy, data, carriage)
    agreement = _agreement(runtime, data, settings, privacy, carriage)
    runtime.use(agreement)
    asker = Session(runtime, agreement.names, participation=carriage.participation,
                  seed=carriage.seed, fingerprint=_fingerprint(runtime, privacy, agreement),
                  checkpoint=carriage.checkpoint, progress=carriage.progress)
    scaling = _Scaling(carriage)
    fitted, _, aside = without_refusers(
        asker, agreement, carriage, lambda: _fingerprint(runtime, privacy, agreement),
        lambda agreed: _asked(asker, agreed, settings, privacy, scaling, carriage))
    home = runtime.data.memory["home"].values if isinstance(runtime, LocalNodes) else None
    return replace(fitted, account=account_of(asker, aside, privacy=privacy, at_home=home))


def _fingerprint(runtime: Carrier, privacy: Privacy, agreement: Agreement) -> dict[str, Any]:
    """What must agree for releases in a checkpoint to be used."""
    return {"epsilon": privacy.epsilon, "delta": privacy.delta,
            "unit": privacy.unit, "task": agreement.task,
            **({} if isinstance(runtime, LocalNodes) else runtime.identity())}


def _asked(asker: Session, agreement: Agreement, settings: Settings, privacy: Privacy,
           scaling: _Scaling, carriage: Carriage) -> Fit:
    """The fit of all who take part."""
    runtime: Any = asker.runtime
    question = scaling.question(asker, agreement, privacy)
    known = effective(Summaries.of(_released(asker, question), question), agreement.names,
                      agreement.features, privacy.unit == "user")
    fitted = fit_summaries(known, settings, carriage.fit_progress)
    task = agreement.task
    units, sent = _in_given_units(fitted, known, question, task, settings)
    runtime.use(replace(agreement, units=units))
    _send_home(asker, fitted, known, units, sent)
    solution = fitted.solution
    if solution.status is Status.CONVERGED:
        solution = replace(solution, status=Status.RELEASED)
    return replace(fitted, units=units, sent=sent, solution=solution, recipe=agreement.recipe,
                   settings=replace(settings, task=task, standardize=True),
                   why=f"{fitted.why} {_warning(known)}".strip(),
                   together=_classes_of(fitted.together[None], fitted, question, task)[0])


class _Scaling:
    """How columns are scaled, found once: a user who is set aside later must not make the others
    release again.
    """

    def __init__(self, carriage: Carriage) -> None:
        self.file = (None if carriage.checkpoint is None
                     else Path(carriage.checkpoint) / "scaling.json")
        self.known: ReleaseQuestion | None = None
        self.asked: tuple[Array, Array, tuple[float, ...]] | None = None

    def question(self, asker: Session, agreement: Agreement, privacy: Privacy) -> ReleaseQuestion:
        """The question for the summary."""
        if self.known is None and self.file is not None and self.file.exists():
            centre, scale, mu = json.loads(self.file.read_text("utf-8"))
            self.known = _question(SUMMARY, mu, np.array(centre), np.array(scale), privacy)
        if self.known is None:
            self.asked = self.asked or _bounds(asker, agreement, privacy)
            centre, scale, mus = self.asked
            centre, scale = _scaled(asker, centre, scale, mus[0], privacy, agreement.task)
            self.known = _question(SUMMARY, mus[1], centre, scale, privacy)
        # Somebody is set aside, and answers begin anew.
        elif self.file is not None and not self.file.exists():
            write_atomically(self.file,
                             json.dumps([self.known.centre.tolist(), self.known.scale.tolist(),
                                                    self.known.mu]).encode(), durable=True)
        return self.known


# -- before the first release


def _check_promise(privacy: Privacy, data: DataSettings, carriage: Carriage) -> None:
    """Refuse a checkpoint of a run with another promise or about other columns."""
    if carriage.checkpoint is None:
        return
    file = Path(carriage.checkpoint) / "promise.json"
    said = {"epsilon": privacy.epsilon, "delta": privacy.delta, "unit": privacy.unit,
            "clip": privacy.clip_text, "user": data.user, "target": data.target}
    if not file.exists():
        write_atomically(file, json.dumps(said).encode(), durable=True)
        return
    saved = json.loads(file.read_text(encoding="utf-8"))
    for key, value in said.items():
        if saved.get(key) != value:
            raise InvalidInput(f"the checkpoint in {carriage.checkpoint} is of another run: its "
                               f"{key} is {saved.get(key)!r}, this run's is {value!r}",
                               remedy="Give another folder, or the same settings")

def _agreement(runtime: Carrier, data: DataSettings, settings: Settings, privacy: Privacy,
               carriage: Carriage) -> Agreement:
    """Who takes part and what the columns are, from names and what is public."""
    file = None if carriage.checkpoint is None else Path(carriage.checkpoint) / "federation.json"
    if file is not None and file.exists():
        return Agreement.from_json(file.read_text(encoding="utf-8"))
    nodes, agreement = introduced(runtime, carriage.n_users, carriage.wait)
    tables = [node for _, node in nodes if node.targets == "table"]
    if tables:
        recipe = public_recipe(tables, data, privacy)
        agreement = replace(agreement, recipe=recipe, features=recipe.feature_names,
                            task=recipe.task, n_classes=len(recipe.classes))
    else:
        agreement = _prepared(agreement, {node.targets for _, node in nodes}, settings, data)
    if file is not None:
        write_atomically(file, agreement.to_json().encode(), durable=True)
    return agreement


def _prepared(agreement: Agreement, kinds: set[str], settings: Settings,
              data: DataSettings) -> Agreement:
    """The task of prepared numbers: by the loss named, or by whether targets are -1 and 1."""
    losses = {"auto": "", "squared": "regression", "logistic": "classification"}
    if settings.loss not in losses or "none" in kinds or data.task in ("counts", "clustering"):
        raise InvalidInput("a private fit predicts numbers (squared loss) or two classes (logistic "
                           "loss)",
                           remedy="Use the loss 'squared' or 'logistic', or leave epsilon out")
    signs = kinds == {"signs"}
    task = losses[settings.loss] or ("classification" if signs else "regression")
    return replace(agreement, task=task, signs=signs and task == "classification",
                   n_classes=2 * (task == "classification"))


def public_recipe(tables: list[Introduction], data: DataSettings, privacy: Privacy) -> Recipe:
    """How tables become numbers, from what is public: bounds and levels of columns.

    Raises
    ------
    InvalidInput : a column of which too little is public.
    """
    target = data.target
    if not target:
        raise InvalidInput("a private fit needs a target", remedy="Give --target COLUMN")
    numbers = set.intersection(*(set(table.features) for table in tables))
    given = dict(privacy.clip) if isinstance(privacy.clip, Mapping) else {}
    named, drop = split_names(data.features), (target, data.user, *split_names(data.drop))
    for name in named:
        if name not in given and (given or name not in numbers):
            raise InvalidInput(f"too little of the column {name!r} is public",
                               remedy="Name its bounds or its levels "
                               f"in clip, for example {name}=0:100 or {name}=no|yes")
    names = [name for name in (named or given or tables[0].features) if name not in drop
             and (name in given or name in numbers)]
    if not names:
        raise InvalidInput("no column is left to learn from",
                           remedy="Name columns and their bounds or levels in clip")
    note = f"Private: only the columns {show(*names)} are used" + (
        ", which clip names." if given
            else "; texts would need their levels in clip, to be public.")
    columns = tuple(_column(name, privacy.range_of(name), privacy.levels_of(name))
                    for name in names)
    classes = privacy.levels_of(target)
    if len(classes) > 2:
        raise InvalidInput(f"a private fit predicts two classes or numbers, and {target!r} has "
                           f"{len(classes)} classes", remedy="Predict one class against the others")
    if not classes and data.task in ("classification", "counts"):
        raise InvalidInput(f"the classes of {target!r} are not public",
                           remedy=f"Name them in clip: {target}=no|yes")
    return Recipe(user=data.user, target=target, task="classification" if classes else "regression",
                  classes=classes, class_kind="str", columns=columns, notes=(note,))


def _column(name: str, bounds: Any, levels: tuple[str, ...]) -> Column:
    if levels:
        two = len(levels) == 2
        return Column(name=name, kind="category", levels=levels[1:] if two else levels,
                      reference=levels[0] if two else None, fill=0.5 if two else 0.0)
    return Column(name=name, kind="number", fill=0.0 if bounds is None else 0.5 * (bounds[0]
        + bounds[1]))


# -- releases


def _question(stage: int, mu: float, centre: Array, scale: Array,
              privacy: Privacy) -> ReleaseQuestion:
    return ReleaseQuestion(stage=stage, mu=mu, per_user=privacy.unit == "user", centre=centre,
                           scale=scale, n_features=len(centre) - 1)


def _released(asker: Session, question: ReleaseQuestion) -> Array:
    """(n_users, length) what users release."""
    released = asker.ask("release", question.n_features,
                         shared=query_of(question)).arrays["released"]
    if released.shape != (len(asker.names), question.length):
        raise Incompatible("The users released something else than was asked. Install the same "
                           "version everywhere.")
    released = np.asarray(released, dtype=float)
    sizes, noise = np.abs(released).max(axis=1), 8.0 * question.tau
    asker.refuse(sizes > _ABSURD * (np.median(sizes) + noise))
    # No sum is larger than the number of rows, which the first number says.
    if question.stage != RANGES:
        rows = released[:, 0] * (1.0 if question.stage == CENTRES else 1.0 / W0**2)
        asker.refuse(sizes > KAPPA * np.maximum(rows, 0.0) + noise / W0**2)
    return released


def _bounds(asker: Session, agreement: Agreement, privacy: Privacy) -> tuple[Array, Array,
        tuple[float, ...]]:
    """Centre and half width of each column, the target last; and the mu of the releases that are
    left.
    """
    names, stages = [*agreement.features, TARGET], privacy.stages
    if agreement.recipe is not None:
        names[-1] = str(agreement.recipe.target)
        labels = {label: column.name for column in agreement.recipe.columns
                  for label in column.labels}
        known = {label: (0.0, 1.0) if privacy.levels_of(labels[label])
                 else privacy.range_of(labels[label]) for label in labels}
    else:
        known = {name: privacy.range_of(name) for name in names[:-1]}
    known[names[-1]] = ((0.0, 1.0) if agreement.task == "classification"
                        else privacy.range_of(names[-1]))
    unknown = [name for name in names if known.get(name) is None]
    if unknown and privacy.clip is not None:
        raise InvalidInput(f"the bounds of column {unknown[0]!r} "
                           "are not given, and they never come from the data unnoticed",
                           remedy=f"Add it to clip, for example {{{unknown[0]!r}: (0, 100)}}; or "
                           "leave clip out, and bounds are found with a part of the budget")
    if privacy.clip is None:
        question = _question(RANGES, stages[0], np.zeros(len(names)), np.ones(len(names)), privacy)
        found = _magnitudes(_released(asker, question), question)
        known = {name: known.get(name) or (-bound, bound)
                 for name, bound in zip(names, found, strict=True)}
        stages = stages[1:]
    low, high = np.array([known[name] for name in names], dtype=float).T
    return 0.5 * (low + high), 0.5 * (high - low), stages


def _magnitudes(released: Array, question: ReleaseQuestion) -> list[float]:
    """For each column a power of two that nearly all values are below, as far as the noise shows
    it.
    """
    counts = released.sum(axis=0).reshape(len(question.centre), HIGHEST - LOWEST)
    error = question.tau * np.sqrt(len(released))
    bounds = []
    for column in counts:
        column = np.where(column > _STANDS_OUT * error, column, 0.0)
        total = column.sum()
        if total <= 0:
            raise InvalidInput("the budget does not suffice to find the bounds of the columns",
                               remedy="Give them in clip, or raise epsilon")
        inside = np.flatnonzero(np.cumsum(column) >= _WITHIN * total)[0]
        bounds.append(float(2.0 ** (inside + LOWEST)))
    return bounds


def _scaled(asker: Session, centre: Array, scale: Array, mu: float, privacy: Privacy,
            task: str) -> tuple[Array, Array]:
    """Means and deviations of the columns over all users; of the target what is clipped to [-1, 1].
    """
    question = _question(CENTRES, mu, centre, scale, privacy)
    released = _released(asker, question).sum(axis=0)
    n, q = max(float(released[0]), 1.0), len(centre)
    error = question.tau * np.sqrt(len(asker.names)) / n
    mean = np.clip(released[1:q + 1] / n, -1.0, 1.0)
    # The centre of the bounds where noise hides the mean (Breiman's garrotte, 1995).
    mean *= np.maximum(1.0 - (2.0 * error / np.maximum(np.abs(mean), 1e-300)) ** 2, 0.0)
    spread = np.sqrt(_variances(released[q + 1:] / n - mean**2, error))
    spread[-1] = 1.0 + abs(mean[-1]) if task == "classification" else min(_WIDTH * spread[-1],
        1.0 + abs(mean[-1]))
    return centre + scale * mean, scale * spread


def _variances(noisy: Array, error: float) -> Array:
    """Variances of columns, in half widths of their bounds, with this error.

    They are shrunk as far as the error dictates: to what is usual, and those of features to their
    mean.
    """
    def usual(variance: float, error: float) -> float:
        kept = _USUAL**2 / (_USUAL**2 + error**2)
        return max(kept * variance + (1.0 - kept) * _USUAL, _LEAST_SCALE**2)

    features, level = noisy[:-1], _USUAL
    if len(features):
        level = usual(float(features.mean()), error / np.sqrt(len(features)))
    between = max(float(features.var()) - error**2, 0.0) if len(features) > 1 else 0.0
    kept = between / (between + error**2) if error > 0 else 1.0
    shrunk = np.maximum(level + kept * (features - level), max(_LEAST_SCALE**2, 0.1 * level))
    return np.append(shrunk, usual(float(noisy[-1]), error))


# -- models


def _in_given_units(fitted: Fit, known: Effective, question: ReleaseQuestion, task: PrivateTask,
                    settings: Settings) -> tuple[Units, SentModels]:
    """Units between the table and the models, and the models themselves: of classes as those of the
    logistic loss.
    """
    p = question.n_features
    # From features of a summary to columns.
    stretch = np.sqrt(p) / np.sqrt(1.0 - W0**2) * question.scale[:p]
    mean, scale = question.centre[:p] + stretch * known.mean, stretch * known.scale
    names, loss = fitted.units.feature_names, fitted.units.loss
    centre, spread = 0.0, 1.0
    if task == "regression":
        spread = float(question.scale[-1] * fitted.units.spread)
        centre = float(question.centre[-1] + question.scale[-1] * fitted.units.centre)
    else:
        loss = make_loss("classification", "logistic", settings.ridge, 2)
    units = Units(task=task, loss=loss, n_classes=2 * (task == "classification"), mean=mean,
                  scale=scale, centre=centre, spread=spread, feature_names=names)
    return units, SentModels(_classes_of(fitted.centres, fitted, question, task),
                             _classes_of(fitted.models, fitted, question, task))


def _classes_of(models: Array, fitted: Fit, question: ReleaseQuestion, task: str) -> Array:
    """Models of least squares as they are; of two classes as logistic ones, to first order at the
    mean p:

        p + t  ->  log(p / (1 - p)) + t / (p (1 - p))
    """
    if task == "regression":
        return models
    p = float(np.clip(question.centre[-1], 1e-3, 1.0 - 1e-3))
    margins = (fitted.units.coefficients(models)[..., 0] * float(question.scale[-1])
               / (p * (1.0 - p)))
    margins[:, -1] += np.log(p / (1.0 - p))
    return margins


def _send_home(asker: Session, fitted: Fit, known: Effective, units: Units,
               sent: SentModels) -> None:
    """Every user gets the centre of its group and covariances of models around it."""
    dim = sent.models.shape[1]
    intercept = np.diag(np.append(np.full(dim - 1, 0.01 * _AROUND), 1.0))
    shapes, dispersion = [_AROUND * np.eye(dim), intercept], 1.0
    if units.task == "regression":
        dispersion = known.plain_noise / fitted.units.spread**2
    if isinstance(fitted.solution.problem.loss, Personal):
        covariance = np.asarray(fitted.solution.problem.loss.covariance)
        shapes.append(covariance / max(float(np.trace(covariance)), 1e-300) * dim * _AROUND)
    asker.ask("home", dim, arrays={"centre": sent.centres[fitted.labels]},
              shared={"covariance": triangle(np.stack(shapes)), "noise": np.array(dispersion)})


def _warning(known: Effective) -> str:
    """Where noise is large against what groups need."""
    p = known.means.shape[1]
    if float(np.median(known.sizes)) < 4.0 * known.tau * (p + 1):
        return ("The noise is large for users with so few rows: groups may have been missed, and "
                "models are rough.")
    return ""
