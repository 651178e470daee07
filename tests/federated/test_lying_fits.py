"""A fit of a federation in which one user lies about its rows or its loss: it is set aside, the others are fitted."""

from __future__ import annotations

import logging
import warnings
from functools import cache

import numpy as np
import pytest

import coterie as ct
from coterie.federated import Reply, plausible
from coterie.federated.algorithms.base import Replies
from coterie.federated.fit import fit_federation
from coterie.federated.runtimes.in_process import LocalNodes
from coterie.federated.settings import Deployment
from coterie.fitting import Settings

LIAR = 3
LOSSES = {"classification": "logistic", "regression": "squared"}


class Lying(LocalNodes):
    """User 3 answers with what `lie` makes of its reply."""

    def __init__(self, users, lie):
        super().__init__([users], 0.2, 0)
        self.lie = lie

    def exchange(self, queries):
        names, batches = self.data.samples.users.names, super().exchange(queries).batches
        pairs = [(user, reply) for batch in batches for user, reply in batch.items()]
        return Replies(singles=tuple((user, self.lie(reply) if names[user] == LIAR else reply)
                                     for user, reply in pairs))


@cache
def users_of(task):
    rng = np.random.default_rng(0)
    owner = np.repeat(np.arange(8), 40)
    x = rng.standard_normal((owner.size, 2))
    margin = np.where(owner % 2 == 0, 1.0, -1.0) * (1.5 * x[:, 0] - x[:, 1]) + 0.3
    y = (margin + rng.logistic(size=owner.size) > 0) if task == "classification" else \
        margin + rng.standard_normal(owner.size)
    return ct.Users.from_arrays(x, y.astype(float), owner)


def fitted(task, lie, users=None):
    name = LOSSES[task]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ct.CoterieWarning)
        return fit_federation(Lying(users or users_of(task), lie), Deployment(loss=name, holdout=0.2),
                              Settings(loss=name))


@cache
def without_liar(task):
    return fitted(task, lambda reply: reply, users_of(task).take(np.arange(8) != LIAR))


def change(edit, *names, kinds=()):
    """A lie: `edit` of these fields, of one question or two in a message, or of all that hold real numbers."""
    def lie(reply):
        if kinds and reply.kind not in kinds:
            return reply
        return Reply(reply.kind, reply.round, {
            name: np.asarray(edit(np.asarray(array, dtype=float)))
            if name in names or name.removesuffix("2") in names or (not names and array.dtype.kind == "f") else array
            for name, array in reply.arrays.items()})
    return lie


def doubled(reply):
    return Reply(reply.kind, reply.round, {name: np.concatenate([array, array]) if np.ndim(array) else array
                                           for name, array in reply.arrays.items()})


LIES = {
    "count 2^31": change(lambda v: 0 * v + 2.0**31, "count"), "count -5": change(lambda v: 0 * v - 5, "count"),
    "count 1e9": change(lambda v: 0 * v + 1e9, "count"), "means 1e9": change(lambda v: v + 1e9, "means"),
    "spread 1e300": change(lambda v: 0 * v + 1e300, "m2", "scatter"),
    "spread -1": change(lambda v: -v, "m2", "scatter"),
    "nan": change(lambda v: v * np.nan), "zeros": change(lambda v: 0 * v), "sevens": change(lambda v: 0 * v + 7.0),
    "conjugate": change(lambda v: v - 1e9, "conjugate"), "shapes": doubled,
    "loss": change(lambda v: v + 1e9, "value", kinds=("certify",)),
}
ASKED = {
    "gradient 1e9": change(lambda v: 0 * v + 1e9, "gradient"), "hessian 0": change(lambda v: 0 * v, "hessian"),
    "hessian 1e12": change(lambda v: 1e12 * v, "hessian"), "information 2": change(lambda v: v + 2, "information"),
    "model 1e30": change(lambda v: v + 1e30, "model"),
    "slope 1e9": change(lambda v: 0 * v + 1e9, "gradient", kinds=("around",)),
    "votes": change(lambda v: 0 * v + 1e59, "values", "evidence"), "classes": change(lambda v: 0 * v + 7, "target"),
}


QUICK = {("regression", "loss"), ("classification", "classes")}


@pytest.mark.parametrize(("task", "lie"), [
    pytest.param(task, lie, marks=() if (task, lie) in QUICK else pytest.mark.slow)
    for task, lies in (("regression", LIES), ("classification", {**LIES, **ASKED})) for lie in lies])
def test_the_others_are_fitted_without_the_liar(task, lie, caplog):
    caplog.set_level(logging.WARNING, logger="coterie.federated")
    found, expected = fitted(task, {**LIES, **ASKED}[lie]), without_liar(task)
    assert list(found.aside) == [LIAR]
    assert found.aside[LIAR] in caplog.text
    assert found.aside[LIAR] in {reason for _, _, reason in found.refusals}
    assert found.solution.status is ct.Status.CONVERGED
    np.testing.assert_array_equal(found.models, expected.models)  # as if it had never been there


@pytest.mark.parametrize("task", ["regression", pytest.param("classification", marks=pytest.mark.slow)])
def test_nobody_is_set_aside_who_tells_the_truth(task):
    assert fitted(task, lambda reply: reply).aside == {}


# -- moments


def moments(rng, n=6, rows=30):
    x = rng.standard_normal((n, rows, 3)) * 10.0 ** rng.integers(-3, 4, size=3) + rng.standard_normal(3) * 1e3
    means = x.mean(axis=1)
    rest = x - means[:, None]
    return np.full(n, float(rows)), means, (rest**2).sum(axis=1), np.swapaxes(rest, 1, 2) @ rest, x


@pytest.mark.parametrize("seed", range(5))
def test_moments_of_rows_are_never_refused(seed):
    rng = np.random.default_rng(seed)
    counts, means, m2, scatters, x = moments(rng)
    target = np.stack([means[:, 2], m2[:, 2], x[:, :, 2].max(axis=1)], axis=1)
    assert plausible.wrong_moments(counts, means[:, :2], m2[:, :2], target) == [""] * 6
    assert plausible.wrong_scatters(counts, means, scatters) == [""] * 6
    assert not plausible.outlying(counts, means, m2).any()
    one = np.ones(6)  # a user with one row
    assert plausible.wrong_moments(one, means, 0.0 * m2, np.stack([means[:, 2], 0 * one, means[:, 2]], axis=1)) == [
        ""] * 6


@pytest.mark.parametrize(("edit", "reason"), [
    (lambda c, m, s: (c - 35, m, s), "no number of rows"), (lambda c, m, s: (c + 0.5, m, s), "no number of rows"),
    (lambda c, m, s: (c * 2.0**31, m, s), "no number of rows"), (lambda c, m, s: (c, m, -s), "negative"),
    (lambda c, m, s: (c, m, s + 1e300), "beyond"), (lambda c, m, s: (c, m * 1e200, s), "beyond"),
    (lambda c, m, s: (0 * c, m, s), "has none"), (lambda c, m, s: (0 * c + 1, m, s), "one row"),
])
def test_moments_of_no_rows_are(edit, reason):
    counts, means, m2, _, _ = moments(np.random.default_rng(0))
    assert all(reason in why for why in plausible.wrong_moments(*edit(counts, means, m2)))


def test_scatters_obey_cauchy_and_schwarz():
    counts, means, _, scatters, _ = moments(np.random.default_rng(0))
    scatters[2, 0, 1] = scatters[2, 1, 0] = 2 * np.sqrt(scatters[2, 0, 0] * scatters[2, 1, 1])
    wrong = plausible.wrong_scatters(counts, means, scatters)
    assert [user for user, why in enumerate(wrong) if why] == [2]
    assert "semidefinite" in wrong[2]


def test_the_largest_target_is_one_of_the_rows():
    counts, means, m2, _, x = moments(np.random.default_rng(0))
    target = np.stack([means[:, 2], m2[:, 2], x[:, :, 2].max(axis=1)], axis=1)
    for column, value in ((2, -1e9), (2, 1e9), (1, 0.0)):
        changed = target.copy()
        changed[4, column] = value
        wrong = plausible.wrong_moments(counts, means, m2, changed)
        assert [user for user, why in enumerate(wrong) if why] == [4]


def test_one_user_does_not_rule_the_scaling():
    from coterie.data.moments import Standardizer
    from coterie.data.users import Moments

    users = users_of("regression")
    honest = users.moments()
    assert plausible.without_dominant(honest) is honest  # so nothing changes, to the bit
    means, m2 = honest.means.copy(), honest.m2.copy()
    means[LIAR, 0], m2[LIAR, 0] = 1e4, 1e12
    lied = Moments(honest.counts, means, m2)
    rest = users.take(np.arange(8) != LIAR).moments()
    robust, expected = (Standardizer.from_moments(part) for part in (plausible.without_dominant(lied), rest))
    np.testing.assert_allclose(robust.mean[0], expected.mean[0], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(robust.scale[0], expected.scale[0], rtol=1e-9)
    plain = Standardizer.from_moments(lied)  # the twin
    assert plain.scale[0] > 1e4 * robust.scale[0]
    assert plain.scale[1] == robust.scale[1]  # other columns keep all users


def test_rare_columns_and_users_of_all_kinds_are_no_outliers():
    counts, means, m2, _, _ = moments(np.random.default_rng(1), n=20)
    means[:, 0], m2[:, 0] = 0.0, 0.0
    means[3, 0], m2[3, 0] = 1e5, 1e9  # the only one who has anything in this column
    means[:, 1] *= np.geomspace(1e-2, 1e2, 20)
    assert not plausible.outlying(counts, means, m2).any()
    means[3, 1] = 1e12  # the twin
    assert np.flatnonzero(plausible.outlying(counts, means, m2)).tolist() == [3]
    counts[5] = 1e9
    assert 5 in np.flatnonzero(plausible.outlying(counts, means, m2))
