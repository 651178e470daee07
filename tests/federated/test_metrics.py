"""Rounds written for other programs, read back as those programs do."""

from __future__ import annotations

import json
import struct
import subprocess
import sys

import pytest

import coterie as ct
from coterie.datasets import clustered
from coterie.federated.entry import writer


@pytest.fixture
def users():
    return clustered("logistic", n_users=6, samples=8, n_features=2, seed=1).users


def test_json_lines(users, tmp_path):
    run = ct.federate(users, ct.Logistic(), 0.02, progress=writer(f"jsonl:{tmp_path / 'deep' / 'rounds.jsonl'}"))
    lines = [json.loads(line) for line in (tmp_path / "deep" / "rounds.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == list(range(run.n_rounds))
    assert lines[0]["gap"] is None
    assert lines[-1]["gap"] == run.gap
    assert sum(line["bytes_up"] for line in lines) == run.ledger.bytes_up


def test_an_unknown_writer_is_refused():
    with pytest.raises(ct.InvalidInput, match=r"unknown metrics 'carrier:pigeon'.*tensorboard:FOLDER"):
        writer("carrier:pigeon")


@pytest.mark.flower
def test_tensorboard(users, tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    code = ("import sys, coterie as ct; from coterie.datasets import clustered; "
            "from coterie.federated.entry import writer; "
            "ct.federate(clustered('logistic', n_users=6, samples=8, n_features=2, seed=1).users, ct.Logistic(), 0.02, "
            "progress=writer('tensorboard:' + sys.argv[1]))")
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)
    run = ct.federate(users, ct.Logistic(), 0.02)
    (file,) = tmp_path.glob("events.out.tfevents.*")
    data, at, scalars = file.read_bytes(), 0, {}
    while at < len(data):  # TFRecord: length, its checksum, an event, its checksum
        (length,) = struct.unpack_from("<Q", data, at)
        event = Event.FromString(data[at + 12:at + 12 + length])
        scalars |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
        at += 16 + length
    last = run.n_rounds - 1
    assert scalars["coterie/gap", last] == pytest.approx(run.gap, rel=1e-6)
    assert scalars["coterie/bytes_up", 0] == run.history[0].bytes_up
    assert ("coterie/gap", 0) not in scalars


@pytest.mark.flower
@pytest.mark.filterwarnings("ignore")  # MLflow's own
def test_mlflow(users, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with mlflow.start_run() as active:
        run = ct.federate(users, ct.Logistic(), 0.02, progress=writer("mlflow"))
    history = mlflow.MlflowClient().get_metric_history(active.info.run_id, "n_clusters")
    assert [metric.value for metric in history] == [line.n_clusters for line in run.history]
