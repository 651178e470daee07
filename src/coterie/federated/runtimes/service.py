"""The server's side of a deployed federation: from a run's configuration to a run folder.

`CONFIG` lists every setting with its default; it is what `flwr run --run-config` may change.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from coterie.data.scaling import Standardizer
from coterie.data.users import Moments, Participants
from coterie.errors import Incompatible, InvalidInput
from coterie.federated.algorithms import ALGORITHMS
from coterie.federated.algorithms.base import Algorithm, Federation, State
from coterie.federated.algorithms.participation import Participation
from coterie.federated.checkpoint import Checkpoint
from coterie.federated.driver import Driver, DriverResult, Round
from coterie.federated.path import FederatedPath
from coterie.federated.protocol.messages import Batch
from coterie.federated.run import Federated, digest, fingerprint, finish
from coterie.federated.runtimes.in_process import Runtime
from coterie.federated.sources import loss as make_loss
from coterie.graph import Graph
from coterie.graph.weights import KINDS
from coterie.losses import Multinomial
from coterie.problem import check_lam
from coterie.storage import write_atomically

log = logging.getLogger("coterie.federated")

#: Every setting of a run and its default. The second part is what the nodes are told.
CONFIG: dict[str, Any] = {
    "algorithm": "newton", "algorithm-options": "", "lam": 0.01, "lams": "", "weights": "", "participation": 1.0,
    "tol": 1e-6, "rounds": 0, "users": 0, "wait": 120.0, "round-timeout": 60.0, "poll": 0.1, "patience": 0,
    "standardize": False, "out": "run", "checkpoint": "", "metrics": "",
    "loss": "logistic", "loss-options": "", "seed": 0, "held-out": 0.0, "data": "", "path": "", "user": "",
    "target": "", "split": False, "dataset": "", "dataset-options": "",
}
_FOR_NODES = ("loss", "loss-options", "seed", "held-out", "data", "path", "user", "target", "split", "dataset",
              "dataset-options")


class Carrier(Runtime, Protocol):
    """A runtime that can find its users."""

    config: dict[str, Any]
    names: tuple[Any, ...]

    def forget(self) -> None:
        """Leave answers that are still on their way."""

    def gather(self, expected: int, patience: float) -> tuple[tuple[Any, ...], tuple[str, ...], int]: ...


def settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with its defaults; refuses what is not a setting."""
    unknown = sorted(set(config) - set(CONFIG))
    if unknown:
        raise InvalidInput(f"unknown setting {unknown[0]!r}", remedy=f"Settings are: {', '.join(CONFIG)}")
    return {**CONFIG, **config}


def for_nodes(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the nodes are told."""
    return {key: config[key] for key in _FOR_NODES}


def algorithm_of(config: Mapping[str, Any]) -> Algorithm:
    name = str(config["algorithm"])
    if name not in ALGORITHMS:
        raise InvalidInput(f"unknown algorithm {name!r}", remedy=f"Choose one of: {', '.join(ALGORITHMS)}")
    try:
        return ALGORITHMS[name](**json.loads(str(config["algorithm-options"]) or "{}"))
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"the algorithm {name!r} cannot be made with {config['algorithm-options']!r}: {error}",
                           remedy='Give its settings as JSON, such as {"rank": 5}') from error


def serve(runtime: Carrier, config: Mapping[str, Any], progress: Callable[[Round], None] | None = None) -> Served:
    """Wait for the users, run, certify; a run with a checkpoint goes on where it was."""
    checkpoint = Checkpoint(config["checkpoint"] or Path(str(config["out"])) / "checkpoint")
    algorithm = algorithm_of(config)
    weights = str(config["weights"]) or None
    if weights is not None and weights not in KINDS:
        raise InvalidInput(f"unknown weights {weights!r}", remedy=f"Choose one of: {', '.join(KINDS)}")
    facts = _facts(runtime, config, checkpoint.directory / "federation.json")
    names, features = tuple(facts["names"]), tuple(facts["features"])
    loss = make_loss(str(config["loss"]), str(config["loss-options"]))
    if isinstance(loss, Multinomial) and loss.n_classes is None:
        loss = replace(loss, n_classes=int(facts["classes"]))
        options = {**json.loads(str(config["loss-options"]) or "{}"), "n_classes": loss.n_classes}
        runtime.config["loss-options"] = json.dumps(options)
    runtime.names = names
    runtime.config["run"] = facts["run"]
    if config["standardize"]:
        runtime.config |= {"means": facts["means"], "scale": facts["scale"]}
    share = config["participation"]
    federation = Federation(
        names=names, dim=loss.dim(Participants(names, features)), loss=loss, lam=float(config["lam"]),
        graph=Graph.complete(len(names)), seed=int(config["seed"]), features=features,
        participation=Participation.of(share if isinstance(share, int) and share > 1 else float(share)),
        patience=int(config["patience"]) or None)
    tol, users = float(config["tol"]), digest(np.frombuffer(repr(names).encode(), np.uint8))

    def drive(federation: Federation, weights: str | None, folder: Checkpoint, start: State | None) -> DriverResult:
        driver = Driver(federation, algorithm, runtime, tol=tol, max_rounds=int(config["rounds"]) or None,
                        weights=weights, start=start, score=float(config["held-out"]) > 0, checkpoint=folder,
                        progress=progress,
                        fingerprint=fingerprint(federation, algorithm, tol, graph=weights or "", users=users))
        return driver.run()

    if not config["lams"]:
        return Served(finish(drive(federation, weights, checkpoint, None), algorithm, tol), None)
    found: list[Federated] = []
    state = None
    for k, lam in enumerate(lams_of(config)):
        runtime.forget()  # answers on their way belong to another run, with the same numbers of rounds
        runtime.config["run"] = f"{facts['run']}-{k}"
        outcome = drive(replace(federation, lam=lam), weights, Checkpoint(checkpoint.directory / f"lam-{k:02d}"), state)
        found.append(finish(outcome, algorithm, tol))
        if outcome.interrupted:
            return Served(found[-1], None)
        state, weights, federation = outcome.state, None, replace(federation, graph=outcome.federation.graph)
    path = FederatedPath(runs=tuple(found))
    return Served(path.best(), path)


def lams_of(config: Mapping[str, Any]) -> list[float]:
    """The lams of a path, the largest first."""
    try:
        lams = [float(text) for text in str(config["lams"]).replace(",", " ").split()]
    except ValueError as error:
        raise InvalidInput(f"lams must be numbers, got {config['lams']!r}", remedy="For example 1 0.1 0.01") from error
    if not float(config["held-out"]) > 0:
        raise InvalidInput("a path is chosen from by rows held out, and there are none", remedy="Set held-out = 0.2")
    return sorted(map(check_lam, lams), reverse=True)


class Served(NamedTuple):
    """What a deployed run found: of a path, the best and all."""

    best: Federated
    path: FederatedPath | None


def _facts(runtime: Carrier, config: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Who takes part, and how the columns are scaled: settled at the first start and kept for later ones."""
    if file.exists():
        facts: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return facts
    names, features, classes = runtime.gather(int(config["users"]), float(config["wait"]))
    facts = {"names": list(names), "features": list(features), "classes": classes, "run": uuid.uuid4().hex}
    runtime.names = names
    if config["standardize"]:
        moments = _moments(runtime, len(names), len(features))
        scaler = Standardizer.from_moments(moments, feature_names=features)
        facts |= {"means": scaler.mean.tolist(), "scale": scaler.scale.tolist()}
    write_atomically(file, json.dumps(facts, ensure_ascii=False).encode())
    return facts


def _moments(runtime: Carrier, n_users: int, n_features: int) -> Moments:
    """Every user's count, means and spreads."""
    counts, sums = np.zeros(n_users, dtype=np.int64), np.zeros((2, n_users, n_features))
    missing = np.arange(n_users)
    for turn in range(1 << 30, (1 << 30) + 10):  # no round of the run has such a number: a late answer is not mistaken
        for k, reply in runtime.exchange(Batch("describe", turn, missing)).singles:
            fits = all(reply.arrays.get(name, np.empty(0)).shape == (n_features,) for name in ("means", "m2"))
            if reply.kind == "describe" and fits and np.isfinite(reply.arrays["m2"]).all():
                counts[k] = int(reply.arrays["count"])
                sums[:, k] = reply.arrays["means"], reply.arrays["m2"]
        missing = np.flatnonzero(counts == 0)
        if not missing.size:
            return Moments(counts, sums[0], sums[1])
    raise Incompatible(f"{missing.size} user(s) did not describe their columns, so nothing can be scaled. Start their "
                       "nodes, or leave `standardize` out.")
