"""What a fit solves: the problem with its weights, and the values of lam of its path.

The weights "auto" are made in two stages, as in the adaptive lasso (Zou 2006). `find_groups` finds
groups. Then users of one group are connected to their nearest users (by Wald distance) of the same
group with weight 1, and users of different groups k and l, which have n_k and n_l of the N users,
with weight

    c min(n_k, n_l) / N

The edges between groups let the path end with one model for all; they should not change the models
before. So c is chosen such that no two groups merge below _APART * fused, where `fused` is the lam
at which the last user has joined its group.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from coterie.base.errors import CoterieWarning, InvalidInput
from coterie.base.labels import group_means
from coterie.base.types import Array, Ints
from coterie.convex.consensus import Bracket, find_consensus, lam_max
from coterie.convex.path import Path, alone_at, solve_path
from coterie.data.users import Participants, Users
from coterie.fitting.kinds import (
    Comparison,
    Kind,
    Sharing,
    choose,
    choose_wide,
    group_centres,
    sharing_of,
)
from coterie.fitting.settings import Settings
from coterie.fitting.units import Units
from coterie.fitting.work import Work
from coterie.groups.find import find_groups
from coterie.groups.proposals import first_merges
from coterie.groups.summaries import Summaries
from coterie.groups.wide import search_wide
from coterie.losses import Loss
from coterie.losses.derived import Grouped, Quadratic
from coterie.losses.rows import too_wide
from coterie.problem.graph import Graph
from coterie.problem.problem import Problem
from coterie.problem.solution import Solution
from coterie.problem.weights import LocalModels, adaptive_graph

_APART = 1000.0
_ABOVE = 1.25  # the chosen lam, over one at which the groups are complete
_PAIRS = 3000  # users up to whom all pairs are used
_EARLY = 0.05  # first merge of groups of wide models, over the lam at which all merge, at least
_STEPS = 3e8  # operations of one Newton step of all lams of a path of wide models
# Numbers in all models up to which all points are drawn, and the fewest points drawn.
_NUMBERS, _FEWEST = 7_000, 8


@dataclass(frozen=True, eq=False)
class PathPlan:
    """A problem and where its path is solved.

    Parameters
    ----------
    problem : with its weights.
    lams : (n_lams,) increasing.
    chosen : the index of the chosen lam; -1 where it is chosen after the path is solved.
    why : the reason for the choice, a sentence.
    groups : (n_users,) the groups from which the weights were made, if any.
    start : (n_users, dim) models to start the path from, if any.
    centres : (n_users, dim) the models near those at the chosen lam, if they are known before.
    sharing : what users share, where it was chosen.
    means, errors : the mean losses on rows left out by kind, where these were compared, and the
        standard errors of their differences from the kind taken.
    """

    problem: Problem
    lams: Array
    chosen: int
    why: str
    groups: Ints | None = None
    sharing: Sharing | None = None
    start: Array | None = None
    centres: Array | None = None
    means: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)

    @property
    def kind(self) -> Kind | None:
        """The kind of models, where it was chosen."""
        return None if self.sharing is None else self.sharing.kind

    def choose(self, path: Path) -> tuple[int, str]:
        """The chosen point, or the nearest one with the same groups, and the reason; -1 if it is
        not chosen yet.
        """
        if self.groups is None or np.array_equal(path[self.chosen].labels, self.groups):
            return self.chosen, self.why
        same = [r for r, solution in enumerate(path.solutions) if np.array_equal(solution.labels,
            self.groups)]
        if same:
            return min(same, key=lambda r: abs(r - self.chosen)), self.why
        return self.chosen, (f"{self.why} No lambda reproduces these groups; the chosen one has "
                             f"{path[self.chosen].n_clusters} groups.")


def learn_units(users: Users, settings: Settings, n_classes: int = 0) -> Units:
    """The units of these users' data."""
    return Units.learn(users, settings.task, loss=settings.loss, ridge=settings.ridge,
                       n_classes=max(n_classes, settings.n_classes),
                       standardize=settings.standardize)


def make_plan(inner: Users, loss: Loss, settings: Settings, work: Work, like: Sharing | None = None,
              *,
              with_path: bool = True) -> PathPlan:
    """The problem, its weights and its lams for these users, whose data are in the solver's units.

    The kind of models is chosen by rows left out; see `coterie.fitting.kinds`. If `like` is given,
    its kind is taken where these users have it too, with as many groups. Without a path, a plan
    whose groups are known has no edges.
    """
    n, k = inner.n_users, min(settings.k, max(inner.n_users - 1, 1))
    single = _single(inner, settings)
    if n == 1:
        lams = np.unique([0.0, 0.0 if isinstance(settings.lam, str) else float(settings.lam)])
        return PathPlan(_problem(inner, loss, Graph.complete(1)), lams, len(lams) - 1,
                        "There is only one user.")
    if settings.weights == "unit" or (n == 2 and (settings.weights != "auto" or single)):
        if n > _PAIRS:
            raise InvalidInput(f"{n} users have too many pairs to use them all",
                               remedy="Use the weights 'auto' or 'wald'")
        graph = Graph.complete(n)
    elif not by_groups(inner, settings):
        weights = "gaussian" if settings.weights == "auto" else settings.weights
        graph = adaptive_graph(LocalModels.of(inner, loss, max(settings.ridge, 1e-6)), weights, k)
    else:
        return _plan_with_groups(inner, loss, settings, work, like, with_path)
    problem = _problem(inner, loss, graph)

    def grid() -> Array:
        work.show("range of lam")
        return _grid_to(problem, 1.001 * lam_max(problem, rtol=1e-3).upper, settings.n_lams)

    return _with_lam(problem, np.array(work.once("lams", grid)), settings)


def by_groups(inner: Users, settings: Settings) -> bool:
    """Whether weights are made from groups."""
    return inner.n_users > 1 and settings.weights == "auto" and not _single(inner, settings)


def _single(inner: Users, settings: Settings) -> bool:
    """Whether users are points."""
    return settings.task == "clustering" and int(inner.sizes.max()) == 1


def _problem(users: Participants, loss: Loss, graph: Graph) -> Problem:
    """One of several problems on the same data, about which the fit warns only once."""
    with warnings.catch_warnings(action="ignore", category=CoterieWarning):
        return Problem(users, loss, 0.0, graph)


def _grid_to(problem: Problem, top: float, n_lams: int) -> Array:
    """From separate models to one model for all."""
    if top <= 0:
        return np.array([0.0])
    return np.geomspace(alone_at(problem, top, 1e-4), top, n_lams)


def _with_lam(problem: Problem, lams: Array, settings: Settings) -> PathPlan:
    if isinstance(settings.lam, str):
        return PathPlan(problem, lams, -1, "")
    lams = np.unique([*lams, float(settings.lam)])
    return PathPlan(problem, lams, int(np.searchsorted(lams, settings.lam)), "As given.")


def _search_groups(inner: Users, loss: Loss, settings: Settings, work: Work) -> dict[str, Any]:
    """The groups: `labels`, a `sentence` about them, and one about the `limit` of their number if
    it was reached.
    """
    def searching(solution: Solution, _: int) -> None:
        work.show("searching for groups", text=f"{solution.n_clusters} groups")

    if too_wide(loss, loss.prepare(inner)):
        wide = search_wide(inner, loss, settings.max_groups,
                           lambda count: work.show("searching for groups", text=f"{count} groups"))
        return {"labels": wide.best.labels, "sentence": wide.sentence, "models": wide.models}
    groups = find_groups(inner, loss, max_groups=settings.max_groups, k=settings.k,
                         progress=searching)
    at_limit = 1 < groups.n_clusters < inner.n_users and groups.n_clusters == settings.max_groups
    within = "personal in groups" if groups.spread.any() else "groups"
    kinds: dict[str, Kind] = {"one model": "one model", "one centre with spread": "personal"}
    return {"labels": groups.labels, "sentence": str(groups), "likely": kinds.get(groups.kind,
        within),
            "limit": " The search stopped at this number." if at_limit else ""}


def plan_likely(inner: Users, loss: Loss, settings: Settings, work: Work) -> PathPlan:
    """As `make_plan`, with the kind that the description of the groups suggests instead of a
    comparison of kinds.
    """
    groups = work.once("groups", lambda: _search_groups(inner, loss, settings, work))
    labels = np.asarray(groups["labels"], dtype=np.int64)
    work.once("kind", lambda: _sharing_state(
        sharing_of(groups["likely"], Summaries.exact(inner, loss), labels, settings.count))
              if settings.lam == "auto" else _choose_kind(inner, loss, settings, labels, None))
    return make_plan(inner, loss, settings, work)


def _sharing_state(sharing: Sharing, compared: Comparison | None = None) -> dict[str, Any]:
    """What users share as arrays, numbers and texts; the mean losses by kind where they were
    compared.
    """
    return {"kind": sharing.kind, "labels": sharing.labels, "covariance": sharing.covariance,
            "noise": sharing.noise,
            "means": {} if compared is None else compared.means,
            "errors": {} if compared is None else compared.errors}


def _choose_kind(inner: Users, loss: Loss, settings: Settings, labels: Ints,
                 like: Sharing | None) -> dict[str, Any]:
    """What users share, as of `_sharing_state`."""
    parts = _sharing_state
    if too_wide(loss, loss.prepare(inner)) and settings.lam == "auto":
        if like is not None and (labels.any() or "groups" not in like.kind):
            return parts(replace(like, labels=labels if "groups" in like.kind else np.zeros_like(
                labels)))
        compared = choose_wide(inner, loss, labels, settings)
        return parts(compared.sharing, compared)
    if settings.lam != "auto" or settings.task == "clustering":
        return parts(Sharing("groups" if labels.any() else "one model", labels))
    if like is not None:
        sharing = sharing_of(like.kind, Summaries.exact(inner, loss), labels, settings.count)
        if (sharing.kind, sharing.n_groups) == (like.kind, like.n_groups):
            return parts(sharing)
    compared = choose(Summaries.exact(inner, loss), labels, settings)
    return parts(compared.sharing, compared)


def _plan_with_groups(inner: Users, loss: Loss, settings: Settings, work: Work,
                      like: Sharing | None,
                      with_path: bool) -> PathPlan:
    """The weights of two stages, and lams below and above the groups; see the module's text."""
    groups = work.once("groups", lambda: _search_groups(inner, loss, settings, work))
    labels, sentence = np.array(groups["labels"], dtype=np.int64), str(groups["sentence"])
    work.show("comparing kinds of models")
    shared = work.once("kind", lambda: _choose_kind(inner, loss, settings, labels, like))
    covariance, noise = (None if shared[name] is None else np.asarray(shared[name])
                         for name in ("covariance", "noise"))
    sharing = Sharing(shared["kind"], np.asarray(shared["labels"], dtype=np.int64), covariance,
                      settings.count,
                      noise=noise)
    sentence = sentence_about(labels, sharing, sentence) + str(groups.get("limit", ""))
    means, errors = dict(shared["means"]), dict(shared.get("errors", {}))
    outer = sharing.loss(loss, inner)
    if not with_path and settings.lam == "auto":
        problem = _problem(inner, outer, Graph.from_edges(inner.n_users, []))
        return PathPlan(problem, np.zeros(1), 0, sentence,
                        None if sharing.kind == "alone" else sharing.labels, sharing,
                        means=means, errors=errors)
    def weighted() -> dict[str, Any]:
        work.show("range of lam")
        local = LocalModels.of(inner, loss,
                               max(settings.ridge,
                                   1e-3)) if "models" not in groups else LocalModels(
            np.asarray(groups["models"]), np.empty((inner.n_users, 0, 0)), inner.sizes)
        return _plan_state(weighted_plan(inner, outer, local, sharing, settings, sentence))

    plan = _restored_plan(inner, outer, work.once("weights", weighted))
    chosen = settings.lam == "auto"
    return replace(plan, why=sentence if chosen else plan.why, sharing=sharing if chosen else None,
                   means=means,
                   errors=errors)


def _plan_state(plan: PathPlan) -> dict[str, Any]:
    """The weights and lams of a plan as arrays, numbers and texts."""
    graph = plan.problem.graph
    return {"edges": graph.edges, "weights": graph.weights, "lams": plan.lams,
            "chosen": plan.chosen, "why": plan.why,
            "groups": plan.groups, "start": plan.start, "centres": plan.centres}


def _restored_plan(inner: Users, loss: Loss, state: dict[str, Any]) -> PathPlan:
    """The plan whose `_plan_state` this is."""
    edges = np.asarray(state["edges"], dtype=np.int64).reshape(-1, 2)
    graph = Graph.from_edges(inner.n_users, edges, state["weights"])
    groups, start, centres = (state[name] if state[name] is None else np.asarray(state[name])
                              for name in ("groups", "start", "centres"))
    return PathPlan(_problem(inner, loss, graph), np.asarray(state["lams"]), int(state["chosen"]),
                    str(state["why"]), groups, None, start, centres)


def sentence_about(labels: Ints, sharing: Sharing, sentence: str) -> str:
    """What is said of the groups that the search found, if users share these or not."""
    if labels.any() and (sharing.kind == "alone" or not sharing.labels.any()):
        return (f"The search found {int(labels.max()) + 1} groups, but they are not needed to "
                "predict.")
    return sentence


def weighted_plan(inner: Participants, loss: Loss, local: LocalModels, sharing: Sharing,
                  settings: Settings,
                  sentence: str) -> PathPlan:
    """The weights and the path for what users share.

    Parameters
    ----------
    inner : the users.
    loss : of their centres.
    local : their local models.
    sharing : what they share.
    settings : of the fit.
    sentence : the reason for the choice.
    """
    alone = sharing.kind == "alone"
    labels = np.zeros(inner.n_users, dtype=np.int64) if alone else sharing.labels
    inside = connect_inside(local, labels, settings.k)
    problem = _problem(inner, loss, inside)
    wide = too_wide(loss, problem.samples)
    # Any flow that balances the users of a group bounds the lam at which they merge; the electrical
    # flow is quick.
    fused, centres = 0.0, None
    if inside.n_edges and wide:
        centres = group_centres(loss, problem.samples, labels, "users")[labels]
        fused = _merging(problem, centres).upper
    elif inside.n_edges:
        bracket, centres, _ = find_consensus(problem, rtol=1.0)
        fused = bracket.upper
    fused = max(fused, 1e-9)  # all users of a group may have equal models already, up to rounding
    low = first_merges(local, inside) if inside.n_edges and not wide else 0.0
    n_lams = _affordable(problem, settings.n_lams) if wide \
        else _n_points(problem.n_users * problem.dim, settings)
    low = low if 0 < low < fused else 1e-3 * fused
    at_groups = _ABOVE * fused
    if labels.any():
        graph, top = _between(inner, loss, labels, inside, fused, centres)
    else:
        graph, at_groups, top = inside, 1.001 * fused, 0.0
    # With lam = "auto" what is above the groups is not shown: the path only ends there.
    above = 0 if top <= at_groups or n_lams < 2 else 1 if settings.lam == "auto" \
        else max(n_lams // 3, 1)
    lams = np.geomspace(low, at_groups, max(n_lams - above, 2)) if n_lams > 1 \
        else np.array([at_groups])
    chosen = len(lams) - 1
    lams = np.concatenate([lams, np.geomspace(at_groups, top, above + 1)[1:] if above else lams[
        :0]])
    problem = _problem(inner, loss, graph)
    if settings.lam != "auto":
        return _with_lam(problem, lams, settings)
    start = None if wide else local.models
    if alone:
        return PathPlan(problem, np.array([0.0, *lams]), 0, sentence, None, sharing, start)
    return PathPlan(problem, lams, chosen, sentence, labels, sharing, start, centres)


def _n_points(numbers: int, settings: Settings) -> int:
    """How many points the path has; fewer than asked for with many numbers in all models and a
    chosen lam.
    """
    if settings.lam != "auto" or numbers <= _NUMBERS:
        return settings.n_lams
    return min(settings.n_lams, max(_FEWEST, round(settings.n_lams * _NUMBERS / numbers)))


def _merging(problem: Problem, pooled: Array) -> Bracket:
    """Bounds of `lam_max` from models near the pooled ones: its first two, to the digits that these
    models have.
    """
    graph, parts = problem.graph, problem.graph.components
    gradients = problem.gradients(pooled)
    gradients -= group_means(gradients, parts)[parts]
    penalty = graph.penalty(gradients)
    lower = float((gradients**2).sum()) / penalty if penalty > 0 else 0.0
    return Bracket(lower,
                   float((np.linalg.norm(graph.flow(-gradients), axis=1) / graph.weights).max(
                       initial=0.0)))


def _affordable(problem: Problem, n_lams: int) -> int:
    """The number of lams of a path of wide models, by the size of one Newton step: at most n_lams,
    at least 1.
    """
    rows, p = problem.users.sizes.astype(float), problem.users.n_features + 1
    classes = problem.dim // p + (problem.dim > p)
    step = float((classes * rows**3 + p * rows**2).sum())
    return int(np.clip(_STEPS / step, 1, n_lams))


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


def _between(inner: Participants, loss: Loss, labels: Ints, inside: Graph, fused: float,
             near: Array | None) -> tuple[Graph, float]:
    """The graph with the edges between groups added, and a lam at which all groups have merged.

    No two groups merge below _APART * fused, by the second-order models of the groups' losses at
    their centres.
    """
    n, sizes = inner.n_users, np.bincount(labels)
    first, second = np.triu_indices(len(sizes), 1)
    weights = sizes[first] * sizes[second] / n  # of all edges between two groups, over c
    samples = loss.prepare(inner)
    grouped = Grouped(loss=loss, samples=samples, labels=labels)
    few = _problem(grouped.groups, grouped, Graph.from_edges(
        len(sizes), np.stack([first, second], axis=1), weights))
    # a bound of the first merge that is usually far below it, instead of a path.
    if too_wide(loss, samples):
        everyone = np.zeros(n, dtype=np.int64)
        ends = _merging(few, np.repeat(group_centres(loss, samples, everyone, "users"), len(sizes),
                                       axis=0))
        apart, joined = _EARLY * ends.lower, ends.upper
    else:
        joined = lam_max(few, rtol=1.0).upper
        quadratic = _near_centres(grouped, None if near is None else group_means(near, labels))
        path = solve_path(_problem(few.users, quadratic, few.graph), n_lams=12, tol=1e-4)
        merges = path.n_clusters < len(sizes)
        merged = int(np.argmax(merges)) if merges.any() else len(path) - 1
        apart = float(path.lams[max(merged - 1, 0)])
    c = max(apart, 1e-300) / (_APART * fused)
    pairs, light = [inside.edges], [np.ones(inside.n_edges)]
    for one, other in zip(first, second, strict=True):
        a, b = np.flatnonzero(labels == one), np.flatnonzero(labels == other)
        m = np.arange(max(len(a), len(b)))  # the smaller group is repeated
        pairs.append(np.sort(np.stack([a[m % len(a)], b[m % len(b)]], axis=1), axis=1))
        light.append(np.full(len(m), c * min(len(a), len(b)) / n))
    graph = Graph.from_edges(n, np.concatenate(pairs), np.concatenate(light))
    return graph, 1.05 * joined / c


def _near_centres(grouped: Grouped, start: Array | None) -> Quadratic:
    """Second-order models of the groups' losses at their centres."""
    samples = grouped.prepare(grouped.groups)
    centres = grouped.local(samples, start=start).points
    value, gradient, hessian = grouped.evaluate(samples, centres, 2)
    return Quadratic(point=centres, value=value, gradient=gradient, hessian=hessian)
