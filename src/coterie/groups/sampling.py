"""Many users: proposals come from a sample of them, and groups that a sample misses from the users
it explains least.

The path and the tree need much more time for many users, and a sample of a few hundred shows all
groups but rare ones. All users are then assigned to the most likely group. A rare group is found
among the users whose rows ask most for models of their own. With evidence for models that vary as T
around the model of the group, user i asks for

    log E exp(l_i(model of i)) - l_i(model of i's group)

nats. Ward's tree (1963) of the users who ask most has a gain for each node, if its users become a
group of their own; the nodes with the largest sum of gains, of which none is inside another, are
split off.
"""

from __future__ import annotations

import numpy as np

from coterie.base.labels import check_labels
from coterie.base.types import Array, Ints
from coterie.groups.partitions import Judge, sums_of_nodes
from coterie.groups.spread import solve_damped

_MOST = 300  # users of a sample
_ASKING = 200  # users who ask for models of their own, at most


def sample_of(n_users: int) -> Ints | None:
    """Positions of the users of a sample, one of every stretch of users; None if all users are few
    enough.
    """
    if n_users <= _MOST:
        return None
    # Equal distances could be those of a pattern in the users.
    within = np.random.default_rng(n_users).random(_MOST)
    starts = np.arange(_MOST + 1) * n_users // _MOST
    return starts[:-1] + (within * np.diff(starts)).astype(np.int64)


def split_off(judge: Judge, labels: Ints, covariance: Array) -> Ints:
    """The partition with new groups of users whom it explains badly.

    Parameters
    ----------
    judge : of the users.
    labels : (n_users,) the partition.
    covariance : (dim, dim) T, how much models of users differ.
    """
    from scipy.cluster.hierarchy import linkage

    models = judge.fitted(labels).models[labels]
    marginal, posterior = judge.expansions.marginal(covariance)
    now = judge.expansions.at_own(models)
    gains = marginal.at_own(models) - now
    asking = np.sort(np.argsort(-gains, kind="stable")[:min(_ASKING, judge.n)])
    asking = asking[gains[asking] > np.log(judge.n)]
    if len(asking) < 2:
        return labels
    own, n = judge.expansions.take(asking), len(asking)
    scales, axes = np.linalg.eigh(posterior[asking].mean(axis=0))
    points = own.modes(models[asking], posterior[asking]) \
        @ (axes / np.sqrt(np.maximum(scales, 1e-12 * scales[-1])))
    links = linkage(points, "ward")
    sums, sizes = sums_of_nodes(own, links), np.append(np.ones(n), links[:, 3])
    likelihoods = sums.constants + 0.5 \
        * (sums.slopes * solve_damped(sums.curvatures, sums.slopes)).sum(axis=1)
    before = now[asking] - np.log(judge.n / np.bincount(labels)[labels[asking]])
    gain = likelihoods - sizes * np.log(judge.n / sizes) - judge.model_cost
    for first, second in links[:, :2].astype(int).tolist():
        before = np.append(before, before[first] + before[second])
    return _with_nodes(labels, asking, links, gain - before)


def _with_nodes(labels: Ints, asking: Ints, links: Array, gain: Array) -> Ints:
    """The labels with the nodes split off whose gains have the largest sum."""
    n, pairs = len(asking), links[:, :2].astype(int).tolist()
    best = np.maximum(gain, 0.0)
    for node, (first, second) in enumerate(pairs, start=n):
        best[node] = max(best[node], best[first] + best[second])
    new, number, nodes = labels.copy(), int(labels.max()), [len(gain) - 1]
    members: dict[int, list[int]] = {leaf: [leaf] for leaf in range(n)}
    for node, (first, second) in enumerate(pairs, start=n):
        members[node] = members[first] + members[second]
    while nodes:
        node = nodes.pop()
        if best[node] <= 0:
            continue
        if gain[node] >= best[node]:
            number += 1
            new[asking[members[node]]] = number
        else:
            nodes += pairs[node - n]
    return check_labels(new, len(labels))
