"""What users with wide models say of their Hessians: a small matrix in the span of their rows, a
part in every round.

A user with m rows A and k outputs has H <= ridge I + (A x I)' W (A x I), where W couples the
outputs of one row. With the singular vectors Q of A, which do not depend on the model, this is a
`core` of (m k)^2 numbers in their span, and the ridge outside of it (see
`coterie.losses.curvature`). A reply is at most `_MODELS` models long:

- the next vectors of Q, those of the largest singular values first; the server says how many it
  has;
- the core for the vectors it then has: its triangle, or if that is too long its largest
  eigenvalues, with the others raised to the next one.

While some vectors are missing, with the blocks C_kk, C_ku and C_uu of known and unknown ones,

    core = C_kk + ||C_ku|| I,    outer = ||C_uu|| + ||C_ku|| + ridge

so the matrix is always at least as large as H. All of it follows from the Hessian. Users remember
nothing for it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from coterie.base.errors import Incompatible
from coterie.base.types import Array, Flags, Ints
from coterie.federated.protocol.messages import Ragged, triangle
from coterie.losses import AffineLoss, Loss, Samples
from coterie.losses.curvature import RowCurvature, RowTerms

_MODELS = 6.5  # length of a reply without its gradient, in models
_SHARE = 0.6  # of it at least for vectors, while some are missing
_EQUAL = 1e-9  # times the largest eigenvalue: a difference that is not sent
_SOFTMAX = 0.5  # largest curvature of a row's loss under softmax, in any direction of the outputs
_DENSE = 200  # size of a core up to which all its eigenvalues are computed


class SpanRows(NamedTuple):
    """The rows of a user in their own span, A = rows Q, where the Hessian is (rows x I)' W (rows x
    I) and the ridge.
    """

    basis: Array  # (r, p) Q, the largest singular value first
    rows: Array  # (m, r)
    between: Array  # (m, k, k) W, symmetric

    @classmethod
    def of(cls, curvature: RowCurvature, part: RowTerms, user: int) -> SpanRows:
        """Those of one user of a block."""
        gram = part.gram[user]
        if curvature.intercept:
            gram = gram + np.outer(part.design[user, :, -1], part.design[user, :, -1])
        squares, vectors = np.linalg.eigh(gram)
        kept = np.flatnonzero(squares > 1e-12 * squares[-1])[::-1]
        lengths = np.sqrt(squares[kept])
        mass = part.mass[user]
        between = mass[:, :, None]
        if curvature.basis is not None:
            weights = np.maximum(part.weights[user], 1e-300)[:, None, None]
            classes = (mass[:, :, None] * np.eye(mass.shape[1]) - mass[:, :, None]
                       * mass[:, None, :] / weights)
            between = curvature.basis @ classes @ curvature.basis.T
        return cls((vectors[:, kept] / lengths).T @ part.design[user], vectors[:, kept] * lengths,
                   between)

    @property
    def size(self) -> int:
        return self.rows.shape[1] * self.between.shape[1]

    def times(self, vector: Array) -> Array:
        """The Hessian in the span, without the ridge, times a vector."""
        t = self.rows @ vector.reshape(self.rows.shape[1], -1)
        return np.asarray(self.rows.T @ (self.between @ t[..., None])[..., 0]).ravel()

    def core(self) -> Array:
        """The same as a matrix."""
        (m, r), k = self.rows.shape, self.between.shape[1]
        pairs = (self.rows[:, :, None] * self.rows[:, None, :]).reshape(m, -1)
        core = (pairs.T @ self.between.reshape(m, -1)).reshape(r, r, k, k).swapaxes(1,
            2).reshape(r * k, -1)
        return np.asarray(0.5 * (core + core.T))

    def leading(self, count: int) -> tuple[Array, Array]:
        """The largest eigenvalues of the core in descending order, and their vectors as rows."""
        if self.size <= _DENSE or 3 * count > self.size:
            values, vectors = np.linalg.eigh(self.core())
        else:
            from scipy.sparse.linalg import LinearOperator, eigsh

            # One start for all: a user gives the same answer to the same question.
            values, vectors = eigsh(LinearOperator((self.size, self.size), matvec=self.times),
                                    k=count, which="LA", v0=np.ones(self.size), tol=1e-10)
        order = np.argsort(-values, kind="stable")[:count]
        return values[order], vectors[:, order].T


def part_of(rows: SpanRows, ridge: float, have: int, budget: float) -> tuple[Array, Array, Array]:
    """What fits into a reply, for a server that has some vectors.

    - (rows, dim) new vectors, k in each row, the last of them zero;
    - the triangle of the core, or rows sqrt(l - inner) v for its largest eigenvalues l;
    - the levels: outer, and inner if there are rows.

    Parameters
    ----------
    rows : of the user.
    ridge : that the Hessian is at least, times I.
    have : number of vectors that the server has.
    budget : of numbers.
    """
    (r, p), k = rows.basis.shape, rows.between.shape[1]
    have = min(max(have, 0), r)
    new = max((n for n in range(r - have + 1) if -(-n // k) * p * k + _half((have + n) * k)
               <= budget), default=0)
    new = max(new, min(r - have, max(int(_SHARE * budget / p), 1)))
    size, outer = (have + new) * k, 0.0
    sent = np.zeros((-(-new // k) * k, p))
    sent[:new] = rows.basis[have:have + new]
    left = budget - sent.size
    known = rows._replace(rows=rows.rows[:, :have + new])
    across = 0.0
    if have + new < r:
        unknown = rows._replace(rows=rows.rows[:, have + new:])
        across = float(np.linalg.norm(rows.core()[:size, size:], 2))
        outer = float(unknown.leading(1)[0][0]) + across
    levels = np.array([max(outer, 0.0) + ridge])
    if _half(size) <= left:
        core = triangle((known.core() + (across + ridge) * np.eye(size))[None])[0]
        return sent.reshape(-1, p * k), core, levels
    count = min(max(int(left // size), 0), size - 1)
    values, vectors = known.leading(count + 1)
    inner = max(float(values[-1]), 0.0)
    above = np.flatnonzero(values - inner > _EQUAL * values[0])
    core = vectors[above] * np.sqrt(values[above] - inner)[:, None]
    return sent.reshape(-1, p * k), core.ravel(), np.append(levels, inner + across + ridge)


def _half(size: int) -> int:
    return size * (size + 1) // 2


def hessian_parts(curvature: RowCurvature, ridge: float, have: Ints, rank: int,
                  withheld: Flags | None) -> dict[str, Ragged]:
    """The fields of replies.

    Parameters
    ----------
    curvature : the Hessians of the users who reply.
    ridge : of the loss.
    have : (n,) number of vectors that the server has.
    rank : length of a reply without its gradient, in models; 0 for the default.
    withheld : (n,) who sends only a bound; nobody if None.

    Raises
    ------
    Incompatible : complete Hessians are asked for.
    """
    if rank < 0:
        raise Incompatible("Complete Hessians of wide models are too large to send. Use "
                           "Newton(rank=0).")
    n, dim = curvature.shape
    out = [(np.empty((0, dim)), np.empty(0), np.empty(0))] * n
    for part in curvature.terms:
        for position, user in enumerate(part.users):
            rows = SpanRows.of(curvature, part, position)
            if withheld is not None and withheld[user]:
                out[user] = np.empty((0, dim)), np.empty(0), _rounded(rows, ridge)
            else:
                out[user] = part_of(rows, ridge, int(have[user]), (rank or _MODELS) * dim)
    return {name: Ragged.of(np.concatenate(pieces), np.array([len(piece) for piece in pieces]))
            for name, pieces in zip(("basis", "core", "diagonal"), zip(*out, strict=True),
                                    strict=True)}


def _rounded(rows: SpanRows, ridge: float) -> Array:
    """The largest eigenvalue, rounded up to a power of sqrt(2), so that it says little."""
    largest = max(float(rows.leading(1)[0][0]) + ridge, 1e-12)
    return np.array([2.0 ** (np.ceil(2.0 * np.log2(largest) + 1e-9) / 2.0)])


def evaluated(loss: Loss, samples: Samples, models: Array, users: Ints) -> tuple[Array, Array,
        Array | RowCurvature]:
    """Values, gradients and Hessians of some users; Hessians of wide models are operators."""
    if isinstance(loss, AffineLoss) and loss.wide(samples):
        values, gradients, curvature = loss.expand(samples, models, users)
        assert isinstance(curvature, RowCurvature)
        return values, gradients, curvature
    return loss.evaluate(samples, models, 2, users)


def mean_curvature(hessians: Array | RowCurvature) -> Array:
    """(n,) det(H + 1e-3 tr(H)/d I)^(1/d): the geometric mean of the curvatures, kept away from
    zero.

    Of wide models it is the mean over the span of the user's rows, without the many directions that
    only the ridge bends; with several outputs it is estimated from the mean of W over outputs. No
    matrix is larger than the rows.
    """
    if isinstance(hessians, RowCurvature):
        ridge, out = ridge_of(hessians), np.empty(hessians.shape[0])
        for part in hessians.terms:
            values = _spectra(hessians, part, hessians.mean_mass(part)) + ridge
            padding = (np.arange(values.shape[1]) < values.shape[1]
                       - (part.weights > 0).sum(axis=1)[:, None])
            level = (1e-3 * np.where(padding, 0.0,
                                     values).sum(axis=1) / np.maximum((~padding).sum(axis=1), 1))
            logs = np.where(padding, 0.0, np.log(values + level[:, None])).sum(axis=1)
            out[part.users] = np.exp(logs / np.maximum((~padding).sum(axis=1), 1))
        return out
    dim = hessians.shape[-1]
    level = np.trace(hessians, axis1=1, axis2=2) / dim
    with np.errstate(divide="ignore"):
        logs = np.linalg.slogdet(hessians + (1e-3 * level)[:, None, None] * np.eye(dim))[1]
    return np.exp(logs / dim)


def stiffness(loss: Loss, samples: Samples, hessians: Array | RowCurvature, users: Ints) -> Array:
    """(n,) a bound on the largest curvature; if there is none, twice the largest at the current
    models.
    """
    if isinstance(hessians, RowCurvature):
        most, out = getattr(loss, "max_curvature", _SOFTMAX), np.empty(len(users))
        for part in hessians.terms:
            mass = most * part.weights if np.isfinite(most) else 2.0 * part.mass[..., 0]
            out[part.users] = _spectra(hessians, part, mass)[:, -1]
        return out + ridge_of(hessians)
    known = loss.lipschitz(samples)[users]
    return np.where(np.isfinite(known), known, 2.0 * np.linalg.eigvalsh(hessians)[:, -1])


def ridge_of(curvature: RowCurvature) -> float:
    """The ridge of the loss."""
    return float(curvature.ridges.max())


def _spectra(curvature: RowCurvature, part: RowTerms, mass: Array) -> Array:
    """(n, m) the eigenvalues of A' diag(mass) A other than zeros, of the users of a block."""
    gram, root = part.gram, np.sqrt(mass)
    if curvature.intercept:
        gram = gram + part.design[..., -1, None] * part.design[:, None, :, -1]
    return np.maximum(np.linalg.eigvalsh(root[:, :, None] * gram * root[:, None, :]), 0.0)
