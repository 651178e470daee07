"""The problem with the clusters given: one model a cluster, smooth, solved by Newton to rounding.

For a partition into clusters k with members C_k and W_kl = sum of w_ij over i in C_k, j in C_l,

    minimise   V(w) = sum_k sum_{i in C_k} f_i(w_k) + lam * sum_{k<l} W_kl ||w_k - w_l||        (the paper's Eq. (5))

Where its optimum keeps the w_k apart, V is twice differentiable there (as often as the losses are).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from coterie.problem import Problem

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def polish(problem: Problem, labels: Ints, models: Array, max_iter: int = 50) -> Array:
    """Models (n_users, dim), bitwise equal inside each cluster, that minimise V; as far as Newton comes from `models`.

    Clusters that meet on the way stay where they met: the certificate, not this function, says whether that is right.
    """
    k, d = int(labels.max()) + 1, problem.dim
    counts = np.bincount(labels, minlength=k)
    w = _sums(labels, models, k) / counts[:, None]
    cross = _cross_weights(problem, labels, k)
    first, second = np.triu_indices(k, 1)
    used = cross[first, second] > 0
    first, second = first[used], second[used]
    pull = problem.lam * cross[first, second]
    value, gradient, hessian = _evaluate(problem, labels, w, first, second, pull, 2)
    for _ in range(max_iter):
        shift = 1e-14 * np.trace(hessian) / (k * d)
        step = -np.linalg.solve(hessian + shift * np.eye(k * d), gradient.ravel()).reshape(k, d)
        decrement = -float((gradient * step).sum())
        if not decrement > 1e-18 * abs(value):
            break
        size = 1.0
        while size > 1e-10:
            trial = _evaluate(problem, labels, w + size * step, first, second, pull, 0)[0]
            if trial <= value - 1e-4 * size * decrement + 1e-15 * abs(value):
                break
            size *= 0.5
        else:
            break
        w = w + size * step
        value, gradient, hessian = _evaluate(problem, labels, w, first, second, pull, 2)
    return w[labels]


def _evaluate(problem: Problem, labels: Ints, w: Array, first: Ints, second: Ints, pull: Array,
              order: int) -> tuple[float, Array, Array]:
    k, d = w.shape
    f, g, h = problem.loss.evaluate(problem.samples, w[labels], order)
    gaps = w[first] - w[second]
    lengths = np.linalg.norm(gaps, axis=1)
    value = float(f.sum() + pull @ lengths)
    if order == 0:
        return value, np.empty(0), np.empty(0)
    gradient = _sums(labels, g, k)
    inverse = 1.0 / np.maximum(lengths, 1e-300)
    units = gaps * inverse[:, None]
    np.add.at(gradient, first, pull[:, None] * units)
    np.add.at(gradient, second, -pull[:, None] * units)
    # Hessian of pull * ||gap||: (pull / length) (I - unit unit'), in the four blocks of the pair.
    across = np.eye(d) - units[:, :, None] * units[:, None, :]
    stiff = (pull * np.where(lengths > 0, inverse, 0.0))[:, None, None] * across
    blocks = np.zeros((k, k, d, d))
    diagonal = np.zeros((k, d, d))
    np.add.at(diagonal, labels, h)
    np.add.at(diagonal, first, stiff)
    np.add.at(diagonal, second, stiff)
    blocks[np.arange(k), np.arange(k)] = diagonal
    blocks[first, second] = -stiff
    blocks[second, first] = -stiff
    return value, gradient, blocks.transpose(0, 2, 1, 3).reshape(k * d, k * d)


def _sums(labels: Ints, rows: Array, k: int) -> Array:
    out = np.zeros((k, rows.shape[1]))
    np.add.at(out, labels, rows)
    return out


def _cross_weights(problem: Problem, labels: Ints, k: int) -> Array:
    graph = problem.graph
    if graph.is_complete:
        counts = np.bincount(labels, minlength=k).astype(float)
        return np.outer(counts, counts) * (graph.weights[0] if graph.n_edges else 0.0)
    cross = np.zeros((k, k))
    np.add.at(cross, (labels[graph.edges[:, 0]], labels[graph.edges[:, 1]]), graph.weights)
    return cross + cross.T
