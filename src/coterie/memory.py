"""Memory that is free, asked for before much of it is taken."""

from __future__ import annotations

import os

import numpy as np

from coterie.errors import InvalidInput

_SMALL = 1 << 26  # bytes that are taken without asking


def free_memory() -> float:
    """Bytes of memory that are free, as far as the system tells; inf where it does not."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:  # what the system could free at once counts as well
            return next(1024.0 * float(line.split()[1]) for line in file if line.startswith("MemAvailable"))
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
        raise InvalidInput(f"{purpose} need {needed / 2**30:.1f} GiB, more than there is", remedy=remedy)
