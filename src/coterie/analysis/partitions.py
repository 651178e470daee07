"""The description length of a partition of the users, and its minimisation.

    - sum_i L_i + K d/2 log(n_eff) + sum_k n_k log(N / n_k) + moves log(N max(K - 1, 1)) + length(T)

for N users, K groups of n_k users, and models of d coordinates. L_i of user i with m_i samples and dispersion s is

    without spread    the log-likelihood -m_i f_i(model of i's group) / s, without ridge
    with spread       the evidence of `coterie.analysis.spread`: models vary around the centre of their group

The other terms are the lengths of a description of the models (the Bayesian information criterion), of the labels, of
every user moved from its group on the path, and of the covariance T of the spread (`description_length` there). Users,
not samples, carry information on the scales of T (Delattre, Lavielle and Poursat 2014). A partition that is not from
the path costs one move.

If there are many groups, their models are described shorter as a sample of N(centre, T): then sum_i L_i is the evidence
of the groups, each as if it were one user, and there is one centre instead of K models.

n_eff is the number of samples; for two classes it is sum_j 4 p_j (1 - p_j) with one model for all, because samples
carry little information on a rare class.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from math import lgamma

import numpy as np

from coterie._typing import Array, Ints
from coterie.analysis.dispersion import dispersion
from coterie.analysis.spread import Expansions, Spread, fit_spread, project, sample_users, solve_damped
from coterie.data.users import Users
from coterie.labels import check_labels, group_sums
from coterie.losses import AffineLoss, Loss, Samples

_ROUNDS = 20  # largest number of rounds of merging and moving
_ALL_PAIRS = 8  # with more groups, only the most similar pairs are tried for merging
_BLOCK = 500  # nodes of a tree that are evaluated together
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
    """

    labels: Ints
    length: float
    lam: float | None = None
    spread: Spread | None = None

    @property
    def n_groups(self) -> int:
        """The number of groups."""
        return int(self.labels.max()) + 1


class Judge:
    """Description lengths and their minimisation. The fit of a group depends on its users only and is computed once.

    Parameters
    ----------
    loss : a quadratic function for each user.
    samples : what `loss.prepare(users)` returned.
    weights : (n_users,) m_i / s.
    ridge : (dim,) the ridge that is part of `loss`; it shrinks models and does not count in likelihoods.
    n_eff : number of samples that carry information.
    """

    def __init__(self, loss: Loss, samples: Samples, weights: Array, ridge: Array, n_eff: float) -> None:
        self.n, self.dim, self.weights, self.ridge = samples.n_users, samples.dim, weights, ridge
        self.models: dict[bytes, Array] = {}  # of groups, by their users
        self.likelihoods: dict[bytes, Array] = {}  # of all users, for the same models
        self.parts: dict[bytes, float] = {}
        self.expansions = Expansions.at(loss, samples, weights, np.zeros((self.n, self.dim)))
        self.number_cost = 0.5 * float(np.log(max(n_eff, np.e)))
        self.model_cost = self.dim * self.number_cost

    @classmethod
    def of(cls, users: Users, loss: Loss) -> Judge:
        """The judge of users with standardised features and a quadratic loss."""
        samples = loss.prepare(users)
        ridge = loss.ridge * loss.shrunk(samples.dim) if isinstance(loss, AffineLoss) else np.zeros(samples.dim)
        weights = users.sizes / dispersion(loss, users, samples)
        return cls(loss, samples, weights, ridge, float(users.sizes.sum()))

    def know(self, members: Ints, model: Array, likelihood: Array) -> None:
        """Take the model of a group, and the log-likelihood of every user for it, as known."""
        key, size = members.tobytes(), len(members)
        self.models[key], self.likelihoods[key] = model, likelihood
        self.parts[key] = float(size * np.log(self.n / size)) - float(likelihood[members].sum()) + self.model_cost

    def fit(self, members: Ints) -> Array:
        """The best model of a group, with all samples weighted equally."""
        key = members.tobytes()
        if key not in self.models:
            self.models[key] = self.expansions.take(members).centres(np.zeros(len(members), dtype=np.int64))[0]
        return self.models[key]

    def likelihood(self, members: Ints) -> Array:
        """(n_users,) the log-likelihood of every user for the model of this group."""
        key = members.tobytes()
        if key not in self.likelihoods:
            self.likelihoods[key] = self._values(self.fit(members), None)
        return self.likelihoods[key]

    def _values(self, model: Array, users: Ints | None) -> Array:
        """The log-likelihoods of some users, or of all, for one model."""
        weights = self.weights if users is None else self.weights[users]
        values = (self.expansions if users is None else self.expansions.take(users)).values(model[None])[:, 0]
        return np.asarray(values + 0.5 * weights * float(self.ridge @ model**2))  # without ridge

    def groups(self, labels: Ints) -> list[Ints]:
        """The users of each group."""
        return [np.flatnonzero(labels == c) for c in range(int(labels.max()) + 1)]

    def move_cost(self, n_groups: int) -> float:
        """The cost of one moved user."""
        return float(np.log(self.n * max(n_groups - 1, 1)))

    def part(self, members: Ints) -> float:
        """The contribution of one group to the description length."""
        key, size = members.tobytes(), len(members)
        if key not in self.parts:
            likelihood = float(self._values(self.fit(members), members).sum())
            self.parts[key] = float(size * np.log(self.n / size)) - likelihood + self.model_cost
        return self.parts[key]

    def criterion(self, labels: Ints, moves: int = 0) -> float:
        """The description length of a partition without spread, after this number of moves."""
        parts = self.groups(labels)
        return sum(self.part(members) for members in parts) + moves * self.move_cost(len(parts))

    def absorb(self, labels: Ints, max_groups: int) -> tuple[Ints, float]:
        """Keep the largest groups and assign all other users to the most likely of them; returns also the cost."""
        sizes = np.bincount(labels)
        if len(sizes) <= max_groups:
            return labels, 0.0
        kept = [c for c in np.argsort(-sizes, kind="stable")[:max_groups] if sizes[c] > 1] or [0]
        likelihoods = np.stack([self.likelihood(np.flatnonzero(labels == c)) for c in kept], axis=1)
        for column, c in enumerate(kept):
            likelihoods[labels == c, column] = np.inf
        assigned = self.n - int(sizes[kept].sum())
        cost = lgamma(self.n + 1) - lgamma(assigned + 1) - lgamma(self.n - assigned + 1)  # log(n choose assigned)
        return check_labels(likelihoods.argmax(axis=1), self.n), cost

    def polish(self, labels: Ints, rounds: int = _ROUNDS) -> tuple[float, Ints]:
        """Merge groups and move users while the description length decreases."""
        moved: set[int] = set()
        for _ in range(rounds):
            before, labels = labels, self._merge(labels)
            parts = self.groups(labels)
            likelihoods = np.stack([self.likelihood(members) for members in parts], axis=1)
            gains = likelihoods.max(axis=1) - likelihoods[np.arange(self.n), labels]
            moving = np.flatnonzero(gains > self.move_cost(len(parts)))
            new = labels.copy()
            new[moving] = likelihoods[moving].argmax(axis=1)
            new = check_labels(new, self.n)
            if moving.size and self.criterion(new, moving.size) < self.criterion(labels):
                moved.update(moving.tolist())
                labels = new
            if np.array_equal(before, labels):
                break
        return self.criterion(labels, len(moved) if labels.any() else 0), labels

    def _merge(self, labels: Ints) -> Ints:
        """Merge two groups at a time, the pair that decreases the description length most."""
        while labels.any():
            parts = self.groups(labels)
            cost = [self.part(members) for members in parts]
            change, a, b = min((self.part(np.union1d(parts[a], parts[b])) - cost[a] - cost[b], a, b)
                               for a, b in self._pairs(parts))
            if change >= 0:
                break
            labels = check_labels(np.where(labels == b, a, labels), self.n)
        return labels

    def _pairs(self, parts: list[Ints]) -> list[tuple[int, int]]:
        """Pairs of groups to merge: all, or those that lose least if one group takes the model of the other."""
        pairs = list(combinations(range(len(parts)), 2))
        if len(parts) <= _ALL_PAIRS:
            return pairs
        likelihoods = np.stack([self.likelihood(members) for members in parts], axis=1)
        sums = np.stack([likelihoods[members].sum(axis=0) for members in parts])  # [group, model]
        lost = np.diag(sums)[:, None] - sums
        return sorted(pairs, key=lambda pair: min(lost[pair], lost[pair[::-1]]))[:2 * len(parts)]

    def with_spread(self, labels: Ints, rank: int, covariance: Array) -> Partition:
        """The partition with a spread within groups; the arguments are those of `fit_spread`."""
        spread = self._without_ridge(fit_spread(self.expansions, labels, rank, covariance), self.weights)
        return self.described(labels, spread)

    def described(self, labels: Ints, spread: Spread) -> Partition:
        """The partition with this spread within groups."""
        sizes = np.bincount(labels)
        length = float(sizes @ np.log(self.n / sizes)) + len(sizes) * self.model_cost - spread.evidence
        length += spread.cost + (self.move_cost(len(sizes)) if len(sizes) > 1 else 0.0)
        return Partition(labels, length, None, spread)

    def _without_ridge(self, spread: Spread, weights: Array) -> Spread:
        return replace(spread, evidence=spread.evidence + 0.5 * float(weights @ (spread.models**2 @ self.ridge)))

    def with_prior(self, labels: Ints, prior: Spread) -> tuple[Partition, Array]:
        """The partition with models of the groups that vary as `prior`, for one centre, does; also these models."""
        sizes = np.bincount(labels)
        together = np.zeros(len(sizes), dtype=np.int64)
        rank = min(prior.rank, (len(sizes) - 2) // self.dim)  # T has fewer numbers than there are groups
        fitted = fit_spread(self.expansions.sums(labels), together, rank, prior.covariance)
        fitted = self._without_ridge(fitted, group_sums(self.weights, labels, len(sizes)))
        length = float(sizes @ np.log(self.n / sizes)) + self.model_cost - fitted.evidence
        length += fitted.cost + self.move_cost(len(sizes))
        return Partition(labels, length), fitted.models

    def one_centre(self) -> Partition:
        """One group with the best spread."""
        together = np.zeros(self.n, dtype=np.int64)
        best = self.with_spread(together, 0, 0.1 * np.eye(self.dim))
        for rank in range(1, min(_MAX_RANK, self.dim - 1) + 1):
            assert best.spread is not None
            more = self.with_spread(together, rank, best.spread.covariance)
            if more.length >= best.length:
                break
            best = more
        return best


class ModelTree:
    """Ward's tree (1963) of the models of the users around one centre.

    Distances are in units of the mean covariance of a model given its rows.

    Parameters
    ----------
    judge : of the same users.
    centre : the spread around one centre.
    """

    def __init__(self, judge: Judge, centre: Spread) -> None:
        from scipy.cluster.hierarchy import linkage

        self.judge, self.centre = judge, centre
        self.expansions = judge.expansions
        scales, axes = np.linalg.eigh(self.expansions.marginal(centre.covariance)[1].mean(axis=0))
        self.links = linkage(centre.models @ (axes / np.sqrt(np.maximum(scales, 1e-12 * scales[-1]))), "ward")
        self.sizes = np.append(np.ones(judge.n), self.links[:, 3])
        self.nodes = self._sums()

    def _sums(self) -> Expansions:
        """The sums of the expansions of the users of each node."""
        n, leaves = self.judge.n, self.expansions
        constants, slopes, curvatures = (np.concatenate([part, np.empty((n - 1, *part.shape[1:]))])
                                         for part in (leaves.constants, leaves.slopes, leaves.curvatures))
        for node, (first, second) in enumerate(self.links[:, :2].astype(int).tolist(), start=n):
            for part in (constants, slopes, curvatures):
                part[node] = part[first] + part[second]
        return Expansions(constants, slopes, curvatures)

    def cut(self, n_groups: int) -> Ints:
        """The labels of this number of groups."""
        from scipy.cluster.hierarchy import fcluster

        return check_labels(fcluster(self.links, n_groups, "maxclust"), self.judge.n)

    def lengths(self, *, with_prior: bool = False) -> Array:
        """(n_users,) the approximate description lengths without spread of 1, 2, ... groups.

        They are computed from the expansions; if `with_prior`, with models of the groups that vary around one centre.
        """
        n = self.judge.n
        parts = np.concatenate([self._parts(slice(k, k + _BLOCK), with_prior) for k in range(0, 2 * n - 1, _BLOCK)])
        merged = self.links[:, :2].astype(np.intp)
        lengths = parts[:n].sum() + np.append(0.0, np.cumsum(parts[n:] - parts[merged].sum(axis=1)))[::-1]
        if with_prior:
            lengths += self.judge.model_cost + self.centre.cost
        return np.asarray(lengths)

    def _parts(self, nodes: slice, with_prior: bool) -> Array:
        """The contribution of some nodes of the tree, if each is a group."""
        sums = Expansions(self.nodes.constants[nodes], self.nodes.slopes[nodes], self.nodes.curvatures[nodes])
        sizes, n = self.sizes[nodes], self.judge.n
        if with_prior:
            return np.asarray(sizes * np.log(n / sizes)
                              - sums.marginal(self.centre.covariance)[0].values(self.centre.centres)[:, 0])
        likelihoods = sums.constants + 0.5 * (sums.slopes * solve_damped(sums.curvatures, sums.slopes)).sum(axis=1)
        return np.asarray(sizes * np.log(n / sizes) - likelihoods + self.judge.model_cost)

    def prior_cut(self, n_groups: int) -> Partition:
        """A cut, improved by moving users, with models of the groups that vary around one centre."""
        best, models = self.judge.with_prior(self.cut(n_groups), self.centre)
        for _ in range(_ROUNDS):
            values = self.expansions.values(models) + np.log(np.bincount(best.labels))
            moved, models = self.judge.with_prior(check_labels(values.argmax(axis=1), self.judge.n), self.centre)
            if moved.length >= best.length:
                break
            best = moved
        return best

    def spread_cut(self, n_groups: int) -> tuple[float, Ints]:
        """A cut, improved by moving users, with a spread within groups: its approximate description length and labels.

        T, centres and length are estimated from a sample of the users, and all users are assigned to these centres.
        """
        judge, some = self.judge, sample_users(self.judge.n)
        expansions, labels = self.expansions.take(some), check_labels(self.cut(n_groups)[some], len(some))
        covariance, best = project(self.centre.covariance / n_groups, 0), np.inf
        for _ in range(_ROUNDS):
            marginal, posterior = expansions.marginal(covariance)
            centres, sizes = marginal.centres(labels), np.bincount(labels)
            values = marginal.values(centres) + np.log(sizes / len(some))
            likelihood = float(values[np.arange(len(some)), labels].sum()) * judge.n / len(some)
            length = len(sizes) * judge.model_cost - likelihood
            if length > best - 0.1:
                break
            best, chosen = length, (covariance, centres, sizes)
            covariance = project(expansions.second_moment(centres[labels], posterior), 0)
            labels = check_labels(values.argmax(axis=1), len(some))
        covariance, centres, sizes = chosen
        everyone = self.expansions.marginal(covariance)[0].values(centres) + np.log(sizes)
        return best, check_labels(everyone.argmax(axis=1), judge.n)
