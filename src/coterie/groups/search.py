"""The search for groups: proposals from the path, their description lengths, and their improvement.

All is computed from what users say of their losses to second order (`coterie.groups.summaries`).
With losses that are not quadratic, evidence for a spread of models depends on terms beyond that:
users give it by Laplace's approximation, in the round in which the spread is scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from coterie.base.types import Array, Ints
from coterie.convex.path import Path
from coterie.data.users import Participants
from coterie.groups.partitions import Judge, ModelTree, Partition
from coterie.groups.proposals import (
    WithRidge,
    nearest_users,
    proposals_of,
    sample_of,
    search_path,
    split_off,
)
from coterie.groups.spread import Spread, intercept_spread
from coterie.groups.summaries import Source, Summaries, ask_evidence
from coterie.losses import Loss
from coterie.losses.derived import Quadratic
from coterie.problem.graph import Graph
from coterie.problem.problem import Problem
from coterie.problem.solution import Solution
from coterie.problem.weights import LocalModels

_FIRST_LIMIT = 8  # number of groups of the first search; doubled while that many are found
# Partitions of the path of a sample of the users, or with losses that are not quadratic, to
# examine.
_EXAMINED = 4
_TOL, _TOL_OF_SAMPLE = 1e-6, 1e-3  # relative gaps on the path; only its groups are used
_CUTS = 3  # cuts of the tree of models that are improved
_MARGIN = 50.0  # cuts of that tree that are worse than other descriptions by more nats are ignored
# The search for groups with spread ends after this many numbers of groups without improvement.
_PATIENCE = 3
_UNSURE = 0.15  # what lengths by second-order models may be wrong by, over the length of one model
_KEPT = 6  # partitions that are proposed to another search
_ASKED = 3  # partitions whose likelihood users are asked for

#: Partitions, and what moves cost in each.
Proposals = tuple[tuple[Ints, float], ...]
Kind = Literal["one model", "one centre with spread", "groups"]


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """What can be chosen in a search; see `find_groups`."""

    proposals: Proposals | None = None
    max_groups: int | None = None
    n_lams: int = 60
    k: int = 5
    ridge: float = 0.1
    progress: Callable[[Solution, int], None] | None = None


class SearchResult(NamedTuple):
    """All descriptions compared, and the path they come from."""

    examined: list[Partition]
    path: Path

    @property
    def best(self) -> Partition:
        """The shortest description."""
        return shortest(self.examined)

    @property
    def proposals(self) -> Proposals:
        """The best partitions, and what moves cost in each, for another search on the same users.
        """
        return tuple((part.labels, part.cost) for part in _best(self.examined, _KEPT))


def shortest(descriptions: Iterable[Partition]) -> Partition:
    """The description of least length."""
    return min(descriptions, key=lambda partition: partition.length)


def _best(descriptions: Iterable[Partition], most: int) -> list[Partition]:
    """The shortest descriptions with different groups."""
    distinct = dict[bytes, Partition]()
    for part in sorted(descriptions, key=lambda part: part.length):
        if part.labels.any():
            distinct.setdefault(part.labels.tobytes(), part)
    return list(distinct.values())[:most]


def kind_of(description: Partition) -> Kind:
    """What a description says of the users."""
    if description.labels.any():
        return "groups"
    return "one model" if description.spread is None else "one centre with spread"


def search(known: Summaries, options: SearchOptions) -> SearchResult:
    """The search among users, by their summaries, with standardised features."""
    judge, given = Judge.of(known), options.proposals
    path = propose(known.users, known.loss, known.certain, options)
    found = SearchResult(_within_limit(lambda limit: _descriptions(judge, path, given, limit),
                                       options.max_groups), path)
    return found._replace(examined=[*found.examined, *_with_levels(known, judge, found, options)])


def _with_levels(known: Summaries, judge: Judge, found: SearchResult,
                 options: SearchOptions) -> list[Partition]:
    """Groups of slopes, where every user has an intercept of its own: they are searched with the
    intercepts integrated out, if the shortest description says that models vary.
    """
    free, spread = known.intercepts, found.best.spread
    if spread is None or free.all() or not free.any() or options.proposals is not None:
        return []
    T = np.diag(np.where(free, np.diag(spread.covariance), 0.0))
    inner = replace(known.around(T), intercepts=np.zeros_like(free))
    again = search(inner, replace(options, progress=None))
    out, cost = list[Partition](), 0.5 * float(free.sum() * np.log(judge.n))
    for part in _best([part for part in again.examined if part.spread is None], _EXAMINED):
        within = intercept_spread(known.expansions, part.labels, T, free, cost)
        out.append(judge.described(part.labels, within))
    return out


def search_parts(source: Source, summaries: list[Summaries],
                 options: SearchOptions) -> tuple[list[Summaries], list[SearchResult]]:
    """The searches in all parts of the rows, with the evidence of users for spreads; one round.

    Returns
    -------
    The summaries with their spread scaled, and the results, by part.
    """
    found = [search(known, options) for known in summaries]
    asked = [_doubted(each.examined) for each in found]
    told = ask_evidence(source, summaries, [
        [(part.labels, None if part.spread is None else part.spread.covariance) for part in each]
        for each in asked])
    out = [each._replace(examined=_weighed(known, each.examined, some, evidence))
           for each, known, some, (_, evidence) in zip(found, summaries, asked, told, strict=True)]
    return [known for known, _ in told], out


def _doubted(examined: list[Partition]) -> list[Partition]:
    """The descriptions that may be the shortest: second-order models do not know that the loss of
    classes is never negative, and are not exact for spreads.
    """
    plain = [part for part in examined if part.spread is None]
    one = next(part for part in plain if not part.labels.any())
    worst = shortest(plain).length + max(_MARGIN, _UNSURE * abs(one.length))
    spreads = [part for part in examined if part.spread is not None and part.length <= worst]
    few = [*_best(plain, _ASKED), *_best(spreads, 1)]
    return [one, *(replace(part, spread=None) for part in few), *spreads]


def _weighed(known: Summaries, examined: list[Partition], asked: list[Partition],
             evidence: Array) -> list[Partition]:
    """The descriptions by what users answered; those that nobody was asked about are left out.

    No spread within groups is described where there is none around one centre.
    """
    out, sums = list[Partition](), evidence.sum(axis=0)
    ordered = sorted(examined, key=lambda part: -part.length)  # of equal groups the shortest
    lengths = {part.labels.tobytes(): part for part in ordered if part.spread is None}
    for part, value in zip(asked, sums.tolist(), strict=True):
        if part.spread is not None:
            out.append(replace(part, length=part.length + part.spread.evidence - value,
                               spread=replace(part.spread, evidence=value)))
            continue
        plain = lengths.get(part.labels.tobytes())
        if plain is not None:
            centres = known.expansions.centres(part.labels)
            before = float(known.expansions.at_own(centres[part.labels]).sum())
            out.append(replace(plain, length=plain.length + before - value))
    together = out[0].length
    centre = min((part.length for part in out if part.spread is not None
                  and not part.labels.any()), default=np.inf)
    if centre < together:
        return out
    return [part for part in out if part.spread is None or not part.labels.any()]


def propose(users: Participants, loss: Loss, sizes: Array | Ints, options: SearchOptions) -> Path:
    """The path with quadratic losses, of a sample if there are many users; empty if there are
    proposals already.
    """
    if options.proposals is not None:
        problem = Problem(users, WithRidge(loss, options.ridge), 0.0,
                          Graph.from_edges(users.n_users, []))
        return Path(problem=problem, solutions=(), tol=_TOL)
    some, tol = sample_of(users.n_users), _TOL
    if some is not None:
        users, loss, sizes, tol = Participants([users.names[i] for i in some],
                                               users.feature_names), \
            _expanded(users, loss, some), sizes[some], _TOL_OF_SAMPLE
    problem, local = whole_problem(users, loss, sizes, options)
    return search_path(problem, local, options.max_groups or _FIRST_LIMIT, options.n_lams, tol,
                       options.progress)


def whole_problem(users: Participants, loss: Loss, sizes: Array | Ints,
                  options: SearchOptions) -> tuple[Problem, LocalModels]:
    """The problem whose path proposes groups, with weights by Wald distance, and local models."""
    local, graph = nearest_users(users, loss, sizes, options.k, options.ridge)
    return Problem(users, WithRidge(loss, options.ridge), 0.0, graph), local


def _expanded(users: Participants, loss: Loss, some: Ints) -> Quadratic:
    """The quadratic losses of some users, without their rows."""
    if isinstance(loss, Quadratic):
        return Quadratic(point=loss.point[some], value=loss.value[some],
                         gradient=loss.gradient[some],
                         hessian=loss.hessian[some])
    samples = loss.prepare(users.data.take(some))
    zero = np.zeros((len(some), samples.dim))
    value, gradient, hessian = loss.evaluate(samples, zero, 2)
    return Quadratic(point=zero, value=value, gradient=gradient, hessian=hessian)


def _within_limit(descriptions: Callable[[int | None], list[Partition]],
                  max_groups: int | None) -> list[Partition]:
    """All descriptions with at most `max_groups` groups.

    If one centre with spread is best of them, but more groups than allowed are better still, users
    do not vary continuously: then this description is left out.
    """
    examined = descriptions(max_groups)
    if max_groups is None or kind_of(shortest(examined)) != "one centre with spread" \
            or shortest(descriptions(None)).n_groups <= max_groups:
        return examined
    return [partition for partition in examined if kind_of(partition) != "one centre with spread"]


def _descriptions(judge: Judge, path: Path, given: Proposals | None,
                  max_groups: int | None) -> list[Partition]:
    """All descriptions to compare: one model, one centre with spread, and partitions as proposed
    and improved.
    """
    everyone = np.zeros(judge.n, dtype=np.int64)
    together = Partition(everyone, judge.criterion(everyone))
    if judge.n == 1 or max_groups == 1:
        return [together]
    centre = judge.one_centre()
    assert centre.spread is not None
    proposed = [partition for start, _ in _proposed(judge, path, given, max_groups, centre.spread)
                for partition in _improved(judge, start.labels, start.length, start.lam)]
    tree, limit = _tree(judge, centre.spread), min(judge.n, max_groups or judge.n)
    known, best = {partition.labels.tobytes() for partition in proposed}, \
        shortest([together, centre, *proposed])
    for labels, cost in _cuts(judge, tree, limit, best.length):
        if labels.tobytes() not in known:
            proposed += _improved(judge, labels, cost, None)
    groups = shortest([together, *proposed])
    proposed += _with_prior(judge, tree, centre, groups, limit)
    if centre.length < together.length:
        proposed += _with_spread(judge, tree, centre, groups, limit)
    return [together, centre, *proposed]


def _tree(judge: Judge, centre: Spread) -> ModelTree:
    return ModelTree(judge, centre, sample_of(judge.n))


def _cuts(judge: Judge, tree: ModelTree, limit: int, best: float) -> Iterator[tuple[Ints, float]]:
    """The shortest cuts of the tree that are not much worse than the best description, and what
    they cost more.
    """
    for count, length in _best_cuts(tree.lengths()[:limit]):
        if tree.some is not None or length < best + judge.model_cost + _MARGIN:
            yield tree.cut(count), judge.move_cost(count)


def _best_cuts(lengths: Array) -> list[tuple[int, float]]:
    """(number of groups, length) of the shortest of the lengths of 1, 2, ... groups, except that of
    one group.
    """
    counts = np.argsort(lengths[1:], kind="stable")[:_CUTS] + 2
    return [(count, float(lengths[count - 1])) for count in counts.tolist()]


def _with_prior(judge: Judge, tree: ModelTree, centre: Partition, groups: Partition,
                limit: int) -> list[Partition]:
    """The best groups with models that vary around one centre, if they are many.

    The models of no more groups than coordinates do not show how they vary. Then nothing is
    proposed: the same code must have been compared for few and for many groups.
    """
    assert centre.spread is not None
    cuts = [count for count, length in _best_cuts(tree.lengths(with_prior=True)[:limit])
            if tree.some is not None or length < min(groups.length, centre.length) + _MARGIN]
    if max(cuts, default=0) <= judge.dim:
        return []
    proposed = [tree.prior_cut(count) for count in cuts]
    if groups.labels.any():
        proposed.append(judge.with_prior(groups.labels, centre.spread)[0])
    best = shortest(proposed)
    return [best] if best.n_groups > judge.dim else []


def _improved(judge: Judge, labels: Ints, cost: float, lam: float | None) -> Iterator[Partition]:
    """A partition as proposed, and after merges and moves."""
    yield Partition(labels, judge.criterion(labels) + cost, lam, cost=cost)
    value, polished = judge.polish(labels)
    yield Partition(polished, value + cost, lam, cost=value + cost - judge.criterion(polished))


def _from_path(judge: Judge, path: Path, max_groups: int | None) -> list[tuple[Partition,
        Partition]]:
    """Proposals of the path: as they are, with what must be added for users that were assigned, and
    improved.

    The number of groups is limited; without `max_groups` the limit doubles if needed.
    """
    limit, proposed = max_groups or _FIRST_LIMIT, list[tuple[Partition, Partition]]()
    while True:
        least, n_groups = np.inf, 0
        for labels, lam in proposals_of(path, limit):
            labels, cost = judge.absorb(labels, limit)
            improved = shortest(_improved(judge, labels, cost, lam))
            proposed.append((Partition(labels, cost, lam), improved))
            least, n_groups = min((least, n_groups), (improved.length, improved.n_groups))
        if max_groups is not None or n_groups < limit or 2 * limit > judge.n:
            return proposed
        limit *= 2


def _proposed(judge: Judge, path: Path, given: Proposals | None, max_groups: int | None,
              centre: Spread) -> list[tuple[Partition, Partition]]:
    """As `_from_path`; where the path is that of a sample, its best proposals for all users, and
    rare groups added.
    """
    some, labels = sample_of(judge.n), list[tuple[Ints, float]]()
    if given is not None:
        for each, cost in given:
            kept, toll = judge.absorb(each, max_groups or judge.n)
            labels.append((kept, cost + toll))
    elif some is None:
        return _from_path(judge, path, max_groups)
    else:
        found = [improved for _, improved in _from_path(judge.take(some), path, max_groups)]
        for part in _best(found, _EXAMINED):
            labels.append((judge.extended(part.labels, some), judge.move_cost(part.n_groups)))
    if some is not None:
        everyone = np.zeros(judge.n, dtype=np.int64)
        best = min([everyone, *(each for each, _ in labels)],
                   key=lambda each: judge.polish(each)[0])
        split, toll = judge.absorb(split_off(judge, judge.polish(best)[1], centre.covariance),
                                   max_groups or judge.n)
        labels.append((split, toll + judge.move_cost(int(split.max()) + 1)))
    return [(Partition(each, cost), shortest(_improved(judge, each, cost, None))) for each,
            cost in labels]


def _counts(most: int) -> Iterator[int]:
    """Numbers of groups to try: 2, 3, ..., and then with growing steps."""
    count = 2
    while count <= most:
        yield count
        count += max(count // 4, 1)


def _with_spread(judge: Judge, tree: ModelTree, centre: Partition, groups: Partition,
                 limit: int) -> Iterator[Partition]:
    """Groups with a spread within: the best groups without spread, and a cut of the tree."""
    assert centre.spread is not None
    covariance = 0.1 * centre.spread.covariance
    if groups.labels.any():
        yield judge.with_spread(groups.labels, 0, covariance)
    least, best, waited = np.inf, None, 0
    for count in _counts(min(limit, tree.leaves.n)):
        length, cut = tree.spread_cut(count)
        waited += 1
        if length < least:
            least, best, waited = length, cut, 0
        if waited == _PATIENCE:
            break
    if best is not None and least < min(groups.length, centre.length) + _MARGIN:
        length, labels = np.inf, tree.labels_of(best)
        for rank in range(centre.spread.rank + 1):
            within = judge.with_spread(labels, rank, covariance)
            yield within
            if within.length > min(length, groups.length + _MARGIN):
                break
            length = within.length
