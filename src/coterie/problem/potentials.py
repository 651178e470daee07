"""Systems with the Laplacian of a graph: potentials whose differences are flows."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from coterie.base.types import Array

if TYPE_CHECKING:
    from scipy.sparse import csr_array

# Users from which flows are computed by conjugate gradients: a factor of L can be nearly dense.
_MANY = 3000
# Relative residual at which these end, and the largest number of steps.
_ACCURATE, _STEPS = 1e-12, 300


def laplacian_solver(matrix: csr_array) -> Callable[[Array], Array]:
    """A function that solves systems with a Laplacian without the rows of grounded users.

    Few users: one factorisation. Many: conjugate gradients, or the factorisation if these take too
    many steps, as on graphs of points in a plane, where a factor is small.
    """
    from scipy import sparse
    from scipy.sparse.linalg import splu

    @cache
    def factor() -> Any:
        return splu(sparse.csc_array(matrix), permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0,
                    options={"SymmetricMode": True})

    def solve(right: Array) -> Array:
        solved = _conjugate_gradients(matrix, right) if len(right) > _MANY else None
        return np.asarray(factor().solve(right)) if solved is None else solved

    return solve


def _conjugate_gradients(matrix: csr_array, right: Array) -> Array | None:
    """matrix^-1 right to nearly all digits; None if that takes too many steps. All columns advance
    together.
    """
    inverse = 1.0 / matrix.diagonal()[:, None]
    x, r = np.zeros_like(right), right.copy()
    z = inverse * r
    p, rz = z.copy(), np.einsum("nd,nd->d", r, z)
    enough = _ACCURATE**2 * np.einsum("nd,nd->d", right, inverse * right)
    for _ in range(_STEPS):
        if (rz <= enough).all():
            return x
        Ap = matrix @ p
        a = rz / np.maximum(np.einsum("nd,nd->d", p, Ap), 1e-300)
        x += a * p
        r -= a * Ap
        z = inverse * r
        before, rz = rz, np.einsum("nd,nd->d", r, z)
        p = z + (rz / np.maximum(before, 1e-300)) * p
    return None
