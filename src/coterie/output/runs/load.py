"""`load_run`: a run folder as an object that predicts, certifies and reports."""

from __future__ import annotations

import contextlib
import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from coterie.base.errors import InvalidInput, located
from coterie.base.labels import first_labels, labels_of, many
from coterie.base.storage import plain_cell, unpack
from coterie.base.types import Array, Ints
from coterie.data.encoding import Recipe
from coterie.data.files import fingerprint, is_input, read_table, row_place
from coterie.data.frames import users_frame
from coterie.data.moments import Condensed
from coterie.data.users import Users
from coterie.fitting.average import Average
from coterie.fitting.inference import CentreSummary, summarise_centres
from coterie.fitting.kinds import Count, handed_out, kind_of, stated_loss
from coterie.fitting.predictions import Data, Predictor, PredictsRows
from coterie.fitting.prepare import without_far_targets
from coterie.fitting.result import RunCertificate
from coterie.fitting.settings import Settings
from coterie.fitting.units import Units, learn_units
from coterie.losses import Loss, Squared
from coterie.output import report
from coterie.output.runs.save import AVERAGE, RELEASED, model_columns
from coterie.problem.certificates import certify
from coterie.problem.graph import Graph
from coterie.problem.problem import Problem
from coterie.problem.solution import Solution, Status

AGAIN = "Run it again"
#: What scores in run.json were called by version 0.2, and are called now.
_NAMES_NOW = {"here": "fit", "alone": "own", "together": "pooled"}
T = TypeVar("T")
_ROUNDING = 1e-12  # loss over its size below which it is rounding
# Difference of models that are the same, in the solver's units and relative to their size.
_SAME = 1e-6


@dataclass(frozen=True, kw_only=True, eq=False)
class Run(PredictsRows):
    """A run folder: what `coterie fit` or `coterie federate` or `save_run` wrote.

    The run of a fit can predict and certify as its `Fit` could; other runs have everything else.

    Parameters
    ----------
    folder : where it is.
    info : the content of run.json.
    lam : the penalty strength.
    names : the users' names.
    solved : (n_users, dim) the models of the convex problem, equal within groups; in the solver's
        units.
    models : (n_users, dim) the models that predict, in the solver's units.
    duals : of the edges, or None.
    graph : who is compared with whom, and the weights.
    settings : of the fit; None where the run is no fit.
    units : how the numbers given became the numbers solved for; None where the run does not say.
    recipe : how the table became numbers; None where the run was not made from a table.
    together : (dim,) the pooled model, for unknown users; None where there is none.
    unit : how many rows count as one user, where rows count alike in the problem.
    covariance : (dim, dim) of personal models around their centres; None where models are not
        personal.
    scale : (n_users,) of the inverse of the covariance, as for `Personal`; None for one over the
        number of rows.
    centres : (n_clusters, dim) what the users of each group share, in the solver's units; None
        where unknown.
    noise : the variance of a typical user's noise, for personal models of newcomers.
    average : of several kinds of models, which predicts; None where the run has none.

    Example
    -------
    See `load_run`.
    """

    folder: Path
    info: dict[str, Any]
    lam: float
    names: tuple[Any, ...]
    solved: Array
    models: Array
    duals: Array | None
    graph: Graph
    settings: Settings | None = None
    units: Units | None = None
    recipe: Recipe | None = None
    together: Array | None = None
    unit: float | Array | None = None
    covariance: Array | None = None
    scale: Array | None = None
    centres: Array | None = None
    noise: float = 1.0
    average: Average | None = None

    def __repr__(self) -> str:
        gap = f"claims a gap of {self.gap:.1e}" if np.isfinite(self.gap) else "claims no bound"
        found = f"{many(self.n_clusters, 'group')} of {len(self.names)} users, lam {self.lam:.4g}"
        return f"Run({str(self.folder)!r}, {self.kind + ': ' if self.kind else ''}{found}, {gap})"

    @cached_property
    def labels(self) -> Ints:
        """(n_users,) the group of each user, by the solved models."""
        return labels_of(self.solved)

    @property
    def n_clusters(self) -> int:
        """The number of groups, by the models."""
        return int(self.labels.max()) + 1

    @property
    def gap(self) -> float:
        """The relative gap that the run claims; inf where it has no bound. `certify` computes it
        again.
        """
        return np.inf if self.info["gap"] is None else float(self.info["gap"])

    @property
    def status(self) -> Status:
        """How the run ended."""
        return Status[self.info["status"]]

    @property
    def kind(self) -> str:
        """What users get: "one model", "groups", "personal", "personal in groups" or "alone"; ""
        where unknown.
        """
        return str(self.info.get("kind", ""))

    @property
    def why(self) -> str:
        """The reason for the models and the chosen lam."""
        return str(self.info.get("why", ""))

    @property
    def scores(self) -> dict[str, Any] | None:
        """Means over users of the scores on held-out rows; None where none were held out."""
        scores: dict[str, Any] | None = self.info.get("scores")
        return scores

    @property
    def warnings(self) -> tuple[str, ...]:
        """What speaks against the models of a fit; see `Fit.warnings`."""
        return tuple(map(str, self.info.get("warnings", ())))

    @property
    def coefficients(self) -> Array:
        """(n_users, n_features + 1, outputs) the models in the units given; see
        `Units.coefficients`.
        """
        return self._require(self.units).coefficients(self.models)

    @property
    def path(self) -> list[dict[str, Any]]:
        """The path, a dictionary for each lam: `lam`, `n_clusters`, `objective`, `bound`, `gap`,
        `status`, scores.

        Raises
        ------
        InvalidInput : the run has no path.
        """
        if not (self.folder / "path.csv").exists():
            raise InvalidInput(f"{self.folder} holds no path",
                               remedy="Give the folder of `coterie fit` or `coterie path`")
        with (self.folder / "path.csv").open(newline="", encoding="utf-8") as file:
            return [{name: _parse_cell(cell) for name, cell in row.items()}
                    for row in csv.DictReader(file)]

    def to_frame(self) -> Any:
        """The groups and the models that predict as a table; see `Fit.to_frame`.

        Returns
        -------
        A frame with a row for each user: `user`, `group`, and the coefficients by feature in the
        units given; of a run that is no fit, the coordinates m0, m1, ... of its models.

        Raises
        ------
        MissingExtra : neither polars nor pandas is installed.

        Example
        -------
        >>> import coterie as ct
        >>> problem = ct.Problem(ct.Users.from_arrays([[0.0], [1.0], [9.0]]), ct.SquaredDistance(),
        ...                      lam=1.0)
        >>> list(ct.load_run(ct.save_run(ct.solve(problem), "three")).to_frame().columns)
        ['user', 'group', 'm0']
        """
        if self.units is not None:
            return super().to_frame()
        return users_frame(self.names, self.labels, self.models,
                           [f"m{k}" for k in range(self.models.shape[1])])

    def _predictor(self) -> Predictor:
        return Predictor(units=self._require(self.units), recipe=self.recipe, names=self.names,
                         models=self.models, labels=self.labels, together=self.together,
                         average=self.average, fingerprint=self.info.get("fingerprint", ""))

    def certify(self, data: Data = None) -> RunCertificate:
        """Certify the run again from its table.

        The problem is built again from the table, the run's settings and its weights, and the
        models that predict from the groups. What the run says about itself, models.csv included, is
        compared with the result, not used.

        Parameters
        ----------
        data : the table, a file or a polars frame, or `Users` in the units given; by default the
            file that the run was made from.

        Returns
        -------
        The certificate: `certified` for the models, `same_claims` for the groups and lam that the
        run claims, `same_data` for the file.

        Raises
        ------
        InvalidInput : the table has other users, or files of the run are damaged.
        """
        settings = self._require(self.settings)
        # The certificate is about what was released, whatever the rows are.
        if "privacy" in self.info:
            return _certify_released(self, settings.tol)
        # 1. The rows of the run's users.
        users = self._rows_of_the_run(data)
        data = self.info["settings"].get("data") if data is None else data
        # 2. The problem, built again.
        units = learn_units(users, settings)
        automatic = settings.lam == settings.weights == "auto"
        if automatic and self.units is not None and not units.loss.quadratic:  # a learned ridge
            units = replace(units, loss=self.units.loss)
        loss = stated_loss(units.loss, self.unit, self.covariance, self.scale)
        problem = Problem(units.inner(users), loss, self.lam, self.graph)
        # 3. What the folder says: models and groups in models.csv, and run.json.
        models, groups = self._read_models_csv(units)
        # Older versions wrote the models of the problem.
        solved = self.solved if "kind" in self.info else models
        # Where nothing was given, centres are the problem's; else groups are fitted again.
        same_models = solved is models or any(
            np.allclose(models, expected, rtol=_SAME, atol=_SAME)
            or _are_as_good(problem, models, expected)
            for expected in self._expected_models(problem, settings.count))
        kind, info = kind_of(loss, self.labels), self.info
        same_claims = (np.array_equal(groups, self.labels) and info["n_clusters"] == self.n_clusters
                       and info["lam"] == self.lam and info.get("kind", kind) == kind)
        same_data = (fingerprint(data) == self.info["fingerprint"]
                     if isinstance(data, (str, PathLike)) else None)
        return RunCertificate.of(problem, solved, settings.tol, same_claims=same_claims,
                                 same_data=same_data, same_models=same_models)

    def summary(self, data: Data = None) -> CentreSummary:
        """Coefficients of the centres with standard errors; see `Fit.summary`.

        Parameters
        ----------
        data : the table, a file or a polars frame, or `Users` in the units given; by default the
            file that the run was made from.

        Returns
        -------
        The summary, which prints as a table.

        Raises
        ------
        InvalidInput : the rows are with their users, the table has other users, or the models have
            no such coefficients.
        """
        units = self._require(self.units)
        users = units.inner(self._rows_of_the_run(data))
        return summarise_centres(units, users, self.labels, self.kind,
                                 average=self.average is not None and self.average.used)

    def _rows_of_the_run(self, data: Data) -> Users:
        """The rows of the run's users, from its table."""
        given, data = data, self.info["settings"].get("data") or None if data is None else data
        if data is None and "n_rounds" in self.info:
            raise InvalidInput("The rows of this federation stayed with its users, who answered "
                               "for the certificate in run.json",
                               remedy="Where all rows are in one table, give this table")
        if data is None or (given is None and is_input(data)):
            raise InvalidInput("The run was not made from a file",
                               remedy="Give the data it was made from")
        users = self._users(data)
        if list(map(str, users.names)) != list(map(str, self.names)):
            table = data if isinstance(data, (str, PathLike)) else "The table"
            raise InvalidInput(f"{table} has other users than the run",
                               remedy="Give the table the run was made from")
        if "kind" in self.info:  # older versions used all rows
            users, _ = without_far_targets(users, self._require(self.settings))
        return users

    def _expected_models(self, problem: Problem, count: Count) -> Iterator[Array]:
        """The models that may predict for users with these groups."""
        yield problem.loss.own_models(problem.samples, self.solved)
        yield handed_out(problem.loss, problem.samples, self.labels, count)

    def solution(self, users: Users, loss: Loss) -> Solution:
        """The run's solution, certified on its users' data.

        Parameters
        ----------
        users : their data in the solver's units; users who are not in the run are left out.
        loss : of the run.

        Returns
        -------
        The solution, without duals.

        Raises
        ------
        InvalidInput : a user of the run is not among them.
        """
        problem = Problem(users.take([users.index(name) for name in self.names]), loss, self.lam,
                          self.graph)
        return Solution(problem=problem, models=self.solved, duals=None, status=self.status,
                        certificate=certify(problem, self.solved, self.duals),
                        solver=str(self.info["solver"]),
                        seconds=float(self.info.get("solve_seconds", self.info["seconds"])))

    def report(self, path: str | PathLike[str] | None = None, *, title: str = "") -> Path:
        """Write the report again.

        Parameters
        ----------
        path : the file; by default report.html in the run folder.
        title : another title.

        Returns
        -------
        The file.

        Raises
        ------
        InvalidInput : the run has no report, or it is damaged.
        """
        file = self.folder / "report.json"
        if not file.exists():
            raise InvalidInput(f"{self.folder} holds no report.json",
                               remedy="Give the folder of a run of `coterie fit`")
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InvalidInput(f"{file} cannot be read: {error}", remedy=AGAIN) from error
        try:
            return report.write({**document, "title": title or document["title"]},
                                self.folder / "report.html" if path is None else path)
        except (KeyError, TypeError, AttributeError) as error:
            raise InvalidInput(f"{file} holds no report: {error}", remedy=AGAIN) from error

    def _require(self, part: T | None) -> T:
        """A part that every fit has."""
        if part is None:
            raise InvalidInput(f"{self.folder} is not a run of `coterie fit`",
                               remedy="Give a folder that it has written")
        return part

    def _users(self, data: Data) -> Users:
        if isinstance(data, Users):
            return data
        if self.recipe is None:
            raise InvalidInput("The run was made from Users, so it cannot read a table",
                               remedy="Give Users")
        if not isinstance(data, (str, PathLike)):
            return self.recipe.encode(data)
        separator = self.info["settings"].get("separator") or None
        frame = read_table(data, separator)
        with located(row_place(data, separator)):
            return self.recipe.encode(frame)

    def _read_models_csv(self, units: Units) -> tuple[Array, Ints]:
        """models.csv in the solver's units, in the order of `names`, and its groups."""
        file, names = self.folder / "models.csv", [str(name) for name in self.names]
        try:
            with file.open(newline="", encoding="utf-8") as lines:
                header, *rows = ([plain_cell(cell) for cell in row] for row in csv.reader(lines))
            numbers = np.array([[float(cell) for cell in row[2:]] for row in rows])
            if not np.isfinite(numbers).all():
                raise ValueError("its models are not finite")
        except (OSError, ValueError) as error:
            raise InvalidInput(f"{file} cannot be read: {error}", remedy=AGAIN) from error
        columns = model_columns(units, self.recipe.classes if self.recipe else ())
        if header[2:] != columns:
            pairs = zip(header[2:], columns, strict=False)
            wrong = next((name for name, known in pairs if name != known), "")
            raise InvalidInput(f"{file} has other columns than the run", where=f"column {wrong!r}",
                               remedy=AGAIN)
        line_of = {row[0]: k for k, row in enumerate(rows)}
        if len(line_of) != len(rows) or sorted(line_of) != sorted(names):
            raise InvalidInput(f"{file} is not about the users of this table, each once",
                               remedy=AGAIN)
        order, n_coefficients = [line_of[name] for name in names], len(units.coefficient_names)
        models = units.restored(numbers[order].reshape(len(names), n_coefficients, -1))
        return models, first_labels(np.unique([rows[k][1] for k in order], return_inverse=True)[1])


def load_run(folder: str | PathLike[str]) -> Run:
    """Read a run folder.

    Parameters
    ----------
    folder : what `coterie fit --out`, `coterie federate --out`, `Fit.save` or `save_run` wrote.

    Returns
    -------
    The run.

    Raises
    ------
    InvalidInput : the folder is no run, or it is incomplete, damaged or changed.

    Example
    -------
    >>> import polars, coterie as ct
    >>> frame = polars.DataFrame({"who": ["ann", "bob"] * 10, "x": [1, 2, 4, 7] * 5,
    ...                           "y": [2.5, 4, 8, 15] * 5})
    >>> fitted = ct.fit_table(frame, user="who", target="y", folder="run")
    >>> run = ct.load_run("run")
    >>> run.predict(frame[:2]).columns
    ['user', 'known', 'cluster', 'prediction']
    >>> run.certify(frame).holds
    True
    """
    folder = Path(folder)
    info, arrays = read(folder)
    try:
        names, solved = tuple(arrays["names"]), np.asarray(arrays["models"])
        given: dict[str, Any] = {n: None if arrays.get(n) is None else np.asarray(arrays[n])
                                 for n in ("covariance", "scale", "centres", "own")}
        given["unit"] = arrays.get("unit")
        own, noise = given.pop("own"), arrays.get("noise")
        if own is not None and own.shape != solved.shape:
            raise ValueError("its models have two shapes")
        graph = Graph.complete(len(names)) if arrays["pairs"] is None else Graph.from_edges(
            len(names), arrays["pairs"], np.asarray(arrays["weights"]))
        given |= _read_parts_of_a_fit(info, solved.shape[1])
        lam, duals = float(arrays["lam"]), arrays["duals"]
        if "average" in info:
            given["average"] = _read_average(folder, len(names))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidInput(f"{folder / 'run.json'} was changed: {error}", remedy=AGAIN) from error
    return Run(folder=folder, info=info, lam=lam, names=names, solved=solved,
               models=solved if own is None else own, duals=duals,
               graph=graph, noise=1.0 if noise is None else float(noise), **given)


def _read_parts_of_a_fit(info: dict[str, Any], dim: int) -> dict[str, Any]:
    """Recipe, units, settings and pooled model as far as run.json has them; raises where they
    contradict each other.
    """
    parts: dict[str, Any] = {}
    if "recipe" in info:
        parts["recipe"] = Recipe.from_json(info["recipe"])
    if "units" in info or "recipe" in info:
        units = parts["units"] = Units.from_state(info["units"])
        sizes = {len(units.mean), len(units.scale), len(units.feature_names)}
        if "recipe" in info:
            sizes.add(len(parts["recipe"].feature_names))
        if len(sizes) > 1:
            raise ValueError("its numbers of features differ")
    if "pooled" in info:
        parts["together"] = np.array(info["pooled"], dtype=float)
        if parts["together"].shape != (dim,):
            raise ValueError("its pooled model has another length")
        parts["settings"] = _read_settings(info["settings"])
        if not np.isfinite(float(info["lam"])) or not isinstance(info["fingerprint"], str):
            raise ValueError("its lam is no number, or its fingerprint no text")
        if any(isinstance(info[name], (str, list, dict)) for name in ("n_clusters", "gap")):
            raise ValueError("its number of groups or its gap is no number")
    return parts


def _read_average(folder: Path, n_users: int) -> Average:
    """The average that predicts; raises where it is not about these users."""
    file = folder / AVERAGE
    if not file.exists():
        raise InvalidInput(f"{folder} is incomplete: it has no {AVERAGE}", remedy=AGAIN)
    average = Average.from_state(unpack(file.read_bytes(), str(file)))
    if any(len(part.estimate.personal) != n_users for part in average.parts):
        raise ValueError("its average is not about its users")
    return average


def _read_settings(asked: dict[str, Any]) -> Settings:
    """The settings in run.json; those of older versions have other names for some."""
    older = {"most": "max_groups"}
    known = {f.name for f in fields(Settings)}
    given = {older.get(name, name): value for name, value in asked.items()}
    for name in ("data", "separator"):
        if not isinstance(given.get(name, ""), str):
            raise TypeError(f"{name} must be a text")
    if isinstance(given["tol"], str) or isinstance(given["ridge"], (str, list, dict)):
        raise TypeError("tol and ridge must be numbers")
    return Settings(**{name: value for name, value in given.items() if name in known})


def _parse_cell(cell: str) -> Any:
    """A cell of path.csv: a number where it is one, None where it is empty."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(cell)
    return cell or None


def _are_as_good(problem: Problem, models: Array, others: Array) -> bool:
    """Whether no user's loss tells the models apart. Without a ridge, separated classes have no
    best one.
    """
    loss = problem.loss.own_loss
    samples = loss.prepare(problem.users)
    with np.errstate(over="ignore", invalid="ignore"):
        differences = np.abs(loss.values(samples, models) - loss.values(samples, others))
    return bool((differences <= _ROUNDING * loss.sizes(samples)).all())


def read(folder: str | PathLike[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read run.json and the solution's arrays; `coterie.load_run` makes a `Run` of them.

    Raises
    ------
    InvalidInput : the folder is no run, or incomplete, or damaged.
    """
    file, arrays = Path(folder, "run.json"), Path(folder, "solution.coterie")
    if not file.exists():
        raise InvalidInput(f"{folder} is not a run folder: it has no run.json",
                           remedy="Give the folder that was named with --out")
    try:
        info = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{file} cannot be read: {error}", remedy=AGAIN) from error
    if not isinstance(info, dict):
        raise InvalidInput(f"{file} holds no run", remedy=AGAIN)
    if isinstance(info.get("scores"), dict):
        info["scores"] = {_NAMES_NOW.get(name, name): x for name, x in info["scores"].items()}
    info = {"pooled" if name == "together" else name: x for name, x in info.items()}
    if not arrays.exists():
        raise InvalidInput(f"{folder} is incomplete: it has no solution.coterie", remedy=AGAIN)
    return info, unpack(arrays.read_bytes(), str(arrays))


def _certify_released(run: Run, tol: float) -> RunCertificate:
    """Certify a private run again from its released statistics.

    Raises
    ------
    InvalidInput : the file is missing or damaged.
    """
    file = run.folder / RELEASED
    if not file.exists():
        raise InvalidInput(f"{run.folder} holds no {RELEASED}", remedy=AGAIN)
    try:
        saved = unpack(file.read_bytes(), str(file))
        p = saved["features"].shape[1]
        users = Condensed(saved["features"], saved["targets"], saved["offsets"], tuple(run.names),
                          tuple(f"z{k}" for k in range(p)), saved["sizes"])
        loss: Loss = stated_loss(Squared(ridge=float(saved["ridge"]), penalize_intercept=True),
                                 run.unit, run.covariance, run.scale)
        problem = Problem(users, loss, run.lam, run.graph)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInput(f"{file} is damaged: {error}", remedy=AGAIN) from error
    same = (run.info["n_clusters"] == run.n_clusters and run.info["lam"] == run.lam
            and run.info.get("kind") == kind_of(loss, run.labels))
    return RunCertificate.of(problem, run.solved, tol, same_claims=same)
