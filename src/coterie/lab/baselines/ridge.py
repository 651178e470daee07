"""Two one-liners of scikit-learn: a ridge per user, and one ridge with a column per user.

Penalties are chosen by cross-validation: RidgeCV (leave one out) for numbers, LogisticRegressionCV
for classes.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from coterie.base.types import Array
from coterie.data.summary import Task
from coterie.data.users import Users
from coterie.lab.baselines.central import Central, CentralFit, linear

PENALTIES = np.geomspace(1e-3, 1e4, 15)  # of squared loss summed over rows
INVERSE_PENALTIES = np.geomspace(1e-3, 1e2, 6)  # of logistic loss summed over rows
_FOLDS = 5
_UNLIKELY = -20.0  # log-probability of a class that a user has no rows of


@dataclass(frozen=True, kw_only=True)
class RidgePerUser(Central):
    """Every user's own ridge or logistic regression, each with its own penalty."""

    name: ClassVar[str] = "ridge per user"

    def _fit(self, users: Users, task: Task, n_classes: int, seed: int) -> CentralFit:
        assert users.targets is not None
        parts = [(users.features[a:b], users.targets[a:b]) for a, b in zip(
            users.offsets[:-1], users.offsets[1:], strict=True)]
        if task == "regression":
            mean = float(users.targets.mean())
            return linear(np.stack([_own_ridge(X, y, mean) for X, y in parts]))
        fitted = [_classifier(X, y, seed) for X, y in parts]

        def decide(rows: Users) -> Array:
            scores = np.zeros((rows.n_samples, n_classes))
            for i, model in enumerate(fitted):
                own = slice(rows.offsets[i], rows.offsets[i + 1])
                scores[own] = _log_probabilities(model, rows.features[own], n_classes)
            return _decisions(scores)

        return CentralFit(decide=decide, models=np.empty((users.n_users, 0)))


@dataclass(frozen=True, kw_only=True)
class OneHotRidge(Central):
    """One ridge or logistic regression for all rows, with a column for every user: shared slopes,
    own intercepts.
    """

    name: ClassVar[str] = "one-hot ridge"

    def _fit(self, users: Users, task: Task, n_classes: int, seed: int) -> CentralFit:
        from scipy import sparse
        from sklearn.linear_model import RidgeCV

        assert users.targets is not None
        n = users.n_users
        if task == "regression":
            columns = np.eye(n)[users.owner]
            fitted = RidgeCV(alphas=PENALTIES).fit(np.c_[users.features, columns], users.targets)
            slopes, own = fitted.coef_[:-n], fitted.coef_[-n:] + fitted.intercept_
            return linear(np.c_[np.tile(slopes, (n, 1)), own], f"penalty {fitted.alpha_:.3g}")

        def table(rows: Users) -> Any:
            columns = sparse.csr_array((np.ones(rows.n_samples),
                                        (np.arange(rows.n_samples), rows.owner)),
                                       shape=(rows.n_samples, n))
            return sparse.hstack([sparse.csr_array(rows.features), columns]).tocsr()

        model = _classifier(table(users), users.targets, seed)
        return CentralFit(decide=lambda rows: _decisions(_log_probabilities(model, table(rows),
            n_classes)),
                          models=np.empty((n, 0)))


def _own_ridge(X: Array, y: Array, mean: float) -> Array:
    """(w, b) of one user; a constant for users with fewer than three rows."""
    from sklearn.linear_model import RidgeCV

    if len(y) < 3:
        return np.r_[np.zeros(X.shape[1]), y.mean() if len(y) else mean]
    fitted = RidgeCV(alphas=PENALTIES).fit(X, y)
    return np.r_[fitted.coef_, fitted.intercept_]


def _classifier(X: Any, y: Array, seed: int) -> Any:
    """A logistic regression; the class itself if there is only one, None without rows."""
    from sklearn.linear_model import LogisticRegression, LogisticRegressionCV
    from sklearn.model_selection import StratifiedKFold

    if not len(y):
        return None
    classes, counts = np.unique(y, return_counts=True)
    if len(classes) == 1:
        return int(classes[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # weak penalties may need more iterations, and then lose
        if counts.min() < 2:
            return LogisticRegression(C=1.0, max_iter=300).fit(X, y)
        folds = StratifiedKFold(min(_FOLDS, int(counts.min())), shuffle=True, random_state=seed)
        return LogisticRegressionCV(Cs=INVERSE_PENALTIES, cv=folds, scoring="neg_log_loss",
                                    max_iter=300,
                                    l1_ratios=(0.0,), use_legacy_attributes=False).fit(X, y)


def _log_probabilities(model: Any, X: Any, n_classes: int) -> Array:
    """(n_rows, n_classes) of a model that may know fewer classes."""
    scores = np.full((X.shape[0], n_classes), _UNLIKELY)
    if model is None or not X.shape[0]:
        return scores
    if isinstance(model, int):
        scores[:, model] = 0.0
        return scores
    scores[:, model.classes_.astype(int)] = np.maximum(model.predict_log_proba(X), _UNLIKELY)
    return scores


def _decisions(scores: Array) -> Array:
    """Scores of classes as decisions: log-odds where there are two."""
    return scores if scores.shape[1] > 2 else np.asarray(scores[:, 1] - scores[:, 0])
