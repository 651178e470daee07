"""Figures of results, as `coterie.output.plots` has them."""

from coterie.output.plots import (
    View,
    branches,
    clusters,
    coefficients,
    gaps,
    longest,
    model_map,
    project,
    rounds,
    scores,
    separator_ends,
    separators,
    tree,
)

__all__ = [
    "View", "branches", "clusters", "coefficients", "gaps", "longest", "model_map", "project",
           "rounds", "scores",
    "separator_ends", "separators", "tree",
]
