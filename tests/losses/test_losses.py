"""Losses: derivatives, bounds, conjugates, conic forms and targets, on every loss of the table."""

from __future__ import annotations

import doctest
import warnings
from dataclasses import dataclass
from typing import ClassVar

import cvxpy as cp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.problems import LOSS_NAMES, loss_for, users_for

import coterie as ct
from coterie.base.labels import sum_zero_basis
from coterie.datasets import clustered

LINEAR = [name for name in LOSS_NAMES if issubclass(ct.LOSSES[name], ct.LinearLoss)]


@pytest.mark.parametrize("seed", range(3))
def test_every_loss_keeps_the_rules(loss_name, seed):
    ct.check_loss(loss_for(loss_name), users_for(loss_name, seed=seed), seed=seed)


@pytest.mark.parametrize("options", [{"intercept": False}, {"ridge": 0.0}, {"ridge": 0.5},
                                     {"ridge": 0.5, "penalize_intercept": True}])
@pytest.mark.parametrize("name", [*LINEAR, "multinomial"])
def test_linear_losses_keep_the_rules_with_other_settings(name, options):
    ct.check_loss(loss_for(name, **options), users_for(name, samples=20), seed=1)


@dataclass(frozen=True, kw_only=True)
class WrongSlope(ct.Squared):
    def slope(self, t, y):
        return 1.01 * (t - y)


@dataclass(frozen=True, kw_only=True)
class WrongCurvature(ct.Logistic):
    def curvature(self, t, y):
        return 1.1 * super().curvature(t, y)


@dataclass(frozen=True, kw_only=True)
class WrongBound(ct.SquaredHinge):
    max_curvature: ClassVar[float] = 0.5


@dataclass(frozen=True, kw_only=True)
class NotConvex(ct.Squared):
    def value(self, t, y):
        return np.sin(t)

    def slope(self, t, y):
        return np.cos(t)

    def curvature(self, t, y):
        return np.abs(np.sin(t))


@dataclass(frozen=True, kw_only=True)
class NeighbourDependent(ct.Squared):
    def value(self, t, y):
        return 0.5 * (t - y) ** 2 + 1e-9 * len(t)


@pytest.mark.parametrize(("loss", "complaint"), [
    (WrongSlope(), "gradient"), (WrongCurvature(), "Hessian"), (WrongBound(), "lipschitz"),
    (NotConvex(), "Hessian|subgradient|f\\(z\\)"), (NeighbourDependent(), "alone differs"),
])
def test_the_rules_can_be_broken(loss, complaint):
    family = "logistic" if isinstance(loss, ct.Logistic | ct.SquaredHinge) else "squared"
    with pytest.raises(AssertionError, match=complaint):
        ct.check_loss(loss, users_for(family, ragged=False))


def test_squared_hinge_is_the_papers_formula():
    users = users_for("squared_hinge", seed=3)
    loss = ct.SquaredHinge(ridge=1e-3)
    rng = np.random.default_rng(0)
    models = rng.standard_normal((users.n_users, 3))
    for i, got in enumerate(loss.values(loss.prepare(users), models)):
        rows = slice(users.offsets[i], users.offsets[i + 1])
        a, labels, (w, b) = users.features[rows], users.targets[rows], (models[i, :2], models[i, 2])
        hinge = [max(0.0, 1 - label * (w @ point - b)) ** 2 for point, label in zip(a, labels, strict=True)]
        assert got == pytest.approx(1e-3 * (w @ w) / 2 + np.mean(hinge), rel=1e-13)
    assert (loss.predict(users.features, models[users.owner])
            == np.where((users.features * models[users.owner, :2]).sum(1) - models[users.owner, 2] >= 0, 1, -1)).all()


@pytest.mark.parametrize("name", [*LINEAR, "multinomial"])
def test_the_intercept_is_never_shrunk(name):
    users = users_for(name)
    weak, strong = loss_for(name, ridge=0.0), loss_for(name, ridge=10.0)
    samples = weak.prepare(users)
    rng = np.random.default_rng(0)
    models = rng.standard_normal((users.n_users, samples.dim))
    change = strong.gradients(samples, models) - weak.gradients(samples, models)
    outputs = samples.dim // (users.n_features + 1)
    assert np.abs(change[:, -outputs:]).max() < 1e-12
    np.testing.assert_allclose(change[:, :-outputs], 10.0 * models[:, :-outputs], rtol=1e-9)


def with_ones(users, sign):
    """The users with the intercept's column among the features."""
    column = np.full((users.n_samples, 1), sign)
    return ct.Users(np.hstack([users.features, column]), users.targets, users.offsets, users.names,
                    (*users.feature_names, "intercept"))


@pytest.mark.parametrize("name", [*LINEAR, "multinomial"])
def test_a_penalized_intercept_is_a_column_of_ones_under_the_ridge(name):
    users, settings = users_for(name), {"n_classes": 3} if name == "multinomial" else {}
    penalized = loss_for(name, ridge=0.3, penalize_intercept=True, **settings)
    column = loss_for(name, ridge=0.3, intercept=False, **settings)
    ours, theirs = penalized.prepare(users), column.prepare(with_ones(users, penalized.intercept_sign))
    assert ours.dim == theirs.dim
    models = np.random.default_rng(0).standard_normal((users.n_users, ours.dim))
    for got, expected in zip(penalized.evaluate(ours, models), column.evaluate(theirs, models), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-14, atol=1e-14)
    slopes = 0.5 * column.gradients(theirs, models)
    np.testing.assert_allclose(penalized.conjugates(ours, slopes), column.conjugates(theirs, slopes), rtol=1e-9)
    for bound in ("strong_convexity", "lipschitz"):
        np.testing.assert_allclose(getattr(penalized, bound)(ours), getattr(column, bound)(theirs), rtol=1e-9)
    assert (penalized.strong_convexity(ours) >= 0.3 * (1 - 1e-9)).all()
    x = cp.Variable(models.size)
    x.value = models.ravel()
    assert float(penalized.conic(cp, ours, x).value) == pytest.approx(penalized.values(ours, models).sum(), rel=1e-12)
    outputs = ours.dim // (users.n_features + 1)
    assert penalized.shrunk(ours.dim, outputs).tolist() == [1.0] * ours.dim


@pytest.mark.parametrize("name", [*LINEAR, "multinomial"])
def test_a_free_intercept_is_not_a_column_under_the_ridge(name):
    users, settings = users_for(name), {"n_classes": 3} if name == "multinomial" else {}
    free = loss_for(name, ridge=0.3, **settings)
    column = loss_for(name, ridge=0.3, intercept=False, **settings)
    ours, theirs = free.prepare(users), column.prepare(with_ones(users, free.intercept_sign))
    outputs = ours.dim // (users.n_features + 1)
    models = np.random.default_rng(0).standard_normal((users.n_users, ours.dim))
    extra = 0.15 * (models[:, -outputs:] ** 2).sum(axis=1)
    np.testing.assert_allclose(free.values(ours, models) + extra, column.values(theirs, models), rtol=1e-13)
    assert free.shrunk(ours.dim, outputs).tolist() == [1.0] * (ours.dim - outputs) + [0.0] * outputs
    if name != "squared":  # least squares counts what the data say of the intercept too
        assert (free.strong_convexity(ours) == 0).all()


def test_under_a_penalized_intercept_even_one_class_has_a_best_model():
    users = ct.Users.from_arrays([[0.0], [1.0], [2.0], [3.0]], [1, 1, -1, 1], [0, 0, 1, 1])
    for penalize, converged in ((True, [True, True]), (False, [False, True])):
        loss = ct.Logistic(penalize_intercept=penalize)
        slopes = np.array([[0.0, 0.1], [0.0, 0.1]])
        found = loss.local(loss.prepare(users), slopes)
        assert found.converged.tolist() == converged
        assert np.isfinite(loss.conjugates(loss.prepare(users), slopes)).tolist() == converged


def test_conic_form_equals_the_value(loss_name):
    users = users_for(loss_name)
    loss = loss_for(loss_name)
    samples = loss.prepare(users)
    models = np.random.default_rng(0).standard_normal((users.n_users, samples.dim))
    x = cp.Variable(models.size)
    x.value = models.ravel()
    expression = loss.conic(cp, samples, x)
    assert expression.is_convex()
    assert float(expression.value) == pytest.approx(loss.values(samples, models).sum(), rel=1e-12)


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), name=st.sampled_from(LOSS_NAMES), scale=st.sampled_from([0.1, 1.0, 3.0]))
def test_fenchel_young(seed, name, scale):
    """f(x) + f*(u) >= <u, x> for slopes u taken from gradients elsewhere; never below by more than rounding."""
    users, loss = users_for(name, seed=seed % 7), loss_for(name)
    samples = loss.prepare(users)
    rng = np.random.default_rng(seed)
    x, z = scale * rng.standard_normal((2, users.n_users, samples.dim))
    slopes = rng.uniform(0, 1, (users.n_users, 1)) * loss.gradients(samples, z)
    values, inner = loss.values(samples, x), np.einsum("nd,nd->n", slopes, x)
    assert (values + loss.conjugates(samples, slopes) >= inner - 1e-10 * (1 + np.abs(values) + np.abs(inner))).all()


def test_conjugates_in_closed_form():
    users = users_for("squared_distance", seed=2)
    u = np.random.default_rng(0).standard_normal((users.n_users, 2))
    loss = ct.SquaredDistance()
    exact = 0.5 * (u**2).sum(1) + (u * users.features).sum(1)
    np.testing.assert_allclose(loss.conjugates(loss.prepare(users), u), exact, rtol=1e-12, atol=1e-12)
    loss = ct.HuberDistance(delta=1.0)
    inside = np.linalg.norm(u, axis=1) < 1.0
    assert 0 < inside.sum() < users.n_users
    np.testing.assert_allclose(loss.conjugates(loss.prepare(users), u),
                               np.where(inside, exact, np.inf), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("name", "low", "high"), [
    # The mean of the slopes phi'(t, y) a sample can take bounds the slope of an unshrunk intercept.
    ("logistic", -1.0, 0.0), ("squared_hinge", 0.0, np.inf), ("huber", -1.0, 1.0), ("poisson", -2.0, np.inf),
])
def test_conjugate_is_infinite_outside_its_domain_and_finite_inside(name, low, high):
    rng = np.random.default_rng(0)
    target = 2.0 if name in ("huber", "poisson") else 1.0  # all of one class, or all alike
    users = ct.Users.from_arrays(rng.standard_normal((30, 2)), np.full(30, target), np.repeat([0, 1, 2], 10))
    loss = loss_for(name)
    samples = loss.prepare(users)
    ends = [end for end in (low, high) if np.isfinite(end)]
    middle = np.mean(ends) if len(ends) == 2 else (low + 0.5 if np.isfinite(low) else high - 0.5)
    slopes = np.tile([0.0, 0.0, middle], (3, 1))
    assert np.isfinite(loss.conjugates(samples, slopes)).all()
    for end in ends:
        outside = slopes.copy()
        outside[1, 2] = end + (0.01 if end == max(ends) and np.isfinite(high) else -0.01)
        assert np.isinf(loss.conjugates(samples, outside)).tolist() == [False, True, False]


@pytest.mark.parametrize("size", [0.0, 7e-18, 1.4e-17, 3e-16, 1e-13, 1e-8])
@pytest.mark.parametrize("seed", range(3))
def test_slopes_of_rounding_level_have_a_bound_where_no_row_holds_the_intercept(size, seed):
    """With all margins above 1 the conjugate is ridge/2 ||w||^2 + |slope of b| O(1), and it is attained for slope 0."""
    rng, w = np.random.default_rng(seed), np.array([3.0, -4.0])
    features = rng.standard_normal((40, 2))
    targets = np.where(features @ w > 0, 1.0, -1.0)
    features += 0.5 * targets[:, None] * w / 5.0
    loss, users = ct.SquaredHinge(ridge=1e-3), ct.Users.from_arrays(features, targets, np.repeat(np.arange(4), 10))
    samples, models = loss.prepare(users), np.tile([*w, 0.0], (4, 1))
    assert (loss.evaluate(samples, models, 1).gradients[:, 2] == 0).all()
    for sign in (-1.0, 1.0):
        slopes = np.tile([*(1e-3 * w), sign * size], (4, 1))
        bounds = loss.conjugates(samples, slopes, models)
        for b in (-0.5, 0.0, 0.5):  # no bound is below what a model attains
            x = models + [0.0, 0.0, b]
            assert (bounds >= (slopes * x).sum(axis=1) - loss.values(samples, x) - 1e-17).all()
        widest = np.abs(features @ w).max()  # no intercept is farther from 0 where the loss is
        np.testing.assert_allclose(bounds, 0.5e-3 * w @ w, rtol=0, atol=(1e-10 + size) * widest)
    alike = ct.Users.from_arrays(features, np.ones(40), users.owner)  # of one class: no slope < 0 has a bound
    outside, far = np.tile([0.0, 0.0, -size], (4, 1)), np.tile([0.0, 0.0, -30.0], (4, 1))
    assert np.isinf(loss.conjugates(loss.prepare(alike), outside, far)).all() == (size > 0)


def test_local_optimum_of_least_squares_is_the_normal_equations():
    users, loss = users_for("squared", samples=15), ct.Squared(ridge=0.0)
    found = loss.local(loss.prepare(users))
    assert found.converged.all()
    for i in range(users.n_users):
        rows = slice(users.offsets[i], users.offsets[i + 1])
        design = np.c_[users.features[rows], np.ones(users.counts[i])]
        np.testing.assert_allclose(found.points[i], np.linalg.lstsq(design, users.targets[rows])[0], atol=1e-9)


@pytest.mark.parametrize("size", [1e-295, 1e-165, 1e-150])
@pytest.mark.parametrize("name", [*LINEAR, "multinomial"])
def test_a_column_whose_squares_underflow_counts_as_zero(name, size):
    """In units of such a column, the ridge was once infinite."""
    users, loss = users_for(name, samples=15), loss_for(name, ridge=1e-3)
    for spread in (size * users.features[:, :1], size * (1.0 + 1e-12 * users.features[:, :1])):
        small, none = (loss.prepare(ct.Users.from_arrays(np.hstack([users.features, column]), users.targets,
                                                         users.owner)) for column in (spread, 0.0 * spread))
        ours, theirs = (loss.prox(samples, None, 1e-2, None).points for samples in (small, none))
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)
        for one, other in zip(loss.evaluate(small, ours), loss.evaluate(none, ours), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-15)


def test_a_local_problem_without_minimum_is_reported():
    users = ct.Users.from_arrays([[0.0], [1.0], [2.0], [3.0]], [1, 1, -1, 1], [0, 0, 1, 1])
    loss = ct.Logistic()
    assert loss.local(loss.prepare(users), np.array([[0.0, 0.1], [0.0, 0.1]])).converged.tolist() == [False, True]


def test_multinomial_does_not_care_for_the_order_of_classes():
    users = users_for("multinomial", samples=80)
    swapped = ct.Users.from_arrays(users.features, (users.targets + 1) % 3, users.owner)
    values = [loss.local(loss.prepare(part)) for loss, part in ((ct.Multinomial(), users), (ct.Multinomial(), swapped))]
    np.testing.assert_allclose(values[0].values, values[1].values, rtol=1e-9)
    gaps = [np.linalg.norm(v.points[0] - v.points[1:], axis=1) for v in values]
    np.testing.assert_allclose(gaps[0], gaps[1], rtol=1e-5)
    basis = sum_zero_basis(5)
    np.testing.assert_allclose(basis @ basis.T, np.eye(4), atol=1e-14)
    np.testing.assert_allclose(basis.sum(axis=1), 0, atol=1e-14)


def test_two_class_multinomial_is_logistic():
    users = users_for("logistic", samples=80)
    zero_one = ct.Users.from_arrays(users.features, (users.targets + 1) / 2, users.owner)
    # Margins differ by a factor sqrt(2) in this basis, and so does the ridge by 2.
    two, one = ct.Multinomial(ridge=2e-3), ct.Logistic(ridge=1e-3)
    a, b = two.local(two.prepare(zero_one)), one.local(one.prepare(users))
    np.testing.assert_allclose(a.values, b.values, rtol=1e-9)
    np.testing.assert_allclose(np.abs(a.points) * np.sqrt(2), np.abs(b.points), rtol=1e-5, atol=1e-6)


def custom_logistic() -> ct.Custom:
    def margins(models, features):
        return np.einsum("nmp,np->nm", features, models)

    def chance(models, features, targets):
        return 1 / (1 + np.exp(targets * margins(models, features)))

    return ct.Custom(
        value=lambda x, a, y, w: (w * np.logaddexp(0, -y * margins(x, a))).sum(1) + 0.05 * (x**2).sum(1),
        gradient=lambda x, a, y, w: np.einsum("nm,nmp->np", -w * y * chance(x, a, y), a) + 0.1 * x,
        hessian=lambda x, a, y, w: np.einsum("nm,nmp,nmq->npq", w * chance(x, a, y) * (1 - chance(x, a, y)), a, a)
        + 0.1 * np.eye(x.shape[1]),
        strong=0.1,
        decide=lambda a, x: np.sign((a * x).sum(1)),
        conic_form=lambda cp, users, x: _conic_logistic(users, x),
    )


def _conic_logistic(users, x):
    by_user = cp.reshape(x, (users.n_users, users.n_features), order="C")
    margins = cp.sum(cp.multiply(users.features, by_user[users.owner]), axis=1)
    phi = cp.logistic(-cp.multiply(users.targets, margins))
    return (1 / users.counts[users.owner]) @ phi + 0.05 * cp.sum_squares(x)


def test_custom_loss_equals_the_ready_one():
    users = users_for("logistic")
    custom, ready = custom_logistic(), ct.Logistic(ridge=0.1, intercept=False)
    ct.check_loss(custom, users)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ct.CoterieWarning)
        ours, theirs = (ct.solve(ct.Problem(users, loss, lam=0.02)) for loss in (custom, ready))
    assert ours.gap < 1e-8
    np.testing.assert_allclose(ours.models, theirs.models, atol=1e-5)
    assert ours.objective == pytest.approx(theirs.objective, rel=1e-8)


def test_custom_loss_says_what_is_missing_or_wrong():
    users = users_for("logistic")
    plain = ct.Custom(value=lambda x, *_: (x**2).sum(1), gradient=lambda x, *_: 2 * x,
                      hessian=lambda x, *_: np.tile(2 * np.eye(2), (len(x), 1, 1)))
    ct.check_loss(plain, users)
    with pytest.raises(ct.Incompatible, match="conic"):
        ct.solve(ct.Problem(users, plain, lam=0.1), solver="reference")
    with pytest.raises(ct.Incompatible, match="no predictions"):
        plain.predict(users.features, np.zeros((users.n_samples, 2)))
    crooked = ct.Custom(value=lambda x, *_: np.zeros(1), gradient=plain.gradient, hessian=plain.hessian)
    with pytest.raises(ct.InvalidInput, match=r"value must return shape \(.*got \(1,\)"):
        crooked.values(crooked.prepare(users), np.zeros((users.n_users, 2)))


BAD_TARGETS = [
    ("squared_hinge", [0, 1, 1, 0], r"2 \* y - 1"),
    ("logistic", [1, -1, 2, 1], "Multinomial"),
    ("poisson", [1, 2, -3, 0], "negative"),
    ("multinomial", [0, 1, 1.5, 2], "Number the classes from 0"),
    ("multinomial", [0, 0, 0, 0], "at least two classes"),
]


@pytest.mark.parametrize(("name", "targets", "remedy"), BAD_TARGETS)
def test_targets_outside_the_domain_are_refused_by_name(name, targets, remedy):
    users = ct.Users.from_arrays(np.ones((4, 1)), targets, ["ann", "ann", "bob", "bob"])
    with pytest.raises(ct.InvalidInput, match=remedy) as caught:
        ct.Problem(users, loss_for(name), lam=0.1)
    if "at least two" not in remedy:
        assert ("bob" in str(caught.value)) or ("ann" in str(caught.value))


@pytest.mark.parametrize("name", [*LINEAR, "multinomial"])
def test_missing_targets_are_refused(name):
    users = ct.Users.from_arrays(np.ones((4, 1)), None, [0, 0, 1, 1])
    with pytest.raises(ct.InvalidInput, match="needs targets"):
        ct.Problem(users, loss_for(name), lam=0.1)


def test_classes_beyond_n_classes_and_unseen_classes():
    users = ct.Users.from_arrays(np.ones((4, 1)), [0, 1, 2, 1], [0, 0, 1, 1])
    with pytest.raises(ct.InvalidInput, match="n_classes = 2"):
        ct.Problem(users, ct.Multinomial(n_classes=2), lam=0.1)
    with pytest.warns(ct.CoterieWarning, match="class 3"):
        ct.Problem(users, ct.Multinomial(n_classes=4), lam=0.1)


@pytest.mark.parametrize("settings", [{"ridge": -1.0}, {"ridge": np.nan}, {"ridge": np.inf}])
def test_bad_settings_are_refused(settings):
    with pytest.raises(ct.InvalidInput, match="ridge"):
        ct.Logistic(**settings)
    with pytest.raises(ct.InvalidInput, match="delta"):
        ct.Huber(delta=0.0)
    with pytest.raises(ct.InvalidInput, match="delta"):
        ct.HuberDistance(delta=-1.0)


def test_models_that_do_not_fit_the_rows_are_refused():
    for name in ("logistic", "multinomial"):
        with pytest.raises(ct.InvalidInput, match="columns the models were fitted on"):
            loss_for(name).predict(np.ones((3, 5)), np.ones((3, 4)))


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_every_loss_shows_an_example(name):
    assert doctest.DocTestFinder(recurse=False).find(ct.LOSSES[name])[0].examples


def test_an_example_that_is_wrong_is_found():
    example = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, 0)
    assert doctest.DocTestRunner(verbose=False).run(example, out=lambda _: None).failed == 1


def test_a_minimum_on_a_flat_bottom_is_kept():
    """Between two rows farther apart than 2 delta the loss is constant, and no step from there is an improvement."""
    loss = ct.HuberDistance(delta=0.39849116293328035)
    for pair in ([0.9471462537077515, -0.6195582749047376], [1.6353808068784674, 0.09289331681165644]):
        users = ct.Users.from_arrays(np.reshape(pair, (2, 1)), user=[0, 0])
        samples = loss.prepare(users)
        found = loss.local(samples)
        least = loss.values(samples, np.full((1, 1), np.mean(pair)))
        np.testing.assert_allclose(loss.values(samples, found.points), least, rtol=1e-12)
        assert ct.solve(ct.Problem(users, loss, lam=0.0)).gap <= 1e-9


def test_data_are_prepared_once_while_somebody_keeps_them():
    users, loss = clustered("squared", n_users=6).users, ct.Squared(ridge=0.1)
    kept = loss.prepare(users)
    assert ct.Squared(ridge=0.1).prepare(users) is kept
    assert ct.Squared(ridge=0.2).prepare(users) is not kept
    assert loss.prepare(users.take([0, 1])) is not kept
