"""A newcomer's answer to "join": which group of a finished run fits its rows best, and its model in
it.

The server sends what users of the run share: the centres of the groups, in the units agreed, and
how far models may be from their centre, if they are personal. The newcomer compares

    f(centre_k),      f its own loss, of personal models with the best model around centre_k

over all groups k and takes the smallest. The model stays with the newcomer unless its owner returns
it.
"""

from __future__ import annotations

import numpy as np

from coterie.base.types import Array
from coterie.federated.protocol.messages import Batch, Ragged, square
from coterie.fitting.kinds import group_centres
from coterie.losses import Loss, Personal, Samples


def answer_join(loss: Loss, samples: Samples, queries: Batch) -> tuple[dict[str, Array],
        dict[str, Ragged]]:
    """The group of each newcomer, -1 where users of the run share nothing, and its model.

    Parameters
    ----------
    loss, samples : of the users of a node.
    queries : to some of them.
    """
    users, centres = queries.users, np.asarray(queries.shared["models"])
    newcomers = samples.users.data.take(users)
    if "covariance" in queries.shared:
        loss = Personal(loss, covariance=square(queries.shared["covariance"], samples.dim)[0],
                        scale=float(queries.shared["noise"]) / np.maximum(newcomers.counts, 1))
    samples, n = loss.prepare(newcomers), len(users)
    if len(centres):
        shape = (n, samples.dim)
        groups = np.stack([loss.values(samples, np.broadcast_to(centre, shape))
                           for centre in centres]).argmin(axis=0)
        models = loss.own_models(samples, centres[groups])
    else:  # everyone has a model of its own rows
        groups, models = np.full(n, -1), group_centres(loss, samples, np.arange(n), "users")
    return {"who": groups.astype(np.int64)}, \
        {"model": Ragged.of(models, np.ones(n, dtype=np.int64))}
