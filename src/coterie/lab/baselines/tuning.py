"""Choosing the settings of a method on held-out samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from coterie.base.errors import InvalidInput
from coterie.base.types import Ints
from coterie.data.users import Users
from coterie.lab.baselines.base import BUDGET, Baseline, Fitted, prepared
from coterie.losses import AffineLoss, Loss

B = TypeVar("B", bound=Baseline)


def tune(method: type[B], train: Users, validation: Users, loss: Loss, seed: int = 0, *,
         clusters: npt.ArrayLike | None = None) -> tuple[Fitted, B]:
    """Choose the settings of `method.grid` with the least loss on `validation`, as a mean over
    users.

    The loss is without its ridge, which is only for fitting. Of equally good settings the first is
    chosen. To use all samples in the end, fit again: settings.fit(all_users, loss).

    Parameters
    ----------
    method
        A class in `BASELINES`.
    train, validation
        Samples of the same users in the same order, for example from `users.split`.
    loss
        The loss.
    seed
        Seed of the random numbers of the method.
    clusters
        The true cluster of each user, for methods that need it.

    Returns
    -------
    tuple
        The fit to `train` with the chosen settings, and these settings.

    Raises
    ------
    InvalidInput
        If the users of the two parts differ, or there are no validation samples.

    Example
    -------
    >>> import coterie as ct
    >>> from coterie.lab.baselines import KMeans
    >>> from coterie.datasets import clustered
    >>> parts = clustered("squared", n_users=6, n_clusters=2, samples=30).users.split(
    ...     validation=0.3)
    >>> fitted, settings = tune(KMeans, parts.train, parts.validation, ct.Squared())
    >>> settings.n_clusters
    2
    """
    present = _with_samples(train, validation)
    grid = method.grid(train, loss)
    assert 1 <= len(grid) <= BUDGET, f"{method.name}: {len(grid)} settings"
    bare = replace(loss, ridge=0.0) if isinstance(loss, AffineLoss) else loss
    held = prepared(bare, validation.take(present), loss.dim(train))
    memo: dict[Any, Any] = {}
    best: tuple[float, Fitted, B] | None = None
    for settings in grid:
        fitted = settings._fitted(train, loss, seed, clusters, memo)
        # a loss that exceeds float64 is the worst.
        with np.errstate(over="ignore", invalid="ignore"):
            score = float(bare.values(held, fitted.models[present]).mean())
        score = np.inf if np.isnan(score) else score
        if best is None or score < best[0]:
            best = score, fitted, settings
    assert best is not None
    return best[1], best[2]


def _with_samples(train: Users, validation: Users) -> Ints:
    """The users with validation samples."""
    if validation.names != train.names:
        raise InvalidInput("the validation samples belong to other users, or have another order",
                           remedy="Use users.split(...), which keeps all users in order")
    present = np.flatnonzero(validation.counts > 0)
    if not present.size:
        raise InvalidInput("there are no validation samples",
                           remedy="Split with validation=0.2, for example")
    return present
