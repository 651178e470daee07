"""Runs that are killed, saved and taken up again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import coterie as ct
from coterie.base.storage import pack, unpack
from coterie.datasets import clustered
from coterie.federated import Data, LocalRuntime
from coterie.federated.session import Session

SCRIPT = """
import sys
import coterie as ct
from coterie.datasets import clustered
users = clustered("logistic", n_users=12, samples=8, n_features=2, seed=3).users
algorithm = eval(sys.argv[2], vars(ct))
faults = ct.Faults(drop=0.1, late=0.2, twice=0.1)
run = ct.federate(users, ct.Logistic(), 0.02, algorithm=algorithm, participation=0.5, seed=4, faults=faults,
                  checkpoint=sys.argv[1] or None, tol=1e-9, max_rounds=60)
run.models.tofile(sys.argv[3])
print(run.n_rounds, run.ledger.bytes, run.gap)
"""
ALGORITHMS = ("Newton()", "Splitting()", "PDMM()", "PDMM(edge_state='users')")


def finished(folder, algorithm, out):
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(folder), algorithm, str(out)], capture_output=True,
                          text=True, check=True, timeout=120)
    return done.stdout, out.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_run_killed_at_any_moment_goes_on_to_the_same_bits(tmp_path, algorithm):
    uninterrupted = finished("", algorithm, tmp_path / "whole")
    folder, rng = tmp_path / "run", np.random.default_rng(0)
    kills = 0
    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(folder), algorithm, str(tmp_path / "out")],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            before = rounds(folder)
            while rounds(folder) < before + 2 and process.poll() is None:
                time.sleep(0.002)
            time.sleep(0.02 * rng.random())
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
                kills += 1
        finally:
            process.kill()
            process.wait()
    assert kills >= 2
    assert finished(folder, algorithm, tmp_path / "part") == uninterrupted


def rounds(folder):
    journal = folder / "rounds.jsonl"
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


class Stop(Exception):
    pass


@pytest.fixture
def users():
    return clustered("logistic", n_users=8, samples=8, n_features=2, seed=1).users


@pytest.mark.parametrize("algorithm", [
    ct.Newton(), pytest.param(ct.Splitting(), marks=pytest.mark.slow),
    pytest.param(ct.PDMM(edge_state="users"), marks=pytest.mark.slow), ct.FedAvg(rounds=6)])
@pytest.mark.parametrize("graph", [None, "wald"])
def test_a_run_that_breaks_off_goes_on_to_the_same_bits(users, tmp_path, algorithm, graph):
    settings = {"algorithm": algorithm, "participation": 0.5, "graph": graph, "max_rounds": 40,
                "start": ct.FedAvg(rounds=2), "faults": ct.Faults(drop=0.1, late=0.2, twice=0.2)}
    uninterrupted = ct.federate(users, ct.Logistic(), 0.02, **settings)
    for stop in (1, 2, 4, 7):
        def breaks(line, stop=stop):
            if line.iteration == stop:
                raise Stop
        folder = tmp_path / str(stop)
        if stop < uninterrupted.n_rounds:
            with pytest.raises(Stop):
                ct.federate(users, ct.Logistic(), 0.02, checkpoint=folder, progress=breaks, **settings)
        again = ct.federate(users, ct.Logistic(), 0.02, checkpoint=folder, **settings)
        assert again.models.tobytes() == uninterrupted.models.tobytes()
        assert again.certificate.objective == uninterrupted.certificate.objective
        assert again.gap == uninterrupted.gap
        assert again.ledger.entries == uninterrupted.ledger.entries
        assert again.ledger.user(3) == uninterrupted.ledger.user(3)
        assert list(map(nan_free, again.history)) == list(map(nan_free, uninterrupted.history))


def nan_free(line):
    """A line of history but for its seconds, with values that equal themselves."""
    return tuple(None if value != value else value for value in line._replace(seconds=0.0))


def test_a_finished_run_is_returned_as_it_is(users, tmp_path):
    first = ct.federate(users, ct.Logistic(), 0.02, checkpoint=tmp_path)
    lines = []
    second = ct.federate(users, ct.Logistic(), 0.02, checkpoint=tmp_path, progress=lines.append)
    assert lines == []
    assert second.models.tobytes() == first.models.tobytes()
    assert second.n_rounds == first.n_rounds


@pytest.mark.parametrize("change", [{"lam": 0.03}, {"seed": 1}, {"algorithm": ct.Splitting()}, {"tol": 1e-7},
                                    {"participation": 0.5}])
def test_a_checkpoint_of_another_run_is_refused(users, tmp_path, change):
    ct.federate(users, ct.Logistic(), lam=0.02, checkpoint=tmp_path)
    name = next(iter(change))
    with pytest.raises(ct.InvalidInput, match=rf"of another run: its {name} is .* Give another directory"):
        ct.federate(users, ct.Logistic(), **{"lam": 0.02, **change}, checkpoint=tmp_path)


def test_a_checkpoint_of_another_version_is_refused(users, tmp_path, monkeypatch):
    monkeypatch.setattr("coterie.federated.stages._VERSION", 1)
    before = ct.federate(users, ct.SquaredHinge(), lam=0.05, checkpoint=tmp_path)
    assert ct.federate(users, ct.SquaredHinge(), lam=0.05, checkpoint=tmp_path).n_rounds == before.n_rounds
    monkeypatch.undo()
    with pytest.raises(ct.InvalidInput, match=r"its version is 1, this run's is 3"):
        ct.federate(users, ct.SquaredHinge(), lam=0.05, checkpoint=tmp_path)


def test_a_checkpoint_of_other_data_is_refused(users, tmp_path):
    ct.federate(users, ct.Logistic(), lam=0.02, checkpoint=tmp_path)
    others = clustered("logistic", n_users=8, samples=8, n_features=2, seed=2).users
    with pytest.raises(ct.InvalidInput, match="its data is"):
        ct.federate(others, ct.Logistic(), lam=0.02, checkpoint=tmp_path)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "foreign"])
def test_a_damaged_checkpoint_is_refused(users, tmp_path, damage):
    ct.federate(users, ct.Logistic(), lam=0.02, checkpoint=tmp_path)
    state = tmp_path / "state.coterie"
    data = bytearray(state.read_bytes())
    data[len(data) // 2] ^= 1
    state.write_bytes({"flip": bytes(data), "cut": bytes(data[:-10]), "empty": b"", "foreign": b"PK" * 50}[damage])
    with pytest.raises(ct.InvalidInput, match="is damaged, or not a checkpoint"):
        ct.federate(users, ct.Logistic(), lam=0.02, checkpoint=tmp_path)


def test_a_short_journal_is_refused(users, tmp_path):
    ct.federate(users, ct.Logistic(), lam=0.02, checkpoint=tmp_path)
    journal = tmp_path / "rounds.jsonl"
    journal.write_bytes(journal.read_bytes()[:-5])
    with pytest.raises(ct.InvalidInput, match="shorter than the state"):
        ct.federate(users, ct.Logistic(), lam=0.02, checkpoint=tmp_path)


def test_lines_of_a_round_that_did_not_end_are_cut_off(users, tmp_path):
    first = ct.federate(users, ct.Logistic(), lam=0.02, checkpoint=tmp_path)
    with (tmp_path / "rounds.jsonl").open("ab") as file:
        file.write(b'{"round": [99')
    second = ct.federate(users, ct.Logistic(), lam=0.02, checkpoint=tmp_path)
    assert second.ledger.entries == first.ledger.entries


def test_an_interrupted_run_keeps_its_checkpoint(users, tmp_path):
    def interrupt(line):
        if line.iteration == 2:
            raise KeyboardInterrupt
    with pytest.raises(ct.Interrupted) as caught:
        ct.federate(users, ct.Logistic(), 0.02, algorithm=ct.PDMM(), checkpoint=tmp_path, progress=interrupt)
    stopped = caught.value.best
    assert isinstance(stopped, ct.Federated)
    assert stopped.status is ct.Status.INTERRUPTED
    assert stopped.n_rounds == 3
    assert np.isfinite(stopped.models).all()
    uninterrupted = ct.federate(users, ct.Logistic(), 0.02, algorithm=ct.PDMM())
    again = ct.federate(users, ct.Logistic(), 0.02, algorithm=ct.PDMM(), checkpoint=tmp_path)
    assert again.models.tobytes() == uninterrupted.models.tobytes()


def test_what_is_packed_comes_back():
    values = {"a": np.arange(3), "b": {"c": np.eye(2), "d": [1, "x", None, np.inf]}, "e": True, "f": np.zeros((0, 3))}
    back = unpack(pack(values))
    np.testing.assert_array_equal(back["a"], values["a"])
    np.testing.assert_array_equal(back["b"]["c"], np.eye(2))
    assert back["b"]["d"] == [1, "x", None, np.inf]
    assert back["e"] is True
    assert back["f"].shape == (0, 3)


def test_nothing_saved_is_nothing_loaded(users, tmp_path):
    runtime = LocalRuntime(Data.of(users, ct.Logistic()))
    assert Session(runtime, users.names, checkpoint=tmp_path / "none").load() is None
