"""Hessians of wide models, never formed: products with them and systems in them, in the space of a
user's rows.

A user with m rows A (m x p), k outputs and the ridges R (p, the same for every output) has the
Hessian

    H = R + A' W A

where W couples the outputs of one row only. With S = R + shift and K = A S^-1 A', systems need m x
m matrices only (Woodbury):

    (H + shift)^-1 v = S^-1 v - S^-1 A' (W^-1 + K)^-1 A S^-1 v

An intercept b may be free, so its column is not in K: with C = (W^-1 + K)^-1, rows have q = C (t +
column b), and b follows from its own row of the system, held b + column' q = v_b.

One output:   W = diag(D), and (W^-1 + K)^-1 = r (I + r K r)^-1 r with r = D^1/2.
Softmax:      W_j = diag(P_j) - P_j P_j' / w_j for row j of weight w_j, where P_j = w_j times the
              probabilities of the C
classes. With E_c = P_c^1/2 (I + P_c^1/2 K P_c^1/2)^-1 P_c^1/2 for each class and M = sum_c E_c,

    (W^-1 + K)^-1 = E - E 1 M^-1 1' E        exactly (Rasmussen and Williams 2006, Algorithm 3.3)

Spans
-----
Quadratics of wide models: curvature in the span of a few vectors, and one number outside of it.

A user with few rows bends its loss in the span of these rows only. With orthonormal rows Q (b x p)
that span it, the same for each of k outputs, and orthonormal rows V (q x b k) of directions within
the span, the Hessian is

    H = outer I + (Q x I_k)' (core - outer I) (Q x I_k),    core = inner I + V' diag(gains) V
    (H + shift)^-1 = I / s + (Q x I_k)' ((1/i - 1/s) I - V' diag(gains / (gains + i)) V / i) (Q x
    I_k)

with s = outer + shift and i = inner + shift, so no matrix is larger than the span. Rows that are
zero are padding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from coterie.base.types import Array, Indices, Ints

_FREE = 1e-15  # times its curvature: what holds an intercept at least

_CACHED = 4_000_000  # bytes of rows that are used twice in a row
_LARGEST = 5e7  # numbers in the preconditioner of groups
# Steps of conjugate gradients, and the share of the residual at which they end.
_STEPS, _EXACT = 100, 1e-4

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
        """(n_users, dim) H_i vectors_i, in the precision of the vectors."""

    @abstractmethod
    def inverse(self, shift: Array, dtype: type = np.float64) -> Inverse:
        """The map vectors -> (H_i + shift_i I)^-1 vectors_i, for shifts (n_users,) > 0; computed in
        `dtype`.
        """

    @abstractmethod
    def trace(self) -> Array:
        """(n_users,) the traces of H_i, or estimates of them."""


    def level(self) -> float | None:
        """h where H_i = h I for all users; None where it is not known to be so."""
        return None


#: Values (n,), gradients (n, dim) and the Hessians as operators.
WideEvaluation = tuple[Array, Array, Curvature]


class RowTerms(NamedTuple):
    """Rows of users who have equally many, and what the loss is like there."""

    users: Indices  # positions of these users among those concerned
    design: Array  # (n, m, p) A
    gram: Array  # (n, m, m) A A' without the intercept
    mass: Array  # (n, m, 1) D, or (n, m, C) P
    weights: Array  # (n, m); 0 for padding
    copies: dict[str, Array] | None = None  # of A with fewer bits, kept for the next time
    name: str = ""  # of the copy

    def take(self, users: slice) -> RowTerms:
        """The same for some of these users; no copy of A is kept."""
        return RowTerms(self.users[users], self.design[users], self.gram[users], self.mass[users],
                        self.weights[users])

    def design_in(self, dtype: type) -> Array:
        """A with so many bits."""
        if self.design.dtype == dtype or self.copies is None:
            return self.design.astype(dtype, copy=False)
        if self.name not in self.copies:
            self.copies[self.name] = self.design.astype(dtype)
        return self.copies[self.name]


class RowCurvature(Curvature):
    """R + A' W A of every user; see the module.

    Parameters
    ----------
    terms : blocks of users.
    ridges : (p,) R, of one output.
    basis : (k, C) the outputs as combinations of classes, orthonormal rows; None for one output.
    intercept : whether the last column is an intercept, whose square is not in `gram`.
    """

    def __init__(self, terms: Sequence[RowTerms], ridges: Array, basis: Array | None,
                 intercept: bool) -> None:
        self.terms, self.ridges, self.basis, self.intercept = tuple(terms), ridges, basis, intercept
        self.outputs = 1 if basis is None else len(basis)
        self.shape = sum(len(part.users) for part in terms), len(ridges) * self.outputs

    def times(self, vectors: Array) -> Array:
        v = vectors.reshape(len(vectors), -1, self.outputs)
        out = np.empty_like(v)
        for part in self.terms:
            design = part.design_in(v.dtype.type)
            # Users whose rows stay near the processor.
            step = max(1, _CACHED // max(design[0].nbytes, 1))
            for start in range(0, len(design), step):
                some = slice(start, start + step)
                t = self.between(part.take(some), design[some] @ v[part.users[some]])
                out[part.users[some]] = design[some].swapaxes(1, 2) @ t.astype(v.dtype, copy=False)
        out += self.ridges[:, None].astype(v.dtype) * v
        return out.reshape(vectors.shape)

    def between(self, part: RowTerms, t: Array) -> Array:
        """(n, m, k) W t."""
        if self.basis is None:
            return part.mass * t
        classes = part.mass * (t @ self.basis)
        means = classes.sum(axis=2, keepdims=True) / np.maximum(part.weights, 1e-300)[..., None]
        return np.asarray((classes - part.mass * means) @ self.basis.T)

    def mean_mass(self, part: RowTerms) -> Array:
        """(n, m) the mean over outputs of the diagonal of W."""
        if self.basis is None:
            return part.mass[..., 0]
        traces = part.weights - (part.mass**2).sum(axis=2) / np.maximum(part.weights, 1e-300)
        return np.asarray(np.maximum(traces, 0.0) / self.outputs)

    def trace(self) -> Array:
        out = np.empty(self.shape[0])
        for part in self.terms:
            squares = np.einsum("nmm->nm", part.gram)
            if self.intercept:
                squares = squares + part.design[..., -1] ** 2
            out[part.users] = (self.mean_mass(part) * squares).sum(axis=1)
        return self.outputs * (out + float(self.ridges.sum()))

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
        self.basis: Array | None = None if curvature.basis is None \
            else curvature.basis.astype(dtype)
        self.designs, self.small = list[Array](), list[_Small]()
        for part in curvature.terms:
            self.designs.append(part.design_in(dtype))
            self.small.append(self._factors(part, self.scales[part.users]))
        # An intercept that nothing holds.
        self.scales = np.where(self.scales > 0, self.scales, 1.0).astype(dtype)

    def _factors(self, part: RowTerms, scales: Array) -> _Small:
        gram: Array = (part.gram / scales[:, :1, None]).astype(self.dtype, copy=False)
        eye: Array = np.eye(gram.shape[1], dtype=self.dtype)
        factors: Array = np.empty((len(gram), part.mass.shape[2], *eye.shape), dtype=self.dtype)
        for c in range(part.mass.shape[2]):
            root: Array = np.sqrt(part.mass[..., c]).astype(self.dtype, copy=False)
            system = root[:, :, None] * gram * root[:, None, :] + eye
            factors[:, c] = root[:, :, None] * np.linalg.inv(system) * root[:, None, :]
        inverse: Array | None = None
        if self.basis is not None:
            total = factors.sum(axis=1, dtype=float)
            total += np.where(part.weights > 0, 0.0, 1.0)[:, :, None] * eye  # padding
            inverse = np.linalg.inv(total).astype(self.dtype)
        small = _Small(factors, inverse, None, None)
        if not self.curvature.intercept:
            return small
        k = self.curvature.outputs
        column: Array = part.design[..., -1].astype(self.dtype)
        # (n, m, k, k), the last axis for k columns.
        units = column[:, :, None, None] * np.eye(k, dtype=self.dtype)
        border = self._rows(small, units) if self.basis is not None \
            else factors[:, 0] @ column[..., None]
        border = border.reshape(len(gram), -1, k, k)
        pull = np.einsum("nm,nmij->nij", column, border).astype(float)
        held = np.maximum(scales[:, -1], _FREE * np.trace(pull, axis1=1, axis2=2) + 1e-300)
        return small._replace(border=border, inside=np.linalg.inv(
            pull + held[:, None, None] * np.eye(k)).astype(self.dtype))

    def __call__(self, vectors: Array) -> Array:
        v: Array = vectors.reshape(len(vectors), -1,
                                   self.curvature.outputs).astype(self.dtype, copy=False)
        scales = self.scales[..., None]
        out = v / scales
        if self.curvature.intercept:
            out[:, -1] = 0.0
        for part, design, small in zip(self.curvature.terms, self.designs, self.small, strict=True):
            everyone = len(part.users) == len(out)
            # Users whose rows stay near the processor.
            step = max(1, _CACHED // max(design[0].nbytes, 1))
            for start in range(0, len(design), step):
                some = slice(start, start + step)
                users = some if everyone else part.users[some]
                rows, last = self._bordered(small.take(some), design[some],
                                            design[some] @ out[users], v[users, -1])
                moved = out[users] - (design[some].swapaxes(1, 2) @ rows) / scales[users]
                if last is not None:
                    moved[:, -1] = last
                out[users] = moved
        return out.reshape(vectors.shape)

    def _bordered(self, small: _Small, design: Array, t: Array,
                  right: Array) -> tuple[Array, Array | None]:
        """q = C (t + column b) with the intercepts b from  held b + column' q = right, and these.
        """
        rows = self._rows(small, t[..., None])[..., 0] if self.basis is not None \
            else small.factors[:, 0] @ t
        if small.border is None or small.inside is None:
            return rows, None
        column = design[..., -1]
        lack = right - np.einsum("nm,nmk->nk", column, rows)
        b = (small.inside @ lack[..., None])[..., 0]
        return rows + np.einsum("nmij,nj->nmi", small.border, b), b

    def _rows(self, small: _Small, t: Array) -> Array:
        """(n, m, k, r) C t for r columns of outputs (n, m, k, r)."""
        assert self.basis is not None
        assert small.inverse is not None
        classes = np.einsum("nmkr,kc->ncmr", t, self.basis, optimize=True)
        weighted = small.factors @ classes
        common = small.inverse @ weighted.sum(axis=1)  # (n, m, r)
        weighted -= small.factors @ common[:, None]
        return np.einsum("ncmr,kc->nmkr", weighted, self.basis, optimize=True)

    def average(self, number: int) -> Array:
        """(n, m, m) the mean over outputs of (W^-1 + K)^-1 in a block; an estimate where there are
        several.
        """
        part, small = self.curvature.terms[number], self.small[number]
        mean = small.factors.mean(axis=1)
        if not self.curvature.intercept:
            return mean
        column = self.designs[number][..., -1:]
        border = mean @ column
        held = self.scales[part.users, -1:, None] + column.swapaxes(1, 2) @ border
        return np.asarray(mean - border @ border.swapaxes(1, 2) / held)


class _Small(NamedTuple):
    """C = (W^-1 + K)^-1 of the users of a block, without the intercept in K, and what intercepts
    need.
    """

    factors: Array  # (n, C, m, m) E of each class, or C itself
    inverse: Array | None  # (n, m, m) M^-1, for several outputs
    border: Array | None  # (n, m, k, k) C column
    inside: Array | None  # (n, k, k) (held + column' C column)^-1

    def take(self, users: slice) -> _Small:
        """The same for some users."""
        return _Small(self.factors[users], *(None if part is None else part[users]
                                             for part in self[1:]))


class EnvelopeCurvature(Curvature):
    """E_i = P_i (H_i + P_i)^-1 H_i with P_i = prices_i I: the Hessians of Moreau envelopes.

        (E + s)^-1 v = (v + P x) / (P + s),      x = (H + P s / (P + s))^-1 P v / (P + s)
    """

    def __init__(self, inside: Curvature, prices: Array) -> None:
        self.inside, self.prices, self.shape = inside, prices, inside.shape
        self.near = inside.inverse(prices)

    def times(self, vectors: Array) -> Array:
        return self.inside.times(self.near(self.prices[:, None] * vectors))

    def inverse(self, shift: Array, dtype: type = np.float64) -> Inverse:
        total = self.prices + shift
        inside = self.inside.inverse(self.prices * shift / total, dtype)
        first: Array = (1.0 / total)[:, None].astype(dtype)
        second: Array = (self.prices / total)[:, None].astype(dtype)

        def solve(vectors: Array) -> Array:
            return first * vectors + second * inside(second * vectors)

        return solve

    def trace(self) -> Array:
        """With the mean curvature in all directions; an estimate."""
        mean = self.inside.trace() / self.shape[1]
        return np.asarray(self.shape[1] * mean * self.prices / (mean + self.prices))


class ScaledCurvature(Curvature):
    """The Hessians of losses that count w_i times: w_i H_i."""

    def __init__(self, inside: Curvature, weights: Array) -> None:
        self.inside, self.weights, self.shape = inside, weights, inside.shape

    def times(self, vectors: Array) -> Array:
        return np.asarray(self.weights[:, None] * self.inside.times(vectors))

    def inverse(self, shift: Array, dtype: type = np.float64) -> Inverse:
        solve = self.inside.inverse(shift / self.weights, dtype)
        return lambda vectors: np.asarray(solve(vectors) / self.weights[:, None])

    def trace(self) -> Array:
        return np.asarray(self.weights * self.inside.trace())


class GroupCurvature(Curvature):
    """sum_i weights_i H_i over the members i of each group; systems by conjugate gradients.

    Parameters
    ----------
    inside : of the members.
    labels, weights : the group of each member, and its factor.
    n_groups : number of groups.
    """

    def __init__(self, inside: Curvature, labels: Ints, weights: Array, n_groups: int) -> None:
        self.inside, self.labels, self.weights = inside, labels, weights
        self.shape = n_groups, inside.shape[1]
        self.order = np.argsort(labels, kind="stable")
        self.starts = np.searchsorted(labels[self.order], np.arange(n_groups))

    def _sums(self, parts: Array) -> Array:
        """(n_groups, ...) sums over members; every group has one at least."""
        weighted = self.weights.reshape(-1, *(1,) * (parts.ndim - 1)) * parts
        return np.add.reduceat(weighted[self.order], self.starts, axis=0)

    def times(self, vectors: Array) -> Array:
        return self._sums(self.inside.times(vectors[self.labels]))

    def trace(self) -> Array:
        return self._sums(self.inside.trace())

    def inverse(self, shift: Array, dtype: type = np.float64) -> Inverse:
        precondition = self.preconditioner(shift)

        def solve(vectors: Array) -> Array:
            return conjugate_gradients(lambda v: self.times(v) + shift[:, None] * v, precondition,
                                       vectors)

        return solve

    def preconditioner(self, shift: Array) -> Inverse:
        """By the mean over outputs of one output's Hessian, where that is a matrix of features;
        else by the trace.
        """
        inside, outputs = self.inside, 1
        if not isinstance(inside, RowCurvature) \
                or self.shape[0] * len(inside.ridges) ** 2 > _LARGEST:
            sizes = self.trace() / self.shape[1] + shift
            return lambda v: v / sizes[:, None]
        outputs = inside.outputs
        matrices = np.zeros((self.shape[0], len(inside.ridges), len(inside.ridges)))
        for part in inside.terms:
            mass = inside.mean_mass(part) * self.weights[part.users, None]
            root = np.sqrt(mass)[..., None].astype(np.float32) * part.design_in(np.float32)
            for group in np.unique(self.labels[part.users]):
                rows = root[self.labels[part.users] == group].reshape(-1, root.shape[2])
                matrices[group] += rows.T @ rows
        held = self._sums(np.ones(len(self.labels)))[:, None] * inside.ridges + shift[:, None]
        # What 32 bits do not tell from zero.
        held += 1e-8 * np.trace(matrices, axis1=1, axis2=2)[:, None]
        matrices[:, np.arange(len(inside.ridges)), np.arange(len(inside.ridges))] += held
        inverses = np.linalg.inv(matrices)
        return lambda v: (inverses @ v.reshape(len(v), -1, outputs)).reshape(v.shape)


def conjugate_gradients(operator: Inverse, precondition: Inverse, right: Array) -> Array:
    """Solutions of operator(x) = right for several systems at once, by preconditioned conjugate
    gradients.
    """
    x, r = np.zeros_like(right), right.copy()
    z = precondition(r)
    p, rz = z, np.einsum("nd,nd->n", r, z)
    enough = _EXACT**2 * rz
    for _ in range(_STEPS):
        product = operator(p)
        bent = np.einsum("nd,nd->n", p, product)
        length = np.divide(rz, bent, out=np.zeros_like(rz),
                           where=(bent > 0) & (rz > enough))[:, None]
        x, r = x + length * p, r - length * product
        z = precondition(r)
        new = np.einsum("nd,nd->n", r, z)
        if not (new > enough).any():
            break
        p, rz = z + np.divide(new, rz, out=np.zeros_like(rz), where=rz > 0)[:, None] * p, new
    return x


class Span(NamedTuple):
    """Hessians of n users as in the module."""

    basis: Array  # (n, b, p) Q
    axes: Array  # (n, q, b k) V
    gains: Array  # (n, q) >= 0
    inner: Array  # (n,) > 0
    outer: Array  # (n,) > 0

    @property
    def outputs(self) -> int:
        b = self.basis.shape[1]
        return self.axes.shape[2] // b if b else 1

    def take(self, users: Indices | slice) -> Span:
        """Those of some users."""
        return Span(*(part[users] for part in self))


class SpanCurvature(RowCurvature):
    """The Hessians of a `Span` as operators.

    Parameters
    ----------
    span : of the users.
    """

    def __init__(self, span: Span) -> None:
        n, _, p = span.basis.shape
        nothing = np.empty((n, 0, 1))
        self.span, self.outputs = span, span.outputs
        self.terms = (RowTerms(np.arange(n), span.basis, nothing, nothing, nothing[..., 0]),)
        # What preconditioners ask for: the curvature everywhere, and beside it that of each vector.
        self.ridges = np.full(p, float(span.outer.min(initial=np.inf)))
        self.basis, self.intercept = None, False
        self.shape = n, p * self.outputs

    def times(self, vectors: Array) -> Array:
        span, n = self.span, len(vectors)
        t = (span.basis @ vectors.reshape(n, -1, self.outputs)).reshape(n, -1)
        along = span.gains * (span.axes @ t[..., None])[..., 0]
        change = (span.inner - span.outer)[:, None] * t + (along[:, None] @ span.axes)[:, 0]
        back = span.basis.swapaxes(1, 2) @ change.reshape(n, -1, self.outputs)
        return np.asarray(span.outer[:, None] * vectors + back.reshape(vectors.shape))

    def mean_mass(self, part: RowTerms) -> Array:
        span = self.span.take(part.users)
        along = np.einsum("nq,nqc,nqc->nc", span.gains, span.axes, span.axes, optimize=True)
        mean = along.reshape(len(along), -1, self.outputs).mean(axis=2)
        return np.asarray(np.maximum((span.inner - span.outer)[:, None] + mean, 0.0))

    def trace(self) -> Array:
        inside = self.outputs * (self.span.basis != 0).any(axis=2).sum(axis=1)
        return np.asarray(self.span.outer * (self.shape[1] - inside) + self.span.inner * inside
                          + self.span.gains.sum(axis=1))

    def level(self) -> float | None:
        outer = self.span.outer
        return float(outer[0]) if not self.span.basis.shape[1] and (outer == outer[0]).all() \
            else None

    def inverse(self, shift: Array, dtype: type = np.float64) -> Inverse:
        return SpanInverse(self, np.broadcast_to(shift, self.shape[:1]), dtype)


class SpanInverse(RowInverse):
    """(H_i + shift_i)^-1 as a map; see the module.

    Attributes
    ----------
    scales : (n_users, p) s, in every column.
    plain, along : (n_users, 1) 1/i - 1/s, and (n_users, q) gains / (gains + i) / i.
    """

    def __init__(self, curvature: SpanCurvature, shift: Array, dtype: type) -> None:
        span = curvature.span
        s, i = span.outer + shift, (span.inner + shift)[:, None]
        self.curvature, self.dtype, self.basis = curvature, dtype, None
        self.plain: Array = (1.0 / i - 1.0 / s[:, None]).astype(dtype)
        self.along: Array = (span.gains / (span.gains + i) / i).astype(dtype)
        self.scales = np.repeat(s[:, None], span.basis.shape[2], axis=1).astype(dtype)
        self.axes: Array = span.axes.astype(dtype, copy=False)
        self.designs = [span.basis.astype(dtype, copy=False)]

    def __call__(self, vectors: Array) -> Array:
        design, k, n = self.designs[0], self.curvature.outputs, len(vectors)
        v: Array = vectors.reshape(n, -1, k).astype(self.dtype, copy=False)
        t = (design @ v).reshape(n, -1)
        along = self.along * (self.axes @ t[..., None])[..., 0]
        inside = self.plain * t - (along[:, None] @ self.axes)[:, 0]
        return np.asarray(v / self.scales[:, :1, None]
                          + design.swapaxes(1, 2) @ inside.reshape(n, -1, k)).reshape(vectors.shape)

    def average(self, number: int) -> Array:
        """(n, b, b) s^2 times the mean over outputs of what `__call__` subtracts in the span, at
        least 0.
        """
        n, b, _ = self.designs[0].shape
        k, q = self.curvature.outputs, self.axes.shape[1]
        rows = (np.sqrt(self.along / k)[..., None] * self.axes).reshape(n, q, b, k).swapaxes(2,
            3).reshape(n, q * k, b)
        mean = rows.swapaxes(1, 2) @ rows - self.plain[..., None] * np.eye(b, dtype=self.dtype)
        if (self.plain > 0).any():  # where there is less curvature inside than outside
            values, vectors = np.linalg.eigh(mean)
            mean = (vectors * np.maximum(values, 0.0)[:, None, :]) @ vectors.swapaxes(1, 2)
        return np.asarray(self.scales[:, :1, None] ** 2 * mean)
