"""From users to groups and models with nothing left to choose: what `coterie fit` and the estimators do.

    fitted = fit(users, Settings(task="classification"))      # fitted.solution, fitted.path, fitted.scores

1. Features are standardised, and an intercept is added (`coterie.units`).
2. `find_groups` finds groups, and weights are made from them in two stages, as in the adaptive lasso (Zou 2006): users
   of one group are joined to their nearest (by Wald distance) within it by edges of weight 1, users of different groups
   by edges of weight c min(n_k, n_l) / N for groups of n_k and n_l among N users.
3. The path over lam goes from everyone alone through these groups to everyone together. c is such that no two groups
   meet before _APART times the lam at which the last user has joined its group, so the pull between groups hardly
   moves their models.
4. At lam a little above that, the clusters are the groups, and the solution there is certified: no other models are
   better for this convex problem. That the groups are right is a matter of the criterion in `coterie.groups`.
5. All of it is done again with a part of every user's rows held out, which judge it: `Scores`.

Points with one row each have no noise to judge groups by; there the weights are Gaussian, and the lam of the clearest
clusters (by silhouette, Rousseeuw 1987) is taken.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from coterie.errors import CoterieWarning, InvalidInput
from coterie.graph import Graph
from coterie.groups import find_groups, first_meeting
from coterie.losses import Loss
from coterie.losses.grouped import Grouped, group_users
from coterie.path import InNotebook, Path, lam_max, solve_path
from coterie.problem import Problem, check_lam
from coterie.select import refit
from coterie.solution import Certificate, Solution, Status
from coterie.solvers import solve
from coterie.units import Task, Units
from coterie.users import Users
from coterie.weights import KINDS, LocalModels, adaptive_graph

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Progress = Callable[[str, int, int, str], None]  # what is being done, how far, of how much, in words
METRICS: dict[Task, str] = {"classification": "accuracy", "regression": "RMSE", "counts": "deviance"}
_APART = 100.0
_ABOVE = 1.25  # the lam taken, over one at which the groups are whole
_CLEAR = 0.5  # below this silhouette the structure is weak and could be artificial (Kaufman and Rousseeuw 1990)
_SHOWN = 2000  # users up to whom held-out scores are computed along the whole path
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
    most : groups considered at most.
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
    most: int = 8
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
            if isinstance(number, bool) or not isinstance(number, (int, np.integer)) or number < least:
                raise InvalidInput(f"{name} must be a whole number >= {least}, got {number!r}", remedy="Leave it out")
        if not (np.isfinite(self.tol) and self.tol > 0):
            raise InvalidInput(f"tol must be a finite number > 0, got {self.tol!r}", remedy="Use for example 1e-6")


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """How models found without the rows held out do on these rows, user by user; nan for a user without such rows."""

    metric: str
    larger: bool  # whether more is better
    here: Array  # (n_users,) with the models chosen
    alone: Array  # (n_users,) with the user's own
    together: Array  # (n_users,) with one for all
    points: Array = field(repr=False)  # (n_lams, n_users) along the path; nan where not computed
    losses: Array = field(repr=False)  # (n_lams,) mean loss over users
    n_clusters: int  # found without these rows
    n_rows: int

    def __str__(self) -> str:
        """Means over users."""
        percent = self.metric == "accuracy"
        here, alone, together = (f"{100 * m:.1f}%" if percent else f"{m:.4g}" for m in map(
            np.nanmean, (self.here, self.alone, self.together)))
        return (f"{self.metric} on {self.n_rows} rows held out, mean over users: {here}; everyone alone {alone}, "
                f"one model for all {together}.")


@dataclass(frozen=True, kw_only=True, eq=False)
class Fit(InNotebook):
    """The solution, the path it lies on, and how good it is on rows held out."""

    settings: Settings
    units: Units
    solution: Solution
    path: Path
    chosen: int  # the solution's place on the path
    together: Array = field(repr=False)  # (dim,) one model for all, for whoever is not among the users
    why: str  # this lam
    scores: Scores | None

    @property
    def labels(self) -> Ints:
        return self.solution.labels

    @property
    def n_clusters(self) -> int:
        return self.solution.n_clusters

    @property
    def gap(self) -> float:
        return self.solution.gap

    @property
    def coefficients(self) -> Array:
        """(n_users, n_features + 1, outputs) the models in the units given; see `Units.coefficients`."""
        return self.units.coefficients(self.solution.models)

    def models_of(self, names: npt.ArrayLike) -> tuple[Array, npt.NDArray[np.bool_]]:
        """(n, dim) the model of each user named, one for all where there is none; and who is known."""
        place = {name: i for i, name in enumerate(self.solution.problem.users.names)}
        found = np.array([place.get(name, -1) for name in np.asarray(names, dtype=object).tolist()], dtype=np.int64)
        models = np.concatenate([self.solution.models, self.together[None]])
        return models[found], found >= 0


@dataclass(frozen=True, eq=False)
class _Plan:
    """The problem, where on lam it is solved, and which of these is taken; -1 where the path must tell."""

    problem: Problem
    lams: Array
    chosen: int
    why: str


def fit(users: Users, settings: Settings, *, progress: Progress | None = None,
        store: MutableMapping[str, Any] | None = None) -> Fit:
    """Find groups and models; Ctrl-C raises KeyboardInterrupt.

    Parameters
    ----------
    users : whose data; classes as numbers 0, 1, ...
    settings : what is chosen.
    progress : told what is being done.
    store : finished parts are put here and taken from here, so that a run that was broken off can go on: arrays,
        numbers and texts only.
    """
    users.require_samples()
    points, judged = settings.task == "clustering", settings.holdout > 0 and settings.task != "clustering"
    if (settings.lam == "score" or (settings.lam == "auto" and settings.weights != "auto")) and not (
            points or judged or users.n_users == 1):
        raise _unjudged()
    tell: Progress = progress or (lambda *_: None)
    kept: MutableMapping[str, Any] = {} if store is None else store
    units = _units(users, settings)
    inner = units.inner(users)
    for concern in units.loss.concerns(inner):
        warnings.warn(concern, CoterieWarning, stacklevel=2)
    plan = _plan(inner, units.loss, settings, tell, kept, "")
    path = _path(plan, settings, tell, kept, "")
    scores = _judge(users, settings, tell, kept) if judged else None
    index, why = plan.chosen, plan.why
    if index < 0:
        index, why = _clearest(path, settings.seed) if points else _best(path, scores)
    chosen = path[index]
    solution = _whole(solve(chosen.problem, tol=settings.tol, start=chosen))  # once more, for its duals
    together = refit(plan.problem, np.zeros(inner.n_users, dtype=np.int64))[0]
    return Fit(settings=settings, units=units, solution=solution, path=path, chosen=index, together=together, why=why,
               scores=scores)


def _whole(solution: Solution) -> Solution:
    """A solver answers an interrupt with its best point, which is not to be built upon."""
    if solution.status is Status.INTERRUPTED:
        raise KeyboardInterrupt
    return solution


def _units(users: Users, settings: Settings, n_classes: int = 0) -> Units:
    return Units.learn(users, settings.task, loss=settings.loss, ridge=settings.ridge,
                       n_classes=max(n_classes, settings.n_classes), standardize=settings.standardize)


def _plan(inner: Users, loss: Loss, settings: Settings, tell: Progress, kept: MutableMapping[str, Any],
          part: str) -> _Plan:
    n, k = inner.n_users, min(settings.k, max(inner.n_users - 1, 1))
    single = settings.task == "clustering" and int(inner.counts.max()) == 1
    if n == 1:
        lams = np.unique([0.0, 0.0 if isinstance(settings.lam, str) else float(settings.lam)])
        return _Plan(_problem(inner, loss, Graph.complete(1)), lams, len(lams) - 1, "one user has nobody to join.")
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


def _problem(users: Users, loss: Loss, graph: Graph) -> Problem:
    """One of several on the same data, whose concerns are told once."""
    with warnings.catch_warnings(action="ignore", category=CoterieWarning):
        return Problem(users, loss, 0.0, graph)


def _grid_to(problem: Problem, top: float, n_lams: int) -> Array:
    """From everyone alone to everyone together."""
    if top <= 0:
        return np.array([0.0])
    most, low, start = _whole(solve(problem.with_lam(0.0), tol=1e-4)).n_clusters, 0.01 * top, None
    for _ in range(12):
        start = _whole(solve(problem.with_lam(low), tol=1e-4, start=start))
        if start.n_clusters >= most:
            break
        low *= 0.2
    return np.geomspace(low, top, n_lams)


def _with_lam(problem: Problem, lams: Array, settings: Settings) -> _Plan:
    if isinstance(settings.lam, str):
        return _Plan(problem, lams, -1, "")
    lams = np.unique([*lams, float(settings.lam)])
    return _Plan(problem, lams, int(np.searchsorted(lams, settings.lam)), "as asked for.")


def _grouped(inner: Users, loss: Loss, settings: Settings, tell: Progress, kept: MutableMapping[str, Any],
             part: str) -> _Plan:
    """The weights of two stages, and the lams around the groups; see the module's text."""
    if f"{part}groups" not in kept:
        def searching(solution: Solution, _: int) -> None:
            tell(f"{part}searching for groups", 0, 1, f"{solution.n_clusters} clusters")

        groups = find_groups(inner, loss, most=settings.most, k=settings.k, progress=searching)
        kept[f"{part}groups"] = {"labels": groups.labels, "sentence": str(groups)}
    told = kept[f"{part}groups"]
    labels, sentence = np.array(told["labels"], dtype=np.int64), str(told["sentence"])
    tell(f"{part}range of lam", 0, 1, "")
    local = LocalModels.of(inner, loss, max(settings.ridge, 1e-3))
    inside = _inside(local, labels, settings.k)
    # Any flow that balances the users of a group bounds the lam at which they are one; the electrical one is quick.
    whole = lam_max(_problem(inner, loss, inside), rtol=1.0).upper if inside.n_edges else 0.0
    whole = max(whole, 1e-9)  # everyone in a group may agree already, to rounding
    low = first_meeting(local, inside) if inside.n_edges else 0.0
    low = low if 0 < low < whole else 1e-3 * whole
    taken = _ABOVE * whole
    if labels.any():
        graph, top = _between(inner, loss, labels, inside, whole)
    else:
        graph, taken, top = inside, 1.001 * whole, 0.0
    below = max(settings.n_lams * 2 // 3, 2)
    lams = np.geomspace(low, taken, below if top > taken else settings.n_lams)
    chosen = len(lams) - 1
    if top > taken:
        lams = np.concatenate([lams, np.geomspace(taken, top, max(settings.n_lams - below, 1) + 1)[1:]])
    problem = _problem(inner, loss, graph)
    if settings.lam == "auto":
        return _Plan(problem, lams, chosen, sentence)
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


def _between(inner: Users, loss: Loss, labels: Ints, inside: Graph, whole: float) -> tuple[Graph, float]:
    """Edges between the groups added, so light that no two meet before _APART times `whole`; and where all have."""
    n, sizes = inner.n_users, np.bincount(labels)
    first, second = np.triu_indices(len(sizes), 1)
    weights = sizes[first] * sizes[second] / n  # in all, times c
    samples = loss.prepare(inner)
    grouped = Grouped(loss=loss, samples=samples, labels=labels)
    few = _problem(group_users(inner, labels), grouped, Graph.from_edges(
        len(sizes), np.stack([first, second], axis=1), weights))
    path = solve_path(few, n_lams=12, tol=1e-4)
    if path.interrupted:
        raise KeyboardInterrupt
    merged = int(np.argmax(path.n_clusters < len(sizes))) if (path.n_clusters < len(sizes)).any() else len(path) - 1
    c = max(float(path.lams[max(merged - 1, 0)]), 1e-300) / (_APART * whole)
    pairs, light = [inside.edges], [np.ones(inside.n_edges)]
    for one, other in zip(first, second, strict=True):
        a, b = np.flatnonzero(labels == one), np.flatnonzero(labels == other)
        m = np.arange(max(len(a), len(b)))  # the smaller group goes round
        pairs.append(np.sort(np.stack([a[m % len(a)], b[m % len(b)]], axis=1), axis=1))
        light.append(np.full(len(m), c * min(len(a), len(b)) / n))
    graph = Graph.from_edges(n, np.concatenate(pairs), np.concatenate(light))
    return graph, 1.05 * float(path.lams[-1]) / c


def _path(plan: _Plan, settings: Settings, tell: Progress, kept: MutableMapping[str, Any], part: str) -> Path:
    """The path; points that are kept are not solved for again."""
    done: list[Solution] = []
    last: dict[str, Any] = kept.get(f"{part}last", {"point": -1})
    while len(done) <= last["point"]:
        done.append(_restored(plan.problem.with_lam(float(plan.lams[len(done)])), kept[f"{part}point {len(done)}"]))
    # The next point starts from the last one's duals as well, so that a run that was broken off ends in the same bits.
    start = replace(done[-1], duals=last["duals"], sigma=last["sigma"]) if done else None

    def keep(solution: Solution, _: int) -> None:
        if solution.status is Status.INTERRUPTED:
            raise KeyboardInterrupt
        kept[f"{part}point {len(done)}"] = _state(solution)
        kept[f"{part}last"] = {"point": len(done), "duals": solution.duals, "sigma": solution.sigma}
        done.append(replace(solution, duals=None, certificate=replace(solution.certificate, duals=None)))
        tell(f"{part}path", len(done), len(plan.lams), f"objective {solution.objective:.6g}, gap {solution.gap:.1e}, "
                                                       f"{solution.n_clusters} clusters")

    rest = plan.lams[len(done):]
    if len(rest):
        solve_path(plan.problem, rest, tol=settings.tol, progress=keep, start=start)
    if len(done) < len(plan.lams):
        raise KeyboardInterrupt
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


def _judge(users: Users, settings: Settings, tell: Progress, kept: MutableMapping[str, Any]) -> Scores | None:
    """The same without a part of every user's rows, judged on these rows; None where there are none."""
    classes = settings.task == "classification"
    split = users.split(test=settings.holdout, stratify=classes, seed=settings.seed)
    train, test, present = split.train, split.test, split.test.counts > 0
    assert users.targets is not None
    assert train.targets is not None
    if not present.any() or (classes and len(np.unique(train.targets)) < 2):
        return None
    units = _units(train, settings, int(users.targets.max()) + 1 if classes else 0)
    inner, part = units.inner(train), "held out: "
    plan = _plan(inner, units.loss, settings, tell, kept, part)
    if users.n_users <= _SHOWN or plan.chosen < 0:
        models = [s.models for s in _path(plan, settings, tell, kept, part).solutions]
    else:
        tell(f"{part}path", 0, 1, "")
        models = [_whole(solve(plan.problem.with_lam(float(plan.lams[plan.chosen])), tol=1e-4)).models]
    judged = units.inner(test.take(np.flatnonzero(present)))
    samples, loss = units.loss.prepare(judged), units.loss
    with np.errstate(over="ignore"):  # a count beyond all bounds
        losses = np.array([loss.values(samples, m[present]).mean() for m in models])
    index = plan.chosen if plan.chosen >= 0 else int(losses.argmin())
    scores = np.stack([units.scores(m, test) for m in models])
    here = index if len(models) > 1 else 0
    one = refit(plan.problem, np.zeros(users.n_users, dtype=np.int64))
    return Scores(metric=METRICS[settings.task], larger=classes, here=scores[here],
                  alone=units.scores(plan.problem.loss.local(plan.problem.samples).points, test),
                  together=units.scores(one, test), points=scores, losses=losses,
                  n_clusters=len(np.unique(models[here], axis=0)), n_rows=test.n_samples)


def _unjudged() -> InvalidInput:
    return InvalidInput("lam cannot be chosen: no rows are held out",
                        remedy="Give lam a number, or hold out rows of users with several")


def _best(path: Path, scores: Scores | None) -> tuple[int, str]:
    """The point with the least loss on rows held out, at the same place of the path."""
    if scores is None:
        raise _unjudged()
    index = int(scores.losses.argmin() * (len(path) - 1) / max(len(scores.losses) - 1, 1) + 0.5)
    return index, f"least mean loss on rows held out, {scores.losses.min():.4g}."


def _clearest(path: Path, seed: int) -> tuple[int, str]:
    """The point whose clusters have the largest silhouette; everyone together where none is clear."""
    from sklearn.metrics import silhouette_score

    points = path.problem.users.moments().means  # users with several rows are judged by their means
    n, best, index = len(points), 0.0, len(path) - 1
    some = np.arange(n) if n <= 2000 else np.random.default_rng(seed).choice(n, 2000, replace=False)
    seen: dict[bytes, float] = {}
    for r, solution in enumerate(path.solutions):
        key, labels = solution.labels.tobytes(), solution.labels[some]
        if 1 < solution.n_clusters <= min(max(np.sqrt(n), 2), n - 1, 200) and key not in seen:
            seen[key] = float(silhouette_score(points[some], labels)) if len(np.unique(labels)) > 1 else -1.0
            if seen[key] > best:
                best, index = seen[key], r
    if best < _CLEAR:
        return len(path) - 1, f"no clusters stand out (largest silhouette {best:.2f}), so everyone is put together."
    return index, f"the clearest clusters, with a silhouette of {best:.2f}."
