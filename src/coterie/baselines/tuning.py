"""Choosing a method's settings on held-out samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from coterie.baselines.base import BUDGET, Baseline, Fitted, prepared
from coterie.data.users import Users
from coterie.errors import InvalidInput
from coterie.losses import AffineLoss, Loss

B = TypeVar("B", bound=Baseline)


def tune(method: type[B], train: Users, validation: Users, loss: Loss, seed: int = 0, *,
         clusters: npt.ArrayLike | None = None) -> tuple[Fitted, B]:
    """The settings of `method.grid` whose fit to `train` has the least mean loss, over users, on `validation`.

    The mean is without the loss's ridge, which is a means of fitting. Of settings that do equally well the first is
    taken. To use all samples in the end, fit again: settings.fit(everything, loss).
    """
    if validation.names != train.names:
        raise InvalidInput("the validation samples are of other users, or in another order",
                           remedy="Use users.split(...), which keeps all users in order")
    present = np.flatnonzero(validation.counts > 0)
    if not present.size:
        raise InvalidInput("there are no validation samples", remedy="Split with validation=0.2, for example")
    grid = method.grid(train, loss)
    assert 1 <= len(grid) <= BUDGET, f"{method.name}: {len(grid)} settings"
    bare = replace(loss, ridge=0.0) if isinstance(loss, AffineLoss) else loss
    held = prepared(bare, validation.take(present), loss.dim(train))
    memo: dict[Any, Any] = {}
    best: tuple[float, Fitted, B] | None = None
    for settings in grid:
        fitted = settings._fitted(train, loss, seed, clusters, memo)
        with np.errstate(over="ignore", invalid="ignore"):  # a loss beyond float64 is the worst
            score = float(bare.values(held, fitted.models[present]).mean())
        score = np.inf if np.isnan(score) else score
        if best is None or score < best[0]:
            best = score, fitted, settings
    assert best is not None
    return best[1], best[2]
