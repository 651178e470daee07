"""Graphs over users: which pairs are compared, and with which weights."""

from coterie.graph.graph import Graph

__all__ = ["Graph"]
