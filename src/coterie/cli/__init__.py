"""The `coterie` command: one file per command; `base` and `options` hold what they share."""

from coterie.cli import (
           certify,
           demo,
           doctor,
           federate,
           fit,
           ledger,
           membership,
           path,
           predict,
           report,
)
from coterie.cli.base import app, main, root

__all__ = ["app", "certify", "demo", "doctor", "federate", "fit", "ledger", "main", "membership",
           "path", "predict", "report", "root"]
