"""A run as one web page that works from disk, as `coterie.output.report` has it."""

from coterie.output.report import gather, render, write

__all__ = ["gather", "render", "write"]
