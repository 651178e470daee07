"""Losses whose data are with their users."""

from __future__ import annotations

from dataclasses import dataclass

from coterie.base.errors import Incompatible
from coterie.base.types import Array, Indices
from coterie.data.users import Participants
from coterie.losses.base import Evaluation, Loss, Samples


@dataclass(frozen=True, kw_only=True, eq=False)
class Remote(Loss):
    """A loss whose data are with their users: it can predict, and cannot be evaluated.

    Parameters
    ----------
    loss : the loss the users have.
    length : of a model.

    Example
    -------
    >>> import numpy as np
    >>> import coterie as ct
    >>> from coterie.losses.remote import Remote
    >>> Remote(loss=ct.Squared(), length=2).predict(np.array([[3.0]]),
    ...                                             np.array([[2.0, 1.0]])).tolist()
    [7.0]
    """

    loss: Loss
    length: int

    def dim(self, users: Participants) -> int:
        return self.length

    def evaluate(self, samples: Samples, models: Array, order: int = 2,
                 users: Indices | None = None) -> Evaluation:
        raise Incompatible("The data are with their users, so their losses cannot be evaluated "
                           "here.")

    def own_models(self, samples: Samples, models: Array, users: Indices | None = None) -> Array:
        if type(self.loss).own_models is not Loss.own_models:
            raise Incompatible("Users compute their personal models from their own data, which are "
                               "not here.")
        return models

    def decision(self, features: Array, models: Array) -> Array:
        return self.loss.decision(features, models)

    def predict(self, features: Array, models: Array) -> Array:
        return self.loss.predict(features, models)
