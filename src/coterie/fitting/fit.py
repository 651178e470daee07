"""One fit, from users to groups and models with all choices made: what `coterie fit`, federations
and the estimators do.

    describe -> summarise -> propose -> judge -> finish -> certify and score

    fitted = fit(users, Settings(task="classification"))      # fitted.solution, fitted.path,
                                                              fitted.scores
    fitted.predict(new_users)
    fitted.save("run")                                        # coterie.load_run("run") reads it

1. *Describe.* Targets that are absurdly far from all others are left out, with a warning. Features
   are standardised, and an intercept is added (`coterie.fitting.units`).
2. *Summarise.* The level, slope and curvature of each user's loss at one point decide everything
   (`coterie.groups.summaries`). With squared losses they are exact.
3. *Propose.* One convex path on the summaries, on weights that know nothing of groups, proposes
   partitions, which merges and moves improve (`coterie.groups.search`).
4. *Judge.* Partitions and kinds of models are compared on the summaries (`coterie.fitting.judge`).
5. *Finish.* The centres of what was chosen, and the models around them, are found exactly by the
   users' slopes. They are the solution of the convex problem with weights inside the groups and
   none between.
6. *Average.* Several kinds of models, also with curves, are averaged, if that predicts rows left
   out better (`coterie.fitting.averaging`).
7. *Certify and score.* Users certify these models with their own rows, and their held-out rows
   score the models of a fit that has not seen them.

Where rows are is the business of a source (`coterie.fitting.sources`): a table, users elsewhere, or
what they have released. Where lam or the weights are given, and for points with one row each, the
convex problem is that of the user: `coterie.fitting.given`.
"""

from __future__ import annotations

import time
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np

from coterie.base.errors import CoterieWarning, Interrupted, InvalidInput
from coterie.base.labels import group_means
from coterie.base.machine import one_blas_thread, require_memory
from coterie.base.types import Array, Ints
from coterie.convex.choice import adjusted_rand
from coterie.convex.consensus import find_consensus
from coterie.convex.path import Path, solve_path
from coterie.data.users import Participants, Split, Users
from coterie.fitting.average import Average
from coterie.fitting.averaging import Declined, find_average, possible
from coterie.fitting.given import check_lam_can_be_chosen, fit_given
from coterie.fitting.inference import draw_groups, draw_wide_groups, summarise_draws
from coterie.fitting.judge import ChooseParts, Chosen, judge_summaries, judge_wide
from coterie.fitting.kinds import Sharing, sentence_of, stated_loss, wide_models
from coterie.fitting.prepare import without_far_targets
from coterie.fitting.result import Fit
from coterie.fitting.settings import FinishedParts, FitProgress, Settings, Work
from coterie.fitting.sources import Around, FitSource, Judged, RowsFitSource
from coterie.fitting.units import Units, learn_units
from coterie.groups.search import SearchOptions, propose, whole_problem
from coterie.groups.spread import solve_damped
from coterie.groups.summaries import Summaries, ridge_of
from coterie.groups.wide import CentredModels
from coterie.losses import Samples
from coterie.losses.derived import Remote
from coterie.losses.newton import Refining
from coterie.losses.rows import too_wide
from coterie.problem.graph import Graph
from coterie.problem.problem import Problem
from coterie.problem.solution import Certificate, Solution, Status
from coterie.problem.weights import LocalModels, adaptive_graph
from coterie.solvers import solve_quietly
from coterie.solvers.base import Point

_HESSIANS = 4  # sets of Hessians that a fit has at the same time, at least
_ABOVE = 1.25  # the weights inside groups, over the least ones at which flows prove the groups
# Steps to the centres, and to models that are not certified; by how much of itself the objective
# may exceed its least value: a share of the tolerance, for the model that unknown users get, and
# for models that only are compared.
_STEPS, _FEW_STEPS, _SHARE, _POOLED, _ROUGH = 20, 5, 0.2, 1e-5, 1e-3
# Points of the path of many users, and of very many; numbers in all models that make them so; gap.
_POINTS, _FEW_POINTS, _NUMBERS, _DRAWN = 8, 3, 200_000, 1e-3


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
    points = settings.task == "clustering" and int(users.sizes.max()) == 1
    with_scores = settings.holdout > 0 and settings.task != "clustering"
    check_lam_can_be_chosen(settings, settings.task == "clustering" or with_scores
                            or users.n_users == 1)
    work = Work(progress or (lambda *_: None), {} if store is None else store)
    # 1. Describe.
    users, concerns = without_far_targets(users, settings) if split is None else (users, [])
    units = learn_units(users, settings)
    inner = units.inner(users)
    for concern in concerns + units.loss.concerns(inner):
        warnings.warn(concern, CoterieWarning, stacklevel=2)
    samples = units.loss.prepare(inner)  # kept to the end, so that it is prepared once
    wide = too_wide(units.loss, samples)
    if not wide:
        require_memory(8.0 * _HESSIANS * inner.n_users * samples.dim**2,
                       f"the Hessians of {inner.n_users} users with {samples.dim} coordinates",
                       "Use fewer columns, for example their principal components, or fewer users "
                       "at a time")
    if with_scores and split is None:
        split = users.hold_out(settings.holdout, stratify=settings.task == "classification",
                               seed=settings.seed)
    split = split if with_scores and split is not None and _can_score(split, settings) else None
    # 2. to 7., or the convex problem as given.
    given = settings.lam != "auto" or settings.weights != "auto" or points or users.n_users == 1
    try:
        with nullcontext() if wide else one_blas_thread():  # wide models need large products
            if given:
                fitted = fit_given(inner, units, settings, split, work)
            else:
                source = RowsFitSource(units, users)
                if split is not None:
                    kept = learn_units(split.train, settings, units.n_classes)
                    source = RowsFitSource(units, users, split.train, split.test, kept)
                fitted = fit_source(source, settings, work,
                                    judge_wide if wide else judge_summaries)
    except KeyboardInterrupt as stop:
        raise Interrupted from stop
    except np.linalg.LinAlgError as error:
        raise InvalidInput("the numbers are too large, or of too different sizes, to compute with",
                           remedy="Standardise the columns, and leave out values that are no "
                           "measurements") from error
    return replace(fitted, why=" ".join([*concerns, fitted.why]),
                   seconds=time.perf_counter() - began)


def _can_score(split: Split, settings: Settings) -> bool:
    """Whether there are rows to score with, and classes to fit without them."""
    classes = settings.task == "classification"
    assert split.train.targets is not None
    return bool((split.test.counts > 0).any()
                and not (classes and len(np.unique(split.train.targets)) < 2))


def fit_source(source: FitSource, settings: Settings, work: Work,
               judge: ChooseParts = judge_summaries) -> Fit:
    """The fit of users wherever their rows are: steps 2 to 7 of the module's text.

    Parameters
    ----------
    source : who answers.
    settings : of the fit.
    work : where progress is reported and finished parts are kept.
    judge : chooses groups and kinds of models.

    Returns
    -------
    The fit, certified and, where rows are held out, scored.
    """
    # 2. to 4. Summaries, groups, and the kind of models; all of it without the held-out rows, too.
    choices = judge(source, settings, work)
    choice = choices[0]
    sharing = choice.sharing
    known = choices[-1].known  # nothing is learned from held-out rows
    if known is not None and known.one is not None:
        source.use(with_learned_ridge(source.units, known, choices[-1].sharing))
    # 5. Centres of what users share, one model for all, and the problem that they solve.
    work.show("centres of the groups")
    shared, pooled = _find_all(source, choices, settings)
    path, index, lam = _path(choice, settings, work), 0, 1.0
    if path is not None:
        path, index = _thinned(path, _point_of(path, sharing.labels), settings.n_lams)
        lam = path[index].lam
    solution = _state_problem(source, choice, shared[0], lam, settings)
    # 6. An average, where it is better; and without the held-out rows.
    averages, declined = _find_averages(source, choices, settings, work)
    # 7. Certificate and scores.
    work.show("certificate and scores")
    tested = None if len(choices) == 1 else Judged(
        shared[1].models, pooled[1].models, choices[1].sharing.n_groups, averages[1])
    solution, scores = source.finish(solution, shared[0].models, tested, settings.tol)
    if path is None:
        path = Path(problem=solution.problem, solutions=(solution,), tol=settings.tol)
    why = choice.sentence
    if settings.task != "clustering":
        kind = "alone" if sharing.n_groups == len(sharing.labels) > 1 else sharing.kind
        why = f"{sentence_of(kind, choice.means)} {why}"
    average = averages[0]
    if average is not None and average.used:
        why = f"{average.sentence(sharing.kind)} {why}"
    why += declined
    stability = None
    if 1 < sharing.n_groups < len(sharing.labels) and sharing.kind != "alone":
        work.show("stability of the groups")
        drawn = draw_wide_groups(source.loss, source.parts[0], shared[0].centres, settings) \
            if choice.known is None else draw_groups(choice.known, sharing, settings)
        stability = summarise_draws(drawn, sharing, None if len(choices) == 1
                                    else choices[1].sharing.labels)
        why = f"{why} {stability}" if stability.stable else f"{stability} {why}"
    return Fit(settings=settings, units=source.units, solution=solution, path=path, chosen=index,
               together=pooled[0].centres[0], why=why, scores=scores, compared=choice.means,
               compared_errors=choice.errors, stability=stability,
               sent=CentredModels(shared[0].centres, shared[0].models), average=average)


def _find_averages(source: FitSource, choices: list[Chosen], settings: Settings,
                   work: Work) -> tuple[tuple[Average | None, Average | None], str]:
    """What predicts, from all rows, and from those that are not held out: made anew, so that scores
    are those of the models that predict. Users need not answer; then a sentence says who does not.
    """
    found: list[Average | None] = [None, None]
    if choices[0].known is None or not possible(settings, source.units, source.sizes[0]):
        return (None, None), ""
    work.show("average of kinds of models")
    try:
        for k, choice in enumerate(choices):
            found[k] = find_average(source, k, choice.sharing, settings)
            first = found[0]
            if first is None or not first.used:
                break
    except Declined as error:  # without scores of its own there is none
        return (None, None), f" There is no average of kinds of models: {error}."
    except np.linalg.LinAlgError:  # the kind needs none of these models
        return (None, None), ""
    return (found[0], found[1]), ""


def with_learned_ridge(units: Units, known: Summaries, sharing: Sharing) -> Units:
    """The units with the ridge on slopes that is the prior of the centres: s K / (v rows) for K
    groups whose centres have variance v, at least the one given. The intercept's ridge stays.
    """
    assert known.one is not None
    groups, free = sharing.n_groups, ~known.intercepts
    variance = known.one.prior
    if groups > 1 and free.any():
        variance += float(np.diag(known.one.covariance)[free].mean())
    ridge = known.noise * groups / (variance * max(float(known.sizes.sum()), 1.0))
    loss = units.loss
    if not loss.affine or not ridge > loss.ridge:
        return units
    return replace(units, loss=loss.with_ridge(ridge, loss.ridge / ridge))


# -- centres


@dataclass(frozen=True, eq=False)
class Centres:
    """Centres of groups, and what users say of them.

    Parameters
    ----------
    labels : (n_users,) the groups.
    centres : (n_groups, dim).
    models : (n_users, dim) the models that users get.
    values, gradients : (n_users,) and (n_users, dim) of the loss of each user's centre.
    """

    labels: Ints
    centres: Array
    models: Array
    values: Array
    gradients: Array


def _find_all(source: FitSource, choices: list[Chosen],
              settings: Settings) -> tuple[list[Centres], list[Centres]]:
    """Of every part, the centres of what users share, and one centre: around it the models have the
    covariance of the kind with all rows, and none in the models to compare with.
    """
    wanted = []
    for k, choice in enumerate(choices):
        shared = choice.sharing
        together = Sharing("one model", np.zeros_like(shared.labels),
                           shared.covariance if k == 0 else None, settings.count,
                           noise=shared.noise if k == 0 else None)
        same = not shared.labels.any() and shared.covariance is together.covariance
        wanted.append([shared] if same else [shared, together])
    if choices[0].known is None:
        found = [[_find_wide(source, k, sharing, settings) for sharing in each]
                 for k, each in enumerate(wanted)]
    else:
        found = find_centres(source, choices, wanted, settings)
    return [each[0] for each in found], [each[-1] for each in found]


def find_centres(source: FitSource, choices: list[Chosen], wanted: list[list[Sharing]],
                 settings: Settings) -> list[list[Centres]]:
    """The centres of several kinds of sharing, of all parts in the same rounds.

    Users send slopes only; they update the sums of the curvatures known from summaries (BFGS).
    """
    zero = np.zeros((source.dim, source.dim))
    searches = [[_Search(_begin(source, choice.known, sharing), sharing,
                         zero if sharing.covariance is None else sharing.covariance,
                         _ROUGH if part else (_POOLED if k else _SHARE * settings.tol),
                         _FEW_STEPS if part or k else _STEPS)
                 for k, sharing in enumerate(each)]
                for part, (choice, each) in enumerate(zip(choices, wanted, strict=True))]
    for _ in range(_STEPS):
        # What has settled stays: how long others take must not change it.
        open_parts = [k for k, each in enumerate(searches) if not all(o.settled for o in each)]
        if not open_parts:
            break
        asked = [[one for one in each if not one.settled] or each[:1]
                 for each in searches[:open_parts[-1] + 1]]
        answers = source.around([Around(
            np.stack([one.refined.trial[one.refined.labels] for one in each], axis=1),
            np.stack([one.covariance for one in each]),
            tuple(one.sharing.noise for one in each)) for each in asked])
        for each, answer in zip(asked, answers, strict=True):
            for k, one in enumerate(each):
                if not one.settled:
                    one.take(answer.values[:, k], answer.gradients[:, k])
    return [[one.centres(sizes) for one in each]
            for each, sizes in zip(searches, source.sizes, strict=True)]


@dataclass(eq=False)
class _Search:
    """The search for the centres of one kind of sharing in one part of the rows."""

    refined: Refining
    sharing: Sharing
    covariance: Array
    enough: float  # excess of the objective at which it ends
    most: int  # steps
    values: Array | None = None  # (n_users,) at the best centres so far

    @property
    def settled(self) -> bool:
        """Whether the best centres are good enough."""
        return self.values is not None and (self.refined.excess <= self.enough or not self.most)

    def take(self, values: Array, gradients: Array) -> None:
        """Take the answers at the trial."""
        one, trial = self.refined, self.refined.trial
        one.take(values, gradients)
        self.most -= 1
        here = (one.models == trial).all(axis=1)[one.labels]
        self.values = values if self.values is None else np.where(here, values, self.values)

    def centres(self, sizes: Ints) -> Centres:
        """The centres; the slope of the envelope P (centre - model) gives the models around them.
        """
        one, centres = self.refined, self.refined.models[self.refined.labels]
        assert self.values is not None
        noise = 1.0 if self.sharing.noise is None else self.sharing.noise
        scale = noise / np.maximum(sizes, 1)  # P = scale T^-1
        models = centres - (one.gradients @ self.covariance) / np.reshape(scale, (-1, 1))
        return Centres(one.labels, one.models, models, self.values, one.gradients)


def _begin(source: FitSource, known: Summaries | None, sharing: Sharing) -> Refining:
    """The centres of groups by the summaries, to be refined by users' slopes."""
    assert known is not None
    rows = np.maximum(known.sizes.astype(float), 1e-300)
    certain = rows if sharing.noise is None else rows / sharing.noise
    counted = certain if sharing.count == "rows" else np.full(len(rows), rows.mean())
    plain = known.expansions.weighted(known.noise * certain / rows)
    ridge = ridge_of(source.loss, Samples(source.users, source.dim))
    expansions = replace(plain, curvatures=plain.curvatures
                         + certain[:, None, None] * np.diag(ridge))
    if sharing.covariance is not None:
        expansions = expansions.marginal(sharing.covariance)[0]
    sums = expansions.weighted(counted / certain).sums(sharing.labels)
    near = known.near.get(sharing.labels.tobytes()) if sharing.covariance is None else None
    return Refining(sharing.labels, counted, solve_damped(sums.curvatures, sums.slopes)
                    if near is None else near, sums.curvatures)


def _find_wide(source: FitSource, part: int, sharing: Sharing, settings: Settings) -> Centres:
    """The centres of wide models, by their rows."""
    users = source.parts[part]
    outer = sharing.loss(source.loss, users)
    samples = outer.prepare(users)
    found = wide_models(outer, samples, sharing.labels, settings.count)
    values, gradients, _ = outer.evaluate(samples, found.centres[sharing.labels], 1)
    return Centres(sharing.labels, found.centres, found.models, values, gradients)


# -- the path that proposed groups, and the problem that is solved


def _path(choice: Chosen, settings: Settings, work: Work) -> Path | None:
    """The path that proposed the groups, of all users; None for wide models.

    Many users are searched by a sample, and their path is drawn at few points.
    """
    known = choice.known
    if known is None:
        return None
    options = SearchOptions(max_groups=settings.max_groups, k=settings.k)
    path = choice.path or propose(known.users, known.loss, known.sizes, options)
    problem = path.problem
    if problem.n_users < known.users.n_users:
        problem = whole_problem(known.users, known.loss, known.sizes, options)[0]
        many = known.users.n_users * len(known.ridge) > _NUMBERS
        lams = np.geomspace(path.lams[0], path.lams[-1], _FEW_POINTS if many else _POINTS) \
            if path.lams[0] > 0 else [0.0]
        path = solve_path(problem, lams, tol=_DRAWN, progress=lambda s, _: work.show(
            "path", text=f"{s.n_clusters} groups"))
    return _to_the_end(path)


def _to_the_end(path: Path) -> Path:
    """The path with a last point at which the users that the graph connects share one model."""
    problem = path.problem
    if path[len(path) - 1].n_clusters == int(problem.graph.components.max()) + 1:
        return path
    bracket, centres, _ = find_consensus(problem, rtol=0.1)
    lam = max(1.001 * bracket.upper, float(np.nextafter(path.lams[-1], np.inf)))
    last = solve_quietly(problem.with_lam(lam), tol=path.tol, start=Point(centres))
    return replace(path, solutions=(*path.solutions, last.without_duals()))


def _point_of(path: Path, labels: Ints) -> int:
    """The point of a path with these groups, or with the most similar ones."""
    same = [k for k, s in enumerate(path.solutions) if np.array_equal(s.labels, labels)]
    if same:
        return same[len(same) // 2]
    if not labels.any():
        return len(path) - 1
    return int(np.argmax([adjusted_rand(s.labels, labels) for s in path.solutions]))


def _thinned(path: Path, index: int, most: int) -> tuple[Path, int]:
    """At most so many points, among them the first, the last and this one; and its new position."""
    if len(path) <= most:
        return path, index
    keep = np.unique(np.linspace(0, len(path) - 1, most).round().astype(int))
    keep[np.abs(keep - index).argmin()] = index
    return replace(path, solutions=tuple(path[k] for k in keep)), int(np.flatnonzero(
        keep == index)[0])


def _state_problem(source: FitSource, choice: Chosen, shared: Centres,
                   lam: float, settings: Settings) -> Solution:
    """The convex problem of what was chosen, solved by these centres: weights inside the groups and
    none between. The weights are equal, and such that flows prove the groups at this lam.
    """
    sharing, sizes = choice.sharing, source.sizes[0]
    unit: Array | float = float(np.maximum(sizes, 1).mean())
    unit = unit if sharing.noise is None else unit * sharing.noise
    by_rows = sharing.count == "rows"
    weights = sizes / unit if by_rows else np.ones(len(sizes))
    bare = Participants(source.users.names, source.users.feature_names, sizes)
    # 1. Edges inside the groups, and duals that balance the slopes there.
    alone = sharing.kind == "alone"
    inside = connect_inside(_local_models(choice, settings),
                            np.arange(len(sizes)) if alone else sharing.labels, settings.k)
    gradients = weights[:, None] * shared.gradients
    duals = inside.flow(-(gradients - group_means(gradients, sharing.labels)[sharing.labels]))
    # 2. Their weights.
    largest = float(np.linalg.norm(duals, axis=1).max(initial=0.0))
    lam = lam if lam > 0 else max(largest, 1e-300)
    graph = Graph.from_edges(len(sizes), inside.edges,
                             np.full(inside.n_edges, max(_ABOVE * largest / lam, 1e-300)))
    # 3. The losses of centres.
    price = (weights if by_rows else 1.0) / np.maximum(sizes, 1)
    loss = stated_loss(source.loss, unit if by_rows else None, sharing.covariance,
                       price if sharing.noise is None else price * sharing.noise)
    with warnings.catch_warnings(action="ignore", category=CoterieWarning):
        problem = Problem(bare, Remote(loss=loss, length=source.dim), lam, graph)
    unproved = Certificate(objective=np.nan, bound=-np.inf, stationarity=np.inf,
                           complementarity=np.inf, worst_user=0)
    return Solution(problem=problem, models=shared.centres[sharing.labels], duals=duals,
                    certificate=unproved, status=Status.NO_BOUND, solver="summaries", seconds=0.0)


def _local_models(choice: Chosen, settings: Settings) -> LocalModels:
    """Models of users that say who is near whom."""
    known = choice.known
    if known is None:
        assert choice.models is not None
        return LocalModels(choice.models, np.empty((len(choice.models), 0, 0)),
                           np.ones(len(choice.models), dtype=np.int64))
    ridge, samples = max(settings.ridge, 1e-3), known.samples
    with np.errstate(over="ignore"):
        models = known.loss.prox(samples, None, ridge, None).points
        hessians = known.loss.hessians(samples, models) + ridge * np.eye(samples.dim)
    return LocalModels(models, hessians, known.sizes)


def connect_inside(local: LocalModels, labels: Ints, k: int) -> Graph:
    """Edges of weight 1 from every user to the k nearest of its own group; all users of a group are
    connected.
    """
    pairs = [np.empty((0, 2), dtype=np.int64)]
    for c in range(int(labels.max()) + 1):
        members = np.flatnonzero(labels == c)
        if len(members) > 1:
            own = LocalModels(local.models[members], local.hessians[members], local.counts[members])
            kind = "wald" if local.hessians.size else "gaussian"
            pairs.append(members[adaptive_graph(own, kind, min(k, len(members) - 1)).edges])
    return Graph.from_edges(len(labels), np.concatenate(pairs))
