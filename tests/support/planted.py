"""Problems built backwards from the optimality conditions, so that the answer is known at any size."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

import coterie as ct


class Planted(NamedTuple):
    problem: ct.Problem
    models: np.ndarray
    duals: np.ndarray


def planted(n_users: int, *, graph: ct.Graph, n_clusters: int = 3, dim: int = 2, lam: float = 0.3,
            seed: int = 0) -> Planted:
    """Convex clustering whose optimum is `models`: choose models and feasible duals, then set a_i = x_i + (B'y)_i.

    Stationarity of 1/2 ||x_i - a_i||^2 is x_i - a_i + (B'y)_i = 0; the duals are lam w_e times a unit vector along the
    difference across clusters, and random inside the ball within them.
    """
    rng = np.random.default_rng(seed)
    labels = np.sort(rng.integers(0, n_clusters, n_users))
    models = (3.0 * rng.standard_normal((n_clusters, dim)))[labels]
    differences = graph.differences(models)
    lengths = np.linalg.norm(differences, axis=1, keepdims=True)
    inside = rng.standard_normal(differences.shape)
    inside *= rng.uniform(0, 0.9, lengths.shape) / np.linalg.norm(inside, axis=1, keepdims=True)
    units = np.where(lengths > 0, differences / np.where(lengths > 0, lengths, 1.0), inside)
    duals = lam * graph.weights[:, None] * units
    users = ct.Users.from_arrays(models + graph.divergence(duals))
    return Planted(ct.Problem(users, ct.SquaredDistance(), lam=lam, graph=graph), models, duals)
