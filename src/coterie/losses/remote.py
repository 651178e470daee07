"""Losses known to a server: by name only, or by their second-order models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from coterie._typing import Array, Indices
from coterie.data.users import Block, Users
from coterie.errors import Incompatible
from coterie.losses.base import Evaluation, Loss, Samples


@dataclass(frozen=True, kw_only=True, eq=False)
class Remote(Loss):
    """A loss whose data are with their users: it can predict, and nothing else."""

    loss: Loss
    length: int  # of a model

    def dim(self, users: Users) -> int:
        return self.length

    def prepare(self, users: Users) -> Samples:
        return Samples(users, (), self.length)

    def _evaluate(self, samples: Samples, block: Block, models: Array, order: int) -> Evaluation:
        raise Incompatible("The data are with their users, so their losses cannot be evaluated here.")

    def _on(self, samples: Samples, users: Indices, models: Array, order: int) -> Evaluation:
        return self._evaluate(samples, Block(users, models, models, models), models, order)

    def decision(self, features: Array, models: Array) -> Array:
        return self.loss.decision(features, models)

    def predict(self, features: Array, models: Array) -> Array:
        return self.loss.predict(features, models)


@dataclass(frozen=True, kw_only=True, eq=False)
class Quadratic(Loss):
    """f_i(x) = level_i + <slope_i, x - point_i> + 1/2 (x - point_i)' bend_i (x - point_i); no data needed."""

    quadratic: ClassVar[bool] = True
    point: Array  # (n_users, dim)
    level: Array  # (n_users,)
    slope: Array  # (n_users, dim)
    bend: Array  # (n_users, dim, dim), positive semidefinite

    def dim(self, users: Users) -> int:
        return int(self.point.shape[1])

    def prepare(self, users: Users) -> Samples:
        return Samples(users, (), int(self.point.shape[1]))

    def _evaluate(self, samples: Samples, block: Block, models: Array, order: int) -> Evaluation:
        raise NotImplementedError  # there are no blocks; see `_on`

    def _on(self, samples: Samples, users: Indices, models: Array, order: int) -> Evaluation:
        steps, bend = models - self.point[users], self.bend[users]
        bent = (bend @ steps[..., None])[..., 0]
        values = self.level[users] + np.einsum("nd,nd->n", self.slope[users] + 0.5 * bent, steps)
        return Evaluation(values, self.slope[users] + bent, bend)

    def strong_convexity(self, samples: Samples) -> Array:
        return np.maximum(np.linalg.eigvalsh(self.bend)[:, 0] * (1 - 1e-9), 0.0)

    def lipschitz(self, samples: Samples) -> Array:
        return np.asarray(np.linalg.eigvalsh(self.bend)[:, -1] * (1 + 1e-12))
