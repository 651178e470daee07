"""Figures of results: each function takes a result and returns a Matplotlib figure.

    plots.tree(fitted).savefig("tree.pdf")

A result is a `Fit`, a `Path` or a `Solution`; `View` is the common form of all three.
"""

from coterie.output.plots.along import curves
from coterie.output.plots.base import View, branches, longest, project, separator_ends
from coterie.output.plots.figures import (
    clusters,
    coefficients,
    gaps,
    model_map,
    rounds,
    scores,
    separators,
    tree,
)

__all__ = ["View", "branches", "clusters", "coefficients", "curves", "gaps", "longest",
           "model_map", "project", "rounds", "scores", "separator_ends", "separators", "tree"]
