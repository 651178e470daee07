"""`coterie federate`: a federation in this process, or on Flower."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from coterie import report, runs
from coterie.certificates import certify
from coterie.cli.base import app, console
from coterie.data.scaling import Standardizer
from coterie.data.users import Users
from coterie.errors import InvalidInput
from coterie.federated import ALGORITHMS, federate
from coterie.federated.runtimes.service import CONFIG, algorithm_of
from coterie.federated.sources import dataset
from coterie.federated.sources import loss as make_loss
from coterie.graph import Graph
from coterie.graph.weights import KINDS
from coterie.losses import LOSSES
from coterie.problem import Problem
from coterie.solution import Solution, Status
from coterie.storage import json_ready, write_atomically

command = typer.Typer(invoke_without_command=True, no_args_is_help=True)
app.add_typer(command, name="federate")
RUNTIMES = ("local", "flower-sim", "flower")


@command.callback()
def run(
    context: typer.Context,
    data: Annotated[Path | None, typer.Option(help="A CSV or Parquet file with a row a sample.")] = None,
    user: Annotated[str, typer.Option(help="The column that names the owner of a row.")] = "",
    target: Annotated[str, typer.Option(help="The column to predict.")] = "",
    dataset: Annotated[str, typer.Option(help="Instead of a file: ellipses, the paper's data.")] = "",
    loss: Annotated[str, typer.Option(help=f"auto, or one of: {', '.join(LOSSES)}.")] = "auto",
    lam: Annotated[float, typer.Option(help="Price of a difference between two users' models.")] = 0.02,
    weights: Annotated[str, typer.Option(help=f"Weights from one round of local models: {', '.join(KINDS)}. "
                                              "Without them all pairs weigh 1.")] = "",
    algorithm: Annotated[str, typer.Option(help=f"One of: {', '.join(ALGORITHMS)}.")] = "newton",
    algorithm_options: Annotated[str, typer.Option(help="Its settings as JSON.")] = "",
    participation: Annotated[float, typer.Option(help="Share of the users asked in a round.")] = 1.0,
    tol: Annotated[float, typer.Option(help="Certified relative gap to reach.")] = 1e-6,
    rounds: Annotated[int, typer.Option(help="Most rounds; 0 leaves it to the algorithm.", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Seed of all that is random.", min=0)] = 0,
    standardize: Annotated[bool, typer.Option(help="Scale columns by the users' pooled moments.")] = False,
    runtime: Annotated[str, typer.Option(help=f"One of: {', '.join(RUNTIMES)}.")] = "local",
    local_cluster: Annotated[int, typer.Option(help="Nodes to start on this machine, on Flower.", min=1)] = 5,
    round_timeout: Annotated[float, typer.Option(help="Seconds a round may last, on Flower.")] = 60.0,
    timeout: Annotated[float, typer.Option(help="Seconds the whole run may last, on Flower.")] = 3600.0,
    out: Annotated[Path, typer.Option(help="Folder for the results; a run that was broken off there goes on.")] = Path(
        "run"),
) -> None:
    """A federation: every user answers from its own data, and the result is certified.

    Example: coterie federate --dataset ellipses --lam 0.02 --out run

    Example: coterie federate --runtime flower --local-cluster 5 --data d.csv --user who --target y --out run
    """
    if context.invoked_subcommand is not None:
        return
    if runtime not in RUNTIMES:
        raise InvalidInput(f"unknown runtime {runtime!r}", remedy=f"Choose one of: {', '.join(RUNTIMES)}")
    users = load(data, user, target, dataset, seed)
    name = loss if loss != "auto" else "squared_hinge" if dataset else guess(users)
    settings = {
        **CONFIG, "algorithm": algorithm, "algorithm-options": algorithm_options, "lam": lam, "weights": weights,
        "participation": participation, "tol": tol, "rounds": rounds, "seed": seed, "standardize": standardize,
        "loss": name, "out": str(out.resolve()), "users": users.n_users, "round-timeout": round_timeout,
        "wait": min(timeout, 600.0)}
    algorithm_of(settings)
    began = time.monotonic()
    if runtime == "local":
        lines = here(users, settings, out)
    else:
        lines = on_flower(users, settings, out, nodes=local_cluster, virtual=runtime == "flower-sim", timeout=timeout)
    seconds = time.monotonic() - began
    page(users, settings, out, lines)
    show(out, seconds)


@command.command()
def keys(
    out: Annotated[Path, typer.Option(help="Folder for the keys.")] = Path("keys"),
    host: Annotated[list[str] | None, typer.Option(help="Name or address of the SuperLink; may be repeated.")] = None,
    nodes: Annotated[int, typer.Option(help="How many SuperNodes get a key pair.", min=0)] = 0,
) -> None:
    """Certificates of a SuperLink and key pairs of its SuperNodes.

    Example: coterie federate keys --host fl.example.org --nodes 5 --out keys
    """
    from coterie.federated.runtimes.keys import make_certificates, make_node_keys

    make_certificates(out, host or ["localhost", "127.0.0.1"])
    made = make_node_keys(out, [f"node-{k}" for k in range(nodes)])
    known = ", ".join(host or ["localhost", "127.0.0.1"])
    console.print(f"Certificates of {known} and {len(made)} key pair(s) in {out}. "
                  "The SuperLink takes server.pem, server.key and ca.crt; a node takes ca.crt and its own key; "
                  "keep ca.key to yourself.", soft_wrap=True)


@command.command()
def write_app(out: Annotated[Path, typer.Option(help="Folder for the app.")] = Path("flower_app")) -> None:
    """A Flower app to configure and run with `flwr run`.

    Example: coterie federate write-app --out my_app
    """
    from coterie.federated.runtimes.cluster import write_app as write

    write(out, CONFIG)
    console.print(f"A Flower app in {out}: set its configuration in pyproject.toml, then run `flwr run {out}`.",
                  soft_wrap=True)


def load(data: Path | None, user: str, target: str, name: str, seed: int) -> Users:
    if name:
        return dataset({"dataset": name, "dataset-options": json.dumps({"seed": seed})})
    if data is None:
        raise InvalidInput("there is nothing to learn from",
                           remedy="Give --data FILE --user COLUMN, or --dataset ellipses")
    if not user:
        raise InvalidInput("the column that names the owner of a row is not given", remedy="Give --user COLUMN")
    read = Users.from_parquet if data.suffix in (".parquet", ".pq") else Users.from_csv
    return read(data, user=user, target=target or None)


def guess(users: Users) -> str:
    """The loss for these targets: none, -1 and +1, or numbers."""
    if users.targets is None:
        return "squared_distance"
    return "logistic" if bool((np.abs(users.targets) == 1.0).all()) else "squared"


def here(users: Users, settings: dict[str, Any], out: Path) -> list[dict[str, Any]]:
    """The run in this process; its rounds."""
    users = scaled(users, settings)
    with console.status("Round 0 ...") as status:
        found = federate(users, make_loss(settings["loss"], settings["loss-options"]), settings["lam"],
                         graph=settings["weights"] or None, algorithm=algorithm_of(settings),
                         participation=settings["participation"], tol=settings["tol"], seed=settings["seed"],
                         max_rounds=settings["rounds"] or None, checkpoint=out / "checkpoint",
                         progress=lambda line: status.update(told(line._asdict())))
    runs.write(out, found, settings)
    return [line._asdict() for line in found.history]


def scaled(users: Users, settings: dict[str, Any]) -> Users:
    if not settings["standardize"]:
        return users
    return Standardizer.from_moments(users.moments(), feature_names=users.feature_names).transform(users)


def page(users: Users, settings: dict[str, Any], out: Path, rounds: list[dict[str, Any]]) -> None:
    """report.html: the models that were found, on the data that are at hand here, and the rounds it took."""
    told, saved = runs.read(out)
    who = [users.index(name) for name in saved["names"]]  # those who were set aside are not among them
    graph = Graph.complete(len(who)) if saved["pairs"] is None else Graph.from_edges(
        len(who), saved["pairs"], saved["weights"])
    problem = Problem(scaled(users, settings).take(who), make_loss(settings["loss"], settings["loss-options"]),
                      float(told["lam"]), graph)
    solution = Solution(problem=problem, models=saved["models"], duals=None, status=Status[told["status"]],
                        certificate=certify(problem, saved["models"], saved["duals"]), solver=told["solver"],
                        seconds=told["seconds"])
    names = ("gap", "n_clusters", "bytes_up", "bytes_down", "answered")
    document = report.gather(solution, settings=settings, command="coterie federate",
                             title=f"A federation of {len(who)} users")
    document["federated"] = json_ready({
        "rounds": [{"round": line["iteration"], **{name: line[name] for name in names}} for line in rounds],
        "sentence": f"{told['n_rounds']} rounds, {told['bytes_up']:,} bytes up and {told['bytes_down']:,} down."})
    write_atomically(out / "report.json", json.dumps(document, allow_nan=False).encode())
    report.write(document, out / "report.html")


def on_flower(users: Users, settings: dict[str, Any], out: Path, *, nodes: int, virtual: bool,
              timeout: float) -> list[dict[str, Any]]:
    """Give every node its users, start a SuperLink and the nodes, run, and stop what was started; the rounds."""
    from coterie.federated.runtimes.cluster import Cluster

    place, rounds = out / "cluster", []
    shutil.rmtree(place, ignore_errors=True)
    for name in ("run.json", "rounds.jsonl", "error.txt"):
        (out / name).unlink(missing_ok=True)
    nodes = min(nodes, users.n_users)
    parts = [deal(users, k, nodes, place / f"users-{k}.npz") for k in range(nodes)]
    if virtual:
        settings = {**settings, "data": "npz", "path": str((place / "users-{partition}.npz").resolve())}
        cluster = Cluster(place, virtual=nodes)
    else:
        configs = [{"data": "npz", "path": str(part.resolve()), "state-dir": str((out / "state").resolve())}
                   for part in parts]
        cluster = Cluster(place, configs)
    try:
        with console.status("Starting Flower ...") as status, cluster:
            status.update("Waiting for the nodes ...")
            cluster.submit(settings)
            for line in cluster.follow(out, timeout):
                rounds.append(line)
                status.update(told(line))
    except KeyboardInterrupt:
        console.print("Interrupted: everything is stopped, and the same command goes on from the last round.")
        raise typer.Exit(130) from None
    return rounds


def deal(users: Users, part: int, parts: int, path: Path) -> Path:
    """Every parts-th user in a file of their own."""
    own = users.take(np.arange(part, users.n_users, parts))
    names = np.array(own.names)
    if names.dtype.kind not in "iuU":
        raise InvalidInput("user names of several types cannot be written to a node's file", remedy="Make them texts")
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {"X": own.features, "user": names[own.owner], "feature_names": np.array(own.feature_names)}
    if own.targets is not None:
        arrays["y"] = own.targets
    np.savez(path, allow_pickle=False, **arrays)
    return path


def told(line: dict[str, Any]) -> str:
    gap = line["gap"]
    known = gap is not None and gap == gap
    near = f"certified gap {gap:.1e}" if known else f"gap about {line['estimate'] or np.nan:.0e}"
    return (f"round {line['iteration']} ({line['stage']}): {line['answered']} of {line['asked']} answered, "
            f"{line['n_clusters']} cluster(s), {near}")


def show(out: Path, seconds: float) -> None:
    result, _ = runs.read(out)
    table = Table(show_header=False, title=f"{result['n_clusters']} cluster(s) among {result['n_users']} users at "
                                           f"lam = {result['lam']:g}")
    gap = "none" if result["gap"] is None else f"{result['gap']:.1e}"
    for name, value in (("rounds", str(result["n_rounds"])), ("bytes up", f"{result['bytes_up']:,}"),
                        ("bytes down", f"{result['bytes_down']:,}"), ("certified gap", gap),
                        ("seconds", f"{seconds:.1f}"), ("results", str(out))):
        table.add_row(name, value)
    console.print(table)
    console.print(result["sentence"], soft_wrap=True)
    for name, reason in result["aside"].items():
        console.print(f"Set aside: {name}: {reason}.", soft_wrap=True, markup=False)
    if result["status"] == Status.INTERRUPTED.name:
        raise typer.Exit(130)
    if result["status"] != Status.CONVERGED.name:
        raise typer.Exit(1)
