"""A run as one web page that works from disk: path, tree, map, users, scores, coefficients and certificate."""

from coterie.report.gather import gather
from coterie.report.page import render, write

__all__ = ["gather", "render", "write"]
