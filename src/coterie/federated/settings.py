"""What can be chosen about a federated run: one object, and one name for each choice.

The Python keyword `max_rounds` is the option `--max-rounds` of the command and the key `max-rounds`
of a run configuration. `federate`, `federate_path`, the command and the Flower ServerApp all make a
`FederationSettings`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import numpy as np

from coterie.base.errors import InvalidInput
from coterie.data.users import Participants
from coterie.federated.algorithms.base import (
    Algorithm,
    Federation,
    Participation,
    check_seed_and_patience,
)
from coterie.federated.algorithms.newton import Newton
from coterie.losses import Loss
from coterie.problem.graph import Graph
from coterie.problem.problem import check_lam
from coterie.problem.weights import KINDS


@dataclass(frozen=True, kw_only=True, eq=False)
class FederationSettings:
    """All choices of a federated run, or of a path of them.

    Parameters
    ----------
    algorithm : Newton(), Splitting(), PDMM(), FedAvg() or SquaredPenalty().
    lam : penalty strength, as in `Problem`.
    lams : several penalty strengths, solved from the largest to the smallest; "auto" takes `n_lams`
        of them, from the smallest at which all users share one model down to `ratio` of it; None
        for the one `lam`.
    n_lams, ratio : of lams="auto".
    weights : "unit", weight 1 for all pairs of users; or "wald", "gaussian", "inverse": the nearest
        users of each user, from one round of local models, as in `adaptive_graph` ("auto" is
        "wald").
    participation : who is asked in a round: a share (0.4), a number (12), an array of who is
        available when (n_rounds, n_users), or a `Participation`.
    seed : of everything random; the same seed gives the same result.
    tol : the certified relative gap at which the run ends.
    max_rounds : rounds after which it ends in any case; None for the algorithm's own limit.
    patience : how many queries in a row a user may leave unanswered before it is excluded; None for
        no limit.
    start : models to start from, (dim,) or (n_users, dim); an algorithm that finds them; or the
        state of a run of the same algorithm. Zero models unless given.
    score : whether every user scores its model at the end, on rows that it holds out.
    checkpoint : a folder in which the run is saved; started again with the same folder and
        settings, it continues.
    every : how many rounds lie between two saves.

    Raises
    ------
    InvalidInput : a value that cannot be used.

    Example
    -------
    >>> FederationSettings(lam=0.1, participation=0.4).participation.fraction
    0.4
    """

    algorithm: Algorithm = field(default_factory=Newton)
    lam: float = 0.02
    lams: tuple[float, ...] | Literal["auto"] | None = None
    n_lams: int = 10
    ratio: float = 1e-2
    weights: str = "unit"
    participation: Any = 1.0
    seed: int = 0
    tol: float = 1e-6
    max_rounds: int | None = None
    patience: int | None = None
    start: Any = None
    score: bool = False
    checkpoint: str | os.PathLike[str] | None = None
    every: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.algorithm, Algorithm):
            raise InvalidInput(f"expected an algorithm such as Newton(), got {self.algorithm!r}",
                               remedy="Create it by calling its class; coterie.ALGORITHMS lists "
                               "them")
        if self.weights not in KINDS:
            raise InvalidInput(f"unknown weights {self.weights!r}",
                               remedy=f"Choose one of: {', '.join(KINDS)}")
        if not (np.isfinite(self.tol) and self.tol > 0):
            raise InvalidInput(f"tol must be a finite number > 0, got {self.tol!r}",
                               remedy="Use for example 1e-6")
        if self.max_rounds is not None and self.max_rounds < 1:
            raise InvalidInput(f"max_rounds must be at least 1, got {self.max_rounds!r}",
                               remedy="Leave it at None")
        if self.every < 1:
            raise InvalidInput(f"every must be at least 1 round, got {self.every!r}",
                               remedy="Use 1")
        if isinstance(self.start, str):
            raise InvalidInput(f"start must be models or an algorithm, got {self.start!r}",
                               remedy="Leave it out to start from zero, or give FedAvg()")
        check_seed_and_patience(self.seed, self.patience)
        object.__setattr__(self, "lam", check_lam(self.lam))
        object.__setattr__(self, "participation", Participation.of(self.participation))
        self._check_path()

    def _check_path(self) -> None:
        if self.n_lams < 1 or not 0 < self.ratio < 1:
            raise InvalidInput("n_lams must be at least 1 and ratio in (0, 1), got "
                               f"{self.n_lams!r} and {self.ratio!r}",
                               remedy="Use for example 10 and 0.01")
        if self.lams is None or (isinstance(self.lams, str) and self.lams == "auto"):
            return
        lams = [check_lam(lam) for lam in np.asarray(self.lams, dtype=float).ravel().tolist()]
        if not lams:
            raise InvalidInput("there are no lams", remedy="Give at least one, or leave them out")
        object.__setattr__(self, "lams", tuple(sorted(lams, reverse=True)))

    def replace(self, **changes: Any) -> Self:
        """The same settings but for these."""
        return replace(self, **changes)

    def federation(self, users: Participants, loss: Loss, graph: Graph | None = None) -> Federation:
        """The federation of these users with these settings; on all pairs of them unless a graph is
        given.

        Raises
        ------
        InvalidInput : availability given for another number of users.
        """
        self.participation.available(0, users.n_users)
        return Federation(names=users.names, features=users.feature_names, dim=loss.dim(users),
                          loss=loss, lam=self.lam,
                          graph=Graph.complete(users.n_users) if graph is None else graph,
                          participation=self.participation, seed=self.seed, patience=self.patience)
