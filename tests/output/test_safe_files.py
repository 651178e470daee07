"""Files of a run: who can read them, and that no name in them is a formula."""

from __future__ import annotations

import csv
import os
import stat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import coterie as ct
from coterie.base.storage import (
    open_private,
    plain_cell,
    private_folder,
    safe_cell,
    write_atomically,
)
from coterie.datasets import clustered
from coterie.federated.agreement import Agreement
from coterie.federated.node import keep_models
from coterie.fitting import Settings, fit
from coterie.output.runs import table

FORMULAS = ["=cmd|'/c calc'!A1", " =1+1", "  @SUM(A1)", "\u00a0=1", "' =1",
            "+1+1", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "'=1", "\uff1d1+1", "-", "ann"]


def others_can_read(folder: Path) -> list[Path]:
    """Files and folders that others than the owner can open."""
    return [path for path in [folder, *folder.rglob("*")] if stat.S_IMODE(path.stat().st_mode) & 0o077]


@pytest.fixture
def open_umask():
    """The usual mask, with which files are readable by all unless they are made otherwise."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_checkpoints_are_their_owners_and_results_follow_the_umask(tmp_path, open_umask):
    users = clustered("squared", n_users=9, n_clusters=3, samples=10, seed=0).users
    ct.federate(users, checkpoint=tmp_path / "asked" / "checkpoint").save(tmp_path / "asked" / "run")
    ct.federate(users, ct.Squared(), 0.05, checkpoint=tmp_path / "solved" / "checkpoint")
    for name in ("asked", "solved"):
        assert any((tmp_path / name / "checkpoint").rglob("*"))
        assert others_can_read(tmp_path / name / "checkpoint") == []
    (tmp_path / "solved" / "checkpoint" / "note.txt").write_text("for all")
    assert others_can_read(tmp_path / "solved" / "checkpoint") == [
        tmp_path / "solved" / "checkpoint" / "note.txt"]  # the check can fail
    results = [tmp_path / "asked" / "run", *(tmp_path / "asked" / "run").rglob("*")]
    assert others_can_read(tmp_path / "asked" / "run") == results
    os.umask(0o077)
    fit(users, Settings(task="regression", holdout=0.0)).save(tmp_path / "closed")
    assert others_can_read(tmp_path / "closed") == []


def test_a_run_with_its_checkpoint_inside_can_be_read(tmp_path, open_umask):
    users = clustered("squared", n_users=9, n_clusters=3, samples=10, seed=0).users
    ct.federate(users, checkpoint=tmp_path / "run" / "checkpoint").save(tmp_path / "run")
    private = {tmp_path / "run" / "checkpoint", *(tmp_path / "run" / "checkpoint").rglob("*")}
    everything = {tmp_path / "run", *(tmp_path / "run").rglob("*")}
    assert set(others_can_read(tmp_path / "run")) == everything - private


def test_files_become_private_and_folders_of_others_stay_as_they_are(tmp_path, open_umask):
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "a").write_text("old")
    write_atomically(shared / "a", b"new")
    with open_private(shared / "a", "ab") as file:
        file.write(b"er")
    assert (shared / "a").read_text() == "newer"
    assert others_can_read(shared) == [shared]
    assert others_can_read(private_folder(shared / "b" / "c")) == []
    assert shared / "b" in others_can_read(shared)
    write_atomically(shared / "a", b"result", shared=True)
    assert (shared / "a") in others_can_read(shared)


def test_models_that_a_node_keeps_are_its_own(tmp_path, open_umask):
    users = clustered("squared", n_users=3, samples=20, seed=0).users
    fitted = fit(users, Settings(task="regression", holdout=0.0))
    agreement = Agreement(names=users.names, features=users.feature_names, run="r",
                                                 units=fitted.units)
    keep_models(tmp_path / "models", agreement, [(0, fitted.models[0])])
    assert len(list((tmp_path / "models").iterdir())) == 1
    assert others_can_read(tmp_path / "models") == []


def test_names_that_look_like_formulas(tmp_path):
    users = clustered("squared", n_users=len(FORMULAS), n_clusters=2, samples=20, seed=0).users
    users = ct.Users.from_arrays(users.features, users.targets, np.array(FORMULAS, dtype=object)[users.owner],
                                 feature_names=["=A1", "x"])
    fitted = fit(users, Settings(task="regression", holdout=0.0))
    fitted.save(tmp_path / "run")
    for file in (tmp_path / "run").glob("*.csv"):
        with file.open(newline="", encoding="utf-8") as lines:
            cells = [cell for row in csv.reader(lines) for cell in row]
        assert not [cell for cell in cells if dangerous(cell)], file
    assert dangerous("=1")
    run = ct.load_run(tmp_path / "run")
    assert set(run.names) == set(FORMULAS)
    assert run.certify(users).holds


def dangerous(cell: str) -> bool:
    """Whether a spreadsheet might calculate a cell."""
    try:
        float(cell)
    except ValueError:
        return cell[:1] in tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")
    return False


@given(st.text(alphabet="'=+-@\t\r\n1a\uff1d", max_size=8))
def test_every_name_comes_back(name):
    cell = safe_cell(name)
    assert plain_cell(cell) == name
    assert not cell or not dangerous(cell)


def test_numbers_stay_numbers():
    assert table(["a", "=b"], [[-1.5, "-2"], [None, "=x"]]) == b"a,'=b\n-1.5,-2\n,'=x\n"


@pytest.mark.parametrize("values", [{"plain": 3}, {"models": np.zeros(2)}])
def test_a_solution_file_without_a_part_is_a_sentence(tmp_path, values):
    from coterie.base.storage import pack

    users = clustered("squared", n_users=6, n_clusters=2, samples=10, seed=0).users
    folder = ct.save_run(ct.solve(ct.Problem(users, ct.Squared(), lam=0.1)), tmp_path / "run")
    assert ct.load_run(folder).n_clusters
    (folder / "solution.coterie").write_bytes(pack(values))
    with pytest.raises(ct.InvalidInput, match=r"was changed"):
        ct.load_run(folder)


@pytest.mark.parametrize("body", [b"", b"PK\x03\x04", b"nothing", None])
def test_bytes_with_a_good_checksum_that_are_no_checkpoint(body):
    import hashlib
    import io

    from coterie.base.storage import pack, unpack

    if body is None:  # arrays of another kind, which would have to be unpickled
        stream = io.BytesIO()
        np.savez(stream, plain=np.array([{}], dtype=object))
        body = stream.getvalue()
    with pytest.raises(ct.InvalidInput, match="holds something else than a checkpoint"):
        unpack(b"coterie checkpoint 1\n" + hashlib.sha256(body).digest() + body)
    assert unpack(pack({"a": 1})) == {"a": 1}


def test_a_run_nested_too_deep_is_a_sentence(tmp_path):
    users = clustered("squared", n_users=6, n_clusters=2, samples=10, seed=0).users
    folder = ct.save_run(ct.solve(ct.Problem(users, ct.Squared(), lam=0.1)), tmp_path / "run")
    (folder / "run.json").write_text("[" * 100_000)
    with pytest.raises(ct.InvalidInput, match="cannot be read"):
        ct.load_run(folder)


def test_names_are_no_commands_for_a_terminal(capsys):
    from coterie.cli.base import console, grid, plain, say, visible

    name = "\x1b[31mred\x07\x9b2J\u202e"
    assert visible(name) == "?[31mred??2J?"
    assert visible("ann\n\tmüller") == "ann\n\tmüller"
    assert "\x1b" not in plain(name)
    say(name)
    console.print(grid("users", ("name",), [(name,)]))
    shown = capsys.readouterr().out
    assert "red" in shown
    assert not {"\x07", "\x9b", "\u202e"} & set(shown)
