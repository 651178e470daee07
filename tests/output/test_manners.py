"""The package shows its public names only; results have a short form and become frames."""

from __future__ import annotations

import builtins
import importlib
import pkgutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import polars as pl
import pytest

import coterie as ct
from coterie.datasets import clustered
from coterie.fitting import Settings, fit

NAMED = ct.Users.from_arrays([[0.0], [1.0], [9.0]], user=["ann", "bob", "eve"], feature_names=["dose"])


@pytest.fixture(scope="module")
def users():
    return clustered("squared", n_users=9, n_clusters=3, samples=20, seed=0).users


@pytest.fixture(scope="module")
def fitted(users):
    return fit(users, Settings(task="regression", n_lams=6, holdout=0.0))


# ---- names

def test_public_names_only():
    assert dir(ct) == sorted(ct.__all__)
    assert len(set(ct.__all__)) == len(ct.__all__)
    assert all(hasattr(ct, name) and not name.startswith("_") for name in ct.__all__)
    assert not hasattr(ct, "no_such_name")


def test_a_star_brings_exactly_the_public_names():
    code = "before = set(globals())\nfrom coterie import *\nprint(*sorted(set(globals()) - before - {'before'}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == sorted(ct.__all__)


def test_submodules_are_imported_by_name():
    names = [info.name for info in pkgutil.iter_modules(ct.__path__) if info.name != "__main__"]
    assert {"plots", "datasets", "estimators", "fitting"} <= set(names)
    for name in names:
        assert importlib.import_module(f"coterie.{name}").__name__ == f"coterie.{name}"


# ---- the short form

def test_results_have_a_short_form(users, fitted, tmp_path):
    problem = ct.Problem(NAMED, ct.SquaredDistance(), lam=1.0)
    path = ct.solve_path(problem, lams=[0.1, 1.0, 5.0])
    solution, run = ct.solve(problem), ct.federate(NAMED, ct.SquaredDistance(), lam=1.0)
    assert repr(path).startswith("Path(3 lams from 0.1 to 5, 3 -> 1 groups, certified to ")
    assert repr(solution) == f"Solution(2 groups of 3 users, lam 1, certified to {solution.gap:.1e})"
    assert repr(run).startswith("Federated(2 groups of 3 users, lam 1, certified to ")
    assert repr(run).endswith(f"{run.n_rounds} rounds, {run.ledger.bytes:,} bytes)")
    assert repr(fitted) == f"Fit(groups: 3 groups of 9 users, lam {fitted.lam:.4g}, certified to {fitted.gap:.1e})"
    folder = fitted.save(tmp_path / "run")
    assert repr(ct.load_run(folder)) == (f"Run({str(folder)!r}, groups: 3 groups of 9 users, lam {fitted.lam:.4g}, "
                                         f"claims a gap of {fitted.gap:.1e})")
    groups = ct.find_groups(users)
    assert repr(groups) == f"Groups(3 groups of 3, 3, 3 users, criterion {groups.criterion:.6g})"
    one = ct.find_groups(users.take([0]))
    assert repr(one).startswith("Groups(one model for 1 user, ")
    along = ct.federate_path(NAMED, ct.SquaredDistance(), lams=[9.0, 1.0])
    assert repr(along).startswith("FederatedPath(2 lams from 9 to 1, 1 -> 2 groups, ")
    for result in (path, solution, run, fitted, groups, along):
        assert len(repr(result)) < 200


def test_what_is_not_certified_says_so():
    solution = ct.solve(ct.Problem(NAMED, ct.SquaredDistance(), lam=1.0))
    unproven = replace(solution, certificate=replace(solution.certificate, bound=-np.inf))
    assert repr(unproven) == "Solution(2 groups of 3 users, lam 1, not certified)"
    problem = solution.problem
    assert repr(ct.Path(problem=problem, solutions=(unproven,), tol=1e-8)) == \
        "Path(1 lam from 1 to 1, 2 -> 2 groups, 1 not certified)"
    assert repr(ct.Path(problem=problem, solutions=(), tol=1e-8)) == "Path(no lams)"


# ---- frames

def test_results_become_frames(users, fitted, tmp_path):
    problem = ct.Problem(NAMED, ct.SquaredDistance(), lam=1.0)
    path = ct.solve_path(problem, lams=[0.1, 1.0, 5.0])
    table = path.to_frame()
    assert isinstance(table, pl.DataFrame)
    assert table.columns == ["lam", "n_clusters", "objective", "gap", "status", "seconds"]
    assert table["lam"].to_list() == path.lams.tolist()
    assert table["gap"].to_list() == path.gaps.tolist()
    assert table["status"].to_list() == ["CONVERGED"] * 3
    for solution in (ct.solve(problem), ct.federate(NAMED, ct.SquaredDistance(), lam=1.0)):
        table = solution.to_frame()
        assert table.columns == ["user", "group", "dose"]
        assert table["user"].to_list() == ["ann", "bob", "eve"]
        assert table["group"].to_list() == [0, 0, 1]
        assert table["dose"].to_list() == solution.models[:, 0].tolist()
    for result in (fitted, ct.load_run(fitted.save(tmp_path / "run"))):
        table = result.to_frame()
        assert table.columns == ["user", "group", "x0", "x1", "intercept"]
        np.testing.assert_array_equal(table[:, 2:].to_numpy(), fitted.coefficients[:, :, 0])
        assert table["group"].to_list() == fitted.labels.tolist()
    groups = ct.find_groups(users)
    assert groups.to_frame().columns == ["user", "group", "x0", "x1", "intercept"]
    np.testing.assert_array_equal(groups.to_frame()[:, 2:].to_numpy(), groups.models)
    along = ct.federate_path(NAMED, ct.SquaredDistance(), lams=[9.0, 1.0])
    assert along.to_frame()["n_clusters"].to_list() == [1, 2]


def test_names_of_all_kinds_and_taken_columns():
    users = ct.Users.from_arrays(np.eye(3), user=[("site", 1), ("site", 2), ("site", 3)],
                                 feature_names=["user", "group", "x"])
    table = ct.solve(ct.Problem(users, ct.SquaredDistance(), lam=0.1)).to_frame()
    assert table.columns == ["user", "group", "user_", "group_", "x"]
    assert table["user"].to_list() == ["('site', 1)", "('site', 2)", "('site', 3)"]


def test_several_classes_have_a_column_each():
    users = clustered("multinomial", n_users=4, n_clusters=2, samples=30, seed=0).users
    model = fit(users, Settings(task="classification", n_lams=4, holdout=0.0))
    assert model.to_frame().columns[2:5] == ["x0 [0]", "x0 [1]", "x0 [2]"]
    assert model.to_frame().width == 2 + model.coefficients[0].size


def test_pandas_where_there_is_no_polars_and_the_command_where_there_is_neither(monkeypatch):
    solution, absent, real = ct.solve(ct.Problem(NAMED, ct.SquaredDistance(), lam=1.0)), {"polars"}, builtins.__import__

    def without(name, *rest, **more):
        if name in absent:
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    table = solution.to_frame()
    assert isinstance(table, pd.DataFrame)
    assert list(table.columns) == ["user", "group", "dose"]
    assert list(table["group"]) == [0, 0, 1]
    absent.add("pandas")
    with pytest.raises(ct.MissingExtra, match=r"Run: pip install 'coterie\[tables\]'"):
        solution.to_frame()


# ---- users by name or position

def test_pairs_of_users_are_given_by_name_or_position():
    problem = ct.Problem(NAMED, ct.SquaredDistance(), lam=1.0)
    solution, path = ct.solve(problem), ct.solve_path(problem, lams=[0.1, 1.0, 5.0])
    assert solution.explain("ann", "eve") == solution.explain(0, 2) == solution.explain("ann", 2)
    assert solution.explain("ann", "eve") != solution.explain("ann", "bob")
    assert path.merge_point("bob", "ann") == path.merge_point(1, 0)
    with pytest.raises(ct.InvalidInput, match=r"no user 'anna'. Did you mean 'ann'"):
        solution.explain("anna", "bob")
    with pytest.raises(ct.InvalidInput, match="no user 'Zoe'"):
        path.merge_point("ann", "Zoe")
    numbered = ct.solve(ct.Problem(ct.Users.from_arrays([[0.0], [1.0], [9.0]], user=[2, 3, 4]), ct.SquaredDistance(),
                                   lam=1.0))
    assert numbered.explain(2, 4).users == (2, 4)
    with pytest.raises(ct.InvalidInput, match=r"There is no user 0"):
        numbered.explain(0, 2)
