"""What a user answers in a private federation: releases with noise, and that it has finished its
model at home.

A release is made once: asked again, by a retry or by another run, the user repeats the same bytes
from its ledger (`coterie.federated.private.ledger`), which costs nothing. The model that is
finished at home stays there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from coterie.base.errors import InvalidInput, Refused
from coterie.base.types import Array
from coterie.data.users import Users
from coterie.federated.private.home import finish
from coterie.federated.private.ledger import NodeLedger
from coterie.federated.private.release import Draw, ReleaseQuestion
from coterie.federated.protocol.messages import Batch, Fields, Message, Ragged, square
from coterie.losses import Loss, Samples

#: The kinds of questions of a private federation.
PRIVATE = ("release", "home")


class Releasing(NamedTuple):
    """Users who release.

    Parameters
    ----------
    users : their rows, in the units given.
    keeper : the ledger of their releases; without one there are none.
    experiment : a seed of the noise, for experiments; None for the operating system.
    """

    users: Users
    keeper: NodeLedger | None = None
    experiment: int | None = None


def question_of(fields: Fields, n_features: int) -> ReleaseQuestion:
    """The question that a query asks.

    Raises
    ------
    InvalidInput : it asks none.
    """
    return ReleaseQuestion(stage=int(fields["stage"]),
                           mu=float(fields["mu"]), per_user=bool(fields["settings"][0]),
                           centre=np.asarray(fields["centre"], dtype=float),
                           scale=np.asarray(fields["scale"], dtype=float), n_features=n_features)


def query_of(question: ReleaseQuestion) -> dict[str, Array]:
    """The fields of the query that asks this question."""
    return {"stage": np.array(question.stage), "mu": np.array(question.mu),
            "settings": np.array([int(question.per_user)]), "centre": question.centre,
            "scale": question.scale}


def release(holder: Releasing, user: int, question: ReleaseQuestion) -> bytes:
    """What one user releases, the same bytes each time.

    Raises
    ------
    Refused : its budget does not allow it.
    """
    users, keeper, experiment = holder
    if keeper is None:
        raise Refused("the owner of the node has set no privacy budget (budget-epsilon and "
                      "budget-delta)")
    own = users.take([user])

    def make() -> bytes:
        seed = None if experiment is None else [experiment, question.stage, user]
        return np.ascontiguousarray(question.noisy(question.exact(own)[0], Draw(seed)),
                                    dtype="<f8").tobytes()

    return keeper.release(users.names[user], question.key(users, user), question.mu, make)


def answer_release(holder: Releasing, queries: Batch) -> dict[str, Array]:
    """The noisy numbers of each user."""
    question = question_of(queries.shared, holder.users.n_features)
    return {"released": np.stack([np.frombuffer(release(holder, user, question), dtype="<f8")
                                  for user in queries.users.tolist()])}


def objection_to(holder: Releasing, user: int, query: Message) -> str:
    """Why a release is not made, or an empty text; where there is none, it is in the ledger."""
    try:
        release(holder, user, question_of(query.arrays, holder.users.n_features))
    except (Refused, InvalidInput, IndexError, ValueError) as error:
        return error.reason if isinstance(error, Refused) else f"it cannot be released: {error}"
    return ""


def answer_home(loss: Loss, samples: Samples, memory: Mapping[str, Ragged],
                queries: Batch) -> tuple[dict[str, Array], dict[str, Ragged]]:
    """That the users have what they need; and their models, which stay with them."""
    users, dim = samples.users.data, samples.dim
    covariances = square(np.atleast_2d(queries.shared["covariance"]), dim)
    models = np.zeros((users.n_users, dim))
    models[queries.users] = finish(loss, users.take(queries.users),
                                   np.asarray(queries.arrays["centre"]),
                                   covariances, float(queries.shared["noise"]))
    known = np.zeros(users.n_users, dtype=np.int64)
    known[queries.users] = 1
    if "home" in memory:  # of users who were asked before
        before = memory["home"]
        models[before.owner[known[before.owner] == 0]] = before.values[known[before.owner] == 0]
        known[before.owner] = 1
    return ({"who": np.zeros(len(queries), dtype=np.int64)},
            {"home": Ragged.of(models[known > 0], known)})
