"""Rounds for other programs to watch: JSON lines, TensorBoard, MLflow.

A writer is a function of a `Round`, so it serves as `progress` of any run:

    ct.federate(..., progress=writer("tensorboard:logs"))
"""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coterie.base.errors import require, require_extra
from coterie.base.storage import json_ready, open_private, private_folder
from coterie.federated.session import Round

Writer = Callable[[Round], None]
_NUMBERS = ("objective", "gap", "estimate", "n_clusters", "asked", "answered", "bytes_up",
            "bytes_down", "seconds")


def values(line: Round) -> dict[str, Any]:
    """A round as JSON knows it: no nan, no inf."""
    ready: dict[str, Any] = json_ready(line._asdict())
    return ready


def writer(spec: str) -> Writer:
    """A writer by name: "jsonl:FILE", "tensorboard:FOLDER", "mlflow" or "mlflow:URI"."""
    kind, _, where = spec.partition(":")
    require(kind in _WRITERS,
            f"unknown metrics {spec!r}", "Use jsonl:FILE, tensorboard:FOLDER or mlflow:URI")
    return _WRITERS[kind](where)


def _jsonl(where: str) -> Writer:
    path = Path(where or "rounds.jsonl")
    private_folder(path.parent)

    def write(line: Round) -> None:
        with open_private(path, "a") as file:
            file.write(json.dumps(values(line)) + "\n")

    return write


def _tensorboard(where: str) -> Writer:
    with require_extra("tensorboardX", "metrics", "Writing for TensorBoard"):
        from tensorboardX import SummaryWriter
    # It writes in another thread: close it at the end.
    board = SummaryWriter(where or "logs", flush_secs=1)
    atexit.register(board.close)

    def write(line: Round) -> None:
        for name, value in values(line).items():
            if name in _NUMBERS and value is not None:
                board.add_scalar(f"coterie/{name}", value, line.iteration)

    return write


def _mlflow(where: str) -> Writer:
    with require_extra("mlflow-skinny", "metrics", "Writing for MLflow"):
        import mlflow
    if where:
        mlflow.set_tracking_uri(where)

    def write(line: Round) -> None:
        numbers = {name: float(value) for name, value in values(line).items() if name in _NUMBERS
                   and value is not None}
        mlflow.log_metrics(numbers, step=line.iteration)

    return write


_WRITERS: dict[str, Callable[[str], Writer]] = {"jsonl": _jsonl, "tensorboard": _tensorboard,
                                                "mlflow": _mlflow}
