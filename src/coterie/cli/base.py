"""The `coterie` command: what all commands share, and options of several of them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.main
from rich.console import Console
from rich.table import Table as Grid
from typer.core import TyperGroup

from coterie import __version__
from coterie.base import errors
from coterie.base.errors import InvalidInput
from coterie.base.machine import keep_freed_memory, set_threads
from coterie.data.encoding import TASKS
from coterie.data.validation import split_names as split_names
from coterie.losses import LOSSES
from coterie.problem.weights import KINDS

CODES = ("Exit codes: 0 done; 1 not solved to the tolerance; 2 input that cannot be used; 3 an "
         "extra is missing; 130 interrupted.")
#: Commands of `coterie.lab`, which nothing imports: each is loaded when it is called, or listed.
LAB = ("audit", "bench", "reproduce")


#: Names that options had, and have now.
_OLDER = {"--most": "--max-groups"}


class Commands(TyperGroup):
    """The commands of this room, and those of the lab."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = (arg.partition("=") for arg in args)
        return super().parse_args(ctx, [_OLDER.get(name, name) + sign + value
                                        for name, sign, value in named])

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted({*super().list_commands(ctx), *LAB})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in LAB:
            return typer.main.get_command(getattr(import_module("coterie.lab.commands"), cmd_name))
        return super().get_command(ctx, cmd_name)


Arg, Opt = typer.Argument, typer.Option
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


_ShowVersion = Annotated[bool, Opt("--version", callback=_version, is_eager=True,
                                   help="Print the version and stop.")]


@app.callback()
def root(version: _ShowVersion = False) -> None:
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
    warnings.simplefilter("always", errors.CoterieWarning)
    try:
        app()
    except (errors.CoterieError, OSError) as problem:
        error.print(f"[bold red]coterie:[/] {plain(str(problem))}", soft_wrap=True, highlight=False)
        codes = {errors.MissingExtra: 3, errors.NotConverged: 1}
        raise SystemExit(codes.get(type(problem), 2)) from None
    except (MemoryError, RecursionError) as problem:
        what = "memory does not suffice" if isinstance(problem, MemoryError) else \
            "the input is nested too deep"
        error.print(f"[bold red]coterie:[/] {what}.", soft_wrap=True, highlight=False)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        error.print("Interrupted.")
        raise SystemExit(130) from None


@contextlib.contextmanager
def interruptible(advice: str) -> Iterator[None]:
    """Ctrl-C ends the command with the way to continue."""
    try:
        yield
    except KeyboardInterrupt:
        say(f"Interrupted{advice}", to=error)
        raise typer.Exit(130) from None


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


def say(text: object, style: str | None = None, to: Console = console) -> None:
    """Print a sentence as it is, on as many lines as the terminal needs."""
    to.print(visible(str(text)), style=style, soft_wrap=True, markup=False, highlight=False)


def grid(title: str, headings: Iterable[str], rows: Iterable[Sequence[str]] = (), *,
         right: Collection[str] = (), fixed: Collection[str] = (), **options: Any) -> Grid:
    """A table with columns of these headings: those at the `right`, and those that are never
    wrapped (`fixed`).
    """
    table = Grid(title=title, **options)
    for name in headings:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=name in fixed)
    for row in rows:
        table.add_row(*map(visible, row))
    return table


def visible(text: str) -> str:
    """Text without control characters: names are other people's words, and a terminal obeys some.
    """
    return text if text.isprintable() else "".join(
        letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)


def plain(text: str) -> str:
    """Text without control characters, and without markup for rich."""
    from rich.markup import escape

    return escape(visible(text))


_LOSSES = ", ".join(LOSSES)
Table = Annotated[Path,
                  Arg(help="A file with one row per sample (CSV, Parquet, Excel or JSON lines, "
                           "also compressed); - is standard input.")]
Separator = Annotated[str, Opt(help="Separator of a CSV file; detected if omitted.")]
User = Annotated[
    str, Opt(help="Column with the owner of each row; if omitted, every row is a separate user.")]
Target = Annotated[str, Opt(help="Column to predict; if omitted, users are clustered.")]
Features = Annotated[
    str, Opt(help="Columns used as features, separated by commas; default: all others.")]
Drop = Annotated[str, Opt(help="Columns to ignore, separated by commas.")]
TaskName = Annotated[str, Opt(help=f"auto, or one of: {', '.join(TASKS)}.")]
LossName = Annotated[str, Opt(help=f"auto, or one that fits the task: {_LOSSES}.")]
Lam = Annotated[
    str, Opt(help="auto: the groups found; score: the least loss on held-out rows; or a number.")]
Weights = Annotated[str, Opt(help=f"One of: {', '.join(KINDS)}. auto: chosen by the fit; "
                             "unit: 1 for all pairs (paper).")]
Count = Annotated[str, Opt(help="rows or users: give every row, or every user, the same weight in "
                           "its group's model.")]
Ridge = Annotated[float, Opt(help="L2 strength, intercept included.")]
Lams = Annotated[int, Opt(help="Number of points of the path.", min=2)]
MaxGroups = Annotated[int, Opt(help="Largest number of groups; 0: no limit.", min=0)]
Tol = Annotated[float, Opt(help="Certified relative gap to reach.")]
Holdout = Annotated[float, Opt(help="Share of every user's rows held out for validation; 0: none.")]
Standardize = Annotated[bool, Opt(help="Whether features are standardised.")]
Seed = Annotated[int, Opt(help="Seed of the held-out rows.", min=0)]
Averaging = Annotated[str, Opt(help="auto: average several kinds of models where that predicts "
                                    "better than one; off: the one kind chosen.")]
Curves = Annotated[str, Opt(help="Of an average; auto: also curves of columns and users' own "
                                 "means of columns; off: straight columns.")]
ScaleName = Annotated[str, Opt(help="Of an average; auto: also logarithms of positive targets and "
                                    "columns; level: none; log: these only.")]
Interval = Annotated[float, Opt(help="Also write `low` and `high`, between which this share of "
                                     "targets is expected, such as 0.9; 0: none.", min=0)]
Out = Annotated[Path, Opt(help="Folder for the results; created if needed.")]
Resume = Annotated[bool, Opt("--resume", help="Continue an interrupted run in the folder.")]
Overwrite = Annotated[bool, Opt("--overwrite", help="Replace a finished run in the folder.")]
Json = Annotated[bool, Opt("--json", help="Print JSON only.")]
Quiet = Annotated[bool, Opt("--quiet", help="Print warnings and errors only.", callback=be_quiet)]
Threads = Annotated[int | None,
                    Opt(help="Largest number of threads; default: one per core.", min=1,
                        callback=limit_threads)]
RunFolder = Annotated[Path, Arg(help="The folder of a run of `coterie fit`.")]


def parse_lam(text: str) -> Any:
    """A number, "auto" or "score"."""
    if text in ("auto", "score"):
        return text
    try:
        return float(text)
    except ValueError:
        raise InvalidInput(f"lam must be a number, auto or score, got {text!r}",
                           remedy="Use --lam auto") from None
