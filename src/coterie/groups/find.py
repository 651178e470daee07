"""Find the groups among the users and their number, without tuning.

    groups = find_groups(users)       # groups.labels, groups.n_clusters, groups.models;
                                      print(groups)

1. Every user fits a local model, with a ridge on all coordinates, so that it exists also for users
   with few samples or one class.
2. The path over lam on the graph of nearest users by Wald distance proposes partitions: its groups,
   and the cuts of its merge tree. If a partition has too many groups, the largest are kept, and the
   a users of the others are assigned to the most likely of them, which adds log(N choose a) to its
   description: if many users have few samples, complete groups appear only this way. The cuts of a
   tree of the local models, shrunk to one centre, are proposals, too. Losses that are not quadratic
   are replaced by second-order models (`coterie.groups.summaries`). Of more than 300 users a sample
   proposes, as in `coterie.groups.proposals`.
3. Each partition is improved by merging groups and moving users while its description length
   decreases, as defined in `coterie.groups.partitions`. Three kinds of description are compared,
   and the shortest is the result:

       one model                 all users have the same model
       one centre with spread    the models of the users vary around one centre, with a normal
                                 distribution
       groups                    K groups, with one model each, or with the same spread of models in
                                 every group; if K
                                 is larger than the number of coordinates, the K models can vary
                                 around one centre, too

   So groups are reported only if they describe the data better than models that vary continuously.

The noise is estimated as in `coterie.groups.noise`: the variance of real targets, the
overdispersion of counts, and pseudo-targets if real targets have heavy tails. The variance of
points with one sample each is unknown and taken as 1: scale them so that the spread within a group
is 1. The squared hinge is used as if it were a log-likelihood.

Wide models, with more coordinates than a user has rows, are compared by their evidence instead
(`coterie.groups.wide`).

Of a user, the search needs no more than second moments with the squared loss, and a few numbers at
models that it receives with others (`coterie.groups.search`). So a federation does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.base.errors import InvalidInput, interruptible
from coterie.base.labels import check_labels, one_group
from coterie.base.machine import require_memory
from coterie.base.types import Array, Ints
from coterie.convex.path import Path, solve_path
from coterie.data.frames import users_frame
from coterie.data.moments import Standardizer
from coterie.data.users import Users
from coterie.groups.random_effects import search_summaries
from coterie.groups.search import (
    Kind,
    SearchOptions,
    SearchResult,
    kind_of,
    search,
    search_parts,
)
from coterie.groups.summaries import RowsSource, summarise
from coterie.groups.wide import WideSearch, fit_models, search_wide
from coterie.losses import (
    Logistic,
    Loss,
    Squared,
    SquaredDistance,
)
from coterie.losses.derived import Grouped
from coterie.losses.rows import too_wide
from coterie.problem.graph import Graph
from coterie.problem.problem import Problem, coefficient_names
from coterie.problem.solution import Solution
from coterie.problem.weights import LocalModels, adaptive_graph

_ROUNDING = 1e-9  # a mean below it, or a deviation so near to 1, is that of standardised features


@dataclass(frozen=True, kw_only=True, eq=False)
class Groups:
    """The groups of `find_groups`, and the search that found them.

    Attributes
    ----------
    labels
        (n_users,) the group of each user, from 0 in order of first appearance.
    models
        (n_users, dim) the best model of each user's group, for the given loss and features.
    kind
        The kind of the shortest description: "one model", "one centre with spread" or "groups". All
        labels are 0 unless it is "groups".
    spread
        (dim, dim) the covariance of the models of the users around the centre of their group, for
        standardised features; zero if all models of a group are equal.
    criterion
        The description length of the result in nats, the smallest of `candidates`.
    candidates
        (number of groups, criterion) of all descriptions compared.
    lam
        The point of the path that the labels come from; None if they do not come from the path.
    graph
        The graph of the search; that of a sample if there are more than 300 users.
    path
        The path of the search, with quadratic losses, standardised features and targets, and a
        stronger ridge; that of a sample if there are more than 300 users, and empty if proposals
        were given.
    proposals
        The best partitions, each with what its moves cost, for another search among the same users.
    coefficient_names
        (dim,) what each coordinate of the models is.

    Example
    -------
    >>> import coterie as ct
    >>> from coterie.datasets import clustered
    >>> groups = ct.find_groups(clustered("squared", n_users=12, n_clusters=3).users)
    >>> groups.n_clusters, groups.labels.tolist()
    (3, [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2])
    """

    labels: Ints
    models: Array = field(repr=False)
    kind: Kind
    spread: Array = field(repr=False)
    criterion: float
    candidates: tuple[tuple[int, float], ...] = field(repr=False)
    lam: float | None
    graph: Graph = field(repr=False)
    path: Path = field(repr=False)
    proposals: tuple[tuple[Ints, float], ...] = field(default=(), repr=False)
    coefficient_names: tuple[str, ...] = field(default=(), repr=False)

    @property
    def n_clusters(self) -> int:
        """The number of groups."""
        return int(self.labels.max()) + 1

    @property
    def names(self) -> tuple[Any, ...]:
        """The users' names, in the order of `labels` and `models`."""
        return self.path.problem.users.names

    def to_frame(self) -> Any:
        """The groups and their models as a table.

        Returns
        -------
        A frame of polars, or of pandas where polars is not installed, with a row for each user:
        `user`, `group`, and the coordinates of the model of its group by feature.

        Raises
        ------
        MissingExtra
            If neither is installed.

        Example
        -------
        >>> import coterie as ct
        >>> users = ct.Users.from_arrays([[0.0], [0.1], [9.0], [9.2]],
        ...                              user=["ann", "bob", "eve", "zoe"])
        >>> ct.find_groups(users, ct.SquaredDistance()).to_frame()["group"].to_list()
        [0, 0, 1, 1]
        """
        return users_frame(self.names, self.labels, self.models, self.coefficient_names)

    def __repr__(self) -> str:
        sizes = np.bincount(self.labels).tolist()
        shown = ", ".join(map(str, sizes[:8])) + ", ..." * (len(sizes) > 8)
        found = f"{len(sizes)} groups of {shown}" if self.kind == "groups" \
            else f"{self.kind} for {sizes[0]}"
        return (f"Groups({found} user{'s' * (len(self.labels) != 1)}, criterion "
                f"{self.criterion:.6g})")

    def __str__(self) -> str:
        examined = f"none of {len(self.candidates)} descriptions"
        if self.kind == "one model":
            return one_group(len(self.labels), len(self.candidates))
        if self.kind == "one centre with spread":
            return (f"Users differ, but continuously: no groups stand out ({examined} of the "
                    f"{len(self.labels)} users " "is better than one centre with a spread of "
                    "models).")
        sizes = describe_sizes(self.labels)
        one = min(value for count, value in self.candidates if count == 1)
        within = " Models also vary within groups." if self.spread.any() else ""
        return (f"{self.n_clusters} groups of {sizes} users "
                f"{describe_better(one - self.criterion)}.{within}")


def describe_sizes(labels: Ints) -> str:
    """The sizes of groups, or their range if there are more than ten."""
    sizes = np.bincount(labels)
    if len(sizes) <= 10:
        return ", ".join(f"{size:,}" for size in sizes)
    return f"{sizes.min():,} to {sizes.max():,}" if sizes.min() < sizes.max() else f"{sizes[0]:,}"


def _rounded(nats: float) -> str:
    """Three digits, without an exponent."""
    return f"{float(f'{nats:.3g}'):,.0f}" if abs(nats) >= 1000 else f"{nats:.3g}"


def describe_better(nats: float) -> str:
    """How much better groups describe the data than one group, by the nats that their description
    is shorter.

    A difference of d nats is a factor exp(d) in likelihood, after all that the groups cost; more
    than 3 is strong evidence, more than 5 very strong (Kass and Raftery 1995).
    """
    much = "much better" if nats > 5 else "clearly better" if nats > 3 else "slightly better"
    return (f"describe the data {much} than one group: by {_rounded(nats)} nats, after the cost of "
            "the additional "
            "models (above 3 is strong evidence)")


@interruptible()
def find_groups(users: Users, loss: Loss | None = None, *, max_groups: int | None = None,
                n_lams: int = 60, k: int = 5,
                weight_ridge: float = 0.1, progress: Callable[[Solution, int], None] | None = None,
                proposals: Sequence[tuple[npt.ArrayLike, float]] | None = None) -> Groups:
    """Find the groups among the users, and one model per group.

    The result is deterministic. For losses with <w, a> + b the search uses features standardised by
    the pooled moments of the users (only scaled if there is no intercept), so their units do not
    matter. The models are for the given features: they minimise the sum of the losses of a group's
    users, as in `refit`.

    Parameters
    ----------
    users
        The users.
    loss
        The loss; None: logistic for targets -1 and +1, squared for other targets, squared distance
        without targets.
    max_groups
        Largest number of groups to consider; None for no limit.
    n_lams
        Largest number of points of the path.
    k
        Number of nearest users that each user is compared with.
    weight_ridge
        L2 strength, intercept included, of the local models for the graph, and of the path.
    progress
        Called after each lam of the search with its solution and the largest number of lams.
    proposals
        Partitions to start from instead of a path: `proposals` of another search among the same
        users, with other rows.

    Returns
    -------
    Groups
        The groups and their models. Its `kind` says whether there are groups, and printing it gives
        a sentence.

    Raises
    ------
    InvalidInput
        If there are no users, or an argument is not valid.

    Example
    -------
    >>> import coterie as ct
    >>> ct.find_groups(ct.Users.from_arrays([[0.0], [0.1], [9.0], [9.2]]),
    ...                ct.SquaredDistance()).labels.tolist()
    [0, 0, 1, 1]
    """
    loss = _checked_loss(users, loss, weight_ridge, max_groups=(max_groups, 1), n_lams=(n_lams, 2),
                         k=(k, 1))
    scaler = _scaler(users, loss)
    scaled, search_loss, unit = _with_unit_targets(users if scaler is None
                                                   else scaler.transform(users), loss)
    if too_wide(search_loss, search_loss.prepare(scaled)):
        return _wide_groups(users, loss, search_wide(scaled, search_loss, max_groups), unit, k)
    given = None if proposals is None else tuple((check_labels(labels, users.n_users), float(cost))
                                                 for labels, cost in proposals)
    options = SearchOptions(max_groups=max_groups, n_lams=n_lams, k=k, ridge=weight_ridge,
                            progress=progress,
                            proposals=given)
    found = _search(scaled, search_loss, options)
    return _groups_of(users, loss, found, unit)


def _search(users: Users, loss: Loss, options: SearchOptions) -> SearchResult:
    if loss.quadratic or loss.least_squares:
        return search(search_summaries(users, loss), options)
    source = RowsSource(loss, [users])
    return search_parts(source, summarise(source), options)[1][0]


def _groups_of(users: Users, loss: Loss, found: SearchResult, unit: float) -> Groups:
    """The result of a search, with models for the features given."""
    best, samples = found.best, loss.prepare(users)
    grouped = Grouped(loss=loss, samples=samples, labels=best.labels)
    models = grouped.local(grouped.prepare(grouped.groups)).points[best.labels]
    spread = np.zeros((samples.dim, samples.dim)) if best.spread is None else unit**2 \
        * best.spread.covariance
    return Groups(labels=best.labels, models=models, kind=kind_of(best), spread=spread,
                  criterion=best.length,
                  candidates=tuple(dict.fromkeys((p.n_groups, p.length) for p in found.examined)),
                  lam=best.lam,
                  graph=found.path.problem.graph, path=found.path, proposals=found.proposals,
                  coefficient_names=tuple(coefficient_names(loss, users, samples.dim)))


def _wide_groups(users: Users, loss: Loss, found: WideSearch, unit: float, k: int) -> Groups:
    """The groups of users with wide models; the path is that of the users' models as points."""
    best, given, n = found.best, loss.prepare(users), users.n_users
    require_memory(8.0 * given.dim**2, f"a covariance of {given.dim} coordinates",
                   "Use fewer columns")
    grouped = Grouped(loss=loss, samples=given, labels=best.labels)
    start = fit_models(loss, given, best.labels, np.ones(n)).centres
    models = grouped.local(grouped.prepare(grouped.groups), start=start).points[best.labels]
    # Points with the same distances, in n coordinates.
    values, axes = np.linalg.eigh(found.models @ found.models.T)
    points = Users.from_arrays(axes * np.sqrt(np.maximum(values, 0.0)))
    local = LocalModels(points.features, np.empty((n, 0, 0)), users.sizes)
    problem = Problem(points, SquaredDistance(), 0.0, adaptive_graph(local, "gaussian",
        min(k, max(n - 1, 1))))
    kind: Kind = "groups" if best.labels.any() else "one centre with spread" if best.within \
        else "one model"
    examined = tuple(dict.fromkeys((d.n_groups, d.length) for d in found.examined))
    return Groups(labels=best.labels, models=models, kind=kind,
                  spread=unit**2 * best.within * np.eye(given.dim),
                  criterion=best.length, candidates=examined, lam=None, graph=problem.graph,
                  path=solve_path(problem, n_lams=10, tol=1e-5),
                  coefficient_names=tuple(coefficient_names(loss, users, given.dim)))


def _checked_loss(users: Users, loss: Loss | None, ridge: float,
                  **numbers: tuple[int | None, int]) -> Loss:
    """Check the users and the numbers, each given with its minimum, if not None; returns the loss
    to use.
    """
    if not (isinstance(ridge, (int, float)) and 0 < ridge < np.inf):
        raise InvalidInput(f"weight_ridge must be a finite number > 0, got {ridge!r}",
                           remedy="Omit it to use the default")
    if not isinstance(users, Users):
        raise InvalidInput(f"expected Users, got {type(users).__name__}",
                           remedy="Build them with Users.from_arrays(X, y, user)")
    for name, (number, minimum) in numbers.items():
        if number is None and name == "max_groups":
            continue
        if isinstance(number, bool) or not isinstance(number, (int, np.integer)) \
            or number < minimum:
            raise InvalidInput(f"{name} must be a whole number >= {minimum}, got {number!r}",
                               remedy="Omit it to use the default")
    if users.n_users == 0:
        raise InvalidInput("there are no users to group", remedy="Give at least one")
    if loss is None:
        y = users.targets
        return SquaredDistance() if y is None else Logistic() if (np.abs(y) == 1.0).all() \
            else Squared()
    if not isinstance(loss, Loss):
        raise InvalidInput(f"expected a loss such as Logistic(), got {loss!r}",
                           remedy="Create it by calling its class")
    return loss


def _scaler(users: Users, loss: Loss) -> Standardizer | None:
    """What standardises the features; None where they are standardised up to rounding, or need not
    be.
    """
    if not loss.affine:
        return None
    scaler = Standardizer.from_moments(users.moments(), feature_names=users.feature_names)
    if np.abs(scaler.mean).max(initial=0.0) < _ROUNDING \
        and np.abs(scaler.scale - 1.0).max(initial=0.0) < _ROUNDING:
        return None
    return scaler if loss.intercept else replace(scaler, mean=np.zeros_like(scaler.mean))


def _with_unit_targets(users: Users, loss: Loss) -> tuple[Users, Loss, float]:
    """Real targets shifted (if there is an intercept) and divided by their deviation; the loss so,
    and this unit.
    """
    y = users.targets
    if loss.task != "regression" or y is None:
        return users, loss, 1.0
    column = replace(users, features=y[:, None], targets=None, feature_names=("target",))
    counts, means, m2 = column.moments()
    centre = float(counts @ means[:, 0] / counts.sum()) if loss.intercept else 0.0
    unit = float(np.sqrt((m2.sum() + counts @ (means[:, 0] - centre) ** 2) / counts.sum())) or 1.0
    return replace(users, targets=(y - centre) / unit), loss.in_unit(unit), unit
