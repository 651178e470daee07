"""The examples in docstrings run and print what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import coterie

#: Modules that need Flower, or end the process.
APART = ("federated.flower", "federated.runtimes.cluster", "federated.runtimes.keys", "cli.__main__")
NAMES = [info.name.removeprefix("coterie.") for info in pkgutil.walk_packages(coterie.__path__, "coterie.")]
#: Modules that must have examples.
WITH_EXAMPLES = ("data.encoding", "data.io", "data.participants", "data.scaling", "data.users", "estimators",
                 "fitting.estimate", "fitting.prepare", "fitting.settings", "runs.from_table", "runs.load", "runs.save",
                 "storage")


def failures(module):
    runner = doctest.DocTestRunner(verbose=False)
    tests = [test for test in doctest.DocTestFinder().find(module) if test.examples]
    for test in tests:
        runner.run(test, out=lambda _: None)
    return len(tests), runner.summarize(verbose=False).failed


@pytest.mark.parametrize("name", [name for name in NAMES if name not in APART])
def test_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    n_tests, n_failed = failures(importlib.import_module(f"coterie.{name}"))
    assert n_tests > 0 or name not in WITH_EXAMPLES
    assert n_failed == 0


def test_all_modules_with_examples_are_there():
    assert set(WITH_EXAMPLES) <= set(NAMES)


def test_a_wrong_example_is_seen(tmp_path, monkeypatch):
    (tmp_path / "wrong_example.py").write_text('def f():\n    """\n    >>> 1 + 1\n    3\n    """\n')
    monkeypatch.syspath_prepend(tmp_path)
    assert failures(importlib.import_module("wrong_example")) == (1, 1)
