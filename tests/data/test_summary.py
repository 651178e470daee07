"""Recipes from summaries: what nodes say of their own tables gives the recipe that all rows in one table give."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import date, datetime, timedelta

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coterie.base.errors import InvalidInput
from coterie.data.encoding import Recipe, read_table
from coterie.data.merging import check_summary, merge
from coterie.data.summary import TableSummary, summarise

# A level that only rows without target have is not learned, and said where it is met.
pytestmark = pytest.mark.filterwarnings("ignore:Column .* has levels that are not known")
few = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def raises(*parts):
    return pytest.raises(InvalidInput, match="(?s)" + ".*".join(re.escape(part) for part in parts))


def nodes(frame, n, user="who"):
    """The frame's rows parted by users over n tables; a table may be empty."""
    names = frame[user].unique(maintain_order=True).to_list()
    return [frame.filter(pl.col(user).is_in(names[k::n])) for k in range(n)]


def sent(frame, **call):
    """A summary as it arrives: as JSON."""
    return TableSummary.from_json(json.loads(json.dumps(summarise(frame, **call).to_json())))


def check_same(one, other):
    """Equal recipes; means to rounding."""
    for mine, yours in zip(one.columns, other.columns, strict=True):
        assert mine.fill == pytest.approx(yours.fill, rel=1e-9, abs=1e-9)
    assert replace(one, columns=tuple(replace(c, fill=0.0) for c in one.columns)) == replace(
        other, columns=tuple(replace(c, fill=0.0) for c in other.columns))


def recipe_or_refusal(make):
    """A recipe, or the refusal's sentence before its numbers and examples."""
    try:
        return make()
    except InvalidInput as error:
        return re.split(r"[\d'(]", error.problem)[0].strip()


def check_split(frame, n, **call):
    tables = [table for table in nodes(frame, n) if len(table)]
    single = recipe_or_refusal(lambda: Recipe.learn(frame, **call))
    merged = recipe_or_refusal(lambda: Recipe.from_summary(merge([sent(table, **call) for table in tables])))
    if isinstance(single, str) or isinstance(merged, str):
        assert merged == single
        return False
    check_same(merged, single)
    for table in tables:  # every node with targets can apply it
        if "target" in call and table["y"].null_count() == len(table):
            continue
        assert merged.encode(table).n_samples == (table["y"].is_not_null().sum() if "target" in call else len(table))
    return True


def pick(rng, n, values):
    return [values[i] for i in rng.integers(0, len(values), n)]


#: Random columns of n rows.
COLUMNS = {
    "real": lambda rng, n: rng.normal(size=n).tolist(),
    "integer": lambda rng, n: rng.integers(-5, 60, n).tolist(),
    "code": lambda rng, n: rng.integers(0, 4, n).tolist(),
    "flag": lambda rng, n: pick(rng, n, [True, False]),
    "level": lambda rng, n: pick(rng, n, ["red", "blue", "dark green"]),
    "many levels": lambda rng, n: [f"c{int(i)}" for i in np.minimum(rng.geometric(0.2, n), 40)],
    "coded level": lambda rng, n: pick(rng, n, ["1", "2", "3", "4", "5+"]),
    "zeros": lambda rng, n: pick(rng, n, ["007", "7", "12"]),
    "number text": lambda rng, n: [f"{v:.2f}" for v in rng.normal(size=n)],
    "flag text": lambda rng, n: pick(rng, n, ["true", "FALSE"]),
    "flag or else": lambda rng, n: pick(rng, n, ["true", "false", "true", "perhaps"]),
    "date": lambda rng, n: [date(2020, 1, 1) + timedelta(days=int(d)) for d in rng.integers(0, 900, n)],
    "date text": lambda rng, n: [str(date(2020, 1, 1) + timedelta(days=int(d))) for d in rng.integers(0, 900, n)],
    "time": lambda rng, n: [datetime(2020, 1, 1) + timedelta(seconds=int(s)) for s in rng.integers(0, 10**8, n)],
    "duration": lambda rng, n: [timedelta(minutes=int(m)) for m in rng.integers(0, 10**4, n)],
    "free text": lambda rng, n: [f"note {i} {int(v)}" for i, v in enumerate(rng.integers(0, 9, n))],
    "constant": lambda rng, n: [3.5] * n,
    "constant text": lambda rng, n: ["same"] * n,
    "empty": lambda rng, n: [None] * n,
    "id": lambda rng, n: (rng.permutation(n * 3)[:n] + 17).tolist(),
    "row": lambda rng, n: pick(rng, n, [1, 2, 3, 4]),
    "step": lambda rng, n: list(range(1, n + 1)),
    "wide": lambda rng, n: (rng.normal(size=n) * 1e140).tolist(),
}
TARGETS = {
    "two classes": lambda rng, n: pick(rng, n, ["no", "yes"]),
    "truth": lambda rng, n: pick(rng, n, [True, False]),
    "codes": lambda rng, n: rng.integers(0, 4, n).tolist(),
    "signs": lambda rng, n: pick(rng, n, [-1.0, 1.0]),
    "coded text": lambda rng, n: pick(rng, n, ["1", "2", "3x"]),
    "counts": lambda rng, n: rng.poisson(3.0, n).tolist(),
    "ages": lambda rng, n: np.minimum(rng.integers(0, 90, n), 70).tolist(),
    "reals": lambda rng, n: rng.normal(size=n).round(3).tolist(),
    "number text": lambda rng, n: [f"{v:.3f}" for v in rng.normal(size=n)],
    "names": lambda rng, n: [f"n{i}" for i in range(n)],
}


@st.composite
def tables(draw, kinds=tuple(COLUMNS), targets=tuple(TARGETS)):
    n, n_users = draw(st.integers(12, 150)), draw(st.integers(2, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    frame = {"who": [f"u{i}" for i in rng.integers(0, n_users, n)], "x": rng.normal(size=n).tolist()}
    for j, kind in enumerate(draw(st.lists(st.sampled_from(kinds), max_size=4, unique=True))):
        gaps = rng.random(n) < draw(st.sampled_from([0.0, 0.0, 0.005, 0.1]))
        name = kind if kind in ("id", "row") else f"{j} {kind}"
        frame[name] = [None if gap else v for v, gap in zip(COLUMNS[kind](rng, n), gaps, strict=True)]
    target = draw(st.sampled_from(targets))
    gaps = rng.random(n) < draw(st.sampled_from([0.0, 0.1]))
    frame["y"] = [None if gap else v for v, gap in zip(TARGETS[target](rng, n), gaps, strict=True)]
    return pl.DataFrame(frame)


@few
@given(tables(), st.integers(1, 5))
def test_any_split_gives_the_recipe_of_the_one_table(frame, n):
    check_split(frame, n, user="who", target="y")


@few
@given(tables(), st.integers(2, 4), st.sampled_from(["classification", "regression", "counts"]))
def test_any_split_for_a_given_task(frame, n, task):
    try:
        check_split(frame, n, user="who", target="y", task=task)
    except InvalidInput:  # what a node refuses for itself, the one table refuses, too
        with pytest.raises(InvalidInput):
            Recipe.learn(frame, user="who", target="y", task=task)


@few
@given(tables(), st.integers(2, 4))
def test_any_split_for_clustering(frame, n):
    check_split(frame.drop("y"), n, user="who")


#: Columns whose types in a file depend on all of its rows.
WRITTEN = ("real", "integer", "code", "flag", "level", "coded level", "zeros", "flag or else", "date text", "empty",
           "constant", "step", "many levels")


@few
@given(tables(WRITTEN, ("two classes", "truth", "codes", "coded text", "counts", "reals")), st.integers(2, 4))
def test_any_split_into_files(tmp_path, frame, n):
    """Each node reads its own CSV file, in which a column of codes may be integers here and texts there."""
    frame.write_csv(tmp_path / "whole.csv")
    single = read_table(tmp_path / "whole.csv")
    summaries, parts = [], [part for part in nodes(frame, n) if len(part)]
    for k, part in enumerate(parts):
        part.write_csv(tmp_path / f"{k}.csv")
        summaries.append(sent(read_table(tmp_path / f"{k}.csv"), user="who", target="y"))
    one = recipe_or_refusal(lambda: Recipe.learn(single, user="who", target="y"))
    merged = recipe_or_refusal(lambda: Recipe.from_summary(merge(summaries)))
    if isinstance(one, str) or isinstance(merged, str):
        assert merged == one
        return
    check_same(merged, one)
    encoded = one.encode(single)
    for k, part in enumerate(parts):
        if part["y"].null_count() == len(part):
            continue
        theirs = merged.encode(read_table(tmp_path / f"{k}.csv"))
        rows = encoded.take([encoded.index(name) for name in theirs.names])
        np.testing.assert_allclose(theirs.features, rows.features, rtol=1e-9, atol=1e-9)
        np.testing.assert_array_equal(theirs.targets, rows.targets)


def test_the_check_can_fail():
    frame = pl.DataFrame({"who": ["a", "b"] * 10, "x": [float(i * i) for i in range(20)], "y": [0, 1] * 10})
    recipe = Recipe.learn(frame, user="who", target="y")
    with pytest.raises(AssertionError):
        check_same(recipe, Recipe.learn(frame.with_columns(x=pl.col("x") + 1), user="who", target="y"))
    with pytest.raises(AssertionError):
        check_same(recipe, Recipe.learn(frame, user="who", target="y", task="regression"))


# ---- what the facts are

def test_a_summary_holds_no_row():
    frame = pl.DataFrame({"who": ["ann", "bob"] * 30, "secret": [f"note {i}" for i in range(60)],
                          "level": ["red"] * 57 + ["rare"] * 3, "y": [i / 7 for i in range(60)]})
    summary = summarise(frame, user="who", target="y", min_count=5)
    text = json.dumps(summary.to_json())
    assert "ann" not in text
    assert "note" not in text
    assert "rare\"" not in text
    assert "red" in text
    assert repr(11 / 7) not in text  # a target is only counted where it has few values
    secret, level = summary.columns
    assert (secret.levels.counts, secret.levels.rare_levels, secret.levels.rare_rows) == ({}, 60, 60)
    assert (level.levels.counts, level.levels.rare_rows, level.levels.rare_levels) == ({"red": 57}, 3, 1)
    assert "note" in json.dumps(summarise(frame, user="who", target="y").to_json())


def test_rare_levels_are_one_column():
    frame = pl.DataFrame({"who": ["a", "b"] * 50, "c": (["red"] * 12 + ["blue"] * 12 + ["odd"]) * 4, "y": [0, 1] * 50})
    parts = nodes(frame, 2)
    common = merge([summarise(part, user="who", target="y", min_count=3) for part in parts])
    recipe = Recipe.from_summary(common)
    assert recipe.feature_names == ("c=blue", "c=red", "c=(other)")
    X, _ = recipe.matrix(frame)
    assert X[:, 2].sum() == 4
    assert Recipe.from_summary(merge([summarise(part, user="who", target="y") for part in parts], min_count=5)
                               ).feature_names == recipe.feature_names
    with raises("looks like names or free text", "column 'c'"):
        Recipe.from_summary(merge([summarise(part, user="who", target="y", min_count=99) for part in parts]))


def test_counting_rows_is_each_node_or_all_together():
    def column(*parts, name="step"):
        tables = [pl.DataFrame({"who": [f"u{k}"] * len(part), name: part, "x": [float(v * v % 7) for v in part]})
                  for k, part in enumerate(parts)]
        recipe = Recipe.from_summary(merge([summarise(table, user="who") for table in tables]))
        return name in recipe.feature_names

    assert not column(range(12), range(15))  # each from 0
    assert not column(range(1, 7), range(7, 13))  # together 1..12
    assert not column(range(0, 12, 2), range(1, 12, 2))
    assert column(range(6), range(6))  # twice 0..5, which may be a dose
    assert column(range(0, 12, 2), range(0, 12, 2))
    assert column([0, 5, 1, 2, 3, 4], range(6, 12))
    assert not column([40, 17, 3], [12, 99, 2], name="id")
    assert column([1, 2, 3], [1, 2, 3], name="id")  # the same three everywhere


def test_rows_are_counted_at_a_node_without_targets():
    """There, no facts are known of a column but its order; without it, 1, 2, 3, ... was once a feature."""
    rows = range(16)
    frame = pl.DataFrame({"who": list("abbc" * 4), "step": [k + 1 for k in rows], "x": [float(k * k % 7) for k in rows],
                          "y": [None if k % 4 == 0 else float(k % 5) for k in rows]})
    assert check_split(frame, 3, user="who", target="y") is not False
    assert "step" not in Recipe.from_summary(merge([summarise(table, user="who", target="y")
                                                    for table in nodes(frame, 3)])).feature_names
    backwards = frame.with_columns(step=pl.Series([17 - k if k % 4 == 1 else k for k in range(1, 17)]))
    assert "step" in Recipe.from_summary(merge([summarise(table, user="who", target="y")  # its twin
                                                for table in nodes(backwards, 3)])).feature_names


def test_counts_or_regression_by_the_median_of_all():
    low, high = [0] * 30 + [9] * 2, [5, 6, 7, 8, 11] * 4
    parts = [pl.DataFrame({"who": ["a"] * 32, "x": np.arange(32.0) ** 2, "y": low}),
             pl.DataFrame({"who": ["b"] * 20, "x": np.arange(20.0) ** 2, "y": high})]
    merged = merge([summarise(part, user="who", target="y") for part in parts])
    assert merged.answers.numbers.median == np.median(low + high)
    assert merged.answers.numbers.mean == np.mean(low + high)
    check_same(Recipe.from_summary(merged), Recipe.learn(pl.concat(parts), user="who", target="y"))
    wide = [part.with_columns(y=pl.int_range(pl.len()) ** 2 * 7) for part in (pl.concat([parts[0]] * 60), parts[1])]
    beyond = merge([summarise(part, user="who", target="y") for part in wide])  # too many values to be counted
    assert Recipe.from_summary(beyond).task == Recipe.learn(pl.concat(wide), user="who", target="y").task == "counts"


# ---- kinds

@pytest.mark.parametrize(("one", "other", "kind"), [
    ([1, 2], [1.5, 2.5], "number"), ([True, False], [3, 4], "number"), ([True, False], [0.5, 2.0], "number"),
    ([None, None], [1, 2], "number"), ([None, None], ["a", "b"], "category"), (["1", "2.5"], [3, 4], "number"),
    ([1, 2], ["a", "1"], "category"), ([True, False], ["true", "no"], "category"), (["007", "008"], [7, 8], "number"),
    (["2020-01-01", "2020-01-02"], [date(2020, 3, 1), date(2020, 3, 2)], "date"),
    (["2020-01-01", "2020-01-02"], ["never", "2020-01-01"], "category"),
])
def test_kinds_that_go_together(one, other, kind):
    parts = [pl.DataFrame({"who": ["a", "b"] * 4, "x": values * 4, "y": [0, 1] * 4}) for values in (one, other)]
    for pair in (parts, parts[::-1]):
        recipe = Recipe.from_summary(merge([summarise(part, user="who", target="y") for part in pair]))
        assert recipe.columns[0].kind == kind
        for part in pair:
            assert np.isfinite(recipe.encode(part).features).all()
            columns = recipe.encode(part).features
            if kind == "category" and recipe.columns[0].reference is None:
                assert (columns.sum(axis=1) == 1).all()
            elif kind == "category":  # one column of 0 and 1; missing values have the mean and are marked
                assert (np.isin(columns[:, 0], (0, 1)) ^ (columns[:, 1] == 1)).all()


@pytest.mark.parametrize(("one", "other", "parts"), [
    ([0.5, 1.5], ["free", "text"], ["numbers in table 0 and texts in table 1"]),
    (list(range(30)), ["free", "text"], ["numbers in table 0 and texts in table 1"]),
    ([date(2020, 1, 1), date(2020, 1, 2)], [1, 2], ["dates in table 0 and numbers in table 1"]),
    ([date(2020, 1, 1), date(2020, 1, 2)], ["a", "b"], ["dates in table 0 and texts in table 1"]),
    ([timedelta(1), timedelta(2)], [date(2020, 1, 1), date(2020, 1, 2)], ["durations in table 0 and dates in table 1"]),
    ([True, False], [date(2020, 1, 1), date(2020, 1, 2)], ["truth values in table 0 and dates"]),
])
def test_kinds_that_conflict(one, other, parts):
    made = [pl.DataFrame({"who": ["a"] * len(values) * 4, "x": values * 4}) for values in (one, other)]
    with raises(*parts, "column 'x'", "--drop 'x'"):
        merge([summarise(part, user="who") for part in made])
    assert Recipe.from_summary(merge([summarise(part.with_columns(z=pl.int_range(pl.len()) ** 2), user="who", drop="x")
                                      for part in made])).feature_names == ("z",)


def test_targets_of_different_types():
    def learn(*targets, **call):
        parts = [pl.DataFrame({"who": [f"u{k}"] * len(y), "x": np.sqrt(np.arange(len(y)) + k), "y": y}, strict=False)
                 for k, y in enumerate(targets)]
        recipe = Recipe.from_summary(merge([sent(part, user="who", target="y", **call) for part in parts]))
        return recipe, [recipe.encode(part).targets.tolist() for part in parts]

    recipe, targets = learn([0, 1, 1, 0], [1, 0, 0, 1])
    assert (recipe.task, recipe.classes, recipe.class_kind) == ("classification", ("0", "1"), "int")
    assert learn([0, 1, 1, 0], [0, 1, 2, 2, 1])[0].classes == ("0", "1", "2")
    recipe, targets = learn([0, 1, 1, 0], [1.0, None, 0.0, 1.0])
    assert (recipe.classes, recipe.class_kind, targets) == (("0.0", "1.0"), "float", [[0, 1, 1, 0], [1, 0, 1]])
    recipe, targets = learn([True, False, True], [1, 0, 0])
    assert (recipe.task, recipe.classes, targets) == ("classification", ("0.0", "1.0"), [[1, 0, 1], [1, 0, 0]])
    recipe, targets = learn(["a", "b", "a", "b"], [1, 1, 2, 2])
    assert (recipe.classes, recipe.class_kind, targets) == (("1", "2", "a", "b"), "str", [[2, 3, 2, 3], [0, 0, 1, 1]])
    assert learn([0, 1, 1, 0], [0.5, 2.5, 0.25])[0].task == "regression"
    assert learn(["yes", "yes"], ["no", "no"])[0].classes == ("no", "yes")
    with raises("one value only", "'yes'", "column 'y'"):
        learn(["yes", "yes"], ["yes"])
    with raises("numbers in table 0 and texts in table 1", "column 'y'"):
        learn([0.5, 1.5, 2.5], ["a", "b"])
    with raises("missing in 3 of 5 rows"):
        learn([1, None], [None, None, 2])
    assert learn([1.5, 2.5, 1.0], [5, 7], task="regression")[1] == [[1.5, 2.5, 1.0], [5, 7]]


# ---- tables that do not go together

def test_tables_that_were_asked_different_things():
    frame = pl.DataFrame({"who": ["a", "b"] * 4, "x": np.arange(8.0) ** 2, "y": [0, 1] * 4})
    base = summarise(frame, user="who", target="y")
    for key, other in (("task", summarise(frame, user="who", target="y", task="regression")),
                       ("user", summarise(frame, user=None, target="y")),
                       ("target", summarise(frame, user="who")),
                       ("named", summarise(frame, user="who", target="y", features="x"))):
        with raises("different settings", key):
            merge([base, other])
    more = summarise(frame.with_columns(z=pl.col("x") * 2), user="who", target="y")
    with raises("Column 'z' is missing in table 0 and there in table 1", "--drop 'z'"):
        merge([base, more])
    with raises("Column 'z' is missing in table 1 and there in table 0"):
        merge([more, base])
    with raises("At least one summary"):
        merge([])
    assert merge([base]) == base
    turned = summarise(frame.select("y", "x", "who"), user="who", target="y")
    assert merge([base, turned]).rows == 16
    for wrong in ({}, {**base.to_json(), "more": 1}, {**base.to_json(), "answers": {"name": "y"}}):
        with raises("no summary", "to_json"):
            TableSummary.from_json(wrong)
    assert TableSummary.from_json(json.loads(json.dumps(more.to_json()))) == more


def test_what_a_node_refuses_for_itself():
    for values, parts in ((["1", "1e400", "2"], ["got inf", "row 1"]), ([[1], [2], [3]], ["cannot be used"])):
        with raises(*parts, "column 'x'") if "inf" not in parts[0] else raises("got inf", "column 'x', row 1"):
            summarise(pl.DataFrame({"who": ["a", "a", "b"], "x": values}), user="who")
    with raises("texts, integers or dates, got 0.5", "row 1"):
        summarise(pl.DataFrame({"who": [1.0, 0.5, 2.0], "x": [1.0, 2.0, 3.0]}), user="who")


def test_rows_without_user_are_counted_and_do_not_count():
    frame = pl.DataFrame({"who": ["a", None, "b", "a"], "x": [1.0, 99.0, 3.0, 2.0], "y": [0, 7, None, 1]})
    summary = summarise(frame, user="who", target="y")
    assert (summary.rows, summary.users, summary.unnamed, summary.kept) == (3, 2, 1, 2)
    assert summary.columns[0].numbers.high == 2.0  # of the rows with a user and a target
    assert (summary.answers.rows, summary.answers.missing, summary.answers.numbers.high) == (3, 1, 1)
    check_summary(summary)
    assert TableSummary.from_json(json.loads(json.dumps(summary.to_json()))) == summary
    assert merge([summary, summary]).unnamed == 2
    older = summary.to_json()
    del older["unnamed"]  # a node that does not count them
    assert TableSummary.from_json(older).unnamed == 0
    with raises("rows without a user"):
        check_summary(replace(summary, unnamed=-1))
