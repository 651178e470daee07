"""Old import paths: for one version, each gives the module that holds the names now, with a
warning.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

#: Old path: new path, both without "coterie."; what follows an old path follows the new one, too.
MOVED = {
    "analysis.consensus": "convex.consensus", "analysis.dispersion": "groups.noise",
    "analysis.groups": "groups.find", "analysis.ladder": "convex.margins",
    "analysis.margins": "convex.margins", "analysis.metrics": "convex.choice",
    "analysis.noise": "groups.noise", "analysis.oracle": "groups.summaries",
    "analysis.partitions": "groups.partitions", "analysis.path": "convex.path",
    "analysis.proposals": "groups.proposals", "analysis.random_effects": "groups.random_effects",
    "analysis.recovery": "convex.recovery", "analysis.refining": "losses.newton",
    "analysis.sampling": "groups.proposals", "analysis.search": "groups.search",
    "analysis.select": "convex.choice", "analysis.spread": "groups.spread",
    "analysis.wide": "groups.wide", "analysis.wide_models": "groups.wide",
    "baselines": "lab.baselines", "beside": "base.machine", "certificates": "problem.certificates",
    "compiling": "base.compiling", "data.condensed": "data.moments", "data.io": "data.files",
    "data.scaling": "data.moments", "errors": "base.errors",
    "estimators.classifier": "estimators.personalized",
    "estimators.regressor": "estimators.personalized", "experiments": "lab.experiments",
    "explanation": "problem.solution",
    "federated.algorithms.fusing": "federated.algorithms.edges",
    "federated.spans": "federated.algorithms.forms",
    "federated.algorithms.pdmm_state": "federated.algorithms.pdmm",
    "federated.answers": "federated.client", "federated.fit_by_asking": "federated.fit",
    "federated.joining": "federated.client", "federated.oracle": "federated.fit",
    "federated.together": "federated.fit", "fitting.oracle": "fitting.sources",
    "fitting.outliers": "fitting.prepare", "fitting.proof": "fitting.result",
    "fitting.stability": "fitting.inference", "fitting.work": "fitting.settings",
    "federated.algorithms.participation": "federated.algorithms.base",
    "federated.config": "federated.settings", "federated.driver": "federated.session",
    "federated.introduction": "federated.admission", "federated.keeping": "federated.node",
    "federated.metrics": "federated.entry", "federated.path": "federated.run",
    "federated.private.accounting": "federated.private.policy",
    "federated.private.home": "federated.private.release",
    "federated.private_fit": "federated.private.federation",
    "federated.runtimes.nodes": "federated.runtimes.in_process",
    "federated.runtimes.service": "federated.entry", "graph": "problem",
    "graph.graph": "problem.graph", "graph.kernels": "problem.edges",
    "graph.potentials": "problem.graph", "graph.weights": "problem.weights",
    "labels": "base.labels", "losses.checks": "losses.custom", "losses.grouped": "losses.derived",
    "losses.multinomial": "losses.linear", "losses.quadratic": "losses.derived",
    "losses.remote": "losses.derived", "matrices": "base.matrices", "memory": "base.machine",
    "newcomers": "problem.newcomers", "privacy": "lab.attacks",
    "privacy.accounting": "federated.private.policy",
    "privacy.attacked_release": "lab.attacks.releases", "privacy.auditing": "lab.attacks.auditing",
    "privacy.effective": "federated.private.effective",
    "privacy.fit": "federated.private.effective",
    "privacy.home": "federated.private.release", "privacy.inference": "lab.attacks.inference",
    "privacy.ledger": "federated.private.ledger", "privacy.lower_bound": "lab.attacks.releases",
    "privacy.poison": "lab.attacks.simulation", "privacy.policy": "federated.private.policy",
    "privacy.reconstruction": "lab.attacks.inference",
    "privacy.recording": "lab.attacks.simulation",
    "privacy.release": "federated.private.release", "privacy.runs": "lab.commands",
    "privacy.simulation": "lab.attacks.simulation", "runs": "output.runs",
    "solution": "problem.solution", "storage": "base.storage", "threads": "base.machine"}


class _Moved(MetaPathFinder, Loader):
    """Finds modules by their old paths."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None,
                  ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if new_path(fullname) is not None \
            else None

    def exec_module(self, module: ModuleType) -> None:
        new = new_path(module.__name__)
        if new:
            warnings.warn(f"{module.__name__} is now {new}", DeprecationWarning, stacklevel=2)
            sys.modules[module.__name__] = import_module(new)


def new_path(name: str) -> str | None:
    """The path of a module now, by its old one; "" for a folder that is no more, None for all other
    names.
    """
    if not name.startswith("coterie."):
        return None
    parts = name.split(".")[1:]
    for k in range(len(parts), 0, -1):
        old = ".".join(parts[:k])
        if old in MOVED:
            return ".".join(["coterie", MOVED[old], *parts[k:]])
        if k == len(parts) and any(other.startswith(old + ".") for other in MOVED):
            kept = Path(__file__).parent.joinpath(*parts, "__init__.py").exists()
            return None if kept else ""
    return None


def keep_old_paths() -> None:
    """Let old paths be imported."""
    # Before the one that would find a second copy in a package's new folder.
    sys.meta_path.insert(0, _Moved())
