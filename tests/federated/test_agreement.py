"""A federation agrees on the recipe first: a table spread over nodes means what it means in one file."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from inspect import signature

import numpy as np
import pytest

import coterie as ct
from coterie.data.encoding import Recipe, read_table
from coterie.federated import FederationSettings, entry, sources
from coterie.federated.agreement import Agreement, Introduction, agree
from coterie.federated.runtimes.in_process import LocalNodes
from coterie.federated.settings import CONFIG, RENAMED, Deployment, complete, key_of
from coterie.federated.sources import Table
from coterie.fitting.prepare import prepare

TARGETS = {"classes": lambda t, rng: "yes" if t + rng.normal() > 0 else "no", "bits": lambda t, rng: int(t > 0),
           "numbers": lambda t, rng: f"{t + rng.normal():.3f}", "counts": lambda t, rng: rng.poisson(np.exp(t / 2)),
           "three": lambda t, rng: ["low", "middle", "high"][int(np.clip(t + 1.5, 0, 2))]}


def write(path, kind="bits", n_users=6, rows=25, gaps=False):
    """A table of two kinds of users, with numbers, texts and dates."""
    rng = np.random.default_rng(3)
    lines = ["who,colour,since,age,dose,answer"]
    for user in range(n_users):
        for row in range(rows):
            age, colour = rng.normal(50, 9), rng.choice(["red", "green", "blue"])
            t = (1 if user % 2 else -1) * (age - 50) / 9 + (colour == "red")
            dose = "" if gaps and row % 11 == 5 else f"{rng.normal(2, 1) * 100:.2f}"
            lines.append(f"u{user},{colour},2024-0{1 + row % 9}-1{user % 9},{age:.3f},{dose},{TARGETS[kind](t, rng)}")
    path.write_text("\n".join(lines) + "\n")
    return path


def spread(path, parts=3, **more):
    """The table as that of several nodes."""
    complete_run = Table(frame=read_table(path), user="who", target="answer", **more)
    return [complete_run.take(complete_run.names[k::parts]) for k in range(parts)]


def served(tables, out, **changes):
    config = Deployment.of({"out": str(out), **{name.replace("_", "-"): value for name, value in changes.items()}})
    return entry.serve(LocalNodes(tables, config.holdout, config.settings.seed), config)


@pytest.mark.parametrize("kind", TARGETS)
def test_nodes_agree_on_what_one_file_means(tmp_path, kind):
    path = write(tmp_path / "t.csv", kind)
    nodes = LocalNodes(spread(path))
    agreement = agree(nodes, Deployment())
    one = prepare(path, user="who", target="answer")
    assert agreement.recipe.task == one.recipe.task
    assert agreement.recipe.classes == one.recipe.classes
    for column, same in zip(agreement.recipe.columns, one.recipe.columns, strict=True):
        assert replace(column, fill=0.0) == replace(same, fill=0.0)
        assert column.fill == pytest.approx(same.fill, rel=1e-12)
    assert repr(agreement.units.loss) == repr(one.units.loss)
    for name in ("mean", "scale", "centre", "spread"):
        assert np.array_equal(getattr(agreement.units, name), getattr(one.units, name)), name
    nodes.use(agreement)
    users = nodes.data.samples.users.data
    assert users.names == one.users.names
    assert users.feature_names == one.users.feature_names
    assert np.array_equal(users.features, one.users.features)
    assert np.array_equal(users.targets, one.users.targets)


def test_missing_cells_are_filled_with_the_mean_of_all_nodes(tmp_path):
    path = write(tmp_path / "t.csv", gaps=True)
    nodes = LocalNodes(spread(path))
    nodes.use(agree(nodes, Deployment()))
    one = prepare(path, user="who", target="answer")
    assert "dose missing" in one.recipe.feature_names
    np.testing.assert_allclose(nodes.data.samples.users.data.features, one.users.features, atol=1e-12)


@pytest.mark.parametrize("parts", [1, 3])
def test_the_federation_of_a_table_solves_the_problem_of_coterie_fit(tmp_path, parts):
    path = write(tmp_path / "t.csv")
    result = served(spread(path, parts), tmp_path / "out", lam=0.05)
    one = prepare(path, user="who", target="answer")
    in_process = ct.federate(one.users, one.units.loss, 0.05)
    assert isinstance(one.units.loss, ct.Logistic)
    assert result.models.tobytes() == in_process.models.tobytes()
    central = ct.solve(one.problem(0.05), tol=1e-10)
    assert result.objective == pytest.approx(central.objective, rel=1e-6)
    assert (result.labels == central.labels).all()
    raw = served(spread(path, parts), tmp_path / "raw", lam=0.05, standardize="false")
    assert not np.allclose(raw.models, in_process.models, atol=0.1)  # the twin: scaling matters


def test_the_run_folder_of_a_table_has_models_in_its_units(tmp_path):
    path = write(tmp_path / "t.csv", "three")
    result = served(spread(path), tmp_path / "out", lam=0.05)
    entry.write(result, tmp_path / "out", complete({}))
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    recipe = Recipe.from_json(run["recipe"])
    assert recipe.classes == ("high", "low", "middle")
    assert run["task"] == "classification"
    header = (tmp_path / "out" / "models.csv").read_text().splitlines()[0]
    assert "age [low]" in header


def conflict(tmp_path, change):
    path = write(tmp_path / "t.csv")
    tables = spread(path)
    (tmp_path / "other.csv").write_text(change(path.read_text()))
    other = Table(frame=read_table(tmp_path / "other.csv"), user="who", target="answer")
    return [tables[0], other.take(tables[1].names), tables[2]]


def test_a_column_of_two_kinds_is_refused_by_name(tmp_path):
    def words(text):
        return "\n".join([line if k == 0 else ",".join([*line.split(",")[:3], "about fifty", *line.split(",")[4:]])
                          for k, line in enumerate(text.splitlines())])

    with pytest.raises(ct.InvalidInput, match=r"holds numbers in node 0 and texts in node 1.*column 'age'.*--drop"):
        agree(LocalNodes(conflict(tmp_path, words)), Deployment())
    same = LocalNodes(conflict(tmp_path, lambda text: text))  # the twin: without the change they agree
    assert agree(same, Deployment()).recipe.task == "classification"


def test_a_column_that_a_node_does_not_have_is_refused_by_name(tmp_path):
    with pytest.raises(ct.InvalidInput, match="'dose' is missing in node 1 and there in node 0"):
        agree(LocalNodes(conflict(tmp_path, lambda text: text.replace("dose", "amount"))), Deployment())


def test_users_without_a_target_take_no_part(tmp_path):
    path = write(tmp_path / "t.csv", "numbers")
    text = [line if not line.startswith("u2,") else line.rpartition(",")[0] + "," for line in
            path.read_text().splitlines()]
    path.write_text("\n".join(text) + "\n")
    agreement = agree(LocalNodes(spread(path)), Deployment())
    assert agreement.names == ("u0", "u1", "u3", "u4", "u5")


PREPARED = ct.Users.from_arrays(np.random.default_rng(0).standard_normal((12, 2)), np.arange(12) % 2,
                                np.arange(12) // 3)


def test_prepared_numbers_are_never_guessed_to_be_a_regression(tmp_path):
    """Targets 0 and 1 are classes, or numbers: who has prepared them must say."""
    with pytest.raises(ct.InvalidInput, match=r"may be classes, counts or measurements.*Name the loss"):
        agree(LocalNodes([PREPARED]), Deployment())
    assert agree(LocalNodes([PREPARED]), Deployment(loss="squared")).loss == "squared"
    signs = replace(PREPARED, targets=2.0 * PREPARED.targets - 1.0)
    assert agree(LocalNodes([signs]), Deployment()).loss == "logistic"
    assert agree(LocalNodes([replace(PREPARED, targets=None)]), Deployment()).loss == "squared_distance"
    assert agree(LocalNodes([PREPARED]), Deployment(loss="multinomial")).make_loss().n_classes == 2


def test_tables_and_prepared_numbers_do_not_mix(tmp_path):
    tables = spread(write(tmp_path / "t.csv"))
    with pytest.raises(ct.Incompatible, match="node 0 has a table, and node 1 prepared numbers"):
        agree(LocalNodes([tables[0], PREPARED]), Deployment())
    with pytest.raises(ct.InvalidInput, match="loss-options are for prepared numbers"):
        agree(LocalNodes(tables), Deployment(loss_options='{"ridge": 1}'))
    with pytest.raises(ct.Incompatible, match="0 of 1 users"):
        agree(LocalNodes([]), Deployment())
    agreement = agree(LocalNodes(tables), Deployment())
    with pytest.raises(ct.InvalidInput, match="prepared numbers, and the federation agreed on a table"):
        agreement.data(PREPARED, 0.0, 0)


def test_what_crosses_comes_back_equal(tmp_path):
    tables = spread(write(tmp_path / "t.csv", "three"))
    for node in (*tables, PREPARED):
        said = Introduction.of(node)
        assert Introduction.from_json(said.to_json()) == said
    with pytest.raises(ct.InvalidInput, match="no introduction"):
        Introduction.from_json('{"names": 3}')
    agreement = agree(LocalNodes(tables), Deployment())
    back = Agreement.from_json(agreement.to_json())
    assert back.recipe == agreement.recipe
    assert back.to_json() == agreement.to_json()
    assert np.array_equal(back.units.scale, agreement.units.scale)


def test_no_row_of_a_table_is_in_an_introduction(tmp_path):
    table = spread(write(tmp_path / "t.csv"))[0]
    text = Introduction.of(table).to_json()
    ages, numbers = set(table.frame["age"].to_list()), set(map(float, re.findall(r"-?\d+\.\d+", text)))
    assert ages & numbers == {min(ages), max(ages)}
    rare = replace(table, min_count=10**6)
    assert '"red"' in text
    assert '"red"' not in Introduction.of(rare).to_json()


# -- one vocabulary


def test_python_command_and_run_configuration_say_the_same():
    from coterie.cli.federate import run

    choices = {field.name for field in fields(FederationSettings)}
    keywords = set(signature(ct.federate).parameters) - {"users", "loss", "graph", "holdout", "held_out", "faults",
                                                             "settings", "progress", "privacy"}
    assert keywords <= choices
    assert {key_of(name) for name in choices - {"start", "score"}} <= CONFIG.keys()  # models and states are no texts
    options = {key_of(name) for name in signature(run).parameters}
    assert options - CONFIG.keys() == {"context", "table", "runtime", "local-cluster", "timeout", "overwrite",
                                       "threads", "quiet", "held-out"}
    defaults = FederationSettings()
    given = Deployment.of({}).settings
    for name in choices - {"checkpoint", "participation", "algorithm"}:
        assert getattr(given, name) == getattr(defaults, name), name


@pytest.mark.parametrize(("config", "complaint"), [
    ({"rounds": 3}, "'rounds' is called 'max-rounds'"), ({"users": 3}, "'users' is called 'n-users'"),
    ({"max_rounds": 3}, "unknown setting 'max_rounds'"), ({"task": "guessing"}, "unknown task"),
    ({"standardize": "perhaps"}, "auto, true or false"), ({"held-out": 1.0}, "holdout must be a share"),
    ({"lams": "auto"}, "rows held out"), ({"n-lams": 0, "lam": 0.02}, "n_lams must be at least 1"),
    ({"every": 0}, "at least 1"),
])
def test_configurations_that_cannot_be_used(config, complaint):
    with pytest.raises(ct.InvalidInput, match=complaint):
        Deployment.of(config)


def test_configurations_that_can():
    config = Deployment.of({"participation": 12, "standardize": True, "weights": "", "lams": "0.1 1", "held-out": 0.2})
    assert config.settings.participation.count == 12
    assert config.scaled(table=False)
    assert config.settings.weights == "unit"
    assert config.settings.lams == (1.0, 0.1)
    assert config.settings.score
    assert not RENAMED.keys() & CONFIG.keys()


def test_a_share_of_the_rows_can_be_held_out_in_python_too(tmp_path):
    users = ct.datasets.clustered("logistic", n_users=6, samples=20, seed=1).users
    parts = users.hold_out(0.3, seed=4)
    one = ct.federate(users, ct.Logistic(), 0.02, held_out=0.3, seed=4)
    two = ct.federate(parts.train, ct.Logistic(), 0.02, held_out=parts.test, seed=4)
    assert one.models.tobytes() == two.models.tobytes()
    assert np.array_equal(one.scores, two.scores)


def test_a_path_that_is_interrupted_keeps_what_is_finished(tmp_path):
    users = ct.datasets.clustered("logistic", n_users=6, samples=20, seed=1).users
    stop_at = []

    def stop(line):
        stop_at.append(line)
        if len(stop_at) == 9:
            raise KeyboardInterrupt

    settings = {"lams": [0.1, 0.05, 0.01], "held_out": 0.3, "checkpoint": tmp_path}
    with pytest.raises(ct.Interrupted) as caught:
        ct.federate_path(users, ct.Logistic(), progress=stop, **settings)
    done = caught.value.best
    assert 1 <= len(done) < 3
    again = ct.federate_path(users, ct.Logistic(), **settings)
    complete_run = ct.federate_path(users, ct.Logistic(), **{**settings, "checkpoint": None})
    assert again[0].models.tobytes() == done[0].models.tobytes()
    assert [run.models.tobytes() for run in again] == [run.models.tobytes() for run in complete_run]


def test_an_interrupt_inside_the_servers_solver_loses_no_round(tmp_path, monkeypatch):
    """Ctrl-C may come while the server solves: the round does not count, and nothing half-solved is kept."""
    from coterie.federated.algorithms import newton

    users = ct.datasets.clustered("logistic", n_users=6, samples=20, seed=1).users
    complete_run = ct.federate(users, ct.Logistic(), 0.02)
    calls, honest = [], newton.solve_quietly

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return honest(*args, **kwargs)

    monkeypatch.setattr(newton, "solve_quietly", interrupted)
    with pytest.raises(ct.Interrupted) as caught:
        ct.federate(users, ct.Logistic(), 0.02, checkpoint=tmp_path)
    assert caught.value.best.n_rounds == 2
    again = ct.federate(users, ct.Logistic(), 0.02, checkpoint=tmp_path)
    assert again.models.tobytes() == complete_run.models.tobytes()
    assert again.ledger.entries == complete_run.ledger.entries


def test_a_table_needs_its_columns(tmp_path):
    path = write(tmp_path / "t.csv")
    for config, complaint in (({"user": "wo"}, "no column 'wo'"), ({}, "no 'user'"),
                              ({"user": "who", "target": "anser"}, "no column 'anser'")):
        with pytest.raises(ct.InvalidInput, match=complaint):
            sources.load({"data": "csv", "path": str(path), **config})
