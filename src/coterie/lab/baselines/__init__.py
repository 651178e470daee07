"""Methods to compare with. All take the same users and return the same kind of result.

    fitted = IFCA(n_clusters=3).fit(users, loss)              # models, labels, n_clusters, rounds,
                                                              # floats_up, ...
    fitted, settings = tune(IFCA, train, validation, loss)    # settings chosen on held-out samples

`pooling` and `clusters` have the federated methods, `central` those for one table with a column
that names the user, such as mixed models.
"""

from coterie.lab.baselines.base import BUDGET, Baseline, Fitted, tune
from coterie.lab.baselines.central import (
    ANCHORS,
    CENTRAL,
    COMPARATORS,
    ONE_LINERS,
    Central,
    CentralFit,
)
from coterie.lab.baselines.clusters import CFL, IFCA, ODCL, Comet, HypCluster, KMeans, ODCLKMeans
from coterie.lab.baselines.pooling import (
    Ditto,
    FedAvgBaseline,
    FineTuning,
    Global,
    Local,
    Mocha,
    Oracle,
    PerFedAvg,
    SquaredPenaltyBaseline,
)

#: All federated methods by the name used in tables and saved files.
BASELINES: dict[str, type[Baseline]] = {method.name: method for method in (
    Global, Local, Oracle, SquaredPenaltyBaseline, FedAvgBaseline, FineTuning, PerFedAvg, Ditto,
    Mocha, IFCA, HypCluster, CFL, KMeans, ODCL, ODCLKMeans, Comet)}

__all__ = ["ANCHORS", "BASELINES", "BUDGET", "CENTRAL", "CFL", "COMPARATORS", "IFCA", "ODCL",
           "ONE_LINERS", "Baseline", "Central", "CentralFit", "Comet", "Ditto", "FedAvgBaseline",
           "FineTuning", "Fitted", "Global", "HypCluster", "KMeans", "Local", "Mocha", "ODCLKMeans",
           "Oracle", "PerFedAvg", "SquaredPenaltyBaseline", "tune"]
