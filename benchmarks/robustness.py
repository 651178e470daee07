"""How much bad users can do: the honest users' test accuracy when some labels are flipped, or some
data are absurd.

    python benchmarks/robustness.py

The paper's data, sixty users of three kinds. A user's pull on any other is at most lam w_ij,
whatever it holds; under the pooled model and the squared penalty it grows without limit. IFCA is
given the number of kinds.
"""

from __future__ import annotations

import warnings

import numpy as np
from machine import facts

import coterie as ct
from coterie.convex.choice import refit
from coterie.datasets import ellipses

LAMS, GAMMAS, SEEDS = (0.01, 0.02, 0.05, 0.08), (1e-4, 1e-3, 1e-2, 1e-1), range(5)


def spoilt(users: ct.Users, bad: np.ndarray, how: str) -> ct.Users:
    rows = bad[users.owner]
    features = np.where(rows[:, None] & (how == "absurd"), 100.0 * users.features, users.features)
    return ct.Users.from_arrays(features, np.where(rows, -users.targets, users.targets),
                                users.owner)


def squared_penalty(problem: ct.Problem, gamma: float) -> np.ndarray:
    """minimise sum_i f_i(x_i) + gamma/2 sum_{i<j} ||x_i - x_j||^2 by Newton's method with halved
    steps.
    """
    n, d = problem.n_users, problem.dim
    pull = gamma * np.kron(n * np.eye(n) - 1.0, np.eye(d))
    x = np.zeros((n, d))

    def value(x: np.ndarray) -> float:
        return problem.values(x).sum() + 0.5 * x.ravel() @ pull @ x.ravel()

    for _ in range(60):
        _, g, h = problem.loss.evaluate(problem.samples, x)
        gradient = g.ravel() + pull @ x.ravel()
        system = pull.copy()
        for i in range(n):
            system[i * d:(i + 1) * d, i * d:(i + 1) * d] += h[i]
        step = -np.linalg.solve(system + 1e-10 * np.eye(n * d), gradient).reshape(n, d)
        size = 1.0
        while size > 1e-8 and value(x + size * step) > value(x):
            size *= 0.5
        x = x + size * step
        if -gradient @ step.ravel() < 1e-12:
            break
    return x


def ifca(problem: ct.Problem, k: int, rng: np.random.Generator) -> np.ndarray:
    """Assign every user to the cluster model that fits it best, average again; the best of five
    starts.
    """
    local = problem.loss.prox(problem.samples, None, 1e-3, None).points
    best, least = local, np.inf
    for _ in range(5):
        models = local[rng.choice(problem.n_users, k, replace=False)]
        for _ in range(20):
            losses = np.stack([problem.values(np.tile(m, (problem.n_users, 1))) for m in models])
            labels = losses.argmin(axis=0)
            fitted = refit(problem, labels)
            models = np.stack([fitted[labels == c][0] if (labels == c).any() else models[c]
                               for c in range(k)])
        if losses.min(axis=0).sum() < least:
            best, least = models[labels], losses.min(axis=0).sum()
    return best


def main() -> None:
    warnings.simplefilter("ignore", ct.CoterieWarning)
    print(facts())
    print("mean test accuracy of the honest users over five seeds; lam and gamma for a seed are "
          "those that do best on\n"
          "the others")
    print(f"{'spoilt':>8} {'users':>6} | {'coterie':>8} {'pooled':>8} {'squared':>8} "
          f"{'IFCA, K=3':>9}")
    for how in ("flipped", "absurd"):
        for share in (0.0, 0.1, 0.2, 0.3, 0.4):
            scores = {"coterie": np.zeros((len(SEEDS), len(LAMS))),
                      "squared": np.zeros((len(SEEDS), len(GAMMAS))),
                      "pooled": np.zeros((len(SEEDS), 1)), "ifca": np.zeros((len(SEEDS), 1))}
            for row, seed in enumerate(SEEDS):
                rng, data = np.random.default_rng(seed), ellipses(seed=seed)
                bad = np.zeros(60, dtype=bool)
                bad[rng.choice(60, round(share * 60), replace=False)] = True
                problem = ct.Problem(spoilt(data.users, bad, how), ct.SquaredHinge(ridge=1e-3),
                                     lam=1.0)

                def honest(models: np.ndarray, problem=problem, data=data, bad=bad) -> float:
                    right = problem.loss.predict(data.test.features, models[data.test.owner]) \
                        == data.test.targets
                    return float(right[~bad[data.test.owner]].mean())

                scores["coterie"][row] = [honest(ct.solve(problem.with_lam(lam), tol=1e-5).models)
                                          for lam in LAMS]
                scores["squared"][row] = [honest(squared_penalty(problem, gamma))
                                          for gamma in GAMMAS]
                scores["pooled"][row] = honest(refit(problem, np.zeros(60)))
                scores["ifca"][row] = honest(ifca(problem, 3, rng))
            means = {}
            # The setting for a seed is the best of the other seeds.
            for name, table in scores.items():
                others = (table.sum(axis=0) - table).argmax(axis=1)
                means[name] = table[np.arange(len(SEEDS)), others].mean()
            print(f"{how:>8} {share:6.0%} | {means['coterie']:8.1%} {means['pooled']:8.1%} "
                  f"{means['squared']:8.1%} "
                  f"{means['ifca']:9.1%}", flush=True)


if __name__ == "__main__":
    main()
