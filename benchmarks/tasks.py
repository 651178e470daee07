"""The problems that `solvers.py` times.

Constants of the solvers may be tuned on the cases with seed 0 and the default shapes. The cases
called "fresh" have other seeds, shapes and units, and nothing is tuned on them: figures that are
published come from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

import coterie as ct
from coterie import datasets

TITLES = {"T1": "T1: complete graph, quadratic, d = 3", "T2": "T2: kNN graph of two moons, "
    "quadratic",
          "T3": "T3: complete graph, squared hinge", "T4": "T4: kNN graph, logistic, d = 50"}


class Case(NamedTuple):
    """One problem to solve, or to follow over lam where `lam` is None."""

    task: str
    variant: str
    n: int
    lam: float | None
    tol: float
    build: Callable[[], ct.Problem]
    # Of a path; None: the default grid of 50 from everyone alone to everyone together.
    grid: np.ndarray | None = None


FRESH = "fresh"
SEEDS = (101, 102, 103)  # of fresh cases
#: Of fresh ellipses: the default, wider ones, and four clusters.
SHAPES = (datasets.Ellipses(), datasets.Ellipses(along=2.5, across=2.07, offset=3.9, centre=0.33),
          datasets.Ellipses(n_clusters=4, along=2.0, across=1.0, offset=5.0, centre=0.5))


def mixture(n: int, lam: float, seed: int = 0) -> ct.Problem:
    return ct.Problem(datasets.gaussian_mixture(n, seed=seed).users, ct.SquaredDistance(), lam=lam)


def moons(n: int, lam: float, seed: int = 0) -> ct.Problem:
    users = datasets.two_moons(n, seed=seed).users
    return ct.Problem(users, ct.SquaredDistance(), lam=lam, graph=ct.Graph.knn(users.features, k=10,
        decay=0.5))


def paper(n: int, lam: float, seed: int = 0, shape: datasets.Ellipses = SHAPES[0],
          unit: float = 1.0) -> ct.Problem:
    """The paper's problem, with features in other units if `unit` is not 1."""
    users = datasets.ellipses(users_per_cluster=n // shape.n_clusters, samples=10, test_points=2,
                              seed=seed,
                              shape=shape).users
    if unit != 1.0:
        users = ct.Users.from_arrays(unit * users.features, users.targets, users.owner)
    return ct.Problem(users, ct.SquaredHinge(ridge=1e-3), lam=lam)


def paper_wide(n: int, lam: float) -> ct.Problem:
    users = datasets.clustered("squared_hinge", n_users=n, n_features=19, test_samples=1).users
    return ct.Problem(users, ct.SquaredHinge(ridge=1e-3), lam=lam)


def logistic(n: int, lam: float) -> ct.Problem:
    users, loss = datasets.clustered("logistic", n_users=n, n_features=49, test_samples=1).users, \
        ct.Logistic()
    graph = ct.Graph.knn(loss.local(loss.prepare(users)).points, k=10)
    return ct.Problem(users, loss, lam=lam, graph=graph)


def cases(task: str, quick: bool) -> Iterator[Case]:
    """The cases of a task, smallest first."""
    if task == "T1":  # at lam n = 10 everyone is together; below 6 everyone is alone
        for n in (50, 200, 1000) if quick else (50, 100, 200, 400, 1000, 2000):
            for lam in (1.0, 7.0, 9.5):
                yield Case("T1", "", n, lam / n, 1e-6, partial(mixture, n, lam / n))
                if n == 200:
                    yield Case("T1", FRESH, n, lam / n, 1e-6,
                               partial(mixture, n, lam / n, SEEDS[0]))
    if task == "T2":
        for n in (1000, 5000) if quick else (1000, 5000, 20_000, 100_000):
            for lam in (0.1, 1.0, 10.0):
                yield Case("T2", "", n, lam, 1e-6, partial(moons, n, lam))
                yield Case("T2", FRESH, n, lam, 1e-6, partial(moons, n, lam, SEEDS[0]))
        for n in (1000,) if quick else (1000, 5000, 20_000):
            yield Case("T2", "path of 30", n, None, 1e-6, partial(moons, n, 1.0),
                       np.geomspace(0.05, 50.0, 30))
    if task == "T3":
        for n in (60, 240, 999) if quick else (30, 60, 120, 240, 999, 4998):
            for lam in (0.02, 0.05, 0.09, 0.15):
                yield Case("T3", "", n, lam * 60 / n, 1e-8 if n <= 240 else 1e-6,
                           partial(paper, n, lam * 60 / n))
        yield Case("T3", "path of 50", 60, None, 1e-8, partial(paper, 60, 1.0))
        yield from _fresh_papers(quick)
        for n in (60,) if quick else (60, 240, 999):
            for lam in (0.02, 0.05, 0.09):
                yield Case("T3", "d = 20", n, lam * 60 / n, 1e-6,
                           partial(paper_wide, n, lam * 60 / n))
    if task == "T4":
        for n in (50, 500) if quick else (50, 100, 250, 500):
            for lam in (0.01, 0.05, 0.15):
                yield Case("T4", "", n, lam, 1e-6, partial(logistic, n, lam))


def _fresh_papers(quick: bool) -> Iterator[Case]:
    """The paper's problem on data that nothing is tuned on."""
    for n in (60,) if quick else (60, 240):
        for seed, shape in zip(SEEDS, SHAPES, strict=True):
            for lam in (0.02, 0.05, 0.07, 0.09, 0.12, 0.15):
                yield Case("T3", FRESH, n, lam * 60 / n, 1e-8, partial(paper, n, lam * 60 / n, seed,
                    shape))
        # Gradients are in the units of the features, and so is lam.
        yield Case("T3", FRESH, n, 0.27 * 60 / n, 1e-8, partial(paper, n, 0.27 * 60 / n, SEEDS[0],
            SHAPES[0], 3.0))
    for seed, shape in zip(SEEDS, SHAPES, strict=True):
        yield Case("T3", f"{FRESH}, path of 50", 60, None, 1e-8,
                   partial(paper, 60, 1.0, seed, shape))
