"""Federated algorithms as pure `ask`, `answer` and `tell`, and the runtimes that carry them."""

from coterie.federated.algorithms import ALGORITHMS, PDMM, FedAvg, Newton, Splitting, SquaredPenalty
from coterie.federated.algorithms.base import Algorithm, Federation, Participation
from coterie.federated.client import Data, answer
from coterie.federated.entry import federate
from coterie.federated.protocol.ledger import Ledger
from coterie.federated.protocol.messages import BadMessage, Query, Reply
from coterie.federated.run import Federated, FederatedPath, federate_path
from coterie.federated.runtimes.in_process import Faults, LocalRuntime
from coterie.federated.screen import Screen
from coterie.federated.session import Round
from coterie.federated.settings import FederationSettings

__all__ = [
    "ALGORITHMS", "PDMM", "Algorithm", "BadMessage", "Data", "Faults", "FedAvg", "Federated",
    "FederatedPath", "Federation", "FederationSettings", "Ledger", "LocalRuntime", "Newton",
    "Participation", "Query", "Reply", "Round", "Screen", "Splitting", "SquaredPenalty", "answer",
    "federate", "federate_path",
]
