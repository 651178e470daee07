"""Federated algorithms side by side: rounds and bytes, up and down, to a certified relative gap of
1e-6.

    python benchmarks/federated.py [--quick] [--parts experiment,participation,large,fits]
    python benchmarks/federated.py --curve docs/images/algorithm-1.png

experiment     the paper's third: 30 users, squared hinge, lam = 0.02, 40 % of the users per round;
               its Algorithm 1 as
               printed, corrected, and the other algorithms
participation  all, 40 % and 10 % of the users per round
large          10,000 users, 10 coordinates, a graph of 10 nearest neighbours
fits           nothing given: classes and counts of users in groups, in one, and varying; bytes as
               symmetric matrices of a model's length

Rounds and bytes are those of the complete run, including certificates: a run ends when the
federation itself has proved the gap. With `--curve` the gap in each round is evaluated outside the
federation, and this is not counted.
"""

from __future__ import annotations

import os

# Before NumPy is imported, which reads them once.
for _library in ("OPENBLAS", "OMP", "MKL", "NUMBA"):
    os.environ[f"{_library}_NUM_THREADS"] = "1"

import argparse  # noqa: E402
import time  # noqa: E402
import warnings  # noqa: E402
from collections.abc import Callable, Sequence  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any, NamedTuple  # noqa: E402

import numpy as np  # noqa: E402
from machine import facts  # noqa: E402

import coterie as ct  # noqa: E402
from coterie.datasets import clustered, ellipses  # noqa: E402
from coterie.federated import Algorithm, Data, Federation, LocalRuntime  # noqa: E402

LAM, SHARE, TOL = 0.02, 0.4, 1e-6
LOSS = ct.SquaredHinge(ridge=1e-3)
RHOS = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003)


def stiff(rho: float, **changes: Any) -> ct.PDMM:
    """The corrected algorithm with rho = eta, and tau and nu as in the paper."""
    return ct.PDMM(rho=rho, eta=rho, eta_z=rho, tau=0.8, nu=0.2, **changes)


@dataclass(frozen=True)
class Case:
    """One line of a table."""

    name: str
    algorithm: Algorithm
    participation: float = SHARE
    max_rounds: int | None = None


class Run(NamedTuple):
    """The cost of a run."""

    rounds: int
    up: int
    down: int
    gap: float


def experiment(quick: bool) -> None:
    """The paper's Experiment 3: 40 % of the users per round, drawn uniformly at random."""
    cap, seeds = 4_000 if quick else 20_000, range(1 if quick else 3)
    printed = {f"symmetric, tau and nu as printed, rho = eta = {rho:g}": rho for rho in RHOS}
    chosen = {f"PDMM(rho={rho:g})": rho for rho in RHOS if rho > 0.003}
    sweep = [Case(name, stiff(rho), max_rounds=cap) for name, rho in printed.items()]
    sweep += [Case(name, ct.PDMM(rho=rho), max_rounds=cap) for name, rho in chosen.items()]
    results = measured(sweep, seeds)

    def best(names: dict[str, float]) -> float:
        """The rho with the fewest rounds."""
        return names[min(names, key=lambda name: np.mean([run.rounds for run in results[name]]))]

    one, two = best(printed), best(chosen)
    # The same iterates as with the edges at the server.
    users: dict[str, Any] = {"edge_state": "users"}
    cases = [
        Case("PDMM.printed()", ct.PDMM.printed(), max_rounds=cap),
        Case("PDMM.printed(), all users in every round", ct.PDMM.printed(), participation=1.0,
             max_rounds=cap),
        Case("PDMM.printed(rho=0.1, eta=0.1, eta_z=0.1)", ct.PDMM.printed(rho=0.1, eta=0.1,
            eta_z=0.1),
             max_rounds=4_000),
        *(Case(f"symmetric, tau and nu as printed, rho = eta = {rho:g}, edges at the users",
               stiff(rho, **users),
               max_rounds=cap) for rho in (10.0, 1.0, 0.3) if not (quick and rho > 1)),
        *sweep,
        Case("PDMM()", ct.PDMM()),
        Case(f"best rho = eta, {one:g}, tau and nu as printed, edges at the users",
             stiff(one, **users)),
        Case(f'PDMM(edge_state="users", rho={two:g}), the best rho', ct.PDMM(rho=two, **users)),
        Case('PDMM(edge_state="users")', ct.PDMM(**users)),
        Case('PDMM(edge_state="users", quiet=5)', ct.PDMM(quiet=5, **users)),
        Case('PDMM(pairs="unordered")', ct.PDMM(pairs="unordered")),
        Case('PDMM(bregman="linear")', ct.PDMM(bregman="linear")),
        Case("Splitting()", ct.Splitting()),
        Case('Newton(select="random")', ct.Newton(select="random")),
        Case("Newton()", ct.Newton()),
    ]
    results |= measured([case for case in cases if case.name not in results], seeds)
    print(f"\nExperiment 3: {SHARE:.0%} of 30 users per round unless stated otherwise, lam = "
          f"{LAM:g}, to {TOL:g}\n")
    table(cases, results, "Newton()")


def participation(quick: bool) -> None:
    shares = (1.0, 0.4, 0.1)
    cases = [Case(f"{type(algorithm).__name__}(), {share:.0%}", algorithm, participation=share)
             for algorithm in (ct.PDMM(), ct.Splitting(), ct.Newton()) for share in shares]
    print(f"\nThe share of users per round: same data, to {TOL:g}\n")
    table(cases, measured(cases, range(1 if quick else 3)), f"Newton(), {SHARE:.0%}")


def measured(cases: Sequence[Case], seeds: range) -> dict[str, list[Run]]:
    """One run per seed of every case, by its name."""
    problems = {seed: paper(seed) for seed in seeds}
    return {case.name: [take(case, problems[seed], seed) for seed in seeds] for case in cases}


def table(cases: Sequence[Case], results: dict[str, list[Run]], beside: str) -> None:
    """One line per case: means over the seeds, and their ranges."""
    smallest = np.mean([run.up + run.down for run in results[beside]])
    print("| algorithm | rounds | kB up | kB down | bytes / Newton() | gap |")
    print("|---|---|---|---|---|---|")
    for case in cases:
        runs = results[case.name]
        gaps = np.array([run.gap for run in runs])
        rounds = spread([run.rounds for run in runs])
        if missed := int((gaps > TOL).sum()):
            rounds = f"not within {case.max_rounds:,}" + (f", {missed} of {len(gaps)}" if missed
                                                          < len(gaps) else "")
        up, down = (spread([getattr(run, way) / 1e3 for run in runs]) for way in ("up", "down"))
        ratio = number(float(np.mean([run.up + run.down for run in runs]) / smallest))
        low, high = f"{gaps.min():.1e}", f"{gaps.max():.1e}"
        gap = low if low == high else f"{low} to {high}"
        print(f"| {case.name} | {rounds} | {up} | {down} | {ratio} | {gap} |", flush=True)


def spread(values: Sequence[float]) -> str:
    """The mean, and the range if the values differ."""
    mean, low, high = map(number, (float(np.mean(values)), min(values), max(values)))
    return mean if low == high else f"{mean} ({low} to {high})"


def number(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def paper(seed: int) -> ct.Problem:
    users = ellipses(users_per_cluster=10, samples=0.85, seed=seed).users
    return ct.Problem(users, LOSS, LAM)


def take(case: Case, problem: ct.Problem, seed: int) -> Run:
    run = ct.federate(problem.users, problem.loss, problem.lam, algorithm=case.algorithm, seed=seed,
                      tol=TOL,
                      participation=case.participation, max_rounds=case.max_rounds)
    return Run(run.n_rounds, run.ledger.bytes_up, run.ledger.bytes_down, run.gap)


def large(quick: bool) -> None:
    n = 2_000 if quick else 10_000
    data = clustered("logistic", n_users=n, n_clusters=5, samples=50, n_features=9, separation=3.0,
                     seed=0)
    loss = ct.Logistic(ridge=1e-2)
    graph = ct.Graph.knn(ct.LocalModels.of(data.users, loss, ridge=0.03).models, k=10)
    print(f"\n{n:,} users of 5 kinds, 10 coordinates, {graph.n_edges:,} edges, logistic, lam = "
          f"0.04, to {TOL:g}\n")
    print("| users per round | CPU seconds | rounds | bytes up per user | bytes down per user | "
          "groups | gap |")
    print("|---|---|---|---|---|---|---|")
    for share in (1.0, 0.2):
        began = time.process_time()  # time of other programs is not counted
        run = ct.federate(data.users, loss, 0.04, graph=graph, participation=share, tol=TOL)
        seconds = time.process_time() - began
        many = int((np.bincount(run.labels) > 1).sum())
        single = run.n_clusters - many
        print(f"| {share:.0%} | {seconds:.1f} | {run.n_rounds} | {run.ledger.bytes_up / n:,.0f} | "
              f"{run.ledger.bytes_down / n:,.0f} | {many} and {single} user(s) alone | "
              f"{run.gap:.1e} |", flush=True)


# The picture


class Curve(NamedTuple):
    """The convergence of a method, evaluated outside the federation."""

    rounds: list[int]
    # Relative distance of the objective from the optimum, proved by the optimum's duals.
    gaps: list[float]
    apart: list[float]  # largest ||mu_ij + mu_ji||; nan if the method has no such duals


def observe(problem: ct.Problem, algorithm: Algorithm, share: float, last: int,
            best: ct.Solution) -> Curve:
    """Run a method and evaluate its point at geometrically spaced rounds."""
    federation = Federation.of(problem, participation=ct.Participation(fraction=share))
    method = algorithm.on(federation)
    state = method.begin(np.zeros((problem.n_users, problem.dim)))
    runtime = LocalRuntime(Data.of(problem.users, problem.loss))
    marks, curve = set(np.geomspace(1, last, 120).round().astype(int).tolist()), Curve([], [], [])
    for turn in range(1, last + 1):
        state = method.tell(state, runtime.exchange(method.ask(state)).batches[0])
        if turn in marks:
            curve.rounds.append(turn)
            curve.gaps.append(ct.certify(problem, method.point(state)[0], best.duals).relative_gap)
            curve.apart.append(asymmetry(method, state))
    return curve


def asymmetry(method: Any, state: Any) -> float:
    """The largest ||mu_ij + mu_ji||."""
    if not hasattr(state, "dual"):
        return np.nan
    pairs, n = method.pairs(state), method.federation.n_users
    dual = np.zeros((n, n, method.federation.dim))
    dual[pairs.heads, pairs.tails] = state.dual
    return float(np.linalg.norm(dual + dual.swapaxes(0, 1), axis=2).max())


def draw(path: Path, quick: bool) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    problem = paper(0)
    best = ct.solve(problem, tol=1e-13)
    cap = 4_000 if quick else 20_000
    server: dict[str, Any] = {"edge_state": "server"}  # same iterates as at the users, but faster
    cases: list[tuple[str, str, str, Algorithm, float, int]] = [
        ("as printed, 40 %", "#b2182b", "-", ct.PDMM.printed(**server), 0.4, cap),
        ("as printed, rho = eta = 0.1, 40 %", "#ef8a62", "-", ct.PDMM.printed(rho=0.1, eta=0.1,
            eta_z=0.1, **server),
         0.4, 4_000),
        ("as printed, 100 %", "#b2182b", ":", ct.PDMM.printed(**server), 1.0, cap),
        ("symmetric, 40 %", "#2166ac", "-", ct.PDMM(), 0.4, 2_000),
        ("Splitting, 40 %", "#1b7837", "-", ct.Splitting(), 0.4, 80),
        ("Newton, 40 %", "#000000", "-", ct.Newton(), 0.4, 14),
    ]
    curves = {name: observe(problem, algorithm, share, last, best) for name, _, _, algorithm, share,
              last in cases}
    plt.rcParams.update({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False})
    figure, (top, bottom) = plt.subplots(2, 1, figsize=(9, 7), sharex=True, height_ratios=(3, 2),
                                         facecolor="white",
                                         layout="constrained")
    for name, colour, style, _, _, _ in cases:
        curve = curves[name]
        gaps = np.array(curve.gaps)
        shown = slice(0, int(np.argmax(gaps < 1e-11)) + 1 if (gaps < 1e-11).any() else len(gaps))
        top.loglog(curve.rounds[shown], gaps[shown], color=colour, linestyle=style, linewidth=1.8,
                   label=name)
    top.axhline(TOL, color="#999999", linewidth=0.8)
    top.set_ylim(1e-11, 2)
    top.set_ylabel("relative gap")
    top.set_title("Distance from the optimum of (C)", loc="left", fontsize=11)
    top.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    for name, colour, style, _, _, _ in cases[:4]:
        curve = curves[name]
        symmetric = name.startswith("symmetric")
        bottom.plot(curve.rounds, np.array(curve.apart) / LAM, color=colour,
                    linestyle="--" if symmetric else style,
                    linewidth=1.8, label=f"{name}\n(no effect on its steps)" if symmetric else name)
    bottom.axhline(2.0, color="#999999", linewidth=0.8)
    bottom.text(1.01, 2.0, "2: the two are equal", transform=bottom.get_yaxis_transform(),
                va="center", color="#666666")
    bottom.set_ylim(-0.15, 1.05 * np.nanmax(curves["as printed, 40 %"].apart) / LAM)
    bottom.set_ylabel(r"largest $\Vert\mu_{ij} + \mu_{ji}\Vert$ / lam")
    bottom.set_xlabel("round")
    bottom.set_title("How far a pair's two duals are from balance", loc="left", fontsize=11)
    bottom.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    bottom.set_xlim(1, cap)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    print("| algorithm | first round in the figure below 1e-6 | gap at the end | largest ‖mu_ij + "
          "mu_ji‖ at the end |")
    print("|---|---|---|---|")
    for name, *_, last in cases:
        curve = curves[name]
        below = next((turn for turn, gap in zip(curve.rounds, curve.gaps, strict=True) if gap
                      <= TOL), None)
        apart = "" if np.isnan(curve.apart[-1]) else f"{curve.apart[-1]:.2g}"
        print(f"| {name} | {below or f'not within {last:,}'} | {max(curve.gaps[-1], 1e-15):.1e} | "
              f"{apart} |")
    print(f"Saved {path}")


def drawn(kind: str, p: int, groups: int, spread: float, seed: int) -> ct.Users:
    """30 users with 60 rows of p features, in groups of models, which vary by `spread` inside."""
    rng, owner = np.random.default_rng([seed, p, groups]), np.repeat(np.arange(30), 60)
    size = (1.0 if kind == "classes" else 0.35) / np.sqrt(p / 3)
    models = size * (rng.normal(size=(groups, p))[np.arange(30) % groups]
                     + spread * rng.normal(size=(30, p)))
    X = rng.normal(size=(len(owner), p))
    margins = (X * models[owner]).sum(axis=1) + 0.3
    y = np.where(rng.random(len(owner)) < 1 / (1 + np.exp(-margins)), 1.0, -1.0) \
        if kind == "classes" else rng.poisson(np.exp(np.minimum(margins, 4.0))).astype(float)
    return ct.Users.from_arrays(X, y, owner)


def fits(quick: bool) -> None:
    print("\n| targets | features | rounds | matrices up per user |")
    print("|---|---|---|---|")
    for kind in ("classes", "counts"):
        for p in (3, 10):
            rounds, sizes = list[int](), list[float]()
            for groups, spread in ((3, 0.0), (1, 0.0), (1, 0.5), (3, 0.3)):
                for seed in range(1 if quick else 4):
                    users = drawn(kind, p, groups, spread, 50 + seed)
                    run = ct.federate(users, None if kind == "classes" else "poisson")
                    up = sum(line.bytes_up for line in run.history) / users.n_users
                    rounds.append(run.n_rounds)
                    sizes.append(up / (4.0 * (p + 1) * (p + 2)))
            print(f"| {kind} | {p} | {min(rounds)} to {max(rounds)} | {min(sizes):.1f} to "
                  f"{max(sizes):.1f} |")


PARTS: dict[str, Callable[[bool], None]] = {
    "experiment": experiment, "participation": participation, "large": large, "fits": fits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true",
                        help="one seed, fewer rounds, fewer users: about two minutes")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--curve", type=Path, metavar="PNG",
                        help="draw the gap over the rounds, and nothing else")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - PARTS.keys():
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    warnings.simplefilter("ignore", ct.CoterieWarning)  # a few of 10,000 users see one class only
    print(facts())
    if options.curve is not None:
        draw(options.curve, options.quick)
        return
    take(Case("", ct.Newton()), paper(0), 0)  # compiles
    for part in parts:
        PARTS[part](options.quick)


if __name__ == "__main__":
    main()
