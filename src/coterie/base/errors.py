"""What coterie raises and warns with.

Every message says what was expected, what came, where (which user, row, column or edge), and what
to do next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class CoterieError(Exception):
    """Anything coterie raises on purpose."""


#: Stands for the row in the texts of an `InvalidInput` that has one.
ROW = "\0row\0"


class InvalidInput(CoterieError, ValueError):
    """Data or settings that cannot be worked with.

    Parameters
    ----------
    problem : what was expected and what came.
    where : which user, row, column or edge; empty when the whole input is meant.
    remedy : the next thing to do.
    row : the row that is meant, from 0 as in Python; it is shown where the texts have `ROW`.
    """

    def __init__(self, problem: str, *, where: str = "", remedy: str = "",
                 row: int | None = None) -> None:
        self.row, self._texts = row, (problem, where)
        self.problem, self.where, self.remedy = problem, where, remedy
        self._show(f"row {row}")

    def _show(self, row: str) -> None:
        self.problem, self.where = (text.replace(ROW, row) for text in self._texts)
        self.args = (_sentences(f"{self.problem} ({self.where})" if self.where else self.problem,
                                self.remedy),)


def require(good: object, problem: str, remedy: str = "") -> None:
    """Refuse what cannot be worked with.

    Raises
    ------
    InvalidInput : with this problem and remedy, unless `good`.
    """
    if not good:
        raise InvalidInput(problem, remedy=remedy)


@contextmanager
def located(place: Callable[[int], str] | None) -> Iterator[None]:
    """Say where the row of an `InvalidInput` is in a file.

    Parameters
    ----------
    place : the words for a row, such as "line 17 of shops.csv" for row 15; None where the data are
        no file.

    Example
    -------
    >>> with located(lambda row: f"line {row + 2} of shops.csv"):
    ...     raise InvalidInput("A user name is missing", where=ROW, row=15)
    Traceback (most recent call last):
        ...
    coterie.base.errors.InvalidInput: A user name is missing (line 17 of shops.csv).
    """
    try:
        yield
    except InvalidInput as problem:
        if problem.row is not None and place is not None:
            problem._show(place(problem.row))
            problem.row = None  # it is shown as it is in the file
        raise


class Incompatible(CoterieError, TypeError):
    """Two parts that do not fit together, such as a solver and a loss without what the solver
    needs.
    """


class NotConverged(CoterieError, RuntimeError):
    """A computation that others depend on did not reach its tolerance."""


class Refused(CoterieError):
    """What the owner of a node does not allow: a question, or a release beyond the privacy budget.

    Parameters
    ----------
    reason : what is refused and why; it is sent to the server, so it says nothing of the rows.
    remedy : the next thing to do.
    """

    def __init__(self, reason: str, *, remedy: str = "") -> None:
        self.reason, self.remedy = reason, remedy
        super().__init__(_sentences(reason, remedy))


class MissingExtra(CoterieError, ImportError):
    """A library of an optional extra is not installed."""

    def __init__(self, library: str, extra: str, purpose: str) -> None:
        super().__init__(_sentences(f"{purpose} needs {library}, which is not installed",
                                    f"Run: pip install 'coterie[{extra}]'"))


@contextmanager
def require_extra(library: str, extra: str, purpose: str) -> Iterator[None]:
    """Say which extra has a library, if it cannot be imported inside the block.

    Raises
    ------
    MissingExtra : the library is not installed.
    """
    try:
        yield
    except ImportError as error:
        raise MissingExtra(library, extra, purpose) from error


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with the best result so far.

    It is a KeyboardInterrupt, so `except Exception` does not catch it.

    Parameters
    ----------
    best : what the interrupted function would have returned, the best result so far; None where
        there was nothing yet. `solve` gives a certified Solution, `solve_path` a Path of the points
        that were finished.

    Example
    -------
    >>> import coterie as ct
    >>> problem = ct.Problem(ct.Users.from_arrays([[0.0], [1.0]]), ct.SquaredDistance(), lam=0.1)
    >>> try:
    ...     solution = ct.solve(problem)
    ... except ct.Interrupted as stop:
    ...     solution = stop.best
    """

    def __init__(self, best: Any = None) -> None:
        super().__init__(best)
        self.best = best

    def __str__(self) -> str:
        return ("Interrupted before there was a result." if self.best is None else
                "Interrupted: the best result so far is the attribute `best` of this exception.")


@contextmanager
def interruptible(best: Callable[[], Any] = lambda: None) -> Iterator[None]:
    """Turn Ctrl-C inside the block, or inside the function decorated, into `Interrupted(best())`.

    A function that calls others uses it so that `best` is its own result, not that of the function
    it called.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        raise Interrupted(best()) from stop


class CoterieWarning(UserWarning):
    """Input that works but that its owner should know about."""


class ConvergenceWarning(CoterieWarning):
    """A result that did not reach its tolerance; its certificate says how accurate it is."""


def _sentences(*parts: str) -> str:
    complete = (".", "!", "?", "]'")  # the last ends an install command, to be copied as it is
    return " ".join(part if part.endswith(complete) else part + "." for part in parts if part)
