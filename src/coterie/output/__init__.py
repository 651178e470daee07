"""What is written and drawn: run folders, the report, figures."""

from coterie.fitting.estimate import WRITERS
from coterie.output.runs.save import save_report, save_run

WRITERS |= {"save": save_run, "report": save_report}
