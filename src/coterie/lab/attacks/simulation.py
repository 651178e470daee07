"""Federations that are attacked: simulated in this process, with everything recorded that crosses
and what it says of each user, and with one user that lies.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from coterie.base.errors import CoterieWarning, Incompatible, InvalidInput
from coterie.base.types import Array, Ints
from coterie.data.moments import Standardizer
from coterie.data.users import Users
from coterie.federated.algorithms import ALGORITHMS
from coterie.federated.algorithms.base import Replies
from coterie.federated.algorithms.forms import between
from coterie.federated.algorithms.newton import Newton
from coterie.federated.client import Data, answer_all
from coterie.federated.fit import fit_federation
from coterie.federated.private.policy import Privacy
from coterie.federated.protocol.messages import Batch, Fields, Message, Reply, square
from coterie.federated.run import in_process, run_federation
from coterie.federated.runtimes.in_process import LocalNodes, LocalRuntime
from coterie.federated.settings import Deployment, FederationSettings
from coterie.fitting.settings import Settings
from coterie.losses import LOSSES, LinearLoss, Logistic, Loss, Squared, name_of
from coterie.losses.affine import AffineLoss
from coterie.problem.problem import Problem
from coterie.problem.solution import Solution


class LabelledRows(NamedTuple):
    """Rows with their targets, in the units of the models."""

    features: Array  # (n, p)
    targets: Array  # (n,)

    def take(self, index: Ints) -> LabelledRows:
        """Some of the rows."""
        return LabelledRows(self.features[index], self.targets[index])

    def joined(self) -> Array:
        """(n, p + 1) features and target."""
        return np.concatenate([self.features, self.targets[:, None]], axis=1)


# What an honest-but-curious server keeps of a run: every query and every reply, and what they say
# of each user.
#
# All replies are of few kinds, and most are the same thing in other words: the gradient of a user's
# loss at a known point, often with the Hessian. `evidence_of` brings them into this form.
#
#     expand, gradient, around    at the point of the query
#     prox, settle, local, alone  the point minimises f(x) + t/2 ||x - centre||^2, so the gradient
#                                 is t (centre - point)
#     around, with a covariance   of an envelope: gradient and Hessian of the loss at the user's own
#                                 model follow from it
#     train                       the step divided by its length is near the gradient where it began
#     facts, moments              sums over rows, of all rows and of parts of them


#: One round: what was asked, and what was answered.
Exchange = tuple[Batch, Batch]


class Recorder:
    """A runtime that keeps all that crosses; everything else is done by the runtime it wraps.

    Parameters
    ----------
    runtime : carries queries and replies.
    """

    def __init__(self, runtime: Any) -> None:
        self.runtime, self.exchanges = runtime, list[Exchange]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runtime, name)

    def exchange(self, queries: Batch) -> Replies:
        """Ask, wait as long as a round lasts, and keep both."""
        replies: Replies = self.runtime.exchange(queries)
        self.exchanges += [(queries, batch) for batch in replies.batches if len(batch)]
        return replies


@dataclass(frozen=True, eq=False)
class Sums:
    """Number, mean and scatter of some rows of a user, of its features first and then, where known,
    the target.

    Parameters
    ----------
    count : number of rows.
    mean : (q,).
    scatter : (q, q) centred sums of products; None where only those of each column are known.
    """

    count: int
    mean: Array
    scatter: Array | None


@dataclass(eq=False)
class Evidence:
    """What the messages say of one user's rows: those of one part, in the units of the models.

    Parameters
    ----------
    count : number of rows.
    points : where gradients are known.
    gradients : there, without the ridge.
    curved : points where Hessians are known.
    hessians : there, without the ridge.
    sums : of the rows, or of some of them, in the units of the table.
    released : a noisy release, if there is one (`coterie.lab.attacks.inference.tracing`).
    """

    count: int
    points: list[Array] = field(default_factory=list)
    gradients: list[Array] = field(default_factory=list)
    curved: list[Array] = field(default_factory=list)
    hessians: list[Array] = field(default_factory=list)
    sums: list[Sums] = field(default_factory=list)
    released: Any = None

    def add(self, point: Array, gradient: Array, hessian: Array | None) -> None:
        """Add what is known at a point, unless it is known already."""
        if not any(np.array_equal(point, old) for old in self.points):
            self.points.append(point)
            self.gradients.append(gradient)
        if hessian is not None and not any(np.array_equal(point, old) for old in self.curved):
            self.curved.append(point)
            self.hessians.append(hessian)


#: The part of a user's rows, and its loss there: a point, the gradient and the Hessian, as far as
#: a reply says them.
Seen = tuple[int, Array, Array, Array | None]


def evidence_of(exchanges: Iterable[Exchange], loss: AffineLoss, counts: Ints,
                part: int = 0) -> list[Evidence]:
    """The evidence on each user, of all rows (part 0) or of those that are not held out (part 1).

    Parameters
    ----------
    exchanges : what crossed.
    loss : of the users; it and its ridge are public.
    counts : (n_users,) their numbers of rows.
    part : of the rows.
    """
    gathered = [Evidence(int(count)) for count in counts]
    rows = [np.array([count], dtype=float) for count in counts]  # by part
    for queries, replies in exchanges:
        for user, reply in replies.items():
            if replies.kind == "facts":
                rows[user] = reply.arrays["count"]
            if replies.kind in ("facts", "moments"):
                gathered[user].sums += _read_sums(reply.arrays, replies.kind == "moments")
                continue
            query = queries[user].arrays
            for of, point, gradient, hessian in _read(replies.kind, query, reply.arrays,
                                                      rows[user]):
                if of == part:
                    ridge = loss.ridge * loss.shrunk(len(point)) * (replies.kind != "summary")
                    gathered[user].add(point, gradient - ridge * point,
                                       None if hessian is None else hessian - np.diag(ridge))
    return gathered


def _read(kind: str, query: Fields, reply: Fields, rows: Array) -> Iterator[Seen]:
    """What a reply says of the loss of its user, who has so many rows in each part."""
    if kind == "expand":
        yield 0, *_read_expansion(query, reply)
    elif kind == "gradient":
        yield 0, query["model"], reply["gradient"], None
    elif kind == "prox":
        yield 0, reply["point"], query["t"] * (query["centre"] - reply["point"]), None
    elif kind == "local":
        point, ridge = reply["model"], float(query["ridge"])
        hessian = square(reply["hessian"][None], len(point))[0]
        yield 0, point, -ridge * point, hessian - ridge * np.eye(len(point))
    elif kind == "train":
        start, steps = query["model"], max(int(query["steps"]), 1)
        yield 0, start, (start - reply["point"]) / (steps * float(query["rate"])), None
    elif kind == "summary":  # of the rows that are not held out first, and without a ridge
        hessians = square(reply["hessian"], reply["model"].shape[-1])
        for k, (model, gradient) in enumerate(zip(reply["model"], reply["gradient"], strict=True)):
            yield len(rows) - 1 - k, model, gradient, hessians[k]
    elif kind == "around":
        covariances = square(query["covariance"], reply["gradient"].shape[-1])
        for part, (centres, gradients) in enumerate(zip(query["centre"], reply["gradient"],
                                                        strict=True)):
            for centre, gradient, T in zip(centres, gradients, covariances[part], strict=True):
                yield part, centre - rows[part] * (T @ gradient), gradient, None


def _read_expansion(query: Fields, reply: Fields) -> tuple[Array, Array, Array]:
    point, dim = query["model"], len(query["model"])
    if "share" in reply:  # the user stepped back, towards the last accepted point or towards zero
        start = query["anchor"][0] if "anchor" in query else np.zeros(dim)
        point = start + float(reply["share"][0]) * (point - start)
    if "hessian" in reply:
        return point, reply["gradient"], square(reply["hessian"], dim)[0]
    matrix = float(reply["diagonal"][0]) * np.eye(dim)
    if "factor" in reply:
        matrix = matrix + (reply["factor"] * reply["sign"][:, None]).T @ reply["factor"]
    return point, reply["gradient"], matrix


def _read_sums(reply: Fields, full: bool) -> list[Sums]:
    """Sums of the rows that are named, and of those that are in the first part but not in the
    second.
    """
    counts, means = reply["count"], reply["means"]
    scatters = [square(scatter[None], means.shape[1])[0] for scatter in reply["scatter"]] \
        if full else [None] * len(counts)
    said = [Sums(int(count), *rest) for count, *rest in zip(counts, means, scatters, strict=True)]
    # All rows less those not held out.
    if not full and len(counts) > 1 and counts[0] > counts[1]:
        left = int(counts[0] - counts[1])
        said.append(Sums(left, (counts[0] * means[0] - counts[1] * means[1]) / left, None))
    return said


# The runs.


# Points of a server that asks at points of its choice, and how far from zero they reach.
_CHOSEN, _FAR = 12, 4.0
_ROUNDS = 120  # of an algorithm: more add little to what is known


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is run and attacked.

    Parameters
    ----------
    loss : of one margin; its kind and its ridge.
    lam : the penalty strength, for algorithms that solve at a given one.
    held_out : the share of rows that every user holds out, for a fit.
    seed : of everything random.
    privacy : the budget of noisy releases, where they are attacked.
    """

    loss: LinearLoss
    lam: float = 0.02
    held_out: float = 0.2
    seed: int = 0
    privacy: Privacy | None = None


class Drawn(NamedTuple):
    """Users who take part, with rows of theirs that do not: to test membership, and as what is
    publicly known.
    """

    members: Users
    others: Users
    public: Users


#: Of one part of the rows, what the messages say of each user, and its rows as the models see them.
Part = tuple[list[Evidence], list[LabelledRows]]


class Trace(NamedTuple):
    """What crossed in a run, with the truth by which attacks are judged."""

    loss: LinearLoss
    parts: list[Part]
    # Of each user, rows that took no part, in the units of the first part.
    others: list[LabelledRows]
    public: LabelledRows  # rows that nobody used, in the same units
    table: list[LabelledRows]  # the users' rows in the units of the table
    n_rounds: int


Simulation = Callable[[Drawn, Plan], Trace]


def draw_rows(users: Users, rows: int, seed: int) -> Drawn:
    """Some rows of each user; users with less than two more rows are left out.

    Raises
    ------
    InvalidInput : fewer than two users have enough rows.
    """
    rng, spare = np.random.default_rng(seed), 2 * max(rows, 10)
    chosen = np.flatnonzero(users.counts >= rows + 2)
    if len(chosen) < 2:
        raise InvalidInput(f"only {len(chosen)} user(s) have at least {rows + 2} rows: {rows} to "
                           "take part and two more to compare them with",
                           remedy="Give fewer --rows")
    orders = [users.offsets[user] + rng.permutation(int(users.counts[user])) for user in chosen]
    names = np.array([users.names[user] for user in chosen], dtype=object)

    def take(which: slice) -> Users:
        part = [order[which] for order in orders]
        index, owner = np.concatenate(part), np.repeat(np.arange(len(part)), list(map(len, part)))
        return Users.from_arrays(users.features[index],
                                 None if users.targets is None else users.targets[index],
                                 names[owner], feature_names=users.feature_names)

    return Drawn(take(slice(rows)), take(slice(rows, rows + spare, 2)),
                 take(slice(rows + 1, rows + spare, 2)))


def rows_of(users: Users) -> LabelledRows:
    """The rows of users, one after the other."""
    none = np.zeros(users.n_samples)
    return LabelledRows(users.features, none if users.targets is None else users.targets)


def split_rows(users: Users, names: tuple[Any, ...]) -> list[LabelledRows]:
    """The rows of each of these users; none for one who has none."""
    index = {name: k for k, name in enumerate(users.names)}
    rows, nobody = rows_of(users), np.empty(0, dtype=int)
    return [rows.take(np.arange(users.offsets[index[name]], users.offsets[index[name] + 1])
                      if name in index else nobody) for name in names]


def _standardise(data: Drawn) -> tuple[Callable[[Users], Users], Users]:
    """The scaling that members agree on, and their scaled rows."""
    scaler = Standardizer.from_moments(data.members.moments())
    return scaler.transform, scaler.transform(data.members)


def _trace(data: Drawn, users: Users, scale: Callable[[Users], Users], loss: LinearLoss,
           exchanges: list[Exchange], n_rounds: int) -> Trace:
    names = data.members.names
    part = evidence_of(exchanges, loss, users.counts), split_rows(users, names)
    return Trace(loss, [part], split_rows(scale(data.others), names), rows_of(scale(data.public)),
                 split_rows(data.members, names), n_rounds)


def simulate_algorithm(name: str) -> Simulation:
    """The simulation of one algorithm at a given lam."""
    def run(data: Drawn, plan: Plan) -> Trace:
        scale, users = _standardise(data)
        settings = FederationSettings(algorithm=ALGORITHMS[name](), lam=plan.lam, seed=plan.seed,
                                      max_rounds=_ROUNDS)
        problem, runtime = in_process(users, plan.loss, settings)
        recorder = Recorder(runtime)
        federation = settings.federation(users, plan.loss, problem.graph)
        result = run_federation(federation, settings, recorder, None, problem)
        return _trace(data, users, scale, plan.loss, recorder.exchanges, result.n_rounds)

    return run


def simulate_weights(data: Drawn, plan: Plan) -> Trace:
    """The one round of local models and Hessians from which weights are made."""
    scale, users = _standardise(data)
    queries = Batch("local", 0, np.arange(users.n_users), shared={"ridge": np.array(1e-3)})
    replies = answer_all(Data.of(users, plan.loss), queries)
    return _trace(data, users, scale, plan.loss, [(queries, replies)], 1)


def simulate_active(data: Drawn, plan: Plan) -> Trace:
    """A server that does not follow the protocol: it asks for Hessians at points of its own choice.
    """
    (scale, users), rng = _standardise(data), np.random.default_rng(plan.seed)
    private, n, dim = Data.of(users, plan.loss), users.n_users, users.n_features + 1
    exchanges = list[Exchange]()
    for turn, size in enumerate(np.linspace(0.0, _FAR, _CHOSEN)):
        point = size * rng.standard_normal(dim) / np.sqrt(dim)
        queries = Batch("expand", turn, np.arange(n), {"model": np.tile(point, (n, 1))},
                        shared={"rank": np.array(-1)})
        exchanges.append((queries, answer_all(private, queries)))
    return _trace(data, users, scale, plan.loss, exchanges, _CHOSEN)


def simulate_fit(data: Drawn, plan: Plan) -> Trace:
    """A fit in which everything is chosen: by moments with squared losses, by asking with others.
    """
    name, task = name_of(plan.loss), plan.loss.task or "regression"
    settings = Settings(task=task, loss=name, ridge=plan.loss.ridge, holdout=plan.held_out,
                        seed=plan.seed)
    recorder = Recorder(LocalNodes([data.members], plan.held_out, plan.seed))
    agreed = Deployment(loss=name, ridge=plan.loss.ridge, standardize="True", holdout=plan.held_out)
    fitted = fit_federation(recorder, agreed, settings, FederationSettings(seed=plan.seed))
    private, units = recorder.data, fitted.units
    if private.samples.n_users < data.members.n_users:
        raise Incompatible("Users were refused during the fit, and messages are not compared with "
                           "rows of others. Use other --rows.")
    loss: Any = units.loss
    # Second moments are in the units of the table.
    scale = (lambda users: users) if loss.quadratic else units.inner
    trace = _trace(data, private.samples.users.data, scale, loss, recorder.exchanges,
                   fitted.n_rounds)
    if private.train is None:
        return trace
    train = (evidence_of(recorder.exchanges, loss, private.train.counts, 1),
             split_rows(private.train, data.members.names))
    return trace._replace(parts=[*trace.parts, train])


#: What can be attacked: algorithms at a given lam, a fit that chooses everything, the round that
#: makes weights, and users who answer a server that asks at points of its choice.
SIMULATIONS: dict[str, Simulation] = {**{name: simulate_algorithm(name) for name in ALGORITHMS},
                                      "fit": simulate_fit, "weights": simulate_weights,
                                      "active": simulate_active}


def loss_for(users: Users, name: LinearLoss | str = "auto", ridge: float = 1e-3) -> LinearLoss:
    """The loss that a fit would use for these targets, or the one given or named.

    Raises
    ------
    InvalidInput : a loss without targets or of several margins.
    """
    if not isinstance(name, str):
        return name
    if users.targets is None:
        raise InvalidInput("an audit needs targets", remedy="Give --target COLUMN")
    if name == "auto":
        signs = bool(np.isin(users.targets, (-1.0, 1.0)).all())
        return Logistic(ridge=ridge) if signs else Squared(ridge=ridge)
    kind = LOSSES.get(name)
    if kind is None or not issubclass(kind, LinearLoss):
        known = [key for key, one in LOSSES.items() if issubclass(one, LinearLoss)]
        raise InvalidInput(f"attacks are written for losses of one margin, got {name!r}",
                           remedy=f"Choose one of: {', '.join(known)}")
    return kind(ridge=ridge)


# What a user that lies consistently can still do: how far it moves the models of the others.
#
# A user whose answers agree with each other describes some convex loss, and no server can tell it
# from one with other data. The lie here is a loss with a slope of the liar's choice,
#
#     f(x) + strength <v, x> + lift,     v a random direction of length 1,
#
# with the values, gradients and conjugates of this very function; the lift keeps it from falling
# below zero, where losses never are. In (C) the pull on another user is at most lam w_ij, so from
# some strength on more of it moves nobody further.


# Of the loss, times strength^2: more than the slope takes from a loss with a ridge of 1e-3.
_LIFT = 1e3


class PoisonedRuntime(LocalRuntime):
    """Users in this process, of whom one answers for another loss than its own.

    Parameters
    ----------
    data : of all users.
    liar : the index of the user who lies.
    slope : (dim,) what it adds to the gradient of its loss.
    """

    def __init__(self, data: Data, liar: int, slope: Array) -> None:
        super().__init__(data)
        self.liar, self.slope = liar, slope
        self.lift = _LIFT * float(slope @ slope)

    def exchange(self, queries: Batch) -> Replies:
        if "slope" in queries.arrays:  # f*(u) of f + <s, x> is that of f at u - s
            slopes = queries.arrays["slope"] - np.where((queries.users == self.liar)[:, None],
                                                        self.slope, 0.0)
            queries = replace(queries, arrays={**queries.arrays, "slope": slopes})
        replies = [pair for batch in super().exchange(queries).batches for pair in batch.items()]
        return Replies(singles=tuple((user, self._lie(queries[user].arrays, reply)
                                      if user == self.liar else reply) for user, reply in replies))

    def _lie(self, query: Mapping[str, Any], reply: Message) -> Message:
        arrays, at = dict(reply.arrays), query["model"]
        if reply.kind == "certify":
            arrays["conjugate"] = arrays["conjugate"] - self.slope @ query["anchor"] - self.lift
        elif "share" in arrays:
            start = query["anchor"] if "anchor" in query else np.zeros((1, len(at)))
            at = between(start, at[None], np.asarray(arrays["share"]))[0]
        arrays["value"] = arrays["value"] + self.slope @ at + self.lift
        if "gradient" in arrays:
            arrays["gradient"] = arrays["gradient"] + self.slope
        return Reply(reply.kind, reply.round, arrays)


def influence(users: Users, loss: Loss, lam: float, strength: float, seed: int = 0) -> float:
    """The largest movement of a coordinate of another user's model that one liar of this strength
    causes.

    Parameters
    ----------
    users, loss, lam : the federation, solved by `Newton`; all pairs have weight 1.
    strength : length of the slope that the liar adds to its loss.
    seed : of who lies, and in which direction.

    Returns
    -------
    The largest absolute change of the others' models. If the server sets the liar aside, this is
    what its absence changes.

    Raises
    ------
    InvalidInput : settings that cannot be used.

    Example
    -------
    >>> import coterie as ct
    >>> users = ct.Users.from_arrays([[0.0], [1.0], [2.0], [3.0]])
    >>> [round(influence(users, ct.SquaredDistance(), 0.1, strength, seed=1), 3)
    ...  for strength in (0.0, 1.0, 1e3, 1e6)]
    [0.0, 0.1, 0.2, 0.2]
    """
    rng = np.random.default_rng(seed)
    problem = Problem(users, loss, lam)
    liar, direction = int(rng.integers(users.n_users)), rng.standard_normal(problem.dim)
    slope = direction / np.linalg.norm(direction)
    honest, poisoned = (_run(problem, liar, size * slope) for size in (0.0, strength))
    theirs = dict(zip(poisoned.problem.users.names, poisoned.models, strict=True))
    others = zip(users.names, honest.models, strict=True)
    return max(float(np.abs(theirs[name] - model).max())
               for k, (name, model) in enumerate(others) if k != liar)


def _run(problem: Problem, liar: int, slope: Array) -> Solution:
    settings = FederationSettings(lam=problem.lam, algorithm=Newton(), tol=1e-9)
    runtime = PoisonedRuntime(Data(problem.loss, problem.samples), liar, slope)
    federation = settings.federation(problem.users, problem.loss, problem.graph)
    with warnings.catch_warnings(action="ignore", category=CoterieWarning):
        return run_federation(federation, settings, runtime, problem=problem)
