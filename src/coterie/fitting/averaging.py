"""How an average is found: by what users answer (`coterie.fitting.columns`), wherever their rows
are.

1. A grid: histograms of the columns give the basis of each scale, and the limits of targets.
2. Sums of all columns, by fold: candidates are learned from them, with all rows and without each
   fold, and so is the kind that was chosen.
3. Products of errors on rows left out give the weights; the kind alone is kept unless the average
   is better (`coterie.fitting.average`).
4. The parts, for all users, and distances from predictions for intervals.

Classes and counts need working problems, at points that change: for them rows have to be in this
process.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import numpy as np

from coterie.base.errors import InvalidInput
from coterie.base.storage import square
from coterie.base.types import Array, Ints
from coterie.data.encoding import Task
from coterie.data.moments import SecondMoments
from coterie.data.users import Users
from coterie.fitting.average import (
    Average,
    ErrorProducts,
    Part,
    RowsLeftOut,
    StackedWeights,
    predicted,
)
from coterie.fitting.basis import Basis, Grid, Sketch
from coterie.fitting.candidates import (
    N_FOLDS,
    Candidate,
    Limits,
    Scale,
    finish_numbers,
    finish_working,
    folds_of,
    forms_of,
    learn_numbers,
    learn_working,
    starts_of,
)
from coterie.fitting.columns import (
    Answer,
    ColumnFrame,
    ColumnQuestion,
    GridQuestion,
    LeftOutQuestion,
    Shared,
    SumsQuestion,
    quantiles_of,
    whole_of,
)
from coterie.fitting.kinds import Sharing, group_centres
from coterie.fitting.settings import Settings
from coterie.fitting.units import Units
from coterie.groups.hierarchy import Estimate, ModelSums
from coterie.losses import losses_for

_QUANTILES = 200  # of distances from predictions that are kept
# Users and rows that everything is learned from, at most, also of classes and counts, whose rows
# are summed again and again; and numbers of all users' sums.
_USERS, _ROWS, _WORKING_ROWS, _NUMBERS = 250, 20_000, 8_000, 4e7
_WIDEST = 60  # features up to which an average is made
_CURVES = 8  # curves of a basis, at most
_MOVES = 2  # times that users change groups in a fold


class Declined(Exception):
    """Users do not answer what an average asks; the fit goes on without one."""


class Asked(Protocol):
    """Users who answer what an average asks; part 0 is all rows, and part 1, if there is one, those
    that are not held out. `given` are their rows in the units given, where they are in this
    process; else it is empty.
    """

    given: list[Users]

    @property
    def part_units(self) -> list[Units]:
        """The units of each part."""

    def moments(self, part: int) -> tuple[Ints, Array, Array]:
        """Rows of each user; means and standard deviations of columns, the target last, over all
        rows, in the units given.
        """

    def ask_average(self, part: int, question: ColumnQuestion, some: Ints,
                    fields: Answer) -> Iterator[tuple[Ints, Answer]]:
        """Answers of some users, in turns, each with its users; raises `Declined` where there are
        none.
        """


def usual(settings: Settings) -> bool:
    """Whether an average may be looked for with these settings."""
    loss = settings.task != "clustering" and settings.loss in ("auto", losses_for(settings.task)[0])
    return settings.average == "auto" and loss and settings.count == "rows"


def possible(settings: Settings, units: Units, sizes: Ints) -> bool:
    """Whether an average is looked for: of numbers, two classes or counts with the usual loss, of
    several users, some of whom have several rows, and not too many columns.
    """
    return (usual(settings) and units.n_classes <= 2 and len(sizes) > 1
            and len(units.mean) <= _WIDEST and int(sizes.max()) > 1)


def find_average(source: Asked, part: int, sharing: Sharing,
                 settings: Settings) -> Average | None:
    """The average for these users, or the kind that was chosen with what intervals need.

    Parameters
    ----------
    source : of the answers.
    part : of the rows.
    sharing : the kind of models that was chosen, and its groups.
    settings : of the fit.

    Returns
    -------
    The average; None where rows are too few to judge it, or elsewhere and of classes or counts.

    Raises
    ------
    Declined : users do not answer.
    """
    if settings.task != "regression" and not source.given:
        return None
    # 1. The columns of each scale.
    sizes, mean, spread = source.moments(part)
    grid = Grid.of(mean, spread)
    question = GridQuestion(grid, len(mean) - 1 > _CURVES)
    everybody = np.arange(len(sizes))
    sketch = question.pool([answer for _, answer in source.ask_average(
        part, question, everybody, {})])
    low, high = (float(grid.mean[0, -1] + grid.scale[0, -1] * end)
                 for end in sketch.limits(len(mean) - 1))
    if not spread[-1] > 0 or int((sizes > 1).sum()) < 2:
        return None
    scales = _scales(sketch, grid, settings)
    if not scales:
        return None
    frame = ColumnFrame(settings.task, settings.seed, tuple(scales), Limits(low, high))
    first = starts_of(sketch.own[:, 0, 0], sketch.rows)
    units = source.part_units[part]
    if settings.task != "regression":
        return _from_rows(units, source.given[part], first, sharing, frame, settings)
    return _from_sums(source, part, units, first, sharing, frame, settings)


def _some(sizes: Ints, rows: int) -> Ints:
    """Positions of the users that all is learned from, with about so many rows."""
    most = min(_USERS, max(2, int(rows / max(float(sizes.mean()), 1.0))))
    return np.unique(np.linspace(0, len(sizes) - 1, min(len(sizes), most)).astype(np.int64))


def _scales(sketch: Sketch, grid: Grid, settings: Settings) -> list[Scale]:
    """The scales of the target, each with its columns; the first is that of the level."""
    numbers, scales = settings.task == "regression", list[Scale]()
    if settings.scale == "log" and numbers and not sketch.positive[-1]:
        raise InvalidInput("the target is not positive everywhere, so it has no logarithm",
                           remedy="Use --scale auto")
    for logarithms in (False, True) if settings.scale != "level" else (False,):
        if logarithms and numbers and not sketch.positive[-1]:
            continue
        basis = Basis.learn(sketch, grid, logarithms=logarithms)
        if logarithms and not numbers and not basis.logs.any() and scales:
            continue
        most = _room(len(sketch.rows), basis)
        if most < 0:
            continue
        if settings.curves == "auto":
            basis = basis.with_curves(sketch, most)
        else:
            basis = replace(basis, between=basis.between[:0], size=basis.size[:0],
                            means=basis.means[:, :0])
        scales.append(Scale(basis, logarithms and numbers, *_centre(sketch, grid, settings.task,
                                                                    int(logarithms))))
    return scales


def _room(n_users: int, basis: Basis) -> int:
    """Curves that fit into memory for all users; -1 where not even straight columns do."""
    straight = basis.width
    inside = 1 + int(basis.varies.sum())
    for curves in range(_CURVES, -1, -1):
        width, own = straight + 6 * curves, inside + 6 * min(curves, 3)
        if n_users * width * (width + 3.0 * own) <= _NUMBERS:
            return curves
    return -1


def _centre(sketch: Sketch, grid: Grid, task: Task, s: int) -> tuple[float, float]:
    """What is subtracted from margins or targets, and what they are divided by."""
    if task == "regression":
        return float(grid.mean[s, -1]), float(grid.scale[s, -1])
    own = float(sketch.rows @ sketch.own[:, 0, 0, -1]) / max(float(sketch.rows.sum()), 1.0)
    mean = float(grid.mean[0, -1] + grid.scale[0, -1] * own)
    if task == "counts":
        return float(np.log(max(mean, 1e-3))), 1.0
    share = float(np.clip(mean, 1e-3, 1.0 - 1e-3))
    return float(np.log(share / (1.0 - share))), 1.0


def _candidates(frame: ColumnFrame, settings: Settings) -> list[Candidate]:
    """The models that are compared; the level alone is not, where logarithms are asked for."""
    some = [k for k in range(len(frame.scales))
            if settings.scale != "log" or k or len(frame.scales) == 1]
    return [each for k in some
            for each in forms_of(frame.scales[k].basis, k, straight=k == some[0])]


# -- numbers: by sums


def _from_sums(source: Asked, part: int, units: Units, first: Ints, sharing: Sharing,
               frame: ColumnFrame, settings: Settings) -> Average | None:
    """Steps 2 to 4 for numbers."""
    # 2. Sums, and candidates.
    sizes = source.moments(part)[0]
    some, everybody = _some(sizes, _ROWS), np.arange(len(sizes))
    folds, whole, means = _sums(source, part, SumsQuestion(frame), some, everybody, first)
    candidates = _candidates(frame, settings)
    learned = learn_numbers(candidates, folds)
    kind = _kind_models(units, frame.scales[0], folds[0], sharing_of(sharing, some))
    # 3. Products of errors, and weights.
    shared = tuple(tuple(Shared.of(one) for one in each) for _, each in learned)
    question = LeftOutQuestion(frame, tuple(candidates), shared, np.zeros(0), np.zeros(0))
    fields = {"who": first, "models": _spread_out(kind.reshape(len(some), -1), some, len(sizes))}
    told = _joined(source.ask_average(part, question, some, fields))
    rows = told["count"].astype(float)
    if int((rows > 0).sum()) < 2:
        return None
    products = square(told["values"], 1 + len(candidates))[rows > 0]
    verdict = StackedWeights.of(ErrorProducts.of(products, rows[rows > 0]), numbers=True,
                                differ=sharing.differ)
    # 4. The parts, and distances.
    kept = np.flatnonzero(np.maximum(verdict.weights[1:], verdict.spread) > 0)
    question = question._replace(
        candidates=tuple(candidates[k] for k in kept), shared=tuple(shared[k] for k in kept),
        weights=verdict.weights[[0, *(1 + kept)]], spread=verdict.spread[kept])
    away = _joined(source.ask_average(part, question, some, fields))["values"].sum(axis=0)
    parts = []
    for k in kept:
        estimate, gradient = finish_numbers(candidates[k], whole[candidates[k].scale],
                                            learned[k][0])
        parts.append(_part(candidates[k], verdict, int(k), estimate, gradient))
    scales = [replace(scale, basis=replace(scale.basis, means=own))
              for scale, own in zip(frame.scales, means, strict=True)]
    return _assembled(settings.task, verdict, parts, scales, frame.limits,
                      quantiles_of(away, _QUANTILES))


def _sums(source: Asked, part: int, question: SumsQuestion, some: Ints, everybody: Ints,
          first: Ints) -> tuple[list[list[ModelSums]], list[ModelSums], list[Array]]:
    """By scale, the sums of some users in each fold, of all users, and users' means."""
    n, scales = len(everybody), question.frame.scales
    widths = [scale.basis.width for scale in scales]

    def blank(users: int, width: int) -> ModelSums:
        return ModelSums(np.zeros((users, width, width)), np.zeros((users, width)),
                         np.zeros(users), np.zeros(users))

    folds = [[blank(len(some), width) for _ in range(N_FOLDS + 1)] for width in widths]
    whole = [blank(n, width) for width in widths]
    means = [np.zeros((n, len(scale.basis.between))) for scale in scales]
    for users, answer in source.ask_average(part, question, everybody, {"who": first}):
        parts, own = question.read(answer)
        mine = np.isin(users, some)
        places = np.searchsorted(some, users[mine])
        for k, each in enumerate(parts):
            means[k][users] = own[k]
            for array, values in zip(whole[k], whole_of(each), strict=True):
                array[users] = values
            for f, one in enumerate(each):
                for array, values in zip(folds[k][f], one, strict=True):
                    array[places] = values[mine]
    return folds, whole, means


def _joined(answers: Iterator[tuple[Ints, Answer]]) -> Answer:
    each = [answer for _, answer in answers]
    return {name: np.concatenate([one[name] for one in each]) for name in each[0]}


def _spread_out(values: Array, some: Ints, n: int) -> Array:
    """Rows of some users among those of all, which are zero."""
    out = np.zeros((n, values.shape[1]))
    out[some] = values
    return out


def _kind_models(units: Units, scale: Scale, folds: list[ModelSums], sharing: Sharing) -> Array:
    """(n_users, N_FOLDS, n_features + 1) models of the kind that was chosen, without each fold; in
    the units given, the intercept last.
    """
    whole, q = whole_of(folds), len(units.mean)
    basis = scale.basis
    # From columns of the basis to those of the solver: a = shift + turn z.
    turn = np.append(basis.scale / units.scale, scale.spread / units.spread)
    shift = np.append((basis.mean - units.mean) / units.scale,
                      (scale.centre - units.centre) / units.spread)
    out = np.zeros((len(whole.rows), N_FOLDS, q + 1))
    for f in range(N_FOLDS):
        kept = whole.minus(folds[f])
        rows = np.maximum(kept.rows, 1.0)
        z = np.concatenate([kept.gram[:, 0, 1:q + 1], kept.moment[:, :1]], axis=1) / rows[:, None]
        products = np.zeros((len(rows), q + 1, q + 1))
        products[:, :q, :q] = kept.gram[:, 1:q + 1, 1:q + 1]
        products[:, :q, q] = products[:, q, :q] = kept.moment[:, 1:q + 1]
        products[:, q, q] = kept.square
        scatter = products - rows[:, None, None] * z[:, :, None] * z[:, None, :]
        moments = SecondMoments(np.round(kept.rows).astype(np.int64), shift + turn * z,
                                scatter * turn[:, None] * turn)
        users = moments.users(tuple(range(len(rows))), units.feature_names)
        models = moved(units, users, sharing).models(users, units.loss)
        out[:, f] = units.coefficients(models)[..., 0]
    return out


# -- classes and counts: by rows in this process


def _from_rows(units: Units, users: Users, first: Ints, sharing: Sharing, frame: ColumnFrame,
               settings: Settings) -> Average | None:
    """Steps 2 to 4 for classes and counts."""
    scales = [replace(scale, basis=scale.basis.of_users(users)) for scale in frame.scales]
    candidates = _candidates(frame, settings)
    some = _some(users.counts, _WORKING_ROWS)
    sample = users if len(some) == users.n_users else users.take(some)
    folds = folds_of(sample, settings.task, first[some], settings.seed)
    left = np.flatnonzero(folds >= 0)
    assert sample.targets is not None
    if len(np.unique(sample.owner[left])) < 2:
        return None
    learned = learn_working(candidates, scales, sample, some, folds, settings.task, frame.limits)
    kind = _kind_left_out(units, sample, sharing_of(sharing, some), folds)
    told = np.stack([kind, *(found for _, found in learned)], axis=1)[left]
    judged = RowsLeftOut.of(settings.task, told, sample.targets[left], sample.owner[left])
    verdict = StackedWeights.of(judged, numbers=False, differ=sharing.differ)
    parts = []
    for k in np.flatnonzero(verdict.weights[1:] > 0):
        candidate = candidates[k]
        estimate, gradient = finish_working(candidate, scales[candidate.scale], users,
                                            learned[k][0], settings.task, frame.limits)
        parts.append(_part(candidate, verdict, int(k), estimate, gradient))
    return _assembled(settings.task, verdict, parts, scales, frame.limits, np.zeros(0))


def _part(candidate: Candidate, verdict: StackedWeights, k: int, estimate: Estimate,
          gradient: float) -> Part:
    return Part(candidate.name, candidate.scale, float(verdict.weights[1 + k]),
                float(verdict.spread[k]), estimate, gradient)


def _assembled(task: Task, verdict: StackedWeights, parts: list[Part], scales: list[Scale],
               limits: Limits, quantiles: Array) -> Average:
    """The average, with the scales that it needs."""
    used = list(dict.fromkeys(part.scale for part in parts))
    return Average(task, float(verdict.weights[0]),
                   tuple(part._replace(scale=used.index(part.scale)) for part in parts),
                   tuple(scales[k] for k in used), limits, quantiles, verdict.gain, verdict.error)


# -- the kind that was chosen, without some rows


def sharing_of(sharing: Sharing, some: Ints) -> Sharing:
    """The same for some of the users."""
    labels = np.unique(sharing.labels[some], return_inverse=True)[1].astype(np.int64)
    noise = None if sharing.noise is None else sharing.noise[some]
    return replace(sharing, labels=labels, noise=noise)


def _kind_left_out(units: Units, users: Users, sharing: Sharing, folds: Ints) -> Array:
    """(n_rows,) predictions of rows that were left out; users choose their group again without
    them.
    """
    inner, told = units.inner(users), np.full(users.n_samples, np.nan)
    assert inner.targets is not None
    for f in range(int(folds.max()) + 1):
        kept, left = np.flatnonzero(folds != f), np.flatnonzero(folds == f)
        part = replace(inner, features=inner.features[kept], targets=inner.targets[kept],
                       offsets=np.searchsorted(users.owner[kept], np.arange(users.n_users + 1)))
        models = moved(units, part, sharing).models(part, units.loss)
        told[left] = predicted(units, users.features[left], models[users.owner[left]])
    return told


def moved(units: Units, users: Users, sharing: Sharing) -> Sharing:
    """The sharing with each user in the group that is likeliest for these rows."""
    if not 1 < sharing.n_groups < users.n_users:
        return sharing
    outer = sharing.loss(units.loss, users)
    samples = outer.prepare(users)
    for _ in range(_MOVES):
        centres = group_centres(outer, samples, sharing.labels, sharing.count)
        values = np.stack([outer.values(samples, np.repeat(centre[None], users.n_users, axis=0))
                           for centre in centres])
        labels = values.argmin(axis=0)
        if len(np.unique(labels)) < len(centres) or np.array_equal(labels, sharing.labels):
            break
        sharing = replace(sharing, labels=labels.astype(np.int64))
    return sharing
