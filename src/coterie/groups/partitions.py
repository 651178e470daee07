"""The description length of a partition of the users, and its minimisation.

    - sum_i L_i + K d/2 log(n_eff) + sum_k n_k log(N / n_k) + moves log(N max(K - 1, 1)) + length(T)

for N users, K groups of n_k users, and models of d coordinates. L_i of user i with m_i samples and
dispersion s is

    without spread    the log-likelihood -m_i f_i(model of i's group) / s, without ridge
    with spread       the evidence of `coterie.groups.spread`: models vary around the centre of
                      their group

The other terms are the lengths of a description of the models (the Bayesian information criterion),
of the labels, of every user moved from its group on the path, and of the covariance T of the spread
(`description_length` there). Users, not samples, carry information on the scales of T (Delattre,
Lavielle and Poursat 2014). A partition that is not from the path costs one move.

If there are many groups, their models are described shorter as a sample of N(centre, T): then sum_i
L_i is the evidence of the groups, each as if it were one user, and there is one centre instead of K
models.

n_eff is the number of samples; for two classes it is sum_j 4 p_j (1 - p_j) with one model for all,
because samples carry little information on a rare class.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from math import lgamma
from typing import NamedTuple

import numpy as np

from coterie.base.labels import check_labels, group_sums
from coterie.base.types import Array, Ints
from coterie.groups.spread import (
    Expansions,
    RoundSpread,
    Spread,
    fit_spread,
    sample_users,
    solve_damped,
)
from coterie.groups.summaries import Summaries
from coterie.losses import Loss, Samples

_ROUNDS = 20  # largest number of rounds of merging and moving
_ALL_PAIRS = 8  # with more groups, only the most similar pairs are tried for merging
_BLOCK = 500  # nodes of a tree that are evaluated together
_MANY = 3000  # users; of more, a sample is enough to choose the number of free directions of T
_MAX_RANK = 3  # largest number of free directions of T


@dataclass(frozen=True, eq=False)
class Partition:
    """A partition of the users and its description length.

    Parameters
    ----------
    labels : (n_users,) the group of each user, from 0 in order of first appearance.
    length : the description length in nats.
    lam : the point of the path that the labels come from, if any.
    spread : the spread of the models within groups, if any.
    cost : what moves and assignments of users add to the length.
    within : of wide models, their variance around that of their group.
    """

    labels: Ints
    length: float
    lam: float | None = None
    spread: Spread | None = None
    cost: float = 0.0
    within: float = 0.0

    @property
    def n_groups(self) -> int:
        """The number of groups."""
        return int(self.labels.max()) + 1


class FittedGroups(NamedTuple):
    """The groups of a partition: sums over their users, their models, and what they add to the
    description length.
    """

    sums: Expansions
    weights: Array  # (n_groups,)
    sizes: Array  # (n_groups,) number of users
    models: Array  # (n_groups, dim)
    parts: Array  # (n_groups,)


class Judge:
    """Description lengths and their minimisation. A partition is judged once.

    Parameters
    ----------
    loss : a quadratic function for each user.
    samples : what `loss.prepare(users)` returned.
    weights : (n_users,) m_i / s.
    ridge : (dim,) the ridge that is part of `loss`; it shrinks models and does not count in
        likelihoods.
    n_eff : number of samples that carry information.
    """

    def __init__(self, loss: Loss, samples: Samples, weights: Array, ridge: Array,
                 n_eff: float) -> None:
        self.n, self.dim, self.weights, self.ridge = samples.n_users, samples.dim, weights, ridge
        self.lengths: dict[bytes, float] = {}  # of partitions, by their labels
        self.polished: dict[bytes, tuple[float, Ints]] = {}
        self.expansions = Expansions.at(loss, samples, weights, np.zeros((self.n, self.dim)))
        self.n_eff = n_eff
        self.model_cost = 0.5 * self.dim * float(np.log(max(n_eff, np.e)))

    def take(self, some: Ints) -> Judge:
        """The judge of some of the users."""
        few = copy(self)
        few.n, few.weights, few.expansions = len(some), self.weights[some], \
            self.expansions.take(some)
        few.lengths, few.polished = {}, {}
        few.n_eff = self.n_eff * float(few.weights.sum() / self.weights.sum())
        few.model_cost = 0.5 * self.dim * float(np.log(max(few.n_eff, np.e)))
        return few

    @classmethod
    def of(cls, known: Summaries) -> Judge:
        """The judge of users with standardised features, by their summaries."""
        return cls(known.loss, known.samples, known.weights, known.ridge, known.n_eff)

    def fitted(self, labels: Ints) -> FittedGroups:
        """The best models of the groups of a partition, with all samples weighted equally."""
        sizes = np.bincount(labels).astype(float)
        return self._with_models(self.expansions.sums(labels), group_sums(self.weights, labels),
                                 sizes)

    def _with_models(self, sums: Expansions, weights: Array, sizes: Array) -> FittedGroups:
        models = solve_damped(sums.curvatures, sums.slopes)
        # Without ridge.
        likelihoods = sums.at_own(models) + 0.5 * weights * (models**2 @ self.ridge)
        return FittedGroups(sums, weights, sizes, models,
                            self._label_cost(sizes) - likelihoods + self.model_cost)

    def _label_cost(self, sizes: Array) -> Array:
        """The length of the labels of groups."""
        return np.asarray(sizes * np.log(self.n / sizes))

    def likelihoods(self, labels: Ints, models: Array) -> Array:
        """(n_users, n_models) the log-likelihood of every user for the model of every group."""
        return self.expansions.values(models) + 0.5 * self.weights[:, None] \
            * (models**2 @ self.ridge)

    def move_cost(self, n_groups: int) -> float:
        """The cost of one moved user."""
        return float(np.log(self.n * max(n_groups - 1, 1)))

    def criterion(self, labels: Ints, moves: int = 0) -> float:
        """The description length of a partition without spread, after this number of moves."""
        key = labels.tobytes()
        if key not in self.lengths:
            self.lengths[key] = float(self.fitted(labels).parts.sum())
        return self.lengths[key] + moves * self.move_cost(int(labels.max()) + 1)

    def absorb(self, labels: Ints, max_groups: int) -> tuple[Ints, float]:
        """Keep the largest groups and assign all other users to the most likely of them; returns
        also the cost.
        """
        sizes = np.bincount(labels)
        if len(sizes) <= max_groups:
            return labels, 0.0
        kept = [c for c in np.argsort(-sizes, kind="stable")[:max_groups] if sizes[c] > 1] or [0]
        column = np.full(len(sizes), -1)
        column[kept] = np.arange(len(kept))
        own = column[labels]
        models = self.expansions.centres(np.where(own < 0, len(kept), own))[:len(kept)]
        new = np.where(own < 0, self.likelihoods(own, models).argmax(axis=1), own)
        assigned = int((own < 0).sum())
        # Log(n choose assigned).
        cost = lgamma(self.n + 1) - lgamma(assigned + 1) - lgamma(self.n - assigned + 1)
        return check_labels(new, self.n), cost

    def extended(self, labels: Ints, some: Ints) -> Ints:
        """The labels of all users, from those of some: of each user the group that is most likely
        by its size.
        """
        models, sizes = self.expansions.take(some).centres(labels), np.bincount(labels)
        values = self.expansions.values(models) + 0.5 * self.weights[:, None] \
            * (models**2 @ self.ridge)
        return check_labels((values + np.log(sizes)).argmax(axis=1), self.n)

    def polish(self, labels: Ints, rounds: int = _ROUNDS) -> tuple[float, Ints]:
        """Merge groups and move users while the description length decreases."""
        key = labels.tobytes()
        if key not in self.polished:
            self.polished[key] = self._polish(labels, rounds)
        return self.polished[key]

    def _polish(self, labels: Ints, rounds: int) -> tuple[float, Ints]:
        moved, rows = np.zeros(self.n, dtype=bool), np.arange(self.n)
        for _ in range(rounds):
            before, labels = labels, self._merge(labels)
            if not labels.any():
                break
            likelihoods = self.likelihoods(labels, self.fitted(labels).models)
            gains = likelihoods.max(axis=1) - likelihoods[rows, labels]
            moving = gains > self.move_cost(likelihoods.shape[1])
            new = check_labels(np.where(moving, likelihoods.argmax(axis=1), labels), self.n)
            if moving.any() and self.criterion(new, int(moving.sum())) < self.criterion(labels):
                moved |= moving
                labels = new
            if np.array_equal(before, labels):
                break
        return self.criterion(labels, int(moved.sum()) if labels.any() else 0), labels

    def _merge(self, labels: Ints) -> Ints:
        """Merge two groups at a time, the pair that decreases the description length most."""
        if not labels.any():
            return labels
        merging = Merging(self, self.fitted(labels))
        while len(merging.alive) > 1 and merging.step():
            pass
        return labels if len(merging.alive) == len(merging.target) \
            else check_labels(merging.target[labels], self.n)

    def with_spread(self, labels: Ints, rank: int, covariance: Array) -> Partition:
        """The partition with a spread within groups; the arguments are those of `fit_spread`."""
        spread = self._without_ridge(fit_spread(self.expansions, labels, rank, covariance),
                                     self.weights)
        return self.described(labels, spread)

    def described(self, labels: Ints, spread: Spread) -> Partition:
        """The partition with this spread within groups."""
        sizes = np.bincount(labels)
        cost = self.move_cost(len(sizes)) if len(sizes) > 1 else 0.0
        length = float(sizes @ np.log(self.n / sizes)) + len(sizes) * self.model_cost \
            - spread.evidence + spread.cost
        return Partition(labels, length + cost, None, spread, cost)

    def _without_ridge(self, spread: Spread, weights: Array) -> Spread:
        return replace(spread, evidence=spread.evidence + 0.5 * float(weights
            @ (spread.models**2 @ self.ridge)))

    def with_prior(self, labels: Ints, prior: Spread) -> tuple[Partition, Array]:
        """The partition with models of the groups that vary as `prior`, for one centre, does; also
        these models.
        """
        sizes = np.bincount(labels)
        together = np.zeros(len(sizes), dtype=np.int64)
        # T has fewer numbers than there are groups.
        rank = min(prior.rank, (len(sizes) - 2) // self.dim)
        fitted = fit_spread(self.expansions.sums(labels), together, rank, prior.covariance)
        fitted = self._without_ridge(fitted, group_sums(self.weights, labels, len(sizes)))
        length, cost = float(sizes @ np.log(self.n / sizes)) + self.model_cost, \
            self.move_cost(len(sizes))
        return Partition(labels, length - fitted.evidence + fitted.cost + cost, cost=cost), \
            fitted.models

    def one_centre(self) -> Partition:
        """One group with the best spread; the number of its free directions is that of a sample of
        many users.
        """
        few = self if self.n <= _MANY else self.take(np.arange(_MANY) * self.n // _MANY)
        together, share = np.zeros(few.n, dtype=np.int64), self.n / few.n

        def fitted(rank: int, covariance: Array) -> tuple[float, Spread]:
            spread = few.with_spread(together, rank, covariance).spread
            assert spread is not None
            return spread.cost - share * spread.evidence, spread

        length, best = fitted(0, 0.1 * np.eye(self.dim))
        for rank in range(1, min(_MAX_RANK, self.dim - 1) + 1):
            longer, more = fitted(rank, best.covariance)
            if longer >= length:
                break
            length, best = longer, more
        if few is self:
            return self.described(together, best)
        return self.with_spread(np.zeros(self.n, dtype=np.int64), best.rank, best.covariance)


def _parts(sums: Expansions) -> tuple[Array, Array, Array]:
    return sums.constants, sums.slopes, sums.curvatures


class Merging:
    """Merges of groups by their sums, two at a time; the work of one merge does not depend on the
    number of users.

    Parameters
    ----------
    judge : of the users.
    fitted : the groups.
    """

    def __init__(self, judge: Judge, fitted: FittedGroups) -> None:
        self.judge, self.groups = judge, fitted
        n = len(fitted.parts)
        # Groups that are left, and the group that each has become.
        self.alive = self.target = np.arange(n)
        # Of the description length by merging two groups, where it is known.
        self.changes = np.full((n, n), np.nan)
        self.values = self._values(slice(None), slice(None)) if n > _ALL_PAIRS else None

    def step(self) -> bool:
        """Merge the pair that decreases the description length most; returns whether there is one.
        """
        groups = self.groups
        first, second = self._pairs()
        new = np.isnan(self.changes[first, second])
        if new.any():
            i, j = first[new], second[new]
            self.changes[i, j] = self._merged(i, j).parts - groups.parts[i] - groups.parts[j]
        best = int(self.changes[first, second].argmin())
        a, b = int(first[best]), int(second[best])
        if not self.changes[a, b] < 0:
            return False
        merged = self._merged(np.array([a]), np.array([b]))
        for whole, part in zip((*_parts(groups.sums), *groups[1:]),
                               (*_parts(merged.sums), *merged[1:]), strict=True):
            whole[a] = part[0]
        self.alive = self.alive[self.alive != b]
        self.target = np.where(self.target == b, a, self.target)
        self.changes[a] = self.changes[:, a] = np.nan
        if self.values is not None:
            self.values[a] = self._values(slice(a, a + 1), slice(None))[0]
            self.values[:, a] = self._values(slice(None), slice(a, a + 1))[:, 0]
        return True

    def _merged(self, a: Ints, b: Ints) -> FittedGroups:
        """Unions of two groups."""
        groups = self.groups
        union = Expansions(*(part[a] + part[b] for part in _parts(groups.sums)))
        return self.judge._with_models(union, groups.weights[a] + groups.weights[b],
                                       groups.sizes[a] + groups.sizes[b])

    def _values(self, groups: slice, models: slice) -> Array:
        """[group, model] the log-likelihood of a group for the model of another."""
        at = self.groups.models[models]
        return Expansions(*(part[groups] for part in _parts(self.groups.sums))).values(at) \
            + 0.5 * self.groups.weights[groups][:, None] * (at**2 @ self.judge.ridge)

    def _pairs(self) -> tuple[Ints, Ints]:
        """Pairs of groups to merge: all, or those that lose least if one group takes the model of
        the other.
        """
        first, second = np.triu_indices(len(self.alive), 1)
        a, b = self.alive[first], self.alive[second]
        if self.values is None or len(self.alive) <= _ALL_PAIRS:
            return a, b
        own = np.diag(self.values)
        lost = np.minimum(own[a] - self.values[a, b], own[b] - self.values[b, a])
        least = np.sort(np.argpartition(lost, 2 * len(self.alive))[:2 * len(self.alive)])
        return a[least], b[least]


#: Groups with a spread within, known from a sample of users: its covariance, their centres and
#: sizes.
SpreadCut = tuple[Array, Array, Ints]


class ModelTree:
    """Ward's tree (1963) of the models of the users around one centre.

    Distances are in units of the mean covariance of a model given its rows.

    Parameters
    ----------
    judge : of the same users.
    centre : the spread around one centre.
    some : positions of the users in the tree; all by default.
    """

    def __init__(self, judge: Judge, centre: Spread, some: Ints | None = None) -> None:
        from scipy.cluster.hierarchy import linkage

        self.judge, self.centre, self.some = judge, centre, some
        self.leaves = judge if some is None else judge.take(some)
        self.expansions = self.leaves.expansions
        scales, axes = np.linalg.eigh(self.expansions.marginal(centre.covariance)[1].mean(axis=0))
        models = centre.models if some is None else centre.models[some]
        self.links = linkage(models @ (axes / np.sqrt(np.maximum(scales, 1e-12 * scales[-1]))),
                             "ward")
        self.sizes = np.append(np.ones(self.leaves.n), self.links[:, 3])
        self.nodes = sums_of_nodes(self.expansions, self.links)

    def cut(self, n_groups: int) -> Ints:
        """The labels of this number of groups, or of a few more if there are users who are not in
        the tree.
        """
        from scipy.cluster.hierarchy import fcluster

        labels = check_labels(fcluster(self.links, n_groups, "maxclust"), self.leaves.n)
        return labels if self.some is None else self.judge.extended(labels, self.some)

    def lengths(self, *, with_prior: bool = False) -> Array:
        """(n_leaves,) the approximate description lengths without spread of 1, 2, ... groups of the
        users in the tree.

        They are computed from the expansions; if `with_prior`, with models of the groups that vary
        around one centre.
        """
        n = self.leaves.n
        parts = np.concatenate([self._parts(slice(k, k + _BLOCK), with_prior)
                                for k in range(0, 2 * n - 1, _BLOCK)])
        merged = self.links[:, :2].astype(np.intp)
        lengths = parts[:n].sum() \
            + np.append(0.0, np.cumsum(parts[n:] - parts[merged].sum(axis=1)))[::-1]
        if with_prior:
            lengths += self.leaves.model_cost + self.centre.cost
        return np.asarray(lengths)

    def _parts(self, nodes: slice, with_prior: bool) -> Array:
        """The contribution of some nodes of the tree, if each is a group."""
        sums = Expansions(self.nodes.constants[nodes], self.nodes.slopes[nodes],
                          self.nodes.curvatures[nodes])
        sizes, n = self.sizes[nodes], self.leaves.n
        if with_prior:
            return np.asarray(sizes * np.log(n / sizes)
                              - sums.marginal(self.centre.covariance)[0].values(
                                  self.centre.centres)[:, 0])
        likelihoods = sums.constants + 0.5 \
            * (sums.slopes * solve_damped(sums.curvatures, sums.slopes)).sum(axis=1)
        return np.asarray(sizes * np.log(n / sizes) - likelihoods + self.leaves.model_cost)

    def prior_cut(self, n_groups: int) -> Partition:
        """A cut, improved by moving users, with models of the groups that vary around one centre.
        """
        best, models = self.judge.with_prior(self.cut(n_groups), self.centre)
        for _ in range(_ROUNDS):
            values = self.judge.expansions.values(models) + np.log(np.bincount(best.labels))
            moved, models = self.judge.with_prior(check_labels(values.argmax(axis=1), self.judge.n),
                                                  self.centre)
            if moved.length >= best.length:
                break
            best = moved
        return best

    def spread_cut(self, n_groups: int) -> tuple[float, SpreadCut]:
        """A cut, improved by moving users, with a spread within groups, and its approximate
        description length.

        T, centres and length are estimated from a sample of the users.
        """
        from scipy.cluster.hierarchy import fcluster

        some, alike = self.sample
        n, labels = len(some), check_labels(fcluster(self.links, n_groups, "maxclust")[some],
                                            len(some))
        t, least = float(np.trace(self.centre.covariance)) / (self.judge.dim * n_groups), np.inf
        # Other users fit these centres less.
        cost = self.judge.model_cost + self.judge.dim * (self.judge.n / n - 1)
        for _ in range(_ROUNDS):
            centres, values = alike.fit(t, labels)
            sizes = np.bincount(labels)
            values += np.log(sizes / n)
            likelihood = float(values[np.arange(n), labels].sum()) * self.judge.n / n
            length = len(sizes) * cost - likelihood
            if length > least - 0.1:
                break
            least, chosen = length, (t * np.eye(self.judge.dim), centres, sizes)
            t, labels = alike.next(t, centres[labels]), check_labels(values.argmax(axis=1), n)
        return least, chosen

    @cached_property
    def sample(self) -> tuple[Ints, RoundSpread]:
        """Positions of some of the users in the tree, and their expansions."""
        some = sample_users(self.leaves.n)
        return some, RoundSpread(self.expansions.take(some))

    def labels_of(self, cut: SpreadCut) -> Ints:
        """The most likely group of every user."""
        covariance, centres, sizes = cut
        values = self.judge.expansions.marginal(covariance)[0].values(centres) + np.log(sizes)
        return check_labels(values.argmax(axis=1), self.judge.n)


def sums_of_nodes(leaves: Expansions, links: Array) -> Expansions:
    """The sums of the expansions of the users of each node of a tree."""
    n = len(leaves.slopes)
    constants, slopes, curvatures = (np.concatenate([part, np.empty((n - 1, *part.shape[1:]))])
                                     for part in _parts(leaves))
    for node, (first, second) in enumerate(links[:, :2].astype(int).tolist(), start=n):
        for part in (constants, slopes, curvatures):
            part[node] = part[first] + part[second]
    return Expansions(constants, slopes, curvatures)
