"""The owner's configuration is the authority: what a server may make of a node's data, and what it may not."""

from __future__ import annotations

import json
import logging
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import coterie as ct
from coterie.base.errors import InvalidInput
from coterie.data.columns import Column
from coterie.data.encoding import Recipe
from coterie.data.files import read_table
from coterie.federated import node as nodes
from coterie.federated.agreement import Agreement
from coterie.federated.contract import Contract
from coterie.federated.node import Node
from coterie.federated.private.ledger import NodeLedger
from coterie.federated.private.policy import mu_of
from coterie.federated.protocol.messages import Query, decode, square
from coterie.federated.sources import load
from coterie.fitting.units import Units, make_loss

WARDS = ("east", "north", "south", "west")


def number(name):
    return Column(name=name, kind="number")


def levels(name, *texts, **more):
    return Column(name=name, kind="category", levels=texts, **more)


def agreed(*columns, user="ward", target="y", task="regression", classes=(), names=WARDS, **more) -> Agreement:
    """What a server says that all nodes agreed on."""
    recipe = Recipe(user=user, target=target, task=task, classes=classes, class_kind="str", columns=columns, notes=())
    dim = len(recipe.feature_names)
    units = Units(task=task, loss=make_loss("regression", "squared", 1e-3, 0), n_classes=0, mean=np.zeros(dim),
                  scale=np.ones(dim), centre=0.0, spread=1.0, feature_names=recipe.feature_names)
    return Agreement(names=names, features=recipe.feature_names, run="r", recipe=recipe,
                     units=units if task == "regression" else None, **more)


def ask(own: dict[str, Any], agreement: Agreement, kind: str = "moments", fields: dict[str, Any] | None = None,
        names: tuple[Any, ...] = WARDS) -> tuple[dict[Any, Any], set[str]]:
    """Answers by user, and the reasons of refusals."""
    said = {"seed": 0, "held-out": 0.0, "agreement": agreement.to_json(), "run": "r"}
    query = Query(kind, 0, {name: np.asarray(value) for name, value in (fields or {}).items()}).encode()
    replies = Node(said, own).answer({json.dumps(name): query for name in names})
    return ({json.loads(key): decode(value).arrays for key, value in replies.replies.items()},
            set(replies.refusals.values()))


@pytest.fixture
def frame() -> pl.DataFrame:
    rng, n = np.random.default_rng(0), 400
    return pl.DataFrame({
        "id": [f"p{k}" for k in range(n)], "ward": np.repeat(WARDS, 100), "age": rng.integers(20, 90, n),
        "income": rng.integers(10_000, 90_000, n), "sex": rng.choice(["f", "m", "x"], n, p=[0.5, 0.495, 0.005]),
        "code": rng.integers(0, 3, n), "y": rng.normal(0, 1, n).round(3)})


@pytest.fixture
def own(frame, tmp_path) -> dict[str, Any]:
    frame.write_csv(tmp_path / "t.csv")
    return {"data": "csv", "path": str(tmp_path / "t.csv"), "user": "ward", "target": "y", "drop": "id, income",
            "ledger-dir": str(tmp_path / "ledger")}


# -- the configuration


@pytest.mark.parametrize(("own", "complaint"), [
    ({"budget-epsilom": 4.0}, "'budget-epsilom', which is no setting. Did you mean 'budget-epsilon'?"),
    ({"max-question": 3}, "Did you mean 'max-questions'?"),
    ({"folder": "/data"}, "A setting of your own data function is called args.folder"),
    ({"max-questions": 3.5}, "Give an integer"), ({"max-questions": True}, "Give an integer"),
    ({"split": "yes"}, "Give true or false"), ({"user": 3}, "Give a text"), ({"holdout": 1.5}, "holdout must be"),
    ({"columns": "age", "features": "age"}, "say the same twice"), ({"columns": "age=integer"}, "cannot be read"),
    ({"columns": "age, age"}, "cannot be read"), ({"columns": "sex=f|"}, "cannot be read"),
    ({"max-seconds": 0}, "positive number"), ({"min-count": -1}, "must not be negative"),
    ({"simulation": True, "data": "csv"}, "the server names the data"), ({"task": "theft"}, "no task 'theft'"),
    ({"budget-epsilon": 4.0}, "both an epsilon and a delta"), ({"budget-unit": "person"}, "must be row or user"),
    ({"budget-epsilon": 4.0, "budget-delta": 1e-5}, "a copy of the file would have a budget of its own"),
])
def test_what_no_owner_can_mean_is_refused(own, complaint):
    with pytest.raises(InvalidInput) as error:
        Contract.of(own)
    assert complaint in str(error.value)
    said = Node({}, {"data": "csv", **own}).introduce()
    assert complaint in said["error"]


def test_what_an_owner_can_mean_is_read():
    made = Contract.of({"data": "my_data:load", "args.folder": "/srv", "columns": "age=number, sex=f|m, note",
                        "budget-epsilon": 4, "budget-delta": 1e-5, "ledger-dir": "l", "held-out": 0.3})
    assert made.config["folder"] == "/srv"
    assert made.kinds_of_columns == {"age": "number", "sex": ("f", "m"), "note": ""}
    assert made.private
    assert made.holdout == 0.3
    assert Contract.of({}).least_rows == 3
    assert Contract.of({"consent": "hessians"}).least_rows == 1
    assert Contract.of({"consent": "hessians", "min-count": 7}).least_rows == 7


def test_a_node_without_data_of_its_owner_answers_nothing(own, tmp_path):
    """Otherwise a server names a file of the node."""
    said = {key: own[key] for key in ("data", "path", "user", "target")}
    assert "has set no data" in Node(said, {}).introduce()["error"]
    assert "has set no data" in Node({**said, "agreement": agreed(number("age")).to_json()}, {}).answer(
        {'"east"': Query("describe", 0, {}).encode()}).refusals['"east"']
    assert "introduction" in Node(said, {"simulation": True}).introduce()
    assert "introduction" in Node(said, {}, simulated=True).introduce()


# -- recipes


def test_a_recipe_that_is_the_owners_is_answered(own):
    got, why = ask(own, agreed(number("age"), levels("sex", "f", "m")))
    assert set(got) == set(WARDS)
    assert not why


@pytest.mark.parametrize(("changes", "complaint"), [
    ((number("income"),), "uses the column 'income', which the owner of the node does not allow"),
    ((number("age"), number("age")), "allows once"),
    ((number("y"),), "the column 'y'"), ((number("ward"),), "the column 'ward'"),
    ((levels("sex", *(f"p{k}" for k in range(50))),), "names 50 levels of the column 'sex', and at most 20"),
    ((levels("sex", "f"),), "leaves out the level 'm' of the column 'sex'"),
])
def test_columns_that_the_owner_leaves_out_and_levels_of_a_servers_choice(own, changes, complaint):
    got, why = ask(own, agreed(*changes))
    assert not got
    assert any(complaint in reason for reason in why)


@pytest.mark.parametrize(("said", "complaint"), [
    ({"user": None, "names": tuple(range(4))}, "takes none as the column of users, and the owner of the node has set"),
    ({"user": "code"}, "takes 'code' as the column of users"), ({"target": "age"}, "column of the target"),
    ({"target": None}, "takes none as the column of the target"),
    ({"task": "counts"}, "recipe is for counts, and the owner of the node has set task = 'regression'")])
def test_users_and_target_are_the_owners(own, said, complaint):
    for names in (WARDS, tuple(range(4))):
        got, why = ask({**own, "task": "regression"}, agreed(number("code"), **said), "describe", names=names)
        assert not got
        assert all(complaint in reason for reason in why)


def test_nothing_is_read_for_a_recipe_that_is_refused(own):
    """The file is gone, and the refusal is the same."""
    bad = {**own, "path": "/no/such/file.csv"}
    assert ask(bad, agreed(number("income"))) == ask(own, agreed(number("income")))
    assert "own log says why" in ask(bad, agreed(number("age")))[1].pop()  # the twin


def test_columns_with_types(own):
    typed = {**{key: value for key, value in own.items() if key != "drop"}, "columns": "age=number, sex=f|m|x"}
    assert ask(typed, agreed(number("age")))[0]
    for column, complaint in ((number("sex"), "takes the column 'sex' as a number, and the owner"),
                              (levels("age", "30"), "takes the column 'age' as a category"),
                              (levels("sex", "f", "m", "q"), "names the level 'q' of the column 'sex'"),
                              (number("code"), "does not allow")):
        got, why = ask(typed, agreed(column))
        assert not got
        assert any(complaint in reason for reason in why)


def test_rare_levels_and_those_of_others_are_not_told_apart(own, frame):
    """A level with one or two rows at a node is a row; whether there is one is not said either."""
    assert 0 < (frame["sex"] == "x").sum() < 3
    names = ("sex=f", "sex=m", "sex=x", "sex=none")
    got, _ = ask(own, agreed(levels("sex", "f", "m", "x", "none")))
    assert agreed(levels("sex", "f", "m", "x", "none")).features == names
    means = np.array([reply["means"][0][:4] for reply in got.values()])
    assert (means[:, :2] > 0).all()
    assert not means[:, 2:].any()
    told, _ = ask({**own, "min-count": 1, "ledger-dir": own["ledger-dir"] + "2"}, agreed(levels("sex", "f", "m", "x")))
    assert any(reply["means"][0][2] > 0 for reply in told.values())  # the twin
    summary = json.loads(Node({}, own).introduce()["introduction"])["summary"]
    known = {column["name"]: set(column["levels"]["counts"]) for column in summary["columns"]}
    assert known["sex"] == {"f", "m"}


# -- what may be learned of few rows by what a server chooses


def sums(own, *columns) -> tuple[np.ndarray, np.ndarray]:
    """Sums, and sums of products, over the rows of the first ward; the target last."""
    reply = ask(own, agreed(*columns))[0]["east"]
    count, means = float(reply["count"][0]), np.asarray(reply["means"])[0]
    return count * np.append(means, 1.0), square(np.asarray(reply["scatter"])[:1], len(means))[0] + count * np.outer(
        means, means)


@pytest.mark.parametrize("least", [3, 1])
def test_rows_of_few_are_no_group_by_complement_fill_or_indicator(own, frame, tmp_path, least):
    """Whoever knows the sums over all rows and over those with known levels knows those of the others."""
    row = pl.int_range(len(frame))
    frame = frame.with_columns(
        sex=pl.when(row == 7).then(pl.lit("x")).otherwise(pl.col("sex").replace("x", "f")),
        code=pl.when(row == 9).then(None).otherwise(pl.col("code")))
    frame.write_csv(tmp_path / "u.csv")
    node = {**own, "path": str(tmp_path / "u.csv"), "min-count": least}
    named = ("f", "m") if least > 1 else ("f", "m", "x")  # all that the node introduces
    total, products = sums(node, levels("sex", *named), number("age"))
    others = total[-1] - total[:2].sum(), products[:len(named), len(named)][:2].sum() - total[-3]
    low, high = (sums(node, Column(name="code", kind="number", fill=fill), number("age")) for fill in (0.0, 1e6))
    without = (high[0][0] - low[0][0]) / 1e6, (high[1][0, 1] - low[1][0, 1]) / 1e6
    marked, _ = sums(node, Column(name="code", kind="number", missing=True), number("age"))
    if least > 1:
        assert np.allclose((*others, *without, marked[1]), 0.0, atol=1e-6)
    else:  # the twin: exactly these rows
        assert np.allclose(others, (1.0, -frame["age"][7]))
        assert np.allclose((*without, marked[1]), (1.0, frame["age"][9], 1.0))


def test_which_rows_are_held_out_does_not_depend_on_what_the_server_says(own, frame, tmp_path):
    """Orders of the classes would give as many splits as equations."""
    frame.with_columns(y=pl.col("code")).write_csv(tmp_path / "u.csv")
    node = {**own, "path": str(tmp_path / "u.csv"), "drop": "id, income, code"}

    def held_out(key, task, classes, spelled=()):
        agreement = agreed(number("age"), task=task, classes=spelled or classes)
        agreement = replace(agreement, task=task, units=Units(
            task=task, loss=make_loss(task, "auto", 1e-3, len(classes)), n_classes=len(classes), mean=np.zeros(1),
            scale=np.ones(1), centre=0.0, spread=1.0, feature_names=("age",)))
        guard = Contract.of({**node, "split-key": key})
        users = agreement.given(guard_source(node))
        data = agreement.data_of(users, 0.2, 7, 3, own=guard.splits)
        return [sorted(part) for part in np.split(data.held_out.features[:, 0], data.held_out.offsets[1:-1])]

    asked = [("classification", ("0", "1", "2")), ("classification", ("2", "0", "1")), ("regression", ())]
    first, *others = (held_out("", *one) for one in asked)
    assert all(first == other for other in others)
    assert held_out("", "classification", ("0", "1", "2"), ("00", "2.0", "1e0")) == first
    public = [held_out("public", *one) for one in asked]
    assert public[0] != public[1]  # the twin: there a server chooses


def guard_source(own):
    return load(Contract.of(own).config)


# -- with a budget: what leaves depends on rows through a release alone


@pytest.fixture
def budget(own) -> dict[str, Any]:
    return {**own, "budget-epsilon": 1.0, "budget-delta": 1e-5}


def question(mu=1e-9, columns=2, per_user=0) -> dict[str, Any]:
    return {"stage": 1, "mu": mu, "settings": [per_user], "centre": np.zeros(columns), "scale": np.ones(columns)}


ODD = {"a text": ("age", "secret"), "another class": ("y", "unheard of"), "a huge number": ("age", "1e200"),
       "no number": ("age", ""), "no class": ("y", ""), "a level": ("sex", "q"), "a date": ("age", "2020-01-01")}


@pytest.mark.parametrize("what", ODD)
@pytest.mark.parametrize("task", ["regression", "classification"])
def test_every_cell_gives_the_same_outcome(budget, frame, tmp_path, what, task):
    """The node says the same words, and releases as many numbers."""
    name, text = ODD[what]
    classes = ("0", "1") if task == "classification" else ()
    agreement = agreed(number("age"), levels("sex", "m", reference="f"), task=task, classes=classes)
    table = frame.with_columns(pl.col("age", "y").cast(pl.String))
    for k, changed in enumerate((table, table.with_columns(**{name: pl.when(pl.int_range(len(table)) == 7).then(
            pl.lit(text)).otherwise(pl.col(name))}), table.with_columns(**{name: pl.lit(text)}))):
        changed.write_csv(tmp_path / f"{k}.csv")
        node = {**budget, "path": str(tmp_path / f"{k}.csv"), "ledger-dir": str(tmp_path / f"ledger {k}")}
        said = [Node({"task": said}, node).introduce() for said in ("auto", "counts", "regression")]
        assert said == [said[0]] * 3
        assert json.loads(said[0]["introduction"])["names"] == list(WARDS)
        got, why = ask(node, agreement, "release", question(columns=3))
        assert not why
        assert {name: reply["released"].shape for name, reply in got.items()} == dict.fromkeys(WARDS, (7,))


def test_one_row_is_encoded_as_the_others_allow(frame):
    """One more cell that cannot be read changes nothing in the other rows."""
    recipe = agreed(number("age"), levels("sex", "f", "m")).recipe
    texts = frame.with_columns(pl.col("age").cast(pl.String))
    odd = texts.with_columns(age=pl.when(pl.int_range(len(texts)) == 7).then(pl.lit("odd")).otherwise(pl.col("age")))
    one, two = (recipe.encode(table, lenient=True) for table in (texts, odd))
    different = np.flatnonzero((one.features != two.features).any(axis=1))
    assert len(different) == 1
    with pytest.raises(InvalidInput, match="must hold numbers"):  # the twin
        recipe.encode(odd)


#: Cells that would change what others become, if a column were read as a whole.
CONTAGIOUS = {"decimal comma": ("age;sex", "1.234;f", "1,5;f"), "a code": ("age,sex", "10,f", "007,f"),
              "not UTF-8": ("age,sex", "10,\u00e9", b"10,\xff"), "a number as text": ("age,sex", "1,1.0", "1,x"),
              "a list": ("age,sex", "10,f", '"[1, 2]",f'), "another mark": ("age;sex", "10;f", "10;a,b,c,d,e"),
              "a control": ("age,sex", "10,f", "10,f\x01")}


@pytest.mark.parametrize("what", CONTAGIOUS)
@pytest.mark.parametrize("by_cell", [True, False])
def test_with_a_budget_a_cell_is_read_whatever_the_others_are(tmp_path, what, by_cell):
    """One row more changes the rows of no other: otherwise it changes a release by more than one row's part."""
    header, cell, odd = CONTAGIOUS[what]
    separator = header[3]
    line, odd = (f"a{separator}{part}{separator}1\n".encode() if isinstance(part, str)
                 else f"a{separator}".encode() + part + f"{separator}1\n".encode() for part in (cell, odd))
    recipe, seen = agreed(number("age"), levels("sex", "1", "f", "\u00e9"), user="who").recipe, []
    for lines in (line * 3, line * 3 + odd):
        (tmp_path / "t.csv").write_bytes(f"who{separator}{header}{separator}y\n".encode() + lines)
        try:
            with warnings.catch_warnings(action="ignore", category=ct.CoterieWarning):
                users = recipe.encode(read_table(tmp_path / "t.csv", by_cell=by_cell), lenient=True)
            seen.append(users.features[:3].tolist())
        except InvalidInput as error:
            seen.append(str(error))
    whole = {"decimal comma", "not UTF-8", "a control"}  # the twin: what these change in the other rows
    assert (seen[0] == seen[1]) == (by_cell or what not in whole)


def test_files_whose_cells_are_read_together_are_refused_with_a_budget(budget, tmp_path):
    (tmp_path / "t.jsonl").write_text('{"ward": "east", "age": 1, "y": 2}\n')
    node = {**budget, "path": str(tmp_path / "t.jsonl")}
    assert "own log says why" in ask(node, agreed(number("age")), "release", question())[1].pop()
    with pytest.raises(InvalidInput, match="one by one"):
        load(Contract.of(node).config)


def test_a_copy_in_another_format_has_the_same_budget(budget, frame, tmp_path):
    """Names that are numbers here and texts there, with zeros before them or decimals behind."""
    mu = mu_of(1.0, 1e-5) * 0.9999
    by_code = {**budget, "user": "code", "drop": "id"}
    assert ask(by_code, agreed(number("age"), user="code"), "release", question(mu), (0, 1, 2))[0]
    copies = {"texts": pl.col("code").cast(pl.String), "zeros": pl.lit("0") + pl.col("code").cast(pl.String),
              "decimals": pl.col("code").cast(pl.Float64), "renamed": pl.col("code")}
    for k, (name, code) in enumerate(copies.items()):
        table = frame.sample(fraction=1.0, shuffle=True, seed=k).with_columns(code=code)  # rows in another order
        table = table.rename({"code": "who"}) if name == "renamed" else table
        table.write_parquet(tmp_path / f"{name}.parquet")
        user = "who" if name == "renamed" else "code"
        copy = {**by_code, "data": "parquet", "path": str(tmp_path / f"{name}.parquet"), "user": user}
        got, why = ask(copy, agreed(number("age"), user=user), "release", question(mu) | {"scale": np.full(2, 2.0 + k)},
                       tuple(load(Contract.of(copy).config).names))
        assert not got
        assert all("budget of the user is spent" in reason for reason in why)


def test_words_of_a_refusal_hold_no_shapes_of_rows(budget):
    for centre in (np.zeros((2, 57)), np.zeros((57, 2)), np.array(0.0), np.zeros(0)):
        got, why = ask(budget, agreed(number("age")), "release", question() | {"centre": centre})
        assert not got
        assert not any("100" in reason for reason in why)  # rows of a ward


def test_the_time_of_answers_with_a_budget_is_a_multiple_of_a_step(budget, own, monkeypatch):
    waits, clock = list[float](), iter([10.0, 10.234, 20.0, 20.25])
    monkeypatch.setattr(nodes, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=waits.append))
    ask(budget, agreed(number("age")), "release", question())
    assert waits == [pytest.approx(0.066)]
    ask(own, agreed(number("age")))  # the twin: without a budget nothing is hidden
    assert len(waits) == 1


def test_why_a_table_cannot_be_read_stays_at_the_node(own, tmp_path, caplog):
    (tmp_path / "u.csv").write_text("ward,age,y\na,1,2\na,2,3\na,3,HIV positive\n")
    node = {**own, "path": str(tmp_path / "u.csv"), "drop": ""}
    with caplog.at_level(logging.ERROR):
        said = Node({"task": "regression"}, node).introduce()["error"]
    assert "HIV" not in said
    assert "own log says why" in said
    assert "HIV positive" in caplog.text
    missing = Node({}, {**node, "path": "/srv/secret/visits.csv"}).introduce()["error"]
    assert "secret" not in missing


def test_the_unit_is_the_owners(budget):
    agreement = agreed(number("age"))
    assert ask(budget, agreement, "release", question())[0]
    got, why = ask(budget, agreement, "release", question(per_user=1))
    assert not got
    assert all("protects a row (budget-unit)" in reason for reason in why)
    users = {**budget, "budget-unit": "user"}
    assert ask(users, agreement, "release", question(per_user=1))[0]
    assert not ask(users, agreement, "release", question(per_user=0))[0]


def test_one_budget_for_the_rows_whatever_tells_users_apart(budget, tmp_path):
    """The owner names another column of users later, or gives a copy of the file to another node."""
    mu = mu_of(1.0, 1e-5) * 0.9999
    assert ask(budget, agreed(number("age")), "release", question(mu))[0]
    by_code = agreed(number("age"), user="code", names=(0, 1, 2))
    got, why = ask({**budget, "user": "code"}, by_code, "release", question(mu), (0, 1, 2))
    assert not got
    assert all("budget of the user is spent: with this release epsilon would be" in reason for reason in why)
    copy = tmp_path / "copy.csv"
    copy.write_bytes((tmp_path / "t.csv").read_bytes())
    other = question(mu) | {"scale": np.full(2, 2.0)}
    assert not ask({**budget, "path": str(copy)}, agreed(number("age")), "release", other)[0]
    fresh = {**budget, "user": "code", "ledger-dir": str(tmp_path / "fresh")}
    assert ask(fresh, by_code, "release", question(mu), (0, 1, 2))[0]  # the twin


@pytest.mark.slow
def test_releases_are_limited_in_number(budget):
    agreement = agreed(number("age"))
    made = [bool(ask(budget, agreement, "release", question(1e-9 * (1 + k)), ("east",))[0]) for k in range(103)]
    assert made == [True] * 100 + [False] * 3
    assert "has made 100 releases" in ask(budget, agreement, "release", question(1e-8 / 3), ("east",))[1].pop()
    assert "cannot be released" in ask(budget, agreement, "release", question(1e-13), ("west",))[1].pop()


def test_users_without_rows_that_count_are_still_there(budget, frame, tmp_path):
    """Whether a user has a row with a target is a fact of its rows."""
    frame.with_columns(y=pl.when(pl.col("ward") == "west").then(None).otherwise(pl.col("y"))).write_csv(
        tmp_path / "u.csv")
    node = {**budget, "path": str(tmp_path / "u.csv")}
    assert "west" in json.loads(Node({}, node).introduce()["introduction"])["names"]
    got, why = ask(node, agreed(number("age")), "release", question())
    assert set(got) == set(WARDS)
    assert not why
    home = {"centre": np.zeros(2), "covariance": np.array([[1.0, 0.0, 1.0]]), "noise": 1.0}
    kept = {**node, "models-dir": str(tmp_path / "models")}
    assert set(ask(kept, agreed(number("age")), "home", home)[0]) == set(WARDS)


def test_kinds_beyond_a_budget_stay_refused(budget):
    for agreement in (agreed(number("age")), replace(agreed(number("age")), units=None)):
        for kind in ("describe", "moments", "facts"):
            got, why = ask({**budget, "allow": kind}, agreement, kind)
            assert not got
            assert all("does not allow questions of the kind" in reason for reason in why)


def test_the_log_knows_of_exact_answers(own, budget):
    Node({}, own).introduce()
    ask(own, agreed(number("age")))
    ask(budget, agreed(number("age")), "release", question())
    with NodeLedger(own["ledger-dir"]) as ledger:
        assert ledger.exact_answers() == {None: 1} | dict.fromkeys(WARDS, 1)
        assert set(ledger.spending(1e-5)) == set(WARDS)


def test_the_log_of_releases_alone_has_no_exact_answers(budget):
    Node({}, budget).introduce()
    ask(budget, agreed(number("age")), "release", question())
    with NodeLedger(budget["ledger-dir"]) as ledger:
        assert ledger.exact_answers() == {}


# -- any recipe

names_of_columns = st.sampled_from(["age", "sex", "code", "income", "id", "y", "ward", "nobody"])
column = st.builds(
    Column, name=names_of_columns, kind=st.sampled_from(["number", "category", "flag", "date", "duration"]),
    fill=st.sampled_from([0.0, -1.5, 1e300]), levels=st.lists(st.sampled_from(["f", "m", "x", "1", "30", "p7", ""]),
                                                               max_size=3, unique=True).map(tuple),
    reference=st.sampled_from([None, "f", "0"]), pooled=st.booleans(), missing=st.booleans(),
    origin=st.sampled_from([0, 10**15]))


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(columns=st.lists(column, min_size=1, max_size=3),
       task=st.sampled_from(["regression", "classification", "counts"]),
       classes=st.sampled_from([(), ("0", "1"), ("a", "b", "c")]), target=st.sampled_from(["y", "sex", None]))
def test_no_recipe_tells_tables_apart(budget, frame, tmp_path, columns, task, classes, target):
    """Of a node with a budget: the same outcome and the same words, whatever its rows say."""
    try:
        agreement = agreed(*columns, task=task, classes=classes, target=target)
    except InvalidInput:  # a server has its own errors
        return
    agreement = replace(agreement, units=None)
    q, outcomes = len(agreement.features) + 1, []
    odd = frame.with_columns(age=pl.lit("odd"), y=pl.lit(None, pl.String), sex=pl.lit("?"), code=pl.lit("1e400"))
    for k, one in enumerate((frame, odd)):
        one.write_csv(tmp_path / f"{k}.csv")
        node = {**budget, "path": str(tmp_path / f"{k}.csv"), "ledger-dir": str(tmp_path / f"{k}")}
        got, why = ask(node, agreement, "release", question(1e-9, q), ("east", "west"))
        outcomes.append(({name: reply["released"].shape for name, reply in got.items()}, why))
    assert outcomes[0] == outcomes[1]


def test_without_a_budget_tables_are_told_apart(own, frame, tmp_path):
    """The twin: there the outcome is a fact of the rows."""
    assert ask(own, agreed(number("age")), "describe")[0]
    frame.with_columns(age=pl.lit("odd")).write_csv(tmp_path / "odd.csv")
    got, why = ask({**own, "path": str(tmp_path / "odd.csv")}, agreed(number("age")), "describe")
    assert not got
    assert "own log says why" in why.pop()
