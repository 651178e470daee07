"""The methods of this library in the form of a baseline: settings, a grid, `fit`.

    coterie groups    the groups of `find_groups`, one model per group
    coterie path      a point of the path on the graph of nearest users, as it is or refitted per group
    coterie shrunk    one model per user, shrunk to the centre of its group with a metric learned from the users
    coterie           one of these: a few settings of each, as many as every baseline has

Every evaluation that the server asks for is counted as a round, and so is every problem that the users solve.
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
from coterie.baselines.run import BaselineRun, near
from coterie.data.users import Users
from coterie.graph.weights import LocalModels, adaptive_graph
from coterie.labels import labels_of
from coterie.losses import Evaluation, Loss, Samples
from coterie.losses.linear import Huber, Squared
from coterie.problem import Problem

_SPREAD = 1e-3  # initial variance of the users' models, in units of standardised features
_WIDEST = 200  # largest number of coordinates for a search over groups, whose Hessians otherwise take minutes


@dataclass(frozen=True, kw_only=True)
class CoterieGroups(Ridged):
    """minimise_x sum_{i in C_k} f_i(x) for each group C_k that `find_groups` finds.

    Parameters
    ----------
    ridge
        Ridge, added to that of the loss, for the models of the groups.
    """

    name: ClassVar[str] = "coterie groups"

    def _fit(self, run: BaselineRun) -> Outcome:
        labels = found_labels(run)
        models = run.pool(labels, int(labels.max()) + 1, self.ridge)
        return Outcome(models[labels], models, labels)


@dataclass(frozen=True, kw_only=True)
class CoteriePath(Baseline):
    """minimise sum_i f_i(x_i) + lam sum_{i~j} w_ij ||x_i - x_j|| over the nearest users by Wald distance.

    Parameters
    ----------
    point
        Position on the path, from 0 (the smallest lam).
    refitted
        Whether each group at this point is fitted again separately.
    n_lams
        Number of points of the path.
    k
        Number of nearest users in the graph.
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

    def _fit(self, run: BaselineRun) -> Outcome:
        models = run.once(("path", self.n_lams, self.k), lambda: self._path(run))
        at_point = models[min(self.point, len(models) - 1)]
        labels = labels_of(at_point)
        first = np.unique(labels, return_index=True)[1]
        if not self.refitted:
            return Outcome(at_point, at_point[first], labels)
        shared = run.pool(labels, len(first), start=at_point[first])
        return Outcome(shared[labels], shared, labels)

    def _path(self, run: BaselineRun) -> Array:
        """(points, n_users, dim) the models along the path."""
        loss, users = counted(run), run.samples.users.data
        if run.dim > _WIDEST:
            return run.own()[None]
        graph = adaptive_graph(LocalModels.of(users, loss, 0.1), "wald", min(self.k, max(users.n_users - 1, 1)))
        path = solve_path(Problem(users, loss, 0.0, graph), n_lams=self.n_lams, tol=1e-4)
        return np.stack([solution.models for solution in path.solutions])


@dataclass(frozen=True, kw_only=True)
class CoterieShrunk(Baseline):
    """minimise_x f_i(x) + factor s / (2 m_i) (x - c_k)' P (x - c_k), with c_k the centre of the group of user i.

    m_i f_i / s is the negative log-likelihood of user i (s is the noise variance for losses of real numbers, otherwise
    1), so this is the most likely x_i if models are normally distributed around the centre of their group with
    covariance P^-1. Everything is estimated by EM (Dempster, Laird and Rubin 1977; with Laplace's approximation for
    losses other than squared), in every round:

        x_i = the minimum above with factor 1,    V_i = (m_i H_i / s + P)^-1       at the users
        c_k = mean of x_i over the group,         P^-1 = mean_i (x_i - c_k)(x_i - c_k)' + V_i
        s   = (sum_i m_i 2 f_i(x_i) + tr(m_i H_i V_i)) / sum_i m_i

    Directions in which users agree are pooled; directions in which they differ are not. Models of users with few
    samples are mostly determined by other users.

    Traffic per user and round: c_k and P down; x_i, V_i and two numbers up.

    Parameters
    ----------
    groups
        "one": one centre; "found": one centre per group of `find_groups`.
    shape
        Shape of P: "full", "diagonal", or "isotropic" (a multiple of the identity).
    factor
        Factor of the pull in the final models.
    rounds
        Largest number of rounds; the method stops earlier if nothing changes.
    """

    name: ClassVar[str] = "coterie shrunk"
    groups: Literal["one", "found"] = "one"
    shape: Literal["full", "diagonal", "isotropic"] = "full"
    factor: float = 1.0
    rounds: int = 60

    def __post_init__(self) -> None:
        check(factor=(self.factor, 0.0, np.inf), rounds=(self.rounds, 1, np.inf))

    @classmethod
    def grid(cls, users: Users, loss: Loss) -> tuple[Self, ...]:
        kinds: tuple[tuple[Any, float], ...] = (("full", 1.0), ("full", 0.1), ("diagonal", 1.0), ("diagonal", 0.1),
                                                ("isotropic", 1.0))
        centres: tuple[Any, ...] = ("one", "found")
        return tuple(cls(groups=groups, shape=shape, factor=factor, rounds=_rounds(users, loss))
                     for groups in centres for shape, factor in kinds)

    def _fit(self, run: BaselineRun) -> Outcome:
        labels = found_labels(run) if self.groups == "found" else np.zeros(run.n_users, dtype=np.int64)
        # The estimates depend on the groups and the shape only, so settings that share them compute these once.
        learned = run.once(("em", self.groups, self.shape, self.rounds), lambda: self._learn(run, labels))
        n, d, k = run.n_users, run.dim, int(labels.max()) + 1
        models, others = learned[:n * d].reshape(n, d), learned[n * d:]
        centres, metric, noise = others[:k * d].reshape(k, d), others[k * d:-1].reshape(d, d), others[-1]
        if self.factor != 1.0:
            pull = self.factor * noise / run.samples.users.data.counts
            models = near(run.loss, run.samples, pull[:, None, None] * metric, centres[labels], models)
        return Outcome(models, centres)

    def _learn(self, run: BaselineRun, labels: Ints) -> Array:
        """Estimate models, centres, P and s; all in one vector."""
        loss, samples, n, d = run.loss, run.samples, run.n_users, run.dim
        m, real = samples.users.data.counts.astype(float), isinstance(loss, (Squared, Huber))
        centres = run.pool(labels, int(labels.max()) + 1, 0.1)
        models = loss.prox(samples, None, 0.1, centres[labels]).points
        noise, size = 1.0, d + d * (d + 1) // 2
        values, _, hessians = loss.evaluate(samples, models, 2)
        if real:
            noise = max(float(2 * (m * values).sum() / m.sum()), 1e-12)
        shift = models - centres[labels]
        metric = np.linalg.inv(self._shaped(shift.T @ shift / n + _SPREAD * np.eye(d)))
        for _ in range(self.rounds):
            information = m[:, None, None] * hessians
            covariances = np.linalg.inv(information / noise + metric)
            shift = models - centres[labels]
            metric = np.linalg.inv(self._shaped((shift.T @ shift + covariances.sum(axis=0)) / n))
            if real:
                residual = 2 * (m * values).sum() + np.einsum("nij,nji->", information, covariances)
                noise = max(float(residual / m.sum()), 1e-12)
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
        if self.shape == "isotropic":
            return np.eye(d) * mean
        # A thousandth of the mean variance is added, because EM can reduce the variance of a direction to zero.
        return (np.diag(np.diag(covariance)) if self.shape == "diagonal" else covariance) + 1e-3 * mean * np.eye(d)


@dataclass(frozen=True, kw_only=True)
class Coterie(Baseline):
    """One of the methods above, chosen on validation samples.

    Parameters
    ----------
    method
        The method with its settings.
    """

    name: ClassVar[str] = "coterie"
    method: CoterieGroups | CoteriePath | CoterieShrunk = CoterieShrunk()

    @classmethod
    def grid(cls, users: Users, loss: Loss) -> tuple[Self, ...]:
        kinds: tuple[tuple[Any, Any, float], ...] = (
            ("one", "full", 1.0), ("one", "diagonal", 1.0), ("one", "isotropic", 1.0), ("one", "isotropic", 0.01),
            ("found", "full", 1.0), ("found", "diagonal", 1.0), ("found", "isotropic", 1.0))
        shrunk = [CoterieShrunk(groups=groups, shape=shape, factor=factor, rounds=_rounds(users, loss))
                  for groups, shape, factor in kinds]
        candidates: tuple[CoterieGroups | CoteriePath | CoterieShrunk, ...] = (
            CoterieGroups(), CoteriePath(point=3), CoteriePath(point=6), *shrunk)
        return tuple(cls(method=method) for method in candidates)

    def _fit(self, run: BaselineRun) -> Outcome:
        return self.method._fit(run)


OURS: tuple[type[Baseline], ...] = (Coterie, CoterieShrunk, CoterieGroups, CoteriePath)


def _rounds(users: Users, loss: Loss) -> int:
    """Rounds of EM: fewer for wide models, whose covariances are expensive to invert."""
    return 60 if loss.dim(users) <= 60 else 20


def found_labels(run: BaselineRun) -> Ints:
    """The groups of `find_groups`; one group if models have too many coordinates for the search."""

    def search() -> Array:
        if run.dim > _WIDEST:
            return np.zeros(run.n_users)
        return find_groups(run.samples.users.data, counted(run)).labels.astype(float)

    return run.once("groups", search).astype(np.int64)


def counted(run: BaselineRun) -> Loss:
    """The loss of the run, counting every evaluation, and every problem that the users solve, as a round."""
    base, inside = type(run.loss), [False]

    class CountedLoss(base):  # type: ignore[misc, valid-type]
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

    return CountedLoss(**{field.name: getattr(run.loss, field.name) for field in fields(run.loss)})  # type: ignore[arg-type]
