"""The examples run in a new process, and print correct results."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

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


def test_every_example_is_run():
    scripts = {path.stem for path in EXAMPLES.glob("*.py")}
    assert scripts == {"shops", "points", "hospitals"}


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
