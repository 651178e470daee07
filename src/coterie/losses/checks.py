"""`check_loss`: what every loss must satisfy, run on data of your choice. For those who write one.
"""

from __future__ import annotations

import numpy as np

from coterie.base.types import Array, Flags
from coterie.data.users import Users
from coterie.losses import Evaluation, Loss, Samples


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
