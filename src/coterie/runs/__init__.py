"""Run folders: written, read and used again."""

from coterie.runs.folder import check_free, read, table, write
from coterie.runs.from_table import fit_table
from coterie.runs.load import Run, load_run
from coterie.runs.save import save_run

__all__ = ["Run", "check_free", "fit_table", "load_run", "read", "save_run", "table", "write"]
