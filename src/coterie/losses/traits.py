"""What others ask of a loss, instead of its type: a class of losses says what differs from here."""

from __future__ import annotations

from typing import ClassVar, Self

import numpy as np
import numpy.typing as npt

from coterie.base.errors import Incompatible
from coterie.base.types import Array
from coterie.data.summary import Task
from coterie.data.users import Users


class Traits:
    """What is true of most losses.

    Attributes
    ----------
    least : a number that no f_i falls below.
    quadratic : whether every f_i is quadratic, so that one Hessian serves everywhere.
    counts_rows : whether a user's loss counts as often as it has rows.
    task : the task that a fit offers the loss for; None for none.
    affine : whether models act on a sample through <w, a> + intercept_sign * b with a ridge, as
        those of an `AffineLoss`.
    ridge, intercept, intercept_sign : of that; 0, False and 1 for other losses.
    least_squares, delta : whether it is half the squared residuals of targets, and the residual
        from which on it is linear: second moments of the rows say (nearly) everything.
    signs : whether targets are the classes -1 and +1.
    multiclass, n_classes : whether they are class numbers, with outputs for each; how many, if that
        is known.
    max_curvature : the largest curvature of a row's loss, in any direction of its outputs.
    log_odds : whether margins are logarithms of the odds of classes.
    personal, covariance : whether models that predict lie around those of the problem; how far.
    """

    least: ClassVar[float] = -np.inf
    quadratic: ClassVar[bool] = False
    counts_rows: ClassVar[bool] = False
    task: ClassVar[Task | None] = None
    affine: ClassVar[bool] = False
    ridge: float = 0.0
    intercept: bool = False
    intercept_sign: ClassVar[float] = 1.0
    least_squares: ClassVar[bool] = False
    delta: float = np.inf
    signs: ClassVar[bool] = False
    multiclass: ClassVar[bool] = False
    n_classes: int | None = None
    max_curvature: ClassVar[float] = np.inf
    log_odds: ClassVar[bool] = False
    personal: ClassVar[bool] = False
    covariance: npt.ArrayLike | None = None

    @property
    def rows_per_user(self) -> float | Array | None:
        """The rows that count as one user; None where a user counts as one."""
        return None

    @property
    def scales(self) -> Array | None:
        """(n_users,) what leaving the centre costs, where users differ in it."""
        return None

    @property
    def gaussian(self) -> bool:
        """Whether this is the likelihood of targets with normal noise, of a variance to be learned.
        """
        return self.least_squares and self.delta == np.inf

    def with_ridge(self, ridge: float, penalize_intercept: float | None = None) -> Self:
        """The same loss with another ridge, and another share of it on the intercept if given.

        Raises
        ------
        Incompatible : where the loss has none.
        """
        raise Incompatible(f"{type(self).__name__} has no ridge. Set ridge to 0.")

    def in_unit(self, unit: float) -> Self:
        """The same loss for targets that are divided by `unit`."""
        return self

    def shrunk(self, dim: int, outputs: int = 1) -> Array:
        """(dim,) the share of the ridge on each coordinate: 1, and for intercepts (one for each
        output) `penalize_intercept`; 0 where the loss has no ridge.
        """
        return np.zeros(dim)

    def margin_of(self, mean: float) -> float:
        """The intercept that fits a mean target alone, where it is known; else 0."""
        return 0.0

    def shares(self, t: Array) -> Array:
        """The share of the class +1 at margins t, where targets are `signs`."""
        raise Incompatible(f"{type(self).__name__} has no classes -1 and +1.")

    def squares(self, users: Users, models: Array) -> Array:
        """(n_users,) for counts, the rows times the mean of slope^2 / curvature (Pearson's
        statistic) at the users' models; else 0.
        """
        return np.zeros(users.n_users)
