"""Personal models around centres: the Moreau envelope of a loss, which is a loss of the centre."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from coterie.base.errors import InvalidInput
from coterie.base.types import Array, Indices
from coterie.data.users import Participants, Users
from coterie.losses.base import SUMS, DualBounds, Evaluation, Loss, Samples
from coterie.losses.curvature import EnvelopeCurvature, WideEvaluation
from coterie.losses.frame import Frame
from coterie.losses.metric import Form, Metric, Scale, Space, lower, objective_of
from coterie.losses.newton import Evaluate, Minimum, minimise, solve_scaled
from coterie.losses.rows import minimise_wide

_KEPT = 2  # sets of personal models that are remembered
# Steps of a quadratic loss: the first is exact but for rounding, the others remove that.
_CLOSED = 3
_ENDLESS = 60  # Newton steps where there may be no minimum
_BELOW = 1e-12  # times a slope: what is left along an entirely personal direction is rounding


#: Personal models, in the local coordinates of the loss inside, and x - z along the axes of the
#: metric.
Near = tuple[Array, Array]


@dataclass(frozen=True, eq=False)
class PersonalSamples(Samples):
    """What the loss inside computes on, and the metric of each user.

    Personal models whose Newton decrement, relative to the objective, is below `enough` are
    searched no further; the step from there has about all digits.
    """

    inner: Samples
    metric: Metric
    enough: float = field(default=0.0, kw_only=True)
    recent: list[tuple[Array, Indices | None, Near]] = field(default_factory=list, kw_only=True,
                                                             repr=False)


@dataclass(frozen=True, eq=False)
class Personal(Loss):
    """A loss of centres: each user's model may leave its centre, at a price. It wraps any loss f.

        e_i(z) = min_x f_i(x) + 1/2 (x - z)' P_i (x - z)

    In a `Problem` with this loss, the models that are fused are centres z_i, which users of a group
    share exactly; the model x_i of a user is its own, and `personal_models` returns it. Large P
    gives the problem of f itself, P = 0 everyone's own best model, large lam personal models around
    one centre for all.

        grad e_i(z) = P_i (z - x_i)        Hessian P_i - P_i (H_i + P_i)^-1 P_i        e_i*(u) =
                                           f_i*(u) + 1/2 u' C_i u

    with C_i = P_i^-1. A user computes all of it from its own data.

    Parameters
    ----------
    loss : of a user's own model.
    metric : the price P of leaving the centre: a number, the diagonal (dim,) or a matrix (dim,
        dim), for all users; one for each is (n_users, 1, dim) or (n_users, dim, dim). Entries of a
        diagonal may be inf: this coordinate is entirely shared, x = z. They may be 0, and a matrix
        singular: this direction is entirely personal, the centre has no meaning there. Which
        directions these are is the same for all users.
    covariance : the inverse of the metric, instead of it: how far users are from their centres. Its
        null directions are entirely shared.
    scale : P_i = scale_i P. A number, one per user, a mapping from the users' names, or "rows" for
        1 / number of the user's rows: as a loss is a mean over rows, this is the metric of a prior
        that is the same for all users. "rows" and a mapping also serve users who join later, or a
        part of the users.

    Raises
    ------
    InvalidInput : unless exactly one of metric and covariance is given; in `prepare`, where shapes
        do not fit the users and the models.

    Example
    -------
    >>> import coterie as ct
    >>> users = ct.Users.from_arrays([[0.0], [1.0], [9.0]], user=["ann", "bob", "eve"])
    >>> loss = ct.Personal(ct.SquaredDistance(), metric=1.0)
    >>> solution = ct.solve(ct.Problem(users, loss, lam=0.5))
    >>> solution.models.round(6).tolist()  # centres
    [[1.5], [1.5], [7.0]]
    >>> loss.personal_models(users, solution.models).round(6).tolist()
    [[0.75], [1.25], [8.0]]
    """

    personal: ClassVar[bool] = True
    loss: Loss
    metric: Form | None = None
    covariance: Form | None = field(default=None, kw_only=True)
    scale: Scale = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.loss, Loss):
            raise InvalidInput(f"expected a loss such as Logistic(), got {self.loss!r}",
                               remedy="Create the loss by calling its class")
        if (self.metric is None) == (self.covariance is None):
            raise InvalidInput("expected either a metric or a covariance",
                               remedy="Use for example metric=1.0")

    @property
    def quadratic(self) -> bool:  # type: ignore[override]
        return self.loss.quadratic

    @property
    def counts_rows(self) -> bool:  # type: ignore[override]
        return self.loss.counts_rows

    @property
    def least(self) -> float:  # type: ignore[override]
        return self.loss.least

    def dim(self, users: Participants) -> int:
        return self.loss.dim(users)

    def prepare(self, users: Participants) -> PersonalSamples:
        inner = self.loss.prepare(users)
        inverse = self.metric is None
        form = self.covariance if inverse else self.metric
        assert form is not None
        metric = Metric.of(form, self.scale, users, inner.dim, inverse=inverse)
        return PersonalSamples(users, inner.dim, inner, metric)

    def concerns(self, users: Users) -> list[str]:
        concerns = self.loss.concerns(users)
        if concerns and self.prepare(users).metric.free.any():
            concerns.append("Directions that are entirely personal are not determined by other "
                            "users either: give them a small price instead of 0.")
        return concerns

    def personal_models(self, users: Participants | Samples, centres: npt.ArrayLike) -> Array:
        """The users' own models x_i, given their centres.

        Parameters
        ----------
        users : the users with their data, or what `prepare` returned for them.
        centres : (n_users, dim) one row for each user.

        Returns
        -------
        (n_users, dim) models.

        Raises
        ------
        InvalidInput : where the centres have another shape, or are not finite.
        """
        samples = users if isinstance(users, Samples) else self.prepare(users)
        z = np.ascontiguousarray(centres, dtype=float)
        if z.shape != (samples.n_users, samples.dim) or not np.isfinite(z).all():
            raise InvalidInput(f"expected finite centres of shape ({samples.n_users}, "
                               f"{samples.dim}), got {z.shape}",
                               remedy="Give one row for each user, in the order of users.names")
        return self.own_models(samples, z)

    def own_models(self, samples: Samples, models: Array, users: Indices | None = None) -> Array:
        samples = _personal(samples)
        frame = self.loss.coordinates(samples.inner)
        points, _ = self._near(samples, models, users)
        points = points if frame is None else frame.leave(points, _who(samples, users))
        return self.loss.own_models(samples.inner, points, users)

    @property
    def own_loss(self) -> Loss:
        return self.loss.own_loss

    @property
    def rows_per_user(self) -> float | Array | None:
        return self.loss.rows_per_user

    @property
    def scales(self) -> Array | None:
        return self.scale if isinstance(self.scale, np.ndarray) else None

    def evaluate(self, samples: Samples, models: Array, order: int = 2,
                 users: Indices | None = None) -> Evaluation:
        samples = _personal(samples)
        points, steps = self._near(samples, models, users)
        metric, frame = samples.metric.take(users), self._frame(samples)
        finite = metric.finite
        # Where all directions have a finite price the gradient is known from the step alone.
        needed = order if order > 1 or not finite.all() else 0
        f, g, h = self.loss.evaluate_local(samples.inner, points, needed, users)
        prices = np.where(finite, metric.prices, 0.0)
        values = f + 0.5 * (prices * steps**2).sum(axis=1)
        if order == 0:
            return Evaluation(values, np.empty(0), np.empty(0))
        # P (z - x) along the axes; grad f(x) along those that are shared.
        slopes = -prices * steps
        if not finite.all():
            g = g if frame is None else frame.gradients(g, _who(samples, users))
            slopes = np.where(finite, slopes, metric.along(g))
        gradients = metric.back(slopes)
        if order == 1:
            return Evaluation(values, gradients, np.empty(0))
        h = h if frame is None else frame.hessians(h, _who(samples, users))
        return Evaluation(values, gradients, metric.envelopes(h))

    def wide(self, samples: Samples) -> bool:
        """Whether the models are wide, and P_i = price_i I with one price > 0 for all directions of
        a user.
        """
        samples = _personal(samples)
        prices = samples.metric.prices
        held = np.isfinite(prices[:, 0]) & (prices[:, 0] > 0)
        return self.loss.wide(samples.inner) and samples.metric.axes is None and bool(
            held.all() and (prices == prices[:, :1]).all())

    def expand(self, samples: Samples, models: Array,
               users: Indices | None = None) -> WideEvaluation:
        samples = _personal(samples)
        points, steps = self._near(samples, models, users)
        prices = samples.metric.take(users).prices[:, 0]
        f, _, curvature = self.loss.expand(samples.inner, points, users)
        return f + 0.5 * prices * (steps**2).sum(axis=1), -prices[:, None] * steps, \
            EnvelopeCurvature(curvature, prices)

    def prox(self, samples: Samples, linear: Array | None, t: Array | float, centres: Array | None,
             start: Array | None = None, users: Indices | None = None) -> Minimum:
        """As for any loss. The minimum over z is known for a given x, so one search for x is
        enough.

        Along an axis of price p, with v = centres and l = linear:

            min_z  p/2 (x - z)^2 + l z + t/2 (z - v)^2,      z - v = (p (x - v) - l) / (p + t)
                   =  q/2 (x - v)^2 + l p / (p + t) (x - v) - l^2 / (2 (p + t)) + l v,
                                                                     q = p t / (p + t)
        """
        samples = _personal(samples)
        if self.wide(samples):
            return minimise_wide(self, samples, linear, t, centres, start, users)
        shape = (len(_who(samples, users)), samples.dim)
        v = np.zeros(shape) if centres is None else centres
        given = np.zeros(shape) if linear is None else linear
        t = np.broadcast_to(np.asarray(t, dtype=float), shape[:1])[:, None]
        metric = samples.metric.take(users)
        p, l, shared = metric.prices, metric.along(given), ~metric.finite  # noqa: E741
        loose = np.broadcast_to(metric.free, shape) & (t == 0)  # nothing holds z
        p = np.where(shared, 1.0, p)
        total = np.where(loose, 1.0, p + t)
        share = np.where(shared | loose, 1.0, p / total)
        prices = np.where(shared, t, share * t)
        begin = v if start is None else start
        (_, x), minimum = self._search(samples, users, v, Metric(prices, metric.axes),
                                     metric.back(share * l), begin)
        steps = np.where(shared | loose, x, (p * x - l) / total)
        rest = np.where(shared | loose, 0.0, l**2 / (2.0 * total)).sum(axis=1)
        unbounded = (loose & (np.abs(l) > _BELOW
                              * np.abs(l).max(axis=1, initial=0.0, keepdims=True))).any(axis=1)
        values = minimum.values - rest + np.einsum("nd,nd->n", given, v)
        return Minimum(v + metric.back(steps), values, minimum.excess,
                       minimum.converged & ~unbounded)

    def conjugates(self, samples: Samples, slopes: Array, start: Array | None = None,
                   users: Indices | None = None) -> Array:
        metric = _personal(samples).metric.take(users)
        away = np.linalg.norm(slopes - metric.bounded(slopes), axis=1) > _BELOW \
            * np.linalg.norm(slopes, axis=1)
        return np.where(away, np.inf, super().conjugates(samples, slopes, start, users))

    def dual_bounds(self, samples: Samples, slopes: Array, start: Array | None = None,
                    users: Indices | None = None, about: Array | None = None) -> DualBounds:
        """Upper bounds on e_i*(u) - <u, about_i>, where u are slopes_i without their part along
        personal directions.

        The bound f_i*(u) + 1/2 u' C u is as rigorous as that of the loss inside. Along a direction
        that is entirely personal e_i* is finite only for slopes 0. Slopes of a problem are sums of
        edge variables, which are as feasible without their part along these directions, the same
        for all users; so this part is left out.
        """
        samples = _personal(samples)
        u = samples.metric.take(users).bounded(slopes)
        begin = None if start is None else self._leave(
            samples, self._near(samples, start, users)[0], users)
        inner = self.loss.dual_bounds(samples.inner, u, begin, users, about)
        return self._with_price(samples, slopes, begin, users, about, inner)

    def rough_bounds(self, samples: Samples, slopes: Array, start: Array, about: Array,
                     enough: float) -> DualBounds:
        samples = _personal(samples)
        u = samples.metric.bounded(slopes)
        begin = self._leave(samples, self._near(samples, start, None)[0], None)
        inner = self.loss.rough_bounds(samples.inner, u, begin, about, enough)
        return self._with_price(samples, slopes, begin, None, about, inner)

    def _with_price(self, samples: PersonalSamples, slopes: Array, begin: Array | None,
                    users: Indices | None, about: Array | None, inner: DualBounds) -> DualBounds:
        """The bounds of the envelope from those of the loss inside."""
        metric = samples.metric.take(users)
        u = metric.bounded(slopes)
        # Free intercepts of users with one class run off.
        if metric.free.any():
            inner = self.loss.ridge_bounds(inner, samples.inner, u, about)
        with np.errstate(over="ignore", invalid="ignore"):
            price = 0.5 * metric.covariances(u)
            rounding = inner.rounding + SUMS * samples.dim * price
            if metric.free.any() and metric.axes is not None:  # what is left out is rounded
                x = np.zeros_like(u) if begin is None else begin
                away = np.abs(x if about is None else x - about).sum(axis=1)
                rounding = rounding + SUMS * samples.dim * np.abs(slopes).sum(axis=1) * away
            values = inner.values + price
        finite = np.isfinite(values)
        return DualBounds(np.where(finite, values, np.inf), np.where(finite, rounding, 0.0),
                          inner.slack)

    def value_rounding(self, samples: Samples, models: Array,
                       users: Indices | None = None) -> Array:
        samples = _personal(samples)
        points, steps = self._near(samples, models, users)
        metric, who = samples.metric.take(users), _who(samples, users)
        prices = np.where(metric.finite, metric.prices, 0.0)
        forces, z, frame = metric.back(prices * np.abs(steps)), models, self._frame(samples)
        if frame is not None:
            forces, z = frame.slopes(forces, who), frame.enter(models, who)
        price = (prices * steps**2).sum(axis=1)
        moved = (np.abs(forces) * (np.abs(z) + np.abs(points))).sum(axis=1)  # x - z is rounded
        inside = self.loss.value_rounding(samples.inner, self._leave(samples, points, users),
                                          users)
        return inside + SUMS * samples.dim * (price + moved)

    def _sizes(self, samples: Samples) -> Array:
        return self.loss.sizes(_personal(samples).inner)

    def lipschitz(self, samples: Samples) -> Array:
        samples = _personal(samples)
        return _parallel(self.loss.lipschitz(samples.inner), samples.metric.prices.max(axis=1)) \
            * (1 + 1e-12)

    def strong_convexity(self, samples: Samples) -> Array:
        samples = _personal(samples)
        least = _parallel(self.loss.strong_convexity(samples.inner),
                          samples.metric.prices.min(axis=1))
        return least * (1 - 1e-12)

    def upper_hessians(self, samples: Samples) -> Array | None:
        samples = _personal(samples)
        upper, frame = self.loss.upper_hessians(samples.inner), self._frame(samples)
        if upper is None:
            return None
        upper = upper if frame is None else frame.hessians(upper, np.arange(samples.n_users))
        return samples.metric.envelopes(upper)

    def decision(self, features: Array, models: Array) -> Array:
        """What personal models say of a sample; `personal_models` gives them."""
        return self.loss.decision(features, models)

    def predict(self, features: Array, models: Array) -> Array:
        """The targets that personal models predict; `personal_models` gives them."""
        return self.loss.predict(features, models)

    def conic(self, cp: ModuleType, samples: Samples, x: Any) -> Any:
        """The sum of all e_i, where minimised: the personal models are variables of their own."""
        from scipy import sparse

        samples = _personal(samples)
        metric, n, d = samples.metric, samples.n_users, samples.dim
        finite, free = metric.finite, metric.free[metric.finite]
        if not finite.any():
            return self.loss.conic(cp, samples.inner, x)
        # Of price 1.
        units = np.where(free, 1.0, 1.0 / np.sqrt(np.where(free, 1.0, metric.prices[:, finite])))
        axes = np.eye(d) if metric.axes is None else metric.axes
        spans = np.broadcast_to(axes, (n, d, d))[..., finite] * units[:, None, :]
        steps = cp.Variable(n * int(finite.sum()))
        moves = sparse.block_diag([sparse.csr_array(span) for span in spans], format="csr")
        own = self.loss.conic(cp, samples.inner, x + moves @ steps)
        return own + 0.5 * cp.sum_squares(cp.multiply(np.tile((~free).astype(float), n), steps))

    def _frame(self, samples: PersonalSamples) -> Frame | None:
        return self.loss.coordinates(samples.inner)

    def _leave(self, samples: PersonalSamples, points: Array, users: Indices | None) -> Array:
        frame = self._frame(samples)
        return points if frame is None else frame.leave(points, _who(samples, users))

    def _near(self, samples: PersonalSamples, centres: Array, users: Indices | None) -> Near:
        """The personal models around centres; the last ones are remembered, by every number they
        depend on.
        """
        for known, who, near in samples.recent:
            same = users is None if who is None else users is not None and np.array_equal(who,
                users)
            if same and np.array_equal(known, centres):
                return near
        if self.wide(samples):
            start = self._guess(samples, centres, users)
            points = self.loss.prox(samples.inner, None, samples.metric.take(users).prices[:, 0],
                                    centres, start, users).points
            near = points, points - centres
        else:
            near, _ = self._search(samples, users, centres, samples.metric.take(users), None,
                                   centres)
        samples.recent.insert(0, (np.array(centres), None if users is None else np.array(users),
                                  near))
        del samples.recent[_KEPT:]
        return near

    def _guess(self, samples: PersonalSamples, centres: Array, users: Indices | None) -> Array:
        """Where to begin the search for wide personal models: at the last ones."""
        for _, who, near in samples.recent:
            same = users is None if who is None else users is not None and np.array_equal(who,
                users)
            if same:
                return near[0]
        return centres

    def _search(self, samples: PersonalSamples, users: Indices | None, centres: Array,
                metric: Metric, linear: Array | None, start: Array) -> tuple[Near, Minimum]:
        """Each user's minimise_x f(x) + <linear, x - centres> + 1/2 (x - centres)' metric (x -
        centres).
        """
        who, frame = _who(samples, users), self._frame(samples)
        origin, begin = centres, metric.along(start - centres)
        if frame is not None:
            origin = frame.enter(centres, who)
            linear = None if linear is None else frame.slopes(linear, who)
        space = Space(metric, frame, who)
        if space.turns is not None:
            assert frame is not None
            begin = frame.enter(start, who) - origin
        # Along a free axis a loss may have no minimum. The search ends when the decrease is nothing
        # beside the loss.
        endless = bool(samples.metric.free.any())
        lift = self.loss.sizes(samples.inner)[who] if endless else np.zeros(len(who))
        objective = objective_of(self.loss, samples.inner, who, space, origin, linear, lift)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            begin = begin[:, space.kept]
            if not space.kept.any():
                minimum = Minimum(begin, objective(np.arange(len(who)), begin, 0)[0],
                                  np.zeros(len(who)), np.ones(len(who), dtype=bool))
            elif self.loss.quadratic and linear is None:
                minimum = self._closed(samples, objective, space, begin, users)
            else:
                if self.loss.steep(samples.inner):
                    zero = metric.along(-centres) if space.turns is None or frame is None \
                        else frame.enter(np.zeros_like(centres), who) - origin
                    begin = lower(objective, begin, zero[:, space.kept])
                minimum = minimise(objective, begin, _ENDLESS if endless else 200, samples.enough)
                minimum = minimum._replace(values=minimum.values - lift)
        return (origin + space.local(minimum.points), space.along(minimum.points)), minimum

    def _closed(self, samples: PersonalSamples, objective: Evaluate, space: Space, begin: Array,
                users: Indices | None) -> Minimum:
        """The minimum of quadratic losses: Newton steps with one Hessian."""
        if "system" not in samples.known:
            every = np.zeros((samples.n_users, samples.dim))
            samples.known["system"] = np.array(self.loss.evaluate_local(samples.inner, every,
                2).hessians)
        h = samples.known["system"] if users is None else samples.known["system"][users]
        rows = np.arange(len(begin))
        h = space.hessians(h, rows) + space.price
        diagonal = np.einsum("nii->ni", h)
        # Of each coordinate alone: prices of tiny columns are huge.
        units = np.sqrt(np.maximum(diagonal, 1e-300))
        c, shift = begin, np.full(len(begin), 1e-15)
        for _ in range(_CLOSED):
            c = c - solve_scaled(h, units, shift, objective(rows, c, 1)[1])
        done = np.ones(len(begin), dtype=bool)
        return Minimum(c, np.zeros(len(begin)), np.zeros(len(begin)), done)


def _parallel(first: Array, second: Array) -> Array:
    """1 / (1 / first + 1 / second) of numbers in [0, inf]."""
    least, most = np.minimum(first, second), np.maximum(first, second)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.isinf(most) | (least == 0), least, least / (1.0 + least / most))


def _personal(samples: Samples) -> PersonalSamples:
    if not isinstance(samples, PersonalSamples):
        raise InvalidInput("these samples were prepared by another loss",
                           remedy="Prepare them with the Personal loss")
    return samples


def _who(samples: Samples, users: Indices | None) -> Indices:
    return np.arange(samples.n_users) if users is None else users


