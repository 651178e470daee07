"""The certificate of a federation, in which no single user can hide the errors of the others.

With objective = sum f_i(x_i) + penalty and bound = -sum f_i*(u_i), the gap is a sum of parts that
are never negative:

    own_i = f_i(x_i) + f_i*(u_i) - <u_i, x_i> >= 0   of every user,     penalty - <y, Bx> >= 0
                                                     known to the server

A relative gap divides their sum by the objective, which one user with a loss of 1e9 makes as large
as it likes. So the gap of all others is also measured against the objective of the others, and
counts unless it is ten times the tolerance at most.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from coterie.base.types import Array
from coterie.problem.certificates import FLOOR, Answers, assembled
from coterie.problem.problem import Problem
from coterie.problem.solution import Certificate

_HIDDEN = 10.0  # the others' own relative gap may be so many times as large as that of all users
_EPSILON = 4 * float(np.finfo(float).eps)


class Judgement(NamedTuple):
    """A certificate, and what each user has to do with its gap."""

    certificate: Certificate
    own: Array  # (n_users,) the user's part of the gap, possible rounding errors included
    worst: int  # the user with the largest part
    share: float  # its part, relative to the objective of the others
    without_worst: float  # the relative gap of the others


@np.errstate(over="ignore", invalid="ignore")
def judged(problem: Problem, models: Array, slopes: Array, about: Array,
           answers: Answers) -> Judgement:
    """The certificate from the users' answers, with what it would be without the largest of them.
    """
    certificate = assembled(problem, models, slopes, about, answers)
    products = np.einsum("nd,nd->n", slopes, models - about)
    carried = np.linalg.norm(slopes, axis=1) * np.linalg.norm(models - about, axis=1)
    rounding = answers.rounding + _EPSILON * (np.abs(answers.values) + np.abs(answers.conjugates)
                                              + carried)
    own = np.maximum(answers.values + answers.conjugates - products, 0.0) + rounding
    own = np.where(np.isnan(own), np.inf, own)
    worst, n = int(own.argmax()), problem.n_users
    if n < 3:
        return Judgement(certificate, own, worst, 0.0, np.inf)
    penalty = problem.lam * problem.graph.penalty(models)
    slack = max(penalty + float(products.sum()), 0.0) + _EPSILON * penalty

    def size(*left: int) -> float:
        """The objective of all users but one or two."""
        rest = ~np.isin(np.arange(n), left)
        total = abs(float(answers.values[rest].sum()) + problem.lam
                    * problem.graph.take(rest).penalty(models[rest]))
        return max(total, FLOOR * float(answers.sizes[rest].sum()), 1e-300)

    def relative(*left: int) -> float:
        """Their gap, relative to their objective."""
        return (float(own[~np.isin(np.arange(n), left)].sum()) + slack) / size(*left)

    sizes = np.nan_to_num(np.abs(answers.values) + np.abs(answers.conjugates),
                          posinf=np.finfo(float).max)
    far = np.linalg.norm(models - np.median(models, axis=0), axis=1)
    largest = {int(part.argmax()) for part in (sizes, answers.sizes, far)}
    others = max(relative(k) for k in largest) / _HIDDEN
    pairs = [relative(worst, k) / _HIDDEN for k in largest if k != worst and n > 3]
    return Judgement(replace(certificate, others=others if np.isfinite(others) else np.inf), own,
                     worst,
                     float(own[worst]) / size(worst, *largest), max([relative(worst), *pairs]))
