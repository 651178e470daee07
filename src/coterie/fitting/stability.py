"""How stable groups are when other rows are drawn.

With the squared loss, other rows of the same users would have other slopes: those of a user's
log-likelihood vary around what they are by a normal distribution whose covariance is its curvature
(Bartlett's identity), which is also how much they vary between random halves of the rows. Such
slopes are drawn several times. Each time, starting from the groups, centres are fitted and every
user moves to the centre that fits best, until nothing moves. With other losses halves of every
user's rows are drawn (subsampling; Meinshausen and Buehlmann 2010), and every user moves to the
centre that fits its half best.

Two numbers say how far that leads: the adjusted Rand index of the groups before and after (1 for
the same groups, about 0 for groups drawn by dice), and for each user how often it stays.

The number of groups is given. How far a new search agrees, which may find another number, is seen
from the groups that were found without the held-out rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from coterie.base.types import Array, Ints
from coterie.convex.choice import adjusted_rand
from coterie.data.users import Users
from coterie.fitting.kinds import Sharing, group_centres
from coterie.fitting.oracle import FitOracle, RowsFitOracle
from coterie.fitting.plan import PathPlan
from coterie.fitting.settings import Settings
from coterie.groups.dispersion import dispersion
from coterie.groups.spread import Expansions
from coterie.losses import Loss, Squared
from coterie.losses.rows import too_wide

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


def measure_stability(users: Users, loss: Loss, sharing: Sharing, settings: Settings,
                      judged: PathPlan | None = None, start: Array | None = None) -> Stability:
    """Draw other slopes, or halves of the rows, several times.

    Parameters
    ----------
    users, loss, sharing, settings, start : as for `draw_groups`.
    judged : the plan of the fit without the held-out rows.

    Returns
    -------
    Stability
    """
    return summarise_draws(draw_groups(users, loss, sharing, settings, start), sharing, judged)


def draw_groups(users: Users, loss: Loss, sharing: Sharing, settings: Settings,
                start: Array | None = None) -> Ints:
    """(n_users, draws) the group of every user with other slopes, or halves of the rows.

    Parameters
    ----------
    users : their data in the solver's units.
    loss : of the users' models.
    sharing : the groups.
    settings : of the fit.
    start : (n_groups, dim) models near the centres of the groups, if they are known.
    """
    if not isinstance(loss, Squared) or too_wide(loss, loss.prepare(users)):
        outer = sharing.loss(loss, users)
        centres = group_centres(outer, outer.prepare(users), sharing.labels, sharing.count, start)
        return _ask_halves(RowsFitOracle(users, loss), centres, sharing, settings)
    samples, weights = loss.prepare(users), users.sizes / (1.0 if sharing.noise is None
                                                           else sharing.noise)
    expansions = Expansions.at(loss, samples, weights, sharing.models(users, loss))
    if sharing.covariance is not None:
        expansions = expansions.marginal(sharing.covariance)[0]
    noise, (n, dim) = dispersion(loss, users, samples), expansions.slopes.shape
    scales, axes = np.linalg.eigh(expansions.curvatures)
    roots = axes * np.sqrt(noise * np.maximum(scales, 0.0))[:, None, :]
    rng = np.random.default_rng(settings.seed)
    drawn = np.empty((n, _draws(n)), dtype=np.int64)
    for k in range(_draws(n)):
        slopes = (roots @ rng.standard_normal((n, dim, 1)))[..., 0]
        drawn[:, k] = _moved(replace(expansions, slopes=expansions.slopes + slopes), sharing.labels)
    return drawn


def stability_by_asking(oracle: FitOracle, centres: Array, sharing: Sharing, settings: Settings,
                        judged: PathPlan | None = None) -> Stability:
    """Ask users which centre fits halves of their rows best."""
    return summarise_draws(_ask_halves(oracle, centres, sharing, settings), sharing, judged)


def _ask_halves(oracle: FitOracle, centres: Array, sharing: Sharing, settings: Settings) -> Ints:
    covariance = np.zeros((oracle.dim, oracle.dim)) if sharing.covariance is None \
        else sharing.covariance
    return oracle.halves(centres, covariance, _draws(len(sharing.labels)), settings.seed + 101,
                         settings.task == "classification")


def _draws(n_users: int) -> int:
    """How often rows are drawn: many users say as much in fewer draws."""
    return int(np.clip(_DRAWN // n_users, _FEWEST, _DRAWS))


def summarise_draws(drawn: Ints, sharing: Sharing, judged: PathPlan | None = None) -> Stability:
    """From (n_users, draws) the groups of every draw, and the plan of the fit without the held-out
    rows.
    """
    index = float(np.mean([adjusted_rand(sharing.labels, labels) for labels in drawn.T]))
    stays = (drawn == sharing.labels[:, None]).mean(axis=1)
    searched = np.nan if judged is None or judged.groups is None else adjusted_rand(sharing.labels,
        judged.groups)
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
