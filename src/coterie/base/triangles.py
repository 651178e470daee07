"""Symmetric matrices as their upper triangles, row by row: what is sent and stored of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def triangle(matrices: Array) -> Array:
    """(n, d (d + 1) / 2) the upper triangles of symmetric matrices, row by row."""
    rows, columns = np.triu_indices(matrices.shape[-1])
    return np.asarray(matrices[..., rows, columns])


def square(triangles: Array, dim: int) -> Array:
    """(n, d, d) the symmetric matrices of their upper triangles."""
    out = np.empty((*triangles.shape[:-1], dim, dim))
    rows, columns = np.triu_indices(dim)
    out[..., rows, columns] = triangles
    out[..., columns, rows] = triangles
    return out
