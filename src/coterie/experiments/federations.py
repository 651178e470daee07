"""All methods on real federations: the same splits, the same budget of settings, judged on rows nobody has seen.

For every split, method by method:
1. of at most BUDGET settings, the one whose fit to the training rows has the least mean loss on the validation rows;
2. with it, a fit to both;
3. every user's model on the user's test rows, which nothing above has looked at.

Methods are compared user by user (means over splits), by Wilcoxon's signed-rank test with Holm's correction.
"""

from __future__ import annotations

import csv
import platform
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import coterie
from coterie._typing import Array
from coterie.baselines import BASELINES, BUDGET, CFL, IFCA, Baseline, Comet, HypCluster, Mocha, PerFedAvg, tune
from coterie.data.users import Users
from coterie.errors import CoterieWarning, interruptible
from coterie.experiments.federations_data import Benchmark, Parts
from coterie.experiments.federations_ours import OURS, Coterie
from coterie.losses import Loss
from coterie.plots.style import new_figure
from coterie.solution import labels_of

LEVEL = 0.05
WIDE = 100  # coordinates of a model above which methods with many rounds or starts get fewer
HEADINGS = ("set", "method", "metric", "mean", "spread", "worst decile", "better than alone", "against coterie",
            "p (Holm)", "clusters", "models", "rounds", "numbers sent", "seconds")


class Contender(NamedTuple):
    """A row of the table: a kind to be tuned, or fixed settings."""

    name: str
    kind: type[Baseline]
    settings: Baseline | None = None
    told: bool = False  # whether it is told what others must find


@dataclass(frozen=True, kw_only=True, eq=False)
class Result:
    """One method on one split."""

    federation: str
    metric: str
    method: str
    seed: int
    scores: Array = field(repr=False)  # (n_users,) nan where a user's test rows cannot tell
    settings: Baseline
    n_clusters: int
    n_models: int  # distinct ones
    rounds: int
    floats: int  # sent by all users and to them, in the last fit
    seconds: float
    models: Array = field(repr=False)


class Row(NamedTuple):
    """One method on one federation, over all splits."""

    federation: str
    method: str
    metric: str
    mean: float  # over users, of their means over splits
    spread: float  # standard deviation over users
    worst: float  # the decile of users who fare worst begins here
    better: float  # share of users who fare better than alone
    verdict: str  # "better" or "worse" than coterie, or "tied"
    p: float
    clusters: float
    models: float
    rounds: float
    floats: float
    seconds: float


class Ready(NamedTuple):
    """A split as models see it."""

    train: Users
    validation: Users
    everything: Users
    test: Users
    unit: float


def ready(federation: Benchmark, parts: Parts) -> Ready:
    """Features made from the training rows for choosing, from training and validation rows for the final fit."""
    choosing, final = federation.features(parts.train), federation.features(parts.everything)
    return Ready(choosing.transform(parts.train), choosing.transform(parts.validation),
                 final.transform(parts.everything), final.transform(parts.test), final.unit)


def methods(federation: Benchmark, dim: int = 0) -> list[Contender]:
    """Ours and all comparators; those that are told groups or their number only where they are known."""
    wide = dim > WIDE
    found = [Contender(kind.name, kind) for kind in OURS]
    for name, kind in BASELINES.items():
        if kind.needs_clusters and federation.clusters is None:
            continue
        found.append(Contender(name, _shorter(kind, wide), told=kind.needs_clusters))
    if federation.clusters is not None:
        k = int(federation.clusters.max()) + 1
        found += [Contender(f"ifca told {what}", IFCA, IFCA(n_clusters=count, restarts=2 if wide else 10), told=True)
                  for what, count in (("K", k), ("K + 1", k + 1), ("2 K", 2 * k)) if count <= federation.users.n_users]
    found.append(Contender("cfl published", CFL, CFL()))
    return found


def _shorter(kind: type[Baseline], wide: bool) -> type[Baseline]:
    """The same method with fewer rounds or starts, where more would take minutes."""
    changes: dict[type[Baseline], dict[str, Any]] = {Mocha: {"rounds": 40 if wide else 100},
                                                      Comet: {"rounds": 5 if wide else 15}}
    if wide:
        changes |= {IFCA: {"restarts": 2, "rounds": 30}, HypCluster: {"restarts": 1, "rounds": 10},
                    PerFedAvg: {"rounds": 50}}
    if kind not in changes:
        return kind

    class Shorter(kind):  # type: ignore[misc, valid-type]
        @classmethod
        def grid(cls, users: Users, loss: Loss) -> tuple[Baseline, ...]:
            grid: tuple[Baseline, ...] = kind.grid(users, loss)
            # Wide models in many clusters take longest and have fewest samples: every other number of clusters.
            many = wide and kind in (IFCA, HypCluster)
            return tuple(replace(settings, **changes[kind]) for settings in (grid[:6:2] if many else grid))

    return Shorter


def run_method(federation: Benchmark, rows: Ready, method: Contender, seed: int) -> Result:
    """Choose settings on validation rows, fit to all training rows, judge on test rows."""
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CoterieWarning)  # users with one class among their training rows
        settings = method.settings
        if settings is None:
            settings = tune(method.kind, rows.train, rows.validation, federation.loss, seed,
                            clusters=federation.clusters)[1]
        fitted = settings.fit(rows.everything, federation.loss, seed=seed, clusters=federation.clusters)
    scores = judge(federation, fitted.models, rows.test, rows.unit)
    return Result(federation=federation.name, metric=federation.metric, method=method.name, seed=seed, scores=scores,
                  settings=settings, n_clusters=fitted.n_clusters, n_models=int(labels_of(fitted.models).max()) + 1,
                  rounds=fitted.rounds, floats=fitted.floats_up + fitted.floats_down, models=fitted.models,
                  seconds=time.perf_counter() - began)


def judge(federation: Benchmark, models: Array, test: Users, unit: float = 1.0) -> Array:
    """(n_users,) the metric of every user on its own rows; nan where it has none, or one class only for the AUC."""
    from sklearn.metrics import roc_auc_score

    y, owner, loss = test.targets, test.owner, federation.loss
    assert y is not None
    counts = np.where(test.counts > 0, test.counts, np.nan)
    if federation.metric == "AUC":
        margins = loss.decision(test.features, models[owner])
        scores = np.full(test.n_users, np.nan)
        for i in range(test.n_users):
            rows = owner == i
            if len(np.unique(y[rows])) > 1:
                scores[i] = roc_auc_score(y[rows], margins[rows])
        return scores
    told = loss.predict(test.features, models[owner])
    if federation.metric == "accuracy":
        return np.asarray(np.bincount(owner, told == y, test.n_users) / counts)
    return np.asarray(np.sqrt(np.bincount(owner, (told - y) ** 2, test.n_users) / counts) * unit)


def run(federation: Benchmark, seeds: Iterable[int], *, only: tuple[str, ...] = (),
        progress: Callable[[str, int, str], None] | None = None) -> list[Result]:
    """Every method on every split; `only` names some. Ctrl-C raises Interrupted with the splits that are complete."""
    results: list[Result] = []
    with interruptible(lambda: results):
        for seed in seeds:
            rows = ready(federation, federation.split(seed))
            this = []
            for method in methods(federation, federation.loss.dim(rows.train)):
                if only and method.name not in only:
                    continue
                if progress is not None:
                    progress(federation.name, seed, method.name)
                this.append(run_method(federation, rows, method, seed))
            results += this  # complete splits only, so that means are over the same splits
    return results


def holm(p: npt.ArrayLike) -> Array:
    """p-values corrected for their number (Holm 1979): p_(k) becomes max_{j <= k} min(1, (n - j + 1) p_(j))."""
    values = np.asarray(p, dtype=float)
    order = np.argsort(values, kind="stable")
    steps = np.minimum(values[order] * np.arange(len(values), 0, -1), 1.0)
    out = np.empty_like(values)
    out[order] = np.maximum.accumulate(steps)
    return out


def signed_rank(differences: Array) -> float:
    """The two-sided p-value of Wilcoxon's signed-rank test; 1 where there is nothing to rank."""
    from scipy.stats import wilcoxon

    real = differences[np.isfinite(differences) & (np.abs(differences) > 1e-12)]
    return float(wilcoxon(real).pvalue) if real.size else 1.0


def summarise(results: Iterable[Result]) -> list[Row]:
    """One row for each method and federation, best first."""
    found = list(results)
    rows: list[Row] = []
    for name in dict.fromkeys(r.federation for r in found):
        here = [r for r in found if r.federation == name]
        metric = here[0].metric
        sign = -1.0 if metric == "RMSE" else 1.0
        by = {m: [r for r in here if r.method == m] for m in dict.fromkeys(r.method for r in here)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # a user who can be judged in no split
            means = {m: np.nanmean([r.scores for r in runs], axis=0) for m, runs in by.items()}
        ours = means.get(Coterie.name, next(iter(means.values())))
        rivals = [m for m in by if m != Coterie.name]
        p = dict(zip(rivals, holm([signed_rank(means[m] - ours) for m in rivals]), strict=True))
        for m in sorted(by, key=lambda m: -sign * float(np.nanmean(means[m]))):
            seen = means[m][np.isfinite(means[m])]
            gain = sign * float(np.nanmean(means[m] - ours))
            verdict = "" if m not in p else "tied" if p[m] > LEVEL else "better" if gain > 0 else "worse"
            alone = np.nan if "local" not in means else float(
                (sign * (means[m] - means["local"])[np.isfinite(means[m])] > 1e-12).mean())
            rows.append(Row(name, m, metric, float(seen.mean()), float(seen.std()),
                            float(np.quantile(sign * seen, 0.1) * sign), alone, verdict, float(p.get(m, np.nan)),
                            *(float(np.mean([getattr(r, what) for r in by[m]])) for what in (
                                "n_clusters", "n_models", "rounds", "floats", "seconds"))))
    return rows


def cells(row: Row) -> tuple[str, ...]:
    """A row as text, under HEADINGS."""
    digits = 4 if row.metric != "RMSE" else 3
    return (row.federation, row.method, row.metric, f"{row.mean:.{digits}f}", f"{row.spread:.{digits}f}",
            f"{row.worst:.{digits}f}", "" if np.isnan(row.better) else f"{row.better:.0%}", row.verdict,
            "" if np.isnan(row.p) else f"{row.p:.2g}", f"{row.clusters:.3g}", f"{row.models:.4g}", f"{row.rounds:.0f}",
            f"{row.floats:.2g}", f"{row.seconds:.1f}")


def origin(seeds: Iterable[int], command: str) -> str:
    """Where a table comes from: seeds, versions and the command."""
    import scipy
    import sklearn

    versions = f"coterie {coterie.__version__}, NumPy {np.__version__}, SciPy {scipy.__version__}, " \
               f"scikit-learn {sklearn.__version__}, Python {platform.python_version()}"
    return f"splits {', '.join(map(str, seeds))}; at most {BUDGET} settings a method; {versions}; {command}"


def markdown(rows: Iterable[Row], note: str = "") -> str:
    """The table as Markdown, one for each federation."""
    found, parts = list(rows), []
    for name in dict.fromkeys(r.federation for r in found):
        lines = [f"## {name}", "", f"| {' | '.join(HEADINGS[1:])} |", "|" + "---|" * (len(HEADINGS) - 1)]
        lines += [f"| {' | '.join(cells(r)[1:])} |" for r in found if r.federation == name]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + (f"\n\n{note}\n" if note else "\n")


def write(results: list[Result], out: Path, note: str) -> list[Row]:
    """table.csv, table.md, runs.csv, users.csv and a picture for each federation, in the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    rows = summarise(results)
    exact = [(*r[:3], *(f"{x:.10g}" if isinstance(x, float) else x for x in r[3:])) for r in rows]
    _write_csv(out / "table.csv", HEADINGS, exact, note)
    _write_csv(out / "runs.csv", ("set", "split", "method", "mean", "clusters", "models", "rounds", "numbers sent",
                                  "seconds", "settings"),
               ((r.federation, r.seed, r.method, f"{np.nanmean(r.scores):.10g}", r.n_clusters, r.n_models, r.rounds,
                 r.floats, f"{r.seconds:.2f}", repr(r.settings)) for r in results), note)
    _write_csv(out / "users.csv", ("set", "split", "method", "user", "score"),
               ((r.federation, r.seed, r.method, i, f"{score:.10g}") for r in results
                for i, score in enumerate(r.scores)), note)
    (out / "table.md").write_text(markdown(rows, note), encoding="utf-8")
    for name in dict.fromkeys(r.federation for r in results):
        draw([r for r in results if r.federation == name]).savefig(out / f"{name.replace(', ', '-').replace(' ', '-')}"
                                                                         ".png")
    return rows


def _write_csv(path: Path, headings: Iterable[str], rows: Iterable[Iterable[Any]], note: str) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        file.write(f"# {note}\n")
        table = csv.writer(file)
        table.writerow(headings)
        table.writerows(rows)


def draw(results: list[Result]) -> Any:
    """How users fare under each method: a box from quartile to quartile, whiskers to the tenths, best mean on top."""
    rows = summarise(results)[::-1]
    figure, axes = new_figure(7.2, 0.32 * len(rows) + 1.4)
    by = {row.method: np.nanmean([r.scores for r in results if r.method == row.method], axis=0) for row in rows}
    boxes = [scores[np.isfinite(scores)] for scores in by.values()]
    drawn = axes.boxplot(boxes, orientation="horizontal", whis=(10, 90), showfliers=False, showmeans=True, widths=0.6,
                         patch_artist=True, medianprops={"color": "0.2"},
                         meanprops={"marker": "D", "markersize": 4, "markerfacecolor": "0.1", "markeredgecolor": "0.1"})
    for box, row in zip(drawn["boxes"], rows, strict=True):
        box.set_facecolor("C0" if row.method.startswith("coterie") else "0.85")
    axes.set_yticks(range(1, len(rows) + 1), [row.method for row in rows], fontsize=8)
    splits = len({r.seed for r in results})
    axes.set_xlabel(f"{rows[0].metric} of a user, mean over {splits} split{'s' * (splits > 1)}")
    axes.set_title(f"{rows[0].federation}: {len(results[0].scores)} users; diamonds are means", fontsize=10)
    axes.grid(axis="x", linewidth=0.4)
    return figure
