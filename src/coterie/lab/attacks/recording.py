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
from typing import Any

import numpy as np

from coterie.base.types import Array, Ints
from coterie.federated.algorithms.base import Replies
from coterie.federated.protocol.messages import Batch, Fields, square
from coterie.losses.affine import AffineLoss

#: One round: what was asked, and what was answered.
Exchange = tuple[Batch, Batch]


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
        self.exchanges += [(queries, batch) for batch in replies.batches if len(batch)]
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

    def add(self, point: Array, gradient: Array, hessian: Array | None) -> None:
        """Add what is known at a point, unless it is known already."""
        if not any(np.array_equal(point, old) for old in self.points):
            self.points.append(point)
            self.gradients.append(gradient)
        if hessian is not None and not any(np.array_equal(point, old) for old in self.curved):
            self.curved.append(point)
            self.hessians.append(hessian)


#: The part of a user's rows, and its loss there: a point, the gradient and the Hessian, as far as
#: a reply says them.
Seen = tuple[int, Array, Array, Array | None]


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
    rows = [np.array([count], dtype=float) for count in counts]  # by part
    for queries, replies in exchanges:
        for user, reply in replies.items():
            if replies.kind == "facts":
                rows[user] = reply.arrays["count"]
            if replies.kind in ("facts", "moments"):
                gathered[user].sums += _read_sums(reply.arrays, replies.kind == "moments")
                continue
            query = queries[user].arrays
            for of, point, gradient, hessian in _read(replies.kind, query, reply.arrays,
                                                      rows[user]):
                if of == part:
                    ridge = loss.ridge * loss.shrunk(len(point)) * (replies.kind != "summary")
                    gathered[user].add(point, gradient - ridge * point,
                                       None if hessian is None else hessian - np.diag(ridge))
    return gathered


def _read(kind: str, query: Fields, reply: Fields, rows: Array) -> Iterator[Seen]:
    """What a reply says of the loss of its user, who has so many rows in each part."""
    if kind == "expand":
        yield 0, *_read_expansion(query, reply)
    elif kind == "gradient":
        yield 0, query["model"], reply["gradient"], None
    elif kind == "prox":
        yield 0, reply["point"], query["t"] * (query["centre"] - reply["point"]), None
    elif kind == "local":
        point, ridge = reply["model"], float(query["ridge"])
        hessian = square(reply["hessian"][None], len(point))[0]
        yield 0, point, -ridge * point, hessian - ridge * np.eye(len(point))
    elif kind == "train":
        start, steps = query["model"], max(int(query["steps"]), 1)
        yield 0, start, (start - reply["point"]) / (steps * float(query["rate"])), None
    elif kind == "summary":  # of the rows that are not held out first, and without a ridge
        hessians = square(reply["hessian"], reply["model"].shape[-1])
        for k, (model, gradient) in enumerate(zip(reply["model"], reply["gradient"], strict=True)):
            yield len(rows) - 1 - k, model, gradient, hessians[k]
    elif kind == "around":
        covariances = square(query["covariance"], reply["gradient"].shape[-1])
        for part, (centres, gradients) in enumerate(zip(query["centre"], reply["gradient"],
                                                        strict=True)):
            for centre, gradient, T in zip(centres, gradients, covariances[part], strict=True):
                yield part, centre - rows[part] * (T @ gradient), gradient, None


def _read_expansion(query: Fields, reply: Fields) -> tuple[Array, Array, Array]:
    point, dim = query["model"], len(query["model"])
    if "share" in reply:  # the user stepped back, towards the last accepted point or towards zero
        start = query["anchor"][0] if "anchor" in query else np.zeros(dim)
        point = start + float(reply["share"][0]) * (point - start)
    if "hessian" in reply:
        return point, reply["gradient"], square(reply["hessian"], dim)[0]
    matrix = float(reply["diagonal"][0]) * np.eye(dim)
    if "factor" in reply:
        matrix = matrix + (reply["factor"] * reply["sign"][:, None]).T @ reply["factor"]
    return point, reply["gradient"], matrix


def _read_sums(reply: Fields, full: bool) -> list[Sums]:
    """Sums of the rows that are named, and of those that are in the first part but not in the
    second.
    """
    counts, means = reply["count"], reply["means"]
    scatters = [square(scatter[None], means.shape[1])[0] for scatter in reply["scatter"]] \
        if full else [None] * len(counts)
    said = [Sums(int(count), *rest) for count, *rest in zip(counts, means, scatters, strict=True)]
    # All rows less those not held out.
    if not full and len(counts) > 1 and counts[0] > counts[1]:
        left = int(counts[0] - counts[1])
        said.append(Sums(left, (counts[0] * means[0] - counts[1] * means[1]) / left, None))
    return said
