"""What a node does for its owner, whoever asks: no Flower needed."""

from __future__ import annotations

from coterie.federated.contract import Contract
from coterie.federated.node import Node, settings


def test_what_the_owner_of_a_node_says_of_its_data_counts():
    said = {"data": "npz", "path": "/etc/x", "split": True, "task": "regression", "min-count": 1}
    own = Contract.of({"data": "csv", "user": "who", "state-dir": "/var"})
    assert settings(said, own) == {"data": "csv", "user": "who", "state-dir": "/var", "task": "regression",
                                   "min-count": 3}
    assert settings(said, Contract.of({"partition-id": 3})) == {**said, "partition-id": 3}


def test_columns_that_the_server_names_are_not_left_out_silently(tmp_path):
    (tmp_path / "t.csv").write_text("who,x,z,y\na,1,2,3.5\na,2,1,4\nb,1,5,2\nb,2,2,0.5\n")
    own = {"data": "csv", "path": str(tmp_path / "t.csv"), "user": "who", "target": "y"}
    assert "owner of the data decides which columns" in Node({"features": "x"}, own).introduce()["error"]
    assert "error" not in Node({"features": "x"}, {**own, "features": "x"}).introduce()
    assert "error" not in Node({"features": ""}, own).introduce()


def test_a_server_names_no_folder_and_nothing_unknown():
    said = {"state-dir": "/etc", "models-dir": "/etc", "ledger-dir": "/etc", "consent": "hessians",
            "split-key": "public", "max-questions": 10**9, "colour": "red"}
    assert settings(said, Contract.of({"data": "csv"})) == {"data": "csv", "min-count": 3}
    assert settings(said, Contract.of({})) == {}



def test_a_node_stores_nothing_of_its_users(tmp_path):
    """Users remember nothing, wherever they are asked to: nodes of one run are nodes of any other."""
    own = {"data": "dataset", "dataset": "ellipses", "ledger-dir": str(tmp_path / "ledger")}
    assert "error" not in Node({}, own).introduce()
    assert "error" not in Node({}, {**own, "state-dir": str(tmp_path / "state")}).introduce()
    assert {file.name for file in tmp_path.iterdir()} == {"ledger"}
