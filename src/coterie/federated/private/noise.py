"""Integers from the discrete Gaussian distribution, exactly, from the entropy of the system.

    P(Z = z)  proportional to  exp(-z^2 / (2 s^2)),      z integer,  s a positive integer

by rejection from a discrete Laplace distribution (Canonne, Kamath and Steinke 2020). Every decision
is one about random integers, so no number is ever rounded: probabilities are those of the formula
to the last bit, in the tails as well. A Bernoulli number of exp(-g), 0 <= g <= 1, is whether the
first k at which a Bernoulli number of g / k is 0 is odd; and one of a product of probabilities is
whether all of them are 1. Arrays are drawn at once: each step goes on with those not yet decided.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from coterie.base.errors import require
from coterie.base.types import Flags, Ints

_LARGEST = 1 << 55  # of s
_Trial = Callable[[Ints], Flags]  # Bernoulli numbers for these positions


def discrete_normal(n: int, s: int) -> Ints:
    """(n,) independent integers from the discrete Gaussian distribution with parameter s.

    Parameters
    ----------
    n : how many.
    s : nearly the standard deviation; a positive integer.

    Example
    -------
    >>> bool(abs(discrete_normal(1000, 50)).max() < 1000)
    True
    """
    require(0 < s < _LARGEST, f"the noise must be a positive integer, got {s!r}",
            "Ask for a larger mu")
    out, left = np.zeros(n, dtype=np.int64), np.arange(n)
    while left.size:
        y, good = _laplace(left.size, s)
        # Accept with exp(-(|y| - s)^2 / (2 s^2)).
        good[good] = _accepted(np.abs(y[good]), s)
        out[left[good]] = y[good]
        left = left[~good]
    return out


def _laplace(n: int, s: int) -> tuple[Ints, Flags]:
    """(n,) integers, and which of them are from the discrete Laplace distribution with scale s."""
    # |y| = u + s v with u below s, accepted with exp(-u / s), and v geometric with exp(-1).
    u = _below(n, s)
    good = _bernoulli_exp(n, lambda at: _below(at.size, s) < u[at])
    v, more = np.zeros(n, dtype=np.int64), np.flatnonzero(good)
    while more.size:
        more = more[_bernoulli_exp(more.size, lambda at: np.ones(at.size, dtype=bool))]
        v[more] += 1
    negative = _below(n, 2) == 1
    y = u + s * v
    good &= ~(negative & (y == 0))  # zero has one sign
    return np.where(negative, -y, y), good


def _accepted(size: Ints, s: int) -> Flags:
    """Bernoulli numbers of exp(-(size - s)^2 / (2 s^2)), in factors whose exponents are at most 1.

    With size - s = m s + u, 0 <= u < s, the exponent is m^2 / 2 + m u / s + u^2 / (2 s^2); below s
    it is w^2 / (2 s^2) with w = s - size.
    """
    m, u = np.divmod(size - s, s)
    u = np.where(m < 0, s - size, u)
    m = np.maximum(m, 0)

    def half(at: Ints) -> Flags:
        return _below(at.size, 2) == 1

    good = _bernoulli_exp(len(size), lambda at: (_below(at.size, s) < u[at])
                          & (_below(at.size, s) < u[at]) & half(at))
    good = _all_of(good, m, lambda which: lambda at: _below(at.size, s) < u[which[at]])
    return _all_of(good, m * m, lambda which: half)


def _all_of(good: Flags, times: Ints, trial: Callable[[Ints], _Trial]) -> Flags:
    """Which stay good after so many Bernoulli numbers of exp(-g), for each of them g by `trial`."""
    good, left = good.copy(), times.copy()
    while (which := np.flatnonzero(good & (left > 0))).size:
        good[which] = _bernoulli_exp(which.size, trial(which))
        left[which] -= 1
    return good


def _bernoulli_exp(n: int, trial: _Trial) -> Flags:
    """(n,) Bernoulli numbers of exp(-g), where `trial` gives Bernoulli numbers of g."""
    odd, left, k = np.zeros(n, dtype=bool), np.arange(n), 1
    while left.size:
        goes_on = trial(left) & (_below(left.size, k) == 0)  # Bernoulli numbers of g / k
        odd[left[~goes_on]] = k % 2 == 1
        left, k = left[goes_on], k + 1
    return odd


def _below(n: int, most: int) -> Ints:
    """(n,) integers from 0 to most - 1, each as likely as the others."""
    out, left = np.zeros(n, dtype=np.int64), np.arange(n)
    mask = np.uint64((1 << (most - 1).bit_length()) - 1)
    while left.size and most > 1:
        drawn: npt.NDArray[np.uint64] = np.frombuffer(os.urandom(8 * left.size), "<u8") & mask
        good = drawn < np.uint64(most)
        out[left[good]] = drawn[good].astype(np.int64)
        left = left[~good]
    return out
