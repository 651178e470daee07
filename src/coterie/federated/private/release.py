"""What a user releases: sums over its rows with normal noise, each row's part within a known
length.

    released = sum_j v(row_j) + N(0, tau^2 I),        |v(row)| <= D,        tau = D / mu

Adding or removing a row changes the sum by at most D (`accounting` says what a release with mu
costs). There are three:

    RANGES     v has a 1 for each column, at the power of two that the value is below
    CENTRES    u in [-1, 1] by the bounds of the columns, v = (1, u, u^2), shortened to D, so that
               means are ratios
    SUMMARY    a = (w0, sqrt(1 - w0^2) z / sqrt(p)), features z by centres and scales, shortened to
               |a| <= 1;
               y likewise within [-1, 1];     v = (svec(a a'), kappa y a, rho y^2)

where svec has the upper triangle of a matrix, off the diagonal times sqrt(2), so that |svec(a a')|
= |a|^2. If all rows of a user are to be protected at once, it releases means instead of sums, and D
is twice as large: rows are replaced.

Every row's part is rounded to a grid, a power of two, on which sums are exact; so is the noise,
which is a discrete Gaussian (`discrete_normal`). A release is an integer times the grid, and its
probability under other rows is that of the formula, in every digit (Mironov 2012 on what
floating-point noise gives away). Rounding moves a sum of length L by at most 2 sqrt(L) grids more,
which the noise is larger by. With a known seed, of experiments, noise is a rounded normal number.

What integers cost is counted, too. A discrete Gaussian number with parameter s and a normal one
with deviation s can be drawn together so that they are within 1, because tails of the first lie
between those of the second a step before and a step after. So the privacy loss of a release, which
is linear in the noise, is that of normal noise but for sqrt(L) mu / s at most. At a given delta,
epsilon grows with mu by at least sqrt(2 / pi) (the hazard rate of a normal number at 0). As s is at
least 2^20 sqrt(L) times what mu > 1 adds, noise that is larger by 2^-16 covers 100 releases.

A release is made once: asked again, by a retry or by another run, the user repeats the same bytes
from its ledger (`coterie.federated.private.ledger`), which costs nothing and says nothing of
whether its rows have changed.

A model is finished at home, from what the federation found in noisy summaries and the user's exact
rows. The server sends a centre c and covariances C of models around it. At home the user has its m
rows, with mean loss f and dispersion s, and takes the model

    x = argmin  m f(x) / s + 1/2 (x - c)' (t C)^-1 (x - c)

with the C, the t, the length of c (of classes, whose centres are least certain in this; its
direction is kept) and the s (of numbers: what is sent includes how models differ) that its own rows
find most likely (Laplace's approximation of the evidence), among them t = 0, the centre itself:

    log evidence = - m f(x) / s - m/2 log s - 1/2 (x - c)' (t C)^-1 (x - c) - 1/2 log det(I + m/s t
    C H(x))

Nothing of this leaves the user.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.base.errors import InvalidInput, Refused, require
from coterie.base.types import Array, Flags, Ints
from coterie.data.users import Users
from coterie.federated.private.ledger import NodeLedger
from coterie.federated.protocol.messages import Batch, Fields, Message, square
from coterie.groups.noise import without_ridge
from coterie.losses import Loss, Personal, Samples

RANGES, CENTRES, SUMMARY = 0, 1, 2
# Shares of the intercept, of the target and of its square in a row's part.
W0, KAPPA, RHO = 0.6, 1.5, 0.25
LONGEST = 1.5  # D of CENTRES; a larger one has more noise, and shortens fewer rows
LOWEST, HIGHEST = -40, 80  # powers of two that ranges tell apart
_GRID = 2.0**-12  # times tau, of noise with a known seed
_FINE = 20  # binary digits of a row's part that are kept, and those of sqrt(length) more
_INTEGERS = 2.0**-16  # more noise, because integers are no normal numbers
_LENGTHS = (1.0, 0.5, 0.25)  # of centres of classes that are tried
_NOISES = tuple(4.0**-k for k in range(6))  # s of numbers that are tried, over what is sent
_SCALES = tuple(4.0**k for k in range(-5, 4))  # t that are tried
_LARGEST = 1 << 55  # of the s of a discrete Gaussian
#: The kinds of questions of a private federation.
PRIVATE = ("release", "home")
_Trial = Callable[[Ints], Flags]  # Bernoulli numbers for these positions


@dataclass(frozen=True, kw_only=True, eq=False)
class ReleaseQuestion:
    """A question for a release. The noise follows from it and is the node's own computation.

    Parameters
    ----------
    stage : RANGES, CENTRES or SUMMARY.
    mu : what the release costs.
    per_user : whether all rows of a user are protected at once.
    centre, scale : (q,) of the columns, the target last.
    n_features : the number of features; one less than the number of columns where there is a
        target.
    """

    stage: int
    mu: float
    per_user: bool = False
    centre: Array = field(default_factory=lambda: np.zeros(0))
    scale: Array = field(default_factory=lambda: np.zeros(0))
    n_features: int = 0

    def __post_init__(self) -> None:
        require(self.stage in (RANGES, CENTRES, SUMMARY) and 0 < self.mu < np.inf,
                "this is no question for a release", "Install the same version everywhere")
        q = self.centre.size
        require(self.centre.shape == self.scale.shape == (q,) and np.isfinite(self.centre).all()
                and (self.scale > 0).all() and np.isfinite(self.scale).all()
                and 0 <= q - self.n_features <= 1, "centres and scales of a "
                "release must be finite, and scales positive", "Correct the bounds of the columns")

    @property
    def sensitivity(self) -> float:
        """D, the largest change of the answer."""
        q = len(self.centre)
        one = {RANGES: np.sqrt(q), CENTRES: LONGEST,
               SUMMARY: np.sqrt(1.0 + (KAPPA**2 + RHO**2) * (q > self.n_features))}[self.stage]
        return float(one) * (2.0 if self.per_user else 1.0)

    @property
    def tau(self) -> float:
        """The standard deviation of the noise."""
        return self.sensitivity / self.mu

    @property
    def length(self) -> int:
        """How many numbers are released."""
        q, d = len(self.centre), self.n_features + 1
        return {RANGES: q * (HIGHEST - LOWEST), CENTRES: 2 * q + 1,
                SUMMARY: d * (d + 1) // 2 + (d + 1) * (q > self.n_features)}[self.stage]

    def key(self, about: str = "") -> str:
        """A name for the release: all that the answer depends on but the rows.

        Rows that have changed since are not released again by the same question, so whether they
        have cannot be seen from its answer.

        Parameters
        ----------
        about : a digest of how rows become numbers.
        """
        parts = [np.array([self.stage, self.mu, self.per_user, self.n_features], dtype=float),
                 self.centre, self.scale]
        return hashlib.sha256(about.encode() + b"|" + b"".join(
            np.ascontiguousarray(part, dtype="<f8").tobytes() + b"|" for part in parts)).hexdigest()

    @property
    def grid(self) -> float:
        """What released numbers are multiples of."""
        digits = _FINE + math.ceil(math.log2(max(self.mu, 1.0) * math.sqrt(max(self.length, 1))))
        return float(2.0 ** (math.floor(math.log2(self.sensitivity)) - digits))

    @property
    def steps(self) -> int:
        """The parameter of the noise, in steps of the grid; rounded up."""
        most = math.ceil(self.sensitivity / self.grid + 2.0 * math.sqrt(self.length)) + 2
        return math.ceil(most / self.mu * (1 + _INTEGERS))

    def exact(self, users: Users, grid: float = 0.0) -> Array:
        """(n_users, length) the sums, or means, without noise.

        Parameters
        ----------
        users : their rows.
        grid : to which the part of every row is rounded, and then the mean; 0 for none. Sums are
            those of integers, so neither the order of rows nor their number adds an error.
        """
        columns = users.features if users.targets is None or len(
            self.centre) == self.n_features else np.column_stack([users.features, users.targets])
        if columns.shape[1] != len(self.centre):
            raise InvalidInput(f"the release is about {len(self.centre)} columns, and there are "
                               f"{columns.shape[1]}", remedy="Agree on the columns again")
        totals: Any = np.zeros((users.n_users, self.length), dtype=np.int64 if grid else float)
        step = max(1, 2_000_000 // self.length)  # rows at a time, so that memory stays small
        for first in range(0, len(columns), step):
            part = slice(first, first + step)
            parts = self._parts(columns[part])
            np.add.at(totals, users.owner[part],
                      np.rint(parts / grid).astype(np.int64) if grid else parts)
        if self.per_user:
            totals = totals / np.maximum(users.counts, 1)[:, None]
        return np.asarray(totals * (grid or 1.0))

    def _parts(self, columns: Array) -> Array:
        """(n_rows, length) v of each row."""
        n = len(columns)
        if self.stage == RANGES:
            with np.errstate(divide="ignore"):
                power = np.ceil(np.log2(np.abs(columns)))
            bins = np.clip(np.nan_to_num(power, neginf=LOWEST), LOWEST, HIGHEST - 1).astype(
                np.int64) - LOWEST
            out = np.zeros((n, columns.shape[1], HIGHEST - LOWEST))
            out[np.arange(n)[:, None], np.arange(columns.shape[1])[None, :], bins] = 1.0
            return out.reshape(n, -1)
        with np.errstate(over="ignore"):
            scaled = (columns - self.centre) / self.scale
        if self.stage == CENTRES:
            u = np.clip(scaled, -1.0, 1.0)
            out = np.concatenate([np.ones((n, 1)), u, u**2], axis=1)
            return out * np.minimum(1.0, LONGEST / np.linalg.norm(out, axis=1))[:, None]
        a = rows_of(scaled[:, :self.n_features])
        i, j = np.triu_indices(a.shape[1])
        parts = [a[:, i] * a[:, j] * np.where(i == j, 1.0, np.sqrt(2.0))]
        if scaled.shape[1] > self.n_features:
            y = np.clip(scaled[:, -1:], -1.0, 1.0)
            parts += [KAPPA * y * a, RHO * y**2]
        return np.concatenate(parts, axis=1)

    def noisy(self, exact: Array, experiment: Any = None) -> Array:
        """What leaves: with noise of the operating system, or for experiments of a seed."""
        if experiment is None:
            noise = discrete_normal(exact.size, self.steps).reshape(exact.shape)
            # An exact sum of integers, and only then a number that is rounded.
            return np.asarray((np.rint(exact / self.grid).astype(np.int64) + noise) * self.grid)
        drawn = normal(exact.size, experiment).reshape(exact.shape)
        grid = _GRID * self.tau
        return np.asarray(np.round((exact + self.tau * drawn) / grid) * grid)


def rows_of(z: Array) -> Array:
    """(n, p + 1) rows a = (w0, sqrt(1 - w0^2) z / sqrt(p)) with |a| <= 1: longer ones are
    shortened.
    """
    p = max(z.shape[1], 1)
    lengths = np.linalg.norm(z, axis=1, keepdims=True)
    z = z * np.minimum(1.0, np.sqrt(p) / np.maximum(lengths, 1e-300))
    return np.concatenate([np.full((len(z), 1), W0),
                           np.sqrt(1.0 - W0**2) * np.nan_to_num(z) / np.sqrt(p)], axis=1)


def normal(n: int, experiment: Any = None) -> Array:
    """Normal numbers: of the operating system, on a fine grid, or for experiments of a seed."""
    if experiment is not None:
        return np.random.default_rng(experiment).standard_normal(n)
    return np.asarray(discrete_normal(n, 1 << 40) * 2.0**-40)


# -- at the node


def question_of(fields: Fields, n_features: int) -> ReleaseQuestion:
    """The question that a query asks.

    Raises
    ------
    InvalidInput : it asks none.
    """
    return ReleaseQuestion(stage=int(fields["stage"]),
                           mu=float(fields["mu"]), per_user=bool(fields["settings"][0]),
                           centre=np.asarray(fields["centre"], dtype=float),
                           scale=np.asarray(fields["scale"], dtype=float), n_features=n_features)


def query_of(question: ReleaseQuestion) -> dict[str, Array]:
    """The fields of the query that asks this question."""
    return {"stage": np.array(question.stage), "mu": np.array(question.mu),
            "settings": np.array([int(question.per_user)]), "centre": question.centre,
            "scale": question.scale}


def release(users: Users, keeper: NodeLedger | None, user: int, question: ReleaseQuestion, *,
            experiment: int | None = None, about: str = "", grouping: str = "") -> bytes:
    """What one user releases, the same bytes each time, also after its rows have changed.

    Parameters
    ----------
    users : their rows, in the units given.
    keeper : the ledger of their releases; without one there are none.
    user : who releases.
    question : what.
    experiment : a seed of the noise, for experiments; None for the operating system.
    about : a digest of how rows became numbers.
    grouping : what tells users apart: the name of the column.

    Raises
    ------
    Refused : its budget does not allow it.
    """
    if keeper is None:
        raise Refused("the owner of the node has set no privacy budget (budget-epsilon and "
                      "budget-delta)")
    own = users.take([user])

    def make() -> bytes:
        seed = None if experiment is None else [experiment, question.stage, user]
        grid = question.grid if experiment is None else 0.0
        return np.ascontiguousarray(question.noisy(question.exact(own, grid)[0], seed),
                                    dtype="<f8").tobytes()

    return keeper.release(users.names[user], question.key(about), question.mu, make,
                          grouping=grouping)


def objection_to(make: Callable[[int, ReleaseQuestion], bytes], user: int, query: Message,
                 n_features: int) -> str:
    """Why a release is not made, or an empty text; where there is none, it is in the ledger."""
    try:
        make(user, question_of(query.arrays, n_features))
    except Refused as error:
        return error.reason
    except InvalidInput as error:
        return f"it cannot be released: {error}"
    except (IndexError, TypeError, ValueError):  # whose words may hold shapes of the rows
        return "it cannot be released: this is no question for a release"
    return ""


def finished_at_home(loss: Loss, samples: Samples, queries: Batch) -> Array:
    """(n, dim) the models that the users asked finish, which stay with them."""
    covariances = square(np.atleast_2d(queries.shared["covariance"]), samples.dim)
    return finish(loss, samples.users.data.take(queries.users),
                  np.asarray(queries.arrays["centre"]), covariances, float(queries.shared["noise"]))


def finish(loss: Loss, users: Users, centres: Array, covariances: Array,
           dispersion: float) -> Array:
    """(n_users, dim) the models finished at home.

    Parameters
    ----------
    loss : of the users' models; its ridge does not count, because the centre takes its place.
    users : their exact rows, in the units of the models.
    centres : (n_users, dim) what the server sent.
    covariances : (k, dim, dim) of models around centres.
    dispersion : s at most, the noise of a target; 1 for classes.
    """
    plain = without_ridge(loss)
    numbers, samples = plain.gaussian, plain.prepare(users)
    best, most = centres.copy(), np.full(users.n_users, -np.inf)
    at_centres = plain.values(samples, centres)
    for noise in [dispersion * share for share in _NOISES] if numbers else [dispersion]:
        rows, constant = users.counts / noise, -0.5 * numbers * users.counts * np.log(noise)
        better = constant - rows * at_centres > most
        best[better], most[better] = centres[better], (constant - rows * at_centres)[better]
        for length in (1.0,) if numbers else _LENGTHS:
            around = centres * np.append(np.full(centres.shape[1] - 1, length), 1.0)
            for covariance in covariances:
                for scale in _SCALES:
                    models, evidence = _around(plain, users, samples, rows, around,
                                               scale * covariance)
                    evidence += constant
                    better = (
                        np.isfinite(evidence) & (evidence > most) & np.isfinite(models).all(axis=1))
                    best[better], most[better] = models[better], evidence[better]
    return best


def _around(loss: Loss, users: Users, samples: Samples, rows: Array, centres: Array,
            covariance: Array) -> tuple[Array, Array]:
    """The best models around centres, and the evidence for centres and covariance."""
    eye = np.eye(len(covariance))
    covariance = covariance + 1e-12 * np.trace(covariance) * eye
    outer = Personal(loss, covariance=covariance, scale=1.0 / np.maximum(rows, 1e-12))
    models = outer.own_models(outer.prepare(users), centres)
    values, _, hessians = loss.evaluate(samples, models, 2)
    steps = models - centres
    price = np.einsum("nd,nd->n", steps, np.linalg.solve(covariance, steps.T).T)
    volume = np.linalg.slogdet(eye + rows[:, None, None] * (hessians @ covariance))[1]
    return models, -rows * values - 0.5 * price - 0.5 * volume


# -- the noise


def discrete_normal(n: int, s: int) -> Ints:
    """(n,) independent integers from the discrete Gaussian distribution with parameter s, exactly,
    from the entropy of the system.

        P(Z = z)  proportional to  exp(-z^2 / (2 s^2)),      z integer,  s a positive integer

    by rejection from a discrete Laplace distribution (Canonne, Kamath and Steinke 2020). Every
    decision is one about random integers, so no number is ever rounded: probabilities are those of
    the formula to the last bit, in the tails as well. A Bernoulli number of exp(-g), 0 <= g <= 1,
    is whether the first k at which a Bernoulli number of g / k is 0 is odd; and one of a product of
    probabilities is whether all of them are 1. Arrays are drawn at once: each step goes on with
    those not yet decided.

    Parameters
    ----------
    n : how many.
    s : nearly the standard deviation; a positive integer.

    Example
    -------
    >>> bool(abs(discrete_normal(1000, 50)).max() < 1000)
    True
    """
    require(0 < s < _LARGEST, f"the noise must be a positive integer, got {s!r}",
            "Ask for a larger mu")
    out, left = np.zeros(n, dtype=np.int64), np.arange(n)
    while left.size:
        y, good = _laplace(left.size, s)
        # Accept with exp(-(|y| - s)^2 / (2 s^2)).
        good[good] = _accepted(np.abs(y[good]), s)
        out[left[good]] = y[good]
        left = left[~good]
    return out


def _laplace(n: int, s: int) -> tuple[Ints, Flags]:
    """(n,) integers, and which of them are from the discrete Laplace distribution with scale s."""
    # |y| = u + s v with u below s, accepted with exp(-u / s), and v geometric with exp(-1).
    u = _below(n, s)
    good = _bernoulli_exp(n, lambda at: _below(at.size, s) < u[at])
    v, more = np.zeros(n, dtype=np.int64), np.flatnonzero(good)
    while more.size:
        more = more[_bernoulli_exp(more.size, lambda at: np.ones(at.size, dtype=bool))]
        v[more] += 1
    negative = _below(n, 2) == 1
    y = u + s * v
    good &= ~(negative & (y == 0))  # zero has one sign
    return np.where(negative, -y, y), good


def _accepted(size: Ints, s: int) -> Flags:
    """Bernoulli numbers of exp(-(size - s)^2 / (2 s^2)), in factors whose exponents are at most 1.

    With size - s = m s + u, 0 <= u < s, the exponent is m^2 / 2 + m u / s + u^2 / (2 s^2); below s
    it is w^2 / (2 s^2) with w = s - size.
    """
    m, u = np.divmod(size - s, s)
    u = np.where(m < 0, s - size, u)
    m = np.maximum(m, 0)

    def half(at: Ints) -> Flags:
        return _below(at.size, 2) == 1

    good = _bernoulli_exp(len(size), lambda at: (_below(at.size, s) < u[at])
                          & (_below(at.size, s) < u[at]) & half(at))
    good = _all_of(good, m, lambda which: lambda at: _below(at.size, s) < u[which[at]])
    return _all_of(good, m * m, lambda which: half)


def _all_of(good: Flags, times: Ints, trial: Callable[[Ints], _Trial]) -> Flags:
    """Which stay good after so many Bernoulli numbers of exp(-g), for each of them g by `trial`."""
    good, left = good.copy(), times.copy()
    while (which := np.flatnonzero(good & (left > 0))).size:
        good[which] = _bernoulli_exp(which.size, trial(which))
        left[which] -= 1
    return good


def _bernoulli_exp(n: int, trial: _Trial) -> Flags:
    """(n,) Bernoulli numbers of exp(-g), where `trial` gives Bernoulli numbers of g."""
    odd, left, k = np.zeros(n, dtype=bool), np.arange(n), 1
    while left.size:
        goes_on = trial(left) & (_below(left.size, k) == 0)  # Bernoulli numbers of g / k
        odd[left[~goes_on]] = k % 2 == 1
        left, k = left[goes_on], k + 1
    return odd


def _below(n: int, most: int) -> Ints:
    """(n,) integers from 0 to most - 1, each as likely as the others."""
    out, left = np.zeros(n, dtype=np.int64), np.arange(n)
    mask = np.uint64((1 << (most - 1).bit_length()) - 1)
    while left.size and most > 1:
        drawn: npt.NDArray[np.uint64] = np.frombuffer(os.urandom(8 * left.size), "<u8") & mask
        good = drawn < np.uint64(most)
        out[left[good]] = drawn[good].astype(np.int64)
        left = left[~good]
    return out
