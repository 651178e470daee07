"""Small random problems with everything that hurts: offsets, scales, single classes, no ridge, weights of all sizes."""

from __future__ import annotations

import warnings

import numpy as np

import coterie as ct

LOSSES = (ct.SquaredHinge, ct.Logistic, ct.Squared, ct.Huber, ct.Poisson, ct.Multinomial, ct.SquaredDistance,
          ct.HuberDistance)


def nasty(seed: int) -> ct.Problem:
    """A problem of one to six users; the same for the same seed."""
    rng = np.random.default_rng([seed, 77])
    kind = LOSSES[seed % len(LOSSES)]
    n, d = int(rng.choice([1, 2, 3, 4, 6])), int(rng.choice([1, 2, 3]))
    if kind is ct.Multinomial:
        n, d = min(n, 4), min(d, 2)
    counts = rng.integers(1, 10, n)
    owner = np.repeat(np.arange(n), counts)
    rows = rng.standard_normal((len(owner), d))
    margins = (rows * rng.standard_normal((n, d))[owner]).sum(axis=1) + rng.standard_normal(n)[owner]
    targets = _targets(kind, margins, owner, rng)
    rows = _disturbed(rows, rng)
    settings: dict[str, object] = {}
    if kind not in (ct.SquaredDistance, ct.HuberDistance):
        settings = {"ridge": float(rng.choice([0.0, 1e-8, 1e-3, 1e-3, 1.0, 1e3])),
                    "intercept": bool(rng.random() < 0.7)}
    if kind is ct.Multinomial:
        settings["n_classes"] = int(targets.max()) + 1
    if kind in (ct.Huber, ct.HuberDistance):
        settings["delta"] = float(10 ** rng.uniform(-3, 1))
    lam = float(rng.choice([0.0, 10 ** rng.uniform(-8, 4), 10 ** rng.uniform(-3, 0), 10 ** rng.uniform(-2, 0)]))
    points = kind in (ct.SquaredDistance, ct.HuberDistance)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ct.CoterieWarning)
        return ct.Problem(ct.Users.from_arrays(rows, None if points else targets, owner), kind(**settings), lam=lam,
                          graph=_graph(n, rng))


def _targets(kind: type[ct.Loss], margins: np.ndarray, owner: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    noisy = margins + 10 ** rng.uniform(-4, 1) * rng.standard_normal(len(margins))
    if kind in (ct.SquaredHinge, ct.Logistic):
        labels = np.where(noisy > 0, 1.0, -1.0)
        return np.where((owner == 0) & (rng.random() < 0.3), 1.0, labels)
    if kind is ct.Poisson:
        return rng.poisson(np.exp(np.clip(margins, -5, 5)) * 10 ** rng.choice([-2.0, 0.0, 3.0, 6.0])).astype(float)
    if kind is ct.Multinomial:
        classes = int(rng.choice([2, 3]))
        labels = rng.integers(0, classes, len(margins)).astype(float)
        labels[: min(classes, len(labels))] = np.arange(min(classes, len(labels)))
        return labels if labels.max() > 0 else labels + (np.arange(len(labels)) == 0)
    if rng.random() < 0.2:
        noisy = noisy + float(rng.choice([1e3, 1e6, 1e8]))
    if rng.random() < 0.1:
        noisy = np.full(len(noisy), float(rng.choice([0.0, 1.0, 1e6])))
    return np.where(rng.random(len(noisy)) < 0.1 * (rng.random() < 0.4), 1e4 * noisy, noisy)


def _disturbed(rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    draw = rng.random()
    if draw < 0.2:
        return rows * 10 ** rng.uniform(-8, 8, rows.shape[1])
    if draw < 0.35:
        return rows * 10 ** rng.uniform(-8, 8)
    if draw < 0.6:
        return rows + 10 ** rng.uniform(0, 8)
    if draw < 0.7:
        return np.round(rows)
    return rows


def _graph(n: int, rng: np.random.Generator) -> ct.Graph | None:
    pairs = np.stack(np.triu_indices(n, 1), axis=1)
    draw = rng.random()
    if n == 1 or draw < 0.4:
        return None
    if draw < 0.65:
        return ct.Graph.from_edges(n, pairs, 10 ** rng.uniform(-6, 6, len(pairs)))
    if draw < 0.85:
        kept = rng.random(len(pairs)) < 0.6
        return ct.Graph.from_edges(n, pairs[kept], 2 * rng.random(int(kept.sum())))
    weights = rng.random(len(pairs))
    return ct.Graph.from_edges(n, pairs, np.where(rng.random(len(pairs)) < 0.4, 0.0, weights))
