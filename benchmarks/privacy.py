"""What a server gets that keeps everything it receives: rows rebuilt, membership, an attribute.

    python benchmarks/privacy.py            # sixty users, about ten minutes
    python benchmarks/privacy.py --quick    # twelve users

For each algorithm and shape (rows x features): the share of users with at least one row rebuilt within one percent,
then the areas under the curve of membership and of the attribute, where 0.5 is guessing.
"""

from __future__ import annotations

import sys
import time

from machine import facts

import coterie as ct
from coterie.datasets import clustered
from coterie.privacy.audit import audit

SHAPES = ((1, 9), (10, 3), (10, 9), (20, 20), (50, 9))
NAMES = ("newton", "splitting", "pdmm", "weights", "fit", "active")
SEED = 170


def line(name: str, family: str, loss: ct.LinearLoss, n_users: int, shapes: tuple[tuple[int, int], ...]) -> str:
    """One row of the table."""
    cells = []
    for rows, features in shapes:
        users = clustered(family, n_users=n_users, samples=rows + 2 * max(rows, 10), n_features=features,
                          seed=SEED).users
        one = audit(users, loss, algorithms=[name], rows=[rows], max_users=n_users, seed=SEED).findings[0]
        cells.append(one.note or f"{one.exact_users:.0%}, {one.membership:.2f}, {one.attribute:.2f}")
    return " | ".join((f"| {name}", type(loss).__name__, *cells)) + " |"


def main() -> None:
    n_users = 12 if "--quick" in sys.argv else 60
    print(facts(), f"\n{n_users} users. Exact match rate, membership AUC, attribute AUC.\n")
    print("| | loss | " + " | ".join(f"{rows} x {features}" for rows, features in SHAPES) + " |")
    print("|---" * (2 + len(SHAPES)) + "|")
    began = time.perf_counter()
    for name in NAMES:
        print(line(name, "logistic", ct.Logistic(), n_users, SHAPES), flush=True)
    for name in ("newton", "fit"):
        print(line(name, "squared_hinge", ct.SquaredHinge(), n_users, SHAPES), flush=True)
    for name in ("newton", "fit"):
        print(line(name, "squared", ct.Squared(), n_users, SHAPES), flush=True)
    print(f"\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
