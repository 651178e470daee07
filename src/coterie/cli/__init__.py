"""The `coterie` command."""

from coterie.cli.base import app, main, root  # isort: skip  (says what to install where typer is missing)
from coterie.cli import demo, federate

__all__ = ["app", "demo", "federate", "main", "root"]
