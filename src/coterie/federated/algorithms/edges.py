"""The steps of the paper's Algorithm 1 on ordered pairs (i, j) with head i: the same code at users
and at the server.

Pairs are sorted by head, so that the pairs of a user are contiguous. In the names of the code, for
a pair (i, j): `others` x_j, `difference` z_ij, `dual` mu_ij, `hat` muhat_ij, `radii` lam w_ij.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from coterie.base.labels import group_means
from coterie.base.types import Array, Flags, Ints
from coterie.federated.algorithms.forms import evaluated, mean_curvature, stiffness
from coterie.federated.plausible import capped
from coterie.federated.protocol.messages import Batch, Ragged, flags
from coterie.losses import Loss, Samples
from coterie.problem.graph import Graph

# Distances, relative to the largest model.
_CLOSE = (0.0, 1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)


class Pairs:
    """The pairs (i, j) of the users that are not excluded, sorted by head, with their constants.

    There are two ordered pairs per edge, or one unordered pair. `both` says whether the step of a
    user includes the pairs that end at it; then each of two ordered pairs has half of lam.
    """

    def __init__(self, graph: Graph, lam: float, aside: Flags, *, ordered: bool,
                 both: bool) -> None:
        n, (i, j) = graph.n_users, graph.edges.T
        active = ~aside[i] & ~aside[j]
        i, j, number = i[active], j[active], np.flatnonzero(active)
        heads, tails = (np.concatenate([i, j]), np.concatenate([j, i])) if ordered else (i, j)
        edge = np.tile(number, 2) if ordered else number
        order = np.lexsort((tails, heads))
        self.heads, self.tails, self.edge = heads[order], tails[order], edge[order]
        self.offsets = _offsets(np.bincount(self.heads, minlength=n))
        # Among the pairs of its head.
        self.position = np.arange(len(self.heads)) - self.offsets[self.heads]
        self.by_tail = np.argsort(self.tails, kind="stable")
        self.tail_offsets = _offsets(np.bincount(self.tails, minlength=n))
        self.radii = (lam / 2 if ordered and both else lam) * graph.weights[self.edge]
        self.n_tails = np.diff(self.tail_offsets).astype(float) if both else np.zeros(n)
        self.n_pairs = np.diff(self.offsets) + self.n_tails
        self.mean_pairs = max(float(self.n_pairs[~aside].mean()), 1.0) if not aside.all() else 1.0

    def __len__(self) -> int:
        return len(self.heads)


def _offsets(counts: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def segment_sums(values: Array, offsets: Ints) -> Array:
    """(n, dim) the sum of the rows offsets[k] : offsets[k + 1]; zero if there are none."""
    out = np.zeros((len(offsets) - 1, values.shape[1]))
    some = np.flatnonzero(np.diff(offsets))
    if some.size:
        out[some] = np.add.reduceat(values, offsets[some], axis=0)
    return out


def pulls(others: Array, difference: Array, hat: Array, offsets: Ints) -> tuple[Array, Array]:
    """The contribution of the pairs that start at a user to its step (S2): sum_j muhat_ij and sum_j
    (x_j + z_ij).
    """
    return segment_sums(hat, offsets), segment_sums(others + difference, offsets)


def step_centre(models: Array, linear: Array, centres: Array, pairs: Array, rho: float,
                eta: Array) -> tuple[Array, Array]:
    """S2 as one proximal step: minimise f(x) + t/2 ||x - centre||^2 over x.

        f(x) + <linear, x> + rho/2 sum_pairs ||x - c_p||^2 + eta/2 ||x - x_old||^2,
                                                      centres = sum_pairs c_p
    """
    t = rho * pairs + eta
    return (rho * centres + eta[:, None] * models - linear) / np.maximum(t, 1e-300)[:, None], t


def step_slope(models: Array, linear: Array, centres: Array, pairs: Array, rho: float) -> Array:
    """The slope of S2 without f and the Bregman term, at the old model, for the linearised step."""
    return np.asarray(linear + rho * (pairs[:, None] * models - centres))


def step_length(eta: Array, stiff: Array, rho: float, pairs: Array) -> Array:
    """The divisor of a linearised step: eta, or if that is 0 the largest curvature of S2."""
    return np.where(eta > 0, eta, stiff + rho * pairs)


def differences(heads: Array, others: Array, old: Array, hat: Array, radii: Array, rho: float,
                eta: float) -> Array:
    """S3: minimise radii ||z|| - <hat, z> + rho/2 ||x_i - x_j - z||^2 + eta/2 ||z - old||^2, a
    shrinkage.
    """
    v = hat + rho * (heads - others) + eta * old
    norms = np.linalg.norm(v, axis=1)
    scale = np.maximum(1.0 - np.divide(radii, norms, out=np.full_like(norms, np.inf),
                                       where=norms > 0), 0.0)
    return np.asarray(scale[:, None] * v / (rho + eta))


def hats(dual: Array, heads: Array, others: Array, difference: Array, rho: float,
         nu: float) -> Array:
    """S11: muhat = mu - nu rho (x_i - x_j - z_ij)."""
    return np.asarray(dual - nu * rho * (heads - others - difference))


def answer_edges(loss: Loss, samples: Samples, queries: Batch,
                 memory: Mapping[str, Ragged]) -> tuple[Batch, dict[str, Ragged]]:
    """The replies of users who store their edges, and what they store then: they apply the updates
    of the query, and step.

    `memory` has a part for every user of the data: its model (point), and for its pairs others,
    difference, hat, neighbours, radii and whether they are quiet.
    """
    rho, hat_rho, weight, eta_z, nu, linearised = queries.shared["settings"].tolist()
    users, kept = queries.users, _read(queries, memory, samples.n_users, samples.dim, hat_rho, nu)
    offsets, owner, points = kept["others"].offsets, kept["others"].owner, kept["point"].values
    others, difference, hat = (kept[name].values for name in ("others", "difference", "hat"))
    seen = np.where(kept["quiet"].values[:, None], points[owner], others)
    # S2: the models of the users.
    stepping = np.flatnonzero(queries.arrays["step"])
    moving, models = users[stepping], points.copy()
    values = curvatures = stiff = np.empty(0)
    if moving.size:
        linear, centres = pulls(seen, difference, hat, offsets)
        linear, centres = linear[moving], centres[moving]
        pairs = (np.diff(offsets) + kept["tails"].values)[moving]
        beyond = queries.ragged.get("beyond")
        if beyond is not None:
            half = np.flatnonzero(beyond.counts[stepping])
            linear[half] += beyond.values[0::2]
            centres[half] += beyond.values[1::2]
        eta = np.full(len(moving), weight)
        if linearised:
            values, slope, hessians = evaluated(loss, samples, points[moving], moving)
            slope = slope + step_slope(points[moving], linear, centres, pairs, rho)
            stiff = stiffness(loss, samples, hessians, moving)
            models[moving] = points[moving] - slope / step_length(eta, stiff, rho, pairs)[:, None]
        else:
            centre, t = step_centre(points[moving], linear, centres, pairs, rho, eta)
            models[moving] = loss.prox(samples, None, t, centre, users=moving).points
            values, _, hessians = evaluated(loss, samples, models[moving], moving)
        curvatures = mean_curvature(hessians)
    # S3: their differences, from the old models.
    at = _positions(queries, "update", offsets)
    if at.size:
        difference[at] = differences(points[owner[at]], seen[at],
                                     difference[at], hat[at], kept["radii"].values[at], rho, eta_z)
    stepped = flags(len(users), stepping).astype(np.int64)
    counts = queries.ragged["update"].counts if at.size else np.zeros(len(users), dtype=np.int64)
    reply = {"model": Ragged.of(models[moving], stepped),
             "value": Ragged.of(values, stepped), "curvature": Ragged.of(curvatures, stepped),
             "difference": Ragged.of(difference[at], counts)}
    if linearised:
        reply["stiffness"] = Ragged.of(stiff, stepped)
    reply = {name: part for name, part in reply.items() if len(part.values)}
    kept["point"] = kept["point"]._replace(values=models)
    return Batch(queries.kind, queries.round, users, {}, reply), kept


def _positions(queries: Batch, name: str, offsets: Ints) -> Ints:
    """Rows of the pairs that a part of the queries names by their number among the pairs of their
    head.
    """
    part = queries.ragged.get(name)
    return np.empty(0, dtype=np.int64) if part is None else offsets[queries.users[part.owner]] \
        + part.values


def _read(queries: Batch, memory: Mapping[str, Ragged], n_users: int, dim: int, rho: float,
          nu: float) -> dict[str, Ragged]:
    """The memory after the updates of the queries: changed models, pairs that become quiet or not,
    new duals.
    """
    kept = _initialised(queries, memory, n_users, dim)
    offsets, owner = kept["others"].offsets, kept["others"].owner
    others, difference, hat, quiet = (kept[name].values.copy() for name in ("others", "difference",
        "hat", "quiet"))
    # S7: the models that changed in the last round.
    neighbours, who = kept["neighbours"].values, queries.shared["who"]
    row = np.full(int(max(neighbours.max(initial=-1), who.max(initial=-1))) + 1, -1)
    row[who] = np.arange(len(who))
    reached = flags(n_users, queries.users)
    if neighbours.size:
        moved = np.flatnonzero((row[neighbours] >= 0) & reached[owner] & ~quiet)
        others[moved] = queries.shared["models"][row[neighbours[moved]]]
    woken = _positions(queries, "wake", offsets)
    if woken.size:
        quiet[woken], others[woken] = False, queries.ragged["wake_model"].values
    quiet[_positions(queries, "quiet", offsets)] = True
    # S10, S11: new duals and auxiliary duals.
    at = _positions(queries, "dual_at", offsets)
    if at.size:
        points = kept["point"].values[owner[at]]
        hat[at] = hats(queries.ragged["dual"].values, points, others[at], difference[at], rho, nu)
    return dict(kept, others=Ragged(others, offsets), difference=Ragged(difference, offsets),
                hat=Ragged(hat, offsets), quiet=Ragged(quiet, offsets))


#: The parts of a user's memory, with the number of axes of a row; "quiet" is separate.
_KEPT = {"point": 1, "others": 1, "difference": 1, "hat": 1, "neighbours": 0, "radii": 0,
         "tails": 0}


def _initialised(queries: Batch, memory: Mapping[str, Ragged], n_users: int,
                 dim: int) -> dict[str, Ragged]:
    """The memory, with that of re-initialised users replaced by the state in the query."""
    nothing = np.zeros(n_users, dtype=np.int64)
    kept = dict(memory) or {
        **{name: Ragged.of(np.zeros((0, dim)[:1 + axes]), nothing) for name, axes in _KEPT.items()},
        "neighbours": Ragged.of(np.zeros(0, dtype=np.int64), nothing),
        "quiet": Ragged.of(np.zeros(0, dtype=bool), nothing),
        "point": Ragged.of(np.zeros((n_users, dim)), nothing + 1),
                            "tails": Ragged.of(np.zeros(n_users), nothing + 1)}
    points = queries.ragged.get("point")
    if points is None:
        return kept
    reset = flags(n_users, queries.users[np.flatnonzero(points.counts)])
    for name in _KEPT:
        kept[name] = _replaced(kept[name], queries.users, queries.ragged.get(name), reset)
    others = queries.ragged.get("others")
    none = None if others is None else Ragged(np.zeros(len(others.values), dtype=bool),
                                              others.offsets)
    kept["quiet"] = _replaced(kept["quiet"], queries.users, none, reset)
    return kept


def _replaced(old: Ragged, users: Ints, received: Ragged | None, reset: Flags) -> Ragged:
    """The rows of `reset` users from the query, those of all other users unchanged."""
    counts = np.where(reset, 0, old.counts)
    if received is not None:
        counts[users] += received.counts
    new = Ragged.of(np.empty((int(counts.sum()), *old.values.shape[1:]), dtype=old.values.dtype),
                    counts)
    replaced = reset[new.owner]
    new.values[~replaced] = old.values[~reset[old.owner]]
    if received is not None:
        new.values[replaced] = received.values
    return new


# -- at the server: exact groups from iterates that are only nearly equal


def fuse_models(graph: Graph, lam: float, pairs: Pairs, models: Array, difference: Array,
                slopes: Array, curvature: Array) -> Array:
    """(n_users, dim) models in which nearly equal ones are made equal, with as few groups as the
    slopes allow.

    Users are merged if all their z are zero, or if their models are close. Of several distances for
    "close", the largest is used whose objective, estimated from the users' slopes and curvatures,
    is no worse.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    n = len(models)
    apart = np.linalg.norm(models[pairs.heads] - models[pairs.tails], axis=1)
    zero = np.full(graph.n_edges, True)
    np.logical_and.at(zero, pairs.edge, ~difference.any(axis=1))
    size = float(np.abs(models).max(initial=0.0))
    active = graph.subgraph(np.isin(np.arange(graph.n_edges), pairs.edge))
    best, least, seen = models, lam * active.penalty(models), n
    for close in _CLOSE:
        joined = zero[pairs.edge] | (apart <= close * size)
        links = csr_array((np.ones(joined.sum()), (pairs.heads[joined], pairs.tails[joined])),
                          shape=(n, n))
        count, labels = connected_components(links, directed=False)
        if count == seen:
            continue
        seen = count
        means = group_means(models, labels, count)[labels]
        step = means - models
        rise = float((slopes * step).sum() + 0.5 * (curvature * (step**2).sum(axis=1)).sum())
        total = lam * active.penalty(means) + rise
        if total <= least + 1e-12 * abs(least):
            best, least = means, total
    return best


def estimate_gap(graph: Graph, lam: float, models: Array, duals: Array, lack: Array,
                 values: Array) -> float:
    """An estimate of the relative gap of models and duals: the users' lacks, and the part of the
    penalty that the duals lack.
    """
    if not np.isfinite(lack).all():
        return np.inf
    penalty = lam * graph.penalty(models)
    slack = max(penalty - float((graph.divergence(duals) * models).sum()), 0.0)
    gap = float(lack.sum() + slack) / max(abs(float(capped(values).sum()) + penalty), 1e-300)
    return gap if np.isfinite(gap) else np.inf


def lacks(graph: Graph, models: Array, duals: Array, points: Array, slopes: Array,
          curvature: Array) -> Array:
    """(n,) ||grad f_i + (B'y)_i||^2 / (2 h_i), from slopes and curvatures h at other points; nan
    for users whose curvature is not known.
    """
    h = np.maximum(curvature, 1e-12 * curvature.max() + 1e-300)
    lack = slopes + h[:, None] * (models - points) + graph.divergence(duals)
    return np.asarray((lack**2).sum(axis=1) / (2 * h))
