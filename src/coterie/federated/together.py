"""Several jobs that ask users, in the same rounds: where all of them wait for answers, questions
travel together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from coterie.federated.protocol.messages import PAIRED
from coterie.federated.session import Session

# Where jobs ask different questions, the earlier in this list goes.
_FIRST = ("slopes", "evidence", "settle", "around")


class _Question(NamedTuple):
    kind: str
    dim: int
    arrays: dict[str, Any]
    shared: dict[str, Any]


class _CancelledError(Exception):
    """Another job has failed, or the run was interrupted."""


class Together:
    """Runs up to two jobs, each in a thread of its own; only the calling thread asks users.

    Parameters
    ----------
    asker : asks users.
    """

    def __init__(self, asker: Session) -> None:
        self.asker, self.turn = asker, threading.Condition()
        self.waiting: dict[int, _Question] = {}
        self.answers: dict[int, Any] = {}
        self.results: dict[int, Any] = {}
        self.failed: BaseException | None = None
        self.jobs: dict[threading.Thread, int] = {}

    def ask(self, kind: str, dim: int, arrays: dict[str, Any], shared: dict[str, Any]) -> Any:
        """The answers to a question: at once outside of `run`, and when all jobs wait inside of it.
        """
        number = self.jobs.get(threading.current_thread())
        if number is None:
            return self.asker.ask(kind, dim, arrays=arrays, shared=shared).arrays
        with self.turn:
            self.waiting[number] = _Question(kind, dim, arrays, shared)
            self.turn.notify_all()
            self.turn.wait_for(lambda: number in self.answers or self.failed is not None)
            if self.failed is not None:
                raise _CancelledError
            return self.answers.pop(number)

    def run(self, *jobs: Callable[[], Any]) -> list[Any]:
        """The results of the jobs; what one of them raises is raised here."""
        if len(jobs) == 1:
            return [jobs[0]()]
        self.waiting, self.answers, self.results, self.failed = {}, {}, {}, None
        threads = [threading.Thread(target=self._work, args=(number, job), daemon=True)
                   for number, job in enumerate(jobs)]
        self.jobs = {thread: number for number, thread in enumerate(threads)}
        for thread in threads:
            thread.start()
        try:
            while True:
                with self.turn:
                    self.turn.wait_for(lambda: self.failed is not None or
                                       len(self.waiting) + len(self.results) == len(jobs))
                    if self.failed is not None:
                        raise self.failed
                    if not self.waiting:
                        return [self.results[number] for number in range(len(jobs))]
                    asked = self._next()
                answers = self._send(asked)
                with self.turn:
                    self.answers |= answers
                    self.turn.notify_all()
        except BaseException as error:
            with self.turn:
                self.failed = self.failed or error
                self.turn.notify_all()
            raise
        finally:
            for thread in threads:
                thread.join()
            self.jobs = {}

    def _next(self) -> dict[int, _Question]:
        """The questions of the next round: all of one kind."""
        kinds = [question.kind for question in self.waiting.values()]
        kind = min(kinds, key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
        chosen = {number: question for number,
                  question in sorted(self.waiting.items()) if question.kind == kind}
        if kind not in PAIRED:
            chosen = dict(list(chosen.items())[:1])
        for number in chosen:
            del self.waiting[number]
        return chosen

    def _send(self, asked: dict[int, _Question]) -> dict[int, Any]:
        """Ask one or two questions in one round."""
        (first, one), *rest = asked.items()
        arrays, shared = dict(one.arrays), dict(one.shared)
        for _, other in rest:
            arrays |= {f"{name}2": rows for name, rows in other.arrays.items()}
            shared |= {f"{name}2": value for name, value in other.shared.items()}
        replies = self.asker.ask(one.kind, one.dim, arrays=arrays, shared=shared).arrays
        answers = {first: {name: rows for name, rows in replies.items() if not name.endswith("2")
                           or name == "m2"}}
        for number, _ in rest:
            answers[number] = {name.removesuffix("2"): rows for name,
                               rows in replies.items() if name.endswith("2")}
        return answers

    def _work(self, number: int, job: Callable[[], Any]) -> None:
        try:
            result = job()
            with self.turn:
                self.results[number] = result
                self.turn.notify_all()
        except _CancelledError:
            return
        except BaseException as error:  # raised again by `run`
            with self.turn:
                self.failed = self.failed or error
                self.turn.notify_all()
