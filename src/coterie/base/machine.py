"""What the machine offers: cores for threads, a copy of the process beside this one, and memory.

Threads: every part of the work is computed by the same code and written to its own place, so
results have the same bits with one thread and with many.

A copy of the process (a fork) has all data of this process without copying them, and computes what
this process would compute later, by the same code: results have the same bits with it and without.
It sends every finished part at once. If it fails, or there can be none, this process computes the
parts itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import warnings
from collections import UserDict
from collections.abc import Callable, Iterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from threading import Condition, Thread, Timer
from typing import TYPE_CHECKING, Any

import numpy as np

from coterie.base.errors import InvalidInput

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_most: int | None = None
_lent = 0  # threads that other work of this process uses meanwhile


def set_threads(most: int | None) -> None:
    """Use at most this many threads; None for one per core.

    Raises
    ------
    InvalidInput : a number below 1.

    Example
    -------
    >>> set_threads(1)
    >>> n_threads()
    1
    >>> set_threads(None)
    """
    global _most
    if most is not None and most < 1:
        raise InvalidInput(f"expected a number of threads, got {most!r}", remedy="Use 1 or more")
    _most = most


def lend_threads(n: int) -> None:
    """Use n threads less than before; n < 0 takes them back."""
    global _lent
    _lent += n


def n_threads() -> int:
    """The number of threads: as set, or by the variable OMP_NUM_THREADS, or one per core; less
    those that are lent.
    """
    return max(_all_threads() - _lent, 1)


def _all_threads() -> int:
    if _most is not None:
        return _most
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() and int(given) > 0 else usable_cores()


def usable_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_parts(work: Callable[[slice], None], n: int, size: int) -> None:
    """Call `work` for parts of at most `size` of n rows; it writes what it computes."""
    parts = [slice(start, min(start + size, n)) for start in range(0, n, max(size, 1))]
    if len(parts) < 2 or n_threads() < 2:
        for part in parts:
            work(part)
        return
    with ThreadPoolExecutor(n_threads(), thread_name_prefix="coterie") as pool:
        # With the floating point settings of this thread.
        futures = [pool.submit(copy_context().run, work, part) for part in parts]
        for future in futures:
            future.result()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Inside the block or the function decorated, BLAS uses one thread.

    Its own threads slow the many products of small matrices down, and would compete with those of
    `in_parts`.
    """
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1, "blas"):
        yield


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
        from multiprocessing.connection import Pipe

        receiving, sending = Pipe(duplex=False)
        parent = os.getpid()
        # About threads, which the copy does not use.
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
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


@contextmanager
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


class _Sent(UserDict[str, Any]):
    """Parts that are sent as soon as they are entered, with the warnings since the last one."""

    def __init__(self, sending: Connection, parent: int,
                 log: list[warnings.WarningMessage]) -> None:
        super().__init__()
        self.sending, self.parent, self.log = sending, parent, log

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
        with warnings.catch_warnings(record=True, action="always") as log:
            work(_Sent(sending, parent, log))
        status = 0
    finally:
        os._exit(status)


class OutOfTime(BaseException):
    """The time limit of a block is over; no `except Exception` takes it for a failure."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` inside the block once it has run so long, between two steps of Python.

    A compiled function is not interrupted, but what comes after it is.

    Example
    -------
    >>> import time
    >>> with time_limit(0.05):
    ...     for _ in range(1000):
    ...         time.sleep(0.01)
    Traceback (most recent call last):
        ...
    coterie.base.machine.OutOfTime
    """
    import ctypes

    thread, lock, done = threading.get_ident(), threading.Lock(), False

    def interrupt() -> None:
        with lock:
            if not done:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread),
                                                           ctypes.py_object(OutOfTime))

    timer = Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            done = True
        timer.cancel()


_SMALL = 1 << 26  # bytes that are taken without asking
#: Numbers of glibc's `mallopt`, and values: arrays up to 32 MiB come from memory that the process
#: has, and up to 256 MiB of that stay with it.
_KEPT = ((-3, 1 << 25), (-1, 1 << 28))


def free_memory() -> float:
    """Bytes of memory that are free, as far as the system tells; inf where it does not."""
    # What the system could free at once counts as well.
    with (contextlib.suppress(OSError, StopIteration, ValueError),
          open("/proc/meminfo", encoding="ascii") as file):
        return next(1024.0 * float(line.split()[1]) for line in file
                    if line.startswith("MemAvailable"))
    free = memory_of("SC_AVPHYS_PAGES")
    return np.inf if free is None else free


def memory_of(pages: str) -> float | None:
    """Bytes of the pages that the system counts by this name; None where it does not."""
    with contextlib.suppress(AttributeError, ValueError, OSError):
        return float(os.sysconf(pages)) * os.sysconf("SC_PAGE_SIZE")
    return None


def require_memory(needed: float, purpose: str, remedy: str) -> None:
    """Raise InvalidInput where more is needed than there is.

    Parameters
    ----------
    needed : bytes.
    purpose : what they are for, as the subject of a sentence.
    remedy : what to do instead.
    """
    if needed > _SMALL and needed > free_memory():
        raise InvalidInput(f"{purpose} need {needed / 2**30:.1f} GiB, more than there is",
                           remedy=remedy)


def keep_freed_memory() -> None:
    """Keep memory of freed arrays for the next ones: a command that computes on many arrays is a
    tenth faster so.

    Otherwise every large array is new memory, which the system has to clear. Without effect where
    the C library is another one than glibc.
    """
    if sys.platform == "linux":
        import ctypes

        with contextlib.suppress(OSError, AttributeError):
            for number, value in _KEPT:
                ctypes.CDLL(None).mallopt(number, value)
