"""From users to groups and models with nothing left to choose: what `coterie fit` and the estimators do.

    fitted = fit(users, Settings(task="classification"))      # fitted.solution, fitted.path, fitted.scores

1. Features are standardised, and an intercept is added (`coterie.fitting.units`).
2. Groups are found, and weights made from them (`coterie.fitting.plan`).
3. The path over lam goes from everyone alone through these groups to everyone together.
4. Where on it the clusters are the groups, the solution is certified: no other models are better for this convex
   problem. That the groups are right is a matter of the criterion in `coterie.analysis.groups`.
5. All of it is done again with a part of every user's rows held out, which judge it: `Scores`.

Points with one row each have no noise to judge groups by; there the weights are Gaussian, and the lam of the clearest
clusters (by silhouette, Rousseeuw 1987) is taken.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from coterie._typing import Array, Flags, Ints
from coterie.analysis.path import InNotebook, Path
from coterie.analysis.select import refit
from coterie.data.encoding import Task
from coterie.data.users import Users
from coterie.errors import CoterieWarning, InvalidInput
from coterie.fitting.plan import Kept, Plan, Progress, Settings, make_plan, walk
from coterie.fitting.units import Units
from coterie.newcomers import Joined, join
from coterie.solution import Solution
from coterie.solvers import solve

METRICS: dict[Task, str] = {"classification": "accuracy", "regression": "RMSE", "counts": "deviance"}
_CLEAR = 0.5  # below this silhouette the structure is weak and could be artificial (Kaufman and Rousseeuw 1990)
_SHOWN = 2000  # users up to whom held-out scores are computed along the whole path

__all__ = ["Fit", "Scores", "Settings", "fit"]


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
    chosen: int  # the row of `points` that `here` is
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

    def models_of(self, names: npt.ArrayLike) -> tuple[Array, Flags]:
        """(n, dim) the model of each user named, one for all where there is none; and who is known."""
        place = {name: i for i, name in enumerate(self.solution.problem.users.names)}
        found = np.array([place.get(name, -1) for name in np.asarray(names, dtype=object).tolist()], dtype=np.int64)
        models = np.concatenate([self.solution.models, self.together[None]])
        return models[found], found >= 0

    def personalize(self, newcomers: Users) -> Joined:
        """Models for newcomers (in the units given), everyone else's staying as they are.

        They are joined to the group likeliest for their rows, with the pull that users have on average inside. On
        weights other than "auto" everyone pulls, as `Solution.personalize` has it.
        """
        newcomers, solution = self.units.inner(newcomers), self.solution
        if self.settings.weights != "auto":
            return solution.personalize(newcomers)
        problem, labels = solution.problem, solution.labels
        loss, graph = problem.loss, problem.graph
        samples, shape = loss.prepare(newcomers), (newcomers.n_users, problem.dim)
        anchors = solution.models[np.unique(labels, return_index=True)[1]]
        likeliest = np.stack([loss.values(samples, np.broadcast_to(a, shape)) for a in anchors]).argmin(axis=0)
        inside = labels[graph.edges[:, 0]] == labels[graph.edges[:, 1]]
        pull = 2.0 * float(graph.weights[inside].sum()) / problem.n_users
        models, clusters, slack = np.empty(shape), np.empty(shape[0], dtype=np.int64), np.empty(shape[0])
        for k in np.unique(likeliest):
            who, members = np.flatnonzero(likeliest == k), np.flatnonzero(labels == k)
            joined = join(problem, solution.models[members], np.zeros_like(members), newcomers.take(who),
                          pull / len(members))
            models[who], slack[who] = joined.models, joined.slack
            clusters[who] = np.where(joined.clusters < 0, -1, k)
        return Joined(newcomers, models, clusters, slack)


def fit(users: Users, settings: Settings, *, progress: Progress | None = None,
        store: Kept | None = None) -> Fit:
    """Find groups and models; Ctrl-C raises Interrupted, and what is done is in `store`.

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
    kept: Kept = {} if store is None else store
    units = _units(users, settings)
    inner = units.inner(users)
    for concern in units.loss.concerns(inner):
        warnings.warn(concern, CoterieWarning, stacklevel=2)
    plan = make_plan(inner, units.loss, settings, tell, kept, "")
    path = walk(plan, settings, tell, kept, "")
    scores = _judge(users, settings, tell, kept) if judged else None
    index, why = _at_groups(plan, path)
    if index < 0:
        index, why = _clearest(path, settings.seed) if points else _best(path, scores)
    chosen = path[index]
    solution = solve(chosen.problem, tol=settings.tol, start=chosen)  # once more, for its duals
    together = refit(plan.problem, np.zeros(inner.n_users, dtype=np.int64))[0]
    return Fit(settings=settings, units=units, solution=solution, path=path, chosen=index, together=together, why=why,
               scores=scores)


def _units(users: Users, settings: Settings, n_classes: int = 0) -> Units:
    return Units.learn(users, settings.task, loss=settings.loss, ridge=settings.ridge,
                       n_classes=max(n_classes, settings.n_classes), standardize=settings.standardize)


def _at_groups(plan: Plan, path: Path) -> tuple[int, str]:
    """The plan's point, or the nearest one at which the clusters are the groups; and why."""
    index, why = plan.chosen, plan.why
    if plan.groups is None or np.array_equal(path[index].labels, plan.groups):
        return index, why
    same = [r for r, solution in enumerate(path.solutions) if np.array_equal(solution.labels, plan.groups)]
    if same:
        return min(same, key=lambda r: abs(r - index)), why
    return index, f"{why} The path passes them by; here are {path[index].n_clusters} clusters."


def _judge(users: Users, settings: Settings, tell: Progress, kept: Kept) -> Scores | None:
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
    plan = make_plan(inner, units.loss, settings, tell, kept, part)
    if users.n_users <= _SHOWN or plan.chosen < 0:
        path = walk(plan, settings, tell, kept, part)
        models, index = [s.models for s in path.solutions], _at_groups(plan, path)[0]
    else:
        tell(f"{part}path", 0, 1, "")
        models, index = [solve(plan.problem.with_lam(float(plan.lams[plan.chosen])), tol=1e-4).models], 0
    judged = units.inner(test.take(np.flatnonzero(present)))
    samples, loss = units.loss.prepare(judged), units.loss
    with np.errstate(over="ignore"):  # a count beyond all bounds
        losses = np.array([loss.values(samples, m[present]).mean() for m in models])
    here = index if index >= 0 else int(losses.argmin())
    scores = np.stack([units.scores(m, test) for m in models])
    one = refit(plan.problem, np.zeros(users.n_users, dtype=np.int64))
    return Scores(metric=METRICS[settings.task], larger=classes, here=scores[here],
                  alone=units.scores(plan.problem.loss.local(plan.problem.samples).points, test),
                  together=units.scores(one, test), points=scores, losses=losses, chosen=here,
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

    points = path.problem.users.data.moments().means  # users with several rows are judged by their means
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
