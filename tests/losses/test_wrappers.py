"""A loss around another one: no loss of the package can be evaluated wrongly through a wrapper."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
import pytest
from support.problems import LOSS_NAMES, loss_for, users_for

import coterie as ct
from coterie.data.users import Participants
from coterie.losses import BlockLoss, Evaluation
from coterie.losses.curvature import Span
from coterie.losses.derived import Grouped, Quadratic, Remote, SpanQuadratic, Weighted


@dataclass(frozen=True, eq=False)
class Wrapped(ct.Loss):
    """3 f_i(x) + 1/2 ||x||^2, whatever the loss inside."""

    loss: ct.Loss

    def dim(self, users):
        return self.loss.dim(users)

    def prepare(self, users):
        return self.loss.prepare(users)

    def evaluate(self, samples, models, order=2, users=None):
        values, gradients, hessians = self.loss.evaluate(samples, models, order, users)
        return Evaluation(3 * values + 0.5 * (models**2).sum(axis=1),
                          3 * gradients + models if order > 0 else gradients,
                          3 * hessians + np.eye(samples.dim) if order > 1 else hessians)


class Forgetful(Wrapped):
    """A wrapper that does not say for which users."""

    def evaluate(self, samples, models, order=2, users=None):
        return super().evaluate(samples, models, order)


def custom() -> ct.Custom:
    """mean_j (<x, a_ij> - y_ij)^4 / 4 + 1/2 ||x||^2."""
    def residuals(x, a, y):
        return np.einsum("nmp,np->nm", a, x) - y

    return ct.Custom(value=lambda x, a, y, w: (w * residuals(x, a, y) ** 4).sum(axis=1) / 4 + 0.5 * (x**2).sum(axis=1),
                     gradient=lambda x, a, y, w: np.einsum("nm,nmp->np", w * residuals(x, a, y) ** 3, a) + x,
                     hessian=lambda x, a, y, w: np.einsum("nm,nmp,nmq->npq", 3 * w * residuals(x, a, y) ** 2, a, a)
                     + np.eye(x.shape[1]))


def quadratic(n_users: int = 9, dim: int = 3) -> Quadratic:
    rng = np.random.default_rng(5)
    roots = rng.standard_normal((n_users, dim, dim))
    return Quadratic(point=rng.standard_normal((n_users, dim)), value=rng.standard_normal(n_users),
                     gradient=rng.standard_normal((n_users, dim)), hessian=roots @ roots.swapaxes(1, 2))


def grouped() -> tuple[Grouped, Participants]:
    users, loss = users_for("logistic"), ct.Logistic(ridge=0.1)
    labels = np.array([0, 1, 2, 0, 3, 4, 1, 1, 0])
    clusters = Grouped(loss=loss, samples=loss.prepare(users), labels=labels)
    return clusters, clusters.groups


KINDS = [*LOSS_NAMES, "custom", "quadratic", "grouped", "personal", "weighted"]


def case(kind: str) -> tuple[ct.Loss, Participants]:
    if kind == "grouped":
        return grouped()
    if kind == "personal":
        return ct.Personal(ct.Logistic(ridge=0.1), np.array([0.5, 2.0, np.inf])), users_for("logistic")
    if kind == "weighted":
        return Weighted(loss=ct.Logistic(ridge=0.1), unit=2.5), users_for("logistic")
    if kind == "quadratic":
        return quadratic(), Participants(range(9))
    return (custom(), users_for("squared")) if kind == "custom" else (loss_for(kind), users_for(kind))


def differences(loss, samples, models, users):
    """Gradients and Hessians by central differences of values and of gradients."""
    h, steps = 1e-5, np.eye(samples.dim)
    ends = [[loss.evaluate(samples, models + s * h * step, 1, users) for s in (1, -1)] for step in steps]
    return (np.stack([(up.values - down.values) / (2 * h) for up, down in ends], axis=1),
            np.stack([(up.gradients - down.gradients) / (2 * h) for up, down in ends], axis=2))


def check_wrapper(wrapper: Wrapped, users: Participants) -> None:
    """Against differences, and against the loss inside, for everybody and for some in any order, even twice."""
    inner, samples = wrapper.loss, wrapper.prepare(users)
    n, d = samples.n_users, samples.dim
    everyone = 0.5 * np.random.default_rng(0).standard_normal((n, d))
    for chosen in (None, np.arange(n), np.arange(n)[::-1], np.array([n - 1, 0, 2]), np.array([1]), np.array([1, 3, 1]),
                   np.arange(0)):
        rows = np.arange(n) if chosen is None else chosen
        models = everyone[rows] + 0.1 * np.arange(len(rows))[:, None]
        values, gradients, hessians = wrapper.evaluate(samples, models, 2, chosen)
        slopes, curvatures = differences(wrapper, samples, models, chosen)
        np.testing.assert_allclose(gradients, slopes, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(hessians, curvatures, rtol=1e-4, atol=1e-4)
        for r, user in enumerate(rows):  # each by itself, among everybody
            alone = everyone.copy()
            alone[user] = models[r]
            among = inner.evaluate(samples, alone, 2)
            np.testing.assert_allclose(values[r], 3 * among.values[user] + 0.5 * (models[r] ** 2).sum(), rtol=1e-12)
            np.testing.assert_allclose(gradients[r], 3 * among.gradients[user] + models[r], rtol=1e-10, atol=1e-12)
            np.testing.assert_allclose(hessians[r], 3 * among.hessians[user] + np.eye(d), rtol=1e-10, atol=1e-12)
        for order in (0, 1):
            parts = wrapper.evaluate(samples, models, order, chosen)
            for part, full in zip(parts[: order + 1], (values, gradients), strict=False):
                np.testing.assert_array_equal(part, full)
    minimum = wrapper.local(samples)
    assert minimum.converged.all()
    assert np.abs(wrapper.gradients(samples, minimum.points)).max() < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_every_loss_can_be_wrapped(kind):
    loss, users = case(kind)
    check_wrapper(Wrapped(loss), users)
    check_wrapper(Wrapped(Wrapped(loss)), users)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrapper_that_forgets_the_users_is_caught(kind):
    loss, users = case(kind)
    with pytest.raises(AssertionError):
        check_wrapper(Forgetful(loss), users)


def test_every_kind_of_loss_is_among_them():
    def kinds(base):
        return {base}.union(*(kinds(kind) for kind in base.__subclasses__()))

    wrapped = {type(case(kind)[0]) for kind in KINDS} | {Remote, SpanQuadratic}  # which refuse, as tested below
    # Classes that examples of docstrings define there may still be in memory: their modules do not hold them.
    ready = {kind for kind in kinds(ct.Loss) if kind.__module__.startswith("coterie.losses.")
             and getattr(sys.modules[kind.__module__], kind.__name__, None) is kind
             and not kind.__abstractmethods__ and not kind.__name__.startswith("_")}
    assert ready == wrapped


def test_a_loss_without_data_cannot_be_evaluated_through_a_wrapper_either():
    users = users_for("logistic")
    wrapper = Wrapped(Remote(loss=ct.Logistic(), length=3))
    for order in (0, 1, 2):
        for chosen in (None, np.array([2, 0])):
            models = np.zeros((users.n_users if chosen is None else 2, 3))
            with pytest.raises(ct.Incompatible, match="with their users"):
                wrapper.evaluate(wrapper.prepare(users), models, order, chosen)


def test_a_loss_on_samples_without_blocks_is_refused():
    users = users_for("logistic")
    bare = Remote(loss=ct.Logistic(), length=3).prepare(users)
    with pytest.raises(ct.Incompatible, match="Prepare them with the loss"):
        ct.Logistic().evaluate(bare, np.zeros((9, 3)))
    with pytest.raises(ct.Incompatible, match="Prepare them with the loss"):
        ct.Logistic().lipschitz(bare)
    assert np.isfinite(ct.Logistic().lipschitz(ct.Logistic().prepare(users))).all()


def test_quadratic_functions_are_as_many_as_users():
    with pytest.raises(ct.InvalidInput, match="expected 9 users, one for each function, got 8"):
        quadratic().prepare(users_for("squared").take(np.arange(8)))
    assert quadratic().prepare(users_for("squared")).dim == 3


def test_a_loss_must_say_how_it_is_evaluated():
    class Nothing(ct.Loss):
        def dim(self, users):
            return 1

    class NoBlock(BlockLoss):
        def dim(self, users):
            return 1

    for kind, missing in ((Nothing, "evaluate"), (NoBlock, "evaluate_block")):
        with pytest.raises(TypeError, match=f"abstract method '?{missing}'?"):
            kind()


class Shifted(Wrapped):
    """A wrapper that takes the local coordinates of the loss inside for its own."""

    def coordinates(self, samples):
        return samples.frame


@pytest.mark.parametrize("wrapper", [Wrapped, Shifted])
@pytest.mark.parametrize("name", ["squared", "squared_distance", "logistic"])
def test_a_wrapper_is_in_coordinates_of_its_own(name, wrapper):
    """Data far from ordinary size give the loss inside local coordinates; what is added is not in them."""
    users = users_for(name, samples=15)
    users = ct.Users.from_arrays(1e4 * users.features + 3e4, users.targets, users.owner)
    loss = wrapper(loss_for(name))
    samples = loss.prepare(users)
    assert samples.frame is not None
    models = 1e-4 * np.random.default_rng(0).standard_normal((samples.n_users, samples.dim))
    values, slopes, _ = loss.evaluate(samples, models, 1)
    attained = (slopes * models).sum(axis=1) - values  # max_x <slopes, x> - f(x), since slopes are the gradients
    bounds = loss.dual_bounds(samples, slopes, models)
    right = np.abs(bounds.values - attained) <= bounds.rounding + 1e-9 * np.abs(attained)
    assert right.all() == (wrapper is Wrapped)  # twin


def test_hessians_that_are_operators_are_refused_through_a_wrapper():
    span = Span(np.eye(3)[None, :1], np.ones((1, 1, 1)), np.full((1, 1), 3.0), np.ones(1), np.ones(1))
    loss = SpanQuadratic(point=np.zeros((1, 3)), value=np.ones(1), gradient=np.ones((1, 3)), span=span)
    wrapper, x = Wrapped(loss), np.array([[1.0, 2.0, 3.0]])
    samples = wrapper.prepare(Participants(["ann"]))
    values, gradients, _ = wrapper.evaluate(samples, x, 1)
    np.testing.assert_allclose(gradients, [[3 * (1 + 4 * 1.0) + 1, 3 * (1 + 2.0) + 2, 3 * (1 + 3.0) + 3]])
    np.testing.assert_allclose(values, 3 * (1 + 6 + 0.5 * (4 + 4 + 9)) + 0.5 * 14)
    with pytest.raises(ct.Incompatible, match="operators"):
        wrapper.evaluate(samples, x, 2)
