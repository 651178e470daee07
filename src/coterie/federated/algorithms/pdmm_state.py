"""What the server knows between two rounds of PDMM."""

from __future__ import annotations

from dataclasses import dataclass

from coterie.base.types import Array, Flags, Ints
from coterie.federated.algorithms.base import State


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
