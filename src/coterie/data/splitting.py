"""Which rows of every user go to training, validation and test."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.base.errors import InvalidInput
from coterie.base.types import Array, Ints

#: (n_users,) rows of each user in train, validation and test; or the rows themselves.
Parts = tuple[Ints, Ints, Ints]


def offsets_of(counts: Ints) -> Ints:
    """Where the rows of each user start, and where the last ones end, (n_users + 1,)."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def part_sizes(counts: Ints, test: float | None, validation: float, train: float | None,
               least: int = 0) -> Parts:
    """Rows per user and part; the amounts are those of `Users.split`. Smaller test parts than
    `least` are empty.
    """
    one = np.minimum(counts, 1)
    n_train = counts if train is None else np.clip(_count_rows(train, counts, "train"), one, counts)
    if train is None or test is not None:
        n_test = np.minimum(_count_rows(0.2 if test is None else test, counts, "test"),
                            counts - one)
        n_test = np.where(n_test < least, 0, n_test)
        n_validation = np.minimum(_count_rows(validation, counts, "validation"),
                                  counts - one - n_test)
        n_train = np.minimum(n_train, counts - n_test - n_validation)
    else:
        n_validation = np.minimum(_count_rows(validation, counts, "validation"), counts - n_train)
        n_test = counts - n_train - n_validation
    return n_train, n_validation, n_test


def choose_rows(owner: Ints, counts: Ints, sizes: Parts, strata: Array | None,
                seed: int | np.random.Generator) -> Parts:
    """The rows of each part in ascending order; rows of each stratum in proportion."""
    rng = np.random.default_rng(seed)
    key = rng.random(len(owner))
    return _choose(owner, counts, sizes, strata, key,
                   lambda _, size: rng.integers(0, np.maximum(size, 1)))


def choose_own_rows(owner: Ints, counts: Ints, sizes: Parts, strata: Array | None, seed: int,
                    names: Sequence[Any]) -> Parts:
    """The same, by numbers from the seed, the user's name and the row: not from other users."""
    own = np.array([zlib.crc32(str(name).encode()) for name in names], dtype=np.uint64)
    own = _mix(own + _mix(np.array([seed], dtype=np.uint64)))
    row = (np.arange(len(owner)) - offsets_of(counts)[owner]).astype(np.uint64)
    key = _mix(own[owner] + row) / 2.0**64

    def phase(part: int, size: Ints) -> Ints:
        return (_mix(own ^ np.uint64(part + 1))
                % np.maximum(size, 1).astype(np.uint64)).astype(np.int64)

    return _choose(owner, counts, sizes, strata, key, phase)


def _choose(owner: Ints, counts: Ints, sizes: Parts, strata: Array | None, key: Array,
            phase: Callable[[int, Ints], Ints]) -> Parts:
    """`key`: (n_rows,) numbers that order the rows; `phase`: of each part, a number from 0 to size
    - 1 per user.
    """
    left = _order_rows(owner, strata, key, len(counts))
    parts = []
    for part, wanted in enumerate(reversed(sizes)):  # test takes its rows first
        of = owner[left]
        size = np.bincount(of, minlength=len(counts))
        shift = phase(part, size)
        if not wanted.any() or (wanted >= size).all():  # none, or all that are left
            parts.append(np.sort(left) if wanted.any() else left[:0])
            left = left[:0] if wanted.any() else left
            continue
        # Systematic sampling of k of a user's n positions j with a phase u of 0..n-1: j is chosen
        # if floor(((j+1) k + u) / n) > floor((j k + u) / n). So k are chosen, and of any run of L
        # positions L k / n to less than one; integers, so no rounding.
        k, n, u = wanted[of], size[of], shift[of]
        j = np.arange(len(left)) - offsets_of(size)[of]
        chosen = ((j + 1) * k + u) // n > (j * k + u) // n
        parts.append(np.sort(left[chosen]))
        left = left[~chosen]
    return parts[2], parts[1], parts[0]


def _order_rows(owner: Ints, strata: Array | None, key: Array, n_users: int) -> Ints:
    """The rows by owner, stratum and key; to 40 digits of the keys, which are in [0, 1), where one
    number holds all.
    """
    kinds = np.zeros(1) if strata is None else np.unique(strata)
    if n_users * len(kinds) >= 2**23 or not np.isfinite(kinds).all():
        return np.lexsort((key, key if strata is None else strata, owner))
    code = owner if strata is None else owner * len(kinds) + np.searchsorted(kinds, strata)
    return np.argsort((code << 40) + np.minimum(key * 2.0**40, 2.0**40 - 1).astype(np.int64))


def _mix(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Well mixed bits: the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    z = numbers + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _count_rows(amount: Any, counts: Ints, name: str) -> Ints:
    """Rows per user that a share (rounded half up) or a number of rows asks for."""
    if isinstance(amount, (int, np.integer)) and not isinstance(amount, bool) and amount >= 0:
        return np.minimum(counts, min(int(amount), 2**62))
    if isinstance(amount, (float, np.floating)) and 0 <= amount < 1:
        # 0.29 * 50 is just below 14.5 in binary; the last term makes it a half.
        return np.asarray(np.floor(float(amount) * counts + 0.5 + 1e-9), dtype=np.int64)
    raise InvalidInput(f"{name} must be a share in [0, 1) or a number of rows per user, got "
                       f"{amount!r}", remedy=f"For example {name}=0.2 or {name}=5")
