"""Wide models of users and of groups by L-BFGS: quick, and exact to a few digits, for what no
certificate judges.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from coterie.base.labels import group_sums
from coterie.base.machine import require_memory
from coterie.base.types import Array, Ints
from coterie.losses import Loss, Samples

_STEPS = 600  # most steps
_ACCURATE = 1e-5  # the gradient at the end, over that at zero
_MEMORY = 12  # steps that are remembered


class WideModels(NamedTuple):
    """The models of users around the centres of their groups."""

    models: Array  # (n_users, dim)
    centres: Array  # (n_groups, dim)


def fit_models(loss: Loss, samples: Samples, labels: Ints, weights: Array,
               prices: Array | None = None,
               start: Array | None = None, accurate: float = _ACCURATE) -> WideModels:
    """Models and centres.

        minimise over models x and centres z   sum_i weights_i (f_i(x_i) + prices_i / 2 ||x_i -
                                               z_i||^2)

    Without prices, all users of a group have the model of the group.

    Parameters
    ----------
    loss, samples : the loss, and what it prepared.
    labels : (n_users,) the groups.
    weights : (n_users,)
    prices : (n_users,) of leaving the centre; None where nobody does.
    start : (n_groups, dim) or (n_users, dim) where to begin.
    accurate : the gradient at which the search ends, over that at zero.

    Returns
    -------
    WideModels

    Raises
    ------
    InvalidInput : where there is not enough memory.
    """
    from scipy import optimize

    n_groups, dim = int(labels.max()) + 1, samples.dim
    shape = (n_groups if prices is None else len(labels), dim)
    require_memory(8.0 * shape[0] * dim * (2 * _MEMORY + 12), f"{shape[0]} models with {dim} "
        "coordinates",
                   "Use fewer columns, for example their principal components, or fewer users at a "
                   "time")
    sums = np.ones(n_groups) if prices is None else group_sums(weights * prices, labels, n_groups)

    def centres_of(x: Array) -> Array:
        assert prices is not None
        return group_sums((weights * prices)[:, None] * x, labels, n_groups) / sums[:, None]

    def evaluate(vector: Array) -> tuple[float, Array]:
        x = vector.reshape(shape)
        with np.errstate(over="ignore", invalid="ignore"):
            f, g, _ = loss.evaluate(samples, x[labels] if prices is None else x, 1)
            if prices is None:
                return float(weights @ f), group_sums(weights[:, None] * g, labels,
                                                      n_groups).ravel()
            away = x - centres_of(x)[labels]
            value = weights @ (f + 0.5 * prices * np.einsum("nd,nd->n", away, away))
            return float(value), (weights[:, None] * (g + prices[:, None] * away)).ravel()

    begin = np.zeros(shape) if start is None else start if len(start) == shape[0] else start[labels]
    level = float(np.abs(evaluate(np.zeros(shape).ravel())[1]).max())
    found = optimize.minimize(evaluate, begin.ravel(), jac=True, method="L-BFGS-B", options={
        "maxiter": _STEPS, "maxfun": 2 * _STEPS, "maxcor": _MEMORY, "gtol": accurate * level,
            "ftol": 1e-13})
    x = found.x.reshape(shape)
    return WideModels(x[labels], x) if prices is None else WideModels(x, centres_of(x))
