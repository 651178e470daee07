"""The command as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import matplotlib
import numpy
import pytest

COTERIE = [sys.executable, "-m", "coterie"]


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


@pytest.mark.slow
def test_demo_without_matplotlib_says_what_to_install(tmp_path):
    code = ("import sys; sys.modules['matplotlib'] = None; sys.modules['matplotlib.figure'] = None; "
            "sys.argv = ['coterie', 'demo', '--out', 'here']; from coterie.cli import main; main()")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Figure         none. Drawing figures needs matplotlib" in done.stdout
    assert "pip install 'coterie[plots]'" in done.stdout
    assert {path.name for path in (tmp_path / "here").iterdir()} == {"report.html"}


@pytest.mark.parametrize(("shell", "part"), [("bash", "complete_bash"), ("zsh", "complete_zsh"), ("fish", "is-args")])
def test_completion_for_shells(tmp_path, shell, part):
    coterie = str(Path(sys.executable).with_name("coterie"))
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    shown = subprocess.run([coterie, "--show-completion", shell], capture_output=True, text=True, timeout=60,
                           cwd=tmp_path, env=environment, check=True).stdout
    assert "_COTERIE_COMPLETE" in shown
    assert part in shown


def test_words_are_completed(tmp_path):
    coterie = str(Path(sys.executable).with_name("coterie"))

    def completed(words: str) -> list[str]:
        environment = {**os.environ, "_COTERIE_COMPLETE": "complete_bash", "COMP_WORDS": words,
                       "COMP_CWORD": str(len(words.split(" ")) - 1)}
        return subprocess.run([coterie], capture_output=True, text=True, timeout=60, cwd=tmp_path, env=environment,
                              check=True).stdout.split()

    assert completed("coterie pre") == ["predict"]
    assert completed("coterie predict --onl") == ["--only-predictions"]
    assert completed("coterie nothing-like-it") == []


def test_completion_is_installed_for_a_shell(tmp_path):
    coterie = str(Path(sys.executable).with_name("coterie"))
    environment = {**os.environ, "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    subprocess.run([coterie, "--install-completion", "bash"], capture_output=True, timeout=60, cwd=tmp_path,
                   env=environment, check=True)
    scripts = [path for path in tmp_path.rglob("*") if path.is_file() and "coterie" in path.name]
    assert len(scripts) == 1
    assert "_COTERIE_COMPLETE=complete_bash" in scripts[0].read_text()


def test_doctor_says_what_is_there_and_what_is_missing(tmp_path, monkeypatch):
    from coterie.cli import doctor

    info = json.loads(run("doctor", "--json", cwd=tmp_path).stdout)
    assert info["versions"]["numpy"] == numpy.__version__
    assert info["extras"]["plots"]["matplotlib"] == matplotlib.__version__
    assert info["extras"]["reproduce"].keys() == {"matplotlib", "plotly"}
    assert info["memory"]["total"] >= info["memory"]["free"] > 0
    assert 1 <= info["usable_cores"] <= info["cores"]
    assert info["compiled_code"]["writable"] is True
    shown = run("doctor", cwd=tmp_path).stdout
    assert f"numpy         │ {numpy.__version__}" in shown
    # A library that is not there, a cache that cannot be written, and a program that tells of two GPUs.
    real = metadata.version
    monkeypatch.setattr(doctor.metadata, "version", lambda name: real(name if name != "plotly" else "no-such-library"))
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file" / "cache"))
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'H200, 143771 MiB, 550.1'\necho 'H200, 143771 MiB, 550.1'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    info = doctor.inspect()
    assert info["extras"]["reproduce"]["plotly"] is None
    assert info["extras"]["plots"] == {"matplotlib": matplotlib.__version__}
    assert "reproduce" in info["remedies"][0]
    assert "plots" not in info["remedies"][0]
    assert "NUMBA_CACHE_DIR" in info["remedies"][1]
    assert info["gpus"] == ["H200, 143771 MiB, 550.1"] * 2
    program.write_text("#!/bin/sh\nexit 9\n")
    assert doctor.inspect()["gpus"] == []


@pytest.mark.parametrize("wanted", ["1", "3"])
def test_threads_are_limited_here_and_in_processes_started_from_here(tmp_path, wanted):
    code = """
import os, subprocess, sys
import numpy, coterie.cli as cli, coterie.cli.demo as demo
from coterie.base.machine import n_threads
from threadpoolctl import threadpool_info
def look(*_, **__):
    child = subprocess.run([sys.executable, "-c", "import os; print(os.environ['OMP_NUM_THREADS'])"],
                           capture_output=True, text=True).stdout.strip()
    print(n_threads(), child, *{library["num_threads"] for library in threadpool_info()})
    raise SystemExit(0)
demo.ellipses = look
sys.argv = ["coterie", "demo", "--threads", sys.argv[1]]
cli.main()
"""
    done = subprocess.run([sys.executable, "-c", code, wanted], cwd=tmp_path, capture_output=True, text=True,
                          timeout=60, env={**os.environ, "OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"})
    assert done.stdout.split() == [wanted] * 3, done
    refused = run("demo", "--threads", "0", cwd=tmp_path)
    assert refused.returncode == 2
    assert "--threads" in refused.stderr


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
    ("cvxpy", "reference", "import coterie as c; users = c.Users.from_arrays([[1.], [2.]]); "
                           "c.solve(c.Problem(users, c.SquaredDistance(), lam=1), solver='reference')"),
    ("polars", "tables", "import coterie as c; c.Users.from_csv('x.csv', user='u')"),
    ("matplotlib", "plots", "from coterie.output.plots.base import new_figure; new_figure(1, 1)"),
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
sys.argv = ["coterie", "demo", "--out", "here", "--tol", "{'1e-18' if where == 'solve' else '1e-8'}"]
whole.main()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert "Certified gap" in done.stdout
    assert "These groups" not in done.stdout
    assert ("Interrupted" in done.stdout) == (where == "solve")
    assert (tmp_path / "here" / "separators.png").exists()


@pytest.mark.parametrize(("rows", "said"), [("a,1,2\na,oops,3\nb,2,1\n", "line 3 of table.csv"),
                                            ("a,1,2\na,2,3,4\nb,2,1\n", "line 3")])
def test_a_file_that_a_copy_of_the_process_cannot_read_is_refused_once(tmp_path, rows, said):
    (tmp_path / "table.csv").write_text("who,x,y\n" + rows)
    ran = subprocess.run([*COTERIE, "fit", "table.csv", "--user", "who", "--target", "y", "--threads", "2"],
                         cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 2
    assert ran.stderr.count(said) == 1, ran.stderr
    assert "Traceback" not in ran.stderr
    assert not (tmp_path / "run").exists()
