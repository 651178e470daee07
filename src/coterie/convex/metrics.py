"""Scores of predictions and of clusters; no other module imports scikit-learn's metrics.

A fit needs none of those: importing scikit-learn takes as long as a small fit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def accuracy(targets: npt.ArrayLike, predictions: npt.ArrayLike,
             sample_weight: Any = None) -> float:
    """The share of rows whose class is predicted."""
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(targets, predictions, sample_weight=sample_weight))


def explained_variance(targets: npt.ArrayLike, predictions: npt.ArrayLike,
                       sample_weight: Any = None) -> float:
    """R^2, the share of the variance explained."""
    from sklearn.metrics import r2_score

    return float(r2_score(targets, predictions, sample_weight=sample_weight))


def explained_deviance(targets: npt.ArrayLike, predictions: npt.ArrayLike,
                       sample_weight: Any = None) -> float:
    """D^2, the share of the Poisson deviance explained."""
    from sklearn.metrics import d2_tweedie_score

    return float(d2_tweedie_score(targets, predictions, sample_weight=sample_weight, power=1))


def roc_auc(targets: npt.ArrayLike, margins: npt.ArrayLike) -> float:
    """The area under the curve of true over false positives."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(targets, margins))


def adjusted_rand(labels: npt.ArrayLike, others: npt.ArrayLike) -> float:
    """How far two clusterings agree beyond chance: 1 if they are the same (Hubert and Arabie 1985).

        (together - expected) / (most - expected),      pairs that are together in both, expected by
                                                        chance, and at most
    """
    _, rows = np.unique(np.asarray(labels), return_inverse=True)
    _, columns = np.unique(np.asarray(others), return_inverse=True)
    cells = np.unique(rows * (columns.max(initial=0) + 1) + columns, return_counts=True)[1]
    in_both, in_one, in_other = (float((n * (n - 1.0)).sum()) / 2
                                 for n in (cells, np.bincount(rows), np.bincount(columns)))
    pairs = len(rows) * (len(rows) - 1.0) / 2
    expected, most = in_one * in_other / max(pairs, 1.0), (in_one + in_other) / 2
    return 1.0 if most == expected else (in_both - expected) / (most - expected)


def silhouette(points: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """How much nearer points are to their own cluster than to the next (Rousseeuw 1987), from -1 to
    1.
    """
    from sklearn.metrics import silhouette_score

    return float(silhouette_score(points, labels))
