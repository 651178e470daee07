"""Work that a copy of this process does, on a core that is free.

The copy (a fork) has all data of this process without copying them, and computes what this process
would compute later, by the same code: results have the same bits with it and without. It sends
every finished part at once. If it fails, or there can be none, this process computes the parts
itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from multiprocessing.connection import Connection, Pipe
from threading import Condition, Thread
from typing import Any

from coterie.base.threads import lend_threads, n_threads, set_threads

#: Libraries with threads of their own that a copy of the process would wait for.
_NOT_COPIED = {"grpc", "ray"}


class Beside:
    """Parts that a copy of the process computes.

    Parameters
    ----------
    work : computes the parts and enters them, one after the other, into the mapping that it is
        given.
    threads : how many threads it uses; this process uses as many less meanwhile.

    Attributes
    ----------
    parts, warned : the parts that have arrived, and the warnings of each.
    running : whether more can arrive.
    """

    def __init__(self, work: Callable[[MutableMapping[str, Any]], None], threads: int) -> None:
        self.parts: dict[str, Any] = {}
        self.warned: dict[str, list[Warning]] = {}
        self.running, self._changed, self._threads, self._child = True, Condition(), threads, 0
        try:
            # So that the copy never answers one in the place of this process.
            with _interrupts_later():
                self._begin(work)
        except BaseException:
            self.end()
            raise

    def _begin(self, work: Callable[[MutableMapping[str, Any]], None]) -> None:
        receiving, sending = Pipe(duplex=False)
        parent = os.getpid()
        with warnings.catch_warnings():
            # About threads, which the copy does not use.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            receiving.close()
            _serve(work, sending, parent, self._threads)
        self._reader = Thread(target=self._read, args=(receiving,), name="coterie-beside",
                              daemon=True)
        self._child = child
        lend_threads(self._threads)
        sending.close()
        self._reader.start()

    def _read(self, receiving: Connection) -> None:
        # Until the copy ends, maybe in the middle of a part.
        with receiving, contextlib.suppress(EOFError, OSError):
            while True:
                name, value, warned = receiving.recv()
                with self._changed:
                    self.parts[name], self.warned[name] = value, warned
                    self._changed.notify_all()
        with self._changed:
            self.running = False
            self._changed.notify_all()

    def wait_for(self, name: str) -> bool:
        """Wait until this part has arrived; False if it never will."""
        with self._changed:
            self._changed.wait_for(lambda: name in self.parts or not self.running)
            return name in self.parts

    def warn_again(self, name: str) -> None:
        """Warn here of what the copy warned of while it computed this part."""
        for warning in self.warned.pop(name, []):
            warnings.warn(warning, stacklevel=3)

    def end(self) -> None:
        """End the copy; parts that have arrived stay."""
        if self._child:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._child, 0)
            self._child = 0
            self._reader.join()
            lend_threads(-self._threads)


@contextlib.contextmanager
def _interrupts_later() -> Iterator[None]:
    """Ctrl-C inside the block counts after it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_beside(work: Callable[[MutableMapping[str, Any]], None]) -> Beside | None:
    """Begin the work in a copy of this process; None where there is one core, or no copy can be
    made safely.
    """
    threads = n_threads() // 2
    if threads < 1 or sys.platform != "linux" or _NOT_COPIED & sys.modules.keys():
        return None
    try:
        return Beside(work, threads)
    except OSError:  # no memory or no process for it
        return None


class _Sent(dict[str, Any]):
    """Parts that are sent as soon as they are entered, with the warnings since the last one."""

    def __init__(self, sending: Connection, parent: int,
                 log: list[warnings.WarningMessage]) -> None:
        super().__init__()
        self.sending, self.parent, self.log = sending, parent, log

    def update(self, *given: Any, **named: Any) -> None:
        for name, value in dict(*given, **named).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if os.getppid() != self.parent:
            raise ProcessLookupError("nobody waits for this part")
        super().__setitem__(name, value)
        self.sending.send((name, value, [entry.message for entry in self.log]))
        self.log.clear()


def _serve(work: Callable[[MutableMapping[str, Any]], None], sending: Connection, parent: int,
           threads: int) -> None:
    """What the copy does, and its end; nothing of this process's own end (buffers, handlers)
    happens there.
    """
    status = 1
    try:
        # Ctrl-C is for the process that was copied, which ends this one.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        set_threads(threads)
        with warnings.catch_warnings(record=True) as log:
            warnings.simplefilter("always")
            work(_Sent(sending, parent, log))
        status = 0
    finally:
        os._exit(status)
