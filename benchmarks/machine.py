"""What a timing depends on, said before it: `python benchmarks/machine.py`. The other benchmarks
print it first.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import coterie


def facts() -> str:
    """Versions and processors, in one line."""
    threads = os.environ.get("OMP_NUM_THREADS", "not limited")
    return (f"Python {platform.python_version()}, NumPy {np.__version__}, coterie "
            f"{coterie.__version__}; "
            f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, BLAS threads: "
            f"{threads}")


def best_of(repeats: int, work: Callable[[], Any]) -> float:
    """Seconds of the fastest of several runs: the one least disturbed by others."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


if __name__ == "__main__":
    print(facts())
