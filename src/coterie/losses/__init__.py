"""Losses: what each user's data say about that user's model.

Each class states the one function that makes it what it is; `coterie.losses.base` derives the rest.
To add a loss, write one class and enter it in `LOSSES`; the page "Adding a loss" in the docs shows
a complete one.
"""

from coterie.data.summary import Task
from coterie.losses.affine import AffineLoss, LinearLoss
from coterie.losses.base import Evaluation, Loss, Samples
from coterie.losses.blocks import BlockLoss
from coterie.losses.custom import Custom
from coterie.losses.linear import Huber, Logistic, Multinomial, Poisson, Squared, SquaredHinge
from coterie.losses.personal import Personal
from coterie.losses.points import HuberDistance, SquaredDistance

#: Every ready loss by the name used in the command line and in saved files; the first one of each
#: task is taken unless another is named.
LOSSES: dict[str, type[Loss]] = {
    "logistic": Logistic,
    "squared_hinge": SquaredHinge,
    "multinomial": Multinomial,
    "squared": Squared,
    "huber": Huber,
    "poisson": Poisson,
    "squared_distance": SquaredDistance,
    "huber_distance": HuberDistance,
}


def losses_for(task: Task) -> tuple[str, ...]:
    """The names of the losses that fit a task."""
    return tuple(name for name, kind in LOSSES.items() if kind.task == task)


def name_of(loss: Loss) -> str:
    """The name of a loss in `LOSSES`; empty for one of the caller's own."""
    return next((name for name, kind in LOSSES.items() if isinstance(loss, kind)), "")


__all__ = ["LOSSES", "AffineLoss", "BlockLoss", "Custom", "Evaluation", "Huber", "HuberDistance",
           "LinearLoss",
           "Logistic", "Loss", "Multinomial", "Personal", "Poisson", "Samples", "Squared",
           "SquaredDistance",
           "SquaredHinge", "losses_for", "name_of"]
