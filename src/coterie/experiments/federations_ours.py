"""What this library has to offer a real federation, in the form of the comparators: settings, a grid, `fit`.

    coterie groups    the groups of `find_groups`, one model each
    coterie path      a point of the path on the graph of nearest users, as it is or refitted by cluster
    coterie shrunk    models of one's own, held to the group's by a metric learned from how users differ
    coterie           any of these: a few settings of each, as many as every comparator has

Every evaluation the server asks for is counted as a round, and so is every problem it hands to the users.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Self

import numpy as np

from coterie._typing import Array, Indices, Ints
from coterie.analysis.groups import find_groups
from coterie.analysis.path import solve_path
from coterie.baselines.base import Baseline, Outcome, Ridged, check
from coterie.baselines.ifca import cluster_means
from coterie.baselines.run import Run, near
from coterie.data.users import Users
from coterie.graph.weights import LocalModels, adaptive_graph
from coterie.losses import Evaluation, Loss, Samples
from coterie.losses.linear import Huber, Squared
from coterie.problem import Problem
from coterie.solution import labels_of

_SPREAD = 1e-3  # of the users' models before anything is known of it, in units of standardised features
_WIDEST = 200  # coordinates above which no search over groups is made: its Hessians would take minutes


@dataclass(frozen=True, kw_only=True)
class CoterieGroups(Ridged):
    """minimise_x sum_{i in C_k} f_i(x) for each group C_k that `find_groups` finds.

    Parameters
    ----------
    ridge : added to the loss's own when the groups' models are fitted.
    """

    name: ClassVar[str] = "coterie groups"

    def _fit(self, run: Run) -> Outcome:
        labels = found_labels(run)
        models = run.pool(labels, int(labels.max()) + 1, self.ridge)
        return Outcome(models[labels], models, labels)


@dataclass(frozen=True, kw_only=True)
class CoteriePath(Baseline):
    """minimise sum_i f_i(x_i) + lam sum_{i~j} w_ij ||x_i - x_j|| over each user's nearest by Wald distance.

    Parameters
    ----------
    point : which of the path's `n_lams` lams, from 0 (the smallest).
    refitted : whether each cluster found there is fitted by itself.
    n_lams, k : of the path, and of the graph.
    """

    name: ClassVar[str] = "coterie path"
    point: int = 0
    refitted: bool = False
    n_lams: int = 10
    k: int = 5

    def __post_init__(self) -> None:
        check(point=(self.point, 0, self.n_lams - 1), n_lams=(self.n_lams, 2, np.inf), k=(self.k, 1, np.inf))

    @classmethod
    def grid(cls, users: Users, loss: Loss) -> tuple[Self, ...]:
        return tuple(cls(point=point, refitted=refitted) for refitted in (False, True) for point in (1, 3, 5, 7, 9))

    def _fit(self, run: Run) -> Outcome:
        models = run.once(("path", self.n_lams, self.k), lambda: self._path(run))
        here = models[min(self.point, len(models) - 1)]
        labels = labels_of(here)
        first = np.unique(labels, return_index=True)[1]
        if not self.refitted:
            return Outcome(here, here[first], labels)
        shared = run.pool(labels, len(first), start=here[first])
        return Outcome(shared[labels], shared, labels)

    def _path(self, run: Run) -> Array:
        """(points, n_users, dim) the models along the path."""
        loss, users = told(run), run.samples.users
        if run.dim > _WIDEST:
            return run.own()[None]
        graph = adaptive_graph(LocalModels.of(users, loss, 0.1), "wald", min(self.k, max(users.n_users - 1, 1)))
        path = solve_path(Problem(users, loss, 0.0, graph), n_lams=self.n_lams, tol=1e-4)
        return np.stack([solution.models for solution in path.solutions])


@dataclass(frozen=True, kw_only=True)
class CoterieShrunk(Baseline):
    """minimise_x f_i(x) + factor s / (2 m_i) (x - c_k)' P (x - c_k), c_k the centre of i's group, for every user i.

    m_i f_i / s is user i's negative log-likelihood (s the noise's variance for losses of real numbers, else 1), so this
    is the likeliest x_i where models are spread about their group's centre by a normal distribution of covariance
    P^-1. All of it is learned (EM; Dempster, Laird and Rubin 1977; for other losses than squared with Laplace's
    approximation), round after round:

        x_i = the minimum above with factor 1,    V_i = (m_i H_i / s + P)^-1       at the users
        c_k = mean of x_i over the group,         P^-1 = mean_i (x_i - c_k)(x_i - c_k)' + V_i
        s   = (sum_i m_i 2 f_i(x_i) + tr(m_i H_i V_i)) / sum_i m_i

    A direction in which users agree is pooled, one in which they differ is left to them; users with few samples lean
    on the others.

    Parameters
    ----------
    groups : "one" for one centre, "found" for one centre for each group of `find_groups`.
    shape : of P: "full", "diagonal", or a multiple of the identity ("round").
    factor : of the pull in the end.
    rounds : at most; fewer once nothing moves.

    Traffic: a user and round, c_k and P down, x_i, V_i and two numbers up.
    """

    name: ClassVar[str] = "coterie shrunk"
    groups: Literal["one", "found"] = "one"
    shape: Literal["full", "diagonal", "round"] = "full"
    factor: float = 1.0
    rounds: int = 60

    def __post_init__(self) -> None:
        check(factor=(self.factor, 0.0, np.inf), rounds=(self.rounds, 1, np.inf))

    @classmethod
    def grid(cls, users: Users, loss: Loss) -> tuple[Self, ...]:
        kinds: tuple[tuple[Any, float], ...] = (("full", 1.0), ("full", 0.1), ("diagonal", 1.0), ("diagonal", 0.1),
                                                ("round", 1.0))
        places: tuple[Any, ...] = ("one", "found")
        return tuple(cls(groups=groups, shape=shape, factor=factor, rounds=_turns(users, loss))
                     for groups in places for shape, factor in kinds)

    def _fit(self, run: Run) -> Outcome:
        labels = found_labels(run) if self.groups == "found" else np.zeros(run.n_users, dtype=np.int64)
        # What is learned depends on the groups and the shape only; settings that share them learn it once.
        learned = run.once(("em", self.groups, self.shape, self.rounds), lambda: self._learn(run, labels))
        n, d, k = run.n_users, run.dim, int(labels.max()) + 1
        models, rest = learned[:n * d].reshape(n, d), learned[n * d:]
        centres, metric, noise = rest[:k * d].reshape(k, d), rest[k * d:-1].reshape(d, d), rest[-1]
        if self.factor != 1.0:
            pull = self.factor * noise / run.samples.users.counts
            models = near(run.loss, run.samples, pull[:, None, None] * metric, centres[labels], models)
        return Outcome(models, centres)

    def _learn(self, run: Run, labels: Ints) -> Array:
        """Models, centres, P and s in one vector."""
        loss, samples, n, d = run.loss, run.samples, run.n_users, run.dim
        m, real = samples.users.counts.astype(float), isinstance(loss, (Squared, Huber))
        centres = run.pool(labels, int(labels.max()) + 1, 0.1)
        models = loss.prox(samples, None, 0.1, centres[labels]).points
        noise, size = 1.0, d + d * (d + 1) // 2
        values, _, hessians = loss.evaluate(samples, models, 2)
        if real:
            noise = max(float(2 * (m * values).sum() / m.sum()), 1e-12)
        apart = models - centres[labels]
        metric = np.linalg.inv(self._shaped(apart.T @ apart / n + _SPREAD * np.eye(d)))
        for _ in range(self.rounds):
            curved = m[:, None, None] * hessians
            unsure = np.linalg.inv(curved / noise + metric)
            apart = models - centres[labels]
            metric = np.linalg.inv(self._shaped((apart.T @ apart + unsure.sum(axis=0)) / n))
            if real:
                left = 2 * (m * values).sum() + np.einsum("nij,nji->", curved, unsure)
                noise = max(float(left / m.sum()), 1e-12)
            before = models
            models = near(loss, samples, (noise / m)[:, None, None] * metric, centres[labels], models)
            centres = cluster_means(models, labels, centres)
            values, _, hessians = loss.evaluate(samples, models, 2)
            run.exchange(down=size, up=size + 2)
            if np.abs(models - before).max() <= 1e-3 * np.abs(models).max():
                break
        return np.concatenate([models.ravel(), centres.ravel(), metric.ravel(), [noise]])

    def _shaped(self, covariance: Array) -> Array:
        d = len(covariance)
        mean = float(np.trace(covariance)) / d
        if self.shape == "round":
            return np.eye(d) * mean
        # A thousandth of the mean variance everywhere, since EM may drive a direction's own to nothing.
        return (np.diag(np.diag(covariance)) if self.shape == "diagonal" else covariance) + 1e-3 * mean * np.eye(d)


@dataclass(frozen=True, kw_only=True)
class Coterie(Baseline):
    """Any of the above, whichever does best on validation samples.

    Parameters
    ----------
    method : one of the above, with its settings.
    """

    name: ClassVar[str] = "coterie"
    method: CoterieGroups | CoteriePath | CoterieShrunk = CoterieShrunk()

    @classmethod
    def grid(cls, users: Users, loss: Loss) -> tuple[Self, ...]:
        kinds: tuple[tuple[Any, Any, float], ...] = (
            ("one", "full", 1.0), ("one", "diagonal", 1.0), ("one", "round", 1.0), ("one", "round", 0.01),
            ("found", "full", 1.0), ("found", "diagonal", 1.0), ("found", "round", 1.0))
        shrunk = [CoterieShrunk(groups=groups, shape=shape, factor=factor, rounds=_turns(users, loss))
                  for groups, shape, factor in kinds]
        chosen: tuple[CoterieGroups | CoteriePath | CoterieShrunk, ...] = (
            CoterieGroups(), CoteriePath(point=3), CoteriePath(point=6), *shrunk)
        return tuple(cls(method=method) for method in chosen)

    def _fit(self, run: Run) -> Outcome:
        return self.method._fit(run)


OURS: tuple[type[Baseline], ...] = (Coterie, CoterieShrunk, CoterieGroups, CoteriePath)


def _turns(users: Users, loss: Loss) -> int:
    """Rounds of EM: fewer for wide models, whose covariances take long to invert."""
    return 60 if loss.dim(users) <= 60 else 20


def found_labels(run: Run) -> Ints:
    """The groups among the users; everyone together where models are too wide to search."""

    def search() -> Array:
        if run.dim > _WIDEST:
            return np.zeros(run.n_users)
        return find_groups(run.samples.users, told(run)).labels.astype(float)

    return run.once("groups", search).astype(np.int64)


def told(run: Run) -> Loss:
    """The run's loss with every evaluation counted as a round, and every problem given to the users as one too."""
    base, inside = type(run.loss), [False]

    class Told(base):  # type: ignore[misc, valid-type]
        def evaluate(self, samples: Samples, models: Array, order: int = 2, users: Indices | None = None) -> Evaluation:
            if not inside[0]:
                d = samples.dim
                run.exchange(down=d, up=(1, 1 + d, 1 + d + d * (d + 1) // 2)[order], users=len(models))
            return base.evaluate(self, samples, models, order, users)

        def prox(self, samples: Samples, linear: Array | None, t: Array | float, centres: Array | None,
                 start: Array | None = None, users: Indices | None = None) -> Any:
            outer, inside[0] = inside[0], True
            try:
                return base.prox(self, samples, linear, t, centres, start, users)
            finally:
                inside[0] = outer
                if not outer:
                    asked = samples.n_users if users is None else len(users)
                    run.exchange(down=samples.dim, up=samples.dim + 1, users=asked)

    return Told(**{field.name: getattr(run.loss, field.name) for field in fields(run.loss)})  # type: ignore[arg-type]
