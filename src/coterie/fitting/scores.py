"""How good a fit is on rows it has not seen."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from coterie._typing import Array
from coterie.analysis.select import refit
from coterie.data.encoding import Task
from coterie.data.users import Users
from coterie.fitting.plan import Work, learn_units, make_plan, solve_plan
from coterie.fitting.settings import Settings
from coterie.solvers import solve

METRICS: dict[Task, str] = {"classification": "accuracy", "regression": "RMSE", "counts": "deviance"}
_COMPLETE = 2000  # users up to whom the complete path is scored


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """Scores on held-out rows of models found without these rows; nan for users without held-out rows.

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

    def __str__(self) -> str:
        """Means over users."""
        percent = self.metric == "accuracy"
        fitted, alone, together = (f"{100 * m:.1f}%" if percent else f"{m:.4g}" for m in map(
            np.nanmean, (self.fitted, self.alone, self.together)))
        return (f"{self.metric} on {self.n_rows} held-out rows, mean over users: {fitted}; local models {alone}, "
                f"one model for all {together}.")


def score_held_out(users: Users, settings: Settings, work: Work) -> Scores | None:
    """Fit without a share of every user's rows and score on these rows; None where there are none."""
    classes = settings.task == "classification"
    split = users.split(test=settings.holdout, stratify=classes, seed=settings.seed)
    train, test, present = split.train, split.test, split.test.counts > 0
    assert users.targets is not None
    assert train.targets is not None
    if not present.any() or (classes and len(np.unique(train.targets)) < 2):
        return None
    units = learn_units(train, settings, int(users.targets.max()) + 1 if classes else 0)
    work = replace(work, prefix="held out: ")
    plan = make_plan(units.inner(train), units.loss, settings, work)
    if users.n_users <= _COMPLETE or plan.chosen < 0:
        path = solve_plan(plan, settings, work)
        models, index = [s.models for s in path.solutions], plan.choose(path)[0]
    else:
        work.show("path")
        models, index = [solve(plan.problem.with_lam(float(plan.lams[plan.chosen])), tol=1e-4).models], 0
    held_out = units.inner(test.take(np.flatnonzero(present)))
    samples, loss = units.loss.prepare(held_out), units.loss
    with np.errstate(over="ignore"):  # a predicted count may be too large for float64
        losses = np.array([loss.values(samples, m[present]).mean() for m in models])
    chosen = index if index >= 0 else int(losses.argmin())
    points = np.stack([units.scores(m, test) for m in models])
    pooled = refit(plan.problem, np.zeros(users.n_users, dtype=np.int64))
    return Scores(metric=METRICS[settings.task], larger=classes, fitted=points[chosen],
                  alone=units.scores(plan.problem.loss.local(plan.problem.samples).points, test),
                  together=units.scores(pooled, test), points=points, losses=losses, chosen=chosen,
                  n_clusters=len(np.unique(models[chosen], axis=0)), n_rows=test.n_samples)
