"""Models that a node keeps for its users, so that it predicts without the server.

The owner of a node names a folder in the node configuration (`models-dir`); the server cannot. Each
user has one file in it, written when the user gets its model at the end of a fit, and replaced by
the next fit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from coterie.base.errors import InvalidInput
from coterie.base.storage import json_ready, write_atomically
from coterie.base.types import Array
from coterie.data.encoding import Recipe
from coterie.federated.agreement import Agreement
from coterie.fitting.predictions import Predictor, PredictsRows
from coterie.fitting.units import Units

_FILES = "user-*.json"


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptModels(PredictsRows):
    """The models of a node's users: `predict` works as that of a run, for these users only.

    Parameters
    ----------
    names : of the users.
    models : (n_users, dim) their models, in the solver's units.
    units, recipe : how rows become what the solver sees.
    """

    names: tuple[Any, ...]
    models: Array = field(repr=False)
    units: Units = field(repr=False)
    recipe: Recipe | None = field(repr=False, default=None)

    def _predictor(self) -> Predictor:
        return Predictor(units=self.units, recipe=self.recipe, names=self.names, models=self.models,
                         labels=np.full(len(self.names), -1), together=None)


def keep_models(folder: str | PathLike[str], agreement: Agreement,
                models: Iterable[tuple[Any, Array]]) -> None:
    """Write one file for each user.

    Parameters
    ----------
    folder : created if needed.
    agreement : with the units of the models.
    models : names of users, and their models in the solver's units.
    """
    assert agreement.units is not None
    shared = {"run": agreement.run, "recipe": None if agreement.recipe is None
              else agreement.recipe.to_json(), "units": json_ready(agreement.units.state())}
    for name, model in models:
        text = json.dumps({"user": name, "model": np.asarray(model).tolist(), **shared},
                          ensure_ascii=False)
        number = hashlib.sha256(json.dumps(name).encode()).hexdigest()[:40]
        write_atomically(Path(folder) / f"user-{number}.json", text.encode())


def load_models(folder: str | PathLike[str]) -> KeptModels:
    """Read the models that a node keeps; of several fits, those of the last one.

    Parameters
    ----------
    folder : the `models-dir` of the node.

    Raises
    ------
    InvalidInput : there are none, or a file is damaged.
    """
    files = sorted(Path(folder).glob(_FILES), key=lambda file: (file.stat().st_mtime_ns, file.name))
    if not files:
        raise InvalidInput(f"{folder} holds no models that a node keeps",
                           remedy="Give the folder that is `models-dir` in the node configuration")
    try:
        parts = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        last = parts[-1]
        users = {part["user"]: part["model"] for part in parts if part["run"] == last["run"]}
        units = Units.from_state(last["units"])
        recipe = None if last["recipe"] is None else Recipe.from_json(last["recipe"])
        models = np.array(list(users.values()), dtype=float)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInput(f"a file in {folder} is damaged: {error}",
                           remedy="Run the federation again") from error
    return KeptModels(names=tuple(users), models=models, units=units, recipe=recipe)


def holds_models(folder: str | PathLike[str]) -> bool:
    """Whether a folder is one in which a node keeps models."""
    return any(Path(folder).glob(_FILES))
