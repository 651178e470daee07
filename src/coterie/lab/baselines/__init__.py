"""Methods to compare with. All take the same users and return the same kind of result.

    fitted = IFCA(n_clusters=3).fit(users, loss)              # models, labels, n_clusters, rounds,
                                                              # floats_up, ...
    fitted, settings = tune(IFCA, train, validation, loss)    # settings chosen on held-out samples

`pooling`, `averaging` and `clusters` have the federated methods, `central` those for one table with
a column that names the user, such as mixed models.
"""

from coterie.lab.baselines.anchors import GPBoost, Lme4, Lme4Slopes, Mgcv, MgcvSlopes, PyGAM
from coterie.lab.baselines.averaging import FedAvgBaseline, FineTuning, PerFedAvg
from coterie.lab.baselines.base import BUDGET, Baseline, Fitted, tune
from coterie.lab.baselines.central import (
    BoostedTrees,
    Central,
    CentralFit,
    MixedIntercept,
    MixedSlopes,
    OneHotRidge,
    OneRidge,
    PlainTrees,
    RidgePerUser,
)
from coterie.lab.baselines.clusters import CFL, IFCA, ODCL, Comet, HypCluster, KMeans, ODCLKMeans
from coterie.lab.baselines.pooling import (
    Ditto,
    Global,
    Local,
    Mocha,
    Oracle,
    SquaredPenaltyBaseline,
)

#: All federated methods by the name used in tables and saved files.
BASELINES: dict[str, type[Baseline]] = {method.name: method for method in (
    Global, Local, Oracle, SquaredPenaltyBaseline, FedAvgBaseline, FineTuning, PerFedAvg, Ditto,
    Mocha, IFCA, HypCluster, CFL, KMeans, ODCL, ODCLKMeans, Comet)}
#: All methods for one table by the name used in tables.
CENTRAL: dict[str, type[Central]] = {method.name: method for method in (
    RidgePerUser, OneHotRidge, MixedIntercept, MixedSlopes, BoostedTrees)}
#: Methods of `coterie bench tables`: one-liners, all that the extra `bench` has, and others.
ONE_LINERS: dict[str, type[Central]] = {method.name: method for method in (
    RidgePerUser, OneHotRidge, OneRidge)}
COMPARATORS: dict[str, type[Central]] = ONE_LINERS | {method.name: method for method in (
    MixedSlopes, BoostedTrees, PlainTrees)}
ANCHORS: dict[str, type[Central]] = {method.name: method for method in (
    GPBoost, PyGAM, Lme4, Lme4Slopes, Mgcv, MgcvSlopes)}

__all__ = ["ANCHORS", "BASELINES", "BUDGET", "CENTRAL", "CFL", "COMPARATORS", "IFCA", "ODCL",
           "ONE_LINERS", "Baseline", "BoostedTrees", "Central", "CentralFit", "Comet", "Ditto",
           "FedAvgBaseline", "FineTuning", "Fitted", "GPBoost", "Global", "HypCluster", "KMeans",
           "Lme4", "Lme4Slopes", "Local", "Mgcv", "MgcvSlopes", "MixedIntercept", "MixedSlopes",
           "Mocha", "ODCLKMeans", "OneHotRidge", "OneRidge", "Oracle", "PerFedAvg", "PlainTrees",
           "PyGAM", "RidgePerUser",
           "SquaredPenaltyBaseline", "tune"]
