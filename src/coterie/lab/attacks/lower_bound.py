"""What epsilon a release has at least, by telling two neighbouring data sets apart.

The release is drawn many times with a row and without it. The first half of the draws says how to
tell them apart (the direction in which the means differ, and a threshold on it), the second half
how often that fails: false positives alpha and false negatives beta, each with an upper confidence
bound (Clopper and Pearson). Then

    epsilon >= log((1 - delta - beta) / alpha)                 for every release (Jagielski et al.
                                                               2020)
    mu      >= Phi^-1(1 - alpha) - Phi^-1(beta)                for one with normal noise (Nasr et
            al. 2023)

and the second, which is tight, gives epsilon by `coterie.federated.private.accounting`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from coterie.base.errors import InvalidInput
from coterie.base.types import Array
from coterie.federated.private.accounting import check, epsilon_of

_DRAWS = 4000


class EpsilonBound(NamedTuple):
    """A lower bound on epsilon, which holds with the confidence named.

    Parameters
    ----------
    epsilon : at least, for a release with normal noise.
    any_release : at least, whatever the noise.
    mu : sensitivity by noise, at least.
    delta : at which epsilon is meant.
    draws : of each of the two data sets.
    confidence : that the bounds hold.
    """

    epsilon: float
    any_release: float
    mu: float
    delta: float
    draws: int
    confidence: float


def epsilon_lower_bound(release: Callable[[Any, np.random.Generator], Array], data: Any,
                        neighbour: Any, *,
                        delta: float, direction: Array | None = None, draws: int = _DRAWS,
                        confidence: float = 0.95,
                        seed: int = 0) -> EpsilonBound:
    """The least epsilon of a release that lets two neighbouring data sets be told apart as well as
    they are.

    Parameters
    ----------
    release : what is sent of data, with noise from the generator given.
    data, neighbour : two data sets of one user that differ in one row (or entirely, where the unit
        is the user).
    delta : at which epsilon is meant.
    direction : in which releases of the two differ, where it is known; otherwise it is learned from
        the draws.
    draws : releases of each of the two; the more, the nearer the bound.
    confidence : that the bounds hold.
    seed : of the noise.

    Raises
    ------
    InvalidInput : a delta, a confidence or a number of draws that cannot be used.

    Example
    -------
    >>> def release(rows, rng):  # a sum of numbers between 0 and 1, with mu = 1
    ...     return np.array([rows.sum() + rng.standard_normal()])
    >>> bound = epsilon_lower_bound(release, np.ones(3), np.ones(4), delta=1e-5)
    >>> 3.0 < bound.epsilon < epsilon_of(1.0, 1e-5) < 4.5
    True
    """
    check(1.0, delta)
    if draws < 40 or not 0.5 < confidence < 1:
        raise InvalidInput("at least 40 draws and a confidence in (0.5, 1) are needed, got "
                           f"{draws!r} and "
                           f"{confidence!r}", remedy="Leave them out")
    rng = np.random.default_rng(seed)
    samples = [np.stack([np.asarray(release(one, rng), dtype=float).ravel() for _ in range(draws)])
               for one in (data, neighbour)]
    half = draws // 2
    learned, judged = [part[:half] for part in samples], [part[half:] for part in samples]
    change = learned[1].mean(axis=0) - learned[0].mean(axis=0) if direction is None \
        else np.asarray(direction).ravel()
    scale = np.concatenate([part - part.mean(axis=0) for part in learned]).std(axis=0)
    change = change / np.where(scale > 0, scale, 1e-12) ** 2
    if float((learned[1] @ change).mean()) < float((learned[0] @ change).mean()):
        change = -change
    threshold = 0.5 * (float((learned[0] @ change).mean()) + float((learned[1] @ change).mean()))
    alpha = _upper(int((judged[0] @ change > threshold).sum()), draws - half, confidence)
    beta = _upper(int((judged[1] @ change <= threshold).sum()), draws - half, confidence)
    return _bounds(alpha, beta, delta, draws, confidence)


def _bounds(alpha: float, beta: float, delta: float, draws: int, confidence: float) -> EpsilonBound:
    from scipy.stats import norm

    mu = max(float(norm.isf(alpha) - norm.ppf(beta)), 0.0) if max(alpha, beta) < 1 else 0.0
    general = max((math.log((1 - delta - b) / a) for a,
                   b in ((alpha, beta), (beta, alpha)) if b < 1 - delta),
                  default=0.0)
    return EpsilonBound(epsilon_of(mu, delta) if mu > 0 else 0.0, max(general, 0.0), mu, delta,
                        draws, confidence)


def _upper(count: int, n: int, confidence: float) -> float:
    """The upper end of the Clopper-Pearson interval of a share; two of them hold together with this
    confidence.
    """
    from scipy.stats import beta

    return 1.0 if count >= n else float(beta.ppf(1 - (1 - confidence) / 2, count + 1, n - count))
