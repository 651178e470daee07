"""What a private fit costs: its error, its groups, its time and its rounds, on School, Landmine and
synthetic groups.

    python benchmarks/private_fit.py FOLDER [--seeds 10] [--all] [--only school landmine synthetic]

FOLDER has school.npz and landmine.npz (see `coterie bench`). Fits are made by `ct.federate(...,
privacy=...)`; noise and split follow the seed, 200 and on. In the tables, with the standard error
over seeds in brackets:

server            models that the server has found from noisy releases
home              models that users have finished at home from what the server sent and their exact
                  rows
local             each user's least squares from its own part of the same noisy releases, shrunk
                  towards zero
mean-regularised  the same, shrunk towards one model for all
one model         least squares from the same noisy releases of all users together
alone, exact      each user's model from its own exact rows: it takes no part, and nothing leaves it
no noise          the federation without privacy

How much local, mean-regularised, one model and alone are shrunk is chosen on the test rows, in
their favour. Times are those of the process on one thread; compiling is done before.

School is in the setting of Liu et al. (2022): features are standardised within each school, and
like them this leaves out what that would cost of the budget. Their mean-regularised training
reports 23.94 at epsilon = 6.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from machine import facts
from sklearn.metrics import adjusted_rand_score, roc_auc_score
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

import coterie as ct
from coterie.data.moments import SecondMoments
from coterie.datasets import clustered
from coterie.fitting import Fit
from coterie.fitting.units import Units

FIRST_SEED = 200
SHRINKAGE = np.geomspace(1e-4, 1e3, 15)  # over the rows of the typical user
LANDMINE_BOUNDS = ((-3, 16), (-1, 39), (-2, 9), (-2, 11), (-4, 12), (-1, 39), (-2, 23), (-1, 25),
                   (-1, 27))
COLUMNS = ("server", "home", "local", "mean-regularised", "one model", "alone, exact", "no noise")

Score = Callable[[Units, np.ndarray], float]


class Case(NamedTuple):
    """Users of one seed, and how their models are judged."""

    users: ct.Users
    test: ct.Users
    loss: str
    delta: float
    clip: dict[str, tuple[float, float]]
    groups: np.ndarray | None = None


class Study(NamedTuple):
    """One table."""

    title: str
    case: Callable[[int], Case]
    epsilons: tuple[float, ...]
    rest: tuple[float, ...]  # epsilons with --all
    plain: int  # for how many seeds the fit without noise is made


# -- data


def school(folder: Path, seed: int) -> Case:
    """70 % of each school's rows, features standardised by their own means and deviations, scores
    in [0, 1].
    """
    with np.load(folder / "school.npz") as stored:
        X, y, user = stored["X"][:, :-1].astype(float), (stored["y"].astype(float) - 1.0) / 69.0, \
            stored["user"]
    parts: list[list[np.ndarray]] = []
    for one in np.unique(user):
        x, x_test, t, t_test = train_test_split(X[user == one], y[user == one], test_size=0.3,
                                                random_state=seed)
        scaler = StandardScaler().fit(x)
        parts.append([scaler.transform(x), t, np.full(len(t), one), scaler.transform(x_test),
                      t_test,
                      np.full(len(t_test), one)])
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    users = ct.Users.from_arrays(*columns[:3])
    clip = dict.fromkeys(users.feature_names, (-5.0, 5.0)) | {"target": (0.0, 1.0)}
    return Case(users, ct.Users.from_arrays(*columns[3:]), "squared", 1e-3, clip)


def landmine(folder: Path, seed: int) -> Case:
    """200 random rows of each field; bounds contain the published ranges of the features."""
    with np.load(folder / "landmine.npz") as stored:
        X, y, user, groups = (stored[name] for name in ("X", "y", "user", "cluster"))
    rng, train = np.random.default_rng(seed), np.zeros(len(y), dtype=bool)
    for one in np.unique(user):
        train[rng.permutation(np.flatnonzero(user == one))[:200]] = True
    users, test = (ct.Users.from_arrays(X[rows].astype(float), y[rows].astype(float), user[rows])
                   for rows in (train, ~train))
    return Case(users, test, "logistic", 1e-5,
                dict(zip(users.feature_names, LANDMINE_BOUNDS, strict=True)), groups)


def synthetic(family: str, seed: int) -> Case:
    """30 users in three groups with 100 rows of five features."""
    data = clustered(family, n_users=30, n_clusters=3, samples=100, n_features=5, noise=0.5,
                     test_samples=400,
                     seed=seed)
    clip = dict.fromkeys(data.users.feature_names, (-4.0, 4.0)) | {"target": (-8.0, 8.0)}
    return Case(data.users, data.test, family, 1e-5, clip, data.clusters)


# -- scores: less is better


def squared_error(test: ct.Users, units: Units, models: np.ndarray) -> float:
    """1000 times the mean over all test rows."""
    return 1e3 \
        * float(np.mean((units.margins(test.features, models[test.owner]) - test.targets) ** 2))


def area(test: ct.Users, units: Units, models: np.ndarray) -> float:
    """The negative mean over users of the area under the curve; users whose test rows are of one
    class are left out.
    """
    margins = units.margins(test.features, models[test.owner])
    parts = [(test.targets[test.owner == i], margins[test.owner == i]) for i in range(test.n_users)]
    return -float(np.mean([roc_auc_score(y, t) for y, t in parts if len(set(y)) > 1]))


# -- comparators


def from_releases(fit: Fit, score: Score) -> dict[str, float]:
    """Local, mean-regularised and one model, from the statistics that the private fit is optimal
    for.

        x_i = c + (n_i G_i + P)^-1 n_i (g_i - G_i c),        c = 0, or one model for all
    """
    users = fit.solution.problem.users
    moments, dim = SecondMoments.of(users), users.n_features + 1
    rows, sizes = users.counts[:, None, None], users.sizes
    means = np.insert(moments.means, -1, 1.0, axis=1)  # of (features, 1, target)
    both = np.zeros((users.n_users, dim + 1, dim + 1))
    kept = np.delete(np.arange(dim + 1), dim - 1)
    both[:, kept[:, None], kept] = moments.scatters / rows
    both = sizes[:, None, None] * (both + means[:, :, None] * means[:, None, :])
    gram, cross = both[:, :dim, :dim], both[:, :dim, dim]
    typical = float(np.median(sizes))
    least: dict[str, float] = defaultdict(lambda: np.inf)
    pooled = np.zeros(dim)
    for strength in SHRINKAGE:  # one model, first
        model = np.linalg.solve(gram.sum(axis=0) + strength * typical * np.eye(dim),
                                cross.sum(axis=0))
        result = score(fit.units, np.tile(model, (users.n_users, 1)))
        if result < least["one model"]:
            least["one model"], pooled = result, model
    for strength in SHRINKAGE:
        for intercept in (1.0, 0.0):  # shrunk as the rest, or free
            price = strength * typical * np.diag(np.append(np.ones(dim - 1), intercept))
            for name, centre in (("local", np.zeros(dim)), ("mean-regularised", pooled)):
                own = centre + np.linalg.solve(gram + price, (cross - gram @ centre)[..., None])[
                    ..., 0]
                least[name] = min(least[name], score(fit.units, own))
    return dict(least)


def alone(case: Case, score: Score) -> float:
    """Each user's own model from its exact rows."""
    units = Units.learn(case.users, "regression")
    loss: ct.LinearLoss = ct.Squared()
    inner = units.inner(case.users)
    if case.loss == "logistic":
        units = Units.learn(ct.Users.from_arrays(case.users.features, case.users.targets > 0,
                                                 case.users.owner),
                            "classification", loss="logistic")
        inner = ct.Users.from_arrays(units.rows(case.users.features), case.users.targets,
                                     case.users.owner)
        loss = ct.Logistic()
    results = []
    for strength in SHRINKAGE[SHRINKAGE <= 1.0]:
        for intercept in (True, False):
            one = type(loss)(ridge=float(strength), penalize_intercept=intercept)
            results.append(score(units, one.local(one.prepare(inner)).points))
    return min(results)


# -- runs


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.process_time()
    return work(), time.process_time() - began


def measured(case: Case, epsilons: tuple[float, ...], seed: int, plain: bool) -> Iterator[
    tuple[float, dict[str, Any]]]:
    """For each epsilon what one seed gives."""
    score: Score = partial(squared_error if case.loss == "squared" else area, case.test)
    shared: dict[str, Any] = {"alone, exact": alone(case, score)}
    reference = np.nan
    if plain:
        fit, reference = timed(lambda: ct.federate(case.users, case.loss, holdout=0.0))
        shared |= {"no noise": score(fit.units, fit.models), "rounds, no noise": fit.n_rounds}
        if case.groups is not None:
            shared["ARI, no noise"] = adjusted_rand_score(case.groups, fit.labels)
    for epsilon in epsilons:
        privacy = ct.Privacy(epsilon=epsilon, delta=case.delta, clip=case.clip, experiment=seed)
        fit, seconds = timed(partial(ct.federate, case.users, case.loss, privacy=privacy))
        row = shared | from_releases(fit, score) | {
            "server": score(fit.units, fit.models), "home": score(fit.units, fit.at_home),
                                                    "rounds": fit.n_rounds,
            "time": seconds / reference, "seconds": seconds, "kind": fit.kind,
                                                    "n_clusters": fit.n_clusters}
        if case.groups is not None:
            row["ARI"] = adjusted_rand_score(case.groups, fit.labels)
        yield epsilon, row


def cell(rows: list[dict[str, Any]], name: str, form: str, sign: float = 1.0) -> str:
    """Mean and standard error over seeds."""
    values = sign * np.array([row[name] for row in rows if name in row], dtype=float)
    values = values[np.isfinite(values)]
    if not len(values):
        return ""
    error = f" ({values.std(ddof=1) / np.sqrt(len(values)):{form}})" if len(values) > 1 else ""
    return f"{values.mean():{form}}{error}"


def table(study: Study, seeds: range, everything: bool) -> None:
    """Run a study and print its tables."""
    epsilons = study.epsilons + study.rest * everything
    rows: dict[float, list[dict[str, Any]]] = defaultdict(list)
    by_area = False
    for number, seed in enumerate(seeds):
        case = study.case(seed)
        by_area = case.loss == "logistic"
        for epsilon, row in measured(case, epsilons, seed, number < study.plain):
            rows[epsilon].append(row)
    form, sign = (".3f", -1.0) if by_area else (".2f", 1.0)
    print(f"\n{study.title}\n\n| epsilon | {' | '.join(COLUMNS)} | ARI | ARI, no noise |")
    print("|---" * (len(COLUMNS) + 3) + "|")
    for epsilon in epsilons:
        some = rows[epsilon]
        cells = [cell(some, name, form, sign) for name in COLUMNS] + [cell(some, name, ".2f")
            for name in
                                                                     ("ARI", "ARI, no noise")]
        print(f"| {epsilon:g} | {' | '.join(cells)} |")
    print("\n| epsilon | seconds | time over no noise | rounds | rounds, no noise | beats local | "
          "kinds (groups) |")
    print("|---" * 7 + "|")
    for epsilon in epsilons:
        some = rows[epsilon]
        cells = [cell(some, name, ".2f") for name in ("seconds", "time")] + [cell(some, name,
            ".0f").split(" ")[0] for
                                                                            name in ("rounds",
                                                                                "rounds, no noise")]
        wins = sum(row["server"] < row["local"] for row in some)
        counted = Counter(f"{row['kind']} ({row['n_clusters']})" for row in some)
        kinds = ", ".join(f"{count} x {kind}" for kind, count in counted.most_common())
        print(f"| {epsilon:g} | {' | '.join(cells)} | {wins} of {len(some)} | {kinds} |",
              flush=True)


def studies(folder: Path) -> dict[str, list[Study]]:
    return {
        "synthetic": [Study(f"Synthetic groups, {title}", partial(synthetic, family), (4.0, 2.0),
                            (8.0, 1.0), 10)
                      for family, title in (("squared", "squared loss: mean squared error x 1000"),
                                            ("logistic", "logistic loss: mean AUC"))],
        "landmine": [Study("Landmine, 200 rows per field, delta = 1e-5: mean AUC",
                           partial(landmine, folder), (4.0,),
                           (8.0, 2.0, 1.0), 10)],
        "school": [Study("School, delta = 1e-3: mean squared error x 1000", partial(school, folder),
                         (6.0, 2.0),
                         (8.0, 4.0, 1.0), 3)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with school.npz and landmine.npz")
    parser.add_argument("--seeds", type=int, default=10, help="how many")
    parser.add_argument("--first", type=int, default=FIRST_SEED, help="the first seed")
    parser.add_argument("--all", action="store_true", help="more budgets")
    parser.add_argument("--only", nargs="+", choices=("synthetic", "landmine", "school"),
                        default=("synthetic", "landmine", "school"))
    options = parser.parse_args()
    warnings.simplefilter("ignore", ct.CoterieWarning)
    print(facts(), flush=True)
    for family in ("squared", "logistic"):  # compiles
        case = synthetic(family, 0)
        list(measured(case, (4.0,), 0, True))
    seeds = range(options.first, options.first + options.seeds)
    for name in options.only:
        for study in studies(options.folder)[name]:
            table(study, seeds, options.all)


if __name__ == "__main__":
    main()
