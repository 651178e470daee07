"""Fixtures for all tests."""

from __future__ import annotations

import builtins
import os
import shutil

import pytest
from support.browser import Browser
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


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("needs Chromium: apt-get install chromium")
    with Browser(program, tmp_path_factory.mktemp("browser")) as running:
        yield running
