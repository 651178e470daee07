"""A result as one document of plain JSON types, which `render` makes a page of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from coterie._typing import Ints
from coterie.analysis.path import Path
from coterie.analysis.recovery import recovery_bounds
from coterie.errors import CoterieError, InvalidInput
from coterie.federated.run import Federated
from coterie.fitting import Fit, Scores
from coterie.graph import Graph
from coterie.losses.remote import Remote
from coterie.plots import View, project
from coterie.problem import Problem
from coterie.solution import Solution
from coterie.storage import json_ready

_CLUSTERS = 12  # whose coefficients are shown at each lam
_SAMPLES = 3000  # drawn under separating lines
_BOUNDED = (2000, 100)  # users and clusters up to which recovery bounds are computed


def gather(source: Fit | Path | Solution, *, path: Path | None = None, chosen: int | None = None,
           classes: Sequence[str] | None = None, title: str | None = None, command: str | None = None,
           settings: Mapping[str, Any] | None = None, notes: Sequence[str] = (),
           most_users: int = 2000) -> dict[str, Any]:
    """All that the page of a result shows: lists, texts, numbers and None, which stands for nan and inf as well.

    Parameters
    ----------
    source : a `Fit`, a `Path`, or a `Solution`, which a `Federated` run is one of.
    path : one that a solution lies on.
    chosen : the point of the path to begin at; a path's own is in the middle of the clustering that lasts longest.
    classes : their names, where there are more than two.
    title, command, settings, notes : what the page says of the run; settings are the fit's own unless given.
    most_users : above this number a sample of users stands for all: one of every cluster at the chosen point, and
        others in proportion.
    """
    if most_users < 1:
        raise InvalidInput(f"most_users must be at least 1, got {most_users!r}", remedy="Leave it out")
    whole = View.of(source, chosen, path)
    solution, users = whole.solution, whole.path.problem.users
    n = users.n_users
    keep = sample(solution.labels, most_users) if n > most_users else np.arange(n)
    view = replace(whole, path=_taken(whole, keep)) if len(keep) < n else whole
    features = users.feature_names if whole.units is None else whole.units.feature_names
    return {
        "title": title or f"{_many(solution.n_clusters, 'cluster')} of {_many(n, 'user')}",
        "subtitle": f"{_many(n, 'user')}, {_many(users.n_samples, 'row')}, {_many(len(features), 'feature')}; "
                    f"{type(whole.loss).__name__} loss",
        "version": _version(), "command": command, "task": view.task,
        "users": [str(users.names[k]) for k in keep], "counts": users.counts[keep].tolist(),
        "lams": whole.path.lams.tolist(), "chosen": whole.index,
        "points": [{"n_clusters": s.n_clusters, "objective": json_ready(s.objective),
                    "bound": json_ready(s.certificate.bound), "gap": json_ready(s.gap), "status": s.status.value}
                   for s in whole.path.solutions],
        "labels": [s.labels.tolist() for s in view.path.solutions],
        "tree": [[int(a), int(b), lam, int(size)] for a, b, lam, size in view.path.linkage.tolist()],
        "map": _map(view),
        "coefficients": _coefficients(view, classes),
        "scores": _scores(source, whole, keep),
        "bounds": _bounds(whole),
        "groups": {"sentence": source.why} if isinstance(source, Fit) else None,
        "federated": _federated(source) if isinstance(source, Federated) else None,
        "settings": json_ready(_settings(source, whole) if settings is None else settings),
        "notes": [str(note) for note in notes],
        "reduced": {"users": n, "shown": len(keep)} if len(keep) < n else None,
    }


def sample(labels: Ints, most: int) -> Ints:
    """The first user of every cluster (of the largest ones, where there are more than `most`), and others evenly."""
    firsts = np.unique(labels, return_index=True)[1]
    if len(firsts) >= most:
        return np.sort(firsts[np.argsort(-np.bincount(labels), kind="stable")[:most]])
    rest = np.argsort(labels, kind="stable")
    rest = rest[~np.isin(rest, firsts)]
    places = (np.arange(most - len(firsts)) + 0.5) * len(rest) / (most - len(firsts))
    return np.sort(np.concatenate([firsts, rest[places.astype(np.int64)]]))


def _taken(view: View, keep: Ints) -> Path:
    """The path as it is for some of its users; nothing can be solved on it."""
    path, whole = view.path, view.path.problem
    problem = Problem(whole.users.take(keep), Remote(loss=view.loss, length=whole.dim), whole.lam,
                      Graph.from_edges(len(keep), []))
    return replace(path, problem=problem, solutions=tuple(
        Solution(problem=problem.with_lam(s.lam), models=s.models[keep], duals=None, certificate=s.certificate,
                 status=s.status, solver=s.solver, seconds=s.seconds) for s in path.solutions))


def _map(view: View) -> dict[str, Any]:
    lines, dim, users = view.lines(), view.models.shape[2], view.path.problem.users
    if lines is not None and users.targets is not None:
        X, y = users.features[:, :2], users.targets
        names: Sequence[str] = users.feature_names[:2]
        if view.units is not None:
            X = X * view.units.scale + view.units.mean
        rows = np.unique(np.linspace(0, len(X) - 1, min(len(X), _SAMPLES)).round().astype(np.int64))
        samples = [[*point, int(side), int(owner)] for point, side, owner in
                   zip(X[rows].tolist(), y[rows] > 0, users.owner[rows], strict=True)]
        return {"kind": "separators", "xlabel": names[0], "ylabel": names[1], "points": json_ready(lines),
                "samples": samples, "note": "Lines at which each model is undecided between the two classes."}
    if dim > 2:
        points, shares = project(view.models)
        return {"kind": "projection", "xlabel": "first direction", "ylabel": "second direction",
                "points": json_ready(points), "samples": None,
                "note": f"The two directions hold {100 * shares.sum():.0f}% of the differences between models."}
    told = view.coefficients(view.models.reshape(-1, dim)).reshape(view.models.shape)
    coefficients = view.names()[0]
    if dim == 1:
        told = np.concatenate([told, np.zeros_like(told)], axis=2)
    return {"kind": "line" if dim == 1 else "projection", "xlabel": coefficients[0],
            "ylabel": coefficients[1] if dim == 2 else "", "points": json_ready(told), "samples": None,
            "note": "Every model is a point: its coefficients are its coordinates." if dim == 2 else ""}


def _coefficients(view: View, classes: Sequence[str] | None) -> dict[str, Any]:
    names, outputs = view.names(classes)
    which, told = [], []
    for s in view.path.solutions:
        firsts = np.unique(s.labels, return_index=True)[1]
        largest = np.argsort(-np.bincount(s.labels), kind="stable")[:_CLUSTERS]
        which.append(largest.tolist())
        told.append(json_ready(view.coefficients(s.models[firsts[largest]])))
    return {"names": names, "outputs": outputs, "clusters": told, "which": which}


def _scores(source: Fit | Path | Solution, view: View, keep: Ints) -> dict[str, Any] | None:
    if isinstance(source, Fit) and source.scores is not None:
        found = source.scores
        places = aligned(found, len(source.path), source.chosen)
        points = np.where(places[:, None] >= 0, found.points[places][:, keep], np.nan)
        note = (f"On {_many(found.n_rows, 'row')} held out, with models found without them "
                f"({_many(found.n_clusters, 'cluster')}).")
        if (places < 0).any():
            note += " Computed at the chosen lam only."
        return {"metric": found.metric, "larger": found.larger, "alone": json_ready(found.alone[keep]),
                "together": json_ready(found.together[keep]), "points": json_ready(points), "note": note}
    if isinstance(source, Federated) and source.scores is not None:
        active = ~source.state.aside
        told = source.scores[active] if len(source.scores) == len(active) else source.scores
        right = view.task == "classification"
        with np.errstate(invalid="ignore", divide="ignore"):
            here = np.where(told[:, 2] > 0, told[:, 1] / told[:, 2] if right else told[:, 0], np.nan)
        points = np.full((len(view.path), len(keep)), np.nan)
        points[view.index] = here[keep]
        return {"metric": "accuracy" if right else "loss", "larger": right, "alone": None, "together": None,
                "points": json_ready(points),
                "note": f"On {_many(int(told[:, 2].sum()), 'row')} held out by their users."}
    return None


def aligned(scores: Scores, n_lams: int, chosen: int) -> Ints:
    """(n_lams,) the row of `scores.points` for each point of the path; -1 where there is none.

    The path without the rows held out has its own lams: the points chosen on both meet, others by relative place.
    """
    many = len(scores.points)
    if many == 1:
        return np.where(np.arange(n_lams) == chosen, 0, -1)
    here = scores.chosen
    place = np.interp(np.arange(n_lams), [0, chosen, n_lams - 1], [0, here, many - 1]) if n_lams > 1 else np.zeros(1)
    place[chosen] = here
    return place.round().astype(np.int64)


def _bounds(view: View) -> dict[str, Any] | None:
    solution = view.solution
    if solution.problem.n_users > _BOUNDED[0] or solution.n_clusters > _BOUNDED[1]:
        return None
    try:
        bounds = recovery_bounds(solution.problem, solution.labels)
    except CoterieError:  # data that are with their users, for one
        return None
    return {"lower": json_ready(bounds.lower), "upper": json_ready(bounds.upper), "sentence": bounds.sentence}


def _federated(run: Federated) -> dict[str, Any]:
    rounds = [{"round": int(line.iteration), "gap": json_ready(line.gap), "n_clusters": int(line.n_clusters),
               "bytes_up": int(line.bytes_up), "bytes_down": int(line.bytes_down), "answered": int(line.answered)}
              for line in run.history]
    aside = f" {_many(len(run.aside), 'user')} set aside." if run.aside else ""
    return {"rounds": rounds, "sentence": f"{_many(run.n_rounds, 'round')} of {run.solver}: {run.ledger}.{aside}"}


def _settings(source: Fit | Path | Solution, view: View) -> dict[str, Any]:
    if isinstance(source, Fit):
        return asdict(source.settings)
    graph = view.path.problem.graph
    return {"loss": repr(view.loss), "lam": view.solution.lam, "solver": view.solution.solver,
            "graph": "all pairs" if graph.is_complete else _many(graph.n_edges, "edge"), "tol": view.path.tol}


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}" + "s" * (count != 1)


def _version() -> str:
    from coterie import __version__

    return __version__
