"""The `coterie` command."""

from coterie.cli.base import app, main, root  # isort: skip  (says what to install where typer is missing)
from coterie.cli import bench, demo, federate, fit, reproduce, use

__all__ = ["app", "bench", "demo", "federate", "fit", "main", "reproduce", "root", "use"]
