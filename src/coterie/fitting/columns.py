"""What an average asks of users, and what they answer: sums over rows, never a row.

    grid       how many rows are in which cell of each column
    sums       second-order sums of all columns of a basis, by fold
    left out   products of the errors of all candidates, over rows that they have not seen
    distances  how many rows left out are how far from the prediction, in standard deviations

A user knows its own sums, so that candidates are sent without their personal parts: what everybody
shares, and the covariance. Users find the rest at home. A table answers by the functions here, and
so do users elsewhere: a question is a list of arrays (`GridQuestion.arrays`), and an answer has
one row for each user.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from coterie.base.errors import InvalidInput
from coterie.base.storage import square, triangle, unpacked
from coterie.base.types import Array, Flags, Ints
from coterie.data.encoding import Task
from coterie.data.users import Users
from coterie.fitting.average import Average, Part
from coterie.fitting.basis import CELLS, Basis, ColumnCurve, Grid, Sketch
from coterie.fitting.candidates import (
    N_FOLDS,
    Candidate,
    Limits,
    Scale,
    finished,
    folds_of,
)
from coterie.groups.hierarchy import Estimate, Form, ModelSums, Variances, at_home

Fields = Mapping[str, npt.NDArray[Any]]
Answer = dict[str, npt.NDArray[Any]]
_NEAREST, _RATIO, _STEPS = 0.01, 1.0366, 256  # of the cells of distances: about to 100
_EDGES = np.concatenate([[0.0], _NEAREST * _RATIO ** np.arange(_STEPS)])
N_DISTANCES = len(_EDGES)
_MOST, _WIDE = 32, 500  # candidates of a question, and columns of a basis
_REMEDY = "Install the same version of coterie on the server and at the nodes"
_SLACK = 1e-6  # relative, of what answers demand of each other


class GridQuestion(NamedTuple):
    """How many rows are in each cell.

    Parameters
    ----------
    grid : the units of the cells.
    pulls : whether sums of targets are asked for, too.
    """

    grid: Grid
    pulls: bool

    @property
    def stage(self) -> int:
        """The position in `QUESTIONS`."""
        return 0

    def arrays(self) -> list[Array]:
        """What is sent, the same to all users."""
        return [*self.grid, np.array([float(self.pulls)])]

    @classmethod
    def of(cls, arrays: Sequence[Array]) -> Self:
        """The question of these arrays."""
        mean, scale, pulls = arrays
        return cls(Grid(mean, scale), bool(pulls[0]))

    def answer(self, users: Users, fields: Fields) -> Answer:
        """What users answer; `fields` has a row for each of them."""
        rows, counts, pulls, own = Sketch.of(users, self.grid, pulls=self.pulls)
        n = len(rows)
        told: Answer = {"count": rows, "values": counts.reshape(n, -1).astype(np.int32),
                        "means": own.reshape(n, -1)}
        return told | ({"gradient": pulls.reshape(n, -1)} if self.pulls else {})

    def widths(self) -> dict[str, int]:
        """How many numbers a user answers, by field; -1 for one that is no list."""
        width = self.grid.mean.shape[1]
        told = {"count": -1, "values": 2 * width * (CELLS + 1), "means": 4 * width}
        return told | ({"gradient": 2 * (width - 1) * (CELLS + 1)} if self.pulls else {})

    def wrong(self, answers: Fields) -> list[str]:
        """Why no rows give this answer, by user; "" where some do."""
        rows, width = np.asarray(answers["count"]), self.grid.mean.shape[1]
        counts = answers["values"].reshape(len(rows), 2 * width, CELLS + 1)
        bad = (counts < 0).any(axis=(1, 2)) | (counts.sum(axis=2) != rows[:, None]).any(axis=1)
        own = answers["means"].reshape(len(rows), 2, 2, width)
        bad |= (own[:, :, 1] < own[:, :, 0] ** 2 * (1 - _SLACK) - _SLACK).any(axis=(1, 2))
        return _reasons(bad, "its cells do not hold its rows")

    def pool(self, answers: Sequence[Answer]) -> Sketch:
        """What all users say."""
        width = self.grid.mean.shape[1]
        counts = _total(answers, "values").reshape(2, width, CELLS + 1)
        pulls = _total(answers, "gradient").reshape(2, width - 1, CELLS + 1) if self.pulls \
            else np.zeros((2, 0, CELLS + 1))
        rows, own = (np.concatenate([each[name] for each in answers])
                     for name in ("count", "means"))
        return Sketch(rows.astype(float), counts, pulls, own.reshape(-1, 2, 2, width))


def _reasons(bad: Flags, reason: str) -> list[str]:
    return [reason if one else "" for one in bad]


def _total(answers: Sequence[Answer], name: str) -> Array:
    """The sum over users, one after the other: however they come, its last digits are the same."""
    total = np.zeros(answers[0][name].shape[1:])
    for each in answers:
        for row in each[name]:
            total += row
    return total


class ColumnFrame(NamedTuple):
    """What users need to know of columns and folds.

    Parameters
    ----------
    task, seed : of the fit.
    scales : targets and columns, without users' means.
    limits : the least and the largest target.
    """

    task: Task
    seed: int
    scales: tuple[Scale, ...]
    limits: Limits

    def arrays(self) -> list[Array]:
        """As numbers."""
        tasks = ("regression", "classification", "counts")
        head = np.array([tasks.index(self.task), self.seed, len(self.scales), *self.limits])
        return [head, *(array for scale in self.scales for array in _of_scale(scale))]

    @classmethod
    def of(cls, arrays: Sequence[Array]) -> tuple[Self, list[Array]]:
        """From numbers, and the arrays that are left."""
        task, seed, n, low, high = arrays[0]
        rest, scales = list(arrays[1:]), []
        for _ in range(int(n)):
            scale, rest = _scale_of(rest)
            scales.append(scale)
        tasks: tuple[Task, ...] = ("regression", "classification", "counts")
        return cls(tasks[int(task)], int(seed), tuple(scales), Limits(low, high)), rest

    def folds(self, users: Users, first: Ints) -> list[Ints]:
        """The rows of each fold; the last are those that are never left out."""
        fold = folds_of(users, self.task, first, self.seed)
        return [np.flatnonzero(fold == f) for f in (*range(N_FOLDS), -1)]

    def columns(self, users: Users, k: int) -> tuple[Array, Array, Basis]:
        """Columns and targets of rows on one scale, and the basis with users' means."""
        scale = self.scales[k]
        basis = scale.basis.of_users(users)
        assert users.targets is not None
        return basis.rows(users.features, users.owner), scale.inner(users.targets), basis


def _of_scale(scale: Scale) -> list[Array]:
    basis = scale.basis
    head = np.array([float(scale.logarithm), scale.centre, scale.spread, len(basis.curves)])
    each = np.stack([basis.logs, basis.lowest, basis.mean, basis.scale, *basis.range,
                     basis.varies])
    return [head, each, basis.between.astype(float), basis.size,
            *(array for curve in basis.curves
              for array in (np.array([curve.column]), *curve[1:]))]


def _scale_of(arrays: list[Array]) -> tuple[Scale, list[Array]]:
    (logarithm, centre, spread, n), each, between, size, *rest = arrays
    curves = tuple(ColumnCurve(int(rest[5 * k][0]), *rest[5 * k + 1:5 * k + 5])
                   for k in range(int(n)))
    basis = Basis(each[0] > 0, each[1], each[2], each[3], each[4:6], each[6] > 0,
                  between.astype(np.int64), size, curves)
    return Scale(basis, bool(logarithm), float(centre), float(spread)), rest[5 * int(n):]


def fold_sums(columns: Array, target: Array, owner: Ints, n_users: int,
              folds: Sequence[Ints]) -> list[ModelSums]:
    """The sums of each fold."""
    return [ModelSums.of(columns[rows], target[rows],
                         np.searchsorted(owner[rows], np.arange(n_users + 1))) for rows in folds]


def whole_of(parts: Sequence[ModelSums]) -> ModelSums:
    """The sums of all folds."""
    return ModelSums(*(sum(arrays[1:], arrays[0]) for arrays in zip(*parts, strict=True)))


class SumsQuestion(NamedTuple):
    """Sums of all columns of the basis, by scale and fold."""

    frame: ColumnFrame

    @property
    def stage(self) -> int:
        return 1

    def arrays(self) -> list[Array]:
        return self.frame.arrays()

    @classmethod
    def of(cls, arrays: Sequence[Array]) -> Self:
        """The question of these arrays."""
        return cls(ColumnFrame.of(arrays)[0])

    def answer(self, users: Users, fields: Fields) -> Answer:
        n, folds = users.n_users, self.frame.folds(users, fields["who"])
        told: dict[str, list[Array]] = {"hessian": [], "gradient": [], "values": [], "means": []}
        for k in range(len(self.frame.scales)):
            columns, target, basis = self.frame.columns(users, k)
            told["means"].append(basis.means)
            for part in fold_sums(columns, target, users.owner, n, folds):
                told["hessian"].append(triangle(part.gram))
                told["gradient"].append(part.moment)
                told["values"].append(np.stack([part.square, part.rows], axis=1))
        return {name: np.concatenate(parts, axis=1) for name, parts in told.items()}

    def widths(self) -> dict[str, int]:
        widths = np.array([scale.basis.width for scale in self.frame.scales])
        folds = N_FOLDS + 1
        return {"hessian": folds * int((widths * (widths + 1) // 2).sum()),
                "gradient": folds * int(widths.sum()), "values": 2 * folds * len(widths),
                "means": sum(len(scale.basis.between) for scale in self.frame.scales)}

    def wrong(self, answers: Fields) -> list[str]:
        sums, _ = self.read(dict(answers))
        bad = np.zeros(len(answers["values"]), dtype=bool)
        for parts in sums:
            for one in parts:
                ends = np.linalg.eigvalsh(one.gram)
                bad |= ends[:, 0] < -_SLACK * (1.0 + np.abs(ends[:, -1]))
                bad |= np.abs(one.gram[:, 0, 0] - one.rows) > _SLACK * (1.0 + one.rows)
                most = np.einsum("njj->nj", one.gram) * one.square[:, None]
                bad |= (one.moment**2 > most * (1 + _SLACK) + _SLACK).any(axis=1)
        return _reasons(bad, "its sums are those of no rows")

    def read(self, answer: Answer) -> tuple[list[list[ModelSums]], list[Array]]:
        """By scale the sums of each fold, and users' means."""
        sums, means, at, place, own = list[list[ModelSums]](), list[Array](), 0, 0, 0
        values = answer["values"].reshape(len(answer["values"]), -1, N_FOLDS + 1, 2)
        for k, scale in enumerate(self.frame.scales):
            width, parts = scale.basis.width, []
            size = width * (width + 1) // 2
            for f in range(N_FOLDS + 1):
                gram = square(answer["hessian"][:, at:at + size], width)
                parts.append(ModelSums(gram, answer["gradient"][:, place:place + width],
                                       values[:, k, f, 0], values[:, k, f, 1]))
                at, place = at + size, place + width
            sums.append(parts)
            many = len(scale.basis.between)
            means.append(answer["means"][:, own:own + many])
            own += many
        return sums, means


class Shared(NamedTuple):
    """What everybody shares of a model."""

    form: Form
    variances: Variances
    mean: Array
    error: Array

    @classmethod
    def of(cls, estimate: Estimate) -> Self:
        """That of an estimate."""
        return cls(estimate.form, estimate.variances, estimate.mean, estimate.error)

    def at_home(self, sums: ModelSums) -> Estimate:
        """With the personal parts of users with these sums."""
        return at_home(sums, self.form, self.variances, self.mean, self.error)


def _of_shared(one: Shared) -> list[Array]:
    return [one.form.columns, one.form.personal, np.array([one.variances.noise]),
            triangle(one.variances.covariance), one.mean, triangle(one.error)]


def _shared_of(arrays: list[Array]) -> tuple[Shared, list[Array]]:
    columns, personal, (noise,), covariance, mean, error, *rest = arrays
    none = np.zeros(len(columns), dtype=np.int64)
    form = Form(columns.astype(np.int64), none, personal.astype(np.int64), none[:len(personal)])
    variances = Variances(float(noise), np.zeros(0), square(covariance, len(personal)))
    return Shared(form, variances, mean, square(error, len(columns))), rest


class LeftOutQuestion(NamedTuple):
    """Candidates without each fold.

    Parameters
    ----------
    frame : columns and folds.
    candidates : what is compared.
    shared : of each candidate, without each fold.
    weights, spread : of the kind and the candidates, and of the candidates' variances, where
        distances are asked for; else empty.
    """

    frame: ColumnFrame
    candidates: tuple[Candidate, ...]
    shared: tuple[tuple[Shared, ...], ...]
    weights: Array
    spread: Array

    @property
    def stage(self) -> int:
        return 2

    def arrays(self) -> list[Array]:
        out = [*self.frame.arrays(), np.array([float(len(self.candidates))]), self.weights,
               self.spread]
        for candidate, folds in zip(self.candidates, self.shared, strict=True):
            out.append(np.array([float(candidate.scale)]))
            out += [array for one in folds for array in _of_shared(one)]
        return out

    @classmethod
    def of(cls, arrays: Sequence[Array]) -> Self:
        """The question of these arrays."""
        frame, rest = ColumnFrame.of(arrays)
        candidates, shared = [], []
        (n,), weights, spread, *rest = rest
        for _ in range(int(n)):
            (scale,), *rest = rest
            folds = []
            for _ in range(N_FOLDS):
                one, rest = _shared_of(rest)
                folds.append(one)
            candidates.append(Candidate("", int(scale), folds[0].form))
            shared.append(tuple(folds))
        return cls(frame, tuple(candidates), tuple(shared), weights, spread)

    def told(self, users: Users, fields: Fields) -> tuple[Array, Array, Ints]:
        """Predictions of rows left out by the kind and all candidates, the standard deviations of
        the candidates', and which rows these are.
        """
        frame, n, owner = self.frame, users.n_users, users.owner
        folds = frame.folds(users, fields["who"])
        left = np.sort(np.concatenate(folds[:-1]))
        told = np.zeros((users.n_samples, 1 + len(self.candidates)))
        errors = np.zeros((users.n_samples, len(self.candidates)))
        kind = fields["models"].reshape(n, N_FOLDS, -1)
        for f, rows in enumerate(folds[:-1]):
            models = kind[owner[rows], f]
            told[rows, 0] = (users.features[rows] * models[:, :-1]).sum(axis=1) + models[:, -1]
        for k, scale in enumerate(frame.scales):
            columns, target, _ = frame.columns(users, k)
            parts = fold_sums(columns, target, owner, n, folds)
            whole = whole_of(parts)
            kept = [whole.minus(part) for part in parts[:-1]]
            for c, candidate in enumerate(self.candidates):
                for f in range(N_FOLDS) if candidate.scale == k else ():
                    rows, one = folds[f], self.shared[c][f]
                    mean, variance = one.at_home(kept[f]).predict(columns[rows], owner[rows])
                    told[rows, 1 + c], errors[rows, c] = finished(
                        frame.task, scale, mean, variance, one.variances.noise, frame.limits)
        return told, errors, left

    def widths(self) -> dict[str, int]:
        options = 1 + len(self.candidates)
        return {"count": -1, "values": N_DISTANCES if self.weights.size
                else options * (options + 1) // 2}

    def wrong(self, answers: Fields) -> list[str]:
        rows, values = np.asarray(answers["count"]), np.asarray(answers["values"])
        if self.weights.size:
            bad = (values < 0).any(axis=1) | (values.sum(axis=1) != rows)
            return _reasons(bad, "its distances are not those of its rows")
        ends = np.linalg.eigvalsh(square(values, 1 + len(self.candidates)))
        bad = ends[:, 0] < -_SLACK * (1e-300 + np.abs(ends[:, -1]))
        return _reasons(bad, "its products of errors are those of no rows")

    def answer(self, users: Users, fields: Fields) -> Answer:
        told, errors, left = self.told(users, fields)
        n, owner, y = users.n_users, users.owner[left], users.targets
        assert y is not None
        rows = np.bincount(owner, minlength=n)
        if self.weights.size:
            away = np.abs(y - told @ self.weights)[left] / np.sqrt(np.maximum(
                errors[left] ** 2 @ self.spread, 1e-300))
            cells = np.clip(np.searchsorted(_EDGES, away, side="right") - 1, 0, N_DISTANCES - 1)
            values = np.bincount(owner * N_DISTANCES + cells, minlength=n * N_DISTANCES)
            return {"count": rows, "values": values.reshape(n, N_DISTANCES)}
        wrong = (told - y[:, None])[left]
        products = ModelSums.of(wrong, np.zeros(len(left)),
                                np.searchsorted(owner, np.arange(n + 1))).gram
        return {"count": rows, "values": triangle(products)}


class HandedAverage(NamedTuple):
    """An average as it is sent to users, who find their own parts of it.

    Parameters
    ----------
    frame : columns and limits.
    own : the weight of the kind that was chosen.
    parts : name, scale, weight, spread, and what everybody shares.
    """

    frame: ColumnFrame
    own: float
    parts: tuple[tuple[int, float, float, Shared], ...]

    @classmethod
    def send(cls, average: Average) -> Self:
        """That of an average."""
        return cls(ColumnFrame(average.task, 0, average.scales, average.limits), average.own,
                   tuple((part.scale, part.weight, part.spread, Shared.of(part.estimate))
                         for part in average.parts))

    def arrays(self) -> list[Array]:
        """As numbers."""
        out = [*self.frame.arrays(), np.array([float(len(self.parts)), self.own])]
        for scale, weight, spread, one in self.parts:
            out += [np.array([float(scale), weight, spread]), *_of_shared(one)]
        return out

    @classmethod
    def of(cls, arrays: Sequence[Array]) -> Self:
        """From numbers."""
        frame, rest = ColumnFrame.of(arrays)
        (n, own), *rest = rest
        parts = []
        for _ in range(int(n)):
            (scale, weight, spread), *rest = rest
            one, rest = _shared_of(rest)
            parts.append((int(scale), float(weight), float(spread), one))
        return cls(frame, float(own), tuple(parts))

    def at_home(self, users: Users) -> Average:
        """The average of these users, by their own rows."""
        sums, scales = [], []
        for k, scale in enumerate(self.frame.scales):
            columns, target, basis = self.frame.columns(users, k)
            folds = [np.arange(users.n_samples)]
            sums.append(fold_sums(columns, target, users.owner, users.n_users, folds)[0])
            scales.append(replace(scale, basis=basis))
        parts = tuple(Part("", k, weight, spread, one.at_home(sums[k]), 0.0)
                      for k, weight, spread, one in self.parts)
        return Average(self.frame.task, self.own, parts, tuple(scales), self.frame.limits,
                       np.zeros(0), 0.0, 0.0)


QUESTIONS = (GridQuestion, SumsQuestion, LeftOutQuestion)
#: One question to all users; `GridQuestion` says what its methods do.
ColumnQuestion = GridQuestion | SumsQuestion | LeftOutQuestion


def question_of(stage: int, numbers: Array, n_features: int) -> ColumnQuestion:
    """The question that was sent, if it is one about so many features.

    Raises
    ------
    InvalidInput : numbers that are none; nothing was computed with them.
    """
    try:
        with np.errstate(invalid="ignore"):  # casts of what is no position
            question = QUESTIONS[stage].of(unpacked(numbers))
            good = _fits(question, n_features)
    except (IndexError, ValueError, TypeError, OverflowError) as error:
        raise InvalidInput(f"its numbers are no question of stage {stage}",
                           remedy=_REMEDY) from error
    if not good:
        raise InvalidInput("its question is about other columns, or too many", remedy=_REMEDY)
    return question


def handed_of(numbers: Array, n_features: int) -> HandedAverage:
    """The average that was sent, as `question_of`."""
    try:
        with np.errstate(invalid="ignore"):
            sent = HandedAverage.of(unpacked(numbers))
            good = _frame_fits(sent.frame, n_features) and len(sent.parts) <= _MOST and all(
                _shared_fits(sent.frame, k, one) for k, _, _, one in sent.parts)
    except (IndexError, ValueError, TypeError, OverflowError) as error:
        raise InvalidInput("its numbers are no average", remedy=_REMEDY) from error
    if not good:
        raise InvalidInput("its average is of other columns, or of too many", remedy=_REMEDY)
    return sent


def _fits(question: ColumnQuestion, n_features: int) -> bool:
    if isinstance(question, GridQuestion):
        mean, scale = question.grid
        return mean.shape == scale.shape == (2, n_features + 1) and bool((scale > 0).all())
    if not _frame_fits(question.frame, n_features):
        return False
    if isinstance(question, SumsQuestion):
        return True
    options = len(question.candidates)
    return (0 < options <= _MOST and question.weights.shape in ((0,), (1 + options,))
            and question.spread.shape == (max(question.weights.size - 1, 0),)
            and all(len(folds) == N_FOLDS and all(
                _shared_fits(question.frame, one.scale, part) for part in folds)
                for one, folds in zip(question.candidates, question.shared, strict=True)))


def _frame_fits(frame: ColumnFrame, n_features: int) -> bool:
    """Whether a basis is about these features, and no wider than allowed."""
    good = 0 < len(frame.scales) <= 2 and 0 <= frame.seed < 1 << 53
    for scale in frame.scales:
        basis = scale.basis
        good = (good and basis.mean.shape == (n_features,) and bool((basis.scale > 0).all())
                and scale.spread > 0 and basis.width <= _WIDE
                and basis.between.shape == basis.size.shape and bool((basis.size > 0).all())
                and bool(((basis.between >= 0) & (basis.between < n_features)).all())
                and bool((basis.lowest[basis.logs] > 0).all()))
        for curve in basis.curves if good else ():
            k = len(curve.knots)
            good = (good and 0 <= curve.column < n_features and curve.knots.shape == (k,)
                    and curve.root.shape == (k, k) and curve.line.shape == (2, k)
                    and curve.turn.ndim == 2 and curve.turn.shape[0] == k)
    return good


def _shared_fits(frame: ColumnFrame, k: int, one: Shared) -> bool:
    """Whether a model is one of the columns of a scale."""
    if not 0 <= k < len(frame.scales):
        return False
    columns, p, width = one.form.columns, one.form.personal, frame.scales[k].basis.width
    ends = np.linalg.eigvalsh(one.variances.covariance)
    return (one.mean.shape == columns.shape and one.variances.noise > 0
            and bool(((columns >= 0) & (columns < width)).all())
            and bool(((p >= 0) & (p < len(columns))).all())
            and bool((ends >= -1e-8 * (1e-300 + np.abs(ends).max(initial=0.0))).all()))


def quantiles_of(counts: Array, n: int) -> Array:
    """(n + 1,) quantiles of distances at equal steps, from how many are in each cell; of one row
    more than there are, as a new row is the next one.
    """
    total = np.concatenate([[0.0], np.cumsum(counts)])
    edges = np.append(_EDGES, _EDGES[-1] * _RATIO)
    some = np.flatnonzero(counts)
    first, last = some[0], some[-1] + 1
    return np.interp(np.linspace(0.0, total[-1] + 1.0, n + 1), total[first:last + 1],
                     edges[first:last + 1])
