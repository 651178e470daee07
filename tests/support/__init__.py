"""Helpers that tests share; no test imports from another test. Importing them sets one thread per process.

Tests run in several processes on few cores, and threads of NumPy that wait for each other keep a core busy.
"""

import os

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
