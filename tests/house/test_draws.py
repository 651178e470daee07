"""In CI, tests draw the same examples whatever else changes; elsewhere each run draws new ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
DRAW = """
import conftest
import coterie.base.storage, other
from hypothesis import given, settings, strategies as st

drawn = []

@settings(max_examples=200)
@given(st.floats(), st.integers(), st.text())
def draw(number, count, text):
    drawn.append((number, count, text))

draw()
print(repr(drawn))
"""


def drawn(folder: Path, other: str, **environment: str) -> str:
    """The examples of a test in a process of its own, which has imported a module with this text."""
    (folder / "other.py").write_text(other)
    (folder / "draw.py").write_text(DRAW)
    clean = {name: value for name, value in os.environ.items() if name != "CI"}
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run([sys.executable, "draw.py"], cwd=folder, capture_output=True, text=True, timeout=120,
                          env=clean | {"PYTHONPATH": path} | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_examples_in_ci_do_not_depend_on_other_code(tmp_path):
    numbers = f"numbers = {[1234.5678 + k for k in range(300)]}"
    first, second = (drawn(tmp_path, other, CI="1") for other in ("", numbers))
    assert first == second
    assert "1300.5678" not in first
    assert drawn(tmp_path, "") != drawn(tmp_path, "")  # the twin: elsewhere they are new each time
