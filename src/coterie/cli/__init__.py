"""The `coterie` command: one file per command; `base` and `options` hold what they share."""

from coterie.cli.base import app, main, root  # isort: skip  (says what to install where typer is missing)
from coterie.cli import (
    audit,
    bench,
    certify,
    demo,
    federate,
    fit,
    ledger,
    membership,
    path,
    predict,
    report,
    reproduce,
)

__all__ = ["app", "audit", "bench", "certify", "demo", "federate", "fit", "ledger", "main", "membership", "path",
           "predict", "report", "reproduce", "root"]
