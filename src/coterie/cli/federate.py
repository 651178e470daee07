"""`coterie federate`: a federation in this process, or on Flower; join, leave, log, check and
write-app: what is done around one. What is done to operate one is in `coterie.cli.operate`.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from coterie.base.errors import InvalidInput
from coterie.base.labels import groups_of, many
from coterie.base.storage import json_ready, locked, plain_cell, write_atomically
from coterie.cli import base
from coterie.cli.base import Arg, Opt, app, console, grid, interruptible, plain, say
from coterie.data.files import is_input, read_table, row_place
from coterie.data.users import Users
from coterie.federated import ALGORITHMS, entry, sources
from coterie.federated.agreement import Agreement
from coterie.federated.membership import (
    agreement_of,
    join_run,
    leave_run,
    sentences_of,
    write_newcomers,
)
from coterie.federated.node import keep_models
from coterie.federated.private.ledger import FILE, NodeLedger
from coterie.federated.rehearsal import read_config, rehearse
from coterie.federated.runtimes.in_process import LocalNodes
from coterie.federated.session import Round
from coterie.federated.settings import CONFIG, Deployment, complete
from coterie.output import report
from coterie.output.report.headline import lines_of
from coterie.output.runs import Run, check_free, load_run
from coterie.output.runs.save import UNFINISHED, clear, count_groups, write_run
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

_Source = Annotated[Path | None, Arg(help="A file with one row per sample, as for `coterie fit`.",
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
         "1; the others are computed from one round of local models.")]
_Algorithm = Annotated[str, Opt(
    help=f"With a given lam, one of: {', '.join(ALGORITHMS)}; newton by default.")]
_Options = Annotated[str, Opt(help="Its settings as JSON.")]
_Participation = Annotated[float, Opt(help="Share of the users asked per round.")]
_MaxRounds = Annotated[int, Opt(help="Largest number of rounds; 0: the algorithm's own limit.",
                                min=0)]
_Patience = Annotated[int, Opt(
    help="Unanswered queries in a row after which a user is set aside; 0: 100, and no "
         "limit where half of all users are silent.", min=0)]
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
         "y=0:1'; if omitted, bounds are found with a part of the budget.")]
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
        average: base.Averaging = CONFIG["average"], curves: base.Curves = CONFIG["curves"],
        scale: base.ScaleName = CONFIG["scale"],
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
    _check_runtime(runtime, table)
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
    with in_words_of():
        chooses = Deployment.of(config).chooses
    source = sources.load(config)
    check_free(out, overwrite=overwrite)
    with locked(out):  # on Flower, the server holds it from here on
        check_folder(out, overwrite)
    with locked(out) if runtime == "local" else contextlib.nullcontext():
        lines = (_in_process(source, config, out) if runtime == "local"
                 else _on_flower(len(source.names), config, out, nodes=local_cluster,
                                 virtual=runtime == "flower-sim", timeout=timeout))
        # 3. The page, and the results in words.
        if not chooses:  # a fit has written its page
            _write_page(source, config, out, lines)
    show(out, time.monotonic() - began)


def _check_runtime(runtime: str, table: Path | None) -> None:
    """Refuse a runtime that is not known, and a table that its nodes cannot read."""
    if runtime not in RUNTIMES:
        raise InvalidInput(f"unknown runtime {runtime!r}",
                           remedy=f"Choose one of: {', '.join(RUNTIMES)}")
    if table is not None and is_input(table) and runtime != "local":
        raise InvalidInput("Nodes on Flower cannot read standard input",
                           remedy="Save the table in a file")


def check_folder(out: Path, overwrite: bool) -> None:
    """Refuse a folder that is in use; a finished run is removed only if `overwrite`, an unfinished
    one is continued.
    """
    check_free(out, overwrite=overwrite)
    if overwrite:
        clear(out)
        for path in (out / name for name in UNFINISHED):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


_SETTING = re.compile(rf"\b({'|'.join(sorted(CONFIG, key=len, reverse=True))}) = ([\w.+-]*\w)")
_NAMED = re.compile(r"(?<=[Ll]eave )[a-z-]+(?: and [a-z-]+)?(?= out)|"
                    r"(?<=[Gg]ive )[a-z-]+(?= a number)")


@contextlib.contextmanager
def in_words_of(out: str = "") -> Iterator[None]:
    """Remedies in the words of the command that was typed: options of `coterie federate`, or the
    way in which `out` is named.
    """
    try:
        yield
    except InvalidInput as error:
        if out:
            remedy = error.remedy.replace("--out", out)
        else:
            remedy = _NAMED.sub(lambda found: re.sub(
                r"[a-z-]+", lambda word: f"--{word[0]}" if word[0] in CONFIG else word[0],
                found[0]), _SETTING.sub(r"--\1 \2", error.remedy))
        raise InvalidInput(error.problem, where=error.where, remedy=remedy) from None


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
    """The run on nodes that take their part of the users; its rounds."""
    shutil.rmtree(out / "cluster", ignore_errors=True)
    for name in ("run.json", "rounds.jsonl", "error.txt"):
        (out / name).unlink(missing_ok=True)
    with interruptible(_CONTINUE):
        return list(_follow({**config, "n-users": n_users, "split": True}, out, virtual=virtual,
                            nodes=[{}] * min(nodes, n_users), timeout=timeout))


def _follow(config: dict[str, Any], out: Path, *, nodes: list[dict[str, Any]], virtual: bool,
            timeout: float, result: str = "run.json") -> Iterator[dict[str, Any]]:
    """Start a SuperLink and nodes, run until the result is there, and stop what was started; the
    rounds as they happen.
    """
    from coterie.federated.runtimes.cluster import Cluster

    parts = [{"simulation": True, "partition-id": k, "num-partitions": len(nodes), **node}
             for k, node in enumerate(nodes)]
    cluster = (Cluster(out / "cluster", virtual=len(nodes)) if virtual
               else Cluster(out / "cluster", parts))
    with console.status("Starting Flower ...") as status, cluster:
        status.update("Waiting for the nodes ...")
        cluster.submit(config)
        for line in cluster.follow(out, timeout, result):
            status.update(str(Round(**line)) if result == "run.json" else str(line["stage"]))
            yield line


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
    write_atomically(out / "report.json", json.dumps(document, allow_nan=False).encode(),
                     shared=True)
    report.write(document, out / "report.html")


def show(out: Path, seconds: float) -> None:
    result = load_run(out).info
    for note in result.get("notes", ()):
        say(note, style="dim")
    title = (f"{groups_of(result['n_clusters'], result['n_users'], 'among')} at lam = "
             f"{result['lam']:g}")
    gap = "none" if result["gap"] is None else f"{result['gap']:.1e}"
    console.print(grid(f"{result['kind']}, {title}" if "kind" in result else title, ("", ""), [
        ("rounds", str(result["n_rounds"])), ("bytes up", f"{result['bytes_up']:,}"),
        ("bytes down", f"{result['bytes_down']:,}"), ("certified gap", gap),
        ("seconds", f"{seconds:.1f}"), ("results", str(out))], show_header=False))
    if "headline" in result:
        say(result["headline"]["found"])
        for name, text in lines_of(result["headline"]):
            say(f"{name:15}{text}" if name else f"  {text}")
    say(result["sentence"])
    if "privacy" in result:
        say(f"Privacy        {result['privacy']['sentence']}")
    if "headline" not in result:
        for name, reason in result["aside"].items():
            say(f"Set aside: {name}: {reason}.")
    say(f"Open {out / 'report.html'} to look at the results.")
    if result["status"] not in (Status.CONVERGED.name, Status.RELEASED.name):
        raise typer.Exit(1)


# Around a federation

_Run = Annotated[Path, Arg(help="The folder of a finished run without --lam.", metavar="RUN")]


_New = Annotated[Path, Arg(help="The newcomers' rows, with the columns of the run.",
                           metavar="TABLE")]
_ModelsDir = Annotated[Path | None, Opt(help="Folder in which the newcomers' models are kept.")]
_Joined = Annotated[Path | None, Opt(help="The file; by default joined.csv in the run folder.")]
_Names = Annotated[list[str], Arg(help="Users who leave, as named in models.csv.",
                                  metavar="NAME...")]
_Left = Annotated[Path | None, Opt(help="Folder for the run without them; by default RUN itself.")]
_Ledger = Annotated[Path, Arg(help="The ledger-dir of a node.", metavar="LEDGER_DIR")]
_Refused = Annotated[bool, Opt("--refused", help="Only what was refused.")]
_Last = Annotated[int, Opt(help="Only so many lines, the last ones; 0: all.", min=0)]
_Spent = Annotated[float, Opt(help="Of the epsilon that is shown as spent.")]
_Lines = Annotated[bool, Opt("--json", help="One JSON object instead of tables.")]
_NodeConfig = Annotated[list[str], Arg(help="A start kit, a TOML file, or KEY=VALUE.",
                                       metavar="CONFIG")]
_App = Annotated[Path, Opt(help="Folder for the app.")]


@command.command()
def join(folder: _Run, table: _New, separator: base.Separator = "", models_dir: _ModelsDir = None,
         runtime: _Runtime = "local", local_cluster: _Cluster = 1, timeout: _Timeout = 600.0,
         out: _Joined = None) -> None:
    """Give newcomers a model of a finished run, in one question and answer; nobody else is asked.

    Users in TABLE that are not in RUN learn which group fits their rows best, and get its model, or
    a personal one around its centre. RUN is not changed. `coterie predict MODELS_DIR rows.csv`
    predicts with the models kept. In a deployment newcomers start nodes, and `flwr run` with join =
    "RUN" asks them: see docs/flower.md.

    Example: coterie federate join run new.csv --models-dir models
    """
    run = load_run(folder)
    out = folder / "joined.csv" if out is None else out
    if run.recipe is None or run.recipe.user is None:
        raise InvalidInput(f"{folder} is no run of a table with a column of users",
                           remedy="Use Fit.personalize")
    _check_runtime(runtime, table)
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
        groups = _join_on_flower(run, table, separator, out, models_dir, nodes=local_cluster,
                                 virtual=runtime == "flower-sim", timeout=timeout)
    show_newcomers(groups, out)


def _join_on_flower(run: Run, table: Path, separator: str, out: Path, models_dir: Path | None, *,
                    nodes: int, virtual: bool, timeout: float) -> list[int]:
    """Ask nodes with the newcomers; the group of each."""
    assert run.recipe is not None
    own = {"models-dir": str(models_dir.resolve())} if models_dir is not None else {}
    with tempfile.TemporaryDirectory() as folder:
        config = complete({"join": str(run.folder.resolve()), "out": folder, "data": "csv",
                           "path": str(table.resolve()), "user": run.recipe.user,
                           "target": run.recipe.target or "", "separator": separator, "split": True,
                           "wait": min(timeout, 600.0)})
        for _ in _follow(config, Path(folder), nodes=[{"return-models": True, **own}] * nodes,
                         virtual=virtual, timeout=timeout, result="joined.csv"):
            pass
        write_atomically(out, Path(folder, "joined.csv").read_bytes())
    return groups_in(out)


def groups_in(joined: Path) -> list[int]:
    """The groups in joined.csv."""
    return [int(group) for group in read_table(joined, ",")["cluster"]]


def show_newcomers(groups: list[int], out: Path) -> None:
    """How many newcomers are in which group."""
    for sentence in sentences_of(groups):
        say(sentence)
    say(f"{many(len(groups), 'newcomer')} in {out}.")


@command.command()
def leave(folder: _Run, names: _Names, out: _Left = None,
          overwrite: base.Overwrite = False) -> None:
    """Take users out of a finished run, without asking the others again.

    Everything is chosen again from the second moments that the others sent, which the checkpoint of
    RUN has; so this is for squared losses (regression and clustering). The certificate is then the
    server's own, from these moments, until the next run asks the users again. Without --out, RUN is
    replaced, and nothing of those who leave stays in it.

    Example: coterie federate leave run "ward 3" "ward 7"
    """
    run = load_run(folder)
    place = folder if out is None else check_free(out, overwrite=overwrite)
    fitted = leave_run(run, [plain_cell(name) for name in names], place)
    write_run(fitted, place)
    say(f"Without {many(len(set(names)), 'user')}: {count_groups(fitted)}, certified gap "
        f"{fitted.gap:.1e} from the moments of the others. Results in {place}.")


@command.command("log")
def show_log(folder: _Ledger, refused: _Refused = False, last: _Last = 0, delta: _Spent = 1e-5,
             as_json: _Lines = False) -> None:
    """Every answer that left a node and every question that it refused, and what its users have
    spent.

    Example: coterie federate log ~/.local/state/coterie/1f0c... --refused
    """
    if not (folder / FILE).is_file():
        raise InvalidInput(f"{folder} holds no ledger of a node",
                           remedy="Give the folder that is `ledger-dir` in the node configuration")
    with NodeLedger(folder) as ledger:
        lines, spent = ledger.answers(), ledger.spending(delta)
        exact = ledger.exact_answers()
    chosen = [line for line in lines if line.reason or not refused][-last:]
    # Noise protects no rows of which exact answers left.
    held = {name: None if exact.get(name) or exact.get(None) else epsilon
            for name, epsilon in spent.items()}
    if as_json:
        typer.echo(json.dumps({"answers": [line._asdict() for line in chosen], "delta": delta,
                               "epsilon": [[name, epsilon] for name, epsilon in spent.items()],
                               "holds": [[name, held[name] is not None] for name in spent],
                               "exact": [[name, number] for name, number in exact.items()]}))
        return
    headings = ("time", "run", "round", "user", "kind", "numbers", "bytes", "question",
                "refused because")
    table = grid("Answers", headings, right=("round", "numbers", "bytes"),
                 fixed=("run", "round", "kind", "numbers", "bytes"))
    for column in table.columns:
        column.overflow = "fold"
    for line in chosen:
        when = datetime.fromtimestamp(line.time).astimezone().isoformat(" ", "seconds")
        table.add_row(when, plain(line.run[:8]), str(line.round), plain(str(line.user)), line.kind,
                      f"{line.numbers:,}", f"{line.bytes:,}", line.question[:8],
                      plain(line.reason))
    console.print(table)
    left = [line for line in lines if not line.reason]
    say(f"{len(left):,} answers with {sum(line.numbers for line in left):,} numbers left, "
        f"{len(lines) - len(left):,} were refused.")
    if spent:
        console.print(grid(f"Spent at delta = {delta:g}", ("user", "epsilon"),
                           [(str(name), "none holds" if epsilon is None else f"{epsilon:.4g}")
                            for name, epsilon in held.items()], right=("epsilon",)))
    if spent and None in held.values():
        say(f"No epsilon holds for users of whom exact answers left this node, and "
            f"{many(sum(exact.values()), 'exact answer')} did. The noise of their releases "
            "protects nothing that these had given away.")


@command.command()
def check(config: _NodeConfig) -> None:
    """What a node with this configuration would do: a dry run for its owner, at the node.

    CONFIG is what the node is started with: the folder of a start kit, a TOML file, or KEY=VALUE as
    for --node-config. The data are read; columns, users, limits and what is left of the budget are
    shown, and which questions would be answered and which refused. Nothing is sent or written.

    Example: coterie federate check 'data="csv" path="/data/visits.csv" user="patient"'
    """
    if len(config) == 1 and (Path(config[0]).is_dir() or Path(config[0]).name == "site.toml"):
        from coterie.federated.runtimes.kits import read_kit

        found = rehearse(read_kit(Path(config[0])).config)
    else:
        found = rehearse(read_config(config))
    for name, text in found.facts:
        say(f"{name:14} {text}")
    if found.answered:
        console.print(grid("Questions", ("kind", "users who answer", "others are refused because"),
                           [(kind, f"{users:,}", reason) for kind, users, reason in found.answered],
                           right=("users who answer",), fixed=("kind",)))
    if any(name == "problem" for name, _ in found.facts):
        raise typer.Exit(2)


@command.command()
def write_app(out: _App = Path("flower_app")) -> None:
    """A Flower app to configure and run with `flwr run`.

    Example: coterie federate write-app --out my_app
    """
    from coterie.federated.runtimes.cluster import write_app as write

    write(out, CONFIG)
    say(f"A Flower app in {out}: set its configuration in pyproject.toml, then run `flwr run "
        f"{out}`.")
