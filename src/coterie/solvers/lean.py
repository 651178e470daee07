"""A solver for all pairs with one weight that stores no value per pair: memory O(n_users * dim).

Models: each norm is bounded from above by a quadratic at the current point (Hunter and Lange 2004),
and the bound is minimised by a Newton step with conjugate gradients, whose products loop over the
pairs. Groups that are close together are merged, so the loops get shorter. The optimum for the
final groups is polished as in the fast solver.

Proof: between groups the duals are known, lam times a unit vector. Inside a group the flow

    y_ij = projection of (potential_i - potential_j) onto the ball of radius lam,     B'y = forces

is stored by its potentials only. They minimise the convex function sum_ij huber(potential_i -
potential_j) - <forces, potential>; the first step from zero, potential = forces / n_k, is the
electrical flow, as in Theorem 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from coterie.base.errors import Incompatible, Interrupted
from coterie.base.labels import group_means, group_sums, labels_of
from coterie.base.types import Array, Ints
from coterie.problem.certificates import by_cluster, certify, pull_between
from coterie.problem.problem import Problem
from coterie.problem.solution import Record
from coterie.solvers.base import Point
from coterie.solvers.polish import polish


@dataclass(frozen=True, kw_only=True)
class Lean:
    """For a complete graph with one weight, if the pairs do not fit into memory; slower than
    `Fast`.

    Parameters
    ----------
    max_iter
        Largest number of majorisation steps for each closeness.
    closeness
        Distances, relative to the spread of the models, at which groups are merged; tried in this
        order until the certificate is within the tolerance.
    proof_steps
        Largest number of steps of the flow inside groups.

    Example
    -------
    >>> import coterie as ct
    >>> problem = ct.Problem(ct.Users.from_arrays([[0.0], [1.0], [9.0]]), ct.SquaredDistance(),
    ...                      lam=1.0)
    >>> solution = ct.solve(problem, tol=1e-6, solver="lean")
    >>> solution.labels.tolist(), solution.duals is None
    ([0, 0, 1], True)
    """

    max_iter: int = 100
    closeness: tuple[float, ...] = (1e-3, 1e-4, 1e-5)
    proof_steps: int = 300

    def run(self, problem: Problem, tol: float, start: Point | None = None,
            progress: Callable[[Record], None] | None = None) -> Point:
        graph = problem.graph
        if not graph.is_complete:
            raise Incompatible("The lean solver is for all pairs with one weight: "
                               "Graph.complete(n_users). Use solver='fast' for other graphs.")
        began = time.perf_counter()
        history: list[Record] = []
        models = self._alone(problem) if start is None else start.models
        best, least = Point(models, potentials=np.zeros_like(models)), np.inf
        for closeness in self.closeness:
            try:
                # 1. Groups and their models, with nearly equal ones merged.
                labels, w = self._descend(problem, models, closeness, tol)
                point = polish(problem, labels, w[labels]) if w.size <= 900 else w[labels]
                # 2. Potentials that prove them, and the certificate of both.
                potentials = self._potentials(problem, point, tol)
                certificate = certify(problem, point, potentials=potentials)
                if certificate.relative_gap < least or not history:
                    best = Point(point, potentials=potentials)
                    least, objective = certificate.relative_gap, certificate.objective
                history.append(Record(len(history) + 1, objective, least, int(
                    labels_of(best.models).max()) + 1, time.perf_counter() - began))
                if progress is not None:
                    progress(history[-1])
            except KeyboardInterrupt as stop:
                raise Interrupted(best._replace(history=tuple(history))) from stop
            if least <= tol:
                break
        return best._replace(history=tuple(history))

    def _alone(self, problem: Problem) -> Array:
        """The local models, with a weak pull to the pooled model for users that have none."""
        pooled = polish(problem, np.zeros(problem.n_users, dtype=np.int64),
                        np.zeros((problem.n_users, problem.dim)))
        return problem.loss.prox(problem.samples, None, 1e-6, pooled).points

    def _descend(self, problem: Problem, models: Array, closeness: float,
                 tol: float) -> tuple[Ints, Array]:
        from coterie.problem import edges as kernels

        labels, radius = labels_of(models), float(problem.radii[:1].sum())
        w = group_means(models, labels)
        spread = float(np.linalg.norm(models - models.mean(axis=0), axis=1).max()) + 1e-300
        value = np.inf
        for _ in range(self.max_iter):
            # 1. The objective with rounded norms, and its derivatives, group by group.
            k = len(w)
            counts = np.bincount(labels).astype(np.float64)
            f, g, h = problem.loss.evaluate(problem.samples, w[labels])
            gradient = group_sums(g, labels)
            blocks = group_sums(h, labels) + 1e-10 * np.eye(problem.dim)
            smooth, degrees, pull = 0.1 * closeness * spread, np.empty(k), np.empty_like(w)
            new = float(f.sum()) + radius * kernels.cluster_pull(w, counts, smooth, w, pull,
                degrees)
            if value - new <= 0.01 * tol * abs(new):
                break
            value = new
            # 2. A Newton step, as much of it as decreases the objective.
            step = self._newton(w, counts, smooth, radius, blocks, degrees,
                                -(gradient + radius * pull))
            size = 1.0
            while size > 1e-6:
                trial = w + size * step
                with np.errstate(over="ignore", invalid="ignore"):
                    f = problem.loss.evaluate(problem.samples, trial[labels], 0).values
                length = kernels.cluster_pull(trial, counts, smooth, trial, pull, degrees)
                if float(f.sum()) + radius * length <= new:
                    w = trial
                    break
                size *= 0.5
            # 3. Merge groups that came close.
            near = _close(w, closeness * spread)
            labels, w = near[labels], group_sums(w * counts[:, None], near)
            w = w / np.bincount(labels)[:, None]
        return labels, w

    def _newton(self, w: Array, counts: Array, smooth: float, radius: float, blocks: Array,
                degrees: Array, right: Array) -> Array:
        """Solve (blockdiag(H) + lam L_w) step = right by preconditioned conjugate gradients."""
        from coterie.problem import edges as kernels

        inverses = np.linalg.inv(blocks + (radius * degrees)[:, None, None] * np.eye(w.shape[1]))
        step, r = np.zeros_like(w), right.copy()
        product, unused = np.empty_like(w), np.empty(len(w))
        z = np.einsum("nij,nj->ni", inverses, r)
        p, rz = z.copy(), float((r * z).sum())
        enough = 1e-4 * rz
        for _ in range(30):
            if not rz > enough:
                break
            kernels.cluster_pull(w, counts, smooth, p, product, unused)
            product = np.einsum("nij,nj->ni", blocks, p) + radius * product
            length = rz / float((p * product).sum())
            step, r = step + length * p, r - length * product
            z = np.einsum("nij,nj->ni", inverses, r)
            new = float((r * z).sum())
            p, rz = z + new / rz * p, new
        return step

    def _potentials(self, problem: Problem, models: Array, tol: float) -> Array:
        """(n_users, dim) potentials whose flow inside the groups balances the remaining forces as
        far as possible.
        """
        from coterie.problem import edges as kernels

        labels = labels_of(models)
        radius = float(problem.radii[:1].sum())
        forces = -(problem.gradients(models) + pull_between(problem, labels, models))
        forces -= group_means(forces, labels)[labels]
        order, starts = by_cluster(labels)
        step = 1.0 / np.bincount(labels).astype(float)[labels][:, None]
        potential, ahead, momentum = np.zeros_like(forces), np.zeros_like(forces), 1.0
        flow, best, least = np.empty_like(forces), np.zeros_like(forces), np.inf
        curvature = float(np.trace(problem.hessians(models), axis1=1, axis2=2).mean()) / problem.dim
        enough = 0.02 * tol * curvature * float(np.abs(problem.values(models)).sum())
        for _ in range(self.proof_steps):
            kernels.member_flow(ahead, order, starts, radius, flow)
            lack = forces - flow
            missing = float((lack**2).sum())
            if missing < least:
                best, least = ahead, missing
            if missing <= enough:
                break
            new = ahead + step * lack
            momentum = 1.0 if float((lack * (new - potential)).sum()) < 0 else momentum
            following = 0.5 * (1.0 + np.sqrt(1.0 + 4.0 * momentum**2))
            ahead = new + (momentum - 1.0) / following * (new - potential)
            potential, momentum = new, following
        return best


def _close(w: Array, distance: float) -> Ints:
    """The connected components of points that are closer than `distance`, found with a tree, not
    over all pairs.
    """
    from scipy.spatial import cKDTree

    from coterie.solvers.group_kernels import join_pairs

    pairs = cKDTree(w).query_pairs(distance, output_type="ndarray").astype(np.int64)
    return join_pairs(len(w), pairs[:, 0], pairs[:, 1], np.ones(len(pairs), dtype=np.bool_))
