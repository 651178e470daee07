"""What a fit asks of users besides the search for groups, where their rows are in this process.

    expand      value, gradient and Hessian of the loss of a centre: the user's loss, or with a
                personal part its
                envelope (`Personal`); and the model that the user gets around this centre
    alone       the model from the user's own rows, and how many of its coefficients these rows
                determine
    left_out    how well models that are fitted without some of the user's rows predict these rows
    halves      which centre fits half of the user's rows best, for several halves
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np

from coterie.base.labels import group_means
from coterie.base.types import Array, Ints
from coterie.data.splitting import choose_own_rows, part_sizes
from coterie.data.users import Users
from coterie.groups.dispersion import without_ridge
from coterie.groups.oracle import RowsOracle, UserOracle, ridge_of
from coterie.losses import LinearLoss, Loss, Personal, Samples
from coterie.losses.personal import PersonalSamples

_SHARE = 0.25  # of each user's rows that are left out
# Decrement, relative to the objective, after which personal models take one more step.
_ENOUGH = 1e-8
_VALUES = 2**25  # values of rows at centres that are kept


class Expanded(NamedTuple):
    """Answers to `expand`."""

    values: Array  # (n_users, k)
    gradients: Array  # (n_users, k, dim)
    hessians: Array  # (n_users, k, dim, dim); empty if they were not asked for
    models: Array  # (n_users, k, dim) the models that users get


class LeavingOut(NamedTuple):
    """A question about kinds of models.

    A kind is a centre for each group and a covariance of models around it, or zeros where users get
    the centre itself. A user's rows that are left out move the centre of its group by `influences`
    times the change of its slope there.
    """

    centres: Array  # (n_centres, dim) of all kinds, one kind after the other
    starts: Ints  # (k + 1,) where the centres of each kind start
    own: Ints  # (n_users, k) the group of each user
    covariances: Array  # (k, dim, dim)
    influences: Array  # (n_users, k, dim, dim)
    alone: bool  # whether users are also judged by models of their own
    n_splits: int
    seed: int
    stratify: bool

    def take(self, users: Ints) -> LeavingOut:
        """The question to some users."""
        return self._replace(own=self.own[users], influences=self.influences[users])


class FitOracle(UserOracle, Protocol):
    """An oracle that can answer for a fit."""

    def expand(self, centres: Array, covariances: Array, order: int) -> Expanded:
        """At k centres of each user, (n_users, k, dim), each with a covariance of the personal part
        or zeros.
        """

    def alone(self, pull: float) -> tuple[Array, Array]:
        """(n_users, dim) each user's minimise_x f_i(x) + pull/2 ||x||^2, and (n_users,)
        coefficients in use there.
        """

    def left_out(self, question: LeavingOut) -> tuple[Array, Array]:
        """(n_users, k) sums of losses on rows left out, one column more if `alone`, and (n_users,)
        their number.
        """

    def halves(self, centres: Array, covariance: Array, draws: int, seed: int,
               stratify: bool) -> Ints:
        """(n_users, draws) the centre that fits a random half of the user's rows best."""


class RowsFitOracle(RowsOracle):
    """Users whose rows are in this process; see `FitOracle`."""

    def expand(self, centres: Array, covariances: Array, order: int) -> Expanded:
        return expanded(self.loss, self.users, centres, covariances, order)

    def alone(self, pull: float) -> tuple[Array, Array]:
        return alone(self.loss, self.samples, pull)

    def left_out(self, question: LeavingOut) -> tuple[Array, Array]:
        return left_out(self.loss, self.users, question)

    def halves(self, centres: Array, covariance: Array, draws: int, seed: int,
               stratify: bool) -> Ints:
        return best_for_halves(self.loss, self.users, centres, covariance, draws, seed, stratify)


def outer_loss(loss: Loss, users: Users, covariance: Array) -> Loss:
    """The loss of a centre; `covariance` is that of the personal part, or zero."""
    if not covariance.any():
        return loss
    return Personal(loss, covariance=covariance, scale=1.0 / np.maximum(users.sizes, 1))


def _prepare(outer: Loss, users: Users) -> Samples:
    """What the loss of a centre computes on; personal models are searched to the digits that
    comparisons need.
    """
    samples = outer.prepare(users)
    return replace(samples, enough=_ENOUGH) if isinstance(samples, PersonalSamples) else samples


def expanded(loss: Loss, users: Users, centres: Array, covariances: Array, order: int) -> Expanded:
    """`FitOracle.expand` for these users."""
    parts = []
    for k, covariance in enumerate(covariances):
        outer = outer_loss(loss, users, covariance)
        samples = _prepare(outer, users)
        with np.errstate(over="ignore", invalid="ignore"):  # trial points
            values, gradients, hessians = outer.evaluate(samples, centres[:, k], order)
            own = outer.own_models(samples, centres[:, k])
        parts.append((values, gradients, hessians if order > 1 else np.empty((len(values), 0)),
                      own))
    return Expanded(*(np.stack(part, axis=1) for part in zip(*parts, strict=True)))


def alone(loss: Loss, samples: Samples, pull: float) -> tuple[Array, Array]:
    """`FitOracle.alone` for these users: how many coefficients the rows, and not the ridge R,
    determine (Moody 1992).

        tr H_i (H_i + R)^-1,      H_i = the curvature of the loss of user i without ridge, at its
                                  own model

    Where classes are far apart these are fewer than there are coefficients: few rows are near the
    border.
    """
    zero = np.zeros((samples.n_users, samples.dim))
    points = loss.prox(samples, None, pull, zero).points
    with_ridge = loss.evaluate(samples, points, 2).hessians
    bare = with_ridge - np.diag(ridge_of(loss, samples))
    return points, np.trace(np.linalg.pinv(with_ridge, hermitian=True) @ bare, axis1=1, axis2=2)


def left_out(loss: Loss, users: Users, question: LeavingOut) -> tuple[Array, Array]:
    """`FitOracle.left_out` for these users."""
    plain, (n, k) = without_ridge(loss), question.own.shape
    sums, counts = np.zeros((n, k + question.alone)), np.zeros(n)
    for turn in range(question.n_splits):
        kept, _, test = users.hold_out(_SHARE, stratify=question.stratify,
                                       seed=question.seed + 1 + turn)
        present = np.flatnonzero(test.counts > 0)
        if not present.size:
            continue
        rows = test.take(present)
        judged = plain.prepare(rows)
        counts[present] += rows.counts
        for j in range(k + question.alone):
            models = loss.local(loss.prepare(kept)).points if j == k else _without(loss, users,
                kept, question, j)
            with np.errstate(over="ignore"):
                sums[present, j] += rows.counts * plain.values(judged, models[present])
    return sums, counts


def _without(loss: Loss, users: Users, kept: Users, question: LeavingOut, j: int) -> Array:
    """(n_users, dim) the models of a kind that these users get from the rows that are kept."""
    centres = question.centres[question.starts[j]:question.starts[j + 1]]
    outer = outer_loss(loss, kept, question.covariances[j])
    samples, shape, own = _prepare(outer, kept), (kept.n_users, centres.shape[1]), \
        question.own[:, j]
    group = own
    if len(centres) > 1:  # the rows left out must not decide the group
        group = np.stack([outer.values(samples, np.broadcast_to(c, shape))
                          for c in centres]).argmin(axis=0)
    at = centres[group]
    full = outer_loss(loss, users, question.covariances[j])
    change = users.counts[:, None] * full.gradients(_prepare(full, users), at) \
        - kept.counts[:, None] * outer.gradients(samples, at)
    shift = (question.influences[:, j] @ change[..., None])[..., 0]
    return outer.own_models(samples, at + np.where((group == own)[:, None], shift, 0.0))


def best_for_halves(loss: Loss, users: Users, centres: Array, covariance: Array, draws: int,
                    seed: int,
                    stratify: bool) -> Ints:
    """`FitOracle.halves` for these users."""
    best = np.empty((users.n_users, draws), dtype=np.int64)
    if not covariance.any() and isinstance(loss, LinearLoss) and users.n_samples * len(
            centres) <= _VALUES \
            and users.counts.all():
        assert users.targets is not None
        with np.errstate(over="ignore"):
            values = loss.row_values(users.features, users.targets, centres)
        ridges, sizes = 0.5 * centres**2 @ ridge_of(loss, loss.prepare(users)), \
            part_sizes(users.counts, 0.5, 0.0, None)
        for turn in range(draws):
            rows = choose_own_rows(users.owner, users.counts, sizes,
                                   users.targets if stratify else None, seed + turn,
                                   users.names)[0]  # those of hold_out(0.5).train
            best[:, turn] = (group_means(values[rows], users.owner[rows],
                                         users.n_users) + ridges).argmin(axis=1)
        return best
    for turn in range(draws):
        half = users.hold_out(0.5, stratify=stratify, seed=seed + turn).train
        outer = outer_loss(loss, half, covariance)
        samples, shape = outer.prepare(half), (half.n_users, centres.shape[1])
        with np.errstate(over="ignore"):
            values = np.stack([outer.values(samples, np.broadcast_to(centre, shape))
                               for centre in centres])
        best[:, turn] = values.argmin(axis=0)
    return best
