"""Users as dense zero-padded blocks, one for each padded length."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from coterie.base.types import Array, Ints


class Block(NamedTuple):
    """Users of one padded length as dense arrays; padding is 0 and has weight 0."""

    index: Ints       # type: ignore[assignment]  # (n,) positions of these users; hides tuple.index
    features: Array   # (n, m, p)
    targets: Array    # (n, m), zeros when there are no targets
    weights: Array    # (n, m), 1 / count on real rows
    units: Array | None = None  # (n, dim) of a model's coordinates, where a loss has changed them


def freeze(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False
    return array


def padded_blocks(features: Array, targets: Array | None, offsets: Ints) -> tuple[Block, ...]:
    """The blocks of users, given as in `Users`; users without rows are in none.

    The padded length depends on the user's own count only, so a user alone gives bitwise the block
    it gives in a crowd. Up to 16 rows are exact; above, less than one eighth is padding.
    """
    counts = np.diff(offsets)
    # Above 16 rows: the next multiple of 2^(floor(log2(count)) - 3); frexp's exponent is
    # floor(log2(count)) + 1.
    step = 2 ** np.maximum(np.frexp(counts)[1].astype(np.int64) - 4, 0)
    lengths = np.where(counts <= 16, counts, -(-counts // step) * step)
    values = np.zeros(len(features)) if targets is None else targets
    return tuple(_block(features, values, offsets, np.flatnonzero(lengths == m), int(m))
                 for m in np.unique(lengths[lengths > 0]))


def _block(features: Array, values: Array, offsets: Ints, index: Ints, m: int) -> Block:
    counts, start, stop = np.diff(offsets)[index, None], offsets[index[0]], offsets[index[-1] + 1]
    real = np.arange(m) < counts
    if real.all() and stop - start == real.size:  # adjacent users without padding: views
        rows = features[start:stop].reshape(*real.shape, features.shape[1])
        targets = values[start:stop].reshape(real.shape)
    else:
        taken = np.where(real, offsets[index, None] + np.arange(m), 0)
        rows, targets = np.take(features, taken, axis=0), np.where(real, values[taken], 0.0)
        rows[~real] = 0.0
    return Block(freeze(index), freeze(rows), freeze(targets), freeze(real / counts))
