"""One run at a time in a folder."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from coterie.base.errors import InvalidInput
from coterie.base.storage import LOCK, locked

_HOLD = "import sys\nfrom coterie.base.storage import locked\nwith locked(sys.argv[1]):\n" \
        "    print('held', flush=True)\n    sys.stdin.read()\n"


def test_a_second_run_is_refused_with_the_first_ones_process(tmp_path):
    with locked(tmp_path / "run"):
        with (pytest.raises(InvalidInput, match=rf"another run writes into .*run \(process {os.getpid()}\)"),
              locked(tmp_path / "run")):
            raise AssertionError
        assert (tmp_path / "run" / LOCK).exists()
    assert not (tmp_path / "run").exists()  # it was created for nothing
    with locked(tmp_path / "run"):  # the twin
        (tmp_path / "run" / "a").touch()
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["a"]


def test_a_process_that_is_killed_holds_nothing(tmp_path):
    with subprocess.Popen([sys.executable, "-c", _HOLD, str(tmp_path)], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(InvalidInput, match=f"process {process.pid}"), locked(tmp_path):
            raise AssertionError
        process.kill()
    with locked(tmp_path):
        pass
