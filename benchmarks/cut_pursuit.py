"""Time cut-pursuit in a Python that has it: the package on PyPI needs NumPy 1, coterie needs NumPy
2.

    python benchmarks/cut_pursuit.py problem.npz answer.npz

`solvers.py` runs this; nothing of coterie is imported. Without arguments it reports whether the
package can be used.
"""

from __future__ import annotations

import sys
import time

import numpy as np

REPEATS = 5


def main() -> None:
    try:
        from pycut_pursuit.cp_prox_tv import cp_prox_tv
    except Exception as error:  # built for another NumPy, it can fail with more than ImportError
        print(f"pycut_pursuit cannot be imported (NumPy {np.__version__}): "
              f"{str(error).splitlines()[0]}")
        return
    if len(sys.argv) < 3:
        print("ready")
        return
    with np.load(sys.argv[1]) as given:
        points, edges, weights = given["points"], given["edges"], given["weights"]
    starts = np.searchsorted(edges[:, 0], np.arange(len(points) + 1)).astype(np.uint32)
    ends = np.ascontiguousarray(edges[:, 1].astype(np.uint32))
    times: list[float] = []
    while not times or (len(times) < REPEATS and sum(times) < 1.0):
        began = time.process_time()
        parts, values = cp_prox_tv(np.asfortranarray(points.T), starts, ends, edge_weights=weights,
                                   verbose=0,
                                   max_num_threads=1)[:2]
        times.append(time.process_time() - began)
    np.savez(sys.argv[2],
             models=np.ascontiguousarray(np.asarray(values).T[np.asarray(parts).ravel()]),
             seconds=min(times))


if __name__ == "__main__":
    main()
