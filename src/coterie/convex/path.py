"""The path over lam, from separate models to one model for all, and the lams at which groups merge.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.base.errors import ConvergenceWarning, InvalidInput, interruptible
from coterie.base.labels import check_labels, many
from coterie.base.types import Array, Ints
from coterie.convex.consensus import Bracket, find_consensus
from coterie.problem.problem import Problem, check_lam
from coterie.problem.solution import Solution, Status, html_table, points_frame
from coterie.solvers import Solver, solve_quietly
from coterie.solvers.base import Point, look_ahead


@dataclass(frozen=True, kw_only=True, eq=False)
class Path:
    """Solutions at increasing lam, each with its own certificate.

    Attributes
    ----------
    problem
        The problem; its lam is not used.
    solutions
        The solutions, without duals.
    tol
        The relative gap that was to be reached at each lam.
    solver
        The solver.

    Example
    -------
    >>> import coterie as ct
    >>> users = ct.Users.from_arrays([[0.0], [1.0], [9.0]])
    >>> path = ct.solve_path(ct.Problem(users, ct.SquaredDistance(), lam=0.0), lams=[0.1, 1.0, 5.0])
    >>> path.lams.tolist(), path.n_clusters.tolist(), len(path)
    ([0.1, 1.0, 5.0], [3, 2, 1], 3)
    """

    problem: Problem = field(repr=False)
    solutions: tuple[Solution, ...] = field(repr=False)
    tol: float
    solver: Solver | str = field(default="fast", repr=False)

    @property
    def lams(self) -> Array:
        """(n_lams,) the lams, increasing."""
        return np.array([s.lam for s in self.solutions])

    @property
    def n_clusters(self) -> Ints:
        """(n_lams,) the number of groups at each lam."""
        return np.array([s.n_clusters for s in self.solutions])

    @property
    def gaps(self) -> Array:
        """(n_lams,) the certified relative gap at each lam."""
        return np.array([s.gap for s in self.solutions])

    def __len__(self) -> int:
        return len(self.solutions)

    def __getitem__(self, index: int) -> Solution:
        return self.solutions[index]

    def __repr__(self) -> str:
        lams, counts, gap = self.lams, self.n_clusters, max(self.gaps, default=np.inf)
        if not len(self):
            return "Path(no lams)"
        proof = f"certified to {gap:.1e}" if np.isfinite(gap) \
            else f"{np.isinf(self.gaps).sum()} not certified"
        return (f"Path({len(lams)} lam{'s' * (len(lams) != 1)} from {lams[0]:.4g} to "
                f"{lams[-1]:.4g}, {counts[0]} -> {counts[-1]} groups, {proof})")

    def to_frame(self) -> Any:
        """The path as a table.

        Returns
        -------
        A frame of polars, or of pandas where polars is not installed, with a row for each lam:
        `lam`, `n_clusters`, `objective`, `gap`, `status` and `seconds`.

        Raises
        ------
        MissingExtra
            If neither is installed.

        Example
        -------
        >>> import coterie as ct
        >>> users = ct.Users.from_arrays([[0.0], [1.0], [9.0]])
        >>> path = ct.solve_path(ct.Problem(users, ct.SquaredDistance(), lam=0.0),
        ...                      lams=[0.1, 1.0, 5.0])
        >>> path.to_frame()["n_clusters"].to_list()
        [3, 2, 1]
        """
        return points_frame(self.solutions)

    def _repr_html_(self) -> str:
        lams, counts = self.lams, self.n_clusters
        # A small chart, 240 by 40: the number of groups at each point, on a logarithmic scale.
        across = np.linspace(2, 238, len(lams))
        down = 38 - 36 * np.log(counts) / max(np.log(counts.max()), 1e-9)
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(across, down, strict=True))
        picture = ('<svg width="240" height="40" role="img" aria-label="groups along lam">'
                   '<polyline fill="none" stroke="#0072B2" stroke-width="2" '
                   f'points="{points}"/></svg>')
        shown = np.unique(np.linspace(0, len(lams) - 1, min(len(lams), 12)).round().astype(int))
        rows = [(f"{s.lam:.4g}", s.n_clusters, f"{s.objective:.6g}", f"{s.gap:.1e}",
                 s.status.name.lower()) for s in map(self.solutions.__getitem__, shown)]
        users = many(self.problem.n_users, "user")
        caption = (f"{many(len(lams), 'lam')} from {lams[0]:.4g} to {lams[-1]:.4g}; {counts[0]} to "
                   f"{many(counts[-1], 'group')} of {users}; largest relative gap "
                   f"{self.gaps.max():.1e}.")
        header = ("lam", "groups", "objective", "relative gap", "status")
        return html_table(caption, header, rows, picture)

    @cached_property
    def splits(self) -> tuple[tuple[float, int, int], ...]:
        """(lam, user, user) for every step at which a group splits, with one pair of its users.

        For convex clustering with equal weights on all pairs, groups only merge. With other weights
        or losses they can also split: two models that cross each other are equal only for a short
        range of lam.
        """
        splits = []
        for before, after in zip(self.solutions, self.solutions[1:], strict=False):
            for k in range(before.n_clusters):
                members = np.flatnonzero(before.labels == k)
                apart = members[after.labels[members] != after.labels[members[0]]]
                if apart.size:
                    splits.append((after.lam, int(members[0]), int(apart[0])))
        return tuple(splits)

    @cached_property
    def linkage(self) -> Array:
        """The merge tree in SciPy's linkage format (n_users - 1, 4), with heights in lam.

        Users who have shared a model once count as merged, also if they split later. Groups that
        never merge on the path are merged at twice its last lam (at 1 if that is 0), so that the
        tree is complete.
        """
        n = self.problem.n_users
        # The tree's node each user is in, and what each node has become.
        node, now = np.arange(n), np.arange(2 * n)
        size = {i: 1 for i in range(n)}
        rows: list[tuple[int, int, float, int]] = []
        steps = [(s.lam, s.labels) for s in self.solutions]
        steps.append((2.0 * steps[-1][0] or 1.0, np.zeros(n, dtype=np.int64)))
        for lam, labels in steps:
            # Nodes that share a group, and groups that share a node, are merged.
            pairs = np.unique(np.stack([node, labels], axis=1), axis=0)
            seen: dict[int, int] = {}
            for old, cluster in pairs.tolist():
                first, second = _root(seen, int(old)), _root(seen, -1 - int(cluster))
                if first != second:
                    seen[max(first, second)] = min(first, second)
            groups: dict[int, list[int]] = {}
            for old in np.unique(node).tolist():
                groups.setdefault(_root(seen, int(old)), []).append(int(old))
            for members in groups.values():
                current = members[0]
                for other in members[1:]:
                    joined = n + len(rows)
                    size[joined] = size[current] + size[other]
                    rows.append((min(current, other), max(current, other), float(lam),
                                 size[joined]))
                    current = joined
                now[members] = current
            node = now[node]
        return np.array(rows, dtype=float).reshape(-1, 4)

    def at(self, lam: float) -> Solution:
        """Solve at any lam, starting from the nearest point of the path.

        Parameters
        ----------
        lam
            The penalty strength.

        Returns
        -------
        Solution
            The solution; a point of the path if it has this lam.

        Raises
        ------
        InvalidInput
            If lam is not a finite number >= 0.

        Example
        -------
        >>> import coterie as ct
        >>> users = ct.Users.from_arrays([[0.0], [1.0], [9.0]])
        >>> path = ct.solve_path(ct.Problem(users, ct.SquaredDistance(), lam=0.0), lams=[0.1, 5.0])
        >>> path.at(1.0).n_clusters
        2
        """
        lam = check_lam(lam)
        nearest = self.solutions[
            int(np.abs(np.log((self.lams + 1e-300) / (lam + 1e-300))).argmin())]
        if nearest.lam == lam:
            return nearest
        solution = solve_quietly(self.problem.with_lam(lam), tol=self.tol, solver=self.solver,
                                 start=nearest)
        _warn([solution], self.tol)
        return solution

    def merge_point(self, first: Any, second: Any, *, rtol: float = 1e-4) -> Bracket:
        """Find the smallest lam on the path at which two users share a model, by bisection.

        Parameters
        ----------
        first, second
            The users, by name or position, as for `Users.positions`.
        rtol
            Relative distance of the two bounds to reach.

        Returns
        -------
        Bracket
            A lower and an upper bound; the upper one is inf if they never share a model.

        Raises
        ------
        InvalidInput
            If one of them is not among the users.

        Example
        -------
        >>> import coterie as ct
        >>> users = ct.Users.from_arrays([[0.0], [1.0], [9.0]], user=["ann", "bob", "eve"])
        >>> path = ct.solve_path(ct.Problem(users, ct.SquaredDistance(), lam=0.0),
        ...                      lams=[0.1, 1.0, 5.0])
        >>> low, high = path.merge_point("ann", "bob")
        >>> round(low, 3), round(high, 3)
        (0.5, 0.5)
        """
        i, j = self.problem.users.positions([first, second])
        together = [bool(s.labels[i] == s.labels[j]) for s in self.solutions]
        if not any(together):
            return Bracket(float(self.lams[-1]), np.inf)
        k = together.index(True)
        with interruptible():
            below = self.solutions[k - 1] if k else self.at(0.0)
        return self._bisect(below, self.solutions[k], lambda s: bool(s.labels[i] == s.labels[j]),
                            rtol)

    @interruptible()
    def window(self, labels: npt.ArrayLike, *, rtol: float = 1e-4) -> tuple[Bracket, Bracket]:
        """Find the range of lam in which the groups are exactly `labels`, by bisection.

        If there are several such ranges on the path, the longest is used.

        Parameters
        ----------
        labels
            (n_users,) the groups.
        rtol
            Relative distance of the bounds to reach.

        Returns
        -------
        tuple[Bracket, Bracket]
            Bounds on the first and on the last such lam.

        Raises
        ------
        InvalidInput
            If no point of the path has these groups.

        Example
        -------
        >>> import coterie as ct
        >>> users = ct.Users.from_arrays([[0.0], [1.0], [9.0]])
        >>> path = ct.solve_path(ct.Problem(users, ct.SquaredDistance(), lam=0.0),
        ...                      lams=[0.1, 1.0, 5.0])
        >>> first, last = path.window([0, 0, 1])
        >>> round(first.upper, 3), round(last.lower, 2)
        (0.5, 2.83)
        """
        wanted = check_labels(labels, self.problem.n_users)
        match = np.array([np.array_equal(s.labels, wanted) for s in self.solutions])
        if not match.any():
            raise InvalidInput("no point of the path has this clustering",
                               remedy="Solve the path on a finer grid of lams, or look at "
                                      "path.n_clusters")
        edges = np.flatnonzero(np.diff(np.concatenate([[0], match.astype(int), [0]])))
        runs = edges.reshape(-1, 2)
        first, last = runs[(self.lams[runs[:, 1] - 1] - self.lams[runs[:, 0]]).argmax()]

        def same(solution: Solution) -> bool:
            return np.array_equal(solution.labels, wanted)

        below = self.solutions[first - 1] if first else self.at(0.0)
        low = Bracket(0.0, 0.0) if same(below) else self._bisect(below, self.solutions[first], same,
            rtol)
        if last == len(self.solutions):
            return low, Bracket(float(self.lams[-1]), np.inf)
        high = self._bisect(self.solutions[last - 1], self.solutions[last], lambda s: not same(s),
                            rtol)
        return low, high

    def _bisect(self, below: Solution, above: Solution, reached: Callable[[Solution], bool],
                rtol: float) -> Bracket:
        """Bisect (geometrically) between a solution for which `reached` is false and one for which
        it is true.
        """
        solved: list[Solution] = []
        with interruptible(lambda: Bracket(below.lam, above.lam)):
            while above.lam - below.lam > rtol * above.lam:
                middle = float(np.sqrt(below.lam * above.lam)) if below.lam > 0 else 0.1 * above.lam
                if below.lam == 0 and middle < 1e-12 * self.lams[-1]:
                    break
                between = solve_quietly(self.problem.with_lam(middle), tol=self.tol,
                                        solver=self.solver, start=above)
                solved.append(between)
                below, above = (below, between) if reached(between) else (between, above)
        _warn(solved, self.tol, stacklevel=4)
        return Bracket(below.lam, above.lam)


def _root(parent: dict[int, int], item: int) -> int:
    while parent.get(item, item) != item:
        item = parent[item]
    return item


def solve_path(problem: Problem, lams: npt.ArrayLike | None = None, n_lams: int = 50, *,
               tol: float = 1e-8, solver: Solver | str = "fast",
               progress: Callable[[Solution, int], None] | None = None,
               enough: Callable[[list[Solution]], bool] | None = None,
               start: Solution | Point | None = None, before: Solution | None = None) -> Path:
    """Solve at many lams, each solution starting from the ones before.

    Parameters
    ----------
    problem : the problem; its lam is not used.
    lams : increasing lams; None: a geometric grid, lam_{r+1} = c lam_r (the paper's Appendix A),
        from a lam with separate models to the smallest lam at which all users that the graph
        connects share one model.
    n_lams : number of lams of this grid.
    tol : the relative duality gap to reach at each lam.
    solver : a name in `SOLVERS`, or a solver with your own settings.
    progress : called after each lam with its solution, including duals, and the number of lams.
    enough : called after each lam with the solutions so far; the path ends if it returns True.
    start : a solution, or a `Point`, to start the first lam from.
    before : the solution before `start`, where a path is continued: the result has the same bits as
        without a break.

    Returns
    -------
    Path
        The solutions, without duals.

    Raises
    ------
    InvalidInput : if the lams do not increase, or another argument is not valid.
    Interrupted : on Ctrl-C; its `best` is the Path of the completed lams, None if there are none.

    Example
    -------
    >>> import coterie as ct
    >>> users = ct.Users.from_arrays([[0.0], [1.0], [9.0]])
    >>> ct.solve_path(ct.Problem(users, ct.SquaredDistance(), lam=0.0),
    ...               n_lams=4).n_clusters.tolist()
    [3, 3, 2, 1]
    """
    solutions: list[Solution] = []

    def so_far() -> Path | None:
        return Path(problem=problem, solutions=tuple(solutions), tol=tol, solver=solver) \
            if solutions else None

    with interruptible(so_far):
        grid, first, pooled = (_check_lams(lams), None, None) if lams is not None \
            else _choose_lams(problem, n_lams, tol, solver)
        last = start if first is None else first
        for lam in grid:
            # The last solutions are a good start; at the last lam consensus is already proved.
            guess = look_ahead(before, last, lam)
            if pooled is not None and lam == grid[-1]:
                guess = pooled
            before = last.without_duals() if isinstance(last, Solution) else None
            last = _next(problem.with_lam(lam), tol, solver, guess, last)
            # Duals need more memory than everything else, and are only needed to start the next
            # solve.
            solutions.append(last.without_duals())
            if progress is not None:
                progress(last, len(grid))
            if enough is not None and enough(solutions):
                break
    _warn(solutions, tol)
    return Path(problem=problem, solutions=tuple(solutions), tol=tol, solver=solver)


def _next(problem: Problem, tol: float, solver: Solver | str, guess: Solution | Point | None,
          last: Solution | Point | None) -> Solution:
    """The solution from a guess; from the last solution too, if that does not reach the tolerance.
    """
    point = solve_quietly(problem, tol=tol, solver=solver, start=guess)
    if point.status is Status.CONVERGED or guess is last:
        return point
    return min(point, solve_quietly(problem, tol=tol, solver=solver, start=last),
               key=lambda solution: solution.gap)


def _warn(solutions: Sequence[Solution], tol: float, stacklevel: int = 3) -> None:
    """Issue one warning for all solutions that did not reach the tolerance."""
    inaccurate = [s for s in solutions if s.status is not Status.CONVERGED]
    if inaccurate:
        worst = max(inaccurate, key=lambda s: s.gap)
        warnings.warn(f"{len(inaccurate)} of {many(len(solutions), 'lam')} did not reach tol = "
                      f"{tol:g}; the worst is lam = {worst.lam:g} with a relative gap of "
                      f"{worst.gap:.1e}. {worst.status.value}",
                      ConvergenceWarning, stacklevel=stacklevel)


def _check_lams(lams: npt.ArrayLike) -> list[float]:
    given = np.atleast_1d(np.asarray(lams, dtype=float))
    if given.ndim != 1 or not given.size:
        raise InvalidInput(f"expected a list of lams, got shape {given.shape}",
                           remedy="Give at least one number >= 0")
    grid = [check_lam(lam) for lam in given]
    if (np.diff(grid) <= 0).any():
        raise InvalidInput("lams must increase", remedy="Sort them and drop duplicates: "
                           "numpy.unique(lams)")
    return grid


def _choose_lams(problem: Problem, n_lams: int, tol: float, solver: Solver | str
                 ) -> tuple[list[float], Solution | None, Point | None]:
    """The lams, and the solutions at the first and the last of them if they are known."""
    bracket, models, duals = find_consensus(problem)
    if n_lams < 2:
        raise InvalidInput(f"n_lams must be at least 2, got {n_lams!r}",
                           remedy="Use for example 50")
    if bracket.lower == 0:
        return [0.0], None, None
    first = _alone(problem, bracket.upper, tol, solver)
    lams = np.geomspace(first.lam, bracket.upper, n_lams)[:-1].tolist()
    return [*lams, bracket.upper], first, Point(models, duals)


def alone_at(problem: Problem, top: float, tol: float) -> float:
    """A lam below `top` with as many models as at lam = 0; users with equal data never have
    different models.
    """
    return _alone(problem, top, tol, "fast").lam


@interruptible()
def _alone(problem: Problem, top: float, tol: float, solver: Solver | str) -> Solution:
    """The solution at such a lam."""
    free, lam, last = solve_quietly(problem.with_lam(0.0), tol=tol, solver=solver), 0.01 * top, None
    for _ in range(16):
        last = solve_quietly(problem.with_lam(lam), tol=tol, solver=solver, start=last)
        if last.n_clusters >= free.n_clusters:
            break
        lam *= 0.2
    assert last is not None
    return last
