"""Clusters of points, as a scikit-learn estimator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClusterMixin
from sklearn.utils.validation import validate_data

from coterie.base.errors import InvalidInput
from coterie.convex.choice import by_clusters
from coterie.data.users import Users
from coterie.estimators.shared import fit_quietly, keep, settings_of
from coterie.fitting import Fit, Settings
from coterie.solvers import solve_quietly

_HALVINGS = 20


class ConvexClustering(ClusterMixin, BaseEstimator):  # type: ignore[misc]
    """Clusters of points, one per row, from one convex problem, whose solution is unique and
    certified.

        minimise   sum_i 1/2 ||x_i - a_i||^2 + lam * sum_{i<j} w_ij ||x_i - x_j||

    Points with equal x form a cluster.

    Parameters
    ----------
    n_clusters : largest number of clusters; the least lam with so few is taken. If None, set by
        lam.
    lam : penalty strength >= 0; "auto" takes the clusters that persist longest along the path.
    weights : "auto" or "gaussian", "inverse" connect each point with its k nearest; "unit" gives
        all pairs weight 1.
    loss : "auto" or "squared_distance", as above; or "huber_distance", which is robust against
        outliers.
    k : number of nearest points that each point is connected with.
    n_lams : number of points of the path.
    tol : certified relative gap to reach.
    standardize : whether features are standardised first.
    random_state : not used; here as in other clusterers of scikit-learn.

    Attributes
    ----------
    labels_, n_clusters_ : (n_points,) the cluster of each point, from 0; and the number of
        clusters.
    cluster_centers_ : (n_clusters_, n_features) the centre of each cluster's points, without the
        fusion penalty.
    lam_, gap_ : penalty strength, and the certified relative gap.
    fit_, path_, solution_ : all other results; `path_.linkage` is the tree.

    Examples
    --------
    >>> ConvexClustering(n_clusters=2).fit_predict([[0.0, 0.0], [0.1, 0.0], [5.0, 5.0],
    ...                                             [5.0, 5.1]]).tolist()
    [0, 0, 1, 1]
    """

    def __init__(self, n_clusters: int | None = None, *, lam: Any = Settings.lam,
                 weights: str = Settings.weights, loss: str = Settings.loss, k: int = Settings.k,
                 n_lams: int = Settings.n_lams, tol: float = Settings.tol,
                 standardize: bool = False, random_state: Any = Settings.seed) -> None:
        self.n_clusters = n_clusters
        self.lam = lam
        self.weights = weights
        self.loss = loss
        self.k = k
        self.n_lams = n_lams
        self.tol = tol
        self.standardize = standardize
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None) -> Self:
        """Find the clusters among the rows of X.

        Parameters
        ----------
        X : (n_points, n_features) one point per row.
        y : not used.

        Returns
        -------
        The estimator itself.

        Raises
        ------
        InvalidInput : n_clusters is no whole number >= 1, or both n_clusters and lam are given.

        Example
        -------
        >>> ConvexClustering(n_clusters=2).fit([[0.0], [0.1], [5.0],
        ...                                     [5.1]]).cluster_centers_.round(2).tolist()
        [[0.05], [5.05]]
        """
        wanted = self.n_clusters
        if wanted is not None and (isinstance(wanted, bool)
                                   or not isinstance(wanted, (int, np.integer)) or wanted < 1):
            raise InvalidInput(f"n_clusters must be a whole number >= 1 or None, got {wanted!r}",
                               remedy="Use None")
        if wanted is not None and not isinstance(self.lam, str):
            raise InvalidInput("both n_clusters and lam are given", remedy="Leave out one of them")
        X = validate_data(self, X, dtype=np.float64)
        users = Users.from_arrays(X, feature_names=getattr(self, "feature_names_in_", None))
        fitted = fit_quietly(users, settings_of(self, "clustering"))
        if wanted is not None:
            fitted = _choose_clusters(fitted, wanted)
        keep(self, fitted)
        self.cluster_centers_ = fitted.units.coefficients(fitted.centres)[..., 0]
        return self


def _choose_clusters(fitted: Fit, n_clusters: int) -> Fit:
    """At the least lam with at most so many clusters; where the path steps over the number, the
    step is halved.
    """
    choice = by_clusters(fitted.path.problem, n_clusters, path=fitted.path)
    solution, points = choice.solution, list(fitted.path.solutions)
    low = max((s.lam for s in points if s.lam < solution.lam), default=0.0)
    for _ in range(_HALVINGS):
        if solution.n_clusters == n_clusters:
            break
        middle = 0.5 * (low + solution.lam)
        tried = solve_quietly(solution.problem.with_lam(middle), tol=fitted.settings.tol,
                              start=solution)
        if tried.n_clusters > n_clusters:
            low = middle
        else:
            solution = tried
    if solution is choice.solution:
        # Once more, for its duals.
        solution = solve_quietly(solution.problem, tol=fitted.settings.tol, start=solution)
        points[points.index(choice.solution)] = solution
    else:
        points.append(solution)
    points.sort(key=lambda s: s.lam)
    return replace(fitted, solution=solution, path=replace(fitted.path, solutions=tuple(points)),
                   chosen=points.index(solution),
                   why=f"{solution.n_clusters} of at most {n_clusters} clusters.")
