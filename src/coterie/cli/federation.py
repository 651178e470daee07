"""`coterie federate` join, leave, log, keys and write-app: around a federation."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from coterie.base.errors import InvalidInput
from coterie.base.labels import many
from coterie.base.storage import plain_cell, write_atomically
from coterie.cli.base import Arg, Opt, Overwrite, Separator, console, say
from coterie.cli.federate import RUNTIMES, _Cluster, _Timeout, check_shared, command
from coterie.data.files import read_table, row_place
from coterie.federated import sources
from coterie.federated.membership import agreement_of, join_run, leave_run, write_newcomers
from coterie.federated.node import keep_models
from coterie.federated.private.ledger import FILE, LoggedAnswer, NodeLedger
from coterie.federated.runtimes.nodes import LocalNodes
from coterie.federated.settings import CONFIG, complete
from coterie.output import runs
from coterie.output.runs.load import Run
from coterie.output.runs.save import count_groups, write_run

_Run = Annotated[Path, Arg(help="The folder of a finished run without --lam.", metavar="RUN")]


@command.command()
def join(
    folder: _Run,
    table: Annotated[Path, Arg(help="The newcomers' rows, with the columns of the run.",
                                          metavar="TABLE")],
    separator: Separator = "",
    models_dir: Annotated[Path | None, Opt(help="Folder in which the newcomers' models "
                                                         "are kept.")] = None,
    runtime: Annotated[str, Opt(help=f"One of: {', '.join(RUNTIMES)}.")] = "local",
    local_cluster: _Cluster = 1, timeout: _Timeout = 600.0,
    out: Annotated[Path | None, Opt(help="The file; by default joined.csv in the run "
                                                  "folder.")] = None,
) -> None:
    """Give newcomers a model of a finished run, in one question and answer; nobody else is asked.

    Users in TABLE that are not in RUN learn which group fits their rows best, and get its model, or
    a personal one around its centre. RUN is not changed. `coterie predict MODELS_DIR rows.csv`
    predicts with the models kept. In a deployment newcomers start nodes, and `flwr run` with join =
    "RUN" asks them: see docs/flower.md.

    Example: coterie federate join run new.csv --models-dir models
    """
    run = runs.load_run(folder)
    out = folder / "joined.csv" if out is None else out
    if run.recipe is None or run.recipe.user is None:
        raise InvalidInput(f"{folder} is no run of a table with a column of users",
                           remedy="Use Fit.personalize")
    if runtime not in RUNTIMES:
        raise InvalidInput(f"unknown runtime {runtime!r}",
                           remedy=f"Choose one of: {', '.join(RUNTIMES)}")
    check_shared(table, runtime)
    if runtime == "local":
        frame = read_table(table, separator or None)
        source = sources.Table(frame=frame, user=run.recipe.user, target=run.recipe.target,
                               place=row_place(table, separator or None))
        newcomers = join_run(LocalNodes([source]), run, wait=0.0)
        if models_dir is not None:
            keep_models(models_dir, agreement_of(run), newcomers.models.items())
        write_newcomers(newcomers, run, out)
        groups = newcomers.groups.tolist()
    else:
        groups = _on_flower(run, table, separator, out, models_dir, nodes=local_cluster,
                            virtual=runtime == "flower-sim", timeout=timeout)
    for group, size in sorted(Counter(groups).items()):
        which = f"in group {group}" if group >= 0 else "with a model from own rows"
        say(f"{many(size, 'newcomer')} {which}.")
    say(f"{many(len(groups), 'newcomer')} in {out}.")


def _on_flower(run: Run, table: Path, separator: str, out: Path, models_dir: Path | None, *,
               nodes: int, virtual: bool, timeout: float) -> list[int]:
    """Start a SuperLink and nodes with the newcomers, ask them, and stop what was started."""
    from coterie.federated.runtimes.cluster import Cluster

    assert run.recipe is not None
    own = {"models-dir": str(models_dir.resolve())} if models_dir is not None else {}
    parts: list[dict[str, Any]] = [{"partition-id": k, "num-partitions": nodes,
                                    "return-models": True, **own} for k in range(nodes)]
    with tempfile.TemporaryDirectory() as place, console.status("Starting Flower ...") as status:
        folder = Path(place)
        config = complete({"join": str(run.folder.resolve()), "out": str(folder), "data": "csv",
                           "path": str(table.resolve()), "user": run.recipe.user,
                           "target": run.recipe.target or "", "separator": separator, "split": True,
                           "wait": min(timeout, 600.0)})
        with Cluster(folder / "cluster", virtual=nodes) if virtual else Cluster(folder / "cluster",
                                                                                parts) as cluster:
            cluster.submit(config)
            for line in cluster.follow(folder, timeout, "joined.csv"):
                status.update(str(line["stage"]))
        write_atomically(out, (folder / "joined.csv").read_bytes())
    return [int(group) for group in read_table(out, ",")["cluster"]]


@command.command()
def leave(
    folder: _Run,
    names: Annotated[list[str], Arg(help="Users who leave, as named in models.csv.",
                                               metavar="NAME...")],
    out: Annotated[Path | None, Opt(help="Folder for the run without them; by default RUN "
                                                  "itself.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Take users out of a finished run, without asking the others again.

    Everything is chosen again from the second moments that the others sent, which the checkpoint of
    RUN has; so this is for squared losses (regression and clustering). The certificate is then the
    server's own, from these moments, until the next run asks the users again. Without --out, RUN is
    replaced, and nothing of those who leave stays in it.

    Example: coterie federate leave run "ward 3" "ward 7"
    """
    run = runs.load_run(folder)
    place = folder if out is None else runs.check_free(out, overwrite=overwrite)
    fitted = leave_run(run, [plain_cell(name) for name in names], place)
    write_run(fitted, place)
    say(f"Without {many(len(set(names)), 'user')}: {count_groups(fitted)}, certified gap "
        f"{fitted.gap:.1e} from the moments of the others. Results in {place}.")


_Folder = Annotated[Path, Arg(help="The ledger-dir of a node.", metavar="LEDGER_DIR")]
_Delta = Annotated[float, Opt(help="Of the epsilon that is shown as spent.")]


@command.command("log")
def show_log(
    folder: _Folder,
    refused: Annotated[bool, Opt("--refused", help="Only what was refused.")] = False,
    last: Annotated[int, Opt(help="Only so many lines, the last ones; 0: all.",
                                      min=0)] = 0,
    delta: _Delta = 1e-5,
    as_json: Annotated[bool,
                       Opt("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Every answer that left a node and every question that it refused, and what its users have
    spent.

    Example: coterie federate log ~/.local/state/coterie/1f0c... --refused
    """
    if not (folder / FILE).is_file():
        raise InvalidInput(f"{folder} holds no ledger of a node",
                           remedy="Give the folder that is `ledger-dir` in the node configuration")
    with NodeLedger(folder) as ledger:
        lines, spent = ledger.answers(), ledger.spending(delta)
    chosen = [line for line in lines if line.reason or not refused][-last:]
    if as_json:
        typer.echo(json.dumps({"answers": [line._asdict() for line in chosen], "delta": delta,
                               "epsilon": [[name, epsilon] for name, epsilon in spent.items()]}))
        return
    console.print(_lines(chosen))
    left = [line for line in lines if not line.reason]
    say(f"{len(left):,} answers with {sum(line.numbers for line in left):,} numbers left, "
        f"{len(lines) - len(left):,} were refused.")
    if spent:
        table = Table(title=f"Spent at delta = {delta:g}")
        table.add_column("user")
        table.add_column("epsilon", justify="right")
        for name, epsilon in spent.items():
            table.add_row(str(name), f"{epsilon:.4g}")
        console.print(table)


def _lines(lines: list[LoggedAnswer]) -> Table:
    """The log as a table."""
    table = Table(title="Answers")
    for name, side in (("time", "left"), ("run", "left"), ("round", "right"), ("user", "left"),
                       ("kind", "left"), ("numbers", "right"), ("bytes", "right"),
                       ("question", "left"), ("refused because", "left")):
        table.add_column(name, justify="right" if side == "right" else "left", overflow="fold",
                         no_wrap=name in ("run", "round", "kind", "numbers", "bytes"))
    for line in lines:
        when = datetime.fromtimestamp(line.time).astimezone().isoformat(" ", "seconds")
        table.add_row(when, line.run[:8], str(line.round), str(line.user), line.kind,
                      f"{line.numbers:,}", f"{line.bytes:,}", line.question[:8], line.reason)
    return table


@command.command()
def keys(
    out: Annotated[Path, Opt(help="Folder for the keys.")] = Path("keys"),
    host: Annotated[list[str] | None, Opt(help="Name or address of the SuperLink; may be "
                                                        "repeated.")] = None,
    nodes: Annotated[int, Opt(help="How many SuperNodes get a key pair.", min=0)] = 0,
) -> None:
    """Certificates of a SuperLink and key pairs of its SuperNodes.

    Example: coterie federate keys --host fl.example.org --nodes 5 --out keys
    """
    from coterie.federated.runtimes.keys import make_certificates, make_node_keys

    hosts = host or ["localhost", "127.0.0.1"]
    make_certificates(out, hosts)
    keys = make_node_keys(out, [f"node-{k}" for k in range(nodes)])
    say(f"Certificates of {', '.join(hosts)} and {len(keys)} key pair(s) in {out}. The SuperLink "
        "takes server.pem, server.key and ca.crt; a node takes ca.crt and its own key; keep ca.key "
        "to yourself.")


@command.command()
def write_app(out: Annotated[Path, Opt(help="Folder for the app.")] = Path("flower_app")) -> None:
    """A Flower app to configure and run with `flwr run`.

    Example: coterie federate write-app --out my_app
    """
    from coterie.federated.runtimes.cluster import write_app as write

    write(out, CONFIG)
    say(f"A Flower app in {out}: set its configuration in pyproject.toml, then run `flwr run "
        f"{out}`.")
