"""Group labels: which users share a model, as numbers 0 .. n_groups - 1 in order of first
appearance.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import numpy.typing as npt

from coterie.base.errors import InvalidInput
from coterie.base.types import Array, Indices, Ints

_FEW = 5000  # numbers up to which the calls of a library take longer than their sums


def plural(word: str) -> str:
    """For example "shops", "counties" or "classes"."""
    if word.endswith("y") and word[-2:-1] not in ("", *"aeiou"):
        return f"{word[:-1]}ies"
    return f"{word}{'es' if word.endswith(('s', 'x', 'ch', 'sh')) else 's'}"


def many(count: int, what: str) -> str:
    """For example "1 group" or "2,000 groups"."""
    return f"{count:,} {what if count == 1 else plural(what)}"


def groups_of(n_groups: int, n_users: int, between: str = "of") -> str:
    """For example "3 groups of 40 users", and "no groups among 40 users" where each has a model of
    its own.
    """
    users = many(n_users, "user")
    return f"no groups among {users}" if n_groups == n_users > 1 \
        else f"{many(n_groups, 'group')} {between} {users}"


def one_group(n_users: int, n_examined: int) -> str:
    """What a search says that finds one group."""
    if n_users == 1:
        return "There is only one user."
    return (f"All {n_users:,} users are one group: none of {n_examined} divisions describes the "
            "data better.")


def labels_of(models: Array) -> Ints:
    """(n_users,) the label of each user; users are in one group when their models are equal."""
    # Equal rows have equal bytes, once -0.0 is made 0.0.
    rows = np.ascontiguousarray(models + 0.0)
    keys = rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).ravel().tolist()
    seen = dict.fromkeys(keys)
    if len(seen) == len(keys):
        return np.arange(len(keys))
    numbers = dict(zip(seen, range(len(seen)), strict=True))
    return np.array(list(map(numbers.__getitem__, keys)), dtype=np.int64)


def first_labels(labels: Ints) -> Ints:
    """Labels 0 .. n_groups - 1 renumbered by first appearance."""
    _, first = np.unique(labels, return_index=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[labels]


def check_labels(labels: npt.ArrayLike, n_users: int) -> Ints:
    """Labels of any kind, checked and renumbered from 0 in order of first appearance.

    Parameters
    ----------
    labels : one label per user: numbers, texts or anything that can be compared.
    n_users : how many there must be.

    Raises
    ------
    InvalidInput : where a label is missing or there are more or fewer than users.
    """
    given = np.asarray(labels)
    if given.shape != (n_users,):
        raise InvalidInput(f"expected one label for each of {n_users} users, got shape "
                           f"{given.shape}", remedy="Give them in the order of users.names")
    if given.dtype.kind == "f" and not np.isfinite(given).all():
        user = int(np.flatnonzero(~np.isfinite(given))[0])
        raise InvalidInput("labels must not be missing", where=f"user number {user}",
                           remedy="Give every user a label")
    return first_labels(np.unique(given, return_inverse=True)[1].ravel())


def rows_owner(users: npt.ArrayLike, names: Sequence[object]) -> Ints:
    """(n_rows,) the position of each row's user among `names`."""
    position = {name: k for k, name in enumerate(names)}
    given = users.tolist() if hasattr(users, "tolist") else users.to_list() \
        if hasattr(users, "to_list") else users
    return np.array([position[name] for name in given], dtype=np.int64)  # type: ignore[union-attr]


def group_sums(rows: Array, labels: Ints | Indices, n_groups: int | None = None) -> Array:
    """(n_groups, ...) for each label the sum of its rows; zero for labels that no row has.

    `n_groups` is one more than the largest label unless given.
    """
    count, n = int(labels.max()) + 1 if n_groups is None else n_groups, len(rows)
    if rows.ndim == 1:
        return np.bincount(labels, weights=rows, minlength=count).astype(float, copy=False)
    columns = np.ascontiguousarray(rows, dtype=float).reshape(n, prod(rows.shape[1:]))
    if columns.size <= _FEW:
        places = labels[:, None] * columns.shape[1] + np.arange(columns.shape[1])
        sums = np.bincount(places.ravel(), weights=columns.ravel(),
                           minlength=count * columns.shape[1])
        return sums.astype(float, copy=False).reshape(count, *rows.shape[1:])
    from scipy import sparse

    # One entry in each column.
    member = sparse.csc_array((np.ones(n), labels, np.arange(n + 1)), shape=(count, n))
    return np.asarray(member @ columns).reshape(count, *rows.shape[1:])


def group_means(rows: Array, labels: Ints | Indices, n_groups: int | None = None) -> Array:
    """(n_groups, dim) for each label the mean of its rows; zero for labels that no row has."""
    sums = group_sums(rows, labels, n_groups)
    return sums / np.maximum(np.bincount(labels, minlength=len(sums)), 1)[:, None]


def sum_zero_basis(n_classes: int) -> Array:
    """Orthonormal rows spanning the vectors of R^n_classes whose entries sum to zero (Helmert's
    matrix).
    """
    rows = np.tril(np.ones((n_classes - 1, n_classes)))
    for r in range(n_classes - 1):
        rows[r, r + 1] = -(r + 1)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)
