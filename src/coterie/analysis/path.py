"""The whole path over lam: from everyone alone to everyone together, and where on it clusters merge."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from coterie._typing import Array, Ints
from coterie.data.users import Users
from coterie.errors import ConvergenceWarning, InvalidInput, interruptible
from coterie.losses import SquaredDistance
from coterie.problem import Problem, check_lam
from coterie.solution import Solution, Status, first_labels, html_table
from coterie.solvers import Solver, solve_quietly
from coterie.solvers.base import Start
from coterie.solvers.polish import polish


class Bracket(NamedTuple):
    """A number known to lie between two others."""

    lower: float
    upper: float


class _Consensus(NamedTuple):
    """The pooled models, the smallest lam at which they are the solution, and duals that prove it at its upper end."""

    bracket: Bracket
    models: Array
    duals: Array


def lam_max(problem: Problem, *, rtol: float = 1e-6) -> Bracket:
    """The smallest lam at which all users that the graph connects share one model, from both sides.

    With g_i = grad f_i at the pooled model, consensus holds at lam exactly when some duals have B'y = -g and
    ||y_e|| <= lam w_e. Hence, over edges of positive weight,
        lam_max = min over y with B'y = -g of max_e ||y_e|| / w_e  =  max over x of -<g, x> / sum_e w_e ||(Bx)_e||
    Any such y bounds it from above, any x from below. Both come from convex clustering of the points -g at the lower
    bound: it yields the next, larger lower bound (Dinkelbach's iteration, 1967) until its points are all together.
    On Ctrl-C the exception's `best` is the bracket so far.
    """
    return _consensus(problem, rtol).bracket


def _consensus(problem: Problem, rtol: float = 1e-6) -> _Consensus:
    graph = problem.graph
    used = graph.weights > 0
    zero = np.zeros((problem.n_users, problem.dim))
    pooled = polish(problem, graph.components, zero)
    gradients = problem.gradients(pooled)
    gradients -= pooled_means(gradients, graph.components)  # what rounding left of the pooled optimum's own
    if not used.any():
        return _Consensus(Bracket(0.0, 0.0), pooled, np.zeros((graph.n_edges, problem.dim)))

    def above(flow: Array) -> float:
        return float((np.linalg.norm(flow[used], axis=1) / graph.weights[used]).max())

    unit = float(np.linalg.norm(gradients, axis=1).max())
    proof = graph.flow(-gradients)
    if unit <= 1e-9 * float(np.abs(problem.gradients(zero)).max()) + 1e-300:  # everyone agrees already
        return _Consensus(Bracket(0.0, above(proof)), pooled, proof)
    points = -gradients / unit
    lower, upper = float((points**2).sum()) / graph.penalty(points), above(proof) / unit
    clustering = Problem(Users.from_arrays(points), SquaredDistance(), lam=lower, graph=graph)
    best: Solution | None = None

    def bracket() -> Bracket:
        return Bracket(lower * unit, upper * unit)

    for _ in range(60):
        if upper - lower <= rtol * upper:
            break
        with interruptible(bracket):
            best = solve_quietly(clustering.with_lam(lower), tol=1e-13, start=best)
        assert best.duals is not None
        # B'y = points - x there, so y plus a flow of what it lacks is a flow of the points.
        whole = best.duals + graph.flow(points - graph.divergence(best.duals))
        if above(whole) < upper:
            upper, proof = above(whole), unit * whole
        x = best.models - pooled_means(best.models, graph.components)
        length = graph.penalty(x)
        step = float((points * x).sum()) / length if length > 0 else lower
        if not step > lower * (1.0 + 1e-15):
            break
        lower = min(step, upper)
    return _Consensus(bracket(), pooled, proof)


def pooled_means(rows: Array, labels: Ints) -> Array:
    """Each row replaced by the mean of its group."""
    sums = np.stack([np.bincount(labels, weights=column) for column in rows.T], axis=1)
    return (sums / np.bincount(labels)[:, None])[labels]


@dataclass(frozen=True, kw_only=True, eq=False)
class Path:
    """Solutions at increasing lam; each is certified by itself."""

    problem: Problem = field(repr=False)
    solutions: tuple[Solution, ...] = field(repr=False)
    tol: float
    solver: Solver | str = field(default="fast", repr=False)

    @property
    def lams(self) -> Array:
        return np.array([s.lam for s in self.solutions])

    @property
    def n_clusters(self) -> Ints:
        return np.array([s.n_clusters for s in self.solutions])

    @property
    def gaps(self) -> Array:
        return np.array([s.gap for s in self.solutions])

    def __len__(self) -> int:
        return len(self.solutions)

    def __getitem__(self, index: int) -> Solution:
        return self.solutions[index]

    def _repr_html_(self) -> str:
        lams, counts = self.lams, self.n_clusters
        # A small picture, 240 by 40: the number of clusters, on a logarithmic scale, point by point.
        across, down = np.linspace(2, 238, len(lams)), 38 - 36 * np.log(counts) / max(np.log(counts.max()), 1e-9)
        picture = ('<svg width="240" height="40" role="img" aria-label="clusters along lam"><polyline fill="none" '
                   'stroke="#0072B2" stroke-width="2" points="'
                   + " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(across, down, strict=True)) + '"/></svg>')
        shown = np.unique(np.linspace(0, len(lams) - 1, min(len(lams), 12)).round().astype(int))
        rows = [(f"{s.lam:.4g}", s.n_clusters, f"{s.objective:.6g}", f"{s.gap:.1e}", s.status.name.lower())
                for s in map(self.solutions.__getitem__, shown)]
        return html_table(f"{len(lams)} lam(s) from {lams[0]:.4g} to {lams[-1]:.4g}; {counts[0]} to {counts[-1]} "
                          f"group(s) of {self.problem.n_users} user(s); largest relative gap {self.gaps.max():.1e}.",
                          ("lam", "clusters", "objective", "relative gap", "status"), rows, picture)

    @cached_property
    def splits(self) -> tuple[tuple[float, int, int], ...]:
        """(lam, user, user) for every step at which users who were together come apart: one pair for each such group.

        Convex clustering with equal weights on all pairs only merges. Other weights, and other losses with any weights,
        can split again: models that pass through each other are equal for a moment.
        """
        found = []
        for before, after in zip(self.solutions, self.solutions[1:], strict=False):
            for k in range(before.n_clusters):
                members = np.flatnonzero(before.labels == k)
                apart = members[after.labels[members] != after.labels[members[0]]]
                if apart.size:
                    found.append((after.lam, int(members[0]), int(apart[0])))
        return tuple(found)

    @cached_property
    def linkage(self) -> Array:
        """The merge tree in SciPy's linkage format (n_users - 1, 4), heights in lam; for `scipy.cluster.hierarchy`.

        Users that have been together once count as merged, whatever `splits` says. What never merges on the path is
        joined at twice its last lam (at 1 where that is 0), so that the tree is whole.
        """
        n = self.problem.n_users
        node = np.arange(n)  # the tree's node each user is in
        size = {i: 1 for i in range(n)}
        rows: list[tuple[int, int, float, int]] = []
        steps = [(s.lam, s.labels) for s in self.solutions]
        steps.append((2.0 * steps[-1][0] or 1.0, np.zeros(n, dtype=np.int64)))
        for lam, labels in steps:
            # Nodes that share a cluster, and clusters that share a node, are one from here on.
            pairs = np.unique(np.stack([node, labels], axis=1), axis=0)
            seen: dict[int, int] = {}
            for old, cluster in pairs.tolist():
                here = _root(seen, int(old))
                there = _root(seen, -1 - int(cluster))
                if here != there:
                    seen[max(here, there)] = min(here, there)
            groups: dict[int, list[int]] = {}
            for old in np.unique(node).tolist():
                groups.setdefault(_root(seen, int(old)), []).append(int(old))
            for members in groups.values():
                current = members[0]
                for other in members[1:]:
                    joined = n + len(rows)
                    size[joined] = size[current] + size[other]
                    rows.append((min(current, other), max(current, other), float(lam), size[joined]))
                    node[(node == current) | (node == other)] = joined
                    current = joined
        return np.array(rows, dtype=float).reshape(-1, 4)

    def at(self, lam: float) -> Solution:
        """The solution at any lam, solved from the nearest one on the path."""
        lam = check_lam(lam)
        nearest = self.solutions[int(np.abs(np.log((self.lams + 1e-300) / (lam + 1e-300))).argmin())]
        if nearest.lam == lam:
            return nearest
        solution = solve_quietly(self.problem.with_lam(lam), tol=self.tol, solver=self.solver, start=nearest)
        _warn([solution], self.tol)
        return solution

    def merge_point(self, first: int, second: int, *, rtol: float = 1e-4) -> Bracket:
        """The smallest lam on the path at which two users (by number) are together, between two lams rtol apart.

        The upper end is inf where they never are.
        """
        n = self.problem.n_users
        for user in (first, second):
            if not 0 <= user < n:
                raise InvalidInput(f"expected user numbers from 0 to {n - 1}, got {user}",
                                   remedy="users.index(name) gives a user's number")
        together = [bool(s.labels[first] == s.labels[second]) for s in self.solutions]
        if not any(together):
            return Bracket(float(self.lams[-1]), np.inf)
        k = together.index(True)
        with interruptible():
            below = self.solutions[k - 1] if k else self.at(0.0)
        return self._bisect(below, self.solutions[k], lambda s: bool(s.labels[first] == s.labels[second]), rtol)

    @interruptible()
    def window(self, labels: npt.ArrayLike, *, rtol: float = 1e-4) -> tuple[Bracket, Bracket]:
        """Where on the path the clustering is exactly `labels`: brackets of the first and of the last such lam.

        The longest run of path points with that clustering is taken and both of its ends are bisected.
        """
        wanted = check_labels(labels, self.problem.n_users)
        match = np.array([np.array_equal(s.labels, wanted) for s in self.solutions])
        if not match.any():
            raise InvalidInput("no point of the path has this clustering",
                               remedy="Solve the path on a finer grid of lams, or look at path.n_clusters")
        edges = np.flatnonzero(np.diff(np.concatenate([[0], match.astype(int), [0]])))
        runs = edges.reshape(-1, 2)
        first, last = runs[(self.lams[runs[:, 1] - 1] - self.lams[runs[:, 0]]).argmax()]

        def same(solution: Solution) -> bool:
            return np.array_equal(solution.labels, wanted)

        below = self.solutions[first - 1] if first else self.at(0.0)
        low = Bracket(0.0, 0.0) if same(below) else self._bisect(below, self.solutions[first], same, rtol)
        if last == len(self.solutions):
            return low, Bracket(float(self.lams[-1]), np.inf)
        high = self._bisect(self.solutions[last - 1], self.solutions[last], lambda s: not same(s), rtol)
        return low, high

    def _bisect(self, below: Solution, above: Solution, reached: Callable[[Solution], bool], rtol: float) -> Bracket:
        """Halve (geometrically) between a solution that has not reached something and one that has."""
        solved: list[Solution] = []
        with interruptible(lambda: Bracket(below.lam, above.lam)):
            while above.lam - below.lam > rtol * above.lam:
                middle = float(np.sqrt(below.lam * above.lam)) if below.lam > 0 else 0.1 * above.lam
                if below.lam == 0 and middle < 1e-12 * self.lams[-1]:
                    break
                between = solve_quietly(self.problem.with_lam(middle), tol=self.tol, solver=self.solver, start=above)
                solved.append(between)
                below, above = (below, between) if reached(between) else (between, above)
        _warn(solved, self.tol, stacklevel=4)
        return Bracket(below.lam, above.lam)


class InNotebook:
    """What has a `solution`, a `path`, `scores` and says `why`: shown in notebooks."""

    def _repr_html_(self: Any) -> str:
        said = [self.why, *([] if self.scores is None else [str(self.scores)])]
        return self.solution._repr_html_() + "".join(f"<p>{escape(s)}</p>" for s in said) + self.path._repr_html_()


def check_labels(labels: npt.ArrayLike, n_users: int) -> Ints:
    """Cluster labels of any kind as numbers from 0, in order of first appearance."""
    given = np.asarray(labels)
    if given.shape != (n_users,):
        raise InvalidInput(f"expected one label for each of {n_users} users, got shape {given.shape}",
                           remedy="Give them in the order of users.names")
    if given.dtype.kind == "f" and not np.isfinite(given).all():
        user = int(np.flatnonzero(~np.isfinite(given))[0])
        raise InvalidInput("labels must not be missing", where=f"user number {user}", remedy="Give every user a label")
    return first_labels(np.unique(given, return_inverse=True)[1].ravel())


def _root(parent: dict[int, int], item: int) -> int:
    while parent.get(item, item) != item:
        item = parent[item]
    return item


def solve_path(problem: Problem, lams: npt.ArrayLike | None = None, n_lams: int = 50, *, tol: float = 1e-8,
               solver: Solver | str = "fast", progress: Callable[[Solution, int], None] | None = None,
               enough: Callable[[list[Solution]], bool] | None = None, start: Solution | None = None) -> Path:
    """Solve at many lams, each from the last.

    Parameters
    ----------
    problem : whose lam does not matter here.
    lams : where to solve; None means a geometric grid, lam_{r+1} = c lam_r (the paper's Appendix A), from a lam at
        which everyone is alone to the smallest at which all that the graph connects are together.
    n_lams : how many lams such a grid has.
    tol : the relative duality gap to reach at each.
    progress : called after each lam with its solution, duals included, and how many there will be.
    enough : asked after each lam, with the solutions so far, whether the path may end here.
    start : what the first lam starts from.

    Raises
    ------
    Interrupted : on Ctrl-C; its `best` is the Path of the lams that were finished, None where there are none.
    """
    solutions: list[Solution] = []

    def so_far() -> Path | None:
        return Path(problem=problem, solutions=tuple(solutions), tol=tol, solver=solver) if solutions else None

    with interruptible(so_far):
        end = _consensus(problem) if lams is None else None
        grid = _grid(problem, end, n_lams, tol, solver) if end is not None else _checked(lams)
        last = start
        for lam in grid:
            # At the upper end consensus is already proven; everywhere else the last solution is a good start.
            proven = end is not None and lam == end.bracket.upper > 0
            begin = Start(end.models, end.duals) if proven and end is not None else last
            last = solve_quietly(problem.with_lam(lam), tol=tol, solver=solver, start=begin)
            # Duals take more room than everything else together and are needed only to start the next.
            solutions.append(replace(last, duals=None, certificate=replace(last.certificate, duals=None)))
            if progress is not None:
                progress(last, len(grid))
            if enough is not None and enough(solutions):
                break
    _warn(solutions, tol)
    return Path(problem=problem, solutions=tuple(solutions), tol=tol, solver=solver)


def _warn(solutions: Sequence[Solution], tol: float, stacklevel: int = 3) -> None:
    """One warning for all solutions that did not reach the tolerance."""
    inaccurate = [s for s in solutions if s.status is not Status.CONVERGED]
    if inaccurate:
        worst = max(inaccurate, key=lambda s: s.gap)
        warnings.warn(f"{len(inaccurate)} of {len(solutions)} lam(s) did not reach tol = {tol:g}; the worst is lam = "
                      f"{worst.lam:g} with a relative gap of {worst.gap:.1e}. {worst.status.value}",
                      ConvergenceWarning, stacklevel=stacklevel)


def _checked(lams: npt.ArrayLike | None) -> list[float]:
    given = np.atleast_1d(np.asarray(lams, dtype=float))
    if given.ndim != 1 or not given.size:
        raise InvalidInput(f"expected a list of lams, got shape {given.shape}", remedy="Give at least one number >= 0")
    grid = [check_lam(lam) for lam in given]
    if (np.diff(grid) <= 0).any():
        raise InvalidInput("lams must increase", remedy="Sort them and drop duplicates: numpy.unique(lams)")
    return grid


def _grid(problem: Problem, end: _Consensus, n_lams: int, tol: float, solver: Solver | str) -> list[float]:
    if n_lams < 2:
        raise InvalidInput(f"n_lams must be at least 2, got {n_lams!r}", remedy="Use for example 50")
    top = end.bracket.upper
    if end.bracket.lower == 0:
        return [0.0]
    return [*np.geomspace(alone_at(problem, top, tol, solver), top, n_lams)[:-1].tolist(), top]


@interruptible()
def alone_at(problem: Problem, top: float, tol: float, solver: Solver | str = "fast") -> float:
    """A lam below `top` where everyone is alone, or as many as ever will be: identical users never part."""
    free, low, start = solve_quietly(problem.with_lam(0.0), tol=tol, solver=solver), 0.01 * top, None
    for _ in range(16):
        start = solve_quietly(problem.with_lam(low), tol=tol, solver=solver, start=start)
        if start.n_clusters >= free.n_clusters:
            break
        low *= 0.2
    return low
