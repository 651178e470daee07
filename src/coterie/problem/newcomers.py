"""Models for newcomers, without changing the models of other users.

A newcomer with loss f and weight w_j to user j gets the solution of

    minimise_x   f(x) + lam * sum_j w_j ||x - models_j||  =  f(x) + sum_k pull_k ||x - anchor_k||

where users with equal models are one anchor. An anchor is the solution exactly if

    || grad f(anchor_k) + sum_{l != k} pull_l unit(anchor_k - anchor_l) ||  <=  pull_k

so one gradient per anchor decides which group a newcomer joins. If it joins none, its problem is
smooth.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from coterie.base.errors import InvalidInput
from coterie.base.labels import many
from coterie.base.types import Array, Indices, Ints
from coterie.data.users import Users
from coterie.losses import Loss, Samples
from coterie.losses.newton import minimise
from coterie.problem.problem import Problem

_BOUNDED = 200  # most steps of the method for wide models


class Joined(NamedTuple):
    """The models and groups of newcomers, in the order of `users.names`.

    Attributes
    ----------
    users
        The newcomers.
    models
        (n_newcomers, dim) their models.
    clusters
        (n_newcomers,) the label of the group that each joins; -1: unassigned.
    slack
        (n_newcomers,) 1 minus the force that pulls the newcomer away from its group, relative to
        the force that holds it; negative if it is unassigned.

    Example
    -------
    >>> import coterie as ct
    >>> from coterie.datasets import ellipses
    >>> solution = ct.solve(ct.Problem(ellipses(seed=0).users, ct.SquaredHinge(ridge=1e-3),
    ...                                lam=0.09))
    >>> print(solution.personalize(ellipses(users_per_cluster=1, samples=100, seed=7).users))
    3 newcomers join 3 groups, 0 unassigned
    """

    users: Users
    models: Array
    clusters: Ints
    slack: Array

    def __str__(self) -> str:
        unassigned = int((self.clusters < 0).sum())
        groups = np.unique(self.clusters[self.clusters >= 0]).size
        joining = len(self.clusters) - unassigned
        join = "joins" if joining == 1 else "join"
        return (f"{many(joining, 'newcomer')} {join} {many(groups, 'group')}, {unassigned} "
                "unassigned")


def join(problem: Problem, models: Array, labels: Ints, newcomers: Users,
         weight: float | None = None, loss: Loss | None = None) -> Joined:
    """Compute models for newcomers.

    Parameters
    ----------
    problem
        The problem of the fitted users.
    models, labels
        Their models and groups.
    newcomers
        The new users, with the same features.
    weight
        Weight of the pair of a newcomer and each fitted user. The default gives a newcomer the mean
        total weight of the fitted users; it is 1 on the complete graph with weight 1.
    loss
        The loss of the newcomers; by default that of the problem.

    Returns
    -------
    Joined
        Models and groups of the newcomers.

    Raises
    ------
    InvalidInput
        If the features or targets do not fit the models, or the weight is not valid.
    """
    if newcomers.n_features != problem.users.n_features:
        raise InvalidInput(f"the models were fitted on {problem.users.n_features} features, these "
                           f"users have {newcomers.n_features}",
                           remedy="Give the same columns in the same order")
    if weight is None:
        weight = 2.0 * float(problem.graph.weights.sum()) / max(problem.n_users - 1, 1) \
            / problem.n_users
    if not (np.isfinite(weight) and weight >= 0):
        raise InvalidInput(f"weight must be a finite number >= 0, got {weight!r}",
                           remedy="Use for example 1.0")
    loss = problem.loss if loss is None else loss
    samples = _samples(loss, newcomers, problem.dim)
    order = np.unique(labels, return_index=True)[1]
    anchors = models[order]
    pulls = problem.lam * weight * np.bincount(labels).astype(float)
    joined, clusters, slack = _at_anchors(loss, samples, anchors, pulls)
    unassigned = np.flatnonzero(clusters < 0)
    if unassigned.size:
        joined[unassigned] = _own_models(loss, samples, anchors, pulls, joined, unassigned)
    return Joined(newcomers, joined, clusters, slack)


def _samples(loss: Loss, newcomers: Users, dim: int) -> Samples:
    """The data of the newcomers, for models of the fitted length: newcomers may lack a class that
    others have.
    """
    if loss.dim(newcomers) != dim:
        raise InvalidInput("the targets of the newcomers give models of another length than the "
                           "fitted ones", remedy="Set n_classes of the loss, and fit again")
    return loss.prepare(newcomers)


def _at_anchors(loss: Loss, samples: Samples, anchors: Array,
                pulls: Array) -> tuple[Array, Ints, Array]:
    """For each newcomer the anchor that is its solution, or otherwise the best anchor to start
    from.
    """
    n, k = samples.n_users, len(anchors)
    gaps = anchors[:, None] - anchors
    lengths = np.linalg.norm(gaps, axis=2)
    toward = np.einsum("l,klt->kt", pulls, gaps / np.where(lengths > 0, lengths, 1.0)[..., None])
    far = lengths @ pulls
    best, value = np.zeros(n, dtype=np.int64), np.full(n, np.inf)
    clusters, slack = np.full(n, -1, dtype=np.int64), np.full(n, -np.inf)
    for a in range(k):
        there = np.broadcast_to(anchors[a], (n, anchors.shape[1]))
        values, gradients, _ = loss.evaluate(samples, there, 1)
        force = np.linalg.norm(gradients + toward[a], axis=1)
        margin = (1.0 - force / max(pulls[a], 1e-300) if pulls[a] > 0
                  else np.where(force <= 0, 0.0, -np.inf))
        joined = (margin >= 0) & (clusters < 0)
        clusters[joined] = a
        slack = np.where(joined, margin, np.where(clusters < 0, np.maximum(slack, margin), slack))
        better = values + far[a] < value
        best, value = np.where(better, a, best), np.where(better, values + far[a], value)
    best = np.where(clusters >= 0, clusters, best)
    return anchors[best].copy(), clusters, slack


def _own_models(loss: Loss, samples: Samples, anchors: Array, pulls: Array, start: Array,
                unassigned: Indices) -> Array:
    """Newton's method on the smooth problem of unassigned newcomers, from a point close to their
    best anchor.
    """
    if loss.wide(samples):
        return _own_wide_models(loss, samples, anchors, pulls, start, unassigned)
    eye = np.eye(anchors.shape[1])

    def evaluate(users: Indices, x: Array, order: int) -> tuple[Array, Array, Array]:
        # a trial point with overflow is rejected.
        with np.errstate(over="ignore", invalid="ignore"):
            f, g, h = loss.evaluate(samples, x, order, unassigned[users])
        gaps = x[:, None] - anchors
        lengths = np.maximum(np.linalg.norm(gaps, axis=2), 1e-300)
        f = f + lengths @ pulls
        units = gaps / lengths[..., None]
        if order > 0:
            g = g + np.einsum("k,nkd->nd", pulls, units)
        if order > 1:
            stiff = pulls / lengths
            h = h + stiff.sum(axis=1)[:, None, None] * eye - np.einsum("nk,nkd,nke->nde", stiff,
                units, units)
        return f, g, h

    nearest = start[unassigned]
    gradient = evaluate(np.arange(unassigned.size), nearest + 1e-9, 1)[1]
    apart = float(np.abs(anchors - anchors.mean(axis=0)).max())
    spread = apart + float(np.abs(nearest).max()) + 1e-12
    # Move away from the anchor, against the gradient that remains after the pull of the anchor.
    size = 1e-3 * spread / np.maximum(np.linalg.norm(gradient, axis=1, keepdims=True), 1e-300)
    return minimise(evaluate, nearest - size * gradient).points


def _own_wide_models(loss: Loss, samples: Samples, anchors: Array, pulls: Array, start: Array,
                     unassigned: Indices) -> Array:
    """The same for wide models: each norm is bounded by a quadratic at the current point (Weiszfeld
    1937).

        f(x) + sum_k pulls_k ||x - anchor_k||  <=  f(x) + t/2 ||x - centre||^2 + constant,
        t = sum_k pulls_k / ||x_now - anchor_k||,    centre = the mean of the anchors with these
                                                     weights
    """
    x = start[unassigned]
    spread = float(np.abs(anchors - anchors.mean(axis=0)).max()) + float(np.abs(x).max()) + 1e-12
    for turn in range(_BOUNDED):
        lengths = np.linalg.norm(x[:, None] - anchors, axis=2)
        weights = pulls / np.maximum(lengths, 1e-2 * spread if turn == 0 else 1e-12 * spread)
        t = weights.sum(axis=1)
        new = loss.prox(samples, None, t, weights @ anchors / t[:, None], x,
                        users=unassigned).points
        moved, x = float(np.abs(new - x).max()), new
        if moved <= 1e-7 * spread:
            break
    return x
