"""Users with known groups: the paper's ellipses, other simulated families, and federations from
files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from coterie.base.errors import InvalidInput
from coterie.base.labels import sum_zero_basis
from coterie.base.types import Array, Ints
from coterie.data.files import read_table
from coterie.data.frames import read_numbers
from coterie.data.users import Users

__all__ = ["FAMILIES", "Dataset", "Ellipses", "clustered", "ellipses", "gaussian_mixture", "load",
           "two_moons"]


class Dataset(NamedTuple):
    """Users, with their true groups, test samples and true models if these are known (otherwise
    None).
    """

    users: Users
    clusters: Ints | None = None  # (n_users,) the true group of each user
    test: Users | None = None  # new samples of the same users, in the same order
    # (n_clusters, dim) the models that the samples were generated from.
    true_models: Array | None = None


@dataclass(frozen=True, kw_only=True)
class Ellipses:
    """The distribution of the paper's data: two overlapping ellipses per cluster, one per class.

    Clusters differ by a rotation. Cluster k points in the direction of the angle 2 pi k /
    n_clusters, or of the k-th entry of `turns`, in degrees. Its centre is at distance `centre` from
    the origin in this direction; its classes +1 and -1 are shifted by +`offset` / 2 and -`offset` /
    2 along it. Each class fills an ellipse with semi-axis `along` in this direction and `across` at
    right angles to it.

    The paper does not publish its ellipses. The defaults were found by a search, so that with seed
    0 the solution has three exact clusters at lam = 0.09. This is also true for most other seeds,
    but not for all.

    Parameters
    ----------
    n_clusters
        Number of clusters.
    along, across
        Semi-axes of each ellipse.
    offset
        Distance between the centres of the two classes of a cluster.
    centre
        Distance of each cluster from the origin.
    turns
        Angles of the clusters in degrees; None: evenly spaced.

    Example
    -------
    >>> import numpy as np
    >>> points, labels = Ellipses().draw(cluster=0, n_per_class=3, rng=np.random.default_rng(0))
    >>> points.shape, labels.tolist()
    ((6, 2), [-1.0, -1.0, -1.0, 1.0, 1.0, 1.0])
    """

    n_clusters: int = 3
    along: float = 2.61
    across: float = 1.17
    offset: float = 4.17
    centre: float = 0.32
    turns: tuple[float, ...] | None = None

    def draw(self, cluster: int, n_per_class: int, rng: np.random.Generator) -> tuple[Array, Array]:
        """Draw points (2 n_per_class, 2), uniform over the two ellipses of a cluster, and their
        labels -1 and +1.
        """
        angle = (2 * np.pi * cluster / self.n_clusters if self.turns is None
                 else np.radians(self.turns[cluster]))
        direction = np.array([np.cos(angle), np.sin(angle)])
        normal = np.array([-np.sin(angle), np.cos(angle)])
        labels = np.repeat([-1.0, 1.0], n_per_class)
        radius, turn = np.sqrt(rng.random(labels.size)), 2 * np.pi * rng.random(labels.size)
        forward = self.centre + labels * self.offset / 2 + self.along * radius * np.cos(turn)
        return forward[:, None] * direction + (self.across * radius
                                               * np.sin(turn))[:, None] * normal, labels


def ellipses(*, users_per_cluster: int = 20, samples: int | float = 10,
             points_per_cluster: int = 200,
             test_points: int = 1000, shape: Ellipses | None = None, seed: int = 0) -> Dataset:
    """Generate the data of the paper's experiments.

    Each cluster has a pool of points, half of them in each class. Each user of the cluster holds
    some of these points, drawn without replacement. All users of a cluster have the same test set,
    new points of the same distribution.

    Parameters
    ----------
    users_per_cluster
        Number of users per cluster: 20 in the paper's first experiment, 10 in the second.
    samples
        Points per user: a number (10 in the first experiment) or a share of the pool (0.85 in the
        second).
    points_per_cluster
        Size of the pool of a cluster, an even number.
    test_points
        Number of test points per user, an even number.
    shape
        The distribution; the default is `Ellipses()`.
    seed
        Seed of the random numbers.

    Returns
    -------
    Dataset
        Users named 0, 1, ..., their true clusters, and their test points.

    Raises
    ------
    InvalidInput
        If a number is out of its range.

    Example
    -------
    >>> ellipses(users_per_cluster=2, samples=5).users
    Users(6 users, 30 samples, 2 features, targets)
    """
    shape = Ellipses() if shape is None else shape
    held = round(samples * points_per_cluster) if isinstance(samples, float) else samples
    if not 1 <= held <= points_per_cluster:
        raise InvalidInput(f"samples must be 1 to {points_per_cluster}, or a share in (0, 1], got "
                           f"{samples!r}", remedy="Use 10, or 0.85")
    if users_per_cluster < 1 or points_per_cluster % 2 or test_points % 2:
        raise InvalidInput("users_per_cluster must be >= 1; points_per_cluster and test_points "
                           "even numbers", remedy="Half of the points are of each class")
    rng = np.random.default_rng(seed)
    clusters = np.repeat(np.arange(shape.n_clusters), users_per_cluster)
    train, test = [], []
    for cluster in range(shape.n_clusters):
        points, labels = shape.draw(cluster, points_per_cluster // 2, rng)
        test_x, test_y = shape.draw(cluster, test_points // 2, rng)
        chosen = rng.permuted(np.tile(np.arange(points_per_cluster), (users_per_cluster, 1)),
                              axis=1)[:, :held].ravel()
        train.append((points[chosen], labels[chosen]))
        test.append((np.tile(test_x, (users_per_cluster, 1)), np.tile(test_y, users_per_cluster)))
    names = np.arange(clusters.size)
    return Dataset(_users(train, np.repeat(names, held)), clusters,
                   _users(test, np.repeat(names, test_points)))


def _users(parts: list[tuple[Array, Array]], owner: Ints) -> Users:
    return Users.from_arrays(np.concatenate([x for x, _ in parts]),
                             np.concatenate([y for _, y in parts]), owner)


#: The families of `clustered`: the names in LOSSES with a linear model.
FAMILIES = ("squared_hinge", "logistic", "squared", "huber", "poisson", "multinomial")


def clustered(family: str = "logistic", *, n_users: int = 30, n_clusters: int = 3,
              samples: int = 20, n_features: int = 2, n_classes: int = 3, separation: float = 2.0,
              spread: float = 0.0, noise: float = 0.1, ragged: bool = False,
              test_samples: int = 100, seed: int = 0) -> Dataset:
    """Generate users whose targets follow one true model per group, for each family of losses.

    The true models are random directions of norm `separation`; the last coordinate is the
    intercept. The model of a user is that of its group plus `spread` times a standard normal
    vector.

    Parameters
    ----------
    family
        A name in `FAMILIES`: the loss that the targets are generated for.
    n_users, n_clusters, n_features, n_classes
        Numbers of users, groups, features, and classes of the family "multinomial".
    samples, ragged, test_samples
        Samples per user, whether their number varies between half and twice that, and test samples
        per user.
    separation, spread
        Norm of the true models, and standard deviation of the users' models around that of their
        group.
    noise
        Standard deviation of real-valued targets; the Huber family adds gross errors to one target
        in ten.
    seed
        Seed of the random numbers.

    Returns
    -------
    Dataset
        Users, their true groups, test samples, and the true models.

    Raises
    ------
    InvalidInput
        If the family is unknown, or a number is out of its range.

    Example
    -------
    >>> data = clustered("squared", n_users=4, n_clusters=2, samples=3)
    >>> data.users, data.clusters.tolist()
    (Users(4 users, 12 samples, 2 features, targets), [0, 0, 1, 1])
    """
    if family not in FAMILIES:
        raise InvalidInput(f"unknown family {family!r}",
                           remedy=f"Choose one of: {', '.join(FAMILIES)}")
    if not 1 <= n_clusters <= n_users or min(samples, n_features, test_samples) < 1:
        raise InvalidInput("expected 1 <= n_clusters <= n_users and at least one sample and "
                           f"feature, got {n_clusters} clusters, {n_users} users, {samples} "
                           f"samples, {n_features} features", remedy="Raise them")
    rng, outputs = np.random.default_rng(seed), n_classes - 1 if family == "multinomial" else 1
    dim = (n_features + 1) * outputs
    true = rng.standard_normal((n_clusters, dim))
    true *= separation / np.linalg.norm(true, axis=1, keepdims=True)
    clusters = np.arange(n_users) * n_clusters // n_users
    own = true[clusters] + spread * rng.standard_normal((n_users, dim))
    counts = (rng.integers(max(1, samples // 2), 2 * samples + 1, n_users) if ragged
              else np.full(n_users, samples))

    def draw(counts: Ints) -> Users:
        owner = np.repeat(np.arange(n_users), counts)
        x = rng.standard_normal((owner.size, n_features))
        rows = np.concatenate(
            [x, np.full((owner.size, 1), -1.0 if family == "squared_hinge" else 1.0)], axis=1)
        t = np.einsum("np,npk->nk", rows, own[owner].reshape(owner.size, n_features + 1, outputs))
        return Users.from_arrays(x, _targets(family, t, noise, rng), owner)

    return Dataset(draw(counts), clusters, draw(np.full(n_users, test_samples)), true)


def _targets(family: str, t: Array, noise: float, rng: np.random.Generator) -> Array:
    margin = t[:, 0]
    if family in ("squared_hinge", "logistic"):
        return np.where(rng.random(len(t)) < 1 / (1 + np.exp(-margin)), 1.0, -1.0)
    if family == "poisson":
        return rng.poisson(np.exp(np.clip(margin, -20.0, 5.0))).astype(float)
    if family == "multinomial":
        logits = t @ sum_zero_basis(t.shape[1] + 1)
        return (logits + rng.gumbel(size=logits.shape)).argmax(axis=1).astype(float)
    errors = noise * rng.standard_normal(len(t))
    if family == "huber":
        errors += (rng.random(len(t)) < 0.1) * 20.0 * rng.standard_normal(len(t))
    return margin + errors


def gaussian_mixture(n_points: int = 100, *, n_clusters: int = 3, n_features: int = 3,
                     separation: float = 6.0, seed: int = 0) -> Dataset:
    """Generate points around cluster centres with unit variance; each point is a separate user.

    Parameters
    ----------
    n_points, n_clusters, n_features
        Number of points, of clusters and of features.
    separation
        Norm of the centres.
    seed
        Seed of the random numbers.

    Returns
    -------
    Dataset
        One user per point, the true clusters, and the centres in `true_models`.

    Example
    -------
    >>> gaussian_mixture(12, n_clusters=2).users
    Users(12 users, 12 samples, 3 features, no targets)
    """
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((n_clusters, n_features))
    centres *= separation / np.linalg.norm(centres, axis=1, keepdims=True)
    clusters = np.arange(n_points) * n_clusters // n_points
    points = centres[clusters] + rng.standard_normal((n_points, n_features))
    return Dataset(Users.from_arrays(points), clusters, None, centres)


def two_moons(n_points: int = 1000, *, noise: float = 0.08, seed: int = 0) -> Dataset:
    """Generate two interleaved half circles, standardised; each point is a separate user.

    Parameters
    ----------
    n_points
        Number of points.
    noise
        Standard deviation of the points around the half circles.
    seed
        Seed of the random numbers.

    Returns
    -------
    Dataset
        One user per point, and the half circle of each.

    Example
    -------
    >>> two_moons(10).clusters.tolist()
    [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]
    """
    rng = np.random.default_rng(seed)
    clusters = np.arange(n_points) * 2 // n_points
    angle = np.pi * rng.random(n_points)
    upper = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    points = np.where(clusters[:, None] == 0, upper, np.array([1.0, 0.5]) - upper)
    points = points + noise * rng.standard_normal(points.shape)
    return Dataset(Users.from_arrays((points - points.mean(axis=0)) / points.std(axis=0)), clusters)


def load(path: str | Path, *, user: str = "user", target: str | None = None,
         cluster: str = "cluster") -> Dataset:
    """Read a federation from a file.

    A `.npz` file has arrays `X` and `user`, optionally `y`, and optionally `cluster` with one entry
    per user, in the sorted order of the users. A `.csv` or `.parquet` file has a user column,
    optionally a target column, and optionally a cluster column that is constant within each user;
    all other columns are features.

    Parameters
    ----------
    path
        The file.
    user, target, cluster
        Names of the arrays or columns; the default target is `y` if it exists.

    Returns
    -------
    Dataset
        Users, and their groups if the file has them.

    Raises
    ------
    InvalidInput
        If the file cannot be read, or its arrays or columns do not have this form.

    Example
    -------
    >>> import numpy as np, os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "users.npz")
    >>> np.savez(path, X=[[1.0], [2.0], [3.0]], y=[0.5, 1.0, 1.5], user=["ann", "bob", "ann"],
    ...          cluster=[0, 1])
    >>> load(path).clusters.tolist()
    [0, 1]
    """
    path = Path(path)
    if path.suffix.lower() == ".npz":
        return _load_npz(path, user, "y" if target is None else target, cluster)
    if path.suffix.lower() not in (".csv", ".parquet"):
        raise InvalidInput(f"expected a .npz, .csv or .parquet file, got {path.name!r}",
                           remedy="Convert it, or read it yourself and use Users.from_arrays")
    frame = read_table(path)
    frame = read_numbers(frame, [name for name in frame.columns if name != user])
    target = "y" if target is None and "y" in frame.columns else target
    special = [user, cluster] + ([target] if target else [])
    users = Users.from_frame(frame, user=user, target=target,
                             features=[c for c in frame.columns if c not in special])
    if cluster not in frame.columns:
        return Dataset(users)
    labels = frame[cluster].to_numpy()
    order = np.argsort(_positions(users, frame[user].to_numpy()), kind="stable")
    return Dataset(users,
                   _constant_by_user(users, np.unique(labels, return_inverse=True)[1][order]))


def _load_npz(path: Path, user: str, target: str, cluster: str) -> Dataset:
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except (OSError, ValueError, EOFError) as error:
        raise InvalidInput(f"cannot read {str(path)!r} as an .npz file ({error})",
                           remedy="Write it with numpy.savez(path, X=..., y=..., "
                           "user=...)") from error
    missing = [name for name in ("X", user) if name not in arrays]
    if missing:
        raise InvalidInput(f"expected arrays 'X' and {user!r}, missing {missing}; the file has "
                           f"{sorted(arrays)}", remedy="Rename the arrays, or pass user=...")
    users = Users.from_arrays(arrays["X"], arrays.get(target), arrays[user])
    labels = arrays.get(cluster)
    if labels is None:
        return Dataset(users)
    if labels.shape != (users.n_users,):
        raise InvalidInput(f"expected one cluster for each of {users.n_users} users, got shape "
                           f"{labels.shape}",
                           remedy=f"Give {cluster!r} one entry for each user in sorted order")
    return Dataset(users, np.unique(labels, return_inverse=True)[1].astype(np.int64))


def _positions(users: Users, names: npt.NDArray[np.object_]) -> Ints:
    index = {name: k for k, name in enumerate(users.names)}
    return np.array([index[name] for name in names.tolist()], dtype=np.int64)


def _constant_by_user(users: Users, labels: Ints) -> Ints:
    low, high = (f.reduceat(labels, users.offsets[:-1]) for f in (np.minimum, np.maximum))
    if (low != high).any():
        name = users.names[int(np.flatnonzero(low != high)[0])]
        raise InvalidInput("expected one cluster per user, got several", where=f"user {name!r}",
                           remedy="Make the cluster column constant within each user, or drop it")
    return np.asarray(low, dtype=np.int64)
