"""When a second-order model of a loss is accurate enough, and how to step back: the same at users
and server.
"""

from __future__ import annotations

import numpy as np

from coterie.base.types import Array, Flags

_TRUST = 1.5  # largest factor of the second-order term by which the loss may differ from its model


def between(anchors: Array, models: Array, share: Array) -> Array:
    """(n, dim) anchors + share (models - anchors), bitwise the same at users and server."""
    return np.asarray(anchors + share[:, None] * (models - anchors))


def trusted(values: Array, slopes: Array, second: Array, reached: Array) -> Flags:
    """(n,) whether losses agree with second-order models: f(x + s) <= f + <g, s> + 1.5 * 1/2 s'Hs.

    Parameters
    ----------
    values, slopes, second : f, <g, s> and 1/2 s'Hs at the anchors, for the steps s taken from
        there.
    reached : f(x + s).
    """
    with np.errstate(invalid="ignore"):
        return np.asarray(reached <= values + slopes + _TRUST * second + 1e-12 * np.abs(values))
