"""Figures of results: each function takes one and returns a Matplotlib figure.

    plots.tree(fitted).savefig("tree.pdf")

A result is a `Fit`, a `Path` or a `Solution`; `View` is what all three have in common.
"""

from coterie.plots.data import View, branches, longest, project, separator_ends
from coterie.plots.figures import (
    _figure,
    clusters,
    coefficients,
    gaps,
    model_map,
    rounds,
    scores,
    separators,
    tree,
)

__all__ = [
    "View", "_figure", "branches", "clusters", "coefficients", "gaps", "longest", "model_map", "project", "rounds",
    "scores", "separator_ends", "separators", "tree",
]
