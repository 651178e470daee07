"""The fit on summaries, wherever the users' rows are: from the units to a certified solution.

    describe -> summarise -> propose -> judge -> finish -> certify and score

1. Summaries are taken around one centre with a spread (`coterie.groups.summaries`), which also says
   how strong the ridge should be.
2. Groups are proposed and compared, and the kind of models is judged, on the summaries alone: what
   is compared costs no questions, however many kinds and partitions there are.
3. The centres of what was chosen, and the models around them, are found exactly by users' slopes.
4. They are the solution of the convex problem with weights inside the groups and none between, at a
   lam at which flows inside the groups prove it. Users certify it with their own rows.
5. Held-out rows judge the models of a fit that has not seen them.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

import numpy as np

from coterie.base.errors import CoterieWarning
from coterie.base.labels import group_means, one_group
from coterie.base.types import Array, Ints
from coterie.convex.path import Path
from coterie.data.users import Participants
from coterie.fitting.kinds import (
    Comparison,
    Sharing,
    choose,
    sentence_of,
    sharing_of,
)
from coterie.fitting.path import solve_plan
from coterie.fitting.plan import connect_inside, sentence_about, weighted_plan
from coterie.fitting.result import Fit, SentModels
from coterie.fitting.settings import Settings
from coterie.fitting.sources import Around, Expanded, FitSource, Judged
from coterie.fitting.stability import draw_groups, summarise_draws
from coterie.fitting.units import Units
from coterie.fitting.work import Work
from coterie.groups.find import describe_better, describe_sizes
from coterie.groups.refining import Refining
from coterie.groups.search import SearchOptions, SearchResult, kind_of, search_parts
from coterie.groups.summaries import Summaries, ridge_of, summarise
from coterie.losses import AffineLoss, Loss, Personal, Samples
from coterie.losses.derived import Quadratic, Remote, Weighted
from coterie.problem.graph import Graph
from coterie.problem.problem import Problem
from coterie.problem.solution import Certificate, Solution, Status
from coterie.problem.weights import LocalModels

_ABOVE = 1.25  # lam over the least one at which flows prove the groups
# Steps to the centres; by how much of itself the objective may exceed its least value: a share of
# the tolerance, and for models to compare with.
_STEPS, _SHARE, _ROUGH = 20, 0.1, 1e-3


@dataclass(frozen=True, eq=False)
class Part:
    """A fit to all rows, or to those that are not held out.

    Parameters
    ----------
    known : the summaries.
    found : the search for groups.
    sharing : what users share.
    compared : the kinds that were compared, if they were.
    """

    known: Summaries
    found: SearchResult
    sharing: Sharing
    compared: Comparison | None = None


@dataclass(frozen=True, eq=False)
class Centres:
    """Centres of groups, and what users say of them.

    Parameters
    ----------
    labels : (n_users,) the groups.
    covariance : (dim, dim) of the models around the centres; zero without personal parts.
    centres : (n_groups, dim).
    models : (n_users, dim) the models that users get.
    values, gradients : (n_users,) and (n_users, dim) of the loss of each user's centre.
    """

    labels: Ints
    covariance: Array
    centres: Array
    models: Array
    values: Array
    gradients: Array


def fit_summaries(source: FitSource, units: Units, settings: Settings, work: Work) -> Fit:
    """Find groups and models.

    Parameters
    ----------
    source : who answers.
    units : of the users' numbers.
    settings : of the fit.
    work : where progress is reported.

    Returns
    -------
    The fit, certified and, where rows are held out, scored.
    """
    # 1. Summaries, and the ridge that they ask for.
    work.show("summaries of the users")
    summaries = summarise(source)
    units = with_learned_ridge(units, summaries[-1])
    source.use(units)
    # 2. Groups, and the kind of models; the same kind without the held-out rows, to be scored.
    work.show("searching for groups")
    options = SearchOptions(max_groups=settings.max_groups, k=settings.k)
    summaries, found = search_parts(source, summaries, options)
    work.show("comparing kinds of models")
    part, judged = _choose(summaries[0], found[0], settings), None
    if len(summaries) > 1:
        judged = _choose(summaries[1], found[1], settings, part.sharing)
    parts = [part] if judged is None else [part, judged]
    # 3. Centres of what users share, and one model for all.
    work.show("centres of the groups")
    shared, pooled = _find_all(source, parts, settings)
    # 4. The convex problem, its solution, and the path that leads there.
    solution, path, chosen, why = _solve(source, part, shared[0], settings, work)
    # 5. Certificate and scores.
    work.show("certificate and scores")
    tested = None if judged is None else Judged(shared[1].models, pooled[1].models,
                                                judged.sharing.n_groups)
    solution, scores = source.finish(solution, shared[0].models, tested, settings.tol)
    compared = part.compared
    means = {} if compared is None else compared.means
    why = f"{sentence_of(part.sharing.kind, means)} {why}"
    stability = None
    if part.sharing.labels.any():
        drawn = draw_groups(part.known, part.sharing, settings)
        stability = summarise_draws(drawn, part.sharing,
                                    None if judged is None else judged.sharing.labels)
        why = f"{why} {stability}" if stability.stable else f"{stability} {why}"
    return Fit(settings=settings, units=units, solution=solution, path=path, chosen=chosen,
               together=pooled[0].centres[0], why=why, scores=scores, compared=means,
               compared_errors={} if compared is None else compared.errors, stability=stability,
               sent=SentModels(shared[0].centres, shared[0].models))


def with_learned_ridge(units: Units, known: Summaries) -> Units:
    """The units with the ridge on slopes that is the prior of the centre's: s / (g rows), at least
    the one given. The intercept's ridge stays.
    """
    assert known.one is not None
    ridge = known.noise / (known.one.prior * max(float(known.sizes.sum()), 1.0))
    loss = units.loss
    if not isinstance(loss, AffineLoss) or not ridge > loss.ridge:
        return units
    share = loss.ridge / ridge
    return replace(units, loss=replace(loss, ridge=ridge, penalize_intercept=share))


def _choose(known: Summaries, found: SearchResult, settings: Settings,
            like: Sharing | None = None) -> Part:
    """The kind of models; that of `like` if these users have it, with as many groups."""
    labels = found.best.labels
    if like is not None:
        sharing = sharing_of(like.kind, known, labels, settings.count)
        if (sharing.kind, sharing.n_groups) == (like.kind, like.n_groups):
            return Part(known, found, sharing)
    compared = choose(known, labels, settings)
    return Part(known, found, compared.sharing, compared)


def _find_all(source: FitSource, parts: list[Part],
              settings: Settings) -> tuple[list[Centres], list[Centres]]:
    """Of every part, the centres of what users share, and one centre: around it the models have the
    covariance of the kind with all rows, and none in the models to compare with.
    """
    wanted = []
    for k, part in enumerate(parts):
        everyone = np.zeros(len(part.sharing.labels), dtype=np.int64)
        own = part.sharing.covariance
        wanted.append([(part.sharing.labels, own), (everyone, own if k == 0 else None)])
    found = find_centres(source, parts, wanted, settings)
    return [each[0] for each in found], [each[1] for each in found]


def find_centres(source: FitSource, parts: list[Part],
                 wanted: list[list[tuple[Ints, Array | None]]],
                 settings: Settings) -> list[list[Centres]]:
    """The centres of several partitions, each with a covariance of the personal part or None, of
    all parts in the same rounds.

    Users send slopes only; they update the sums of the curvatures known from summaries (BFGS).
    """
    covariances = [[np.zeros((source.dim,) * 2) if T is None else T for _, T in each]
                   for each in wanted]
    refined = [[_begin(source.loss, part.known, labels, T, settings)
                for (labels, _), T in zip(each, own, strict=True)]
               for part, each, own in zip(parts, wanted, covariances, strict=True)]
    best: list[list[Expanded | None]] = [[None] * len(each) for each in refined]
    for _ in range(_STEPS):
        asked = [Around(np.stack([one.trial[one.labels] for one in each], axis=1), np.stack(own))
                 for each, own in zip(refined, covariances, strict=True)]
        left = 0.0
        for each, answers, at, known in zip(refined, source.around(asked), asked, best,
                                            strict=True):
            for k, one in enumerate(each):
                new = Expanded(*(field[:, k] for field in answers))
                one.take(new.values, new.gradients)
                here = (one.models[one.labels] == at.centres[:, k]).all(axis=1)
                known[k] = _merged(known[k], new, here)
                first = k == 0 and each is refined[0]
                left = max(left, one.excess / (_SHARE * settings.tol if first else _ROUGH))
        if left <= 1.0:
            break
    return [[Centres(one.labels, T, one.models, answers.models, answers.values, answers.gradients)
             for one, T, answers in zip(each, own, known, strict=True) if answers is not None]
            for each, own, known in zip(refined, covariances, best, strict=True)]


def _merged(old: Expanded | None, new: Expanded, here: Array) -> Expanded:
    """The answers at the best centres so far."""
    if old is None:
        return new
    return Expanded(*(np.where(here.reshape(-1, *(1,) * (a.ndim - 1)), a, b)
                      for a, b in zip(new, old, strict=True)))


def _begin(loss: Loss, known: Summaries, labels: Ints, covariance: Array,
           settings: Settings) -> Refining:
    """The centres of groups by the summaries, to be refined by users' slopes."""
    rows = known.sizes.astype(float)
    counted = rows if settings.count == "rows" else np.full(len(rows), rows.mean())
    expansions = known.expansions.scaled(known.noise)
    if covariance.any():
        expansions = expansions.marginal(covariance)[0]
    share = counted / np.maximum(rows, 1.0)
    sums = replace(expansions, slopes=share[:, None] * expansions.slopes,
                   curvatures=share[:, None, None] * expansions.curvatures).sums(labels)
    held = sums.curvatures + known.noise * np.diag(known.prior)
    start = np.asarray(np.linalg.solve(held, sums.slopes[..., None])[..., 0])
    return Refining(labels, counted, start, held)


def outer_loss(loss: Loss, sharing: Sharing, sizes: Ints, unit: float | None) -> Loss:
    """The loss of centres in the convex problem: of personal models where there are any, and with
    `unit` every row counting alike.
    """
    counted = loss if unit is None else Weighted(loss=loss, unit=unit)
    if sharing.covariance is None:
        return counted
    scale = 1.0 / np.maximum(sizes, 1) if unit is None else 1.0 / unit
    return Personal(counted, covariance=sharing.covariance, scale=scale)


def _solve(source: FitSource, part: Part, shared: Centres, settings: Settings,
           work: Work) -> tuple[Solution, Path, int, str]:
    """The solution of the convex problem of what was chosen, and the path."""
    sharing, sizes = part.sharing, part.known.sizes
    unit = float(sizes.mean()) if settings.count == "rows" else None
    weights = np.ones(len(sizes)) if unit is None else sizes / unit
    users = Participants(source.users.names, source.users.feature_names, sizes)
    ridge = max(settings.ridge, 1e-3)
    # 1. The losses of centres to second order, where they are exact to first order.
    held = ridge_of(source.loss, Samples(users, source.dim))
    expansions = part.known.expansions.scaled(part.known.noise)
    expansions = replace(expansions, curvatures=expansions.curvatures
                         + sizes[:, None, None] * np.diag(held))
    if shared.covariance.any():
        expansions = expansions.marginal(shared.covariance)[0]
    curvatures = expansions.curvatures / np.maximum(sizes, 1)[:, None, None]
    near = Quadratic(point=shared.centres[shared.labels], value=weights * shared.values,
                     gradient=weights[:, None] * shared.gradients,
                     hessian=weights[:, None, None] * curvatures)
    local = LocalModels(near.prox(near.prepare(users), None, ridge, None).points,
                        curvatures + ridge * np.eye(source.dim), sizes)
    # 2. The path on them.
    sentence = sentence_about(part.found.best.labels, sharing, describe(part.found))
    plan = weighted_plan(users, near, local, sharing, settings, sentence)
    path = solve_plan(plan, settings, work)
    chosen, why = plan.choose(path)
    # 3. The exact problem: weights inside groups, duals by flows.
    inside = connect_inside(local, sharing.labels, settings.k)
    lam, duals = _prove(inside, near.gradient, sharing.labels)
    lam = max(lam, float(plan.lams[plan.chosen]))
    outer = Remote(loss=outer_loss(source.loss, sharing, sizes, unit), length=source.dim)
    with warnings.catch_warnings(action="ignore", category=CoterieWarning):
        problem = Problem(users, outer, lam, inside)
    unproved = Certificate(objective=np.nan, bound=-np.inf, stationarity=np.inf,
                           complementarity=np.inf, worst_user=0)
    solution = Solution(problem=problem, models=near.point, duals=duals, certificate=unproved,
                        status=Status.NO_BOUND, solver="summaries", seconds=0.0)
    return solution, path, chosen, why


def _prove(inside: Graph, gradients: Array, labels: Ints) -> tuple[float, Array]:
    """A lam, and duals inside groups that balance the gradients: (lam, (n_edges, dim))."""
    rest = gradients - group_means(gradients, labels)[labels]
    if not inside.n_edges:
        return 0.0, np.zeros((0, gradients.shape[1]))
    duals = inside.flow(-rest)
    return _ABOVE * float((np.linalg.norm(duals, axis=1) / inside.weights).max()), duals


def describe(found: SearchResult) -> str:
    """A sentence about a search."""
    best, n, many = found.best, len(found.best.labels), len(found.examined)
    if n == 1 or kind_of(best) == "one model":
        return one_group(n, many)
    if kind_of(best) == "one centre with spread":
        return (f"Users differ, but continuously: no groups stand out (none of {many} descriptions "
                f"of the {n} users is better than one centre with a spread of models).")
    one = min(p.length for p in found.examined if not p.labels.any())
    return (f"{best.n_groups} groups of {describe_sizes(best.labels)} users "
            f"{describe_better(one - best.length)}.")
