"""Run folders: written, read and used again."""

from coterie.output.runs.from_table import fit_table
from coterie.output.runs.load import Run, load_run, read
from coterie.output.runs.save import check_free, save_run, table, write

__all__ = ["Run", "check_free", "fit_table", "load_run", "read", "save_run", "table", "write"]
