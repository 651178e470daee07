"""A federation of hospitals: the data stay local, half of the hospitals reply per round, and the
result is the same.

    python examples/hospitals.py [FOLDER]      # writes the run and its report to FOLDER

Twenty-four hospitals of two kinds predict which patients return within a month. The server never
sees patient data.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import coterie as ct


def hospitals(n: int = 24, patients: int = 80, seed: int = 0) -> tuple[ct.Users, np.ndarray]:
    rng = np.random.default_rng(seed)
    kind = np.arange(n) % 2
    effects = np.array([[1.5, 0.0, -1.0, 0.5], [-0.5, 1.5, 1.0, 0.5]])
    X = rng.normal(size=(n * patients, 4))
    owner = np.repeat(np.arange(n), patients)
    risk = 1 / (1 + np.exp(-(X * effects[kind[owner]]).sum(axis=1)))
    y = np.where(rng.random(len(risk)) < risk, 1.0, -1.0)
    names = [f"hospital {i:02d}" for i in owner]
    return ct.Users.from_arrays(X, y, names, feature_names=["age", "stay", "visits", "pressure"]), \
        kind


def main(folder: str = ".") -> None:
    users, kind = hospitals()
    loss = ct.Logistic(ridge=1e-3)

    # One round of local models gives the weights (which hospitals are similar) and a range of lam;
    # then the path.
    path = ct.federate_path(users, loss, graph="wald", participation=0.5, n_lams=8, seed=0)
    print("lam and number of groups:", ", ".join(f"{s.lam:.3g}: {s.n_clusters}" for s in path.runs))

    two = [s for s in path.runs if s.n_clusters == 2][-1]
    print("two groups, the true kinds:", len(set(zip(two.labels, kind, strict=True))) == 2)

    # The same with late and lost replies; certified by one round of a few numbers per hospital.
    run = ct.federate(users, loss, two.lam, graph="wald", participation=0.5, seed=1,
                      faults=ct.Faults(drop=0.1, late=0.2))
    print(f"{run.n_clusters} groups after {run.n_rounds} rounds, certified: {run.gap < 1e-6}")
    print(f"{run.ledger.bytes_up:,} bytes from the hospitals, {run.ledger.bytes_down:,} to them")

    central = ct.solve(ct.Problem(users, loss, two.lam, run.problem.graph))
    difference = np.abs(run.models - central.models).max() / np.abs(central.models).max()
    print(f"same groups as with pooled data: {(run.labels == central.labels).all()}, models within "
          f"{difference:.0e}")

    out = ct.save_run(run, Path(folder) / "hospitals", title="Twenty-four hospitals",
                      overwrite=True)
    print(f"Report: {out / 'report.html'}")


if __name__ == "__main__":
    main(*sys.argv[1:])
