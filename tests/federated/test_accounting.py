"""What releases cost, against dp-accounting 0.6.0 (values computed with it, because it does not live beside Flower)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.base.errors import InvalidInput
from coterie.federated.private.policy import composed, delta_of, epsilon_of, mu_of

# epsilon, delta and the noise over the sensitivity: dp_accounting.gaussian_mechanism.get_sigma_gaussian
SIGMAS = [(0.1, 0.001, 17.40439620303121), (0.5, 1e-06, 8.057618480725024), (1, 1e-05, 3.7306316348159374),
          (2, 0.001, 1.4452391609297837), (4, 1e-05, 1.0811618495202397), (6, 0.001, 0.5983729551360795),
          (8, 1e-05, 0.6002290721989517), (20, 1e-08, 0.3437766670052192)]
# noises that are composed, and epsilon and delta of the composition of their privacy loss distributions
COMPOSED = [((2.0, 3.0), 0.5, 0.08529981882350682), ((2.0, 3.0), 2.0, 0.0001794142820437172),
            ((1.5, 4.0, 0.9), 0.5, 0.36419299681353096), ((1.5, 4.0, 0.9), 2.0, 0.0867132346058184),
            ((10.0,) * 7, 0.5, 0.0038298241037042252)]
EPSILONS = [((2.0, 3.0), 2.4491657788112593), ((1.5, 4.0, 0.9), 6.054959711989698), ((10.0,) * 7, 0.9857704788084326)]


@pytest.mark.parametrize(("epsilon", "delta", "sigma"), SIGMAS)
def test_the_noise_is_that_of_dp_accounting(epsilon, delta, sigma):
    assert 1 / mu_of(epsilon, delta) == pytest.approx(sigma, rel=1e-6)
    assert epsilon_of(1 / sigma, delta) == pytest.approx(epsilon, rel=1e-6)


@pytest.mark.parametrize(("sigmas", "epsilon", "delta"), COMPOSED)
def test_releases_compose_as_in_dp_accounting(sigmas, epsilon, delta):
    assert delta_of(epsilon, composed(1 / sigma for sigma in sigmas)) == pytest.approx(delta, rel=1e-6)


@pytest.mark.parametrize(("sigmas", "epsilon"), EPSILONS)
def test_the_epsilon_of_a_composition_is_that_of_dp_accounting(sigmas, epsilon):
    assert epsilon_of(composed(1 / sigma for sigma in sigmas), 1e-5) == pytest.approx(epsilon, rel=1e-6)


def test_a_wrong_composition_is_seen():
    sigmas, epsilon, delta = COMPOSED[0]
    assert delta_of(epsilon, sum(1 / sigma for sigma in sigmas)) != pytest.approx(delta, rel=1e-2)


@given(st.floats(0.01, 50.0), st.floats(1e-12, 0.3))
def test_the_noise_keeps_the_promise_and_is_not_larger_than_needed(epsilon, delta):
    mu = mu_of(epsilon, delta)
    assert delta_of(epsilon, mu) <= delta < delta_of(epsilon, mu * (1 + 1e-6))
    assert delta_of(epsilon_of(mu, delta), mu) <= delta


@given(st.floats(0.05, 5.0), st.floats(0.05, 4.0))
def test_delta_is_the_largest_advantage_of_an_observer(mu, epsilon):
    """sup over sets of P(set | one) - e^epsilon P(set | other), which half lines attain (Neyman and Pearson)."""
    thresholds = np.linspace(-12, 12, 4001)
    tails = [0.5 * math.erfc(t / math.sqrt(2)) for t in (thresholds - mu).tolist()]
    others = [0.5 * math.erfc(t / math.sqrt(2)) for t in thresholds.tolist()]
    best = max(a - math.exp(epsilon) * b for a, b in zip(tails, others, strict=True))
    assert best <= delta_of(epsilon, mu) + 1e-12
    assert best == pytest.approx(delta_of(epsilon, mu), rel=1e-3, abs=1e-9)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 1e-5), (-1.0, 1e-5), (math.nan, 1e-5), (math.inf, 1e-5),
                                                (1.0, 0.0), (1.0, 1.0), (1.0, -1e-5), (1.0, math.nan)])
def test_what_is_no_budget_is_refused(epsilon, delta):
    with pytest.raises(InvalidInput, match=r"epsilon|delta"):
        mu_of(epsilon, delta)


def discrete_delta(epsilon: float, s: int, shift: int) -> float:
    """That of integers with P(z) ~ exp(-z^2 / (2 s^2)) where one row moves the sum by `shift`: all of its terms."""
    first = math.floor(epsilon * s * s / shift - shift / 2) - 2
    z = np.arange(max(first, -40 * s), max(first, 0) + 40 * s, dtype=float)
    likely, other = (np.exp(-((z + at) ** 2) / (2.0 * s * s)) / (math.sqrt(2 * math.pi) * s) for at in (0, shift))
    return float(np.maximum(likely - math.exp(epsilon) * other, 0.0).sum())


@pytest.mark.parametrize("epsilon", [0.2, 1.0, 4.0])
@pytest.mark.parametrize("mu", [0.3, 1.0, 2.5])
def test_integers_keep_the_promise_of_normal_noise(epsilon, mu):
    """At the fineness of releases; on a coarse grid they do not."""
    s = 1 << 20
    assert discrete_delta(epsilon, s, round(mu * s)) <= delta_of(epsilon, mu * (1 + 2.0**-16)) * (1 + 1e-9)
    coarse = [discrete_delta(epsilon, 2, shift) / delta_of(epsilon, shift / 2) for shift in (1, 2, 3, 5)]
    assert max(coarse) > 1 + 2.0**-16  # the twin: with 2 instead of 2^20 steps
