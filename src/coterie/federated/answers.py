"""Replies to the questions of a fit; see `coterie.groups.oracle` and `coterie.fitting.oracle` for
what they mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from coterie.base.types import Array
from coterie.data.users import Users
from coterie.federated.protocol.messages import Batch, square, triangle
from coterie.fitting.oracle import LeavingOut, alone, best_for_halves, expanded, left_out
from coterie.fitting.units import UserStatistics
from coterie.groups.dispersion import score_sums, without_ridge
from coterie.groups.oracle import laplace, settled, slopes_at
from coterie.losses import Loss, Poisson, Samples

Fields = dict[str, npt.NDArray[Any]]


class _Part(NamedTuple):
    """The rows of the users who are asked."""

    loss: Loss
    users: Users
    samples: Samples


def facts(parts: list[Users], queries: Batch) -> Fields:
    """Of all rows, and of those not held out: count, means and sums of squares; the same and the
    largest target.
    """
    rows = []
    for part in parts:
        _, (counts, means, m2), targets, largest = UserStatistics.of(part.take(queries.users))
        target = np.zeros((len(counts), 3)) if targets is None else \
            np.stack([targets.means[:, 0], targets.m2[:, 0], largest], axis=1)
        rows.append((counts, means, m2, target))
    return dict(zip(("count", "means", "m2", "target"),
                    (np.stack(part, axis=1) for part in zip(*rows, strict=True)),
                    strict=True))


def _settle(part: _Part, queries: Batch) -> Fields:
    model, information = settled(part.loss, part.samples, queries.arrays["centre"],
                                 float(queries.shared["t"]),
                                 np.arange(len(queries)))
    return {"point": model.point, "value": model.value, "gradient": model.gradient,
            "hessian": triangle(model.hessian),
            "information": information}


def _alone(part: _Part, queries: Batch) -> Fields:
    points, used = alone(part.loss, part.samples, float(queries.shared["t"]))
    return {"model": points, "value": used}


def _slopes(part: _Part, queries: Batch) -> Fields:
    own = np.asarray(queries.arrays["own"], dtype=np.int64)
    values, gradients = slopes_at(part.loss, without_ridge(part.loss), part.samples,
                                  queries.shared["models"], own,
                                  np.arange(len(queries)))
    return {"values": _finite(values), "gradient": np.nan_to_num(gradients, posinf=0.0, neginf=0.0)}


def _evidence(part: _Part, queries: Batch) -> Fields:
    weights = part.users.counts / float(queries.shared["step"])
    covariances = square(queries.shared["covariance"], part.samples.dim)
    columns = [laplace(part.loss, part.samples, weights, queries.arrays["centre"][:, k], covariance)
               for k, covariance in enumerate(covariances)]
    return {"evidence": np.nan_to_num(np.stack(columns, axis=1), nan=-1e300, posinf=-1e300,
                                      neginf=-1e300)}


def _around(part: _Part, queries: Batch) -> Fields:
    order = int(queries.shared["rank"])
    covariances = square(queries.shared["covariance"], part.samples.dim)
    answers = expanded(part.loss, part.users, queries.arrays["centre"], covariances, order)
    return {"values": _finite(answers.values), "gradient": np.nan_to_num(answers.gradients,
        posinf=0.0, neginf=0.0),
            "hessian": triangle(answers.hessians) if order > 1 else answers.hessians,
            "model": np.nan_to_num(answers.models, posinf=0.0, neginf=0.0)}


def _left_out(part: _Part, queries: Batch) -> Fields:
    alone, n_splits, seed, stratify = (int(number) for number in queries.shared["settings"])
    dim, own = part.samples.dim, np.asarray(queries.arrays["own"], dtype=np.int64)
    question = LeavingOut(
        np.asarray(queries.shared["models"]), np.asarray(queries.shared["starts"], dtype=np.int64),
                          own,
        square(queries.shared["covariance"], dim), square(queries.arrays["influence"], dim),
                          bool(alone), n_splits,
        seed, bool(stratify))
    sums, counts = left_out(part.loss, part.users, question)
    return {"values": _finite(sums), "count": counts}


def _halves(part: _Part, queries: Batch) -> Fields:
    draws, seed, stratify = (int(number) for number in queries.shared["settings"])
    covariance = square(queries.shared["covariance"], part.samples.dim)[0]
    return {"own": best_for_halves(part.loss, part.users, np.asarray(queries.shared["models"]),
                                   covariance, draws, seed,
                                   bool(stratify))}


def _ratio(part: _Part, queries: Batch) -> Fields:
    dim, loss = part.samples.dim, part.loss
    assert isinstance(loss, Poisson)
    sums = score_sums(loss, part.users, part.samples, queries.arrays["centre"],
                      square(queries.shared["covariance"], dim)[0],
                      square(queries.shared["influence"], dim)[0],
                      float(queries.shared["step"]))
    return {"values": sums}


def _finite(values: Array) -> Array:
    return np.where(np.isnan(values), np.inf, values)


#: The replies of the users who are asked, from the rows that the query names.
FIT_ANSWERS: dict[str, Callable[[_Part, Batch], Fields]] = {
    "settle": _settle, "alone": _alone, "slopes": _slopes, "evidence": _evidence, "around": _around,
    "left_out": _left_out, "ratio": _ratio, "halves": _halves}


def fit_answers(loss: Loss, parts: list[Users], queries: Batch) -> Fields:
    """The replies to the questions of a message, one or two."""
    first, second = (Batch(queries.kind, queries.round, queries.users, _named(queries.arrays, mark),
                           {},
                           _named(queries.shared, mark)) for mark in ("", "2"))
    replies = _fit_answer(loss, parts, first)
    if second.shared:
        replies |= {f"{name}2": array for name, array in _fit_answer(loss, parts, second).items()}
    return replies


def _named(fields: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """The fields of the first question, or of the second with the names of the first."""
    if mark:
        return {name.removesuffix(mark): array for name,
                array in fields.items() if name.endswith(mark)}
    return {name: array for name, array in fields.items() if not name.endswith("2")}


def _fit_answer(loss: Loss, parts: list[Users], queries: Batch) -> Fields:
    """The reply to a question of a fit, from all rows (the first of `parts`) or those that are not
    held out.
    """
    users = parts[int(queries.shared["part"])].take(queries.users)
    return FIT_ANSWERS[queries.kind](_Part(loss, users, loss.prepare(users)), queries)
