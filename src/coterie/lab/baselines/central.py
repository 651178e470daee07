"""Methods for one table with a column that names the user, as people use them where no federation
is needed.

They get all rows of all users at one place, choose their own penalties by cross-validation on these
rows, and return a function that decides about other rows of the same users:

    regression          the predicted number
    two classes         log-odds of class 1
    several classes     (n_rows, n_classes) a score of each class; the largest is predicted

Features are expected to have about unit variance, and classes are numbers 0, 1, ...

What is not installed is left out, and said.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import logit

from coterie.base.errors import CoterieError, InvalidInput, MissingExtra
from coterie.base.types import Array
from coterie.data.summary import Task
from coterie.data.users import Users

Decide = Callable[[Users], Array]

PENALTIES = np.geomspace(1e-3, 1e4, 15)  # of squared loss summed over rows
INVERSE_PENALTIES = np.geomspace(1e-3, 1e2, 6)  # of logistic loss summed over rows
_FOLDS = 5
_UNLIKELY = -20.0  # log-probability of a class that a user has no rows of
_WIDEST = 12  # columns up to which random slopes are tried; each pair of columns has a covariance
_LEAVES = ((7, 5), (7, 20), (31, 5), (31, 20))  # of a tree, and the least number of rows in each
_RATE, _MOST_TREES, _PATIENCE = 0.05, 1000, 30
_FEWER_TREES, _LESS_PATIENCE = 500, 20  # of GPBoost
_CURVED = 5  # different values from which a column gets a curve
_CERTAIN = 1e-6  # distance of a probability from 0 and 1 at least


@dataclass(frozen=True, kw_only=True, eq=False)
class CentralFit:
    """What a method decides about rows of the users that it was fitted to.

    Parameters
    ----------
    decide : from users, in the order of the fit, to one decision per row.
    models : (n_users, ...) the numbers that decide about each user's rows; (n_users, 0) where there
        are none.
    note : what was chosen, in words.
    concern : what went wrong, and what was done instead; empty if nothing did.
    """

    decide: Decide = field(repr=False)
    models: Array = field(repr=False)
    note: str = ""
    concern: str = ""


#: Fits users with a task, a number of classes and a seed; see `Central.fit`.
Method = Callable[[Users, Task, int, int], CentralFit]


@dataclass(frozen=True, kw_only=True)
class Central:
    """A method for one table, and what it needs.

    Parameters
    ----------
    name : in tables.
    method : the fit itself.
    library : that has to be installed; empty if none.
    extra : that has the library.
    package : of R; empty for methods of Python.
    tasks : that it is for.
    """

    name: str
    method: Method = field(repr=False)
    library: str = ""
    extra: str = "bench"
    package: str = ""
    tasks: tuple[Task, ...] = ("regression", "classification")

    def missing(self) -> CoterieError | None:
        """What to say if the library, or R, is not installed; None if it is.

        A missing package of R is found when it is used.
        """
        if self.package and not shutil.which("Rscript"):
            return InvalidInput(f"The method {self.name!r} needs R, which is not installed",
                                remedy=f"Run: apt-get install r-cran-{self.package}")
        if not self.library or find_spec(self.library) is not None:
            return None
        return MissingExtra(self.library, self.extra, f"The method {self.name!r}")

    def fit(self, users: Users, task: Task, *, n_classes: int = 0, seed: int = 0) -> CentralFit:
        """Fit to all rows.

        Parameters
        ----------
        users
            All rows, grouped by user.
        task
            "regression" or "classification".
        n_classes
            Number of classes; 0 for a regression.
        seed
            Seed of the random numbers of the method.

        Returns
        -------
        CentralFit
            A function that decides about other rows of these users.

        Raises
        ------
        MissingExtra
            If the library that the method needs is not installed.

        Example
        -------
        >>> from coterie.lab.baselines import CENTRAL
        >>> from coterie.datasets import clustered
        >>> users = clustered("squared", n_users=6, n_clusters=2).users
        >>> fitted = CENTRAL["one-hot ridge"].fit(users, "regression")
        >>> fitted.decide(users).shape == (users.n_samples,)
        True
        """
        missing = self.missing()
        if missing is not None:
            raise missing
        return self.method(users, task, n_classes, seed)


def linear(models: Array, note: str = "", concern: str = "") -> CentralFit:
    """The fit with predictions <w, x> + b by models (w, b) of each user."""

    def decide(rows: Users) -> Array:
        own = models[rows.owner]
        return np.asarray((rows.features * own[:, :-1]).sum(axis=1) + own[:, -1])

    return CentralFit(decide=decide, models=models, note=note, concern=concern)


def without_models(users: Users, decide: Decide, note: str = "") -> CentralFit:
    """A fit that no numbers of users stand for."""
    return CentralFit(decide=decide, models=np.empty((users.n_users, 0)), note=note)


def rows_by_user(users: Users) -> list[tuple[Array, Array]]:
    """Features and targets of each user."""
    assert users.targets is not None
    return [(users.features[a:b], users.targets[a:b])
            for a, b in zip(users.offsets[:-1], users.offsets[1:], strict=True)]


# Two one-liners of scikit-learn, with penalties chosen by cross-validation: RidgeCV (leave one out)
# for numbers, LogisticRegressionCV for classes.


def ridge_per_user(users: Users, task: Task, n_classes: int, seed: int) -> CentralFit:
    """Every user's own ridge or logistic regression, each with its own penalty."""
    parts = rows_by_user(users)
    if task == "regression":
        assert users.targets is not None
        mean = float(users.targets.mean())
        return linear(np.stack([_own_ridge(X, y, mean) for X, y in parts]))
    fitted = [_classifier(X, y, seed) for X, y in parts]

    def decide(rows: Users) -> Array:
        scores = np.zeros((rows.n_samples, n_classes))
        for i, model in enumerate(fitted):
            own = slice(rows.offsets[i], rows.offsets[i + 1])
            scores[own] = _log_probabilities(model, rows.features[own], n_classes)
        return _decisions(scores)

    return without_models(users, decide)


def one_hot_ridge(users: Users, task: Task, n_classes: int, seed: int) -> CentralFit:
    """One ridge or logistic regression for all rows, with a column for every user: shared slopes,
    own intercepts.
    """
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
        places = np.arange(rows.n_samples), rows.owner
        columns = sparse.csr_array((np.ones(rows.n_samples), places), (rows.n_samples, n))
        return sparse.hstack([sparse.csr_array(rows.features), columns]).tocsr()

    return _by_classifier(users, table, n_classes, seed)


def one_ridge(users: Users, task: Task, n_classes: int, seed: int) -> CentralFit:
    """One ridge or logistic regression for all rows, blind to users."""
    assert users.targets is not None
    if task == "regression":
        return linear(np.tile(_own_ridge(users.features, users.targets, 0.0),
                              (users.n_users, 1)))
    return _by_classifier(users, lambda rows: rows.features, n_classes, seed)


def _by_classifier(users: Users, table: Callable[[Users], Any], n_classes: int,
                   seed: int) -> CentralFit:
    """One logistic regression on a table made of the rows."""
    assert users.targets is not None
    model = _classifier(table(users), users.targets, seed)
    return without_models(users, lambda rows: _decisions(
        _log_probabilities(model, table(rows), n_classes)))


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
    # Weak penalties may need more iterations, and then lose.
    with warnings.catch_warnings(action="ignore"):
        if counts.min() < 2:
            return LogisticRegression(C=1.0, max_iter=300).fit(X, y)
        folds = StratifiedKFold(min(_FOLDS, int(counts.min())), shuffle=True, random_state=seed)
        return LogisticRegressionCV(Cs=INVERSE_PENALTIES, cv=folds,
                                    scoring="neg_log_loss", max_iter=300, l1_ratios=(0.0,),
                                    use_legacy_attributes=False).fit(X, y)


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


# Linear mixed models of statsmodels:
#
#     y_ij = <beta, x_ij> + <u_i, z_ij> + noise,     u_i ~ N(0, T),     z_ij = 1  or  (x_ij, 1)
#
# Predictions use the best linear predictor u_i = T Z_i' (Z_i T Z_i' + s I)^-1 (y_i - X_i beta),
# which statsmodels also computes, except where T is singular.


def mixed_intercept(users: Users, task: Task, n_classes: int, seed: int) -> CentralFit:
    """MixedLM with a random intercept per user and shared slopes, by REML."""
    return _mixed(users, slopes=False)


def mixed_slopes(users: Users, task: Task, n_classes: int, seed: int) -> CentralFit:
    """MixedLM with a random intercept and random slopes per user, of any covariance, by REML."""
    if users.n_features <= _WIDEST:
        return _mixed(users, slopes=True)
    return _mixed(users, slopes=False, concern=f"{users.n_features} random slopes are too many "
                                               "for statsmodels; random intercepts only")


def _mixed(users: Users, *, slopes: bool, concern: str = "") -> CentralFit:
    """Models of all users; with less structure, and a word, where statsmodels fails."""
    X = np.c_[users.features, np.ones(users.n_samples)]
    assert users.targets is not None
    fitted, failure = _estimate(X, users, slopes)
    if fitted is None and slopes:
        return _mixed(users, slopes=False, concern=f"random slopes failed ({failure}); random "
                                                   "intercepts only")
    if fitted is None:
        failure = f"random intercepts failed ({failure}); least squares"
        models = np.tile(np.linalg.lstsq(X, users.targets, rcond=None)[0], (users.n_users, 1))
    else:
        models = fitted[0] + _random_effects(users, *fitted)
    return linear(models, concern="; ".join(filter(None, (concern, failure))))


def _estimate(X: Array, users: Users,
              slopes: bool) -> tuple[tuple[Array, Array, float] | None, str]:
    """Fixed effects, the covariance of the random ones and the noise, or None; and what went wrong.
    """
    from statsmodels.regression.mixed_linear_model import MixedLM

    dim = X.shape[1]
    random = np.ones(dim, dtype=bool) if slopes else np.arange(dim) == dim - 1
    with warnings.catch_warnings(action="ignore"), np.errstate(all="ignore"):
        try:
            model = MixedLM(users.targets, X, groups=users.owner, exog_re=X[:, random])
            fitted: Any = model.fit(reml=True)
        except (np.linalg.LinAlgError, ValueError) as error:
            return None, str(error).rstrip(".").lower()
    covariance = np.zeros((dim, dim))
    covariance[np.ix_(random, random)] = fitted.cov_re
    beta, noise = np.asarray(fitted.fe_params), float(fitted.scale)
    if not (np.isfinite(beta).all() and np.isfinite(covariance).all() and noise > 0):
        return None, "no finite estimate"
    concern = "" if fitted.converged else "not converged; the last estimate is used"
    return (beta, covariance, noise), concern


def _random_effects(users: Users, beta: Array, covariance: Array, noise: float) -> Array:
    """(n_users, dim) the best linear predictor; 0 for users without rows."""
    effects = np.zeros((users.n_users, len(beta)))
    for i, (features, y) in enumerate(rows_by_user(users)):
        Z = np.c_[features, np.ones(len(y))]
        marginal = Z @ covariance @ Z.T + noise * np.eye(len(y))
        effects[i] = covariance @ Z.T @ np.linalg.solve(marginal, y - Z @ beta)
    return effects


def boosted_trees(users: Users, task: Task, n_classes: int, seed: int) -> CentralFit:
    """LightGBM with the user as a categorical column.

    The number of trees, the number of leaves and the least number of rows in a leaf are chosen by
    cross-validation.
    """
    import lightgbm

    def table(rows: Users) -> Array:
        return np.c_[rows.features, rows.owner]

    def dataset(settings: dict[str, Any]) -> Any:
        return lightgbm.Dataset(table(users), users.targets, params=settings,
                                categorical_feature=[users.n_features], free_raw_data=False)

    kind = "multiclass" if n_classes > 2 else "binary" if n_classes == 2 else "regression"
    metric = {"multiclass": "multi_logloss", "binary": "binary_logloss", "regression": "l2"}
    fixed: dict[str, Any] = {"learning_rate": _RATE, "min_data_per_group": 1, "cat_smooth": 1.0,
                             "seed": seed, "deterministic": True, "force_row_wise": True,
                             "verbosity": -1, "objective": kind, "metric": metric[kind],
                             "num_class": n_classes if kind == "multiclass" else 1}
    tried: list[tuple[float, dict[str, Any], int]] = []
    for leaves, smallest in _LEAVES:
        settings = fixed | {"num_leaves": leaves, "min_data_in_leaf": smallest}
        history = lightgbm.cv(settings, dataset(settings), num_boost_round=_MOST_TREES,
                              nfold=_FOLDS, stratified=task == "classification", seed=seed,
                              callbacks=[lightgbm.early_stopping(_PATIENCE, verbose=False)])
        means = next(np.asarray(v) for name, v in history.items() if name.endswith("-mean"))
        tried.append((float(means.min()), settings, int(means.argmin()) + 1))
    _, settings, n_trees = min(tried, key=lambda one: one[0])
    trees = lightgbm.train(settings, dataset(settings), num_boost_round=n_trees)

    def decide(rows: Users) -> Array:
        return np.asarray(trees.predict(table(rows), raw_score=True))

    return without_models(users, decide, f"{n_trees} trees of {settings['num_leaves']} leaves with "
                                         f"at least {settings['min_data_in_leaf']} rows")


def plain_trees(users: Users, task: Task, n_classes: int, seed: int) -> CentralFit:
    """LightGBM with its own settings, and the user as a categorical column."""
    import lightgbm

    kind = {"regression": "regression"}.get(task, "multiclass" if n_classes > 2 else "binary")
    settings = {"objective": kind, "seed": seed, "verbosity": -1, "deterministic": True,
                "force_row_wise": True, "num_class": n_classes if n_classes > 2 else 1}
    data = lightgbm.Dataset(np.c_[users.features, users.owner], users.targets,
                            categorical_feature=[users.n_features])
    trees = lightgbm.train(settings, data)
    return without_models(users, lambda rows: np.asarray(trees.predict(
        np.c_[rows.features, rows.owner], raw_score=True)))


# Established software for users who vary around a centre. Its answer to classes is one probability,
# so that classes are two; counts get Poisson's likelihood.

#: From rows and a task to a function from rows to means of the target.
Means = Callable[[Users, Task], Callable[[Users], Array]]


def anchor(name: str, means: Means, **needs: str) -> Central:
    """A method that gives means, by its name; `needs` are fields of `Central`."""

    def fit(users: Users, task: Task, n_classes: int, seed: int) -> CentralFit:
        if n_classes > 2:
            raise InvalidInput(f"{name} is for two classes, and there are {n_classes}")
        predict = means(users, task)

        def decide(rows: Users) -> Array:
            found = np.asarray(predict(rows), dtype=float)
            if task != "classification":
                return found
            return np.asarray(logit(np.clip(found, _CERTAIN, 1 - _CERTAIN)))

        return without_models(users, decide)

    return Central(name=name, method=fit, tasks=("regression", "classification", "counts"),
                   **needs)


def gpboost_means(users: Users, task: Task) -> Callable[[Users], Array]:
    """Boosted trees with a random intercept per user; the number of trees by cross-validation."""
    gpboost: Any = import_module("gpboost")
    likelihood = {"regression": "gaussian", "classification": "bernoulli_logit",
                  "counts": "poisson"}[task]

    def effects() -> Any:
        return gpboost.GPModel(group_data=users.owner, likelihood=likelihood)

    def data() -> Any:
        return gpboost.Dataset(users.features, users.targets, free_raw_data=False)

    settings = {"learning_rate": _RATE, "num_leaves": 15, "min_data_in_leaf": 5, "verbose": -1,
                "max_depth": 6}
    history = gpboost.cv(params=settings, train_set=data(), gp_model=effects(), nfold=4,
                         num_boost_round=_FEWER_TREES, early_stopping_rounds=_LESS_PATIENCE,
                         use_gp_model_for_validation=True, stratified=False, seed=1,
                         verbose_eval=False)
    n_trees = max(1, len(next(iter(history.values()))))
    trees = gpboost.train(params=settings, train_set=data(), gp_model=effects(),
                          num_boost_round=n_trees, verbose_eval=False)
    return lambda rows: trees.predict(data=rows.features, group_data_pred=rows.owner,
                                      pred_latent=False)["response_mean"]


def pygam_means(users: Users, task: Task) -> Callable[[Users], Array]:
    """Penalised splines of all columns with enough values, and a level per user; one strength for
    all by generalised cross-validation.
    """
    pygam: Any = import_module("pygam")
    kind = {"regression": pygam.LinearGAM, "classification": pygam.LogisticGAM,
            "counts": pygam.PoissonGAM}[task]
    terms = pygam.f(users.n_features)
    for j in range(users.n_features):
        curved = len(np.unique(users.features[:, j])) >= _CURVED
        terms = terms + (pygam.s(j, n_splines=10) if curved else pygam.l(j))
    fitted = kind(terms).gridsearch(np.c_[users.features, users.owner], users.targets,
                                    lam=np.logspace(-3, 3, 7), progress=False)
    inside = users.features.min(axis=0), users.features.max(axis=0)
    name = "predict_proba" if task == "classification" else "predict"
    return lambda rows: getattr(fitted, name)(
        np.c_[np.clip(rows.features, *inside), rows.owner])


_SCRIPT = """
suppressMessages(library(%s)); g <- %s; enough <- %d
d <- read.csv("train"); t <- read.csv("test"); levels <- sort(unique(c(d$user, t$user)))
d$user <- factor(d$user, levels); t$user <- factor(t$user, levels)
x <- setdiff(names(d), c("y", "user"))
inside <- x[sapply(x, function(j) any(tapply(d[[j]], d$user, function(v) max(v) > min(v)),
                                      na.rm = TRUE))]
curved <- x[sapply(x, function(j) length(unique(d[[j]])) >= enough)]
plus <- function(...) paste(c(...), collapse = " + ")
f <- as.formula(%s)
m <- suppressWarnings(suppressMessages(%s))
p <- as.numeric(predict(m, t, type = "response", allow.new.levels = TRUE))
write(p, "means", ncolumns = 1)
"""


def r_means(package: str, formula: str, call: str, users: Users, task: Task,
            ) -> Callable[[Users], Array]:
    """A method of a package of R: `formula` is code of R from x, inside and curved, which are names
    of columns, and `call` fits the formula f with the family g to the data d.
    """
    family = {"regression": "gaussian", "classification": "binomial", "counts": "poisson"}[task]
    script = _SCRIPT % (package, family, _CURVED, formula, call)

    def means(rows: Users) -> Array:
        with tempfile.TemporaryDirectory() as folder:
            heading = ",".join(["y", "user", *(f"x{j}" for j in range(rows.n_features))])
            for name, part in (("train", users), ("test", rows)):
                np.savetxt(Path(folder, name), np.c_[part.targets, part.owner, part.features],
                           delimiter=",", header=heading, comments="")
            done = subprocess.run(["Rscript", "-e", script], cwd=folder, text=True,
                                  capture_output=True, check=False)
            if done.returncode:
                raise InvalidInput(" ".join(done.stderr.split())[-200:])
            return np.loadtxt(Path(folder, "means"), ndmin=1)

    return means


def in_r(name: str, package: str, formula: str, call: str) -> Central:
    """A method of R, by its code; see `r_means`."""
    return anchor(name, partial(r_means, package, formula, call), package=package)


_LMER = "if (identical(g, gaussian)) lmer(f, d) else glmer(f, d, family = g)"
_BAM = "bam(f, data = d, family = g, discrete = nrow(d) > 1000)"
# Random slopes of any covariance up to four columns, independent otherwise.
_SLOPES = ('plus("y ~ 1", x, paste("(", plus(1, inside), if (length(inside) > 4) "||" else "|",'
           ' "user)"))')
# Splines of columns with enough values.
_SPLINES = """plus("y ~ 1", 's(user, bs = "re")', sapply(x, function(j) {
  if (j %in% curved) sprintf("s(%s, k = %d)", j, min(10, length(unique(d[[j]])))) else j }))"""


_NUMBERS: tuple[Task, ...] = ("regression",)
_METHODS = {method.name: method for method in (
    Central(name="ridge per user", method=ridge_per_user),
    Central(name="one-hot ridge", method=one_hot_ridge),
    Central(name="one ridge", method=one_ridge),
    Central(name="mixedlm intercept", method=mixed_intercept, library="statsmodels",
            tasks=_NUMBERS),
    Central(name="mixedlm slopes", method=mixed_slopes, library="statsmodels", tasks=_NUMBERS),
    Central(name="lightgbm", method=boosted_trees, library="lightgbm"),
    Central(name="lightgbm plain", method=plain_trees, library="lightgbm"))}


def _named(*names: str) -> dict[str, Central]:
    return {name: _METHODS[name] for name in names}


#: Methods of `coterie bench data` for one table, by the name used in tables.
CENTRAL = _named("ridge per user", "one-hot ridge", "mixedlm intercept", "mixedlm slopes",
                 "lightgbm")
#: Methods of `coterie bench tables`: one-liners, all that the extra `bench` has, and others.
ONE_LINERS = _named("ridge per user", "one-hot ridge", "one ridge")
COMPARATORS = ONE_LINERS | _named("mixedlm slopes", "lightgbm", "lightgbm plain")
ANCHORS = {method.name: method for method in (
    anchor("gpboost", gpboost_means, library="gpboost", extra="peers"),
    anchor("pygam", pygam_means, library="pygam", extra="peers"),
    in_r("lme4", "lme4", 'plus("y ~ 1", x, "(1 | user)")', _LMER),
    in_r("lme4 slopes", "lme4", _SLOPES, _LMER),
    in_r("mgcv", "mgcv", _SPLINES, _BAM),
    in_r("mgcv slopes", "mgcv", f"""plus({_SPLINES}, sprintf('s(user, %s, bs = "re")', inside))""",
         _BAM))}
