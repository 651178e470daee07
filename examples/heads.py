"""Personal heads on a shared encoder: images, FedAvg on Flower, embeddings, and groups of users
that share a head.

    python examples/heads.py [FOLDER] [--quick] [--seeds 30 31]      # writes heads.png to FOLDER

Forty users have 45 images of handwritten digits each to learn from. In two settings they are of
four groups:

    rotated      a group sees all images rotated by 0, 90, 180 or 270 degrees
    permuted     a group has names of its own for the ten digits
    skew 1, 0.3  no groups: users have the digits in different proportions, drawn from Dirichlet's
    distribution

1. Flower's simulation trains an encoder of each setting: users train their own heads and a copy of
   the encoder in turns (as in FedRep), and Flower's FedAvg averages the copies. This file is the
   Flower app.
2. `coterie.embeddings.extract` turns images into embeddings.
3. All methods get the same embeddings, split in the same way, and are scored on images that nobody
   has learned from. The oracle knows the groups, and IFCA their number.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

# Matrices are small, and two processes share the work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

try:
    import torch
    from flwr.app import (
        Array,
        ArrayRecord,
        ConfigRecord,
        Context,
        Message,
        MetricRecord,
        RecordDict,
    )
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from torch.func import functional_call, grad, vmap
except ImportError as missing:
    sys.exit(f"{missing.name or 'A library'} is missing: pip install "
             "'coterie[flower-sim,torch,plots]'")

import numpy as np
from sklearn.datasets import load_digits
from sklearn.metrics import adjusted_rand_score

import coterie as ct
from coterie.base.storage import pack, unpack, write_atomically
from coterie.embeddings import extract, from_arrays
from coterie.fitting import Settings, fit
from coterie.fitting.scores import worse_than_alone
from coterie.lab.baselines import IFCA, ODCL, Baseline, Ditto, FineTuning, Global, Local, Oracle
from coterie.lab.baselines.base import BaselineRun, Choices, Outcome
from coterie.lab.baselines.pooling import curvature, descend
from coterie.lab.experiments.federations import (
    prepare,
    row_errors,
    run_method,
    signed_rank,
)
from coterie.lab.experiments.federations_data import Benchmark, Parts, standardised

SETTINGS = ("rotated", "permuted", "skew 1", "skew 0.3")
USERS, GROUPS, CLASSES, TRAIN, TEST = 40, 4, 10, 45, 30  # of each user, TRAIN and TEST images
HIDDEN, WIDTH = 128, 32  # of the encoder, and of its embeddings
# Users are at four nodes; steps of head and encoder in every round.
NODES, ROUNDS, STEPS = 4, 40, 10
HEAD_RATE, RATE, MOMENTUM, DECAY = 0.5, 0.1, 0.9, 1e-3

# ---- users and their images


class Federation(NamedTuple):
    """Images of all users, in the order of users; within a user, the first TRAIN are to learn from.
    """

    images: np.ndarray  # (n, 8, 8)
    labels: np.ndarray  # (n,)
    owner: np.ndarray  # (n,)
    groups: np.ndarray | None  # (USERS,) the true groups, where there are any

    @property
    def learned(self) -> np.ndarray:
        """(n,) True for images to learn from."""
        return np.arange(len(self.owner)) % (TRAIN + TEST) < TRAIN


@cache
def federation(setting: str, seed: int) -> Federation:
    """Users of a setting. No image that one user learns from is in the test of another."""
    images, digits = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8)
    rng = np.random.default_rng([seed, SETTINGS.index(setting)])
    order = rng.permutation(len(digits))
    pools, groups = (order[:1200], order[1200:]), np.arange(USERS) % GROUPS
    names = [rng.permutation(CLASSES) for _ in range(GROUPS)]
    rows, shown, called = [], [], []
    for user in range(USERS):
        share = rng.dirichlet(np.full(CLASSES, float(setting[5:]))) if setting.startswith("skew") \
            else np.ones(CLASSES)
        for pool, count in zip(pools, (TRAIN, TEST), strict=True):
            odds = share[digits[pool]] + 1e-9
            rows.append(rng.choice(pool, count, replace=False, p=odds / odds.sum()))
            group = groups[user]
            shown.append(np.rot90(images[rows[-1]], group if setting == "rotated" else 0,
                                  axes=(1, 2)))
            called.append(names[group][digits[rows[-1]]] if setting == "permuted"
                          else digits[rows[-1]])
    return Federation(np.ascontiguousarray(np.concatenate(shown)), np.concatenate(called),
                      np.repeat(np.arange(USERS), TRAIN + TEST),
                      None if setting.startswith("skew") else groups)


# ---- the encoder and its training on Flower

client = ClientApp()
server = ServerApp()


def encoder(seed: int) -> Any:
    """From images (n, 8, 8) to embeddings (n, WIDTH)."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, HIDDEN), torch.nn.ReLU(),
                               torch.nn.Linear(HIDDEN, WIDTH), torch.nn.Tanh())


def train_users(data: Federation, users: np.ndarray, body: dict[str, Any],
                heads: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train the head of every user, then its copy of the encoder. Returns the mean of the copies,
    and the heads.
    """
    own = data.learned & np.isin(data.owner, users)
    x, y = torch.as_tensor(data.images[own]), torch.as_tensor(data.labels[own])
    x, y, net = x.reshape(len(users), TRAIN, 8, 8), y.reshape(len(users), TRAIN), encoder(0)

    def loss_of(rows: Any, head: dict[str, Any], y: Any) -> Any:
        return torch.nn.functional.cross_entropy(rows @ head["slopes"] + head["level"], y)

    def loss(copy: dict[str, Any], head: dict[str, Any], x: Any, y: Any) -> Any:
        return loss_of(functional_call(net, copy, (x,)), head, y)

    for_body, for_head = vmap(grad(loss)), vmap(grad(loss_of, 1))
    with torch.no_grad():
        rows = functional_call(net, body, (x.flatten(0, 1),)).reshape(len(users), TRAIN, WIDTH)
    for _ in range(STEPS):
        slope = for_head(rows, heads, y)
        heads = {key: part - HEAD_RATE * (slope[key] + DECAY * part) for key, part in heads.items()}
    copies = {key: part.expand(len(users), *part.shape) for key, part in body.items()}
    speed = {key: torch.zeros_like(part) for key, part in copies.items()}
    for _ in range(STEPS):
        slope = for_body(copies, heads, x, y)
        speed = {key: MOMENTUM * part + slope[key] + DECAY * copies[key] for key,
                 part in speed.items()}
        copies = {key: part - RATE * speed[key] for key, part in copies.items()}
    return {key: part.mean(dim=0) for key, part in copies.items()}, heads


def _parts(record: Any, name: str) -> dict[str, Any]:
    """The tensors of one federation in a record."""
    return {key.partition("/")[2]: torch.as_tensor(part.copy()) for key, part in record.items()
            if key.startswith(f"{name}/")}


def _flat(parts: dict[str, dict[str, Any]]) -> dict[str, np.ndarray]:
    return {f"{name}/{key}": part.numpy() for name, tensors in parts.items() for key,
            part in tensors.items()}


def _record(parts: dict[str, dict[str, Any]]) -> Any:
    return ArrayRecord({key: Array(part) for key, part in _flat(parts).items()})


@client.train()
def _train(message: Message, context: Context) -> Message:
    """One round at a node: its users train. Their heads stay in a file of the node."""
    torch.set_num_threads(1)
    partition, nodes = int(context.node_config["partition-id"]), \
        int(context.node_config["num-partitions"])
    users = np.arange(partition, USERS, nodes)
    received = {key: part.numpy() for key, part in message.content["arrays"].items()}
    file = Path(str(message.content["config"]["out"])) / f"heads-{partition}"
    kept = unpack(file.read_bytes(), file.name) if message.content["config"]["server-round"] > 1 \
        else None
    bodies, heads = dict[str, Any](), dict[str, Any]()
    for name in dict.fromkeys(key.partition("/")[0] for key in received):
        setting, _, seed = name.rpartition(" ")
        start = {"slopes": torch.zeros(len(users), WIDTH, CLASSES), "level": torch.zeros(len(users),
            CLASSES)}
        bodies[name], heads[name] = train_users(federation(setting, int(seed)), users,
                                                _parts(received, name),
                                                start if kept is None else _parts(kept, name))
    write_atomically(file, pack(_flat(heads)))
    about = MetricRecord({"num-examples": len(users) * TRAIN, "partition": partition})
    return Message(RecordDict({"arrays": _record(bodies), "metrics": about}), reply_to=message)


def _in_order(replies: Iterable[Message]) -> list[Message]:
    """Replies by node, so that sums are rounded in the same way each time; a node that failed ends
    the run.
    """
    received = list(replies)
    for reply in received:
        if reply.has_error():
            raise RuntimeError(f"a node failed: {reply.error.reason}")
    return sorted(received, key=lambda reply: reply.content["metrics"]["partition"])


class OrderedFedAvg(FedAvg):  # type: ignore[misc]
    """Flower's FedAvg, which also writes a line for each round."""

    def __init__(self, lines: Path) -> None:
        super().__init__(fraction_evaluate=0.0, min_train_nodes=NODES, min_available_nodes=NODES)
        self.lines = lines

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        result = super().aggregate_train(server_round, _in_order(replies))
        with self.lines.open("a") as file:
            file.write(json.dumps({"round": server_round, "seconds": time.monotonic()}) + "\n")
        return result


@server.main()
def _serve(grid: Grid, context: Context) -> None:
    """Train all encoders in the same rounds, and write them."""
    out, names = Path(str(context.run_config["out"])), \
        json.loads(str(context.run_config["federations"]))
    try:
        start = {name: encoder(int(name.rpartition(" ")[2])).state_dict() for name in names}
        result = OrderedFedAvg(out / "rounds.jsonl").start(
            grid, _record(start), int(context.run_config["rounds"]), timeout=300.0,
            train_config=ConfigRecord({"out": str(out)}))
        write_atomically(out / "encoders",
                         pack({key: part.numpy() for key, part in result.arrays.items()}))
    except Exception as error:
        write_atomically(out / "error.txt", f"{type(error).__name__}: {error}".encode())
        raise


def train_on_flower(names: list[str], rounds: int, out: Path) -> dict[str, np.ndarray]:
    """Run this file as an app on Flower's simulation, started and stopped here."""
    from coterie.federated.runtimes.cluster import Cluster, write_app

    app = write_app(out / "app", {"out": str(out), "rounds": rounds,
                                  "federations": json.dumps(names)},
                    name="heads", about="A shared encoder", server="heads:server",
                    client="heads:client")
    shutil.copy(__file__, app / "heads.py")
    with Cluster(out / "cluster", virtual=NODES) as cluster:
        cluster.submit_app(app)
        for line in cluster.follow(out, 900.0, "encoders"):
            if line["round"] % 10 == 0:
                print(f"  round {line['round']} of {rounds}", flush=True)
    files = {"body": out / "encoders", **{f"heads/{node}": out / f"heads-{node}"
                                          for node in range(NODES)}}
    return {f"{name}/{key}": part for name, file in files.items()
            for key, part in unpack(file.read_bytes(), file.name).items()}


# ---- heads

@dataclass(frozen=True, kw_only=True)
class FedPer(Baseline):
    """Heads of users' own: `steps` gradient steps on f_i from the head of zeros that all users
    start with.

    Arivazhagan, Aggarwal, Singh and Choudhary, 2019, "Federated learning with personalization
    layers".
    """

    name: ClassVar[str] = "fedper"
    choices: ClassVar[Choices] = {"steps": (5, 10, 20, 50, 100, 200, 500, 1000, 2000)}
    steps: int = 10

    def _fit(self, run: BaselineRun) -> Outcome:
        start = np.zeros((run.n_users, run.dim))
        heads = descend(run.loss, run.samples, start, 1.0 / curvature(run.loss, run.samples, start),
                        self.steps)
        return heads, heads.mean(axis=0, keepdims=True), None


class Scored(NamedTuple):
    """One method on one federation."""

    name: str
    method: str
    errors: np.ndarray  # (n,) 1 for each wrong test row
    groups: int
    index: float  # the adjusted Rand index of its groups and the true ones; nan without
    note: str
    seconds: float


def compare(name: str, stored: dict[str, np.ndarray], cache_folder: str) -> tuple[list[Scored],
        ct.Users]:
    """All methods on the embeddings of one federation, and the test rows."""
    setting, _, seed = name.rpartition(" ")
    data, net = federation(setting, int(seed)), encoder(0)
    net.load_state_dict({key: torch.as_tensor(stored[f"body/{name}/{key}"])
                         for key in net.state_dict()})
    rows = extract(net, data.images, cache=cache_folder).astype(float)
    benchmark = Benchmark(name=name, users=from_arrays(rows, data.labels.astype(float), data.owner),
                          metric="accuracy",
                          loss=ct.Multinomial(ridge=1e-3, n_classes=CLASSES), features=standardised,
                          clusters=data.groups, masks=data.learned[None])
    split = prepare(benchmark, benchmark.split(0))
    results = [by_coterie(benchmark, split), by_fedrep(benchmark, split, stored,
                                                       rows[~data.learned])]
    for kind in (Oracle, IFCA, ODCL, FedPer, FineTuning, Ditto, Local, Global):
        if kind is Oracle and data.groups is None:
            continue
        start, settings = time.process_time(), kind.grid(split.train, benchmark.loss)
        if kind is IFCA and data.groups is not None:
            settings = (IFCA(n_clusters=GROUPS),)  # it is given the number of groups
        run = run_method(benchmark, split, kind.name, settings, 0)
        labels = np.unique(run.models.round(9), axis=0, return_inverse=True)[1]
        results.append(_scored(benchmark, kind.name, run.errors, labels, repr(run.settings), start))
    return results, split.test


def _scored(benchmark: Benchmark, method: str, errors: np.ndarray, labels: np.ndarray, note: str,
            start: float) -> Scored:
    index = np.nan if benchmark.clusters is None \
        else float(adjusted_rand_score(benchmark.clusters, labels.ravel()))
    return Scored(benchmark.name, method, errors, len(np.unique(labels)), index, note,
                  time.process_time() - start)


def by_coterie(benchmark: Benchmark, split: Parts) -> Scored:
    """Heads by `coterie fit`, which finds the groups and chooses what users share."""
    start = time.process_time()
    found = fit(split.everything, Settings(task="classification", n_classes=CLASSES, holdout=0.0))
    decisions = found.units.margins(split.test.features, found.models[split.test.owner])
    losses = ", ".join(f"{kind} {loss:.3f}" for kind, loss in found.compared.items())
    return _scored(benchmark, "coterie", row_errors(benchmark, decisions, split.test), found.labels,
                   f"{found.kind} ({losses})", start)


def by_fedrep(benchmark: Benchmark, split: Parts, stored: dict[str, np.ndarray],
              rows: np.ndarray) -> Scored:
    """The heads that users have after the training of the encoder, in turns with it (Collins et
    al., 2021).
    """
    start, slopes, level = time.process_time(), np.zeros((USERS, WIDTH, CLASSES)), \
        np.zeros((USERS, CLASSES))
    for partition in range(NODES):
        key = f"heads/{partition}/{benchmark.name}"
        slopes[partition::NODES], level[partition::NODES] = stored[f"{key}/slopes"], \
            stored[f"{key}/level"]
    owner = split.test.owner
    decisions = np.einsum("nd,ndc->nc", rows, slopes[owner]) + level[owner]
    return _scored(benchmark, "fedrep", row_errors(benchmark, decisions, split.test),
                   np.arange(USERS), "", start)


# ---- the table and the picture

METHODS = {"coterie": "coterie", "oracle": "oracle", "ifca": "IFCA",
           "odcl": "ODCL", "fedper": "FedPer", "fedrep": "FedRep", "fine_tuning": "fine-tuning",
           "ditto": "Ditto",
           "local": "local heads", "global": "one global head"}


class Cell(NamedTuple):
    """One method in one setting, over all seeds."""

    accuracies: np.ndarray  # (seeds x users)
    groups: list[int]  # of each seed
    indices: list[float]  # the adjusted Rand index of each seed
    worse: int  # users who are worse off than with FedPer or with fine-tuning, by more than chance


def summarise(results: list[tuple[list[Scored], ct.Users]]) -> dict[tuple[str, str], Cell]:
    """All methods in all settings."""
    cells: dict[tuple[str, str], Cell] = {}
    for scores, test in results:
        errors = {one.method: one.errors for one in scores}
        for one in scores:
            key = one.name.rpartition(" ")[0], one.method
            before = cells.get(key, Cell(np.zeros(0), [], [], 0))
            worse = worse_than_alone(one.errors, errors["fedper"], test) | \
                worse_than_alone(one.errors, errors["fine_tuning"], test)
            accuracies = 1.0 - np.bincount(test.owner, one.errors) / test.counts
            cells[key] = Cell(np.concatenate([before.accuracies, accuracies]),
                              [*before.groups, one.groups],
                              [*before.indices, one.index], before.worse + int(worse.sum()))
    return cells


def show(cells: dict[tuple[str, str], Cell]) -> None:
    """Print the table, and how far coterie is from the method to reach."""
    settings = list(dict.fromkeys(setting for setting, _ in cells))
    print("\n" + " " * 16 + "".join(f"{setting:>26}" for setting in settings))
    print(f"{'method':16}" + f"{'accuracy':>9}{'groups':>7}{'ARI':>5}{'less':>5}" * len(settings))
    for method, title in METHODS.items():
        line = f"{title:16}"
        for setting in settings:
            if (setting, method) not in cells:
                line += " " * 26
                continue
            cell = cells[setting, method]
            counts = "-".join(map(str, sorted({min(cell.groups), max(cell.groups)})))
            index = "" if np.isnan(cell.indices).any() else f"{np.mean(cell.indices):.2f}"
            line += f"{cell.accuracies.mean():9.3f}{counts:>7}{index:>5}{cell.worse:>5}"
        print(line.rstrip())
    n = len(cells[settings[0], "coterie"].accuracies)
    print(f"\naccuracy: mean over {n} users; groups: of users who share a head, or the centre of "
          "their heads;\n"
          "ARI: adjusted Rand index with the true groups; less: users with less accuracy than with "
          "FedPer or\n"
          "fine-tuning, by more than chance")
    for setting in settings:
        goal = "oracle" if (setting, "oracle") in cells else \
            max(("fedper", "fedrep", "fine_tuning"), key=lambda method: cells[setting,
                method].accuracies.mean())
        difference = cells[setting, "coterie"].accuracies - cells[setting, goal].accuracies
        print(f"{setting}: coterie - {METHODS[goal]}: {difference.mean():+.4f}, p = "
              f"{signed_rank(difference):.2g} "
              "(Wilcoxon's signed-rank test over users)")


def draw(cells: dict[tuple[str, str], Cell], file: Path) -> None:
    """Accuracies of all methods in all settings, with standard errors over users."""
    from matplotlib.figure import Figure

    settings = list(dict.fromkeys(setting for setting, _ in cells))
    figure = Figure(figsize=(3 + 2.2 * len(settings), 3.6), layout="constrained")
    for axes, setting in zip(figure.subplots(1, len(settings), sharey=True), settings, strict=True):
        for y, method in enumerate(reversed(METHODS)):
            if (setting, method) in cells:
                values = cells[setting, method].accuracies
                axes.errorbar(values.mean(), y, xerr=values.std() / np.sqrt(len(values)), fmt="o",
                              capsize=2,
                              color="C3" if method == "coterie" else "C0" if method == "oracle"
                              else "0.45")
        axes.set_yticks(range(len(METHODS)), [*reversed(METHODS.values())])
        axes.set(title=setting, xlabel="accuracy on unseen images")
        axes.grid(axis="x", linewidth=0.4)
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description="Personal heads on a shared encoder")
    parser.add_argument("folder", nargs="?", default=".", type=Path)
    parser.add_argument("--quick", action="store_true", help="two settings, one seed")
    parser.add_argument("--seeds", nargs="+", type=int, default=[30, 31])
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    names = [f"{setting} {seed}" for setting in SETTINGS[:2 if given.quick else None]
             for seed in given.seeds[:1 if given.quick else None]]
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary).resolve()
        print(f"Flower trains {len(names)} encoders: {USERS} users at {NODES} nodes, {ROUNDS} "
              "rounds", flush=True)
        stored = train_on_flower(names, ROUNDS, out)
        print(f"  trained after {time.monotonic() - begin:.0f} s", flush=True)
        results = []
        with ProcessPoolExecutor(2) as pool:
            tasks = {name: pool.submit(compare, name, stored, str(out / "embeddings"))
                     for name in names}
            for name, task in tasks.items():
                results.append(task.result())
                ours = results[-1][0][0]
                print(f"  {name}: coterie has {ours.note}; {ours.groups} groups, "
                      f"{ours.seconds:.0f} s", flush=True)
    cells = summarise(results)
    show(cells)
    draw(cells, given.folder / "heads.png")
    print(f"Picture: {given.folder / 'heads.png'}")


if __name__ == "__main__":
    main()
