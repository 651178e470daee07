"""`coterie federate`: a federation in this process, or on Flower."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from typer.core import TyperGroup

from coterie.base.errors import InvalidInput
from coterie.base.labels import groups_of
from coterie.base.storage import json_ready, write_atomically
from coterie.cli import base
from coterie.cli.base import Arg, Opt, app, console, interruptible, say
from coterie.data.files import is_input
from coterie.data.users import Users
from coterie.federated import ALGORITHMS, entry, sources
from coterie.federated.agreement import Agreement
from coterie.federated.runtimes.nodes import LocalNodes
from coterie.federated.session import Round
from coterie.federated.settings import CONFIG, Deployment, complete
from coterie.output import report
from coterie.output.runs import check_free, load_run
from coterie.output.runs.save import UNFINISHED, clear
from coterie.problem.solution import Status
from coterie.problem.weights import KINDS


class _Federate(TyperGroup):
    """`coterie federate TABLE` and `coterie federate keys`: a first word that names a command is
    not a table.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = bool(args) and args[0] in self.commands
        ctx.allow_interspersed_args = not named
        return super().parse_args(ctx, ["", *args] if named else args)


command = typer.Typer(cls=_Federate, invoke_without_command=True, no_args_is_help=True)
app.add_typer(command, name="federate")
_CONTINUE = ": everything is stopped; rerun the same command to continue from the last round."
RUNTIMES = ("local", "flower-sim", "flower")

_Source = Annotated[Path | None,
                    Arg(help="A file with one row per sample, as for `coterie fit`.",
                        metavar="[TABLE]")]
_User = Annotated[str, Opt(help="Column with the owner of each row.")]
_Standardize = Annotated[bool | None, Opt(
    help="Whether features are standardised; by default those of a table are.")]
_Dataset = Annotated[str, Opt(help="Instead of a table: ellipses, the paper's data.")]
_Lam = Annotated[str, Opt(help="auto: everything is chosen, as by `coterie fit`; or a number.")]
_Lams = Annotated[str, Opt(
    help="Several penalty strengths instead, or auto; the best on held-out rows is the result.")]
_NLams = Annotated[int | None, Opt(
    help="Number of points of the path; by default 24, or 10 if --lams is auto.", min=1)]
_Ratio = Annotated[float, Opt(help="Smallest divided by largest, if --lams is auto.")]
_HeldOut = Annotated[float | None, Opt(hidden=True)]  # the earlier name
_Holdout = Annotated[float | None, Opt(
    help="Share of every user's rows held out to score its model; by default 0.2 with --lam auto, "
         "otherwise 0.")]
_Weights = Annotated[str, Opt(
    help=f"With a given lam, one of: {', '.join(KINDS)}. unit, the default: all pairs have weight "
         "1; the others are "
         "computed from one round of local models.")]
_Algorithm = Annotated[str, Opt(
    help=f"With a given lam, one of: {', '.join(ALGORITHMS)}; newton by default.")]
_Options = Annotated[str, Opt(help="Its settings as JSON.")]
_Participation = Annotated[float, Opt(help="Share of the users asked per round.")]
_MaxRounds = Annotated[int,
                       Opt(help="Largest number of rounds; 0: the algorithm's own limit.", min=0)]
_Patience = Annotated[int, Opt(
    help="Unanswered queries in a row after which a user is excluded; 0: no limit.", min=0)]
_Seed = Annotated[int, Opt(help="Seed of all random numbers.", min=0)]
_Runtime = Annotated[str, Opt(help=f"One of: {', '.join(RUNTIMES)}.")]
_Cluster = Annotated[int, Opt(help="Number of nodes to start on this machine, on Flower.", min=1)]
_RoundTimeout = Annotated[float, Opt(help="Time limit of a round in seconds, on Flower.")]
_Epsilon = Annotated[float, Opt(
    help="Differential privacy: all that leaves a user is noisy releases within this epsilon; 0: "
         "no noise.", min=0.0)]
_Delta = Annotated[float, Opt(help="With --epsilon: the delta of the promise.")]
_Clip = Annotated[str, Opt(
    help="With --epsilon: public bounds and levels of columns, such as 'age=0:100, sex=f|m, "
         "y=0:1'; if omitted, bounds "
         "are found with a part of the budget.")]
_Unit = Annotated[str, Opt(help="With --epsilon: what is protected, a row or a user.")]
_Timeout = Annotated[float, Opt(help="Time limit of the run in seconds, on Flower.")]
_Out = Annotated[Path, Opt(help="Folder for the results; an interrupted run in it is continued.")]


@command.callback()
def run(context: typer.Context, table: _Source = None, user: _User = "", target: base.Target = "",
        features: base.Features = "", drop: base.Drop = "", separator: base.Separator = "",
        task: base.TaskName = "auto", loss: base.LossName = "auto",
        ridge: base.Ridge = CONFIG["ridge"], standardize: _Standardize = None,
        dataset: _Dataset = "", lam: _Lam = CONFIG["lam"], lams: _Lams = "", n_lams: _NLams = None,
        ratio: _Ratio = CONFIG["ratio"], holdout: _Holdout = None, held_out: _HeldOut = None,
        max_groups: base.MaxGroups = CONFIG["max-groups"], count: base.Count = CONFIG["count"],
        weights: _Weights = "", algorithm: _Algorithm = "", algorithm_options: _Options = "",
        participation: _Participation = 1.0, tol: base.Tol = CONFIG["tol"],
        max_rounds: _MaxRounds = 0, patience: _Patience = 0, seed: _Seed = 0,
        epsilon: _Epsilon = CONFIG["epsilon"], delta: _Delta = CONFIG["delta"], clip: _Clip = "",
        unit: _Unit = CONFIG["unit"], runtime: _Runtime = "local", local_cluster: _Cluster = 5,
        round_timeout: _RoundTimeout = CONFIG["round-timeout"], timeout: _Timeout = 3600.0,
        out: _Out = Path("run"), overwrite: base.Overwrite = False, threads: base.Threads = None,
        quiet: base.Quiet = False) -> None:
    """A federation: every user answers from its own data, and the result is certified.

    TABLE is a file with one row per sample; it means the same task, encoding, scaling and intercept
    as for `coterie fit`. Unless --lam is a number, groups, lam and models are chosen as by `coterie
    fit`, and the folder has the same files. With a number, the convex problem of the paper is
    solved at this lam, by the algorithm named.

    Example: coterie federate table.csv --user who --target y

    Example: coterie federate table.csv --user who --target y --lam 0.05 --algorithm newton --out
    run

    Example: coterie federate table.csv --user who --target y --epsilon 4 --clip "age=0:100,
    dose=0:10, y=0:1"

    Example: coterie federate --runtime flower --local-cluster 5 --dataset ellipses --lam 0.02 --out
    run
    """
    options = {name.replace("_", "-"): value for name, value in context.params.items()}
    if context.invoked_subcommand is not None:
        return
    # 1. The configuration: options as given, and what follows from others.
    if runtime not in RUNTIMES:
        raise InvalidInput(f"unknown runtime {runtime!r}",
                           remedy=f"Choose one of: {', '.join(RUNTIMES)}")
    if table is not None:
        check_shared(table, runtime)
    config = complete({
        **{key: value for key, value in options.items() if key in CONFIG},
        **_locate_data(table, user, dataset, seed),
        "out": str(out.resolve()), "wait": min(timeout, 600.0),
        "standardize": "auto" if standardize is None else str(standardize),
        "holdout": next((share for share in (holdout, held_out) if share is not None), "auto"),
        "n-lams": "auto" if n_lams is None else n_lams,
        # The paper's data with the paper's loss.
        "loss": "squared_hinge" if dataset and loss == "auto" else loss})
    # 2. The federation, in this process or on Flower.
    began = time.monotonic()
    # Settings that cannot be used are refused before anything is read.
    chooses = Deployment.of(config).chooses
    source = sources.load(config)
    _check_folder(out, overwrite)
    lines = (_in_process(source, config, out) if runtime == "local"
             else _on_flower(len(source.names), config, out, nodes=local_cluster,
                             virtual=runtime == "flower-sim", timeout=timeout))
    # 3. The page, and the results in words.
    if not chooses:  # a fit has written its page
        _write_page(source, config, out, lines)
    _show(out, time.monotonic() - began)


def check_shared(table: Path, runtime: str) -> None:
    """Refuse a table that the nodes of a runtime cannot read."""
    if is_input(table) and runtime != "local":
        raise InvalidInput("Nodes on Flower cannot read standard input",
                           remedy="Save the table in a file")


def _check_folder(out: Path, overwrite: bool) -> None:
    """Refuse a folder that is in use; a finished run is removed only if `overwrite`, an unfinished
    one is continued.
    """
    check_free(out, overwrite=overwrite)
    if overwrite:
        clear(out)
        for path in (out / name for name in UNFINISHED):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _locate_data(table: Path | None, user: str, dataset: str, seed: int) -> dict[str, Any]:
    """Where the data are, as a run configuration says it."""
    if dataset:
        return {"data": "dataset", "dataset-options": json.dumps({"seed": seed})}
    if table is None:
        raise InvalidInput("there is nothing to learn from",
                           remedy="Give TABLE --user COLUMN, or --dataset ellipses")
    if not user:
        raise InvalidInput("the column that names the owner of a row is not given",
                           remedy="Give --user COLUMN")
    return {"data": "csv", "path": str(table) if is_input(table) else str(table.resolve())}


def _in_process(source: Users | sources.Table, config: dict[str, Any],
                out: Path) -> list[dict[str, Any]]:
    """The run in this process; its rounds."""
    settings = Deployment.of(config)
    lines: list[dict[str, Any]] = []
    with console.status("Round 0 ...") as status:
        def progress(line: Round) -> None:
            lines.append(line._asdict())
            status.update(str(line))

        nodes = LocalNodes([source], settings.holdout, settings.settings.seed)
        with interruptible(_CONTINUE):
            result = entry.serve(nodes, settings, progress)
    entry.write(result, out, {**config, "split": True})  # the file is the table of all
    return [line._asdict() for line in result.history]


def _on_flower(n_users: int, config: dict[str, Any], out: Path, *, nodes: int, virtual: bool,
               timeout: float) -> list[dict[str, Any]]:
    """Start a SuperLink and nodes that take their part of the users, run, and stop what was
    started; the rounds.
    """
    from coterie.federated.runtimes.cluster import Cluster

    folder, lines = out / "cluster", []
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("run.json", "rounds.jsonl", "error.txt"):
        (out / name).unlink(missing_ok=True)
    nodes = min(nodes, n_users)
    config = {**config, "n-users": n_users, "split": True}
    parts = [{"partition-id": k, "num-partitions": nodes} for k in range(nodes)]
    cluster = Cluster(folder, virtual=nodes) if virtual else Cluster(folder, parts)
    with interruptible(_CONTINUE), console.status("Starting Flower ...") as status, cluster:
        status.update("Waiting for the nodes ...")
        cluster.submit(config)
        for line in cluster.follow(out, timeout):
            lines.append(line)
            status.update(str(Round(**line)))
    return lines


def _write_page(source: Users | sources.Table, config: dict[str, Any], out: Path,
                rounds: list[dict[str, Any]]) -> None:
    """report.html: the models, on the data that are in this process, and the rounds it took."""
    run = load_run(out)
    agreement = Agreement.from_json((out / "checkpoint" / "federation.json").read_text(
        encoding="utf-8"))
    data = agreement.data(source, Deployment.of(config).holdout, int(config["seed"]))
    users = data.samples.users.data
    solution = run.solution(users, data.loss)  # without those who were excluded
    names = ("gap", "n_clusters", "stage", "asked", "answered", "bytes_up", "bytes_down")
    document = report.gather(solution, settings=config, command="coterie federate",
                             title=f"A federation of {len(run.names)} users")
    document["federated"] = json_ready(
        {"rounds": [{"round": line["iteration"], **{name: line[name] for name in names}}
                    for line in rounds], "kinds": run.info["bytes_by_kind"],
         "sentence": f"{run.info['n_rounds']} rounds, {run.info['bytes_up']:,} bytes up and "
                     f"{run.info['bytes_down']:,} down."})
    write_atomically(out / "report.json", json.dumps(document, allow_nan=False).encode())
    report.write(document, out / "report.html")


def _show(out: Path, seconds: float) -> None:
    result = load_run(out).info
    for note in result.get("notes", ()):
        say(note, style="dim")
    title = (f"{groups_of(result['n_clusters'], result['n_users'], 'among')} at lam = "
             f"{result['lam']:g}")
    table = Table(show_header=False,
                  title=f"{result['kind']}, {title}" if "kind" in result else title)
    gap = "none" if result["gap"] is None else f"{result['gap']:.1e}"
    for name, value in (("rounds", str(result["n_rounds"])),
                        ("bytes up", f"{result['bytes_up']:,}"),
                        ("bytes down", f"{result['bytes_down']:,}"), ("certified gap", gap),
                        ("seconds", f"{seconds:.1f}"), ("results", str(out))):
        table.add_row(name, value)
    console.print(table)
    if "why" in result:
        say(f"Why            {result['why']}")
    if result.get("scores"):
        say(f"Held out       {result['scores']['sentence']}")
    say(result["sentence"])
    if "privacy" in result:
        say(f"Privacy        {result['privacy']['sentence']}")
    for name, reason in result["aside"].items():
        say(f"Set aside: {name}: {reason}.")
    say(f"Open {out / 'report.html'} to look at the results.")
    if result["status"] not in (Status.CONVERGED.name, Status.RELEASED.name):
        raise typer.Exit(1)
