"""Federations that are attacked: simulated in this process, with everything recorded that crosses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from coterie.base.errors import Incompatible, InvalidInput
from coterie.data.scaling import Standardizer
from coterie.data.users import Users
from coterie.federated.algorithms import ALGORITHMS
from coterie.federated.client import Data, answer_all
from coterie.federated.fit import fit_federation
from coterie.federated.private.policy import Privacy
from coterie.federated.protocol.messages import Batch
from coterie.federated.run import in_process, run_federation
from coterie.federated.runtimes.nodes import LocalNodes
from coterie.federated.settings import Deployment, FederationSettings
from coterie.fitting.settings import Settings
from coterie.lab.attacks.inference import LabelledRows
from coterie.lab.attacks.recording import Evidence, Exchange, Recorder, evidence_of
from coterie.losses import LOSSES, LinearLoss, Logistic, Squared, name_of

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
