"""Work on parts of arrays, in as many threads as there are cores.

Every part is computed by the same code and written to its own place, whatever the number of
threads. So results have the same bits with one thread and with many.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import cache

from coterie.base.errors import InvalidInput

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


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Inside the block or the function decorated, BLAS uses one thread.

    Its own threads slow the many products of small matrices down, and would compete with those of
    `in_parts`.
    """
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1, "blas"):
        yield


@cache
def _pool(n: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(n, thread_name_prefix="coterie")


if hasattr(os, "register_at_fork"):
    # Threads do not live on in a copy of the process.
    os.register_at_fork(after_in_child=_pool.cache_clear)
