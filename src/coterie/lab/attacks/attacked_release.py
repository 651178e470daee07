"""Attacks on noisy releases (`coterie.federated.private.release`): what remains of the attacks
under the noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from coterie.base.errors import InvalidInput
from coterie.base.types import Array
from coterie.data.users import Users
from coterie.federated.private.policy import Privacy
from coterie.federated.private.release import CENTRES, SUMMARY, W0, ReleaseQuestion
from coterie.lab.attacks.inference import LabelledRows, Statistic
from coterie.lab.attacks.lower_bound import EpsilonBound, epsilon_lower_bound
from coterie.lab.attacks.recording import Evidence, Sums
from coterie.lab.attacks.simulation import Drawn, Plan, Trace, TracedPart, per_user, rows_of

_NO_NOISE = 1e9  # mu of a release whose noise does not matter
_WORST = 1e3  # half-ranges by which the row that changes a release most lies outside of all bounds


def release_of(noisy: bool) -> Callable[[Drawn, Plan], Trace]:
    """The simulation of a private fit, of which only its releases leave; or of the same releases
    without noise.
    """
    def run(data: Drawn, plan: Plan) -> Trace:
        privacy = _needed(plan)
        questions = questions_for(data.public, privacy, noisy)
        rng, names = np.random.default_rng([plan.seed, 17]), data.members.names
        sent = _noisy(questions, [question.exact(data.members) for question in questions], rng)
        tables = per_user(data.members, names)
        evidence = [_evidence(questions, vector, len(rows.targets)) for vector,
                    rows in zip(sent, tables, strict=True)]
        return Trace(plan.loss, [TracedPart(evidence, tables)], per_user(data.others, names),
                     rows_of(data.public),
                     tables, len(questions))

    return run


def questions_for(public: Users, privacy: Privacy, noisy: bool = True) -> list[ReleaseQuestion]:
    """The releases of a private fit, with public rows for the bounds and for what the first release
    says of them.
    """
    columns = rows_of(public).joined()
    bounds = [privacy.range_of(name) for name in (*public.feature_names, "target")]
    low, high = (np.array([end if bound is None else bound[k] for end,
                           bound in zip(ends, bounds, strict=True)])
                 for k, ends in enumerate((columns.min(axis=0), columns.max(axis=0))))
    places = [((low + high) / 2, np.maximum(high - low, 1e-12) / 2),
              (columns.mean(axis=0), np.maximum(columns.std(axis=0), 1e-12))]
    mus = privacy.stages[-2:] if noisy else (_NO_NOISE, _NO_NOISE)
    return [ReleaseQuestion(stage=stage, mu=mu, per_user=privacy.unit == "user", centre=centre,
                            scale=scale,
                     n_features=public.n_features)
            for stage, mu, (centre, scale) in zip((CENTRES, SUMMARY), mus, places, strict=True)]


def release_bound(data: Drawn, plan: Plan, draws: int = 4000) -> EpsilonBound:
    """A lower bound on the epsilon of the releases of a user, by the row (or the rows) that changes
    them most.
    """
    privacy = _needed(plan)
    questions, user = questions_for(data.public, privacy), data.members.take([0])
    assert user.targets is not None
    centre, scale = questions[0].centre, questions[0].scale
    worst = centre + _WORST * scale
    if privacy.unit == "user":
        other = centre - _WORST * scale
        one, two = (replace(user, features=np.tile(row[:-1], (user.n_samples, 1)),
                            targets=np.full(user.n_samples, row[-1])) for row in (worst, other))
    else:
        one = user
        two = Users.from_arrays(np.vstack([user.features, worst[:-1]]),
                                np.append(user.targets, worst[-1]),
                                [0] * (user.n_samples + 1), feature_names=user.feature_names)
    exact = [[question.exact(users) for question in questions] for users in (one, two)]
    change = np.concatenate([(second - first)[0] / question.tau
                             for first, second, question in zip(*exact, questions, strict=True)])
    return epsilon_lower_bound(lambda sums, rng: _noisy(questions, sums, rng)[0], *exact,
                               delta=privacy.delta,
                               direction=change, draws=draws, seed=plan.seed)


def _noisy(questions: list[ReleaseQuestion], exact: list[Array], rng: np.random.Generator) -> Array:
    """(n_users, length) what leaves, every release divided by the standard deviation of its noise.
    """
    draw: Any = rng.standard_normal
    return np.concatenate([question.noisy(sums, draw) / question.tau
                           for question, sums in zip(questions, exact, strict=True)], axis=1)


def _evidence(questions: list[ReleaseQuestion], vector: Array, count: int) -> Evidence:
    """A release as a sum over rows, and as moments of them, both with noise."""
    def of(rows: LabelledRows) -> Array:
        n, p = rows.features.shape
        one = Users(rows.features, rows.targets, np.arange(n + 1), tuple(range(n)),
                    tuple(f"x{k}" for k in range(p)))
        return np.concatenate([question.exact(one) / question.tau for question in questions],
                              axis=1)

    weight = count if not questions[0].per_user else 1.0
    released = Statistic(of, vector * (count / weight), count, (count / weight))
    return Evidence(count,
                    sums=_moments(questions[1], vector[-questions[1].length:] * questions[1].tau,
                                  count),
                    released=released)


def _moments(question: ReleaseQuestion, summary: Array, count: int) -> list[Sums]:
    """Mean and scatter of the features that a summary says, in the units of the table."""
    p, (i, j) = question.n_features, np.triu_indices(question.n_features + 1)
    gram = np.zeros((p + 1, p + 1))
    gram[i, j] = gram[j, i] = summary[:len(i)] / np.where(i == j, 1.0, np.sqrt(2.0)) * (
        count if question.per_user else 1.0)
    stretch = np.sqrt(p / (1.0 - W0**2))
    mean = gram[0, 1:] / (W0 * count) * stretch
    scatter = gram[1:, 1:] * stretch**2 - count * np.outer(mean, mean)
    scale = question.scale[:p]
    return [Sums(count, question.centre[:p] + scale * mean, np.outer(scale, scale) * scatter)]


def _needed(plan: Plan) -> Privacy:
    if plan.privacy is None:
        raise InvalidInput("a release needs a budget", remedy="Give --epsilon and --delta")
    return plan.privacy
