"""Compiling: its time is counted, it is announced, and its cache has a folder."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest

from coterie.base import compiling


@pytest.fixture
def clock(monkeypatch):
    fresh = compiling._Clock()
    monkeypatch.setattr(compiling, "_CLOCK", fresh)
    times = iter([1.0, 6.0, 10.0, 12.0])
    monkeypatch.setattr(compiling.time, "perf_counter", lambda: next(times))
    return fresh


def test_functions_inside_others_count_once(clock):
    clock.start()
    clock.start()
    clock.end()
    assert compiling.compiling_seconds() == 0.0
    clock.end()
    assert compiling.compiling_seconds() == 5.0
    clock.start()
    clock.end()
    assert compiling.compiling_seconds() == 7.0


def test_compiling_is_announced(clock):
    said = []
    compiling.when_compiling(lambda: said.append("now"))
    clock.start()
    clock.start()
    assert said == ["now"]
    clock.end()
    clock.end()
    compiling.when_compiling(None)
    clock.start()
    assert said == ["now"]


def test_numba_reports_what_it_compiles():
    before = compiling.compiling_seconds()

    @compiling.njit()
    def twice(x):
        return 2 * x

    assert twice(2) == 4
    assert compiling.compiling_seconds() > before


@pytest.mark.parametrize("writable", [True, False])
def test_the_cache_has_a_folder(writable, monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    monkeypatch.setattr(compiling.os, "access", lambda folder, mode: writable)
    compiling._find_cache()
    assert ("NUMBA_CACHE_DIR" in os.environ) is not writable
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)


_CALLED = "from coterie.base.compiling import inner\n\n@inner()\ndef step(x):\n    return x + {}\n"
_CALLER = ("from called import step\nfrom coterie.base.compiling import njit\n\n@njit(cache=True)\ndef twice(x):\n"
           "    return 2 * step(x)\n\nprint(twice(1), len(twice.stats.cache_hits))\n")


def test_cached_code_is_compiled_again_when_a_called_function_changes(tmp_path):
    def run():
        env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run([sys.executable, "caller.py"], cwd=tmp_path, env=env, text=True,
                              capture_output=True, check=True).stdout.split()

    (tmp_path / "caller.py").write_text(_CALLER)
    (tmp_path / "called.py").write_text(_CALLED.format(1))
    assert run() == ["4", "0"]
    assert run() == ["4", "1"]
    (tmp_path / "called.py").write_text(_CALLED.format(10))
    assert run() == ["22", "0"]


def test_a_cache_that_names_moved_classes_is_compiled_again():
    @compiling.njit(cache=True)
    def thrice(x):
        return 3 * x

    class Moved:
        _load_index = staticmethod(lambda: importlib.import_module("coterie.moved"))

    compiling._watch_sources(Moved, thrice.py_func)
    assert Moved._load_index() == {}
