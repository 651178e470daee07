"""The one judge of every answer: optimality from (problem, models, duals) alone.

Solvers do not grade themselves; whatever they return is certified here, and this is the gap that is printed, plotted
and tested.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from coterie._typing import Array, Flags, Indices
from coterie.errors import InvalidInput
from coterie.graph import Graph
from coterie.losses import Loss, Samples
from coterie.problem import Problem
from coterie.solution import Certificate

_EPSILON = 4 * float(np.finfo(float).eps)
_REPAIRS = 5  # attempts at moving duals into the conjugates' domain
_FLOOR = 1e-9  # times the losses of all-zero models: the unit of a gap when the objective itself vanishes


def certify(problem: Problem, models: npt.ArrayLike, duals: npt.ArrayLike | None = None) -> Certificate:
    """Judge models; with no duals given, good ones are built.

    Duals outside their balls ||y_e|| <= lam w_e are scaled in, and duals at which a conjugate is infinite are moved
    into its domain where that is possible, so the bound holds whatever came.
    """
    x = problem.check_models(models)
    if duals is None:
        y = build_duals(problem, x)
    else:
        y = np.asarray(duals, dtype=float)
        if y.shape != (problem.graph.n_edges, problem.dim) or not np.isfinite(y).all():
            raise InvalidInput(f"expected finite duals of shape ({problem.graph.n_edges}, {problem.dim}), "
                               f"got {y.shape}", remedy="Give one row for each edge, or none to have them built")
    y = project(y, problem.radii)
    values, gradients, _ = problem.loss.evaluate(problem.samples, x, 1)
    slopes = -problem.graph.divergence(y)
    conjugates = problem.conjugates(slopes, start=x)
    for _ in range(_REPAIRS if problem.lam > 0 and problem.graph.n_edges else 0):
        if np.isfinite(conjugates).all():
            break
        y = _into_domain(problem, x, y, slopes, ~np.isfinite(conjugates))
        slopes = -problem.graph.divergence(y)
        conjugates = problem.conjugates(slopes, start=x)
    return _certificate(problem, x, values, gradients, slopes, conjugates).with_duals(y)


def judge(problem: Problem, models: Array, slopes: Array) -> Certificate:
    """The certificate from slopes = -B'y of duals y known to be feasible; nothing is mended and no edge is stored."""
    values, gradients, _ = problem.loss.evaluate(problem.samples, models, 1)
    return _certificate(problem, models, values, gradients, slopes, problem.conjugates(slopes, start=models))


def _certificate(problem: Problem, x: Array, values: Array, gradients: Array, slopes: Array,
                 conjugates: Array) -> Certificate:
    residuals = np.linalg.norm(gradients - slopes, axis=1)
    return assembled(problem.lam * problem.graph.penalty(x), x, slopes, values, conjugates, residuals,
                     problem.loss_at_zero)


def assembled(penalty: float, x: Array, slopes: Array, values: Array, conjugates: Array, residuals: Array,
              loss_at_zero: float) -> Certificate:
    """The certificate from each user's f_i(x_i), f_i*(slopes_i) and ||grad f_i(x_i) - slopes_i||, whoever has them."""
    infinite = np.flatnonzero(~np.isfinite(conjugates))
    return Certificate(
        objective=float(values.sum()) + penalty,
        bound=-np.inf if infinite.size else float(-conjugates.sum()),
        stationarity=float(np.linalg.norm(residuals)),
        complementarity=max(penalty + float(np.einsum("nd,nd->", slopes, x)), 0.0),  # <y, Bx> = <B'y, x>
        worst_user=int(residuals.argmax()),
        infinite_users=tuple(infinite.tolist()),
        rounding=_EPSILON * float(np.abs(values).sum() + np.abs(conjugates[np.isfinite(conjugates)]).sum()
                                  + penalty),
        floor=_FLOOR * loss_at_zero,
    )


def project(duals: Array, radii: Array) -> Array:
    """The nearest duals with ||duals_e|| <= radii_e."""
    norms = np.linalg.norm(duals, axis=1)
    scale = np.divide(radii, norms, out=np.ones_like(norms), where=norms > radii)
    return duals * scale[:, None]


def _into_domain(problem: Problem, models: Array, duals: Array, slopes: Array, outside: Flags) -> Array:
    """Move feasible duals so that the slopes -(B'y)_i of users `outside` lie where their conjugates are finite.

    A gradient is always in the conjugate's domain, and the one nearly at the slope u is grad f(x) for the x of
        minimise f(x) - <u, x> + (t/2) ||x - models_i||^2,    t small:    grad f(x) = u - t (x - models_i).
    What the slopes lack is sent to those users through the graph as an electrical flow, from the other users alike.
    All duals then shrink by what keeps the flow inside the balls: zero is in the closure of every domain, so a smaller
    slope stays in it.
    """
    lack = np.zeros_like(slopes)
    lack[outside] = lacking(problem.loss, problem.samples, models[outside], slopes[outside], np.flatnonzero(outside))
    return supplied(problem.graph, problem.radii, duals, lack, outside)


def lacking(loss: Loss, samples: Samples, models: Array, slopes: Array, users: Indices) -> Array:
    """What some users' slopes must lose to be gradients; a matter of each user's own data."""
    hessians = loss.evaluate(samples, models, 2, users).hessians
    t = np.maximum(1e-6 * np.trace(hessians, axis1=1, axis2=2) / models.shape[1], 1e-9)
    near = loss.prox(samples, -slopes, t, models, users=users).points
    return slopes - loss.evaluate(samples, near, 1, users).gradients


def supplied(graph: Graph, radii: Array, duals: Array, lack: Array, outside: Flags) -> Array:
    """Duals that give the users outside what their slopes lack; see `_into_domain`."""
    parts = graph.components
    total, givers = np.zeros((parts.max() + 1, lack.shape[1])), np.bincount(parts[~outside], minlength=parts.max() + 1)
    np.add.at(total, parts, lack)
    lack[~outside] -= (total / np.maximum(givers, 1)[:, None])[parts[~outside]]
    flow = graph.flow(lack)
    excess = float((np.linalg.norm(flow, axis=1) / np.maximum(radii, 1e-300)).max())
    return project((1.0 - min(excess, 1.0)) * (duals + flow), radii)


def build_duals(problem: Problem, models: Array) -> Array:
    """Good duals for given models: the proof a solver without duals of its own did not give.

    Between separated users the dual is known, y_e = lam w_e (B models)_e / ||(B models)_e||. Among fused users any flow
    that balances the remaining forces within the balls will do. Which users count as fused is not known when the models
    are only nearly equal, so several lengths are tried and the balance decides.
    """
    if problem.graph.n_edges == 0 or problem.lam == 0:
        return np.zeros((problem.graph.n_edges, problem.dim))
    gradients = problem.gradients(models)
    differences = problem.graph.differences(models)
    lengths = np.linalg.norm(differences, axis=1)
    best, least = np.zeros_like(differences), np.inf
    for fused in fusions(models, lengths):
        units = np.divide(differences, lengths[:, None], out=np.zeros_like(differences), where=~fused[:, None])
        duals = problem.radii[:, None] * units
        if fused.any():
            forces = -gradients - problem.graph.divergence(duals)
            duals[fused] = feasible_flow(problem.graph.subgraph(fused), forces, problem.radii[fused])
        # What the duality gap is made of, up to the curvature of the losses.
        balance = float(np.linalg.norm(gradients + problem.graph.divergence(duals)))
        slack = float(problem.radii @ lengths - np.einsum("ed,ed->", duals, differences))
        if balance + max(slack, 0.0) < least:
            best, least = duals, balance + max(slack, 0.0)
    return best


def fusions(models: Array, lengths: Array) -> Iterator[Flags]:
    """Guesses at which edges join equal models, when rounding or a tolerance blurs it; from none blurred to all."""
    unit = max(float(np.abs(models).max()), float(lengths.max()))
    seen = -1
    for relative in (0.0, 1e-13, 1e-11, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, np.inf):
        fused = lengths <= relative * unit if unit > 0 else np.ones(len(lengths), dtype=bool)
        if int(fused.sum()) > seen:
            seen = int(fused.sum())
            yield fused


def feasible_flow(graph: Graph, forces: Array, radii: Array, max_iter: int = 500, tol: float = 1e-13) -> Array:
    """Edge vectors y with B'y = forces and ||y_e|| <= radii_e, or as near as `max_iter` steps come.

    The electrical flow is one if it keeps to the radii; from its projection accelerated projected gradients minimise
    1/2 ||B'y - forces||^2 over the balls, with restarts (FISTA, Beck and Teboulle 2009; O'Donoghue and Candes 2015).
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
        if np.linalg.norm(residual) <= tol * scale:
            return ahead if ahead is y else project(ahead, radii)
        new = project(ahead - step * graph.differences(residual), radii)
        if np.einsum("ed,ed->", ahead - new, new - y) > 0:
            momentum = 1.0
        following = 0.5 * (1.0 + np.sqrt(1.0 + 4.0 * momentum**2))
        ahead = new + (momentum - 1.0) / following * (new - y)
        y, momentum = new, following
    return y
