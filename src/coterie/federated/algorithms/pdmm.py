"""The paper's Algorithm 1, a parallel direction method of multipliers: as printed, and mended.

For every ordered pair (i, j) there are a difference z_ij, a dual mu_ij and an auxiliary dual muhat_ij. A round, with
r_ij = x_i - x_j - z_ij:

    x_i     <- argmin f_i(x) + sum_j <muhat_ij, x> + rho/2 sum_j ||x - x_j - z_ij||^2 + eta B(x, x_i)           (S2)
    z_ij    <- argmin lam w_ij ||z|| - <muhat_ij, z> + rho/2 ||x_i - x_j - z||^2 + eta_z/2 ||z - z_ij||^2         (S3)
    mu_ij   <- mu_ij + tau rho r_ij,      muhat_ij <- mu_ij - nu rho r_ij                                   (S8, S11)

As printed, S2 has the pairs (i, .) only. The augmented Lagrangian also has the pairs (., i); without them muhat_ij and
muhat_ji drift apart once not everybody takes part. variant="symmetric" has both; it then solves (C) for 2 lam, so it is
run with lam / 2. The z and mu steps need no data: with edge_state="server" the server does them, and a user gets one
vector a round, the centre of its proximal step, and never sees another user's model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie._typing import Array, Flags, Ints
from coterie.certificates import project
from coterie.errors import InvalidInput
from coterie.federated.algorithms import edges
from coterie.federated.algorithms.base import Algorithm, Federation, Method, State
from coterie.federated.algorithms.edges import Pairs
from coterie.federated.algorithms.fusing import fused, missed
from coterie.federated.algorithms.pdmm_state import PDMMState
from coterie.federated.algorithms.proof import duals_for
from coterie.federated.protocol.messages import Batch, Ragged

_STIFF = 5.0  # rho times the pairs of a user, beside its curvature
_NEAR = 100.0  # times the tolerance within which better duals are looked for
_CHANGES, _OFF = 12, 1.5  # times rho may change, and by what factor it must be off for that


@dataclass(frozen=True, kw_only=True)
class PDMM(Algorithm):
    """The paper's algorithm, as printed (`PDMM.printed()`) or mended.

    Parameters
    ----------
    variant : "symmetric" (mended) or "paper" (as printed).
    pairs : "ordered", or "unordered" as in the paper's footnote: one z and mu for i < j, in both users' steps.
    edge_state : "server", or "users" as printed: who holds and updates z.
    rho : weight of the augmented term; None takes the users' mean curvature, of which each answer brings one number, by
        the pairs of a user, and changes it finitely often.
    eta, eta_z : weights of the Bregman terms of x and z. A linearised step has length 1 / eta; without eta, or with 0,
        it is 1 / (the loss's largest curvature + rho times the pairs of the user).
    tau, nu : damping of the duals; nu = 1 - 1/3, since a pair's constraint ties three variables that move at once.
    bregman : "euclidean", a proximal step of the user; or "linear", the choice that makes it one gradient step.
    select : what is drawn in a round: "users", who update all that is theirs, as in the paper's experiment; or
        "variables", a random set of n_primal of all x and z, and n_dual of all duals, as in S1 and S8.
    n_primal, n_dual : sizes S_P and S_D of these sets; None takes the share of participation.
    quiet : after so many updates with z_ij = 0 a pair whose models are close is left alone, neither updated nor sent,
        until the two models are further apart than users move in a round; 0: never. The paper's closing remark.

    Raises
    ------
    InvalidInput : a setting that cannot be used.

    Example
    -------
    >>> PDMM(rho=0.1).variant, PDMM.printed().variant
    ('symmetric', 'paper')
    """

    variant: str = "symmetric"
    pairs: str = "ordered"
    edge_state: str = "server"
    rho: float | None = None
    eta: float = 0.0
    eta_z: float = 0.0
    tau: float = 0.5
    nu: float = 2 / 3
    bregman: str = "euclidean"
    select: str = "users"
    n_primal: int | None = None
    n_dual: int | None = None
    quiet: int = 0

    @classmethod
    def printed(cls, **changes: Any) -> PDMM:
        """The algorithm and the parameters of the paper's experiment."""
        return cls(**{"variant": "paper", "edge_state": "users", "rho": 10.0, "eta": 10.0, "eta_z": 10.0, "tau": 0.8,
                      "nu": 0.2, **changes})

    def __post_init__(self) -> None:
        for name, allowed in (("variant", ("symmetric", "paper")), ("pairs", ("ordered", "unordered")),
                              ("edge_state", ("server", "users")), ("bregman", ("euclidean", "linear")),
                              ("select", ("users", "variables"))):
            if getattr(self, name) not in allowed:
                raise InvalidInput(f"{name} must be {' or '.join(map(repr, allowed))}, got {getattr(self, name)!r}",
                                   remedy=f"Use {allowed[0]!r}")
        for name in ("rho", "tau"):
            value = getattr(self, name)
            if value is not None and not (np.isfinite(value) and value > 0):
                raise InvalidInput(f"{name} must be a finite number > 0, got {value!r}", remedy="Leave it out")
        for name in ("eta", "eta_z", "nu"):
            if not (np.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise InvalidInput(f"{name} must be a finite number >= 0, got {getattr(self, name)!r}",
                                   remedy="Leave it out")
        for name, least in (("n_primal", 1), ("n_dual", 1), ("quiet", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InvalidInput(f"{name} must be at least {least}, got {value!r}", remedy="Leave it out")

    def on(self, federation: Federation, tol: float = 1e-6) -> PDMMMethod:
        return PDMMMethod(federation, self, tol)


class PDMMMethod(Method):
    max_rounds = 100_000

    def __init__(self, federation: Federation, settings: PDMM, tol: float) -> None:
        super().__init__(federation)
        self.settings, self.tol = settings, tol
        self.kind = ("pdmm" if settings.edge_state == "users" else  # type: ignore[misc]
                     "gradient" if settings.bregman == "linear" else "prox")
        self.both = settings.variant == "symmetric" or settings.pairs == "unordered"
        self._known: tuple[bytes, Pairs] | None = None

    def pairs(self, state: State) -> Pairs:
        key = state.aside.tobytes()
        if self._known is None or self._known[0] != key:
            self._known = key, self._pairs(state.aside)
        return self._known[1]

    def _pairs(self, aside: Flags) -> Pairs:
        return Pairs(self.federation.graph, self.federation.lam, aside, ordered=self.settings.pairs == "ordered",
                     both=self.both)

    def begin(self, models: Array) -> PDMMState:
        n, d = self.federation.n_users, self.federation.dim
        pairs = self._pairs(np.zeros(n, dtype=bool))
        p = len(pairs)
        return PDMMState(
            **self.fresh, now=models, values=np.zeros(n), slopes=np.zeros((n, d)), curvature=np.full(n, np.nan),
            sent=models, sent_t=np.zeros(n), difference=np.zeros((p, d)), dual=np.zeros((p, d)), hat=np.zeros((p, d)),
            zeros=np.zeros(p, dtype=np.int64), quiet=np.zeros(p, dtype=bool), moved=np.zeros(n, dtype=bool),
            renewed=np.zeros(p, dtype=bool), synced=np.zeros(n, dtype=bool), quiet_at_users=np.zeros(p, dtype=bool),
            due_x=np.zeros(n, dtype=bool), due_z=np.zeros(p, dtype=bool),
            rho=self.settings.rho or 1.0 / pairs.mean_pairs, hat_rho=0.0, changes=0, next_review=0.0, length=0.0,
            next_estimate=0, error=np.inf)

    def estimate(self, state: PDMMState) -> float:
        return state.error

    # -- who and what is drawn

    def chosen(self, state: PDMMState) -> Ints:
        if self.settings.edge_state == "users":  # everybody hears the news; only those drawn have something to do
            available = self.federation.participation.available(state.round, self.federation.n_users)
            return np.flatnonzero(~state.aside & (state.asked < 0) & available)
        return np.flatnonzero(self._drawn(state)[0])

    def _drawn(self, state: PDMMState) -> tuple[Flags, Flags]:
        """S1: which x and which z are updated in this round."""
        s, federation, pairs = self.settings, self.federation, self.pairs(state)
        eligible = ~state.aside & (state.asked < 0)
        if s.select == "users":
            x = np.zeros(federation.n_users, dtype=bool)
            x[federation.participation.choose(state.round, eligible, federation.seed)] = True
            return x, self._touched(pairs, x) & eligible[pairs.heads] & ~state.quiet
        eligible = eligible & federation.participation.available(state.round, federation.n_users)
        total = federation.n_users + len(pairs)
        size = s.n_primal or max(1, round(federation.participation.share(federation.n_users) * total))
        picked = np.zeros(total, dtype=bool)
        picked[np.random.default_rng([federation.seed, state.round, 3]).permutation(total)[:size]] = True
        x, z = picked[:federation.n_users], picked[federation.n_users:]
        return x & eligible, z & eligible[pairs.heads] & ~state.quiet

    def _touched(self, pairs: Pairs, users: Flags) -> Flags:
        """The pairs that are a user's to update: its own; where two share one, either's."""
        own = users[pairs.heads]
        return own | users[pairs.tails] if self.settings.pairs == "unordered" else own

    def _renewals(self, state: PDMMState, stepped: Flags, heard: Flags) -> Flags:
        """S8: which duals are updated: those of the users who took part, or a random set."""
        s, pairs = self.settings, self.pairs(state)
        if s.select == "users":
            away = ~heard if s.edge_state == "users" else np.zeros_like(heard)
            return self._touched(pairs, stepped) & ~away[pairs.heads] & ~state.quiet
        size = s.n_dual or max(1, round(self.federation.participation.share(self.federation.n_users) * len(pairs)))
        picked = np.zeros(len(pairs), dtype=bool)
        picked[np.random.default_rng([self.federation.seed, state.round, 4]).permutation(len(pairs))[:size]] = True
        silent = (state.asked >= 0) & ~heard  # a dual that grows while its user is away runs off
        return picked & ~state.quiet & ~silent[pairs.heads] & ~silent[pairs.tails]

    # -- the round

    def _beyond(self, state: PDMMState) -> tuple[Array, Array]:
        """What the pairs that end at a user add to its step: -sum_j muhat_ji and sum_j (x_j - z_ji)."""
        pairs = self.pairs(state)
        if not self.both:
            return np.zeros_like(state.now), np.zeros_like(state.now)
        heads = np.where(state.quiet[:, None], state.now[pairs.tails], state.now[pairs.heads])
        at = pairs.by_tail
        return (-edges.segment_sums(state.hat[at], pairs.tail_offsets),
                edges.segment_sums((heads - state.difference)[at], pairs.tail_offsets))

    def _seen(self, state: PDMMState) -> Array:
        """x_j of every pair; of a quiet one x_i stands for it."""
        pairs = self.pairs(state)
        return np.where(state.quiet[:, None], state.now[pairs.heads], state.now[pairs.tails])

    def _pulls(self, state: PDMMState) -> tuple[Array, Array]:
        linear, centres = edges.pulls(self._seen(state), state.difference, state.hat, self.pairs(state).offsets)
        beyond = self._beyond(state)
        return linear + beyond[0], centres + beyond[1]

    def _ask(self, state: PDMMState, users: Ints) -> Batch:
        s = self.settings
        if s.edge_state == "users":
            return self._news(state, users)
        if s.bregman == "linear":
            return Batch(self.kind, state.round, users, {"model": state.now[users]})
        centre, t = self._centres(state)
        return Batch(self.kind, state.round, users, {"centre": centre[users], "t": t[users]})

    def _centres(self, state: PDMMState) -> tuple[Array, Array]:
        """S2 of every user as one proximal step."""
        eta = np.full(self.federation.n_users, self.settings.eta)
        return edges.step_centre(state.now, *self._pulls(state), self.pairs(state).n_pairs, state.rho, eta)

    def _slope(self, state: PDMMState, users: Ints) -> Array:
        """What the pairs add to the slope of a linearised step."""
        linear, centres = (part[users] for part in self._pulls(state))
        return edges.step_slope(state.now[users], linear, centres, self.pairs(state).n_pairs[users], state.rho)

    def _news(self, state: PDMMState, users: Ints) -> Batch:
        """The queries to users who hold their own edges: models that moved, their duals, and what they are to do."""
        s, pairs, n = self.settings, self.pairs(state), self.federation.n_users
        x, z = self._drawn(state)
        reached = np.zeros(n, dtype=bool)
        reached[users] = True
        ragged: dict[str, Ragged] = {}

        def of_pairs(flags: Flags, **named: npt.NDArray[Any]) -> None:
            at = np.flatnonzero(flags & reached[pairs.heads])
            if at.size:
                counts = np.bincount(pairs.heads[at], minlength=n)[users]
                ragged.update({name: Ragged.of(values[at], counts) for name, values in named.items()})

        of_pairs(z, update=pairs.rank)
        mine = state.synced[pairs.heads]
        of_pairs(state.renewed & mine, dual_at=pairs.rank, dual=state.dual)
        of_pairs(state.quiet & ~(state.quiet_at_users & mine), quiet=pairs.rank)
        of_pairs(~state.quiet & state.quiet_at_users & mine, wake=pairs.rank, wake_model=state.now[pairs.tails])
        if self.both:
            stepping = (x & reached)[users]
            halves = np.stack(self._beyond(state), axis=1)[users[stepping]]
            ragged["beyond"] = Ragged.of(halves.reshape(-1, self.federation.dim), 2 * stepping)
        unsynced = (reached & ~state.synced)[users]
        if unsynced.any():  # all they must know
            of_pairs(~mine, others=state.now[pairs.tails], difference=state.difference, hat=state.hat,
                     neighbours=pairs.tails, radii=pairs.radii)
            ragged["point"] = Ragged.of(state.now[users[unsynced]], unsynced)
            ragged["tails"] = Ragged.of(pairs.n_tails[users[unsynced]], unsynced)
        who = np.flatnonzero(state.moved)
        settings = np.array([state.rho, state.hat_rho, s.eta, s.eta_z, s.nu, float(s.bregman == "linear")])
        return Batch(self.kind, state.round, users, {"step": (x & reached)[users].astype(np.int64)}, ragged,
                     {"settings": settings, "models": state.now[who], "who": who})

    def _asked(self, state: PDMMState, users: Ints) -> PDMMState:
        sent, t = state.sent.copy(), state.sent_t.copy()
        centre, weight = self._centres(state)
        sent[users], t[users] = centre[users], weight[users]
        # Where users hold the edges, one who does not reply, or could not be asked, gets its complete state next time.
        synced = np.zeros_like(state.synced)
        reached = np.zeros_like(synced)
        reached[users] = True
        x, z = self._drawn(replace(state, asked=np.where(reached, -1, state.asked)))
        due_z = np.where(reached[self.pairs(state).heads], z, state.due_z)
        return replace(state, sent=sent, sent_t=t, synced=synced, due_x=np.where(reached, x, state.due_x), due_z=due_z)

    def _objections(self, state: PDMMState, replies: Batch) -> list[tuple[int, str]]:
        if self.settings.edge_state == "server":
            return []
        wanted = {name: state.due_x[replies.users].astype(np.int64) for name in ("model", "value", "curvature")}
        if self.settings.bregman == "linear":
            wanted["stiffness"] = wanted["model"]
        heads = self.pairs(state).heads[state.due_z]
        wanted["difference"] = np.bincount(heads, minlength=self.federation.n_users)[replies.users]
        wrong = np.zeros(len(replies), dtype=bool)
        for name, counts in wanted.items():
            part = replies.ragged.get(name)
            wrong |= counts != (0 if part is None else part.counts)
        return [(int(user), "it holds more or fewer rows than were asked for") for user in replies.users[wrong]]

    def _forget(self, state: PDMMState, users: Ints) -> PDMMState:
        before = state.aside.copy()
        before[users] = False
        old = self._pairs(before)
        kept = ~state.aside[old.heads] & ~state.aside[old.tails]
        rows = {name: getattr(state, name)[kept] for name in
                ("difference", "dual", "hat", "zeros", "quiet", "renewed", "quiet_at_users", "due_z")}
        return replace(state, **rows, synced=np.zeros_like(state.synced))

    def _alone(self, state: PDMMState) -> PDMMState:
        if self.settings.edge_state == "users" or self.settings.select == "users":
            return state
        n, d = 0, self.federation.dim  # no x was drawn, but z and duals were, and they need no user
        arrays = {"point": np.zeros((n, d)), "gradient": np.zeros((n, d)), "value": np.zeros(n),
                  "curvature": np.zeros(n), "stiffness": np.zeros(n)}
        return self._tell(state, Batch(self.kind, state.round, np.zeros(0, dtype=np.int64), arrays))

    def _tell(self, state: PDMMState, replies: Batch) -> PDMMState:
        s, pairs, rho, n = self.settings, self.pairs(state), state.rho, self.federation.n_users
        # What was drawn when the questions of this round were asked.
        _, z = self._drawn(replace(state, asked=np.where(state.asked == state.round, -1, state.asked)))
        heard, stepped = np.zeros(n, dtype=bool), np.zeros(n, dtype=bool)
        heard[replies.users] = True
        old, difference, eta = state.now, state.difference.copy(), np.full(n, s.eta)
        now, values, slopes, curvature = (a.copy() for a in (state.now, state.values, state.slopes, state.curvature))
        if s.edge_state == "users":
            model, differences = replies.ragged.get("model"), replies.ragged.get("difference")
            who = replies.users[:0] if model is None else replies.users[model.owner]
            z = state.due_z & heard[pairs.heads]
            if model is not None:
                now[who], values[who] = model.values, replies.ragged["value"].values
                curvature[who] = replies.ragged["curvature"].values
                stiff = replies.ragged.get("stiffness")
                if s.bregman == "linear" and stiff is not None:  # the step gives the slope away
                    pull = self._slope(state, who)
                    length = edges.step_length(eta[who], stiff.values, rho, pairs.n_pairs[who])
                    slopes[who] = length[:, None] * (old[who] - now[who]) - pull
            if differences is not None:
                difference[z] = differences.values
        else:
            who = replies.users
            values[who], curvature[who] = replies.arrays["value"], replies.arrays["curvature"]
            if s.bregman == "linear":
                slopes[who] = replies.arrays["gradient"]
                pull = self._slope(state, who)
                length = edges.step_length(eta[who], replies.arrays["stiffness"], rho, pairs.n_pairs[who])
                now[who] = old[who] - (slopes[who] + pull) / length[:, None]
            else:
                now[who] = replies.arrays["point"]
            if s.select == "users":
                z = z & self._touched(pairs, heard)
            difference[z] = edges.differences(old[pairs.heads[z]], self._seen(state)[z], difference[z], state.hat[z],
                                              pairs.radii[z], rho, s.eta_z)
        stepped[who] = True
        if s.bregman == "euclidean":  # the step's optimality: grad f = t (centre - x)
            slopes[who] = state.sent_t[who][:, None] * (state.sent[who] - now[who])
        renewed = self._renewals(state, stepped, heard)
        dual, hat = state.dual.copy(), state.hat.copy()
        i, j = pairs.heads[renewed], pairs.tails[renewed]
        dual[renewed] += s.tau * rho * (now[i] - now[j] - difference[renewed])
        hat[renewed] = edges.hats(dual[renewed], now[i], now[j], difference[renewed], rho, s.nu)
        step = float(np.sqrt(((now - old)[who] ** 2).sum(axis=1).mean())) if len(who) else state.length
        state = replace(
            state, now=now, values=values, slopes=slopes, curvature=curvature, difference=difference, dual=dual,
            hat=hat, moved=(now != old).any(axis=1), renewed=renewed, hat_rho=rho,
            synced=heard & (state.asked == state.round),  # who answers late has missed the news since
            quiet_at_users=np.where(heard[pairs.heads], state.quiet, state.quiet_at_users),
            length=0.8 * state.length + 0.2 * step)
        return self._estimated(self._update_quiet(self._tuned(state), z))

    def _tuned(self, state: PDMMState) -> PDMMState:
        """rho from the users' curvature: after the first answers, then whenever the number of sweeps has doubled."""
        sweeps = (state.round + 1) * self.federation.participation.share(self.federation.n_users)
        known = np.isfinite(state.curvature) & (state.curvature > 0) & ~state.aside
        if self.settings.rho is not None or state.changes >= _CHANGES or sweeps < state.next_review or not known.any():
            return state
        rho = _STIFF * float(np.exp(np.log(state.curvature[known]).mean())) / self.pairs(state).mean_pairs
        state = replace(state, next_review=max(1.0, 2.0 * sweeps))
        if max(rho / state.rho, state.rho / rho) < _OFF:
            return state
        return replace(state, rho=rho, changes=state.changes + 1)

    def _update_quiet(self, state: PDMMState, updated: Flags) -> PDMMState:
        """The paper's closing remark: pairs that stay together are left alone, and taken up again if they part."""
        if not self.settings.quiet:
            return state
        pairs = self.pairs(state)
        zeros = np.where(updated, np.where(state.difference.any(axis=1), 0, state.zeros + 1), state.zeros)
        apart = np.linalg.norm(state.now[pairs.heads] - state.now[pairs.tails], axis=1)
        ready = np.full(self.federation.graph.n_edges, True)
        np.logical_and.at(ready, pairs.edge, (zeros >= self.settings.quiet) & (apart <= 0.5 * state.length))
        quiet = (state.quiet & (apart <= state.length)) | ready[pairs.edge]
        return replace(state, quiet=quiet, zeros=np.where(state.quiet & ~quiet, 0, zeros))

    # -- what it amounts to

    def duals(self, state: PDMMState) -> Array:
        """(n_edges, dim) the duals of (C) of users not set aside: mu_ij - mu_ji."""
        pairs = self.pairs(state)
        sign = np.where(pairs.heads < pairs.tails, 1.0, -1.0)
        if self.settings.variant == "paper" and self.settings.pairs == "ordered":
            sign = 0.5 * sign
        kept, edge = np.unique(pairs.edge, return_inverse=True)
        out = np.zeros((len(kept), self.federation.dim))
        np.add.at(out, edge.ravel(), sign[:, None] * state.dual)
        return project(out, self.federation.lam * self.federation.graph.weights[kept])

    def point(self, state: PDMMState) -> tuple[Array, Array | None]:
        curvature = np.where(np.isfinite(state.curvature), state.curvature, 0.0)
        active = ~state.aside
        models = fused(self.federation.graph, self.federation.lam, self.pairs(state), state.now, state.difference,
                       state.slopes, curvature)
        duals = self.duals(state)
        miss = self._miss(state, models[active], duals)
        if self.tol < miss < _NEAR * self.tol:  # mu lags behind x: duals made for these models may prove more
            slopes = (state.slopes + curvature[:, None] * (models - state.now))[active]
            made = duals_for(self.federation, active, models[active], slopes)
            duals = made if self._miss(state, models[active], made) < miss else duals
        return models[active], duals

    def _miss(self, state: PDMMState, models: Array, duals: Array) -> float:
        """About the relative gap of these models and duals, by the users' values, slopes and curvatures."""
        active = ~state.aside
        graph = self.federation.graph if active.all() else self.federation.graph.take(active)
        return missed(graph, self.federation.lam, models, duals, state.now[active], state.values[active],
                      state.slopes[active], state.curvature[active])

    def _estimated(self, state: PDMMState) -> PDMMState:
        """About what a certificate of the fused models would say; made now and then, as it costs more than a round."""
        active = ~state.aside
        if not np.isfinite(state.curvature[active]).all() or state.round < state.next_estimate:
            return replace(state, error=np.inf)
        models, duals = self.point(state)
        assert duals is not None
        return replace(state, error=self._miss(state, models, duals),
                       next_estimate=state.round + max(1, state.round // 25))
