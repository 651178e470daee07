"""Paths with clusters that are given rather than solved for, at any size."""

from __future__ import annotations

import numpy as np

import coterie as ct


def made_path(labels: object, lams: object, *, dim: int = 3, names: list[str] | None = None, seed: int = 0,
              gap: float = 1e-9) -> ct.Path:
    """A path of convex clustering with these labels (n_lams, n_users): the model of a cluster is its users' mean."""
    labels = np.asarray(labels)
    n = labels.shape[1]
    points = np.random.default_rng(seed).standard_normal((n, dim))
    users = ct.Users(points, None, np.arange(n + 1), names or range(n), [f"x{k}" for k in range(dim)])
    problem = ct.Problem(users, ct.SquaredDistance(), 0.0, ct.Graph.from_edges(n, []))
    solutions = []
    for lam, row in zip(lams, labels, strict=True):
        sums = np.stack([np.bincount(row, column) for column in points.T], axis=1)
        models = (sums / np.maximum(np.bincount(row), 1)[:, None])[row]
        certificate = ct.Certificate(objective=1.0, bound=1.0 - gap, stationarity=0.0, complementarity=0.0,
                                     worst_user=0)
        solutions.append(ct.Solution(problem=problem.with_lam(lam), models=models, duals=None, certificate=certificate,
                                     status=ct.Status.CONVERGED, solver="given", seconds=0.0))
    return ct.Path(problem=problem, solutions=tuple(solutions), tol=1e-6)


def halving(n: int, n_lams: int) -> np.ndarray:
    """(n_lams, n) from everyone alone to everyone together, neighbours first."""
    runs = 2 ** np.round(np.linspace(0, np.ceil(np.log2(max(n, 2))), n_lams)).astype(int)
    return np.arange(n) // runs[:, None]
