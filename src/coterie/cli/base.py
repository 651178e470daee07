"""The `coterie` command: what all commands share."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from importlib import import_module
from typing import Annotated, Any

import typer
import typer.main
from rich.console import Console
from typer.core import TyperGroup

from coterie import __version__
from coterie.base.errors import CoterieError, CoterieWarning, MissingExtra, NotConverged
from coterie.base.machine import keep_freed_memory

CODES = ("Exit codes: 0 done; 1 not solved to the tolerance; 2 input that cannot be used; 3 an "
         "extra is missing; 130 interrupted.")
#: Commands of `coterie.lab`, which nothing imports: each is loaded when it is called, or listed.
LAB = ("audit", "bench", "reproduce")


class Commands(TyperGroup):
    """The commands of this room, and those of the lab."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted({*super().list_commands(ctx), *LAB})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in LAB:
            return typer.main.get_command(import_module(f"coterie.lab.commands.{cmd_name}").app)
        return super().get_command(ctx, cmd_name)


app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False,
                  help="Personalised federated learning that finds its own groups, with a proof of "
                       "optimality.", epilog=CODES)
console, error = Console(), Console(stderr=True)
#: Where libraries look for their number of threads.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS",
                    "NUMBA_NUM_THREADS", "POLARS_MAX_THREADS")


def _version(wanted: bool) -> None:
    if wanted:
        console.print(f"coterie {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def root(version: Annotated[bool, typer.Option(
        "--version", callback=_version, is_eager=True,
        help="Print the version and stop.")] = False) -> None:
    pass


def be_quiet(quiet: bool) -> bool:
    """Whether results and progress are printed; warnings and errors always are. The option --quiet.
    """
    console.quiet = quiet
    return quiet


def limit_threads(most: int | None) -> int | None:
    """Use at most so many threads, here and in processes that are started from here. The option
    --threads.
    """
    from coterie.base.machine import set_threads

    set_threads(most)
    if most is not None:
        # Read by libraries that are loaded later.
        os.environ |= dict.fromkeys(THREAD_VARIABLES, str(most))
        from threadpoolctl import threadpool_limits

        threadpool_limits(most)  # those that are loaded
    return most


def main() -> None:
    """Run the command; errors that users can cause end in a sentence, never in a traceback."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    keep_freed_memory()
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
        error.print("Interrupted.")
        raise SystemExit(130) from None
    except OSError as problem:
        error.print(f"[bold red]coterie:[/] {plain(str(problem))}", soft_wrap=True, highlight=False)
        raise SystemExit(2) from None


def _unraisable(failure: Any) -> None:
    """Python drops an interrupt that arrives inside a destructor: send it again. Show everything
    else.
    """
    if failure.exc_type is KeyboardInterrupt:
        threading.Timer(0.01, signal.raise_signal, [signal.SIGINT]).start()
    else:
        sys.__unraisablehook__(failure)


def _show_warning(message: Warning | str, category: type[Warning], *_: object,
                  **__: object) -> None:
    """A warning as a sentence, without the line of source that raised it."""
    error.print(f"[yellow]coterie:[/] {plain(str(message))}", soft_wrap=True, highlight=False)


def plain(text: str) -> str:
    """Text without markup for rich."""
    from rich.markup import escape

    return escape(text)
