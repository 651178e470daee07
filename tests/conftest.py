"""Fixtures for all tests."""

from __future__ import annotations

import builtins

import pytest
from support.problems import LOSS_NAMES


@pytest.fixture(params=LOSS_NAMES)
def loss_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def without_polars(monkeypatch):
    """As if polars were not installed."""
    original = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "polars":
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
