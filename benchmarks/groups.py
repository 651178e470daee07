"""The groups of `find_groups`: in users drawn with and without groups, in mine fields, in reviews,
and in ellipses.

    python benchmarks/groups.py --data FOLDER [--seeds 0 10] [--only one planted landmine amazon
    ellipses]

One: users drawn without groups. Their models are equal or vary continuously, and their noise can
have heavy tails or be overdispersed; the share of runs with one group should be at least 95 %.
Planted: users drawn with groups, compared with k-means on the local models, which is given their
number. All draws depend on the seed only.

Landmine: 29 fields of two known terrains, random splits. The other methods get more information:
the oracle the terrains, k-means their number; the squared penalty and the local models are tuned on
a quarter of the training samples, and then fitted to all.
"""

from __future__ import annotations

import argparse
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score, roc_auc_score

import coterie as ct
from coterie import datasets
from coterie.convex.choice import refit
from coterie.groups.find import find_groups
from coterie.problem.weights import LocalModels

RIDGE = 1e-3
PENALTIES = np.geomspace(1e-1, 1e-5, 9)
RIDGES = (1e-3, 1e-2, 0.03, 0.1, 0.3)
LOSSES = {"squared": ct.Squared(), "logistic": ct.Logistic(), "poisson": ct.Poisson()}
# Spread of a row's linear predictor between users.
WIDEST = {"squared": np.inf, "logistic": 2.0, "poisson": 0.5}
ONE = (*((kind, family) for kind in ("identical", "normal", "line", "uniform")
         for family in LOSSES),
       ("identical", "heavy tails"), ("normal", "heavy tails"), ("identical", "overdispersed"),
       ("normal", "overdispersed"))
PLANTED = (  # family, groups, users, rows per user, features, distance of a group's model from zero
    ("squared", 3, 30, 40, 4, 1.5), ("squared", 5, 40, 40, 4, 2.0), ("squared", 10, 40, 30, 4, 3.0),
    ("squared", 20, 80, 30, 4, 3.0), ("squared", 10, 20, 30, 4, 3.0), ("squared", 3, 30, 10, 4,
                                                                       2.0),
    ("heavy tails", 3, 30, 50, 4, 2.0), ("logistic", 3, 30, 80, 4, 2.0), ("logistic", 5, 40, 80, 4,
                                                                          3.0),
    ("logistic", 10, 40, 100, 4, 4.0), ("logistic", 10, 20, 100, 4, 4.0), ("logistic", 3, 30, 30,
                                                                           4, 3.0),
    ("poisson", 3, 30, 40, 4, 0.8), ("overdispersed", 3, 30, 60, 4, 0.8))


def with_targets(models: np.ndarray, n_rows: int, family: str, rng: np.random.Generator) -> tuple[
    ct.Users, ct.Loss]:
    """Users with these models (the last coordinate is the intercept), and the loss for them."""
    owner = np.repeat(np.arange(len(models)), n_rows)
    x = rng.standard_normal((owner.size, models.shape[1] - 1))
    margins = (x * models[owner, :-1]).sum(axis=1) + models[owner, -1]
    if family == "logistic":
        y = np.where(rng.random(owner.size) < 1 / (1 + np.exp(-margins)), 1.0, -1.0)
    elif family in ("poisson", "overdispersed"):
        factor = 1.0
        if family == "overdispersed":  # a negative binomial distribution
            excess = rng.choice([0.4, 0.8, 1.2])
            factor = rng.gamma(1 / excess, excess, owner.size)
        y = rng.poisson(factor * np.exp(np.minimum(margins + 0.7, 5.0))).astype(float)
    else:
        noise = rng.standard_t(rng.choice([1.5, 2.0, 3.0]),
                               owner.size) if family == "heavy tails" else \
            rng.standard_normal(owner.size)
        y = margins + noise
    loss = LOSSES[{"heavy tails": "squared", "overdispersed": "poisson"}.get(family, family)]
    return ct.Users.from_arrays(x, y, owner), loss


def without_groups(kind: str, family: str, seed: int) -> tuple[ct.Users, ct.Loss]:
    """Users whose models are equal or vary continuously around one centre."""
    rng = np.random.default_rng([seed, zlib.crc32(f"{kind} {family}".encode())])
    n, n_rows, dim = int(rng.choice([20, 40, 80])), int(rng.choice([15, 40, 100])), \
        1 + int(rng.choice([2, 4, 8]))
    centre, size = rng.standard_normal(dim) / np.sqrt(dim), rng.uniform(0.2, 1.0)
    spread = {"identical": np.zeros((n, dim)), "normal": rng.standard_normal((n, dim)),
              "line": rng.standard_normal((n, 1)) * rng.standard_normal(dim),
              "uniform": rng.uniform(-np.sqrt(3), np.sqrt(3), (n, dim))}[kind]
    if family in ("poisson", "overdispersed"):
        centre *= 0.5
    widest = WIDEST.get(family, WIDEST["poisson"] if family == "overdispersed" else np.inf)
    return with_targets(centre + min(size, widest / np.sqrt(dim)) * spread, n_rows, family, rng)


def with_groups(family: str, n_groups: int, n: int, n_rows: int, n_features: int, distance: float,
                seed: int) -> tuple[ct.Users, ct.Loss, np.ndarray]:
    """Users of groups with models in random directions."""
    rng = np.random.default_rng([seed, zlib.crc32(f"{family} {n_groups} {n} {n_rows}".encode())])
    centres = rng.standard_normal((n_groups, n_features + 1))
    centres *= distance / np.linalg.norm(centres, axis=1, keepdims=True)
    truth = rng.permutation(np.arange(n) % n_groups)
    return *with_targets(centres[truth], n_rows, family, rng), truth


def one(seeds: range) -> None:
    print(f"\nUsers without groups, draws {seeds.start} to {seeds.stop - 1}: share of draws with "
          "one group")
    for kind, family in ONE:
        start = time.process_time()
        counts = {seed: find_groups(*without_groups(kind, family, seed)).n_clusters
                  for seed in seeds}
        seconds = (time.process_time() - start) / len(seeds)
        wrong = " ".join(f"{seed}:{count}" for seed, count in counts.items() if count > 1)
        print(f"{kind:10s} {family:14s} {np.mean([count == 1 for count in counts.values()]):6.3f}  "
              " "
              f"{seconds:.1f} s a draw   {wrong and 'groups in ' + wrong}", flush=True)


def planted(seeds: range) -> None:
    print(f"\nUsers with groups, draws {seeds.start} to {seeds.stop - 1}: adjusted Rand index, of "
          "k-means given K, "
          "groups, share with the true number")
    for case in PLANTED:
        start, figures = time.process_time(), []
        for seed in seeds:
            users, loss, truth = with_groups(*case, seed=seed)
            groups = find_groups(users, loss)
            figures.append((adjusted_rand_score(truth, groups.labels), groups.n_clusters,
                            groups.n_clusters == case[1]))
        seconds = (time.process_time() - start) / len(seeds)
        given = []
        for seed in seeds:
            users, loss, truth = with_groups(*case, seed=seed)
            points = LocalModels.of(ct.Standardizer.from_moments(users.moments()).transform(users),
                                    loss, 0.1).models
            given.append(adjusted_rand_score(truth,
                                             KMeans(case[1], n_init=10, random_state=0).fit_predict(
                                                 points)))
        rand, count, right = np.mean(figures, axis=0)
        family, n_groups, n, n_rows = case[:4]
        print(f"{family:14s} {n_groups:3d} groups, {n:3d} users of {n_rows:3d} rows  {rand:6.3f} "
              f"{np.mean(given):6.3f} "
              f"{count:5.1f} {right:6.3f}   {seconds:.1f} s a draw", flush=True)


def squared_penalty(users: ct.Users, gamma: float) -> np.ndarray:
    """The models of min sum_i f_i + gamma/2 sum_{i<j} ||x_i - x_j||^2, by Newton's method on all
    models together.
    """
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


def tuned(fit: Callable[[ct.Users, float], np.ndarray], values: tuple[float, ...] | np.ndarray,
          users: ct.Users,
          seed: int) -> np.ndarray:
    """Fitted to all samples with the value whose fit to three quarters has the least mean loss on
    the rest.
    """
    parts, bare = users.split(test=0.25, seed=seed), ct.Logistic(ridge=0.0)
    held = bare.prepare(parts.test)
    return fit(users, min(values, key=lambda v: bare.values(held, fit(parts.train, v)).mean()))


def auc(models: np.ndarray, test: ct.Users) -> float:
    margins = ct.Logistic().decision(test.features, models[test.owner])
    return float(np.mean([roc_auc_score(test.targets[test.owner == i], margins[test.owner == i])
                          for i in range(test.n_users)]))


def landmine_split(data: datasets.Dataset, n: int, seed: int) -> Iterator[tuple[str, float, float,
        int]]:
    """(method, adjusted Rand index, test AUC, number of clusters)."""
    parts, truth = data.users.split(train=n, seed=seed), data.clusters
    # Raw features: find_groups standardises.
    groups = find_groups(parts.train, ct.Logistic(ridge=RIDGE))
    yield "find_groups", adjusted_rand_score(truth, groups.labels), \
        auc(groups.models, parts.test), groups.n_clusters
    scaler = ct.Standardizer.from_moments(parts.train.moments())
    train, test = scaler.transform(parts.train), scaler.transform(parts.test)
    problem = ct.Problem(train, ct.Logistic(ridge=RIDGE), lam=0.0)
    together = np.zeros(train.n_users, dtype=int)
    yield "oracle (knows the terrains)", 1.0, auc(refit(problem, truth), test), 2
    yield "local, ridge tuned", 0.0, auc(tuned(local, RIDGES, train, seed), test), train.n_users
    yield "global", 0.0, auc(refit(problem, together), test), 1
    yield "squared penalty, tuned", 0.0, auc(tuned(squared_penalty, PENALTIES, train, seed),
                                             test), train.n_users
    # What find_groups starts from.
    shrunk = LocalModels.of(train, ct.Logistic(ridge=0.0), 0.1).models
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
        print(f"{'':38s} {'ARI':>6s} {'AUC':>7s} {'K':>5s}   ours - this: AUC (standard error), "
              "splits won")
        for m, name in enumerate(names):
            gain = figures[:, 0, 1] - figures[:, m, 1]
            error = gain.std(ddof=1) / np.sqrt(len(gain)) if len(gain) > 1 else np.nan
            rand, score, clusters = figures[:, m].mean(axis=0)
            paired = f"   {gain.mean():+.4f} ({error:.4f}), {(gain > 0).sum()} of {len(gain)}" \
                if m else ""
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
        print(f"\nAmazon reviews, {count} features of most variance "
              f"({time.perf_counter() - start:.1f} s): {groups}")
        domains = find_groups(part, proposals=[(dataset.clusters, 0.0)])
        four = min((length for count, length in domains.candidates if count == 4), default=np.nan)
        print(f"  criterion {groups.criterion:.1f}; of four groups, from the four domains on: "
              f"{four:.1f}")


def ellipses(seeds: range) -> None:
    print("\nThe paper's Experiment 1, squared hinge (accuracy in %, mean over users)")
    loss, gaps, recovered = ct.SquaredHinge(ridge=RIDGE), [], 0
    for seed in seeds:
        data = datasets.ellipses(seed=seed)
        groups = find_groups(data.users, loss)
        problem = ct.Problem(data.users, loss, lam=0.0)

        def accuracy(models: np.ndarray, test: ct.Users) -> float:
            return 100 \
                * float((loss.predict(test.features, models[test.owner]) == test.targets).mean())

        ours, oracle = accuracy(groups.models, data.test), accuracy(refit(problem, data.clusters),
            data.test)
        if adjusted_rand_score(data.clusters, groups.labels) == 1.0:
            recovered += 1
            gaps.append(oracle - ours)
        print(f"  draw {seed}: {groups.n_clusters} groups, ours {ours:.2f}, oracle {oracle:.2f}")
    ahead = max(gaps, default=np.nan)
    print(f"  recovered in {recovered} of {len(seeds)}; there the oracle is ahead by at most "
          f"{ahead:.2g}")


def main() -> None:
    files = {"landmine": "landmine.npz", "amazon": "amazon_reviews.npz"}
    names = ("one", "planted", "landmine", "amazon", "ellipses")
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(),
                        help=f"folder with {' and '.join(files.values())}")
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 10), metavar=("FIRST", "STOP"))
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    options = parser.parse_args()
    seeds, paths = range(*options.seeds), {name: options.data / file for name,
                                           file in files.items()}
    # Fields with no mine among their training samples.
    warnings.simplefilter("ignore", ct.CoterieWarning)
    runs = (partial(one, seeds), partial(planted, seeds), partial(landmine, paths["landmine"],
        seeds),
            partial(amazon, paths["amazon"]), partial(ellipses, seeds))
    for name, run in zip(names, runs, strict=True):
        if name in options.only and name in paths and not paths[name].exists():
            print(f"skipped: {files[name]} is not there (give its folder by --data)")
        elif name in options.only:
            run()


if __name__ == "__main__":
    main()
