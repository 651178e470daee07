"""Nodes in this process: they agree on a recipe as on Flower, and reply in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from coterie.base.errors import Incompatible
from coterie.data.users import Users
from coterie.federated.agreement import Agreement, Introduction
from coterie.federated.client import Data, join
from coterie.federated.private.ledger import NodeLedger
from coterie.federated.runtimes.in_process import Faults, LocalRuntime
from coterie.federated.sources import Table


class LocalNodes(LocalRuntime):
    """A runtime that finds its users in the sources given.

    Parameters
    ----------
    sources : the data of every node.
    holdout : the share of its rows that every user holds out.
    seed : of these rows.
    faults : what goes wrong on the way; nothing unless given.
    experiment : a seed of the noise of private releases; None for the operating system.

    Example
    -------
    >>> import coterie as ct
    >>> from coterie.datasets import clustered
    >>> users = clustered("squared", n_users=4, samples=10, seed=0).users
    >>> nodes = LocalNodes([users.take([0, 1]), users.take([2, 3])])
    >>> [len(introduction.names) for _, introduction in nodes.gather(n_users=4, wait=0.0)]
    [2, 2]
    """

    def __init__(self, sources: Sequence[Users | Table], holdout: float = 0.0, seed: int = 0,
                 faults: Faults | None = None, experiment: int | None = None) -> None:
        self.sources, self.holdout, self.seed = list(sources), holdout, seed
        self.keeper, self.experiment, self.private = NodeLedger(None), experiment, False
        self.faults, self.late, self.refused = faults or Faults(), [], dict[Any, str]()
        self.edges = {}
        self.data: Data

    def gather(self, n_users: int, wait: float) -> list[tuple[str, Introduction]]:
        said = [(f"node {k}", Introduction.of(source, private=self.private))
                for k, source in enumerate(self.sources)]
        count = sum(len(introduction.names) for _, introduction in said)
        if count < max(n_users, 1):
            raise Incompatible(f"{count} of {max(n_users, 1)} users are here. Give more nodes, or "
                               "lower `n-users`.")
        return said

    def use(self, agreement: Agreement) -> None:
        if not agreement.names:  # not known yet
            return
        for source in self.sources:
            if self.private and isinstance(source, Table) and agreement.recipe is not None:
                agreement.recipe.check_levels(source.frame)  # before anything is spent
        together = join([agreement.given(source) for source in self.sources])
        order = np.array([together.index(name) for name in agreement.names])
        data = agreement.data_of(together.take(order), 0.0 if self.private else self.holdout,
                                 self.seed)
        self.data = replace(data, keeper=self.keeper, experiment=self.experiment)
