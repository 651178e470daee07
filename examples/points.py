"""Convex clustering of points: the number of clusters, how they merge, and a certificate.

    python examples/points.py [FOLDER]      # writes tree.png to FOLDER

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
    clustering = ConvexClustering(standardize=True).fit(iris.data)
    print(f"{clustering.n_clusters_} clusters of "
          f"{sorted(np.bincount(clustering.labels_).tolist())} flowers")
    print(f"certified: {clustering.gap_ < 1e-6}")
    print(clustering.fit_.why)
    setosa = iris.target == 0
    print(f"setosa against the others: {adjusted_rand_score(setosa, clustering.labels_):.2f} "
          "(adjusted Rand index)")

    path = clustering.path_
    print("clusters along lam:", " ".join(map(str, path.n_clusters)))
    figure = Path(folder) / "tree.png"
    plots.tree(path).savefig(figure)
    print(f"Merge tree: {figure}")


if __name__ == "__main__":
    main(*sys.argv[1:])
