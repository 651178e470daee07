"""What users say of their losses to second order: all that a fit decides with.

A user's summary is the level, slope and curvature of its loss at one point, and its number of rows.
With squared losses one summary says everything. With others it is the working least-squares problem
of iteratively reweighted least squares, and a fit to it is penalised quasi-likelihood (Breslow and
Clayton 1993). All summaries are taken around ONE stable model, one centre with a spread:

    model of user i ~ N(centre, T),     slopes of the centre ~ N(0, g I),     noise s

1. Users minimise their losses, pulled to the centre by T, and send the summary there.
2. Centre, T, g and, for counts, s are learned from the summaries alone, by restricted likelihood.

The two steps are done `_ROUNDS` times. What is chosen later never moves the points of expansion:
a wrong choice would confirm itself. T has a weak prior, so that no direction of it vanishes, and is
shrunk to its diagonal. By second-order models T is too small where rows say little (classes), so
users give their evidence for T times 1, 3, 9, ... by Laplace's approximation, in one more round.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from coterie.base.labels import group_sums
from coterie.base.types import Array, Flags, Ints
from coterie.data.users import Participants, Users
from coterie.groups.noise import dispersion, without_ridge
from coterie.groups.spread import Expansions, extrapolate
from coterie.losses import Loss, Personal, Samples
from coterie.losses.derived import Quadratic
from coterie.losses.personal import PersonalSamples

_ROUNDS = 2  # summaries that the one centre is learned from
_START = 0.3  # variance of models around the first centre
_SCALES = (1.0, 3.0, 9.0, 27.0, 81.0)  # of T that evidence is asked for
# Of T, for models of groups to start from: curvatures at users' own models say little where these
# are far apart.
_WITHIN = 0.1
_LENGTHS = (0.3, 1.0, 2.0)  # of the step to the models of groups
_FARTHEST = 1e4  # times its size, an evidence is below a user's best at most
_PRIOR, _PRIOR_VARIANCE = 2.0, 0.05  # users that the prior of T counts for, and their variance
_INTERCEPT = 100.0  # variance of the prior of the centre's intercepts
_STEPS, _SETTLED = 200, 1e-3  # rounds of EM, and the gain in evidence that ends it
_LONGEST = 16.0  # factor by which an EM step is extrapolated, at most
# Users that T is learned from, at least; and numbers that may be multiplied for it in a step.
_SAMPLE, _WORK = 200, 5e6
# Decrement, relative to the objective, after which models for the evidence take one more step.
_ENOUGH = 1e-9
_NOTHING = 1e-9  # variance of models that do not differ


class Reply(NamedTuple):
    """A user's summaries of some parts of its rows, each at a point of its own; arrays have a row
    for each user.

    Parameters
    ----------
    point : (n_users, parts, dim).
    value, gradient, hessian : (n_users, parts, ...) of the loss without ridge, a mean over rows.
    information : (n_users, parts) mean of 4 p (1 - p) over rows, for two classes; else 1.
    spare : (n_users, parts) rows times the mean of slope^2 / curvature, for counts; else 0.
    """

    point: Array
    value: Array
    gradient: Array
    hessian: Array
    information: Array
    spare: Array


class Source(Protocol):
    """Users who answer, wherever their rows are. Part 0 is all rows; part 1, if there is one, those
    that are not held out.
    """

    users: Participants
    loss: Loss
    dim: int
    sizes: list[Ints]  # rows of each user, by part
    target_mean: float

    def summary(self, centre: Array, covariance: Array, noise: float, n_parts: int) -> Reply:
        """Every user's summary of the rows that are not held out, at its best model around a
        centre; with `n_parts` 2 of all rows, too, at theirs.
        """

    def evidence(self, asked: list[Hypotheses]) -> list[Told]:
        """By part, the log evidence by Laplace's approximation, and its slopes."""


class Hypotheses(NamedTuple):
    """Centres and covariances of models around them, whose evidence is asked for."""

    centres: Array  # (n_users, k, dim)
    covariances: Array  # (k, dim, dim)
    noise: float
    n_slopes: int = 0  # slopes are asked for of so many centres, the first ones


class Told(NamedTuple):
    """What users answer to `Hypotheses`."""

    evidence: Array  # (n_users, k)
    slopes: Array  # (n_users, n_slopes, dim) of the evidence by the centre


@dataclass(frozen=True, kw_only=True, eq=False)
class OneCentre:
    """One centre with a spread of models around it.

    Parameters
    ----------
    covariance : T.
    prior : g, the variance of the centre's slopes.
    noise : s.
    gain : what the evidence gains over one model for all, in nats.
    """

    covariance: Array
    prior: float = 1.0
    noise: float = 1.0
    gain: float = 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Summaries:
    """The users as a fit knows them.

    Parameters
    ----------
    users : their names; for squared losses their rows may be there too.
    loss : a quadratic function for each user, with ridge; a mean over rows.
    sizes : (n_users,) rows.
    ridge : (dim,) what `loss` has of it.
    noise : s; the log-likelihood of user i is -sizes_i loss_i / s without the ridge.
    n_eff : number of rows that carry information.
    intercepts : (dim,) which coordinates are intercepts.
    one : the stable model that summaries were taken around; None for squared losses.
    told, near : by the labels of groups that share a model, (n_users,) log-likelihoods that users
        told, and (n_groups, dim) the models of which.
    prior : (dim,) precision of the prior of centres.
    noises : (n_users,) the noise of each user over s; None where it is equal for all.
    """

    users: Participants
    loss: Loss
    sizes: Ints
    ridge: Array
    noise: float
    n_eff: float
    intercepts: Flags
    one: OneCentre | None = None
    # By the groups that share a model, (n_users,) log-likelihoods that users told, and (n_groups,
    # dim) the models they are of.
    told: dict[bytes, Array] = field(default_factory=dict, repr=False)
    near: dict[bytes, Array] = field(default_factory=dict, repr=False)
    prior: Array = field(default_factory=lambda: np.zeros(0))
    noises: Array | None = None

    @cached_property
    def samples(self) -> Samples:
        """What `loss` computes on."""
        return self.loss.prepare(self.users)

    @property
    def weights(self) -> Array:
        """(n_users,) what a user's loss counts in its log-likelihood."""
        return np.asarray(self.certain / self.noise)

    @property
    def certain(self) -> Array:
        """(n_users,) rows, as many as they are worth where noise differs."""
        return np.asarray(self.sizes if self.noises is None else self.sizes / self.noises)

    @cached_property
    def expansions(self) -> Expansions:
        """The log-likelihoods, without ridge."""
        zero = np.zeros((self.users.n_users, self.samples.dim))
        with_ridge = Expansions.at(self.loss, self.samples, self.weights, zero)
        return replace(with_ridge, curvatures=with_ridge.curvatures
                       - self.weights[:, None, None] * np.diag(self.ridge))

    @classmethod
    def exact(cls, users: Users, loss: Loss) -> Summaries:
        """Those of quadratic losses, which say everything."""
        samples = loss.prepare(users)
        return cls(users=users, loss=loss, sizes=users.sizes, ridge=ridge_of(loss, samples),
                   noise=dispersion(loss, users, samples), n_eff=float(users.sizes.sum()),
                   intercepts=intercepts_of(loss, samples))

    def around(self, covariance: Array) -> Summaries:
        """The same users, whose models vary around the one that is asked for."""
        marginal, weights = self.expansions.marginal(covariance)[0], self.weights
        loss = Quadratic(point=np.zeros_like(marginal.slopes), value=-marginal.constants / weights,
                         gradient=-marginal.slopes / weights[:, None],
                         hessian=marginal.curvatures / weights[:, None, None])
        return replace(self, users=Participants(self.users.names, self.users.feature_names),
                       loss=loss, ridge=np.zeros_like(self.ridge))

    def precision(self, n_groups: int) -> Array:
        """(dim, dim) of the prior of centres: the one of all users, or those of several groups,
        which differ from it as models do.
        """
        if self.one is None or n_groups == 1:
            return np.diag(self.prior) if self.prior.size else np.zeros((self.samples.dim,) * 2)
        return np.asarray(np.linalg.inv(np.diag(1.0 / self.prior) + self.one.covariance))

    def centres(self, labels: Ints, covariance: Array) -> Array:
        """(n_groups, dim) the centres of groups whose models vary around them, with their prior."""
        sums = self.expansions.marginal(covariance)[0].sums(labels)
        held = sums.curvatures + self.precision(len(sums.slopes))
        return np.asarray(np.linalg.solve(held, sums.slopes[..., None])[..., 0])

    def newton_step(self, labels: Ints, models: Array, slopes: Array) -> Array:
        """(n_groups, dim) a step of the models of groups by their users' (n_users, dim) slopes."""
        prior = self.precision(len(models))
        held = self.expansions.sums(labels).curvatures + prior
        pull = group_sums(slopes, labels) - models @ prior
        return np.asarray(np.linalg.solve(held, pull[..., None])[..., 0])


def summarise(source: Source) -> list[Summaries]:
    """Take summaries around one centre with a spread; see the module.

    Returns
    -------
    The summaries, by part; their `one` is not scaled yet (`ask_evidence`).
    """
    dim, n_parts = source.dim, len(source.sizes)
    bare = Participants(source.users.names, source.users.feature_names)
    intercepts = intercepts_of(source.loss, Samples(bare, dim))
    # 1. Around the model of the mean target.
    centre = start_of(source.loss, source.target_mean, dim)
    one = OneCentre(covariance=_START * np.eye(dim))
    for turn in range(_ROUNDS):
        # 2. Summaries at the best models around the centre; of all rows in the last round only.
        last = turn == _ROUNDS - 1
        reply = source.summary(centre, one.covariance, one.noise, n_parts if last else 1)
        # 3. Centre and spread by EM.
        parts = [_Working.of(reply, k, source.sizes[-1 - k], source.loss, intercepts)
                 for k in range(reply.value.shape[1])]
        learned = [part.learn(one) for part in parts]
        centre, one = learned[0]
    ridge = np.zeros(dim)
    out = [Summaries(users=bare, loss=part.loss, sizes=part.sizes, ridge=ridge, noise=each.noise,
                     n_eff=float(part.sizes @ reply.information[:, k]), intercepts=intercepts,
                     one=each, prior=1.0 / part.variances(each.prior))
           for k, (part, (_, each)) in enumerate(zip(parts, learned, strict=True))]
    return out[::-1]


class _Working(NamedTuple):
    """The working least-squares problems of users, from their summaries."""

    loss: Quadratic
    sizes: Ints
    squares: Array  # (n,) rows times the mean of slope^2 / curvature, at the points
    intercepts: Flags
    counts: bool

    @classmethod
    def of(cls, reply: Reply, part: int, sizes: Ints, loss: Loss, intercepts: Flags) -> _Working:
        near = Quadratic(point=reply.point[:, part], value=reply.value[:, part],
                         gradient=reply.gradient[:, part], hessian=reply.hessian[:, part])
        return cls(near, sizes, reply.spare[:, part], intercepts, loss.task == "counts")

    def variances(self, prior: float) -> Array:
        """(dim,) of the prior of centres."""
        return np.where(self.intercepts, _INTERCEPT, prior)

    def learn(self, start: OneCentre) -> tuple[Array, OneCentre]:
        """The centre, and T, g and s, by restricted likelihood: EM, extrapolated.

        With A = sum of curvatures / s, V = (A + T^-1)^-1, Q the precision of the centre's prior and
        C = (sum of (A - A V A) + Q)^-1, the covariance of the centre given all rows:

            x_i = centre + V (slope - A centre)     cov(x_i) = V + (I - V A) C (I - A V)
            T   = mean of (x_i - centre)(x_i - centre)' + V + V A C A V
            g   = mean over slopes of centre^2 + diag C
            s   = sum of [squares at x_i + tr(A cov(x_i)) s] / rows
        """
        n, dim = self.loss.point.shape
        some = _sampled(n, dim)
        rows, near = self.sizes[some].astype(float), self.loss
        H = rows[:, None, None] * near.hessian[some]
        slopes, points = rows[:, None] * near.gradient[some], near.point[some]
        rhs = (H @ points[..., None])[..., 0] - slopes
        # minus half the sum of squares of working residuals, as a function of the model
        base = -0.5 * self.squares[some] + ((slopes - 0.5 * (H @ points[..., None])[..., 0])
                                            * points).sum(axis=1)
        first, (n, dim), eye = Expansions(base, rhs, H), rhs.shape, np.eye(len(self.intercepts))
        T, g, s, free = start.covariance, start.prior, start.noise, ~self.intercepts
        largest, stretch, best = -np.inf, 1.0, (np.zeros(dim), T, g, s)
        plain = T
        for _ in range(_STEPS):
            Q = 1.0 / self.variances(g)
            scaled = first.scaled(1.0 / s)
            marginal, V = scaled.marginal(T)
            precision = marginal.curvatures.sum(axis=0) + np.diag(Q)
            C = np.linalg.inv(precision)
            centre = C @ marginal.slopes.sum(axis=0)
            evidence = (float(marginal.at_own(np.broadcast_to(centre, (n, dim))).sum())
                        - 0.5 * rows.sum() * np.log(s) - 0.5 * float(centre**2 @ Q)
                        + 0.5 * (np.log(Q).sum() - np.linalg.slogdet(precision)[1]))
            if evidence < largest and stretch > 1.0:  # the extrapolated step was too long
                T, stretch = plain, 1.0
                continue
            gain, largest, best = evidence - largest, max(evidence, largest), (centre, T, g, s)
            if gain < _SETTLED:
                break
            VA = V @ scaled.curvatures
            own = (V @ (scaled.slopes - scaled.curvatures @ centre)[..., None])[..., 0]
            moment = (own.T @ own + V.sum(axis=0)
                      + np.einsum("nij,njk->ik", VA @ C, np.swapaxes(VA, 1, 2))) / n
            if self.counts:
                follows = eye - VA
                spread = V + follows @ C @ np.swapaxes(follows, 1, 2)
                squares = -2.0 * first.at_own(centre + own)
                s = max(1.0, float((squares + np.einsum("nij,nji->n", H, spread)).sum()
                                   / rows.sum()))
            if free.any():
                g = max(float((centre[free]**2 + np.diag(C)[free]).mean()), 1e-6)
            plain = _with_prior(moment, n)
            stretch = min(2.0 * stretch, _LONGEST)
            T = extrapolate(T, plain, stretch)
        centre, T, g, s = best
        # Symmetric to the last bit, as half of it is sent.
        return centre, OneCentre(covariance=0.5 * (T + T.T), prior=g, noise=s)


def ask_evidence(source: Source, summaries: list[Summaries],
                 others: list[list[tuple[Ints, Array | None]]]) -> list[tuple[Summaries, Array]]:
    """Ask for the evidence of T times 1, 3, 9, ..., and take the most likely one; in the same
    rounds for that of other descriptions.

    Where all users of a group share its model, that by the summaries may be far from the most
    likely one: it takes one step by the slopes that users tell, as long as is best.

    Parameters
    ----------
    source : who answers.
    summaries : by part.
    others : by part, groups and covariances of models around their centres; None for models that
        are equal in each group, whose evidence is the likelihood.

    Returns
    -------
    By part the summaries with T scaled, and (n_users, n_others) the evidence of the others.
    """
    everyone = np.zeros(summaries[0].users.n_users, dtype=np.int64)
    shared = [list({labels.tobytes(): labels for labels in
                    (everyone, *(labels for labels, T in wanted if T is None))}.values())
              for wanted in others]
    varied = [[*((everyone, c * known.one.covariance) for c in _SCALES if known.one is not None),
               *((labels, T) for labels, T in wanted if T is not None)]
              for known, wanted in zip(summaries, others, strict=True)]
    # 1. Models of groups by the summaries, with slopes; and all other descriptions.
    starts = [[known.centres(labels, _WITHIN * known.one.covariance) for labels in each
               if known.one is not None]
              for known, each in zip(summaries, shared, strict=True)]
    first = source.evidence([
        _hypotheses(known, [*zip(equal, models, [_nothing(known)] * len(equal), strict=True),
                            *((labels, known.centres(labels, T), T) for labels, T in each)],
                    len(equal))
        for known, equal, models, each in zip(summaries, shared, starts, varied, strict=True)])
    # 2. The models of groups after a step by these slopes; and, where columns have heavy tails and
    #    steps lead astray, the model of the mean target.
    safe = start_of(source.loss, source.target_mean, source.dim)[None]
    steps = [[known.newton_step(labels, models, told.slopes[:, k])
              for k, (labels, models) in enumerate(zip(equal, each, strict=True))]
             for known, equal, each, told in zip(summaries, shared, starts, first, strict=True)]
    second = source.evidence([
        _hypotheses(known, [*((labels, models + length * step, _nothing(known))
                              for labels, models, step in zip(equal, each, some, strict=True)
                              for length in _LENGTHS), (everyone, safe, _nothing(known))], 0)
        for known, equal, each, some in zip(summaries, shared, starts, steps, strict=True)])
    tried = [[[models + length * step for length in (0.0, *_LENGTHS)]
              + ([] if k else [safe]) for k, (models, step) in enumerate(zip(each, some,
                                                                             strict=True))]
             for each, some in zip(starts, steps, strict=True)]
    return [_learned(known, equal, models, each, told, more.evidence)
            for known, equal, models, each, told, more in zip(summaries, shared, tried, others,
                                                              first, second, strict=True)]


def _nothing(known: Summaries) -> Array:
    """The covariance of models that do not differ."""
    return _NOTHING * np.eye(len(known.intercepts))


def _hypotheses(known: Summaries, described: list[tuple[Ints, Array, Array]],
                n_slopes: int) -> Hypotheses:
    """The question about groups with these centres and covariances."""
    return Hypotheses(np.stack([centres[labels] for labels, centres, _ in described], axis=1),
                      np.stack([T for _, _, T in described]), known.noise, n_slopes)


def _learned(known: Summaries, shared: list[Ints], models: list[list[Array]],
             others: list[tuple[Ints, Array | None]], first: Told,
             second: Array) -> tuple[Summaries, Array]:
    """The summaries with T scaled by the answers, and the evidence of the others; `models` of
    groups are those that were tried.
    """
    assert known.one is not None
    told, near = dict[bytes, Array](), dict[bytes, Array]()
    for k, labels in enumerate(shared):  # of each group, the best model
        tried = np.column_stack([first.evidence[:, k],
                                 second[:, k * len(_LENGTHS):(k + 1) * len(_LENGTHS)],
                                 *([] if k else [second[:, -1]])])
        best = group_sums(tried, labels).argmax(axis=1)
        told[labels.tobytes()] = tried[np.arange(len(labels)), best[labels]]
        near[labels.tobytes()] = np.stack(models[k])[best, np.arange(len(best))]
    together = told[np.zeros(len(shared[0]), dtype=np.int64).tobytes()]
    varied = first.evidence[:, len(shared):]
    scales = varied[:, :len(_SCALES)].sum(axis=0)
    one = replace(known.one, covariance=_SCALES[int(scales.argmax())] * known.one.covariance,
                  gain=float(scales.max() - together.sum()))
    rest = iter(varied.T[len(_SCALES):])
    evidence = [told[labels.tobytes()] if T is None else next(rest) for labels, T in others]
    columns = np.stack(evidence, axis=1) if evidence else np.zeros((len(together), 0))
    return replace(known, one=one, told=told, near=near), columns


def spread_within(known: Summaries, labels: Ints) -> Array:
    """(dim, dim) the covariance of models around the centres of groups, by EM as for one centre."""
    assert known.one is not None
    T, some = 0.1 * known.one.covariance, _sampled(len(labels), len(known.intercepts))
    expansions = known.expansions.take(some)
    labels = np.unique(labels[some], return_inverse=True)[1].astype(np.int64)
    for _ in range(_STEPS):
        marginal, V = expansions.marginal(T)
        sums = marginal.sums(labels)
        held = sums.curvatures + known.precision(len(sums.slopes))
        centres = np.asarray(np.linalg.solve(held, sums.slopes[..., None])[..., 0])
        moment = expansions.second_moment(centres[labels], V)
        before, T = T, _with_prior(moment, len(labels))
        if np.abs(T - before).max() <= 1e-3 * np.abs(T).max():
            break
    return T


def _sampled(n: int, dim: int) -> Ints:
    """Positions of users that a covariance is learned from: of many users some."""
    most = min(n, max(_SAMPLE, int(_WORK / dim**3)))
    return np.unique(np.linspace(0, n - 1, most).astype(np.int64))


def _with_prior(moment: Array, n: int) -> Array:
    """A covariance from the second moment of n models: with dim + 1 users who know its diagonal
    only, and the users of the prior.
    """
    dim, moment = len(moment), 0.5 * (moment + moment.T)
    return np.asarray((n * moment + (dim + 1) * np.diag(np.diag(moment))
                       + _PRIOR * _PRIOR_VARIANCE * np.eye(dim)) / (n + dim + 1 + _PRIOR))


class RowsSource:
    """Users whose rows are in this process.

    Parameters
    ----------
    loss : of their models.
    parts : all their rows, in the solver's units, and if there are any those not held out.
    """

    def __init__(self, loss: Loss, parts: list[Users]) -> None:
        self.loss, self.parts, self.sizes = loss, parts, [part.sizes for part in parts]
        self.users: Participants = parts[0]
        self.dim, y = loss.dim(parts[0]), parts[-1].targets
        self.target_mean = 0.0 if y is None else float(y.mean())

    def summary(self, centre: Array, covariance: Array, noise: float, n_parts: int) -> Reply:
        return summary_at(self.loss, self.parts, centre, covariance, noise, n_parts)

    def evidence(self, asked: list[Hypotheses]) -> list[Told]:
        return [evidence_of(self.loss, part, each)
                for part, each in zip(self.parts, asked, strict=True)]


def summary_at(loss: Loss, parts: list[Users], centre: Array, covariance: Array, noise: float,
               n_parts: int) -> Reply:
    """`Source.summary` of these users; `parts` as for `Source`."""
    plain, columns = without_ridge(loss), []
    for part in parts[::-1][:n_parts]:
        outer = Personal(plain, covariance=covariance, scale=noise / np.maximum(part.sizes, 1))
        points = outer.own_models(outer.prepare(part), np.tile(centre, (part.n_users, 1)))
        f, g, h = plain.evaluate(plain.prepare(part), points, 2)
        h = 0.5 * (h + np.swapaxes(h, 1, 2))  # to the last bit, as a triangle of it is sent
        columns.append((points, f, g, h, information(loss, part, centre),
                        plain.squares(part, points)))
    return Reply(*(np.stack(column, axis=1) for column in zip(*columns, strict=True)))


def evidence_of(loss: Loss, users: Users, asked: Hypotheses) -> Told:
    """`Source.evidence` of these users."""
    plain = without_ridge(loss)
    samples, weights = plain.prepare(users), users.sizes / asked.noise
    columns, slopes = [], np.zeros((users.n_users, asked.n_slopes, samples.dim))
    for k, covariance in enumerate(asked.covariances):
        centres = asked.centres[:, k]
        outer = Personal(plain, covariance=covariance, scale=1.0 / np.maximum(weights, 1e-300))
        prepared = outer.prepare(users)
        if isinstance(prepared, PersonalSamples):
            prepared = replace(prepared, enough=_ENOUGH)
        modes = outer.own_models(prepared, centres)
        marginal = Expansions.at(plain, samples, weights, modes).marginal(covariance)[0]
        columns.append(marginal.at_own(centres))
        if k < asked.n_slopes:
            slopes[:, k] = marginal.slopes - (marginal.curvatures @ centres[..., None])[..., 0]
    evidence = np.stack(columns, axis=1)
    # What is far from a user's best is out of the question, however far: counts of rows with heavy
    # tails would outweigh all other users.
    best = np.nan_to_num(evidence, nan=-np.inf, posinf=-np.inf).max(axis=1, keepdims=True)
    return Told(np.fmax(evidence, best - _FARTHEST * (1.0 + np.abs(best))), slopes)


def information(loss: Loss, users: Users, centre: Array) -> Array:
    """(n_users,) the mean of 4 p (1 - p) over the rows of each user, for two classes; 1 for other
    targets.
    """
    if not loss.signs or not users.n_samples:
        return np.ones(users.n_users)
    t = loss.decision(users.features, np.broadcast_to(centre, (users.n_samples, len(centre))))
    p = loss.shares(t)
    return np.asarray(np.bincount(users.owner, 4 * p * (1 - p), users.n_users)
                      / np.maximum(users.counts, 1))


def ridge_of(loss: Loss, samples: Samples) -> Array:
    """(dim,) the ridge of a loss on each coordinate."""
    return loss.ridge * loss.shrunk(samples.dim, samples.dim // (samples.users.n_features + 1))


def intercepts_of(loss: Loss, samples: Samples) -> Flags:
    """Which coordinates of a model are intercepts: the last ones, one of each output."""
    dim = samples.dim
    if not loss.intercept:
        return np.zeros(dim, dtype=bool)
    return np.arange(dim) >= dim - dim // (samples.users.n_features + 1)


def start_of(loss: Loss, mean: float, dim: int) -> Array:
    """(dim,) the model with an intercept only that fits the mean target; zero for losses without an
    intercept.
    """
    start = np.zeros(dim)
    if loss.intercept:
        start[-1] = loss.margin_of(mean)
    return start
