"""Rounds one after the other, over any runtime: ask, carry, tell, enter into the ledger, save."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np

from coterie.base.errors import Incompatible, InvalidInput
from coterie.base.labels import many
from coterie.base.types import Array
from coterie.federated.algorithms.base import Algorithm, Federation, Replies, State
from coterie.federated.algorithms.proof import Proof
from coterie.federated.checkpoint import Checkpoint, digest
from coterie.federated.protocol.ledger import Entry, Ledger
from coterie.federated.protocol.messages import Batch
from coterie.federated.runtimes.in_process import Runtime
from coterie.federated.settings import FederationSettings
from coterie.federated.stages import RunState, Stages
from coterie.problem.graph import Graph
from coterie.problem.solution import Certificate

_VERSION = 2  # of the states in a checkpoint: increase it when a field of a state is renamed


class Round(NamedTuple):
    """One line of a federated run's history; the first five fields are those of every solver's."""

    iteration: int  # the round
    objective: float  # nan until certified
    gap: float  # certified relative gap; nan until certified
    n_clusters: int
    seconds: float
    stage: str
    asked: int
    answered: int
    estimate: float  # what the algorithm believes its gap to be
    bytes_up: int
    bytes_down: int

    def __str__(self) -> str:
        start = f"round {self.iteration} ({self.stage}): {self.answered} of {self.asked} answered"
        if not self.n_clusters:  # a question of a fit, which finds groups when it has the answers
            return f"{start}, {self.bytes_up:,} bytes up and {self.bytes_down:,} down"
        near = f"certified gap {self.gap:.1e}" if self.gap is not None and np.isfinite(
            self.gap) else \
            f"gap about {self.estimate or np.nan:.0e}"
        return f"{start}, {many(self.n_clusters, 'group')}, {near}"


class DriverResult(NamedTuple):
    """Where a run is, or how it ended."""

    models: Array  # (n_active, dim)
    certificate: Certificate
    federation: Federation  # with the graph that was used
    state: State
    ledger: Ledger
    history: tuple[Round, ...]
    # (n_users, 3) held-out loss, correct predictions and rows, if they were asked for.
    scores: Array | None
    proven: bool  # whether all users answered for the certificate
    seconds: float


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the block is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals: list[Any] = []
    handler = signal.signal(signal.SIGINT, lambda *arguments: signals.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if signals and callable(handler):
        handler(*signals[0])


class Driver:
    """One run over a runtime; a run that was saved in the settings' checkpoint is continued.

    Parameters
    ----------
    federation, settings : what is solved, and how.
    runtime : carries the queries to the users and their replies back.
    progress : called after every round.

    Raises
    ------
    InvalidInput : the checkpoint belongs to another run.
    """

    def __init__(self, federation: Federation, settings: FederationSettings, runtime: Runtime,
                 progress: Callable[[Round], None] | None = None) -> None:
        self.settings, self.runtime, self.progress = settings, runtime, progress
        self.stages = Stages(federation, settings)
        self.checkpoint = None if settings.checkpoint is None else Checkpoint(settings.checkpoint)
        self.fingerprint = fingerprint(federation, settings, runtime.identity())
        self.ledger, self.history = Ledger(federation.n_users), list[Round]()
        self.unsaved: list[dict[str, Any]] = []  # lines of the journal
        self.began = time.perf_counter()
        self.now = self._load() or self.stages.first()

    # -- the rounds

    def run(self) -> DriverResult:
        """Run the remaining rounds. Ctrl-C saves the state and is raised again; `result` is the
        best result so far.
        """
        try:
            while self.now.stage != "done":
                line = self._round()
                if self.progress is not None:
                    self.progress(line)
        except KeyboardInterrupt:
            self._save(force=True)
            raise
        self._save(force=True)
        return self.result()

    def _round(self) -> Round:
        now = self.now
        method = self.stages.method(now.stage)
        queries = method.ask(now.state)
        replies = self.runtime.exchange(queries)
        state = method.tell(now.state, replies)
        if state.aside.all():
            turn, user, reason = state.refusals[-1]
            raise Incompatible(f"All users were excluded, so nothing is left to solve; the last, "
                               f"{self.stages.federation.names[user]!r} in round {turn}: {reason}.")
        with uninterrupted():  # a round counts completely or not at all
            return self._settle(replace(now, state=state, round=now.round + 1), queries, replies)

    def _settle(self, now: RunState, queries: Batch, replies: Replies) -> Round:
        """Enter a round into the ledger and the history, find what comes next, and save."""
        method, state = self.stages.method(now.stage), now.state
        entries, up, down = self.ledger.record_round(queries, replies.batches, replies.singles)
        objective = gap = np.nan
        if now.stage == "proof" and method.finished(state):
            certificate = method.certificate(state)
            objective, gap = certificate.objective, certificate.relative_gap
        line = Round(queries.round, objective, gap, method.labels(state),
                     time.perf_counter() - self.began, now.stage,
                     len(queries), sum(map(len, replies.batches)) + len(replies.singles),
                     float(method.estimate(state)) if now.stage == "main" else np.nan, up, down)
        self.history.append(line)
        self.unsaved.append({"round": line, "entries": entries})
        self.now = self.stages.next(now)
        self._save()
        return line

    def result(self) -> DriverResult:
        """The best certified models so far; without a certificate, the models as they are."""
        now, federation = self.now, self.stages.federation
        proof, state = Proof(federation), now.state if now.main is None else now.main
        if now.best is not None and bool((now.best["aside"] == state.aside).all()):
            best = now.best
            judged = replace(proof.start(state, best["now"][~state.aside], best["duals"]),
                             slopes=best["slopes"],
                             answered=best["answered"], answers=best["answers"])
        else:  # no replies: the objective is unknown, and there is no bound
            method = self.stages.method(now.stage if now.stage in ("weights", "start") else "main")
            models, duals = method.point(state)
            none = np.zeros((federation.problem(~state.aside).graph.n_edges, federation.dim))
            judged = proof.start(state, models, none if duals is None else duals)
        return DriverResult(judged.now[~judged.aside], proof.certificate(judged), federation, state,
                            self.ledger,
                            tuple(self.history), now.scores, proof.finished(judged),
                            time.perf_counter() - self.began)

    # -- on disk

    def _save(self, force: bool = False) -> None:
        now = self.now
        if self.checkpoint is None or not (force or now.round % self.settings.every == 0
                                           or now.stage == "done"):
            return
        graph = None if now.graph is None else {"edges": now.graph.edges,
                                                "weights": now.graph.weights}
        saved = {f.name: getattr(now, f.name) for f in fields(now) if f.name != "graph"}
        accounts = {"/".join(key): account for key, account in self.ledger.per_user.items()}
        self.checkpoint.save({**saved, "graph": graph, "fingerprint": self.fingerprint,
                              "accounts": accounts,
                              "runtime": self.runtime.snapshot()}, self.unsaved)
        self.unsaved = []

    def _load(self) -> RunState | None:
        loaded = None if self.checkpoint is None else self.checkpoint.load()
        if loaded is None or self.checkpoint is None:
            return None
        saved, lines = loaded
        for key, value in self.fingerprint.items():
            if saved["fingerprint"].get(key) != value:
                raise InvalidInput(f"the checkpoint in {self.checkpoint.directory} is of another "
                                   f"run: its {key} is "
                                   f"{saved['fingerprint'].get(key)!r}, this run's is {value!r}",
                                   remedy="Give another directory, or the same settings")
        federation, graph = self.stages.federation, saved.pop("graph")
        if graph is not None:
            graph = Graph(federation.n_users, graph["weights"],
                          np.asarray(graph["edges"], dtype=np.int64))
            self.stages.use(graph)
        self.runtime.restore(saved["runtime"])
        self.ledger.per_user = {(way, name): account for key, account in saved["accounts"].items()
                                for way, name in [key.split("/")]}
        for line in lines:
            self.history.append(Round(*line["round"]))
            self.ledger.entries += [Entry(*entry) for entry in line["entries"]]
        stage, shape = saved["stage"], np.zeros((federation.n_users, federation.dim))

        def state(values: dict[str, Any] | None, owner: str) -> Any:
            if values is None:
                return None
            values["refusals"] = tuple(map(tuple, values["refusals"]))
            return replace(self.stages.method(owner).begin(shape), **values)

        return RunState(stage=stage,
                        state=state(saved["state"], "main" if stage == "done" else stage),
                        main=state(saved["main"], "main"), models=saved["models"], graph=graph,
                        believe=saved["believe"], best=saved["best"], scores=saved["scores"],
                        round=saved["round"])


def fingerprint(federation: Federation, settings: FederationSettings,
                identity: dict[str, str]) -> dict[str, Any]:
    """What must agree for a saved run to be continued; `identity` is the runtime's part."""
    given, start = federation.participation, settings.start
    trace = None if given.trace is None else digest(np.asarray(given.trace))
    return {
        "version": _VERSION, "algorithm": repr(settings.algorithm), "loss": repr(federation.loss),
        "lam": federation.lam, "tol": settings.tol, "seed": federation.seed,
        "participation": f"{given.fraction} {given.count} {given.order} {trace}",
        "number of users": federation.n_users, "length of a model": federation.dim,
            "patience": federation.patience,
        "graph": settings.weights if settings.weights != "unit"
            else digest(federation.graph.weights,
                                                                            federation.graph.pairs),
        "start": repr(start) if start is None or isinstance(start, Algorithm) else
        digest(np.asarray(start.now if isinstance(start, State) else start, dtype=float)),
            **identity}
