"""Users' rows one after the other, as compiled code reads them, for the losses that it knows."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from coterie.base.types import Array, Ints
from coterie.losses.affine import LinearLoss
from coterie.losses.base import Loss, Samples
from coterie.losses.blocks import BlockSamples
from coterie.losses.linear import Huber, Logistic, Poisson, Squared, SquaredHinge
from coterie.losses.points import SquaredDistance

#: The numbers by which compiled code knows the losses. Classes derived from them have other
#: formulas.
KINDS: dict[type[Loss], int] = {SquaredHinge: 0, Logistic: 1, Squared: 2, Huber: 3, Poisson: 4,
                                SquaredDistance: 5}
POINTS = KINDS[SquaredDistance]
MOST_COORDINATES = 12  # of a model, above which loops over dim x dim are slower than libraries

_LAYOUTS: WeakKeyDictionary[Samples, tuple[Array, Array, Array, Ints]] = WeakKeyDictionary()


class Flat(NamedTuple):
    """A loss on all users' rows."""

    rows: Array  # (n_rows, dim) of the design; of a user one after the other
    targets: Array  # (n_rows,)
    weights: Array  # (n_rows,) 1 / number of rows of the user
    starts: Ints  # (n_users + 1,) where the rows of each user begin
    ridges: Array  # (dim,) the weight of each coordinate's square, twice over
    curved: Array  # (dim,) numbers c such that f_i - 1/2 sum_k c_k x_k^2 is convex
    kind: int  # see KINDS
    delta: float  # of a Huber loss
    steepest: float  # the largest curvature of phi; 0 where there is none


def flat(loss: Loss, samples: Samples) -> Flat | None:
    """The loss as compiled code reads it; None if that does not know it, or if units are odd
    (`Frame`).
    """
    kind = KINDS.get(type(loss))
    if kind is None or samples.frame is not None or samples.dim > MOST_COORDINATES \
            or not isinstance(samples, BlockSamples):
        return None
    if samples not in _LAYOUTS:
        _LAYOUTS[samples] = _layout(samples)
    zeros, delta, steepest = np.zeros(samples.dim), 0.0, 1.0
    if not isinstance(loss, LinearLoss):
        return Flat(*_LAYOUTS[samples], zeros, zeros + 1.0, kind, delta, steepest)
    ridges = loss.ridge * loss.shrunk(samples.dim)
    delta = loss.delta if isinstance(loss, Huber) else 0.0
    steepest = float(loss.max_curvature) if np.isfinite(loss.max_curvature) else 0.0
    return Flat(*_LAYOUTS[samples], ridges, ridges, kind, delta, steepest)


def _layout(samples: BlockSamples) -> tuple[Array, Array, Array, Ints]:
    counts = np.asarray(samples.users.counts, dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    rows, targets, weights = np.empty((starts[-1], samples.dim)), np.empty(starts[-1]), \
        np.empty(starts[-1])
    for block in samples.blocks:
        real = block.weights > 0
        at = (starts[block.index][:, None] + np.arange(real.shape[1]))[real]
        rows[at], targets[at], weights[at] = block.features[real], block.targets[real], \
            block.weights[real]
    return rows, targets, weights, starts
