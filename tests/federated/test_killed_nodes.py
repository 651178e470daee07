"""Nodes that are killed in the middle of an answer: what the owner has, and what it is told, survives."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sqlite3
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.federated import node as nodes
from coterie.federated.agreement import Agreement
from coterie.federated.node import Node
from coterie.federated.private.ledger import FILE, NodeLedger
from coterie.federated.protocol.messages import Query
from coterie.federated.rehearsal import read_config

NAMES = ("ann", "bob", "cyd")


def answer_for_ever(file: Path, seed: int, pipe: int) -> None:
    """One question after the other; each answer is written to the pipe once it has left."""
    rng, config = np.random.default_rng(seed), read_config([str(file)])
    agreed = Agreement(names=NAMES, features=("x0", "x1"), run="r", loss="squared").to_json()
    told = {"seed": 0, "held-out": 0.0, "agreement": agreed, "run": f"r{seed}"}
    nodes._STEP = 1e-6
    while True:
        scale = np.full(3, float(rng.integers(1, 6)))
        fields = {"stage": np.array(1), "mu": np.array(0.05), "settings": np.array([0]), "centre": np.zeros(3),
                  "scale": scale}
        query = Query("release", 0, fields).encode() if "budget-epsilon" in config else Query(
            "gradient", 0, {"model": np.append(scale[:2], 0.0)}).encode()
        replies = Node(told, config).answer({json.dumps(name): query for name in NAMES})
        for key, data in replies.replies.items():
            os.write(pipe, f"{key} {scale[0]:g} {data[15:].hex()}\n".encode())
        for key, reason in replies.refusals.items():
            assert "questions" in reason or "budget" in reason, (key, reason)


def kill(folder: Path, times: int, budget: bool) -> list[str]:
    """Lines of all answers that left before their process was killed."""
    rng = np.random.default_rng(times)
    np.savez(folder / "t.npz", X=rng.normal(size=(60, 2)), y=rng.normal(size=60), user=np.repeat(NAMES, 20))
    more = "budget-epsilon = 4.0\nbudget-delta = 1e-5\n" if budget else "max-questions = 50\n"
    config = folder / "node.toml"
    config.write_text(f'data = "npz"\npath = "{folder}/t.npz"\nledger-dir = "{folder}/ledger"\n{more}')
    before, fork, lines = config.read_bytes(), multiprocessing.get_context("fork"), list[str]()
    for turn in range(times):
        ours, theirs = os.pipe()
        process = fork.Process(target=answer_for_ever, args=(config, turn, theirs))
        process.start()
        os.close(theirs)
        text = os.read(ours, 1 << 16) if turn % 3 else b""  # some are killed before they answer at all
        time.sleep(float(rng.uniform(0.0, 0.05)))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        with os.fdopen(ours, "rb") as pipe:
            text += pipe.read()
        lines += [line for line in text.decode().splitlines(keepends=True) if line.endswith("\n")]
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert config.read_bytes() == before
    return lines


def check(folder: Path, lines: list[str], budget: bool) -> None:
    """The ledger is whole; what left is in it, within its limits, and was always the same."""
    base = sqlite3.connect(folder / "ledger" / FILE)
    assert base.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    base.close()
    said: dict[Any, set[str]] = {}
    for line in lines:
        key, scale, data = line.split()
        said.setdefault((key, scale), set()).add(data)
    with NodeLedger(folder / "ledger") as ledger:
        left = [answer for answer in ledger.answers() if not answer.reason]
        assert len(left) >= len(lines)  # who is killed has entered what it did not say, never the other way round
        assert all(len(data) == 1 for data in said.values())
        if budget:
            assert max(ledger.spending(1e-5).values()) <= 4.0
            assert len(said) <= len(ledger._base.execute("SELECT 1 FROM releases").fetchall()) <= 15
        assert budget == (ledger.exact_answers() == {})


@pytest.mark.parametrize("budget", [True, False])
@pytest.mark.parametrize("times", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_configuration_ledger_and_log_survive(tmp_path, times, budget):
    lines = kill(tmp_path, times, budget)
    assert len(lines) > times  # some were killed after answers
    check(tmp_path, lines, budget)
    with pytest.raises(AssertionError):  # the twin: an answer that was not entered
        check(tmp_path, [f'"ann" {k} 00\n' for k in range(10**5)], budget)
