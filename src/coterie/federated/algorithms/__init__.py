"""Federated algorithms as pure `ask` and `tell`."""

from coterie.federated.algorithms.averaging import FedAvg, SquaredPenalty
from coterie.federated.algorithms.base import Algorithm
from coterie.federated.algorithms.newton import Newton
from coterie.federated.algorithms.pdmm import PDMM
from coterie.federated.algorithms.splitting import Splitting

#: Every federated algorithm by the name used in the command line and in saved files.
ALGORITHMS: dict[str, type[Algorithm]] = {"newton": Newton, "splitting": Splitting, "pdmm": PDMM,
                                          "fedavg": FedAvg, "squared_penalty": SquaredPenalty}

__all__ = ["ALGORITHMS", "PDMM", "Algorithm", "FedAvg", "Newton", "Splitting", "SquaredPenalty"]
