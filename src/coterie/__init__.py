"""Personalised federated learning that finds its own groups.

    users    = coterie.Users.from_arrays(X, y, user)
    problem  = coterie.Problem(users, coterie.SquaredHinge(ridge=1e-3), lam=0.09)
    solution = coterie.solve(problem)      # models, labels, n_clusters, objective, gap, status
"""

from importlib import import_module
from typing import Any

from coterie._aliases import keep_old_paths, new_path
from coterie.base.errors import (
    ConvergenceWarning,
    CoterieError,
    CoterieWarning,
    Incompatible,
    Interrupted,
    InvalidInput,
    MissingExtra,
    NotConverged,
)
from coterie.convex.choice import Choice, by_certificate, by_clusters, by_score, by_stability, refit
from coterie.convex.consensus import lam_max
from coterie.convex.margins import Fusion, GroupMargins, fusion_ladder, group_margins
from coterie.convex.path import Path, solve_path
from coterie.convex.recovery import RecoveryBounds, recovery_bounds
from coterie.data.moments import Standardizer
from coterie.data.users import Split, Users
from coterie.federated import (
    ALGORITHMS,
    PDMM,
    Faults,
    FedAvg,
    Federated,
    FederatedPath,
    Ledger,
    Newton,
    Participation,
    Splitting,
    SquaredPenalty,
    federate,
    federate_path,
)
from coterie.federated.private.policy import Privacy
from coterie.fitting import Fit, RunCertificate
from coterie.groups.find import Groups, find_groups
from coterie.losses import (
    LOSSES,
    Custom,
    Huber,
    HuberDistance,
    LinearLoss,
    Logistic,
    Loss,
    Multinomial,
    Personal,
    Poisson,
    Squared,
    SquaredDistance,
    SquaredHinge,
)
from coterie.losses.custom import check_loss
from coterie.output.runs import Run, fit_table, load_run, save_run
from coterie.problem.certificates import certify
from coterie.problem.graph import Graph
from coterie.problem.newcomers import Joined
from coterie.problem.problem import Problem, lam_from_eq3
from coterie.problem.solution import Certificate, Explanation, Solution, Status
from coterie.problem.weights import LocalModels, adaptive_graph
from coterie.solvers import SOLVERS, Fast, Lean, Reference, solve

keep_old_paths()

__version__ = "0.2.0"

#: Taken from `coterie.estimators` when they are asked for: scikit-learn takes a second to load.
_ESTIMATORS = ("ConvexClustering", "PersonalizedClassifier", "PersonalizedRegressor")


def __getattr__(name: str) -> Any:
    if name in _ESTIMATORS:
        from coterie import estimators

        return getattr(estimators, name)
    if new_path(f"coterie.{name}"):
        return import_module(f"coterie.{name}")
    raise AttributeError(f"module 'coterie' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = ["ALGORITHMS", "LOSSES", "PDMM", "SOLVERS", "Certificate", "Choice", "ConvergenceWarning",
           "ConvexClustering", "CoterieError", "CoterieWarning", "Custom", "Explanation", "Fast",
           "Faults", "FedAvg", "Federated", "FederatedPath", "Fit", "Fusion", "Graph",
           "GroupMargins", "Groups", "Huber", "HuberDistance", "Incompatible", "Interrupted",
           "InvalidInput", "Joined", "Lean", "Ledger", "LinearLoss", "LocalModels", "Logistic",
           "Loss", "MissingExtra", "Multinomial", "Newton", "NotConverged", "Participation", "Path",
           "Personal", "PersonalizedClassifier", "PersonalizedRegressor", "Poisson", "Privacy",
           "Problem", "RecoveryBounds", "Reference", "Run", "RunCertificate", "Solution", "Split",
           "Splitting", "Squared", "SquaredDistance", "SquaredHinge", "SquaredPenalty",
           "Standardizer", "Status", "Users", "adaptive_graph", "by_certificate", "by_clusters",
           "by_score", "by_stability", "certify", "check_loss", "federate", "federate_path",
           "find_groups", "fit_table", "fusion_ladder", "group_margins", "lam_from_eq3", "lam_max",
           "load_run", "recovery_bounds", "refit", "save_run", "solve", "solve_path"]
