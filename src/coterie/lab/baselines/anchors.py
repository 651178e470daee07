"""Established software for users who vary around a centre: GPBoost, pyGAM, and of R lme4 and mgcv.
What is not installed is left out, and said.

Classes are two, or the method is not for the table. Counts get Poisson's likelihood.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from scipy.special import logit

from coterie.base.errors import CoterieError, InvalidInput
from coterie.base.types import Array
from coterie.data.summary import Task
from coterie.data.users import Users
from coterie.lab.baselines.central import Central, CentralFit

_CURVED = 5  # different values from which a column gets a curve
_RATE, _MOST_TREES, _PATIENCE = 0.05, 500, 20
_CERTAIN = 1e-6  # distance of a probability from 0 and 1 at least


@dataclass(frozen=True, kw_only=True)
class Anchor(Central):
    """A method whose answer to classes is one probability."""

    tasks: ClassVar[tuple[Task, ...]] = ("regression", "classification", "counts")

    def _fit(self, users: Users, task: Task, n_classes: int, seed: int) -> CentralFit:
        if n_classes > 2:
            raise InvalidInput(f"{self.name} is for two classes, and there are {n_classes}")
        means = self._means(users, task)

        def decide(rows: Users) -> Array:
            found = np.asarray(means(rows), dtype=float)
            if task != "classification":
                return found
            return np.asarray(logit(np.clip(found, _CERTAIN, 1 - _CERTAIN)))

        return CentralFit(decide=decide, models=np.empty((users.n_users, 0)))

    def _means(self, users: Users, task: Task) -> Any:
        """A function from rows to means of the target."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class GPBoost(Anchor):
    """Boosted trees with a random intercept per user; the number of trees by cross-validation."""

    name: ClassVar[str] = "gpboost"
    library: ClassVar[str] = "gpboost"
    extra: ClassVar[str] = "peers"

    def _means(self, users: Users, task: Task) -> Any:
        gpboost: Any = import_module("gpboost")
        likelihood = {"regression": "gaussian", "classification": "bernoulli_logit",
                      "counts": "poisson"}[task]

        def effects() -> Any:
            return gpboost.GPModel(group_data=users.owner, likelihood=likelihood)

        def data() -> Any:
            return gpboost.Dataset(users.features, users.targets, free_raw_data=False)

        settings = {"learning_rate": _RATE, "num_leaves": 15, "min_data_in_leaf": 5, "verbose": -1,
                    "max_depth": 6}
        history = gpboost.cv(params=settings, train_set=data(), gp_model=effects(), nfold=4,
                             num_boost_round=_MOST_TREES, early_stopping_rounds=_PATIENCE,
                             use_gp_model_for_validation=True, stratified=False, seed=1,
                             verbose_eval=False)
        n_trees = max(1, len(next(iter(history.values()))))
        trees = gpboost.train(params=settings, train_set=data(), gp_model=effects(),
                              num_boost_round=n_trees, verbose_eval=False)
        return lambda rows: trees.predict(data=rows.features, group_data_pred=rows.owner,
                                          pred_latent=False)["response_mean"]


@dataclass(frozen=True, kw_only=True)
class PyGAM(Anchor):
    """Penalised splines of all columns with enough values, and a level per user; one strength for
    all by generalised cross-validation.
    """

    name: ClassVar[str] = "pygam"
    library: ClassVar[str] = "pygam"
    extra: ClassVar[str] = "peers"

    def _means(self, users: Users, task: Task) -> Any:
        pygam: Any = import_module("pygam")
        kind = {"regression": pygam.LinearGAM, "classification": pygam.LogisticGAM,
                "counts": pygam.PoissonGAM}[task]
        terms = pygam.f(users.n_features)
        for j in range(users.n_features):
            curved = len(np.unique(users.features[:, j])) >= _CURVED
            terms = terms + (pygam.s(j, n_splines=10) if curved else pygam.l(j))
        fitted = kind(terms).gridsearch(np.c_[users.features, users.owner], users.targets,
                                        lam=np.logspace(-3, 3, 7), progress=False)
        inside = users.features.min(axis=0), users.features.max(axis=0)
        name = "predict_proba" if task == "classification" else "predict"
        return lambda rows: getattr(fitted, name)(
            np.c_[np.clip(rows.features, *inside), rows.owner])


@dataclass(frozen=True, kw_only=True)
class InR(Anchor):
    """A method of R."""

    package: ClassVar[str]
    formula: ClassVar[str]  # R code: from x, inside and curved, which are names of columns
    call: ClassVar[str]  # R code: fit formula f with family g to data d

    @classmethod
    def missing(cls) -> CoterieError | None:
        """What to say if R is not installed; a missing package of R is found when it is used."""
        if shutil.which("Rscript"):
            return None
        return InvalidInput(f"The method {cls.name!r} needs R, which is not installed",
                            remedy=f"Run: apt-get install r-cran-{cls.package}")

    def _means(self, users: Users, task: Task) -> Any:
        family = {"regression": "gaussian", "classification": "binomial", "counts": "poisson"}[task]
        script = _SCRIPT % (self.package, family, _CURVED, self.formula, self.call)

        def means(rows: Users) -> Array:
            with tempfile.TemporaryDirectory() as folder:
                heading = ",".join(["y", "user", *(f"x{j}" for j in range(rows.n_features))])
                for name, part in (("train", users), ("test", rows)):
                    np.savetxt(Path(folder, name), np.c_[part.targets, part.owner, part.features],
                               delimiter=",", header=heading, comments="")
                done = subprocess.run(["Rscript", "-e", script], cwd=folder, text=True,
                                      capture_output=True, check=False)
                if done.returncode:
                    raise InvalidInput(" ".join(done.stderr.split())[-200:])
                return np.loadtxt(Path(folder, "means"), ndmin=1)

        return means


_SCRIPT = """
suppressMessages(library(%s)); g <- %s; enough <- %d
d <- read.csv("train"); t <- read.csv("test"); levels <- sort(unique(c(d$user, t$user)))
d$user <- factor(d$user, levels); t$user <- factor(t$user, levels)
x <- setdiff(names(d), c("y", "user"))
inside <- x[sapply(x, function(j) any(tapply(d[[j]], d$user, function(v) max(v) > min(v)),
                                      na.rm = TRUE))]
curved <- x[sapply(x, function(j) length(unique(d[[j]])) >= enough)]
plus <- function(...) paste(c(...), collapse = " + ")
f <- as.formula(%s)
m <- suppressWarnings(suppressMessages(%s))
p <- as.numeric(predict(m, t, type = "response", allow.new.levels = TRUE))
write(p, "means", ncolumns = 1)
"""


@dataclass(frozen=True, kw_only=True)
class Lme4(InR):
    """A random intercept per user."""

    name: ClassVar[str] = "lme4"
    package: ClassVar[str] = "lme4"
    formula: ClassVar[str] = 'plus("y ~ 1", x, "(1 | user)")'
    call: ClassVar[str] = "if (identical(g, gaussian)) lmer(f, d) else glmer(f, d, family = g)"


@dataclass(frozen=True, kw_only=True)
class Lme4Slopes(Lme4):
    """Random slopes, too: of any covariance up to four columns, independent otherwise."""

    name: ClassVar[str] = "lme4 slopes"
    formula: ClassVar[str] = (
        'plus("y ~ 1", x, paste("(", plus(1, inside), if (length(inside) > 4) "||" else "|",'
        ' "user)"))')


@dataclass(frozen=True, kw_only=True)
class Mgcv(InR):
    """Splines of columns with enough values, and a random intercept per user."""

    name: ClassVar[str] = "mgcv"
    package: ClassVar[str] = "mgcv"
    formula: ClassVar[str] = """plus("y ~ 1", 's(user, bs = "re")', sapply(x, function(j) {
  if (j %in% curved) sprintf("s(%s, k = %d)", j, min(10, length(unique(d[[j]])))) else j }))"""
    call: ClassVar[str] = "bam(f, data = d, family = g, discrete = nrow(d) > 1000)"


@dataclass(frozen=True, kw_only=True)
class MgcvSlopes(Mgcv):
    """Random slopes, too."""

    name: ClassVar[str] = "mgcv slopes"
    formula: ClassVar[str] = f"""plus({Mgcv.formula}, sprintf('s(user, %s, bs = "re")', inside))"""
