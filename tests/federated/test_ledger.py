"""A node's ledger: budgets that cannot be overspent, whatever dies when."""

from __future__ import annotations

import multiprocessing
import os
import signal
import stat
from pathlib import Path

import numpy as np
import pytest

from coterie.base.errors import InvalidInput, Refused
from coterie.federated.private.ledger import FILE, LoggedAnswer, NodeLedger
from coterie.federated.private.policy import composed, epsilon_of, mu_of

BUDGET = 1.0


def never() -> bytes:
    raise AssertionError("computed although it is known or refused")


def test_a_release_is_made_once_and_repeated_for_nothing(tmp_path):
    with NodeLedger(tmp_path / "a", BUDGET) as ledger:
        assert ledger.release("ann", "one", 0.8, lambda: b"first") == b"first"
    with NodeLedger(tmp_path / "a", BUDGET) as ledger:  # of another process, later
        assert ledger.release("ann", "one", 0.8, never) == b"first"
        assert ledger.spent("ann") == 0.8
        with pytest.raises(Refused, match="the privacy budget of the user is spent"):
            ledger.release("ann", "two", 0.7, never)
        assert ledger.release("ann", "two", 0.6, lambda: b"second") == b"second"
        assert ledger.spent("ann") == pytest.approx(BUDGET)
        assert ledger.release("bob", "one", 1.0, lambda: b"his") == b"his"  # everybody has a budget
        assert ledger.spending(1e-5) == {"ann": pytest.approx(epsilon_of(1.0, 1e-5)), "bob": epsilon_of(1.0, 1e-5)}
        with pytest.raises(Refused):
            ledger.release("bob", "two", 1e-4, never)
        with pytest.raises(InvalidInput, match="mu must be a number"):
            ledger.release("bob", "three", float("nan"), never)


def test_a_release_that_fails_costs_nothing(tmp_path):
    with NodeLedger(tmp_path, BUDGET) as ledger:
        with pytest.raises(AssertionError):
            ledger.release("ann", "one", 0.8, never)
        assert ledger.spent("ann") == 0.0


def test_parts_of_a_budget_make_it_up():
    budget = mu_of(4.0, 1e-5)
    for parts in (2, 3, 7, 50):
        ledger = NodeLedger(None, budget)
        for k in range(parts):
            ledger.release(1, str(k), budget / parts**0.5, bytes)
        assert epsilon_of(ledger.spent(1), 1e-5) == pytest.approx(4.0, abs=1e-9)
        with pytest.raises(Refused):
            ledger.release(1, "more", 0.001 * budget, never)


def test_without_a_budget_nothing_noisy_leaves():
    with pytest.raises(Refused, match="has set no privacy budget"):
        NodeLedger.of_owner(None, None, None).release(1, "a", 0.1, never)
    assert NodeLedger.of_owner(None, 4.0, 1e-5).release(1, "a", 0.1, lambda: b"x") == b"x"
    with pytest.raises(InvalidInput, match="both an epsilon and a delta"):
        NodeLedger.of_owner(None, 4.0, None)


def test_only_the_owner_reads_it(tmp_path):
    folder = tmp_path / "deep" / "ledger"
    with NodeLedger(folder, BUDGET) as ledger:
        ledger.release("ann", "one", 0.8, lambda: b"first")
        assert stat.S_IMODE((folder / FILE).stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (folder / FILE).write_bytes(b"something else, which is no database at all")
    with pytest.raises(InvalidInput, match=r"the ledger in .* cannot be used"):
        NodeLedger(folder, BUDGET)


def test_a_pin_is_the_first_value(tmp_path):
    with NodeLedger(tmp_path) as one, NodeLedger(tmp_path) as two:
        assert one.pinned("split-key", lambda: "a") == two.pinned("split-key", lambda: "b") == "a"


def test_the_log_keeps_answers_and_refusals(tmp_path):
    lines = [LoggedAnswer("r", 3, "ann", "expand", 9, 100, "digest"),
             LoggedAnswer("r", 4, 7, "moments", 0, 0, "other", "not allowed")]
    with NodeLedger(tmp_path) as ledger:
        ledger.log(lines)
    with NodeLedger(tmp_path) as ledger:
        assert [line._replace(time=0.0) for line in ledger.answers()] == lines
        assert all(line.time > 1e9 for line in ledger.answers())


# -- kills


def spend(folder: Path, sequences: range, kill_at: int, pipe: int, careless: bool = False) -> None:
    """Spend at random, each sequence as a user of its own, and die in the middle of some statement."""
    statements = 0

    def count(statement: str) -> None:
        nonlocal statements
        statements += 1
        if statements == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    with NodeLedger(folder, BUDGET) as ledger:
        ledger._base.execute("PRAGMA synchronous = OFF")  # kills of a process need no waiting for the disk
        ledger._base.set_trace_callback(count)
        for user in sequences:
            rng = np.random.default_rng([user, kill_at])
            for _ in range(6):
                key, mu = str(rng.integers(5)), float(rng.uniform(0.0, 0.9))
                data = rng.bytes(4)
                if careless:  # the bytes leave before they are entered
                    os.write(pipe, f"{user} {key} {data.hex()}\n".encode())
                try:
                    data = ledger.release(user, key, mu, lambda data=data: data)
                except Refused:
                    continue
                if not careless:
                    os.write(pipe, f"{user} {key} {data.hex()}\n".encode())
        os.write(pipe, b"done\n")


def fuzz(folder: Path, sequences: int, batch: int, careless: bool = False) -> int:
    """Processes that spend and are killed, one after the other; returns how many were killed."""
    fork, rng, killed = multiprocessing.get_context("fork"), np.random.default_rng(sequences), 0
    left: dict[tuple[str, str], set[str]] = {}
    for first in range(0, sequences, batch):
        while True:  # the same sequences again, until they come to an end
            ours, theirs = os.pipe()
            users, kill_at = range(first, min(first + batch, sequences)), int(rng.integers(1, 60 * batch))
            process = fork.Process(target=spend, args=(folder, users, kill_at, theirs, careless))
            process.start()
            os.close(theirs)
            with os.fdopen(ours) as lines:
                text = lines.read()
            process.join()
            killed += process.exitcode == -signal.SIGKILL
            for line in text.splitlines():
                if line != "done":
                    user, key, data = line.split()
                    left.setdefault((user, key), set()).add(data)
            if text.endswith("done\n"):
                break
    with NodeLedger(folder, BUDGET) as ledger:
        known = {(user, key): (mu, data.hex()) for user, key, mu, data in
                 ledger._base.execute("SELECT user, key, mu, data FROM releases")}
    assert left.keys() <= known.keys()
    assert all(data == {known[key][1]} for key, data in left.items())  # what left is entered, and never differs
    spent: dict[str, list[float]] = {}
    for (user, _), (mu, _) in known.items():
        spent.setdefault(user, []).append(mu)
    assert len(spent) == sequences
    assert max(map(composed, spent.values())) <= BUDGET * (1 + 1e-12)
    return killed


def test_whoever_is_killed_has_not_overspent(tmp_path):
    assert fuzz(tmp_path, 200, 20) >= 3


def test_bytes_that_leave_first_are_noticed(tmp_path):
    with pytest.raises(AssertionError):
        fuzz(tmp_path, 40, 20, careless=True)


@pytest.mark.slow
def test_ten_thousand_sequences_never_overspend(tmp_path):
    assert fuzz(tmp_path, 10_000, 100) >= 50


def test_two_processes_share_one_budget(tmp_path):
    NodeLedger(tmp_path, BUDGET).close()
    fork = multiprocessing.get_context("fork")

    def run(name: str) -> None:
        with NodeLedger(tmp_path, BUDGET) as ledger:
            for k in range(30):
                try:
                    ledger.release("ann", f"{name}{k}", 0.3, lambda: b"x")
                except Refused:
                    return

    others = [fork.Process(target=run, args=(name,)) for name in "ab"]
    for process in others:
        process.start()
    for process in others:
        process.join()
    with NodeLedger(tmp_path, BUDGET) as ledger:
        assert ledger.spent("ann") == pytest.approx(0.3 * 11**0.5)  # the twelfth would exceed 1
