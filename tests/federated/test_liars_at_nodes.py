"""Nodes that lie about names or values, are silent, or send floods: no run dies, and the others' models are as without
them."""

from __future__ import annotations

import json
import warnings
from functools import cache
from typing import Any

import numpy as np
import pytest
from support.grid import Nodes
from support.grid import someone as someone

import coterie as ct
from coterie.datasets import ellipses
from coterie.federated.entry import serve
from coterie.federated.protocol.messages import FRAME, Message, decode
from coterie.federated.settings import Deployment, complete, for_nodes

pytestmark = pytest.mark.flower
USERS = ellipses(users_per_cluster=5, samples=30, seed=0).users
N_NODES = 5
VALUES = (np.nan, np.inf, -np.inf, 1e308, 1e200, -1e100)


def wrong_names(rng, names: list[str]) -> dict[str, Any]:
    """An introduction with users of others, or with names that are none."""
    everyone = [f"u{k}" for k in range(USERS.n_users)]
    odd = ["\0", "a" * 5_000, "\u202e", {}, None, True, 1e400, [1], "", "=cmd()", "../../x", "\ud800"]
    return {"names": [everyone, everyone[::-1], names + everyone[:3], names * 2, names + [odd[rng.integers(len(odd))]],
                      [f"z{k}" for k in range(20_000)], odd, "u1", 7][rng.integers(9)]}


def wrong_introduction(rng, said: dict[str, Any]) -> dict[str, Any]:
    return {**said, **[{"features": ["x0", "evil"]}, {"features": [f"c{k}" for k in range(5_000)]},
                       {"targets": "table"}, {"n_classes": 10**9}, {"summary": {"rows": 1}}, {"features": 3},
                       {"targets": ["none"]}, {"names": []}][rng.integers(8)]}


def wrong_reply(rng, data: bytes) -> bytes:
    """Numbers beyond all bounds, other shapes, another kind, or no message."""
    way, reply = rng.integers(5), decode(data)
    if way == 0:
        return bytes(rng.integers(0, 256, int(rng.integers(0, 4 * FRAME)), dtype=np.uint8).tolist())
    if way == 1:
        return b"CT" + data[2:-4] * 50
    arrays = {name: np.array(array) for name, array in reply.arrays.items()}
    name = list(arrays)[rng.integers(len(arrays))]
    if way == 2:
        arrays[name] = np.zeros((2, 3, 1))
    elif way == 3:
        arrays[name] = np.full(arrays[name].shape, VALUES[rng.integers(len(VALUES))])
    else:
        return Message("describe", reply.round, {}).encode()
    return Message(reply.kind, reply.round, arrays).encode()


class Liars(Nodes):
    """A grid on which some nodes lie, each in one way from the first message on."""

    def __init__(self, configs, ways: dict[int, str], seed: int) -> None:
        super().__init__(configs)
        self.ways, self.rng = ways, np.random.default_rng(seed)
        self.spoil = self._spoil

    def _spoil(self, node, message, answer):
        from flwr.app import ConfigRecord, RecordDict
        from flwr.app import Message as Envelope

        way, introduces = self.ways.get(node, ""), message.metadata.message_type == "query.users"
        if way == "silence" or (way == "silence later" and not introduces):
            return None
        made = answer()
        if not way or made.has_error():
            return made
        content: dict[str, Any] = {}
        if introduces:
            said = json.loads(made.content["users"]["introduction"])
            if way.startswith("names"):
                said |= wrong_names(self.rng, said["names"])
            elif way == "introduction":
                said = wrong_introduction(self.rng, said)
            record = {"introduction": json.dumps(said) if way != "flood" else "[" * 2_000_000, "version": 2}
            return Envelope(RecordDict({"users": ConfigRecord(record)}), reply_to=message)
        if way == "names, silence":
            return None
        replies = dict(made.content["answers"])
        if way == "values":
            replies = {key: wrong_reply(self.rng, data) for key, data in replies.items()}
        elif way == "floods":
            replies = {**{key: b"\0" * 2_000_000 for key in replies}, **{f"x{k}": b"" for k in range(2_000)}}
        content = {"answers": ConfigRecord(replies), "refusals": ConfigRecord(dict(made.content["refusals"]))}
        return Envelope(RecordDict(content), reply_to=message)


WAYS = ("names", "names, silence", "introduction", "values", "silence", "silence later", "flood", "floods")


def deal(folder, nodes) -> list[dict[str, Any]]:
    configs = []
    for k in nodes:
        part = np.arange(k, USERS.n_users, N_NODES)
        few, file = USERS.take(part), folder / f"{k}.npz"
        names = np.array([f"u{i}" for i in part])
        np.savez(file, X=few.features, y=few.targets, user=names[few.owner])
        configs.append({"data": "npz", "path": str(file), "ledger-dir": str(folder / f"ledger {k}")})
    return configs


def run(folder, grid) -> Any:
    from coterie.federated.flower import FlowerRuntime

    given = {"loss": "squared_hinge", "lam": 0.2, "out": str(folder / "run"), "wait": 0.2, "round-timeout": 0.02,
             "tol": 1e-10}
    with warnings.catch_warnings(action="ignore", category=ct.CoterieWarning):
        return serve(FlowerRuntime(grid, for_nodes(complete(given)), deadline=0.02, poll=0.0005), Deployment.of(given))


@cache
def expected(honest: frozenset[int]) -> dict[str, np.ndarray]:
    """The models of the users of these nodes where there are no others."""
    part = sorted(k for k in range(USERS.n_users) if k % N_NODES in honest)
    found = ct.solve(ct.Problem(USERS.take(part), ct.SquaredHinge(), 0.2), tol=1e-12)
    return {f"u{k}": model for k, model in zip(part, found.models, strict=True)}


def judge(folder, seed: int) -> tuple[int, float]:
    """A run with one or two liars: how many users took part, and how far the models of honest nodes are from a run
    without users that were set aside."""
    folder.mkdir()
    rng = np.random.default_rng([7, seed])
    liars = rng.choice(N_NODES, int(rng.integers(1, 3)), replace=False).tolist()
    ways = {100 + k: WAYS[rng.integers(len(WAYS))] for k in liars}
    found = run(folder, Liars(deal(folder, range(N_NODES)), ways, seed))
    assert found.status is ct.Status.CONVERGED, (seed, ways, found.status)
    names = dict(zip(found.problem.users.names, found.models, strict=True))
    honest = {f"u{k}" for k in range(USERS.n_users) if k % N_NODES not in liars}
    assert honest <= names.keys(), (seed, ways, honest - names.keys())
    stayed = frozenset(int(name[1:]) % N_NODES for name in names)
    alone = expected(stayed)
    assert alone.keys() == names.keys(), (seed, ways, alone.keys() ^ names.keys())
    return len(names), max(float(np.abs(names[name] - alone[name]).max()) for name in honest)


@pytest.mark.parametrize("runs", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_no_run_dies_of_liars_and_the_others_have_their_own_models(tmp_path, runs):
    seen = [judge(tmp_path / f"{seed}", seed) for seed in range(runs)]
    assert max(apart for _, apart in seen) < 1e-6
    assert min(many for many, _ in seen) < USERS.n_users  # the twin: liars do not stay


def test_other_users_have_other_models():
    """The twin: models without a node differ by more than what is called rounding."""
    one, two = expected(frozenset(range(5))), expected(frozenset(range(4)))
    assert max(float(np.abs(one[name] - two[name]).max()) for name in two) > 1e-3
