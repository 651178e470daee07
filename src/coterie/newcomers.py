"""Somebody new joins: a model for each newcomer, the models of the others staying as they are.

A newcomer with loss f and weight w_j to user j gets the solution of

    minimise_x   f(x) + lam * sum_j w_j ||x - models_j||  =  f(x) + sum_k pull_k ||x - anchor_k||

where users with equal models count as one anchor. An anchor is the solution exactly when

    || grad f(anchor_k) + sum_{l != k} pull_l unit(anchor_k - anchor_l) ||  <=  pull_k

so whom a newcomer joins is decided by one gradient an anchor; if it joins nobody the problem is smooth at its solution.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from coterie._typing import Array, Indices, Ints
from coterie.data.users import Users
from coterie.errors import InvalidInput
from coterie.losses import Samples
from coterie.losses.newton import minimise
from coterie.problem import Problem


class Joined(NamedTuple):
    """What newcomers get; rows in the order of `users.names`."""

    users: Users
    models: Array  # (n_newcomers, dim)
    clusters: Ints  # (n_newcomers,) the label of the cluster joined, -1 for those who stand alone
    slack: Array  # (n_newcomers,) how much more pull the cluster could have resisted, as a share; negative when alone

    def __str__(self) -> str:
        alone = int((self.clusters < 0).sum())
        return f"{len(self.clusters) - alone} newcomer(s) join {np.unique(self.clusters[self.clusters >= 0]).size} " \
               f"cluster(s), {alone} stand(s) alone"


def join(problem: Problem, models: Array, labels: Ints, newcomers: Users, weight: float | None = None) -> Joined:
    """Models for newcomers, given everyone else's; `weight` is that of the pair of a newcomer and each user.

    By default it is 1 on the complete graph with weight 1, and in general what gives a newcomer the pull that users
    have on average.
    """
    if newcomers.n_features != problem.users.n_features:
        raise InvalidInput(f"the models were fitted on {problem.users.n_features} features, these users have "
                           f"{newcomers.n_features}", remedy="Give the same columns in the same order")
    if weight is None:
        weight = 2.0 * float(problem.graph.weights.sum()) / max(problem.n_users - 1, 1) / problem.n_users
    if not (np.isfinite(weight) and weight >= 0):
        raise InvalidInput(f"weight must be a finite number >= 0, got {weight!r}", remedy="Use for example 1.0")
    samples = _samples(problem, newcomers)
    order = np.unique(labels, return_index=True)[1]
    anchors = models[order]
    pulls = problem.lam * weight * np.bincount(labels).astype(float)
    joined, clusters, slack = _at_anchors(problem, samples, anchors, pulls)
    alone = np.flatnonzero(clusters < 0)
    if alone.size:
        joined[alone] = _stand_alone(problem, samples, anchors, pulls, joined, alone)
    return Joined(newcomers, joined, clusters, slack)


def _samples(problem: Problem, newcomers: Users) -> Samples:
    """The newcomers' data, laid out with the model's own length: they may lack a class that others have."""
    if problem.loss.dim(newcomers) != problem.dim:
        raise InvalidInput("the newcomers' targets give models of another length than the fitted ones",
                           remedy="Give the loss its n_classes, and fit again")
    return problem.loss.prepare(newcomers)


def _at_anchors(problem: Problem, samples: Samples, anchors: Array, pulls: Array) -> tuple[Array, Ints, Array]:
    """For each newcomer the anchor that is its solution, or else the best one to leave from."""
    n, k = samples.n_users, len(anchors)
    gaps = anchors[:, None] - anchors
    lengths = np.linalg.norm(gaps, axis=2)
    toward = np.einsum("l,klt->kt", pulls, gaps / np.where(lengths > 0, lengths, 1.0)[..., None])
    far = lengths @ pulls
    best, value = np.zeros(n, dtype=np.int64), np.full(n, np.inf)
    clusters, slack = np.full(n, -1, dtype=np.int64), np.full(n, -np.inf)
    for a in range(k):
        values, gradients, _ = problem.loss.evaluate(samples, np.broadcast_to(anchors[a], (n, anchors.shape[1])), 1)
        force = np.linalg.norm(gradients + toward[a], axis=1)
        room = 1.0 - force / max(pulls[a], 1e-300) if pulls[a] > 0 else np.where(force <= 0, 0.0, -np.inf)
        joined = (room >= 0) & (clusters < 0)
        clusters[joined] = a
        slack = np.where(joined, room, np.where(clusters < 0, np.maximum(slack, room), slack))
        better = values + far[a] < value
        best, value = np.where(better, a, best), np.where(better, values + far[a], value)
    best = np.where(clusters >= 0, clusters, best)
    return anchors[best].copy(), clusters, slack


def _stand_alone(problem: Problem, samples: Samples, anchors: Array, pulls: Array, start: Array,
                 alone: Indices) -> Array:
    """Newton on the smooth problem of those who join nobody, from just beside their best anchor."""
    eye = np.eye(anchors.shape[1])

    def evaluate(users: Indices, x: Array, order: int) -> tuple[Array, Array, Array]:
        with np.errstate(over="ignore", invalid="ignore"):  # a trial point far out is rejected, not reported
            f, g, h = problem.loss.evaluate(samples, x, order, alone[users])
        gaps = x[:, None] - anchors
        lengths = np.maximum(np.linalg.norm(gaps, axis=2), 1e-300)
        f = f + lengths @ pulls
        units = gaps / lengths[..., None]
        if order > 0:
            g = g + np.einsum("k,nkd->nd", pulls, units)
        if order > 1:
            stiff = pulls / lengths
            h = h + stiff.sum(axis=1)[:, None, None] * eye - np.einsum("nk,nkd,nke->nde", stiff, units, units)
        return f, g, h

    nearest = start[alone]
    gradient = evaluate(np.arange(alone.size), nearest + 1e-9, 1)[1]
    spread = float(np.abs(anchors - anchors.mean(axis=0)).max()) + float(np.abs(nearest).max()) + 1e-12
    # Away from the anchor, down the slope that is left after its own pull.
    size = 1e-3 * spread / np.maximum(np.linalg.norm(gradient, axis=1, keepdims=True), 1e-300)
    return minimise(evaluate, nearest - size * gradient).points
