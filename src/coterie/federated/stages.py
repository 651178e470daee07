"""A run of an algorithm: the stages it goes through, each a `Method`, in one session.

    weights    one round of local models, where the graph is made from them
    start      another algorithm, which prepares the first models
    main       the algorithm itself
    gradients  the users' gradients, for an algorithm without duals
    proof      the certificate, whenever "main" believes that it has arrived, or has ended
    score      every user scores its model on rows held out
    done

After a proof that falls short of the tolerance "main" continues.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from coterie.base.errors import Incompatible, InvalidInput
from coterie.base.types import Array
from coterie.federated.algorithms.base import Algorithm, Federation, Runtime, State
from coterie.federated.algorithms.proof import Proof, Survey, duals_for
from coterie.federated.protocol.messages import digest, square
from coterie.federated.screen import Screen
from coterie.federated.session import Round, Session, uninterrupted
from coterie.federated.settings import FederationSettings
from coterie.problem.graph import Graph
from coterie.problem.solution import Certificate
from coterie.problem.weights import LocalModels, adaptive_graph

_VERSION = 3  # of the states in a checkpoint: increase it when a field of a state is renamed
_KINDS = {"weights": "local", "gradients": "gradient", "score": "score"}


@dataclass(frozen=True, kw_only=True, eq=False)
class RunState:
    """Everything a run knows between two rounds; it can be saved and continued.

    Parameters
    ----------
    stage : the name of the stage.
    state : of the stage's method.
    main : of the main method, while it is being judged.
    models : (n_users, dim) the next stage starts from these.
    graph : made from weights, if it was.
    believe : the estimate at which the next certificate is asked for.
    best : gap, models, duals and answers of the best certificate so far, if there is one.
    scores : (n_users, 3) held-out loss, correct predictions and rows, once they are known.
    round : rounds of this stage and the main ones before it.
    """

    stage: str
    state: Any
    main: Any = None
    models: Array
    graph: Graph | None = None
    believe: float
    best: Any = None
    scores: Array | None = None
    round: int = 0


class Stages:
    """The stages of one run over a runtime; a run that was saved in the settings' checkpoint is
    continued.

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
        self.federation, self.settings, self.progress = federation, settings, progress
        self.methods: dict[str, Any] = {}
        # The fewer users a round asks, the more rounds a sweep through all of them takes.
        self.share = federation.participation.share(federation.n_users)
        self.max_rounds = settings.max_rounds or self.method("main").rounds_within(self.share)
        # Rounds beyond the last that the certificate may take, as users are not always there.
        trace = federation.participation.trace
        self.patience = 50 + (0 if trace is None else 2 * len(np.asarray(trace)))
        before = getattr(settings.start, "state", settings.start)
        self.begun = before if isinstance(before, State) else None  # by an earlier run
        self.screen = Screen(federation, heard=self.begun is not None)
        self.session = Session(runtime, federation.names, progress=progress,
                               checkpoint=settings.checkpoint,
                               fingerprint=fingerprint(federation, settings, runtime.identity()))
        numbers = {name: user for user, name in enumerate(federation.names)}
        self.session.refused = [(turn, numbers.get(user, user), reason) for turn, user, reason in
                                getattr(settings.start, "refusals", ())]
        self.now = self._loaded() or self._first()

    def method(self, stage: str) -> Any:
        """The method of a stage."""
        if stage not in self.methods:
            start = self.settings.start
            algorithm = start if stage == "start" and isinstance(start, Algorithm) \
                else self.settings.algorithm
            self.methods[stage] = Proof(self.federation) if stage == "proof" else \
                Survey(self.federation, _KINDS[stage]) if stage in _KINDS else \
                algorithm.on(self.federation, self.settings.tol)
        return self.methods[stage]

    def _use(self, graph: Graph) -> None:
        """Continue on this graph."""
        self.federation = replace(self.federation, graph=graph)
        self.methods.clear()

    # -- the rounds

    def run(self) -> None:
        """Stages the remaining rounds. Ctrl-C saves the state and is raised again."""
        try:
            while self.now.stage != "done":
                line = self._round()
                if self.progress is not None:
                    self.progress(line)
        except KeyboardInterrupt:
            self._save(force=True)
            raise
        self._save(force=True)

    def _round(self) -> Round:
        now, session = self.now, self.session
        method = self.method(now.stage)
        state, queries, replies = session.step(method, now.state, self.screen)
        objective = gap = np.nan
        if now.stage == "proof" and method.finished(state):
            state, certificate = self._judged(method, state)
            if certificate is not None:
                objective, gap = certificate.objective, certificate.relative_gap
        now = replace(now, state=state, round=now.round + 1)
        estimate = float(method.estimate(state)) if now.stage == "main" else np.nan
        with uninterrupted():  # a round counts completely or not at all
            line = session.enter(queries, replies, now.stage, method.labels(state), objective, gap,
                                 estimate)
            self.now = getattr(self, f"_after_{now.stage}")(now)
            self._save()
        return line

    def _judged(self, method: Proof, state: Any) -> tuple[Any, Certificate | None]:
        """The state with a certificate; without one if other duals are tried, or its users have
        changed.
        """
        judgement, active = method.judgement(state), ~state.aside
        if not state.repairs:  # which cost the others something, too
            self.screen.suspects(judgement, active)
        repaired = method.repaired(state)
        if repaired is not None:
            return repaired, None
        blamed = self.screen.blame(judgement, state, self.settings.tol)
        if blamed:
            return self.session.exclude(method, state, blamed, state.round - 1), None
        return state, judgement.certificate

    @property
    def state(self) -> Any:
        """The state of the main method; before it begins, of the stage."""
        return self.now.state if self.now.main is None else self.now.main

    def proof(self) -> Any:
        """The best certified models so far, as a state of `Proof`; without a certificate, the
        models as they are.
        """
        now, state, proof = self.now, self.state, Proof(self.federation)
        if now.best is not None and bool((now.best["aside"] == state.aside).all()):
            best = now.best
            judged = proof.certifying(state, best["now"][~state.aside], best["duals"])
            return replace(judged, slopes=best["slopes"], answered=best["answered"],
                           collected=best["collected"])
        # No replies: the objective is unknown, and there is no bound.
        method = self.method(now.stage if now.stage in ("weights", "start") else "main")
        models, duals = method.point(state)
        none = np.zeros((self.federation.problem(~state.aside).graph.n_edges, self.federation.dim))
        return proof.certifying(state, models, none if duals is None else duals)

    # -- which stage comes next

    def _first(self) -> RunState:
        """The state before the first round."""
        start, shape = self.settings.start, (self.federation.n_users, self.federation.dim)
        models = np.zeros(shape)
        if start is not None and self.begun is None and not isinstance(start, Algorithm):
            given = np.asarray(start, dtype=float)
            if given.shape not in (shape, shape[1:]) or not np.isfinite(given).all():
                raise InvalidInput(f"start must be finite models of shape {shape} or {shape[1:]}, "
                                   f"got {given.shape}", remedy="Leave it out to start from zero")
            models = np.array(np.broadcast_to(given, shape))
        stage = ("weights" if self.settings.weights != "unit" else
                 "start" if isinstance(start, Algorithm) else "main")
        state = self.method(stage).begin(models)
        if type(self.begun) is type(state):
            state = self.method("main").warm(self.begun)
        elif self.begun is not None:  # of another algorithm only who was excluded matters
            state = self.method(stage).carry(replace(self.begun, round=0, missed=state.missed),
                                             state)
        return RunState(stage=stage, state=state, models=models, believe=self.settings.tol)

    def _after_weights(self, now: RunState) -> RunState:
        method, state = self.method("weights"), now.state
        if not method.finished(state):
            if now.round < self.max_rounds:
                return now
            raise Incompatible("Some users did not send their local models, and the weights need "
                               "all of them. Give a graph, or patience=, after which silent users "
                               "are set aside.")
        users, dim = np.flatnonzero(~state.aside), self.federation.dim
        rows = state.collected[users]
        local = LocalModels(rows[:, :dim], square(rows[:, dim:-1], dim),
                            rows[:, -1].astype(np.int64))
        built = adaptive_graph(local, self.settings.weights)
        graph = Graph.from_edges(self.federation.n_users, users[built.edges], built.weights)
        self._use(graph)
        stage = "start" if isinstance(self.settings.start, Algorithm) else "main"
        first = self.method(stage).carry(state, self.method(stage).begin(now.models))
        return replace(now, stage=stage, state=first, graph=graph, round=0)

    def _after_start(self, now: RunState) -> RunState:
        method, state, main = self.method("start"), now.state, self.method("main")
        over = now.round >= method.rounds_within(self.share)
        if not (over or method.finished(state) or method.estimate(state) <= self.settings.tol):
            return now
        return replace(now, stage="main", state=main.carry(state, main.begin(state.now)),
                       models=state.now, round=0)

    def _after_main(self, now: RunState) -> RunState:
        method, state = self.method("main"), now.state
        over = now.round >= self.max_rounds or method.finished(state)
        lied = any(turn == state.round - 1 and 0 <= user < len(state.aside)
                   for turn, user, _ in self.session.refused)
        if method.restarts and lied and not over:
            return replace(now, state=method.carry(state, method.begin(now.models)))
        # One user alone can keep an estimate large for ever: look at the others now and then.
        if not over and not method.estimate(state) <= now.believe and (
                now.round % method.review
                or self.screen.without_dominant(method, state) > self.settings.tol):
            return now
        models, duals = method.point(state)
        if duals is None:
            return replace(now, stage="gradients", main=state,
                           state=self.method("gradients").start(state, models))
        return replace(now, stage="proof", main=state,
                       state=self.method("proof").certifying(state, models, duals))

    def _after_gradients(self, now: RunState) -> RunState:
        method, state = self.method("gradients"), now.state
        if method.finished(state):
            active, models = ~state.aside, state.now
            duals = duals_for(self.federation, active, models[active], state.collected[active])
            return replace(now, stage="proof",
                           state=self.method("proof").certifying(state, models[active], duals))
        if now.round >= self.max_rounds + self.patience:
            return self._ended(now, self.method("main").carry(state, now.main))
        return now

    def _after_proof(self, now: RunState) -> RunState:
        state, proof, tol = now.state, self.method("proof"), self.settings.tol
        if not proof.finished(state) and now.round < self.max_rounds + self.patience:
            return now
        method = self.method("main")
        main, gap, best = method.carry(state, now.main), proof.certificate(state).relative_gap, \
            now.best
        if best is None or bool((state.aside != best["aside"]).any()) or gap <= best["gap"]:
            best = {"gap": gap, **{name: getattr(state, name) for name in
                                   ("now", "duals", "slopes", "answered", "collected", "aside")}}
        now = replace(now, best=best, main=None)
        ended = method.finished(main) or now.round >= self.max_rounds
        if gap <= tol or ended or not proof.finished(state):
            return self._ended(now, main)
        # Not there yet: the next certificate when the estimate has fallen by as much as the gap
        # must.
        factor = float(np.clip(0.5 * tol / gap, 0.01, 0.5)) if np.isfinite(gap) else 0.1
        believed = min(method.estimate(main), now.believe)
        return replace(now, stage="main", state=main, believe=factor * believed)

    def _after_score(self, now: RunState) -> RunState:
        state = now.state
        if not self.method("score").finished(state) \
                and now.round < self.max_rounds + 2 * self.patience:
            return now
        main = self.method("main").carry(state, now.main)
        if now.best is not None and bool((state.aside != now.best["aside"]).any()) \
                and now.round < self.max_rounds:
            # Somebody was excluded while scoring: the others have an optimum of their own.
            return replace(now, stage="main", state=main, main=None, best=None,
                           believe=self.settings.tol)
        return replace(now, stage="done", state=main, main=None, scores=state.collected)

    def _ended(self, now: RunState, main: Any) -> RunState:
        if not self.settings.score:
            return replace(now, stage="done", state=main, main=None)
        models = self.method("main").point(main)[0] if now.best is None \
            else now.best["now"][~main.aside]
        return replace(now, stage="score", state=self.method("score").start(main, models),
                       main=main)

    # -- on disk

    def _save(self, force: bool = False) -> None:
        now = self.now
        if not (force or now.round % self.settings.every == 0 or now.stage == "done"):
            return
        graph = None if now.graph is None else {"edges": now.graph.edges,
                                                "weights": now.graph.weights}
        saved = {field.name: getattr(now, field.name) for field in fields(now)}
        self.session.save({**saved, "graph": graph, "screen": self.screen.saved()})

    def _loaded(self) -> RunState | None:
        saved = self.session.load()
        if saved is None:
            return None
        graph, stage, shape = saved["graph"], saved["stage"], (self.federation.n_users,
                                                               self.federation.dim)
        if graph is not None:
            graph = Graph(shape[0], graph["weights"], np.asarray(graph["edges"], dtype=np.int64))
            self._use(graph)
        self.screen.restore(saved["screen"])

        def state(values: dict[str, Any] | None, owner: str) -> Any:
            return None if values is None else \
                replace(self.method(owner).begin(np.zeros(shape)), **values)

        known = {field.name: saved[field.name] for field in fields(RunState)}
        return RunState(**known | {
            "graph": graph, "state": state(saved["state"], "main" if stage == "done" else stage),
            "main": state(saved["main"], "main")})


def fingerprint(federation: Federation, settings: FederationSettings,
                identity: dict[str, str]) -> dict[str, Any]:
    """What must agree for a saved run to be continued; `identity` is the runtime's part."""
    given, start = federation.participation, getattr(settings.start, "state", settings.start)
    trace = None if given.trace is None else digest(np.asarray(given.trace))
    return {
        "version": _VERSION, "algorithm": repr(settings.algorithm), "loss": repr(federation.loss),
        "lam": federation.lam, "tol": settings.tol, "seed": federation.seed,
        "participation": f"{given.fraction} {given.count} {given.order} {trace}",
        "number of users": federation.n_users, "length of a model": federation.dim,
        "patience": federation.patience,
        "graph": settings.weights if settings.weights != "unit"
        else digest(federation.graph.weights, federation.graph.pairs),
        "start": repr(start) if start is None or isinstance(start, Algorithm) else
        digest(np.asarray(start.now if isinstance(start, State) else start, dtype=float)),
        **identity}
