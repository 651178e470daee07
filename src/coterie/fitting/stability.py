"""How stable groups are when other rows are drawn.

Half of every user's rows are drawn at random, several times (subsampling; Meinshausen and Buehlmann 2010). Each time,
starting from the groups, centres are fitted to these rows and every user moves to the centre that fits its rows best,
until nothing moves. Two numbers say how far that leads: the adjusted Rand index of the groups before and after (1 for
the same groups, about 0 for groups drawn by dice), and for each user how often it stays.

The number of groups is given here. How far a new search agrees, which may find another number, is seen from the groups
that were found without the held-out rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from coterie._typing import Array
from coterie.analysis.metrics import adjusted_rand
from coterie.data.users import Users
from coterie.fitting.kinds import Sharing
from coterie.fitting.plan import PathPlan
from coterie.fitting.settings import Settings
from coterie.losses import Loss

_DRAWS = 10
_STABLE = 0.75  # adjusted Rand index below which groups are called unstable


@dataclass(frozen=True, eq=False)
class Stability:
    """How stable the groups of a fit are.

    Parameters
    ----------
    index : mean adjusted Rand index of the groups and those with half of the rows.
    stays : (n_users,) the share of draws in which each user stays in its group.
    searched : adjusted Rand index of the groups and those that a search without the held-out rows found; nan where
        there was none.
    """

    index: float
    stays: Array = field(repr=False)
    searched: float = np.nan

    @property
    def stable(self) -> bool:
        """Whether the groups are about the same with other rows."""
        return min(self.index, self.searched if np.isfinite(self.searched) else 1.0) >= _STABLE

    def __str__(self) -> str:
        again = f", {self.searched:.2f} for a search without the held-out rows" if np.isfinite(self.searched) else ""
        return (f"The groups are {'stable' if self.stable else 'unstable'}: with half of the rows "
                f"{self.stays.mean():.0%} of the users stay in theirs (adjusted Rand index {self.index:.2f}{again}).")


def measure_stability(users: Users, loss: Loss, sharing: Sharing, settings: Settings,
                      judged: PathPlan | None = None) -> Stability:
    """Draw half of the rows several times.

    Parameters
    ----------
    users : their data in the solver's units.
    loss : of the users' models.
    sharing : the groups.
    settings : of the fit.
    judged : the plan of the fit without the held-out rows.

    Returns
    -------
    Stability
    """
    indices, stays = np.empty(_DRAWS), np.zeros(users.n_users)
    for k in range(_DRAWS):
        half = users.split(test=0.5, stratify=settings.task == "classification", seed=settings.seed + 101 + k).train
        labels = sharing.moved(half, loss)
        indices[k] = adjusted_rand(sharing.labels, labels)
        stays += labels == sharing.labels
    searched = np.nan if judged is None or judged.groups is None else adjusted_rand(sharing.labels, judged.groups)
    return Stability(float(indices.mean()), stays / _DRAWS, float(searched))
