"""From users to groups and models with all choices made: what `coterie fit` and the estimators do.

    fitted = fit(users, Settings(task="classification"))      # fitted.solution, fitted.path,
                                                              fitted.scores
    fitted.predict(new_users)
    fitted.save("run")                                        # coterie.load_run("run") reads it

1. Targets that are absurdly far from all others are left out, with a warning
   (`coterie.fitting.outliers`). Features are standardised, and an intercept is added
   (`coterie.fitting.units`).
2. Groups are found, and weights made from them (`coterie.fitting.plan`).
3. The path over lam is solved, from separate models through these groups to one model for all.
4. At a lam where the clusters are the groups, the solution is certified: no other models are better
   for this convex problem. The evidence for the groups is the criterion in `coterie.groups.find`.
5. All steps are done again with a share of every user's rows held out, and scored on these rows
   (`Scores`).

Points with one row each have no noise to compare groups by. Their weights are Gaussian, and the lam
whose clusters have the largest silhouette (Rousseeuw 1987) is chosen.
"""

from __future__ import annotations

import time
import warnings
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from coterie.base.errors import CoterieWarning, InvalidInput
from coterie.base.machine import one_blas_thread, require_memory
from coterie.base.types import Array, Ints
from coterie.convex.choice import silhouette
from coterie.convex.path import Path
from coterie.data.users import Split, Users
from coterie.fitting.ahead import Ahead
from coterie.fitting.kinds import group_centres, sentence_of
from coterie.fitting.outliers import without_far_targets
from coterie.fitting.path import solve_plan
from coterie.fitting.plan import PathPlan, by_groups, learn_units, make_plan
from coterie.fitting.result import Fit as Fit
from coterie.fitting.scores import Scores, score_held_out
from coterie.fitting.settings import Settings
from coterie.fitting.sources import RowsFitSource
from coterie.fitting.stability import draw_groups, summarise_draws
from coterie.fitting.summarised import fit_summaries
from coterie.fitting.units import Units
from coterie.fitting.work import FinishedParts, FitProgress, Work
from coterie.groups.summaries import Summaries
from coterie.losses.rows import too_wide
from coterie.problem.solution import Solution
from coterie.solvers import solve

_HESSIANS = 4  # sets of Hessians that a fit has at the same time, at least
# Below this silhouette the structure is weak and could be artificial (Kaufman and Rousseeuw 1990).
_CLEAR = 0.5


def fit(users: Users, settings: Settings, *, split: Split | None = None,
        progress: FitProgress | None = None,
        store: FinishedParts | None = None) -> Fit:
    """Find groups and models.

    Parameters
    ----------
    users : their data, with classes as numbers 0, 1, ...
    settings : all that can be chosen.
    split : the held-out rows in `test`, the others in `train`; drawn by the settings' seed if
        omitted.
    progress : called with what is being done, how many steps are done, of how many, and a text.
    store : finished parts are kept here and taken from here, so that an interrupted fit can be
        continued: arrays, numbers and texts only.

    Returns
    -------
    The fit.

    Raises
    ------
    InvalidInput : data or settings that cannot be used.
    Interrupted : on Ctrl-C; what is finished is in `store`.

    Example
    -------
    >>> from coterie.datasets import clustered
    >>> fit(clustered("squared").users, Settings(task="regression", n_lams=4,
    ...                                          holdout=0.0)).n_clusters
    3
    """
    began = time.perf_counter()
    users.require_samples()
    points, with_scores = settings.task == "clustering", \
        settings.holdout > 0 and settings.task != "clustering"
    _check_lam_can_be_chosen(settings, points or with_scores or users.n_users == 1)
    work = Work(progress or (lambda *_: None), {} if store is None else store)
    users, concerns = without_far_targets(users, settings) if split is None else (users, [])
    units = learn_units(users, settings)
    inner = units.inner(users)
    for concern in concerns + units.loss.concerns(inner):
        warnings.warn(concern, CoterieWarning, stacklevel=2)
    _require_memory(inner, units)
    if with_scores and split is None:
        split = users.hold_out(settings.holdout, stratify=settings.task == "classification",
                               seed=settings.seed)
    samples = units.loss.prepare(inner)  # kept to the end, so that it is prepared once
    if _by_summaries(inner, units, settings):
        parts = () if not with_scores or split is None else (split.train, split.test)
        with one_blas_thread():
            fitted = fit_summaries(RowsFitSource(units, users, *parts), units, settings, work)
        return replace(fitted, why=" ".join([*concerns, fitted.why]),
                       seconds=time.perf_counter() - began)
    # Wide models need products of large matrices.
    with nullcontext() if too_wide(units.loss, samples) else one_blas_thread():
        scores, judged, plan = _planned(split if with_scores else None, inner, units, settings,
                                        work)
        fitted = _solved(plan, judged, scores, inner, units, settings, work)
    return replace(fitted, why=" ".join([*concerns, fitted.why]),
                   seconds=time.perf_counter() - began)


def _by_summaries(inner: Users, units: Units, settings: Settings) -> bool:
    """Whether the fit is one on summaries: of losses that are not quadratic, with nothing given."""
    wide = too_wide(units.loss, units.loss.prepare(inner))
    return (settings.lam == "auto" and by_groups(inner, settings) and not wide
            and not units.loss.quadratic and settings.task != "clustering")


class _Finished(NamedTuple):
    """What follows from a plan alone."""

    path: Path
    chosen: int  # the index of the point; -1 if it is not chosen yet
    why: str
    drawn: Ints | None  # (n_users, draws) groups with other rows, if there are groups


def _finish(plan: PathPlan, inner: Users, units: Units, settings: Settings,
            work: Work) -> _Finished:
    """Solve the path and draw the groups again."""
    path = solve_plan(plan, settings, work)
    index, why = plan.choose(path)
    drawn, sharing, groups = None, plan.sharing, plan.groups
    if sharing is not None and groups is not None and groups.any():
        work.show("stability of the groups")
        drawn = np.asarray(work.once("drawn groups", lambda: draw_groups(
            Summaries.exact(inner, units.loss), sharing, settings)))
    if index >= 0:
        _pooled(plan, path[index], settings, work)
    return _Finished(path, index, why, drawn)


def _pooled(plan: PathPlan, chosen: Solution, settings: Settings, work: Work) -> Array:
    """(dim,) one model for all users."""
    everyone, problem = np.zeros(plan.problem.n_users, dtype=np.int64), plan.problem
    return np.asarray(work.once("together", lambda: group_centres(
        problem.loss, problem.samples, everyone, settings.count,
            chosen.models.mean(axis=0, keepdims=True))[0]))


def _solved(plan: PathPlan, judged: PathPlan | None, scores: Scores | None, inner: Users,
            units: Units,
            settings: Settings, work: Work) -> Fit:
    """The fit of a plan; `judged` is the plan without the held-out rows."""
    compared = plan if judged is None or plan.means else judged
    path, index, why, drawn = _finish(plan, inner, units, settings, work)
    if index < 0:
        index, why = _clearest(path, settings.seed) if settings.task == "clustering" else _best(
            path, scores)
    elif plan.kind is not None:
        why = f"{sentence_of(plan.kind, compared.means)} {why}"
    stability = None
    if drawn is not None and plan.sharing is not None:
        stability = summarise_draws(drawn, plan.sharing, None if judged is None else judged.groups)
        why = f"{why} {stability}" if stability.stable else f"{stability} {why}"
    chosen = path[index]
    solution = chosen if chosen.duals is not None else solve(chosen.problem, tol=settings.tol,
        start=chosen)
    return Fit(settings=settings, units=units, solution=solution, path=path, chosen=index,
               together=_pooled(plan, solution, settings, work), why=why, scores=scores,
               compared=compared.means,
               compared_errors=compared.errors, stability=stability)


def _require_memory(inner: Users, units: Units) -> None:
    """Raise InvalidInput where the Hessians of all users need more memory than there is; wide
    models have none.
    """
    samples = units.loss.prepare(inner)
    if not too_wide(units.loss, samples):
        require_memory(8.0 * _HESSIANS * inner.n_users * samples.dim**2,
                       f"the Hessians of {inner.n_users} users with {samples.dim} coordinates",
                       "Use fewer columns, for example their principal components, or fewer users "
                       "at a time")


def _check_lam_can_be_chosen(settings: Settings, possible: bool) -> None:
    if (settings.lam == "score" or (settings.lam == "auto" and settings.weights != "auto")) \
        and not possible:
        raise _no_held_out_rows()


def _planned(split: Split | None, inner: Users, units: Units, settings: Settings,
             work: Work) -> tuple[Scores | None, PathPlan | None, PathPlan]:
    """Scores on held-out rows, the plan without these rows, and the plan with all rows.

    The kind of models is chosen without the rows that judge it, and then fitted to all rows.
    """
    scores = judged = None
    if split is not None:
        ahead = Ahead(inner, units.loss, settings, work,
                      lambda plan, parts: _finish(plan, inner, units, settings, parts))
        try:
            scores, judged = score_held_out(split, settings, work)
            ahead.deliver(None if judged is None else judged.sharing)
        finally:
            ahead.end()
    plan = make_plan(inner, units.loss, settings, work, None if judged is None else judged.sharing)
    if split is not None and judged is not None and plan.kind != judged.kind:
        # It does not exist with all rows: score the kind that does.
        scores, judged = score_held_out(split, settings, work, plan.sharing)
    return scores, judged, plan


def _no_held_out_rows() -> InvalidInput:
    return InvalidInput("lam cannot be chosen: no rows are held out",
                        remedy="Give lam a number, or hold out rows of users with several")


def _best(path: Path, scores: Scores | None) -> tuple[int, str]:
    """The point with the least loss on held-out rows, at the same relative position of the path."""
    if scores is None:
        raise _no_held_out_rows()
    index = int(scores.losses.argmin() * (len(path) - 1) / max(len(scores.losses) - 1, 1) + 0.5)
    return index, f"Least mean loss on held-out rows, {scores.losses.min():.4g}."


def _clearest(path: Path, seed: int) -> tuple[int, str]:
    """The point whose clusters have the largest silhouette; one cluster if no silhouette is large
    enough.
    """
    # Users with several rows are represented by their means.
    points = path.problem.users.data.moments().means
    n, best, index = len(points), 0.0, len(path) - 1
    some = np.arange(n) if n <= 2000 else np.random.default_rng(seed).choice(n, 2000, replace=False)
    seen: dict[bytes, float] = {}
    for r, solution in enumerate(path.solutions):
        key, labels = solution.labels.tobytes(), solution.labels[some]
        if 1 < solution.n_clusters <= min(max(np.sqrt(n), 2), n - 1, 200) and key not in seen:
            seen[key] = float(silhouette(points[some], labels)) if len(np.unique(labels)) > 1 \
                else -1.0
            if seen[key] > best:
                best, index = seen[key], r
    if best < _CLEAR:
        return (len(path) - 1, f"No clusters are clear (largest silhouette {best:.2f}), so all "
                "points form one cluster.")
    return index, f"The clearest clusters, with a silhouette of {best:.2f}."
