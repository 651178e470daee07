"""The `coterie` command: what its parts share."""

from __future__ import annotations

import signal
import sys
import warnings
from typing import Annotated, Any

from coterie import __version__
from coterie.errors import CoterieError, CoterieWarning, MissingExtra, NotConverged

try:
    import typer
    from rich.console import Console
except ImportError:  # the core installs without them
    print(MissingExtra("typer and rich", "cli", "The coterie command"), file=sys.stderr)
    raise SystemExit(3) from None

CODES = ("Exit codes: 0 done; 1 not solved to the tolerance; 2 input that cannot be used; 3 an extra is missing; "
         "130 interrupted.")
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="Personalised federated learning that finds its own groups, with a proof of optimality.",
                  epilog=CODES)
console, error = Console(), Console(stderr=True)
stops: list[int] = []  # interrupts so far: solvers answer one with their best point, and what comes after is left out


def _version(wanted: bool) -> None:
    if wanted:
        console.print(f"coterie {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def root(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True,
                                               help="Print the version and stop.")] = False) -> None:
    pass


def main() -> None:
    """Run the command; what users can cause ends in a sentence, never in a traceback."""
    signal.signal(signal.SIGINT, _stop)
    warnings.showwarning = _show_warning
    sys.unraisablehook = _unraisable
    warnings.simplefilter("always", CoterieWarning)
    try:
        app()
    except CoterieError as problem:
        error.print(f"[bold red]coterie:[/] {plain(str(problem))}", soft_wrap=True, highlight=False)
        codes = {MissingExtra: 3, NotConverged: 1}
        raise SystemExit(codes.get(type(problem), 2)) from None
    except KeyboardInterrupt:
        error.print("coterie: interrupted.")
        raise SystemExit(130) from None
    except OSError as problem:
        error.print(f"[bold red]coterie:[/] {plain(str(problem))}", soft_wrap=True, highlight=False)
        raise SystemExit(2) from None


def _stop(number: int, _: object) -> None:
    stops.append(number)
    raise KeyboardInterrupt


def _unraisable(broken: Any) -> None:
    """An interrupt that comes inside a destructor is counted all the same; everything else is told."""
    if broken.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(broken)


def _show_warning(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    """A warning as a sentence, without the place in the source that raised it."""
    error.print(f"[yellow]coterie:[/] {plain(str(message))}", soft_wrap=True, highlight=False)


def plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)
