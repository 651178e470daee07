"""What `solvers.py` prints and draws, from its rows."""

from __future__ import annotations

import os
import platform
import resource
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from peers import CLARABEL, CUT_PURSUIT, NATURAL, OURS, SCS
from tasks import TITLES

Row = dict[str, Any]

COLUMNS = ("task", "N", "edges", "d", "lam", "solver", "CPU s", "certified gap", "error",
           "clusters", "/ coterie",
           "passes", "MiB", "outcome")


def line(row: Row) -> str:
    """A row of the table."""
    def show(key: str, form: str) -> str:
        return format(row[key], form) if row.get(key) is not None else "-"

    lam = row["variant"] if row["lam"] is None else f"{row['lam']:.3g}"
    cells = (row["task"], f"{row['n']}", f"{row['edges']}", f"{row['d']}", lam, row["solver"],
             show("seconds", ".4f"),
             show("gap", ".1e"), show("error", ".1e"), show("clusters", ""), show("ratio", ".1f"),
             show("passes", ".0f"), show("peak", ".0f"), row["status"])
    return "| " + " | ".join(cells) + " |"


def head(columns: tuple[str, ...]) -> str:
    return "| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|"


def summary(rows: list[Row]) -> list[str]:
    """Ratios by size, then what failed, counted by solver."""
    out = ["", "## Ratios to coterie in this run, over the lams", "",
           "Constants may be tuned on the cases that are not called fresh.", "",
           head(("task", "N", "coterie CPU s (median)", "peer", "least", "median", "most"))]
    for task, variant, n in dict.fromkeys((r["task"], r["variant"], r["n"]) for r in rows):
        selected = [r for r in rows if (r["task"], r["variant"], r["n"]) == (task, variant, n)
                    and "ratio" in r]
        median = np.median([r["seconds"] for r in selected if r["solver"] == OURS] or [np.nan])
        for name in dict.fromkeys(r["solver"] for r in selected if r["solver"] != OURS):
            ratios = [r["ratio"] for r in selected if r["solver"] == name]
            out.append(f"| {task} {variant} | {n} | {median:.4f} | {name} | {min(ratios):.1f} | "
                       f"{np.median(ratios):.1f} | {max(ratios):.1f} |")
    for path in (r for r in rows if r["variant"].endswith("path of 50") and "seconds" in r):
        variant = path["variant"].removesuffix("path of 50").removesuffix(", ")
        one = [r["seconds"] for r in rows if (r["task"], r["variant"], r["n"], r["solver"])
               == ("T3", variant, 60, CLARABEL) and "seconds" in r]
        if one:
            out += ["", f"T3, N = 60{variant and ', '}{variant}: the path of {path['points']} "
                        "takes "
                        f"{path['seconds'] / np.median(one):.1f} times one {CLARABEL} solve "
                        f"({path['seconds']:.3f} s, "
                        f"{np.median(one):.3f} s)."]
    out += ["", "## Outcomes", "",
            head(("solver", "runs", "certified to tol", "gap above tol or none", "failed"))]
    for name in dict.fromkeys(r["solver"] for r in rows):
        mine = [r for r in rows if r["solver"] == name]
        good, ended = sum(r["status"] == "certified" for r in mine), \
            sum("seconds" in r for r in mine)
        out.append(f"| {name} | {len(mine)} | {good} | {ended - good} | {len(mine) - ended} |")
    return out


#: CPU seconds of other runs on one core, with the relative error of the objective where known; not
#: used in any ratio.
ELSEWHERE = """
| task | N | lam | CCMM default / tight | SSNAL (pycvxcluster) | cut-pursuit |
|---|---|---|---|---|---|
| T1 | 50 | | 0.002-0.003 / 0.003-0.009 | 0.05-0.11 | 0.011-0.015 |
| T1 | 100 | | 0.007-0.008 / 0.009-0.017 | 0.20-0.40 | 0.012 |
| T1 | 200 | | 0.025-0.038 / 0.03-0.09 | 1.0-1.9 | 0.017-0.02 |
| T1 | 400 | | 0.15 / 0.19 | 6.0 | 0.07 |
| T2 | 1000 | 0.1 | 0.04 (3e-5) / 0.09 (6e-6) | 0.98 | 0.13 (3.7e-3) |
| T2 | 1000 | 1 | 0.03 (1e-4) / 0.07 (3.5e-3) | 1.66 | 0.05 (2.6e-3) |
| T2 | 1000 | 10 | 0.04 (5e-4) / 0.09 (1.5e-3) | 1.05 | 0.03 (best) |
| T2 | 5000 | 0.1 | 0.25 (8e-5) / 0.43 (1e-5) | 16.2 | 0.65 (1.6e-2) |
| T2 | 5000 | 1 | 0.22 (5e-5) / 0.47 (6e-5) | 7.2 | 0.17 (1e-4) |
| T2 | 5000 | 10 | 0.18 (9e-5) / 0.38 (1.6e-2) | 11.2 | 0.13 (7e-5) |
| T2 | 20000 | 0.1 | 1.1 (1e-4) / 2.4 (1e-5) | - | 2.0 (1.9e-2) |
| T2 | 20000 | 1 | 0.9 (1.4e-4) / 2.0 (1e-4) | - | 0.5 (2.8e-3) |
| T2 | 20000 | 10 | 0.95 (2e-5) / 1.9 (1.2e-2) | - | 0.85 (2.3e-4) |
| T2 | 100000 | 0.1, 1, 10 | - | - | 16, 5.3, 7.6 |
"""


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    def package(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return "not installed"

    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(text.split(":", 1)[1].strip() for text in lines if text.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor() or "unknown"
    packages = ("coterie", "numpy", "scipy", "numba", "cvxpy", "clarabel", "scs")
    return {"date": time.strftime("%Y-%m-%d %H:%M"), "python": platform.python_version(),
            "cpu": cpu,
            "cpus": os.cpu_count(), "system": f"{platform.system()} {platform.machine()}",
            "load": os.getloadavg(),
            "MiB before any solve": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                                          / 1024),
            **{name: package(name) for name in packages}}


def draw(rows: list[Row], path: Path) -> None:
    """CPU seconds against edges, one panel a task: a dot for each run, a line through the medians.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tasks = list(dict.fromkeys(r["task"] for r in rows))
    colours = dict(zip((OURS, CLARABEL, SCS, NATURAL, CUT_PURSUIT), ("C0", "C1", "C2", "C3", "C4"),
                       strict=True))
    shape = (2, 2) if len(tasks) > 2 else (1, len(tasks))
    figure, panels = plt.subplots(*shape, figsize=(5.4 * shape[1], 3.9 * shape[0] + 0.8),
                                  squeeze=False,
                                  layout="constrained")
    legend: dict[str, Any] = {}
    for panel, task in zip(panels.flat, tasks, strict=False):
        timed = [r for r in rows if r["task"] == task and "seconds" in r]
        for name, variant in dict.fromkeys((r["solver"], r["variant"]) for r in timed):
            dots = [(r["edges"], r["seconds"]) for r in timed if (r["solver"], r["variant"])
                    == (name, variant)]
            sizes = sorted({edges for edges, _ in dots})
            style = {"": "o-", "d = 20": "s--"}.get(variant, "^:")
            medians = [np.median([seconds for edges, seconds in dots if edges == size])
                       for size in sizes]
            label = f"{name}{variant and ', '}{variant}"
            legend[label] = panel.plot(sizes, medians, style, color=colours[name], ms=4)[0]
            panel.plot(*zip(*dots, strict=True), style[0], color=colours[name], ms=2.5, alpha=0.5)
        once = sorted({r["edges"]: r["pass"] for r in timed if "pass" in r and r["variant"]
                       != "d = 20"}.items())
        if once:
            legend["one pass over the edges"] = panel.plot(*zip(*once, strict=True), "k-",
                                                           lw=0.8)[0]
        panel.set(xscale="log", yscale="log", xlabel="edges", ylabel="CPU seconds",
                  title=TITLES[task])
        panel.grid(alpha=0.3)
        panel.xaxis.set_minor_formatter("")  # a label for each would run into the next
    for panel in panels.flat[len(tasks):]:
        panel.set_axis_off()
    figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=130)
