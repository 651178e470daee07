"""What the server knows between two rounds of PDMM."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coterie.base.types import Array, Flags, Ints
from coterie.federated.algorithms.base import State
from coterie.federated.plausible import Statements
from coterie.federated.protocol.messages import Batch


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


def statements_of(state: PDMMState, replies: Batch, exact: bool) -> Statements | None:
    """What replies say of the users' losses; without gradients if steps are not exact."""
    users, dim = replies.users, state.now.shape[1]
    if replies.kind == "gradient":
        return Statements(state.now[users], replies.arrays["value"], replies.arrays["gradient"],
                          np.maximum(replies.arrays["curvature"], replies.arrays["stiffness"]))
    points, values, curvatures = np.full((len(users), dim), np.nan), \
        *np.full((2, len(users)), np.nan)
    if replies.kind == "prox":
        points, values, curvatures = (replies.arrays[name] for name in ("point", "value",
            "curvature"))
    elif "stiffness" not in replies.ragged and "model" in replies.ragged:
        who = replies.ragged["model"].owner
        points[who], values[who], curvatures[who] = (replies.ragged[name].values
                                                     for name in ("model", "value", "curvature"))
    t = state.sent_t[users]  # the optimality condition of the step is grad f = t (centre - x)
    gradients = t[:, None] * (state.sent[users] - points) if exact else np.full_like(points, np.nan)
    return Statements(points, values, gradients, curvatures + t)
