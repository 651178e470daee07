"""The examples run in a new process, and print correct results."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(("name", "printed", "file"), [
    pytest.param("shops", ["3 groups among 38 shops, certified: True", "groups are the true kinds: True"], "shops.csv",
                 marks=pytest.mark.slow),
    pytest.param("points", ["2 clusters of [50, 100] flowers", "certified: True", "setosa against the others: 1.00"],
                 "tree.png", marks=pytest.mark.slow),
    pytest.param("hospitals", ["two groups, the true kinds: True", "certified: True",
                               "same groups as with pooled data: True"], "hospitals/report.html",
                 marks=pytest.mark.slow),
])
def test_an_example_runs(tmp_path, name, printed, file):
    done = subprocess.run([sys.executable, "-W", "error::UserWarning", EXAMPLES / f"{name}.py", tmp_path],
                          capture_output=True, text=True, timeout=300, cwd=tmp_path,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    for words in printed:
        assert words in done.stdout, done.stdout
    assert (tmp_path / file).stat().st_size > 1000


def test_every_example_is_run():
    scripts = {path.stem for path in EXAMPLES.glob("*.py")}
    assert scripts == {"shops", "points", "hospitals"}
