"""One linear model per user, shared by the users of a group, as scikit-learn estimators.

    model = PersonalizedClassifier().fit(X, y, users=owner)     # model.labels_, model.coef_,
                                                                model.gap_
    model.predict(X_new, users=owner_new)

`coterie.fitting` does the work: it standardises features, finds groups and lam, and certifies the
result. An unknown user gets the pooled model, and after `personalize` a separate model. Rows
without any users are refused after a fit with users, and a fit without users warns: scikit-learn's
pipelines and searches drop `users` unless they are told to pass it on.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted, validate_data

from coterie.base.errors import CoterieWarning, InvalidInput
from coterie.base.types import Array, Ints
from coterie.convex.choice import accuracy, explained_deviance, explained_variance
from coterie.data.encoding import Task
from coterie.data.users import Users
from coterie.data.validation import Rows, group, show, suggest
from coterie.estimators.shared import (
    GIVE_USERS,
    fit_quietly,
    has_probabilities,
    is_of_counts,
    keep,
    scored_without_users,
    settings_of,
)
from coterie.fitting import Settings
from coterie.fitting.predictions import models_by_name
from coterie.problem.newcomers import Joined

#: The one user of a fit without users.
EVERYONE = "(everyone)"


class Personalized(BaseEstimator):  # type: ignore[misc]
    """What both estimators share: users, groups and newcomers."""

    # With metadata routing, `users` is passed on by default; set_..._request changes this.
    __metadata_request__fit = {"users": True}  # noqa: RUF012
    __metadata_request__predict = {"users": True}  # noqa: RUF012
    __metadata_request__score = {"users": True}  # noqa: RUF012

    def __init__(self, *, lam: Any = Settings.lam, weights: str = Settings.weights,
                 loss: str = Settings.loss, ridge: float = Settings.ridge,
                 n_lams: int = Settings.n_lams, most: int | None = Settings.max_groups,
                 k: int = Settings.k, tol: float = Settings.tol, holdout: float | None = None,
                 standardize: bool = Settings.standardize, unknown: str = "together",
                 random_state: Any = Settings.seed, count: str = Settings.count,
                 user_column: Any = None, no_users: str = "auto",
                 average: str = Settings.average, curves: str = Settings.curves,
                 scale: str = Settings.scale) -> None:
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
        self.user_column = user_column
        self.no_users = no_users
        self.average = average
        self.curves = curves
        self.scale = scale

    def _fit(self, X: Array, y: Array, users: Any, task: Task) -> Self:
        """Fit to checked rows, and targets as numbers."""
        columns = getattr(self, "feature_names_in_", None)
        self._check_users(users)
        rows = self._group_rows(users, len(X))
        data = Users.from_arrays(X, y, [rows.names[i] for i in rows.codes], feature_names=columns)
        # The model of a user with one class is determined by its group.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*samples of one class only", CoterieWarning)
            keep(self, fit_quietly(data, settings_of(self, task)), stacklevel=4)
        self.users_ = np.fromiter(data.names, dtype=object, count=data.n_users)
        self.newcomers_: dict[Any, Array] = {}
        self.scores_ = self.fit_.scores
        coefficients = self.fit_.coefficients.transpose(0, 2, 1)
        if coefficients.shape[1] == 2:  # two classes in the symmetric form
            coefficients = coefficients[:, 1:] - coefficients[:, :1]
        self.coef_, self.intercept_ = (part[:, 0] if coefficients.shape[1] == 1 else part
                                       for part in (coefficients[..., :-1], coefficients[..., -1]))
        return self

    def personalize(self, X: Any, y: Any, users: Any = None) -> Joined:
        """Find models for newcomers from a few rows; the models of all other users do not change.

        `predict` then knows the newcomers. A newcomer given again gets a new model from the new
        rows only.

        Parameters
        ----------
        X, y : rows and targets of the newcomers.
        users : the owner of each row; none of them a user of `fit`. Omitted where `user_column`
            names them.

        Returns
        -------
        Joined : models, and the group that each newcomer joins; -1 for the unassigned, whose model
            lies between their own rows and the nearest group.

        Raises
        ------
        InvalidInput : no names, or a name that `fit` knows.

        Example
        -------
        >>> X, y = [[0.0], [1.0], [2.0], [3.0]] * 4, ["no", "no", "yes", "yes"] * 4
        >>> shops = ["a", "b"] * 8
        >>> model = PersonalizedClassifier(n_lams=4).fit(X, y, users=shops)
        >>> model.personalize([[0.0], [2.0]], ["no", "yes"], users=["new", "new"]).users.names
        ('new',)
        """
        check_is_fitted(self)
        X, users = self._split_owners(X, users)
        if users is None:
            raise InvalidInput("newcomers need names", remedy="Give users, the owner of each row")
        X, y = self._checked(X, y, reset=False)
        rows = self._group_rows(users, len(X))
        known = sorted(set(rows.names) & set(self.users_), key=rows.names.index)
        if known:
            raise InvalidInput("newcomers must not be among the users of fit",
                               where=f"user {show(*known)}",
                               remedy="Call fit again with all of their rows")
        newcomers = Users.from_arrays(X, y, [rows.names[i] for i in rows.codes])
        newcomers = replace(newcomers, feature_names=self.fit_.units.feature_names)
        joined = self.fit_.personalize(newcomers)
        self.newcomers_ = {**self.newcomers_,
                           **dict(zip(newcomers.names, joined.models, strict=True))}
        return joined

    def _checked(self, X: Any, y: Any, reset: bool) -> tuple[Array, Array]:
        raise NotImplementedError

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags._skip_test = self.no_users == "error"  # scikit-learn's checks give no users
        return tags

    def _split_owners(self, X: Any, users: Any) -> tuple[Any, Any]:
        """X without its user column, and the owner of each row: as given, from this column, or
        None.
        """
        for name, values in (("unknown", ("together", "error")),
                             ("no_users", ("auto", "error", "together"))):
            if getattr(self, name) not in values:
                raise InvalidInput(f"{name} must be {' or '.join(map(repr, values))}, got "
                                   f"{getattr(self, name)!r}", remedy=f"Use {values[0]!r}")
        column = self.user_column
        if column is None:
            return X, users
        if users is not None:
            raise InvalidInput(f"users are given, and user_column={column!r} names them too",
                               remedy="Leave out one of the two")
        X = X.collect() if hasattr(X, "collect") else X
        if not hasattr(X, "columns"):
            raise InvalidInput(f"user_column={column!r} needs a frame with this column, got "
                               f"{type(X).__name__}",
                               remedy="Give a pandas or polars frame; steps of a pipeline keep "
                                      "frames after set_output(transform='pandas')")
        if column not in list(X.columns):
            raise InvalidInput(f"There is no column {show(column)} with the users",
                               remedy=suggest(column, X.columns))
        return X[[name for name in X.columns if name != column]], X[column]

    def _check_users(self, users: Any) -> None:
        """Neither lose users that are given nor do without them silently; called by the `_fit` of a
        `fit`.
        """
        if self.no_users != "auto" or self.user_column is not None:
            return
        if users is None:
            warnings.warn("no users are given, so all rows are taken as those of one user. "
                          f"{GIVE_USERS}.", CoterieWarning, stacklevel=4)
        elif scored_without_users():
            raise InvalidInput("users are given to fit, but no users are given to score: the "
                               "models of this cross-validation cannot be scored",
                               remedy=GIVE_USERS)

    def _group_rows(self, users: Any, n_rows: int, predicting: bool = False) -> Rows:
        """The owner of each row; without users all rows are those of one user, unless a fit knows
        several.
        """
        several = hasattr(self, "users_") and list(self.users_) != [EVERYONE]
        needed = self.no_users == "error" or (self.no_users == "auto" and several and predicting)
        if users is None and needed:
            raise InvalidInput("no users are given, and every model belongs to a user",
                               remedy=GIVE_USERS)
        rows = group([EVERYONE] * n_rows if users is None else users)
        if len(rows.codes) != n_rows:
            raise InvalidInput(f"X has {n_rows} rows and users has {len(rows.codes)} values",
                               remedy="Pass one name per row")
        return rows

    def _find_models(self, X: Any, users: Any) -> tuple[Array, Array, Ints]:
        """Checked rows, (n_rows, dim) the model of each one's user, and its position among users
        and newcomers.
        """
        check_is_fitted(self)
        X, users = self._split_owners(X, users)
        X = validate_data(self, X, reset=False, dtype=np.float64)
        rows = self._group_rows(users, len(X), predicting=True)
        names = [*self.users_, *self.newcomers_]
        known = np.vstack([self.fit_.models, *self.newcomers_.values()])
        models, index = models_by_name(rows.names, names, known, self.fit_.together)
        unknown = [] if users is None else [rows.names[i] for i in np.flatnonzero(index < 0)]
        if unknown:
            texts = {str(name): name for name in names}
            for twin in (name for name in unknown if str(name) in texts):
                raise InvalidInput(f"there is no user {show(twin)}, but there is "
                                   f"{show(texts[str(twin)])}",
                                   remedy="Give names of the type that fit was given")
            if self.unknown == "error":
                raise InvalidInput(
                    f"there is no model for {len(unknown)} user(s)", where=f"user {show(*unknown)}",
                    remedy="Call personalize with a few of their rows, or set unknown='together'")
        return X, models[rows.codes], index[rows.codes]


class PersonalizedClassifier(ClassifierMixin, Personalized):  # type: ignore[misc]
    """A linear classifier for every user; the users of a group share one. The groups are found from
    the data.

    `users` names the owner of each row, in `fit` and in all methods that predict; or `user_column`
    names the column of X with the owners.

    Parameters
    ----------
    lam : penalty strength >= 0; "auto" takes the groups found (with weights other than "auto", it
        is the same as "score"); "score" takes the least mean loss on held-out rows.
    weights : "auto" leaves them to the fit; "unit" gives all pairs weight 1; "wald",
        "gaussian" and "inverse" connect each user with its k nearest.
    loss : "auto" or "logistic"; "squared_hinge", for two classes and without probabilities; or
        "multinomial", which is used for more than two classes in any case.
    ridge : L2 strength, intercept included.
    n_lams : number of points of the path.
    most : largest number of groups; None: no limit.
    k : number of nearest users that each user is connected with.
    tol : certified relative gap to reach.
    holdout : share of every user's rows held out for `scores_`; if None, rows are held out only
        where lam is chosen by them.
    standardize : whether features are standardised, with mean and standard deviation of all rows of
        `fit`.
    unknown : what unknown users get: "together" the pooled model, "error" an exception.
    random_state : seed of the held-out rows.
    count : what has the same weight in the model of a group: every row ("rows") or every user
        ("users").
    user_column : the column of X that names the owner of each row, for frames; it is no feature.
        With it, the estimator works inside of everything that passes frames on, also where `users`
        cannot be passed on.
    no_users : what happens without users. "auto" takes all rows of `fit` as those of one user,
        which gives an ordinary linear model, and warns; but where `fit` had users, methods that
        predict need them too, and a search that would score without them is refused, so that
        whatever drops `users` is noticed. "error" raises in `fit`, too; "together" never does, and
        predicts with the pooled model.
    average : "auto" averages several kinds of models where that predicts rows left out better than
        one; "off" keeps the one kind that was chosen.
    curves : of an average: "auto" for curves of columns, "off" for straight columns.
    scale : of an average: "auto" also tries logarithms of positive targets and columns, "level"
        none, "log" these only.

    Attributes
    ----------
    users_ : (n_users,) their names, sorted if possible.
    labels_, n_clusters_ : (n_users,) the group of each user, from 0; and the number of groups.
    classes_ : the classes, sorted.
    coef_, intercept_ : of the kind that was chosen, alone or as a part of an average; (n_users,
        n_features) and (n_users,), with more than two classes (n_users, n_classes, n_features) and
        (n_users, n_classes); in the units of X and in the order of `users_`.
    lam_, gap_ : penalty strength, and the certified relative gap.
    scores_ : scores on held-out rows, or None.
    newcomers_ : names and models (in the solver's units) of the users added by `personalize`.
    fit_, path_, solution_ : all other results. They contain the rows of `fit`, and so does a
        pickle.

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
        users : (n_rows,) the owner of each row; omitted where `user_column` names them.

        Returns
        -------
        The estimator itself.

        Raises
        ------
        InvalidInput : no users, or rows that cannot be used.

        Example
        -------
        >>> X, y = [[0.0], [1.0], [2.0], [3.0]] * 4, ["no", "no", "yes", "yes"] * 4
        >>> shops = ["a", "b"] * 8
        >>> PersonalizedClassifier(n_lams=4).fit(X, y, users=shops).users_.tolist()
        ['a', 'b']
        """
        X, users = self._split_owners(X, users)
        X, codes = self._checked(X, y, reset=True)
        return self._fit(X, codes, users, "classification")

    def decision_function(self, X: Any, users: Any = None) -> Array:
        """How much the model of each row's user is in favour of each class.

        Parameters
        ----------
        X : (n_rows, n_features) numbers.
        users : (n_rows,) the owner of each row; omitted where `user_column` names them.

        Returns
        -------
        (n_rows,) positive for the second class; (n_rows, n_classes) with more than two.

        Raises
        ------
        InvalidInput : no users, or with unknown="error" a user without a model.

        Example
        -------
        >>> X, y = [[0.0], [1.0], [2.0], [3.0]] * 4, ["no", "no", "yes", "yes"] * 4
        >>> shops = ["a", "b"] * 8
        >>> model = PersonalizedClassifier(n_lams=4).fit(X, y, users=shops)
        >>> model.decision_function([[9.0]], users=["a"]) > 0
        array([ True])
        """
        rows, models, index = self._find_models(X, users)
        known = self.fit_._predictor()
        if known.averages:
            share = np.clip(known.told(rows, index, models)[0], 1e-300, 1.0 - 1e-16)
            return np.asarray(np.log(share) - np.log1p(-share))
        t = self.fit_.units.margins(rows, models)
        return t[:, 1] - t[:, 0] if t.ndim == 2 and t.shape[1] == 2 else t

    def predict(self, X: Any, users: Any = None) -> npt.NDArray[Any]:
        """The class of each row, predicted by its user's model.

        Parameters
        ----------
        X : (n_rows, n_features) numbers.
        users : (n_rows,) the owner of each row; omitted where `user_column` names them.

        Returns
        -------
        (n_rows,) the classes.

        Raises
        ------
        InvalidInput : no users, or with unknown="error" a user without a model.

        Example
        -------
        >>> X, y = [[0.0], [1.0], [2.0], [3.0]] * 4, ["no", "no", "yes", "yes"] * 4
        >>> shops = ["a", "b"] * 8
        >>> model = PersonalizedClassifier(n_lams=4).fit(X, y, users=shops)
        >>> model.predict([[0.0], [9.0]], users=["a", "b"]).tolist()
        ['no', 'yes']
        """
        t = self.decision_function(X, users)
        return self.classes_[t.argmax(axis=1) if t.ndim == 2 else (t > 0).astype(np.int64)]

    @available_if(has_probabilities)  # type: ignore[untyped-decorator]
    def predict_proba(self, X: Any, users: Any = None) -> Array:
        """The probability of each class, by the model of each row's user.

        Parameters
        ----------
        X : (n_rows, n_features) numbers.
        users : (n_rows,) the owner of each row; omitted where `user_column` names them.

        Returns
        -------
        (n_rows, n_classes) in the order of `classes_`.

        Raises
        ------
        InvalidInput : no users, or with unknown="error" a user without a model.

        Example
        -------
        >>> X, y = [[0.0], [1.0], [2.0], [3.0]] * 4, ["no", "no", "yes", "yes"] * 4
        >>> shops = ["a", "b"] * 8
        >>> model = PersonalizedClassifier(n_lams=4).fit(X, y, users=shops)
        >>> model.predict_proba([[9.0]], users=["a"]).shape
        (1, 2)
        """
        rows, models, index = self._find_models(X, users)
        known = self.fit_._predictor()
        if known.averages:
            share = known.told(rows, index, models)[0]
            return np.stack([1.0 - share, share], axis=1)
        return self.fit_.units.probabilities(rows, models)

    def score(self, X: Any, y: Any, users: Any = None, *, sample_weight: Any = None) -> float:
        """The accuracy: the share of rows whose class is predicted.

        Parameters
        ----------
        X : (n_rows, n_features) numbers.
        y : (n_rows,) the classes.
        users : (n_rows,) the owner of each row; omitted where `user_column` names them.
        sample_weight : (n_rows,) how much each row counts; all alike if omitted.

        Returns
        -------
        The accuracy.

        Raises
        ------
        InvalidInput : no users, or with unknown="error" a user without a model.

        Example
        -------
        >>> X, y = [[0.0], [1.0], [2.0], [3.0]] * 4, ["no", "no", "yes", "yes"] * 4
        >>> shops = ["a", "b"] * 8
        >>> model = PersonalizedClassifier(n_lams=4).fit(X, y, users=shops)
        >>> model.score(X, y, users=shops)
        1.0
        """
        return accuracy(y, self.predict(X, users), sample_weight)

    def _checked(self, X: Any, y: Any, reset: bool) -> tuple[Array, Array]:
        X, y = validate_data(self, X, y, reset=reset, dtype=np.float64)
        check_classification_targets(y)
        if reset:
            self.classes_ = np.unique(y)
            if len(self.classes_) > 2 and not has_probabilities(self):
                raise InvalidInput("Only binary classification is supported by the "
                                   f"{self.loss.replace('_', ' ')}. The type of the target is "
                                   f"{type_of_target(y)}",
                                   remedy="Use the loss 'logistic'")
        codes = np.clip(np.searchsorted(self.classes_, y), 0, len(self.classes_) - 1)
        new = np.flatnonzero(self.classes_[codes] != y)
        if new.size:
            raise InvalidInput(
                f"y has the class {show(y[new[0]])}, which fit has not seen", where=f"row {new[0]}",
                remedy=f"The classes are {show(*self.classes_)}; call fit again to add one")
        return X, codes.astype(np.float64)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = has_probabilities(self)
        return tags


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
        X, users = self._split_owners(X, users)
        X, y = self._checked(X, y, reset=True)
        return self._fit(X, y, users, "counts" if is_of_counts(self) else "regression")

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
        rows, models, index = self._find_models(X, users)
        known = self.fit_._predictor()
        if known.averages:
            return known.told(rows, index, models)[0]
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
        counts = self.fit_.settings.task == "counts"
        explained = explained_deviance if counts else explained_variance
        return explained(y, self.predict(X, users), sample_weight)

    def _checked(self, X: Any, y: Any, reset: bool) -> tuple[Array, Array]:
        X, y = validate_data(self, X, y, reset=reset, dtype=np.float64, y_numeric=True)
        return X, y.astype(np.float64)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = is_of_counts(self)
        return tags
