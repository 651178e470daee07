"""Attacks on noisy releases (`coterie.federated.private.release`): what remains of the attacks
under the noise, and what epsilon a release has at least.

The bound tells two neighbouring data sets apart. The release is drawn many times with a row and
without it. The first half of the draws says how to tell them apart (the direction in which the
means differ, and a threshold on it), the second half how often that fails: false positives alpha
and false negatives beta, each with an upper confidence bound (Clopper and Pearson). Then

    epsilon >= log((1 - delta - beta) / alpha)      for every release (Jagielski et al. 2020)
    mu      >= Phi^-1(1 - alpha) - Phi^-1(beta)     for one with normal noise (Nasr et al. 2023)

and the second, which is tight, gives epsilon by `coterie.federated.private.policy`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from coterie.base.errors import InvalidInput
from coterie.base.types import Array
from coterie.data.users import Users
from coterie.federated.private.policy import Privacy, check, epsilon_of
from coterie.federated.private.release import CENTRES, SUMMARY, W0, ReleaseQuestion
from coterie.lab.attacks.inference import tracing
from coterie.lab.attacks.simulation import (
    Drawn,
    Evidence,
    LabelledRows,
    Plan,
    Simulation,
    Sums,
    Trace,
    rows_of,
    split_rows,
)

_NO_NOISE = 1e9  # mu of a release whose noise does not matter
_WORST = 1e3  # half-ranges by which the row that changes a release most lies outside of all bounds
_DRAWS = 4000


def simulate_release(noisy: bool) -> Simulation:
    """The simulation of a private fit, of which only its releases leave; or of the same releases
    without noise.
    """
    def run(data: Drawn, plan: Plan) -> Trace:
        assert plan.privacy is not None  # checked by `audit`
        questions = questions_for(data.public, plan.privacy, noisy)
        rng, names = np.random.default_rng([plan.seed, 17]), data.members.names
        sent = _noisy(questions, [question.exact(data.members) for question in questions], rng)
        tables = split_rows(data.members, names)
        evidence = [_evidence(questions, vector, len(rows.targets))
                    for vector, rows in zip(sent, tables, strict=True)]
        return Trace(plan.loss, [(evidence, tables)], split_rows(data.others, names),
                     rows_of(data.public), tables, len(questions))

    return run


def questions_for(public: Users, privacy: Privacy, noisy: bool = True) -> list[ReleaseQuestion]:
    """The releases of a private fit, with public rows for the bounds and for what the first release
    says of them.
    """
    columns = rows_of(public).joined()
    bounds = [privacy.range_of(name) for name in (*public.feature_names, "target")]
    low, high = (np.array([end if bound is None else bound[k]
                           for end, bound in zip(ends, bounds, strict=True)])
                 for k, ends in enumerate((columns.min(axis=0), columns.max(axis=0))))
    places = [((low + high) / 2, np.maximum(high - low, 1e-12) / 2),
              (columns.mean(axis=0), np.maximum(columns.std(axis=0), 1e-12))]
    mus = privacy.stages[-2:] if noisy else (_NO_NOISE, _NO_NOISE)
    return [ReleaseQuestion(stage=stage, mu=mu, per_user=privacy.unit == "user", centre=centre,
                            scale=scale, n_features=public.n_features)
            for stage, mu, (centre, scale) in zip((CENTRES, SUMMARY), mus, places, strict=True)]


def release_bound(data: Drawn, plan: Plan, draws: int = _DRAWS) -> EpsilonBound:
    """A lower bound on the epsilon of the releases of a user, by the row (or the rows) that changes
    them most.
    """
    privacy = plan.privacy
    assert privacy is not None  # checked by `audit`
    questions, user = questions_for(data.public, privacy), data.members.take([0])
    assert user.targets is not None
    centre, scale = questions[0].centre, questions[0].scale
    worst, other = centre + _WORST * scale, centre - _WORST * scale
    if privacy.unit == "user":
        one, two = (replace(user, features=np.tile(row[:-1], (user.n_samples, 1)),
                            targets=np.full(user.n_samples, row[-1])) for row in (worst, other))
    else:
        one = user
        two = Users.from_arrays(np.vstack([user.features, worst[:-1]]),
                                np.append(user.targets, worst[-1]), [0] * (user.n_samples + 1),
                                feature_names=user.feature_names)
    exact = [[question.exact(users) for question in questions] for users in (one, two)]
    change = np.concatenate([(second - first)[0] / question.tau
                             for first, second, question in zip(*exact, questions, strict=True)])
    return epsilon_lower_bound(lambda sums, rng: _noisy(questions, sums, rng)[0], *exact,
                               delta=privacy.delta, direction=change, draws=draws, seed=plan.seed)


def _noisy(questions: list[ReleaseQuestion], exact: list[Array], rng: np.random.Generator) -> Array:
    """(n_users, length) what leaves, every release divided by the standard deviation of its noise.
    """
    return np.concatenate([question.noisy(sums, rng) / question.tau
                           for question, sums in zip(questions, exact, strict=True)], axis=1)


def _evidence(questions: list[ReleaseQuestion], vector: Array, count: int) -> Evidence:
    """A release as a sum over rows, and as moments of them, both with noise."""
    def of(rows: LabelledRows) -> Array:
        n = len(rows.targets)
        one = Users.from_arrays(rows.features, rows.targets, np.arange(n))
        return np.concatenate([question.exact(one) / question.tau for question in questions],
                              axis=1)

    share = count if questions[0].per_user else 1.0  # of one row in a mean over rows, inverted
    summary = vector[-questions[1].length:] * questions[1].tau
    return Evidence(count, sums=[_moments(questions[1], summary, count)],
                    released=tracing(of, vector * share, count, share))


def _moments(question: ReleaseQuestion, summary: Array, count: int) -> Sums:
    """Mean and scatter of the features that a summary says, in the units of the table."""
    p, (i, j) = question.n_features, np.triu_indices(question.n_features + 1)
    products = summary[:len(i)] / np.where(i == j, 1.0, np.sqrt(2.0))
    gram = np.zeros((p + 1, p + 1))
    gram[i, j] = gram[j, i] = products * (count if question.per_user else 1.0)
    stretch = np.sqrt(p / (1.0 - W0**2))
    mean = gram[0, 1:] / (W0 * count) * stretch
    scatter = gram[1:, 1:] * stretch**2 - count * np.outer(mean, mean)
    scale = question.scale[:p]
    return Sums(count, question.centre[:p] + scale * mean, np.outer(scale, scale) * scatter)


class EpsilonBound(NamedTuple):
    """A lower bound on epsilon, which holds with the confidence named.

    Parameters
    ----------
    epsilon : at least, for a release with normal noise.
    any_release : at least, whatever the noise.
    mu : sensitivity by noise, at least.
    delta : at which epsilon is meant.
    draws : of each of the two data sets.
    confidence : that the bounds hold.
    """

    epsilon: float
    any_release: float
    mu: float
    delta: float
    draws: int
    confidence: float


def epsilon_lower_bound(release: Callable[[Any, np.random.Generator], Array], data: Any,
                        neighbour: Any, *, delta: float, direction: Array | None = None,
                        draws: int = _DRAWS, confidence: float = 0.95,
                        seed: int = 0) -> EpsilonBound:
    """The least epsilon of a release that lets two neighbouring data sets be told apart as well as
    they are.

    Parameters
    ----------
    release : what is sent of data, with noise from the generator given.
    data, neighbour : two data sets of one user that differ in one row (or entirely, where the unit
        is the user).
    delta : at which epsilon is meant.
    direction : in which releases of the two differ, where it is known; otherwise it is learned from
        the draws.
    draws : releases of each of the two; the more, the nearer the bound.
    confidence : that the bounds hold.
    seed : of the noise.

    Raises
    ------
    InvalidInput : a delta, a confidence or a number of draws that cannot be used.

    Example
    -------
    >>> def release(rows, rng):  # a sum of numbers between 0 and 1, with mu = 1
    ...     return np.array([rows.sum() + rng.standard_normal()])
    >>> bound = epsilon_lower_bound(release, np.ones(3), np.ones(4), delta=1e-5)
    >>> 3.0 < bound.epsilon < epsilon_of(1.0, 1e-5) < 4.5
    True
    """
    from scipy.stats import binomtest, norm

    check(1.0, delta)
    if draws < 40 or not 0.5 < confidence < 1:
        raise InvalidInput("at least 40 draws and a confidence in (0.5, 1) are needed, got "
                           f"{draws!r} and {confidence!r}", remedy="Leave them out")
    rng = np.random.default_rng(seed)
    samples = [np.stack([np.asarray(release(one, rng), dtype=float).ravel() for _ in range(draws)])
               for one in (data, neighbour)]
    # 1. How to tell them apart, by the first half.
    half = draws // 2
    first, second = (part[:half] for part in samples)
    change = (second.mean(axis=0) - first.mean(axis=0) if direction is None
              else np.asarray(direction).ravel())
    scale = np.concatenate([part - part.mean(axis=0) for part in (first, second)]).std(axis=0)
    change = change / np.where(scale > 0, scale, 1e-12) ** 2
    low, high = float((first @ change).mean()), float((second @ change).mean())
    if high < low:
        change, low, high = -change, -low, -high
    threshold = 0.5 * (low + high)
    # 2. How often that fails, by the second half: the upper ends of Clopper-Pearson intervals,
    # which hold together with this confidence.
    alarms, caught = (int((part[half:] @ change > threshold).sum()) for part in samples)
    n = draws - half
    alpha, beta = (float(binomtest(count, n).proportion_ci(confidence).high)
                   for count in (alarms, n - caught))
    mu = max(float(norm.isf(alpha) - norm.ppf(beta)), 0.0) if max(alpha, beta) < 1 else 0.0
    general = max((math.log((1 - delta - b) / a)
                   for a, b in ((alpha, beta), (beta, alpha)) if b < 1 - delta), default=0.0)
    return EpsilonBound(epsilon_of(mu, delta) if mu > 0 else 0.0, max(general, 0.0), mu, delta,
                        draws, confidence)
