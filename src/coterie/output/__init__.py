"""What is written and drawn: run folders, the report, figures."""

from coterie.fitting.result import WRITERS
from coterie.output.runs.save import save_report, save_run

WRITERS |= {"save": save_run, "report": save_report}
