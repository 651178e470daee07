"""Fixtures for all tests."""

from __future__ import annotations

import builtins
import os
import shutil

import pytest
from hypothesis import Phase, settings
from hypothesis.internal.conjecture import providers
from support.problems import LOSS_NAMES

# In CI, a change can fail only by what it changes: examples depend on the source of their test alone, and a failure is
# reported as drawn, without minutes of shrinking. Elsewhere each run draws new examples.
settings.register_profile("ci", settings.get_profile("ci"), derandomize=True, database=None, deadline=None,
                          print_blob=True, phases=(Phase.explicit, Phase.generate, Phase.target))
settings.register_profile("new examples", deadline=None)  # time says more about the machine than about the test
settings.load_profile("ci" if os.environ.get("CI") else "new examples")
if os.environ.get("CI"):
    # Hypothesis mixes numbers and texts of the modules imported so far into its examples: those of other tests, too.
    providers._get_local_constants = providers.Constants


@pytest.fixture(autouse=True, scope="session")
def own_state(tmp_path_factory):
    """Ledgers that nodes keep by default are those of this run of the tests, also in processes that it starts."""
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
    yield
    patch.undo()


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


@pytest.fixture(scope="module")
def browser():
    """Debian's Chromium, headless. Closed after each module: while it is open, an event loop runs in this thread."""
    absent = pytest.fail if os.environ.get("CI") else pytest.skip
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        absent("needs Chromium: apt-get install chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        absent("needs Playwright: pip install playwright")
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=program) as running:
        yield running


# How many tests a run left out, for the last line of `make test`; workers of pytest-xdist report to the main process.

LEFT_OUT = pytest.StashKey[int]()


def pytest_deselected(items):
    if items:
        config = items[0].config
        config.stash[LEFT_OUT] = config.stash.get(LEFT_OUT, 0) + len(items)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left out", 0)


def pytest_sessionfinish(session):
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput["left out"] = config.stash.get(LEFT_OUT, 0)
    elif hasattr(config, "cache"):
        config.cache.set("coterie/left-out", config.stash.get(LEFT_OUT, 0))
