"""The examples run in a new process, and print correct results."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


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


@pytest.mark.flower
def test_heads_find_the_groups_on_embeddings_and_reach_the_oracle(tmp_path):
    done = subprocess.run([sys.executable, EXAMPLES / "heads.py", tmp_path, "--quick", "--seeds", "40"],
                          capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {line[:16].strip(): [float(cell) for cell in line[16:].split()] for line in done.stdout.splitlines()
            if re.match(r"(coterie|oracle|FedPer|one global head)\s+0\.", line)}
    ours, oracle = (np.reshape(rows[name], (2, 4)) for name in ("coterie", "oracle"))
    np.testing.assert_array_equal(ours[:, 1:], [[4, 1, 0]] * 2)  # four groups, the true ones; nobody is worse off
    assert (ours[:, 0] >= oracle[:, 0] - 0.005).all(), done.stdout
    for other in ("FedPer", "one global head"):
        assert (ours[:, 0] > np.reshape(rows[other], (2, 4))[:, 0] + 0.02).all(), done.stdout
    assert (tmp_path / "heads.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", ["torch", "flwr"])
def test_heads_say_what_to_install(tmp_path, name):
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text(f"raise ModuleNotFoundError('none', name={name!r})")
    (tmp_path / "torch").mkdir(exist_ok=True)  # without the true one
    done = subprocess.run([sys.executable, EXAMPLES / "heads.py"], capture_output=True, text=True, timeout=60,
                          cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert "pip install 'coterie[flower-sim,torch,plots]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_example_is_run():
    scripts = {path.stem for path in EXAMPLES.glob("*.py")}
    assert scripts == {"shops", "points", "hospitals", "heads"}


NUMBER = re.compile(r"-?\d+\.\d+|\d+")


@pytest.mark.slow
def test_the_comparison_of_methods_prints_what_its_page_shows():
    """Words are equal and numbers nearly: other libraries choose trees and penalties, and the page has two digits."""
    pytest.importorskip("lightgbm")
    page = (ROOT / "docs" / "when.md").read_text()
    shown = re.search(r"^python benchmarks/when.py.*?^```text\n(.*?)^```$", page, re.M | re.S)[1]
    done = subprocess.run([sys.executable, ROOT / "benchmarks" / "when.py"], capture_output=True, text=True,
                          timeout=900, check=True)
    words = [re.sub(r"\*|\s+", "", NUMBER.sub("#", text)) for text in (shown, done.stdout)]
    assert words[0] == words[1], done.stdout
    numbers, printed = ([float(n) for n in NUMBER.findall(text)] for text in (shown, done.stdout))
    assert numbers == pytest.approx(printed, rel=0.02, abs=0.02), done.stdout
    assert [n + 1 for n in numbers] != pytest.approx(printed, rel=0.02, abs=0.02)
