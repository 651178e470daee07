"""Coordinates in which a user's own data are centred and of unit size, so that offsets and units
cost no digits.

Losses of a margin t = <w, a> + sign b, for one user with rows a_j, their mean `centre` (0 without a
free intercept) and their spread `scale` in each column; `level` is the user's mean target where
only t_j - y_j matters, else 0:

    z = (scale * w,  sign * b + <centre, w> - level)         t_j = <(a_j - centre) / scale, z_w> +
                                                             z_b + level

Losses of points: z = x - centre. Users whose numbers are of ordinary size keep their coordinates
(centre 0, scale 1), so that what a user computes does not depend on who else is there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coterie.base.types import Array, Flags, Indices
from coterie.data.users import Users

_LARGEST, _SMALLEST = 1e3, 1e-3  # numbers of ordinary size
# Size of a column that counts as 0: a ridge in its units, over its square, would overflow.
_NEGLIGIBLE = 1e-140


@dataclass(frozen=True, eq=False)
class Frame:
    """Coordinates z of every user; x are coordinates as given, with one column per output where
    there are several.
    """

    centre: Array  # (n_users, p)
    scale: Array  # (n_users, p)
    sign: float  # of the intercept; 0 where there is none
    outputs: int  # of the margin; 0 for points, which are shifted and nothing else
    level: Array  # (n_users,) of the margins

    @classmethod
    def of(cls, users: Users, *, centred: bool, sign: float, outputs: int,
           level: Array | None = None) -> Frame | None:
        """The frame of these users; None where all numbers are of ordinary size.

        Parameters
        ----------
        users : whose rows.
        centred : whether rows may be shifted: there is an intercept without a ridge, or the rows
            are points.
        sign, outputs, level : see the attributes.
        """
        rows, starts = np.abs(users.features), users.offsets[:-1]
        largest = np.maximum.reduceat(rows, starts)
        odd = largest > _LARGEST
        if outputs:
            odd |= (largest < _SMALLEST) & (largest > _NEGLIGIBLE)
        level = np.zeros(users.n_users) if level is None else level
        strange = np.asarray(odd.any(axis=1)) | (np.abs(level) > _LARGEST)
        if not strange.any():
            return None
        # The mean as first row + mean difference: exact where all rows are equal.
        first, counts = users.features[starts], users.counts[:, None]
        centre = first + np.add.reduceat(users.features - first[users.owner],
                                         starts) / counts if centred else np.zeros_like(first)
        scale = np.ones_like(centre)
        if outputs:
            scale = np.sqrt(np.add.reduceat((users.features - centre[users.owner]) ** 2, starts)
                            / counts)
            constant = scale <= np.maximum(1e-14 * largest, _NEGLIGIBLE)
            scale = np.where(constant, np.where(largest > _NEGLIGIBLE, largest, 1.0), scale)
        return cls(np.where(strange[:, None], centre, 0.0), np.where(strange[:, None], scale, 1.0),
                   sign, outputs, np.where(strange, level, 0.0))

    def rows(self, features: Array, index: Indices, real: Flags) -> Array:
        """(n, m, p) the rows of the users `index`, centred and scaled; padding stays 0."""
        moved = (features - self.centre[index][:, None]) / self.scale[index][:, None]
        return np.where(real[..., None], moved, 0.0)

    def targets(self, targets: Array, index: Indices, real: Flags) -> Array:
        """(n, m) the targets of the users `index` above their level; padding stays as it is."""
        return np.where(real, targets - self.level[index, None], targets)

    def units(self, index: Indices) -> Array:
        """(n, dim) what one unit of x is in z, coordinate by coordinate; 1 for intercepts."""
        scale = self.scale[index]
        if self.sign:
            scale = np.concatenate([scale, np.ones((len(scale), 1))], axis=1)
        return np.repeat(scale, max(self.outputs, 1), axis=1)

    def common(self) -> tuple[Array, Array]:
        """A point (dim,) and a basis (dim, dim), both in x, in which all users' coordinates are
        near zero and one.
        """
        if not self.outputs:
            return self.centre.mean(axis=0), np.eye(self.centre.shape[1])
        centre, scale = self.centre.mean(axis=0), np.sqrt((self.scale**2).mean(axis=0))
        size = len(scale) + bool(self.sign)
        basis = np.eye(size)
        basis[range(len(scale)), range(len(scale))] = 1.0 / scale
        if self.sign:  # a step in w leaves the margin of `centre` as it is
            basis[-1, :-1] = -self.sign * centre / scale
        origin = np.zeros(size * self.outputs)
        if self.sign:
            origin[-self.outputs:] = self.sign * self.level.mean()
        return origin, np.asarray(np.kron(basis, np.eye(self.outputs)), dtype=float)

    def constant(self, linear: Array, users: Indices) -> Array:
        """<linear, x> - <slopes(linear), z>."""
        if not self.outputs:
            return np.einsum("nd,nd->n", linear, self.centre[users])
        return self.sign * self.level[users] * linear[:, -self.outputs:].sum(axis=1)

    def metric(self, users: Indices) -> Array:
        """(n, dim, dim) the squared length of a step in x as a quadratic form of the step in z."""
        n, d = len(users), self.units(users[:1]).shape[1]
        if not self.outputs:
            return np.broadcast_to(np.eye(d), (n, d, d))
        repeated = np.repeat(users, d)
        each = np.broadcast_to(np.eye(d), (n, d, d)).reshape(n * d, d)
        steps = self.leave(each, repeated, steps=True)
        steps = steps.reshape(n, d, d)
        return np.asarray(steps @ steps.swapaxes(1, 2))

    def enter(self, x: Array, users: Indices) -> Array:
        """z of points x."""
        centre = self.centre[users]
        if not self.outputs:
            return x - centre
        return self._matrix(x, users, centre, self.level[users]).reshape(x.shape)

    def basis(self, vectors: Array, users: Indices) -> Array:
        """(n, dim, r) the directions `vectors` (dim, r), given in x, in the coordinates z of each
        user.
        """
        n, (d, r) = len(users), vectors.shape
        if not self.outputs:
            return np.broadcast_to(vectors, (n, d, r))
        flat = np.broadcast_to(vectors.T[None], (n, r, d)).reshape(n * r, d)
        repeated = np.repeat(users, r)
        level = np.zeros(n * r)  # directions have none
        return self._matrix(flat, repeated, self.centre[repeated],
                            level).reshape(n, r, d).swapaxes(1, 2)

    def _matrix(self, x: Array, users: Indices, centre: Array, level: Array) -> Array:
        w = x.reshape(len(x), -1, self.outputs)
        p = centre.shape[1]
        scaled = self.scale[users][..., None] * w[:, :p]
        if not self.sign:
            return scaled
        # The level is a term like the others: a difference would be rounded.
        ones = np.ones((len(w), 1, self.outputs))
        margin = _dot(np.concatenate([centre, -level[:, None]], axis=1),
                      np.concatenate([w[:, :p], ones], axis=1), self.sign * w[:, p])
        return np.concatenate([scaled, margin[:, None]], axis=1)

    def leave(self, z: Array, users: Indices, steps: bool = False) -> Array:
        """The points x whose coordinates are z, rounded; or the steps between two such points."""
        centre = self.centre[users]
        if not self.outputs:
            return z if steps else z + centre
        v = z.reshape(len(z), -1, self.outputs)
        p = centre.shape[1]
        w = v[:, :p] / self.scale[users][..., None]
        if self.sign:
            margin = v[:, p] + (0.0 if steps else self.level[users, None])
            w = np.concatenate([w, self.sign * _dot(-centre, w, margin)[:, None]], axis=1)
        return w.reshape(z.shape)

    def slopes(self, u: Array, users: Indices) -> Array:
        """Linear forms on x as linear forms on z: <u, x> = <slopes, z>, but for a constant with
        points.
        """
        if not self.outputs:
            return u
        v = u.reshape(len(u), -1, self.outputs)
        p = self.centre.shape[1]
        if not self.sign:
            return (v / self.scale[users][..., None]).reshape(u.shape)
        b = self.sign * v[:, p:]
        w = (v[:, :p] - self.centre[users][..., None] * b) / self.scale[users][..., None]
        return np.concatenate([w, b], axis=1).reshape(u.shape)

    def gradients(self, g: Array, users: Indices) -> Array:
        """Gradients in z as gradients in x."""
        if not self.outputs:
            return g
        v = g.reshape(len(g), -1, self.outputs)
        p = self.centre.shape[1]
        w = self.scale[users][..., None] * v[:, :p]
        if self.sign:
            w = np.concatenate([w + self.centre[users][..., None] * v[:, p:], self.sign * v[:, p:]],
                               axis=1)
        return w.reshape(g.shape)

    def hessians(self, h: Array, users: Indices) -> Array:
        """Hessians in z as Hessians in x: J' h J, one side after the other."""
        if not self.outputs:
            return h
        n, d = h.shape[:2]
        repeated = np.repeat(users, d)
        half = self.gradients(h.reshape(n * d, d), repeated).reshape(n, d, d).swapaxes(1, 2)
        full = self.gradients(half.reshape(n * d, d), repeated).reshape(n, d, d)
        return 0.5 * (full + full.swapaxes(1, 2))


def _dot(first: Array, second: Array, start: Array) -> Array:
    """(n, outputs) start + sum_k first_k second_k, as if in twice the precision (Ogita, Rump and
    Oishi 2005).
    """
    total, error = start, np.zeros_like(start)
    for k in range(first.shape[1]):
        a, b = np.broadcast_arrays(first[:, k, None], second[:, k])
        product, lost = _two_product(a, b)
        added = total + product
        shadow = added - total
        error = error + ((total - (added - shadow)) + (product - shadow)) + lost
        total = added
    return total + error


def _two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """a b rounded, and what rounding lost (Dekker 1971)."""
    def split(c: Array) -> tuple[Array, Array]:
        high = 134217729.0 * c
        high = high - (high - c)
        return high, c - high

    product = a * b
    (a1, a2), (b1, b2) = split(a), split(b)
    lost = a2 * b2 - (((product - a1 * b1) - a2 * b1) - a1 * b2)
    return product, np.where(np.isfinite(lost), lost, 0.0)
