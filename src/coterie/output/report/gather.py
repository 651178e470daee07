"""Collect a result as one document of plain JSON types, which `render` turns into a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from coterie.base.errors import CoterieError, InvalidInput
from coterie.base.labels import many, plural
from coterie.base.storage import json_ready
from coterie.base.types import Ints
from coterie.convex.path import Path
from coterie.convex.recovery import recovery_bounds
from coterie.data.users import Users
from coterie.fitting.result import Fit
from coterie.fitting.scores import INTERVAL, Scores, mean_and_error
from coterie.losses.derived import Remote
from coterie.output.plots import View, project
from coterie.output.plots.along import curves_of
from coterie.output.report.headline import (
    errors_of,
    headline,
    loss_words,
    noun_of,
    settings_sentence,
    title_of,
)
from coterie.problem.account import Account
from coterie.problem.graph import Graph
from coterie.problem.problem import Problem
from coterie.problem.solution import Solution

# Most groups whose coefficients are shown: at the chosen lam, at others, of wide models.
_CLUSTERS = (200, 24, 12)
_NUMBERS = 200_000  # most coefficients at lams that are not chosen; above it models are wide
_NAMED = 4  # columns that are named below the title
_SAMPLES = 3000  # most samples drawn under separating lines
_BOUNDED = (2000, 100)  # most users and groups for which recovery bounds are computed


def gather(source: Fit | Path | Solution, *, path: Path | None = None,
           chosen: int | None = None, classes: Sequence[str] | None = None,
           title: str | None = None, command: str | None = None,
           settings: Mapping[str, Any] | None = None, notes: Sequence[str] = (),
           refit: bool = False, most_users: int = 2000) -> dict[str, Any]:
    """Collect everything that the report of a result shows, as plain JSON types.

    Parameters
    ----------
    source : a `Fit`, a `Path`, or a `Solution`.
    path : the path that a solution lies on.
    chosen : index of the point of the path to show first; by default, of a path the middle of the
        longest stretch of lam with the same groups.
    classes : names of the classes, if there are more than two.
    title, command : texts of the page; the title says by default how many groups there are.
    settings : shown as they are; by default those of the fit.
    notes : sentences to show.
    refit : whether the models of a path or a solution are shown fitted again by group, without the
        penalty (`Solution.refit`); those of a fit always are.
    most_users : above this number a sample of users is shown: one of every group at the chosen
        point, and others in proportion.

    Returns
    -------
    dict
        Lists, texts, numbers and None, which replaces nan and inf.

    Raises
    ------
    InvalidInput
        If `most_users` is below 1, or the path or the chosen point does not belong to the source.

    Example
    -------
    >>> import coterie as ct
    >>> users = ct.Users.from_arrays([[0.0], [0.1], [5.0]])
    >>> document = gather(ct.solve(ct.Problem(users, ct.SquaredDistance(), lam=0.5)))
    >>> document["title"]
    '2 groups of 3 users'
    """
    from coterie import __version__

    if most_users < 1:
        raise InvalidInput(f"most_users must be at least 1, got {most_users!r}",
                           remedy="Leave it out")
    full = View.of(source, chosen, path)
    if refit and full.count is None:
        full = replace(full, count="users")
    n, n_groups = full.problem.users.n_users, full.solution.n_clusters
    keep = sample(full.solution.labels, most_users) if n > most_users else np.arange(n)
    settings = json_ready(_settings(source, full) if settings is None else settings)
    return {"title": title or title_of(source, n_groups, n), "version": __version__,
            "command": command, "notes": [str(note) for note in notes], "settings": settings,
            "settings_sentence": settings_sentence(source, settings),
            "reduced": {"users": n, "shown": len(keep)} if len(keep) < n else None,
            **_results(source, full, keep, classes)}


def _results(source: Fit | Path | Solution, full: View, keep: Ints,
             classes: Sequence[str] | None) -> dict[str, Any]:
    """The parts of the document that come from the result; of each user, only for those in `keep`.
    """
    users = full.problem.users
    view = (replace(full, path=_path_of_users(full, keep), known=full.models[:, keep], stated=None)
            if len(keep) < users.n_users else full)
    features = users.feature_names if full.units is None else full.units.feature_names
    # A server does not always know how many rows there are.
    account = None if isinstance(source, Path) else source.account
    private = account is not None and account.privacy is not None
    rows = (f"{many(int(users.sizes.sum()), 'row')}, " if isinstance(users, Users) and not private
            else "")
    noun = noun_of(source) if isinstance(source, Fit) else "user"
    file = source.table.data if isinstance(source, Fit) and source.table is not None else ""
    listed = ", ".join(features[:_NAMED]) + ", ..." * bool(len(features) > _NAMED)
    return {
        "headline": headline(source, full.solution.labels, full.task), "noun": noun,
        "nouns": plural(noun),
        "warnings": list(source.warnings) if isinstance(source, Fit) else [],
        "subtitle": f"{f'{FilePath(file).name}: ' if file else ''}{many(users.n_users, noun)}, "
                    f"{rows}{many(len(features), 'column')} ({listed})",
        "loss": loss_words(full.loss),
        "curves": _curves(source, keep) if isinstance(source, Fit) else None,
        "checks": _checks(source.scores, keep) if isinstance(source, Fit) else None,
        "task": view.task,
        "users": [str(users.names[k]) for k in keep],
        "counts": users.sizes[keep].tolist() if isinstance(users, Users) and not private else None,
        "lams": full.path.lams.tolist(), "chosen": full.index,
        "points": [_point(s) for s in full.path.solutions],
        "labels": [s.labels.tolist() for s in view.path.solutions],
        "tree": [[int(a), int(b), lam, int(n)] for a, b, lam, n in view.path.linkage.tolist()],
        # What a federated fit has as rows are not the users' own.
        "map": None if users.n_users == 1 else _map(
            view, samples=account is None or not isinstance(source, Fit)),
        "coefficients": _coefficients(full, view, keep, classes) | {
            "errors": json_ready(errors_of(source)) if isinstance(source, Fit) else {}},
        "scores": _scores(source, full, keep),
        # Weights inside groups only prove nothing about these groups.
        "bounds": None if isinstance(source, Fit) and source.by_summaries else _bounds(full),
        "groups": _groups(source, keep) if isinstance(source, Fit) else None,
        "shares": _shares(source) if isinstance(source, Fit) else None,
        "federated": None if account is None else _federated(source, account, keep),
        "privacy": _privacy(account.privacy.statement()) if account and private else None,
    }


def _curves(fit: Fit, keep: Ints) -> dict[str, Any] | None:
    """How predictions change along each column."""
    curves = curves_of(fit)
    if curves is None:
        return None
    positions = {int(user): k for k, user in enumerate(keep)}
    return {"target": curves.target, "shown": [positions.get(int(k), -1) for k in curves.shown],
            "columns": json_ready([{name: value.tolist() if isinstance(value, np.ndarray) else value
                                    for name, value in curve._asdict().items()}
                                   for curve in curves.columns])}


def _checks(scores: Scores | None, keep: Ints) -> dict[str, Any] | None:
    """How often intervals hold the target, user by user, and whether probabilities are as large as
    shares.
    """
    if scores is None or not (len(scores.covered) or len(scores.reliability)):
        return None
    covered = scores.covered
    return {"level": INTERVAL, "users": json_ready(covered[keep]) if len(covered) else None,
            "mean": json_ready(np.nanmean(covered)) if len(covered) else None,
            "median": json_ready(np.nanmedian(covered)) if len(covered) else None,
            "reliability": json_ready(scores.reliability) if len(scores.reliability) else None}


def _groups(fit: Fit, keep: Ints) -> dict[str, Any]:
    """What users share, and the evidence for it."""
    stability, scores, evidence = fit.stability, fit.scores, dict[str, Any]()
    if stability is not None:
        evidence["stability"] = json_ready({
            "stable": stability.stable, "index": stability.index, "searched": stability.searched,
            "groups": [stability.stays[fit.labels == k].mean() for k in range(fit.n_clusters)]})
    if scores is not None and len(scores.fitted) > 1:
        evidence["held_out"] = json_ready({
            "gain": scores.gain[0], "error": scores.gain[1], "worse": int(scores.worse.sum()),
            "users": int(np.isfinite(scores.fitted).sum()), "rows": scores.n_rows,
            "means": [np.nanmean(m) for m in (scores.fitted, scores.alone, scores.together)],
            "over_together": mean_and_error(scores.gains_over(scores.together))})
    return {"sentence": fit.why, "kind": fit.kind, "compared": json_ready(fit.compared),
            "errors": json_ready(fit.compared_errors), "proposed": fit.by_summaries,
            "stays": None if stability is None else json_ready(stability.stays[keep]), **evidence}


def _point(solution: Solution) -> dict[str, Any]:
    return {"n_clusters": solution.n_clusters, "objective": json_ready(solution.objective),
            "bound": json_ready(solution.certificate.bound), "gap": json_ready(solution.gap),
            "status": solution.status.value}


def sample(labels: Ints, most: int) -> Ints:
    """Choose users to show: the first of every group (of the `most` largest, if there are more),
    and others evenly.
    """
    firsts = np.unique(labels, return_index=True)[1]
    if len(firsts) >= most:
        return np.sort(firsts[np.argsort(-np.bincount(labels), kind="stable")[:most]])
    rest = np.argsort(labels, kind="stable")
    rest = rest[~np.isin(rest, firsts)]
    positions = (np.arange(most - len(firsts)) + 0.5) * len(rest) / (most - len(firsts))
    return np.sort(np.concatenate([firsts, rest[positions.astype(np.int64)]]))


def _path_of_users(view: View, keep: Ints) -> Path:
    """The path restricted to some of its users, to be shown only: its problem has no data to solve
    with.
    """
    path, full = view.path, view.problem
    problem = Problem(full.users.take(keep), Remote(loss=view.loss, length=full.dim), full.lam,
                      Graph.from_edges(len(keep), []))
    return replace(path, problem=problem, solutions=tuple(
        Solution(problem=problem.with_lam(s.lam), models=s.models[keep], duals=None,
                 certificate=s.certificate,
                 status=s.status, solver=s.solver, seconds=s.seconds) for s in path.solutions))


def _map(view: View, samples: bool = True) -> dict[str, Any]:
    lines, dim, users = view.lines(), view.models.shape[2], view.problem.users
    if lines is not None and isinstance(users, Users) and users.targets is not None:
        X, y = users.features[:, :2], users.targets
        names: Sequence[str] = users.feature_names[:2]
        if view.units is not None:
            X = X * view.units.scale + view.units.mean
        rows = np.unique(np.linspace(0, len(X) - 1, min(len(X), _SAMPLES)).round().astype(np.int64))
        drawn = [[*point, int(side), int(owner)] for point, side, owner in zip(
            X[rows].tolist(), y[rows] > 0, users.owner[rows], strict=True)]
        return {"kind": "separators", "xlabel": names[0], "ylabel": names[1],
                "points": json_ready(lines), "samples": drawn if samples else None,
                "note": "Lines at which each model is undecided between the two classes."}
    if dim > 2:
        points, shares = project(view.models)
        return {"kind": "projection", "xlabel": "first direction", "ylabel": "second direction",
                "points": json_ready(points), "samples": None,
                "note": f"The two directions hold {100 * shares.sum():.0f}% of the differences "
                        "between models."}
    points = view.coefficients(view.models.reshape(-1, dim)).reshape(view.models.shape)
    names = view.names()[0]
    if dim == 1:
        points = np.concatenate([points, np.zeros_like(points)], axis=2)
    return {"kind": "line" if dim == 1 else "projection", "xlabel": names[0],
            "ylabel": names[1] if dim == 2 else "", "points": json_ready(points), "samples": None,
            "note": "Every model is a point: its coefficients are its "
                    "coordinates." if dim == 2 else ""}


def _coefficients(full: View, view: View, keep: Ints,
                  classes: Sequence[str] | None) -> dict[str, Any]:
    """The models of the largest groups at each lam, or their centres where users have their own
    models.

    Groups have the numbers that they have among the users shown.
    """
    (names, outputs), units = view.names(classes), full.units
    which, rows, standardized = [], [], []
    few = len(full.path) * _CLUSTERS[1] * full.models.shape[2] <= _NUMBERS
    for k, s in enumerate(view.path.solutions):
        most = _CLUSTERS[0] if k == full.index else _CLUSTERS[1] if few else _CLUSTERS[2]
        largest = np.argsort(-np.bincount(s.labels), kind="stable")[:most]
        if len(largest) <= _CLUSTERS[1]:
            largest = np.sort(largest)  # few are shown in the order of their numbers
        members = keep[np.unique(s.labels, return_index=True)[1][largest]]
        models = full.centres(k)[full.path[k].labels[members]]
        which.append(largest.tolist())
        rows.append(json_ready(full.coefficients(models)))
        if units is not None and bool((units.scale != 1.0).any()):
            standardized.append(json_ready(units.standardized(models).reshape(len(models), -1)))
    return {"names": names, "outputs": outputs, "clusters": rows, "which": which,
            "standardized": standardized or None}


def _shares(fit: Fit) -> dict[str, Any] | None:
    """How personal each coefficient is: the mean over users of its square, for standardised
    features, in three parts.

        mean of x_ij^2  =  shared: (mean of x_ij)^2
                         + groups: variance of the means of groups
                         + personal: variance within groups

    None where all users have the same model or there is only one, and for points.
    """
    if fit.kind == "one model" or fit.settings.task == "clustering" or len(fit.labels) == 1:
        return None
    models = fit.units.standardized(fit.models)
    labels = np.zeros_like(fit.labels) if fit.kind == "alone" else fit.labels
    means = np.stack([models[labels == k].mean(axis=0) for k in range(labels.max() + 1)])[labels]
    parts = {"shared": models.mean(axis=0) ** 2, "groups": means.var(axis=0),
             "personal": ((models - means) ** 2).mean(axis=0)}
    return {"names": fit.units.coefficient_names,
            **{name: json_ready(part.sum(axis=1)) for name, part in parts.items()}}  # over classes


def _scores(source: Fit | Path | Solution, view: View, keep: Ints) -> dict[str, Any] | None:
    if isinstance(source, Fit) and source.scores is not None and len(source.labels) > 1:
        scores = source.scores
        rows = aligned(scores, len(source.path), source.chosen)[:len(view.path)]
        points = np.where(rows[:, None] >= 0, scores.points[rows][:, keep], np.nan)
        note = f"On {many(scores.n_rows, 'row')} held out, with models fitted without these rows."
        if (rows < 0).any():
            note += " Computed at the chosen lam only."
        alone, together = (json_ready(some[keep]) for some in (scores.alone, scores.together))
        return {"metric": scores.metric, "larger": scores.larger, "alone": alone,
                "together": together, "points": json_ready(points), "note": note}
    # Of a federation with a given lam.
    if isinstance(source, Solution) and source.account and source.account.scores is not None:
        sums, active = source.account.scores, ~source.account.state.aside
        sums = sums[active] if len(sums) == len(active) else sums
        classify = view.task == "classification"
        loss, right, count = sums[keep].T[:3]
        points = np.full((len(view.path), len(keep)), np.nan)
        with np.errstate(invalid="ignore", divide="ignore"):
            points[view.index] = np.where(count > 0, right / count if classify else loss, np.nan)
        return {"metric": "accuracy" if classify else "loss", "larger": classify, "alone": None,
                "together": None, "points": json_ready(points),
                "note": f"On {many(int(sums[:, 2].sum()), 'row')} held out by their users."}
    return None


def aligned(scores: Scores, n_lams: int, chosen: int) -> Ints:
    """(n_lams,) the row of `scores.points` for each point of the path; -1 where there is none.

    The path without the held-out rows has other lams: the chosen points of both paths correspond,
    and the others by their relative position.
    """
    last = len(scores.points) - 1
    if last == 0:
        return np.where(np.arange(n_lams) == chosen, 0, -1)
    rows = np.interp(np.arange(n_lams), [0, chosen, n_lams - 1], [0, scores.chosen, last])
    rows[chosen] = scores.chosen
    return rows.round().astype(np.int64)


def _bounds(view: View) -> dict[str, Any] | None:
    solution = view.solution
    if solution.problem.n_users > _BOUNDED[0] or solution.n_clusters > _BOUNDED[1]:
        return None
    try:
        bounds = recovery_bounds(solution.problem, solution.labels)
    except CoterieError:  # for example, where the data stay with the users
        return None
    return {"lower": json_ready(bounds.lower), "upper": json_ready(bounds.upper),
            "sentence": bounds.sentence}


def _federated(source: Any, account: Account, keep: Ints) -> dict[str, Any]:
    """Rounds, bytes by kind of question, and the users who took part, with the bytes that each sent
    and received.
    """
    names = ("gap", "n_clusters", "stage", "asked", "answered", "bytes_up", "bytes_down")
    rounds = [{"round": int(line.iteration), **{name: json_ready(getattr(line, name))
                                                for name in names}} for line in account.history]
    ledger, aside, solved = account.ledger, account.aside, isinstance(source, Solution)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in list(aside.items())[:3])
    reasons += "; ..." * (len(aside) > 3)
    excluded = f" {many(len(aside), 'user')} set aside ({reasons})." if aside else ""
    part, solver = ledger.participants(), f" of {source.solver}" if solved else ""
    up, down = (ledger.bytes_of_users(way) for way in ("up", "down"))
    # A run's ledger is of all users, its problem of those who were not excluded.
    problem = source.problem if solved else source.solution.problem
    shown = keep if len(up) == problem.n_users else ()
    return {"rounds": rounds, "kinds": json_ready(ledger.by_kind()),
            "users": [[int(up[k]), int(down[k])] for k in shown],
            "sentence": f"{many(part, 'user')} took part in "
                        f"{many(account.n_rounds, 'round')}{solver}: {ledger}.{excluded}"}


def _privacy(said: Any) -> dict[str, Any]:
    """What a private fit promises, and to whom."""
    return {"sentence": f"epsilon = {said.epsilon:g}, delta = {said.delta:g}, for all "
            f"{said.releases} releases of a user together.",
            "facts": [["Protected", f"a {said.unit}: nobody can tell from what left a user whether "
                       f"{said.neighbours}, beyond what epsilon and delta allow"],
                      ["Bounds", said.clip], ["Noise", said.noise], ["Trusted", said.trust],
                      ["Public", said.public], ["Finished at home", said.home],
                      ["Certificate", said.proves]]}


def _settings(source: Fit | Path | Solution, view: View) -> dict[str, Any]:
    if isinstance(source, Fit):
        return asdict(source.settings)
    graph = view.problem.graph
    return {"loss": repr(view.loss), "lam": view.solution.lam, "solver": view.solution.solver,
            "graph": "all pairs" if graph.is_complete else many(graph.n_edges, "edge"),
            "tol": view.path.tol}
