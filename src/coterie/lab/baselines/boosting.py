"""Boosted trees of LightGBM, with the user as a categorical column."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from coterie.base.types import Array
from coterie.data.summary import Task
from coterie.data.users import Users
from coterie.lab.baselines.central import Central, CentralFit

# Leaves of a tree, and the least number of rows in each.
_LEAVES = ((7, 5), (7, 20), (31, 5), (31, 20))
_RATE, _MOST_TREES, _PATIENCE, _FOLDS = 0.05, 1000, 30, 5


@dataclass(frozen=True, kw_only=True)
class BoostedTrees(Central):
    """LightGBM with the user as a categorical column.

    The number of trees, the number of leaves and the least number of rows in a leaf are chosen by
    cross-validation.
    """

    name: ClassVar[str] = "lightgbm"
    library: ClassVar[str] = "lightgbm"

    def _fit(self, users: Users, task: Task, n_classes: int, seed: int) -> CentralFit:
        import lightgbm

        fixed: dict[str, Any] = {"learning_rate": _RATE, "min_data_per_group": 1, "cat_smooth": 1.0,
                                 "seed": seed,
                                 "deterministic": True, "force_row_wise": True, "verbosity": -1}
        if task == "regression":
            fixed |= {"objective": "regression", "metric": "l2"}
        elif n_classes == 2:
            fixed |= {"objective": "binary", "metric": "binary_logloss"}
        else:
            fixed |= {"objective": "multiclass", "metric": "multi_logloss", "num_class": n_classes}
        best: tuple[float, dict[str, Any], int] | None = None
        for leaves, smallest in _LEAVES:
            settings = fixed | {"num_leaves": leaves, "min_data_in_leaf": smallest}
            history = lightgbm.cv(settings, _dataset(lightgbm, users, settings),
                                  num_boost_round=_MOST_TREES,
                                  nfold=_FOLDS, stratified=task == "classification", seed=seed,
                                  callbacks=[lightgbm.early_stopping(_PATIENCE, verbose=False)])
            means = next(np.asarray(values) for name,
                         values in history.items() if name.endswith("-mean"))
            if best is None or means.min() < best[0]:
                best = float(means.min()), settings, int(means.argmin()) + 1
        assert best is not None
        _, settings, n_trees = best
        trees = lightgbm.train(settings, _dataset(lightgbm, users, settings),
                               num_boost_round=n_trees)
        return CentralFit(decide=lambda rows: np.asarray(trees.predict(_table(rows),
            raw_score=True)),
                          models=np.empty((users.n_users, 0)),
                          note=f"{n_trees} trees of {settings['num_leaves']} leaves with at least "
                               f"{settings['min_data_in_leaf']} rows")


def _table(users: Users) -> Array:
    return np.c_[users.features, users.owner]


def _dataset(lightgbm: Any, users: Users, settings: dict[str, Any]) -> Any:
    return lightgbm.Dataset(_table(users), users.targets, categorical_feature=[users.n_features],
                            params=settings,
                            free_raw_data=False)
