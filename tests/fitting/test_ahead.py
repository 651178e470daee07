"""Work beside other work, and parts of fits that are computed in another way than before."""

import os
import sys
import time
import warnings

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import adjusted_rand_score

import coterie as ct
from coterie.base.machine import begin_beside, n_threads, one_blas_thread, set_threads
from coterie.convex.choice import adjusted_rand
from coterie.datasets import clustered
from coterie.fitting import Settings, estimate, fit, plan
from coterie.fitting.ahead import Ahead
from coterie.groups.noise import _log_mean_square_density, _log_ratio_density


@pytest.fixture(autouse=True)
def _threads_as_before():
    yield
    set_threads(None)


def test_a_copy_of_the_process_sends_its_parts_and_its_warnings():
    def work(parts):
        parts["thread count"] = n_threads()
        warnings.warn("too few rows", ct.CoterieWarning, stacklevel=1)
        parts["numbers"] = np.arange(3) + offset

    offset = 40
    set_threads(4)
    beside = begin_beside(work)
    assert n_threads() == 2  # the other two are lent
    assert beside.wait_for("numbers")
    assert beside.parts["numbers"].tolist() == [40, 41, 42]
    assert beside.parts["thread count"] == 2
    with pytest.warns(ct.CoterieWarning, match="too few rows"):
        beside.warn_again("numbers")
    beside.end()
    assert n_threads() == 4
    beside.end()  # a second time does nothing
    assert n_threads() == 4


def test_a_part_that_the_copy_cannot_compute_never_arrives():
    def fail(parts):
        parts["first"] = 1
        raise ZeroDivisionError

    set_threads(2)
    beside = begin_beside(fail)
    assert not beside.wait_for("second")
    assert beside.parts == {"first": 1}
    beside.end()


def test_a_copy_that_is_ended_is_gone():
    set_threads(2)
    beside = begin_beside(lambda parts: time.sleep(60))
    child = beside._child
    os.kill(child, 0)  # it is there
    beside.end()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert not beside.running


def test_there_is_no_copy_with_one_thread():
    set_threads(1)
    assert begin_beside(lambda parts: None) is None


def users_of_two_groups(seed=5):
    return clustered("squared", n_users=24, n_clusters=2, samples=40, seed=seed).users


def users_of_two_classes(seed=5):
    users = clustered("logistic", n_users=24, n_clusters=2, samples=40, seed=seed).users
    return ct.Users.from_arrays(users.features, (users.targets > 0).astype(float), users.owner)


def test_all_rows_are_fitted_beside_the_held_out_rows(monkeypatch):
    kept = list[str]()
    keep = Ahead._keep
    monkeypatch.setattr(Ahead, "_keep", lambda self, name: kept.append(name) or keep(self, name))
    set_threads(2)
    fit(users_of_two_groups(), Settings(task="regression", n_lams=6))
    assert {"groups", "kind", "weights", "last", "point 0"} <= set(kept)


def test_the_path_of_another_kind_than_the_chosen_one_is_not_used(monkeypatch):
    find = plan._search_groups
    monkeypatch.setattr(plan, "_search_groups", lambda *given: find(*given) | {"likely": "one model"})
    kept, fitted = list[str](), []
    keep = Ahead._keep
    monkeypatch.setattr(Ahead, "_keep", lambda self, name: kept.append(name) or keep(self, name))
    for threads in (2, 1):
        set_threads(threads)
        fitted.append(fit(users_of_two_groups(), Settings(task="regression", n_lams=6)))
    assert kept == ["groups"]
    assert fitted[0].kind == "groups"
    assert fitted[0].models.tobytes() == fitted[1].models.tobytes()


def test_the_groups_are_kept_where_the_held_out_fit_fails(monkeypatch):
    def fail(*given):
        deadline = time.monotonic() + 60
        while "groups" not in begun[0].beside.parts and time.monotonic() < deadline:
            time.sleep(0.01)
        raise KeyboardInterrupt

    begun, begin = list[Ahead](), Ahead.__init__
    monkeypatch.setattr(Ahead, "__init__", lambda self, *given: begun.append(self) or begin(self, *given))
    monkeypatch.setattr(estimate, "score_held_out", fail)
    set_threads(2)
    store = dict[str, object]()
    with pytest.raises(KeyboardInterrupt):
        fit(users_of_two_groups(), Settings(task="regression", n_lams=6), store=store)
    assert len(np.unique(store["groups"]["labels"])) == 2
    assert begun[0].beside._child == 0
    assert n_threads() == 2


def test_blas_has_one_thread_inside_and_its_own_number_outside():
    from threadpoolctl import threadpool_info

    def counts():
        return [each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"]

    before = counts()
    with one_blas_thread():
        assert set(counts()) == {1}
    assert counts() == before


@pytest.mark.parametrize(("users", "task"), [(users_of_two_groups, "regression"),
                                             (users_of_two_classes, "classification")])
def test_fits_have_the_same_bits_with_one_thread_and_with_two(users, task):
    fitted = []
    for threads in (1, 2):
        set_threads(threads)
        fitted.append(fit(users(), Settings(task=task, n_lams=6)))
    one, two = fitted
    assert one.models.tobytes() == two.models.tobytes()
    assert one.why == two.why
    assert one.gap == two.gap


def test_flows_by_conjugate_gradients_are_those_of_a_factorisation(monkeypatch):
    rng = np.random.default_rng(0)
    graph = ct.Graph.knn(rng.normal(size=(200, 6)), k=5, decay=0.1)
    forces = rng.normal(size=(200, 3))
    exact = graph.flow_solver()(forces)
    monkeypatch.setattr("coterie.problem.graph._MANY", 10)
    np.testing.assert_allclose(graph.flow_solver()(forces), exact, rtol=1e-8, atol=1e-9)
    monkeypatch.setattr("coterie.problem.graph._STEPS", 1)  # not enough: then the factorisation is used
    np.testing.assert_array_equal(graph.flow_solver()(forces), exact)


def test_data_are_prepared_once_while_somebody_keeps_them():
    users, loss = clustered("squared", n_users=6).users, ct.Squared(ridge=0.1)
    kept = loss.prepare(users)
    assert ct.Squared(ridge=0.1).prepare(users) is kept
    assert ct.Squared(ridge=0.2).prepare(users) is not kept
    assert loss.prepare(users.take([0, 1])) is not kept


@pytest.mark.parametrize("n", [2, 3, 10, 80])
def test_adjusted_rand_index(n):
    rng = np.random.default_rng(n)
    for groups in (1, 2, 5, n):
        labels, others = rng.integers(0, groups, n), rng.integers(0, 3, n)
        assert adjusted_rand(labels, others) == pytest.approx(adjusted_rand_score(labels, others), abs=1e-12)
        assert adjusted_rand(labels, labels) == 1.0


def test_densities():
    rng = np.random.default_rng(0)
    x, k = np.exp(rng.normal(size=40)), rng.uniform(2, 200, 40)
    np.testing.assert_allclose(_log_ratio_density(x, k, 6.0), stats.f.logpdf(x, k, 6.0), rtol=1e-10)
    np.testing.assert_allclose(_log_mean_square_density(x, k), stats.chi2.logpdf(x * k, k) + np.log(k), rtol=1e-10)


def test_a_fit_does_not_import_scikit_learn(tmp_path):
    import subprocess

    code = ("import sys, numpy as np, coterie as ct; from coterie.datasets import clustered; "
            "from coterie.fitting import Settings, fit; "
            "found = fit(clustered('squared', n_users=12).users, Settings(task='regression', n_lams=3)); "
            "assert found.stability is not None; found.save('run'); assert 'sklearn' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=300)
