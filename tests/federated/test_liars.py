"""Users who lie in the right form: they are set aside or count for no more than other data, and no run dies of one."""

from __future__ import annotations

import re
import warnings
from functools import cache

import numpy as np
import pytest

import coterie as ct
from coterie.datasets import clustered
from coterie.federated import FederationSettings, Reply, plausible
from coterie.federated.algorithms.base import Replies
from coterie.federated.client import Data
from coterie.federated.protocol.messages import Batch
from coterie.federated.run import run_federation
from coterie.federated.runtimes.in_process import LocalRuntime
from coterie.problem.problem import Problem

LIAR, LAM = 3, 0.05
PATHS = {"newton": ct.Newton(), "splitting": ct.Splitting(), "pdmm": ct.PDMM(),
         "pdmm-users": ct.PDMM(edge_state="users")}


class Lying(LocalRuntime):
    """User 3 answers with what `lie` makes of its reply."""

    def __init__(self, data, lie):
        super().__init__(data)
        self.lie = lie

    def exchange(self, queries):
        batches = super().exchange(queries).batches
        pairs = [(user, reply) for batch in batches for user, reply in batch.items()]
        return Replies(singles=tuple((user, self.lie(reply) if user == LIAR else reply) for user, reply in pairs))


def change(edit, *names, kind=None):
    """A lie: `edit` of these fields, or of all that hold real numbers."""
    def lie(reply):
        if kind is not None and reply.kind != kind:
            return reply
        return Reply(reply.kind, reply.round, {
            name: np.asarray(edit(np.asarray(array, dtype=float)))
            if name in names or (not names and array.dtype.kind == "f" and name not in ("sign", "share")) else array
            for name, array in reply.arrays.items()})
    return lie


@cache
def task():
    users = clustered("logistic", n_users=10, n_clusters=2, samples=40, seed=0).users
    problem = Problem(users, ct.Logistic(ridge=1e-2), LAM)
    rest = np.arange(10) != LIAR
    alone = Problem(users.take(rest), problem.loss, LAM, problem.graph.take(rest))
    return problem, ct.solve(problem, tol=1e-10).models[rest], ct.solve(alone, tol=1e-10).models


def run_with(lie, algorithm, **more):
    problem = task()[0]
    settings = FederationSettings(lam=LAM, algorithm=algorithm, tol=1e-6, **more)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ct.CoterieWarning)
        return run_federation(settings.federation(problem.users, problem.loss, problem.graph), settings,
                              Lying(Data(problem.loss, problem.samples), lie), problem=problem)


def moved(run):
    """How far the others' models are from the optimum with user 3 or without it, whichever is nearer."""
    _, together, alone = task()
    theirs = run.models[[k for k, name in enumerate(run.problem.users.names) if name != LIAR]]
    return min(np.abs(theirs - together).max(), np.abs(theirs - alone).max())


def hidden(reply):
    """A loss larger by 1e9 everywhere, which is convex, too."""
    arrays = dict(reply.arrays)
    arrays["value"] = arrays["value"] + 1e9
    if reply.kind == "certify":
        arrays["conjugate"] = arrays["conjugate"] - 1e9
    return Reply(reply.kind, reply.round, arrays)


LIES = {
    "hidden": hidden,
    "hidden in the proof": lambda reply: hidden(reply) if reply.kind == "certify" else reply,
    "hessian 1e12": change(lambda v: 1e12 * v, "hessian", "curvature"),
    "hessian 0": change(lambda v: 0.0 * v, "hessian", "curvature"),
    "gradient 1e9": change(lambda v: np.full_like(v, 1e9), "gradient", "point", "model"),
    "gradient 1e300": change(lambda v: np.full_like(v, 1e300), "gradient", "point", "model"),
    "gradient flipped": change(lambda v: -v, "gradient", "point"),
    "value -100": change(lambda v: v - 100, "value"),
    "conjugate inf": change(lambda v: v + np.inf, "conjugate"),
    "rounding 1e9": change(lambda v: v + 1e9, "rounding"),
    "size 1e30": change(lambda v: v + 1e30, "size"),
}
#: Lies that describe some convex loss, or say nothing that counts: their sender may stay.
HARMLESS = {"hidden", "hessian 0", "size 1e30"}


@pytest.mark.parametrize("lie", LIES)
def test_newton_converges_for_the_others_whatever_one_user_says(lie):
    run = run_with(LIES[lie], ct.Newton())
    assert run.status is ct.Status.CONVERGED
    assert run.n_rounds <= 170
    assert set(run.aside) == (set() if lie in HARMLESS else {LIAR})
    assert moved(run) < 1e-3
    assert all(reason for _, _, reason in run.refusals)


@pytest.mark.parametrize("name", ["splitting", pytest.param("pdmm", marks=pytest.mark.slow),
                                  pytest.param("pdmm-users", marks=pytest.mark.slow)])
@pytest.mark.parametrize("lie", [lie if lie in ("hidden", "gradient 1e9", "conjugate inf") else
                                 pytest.param(lie, marks=pytest.mark.slow) for lie in LIES])
def test_so_do_the_others(lie, name):
    run = run_with(LIES[lie], PATHS[name], max_rounds=600)
    assert run.status is ct.Status.CONVERGED
    assert set(run.aside) <= {LIAR}
    assert moved(run) < 1e-2


def test_one_large_loss_no_longer_hides_the_errors_of_the_others():
    run = run_with(hidden, ct.Newton())
    one = run.certificate
    assert one.objective > 1e9
    assert one.others > 0
    assert one.gap / one.objective < 1e-12  # the twin: by this the first models would have been as good
    early = run_with(hidden, ct.Newton(), max_rounds=1)
    assert early.certificate.gap / early.objective < 1e-6
    assert early.gap > 1e-4
    assert moved(early) > 0.1
    assert early.status is ct.Status.INACCURATE


def absurd(rng):
    """A random lie in the right form, the same for the whole run."""
    kinds = (lambda v: v * 10.0 ** rng.integers(-12, 13), lambda v: -v, lambda v: 0.0 * v,
             lambda v: np.full_like(v, rng.choice([7.0, -3.0, 1e9, 1e-9])), lambda v: v + 10.0 ** rng.integers(-2, 10),
             lambda v: np.full_like(v, np.nan), lambda v: v * 10.0 ** rng.integers(13, 301))
    edit, fields = kinds[rng.integers(len(kinds))], rng.random(60)
    names = ("value", "gradient", "hessian", "point", "curvature", "conjugate", "residual", "size", "rounding", "model",
             "difference", "count")
    chosen = [name for name, luck in zip(names, fields, strict=False) if luck < 0.4]
    return change(edit, *chosen)


@pytest.mark.parametrize(("name", "seed"), [
    pytest.param(name, seed, marks=() if seed < 3 and not name.startswith("pdmm") else pytest.mark.slow)
    for name in ("newton", "splitting", "pdmm", "pdmm-users", "weights") for seed in range(24)])
def test_no_run_dies_of_one_liar(name, seed):
    """Whatever one user says, the run ends, the others' models stay where they belong, and the status is true."""
    rng = np.random.default_rng([seed, len(name)])
    more = {"weights": "wald"} if name == "weights" else {}
    with np.errstate(all="ignore"):
        run = run_with(absurd(rng), PATHS.get(name, ct.Newton()), max_rounds=300, **more)
    assert set(run.aside) <= {LIAR}
    if name == "weights":
        assert run.status is ct.Status.CONVERGED
        return
    # A liar that is not set aside is some other data: it pulls each of the others by lam at most.
    strong = 2 * 9 * LAM / 1e-2
    assert np.abs(run.models).max() < strong
    if run.status is ct.Status.CONVERGED:
        assert moved(run) < 0.2


# -- the rules one by one


def quadratic(points, hessian=2.0):
    """Statements of f(x) = hessian x^2 / 2."""
    x = np.asarray(points, dtype=float)[:, None]
    return plausible.Statements(x, 0.5 * hessian * x[:, 0] ** 2, hessian * x, np.full(len(x), hessian))


def test_convex_functions_never_contradict_themselves():
    rng = np.random.default_rng(0)
    one, other = quadratic(1e3 * rng.standard_normal(200)), quadratic(1e3 * rng.standard_normal(200))
    assert not plausible.contradict(one, other).any()
    assert not plausible.contradict(one, one).any()
    silent = plausible.Statements(*(np.full_like(part, np.nan) for part in one))
    assert not plausible.contradict(silent, other).any()
    assert plausible.contradict(one, other._replace(gradients=-other.gradients)).mean() > 0.5  # the twin
    assert plausible.contradict(one, other._replace(values=other.values - 1e8)).all()


def test_packed_statements_come_back():
    one = quadratic([1.0, -2.0])
    for part, same in zip(one, plausible.Statements.unpack(one.pack()), strict=True):
        np.testing.assert_array_equal(part, same)


def test_conjugates_obey_fenchel_and_young():
    x, u = np.array([0.5, -1.0]), np.array([3.0, 0.2])
    values, conjugates = x**2, u**2 / 4  # f = x^2
    assert not plausible.beyond_conjugate(values, conjugates, u * x, np.zeros(2)).any()
    assert plausible.beyond_conjugate(values, conjugates - 10.0, u * x, np.zeros(2)).all()


def test_capped_sums_leave_honest_numbers_as_they_are():
    values = np.random.default_rng(0).lognormal(0.0, 1.0, 30)
    assert plausible.capped(values) is values
    assert plausible.capped(np.array([1.0, 1.0, 1e9])).tolist() == [1.0, 1.0, 200.0]
    assert plausible.capped(np.array([0.0, 0.0, 1.0])).tolist() == [0.0, 0.0, 1.0]  # nothing to compare with
    assert plausible.typical(values) == float(np.exp(np.log(values).mean()))
    assert plausible.typical(np.array([1.0, 1.0, 1e300])) == pytest.approx(10.0)


def batch(kind="prox", n=4, **arrays):
    return Batch(kind, 0, np.arange(n), arrays)


@pytest.mark.parametrize(("arrays", "reason"), [
    ({"point": np.array([[1.0], [1e26], [1.0], [1.0]])}, "'point' holds a number beyond 1e\\+25"),
    ({"value": np.array([1.0, 1e61, 1.0, 1.0])}, "'value' holds a number beyond 1e\\+60"),
    ({"curvature": np.array([1.0, -1.0, 0.0, 1.0])}, "'curvature' is negative"),
    ({"count": np.array([1.0, 2.5, 3.0, 4.0])}, "no number of rows"),
    ({"count": np.array([1.0, 2.0**31, 3.0, 4.0])}, "no number of rows"),
    ({"count": np.array([1, -5, 3, 4])}, "'count' is negative"),
])
def test_numbers_that_no_data_give(arrays, reason):
    (user, why), = plausible.objections(batch(**arrays))
    assert user == 1
    assert re.search(reason, why)
    honest = {name: np.ones_like(array) for name, array in arrays.items()}
    assert plausible.objections(batch(**honest)) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_nobody_who_tells_the_truth_is_set_aside(seed):
    """Users of very different scales, with few rows, hard for the algorithm: slow, perhaps, but never liars."""
    rng = np.random.default_rng(seed)
    n, rows, p = int(rng.integers(3, 9)), int(rng.integers(1, 25)), int(rng.integers(1, 4))
    owner = np.repeat(np.arange(n), rows)
    x = rng.standard_normal((n * rows, p)) * (10.0 ** rng.uniform(-3, 3, (n, 1)))[owner]
    margin = (x * rng.standard_normal((n, p))[owner]).sum(axis=1)
    loss = [ct.Logistic(ridge=1e-3), ct.Squared(), ct.SquaredHinge(ridge=1e-3), ct.Huber(ridge=1e-3)][seed % 4]
    y = margin + rng.standard_normal(margin.size) * 10.0 ** rng.uniform(-8, 2)
    y = np.where(y > 0, 1.0, -1.0) if seed % 2 == 0 else y
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ct.CoterieWarning)
        run = ct.federate(ct.Users.from_arrays(x, y, owner), loss, 10.0 ** rng.uniform(-4, 1), max_rounds=120,
                          algorithm=[ct.Newton(), ct.Splitting()][seed // 4 % 2])
    assert run.aside == {}
