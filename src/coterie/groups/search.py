"""The search for groups: proposals from the path, their description lengths, and their improvement.

With a quadratic loss all is computed from second moments. Other losses are known by what users
answer (`coterie.groups.oracle`), in about ten rounds:

1. Users minimise their losses, pulled to the model that fits the mean target, and send a
   second-order model there. The sum of these gives a pooled model, to which users are pulled next:
   their second-order models there propose.
2. Proposals are partitions of the path and of a tree, before and after improvement by the
   second-order models. The models of their groups are refined by the users' slopes, with BFGS
   updates of the summed curvatures (Nocedal and Wright 2006), and users send the values of their
   losses at the models of all groups: these are the true lengths.
3. Users move and groups merge by these values, all proposals at the same time, while lengths
   decrease.
4. For descriptions with a spread, T comes from the second-order models, and users send their
   evidence for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from coterie.base.types import Array, Ints
from coterie.convex.path import Path
from coterie.data.users import Participants, Users
from coterie.groups.oracle import RowsOracle, UserOracle, near_everyone, ridge_of
from coterie.groups.oracle import near_groups as near_groups
from coterie.groups.partitions import Judge, ModelTree, Partition
from coterie.groups.proposals import WithRidge, nearest_users, proposals_of, search_path
from coterie.groups.refining import Refining
from coterie.groups.sampling import sample_of, split_off
from coterie.groups.spread import Spread
from coterie.losses import Loss, Samples
from coterie.losses.derived import Quadratic
from coterie.problem.graph import Graph
from coterie.problem.problem import Problem
from coterie.problem.solution import Solution

_FIRST_LIMIT = 8  # number of groups of the first search; doubled while that many are found
# Partitions of the path of a sample of the users, or with losses that are not quadratic, to
# examine.
_EXAMINED = 4
_TOL, _TOL_OF_SAMPLE = 1e-5, 1e-3  # relative gaps on the path; only its groups are used
_CUTS = 3  # cuts of the tree of models that are improved
_MARGIN = 50.0  # cuts of that tree that are worse than other descriptions by more nats are ignored
# The search for groups with spread ends after this many numbers of groups without improvement.
_PATIENCE = 3
# Steps from models of groups by second-order models to those that are judged.
_REFINED, _REFINED_AGAIN = 3, 1
_UNSURE = 0.15  # what lengths by second-order models may be wrong by, over the length of one model
_KEPT = 6  # partitions that are proposed to another search
_IMPROVED = 4  # rounds of moving and merging by true values

Kind = Literal["one model", "one centre with spread", "groups"]


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """What can be chosen in a search; see `find_groups`."""

    proposals: tuple[tuple[Ints, float], ...] | None = None
    max_groups: int | None = None
    n_lams: int = 60
    k: int = 5
    ridge: float = 0.1
    progress: Callable[[Solution, int], None] | None = None


class SearchResult(NamedTuple):
    """All descriptions compared, and the path they come from."""

    examined: list[Partition]
    path: Path
    # (n_groups, dim) of the shortest description, nearly, if they are known.
    models: Array | None = None

    @property
    def best(self) -> Partition:
        """The shortest description."""
        return shortest(self.examined)

    @property
    def proposals(self) -> tuple[tuple[Ints, float], ...]:
        """The best partitions, and what moves cost in each, for another search on the same users.
        """
        return tuple((part.labels, part.cost) for part in _best(self.examined, _KEPT))


class Sources(NamedTuple):
    """Where proposals come from: a path, unless there are proposals already."""

    path: Path
    given: tuple[tuple[Ints, float], ...] | None


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


def search(users: Users, loss: Loss, options: SearchOptions) -> SearchResult:
    """The search among users whose rows are in this process, with standardised features."""
    if not loss.quadratic:
        return search_by_asking(users, RowsOracle(users, loss), options)
    judge, path = Judge.of(users, loss), _path(users, loss, users.sizes, options)
    sources = Sources(path, options.proposals)
    return SearchResult(_within_limit(lambda limit: _descriptions(judge, sources, limit),
                                      options.max_groups), path)


def search_by_asking(users: Participants, oracle: UserOracle,
                     options: SearchOptions) -> SearchResult:
    """The search among users who answer, wherever their rows are."""
    asking = _Asking(users, oracle, options)
    examined = _within_limit(asking.descriptions, options.max_groups)
    return SearchResult(examined, asking.path,
                        oracle.known.get(("models", shortest(examined).labels.tobytes())))


def _path(users: Participants, loss: Loss, sizes: Ints, options: SearchOptions) -> Path:
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
    local, graph = nearest_users(users, loss, sizes, options.k, options.ridge)
    problem = Problem(users, WithRidge(loss, options.ridge), 0.0, graph)
    return search_path(problem, local, options.max_groups or _FIRST_LIMIT, options.n_lams, tol,
                       options.progress)


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


def _descriptions(judge: Judge, sources: Sources, max_groups: int | None) -> list[Partition]:
    """All descriptions to compare: one model, one centre with spread, and partitions as proposed
    and improved.
    """
    everyone = np.zeros(judge.n, dtype=np.int64)
    together = Partition(everyone, judge.criterion(everyone))
    if judge.n == 1 or max_groups == 1:
        return [together]
    centre = judge.one_centre()
    assert centre.spread is not None
    proposed = [partition for start, _ in _proposed(judge, sources, max_groups, centre.spread)
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


def _proposed(judge: Judge, sources: Sources, max_groups: int | None,
              centre: Spread) -> list[tuple[Partition, Partition]]:
    """As `_from_path`; where the path is that of a sample, its best proposals for all users, and
    rare groups added.
    """
    some, labels = sample_of(judge.n), list[tuple[Ints, float]]()
    if sources.given is not None:
        for each, cost in sources.given:
            kept, toll = judge.absorb(each, max_groups or judge.n)
            labels.append((kept, cost + toll))
    elif some is None:
        return _from_path(judge, sources.path, max_groups)
    else:
        found = [improved for _, improved in _from_path(judge.take(some), sources.path, max_groups)]
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


def refining(judge: Judge, labels: Ints) -> Refining:
    """The models of the groups by second-order models, to be refined."""
    fitted = judge.fitted(labels)
    return Refining(labels, judge.weights, fitted.models, fitted.sums.curvatures)


class _Judged(NamedTuple):
    """A partition with the true models of its groups and what users say of them."""

    partition: Partition
    cost: float  # that is part of the length for moves and assignments
    models: Array  # (n_groups, dim)
    likelihoods: Array  # (n_users, n_groups)
    gradients: Array  # (n_users, dim) of every user at the model of its group


class _Asking:
    """A search that knows the losses by the answers of an oracle only."""

    def __init__(self, users: Participants, oracle: UserOracle, options: SearchOptions) -> None:
        self.users, self.oracle, self.options, self.n = users, oracle, options, users.n_users
        self.everyone, self.weights = np.zeros(self.n, dtype=np.int64), oracle.sizes / oracle.scale
        self.ridge = ridge_of(oracle.loss, Samples(users, oracle.dim))
        self.local, (self.near, information) = near_everyone(users, oracle, options.ridge)
        self.n_eff = float(oracle.sizes @ information)
        self.quick = self._judge(self.near, self.n_eff)
        self.path = _path(users, self.near, oracle.sizes, options)
        self.sources = Sources(self.path, options.proposals)

    def _judge(self, loss: Quadratic, n_eff: float) -> Judge:
        return Judge(loss, loss.prepare(self.users), self.weights, self.ridge, n_eff)

    def descriptions(self, max_groups: int | None) -> list[Partition]:
        """All descriptions to compare, with true lengths."""
        quick, everyone = self.quick, self.everyone
        if self.n == 1 or max_groups == 1:
            return [self._true([(quick, everyone, 0.0, None)])[0].partition]
        spread_judge = self._judge(self.local, self.n_eff)
        centre, near = spread_judge.one_centre(), quick.one_centre()
        assert near.spread is not None
        proposed, limit = self._proposals(max_groups, near.spread), \
            min(self.n, max_groups or self.n)
        tree = _tree(quick, near.spread)
        lengths = [quick.criterion(labels) + cost for _, labels, cost, _ in proposed]
        best = min([quick.criterion(everyone), near.length, *lengths])
        for labels, cost in _cuts(quick, tree, limit, best):
            proposed += [(quick, p.labels, p.length - quick.criterion(p.labels), None)
                         for p in _improved(quick, labels, cost, None)]
        different = {labels.tobytes(): (judge, labels, cost, lam) for judge, labels, cost,
                     lam in proposed[::-1]
                     if labels.any()}
        judged = self._true([(quick, everyone, 0.0, None),
                             *self._promising(list(different.values())[::-1])])
        together, asked = judged[0].partition, self._improve(judged[1:])
        groups, spreads = shortest([together, *asked]), [centre]
        for p in _with_prior(quick, tree, near, groups, limit):
            true = self._true([(quick, p.labels, 0.0, None)])[0].partition.length
            asked.append(replace(p, length=p.length - quick.criterion(p.labels) + true))
        spreads += _with_spread(spread_judge, tree, centre, groups, limit)
        with_evidence = self._with_evidence(spreads,
                                            groups.length
                                            + max(_MARGIN, _UNSURE * abs(together.length)))
        # No spread within groups where there is none around one centre.
        if with_evidence[0].length >= together.length:
            with_evidence = with_evidence[:1]
        return [together, *with_evidence, *asked]

    def _promising(self, proposed: list[tuple[Judge, Ints, float, float | None]],
                   ) -> list[tuple[Judge, Ints, float, float | None]]:
        """Proposals that may be best, by second-order models; all of them if there are few users.
        """
        if sample_of(self.n) is None:
            return proposed
        one, lengths = self.quick.criterion(self.everyone), [judge.criterion(labels) + cost
                                                             for judge, labels, cost, _ in proposed]
        least = min(lengths, default=one)
        worst = least + max(_MARGIN, _UNSURE * abs(one))
        return [each for each, length in zip(proposed, lengths, strict=True) if length <= worst]

    def _proposals(self, max_groups: int | None,
                   centre: Spread) -> list[tuple[Judge, Ints, float, float | None]]:
        """The best proposals of the path by second-order models, as they are and improved."""
        quick, chosen, seen = self.quick, list[tuple[Judge, Ints, float, float | None]](), \
            set[bytes]()
        for start, improved in sorted(_proposed(quick, self.sources, max_groups, centre),
                                      key=lambda pair: pair[1].length):
            if start.labels.any() and start.labels.tobytes() not in seen and len(seen) < _EXAMINED:
                seen.add(start.labels.tobytes())
                chosen.append((quick, start.labels, start.length, start.lam))
                chosen.append((quick, improved.labels,
                               improved.length - quick.criterion(improved.labels),
                               improved.lam))
        return chosen

    def _true(self, proposed: list[tuple[Judge, Ints, float, float | None]],
              steps: int = _REFINED) -> list[_Judged]:
        """True models and lengths of partitions, all in the same rounds."""
        rows, refined = np.arange(self.n), [refining(judge, labels) for judge, labels, _,
                                            _ in proposed]
        starts = np.cumsum([0, *(len(part.models) for part in refined)])
        for _ in range(steps + 1):
            own = np.stack([start + part.labels for start,
                            part in zip(starts, refined, strict=False)], axis=1)
            values, gradients = self.oracle.slopes(np.concatenate([part.trial for part in refined]),
                                                   own)
            for k, part in enumerate(refined):
                theirs = values[:, starts[k]:starts[k + 1]]
                part.take(theirs[rows, part.labels] + 0.5
                          * (part.trial**2 @ self.ridge)[part.labels], gradients[:, k],
                          theirs)
        judged = list[_Judged]()
        for part, (judge, labels, cost, lam) in zip(refined, proposed, strict=True):
            likelihoods, sizes = -self.weights[:, None] * part.values, np.bincount(labels)
            length = float(sizes @ np.log(self.n / sizes) - likelihoods[rows, labels].sum()) \
                + len(sizes) * judge.model_cost
            self.oracle.known["models", labels.tobytes()] = part.models
            judged.append(_Judged(Partition(labels, length + cost, lam, cost=cost), cost,
                                  part.models, likelihoods,
                                  part.gradients))
        return judged

    def _improve(self, judged: list[_Judged]) -> list[Partition]:
        """Merge groups and move users by true values while lengths decrease, in all partitions at
        the same time.
        """
        examined, rows = [part.partition for part in judged], np.arange(self.n)
        for _ in range(_IMPROVED):
            again, before = list[tuple[Judge, Ints, float, float | None]](), list[Partition]()
            for part in judged:
                labels, models = part.partition.labels, part.models[part.partition.labels]
                value = -part.likelihoods[rows, labels] / self.weights + 0.5 \
                    * (models**2 @ self.ridge)
                judge = self._judge(replace(self.near, point=models, value=value,
                                            gradient=part.gradients), self.n_eff)
                judge.know(labels, part.models, part.likelihoods)
                length, moved = judge.polish(labels)
                if moved.any() and not np.array_equal(moved, labels):
                    again.append((judge, moved, part.cost + length - judge.criterion(moved), None))
                    before.append(part.partition)
            if not again:
                break
            judged = [part for part, old in zip(self._true(again, _REFINED_AGAIN), before,
                                                strict=True)
                      if part.partition.length < old.length]
            examined += [part.partition for part in judged]
        return examined

    def _with_evidence(self, described: list[Partition], worst: float) -> list[Partition]:
        """Descriptions with a spread, with the evidence that users give for it unless they are much
        too long.
        """
        if not (asked := [part for part in described if part.length <= worst]):
            return described
        spreads = [(part.labels, part.spread) for part in asked if part.spread is not None]
        centres = [self.quick.expansions.marginal(spread.covariance)[0].centres(labels)[labels]
                   for labels, spread in spreads]
        covariances = np.stack([spread.covariance for _, spread in spreads])
        evidence = self.oracle.evidence(np.stack(centres, axis=1), covariances).sum(axis=0)
        told = {id(part): self.quick.described(labels, replace(spread, evidence=float(value)))
                for part, (labels, spread), value in zip(asked, spreads, evidence, strict=True)}
        return [told.get(id(part), part) for part in described]
