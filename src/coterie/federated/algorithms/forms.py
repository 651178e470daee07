"""The Hessians of users: how they are sent, and as the server knows them: complete matrices, or for
wide models matrices in spans of vectors.

Hessians of wide models arrive in parts: every reply adds vectors to those that the server has of
the user, and contains the matrix for all of them, a small one in the span of the user's rows.

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

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from coterie.base.errors import Incompatible
from coterie.base.types import Array, Flags, Ints
from coterie.federated.protocol.messages import Batch, Ragged, square, triangle
from coterie.losses import Loss, Samples
from coterie.losses.curvature import RowCurvature, RowTerms, Span, SpanCurvature
from coterie.losses.derived import Quadratic, SpanQuadratic

_WIDE = 150  # coordinates from which replies decide how Hessians are kept
_TRUST = 1.5  # largest factor of the second-order term by which the loss may differ from its model

_MODELS = 6.5  # length of a reply without its gradient, in models
_SHARE = 0.6  # of it at least for vectors, while some are missing
_EQUAL = 1e-9  # times the largest eigenvalue: a difference that is not sent
_DENSE = 200  # size of a core up to which all its eigenvalues are computed


# -- at the server


class Forms(NamedTuple):
    """Hessians of n users: `hessians`, or if that is empty those of `Span` with the fields in
    between.
    """

    hessians: Array  # (n, dim, dim), or (n, 0, 0)
    basis: Array  # (n, b, p), ..., as in `coterie.losses.curvature`
    axes: Array
    gains: Array
    inner: Array
    outer: Array
    sizes: Ints  # (n,) number of vectors of each user

    @classmethod
    def blank(cls, n: int, dim: int) -> Forms:
        """Nothing is known; of long models not even which form the Hessians will have."""
        size = dim if dim < _WIDE else 0
        return cls(np.zeros((n, size, size)), np.zeros((n, 0, 0)), np.zeros((n, 0, 0)),
                   np.zeros((n, 0)), np.zeros(n), np.zeros(n), np.zeros(n, dtype=np.int64))

    @property
    def in_spans(self) -> bool:
        return bool(self.basis.shape[2])

    @property
    def complete(self) -> bool:
        """Whether the Hessians are kept as matrices."""
        return bool(self.hessians.shape[1])

    @property
    def span(self) -> Span:
        return Span(*self[1:-1])

    def completed(self) -> Forms:
        """Those in spans as matrices."""
        dim = self.basis.shape[2] * self.span.outputs
        curvature, rows = SpanCurvature(self.span), np.empty((len(self.outer), dim, dim))
        for column in range(dim):
            rows[:, column] = curvature.times(np.broadcast_to(np.eye(dim)[column],
                (len(rows), dim)))
        return Forms.blank(len(rows), 0)._replace(hessians=rows)

    def take(self, users: Ints | Flags) -> Forms:
        return Forms._make(part[users] for part in self)

    def put(self, users: Ints, new: Forms) -> Forms:
        """These Hessians with those of some users replaced."""
        if not new.in_spans:
            hessians = self.hessians.copy() if self.complete \
                else np.zeros((len(self.outer), *new.hessians.shape[1:]))
            hessians[users] = new.hessians
            return self._replace(hessians=hessians)
        out: list[npt.NDArray[Any]] = [self.hessians]
        for old, part in zip(self[1:], new[1:], strict=True):
            full = np.zeros((len(old), *np.maximum(old.shape[1:], part.shape[1:])),
                            dtype=part.dtype)
            before: Any = tuple(map(slice, old.shape))
            after: Any = (users, *map(slice, part.shape[1:]))
            full[before] = old
            full[users] = 0
            full[after] = part
            out.append(full)
        return Forms._make(out)

    def traces(self) -> Array:
        """(n,)"""
        if self.in_spans:
            return SpanCurvature(self.span).trace()
        return np.asarray(np.trace(self.hessians, axis1=1, axis2=2))

    def squares(self, steps: Array) -> Array:
        """(n,) steps' H steps."""
        if self.in_spans:
            return np.einsum("nd,nd->n", steps, SpanCurvature(self.span).times(steps))
        if not self.complete:
            return np.zeros(len(steps))
        return np.einsum("nd,nde,ne->n", steps, self.hessians, steps)

    def shifted(self, shift: Array) -> Forms:
        """With multiples of the identity added."""
        if self.in_spans:
            return self._replace(inner=self.inner + shift, outer=self.outer + shift)
        return self._replace(hessians=self.hessians + shift[:, None, None]
                             * np.eye(self.hessians.shape[1]))

    def quadratic(self, point: Array, value: Array, gradient: Array) -> Loss:
        """The quadratic functions with these Hessians."""
        if self.in_spans:
            return SpanQuadratic(point=point, value=value, gradient=gradient, span=self.span)
        return Quadratic(point=point, value=value, gradient=gradient, hessian=self.hessians)


def hessians_of(replies: Batch, dim: int) -> Array:
    """(n, dim, dim) the Hessians of replies, in any of their forms."""
    if "hessian" in replies.arrays:
        return square(replies.arrays["hessian"], dim)
    out = np.zeros((len(replies), dim, dim))
    full, low = replies.ragged.get("hessian"), replies.ragged.get("factor")
    level = replies.ragged.get("diagonal")
    if full is not None:
        out[full.owner] = square(full.values, dim)
    if level is not None:
        out[level.owner] = level.values[:, None, None] * np.eye(dim)
    if low is not None:
        for k in np.flatnonzero(low.counts):
            rows = low.rows(int(k))
            out[k] += (rows * replies.ragged["sign"].rows(int(k))[:, None]).T @ rows
    return out


def traces_of(replies: Batch, dim: int) -> Array:
    """(n,) the traces of the Hessians of replies; of those in parts an upper bound."""
    out, diagonal = np.zeros(len(replies)), np.concatenate([[0], np.cumsum(np.arange(dim, 1, -1))])
    full, low = replies.ragged.get("hessian"), replies.ragged.get("factor")
    level, core = replies.ragged.get("diagonal"), replies.ragged.get("core")
    if full is not None:
        out[full.owner] = full.values[:, diagonal].sum(axis=1)
    if level is not None:
        np.maximum.at(out, level.owner, dim * level.values)
    if low is not None:
        np.add.at(out, low.owner, replies.ragged["sign"].values * (low.values**2).sum(axis=1))
    if core is not None:  # a triangle, or beside two levels rows whose squares are summed
        two = level is not None and level.counts[core.owner] == 2
        np.add.at(out, core.owner, np.where(two, core.values**2, np.abs(core.values)))
    return out


def row_length(loss: Loss, n_features: int, dim: int) -> int:
    """The length p of the rows that models of dim = p k coordinates with k outputs act on."""
    p = n_features + loss.intercept
    return p if p and dim % p == 0 else dim


def comes_in_parts(replies: Batch) -> bool:
    """Whether some Hessians are those of wide models; a bound alone can be one of either."""
    return "core" in replies.ragged or "basis" in replies.ragged


def spans_of(replies: Batch, old: Forms, dim: int, p: int) -> Forms:
    """The Hessians of replies in spans, with the vectors that the server has of their users.

    Parameters
    ----------
    replies : that `wrong_parts` does not object to.
    old : what is known of the same users.
    dim, p : the length of a model and of its rows.
    """
    k, own = dim // p, [_form(replies, position, old, dim, p) for position in range(len(replies))]
    n, b, q = len(own), max(len(form.basis) for form in own), max(len(form.gains) for form in own)
    out = Forms(np.zeros((n, 0, 0)), np.zeros((n, b, p)), np.zeros((n, q, b * k)), np.zeros((n, q)),
                np.array([form.inner for form in own]), np.array([form.outer for form in own]),
                np.array([len(form.basis) for form in own]))
    for position, form in enumerate(own):
        out.basis[position, :len(form.basis)] = form.basis
        out.axes[position, :len(form.gains), :len(form.basis) * k] = form.axes
        out.gains[position, :len(form.gains)] = form.gains
    return out


def _form(replies: Batch, position: int, old: Forms, dim: int, p: int) -> Span:
    """The Hessian of one reply, without the first axis."""
    # Of a user with many rows.
    if any(_rows(replies, name, position) is not None for name in ("hessian", "factor")):
        hessian = hessians_of(replies.take(np.array([position])), dim)[0]
        return Span(np.eye(p), *_diagonalised(hessian), np.ones(()))
    levels, numbers = _rows(replies, "diagonal", position), _rows(replies, "core", position)
    assert levels is not None
    if numbers is None and len(levels) == 1:  # a bound only
        return Span(np.empty((0, p)), np.empty((0, 0)), np.empty(0), levels[0], levels[0])
    basis = _basis(replies, position, old, p)
    size = len(basis) * (dim // p)
    if len(levels) == 1:
        assert numbers is not None
        return Span(basis, *_diagonalised(square(numbers[None], size)[0]), levels[0])
    rows = np.empty((0, size)) if numbers is None else numbers.reshape(-1, size)
    gains = np.einsum("qc,qc->q", rows, rows)
    return Span(basis, rows / np.sqrt(np.maximum(gains, 1e-300))[:, None], gains, levels[1],
                levels[0])


def _diagonalised(core: Array) -> tuple[Array, Array, Array]:
    """Axes, gains and inner level of a matrix in a span."""
    values, vectors = np.linalg.eigh(core)
    return vectors.T[1:], values[1:] - values[0], values[0]


def _rows(replies: Batch, name: str, position: int) -> Array | None:
    part = replies.ragged.get(name)
    rows = None if part is None else part.rows(position)
    return rows if rows is not None and len(rows) else None


def _basis(replies: Batch, position: int, old: Forms, p: int) -> Array:
    """(b, p) the vectors of a user: those known before, and those of its reply; padding is left
    out.
    """
    new = _rows(replies, "basis", position)
    known = old.basis[position, :old.sizes[position]] if old.in_spans else np.empty((0, p))
    if new is None:
        return np.asarray(known)
    vectors = new.reshape(-1, p)
    used = np.flatnonzero(np.abs(vectors).max(axis=1) > 0)
    return np.concatenate([known, vectors[:used[-1] + 1 if used.size else 0]])


def wrong_hessians(replies: Batch, old: Forms, dim: int, p: int) -> dict[int, str]:
    """Why the Hessians of replies cannot be used, by position.

    Parameters
    ----------
    replies : to "expand".
    old : what is known of the same users.
    dim, p : the length of a model and of its rows.
    """
    share, n = replies.ragged.get("share"), len(replies)
    counts = {name: replies.ragged[name].counts if name in replies.ragged else
              np.zeros(n, dtype=int) for name in ("hessian", "diagonal", "factor", "sign", "share")}
    if old.in_spans or comes_in_parts(replies):
        reasons = wrong_parts(replies, old, dim, p)
        many = counts["share"] > 1
    else:  # one Hessian, in one of two forms, and a sign for every row of a factor
        reasons = {}
        many = (counts["hessian"] + counts["diagonal"] != 1) | (counts["share"] > 1)
        many |= (counts["factor"] != counts["sign"])
        many |= (counts["hessian"] > 0) & (counts["factor"] > 0)
    for position in np.flatnonzero(many):
        reasons.setdefault(int(position), "it has more or fewer rows than requested")
    if share is not None:
        for position in share.owner[~((share.values > 0) & (share.values <= 1))]:
            reasons.setdefault(int(position), "its step share is not in (0, 1]")
    good = np.setdiff1d(np.arange(n), list(reasons))
    if good.size and not (old.in_spans or comes_in_parts(replies)):
        ends = np.linalg.eigvalsh(hessians_of(replies.take(good), dim))
        indefinite = ends[:, 0] < -1e-8 * np.maximum(ends[:, -1], 0.0) - 1e-12 * dim
        reasons |= dict.fromkeys(good[indefinite].tolist(),
                                 "its Hessian is not positive semidefinite")
    return reasons


def wrong_parts(replies: Batch, old: Forms, dim: int, p: int) -> dict[int, str]:
    """Why Hessians that come in parts cannot be used, by position."""
    reasons = {position: _wrong_part(replies, position, old, dim, p)
               for position in range(len(replies))}
    return {position: reason for position, reason in reasons.items() if reason}


def _wrong_part(replies: Batch, position: int, old: Forms, dim: int, p: int) -> str:
    levels, numbers = _rows(replies, "diagonal", position), _rows(replies, "core", position)
    complete, factor = (_rows(replies, name, position) for name in ("hessian", "factor"))
    if complete is None and factor is None:
        basis = _basis(replies, position, old, p)
        size, length = len(basis) * (dim // p), 0 if numbers is None else len(numbers)
        if levels is None or len(levels) > 2:
            return "it has more or fewer rows than requested"
        if len(basis) > p or not _orthonormal(basis):
            return "its vectors are not orthonormal"
        if length and not (size and (length % size == 0 if len(levels) == 2 else length == size
                                     * (size + 1) // 2)):
            return "its Hessian does not fit its vectors"
    else:
        if numbers is not None or _rows(replies, "basis", position) is not None:
            return "it has more than one form of a Hessian"
        counts = [0 if rows is None else len(rows)
                  for rows in (complete, levels, factor, _rows(replies, "sign", position))]
        if counts[0] + counts[1] != 1 or counts[2] != counts[3] or (counts[0] and counts[2]):
            return "it has more or fewer rows than requested"
    form = _form(replies, position, old, dim, p)
    if not (form.inner > 0 and form.outer > 0 and _orthonormal(form.axes)):
        return "its Hessian is not positive definite"
    return ""


def _orthonormal(rows: Array) -> bool:
    return bool(np.abs(rows @ rows.T - np.eye(len(rows))).max(initial=0.0) <= 1e-6)


# -- when a second-order model of a loss is accurate enough, and how to step back: the same at users
#    and server

def between(anchors: Array, models: Array, share: Array) -> Array:
    """(n, dim) anchors + share (models - anchors), bitwise the same at users and server."""
    return np.asarray(anchors + share[:, None] * (models - anchors))


def trusted(values: Array, slopes: Array, second: Array, reached: Array) -> Flags:
    """(n,) whether losses agree with second-order models: f(x + s) <= f + <g, s> + 1.5 * 1/2 s'Hs.

    Parameters
    ----------
    values, slopes, second : f, <g, s> and 1/2 s'Hs at the anchors, for the steps s taken from
        there.
    reached : f(x + s).
    """
    with np.errstate(invalid="ignore"):
        return np.asarray(reached <= values + slopes + _TRUST * second + 1e-12 * np.abs(values))


# -- at the users


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


def evaluated(loss: Loss, samples: Samples, models: Array,
              users: Ints) -> tuple[Array, Array, Array | RowCurvature]:
    """Values, gradients and Hessians of some users; Hessians of wide models are operators."""
    if loss.affine and loss.wide(samples):
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
        most, out = loss.max_curvature, np.empty(len(users))
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
