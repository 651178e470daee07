"""`coterie fit` on a table of many users, from file to report, compared with a simpler procedure in
scikit-learn.

    python benchmarks/fit.py [--users 1000] [--rows 100] [--features 20] [--seed 101] [--threads 1]

Users of three kinds, two classes. The simpler procedure reads the same file with polars, fits one
LogisticRegression per user, clusters the coefficients by k-means with the number of clusters given
as three, and fits one more per cluster: no search for the number, no path, no held-out rows, no
certificate, no report. Both run on one thread unless `--threads` says otherwise. Constants were
chosen on seeds 0 to 12; the default is a fresh one.
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
    """Write the table; returns the kind of each user."""
    rng = np.random.default_rng(seed)
    models, kind = rng.normal(size=(3, features)), rng.integers(0, 3, users)
    X, owner = rng.normal(size=(users * rows, features)), np.repeat(np.arange(users), rows)
    risk = 1 / (1 + np.exp(-(X * models[kind[owner]]).sum(axis=1) - 0.3))
    y = np.where(rng.random(len(risk)) < risk, "yes", "no")
    pl.DataFrame({"who": [f"u{i:06d}" for i in owner],
                  **{f"x{j}": X[:, j] for j in range(features)}, "y": y}
                 ).write_csv(path)
    return kind


def simpler(path: Path) -> np.ndarray:
    frame = pl.read_csv(path)
    X, y = frame.drop("who", "y").to_numpy(), frame["y"].to_numpy()
    codes = np.unique(frame["who"].to_numpy(), return_inverse=True)[1]
    starts = np.searchsorted(codes, np.arange(codes.max() + 2))
    own = np.stack([LogisticRegression().fit(X[a:b], y[a:b]).coef_[0] if len(set(y[a:b])) > 1
                    else np.zeros(X.shape[1])
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
    parser.add_argument("--seed", type=int, default=101)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    print(facts())
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder, "table.csv"), Path(folder, "run")
        kind = table(path, options.users, options.rows, options.features, options.seed)
        print(f"{options.users:,} users x {options.rows} rows x {options.features} features, "
              f"{path.stat().st_size / 1e6:.0f} MB")
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "coterie", "fit", path, "--user", "who",
                        "--target", "y", "--out",
                        out, "--json", "--threads", str(options.threads)], check=True,
                       capture_output=True)
        ours, spent = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        run_info = json.loads((out / "run.json").read_text())
        labels = pl.read_csv(out / "models.csv")["cluster"].to_numpy()
        print(f"coterie fit: {ours:.1f} s ({spent.ru_utime + spent.ru_stime:.1f} CPU s), "
              f"{run_info['n_clusters']} groups, "
              f"adjusted Rand index {adjusted_rand_score(kind, labels):.3f}, gap "
              f"{run_info['gap']:.1e}, "
              f"report {(out / 'report.html').stat().st_size / 1e6:.2f} MB")
        start = time.perf_counter()
        theirs = simpler(path)
        seconds = time.perf_counter() - start
        print(f"scikit-learn, given K = 3: {seconds:.1f} s, adjusted Rand index "
              f"{adjusted_rand_score(kind, theirs):.3f}; coterie takes {ours / seconds:.1f} times "
              "as long")


if __name__ == "__main__":
    main()
