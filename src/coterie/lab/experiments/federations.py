"""All methods on real federations, with the same splits, scored on unused test rows.

For every split and federated method:
1. choose from at most BUDGET settings the one whose fit to the training rows has the least mean
   loss on the validation rows;
2. fit again with it, to training and validation rows;
3. score the model of every user on the user's test rows, which the first two steps do not use.

`coterie fit` and the other methods for one table get training and validation rows together, and
make their choices on these.

Methods are compared per user (means over splits), by Wilcoxon's signed-rank test with Holm's
correction.
"""

from __future__ import annotations

import platform
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import logit

import coterie
from coterie.base.errors import CoterieWarning, interruptible
from coterie.base.labels import labels_of
from coterie.base.types import Array
from coterie.convex.choice import roc_auc
from coterie.data.summary import Task
from coterie.data.users import Users
from coterie.fitting import Settings, fit
from coterie.fitting.average import predicted
from coterie.fitting.scores import worse_than_alone
from coterie.lab import baselines
from coterie.lab.baselines import BASELINES, BUDGET, CENTRAL, IFCA, Baseline, Central, CentralFit
from coterie.lab.baselines.base import choose
from coterie.lab.experiments.federations_data import Benchmark, Parts
from coterie.output.plots.base import new_figure
from coterie.output.runs import table

LEVEL = 0.05  # of significance
WIDE = 100  # for models with more coordinates, methods with many rounds or starts get fewer
HEADINGS = ("set", "method", "metric", "mean", "spread", "worst decile", "better than alone",
            "worse than alone", "against coterie", "p (Holm)", "models", "rounds", "numbers sent",
            "seconds")


def coterie_fit(users: Users, task: Task, n_classes: int, seed: int) -> CentralFit:
    """`coterie fit` with its default settings as a method for one table: groups, kind of models,
    personal parts and averages are chosen by the fit itself.
    """
    fitted = fit(users, Settings(task=task, n_classes=n_classes))
    groups = f", {fitted.n_clusters} groups" if "groups" in fitted.kind else ""
    units, average = fitted.units, fitted.average

    def decide(rows: Users) -> Array:
        models = fitted.models[rows.owner]
        if average is None or not average.used:
            return units.margins(rows.features, models)
        own = predicted(units, rows.features, models)
        told = average.predict(rows.features, rows.owner, own)[0]
        return np.asarray(logit(np.clip(told, 1e-12, 1 - 1e-12))) if task == "classification" \
            else told

    averaged = ", averaged" if average is not None and average.used else ""
    return CentralFit(decide=decide, models=fitted.models, note=fitted.kind + groups + averaged)


OURS = Central(name="coterie", method=coterie_fit)
#: A method for one table, or settings to choose from.
Contender = Central | tuple[Baseline, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """One method on one split.

    Parameters
    ----------
    federation, metric, method, seed : of which federation, by which metric, by which method, on
        which split.
    scores : (n_users,) nan if a user's test rows do not define the metric.
    settings : of the method.
    n_models : number of distinct models.
    rounds : nan for methods that get all rows at one place.
    floats : numbers sent by all users and to them in the final fit; nan as for `rounds`.
    seconds : of tuning and fit.
    models : (n_users, dim) (n_users, 0) for methods without.
    decisions : about the test rows; see `coterie.lab.baselines.central`.
    test : the test rows.
    errors : of each test row: squared, or 1 for a wrong class.
    note : what a method for one table chose.
    concern : what went wrong, and what was done instead.
    """

    federation: str
    metric: str
    method: str
    seed: int
    scores: Array = field(repr=False)
    settings: Baseline | Central
    n_models: int
    rounds: float
    floats: float
    seconds: float
    models: Array = field(repr=False)
    decisions: Array = field(repr=False)
    test: Users = field(repr=False)
    errors: Array = field(repr=False)
    note: str = ""
    concern: str = ""


class Row(NamedTuple):
    """One method on one federation, over all splits."""

    federation: str
    method: str
    metric: str
    mean: float  # over users, of their means over splits
    spread: float  # standard deviation over users
    worst: float  # limit of the worst decile of users
    better: float  # share of users with a better score than with their local model
    # Share of users with larger errors than with their local model, by more than chance.
    harmed: float
    verdict: str  # "better" or "worse" than coterie, or "tied"
    p: float
    models: float
    rounds: float
    floats: float
    seconds: float


def prepare(federation: Benchmark, parts: Parts) -> Parts:
    """Compute features: from the training rows for tuning, from training and validation rows for
    the final fit.
    """
    (tuning, _), (final, unit) = map(federation.features, (parts.train, parts.everything))
    return Parts(tuning(parts.train), tuning(parts.validation), final(parts.everything),
                 final(parts.test), unit)


def methods(federation: Benchmark, dim: int = 0) -> list[tuple[str, Contender]]:
    """`coterie fit` and all methods to compare with; those that need the groups only if these are
    known.
    """
    users, clusters, wide = federation.users, federation.clusters, dim > WIDE
    rows: list[tuple[str, Contender]] = [
        (name, method) for name, method in _central(federation).items() if method.missing() is None]
    rows += [(name, _affordable(kind.grid(users, federation.loss), wide))
             for name, kind in BASELINES.items() if clusters is not None or not kind.needs_clusters]
    if clusters is not None:
        k = int(clusters.max()) + 1
        rows += [(f"ifca given {text}", (IFCA(n_clusters=count, restarts=2 if wide else 10),))
                 for text, count in (("K", k), ("K + 1", k + 1), ("2 K", 2 * k))
                 if count <= users.n_users]
    return [*rows, ("cfl published", (baselines.CFL(),))]


def _central(federation: Benchmark) -> dict[str, Central]:
    """`coterie fit` and the other methods for one table that can do this task, whether or not they
    are installed.
    """
    return {method.name: method for method in (OURS, *CENTRAL.values())
            if federation.task in method.tasks}


def left_out(federation: Benchmark) -> dict[str, str]:
    """Methods whose library is not installed, and what to do about it."""
    missing = {name: method.missing() for name, method in _central(federation).items()}
    return {name: str(error) for name, error in missing.items() if error is not None}


def _affordable(grid: tuple[Baseline, ...], wide: bool) -> tuple[Baseline, ...]:
    """The same settings with fewer rounds or starts, if the default would take minutes."""
    kind = type(grid[0])
    changes: dict[type[Baseline], dict[str, Any]] = {
        baselines.Mocha: {"rounds": 40 if wide else 100},
        baselines.Comet: {"rounds": 5 if wide else 15}}
    if wide:
        changes |= {IFCA: {"restarts": 2, "rounds": 30}, baselines.PerFedAvg: {"rounds": 50},
                    baselines.HypCluster: {"restarts": 1, "rounds": 10}}
    # Wide models in many clusters take most time and have few samples: only every other number of
    # clusters.
    grid = grid[:6:2] if wide and kind in (IFCA, baselines.HypCluster) else grid
    return tuple(replace(settings, **changes.get(kind, {})) for settings in grid)


def run_method(federation: Benchmark, rows: Parts, name: str, method: Contender,
               seed: int) -> Result:
    """Choose settings on validation rows, fit to training and validation rows, score on test rows.
    """
    start, loss, clusters = time.perf_counter(), federation.loss, federation.clusters
    note, concern, rounds, floats = "", "", np.nan, np.nan
    settings: Baseline | Central
    # Users with one class among their training rows.
    with warnings.catch_warnings(action="ignore", category=CoterieWarning):
        if isinstance(method, Central):
            settings = method
            central = method.fit(federation.as_classes(rows.everything), federation.task,
                                 n_classes=federation.n_classes, seed=seed)
            decisions, models = central.decide(rows.test), central.models
            note, concern = central.note, central.concern
        else:
            chosen = method[0] if len(method) == 1 else choose(
                method, rows.train, rows.validation, loss, seed, clusters)[1]
            settings, fitted = chosen, chosen.fit(rows.everything, loss, seed=seed,
                                                  clusters=clusters)
            models, rounds = fitted.models, fitted.rounds
            floats = fitted.floats_up + fitted.floats_down
            decisions = loss.decision(rows.test.features, models[rows.test.owner])
    n_models = int(labels_of(models).max()) + 1 if models.shape[1] else len(models)
    return Result(federation=federation.name, metric=federation.metric, method=name,
                  seed=seed, scores=score(federation, decisions, rows.test, rows.unit),
                  settings=settings, n_models=n_models, rounds=rounds, floats=floats,
                  seconds=time.perf_counter() - start, models=models, decisions=decisions,
                  test=rows.test, errors=row_errors(federation, decisions, rows.test),
                  note=note, concern=concern)


def row_errors(federation: Benchmark, decisions: Array, test: Users) -> Array:
    """(n_rows,) the squared error of a number, or 1 for a wrong class and 0 for the right one."""
    y = test.targets
    assert y is not None
    if federation.task == "regression":
        return np.asarray((decisions - y) ** 2)
    classes = decisions.argmax(axis=1) if decisions.ndim > 1 else np.where(decisions >= 0, 1, -1)
    return np.asarray(classes != y, dtype=float)


def score(federation: Benchmark, decisions: Array, test: Users, unit: float = 1.0) -> Array:
    """(n_users,) the metric of every user on its own rows; nan if it has none or, for the AUC, only
    one class.
    """
    y, owner = test.targets, test.owner
    assert y is not None
    if federation.metric == "AUC":
        return np.array([roc_auc(y[rows], decisions[rows]) if len(np.unique(y[rows])) > 1
                         else np.nan for rows in (owner == i for i in range(test.n_users))])
    counts = np.where(test.counts > 0, test.counts, np.nan)
    means = np.bincount(owner, row_errors(federation, decisions, test), test.n_users) / counts
    return np.asarray(1.0 - means if federation.metric == "accuracy" else np.sqrt(means) * unit)


def run(federation: Benchmark, seeds: Iterable[int], *, only: tuple[str, ...] = (),
        progress: Callable[[str, int, str], None] | None = None) -> list[Result]:
    """Run every method on every split.

    Parameters
    ----------
    federation
        The users and their metric.
    seeds
        Seeds of the splits.
    only
        Names of methods; empty: all.
    progress
        Called with the federation, the seed and the method before each run.

    Returns
    -------
    list[Result]
        One result per method and split.

    Raises
    ------
    Interrupted
        On Ctrl-C, with the results of the complete splits.

    Example
    -------
    >>> from coterie.lab.experiments.federations_data import federations
    >>> results = run(federations(None, ("diabetes",))[0], seeds=[0], only=("local", "global"))
    >>> sorted(result.method for result in results)
    ['global', 'local']
    """
    results: list[Result] = []
    with interruptible(lambda: results):
        for seed in seeds:
            rows = prepare(federation, federation.split(seed))
            split_results = []
            for name, method in methods(federation, federation.loss.dim(rows.train)):
                if only and name not in only:
                    continue
                if progress is not None:
                    progress(federation.name, seed, name)
                split_results.append(run_method(federation, rows, name, method, seed))
            # Complete splits only, so that all means are over the same splits.
            results += split_results
    return results


def holm(p: npt.ArrayLike) -> Array:
    """Holm's correction (1979) of n p-values: p_(k) becomes max_{j <= k} min(1, (n - j + 1) p_(j)).
    """
    values = np.asarray(p, dtype=float)
    order = np.argsort(values, kind="stable")
    steps = np.minimum(values[order] * np.arange(len(values), 0, -1), 1.0)
    out = np.empty_like(values)
    out[order] = np.maximum.accumulate(steps)
    return out


def signed_rank(differences: Array) -> float:
    """The two-sided p-value of Wilcoxon's signed-rank test; 1 if all differences are zero."""
    from scipy.stats import wilcoxon

    nonzero = differences[np.isfinite(differences) & (np.abs(differences) > 1e-12)]
    return float(wilcoxon(nonzero).pvalue) if nonzero.size else 1.0


def summarise(results: Iterable[Result]) -> list[Row]:
    """One row per method and federation, best first."""
    by_federation: dict[tuple[str, str], dict[str, list[Result]]] = {}
    for result in results:
        by = by_federation.setdefault((result.federation, result.metric), {})
        by.setdefault(result.method, []).append(result)
    return [row for names, by in by_federation.items() for row in _summarise_one(*names, by)]


def _summarise_one(federation: str, metric: str, by: dict[str, list[Result]]) -> list[Row]:
    """One row per method of one federation, best first."""
    sign = -1.0 if metric == "RMSE" else 1.0
    means = {m: _mean_scores(runs) for m, runs in by.items()}
    ours = means.get(OURS.name, next(iter(means.values())))
    others = [m for m in by if m != OURS.name]
    p = dict(zip(others, holm([signed_rank(means[m] - ours) for m in others]), strict=True))
    rows = []
    for m in sorted(by, key=lambda m: -sign * float(np.nanmean(means[m]))):
        finite = np.isfinite(means[m])
        scores, gain = means[m][finite], sign * float(np.nanmean(means[m] - ours))
        verdict = "better" if gain > 0 else "worse"
        verdict = "" if m not in p else "tied" if p[m] > LEVEL else verdict
        better = (float((sign * (means[m] - means["local"])[finite] > 1e-12).mean())
                  if "local" in means else np.nan)
        counts = (float(np.mean([getattr(r, count) for r in by[m]]))
                  for count in ("n_models", "rounds", "floats", "seconds"))
        rows.append(Row(federation, m, metric, float(scores.mean()), float(scores.std()),
                        float(np.quantile(sign * scores, 0.1) * sign), better,
                        _harmed(by[m], by.get("local", [])), verdict, float(p.get(m, np.nan)),
                        *counts))
    return rows


def _mean_scores(runs: list[Result]) -> Array:
    """(n_users,) means over splits."""
    # A user may be without a score in every split.
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        return np.asarray(np.nanmean([r.scores for r in runs], axis=0))


def _harmed(runs: list[Result], alone: list[Result]) -> float:
    """The share of users who are worse off than alone by more than chance, as a mean over splits;
    nan without any.
    """
    pairs = [(r, a) for r in runs for a in alone if a.seed == r.seed]
    if not pairs:
        return float("nan")
    return float(np.mean([worse_than_alone(r.errors, a.errors, r.test)[r.test.counts > 0].mean()
                          for r, a in pairs]))


def cells(row: Row) -> tuple[str, ...]:
    """A row as texts, in the order of HEADINGS."""
    score = ".3f" if row.metric == "RMSE" else ".4f"
    forms = ("", "", "", score, score, score, ".0%", ".1%", "", ".2g", ".4g", ".0f", ".2g", ".1f")
    return tuple("" if x != x else format(x, form) for x, form in zip(row, forms, strict=True))


def origin(seeds: Iterable[int], command: str) -> str:
    """The origin of a table: seeds, versions and the command."""
    versions = (f"coterie {coterie.__version__}, NumPy {np.__version__}, SciPy {version('scipy')}, "
                f"scikit-learn {version('scikit-learn')}, Python {platform.python_version()}")
    return (f"splits {', '.join(map(str, seeds))}; at most {BUDGET} settings per method; "
            f"{versions}; {command}")


def markdown(rows: Iterable[Row], note: str = "") -> str:
    """The rows as Markdown, one table per federation."""
    all_rows, parts = list(rows), []
    for name in dict.fromkeys(r.federation for r in all_rows):
        lines = [f"## {name}", "", f"| {' | '.join(HEADINGS[1:])} |",
                 "|" + "---|" * (len(HEADINGS) - 1)]
        lines += [f"| {' | '.join(cells(r)[1:])} |" for r in all_rows if r.federation == name]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + (f"\n\n{note}\n" if note else "\n")


def write(results: list[Result], out: Path, note: str) -> list[Row]:
    """Write table.csv, table.md, runs.csv, users.csv and one figure per federation into the folder
    `out`.
    """
    out.mkdir(parents=True, exist_ok=True)
    rows = summarise(results)
    exact = [(*r[:3], *(f"{x:.10g}" if isinstance(x, float) else x for x in r[3:])) for r in rows]
    runs = ((r.federation, r.seed, r.method, f"{np.nanmean(r.scores):.10g}", r.n_models, r.rounds,
             r.floats, f"{r.seconds:.2f}", repr(r.settings), r.note, r.concern) for r in results)
    users = ((r.federation, r.seed, r.method, i, f"{score:.10g}") for r in results
             for i, score in enumerate(r.scores))
    for name, headings, cells_of in (
            ("table", HEADINGS, exact),
            ("runs", ("set", "split", "method", "mean", "models", "rounds", "numbers sent",
                      "seconds", "settings", "note", "concern"), runs),
            ("users", ("set", "split", "method", "user", "score"), users)):
        (out / f"{name}.csv").write_bytes(f"# {note}\n".encode() + table(headings, cells_of))
    (out / "table.md").write_text(markdown(rows, note), encoding="utf-8")
    for name in dict.fromkeys(r.federation for r in results):
        figure = draw([r for r in results if r.federation == name])
        figure.savefig(out / f"{name.replace(', ', '-').replace(' ', '-')}.png")
    return rows


def draw(results: list[Result]) -> Any:
    """Draw the scores of the users for each method: quartiles as box, deciles as whiskers, best
    mean on top.
    """
    rows = summarise(results)[::-1]
    figure, axes = new_figure(7.2, 0.32 * len(rows) + 1.4)
    means = [_mean_scores([r for r in results if r.method == row.method]) for row in rows]
    diamond = {"marker": "D", "markersize": 4, "markerfacecolor": "0.1", "markeredgecolor": "0.1"}
    drawn = axes.boxplot([scores[np.isfinite(scores)] for scores in means], whis=(10, 90),
                         orientation="horizontal", showfliers=False, showmeans=True, widths=0.6,
                         patch_artist=True, medianprops={"color": "0.2"}, meanprops=diamond)
    for box, row in zip(drawn["boxes"], rows, strict=True):
        box.set_facecolor("C0" if row.method.startswith("coterie") else "0.85")
    axes.set_yticks(range(1, len(rows) + 1), [row.method for row in rows], fontsize=8)
    splits = len({r.seed for r in results})
    axes.set_xlabel(f"{rows[0].metric} per user, mean over {splits} split{'s' * (splits > 1)}")
    axes.set_title(f"{rows[0].federation}: {len(results[0].scores)} users; diamonds are means",
                   fontsize=10)
    axes.grid(axis="x", linewidth=0.4)
    return figure
