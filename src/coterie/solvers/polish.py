"""The problem for given groups: one model per group, smooth, solved by Newton's method to rounding
accuracy.

For a partition into groups C_k with W_kl = sum of w_ij over i in C_k, j in C_l,

    minimise   V(w) = sum_k sum_{i in C_k} f_i(w_k) + lam * sum_{k<l} W_kl ||w_k - w_l||        (the
               paper's Eq. (5))

If the w_k are distinct at its optimum, V is twice differentiable there (as often as the losses
are).
"""

from __future__ import annotations

import numpy as np

from coterie.base.labels import group_means, group_sums, labels_of
from coterie.base.types import Array, Flags, Ints
from coterie.losses.curvature import GroupCurvature, Inverse, conjugate_gradients
from coterie.losses.derived import Grouped
from coterie.losses.linear import Flat, flat
from coterie.problem.problem import Problem

_COMPILED = 300  # largest number of unknowns for which compiled loops are faster than libraries
_SPLITTING = 12  # shorter and shorter steps by which groups are split
_DENSE = 600  # largest number of unknowns for which a Newton system is solved densely


def polish(problem: Problem, labels: Ints, models: Array, tol: float = 1e-14,
           max_iter: int = 50) -> Array:
    """Minimise V by Newton's method from `models`: (n_users, dim), bitwise equal inside each group.

    Two groups whose models would pass each other are merged; the certificate decides whether this
    is right. The method stops if the decrease, relative to V, is below `tol`.
    """
    w = group_means(models, labels)
    if problem.loss.wide(problem.samples):
        return _polish_wide(problem, labels, w, tol, max_iter)
    small = problem.graph.is_complete and w.size <= _COMPILED
    data = flat(problem.loss, problem.samples) if small else None
    if data is not None:
        return _polish_compiled(problem, data, labels, w, tol, max_iter)
    reduced = _Reduced(problem, labels)
    value, gradient, blocks, stiff = reduced.evaluate(w, 2)
    reach = 10.0 * (1.0 + float(np.abs(w).max()))
    for _ in range(max_iter):
        # 1. A Newton step. For flat Hessians (Huber far from the samples) shift and reach limit it;
        #    both vanish at the end.
        curvature = float(np.trace(blocks, axis1=1, axis2=2).mean()) / w.shape[1]
        largest = float(np.abs(gradient).max())
        shift = 1e-14 * curvature + 1e-8 * largest / reach + 1e-300
        step = reduced.newton_step(gradient, blocks, stiff, shift)
        if not np.isfinite(step).all():
            break
        decrement = -float((gradient * step).sum())
        if not decrement > tol * abs(value):
            break
        # 2. As much of it as decreases the objective.
        size = start = min(1.0, reach / max(float(np.abs(step).max()), 1e-300))
        for _ in range(25):
            trial = reduced.evaluate(w + size * step, 0)[0]
            if trial <= value - 1e-4 * size * decrement + 1e-15 * abs(value):
                break
            size *= 0.5
        else:
            size = 0.0
        reach = 4.0 * reach if size == start < 1.0 else reach
        # 3. Groups that the step would take through each other are merged, the others move.
        if size < 1.0 and (crossing := reduced.crossing(w, step)).any():
            labels = reduced.merge(crossing)
            w = group_means(w[reduced.labels], labels)
            reduced = _Reduced(problem, labels)
        elif size == 0.0:
            break
        else:
            w = w + size * step
        value, gradient, blocks, stiff = reduced.evaluate(w, 2)
    return w[labels]


def _polish_compiled(problem: Problem, data: Flat, labels: Ints, w: Array, tol: float,
                     max_iter: int) -> Array:
    """The same in compiled code, for losses that it knows and all pairs with one weight."""
    from coterie.solvers import loss_kernels as kernels

    radius = float(problem.radii[0]) if problem.graph.n_edges else 0.0
    for _ in range(len(w)):
        counts, step = np.bincount(labels).astype(float), np.empty_like(w)
        share = kernels.newton(data, radius, labels, counts, w, step, tol, max_iter)
        if share == 0.0:
            break
        merged = kernels.join_groups(w, step, share, -1.0)
        users, labels = w[labels], merged[labels]
        w = group_means(users, labels)
    return w[labels]


def _polish_wide(problem: Problem, labels: Ints, w: Array, tol: float, max_iter: int) -> Array:
    """The same for wide models, with Newton steps by conjugate gradients; no groups are merged."""
    reduced = _Reduced(problem, labels)
    grouped = Grouped(loss=problem.loss, samples=problem.samples, labels=labels)
    samples = grouped.prepare(grouped.groups)
    for _ in range(max_iter):
        # 1. The gradient, and the Hessian as an operator.
        with np.errstate(over="ignore", invalid="ignore"):
            f, g, curvature = grouped.expand(samples, w)
        units, pulls = reduced.pairs(w)
        value, gradient = float(f.sum()) + reduced.length(w), g + reduced.pull_on(units, pulls)
        degrees = reduced.pair_sums(pulls)

        def product(v: Array, units: Array = units, pulls: Array = pulls,
                    times: Inverse = curvature.times) -> Array:
            return times(v) + reduced.stiffness(v, units, pulls)

        # 2. A Newton step by conjugate gradients.
        assert isinstance(curvature, GroupCurvature)
        step = -conjugate_gradients(product, curvature.preconditioner(degrees), gradient)
        decrement = -float((gradient * step).sum())
        if not (np.isfinite(step).all() and decrement > tol * abs(value)):
            break
        # 3. As much of it as decreases the objective.
        size = 1.0
        while size > 1e-8:
            trial = w + size * step
            with np.errstate(over="ignore", invalid="ignore"):
                losses = grouped.evaluate(samples, trial, 0).values
                new = float(losses.sum()) + reduced.length(trial)
            if new <= value - 1e-4 * size * decrement + 1e-15 * abs(value):
                break
            size *= 0.5
        else:
            break
        w = trial
    return w[labels]


def nearly_equal(problem: Problem, models: Array, relative: float = 1e-6) -> Ints | None:
    """The groups of `models` after merging those with an edge and almost equal models; None if
    there are none.
    """
    labels = labels_of(models)
    w = group_means(models, labels)
    if problem.graph.is_complete:
        from coterie.solvers.loss_kernels import join_groups

        merged = join_groups(w, np.zeros_like(w), 1.0, relative * float(np.abs(w).max()))
        return merged[labels] if merged.max() + 1 < len(w) else None
    reduced = _Reduced(problem, labels)
    lengths = np.linalg.norm(w[reduced.first] - w[reduced.second], axis=1)
    close = lengths <= relative * float(np.abs(w).max())
    return reduced.merge(close) if close.any() else None


def split(problem: Problem, models: Array, lack: Array, hessians: Array,
          enough: float) -> tuple[Ints, Array] | None:
    """Groups split into users whose lacks are alike, and models moved against the lack; None if
    that does not help.

    Lacks whose squares are together less than `enough` do not count.

    `lack` (n_users, dim) is what no duals can supply to the users of a group, see `group_kernels`:
    minus it is a direction of descent, along which a second-order model of a group has its minimum
    at
        step = sum_i ||lack_i||^2 / sum_i lack_i' H_i lack_i        H with the curvature of the
                                                                    penalty, see `stiffness`
    """
    from coterie.solvers.group_kernels import apart, stiffness

    before = labels_of(models)
    labels = apart(before, lack, float(np.sqrt(enough / len(lack))))
    if labels.max() == before.max():
        return None
    way = group_means(lack, labels)[labels]
    curvature = np.bincount(before, np.einsum("nd,nde,ne->n", way, hessians, way)
                            + stiffness(models, way, float(problem.radii[0])))
    step = np.bincount(before, (way**2).sum(axis=1)) / np.maximum(curvature, 1e-300)
    way *= step[before][:, None]
    now = problem.objective(models)
    for _ in range(_SPLITTING):
        if problem.objective(models - way) < now:
            return labels, models - way
        way *= 0.25
    return None


class _Reduced:
    """V as a function of the group models; the weights of all edges between two groups are added.
    """

    def __init__(self, problem: Problem, labels: Ints) -> None:
        self.problem, self.labels, self.k = problem, labels, int(labels.max()) + 1
        graph = problem.graph
        if graph.is_complete:
            counts, radius = np.bincount(labels).astype(float), problem.radii[:1].sum()
            self.first, self.second = np.triu_indices(self.k, 1)
            self.pull = radius * counts[self.first] * counts[self.second]
            return
        ends = np.sort(labels[graph.edges], axis=1)
        across = (ends[:, 0] < ends[:, 1]) & (graph.weights > 0)
        keys, index = np.unique(ends[across, 0] * self.k + ends[across, 1], return_inverse=True)
        self.first, self.second = keys // self.k, keys % self.k
        self.pull = np.bincount(index, weights=problem.radii[across], minlength=keys.size)

    def evaluate(self, w: Array, order: int) -> tuple[float, Array, Array, Array]:
        """V, its gradient (k, d), the diagonal blocks (k, d, d) of its Hessian, and minus the
        blocks of its pairs.
        """
        # A trial point with overflow is rejected.
        with np.errstate(over="ignore", invalid="ignore"):
            f, g, h = self.problem.loss.evaluate(self.problem.samples, w[self.labels], order)
        value = float(f.sum() + self.length(w))
        if order == 0:
            return value, f, f, f
        units, pulls = self.pairs(w)
        gradient = group_sums(g, self.labels) + self.pull_on(units, pulls)
        # Hessian of pull * ||gap||: (pull / length) (I - unit unit'), in the four blocks of the
        # pair.
        outer = units[:, :, None] * units[:, None, :]
        stiff = pulls[:, None, None] * (np.eye(w.shape[1]) - outer)
        blocks = group_sums(h, self.labels) + self._gather(stiff, stiff)
        return value, gradient, blocks, stiff

    def pairs(self, w: Array) -> tuple[Array, Array]:
        """For each pair the unit vector between its models, and pull / length; zeros where they are
        equal.
        """
        gaps = w[self.first] - w[self.second]
        lengths = np.linalg.norm(gaps, axis=1)
        inverse = np.divide(1.0, lengths, out=np.zeros_like(lengths), where=lengths > 0)
        return gaps * inverse[:, None], self.pull * inverse

    def length(self, w: Array) -> float:
        """lam * sum W_kl ||w_k - w_l||."""
        return float(self.pull @ np.linalg.norm(w[self.first] - w[self.second], axis=1))

    def pair_sums(self, numbers: Array) -> Array:
        """(k,) sums over the pairs of each group."""
        return self._gather(numbers, numbers)

    def pull_on(self, units: Array, pulls: Array) -> Array:
        """(k, d) the gradient of `length`."""
        forces = np.where(pulls > 0, self.pull, 0.0)[:, None] * units
        return self._gather(forces, -forces)

    def stiffness(self, v: Array, units: Array, pulls: Array) -> Array:
        """(k, d) the Hessian of `length`, (pull / length) (I - unit unit') of each pair, times v.
        """
        moved = v[self.first] - v[self.second]
        moved = pulls[:, None] * (moved - np.einsum("ed,ed->e", units, moved)[:, None] * units)
        return self._gather(moved, -moved)

    def crossing(self, w: Array, step: Array) -> Flags:
        """The pairs of groups that a full step moves past each other."""
        gaps = w[self.first] - w[self.second]
        return np.einsum("ed,ed->e", gaps, gaps + step[self.first] - step[self.second]) <= 0

    def merge(self, pairs: Flags) -> Ints:
        """The labels of the users after merging the groups of the chosen pairs."""
        from coterie.solvers.group_kernels import join_pairs

        return join_pairs(self.k, self.first, self.second, pairs)[self.labels]

    def _gather(self, at_first: Array, at_second: Array) -> Array:
        """(k, ...) sums over the pairs of each group."""
        return group_sums(np.concatenate([at_first, at_second]),
                          np.concatenate([self.first, self.second]), self.k)

    def newton_step(self, gradient: Array, blocks: Array, stiff: Array, shift: float) -> Array:
        """The Newton step with `shift` added to the diagonal, by a dense or a sparse factorisation.
        """
        k, d = gradient.shape
        if k * d <= _DENSE:
            matrix = np.zeros((k, k, d, d))
            matrix[np.arange(k), np.arange(k)] = blocks + shift * np.eye(d)
            matrix[self.first, self.second] = matrix[self.second, self.first] = -stiff
            dense = matrix.transpose(0, 2, 1, 3).reshape(k * d, k * d)
            return np.asarray(-np.linalg.solve(dense, gradient.ravel()).reshape(k, d))
        from scipy import sparse
        from scipy.sparse.linalg import splu

        own = np.arange(k)
        bi = np.concatenate([own, self.first, self.second])
        bj = np.concatenate([own, self.second, self.first])
        entries = np.concatenate([blocks + shift * np.eye(d), -stiff, -stiff])
        rows = np.broadcast_to(bi[:, None, None] * d + np.arange(d)[:, None], entries.shape)
        columns = np.broadcast_to(bj[:, None, None] * d + np.arange(d), entries.shape)
        matrix = sparse.csc_array((entries.ravel(), (rows.ravel(), columns.ravel())),
                                  shape=(k * d, k * d))
        lu = splu(matrix, permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0,
                  options={"SymmetricMode": True})
        return -lu.solve(gradient.ravel()).reshape(k, d)
