"""Group labels, and sums and means by them."""

from __future__ import annotations

import numpy as np
import pytest

import coterie as ct
from coterie.base.labels import (
    check_labels,
    first_labels,
    group_means,
    group_sums,
    groups_of,
    labels_of,
    rows_owner,
)


def test_labels_are_numbered_by_first_appearance():
    models = np.array([[1.0, 2.0], [0.0, 0.0], [1.0, 2.0], [-0.0, 0.0], [3.0, 1.0]])
    assert labels_of(models).tolist() == [0, 1, 0, 1, 2]  # -0.0 equals 0.0
    models[2, 0] = np.nextafter(1.0, 2.0)
    assert labels_of(models).tolist() == [0, 1, 2, 1, 3]  # the last bit counts
    assert first_labels(np.array([2, 0, 2, 1])).tolist() == [0, 1, 0, 2]
    assert check_labels(["b", "a", "b"], 3).tolist() == [0, 1, 0]


def test_users_who_share_nothing_are_no_groups():
    assert groups_of(3, 2000) == "3 groups of 2,000 users"
    assert groups_of(1, 1, "among") == "1 group among 1 user"
    assert groups_of(46, 46) == groups_of(46, 46, "among") == "no groups among 46 users"
    solution = ct.solve(ct.Problem(ct.Users.from_arrays([[0.0], [1.0]]), ct.SquaredDistance(), lam=0.0))
    assert str(solution).startswith("No groups among 2 users at lam = 0: ")
    assert repr(solution).startswith("Solution(no groups among 2 users, ")
    assert "<p>No groups among 2 users at lam = 0: " in solution._repr_html_()


@pytest.mark.parametrize(("labels", "complaint"), [
    ([0, 1], r"one label for each of 3 users, got shape \(2,\)"), ([[0, 1, 2]], "one label"),
    ([0.0, np.nan, 1.0], "labels must not be missing .user number 1."),
])
def test_labels_that_cannot_be_used_are_refused(labels, complaint):
    with pytest.raises(ct.InvalidInput, match=complaint):
        check_labels(labels, 3)


def test_the_owner_of_a_row_is_the_position_of_its_name():
    assert rows_owner(["b", "a", "b"], ("a", "b")).tolist() == [1, 0, 1]
    assert rows_owner(np.array([7, 5]), (5, 6, 7)).tolist() == [2, 0]
    with pytest.raises(KeyError):
        rows_owner(["c"], ("a", "b"))


@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 2, 2)])
def test_sums_and_means_are_those_of_the_rows(shape):
    rows, labels = np.random.default_rng(0).standard_normal(shape), np.array([1, 0, 1, 3, 0, 1])
    for n_groups in (None, 4, 6):
        sums = group_sums(rows, labels, n_groups)
        assert sums.shape == (n_groups or 4, *shape[1:])
        for k in range(len(sums)):
            np.testing.assert_allclose(sums[k], rows[labels == k].sum(axis=0), atol=1e-14)
    if len(shape) == 2:
        means = group_means(rows, labels)
        for k in (0, 1, 3):
            np.testing.assert_allclose(means[k], rows[labels == k].mean(axis=0))
        assert not means[2].any()  # no row has this label
        assert np.abs(means - group_means(rows, labels[::-1])).max() > 0.1  # twin
