"""`fit_table`: from a table to a fit and, where wanted, its run folder."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import asdict, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, cast

import numpy as np

from coterie.base.errors import InvalidInput
from coterie.base.machine import begin_beside, one_blas_thread
from coterie.base.storage import locked, pack, unpack, write_atomically
from coterie.data.encoding import Recipe
from coterie.data.files import fingerprint, is_input
from coterie.data.frames import check_readable
from coterie.data.users import Users
from coterie.fitting import Fit, fit
from coterie.fitting.prepare import read_users
from coterie.fitting.result import TableSource
from coterie.fitting.settings import FitProgress, Settings
from coterie.output.runs.save import check_free, document_of, write_run
from coterie.solvers import get_ready

_SMALL = 2**20  # bytes of a file below which its users are few
_LARGE = 2**29  # bytes of a file above which it is read once, by this process


def fit_table(data: Any, *, user: str = "", target: str = "", features: str | Iterable[str] = (),
              drop: str | Iterable[str] = (), separator: str = "", task: str = "auto",
              settings: Settings | None = None, folder: str | PathLike[str] | None = None,
              resume: bool = False, overwrite: bool = False,
              progress: FitProgress | None = None) -> Fit:
    """Find groups and models from a table: what `coterie fit` does.

    Parameters
    ----------
    data : a file (CSV, Parquet, Excel or JSON lines, also compressed; "-" is standard input), or a
        polars frame, with one row per sample.
    user : the column with the owner of each row; if omitted, every row is a separate user.
    target : the column to predict; if omitted, users are clustered.
    features : columns used as features; all others by default.
    drop : columns to ignore.
    separator : of a CSV file; detected if omitted.
    task : "classification", "regression", "counts", "clustering", or "auto", which infers it from
        the target.
    settings : of the fit; its `task` and `n_classes` are replaced by those of the table.
    folder : where the run is saved, and finished parts are kept meanwhile; None to save nothing.
    resume : whether to continue an interrupted run in the folder.
    overwrite : whether a finished run in the folder may be replaced.
    progress : called with what is being done, how many steps are done, of how many, and a text.

    Returns
    -------
    The fit, with `predict`, `certify`, `report` and `save`.

    Raises
    ------
    InvalidInput : a table, columns, settings or a folder that cannot be used.
    Interrupted : on Ctrl-C; what is finished is kept in the folder.
    MissingExtra : polars is not installed.

    Example
    -------
    >>> import polars, coterie as ct
    >>> frame = polars.DataFrame({"who": list("abcd") * 20, "x": [float(i % 7) for i in range(80)]})
    >>> frame = frame.with_columns(y=polars.col("x") * polars.Series([1.0, 1.0, -1.0, -1.0] * 20))
    >>> ct.fit_table(frame, user="who", target="y").n_clusters
    2
    """
    began = time.perf_counter()
    if target and not user:
        raise InvalidInput("the column with the owner of each row is not given",
                           remedy="Give --user COLUMN")
    run = None if folder is None else _free_folder(Path(folder), data, resume=resume,
                                                   overwrite=overwrite)
    with contextlib.nullcontext() if run is None else locked(run):
        if run is not None:  # another run may have ended meanwhile
            _free_folder(run, data, resume=resume, overwrite=overwrite)
        features, drop = ([names] if isinstance(names, str) else list(names)
                          for names in (features, drop))
        settings = settings or Settings()
        recipe, users = _read(data, partial(
            read_users, data, user=user or None, target=target or None, features=features or None,
            drop=drop, task=task, separator=separator or None))
        settings = replace(settings, task=recipe.task, n_classes=len(recipe.classes))
        table = TableSource(user=user, target=target, features=",".join(features),
                            drop=",".join(drop), separator=separator, **_file_facts(data))
        if run is None:
            return replace(fit(users, settings, progress=progress), recipe=recipe, table=table)
        return _in_folder(run, users, settings, progress, resume=resume, recipe=recipe,
                          table=table, began=began)


def _in_folder(run: Path, users: Users, settings: Settings, progress: FitProgress | None, *,
               resume: bool, recipe: Recipe, table: TableSource, began: float) -> Fit:
    """The fit, saved; finished parts are kept in the folder meanwhile."""
    parts = StoredParts(run, {**asdict(table), **asdict(settings)}, resume=resume)
    with _clean_up_after_refusal(parts, run):
        fitted = replace(fit(users, settings, progress=progress, store=parts), recipe=recipe,
                         table=table)
    with one_blas_thread():
        document = document_of(fitted)
    fitted = fitted._with_seconds(time.perf_counter() - began)
    write_run(fitted, run, document=document)
    parts.remove()
    return fitted


def _read(data: Any, read: Callable[[], tuple[Recipe, Users]]) -> tuple[Recipe, Users]:
    """The table. A file is read by a copy of this process, while this one loads the compiled code
    of the solvers.
    """
    # A library that has threads already cannot be used in a copy of the process.
    possible = (_is_file(data) and not is_input(data) and "polars" not in sys.modules
                and Path(data).is_file() and Path(data).stat().st_size <= _LARGE)
    beside = begin_beside(lambda parts: parts.update({"table": read()})) if possible else None
    if beside is None:
        return read()
    try:
        check_readable(data)  # imports what writes the results
        _load_compiled_code(small=Path(data).stat().st_size <= _SMALL)
        if not beside.wait_for("table"):  # for the error that it met
            return read()
        beside.warn_again("table")
        return cast(tuple[Recipe, Users], beside.parts["table"])
    finally:
        beside.end()


def _load_compiled_code(*, small: bool) -> None:
    """Import and load what a fit needs, once for this process and its copies."""
    import scipy.cluster.hierarchy  # noqa: F401, for the search

    from coterie.base.matrices import invert

    invert(np.ones((1, 1, 1)))  # starts Numba
    if small:
        get_ready()


def _is_file(data: Any) -> bool:
    return isinstance(data, (str, PathLike))


def _file_facts(data: Any) -> dict[str, str]:
    return {"data": str(data), "fingerprint": fingerprint(data)} if _is_file(data) else {}


def _free_folder(run: Path, data: Any, *, resume: bool, overwrite: bool) -> Path:
    if _is_file(data) and not is_input(data) and Path(data).resolve().parent == run.resolve():
        raise InvalidInput(f"{data} is in the folder for the results",
                           remedy="Name another folder with --out")
    return check_free(run, overwrite=overwrite, resume=resume)


@contextlib.contextmanager
def _clean_up_after_refusal(parts: StoredParts, run: Path) -> Iterator[None]:
    """Where the data cannot be used there is nothing to continue, and the folder is left as it was.
    """
    try:
        yield
    except InvalidInput:
        parts.remove()
        with contextlib.suppress(OSError):
            run.rmdir()
        raise


class StoredParts(MutableMapping[str, Any]):
    """Finished parts of a run as files in the folder `progress`, each written atomically.

    Parameters
    ----------
    run : the run folder.
    asked : what the run was asked for; a run is continued only with the same.
    resume : whether to continue the parts that are there; otherwise they are removed.

    Raises
    ------
    InvalidInput : there is nothing to continue, or it was asked for something else.
    """

    def __init__(self, run: Path, asked: Mapping[str, Any], *, resume: bool) -> None:
        self.folder = run / "progress"
        text = json.dumps(asked, sort_keys=True, default=str)
        if not resume:
            self.remove()
        elif "asked" not in self:
            raise InvalidInput(f"there is no interrupted run to continue in {run}",
                               remedy="Leave out --resume")
        elif self["asked"] != text:
            raise InvalidInput(f"{run} holds a run of other data or settings",
                               remedy="Give the same ones, or start again without --resume")
        self["asked"] = text

    def remove(self) -> None:
        """Delete all parts."""
        # First: what an interrupt leaves of the others is not continued.
        self._file("asked").unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _file(self, key: str) -> Path:
        return self.folder / f"{key.replace(': ', '-').replace(' ', '-')}.coterie"

    def __getitem__(self, key: str) -> Any:
        if not self._file(key).exists():
            raise KeyError(key)
        return unpack(self._file(key).read_bytes(), str(self._file(key)))["value"]

    def __setitem__(self, key: str, value: Any) -> None:
        write_atomically(self._file(key), pack({"value": value}))

    def __delitem__(self, key: str) -> None:
        self._file(key).unlink()

    def __iter__(self) -> Iterator[str]:
        return (file.stem for file in self.folder.glob("*.coterie"))

    def __len__(self) -> int:
        return sum(1 for _ in self)
