"""scikit-learn estimators: one linear model a user, users of one group sharing theirs, and clusters of points.

    model = PersonalizedClassifier().fit(X, y, users=owner)     # model.labels_, model.coef_, model.gap_
    model.predict(X_new, users=owner_new)

What is solved, and how lam and the weights are chosen, is `coterie.fitting`. A user nobody has seen gets the model of
everyone together, and after `personalize` one of its own.
"""

from __future__ import annotations

import warnings
from dataclasses import fields, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, ClassifierMixin, ClusterMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted, validate_data

from coterie._typing import Array
from coterie.analysis.metrics import accuracy, explained_deviance, explained_variance
from coterie.analysis.select import by_clusters, refit
from coterie.data.encoding import Task
from coterie.data.users import Users
from coterie.data.validation import Rows, group, show
from coterie.errors import CoterieWarning, InvalidInput
from coterie.fitting import Fit, Settings, fit
from coterie.newcomers import Joined
from coterie.solvers import solve

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


def _keep(estimator: Any, fitted: Fit) -> None:
    estimator.fit_, estimator.path_, estimator.solution_ = fitted, fitted.path, fitted.solution
    estimator.labels_, estimator.n_clusters_ = fitted.labels, fitted.n_clusters
    estimator.gap_, estimator.lam_ = fitted.gap, fitted.solution.lam


class _Personalized(BaseEstimator):  # type: ignore[misc]
    """What both estimators do about users."""

    # With metadata routing, `users` goes wherever it is given, unless set_..._request says otherwise.
    __metadata_request__fit = {"users": True}  # noqa: RUF012
    __metadata_request__predict = {"users": True}  # noqa: RUF012
    __metadata_request__score = {"users": True}  # noqa: RUF012

    def __init__(self, *, lam: Any = Settings.lam, weights: str = Settings.weights, loss: str = Settings.loss,
                 ridge: float = Settings.ridge, n_lams: int = Settings.n_lams, most: int | None = Settings.max_groups,
                 k: int = Settings.k, tol: float = Settings.tol, holdout: float | None = None,
                 standardize: bool = Settings.standardize, unknown: str = "together",
                 random_state: Any = Settings.seed) -> None:
        self.lam = lam
        self.weights = weights
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
        """From checked rows and targets as numbers."""
        self._check_unknown()
        columns = getattr(self, "feature_names_in_", None)
        rows = _rows(users, len(X))
        data = Users.from_arrays(X, y, [rows.names[i] for i in rows.codes], feature_names=columns)
        with warnings.catch_warnings():  # a user of one class leans on its group: that is what groups are for
            warnings.filterwarnings("ignore", ".*samples of one class only", CoterieWarning)
            _keep(self, fit(data, _settings(self, task)))
        self.users_ = np.fromiter(data.names, dtype=object, count=data.n_users)
        self.newcomers_: dict[Any, Array] = {}
        self.scores_ = self.fit_.scores
        whole = self.fit_.coefficients.transpose(0, 2, 1)
        if whole.shape[1] == 2:  # two classes in the symmetric form
            whole = whole[:, 1:] - whole[:, :1]
        self.coef_, self.intercept_ = (part[:, 0] if whole.shape[1] == 1 else part
                                       for part in (whole[..., :-1], whole[..., -1]))
        return self

    def personalize(self, X: Any, y: Any, users: Any) -> Joined:
        """Models for newcomers from a few rows of theirs, everyone else's staying as they are.

        From then on `predict` knows them; a newcomer who comes again gets a new model from the new rows alone. Returns
        the group each one joins, -1 for the unassigned, whose model lies between their own rows and the nearest group.
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
        place = {name: i for i, name in enumerate(names)}
        found = np.array([place.get(name, -1) for name in rows.names], dtype=np.int64)
        lacking = [rows.names[i] for i in np.flatnonzero(found < 0)]
        if lacking and users is None:
            if self.unknown == "error":
                raise InvalidInput("the models belong to users, and none are given",
                                   remedy="Give users, the owner of each row")
            warnings.warn("no users are given: all rows are told by the model of everyone together. Give users, the "
                          "owner of each row.", CoterieWarning, stacklevel=3)
        elif lacking:
            texts = {str(name): name for name in names}
            twin = next((name for name in lacking if str(name) in texts), None)
            if twin is not None:
                raise InvalidInput(f"there is no user {show(twin)}, but there is {show(texts[str(twin)])}",
                                   remedy="Give names of the type that fit was given")
            if self.unknown == "error":
                raise InvalidInput(f"there is no model for {len(lacking)} user(s)", where=f"user {show(*lacking)}",
                                   remedy="Call personalize with a few of their rows, or set unknown='together'")
        models = np.vstack([self.solution_.models, *self.newcomers_.values(), self.fit_.together])
        return X, models[found[rows.codes]]


def _rows(users: Any, n_rows: int) -> Rows:
    rows = group([EVERYONE] * n_rows if users is None else users)
    if len(rows.codes) != n_rows:
        raise InvalidInput(f"X has {n_rows} rows and users has {len(rows.codes)} values", remedy="Pass one name a row")
    return rows


def _has_probabilities(classifier: Any) -> bool:
    return classifier.loss != "squared_hinge"


class PersonalizedClassifier(ClassifierMixin, _Personalized):  # type: ignore[misc]
    """A linear classifier for every user; users of one group, which are found, share theirs.

    `users` names the owner of each row, wherever there are rows; without it all rows belong to one user, and this is
    an ordinary linear classifier.

    Parameters
    ----------
    lam : a number >= 0; "auto", which takes the groups found (on weights other than "auto": as "score"); or "score",
        the least mean loss on rows held out.
    weights : "auto" for weights of two stages from the groups found; "unit" for all pairs alike; or "wald",
        "gaussian", "inverse" for each user's k nearest.
    loss : "auto" or "logistic"; "squared_hinge", for two classes and without probabilities; or "multinomial", which
        "logistic" is with more than two classes.
    ridge : on all coordinates of a model, the intercept's too.
    n_lams : points of the path.
    most : groups at most; None for as many as there are.
    k : nearest users each one is joined to.
    tol : the certified relative gap to reach.
    holdout : the share of every user's rows that judge, for `scores_`; None holds rows out only to choose lam by them.
    standardize : whether features are standardised, by mean and spread over all rows of `fit`.
    unknown : what is done for users without a model: "together" takes the one for everyone, "error" raises.
    random_state : of the rows held out.

    Attributes
    ----------
    users_ : (n_users,) their names, sorted where they can be.
    labels_ : (n_users,) the group of each, from 0; n_clusters_ of them.
    coef_, intercept_ : (n_users, n_features) and (n_users,), with more than two classes (n_users, n_classes,
        n_features) and (n_users, n_classes); in the units given and in the order of `users_`.
    lam_, gap_ : lam, and the certified relative gap at it.
    scores_ : on rows held out, or None.
    newcomers_ : name and model (in the solver's units) of everyone who joined by `personalize`.
    fit_, path_, solution_ : everything else. They hold the rows of `fit`, and so does a pickle.
    """

    __metadata_request__predict_proba = {"users": True}  # noqa: RUF012
    __metadata_request__decision_function = {"users": True}  # noqa: RUF012

    def fit(self, X: Any, y: Any, users: Any = None) -> Self:
        """Find groups and models from rows X of classes y."""
        X, codes = self._checked(X, y, reset=True)
        return self._fit(X, codes, users, "classification")

    def decision_function(self, X: Any, users: Any = None) -> Array:
        """(n_rows,) positive for the second class; (n_rows, n_classes) with more than two."""
        rows, models = self._with_models(X, users)
        t = self.fit_.units.margins(rows, models)
        return t[:, 1] - t[:, 0] if t.ndim == 2 and t.shape[1] == 2 else t

    def predict(self, X: Any, users: Any = None) -> npt.NDArray[Any]:
        """The class of each row under its user's model."""
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
    """A linear model of a number for every user; users of one group, which are found, share theirs.

    `users` names the owner of each row, wherever there are rows; without it all rows belong to one user, and this is
    an ordinary linear regression. With the loss "poisson", exp(<coef, x> + intercept) is the mean count.

    Parameters
    ----------
    loss : "auto" or "squared"; "huber", which outliers move less; or "poisson" for counts.

    All other parameters and attributes are those of PersonalizedClassifier.
    """

    def fit(self, X: Any, y: Any, users: Any = None) -> Self:
        """Find groups and models from rows X of targets y."""
        X, y = self._checked(X, y, reset=True)
        return self._fit(X, y, users, "counts" if self.loss == "poisson" else "regression")

    def predict(self, X: Any, users: Any = None) -> Array:
        """The number, or mean count, of each row under its user's model."""
        rows, models = self._with_models(X, users)
        return self.fit_.units.predict(rows, models)

    def score(self, X: Any, y: Any, users: Any = None, *, sample_weight: Any = None) -> float:
        """The share of the variance explained, R^2; of the deviance, D^2, for counts."""
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
    """Clusters of points, one a row, from one convex problem: whatever the start, the same answer, certified.

        minimise   sum_i 1/2 ||x_i - a_i||^2 + lam * sum_{i<j} w_ij ||x_i - x_j||

    Points whose x are equal are together.

    Parameters
    ----------
    n_clusters : at most so many: the least lam that has them. None leaves it to lam.
    lam : a number >= 0, or "auto", the clearest clusters of the path by silhouette.
    weights : "auto" or "gaussian", "inverse" for each point's k nearest; "unit" for all pairs alike.
    loss : "auto" or "squared_distance", as above; or "huber_distance", which outliers move less.
    k : nearest points each one is joined to.
    n_lams : points of the path.
    tol : the certified relative gap to reach.
    standardize : whether features are standardised first.
    random_state : of the points that the silhouette of more than 2000 is judged by.

    Attributes
    ----------
    labels_ : (n_points,) the cluster of each, from 0; n_clusters_ of them.
    cluster_centers_ : (n_clusters_, n_features) the centre of each cluster's points, not drawn towards the others.
    lam_, gap_ : lam, and the certified relative gap at it.
    fit_, path_, solution_ : everything else; `path_.linkage` is the tree.
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
        fitted = fit(users, _settings(self, "clustering"))
        if wanted is not None:
            fitted = _with_clusters(fitted, wanted)
        _keep(self, fitted)
        first = np.unique(self.labels_, return_index=True)[1]
        centres = refit(self.solution_.problem, self.labels_)[first]
        self.cluster_centers_ = fitted.units.coefficients(centres)[..., 0]
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
        tried = solve(solution.problem.with_lam(middle), tol=fitted.settings.tol, start=solution)
        if tried.n_clusters > n_clusters:
            low = middle
        else:
            solution = tried
    if solution is choice.solution:
        solution = solve(solution.problem, tol=fitted.settings.tol, start=solution)  # once more, for its duals
        points[points.index(choice.solution)] = solution
    else:
        points.append(solution)
    points.sort(key=lambda s: s.lam)
    return replace(fitted, solution=solution, path=replace(fitted.path, solutions=tuple(points)),
                   chosen=points.index(solution), why=f"{solution.n_clusters} of at most {n_clusters} clusters.")
