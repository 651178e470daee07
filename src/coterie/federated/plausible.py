"""Whether an answer in the right form can be true, and sums in which no single user drowns the
others.

A server cannot see data, but a user's answers describe one convex function, and a function has to
agree with itself:

    f(y) >= f(x) + <grad f(x), y - x>              at any two points that the user was asked about
    f*(u) >= <u, x> - f(x)                         Fenchel and Young, for the slope u of a
                                                   certificate
    f >= its least value, curvature >= 0

Who contradicts itself is set aside. Who does not describes some convex function, which is as good
as other data: its pull on another user is at most lam w_ij. Sums that steer the run count the
largest user at most a hundred times as much as all others together, so that answers out of all
proportion cannot hide the others' errors.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from coterie.base.errors import Incompatible
from coterie.base.types import Array, Flags
from coterie.data.users import Moments
from coterie.federated.protocol.messages import SCHEMAS, Batch, Message, square
from coterie.losses import Loss

log = logging.getLogger("coterie.federated")

LARGEST = 1e60  # of all numbers in a reply: its square times another one is still a number
FARTHEST = 1e25  # of the coordinates of a model: losses there are still below LARGEST
MOST_ROWS = 2**31 - 1  # of one user
# Of what convexity demands: relative to the terms, and to curvature times models^2.
_SLACK, _ROUNDING = 1e-6, 1e-10
_MOST = 100.0  # the largest user counts at most so many times as much as all others together
_TYPICAL = 1e3  # a curvature counts at most so many times as much, or as little, as the median
#: Numbers that are never negative.
_NOT_NEGATIVE = ("curvature", "stiffness", "residual", "size", "rounding", "diagonal", "m2",
                 "count", "information")
#: Answers of one user that are rejected above `_FAR` times the median of the others.
_VOTES = {"evidence": ("evidence",), "summary": ("hessian",), "train": ("point",)}
_FAR = 1e6
_UNKNOWN = -1e300  # an evidence that a user could not compute


def objections(replies: Batch) -> list[tuple[int, str]]:
    """Why replies in the right form cannot be true, whatever the data; users and reasons."""
    reasons: dict[int, str] = {}

    def object_to(bad: Flags, reason: str) -> None:
        for user in replies.users[_rows(bad).any(axis=1)].tolist():
            reasons.setdefault(user, reason)

    for name, array in replies.arrays.items():
        rows = _rows(np.asarray(array))
        # What may not be finite is checked with its form.
        exempt = ~np.isfinite(rows) | (rows == _UNKNOWN)
        most = FARTHEST if name in ("point", "model") else LARGEST
        object_to((np.abs(rows) > most) & ~exempt, f"its field {name!r} holds a number beyond "
                  f"{most:g}")
        if name in _NOT_NEGATIVE:
            object_to(rows < 0, f"its field {name!r} is negative")
        if name == "count":
            object_to((rows != np.floor(rows)) | (rows > MOST_ROWS),
                      "its count is no number of rows")
        if name in _VOTES.get(replies.kind, ()):
            object_to(_far(np.where(exempt, 0.0, np.abs(rows)).max(axis=1, initial=0.0)),
                      f"its field {name!r} is more than {_FAR:g} times those of the others")
    for name, part in replies.ragged.items():
        rows = _rows(part.values)
        bad = (np.abs(rows) > LARGEST).any(axis=1)
        if name in _NOT_NEGATIVE:
            bad |= (rows < 0).any(axis=1)
        wrong = np.zeros(len(replies), dtype=bool)
        wrong[part.owner[bad]] = True
        object_to(wrong,
                  f"its field {name!r} holds a number that is negative or beyond {LARGEST:g}")
    return list(reasons.items())


def fit_objections(replies: Batch, dim: int) -> list[tuple[int, str]]:
    """The same for the questions of a fit; `dim` is the length of a model."""
    reasons = dict(reversed(objections(replies)))

    def object_to(bad: Flags, reason: str) -> None:
        for user in replies.users[_rows(bad).any(axis=1)].tolist():
            reasons.setdefault(user, reason)

    if replies.kind == "summary":
        gradients, triangles = replies.arrays["gradient"], replies.arrays["hessian"]
        size = dim * (dim + 1) // 2
        if gradients.shape[2:] != (dim,) or triangles.shape[1:] != (gradients.shape[1], size):
            return [(user, "its fields have other shapes than asked for") for user in replies]
        hessians = square(triangles, dim)
        ends = np.linalg.eigvalsh(hessians)
        slack = 1e-6 * np.maximum(ends[..., -1], 0.0) + 1e-12 * dim
        object_to(ends[..., 0] < -slack, "its Hessian is not positive semidefinite")
        # A row that has a slope bends the loss, too.
        bends = np.einsum("npd,npde,npe->np", gradients, hessians, gradients)
        object_to((bends <= 0) & (np.abs(gradients).max(axis=-1) > _SLACK),
                  "its Hessian is zero along its gradient")
        object_to(replies.arrays["information"] > 1 + _SLACK, "its information is above 1")
    return list(reasons.items())


def wrong_points(points: Array, gradients: Array, hessians: Array, pull: Array) -> Flags:
    """(n,) whose point is not the best one beside a centre: there the gradient is minus the pull.

    Parameters
    ----------
    points, gradients, pull : (n, dim).
    hessians : (n, dim, dim).
    """
    sizes = np.abs(gradients) + np.abs(pull) + np.abs(hessians).max(axis=(1, 2))[:, None] * (
        1.0 + np.abs(points).max(axis=1, keepdims=True))
    return np.asarray((np.abs(gradients + pull) > 1e-3 * sizes).any(axis=1))


def other_shapes(messages: Mapping[int, Message]) -> list[int]:
    """Users whose fields have other names or shapes than those of more than half of the users.

    Raises
    ------
    Incompatible : there are different shapes, and none that most users have.
    """
    shapes = {user: tuple((name, np.shape(array)) for name, array in sorted(message.arrays.items())
                          if "*" not in SCHEMAS[message.kind].reply[name]) for user,
              message in messages.items()}
    counted = Counter(shapes.values()).most_common(1)
    if len(set(shapes.values())) < 2:
        return []
    if counted[0][1] <= len(shapes) / 2:
        raise Incompatible("Users answer in different shapes, and it cannot be said who is right. "
                           "Install the same "
                           "version of coterie everywhere, and give all of them the same columns.")
    return [user for user, shape in shapes.items() if shape != counted[0][0]]


def finite(replies: Batch, may_be_infinite: Container[tuple[str, str]]) -> Flags:
    """(n,) whose reply holds finite numbers only; of some fields also inf."""
    good = np.ones(len(replies), dtype=bool)
    for name, array in replies.arrays.items():
        rows = _rows(np.asarray(array))
        allowed = rows == np.inf if (replies.kind, name) in may_be_infinite else False
        good &= (np.isfinite(rows) | allowed).all(axis=1)
    for part in replies.ragged.values():
        good[part.owner[~np.isfinite(_rows(part.values)).all(axis=1)]] = False
    return good


def _rows(values: Any) -> Any:
    return values.reshape(len(values), int(np.prod(values.shape[1:])))


def _far(sizes: Array) -> Flags:
    """Which one is out of all proportion to the others: beyond `_FAR` times one more than their
    median.
    """
    if len(sizes) < 3:
        return np.zeros(len(sizes), dtype=bool)
    return sizes > _FAR * (1.0 + np.median(sizes))


class Statements(NamedTuple):
    """What users said of their losses; nan where they said nothing. (n, ...) each."""

    points: Array  # (n, dim)
    values: Array  # (n,) f at the points
    gradients: Array  # (n, dim)
    curvatures: Array  # (n,) largest curvature there, as far as it is known

    def pack(self) -> Array:
        """(n, 2 dim + 2) all of it as one array."""
        return np.column_stack([self.points, self.values, self.gradients, self.curvatures])

    @classmethod
    def unpack(cls, rows: Array) -> Statements:
        """From what `pack` gives."""
        dim = rows.shape[1] // 2 - 1
        return cls(rows[:, :dim], rows[:, dim], rows[:, dim + 1:-1], rows[:, -1])


def exact_steps(loss: Loss) -> bool:
    """Whether proximal points are exact enough for the gradients that follow from them; where
    curvature jumps from zero to its largest value, honest ones are not.
    """
    return loss.own_loss.delta == np.inf


@np.errstate(over="ignore", invalid="ignore")
def contradict(old: Statements, new: Statements) -> Flags:
    """(n,) whether no convex function agrees with both statements of a user."""
    step = new.points - old.points
    ahead, back = (np.einsum("nd,nd->n", part.gradients, step) for part in (old, new))
    sizes = (old.points**2).sum(axis=1) + (new.points**2).sum(axis=1)
    slack = _SLACK * (np.abs(old.values) + np.abs(new.values) + np.nan_to_num(np.abs(ahead))
                      + np.nan_to_num(np.abs(back))) + _ROUNDING * np.fmax(old.curvatures,
                          new.curvatures) * sizes
    rise = new.values - old.values
    # f(new) >= f(old) + <g_old, step>,  f(old) >= f(new) - <g_new, step>; comparisons with nan are
    # false
    return np.asarray((rise < ahead - slack) | (rise > back + slack))


@np.errstate(over="ignore", invalid="ignore")
def beyond_conjugate(values: Array, conjugates: Array, products: Array, rounding: Array) -> Flags:
    """(n,) whether a conjugate is below <u, x> - f(x), which it cannot be; `products` are <u, x>.
    """
    slack = _SLACK * (np.abs(values) + np.abs(conjugates) + np.abs(products)) + rounding
    return np.asarray(conjugates + values - products < -slack)


_REST = 1e-9  # relative, of what moments demand of each other
# One of five users or more who has so many times the sum of squares of all others together.
_DOMINATES = 100.0


@np.errstate(over="ignore", invalid="ignore", divide="ignore")
def wrong_moments(counts: Array, means: Array, m2: Array, target: Array | None = None) -> list[str]:
    """Why no rows have these moments, for each user; "" if some have.

    Parameters
    ----------
    counts : (n,) rows.
    means, m2 : (n, p) means and centred sums of squares.
    target : (n, 3) mean, centred sum of squares and largest value of the target, if there is one.
    """
    columns = m2 if target is None else np.column_stack([m2, target[:, 1]])
    sizes = np.abs(means) if target is None else np.column_stack([np.abs(means), np.abs(target)])
    empty = counts == 0
    few = counts <= 1
    scale = np.finfo(float).eps * 1e3 * (sizes.max(axis=1, initial=0.0) ** 2)
    reasons = [
        ((counts != np.floor(counts)) | (counts < 0) | (counts > MOST_ROWS),
         "its count is no number of rows"),
        (~(np.isfinite(columns).all(axis=1) & (sizes <= LARGEST).all(axis=1)
           & (columns <= LARGEST**2).all(axis=1)),
         f"it describes numbers beyond {LARGEST:g}"),
        ((columns < 0).any(axis=1), "a sum of squares is negative"),
        (empty & ((columns != 0).any(axis=1) | (sizes != 0).any(axis=1)),
         "it describes rows and has none"),
        (few & (columns > scale[:, None]).any(axis=1), "it has one row, and describes a spread"),
    ]
    # The largest is one of the rows: at least the mean, and part of the sum of squares.
    if target is not None:
        above = target[:, 2] - target[:, 0]
        rounding = _REST * (np.abs(target[:, 2]) + np.abs(target[:, 0]))
        reasons += [(~empty & (above < -rounding), "its largest target is below the mean"), (
            ~empty & (above**2 > target[:, 1] * (1 + _REST) + rounding**2 + 2 * above * rounding),
            "its largest target is further from the mean than its sum of squares allows")]
    return [next((reason for bad, reason in reasons if bad[user]), "")
            for user in range(len(counts))]


def wrong_targets(task: str, largest: Array, means: Array, n_classes: int,
                  most: float) -> list[str]:
    """Why targets with these largest values and means are none of the task, for each user; "" if
    they are.
    """
    if task not in ("classification", "counts"):
        return [""] * len(largest)
    classes = task == "classification"
    good = (means >= 0) & (means <= largest) & (largest <= (n_classes - 1 if classes else most))
    reason = (f"its classes are not among the {n_classes} agreed on" if classes
              else f"its counts are not from 0 to {most:g}")
    return ["" if one else reason for one in good]


def wrong_scatters(counts: Array, means: Array, scatters: Array) -> list[str]:
    """The same for scatter matrices (n, q, q), which are positive semidefinite: this is Cauchy and
    Schwarz for all.
    """
    out = wrong_moments(counts, means, np.einsum("nqq->nq", scatters))
    for user, reason in enumerate(out):
        if not reason:
            units = np.sqrt(np.maximum(np.diag(scatters[user]), 1e-300))
            if np.linalg.eigvalsh(scatters[user] / units[:, None] / units)[0] < -1e-6 * len(units):
                out[user] = "its scatter is not positive semidefinite"
    return out


@np.errstate(over="ignore", invalid="ignore", divide="ignore")
def outlying(counts: Array, means: Array, m2: Array) -> Flags:
    """(n,) who has rows or numbers out of all proportion: 1e6 times the median of the users in some
    column.
    """
    some = counts > 0
    if some.sum() < 3:
        return np.zeros(len(counts), dtype=bool)
    squares = _squares(counts, means, m2)
    # Of users who all have the same in a column nothing can be said; one of few who have something
    # is no outlier.
    middle = np.array([np.median(column[column > 0]) if (column > 0).sum() > 2 else np.inf
                       for column in squares.T])
    return np.asarray(some & ((squares > _FAR**2 * middle).any(axis=1)
                              | (counts > _FAR * np.median(counts[some]))))


def _squares(counts: Array, means: Array, m2: Array) -> Array:
    """(n, p) mean squared distance of a user's rows from the median of all means; 0 without rows.
    """
    centre = np.median(means[counts > 0], axis=0)
    return np.asarray(np.where(counts[:, None] > 0,
                               m2 / np.maximum(counts, 1)[:, None] + (means - centre) ** 2, 0.0))


@np.errstate(over="ignore", invalid="ignore")
def without_dominant(moments: Moments) -> Moments:
    """Moments for scaling in which no user rules a column.

    A user with more than 100 times the sum of squares of all others together, in a column, gets the
    moments of the others there: it is left out of this column's mean and spread. With fewer than
    five users nobody is.
    """
    counts, means, m2 = moments
    if (counts > 0).sum() < 5:
        return moments
    totals = counts[:, None] * _squares(counts.astype(float), means, m2)
    largest, columns = totals.argmax(axis=0), np.arange(totals.shape[1])
    rest = totals.sum(axis=0) - totals[largest, columns]
    ruled = np.flatnonzero((totals[largest, columns] > _DOMINATES * rest) & (rest > 0))
    if not ruled.size:
        return moments
    means, m2 = means.copy(), m2.copy()
    for column in ruled:
        user = int(largest[column])
        others = np.arange(len(counts)) != user
        n = counts[others].sum()
        mean = counts[others] @ means[others, column] / n
        total = m2[others, column].sum() + counts[others] @ (means[others, column] - mean) ** 2
        means[user, column], m2[user, column] = mean, counts[user] * total / n
    log.warning("column(s) number %s: one user is left out of the "
                "scaling, its numbers are out of all proportion", ", ".join(map(str, ruled[:5])))
    return Moments(counts, means, m2)


def capped(values: Array) -> Array:
    """The values, of which the largest counts at most a hundred times as much as all others
    together.
    """
    sizes = np.abs(values)
    if len(sizes) < 3:
        return values
    k = int(sizes.argmax())
    most = _MOST * float(np.delete(sizes, k).sum())
    if not 0 < most < sizes[k]:
        return values
    out = values.copy()
    out[k] = np.sign(values[k]) * most
    return out


def typical(curvatures: Array) -> float:
    """The geometric mean of positive numbers, each within a factor of 1000 of their median."""
    middle = float(np.median(curvatures))
    return float(np.exp(np.log(np.clip(curvatures, middle / _TYPICAL, middle * _TYPICAL)).mean()))


def largest(replies: Batch) -> int:
    """The position of the reply with the largest number, relative to the others."""
    return int(_oddness(replies).argmax())


def oddest(batches: Sequence[Batch]) -> tuple[int, float]:
    """The position of the user with the largest or smallest numbers beside the others, and by how
    many digits.
    """
    odd = np.max([np.maximum(_oddness(part), _oddness(part, small=True)) for part in batches],
                 axis=0)
    return int(odd.argmax()), float(odd.max())


def _oddness(replies: Batch, small: bool = False) -> Array:
    """(n,) digits by which the largest number of a reply, in any field, is above the median of the
    others, or below.
    """
    digits = np.zeros(len(replies))
    for array in replies.arrays.values():
        tops = np.abs(_rows(np.nan_to_num(np.asarray(array, dtype=float), posinf=0.0))).max(axis=1,
            initial=0.0)
        apart = np.log10(tops + 1e-300) - np.log10(np.median(tops) + 1e-300)
        digits = np.maximum(digits, -apart if small else apart)
    for part in replies.ragged.values():
        tops = np.zeros(len(replies))
        np.maximum.at(tops, part.owner, np.abs(_rows(part.values)).max(axis=1, initial=0.0))
        if not small and (tops > 0).any():
            digits = np.maximum(digits,
                                np.log10(tops + 1e-300) - np.log10(np.median(tops[tops > 0])))
    return digits
