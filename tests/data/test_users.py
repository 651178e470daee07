"""Users: what goes in comes out, whatever its form, and what cannot be used is refused with its place."""

from __future__ import annotations

import csv
import gzip
import math
import pickle
import re
from datetime import date, datetime
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.base.errors import CoterieWarning, Incompatible, InvalidInput, MissingExtra
from coterie.data.moments import Standardizer
from coterie.data.users import Block, Moments, Participants, Users
from coterie.fitting import prepare

few = settings(max_examples=25)


def ragged(counts, n_features=2, seed=0, names=None):
    """Users with these numbers of rows; row r holds the value r in its first feature and its target."""
    counts = np.asarray(counts)
    n = int(counts.sum())
    features = np.random.default_rng(seed).normal(size=(n, n_features))
    features[:, 0] = np.arange(n)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return Users(features, np.arange(n), offsets, tuple(names or range(len(counts))),
                 tuple(f"x{j}" for j in range(n_features)))


def raises(*parts):
    """InvalidInput whose message holds all parts, in this order."""
    return pytest.raises(InvalidInput, match="(?s)" + ".*".join(re.escape(part) for part in parts))


def same(one, other):
    np.testing.assert_array_equal(one.features, other.features)
    np.testing.assert_array_equal(one.offsets, other.offsets)
    assert (one.targets is None) == (other.targets is None)
    if one.targets is not None:
        np.testing.assert_array_equal(one.targets, other.targets)
    assert (one.names, one.feature_names) == (other.names, other.feature_names)


def test_same_can_fail():
    users = ragged([2, 3])
    same(users, ragged([2, 3]))
    with pytest.raises(AssertionError):
        same(users, ragged([3, 2]))


# ---- construction

def test_rows_are_sorted_by_user_and_keep_their_order():
    users = Users.from_arrays([[1], [2], [3], [4], [5]], [10, 20, 30, 40, 50], ["b", "a", "b", "a", "b"])
    assert users.names == ("a", "b")
    assert users.feature_names == ("x0",)
    assert users.features[:, 0].tolist() == [2, 4, 1, 3, 5]
    assert users.targets.tolist() == [20, 40, 10, 30, 50]
    assert users.offsets.tolist() == [0, 2, 5]
    assert users.offsets.dtype == np.int64
    assert users.counts.tolist() == [2, 3]
    assert users.owner.tolist() == [0, 0, 1, 1, 1]
    assert (users.n_users, users.n_samples, users.n_features, len(users)) == (2, 5, 1, 2)
    assert repr(users) == "Users(2 users, 5 samples, 1 features, targets)"
    assert users.features.flags.c_contiguous
    assert users.features.dtype == np.float64


def test_without_user_every_row_is_a_user():
    users = Users.from_arrays([[3.0, 1.0], [2.0, 5.0]])
    assert users.names == (0, 1)
    assert users.counts.tolist() == [1, 1]
    assert users.targets is None
    assert users.features.tolist() == [[3, 1], [2, 5]]
    assert "no targets" in repr(users)


class Label(str):
    __slots__ = ()


@pytest.mark.parametrize(("user", "names"), [
    ([2, 1, 2], (1, 2)),
    (np.array([2, 1, 2], dtype=np.uint8), (1, 2)),
    (np.array(["b", "a", "b"]), ("a", "b")),
    (np.array(["b", "a", "b"], dtype=object), ("a", "b")),
    ([("x", 2), ("x", 1), ("x", 2)], (("x", 1), ("x", 2))),
    (["b", 1, "b"], ("b", 1)),
    ([np.str_("b"), "a", Label("b")], ("a", "b")),
    ([Label("b"), Label("a"), "b"], ("a", "b")),
    ([np.int64(2), 1.0, 2], (1.0, 2)),
    ((True, False, True), (False, True)),
    ([date(2021, 1, 1), date(2020, 1, 1), date(2021, 1, 1)], (date(2020, 1, 1), date(2021, 1, 1))),
    (pd.Series(["b", "a", "b"]), ("a", "b")),
    (pd.Series(["b", "a", "b"], dtype="category"), ("a", "b")),
    (pd.Series([2, 1, 2], dtype="Int64", index=[7, 8, 9]), (1, 2)),
    (pd.Series(pd.to_datetime(["2021", "2020", "2021"]).as_unit("ns")), (datetime(2020, 1, 1), datetime(2021, 1, 1))),
    (pl.Series(["b", "a", "b"]), ("a", "b")),
    (pl.Series(["b", "a", "b"], dtype=pl.Categorical), ("a", "b")),
    (pd.MultiIndex.from_tuples([("x", 2), ("x", 1), ("x", 2)]), (("x", 1), ("x", 2))),
    (iter(["b", "a", "b"]), ("a", "b")),
])
def test_kinds_of_names(user, names):
    users = Users.from_arrays([[1.0], [2.0], [3.0]], user=user)
    assert users.names == names
    assert not any(isinstance(name, (np.generic, Label)) for name in users.names)
    mine = users.features[slice(*users.offsets[users.names.index(names[0]):][:2]), 0].tolist()
    assert mine == ([1, 3] if names[0] == "b" else [2])


def test_names_without_an_order_come_by_first_appearance():
    users = Users.from_arrays(np.arange(5.0)[:, None], user=["z", 3, ("t",), "a", 3])
    assert users.names == ("z", 3, ("t",), "a")
    assert users.features[:, 0].tolist() == [0, 1, 4, 2, 3]


@few
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-9, 9)), min_size=1, max_size=30), st.randoms())
def test_permuting_rows_changes_only_the_order_within_users(rows, random):
    def build(rows):
        return Users.from_arrays([[v, v * v] for _, v in rows], [v + 0.5 for _, v in rows], [f"u{u}" for u, _ in rows])

    shuffled = list(rows)
    random.shuffle(shuffled)
    one, other = build(rows), build(shuffled)
    assert one.names == other.names == tuple(sorted({f"u{u}" for u, _ in rows}))
    assert one.offsets.tolist() == other.offsets.tolist()
    for i, name in enumerate(one.names):
        mine, theirs = (u.features[u.owner == i] for u in (one, other))
        assert sorted(mine.tolist()) == sorted(theirs.tolist())
        assert mine[:, 0].tolist() == [v for u, v in rows if f"u{u}" == name]
        assert one.targets[one.owner == i].tolist() == [v + 0.5 for u, v in rows if f"u{u}" == name]


def test_the_caller_and_users_share_no_memory():
    X, y, user = np.ones((3, 2)), np.ones(3), np.array([0, 0, 1])
    users = Users.from_arrays(X, y, user)
    kept = X.copy(), y.copy(), user.copy()
    X[:], y[:], user[:] = 7, 7, 7
    assert (users.features == 1).all()
    assert (users.targets == 1).all()
    assert users.names == (0, 1)
    Users.from_arrays(*kept)
    assert (kept[0] == 1).all()
    assert kept[2].tolist() == [0, 0, 1]
    offsets = np.array([0, 3])
    direct = Users(X, y, offsets, ("a",), ("p", "q"))
    X[:], y[:], offsets[:] = 9, 9, 9
    assert (direct.features == 7).all()
    assert (direct.targets == 7).all()
    assert direct.offsets.tolist() == [0, 3]
    for array in (users.features, users.targets, users.offsets, users.counts, users.owner):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
    with pytest.raises(AttributeError):
        users.names = ()


def test_pickle_keeps_everything_but_the_caches():
    users = ragged([2, 0, 20])
    users.blocks()
    back = pickle.loads(pickle.dumps(users))
    same(users, back)
    assert not back.features.flags.writeable
    assert "_blocks" not in vars(back)
    assert "_blocks" in vars(users)


@pytest.mark.parametrize(("change", "parts"), [
    ({"features": [1.0, 2.0]}, ["features must have shape (n_samples, 1)", "(2,)"]),
    ({"feature_names": ("p", "q")}, ["features must have shape (n_samples, 2)", "(2, 1)"]),
    ({"features": np.ones((2, 0)), "feature_names": ()}, ["features must have shape", "(2, 0)"]),
    ({"targets": [1.0]}, ["targets must have shape (2,)", "(1,)"]),
    ({"offsets": [0, 2]}, ["offsets must be 3 integers"]),
    ({"offsets": [0.0, 1.0, 2.0]}, ["offsets must be 3 integers"]),
    ({"offsets": [1, 1, 2]}, ["offsets", "from 0 to 2"]),
    ({"offsets": [0, 1, 3]}, ["offsets", "from 0 to 2"]),
    ({"offsets": [0, 3, 2]}, ["offsets", "rising"]),
    ({"names": ("a", "a")}, ["User names must be unique", "'a'"]),
    ({"features": [[1.0], [np.nan]]}, ["missing value", "user 'b', row 1, column 'p'"]),
    ({"targets": [np.inf, 1.0]}, ["targets has an infinite value", "user 'a', row 0"]),
])
def test_the_constructor_checks(change, parts):
    good = {"features": [[1.0], [2.0]], "targets": [0.0, 1.0], "offsets": [0, 1, 2], "names": ["a", "b"],
            "feature_names": ["p"]}
    assert Users(**good).names == ("a", "b")
    with raises(*parts):
        Users(**{**good, **change})


# ---- refusals of from_arrays

X3 = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]


def with_entry(value, dtype=None):
    rows = [[1.0, 2.0], [3.0, value], [5.0, 6.0]]
    return rows if dtype is None else np.array(rows, dtype=dtype)


@pytest.mark.parametrize(("X", "parts"), [
    (with_entry("tall"), ["'tall'", "user 'b', row 1, column 'x1'", "one-hot"]),
    (with_entry("7"), ["'7'", "row 1, column 'x1'"]),
    (with_entry("tall", object), ["'tall'", "row 1, column 'x1'"]),
    (np.array(with_entry("tall")), ["must hold numbers", "row 0, column 'x0'"]),
    (with_entry(None), ["missing value", "user 'b', row 1, column 'x1'", "Fill in or drop"]),
    (with_entry(pd.NA), ["missing value", "row 1, column 'x1'"]),
    (with_entry(date(2020, 1, 2)), ["2020", "row 1, column 'x1'", "drop it"]),
    (with_entry(1j), ["1j", "user 'b', row 1, column 'x1'"]),
    (with_entry(1j, complex), ["must hold numbers", "row 0, column 'x0'"]),
    (np.array(with_entry(4.0)).astype("datetime64[s]"), ["must hold numbers", "column 'x0'"]),
    (with_entry([1.0]), ["different lengths"]),
    (with_entry(10**400), ["beyond float64", "column 'x1'"]),
    (with_entry(np.nan), ["X has a missing value (NaN)", "user 'b', row 1, column 'x1'", "Fill in or drop"]),
    (with_entry(-np.inf), ["X has an infinite value", "user 'b', row 1, column 'x1'"]),
    (with_entry(np.longdouble("1e1000"), np.longdouble), ["infinite", "row 1, column 'x1'"]),
    (np.asfortranarray(with_entry(np.nan)), ["user 'b', row 1, column 'x1'"]),
    (np.ma.masked_equal(X3, 4.0), ["missing value", "row 1, column 'x1'"]),
    (sp.csr_array(np.array(X3)), ["dense", "X.toarray()"]),
    (sp.coo_matrix(np.array(X3)), ["dense", "X.toarray()"]),
    ([1.0, 2.0, 3.0], ["two dimensions", "(3,)", "X.reshape(-1, 1)"]),
    (pd.Series([1.0, 2.0, 3.0]), ["two dimensions", "X.reshape(-1, 1)"]),
    (np.zeros((3, 2, 2)), ["two dimensions", "X.reshape(len(X), -1)"]),
    (np.zeros((0, 2)), ["At least one row", "0 rows"]),
    (np.zeros((3, 0)), ["At least one row", "0 columns"]),
    (X3[:2], ["X has 2 rows and user has 3 values"]),
    (pd.DataFrame(X3, columns=["p", "p"]), ["Column names of X must be unique", "'p'"]),
    (pd.DataFrame({"p": ["1", "2", "3"]}), ["'1'", "user 'a', row 0, column 'p'"]),
])
def test_features_that_are_refused(X, parts):
    with raises(*parts):
        Users.from_arrays(X, user=["a", "b", "a"])


@pytest.mark.parametrize(("y", "parts"), [
    ([0, 1], ["X has 3 rows and y has 2 values"]),
    ([0, np.nan, 1], ["y has a missing value (NaN)", "user 'b', row 1"]),
    ([0, np.inf, 1], ["y has an infinite value", "user 'b', row 1"]),
    ([0, None, 1], ["missing value", "user 'b', row 1"]),
    (["no", "yes", "no"], ["'no'", "user 'a', row 0", "Encode classes as numbers"]),
    ([0, "yes", 1], ["'yes'", "user 'b', row 1", "Encode classes"]),
    (pd.Series(["u", "v", "u"], dtype="category", name="kind"), ["'u'", "row 0, column 'kind'", "Encode classes"]),
    (pd.Series([1, 2, 1], dtype="category"), ["must hold numbers", "dtype category", "Encode classes"]),
    (np.zeros((3, 2)), ["y must have one dimension", "(3, 2)"]),
    (5.0, ["y must have one dimension"]),
    (sp.csr_array(np.ones((3, 1))), ["y.toarray()"]),
])
def test_targets_that_are_refused(y, parts):
    with raises(*parts):
        Users.from_arrays(X3, y, ["a", "b", "a"])


@pytest.mark.parametrize(("user", "parts"), [
    (["a", None, "b"], ["user name is missing", "row 1"]),
    ([1.0, 2.0, np.nan], ["user name is missing", "row 2"]),
    (np.array([1.0, np.nan, np.nan]), ["user name is missing", "row 1"]),
    (np.array(["2020", "NaT", "2021"], dtype="datetime64[D]"), ["user name is missing", "row 1"]),
    ([pd.NaT, "a", "b"], ["user name is missing", "row 0"]),
    (pd.Series(["a", "b", None], dtype="string"), ["user name is missing", "row 2"]),
    (pd.Series([1, None, 2], dtype="Int64"), ["user name is missing", "row 1"]),
    (pl.Series(["a", None, "b"]), ["user name is missing", "row 1"]),
    (pl.Series([1, None, 2]), ["user name is missing", "row 1"]),
    ([("a", 1), ("a", np.nan), ("b", 1)], ["user name is missing", "row 1"]),
    (["a", ["b"], "c"], ["hashable", "row 1"]),
    (np.zeros((3, 2)), ["user must have one dimension", "(3, 2)", "tuple"]),
    (["a", "b"], ["X has 3 rows and user has 2 values"]),
])
def test_user_names_that_are_refused(user, parts):
    with raises(*parts):
        Users.from_arrays(X3, user=user)


def test_feature_names_must_match():
    assert Users.from_arrays(X3, feature_names=["p", "q"]).feature_names == ("p", "q")
    with raises("X has 2 columns and feature_names has 1 values"):
        Users.from_arrays(X3, feature_names=["p"])
    with raises("Feature names must be unique", "'p'"):
        Users.from_arrays(X3, feature_names=["p", "p"])


@pytest.mark.parametrize("X", [
    [[1, True], [0, False]], np.array([[1, 1], [0, 0]], dtype=np.int8), np.array([[True, True], [False, False]]),
    np.asfortranarray(np.array([[1.0, 1.0], [0.0, 0.0]])), [[Decimal(1), Fraction(1)], [0, np.bool_(False)]],
    pd.DataFrame({"x0": [1, 0], "x1": [True, False]}), pl.DataFrame({"x0": [1.0, 0.0], "x1": [True, False]}),
    pl.LazyFrame({"x0": [1, 0], "x1": [1, 0]}), np.ma.masked_equal([[1, 1], [0, 0]], 5),
    pd.DataFrame({"x0": pd.array([1, 0], dtype="Int64"), "x1": pd.array([True, False], dtype="boolean")}),
])
def test_kinds_of_features(X):
    users = Users.from_arrays(X, [[True], [False]], ["b", "a"])
    assert users.features.tolist() == [[0, 0], [1, 1]]
    assert users.targets.tolist() == [0, 1]
    assert users.feature_names == ("x0", "x1")
    assert users.features.flags.c_contiguous


@pytest.mark.slow
def test_a_hundred_thousand_users():
    n, each = 100_000, 10
    code = np.random.default_rng(0).permutation(np.repeat(np.arange(n), each))
    X = np.column_stack([code, np.arange(n * each)])
    for user in (code, np.char.add("user", np.char.zfill(code.astype(str), 6)), code.astype(object)):
        users = Users.from_arrays(X, code, user)
        assert users.n_users == n
        assert (users.counts == each).all()
        np.testing.assert_array_equal(users.features[:, 0], np.repeat(np.arange(n), each))
        assert (np.diff(users.features[:, 1].reshape(n, each)) > 0).all()  # the original order within each user
        assert users.names[1234] == (1234 if user is not None and not isinstance(user[0], str) else "user001234")
    block, = users.blocks()
    assert np.shares_memory(block.features, users.features)
    assert block.features.shape == (n, each, 2)


# ---- looking users up

def test_index_suggests():
    users = ragged([1] * 12, names=[f"user{i}" for i in range(12)])
    assert users.index("user7") == 7
    assert users.index(np.str_("user11")) == 11
    with raises("There is no user 'usr7'", "Did you mean 'user7'", "There are: 'user0'", "..."):
        users.index("usr7")
    with raises("There is no user '3'", "Did you mean 3"):
        ragged([1] * 5).index("3")
    with raises("There is no user [1]"):
        ragged([1]).index([1])


@few
@given(st.lists(st.integers(0, 4), min_size=1, max_size=8).flatmap(
    lambda counts: st.tuples(st.just(counts), st.permutations(range(len(counts))), st.integers(0, len(counts)))))
def test_take_is_slicing(case):
    counts, order, size = case
    users, order = ragged(counts), order[:size]
    taken = users.take(order)
    assert taken.names == tuple(order)
    assert taken.counts.tolist() == [counts[i] for i in order]
    expected = [r for i in order for r in range(users.offsets[i], users.offsets[i + 1])]
    assert taken.targets.tolist() == expected
    np.testing.assert_array_equal(taken.features, users.features[expected])


def test_take_refuses():
    users = ragged([1, 0, 2])
    assert users.take(users.counts > 0).names == (0, 2)
    for bad, part in (([3], "0..2"), ([-1], "0..2"), ([0.0], "users.index"), ([[0]], "users.index"), ([0, 0], "unique"),
                      (["a"], "no user 'a'"), ("a", "list of users"), (1, "list of users")):
        with raises(part):
            users.take(bad)


def test_users_are_given_by_name_or_position():
    """Integers are positions unless integers name the users; `take` takes positions like NumPy, and other names."""
    people = Users.from_arrays(np.eye(4), user=["ann", "bob", "eve", "zoe"])
    numbered = Users.from_arrays(np.eye(4), user=[7, 0, 3, 5])  # sorted: 0, 3, 5, 7
    plain = Users.from_arrays(np.eye(4))
    pairs = Users.from_arrays(np.eye(4), user=[("a", k) for k in range(4)])
    for asked, expected in ((["eve", "ann"], [2, 0]), ([2, "ann"], [2, 0]), (np.array(["zoe"]), [3]),
                            (np.array([1, 3]), [1, 3]), (pd.Series(["bob"]), [1]), (pl.Series(["bob"]), [1])):
        assert people.positions(asked).tolist() == expected
        assert people.take(asked).names == tuple(people.names[i] for i in expected)
    assert numbered.positions([7, 3]).tolist() == [3, 1]
    assert numbered.take(numbered.positions([7, 3])).names == (7, 3)
    assert numbered.take([3, 1]).names == (7, 3)
    assert plain.positions([3, 1]).tolist() == [3, 1]
    assert pairs.positions([("a", 3), 0]).tolist() == [3, 0]
    assert pairs.take([("a", 3)]).names == (("a", 3),)
    for users, wrong, part in ((people, ["evi"], "no user 'evi'. Did you mean 'eve'"), (people, [4], "from 0 to 3"),
                               (people, [-1], "from 0 to 3"), (numbered, [1], "There is no user 1. "),
                               (numbered, ["7"], "Did you mean 7"), (people, "eve", "list of users"),
                               (people, [True], "no user True")):
        with raises(part):
            users.positions(wrong)


def test_require_samples_names_the_empty():
    ragged([1, 2]).require_samples()
    with raises("2 of 3 have none", "user 'a', 'c'", "take"):
        ragged([0, 2, 0], names="abc").require_samples()


# ---- frames and files

TABLE = {"who": ["b", "a", "b"], "age": [30, 40, 50], "size": [1.5, 2.5, 3.5], "y": [1, 0, 1]}


def check_table(users, names=("a", "b")):
    assert users.names == names
    assert users.feature_names == ("age", "size")
    assert users.features.tolist() == [[40, 2.5], [30, 1.5], [50, 3.5]]
    assert users.targets.tolist() == [0, 1, 1]


@pytest.mark.parametrize("frame", [pd.DataFrame, pl.DataFrame, pl.LazyFrame])
def test_from_frame(frame):
    check_table(Users.from_frame(frame(TABLE), user="who", target="y"))
    users = Users.from_frame(frame(TABLE), user="who", features=["y", "age"])
    assert users.feature_names == ("y", "age")
    assert users.targets is None
    assert users.features[0].tolist() == [0, 40]
    for features in ("age", np.array(["age"])):
        assert Users.from_frame(frame(TABLE), user="who", features=features).feature_names == ("age",)


def test_from_frame_ignores_the_index_and_takes_nullable_columns():
    frame = pd.DataFrame(TABLE, index=[5, 5, 9]).astype({"age": "Int64", "size": "Float64", "y": "boolean"})
    check_table(Users.from_frame(frame, user="who", target="y"))
    frame = pd.DataFrame({"who": ["a"], 0: [1], ("p", "q"): [2.0]})
    assert Users.from_frame(frame, user="who").feature_names == ("0", "('p', 'q')")


@pytest.mark.parametrize(("frame", "call", "parts"), [
    (TABLE, {"user": "whom"}, ["There is no column 'whom'", "Did you mean 'who'", "'age', 'size', 'y'"]),
    (TABLE, {"user": "who", "target": "z"}, ["There is no column 'z'", "There are: 'who'"]),
    (TABLE, {"user": "who", "features": ["aged"]}, ["There is no column 'aged'", "Did you mean 'age'"]),
    (TABLE, {"user": np.arange(3)}, ["There is no column array"]),
    (TABLE, {"user": "who", "target": "who"}, ["user, target and features must be unique", "'who'"]),
    (TABLE, {"user": "who", "features": ["age", "who"]}, ["must be unique", "'who'"]),
    (TABLE, {"user": "who", "target": "y", "features": ["y"]}, ["must be unique", "'y'"]),
    (TABLE, {"user": "who", "features": []}, ["At least one feature column"]),
    ({"who": ["a"]}, {"user": "who"}, ["At least one feature column"]),
    ({"who": [], "age": []}, {"user": "who"}, ["At least one row", "0 rows"]),
    ({**TABLE, "who": ["a", None, "b"]}, {"user": "who"}, ["user name is missing", "row 1"]),
    ({**TABLE, "size": [1.0, None, 2.0]}, {"user": "who"}, ["missing value", "user 'a', row 1, column 'size'"]),
    ({**TABLE, "size": ["s", "m", "l"]}, {"user": "who"}, ["'s'", "user 'b', row 0, column 'size'", "one-hot"]),
    ({**TABLE, "y": ["s", "m", "l"]}, {"user": "who", "target": "y"}, ["'s'", "row 0, column 'y'", "Encode classes"]),
    ({**TABLE, "y": [1.0, None, 0.0]}, {"user": "who", "target": "y"}, ["y has", "user 'a', row 1, column 'y'"]),
    ({**TABLE, "age": [date(2020, 1, 1)] * 3}, {"user": "who"}, ["2020", "row 0, column 'age'"]),
    ({**TABLE, "age": [datetime(2020, 1, 1)] * 3}, {"user": "who"}, ["2020", "row 0, column 'age'"]),
    ({**TABLE, "age": [True, None, False]}, {"user": "who"}, ["missing value", "row 1, column 'age'"]),
])
@pytest.mark.parametrize("kind", [pd.DataFrame, pl.DataFrame])
def test_frames_that_are_refused(kind, frame, call, parts):
    with raises(*parts):
        Users.from_frame(kind(frame), **call)


@pytest.mark.parametrize("column", [
    pd.Series(["x", "y", "x"], dtype="category"), pd.Series([1, 2, 1], dtype="category"),
    pd.Series(["x", "y", "x"], dtype="string"), pd.Series(pd.to_datetime(["2020", "2021", "2022"])),
    pd.Series(pd.to_timedelta([1, 2, 3], unit="D")), pd.Series([1, 2, 3]).astype(complex),
])
def test_pandas_columns_that_are_refused(column):
    with raises("X must hold numbers", str(column.dtype), "row 0, column 'bad'", "Encode it as numbers"):
        Users.from_frame(pd.DataFrame({"who": [1, 1, 2], "good": [1, 2, 3], "bad": column}), user="who")


@pytest.mark.parametrize("column", [
    pl.Series(["x", "y"], dtype=pl.Categorical), pl.Series(["x", "y"], dtype=pl.Enum(["x", "y"])),
    pl.Series([[1, 2], [3, 4]]), pl.Series([[1, 2], [3, 4]], dtype=pl.Array(pl.Int64, 2)),
    pl.Series([{"a": 1}, {"a": 2}]),
])
def test_polars_columns_that_are_refused(column):
    with raises("X must hold numbers", "row 0, column 'bad'", "Encode it as numbers"):
        Users.from_frame(pl.DataFrame({"who": [1, 2], "bad": column}), user="who")


def test_nullable_pandas_columns_with_gaps():
    for dtype in ("Int64", "Float64", "boolean"):
        with raises("missing value", "user 2, row 1, column 'gap'"):
            Users.from_frame(pd.DataFrame({"who": [1, 2], "gap": pd.array([1, None], dtype=dtype)}), user="who")


def test_from_frame_wants_a_frame_with_distinct_columns():
    with raises("pandas or polars", "from_arrays"):
        Users.from_frame(np.ones((2, 2)), user="who")
    with raises("Column names must be unique", "'p'"):
        Users.from_frame(pd.DataFrame([[1, 2, 3]], columns=["who", "p", "p"]), user="who")


def write_plain(path):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([TABLE.keys(), *zip(*TABLE.values(), strict=True)])


@pytest.mark.parametrize("write", [
    lambda path: pd.DataFrame(TABLE).to_csv(path, index=False), lambda path: pl.DataFrame(TABLE).write_csv(path),
    write_plain,
])
def test_from_csv(tmp_path, write):
    path = tmp_path / "data[1]*.csv"  # not a pattern
    write(path)
    check_table(Users.from_csv(path, user="who", target="y"))
    check_table(Users.from_csv(str(path), user="who", target="y", features=["age", "size"]))
    (tmp_path / "data.csv.gz").write_bytes(gzip.compress(path.read_bytes()))
    check_table(Users.from_csv(tmp_path / "data.csv.gz", user="who", target="y"))
    (tmp_path / "tabs").write_bytes(path.read_bytes().replace(b",", b"\t"))
    check_table(Users.from_csv(tmp_path / "tabs", user="who", target="y", separator="\t"))


@pytest.mark.parametrize(("texts", "names"), [
    (["2", "1", "2"], (1, 2)), (["2.5", "1", "2.5"], (1.0, 2.5)), (["b", "1", "b"], ("1", "b")),
    (["true", "false", "true"], (False, True)),
])
def test_names_in_a_csv_keep_their_kind(tmp_path, texts, names):
    (tmp_path / "t.csv").write_text("who,x\n" + "".join(f"{text},{i}\n" for i, text in enumerate(texts)))
    users = Users.from_csv(tmp_path / "t.csv", user="who")
    assert users.names == names
    assert [type(n) for n in users.names] == [type(n) for n in names]
    assert users.features[:, 0].tolist() == [1, 0, 2]


def test_the_kind_of_a_csv_column_is_read_from_all_rows(tmp_path):
    (tmp_path / "t.csv").write_text("who,x\n" + "a,1\n" * 20_000 + "b,0.5\n")
    assert Users.from_csv(tmp_path / "t.csv", user="who").features[-1, 0] == 0.5


@pytest.mark.parametrize(("content", "parts"), [
    (b"", ["The file is empty"]),
    (b"who,x\n", ["no rows"]),
    (b"who,x\na,1\nb,2,3\n", ["header has 2 fields and this record 3", "line 3"]),
    (b"who,x\na,1\nb\n", ["header has 2 fields and this record 1", "line 3"]),
    (b"who,x\na,1\n\x81\xff,2\n", ["no text", "UTF-8"]),
    (bytes(range(256)) * 4, ["no text"]),
    (gzip.compress(b"who,x\na,1\n" * 99)[:30], ["cannot be read", "cut short"]),
    (pa.Codec("zstd").compress(b"who,x\na,1\n" * 99, asbytes=True)[:20], ["cannot be read", "cut short"]),
], ids=["empty", "header only", "ragged", "short", "not UTF-8", "binary", "cut short", "zstd cut short"])
def test_csv_files_that_are_refused(tmp_path, content, parts):
    path = tmp_path / "bad.csv"
    path.write_bytes(content)
    with raises(*parts) as caught:
        Users.from_csv(path, user="who")
    assert str(path) in str(caught.value)
    assert caught.value.remedy
    assert (caught.value.__cause__ is not None) == (parts[0] == "cannot be read")


@pytest.mark.parametrize(("content", "parts"), [
    (b"who,x,x\na,1,2\n", ["must be unique", "'x'"]),
    (b"who,x\na,1\nb,\n", ["missing value", "user 'b', line 3 of ", "bad.csv, column 'x'"]),
    (b"who,x\n\na,1\nb,NA\n", ["missing value", "user 'b', line 4 of ", "bad.csv, column 'x'"]),
    (b"who,x\na,1\nb,many\n", ["'1'", "column 'x'", "coterie.fitting.prepare"]),
    (b"who,x\na,1\n,2\n", ["user name is missing", "line 3 of ", "bad.csv"]),
    (b"whom;x\na;1\n", ["There is no column 'who'", "'whom;x'"]),
])
def test_csv_contents_that_are_refused(tmp_path, content, parts):
    (tmp_path / "bad.csv").write_bytes(content)
    with raises(*parts):
        Users.from_csv(tmp_path / "bad.csv", user="who")


def test_a_separator_is_one_character(tmp_path):
    (tmp_path / "t.csv").write_text("who,x\na,1\n")
    with raises("separator must be one character", "';;'"):
        Users.from_csv(tmp_path / "t.csv", user="who", separator=";;")


def test_a_csv_file_is_read_as_read_table_reads_it(tmp_path):
    """Codes of users stay texts; numbers are numbers however they are written; nothing is encoded or scaled."""
    path = tmp_path / "t.csv"
    path.write_text("who,x,y\n007,+1.5,+1\n07,2,-1\n007,010,+1\n")
    users = Users.from_csv(path, user="who", target="y")
    assert users.names == ("007", "07")
    assert users.features[:, 0].tolist() == [1.5, 10.0, 2.0]
    assert users.targets.tolist() == [1.0, 1.0, -1.0]
    path.write_text("who,x,y\na,1,no\nb,2,yes\na,3,no\n")
    with raises("y must hold numbers, got 'no'", "coterie.fitting.prepare", "infers the task", "Logistic()"):
        Users.from_csv(path, user="who", target="y")
    assert prepare(path, user="who", target="y", loss="logistic").recipe.class_values == ("no", "yes")
    path.write_bytes("who,x\nJosé,1\n".encode("cp1252"))
    with pytest.warns(CoterieWarning, match="Windows-1252"):
        assert Users.from_csv(path, user="who").names == ("José",)
    path.write_bytes(pa.Codec("zstd").compress(b"who,x\na,1\n", asbytes=True) * 2)
    with raises("must hold numbers, got '1'"):  # the second header, after two frames are read as one text
        Users.from_csv(path, user="who")


@pytest.mark.parametrize("write", [
    lambda path: pq.write_table(pa.table(TABLE), path), lambda path: pl.DataFrame(TABLE).write_parquet(path),
    lambda path: pd.DataFrame(TABLE).to_parquet(path),
])
def test_from_parquet(tmp_path, write):
    write(tmp_path / "t.parquet")
    check_table(Users.from_parquet(tmp_path / "t.parquet", user="who", target="y"))
    check_table(Users.from_parquet(tmp_path / "t.parquet", user="who", target="y", features=["age", "size"]))


@pytest.mark.parametrize("read", [Users.from_csv, Users.from_parquet])
def test_paths_that_are_refused(tmp_path, read):
    with raises("no file", str(tmp_path / "none"), "Check the path"):
        read(tmp_path / "none", user="who")
    with raises("a directory", str(tmp_path)):
        read(tmp_path, user="who")


def test_parquet_files_that_are_refused(tmp_path):
    path = tmp_path / "bad.parquet"
    for content in (b"", b"who,x\na,1\n"):
        path.write_bytes(content)
        with raises("cannot be read", str(path)):
            Users.from_parquet(path, user="who")
    pq.write_table(pa.table({"who": pa.array([], pa.string()), "x": pa.array([], pa.float64())}), path)
    with raises("no rows", str(path)):
        Users.from_parquet(path, user="who")


@pytest.mark.usefixtures("without_polars")
def test_without_polars_the_message_names_the_extra(tmp_path):
    with pytest.raises(MissingExtra, match=re.escape("coterie[tables]")):
        Users.from_csv(tmp_path / "t.csv", user="who")


# ---- splits

counts_of_users = st.lists(st.integers(0, 12), min_size=1, max_size=8)
amounts = st.one_of(st.integers(0, 5), st.floats(0, 0.99))


@few
@given(counts_of_users, amounts, amounts, st.booleans(), st.integers(0, 9))
def test_splits_are_disjoint_complete_and_leave_something_to_train(counts, test, validation, stratify, seed):
    users = ragged(counts)
    parts = users.split(test=test, validation=validation, stratify=stratify, seed=seed)
    seen = np.concatenate([part.targets for part in parts])
    assert sorted(seen.tolist()) == users.targets.tolist()
    for part in parts:
        assert part.names == users.names
        assert part.feature_names == users.feature_names
        rows = part.targets.astype(int)  # the target of row r is r
        assert (np.diff(rows) > 0).all()
        assert (users.owner[rows] == part.owner).all()
        np.testing.assert_array_equal(part.features, users.features[rows])
    for i, count in enumerate(counts):
        def wish(amount, count=count):
            return amount if isinstance(amount, int) else math.floor(amount * count + 0.5 + 1e-9)

        n_test = min(wish(test), max(count - 1, 0))
        n_validation = min(wish(validation), max(count - 1, 0) - n_test)
        assert [part.counts[i] for part in parts] == [count - n_test - n_validation, n_validation, n_test]


@pytest.mark.parametrize(("call", "expected"), [
    ({}, {1: (1, 0, 0), 2: (2, 0, 0), 3: (2, 0, 1), 10: (8, 0, 2)}),
    ({"test": 0.5}, {1: (1, 0, 0), 2: (1, 0, 1), 3: (1, 0, 2), 10: (5, 0, 5)}),
    ({"test": 2, "validation": 1}, {1: (1, 0, 0), 2: (1, 0, 1), 3: (1, 0, 2), 4: (1, 1, 2), 10: (7, 1, 2)}),
    ({"test": 0.29}, {50: (35, 0, 15)}),
    ({"train": 4}, {1: (1, 0, 0), 4: (4, 0, 0), 10: (4, 0, 6)}),
    ({"train": 0.5}, {1: (1, 0, 0), 4: (2, 0, 2), 10: (5, 0, 5)}),
    ({"train": 0}, {1: (1, 0, 0), 4: (1, 0, 3)}),
    ({"train": 2, "validation": 3}, {1: (1, 0, 0), 4: (2, 2, 0), 10: (2, 3, 5)}),
    ({"train": 2, "test": 3}, {1: (1, 0, 0), 4: (1, 0, 3), 10: (2, 0, 3)}),
    ({"train": 10**30}, {1: (1, 0, 0), 10: (10, 0, 0)}),
])
def test_sizes_of_splits(call, expected):
    parts = ragged(list(expected)).split(**call)
    assert list(zip(*(part.counts.tolist() for part in parts), strict=True)) == list(expected.values())
    assert len({*np.concatenate([part.targets for part in parts])}) == sum(part.n_samples for part in parts)


def test_a_split_is_seeded_and_random():
    users = ragged([50] * 40)
    one, again, other = (users.split(test=0.5, seed=seed).test.targets.tolist() for seed in (1, 1, 2))
    assert one == again != other
    picked = np.zeros(50)
    for seed in range(50):
        picked += np.bincount(users.split(test=0.2, seed=seed).test.targets.astype(int) % 50, minlength=50)
    # 2,000 draws with probability 0.2 for every position: mean 400, standard deviation 18
    assert np.abs(picked - 400).max() < 5 * 18
    assert picked.std() > 5


def test_a_stratified_split_can_pick_any_row():
    users = ragged([50] * 40)  # all targets differ, so the order of the rows is no matter of chance
    picked = np.concatenate([users.split(stratify=True, seed=seed).test.targets % 50 for seed in range(5)])
    assert np.unique(picked).tolist() == list(range(50))


@few
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=6), st.floats(0.05, 0.9),
       st.floats(0.0, 0.5), st.integers(0, 5))
def test_stratified_proportions(classes, test, validation, seed):
    labels = [label for mine in classes for label in mine]
    users = Users.from_arrays([[0.0]] * len(labels), labels, [u for u, mine in enumerate(classes) for _ in mine])
    parts = users.split(test=test, validation=validation, stratify=True, seed=seed)
    for i, mine in enumerate(classes):
        for label in set(mine):
            for part, slack in ((parts.test, 1), (parts.validation, 2)):
                expected = part.counts[i] * mine.count(label) / len(mine)
                assert abs((part.targets[part.owner == i] == label).sum() - expected) < slack


def test_an_unstratified_split_does_miss_proportions():
    users = Users.from_arrays(np.zeros((2000, 1)), np.tile([0, 1], 1000), np.repeat(np.arange(100), 20))
    plain, stratified = (users.split(test=0.5, stratify=s).test for s in (False, True))
    assert np.unique(np.add.reduceat(stratified.targets, stratified.offsets[:-1])).tolist() == [5]
    assert np.unique(np.add.reduceat(plain.targets, plain.offsets[:-1])).size > 2


@pytest.mark.parametrize(("call", "parts"), [
    ({"test": 1.0}, ["test must be a share in [0, 1)", "1.0", "test=5"]), ({"test": -0.1}, ["test must be", "-0.1"]),
    ({"test": True}, ["test must be", "True"]), ({"test": -1}, ["test must be", "-1"]),
    ({"validation": "half"}, ["validation must be", "'half'"]), ({"train": 1.5}, ["train must be", "1.5"]),
    ({"test": np.nan}, ["test must be", "nan"]),
])
def test_shares_that_are_refused(call, parts):
    with raises(*parts):
        ragged([5]).split(**call)


def test_stratify_needs_targets():
    with raises("stratify=True needs targets"):
        Users.from_arrays(X3).split(stratify=True)


# ---- standardisation

def pooled(features):
    """Mean and population standard deviation in exact arithmetic, rounded once at the end."""
    def one(column):
        column = [Fraction(v) for v in column]
        mean = sum(column) / len(column)
        return float(mean), math.sqrt(sum((v - mean) ** 2 for v in column) / len(column))

    return np.array([one(column) for column in features.T.tolist()]).T


@pytest.mark.parametrize(("mean", "spread"), [(0, 1), (1e6, 1), (-1e6, 1e-2), (1e-6, 1e3)])
def test_the_scaler_from_moments_is_the_pooled_one(mean, spread):
    rng = np.random.default_rng(3)
    counts = [0, *rng.integers(1, 200, size=60), 0, 1, 4000]
    n = int(np.sum(counts))
    features = mean + spread * rng.normal(size=(n, 2)) * [1, 2]
    users = Users(features, None, np.concatenate([[0], np.cumsum(counts)]), tuple(range(len(counts))), ("p", "q"))
    moments = users.moments()
    assert moments.counts.tolist() == counts
    assert not moments.means[0].any()
    assert not moments.m2[0].any()
    for i in (1, 2, len(counts) - 1):
        exact_mean, exact_spread = pooled(features[users.owner == i])
        np.testing.assert_allclose(moments.means[i], exact_mean, rtol=1e-14, atol=1e-15 * spread)
        np.testing.assert_allclose(moments.m2[i], counts[i] * exact_spread**2, rtol=1e-13)
    scaler = Standardizer.from_moments(moments, feature_names=users.feature_names)
    exact_mean, exact_spread = pooled(features)
    np.testing.assert_allclose(scaler.mean, exact_mean, rtol=1e-12, atol=1e-15 * spread)
    # the means of the users are rounded at 1e-16 of their size: beside a spread 1e8 times smaller that is 1e-8
    np.testing.assert_allclose(scaler.scale, exact_spread, rtol=1e-12 if abs(mean) <= 1e6 * spread else 1e-9)
    scaled = scaler.transform(users)
    np.testing.assert_allclose(scaled.features.std(axis=0), 1, rtol=1e-9)
    assert scaled.names == users.names
    assert scaled.offsets.tolist() == users.offsets.tolist()
    # the textbook formula, mean of squares less squared mean, is what loses the digits
    if mean == 1e6:
        naive = np.sqrt((features**2).mean(axis=0) - features.mean(axis=0) ** 2)
        assert np.abs(naive / exact_spread - 1).max() > 1e-9


@pytest.mark.parametrize("value", [0.1, 1e6 + 0.1, -3e-300, 1e100 / 3])
def test_a_constant_column_keeps_its_unit(value):
    users = Users(np.full((1011, 2), value), None, np.cumsum([0, 3, 1, 7, 1000]), tuple("abcd"), ("p", "q"))
    moments = users.moments()
    assert (moments.means == value).all()  # a sum over 3 or 7 rows, divided, is off by a rounding
    assert not moments.m2.any()
    off = moments._replace(means=np.where([[True, True], [False, False]] * 2, np.nextafter(value, np.inf), value))
    for scaler in (Standardizer.from_moments(moments), Standardizer.from_moments(off)):
        assert scaler.scale.tolist() == [1.0, 1.0]
        assert np.abs(scaler.transform(users).features).max() <= 1e-15 * abs(value)


def test_a_column_of_zeros_keeps_its_unit():
    assert Standardizer.from_moments(Users.from_arrays([[0.0], [0.0]]).moments()).scale.tolist() == [1.0]


def test_a_column_that_varies_a_little_is_not_constant():
    users = Users.from_arrays([[1.0], [1.0 + 1e-12]], user=[0, 0])
    assert 0 < Standardizer.from_moments(users.moments()).scale[0] < 1e-12


@pytest.mark.parametrize("sign", [1, -1])
def test_restored_models_predict_the_same(sign):
    rng = np.random.default_rng(0)
    users = Users.from_arrays(rng.normal(5, 3, size=(20, 3)), user=rng.integers(0, 4, 20))
    scaler = Standardizer.from_moments(users.moments())
    models = rng.normal(size=(4, 4))
    standard, back = scaler.transform(users).features, scaler.restore(models, intercept_sign=sign)
    fitted = standard @ models[:, :-1].T + sign * models[:, -1]
    np.testing.assert_allclose(users.features @ back[:, :-1].T + sign * back[:, -1], fitted, rtol=1e-12, atol=1e-12)
    assert np.abs(users.features @ back[:, :-1].T - sign * back[:, -1] - fitted).max() > 0.1  # the sign matters
    np.testing.assert_allclose(scaler.restore(models[1], intercept_sign=sign), back[1], rtol=1e-14)


def test_standardizer_refuses():
    users = ragged([3, 2], n_features=2)
    scaler = Standardizer.from_moments(users.moments(), feature_names=users.feature_names)
    with raises("2 features", "got 3"):
        scaler.transform(ragged([2], n_features=3))
    with raises("'x0', 'x1'", "'p', 'q'"):
        scaler.transform(Users.from_arrays(X3, feature_names=["p", "q"]))
    for models, sign in ((np.ones((2, 2)), 1), (1.0, 1), (np.ones((2, 3)), 0)):
        with raises("models must have 3 columns", "intercept_sign must be 1 or -1"):
            scaler.restore(models, intercept_sign=sign)
    with raises("at least one row"):
        Standardizer.from_moments(ragged([0, 0]).moments())
    with raises("beyond float64", "column"):
        Standardizer.from_moments(Users.from_arrays([[1.0, 1e200], [1.0, -1e200]], user=[0, 0]).moments())
    assert isinstance(users.moments(), Moments)


# ---- blocks

def test_padded_lengths():
    counts = [*range(40), 63, 64, 65, 1000, 4097]
    users = ragged(counts)
    padded = {int(i): block.weights.shape[1] for block in users.blocks() for i in block.index}
    lengths = {count: padded[i] for i, count in enumerate(counts) if count}
    assert 0 not in padded
    assert all(lengths[c] == c for c in range(1, 17))
    assert all(0 <= lengths[c] - c < c / 8 for c in lengths)
    assert [lengths[c] for c in (17, 31, 33, 63, 64, 65, 1000, 4097)] == [18, 32, 36, 64, 64, 72, 1024, 4608]


@few
@given(st.lists(st.integers(0, 40), min_size=1, max_size=10), st.booleans())
def test_blocks_are_the_flat_data(counts, with_targets):
    users = ragged(counts, n_features=3)
    if not with_targets:
        users = Users(users.features, None, users.offsets, users.names, users.feature_names)
    seen = []
    for block in users.blocks():
        assert isinstance(block, Block)
        assert block.features.shape == (*block.weights.shape, 3)
        np.testing.assert_allclose(block.weights.sum(axis=1), 1, rtol=1e-14)
        for k, i in enumerate(block.index):
            mine = users.owner == i
            real = block.weights[k] > 0
            assert real.sum() == counts[i]
            assert real[:counts[i]].all()
            np.testing.assert_array_equal(block.features[k][real], users.features[mine])
            np.testing.assert_array_equal(block.targets[k][real], users.targets[mine] if with_targets else 0)
            assert not block.features[k][~real].any()
            assert not block.targets[k][~real].any()
            assert np.unique(block.weights[k][real]).tolist() == [1 / counts[i]]
            alone, = users.take([i]).blocks()  # bitwise the same data as in the batch
            for name in ("features", "targets", "weights"):
                assert getattr(alone, name)[0].tobytes() == getattr(block, name)[k].tobytes()
        seen += block.index.tolist()
    assert sorted(seen) == [i for i, count in enumerate(counts) if count]


def test_equal_counts_give_views_and_others_copies():
    for count, view in ((3, True), (16, True), (32, True), (17, False)):
        users = ragged([count] * 5)
        block, = users.blocks()
        assert np.shares_memory(block.features, users.features) == view
        assert np.shares_memory(block.targets, users.targets) == view
    users = ragged([3, 3, 0, 2, 3])
    assert [np.shares_memory(b.features, users.features) for b in users.blocks()] == [True, False]
    assert ragged([3, 3, 0]).blocks()[0].features.shape == (2, 3, 2)
    assert ragged([0]).blocks() == ()
    assert users.blocks() is users.blocks()
    with pytest.raises(ValueError, match="read-only"):
        users.blocks()[1].features[0] = 0


# Users by name


def test_participants_are_users_without_data():
    users = Users.from_arrays(np.eye(3), [1, 2, 3], ["a", "b", "c"], feature_names=["x", "y", "z"])
    away = Participants(users.names, users.feature_names)
    for part in ("names", "feature_names", "n_users", "n_features"):
        assert getattr(away, part) == getattr(users, part)
    assert len(away) == 3
    assert away.index("c") == users.index("c") == 2
    assert users.data is users
    with pytest.raises(Incompatible, match="elsewhere"):
        _ = away.data
    with pytest.raises(InvalidInput, match="no user 'd'"):
        away.index("d")
    assert repr(away) == "Participants(3 users, 3 features, data elsewhere)"


@pytest.mark.parametrize("indices", [[2, 0], [True, False, True], []])
def test_some_participants_can_be_taken_as_users_can(indices):
    users = Users.from_arrays(np.eye(3), [1, 2, 3], ["a", "b", "c"])
    away = Participants(users.names, users.feature_names)
    assert away.take(indices).names == users.take(indices).names
    assert away.take(indices).feature_names == users.feature_names
    for wrong in ([3], [-1], [[0]], [0.5, 1.5], [True, False]):
        with pytest.raises(InvalidInput, match="positions of users"):
            away.take(wrong)


def test_participants_have_names_of_their_own():
    with pytest.raises(InvalidInput, match="User names must be unique"):
        Participants(["a", "a"])
    with pytest.raises(InvalidInput, match="Feature names must be unique"):
        Participants(["a"], ["x", "x"])
    assert Participants(np.arange(3)).names == (0, 1, 2)
