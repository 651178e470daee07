"""Seconds to import coterie, and to a first solve, in a new process with the Numba cache warm.

    python benchmarks/startup.py
"""

from __future__ import annotations

import subprocess
import sys

from machine import facts

REPEATS = 5
IMPORT = "import coterie"
SOLVE = """
import coterie as ct
from coterie.datasets import ellipses
ct.solve(ct.Problem(ellipses(users_per_cluster=20).users, ct.SquaredHinge(ridge=1e-3), lam=0.09))
"""
KNN = """
import coterie as ct
from coterie.datasets import two_moons
points = two_moons(1000).users.features
ct.solve(ct.Problem(ct.Users.from_arrays(points), ct.SquaredDistance(), lam=1.0,
                    graph=ct.Graph.knn(points, k=10, decay=0.5)), tol=1e-6)
"""


def seconds(code: str) -> float:
    """Wall-clock seconds of the code in a new process, without those of starting Python: the best
    of several runs.
    """
    timed = f"import time\nbegan = time.perf_counter()\n{code}\nprint(time.perf_counter() - began)"
    runs = [subprocess.run([sys.executable, "-c", timed], check=True, capture_output=True,
                           text=True).stdout
            for _ in range(REPEATS + 1)]
    return min(map(float, runs[1:]))  # the first fills the cache


def main() -> None:
    print(facts())
    print(f"new process, warm Numba cache, best of {REPEATS}")
    for what, code in (("import coterie", IMPORT), ("import and first solve, squared hinge, 60 "
                                                    "users", SOLVE),
                       ("import and first solve, kNN graph, 1000 points", KNN)):
        print(f"{what:<48} {seconds(code):>6.2f} s")


if __name__ == "__main__":
    main()
