"""A federation along lambda: warm starts, held-out scores, and a choice among them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie._typing import Array, Ints
from coterie.analysis.path import lam_max
from coterie.data.users import Users
from coterie.errors import InvalidInput
from coterie.federated.algorithms.base import Algorithm
from coterie.federated.algorithms.newton import Newton, NewtonState
from coterie.federated.run import Federated, federate
from coterie.graph import Graph
from coterie.losses import Loss
from coterie.losses.quadratic import Quadratic
from coterie.problem import Problem


@dataclass(frozen=True, kw_only=True, eq=False)
class FederatedPath:
    """Runs from the largest lam to the smallest, each begun from the one before."""

    runs: tuple[Federated, ...] = field(repr=False)
    spent: tuple[Federated, ...] = field(repr=False, default=())  # on weights, and on finding the largest lam

    @property
    def lams(self) -> Array:
        return np.array([run.lam for run in self.runs])

    @property
    def n_clusters(self) -> Ints:
        return np.array([run.n_clusters for run in self.runs])

    @property
    def gaps(self) -> Array:
        return np.array([run.gap for run in self.runs])

    @property
    def n_rounds(self) -> int:
        return sum(run.n_rounds for run in (*self.spent, *self.runs))

    @property
    def bytes(self) -> int:
        """What crossed in all, up and down."""
        return sum(run.ledger.bytes for run in (*self.spent, *self.runs))

    @property
    def scores(self) -> Array:
        """(n_lams,) the mean over users of their mean held-out loss; nan where nothing was held out."""
        return np.array([np.nan if run.scores is None else _means(run.scores).mean() for run in self.runs])

    def best(self, one_standard_error: bool = True) -> Federated:
        """The run with the least held-out loss; with one standard error of slack, the one with the fewest clusters."""
        if any(run.scores is None for run in self.runs):
            raise InvalidInput("nothing was held out along this path", remedy="Give federate_path(..., held_out=rows)")
        losses = np.stack([_means(run.scores) for run in self.runs if run.scores is not None])
        means = losses.mean(axis=1)
        best = int(means.argmin())
        if one_standard_error:
            error = (losses - losses[best]).std(axis=1) / np.sqrt(losses.shape[1])
            allowed = np.flatnonzero(means <= means[best] + error)
            fewest = allowed[self.n_clusters[allowed] == self.n_clusters[allowed].min()]
            best = int(fewest[means[fewest].argmin()])
        return self.runs[best]

    def __len__(self) -> int:
        return len(self.runs)

    def __getitem__(self, index: int) -> Federated:
        return self.runs[index]


def _means(scores: Array) -> Array:
    held = scores[:, 2] > 0
    return np.asarray(scores[held, 0] / scores[held, 2])


def federate_path(users: Users, loss: Loss, lams: npt.ArrayLike | None = None, *, n_lams: int = 10, ratio: float = 1e-2,
                  algorithm: Algorithm | None = None, graph: Graph | str | None = None, held_out: Users | None = None,
                  checkpoint: str | os.PathLike[str] | None = None, **settings: Any) -> FederatedPath:
    """Runs at several lams, from the largest down, each begun where the one before ended.

    Parameters
    ----------
    users, loss, graph : the problem, as for `federate`; weights are made once.
    lams : which; without them, n_lams from the least at which everyone is together, found by some rounds of Newton's
        method, down to `ratio` of that.
    held_out : rows each user's model is scored on; with them, `.best()` chooses.
    checkpoint : a directory, with a part for every run.
    settings : everything else goes to `federate`.
    """
    algorithm = Newton() if algorithm is None else algorithm
    if lams is None and (n_lams < 1 or not 0 < ratio < 1):
        raise InvalidInput(f"n_lams must be at least 1 and ratio in (0, 1), got {n_lams!r} and {ratio!r}",
                           remedy="Use for example 10 and 0.01")
    if lams is not None and not np.size(lams):
        raise InvalidInput("there are no lams", remedy="Give at least one, or leave them out")

    def run(lam: float, name: str, by: Algorithm, start: Federated | None, rows: Users | None = None) -> Federated:
        place = None if checkpoint is None else Path(checkpoint) / name
        begin = {} if start is None else {"start": start}
        return federate(users, loss, lam, algorithm=by, graph=graph, held_out=rows, checkpoint=place,
                        **settings | begin)

    spent: list[Federated] = []
    if lams is None or isinstance(graph, str):
        spent.append(run(1.0, "first", Newton(), None))
        # What is settled now: the weights, and who takes part.
        kept = np.array([name not in spent[0].aside for name in users.names])
        graph, users = spent[0].problem.graph, users.take(kept)
        held_out = None if held_out is None else held_out.take(kept)
    if lams is None:
        lam = together(spent[0])
        for k in range(8):
            spent.append(run(lam, f"together-{k}", Newton(), spent[-1] if kept.all() else None))
            found = together(spent[-1])
            if spent[-1].n_clusters == components(spent[-1]) and found <= lam * (1 + 1e-3):
                break
            lam = found
        given = lam * np.geomspace(1.0, ratio, n_lams)
    else:
        given = np.sort(np.asarray(lams, dtype=float).ravel())[::-1]
    runs: list[Federated] = []
    for k, lam in enumerate(given):
        runs.append(run(float(lam), f"lam-{k:02d}", algorithm, runs[-1] if runs else None, held_out))
    return FederatedPath(runs=tuple(runs), spent=tuple(spent))


def together(run: Federated) -> float:
    """The least lam at which everyone shares one model, were the losses as the users' last answers say."""
    state = run.state
    if not isinstance(state, NewtonState):
        raise InvalidInput(f"second-order models come from Newton's method, and this run is by {run.solver}")
    active = ~state.aside
    curvature = np.trace(state.hessians[active], axis1=1, axis2=2).mean() / run.problem.dim
    hessians = state.hessians[active] + 1e-9 * max(float(curvature), 1e-300) * np.eye(run.problem.dim)
    loss = Quadratic(point=state.points[active], value=state.values[active], gradient=state.gradients[active],
                     hessian=hessians)
    return lam_max(Problem(run.problem.users, loss, 0.0, run.problem.graph), rtol=1e-3).upper


def components(run: Federated) -> int:
    return int(run.problem.graph.components.max()) + 1
