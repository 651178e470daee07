"""A linear regression per user, shared by the users of a group, as a scikit-learn estimator."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.utils.validation import validate_data

from coterie.base.types import Array
from coterie.convex.choice import explained_deviance, explained_variance
from coterie.estimators.classifier import Personalized


class PersonalizedRegressor(RegressorMixin, Personalized):  # type: ignore[misc]
    """A linear regression for every user; the users of a group share one. The groups are found from
    the data.

    `users` names the owner of each row, in `fit` and in all methods that predict; or `user_column`
    names the column of X with the owners. With the loss "poisson", exp(<coef, x> + intercept) is
    the mean count.

    Parameters
    ----------
    loss : "auto" or "squared"; "huber", which is robust against outliers; or "poisson" for counts.

    All other parameters and attributes are those of PersonalizedClassifier.

    Examples
    --------
    >>> from coterie.datasets import clustered
    >>> users = clustered("squared", n_users=8, samples=10, seed=0).users
    >>> owner = [users.names[i] for i in users.owner]
    >>> model = PersonalizedRegressor().fit(users.features, users.targets, users=owner)
    >>> model.score(users.features, users.targets, users=owner) > 0.5
    True
    """

    def fit(self, X: Any, y: Any, users: Any = None) -> Self:
        """Find groups and models.

        Parameters
        ----------
        X : (n_rows, n_features) numbers.
        y : (n_rows,) the targets.
        users : (n_rows,) the owner of each row; omitted where `user_column` names them.

        Returns
        -------
        The estimator itself.

        Raises
        ------
        InvalidInput : no users, or rows that cannot be used.

        Example
        -------
        >>> X, y, shops = [[0.0], [1.0], [2.0], [3.0]] * 4, [1.0, 3.1, 5.0, 6.9] * 4, ["a", "b"] * 8
        >>> PersonalizedRegressor(n_lams=4).fit(X, y, users=shops).users_.tolist()
        ['a', 'b']
        """
        X, users = self._with_owners(X, users)
        X, y = self._checked(X, y, reset=True)
        return self._fit(X, y, users, "counts" if self.loss == "poisson" else "regression")

    def predict(self, X: Any, users: Any = None) -> Array:
        """The target, or the mean count, of each row, predicted by its user's model.

        Parameters
        ----------
        X : (n_rows, n_features) numbers.
        users : (n_rows,) the owner of each row; omitted where `user_column` names them.

        Returns
        -------
        (n_rows,) the predictions.

        Raises
        ------
        InvalidInput : no users, or with unknown="error" a user without a model.

        Example
        -------
        >>> X, y, shops = [[0.0], [1.0], [2.0], [3.0]] * 4, [1.0, 3.0, 5.0, 7.0] * 4, ["a", "b"] * 8
        >>> model = PersonalizedRegressor(n_lams=4).fit(X, y, users=shops)
        >>> model.predict([[4.0]], users=["a"]).round(1).tolist()
        [9.0]
        """
        rows, models = self._with_models(X, users)
        return self.fit_.units.predict(rows, models)

    def score(self, X: Any, y: Any, users: Any = None, *, sample_weight: Any = None) -> float:
        """R^2, the share of the variance explained; for counts D^2, the share of the deviance
        explained.

        Parameters
        ----------
        X : (n_rows, n_features) numbers.
        y : (n_rows,) the targets.
        users : (n_rows,) the owner of each row; omitted where `user_column` names them.
        sample_weight : (n_rows,) how much each row counts; all alike if omitted.

        Returns
        -------
        R^2 or D^2, at most 1.

        Raises
        ------
        InvalidInput : no users, or with unknown="error" a user without a model.

        Example
        -------
        >>> X, y, shops = [[0.0], [1.0], [2.0], [3.0]] * 4, [1.0, 3.0, 5.0, 7.0] * 4, ["a", "b"] * 8
        >>> model = PersonalizedRegressor(n_lams=4).fit(X, y, users=shops)
        >>> round(model.score(X, y, users=shops), 3)
        1.0
        """
        explained = (explained_deviance if self.fit_.settings.task == "counts"
                     else explained_variance)
        return explained(y, self.predict(X, users), sample_weight)

    def _checked(self, X: Any, y: Any, reset: bool) -> tuple[Array, Array]:
        X, y = validate_data(self, X, y, reset=reset, dtype=np.float64, y_numeric=True)
        return X, y.astype(np.float64)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = self.loss == "poisson"
        return tags
