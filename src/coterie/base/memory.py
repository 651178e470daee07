"""Memory that is free, asked for before much of it is taken, and memory that is kept."""

from __future__ import annotations

import contextlib
import os
import sys

import numpy as np

from coterie.base.errors import InvalidInput

_SMALL = 1 << 26  # bytes that are taken without asking
#: Numbers of glibc's `mallopt`, and values: arrays up to 32 MiB come from memory that the process
#: has, and up to 256 MiB of that stay with it.
_KEPT = ((-3, 1 << 25), (-1, 1 << 28))


def free_memory() -> float:
    """Bytes of memory that are free, as far as the system tells; inf where it does not."""
    try:
        # What the system could free at once counts as well.
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(1024.0 * float(line.split()[1]) for line in file
                        if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError):
        pass
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return np.inf


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
