"""Work on parts of arrays, in as many threads as there are cores.

Every part is computed by the same code and written to its own place, whatever the number of threads. So results have
the same bits with one thread and with many.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import cache
from threading import Thread

from coterie.errors import InvalidInput

_most: int | None = None


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


def n_threads() -> int:
    """The number of threads: as set, or by the variable OMP_NUM_THREADS, or one per core that may be used."""
    if _most is not None:
        return _most
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_parts(work: Callable[[slice], None], n: int, size: int) -> None:
    """Call `work` for parts of at most `size` of n rows; it writes what it computes."""
    parts = [slice(start, min(start + size, n)) for start in range(0, n, max(size, 1))]
    if len(parts) < 2 or n_threads() < 2:
        for part in parts:
            work(part)
        return
    contexts = [copy_context() for _ in parts]  # with the floating point settings of this thread
    for future in [_pool(n_threads()).submit(context.run, work, part)
                   for context, part in zip(contexts, parts, strict=True)]:
        future.result()


def in_background(work: Callable[[], None]) -> Callable[[], None]:
    """Begin the work in a thread of its own; the function returned waits for its end, and raises what it raised.

    With one thread nothing is begun: whoever needs the result computes it then. An interrupt does not wait for the end.
    """
    if n_threads() < 2:
        return lambda: None
    raised, context = list[BaseException](), copy_context()

    def run() -> None:
        try:
            context.run(work)
        except BaseException as error:
            raised.append(error)

    thread = Thread(target=run, name="coterie-ahead", daemon=True)
    thread.start()

    def wait() -> None:
        thread.join()
        if raised:
            raise raised[0]

    return wait


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Inside the block or the function decorated, BLAS uses one thread.

    Its own threads slow the many products of small matrices down, and would compete with those of `in_parts`.
    """
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1, "blas"):
        yield


@cache
def _pool(n: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(n, thread_name_prefix="coterie")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not live on in a copy of the process
