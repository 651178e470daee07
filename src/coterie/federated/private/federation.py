"""A private fit: every user releases noisy sums (`coterie.federated.private.release`), and nothing
else leaves it.

1. Nodes say who their users are, and which columns they have. What texts mean is public: levels are
   given.
2. Without public bounds of the columns, users release noisy counts of magnitudes, which bound them.
3. Users release noisy sums, which centre and scale the columns.
4. Users release the noisy summary. All that a fit chooses follows from it
   (`coterie.federated.private.effective`), and costs nothing.
5. Every user gets the centre of its group and how models vary around it, and finishes its model at
   home.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from coterie.base.errors import CoterieError, Incompatible, InvalidInput, require
from coterie.base.storage import write_atomically
from coterie.base.types import Array
from coterie.federated.agreement import Agreement
from coterie.federated.private.effective import Effective, NoisySums, effective, fit_summaries
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
    query_of,
)
from coterie.federated.protocol.messages import Batch, triangle
from coterie.federated.session import Session
from coterie.federated.settings import Deployment
from coterie.fitting.result import Fit
from coterie.fitting.settings import Settings
from coterie.fitting.units import Units, make_loss
from coterie.groups.wide import CentredModels
from coterie.problem.solution import Status

#: Files of a checkpoint before the first release.
_BEGUN = ("promise.json", "federation.json", "aside.json", "scaling.json")
PrivateTask = Literal["regression", "classification", "counts"]
_WITHIN = 0.99  # share of the values that bounds are found for
_STANDS_OUT = 4.5  # standard errors: hardly ever one of the thousands of bins without a value
_WIDTH = 2.0  # standard deviations of a target that count
_LEAST_LEVEL = 0.05  # mean count of a user over that of all, at least
# Scale of a column at least, and its usual variance, in half widths of its bounds.
_LEAST_SCALE, _USUAL = 0.02, 0.1
_ABSURD = 1e4  # times the typical release: more than users differ
_AROUND = 0.1  # variance of models around centres that is offered for finishing at home


@contextlib.contextmanager
def keeping_promise(privacy: Privacy, deployment: Deployment,
                    folder: Path | None) -> Iterator[None]:
    """Refuse a checkpoint of a run with another promise or about other columns.

    A run that is refused before anything was released leaves none: what is corrected then is
    another promise.
    """
    if folder is None:
        yield
        return
    _check_promise(privacy, deployment, folder)
    try:
        yield
    except (CoterieError, OSError):
        if not (folder / "answers" / "0000.coterie").exists():
            for name in (*_BEGUN, "answers/run.coterie"):
                (folder / name).unlink(missing_ok=True)
        raise


def _check_promise(privacy: Privacy, deployment: Deployment, folder: Path) -> None:
    file, said = folder / "promise.json", {
        "epsilon": privacy.epsilon, "delta": privacy.delta, "unit": privacy.unit,
        "clip": privacy.clip_text, "user": deployment.user, "target": deployment.target}
    if not file.exists():
        write_atomically(file, json.dumps(said).encode(), durable=True)
        return
    saved = json.loads(file.read_text(encoding="utf-8"))
    for key, value in said.items():
        if saved.get(key) != value:
            raise InvalidInput(f"the checkpoint in {folder} is of another run: its {key} is "
                               f"{saved.get(key)!r}, this run's is {value!r}",
                               remedy="Give another folder, or the same settings")


class Releases:
    """The releases of a private fit, and what is made of them.

    How columns are scaled is found once: a user who is set aside later must not make the others
    release again.

    Parameters
    ----------
    privacy : what is promised.
    folder : of the checkpoint; None to keep nothing.
    """

    def __init__(self, privacy: Privacy, folder: Path | None) -> None:
        self.privacy = privacy
        self.file = None if folder is None else folder / "scaling.json"
        self.known: ReleaseQuestion | None = None
        self.home: Batch | None = None  # what every user got to finish its model
        self.asked: tuple[Array, Array, tuple[float, ...]] | None = None

    def fit(self, session: Session, agreement: Agreement, settings: Settings) -> Fit:
        """The fit of all who take part."""
        runtime: Any = session.runtime
        privacy, task = self.privacy, agreement.task
        # 1. The noisy summaries, as least-squares problems without noise.
        question = self._scaled_question(session, agreement)
        known = effective(NoisySums.of(_released(session, question), question), agreement.names,
                          agreement.features, privacy.unit == "user")
        # 2. Groups and models.
        fitted = fit_summaries(known, settings)
        units, sent = _in_given_units(fitted, known, question, task, settings)
        runtime.use(replace(agreement, units=units))
        # 3. Every user finishes its model at home.
        self.home = _send_home(session, fitted, known, units, sent)
        solution = fitted.solution
        if solution.status is Status.CONVERGED:
            solution = replace(solution, status=Status.RELEASED)
        return replace(fitted, units=units, sent=sent, solution=solution, recipe=agreement.recipe,
                       settings=replace(settings, task=task, standardize=True),
                       why=f"{fitted.why} {_warning(known)}".strip(),
                       together=_linked(fitted.together[None], fitted, question, task)[0])

    def _scaled_question(self, session: Session, agreement: Agreement) -> ReleaseQuestion:
        """The question for the summary."""
        if self.known is None and self.file is not None and self.file.exists():
            centre, scale, mu = json.loads(self.file.read_text("utf-8"))
            self.known = _question(SUMMARY, mu, np.array(centre), np.array(scale), self.privacy)
        if self.known is None:
            self.asked = self.asked or _bounds(session, agreement, self.privacy)
            centre, scale, mus = self.asked
            centre, scale = _scaled(session, centre, scale, mus[0], self.privacy, agreement.task)
            self.known = _question(SUMMARY, mus[1], centre, scale, self.privacy)
        # Somebody is set aside, and answers begin anew.
        elif self.file is not None and not self.file.exists():
            text = json.dumps([self.known.centre.tolist(), self.known.scale.tolist(),
                               self.known.mu])
            write_atomically(self.file, text.encode(), durable=True)
        return self.known


def _question(stage: int, mu: float, centre: Array, scale: Array,
              privacy: Privacy) -> ReleaseQuestion:
    return ReleaseQuestion(stage=stage, mu=mu, per_user=privacy.unit == "user", centre=centre,
                           scale=scale, n_features=len(centre) - 1)


def _released(session: Session, question: ReleaseQuestion) -> Array:
    """(n_users, length) what users release."""
    released = session.ask("release", question.n_features,
                         shared=query_of(question)).arrays["released"]
    if released.shape != (len(session.names), question.length):
        raise Incompatible("The users released something else than was asked. Install the same "
                           "version everywhere.")
    released = np.asarray(released, dtype=float)
    sizes, noise = np.abs(released).max(axis=1), 8.0 * question.tau
    session.refuse(sizes > _ABSURD * (np.median(sizes) + noise))
    # No sum is larger than the number of rows, which the first number says.
    if question.stage != RANGES:
        rows = released[:, 0] * (1.0 if question.stage == CENTRES else 1.0 / W0**2)
        session.refuse(sizes > KAPPA * np.maximum(rows, 0.0) + noise / W0**2)
    return released


def _bounds(session: Session, agreement: Agreement, privacy: Privacy) -> tuple[Array, Array,
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
        found = _magnitudes(_released(session, question), question)
        known = {name: known.get(name) or (-bound, bound)
                 for name, bound in zip(names, found, strict=True)}
        stages = stages[1:]
    low, high = np.array([known[name] for name in names], dtype=float).T
    if agreement.task == "counts":
        low[-1] = max(low[-1], 0.0)
        require(low[-1] < high[-1], f"counts are not negative, and the bounds of {names[-1]!r} are",
                f"Give other bounds in clip, for example {names[-1]}=0:100")
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


def _scaled(session: Session, centre: Array, scale: Array, mu: float, privacy: Privacy,
            task: str) -> tuple[Array, Array]:
    """Means and deviations of the columns over all users; of the target what is clipped to [-1, 1].
    """
    question = _question(CENTRES, mu, centre, scale, privacy)
    released = _released(session, question).sum(axis=0)
    n, q = max(float(released[0]), 1.0), len(centre)
    error = question.tau * np.sqrt(len(session.names)) / n
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
                    settings: Settings) -> tuple[Units, CentredModels]:
    """Units between the table and the models, and the models themselves: of classes and counts as
    those of the logistic and the Poisson loss.
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
        loss = make_loss(task, "auto", settings.ridge, 2 * (task == "classification"))
    units = Units(task=task, loss=loss, n_classes=2 * (task == "classification"), mean=mean,
                  scale=scale, centre=centre, spread=spread, feature_names=names)
    return units, CentredModels(_linked(fitted.centres, fitted, question, task),
                                _linked(fitted.models, fitted, question, task))


def _linked(models: Array, fitted: Fit, question: ReleaseQuestion, task: str) -> Array:
    """Models of least squares as they are; of two classes as logistic ones, to first order at the
    mean p; of counts as those of their logarithm. There least squares with normal features z of
    variance 1 give slopes m x and the mean m = exp(x_0 + |x|^2 / 2):

        p + t       ->  log(p / (1 - p)) + t / (p (1 - p))
        m + b' z    ->  log(m) - |b / m|^2 / 2 + b' z / m
    """
    if task == "regression":
        return models
    if task == "counts":
        told = fitted.units.coefficients(models)[..., 0] * float(question.scale[-1])
        mean = max(float(question.centre[-1]), _LEAST_SCALE * float(question.scale[-1]))
        level = np.maximum(told[:, -1] + mean, _LEAST_LEVEL * mean)[:, None]
        slopes = told[:, :-1] / level
        bent = np.minimum(0.5 * (slopes**2).sum(axis=1, keepdims=True), 1.0)
        return np.concatenate([slopes, np.log(level) - bent], axis=1)
    p = float(np.clip(question.centre[-1], 1e-3, 1.0 - 1e-3))
    margins = (fitted.units.coefficients(models)[..., 0] * float(question.scale[-1])
               / (p * (1.0 - p)))
    margins[:, -1] += np.log(p / (1.0 - p))
    return margins


def _send_home(session: Session, fitted: Fit, known: Effective, units: Units,
               sent: CentredModels) -> Batch:
    """Every user gets the centre of its group and covariances of models around it."""
    dim = sent.models.shape[1]
    intercept = np.diag(np.append(np.full(dim - 1, 0.01 * _AROUND), 1.0))
    shapes, dispersion = [_AROUND * np.eye(dim), intercept], 1.0
    if units.task == "regression":
        dispersion = known.plain_noise / fitted.units.spread**2
    if fitted.solution.problem.loss.covariance is not None:
        covariance = np.asarray(fitted.solution.problem.loss.covariance)
        shapes.append(covariance / max(float(np.trace(covariance)), 1e-300) * dim * _AROUND)
    asked = Batch("home", session.turn, np.arange(len(session.names)),
                  {"centre": sent.centres[fitted.labels]},
                  shared={"covariance": triangle(np.stack(shapes)), "noise": np.array(dispersion)})
    session.ask(asked.kind, dim, arrays=asked.arrays, shared=asked.shared)
    return asked


def _warning(known: Effective) -> str:
    """Where noise is large against what groups need."""
    p = known.means.shape[1]
    if float(np.median(known.sizes)) < 4.0 * known.tau * (p + 1):
        return ("The noise is large for users with so few rows: groups may have been missed, and "
                "models are rough.")
    return ""
