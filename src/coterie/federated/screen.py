"""The gate between users and an algorithm: which replies it gets to see.

A reply passes if it belongs to an open query, has the fields asked for, and can be true beside all
that its user said before (`coterie.federated.plausible`). The algorithm never sees another one. A
certificate in which a single user could hide the errors of the others, or spoil one after the
other, is judged here, too.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from coterie.base.types import Array
from coterie.federated import plausible
from coterie.federated.algorithms.base import Federation, Method, Replies, State
from coterie.federated.algorithms.forms import between, traces_of
from coterie.federated.algorithms.proof import Judgement
from coterie.federated.plausible import Statements
from coterie.federated.protocol.messages import (
    MAY_BE_INFINITE,
    Batch,
    Message,
    gather,
    merge,
    misfit,
)

log = logging.getLogger("coterie.federated")

# A user is blamed for a part of the gap that is so many times the tolerance and the gap of all
# others, where the gap is so many times the tolerance.
_ALONE, _FAILED = 10.0, 100.0
# Certificates in a row, and sweeps, that one user alone may spoil before it is excluded.
_BLAMED, _PATIENCE = 3, 100

Refusals = list[tuple[int, str]]  # users with the reason


class Screen:
    """Checks the replies to an algorithm's queries, and remembers what users said.

    Parameters
    ----------
    federation : whose users are asked.
    heard : whether users have answered before this run.

    Attributes
    ----------
    said : (n_users, 2 dim + 2) the last statement of each user about its loss; see
        `plausible.Statements`.
    heard : (n_users,) whether there is an accepted expansion of its loss.
    sent : the fields of the last query to each user, nan where it had none.
    blamed : (n_users, 3) certificates in a row that failed because of the user alone, its part of
        the gap, and the round of the first of them.
    suspect : (4,) user with the largest part of the gap, that part, its size relative to the
        others' objective, and the gap without it: before a certificate was repaired.
    """

    def __init__(self, federation: Federation, heard: bool = False) -> None:
        n, self.federation = federation.n_users, federation
        self.said = np.full((n, 2 * federation.dim + 2), np.nan)
        self.heard = np.full(n, heard)
        self.sent: dict[str, Array] = {}
        self.blamed, self.suspect = np.zeros((n, 3)), np.full(4, np.nan)

    def saved(self) -> dict[str, Any]:
        """What must be saved for a run to be continued."""
        return {name: getattr(self, name) for name in ("said", "heard", "sent", "blamed",
                                                       "suspect")}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from what `saved` gave."""
        vars(self).update(saved)

    # -- replies

    def check(self, method: Method, state: State, queries: Batch,
              replies: Replies) -> tuple[Batch | None, Refusals]:
        """The replies that can be used, and who sent others with the reason.

        Parameters
        ----------
        method, state : which replies are expected; the state after `queries` were sent.
        queries, replies : of this round.
        """
        self._remember(queries)
        good, refused = self._readable(method, state, replies)
        for object_to in (self._implausible, lambda part: method.unusable(state, part),
                          self._contradictions):
            reasons = object_to(good) if good is not None and len(good) else []
            if reasons and good is not None:
                bad = [user for user, _ in reasons]
                good = good.take(np.flatnonzero(~np.isin(good.users, bad)))
            refused += reasons
        return good, refused

    def accept(self, replies: Batch) -> None:
        """Remember what is said in replies that the algorithm has used."""
        new = self._statements(replies)
        if new is not None:
            some = np.isfinite(new.values)
            self.said[replies.users[some]] = new.pack()[some]
        if replies.kind == "expand":
            self.heard[replies.users] = True

    def _remember(self, queries: Batch) -> None:
        n, users = self.federation.n_users, queries.users
        for name, rows in queries.arrays.items():
            sent = self.sent.get(name, np.zeros((n, *rows.shape[1:]))).copy()
            sent[users] = rows
            self.sent[name] = sent
        if queries.kind == "expand":
            anchors = np.full((n, self.federation.dim), np.nan)
            anchors[:] = self.sent.get("anchor", anchors)
            anchors[users] = np.nan
            if "anchor" in queries.ragged:
                part = queries.ragged["anchor"]
                anchors[users[part.owner]] = part.values
            self.sent["anchor"] = anchors

    def _readable(self, method: Method, state: State,
                  replies: Replies) -> tuple[Batch | None, Refusals]:
        """All replies to open queries as one batch, and the senders of invalid replies."""
        federation = self.federation
        refused = [(user, reason) for user, reason in replies.refused if not state.aside[user]]
        singles: dict[int, Message] = {}
        for user, message in replies.singles:
            if not (isinstance(user, (int, np.integer)) and 0 <= user < federation.n_users):
                refused.append((int(user) if isinstance(user, (int, np.integer)) else -1,
                                "a reply came from a user who is not part of the federation"))
            elif state.aside[user] or state.asked[user] < 0 or user in singles \
                    or state.asked[user] != message.round:
                log.info("round %d: ignored an unexpected reply of user %r to round %d",
                         state.round, federation.names[user], message.round)
            else:
                reason = misfit(message, method.kind, federation.dim)
                if reason is None:
                    singles[int(user)] = message
                else:
                    refused.append((int(user), reason))
        parts = [gather(list(singles.items()))] if singles else []
        for batch in filter(len, replies.batches):
            wanted = ~state.aside[batch.users] & (state.asked[batch.users] == batch.round)
            wanted &= (batch.round >= 0) & ~np.isin(batch.users, list(singles))
            finite = plausible.finite(batch, MAY_BE_INFINITE)
            refused += [(int(user), "it holds numbers that are not finite")
                        for user in batch.users[wanted & ~finite]]
            parts.append(batch.take(np.flatnonzero(wanted & finite)))
        return merge([part for part in parts if len(part)]), refused

    def _implausible(self, replies: Batch) -> Refusals:
        """Replies that cannot be true, whatever the data."""
        if replies.kind == "expand":
            # A model that is much too far away has a loss beyond all bounds. The algorithm rejects
            # such a reply, not its user.
            far = self.heard[replies.users] & (replies.arrays["value"] > plausible.LARGEST)
            if "share" in replies.ragged:
                far[replies.ragged["share"].owner] = False
            replies = replies.take(np.flatnonzero(~far)) if far.any() else replies
        return plausible.objections(replies)

    def _statements(self, replies: Batch) -> Statements | None:
        """What replies say of the users' losses; None if they say nothing of it."""
        users, kind = replies.users, replies.kind
        sent = {name: rows[users] for name, rows in self.sent.items()}
        if kind == "gradient":
            value, gradient, curvature, stiffness = (
                replies.arrays[name] for name in ("value", "gradient", "curvature", "stiffness"))
            return Statements(sent["model"], value, gradient, np.maximum(curvature, stiffness))
        if kind == "expand":
            at, share = sent["model"].copy(), replies.ragged.get("share")
            if share is not None:  # on the way from the anchor; from zero if there was none
                part = share.owner
                at[part] = between(np.nan_to_num(sent["anchor"][part]), at[part], share.values)
            return Statements(at, replies.arrays["value"], replies.arrays["gradient"],
                              traces_of(replies, self.federation.dim))
        if kind == "prox":  # the optimality condition of the step is grad f = t (centre - point)
            points, t = replies.arrays["point"], sent["t"]
            gradients = t[:, None] * (sent["centre"] - points)
            if not plausible.exact_steps(self.federation.loss):
                gradients[:] = np.nan
            return Statements(points, replies.arrays["value"], gradients,
                              replies.arrays["curvature"] + t)
        if kind == "pdmm" and "model" in replies.ragged and "stiffness" not in replies.ragged:
            n, dim = len(users), self.federation.dim
            points, silent = np.full((n, dim), np.nan), np.full((n, dim), np.nan)
            values, curvatures = np.full((2, n), np.nan)
            who = replies.ragged["model"].owner
            points[who], values[who], curvatures[who] = (replies.ragged[name].values for name in
                                                      ("model", "value", "curvature"))
            return Statements(points, values, silent, curvatures)
        return None

    def _contradictions(self, replies: Batch) -> Refusals:
        """Users who contradict what they said before, or the least value of the loss."""
        users, least = replies.users, self.federation.loss.least
        if replies.kind == "certify":
            low = replies.arrays["value"] < least - 1e-9 * abs(least)
            return [(int(user), "its loss and its conjugate contradict each other or its earlier "
                                "replies") for user in users[self._beyond(replies) | low]]
        new = self._statements(replies)
        if new is None:
            return []
        low = new.values < least - 1e-9 * abs(least)
        wrong = plausible.contradict(Statements.unpack(self.said[users]), new)
        return [(int(user), f"its loss is below {least:g}, which no data give")
                for user in users[low]] + [
            (int(user), "it contradicts its earlier replies: no convex loss has both")
            for user in users[wrong & ~low]]

    def _beyond(self, replies: Batch) -> Any:
        """(n,) whose value or conjugate is none of a loss that it described before."""
        users, old = replies.users, Statements.unpack(self.said[replies.users])
        values, conjugates, rounding = (replies.arrays[name]
                                        for name in ("value", "conjugate", "rounding"))
        models, slopes, about = (self.sent[name][users] for name in ("model", "slope", "anchor"))
        silent = np.full(len(users), np.nan)
        wrong = plausible.contradict(old, Statements(models, values, np.full_like(about, np.nan),
                                                     silent))
        for at, value in ((models, values), (old.points, old.values)):
            products = np.einsum("nd,nd->n", slopes, at - about)
            wrong |= plausible.beyond_conjugate(value, conjugates, products, rounding)
        return wrong

    # -- estimates and certificates

    def without_dominant(self, method: Method, state: State) -> float:
        """The estimate of a method in which no single user counts for much."""
        error = method.estimate(state)
        if not np.isfinite(error):
            return np.inf
        shares = method.shares(state)
        total = float(shares.sum())
        return error * (float(plausible.capped(shares).sum()) / total) if total > 0 else error

    def suspects(self, judgement: Judgement, active: Array) -> None:
        """Remember who has the largest part of a gap."""
        self.suspect = np.array([np.flatnonzero(active)[judgement.worst],
                                 judgement.own[judgement.worst], judgement.share,
                                 judgement.without_worst])

    def blame(self, judgement: Judgement, state: State, tol: float) -> Refusals:
        """The user because of whom alone one certificate after the other fails, by as much as
        before; nobody if there is none.
        """
        failed = judgement.certificate.relative_gap > _FAILED * tol
        user, (own, share, without) = int(self.suspect[0]), self.suspect[1:]
        blamed = np.zeros_like(self.blamed)
        if failed and _ALONE * max(without, tol) < share and without <= _ALONE * tol:
            count, before, since = self.blamed[user]
            again = count > 0 and own >= 0.5 * before
            blamed[user] = (count + 1, min(own, before), since) if again else (1, own, state.round)
        federation, count = self.federation, int(blamed[user, 0])
        self.blamed = blamed
        waited = (state.round - blamed[user, 2]) \
            * federation.participation.share(federation.n_users)
        if count < _BLAMED or waited < _PATIENCE:
            return []
        self.blamed = np.zeros_like(blamed)
        return [(user, f"{count} certificates in a row failed because of its replies alone: its "
                       f"part of the gap stays at {own:.1e}, and without it the relative gap is "
                       f"{without:.1e}")]
