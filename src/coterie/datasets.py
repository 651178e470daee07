"""Users with known clusters: the paper's ellipses, other synthetic families, and real federations from files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from coterie._typing import Array, Ints
from coterie.data.frames import read_csv, read_parquet
from coterie.data.users import Users
from coterie.errors import InvalidInput
from coterie.losses.multinomial import sum_zero_basis


class Dataset(NamedTuple):
    """Users, the cluster each truly belongs to where that is known, and fresh test samples of the same users."""

    users: Users
    clusters: Ints | None = None  # (n_users,)
    test: Users | None = None  # the same users in the same order
    true_models: Array | None = None  # (n_clusters, dim) what the samples were drawn from


@dataclass(frozen=True, kw_only=True)
class Ellipses:
    """Where the paper's data live: in each cluster two overlapping ellipses, one a class; clusters differ by a turn.

    Cluster k looks along the angle 2 pi k / n_clusters, or the k-th of `turns`, in degrees. Its centre is `centre` from
    the origin that way; its classes +1 and -1 are centred `offset` / 2 ahead and behind; each fills an ellipse with
    semi-axis `along` that way and `across` at right angles. The paper does not publish its ellipses; these were
    searched for so that with seed 0 three exact clusters appear at lam = 0.09. Most other seeds show them there, not
    all.
    """

    n_clusters: int = 3
    along: float = 2.61
    across: float = 1.17
    offset: float = 4.17
    centre: float = 0.32
    turns: tuple[float, ...] | None = None

    def draw(self, cluster: int, n_per_class: int, rng: np.random.Generator) -> tuple[Array, Array]:
        """Samples (2 n_per_class, 2) uniform over a cluster's two ellipses, and their labels -1, +1."""
        angle = 2 * np.pi * cluster / self.n_clusters if self.turns is None else np.radians(self.turns[cluster])
        ahead = np.array([np.cos(angle), np.sin(angle)])
        aside = np.array([-np.sin(angle), np.cos(angle)])
        labels = np.repeat([-1.0, 1.0], n_per_class)
        radius, turn = np.sqrt(rng.random(labels.size)), 2 * np.pi * rng.random(labels.size)
        forward = self.centre + labels * self.offset / 2 + self.along * radius * np.cos(turn)
        return forward[:, None] * ahead + (self.across * radius * np.sin(turn))[:, None] * aside, labels


def ellipses(*, users_per_cluster: int = 20, samples: int | float = 10, points_per_cluster: int = 200,
             test_points: int = 1000, shape: Ellipses | None = None, seed: int = 0) -> Dataset:
    """The data of the paper's experiments.

    Each cluster has a pool of `points_per_cluster` points, half of each class; each of its users holds `samples` of
    them, drawn without replacement: a number (10 in the first experiment), or a share (0.85 in the second, with
    users_per_cluster=10). Every user's test set is the same fresh draw of its cluster's distribution.
    """
    shape = Ellipses() if shape is None else shape
    held = round(samples * points_per_cluster) if isinstance(samples, float) else samples
    if not 1 <= held <= points_per_cluster:
        raise InvalidInput(f"samples must be 1 to {points_per_cluster}, or a share in (0, 1], got {samples!r}",
                           remedy="Use 10, or 0.85")
    if users_per_cluster < 1 or points_per_cluster % 2 or test_points % 2:
        raise InvalidInput("users_per_cluster must be >= 1; points_per_cluster and test_points even numbers",
                           remedy="Half of the points are of each class")
    rng = np.random.default_rng(seed)
    clusters = np.repeat(np.arange(shape.n_clusters), users_per_cluster)
    train, test = [], []
    for cluster in range(shape.n_clusters):
        points, labels = shape.draw(cluster, points_per_cluster // 2, rng)
        fresh = shape.draw(cluster, test_points // 2, rng)
        chosen = rng.permuted(np.tile(np.arange(points_per_cluster), (users_per_cluster, 1)), axis=1)[:, :held].ravel()
        train.append((points[chosen], labels[chosen]))
        test.append((np.tile(fresh[0], (users_per_cluster, 1)), np.tile(fresh[1], users_per_cluster)))
    names = np.arange(clusters.size)
    return Dataset(_users(train, np.repeat(names, held)), clusters, _users(test, np.repeat(names, test_points)))


def _users(parts: list[tuple[Array, Array]], owner: Ints) -> Users:
    return Users.from_arrays(np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts]), owner)


#: What `clustered` can draw targets for: the names in LOSSES with a linear model.
FAMILIES = ("squared_hinge", "logistic", "squared", "huber", "poisson", "multinomial")


def clustered(family: str = "logistic", *, n_users: int = 30, n_clusters: int = 3, samples: int = 20,
              n_features: int = 2, n_classes: int = 3, separation: float = 2.0, spread: float = 0.0,
              noise: float = 0.1, ragged: bool = False, test_samples: int = 100, seed: int = 0) -> Dataset:
    """Users whose targets follow one true model a cluster, for each family of losses.

    Cluster models are random directions of norm `separation`; a user's own differs from its cluster's by `spread`
    times a standard normal vector. The last coordinate of a model is its intercept. `noise` is the standard deviation
    of real targets (the Huber family adds gross errors to one target in ten). With `ragged`, users hold between half
    and twice `samples`.
    """
    if family not in FAMILIES:
        raise InvalidInput(f"unknown family {family!r}", remedy=f"Choose one of: {', '.join(FAMILIES)}")
    if not 1 <= n_clusters <= n_users or min(samples, n_features, test_samples) < 1:
        raise InvalidInput(f"expected 1 <= n_clusters <= n_users and at least one sample and feature, got {n_clusters} "
                           f"clusters, {n_users} users, {samples} samples, {n_features} features", remedy="Raise them")
    rng = np.random.default_rng(seed)
    outputs = n_classes - 1 if family == "multinomial" else 1
    dim = (n_features + 1) * outputs
    true = rng.standard_normal((n_clusters, dim))
    true *= separation / np.linalg.norm(true, axis=1, keepdims=True)
    clusters = np.arange(n_users) * n_clusters // n_users
    own = true[clusters] + spread * rng.standard_normal((n_users, dim))
    counts = rng.integers(max(1, samples // 2), 2 * samples + 1, n_users) if ragged else np.full(n_users, samples)

    def draw(counts: Ints) -> Users:
        owner = np.repeat(np.arange(n_users), counts)
        x = rng.standard_normal((owner.size, n_features))
        rows = np.concatenate([x, np.full((owner.size, 1), -1.0 if family == "squared_hinge" else 1.0)], axis=1)
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


def gaussian_mixture(n_points: int = 100, *, n_clusters: int = 3, n_features: int = 3, separation: float = 6.0,
                     seed: int = 0) -> Dataset:
    """Points around cluster centres, unit variance, each a user of its own: convex clustering."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((n_clusters, n_features))
    centres *= separation / np.linalg.norm(centres, axis=1, keepdims=True)
    clusters = np.arange(n_points) * n_clusters // n_points
    points = centres[clusters] + rng.standard_normal((n_points, n_features))
    return Dataset(Users.from_arrays(points), clusters, None, centres)


def two_moons(n_points: int = 1000, *, noise: float = 0.08, seed: int = 0) -> Dataset:
    """Two interleaved half circles, standardised, each point a user of its own."""
    rng = np.random.default_rng(seed)
    clusters = np.arange(n_points) * 2 // n_points
    angle = np.pi * rng.random(n_points)
    upper = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    points = np.where(clusters[:, None] == 0, upper, np.array([1.0, 0.5]) - upper)
    points = points + noise * rng.standard_normal(points.shape)
    return Dataset(Users.from_arrays((points - points.mean(axis=0)) / points.std(axis=0)), clusters)


def load(path: str | Path, *, user: str = "user", target: str | None = None, cluster: str = "cluster") -> Dataset:
    """A federation from a file.

    `.npz`: arrays `X` and `user`, optionally `y` and one known cluster a user under `cluster`, whose k-th entry belongs
    to the k-th user in sorted order. `.csv` and `.parquet`: a `user` column, a target column (default `y` if there is
    one), optionally a cluster column, constant within a user; every other column is a feature.
    """
    path = Path(path)
    if path.suffix.lower() == ".npz":
        return _load_npz(path, user, "y" if target is None else target, cluster)
    if path.suffix.lower() not in (".csv", ".parquet"):
        raise InvalidInput(f"expected a .npz, .csv or .parquet file, got {path.name!r}",
                           remedy="Convert it, or read it yourself and use Users.from_arrays")
    read = read_csv(path) if path.suffix.lower() == ".csv" else read_parquet(path)
    target = "y" if target is None and "y" in read.columns else target
    taken = [user, cluster] + ([target] if target else [])
    users = Users.from_frame(read, user=user, target=target, features=[c for c in read.columns if c not in taken])
    if cluster not in read.columns:
        return Dataset(users)
    labels = read[cluster].to_numpy()
    order = np.argsort(_positions(users, read[user].to_numpy()), kind="stable")
    return Dataset(users, _constant_by_user(users, np.unique(labels, return_inverse=True)[1][order]))


def _load_npz(path: Path, user: str, target: str, cluster: str) -> Dataset:
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except (OSError, ValueError, EOFError) as error:
        raise InvalidInput(f"cannot read {str(path)!r} as an .npz file ({error})",
                           remedy="Write it with numpy.savez(path, X=..., y=..., user=...)") from error
    missing = [name for name in ("X", user) if name not in arrays]
    if missing:
        raise InvalidInput(f"expected arrays 'X' and {user!r}, missing {missing}; the file has {sorted(arrays)}",
                           remedy="Name the arrays so, or pass user=...")
    users = Users.from_arrays(arrays["X"], arrays.get(target), arrays[user])
    labels = arrays.get(cluster)
    if labels is None:
        return Dataset(users)
    if labels.shape != (users.n_users,):
        raise InvalidInput(f"expected one cluster for each of {users.n_users} users, got shape {labels.shape}",
                           remedy=f"Give {cluster!r} one entry for each user in sorted order")
    return Dataset(users, np.unique(labels, return_inverse=True)[1].astype(np.int64))


def _positions(users: Users, names: npt.NDArray[np.object_]) -> Ints:
    place = {name: k for k, name in enumerate(users.names)}
    return np.array([place[name] for name in names.tolist()], dtype=np.int64)


def _constant_by_user(users: Users, labels: Ints) -> Ints:
    low, high = (f.reduceat(labels, users.offsets[:-1]) for f in (np.minimum, np.maximum))
    if (low != high).any():
        name = users.names[int(np.flatnonzero(low != high)[0])]
        raise InvalidInput("a user belongs to one cluster, got several", where=f"user {name!r}",
                           remedy="Make the cluster column constant within each user, or drop it")
    return np.asarray(low, dtype=np.int64)
