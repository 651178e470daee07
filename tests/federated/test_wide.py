"""A federation of wide models: few rows, many coordinates, and no matrix of their length anywhere."""

from __future__ import annotations

import numpy as np
import pytest

import coterie as ct
from coterie.base.errors import Incompatible
from coterie.federated.algorithms.forms import Forms, mean_curvature, spans_of, stiffness, wrong_parts
from coterie.federated.algorithms.splitting import Sides
from coterie.federated.client import Data, answer, answer_all
from coterie.federated.guard import cost
from coterie.federated.protocol.messages import Batch, Query, Reply, gather
from coterie.federated.runtimes.in_process import Faults
from coterie.losses import blocks
from coterie.losses.curvature import Span, SpanCurvature
from coterie.losses.derived import Quadratic, SpanQuadratic

N, P = 6, 160


def heads(n_classes: int = 2, n_rows: int = 14, n_features: int = P, seed: int = 0) -> ct.Users:
    """Unit embeddings of users in two groups, with heads of their own."""
    rng = np.random.default_rng(seed)
    counts = n_rows + rng.integers(0, 3, N)
    owner = np.repeat(np.arange(N), counts)
    rows = rng.standard_normal((owner.size, n_features)) * (1.0 + np.arange(n_features)) ** -0.5
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    weights = rng.standard_normal((2, n_features, n_classes))[owner % 2]
    y = (8.0 * np.einsum("np,npc->nc", rows, weights) + rng.gumbel(size=(owner.size, n_classes))).argmax(axis=1)
    return ct.Users.from_arrays(rows, 2.0 * y - 1.0 if n_classes == 2 else y.astype(float), owner)


def loss_of(n_classes: int) -> ct.Loss:
    return ct.Logistic() if n_classes == 2 else ct.Multinomial(n_classes=n_classes)


@pytest.fixture
def no_hessians(monkeypatch):
    """Raises where a matrix as long and as wide as a model is about to be computed."""
    def refuse(*_: object) -> None:
        raise MemoryError("a matrix of dim x dim")

    monkeypatch.setattr(blocks, "_require_hessians", refuse)


def most_models(run: ct.Federated) -> float:
    """The most that a round cost per user, up and down, in models."""
    return max((line.bytes_up + line.bytes_down) / line.asked for line in run.history) / (8 * run.models.shape[1])


@pytest.mark.parametrize(("n_classes", "tol", "lam"), [(2, 1e-6, 0.02), (4, 1e-4, 0.02)])
def test_newton_agrees_with_the_central_solution(no_hessians, n_classes, tol, lam):
    users = heads(n_classes, n_features=P if n_classes == 2 else 60)
    loss = loss_of(n_classes)
    run = ct.federate(users, loss, lam=lam, tol=tol)
    central = ct.solve(ct.Problem(users, loss, lam=lam), tol=0.1 * tol)
    assert run.certificate.relative_gap <= tol
    assert abs(run.objective / central.objective - 1) <= tol
    assert run.n_rounds <= 25
    assert most_models(run) < 10


def test_the_check_for_hessians_can_fail(no_hessians):
    users = heads()
    samples = ct.Logistic().prepare(users)
    with pytest.raises(MemoryError):
        ct.Logistic().hessians(samples, np.zeros((N, samples.dim)))


def test_splitting_agrees_with_newton(no_hessians):
    users = heads()
    newton, splitting = (ct.federate(users, ct.Logistic(), lam=0.02, algorithm=algorithm, tol=1e-3)
                         for algorithm in (ct.Newton(), ct.Splitting()))
    assert splitting.certificate.relative_gap <= 1e-3
    assert abs(splitting.objective / newton.objective - 1) <= 1e-3
    assert most_models(splitting) < 4


def test_lost_replies_only_cost_rounds(no_hessians):
    faults = Faults(drop=0.2, late=0.2, twice=0.1, seed=3)
    run = ct.federate(heads(), ct.Logistic(), lam=0.02, faults=faults, participation=0.7)
    assert run.certificate.relative_gap <= 1e-6
    assert not run.aside


# -- what users send

def asked(data: Data, models: np.ndarray, count: int = 0, rank: int = 0) -> Batch:
    return answer_all(data, Batch("expand", 0, np.arange(N), {"model": models, "count": np.full(N, float(count))},
                                  shared={"rank": np.array(rank)}))


def dense(forms: Forms) -> np.ndarray:
    return forms.completed().hessians


@pytest.mark.parametrize(("n_classes", "n_features"), [(2, P), (4, 60)])
def test_parts_are_never_below_the_hessian_and_become_it(n_classes, n_features):
    users, loss = heads(n_classes, n_features=n_features), loss_of(n_classes)
    data = Data.of(users, loss)
    dim, p = data.samples.dim, n_features + 1
    assert loss.wide(data.samples)
    models = np.random.default_rng(1).standard_normal((N, dim))
    exact, forms, off = loss.hessians(data.samples, models), Forms.blank(N, dim), []
    free = np.zeros(dim)
    free[-(dim // p):] = loss.ridge  # intercepts are not under the ridge, and the parts count them as if they were
    for _ in range(4):
        replies = answer_all(data, Batch("expand", 0, np.arange(N), {"model": models, "count": 1.0 * forms.sizes},
                                         shared={"rank": np.array(0)}))
        assert not wrong_parts(replies, forms, dim, p)
        forms = spans_of(replies, forms, dim, p)
        above = dense(forms) - exact
        assert np.linalg.eigvalsh(above).min() >= -1e-12
        off.append(np.abs(above - np.diag(free)).max())
    assert forms.sizes.tolist() == users.counts.tolist()
    assert off[-1] <= off[0]
    if n_classes == 2:  # the triangle of the core fits
        assert off[-1] <= 1e-10 < off[0]


def test_a_reply_stays_short_and_counts_as_one_hessian():
    data = Data.of(heads(), ct.Logistic())
    models = np.zeros((N, P + 1))
    for count in (0, 6, 14):
        for message in asked(data, models, count).values():
            assert message.numbers <= 8.5 * (P + 1)
            assert cost(message, P + 1) == (1, 1)
    bare = Reply("expand", 0, {"value": np.zeros(()), "gradient": np.zeros(P + 1)})
    assert cost(bare, P + 1) == (1, 0)


def test_whoever_withholds_its_hessian_sends_a_bound():
    users = heads()
    data = Data(ct.Logistic(), ct.Logistic().prepare(users), withheld=np.arange(N) == 2)
    replies = asked(data, np.zeros((N, P + 1)))
    assert set(replies[2].arrays) == {"value", "gradient", "diagonal"}
    assert {"basis", "core", "diagonal"} <= set(replies[1].arrays)
    most = np.linalg.eigvalsh(ct.Logistic().hessians(data.samples, np.zeros((N, P + 1))))[2, -1]
    bound = float(replies[2].arrays["diagonal"][0])
    assert most <= bound <= 1.5 * most
    forms = spans_of(replies, Forms.blank(N, P + 1), P + 1, P + 1)
    assert forms.sizes[2] == 0
    assert np.allclose(dense(forms.take(np.array([2])))[0], bound * np.eye(P + 1))


def test_one_user_alone_answers_as_in_a_batch():
    users = heads()
    models = np.random.default_rng(2).standard_normal((N, P + 1))
    many = asked(Data.of(users, ct.Logistic()), models)
    query = Query("expand", 0, {"model": models[3], "rank": np.array(0)})
    alone = answer(Data.of(users.take([3]), ct.Logistic()), query)
    for name, array in many[3].arrays.items():
        assert np.allclose(np.abs(array), np.abs(alone.arrays[name]), rtol=1e-9, atol=1e-12), name


def test_complete_hessians_of_wide_models_are_refused():
    with pytest.raises(Incompatible, match="rank=0"):
        asked(Data.of(heads(), ct.Logistic()), np.zeros((N, P + 1)), rank=-1)


@pytest.mark.parametrize("n_classes", [2, 4])
def test_curvatures_are_those_of_the_hessians(n_classes):
    users, loss = heads(n_classes, n_features=P if n_classes == 2 else 60), loss_of(n_classes)
    samples = loss.prepare(users)
    models = np.random.default_rng(1).standard_normal((N, samples.dim))
    operators, matrices = loss.expand(samples, models)[2], loss.hessians(samples, models)
    everyone = np.arange(N)
    for user, values in enumerate(np.linalg.eigvalsh(matrices)):
        inside = values[-users.counts[user] * operators.outputs:]  # the others are the ridge, or a free intercept's 0
        exact = np.exp(np.log(inside + 1e-3 * inside.mean()).mean())
        near = mean_curvature(operators)[user]
        assert abs(np.log(near / exact)) <= (0.05 if n_classes == 2 else 1.0)
        assert near > 1.5 * mean_curvature(matrices)[user]  # most coordinates count in that one
    assert (stiffness(loss, samples, operators, everyone) >= np.linalg.eigvalsh(matrices)[:, -1] - 1e-12).all()


# -- what the server makes of it

def changed(replies: Batch, user: int, **fields: np.ndarray) -> Batch:
    messages = dict(replies.items())
    messages[user] = Reply("expand", 0, {**messages[user].arrays, **fields})
    return gather(list(messages.items()))


@pytest.mark.parametrize("field", ["basis", "core", "diagonal"])
def test_parts_that_no_hessian_has_are_refused(field):
    data = Data.of(heads(), ct.Logistic())
    replies, dim = asked(data, np.zeros((N, P + 1))), P + 1
    assert not wrong_parts(replies, Forms.blank(N, dim), dim, dim)
    array = replies[1].arrays[field]
    for wrong in (2.0 * array if field == "basis" else -array, array[:-1] if field == "core" else array[:0]):
        assert list(wrong_parts(changed(replies, 1, **{field: wrong}), Forms.blank(N, dim), dim, dim)) == [1]


def test_a_liar_is_excluded_and_the_others_finish(monkeypatch):
    from coterie.federated.runtimes import in_process

    def lying(data: Data, queries: Batch) -> Batch:
        replies = answer_all(data, queries)
        return changed(replies, 1, basis=3.0 * replies[1].arrays["basis"]) if 1 in replies else replies

    monkeypatch.setattr(in_process, "answer_all", lying)
    run = ct.federate(heads(), ct.Logistic(), lam=0.02)
    assert run.aside == {1: "its vectors are not orthonormal"}
    assert run.certificate.relative_gap <= 1e-6


def test_quadratics_in_spans_are_those_of_matrices():
    rng, n, b, p, k = np.random.default_rng(0), 4, 3, 8, 2
    basis = np.linalg.qr(rng.standard_normal((n, p, b)))[0].swapaxes(1, 2)
    axes = np.linalg.qr(rng.standard_normal((n, b * k, 4)))[0].swapaxes(1, 2)
    span = Span(basis, axes, rng.uniform(0.1, 2.0, (n, 4)), rng.uniform(0.1, 0.3, n), rng.uniform(0.05, 0.5, n))
    forms = Forms(np.zeros((n, 0, 0)), *span, np.full(n, b))
    hessian, curvature = dense(forms), SpanCurvature(span)
    v, shift = rng.standard_normal((n, p * k)), rng.uniform(0.0, 1.0, n)
    assert np.allclose(hessian, hessian.swapaxes(1, 2))
    assert np.allclose(curvature.times(v), (hessian @ v[..., None])[..., 0])
    assert np.allclose(curvature.trace(), np.trace(hessian, axis1=1, axis2=2))
    solved = np.linalg.solve(hessian + shift[:, None, None] * np.eye(p * k), v[..., None])[..., 0]
    assert np.allclose(curvature.inverse(shift)(v), solved)
    assert not np.allclose(curvature.inverse(shift + 0.1)(v), solved)
    loss = SpanQuadratic(point=v, value=np.ones(n), gradient=2.0 * v, span=span)
    samples = loss.prepare(ct.Users.from_arrays(np.zeros((n, 1))))
    u = rng.standard_normal((n, p * k))
    conjugate = np.einsum("nd,nd->n", u, v) - 1.0 + 0.5 * np.einsum(
        "nd,nd->n", u - 2.0 * v, np.linalg.solve(hessian, (u - 2.0 * v)[..., None])[..., 0])
    assert np.allclose(loss.dual_bounds(samples, u).values, conjugate)
    with pytest.raises(Incompatible):
        loss.hessians(samples, v)
    users = ct.Users.from_arrays(np.zeros((n, 1)))
    matrices = Quadratic(point=v, value=np.ones(n), gradient=2.0 * v, hessian=hessian)
    for lam in (0.1, 1.0, 100.0):  # from all models apart to one
        one, other = (ct.solve(ct.Problem(users, part, lam=lam), tol=1e-7) for part in (loss, matrices))
        assert one.n_clusters == other.n_clusters
        assert np.allclose(one.models, other.models, atol=1e-3)


def test_padding_changes_nothing():
    data = Data.of(heads(), ct.Logistic())
    forms = spans_of(asked(data, np.zeros((N, P + 1))), Forms.blank(N, P + 1), P + 1, P + 1)
    few = forms.take(np.array([0]))
    wider = few._replace(basis=np.pad(few.basis, ((0, 0), (0, 2), (0, 0))),
                         axes=np.pad(few.axes, ((0, 0), (0, 1), (0, 2))), gains=np.pad(few.gains, ((0, 0), (0, 1))))
    assert np.allclose(dense(few), dense(wider))
    assert np.allclose(few.traces(), wider.traces())
    everyone = Forms.blank(N, P + 1).put(np.arange(1, N), forms.take(np.arange(1, N))).put(np.array([0]), wider)
    assert np.allclose(dense(everyone), dense(forms))


def test_the_step_of_the_server_needs_only_directions_between_points():
    points = np.random.default_rng(0).standard_normal((5, 400))
    sides = Sides.of(points)
    assert sides.enter(points).shape == (5, 5)
    assert np.allclose(sides.leave(sides.enter(points)), points)
    assert np.allclose(sides.turn(sides.along(points[:2] - points[2:4])), points[:2] - points[2:4])
    assert Sides.of(points[:, :20]).axes is None


def test_a_user_of_many_rows_may_send_its_hessian_at_once():
    rng, dim = np.random.default_rng(0), P + 1
    rows = rng.standard_normal((200, P)) / np.sqrt(P)
    many = ct.Users.from_arrays(rows, np.sign(rows[:, 0] + rng.standard_normal(200)), np.zeros(200, dtype=int))
    query = Query("expand", 0, {"model": np.zeros(dim), "rank": np.array(0)})
    batch = gather([(0, answer(Data.of(many, ct.Logistic()), query))])
    few = spans_of(asked(Data.of(heads(), ct.Logistic()), np.zeros((N, dim))), Forms.blank(N, dim), dim, dim)
    before = few.take(np.array([0]))
    assert "hessian" in batch.ragged
    assert not wrong_parts(batch, before, dim, dim)
    exact = ct.Logistic().hessians(ct.Logistic().prepare(many), np.zeros((1, dim)))
    assert np.allclose(dense(spans_of(batch, before, dim, dim)), exact)
    assert list(wrong_parts(changed(batch, 0, hessian=-batch[0].arrays["hessian"]), before, dim, dim)) == [0]


def test_a_run_at_another_lam_starts_from_what_is_known():
    first = ct.federate(heads(), ct.Logistic(), lam=0.02)
    again, anew = (ct.federate(heads(), ct.Logistic(), lam=0.015, start=start) for start in (first, None))
    assert abs(again.objective / anew.objective - 1) <= 2e-6
    assert again.n_rounds < anew.n_rounds


@pytest.fixture(autouse=True)
def small_counts_as_wide(monkeypatch):
    """Otherwise Hessians of such small problems are used, where these are quick."""
    monkeypatch.setattr("coterie.losses.rows._LEAST_NUMBERS", 0)
