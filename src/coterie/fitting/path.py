"""The path of a plan: its points are solved one after the other, kept, and not solved for again."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np

from coterie.convex.path import Path, solve_path
from coterie.fitting.plan import PathPlan
from coterie.fitting.settings import Settings
from coterie.fitting.work import Work
from coterie.problem.problem import Problem
from coterie.problem.solution import Certificate, Solution, Status
from coterie.solvers.base import Point

# Certified gap of points that are only drawn, with more numbers than this in all models.
_DRAWN, _SMALL = 1e-3, 2000


def solve_plan(plan: PathPlan, settings: Settings, work: Work) -> Path:
    """The path of a plan; points that are kept are not solved for again.

    Where the chosen point is known before, it is certified to the tolerance of the settings and has
    its duals. The others are only drawn: those of large problems are certified to `_DRAWN`.
    """
    done: list[Solution] = []
    last: dict[str, Any] = work.get("last", {"point": -1})
    while len(done) <= last["point"]:
        done.append(_restored(plan.problem.with_lam(float(plan.lams[len(done)])),
                              work.get(f"point {len(done)}")))
    # The next point starts from the last two and the last one's duals, so that a resumed run ends
    # with the same bits.
    start: Solution | Point | None = None if plan.start is None else Point(plan.start)
    if done:
        start = replace(done[-1], duals=last["duals"], sigma=last["sigma"])

    def keep(solution: Solution, _: int) -> None:
        nonlocal start
        k, start = len(done), solution
        shown = solution if k == plan.chosen else replace(
            solution, duals=None, certificate=replace(solution.certificate, duals=None))
        work.keep(f"point {k}", _state(shown))
        work.keep("last", {"point": k, "duals": solution.duals, "sigma": solution.sigma})
        done.append(shown)
        work.show("path", len(done), len(plan.lams), f"objective {solution.objective:.6g}, gap "
                                                     f"{solution.gap:.1e}, "
                                                     f"{solution.n_clusters} groups")

    small = plan.start is None or plan.start.size <= _SMALL
    rough = settings.tol if small else max(settings.tol, _DRAWN)
    for stop, tol in ((plan.chosen, rough), (plan.chosen + 1, settings.tol),
                      (len(plan.lams), rough)):
        if len(done) < stop:
            if len(done) == plan.chosen and plan.centres is not None:
                start = Point(plan.centres)
            elif len(done) > plan.chosen >= 0 and plan.centres is not None and stop - len(done) \
                == 1:
                # One model for all.
                start = Point(np.tile(plan.centres.mean(axis=0), (len(plan.centres), 1)))
            solve_path(plan.problem, plan.lams[len(done):stop], tol=tol, progress=keep, start=start,
                       before=done[-2] if len(done) > 1 else None)
    return Path(problem=plan.problem, solutions=tuple(done), tol=rough)


def _state(solution: Solution) -> dict[str, Any]:
    """A solution as arrays, numbers and texts."""
    proof = solution.certificate
    certificate = {f.name: getattr(proof, f.name) for f in fields(proof) if f.name != "duals"}
    return {"models": solution.models, "duals": solution.duals, "certificate": certificate,
            "status": solution.status.name, "solver": solution.solver, "seconds": solution.seconds,
            "sigma": solution.sigma}


def _restored(problem: Problem, state: dict[str, Any]) -> Solution:
    """The solution whose `_state` this is."""
    proof = {**state["certificate"],
             "infinite_users": tuple(state["certificate"]["infinite_users"])}
    duals = state.get("duals")
    return Solution(problem=problem, models=problem.check_models(state["models"]), duals=duals,
                    certificate=Certificate(**proof).with_duals(duals),
                    status=Status[state["status"]],
                    solver=state["solver"], seconds=state["seconds"], sigma=state["sigma"])
