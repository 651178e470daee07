"""Many runs give what they gave: labels exactly, numbers to eight digits."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location("golden_runs", Path(__file__).with_name("runs.py"))
golden = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(golden)
STORED = json.loads(golden.STORED.read_text("utf-8"))


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] if name in golden.SLOW else [])
                                  for name in golden.RUNS])
def test_a_run_gives_what_it_gave(name):
    assert list(golden.differences(golden.outputs(name), STORED[name])) == []


def test_every_kind_of_run_is_stored():
    assert set(STORED) == set(golden.RUNS)
    kinds = {name.split("_")[0] for name in STORED}
    assert kinds >= {"solve", "path", "certify", "groups", "federate", "fit", "private", "estimate"}
    assert len(STORED) >= 40


def changed(value):
    """The same output with its first number of any depth changed in the seventh digit, or its first text."""
    if isinstance(value, dict):
        name = next(iter(value))
        return {**value, name: changed(value[name])}
    if isinstance(value, list):
        return [changed(value[0]), *value[1:]]
    if isinstance(value, str):
        return value + "?"
    return value + 1 if isinstance(value, int) else value * (1 + 1e-6) + 1e-12


@pytest.mark.parametrize("part", ["labels", "models", "objective", "gap", "kind", "scores"])
def test_a_change_is_noticed(part):
    """The twin: one label, one digit of a model, a bound or a text that differs is a difference."""
    old = next(outputs for outputs in STORED.values() if outputs.get(part))
    new = {**old, part: old[part] + 1e-6 if part == "gap" else changed(old[part])}
    assert list(golden.differences(new, old)) != []
    assert list(golden.differences(old, old)) == []
    assert list(golden.differences({name: old[name] for name in old if name != part}, old)) != []


def test_bits_are_compared_where_asked():
    one = {"models": [0.1, 0.2]}
    exact, near = golden.plain(one, exact=True), golden.plain({"models": [0.1, 0.2 * (1 + 1e-15)]}, exact=True)
    assert list(golden.differences(near, exact, digits=0.0)) != []
    assert list(golden.differences(exact, exact, digits=0.0)) == []
