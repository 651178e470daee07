"""`coterie fit` on a table of many users, from file to page, beside scikit-learn's way to do less.

    python benchmarks/fit.py [--users 1000] [--rows 100] [--features 20]

Users of three kinds, two classes. The rival reads the same file with polars, fits one LogisticRegression to each user,
clusters the coefficients by k-means told that there are three, and fits one more to each cluster: no search for the
number, no path, no held-out rows, no certificate, no page. Both run alone on one thread.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl
from machine import facts
from sklearn.cluster import KMeans
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import adjusted_rand_score


def table(path: Path, users: int, rows: int, features: int, seed: int = 0) -> np.ndarray:
    """Write the table; the kind of each user."""
    rng = np.random.default_rng(seed)
    models, kind = rng.normal(size=(3, features)), rng.integers(0, 3, users)
    X, owner = rng.normal(size=(users * rows, features)), np.repeat(np.arange(users), rows)
    risk = 1 / (1 + np.exp(-(X * models[kind[owner]]).sum(axis=1) - 0.3))
    y = np.where(rng.random(len(risk)) < risk, "yes", "no")
    pl.DataFrame({"who": [f"u{i:06d}" for i in owner], **{f"x{j}": X[:, j] for j in range(features)}, "y": y}
                 ).write_csv(path)
    return kind


def rival(path: Path) -> np.ndarray:
    frame = pl.read_csv(path)
    X, y = frame.drop("who", "y").to_numpy(), frame["y"].to_numpy()
    codes = np.unique(frame["who"].to_numpy(), return_inverse=True)[1]
    starts = np.searchsorted(codes, np.arange(codes.max() + 2))
    own = np.stack([LogisticRegression().fit(X[a:b], y[a:b]).coef_[0]
                    for a, b in pairwise(starts)])
    labels = KMeans(3, n_init=10, random_state=0).fit_predict(own)
    for k in range(3):
        LogisticRegression().fit(X[labels[codes] == k], y[labels[codes] == k])
    return labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--users", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--features", type=int, default=20)
    asked = parser.parse_args()
    print(facts())
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder, "table.csv"), Path(folder, "run")
        kind = table(path, asked.users, asked.rows, asked.features)
        print(f"{asked.users:,} users x {asked.rows} rows x {asked.features} features, "
              f"{path.stat().st_size / 1e6:.0f} MB")
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "coterie.cli", "fit", path, "--user", "who", "--target", "y", "--out",
                        out, "--json"], check=True, capture_output=True)
        ours, spent = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        told = json.loads((out / "run.json").read_text())
        labels = pl.read_csv(out / "models.csv")["cluster"].to_numpy()
        print(f"coterie fit: {ours:.1f} s ({spent.ru_utime + spent.ru_stime:.1f} CPU s), {told['n_clusters']} groups, "
              f"adjusted Rand index {adjusted_rand_score(kind, labels):.3f}, gap {told['gap']:.1e}, "
              f"page {(out / 'report.html').stat().st_size / 1e6:.2f} MB")
        began = time.perf_counter()
        theirs = rival(path)
        took = time.perf_counter() - began
        print(f"scikit-learn told 3: {took:.1f} s, adjusted Rand index {adjusted_rand_score(kind, theirs):.3f}; "
              f"coterie takes {ours / took:.1f} times as long")


if __name__ == "__main__":
    main()
