"""Heads on embeddings: models with more coordinates than a user has rows; coterie and other
solvers, on one core.

    python benchmarks/wide.py [--quick] [--tasks W1,W2,W3,W4,W5,conic,federated] [--seeds tuning
    fresh]
                              [--limit 300] [--out benchmarks/results]

W1, W2  100 users, 384 and 768 features, two classes        W3  384 features, ten classes
W4      512 features, 62 classes (tol 1e-4)                 W5  1,000 users, two classes, a graph of
        neighbours
conic   20 users, 384 features, two classes: SCS and Clarabel through CVXPY
federated   the same models from a federation in this process: rounds, and bytes per user and round

Each task runs at three lams: many models, groups, nearly one model. The data are drawn in two ways,
"spectrum" and "uneven" (see `spectrum` and `uneven`). Settings were chosen on the tuning seeds, and
the fresh seeds were not used for that. Times are CPU seconds with the certificate; `gap` is that of
`coterie.certify`. Memory is the peak of a separate process, with the data. L-BFGS minimises the
same objective with sqrt(||x_i - x_j||^2 + mu^2) for the norms, for ever smaller mu, until the true
objective is within 1e-5 (W4: 1e-4) of coterie's; it certifies nothing. It ends at the time limit of
25 times coterie's time, which is at least 20 s and at most `--limit`.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from machine import facts
from scipy import optimize
from solvers import in_child, peak_memory  # limits the number of threads, and forks
from tables import Row, head

import coterie as ct

OURS, LBFGS = "coterie", "L-BFGS, smoothed"
TUNING, FRESH = (0,), (101,)
# Of the smallest lam at which all users share one model.
LAMS = {"many": 0.5, "groups": 0.9, "nearly one": 0.97}
# Seconds for coterie; for peers, and times coterie's.
OUR_LIMIT, AT_LEAST, TIMES = 900.0, 20.0, 25.0
COLUMNS = ("task", "data", "seed", "N", "d", "classes", "lam", "solver", "CPU s", "gap", "error",
           "groups",
           "/ coterie", "MiB", "outcome")
FEDERATED = ("algorithm", "data", "N", "d", "classes", "lam", "CPU s", "gap", "groups", "rounds",
             "models/round",
             "off", "outcome")


class Task(NamedTuple):
    """Users with heads on embeddings, and how accurate the answer should be."""

    name: str
    n_users: int
    n_features: int
    n_classes: int
    tol: float = 1e-6
    neighbours: int = 0  # of the graph; 0: all pairs


TASKS = (Task("W1", 100, 384, 2), Task("W2", 100, 768, 2), Task("W3", 100, 384, 10),
         Task("W4", 100, 512, 62, 1e-4),
         Task("W5", 1000, 384, 2, neighbours=10))
CONIC = Task("conic", 20, 384, 2)
WIRE = (Task("federated", 30, 384, 2), Task("federated", 100, 384, 2),
        Task("federated", 30, 384, 10, 1e-4))
QUICK = (Task("W1", 20, 96, 2), Task("W3", 12, 48, 4), Task("W5", 60, 96, 2, neighbours=5))
QUICK_CONIC, QUICK_WIRE = Task("conic", 6, 96, 2), \
    (Task("federated", 12, 96, 2), Task("federated", 8, 48, 4, 1e-4))


def spectrum(task: Task, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Unit embeddings whose coordinates have decaying variance; four groups, each with its own
    head; 50 rows each.
    """
    n, d, n_rows, rng = task.n_users, task.n_features, 50, np.random.default_rng(seed)
    rows = rng.standard_normal((n, n_rows, d)) * (1.0 + np.arange(d)) ** -0.5
    rows /= np.linalg.norm(rows, axis=2, keepdims=True)
    heads = rng.standard_normal((4, task.n_classes, d))[np.arange(n) % 4]
    scores = 8.0 * rows @ heads.swapaxes(1, 2) + rng.gumbel(size=(n, n_rows, task.n_classes))
    return rows.reshape(-1, d), scores.argmax(axis=2).ravel(), np.repeat(np.arange(n), n_rows)


def uneven(task: Task, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """20 to 120 rows per user around one point per class, of length 3; three groups permute the
    classes (of two classes two can), and 5 % of the labels are random.
    """
    n, d, n_classes, rng = task.n_users, task.n_features, task.n_classes, \
        np.random.default_rng(seed)
    owner = np.repeat(np.arange(n), rng.integers(20, 121, n))
    means, scales = rng.standard_normal((n_classes, d)), rng.lognormal(sigma=0.5, size=d)
    named = np.stack([np.roll(np.arange(n_classes), shift) for shift in range(min(3, n_classes))])
    true = rng.integers(n_classes, size=owner.size)
    rows = scales * (0.25 * means[true] + rng.standard_normal((owner.size, d)))
    rows *= 3.0 / np.linalg.norm(rows, axis=1, keepdims=True)
    y = np.where(rng.random(owner.size) < 0.05, rng.integers(n_classes, size=owner.size),
                 named[owner % len(named), true])
    return rows, y, owner


DATA: dict[str, Callable[[Task, int], tuple[np.ndarray, np.ndarray, np.ndarray]]] = {
    "spectrum": spectrum, "uneven": uneven}


def build(task: Task, data: str, seed: int, lam: float) -> ct.Problem:
    """The problem of a task. Neighbours are those of the users' mean embeddings, each with the sign
    of its label.
    """
    rows, y, owner = DATA[data](task, seed)
    two = task.n_classes == 2
    users = ct.Users.from_arrays(rows, 2.0 * y - 1.0 if two else y.astype(float), owner)
    loss = ct.Logistic() if two else ct.Multinomial(n_classes=task.n_classes)
    graph = None
    if task.neighbours:
        signed = users.targets[:, None] * users.features
        means = np.add.reduceat(signed, users.offsets[:-1], axis=0) / users.counts[:, None]
        graph = ct.Graph.knn(means, k=task.neighbours)
    return ct.Problem(users, loss, lam=lam, graph=graph)


def largest_lam(make: Callable[..., ct.Problem], solved: Callable[[], None]) -> Row:
    problem = make(lam=1.0)
    began = time.process_time()
    return {"lam_max": ct.lam_max(problem, rtol=1e-3).upper, "seconds": time.process_time() - began}


def ours(make: Callable[[], ct.Problem], tol: float, solved: Callable[[], None]) -> Row:
    """coterie's time, with its certificate; judged again afterwards, on a problem that no solver
    has seen.
    """
    times: list[float] = []
    peaks: list[float] = []
    while not times or (len(times) < 3 and sum(times) < 2.0):
        problem = make()
        began = time.process_time()
        solution = ct.solve(problem, tol=tol)
        times.append(time.process_time() - began)
        peaks.append(peak_memory())
    solved()
    certificate = ct.certify(make(), solution.models, solution.duals)
    return {"seconds": min(times), "peak": peaks[0], "gap": certificate.relative_gap,
            "objective": certificate.objective, "groups": solution.n_clusters,
            "status": "certified" if certificate.relative_gap <= tol else "above tol"}


def conic(make: Callable[[], ct.Problem], engine: str, tol: float, optimum: float,
          solved: Callable[[], None]) -> Row:
    problem = make()
    began = time.process_time()
    point = ct.Reference(engine=engine, fuse=False,
                         accuracy=1e-8 if engine == "CLARABEL" else tol).run(problem, tol)
    row: Row = {"seconds": time.process_time() - began, "peak": peak_memory()}
    solved()
    error = problem.objective(point.models) / optimum - 1.0
    return row | {"gap": ct.certify(problem, point.models, point.duals).relative_gap,
                  "error": error, "status": "ended"}


class _Enough(StopIteration):
    """Ends L-BFGS: accurate enough, or out of time."""


class Smoothed:
    """The problem with sqrt(||x_i - x_j||^2 + mu^2) for the norms, by L-BFGS with continuation in
    mu.

    For all pairs no difference is formed: distances and pulls are products of matrices.
    """

    def __init__(self, problem: ct.Problem, target: float, limit: float) -> None:
        self.problem, self.target, self.limit = problem, target, limit
        self.shape, self.mu, self.steps, self.judging, self.status = (problem.n_users,
            problem.dim), 1.0, 0, 0.0, ""
        self.began = time.process_time()

    @property
    def spent(self) -> float:
        """Seconds without those for the true objective, which a user would not compute."""
        return time.process_time() - self.began - self.judging

    def penalty(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        graph, radii = self.problem.graph, self.problem.radii
        if graph.is_complete:
            x = x - x.mean(axis=0)
            gram = x @ x.T
            squares = np.diag(gram)[:, None] + np.diag(gram) - 2.0 * gram
            lengths = np.sqrt(np.maximum(squares, 0.0) + self.mu**2)
            np.fill_diagonal(lengths, np.inf)
            pulls = radii[0] / lengths
            np.fill_diagonal(lengths, 0.0)
            return 0.5 * radii[0] * float(lengths.sum()), pulls.sum(axis=1)[:, None] * x - pulls @ x
        differences = graph.differences(x)
        lengths = np.sqrt(np.einsum("ed,ed->e", differences, differences) + self.mu**2)
        return float(radii @ lengths), graph.divergence((radii / lengths)[:, None] * differences)

    def value(self, flat: np.ndarray) -> tuple[float, np.ndarray]:
        x = flat.reshape(self.shape)
        values, gradients, _ = self.problem.loss.evaluate(self.problem.samples, x, 1)
        penalty, pulls = self.penalty(x)
        return float(values.sum()) + penalty, (gradients + pulls).ravel()

    def check(self, flat: np.ndarray) -> None:
        self.steps += 1
        if self.spent > self.limit:
            self.status = f"time limit, {self.limit:.0f} s"
        if self.steps % 10 == 0 or self.status:
            began = time.process_time()
            self.objective = self.problem.objective(flat.reshape(self.shape))
            self.judging += time.process_time() - began
            if self.objective <= self.target:
                self.status = "as accurate"
        if self.status:
            raise _Enough

    def solve(self) -> None:
        x = np.zeros(self.shape[0] * self.shape[1])
        for stage in range(12):
            x = optimize.minimize(self.value, x, jac=True, method="L-BFGS-B", callback=self.check,
                                  options={"maxcor": 20, "maxiter": 20_000, "maxfun": 10**6,
                                           "ftol": 1e-9,
                                           "gtol": 0.0}).x
            if self.status:
                return
            spread = x.reshape(self.shape) - x.reshape(self.shape).mean(axis=0)
            scale = float(np.sqrt((spread**2).sum(axis=1).mean())) + 1e-3 * float(np.abs(x).max())
            self.mu = min(self.mu / 5.0, scale * 10.0 ** -(1 + stage / 2))
        self.status = "stopped before"


def lbfgs(make: Callable[[], ct.Problem], optimum: float, accuracy: float, limit: float,
          solved: Callable[[], None]) -> Row:
    smoothed = Smoothed(make(), optimum + accuracy * abs(optimum), limit)
    smoothed.solve()
    row = {"seconds": smoothed.spent, "peak": peak_memory(), "status": smoothed.status}
    solved()
    return row | {"error": max(smoothed.objective / optimum - 1.0, 0.0)}


def rows_of(task: Task, data: str, seed: int, limit: float) -> Iterator[Row]:
    """coterie and its peers on a task, at three lams."""
    make = partial(build, task, data, seed)
    about = {"task": task.name, "data": data, "seed": seed, "n": task.n_users, "d": task.n_features,
             "classes": task.n_classes}
    top = in_child(partial(largest_lam, make), OUR_LIMIT)
    yield about | top | {"lam": "", "solver": "lam_max", "status": top.get("status", "")}
    for name, share in LAMS.items() if "lam_max" in top else ():
        at = partial(make, lam=share * top["lam_max"])
        first = in_child(partial(ours, at, task.tol), OUR_LIMIT)
        yield about | first | {"lam": name, "solver": OURS}
        if "seconds" not in first:
            continue
        seconds = min(max(TIMES * first["seconds"], AT_LEAST), limit)
        peers = {LBFGS: partial(lbfgs, at, first["objective"], max(task.tol, 1e-5), seconds)}
        if task.name == "conic":
            peers |= {engine: partial(conic, at, engine, task.tol, first["objective"])
                      for engine in ("SCS", "CLARABEL")}
        for solver, work in peers.items():
            row = in_child(work, seconds + 60.0 if solver == LBFGS else seconds)
            ratio = row["seconds"] / first["seconds"] if "seconds" in row else seconds \
                / first["seconds"]
            yield about | row | {"lam": name, "solver": solver, "ratio": ratio}


def federated(task: Task, data: str, seed: int) -> Iterator[Row]:
    """The same models from a federation, beside those of `solve`; bytes per user and round in units
    of one model.
    """
    make = partial(build, task, data, seed)
    top = in_child(partial(largest_lam, make), OUR_LIMIT)
    for name, share in LAMS.items() if "lam_max" in top else ():
        for algorithm in (ct.Newton(), ct.Splitting()):
            row = in_child(partial(over_the_wire, partial(make, lam=share * top["lam_max"]),
                                   algorithm, task.tol),
                           OUR_LIMIT)
            yield {"algorithm": algorithm.name, "data": data, "n": task.n_users,
                   "d": task.n_features,
                   "classes": task.n_classes, "lam": name} | row


def over_the_wire(make: Callable[[], ct.Problem], algorithm: object, tol: float,
                  solved: Callable[[], None]) -> Row:
    problem = make()
    began = time.process_time()
    run = ct.federate(problem.users, problem.loss, lam=problem.lam, algorithm=algorithm, tol=tol)
    seconds = time.process_time() - began
    most = max((line.bytes_up + line.bytes_down) / max(line.asked, 1) for line in run.history) \
        / (8 * problem.dim)
    objective = ct.solve(make(), tol=tol).objective
    return {"seconds": seconds, "gap": run.certificate.relative_gap, "groups": run.n_clusters,
            "rounds": run.n_rounds,
            "most": most, "off": abs(run.objective / objective - 1.0),
            "status": "certified" if run.certificate.relative_gap <= tol else "above tol"}


def show(row: Row, keys: tuple[tuple[str, str], ...]) -> str:
    return "| " + " | ".join("-" if row.get(key) is None else format(row[key], form) for key,
                             form in keys) + " |"


LINE = (("task", ""), ("data", ""), ("seed", ""), ("n", ""), ("d", ""), ("classes", ""),
        ("lam", ""), ("solver", ""),
        ("seconds", ".3f"), ("gap", ".1e"), ("error", ".1e"), ("groups", ""), ("ratio", ".1f"),
        ("peak", ".0f"),
        ("status", ""))
WIRE_LINE = (("algorithm", ""), ("data", ""), ("n", ""), ("d", ""), ("classes", ""), ("lam", ""),
             ("seconds", ".2f"),
             ("gap", ".1e"), ("groups", ""), ("rounds", ""), ("most", ".1f"), ("off", ".1e"),
             ("status", ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="W1,W2,W3,W4,W5,conic,federated")
    parser.add_argument("--quick", action="store_true", help="small shapes: about two minutes")
    parser.add_argument("--seeds", nargs="+", choices=("tuning", "fresh"), default=("fresh",))
    parser.add_argument("--data", nargs="+", choices=tuple(DATA), default=tuple(DATA))
    parser.add_argument("--limit", type=float, default=300.0, help="most seconds of a peer")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=ct.CoterieWarning)
    chosen, rows = options.tasks.split(","), []
    seeds = [seed for name in options.seeds for seed in (TUNING if name == "tuning" else FRESH)]
    print(facts())
    print(f"Seeds for tuning: {TUNING}; fresh: {FRESH}; this run: {seeds}\n\n{head(COLUMNS)}")
    for task in (*QUICK, QUICK_CONIC) if options.quick else (*TASKS, CONIC):
        for data, seed in ((data, seed) for data in options.data for seed in seeds
                           if task.name in chosen):
            for row in rows_of(task, data, seed, options.limit):
                rows.append(row)
                print(show(row, LINE), flush=True)
    if "federated" in chosen:
        print("\n`models/round`: most bytes of a round, up and down, in models of one "
              f"user\n\n{head(FEDERATED)}")
        for task in QUICK_WIRE if options.quick else WIRE:
            for data, seed in ((data, seed) for data in options.data for seed in seeds):
                for row in federated(task, data, seed):
                    rows.append(row | {"task": "federated", "seed": seed})
                    print(show(row, WIRE_LINE), flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "wide.json").write_text(json.dumps({"machine": facts(), "rows": rows}, indent=1,
                                                      default=float))


if __name__ == "__main__":
    main()
