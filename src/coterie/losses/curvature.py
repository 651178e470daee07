"""Hessians of wide models, never formed: products with them and systems in them, in the space of a user's rows.

A user with m rows A (m x p), k outputs and the ridges R (p, the same for every output) has the Hessian

    H = R + A' W A

where W couples the outputs of one row only. With S = R + shift and K = A S^-1 A', systems need m x m matrices only
(Woodbury):

    (H + shift)^-1 v = S^-1 v - S^-1 A' (W^-1 + K)^-1 A S^-1 v

One output:   W = diag(D), and (W^-1 + K)^-1 = r (I + r K r)^-1 r with r = D^1/2.
Softmax:      W_j = diag(P_j) - P_j P_j' / w_j for row j of weight w_j, where P_j = w_j times the probabilities of the C
classes. With E_c = P_c^1/2 (I + P_c^1/2 K P_c^1/2)^-1 P_c^1/2 for each class and M = sum_c E_c,

    (W^-1 + K)^-1 = E - E 1 M^-1 1' E        exactly (Rasmussen and Williams 2006, Algorithm 3.3)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from coterie._typing import Array, Indices

_FREE = 1e-9  # times the sum of a user's masses: what holds an intercept at least

#: Takes vectors (n, dim) of the users to vectors.
Inverse = Callable[[Array], Array]


class Curvature(ABC):
    """Hessians H_i of some users at their models, as operators.

    Attributes
    ----------
    shape : (n_users, dim).
    """

    shape: tuple[int, int]

    @abstractmethod
    def times(self, vectors: Array) -> Array:
        """(n_users, dim) H_i vectors_i."""

    @abstractmethod
    def inverse(self, shift: Array, dtype: type = np.float64) -> Inverse:
        """The map vectors -> (H_i + shift_i I)^-1 vectors_i, for shifts (n_users,) > 0; computed in `dtype`."""

    @abstractmethod
    def trace(self) -> Array:
        """(n_users,) the traces of H_i, or estimates of them."""


class RowTerms(NamedTuple):
    """Rows of users who have equally many, and what the loss is like there."""

    users: Indices  # positions of these users among those concerned
    design: Array  # (n, m, p) A
    gram: Array  # (n, m, m) A A' without the intercept
    mass: Array  # (n, m, 1) D, or (n, m, C) P
    weights: Array  # (n, m); 0 for padding


class RowCurvature(Curvature):
    """R + A' W A of every user; see the module.

    Parameters
    ----------
    terms : blocks of users.
    ridges : (p,) R, of one output.
    basis : (k, C) the outputs as combinations of classes, orthonormal rows; None for one output.
    intercept : whether the last column is an intercept, whose square is not in `gram`.
    """

    def __init__(self, terms: Sequence[RowTerms], ridges: Array, basis: Array | None, intercept: bool) -> None:
        self.terms, self.ridges, self.basis, self.intercept = tuple(terms), ridges, basis, intercept
        self.outputs = 1 if basis is None else len(basis)
        self.shape = sum(len(part.users) for part in terms), len(ridges) * self.outputs

    def times(self, vectors: Array) -> Array:
        v = vectors.reshape(len(vectors), -1, self.outputs)
        out = np.empty_like(v)
        for part in self.terms:
            t = part.design @ v[part.users]
            out[part.users] = part.design.swapaxes(1, 2) @ self.between(part, t)
        out += self.ridges[:, None] * v
        return out.reshape(vectors.shape)

    def between(self, part: RowTerms, t: Array) -> Array:
        """(n, m, k) W t."""
        if self.basis is None:
            return part.mass * t
        classes = part.mass * (t @ self.basis)
        means = classes.sum(axis=2, keepdims=True) / np.maximum(part.weights, 1e-300)[..., None]
        return np.asarray((classes - part.mass * means) @ self.basis.T)

    def trace(self) -> Array:
        out = np.empty(self.shape[0])
        for part in self.terms:
            mass = part.mass[..., 0]
            if self.basis is not None:  # of diag(P) - P P' / w
                mass = part.weights - (part.mass**2).sum(axis=2) / np.maximum(part.weights, 1e-300)
            squares = np.einsum("nmp,nmp->nm", part.design, part.design, optimize=False)
            out[part.users] = (mass * squares).sum(axis=1)
        return out + self.outputs * float(self.ridges.sum())

    def masses(self) -> Array:
        """(n_users,) sums over rows."""
        out = np.empty(self.shape[0])
        for part in self.terms:
            out[part.users] = part.mass.sum(axis=(1, 2))
        return out

    def inverse(self, shift: Array, dtype: type = np.float64) -> Inverse:
        return RowInverse(self, np.broadcast_to(shift, self.shape[:1]), dtype)


class RowInverse:
    """(H_i + shift_i)^-1 as a map; see the module.

    Attributes
    ----------
    curvature : of which this is the inverse.
    scales : (n_users, p) S, of one output.
    small : for each block the matrices (n, m, m) or (n, C, m, m) E, and (n, m, m) M^-1 for several outputs.
    designs : for each block A in the precision of the computation.
    """

    def __init__(self, curvature: RowCurvature, shift: Array, dtype: type) -> None:
        self.curvature, self.dtype = curvature, dtype
        self.scales = curvature.ridges + shift[:, None]
        if curvature.intercept:  # one that the ridge does not cover must be held by something beside its rows
            self.scales[:, -1] = np.maximum(self.scales[:, -1], _FREE * curvature.masses())
        self.basis = None if curvature.basis is None else curvature.basis.astype(dtype)
        self.designs, self.small = list[Array](), list[tuple[Array, Array | None]]()
        for part in curvature.terms:
            self.designs.append(part.design.astype(dtype, copy=False))
            self.small.append(self._factors(part, self.scales[part.users]))
        self.scales = self.scales.astype(dtype)

    def _factors(self, part: RowTerms, scales: Array) -> tuple[Array, Array | None]:
        gram = part.gram / scales[:, :1, None]
        if self.curvature.intercept:
            gram = gram + part.design[:, :, None, -1] * part.design[:, None, :, -1] / scales[:, -1:, None]
        eye = np.eye(gram.shape[1])
        if self.basis is None:
            return self._class_factor(gram, part.mass[..., 0], eye), None
        factors = np.empty((len(gram), part.mass.shape[2], *eye.shape), dtype=self.dtype)
        total = np.zeros_like(gram)
        for c in range(part.mass.shape[2]):
            factor = self._class_factor(gram, part.mass[..., c], eye)
            factors[:, c] = factor
            total += factor
        total += np.where(part.weights > 0, 0.0, 1.0)[:, :, None] * eye  # padding
        # M has the eigenvalues of the weights where K is small, and no row's probabilities are all zero.
        return factors, np.linalg.inv(total).astype(self.dtype)

    def _class_factor(self, gram: Array, mass: Array, eye: Array) -> Array:
        root = np.sqrt(mass)
        system = root[:, :, None] * gram * root[:, None, :] + eye
        return np.asarray(root[:, :, None] * np.linalg.inv(system) * root[:, None, :]).astype(self.dtype, copy=False)

    def __call__(self, vectors: Array) -> Array:
        v = vectors.reshape(len(vectors), -1, self.curvature.outputs).astype(self.dtype, copy=False)
        scales = self.scales[..., None]
        out = v / scales
        for number, part in enumerate(self.curvature.terms):
            z = out if len(part.users) == len(out) else out[part.users]
            design = self.designs[number]
            moved = design.swapaxes(1, 2) @ self._rows(number, design @ z)
            if z is out:
                out = z - moved / scales
            else:
                out[part.users] = z - moved / scales[part.users]
        return out.reshape(vectors.shape)

    def average(self, number: int) -> Array:
        """(n, m, m) the mean over outputs of (W^-1 + K)^-1 in a block; an estimate where there are several."""
        factors, inverse = self.small[number]
        return factors if inverse is None else factors.mean(axis=1)

    def _rows(self, number: int, t: Array) -> Array:
        """(n, m, k) (W^-1 + K)^-1 t."""
        factors, inverse = self.small[number]
        if self.basis is None or inverse is None:
            return factors @ t
        classes = (t @ self.basis).swapaxes(1, 2)[..., None]  # (n, C, m, 1)
        weighted = factors @ classes
        common = inverse @ weighted.sum(axis=1)  # (n, m, 1)
        weighted -= factors @ common[:, None]
        return weighted[..., 0].swapaxes(1, 2) @ self.basis.T
