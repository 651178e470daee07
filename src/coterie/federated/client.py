"""All of a user's work: replies to the server's queries, computed from its own data.

`answer_all` computes the replies of many users at once; `answer` does the same for a single user,
with bitwise the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.base.storage import unpacked
from coterie.base.types import Array, Flags, Ints
from coterie.data.moments import SecondMoments
from coterie.data.users import Users
from coterie.federated.algorithms.forms import (
    between,
    evaluated,
    hessian_parts,
    mean_curvature,
    ridge_of,
    stiffness,
    trusted,
)
from coterie.federated.private.ledger import NodeLedger
from coterie.federated.private.release import ReleaseQuestion, question_of, release
from coterie.federated.protocol.messages import (
    SCHEMAS,
    BadMessage,
    Batch,
    Query,
    Ragged,
    Reply,
    gather,
    misfit,
    square,
    triangle,
)
from coterie.fitting.average import predicted
from coterie.fitting.columns import QUESTIONS, HandedAverage
from coterie.fitting.kinds import group_centres
from coterie.fitting.scores import worse_than_alone
from coterie.fitting.sources import Around, expanded, own_models
from coterie.fitting.units import Units, UserStatistics
from coterie.groups.summaries import Hypotheses, evidence_of, summary_at
from coterie.losses import Loss, Personal, Samples
from coterie.losses.curvature import RowCurvature

Fields = dict[str, npt.NDArray[Any]]
Answer = tuple[Fields, dict[str, Ragged]]
_LOW_RANK = 16  # smallest number of coordinates for which a low-rank form of a Hessian is tried


@dataclass(frozen=True, eq=False)
class Data:
    """What users hold: their samples, and held-out ones if any.

    Parameters
    ----------
    loss : of all users.
    samples : what `loss.prepare` gives for the users.
    held_out : rows of the same users in the same order, to score models on.
    train : the other rows, where `samples` are all of them: in a federation that fits.
    judged : the held-out rows in the units given, and how these became the units of the models.
    withheld : (n_users,) who answers "expand" with a bound instead of a Hessian; nobody if None.
    fits : whether a fit is made.
    keeper : the ledger of noisy releases; without one there are none.
    given : the rows, and those that are not held out, in the units given, where a fit is made.
    experiment : a seed of their noise, for experiments in one process; None for the operating
        system.
    about : a digest of how rows became numbers.
    grouping : what tells users apart: the name of the column, for the account of releases.

    Example
    -------
    >>> from coterie.datasets import ellipses
    >>> from coterie.losses import SquaredHinge
    >>> private = Data.of(ellipses(seed=0).users.take([3]), SquaredHinge())     # what user 3 holds
    >>> private.n_users
    1
    """

    loss: Loss
    samples: Samples
    held_out: Users | None = None
    train: Users | None = None
    judged: tuple[Units, Users] | None = None
    withheld: Flags | None = None
    fits: bool = False
    given: tuple[Users, ...] = ()
    keeper: NodeLedger | None = None
    experiment: int | None = None
    about: str = ""
    grouping: str = ""

    @classmethod
    def of(cls, users: Users, loss: Loss, held_out: Users | None = None) -> Data:
        """The data of these users."""
        return cls(loss, loss.prepare(users), held_out)

    @property
    def n_users(self) -> int:
        return self.samples.n_users

    def release(self, user: int, question: ReleaseQuestion) -> bytes:
        """What a user releases, the same bytes each time."""
        return release(self.samples.users.data, self.keeper, user, question,
                       experiment=self.experiment, about=self.about, grouping=self.grouping)


def answer(data: Data, query: Query) -> Reply:
    """The reply of one user to one query.

    Parameters
    ----------
    data : of this user alone.
    query : from the server.

    Returns
    -------
    Reply

    Raises
    ------
    BadMessage : a query that is not part of the protocol, or does not fit the data.

    Example
    -------
    >>> from coterie.datasets import ellipses
    >>> from coterie.losses import SquaredHinge
    >>> private = Data.of(ellipses(seed=0).users.take([3]), SquaredHinge())
    >>> sorted(answer(private, Query("gradient", 0, {"model": np.zeros(3)})).arrays)
    ['curvature', 'gradient', 'stiffness', 'value']
    """
    if query.kind not in SCHEMAS:
        raise BadMessage(f"There is no query of kind {query.kind!r}.")
    reason = misfit(query, query.kind, data.samples.dim, "query")
    if reason is not None:
        raise BadMessage(f"The query is not valid: {reason}.")
    return answer_all(data, gather([(0, query)], "query"))[0]


def answer_all(data: Data, queries: Batch) -> Batch:
    """The replies of the users `queries.users`, by their index in the data, all at once.

    Raises
    ------
    BadMessage : a kind of query that does not exist.
    """
    if queries.kind not in _ANSWERS:
        raise BadMessage(f"There is no query of kind {queries.kind!r}.")
    # The receiver rejects numbers that are not finite.
    with np.errstate(over="ignore", invalid="ignore"):
        arrays, ragged = _ANSWERS[queries.kind](data, queries)
    ragged = {name: part for name, part in ragged.items() if len(part.values)}
    return Batch(queries.kind, queries.round, queries.users, arrays, ragged)


def _describe(data: Data, queries: Batch) -> Answer:
    """Count, means and centred sums of squares of the features; of the target its mean, the same
    sum, the largest.
    """
    users = data.samples.users.data.take(queries.users)
    told = {name: array[:, 0] for name, array in facts(data.loss, [users], queries).items()}
    target = told.pop("target")
    return told, {} if users.targets is None else {
        "target": Ragged.of(target.ravel(), np.full(len(target), 3))}


def _local(data: Data, queries: Batch) -> Answer:
    users, ridge = queries.users, float(queries.shared["ridge"])
    models = data.loss.prox(data.samples, None, ridge, None, users=users).points
    hessians = data.loss.evaluate(data.samples, models, 2, users).hessians + ridge \
        * np.eye(data.samples.dim)
    return {"model": models, "hessian": triangle(hessians),
            "count": data.samples.users.data.counts[users]}, {}


def _expand(data: Data, queries: Batch) -> Answer:
    """Value, gradient and Hessian at the model; with an anchor, at the furthest accepted point
    towards the model.

    Without an anchor, if the loss overflows at the model, the same from zero.
    """
    users, models = queries.users, np.array(queries.arrays["model"])
    anchors, share = queries.ragged.get("anchor"), np.ones(len(users))
    held = np.zeros(len(users), dtype=bool) if anchors is None else anchors.counts > 0
    if anchors is not None and held.any():
        share[held] = _trusted(data, users[held], anchors.values, models[held])
        models[held] = between(anchors.values, models[held], share[held])
    values, gradients, hessians = evaluated(data.loss, data.samples, models, users)
    lost = ~np.isfinite(values) | ~np.isfinite(gradients).all(axis=1) \
        | ~np.isfinite(_sizes(hessians))
    lost &= ~held
    if lost.any():  # the loss overflows
        share[lost] = _trusted(data, users[lost], np.zeros_like(models[lost]), models[lost])
        models[lost] *= share[lost, None]
        values, gradients, hessians = evaluated(data.loss, data.samples, models, users)
    ragged = {"share": Ragged.of(share[held | lost], held | lost)}
    counts, rank = data.samples.users.data.counts[users], int(queries.shared["rank"])
    withheld = None if data.withheld is None or not data.withheld[users].any() \
        else data.withheld[users]
    if isinstance(hessians, RowCurvature):
        have = queries.arrays.get("count", np.zeros(len(users))).astype(np.int64)
        forms = hessian_parts(hessians, ridge_of(hessians), have, rank, withheld)
    else:
        forms = (_forms(hessians, rank, counts) if withheld is None
                 else _bounded(hessians, rank, counts, withheld))
    return {"value": values, "gradient": gradients}, ragged | forms


def _sizes(hessians: Array | RowCurvature) -> Array:
    """(n,) a number that is finite if the Hessian is."""
    return hessians.trace() if isinstance(hessians, RowCurvature) \
        else np.abs(hessians).max(axis=(1, 2), initial=0.0)


def _trusted(data: Data, users: Ints, anchors: Array, models: Array) -> Array:
    steps = models - anchors
    values, gradients, hessians = evaluated(data.loss, data.samples, anchors, users)
    slopes = np.einsum("nd,nd->n", gradients, steps)
    second = 0.5 * (np.einsum("nd,nd->n", steps, hessians.times(steps)) if isinstance(
        hessians, RowCurvature) else np.einsum("nd,nde,ne->n", steps, hessians, steps))
    share = np.ones(len(users))
    for _ in range(60):
        reached = data.loss.evaluate(data.samples, between(anchors, models, share), 0, users).values
        good = trusted(values, share * slopes, share**2 * second, reached)
        if good.all():
            break
        share = np.where(good, share, 0.5 * share)
    return share


def _forms(hessians: Array, rank: int, counts: Ints) -> dict[str, Ragged]:
    """Hessians as triangles, or as diagonal * I + factor' diag(sign) factor if that is shorter.

    For users with few samples most eigenvalues are equal (the ridge), and the factor contains the
    others, exact up to rounding. With eigenvalues l_1 >= ... >= l_d, a given rank r keeps the first
    r and raises the others to l_{r+1}: the matrix is at least as large as H, so the model of the
    loss never has too little curvature.
    """
    n, dim = hessians.shape[:2]
    full = dim * (dim + 1) // 2
    worth = np.full(n, rank > 0) if rank else (dim >= _LOW_RANK) & (2 * counts < dim)
    if rank < 0 or not worth.any():
        return {"hessian": Ragged.of(triangle(hessians), np.ones(n, dtype=np.int64))}
    values, vectors = np.linalg.eigh(hessians[worth])
    values, vectors = np.maximum(values[:, ::-1], 0.0), vectors[:, :, ::-1]
    level = values[:, min(rank, dim - 1)] if rank else np.median(values, axis=1)
    excess = values - level[:, None]
    keep = excess > 0 if rank else np.abs(excess) > 1e-12 * values[:, :1]
    # Row k is sqrt|l_k - level| v_k.
    rows = (vectors * np.sqrt(np.abs(excess))[:, None, :]).swapaxes(1, 2)
    shorter = keep.sum(axis=1) * (dim + 1) + 1 < full
    low = np.flatnonzero(worth)[shorter]
    kept, diagonal = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
    kept[low], diagonal[low] = keep[shorter].sum(axis=1), 1
    others = np.setdiff1d(np.arange(n), low)
    return {"hessian": Ragged.of(triangle(hessians[others]), 1 - diagonal),
            "factor": Ragged.of(rows[shorter][keep[shorter]], kept),
            "sign": Ragged.of(np.sign(excess[shorter][keep[shorter]]), kept),
            "diagonal": Ragged.of(level[shorter], diagonal)}


def _bounded(hessians: Array, rank: int, counts: Ints, withheld: Flags) -> dict[str, Ragged]:
    """Hessians to send, of some users only a bound: a multiple of the identity that is at least
    their Hessian.

    The multiple is the largest eigenvalue, rounded up to a power of sqrt(2), so that it says
    little.
    """
    shown, hidden = np.flatnonzero(~withheld), np.flatnonzero(withheld)
    largest = np.maximum(np.linalg.eigvalsh(hessians[hidden])[:, -1], 1e-12)
    bounds = 2.0 ** (np.ceil(2.0 * np.log2(largest) + 1e-9) / 2.0)
    forms = _forms(hessians[shown], rank, counts[shown])
    spread = {name: _spread(part, shown, len(withheld)) for name, part in forms.items()}
    own, level = np.zeros(len(withheld), dtype=np.int64), np.zeros(len(withheld))
    own[hidden], level[hidden] = 1, bounds
    if "diagonal" in spread:
        owner = spread["diagonal"].owner
        own[owner], level[owner] = 1, spread["diagonal"].values
    return {**spread, "diagonal": Ragged.of(level[own > 0], own)}


def _spread(part: Ragged, users: Ints, n: int) -> Ragged:
    """The rows of some users among those of n users, of whom the others have none."""
    counts = np.zeros(n, dtype=np.int64)
    counts[users] = part.counts
    return Ragged.of(part.values, counts)


def _gradient(data: Data, queries: Batch) -> Answer:
    """Gradient and value, the mean curvature at the model, and an upper bound on the curvature."""
    users, models = queries.users, queries.arrays["model"]
    values, gradients, hessians = evaluated(data.loss, data.samples, models, users)
    return {"gradient": gradients, "value": values, "curvature": mean_curvature(hessians),
            "stiffness": stiffness(data.loss, data.samples, hessians, users)}, {}


def _prox(data: Data, queries: Batch) -> Answer:
    users = queries.users
    points = data.loss.prox(data.samples, None, queries.arrays["t"], queries.arrays["centre"],
                            users=users).points
    values, _, hessians = evaluated(data.loss, data.samples, points, users)
    return {"point": points, "value": values, "curvature": mean_curvature(hessians)}, {}


def _train(data: Data, queries: Batch) -> Answer:
    """Some steps of gradient descent on the loss of the user."""
    points, left = np.array(queries.arrays["model"]), queries.arrays["steps"]
    rate = float(queries.shared["rate"])
    for step in range(int(left.max(initial=0))):
        at = np.flatnonzero(left > step)
        moved = points[at] - rate * data.loss.evaluate(data.samples, points[at], 1,
                                                       queries.users[at]).gradients
        sound = np.isfinite(moved).all(axis=1) & (np.abs(moved).max(axis=1) < 1e100)
        # Steps that are much too long end at the last finite point.
        points[at[sound]] = moved[sound]
    return {"point": points}, {}


def _certify(data: Data, queries: Batch) -> Answer:
    """The numbers of a user for a certificate (see `certificates.Answers`).

    If the conjugate is infinite, also the difference of the slope to one in its domain (see
    `certificates.find_lack`).
    """
    from coterie.problem.certificates import answers_of, find_lack

    users, models, slopes = queries.users, queries.arrays["model"], queries.arrays["slope"]
    loss = _with_personal_part(data, queries)
    samples = data.samples if loss is data.loss else loss.prepare(data.samples.users)
    answers = answers_of(loss, samples, models, slopes, queries.arrays["anchor"], users)
    outside = np.flatnonzero(~np.isfinite(answers.conjugates))
    ragged = {}
    if outside.size:
        lack = find_lack(loss, samples, models[outside], slopes[outside], users[outside])
        good = np.isfinite(lack).all(axis=1)
        given = np.zeros(len(users), dtype=np.int64)
        given[outside[good]] = 1
        ragged["lack"] = Ragged.of(lack[good], given)
    names = ("value", "conjugate", "residual", "size", "rounding")
    told = {name: np.nan_to_num(part, nan=np.inf, posinf=np.inf)
            for name, part in zip(names, answers, strict=True)}
    return told | (_judge(data, queries) if "fitted" in queries.arrays else {}), ragged


def _with_personal_part(data: Data, queries: Batch) -> Loss:
    """The loss of the users' centres, if a query says how models vary around them."""
    if "covariance" not in queries.shared:
        return data.loss
    counts, noise = data.samples.users.data.counts, np.ones(data.n_users)
    if "noise" in queries.ragged:
        noise[queries.users] = queries.ragged["noise"].values
    covariance = square(queries.shared["covariance"], data.samples.dim)[0]
    return Personal(data.loss, covariance=covariance, scale=noise / np.maximum(counts, 1))


def _moments(data: Data, queries: Batch) -> Answer:
    """Number, mean and scatter of a user's rows: of the held-out ones and of the others, where some
    are held out.
    """
    parts = [data.samples.users.data] if data.train is None or data.held_out is None \
        else [data.train, data.held_out]
    moments = [SecondMoments.of(part.take(queries.users)) for part in parts]
    return {"count": np.stack([part.counts for part in moments], axis=1),
            "means": np.stack([part.means for part in moments], axis=1),
            "scatter": np.stack([triangle(part.scatters) for part in moments], axis=1)}, {}


def _judge(data: Data, queries: Batch) -> Fields:
    """Scores of three models on held-out rows, and whether the first is worse than the second by
    more than chance. The second is the user's own model; it finds it unless it is sent.
    """
    arrays, n = queries.arrays, len(queries)
    if data.judged is None or data.train is None:
        return {"scores": np.full((n, 3), np.nan), "worse": np.zeros(n)}
    units, test = data.judged[0], data.judged[1].take(queries.users)
    alone = arrays.get("alone")
    if alone is None:
        alone = own_models(units.loss, data.train.take(queries.users))
    models = [arrays["fitted"], alone, arrays["together"]]
    errors = [units.errors(part, test) for part in models[:2]]
    scores = np.stack([units.scores(part, test) for part in models], axis=1)
    if "settings" in queries.shared:
        sent = HandedAverage.of(unpacked(queries.shared["settings"]))
        average = sent.at_home(data.given[1].take(queries.users))
        own = predicted(units, test.features, models[0][test.owner])
        errors[0] = units.errors_of(average.predict(test.features, test.owner, own)[0], test)
        scores[:, 0] = units.scores_of(errors[0], test)
    return {"scores": scores,
            "worse": worse_than_alone(errors[0], errors[1], test).astype(float)}


def _score(data: Data, queries: Batch) -> Answer:
    """The total loss on held-out rows, the number of correct predictions (of classes), and the
    number of rows.
    """
    if data.held_out is None:
        raise BadMessage("This user has no held-out rows, so it cannot score a model.")
    score, hit, count = (np.zeros(len(queries)) for _ in range(3))
    some = np.flatnonzero(data.held_out.counts[queries.users])
    if some.size:
        rows = data.held_out.take(queries.users[some])
        models = data.loss.own_models(data.samples, queries.arrays["model"][some],
                                      queries.users[some])
        loss = data.loss.own_loss
        count[some] = rows.counts
        score[some] = rows.counts * loss.values(loss.prepare(rows), models)
        if rows.targets is not None:
            right = loss.predict(rows.features, models[rows.owner]) == rows.targets
            hit[some] = np.bincount(rows.owner, weights=right, minlength=rows.n_users)
    return {"score": score, "hit": hit, "count": count}, {}


# -- the questions of a fit (see `coterie.fitting.sources`), which concern all parts of the rows:
#    all of them first, then those that are not held out

def facts(loss: Loss, parts: list[Users], queries: Batch) -> Fields:
    """Count, means and sums of squares of features; the same and the largest of the target."""
    rows = []
    for part in parts:
        _, (counts, means, m2), targets, largest = UserStatistics.of(part)
        target = np.zeros((len(counts), 3)) if targets is None else \
            np.stack([targets.means[:, 0], targets.m2[:, 0], largest], axis=1)
        rows.append((counts, means, m2, target))
    return dict(zip(("count", "means", "m2", "target"),
                    (np.stack(part, axis=1) for part in zip(*rows, strict=True)), strict=True))


def _summary(loss: Loss, parts: list[Users], queries: Batch) -> Fields:
    shared, dim = queries.shared, loss.dim(parts[0])
    reply = summary_at(loss, parts, np.asarray(shared["centre"]),
                       square(shared["covariance"], dim)[0], float(shared["step"]),
                       int(shared["rank"]))
    return {"model": reply.point, "values": _finite(reply.value), "gradient": reply.gradient,
            "hessian": triangle(reply.hessian), "information": reply.information,
            "size": reply.spare}


def _evidence(loss: Loss, parts: list[Users], queries: Batch) -> Fields:
    covariances = square(queries.shared["covariance"], loss.dim(parts[0]))
    noise, n_slopes = queries.shared["step"], int(queries.shared["rank"])
    told = [evidence_of(loss, part, Hypotheses(queries.arrays["centre"][:, k], covariances[k],
                                               float(noise[k]), n_slopes))
            for k, part in enumerate(parts)]
    return {"evidence": np.nan_to_num(np.stack([each.evidence for each in told], axis=1),
                                      nan=-1e300, posinf=-1e300, neginf=-1e300),
            "gradient": np.nan_to_num(np.stack([each.slopes for each in told], axis=1),
                                      posinf=0.0, neginf=0.0)}


def _around(loss: Loss, parts: list[Users], queries: Batch) -> Fields:
    covariances = square(queries.shared["covariance"], loss.dim(parts[0]))
    answers = [expanded(loss, part, Around(queries.arrays["centre"][:, k], covariances[k]))
               for k, part in enumerate(parts[:len(covariances)])]
    values, gradients = (np.stack(part, axis=1) for part in zip(*answers, strict=True))
    return {"values": _finite(values), "gradient": np.nan_to_num(gradients, posinf=0.0, neginf=0.0)}


def _finite(values: Array) -> Array:
    return np.where(np.isnan(values), np.inf, values)


_FIT: dict[str, Callable[[Loss, list[Users], Batch], Fields]] = {
    "facts": facts, "summary": _summary, "evidence": _evidence, "around": _around}


def _fit(data: Data, queries: Batch) -> Answer:
    parts = [part.take(queries.users) for part in (data.samples.users.data, data.train)
             if part is not None]
    return _FIT[queries.kind](data.loss, parts, queries), {}


def _average(data: Data, queries: Batch) -> Answer:
    """What an average asks; see `coterie.fitting.columns`."""
    part, stage = (int(queries.shared[name]) for name in ("rank", "stage"))
    question = QUESTIONS[stage].of(unpacked(queries.shared["settings"]))
    return question.answer(data.given[part].take(queries.users), queries.arrays), {}


def _join(data: Data, queries: Batch) -> Answer:
    """The group of a finished run that fits each newcomer best, and its model in it.

    The server sends what users of the run share: the centres of the groups, in the units agreed,
    and how far models may be from their centre, if they are personal. The newcomer takes the group
    k with the smallest

        f(centre_k),      f its own loss, of personal models with the best model around centre_k

    and -1 where users of the run share nothing. The model stays with the newcomer unless its owner
    returns it.
    """
    loss, centres = data.loss, np.asarray(queries.shared["models"])
    newcomers, n = data.samples.users.data.take(queries.users), len(queries)
    if "covariance" in queries.shared:
        covariance = square(queries.shared["covariance"], data.samples.dim)[0]
        loss = Personal(loss, covariance=covariance,
                        scale=float(queries.shared["noise"]) / np.maximum(newcomers.counts, 1))
    samples = loss.prepare(newcomers)
    if len(centres):
        shape = (n, samples.dim)
        groups = np.stack([loss.values(samples, np.broadcast_to(centre, shape))
                           for centre in centres]).argmin(axis=0)
        models = loss.own_models(samples, centres[groups])
    else:  # everyone has a model of its own rows
        groups, models = np.full(n, -1), group_centres(loss, samples, np.arange(n), "users")
    return ({"who": groups.astype(np.int64)},
            {"model": Ragged.of(models, np.ones(n, dtype=np.int64))})


def _release(data: Data, queries: Batch) -> Answer:
    question = question_of(queries.shared, data.samples.users.n_features)
    return {"released": np.stack([np.frombuffer(data.release(user, question), dtype="<f8")
                                  for user in queries.users.tolist()])}, {}


_ANSWERS: dict[str, Callable[[Data, Batch], Answer]] = {
    **dict.fromkeys(_FIT, _fit), "describe": _describe, "local": _local,
    "expand": _expand, "gradient": _gradient, "prox": _prox, "train": _train, "certify": _certify,
    "score": _score, "moments": _moments,
    "join": _join, "average": _average,
    "release": _release,
    # That the users have what they need; their models stay with them.
    "home": lambda data, queries: ({"who": np.zeros(len(queries), dtype=np.int64)}, {}),
}
# Edges at their users: only in one process, which stores them (`algorithms.edges`).
assert set(_ANSWERS) | {"pdmm"} == set(SCHEMAS)


def join(parts: list[Users]) -> Users:
    """Users of several parts as one, in the order given."""
    counts = np.concatenate([part.counts for part in parts])
    targets = [part.targets for part in parts if part.targets is not None]
    return Users(np.concatenate([part.features for part in parts]),
                 np.concatenate(targets) if targets else None,
                 np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
                 tuple(name for part in parts for name in part.names), parts[0].feature_names)
