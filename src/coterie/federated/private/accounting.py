"""What noisy releases cost: the Gaussian mechanism, exactly.

A release with sensitivity D (the largest change of the answer when one row is added or removed) and
normal noise of standard deviation tau has mu = D / tau. It is (epsilon, delta)-differentially
private if and only if

    delta >= delta_of(epsilon, mu) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)

(Balle and Wang 2018), and several releases are together one with mu = sqrt(sum of mu_k^2) (Dong,
Roth and Su 2022).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from coterie.base.errors import InvalidInput

_LARGEST = 1e6  # of mu and of epsilon that are searched


def delta_of(epsilon: float, mu: float) -> float:
    """The least delta for which a release with `mu` is (epsilon, delta)-differentially private.

    Example
    -------
    >>> round(delta_of(1.0, 0.5), 5)
    0.00683
    """
    from scipy.special import log_ndtr

    if mu <= 0:
        return 0.0
    first, second = float(log_ndtr(mu / 2 - epsilon / mu)), \
        epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    return math.exp(first) * -math.expm1(min(second - first, 0.0)) if math.isfinite(first) else 0.0


def mu_of(epsilon: float, delta: float) -> float:
    """The largest mu that is (epsilon, delta)-differentially private, from below.

    Raises
    ------
    InvalidInput : an epsilon that is not positive, or a delta outside (0, 1).

    Example
    -------
    >>> round(mu_of(4.0, 1e-5), 4)
    0.9249
    """
    check(epsilon, delta)
    low, high = 0.0, 1.0
    while delta_of(epsilon, high) <= delta and high < _LARGEST:
        low, high = high, 2 * high
    return _bisected(low, high, lambda mu: delta_of(epsilon, mu) <= delta)


def epsilon_of(mu: float, delta: float) -> float:
    """The least epsilon for which a release with `mu` is (epsilon, delta)-differentially private,
    from above.

    Example
    -------
    >>> round(epsilon_of(mu_of(4.0, 1e-5), 1e-5), 6)
    4.0
    """
    check(1.0, delta)
    if delta_of(0.0, mu) <= delta:
        return 0.0
    low, high = 0.0, 1.0
    while delta_of(high, mu) > delta:
        low, high = high, 2 * high
        if high > _LARGEST:
            return math.inf
    return -_bisected(-high, -low, lambda minus: delta_of(-minus, mu) <= delta)


def composed(mus: Iterable[float]) -> float:
    """The mu of several releases together."""
    return math.hypot(*mus)


def check(epsilon: float, delta: float) -> None:
    """Refuse what is no privacy budget."""
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise InvalidInput(f"epsilon must be a positive number, got {epsilon!r}",
                           remedy="Use for example 4")
    if not 0 < delta < 1:
        raise InvalidInput(f"delta must lie between 0 and 1, got {delta!r}", remedy="Use for "
                           "example 1e-5, less than one by the number of rows of a user")


def _bisected(low: float, high: float, good: Callable[[float], bool]) -> float:
    """The largest number in [low, high] for which a decreasing condition holds, from below."""
    while True:
        middle = 0.5 * (low + high)
        if not low < middle < high:
            return low
        low, high = (middle, high) if good(middle) else (low, middle)
