"""The examples in docstrings of tables, users and estimators run and print what they say."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = ("data.encoding", "data.io", "data.participants", "data.scaling", "data.users", "estimators",
           "fitting.prepare")


def failures(module):
    runner = doctest.DocTestRunner(verbose=False)
    found = [test for test in doctest.DocTestFinder().find(module) if test.examples]
    for test in found:
        runner.run(test, out=lambda _: None)
    return len(found), runner.summarize(verbose=False).failed


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    n_found, n_failed = failures(importlib.import_module(f"coterie.{name}"))
    assert n_found > 0
    assert n_failed == 0


def test_a_wrong_example_is_seen(tmp_path, monkeypatch):
    (tmp_path / "wrong_example.py").write_text('def f():\n    """\n    >>> 1 + 1\n    3\n    """\n')
    monkeypatch.syspath_prepend(tmp_path)
    assert failures(importlib.import_module("wrong_example")) == (1, 1)
