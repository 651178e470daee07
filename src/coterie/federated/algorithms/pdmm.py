"""The paper's Algorithm 1, a parallel direction method of multipliers: as printed, and corrected.

For every ordered pair (i, j) there are a difference z_ij, a dual mu_ij and an auxiliary dual
muhat_ij. A round, with r_ij = x_i - x_j - z_ij:

    x_i     <- argmin f_i(x) + sum_j <muhat_ij, x> + rho/2 sum_j ||x - x_j - z_ij||^2 + eta B(x,
            x_i)           (S2)
    z_ij    <- argmin lam w_ij ||z|| - <muhat_ij, z> + rho/2 ||x_i - x_j - z||^2 + eta_z/2 ||z -
            z_ij||^2         (S3)
    mu_ij   <- mu_ij + tau rho r_ij,      muhat_ij <- mu_ij - nu rho r_ij
            (S8, S11)

As printed, S2 has the pairs (i, .) only. The augmented Lagrangian also has the pairs (., i);
without them muhat_ij and muhat_ji become different if not all users take part. variant="symmetric"
has both; it then solves (C) for 2 lam, so it is run with lam / 2. The z and mu steps need no data:
with edge_state="server" the server computes them, and a user gets one vector per round, the centre
of its proximal step, and never receives the model of another user.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.base.errors import InvalidInput, require
from coterie.base.types import Array, Flags, Ints
from coterie.federated.algorithms import edges
from coterie.federated.algorithms.base import Algorithm, Federation, Method, State
from coterie.federated.algorithms.edges import Pairs
from coterie.federated.algorithms.proof import duals_for
from coterie.federated.plausible import typical
from coterie.federated.protocol.messages import Batch, Ragged, flags, put
from coterie.problem.certificates import project

_STIFF = 5.0  # rho times the number of pairs of a user, relative to its curvature
_NEAR = 100.0  # better duals are tried if the gap is below this factor times the tolerance
_CHANGES, _OFF = 12, 1.5  # largest number of changes of rho, and the smallest factor of a change


@dataclass(frozen=True, kw_only=True)
class PDMM(Algorithm):
    """The paper's algorithm, as printed (`PDMM.printed()`) or corrected.

    Parameters
    ----------
    variant : "symmetric" (corrected) or "paper" (as printed).
    pairs : "ordered", or "unordered" as in the paper's footnote: one z and mu for i < j, in the
        steps of both users.
    edge_state : where z is stored and updated: "server", or "users" as printed.
    rho : weight of the augmented term; None: from the mean curvature of the users, of which each
        reply contains one number, divided by the number of pairs of a user; it is changed a finite
        number of times.
    eta, eta_z : weights of the Bregman terms of x and z. A linearised step has length 1 / eta;
        without eta, or with 0, it is 1 / (largest curvature of the loss + rho times the number of
        pairs of the user).
    tau, nu : damping of the duals; nu = 1 - 1/3, because the constraint of a pair connects three
        variables.
    bregman : "euclidean", a proximal step of the user; or "linear", which makes it one gradient
        step.
    select : what is drawn in a round: "users", who update all their variables, as in the paper's
        experiment; or "variables", a random set of n_primal of all x and z, and n_dual of all
        duals, as in S1 and S8.
    n_primal, n_dual : sizes S_P and S_D of these sets; None: the share of participation.
    quiet : after this number of updates with z_ij = 0, a pair with close models is neither updated
        nor sent, until the two models differ by more than users move in a round; 0: never (the
        paper's closing remark).

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
        """The algorithm as printed, with the parameters of the paper's experiment."""
        return cls(**{"variant": "paper", "edge_state": "users",
                      "rho": 10.0, "eta": 10.0, "eta_z": 10.0, "tau": 0.8, "nu": 0.2, **changes})

    def __post_init__(self) -> None:
        for name, allowed in {"variant": ("symmetric", "paper"), "pairs": ("ordered", "unordered"),
                              "edge_state": ("server", "users"), "select": ("users", "variables"),
                              "bregman": ("euclidean", "linear")}.items():
            if getattr(self, name) not in allowed:
                raise InvalidInput(f"{name} must be {' or '.join(map(repr, allowed))}, "
                                   f"got {getattr(self, name)!r}", remedy=f"Use {allowed[0]!r}")
        for name in ("rho", "tau"):
            value = getattr(self, name)
            require(value is None or (np.isfinite(value) and value > 0),
                    f"{name} must be a finite number > 0, got {value!r}", "Omit it")
        for name, value in (("eta", self.eta), ("eta_z", self.eta_z), ("nu", self.nu)):
            require(np.isfinite(value) and value >= 0,
                    f"{name} must be a finite number >= 0, got {value!r}", "Omit it")
        for name, least in (("n_primal", 1), ("n_dual", 1), ("quiet", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InvalidInput(f"{name} must be at least {least}, got {value!r}",
                                   remedy="Omit it")

    @property
    def in_process(self) -> bool:
        return self.edge_state == "users"

    def on(self, federation: Federation, tol: float = 1e-6) -> PDMMMethod:
        return PDMMMethod(federation, self, tol)


@dataclass(frozen=True, kw_only=True, eq=False)
class PDMMState(State):
    """Of users, x and what they last said of their losses; of pairs (i, j), z, mu and muhat; and
    how rho is chosen.

    Parameters
    ----------
    values, slopes, curvature : (n_users,), (n_users, dim), (n_users,) f_i, its gradient and its
        mean curvature where the user last stepped from or to; the curvature is nan before the first
        reply.
    sent, sent_t : (n_users, dim), (n_users,) centre and weight of the last proximal query.
    difference, dual, hat : (n_pairs, dim) z, mu and muhat.
    zeros : (n_pairs,) updates since z was last not zero.
    quiet : (n_pairs,) which pairs are not updated at present.
    quiet_at_users : (n_pairs,) which pairs the users know to be quiet.
    moved : (n_users,) whose model changed in the last round.
    renewed : (n_pairs,) whose dual changed in the last round.
    synced : (n_users,) who has its complete state, where users hold the edges.
    due_x, due_z : (n_users,), (n_pairs,) what users who hold the edges were last asked to update.
    rho : weight of the augmented term.
    hat_rho : the rho of the last round, with which muhat was made.
    changes : how often rho has changed.
    next_review : number of sweeps after which rho is checked again.
    length : of the users' steps, a running mean.
    next_estimate : the round in which the gap is estimated next.
    error : the estimate of the relative gap.
    """

    values: Array
    slopes: Array
    curvature: Array
    sent: Array
    sent_t: Array
    difference: Array
    dual: Array
    hat: Array
    zeros: Ints
    quiet: Flags
    quiet_at_users: Flags
    moved: Flags
    renewed: Flags
    synced: Flags
    due_x: Flags
    due_z: Flags
    rho: float
    hat_rho: float
    changes: int
    next_review: float
    length: float
    next_estimate: int
    error: float


class PDMMMethod(Method):
    max_rounds = 100_000
    restarts = True

    def __init__(self, federation: Federation, settings: PDMM, tol: float) -> None:
        super().__init__(federation)
        self.settings, self.tol = settings, tol
        self.kind = ("pdmm" if settings.edge_state == "users" else
                     "gradient" if settings.bregman == "linear" else "prox")
        self.both = settings.variant == "symmetric" or settings.pairs == "unordered"
        self._known: tuple[bytes, Pairs] | None = None

    def pairs(self, state: State) -> Pairs:
        key = state.aside.tobytes()
        if self._known is None or self._known[0] != key:
            self._known = key, self._pairs(state.aside)
        return self._known[1]

    def _pairs(self, aside: Flags) -> Pairs:
        return Pairs(self.federation.graph, self.federation.lam,
                     aside, ordered=self.settings.pairs == "ordered", both=self.both)

    def begin(self, models: Array) -> PDMMState:
        n, d = self.federation.n_users, self.federation.dim
        pairs = self._pairs(np.zeros(n, dtype=bool))
        p = len(pairs)
        return PDMMState(**self.fresh, now=models, values=np.zeros(n), slopes=np.zeros((n, d)),
                         curvature=np.full(n, np.nan), sent=models, sent_t=np.zeros(n),
                         difference=np.zeros((p, d)), dual=np.zeros((p, d)), hat=np.zeros((p, d)),
                         zeros=np.zeros(p, dtype=np.int64), quiet=np.zeros(p, dtype=bool),
                         moved=np.zeros(n, dtype=bool), renewed=np.zeros(p, dtype=bool),
                         synced=np.zeros(n, dtype=bool), quiet_at_users=np.zeros(p, dtype=bool),
                         due_x=np.zeros(n, dtype=bool), due_z=np.zeros(p, dtype=bool),
                         rho=self.settings.rho or 1.0 / pairs.mean_pairs, hat_rho=0.0,
                         changes=0, next_review=0.0, length=0.0, next_estimate=0, error=np.inf)

    def estimate(self, state: PDMMState) -> float:
        return state.error

    def chosen(self, state: PDMMState) -> Ints:
        # All users get the updates; only the drawn users compute.
        if self.settings.edge_state == "users":
            available = self.federation.participation.available(state.round,
                self.federation.n_users)
            return np.flatnonzero(~state.aside & (state.asked < 0) & available)
        return np.flatnonzero(self._drawn(state)[0])

    def _drawn(self, state: PDMMState) -> tuple[Flags, Flags]:
        """S1: which x and which z are updated in this round."""
        s, federation, pairs = self.settings, self.federation, self.pairs(state)
        eligible = ~state.aside & (state.asked < 0)
        if s.select == "users":
            drawn = federation.participation.choose(state.round, eligible, federation.seed)
            x = flags(federation.n_users, drawn)
            return x, self._touched(pairs, x) & eligible[pairs.heads] & ~state.quiet
        eligible = eligible & federation.participation.available(state.round, federation.n_users)
        total = federation.n_users + len(pairs)
        size = s.n_primal or max(1, round(federation.participation.share(federation.n_users)
                                          * total))
        random = np.random.default_rng([federation.seed, state.round, 3])
        picked = flags(total, random.permutation(total)[:size])
        x, z = picked[:federation.n_users], picked[federation.n_users:]
        return x & eligible, z & eligible[pairs.heads] & ~state.quiet

    def _touched(self, pairs: Pairs, users: Flags) -> Flags:
        """The pairs that these users update: those that start at them; unordered pairs belong to
        both users.
        """
        own = users[pairs.heads]
        return own | users[pairs.tails] if self.settings.pairs == "unordered" else own

    def _renewals(self, state: PDMMState, stepped: Flags, heard: Flags) -> Flags:
        """S8: the duals that are updated: those of the users who took part, or a random set."""
        s, pairs = self.settings, self.pairs(state)
        if s.select == "users":
            away = ~heard if s.edge_state == "users" else np.zeros_like(heard)
            return self._touched(pairs, stepped) & ~away[pairs.heads] & ~state.quiet
        size = s.n_dual or max(1, round(self.federation.participation.share(self.federation.n_users)
                                        * len(pairs)))
        random = np.random.default_rng([self.federation.seed, state.round, 4])
        picked = flags(len(pairs), random.permutation(len(pairs))[:size])
        silent = (state.asked >= 0) & ~heard  # otherwise their duals grow without limit
        return picked & ~state.quiet & ~silent[pairs.heads] & ~silent[pairs.tails]

    # -- the round

    def _beyond(self, state: PDMMState) -> tuple[Array, Array]:
        """The contribution of pairs that end at a user to its step: -sum_j muhat_ji and sum_j (x_j
        - z_ji).
        """
        pairs = self.pairs(state)
        if not self.both:
            return np.zeros_like(state.now), np.zeros_like(state.now)
        heads = np.where(state.quiet[:, None], state.now[pairs.tails], state.now[pairs.heads])
        at = pairs.by_tail
        return (-edges.segment_sums(state.hat[at], pairs.tail_offsets),
                edges.segment_sums((heads - state.difference)[at], pairs.tail_offsets))

    def _seen(self, state: PDMMState) -> Array:
        """x_j of every pair; for a quiet pair x_i is used instead."""
        pairs = self.pairs(state)
        return np.where(state.quiet[:, None], state.now[pairs.heads], state.now[pairs.tails])

    def _pulls(self, state: PDMMState) -> tuple[Array, Array]:
        linear, centres = edges.pulls(self._seen(state), state.difference, state.hat,
                                      self.pairs(state).offsets)
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
        return edges.step_centre(state.now, *self._pulls(state), self.pairs(state).n_pairs,
                                 state.rho, eta)

    def _slope(self, state: PDMMState, users: Ints) -> Array:
        """The contribution of the pairs to the slope of a linearised step."""
        linear, centres = (part[users] for part in self._pulls(state))
        return edges.step_slope(state.now[users], linear, centres, self.pairs(state).n_pairs[users],
                                state.rho)

    def _news(self, state: PDMMState, users: Ints) -> Batch:
        """The query to users who store their edges: changed models, their duals, and what to
        update.
        """
        s, pairs, n = self.settings, self.pairs(state), self.federation.n_users
        (x, z), queried = self._drawn(state), flags(n, users)
        ragged: dict[str, Ragged] = {}

        def of_pairs(flags: Flags, **named: npt.NDArray[Any]) -> None:
            at = np.flatnonzero(flags & queried[pairs.heads])
            if at.size:
                counts = np.bincount(pairs.heads[at], minlength=n)[users]
                ragged.update({name: Ragged.of(values[at], counts)
                               for name, values in named.items()})

        # 1. The z to update, and what changed at pairs since the user was last asked.
        of_pairs(z, update=pairs.position)
        mine = state.synced[pairs.heads]
        of_pairs(state.renewed & mine, dual_at=pairs.position, dual=state.dual)
        of_pairs(state.quiet & ~(state.quiet_at_users & mine), quiet=pairs.position)
        of_pairs(~state.quiet & state.quiet_at_users & mine, wake=pairs.position,
                 wake_model=state.now[pairs.tails])
        # 2. What comes from pairs whose head is another user.
        if self.both:
            stepping = (x & queried)[users]
            halves = np.stack(self._beyond(state), axis=1)[users[stepping]]
            ragged["beyond"] = Ragged.of(halves.reshape(-1, self.federation.dim), 2 * stepping)
        # 3. The complete state, to those who missed something.
        reset = (queried & ~state.synced)[users]
        if reset.any():
            of_pairs(~mine, others=state.now[pairs.tails], difference=state.difference,
                     hat=state.hat, neighbours=pairs.tails, radii=pairs.radii)
            ragged["point"] = Ragged.of(state.now[users[reset]], reset)
            ragged["tails"] = Ragged.of(pairs.n_tails[users[reset]], reset)
        # 4. To everyone: the models that moved.
        who = np.flatnonzero(state.moved)
        settings = np.array([state.rho, state.hat_rho, s.eta, s.eta_z, s.nu,
                             float(s.bregman == "linear")])
        return Batch(self.kind, state.round, users, {"step": (x & queried)[users].astype(np.int64)},
                     ragged, {"settings": settings, "models": state.now[who], "who": who})

    def _asked(self, state: PDMMState, users: Ints) -> PDMMState:
        centre, weight = self._centres(state)
        # If users store the edges, a user who does not reply, or could not be asked, is
        # re-initialised next time.
        queried = flags(self.federation.n_users, users)
        x, z = self._drawn(replace(state, asked=np.where(queried, -1, state.asked)))
        due_z = np.where(queried[self.pairs(state).heads], z, state.due_z)
        return replace(state, sent=put(state.sent, users, centre[users]),
                       sent_t=put(state.sent_t, users, weight[users]),
                       synced=np.zeros_like(state.synced),
                       due_x=np.where(queried, x, state.due_x), due_z=due_z)

    def unusable(self, state: PDMMState, replies: Batch) -> list[tuple[int, str]]:
        if self.settings.edge_state == "server":
            return []
        wanted = {name: state.due_x[replies.users].astype(np.int64) for name in ("model", "value",
            "curvature")}
        if self.settings.bregman == "linear":
            wanted["stiffness"] = wanted["model"]
        heads = self.pairs(state).heads[state.due_z]
        wanted["difference"] = np.bincount(heads, minlength=self.federation.n_users)[replies.users]
        wrong = np.zeros(len(replies), dtype=bool)
        for name, counts in wanted.items():
            part = replies.ragged.get(name)
            wrong |= counts != (0 if part is None else part.counts)
        reasons = [(int(user), "it has more or fewer rows than requested")
                   for user in replies.users[wrong]]
        return reasons + self._wrong_differences(state, replies.take(np.flatnonzero(~wrong)))

    def _wrong_differences(self, state: PDMMState, replies: Batch) -> list[tuple[int, str]]:
        """Users whose differences do not follow from what they were sent, all of which the server
        knows.
        """
        given, pairs, n = replies.ragged.get("difference"), self.pairs(state), \
            self.federation.n_users
        z = state.due_z & np.isin(np.arange(n), replies.users)[pairs.heads]
        if given is None or not z.any() or (state.asked[replies.users] != state.round).any():
            return []  # a late reply is to an earlier state
        expected = edges.differences(state.now[pairs.heads[z]], self._seen(state)[z],
                                     state.difference[z], state.hat[z],
                                     pairs.radii[z], state.rho, self.settings.eta_z)
        scale = np.abs(expected).max() + np.abs(state.now).max() + np.abs(state.hat[z]).max() \
            / state.rho
        off = np.abs(expected - given.values).max(axis=1) > 1e-6 * scale
        return [(int(user), "its differences do not follow from what it was sent")
                for user in np.unique(pairs.heads[z][off])]

    def _forget(self, state: PDMMState, users: Ints) -> PDMMState:
        old = self._pairs(put(state.aside, users, False))
        kept = ~state.aside[old.heads] & ~state.aside[old.tails]
        rows = {name: getattr(state, name)[kept] for name in (
            "difference", "dual", "hat", "zeros", "quiet", "renewed", "quiet_at_users", "due_z")}
        return replace(state, **rows, synced=np.zeros_like(state.synced))

    def _alone(self, state: PDMMState) -> PDMMState:
        if self.settings.edge_state == "users" or self.settings.select == "users":
            return state
        # No x was drawn, but z and duals were, and their updates need no user.
        n, d = 0, self.federation.dim
        arrays = {"point": np.zeros((n, d)), "gradient": np.zeros((n, d)), "value": np.zeros(n),
                  "curvature": np.zeros(n), "stiffness": np.zeros(n)}
        return self._tell(state, Batch(self.kind, state.round, np.zeros(0, dtype=np.int64), arrays))

    def _tell(self, state: PDMMState, replies: Batch) -> PDMMState:
        s, pairs, rho, n = self.settings, self.pairs(state), state.rho, self.federation.n_users
        heard, old = flags(n, replies.users), state.now
        new = {name: getattr(state, name).copy()
               for name in ("now", "values", "slopes", "curvature", "difference", "dual", "hat")}
        # 1. x and z of those who were drawn, at the users or here.
        step = self._steps_of_users if s.edge_state == "users" else self._steps_here
        who, z = step(state, replies, heard, new)
        now = new["now"]
        if s.bregman == "euclidean":  # optimality condition of the step: grad f = t (centre - x)
            new["slopes"][who] = state.sent_t[who][:, None] * (state.sent[who] - now[who])
        # 2. The duals of their pairs, and the points from which the next steps start.
        renewed = self._renewals(state, flags(n, who), heard)
        i, j = pairs.heads[renewed], pairs.tails[renewed]
        lag = new["difference"][renewed]
        new["dual"][renewed] += s.tau * rho * (now[i] - now[j] - lag)
        new["hat"][renewed] = edges.hats(new["dual"][renewed], now[i], now[j], lag, rho, s.nu)
        # 3. How far users moved on average, and who has seen everything: a late reply has missed
        #    the updates since.
        moved = float(np.sqrt(((now - old)[who] ** 2).sum(axis=1).mean())) if len(who) \
            else state.length
        state = replace(
            state, **new, moved=(now != old).any(axis=1), renewed=renewed, hat_rho=rho,
            synced=heard & (state.asked == state.round), length=0.8 * state.length + 0.2 * moved,
            quiet_at_users=np.where(heard[pairs.heads], state.quiet, state.quiet_at_users))
        # 4. rho, the pairs that need no updates, and the distance to the optimum.
        return self._estimated(self._update_quiet(self._tuned(state), z))

    def _steps_of_users(self, state: PDMMState, replies: Batch, heard: Flags,
                        new: dict[str, Array]) -> tuple[Ints, Flags]:
        """Enter the x and z that users who store their edges computed; who stepped, and which z.
        """
        s, pairs = self.settings, self.pairs(state)
        model, updated = replies.ragged.get("model"), replies.ragged.get("difference")
        who = replies.users[:0] if model is None else replies.users[model.owner]
        z = state.due_z & heard[pairs.heads]
        if model is not None:
            new["now"][who], new["values"][who] = model.values, replies.ragged["value"].values
            new["curvature"][who] = replies.ragged["curvature"].values
            stiff = replies.ragged.get("stiffness")
            if s.bregman == "linear" and stiff is not None:  # the slope follows from the step
                length = edges.step_length(np.full(len(who), s.eta), stiff.values, state.rho,
                                           pairs.n_pairs[who])
                new["slopes"][who] = length[:, None] * (state.now[who] - new["now"][who]) \
                    - self._slope(state, who)
        if updated is not None:
            new["difference"][z] = updated.values
        return who, z

    def _steps_here(self, state: PDMMState, replies: Batch, heard: Flags,
                    new: dict[str, Array]) -> tuple[Ints, Flags]:
        """Compute x and z from replies about losses; who stepped, and which z."""
        s, pairs, who = self.settings, self.pairs(state), replies.users
        # The variables that were drawn when the queries of this round were sent.
        _, z = self._drawn(replace(state,
                                   asked=np.where(state.asked == state.round, -1, state.asked)))
        new["values"][who] = replies.arrays["value"]
        new["curvature"][who] = replies.arrays["curvature"]
        if s.bregman == "linear":
            new["slopes"][who] = replies.arrays["gradient"]
            length = edges.step_length(np.full(len(who), s.eta), replies.arrays["stiffness"],
                                       state.rho, pairs.n_pairs[who])
            slope = new["slopes"][who] + self._slope(state, who)
            new["now"][who] = state.now[who] - slope / length[:, None]
        else:
            new["now"][who] = replies.arrays["point"]
        if s.select == "users":
            z = z & self._touched(pairs, heard)
        new["difference"][z] = edges.differences(state.now[pairs.heads[z]], self._seen(state)[z],
                                                 new["difference"][z], state.hat[z],
                                                 pairs.radii[z], state.rho, s.eta_z)
        return who, z

    def _tuned(self, state: PDMMState) -> PDMMState:
        """Set rho from the users' curvature: after the first replies, then each time the number of
        sweeps doubles.
        """
        sweeps = (state.round + 1) * self.federation.participation.share(self.federation.n_users)
        known = np.isfinite(state.curvature) & (state.curvature > 0) & ~state.aside
        if self.settings.rho is not None or state.changes >= _CHANGES \
            or sweeps < state.next_review or not known.any():
            return state
        rho = _STIFF * typical(state.curvature[known]) / self.pairs(state).mean_pairs
        state = replace(state, next_review=max(1.0, 2.0 * sweeps))
        if max(rho / state.rho, state.rho / rho) < _OFF:
            return state
        return replace(state, rho=rho, changes=state.changes + 1)

    def _update_quiet(self, state: PDMMState, updated: Flags) -> PDMMState:
        """The paper's closing remark: pairs with equal models are not updated, until their models
        differ again.
        """
        if not self.settings.quiet:
            return state
        pairs = self.pairs(state)
        zeros = np.where(updated, np.where(state.difference.any(axis=1), 0, state.zeros + 1),
                         state.zeros)
        apart = np.linalg.norm(state.now[pairs.heads] - state.now[pairs.tails], axis=1)
        ready = np.full(self.federation.graph.n_edges, True)
        np.logical_and.at(ready, pairs.edge,
                          (zeros >= self.settings.quiet) & (apart <= 0.5 * state.length))
        quiet = (state.quiet & (apart <= state.length)) | ready[pairs.edge]
        return replace(state, quiet=quiet, zeros=np.where(state.quiet & ~quiet, 0, zeros))

    # -- what it amounts to

    def duals(self, state: PDMMState) -> Array:
        """(n_edges, dim) the duals of (C) of the users that are not excluded: mu_ij - mu_ji."""
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
        models = edges.fuse_models(self.federation.graph, self.federation.lam, self.pairs(state),
                                   state.now, state.difference, state.slopes, curvature)
        duals = self.duals(state)
        miss = self._miss(state, models[active], duals)
        # Mu converges later than x: duals built for these models may be better.
        if self.tol < miss < _NEAR * self.tol:
            slopes = (state.slopes + curvature[:, None] * (models - state.now))[active]
            built = duals_for(self.federation, active, models[active], slopes)
            duals = built if self._miss(state, models[active], built) < miss else duals
        return models[active], duals

    def _miss(self, state: PDMMState, models: Array, duals: Array) -> float:
        """An estimate of the relative gap of these models and duals."""
        active = ~state.aside
        graph = self.federation.graph if active.all() else self.federation.graph.take(active)
        return edges.estimate_gap(graph, self.federation.lam, models, duals,
                                  self._lacks(state, models, duals), state.values[active])

    def _lacks(self, state: PDMMState, models: Array, duals: Array) -> Array:
        """(n,) each user's part of the gap, from its slope and curvature."""
        active = ~state.aside
        graph = self.federation.graph if active.all() else self.federation.graph.take(active)
        return edges.lacks(graph, models, duals, state.now[active], state.slopes[active],
                           state.curvature[active])

    def _estimated(self, state: PDMMState) -> PDMMState:
        """Estimate the gap of the merged models; not in every round, because it costs more than a
        round.
        """
        curvature = state.curvature[~state.aside]
        if not np.isfinite(curvature).all() or state.round < state.next_estimate:
            return replace(state, error=np.inf)
        models, duals = self.point(state)
        assert duals is not None
        return replace(state, error=self._miss(state, models, duals),
                       next_estimate=state.round + max(1, state.round // 25))

    def shares(self, state: PDMMState) -> Array:
        models, duals = self.point(state)
        assert duals is not None
        return self._lacks(state, models, duals)
