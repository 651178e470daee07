"""Federated algorithms as pure `ask`, `answer` and `tell`, and the runtimes that carry them."""

from coterie.federated.averaging import FedAvg, SquaredPenalty
from coterie.federated.client import Data, answer
from coterie.federated.drive import Round
from coterie.federated.ledger import Ledger
from coterie.federated.local import Faults, LocalRuntime
from coterie.federated.method import Algorithm, Plan
from coterie.federated.newton import Newton
from coterie.federated.participation import Participation
from coterie.federated.path import FederatedPath, federate_path
from coterie.federated.pdmm import PDMM
from coterie.federated.protocol import BadMessage, Query, Reply
from coterie.federated.run import Federated, federate
from coterie.federated.splitting import Splitting

#: Every federated algorithm by the name used in the command line and in saved files.
ALGORITHMS: dict[str, type[Algorithm]] = {
    "newton": Newton, "splitting": Splitting, "pdmm": PDMM, "fedavg": FedAvg, "squared_penalty": SquaredPenalty}

__all__ = ["ALGORITHMS", "PDMM", "Algorithm", "BadMessage", "Data", "Faults", "FedAvg", "Federated", "FederatedPath",
           "Ledger", "LocalRuntime", "Newton", "Participation", "Plan", "Query", "Reply", "Round", "Splitting",
           "SquaredPenalty", "answer", "federate", "federate_path"]
