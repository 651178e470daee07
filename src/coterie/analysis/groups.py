"""Find the groups among the users and their number, without tuning.

    groups = find_groups(users)       # groups.labels, groups.n_clusters, groups.models; print(groups)

1. Every user fits a local model, with a ridge on all coordinates, so that it exists also for users with few samples or
   one class.
2. The path over lam on the graph of nearest users by Wald distance proposes partitions: its groups, and the cuts of its
   merge tree. If a partition has too many groups, the largest are kept, and the a users of the others are assigned to
   the most likely of them, which adds log(N choose a) to its description: if many users have few samples, complete
   groups appear only this way. The cuts of a tree of the local models, shrunk to one centre, are proposals, too.
   Losses that are not quadratic are replaced by second-order models for this (`coterie.analysis.proposals`), and so
   only the best proposals, by these models, go on to the next step.
3. Each partition is improved by merging groups and moving users while its description length decreases, as defined in
   `coterie.analysis.partitions`. Three kinds of description are compared, and the shortest is the result:

       one model                 all users have the same model
       one centre with spread    the models of the users vary around one centre, with a normal distribution
       groups                    K groups, with one model each, or with the same spread of models in every group; if K
                                 is larger than the number of coordinates, the K models can vary around one centre, too

   So groups are reported only if they describe the data better than models that vary continuously.

The noise is estimated as in `coterie.analysis.dispersion`: the variance of real targets, the overdispersion of counts,
and pseudo-targets if real targets have heavy tails. The variance of points with one sample each is unknown and taken as
1: scale them so that the spread within a group is 1. The squared hinge is used as if it were a log-likelihood.

A user sends its local model, the Hessian at it, its moments, and the values and two derivatives of its loss at models
that it receives, so a federation can do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from coterie._typing import Array, Ints
from coterie.analysis.dispersion import without_outliers
from coterie.analysis.partitions import Judge, ModelTree, Partition
from coterie.analysis.path import Path
from coterie.analysis.proposals import WithRidge, expand, nearest_users, proposals_of, search_path
from coterie.data.scaling import Standardizer
from coterie.data.users import Users
from coterie.errors import InvalidInput, interruptible
from coterie.graph import Graph
from coterie.losses import AffineLoss, Huber, Logistic, Loss, Squared, SquaredDistance
from coterie.losses.grouped import Grouped
from coterie.problem import Problem
from coterie.solution import Solution

_FIRST_LIMIT = 8  # number of groups of the first search; doubled while that many are found
_EXAMINED = 4  # partitions of the path that are improved with losses that are not quadratic
_CUTS = 3  # cuts of the tree of models that are improved
_MARGIN = 50.0  # cuts of that tree that are worse than other descriptions by more nats are ignored
_PATIENCE = 3  # the search for groups with spread ends after this many numbers of groups without improvement
_LARGEST_TREE = 3000  # users; Ward's tree needs the distances of all pairs

Kind = Literal["one model", "one centre with spread", "groups"]


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
        The kind of the shortest description: "one model", "one centre with spread" or "groups". All labels are 0 unless
        it is "groups".
    spread
        (dim, dim) the covariance of the models of the users around the centre of their group, for standardised
        features; zero if all models of a group are equal.
    criterion
        The description length of the result in nats, the smallest of `candidates`.
    candidates
        (number of groups, criterion) of all descriptions compared.
    lam
        The point of the path that the labels come from; None if they do not come from the path.
    graph
        The graph of the search.
    path
        The path of the search, with quadratic losses, standardised features and targets, and a stronger ridge.

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

    @property
    def n_clusters(self) -> int:
        """The number of groups."""
        return int(self.labels.max()) + 1

    def __str__(self) -> str:
        examined = f"none of {len(self.candidates)} descriptions"
        if self.kind == "one model":
            return f"All {len(self.labels)} user(s) are one group: {examined} is better than one model."
        if self.kind == "one centre with spread":
            return f"Users differ, but continuously: no groups stand out ({examined} of the {len(self.labels)} users " \
                   "is better than one centre with a spread of models)."
        sizes = ", ".join(map(str, np.bincount(self.labels)))
        one = min(value for count, value in self.candidates if count == 1)
        within = " Models also vary within groups." if self.spread.any() else ""
        return f"{self.n_clusters} groups of {sizes} users describe the data better than one group: description " \
               f"length {self.criterion:.6g} instead of {one:.6g}.{within}"


@interruptible()
def find_groups(users: Users, loss: Loss | None = None, *, max_groups: int | None = None, n_lams: int = 60, k: int = 5,
                weight_ridge: float = 0.1, progress: Callable[[Solution, int], None] | None = None) -> Groups:
    """Find the groups among the users, and one model per group.

    The result is deterministic. For losses with <w, a> + b the search uses features standardised by the pooled moments
    of the users (only scaled if there is no intercept), so their units do not matter. The models are for the given
    features: they minimise the sum of the losses of a group's users, as in `refit`.

    Parameters
    ----------
    users
        The users.
    loss
        The loss; None: logistic for targets -1 and +1, squared for other targets, squared distance without targets.
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

    Returns
    -------
    Groups
        The groups and their models. Its `kind` says whether there are groups, and printing it gives a sentence.

    Raises
    ------
    InvalidInput
        If there are no users, or an argument is not valid.

    Example
    -------
    >>> import coterie as ct
    >>> ct.find_groups(ct.Users.from_arrays([[0.0], [0.1], [9.0], [9.2]]), ct.SquaredDistance()).labels.tolist()
    [0, 0, 1, 1]
    """
    loss = _checked_loss(users, loss, weight_ridge, max_groups=(max_groups, 1), n_lams=(n_lams, 2), k=(k, 1))
    given = loss.prepare(users)
    scaled, search_loss, unit = _with_unit_targets(_scaled(users, loss), loss)
    scaled, search_loss = without_outliers(scaled, search_loss)
    local, graph = nearest_users(scaled, search_loss, k, weight_ridge)
    expansion = expand(scaled, search_loss, weight_ridge)
    problem = Problem(scaled, WithRidge(expansion, weight_ridge), 0.0, graph)
    path = search_path(problem, local, max_groups or _FIRST_LIMIT, n_lams, progress)
    judge = Judge(scaled, search_loss)
    examined = _examine(judge, judge.approximated(expansion), local.models, path, max_groups)
    best = _shortest(examined)
    grouped = Grouped(loss=loss, samples=given, labels=best.labels)
    models = grouped.local(grouped.prepare(grouped.groups)).points[best.labels]
    spread = np.zeros((given.dim, given.dim)) if best.spread is None else unit**2 * best.spread.covariance
    return Groups(labels=best.labels, models=models, kind=_kind(best), spread=spread, criterion=best.length,
                  candidates=tuple(dict.fromkeys((p.n_groups, p.length) for p in examined)), lam=best.lam, graph=graph,
                  path=path)


def _shortest(descriptions: Iterable[Partition]) -> Partition:
    return min(descriptions, key=lambda partition: partition.length)


def _kind(description: Partition) -> Kind:
    if description.labels.any():
        return "groups"
    return "one model" if description.spread is None else "one centre with spread"


def _checked_loss(users: Users, loss: Loss | None, ridge: float, **numbers: tuple[int | None, int]) -> Loss:
    """Check the users and the numbers, each given with its minimum, if not None; returns the loss to use."""
    if not (isinstance(ridge, (int, float)) and 0 < ridge < np.inf):
        raise InvalidInput(f"weight_ridge must be a finite number > 0, got {ridge!r}",
                           remedy="Omit it to use the default")
    if not isinstance(users, Users):
        raise InvalidInput(f"expected Users, got {type(users).__name__}",
                           remedy="Build them with Users.from_arrays(X, y, user)")
    for name, (number, minimum) in numbers.items():
        if number is None and name == "max_groups":
            continue
        if isinstance(number, bool) or not isinstance(number, (int, np.integer)) or number < minimum:
            raise InvalidInput(f"{name} must be a whole number >= {minimum}, got {number!r}",
                               remedy="Omit it to use the default")
    if users.n_users == 0:
        raise InvalidInput("there are no users to group", remedy="Give at least one")
    if loss is None:
        y = users.targets
        return SquaredDistance() if y is None else Logistic() if (np.abs(y) == 1.0).all() else Squared()
    if not isinstance(loss, Loss):
        raise InvalidInput(f"expected a loss such as Logistic(), got {loss!r}", remedy="Create it by calling its class")
    return loss


def _scaled(users: Users, loss: Loss) -> Users:
    if not isinstance(loss, AffineLoss):
        return users
    scaler = Standardizer.from_moments(users.moments(), feature_names=users.feature_names)
    return (scaler if loss.intercept else replace(scaler, mean=np.zeros_like(scaler.mean))).transform(users)


def _with_unit_targets(users: Users, loss: Loss) -> tuple[Users, Loss, float]:
    """Real targets shifted (if there is an intercept) and divided by their deviation; the loss so, and this unit."""
    y = users.targets
    if type(loss) not in (Squared, Huber) or y is None:
        return users, loss, 1.0
    assert isinstance(loss, (Squared, Huber))
    column = replace(users, features=y[:, None], targets=None, feature_names=("target",))
    counts, means, m2 = column.moments()
    centre = float(counts @ means[:, 0] / counts.sum()) if loss.intercept else 0.0
    unit = float(np.sqrt((m2.sum() + counts @ (means[:, 0] - centre) ** 2) / counts.sum())) or 1.0
    shifted = y - centre
    if isinstance(loss, Huber):
        loss = replace(loss, delta=loss.delta / unit)
    return replace(users, targets=shifted / unit), loss, unit


def _examine(judge: Judge, quick: Judge, models: Array, path: Path, max_groups: int | None) -> list[Partition]:
    """All descriptions with at most `max_groups` groups.

    If one centre with spread is best of them, but more groups than allowed are better still, users do not vary
    continuously: then this description is left out.
    """
    examined = list(_descriptions(judge, quick, models, path, max_groups))
    best = _shortest(examined)
    if max_groups is not None and _kind(best) == "one centre with spread":
        unlimited = _shortest(_descriptions(judge, quick, models, path, None))
        if unlimited.n_groups > max_groups:
            return [partition for partition in examined if _kind(partition) != "one centre with spread"]
    return examined


def _descriptions(judge: Judge, quick: Judge, models: Array, path: Path,
                  max_groups: int | None) -> Iterator[Partition]:
    """All descriptions to compare: one model, one centre with spread, and partitions as proposed and improved.

    Of the proposals of the path, those are improved that are shortest by `quick`, which knows second-order models only.
    """
    together = Partition(np.zeros(judge.n, dtype=np.int64), judge.criterion(np.zeros(judge.n, dtype=np.int64)))
    yield together
    if judge.n == 1 or max_groups == 1:
        return
    centre = judge.one_centre(models)
    yield centre
    proposed = [partition for start in _from_path(judge, quick, path, max_groups)
                for partition in _improved(judge, start.labels, start.length, start.lam)]
    if judge.n <= _LARGEST_TREE:
        assert centre.spread is not None
        tree, limit = ModelTree(judge, centre.spread), min(judge.n, max_groups or judge.n)
        known, best = {partition.labels.tobytes() for partition in proposed}, _shortest([together, centre, *proposed])
        for count, length in _best_cuts(tree.lengths()[:limit]):
            labels = tree.cut(count)
            if length < best.length + judge.model_cost + _MARGIN and labels.tobytes() not in known:
                proposed += _improved(judge, labels, judge.move_cost(count), None)
        groups = _shortest([together, *proposed])
        proposed += _with_prior(judge, tree, centre, groups, limit)
        if centre.length < together.length:
            proposed += _with_spread(judge, tree, centre, groups, limit)
    yield from proposed


def _best_cuts(lengths: Array) -> list[tuple[int, float]]:
    """(number of groups, length) of the shortest of the lengths of 1, 2, ... groups, except that of one group."""
    counts = np.argsort(lengths[1:], kind="stable")[:_CUTS] + 2
    return [(count, float(lengths[count - 1])) for count in counts.tolist()]


def _with_prior(judge: Judge, tree: ModelTree, centre: Partition, groups: Partition, limit: int) -> list[Partition]:
    """The best groups with models that vary around one centre, if they are many.

    The models of no more groups than coordinates do not show how they vary. Then nothing is proposed: the same code
    must have been compared for few and for many groups.
    """
    assert centre.spread is not None
    cuts = [count for count, length in _best_cuts(tree.lengths(with_prior=True)[:limit])
            if length < min(groups.length, centre.length) + _MARGIN]
    if max(cuts, default=0) <= judge.dim:
        return []
    proposed = [tree.prior_cut(count) for count in cuts]
    if groups.labels.any():
        proposed.append(judge.with_prior(groups.labels, centre.spread)[0])
    best = _shortest(proposed)
    return [best] if best.n_groups > judge.dim else []


def _improved(judge: Judge, labels: Ints, cost: float, lam: float | None) -> Iterator[Partition]:
    """A partition as proposed, and after merges and moves."""
    yield Partition(labels, judge.criterion(labels) + cost, lam)
    value, polished = judge.polish(labels)
    yield Partition(polished, value + cost, lam)


def _from_path(judge: Judge, quick: Judge, path: Path, max_groups: int | None) -> list[Partition]:
    """Proposals of the path to improve; their lengths are what must be added for users that were assigned.

    The number of groups is limited; without `max_groups` the limit doubles if needed.
    """
    limit, ranked = max_groups or _FIRST_LIMIT, list[tuple[float, Partition]]()
    while True:
        shortest, n_groups = np.inf, 0
        for labels, lam in proposals_of(path, limit):
            labels, cost = quick.absorb(labels, limit)
            improved = _shortest(_improved(quick, labels, cost, lam))
            ranked.append((improved.length, Partition(labels, cost, lam)))
            shortest, n_groups = min((shortest, n_groups), (improved.length, improved.n_groups))
        if max_groups is not None or n_groups < limit or 2 * limit > judge.n:
            break
        limit *= 2
    if quick is judge:
        return [start for _, start in ranked]
    best = dict[bytes, Partition]()
    for _, start in sorted(ranked, key=lambda pair: pair[0]):
        if start.labels.any() and len(best) < _EXAMINED:
            best.setdefault(start.labels.tobytes(), start)
    return list(best.values())


def _with_spread(judge: Judge, tree: ModelTree, centre: Partition, groups: Partition,
                 limit: int) -> Iterator[Partition]:
    """Groups with a spread within: the best groups without spread, and a cut of the tree."""
    assert centre.spread is not None
    models, covariance = centre.spread.models, 0.1 * centre.spread.covariance
    if groups.labels.any():
        yield judge.with_spread(groups.labels, 0, models, covariance)
    shortest, labels, waited = np.inf, groups.labels, 0
    for count in range(2, limit + 1):
        length, cut = tree.spread_cut(count)
        waited += 1
        if length < shortest:
            shortest, labels, waited = length, cut, 0
        if waited == _PATIENCE:
            break
    if shortest < min(groups.length, centre.length) + _MARGIN:
        length = np.inf
        for rank in range(centre.spread.rank + 1):
            within = judge.with_spread(labels, rank, models, covariance)
            yield within
            if within.length > min(length, groups.length + _MARGIN):
                break
            length = within.length
