"""`audit`: a federation is simulated, everything that crosses is recorded and attacked, and the
attacks are judged.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.base.errors import CoterieError, CoterieWarning, InvalidInput
from coterie.base.storage import json_ready
from coterie.base.types import Array, Flags
from coterie.convex.choice import roc_auc
from coterie.data.moments import Standardizer
from coterie.data.users import Users
from coterie.federated.private.policy import Privacy, mu_of
from coterie.lab.attacks import inference
from coterie.lab.attacks.inference import Scores, scores_of
from coterie.lab.attacks.releases import EpsilonBound, release_bound, simulate_release
from coterie.lab.attacks.simulation import (
    SIMULATIONS,
    Drawn,
    LabelledRows,
    Plan,
    Trace,
    draw_rows,
    influence,
    loss_for,
)
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
    bound: EpsilonBound | None = None
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
        return dict(json_ready({
            "findings": [vars(one) for one in self.findings], "n_features": self.n_features,
            "loss": self.loss, "claimed": self.claimed, "allowed": self.allowed, "bound": bound,
            "moved": self.moved, "holds": self.holds}))

    def __str__(self) -> str:
        lines = [f"{one.algorithm}, {one.rows} rows: " + (one.note or (
            f"rows rebuilt of {one.exact_users:.0%} of the users, membership {one.membership:.2f}, "
            f"attribute {one.attribute:.2f} ({one.attribute_public:.2f} without messages)"))
            for one in self.findings]
        if self.bound is not None:
            lines.append(f"epsilon is at least {self.bound.epsilon:.2f}, claimed: "
                         f"{self.claimed:g}, which allows membership {self.allowed:.2f}.")
        if np.isfinite(self.moved):
            lines.append("One user that lies consistently moves the model of another by "
                         f"{self.moved:.2g} at most.")
        return "\n".join(lines)


def audit(users: Users, loss: LinearLoss | str = "auto", *, algorithms: Iterable[str] = ALGORITHMS,
          rows: Iterable[int] = ROWS, lam: float = 0.02, held_out: float = 0.2,
          privacy: Privacy | None = None, max_users: int = 60, seed: int = 0,
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
    # 1. Check what is asked for.
    chosen = loss_for(users, loss)
    algorithms, counts = list(algorithms), [int(count) for count in rows]
    if "release" in algorithms and privacy is None:
        raise InvalidInput("a release needs a budget", remedy="Give --epsilon and --delta")
    for name in algorithms:
        if name != "release" and name not in SIMULATIONS:
            raise InvalidInput(f"unknown algorithm {name!r}",
                               remedy=f"Choose from: {', '.join(SIMULATIONS)}")
    simulations = {name: SIMULATIONS[name] for name in algorithms if name != "release"}
    if not counts or min(counts) < 1:
        raise InvalidInput(f"rows must be numbers of at least 1, got {counts}",
                           remedy="Use for example 1,5,10")
    # 2. Take some users, and find out who has enough rows.
    if users.n_users > max_users:
        rng = np.random.default_rng(seed)
        users = users.take(np.sort(rng.choice(users.n_users, max_users, replace=False)))
    plan = Plan(loss=chosen, lam=lam, held_out=held_out, seed=seed, privacy=privacy)
    if privacy is not None:
        simulations |= {"release": simulate_release(True),
                        "release, no noise": simulate_release(False)}
    possible = [count for count in counts if (users.counts >= count + 2).sum() > 1]
    if not possible:
        draw_rows(users, min(counts), seed)  # refuses, and says why
    # 3. Attack.
    findings = []
    for count in possible:
        data = draw_rows(users, count, seed)
        for name, simulate in simulations.items():
            if progress is not None:
                progress(f"{name}, {count} rows per user")
            findings.append(_attack(simulate, name, data, plan, count))
    data = draw_rows(users, possible[-1], seed)
    return Audit(findings=tuple(findings), n_features=users.n_features, loss=type(chosen).__name__,
                 moved=_largest_move(data.members, plan),
                 claimed=None if privacy is None else privacy.epsilon,
                 bound=None if privacy is None else release_bound(data, plan))


def _largest_move(users: Users, plan: Plan) -> float:
    """How far a liar moves the others at most; nan where the others have no models to compare."""
    scaler = Standardizer.from_moments(users.moments(), feature_names=users.feature_names)
    scaled, log, moved = scaler.transform(users), logging.getLogger("coterie.federated"), [np.nan]
    level = log.level
    log.setLevel(logging.ERROR)  # that a liar is excluded is no news here
    try:
        with warnings.catch_warnings(action="ignore", category=CoterieWarning):
            for strength in _LIES:
                with contextlib.suppress(CoterieError):
                    moved.append(influence(scaled, plan.loss, plan.lam, strength, plan.seed))
    finally:
        log.setLevel(level)
    return float(np.nanmax(moved)) if len(moved) > 1 else np.nan


def _attack(simulate: Callable[[Drawn, Plan], Trace], name: str, data: Drawn, plan: Plan,
            rows: int) -> Finding:
    """All attacks on what crosses in a run, compared with the truth."""
    try:
        # Few rows make odd problems.
        with warnings.catch_warnings(action="ignore", category=CoterieWarning):
            trace = simulate(data, plan)
    except CoterieError as error:
        return Finding(algorithm=name, rows=rows, note=str(error))
    # 1. Rebuild rows.
    n, (evidence, members) = len(trace.table), trace.parts[0]
    hits, found = zip(*(_rebuild(trace, user) for user in range(n)), strict=True)
    # 2. Test membership, by the score that tells most; rows are in the units of what was sent.
    scores = [scores_of(evidence[user], trace.loss, found[user], trace.public) for user in range(n)]
    squared = any(one.scatter is not None for one in evidence[0].sums)
    members = trace.table if squared else members
    areas = [_membership(kind, scores, members, trace.others) for kind in _kinds(scores)]
    best = max(areas, key=lambda area: float(np.nanmean(area)), default=np.full(1, np.nan))
    # 3. Guess the first column of the features from the others.
    attribute, public = _attribute(scores, members, trace.public)
    with np.errstate(invalid="ignore"):
        return Finding(algorithm=name, rows=rows, n_users=n, n_rounds=trace.n_rounds,
                       hessians=max(len(evidence[0].hessians) for evidence, _ in trace.parts),
                       exact_users=float(np.mean([hit.any() for hit in hits])),
                       exact_rows=float(np.mean([hit.mean() for hit in hits])),
                       membership=float(np.nanmean(best)),
                       membership_error=float(np.nanstd(best) / np.sqrt(len(best))),
                       attribute=attribute, attribute_public=public)


def _rebuild(trace: Trace, user: int) -> tuple[Flags, Array]:
    """Which rows of a user were recovered, and what was rebuilt of its rows in the units of the
    first part.
    """
    table = trace.table[user]
    hit = np.zeros(len(table.targets), dtype=bool)
    rebuilt = [inference.rebuild_rows(evidence[user], trace.loss, user)
               for evidence, _ in trace.parts]
    for rows, (_, members) in zip(rebuilt, trace.parts, strict=True):
        # Rows of a part are not in the order of all rows; only their number counts.
        hit[:inference.match_rows(rows, members[user].features).sum()] = True
    sums = inference.rows_from_sums(trace.parts[0][0][user])
    if len(sums):
        wide = sums.shape[1] > table.features.shape[1]
        hit[:inference.match_rows(sums, table.joined() if wide else table.features).sum()] = True
    return hit, rebuilt[0]


def _kinds(scores: list[Scores]) -> list[str]:
    return sorted({key for one in scores for key in one})


def _membership(kind: str, scores: list[Scores], members: list[LabelledRows],
                others: list[LabelledRows]) -> Array:
    """(n_users,) the area under the curve of one score; of another one where a user does not have
    it.
    """
    areas = np.full(len(scores), np.nan)
    for user, own in enumerate(scores):
        score = own.get(kind) or own.get("tracing") or own.get("leverage")
        if score is not None and len(others[user].targets):
            areas[user] = inference.membership_auc(score, members[user], others[user])
    return areas


def _attribute(scores: list[Scores], members: list[LabelledRows],
               public: LabelledRows) -> tuple[float, float]:
    """The area for the best score, with the messages and without, for the first column of the
    features.
    """
    truth = np.concatenate([rows.features[:, 0] for rows in members])
    larger = truth > np.median(public.features[:, 0])
    best = alone = np.nan
    if larger.all() or not larger.any():
        return best, alone
    for kind in _kinds(scores):
        guesses = []
        for own, rows in zip(scores, members, strict=True):
            name = next((name for name in (kind, "tracing", *own) if name in own), "")
            score = own.get(name, lambda rows: np.zeros(len(rows.targets)))
            guesses.append(inference.guess_attribute(score, rows, 0, public,
                                                     likelihood=name in ("tracing", "")))
        prior, informed = (np.concatenate(part) for part in zip(*guesses, strict=True))
        alone = roc_auc(larger, prior)
        best = np.nanmax([best, roc_auc(larger, informed)])
    return float(best), float(alone)
