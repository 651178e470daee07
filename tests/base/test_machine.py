"""What the machine offers: threads, and a copy of the process that works beside this one."""

from __future__ import annotations

import os
import time
import warnings

import numpy as np
import pytest

import coterie as ct
from coterie.base.machine import begin_beside, n_threads, one_blas_thread, set_threads


@pytest.fixture(autouse=True)
def _threads_as_before():
    yield
    set_threads(None)


def test_a_copy_of_the_process_sends_its_parts_and_its_warnings():
    def work(parts):
        parts["thread count"] = n_threads()
        warnings.warn("too few rows", ct.CoterieWarning, stacklevel=1)
        parts["numbers"] = np.arange(3) + offset

    offset = 40
    set_threads(4)
    beside = begin_beside(work)
    assert n_threads() == 2  # the other two are lent
    assert beside.wait_for("numbers")
    assert beside.parts["numbers"].tolist() == [40, 41, 42]
    assert beside.parts["thread count"] == 2
    with pytest.warns(ct.CoterieWarning, match="too few rows"):
        beside.warn_again("numbers")
    beside.end()
    assert n_threads() == 4
    beside.end()  # a second time does nothing
    assert n_threads() == 4


def test_a_part_that_the_copy_cannot_compute_never_arrives():
    def fail(parts):
        parts["first"] = 1
        raise ZeroDivisionError

    set_threads(2)
    beside = begin_beside(fail)
    assert not beside.wait_for("second")
    assert beside.parts == {"first": 1}
    beside.end()


def test_a_copy_that_is_ended_is_gone():
    set_threads(2)
    beside = begin_beside(lambda parts: time.sleep(60))
    child = beside._child
    os.kill(child, 0)  # it is there
    beside.end()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert not beside.running


def test_there_is_no_copy_with_one_thread():
    set_threads(1)
    assert begin_beside(lambda parts: None) is None


def test_blas_has_one_thread_inside_and_its_own_number_outside():
    from threadpoolctl import threadpool_info

    def counts():
        return [each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"]

    before = counts()
    with one_blas_thread():
        assert set(counts()) == {1}
    assert counts() == before
