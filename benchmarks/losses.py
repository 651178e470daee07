"""Seconds for all gradients and all Hessians of 10,000 users, 10 samples and 10 features each, on
one core.

    python benchmarks/losses.py

The last two columns compare with a Python loop that evaluates one user at a time, timed on 200
users and scaled up.
"""

from __future__ import annotations

import os
from functools import partial

for library in ("OPENBLAS", "OMP", "MKL"):  # before NumPy is imported, which reads them once
    os.environ[f"{library}_NUM_THREADS"] = "1"

import numpy as np  # noqa: E402
from machine import best_of, facts  # noqa: E402

from coterie import LOSSES, Loss, Users  # noqa: E402
from coterie.datasets import FAMILIES, clustered, gaussian_mixture  # noqa: E402
from coterie.losses import Samples  # noqa: E402

N_USERS, SAMPLES, N_FEATURES, LOOPED, REPEATS = 10_000, 10, 10, 200, 5


def users_for(name: str) -> Users:
    """Users whose targets suit the loss."""
    if name in FAMILIES:
        return clustered(name, n_users=N_USERS, samples=SAMPLES, n_features=N_FEATURES,
                         test_samples=1).users
    points = gaussian_mixture(N_USERS * SAMPLES, n_features=N_FEATURES).users.features
    return Users.from_arrays(points, user=np.repeat(np.arange(N_USERS), SAMPLES))


def loop(loss: Loss, alone: list[Samples], models: np.ndarray, order: int) -> None:
    """The same numbers, one user at a time."""
    for i, own in enumerate(alone):
        loss.evaluate(own, models[i: i + 1], order)


def main() -> None:
    print(facts())
    print(f"{N_USERS:,} users, {SAMPLES} samples and {N_FEATURES} features each; best of {REPEATS}")
    print(f"{'loss':<17} {'length of':>9} {'gradients':>10} {'+ Hessians':>10} "
          f"{'loop / gradients':>17} "
          f"{'loop / + Hessians':>18}")
    print(f"{'':<17} {'a model':>9} {'s':>10} {'s':>10}")
    for name, kind in LOSSES.items():
        users, loss = users_for(name), kind()
        samples = loss.prepare(users)
        models = 0.1 * np.random.default_rng(0).standard_normal((N_USERS, samples.dim))
        # The number of classes is a property of all users together, so it is set in each user's
        # loss.
        single = kind(n_classes=3) if name == "multinomial" else loss
        alone = [single.prepare(users.take([i])) for i in range(LOOPED)]
        together = [best_of(REPEATS, partial(loss.evaluate, samples, models, order))
                    for order in (1, 2)]
        looped = [best_of(REPEATS, partial(loop, single, alone, models, order)) for order in (1, 2)]
        ratios = [N_USERS / LOOPED * slow / fast for slow,
                  fast in zip(looped, together, strict=True)]
        print(f"{name:<17} {samples.dim:>9} {together[0]:>10.4f} {together[1]:>10.4f} "
              f"{ratios[0]:>17.0f} "
              f"{ratios[1]:>18.0f}")


if __name__ == "__main__":
    main()
