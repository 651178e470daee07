"""Linear mixed models of statsmodels: random intercepts, or random intercepts and slopes.

    y_ij = <beta, x_ij> + <u_i, z_ij> + noise,        u_i ~ N(0, T),      z_ij = 1  or  (x_ij, 1)

Predictions use the best linear predictor u_i = T Z_i' (Z_i T Z_i' + s I)^-1 (y_i - X_i beta), which
statsmodels also computes, except where T is singular.
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

_WIDEST = 12  # columns up to which random slopes are tried; each pair of columns has a covariance


class _MixedModel(Central):
    """What both have in common."""

    library: ClassVar[str] = "statsmodels"
    tasks: ClassVar[tuple[Task, ...]] = ("regression",)


@dataclass(frozen=True, kw_only=True)
class MixedIntercept(_MixedModel):
    """MixedLM with a random intercept per user and shared slopes, by REML."""

    name: ClassVar[str] = "mixedlm intercept"

    def _fit(self, users: Users, task: Task, n_classes: int, seed: int) -> CentralFit:
        return _mixed(users, slopes=False)


@dataclass(frozen=True, kw_only=True)
class MixedSlopes(_MixedModel):
    """MixedLM with a random intercept and random slopes per user, of any covariance, by REML."""

    name: ClassVar[str] = "mixedlm slopes"

    def _fit(self, users: Users, task: Task, n_classes: int, seed: int) -> CentralFit:
        if users.n_features > _WIDEST:
            return _mixed(users, slopes=False, concern=f"{users.n_features} random slopes are too "
                                                       "many for "
                                                       "statsmodels; random intercepts only")
        return _mixed(users, slopes=True)


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
        models = fitted[0] + _random_effects(X, users, *fitted)
    return linear(models, concern="; ".join(filter(None, (concern, failure))))


def _estimate(X: Array, users: Users, slopes: bool) -> tuple[tuple[Array, Array, float] | None,
        str]:
    """Fixed effects, the covariance of the random ones and the noise, or None; and what went wrong.
    """
    from statsmodels.regression.mixed_linear_model import MixedLM

    random = np.ones(X.shape[1], dtype=bool) if slopes else np.arange(X.shape[1]) == X.shape[1] - 1
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            fitted: Any = MixedLM(users.targets, X, groups=users.owner, exog_re=X[:, random]).fit(
                reml=True)
        except (np.linalg.LinAlgError, ValueError) as error:
            return None, str(error).rstrip(".").lower()
    covariance = np.zeros((X.shape[1], X.shape[1]))
    covariance[np.ix_(random, random)] = fitted.cov_re
    beta, noise = np.asarray(fitted.fe_params), float(fitted.scale)
    if not (np.isfinite(beta).all() and np.isfinite(covariance).all() and noise > 0):
        return None, "no finite estimate"
    return (beta, covariance, noise), \
        "" if fitted.converged else "not converged; the last estimate is used"


def _random_effects(X: Array, users: Users, beta: Array, covariance: Array, noise: float) -> Array:
    """(n_users, dim) the best linear predictor of the module's text; 0 for users without rows."""
    assert users.targets is not None
    effects = np.zeros((users.n_users, X.shape[1]))
    for i, (a, b) in enumerate(zip(users.offsets[:-1], users.offsets[1:], strict=True)):
        Z = X[a:b]
        marginal = Z @ covariance @ Z.T + noise * np.eye(b - a)
        effects[i] = covariance @ Z.T @ np.linalg.solve(marginal, users.targets[a:b] - Z @ beta)
    return effects
