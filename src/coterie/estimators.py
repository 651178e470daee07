"""scikit-learn estimators: one linear model per user, shared by the users of a group, and clusters of points.

    model = PersonalizedClassifier().fit(X, y, users=owner)     # model.labels_, model.coef_, model.gap_
    model.predict(X_new, users=owner_new)

`coterie.fitting` does the work: it standardises features, finds groups and lam, and certifies the result. An unknown
user gets the pooled model, and after `personalize` a separate model.
"""

from __future__ import annotations

import warnings
from dataclasses import fields, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, ClassifierMixin, ClusterMixin, RegressorMixin
from sklearn.exceptions import ConvergenceWarning as SklearnConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted, validate_data

from coterie._typing import Array
from coterie.analysis.metrics import accuracy, explained_deviance, explained_variance
from coterie.analysis.select import by_clusters
from coterie.data.encoding import Task
from coterie.data.users import Users
from coterie.data.validation import Rows, group, show
from coterie.errors import ConvergenceWarning, CoterieWarning, InvalidInput
from coterie.fitting import Fit, Settings, fit
from coterie.fitting.predictions import models_by_name
from coterie.newcomers import Joined
from coterie.solution import Status
from coterie.solvers import solve_quietly

#: The one user of a fit without users.
EVERYONE = "(everyone)"
#: Parameters whose name is another one in `Settings`.
RENAMED = {"most": "max_groups"}
_HALVINGS = 20


def _settings(estimator: Any, task: Task) -> Settings:
    """The estimator's parameters as settings; rows are held out where lam is chosen by them."""
    names = {field.name for field in fields(Settings)}
    given = {RENAMED.get(name, name): value for name, value in estimator.get_params(deep=False).items()}
    given = {name: value for name, value in given.items() if name in names}
    if given.get("holdout", 0.0) is None:
        lam, weights = given["lam"], given["weights"]
        by_rows = isinstance(lam, str) and (lam == "score" or weights != "auto")
        given["holdout"] = Settings.holdout if by_rows else 0.0
    seed = estimator.random_state
    if not isinstance(seed, (int, np.integer)):
        seed = check_random_state(seed).randint(2**31 - 1)
    return Settings(**{"holdout": 0.0, **given}, task=task, seed=int(seed))


class EstimatorConvergenceWarning(ConvergenceWarning, SklearnConvergenceWarning):  # type: ignore[misc]
    """An estimator's solution did not reach `tol`. It is coterie's and scikit-learn's: filters for either apply."""


def _fit_quietly(users: Users, settings: Settings) -> Fit:
    """The fit; one warning, by `_keep`, replaces those of its parts."""
    with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):
        return fit(users, settings)


def _keep(estimator: Any, fitted: Fit, stacklevel: int = 3) -> None:
    if fitted.solution.status is not Status.CONVERGED:
        warnings.warn(f"relative gap {fitted.gap:.1e} at tol = {fitted.settings.tol:g}. "
                      f"{fitted.solution.status.value}", EstimatorConvergenceWarning, stacklevel=stacklevel)
    estimator.fit_, estimator.path_, estimator.solution_ = fitted, fitted.path, fitted.solution
    estimator.labels_, estimator.n_clusters_ = fitted.labels, fitted.n_clusters
    estimator.gap_, estimator.lam_ = fitted.gap, fitted.solution.lam


class _Personalized(BaseEstimator):  # type: ignore[misc]
    """What both estimators share: users, groups and newcomers."""

    # With metadata routing, `users` is passed on by default; set_..._request changes this.
    __metadata_request__fit = {"users": True}  # noqa: RUF012
    __metadata_request__predict = {"users": True}  # noqa: RUF012
    __metadata_request__score = {"users": True}  # noqa: RUF012

    def __init__(self, *, lam: Any = Settings.lam, weights: str = Settings.weights, loss: str = Settings.loss,
                 ridge: float = Settings.ridge, n_lams: int = Settings.n_lams, most: int | None = Settings.max_groups,
                 k: int = Settings.k, tol: float = Settings.tol, holdout: float | None = None,
                 standardize: bool = Settings.standardize, unknown: str = "together",
                 random_state: Any = Settings.seed, count: str = Settings.count) -> None:
        self.lam = lam
        self.weights = weights
        self.count = count
        self.loss = loss
        self.ridge = ridge
        self.n_lams = n_lams
        self.most = most
        self.k = k
        self.tol = tol
        self.holdout = holdout
        self.standardize = standardize
        self.unknown = unknown
        self.random_state = random_state

    def _fit(self, X: Array, y: Array, users: Any, task: Task) -> Self:
        """Fit to checked rows, and targets as numbers."""
        self._check_unknown()
        columns = getattr(self, "feature_names_in_", None)
        rows = _rows(users, len(X))
        data = Users.from_arrays(X, y, [rows.names[i] for i in rows.codes], feature_names=columns)
        with warnings.catch_warnings():  # the model of a user with one class is determined by its group
            warnings.filterwarnings("ignore", ".*samples of one class only", CoterieWarning)
            _keep(self, _fit_quietly(data, _settings(self, task)), stacklevel=4)
        self.users_ = np.fromiter(data.names, dtype=object, count=data.n_users)
        self.newcomers_: dict[Any, Array] = {}
        self.scores_ = self.fit_.scores
        coefficients = self.fit_.coefficients.transpose(0, 2, 1)
        if coefficients.shape[1] == 2:  # two classes in the symmetric form
            coefficients = coefficients[:, 1:] - coefficients[:, :1]
        self.coef_, self.intercept_ = (part[:, 0] if coefficients.shape[1] == 1 else part
                                       for part in (coefficients[..., :-1], coefficients[..., -1]))
        return self

    def personalize(self, X: Any, y: Any, users: Any) -> Joined:
        """Find models for newcomers from a few rows; the models of all other users do not change.

        `predict` then knows the newcomers. A newcomer given again gets a new model from the new rows only.

        Parameters
        ----------
        X, y : rows and targets of the newcomers.
        users : the owner of each row; none of them a user of `fit`.

        Returns
        -------
        Joined : models, and the group that each newcomer joins; -1 for the unassigned, whose model lies
            between their own rows and the nearest group.

        Raises
        ------
        InvalidInput : no names, or a name that `fit` knows.
        """
        check_is_fitted(self)
        if users is None:
            raise InvalidInput("newcomers need names", remedy="Give users, the owner of each row")
        X, y = self._checked(X, y, reset=False)
        rows = _rows(users, len(X))
        known = sorted(set(rows.names) & set(self.users_), key=rows.names.index)
        if known:
            raise InvalidInput("newcomers must not be among the users of fit", where=f"user {show(*known)}",
                               remedy="Call fit again with all of their rows")
        newcomers = Users.from_arrays(X, y, [rows.names[i] for i in rows.codes])
        newcomers = replace(newcomers, feature_names=self.fit_.units.feature_names)
        joined = self.fit_.personalize(newcomers)
        self.newcomers_ = {**self.newcomers_, **dict(zip(newcomers.names, joined.models, strict=True))}
        return joined

    def _checked(self, X: Any, y: Any, reset: bool) -> tuple[Array, Array]:
        raise NotImplementedError

    def _check_unknown(self) -> None:
        if self.unknown not in ("together", "error"):
            raise InvalidInput(f"unknown must be 'together' or 'error', got {self.unknown!r}", remedy="Use 'together'")

    def _with_models(self, X: Any, users: Any) -> tuple[Array, Array]:
        """Checked rows, and (n_rows, dim) the model of each one's user."""
        check_is_fitted(self)
        self._check_unknown()
        X = validate_data(self, X, reset=False, dtype=np.float64)
        rows, names = _rows(users, len(X)), [*self.users_, *self.newcomers_]
        known = np.vstack([self.fit_.models, *self.newcomers_.values()])
        models, index = models_by_name(rows.names, names, known, self.fit_.together)
        unknown = [rows.names[i] for i in np.flatnonzero(index < 0)]
        if unknown and users is None:
            if self.unknown == "error":
                raise InvalidInput("the models belong to users, and none are given",
                                   remedy="Give users, the owner of each row")
            warnings.warn("no users are given: the pooled model predicts all rows. Give users, the owner of each row.",
                          CoterieWarning, stacklevel=3)
        elif unknown:
            texts = {str(name): name for name in names}
            twin = next((name for name in unknown if str(name) in texts), None)
            if twin is not None:
                raise InvalidInput(f"there is no user {show(twin)}, but there is {show(texts[str(twin)])}",
                                   remedy="Give names of the type that fit was given")
            if self.unknown == "error":
                raise InvalidInput(f"there is no model for {len(unknown)} user(s)", where=f"user {show(*unknown)}",
                                   remedy="Call personalize with a few of their rows, or set unknown='together'")
        return X, models[rows.codes]


def _rows(users: Any, n_rows: int) -> Rows:
    rows = group([EVERYONE] * n_rows if users is None else users)
    if len(rows.codes) != n_rows:
        raise InvalidInput(f"X has {n_rows} rows and users has {len(rows.codes)} values", remedy="Pass one name a row")
    return rows


def _has_probabilities(classifier: Any) -> bool:
    return classifier.loss != "squared_hinge"


class PersonalizedClassifier(ClassifierMixin, _Personalized):  # type: ignore[misc]
    """A linear classifier for every user; the users of a group share one. The groups are found from the data.

    `users` names the owner of each row. Without it all rows belong to one user, and this is an ordinary linear
    classifier.

    Parameters
    ----------
    lam : penalty strength >= 0; "auto" takes the groups found (with weights other than "auto", it is the same as
        "score"); "score" takes the least mean loss on held-out rows.
    weights : "auto" makes weights from the groups found; "unit" gives all pairs weight 1; "wald", "gaussian" and
        "inverse" connect each user with its k nearest.
    loss : "auto" or "logistic"; "squared_hinge", for two classes and without probabilities; or "multinomial", which
        is used for more than two classes in any case.
    ridge : L2 strength, intercept included.
    n_lams : number of points of the path.
    most : largest number of groups; None: no limit.
    k : number of nearest users that each user is connected with.
    tol : certified relative gap to reach.
    holdout : share of every user's rows held out for `scores_`; if None, rows are held out only where lam is chosen
        by them.
    standardize : whether features are standardised, with mean and standard deviation of all rows of `fit`.
    unknown : what unknown users get: "together" the pooled model, "error" an exception.
    random_state : seed of the held-out rows.
    count : what counts alike in the model of a group, "rows" or "users".

    Attributes
    ----------
    users_ : (n_users,) their names, sorted if possible.
    labels_, n_clusters_ : (n_users,) the group of each user, from 0; and the number of groups.
    classes_ : the classes, sorted.
    coef_, intercept_ : (n_users, n_features) and (n_users,), with more than two classes (n_users, n_classes,
        n_features) and (n_users, n_classes); in the units of X and in the order of `users_`.
    lam_, gap_ : penalty strength, and the certified relative gap.
    scores_ : scores on held-out rows, or None.
    newcomers_ : names and models (in the solver's units) of the users added by `personalize`.
    fit_, path_, solution_ : all other results. They contain the rows of `fit`, and so does a pickle.

    Examples
    --------
    >>> from coterie.datasets import clustered
    >>> users = clustered("logistic", n_users=8, samples=30, seed=0).users
    >>> owner = [users.names[i] for i in users.owner]
    >>> model = PersonalizedClassifier().fit(users.features, users.targets, users=owner)
    >>> model.predict(users.features, users=owner).shape == users.targets.shape
    True
    """

    __metadata_request__predict_proba = {"users": True}  # noqa: RUF012
    __metadata_request__decision_function = {"users": True}  # noqa: RUF012

    def fit(self, X: Any, y: Any, users: Any = None) -> Self:
        """Find groups and models.

        Parameters
        ----------
        X : (n_rows, n_features) numbers.
        y : (n_rows,) the classes.
        users : (n_rows,) the owner of each row; None for one user.
        """
        X, codes = self._checked(X, y, reset=True)
        return self._fit(X, codes, users, "classification")

    def decision_function(self, X: Any, users: Any = None) -> Array:
        """(n_rows,) positive for the second class; (n_rows, n_classes) with more than two."""
        rows, models = self._with_models(X, users)
        t = self.fit_.units.margins(rows, models)
        return t[:, 1] - t[:, 0] if t.ndim == 2 and t.shape[1] == 2 else t

    def predict(self, X: Any, users: Any = None) -> npt.NDArray[Any]:
        """The class of each row, predicted by its user's model."""
        t = self.decision_function(X, users)
        return self.classes_[t.argmax(axis=1) if t.ndim == 2 else (t > 0).astype(np.int64)]

    @available_if(_has_probabilities)  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any, users: Any = None) -> Array:
        """(n_rows, n_classes) the probability of each class, in the order of `classes_`."""
        rows, models = self._with_models(X, users)
        return self.fit_.units.probabilities(rows, models)

    def score(self, X: Any, y: Any, users: Any = None, *, sample_weight: Any = None) -> float:
        """The accuracy: the share of rows whose class is predicted."""
        return accuracy(y, self.predict(X, users), sample_weight)

    def _checked(self, X: Any, y: Any, reset: bool) -> tuple[Array, Array]:
        X, y = validate_data(self, X, y, reset=reset, dtype=np.float64)
        check_classification_targets(y)
        if reset:
            self.classes_ = np.unique(y)
            if len(self.classes_) > 2 and self.loss == "squared_hinge":
                raise InvalidInput("Only binary classification is supported by the squared hinge. The type of the "
                                   f"target is {type_of_target(y)}", remedy="Use the loss 'logistic'")
        codes = np.clip(np.searchsorted(self.classes_, y), 0, len(self.classes_) - 1)
        new = np.flatnonzero(self.classes_[codes] != y)
        if new.size:
            raise InvalidInput(f"y has the class {show(y[new[0]])}, which fit has not seen", where=f"row {new[0]}",
                               remedy=f"The classes are {show(*self.classes_)}; call fit again to add one")
        return X, codes.astype(np.float64)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = self.loss != "squared_hinge"
        return tags


class PersonalizedRegressor(RegressorMixin, _Personalized):  # type: ignore[misc]
    """A linear regression for every user; the users of a group share one. The groups are found from the data.

    `users` names the owner of each row. Without it all rows belong to one user, and this is an ordinary linear
    regression. With the loss "poisson", exp(<coef, x> + intercept) is the mean count.

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
        users : (n_rows,) the owner of each row; None for one user.
        """
        X, y = self._checked(X, y, reset=True)
        return self._fit(X, y, users, "counts" if self.loss == "poisson" else "regression")

    def predict(self, X: Any, users: Any = None) -> Array:
        """The target, or the mean count, of each row, predicted by its user's model."""
        rows, models = self._with_models(X, users)
        return self.fit_.units.predict(rows, models)

    def score(self, X: Any, y: Any, users: Any = None, *, sample_weight: Any = None) -> float:
        """R^2, the share of the variance explained; for counts D^2, the share of the deviance explained."""
        explained = explained_deviance if self.fit_.settings.task == "counts" else explained_variance
        return explained(y, self.predict(X, users), sample_weight)

    def _checked(self, X: Any, y: Any, reset: bool) -> tuple[Array, Array]:
        X, y = validate_data(self, X, y, reset=reset, dtype=np.float64, y_numeric=True)
        return X, y.astype(np.float64)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = self.loss == "poisson"
        return tags


class ConvexClustering(ClusterMixin, BaseEstimator):  # type: ignore[misc]
    """Clusters of points, one per row, from one convex problem, whose solution is unique and certified.

        minimise   sum_i 1/2 ||x_i - a_i||^2 + lam * sum_{i<j} w_ij ||x_i - x_j||

    Points with equal x form a cluster.

    Parameters
    ----------
    n_clusters : largest number of clusters; the least lam with so few is taken. If None, set by lam.
    lam : penalty strength >= 0; "auto" takes the clusters of the path with the largest silhouette.
    weights : "auto" or "gaussian", "inverse" connect each point with its k nearest; "unit" gives all pairs weight 1.
    loss : "auto" or "squared_distance", as above; or "huber_distance", which is robust against outliers.
    k : number of nearest points that each point is connected with.
    n_lams : number of points of the path.
    tol : certified relative gap to reach.
    standardize : whether features are standardised first.
    random_state : seed of the sample that the silhouette of more than 2000 points is computed on.

    Attributes
    ----------
    labels_, n_clusters_ : (n_points,) the cluster of each point, from 0; and the number of clusters.
    cluster_centers_ : (n_clusters_, n_features) the centre of each cluster's points, without the fusion penalty.
    lam_, gap_ : penalty strength, and the certified relative gap.
    fit_, path_, solution_ : all other results; `path_.linkage` is the tree.

    Examples
    --------
    >>> ConvexClustering(n_clusters=2).fit_predict([[0.0, 0.0], [0.1, 0.0], [5.0, 5.0], [5.0, 5.1]]).tolist()
    [0, 0, 1, 1]
    """

    def __init__(self, n_clusters: int | None = None, *, lam: Any = Settings.lam, weights: str = Settings.weights,
                 loss: str = Settings.loss, k: int = Settings.k, n_lams: int = Settings.n_lams,
                 tol: float = Settings.tol, standardize: bool = False, random_state: Any = Settings.seed) -> None:
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
        """Find the clusters among the rows of X; y is not used."""
        wanted = self.n_clusters
        if wanted is not None and (isinstance(wanted, bool) or not isinstance(wanted, (int, np.integer)) or wanted < 1):
            raise InvalidInput(f"n_clusters must be a whole number >= 1 or None, got {wanted!r}", remedy="Use None")
        if wanted is not None and not isinstance(self.lam, str):
            raise InvalidInput("both n_clusters and lam are given", remedy="Leave out one of them")
        X = validate_data(self, X, dtype=np.float64)
        users = Users.from_arrays(X, feature_names=getattr(self, "feature_names_in_", None))
        fitted = _fit_quietly(users, _settings(self, "clustering"))
        if wanted is not None:
            fitted = _with_clusters(fitted, wanted)
        _keep(self, fitted)
        self.cluster_centers_ = fitted.units.coefficients(fitted.centres)[..., 0]
        return self


def _with_clusters(fitted: Fit, n_clusters: int) -> Fit:
    """At the least lam with at most so many clusters; where the path steps over the number, the step is halved."""
    choice = by_clusters(fitted.path.problem, n_clusters, path=fitted.path)
    solution, points = choice.solution, list(fitted.path.solutions)
    low = max((s.lam for s in points if s.lam < solution.lam), default=0.0)
    for _ in range(_HALVINGS):
        if solution.n_clusters == n_clusters:
            break
        middle = 0.5 * (low + solution.lam)
        tried = solve_quietly(solution.problem.with_lam(middle), tol=fitted.settings.tol, start=solution)
        if tried.n_clusters > n_clusters:
            low = middle
        else:
            solution = tried
    if solution is choice.solution:
        solution = solve_quietly(solution.problem, tol=fitted.settings.tol, start=solution)  # once more, for its duals
        points[points.index(choice.solution)] = solution
    else:
        points.append(solution)
    points.sort(key=lambda s: s.lam)
    return replace(fitted, solution=solution, path=replace(fitted.path, solutions=tuple(points)),
                   chosen=points.index(solution), why=f"{solution.n_clusters} of at most {n_clusters} clusters.")
