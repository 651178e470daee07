"""Rounds one after the other, on any runtime: ask, carry, tell, save; then the certificate.

A run goes through stages, each a `Method`: "weights" (one round of local optima, where the graph is to be made of
them), "start" (where another algorithm prepares the first models), "main", and "proof" whenever "main" believes to have
arrived, or has ended. Everything it knows between two rounds is in `RunState`, which can be saved and taken up again.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from coterie._typing import Array
from coterie.errors import Incompatible, InvalidInput
from coterie.federated.algorithms.base import Algorithm, Federation, Method, Replies, State
from coterie.federated.algorithms.proof import GradientRound, LocalOptimaRound, Proof, ScoreRound, duals_for
from coterie.federated.checkpoint import Checkpoint
from coterie.federated.protocol.ledger import Entry, Ledger
from coterie.federated.protocol.messages import Batch
from coterie.federated.runtimes.in_process import Runtime
from coterie.graph import Graph
from coterie.graph.weights import adaptive_graph
from coterie.solution import Certificate


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


class DriverResult(NamedTuple):
    """How a run ended."""

    models: Array  # (n_active, dim)
    certificate: Certificate
    federation: Federation  # with the graph that was used
    state: State
    ledger: Ledger
    history: tuple[Round, ...]
    scores: Array | None  # (n_users, 3) held-out loss, right predictions and rows, if they were asked for
    proven: bool  # whether all users answered for the certificate
    interrupted: bool
    seconds: float


@dataclass(frozen=True, kw_only=True, eq=False)
class RunState:
    """Everything a run knows between two rounds."""

    stage: str
    state: Any  # of the stage's method
    main: Any  # of the main method, while it is being judged
    models: Array  # to begin the next stage from
    graph: Graph | None  # made of weights
    believe: float  # the estimate at which the next certificate is asked for
    best: Any  # models, duals and answers of the best certificate so far, if any
    scores: Array | None
    round: int


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the block is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[Any] = []
    handler = signal.signal(signal.SIGINT, lambda *given: came.append(given))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if came and callable(handler):
        handler(*came[0])


class Driver:
    """One run: an algorithm on a federation, over a runtime."""

    def __init__(self, federation: Federation, algorithm: Algorithm, runtime: Runtime, *, tol: float,
                 max_rounds: int | None = None,
                 weights: str | None = None, start: Array | Algorithm | State | None = None, score: bool = False,
                 checkpoint: Checkpoint | None = None, fingerprint: dict[str, Any] | None = None, every: int = 1,
                 progress: Callable[[Round], None] | None = None) -> None:
        self.federation, self.algorithm, self.runtime, self.tol = federation, algorithm, runtime, tol
        self.weights, self.start, self.score = weights, start, score
        self.checkpoint, self.every, self.progress = checkpoint, every, progress
        self.fingerprint = fingerprint or {}
        self.ledger = Ledger(federation.n_users)
        self.history: list[Round] = []
        self.lines: list[dict[str, Any]] = []
        self._methods: dict[str, Method] = {}
        self.now: RunState
        main, share = algorithm.on(federation, tol), federation.participation.share(federation.n_users)
        # The fewer users a round asks, the more of them a sweep takes.
        self.max_rounds = main.rounds_within(share) if max_rounds is None else max_rounds
        if self.max_rounds < 1:
            raise InvalidInput(f"max_rounds must be at least 1, got {max_rounds!r}", remedy="Leave it at None")

    # -- the stages

    def method(self, stage: str) -> Any:
        if stage not in self._methods:
            judges: dict[str, type[Method]] = {"weights": LocalOptimaRound, "gradients": GradientRound, "proof": Proof,
                                               "score": ScoreRound}
            algorithm = self.start if stage == "start" and isinstance(self.start, Algorithm) else self.algorithm
            self._methods[stage] = (judges[stage](self.federation) if stage in judges else
                                    algorithm.on(self.federation, self.tol))
        return self._methods[stage]

    def _first(self) -> RunState:
        shape = (self.federation.n_users, self.federation.dim)
        models = np.zeros(shape)
        if self.start is not None and not isinstance(self.start, (Algorithm, State)):
            given = np.asarray(self.start, dtype=float)
            if given.shape not in (shape, shape[1:]) or not np.isfinite(given).all():
                raise InvalidInput(f"start must be finite models of shape {shape} or {shape[1:]}, got {given.shape}",
                                   remedy="Leave it out to begin from zero")
            models = np.array(np.broadcast_to(given, shape))
        blank = RunState(stage="", state=None, main=None, models=models, graph=None, believe=self.tol, best=None,
                         scores=None, round=0)
        stage = "weights" if self.weights is not None else "start" if isinstance(self.start, Algorithm) else "main"
        warm = isinstance(self.start, State)
        return replace(blank, stage=stage, state=self.method("main").warm(self.start) if warm else
                       self.method(stage).begin(models))

    def _next(self, now: RunState) -> RunState:
        """The stage after this one, if it has ended; `stage` is "done" at the end of all."""
        method, state = self.method(now.stage), now.state
        if now.stage == "weights" and (method.finished(state) or now.round >= self.max_rounds):
            if not method.finished(state):
                raise Incompatible("Some users did not tell their local models, and the weights need them all. "
                                   "Give a graph, or patience=, after which silent users are set aside.")
            graph = method.graph(state, lambda local: adaptive_graph(local, str(self.weights)))
            self._use(graph)
            stage = "start" if isinstance(self.start, Algorithm) else "main"
            first = self._carry(state, self.method(stage).begin(now.models), stage)
            return replace(now, stage=stage, state=first, graph=graph, round=0)
        if now.stage == "start":
            share = self.federation.participation.share(self.federation.n_users)
            over = now.round >= method.rounds_within(share)
            if not (over or method.finished(state) or method.estimate(state) <= self.tol):
                return now
            models = method.models(state)
            return replace(now, stage="main", state=self._carry(state, self.method("main").begin(models), "main"),
                           models=models, round=0)
        if now.stage == "main":
            over = now.round >= self.max_rounds or method.finished(state)
            if not over and not method.estimate(state) <= now.believe:
                return now
            return self._judge(replace(now, main=state))
        if now.stage == "gradients" and method.finished(state):
            active = ~state.aside
            models = method.models(state)
            duals = duals_for(self.federation, active, models[active], state.found[active])
            return replace(now, stage="proof", state=self.method("proof").start(state, models[active], duals))
        if now.stage == "proof":
            over = now.round >= self.max_rounds + self._patience
            if method.finished(state) or over:
                return self._judged(now)
        if now.stage == "gradients" and now.round >= self.max_rounds + self._patience:
            return self._ended(now, self._carry(state, now.main, "main"))
        if now.stage == "score" and (method.finished(state) or now.round >= self.max_rounds + 2 * self._patience):
            if now.best is not None and bool((state.aside != now.best["aside"]).any()) and now.round < self.max_rounds:
                # Somebody was set aside while scoring: the others have an optimum of their own.
                main = self._carry(state, now.main, "main")
                return replace(now, stage="main", state=main, main=None, best=None, believe=self.tol)
            return replace(now, stage="done", state=self._carry(state, now.main, "main"), main=None, scores=state.found)
        return now

    def _ended(self, now: RunState, main: Any) -> RunState:
        if not self.score:
            return replace(now, stage="done", state=main, main=None)
        models = self.method("main").point(main)[0] if now.best is None else now.best["now"][~main.aside]
        return replace(now, stage="score", state=self.method("score").start(main, models), main=main)

    @property
    def _patience(self) -> int:
        """Rounds beyond the last that the certificate may take, where users are not always there."""
        trace = self.federation.participation.trace
        return 50 + (0 if trace is None else 2 * len(np.asarray(trace)))

    def _judge(self, now: RunState) -> RunState:
        method = self.method("main")
        models, duals = method.point(now.main)
        if duals is None:
            return replace(now, stage="gradients", state=self.method("gradients").start(now.main, models))
        return replace(now, stage="proof", state=self.method("proof").start(now.main, models, duals))

    def _judged(self, now: RunState) -> RunState:
        state, main = now.state, self._carry(now.state, now.main, "main")
        gap = self.method("proof").certificate(state).relative_gap
        best = now.best
        if best is None or bool((state.aside != best["aside"]).any()) or gap <= best["gap"]:
            best = {"gap": gap, **{name: getattr(state, name) for name in
                                   ("now", "duals", "slopes", "told", "answers", "aside")}}
        now = replace(now, best=best, main=None)
        ended = self.method("main").finished(main) or now.round >= self.max_rounds
        if gap <= self.tol or ended or not bool((state.told | state.aside).all()):
            return self._ended(now, main)
        # Not there yet: the next certificate when the estimate has fallen by as much as the gap must.
        factor = float(np.clip(0.5 * self.tol / gap, 0.01, 0.5)) if np.isfinite(gap) else 0.1
        believed = min(self.method("main").estimate(main), now.believe)
        return replace(now, stage="main", state=main, believe=factor * believed)

    def _carry(self, old: Any, new: Any, stage: str) -> Any:
        """The state of another stage, with what does not depend on the method: the round, who was set aside and why."""
        left = np.flatnonzero(old.aside & ~new.aside)
        new = replace(new, round=old.round, aside=old.aside, refusals=old.refusals, missed=old.missed)
        return self.method(stage)._forget(new, left) if left.size else new

    def _use(self, graph: Graph) -> None:
        self.federation = replace(self.federation, graph=graph)
        self._methods.clear()

    # -- the rounds

    def run(self) -> DriverResult:
        began, interrupted = time.perf_counter(), False
        self.now = self._load() or self._first()
        try:
            while self.now.stage != "done":
                line = self._round(began)
                if self.progress is not None:
                    self.progress(line)
        except KeyboardInterrupt:
            interrupted = True
        self._save(force=True)
        return self._outcome(self.now, interrupted, time.perf_counter() - began)

    def _round(self, began: float) -> Round:
        now = self.now
        method, stage = self.method(now.stage), now.stage
        queries = method.ask(now.state)
        replies = self.runtime.exchange(queries)
        state = method.tell(now.state, replies)
        if state.aside.all():
            turn, user, reason = state.refusals[-1]
            raise Incompatible(f"All users were set aside, so nothing is left to solve; the last, "
                               f"{self.federation.names[user]!r} in round {turn}: {reason}.")
        with uninterrupted():  # a round counts as a whole or not at all
            return self._settled(began, replace(now, state=state, round=now.round + 1), stage, queries, replies)

    def _settled(self, began: float, now: RunState, stage: str, queries: Batch, replies: Replies) -> Round:
        """Enter a round into the books, see what comes next, and save."""
        method, state = self.method(stage), now.state
        turn, first = queries.round, len(self.ledger.entries)
        self.ledger.record(queries, "down", turn)
        for batch in replies.batches:
            self.ledger.record(batch, "up", turn)
        for user, message in replies.singles:
            self.ledger.record_one(user, message, turn)
        answered = sum(map(len, replies.batches)) + len(replies.singles)
        objective = gap = np.nan
        if stage == "proof" and method.finished(state):
            certificate = method.certificate(state)
            objective, gap = certificate.objective, certificate.relative_gap
        entries = self.ledger.entries[first:]
        up, down = (sum(e.bytes for e in entries if e.direction == way) for way in ("up", "down"))
        main = self.method("main")
        estimate = float(main.estimate(state)) if stage == "main" else np.nan
        line = Round(turn, objective, gap, method.labels(state), time.perf_counter() - began, stage, len(queries),
                     answered, estimate, up, down)
        self.history.append(line)
        self.lines.append({"round": line, "entries": entries})
        self.now = self._next(now)
        self._save()
        return line

    def _outcome(self, now: RunState, interrupted: bool, seconds: float) -> DriverResult:
        proof = Proof(self.federation)
        state = now.main if now.main is not None else now.state
        known = now.best is not None and bool((now.best["aside"] == state.aside).all())
        if not known:  # judged without an answer: an objective nobody knows, and no bound
            method = self.method(now.stage if now.stage in ("weights", "start") else "main")
            models, duals = method.point(state)
            empty = np.zeros((self.federation.problem(~state.aside).graph.n_edges, self.federation.dim))
            judged = proof.start(state, models, empty if duals is None else duals)
        else:
            best = now.best
            judged = replace(proof.start(state, best["now"][~state.aside], best["duals"]), slopes=best["slopes"],
                             told=best["told"], answers=best["answers"])
        return DriverResult(judged.now[~judged.aside], proof.certificate(judged), self.federation, state, self.ledger,
                       tuple(self.history), now.scores, proof.finished(judged), interrupted, seconds)

    # -- on disk

    def _save(self, force: bool = False) -> None:
        now = self.now
        if self.checkpoint is None or not (force or now.round % self.every == 0 or now.stage == "done"):
            return
        graph = None if now.graph is None else {"edges": now.graph.edges, "weights": now.graph.weights}
        saved = {f.name: getattr(now, f.name) for f in fields(now) if f.name != "graph"}
        accounts = {"/".join(key): account for key, account in self.ledger.per_user.items()}
        self.checkpoint.save({**saved, "graph": graph, "fingerprint": self.fingerprint, "accounts": accounts,
                              "runtime": self.runtime.snapshot()}, self.lines)
        self.lines = []

    def _load(self) -> RunState | None:
        found = None if self.checkpoint is None else self.checkpoint.load()
        if found is None or self.checkpoint is None:
            return None
        saved, lines = found
        for key, value in self.fingerprint.items():
            if saved["fingerprint"].get(key) != value:
                raise InvalidInput(f"the checkpoint in {self.checkpoint.directory} is of another run: its {key} is "
                                   f"{saved['fingerprint'].get(key)!r}, here it is {value!r}",
                                   remedy="Give another directory, or the same settings")
        graph = saved.pop("graph")
        if graph is not None:
            graph = Graph(self.federation.n_users, graph["weights"], np.asarray(graph["edges"], dtype=np.int64))
            self._use(graph)
        self.runtime.restore(saved["runtime"])
        self.ledger.per_user = {(way, name): account for key, account in saved["accounts"].items()
                                for way, name in [key.split("/")]}
        for line in lines:
            self.history.append(Round(*line["round"]))
            self.ledger.entries += [Entry(*entry) for entry in line["entries"]]
        stage, shape = saved["stage"], np.zeros((self.federation.n_users, self.federation.dim))

        def state(values: dict[str, Any] | None, owner: str) -> Any:
            if values is None:
                return None
            values["refusals"] = tuple(map(tuple, values["refusals"]))
            return replace(self.method(owner).begin(shape), **values)

        return RunState(stage=stage, state=state(saved["state"], "main" if stage == "done" else stage),
                        main=state(saved["main"], "main"), models=saved["models"], graph=graph,
                        believe=saved["believe"], best=saved["best"], scores=saved["scores"], round=saved["round"])
