"""The `coterie` command: a file for commands that belong together; `base` holds what they share."""

from coterie.cli import demo, doctor, federate, fit, operate
from coterie.cli.base import app, main, root

__all__ = ["app", "demo", "doctor", "federate", "fit", "main", "operate", "root"]
