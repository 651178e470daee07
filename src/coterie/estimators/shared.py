"""What all estimators share: parameters as settings, quiet fits, and what is kept of a fit."""

from __future__ import annotations

import sys
import warnings
from dataclasses import fields
from typing import Any

import numpy as np
from sklearn.exceptions import ConvergenceWarning as SklearnConvergenceWarning
from sklearn.utils import check_random_state

from coterie.base.errors import ConvergenceWarning
from coterie.data.encoding import Task
from coterie.data.users import Users
from coterie.fitting import Fit, Settings, fit
from coterie.losses import LOSSES
from coterie.problem.solution import Status

#: Parameters whose name is another one in `Settings`.
RENAMED = {"most": "max_groups"}

#: What to do where users are missing: by hand, inside of scikit-learn's pipelines and searches, or
#: on purpose.
GIVE_USERS = ("Give users, the owner of each row. A pipeline, a search or a cross-validation "
              "passes users on after sklearn.set_config(enable_metadata_routing=True); or set "
              "user_column, and give frames with this column. Set no_users='together' if one model "
              "for all rows is meant")


def settings_of(estimator: Any, task: Task) -> Settings:
    """The estimator's parameters as settings; rows are held out where lam is chosen by them."""
    names = {field.name for field in fields(Settings)}
    given = {RENAMED.get(name, name): value
             for name, value in estimator.get_params(deep=False).items()}
    given = {name: value for name, value in given.items() if name in names}
    if given.get("holdout", 0.0) is None:
        lam, weights = given["lam"], given["weights"]
        by_rows = isinstance(lam, str) and (lam == "score" or weights != "auto")
        given["holdout"] = Settings.holdout if by_rows else 0.0
    seed = estimator.random_state
    if not isinstance(seed, (int, np.integer)):
        seed = check_random_state(seed).randint(2**31 - 1)
    return Settings(**{"holdout": 0.0, **given}, task=task, seed=int(seed))


def has_probabilities(classifier: Any) -> bool:
    """Whether margins are logarithms of odds, which extend to several classes, too."""
    return classifier.loss not in LOSSES or LOSSES[classifier.loss].log_odds


def is_of_counts(regressor: Any) -> bool:
    """Whether the loss is for counts."""
    return regressor.loss in LOSSES and LOSSES[regressor.loss].task == "counts"


class EstimatorConvergenceWarning(
        ConvergenceWarning, SklearnConvergenceWarning):  # type: ignore[misc]
    """An estimator's solution did not reach `tol`. It is coterie's and scikit-learn's: filters for
    either apply.
    """


def scored_without_users() -> bool:
    """Whether a search or a cross-validation of scikit-learn is fitting, and will score without
    passing users.

    It replaces an error of `score` by nan, so that a search goes on without any scores; only an
    error of `fit` ends it. A scorer given by name calls `predict` without users, and without
    routing so does `score`. A function of the caller's own may know the users, and is trusted.
    """
    frame = sys._getframe(1)
    while (frame.f_code.co_name != "_fit_and_score"
           or not frame.f_globals.get("__name__", "").startswith("sklearn.")):
        if frame.f_back is None:
            return False
        frame = frame.f_back
    scorer, passed = frame.f_locals.get("scorer"), frame.f_locals.get("score_params") or {}
    names = [type(part).__name__ for part in getattr(scorer, "_scorers", {"score": scorer}).values()
             if type(part).__module__.startswith("sklearn.")]
    return any(name != "_PassthroughScorer" or "users" not in passed for name in names)


def fit_quietly(users: Users, settings: Settings) -> Fit:
    """The fit; one warning, by `keep`, replaces those of its parts."""
    with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):
        return fit(users, settings)


def keep(estimator: Any, fitted: Fit, stacklevel: int = 3) -> None:
    if fitted.solution.status is not Status.CONVERGED:
        warnings.warn(f"relative gap {fitted.gap:.1e} at tol = {fitted.settings.tol:g}. "
                      f"{fitted.solution.status.value}", EstimatorConvergenceWarning,
                      stacklevel=stacklevel)
    estimator.fit_, estimator.path_, estimator.solution_ = fitted, fitted.path, fitted.solution
    estimator.labels_, estimator.n_clusters_ = fitted.labels, fitted.n_clusters
    estimator.gap_, estimator.lam_ = fitted.gap, fitted.solution.lam
