"""A run as one web page that works from disk: path, tree, map, users, scores, coefficients and
certificate.
"""

from coterie.output.report.gather import gather
from coterie.output.report.page import render, write

__all__ = ["gather", "render", "write"]
