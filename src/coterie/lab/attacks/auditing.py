"""`audit`: a federation is simulated, everything that crosses is recorded and attacked, and the
attacks are judged.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from coterie.base.errors import CoterieError, CoterieWarning, InvalidInput
from coterie.base.storage import json_ready
from coterie.base.types import Array
from coterie.convex.choice import roc_auc
from coterie.data.scaling import Standardizer
from coterie.data.users import Users
from coterie.federated.private.accounting import mu_of
from coterie.federated.private.policy import Privacy
from coterie.lab.attacks.attacked_release import release_bound, release_of
from coterie.lab.attacks.inference import (
    Guess,
    LabelledRows,
    Score,
    guess_attribute,
    membership_auc,
    scores_of,
)
from coterie.lab.attacks.lower_bound import EpsilonBound
from coterie.lab.attacks.poison import influence
from coterie.lab.attacks.reconstruction import from_sums, rebuilt
from coterie.lab.attacks.simulation import SIMULATIONS, Drawn, Plan, Trace, drawn, loss_for, matched
from coterie.losses import LinearLoss

ALGORITHMS = ("newton", "splitting", "pdmm", "fit", "weights")
ROWS = (1, 5, 10, 20, 50)
# Slopes of the liar's loss: from some on it is excluded, or moves nobody further.
_LIES = (0.1, 1.0, 100.0)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What attacks on one algorithm got, with so many rows per user.

    Parameters
    ----------
    algorithm : what was run.
    rows : per user.
    n_users : that were attacked.
    n_rounds : of the run.
    hessians : the number of points at which the server got a user's Hessian.
    exact_users : share of the users of whom at least one row was rebuilt within one percent.
    exact_rows : share of the rows that were.
    membership : probability that a row of a user scores higher than another row of this user, which
        took no part.
    membership_error : standard error of it, over users.
    attribute : probability that of two rows the one with the larger attribute is guessed to have
        it, from the rest of the row and the messages.
    attribute_public : the same from the rest of the row alone.
    note : why there is no result, if there is none.
    """

    algorithm: str
    rows: int
    n_users: int = 0
    n_rounds: int = 0
    hessians: int = 0
    exact_users: float = np.nan
    exact_rows: float = np.nan
    membership: float = np.nan
    membership_error: float = np.nan
    attribute: float = np.nan
    attribute_public: float = np.nan
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What attacks on a federation got.

    Parameters
    ----------
    findings : one for each algorithm and number of rows.
    n_features : of a row.
    loss : that was used.
    claimed : the epsilon that is claimed for the release, where there is one.
    bound : a lower bound on it, by telling releases apart.
    moved : how far one user that lies consistently moves a model of another one, at most, at the
        given lam; in the units of the standardised rows.

    Example
    -------
    >>> from coterie.datasets import clustered
    >>> users = clustered("logistic", n_users=6, samples=30, n_features=4).users
    >>> result = audit(users, algorithms=["newton"], rows=[4])
    >>> result.findings[0].exact_users
    1.0
    """

    findings: tuple[Finding, ...]
    n_features: int
    loss: str
    claimed: float | None = None
    bound: EpsilonBound | None = field(default=None)
    moved: float = np.nan

    @property
    def allowed(self) -> float | None:
        """The largest membership area that the claim allows for a release: Phi(mu), for a row and
        another instead.
        """
        from scipy.special import ndtr

        if self.claimed is None or self.bound is None:
            return None
        return float(ndtr(mu_of(self.claimed, self.bound.delta)))

    @property
    def holds(self) -> bool:
        """Whether the claimed epsilon, if any, is not refuted."""
        return self.claimed is None or self.bound is None or self.bound.epsilon <= self.claimed

    def to_json(self) -> dict[str, Any]:
        """Numbers and names, as JSON can hold them."""
        bound = None if self.bound is None else self.bound._asdict()
        return dict(json_ready({"findings": [vars(one) for one in self.findings],
                                "n_features": self.n_features,
                                "loss": self.loss, "claimed": self.claimed, "allowed": self.allowed,
                                "bound": bound,
                                "moved": self.moved,
                                "holds": self.holds}))

    def __str__(self) -> str:
        lines = [f"{one.algorithm}, {one.rows} rows: " + (one.note or (
            f"rows rebuilt of {one.exact_users:.0%} of the users, membership {one.membership:.2f}, "
            "attribute "
            f"{one.attribute:.2f} ({one.attribute_public:.2f} without messages)"))
                 for one in self.findings]
        if self.bound is not None:
            lines.append(f"epsilon is at least {self.bound.epsilon:.2f}, claimed: "
                         f"{self.claimed:g}, which allows "
                         f"membership {self.allowed:.2f}.")
        if np.isfinite(self.moved):
            lines.append("One user that lies consistently moves the model of another by "
                         f"{self.moved:.2g} at most.")
        return "\n".join(lines)


def audit(users: Users, loss: LinearLoss | str = "auto", *, algorithms: Iterable[str] = ALGORITHMS,
          rows: Iterable[int] = ROWS, lam: float = 0.02, held_out: float = 0.2,
          privacy: Privacy | None = None,
          max_users: int = 60, seed: int = 0,
          progress: Callable[[str], None] | None = None) -> Audit:
    """Attack what crosses in a federation of these users, as a server could that only keeps what it
    gets.

    Parameters
    ----------
    users : rows with targets -1 and 1, numbers or counts; of each user some take part and others
        are compared to them.
    loss : of one margin, or its name; "auto" is logistic for targets -1 and 1, squared for others.
    algorithms : names in `coterie.ALGORITHMS`, "fit" for a fit that chooses everything, "weights"
        for the round of local models, "active" for a server that asks for Hessians at points of its
        choice.
    rows : per user that take part; users with less than two more are left out.
    lam : of algorithms that solve at a given one.
    held_out : the share of the rows that a fit holds out.
    privacy : a budget; the releases of a private fit are then attacked as well ("release"), also
        without their noise ("release, no noise"), and a lower bound on their epsilon is found.
    max_users : at most so many users take part.
    seed : of everything random.
    progress : called with what is being done.

    Returns
    -------
    Audit, one finding for each algorithm and number of rows.

    Raises
    ------
    InvalidInput : an algorithm or a loss that is not known, or users with too few rows.
    """
    algorithms, chosen = list(algorithms), loss_for(users, loss) if isinstance(loss, str) else loss
    names, counts = [name for name in algorithms if name != "release"], \
        [int(count) for count in rows]
    if "release" in algorithms and privacy is None:
        raise InvalidInput("a release needs a budget", remedy="Give --epsilon and --delta")
    for name in names:
        if name not in SIMULATIONS:
            raise InvalidInput(f"unknown algorithm {name!r}",
                               remedy=f"Choose from: {', '.join(SIMULATIONS)}")
    if not counts or min(counts) < 1:
        raise InvalidInput(f"rows must be numbers of at least 1, got {counts}",
                           remedy="Use for example 1,5,10")
    if users.n_users > max_users:
        users = users.take(np.sort(np.random.default_rng(seed).choice(users.n_users, max_users,
            replace=False)))
    plan = Plan(loss=chosen, lam=lam, held_out=held_out, seed=seed, privacy=privacy)
    simulations = dict(SIMULATIONS)
    if privacy is not None:
        simulations |= {"release": release_of(True), "release, no noise": release_of(False)}
        names += ["release", "release, no noise"]
    possible = [count for count in counts if (users.counts >= count + 2).sum() > 1]
    if not possible:
        drawn(users, min(counts), seed)  # refuses, and says why
    findings = []
    for count in possible:
        data = drawn(users, count, seed)
        for name in names:
            if progress is not None:
                progress(f"{name}, {count} rows per user")
            findings.append(_finding(simulations[name], name, data, plan, count))
    bound = None if privacy is None else release_bound(drawn(users, possible[-1], seed), plan)
    moved = _moved(drawn(users, possible[-1], seed).members, plan)
    return Audit(findings=tuple(findings), n_features=users.n_features, loss=type(chosen).__name__,
                 moved=moved,
                 claimed=None if privacy is None else privacy.epsilon, bound=bound)


def _moved(users: Users, plan: Plan) -> float:
    """How far a liar moves the others at most; nan where the others have no models to compare."""
    scaled = Standardizer.from_moments(users.moments(),
                                       feature_names=users.feature_names).transform(users)
    log = logging.getLogger("coterie.federated")
    level, moved = log.level, [np.nan]
    log.setLevel(logging.ERROR)  # that a liar is excluded is no news here
    try:
        with warnings.catch_warnings(action="ignore", category=CoterieWarning):
            for strength in _LIES:
                with contextlib.suppress(CoterieError):
                    moved.append(influence(scaled, plan.loss, plan.lam, strength, plan.seed))
    finally:
        log.setLevel(level)
    return float(np.nanmax(moved)) if len(moved) > 1 else np.nan


def _finding(simulate: Callable[[Drawn, Plan], Trace], name: str, data: Drawn, plan: Plan,
             rows: int) -> Finding:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CoterieWarning)  # few rows make odd problems
            trace = simulate(data, plan)
    except CoterieError as error:
        return Finding(algorithm=name, rows=rows, note=str(error))
    return judged(trace, name, rows)


def judged(trace: Trace, name: str, rows: int) -> Finding:
    """All attacks on what crossed in a run, compared with the truth."""
    n = len(trace.table)
    rebuilding = [_rebuilt(trace, user) for user in range(n)]
    hits = [hit for hit, _ in rebuilding]
    squared = any(one.scatter is not None for one in trace.parts[0].evidence[0].sums)
    scores = [scores_of(trace.parts[0].evidence[user], trace.loss, found, trace.public)
              for user, (_, found) in enumerate(rebuilding)]
    members = trace.table if squared else trace.parts[0].members
    compared = _Compared(members, trace.others, trace.public)
    areas = {kind: compared.membership(kind, scores) for kind in {key for one in scores
        for key in one}}
    best = max(areas.values(), key=lambda area: float(np.nanmean(area)), default=np.full(1, np.nan))
    attribute, public = compared.attribute(scores)
    with np.errstate(invalid="ignore"):
        return Finding(
            algorithm=name, rows=rows, n_users=n, n_rounds=trace.n_rounds,
            hessians=max(len(part.evidence[0].hessians) for part in trace.parts),
            exact_users=float(np.mean([hit.any() for hit in hits])),
            exact_rows=float(np.mean([hit.mean() for hit in hits])),
                       membership=float(np.nanmean(best)),
            membership_error=float(np.nanstd(best) / np.sqrt(len(best))), attribute=attribute,
                       attribute_public=public)


def _rebuilt(trace: Trace, user: int) -> tuple[Array, Array]:
    """Which rows of a user were recovered, and what was rebuilt of its rows in the units of the
    first part.
    """
    hit, first = np.zeros(len(trace.table[user].targets), dtype=bool), np.empty((0, 0))
    for k, part in enumerate(trace.parts):
        candidates = rebuilt(part.evidence[user], trace.loss, user)
        first = candidates if k == 0 else first
        found = matched(candidates, part.members[user].features)
        # Rows of a part are not in the order of all rows; only their number counts.
        hit[:found.sum()] |= True
    sums, table = from_sums(trace.parts[0].evidence[user]), trace.table[user]
    if len(sums):
        direct = matched(sums, table.joined() if sums.shape[1] > table.features.shape[1]
                         else table.features)
        hit[:direct.sum()] |= True
    return hit, first


class _Compared(NamedTuple):
    """Rows that took part, others of the same users, and public ones."""

    members: list[LabelledRows]
    others: list[LabelledRows]
    public: LabelledRows

    def membership(self, kind: str, scores: list[dict[str, Score]]) -> Array:
        """(n_users,) the area under the curve of one score; of another one where a user does not
        have it.
        """
        areas = np.full(len(scores), np.nan)
        for user, own in enumerate(scores):
            score = own.get(kind) or own.get("tracing") or own.get("leverage")
            if score is not None and len(self.others[user].targets):
                areas[user] = membership_auc(score, self.members[user], self.others[user])
        return areas

    def attribute(self, scores: list[dict[str, Score]]) -> tuple[float, float]:
        """The area for the best score, with the messages and without, for the first column of the
        features.
        """
        kinds = sorted({key for one in scores for key in one})
        truth = np.concatenate([rows.features[:, 0] for rows in self.members])
        larger = truth > np.median(self.public.features[:, 0])
        best = public = np.nan
        if larger.all() or not larger.any():
            return best, public
        for kind in kinds:
            guesses = [self._guess(kind, own, user) for user, own in enumerate(scores)]
            informed, alone = (np.concatenate(part) for part in ([g.informed for g in guesses],
                                                                 [g.public for g in guesses]))
            public = roc_auc(larger, alone)
            best = np.nanmax([best, roc_auc(larger, informed)])
        return float(best), float(public)

    def _guess(self, kind: str, own: dict[str, Score], user: int) -> Guess:
        name = kind if kind in own else "tracing" if "tracing" in own else next(iter(own), "")
        score = own.get(name, lambda rows: np.zeros(len(rows.targets)))
        return guess_attribute(score, self.members[user], 0, self.public,
                               likelihood=name in ("tracing", ""))
