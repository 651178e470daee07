"""Sums under pairwise masks: exact, nothing else to be seen, and no more sums than allowed."""

from __future__ import annotations

import doctest
import itertools
import sys
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

import coterie as ct
from coterie.base.errors import InvalidInput, MissingExtra, Refused
from coterie.data.scaling import Standardizer
from coterie.lab import masks
from coterie.lab.masks import LEAST, Member, SumQuestion, masked_moments, may_follow, total, without

flower = pytest.mark.flower  # not Flower itself, but the library `cryptography` that comes with it
NAMES = tuple("abcdefgh")
QUESTION = SumQuestion(run="run", round=3, kind="certify", bounds=(1e6, 1.0, 1e-3, 5e11), about=b"model")
VALUES = np.random.default_rng(0).uniform(-1, 1, (len(NAMES), 4)) * QUESTION.bounds


def party(names=NAMES):
    members = {name: Member(name) for name in names}
    return members, {name: member.public for name, member in members.items()}


def secrets_of(names, seed=0):
    """Secrets of all pairs, as if agreed on by keys."""
    rng = np.random.default_rng(seed)
    pairs = {frozenset(pair): rng.bytes(32) for pair in itertools.combinations(names, 2)}
    return {name: {other: pairs[frozenset((name, other))] for other in names if other != name} for name in names}


# -- numbers


def test_sums_are_exact_to_the_fixed_point():
    n = len(NAMES)
    words = np.add.reduce([masks.encode_numbers(QUESTION, row, n) for row in VALUES])
    error = np.abs(masks.decode_sum(QUESTION, words, n) - VALUES.sum(axis=0))
    assert (error <= QUESTION.rounding(n) + 1e-15 * np.array(QUESTION.bounds) * n).all()
    assert (QUESTION.rounding(n) < 1e-14 * np.array(QUESTION.bounds)).all()


@pytest.mark.parametrize("bound", [1e-308, 1e-20, 0.7, 1.0, 2.0, 3e15, 1e300])
@pytest.mark.parametrize("n", [3, 7, 1000, 2**20])
def test_numbers_at_the_bound_do_not_overflow(bound, n):
    question = replace(QUESTION, bounds=(bound, bound))
    one = masks.encode_numbers(question, [bound, -bound], n)
    with np.errstate(over="ignore"):
        summed = masks.decode_sum(question, one * np.uint64(n), n)
    np.testing.assert_allclose(summed / bound, [n, -n], rtol=1e-12)


def test_too_many_users_would_overflow():
    """The twin: with the scale of fewer users the sum wraps around."""
    one = masks.encode_numbers(replace(QUESTION, bounds=(1.0,)), [1.0], 3)
    assert masks.decode_sum(replace(QUESTION, bounds=(1.0,)), one * np.uint64(20), 3) != 20.0


@pytest.mark.parametrize("wrong", [1.001, -2.0, np.nan, np.inf])
def test_numbers_beyond_the_bound_are_refused(wrong):
    values = np.zeros(4)
    values[1] = wrong
    with pytest.raises(InvalidInput, match=r"beyond the bound .*number 1, bound 1\).*larger bound") as caught:
        masks.encode_numbers(QUESTION, values, 3)
    assert str(wrong) not in str(caught.value)
    with pytest.raises(InvalidInput, match="bounds 4 numbers"):
        masks.encode_numbers(QUESTION, np.zeros(3), 3)


@pytest.mark.parametrize("bounds", [(), (0.0,), (-1.0,), (np.inf,), (np.nan,)])
def test_bounds_are_positive(bounds):
    with pytest.raises(InvalidInput, match="positive, finite bounds"):
        replace(QUESTION, bounds=bounds)


# -- masks


def test_masks_cancel_over_the_set_and_only_there():
    parts = {name: masks.mask_of(name, secrets, b"c", 5) for name, secrets in secrets_of(NAMES).items()}
    assert not np.add.reduce(list(parts.values())).any()
    for r in range(1, len(NAMES)):
        for some in itertools.combinations(NAMES, r):
            assert np.add.reduce([parts[name] for name in some]).all()


def test_contexts_differ_by_everything():
    keys = {name: name.encode() * 32 for name in NAMES}
    variants = [QUESTION, *(replace(QUESTION, **change) for change in (
        {"run": "other"}, {"round": 4}, {"kind": "score"}, {"about": b"models"}, {"bounds": (1e6, 1.0, 1e-3, 4e11)}))]
    contexts = {question.context(keys) for question in variants}
    contexts.add(QUESTION.context({name: keys[name] for name in NAMES[:5]}))
    contexts.add(QUESTION.context(keys | {"h": b"x" * 32}))
    assert len(contexts) == 8
    assert QUESTION.context(dict(reversed(keys.items()))) == QUESTION.context(keys)
    mine = secrets_of(NAMES)["a"]
    assert not (masks.mask_of("a", mine, b"c", 9) == masks.mask_of("a", mine, b"d", 9)).any()


def uniformity(replies):
    """p-values of bytes being uniform, and of replies to two values having the same distribution of bytes."""
    tables = [np.bincount(words.view(np.uint8), minlength=256) for words in replies]
    together = np.array(tables)[:, np.add.reduce(tables) > 0]
    return [stats.chisquare(table).pvalue for table in tables] + [stats.chi2_contingency(together).pvalue]


def test_a_masked_reply_is_uniform_whatever_the_value():
    question, n = replace(QUESTION, bounds=(1.0,) * 20_000), len(NAMES)
    values = [masks.encode_numbers(question, np.full(20_000, value), n) for value in (0.0, 1.0)]
    mine = secrets_of(NAMES)["d"]
    replies = [words + masks.mask_of("d", mine, context, 20_000)
               for words, context in zip(values, (b"c", b"d"), strict=True)]
    assert min(uniformity(replies)) > 1e-3
    assert max(uniformity(values)) < 1e-12  # without a mask, it is seen


# -- sets


def test_who_may_be_left_out():
    for n, m in itertools.product(range(3, 12), range(12)):
        some = [str(k) for k in range(n)]
        assert may_follow(some, some[:m]) == (m >= 3 and n - m >= 3 and 2 * m > n)
    assert not may_follow("abcdefgh", "abcdX")
    assert without(NAMES, "bcd") == list("aefgh")
    assert without(NAMES, "a") == list("bcdef")
    for few, lost in (("abcdef", "a"), (NAMES, "abcd")):
        with pytest.raises(Refused, match=r"did not answer.*Ask the same users again"):
            without(few, lost)


def leaks(complete, n):
    """Whether sums over these sets determine a number of one user, or of two together."""
    rows = np.array([[name in chosen for name in NAMES[:n]] for chosen in complete], dtype=float).reshape(-1, n)
    for few in itertools.chain(itertools.combinations(range(n), 1), itertools.combinations(range(n), 2)):
        others = np.delete(rows, few, axis=1)  # a combination that is zero on all others and not on these
        if np.linalg.matrix_rank(rows) > np.linalg.matrix_rank(others):
            return True
    return False


def scheming(seed, allowed):
    """Sets for which all users answered a server that asks what it likes, in any order."""
    rng, n = np.random.default_rng(seed), len(NAMES)
    first = frozenset(rng.permutation(NAMES)[:rng.integers(7, n + 1)].tolist())
    pool = [first] + [frozenset(rng.permutation(sorted(first))[:rng.integers(3, len(first) + 1)].tolist())
                      for _ in range(4)]
    asked = [(name, chosen) for chosen in pool for name in sorted(chosen)]
    if seed % 2:
        asked = [asked[k] for k in rng.permutation(len(asked))]
    answered = {}
    for name, chosen in asked:
        sets = answered.setdefault(name, [])
        if chosen not in sets and allowed(sets, chosen):
            sets.append(chosen)
    return [chosen for chosen in set(pool) if all(chosen in answered[name] for name in chosen)]


def rule(sets, chosen):
    if not sets:
        return len(chosen) >= LEAST
    try:
        masks._add_set(((1.0,), b"", tuple(sets)), (1.0,), b"", chosen)
    except Refused:
        return False
    return True


def test_no_server_learns_of_fewer_than_three_by_differences():
    families = [scheming(seed, rule) for seed in range(400)]
    assert not any(leaks(complete, len(NAMES)) for complete in families)
    assert sum(len(complete) == 2 for complete in families) > 20  # second sums do occur


@pytest.mark.parametrize("lax", [lambda sets, chosen: True, lambda sets, chosen: len(sets) < 2])
def test_without_the_rule_it_does(lax):
    assert any(leaks(scheming(seed, lax), len(NAMES)) for seed in range(0, 400, 2))


def test_the_library_is_named_if_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives", None)
    with pytest.raises(MissingExtra, match=r"Masking sums needs cryptography.*coterie\[flower\]"):
        Member("a")


# -- users with keys


@flower
def test_users_with_keys_sum():
    members, keys = party()
    replies = {name: members[name].answer(QUESTION, keys, row) for name, row in zip(NAMES, VALUES, strict=True)}
    error = np.abs(total(QUESTION, keys, replies) - VALUES.sum(axis=0))
    assert (error <= QUESTION.rounding(len(NAMES)) + 1e-15 * np.array(QUESTION.bounds) * len(NAMES)).all()
    again = members["c"].answer(QUESTION, keys, VALUES[2])
    assert np.array_equal(again, replies["c"])  # a repeated question shows nothing more
    with pytest.raises(InvalidInput, match=r"only in the sum over all users of a set \(users 'h'"):
        total(QUESTION, keys, {name: replies[name] for name in NAMES[:-1]})
    with pytest.raises(InvalidInput, match=r"integers of 64 bits \(users 'a'"):
        total(QUESTION, keys, replies | {"a": VALUES[0]})


@flower
def test_drop_outs_are_summed_without():
    members, keys = party()
    values = dict(zip(NAMES, VALUES, strict=True))
    late = {name: members[name].answer(QUESTION, keys, values[name]) for name in NAMES}  # of which c's comes too late
    fewer = {name: keys[name] for name in without(NAMES, "c")}
    replies = {name: members[name].answer(QUESTION, fewer, values[name]) for name in fewer}
    np.testing.assert_allclose(total(QUESTION, fewer, replies), sum(values[name] for name in fewer), rtol=1e-12)
    assert not any(np.array_equal(replies[name], late[name]) for name in fewer)
    # With the late reply the server has two sums: their difference is that of three users.
    difference = total(QUESTION, keys, late) - total(QUESTION, fewer, replies)
    np.testing.assert_allclose(difference, values["c"] + values["g"] + values["h"], rtol=1e-10)


@flower
def test_wrong_sets_are_refused():
    members, keys = party()
    ann = members["a"]

    def ask(names, **change):
        return ann.answer(replace(QUESTION, **change), {name: keys[name] for name in names}, VALUES[0])

    for names, reason in (("bcdef", "without 'a'"), ("ab", "a sum over 2 users"), ("a", "a sum over 1 users")):
        with pytest.raises(Refused, match=reason):
            ask(names)
    ask(NAMES)
    for names in ("abcdefg", "abcdef", "abcd", "abc"):  # one or two left out, or half and more
        with pytest.raises(Refused, match="difference of the two sums"):
            ask(names)
        with pytest.raises(Refused, match="difference of the two sums"):
            ask(names, round=9, run="another")  # it is the same question, whatever the round and the run
    ask("abcde")
    with pytest.raises(Refused, match="difference of the two sums"):
        ask("abcdf")
    ask("abcdf", about=b"another model")


@flower
def test_bounds_and_numbers_stay():
    members, keys = party("abc")
    small = replace(QUESTION, bounds=(1.0,))
    with pytest.raises(InvalidInput, match="beyond the bound"):
        members["a"].answer(small, keys, [5.0])
    with pytest.raises(Refused, match="other bounds"):  # no search for how large it is
        members["a"].answer(replace(small, bounds=(8.0,)), keys, [5.0])
    members["b"].answer(small, keys, [0.5])
    with pytest.raises(Refused, match="numbers have changed"):
        members["b"].answer(small, keys, [0.25])


@flower
def test_a_server_that_exchanges_keys_reads_all_unless_keys_are_pinned():
    """The documented limit: without pins the server must follow the protocol."""
    members, keys = party("abc")
    forged = {name: Member(name) for name in "bc"}
    lie = {"a": keys["a"], **{name: member.public for name, member in forged.items()}}
    reply = members["a"].answer(QUESTION, lie, VALUES[0])
    blank = {name: member.answer(QUESTION, lie, np.zeros(4)) for name, member in forged.items()}
    np.testing.assert_allclose(total(QUESTION, lie, {"a": reply, **blank}), VALUES[0], rtol=1e-9)

    pinned = Member("a", pins={name: keys[name] for name in "bc"})
    honest = {**keys, "a": pinned.public}
    for wrong in ({"b": lie["b"]}, {"x": lie["b"]}):
        with pytest.raises(Refused, match=r"public key of '[bx]' is not the one known to 'a'"):
            pinned.answer(QUESTION, {**honest, **wrong}, VALUES[0])
    assert len(pinned.answer(QUESTION, honest, VALUES[0])) == 4


@flower
def test_keys_that_change_or_are_none_are_refused():
    members, keys = party("abcd")
    members["a"].answer(QUESTION, keys, VALUES[0])
    other = replace(QUESTION, about=b"next")
    with pytest.raises(Refused, match="'c' is not the one known"):  # seen before with another key
        members["a"].answer(other, keys | {"c": Member("c").public}, VALUES[0])
    with pytest.raises(Refused, match="another public key than this user's"):
        members["a"].answer(other, keys | {"a": Member("a").public}, VALUES[0])
    with pytest.raises(Refused, match="same public key"):
        members["a"].answer(other, keys | {"e": keys["b"]}, VALUES[0])
    for key in (b"short", bytes(32)):
        with pytest.raises(Refused, match="not valid"):
            members["a"].answer(other, keys | {"e": key}, VALUES[0])
    assert len(members["a"].answer(other, keys, VALUES[0])) == 4  # refusals leave nothing behind


@flower
def test_one_exchanged_key_spoils_the_sum():
    members, keys = party("abcd")
    lie = keys | {"b": Member("b").public}
    seen = {"a": lie, "b": keys, "c": keys, "d": keys}
    values = dict(zip("abcd", VALUES, strict=False))
    replies = {name: members[name].answer(QUESTION, seen[name], values[name]) for name in "abcd"}
    wrong = total(QUESTION, keys, replies) - sum(values.values())
    assert (np.abs(wrong) > 1e-6 * np.array(QUESTION.bounds)).all()


@flower
def test_moments_of_all_are_those_without_masks():
    users = ct.datasets.clustered("squared", n_users=9, samples=20, n_features=3, seed=0).users
    pooled = Standardizer.from_moments(users.moments())
    masked = Standardizer.from_moments(masked_moments(users, -20, 20, 100))
    np.testing.assert_allclose(masked.mean, pooled.mean, atol=1e-13)
    np.testing.assert_allclose(masked.scale, pooled.scale, rtol=1e-12)

    lost = str(users.names[1])
    kept = [str(name) in without([str(name) for name in users.names], [lost]) for name in users.names]
    fewer = masked_moments(users, -20, 20, 100, absent=[lost])
    assert sum(kept) == 6
    assert fewer.counts.tolist() == [120]
    expected = Standardizer.from_moments(users.take(np.flatnonzero(kept)).moments())
    np.testing.assert_allclose(Standardizer.from_moments(fewer).scale, expected.scale, rtol=1e-12)
    for change, reason in (({"high": 0.1}, "features beyond"), ({"max_rows": 19}, "beyond the bound"),
                           ({"low": 30}, "low < high")):
        with pytest.raises(InvalidInput, match=reason):
            masked_moments(users, **{"low": -20, "high": 20, "max_rows": 100} | change)
    with pytest.raises(Refused, match="over 2 users"):
        masked_moments(users.take([0, 1]), -20, 20, 100)


@flower
def test_examples_run():
    assert doctest.testmod(masks).failed == 0
    assert doctest.testmod(masks).attempted > 8
