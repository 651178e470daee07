"""The server's side of a deployment, with users in this process."""

from __future__ import annotations

import numpy as np
import pytest

import coterie as ct
from coterie.data.encoding import read_table
from coterie.data.moments import Standardizer
from coterie.datasets import clustered
from coterie.federated import entry, sources
from coterie.federated.runtimes.in_process import LocalNodes
from coterie.federated.settings import Deployment, for_nodes
from coterie.federated.settings import complete as config_of
from coterie.fitting import Settings

OPTIONS = '{"family": "logistic", "n_users": 9, "samples": 20, "n_features": 2, "seed": 2}'


def served(tmp_path, **changes):
    config = config_of({"data": "dataset", "dataset": "clustered", "dataset-options": OPTIONS, "lam": 0.02,
                        "out": str(tmp_path), **changes})
    settings = Deployment.of(config)
    nodes = LocalNodes([sources.load(config)], settings.holdout, settings.settings.seed)
    found = entry.serve(nodes, settings)
    return found, found.account.path


@pytest.fixture
def users():
    return clustered("logistic", n_users=9, samples=20, n_features=2, seed=2).users


def test_one_lam_is_what_federate_finds(tmp_path, users):
    result, path = served(tmp_path)
    assert path is None
    assert result.models.tobytes() == ct.federate(users, ct.Logistic(), 0.02).models.tobytes()
    assert result.status is ct.Status.CONVERGED


def test_standardized_columns(tmp_path, users):
    scaled = Standardizer.from_moments(users.moments()).transform(users)
    result, _ = served(tmp_path, standardize=True)
    assert result.models.tobytes() == ct.federate(scaled, ct.Logistic(), 0.02).models.tobytes()


def test_a_path_takes_the_best_by_rows_held_out(tmp_path, users):
    settings = {"lams": "0.001, 0.02 0.1", "held-out": 0.25, "weights": "wald"}
    result, path = served(tmp_path, **settings)
    assert path is not None
    np.testing.assert_array_equal(path.lams, [0.1, 0.02, 0.001])
    assert (path.gaps <= 1e-6).all()
    parts = users.hold_out(0.25, seed=0)
    graph = ct.adaptive_graph(ct.LocalModels.of(parts.train, ct.Logistic()), "wald")
    for run in path.runs:
        best = ct.solve(ct.Problem(parts.train, ct.Logistic(), run.lam, graph), tol=1e-10)
        np.testing.assert_allclose(run.models, best.models, atol=1e-3)
    assert result.models is path.best().models
    again, _ = served(tmp_path, **settings)  # all of it is in the checkpoints
    assert again.models.tobytes() == result.models.tobytes()
    assert again.lam == result.lam


@pytest.mark.parametrize(("changes", "complaint"), [
    ({"lams": "1 much"}, "lams must be numbers"),
    ({"lams": "1 0.1"}, "rows held out"),
    ({"lams": "-1", "held-out": 0.2}, "lam must be a finite number"),
    ({"algorithm": "magic"}, "unknown algorithm 'magic'"),
    ({"algorithm-options": "{"}, "as JSON"),
    ({"weights": "heavy"}, "unknown weights 'heavy'"),
    ({"loss": "magic"}, "neither a known name nor module:name"),
])
def test_settings_that_cannot_be_used_are_refused(tmp_path, changes, complaint):
    with pytest.raises(ct.InvalidInput, match=complaint):
        served(tmp_path, **changes)


@pytest.mark.parametrize("key", [
    {"algorithm": "newton"}, {"weights": "unit"}, {"patience": 3}, {"max-rounds": 5}, {"loss-options": "{}"},
    {"algorithm-options": "{}"}])
def test_what_needs_a_lam_says_so(key):
    (name,) = key
    with pytest.raises(ct.InvalidInput, match=rf"{name} is for a given lam, and lam is auto.*Give lam a number"):
        Deployment.of(key)
    assert Deployment.of({**key, "lam": 0.05}).fit is None  # the twin


def test_what_a_fit_is_asked_for():
    settings = Deployment.of({"max-groups": 3, "count": "users", "seed": 2, "ridge": 0.1, "loss": "squared"}).fit
    assert settings == Settings(max_groups=3, count="users", seed=2, ridge=0.1, loss="squared")
    assert Deployment.of({"n-lams": 5, "holdout": 0.0}).fit == Settings(n_lams=5, holdout=0.0)
    assert Deployment.of({"lams": "auto", "held-out": 0.2}).settings.n_lams == 10  # a path needs no lam
    assert for_nodes({})["held-out"] == 0.2  # its name in messages
    assert for_nodes({"lam": 0.05})["held-out"] == 0.0
    with pytest.raises(ct.InvalidInput, match="a number, or auto, got 'much'"):
        Deployment.of({"lam": "much"})


def test_unknown_settings_are_refused():
    with pytest.raises(ct.InvalidInput, match="unknown setting 'colour'"):
        Deployment.of({"colour": "red"})


def test_a_table_is_read_again_when_it_has_changed(tmp_path, monkeypatch):
    file, read = tmp_path / "t.csv", []
    monkeypatch.setattr(sources, "read_table",
                        lambda *words, **more: read.append(words) or read_table(*words, **more))
    config = {"data": "csv", "path": str(file), "user": "who"}
    read_once = sources.TableReader()
    for text, times in (("who,x\na,1\n", 1), ("who,x\na,1\nb,20\n", 2)):
        file.write_text(text)
        names = [sources.load(config, read_once).names for _ in range(3)]
        assert names == [("a", "b")[:times]] * 3
        assert len(read) == times
    file.unlink()
    with pytest.raises(ct.InvalidInput):
        sources.load(config, read_once)
