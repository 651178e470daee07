"""What is solved on the way to groups and models: the settings, the problem with its weights, and the lams of its path.

The weights of "auto" are made in two stages, as in the adaptive lasso (Zou 2006): `find_groups` finds groups; users of
one group are joined to their nearest (by Wald distance) within it by edges of weight 1, users of different groups by
edges of weight c min(n_k, n_l) / N for groups of n_k and n_l among N users. c is such that no two groups meet before
_APART times the lam at which the last user has joined its group, so the pull between groups hardly moves their models.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np

from coterie._typing import Array, Ints
from coterie.analysis.groups import find_groups, first_meeting
from coterie.analysis.path import Path, alone_at, lam_max, solve_path
from coterie.data.encoding import Task
from coterie.data.users import Participants, Users
from coterie.errors import CoterieWarning, InvalidInput
from coterie.graph import Graph
from coterie.graph.weights import KINDS, LocalModels, adaptive_graph
from coterie.losses import Loss
from coterie.losses.grouped import Grouped
from coterie.problem import Problem, check_lam
from coterie.solution import Certificate, Solution, Status

Progress = Callable[[str, int, int, str], None]  # what is being done, how far, of how much, in words
Kept = MutableMapping[str, Any]
_APART = 1000.0
_ABOVE = 1.25  # the lam taken, over one at which the groups are whole
_PAIRS = 3000  # users up to whom all pairs are taken


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What can be chosen; all of it has a default.

    Parameters
    ----------
    task : what targets are: classes 0, 1, ..., numbers, counts, or none.
    loss : a name in LOSSES that fits the task.
    lam : a number; "auto", which takes the groups found (on weights other than "auto": as "score"); or "score", the
        least mean loss on rows held out.
    weights : "auto" as above; "unit" for all pairs alike, the paper's case; or "wald", "gaussian", "inverse" for each
        user's k nearest.
    ridge : on all coordinates of a model.
    n_lams : points of the path.
    most : groups at most; None for as many as there are (eight are looked for, and twice as many while all are found).
    k : nearest users each one is joined to.
    tol : the certified relative gap to reach.
    holdout : the share of every user's rows that judge; 0 for none.
    standardize : whether features are standardised.
    n_classes : where not all classes are among the samples.
    seed : of the rows held out.
    """

    task: Task = "regression"
    loss: str = "auto"
    lam: float | Literal["auto", "score"] = "auto"
    weights: str = "auto"
    ridge: float = 1e-3
    n_lams: int = 24
    most: int | None = None
    k: int = 5
    tol: float = 1e-6
    holdout: float = 0.2
    standardize: bool = True
    n_classes: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.lam, str):
            if self.lam not in ("auto", "score"):
                raise InvalidInput(f"lam must be a number >= 0, 'auto' or 'score', got {self.lam!r}", remedy="Use auto")
        else:
            check_lam(self.lam)
        if self.weights not in KINDS:
            raise InvalidInput(f"unknown weights {self.weights!r}", remedy=f"Choose one of: {', '.join(KINDS)}")
        if not 0 <= self.holdout < 1:
            raise InvalidInput(f"holdout must be a share in [0, 1), got {self.holdout!r}", remedy="Use for example 0.2")
        for name, least in (("n_lams", 2), ("most", 1), ("k", 1), ("seed", 0)):
            number = getattr(self, name)
            if name == "most" and number is None:
                continue
            if isinstance(number, bool) or not isinstance(number, (int, np.integer)) or number < least:
                raise InvalidInput(f"{name} must be a whole number >= {least}, got {number!r}", remedy="Leave it out")
        if not (np.isfinite(self.tol) and self.tol > 0):
            raise InvalidInput(f"tol must be a finite number > 0, got {self.tol!r}", remedy="Use for example 1e-6")


@dataclass(frozen=True, eq=False)
class Plan:
    """The problem, where on lam it is solved, and which of these is taken; -1 where the path must tell."""

    problem: Problem
    lams: Array
    chosen: int
    why: str
    groups: Ints | None = None  # those the weights were made from


def make_plan(inner: Users, loss: Loss, settings: Settings, tell: Progress, kept: Kept, part: str) -> Plan:
    """What to solve for these users; `part` tells what is kept of one plan from what is kept of another."""
    n, k = inner.n_users, min(settings.k, max(inner.n_users - 1, 1))
    single = settings.task == "clustering" and int(inner.counts.max()) == 1
    if n == 1:
        lams = np.unique([0.0, 0.0 if isinstance(settings.lam, str) else float(settings.lam)])
        return Plan(_problem(inner, loss, Graph.complete(1)), lams, len(lams) - 1, "one user has nobody to join.")
    if settings.weights == "unit" or (n == 2 and (settings.weights != "auto" or single)):
        if n > _PAIRS:
            raise InvalidInput(f"all pairs of {n} users are too many here", remedy="Use the weights 'auto' or 'wald'")
        graph = Graph.complete(n)
    elif settings.weights != "auto" or single:
        kind = "gaussian" if settings.weights == "auto" else settings.weights
        graph = adaptive_graph(LocalModels.of(inner, loss, max(settings.ridge, 1e-6)), kind, k)
    else:
        return _grouped(inner, loss, settings, tell, kept, part)
    problem = _problem(inner, loss, graph)
    if f"{part}lams" not in kept:
        tell(f"{part}range of lam", 0, 1, "")
        kept[f"{part}lams"] = _grid_to(problem, 1.001 * lam_max(problem, rtol=1e-3).upper, settings.n_lams)
    return _with_lam(problem, np.array(kept[f"{part}lams"]), settings)


def _problem(users: Participants, loss: Loss, graph: Graph) -> Problem:
    """One of several on the same data, whose concerns are told once."""
    with warnings.catch_warnings(action="ignore", category=CoterieWarning):
        return Problem(users, loss, 0.0, graph)


def _grid_to(problem: Problem, top: float, n_lams: int) -> Array:
    """From everyone alone to everyone together."""
    if top <= 0:
        return np.array([0.0])
    return np.geomspace(alone_at(problem, top, 1e-4), top, n_lams)


def _with_lam(problem: Problem, lams: Array, settings: Settings) -> Plan:
    if isinstance(settings.lam, str):
        return Plan(problem, lams, -1, "")
    lams = np.unique([*lams, float(settings.lam)])
    return Plan(problem, lams, int(np.searchsorted(lams, settings.lam)), "as asked for.")


def _grouped(inner: Users, loss: Loss, settings: Settings, tell: Progress, kept: Kept, part: str) -> Plan:
    """The weights of two stages, and the lams around the groups; see the module's text."""
    if f"{part}groups" not in kept:
        def searching(solution: Solution, _: int) -> None:
            tell(f"{part}searching for groups", 0, 1, f"{solution.n_clusters} clusters")

        most = settings.most or 8
        groups = find_groups(inner, loss, most=most, k=settings.k, progress=searching)
        while settings.most is None and groups.n_clusters == most <= inner.n_users // 4:
            most *= 2
            groups = find_groups(inner, loss, most=most, k=settings.k, progress=searching)
        full = " More are not looked for." if 1 < groups.n_clusters == most < inner.n_users else ""
        kept[f"{part}groups"] = {"labels": groups.labels, "sentence": f"{groups}{full}"}
    told = kept[f"{part}groups"]
    labels, sentence = np.array(told["labels"], dtype=np.int64), str(told["sentence"])
    tell(f"{part}range of lam", 0, 1, "")
    local = LocalModels.of(inner, loss, max(settings.ridge, 1e-3))
    inside = _inside(local, labels, settings.k)
    # Any flow that balances the users of a group bounds the lam at which they are one; the electrical one is quick.
    fused = lam_max(_problem(inner, loss, inside), rtol=1.0).upper if inside.n_edges else 0.0
    fused = max(fused, 1e-9)  # everyone in a group may agree already, to rounding
    low = first_meeting(local, inside) if inside.n_edges else 0.0
    low = low if 0 < low < fused else 1e-3 * fused
    taken = _ABOVE * fused
    if labels.any():
        graph, top = _between(inner, loss, labels, inside, fused)
    else:
        graph, taken, top = inside, 1.001 * fused, 0.0
    below = max(settings.n_lams * 2 // 3, 2)
    lams = np.geomspace(low, taken, below if top > taken else settings.n_lams)
    chosen = len(lams) - 1
    if top > taken:
        lams = np.concatenate([lams, np.geomspace(taken, top, max(settings.n_lams - below, 1) + 1)[1:]])
    problem = _problem(inner, loss, graph)
    if settings.lam == "auto":
        return Plan(problem, lams, chosen, sentence, labels)
    return _with_lam(problem, lams, settings)


def _inside(local: LocalModels, labels: Ints, k: int) -> Graph:
    """Every user joined to the k nearest of its own group, all of a group connected; weight 1."""
    pairs = [np.empty((0, 2), dtype=np.int64)]
    for c in range(int(labels.max()) + 1):
        members = np.flatnonzero(labels == c)
        if len(members) > 1:
            own = LocalModels(local.models[members], local.hessians[members], local.counts[members])
            pairs.append(members[adaptive_graph(own, "wald", min(k, len(members) - 1)).edges])
    return Graph.from_edges(len(labels), np.concatenate(pairs))


def _between(inner: Users, loss: Loss, labels: Ints, inside: Graph, fused: float) -> tuple[Graph, float]:
    """Edges between the groups added, so light that no two meet before _APART times `fused`; and where all have."""
    n, sizes = inner.n_users, np.bincount(labels)
    first, second = np.triu_indices(len(sizes), 1)
    weights = sizes[first] * sizes[second] / n  # in all, times c
    samples = loss.prepare(inner)
    grouped = Grouped(loss=loss, samples=samples, labels=labels)
    few = _problem(grouped.groups, grouped, Graph.from_edges(
        len(sizes), np.stack([first, second], axis=1), weights))
    path = solve_path(few, n_lams=12, tol=1e-4)
    merged = int(np.argmax(path.n_clusters < len(sizes))) if (path.n_clusters < len(sizes)).any() else len(path) - 1
    c = max(float(path.lams[max(merged - 1, 0)]), 1e-300) / (_APART * fused)
    pairs, light = [inside.edges], [np.ones(inside.n_edges)]
    for one, other in zip(first, second, strict=True):
        a, b = np.flatnonzero(labels == one), np.flatnonzero(labels == other)
        m = np.arange(max(len(a), len(b)))  # the smaller group goes round
        pairs.append(np.sort(np.stack([a[m % len(a)], b[m % len(b)]], axis=1), axis=1))
        light.append(np.full(len(m), c * min(len(a), len(b)) / n))
    graph = Graph.from_edges(n, np.concatenate(pairs), np.concatenate(light))
    return graph, 1.05 * float(path.lams[-1]) / c


def walk(plan: Plan, settings: Settings, tell: Progress, kept: Kept, part: str) -> Path:
    """The path; points that are kept are not solved for again."""
    done: list[Solution] = []
    last: dict[str, Any] = kept.get(f"{part}last", {"point": -1})
    while len(done) <= last["point"]:
        done.append(_restored(plan.problem.with_lam(float(plan.lams[len(done)])), kept[f"{part}point {len(done)}"]))
    # The next point starts from the last one's duals as well, so that a run that was broken off ends in the same bits.
    start = replace(done[-1], duals=last["duals"], sigma=last["sigma"]) if done else None

    def keep(solution: Solution, _: int) -> None:
        kept[f"{part}point {len(done)}"] = _state(solution)
        kept[f"{part}last"] = {"point": len(done), "duals": solution.duals, "sigma": solution.sigma}
        done.append(replace(solution, duals=None, certificate=replace(solution.certificate, duals=None)))
        tell(f"{part}path", len(done), len(plan.lams), f"objective {solution.objective:.6g}, gap {solution.gap:.1e}, "
                                                       f"{solution.n_clusters} clusters")

    rest = plan.lams[len(done):]
    if len(rest):
        solve_path(plan.problem, rest, tol=settings.tol, progress=keep, start=start)
    return Path(problem=plan.problem, solutions=tuple(done), tol=settings.tol)


def _state(solution: Solution) -> dict[str, Any]:
    """A solution as arrays, numbers and texts."""
    told = solution.certificate
    certificate = {f.name: getattr(told, f.name) for f in fields(told) if f.name != "duals"}
    return {"models": solution.models, "certificate": certificate, "status": solution.status.name,
            "solver": solution.solver, "seconds": solution.seconds, "sigma": solution.sigma}


def _restored(problem: Problem, state: dict[str, Any]) -> Solution:
    told = dict(state["certificate"])
    told["infinite_users"] = tuple(told["infinite_users"])
    return Solution(problem=problem, models=problem.check_models(state["models"]), duals=None,
                    certificate=Certificate(**told), status=Status[state["status"]], solver=state["solver"],
                    seconds=state["seconds"], sigma=state["sigma"])


