"""Choosing lam and the models to use: by held-out score, number of groups, certificate or
stability.

Every rule uses only one number per user (a loss on held-out samples) and the groups, so a
federation can apply it too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.base.errors import InvalidInput
from coterie.base.labels import check_labels, many
from coterie.base.types import Array, Ints
from coterie.convex.path import Path, solve_path
from coterie.convex.recovery import recovery_bounds
from coterie.data.users import Users
from coterie.losses import Loss
from coterie.losses.derived import Grouped
from coterie.problem.problem import Problem
from coterie.problem.solution import Solution


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """The chosen point of a path, and the reason.

    Attributes
    ----------
    solution
        The solution at the chosen lam.
    by
        The rule.
    sentence
        The reason for the choice.
    path
        The path that was searched.
    scores
        One number per lam of the path; its meaning depends on the rule.
    models
        (n_users, dim) the models to use: penalised, or refitted if these have a better score.
    refitted
        Whether `models` are refitted.

    Example
    -------
    >>> import coterie as ct
    >>> from coterie.datasets import ellipses
    >>> choice = ct.by_clusters(ct.Problem(ellipses(seed=0).users, ct.SquaredHinge(ridge=1e-3),
    ...                                    lam=0.0), at_most=3)
    >>> choice.solution.n_clusters, choice.refitted
    (3, False)
    """

    solution: Solution
    by: str
    sentence: str
    path: Path = field(repr=False)
    scores: Array = field(repr=False)
    models: Array = field(repr=False)
    refitted: bool = False

    @property
    def lam(self) -> float:
        """The chosen lam."""
        return self.solution.lam

    @property
    def labels(self) -> Ints:
        """(n_users,) the groups at the chosen lam."""
        return self.solution.labels

    def __str__(self) -> str:
        return (f"lam = {self.lam:.4g} with {many(self.solution.n_clusters, 'group')}, by "
                f"{self.by}: {self.sentence}")


def refit(problem: Problem, labels: npt.ArrayLike) -> Array:
    """Fit each group separately, without the penalty, which removes its shrinkage (paper, Appendix
    C).

    The model of a group minimises the sum of its users' losses; a federation can compute it too.

    Parameters
    ----------
    problem
        The problem; its lam and graph are not used.
    labels
        (n_users,) the group of each user.

    Returns
    -------
    Array
        (n_users, dim) one model per user; users of one group have equal models.

    Raises
    ------
    InvalidInput
        If there is not one label per user.

    Example
    -------
    >>> import coterie as ct
    >>> users = ct.Users.from_arrays([[0.0], [2.0], [5.0]])
    >>> ct.refit(ct.Problem(users, ct.SquaredDistance(), lam=1.0), [0, 0, 1]).tolist()
    [[1.0], [1.0], [5.0]]
    """
    clusters = check_labels(labels, problem.n_users)
    loss = Grouped(loss=problem.loss, samples=problem.samples, labels=clusters)
    return loss.local(loss.prepare(loss.groups)).points[clusters]


def by_score(problem: Problem, held_out: Users, *, path: Path | None = None, n_lams: int = 30,
             tol: float = 1e-6, one_standard_error: bool = True) -> Choice:
    """Choose the lam whose models have the least mean loss on held-out samples.

    Penalised and refitted models are both considered at every lam.

    Parameters
    ----------
    problem
        The problem of the training samples; its lam is not used.
    held_out
        Held-out samples of the same users, in the same order.
    path, n_lams, tol
        The path to choose from; if None, it is solved with this number of points and tolerance.
    one_standard_error
        Whether to choose the fewest groups whose mean loss is within one standard error of the
        least. The error is that of the mean over users of the difference from the least.

    Returns
    -------
    Choice
        The chosen solution; `scores` has the mean loss at each lam.

    Raises
    ------
    InvalidInput
        If the held-out samples belong to other users, or there are none.

    Example
    -------
    >>> import coterie as ct
    >>> from coterie.datasets import clustered
    >>> parts = clustered("squared", n_users=12, samples=60, noise=1.0).users.split(test=0.3)
    >>> ct.by_score(ct.Problem(parts.train, ct.Squared(), lam=0.0), parts.test).solution.n_clusters
    3
    """
    _check_held_out(problem, held_out)
    path = solve_path(problem, n_lams=n_lams, tol=tol) if path is None else path
    present = held_out.counts > 0
    loss = problem.loss.own_loss
    # Users without held-out rows have no loss there.
    samples = loss.prepare(held_out.take(np.flatnonzero(present)))

    def score(models: Array) -> Array:
        return loss.values(samples, problem.loss.own_models(problem.samples, models)[present])

    penalised = np.stack([score(s.models) for s in path.solutions])
    refits = np.stack([score(refit(problem, s.labels)) for s in path.solutions])
    zero = loss.values(samples, np.zeros((int(present.sum()), problem.dim)))
    # a large finite loss instead of inf.
    refits = np.where(np.isfinite(refits), refits, np.abs(zero) * 1e6 + 1e6)
    losses = np.concatenate([penalised, refits])
    best = best_mean(losses, np.tile(path.n_clusters, 2), one_standard_error)
    refitted, solution = best >= len(path), path[best % len(path)]
    rule = ", the fewest groups within one standard error of the best" if one_standard_error else ""
    return Choice(solution=solution, by="held-out score", path=path, refitted=refitted,
                  models=refit(problem, solution.labels) if refitted else solution.models,
                  scores=np.minimum(penalised, refits).mean(axis=1),
                  sentence=f"mean held-out loss {losses[best].mean():.4g} with "
                           f"{'refitted' if refitted else 'penalised'} models{rule}.")


def best_mean(losses: Array, n_groups: Ints, one_standard_error: bool) -> int:
    """The row with the least mean, or the fewest groups within one standard error of it."""
    means = losses.mean(axis=1)
    best = int(means.argmin())
    if not one_standard_error:
        return best
    # Of differences: what users have in common does not blur the comparison.
    error = (losses - losses[best]).std(axis=1) / np.sqrt(losses.shape[1])
    allowed = np.flatnonzero(means <= means[best] + error)
    fewest = allowed[n_groups[allowed] == n_groups[allowed].min()]
    return int(fewest[means[fewest].argmin()])


def by_clusters(problem: Problem, at_most: int, *, path: Path | None = None, n_lams: int = 30,
                tol: float = 1e-6) -> Choice:
    """Choose the smallest lam with at most a given number of groups.

    Parameters
    ----------
    problem
        The problem; its lam is not used.
    at_most
        Largest number of groups.
    path, n_lams, tol
        The path to choose from; if None, it is solved with this number of points and tolerance.

    Returns
    -------
    Choice
        The chosen solution; `scores` has the number of groups at each lam.

    Raises
    ------
    InvalidInput
        If the number is not valid, or no point of the path has so few groups.

    Example
    -------
    >>> import coterie as ct
    >>> from coterie.datasets import gaussian_mixture
    >>> problem = ct.Problem(gaussian_mixture(30, separation=20.0).users, ct.SquaredDistance(),
    ...                      lam=0.0)
    >>> ct.by_clusters(problem, 3).solution.n_clusters
    3
    """
    if isinstance(at_most, bool) or int(at_most) != at_most or at_most < 1:
        raise InvalidInput(f"at_most must be a whole number >= 1, got {at_most!r}",
                           remedy="Use for example 3")
    path = solve_path(problem, n_lams=n_lams, tol=tol) if path is None else path
    enough = np.flatnonzero(path.n_clusters <= at_most)
    if not enough.size:
        raise InvalidInput(f"no point of the path has at most {at_most} groups; the fewest are "
                           f"{int(path.n_clusters.min())}",
                           remedy="Extend the path to larger lams, or use a connected graph")
    index = int(enough[0])
    solution = path[index]
    before = "" if solution.n_clusters == at_most \
        else f"; the point before has {path.n_clusters[index - 1]}"
    return _choose(path, index, "number of groups", path.n_clusters.astype(float),
                   f"{solution.n_clusters} groups (at most {at_most} allowed{before}).")


def by_certificate(problem: Problem, *, path: Path | None = None, n_lams: int = 30,
                   tol: float = 1e-6) -> Choice:
    """Choose the lam with the largest margin inside the bounds of Theorems 1 and 2, which prove its
    groups.

    The margin is the smaller of lam / lower and upper / lam. Separate models and one model for all
    are not considered, because they are always recovered. If the bounds prove no point, one model
    for all is chosen.

    Parameters
    ----------
    problem
        The problem; its lam is not used.
    path, n_lams, tol
        The path to choose from; if None, it is solved with this number of points and tolerance.

    Returns
    -------
    Choice
        The chosen solution; `scores` has the margin at each lam.

    Example
    -------
    >>> import coterie as ct
    >>> from coterie.datasets import gaussian_mixture
    >>> problem = ct.Problem(gaussian_mixture(30, separation=60.0).users, ct.SquaredDistance(),
    ...                      lam=0.0)
    >>> ct.by_certificate(problem).solution.n_clusters
    3
    """
    path = solve_path(problem, n_lams=n_lams, tol=tol) if path is None else path
    margins = np.zeros(len(path))
    for k, solution in enumerate(path.solutions):
        if 1 < solution.n_clusters < problem.n_users:
            bounds = recovery_bounds(solution.problem, solution.labels)
            low = solution.lam / bounds.lower if bounds.lower > 0 else np.inf
            margins[k] = min(low, bounds.upper / solution.lam)
    index = int(margins.argmax())
    if margins[index] <= 1:
        index = len(path) - 1
        sentence = "the bounds prove no clustering of the path, so one model for all is chosen."
    else:
        sentence = f"inside the bounds of Theorems 1 and 2 by a factor of {margins[index]:.3g}."
    return _choose(path, index, "certificate", margins, sentence)


def by_stability(problem: Problem, *, path: Path | None = None, n_lams: int = 30, tol: float = 1e-6,
                 resamples: int = 10, seed: int = 0) -> Choice:
    """Choose the lam whose groups change least if every user loses a random half of its samples.

    Agreement is the adjusted Rand index, averaged over resamples. Separate models and one model for
    all are not considered; one model for all is chosen if no other point has an agreement of at
    least 0.5.

    Parameters
    ----------
    problem
        The problem; its lam is not used.
    path, n_lams, tol
        The path to choose from; if None, it is solved with this number of points and tolerance.
    resamples
        Number of random halves.
    seed
        Seed of the halves.

    Returns
    -------
    Choice
        The chosen solution; `scores` has the agreement at each lam.

    Example
    -------
    >>> import coterie as ct
    >>> from coterie.datasets import clustered
    >>> users = clustered("squared", n_users=9, n_clusters=3, samples=40).users
    >>> ct.by_stability(ct.Problem(users, ct.Squared(), lam=0.0), n_lams=10,
    ...                 resamples=2).solution.n_clusters
    3
    """
    path = solve_path(problem, n_lams=n_lams, tol=tol) if path is None else path
    agreement = np.zeros(len(path))
    for k in range(resamples):
        # On the same lams, so that both paths are compared point by point.
        half = problem.users.data.split(test=0.5, seed=seed + k).train
        part = solve_path(Problem(half, problem.loss, lam=problem.lam, graph=problem.graph),
                          path.lams, tol=tol)
        for r, (full, other) in enumerate(zip(path.solutions, part.solutions, strict=True)):
            if 1 < full.n_clusters < problem.n_users:
                agreement[r] += adjusted_rand(full.labels, other.labels) / resamples
    index = int(agreement.argmax())
    if agreement[index] < 0.5:
        index = len(path) - 1
    sentence = "no clustering is stable, so one model for all is chosen."
    if agreement[index] > 0:
        sentence = (f"groups agree by {agreement[index]:.2f} (adjusted Rand index) over "
                    f"{resamples} halvings.")
    return _choose(path, index, "stability", agreement, sentence)


def _choose(path: Path, index: int, by: str, scores: Array, sentence: str) -> Choice:
    """The penalised models at one point of a path."""
    return Choice(solution=path[index], by=by, path=path, scores=scores,
                  models=path[index].models, sentence=sentence)


def _check_held_out(problem: Problem, held_out: Users) -> None:
    if held_out.names != problem.users.names:
        raise InvalidInput("the held-out samples belong to other users, or have another order",
                           remedy="Use users.split(...), which keeps all users in order")
    if not held_out.n_samples:
        raise InvalidInput("there are no held-out samples",
                           remedy="Split with validation=0.2, for example")


def accuracy(targets: npt.ArrayLike, predictions: npt.ArrayLike,
             sample_weight: Any = None) -> float:
    """The share of rows whose class is predicted."""
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(targets, predictions, sample_weight=sample_weight))


def accuracy_of_users(loss: Loss, models: Array, test: Users) -> Array:
    """(n_users,) the share of each user's rows whose class its model predicts."""
    correct = loss.predict(test.features, models[test.owner]) == test.targets
    return np.asarray(np.add.reduceat(correct, test.offsets[:-1], dtype=float) / test.counts)


def explained_variance(targets: npt.ArrayLike, predictions: npt.ArrayLike,
                       sample_weight: Any = None) -> float:
    """R^2, the share of the variance explained."""
    from sklearn.metrics import r2_score

    return float(r2_score(targets, predictions, sample_weight=sample_weight))


def explained_deviance(targets: npt.ArrayLike, predictions: npt.ArrayLike,
                       sample_weight: Any = None) -> float:
    """D^2, the share of the Poisson deviance explained."""
    from sklearn.metrics import d2_tweedie_score

    return float(d2_tweedie_score(targets, predictions, sample_weight=sample_weight, power=1))


def roc_auc(targets: npt.ArrayLike, margins: npt.ArrayLike) -> float:
    """The area under the curve of true over false positives."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(targets, margins))


def adjusted_rand(labels: npt.ArrayLike, others: npt.ArrayLike) -> float:
    """How far two clusterings agree beyond chance: 1 if they are the same (Hubert and Arabie 1985).

        (together - expected) / (most - expected),      pairs that are together in both, expected by
                                                        chance, and at most
    """
    _, rows = np.unique(np.asarray(labels), return_inverse=True)
    _, columns = np.unique(np.asarray(others), return_inverse=True)
    cells = np.unique(rows * (columns.max(initial=0) + 1) + columns, return_counts=True)[1]
    in_both, in_one, in_other = (float((n * (n - 1.0)).sum()) / 2
                                 for n in (cells, np.bincount(rows), np.bincount(columns)))
    pairs = len(rows) * (len(rows) - 1.0) / 2
    expected, most = in_one * in_other / max(pairs, 1.0), (in_one + in_other) / 2
    return 1.0 if most == expected else (in_both - expected) / (most - expected)
