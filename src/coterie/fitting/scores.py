"""How good a fit is on rows it has not seen."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from coterie.base.types import Array, Flags
from coterie.data.encoding import Task
from coterie.data.moments import Condensed
from coterie.data.users import Users

METRICS: dict[Task, str] = {"classification": "accuracy", "regression": "RMSE",
                            "counts": "deviance"}
INTERVAL = 0.9  # level of the intervals that are checked
_BINS, _IN_BIN = 8, 20  # of probabilities, and held-out rows in each at least
_CHANCE = 0.01  # p value below which a difference is more than chance


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """Scores on held-out rows of models found without these rows; nan for users without held-out
    rows.

    Parameters
    ----------
    metric : accuracy, RMSE or deviance.
    larger : whether a larger score is better.
    fitted : (n_users,) scores of the fit's models.
    alone : (n_users,) scores of each user's own model.
    together : (n_users,) scores of one model for all.
    points : (n_lams, n_users) scores along the path; one row where only the chosen lam is scored.
    losses : (n_lams,) mean loss over users along the path.
    chosen : the row of `points` that `fitted` is.
    n_clusters : number of groups found without the held-out rows.
    n_rows : number of held-out rows.
    worse : (n_users,) who is worse off than alone by more than chance: p below 0.01 in a paired
        one-sided t test over the user's held-out rows.
    covered : (n_users,) of numbers, the share of held-out rows inside their interval of level
        `INTERVAL`; empty where there are none.
    reliability : (n_bins, 3) of two classes, in order: the mean probability of the second class,
        how often it was the class, and the number of held-out rows; empty for others.
    """

    metric: str
    larger: bool
    fitted: Array
    alone: Array
    together: Array
    points: Array = field(repr=False)
    losses: Array = field(repr=False)
    chosen: int
    n_clusters: int
    n_rows: int
    worse: Flags = field(default_factory=lambda: np.zeros(0, dtype=bool), repr=False)
    covered: Array = field(default_factory=lambda: np.zeros(0), repr=False)
    reliability: Array = field(default_factory=lambda: np.zeros((0, 3)), repr=False)

    @property
    def gains(self) -> Array:
        """(n_judged,) how much better each user's score is than with its own model, for users who
        have both.
        """
        return self.gains_over(self.alone)

    def gains_over(self, others: Array) -> Array:
        """(n_judged,) how much better each user's score is than another one, for users who have
        both.
        """
        with np.errstate(invalid="ignore"):
            gains = (self.fitted - others) * (1.0 if self.larger else -1.0)
        return np.asarray(gains[np.isfinite(gains)])

    @property
    def gain(self) -> tuple[float, float]:
        """The mean of `gains` and its standard error; nan where there are too few users."""
        return mean_and_error(self.gains)

    @property
    def warnings(self) -> tuple[str, ...]:
        """A sentence for each simpler choice that is better by more than two paired standard
        errors.
        """
        sentences = []
        for others, name in ((self.alone, "models from each user's own rows only"),
                             (self.together, "one model for all users")):
            gain, error = mean_and_error(self.gains_over(others))
            if -gain > 2 * error:
                fitted, other = (self.text(float(np.nanmean(m)), 4) for m in (self.fitted, others))
                sentences.append(f"On held-out rows, {name} would predict better: {self.metric} "
                                 f"{other} instead of "
                                 f"{fitted} (standard error of the difference: "
                                 f"{self.text(error, 2)}).")
        return tuple(sentences)

    def text(self, value: float, digits: int) -> str:
        """A score as a text."""
        return f"{100 * value:.1f}%" if self.metric == "accuracy" else f"{value:.{digits}g}"

    def __str__(self) -> str:
        """Means over users."""
        text = self.text
        fitted, alone, together = (text(float(np.nanmean(m)), 4) for m in (self.fitted, self.alone,
            self.together))
        if len(self.fitted) == 1:
            return f"{self.metric} on {self.n_rows:,} held-out rows: {fitted}."
        gain, error = self.gain
        sure = f", standard error {text(error, 2)}" if np.isfinite(error) else ""
        n, lower = int(np.isfinite(self.fitted).sum()), int((self.gains < 0).sum())
        return (f"{self.metric} on {self.n_rows:,} held-out rows, mean over users: {fitted}; local "
                f"models {alone}, "
                f"one model for all {together}. Gain over local models: {text(gain, 2)}{sure}. "
                f"{lower:,} of {n:,} users score worse than alone, {int(self.worse.sum()):,} by "
                "more than chance.")


def mean_and_error(values: Array) -> tuple[float, float]:
    """The mean and its standard error; nan where there are too few values."""
    return (float(values.mean()) if values.size else np.nan,
            float(values.std(ddof=1) / np.sqrt(values.size)) if values.size > 1 else np.nan)


def covered_by(y: Array, told: Array, reach: Array, test: Users) -> Array:
    """(n_users,) the share of a user's rows no farther than `reach` from what was told."""
    with np.errstate(invalid="ignore", divide="ignore"):
        inside = np.bincount(test.owner, np.abs(y - told) <= reach, test.n_users)
        return np.asarray(inside / test.counts)


def reliability_of(shares: Array, second: Flags) -> Array:
    """(n_bins, 3) the mean share told, how often it was so, and rows, for bins of as many rows."""
    order = np.argsort(shares, kind="stable")
    parts = np.array_split(order, int(np.clip(len(order) // _IN_BIN, 1, _BINS)))
    return np.array([[shares[part].mean(), second[part].mean(), len(part)]
                     for part in parts if len(part)])


def worse_than_alone(errors: Array, alone: Array, test: Users) -> Flags:
    """(n_users,) whose mean error is larger than alone by more than chance; both are given for each
    row.
    """
    from scipy.special import stdtrit  # the quantile of Student's distribution

    if isinstance(test, Condensed):  # second moments do not tell
        return np.zeros(test.n_users, dtype=bool)
    n, owner = np.maximum(test.counts, 1), test.owner
    # a predicted count may be infinite.
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        excess = np.where(np.isfinite(errors - alone), errors - alone, 0.0)
        means = np.bincount(owner, excess, test.n_users) / n
        squares = np.bincount(owner, (excess - means[owner]) ** 2, test.n_users)
        deviations = np.sqrt(squares / np.maximum(n - 1, 1) / n)
        certain = (n > 2) & (means > 0) & (means >= stdtrit(np.maximum(n - 1, 1), 1 - _CHANCE)
                                           * deviations)
    return np.asarray(certain & (squares > 0))
