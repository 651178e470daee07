"""Compiled loops over small matrices against LAPACK."""

import numpy as np
import pytest

from coterie.base import matrices
from coterie.losses.newton import solve_scaled


def drawn(n, d, seed=0):
    rng = np.random.default_rng(seed)
    factors = rng.normal(size=(n, d, d + 2))
    return rng.normal(size=(n, d)), factors @ np.swapaxes(factors, 1, 2)


@pytest.mark.parametrize("d", [1, 2, 6, 21])
def test_inverses(d):
    _, positive = drawn(5, d)
    inverses, logs = matrices.invert(positive)
    np.testing.assert_allclose(inverses, np.linalg.inv(positive), rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(logs, np.linalg.slogdet(positive)[1], rtol=1e-12)
    assert np.isnan(matrices.invert(-positive)[1]).all()


@pytest.mark.parametrize("d", [1, 3, 21, 70])
def test_scaled_systems(d):
    vectors, positive = drawn(5, d)
    units, shift = np.sqrt(np.einsum("nii->ni", positive)), np.full(5, 1e-3)
    expected = [np.linalg.solve(H + 1e-3 * np.diag(np.diag(H)), v) for H, v in zip(positive, vectors, strict=True)]
    np.testing.assert_allclose(solve_scaled(positive, units, shift, vectors), expected, rtol=1e-7, atol=1e-10)


def test_one_singular_matrix_does_not_change_the_others():
    vectors, positive = drawn(4, 3)
    units, shift = np.ones((4, 3)), np.zeros(4)
    alone = solve_scaled(positive, units, shift, vectors)
    positive[2] = 0.0
    together = solve_scaled(positive, units, shift, vectors)
    assert np.array_equal(together[[0, 1, 3]], alone[[0, 1, 3]])
    assert np.isfinite(together).all()
    assert (np.einsum("nd,nd->n", vectors, together) >= 0).all()


def test_indefinite_matrices_give_directions_of_descent():
    vectors, positive = drawn(3, 4)
    step = solve_scaled(-positive, np.ones((3, 4)), np.zeros(3), vectors)
    assert (np.einsum("nd,nd->n", vectors, step) >= 0).all()
