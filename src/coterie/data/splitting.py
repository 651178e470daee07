"""Which rows of every user go to training, validation and test."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from coterie._typing import Array, Ints
from coterie.errors import InvalidInput


class PartSizes(NamedTuple):
    """(n_users,) the number of rows of each user in each part."""

    train: Ints
    validation: Ints
    test: Ints


def offsets_of(counts: Ints) -> Ints:
    """Where the rows of each user start, and where the last ones end, (n_users + 1,)."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def part_sizes(counts: Ints, test: float | None, validation: float, train: float | None) -> PartSizes:
    """Rows per user and part; the amounts are those of `Users.split`."""
    least = np.minimum(counts, 1)
    n_train = counts if train is None else np.clip(_amount(train, counts, "train"), least, counts)
    if train is None or test is not None:
        n_test = np.minimum(_amount(0.2 if test is None else test, counts, "test"), counts - least)
        n_validation = np.minimum(_amount(validation, counts, "validation"), counts - least - n_test)
        n_train = np.minimum(n_train, counts - n_test - n_validation)
    else:
        n_validation = np.minimum(_amount(validation, counts, "validation"), counts - n_train)
        n_test = counts - n_train - n_validation
    return PartSizes(n_train, n_validation, n_test)


def choose_rows(owner: Ints, counts: Ints, sizes: PartSizes, strata: Array | None,
                seed: int | np.random.Generator) -> tuple[Ints, Ints, Ints]:
    """The rows of train, validation and test, each in ascending order; rows of each stratum in proportion."""
    rng = np.random.default_rng(seed)
    key = rng.random(len(owner))
    left = np.lexsort((key, key if strata is None else strata, owner))
    parts = []
    for wanted in (sizes.test, sizes.validation, sizes.train):
        of = owner[left]
        size = np.bincount(of, minlength=len(counts))
        # Systematic sampling of k of a user's n positions j with a phase u of 0..n-1: j is chosen if
        # floor(((j+1) k + u) / n) > floor((j k + u) / n). So k are chosen, and of any run of L positions L k / n to
        # less than one; integers, so no rounding.
        k, n, u = wanted[of], size[of], rng.integers(0, np.maximum(size, 1))[of]
        j = np.arange(len(left)) - offsets_of(size)[of]
        chosen = ((j + 1) * k + u) // n > (j * k + u) // n
        parts.append(np.sort(left[chosen]))
        left = left[~chosen]
    return parts[2], parts[1], parts[0]


def _amount(amount: Any, counts: Ints, name: str) -> Ints:
    """Rows per user that a share (rounded half up) or a number of rows asks for."""
    if isinstance(amount, (int, np.integer)) and not isinstance(amount, bool) and amount >= 0:
        return np.minimum(counts, min(int(amount), 2**62))
    if isinstance(amount, (float, np.floating)) and 0 <= amount < 1:
        # 0.29 * 50 is just below 14.5 in binary; the last term makes it a half.
        return np.asarray(np.floor(float(amount) * counts + 0.5 + 1e-9), dtype=np.int64)
    raise InvalidInput(f"{name} must be a share in [0, 1) or a number of rows per user, got {amount!r}",
                       remedy=f"For example {name}=0.2 or {name}=5")
