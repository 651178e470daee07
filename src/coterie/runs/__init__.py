"""A run on disk: written, read and used again."""

from coterie.runs.folder import TAKEN, coefficient_names, distinct, read, table, write

__all__ = ["TAKEN", "coefficient_names", "distinct", "read", "table", "write"]
