"""The paper's algorithm: against its printed lines written out once more, one place of the edges against the other."""

from __future__ import annotations

import numpy as np
import pytest
from support.planted import planted
from support.problems import graph_for, quiet_problem, radius

import coterie as ct
from coterie.datasets import clustered, gaussian_mixture
from coterie.federated import Data, Federation, answer
from coterie.federated.algorithms.edges import answer_edges
from coterie.federated.protocol.messages import decode, gather

CONVERGED = ct.Status.CONVERGED
SETTINGS = {"rho": 0.3, "eta": 0.2, "eta_z": 0.15, "tau": 0.8, "nu": 0.25}


def slowly(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def federation_for(problem, participation=1.0, seed=0, **more):
    return Federation.of(problem, participation=ct.Participation.of(participation), seed=seed, **more)


def by_hand(problem, algorithm, rounds, participation=1.0, seed=0):
    """(queries, state after) of some rounds; every user a process of its own, every message through its bytes."""
    method = algorithm.on(federation_for(problem, participation, seed))
    state = method.begin(np.zeros((problem.n_users, problem.dim)))
    stored = {}
    people = [Data.of(problem.users.take([k]), problem.loss) for k in range(problem.n_users)]
    for _ in range(rounds):
        queries = {user: decode(query.encode()) for user, query in method.ask(state).items()}
        replies = {}
        for user, query in queries.items():
            if query.kind == "pdmm":  # each user stores its edges
                batch, stored[user] = answer_edges(problem.loss, people[user].samples, gather([(0, query)], "query"),
                                                   stored.get(user, {}))
                reply = batch[0]
            else:
                reply = answer(people[user], query)
            replies[user] = decode(reply.encode())
        state = method.tell(state, replies)
        yield queries, state


class Printed:
    """Steps S2 to S11 as printed, one variable at a time; with both pair terms, the block that is missing there."""

    def __init__(self, problem, s):
        self.problem, self.s = problem, s
        self.w = {}
        for (i, j), weight in zip(problem.graph.edges.tolist(), problem.graph.weights, strict=True):
            self.w[i, j] = weight
            if s.pairs == "ordered":
                self.w[j, i] = weight
        self.both = s.variant == "symmetric" or s.pairs == "unordered"
        self.lam = problem.lam / 2 if s.variant == "symmetric" and s.pairs == "ordered" else problem.lam
        zero = np.zeros(problem.dim)
        self.x = [zero] * problem.n_users
        self.z, self.mu, self.hat = ({pair: zero for pair in self.w} for _ in range(3))

    def own(self, i):
        """The pairs of which a user is the head, by neighbour: the order in which messages number them."""
        return sorted(pair for pair in self.w if pair[0] == i)

    def loss(self, i, x):
        at = self.problem.loss.evaluate(self.problem.samples, x[None], 2, np.array([i]))
        return at.gradients[0], at.hessians[0]

    def slope(self, i, x):
        """The slope and the curvature of all that S2 minimises, but the loss and the Bregman term."""
        total, count = np.zeros_like(x), 0
        for (a, b), z in self.z.items():
            if a == i:
                total = total + self.hat[a, b] + self.s.rho * (x - self.x[b] - z)
                count += 1
            elif b == i and self.both:
                total = total - self.hat[a, b] - self.s.rho * (self.x[a] - x - z)
                count += 1
        return total, self.s.rho * count

    def moved(self, i):
        """S2."""
        x = old = self.x[i]
        if self.s.bregman == "linear":
            return old - (self.loss(i, old)[0] + self.slope(i, old)[0]) / self.s.eta
        for _ in range(60):
            gradient, hessian = self.loss(i, x)
            slope, curvature = self.slope(i, x)
            total = gradient + slope + self.s.eta * (x - old)
            x = x - np.linalg.solve(hessian + (curvature + self.s.eta) * np.eye(len(x)), total)
        assert np.abs(total).max() < 1e-11
        return x

    def shrunk(self, i, j):
        """S3, and that it is a minimum: 0 is in lam w d||z|| - muhat - rho (x_i - x_j - z) + eta (z - z_old)."""
        d, old, radius = self.x[i] - self.x[j], self.z[i, j], self.lam * self.w[i, j]
        v = self.hat[i, j] + self.s.rho * d + self.s.eta_z * old
        length = np.linalg.norm(v)
        z = np.zeros_like(v) if length <= radius else (1 - radius / length) * v / (self.s.rho + self.s.eta_z)
        rest = self.hat[i, j] + self.s.rho * (d - z) - self.s.eta_z * (z - old)
        if z.any():
            assert np.allclose(rest, radius * z / np.linalg.norm(z), atol=1e-12)
        else:
            assert np.linalg.norm(rest) <= radius * (1 + 1e-12) + 1e-300
        return z

    def primal(self, users, pairs):
        x = {i: self.moved(i) for i in users}
        z = {pair: self.shrunk(*pair) for pair in pairs}
        self.x = [x.get(i, old) for i, old in enumerate(self.x)]
        self.z.update(z)

    def dual(self, pairs):
        """S8 and S11."""
        for i, j in pairs:
            r = self.x[i] - self.x[j] - self.z[i, j]
            self.mu[i, j] = self.mu[i, j] + self.s.tau * self.s.rho * r
            self.hat[i, j] = self.mu[i, j] - self.s.nu * self.s.rho * r

    def touched(self, users):
        """The pairs users update: their own; where two share one, either's."""
        return [p for p in self.w if p[0] in users or (self.s.pairs == "unordered" and p[1] in users)]


def problem_of(kind="complete", lam=0.15, n_users=5, seed=3):
    users = clustered("logistic", n_users=n_users, samples=9, n_features=2, seed=seed, separation=2.0).users
    return quiet_problem(users, ct.Logistic(ridge=0.05), lam, graph_for(kind, n_users, seed))


FORMS = [{"variant": "paper"}, {"variant": "symmetric"}, {"pairs": "unordered"},
         {"variant": "paper", "bregman": "linear", "eta": 3.0},
         {"variant": "symmetric", "bregman": "linear", "eta": 3.0}]


@pytest.mark.parametrize("kind", ["complete", "knn"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_users_drawn_with_edges_at_the_server(form, kind):
    problem = problem_of(kind)
    algorithm = ct.PDMM(edge_state="server", **SETTINGS | form)
    printed, asked = Printed(problem, algorithm), []
    for queries, state in by_hand(problem, algorithm, 15, participation=0.4):
        printed.primal(queries, printed.touched(queries))
        printed.dual(printed.touched(queries))
        assert np.abs(state.now - printed.x).max() < 1e-10
        asked.append(tuple(queries))
    assert len(set(asked)) > 4  # not always the same
    assert set(map(len, asked)) == {2}
    assert max(np.linalg.norm(mu) for mu in printed.mu.values()) > 0.01


@pytest.mark.parametrize("kind", ["knn", slowly("complete"), slowly("weighted")])
@pytest.mark.parametrize("select", ["users", "variables"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_edges_at_the_users_as_their_messages_say(form, select, kind):
    """The sets S_P and S_D of every round are read from the questions: step, update and dual_at."""
    problem = problem_of(kind)
    algorithm = ct.PDMM(edge_state="users", select=select, **SETTINGS | form)
    printed, sizes = Printed(problem, algorithm), []
    for queries, state in by_hand(problem, algorithm, 16, participation=0.4):
        duals = [printed.own(i)[k] for i, query in queries.items() for k in query.arrays.get("dual_at", ())]
        printed.dual(duals)  # of the round before
        for i, query in queries.items():
            for k, dual in zip(query.arrays.get("dual_at", ()), query.arrays.get("dual", ()), strict=True):
                assert np.abs(printed.mu[printed.own(i)[k]] - dual).max() < 1e-10
        stepping = [i for i, query in queries.items() if query.arrays["step"]]
        updated = [printed.own(i)[k] for i, query in queries.items() for k in query.arrays.get("update", ())]
        printed.primal(stepping, updated)
        assert np.abs(state.now - printed.x).max() < 1e-10
        sizes.append((len(stepping), len(updated), len(duals)))
        if select == "users":
            assert len(stepping) == 2
            assert sorted(updated) == sorted(printed.touched(stepping))
    if select == "variables":  # 40% of all x and z, and of all duals
        total = problem.n_users + len(printed.w)
        assert {a + b for a, b, _ in sizes} == {round(0.4 * total)}
        assert {c for *_, c in sizes[1:]} == {round(0.4 * len(printed.w))}


def test_the_printed_lines_tell_one_variant_from_another():
    """The twin of the comparisons: against the other variant they fail at once."""
    problem = problem_of()
    printed = Printed(problem, ct.PDMM(**SETTINGS, variant="symmetric"))
    apart = []
    for queries, state in by_hand(problem, ct.PDMM(**SETTINGS, variant="paper"), 6, participation=0.4):
        printed.primal(queries, printed.touched(queries))
        printed.dual(printed.touched(queries))
        apart.append(np.abs(state.now - printed.x).max())
    assert max(apart) > 1e-4


PLACES = [{}, {"variant": "paper"}, {"pairs": "unordered"}, {"bregman": "linear"}, {"bregman": "linear", "eta": 4.0},
          {"quiet": 2}, {"variant": "paper", "select": "variables"}, {"select": "variables", "pairs": "unordered"},
          {"select": "variables", "n_primal": 3, "n_dual": 4}, {"select": "variables", "n_primal": 1, "n_dual": 2}]


@pytest.mark.parametrize("kind", ["weighted", slowly("complete"), slowly("disconnected")])
@pytest.mark.parametrize("form", PLACES, ids=str)
def test_both_places_of_the_edges_give_equal_iterates(form, kind):
    problem = problem_of(kind, n_users=6)
    runs = [list(by_hand(problem, ct.PDMM(edge_state=edge_state, **form), 20, participation=0.5, seed=2))
            for edge_state in ("server", "users")]
    for (_, server), (_, users) in zip(*runs, strict=True):
        for name in ("now", "difference", "dual", "hat", "rho"):
            gap = np.abs(np.asarray(getattr(server, name)) - getattr(users, name)).max()
            assert gap < 1e-10, (name, server.round)
    assert np.abs(runs[0][-1][1].now).max() > 0.01


def test_both_places_agree_when_users_come_and_go():
    """Who was not there hears later what it missed."""
    problem, trace = problem_of(n_users=6), np.random.default_rng(0).random((5, 6)) < 0.6
    server, users = (list(by_hand(problem, ct.PDMM(edge_state=edge_state, **SETTINGS), 20, participation=trace))
                     for edge_state in ("server", "users"))
    assert trace.any(axis=1).all()
    assert not trace.all(axis=1).any()
    for (_, one), (_, other) in zip(server, users, strict=True):
        assert np.abs(one.now - other.now).max() < 1e-10, one.round


@pytest.mark.parametrize("graph", [None, ct.Graph.from_edges(4, []), slowly(ct.Graph.from_edges(4, [(0, 1)]))], ids=str)
@pytest.mark.parametrize("edge_state", ["server", "users"])
def test_users_without_pairs_find_their_own_optimum(edge_state, graph):
    points = np.array([[3.0, 1.0], [-1.0, 2.0], [0.5, -4.0], [2.0, 2.0]])
    users = ct.Users.from_arrays(points if graph is not None else points[:1])
    run = ct.federate(users, ct.SquaredDistance(), 0.1, graph=graph, algorithm=ct.PDMM(edge_state=edge_state),
                      max_rounds=2000, participation=1)
    assert run.status is CONVERGED
    assert np.allclose(run.models[-1], users.features[-1], atol=1e-3)


@pytest.mark.parametrize("s_p", [7, 11])
def test_the_ledger_counts_what_the_paper_counts(s_p):
    """S_P vectors up, S_D duals down, and a broadcast of the models that moved, in every round."""
    problem, s_d, d = problem_of(), 6, 3
    algorithm = ct.PDMM.printed(select="variables", n_primal=s_p, n_dual=s_d)
    run = ct.federate(problem.users, problem.loss, problem.lam, algorithm=algorithm, max_rounds=25)
    book, news, before = run.ledger, [], 0
    for turn in range(25):
        up = [book.total("numbers", direction="up", field=name, round=turn) for name in ("model", "difference")]
        assert sum(up) == s_p * d
        down = book.total("numbers", direction="down", field="dual", round=turn)
        assert down == (s_d * d if turn else 0)
        news.append(book.total("numbers", direction="down", field="models", round=turn))
        assert news[-1] <= s_p * d
        assert news[-1] == before  # exactly the models sent up the round before
        before = up[0]
    assert max(news) > 0


@pytest.mark.parametrize("variant", ["paper", "symmetric"])
def test_everyone_in_every_round_reaches_the_optimum(variant):
    case = planted(12, graph=ct.Graph.complete(12), lam=0.3, seed=1)
    algorithm = ct.PDMM.printed(variant=variant, rho=0.1, eta=0.1, eta_z=0.1)
    run = ct.federate(case.problem.users, case.problem.loss, 0.3, algorithm=algorithm, max_rounds=2000)
    assert run.status is CONVERGED
    assert np.linalg.norm(run.models - case.models) <= radius(run)


@pytest.mark.slow
def test_part_of_the_users_stalls_as_printed_and_arrives_when_mended():
    case = planted(12, graph=ct.Graph.complete(12), lam=0.3, seed=1)

    def gap(variant):
        algorithm = ct.PDMM.printed(variant=variant, edge_state="server", rho=0.1, eta=0.1, eta_z=0.1)
        return ct.federate(case.problem.users, case.problem.loss, 0.3, algorithm=algorithm, participation=0.4,
                           max_rounds=3000).gap
    assert gap("paper") > 1e-3
    assert gap("symmetric") <= 1e-6


@pytest.mark.parametrize("edge_state", ["server", "users"])
@pytest.mark.parametrize("case", ["two users", "chain", "pairs apart", "isolated", slowly("lam 0")])
def test_the_default_settings_converge_on_every_graph(case, edge_state):
    points = np.random.default_rng(0).standard_normal((8, 2))
    users, graph, lam = ct.Users.from_arrays(points), ct.Graph.complete(8), 0.1
    if case == "two users":
        users, graph = users.take([0, 1]), ct.Graph.complete(2)
    elif case == "chain":
        graph = ct.Graph.from_edges(8, [(k, k + 1) for k in range(7)])
    elif case == "pairs apart":
        graph = ct.Graph.from_edges(8, [(0, 1), (2, 3), (4, 5), (6, 7)])
    elif case == "isolated":
        graph = ct.Graph.from_edges(8, [(0, 1), (1, 2), (2, 3), (3, 4)])
    else:
        lam = 0.0
    run = ct.federate(users, ct.SquaredDistance(), lam, graph=graph, algorithm=ct.PDMM(edge_state=edge_state),
                      max_rounds=1500)
    assert run.status is CONVERGED
    best = ct.solve(ct.Problem(users, ct.SquaredDistance(), lam=lam, graph=graph))
    assert np.linalg.norm(run.models - best.models) <= radius(run) + radius(best)


@pytest.mark.slow
def test_quiet_pairs_save_numbers_and_cost_no_accuracy():
    case = planted(14, graph=ct.Graph.complete(14), n_clusters=2, lam=0.3, seed=4)

    def run(quiet):
        return ct.federate(case.problem.users, case.problem.loss, 0.3, participation=0.5, max_rounds=3000,
                           algorithm=ct.PDMM(edge_state="users", quiet=quiet))
    still, loud = run(5), run(0)
    assert still.status is CONVERGED
    assert loud.status is CONVERGED
    assert np.linalg.norm(still.models - case.models) <= radius(still)
    sent = [r.ledger.total("numbers", direction="up", field="difference") for r in (still, loud)]
    assert sent[0] < sent[1]
    assert loud.ledger.total("numbers", field="quiet") == 0


def test_quiet_pairs_wake_when_their_models_part():
    users = gaussian_mixture(10, n_features=2, separation=4.0, seed=0).users
    run = ct.federate(users, ct.SquaredDistance(), 0.3, participation=0.5, max_rounds=3000,
                      algorithm=ct.PDMM(edge_state="users", quiet=1))
    book = run.ledger
    assert run.status is CONVERGED
    assert 0 < book.total("numbers", field="wake") <= book.total("numbers", field="quiet")
    assert book.total("numbers", field="wake_model") == 2 * book.total("numbers", field="wake")
    best = ct.solve(run.problem)
    assert best.n_clusters > 1  # so that not everything stays quiet
    assert np.linalg.norm(run.models - best.models) <= radius(run) + radius(best)


def test_draws_of_variables_respect_who_is_there_and_how_many():
    problem, trace = problem_of(n_users=8), np.zeros((4, 8), dtype=bool)
    trace[0, :4] = trace[1, 4:] = trace[2, ::2] = trace[3, 1::2] = True
    for edge_state in ("server", "users"):
        algorithm = ct.PDMM(select="variables", edge_state=edge_state)
        for turn, (queries, _) in enumerate(by_hand(problem, algorithm, 8, participation=trace)):
            assert all(trace[turn % 4][user] for user in queries), edge_state
    stepped = [len(queries) for queries, _ in by_hand(problem, ct.PDMM(select="variables"), 30, participation=2)]
    assert 1.0 < np.mean(stepped) < 3.0  # two of eight users: a quarter of the variables
