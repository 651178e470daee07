"""Convex clustering of points: how many clusters there are, how they merge, and a proof.

    python examples/points.py [FOLDER]      # writes tree.png there

The measurements of 150 iris flowers, without their species.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_iris
from sklearn.metrics import adjusted_rand_score

from coterie import plots
from coterie.estimators import ConvexClustering


def main(folder: str = ".") -> None:
    iris = load_iris()
    found = ConvexClustering(standardize=True).fit(iris.data)
    print(f"{found.n_clusters_} clusters of {sorted(np.bincount(found.labels_).tolist())} flowers")
    print(f"certified: {found.gap_ < 1e-6}")
    print(found.fit_.why)
    setosa = iris.target == 0
    print(f"setosa against the rest: {adjusted_rand_score(setosa, found.labels_):.2f} (adjusted Rand index)")

    path = found.path_
    print("clusters along lam:", " ".join(map(str, path.n_clusters)))
    picture = Path(folder) / "tree.png"
    plots.tree(path).savefig(picture)
    print(f"The merge tree: {picture}")


if __name__ == "__main__":
    main(*sys.argv[1:])
