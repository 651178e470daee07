"""How stable groups are when other rows are drawn.

Other rows of the same users would have other slopes: those of a user's log-likelihood vary around
what they are by a normal distribution whose covariance is its curvature (Bartlett's identity),
which is also how much they vary between random halves of the rows. Such slopes are drawn several
times. Each time, starting from the groups, centres are fitted and every user moves to the centre
that fits best, until nothing moves.

Two numbers say how far that leads: the adjusted Rand index of the groups before and after (1 for
the same groups, about 0 for random groups), and for each user how often it stays.

The number of groups is given. How far a new search agrees, which may find another number, is seen
from the groups that were found without the held-out rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from coterie.base.types import Array, Ints
from coterie.convex.choice import adjusted_rand
from coterie.data.users import Users
from coterie.fitting.kinds import Sharing
from coterie.fitting.settings import Settings
from coterie.groups.spread import Expansions
from coterie.groups.summaries import Summaries
from coterie.losses import Loss

# Draws, users drawn in all of them at most, and draws at least.
_DRAWS, _DRAWN, _FEWEST = 10, 20_000, 3
_MOVES = 3  # how often users may change their group
STABLE = 0.75  # adjusted Rand index below which groups are called unstable


@dataclass(frozen=True, eq=False)
class Stability:
    """How stable the groups of a fit are.

    Parameters
    ----------
    index : mean adjusted Rand index of the groups and those with other rows.
    stays : (n_users,) the share of draws in which each user stays in its group.
    searched : adjusted Rand index of the groups and those that a search without the held-out rows
        found; nan where there was none.
    """

    index: float
    stays: Array = field(repr=False)
    searched: float = np.nan

    @property
    def stable(self) -> bool:
        """Whether the groups are about the same with other rows."""
        return min(self.index, self.searched if np.isfinite(self.searched) else 1.0) >= STABLE

    def __str__(self) -> str:
        again = f", {self.searched:.2f} for a search without the held-out rows" \
            if np.isfinite(self.searched) else ""
        return (f"The groups are {'stable' if self.stable else 'unstable'}: with other rows "
                f"{self.stays.mean():.0%} of the users stay in theirs (adjusted Rand index "
                f"{self.index:.2f}{again}).")


def draw_groups(known: Summaries, sharing: Sharing, settings: Settings) -> Ints:
    """(n_users, draws) the group of every user with other slopes.

    Parameters
    ----------
    known : what users say of their losses.
    sharing : the groups.
    settings : of the fit.
    """
    share = known.noise if sharing.noise is None else known.noise / sharing.noise[:, None]
    shared = known.expansions
    expansions = Expansions(shared.constants, share * shared.slopes,
                            np.reshape(share, (-1, 1, 1)) * shared.curvatures)
    if sharing.covariance is not None:
        expansions = expansions.marginal(sharing.covariance)[0]
    n, dim = expansions.slopes.shape
    scales, axes = np.linalg.eigh(expansions.curvatures)
    roots = axes * np.sqrt(known.noise * np.maximum(scales, 0.0))[:, None, :]
    rng = np.random.default_rng(settings.seed)
    drawn = np.empty((n, _draws(n)), dtype=np.int64)
    for k in range(_draws(n)):
        slopes = (roots @ rng.standard_normal((n, dim, 1)))[..., 0]
        drawn[:, k] = _moved(replace(expansions, slopes=expansions.slopes + slopes), sharing.labels)
    return drawn


def draw_wide_groups(loss: Loss, users: Users, centres: Array, settings: Settings) -> Ints:
    """(n_users, draws) the same for wide models, whose centres stay: only the values of users at
    these are drawn, with the covariance centres' A_i centres.
    """
    samples, n = loss.prepare(users), users.n_users
    rows, tiled = users.sizes.astype(float), [np.tile(c, (n, 1)) for c in centres]
    values = -rows[:, None] * np.stack([loss.values(samples, c) for c in tiled], axis=1)
    curvature = loss.expand(samples, np.tile(centres.mean(axis=0), (n, 1)))[2]
    bent = np.stack([curvature.times(c) for c in tiled], axis=1)  # (n, k, dim)
    scales, axes = np.linalg.eigh(rows[:, None, None] * np.einsum("nkd,ld->nkl", bent, centres))
    roots = axes * np.sqrt(np.maximum(scales, 0.0))[:, None, :]
    rng = np.random.default_rng(settings.seed)
    drawn = [(values + (roots @ rng.standard_normal((n, len(centres), 1)))[..., 0]).argmax(axis=1)
             for _ in range(_draws(n))]
    return np.stack(drawn, axis=1)


def _draws(n_users: int) -> int:
    """How often rows are drawn: many users say as much in fewer draws."""
    return int(np.clip(_DRAWN // n_users, _FEWEST, _DRAWS))


def summarise_draws(drawn: Ints, sharing: Sharing, judged: Ints | None = None) -> Stability:
    """From (n_users, draws) the groups of every draw, and those of the fit without the held-out
    rows.
    """
    index = float(np.mean([adjusted_rand(sharing.labels, labels) for labels in drawn.T]))
    stays = (drawn == sharing.labels[:, None]).mean(axis=1)
    searched = np.nan if judged is None else adjusted_rand(sharing.labels, judged)
    return Stability(index, stays, float(searched))


def _moved(expansions: Expansions, labels: Ints) -> Ints:
    """(n_users,) the number of the group whose centre fits each user best, from these groups on."""
    for _ in range(_MOVES):
        present = np.unique(labels, return_inverse=True)
        before, labels = labels, \
            present[0][expansions.values(expansions.centres(present[1])).argmax(axis=1)]
        if np.array_equal(before, labels):
            break
    return labels
