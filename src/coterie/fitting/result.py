"""What a fit found, as numbers; `coterie.fitting.estimate.Fit` adds what can be done with it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie._typing import Array, Flags, Ints
from coterie.analysis.path import InNotebook, Path
from coterie.data.encoding import Recipe
from coterie.data.users import Users
from coterie.fitting.predictions import models_by_name
from coterie.fitting.scores import Scores
from coterie.fitting.settings import Settings
from coterie.fitting.units import Units
from coterie.newcomers import Joined, join
from coterie.solution import Solution


@dataclass(frozen=True, kw_only=True)
class TableSource:
    """The table that a fit was made from.

    Parameters
    ----------
    data : the file; empty for a frame.
    user, target : columns; empty where there is none.
    features, drop : columns used and left out, separated by commas; empty where all others are used.
    separator : of a CSV file; empty where it was detected.
    fingerprint : SHA-256 of the file; empty for a frame.
    """

    data: str = ""
    user: str = ""
    target: str = ""
    features: str = ""
    drop: str = ""
    separator: str = ""
    fingerprint: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class FitResult(InNotebook):
    """The solution of a fit, the path it lies on, and its scores on held-out rows.

    Parameters
    ----------
    settings : of the fit.
    units : how the numbers given became the numbers solved for.
    solution : at the chosen lam, with its certificate.
    path : from separate models to one model for all.
    chosen : the index of the solution's lam on the path.
    together : (dim,) one model for all, for users who are not among those of the fit.
    why : the reason for the chosen lam, a sentence.
    scores : on held-out rows; None where none were held out.
    recipe : how the table became numbers; None for a fit of `Users`.
    table : the table; None for a fit of `Users`.
    """

    settings: Settings
    units: Units
    solution: Solution
    path: Path
    chosen: int
    together: Array = field(repr=False)
    why: str
    scores: Scores | None
    recipe: Recipe | None = None
    table: TableSource | None = None

    @property
    def names(self) -> tuple[Any, ...]:
        """The users' names, in the order of `labels` and `coefficients`."""
        return self.solution.problem.users.names

    @property
    def lam(self) -> float:
        """The chosen penalty strength."""
        return self.solution.lam

    @property
    def labels(self) -> Ints:
        """(n_users,) the group of each user."""
        return self.solution.labels

    @property
    def n_clusters(self) -> int:
        """The number of groups."""
        return self.solution.n_clusters

    @property
    def gap(self) -> float:
        """The certified relative gap."""
        return self.solution.gap

    @property
    def coefficients(self) -> Array:
        """(n_users, n_features + 1, outputs) the models in the units given; see `Units.coefficients`."""
        return self.units.coefficients(self.solution.models)

    def asked(self) -> dict[str, Any]:
        """What the user asked for, as run.json has it."""
        table = {} if self.table is None else asdict(self.table)
        table.pop("fingerprint", None)
        return {**table, **asdict(self.settings)}

    def models_of(self, names: npt.ArrayLike) -> tuple[Array, Flags]:
        """(n, dim) the model of each user named, the pooled model for unknown users; and (n,) who is known."""
        models, index = models_by_name(np.asarray(names, dtype=object).tolist(), self.names, self.solution.models,
                                       self.together)
        return models, index >= 0

    def personalize(self, newcomers: Users) -> Joined:
        """Models for newcomers, with everyone else's models unchanged.

        Newcomers join the group that is likeliest for their rows, with the average pull that the group's users have
        on each other. With weights other than "auto" all users pull, as in `Solution.personalize`.

        Parameters
        ----------
        newcomers : their rows, in the units given.

        Returns
        -------
        Their models (in the solver's units) and groups; -1 for those who are unassigned.
        """
        newcomers, solution = self.units.inner(newcomers), self.solution
        if self.settings.weights != "auto":
            return solution.personalize(newcomers)
        problem, labels = solution.problem, solution.labels
        loss, graph = problem.loss, problem.graph
        samples, shape = loss.prepare(newcomers), (newcomers.n_users, problem.dim)
        centres = solution.models[np.unique(labels, return_index=True)[1]]
        likeliest = np.stack([loss.values(samples, np.broadcast_to(c, shape)) for c in centres]).argmin(axis=0)
        inside = labels[graph.edges[:, 0]] == labels[graph.edges[:, 1]]
        pull = 2.0 * float(graph.weights[inside].sum()) / problem.n_users
        models, clusters, slack = np.empty(shape), np.empty(shape[0], dtype=np.int64), np.empty(shape[0])
        for k in np.unique(likeliest):
            who, members = np.flatnonzero(likeliest == k), np.flatnonzero(labels == k)
            joined = join(problem, solution.models[members], np.zeros_like(members), newcomers.take(who),
                          pull / len(members))
            models[who], slack[who] = joined.models, joined.slack
            clusters[who] = np.where(joined.clusters < 0, -1, k)
        return Joined(newcomers, models, clusters, slack)
