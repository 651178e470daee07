"""Seconds per round on Flower: coterie's Newton and a minimal Flower app whose messages have the
same sizes.

    python benchmarks/flower.py            # ten SuperNodes on loopback, with TLS and keys
    python benchmarks/flower.py --sim      # 1,000 users in Flower's simulation

In a deployment every message starts a Python process, which takes most of the time of a round. So
the minimal app is the reference: its client imports nothing but Flower and returns the requested
number of bytes. Both apps run in turns on the same SuperLink and nodes, and the server measures the
rounds in the same way.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import facts

from coterie.datasets import clustered, ellipses
from coterie.federated.runtimes.cluster import Cluster, write_app
from coterie.federated.settings import complete

_CLIENT = '''from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def echo(message: Message, context: Context) -> Message:
    size = int(message.content["ask"]["size"])
    return Message(RecordDict({"answer": ConfigRecord({"bytes": bytes(size)})}), reply_to=message)
'''
_SERVER = '''import json
import time

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    while len(list(grid.get_node_ids())) < int(config["nodes"]):
        time.sleep(0.2)
    seconds = []
    # The first round is not counted: coterie also asks for the users.
    for _ in range(int(config["rounds"]) + 1):
        began = time.perf_counter()
        asked = {"size": int(config["up"]), "bytes": bytes(int(config["down"]))}
        nodes = sorted(grid.get_node_ids())
        waiting = set(grid.push_messages([
            Message(RecordDict({"ask": ConfigRecord(asked)}), node, "train") for node in nodes]))
        while waiting:
            for reply in grid.pull_messages(list(waiting)):
                assert not reply.has_error(), reply.error
                waiting.discard(reply.metadata.reply_to_message_id)
            time.sleep(0.1 if waiting else 0.0)
        seconds.append(time.perf_counter() - began)
    with open(str(config["out"]), "w") as file:
        json.dump(seconds[1:], file)
'''


def write_echo(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "echo").mkdir(parents=True, exist_ok=True)
    write_app(folder, config, name="echo", about="As many bytes as asked for",
              server="echo.server:app",
              client="echo.client:app")
    (folder / "echo" / "__init__.py").write_text("")
    (folder / "echo" / "client.py").write_text(_CLIENT)
    (folder / "echo" / "server.py").write_text(_SERVER)
    return folder


def coterie_rounds(cluster: Cluster, out: Path, settings: dict[str, Any]) -> tuple[list[float],
        dict[str, Any]]:
    """Seconds of every round of a run of coterie, and its run.json."""
    cluster.submit(complete({**settings, "out": str(out)}))
    lines = list(cluster.follow(out, 900.0))
    marks = [0.0, *(line["seconds"] for line in lines)]
    run_info: dict[str, Any] = json.loads((out / "run.json").read_text())
    # The first round also asks which users the nodes hold.
    return np.diff(marks)[1:].tolist(), run_info


def echo_rounds(cluster: Cluster, folder: Path, nodes: int, rounds: int, up: int,
                down: int) -> list[float]:
    """Seconds of every round of the minimal app."""
    out = folder / "seconds.json"
    write_echo(folder, {"nodes": nodes, "rounds": rounds, "up": up, "down": down, "out": str(out)})
    cluster.command("run", str(folder), "local", "--format", "json")
    limit = time.monotonic() + 900
    while not out.exists() or not out.read_text():
        if time.monotonic() > limit:
            raise TimeoutError(cluster.tail("superlink"))
        time.sleep(0.2)
    seconds: list[float] = json.loads(out.read_text())
    return seconds


def deployed(n_nodes: int, turns: int) -> None:
    users = ellipses(users_per_cluster=10, samples=30, seed=0).users
    settings = {"loss": "squared_hinge", "loss-options": '{"ridge": 0.001}', "lam": 0.02,
                "n-users": users.n_users,
                "round-timeout": 120.0}
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        configs = []
        for k in range(n_nodes):
            own = users.take(np.arange(k, users.n_users, n_nodes))
            np.savez(home / f"{k}.npz", X=own.features, y=own.targets,
                     user=np.array(own.names)[own.owner])
            configs.append({"data": "npz", "path": str(home / f"{k}.npz")})
        began = time.monotonic()
        with Cluster(home / "cluster", configs) as cluster:
            print(f"{n_nodes} SuperNodes, {users.n_users} users, TLS and keys", flush=True)
            ours: list[float] = []
            bare: list[float] = []
            for turn in range(turns):
                rounds, run_info = coterie_rounds(cluster, home / f"run-{turn}", settings)
                ours += rounds
                per_message = run_info["n_rounds"] * n_nodes
                up, down = run_info["bytes_up"] // per_message, \
                    run_info["bytes_down"] // per_message
                bare += echo_rounds(cluster, home / f"echo-{turn}", n_nodes, max(len(rounds), 3),
                                    up, down)
                print(f"  turn {turn + 1}: gap {run_info['gap']:.1e} in {run_info['n_rounds']} "
                      "rounds; "
                      f"messages of {up} bytes up, {down} down; "
                      f"rounds of {_seconds(rounds)} s, bare {_seconds(bare[-len(rounds):])} s",
                      flush=True)
        a, b = statistics.median(ours), statistics.median(bare)
        print(f"coterie's Newton  {a:6.2f} s per round (median of {len(ours)})")
        print(f"minimal app       {b:6.2f} s per round (median of {len(bare)})")
        print(f"ratio             {a / b:6.2f}   (goal: at most 1.3); total "
              f"{time.monotonic() - began:.0f} s")


def simulated() -> None:
    options = {"n_users": 1000, "n_clusters": 4, "samples": 80, "n_features": 4, "separation": 3.0,
               "seed": 0}
    assert clustered("logistic", **options).users.n_users == 1000
    with tempfile.TemporaryDirectory() as temporary:
        home, began = Path(temporary), time.monotonic()
        with Cluster(home / "cluster", virtual=20) as cluster:
            rounds, run_info = coterie_rounds(cluster, home / "run", {
                "data": "dataset", "dataset": "clustered", "dataset-options": json.dumps(options),
                    "split": True,
                "lam": 1.0, "weights": "wald", "loss-options": '{"ridge": 0.001}', "n-users": 1000})
            seconds = time.monotonic() - began
        print(f"1,000 users at 20 virtual nodes: gap {run_info['gap']:.1e} in "
              f"{run_info['n_rounds']} rounds, "
              f"{run_info['n_clusters']} groups; {statistics.median(rounds):.2f} s per round, "
              f"{seconds:.1f} s in total "
              f"(SuperLink and Ray started: {seconds - sum(rounds):.1f} s)")


def fitted() -> None:
    """A fit of classes without lam for 24 users at six SuperNodes, from an empty folder on."""
    options = {"n_users": 24, "n_clusters": 3, "samples": 80, "seed": 1}
    data = {"data": "dataset", "dataset": "clustered", "dataset-options": json.dumps(options),
            "split": True}
    with tempfile.TemporaryDirectory() as temporary:
        home, began = Path(temporary), time.monotonic()
        nodes = [{**data, "partition-id": k, "num-partitions": 6, "consent": "hessians",
                  "ledger-dir": str(home / f"ledger-{k}")} for k in range(6)]
        with Cluster(home / "cluster", nodes) as cluster:
            ready = time.monotonic() - began
            out = home / "run"
            cluster.submit(complete({"out": str(out), "n-users": 24, "loss": "logistic",
                                     "wait": 300.0}))
            lines = list(cluster.follow(out, 600))
            seconds = time.monotonic() - began
        print(f"24 users at six SuperNodes, classes: {seconds:.0f} s from an empty folder to the "
              f"page, {ready:.0f} s of them until keys are registered; {len(lines)} rounds, "
              f"{lines[-1]['seconds'] / len(lines):.1f} s each")


def _seconds(values: list[float]) -> str:
    return " ".join(f"{value:.1f}" for value in values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sim", action="store_true", help="the simulation instead")
    parser.add_argument("--fit", action="store_true", help="a fit of classes without lam instead")
    parser.add_argument("--nodes", type=int, default=10)
    parser.add_argument("--turns", type=int, default=2)
    given = parser.parse_args()
    print(facts())
    if given.fit:
        fitted()
    elif given.sim:
        simulated()
    else:
        deployed(given.nodes, given.turns)


if __name__ == "__main__":
    main()
