"""Methods to compare with, one file per method. All take the same users and return the same kind of
result.

    fitted = IFCA(n_clusters=3).fit(users, loss)              # models, labels, n_clusters, rounds,
                                                              floats_up, ...
    fitted, settings = tune(IFCA, train, validation, loss)    # settings chosen on held-out samples

`CENTRAL` has methods for one table with a column that names the user, such as mixed models; see
`central`.
"""

from coterie.lab.baselines.base import BUDGET, Baseline, Fitted
from coterie.lab.baselines.boosting import BoostedTrees
from coterie.lab.baselines.central import Central, CentralFit
from coterie.lab.baselines.cfl import CFL
from coterie.lab.baselines.comet import Comet
from coterie.lab.baselines.ditto import Ditto
from coterie.lab.baselines.fedavg import FedAvgBaseline
from coterie.lab.baselines.fine_tuning import FineTuning
from coterie.lab.baselines.hypcluster import HypCluster
from coterie.lab.baselines.ifca import IFCA
from coterie.lab.baselines.kmeans import KMeans
from coterie.lab.baselines.local import Local
from coterie.lab.baselines.mixed_models import MixedIntercept, MixedSlopes
from coterie.lab.baselines.mocha import Mocha
from coterie.lab.baselines.odcl import ODCL, ODCLKMeans
from coterie.lab.baselines.oracle import Oracle
from coterie.lab.baselines.per_fedavg import PerFedAvg
from coterie.lab.baselines.pooled import Global
from coterie.lab.baselines.ridge import OneHotRidge, RidgePerUser
from coterie.lab.baselines.squared_penalty import SquaredPenaltyBaseline
from coterie.lab.baselines.tuning import tune

#: All federated methods by the name used in tables and saved files.
BASELINES: dict[str, type[Baseline]] = {method.name: method for method in (
    Global, Local, Oracle, SquaredPenaltyBaseline, FedAvgBaseline, FineTuning, PerFedAvg, Ditto,
        Mocha, IFCA,
    HypCluster, CFL, KMeans, ODCL, ODCLKMeans, Comet)}
#: All methods for one table by the name used in tables.
CENTRAL: dict[str, type[Central]] = {method.name: method for method in (
    RidgePerUser, OneHotRidge, MixedIntercept, MixedSlopes, BoostedTrees)}

__all__ = ["BASELINES", "BUDGET", "CENTRAL", "CFL", "IFCA", "ODCL", "Baseline", "BoostedTrees",
           "Central", "CentralFit",
           "Comet", "Ditto", "FedAvgBaseline", "FineTuning", "Fitted", "Global", "HypCluster",
           "KMeans", "Local",
           "MixedIntercept", "MixedSlopes", "Mocha", "ODCLKMeans", "OneHotRidge", "Oracle",
           "PerFedAvg", "RidgePerUser",
           "SquaredPenaltyBaseline", "tune"]
