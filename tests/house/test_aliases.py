"""Old import paths give the modules that hold the names now, with a warning, for one version."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings

import pytest

from coterie._aliases import MOVED, new_path


@pytest.mark.parametrize("old", list(MOVED))
def test_an_old_path_is_the_new_module(old):
    sys.modules.pop(f"coterie.{old}", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the folder, which may have moved too
        importlib.import_module(f"coterie.{old}".rpartition(".")[0])
    with pytest.warns(DeprecationWarning, match=f"coterie.{old} is now coterie.{MOVED[old]}"):
        module = importlib.import_module(f"coterie.{old}")
    assert module is importlib.import_module(f"coterie.{MOVED[old]}")
    assert module.__name__ == f"coterie.{MOVED[old]}"


def test_names_are_imported_by_old_paths():
    code = ("from coterie.analysis.groups import find_groups\nfrom coterie.graph import Graph\n"
            "from coterie.graph.weights import LocalModels\nimport coterie.solution\n"
            "from coterie.runs.load import load_run\nfrom coterie.privacy import audit\n"
            "import coterie as ct\nassert coterie.solution.Solution is ct.Solution and Graph is ct.Graph")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_other_names_are_not_found():
    assert new_path("coterie.errors") == "coterie.base.errors"
    assert new_path("coterie.analysis") == ""  # a folder that holds moved modules only
    assert new_path("coterie.analyses") is None
    assert new_path("numpy.errors") is None
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("coterie.analyses")


def test_nothing_in_the_package_uses_old_paths():
    code = "import warnings\nwarnings.simplefilter('error', DeprecationWarning)\nimport coterie\n"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
