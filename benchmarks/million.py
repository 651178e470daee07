"""A million points in R^7 and their ten nearest neighbours, solved and certified: `python
benchmarks/million.py`.

Points of twenty normal clusters; the time of the graph and of the solve, the certified gap and the
peak memory (about 3.5 GiB) are printed. `--points` and `--seed` change the data; the default seed
is a fresh one.
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np
from machine import facts

import coterie as ct

DIM, K, LAM, TOL = 7, 10, 5.0, 1e-6


def problem(n: int, seed: int) -> tuple[ct.Problem, float]:
    """The problem, and the seconds that its graph took."""
    rng = np.random.default_rng(seed)
    points = 4.0 * rng.normal(size=(20, DIM))[rng.integers(0, 20, n)] + rng.normal(size=(n, DIM))
    began = time.perf_counter()
    graph = ct.Graph.knn(points, k=K, decay=0.5)
    seconds = time.perf_counter() - began
    return ct.Problem(ct.Users.from_arrays(points), ct.SquaredDistance(), lam=LAM, graph=graph), \
        seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--points", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=101)
    options = parser.parse_args()
    print(facts())
    ct.solve(problem(500, 0)[0], tol=TOL)  # compiles
    many, seconds = problem(options.points, options.seed)
    print(f"{options.points:,} points, {many.graph.n_edges:,} edges: graph {seconds:.0f} s",
          flush=True)
    began = time.perf_counter()
    solution = ct.solve(many, tol=TOL)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"solved in {time.perf_counter() - began:.0f} s, certified gap {solution.gap:.1e}, "
          f"{solution.n_clusters:,} groups, {peak:.1f} GiB")


if __name__ == "__main__":
    main()
