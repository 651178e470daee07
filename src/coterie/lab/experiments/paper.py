"""The paper's three experiments, reproduced from scratch.

    results = reproduce(ReproductionSettings.quick())
    tables = results.tables()          # the data of the figures, by column
    for claim in claims(results): ...  # coterie.lab.experiments.paper_claims

All lams are in the convention of (C), sum_i f_i(x_i) + lam sum_{i<j} ||x_i - x_j||. The squared
penalty, Eq. (6), is used in the same convention, sum_i f_i(x_i) + gamma sum_{i<j} ||x_i - x_j||^2:
both penalties of the paper as printed are converted by the same factor 2 N, so gamma = lam is the
same comparison as in the paper's figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from coterie.base.errors import InvalidInput
from coterie.base.labels import check_labels
from coterie.base.types import Array, Flags, Ints
from coterie.convex.choice import accuracy_of_users, refit
from coterie.convex.consensus import lam_max
from coterie.convex.path import solve_path
from coterie.convex.recovery import recovery_bounds
from coterie.data.simulated import Dataset, Ellipses, ellipses
from coterie.data.users import Users
from coterie.federated import PDMM, Algorithm, Data, Federation, LocalRuntime, Newton, Participation
from coterie.lab.baselines import Global, Local, Oracle, SquaredPenaltyBaseline
from coterie.losses import SquaredHinge
from coterie.problem.problem import Problem
from coterie.solvers import solve

Table = dict[str, list[Any]]

#: The ellipses of Experiment 1. The paper does not publish its own; these were found by a search
#: (docs/reproduction.md).
PAPER = Ellipses(along=4.99, across=1.79, offset=6.55, centre=0.52, turns=(0.0, 111.0, 209.0))
#: The ellipses of Experiments 2 and 3. They cannot be the same; the page explains why.
PAPER_SECOND = Ellipses(along=1.99, across=6.52, offset=1.94, centre=1.51, turns=(0.0, 34.0, 176.0))
LOSS = SquaredHinge(ridge=1e-3)
# The lams at which the paper finds exactly the three clusters in Experiment 1.
WINDOW = (0.0892, 0.0919)
EIGHT = (1000.0, 1.0, 0.12, 0.08, 0.05, 0.03, 0.02, 0.01)  # the lams of Figure 6
FAR = (10.0, 100.0, 1000.0)  # large lams, at which consensus is checked
LAM, SHARE = 0.02, 0.4  # Experiment 3
TOL = 1e-11  # with a larger tolerance, nearly equal models count as equal, and false windows appear
OURS, REFITTED, SQUARED = "this method", "this method, refitted", "squared penalty"
FLAT = ("global", "local", "oracle")
PRINTED = "Algorithm 1 as printed"
# The current step, the number of steps done, and of all steps.
OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class ReproductionSettings:
    """The size of the experiments.

    Parameters
    ----------
    shape, second
        The ellipses of Experiment 1, and of Experiments 2 and 3.
    seeds
        Number of seeds, from 0; the figures show seed 0 and averages over all seeds.
    step
        Ratio of two neighbouring lams, minus 1, in the range where clusters form (0.02 to 0.3).
    gammas
        Number of strengths in the separate grid of the squared penalty.
    rounds
        Number of rounds of Algorithm 1 as printed; the other algorithms need fewer.
    users, few_users
        Users per cluster in Experiment 1, and in Experiments 2 and 3.
    test_points
        Test points per cluster.

    Example
    -------
    >>> ReproductionSettings.quick().seeds
    3
    """

    shape: Ellipses = PAPER
    second: Ellipses = PAPER_SECOND
    seeds: int = 10
    step: float = 0.02
    gammas: int = 41
    rounds: int = 20_000
    users: int = 20
    few_users: int = 10
    test_points: int = 600

    def __post_init__(self) -> None:
        for name in ("seeds", "gammas", "rounds", "users", "few_users"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} must be at least 1, got {getattr(self, name)!r}",
                                   remedy="Omit it to use the default")
        if not 0 < self.step <= 1:
            raise InvalidInput(f"step must be in (0, 1], got {self.step!r}", remedy="Use 0.02")

    @classmethod
    def quick(cls, seeds: int = 3) -> ReproductionSettings:
        """ReproductionSettings for less than two minutes: fewer seeds, lams and rounds."""
        return cls(seeds=seeds, step=0.05, gammas=21, rounds=6_000)

    @property
    def lams(self) -> Array:
        """Lams from 0.001 to 1000, dense in the range where clusters form; includes those that the
        paper names.
        """
        fine = np.geomspace(0.02, 0.3, int(np.ceil(np.log(15.0) / np.log1p(self.step))) + 1)
        coarse = max(4, fine.size // 5)
        return np.unique(np.concatenate([np.geomspace(1e-3, 0.02, coarse), fine,
                                         np.geomspace(0.3, 1e3, coarse), WINDOW,
                                         [np.mean(WINDOW)], FAR]).round(12))


@dataclass(frozen=True, kw_only=True, eq=False)
class First:
    """Experiment 1 with one seed: accuracies are means over users, distances over pairs of one true
    cluster.
    """

    seed: int
    lams: Array
    n_clusters: Ints
    exact: Flags  # (n_lams,) whether the clusters of the solution are the true ones
    accuracy: dict[str, Array]  # (n_lams,) by method
    distance: dict[str, Array]
    flat: dict[str, float]  # accuracy of the methods without lam
    gammas: Array  # the separate grid of the squared penalty
    own_accuracy: Array
    own_distance: Array
    window: tuple[float, float] | None  # the lams at which the clusters are exact
    consensus: float  # the smallest lam at which all users share one model
    # (3,) largest distance of a user's model from the global model, at FAR.
    from_global: dict[str, Array]
    n_users: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Second:
    """Experiment 2 with one seed, at the eight lams."""

    seed: int
    clusters: Ints
    models: Array  # (8, n_users, 3)
    squared: Array  # (8, n_users, 3)
    n_clusters: Ints
    exact: Flags
    lower: Array  # (8,) Theorem 1 and Theorem 2 at each lam, for the true clusters
    upper: Array
    accuracy: Array  # (8,)
    refitted: Array  # (8,)


class Curve(NamedTuple):
    """The convergence of an algorithm: F - F* in the convention of (C), at geometrically spaced
    rounds.
    """

    name: str
    share: float
    rounds: list[int]
    gaps: list[float]


@dataclass(frozen=True, kw_only=True, eq=False)
class Results:
    """The results of all experiments."""

    settings: ReproductionSettings
    first: tuple[First, ...]  # one per seed
    second: tuple[Second, ...]
    same: tuple[Second, ...]  # Experiment 2 on the ellipses of Experiment 1
    curves: tuple[Curve, ...]
    optimum: float  # F* of Experiment 3
    # All points of Experiments 1 and 2, seed 0; one user per cluster.
    pools: tuple[Users, Users] = field(repr=False)

    def tables(self) -> dict[str, Table]:
        """The data of the figures; each table is written as a CSV file, and the figures use these
        tables only.
        """
        first, second = self.pools
        return {"figure-1-points": _points(first), "figure-1-separators": _optimal(first),
                "figure-2": self._over_lam("accuracy", FLAT),
                "figure-2-own-strength": self._own("own_accuracy"),
                "figure-3": self._over_lam("distance"),
                "figure-3-own-strength": self._own("own_distance"), "recovery": self._recovery(),
                "figure-4-points": _points(second), "figure-4-separators": _optimal(second),
                "figure-5": self._curves(), "figure-6": self._models(),
                "figure-6-summary": self._summary()}

    def _over_lam(self, quantity: str, flat: Sequence[str] = ()) -> Table:
        table: Table = {"lam": self.first[0].lams.tolist()}
        for name in (OURS, REFITTED, SQUARED):
            table |= _spread(name, np.stack([getattr(run, quantity)[name] for run in self.first]))
        for name in flat:
            values = np.array([[run.flat[name]] for run in self.first])
            table |= _spread(name, np.repeat(values, len(table["lam"]), axis=1))
        return table

    def _own(self, quantity: str) -> Table:
        return {"gamma": self.first[0].gammas.tolist(),
                **_spread(SQUARED, np.stack([getattr(run, quantity) for run in self.first]))}

    def _recovery(self) -> Table:
        best = [f"best accuracy, {name}" for name in (OURS, REFITTED, SQUARED)]
        names = ("seed", "exact from", "exact to", "one model from", *best,
                 *(f"accuracy, {name}" for name in FLAT))
        return table_of(names, (
            (run.seed, *(run.window or (np.nan, np.nan)), run.consensus,
             *(float(run.accuracy[name].max()) for name in (OURS, REFITTED)),
             float(run.own_accuracy.max()), *(run.flat[name] for name in FLAT))
            for run in self.first))

    def _curves(self) -> Table:
        return table_of(("algorithm", "share of users", "round", "gap", "relative gap"),
                        ((curve.name, curve.share, number, gap, gap / self.optimum)
                         for curve in self.curves
                         for number, gap in zip(curve.rounds, curve.gaps, strict=True)))

    def _models(self) -> Table:
        run = self.second[0]
        return table_of(("lam", "method", "user", "cluster", "w1", "w2", "b"),
                        ((lam, method, user, int(run.clusters[user]), *model)
                         for k, lam in enumerate(EIGHT)
                         for method, models in ((OURS, run.models), (SQUARED, run.squared))
                         for user, model in enumerate(models[k].tolist())))

    def _summary(self) -> Table:
        return table_of(("ellipses", "seed", "lam", "models", "exact", "Theorem 1: lam from",
                         "Theorem 2: lam below", "accuracy", "accuracy, refitted",
                         "largest distance, squared penalty"),
                        ((shape, run.seed, lam, int(run.n_clusters[k]), bool(run.exact[k]),
                          float(run.lower[k]), float(run.upper[k]), float(run.accuracy[k]),
                          float(run.refitted[k]), float(pair_distances(run.squared[k]).max()))
                         for shape, runs in (("second", self.second), ("first", self.same))
                         for run in runs for k, lam in enumerate(EIGHT)))


def table_of(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """Rows as columns."""
    return dict(zip(names, (list(column) for column in zip(*rows, strict=True)), strict=True))


def _spread(name: str, runs: Array) -> Table:
    """Columns with the values of seed 0, the means over seeds, and the standard deviations."""
    sd = runs.std(axis=0, ddof=1) if len(runs) > 1 else np.zeros(runs.shape[1])
    return {name: runs[0].tolist(), f"{name}, mean": runs.mean(axis=0).tolist(),
            f"{name}, sd": sd.tolist()}


def _points(pool: Users) -> Table:
    assert pool.targets is not None
    x, y = pool.features.T.tolist()
    return {"cluster": pool.owner.tolist(), "label": pool.targets.astype(int).tolist(),
            "x": x, "y": y}


def _optimal(pool: Users) -> Table:
    models = LOSS.local(LOSS.prepare(pool)).points
    return table_of(("cluster", "w1", "w2", "b"),
                    ((k, *model) for k, model in enumerate(models.tolist())))


def reproduce(settings: ReproductionSettings | None = None,
              progress: OnProgress | None = None) -> Results:
    """Run all experiments; the same settings give the same results.

    Parameters
    ----------
    settings
        The size of the experiments; the default is `ReproductionSettings()`.
    progress
        Called before each step.

    Returns
    -------
    Results
        The input of `claims` and of the figures.
    """
    settings = ReproductionSettings() if settings is None else settings
    seeds, solvers = range(settings.seeds), algorithms(settings)
    total, done = 3 * settings.seeds + len(solvers), 0

    def report(text: str) -> None:
        if progress is not None:
            progress(text, done, total)

    def step(text: str, run: Callable[..., Any], *given: Any) -> Any:
        nonlocal done
        report(text)
        result = run(*given)
        done += 1
        return result

    first = [step(f"Experiment 1, seed {seed}", experiment_1, settings, seed) for seed in seeds]
    pairs = [[step(f"Experiment 2{on}, seed {seed}", experiment_2, shape, settings, seed)
              for on, shape in (("", settings.second),
                                (" on the ellipses of Experiment 1", settings.shape))]
             for seed in seeds]
    problem = Problem(_few(settings.second, settings, 0).users, LOSS, LAM)
    optimum = solve(problem, tol=1e-12).objective
    curves = [step(f"Experiment 3: {solver[0]}", observe, problem, *solver, optimum, report)
              for solver in solvers]
    report("Done")
    pools = (pool(settings.shape, 0, settings.users, settings.test_points),
             pool(settings.second, 0, settings.few_users, settings.test_points))
    second, same = zip(*pairs, strict=True)
    return Results(settings=settings, first=tuple(first), second=second, same=same,
                   curves=tuple(curves), optimum=optimum, pools=pools)


def pool(shape: Ellipses, seed: int, users: int, test_points: int, points: int = 200) -> Users:
    """All training points of each cluster; `ellipses` with the same seed draws the points of the
    users from them.
    """
    rng = np.random.default_rng(seed)
    drawn = []
    for cluster in range(shape.n_clusters):
        drawn.append(shape.draw(cluster, points // 2, rng))
        # In the order of `ellipses`: points, test points, points per user.
        shape.draw(cluster, test_points // 2, rng)
        rng.permuted(np.tile(np.arange(points), (users, 1)), axis=1)
    return Users.from_arrays(np.concatenate([x for x, _ in drawn]),
                             np.concatenate([y for _, y in drawn]),
                             np.repeat(np.arange(shape.n_clusters), points))


def mean_accuracy(models: Array, data: Dataset) -> float:
    """The mean over users of the accuracy of the user's model on the test points of its cluster."""
    assert data.test is not None
    return float(accuracy_of_users(LOSS, models, data.test).mean())


def pair_distances(points: Array) -> Array:
    """The distances of all pairs of points."""
    from scipy.spatial.distance import pdist  # takes long to import

    return np.asarray(pdist(points))


def within(models: Array, clusters: Ints) -> float:
    """The mean distance between two models of the same true cluster, averaged over clusters."""
    return float(np.mean([pair_distances(models[clusters == k]).mean()
                          for k in np.unique(clusters)]))


def squared_models(users: Users, gamma: float) -> Array:
    """The models with the penalty gamma sum_{i<j} ||x_i - x_j||^2."""
    return SquaredPenaltyBaseline(strength=2.0 * gamma * users.n_users).fit(users, LOSS).models


def experiment_1(settings: ReproductionSettings, seed: int) -> First:
    """Run Experiment 1 (Figures 1 to 3): three clusters, ten points per user."""
    data = ellipses(shape=settings.shape, users_per_cluster=settings.users, seed=seed,
                    test_points=settings.test_points)
    assert data.clusters is not None
    problem, lams = Problem(data.users, LOSS, 1.0), settings.lams
    truth = check_labels(data.clusters, problem.n_users)
    # 1. Models along lam, by both penalties, and those without lam.
    path = solve_path(problem, lams, tol=TOL)
    keys = [s.labels.tobytes() for s in path.solutions]
    last = dict(zip(keys, path.solutions, strict=True))  # a point with each of the groups
    refits = {key: refit(problem, point.labels) for key, point in last.items()}
    models = {OURS: [s.models for s in path.solutions], REFITTED: [refits[key] for key in keys],
              SQUARED: [squared_models(data.users, lam) for lam in lams]}
    gammas = np.geomspace(1e-7, 1e3, settings.gammas)
    own = [squared_models(data.users, gamma) for gamma in gammas]
    flat = {method.name: method.fit(data.users, LOSS, clusters=truth).models
            for method in (Global(), Local(), Oracle())}
    # 2. How good they are, and where the clusters are the true ones.
    exact = np.array([np.array_equal(s.labels, truth) for s in path.solutions])
    window = None
    if exact.any():
        low, high = path.window(truth)
        window = (low.upper, high.lower)
    far = [int(np.flatnonzero(lams == lam)[0]) for lam in FAR]

    def accuracies(along: Iterable[Array]) -> Array:
        return np.array([mean_accuracy(x, data) for x in along])

    def distances(along: Iterable[Array]) -> Array:
        return np.array([within(x, truth) for x in along])

    def from_global(name: str) -> Array:
        return np.array([np.linalg.norm(models[name][k] - flat["global"], axis=1).max()
                         for k in far])

    return First(
        seed=seed, lams=lams, n_clusters=path.n_clusters, exact=exact, gammas=gammas, window=window,
        accuracy={name: accuracies(along) for name, along in models.items()},
        distance={name: distances(along) for name, along in models.items()},
        flat={name: mean_accuracy(x, data) for name, x in flat.items()},
        own_accuracy=accuracies(own), own_distance=distances(own), n_users=problem.n_users,
        consensus=lam_max(problem, rtol=1e-4).upper,
        from_global={name: from_global(name) for name in (OURS, SQUARED)})


def _few(shape: Ellipses, settings: ReproductionSettings, seed: int) -> Dataset:
    return ellipses(shape=shape, users_per_cluster=settings.few_users, samples=0.85, seed=seed,
                    test_points=settings.test_points)


def experiment_2(shape: Ellipses, settings: ReproductionSettings, seed: int) -> Second:
    """Run Experiment 2 (Figures 4 and 6): three clusters, every user holds 85 % of its cluster's
    points.

    Parameters
    ----------
    shape
        The ellipses.
    settings
        The size of the experiment.
    seed
        Seed of the data.

    Returns
    -------
    Second
        The models at the eight lams, with bounds and accuracies.
    """
    data = _few(shape, settings, seed)
    assert data.clusters is not None
    problem, truth = Problem(data.users, LOSS, 1.0), check_labels(data.clusters, data.users.n_users)
    solutions = [solve(problem.with_lam(lam), tol=TOL) for lam in EIGHT]
    bounds = [recovery_bounds(problem.with_lam(lam), truth) for lam in EIGHT]
    return Second(
        seed=seed, clusters=truth, models=np.stack([s.models for s in solutions]),
        squared=np.stack([squared_models(data.users, lam) for lam in EIGHT]),
        n_clusters=np.array([s.n_clusters for s in solutions]),
        exact=np.array([np.array_equal(s.labels, truth) for s in solutions]),
        lower=np.array([b.lower for b in bounds]), upper=np.array([b.upper for b in bounds]),
        accuracy=np.array([mean_accuracy(s.models, data) for s in solutions]),
        refitted=np.array([mean_accuracy(refit(problem, s.labels), data) for s in solutions]))


def algorithms(settings: ReproductionSettings) -> Sequence[tuple[str, Algorithm, float, int]]:
    """The algorithms of Experiment 3: as in the paper, the same with all users in every round, and
    two others.
    """
    # Same iterates as with the edges at the users, but faster.
    printed = PDMM.printed(edge_state="server")
    return ((PRINTED, printed, SHARE, settings.rounds),
            (f"{PRINTED}, all users", printed, 1.0, settings.rounds),
            ("Algorithm 1 corrected", PDMM(), SHARE, min(settings.rounds, 2_000)),
            ("Newton", Newton(), SHARE, min(settings.rounds, 14)))


def observe(problem: Problem, name: str, algorithm: Algorithm, share: float, last: int,
            optimum: float, report: Callable[[str], None]) -> Curve:
    """Run an algorithm from zero, and evaluate the objective of its models after some of the
    rounds.
    """
    federation = Federation.of(problem, participation=Participation(fraction=share))
    method = algorithm.on(federation)
    zero = np.zeros((problem.n_users, problem.dim))
    state = method.begin(zero)
    runtime = LocalRuntime(Data.of(problem.users.data, problem.loss))
    marks = set(np.geomspace(1, last, 150).round().astype(int).tolist())
    curve = Curve(name, share, [0], [problem.objective(zero) - optimum])
    for number in range(1, last + 1):
        state = method.tell(state, runtime.exchange(method.ask(state)).batches[0])
        if number in marks:
            curve.rounds.append(number)
            curve.gaps.append(max(problem.objective(method.point(state)[0]) - optimum, 0.0))
        if number % 500 == 0:
            report(f"Experiment 3: {name}, round {number:,}")
    return curve
