"""The command as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

COTERIE = [sys.executable, "-m", "coterie.cli"]


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COTERIE, *arguments], cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_demo_prints_clusters_and_gap_and_saves_a_picture(tmp_path):
    done = run("demo", "--out", "here", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for word in ("3 groups among 60 users", "20 of kind 1", "Objective", "Certified gap", "Solved"):
        assert word in done.stdout
    picture = tmp_path / "here" / "separators.png"
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert picture.stat().st_size > 20_000
    assert done.stderr == ""


def test_version_and_help(tmp_path):
    import coterie

    assert run("--version", cwd=tmp_path).stdout == f"coterie {coterie.__version__}\n"
    for arguments in ([], ["--help"], ["demo", "--help"]):
        shown = run(*arguments, cwd=tmp_path)
        assert "demo" in shown.stdout + shown.stderr


@pytest.mark.parametrize(("arguments", "complaint"), [
    (["demo", "--lam", "-1"], "lam must be a finite number"),
    (["demo", "--solver", "magic"], "unknown solver 'magic'"),
    (["demo", "--tol", "0"], "tol must be"),
    (["demo", "--lam", "much"], "--lam"),
    (["dance"], "No such command"),
])
def test_mistakes_end_in_a_sentence_and_code_2(tmp_path, arguments, complaint):
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("in the way")
    done = run("demo", "--out", "file/sub", "--lam", "1000", cwd=tmp_path)
    assert done.returncode == 2
    assert "file" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("library", "extra", "code"), [
    ("typer", "cli", "import coterie.cli"),
    ("cvxpy", "reference", "import coterie as c; users = c.Users.from_arrays([[1.], [2.]]); "
                           "c.solve(c.Problem(users, c.SquaredDistance(), lam=1), solver='reference')"),
    ("polars", "tables", "import coterie as c; c.Users.from_csv('x.csv', user='u')"),
    ("matplotlib", "plots", "from coterie.plots.style import new_figure; new_figure(1, 1)"),
])
def test_a_missing_extra_names_its_install_command(tmp_path, library, extra, code):
    (tmp_path / "x.csv").write_text("u,a\n1,2\n")
    hide = f"import sys; sys.modules[{library!r}] = None; "
    done = subprocess.run([sys.executable, "-c", hide + code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert f"pip install 'coterie[{extra}]'" in done.stderr


@pytest.mark.parametrize("where", ["solve", "solve_path"])
def test_an_interrupt_shows_what_there_is_and_ends_with_130(tmp_path, where):
    """SIGINT from inside the first solve, or from inside the path: the certified point is shown, the rest left out."""
    code = f"""
import os, signal, sys
import coterie.cli.demo as cli, coterie.cli as whole
real = cli.{where}
def hit(*args, **settings):
    settings["progress"] = lambda *_: os.kill(os.getpid(), signal.SIGINT)
    return real(*args, **settings)
cli.{where} = hit
sys.argv = ["coterie", "demo", "--out", "here", "--tol", "{'1e-14' if where == 'solve' else '1e-8'}"]
whole.main()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert "Certified gap" in done.stdout
    assert "These groups" not in done.stdout
    assert ("Interrupted" in done.stdout) == (where == "solve")
    assert (tmp_path / "here" / "separators.png").exists()
