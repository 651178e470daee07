"""Seconds to load and check 100,000 users with 10 rows each, from every kind of source.

    python benchmarks/loading.py

Rows come shuffled, so that grouping them by user is part of the work. Every source must give the
same users.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
from machine import best_of, facts

from coterie import Users

N_USERS, ROWS, N_FEATURES, REPEATS = 100_000, 10, 10, 3


def check(users: Users, expected: Users, source: str) -> None:
    """Refuse to time what loads something else."""
    same = (users.n_users == N_USERS and (users.counts == ROWS).all()
            and np.array_equal(users.features, expected.features)
            and np.array_equal(users.targets, expected.targets))
    if not same:
        raise SystemExit(f"{source} gave other users: {users!r} instead of {expected!r}")


def main() -> None:
    print(facts())
    print(f"{N_USERS:,} users, {ROWS} rows each, {N_FEATURES} features and a target; best of "
          f"{REPEATS}")
    rng = np.random.default_rng(0)
    owner = rng.permutation(np.repeat(np.arange(N_USERS), ROWS))
    # Four decimals, so that a text file holds the same numbers as memory.
    features = np.round(rng.standard_normal((owner.size, N_FEATURES)), 4)
    targets = rng.choice([-1.0, 1.0], owner.size)
    text = np.array([f"user-{i:06d}" for i in range(N_USERS)], dtype=object)[owner]
    columns = {"user": text.tolist()} | {f"x{j}": features[:, j] for j in range(N_FEATURES)} \
        | {"y": targets}
    frame = pl.DataFrame(columns)
    pandas = pd.DataFrame(columns)
    expected = Users.from_arrays(features, targets, owner)
    with tempfile.TemporaryDirectory() as folder:
        csv, parquet = Path(folder, "users.csv"), Path(folder, "users.parquet")
        frame.write_csv(csv)
        frame.write_parquet(parquet)
        sources: dict[str, Callable[[], Users]] = {
            "arrays, integer names": lambda: Users.from_arrays(features, targets, owner),
            "arrays, text names": lambda: Users.from_arrays(features, targets, text),
            "pandas frame": lambda: Users.from_frame(pandas, user="user", target="y"),
            "polars frame": lambda: Users.from_frame(frame, user="user", target="y"),
            f"CSV, {csv.stat().st_size / 2**20:.0f} MiB": lambda: Users.from_csv(csv, user="user",
                target="y"),
            f"Parquet, {parquet.stat().st_size / 2**20:.0f} MiB":
                lambda: Users.from_parquet(parquet, user="user", target="y"),
        }
        for source, load in sources.items():
            check(load(), expected, source)
            print(f"{source:<24} {best_of(REPEATS, load):>7.2f} s")


if __name__ == "__main__":
    main()
