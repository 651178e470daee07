"""One hierarchical linear model, from second-order sums of every user.

    target of row j of user i:   phi_j' g + psi_j' b_i + noise,      psi: some of the columns phi

    g ~ N(0, Q^-1) with one variance for each block of columns,   b_i ~ N(0, T),   noise variance s

The variances maximise the restricted likelihood (Patterson and Thompson 1971; Harville 1974) by EM,
extrapolated. With the sums G_i = phi'phi, G_cp = phi'psi, G_pp = psi'psi and h_i = phi'y of user i:

    V_i = (G_pp / s + T^-1)^-1                       variance of b_i, if g were known
    K_i = - V_i G_pc / s                             how b_i follows an error of g
    C   = (sum of [G_i + G_cp K_i] / s + Q)^-1       variance of g
    g   = C sum of [h_i + K_i' h_p,i] / s,           b_i = V_i (h_p,i - G_pc g) / s

    T   = mean of b_i b_i' + V_i + K_i C K_i'
    Q^-1, by block: mean of g^2 + diag C
    s   = (squares left + s (numbers - tr Q C - sum of tr T^-1 (V_i + K_i C K_i'))) / rows

Weak priors keep the noise from zero where there are more numbers than rows, and variances from
vanishing where there are few users. For fixed variances g and all b_i minimise a quadratic
function, and the norm of its gradient certifies them (`Estimate.gradient`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import numpy as np

from coterie.base.types import Array, Ints
from coterie.data.users import padded_blocks
from coterie.groups.spread import extrapolate

_ROUNDS, _SETTLED, _LONGEST = 60, 0.02, 16.0  # of EM; gain in nats that ends it; extrapolation
_START_NOISE, _START_SPREAD = 0.3, 0.1  # shares of the mean square that EM starts from
# Rows that the prior of the noise counts for, and its size as a share of the mean square.
_NOISE_ROWS, _NOISE_SHARE = 1.0, 1e-4
# Users that the prior of T counts for: towards its diagonal (less than the columns), and towards
# this share of the mean square.
_DIAGONAL, _SPREAD_USERS, _SPREAD_SHARE = 1.0, 0.5, 0.01
_VAGUE = 1e9  # variance of the intercept's prior, as a multiple of the mean square
_SMALLEST = 1e-12


class ModelSums(NamedTuple):
    """What is known of each user's rows: all that estimation needs.

    Parameters
    ----------
    gram : (n_users, D, D) sums of products of columns.
    moment : (n_users, D) of columns and target.
    square : (n_users,) of squared targets.
    rows : (n_users,) how many.
    """

    gram: Array
    moment: Array
    square: Array
    rows: Array

    @classmethod
    def of(cls, columns: Array, target: Array, offsets: Ints, weights: Array | None = None) -> Self:
        """Those of rows in the order of their users; each row may have a weight."""
        n, width = len(offsets) - 1, columns.shape[1]
        out = cls(np.zeros((n, width, width)), np.zeros((n, width)), np.zeros(n),
                  np.diff(offsets).astype(float))
        if weights is not None:
            roots = np.sqrt(weights)
            columns, target = columns * roots[:, None], target * roots
        for index, features, values, _, _ in padded_blocks(columns, target, offsets):
            turned = np.swapaxes(features, 1, 2)
            out.gram[index] = turned @ features
            out.moment[index] = (turned @ values[..., None])[..., 0]
            out.square[index] = (values**2).sum(axis=1)
        return out

    def minus(self, other: ModelSums) -> ModelSums:
        """These rows without those."""
        return ModelSums(*(mine - yours for mine, yours in zip(self, other, strict=True)))

    def take(self, columns: Ints, users: Ints | None = None) -> ModelSums:
        """Of some columns only, and of some users."""
        some = slice(None) if users is None else users
        return ModelSums(self.gram[some][:, columns[:, None], columns],
                         self.moment[some][:, columns], self.square[some], self.rows[some])


@dataclass(frozen=True, eq=False)
class Form:
    """Which columns a model has, and for whom.

    Parameters
    ----------
    columns : (D,) positions in the basis.
    blocks : (D,) the block of each column, which has a variance of its own; block 0 has none.
    personal : (p,) positions among `columns` of what differs between users.
    curves : (p,) 0 for columns with a free covariance, else the personal curve that the column is
        of, which has one variance.
    """

    columns: Ints
    blocks: Ints
    personal: Ints
    curves: Ints

    @property
    def n_blocks(self) -> int:
        """Blocks with a variance."""
        return int(self.blocks.max(initial=0))


@dataclass(frozen=True, eq=False)
class Variances:
    """What a model learns of sizes.

    Parameters
    ----------
    noise : s.
    blocks : (n_blocks,) the variance of each block of columns.
    covariance : (p, p) T.
    """

    noise: float
    blocks: Array
    covariance: Array


@dataclass(frozen=True, eq=False)
class Estimate:
    """What everybody shares, and what is personal.

    Parameters
    ----------
    form : of the model.
    variances : that were used.
    mean : (D,) g.
    error : (D, D) C, the covariance of g.
    personal : (n_users, p) b.
    spread : (n_users, p, p) V.
    follows : (n_users, p, D) K.
    evidence : the restricted log-likelihood, but for a constant.
    """

    form: Form
    variances: Variances
    mean: Array
    error: Array = field(repr=False)
    personal: Array = field(repr=False)
    spread: Array = field(repr=False)
    follows: Array = field(repr=False)
    evidence: float = -np.inf

    def margins(self, columns: Array, owner: Ints) -> Array:
        """(n_rows,) the mean of rows of all columns of the basis; users who are not known, with
        owner -1, have that of all.
        """
        rows, p = columns[:, self.form.columns], self.form.personal
        mean = rows @ self.mean
        if p.size:
            own = self.personal[owner] * (owner >= 0)[:, None]
            mean = mean + (rows[:, p] * own).sum(axis=1)
        return np.asarray(mean)

    def predict(self, columns: Array, owner: Ints) -> tuple[Array, Array]:
        """The mean and the variance, without noise, of rows; of users who are not known the
        covariance is T around the mean of all.
        """
        rows, p = columns[:, self.form.columns], self.form.personal
        if not p.size:
            variance = ((rows @ self.error) * rows).sum(axis=1)
            return self.margins(columns, owner), np.maximum(variance, 0.0)
        own = rows[:, p]
        variance = ((rows @ self.error) * rows).sum(axis=1)
        variance += ((own @ self.variances.covariance) * own).sum(axis=1)
        # Of known users (phi + K'psi)' C (phi + K'psi) + psi'V psi, user by user.
        order = np.argsort(owner, kind="stable")
        order = order[owner[order] >= 0]
        offsets = np.searchsorted(owner[order], np.arange(len(self.personal) + 1))
        for index, features, _, weights, _ in padded_blocks(rows[order], None, offsets):
            mine = features[:, :, p]
            moved = features + mine @ self.follows[index]
            told = ((moved @ self.error) * moved).sum(axis=2) \
                + ((mine @ self.spread[index]) * mine).sum(axis=2)
            real = weights > 0
            places = offsets[index][:, None] + np.arange(features.shape[1])
            variance[order[places[real]]] = told[real]
        return self.margins(columns, owner), np.maximum(variance, 0.0)

    def models(self) -> Array:
        """(n_users, D) the coefficients of each user."""
        models = np.repeat(self.mean[None], len(self.personal), axis=0)
        models[:, self.form.personal] += self.personal
        return models

    def gradient(self, sums: ModelSums) -> float:
        """The norm of the gradient of what g and b minimise, over its norm at zero."""
        mine, s = sums.take(self.form.columns), self.variances.noise
        left = mine.moment - (mine.gram @ self.models()[..., None])[..., 0]
        parts = [left.sum(axis=0) / s - self.mean * _precision(self.form, self.variances,
                                                               float("nan"))]
        start = [mine.moment.sum(axis=0) / s]
        p = self.form.personal
        if p.size:
            root = _root(self.variances.covariance)
            # In the coordinates r with b = root r, in which the personal part has variance one.
            own = np.linalg.lstsq(root, self.personal.T, rcond=None)[0].T
            parts.append((left[:, p] / s @ root - own).ravel())
            start.append((mine.moment[:, p] / s @ root).ravel())
        return float(np.linalg.norm(np.concatenate(parts))
                     / max(float(np.linalg.norm(np.concatenate(start))), 1e-300))


def learn(sums: ModelSums, form: Form, start: Variances | None = None, *, rounds: int = _ROUNDS,
          settled: float = _SETTLED, priors: float = 1.0, noise: bool = True) -> Estimate:
    """The estimate with the largest restricted likelihood.

    Parameters
    ----------
    sums : of the columns of the basis.
    form : of the model.
    start : variances to begin with.
    rounds : of EM, at most; 0 keeps the variances.
    settled : the gain in evidence that ends it.
    priors : how much the priors of variances count; 0 for none.
    noise : whether the noise is learned, too.

    Returns
    -------
    Estimate
    """
    work = _Sums(sums.take(form.columns), form, priors)
    best = work.estimate(work.start() if start is None else start)
    trial, plain, stretch = best.variances, best.variances, 1.0
    for _ in range(rounds):
        plain = work.update(best, noise=noise)
        stretch = min(2.0 * stretch, _LONGEST)
        trial = _extrapolated(best.variances, plain, stretch)
        new = work.estimate(trial)
        if not new.evidence >= best.evidence and stretch > 1.0:  # the step was too long
            new, stretch = work.estimate(plain), 1.0
        gain, best = new.evidence - best.evidence, new
        if gain < settled:
            break
    return best


def at_home(sums: ModelSums, form: Form, variances: Variances, mean: Array,
            error: Array) -> Estimate:
    """The personal parts of these users around what everybody shares: g and C."""
    work = _Sums(sums.take(form.columns), form, 0.0)
    V, K, _ = work.around(variances)
    return Estimate(form, variances, mean, error, work.personal(mean, V, variances.noise), V, K)


def _extrapolated(old: Variances, new: Variances, stretch: float) -> Variances:
    """The step from old to new variances, so many times; on the logarithmic scale."""
    if stretch <= 1.0:
        return new
    noise = old.noise * np.exp(np.clip(stretch * np.log(new.noise / old.noise), -2.0, 2.0))
    blocks = old.blocks * np.exp(np.clip(stretch * np.log(new.blocks / old.blocks), -4.0, 4.0))
    covariance = extrapolate(old.covariance, new.covariance, stretch) if new.covariance.any() \
        else new.covariance
    return Variances(float(noise), blocks, covariance)


def _precision(form: Form, variances: Variances, scale: float) -> Array:
    """(D,) Q; of the columns without a variance it is nearly nothing."""
    vague = 0.0 if np.isnan(scale) else 1.0 / (_VAGUE * scale)
    return np.concatenate([[vague], 1.0 / variances.blocks])[form.blocks]


def _root(covariance: Array) -> Array:
    scales, axes = np.linalg.eigh(covariance)
    return np.asarray(axes * np.sqrt(np.maximum(scales, 0.0)))


class _Sums:
    """The sums of one form, in the shapes that each round of EM multiplies."""

    def __init__(self, sums: ModelSums, form: Form, priors: float) -> None:
        self.form, self.priors, self.sums = form, priors, sums
        self.n, p = len(sums.rows), form.personal
        self.rows = float(sums.rows.sum())
        self.scale = max(float(sums.square.sum()) / max(self.rows, 1.0), 1e-300)
        self.pooled, self.pull = sums.gram.sum(axis=0), sums.moment.sum(axis=0)
        self.square = float(sums.square.sum())
        self.cross = np.ascontiguousarray(sums.gram[:, p])  # (n, p, D)
        self.own = np.ascontiguousarray(self.cross[:, :, p])  # (n, p, p)
        self.mine = sums.moment[:, p]

    def start(self) -> Variances:
        """Where EM begins."""
        return Variances(_START_NOISE * self.scale, np.full(self.form.n_blocks, self.scale),
                         _START_SPREAD * self.scale * np.eye(len(self.form.personal)))

    def around(self, variances: Variances) -> tuple[Array, Array, float]:
        """V and K of all users, and the logarithm of the determinants of V^-1 T."""
        from coterie.base.matrices import invert  # compiled: on first use

        s, p = variances.noise, self.form.personal
        if not p.size:
            return np.zeros((self.n, 0, 0)), np.zeros((self.n, 0, len(self.form.columns))), 0.0
        # V = R (R'G_pp R / s + 1)^-1 R' for T = R R'
        root = _root(variances.covariance)
        inner = root.T @ self.own @ root / s
        inner[:, np.arange(len(p)), np.arange(len(p))] += 1.0
        inverse, logs = invert(inner)
        V = root @ inverse @ root.T
        return V, -(V @ self.cross) / s, float(logs.sum())

    def personal(self, mean: Array, V: Array, noise: float) -> Array:
        """(n_users, p) b for this g."""
        return np.asarray((V @ (self.mine - self.cross @ mean)[..., None])[..., 0] / noise)

    def estimate(self, variances: Variances) -> Estimate:
        """The shared and the personal part, and the evidence, for these variances."""
        form, s, width = self.form, variances.noise, len(self.form.columns)
        Q, p = _precision(form, variances, self.scale), form.personal
        H, pull = self.pooled / s + np.diag(Q), self.pull / s
        V, K, logs = self.around(variances)
        if p.size:
            flat = self.cross.reshape(-1, width)
            H += flat.T @ K.reshape(-1, width) / s
            pull = pull + np.tensordot(K, self.mine, ((0, 1), (0, 1))) / s
        H = 0.5 * (H + H.T)
        try:
            C = np.linalg.inv(H)
        except np.linalg.LinAlgError:  # columns that are equal but for rounding
            C = np.linalg.pinv(H, hermitian=True)
        C = 0.5 * (C + C.T)
        g = C @ pull
        b = self.personal(g, V, s)
        # log-likelihood with g and b integrated: -1/2 [(y'y - y' fitted) / s + logarithms]
        fitted = float(self.pull @ g) + float((b * self.mine).sum())
        evidence = -0.5 * (self.rows * np.log(s) + max(self.square - fitted, 0.0) / s + logs
                           + np.linalg.slogdet(H)[1] - np.log(Q).sum()) + self._prior(variances)
        return Estimate(form, variances, g, C, b, V, K, float(evidence))

    def _prior(self, variances: Variances) -> float:
        """The logarithm of the prior of the noise: inverse gamma."""
        rows = self.priors * _NOISE_ROWS
        return float(-0.5 * rows * (np.log(variances.noise)
                                    + _NOISE_SHARE * self.scale / variances.noise))

    def update(self, at: Estimate, *, noise: bool) -> Variances:
        """One step of EM; see the module."""
        form, old, p = self.form, at.variances, self.form.personal
        Q = _precision(form, old, self.scale)
        moved, T = np.zeros((len(p), len(p))), old.covariance
        left = self.square - 2.0 * float(self.pull @ at.mean) + float(
            at.mean @ self.pooled @ at.mean)
        numbers = len(form.columns) - float(Q @ np.diag(at.error))
        if p.size:
            left += float((at.personal * (2.0 * (self.cross @ at.mean) - 2.0 * self.mine
                           + (self.own @ at.personal[..., None])[..., 0])).sum())
            sides = np.ascontiguousarray(at.follows.transpose(1, 0, 2)).reshape(len(p), -1)
            turned = (at.follows @ at.error).transpose(1, 0, 2).reshape(len(p), -1)
            moved = at.spread.sum(axis=0) + sides @ turned.T
            floor = _SMALLEST * (np.trace(T) / len(p) + 1e-300) * np.eye(len(p))
            numbers += self.n * len(p) - float(np.trace(np.linalg.solve(T + floor, moved)))
            T = self._shaped(at.personal.T @ at.personal + moved)
        s = old.noise
        if noise:
            rows = self.priors * _NOISE_ROWS
            s = (max(left, 0.0) + s * max(numbers, 0.0) + rows * _NOISE_SHARE * self.scale) \
                / (self.rows + rows)
            s = max(float(s), 1e-300)
        sizes = np.bincount(form.blocks, minlength=form.n_blocks + 1)[1:]
        squares = np.bincount(form.blocks, at.mean**2 + np.diag(at.error),
                              form.n_blocks + 1)[1:]
        blocks = np.maximum(squares / np.maximum(sizes, 1), 1e-9 * self.scale)
        return Variances(s, blocks, T)

    def _shaped(self, moment: Array) -> Array:
        """T from the sum of second moments: free, shrunk to its diagonal; of curves one variance
        each.
        """
        curves, n = self.form.curves, float(self.n)
        few, extra = self.priors * _SPREAD_USERS, self.priors * _SPREAD_SHARE * self.scale
        out = np.zeros_like(moment)
        free = np.flatnonzero(curves == 0)
        if free.size:
            part = moment[np.ix_(free, free)]
            shrunk = self.priors * (_DIAGONAL * len(free) if len(free) > 1 else 0.0)
            part = (part + shrunk / n * np.diag(np.diag(part))) / (1.0 + shrunk / n)
            out[np.ix_(free, free)] = (part + few * extra * np.eye(len(free))) / (n + few)
        for k in range(1, int(curves.max(initial=0)) + 1):
            own = np.flatnonzero(curves == k)
            mean = float(np.trace(moment[np.ix_(own, own)])) / len(own) / n
            out[own, own] = max(mean, 1e-9 * self.scale)
        return 0.5 * (out + out.T)


def with_scaled(variances: Variances, factor: float) -> Variances:
    """The same variances with T so many times as large."""
    return replace(variances, covariance=factor * variances.covariance)
