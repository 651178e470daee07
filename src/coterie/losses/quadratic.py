"""Losses known by their second-order models: what a server makes of users' answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from coterie.base.errors import InvalidInput
from coterie.base.types import Array, Indices
from coterie.data.users import Participants
from coterie.losses.base import Evaluation, Loss, Samples


@dataclass(frozen=True, kw_only=True, eq=False)
class Quadratic(Loss):
    """A quadratic function for each user; no data are needed.

        f_i(x) = value_i + <gradient_i, x - point_i> + 1/2 (x - point_i)' hessian_i (x - point_i)

    Parameters
    ----------
    point : (n_users, dim) where each function is known.
    value, gradient, hessian : (n_users,), (n_users, dim) and (n_users, dim, dim) there; Hessians
        are positive semidefinite.

    Example
    -------
    >>> import numpy as np
    >>> from coterie.data.users import Participants
    >>> from coterie.losses.quadratic import Quadratic
    >>> loss = Quadratic(point=np.zeros((1, 2)), value=np.ones(1), gradient=np.ones((1, 2)),
    ...                  hessian=np.eye(2)[None])
    >>> loss.local(loss.prepare(Participants(["ann"]))).points.tolist()
    [[-1.0, -1.0]]
    """

    quadratic: ClassVar[bool] = True
    point: Array
    value: Array
    gradient: Array
    hessian: Array

    def dim(self, users: Participants) -> int:
        return int(self.point.shape[1])

    def prepare(self, users: Participants) -> Samples:
        if users.n_users != len(self.point):
            raise InvalidInput(f"expected {len(self.point)} users, one for each function, got "
                               f"{users.n_users}",
                               remedy="Give the users these functions belong to")
        return super().prepare(users)

    def evaluate(self, samples: Samples, models: Array, order: int = 2,
                 users: Indices | None = None) -> Evaluation:
        parts = (self.point, self.value, self.gradient, self.hessian)
        point, value, gradient, hessian = parts if users is None else (part[users]
            for part in parts)
        steps = models - point
        changes = (hessian @ steps[..., None])[..., 0]  # of the gradient
        return Evaluation(value + np.einsum("nd,nd->n", gradient + 0.5 * changes, steps),
                          gradient + changes, hessian)

    def strong_convexity(self, samples: Samples) -> Array:
        return np.maximum(np.linalg.eigvalsh(self.hessian)[:, 0] * (1 - 1e-9), 0.0)

    def lipschitz(self, samples: Samples) -> Array:
        return np.asarray(np.linalg.eigvalsh(self.hessian)[:, -1] * (1 + 1e-12))
