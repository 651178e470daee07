"""What a run folder says of its messages."""

from __future__ import annotations

from os import PathLike
from typing import Any, NamedTuple, Self

from coterie.base.errors import InvalidInput
from coterie.federated.private.policy import Privacy
from coterie.output.runs.load import read

#: Questions whose answers hold Hessians, gradients, or sums over rows.
HESSIANS = ("expand", "local", "settle", "around")
GRADIENTS = ("gradient", "prox", "train", "slopes", "alone", "pdmm")
SUMS = ("facts", "moments", "describe")


class RunFacts(NamedTuple):
    """A federated run, as run.json describes it.

    Parameters
    ----------
    algorithm, loss, lam, ridge : of the run; the algorithm is "fit" where everything was chosen,
        and "release" where this was done privately.
    user, target : columns of its table, where there was one.
    dim : the length of a model.
    kinds : of questions that were answered.
    n_rounds : of the run.
    privacy : the budget, where there was one.
    """

    algorithm: str
    loss: str
    lam: float
    ridge: float
    user: str
    target: str
    dim: int
    kinds: tuple[str, ...]
    n_rounds: int
    privacy: Privacy | None = None

    @classmethod
    def read(cls, folder: str | PathLike[str]) -> Self:
        """The facts of a run folder.

        Raises
        ------
        InvalidInput : the folder is no run, or not of a federation.
        """
        info, _ = read(folder)
        settings: dict[str, Any] = info["settings"]
        if "n_rounds" not in info:
            raise InvalidInput(f"{folder} is a run of a table: nothing crossed in it",
                               remedy="Give the folder of a run of `coterie federate`")
        said, user, target = info.get("privacy"), str(settings.get("user", "")), \
            str(settings.get("target", ""))
        rest = int(info["dim"]), tuple(info["bytes_by_kind"]), int(info["n_rounds"])
        if said is not None:  # its loss is that of the released statistics
            budget = Privacy(epsilon=said["epsilon"], delta=said["delta"], unit=said["unit"])
            return cls("release", "auto", float(info["lam"]), 1e-3, user, target, *rest, budget)
        return cls("fit" if "kind" in info else str(settings.get("algorithm") or "newton"),
                   str(settings.get("loss", "auto")), float(info["lam"]),
                   float(settings.get("ridge", 1e-3)), user,
                   target, *rest)


def structure(facts: RunFacts) -> list[str]:
    """What can be recovered by the kinds of messages alone, in sentences."""
    hessians, gradients, sums = ([kind for kind in facts.kinds if kind in group]
                                 for group in (HESSIANS, GRADIENTS, SUMS))
    said = [f"{facts.n_rounds} rounds of {facts.algorithm}, models of {facts.dim} coordinates."]
    if facts.privacy is not None:
        said.append(f"Users sent noisy releases: epsilon = {facts.privacy.epsilon:g}, delta = "
                    f"{facts.privacy.delta:g}, "
                    f"unit {facts.privacy.unit}.")
    if hessians:
        said.append(f"Users sent Hessians ({', '.join(hessians)}): if at two or more points, all "
                    "rows of a user with "
                    f"at most {facts.dim} rows can be rebuilt exactly unless its loss is squared, "
                    "and rows of users "
                    "with some more rows often.")
    if gradients:
        said.append(f"Users sent gradients ({', '.join(gradients)}): the row of a user with one "
                    "row can be rebuilt; "
                    f"with fewer than {facts.dim} rows, a row is told from others by the span of "
                    "the gradients.")
    if sums:
        said.append(f"Users sent sums over their rows ({', '.join(sums)}): one row, or with "
                    "products two rows, can be "
                    "rebuilt, also if they are the held-out ones.")
    return [*said, "Give --data TABLE to repeat the run and attack it."]
