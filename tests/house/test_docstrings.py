"""The examples in docstrings run and print what they say."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import inspect
import pkgutil
import re

import pytest

import coterie

#: Modules whose examples need Flower or what it brings, or that end the process.
APART = ("federated.flower", "federated.runtimes.cluster", "federated.runtimes.keys", "__main__")
NAMES = [info.name.removeprefix("coterie.") for info in pkgutil.walk_packages(coterie.__path__, "coterie.")]
#: Modules that must have examples.
WITH_EXAMPLES = ("data.encoding", "data.files", "data.moments", "data.participants", "data.users", "embeddings",
                 "estimators.clustering", "estimators.personalized",
                 "fitting.prepare", "fitting.settings", "output.runs.from_table", "output.runs.load",
                 "output.runs.save", "base.storage")
#: Modules whose examples need torch or what Flower brings, which `make test-all` installs.
WITH_EXTRAS = ("embeddings", "federated.runtimes.kits", "federated.runtimes.supervisor")


def failures(module):
    runner = doctest.DocTestRunner(verbose=False)
    tests = [test for test in doctest.DocTestFinder().find(module) if test.examples]
    for test in tests:
        runner.run(test, out=lambda _: None)
    return len(tests), runner.summarize(verbose=False).failed


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in WITH_EXTRAS))
                                  for name in NAMES if name not in APART])
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


def missing_sections(name: str, value: object) -> list[str]:
    """Sections that the docstring of a public function or class lacks; exceptions need no example."""
    if not (inspect.isfunction(value) or inspect.isclass(value)):
        return []
    text = inspect.getdoc(value) or ""
    has = set(re.findall(r"^(\w+)\n-{3,}$", text, re.M))
    wanted = [] if isinstance(value, type) and issubclass(value, BaseException) else [{"Example", "Examples"}]
    if inspect.isfunction(value) and inspect.signature(value).parameters:
        wanted.append({"Parameters"})
    if dataclasses.is_dataclass(value) and dataclasses.fields(value) and not inspect.isabstract(value):
        wanted.append({"Parameters", "Attributes"})
    if inspect.isfunction(value) and "return " in inspect.getsource(value):
        wanted.append({"Returns"})
    if inspect.isfunction(value) and "raise " in inspect.getsource(value):
        wanted.append({"Raises"})
    return [f"{name}: {' or '.join(sorted(names))}" for names in wanted if not names & has]


def test_public_names_are_explained():
    assert [line for name in coterie.__all__ for line in missing_sections(name, getattr(coterie, name))] == []


#: Classes whose methods solvers and federations call, not users: their interface is in docs/adding-a-loss.md and
#: CONTRIBUTING.md.
PARTS = (coterie.Loss, coterie.Participation, *coterie.SOLVERS.values(), *coterie.ALGORITHMS.values())


def missing_in_methods(name: str, kind: object) -> list[str]:
    """Sections that the docstrings of a public class's own and inherited methods lack; constructors need no Returns."""
    wrong: list[str] = []
    for method in dir(kind) if inspect.isclass(kind) and not issubclass(kind, (*PARTS, BaseException)) else []:
        raw = inspect.getattr_static(kind, method)
        makes = isinstance(raw, classmethod)
        function = raw.__func__ if isinstance(raw, (classmethod, staticmethod)) else raw
        if method.startswith("_") or not inspect.isfunction(function) or not function.__module__.startswith("coterie"):
            continue
        source, text = inspect.getsource(function), inspect.getdoc(getattr(kind, method)) or ""
        has = set(re.findall(r"^(\w+)\n-{3,}$", text, re.M))
        wanted = {"Parameters"} if set(inspect.signature(function).parameters) - {"self", "cls"} else set()
        wanted |= {"Returns"} if "return " in source and not makes else set()
        wanted |= {"Raises"} if "raise " in source else set()
        wrong += [f"{name}.{method}: {section}" for section in sorted(wanted - has)]
    return wrong


def test_methods_of_public_classes_are_explained():
    assert [line for name in coterie.__all__ for line in missing_in_methods(name, getattr(coterie, name))] == []


class Bare:
    """A class with a method that says too little, one that says enough, and a constructor."""

    def half(self, x):
        """Half of x."""
        if x % 2:
            raise ValueError(x)
        return x // 2

    def nothing(self):
        """Do nothing."""

    @classmethod
    def of(cls, x):
        """One of these.

        Parameters
        ----------
        x : anything.
        """
        return cls()


def test_a_missing_section_of_a_method_is_seen(monkeypatch):
    assert missing_in_methods("Bare", Bare) == []  # not a class of coterie
    monkeypatch.setattr(Bare.half, "__module__", "coterie.bare")
    monkeypatch.setattr(Bare.of.__func__, "__module__", "coterie.bare")
    assert missing_in_methods("Bare", Bare) == ["Bare.half: Parameters", "Bare.half: Raises", "Bare.half: Returns"]


def test_a_missing_section_is_seen():
    def bare(x):
        """Double a number."""
        return 2 * x

    def full(x):
        """Double a number.

        Parameters
        ----------
        x : the number.

        Returns
        -------
        Twice the number.

        Example
        -------
        See above.
        """
        return 2 * x

    assert missing_sections("bare", bare) == ["bare: Example or Examples", "bare: Parameters", "bare: Returns"]
    assert missing_sections("full", full) == []
    plain = dataclasses.make_dataclass("plain", ["x"])
    assert missing_sections("plain", plain) == ["plain: Example or Examples", "plain: Attributes or Parameters"]
    assert missing_sections("Error", type("Error", (ValueError,), {"__doc__": "An error."})) == []
