"""Replies to the questions of a fit; see `coterie.fitting.sources` for what they mean.

A question concerns all parts of the rows: all rows first, then those that are not held out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.base.types import Array
from coterie.data.users import Users
from coterie.federated.protocol.messages import Batch, square, triangle
from coterie.fitting.sources import Around, expanded
from coterie.fitting.units import UserStatistics
from coterie.groups.summaries import Hypotheses, evidence_of, summary_at
from coterie.losses import Loss

Fields = dict[str, npt.NDArray[Any]]


def facts(loss: Loss, parts: list[Users], queries: Batch) -> Fields:
    """Count, means and sums of squares of features; the same and the largest of the target."""
    rows = []
    for part in parts:
        _, (counts, means, m2), targets, largest = UserStatistics.of(part)
        target = np.zeros((len(counts), 3)) if targets is None else \
            np.stack([targets.means[:, 0], targets.m2[:, 0], largest], axis=1)
        rows.append((counts, means, m2, target))
    return dict(zip(("count", "means", "m2", "target"),
                    (np.stack(part, axis=1) for part in zip(*rows, strict=True)),
                    strict=True))


def _summary(loss: Loss, parts: list[Users], queries: Batch) -> Fields:
    shared, dim = queries.shared, loss.dim(parts[0])
    reply = summary_at(loss, parts, np.asarray(shared["centre"]),
                       square(shared["covariance"], dim)[0], float(shared["step"]),
                       int(shared["rank"]))
    return {"point": reply.point, "values": _finite(reply.value), "gradient": reply.gradient,
            "hessian": triangle(reply.hessian), "information": reply.information,
            "size": reply.spare}


def _evidence(loss: Loss, parts: list[Users], queries: Batch) -> Fields:
    covariances = square(queries.shared["covariance"], loss.dim(parts[0]))
    noise, n_slopes = queries.shared["step"], int(queries.shared["rank"])
    told = [evidence_of(loss, part, Hypotheses(queries.arrays["centre"][:, k], covariances[k],
                                               float(noise[k]), n_slopes))
            for k, part in enumerate(parts)]
    return {"evidence": np.nan_to_num(np.stack([each.evidence for each in told], axis=1),
                                      nan=-1e300, posinf=-1e300, neginf=-1e300),
            "gradient": np.nan_to_num(np.stack([each.slopes for each in told], axis=1),
                                      posinf=0.0, neginf=0.0)}


def _around(loss: Loss, parts: list[Users], queries: Batch) -> Fields:
    covariances = square(queries.shared["covariance"], loss.dim(parts[0]))
    answers = [expanded(loss, part, Around(queries.arrays["centre"][:, k], covariances[k]))
               for k, part in enumerate(parts)]
    values, gradients, models = (np.stack(part, axis=1) for part in zip(*answers, strict=True))
    return {"values": _finite(values), "gradient": np.nan_to_num(gradients, posinf=0.0, neginf=0.0),
            "model": np.nan_to_num(models, posinf=0.0, neginf=0.0)}


def _finite(values: Array) -> Array:
    return np.where(np.isnan(values), np.inf, values)


#: The replies of the users whose rows these are.
FIT_ANSWERS: dict[str, Callable[[Loss, list[Users], Batch], Fields]] = {
    "facts": facts, "summary": _summary, "evidence": _evidence, "around": _around}
