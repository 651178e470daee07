"""The fit of a convex problem that the user states: lam or the weights are given, or users are
points with one row each.

    weights   "unit" for all pairs, or those of the k nearest users; "auto" by Wald distance, and by
              plain distance for points
    lam       a number; or the least mean loss on held-out rows, at the same relative position of
              the path without these rows; of points the clusters that persist longest

Where nothing is given, `coterie.fitting.fit` chooses.
"""

from __future__ import annotations

import itertools
import warnings
from dataclasses import fields, replace
from typing import Any

import numpy as np

from coterie.base.errors import CoterieWarning, InvalidInput
from coterie.base.types import Array, Ints
from coterie.convex.consensus import lam_max
from coterie.convex.path import Path, alone_at, solve_path
from coterie.data.users import Split, Users
from coterie.fitting.kinds import handed_out
from coterie.fitting.result import Fit
from coterie.fitting.scores import METRICS, Scores, worse_than_alone
from coterie.fitting.settings import Settings, Work
from coterie.fitting.units import Units, learn_units
from coterie.losses import Loss
from coterie.losses.rows import too_wide
from coterie.problem.graph import Graph
from coterie.problem.problem import Problem
from coterie.problem.solution import Certificate, Solution, Status
from coterie.problem.weights import LocalModels, adaptive_graph
from coterie.solvers import solve

_PAIRS = 3000  # users up to whom all pairs are used
_TOL = 1e-4  # relative gap of solutions of which only the groups are used
_PERSISTENT = 2.5  # the factor of lam over which clusters persist, at least


def fit_given(inner: Users, units: Units, settings: Settings, split: Split | None,
              work: Work) -> Fit:
    """The fit of a problem as the user states it.

    Parameters
    ----------
    inner : the users in the solver's units.
    units : of their numbers.
    settings : of the fit.
    split : the held-out rows, if any, in the units given.
    work : where progress is reported, and finished parts are kept.
    """
    scores = None if split is None else score_path(split, settings, work)
    path, given = solve_stated(inner, units.loss, settings, work)
    if given >= 0:
        index = given
        why = "There is only one user." if inner.n_users == 1 else "As given."
    elif settings.task == "clustering":
        index, why = most_persistent(path)
    else:
        index, why = _best(path, scores)
    chosen = path[index]
    if chosen.duals is None:
        chosen = solve(chosen.problem, tol=settings.tol, start=chosen)
    everyone = np.zeros(inner.n_users, dtype=np.int64)
    together = handed_out(units.loss, path.problem.samples, everyone, settings.count)[0]
    return Fit(settings=settings, units=units, solution=chosen, path=path, chosen=index,
               together=together, why=why, scores=scores)


def check_lam_can_be_chosen(settings: Settings, possible: bool) -> None:
    """Raise InvalidInput where lam is to be chosen and nothing says how good it is."""
    if (settings.lam == "score" or (settings.lam == "auto" and settings.weights != "auto")) \
            and not possible:
        raise InvalidInput("lam cannot be chosen: no rows are held out",
                           remedy="Give lam a number, or hold out rows of users with several")


def _planned(inner: Users, loss: Loss, settings: Settings, work: Work,
             ) -> tuple[Problem, Array, int]:
    """The problem of these users with its weights, its (n_lams,) increasing lams, and the index of
    the lam given, -1 where it is chosen after the path is solved.
    """
    n, k = inner.n_users, min(settings.k, max(inner.n_users - 1, 1))
    if n == 1:
        lams = np.unique([0.0, 0.0 if isinstance(settings.lam, str) else float(settings.lam)])
        return _problem(inner, loss, Graph.complete(1)), lams, len(lams) - 1
    points = settings.task == "clustering" and int(inner.sizes.max()) == 1
    if settings.weights == "unit" or (n == 2 and (settings.weights != "auto" or points)):
        if n > _PAIRS:
            raise InvalidInput(f"{n} users have too many pairs to use them all",
                               remedy="Use the weights 'auto' or 'wald'")
        graph = Graph.complete(n)
    else:
        weights = settings.weights if settings.weights != "auto" else \
            "gaussian" if points or too_wide(loss, loss.prepare(inner)) else "wald"
        graph = adaptive_graph(LocalModels.of(inner, loss, max(settings.ridge, 1e-6)), weights, k)
    problem = _problem(inner, loss, graph)

    def grid() -> Array:
        work.show("range of lam")
        top = 1.001 * lam_max(problem, rtol=1e-3).upper
        if top <= 0:
            return np.array([0.0])
        return np.geomspace(alone_at(problem, top, 1e-4), top, settings.n_lams)

    lams = np.array(work.once("lams", grid))
    if isinstance(settings.lam, str):
        return problem, lams, -1
    lams = np.unique([*lams, float(settings.lam)])
    return problem, lams, int(np.searchsorted(lams, settings.lam))


def _problem(users: Users, loss: Loss, graph: Graph) -> Problem:
    """One of several problems on the same data, about which the fit warns only once."""
    with warnings.catch_warnings(action="ignore", category=CoterieWarning):
        return Problem(users, loss, 0.0, graph)


# -- the path: its points are solved one after the other, kept, and not solved for again


def solve_stated(inner: Users, loss: Loss, settings: Settings, work: Work) -> tuple[Path, int]:
    """The path of the problem of these users, certified to the tolerance, and the index of the lam
    given, or -1; points that are kept are not solved again.

    The next point starts from the last two and the last one's duals, so that a continued run ends
    with the same bits. Only the point of a lam given keeps its duals.
    """
    problem, lams, given = _planned(inner, loss, settings, work)
    last: dict[str, Any] = work.get("last", {"point": -1})
    done = [_restored(problem.with_lam(float(lams[k])), work.get(f"point {k}"))
            for k in range(last["point"] + 1)]
    start = None if not done else replace(done[-1], duals=last["duals"], sigma=last["sigma"])

    def keep(solution: Solution, _: int) -> None:
        k = len(done)
        shown = solution if k == given else solution.without_duals()
        work.keep(f"point {k}", _state(shown))
        work.keep("last", {"point": k, "duals": solution.duals, "sigma": solution.sigma})
        done.append(shown)
        work.show("path", len(done), len(lams),
                  f"objective {solution.objective:.6g}, gap {solution.gap:.1e}, "
                  f"{solution.n_clusters} groups")

    if len(done) < len(lams):
        solve_path(problem, lams[len(done):], tol=settings.tol, progress=keep,
                   start=start, before=done[-2] if len(done) > 1 else None)
    return Path(problem=problem, solutions=tuple(done), tol=settings.tol), given


def _state(solution: Solution) -> dict[str, Any]:
    """A solution as arrays, numbers and texts."""
    proof = solution.certificate
    certificate = {f.name: getattr(proof, f.name) for f in fields(proof) if f.name != "duals"}
    return {"models": solution.models, "duals": solution.duals, "certificate": certificate,
            "status": solution.status.name, "solver": solution.solver, "seconds": solution.seconds,
            "sigma": solution.sigma}


def _restored(problem: Problem, state: dict[str, Any]) -> Solution:
    """The solution whose `_state` this is."""
    proof = {**state["certificate"],
             "infinite_users": tuple(state["certificate"]["infinite_users"])}
    duals = state.get("duals")
    return Solution(problem=problem, models=problem.check_models(state["models"]), duals=duals,
                    certificate=Certificate(**proof).with_duals(duals),
                    status=Status[state["status"]],
                    solver=state["solver"], seconds=state["seconds"], sigma=state["sigma"])


# -- choices of lam


def score_path(split: Split, settings: Settings, work: Work) -> Scores:
    """Scores, on the held-out rows, of models found without these rows, along the path."""
    train, test, present = split.train, split.test, split.test.counts > 0
    assert train.targets is not None
    assert test.targets is not None
    classes = settings.task == "classification"
    units = learn_units(train, settings, int(max(train.targets.max(), test.targets.max())) + 1
                        if classes else 0)
    work = Work(work.report, work.parts, "held out: ")
    # 1. The path without the held-out rows.
    path, given = solve_stated(units.inner(train), units.loss,
                               replace(settings, tol=max(settings.tol, _TOL)), work)
    # 2. The models of its groups, and those to compare with.
    loss, samples = units.loss, path.problem.samples
    known: dict[bytes, Array] = {}

    def models_of(labels: Ints) -> Array:
        key = labels.tobytes()
        if key not in known:
            known[key] = handed_out(loss, samples, labels, settings.count)
        return known[key]

    models = [models_of(s.labels) for s in path.solutions]
    pooled = models_of(np.zeros(train.n_users, dtype=np.int64))
    alone = models_of(np.arange(train.n_users)) if too_wide(loss, samples) \
        else loss.local(samples).points
    # 3. Their losses and scores.
    held_out = units.inner(test.take(np.flatnonzero(present)))
    judged = loss.prepare(held_out)
    with np.errstate(over="ignore"):  # a predicted count may be too large for float64
        losses = np.array([loss.values(judged, m[present]).mean() for m in models])
    chosen = given if given >= 0 else int(losses.argmin())
    points = np.stack([units.scores(m, test) for m in models])
    return Scores(metric=METRICS[settings.task], larger=classes, fitted=points[chosen],
                  alone=units.scores(alone, test), together=units.scores(pooled, test),
                  points=points, losses=losses, chosen=chosen,
                  n_clusters=path[chosen].n_clusters, n_rows=int(test.sizes.sum()),
                  worse=worse_than_alone(units.errors(models[chosen], test),
                                         units.errors(alone, test), test))


def _best(path: Path, scores: Scores | None) -> tuple[int, str]:
    """The point with the least loss on held-out rows, at the same relative position of the path."""
    if scores is None:
        raise InvalidInput("lam cannot be chosen: no rows are held out",
                           remedy="Give lam a number, or hold out rows of users with several")
    index = int(scores.losses.argmin() * (len(path) - 1) / max(len(scores.losses) - 1, 1) + 0.5)
    return index, f"Least mean loss on held-out rows, {scores.losses.min():.4g}."


def most_persistent(path: Path) -> tuple[int, str]:
    """The point in the middle of the longest range of log lam with the same number of clusters; the
    last point if no range is long.

    Only clusters of sqrt(n) points or more count, because outliers stay apart for long, and half of
    the points must be in such clusters. Inside the range the smaller clusters count, too: the point
    is one at which most points of the range have as many clusters in all.
    """
    n, logs = path.problem.n_users, np.log(np.maximum(path.lams, 1e-300))
    least = n**0.5 if n > 6 else 1.0
    sizes = [np.bincount(s.labels) for s in path.solutions]
    counts = [int((each >= least).sum()) if 2 * each[each >= least].sum() > n else 0
              for each in sizes]
    starts = [0, *(k for k in range(1, len(counts)) if counts[k] != counts[k - 1]), len(counts)]
    ends = np.append(logs, logs[-1])
    runs = [(float(ends[end] - ends[begin]), begin, end)
            for begin, end in itertools.pairwise(starts)
            if 1 < counts[begin] <= max(n**0.5, 2.0) and len(sizes[begin]) < n]
    length, begin, end = max(runs, default=(0.0, 0, 0))
    if length < max(float(np.log(_PERSISTENT)), 1.1 * float(np.diff(logs).max(initial=0.0))):
        return len(path) - 1, "No clusters persist along the path, so all points form one cluster."
    totals, middle = [len(each) for each in sizes[begin:end]], (begin + end - 1) / 2
    best = max(range(begin, end), key=lambda k: (totals.count(len(sizes[k])), -abs(k - middle), k))
    return best, (
        f"{counts[begin]} clusters persist longest: until lam has grown {np.exp(length):.3g} "
        "times.")
