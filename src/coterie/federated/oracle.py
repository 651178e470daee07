"""The oracle of a federation: every question is a round."""

from __future__ import annotations

from typing import Any

import numpy as np

from coterie.base.types import Array, Ints
from coterie.data.users import Participants
from coterie.federated.protocol.messages import square, triangle
from coterie.federated.together import Together
from coterie.fitting.oracle import Expanded, LeavingOut
from coterie.groups.oracle import Settled
from coterie.groups.spread import Expansions, estimate_covariance
from coterie.losses import Loss, Poisson
from coterie.losses.derived import Quadratic

_MOST_USED = 0.9  # largest share of the rows that parameters are taken to use up


class AskingOracle:
    """Users who are asked; see `coterie.fitting.oracle.FitOracle`.

    Parameters
    ----------
    together : asks them.
    users : their names.
    loss : of their models.
    part : 0 for all rows, 1 for those that are not held out.
    sizes : (n_users,) rows of each user.
    target_mean : of these rows, as the loss sees targets.
    """

    def __init__(self, together: Together, users: Participants, loss: Loss, part: int, sizes: Ints,
                 target_mean: float) -> None:
        self.together, self.users, self.loss, self.part = together, users, loss, np.array(part)
        self.sizes, self.target_mean, self.dim = sizes, target_mean, loss.dim(users)
        self.known, self.scale = dict[Any, Any](), 1.0
        if isinstance(loss, Poisson):
            self.scale = self._dispersion()

    def _ask(self, kind: str, arrays: dict[str, Any], **shared: Any) -> Any:
        values = {name: np.asarray(value) for name, value in shared.items()}
        return self.together.ask(kind, self.dim, arrays, {"part": self.part, **values})

    def settle(self, centres: Array, pull: float) -> Settled:
        reply = self._ask("settle", {"centre": centres}, t=pull)
        model = Quadratic(point=reply["point"], value=reply["value"], gradient=reply["gradient"],
                          hessian=square(reply["hessian"], self.dim))
        return Settled(model, reply["information"])

    def slopes(self, models: Array, own: Ints) -> tuple[Array, Array]:
        reply = self._ask("slopes", {"own": own}, models=models)
        return reply["values"], reply["gradient"]

    def evidence(self, centres: Array, covariances: Array) -> Array:
        reply = self._ask("evidence", {"centre": centres}, covariance=triangle(covariances),
                          step=self.scale)
        return np.asarray(reply["evidence"])

    def expand(self, centres: Array, covariances: Array, order: int) -> Expanded:
        reply = self._ask("around", {"centre": centres}, covariance=triangle(covariances),
                          rank=order)
        return Expanded(reply["values"], reply["gradient"],
                        square(reply["hessian"], self.dim) if order > 1 else reply["hessian"],
                        reply["model"])

    def alone(self, pull: float) -> tuple[Array, Array]:
        reply = self._ask("alone", {}, t=pull)
        return np.asarray(reply["model"]), np.asarray(reply["value"])

    def left_out(self, question: LeavingOut) -> tuple[Array, Array]:
        settings = np.array([question.alone, question.n_splits, question.seed, question.stratify],
                            dtype=np.int64)
        reply = self._ask("left_out",
                          {"own": question.own, "influence": triangle(question.influences)},
                          models=question.centres, starts=question.starts,
                          covariance=triangle(question.covariances),
                          settings=settings)
        return reply["values"], np.asarray(reply["count"], dtype=float)

    def halves(self, centres: Array, covariance: Array, draws: int, seed: int,
               stratify: bool) -> Ints:
        settings = np.array([draws, seed, stratify], dtype=np.int64)
        reply = self._ask("halves", {}, models=centres, covariance=triangle(covariance[None]),
                          settings=settings)
        return np.asarray(reply["own"], dtype=np.int64)

    def _dispersion(self) -> float:
        """The overdispersion of counts, as in `coterie.groups.dispersion`, from two sums of every
        user.
        """
        n, everyone = self.users.n_users, np.zeros(self.users.n_users, dtype=np.int64)
        near = self.settle(np.zeros((n, self.dim)), 0.1).model
        rows = self.sizes.astype(float)
        expansions = Expansions.at(near, near.prepare(self.users), rows, near.point)
        covariance = estimate_covariance(expansions, everyone, 0, 0.1 * np.eye(self.dim))
        marginal, posterior = expansions.marginal(covariance)
        inverse = np.linalg.pinv(np.tensordot(rows, near.hessian, 1), hermitian=True)
        reply = self._ask("ratio", {"centre": marginal.centres(everyone)[everyone]}, step=1.0,
                          covariance=triangle(covariance[None]), influence=triangle(inverse[None]))
        numerator, denominator = reply["values"].sum(axis=0)
        used = float((expansions.curvatures * posterior).sum())
        return max(float(numerator / max(denominator, 1e-300))
                   / (1 - min(used / rows.sum(), _MOST_USED)), 1.0)
