"""Wide models: what is computed in the space of rows equals what Hessians give, and bounds are bounds."""

import numpy as np
import pytest

import coterie as ct
from coterie.losses import Loss
from coterie.losses import rows as rows_module
from coterie.losses.derived import Grouped

LOSSES = {
    "logistic": ct.Logistic(), "squared hinge": ct.SquaredHinge(), "squared": ct.Squared(),
    "huber": ct.Huber(delta=0.5), "poisson": ct.Poisson(), "softmax": ct.Multinomial(),
    "covered intercept": ct.Logistic(penalize_intercept=True),
    "no intercept": ct.Multinomial(intercept=False),
}


def wide_users(loss, seed=0, counts=(9, 20, 21, 33, 18)):
    """Users with fewer rows than models have coordinates, and unequal numbers of them."""
    rng = np.random.default_rng(seed)
    several = isinstance(loss, ct.Multinomial)
    features = 0.3 * rng.standard_normal((sum(counts), 60 if several else 160))
    t = features @ rng.standard_normal((features.shape[1], 4))
    if several:
        y = t.argmax(axis=1)
        y[:4] = range(4)
    elif isinstance(loss, ct.Poisson):
        y = np.floor(np.exp(np.clip(t[:, 0], -2, 2)))
    elif isinstance(loss, (ct.Logistic, ct.SquaredHinge)):
        y = np.where(t[:, 0] + rng.standard_normal(len(t)) > 0, 1.0, -1.0)
    else:
        y = t[:, 0]
    return ct.Users.from_arrays(features, y, np.repeat(np.arange(len(counts)), counts))


@pytest.fixture(params=LOSSES, ids=list(LOSSES))
def case(request):
    loss = LOSSES[request.param]
    samples = loss.prepare(wide_users(loss))
    assert loss.wide(samples)
    rng = np.random.default_rng(1)
    return loss, samples, 0.1 * rng.standard_normal((samples.n_users, samples.dim)), rng


def test_operators_are_the_hessians(case):
    loss, samples, x, rng = case
    f, g, hessians = loss.evaluate(samples, x)
    values, gradients, curvature = loss.expand(samples, x)
    v, shift = rng.standard_normal(x.shape), 0.01 + rng.random(samples.n_users)
    np.testing.assert_allclose(values, f, rtol=1e-12)
    np.testing.assert_allclose(gradients, g, atol=1e-12)
    np.testing.assert_allclose(curvature.times(v), np.einsum("nij,nj->ni", hessians, v), atol=1e-11)
    np.testing.assert_allclose(curvature.trace(), np.trace(hessians, axis1=1, axis2=2), rtol=1e-10)
    dense = np.linalg.solve(hessians + shift[:, None, None] * np.eye(samples.dim), v[..., None])[..., 0]
    np.testing.assert_allclose(curvature.inverse(shift)(v), dense, atol=1e-9 * np.abs(dense).max())
    single = curvature.inverse(shift, np.float32)(v.astype(np.float32))
    assert single.dtype == np.float32
    assert 0 < np.abs(single - dense).max() <= 1e-3 * np.abs(dense).max()


def test_some_users_get_what_they_get_among_all(case):
    loss, samples, x, rng = case
    some, v = np.array([3, 0]), rng.standard_normal(x.shape)
    _, gradient, alone = loss.expand(samples, x[some], some)
    _, gradients, together = loss.expand(samples, x)
    np.testing.assert_array_equal(gradient, gradients[some])
    np.testing.assert_array_equal(alone.inverse(np.ones(2))(v[some]),
                                  together.inverse(np.ones(samples.n_users))(v)[some])


def test_proximal_steps_are_those_of_hessians(case):
    loss, samples, x, rng = case
    linear = 0.1 * rng.standard_normal(x.shape)
    near, dense = (method(loss, samples, linear, 0.3, x) for method in (type(loss).prox, Loss.prox))
    assert near.converged.all()
    np.testing.assert_allclose(near.points, dense.points, atol=1e-9)
    np.testing.assert_allclose(near.values, dense.values, rtol=1e-11, atol=1e-12)


def test_dual_bounds_are_tight_and_never_below_the_conjugate(case):
    loss, samples, x, rng = case
    f, slopes, _ = loss.evaluate(samples, x, 1)
    exact = np.einsum("nd,nd->n", slopes, x) - f  # f*(grad f(x)) = <grad f(x), x> - f(x)
    bound = loss.dual_bounds(samples, slopes, np.zeros_like(x))
    assert (bound.values + bound.rounding >= exact).all()
    np.testing.assert_allclose(bound.values, exact, rtol=1e-9, atol=1e-10)
    about = rng.standard_normal(x.shape)
    moved = loss.dual_bounds(samples, slopes, x, about=about)
    np.testing.assert_allclose(moved.values, exact - np.einsum("nd,nd->n", slopes, about), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["logistic", "squared hinge", "softmax", "huber"])
def test_a_bound_at_any_point_holds(name):
    """Weak duality: no solve is needed for the bound to be right."""
    loss = LOSSES[name]
    samples = loss.prepare(wide_users(loss))
    rng, who = np.random.default_rng(2), np.arange(samples.n_users)
    x = 0.2 * rng.standard_normal((samples.n_users, samples.dim))
    f, slopes, _ = loss.evaluate(samples, x, 1)
    exact = np.einsum("nd,nd->n", slopes, x) - f
    some = 0
    for scale in (1e-3, 1e-2, 0.1, 1.0):
        point = rows_module._Point(loss, samples, x + scale * rng.standard_normal(x.shape), None)
        bound = point.bound(slopes)
        assert (bound.values + bound.rounding >= exact).all()
        some += int(np.isfinite(bound.values).sum())
    assert some >= len(who)  # or nothing was compared
    tight = rows_module._Point(loss, samples, x, None).bound(slopes)
    assert not (tight.values - 1e-6 * np.abs(exact) >= exact).any()  # the twin: a number too small is noticed


@pytest.mark.parametrize("loss", [ct.Logistic(), ct.Multinomial()], ids=["logistic", "softmax"])
def test_personal_models_and_groups_are_those_of_hessians(loss, monkeypatch):
    users = wide_users(loss)
    personal, labels = ct.Personal(loss, metric=0.05, scale="rows"), np.array([0, 1, 0, 1, 1])
    rng = np.random.default_rng(3)
    results = []
    for least in (rows_module._LEAST_DIM, 10**9):
        monkeypatch.setattr(rows_module, "_LEAST_DIM", least)
        samples = personal.prepare(users)
        assert personal.wide(samples) == (least < 10**9)
        z = 0.1 * np.random.default_rng(4).standard_normal((users.n_users, samples.dim))
        grouped = Grouped(loss=loss, samples=loss.prepare(users), labels=labels)
        around = Grouped(loss=personal, samples=samples, labels=labels)
        slopes = personal.gradients(samples, z)
        results.append([personal.values(samples, z), slopes, personal.own_models(samples, z),
                        personal.prox(samples, None, 0.3, z).points, personal.conjugates(samples, slopes, z),
                        grouped.local(grouped.prepare(grouped.groups)).points,
                        around.local(around.prepare(around.groups)).points])
        if least < 10**9:
            curvature, v = personal.expand(samples, z)[2], rng.standard_normal(z.shape)
            wide = curvature.times(v), curvature.inverse(np.full(users.n_users, 0.2))(v)
        else:
            hessians = personal.hessians(samples, z)
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-7 * max(1.0, np.abs(other).max()))
    np.testing.assert_allclose(wide[0], np.einsum("nij,nj->ni", hessians, v), atol=1e-8)
    np.testing.assert_allclose(np.einsum("nij,nj->ni", hessians + 0.2 * np.eye(v.shape[1]), wide[1]), v, atol=1e-8)


def test_wide_is_a_matter_of_shape():
    loss = ct.Logistic()
    def wide(rows, columns, ridge=1e-3):
        users = ct.Users.from_arrays(np.eye(rows, columns), np.where(np.arange(rows) % 2, 1, -1), np.zeros(rows))
        return ct.Logistic(ridge=ridge).wide(loss.prepare(users))
    assert wide(20, 200)
    assert not wide(400, 200)  # more rows than coordinates
    assert not wide(20, 100)  # few coordinates
    assert not wide(20, 200, ridge=0.0)  # nothing holds what rows do not


@pytest.fixture(autouse=True)
def small_counts_as_wide(monkeypatch):
    """Otherwise Hessians of such small problems are used, where these are quick."""
    monkeypatch.setattr("coterie.losses.rows._LEAST_NUMBERS", 0)
