"""What is raised: one exception for every interrupt, with the best result so far."""

from __future__ import annotations

import ast
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest
from support.problems import graph_for, problem_for

import coterie as ct
from coterie.base.errors import interruptible

SOURCE = Path(ct.__file__).parent


def test_an_interrupt_is_not_an_error_and_says_what_it_carries():
    assert issubclass(ct.Interrupted, KeyboardInterrupt)
    assert not issubclass(ct.Interrupted, Exception)  # `except Exception` must not swallow Ctrl-C
    assert "attribute `best`" in str(ct.Interrupted([]))
    assert "before there was a result" in str(ct.Interrupted())
    assert pickle.loads(pickle.dumps(ct.Interrupted([3]))).best == [3]


def test_the_outer_function_s_result_is_carried():
    results = []

    @interruptible(lambda: tuple(results))
    def outer():
        results.append(1)
        with interruptible(lambda: "inner"):
            raise KeyboardInterrupt

    with pytest.raises(ct.Interrupted) as caught:
        outer()
    assert caught.value.best == (1,)
    assert caught.value.__cause__.best == "inner"
    with pytest.raises(ValueError, match="kept"), interruptible():
        raise ValueError("kept")


class _Stopping:
    """A solver that is interrupted before it has a point, or with something that is no Point."""

    def __init__(self, stop):
        self.stop = stop

    def run(self, problem, tol, start=None, progress=None):
        raise self.stop


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), ct.Interrupted(), ct.Interrupted("no point")])
def test_a_solver_without_a_point_leaves_nothing(stop):
    problem = ct.Problem(ct.Users.from_arrays([[1.0], [2.0]]), ct.SquaredDistance(), lam=0.1)
    with pytest.raises(ct.Interrupted) as caught:
        ct.solve(problem, solver=_Stopping(stop))
    assert caught.value.best is None


def bare_interrupts(text: str) -> list[int]:
    """Lines that raise a KeyboardInterrupt which carries nothing."""
    raised = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Raise) and node.exc is not None]
    return sorted(node.lineno for node in raised if ast.unparse(node.exc).split("(")[0] == "KeyboardInterrupt")


def test_nothing_raises_a_bare_interrupt():
    handlers = {"cli/base.py"}  # the signal handler, which is what Ctrl-C is
    assert bare_interrupts("def f():\n    raise KeyboardInterrupt\n\nraise KeyboardInterrupt('x') from None") == [2, 4]
    rooms = {str(path.relative_to(SOURCE)): bare_interrupts(path.read_text()) for path in SOURCE.rglob("*.py")}
    assert {name for name, lines in rooms.items() if lines} - handlers <= {"cli/fit.py"}


# ---- warnings of results that did not reach their tolerance


def warned(work) -> list[warnings.WarningMessage]:
    """The convergence warnings of this work; others are errors."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("error")
        warnings.simplefilter("always", ct.ConvergenceWarning)
        work()
    return caught


def hard():
    return problem_for("logistic", lam=0.02, n_users=20, samples=20, graph=graph_for("knn", 20))


@pytest.mark.parametrize("tol", [1e-16, 1e-8])
def test_a_solve_warns_exactly_where_it_did_not_converge(tol):
    solutions = []
    caught = warned(lambda: solutions.append(ct.solve(hard(), tol=tol, solver=ct.Fast(max_iter=100))))
    solution = solutions[0]
    assert (solution.status is ct.Status.CONVERGED) == (tol == 1e-8)
    assert len(caught) == (tol == 1e-16)
    for warning in caught:
        assert warning.filename == __file__  # the caller's line, not one of coterie
        assert f"relative gap {solution.gap:.1e} at tol = 1e-16" in str(warning.message)
        assert solution.status.value in str(warning.message)


def test_a_path_warns_once():
    lams, short = np.geomspace(0.005, 0.1, 6), ct.Fast(max_iter=1)
    caught = warned(lambda: ct.solve_path(hard(), lams, tol=1e-16, solver=short))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert "of 6 lams did not reach tol = 1e-16" in str(caught[0].message)
    path = ct.solve_path(hard(), lams, tol=1e-6)
    assert not warned(lambda: ct.solve_path(hard(), lams, tol=1e-6))
    rough = ct.Path(problem=path.problem, solutions=path.solutions, tol=1e-16, solver=short)
    assert len(warned(lambda: rough.at(0.03))) == 1
    first, second = next((i, j) for i in range(20) for j in range(i) if path[-1].labels[i] == path[-1].labels[j])
    assert len(warned(lambda: rough.merge_point(first, second, rtol=0.1))) == 1


def test_an_interrupt_does_not_warn():
    def stop(record):
        raise KeyboardInterrupt

    def work():
        with pytest.raises(ct.Interrupted):
            ct.solve(hard(), tol=1e-14, progress=stop)

    assert not warned(work)


def test_building_blocks_do_not_warn():
    """Inside, some ask for more digits than there are; what they return says itself how accurate it is."""
    problem = hard()
    assert not warned(lambda: ct.lam_max(problem, rtol=1e-12))
    assert not warned(lambda: ct.recovery_bounds(problem, np.arange(20) % 3))
