"""The fit of a federation whose losses are not squared: questions, about two dozen rounds of them.

1. Users describe their rows by counts, means and sums of squares: the units.
2. Groups are searched for among the rows that are not held out and among all rows
   (`coterie.groups.search`).
3. The kind of models is chosen by rows left out of those that are not held out
   (`coterie.fitting.kinds`).
4. Centres and the models around them are found with users' slopes: the Hessians that users sent for
   the search are summed by group, and the sums updated (BFGS). Hessians at many points would give
   rows away (`coterie.federated.private`).
5. Weights, path and the chosen lam follow from second-order models there; steps with these, updated
   by slopes, lead to a solution of the convex problem, which users certify.

A path point other than the chosen one is solved and certified for the second-order models only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from coterie.base.errors import InvalidInput
from coterie.base.labels import one_group
from coterie.base.types import Array, Ints
from coterie.data.users import Moments, Participants
from coterie.federated import plausible
from coterie.federated.agreement import Agreement
from coterie.federated.oracle import AskingOracle
from coterie.federated.session import Session
from coterie.federated.together import Together
from coterie.fitting.estimate import Fit
from coterie.fitting.kinds import (
    Comparison,
    Sharing,
    candidates,
    choose_by_asking,
    refining_centres,
    sentence_of,
    sharing_of,
)
from coterie.fitting.oracle import Expanded
from coterie.fitting.path import solve_plan
from coterie.fitting.plan import PathPlan, sentence_about, weighted_plan
from coterie.fitting.result import SentModels
from coterie.fitting.scores import METRICS, JudgedModels, Scores
from coterie.fitting.settings import Settings
from coterie.fitting.stability import stability_by_asking
from coterie.fitting.units import LARGEST_COUNT, Units, UserStatistics
from coterie.fitting.work import Work
from coterie.groups.find import describe_better, describe_sizes
from coterie.groups.refining import Refining, updated
from coterie.groups.search import (
    SearchOptions,
    SearchResult,
    kind_of,
    near_groups,
    search_by_asking,
)
from coterie.groups.spread import Expansions
from coterie.losses import Loss, Personal, Poisson
from coterie.losses.derived import Quadratic, Remote
from coterie.problem.problem import Problem
from coterie.problem.solution import Solution
from coterie.problem.weights import LocalModels
from coterie.solvers import solve

_OWN = 1e-12  # pull of models that are users' own
_NEWTON, _SETTLED = 40, 1e-8  # largest number of steps to the centres, relative length of the last
_STEPS = 20  # largest number of steps to the solution at the chosen lam


class Facts(NamedTuple):
    """What users say of their rows."""

    units: Units
    train_units: Units | None  # of the rows that are not held out
    sizes: list[Ints]  # of all rows, and of those that are not held out
    target_means: list[float]  # as the loss sees targets


def describe(asker: Session, agreement: Agreement, settings: Settings) -> Facts:
    """Ask for counts, means and sums of squares, from which the units follow."""
    replies = asker.ask("facts", 0).arrays
    counts, means, m2, target = (replies[name] for name in ("count", "means", "m2", "target"))
    if means.shape[2:] != (len(agreement.features),) or target.shape[2:] != (3,):
        raise InvalidInput("users describe other columns than agreed", remedy="Start the run again")
    units, sizes, target_means = list[Units](), list[Ints](), list[float]()
    for k in range(counts.shape[1]):
        asker.refuse(plausible.wrong_moments(counts[:, k], means[:, k], m2[:, k], target[:, k]))
        asker.refuse(plausible.wrong_targets(settings.task, target[:, k, 2], target[:, k, 0],
                                             settings.n_classes,
                                             LARGEST_COUNT))
        asker.refuse(plausible.outlying(counts[:, k], means[:, k], m2[:, k]))
        rows = counts[:, k].astype(np.int64)
        features = plausible.without_dominant(Moments(rows, means[:, k], m2[:, k]))
        statistics = UserStatistics(agreement.features, features,
                                    Moments(rows, target[:, k, :1], target[:, k, 1:2]),
                                    target[:, k, 2])
        units.append(Units.from_moments(statistics, settings.task, loss=settings.loss,
                                        ridge=settings.ridge,
                                        n_classes=settings.n_classes,
                                        standardize=settings.standardize))
        mean = float(rows @ target[:, k, 0] / rows.sum())
        sizes.append(rows)
        target_means.append(mean if isinstance(units[0].loss, Poisson) else 2.0 * mean - 1.0)
    return Facts(units[0], units[1] if len(units) > 1 else None, sizes, target_means)


@dataclass(frozen=True, eq=False)
class Part:
    """A fit to all rows, or to those that are not held out.

    Parameters
    ----------
    users : their names.
    oracle : answers from these rows.
    found : the search.
    sharing : what users share.
    compared : the kinds that were compared, if they were.
    """

    users: Participants
    oracle: AskingOracle
    found: SearchResult
    sharing: Sharing
    compared: Comparison | None = None

    @property
    def labels(self) -> Ints:
        """The groups that the search found."""
        return self.found.best.labels


class Centres(NamedTuple):
    """The centres of groups, and what users say of them."""

    centres: Array  # (n_groups, dim)
    models: Array  # (n_users, dim) the models that users get
    near: Quadratic  # the loss of every user's centre to second order


def search_part(users: Participants, oracle: AskingOracle, settings: Settings) -> SearchResult:
    """The search; and what the kinds of models need to know, so that it is asked in the same rounds
    for both parts.
    """
    found = search_by_asking(users, oracle, SearchOptions(max_groups=settings.max_groups,
                                                          k=settings.k))
    candidates(users, oracle.loss, found.best.labels, settings.count, oracle)
    return found


def choose_part(users: Participants, oracle: AskingOracle, found: SearchResult, settings: Settings,
                like: Sharing | None = None) -> Part:
    """The kind of models; that of `like` if these users have it, with as many groups."""
    labels = found.best.labels
    if like is not None:
        sharing = sharing_of(like.kind, users, oracle.loss, labels, settings.count, oracle)
        if (sharing.kind, sharing.n_groups) == (like.kind, like.n_groups):
            return Part(users, oracle, found, sharing)
    compared = choose_by_asking(users, oracle, labels, settings)
    return Part(users, oracle, found, compared.sharing, compared)


def find_centres(part: Part, wanted: list[tuple[Ints, Array | None]], settings: Settings) -> list[
    Centres]:
    """The centres of several partitions, each with a covariance of the personal part or None, in
    the same rounds.

    Only slopes are asked for; they update the sums of the Hessians that are known from the search.
    """
    oracle, users, rows = part.oracle, part.users, part.oracle.sizes.astype(float)
    weights = rows if settings.count == "rows" else np.ones(users.n_users)
    none, refined = np.zeros((oracle.dim, oracle.dim)), list[Refining]()
    covariances = np.stack([none if covariance is None else covariance for _, covariance in wanted])
    for labels, covariance in wanted:
        start = oracle.known.get(("models", labels.tobytes())) if covariance is None else None
        refined.append(refining_centres(users, oracle, labels, covariance, weights, start))
    kept: Expanded | None = None
    for _ in range(_NEWTON):
        at = np.stack([one.trial[one.labels] for one in refined], axis=1)
        answers = oracle.expand(at, covariances, 1)
        for k, one in enumerate(refined):
            one.take(answers.values[:, k], answers.gradients[:, k])
        best = np.stack([(one.models[one.labels] == at[:, k]).all(axis=1) for k,
                         one in enumerate(refined)], axis=1)
        kept = answers if kept is None else Expanded(*(
            np.where(best.reshape(*best.shape, *(1,) * (new.ndim - 2)), new, old)
            for new, old in zip(answers, kept, strict=True)))
        if all(float(np.abs(one.trial - one.models).max()) <= _SETTLED
               * (1.0 + float(np.abs(one.models).max()))
               for one in refined):
            break
    assert kept is not None
    return [Centres(one.models, kept.models[:, k], Quadratic(
        point=one.models[one.labels], value=kept.values[:, k], gradient=kept.gradients[:, k],
        hessian=outer_hessians(part, *wanted[k]))) for k, one in enumerate(refined)]


def outer_hessians(part: Part, labels: Ints, covariance: Array | None) -> Array:
    """(n_users, dim, dim) of the losses of centres, from what users have said near these groups in
    the search.
    """
    near, sizes = near_groups(part.users, part.oracle, labels), part.oracle.sizes.astype(float)
    if covariance is None:
        return near.hessian
    expansions = Expansions.at(near, near.prepare(part.users), sizes, near.point).marginal(
        covariance)[0]
    return expansions.curvatures / sizes[:, None, None]


def own_models(part: Part) -> Quadratic:
    """Every user's model from its own rows, and its loss there to second order."""
    return part.oracle.settle(np.zeros((part.users.n_users, part.oracle.dim)), _OWN).model


def shared_centres(part: Part, settings: Settings, pooled: Array | None) -> tuple[Centres, Centres]:
    """The centres of what users share, and one centre for all, with the covariance `pooled` around
    it if any.
    """
    everyone, sharing = np.zeros(part.users.n_users, dtype=np.int64), part.sharing
    if sharing.kind == "alone":
        own = own_models(part)
        return Centres(own.point, own.point, own), find_centres(part, [(everyone, pooled)],
            settings)[0]
    if not sharing.labels.any() and pooled is sharing.covariance:
        one = find_centres(part, [(everyone, pooled)], settings)[0]
        return one, one
    shared, together = find_centres(part, [(sharing.labels, sharing.covariance),
                                           (everyone, pooled)], settings)
    return shared, together


def planned(part: Part, near: Quadratic, settings: Settings) -> PathPlan:
    """Weights and lams, by second-order models of the losses of the centres."""
    samples, ridge = near.prepare(part.users), max(settings.ridge, 1e-3)
    models = near.prox(samples, None, ridge, None).points
    local = LocalModels(models, near.hessian + ridge * np.eye(samples.dim), part.oracle.sizes)
    plan = weighted_plan(part.users, near, local, part.sharing, settings,
                         sentence_about(part.labels, part.sharing, _describe(part)))
    if part.compared is None:
        return plan
    return replace(plan, means=part.compared.means, errors=part.compared.errors)


def _describe(part: Part) -> str:
    """A sentence about the search."""
    best, n, many = part.found.best, part.users.n_users, len(part.found.examined)
    if n == 1 or kind_of(best) == "one model":
        return one_group(n, many)
    if kind_of(best) == "one centre with spread":
        return (f"Users differ, but continuously: no groups stand out (none of {many} descriptions "
                f"of the {n} users is "
                "better than one centre with a spread of models).")
    one = min(p.length for p in part.found.examined if not p.labels.any())
    return (f"{best.n_groups} groups of {describe_sizes(best.labels)} users "
            f"{describe_better(one - best.length)}.")


def solve_by_asking(part: Part, plan: PathPlan, start: Solution, hessian: Array,
                    tol: float) -> Solution:
    """The solution of the convex problem at the lam of `start`: steps with the Hessians given,
    updated by slopes.
    """
    covariance = np.zeros((part.oracle.dim,) * 2) if part.sharing.covariance is None \
        else part.sharing.covariance
    solution, before, hessian = start, None, hessian.copy()
    for _ in range(_STEPS):
        answers = part.oracle.expand(solution.models[:, None], covariance[None], 1)
        gradient = answers.gradients[:, 0]
        if before is not None:
            updated(hessian, solution.models - before.point, gradient - before.gradient)
        near = before = Quadratic(point=solution.models, value=answers.values[:, 0],
                                  gradient=gradient, hessian=hessian)
        solution = solve(Problem(part.users, near, start.lam, plan.problem.graph), tol=1e-3 * tol,
                         start=solution)
        steps = solution.models - near.point
        # By which the step lowers the objective.
        gain = 0.5 * float(np.einsum("nd,nde,ne->", steps, hessian, steps))
        if gain <= 1e-3 * tol * abs(solution.objective):
            break
    return solution


def remote_solution(part: Part, solution: Solution) -> Solution:
    """The same solution of the problem whose losses are with their users."""
    loss: Loss = part.oracle.loss
    if part.sharing.covariance is not None:
        loss = Personal(loss, covariance=part.sharing.covariance, scale=1.0 / part.oracle.sizes)
    problem = Problem(part.users, Remote(loss=loss, length=part.oracle.dim), solution.lam,
                      solution.problem.graph)
    return replace(solution, problem=problem)


def fit_parts(facts: Facts, everyone: Participants, asker: Session, settings: Settings) -> Fit:
    """The fit, not certified by the users and not scored yet."""
    users, together = Participants(everyone.names, everyone.feature_names, facts.sizes[0]), \
        Together(asker)
    units = [facts.units] if facts.train_units is None else [facts.units, facts.train_units]
    oracles = [AskingOracle(together, users, one.loss, k, facts.sizes[k], facts.target_means[k])
               for k, one in enumerate(units)]
    found = together.run(*(partial(search_part, users, oracle, settings) for oracle in oracles))
    trained = choose_part(users, oracles[1], found[1], settings) if len(units) > 1 else None
    part = choose_part(users, oracles[0], found[0], settings,
                       None if trained is None else trained.sharing)
    if trained is not None and trained.sharing.kind != part.sharing.kind:
        # It does not exist with all rows: score the kind that does.
        trained = choose_part(users, oracles[1], found[1], settings, part.sharing)
    jobs: list[Callable[[], Any]] = [partial(shared_centres, part, settings,
                                             part.sharing.covariance)]
    if trained is not None:
        jobs.append(partial(_to_judge, trained, units[1], settings,
                            int(facts.sizes[0].sum() - facts.sizes[1].sum())))
    (shared, pooled), *judged = together.run(*jobs)
    return _finished(facts.units, part, trained, (shared, pooled), judged[0] if judged else None,
                     settings)


def _finished(units: Units, part: Part, trained: Part | None, centres: tuple[Centres, Centres],
              judged: Scores | None,
              settings: Settings) -> Fit:
    """Weights, path, stability and the solution of the convex problem."""
    shared, pooled = centres
    plan = planned(part, shared.near, settings)
    path = solve_plan(plan, settings, Work())
    index, why = plan.choose(path)
    compared = trained.compared if trained is not None and trained.compared is not None \
        else part.compared
    means = {} if compared is None else compared.means
    why = f"{sentence_of(part.sharing.kind, means)} {why}"
    stability = None
    if part.sharing.labels.any() and part.sharing.kind != "alone":
        other = None if trained is None or not trained.sharing.labels.any() else PathPlan(
            plan.problem, plan.lams, 0, "", trained.sharing.labels)
        stability = stability_by_asking(part.oracle, shared.centres, part.sharing, settings, other)
        why = f"{why} {stability}" if stability.stable else f"{stability} {why}"
    solution = remote_solution(part, solve_by_asking(part, plan, path[index], shared.near.hessian,
                                                     settings.tol))
    return Fit(settings=settings, units=units, solution=solution, path=path, chosen=index,
               together=pooled.centres[0], why=why, scores=judged, compared=means,
               compared_errors={} if compared is None else compared.errors,
               stability=stability, sent=SentModels(shared.centres, shared.models))


def _to_judge(trained: Part, units: Units, settings: Settings, n_rows: int) -> Scores:
    """The models that held-out rows judge; users score them."""
    users = trained.users
    shared, pooled = shared_centres(trained, settings, None)
    unknown = np.full(users.n_users, np.nan)
    labels = trained.sharing.labels
    return Scores(metric=METRICS[settings.task], larger=settings.task == "classification",
                  fitted=unknown,
                  alone=unknown, together=unknown, points=unknown[None], losses=np.full(1, np.nan),
                  chosen=0,
                  n_clusters=int(labels.max()) + 1, n_rows=n_rows,
                  judged=JudgedModels(units, shared.models, trained.oracle.alone(_OWN)[0],
                                      pooled.models))

