"""What is raised: one exception for every interrupt, with the best result so far."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path

import pytest

import coterie as ct
from coterie.errors import interruptible

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
