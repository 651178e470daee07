"""A loss from functions of your own, and `check_loss`: what every loss must satisfy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from coterie.base.errors import InvalidInput
from coterie.base.types import Array, Flags
from coterie.data.users import Block, Participants, Users
from coterie.losses.base import Evaluation, Loss, Samples
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
        for name, shape in (("value", (n,)), ("gradient", (n, d)),
                            ("hessian", (n, d, d)))[: order + 1]:
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
        return (super().decision(features, models) if self.decide is None
                else self.decide(features, models))

    def conic(self, cp: ModuleType, samples: Samples, x: Any) -> Any:
        return super().conic(cp, samples, x) if self.conic_form is None else self.conic_form(cp,
            samples.users.data, x)


def check_loss(loss: Loss, users: Users, *, seed: int = 0, spread: float = 1.0) -> None:
    """Raise AssertionError, naming the property and the user, where `loss` breaks a rule the
    solvers rely on.

    Checked at random models: shapes; gradients and Hessians against central differences; positive
    semidefinite Hessians within the stated bounds; the subgradient inequality; that a user alone
    gets bitwise the numbers it gets among others; that the conjugate is attained and f(x) + f*(u)
    >= <u, x>; the optimality of the proximal step.

    Parameters
    ----------
    loss : the loss to check.
    users : data it is checked on; of the kind it is meant for.
    seed : of the random models.
    spread : standard deviation of the random models.

    Raises
    ------
    AssertionError : where a rule is broken.

    Example
    -------
    >>> import coterie as ct
    >>> users = ct.Users.from_arrays([[0.0], [1.0], [5.0]], [1.0, 2.0, 0.0], ["ann", "ann", "bob"])
    >>> ct.check_loss(ct.Squared(), users)
    """
    samples, rng = loss.prepare(users), np.random.default_rng(seed)
    x, z = spread * rng.standard_normal((2, users.n_users, samples.dim))
    at = loss.evaluate(samples, x, 2)
    _check_shapes(at, *x.shape)
    _check_derivatives(loss, samples, x, at, users)
    tangent = at.values + np.einsum("nd,nd->n", at.gradients, z - x)
    slack = 1e-10 * (1 + np.abs(at.values) + np.abs(tangent))
    _holds("f(z) >= f(x) + <grad f(x), z - x>", loss.values(samples, z) >= tangent - slack, users)
    _check_alone(loss, x, at, users)
    _check_conjugates(loss, samples, x, z, at, users)
    t = np.full(users.n_users, 0.7)
    near = loss.prox(samples, z, t, x).points
    balance = loss.gradients(samples, near) + z + t[:, None] * (near - x)
    _near("prox optimality", balance, np.zeros_like(balance), 1e-6, users)


def _check_shapes(at: Evaluation, n: int, d: int) -> None:
    shapes = {"values": (n,), "gradients": (n, d), "hessians": (n, d, d)}
    for (name, shape), part in zip(shapes.items(), at, strict=True):
        assert part.shape == shape, f"{name}: expected shape {shape}, got {part.shape}"
        assert np.isfinite(part).all(), f"{name}: not finite at finite models"


def _check_derivatives(loss: Loss, samples: Samples, x: Array, at: Evaluation,
                       users: Users) -> None:
    """Against central differences; Hessians symmetric and within the stated bounds."""
    h, d = 1e-5, samples.dim
    for k in range(d):
        step = h * np.eye(d)[k]
        up, down = loss.evaluate(samples, x + step, 1), loss.evaluate(samples, x - step, 1)
        _near("gradient", at.gradients[:, k], (up.values - down.values) / (2 * h), 1e-6, users)
        _near("Hessian", at.hessians[:, :, k], (up.gradients - down.gradients) / (2 * h), 1e-5,
              users)
    _near("symmetry of the Hessian", at.hessians, at.hessians.swapaxes(1, 2), 1e-12, users)
    ends = np.linalg.eigvalsh(at.hessians)
    size = 1e-10 * (1 + np.abs(ends).max(axis=1))
    _holds("a positive semidefinite Hessian", ends[:, 0] >= -size, users)
    _holds("Hessian <= lipschitz", ends[:, -1] <= loss.lipschitz(samples) + size, users)
    _holds("Hessian >= strong_convexity", ends[:, 0] >= loss.strong_convexity(samples) - size,
           users)


def _check_alone(loss: Loss, x: Array, at: Evaluation, users: Users) -> None:
    """Bitwise the same numbers for a user alone as among others."""
    for i in sorted({0, users.n_users // 2, users.n_users - 1}):
        own = users.take([i])
        # The number of classes and the like are properties of the federation, so the single user is
        # laid out with it.
        if loss.dim(own) == x.shape[1]:
            by_itself = loss.evaluate(loss.prepare(own), x[[i]], 2)
            for name, alone, among in zip(at._fields, by_itself, at, strict=True):
                assert (alone[0] == among[i]).all(), \
                    f"{name}: user {users.names[i]!r} alone differs from among others"


def _check_conjugates(loss: Loss, samples: Samples, x: Array, z: Array, at: Evaluation,
                      users: Users) -> None:
    """The maximum in f*(u) = max <u, x> - f(x) is attained, and no other point exceeds it."""
    # Inside the conjugate's domain, which is convex and has zero in its closure.
    slopes = 0.9 * at.gradients
    best = loss.local(samples, slopes, start=z).points
    conjugates = loss.conjugates(samples, slopes, start=z)
    _near("grad f = u where <u, x> - f(x) is largest", loss.gradients(samples, best), slopes, 1e-6,
          users)
    attained = np.einsum("nd,nd->n", slopes, best) - loss.values(samples, best)
    _near("f*(u) = max <u, x> - f(x)", conjugates, attained, 1e-9, users)
    for point, value in ((x, at.values), (z, loss.values(samples, z))):
        inner = np.einsum("nd,nd->n", slopes, point)
        room = 1e-10 * (1 + np.abs(value) + np.abs(inner))
        _holds("f(x) + f*(u) >= <u, x>", value + conjugates >= inner - room, users)


def _near(name: str, got: Array, expected: Array, tol: float, users: Users) -> None:
    scale = 1.0 + np.abs(expected).reshape(users.n_users, -1).max(axis=1)
    error = np.abs(got - expected).reshape(users.n_users, -1).max(axis=1)
    _holds(f"{name} (off by up to {error.max():.1e})", error <= tol * scale, users)


def _holds(name: str, satisfied: Flags, users: Users) -> None:
    broken = np.flatnonzero(~satisfied)
    assert not broken.size, \
        f"{name} fails for {broken.size} user(s), the first is {users.names[broken[0]]!r}"
