"""When to use what: coterie and other methods on small data sets, some of which are not for
coterie.

    python benchmarks/when.py [--draws 3] [--first 0] [--only groups moons]

Each set is drawn anew for every seed; of the panel, the split is. Tables show means over seeds: the
RMSE on test rows, as a mean over users, and for points the adjusted Rand index with the true
clusters. docs/when.md explains them. The methods are those of `coterie bench data`; statsmodels,
LightGBM and the panel come with the extra `bench`.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
from collections.abc import Callable

import numpy as np
from sklearn.cluster import HDBSCAN, KMeans
from sklearn.datasets import make_circles
from sklearn.linear_model import RidgeCV
from sklearn.metrics import adjusted_rand_score
from sklearn.preprocessing import SplineTransformer

import coterie as ct
from coterie.datasets import Dataset, clustered, gaussian_mixture, two_moons
from coterie.estimators import ConvexClustering
from coterie.lab.baselines import Central, CentralFit
from coterie.lab.experiments import federations as lab
from coterie.lab.experiments.federations_data import Benchmark, both_standardised, federations

TEST = 50  # test rows per user
RIDGE = 1e-3


def splines(users: ct.Users, task: str, n_classes: int, seed: int) -> CentralFit:
    """A ridge whose level and slopes are cubic splines of the first feature, the position of the
    user.
    """
    basis = SplineTransformer(n_knots=8).fit(users.features[:, :1])

    def columns(rows: ct.Users) -> np.ndarray:
        bends = basis.transform(rows.features[:, :1])
        return np.hstack(
            [bends, *(bends * rows.features[:, [j]] for j in range(1, rows.n_features))])

    ridge = RidgeCV(np.logspace(-4, 3, 15)).fit(columns(users), users.targets)
    return CentralFit(decide=lambda rows: ridge.predict(columns(rows)),
                      models=np.empty((users.n_users, 0)))


#: Columns of the table: their headings and the methods of `coterie bench data`.
METHODS = {"coterie": "coterie", "one model": "global", "own ridge": "ridge per user",
           "column per user": "one-hot ridge", "random slopes": "mixedlm slopes",
           "LightGBM": "lightgbm",
           "IFCA, true K": "ifca given K", "splines": "splines"}


def simulated(name: str, X: np.ndarray, y: np.ndarray, owner: np.ndarray, train: int,
              clusters: np.ndarray | None = None) -> Benchmark:
    return Benchmark(name=name, users=ct.Users.from_arrays(X, y, owner), metric="RMSE",
                     loss=ct.Squared(ridge=RIDGE),
                     features=both_standardised, train=train,
                     clusters=clusters)


def groups(seed: int) -> Benchmark:
    """30 users of three kinds, 12 rows each: a linear model per kind."""
    data = clustered("squared", samples=12 + TEST, n_features=4, noise=1.0, test_samples=1,
                     seed=seed)
    return simulated("groups", data.users.features, data.users.targets, data.users.owner, 12,
                     data.clusters)


def sleepstudy(seed: int) -> Benchmark:
    """18 people, reaction times on ten days, half of them for training: the textbook example of
    random slopes.
    """
    return next(panel for panel in federations(None, ("panels",)) if panel.name == "sleepstudy")


def one_kind(seed: int) -> Benchmark:
    """10 users with one linear model, 150 rows each."""
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(10), 150 + TEST)
    X = rng.normal(size=(owner.size, 4))
    return simulated("one kind", X, X @ rng.normal(size=4) + rng.normal(size=owner.size), owner,
                     150)


def many_rows(seed: int) -> Benchmark:
    """8 users with unrelated linear models, 200 rows each."""
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(8), 200 + TEST)
    X, models = rng.normal(size=(owner.size, 4)), rng.normal(size=(8, 4))
    return simulated("many rows", X, (X * models[owner]).sum(axis=1) + rng.normal(size=owner.size),
                     owner, 200)


def curved(seed: int) -> Benchmark:
    """20 users, 40 rows each, levels of their own, and the curve of Friedman (1991) that all share.
    """
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(20), 40 + TEST)
    X = rng.random((owner.size, 5))
    curve = 10 * np.sin(np.pi * X[:, 0] * X[:, 1]) + 20 * (X[:, 2] - 0.5) ** 2 + 10 * X[:, 3] + 5 \
        * X[:, 4]
    y = curve + 2 * rng.normal(size=20)[owner] + rng.normal(size=owner.size)
    return simulated("curved", X, y, owner, 40)


def smooth(seed: int) -> Benchmark:
    """60 stations on a line, 6 rows each: level and slope are a sine and a cosine of the position,
    a column.
    """
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(60), 6 + TEST)
    position, x = owner / 59, rng.normal(size=owner.size)
    y = 2 * np.sin(2 * np.pi * position) + 2 * np.cos(3 * np.pi * position) * x \
        + rng.normal(size=owner.size)
    return simulated("smooth", np.c_[position, x], y, owner, 6)


#: Sets with a target, by the name in the table.
TABLES: dict[str, Callable[[int], Benchmark]] = {make.__name__: make for make in (
    groups, sleepstudy, one_kind, many_rows, curved, smooth)}
#: Points: 150 around three centres, 200 on two interleaved half circles, and 200 on two circles
#: around one centre.
POINTS: dict[str, Callable[[int], Dataset]] = {
    "mixture": lambda seed: gaussian_mixture(150, seed=seed), "moons": lambda seed: two_moons(200,
        seed=seed),
    "circles": lambda seed: circles(200, seed)}


def circles(n_points: int, seed: int) -> Dataset:
    """Two circles around one centre, the inner half as large."""
    points, clusters = make_circles(n_points, noise=0.05, factor=0.5, random_state=seed)
    return Dataset(ct.Users.from_arrays(points), clusters)


def rmse(benchmark: Benchmark, seed: int) -> tuple[dict[str, float], str]:
    """The mean RMSE over users of each method, by heading, and what coterie let users share."""
    results = lab.run(benchmark, [seed], only=tuple(METHODS.values()))
    if benchmark.name == "smooth":
        rows = lab.prepare(benchmark, benchmark.split(seed))
        method = Central(name="splines", method=splines)
        results.append(lab.run_method(benchmark, rows, method.name, method, seed))
    by_method = {result.method: float(np.nanmean(result.scores)) for result in results}
    chosen = next(result.note for result in results if result.method == "coterie")
    return {heading: by_method[method] for heading,
            method in METHODS.items() if method in by_method}, chosen


def rand_indices(data: Dataset) -> dict[str, float]:
    """The adjusted Rand index of each method with the true clusters; points without a cluster count
    as one.
    """
    X, true = data.users.features, data.clusters
    labels = {"coterie": ConvexClustering().fit(X).labels_,
              "HDBSCAN": HDBSCAN(copy=True).fit_predict(X),
              "k-means, true K": KMeans(int(true.max()) + 1, n_init=10, random_state=0).fit_predict(
                  X)}
    return {name: float(adjusted_rand_score(true, found)) for name, found in labels.items()}


def show(title: str, scores: dict[str, dict[str, float]], best: Callable[..., float]) -> None:
    """Print one row per method and one column per set; the best of a column has a star."""
    print(f"{title}\n{'':16}" + "".join(f"{name:>12}" for name in scores))
    for method in dict.fromkeys(method for column in scores.values() for method in column):
        shown = []
        for column in scores.values():
            number = f"{column[method]:.2f}" if method in column else ""
            shown.append(number + ("*" if number and number == f"{best(column.values()):.2f}"
                                   else " "))
        print(f"{method:16}" + "".join(f"{cell:>12}" for cell in shown).rstrip())


def mean(draws: list[dict[str, float]]) -> dict[str, float]:
    return {method: float(np.mean([draw[method] for draw in draws])) for method in draws[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draws", type=int, default=3, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", nargs="+", choices=[*TABLES, *POINTS], default=[*TABLES, *POINTS],
                        help="some sets")
    given = parser.parse_args()
    seeds = range(given.first, given.first + given.draws)
    tables = {name: [rmse(make(seed), seed) for seed in seeds] for name,
              make in TABLES.items() if name in given.only}
    points = {name: mean([rand_indices(make(seed)) for seed in seeds]) for name,
              make in POINTS.items()
              if name in given.only}
    if tables:
        show("RMSE on test rows, mean over users",
             {name: mean([scores for scores, _ in draws]) for name, draws in tables.items()}, min)
        print("What coterie lets users share, per seed")
        for name, draws in tables.items():
            print(f"{name:16}" + "; ".join(chosen for _, chosen in draws))
    if points:
        show("Adjusted Rand index", points, max)


if __name__ == "__main__":
    main()
