"""What a node accepts of a server's words, before it takes memory or does work for them.

Names come from closed tables, numbers are finite and of a usual size, and everything that a message
declares (steps, splits, positions, neighbours) has a largest value. A reply may need the work of
many points, but never much more than the message that asks for it is long.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.base.errors import InvalidInput, Refused, require
from coterie.data.summary import TASKS
from coterie.data.validation import split_names
from coterie.federated.agreement import Agreement
from coterie.federated.protocol.messages import SCHEMAS, Message, misfit, square
from coterie.federated.sources import SOURCES
from coterie.fitting.candidates import N_FOLDS
from coterie.fitting.columns import QUESTIONS, handed_of, question_of
from coterie.losses import LOSSES

Array = npt.NDArray[Any]

MOST_BYTES = 1 << 28  # of one query, and of an agreement
_STEPS, _POINTS = 10_000, 10_000  # of training, of models
_NUMBERS = 10**9  # of a data set
_WORK = 1 << 27  # numbers of the Hessians that a question asks of one user
# Points times rows times coordinates squared that a question may ask of one user: a few seconds.
# So many points are always allowed.
_COST, _CHEAP_POINTS, _COVARIANCES = 2.5e7, 256, 16
_LARGEST, _FAR = 1e30, 1e12  # sizes of numbers, and of coordinates of models
_ROUNDING = 1e-8  # of the eigenvalues of a covariance, relative
_MODELS = ("model", "models", "centre", "anchor", "point", "others", "fitted", "alone", "together",
           "wake_model")
_CLASSES, _COLUMNS, _NAMES = 1_000, 100_000, 10_000_000
_ONE_ROW = {"expand": ("anchor",), "certify": ("covariance", "noise"), "join": ("covariance",)}
_REMEDY = "Install the same version of coterie on the server and at the nodes"


def check_agreement(text: str, own: Mapping[str, Any]) -> Agreement:
    """The agreement that a server sends, if all that is in it can be used.

    Parameters
    ----------
    text : as `Agreement.to_json` gives it.
    own : the node's configuration. `loss` in it is the one loss that may be named as module:name.

    Raises
    ------
    Refused : anything else; the reason is for the server.
    """
    if len(text) > MOST_BYTES:
        raise Refused(f"an agreement of {len(text):,} characters is too long", remedy=_REMEDY)
    try:
        agreement = Agreement.from_json(text)
        _check_words(agreement, own)
        for units in (agreement.units, agreement.train_units):
            if units is not None:
                _check_scale(units.mean, units.scale, len(agreement.features))
                require(all(np.isfinite(number) and abs(number) < _LARGEST
                            for number in (units.centre, units.spread)),
                        "the units of the target are not finite")
        if agreement.scale or agreement.mean:
            _check_scale(np.array(agreement.mean, dtype=float),
                         np.array(agreement.scale, dtype=float), len(agreement.features))
        return agreement
    except (InvalidInput, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise Refused(f"the agreement cannot be used: {_short(error)}", remedy=_REMEDY) from error


def _check_words(agreement: Agreement, own: Mapping[str, Any]) -> None:
    """Names, tasks, and numbers of classes and columns."""
    require(isinstance(agreement.names, tuple) and len(agreement.names) <= _NAMES and
            all(isinstance(name, (str, int, float)) for name in agreement.names),
            "names must be texts or numbers")
    require(isinstance(agreement.features, tuple) and len(agreement.features) <= _COLUMNS and
            all(isinstance(name, str) for name in agreement.features), "columns must be texts")
    require(isinstance(agreement.run, str) and len(agreement.run) <= 200,
            "the name of the run is no short text")
    require(agreement.task in ("", *TASKS), f"there is no task {_short(agreement.task)!r}")
    units = [units for units in (agreement.units, agreement.train_units) if units is not None]
    for number in (agreement.n_classes, *(one.n_classes for one in units)):
        require(type(number) is int and 0 <= number <= _CLASSES, f"there can be {_CLASSES} classes")
    if agreement.loss:
        check_loss(agreement.loss, agreement.loss_options, own)
    require(isinstance(agreement.signs, bool) and isinstance(agreement.loss_options, str),
            "signs and options of a loss are none")
    for one in units:
        require(one.loss.ridge <= _LARGEST, "the ridge is too large")
    if agreement.recipe is not None:
        require(agreement.features == agreement.recipe.feature_names,
                "its columns are not those of its recipe")
        require(len(agreement.recipe.classes) <= _CLASSES, f"there can be {_CLASSES} classes")


def check_loss(name: str, options: str, own: Mapping[str, Any]) -> None:
    """Refuse a loss that is neither in LOSSES nor the owner's, and settings that are no plain
    numbers of it.

    Raises
    ------
    Refused, InvalidInput : it is not.
    """
    if name not in LOSSES and name != str(own.get("loss", "")):
        raise Refused(f"a server may name the losses {', '.join(LOSSES)}, not {_short(name)!r}",
                      remedy="The owner of the node can name it as `loss` in the node "
                      "configuration")
    settings = json.loads(options or "{}")
    require(isinstance(settings, dict) and len(options) <= 10_000,
            "settings of a loss are no mapping")
    kind: Any = LOSSES.get(name)
    known = {f.name for f in fields(kind)} if kind is not None else set(settings)
    for key, value in settings.items():
        require(key in known, f"the loss {name!r} has no setting {_short(key)!r}")
        require(value is None or (isinstance(value, (bool, int, float)) and abs(value) <= _LARGEST),
                f"the setting {key!r} of the loss is no number")
    classes = settings.get("n_classes")
    require(classes is None or (type(classes) is int and 2 <= classes <= _CLASSES),
            f"there can be {_CLASSES} classes")


def check_data(said: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse data that a server must not name: a function, or columns of the owner's table.

    Parameters
    ----------
    said : what the server says of the run.
    own : the node's configuration of the data.

    Raises
    ------
    Refused : the server names anything but a ready source, a data set of an absurd size, or other
        columns.
    """
    if "data" in own:
        for key in ("features", "drop"):
            if said.get(key) and split_names(str(said[key])) != split_names(str(own.get(key, ""))):
                raise Refused(f"the server sets {key}, and the owner of the data decides which "
                              "columns are used", remedy=f"Set {key} in the node configuration")
        return
    name = str(said.get("data", ""))
    if name and name not in SOURCES:
        raise Refused(f"a server may name the data {', '.join(SOURCES)}, not {_short(name)!r}",
                      remedy="The owner of the node can name it as `data` in the node "
                      "configuration")
    try:
        options = json.loads(str(said.get("dataset-options", "") or "{}"))
        sizes = [abs(value) for value in options.values() if isinstance(value, (int, float))]
    except (ValueError, AttributeError, RecursionError) as error:
        raise Refused("dataset-options must be settings as JSON") from error
    if not float(np.prod([max(size, 1.0) for size in sizes])) <= _NUMBERS:
        raise Refused(f"a data set may have {_NUMBERS:,} numbers")


def _check_scale(mean: Array, scale: Array, n_columns: int) -> None:
    require(mean.shape == scale.shape == (n_columns,), "means and scales are not those of the "
            "columns")
    require(bool(np.isfinite(mean).all() and np.isfinite(scale).all()
                 and (np.abs(mean) < 1e150).all()), "means and scales are not finite")
    require(bool(((scale > 1e-150) & (scale < 1e150)).all()), "scales are not positive")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 100 else text[:97] + "..."


# -- queries


def objection(query: Message, dim: int, n_parts: int = 1) -> str | None:
    """Why a node does not answer this query; None if it does.

    Parameters
    ----------
    query : from the server.
    dim : the length of a model.
    n_parts : of the rows: all of them, and where some are held out the others.
    """
    reason = misfit(query, query.kind, dim, "query")
    if reason is not None:
        return reason
    for name, array in query.arrays.items():
        largest = _FAR if name in _MODELS else _LARGEST
        if array.size and float(np.abs(array.astype(float)).max()) > largest:
            return f"its field {name!r} holds a number beyond {largest:g}"
        if array.size > _POINTS * max(dim, 1) + dim * dim and name in _MODELS:
            return f"its field {name!r} holds more than {_POINTS:,} models"
    arrays = query.arrays
    if query.kind in ("summary", "evidence", "around"):
        return _fit_objection(query.kind, arrays, dim, n_parts)
    if query.kind == "average" or ("settings" in arrays and query.kind == "certify"):
        return _average_objection(query.kind, arrays, dim, n_parts)
    if query.kind == "pdmm":
        return "edges at their users are for users in one process; nodes store nothing"
    return _plain_objection(query.kind, arrays, dim)


def too_much(query: Message, rows: int, dim: int) -> str:
    """Why a question is more work than one may ask of a user, or an empty text: before the work.

    Parameters
    ----------
    query : of a valid form.
    rows : of the user.
    dim : the length of a model.
    """
    arrays = query.arrays
    points, cost = 1.0, float(rows) * dim * dim
    if query.kind in ("evidence", "around"):
        points = float(np.prod(arrays["centre"].shape[:-1])) + float(arrays.get("rank", 0))
    elif query.kind in ("join", "expand"):
        points = float(max((arrays[name].size for name in ("models", "anchor") if name in arrays),
                           default=0)) / max(dim, 1)
    elif query.kind == "train":
        points, cost = float(arrays["steps"]), 0.05 * rows * dim  # a step is one gradient
    elif query.kind == "home":
        points = float(np.atleast_2d(arrays["covariance"]).shape[0])
        if points > _COVARIANCES:
            return f"it offers {points:,.0f} covariances, and {_COVARIANCES} are allowed"
    if points > _CHEAP_POINTS and points * cost > _COST:
        return (f"it asks about {points:,.0f} points, which is more work for {rows:,} rows than a "
                "question may ask")
    return ""


def alike(query: Message, first: Message) -> bool:
    """Whether two users are asked the same question, each at points of its own, so that they can
    answer at once.
    """
    if (query.kind, query.round) != (first.kind, first.round):
        return False
    for name, form in SCHEMAS[query.kind].query.items():
        one, other = query.arrays.get(name), first.arrays.get(name)
        if form.removeprefix("?").startswith("="):
            if (one is None) != (other is None) or not (one is None or other is None
                                                        or np.array_equal(one, other)):
                return False
        elif not form.startswith("*") and (None if one is None else one.shape) != (
                None if other is None else other.shape):
            return False
    return True


def _plain_objection(kind: str, arrays: Mapping[str, Array], dim: int) -> str | None:
    if kind == "train" and not 0 <= float(arrays["steps"]) <= _STEPS:
        return f"it asks for {float(arrays['steps']):,.0f} steps, and {_STEPS:,} are allowed"
    for name in ("ridge", "t", "noise"):
        if name in arrays and (arrays[name] < 0).any():
            return f"its field {name!r} is negative"
    if kind == "home":
        shape = arrays["covariance"].shape
        if not 1 <= len(shape) <= 2 or shape[-1] != dim * (dim + 1) // 2 or shape[0] > _POINTS:
            return "its covariances have a shape that is not allowed"
    for name in _ONE_ROW.get(kind, ()):
        if name in arrays and len(arrays[name]) > 1:
            return f"its field {name!r} has more than one row"
    return None


def _fit_objection(kind: str, arrays: Mapping[str, Array], dim: int, n_parts: int) -> str | None:
    """Shapes of the questions of a fit, which the schema leaves open, and the numbers that they
    declare.
    """
    triangle, covariance = dim * (dim + 1) // 2, arrays["covariance"].shape
    if not (arrays.get("step", np.ones(())) > 0).all():
        return "a strength in it is not positive"
    if kind == "summary":
        if covariance != (1, triangle) or int(arrays["rank"]) not in (1, 2):
            return "its covariance or its number of parts is not allowed"
        return _not_positive(arrays["covariance"], dim)
    parts, k = covariance[:2] if len(covariance) == 3 else (0, 0)
    good = (covariance == (parts, k, triangle) and arrays["centre"].shape == (parts, k, dim)
            and 0 < parts <= n_parts and 0 < k <= _POINTS and k * dim * dim <= _WORK)
    good &= kind == "around" or (parts == n_parts and arrays["step"].shape == (parts,)
                                 and 0 <= int(arrays["rank"]) <= k)
    if not good:
        return "its centres and covariances have shapes that are not allowed"
    return _not_positive(arrays["covariance"], dim)


def _average_objection(kind: str, arrays: Mapping[str, Array], dim: int,
                       n_parts: int) -> str | None:
    """Why this is no question about the columns of users with models of this length."""
    try:
        if kind == "certify":
            handed_of(arrays["settings"], dim - 1)
            return _plain_objection(kind, arrays, dim)
        stage = int(arrays["stage"])
        question_of(stage, arrays["settings"], dim - 1)
    except InvalidInput as error:
        return str(error)
    if not 0 <= int(arrays["rank"]) < n_parts:
        return "it is about a part of the rows that does not exist"
    if stage and not 0 <= int(arrays.get("who", -1)) < N_FOLDS:
        return "it names no fold to begin with"
    if stage == len(QUESTIONS) - 1 and (
            "models" not in arrays or arrays["models"].shape != (N_FOLDS * dim,)):
        return "it does not say what the kind of models predicts"
    return None


def _not_positive(triangles: Array, dim: int) -> str | None:
    """Why these are no covariances."""
    ends = np.linalg.eigvalsh(square(triangles, dim))
    good = (ends[..., 0] >= -_ROUNDING * ends[..., -1]).all()
    return None if good else "a covariance in it is not positive semidefinite"
