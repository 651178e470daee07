"""A model finished at home: from what the federation found in noisy summaries, and the user's exact
rows.

The server sends a centre c and covariances C of models around it. At home the user has its m rows,
with mean loss f and dispersion s, and takes the model

    x = argmin  m f(x) / s + 1/2 (x - c)' (t C)^-1 (x - c)

with the C, the t, the length of c (of classes, whose centres are least certain in this; its
direction is kept) and the s (of numbers: what is sent includes how models differ) that its own rows
find most likely (Laplace's approximation of the evidence), among them t = 0, the centre itself:

    log evidence = - m f(x) / s - m/2 log s - 1/2 (x - c)' (t C)^-1 (x - c) - 1/2 log det(I + m/s t
    C H(x))

Nothing of this leaves the user.
"""

from __future__ import annotations

import numpy as np

from coterie.base.types import Array
from coterie.data.users import Users
from coterie.groups.dispersion import without_ridge
from coterie.losses import Loss, Personal, Samples, Squared

_LENGTHS = (1.0, 0.5, 0.25)  # of centres of classes that are tried
_NOISES = tuple(4.0**-k for k in range(6))  # s of numbers that are tried, over what is sent
_SCALES = tuple(4.0**k for k in range(-5, 4))  # t that are tried


def finish(loss: Loss, users: Users, centres: Array, covariances: Array,
           dispersion: float) -> Array:
    """(n_users, dim) the models finished at home.

    Parameters
    ----------
    loss : of the users' models; its ridge does not count, because the centre takes its place.
    users : their exact rows, in the units of the models.
    centres : (n_users, dim) what the server sent.
    covariances : (k, dim, dim) of models around centres.
    dispersion : s at most, the noise of a target; 1 for classes.
    """
    plain = without_ridge(loss)
    numbers, samples = isinstance(plain, Squared), plain.prepare(users)
    best, most = centres.copy(), np.full(users.n_users, -np.inf)
    at_centres = plain.values(samples, centres)
    for noise in [dispersion * share for share in _NOISES] if numbers else [dispersion]:
        rows, constant = users.counts / noise, -0.5 * numbers * users.counts * np.log(noise)
        better = constant - rows * at_centres > most
        best[better], most[better] = centres[better], (constant - rows * at_centres)[better]
        for length in (1.0,) if numbers else _LENGTHS:
            around = centres * np.append(np.full(centres.shape[1] - 1, length), 1.0)
            for covariance in covariances:
                for scale in _SCALES:
                    models, evidence = _around(plain, users, samples, rows, around,
                                               scale * covariance)
                    evidence += constant
                    better = (
                        np.isfinite(evidence) & (evidence > most) & np.isfinite(models).all(axis=1))
                    best[better], most[better] = models[better], evidence[better]
    return best


def _around(loss: Loss, users: Users, samples: Samples, rows: Array, centres: Array,
            covariance: Array) -> tuple[Array, Array]:
    """The best models around centres, and the evidence for centres and covariance."""
    eye = np.eye(len(covariance))
    covariance = covariance + 1e-12 * np.trace(covariance) * eye
    outer = Personal(loss, covariance=covariance, scale=1.0 / np.maximum(rows, 1e-12))
    models = outer.own_models(outer.prepare(users), centres)
    values, _, hessians = loss.evaluate(samples, models, 2)
    steps = models - centres
    price = np.einsum("nd,nd->n", steps, np.linalg.solve(covariance, steps.T).T)
    volume = np.linalg.slogdet(eye + rows[:, None, None] * (hessians @ covariance))[1]
    return models, -rows * values - 0.5 * price - 0.5 * volume
