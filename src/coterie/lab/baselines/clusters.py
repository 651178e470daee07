"""Methods that find clusters of users: by least loss, by splits, and from the local models."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from coterie.base.errors import Incompatible, InvalidInput
from coterie.base.labels import group_means
from coterie.base.types import Array, Flags, Indices, Ints
from coterie.convex.consensus import lam_max
from coterie.data.moments import Standardizer
from coterie.data.users import Users
from coterie.lab.baselines.base import BUDGET, Baseline, BaselineRun, Choices, Outcome
from coterie.lab.baselines.pooling import curvature, descend, unchanged
from coterie.losses import Loss, Samples, SquaredDistance
from coterie.losses.blocks import in_blocks
from coterie.losses.newton import minimise
from coterie.problem.problem import Problem
from coterie.solvers import solve_quietly

_START_RIDGE = 1e-3  # of the local models of random users, which are starts
_TOL = 1e-6  # relative gap of the convex clustering


def cluster_counts(users: Users, loss: Loss) -> tuple[int, ...]:
    return tuple(range(1, min(BUDGET, users.n_users) + 1))


def few_counts(users: Users, loss: Loss) -> tuple[int, ...]:
    return tuple(k for k in (1, 2, 3, 4, 6) if k <= users.n_users)


# By least loss


@dataclass(frozen=True, kw_only=True)
class HypCluster(Baseline):
    """minimise over models and labels  sum_i f_i(model_{label_i}), alternating between labels and
    models.

    Mansour, Mohri, Ro and Suresh, 2020, "Three approaches for personalization with applications to
    federated learning". In the paper some of the users take a few gradient steps between
    assignments; here the models are exact each time, so the sum decreases until no user changes its
    cluster. The starts are the local models of random users.

    Traffic: for an assignment n_clusters dim numbers down and 1 up per user; between assignments as
    in `BaselineRun.pool`.

    Parameters
    ----------
    n_clusters
        Number of clusters.
    rounds
        Largest number of assignments per start.
    restarts
        Number of starts; the one with the least training loss is used.
    """

    name: ClassVar[str] = "hypcluster"
    choices: ClassVar[Choices] = {"n_clusters": cluster_counts}
    n_clusters: int = 2
    rounds: int = 50
    restarts: int = 5

    def _fit(self, run: BaselineRun) -> Outcome:
        k, n = self.n_clusters, run.n_users
        check_count(k, n)
        own = run.held(_START_RIDGE)
        # One start is enough for one cluster.
        starts = [own[run.rng.choice(n, k, replace=False)]
                  for _ in range(self.restarts if k > 1 else 1)]
        _, labels, models = min((self._train(run, models) for models in starts),
                                key=lambda end: end[0])
        models = self._refine(run, labels, models)
        return models[labels], models, labels

    def _train(self, run: BaselineRun, models: Array) -> tuple[float, Ints, Array]:
        """Training loss, clusters and models after one start."""
        labels = np.full(run.n_users, -1)
        for _ in range(self.rounds):
            losses = run.losses(models)
            run.exchange(down=models.size, up=1)
            before, labels = labels, losses.argmin(axis=1)
            if np.array_equal(before, labels):
                break
            models = run.pool(labels, self.n_clusters, start=models)
        return float(run.losses(models)[np.arange(run.n_users), labels].sum()), labels, models

    def _refine(self, run: BaselineRun, labels: Ints, models: Array) -> Array:
        """The models of the best start as they are handed out."""
        return models


@dataclass(frozen=True, kw_only=True)
class IFCA(HypCluster):
    """label_i = argmin_k f_i(model_k);  model_k <- mean over {i: label_i = k} of `steps` gradient
    steps from model_k

    Ghosh, Chung, Yin and Ramchandran, 2020, "An efficient framework for clustered federated
    learning", with model averaging. In the paper several starts from random models are run and the
    best is kept; here the random models are the local models of n_clusters random users, and the
    best start is that with the least training loss. A start ends when no user has changed its
    cluster in five rounds. The clusters of the best start are then fitted exactly, which is the
    limit of its rounds.

    Traffic: n_clusters dim numbers down and dim + 1 up per user and round of every start; at the
    end as in `BaselineRun.pool`.

    Parameters
    ----------
    n_clusters
        Number of clusters.
    steps, rate
        As for `FedAvgBaseline`.
    rounds
        Largest number of rounds per start.
    restarts
        Number of starts.
    """

    name: ClassVar[str] = "ifca"
    rounds: int = 100
    restarts: int = 10
    steps: int = 5
    rate: float = 1.0

    def _train(self, run: BaselineRun, models: Array) -> tuple[float, Ints, Array]:
        labels, n_unchanged = np.full(run.n_users, -1), 0
        for _ in range(self.rounds):
            losses = run.losses(models)
            before, labels = labels, losses.argmin(axis=1)
            n_unchanged = n_unchanged + 1 if np.array_equal(before, labels) else 0
            if n_unchanged == 5:
                break
            own = models[labels]
            length = self.rate / curvature(run.loss, run.samples, own).max()
            trained = descend(run.loss, run.samples, own, length, self.steps)
            models = cluster_means(trained, labels, models)
            run.exchange(down=models.size, up=run.dim + 1)
        return float(losses.min(axis=1).sum()), labels, models

    def _refine(self, run: BaselineRun, labels: Ints, models: Array) -> Array:
        return run.pool(labels, self.n_clusters, start=models)


# By splits


@dataclass(frozen=True, kw_only=True)
class CFL(Baseline):
    """Fit one model; if some gradients at it are large, split the users in two by cosines; repeat
    for both parts.

    Sattler, Mueller and Samek, 2020, "Clustered federated learning: model-agnostic distributed
    multi-task optimization under privacy constraints". Let g_i be the gradient of user i at the
    model of its cluster. The cluster is split if

        ||mean_i g_i|| < eps1   and   max_i ||g_i|| > eps2

    with eps1 = 0.4 and eps2 = 1.6 in the authors' code. Our models are exact, so the first
    condition always holds. The second depends on the loss and on the units. Therefore ||g_i|| is
    measured relative to the noise that the m_i samples of user i would cause if all users of the
    cluster had the same distribution,

        ||g_i|| / sqrt(v / m_i),    v = the mean over users of the variance of the gradient of one
                                    sample

    so 1 is the typical value for one user by chance; among many users, or with few coordinates,
    some exceed 1.6 by chance. The two parts are, by `rule`,
        "code"   complete linkage on -cosine, as in the authors' code, for clusters of more than two
                 users;
        "paper"  single linkage, which minimises the largest cosine a between the parts (their
                 Algorithm 1), and a split only if a < sqrt((1 - gamma) / 2) (their Algorithm 3;
                 gamma is 0 here: noise is in v).

    Traffic: as in `BaselineRun.pool`; for each level of splits dim numbers down and dim + 1 up per
    user.

    Parameters
    ----------
    eps2
        Threshold on the largest relative gradient.
    rule
        How a cluster is split: "code" or "paper".
    """

    name: ClassVar[str] = "cfl"
    choices: ClassVar[Choices] = {"rule": ("code", "paper"), "eps2": (1.2, 1.6, 2.4, 4.0, 8.0)}
    eps2: float = 1.6
    rule: Literal["code", "paper"] = "code"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule not in ("code", "paper"):
            raise InvalidInput(f"unknown rule {self.rule!r}", remedy="Choose 'code' or 'paper'")

    def _fit(self, run: BaselineRun) -> Outcome:
        users = run.samples.users.data
        # Every sample as a separate user, to get the gradients of single samples.
        singles = run.loss.prepare(Users.from_arrays(users.features, users.targets))
        labels, final = np.zeros(run.n_users, dtype=np.int64), set[int]()
        models = run.pool(labels, 1)
        while True:
            # 1. Gradients of users, and how those of their samples scatter.
            gradients = run.loss.gradients(run.samples, models[labels])
            spread = run.loss.gradients(singles, models[labels][users.owner])
            spread -= gradients[users.owner]
            squares = np.bincount(users.owner, (spread**2).sum(axis=1), run.n_users).astype(float)
            run.exchange(down=run.dim, up=run.dim + 1)
            # 2. Split what disagrees.
            before = len(models)
            for cluster in sorted(set(range(before)) - final):
                members = np.flatnonzero(labels == cluster)
                second = self._split(gradients[members], squares[members], users.counts[members])
                if second is None:
                    final.add(cluster)
                else:
                    labels[members[second]] = len(models)
                    models = np.concatenate([models, models[[cluster]]])
            # 3. Fit the parts.
            if len(models) == before:
                return models[labels], models, labels
            models = run.pool(labels, len(models), start=models)

    def _split(self, gradients: Array, squares: Array, counts: Ints) -> Flags | None:
        """Which users form the second part; None if the cluster is not split."""
        from scipy.cluster.hierarchy import fcluster, linkage
        from scipy.spatial.distance import squareform

        norms, code = np.linalg.norm(gradients, axis=1), self.rule == "code"
        several = counts > 1
        variance = (squares[several] / (counts[several] - 1)).mean() if several.any() else 1.0
        relative = norms / np.sqrt(max(variance, 1e-300) / counts)
        if len(counts) <= (2 if code else 1) or not norms.any() or relative.max() <= self.eps2:
            return None
        units = gradients / np.maximum(norms, 1e-300)[:, None]
        cosines = units @ units.T
        distances = squareform(np.maximum(1.0 - cosines, 0.0), checks=False)
        second = fcluster(linkage(distances, "complete" if code else "single"), 2, "maxclust") == 2
        if not second.any() or (not code and cosines[second][:, ~second].max() >= np.sqrt(0.5)):
            return None
        return np.asarray(second)


# From the local models


@dataclass(frozen=True, kw_only=True)
class KMeans(Baseline):
    """k-means (Lloyd, 1982; k-means++, best of ten starts) on the local models, then one exact fit
    per cluster.

    Dennis, Li and Smith, 2021, "Heterogeneity for the win: one-shot federated clustering", and
    Ghosh et al., 2019, are methods of this kind.

    Traffic: dim numbers up, once per user; then as in `BaselineRun.pool`.

    Parameters
    ----------
    n_clusters
        Number of clusters.
    ridge
        L2 strength, intercept included, of the local models that are compared; needed for users
        with few samples.
    """

    name: ClassVar[str] = "k_means"
    choices: ClassVar[Choices] = {"n_clusters": few_counts, "ridge": (0.01, 0.1)}
    n_clusters: int = 2
    ridge: float = 0.1

    def _fit(self, run: BaselineRun) -> Outcome:
        labels = k_means(run.held(self.ridge), self.n_clusters, run.rng)
        run.exchange(down=0, up=run.dim)
        models = run.pool(labels, self.n_clusters)
        return models[labels], models, labels


@dataclass(frozen=True, kw_only=True)
class ODCL(Baseline):
    """ODCL-CC (Armacki, Bajovic, Jakovetic and Kar, 2022, arXiv 2209.10866): convex clustering of
    the local models a_i.

        minimise  1/2 sum_i ||z_i - a_i||^2 + lam sum_{i<j} ||z_i - z_j||

    Users with equal z_i form a cluster, and get the mean of its a_i.

    Traffic: dim numbers up and dim numbers down, once per user.

    Parameters
    ----------
    ridge
        L2 strength, intercept included, of the local models; needed for users with few samples.
    share
        lam over the smallest lam at which all users form one cluster.
    """

    name: ClassVar[str] = "odcl"
    choices: ClassVar[Choices] = {"share": (0.3, 0.5, 0.7, 0.9, 1.0), "ridge": (0.01, 0.1)}
    ridge: float = 0.1
    share: float = 0.9

    def _fit(self, run: BaselineRun) -> Outcome:
        return average_models(run, self.ridge, self._labels)

    def _labels(self, own: Array) -> Ints:
        n_users, dim = own.shape
        if n_users == 1 or self.share == 1.0:
            return np.zeros(n_users, dtype=np.int64)
        if dim > n_users:  # the same distances in fewer coordinates
            left, scales, _ = np.linalg.svd(own - own.mean(axis=0), full_matrices=False)
            own = left * scales
        problem = Problem(Users.from_arrays(own), SquaredDistance(), 0.0)
        return solve_quietly(problem.with_lam(self.share * lam_max(problem).upper), tol=_TOL).labels


@dataclass(frozen=True, kw_only=True)
class ODCLKMeans(KMeans):
    """ODCL-KM (Armacki, Bajovic, Jakovetic and Kar, 2022): k-means on the local models instead of
    convex clustering.

    In contrast to `KMeans`, users get the mean of the local models of their cluster, without
    another fit.

    Traffic: dim numbers up and dim numbers down, once per user.

    Parameters
    ----------
    n_clusters
        Number of clusters.
    ridge
        L2 strength, intercept included, of the local models; needed for users with few samples.
    """

    name: ClassVar[str] = "odcl k_means"

    def _fit(self, run: BaselineRun) -> Outcome:
        return average_models(run, self.ridge, lambda own: np.unique(
            k_means(own, self.n_clusters, run.rng), return_inverse=True)[1])


def average_models(run: BaselineRun, ridge: float, labels_of: Callable[[Array], Ints]) -> Outcome:
    """The mean of the local models of each cluster, with clusters found from these models."""
    own = run.held(ridge)
    labels = labels_of(own)
    run.exchange(down=run.dim, up=run.dim)
    centres = group_means(own, labels, int(labels.max()) + 1)
    return centres[labels], centres, labels


@dataclass(frozen=True, kw_only=True)
class Comet(Baseline):
    """minimise_x f_i(x) + weight/2 mean_j ||t(a_ij, x) - mean over i's cluster of t(a_ij, x_l)||^2,
    alternating with k-means on the predictions t(a, x_i) of all users at common probe inputs a.

    Cho, Wang, Chirvolu and Joshi, 2021, "Personalized federated learning for heterogeneous clients
    with clustered knowledge transfer" (COMET). In the paper, t are logits of networks on a public
    data set, which is used for the clusters and for the distillation, and users take gradient
    steps. Here t is the margin <w, a> + b (one per class for Multinomial), the probe inputs are
    drawn from a normal distribution with the pooled means and variances of the features, the
    distillation uses the user's own inputs, and the problem of each user is solved exactly. Since t
    is linear in x, the mean prediction of a cluster is that of its mean model, and the second term
    is weight/2 (x - mean)' G_i (x - mean) with G_i the Gram matrix of the inputs.

    Traffic per user and round: n_probes numbers up (times outputs) and dim down; once 2 n_features
    in each direction.

    Parameters
    ----------
    weight
        Strength of the distillation; 0: local models.
    n_clusters
        Number of clusters.
    n_probes
        Number of probe inputs.
    rounds
        Largest number of rounds; the method stops earlier if nothing changes.
    """

    name: ClassVar[str] = "comet"
    choices: ClassVar[Choices] = {
        "n_clusters": lambda users, loss: [k for k in (2, 4) if k <= users.n_users] or [1],
        "weight": (0.01, 0.1, 1.0, 10.0, 100.0)}
    weight: float = 1.0
    n_clusters: int = 2
    n_probes: int = 100
    rounds: int = 50

    def _fit(self, run: BaselineRun) -> Outcome:
        # 1. Probe inputs, from the pooled moments.
        pulls = self.weight * gram_matrices(run.loss, run.samples)
        users, models = run.samples.users.data, run.own()
        scaler = Standardizer.from_moments(users.moments())
        normal = run.rng.standard_normal((self.n_probes, users.n_features))
        probes = np.tile(scaler.mean + scaler.scale * normal, (run.n_users, 1))
        run.exchange(down=2 * users.n_features, up=2 * users.n_features)
        labels, seed = np.full(run.n_users, -1), int(run.rng.integers(2**31))
        means = np.repeat(models.mean(axis=0, keepdims=True), self.n_clusters, axis=0)
        for _ in range(self.rounds):
            # 2. Clusters of predictions, with the same starts in every round, so that the numbers
            # of the clusters do not change after convergence.
            margins = run.loss.decision(probes, np.repeat(models, self.n_probes, axis=0))
            margins = margins.reshape(run.n_users, -1)
            old_labels = labels
            labels = k_means(margins, self.n_clusters, np.random.default_rng(seed))
            means = cluster_means(models, labels, means)
            run.exchange(down=run.dim, up=margins.shape[1])
            if self.weight == 0:
                break
            # 3. Models near the mean of their cluster.
            before, models = models, near(run.loss, run.samples, pulls, means[labels], models)
            if np.array_equal(labels, old_labels) and unchanged(before, models):
                break
        return models, means, labels


def gram_matrices(loss: Loss, samples: Samples) -> Array:
    """(n_users, dim, dim) mean_j a_ij a_ij', repeated for each output."""
    if not loss.affine:
        raise Incompatible(f"Models of {type(loss).__name__} do not predict targets. Use a loss "
                           "with targets.")
    grams = np.empty((samples.n_users, samples.dim, samples.dim))
    for block in in_blocks(loss, samples).blocks:
        root = np.sqrt(block.weights)[..., None] * block.features
        gram = root.swapaxes(1, 2) @ root
        # A model with several outputs is a (features, outputs) matrix in row-major order.
        grams[block.index] = np.kron(gram, np.eye(samples.dim // gram.shape[1]))
    return grams


def near(loss: Loss, samples: Samples, metrics: Array, centres: Array, start: Array) -> Array:
    """minimise_x f_i(x) + 1/2 (x - centres_i)' metrics_i (x - centres_i) for each user i."""

    def evaluate(rows: Indices, x: Array, order: int) -> tuple[Array, Array, Array]:
        with np.errstate(over="ignore", invalid="ignore"):  # a point with overflow is rejected
            f, g, h = loss.evaluate(samples, x, order, rows)
            shift = x - centres[rows]
            pull = np.einsum("nde,ne->nd", metrics[rows], shift)
            return (f + 0.5 * np.einsum("nd,nd->n", shift, pull), g + pull if order > 0 else g,
                    h + metrics[rows] if order > 1 else h)

    return minimise(evaluate, start).points


def cluster_means(points: Array, labels: Ints, otherwise: Array) -> Array:
    """(k, dim) the mean of the points of each cluster; for an empty cluster, its row of
    `otherwise`.
    """
    sizes = np.bincount(labels, minlength=len(otherwise))[:, None]
    return np.where(sizes > 0, group_means(points, labels, len(otherwise)), otherwise)


def check_count(n_clusters: int, n_users: int) -> None:
    """Refuse more clusters than users."""
    if n_clusters > n_users:
        raise InvalidInput(f"expected at most one cluster for each of {n_users} users, got "
                           f"{n_clusters}", remedy="Lower n_clusters")


def k_means(points: Array, n_clusters: int, rng: np.random.Generator) -> Ints:
    """(n,) the cluster of each point."""
    from sklearn.cluster import KMeans as Lloyd

    check_count(n_clusters, len(points))
    lloyd = Lloyd(n_clusters, n_init=10, random_state=int(rng.integers(2**31)))
    # With fewer distinct points than clusters, some clusters are empty.
    with warnings.catch_warnings(action="ignore"):
        return np.asarray(lloyd.fit_predict(points), dtype=np.int64)
