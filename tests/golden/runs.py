"""Golden outputs: what many runs give, from users or a table to models, certificates and scores.

    python tests/golden/runs.py --write                  # store what this tree gives
    python tests/golden/runs.py --check                  # compare this tree with what is stored
    python tests/golden/runs.py --compare ../other       # compare this tree with another checkout, bit by bit

Stored are labels exactly and numbers to 12 digits; `--check` wants 8 of them, because processors differ in the last
ones. `--compare` runs both trees on this machine and wants the same bits. Only public names are used here, so that the
script runs in trees whose modules have other names.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

STORED = Path(__file__).with_name("outputs.json")
DIGITS = 1e-8
Values = dict[str, Any]
RUNS: dict[str, Callable[[], Values]] = {}
SLOW: set[str] = set()  # those that take more than about a second


def run(function: Callable[[], Values]) -> Callable[[], Values]:
    """Enter a function into `RUNS`, by its name without its mark."""
    RUNS[function.__name__.removesuffix("__slow")] = function
    if function.__name__.endswith("__slow"):
        SLOW.add(function.__name__.removesuffix("__slow"))
    return function


# -- what is kept of a result


def of_solution(solution: Any) -> Values:
    return {"labels": solution.labels, "models": solution.models, "objective": solution.objective,
            "bound": solution.certificate.bound, "gap": solution.gap, "status": solution.status.name}


def of_path(path: Any) -> Values:
    return {"lams": path.lams, "labels": [point.labels for point in path.solutions],
            "models": [point.models for point in path.solutions],
            "objectives": [point.objective for point in path.solutions]}


def of_run(run: Any) -> Values:
    """Of a federated run: its solution, and its account."""
    up, down = (sum(line.bytes_up for line in run.history), sum(line.bytes_down for line in run.history))
    return {**of_solution(run), "rounds": run.n_rounds, "up": up, "down": down,
            "scores": run.scores, "aside": sorted(map(str, run.aside))}


def of_fit(fit: Any) -> Values:
    scores = fit.scores
    judged = {} if scores is None else {"fitted": scores.fitted, "alone": scores.alone, "pooled": scores.together}
    return {"kind": fit.kind, "labels": fit.labels, "models": fit.models, "centres": fit.centres, "lam": fit.lam,
            "coefficients": fit.coefficients, "gap": fit.gap, "objective": fit.solution.objective,
            "compared": [[kind, loss] for kind, loss in fit.compared.items()],
            "stability": None if fit.stability is None else fit.stability.index, **judged}


# -- inputs


def users_of(family: str = "logistic", **more: Any) -> Any:
    from coterie.datasets import clustered

    return clustered(family, **{"n_users": 12, "samples": 20, "seed": 3, **more}).users


def points_of(n: int = 40, **more: Any) -> Any:
    from coterie.datasets import gaussian_mixture

    return gaussian_mixture(n, n_features=2, separation=5.0, seed=4, **more).users


def table(task: str, n_users: int = 24, rows: int = 18) -> dict[str, list[Any]]:
    """A table with numbers, a category, dates and missing cells."""
    rng = np.random.default_rng(5)
    who = np.repeat(np.arange(n_users), rows)
    x, z = rng.normal(size=len(who)), rng.exponential(2.0, size=len(who))
    colour = rng.choice(["red", "green", "blue"], size=len(who))
    effect = np.array([-1.5, 0.5, 2.0])[np.arange(n_users) * 3 // n_users][who]
    t = effect * x + 0.1 * z + 0.4 * (colour == "red") + 0.2 * rng.normal(size=n_users)[who]
    y = {"regression": 20 + 3 * t + rng.normal(size=len(who)),
         "classification": np.where(t + rng.logistic(size=len(who)) > 0, "yes", "no"),
         "classes": np.array(["a", "b", "c"])[np.digitize(t + rng.logistic(size=len(who)), [-0.5, 0.8])],
         "counts": rng.poisson(np.exp(np.clip(0.4 * t, -3, 3)))}[task]
    size: list[Any] = z.round(3).tolist()
    for row in range(0, len(who), 37):
        size[row] = None
    days = [f"2024-{1 + k % 12:02d}-{1 + k % 28:02d}" for k in range(len(who))]
    return {"who": [f"u{k:02d}" for k in who], "x": x.round(6).tolist(), "size": size, "colour": colour.tolist(),
            "day": days, "y": np.asarray(y).tolist()}


def fit_of(task: str, **settings: Any) -> Values:
    import polars

    import coterie as ct
    from coterie.fitting import Settings

    data = polars.DataFrame(table("classes" if task == "classes" else task))
    named = "classification" if task == "classes" else task
    return of_fit(ct.fit_table(data, user="who", target="y", task=named, settings=Settings(**settings)))


# -- solvers, paths, certificates


def solved(family: str, lam: float, loss: Any = None, graph: Any = None, solver: Any = None, **more: Any) -> Values:
    import coterie as ct

    users = points_of() if family == "points" else users_of(family, **more)
    loss = loss or (ct.SquaredDistance() if family == "points" else ct.LOSSES[family](ridge=1e-2))
    options = {} if solver is None else {"solver": solver}
    return of_solution(ct.solve(ct.Problem(users, loss, lam, graph), **options))


@run
def solve_squared_hinge() -> Values:
    import coterie as ct
    from coterie.datasets import ellipses

    users = ellipses(users_per_cluster=5, samples=10, seed=1).users
    return of_solution(ct.solve(ct.Problem(users, ct.SquaredHinge(ridge=1e-3), lam=0.3)))


@run
def solve_logistic() -> Values:
    return solved("logistic", 0.02)


@run
def solve_squared() -> Values:
    return solved("squared", 0.03)


@run
def solve_huber() -> Values:
    return solved("huber", 0.02)


@run
def solve_poisson() -> Values:
    return solved("poisson", 0.05)


@run
def solve_multinomial() -> Values:
    return solved("multinomial", 0.02)


@run
def solve_points() -> Values:
    return solved("points", 0.02)


@run
def solve_huber_points() -> Values:
    import coterie as ct

    return solved("points", 0.01, ct.HuberDistance())


@run
def solve_lean() -> Values:
    import coterie as ct

    return solved("points", 0.02, solver=ct.Lean())


@run
def solve_personal() -> Values:
    import coterie as ct

    inner = ct.Logistic(ridge=1e-2)
    return solved("logistic", 0.01, ct.Personal(inner, covariance=np.diag([0.5, 0.1, 2.0])))


@run
def solve_on_weights() -> Values:
    import coterie as ct

    users, loss = users_of("squared", n_users=30), ct.Squared(ridge=1e-2)
    return solved("squared", 0.4, loss, ct.adaptive_graph(ct.LocalModels.of(users, loss), "wald", 4), n_users=30)


@run
def solve_wide() -> Values:
    return solved("logistic", 0.05, n_users=8, n_features=220, samples=25)


@run
def certify_other_models() -> Values:
    import coterie as ct

    problem = ct.Problem(users_of("logistic"), ct.Logistic(ridge=1e-2), lam=0.02)
    models = ct.solve(problem).models + 1e-3 * np.sin(np.arange(problem.n_users * problem.dim)).reshape(-1, problem.dim)
    proof = ct.certify(problem, models)
    return {"objective": proof.objective, "bound": proof.bound, "gap": proof.relative_gap,
            "stationarity": proof.stationarity, "complementarity": proof.complementarity}


@run
def path_of_points() -> Values:
    import coterie as ct

    return of_path(ct.solve_path(ct.Problem(points_of(), ct.SquaredDistance(), 0.0), n_lams=8))


@run
def path_of_models() -> Values:
    import coterie as ct

    problem = ct.Problem(users_of("logistic"), ct.Logistic(ridge=1e-2), 0.0)
    path = ct.solve_path(problem, n_lams=6)
    choice = ct.by_stability(problem, path=path, seed=1)
    return {**of_path(path), "chosen": choice.lam}


@run
def bounds_and_join() -> Values:
    import coterie as ct

    problem = ct.Problem(users_of("squared"), ct.Squared(ridge=1e-2), lam=0.05)
    solution = ct.solve(problem)
    joined = solution.personalize(users_of("squared", seed=8, n_users=4))
    bounds = ct.recovery_bounds(problem, solution.labels)
    top = ct.lam_max(problem)
    return {"lower": bounds.lower, "upper": bounds.upper, "top": [top.lower, top.upper], "joined": joined.models,
            "of": joined.clusters}


def groups_of(family: str) -> Values:
    import coterie as ct

    found = ct.find_groups(users_of(family, n_users=24, samples=30))
    return {"labels": found.labels, "models": found.models, "criterion": found.criterion, "kind": found.kind}


@run
def groups_squared() -> Values:
    return groups_of("squared")


@run
def groups_logistic() -> Values:
    return groups_of("logistic")


# -- federations with a given lam


def federated(algorithm: Any, family: str = "logistic", lam: float = 0.02, **more: Any) -> Values:
    import coterie as ct

    users = users_of(family, **more.pop("users", {}))
    return of_run(ct.federate(users, ct.LOSSES[family](ridge=1e-2), lam, algorithm=algorithm, **more))


@run
def federate_newton() -> Values:
    return federated(None, participation=0.4, held_out=0.2, seed=2)


@run
def federate_newton_with_faults() -> Values:
    import coterie as ct

    return federated(None, participation=0.6, seed=2, faults=ct.Faults(drop=0.2, late=0.2, twice=0.1, seed=5))


@run
def federate_newton_wide() -> Values:
    import coterie as ct

    return federated(ct.Newton(), lam=0.05, users={"n_users": 6, "n_features": 200, "samples": 20}, tol=1e-4)


@run
def federate_splitting() -> Values:
    import coterie as ct

    return federated(ct.Splitting(), participation=0.7, tol=1e-4)


@run
def federate_pdmm() -> Values:
    import coterie as ct

    return federated(ct.PDMM(rho=0.1), participation=0.5, max_rounds=60, seed=1)


@run
def federate_pdmm_printed() -> Values:
    import coterie as ct

    return federated(ct.PDMM.printed(rho=0.1), participation=0.5, max_rounds=40, seed=1)


@run
def federate_fedavg() -> Values:
    import coterie as ct

    return federated(ct.FedAvg(), max_rounds=15, participation=0.5)


@run
def federate_squared_penalty() -> Values:
    import coterie as ct

    return federated(ct.SquaredPenalty(), max_rounds=15)


@run
def federate_weights_and_start() -> Values:
    import coterie as ct

    return federated(None, "squared", 0.3, weights="wald", start=ct.FedAvg(), tol=1e-8)


@run
def federate_path() -> Values:
    import coterie as ct

    path = ct.federate_path(users_of("logistic"), ct.Logistic(ridge=1e-2), n_lams=3, held_out=0.2, tol=1e-4)
    return {"lams": path.lams, "runs": [of_run(run) for run in path.runs], "best": path.best().lam}


# -- fits


@run
def fit_regression__slow() -> Values:
    return fit_of("regression")


@run
def fit_classification__slow() -> Values:
    return fit_of("classification")


@run
def fit_classes__slow() -> Values:
    return fit_of("classes")


@run
def fit_counts__slow() -> Values:
    return fit_of("counts")


@run
def fit_huber__slow() -> Values:
    return fit_of("regression", loss="huber")


@run
def fit_squared_hinge__slow() -> Values:
    return fit_of("classification", loss="squared_hinge")


@run
def fit_by_score__slow() -> Values:
    return fit_of("regression", weights="wald", lam="score", n_lams=8)


@run
def fit_unit_weights() -> Values:
    return fit_of("regression", weights="unit", lam=0.05, n_lams=6)


@run
def fit_points() -> Values:
    from coterie.fitting import Settings, fit

    return of_fit(fit(points_of(60), Settings(task="clustering")))


@run
def fit_prepared__slow() -> Values:
    from coterie.fitting import Settings, fit

    users = users_of("squared", n_users=30, spread=0.3)
    found = fit(users, Settings(seed=3))
    return {**of_fit(found), "joined": found.personalize(users_of("squared", seed=8, n_users=4)).models}


@run
def fit_wide__slow() -> Values:
    """Users with more columns than their Hessians have room for."""
    import coterie as ct
    from coterie.fitting import Settings, fit

    users = users_of("logistic", n_users=6, n_features=180, samples=20, n_clusters=2, separation=8.0)
    classes = ct.Users.from_arrays(users.features, (users.targets + 1) / 2, users.owner)
    return of_fit(fit(classes, Settings(task="classification", lam="auto")))


@run
def federate_fit_regression() -> Values:

    return federated_fit(users_of("squared", n_users=18), participation=0.5, seed=1)


def federated_fit(users: Any, **more: Any) -> Values:
    import coterie as ct

    found = ct.federate(users, **more)
    up, down = (sum(line.bytes_up for line in found.history), sum(line.bytes_down for line in found.history))
    return {**of_fit(found), "rounds": found.n_rounds, "up": up, "down": down}


@run
def federate_fit_classification__slow() -> Values:
    return federated_fit(users_of("logistic", n_users=18, samples=30), participation=0.7, seed=1)


@run
def federate_fit_counts__slow() -> Values:
    return federated_fit(users_of("poisson", n_users=12, samples=30), loss="poisson", seed=1)


def private(family: str, clip: Any) -> Values:
    import coterie as ct

    users = users_of(family, n_users=20, samples=150, noise=0.3, separation=1.0)
    promise = ct.Privacy(epsilon=8.0, clip=clip, experiment=1)
    found = ct.federate(users, privacy=promise)
    return {**of_fit(found), "home": found.at_home, "up": sum(line.bytes_up for line in found.history)}


@run
def private_regression() -> Values:
    return private("squared", 3.0)


@run
def private_classification() -> Values:
    return private("logistic", None)


# -- estimators


@run
def estimate_classes__slow() -> Values:
    import coterie as ct

    users = users_of("logistic", n_users=15)
    model = ct.PersonalizedClassifier(random_state=2).fit(users.features, users.targets, users=users.owner)
    return {"probabilities": model.predict_proba(users.features[:40], users=users.owner[:40]), "labels": model.labels_}


@run
def estimate_clusters() -> Values:
    import coterie as ct

    model = ct.ConvexClustering(n_clusters=3).fit(points_of(50).features)
    return {"labels": model.labels_}


# -- storing and comparing


def plain(value: Any, exact: bool = False) -> Any:
    """Arrays as lists, numbers with 12 digits, or with all of them."""
    if isinstance(value, dict):
        return {name: plain(part, exact) for name, part in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist(), exact)
    if isinstance(value, (list, tuple)):
        return [plain(part, exact) for part in value]
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return float(value).hex() if exact else float(f"{value:.12g}") if np.isfinite(value) else repr(float(value))
    return value


def outputs(name: str, exact: bool = False) -> Any:
    """What a run gives, as it is stored."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return plain(RUNS[name](), exact)


def differences(new: Any, old: Any, place: str = "", digits: float = DIGITS) -> Iterator[str]:
    """Where two outputs differ: whole numbers and texts exactly, others by more than `digits` of the largest beside."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in {**old, **new}:
            if name not in new or name not in old:
                yield f"{place}.{name} is only in one of them"
            else:
                yield from differences(new[name], old[name], f"{place}.{name}", digits)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        numbers, others = (_numbers(each) for each in (new, old))
        if numbers is not None and others is not None:
            scale = max(float(np.abs(others).max(initial=0.0)), 1.0 if place.endswith("gap") else 1e-9)
            if float(np.abs(numbers - others).max(initial=0.0)) > digits * scale:
                yield f"{place}: {float(np.abs(numbers - others).max()) / scale:.1e} apart"
        else:
            for k, (one, other) in enumerate(zip(new, old, strict=True)):
                yield from differences(one, other, f"{place}[{k}]", digits)
    elif isinstance(old, float) and isinstance(new, (int, float)) and digits:
        if abs(new - old) > digits * max(abs(old), 1.0 if place.endswith("gap") else 1e-9):
            yield f"{place}: {new!r} instead of {old!r}"
    elif new != old:
        yield f"{place}: {str(new)[:80]} instead of {str(old)[:80]}"


def _numbers(value: Any) -> Any:
    """An array if these are numbers with a fraction somewhere."""
    try:
        array = np.array(value, dtype=float)
    except (TypeError, ValueError):
        return None
    flat = str(value)
    return array if array.size and np.isfinite(array).all() and ("." in flat or "e" in flat) else None


def exact_outputs(checkout: Path, names: list[str], folder: Path) -> dict[str, Any]:
    """What the code of a checkout gives, to the last bit."""
    file = folder / f"{len(list(folder.iterdir()))}.json"
    env = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    subprocess.run([sys.executable, __file__, "--exact", str(file), *names], env=env, check=True, cwd=folder)
    return dict(json.loads(file.read_text("utf-8")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="store what this tree gives")
    parser.add_argument("--check", action="store_true", help="compare this tree with what is stored")
    parser.add_argument("--compare", type=Path, metavar="CHECKOUT", help="compare with another checkout, bit by bit")
    parser.add_argument("--exact", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", help="only these runs")
    options = parser.parse_args()
    names = options.names or list(RUNS)
    if options.exact is not None:
        options.exact.write_text(json.dumps({name: outputs(name, exact=True) for name in names}), "utf-8")
        return 0
    if options.write:
        stored = json.loads(STORED.read_text("utf-8")) if options.names else {}
        stored |= {name: outputs(name) for name in names}
        lines = [f"{json.dumps(name)}: {json.dumps(stored[name])}" for name in RUNS if name in stored]
        STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
        return 0
    if options.compare is not None:
        with tempfile.TemporaryDirectory() as folder:
            new, old = (exact_outputs(tree.resolve(), names, Path(folder))
                        for tree in (Path(__file__).parents[2], options.compare))
        found = {name: list(differences(new[name], old[name], digits=0.0)) for name in names}
    else:
        stored = json.loads(STORED.read_text("utf-8"))
        found = {name: list(differences(outputs(name), stored[name])) for name in names}
    for name, lines in found.items():
        for line in lines[:5]:
            print(f"{name}{line}")
    print(f"{sum(map(bool, found.values()))} of {len(found)} runs differ")
    return int(any(found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
