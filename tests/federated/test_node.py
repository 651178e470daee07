"""What a node does for its owner, whoever asks: no Flower needed."""

from __future__ import annotations

from typing import Any

import numpy as np

from coterie.datasets import ellipses
from coterie.federated.node import Memory, Node, settings
from coterie.federated.protocol.messages import Batch, Ragged, Reply

DATA = ellipses(users_per_cluster=5, samples=30, seed=0).users


def test_what_the_owner_of_a_node_says_of_its_data_counts():
    said = {"data": "npz", "path": "/etc/x", "split": True, "task": "regression"}
    own = {"data": "csv", "user": "who", "state-dir": "/var"}
    assert settings(said, own) == {"data": "csv", "user": "who", "state-dir": "/var", "task": "regression"}
    assert settings(said, {"partition-id": 3}) == {**said, "partition-id": 3}


def test_columns_that_the_server_names_are_not_left_out_silently(tmp_path):
    (tmp_path / "t.csv").write_text("who,x,z,y\na,1,2,3.5\na,2,1,4\nb,1,5,2\nb,2,2,0.5\n")
    own = {"data": "csv", "path": str(tmp_path / "t.csv"), "user": "who", "target": "y"}
    assert "owner of the data decides which columns" in Node({"features": "x"}, own).introduce()["error"]
    assert "error" not in Node({"features": "x"}, {**own, "features": "x"}).introduce()
    assert "error" not in Node({"features": ""}, own).introduce()


def test_a_server_names_no_folder_and_nothing_unknown():
    said = {"state-dir": "/etc", "models-dir": "/etc", "ledger-dir": "/etc", "consent": "hessians",
            "split-key": "public", "max-questions": 10**9, "colour": "red"}
    assert settings(said, {"data": "csv"}) == {"data": "csv"}
    assert settings(said, {}) == {}


# What a user remembers


def test_memory_now_before_and_lost(tmp_path):
    users, store = DATA.take([0, 1]), dict[str, Any]()

    def replies(turn: int) -> Batch:
        rows = {"point": np.full((2, 3), float(turn)), "tails": np.zeros(2), "neighbours": np.array([1, 0]),
                "quiet": np.zeros(2, dtype=bool), "radii": np.ones(2), "others": np.zeros((2, 3)),
                "difference": np.zeros((2, 3)), "hat": np.zeros((2, 3))}
        return Batch("pdmm", turn, np.array([0, 1]), form=Reply,
                     memory={name: Ragged.of(values, np.ones(2, dtype=int)) for name, values in rows.items()})

    for folder in (tmp_path / "state", None):
        def memory(folder: Any = folder, run: str = "r") -> Memory:
            return Memory(folder, run, store)

        assert not memory().recall(0, -1)
        memory().keep(users, replies(3), [0, 1])
        now = memory()
        assert now.recall(0, 3)
        assert not now.recall(1, 2)
        assert now.recall(1, 3)
        now.keep(users, replies(4), [0, 1])
        lost = memory()  # the server never heard of round 4
        assert lost.recall(0, 3)
        assert lost.stacked(users, 3)["point"].rows(0).tolist() == [[3.0, 3.0, 3.0]]
        lost.keep(users, replies(5), [0, 1])
        assert memory().recall(0, 3)
        assert memory().recall(0, 5)
        assert not memory().recall(0, 4)
        assert not memory(run="another").recall(0, 5)
    files = sorted((tmp_path / "state").iterdir())
    assert len(files) == 2
    for file in files:
        file.write_bytes(file.read_bytes()[:100])  # a disk that was full, say
    assert not Memory(tmp_path / "state", "r", store).recall(0, 5)


def test_long_names_have_files_of_their_own(tmp_path):
    memory = Memory(tmp_path, "", {})
    names = ["x" * 500 + "1", "x" * 500 + "2", 1, "1", "../../etc", "ü/ü"]
    assert len({memory._file(name) for name in names}) == len(names)
    assert all(memory._file(name).parent == tmp_path and len(memory._file(name).name) < 100 for name in names)
