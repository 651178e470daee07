"""What a server gets that keeps everything it receives: rows rebuilt, membership, an attribute.

    python benchmarks/privacy.py            # sixty users, about ten minutes
    python benchmarks/privacy.py --quick    # twelve users

For each algorithm and shape (rows x features): the share of users with at least one row rebuilt
within one percent, then the areas under the curve of membership and of the attribute, where 0.5 is
guessing.
"""

from __future__ import annotations

import sys
import time

from machine import facts

import coterie as ct
from coterie.datasets import clustered
from coterie.lab.attacks import audit

SHAPES = ((1, 9), (10, 3), (10, 9), (20, 20), (50, 9))
NAMES = ("newton", "splitting", "pdmm", "weights", "fit", "active")
SEED = 170


def line(name: str, family: str, loss: ct.LinearLoss, n_users: int,
         privacy: ct.Privacy | None = None) -> str:
    """One row of the table; with a budget, that of the releases of a private fit."""
    cells = []
    for rows, features in SHAPES:
        users = clustered(family, n_users=n_users, samples=rows + 2 * max(rows, 10),
                          n_features=features,
                          seed=SEED).users
        result = audit(users, loss, algorithms=[] if privacy else [name], rows=[rows],
                       max_users=n_users, seed=SEED,
                       privacy=privacy)
        one = next(one for one in result.findings if one.algorithm == name)
        cells.append(one.note
                     or f"{one.exact_users:.0%}, {one.membership:.2f}, {one.attribute:.2f}")
    label = name if privacy is None or name != "release" \
        else f"release, epsilon {privacy.epsilon:g}"
    return " | ".join((f"| {label}", type(loss).__name__, *cells)) + " |"


def main() -> None:
    n_users = 12 if "--quick" in sys.argv else 60
    print(facts(), f"\n{n_users} users. Exact match rate, membership AUC, attribute AUC.\n")
    print("| | loss | " + " | ".join(f"{rows} x {features}" for rows, features in SHAPES) + " |")
    print("|---" * (2 + len(SHAPES)) + "|")
    began = time.perf_counter()
    for name in NAMES:
        print(line(name, "logistic", ct.Logistic(), n_users), flush=True)
    for name in ("newton", "fit"):
        print(line(name, "squared_hinge", ct.SquaredHinge(), n_users), flush=True)
    for name in ("newton", "fit"):
        print(line(name, "squared", ct.Squared(), n_users), flush=True)
    for epsilon, name in ((4.0, "release, no noise"), (8.0, "release"), (4.0, "release"),
                          (1.0, "release")):
        print(line(name, "logistic", ct.Logistic(), n_users, ct.Privacy(epsilon=epsilon)),
              flush=True)
    print(f"\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
