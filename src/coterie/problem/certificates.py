"""The one judge of every result: optimality from (problem, models, duals) alone.

Solvers do not grade themselves: their results are certified here, and this is the gap that is
printed, plotted and tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from coterie.base.errors import InvalidInput
from coterie.base.labels import group_means, group_sums, labels_of
from coterie.base.types import Array, Flags, Indices, Ints
from coterie.losses import Loss, Samples
from coterie.losses.linear import flat
from coterie.losses.newton import solve_scaled
from coterie.problem.graph import Graph
from coterie.problem.problem import Problem
from coterie.problem.solution import Certificate

_EPSILON = 4 * float(np.finfo(float).eps)
_COMPILED = 20_000  # numbers in all models up to which compiled loops answer for the users
_REPAIRS = 5  # attempts at moving duals into the conjugates' domain
FLOOR = 1e-9  # times the users' sizes: the unit of a gap when the objective itself vanishes


def certify(problem: Problem, models: npt.ArrayLike, duals: npt.ArrayLike | None = None, *,
            potentials: npt.ArrayLike | None = None) -> Certificate:
    """Bound how far models are from optimal.

    The bound is valid for any duals: those outside their balls ||y_e|| <= lam w_e are scaled in,
    and those at which a conjugate is infinite are moved into its domain where that is possible.

    Parameters
    ----------
    problem : what the models should solve.
    models : (n_users, dim).
    duals : (n_edges, dim); where they are not given, good ones are built for these models.
    potentials : (n_users, dim), instead of duals, for all pairs with one weight. They stand for the
        duals of `potential_slopes`, of which none is stored.

    Returns
    -------
    Certificate, with the duals of its bound; without any where potentials were given.

    Raises
    ------
    InvalidInput : where an array has another shape, or not all of its numbers are finite.

    Example
    -------
    >>> import coterie as ct
    >>> problem = ct.Problem(ct.Users.from_arrays([[0.0], [1.0]]), ct.SquaredDistance(), lam=0.1)
    >>> ct.certify(problem, ct.solve(problem).models).relative_gap <= 1e-6
    True
    """
    x = problem.check_models(models)
    if potentials is not None:
        return replace(_judged(problem, x,
                               potential_slopes(problem, x, np.asarray(potentials, dtype=float))))
    if duals is None:
        y = build_duals(problem, x)
    else:
        y = np.ascontiguousarray(duals, dtype=float)
        if y.shape != (problem.graph.n_edges, problem.dim):
            raise InvalidInput(f"expected duals of shape ({problem.graph.n_edges}, {problem.dim}), "
                               f"got {y.shape}",
                               remedy="Give one row for each edge, or none to have them built")
    certificate = judge(problem, x, y)
    for _ in range(_REPAIRS if problem.lam > 0 and problem.graph.n_edges else 0):
        if not certificate.infinite_users:
            break
        assert certificate.duals is not None
        moved = _into_domain(problem, x, certificate.duals, list(certificate.infinite_users))
        if not np.isfinite(moved).all():  # of users who determine nothing, up to rounding
            break
        certificate = judge(problem, x, moved)
    return certificate


def judge(problem: Problem, models: Array, duals: Array, enough: float = 0.0) -> Certificate:
    """The certificate of these models and duals; duals outside their balls are scaled in, nothing
    else is mended.

    The bound is always valid. It may be lower than it could be by `enough` times the losses, which
    saves time.
    """
    y = _feasible(duals, problem.radii)
    return _judged(problem, models, -problem.graph.divergence(y), enough).with_duals(y)


def _judged(problem: Problem, x: Array, slopes: Array, enough: float = 0.0) -> Certificate:
    """The certificate from slopes = -B'y of feasible duals y.

    The problem remembers the last one, for a solver has its point judged before `solve` judges it.
    It is looked up by every number it depends on, so the certificate of one point cannot be used
    for another.
    """
    for models, others, known in problem.judged:
        if np.array_equal(models, x) and np.array_equal(others, slopes):
            return known
    about = reference(problem.graph, x)
    certificate = assemble(problem, x, slopes, about, _answers(problem, x, slopes, about, enough))
    problem.judged[:] = [(x.copy(), slopes.copy(), certificate)]
    return certificate


def potential_slopes(problem: Problem, models: Array, potentials: Array) -> Array:
    """-B'y of duals that potentials stand for, on all pairs with one weight; no dual is stored.

    With r = lam w, users with different models pull with all that is allowed, and between users
    with equal models flows what the potentials ask for; these duals are feasible for all numbers:
        y_ij = r (models_i - models_j) / ||models_i - models_j||        where models_i != models_j
        y_ij = projection of potentials_i - potentials_j onto the ball of radius r
                                                                        where they are equal
    """
    from coterie.problem import edges as kernels

    if not problem.graph.is_complete:
        raise InvalidInput("potentials are for all pairs with one weight",
                           remedy="Give duals, or none")
    if potentials.shape != models.shape or not np.isfinite(potentials).all():
        raise InvalidInput(f"expected finite potentials of shape {models.shape}, got "
                           f"{potentials.shape}", remedy="Give one row for each user")
    labels = labels_of(models)
    across = pull_between(problem, labels, models)
    flow = np.empty_like(models)
    radius = float(problem.radii[:1].sum())
    kernels.member_flow(np.ascontiguousarray(potentials), *by_cluster(labels), radius, flow)
    return -(across + flow)


def pull_between(problem: Problem, labels: Ints, models: Array) -> Array:
    """(n_users, dim) the part of B'y from pairs of users in different clusters; see
    `potential_slopes`.
    """
    from coterie.problem import edges as kernels

    counts = np.bincount(labels).astype(float)
    w = models[np.unique(labels, return_index=True)[1]]
    pull = np.empty_like(w)
    kernels.cluster_pull(w, counts, 0.0, w, pull, np.empty(len(w)))
    return float(problem.radii[:1].sum()) * (pull / counts[:, None])[labels]


def by_cluster(labels: Ints) -> tuple[Ints, Ints]:
    """Users in the order of their clusters, and where in it each cluster starts (and the last one
    ends).
    """
    starts = np.concatenate([[0], np.cumsum(np.bincount(labels))]).astype(np.int64)
    return np.argsort(labels, kind="stable"), starts


def _feasible(duals: Array, radii: Array) -> Array:
    """The duals themselves where their norms are within the radii, to rounding; else scaled into
    them.
    """
    from coterie.problem import edges as kernels

    if kernels.in_balls(duals, radii, 1.0 + _EPSILON):
        return duals
    if not np.isfinite(duals).all():
        edge = int(np.flatnonzero(~np.isfinite(duals).all(axis=1))[0])
        raise InvalidInput(f"expected finite duals, got {duals[edge]}", where=f"edge {edge}",
                           remedy="Leave them out")
    return project(duals, radii)


class Answers(NamedTuple):
    """What a certificate needs of each user, from its own data; (n_users,) each."""

    values: Array  # f_i(x_i)
    conjugates: Array  # max_x <slopes_i, x - about_i> - f_i(x), from above
    residuals: Array  # ||grad f_i(x_i) - slopes_i||
    sizes: Array  # what counts as large for this user's loss, wherever the origin lies
    rounding: Array  # what rounding may have done to values and conjugates


def answers_of(loss: Loss, samples: Samples, models: Array, slopes: Array, about: Array,
               users: Indices | None = None, enough: float = 0.0) -> Answers:
    """The answers of all users, or of some; each depends on the user's own data alone.

    Conjugates of all users may be too large by `enough` times the losses, in all.
    """
    # The loss of very large models can be infinite.
    with np.errstate(over="ignore", invalid="ignore"):
        values, gradients, _ = loss.evaluate(samples, models, 1, users)
        residuals = np.linalg.norm(gradients - slopes, axis=1)
        exact = enough == 0 or users is not None
        duals = loss.dual_bounds(samples, slopes, models, users, about) if exact \
            else loss.rough_bounds(samples, slopes, models, about, enough)
        sizes = loss.sizes(samples) if users is None else loss.sizes(samples)[users]
        # The loss at the mean model, too, does not depend on the origin; where models are far apart
        # it can be infinite.
        middle, zero = (np.abs(loss.evaluate(samples, at, 0, users).values)
                        for at in (about, np.zeros_like(about)))
        sizes = sizes + np.fmin(middle, zero)
        rounding = loss.value_rounding(samples, models, users) + duals.rounding
    return Answers(values, duals.values, residuals, sizes, rounding)


def _answers(problem: Problem, models: Array, slopes: Array, about: Array,
             enough: float) -> Answers:
    """The answers of all users: compiled where few numbers make the calls of NumPy count, else all
    users at once.
    """
    loss, samples = problem.loss, problem.samples
    data = flat(loss, samples) if models.size <= _COMPILED else None
    if data is None:
        return answers_of(loss, samples, models, slopes, about, enough=enough)
    from coterie.losses import kernels

    numbers = kernels.answers(data, models, np.ascontiguousarray(slopes),
                              np.ascontiguousarray(about), loss.sizes(samples))
    rows = np.flatnonzero(~np.isfinite(numbers[1]))
    if rows.size:  # another method may find a bound
        with np.errstate(over="ignore", invalid="ignore"):
            duals = loss.dual_bounds(samples, slopes[rows], models[rows], rows, about[rows])
        numbers[1, rows] = duals.values
        numbers[4, rows] += duals.rounding
    return Answers(*numbers)


def reference(graph: Graph, models: Array) -> Array:
    """(n_users, dim) for every user the mean model of all users that the graph connects with it.

    The slopes -(B'y)_i of connected users sum to zero, so sum_i <slopes_i, about> = 0 for a common
    point `about`: conjugates may be computed about it, and offsets that all models share cost no
    digits.
    """
    if graph.is_complete and graph.n_edges and graph.weights[0] > 0:
        return np.broadcast_to(models[0] + (models - models[0]).mean(axis=0), models.shape)
    starts = np.unique(graph.components, return_index=True)[1]
    offsets = models - models[starts][graph.components]
    return (models[starts] + group_means(offsets, graph.components))[graph.components]


def assemble(problem: Problem, x: Array, slopes: Array, about: Array,
             answers: Answers) -> Certificate:
    """The certificate from the users' answers, wherever their data are."""
    penalty = problem.lam * problem.graph.penalty(x)
    infinite = np.flatnonzero(~np.isfinite(answers.conjugates))
    finite = answers.conjugates[np.isfinite(answers.conjugates)]
    # Duals on the boundary of their balls, and their sums, are rounded too.
    carried = float((np.linalg.norm(slopes, axis=1) * np.linalg.norm(x - about, axis=1)).sum())
    objective, floor = float(answers.values.sum()) + penalty, FLOOR * float(answers.sizes.sum())
    bound = -np.inf if infinite.size else float(-answers.conjugates.sum())
    least = problem.n_users * problem.loss.least
    if bound < least and objective - least <= 1e-8 * floor:  # data fitted perfectly need no duals
        bound, infinite = least, infinite[:0]
    return Certificate(
        objective=objective,
        bound=bound,
        stationarity=float(np.linalg.norm(answers.residuals)),
        # <y, Bx> = <B'y, x>.
        complementarity=max(penalty + float(np.einsum("nd,nd->", slopes, x - about)), 0.0),
        worst_user=int(answers.residuals.argmax()),
        infinite_users=tuple(infinite.tolist()),
        rounding=float(answers.rounding.sum())
        + _EPSILON * (float(np.abs(answers.values).sum() + np.abs(finite).sum())
                      + penalty + carried),
        floor=floor,
    )


def project(duals: Array, radii: Array) -> Array:
    """The nearest duals with ||duals_e|| <= radii_e."""
    norms = np.linalg.norm(duals, axis=1)
    scale = np.divide(radii, norms, out=np.ones_like(norms), where=norms > radii)
    return duals * scale[:, None]


def _into_domain(problem: Problem, models: Array, duals: Array, users: list[int]) -> Array:
    """Move feasible duals so that the slopes -(B'y)_i of these users lie where their conjugates are
    finite.

    A gradient is always in the conjugate's domain, and the one nearly at the slope u is grad f(x)
    for the x of
        minimise f(x) - <u, x> + (t/2) ||x - models_i||^2,    t small:    grad f(x) = u - t (x -
                                                              models_i).
    What the slopes lack is sent to those users through the graph as an electrical flow, in equal
    parts from the others. All duals then shrink by what keeps the flow inside the balls: zero is in
    the closure of every domain, so a smaller slope stays in it.
    """
    outside = np.zeros(problem.n_users, dtype=bool)
    outside[users] = True
    slopes = -problem.graph.divergence(duals)
    lack = np.zeros_like(slopes)
    lack[outside] = find_lack(problem.loss, problem.samples, models[outside], slopes[outside],
                              np.flatnonzero(outside))
    return supply(problem.graph, problem.radii, duals, lack, outside)


def find_lack(loss: Loss, samples: Samples, models: Array, slopes: Array, users: Indices) -> Array:
    """What some users' slopes must lose to be gradients; a matter of each user's own data."""
    if loss.wide(samples):
        traces = loss.expand(samples, models, users)[2].trace()
    else:
        traces = np.trace(loss.evaluate(samples, models, 2, users).hessians, axis1=1, axis2=2)
    t = np.maximum(1e-6 * traces / models.shape[1], 1e-9)
    near = loss.prox(samples, -slopes, t, models, users=users).points
    return slopes - loss.evaluate(samples, near, 1, users).gradients


def supply(graph: Graph, radii: Array, duals: Array, lack: Array, outside: Flags) -> Array:
    """Duals that give the users outside what their slopes lack; see `_into_domain`."""
    parts = graph.components
    total, givers = group_sums(lack, parts), np.bincount(parts[~outside], minlength=parts.max() + 1)
    lack[~outside] -= (total / np.maximum(givers, 1)[:, None])[parts[~outside]]
    flow = graph.flow(lack)
    excess = float((np.linalg.norm(flow, axis=1) / np.maximum(radii, 1e-300)).max())
    return project((1.0 - min(excess, 1.0)) * (duals + flow), radii)


def build_duals(problem: Problem, models: Array) -> Array:
    """Good duals for given models, if the solver gave none.

    Between separated users the dual is known, y_e = lam w_e (B models)_e / ||(B models)_e||. Among
    fused users any flow that balances the remaining forces within the balls will do. Which users
    count as fused is not known when the models are only nearly equal, so several lengths are tried
    and the gap decides, by second-order models of the losses:

        1/2 sum_i r_i' H_i^-1 r_i + sum_e radii_e ||(B models)_e|| - <y_e, (B models)_e>,
                                                                        r = grad f + B'y
    """
    if problem.graph.n_edges == 0 or problem.lam == 0:
        return np.zeros((problem.graph.n_edges, problem.dim))
    gradients, solve = _second_order(problem, models)
    differences = problem.graph.differences(models)
    lengths = np.linalg.norm(differences, axis=1)
    best, least = np.zeros_like(differences), np.inf
    for fused in fusions(models, lengths):
        units = np.divide(differences, lengths[:, None], out=np.zeros_like(differences),
                          where=~fused[:, None])
        duals = problem.radii[:, None] * units
        if fused.any():
            forces = -gradients - problem.graph.divergence(duals)
            duals[fused] = feasible_flow(problem.graph.subgraph(fused), forces,
                                         problem.radii[fused])
        lack = gradients + problem.graph.divergence(duals)
        balance = 0.5 * float(np.einsum("nd,nd->", lack, solve(lack)))
        slack = float(problem.radii @ lengths - np.einsum("ed,ed->", duals, differences))
        if balance + max(slack, 0.0) < least:
            best, least = duals, balance + max(slack, 0.0)
    return best


def _second_order(problem: Problem, models: Array) -> tuple[Array, Callable[[Array], Array]]:
    """The gradients, and the map vectors -> H^-1 vectors with a little more curvature, where a loss
    is flat.
    """
    if problem.loss.wide(problem.samples):
        _, gradients, curvature = problem.loss.expand(problem.samples, models)
        return gradients, curvature.inverse(1e-6 * curvature.trace() / problem.dim)
    _, gradients, hessians = problem.loss.evaluate(problem.samples, models)
    diagonal = np.einsum("nii->ni", hessians)
    scales = np.sqrt(np.maximum(diagonal, 1e-12 * float(np.abs(diagonal).max(initial=0.0))
                                + 1e-300))
    return gradients, partial(solve_scaled, hessians, scales, np.full(problem.n_users, 1e-6))


def fusions(models: Array, lengths: Array) -> Iterator[Flags]:
    """Guesses at which edges join equal models, when rounding or a tolerance blurs it; from none
    blurred to all.
    """
    unit, rounding = float(lengths.max()), 4 * _EPSILON * float(np.abs(models).max())
    seen = -1
    for relative in (0.0, 1e-13, 1e-11, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2,
                     np.inf):
        fused = lengths <= max(relative * unit, rounding * (relative > 0)) if unit > 0 else np.ones(
            len(lengths), dtype=bool)
        if int(fused.sum()) > seen:
            seen = int(fused.sum())
            yield fused


def feasible_flow(graph: Graph, forces: Array, radii: Array, max_iter: int = 500) -> Array:
    """Edge vectors y with B'y = forces and ||y_e|| <= radii_e, or as near as `max_iter` steps come.

    The electrical flow is one if it keeps to the radii; from its projection accelerated projected
    gradients minimise 1/2 ||B'y - forces||^2 over the balls, with restarts (FISTA, Beck and
    Teboulle 2009; O'Donoghue and Candes 2015).
    """
    flow = graph.flow(forces)
    y = project(flow, radii)
    degrees = np.bincount(graph.edges.ravel(), minlength=graph.n_users)
    step = 1.0 / (2.0 * max(int(degrees.max()), 1))  # ||B B'|| <= 2 max degree
    ahead, momentum = y, 1.0
    scale = float(np.linalg.norm(forces)) + 1e-300
    # A component's forces must sum to zero to be carried at all; what does not is not waited for.
    reachable = graph.divergence(flow)
    for _ in range(max_iter):
        residual = graph.divergence(ahead) - reachable
        if np.linalg.norm(residual) <= 1e-13 * scale:
            return ahead if ahead is y else project(ahead, radii)
        new = project(ahead - step * graph.differences(residual), radii)
        if np.einsum("ed,ed->", ahead - new, new - y) > 0:
            momentum = 1.0
        following = 0.5 * (1.0 + np.sqrt(1.0 + 4.0 * momentum**2))
        ahead = new + (momentum - 1.0) / following * (new - y)
        y, momentum = new, following
    return y
