"""Compiled loops against NumPy."""

import numpy as np

from coterie.problem import edges as kernels


def drawn(n, d, seed=0):
    rng = np.random.default_rng(seed)
    factors = rng.normal(size=(n, d, d + 2))
    return rng.normal(size=(n, d)), factors @ np.swapaxes(factors, 1, 2)


def test_distances_of_pairs():
    models, covariances = drawn(6, 4)
    first, second = np.array([0, 1, 4]), np.array([3, 2, 5])
    gaps = models[first] - models[second]
    expected = [gap @ np.linalg.solve(covariances[i] + covariances[j], gap)
                for gap, i, j in zip(gaps, first, second, strict=True)]
    np.testing.assert_allclose(kernels.mahalanobis(models, covariances, first, second), expected, rtol=1e-12)
    assert np.isnan(kernels.mahalanobis(models, -covariances, first, second)).all()
