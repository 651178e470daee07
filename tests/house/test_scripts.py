"""The page's scripts are modules that a linter can check, and one plain script in the page."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from coterie.output.report import render
from coterie.output.report.page import SCRIPTS

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "coterie" / "output" / "report"
MODULE = re.compile(r"^(?:import|export)\b.*", re.M)


def mistakes(folder: Path) -> str:
    """What oxlint says of the scripts in a folder; nothing where they are in order."""
    program = shutil.which("oxlint", path=str(Path(sys.executable).parent)) or shutil.which("oxlint")
    assert program, "needs oxlint: pip install oxlint"
    done = subprocess.run([program, "--format", "unix", "--deny-warnings", "--config", ROOT / ".oxlintrc.json", folder],
                          capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (done.returncode == 0) == (not done.stdout.strip()), done.stdout + done.stderr
    return done.stdout


def test_the_scripts_are_in_order():
    assert mistakes(SOURCE) == ""


@pytest.mark.parametrize(("name", "line", "complaint"), [
    ("page.js", "shwo();", "'shwo' is not defined"),
    ("page.js", "function idle() {}", "'idle' is declared but never used"),
    ("proof.js", 'import { nothing } from "./basics.js"; nothing();', "nothing"),
    ("basics.js", 'import { doc } from "./model.js"; doc.seen = true;', "cycle"),
])
def test_a_mistake_in_a_script_is_found(tmp_path, name, line, complaint):
    for script in SCRIPTS:
        shutil.copy(SOURCE / script, tmp_path)
    with (tmp_path / name).open("a") as file:
        file.write(line + "\n")
    assert complaint in mistakes(tmp_path)


def test_every_script_is_in_the_page_as_a_plain_script():
    assert set(SCRIPTS) == {path.name for path in SOURCE.glob("*.js")}
    assert all(MODULE.search((SOURCE / name).read_text()) for name in SCRIPTS)
    script = re.findall(r"<script>(.*?)</script>", render({"title": "t"}), re.S)[-1]
    assert MODULE.findall(script) == []
    for name in SCRIPTS:
        first = (SOURCE / name).read_text().partition("\n")[0]
        assert first.startswith("// ")
        assert first in script
