"""Losses: what each user's data say about that user's model.

Each class states the one function that makes it what it is; `coterie.losses.base` derives the rest.
To add a loss, write one class and enter it in `LOSSES`; the page "Adding a loss" in the docs shows
a complete one.
"""

from coterie.losses.affine import AffineLoss, LinearLoss
from coterie.losses.base import Evaluation, Loss, Samples
from coterie.losses.blocks import BlockLoss
from coterie.losses.custom import Custom
from coterie.losses.linear import Huber, Logistic, Multinomial, Poisson, Squared, SquaredHinge
from coterie.losses.personal import Personal
from coterie.losses.points import HuberDistance, SquaredDistance

#: Every ready loss by the name used in the command line and in saved files.
LOSSES: dict[str, type[Loss]] = {
    "squared_hinge": SquaredHinge,
    "logistic": Logistic,
    "squared": Squared,
    "huber": Huber,
    "poisson": Poisson,
    "multinomial": Multinomial,
    "squared_distance": SquaredDistance,
    "huber_distance": HuberDistance,
}

__all__ = ["LOSSES", "AffineLoss", "BlockLoss", "Custom", "Evaluation", "Huber", "HuberDistance",
           "LinearLoss",
           "Logistic", "Loss", "Multinomial", "Personal", "Poisson", "Samples", "Squared",
           "SquaredDistance",
           "SquaredHinge"]
