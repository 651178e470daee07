"""A loss from functions of your own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from coterie.base.errors import InvalidInput
from coterie.base.types import Array
from coterie.data.users import Block, Participants
from coterie.losses.base import Evaluation, Samples
from coterie.losses.blocks import BlockLoss


@dataclass(frozen=True, kw_only=True)
class Custom(BlockLoss):
    """A loss from your own functions, batched over users.

    Each function is called with (models (n, dim), features (n, m, p), targets (n, m), weights (n,
    m)); `weights` are 1 / (number of the user's samples) for samples and 0 for padding rows, so a
    mean over samples is a weighted sum.

    Parameters
    ----------
    value, gradient, hessian : return (n,), (n, dim) and (n, dim, dim); convex and differentiable.
    n_params : length of a model, or a function of the number of features; None means the number of
        features.
    lipschitz_bound, strong : bounds on all Hessians' eigenvalues from above and below, where you
        know them.
    decide : (features (rows, p), models (rows, dim)) -> predictions.
    conic_form : (cvxpy, users, x) -> the sum of all f_i as an expression; only the reference solver
        asks for it.

    `coterie.check_loss(loss, users)` tests derivatives, convexity and shapes on your data.

    Raises
    ------
    InvalidInput : when evaluated, where a function returns an array of another shape.

    Example
    -------
    >>> import numpy as np
    >>> import coterie as ct
    >>> half = ct.Custom(value=lambda x, a, y, w: 0.5 * (x**2).sum(axis=1),
    ...                  gradient=lambda x, a, y, w: x,
    ...                  hessian=lambda x, a, y, w: np.tile(np.eye(x.shape[1]), (len(x), 1, 1)),
    ...                  strong=1.0)
    >>> users = ct.Users.from_arrays([[1.0, 2.0], [3.0, 4.0]], user=["ann", "bob"])
    >>> ct.check_loss(half, users)
    >>> half.values(half.prepare(users), np.ones((2, 2))).tolist()
    [1.0, 1.0]
    """

    value: Callable[..., Array]
    gradient: Callable[..., Array]
    hessian: Callable[..., Array]
    n_params: int | Callable[[int], int] | None = None
    lipschitz_bound: float = np.inf
    strong: float = 0.0
    decide: Callable[..., Array] | None = None
    conic_form: Callable[..., Any] | None = None

    def dim(self, users: Participants) -> int:
        if self.n_params is None:
            return users.n_features
        return self.n_params(users.n_features) if callable(self.n_params) else self.n_params

    def evaluate_block(self, block: Block, models: Array, order: int) -> Evaluation:
        n, d = models.shape
        parts = []
        for name, shape in (("value", (n,)), ("gradient", (n, d)), ("hessian", (n, d, d)))[
            : order + 1]:
            part = np.asarray(getattr(self, name)(models, block.features, block.targets,
                                                  block.weights), dtype=float)
            if part.shape != shape:
                raise InvalidInput(f"the custom loss's {name} must return shape {shape}, got "
                                   f"{part.shape}",
                                   remedy="Return one entry for each of the n models given")
            parts.append(part)
        return Evaluation(*parts, *[np.empty(0)] * (2 - order))

    def lipschitz(self, samples: Samples) -> Array:
        return np.full(samples.n_users, self.lipschitz_bound)

    def strong_convexity(self, samples: Samples) -> Array:
        return np.full(samples.n_users, self.strong)

    def decision(self, features: Array, models: Array) -> Array:
        return super().decision(features, models) if self.decide is None else self.decide(features,
            models)

    def conic(self, cp: ModuleType, samples: Samples, x: Any) -> Any:
        return super().conic(cp, samples, x) if self.conic_form is None else self.conic_form(cp,
            samples.users.data, x)
