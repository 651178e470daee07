"""Whether an answer in the right form can be true, and sums in which no single user drowns the others.

A server cannot see data, but a user's answers describe one convex function, and a function has to agree with itself:

    f(y) >= f(x) + <grad f(x), y - x>              at any two points that the user was asked about
    f*(u) >= <u, x> - f(x)                         Fenchel and Young, for the slope u of a certificate
    f >= its least value, curvature >= 0

Who contradicts itself is set aside. Who does not describes some convex function, which is as good as other data: its
pull on another user is at most lam w_ij. Sums that steer the run count the largest user at most a hundred times as much
as all others together, so that answers out of all proportion cannot hide the others' errors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from coterie._typing import Array, Flags
from coterie.federated.protocol.messages import Batch

LARGEST = 1e60  # of all numbers in a reply: its square times another one is still a number
FARTHEST = 1e25  # of the coordinates of a model: losses there are still below LARGEST
MOST_ROWS = 2**31 - 1  # of one user
_SLACK, _ROUNDING = 1e-6, 1e-10  # of what convexity demands: relative to the terms, and to curvature times models^2
_MOST = 100.0  # the largest user counts at most so many times as much as all others together
_TYPICAL = 1e3  # a curvature counts at most so many times as much, or as little, as the median
#: Numbers that are never negative.
_NOT_NEGATIVE = ("curvature", "stiffness", "residual", "size", "rounding", "diagonal", "m2", "count", "information")
#: Answers of which one user may be a law to itself only within so many times the median of the others.
_VOTES = {"evidence": ("evidence",), "left_out": ("values",), "ratio": ("values",), "train": ("point",)}
_FAR = 1e6
_UNKNOWN = -1e300  # an evidence that a user could not compute


def objections(replies: Batch) -> list[tuple[int, str]]:
    """Why replies in the right form cannot be true, whatever the data; users and reasons."""
    reasons: dict[int, str] = {}

    def object_to(bad: Flags, reason: str) -> None:
        for user in replies.users[_rows(bad).any(axis=1)].tolist():
            reasons.setdefault(user, reason)

    for name, array in replies.arrays.items():
        rows, own = _rows(np.asarray(array)), name.removesuffix("2") if name != "m2" else name
        exempt = ~np.isfinite(rows) | (rows == _UNKNOWN)  # what may not be finite is checked with its form
        most = FARTHEST if own in ("point", "model") else LARGEST
        object_to((np.abs(rows) > most) & ~exempt, f"its field {name!r} holds a number beyond {most:g}")
        if own in _NOT_NEGATIVE:
            object_to(rows < 0, f"its field {name!r} is negative")
        if own == "count":
            object_to((rows != np.floor(rows)) | (rows > MOST_ROWS), "its count is no number of rows")
        if own in _VOTES.get(replies.kind, ()):
            object_to(_far(np.where(exempt, 0.0, np.abs(rows)).max(axis=1, initial=0.0)),
                      f"its field {name!r} is more than {_FAR:g} times those of the others")
    for name, part in replies.ragged.items():
        rows = _rows(part.values)
        bad = (np.abs(rows) > LARGEST).any(axis=1)
        if name in _NOT_NEGATIVE:
            bad |= (rows < 0).any(axis=1)
        wrong = np.zeros(len(replies), dtype=bool)
        wrong[part.owner[bad]] = True
        object_to(wrong, f"its field {name!r} holds a number that is negative or beyond {LARGEST:g}")
    return list(reasons.items())


def _rows(values: Any) -> Any:
    return values.reshape(len(values), int(np.prod(values.shape[1:])))


def _far(sizes: Array) -> Flags:
    """Which one is out of all proportion to the others: beyond `_FAR` times one more than their median."""
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


@np.errstate(over="ignore", invalid="ignore")
def contradict(old: Statements, new: Statements) -> Flags:
    """(n,) whether no convex function agrees with both statements of a user."""
    step = new.points - old.points
    ahead, back = (np.einsum("nd,nd->n", part.gradients, step) for part in (old, new))
    sizes = (old.points**2).sum(axis=1) + (new.points**2).sum(axis=1)
    slack = _SLACK * (np.abs(old.values) + np.abs(new.values) + np.nan_to_num(np.abs(ahead))
                      + np.nan_to_num(np.abs(back))) + _ROUNDING * np.fmax(old.curvatures, new.curvatures) * sizes
    rise = new.values - old.values
    # f(new) >= f(old) + <g_old, step>,  f(old) >= f(new) - <g_new, step>; comparisons with nan are false
    return np.asarray((rise < ahead - slack) | (rise > back + slack))


@np.errstate(over="ignore", invalid="ignore")
def beyond_conjugate(values: Array, conjugates: Array, products: Array, rounding: Array) -> Flags:
    """(n,) whether a conjugate is below <u, x> - f(x), which it cannot be; `products` are <u, x>."""
    slack = _SLACK * (np.abs(values) + np.abs(conjugates) + np.abs(products)) + rounding
    return np.asarray(conjugates + values - products < -slack)


def capped(values: Array) -> Array:
    """The values, of which the largest counts at most a hundred times as much as all others together."""
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
    scores = np.zeros(len(replies))
    for array in replies.arrays.values():
        rows = np.abs(np.nan_to_num(np.asarray(array, dtype=float), posinf=LARGEST))
        tops = _rows(rows).max(axis=1, initial=0.0)
        scores = np.maximum(scores, tops / (np.median(tops) + 1e-300))
    for part in replies.ragged.values():
        tops = np.zeros(len(replies))
        np.maximum.at(tops, part.owner, np.abs(_rows(part.values)).max(axis=1, initial=0.0))
        scores = np.maximum(scores, tops / (np.median(tops[tops > 0]) if (tops > 0).any() else 1.0))
    return int(scores.argmax())
