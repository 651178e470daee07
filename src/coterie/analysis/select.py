"""Choosing lam, and the models to use at it: by held-out score, number of clusters, certificate or stability.

Every rule looks at the users only through one number each (a loss on held-out samples) and through clusterings, so a
federation can apply it as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from coterie._typing import Array, Ints
from coterie.analysis.metrics import adjusted_rand
from coterie.analysis.path import Path, check_labels, solve_path
from coterie.analysis.recovery import recovery_bounds
from coterie.data.users import Users
from coterie.errors import InvalidInput
from coterie.losses.grouped import Grouped
from coterie.problem import Problem
from coterie.solution import Solution


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """The point of the path that was chosen, and why."""

    solution: Solution
    by: str
    sentence: str
    path: Path = field(repr=False)
    scores: Array = field(repr=False)  # one number for each lam of the path; what it is depends on the rule
    models: Array = field(repr=False)  # (n_users, dim) the models to use: penalised, or refitted where that did better
    refitted: bool = False

    @property
    def lam(self) -> float:
        return self.solution.lam

    @property
    def labels(self) -> Ints:
        return self.solution.labels

    def __str__(self) -> str:
        return f"lam = {self.lam:.4g} with {self.solution.n_clusters} cluster(s), by {self.by}: {self.sentence}"


def refit(problem: Problem, labels: npt.ArrayLike) -> Array:
    """(n_users, dim) the best model of each cluster by itself: what the penalty shrinks is undone (paper, Appendix C).

    Every cluster minimises the sum of its members' losses; no user needs to show its data for that.
    """
    clusters = check_labels(labels, problem.n_users)
    loss = Grouped(loss=problem.loss, samples=problem.samples, labels=clusters)
    return loss.local(loss.prepare(loss.groups)).points[clusters]


def by_score(problem: Problem, held_out: Users, *, path: Path | None = None, n_lams: int = 30, tol: float = 1e-6,
             one_standard_error: bool = True) -> Choice:
    """The lam whose models have the least mean loss on held-out samples of the same users, in the same order.

    With `one_standard_error`, the fewest clusters whose mean is within one standard error of the least are taken; the
    error is that of the mean, over users, of the difference from the least. Penalised and refitted models compete at
    every lam.
    """
    _check_held_out(problem, held_out)
    path = solve_path(problem, n_lams=n_lams, tol=tol) if path is None else path
    present = held_out.counts > 0
    samples = problem.loss.prepare(held_out.take(np.flatnonzero(present)))
    shrunk = np.stack([problem.loss.values(samples, s.models[present]) for s in path.solutions])
    again = np.stack([problem.loss.values(samples, refit(problem, s.labels)[present]) for s in path.solutions])
    ridge = problem.loss.values(samples, np.zeros((int(present.sum()), problem.dim)))  # a size to be finite against
    again = np.where(np.isfinite(again), again, np.abs(ridge) * 1e6 + 1e6)
    losses = np.concatenate([shrunk, again])
    means = losses.mean(axis=1)
    best = int(means.argmin())
    if one_standard_error:
        error = (losses - losses[best]).std(axis=1) / np.sqrt(losses.shape[1])
        clusters = np.tile(path.n_clusters, 2)
        allowed = np.flatnonzero(means <= means[best] + error)
        fewest = allowed[clusters[allowed] == clusters[allowed].min()]
        best = int(fewest[means[fewest].argmin()])
    index, refitted = best % len(path), best >= len(path)
    solution = path[index]
    models = refit(problem, solution.labels) if refitted else solution.models
    rule = ", the fewest clusters within one standard error of the best" if one_standard_error else ""
    return Choice(solution=solution, by="held-out score", path=path, scores=np.minimum(shrunk, again).mean(axis=1),
                  models=models, refitted=refitted,
                  sentence=f"mean held-out loss {means[best]:.4g} with {'refitted' if refitted else 'penalised'} "
                           f"models{rule}.")


def by_clusters(problem: Problem, at_most: int, *, path: Path | None = None, n_lams: int = 30,
                tol: float = 1e-6) -> Choice:
    """The smallest lam with at most so many clusters: a budget of models."""
    if isinstance(at_most, bool) or int(at_most) != at_most or at_most < 1:
        raise InvalidInput(f"at_most must be a whole number >= 1, got {at_most!r}", remedy="Use for example 3")
    path = solve_path(problem, n_lams=n_lams, tol=tol) if path is None else path
    enough = np.flatnonzero(path.n_clusters <= at_most)
    if not enough.size:
        raise InvalidInput(f"no point of the path has at most {at_most} clusters; the fewest are "
                           f"{int(path.n_clusters.min())}", remedy="Extend the path to larger lams, or join the graph")
    index = int(enough[0])
    solution = path[index]
    exact = "exactly as many" if solution.n_clusters == at_most else f"the path skips from {path.n_clusters[index - 1]}"
    return Choice(solution=solution, by="number of clusters", path=path, scores=path.n_clusters.astype(float),
                  models=solution.models, sentence=f"{solution.n_clusters} clusters where at most {at_most} were asked "
                                                   f"for ({exact}).")


def by_certificate(problem: Problem, *, path: Path | None = None, n_lams: int = 30, tol: float = 1e-6) -> Choice:
    """A lam at which the clusters found are provably recovered: inside the bounds of Theorems 1 and 2, at most margin.

    The margin is the smaller of lam / lower and upper / lam; everyone alone and everyone together do not count, since
    they are always recovered.
    """
    path = solve_path(problem, n_lams=n_lams, tol=tol) if path is None else path
    margins = np.zeros(len(path))
    for k, solution in enumerate(path.solutions):
        if 1 < solution.n_clusters < problem.n_users:
            bounds = recovery_bounds(solution.problem, solution.labels)
            low = solution.lam / bounds.lower if bounds.lower > 0 else np.inf
            margins[k] = min(low, bounds.upper / solution.lam)
    index = int(margins.argmax())
    if margins[index] <= 1:
        index = len(path) - 1
        sentence = "no clustering of the path is certified by the bounds, so everyone is put together."
    else:
        sentence = f"inside the bounds of Theorems 1 and 2 by a factor of {margins[index]:.3g}."
    return Choice(solution=path[index], by="certificate", path=path, scores=margins, models=path[index].models,
                  sentence=sentence)


def by_stability(problem: Problem, *, path: Path | None = None, n_lams: int = 30, tol: float = 1e-6,
                 resamples: int = 10, seed: int = 0) -> Choice:
    """The lam whose clusters change least when every user's samples are halved at random.

    Agreement is the adjusted Rand index, averaged over resamples; everyone alone and everyone together are left out,
    and everyone together is chosen where nothing else agrees better than by half.
    """
    path = solve_path(problem, n_lams=n_lams, tol=tol) if path is None else path
    agreement = np.zeros(len(path))
    for k in range(resamples):
        half = problem.users.data.split(test=0.5, seed=seed + k).train
        part = solve_path(Problem(half, problem.loss, lam=problem.lam, graph=problem.graph), path.lams, tol=tol)
        for r, (whole, other) in enumerate(zip(path.solutions, part.solutions, strict=True)):
            if 1 < whole.n_clusters < problem.n_users:
                agreement[r] += adjusted_rand(whole.labels, other.labels) / resamples
    index = int(agreement.argmax())
    if agreement[index] < 0.5:
        index = len(path) - 1
    return Choice(solution=path[index], by="stability", path=path, scores=agreement, models=path[index].models,
                  sentence=f"clusters agree by {agreement[index]:.2f} (adjusted Rand index) over {resamples} halvings."
                  if agreement[index] > 0 else "no clustering is stable, so everyone is put together.")


def _check_held_out(problem: Problem, held_out: Users) -> None:
    if held_out.names != problem.users.names:
        raise InvalidInput("the held-out samples are of other users, or in another order",
                           remedy="Use users.split(...), which keeps all users in order")
    if not held_out.n_samples:
        raise InvalidInput("there are no held-out samples", remedy="Split with validation=0.2, for example")
