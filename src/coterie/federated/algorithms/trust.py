"""When a second-order model of a loss can be trusted, and how to step back: the same at users and server."""

from __future__ import annotations

import numpy as np

from coterie._typing import Array, Flags

_TRUST = 1.5  # how much more than its model promised a loss may rise before the model is not believed


def between(anchors: Array, models: Array, share: Array) -> Array:
    """(n, dim) the point a share of the way from the anchors to the models; bitwise the same at users and server."""
    return np.asarray(anchors + share[:, None] * (models - anchors))


def trusted(values: Array, slopes: Array, bends: Array, reached: Array) -> Flags:
    """(n,) whether losses rose no more than second-order models said: f(x + s) <= f + <g, s> + 1.5 * 1/2 s'Hs.

    Parameters
    ----------
    values, slopes, bends : f, <g, s> and 1/2 s'Hs at the anchors, for the steps s taken from there.
    reached : f(x + s).
    """
    with np.errstate(invalid="ignore"):
        return np.asarray(reached <= values + slopes + _TRUST * bends + 1e-12 * np.abs(values))
