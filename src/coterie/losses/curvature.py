"""Hessians of wide models, never formed: products with them and systems in them, in the space of a user's rows.

A user with m rows A (m x p), k outputs and the ridges R (p, the same for every output) has the Hessian

    H = R + A' W A

where W couples the outputs of one row only. With S = R + shift and K = A S^-1 A', systems need m x m matrices only
(Woodbury):

    (H + shift)^-1 v = S^-1 v - S^-1 A' (W^-1 + K)^-1 A S^-1 v

An intercept b has a column of its own outside of K, so that it may be free: with C = (W^-1 + K)^-1, q = C (t + column b)
and its own row of the system, held b + column' q = v_b.

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

_FREE = 1e-15  # times its curvature: what holds an intercept at least

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

    def inverse(self, shift: Array, dtype: type = np.float64) -> Inverse:
        return RowInverse(self, np.broadcast_to(shift, self.shape[:1]), dtype)


class RowInverse:
    """(H_i + shift_i)^-1 as a map; see the module.

    Attributes
    ----------
    curvature : of which this is the inverse.
    scales : (n_users, p) S, of one output.
    designs : for each block A in the precision of the computation.
    small : for each block what `_Small` says.
    """

    def __init__(self, curvature: RowCurvature, shift: Array, dtype: type) -> None:
        self.curvature, self.dtype = curvature, dtype
        self.scales: Array = curvature.ridges + shift[:, None]
        self.basis: Array | None = None if curvature.basis is None else curvature.basis.astype(dtype)
        self.designs, self.small = list[Array](), list[_Small]()
        for part in curvature.terms:
            self.designs.append(part.design.astype(dtype, copy=False))
            self.small.append(self._factors(part, self.scales[part.users]))
        self.scales = self.scales.astype(dtype)

    def _factors(self, part: RowTerms, scales: Array) -> _Small:
        gram = part.gram / scales[:, :1, None]
        eye, total = np.eye(gram.shape[1]), None
        factors: Array = np.empty((len(gram), part.mass.shape[2], *eye.shape), dtype=self.dtype)
        for c in range(part.mass.shape[2]):
            root = np.sqrt(part.mass[..., c])
            system = root[:, :, None] * gram * root[:, None, :] + eye
            factor = root[:, :, None] * np.linalg.inv(system) * root[:, None, :]
            factors[:, c], total = factor, factor if total is None else total + factor
        inverse = None
        if self.basis is not None:
            assert total is not None
            total += np.where(part.weights > 0, 0.0, 1.0)[:, :, None] * eye  # padding
            inverse = np.linalg.inv(total).astype(self.dtype)
        small = _Small(factors, inverse, None, None)
        if not self.curvature.intercept:
            return small
        k = self.curvature.outputs
        column = part.design[..., -1].astype(self.dtype)
        units = column[:, :, None, None] * np.eye(k, dtype=self.dtype)  # (n, m, k, k), the last axis for k columns
        border = self._rows(small, units) if self.basis is not None else factors[:, 0] @ column[..., None]
        border = border.reshape(len(gram), -1, k, k)
        pull = np.einsum("nm,nmij->nij", column, border).astype(float)
        held = np.maximum(scales[:, -1], _FREE * np.trace(pull, axis1=1, axis2=2) + 1e-300)
        return small._replace(border=border, inside=np.linalg.inv(pull + held[:, None, None] * np.eye(k)).astype(
            self.dtype))

    def __call__(self, vectors: Array) -> Array:
        v = vectors.reshape(len(vectors), -1, self.curvature.outputs).astype(self.dtype, copy=False)
        scales = self.scales[..., None]
        out = v / scales
        if self.curvature.intercept:
            out[:, -1] = 0.0
        for number, (part, design) in enumerate(zip(self.curvature.terms, self.designs, strict=True)):
            everyone = len(part.users) == len(out)
            z = out if everyone else out[part.users]
            right = v[:, -1] if everyone else v[part.users, -1]
            rows, last = self._bordered(self.small[number], design, design @ z, right)
            moved = z - (design.swapaxes(1, 2) @ rows) / (scales if everyone else scales[part.users])
            if last is not None:
                moved[:, -1] = last
            if everyone:
                out = moved
            else:
                out[part.users] = moved
        return out.reshape(vectors.shape)

    def _bordered(self, small: _Small, design: Array, t: Array, right: Array) -> tuple[Array, Array | None]:
        """q = C (t + column b) with the intercepts b from  held b + column' q = right, and these."""
        rows = self._rows(small, t[..., None])[..., 0] if self.basis is not None else small.factors[:, 0] @ t
        if small.border is None or small.inside is None:
            return rows, None
        column = design[..., -1]
        lack = right - np.einsum("nm,nmk->nk", column, rows)
        b = (small.inside @ lack[..., None])[..., 0]
        return rows + np.einsum("nmij,nj->nmi", small.border, b), b

    def _rows(self, small: _Small, t: Array) -> Array:
        """(n, m, k, r) C t for r columns of outputs (n, m, k, r)."""
        assert self.basis is not None and small.inverse is not None
        classes = np.einsum("nmkr,kc->ncmr", t, self.basis, optimize=True)
        weighted = small.factors @ classes
        common = small.inverse @ weighted.sum(axis=1)  # (n, m, r)
        weighted -= small.factors @ common[:, None]
        return np.einsum("ncmr,kc->nmkr", weighted, self.basis, optimize=True)

    def average(self, number: int) -> Array:
        """(n, m, m) the mean over outputs of (W^-1 + K)^-1 in a block; an estimate where there are several."""
        part, small = self.curvature.terms[number], self.small[number]
        mean = small.factors.mean(axis=1)
        if not self.curvature.intercept:
            return mean
        column = self.designs[number][..., -1:]
        border = mean @ column
        held = self.scales[part.users, -1:, None] + column.swapaxes(1, 2) @ border
        return np.asarray(mean - border @ border.swapaxes(1, 2) / held)


class _Small(NamedTuple):
    """C = (W^-1 + K)^-1 of the users of a block, without the intercept in K, and what intercepts need."""

    factors: Array  # (n, C, m, m) E of each class, or C itself
    inverse: Array | None  # (n, m, m) M^-1, for several outputs
    border: Array | None  # (n, m, k, k) C column
    inside: Array | None  # (n, k, k) (held + column' C column)^-1
