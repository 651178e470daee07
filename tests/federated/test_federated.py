"""Federations in one process: what crosses, what comes out, what goes wrong on the way."""

from __future__ import annotations

import logging
import struct
import warnings
import zlib
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.problems import LOSS_NAMES, graph_for, loss_for, points_problem, quiet_problem, radius, users_for

import coterie as ct
from coterie.datasets import clustered, gaussian_mixture
from coterie.federated import Data, Federation, FederationSettings, LocalRuntime
from coterie.federated.algorithms.base import Replies
from coterie.federated.protocol.messages import FIELDS, KINDS, VERSION, BadMessage, Message, Query, Reply, decode
from coterie.federated.run import run_federation

CONVERGED, UNANSWERED = ct.Status.CONVERGED, ct.Status.UNANSWERED
NEWTON, SPLITTING, SERVER, USERS = ct.Newton(), ct.Splitting(), ct.PDMM(), ct.PDMM(edge_state="users")
PROVEN = {"newton": NEWTON, "splitting": SPLITTING, "pdmm-server": SERVER, "pdmm-users": USERS}
#: PDMM takes many rounds wherever its pairs are kept; here with the server, in `make test-all` with the users too.
every_algorithm = pytest.mark.parametrize("algorithm", [NEWTON, SPLITTING, SERVER, pytest.param(
    USERS, marks=pytest.mark.slow)], ids=PROVEN)


def slowly(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def federated(problem, algorithm=NEWTON, **more):
    """`federate` on a problem whose concerns are known."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ct.CoterieWarning)
        return ct.federate(problem.users, problem.loss, problem.lam, graph=problem.graph, algorithm=algorithm, **more)


def agrees(run, problem, tol=1e-6):
    """Converged, to the central optimum, with the certificate that an outside judge gives."""
    assert run.status is CONVERGED, (run.status, run.gap, run.n_rounds)
    assert run.gap <= tol
    best = ct.solve(problem, tol=1e-9)
    assert np.linalg.norm(run.models - best.models) <= radius(run) + radius(best)
    assert run.objective <= best.objective + tol * max(abs(best.objective), 1e-9 * problem.loss_at_zero)
    judged = ct.certify(problem, run.models, run.duals)
    assert run.objective == pytest.approx(judged.objective, rel=1e-9, abs=1e-12)
    assert run.certificate.bound == pytest.approx(judged.bound, rel=1e-9, abs=1e-12)


class Spy(LocalRuntime):
    """Carries everything as single messages, and keeps all that crossed; `change` edits what came back."""

    def __init__(self, data, change=None, faults=None):
        super().__init__(data, faults)
        self.change, self.down, self.up = change, [], []

    def exchange(self, queries):
        collected = super().exchange(queries)
        pairs = [(user, reply) for batch in collected.batches for user, reply in batch.items()]
        pairs += collected.singles
        if self.change is not None:
            pairs = self.change(queries, pairs)
        self.down.append(queries)
        self.up += pairs
        return Replies(singles=tuple(pairs), waiting=collected.waiting)


def spied(problem, algorithm, change=None, *, participation=1.0, tol=1e-6, max_rounds=3000, faults=None, held_out=None,
          patience=None, **more):
    """A run over a Spy, as `federate` does it: (run, spy)."""
    chosen = FederationSettings(lam=problem.lam, algorithm=algorithm, participation=participation, patience=patience,
                                tol=tol, max_rounds=max_rounds, score=held_out is not None, **more)
    spy = Spy(Data(problem.loss, problem.samples, held_out), change, faults)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ct.CoterieWarning)
        return run_federation(chosen.federation(problem.users, problem.loss, problem.graph), chosen, spy,
                              problem=problem), spy


def points(n_users=8, lam=0.1, seed=0):
    return points_problem(np.random.default_rng(seed).standard_normal((n_users, 2)), lam)


# -- messages and their bytes

arrays = st.one_of(
    st.lists(st.floats(allow_nan=False), max_size=6).map(np.array).map(lambda a: a.astype(float)),
    st.lists(st.integers(-2**31, 2**31 - 1), max_size=6).map(lambda v: np.array(v, dtype=np.int64)),
    st.floats(allow_nan=False).map(np.array),
    st.tuples(st.integers(0, 3), st.integers(0, 3)).map(lambda s: np.arange(s[0] * s[1], dtype=float).reshape(s)))
messages = st.builds(Message, st.sampled_from(KINDS), st.integers(0, 2**32 - 1),
                     st.dictionaries(st.sampled_from(FIELDS), arrays, max_size=5))


def framed(body):
    return body + struct.pack("<I", zlib.crc32(body))


@settings(max_examples=60)
@given(messages)
def test_messages_survive_their_wire_form(message):
    back = decode(message.encode())
    assert (back.kind, back.round, list(back.arrays)) == (message.kind, message.round, list(message.arrays))
    assert back.numbers == message.numbers
    for name, array in message.arrays.items():
        assert back.arrays[name].shape == array.shape
        assert (back.arrays[name] == array).all()
    assert b"numpy" not in message.encode()  # nothing of pickle's


@settings(max_examples=60)
@given(messages, st.data())
def test_damaged_messages_are_refused(message, data):
    good = message.encode()
    bit = data.draw(st.integers(0, 8 * len(good) - 1))
    flipped = bytearray(good)
    flipped[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BadMessage):
        decode(bytes(flipped))
    with pytest.raises(BadMessage):
        decode(good[:data.draw(st.integers(0, len(good) - 1))])
    with pytest.raises(BadMessage):
        decode(good + b"\0")


@settings(max_examples=300)
@given(st.binary(max_size=60), st.integers(0, 3))
def test_foreign_bytes_never_do_more_than_be_refused(data, form):
    head = [b"", b"CT", b"CT" + bytes([VERSION]), b"CT" + bytes([VERSION]) + b"\2\0\0\0\0"][form]
    for text in (head + data, framed(head + data)):
        with suppress(BadMessage):
            assert isinstance(decode(text), Message)


def test_versions_kinds_fields_and_shapes_that_do_not_exist_are_refused():
    good = Message("train", 3, {"point": np.ones(2)}).encode()
    assert decode(good).round == 3
    body = good[:-4]
    with pytest.raises(BadMessage, match=f"version {VERSION + 1}"):
        decode(framed(body[:2] + bytes([VERSION + 1]) + body[3:]))
    with pytest.raises(BadMessage, match="does not exist"):
        decode(framed(body[:3] + bytes([len(KINDS)]) + body[4:]))
    with pytest.raises(BadMessage, match="does not exist"):
        decode(framed(body[:9] + bytes([len(FIELDS)]) + body[10:]))
    with pytest.raises(BadMessage, match="axes"):
        decode(framed(body[:11] + b"\x09" + body[12:]))
    with pytest.raises(BadMessage, match="longer"):
        decode(good, most=10)
    start = struct.pack("<2sBBIB", b"CT", 1, 0, 0, 1)
    for shape in [(2**32 - 1,) * 3, (0, 2**32 - 1, 2**32 - 1), (2**32 - 1, 0, 2**32 - 1), (2**31, 2**31, 0)]:
        with pytest.raises(BadMessage):
            decode(framed(start + struct.pack("<BBB3I", 0, 0, 3, *shape)))


def test_whole_numbers_too_long_for_the_wire_are_not_changed_silently():
    try:
        back = decode(Message("score", 0, {"count": np.array(2**40)}).encode())
    except (BadMessage, OverflowError):
        return
    assert back.arrays["count"] == 2**40


def wire_size(spy):
    """Bytes up and down, as they would really cross; what all users of a round share counts once."""
    down = 0
    for queries in spy.down:
        alone = replace(queries, shared={})
        own = sum(len(query.encode()) for query in alone.values())
        sum_of_all = sum(len(query.encode()) for query in queries.values())
        down += own + (sum_of_all - own) // max(len(queries), 1)
    return sum(len(reply.encode()) for _, reply in spy.up), down


ALL = [NEWTON, ct.Newton(rank=1), SPLITTING, SERVER, USERS, ct.PDMM(edge_state="users", quiet=2),
       ct.PDMM(edge_state="users", select="variables"), ct.PDMM(bregman="linear"), ct.FedAvg(rounds=5),
       ct.SquaredPenalty(rounds=5)]


@pytest.mark.parametrize("algorithm", ALL, ids=str)
@pytest.mark.parametrize("faults", [slowly(None), ct.Faults(drop=0.1, late=0.2, twice=0.2)], ids=["fine", "faults"])
def test_the_ledger_has_the_sizes_that_cross(algorithm, faults):
    problem = quiet_problem(users_for("logistic", n_users=7), ct.Logistic(ridge=0.1), 0.1)
    run, spy = spied(problem, algorithm, participation=0.5, faults=faults, max_rounds=30)
    assert (run.ledger.bytes_up, run.ledger.bytes_down) == wire_size(spy)
    consistent(run.ledger)


@pytest.mark.parametrize("faults", [None, ct.Faults(late=0.5, twice=0.5)], ids=["fine", "faults"])
def test_the_ledger_has_the_sizes_of_weights_and_scores(faults):
    problem = quiet_problem(users_for("logistic", n_users=7, samples=20), ct.Logistic(ridge=0.1), 0.1)
    run, spy = spied(problem, NEWTON, faults=faults, held_out=problem.users, weights="wald")
    assert (run.ledger.bytes_up, run.ledger.bytes_down) == wire_size(spy)
    assert {"local", "expand", "certify", "score"} <= {entry.kind for entry in run.ledger.entries}


def test_messages_in_batches_count_as_messages_one_by_one():
    """Through `federate` many answers are one batch; the account is the same."""
    problem = points()
    many, (one, _) = federated(problem, USERS, max_rounds=20), spied(problem, USERS, max_rounds=20)
    assert many.ledger.bytes > 0
    for what in ("bytes", "numbers"):
        for key in ("round", "kind", "field"):
            assert many.ledger.by(key, what) == one.ledger.by(key, what)


def consistent(book):
    for what in ("bytes", "numbers"):
        for way in ("up", "down"):
            total = book.total(what, direction=way)
            for key in ("round", "kind", "field"):
                parts = {k: v for (k, direction), v in book.by(key, what).items() if direction == way}
                assert sum(parts.values()) == total
                for value, amount in parts.items():
                    assert book.total(what, direction=way, **{key: value}) == amount
    own = sum(int(account[:, 1].sum()) for (way, _), account in book.per_user.items() if way == "up")
    assert own == book.bytes_up
    assert sum(size for k in range(book.n_users) for (way, _), (_, size) in book.user(k).items() if way == "up") == own
    assert book.bytes == book.bytes_up + book.bytes_down
    down = sum(int(account[:, 1].sum()) for (way, _), account in book.per_user.items() if way == "down")
    assert 0 < down <= book.bytes_down  # the rest is broadcast


# -- the optimum

@pytest.mark.parametrize("participation", [1.0, 0.4, slowly(0.1)])
@pytest.mark.parametrize("name", LOSS_NAMES)
def test_newton_reaches_the_central_optimum(name, participation):
    kinds = ["complete", "weighted", "knn", "disconnected"]
    for kind in kinds if participation == 1.0 else [kinds[LOSS_NAMES.index(name) % 4]]:
        problem = quiet_problem(users_for(name), loss_for(name), 0.05, graph_for(kind, 9))
        agrees(federated(problem, participation=participation), problem)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSS_NAMES)
def test_newton_reaches_the_central_optimum_on_every_graph(name):
    for kind in ("complete", "weighted", "knn", "disconnected"):
        problem = quiet_problem(users_for(name, seed=1), loss_for(name), 0.1, graph_for(kind, 9, seed=1))
        agrees(federated(problem, participation=0.4), problem)


@pytest.mark.parametrize("participation", [0.4, slowly(1.0), slowly(0.1)])
@pytest.mark.parametrize("name", LOSS_NAMES)
def test_splitting_reaches_the_central_optimum(name, participation):
    kind = ["complete", "weighted", "knn", "disconnected"][LOSS_NAMES.index(name) % 4]
    problem = quiet_problem(users_for(name), ridged(name), 0.05, graph_for(kind, 9))
    agrees(federated(problem, SPLITTING, participation=participation), problem)


@pytest.mark.slow
@pytest.mark.parametrize("participation", [1.0, 0.4])
@pytest.mark.parametrize("name", LOSS_NAMES)
def test_pdmm_reaches_the_central_optimum(name, participation):
    kind = "complete" if participation == 1.0 else "weighted"
    problem = quiet_problem(users_for(name), ridged(name), 0.05, graph_for(kind, 9))
    agrees(federated(problem, SERVER, participation=participation, max_rounds=6000), problem)


def ridged(name):
    return loss_for(name) if "distance" in name else loss_for(name, ridge=0.05)


@every_algorithm
@pytest.mark.parametrize(("n_users", "lam"), [(1, 0.1), (2, 0.05), (2, 10.0), slowly(6, 0.0), (6, 50.0)])
def test_few_users_and_the_ends_of_lam(algorithm, n_users, lam):
    problem = points(n_users, lam)
    run = federated(problem, algorithm, max_rounds=2000)
    agrees(run, problem)
    if lam >= 10:
        assert run.n_clusters == 1
        assert np.linalg.norm(run.models[0] - problem.users.features.mean(axis=0)) <= radius(run)
    if lam == 0:
        assert np.linalg.norm(run.models - problem.users.features) <= radius(run)


def test_a_wrong_answer_would_not_be_certified():
    """The twin of `agrees`: models moved a little have a gap."""
    problem = points()
    run = federated(problem)
    moved = replace(run, models=run.models + 0.01)
    assert ct.certify(problem, moved.models, run.duals).relative_gap > 1e-5
    with pytest.raises(AssertionError):
        agrees(moved, problem)


def test_newton_steps_back_where_second_order_models_promise_too_much():
    rng = np.random.default_rng(0)
    X, user = rng.standard_normal((60, 2)), np.repeat(np.arange(6), 10)
    users = ct.Users.from_arrays(X, rng.poisson(np.exp(5 + X @ [1.5, -1.0])).astype(float), user)
    problem = ct.Problem(users, ct.Poisson(ridge=1e-2), lam=2.0)
    assert users.targets.max() > 1000
    run, spy = spied(problem, NEWTON, max_rounds=60)
    agrees(run, problem)
    shares = np.concatenate([reply.arrays["share"] for _, reply in spy.up if "share" in reply.arrays])
    assert (shares > 0).all()
    assert shares.min() < 1
    assert run.n_rounds <= 40
    calm, spy = spied(points(), NEWTON)
    assert calm.status is CONVERGED
    assert not any("share" in reply.arrays for _, reply in spy.up)


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.slow
def test_low_rank_hessians_save_bytes_and_change_nothing(intercept):
    users = clustered("logistic", n_users=8, samples=6, n_features=40, seed=2).users
    problem = quiet_problem(users, ct.Logistic(ridge=0.05, intercept=intercept), 0.02)
    full, exact, rough = (federated(problem, ct.Newton(rank=rank)) for rank in (-1, 0, 5))
    agrees(full, problem)
    agrees(exact, problem)
    agrees(rough, problem)
    assert exact.n_rounds == full.n_rounds
    assert np.abs(exact.models - full.models).max() < 1e-6
    assert exact.ledger.bytes_up < 0.6 * full.ledger.bytes_up
    per_round = [run.ledger.total("numbers", field="factor") / run.n_rounds for run in (exact, rough)]
    assert full.ledger.total("numbers", field="factor") == 0
    assert 0 < per_round[1] < per_round[0]


# -- who takes part, and what goes wrong on the way

TRACE = np.random.default_rng(3).random((7, 8)) < 0.5
FAULTS = {"drop": ct.Faults(drop=0.3), "late": ct.Faults(late=0.4), "twice": ct.Faults(twice=0.6),
          "away": ct.Faults(away=np.random.default_rng(1).random((9, 8)) < 0.3),
          "all": ct.Faults(drop=0.2, late=0.2, twice=0.3, away=np.random.default_rng(1).random((9, 8)) < 0.2)}


@every_algorithm
@pytest.mark.parametrize("faults", [f if name in ("late", "all") else slowly(f) for name, f in FAULTS.items()],
                         ids=FAULTS)
def test_faults_do_not_move_the_optimum(algorithm, faults):
    problem = points(lam=0.15)
    run = federated(problem, algorithm, faults=faults, participation=0.5, max_rounds=3000)
    agrees(run, problem)
    assert run.refusals == ()
    assert run.aside == {}


@every_algorithm
@pytest.mark.parametrize("who", [slowly(3), 0.5, TRACE, ct.Participation(count=4, order="sweeps"),
                                 slowly(ct.Participation(fraction=0.4, trace=TRACE))],
                         ids=["count", "share", "trace", "sweeps", "share of trace"])
def test_whoever_takes_part_the_optimum_is_the_same(algorithm, who):
    problem = points(lam=0.15)
    agrees(federated(problem, algorithm, participation=who, max_rounds=3000), problem)
    _, spy = spied(problem, algorithm, participation=who, max_rounds=15)
    main = [queries for queries in spy.down if queries.kind != "certify"]
    if algorithm is not USERS and who is not TRACE:
        chosen = ct.Participation.of(who)
        assert max(map(len, main)) == (chosen.count or round(8 * chosen.fraction))
    trace = who if who is TRACE else getattr(who, "trace", None)
    if trace is not None:
        assert all(trace[queries.round % 7][user] for queries in spy.down for user in queries)
    if getattr(who, "order", None) == "sweeps" and algorithm is not USERS and algorithm is not NEWTON:
        asked = np.concatenate([queries.users for queries in main])
        for first in range(0, 24, 8):
            assert sorted(asked[first:first + 8]) == list(range(8))


@every_algorithm
def test_one_seed_one_run(algorithm):
    problem = points(lam=0.15)

    def run(seed):
        return federated(problem, algorithm, participation=0.4, seed=seed, max_rounds=40,
                         faults=ct.Faults(drop=0.1, late=0.2, seed=seed))
    first, again, other = run(1), run(1), run(2)
    assert first.models.tobytes() == again.models.tobytes()
    assert first.duals.tobytes() == again.duals.tobytes()
    assert first.ledger.entries == again.ledger.entries
    assert first.ledger.entries != other.ledger.entries
    assert first.models.tobytes() != other.models.tobytes()


# -- answers that are none

def with_arrays(edit):
    return lambda reply: Reply(reply.kind, reply.round, edit(dict(reply.arrays)))


def floats(value):
    return with_arrays(lambda a: {k: np.full_like(v, value) if v.dtype.kind == "f" else v for k, v in a.items()})


def first_field(change):
    def edit(a):
        name = next(iter(a))
        return {**a, name: change(np.asarray(a[name]))}
    return with_arrays(edit)


BAD = {"nan": floats(np.nan), "inf": floats(np.inf), "minus inf": floats(-np.inf),
       "longer": first_field(lambda v: np.zeros((*v.shape, 7))),
       "two rows": with_arrays(lambda a: {k: np.concatenate([v, v]) if np.ndim(v) else np.array([v, v])
                                          for k, v in a.items()}),
       "extra": with_arrays(lambda a: {**a, "wake": np.ones(2)}),
       "kind": lambda reply: Reply("score" if reply.kind != "score" else "prox", reply.round, reply.arrays),
       "empty": with_arrays(lambda a: {})}
FIELDS_OF = {"newton": ("value", "gradient", "hessian"), "splitting": ("point", "value", "curvature"),
             "pdmm-server": ("point", "value", "curvature"),
             "pdmm-users": ("model", "value", "curvature", "difference")}
CASES = [(name, why) for name in PROVEN for why in (*BAD, *FIELDS_OF[name])]


def without(user, problem):
    remaining = np.arange(problem.n_users) != user
    return quiet_problem(problem.users.take(remaining), problem.loss, problem.lam, problem.graph.take(remaining))


def spoilt(user, edit, *, kind=None, turn=None):
    def change(queries, pairs):
        if (turn is not None and queries.round != turn) or (kind is not None and queries.kind != kind):
            return pairs
        return [(who, edit(reply) if who == user else reply) for who, reply in pairs]
    return change


def refused(run, problem, user, caplog):
    """The sender is excluded with a reason, in the log and in the run; the others' optimum is reached."""
    assert [who for _, who, _ in run.refusals] == [user]
    reason = run.refusals[0][2]
    assert run.aside == {user: reason}
    assert any(reason in record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    assert run.models.shape[0] == problem.n_users - 1
    agrees(run, without(user, problem))


@pytest.mark.parametrize("turn", [0, slowly(2)])
@pytest.mark.parametrize(("name", "why"), [case if k % 3 == 0 else slowly(*case) for k, case in enumerate(CASES)])
def test_bad_answers_are_refused_and_the_others_go_on(name, why, turn, caplog):
    if name == "newton" and turn:  # it is done with quadratics after one round, and with these users after two
        problem, turn = quiet_problem(users_for("logistic", n_users=8), ct.Logistic(ridge=0.1), 0.1), 1
    else:
        problem = points()
    edit = BAD[why] if why in BAD else with_arrays(lambda a: {k: v for k, v in a.items() if k != why})
    run, _ = spied(problem, PROVEN[name], spoilt(3, edit, turn=turn))
    refused(run, problem, 3, caplog)


@pytest.mark.parametrize("turn", [0, 1])
def test_hessians_that_are_none_are_refused(turn, caplog):
    problem = quiet_problem(users_for("logistic", n_users=8), ct.Logistic(ridge=0.1), 0.1)
    edit = with_arrays(lambda a: {**a, "hessian": -np.abs(a["hessian"]) - 1})
    run, _ = spied(problem, NEWTON, spoilt(3, edit, turn=turn))
    refused(run, problem, 3, caplog)
    assert "positive semidefinite" in run.refusals[0][2]


@every_algorithm
@pytest.mark.parametrize("why", ["nan", "longer", "empty", "extra", "kind"])
def test_bad_answers_in_the_proof_leave_no_wrong_bound(algorithm, why, caplog):
    problem = points()
    run, _ = spied(problem, algorithm, spoilt(3, BAD[why], kind="certify"))
    refused(run, problem, 3, caplog)


@pytest.mark.parametrize("algorithm", [NEWTON, USERS], ids=["newton", "pdmm-users"])
@pytest.mark.parametrize("kind", ["score", "gradient", "local"])
def test_bad_answers_in_other_rounds(algorithm, kind, caplog):
    problem = points(lam=0.1)
    change = spoilt(3, BAD["nan"], kind=kind)
    if kind == "gradient":
        run, _ = spied(problem, ct.FedAvg(rounds=3, steps=1), change)
        assert list(run.aside) == [3]
        judged = ct.certify(run.problem, run.models, run.duals)
        assert (run.objective, run.certificate.bound) == pytest.approx((judged.objective, judged.bound), rel=1e-9)
        return
    weights = "gaussian" if kind == "local" else "unit"
    run, _ = spied(problem, algorithm, change, held_out=problem.users, weights=weights)
    assert list(run.aside) == [3]
    assert "nan" in run.aside[3]
    agrees(run, run.problem)
    assert run.problem.n_users == 7
    assert run.scores[3, 2] == 0


@every_algorithm
def test_strangers_are_ignored(algorithm, caplog):
    problem = points()
    stray = {999: 1, -1: 1}

    def change(queries, pairs):
        return pairs + [(who, BAD["nan"](pairs[0][1])) for who in stray] if queries.round == 1 else pairs
    run, _ = spied(problem, algorithm, change)
    agrees(run, problem)
    assert {who for _, who, _ in run.refusals} == {999, -1}
    assert run.aside == {}
    assert sum("not part of the federation" in record.getMessage() for record in caplog.records) == 2
    assert (run.models == spied(problem, algorithm)[0].models).all()


@every_algorithm
@pytest.mark.parametrize("what", ["unasked", slowly("twice"), slowly("old"), slowly("no round")])
def test_answers_nobody_waits_for_change_nothing(algorithm, what, caplog):
    caplog.set_level(logging.INFO, logger="coterie.federated")
    problem, earlier = points(), []

    def change(queries, pairs):
        earlier.append(pairs)
        if not pairs or queries.kind == "certify":
            return pairs
        nonsense = floats(1e3)(pairs[0][1])
        if what == "twice":
            return [*pairs, (pairs[0][0], nonsense)]
        absent = [user for user in range(8) if user not in queries.users]
        if what == "unasked" and absent:
            return [*pairs, (absent[0], nonsense)]
        if what == "no round" and absent:
            return [*pairs, (absent[0], replace(nonsense, round=-1))]
        if what == "old" and queries.round > 0:
            user, reply = earlier[0][0]
            return [*pairs, (user, floats(1e3)(reply))]
        return pairs
    run, _ = spied(problem, algorithm, change, participation=0.5, max_rounds=60)
    plain, _ = spied(problem, algorithm, participation=0.5, max_rounds=60)
    assert run.aside == {}
    assert (run.models == plain.models).all()
    assert run.n_rounds == plain.n_rounds
    if algorithm is not USERS or what in ("twice", "old"):  # of those, nobody is unasked
        assert any("unexpected reply" in record.getMessage() for record in caplog.records)


@every_algorithm
def test_when_everyone_is_refused_the_run_ends_with_a_word(algorithm):
    try:
        run, _ = spied(points(), algorithm, lambda queries, pairs: [(who, BAD["nan"](r)) for who, r in pairs],
                       max_rounds=40)
    except ct.CoterieError as error:
        said = str(error)
    else:
        said = ""
        assert run.status is not CONVERGED
        assert run.gap == np.inf
        assert len(run.aside) == 8
    assert "user" in said or said == ""


@every_algorithm
def test_one_user_left_over_finds_its_own_optimum(algorithm):
    problem = points()
    run, _ = spied(problem, algorithm, lambda queries, pairs: [(w, BAD["nan"](r) if w else r) for w, r in pairs])
    assert run.status is CONVERGED
    assert np.allclose(run.models, problem.users.features[:1], atol=1e-4)


# -- privacy, read off the messages

def rows_of(message, dim):
    """All vectors of a model's length in a message."""
    collected = [array.reshape(-1, dim) for array in message.arrays.values()
             if np.ndim(array) and np.shape(array)[-1] == dim and array.dtype.kind == "f"]
    return np.concatenate(collected) if collected else np.zeros((0, dim))


def models_met(problem, algorithm, participation):
    """For each user, how often a vector it received is the model of another."""
    run, spy = spied(problem, algorithm, participation=participation, max_rounds=40)
    dim, n = problem.dim, problem.n_users
    theirs, seen, began = [[run.models[k:k + 1]] for k in range(n)], [[] for _ in range(n)], set()
    for user, reply in spy.up:
        theirs[user] += [np.atleast_2d(reply.arrays[name]) for name in ("point", "model") if name in reply.arrays]
    for queries in spy.down:
        for user, query in queries.items():
            seen[user].append(rows_of(query, dim))
            if "model" in query.arrays and user in began:  # the first has nothing of its own data yet
                theirs[user].append(np.atleast_2d(query.arrays["model"]))
            began.add(user)
    met = 0
    for user in range(n):
        rows = np.unique(np.concatenate(seen[user]), axis=0)
        others = np.unique(np.concatenate([m for k in range(n) if k != user for m in theirs[k]]), axis=0)
        others = others[np.abs(others).max(axis=1) > 1e-6]
        met += int((np.abs(rows[:, None] - others[None]).max(axis=2) < 1e-9).any(axis=1).sum())
    return met


@pytest.mark.parametrize("algorithm", [*PROVEN.values(), ct.PDMM(bregman="linear")], ids=[*PROVEN, "pdmm-linear"])
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_no_user_is_shown_another_users_model_unless_it_holds_its_edges(algorithm, participation):
    problem = quiet_problem(users_for("logistic", n_users=6), ct.Logistic(ridge=0.1), 0.004)
    assert ct.solve(problem).n_clusters == 6
    met = models_met(problem, algorithm, participation)
    if algorithm is USERS:
        assert met > 6
    else:
        assert met == 0


def test_whoever_is_asked_first_is_not_shown_what_another_alone_has_found():
    problem = quiet_problem(users_for("logistic", n_users=6), ct.Logistic(ridge=0.1), 0.004)
    federation = Federation.of(problem, participation=ct.Participation(count=1))
    method, runtime = NEWTON.on(federation), LocalRuntime(Data.of(problem.users, problem.loss))
    state = method.begin(np.zeros((6, problem.dim)))
    for _ in range(6):
        queries = method.ask(state)
        for user, query in queries.items():
            others = state.now[state.known & (np.arange(6) != user)]
            assert not (np.abs(others - query.arrays["model"]).max(axis=1) < 1e-9).any()
        state = method.tell(state, runtime.exchange(queries).batches[0])
    assert state.known.all()


@pytest.mark.parametrize("algorithm", ALL, ids=str)
def test_no_message_to_a_user_holds_rows_of_another(algorithm):
    problem = quiet_problem(users_for("squared", n_users=6), ct.Squared(ridge=0.1), 0.05)
    _, spy = spied(problem, algorithm, max_rounds=30)
    users, width = problem.users, problem.users.n_features
    for queries in spy.down:
        for user, query in queries.items():
            values = np.concatenate([np.ravel(a) for a in query.arrays.values() if np.asarray(a).dtype.kind == "f"])
            windows = np.lib.stride_tricks.sliding_window_view(values, width) if len(values) >= width else values[:0]
            other = users.features[users.owner != user]
            assert not (np.abs(windows.reshape(-1, 1, width) - other[None]).max(axis=2) < 1e-12).any()
    planted = np.concatenate([[1.0], users.features[-1], [2.0]])  # the twin: such a row would be found
    windows = np.lib.stride_tricks.sliding_window_view(planted, width)
    assert (np.abs(windows[:, None] - users.features[None]).max(axis=2) < 1e-12).any()


# -- certificates with some users away

@every_algorithm
def test_silent_users_leave_no_bound(algorithm):
    """Half of all users, who are waited for whatever it takes."""
    problem = points()
    away = np.tile(np.arange(8) % 2 == 1, (2, 1))
    run = federated(problem, algorithm, faults=ct.Faults(away=away), max_rounds=60)
    assert run.status is UNANSWERED
    assert run.gap == np.inf
    assert run.certificate.bound == -np.inf
    assert run.certificate.gap == np.inf
    assert run.aside == {}
    assert all(np.isnan(line.gap) or line.gap == np.inf for line in run.history)


@every_algorithm
def test_users_who_fall_silent_late_leave_no_bound(algorithm):
    """Whoever is there in all rounds but the proof's."""
    problem = points()

    def change(queries, pairs):
        return [(user, reply) for user, reply in pairs if queries.kind != "certify" or user % 2 == 0]
    run, _ = spied(problem, algorithm, change, max_rounds=100)
    assert (run.status, run.gap, run.certificate.bound) == (UNANSWERED, np.inf, -np.inf)


@every_algorithm
def test_a_few_users_who_are_silent_for_long_are_set_aside(algorithm):
    problem = points()
    run = federated(problem, algorithm, faults=ct.Faults(away=np.tile(np.arange(8) == 3, (2, 1))))
    assert list(run.aside) == [3]
    assert "100 queries in a row" in run.aside[3]
    agrees(run, without(3, problem))


@every_algorithm
def test_patience_sets_silent_users_aside(algorithm, caplog):
    problem = points()
    run = federated(problem, algorithm, faults=ct.Faults(away=np.tile(np.arange(8) == 3, (2, 1))), patience=4)
    assert list(run.aside) == [3]
    assert "4 queries in a row" in run.aside[3]
    assert any("4 queries in a row" in record.getMessage() for record in caplog.records)
    agrees(run, without(3, problem))
    patient = federated(problem, algorithm, faults=ct.Faults(drop=0.3), patience=12)
    assert patient.aside == {}


# -- averages, starts, paths, weights

def test_fedavg_with_one_step_is_gradient_descent_on_the_pooled_loss():
    problem = quiet_problem(users_for("logistic"), ct.Logistic(ridge=0.1), 0.1)
    run = federated(problem, ct.FedAvg(steps=1, rate=0.3, rounds=25))
    x = np.zeros(problem.dim)
    for _ in range(25):
        margins = [a @ x[:-1] + x[-1] for a in (problem.users.take([k]).features for k in range(9))]
        total = np.zeros_like(x)
        for k, t in enumerate(margins):
            own = problem.users.take([k])
            slope = -own.targets / (1 + np.exp(own.targets * t)) / len(t)
            total += np.append(own.features.T @ slope + 0.1 * x[:-1], slope.sum())
        x -= 0.3 * total / 9
    assert np.abs(run.models - x).max() < 1e-12
    more = federated(problem, ct.FedAvg(steps=3, rate=0.3, rounds=25))
    assert np.abs(more.models - x).max() > 1e-3
    judged = ct.certify(problem, run.models, run.duals)
    assert (run.objective, run.certificate.bound) == pytest.approx((judged.objective, judged.bound), rel=1e-9)


@pytest.mark.slow
def test_the_squared_penalty_comes_near_its_closed_form():
    """x_i = (a_i + strength mean) / (1 + strength) minimises sum 1/2 ||x_i - a_i||^2 + strength/2 ||x_i - mean||^2."""
    a = np.random.default_rng(5).standard_normal((6, 2)) * 3
    users = ct.Users.from_arrays(a)
    exact = (a + 1.5 * a.mean(axis=0)) / 2.5

    def error(rate, rounds, **more):
        algorithm = ct.SquaredPenalty(**{"strength": 1.5, **more}, rate=rate, chance=0.3, rounds=rounds)
        return np.abs(ct.federate(users, ct.SquaredDistance(), 0.25, algorithm=algorithm).models - exact).max()
    assert error(0.001, 4000) < 0.12 < error(0.1, 300) < 1.5  # the steps' noise shrinks with their length
    assert error(0.001, 4000, strength=None) < 0.12  # lam N = 0.25 * 6
    assert error(0.001, 4000, strength=0.5) > 0.5


def test_starts_save_rounds_and_lead_to_the_same_optimum():
    problem = quiet_problem(users_for("logistic"), ct.Logistic(ridge=0.05), 0.05)
    cold = federated(problem, SPLITTING)
    agrees(cold, problem)
    near = federated(problem.with_lam(0.05 * 1.01), SPLITTING)
    for start in (near, ct.FedAvg(steps=5, rate=0.5, rounds=10), np.full(problem.dim, 0.3), cold.models):
        run = federated(problem, SPLITTING, start=start)
        agrees(run, problem)
        if start is near:
            assert run.n_rounds < cold.n_rounds
    stages = [line.stage for line in federated(problem, start=ct.FedAvg(rounds=7)).history]
    assert stages[:8] == ["start"] * 7 + ["main"]
    newton = federated(problem)
    warm = federated(problem.with_lam(0.049), start=newton)
    agrees(warm, problem.with_lam(0.049))
    assert warm.n_rounds <= newton.n_rounds


@pytest.mark.parametrize("start", [NEWTON, SPLITTING, SERVER], ids=["newton", "splitting", "pdmm"])
def test_any_algorithm_may_prepare_the_start_or_is_refused(start):
    rounds = []

    def count(line):
        rounds.append(line.stage)
        assert len(rounds) < 400, f"still in stage {line.stage!r} after 400 rounds"
    try:
        run = federated(points(), SPLITTING, start=start, max_rounds=100, progress=count)
    except ct.InvalidInput:
        return
    agrees(run, points())


def test_a_long_start_leaves_rounds_for_the_algorithm():
    problem = quiet_problem(users_for("logistic"), ct.Logistic(ridge=0.05), 0.05)
    agrees(federated(problem, start=ct.FedAvg(steps=1, rate=0.01, rounds=250)), problem)


def test_a_path_goes_down_from_consensus_and_scores_what_is_held_out():
    users = clustered("logistic", n_users=9, samples=40, n_features=2, seed=1, separation=2.0).users
    split = users.split(test=0.4, seed=0)
    loss = ct.Logistic(ridge=0.05)
    path = ct.federate_path(split.train, loss, n_lams=6, ratio=0.05, held_out=split.test)
    assert (np.diff(path.lams) < 0).all()
    assert path.lams[-1] == pytest.approx(0.05 * path.lams[0])
    assert path.n_clusters[0] == 1
    assert path.n_clusters[-1] > 1
    bracket = ct.lam_max(ct.Problem(split.train, loss, lam=0.0))
    assert bracket.lower * 0.99 <= path.lams[0] <= bracket.upper * 1.05
    losses = []
    for run in path:
        agrees(run, ct.Problem(split.train, loss, lam=run.lam))
        own = []
        for k in range(9):
            rows, x = split.test.take([k]), run.models[k]
            t = rows.features @ x[:-1] + x[-1]
            total = np.log1p(np.exp(-rows.targets * t)).sum() + len(t) * 0.025 * x[:-1] @ x[:-1]
            hits = ((t >= 0) == (rows.targets > 0)).sum()
            assert run.scores[k] == pytest.approx([total, hits, len(t)], rel=1e-10)
            own.append(total / len(t))
        losses.append(own)
    means = np.mean(losses, axis=1)
    assert path.scores == pytest.approx(means, rel=1e-10)
    assert path.best(one_standard_error=False) is path[int(means.argmin())]
    chosen, least = path.best(), losses[int(means.argmin())]
    slack = np.std(np.array(losses) - least, axis=1) / 3
    allowed = means <= means.min() + slack
    assert chosen.n_clusters == path.n_clusters[allowed].min()
    assert path.bytes == sum(run.ledger.bytes for run in (*path.spent, *path.runs))


def test_a_path_at_given_lams_sorts_them_and_without_rows_has_no_best():
    problem = points()
    path = ct.federate_path(problem.users, problem.loss, [0.05, 0.4, 0.1], algorithm=SPLITTING)
    assert path.lams.tolist() == [0.4, 0.1, 0.05]
    for run in path:
        agrees(run, problem.with_lam(run.lam))
    assert np.isnan(path.scores).all()
    with pytest.raises(ct.InvalidInput, match="holdout"):
        path.best()


@pytest.mark.parametrize("kind", ["wald", "gaussian"])
def test_weights_are_those_made_centrally(kind):
    users = clustered("logistic", n_users=12, samples=30, seed=1).users
    loss = ct.Logistic(ridge=0.02)
    run = ct.federate(users, loss, 0.1, graph=kind)
    graph = ct.adaptive_graph(ct.LocalModels.of(users, loss), kind)
    assert (run.problem.graph.edges == graph.edges).all()
    assert np.abs(run.problem.graph.weights - graph.weights).max() < 1e-9
    assert not graph.is_complete
    agrees(run, ct.Problem(users, loss, lam=0.1, graph=graph))


# -- what cannot be worked with

@pytest.mark.parametrize(("more", "word"), [
    ({"tol": 0}, "1e-6"), ({"tol": np.nan}, "1e-6"), ({"max_rounds": 0}, "None"),
    ({"algorithm": "newton"}, "ALGORITHMS"), ({"algorithm": ct.Newton}, "ALGORITHMS"), ({"graph": "foo"}, "wald"),
    ({"graph": ct.Graph.complete(3)}, "graph"),
    ({"participation": 0}, "count"), ({"participation": 1.5}, "0.4"), ({"participation": -0.1}, "0.4"),
    ({"participation": np.ones((2, 5), dtype=bool)}, "column"), ({"participation": "all"}, "True and False"),
    ({"start": np.zeros((3, 3))}, "Leave it out"), ({"start": np.full(2, np.inf)}, "Leave it out"),
    ({"start": "zero"}, None), ({"patience": 0}, None), ({"patience": -1}, None),
    ({"seed": -1, "participation": 0.5}, None),
    ({"every": 0, "checkpoint": "here"}, None), ({"faults": ct.Faults(away=np.zeros((2, 3), dtype=bool))}, None),
    ({"faults": ct.Faults(away=np.zeros((1, 11), dtype=bool))}, None), ({"lam": -1.0}, "lam"), ({"lam": np.nan}, "lam"),
    ({"held_out": ct.Users.from_arrays(np.zeros((2, 2)))}, "split")], ids=str)
def test_settings_of_a_run_that_make_no_sense(more, word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings_of = {"lam": 0.1, **more}
    with pytest.raises(ct.InvalidInput, match=word) as error:
        ct.federate(points().users, ct.SquaredDistance(), settings_of.pop("lam"), **settings_of)
    assert error.value.remedy


@pytest.mark.parametrize("make", [
    lambda: ct.Newton(select="best"), lambda: ct.Newton(rank=-2), lambda: ct.Splitting(t=0),
    lambda: ct.Splitting(relax=2),
    lambda: ct.PDMM(variant="new"), lambda: ct.PDMM(pairs="all"), lambda: ct.PDMM(edge_state="cloud"),
    lambda: ct.PDMM(bregman="kl"), lambda: ct.PDMM(select="some"), lambda: ct.PDMM(rho=0), lambda: ct.PDMM(tau=-1),
    lambda: ct.PDMM(nu=np.nan), lambda: ct.PDMM(eta=-1), lambda: ct.PDMM(n_primal=0), lambda: ct.PDMM(quiet=-1),
    lambda: ct.FedAvg(steps=0), lambda: ct.FedAvg(rate=0), lambda: ct.FedAvg(rounds=0),
    lambda: ct.SquaredPenalty(chance=1), lambda: ct.SquaredPenalty(strength=-1), lambda: ct.Faults(drop=1.1),
    lambda: ct.Faults(late=np.nan), lambda: ct.Faults(delay=0), lambda: ct.Participation(order="up"),
    lambda: ct.Participation(count=0), lambda: ct.Participation(trace=np.ones(4)), lambda: ct.Participation(fraction=0),
    lambda: ct.Newton(rank=2.5), lambda: ct.Participation(count=2.5), lambda: ct.FedAvg(steps=2.5),
    lambda: ct.Faults(away=np.zeros((0, 8)))], ids=range(31))
def test_settings_of_a_method_that_make_no_sense(make):
    with pytest.raises(ct.InvalidInput) as error:
        make()
    assert error.value.remedy


@pytest.mark.parametrize("more", [{"lams": []}, {"lams": [-1.0]}, {"lams": [np.nan]}, {"n_lams": 0}, {"ratio": 0.0},
                                  {"ratio": 2.0}], ids=str)
def test_paths_that_make_no_sense(more):
    with pytest.raises(ct.InvalidInput):
        ct.federate_path(points().users, ct.SquaredDistance(), **more)


def test_a_run_begins_only_from_one_of_its_own_kind():
    problem = points()
    run = federated(problem)
    with pytest.raises(ct.InvalidInput, match=r"run\.models"):
        federated(problem, SPLITTING, start=run)
    with pytest.raises(ct.InvalidInput, match=r"run\.models"):
        federated(points(5), start=run)


def test_questions_that_are_none_are_refused_by_the_user():
    data = Data.of(gaussian_mixture(1, n_features=2).users, ct.SquaredDistance())
    from coterie.federated import answer

    good = Query("certify", 0, {"model": np.zeros(2), "slope": np.zeros(2), "anchor": np.zeros(2)})
    assert np.isfinite(answer(data, good).arrays["value"])
    for query in (Query("certify", 0, {"model": np.zeros(2)}), Query("certify", 0, {**good.arrays, "t": np.ones(1)}),
                  Query("certify", 0, {**good.arrays, "model": np.zeros(3)}),
                  Query("score", 0, {"model": np.zeros(2)}),
                  Query("certify", 0, {**good.arrays, "model": np.full(2, np.nan)}), Query("nonsense", 0, {}),
                  Query("local", 0, {"ridge": np.zeros(3)}),
                  Query("expand", 0, {"model": np.zeros(2), "rank": np.ones(2)}),
                  Query("pdmm", 0, {"step": np.array(1), "settings": np.zeros(2), "models": np.zeros((0, 2)),
                                    "who": np.zeros(0, dtype=np.int64)})):
        with pytest.raises(BadMessage):
            answer(data, query)
