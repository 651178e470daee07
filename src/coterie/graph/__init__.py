"""Who is joined to whom, and how strongly."""

from coterie.graph.graph import Graph

__all__ = ["Graph"]
