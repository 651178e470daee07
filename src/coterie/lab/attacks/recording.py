"""What an honest-but-curious server keeps of a run: every query and every reply, and what they say
of each user.

All replies are of few kinds, and most are the same thing in other words: the gradient of a user's
loss at a known point, often with the Hessian. `evidence_of` brings them into this form.

    expand, gradient, around    at the point of the query
    prox, settle, local, alone  the point minimises f(x) + t/2 ||x - centre||^2, so the gradient is
    t (centre - point)
    around, with a covariance   of an envelope: gradient and Hessian of the loss at the user's own
                                model follow from it
    train                       the step divided by its length is near the gradient where it started
    facts, moments              sums over rows, of all rows and of parts of them
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from coterie.base.types import Array, Ints
from coterie.federated.algorithms.base import Replies
from coterie.federated.protocol.messages import Batch, Ragged, square
from coterie.losses.affine import AffineLoss


class Exchange(NamedTuple):
    """One round: what was asked, and what was answered."""

    queries: Batch
    replies: Batch


class Recorder:
    """A runtime that keeps all that crosses; everything else is done by the runtime it wraps.

    Parameters
    ----------
    runtime : carries queries and replies.
    """

    def __init__(self, runtime: Any) -> None:
        self.runtime, self.exchanges = runtime, list[Exchange]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runtime, name)

    def exchange(self, queries: Batch) -> Replies:
        """Ask, wait as long as a round lasts, and keep both."""
        replies: Replies = self.runtime.exchange(queries)
        self.exchanges += [Exchange(queries, batch) for batch in replies.batches if len(batch)]
        return replies


@dataclass(frozen=True, eq=False)
class Sums:
    """Number, mean and scatter of some rows of a user, of its features first and then, where known,
    the target.

    Parameters
    ----------
    count : number of rows.
    mean : (q,).
    scatter : (q, q) centred sums of products; None where only those of each column are known.
    """

    count: int
    mean: Array
    scatter: Array | None


@dataclass(eq=False)
class Evidence:
    """What the messages say of one user's rows: those of one part, in the units of the models.

    Parameters
    ----------
    count : number of rows.
    points : where gradients are known.
    gradients : there, without the ridge.
    curved : points where Hessians are known.
    hessians : there, without the ridge.
    sums : of the rows, or of some of them, in the units of the table.
    released : a noisy release, if there is one (`coterie.lab.attacks.inference.Statistic`).
    """

    count: int
    points: list[Array] = field(default_factory=list)
    gradients: list[Array] = field(default_factory=list)
    curved: list[Array] = field(default_factory=list)
    hessians: list[Array] = field(default_factory=list)
    sums: list[Sums] = field(default_factory=list)
    released: Any = None

    def add(self, point: Array, gradient: Array | None, hessian: Array | None) -> None:
        """Add what is known at a point, unless it is known already."""
        if gradient is not None and not any(np.array_equal(point, old) for old in self.points):
            self.points.append(point)
            self.gradients.append(gradient)
        if hessian is not None and not any(np.array_equal(point, old) for old in self.curved):
            self.curved.append(point)
            self.hessians.append(hessian)


class _Seen(NamedTuple):
    """What one reply says: the position of the user, the part of its rows, and the loss at a point.
    """

    user: int
    part: int
    point: Array
    gradient: Array | None
    hessian: Array | None


def evidence_of(exchanges: Iterable[Exchange], loss: AffineLoss, counts: Ints,
                part: int = 0) -> list[Evidence]:
    """The evidence on each user, of all rows (part 0) or of those that are not held out (part 1).

    Parameters
    ----------
    exchanges : what crossed.
    loss : of the users; it and its ridge are public.
    counts : (n_users,) their numbers of rows.
    part : of the rows.
    """
    gathered = [Evidence(int(count)) for count in counts]
    for exchange in exchanges:
        if exchange.replies.kind in ("facts", "moments"):
            for user, sums in _sums(exchange.replies):
                gathered[user].sums.append(sums)
            continue
        for seen in _seen(exchange, counts):
            if seen.part == part:
                ridge = loss.ridge * loss.shrunk(len(seen.point))
                gathered[seen.user].add(seen.point,
                                        None if seen.gradient is None else seen.gradient - ridge
                                        * seen.point,
                                        None if seen.hessian is None else seen.hessian
                                        - np.diag(ridge))
    return gathered


def _seen(exchange: Exchange, counts: Ints) -> Iterator[_Seen]:
    queries, replies = exchange
    if replies.kind in ("settle", "slopes", "around", "alone"):
        for mark in ("", "2"):
            if f"part{mark}" in queries.shared:
                yield from _of_fit(_Marked(queries, replies, mark), counts)
    elif replies.kind in _READ:
        at = np.searchsorted(queries.users, replies.users)
        for k, user in enumerate(replies.users.tolist()):
            yield from _READ[replies.kind](queries, replies, int(at[k]), k, user)


def _expand(queries: Batch, replies: Batch, at: int, k: int, user: int) -> Iterator[_Seen]:
    point, dim = queries.arrays["model"][at], queries.arrays["model"].shape[1]
    share = _row(replies.ragged.get("share"), k)
    if share is not None:  # the user stepped back, towards the last accepted point or towards zero
        anchor = _row(queries.ragged.get("anchor"), at)
        start = np.zeros(dim) if anchor is None else anchor
        point = start + float(share) * (point - start)
    hessian = _row(replies.ragged.get("hessian"), k)
    if hessian is not None:
        matrix = square(hessian[None], dim)[0]
    else:
        matrix = float(_row(replies.ragged["diagonal"], k)) * np.eye(dim)
        if "factor" in replies.ragged:
            factor = replies.ragged["factor"].rows(k)
            matrix = matrix + (factor * replies.ragged["sign"].rows(k)[:, None]).T @ factor
    yield _Seen(user, 0, point, replies.arrays["gradient"][k], matrix)


def _gradient(queries: Batch, replies: Batch, at: int, k: int, user: int) -> Iterator[_Seen]:
    yield _Seen(user, 0, queries.arrays["model"][at], replies.arrays["gradient"][k], None)


def _prox(queries: Batch, replies: Batch, at: int, k: int, user: int) -> Iterator[_Seen]:
    point = replies.arrays["point"][k]
    yield _Seen(user, 0, point, queries.arrays["t"][at] * (queries.arrays["centre"][at] - point),
                None)


def _local(queries: Batch, replies: Batch, at: int, k: int, user: int) -> Iterator[_Seen]:
    point, ridge = replies.arrays["model"][k], float(queries.shared["ridge"])
    hessian = square(replies.arrays["hessian"][k:k + 1], len(point))[0]
    yield _Seen(user, 0, point, -ridge * point, hessian - ridge * np.eye(len(point)))


def _train(queries: Batch, replies: Batch, at: int, k: int, user: int) -> Iterator[_Seen]:
    start, steps = queries.arrays["model"][at], max(int(queries.arrays["steps"][at]), 1)
    yield _Seen(user, 0, start, (start - replies.arrays["point"][k]) / (steps
        * float(queries.shared["rate"])), None)


_READ = {"expand": _expand, "gradient": _gradient, "prox": _prox, "local": _local, "train": _train}


class _Marked:
    """The first question of a message and its answer, or the second, whose fields end in 2."""

    def __init__(self, queries: Batch, replies: Batch, mark: str) -> None:
        self.replies, self.mark = replies, mark
        self.asked = {**queries.arrays, **queries.shared}
        self.rows = np.searchsorted(queries.users, replies.users)
        self.own = set(queries.arrays)

    def query(self, name: str) -> Array:
        value = np.asarray(self.asked[f"{name}{self.mark}"])
        return value[self.rows] if f"{name}{self.mark}" in self.own else value

    def reply(self, name: str) -> Array:
        return np.asarray(self.replies.arrays[f"{name}{self.mark}"])


def _of_fit(message: _Marked, counts: Ints) -> Iterator[_Seen]:
    part, users = int(message.query("part")), message.replies.users.tolist()
    if message.replies.kind == "alone":
        points = message.reply("model")
        yield from (_Seen(user, part, points[k], -float(message.query("t")) * points[k], None)
                    for k, user in enumerate(users))
        return
    gradients = message.reply("gradient")
    if message.replies.kind == "settle":
        points = message.reply("point")
        hessians = square(message.reply("hessian"), points.shape[1])
        yield from (_Seen(user, part, points[k], gradients[k], hessians[k]) for k,
                    user in enumerate(users))
    elif message.replies.kind == "slopes":
        models, own = message.query("models"), message.query("own").astype(int)
        for k, user in enumerate(users):
            yield from (_Seen(user, part, models[own[k, j]], gradients[k, j], None)
                        for j in range(own.shape[1]))
    else:
        dim, order = gradients.shape[2], int(message.query("rank"))
        covariances, models = square(message.query("covariance"), dim), message.reply("model")
        for k, user in enumerate(users):
            for j, covariance in enumerate(covariances):
                hessian = None
                # e'' = H (I + C H)^-1 with C = count * covariance, so H = (I - e'' C)^-1 e''.
                if order > 1:
                    outer = square(message.reply("hessian")[k:k + 1, j], dim)[0]
                    hessian = np.linalg.solve(np.eye(dim) - outer @ (counts[user] * covariance),
                                              outer)
                    hessian = 0.5 * (hessian + hessian.T)
                yield _Seen(user, part, models[k, j], gradients[k, j], hessian)


def _sums(replies: Batch) -> Iterator[tuple[int, Sums]]:
    """Sums of the rows that are named, and of those that are in the first part but not in the
    second.
    """
    counts, means = replies.arrays["count"], replies.arrays["means"]
    full = replies.kind == "moments"
    for k, user in enumerate(replies.users.tolist()):
        for j in range(counts.shape[1]):
            scatter = square(replies.arrays["scatter"][k, j][None], means.shape[2])[0] if full \
                else None
            yield user, Sums(int(counts[k, j]), means[k, j], scatter)
        # All rows less those not held out.
        if not full and counts.shape[1] > 1 and counts[k, 0] > counts[k, 1]:
            left = int(counts[k, 0] - counts[k, 1])
            yield user, Sums(left, (counts[k, 0] * means[k, 0] - counts[k, 1] * means[k, 1]) / left,
                             None)


def _row(part: Ragged | None, k: int) -> Any:
    """The only row of a user, or None."""
    return None if part is None or not part.counts[k] else part.rows(k)[0]
