"""The groups of `find_groups`: in mine fields, in reviews without groups, and in the paper's ellipses.

    python benchmarks/groups.py --data FOLDER [--seeds 0 10]

Landmine: 29 fields of two known terrains, random splits. The other methods get more information: the oracle the
terrains, k-means their number; the squared penalty and the local models are tuned on a quarter of the training samples,
and then fitted to all.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score, roc_auc_score

import coterie as ct
from coterie import datasets
from coterie.analysis.groups import _scaled, find_groups
from coterie.analysis.partitions import Judge
from coterie.analysis.select import refit
from coterie.graph.weights import LocalModels
from coterie.labels import check_labels

RIDGE = 1e-3
PENALTIES = np.geomspace(1e-1, 1e-5, 9)
RIDGES = (1e-3, 1e-2, 0.03, 0.1, 0.3)


def squared_penalty(users: ct.Users, gamma: float) -> np.ndarray:
    """The models of min sum_i f_i + gamma/2 sum_{i<j} ||x_i - x_j||^2, by Newton's method on all models together."""
    loss = ct.Logistic(ridge=RIDGE)
    samples = loss.prepare(users)
    n, d = users.n_users, samples.dim
    laplacian = gamma * (n * np.eye(n) - np.ones((n, n)))

    def value(x: np.ndarray) -> float:
        return float(loss.values(samples, x).sum() + 0.5 * (x * (laplacian @ x)).sum())

    x = np.zeros((n, d))
    for _ in range(60):
        _, gradients, hessians = loss.evaluate(samples, x)
        system = np.kron(laplacian, np.eye(d)) + 1e-9 * np.eye(n * d)
        for i in range(n):
            system[i * d:(i + 1) * d, i * d:(i + 1) * d] += hessians[i]
        step, size = np.linalg.solve(system, (gradients + laplacian @ x).ravel()).reshape(n, d), 1.0
        while size > 1e-6 and value(x - size * step) > value(x) + 1e-12:
            size /= 2
        x = x - size * step
        if np.abs(step).max() < 1e-6:
            break
    return x


def local(users: ct.Users, ridge: float) -> np.ndarray:
    loss = ct.Logistic(ridge=ridge)
    return loss.prox(loss.prepare(users), None, 1e-8, None).points


def tuned(fit: Callable[[ct.Users, float], np.ndarray], values: tuple[float, ...] | np.ndarray, users: ct.Users,
          seed: int) -> np.ndarray:
    """Fitted to all samples with the value whose fit to three quarters has the least mean loss on the rest."""
    parts, bare = users.split(test=0.25, seed=seed), ct.Logistic(ridge=0.0)
    held = bare.prepare(parts.test)
    return fit(users, min(values, key=lambda v: bare.values(held, fit(parts.train, v)).mean()))


def auc(models: np.ndarray, test: ct.Users) -> float:
    margins = ct.Logistic().decision(test.features, models[test.owner])
    return float(np.mean([roc_auc_score(test.targets[test.owner == i], margins[test.owner == i])
                          for i in range(test.n_users)]))


def landmine_split(data: datasets.Dataset, n: int, seed: int) -> Iterator[tuple[str, float, float, int]]:
    """(method, adjusted Rand index, test AUC, number of clusters)."""
    parts, truth = data.users.split(train=n, seed=seed), data.clusters
    groups = find_groups(parts.train, ct.Logistic(ridge=RIDGE))  # raw features: find_groups standardises
    yield "find_groups", adjusted_rand_score(truth, groups.labels), auc(groups.models, parts.test), groups.n_clusters
    scaler = ct.Standardizer.from_moments(parts.train.moments())
    train, test = scaler.transform(parts.train), scaler.transform(parts.test)
    problem = ct.Problem(train, ct.Logistic(ridge=RIDGE), lam=0.0)
    together = np.zeros(train.n_users, dtype=int)
    yield "oracle (knows the terrains)", 1.0, auc(refit(problem, truth), test), 2
    yield "local, ridge tuned", 0.0, auc(tuned(local, RIDGES, train, seed), test), train.n_users
    yield "global", 0.0, auc(refit(problem, together), test), 1
    yield "squared penalty, tuned", 0.0, auc(tuned(squared_penalty, PENALTIES, train, seed), test), train.n_users
    shrunk = LocalModels.of(train, ct.Logistic(ridge=0.0), 0.1).models  # what find_groups starts from
    for name, points in (("k-means given K = 2, ridge 0.03", local(train, 0.03)),
                         ("k-means given K = 2, ridge 0.1 on all", shrunk)):
        labels = KMeans(2, n_init=10, random_state=0).fit_predict(points)
        yield name, adjusted_rand_score(truth, labels), auc(refit(problem, labels), test), 2


def landmine(path: Path, seeds: range) -> None:
    data = datasets.load(path)
    for n in (160, 80):
        start = time.perf_counter()
        runs = [list(landmine_split(data, n, seed)) for seed in seeds]
        names = [row[0] for row in runs[0]]
        figures = np.array([[row[1:] for row in run] for run in runs])  # (seed, method, ARI AUC K)
        print(f"\nLandmine, {n} training samples a field, splits {seeds.start} to {seeds.stop - 1} "
              f"({time.perf_counter() - start:.0f} s)")
        print(f"{'':38s} {'ARI':>6s} {'AUC':>7s} {'K':>5s}   ours - this: AUC (standard error), splits won")
        for m, name in enumerate(names):
            gain = figures[:, 0, 1] - figures[:, m, 1]
            error = gain.std(ddof=1) / np.sqrt(len(gain)) if len(gain) > 1 else np.nan
            rand, score, clusters = figures[:, m].mean(axis=0)
            paired = f"   {gain.mean():+.4f} ({error:.4f}), {(gain > 0).sum()} of {len(gain)}" if m else ""
            print(f"{name:38s} {rand:6.3f} {score:7.4f} {clusters:5.1f}{paired}")
        each = " ".join(f"{ari:.2f}/{int(k)}" for ari, _, k in figures[:, 0])
        print(f"ours, ARI/K by split: {each}")


def amazon(path: Path) -> None:
    dataset = datasets.load(path)
    users = dataset.users
    for count in (10, 50):
        chosen = np.sort(np.argsort(-users.features.var(axis=0), kind="stable")[:count])
        part = ct.Users.from_arrays(users.features[:, chosen], users.targets, users.owner)
        start = time.perf_counter()
        groups = find_groups(part)
        print(f"\nAmazon reviews, {count} features of most variance ({time.perf_counter() - start:.1f} s): {groups}")
        judge = Judge(_scaled(part, ct.Logistic()), ct.Logistic())
        print(f"  criterion {groups.criterion:.1f}; of the four domains: "
              f"{judge.criterion(check_labels(dataset.clusters, part.n_users)):.1f}")


def ellipses(seeds: range) -> None:
    print("\nThe paper's Experiment 1, squared hinge (accuracy in %, mean over users)")
    loss, gaps, recovered = ct.SquaredHinge(ridge=RIDGE), [], 0
    for seed in seeds:
        data = datasets.ellipses(seed=seed)
        groups = find_groups(data.users, loss)
        problem = ct.Problem(data.users, loss, lam=0.0)

        def accuracy(models: np.ndarray, test: ct.Users) -> float:
            return 100 * float((loss.predict(test.features, models[test.owner]) == test.targets).mean())

        ours, oracle = accuracy(groups.models, data.test), accuracy(refit(problem, data.clusters), data.test)
        if adjusted_rand_score(data.clusters, groups.labels) == 1.0:
            recovered += 1
            gaps.append(oracle - ours)
        print(f"  draw {seed}: {groups.n_clusters} groups, ours {ours:.2f}, oracle {oracle:.2f}")
    ahead = max(gaps, default=np.nan)
    print(f"  recovered in {recovered} of {len(seeds)}; there the oracle is ahead by at most {ahead:.2g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with landmine.npz and amazon_reviews.npz")
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 10), metavar=("FIRST", "STOP"))
    options = parser.parse_args()
    seeds = range(*options.seeds)
    warnings.simplefilter("ignore", ct.CoterieWarning)  # fields with no mine among their training samples
    for name, run in (("landmine.npz", partial(landmine, seeds=seeds)), ("amazon_reviews.npz", amazon)):
        path = None if options.data is None else options.data / name
        if path is not None and path.exists():
            run(path)
        else:
            print(f"skipped: {name} is not there (give its folder by --data)")
    ellipses(seeds)


if __name__ == "__main__":
    main()
