"""The stages of a federated run, each a `Method`, and which one comes after which.

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

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from coterie.base.errors import Incompatible, InvalidInput
from coterie.base.types import Array
from coterie.federated.algorithms.base import Algorithm, Federation, Method, State
from coterie.federated.algorithms.proof import (
    GradientRound,
    LocalOptimaRound,
    Proof,
    ScoreRound,
    duals_for,
)
from coterie.federated.settings import FederationSettings
from coterie.problem.graph import Graph
from coterie.problem.weights import adaptive_graph

_JUDGES: dict[str, type[Method]] = {
    "weights": LocalOptimaRound, "gradients": GradientRound, "score": ScoreRound}


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
    main: Any
    models: Array
    graph: Graph | None
    believe: float
    best: Any
    scores: Array | None
    round: int


class Stages:
    """The methods of a run and the transitions between them.

    Parameters
    ----------
    federation, settings : what is solved, and how.
    """

    def __init__(self, federation: Federation, settings: FederationSettings) -> None:
        self.federation, self.settings = federation, settings
        self._methods: dict[str, Method] = {}
        # The fewer users a round asks, the more rounds a sweep through all of them takes.
        self._share = federation.participation.share(federation.n_users)
        self.max_rounds = settings.max_rounds or self.method("main").rounds_within(self._share)

    def method(self, stage: str) -> Any:
        """The method of a stage."""
        if stage not in self._methods:
            start = self.settings.start
            algorithm = start if stage == "start" and isinstance(start, Algorithm) \
                else self.settings.algorithm
            self._methods[stage] = (Proof(self.federation, self.settings.tol)
                                    if stage == "proof" else
                                    _JUDGES[stage](self.federation) if stage in _JUDGES else
                                    algorithm.on(self.federation, self.settings.tol))
        return self._methods[stage]

    def use(self, graph: Graph) -> None:
        """Continue on this graph."""
        self.federation = replace(self.federation, graph=graph)
        self._methods.clear()

    def first(self) -> RunState:
        """The state before the first round."""
        start, shape = self.settings.start, (self.federation.n_users, self.federation.dim)
        models = np.zeros(shape)
        if start is not None and not isinstance(start, (Algorithm, State)):
            given = np.asarray(start, dtype=float)
            if given.shape not in (shape, shape[1:]) or not np.isfinite(given).all():
                raise InvalidInput(f"start must be finite models of shape {shape} or {shape[1:]}, "
                                   f"got {given.shape}",
                                   remedy="Leave it out to start from zero")
            models = np.array(np.broadcast_to(given, shape))
        stage = ("weights" if self.settings.weights != "unit" else
                 "start" if isinstance(start, Algorithm) else "main")
        state = self.method(stage).begin(models)
        if isinstance(start, State):  # of another algorithm only who was excluded matters
            state = (self.method("main").warm(start) if type(start) is type(state) else
                     self._carry(replace(start, round=0, missed=state.missed), state, stage))
        return RunState(stage=stage, state=state, main=None, models=models, graph=None,
                        believe=self.settings.tol,
                        best=None, scores=None, round=0)

    def next(self, now: RunState) -> RunState:
        """The state after a round: of another stage if this one has ended."""
        after = {"weights": self._after_weights, "start": self._after_start,
                 "main": self._after_main,
                 "gradients": self._after_gradients, "proof": self._after_proof,
                 "score": self._after_score}
        return after[now.stage](now)

    def _after_weights(self, now: RunState) -> RunState:
        method, state = self.method("weights"), now.state
        if not method.finished(state):
            if now.round < self.max_rounds:
                return now
            raise Incompatible("Some users did not send their local models, and the weights need "
                               "all of them. "
                               "Give a graph, or patience=, after which silent users are excluded.")
        graph = method.graph(state, lambda local: adaptive_graph(local, self.settings.weights))
        self.use(graph)
        stage = "start" if isinstance(self.settings.start, Algorithm) else "main"
        first = self._carry(state, self.method(stage).begin(now.models), stage)
        return replace(now, stage=stage, state=first, graph=graph, round=0)

    def _after_start(self, now: RunState) -> RunState:
        method, state = self.method("start"), now.state
        over = now.round >= method.rounds_within(self._share)
        if not (over or method.finished(state) or method.estimate(state) <= self.settings.tol):
            return now
        models = state.now
        main = self._carry(state, self.method("main").begin(models), "main")
        return replace(now, stage="main", state=main, models=models, round=0)

    def _after_main(self, now: RunState) -> RunState:
        method, state = self.method("main"), now.state
        over = now.round >= self.max_rounds or method.finished(state)
        lied = {user for turn, user, _ in state.refusals if turn == state.round - 1 and 0 <= user
                < len(state.aside)}
        if method.restarts and lied and not over:
            return replace(now, state=self._carry(state, method.begin(now.models), "main"))
        # One user alone can keep an estimate large for ever: look at the others now and then.
        suspected = now.round % method.review == 0 and state.rest <= self.settings.tol
        if not (over or suspected) and not method.estimate(state) <= now.believe:
            return now
        models, duals = method.point(state)
        if duals is None:
            return replace(now, stage="gradients", main=state,
                           state=self.method("gradients").start(state, models))
        return replace(now, stage="proof", main=state, state=self.method("proof").start(state,
            models, duals))

    def _after_gradients(self, now: RunState) -> RunState:
        method, state = self.method("gradients"), now.state
        if method.finished(state):
            active, models = ~state.aside, state.now
            duals = duals_for(self.federation, active, models[active], state.collected[active])
            return replace(now, stage="proof", state=self.method("proof").start(state,
                models[active], duals))
        if now.round >= self.max_rounds + self._patience:
            return self._ended(now, self._carry(state, now.main, "main"))
        return now

    def _after_proof(self, now: RunState) -> RunState:
        state, proof, tol = now.state, self.method("proof"), self.settings.tol
        if not proof.finished(state) and now.round < self.max_rounds + self._patience:
            return now
        main, gap, best = self._carry(state, now.main, "main"), \
            proof.certificate(state).relative_gap, now.best
        if best is None or bool((state.aside != best["aside"]).any()) or gap <= best["gap"]:
            best = {"gap": gap, **{name: getattr(state, name) for name in
                                   ("now", "duals", "slopes", "answered", "answers", "aside")}}
        now = replace(now, best=best, main=None)
        ended = self.method("main").finished(main) or now.round >= self.max_rounds
        if gap <= tol or ended or not proof.finished(state):
            return self._ended(now, main)
        # Not there yet: the next certificate when the estimate has fallen by as much as the gap
        # must.
        factor = float(np.clip(0.5 * tol / gap, 0.01, 0.5)) if np.isfinite(gap) else 0.1
        believed = min(self.method("main").estimate(main), now.believe)
        return replace(now, stage="main", state=main, believe=factor * believed)

    def _after_score(self, now: RunState) -> RunState:
        state = now.state
        if not self.method("score").finished(state) and now.round < self.max_rounds + 2 \
            * self._patience:
            return now
        main = self._carry(state, now.main, "main")
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

    @property
    def _patience(self) -> int:
        """Rounds beyond the last that the certificate may take, where users are not always there.
        """
        trace = self.federation.participation.trace
        return 50 + (0 if trace is None else 2 * len(np.asarray(trace)))

    def _carry(self, old: Any, new: Any, stage: str) -> Any:
        """The state of another stage, with what does not depend on the method: the round, who was
        excluded and why.
        """
        left = np.flatnonzero(old.aside & ~new.aside)
        new = replace(new, round=old.round, aside=old.aside, refusals=old.refusals,
                      missed=old.missed, said=old.said,
                      blamed=old.blamed)
        return self.method(stage)._forget(new, left) if left.size else new
