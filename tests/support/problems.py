"""Problems for every loss, small enough for the reference solver."""

from __future__ import annotations

import warnings

import numpy as np

import coterie as ct
from coterie.datasets import FAMILIES, clustered, gaussian_mixture

LOSS_NAMES = sorted(ct.LOSSES)


def users_for(name: str, *, n_users: int = 9, seed: int = 0, samples: int = 8, n_features: int = 2,
              ragged: bool = True) -> ct.Users:
    """Users with three true clusters whose targets suit the loss."""
    if name in FAMILIES:
        return clustered(name, n_users=n_users, samples=samples, n_features=n_features, ragged=ragged, seed=seed,
                         separation=2.0).users
    return gaussian_mixture(n_users, n_features=n_features, separation=4.0, seed=seed).users


def loss_for(name: str, **settings: object) -> ct.Loss:
    return ct.LOSSES[name](**settings)


def problem_for(name: str, lam: float = 0.05, graph: ct.Graph | None = None, **kwargs: object) -> ct.Problem:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ct.CoterieWarning)
        return ct.Problem(users_for(name, **kwargs), loss_for(name), lam=lam, graph=graph)


def graph_for(kind: str, n_users: int, seed: int = 0) -> ct.Graph:
    """A complete, weighted, kNN, disconnected or empty graph over n_users."""
    rng = np.random.default_rng(seed)
    pairs = np.stack(np.triu_indices(n_users, 1), axis=1)
    if kind == "complete":
        return ct.Graph.complete(n_users)
    if kind == "weighted":
        return ct.Graph.from_edges(n_users, pairs, rng.uniform(0.2, 2.0, len(pairs)))
    if kind == "knn":
        return ct.Graph.knn(rng.standard_normal((n_users, 2)), k=2, decay=0.5)
    if kind == "disconnected":
        half = n_users // 2
        inside = (pairs[:, 0] < half) == (pairs[:, 1] < half)
        return ct.Graph.from_edges(n_users, pairs[inside], rng.uniform(0.5, 1.5, int(inside.sum())))
    assert kind == "empty"
    return ct.Graph.from_edges(n_users, [])


def quiet_problem(users: ct.Users, loss: ct.Loss, lam: float = 0.0, graph: ct.Graph | None = None) -> ct.Problem:
    """A problem whose concerns (users of one class and the like) are known and no matter here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ct.CoterieWarning)
        return ct.Problem(users, loss, lam=lam, graph=graph)


def points_problem(points: object, lam: float = 0.0, graph: ct.Graph | None = None) -> ct.Problem:
    """Convex clustering of points, a row each."""
    return ct.Problem(ct.Users.from_arrays(points), ct.SquaredDistance(), lam=lam, graph=graph)


def radius(solution: ct.Solution) -> float:
    """No optimum is further: mu/2 ||x - x*||^2 <= F(x) - min F <= gap, mu the losses' strong convexity.

    Where the loss states none (an intercept, Huber's distance), half the least curvature at the point stands for it.
    """
    problem = solution.problem
    stated = problem.loss.strong_convexity(problem.samples).min()
    mu = stated if stated > 0 else 0.5 * np.linalg.eigvalsh(problem.hessians(solution.models))[:, 0].min()
    return float(np.sqrt(2 * solution.certificate.gap / max(mu, 1e-300)))
