"""Envelopes in forty digits: the users of an `ExactProblem` for a `Personal` loss."""

from __future__ import annotations

import mpmath as mp
import numpy as np

import coterie as ct
from support.exact import ExactProblem, Vector, exact
from support.problems import quiet_problem


class ExactEnvelope:
    """e of one user around f, by Newton's method in forty digits from a personal model of floating point.

    The metric is diagonal, with entries in [0, inf].
    """

    def __init__(self, user, prices: np.ndarray, start: np.ndarray) -> None:
        self.user, self.prices, self.start = user, exact(np.where(np.isinf(prices), 0.0, prices)), exact(start)
        self.moving = [k for k, p in enumerate(prices) if np.isfinite(p)]
        self.dim = len(prices)

    def __call__(self, z: Vector, order: int = 2) -> tuple[mp.mpf, Vector, list[Vector]]:
        move, p = self.moving, self.prices
        x = [self.start[k] if k in move else z[k] for k in range(self.dim)]

        def total(x: Vector) -> mp.mpf:
            return self.user(x, 0)[0] + sum(p[k] * (x[k] - z[k]) ** 2 for k in move) / 2

        best = total(x)
        for _ in range(60 if move else 0):
            _, g, h = self.user(x)
            slope = mp.matrix([g[k] + p[k] * (x[k] - z[k]) for k in move])
            system = mp.matrix([[h[j][k] + (p[k] if j == k else 0) for k in move] for j in move])
            for k in range(len(move)):
                system[k, k] += mp.mpf(10) ** -35 * (1 + system[k, k])
            step = mp.lu_solve(system, slope)
            for halvings in range(40):
                trial = list(x)
                for k, s in zip(move, step, strict=True):
                    trial[k] = x[k] - s / mp.mpf(2) ** halvings
                value = total(trial)
                if value < best:
                    break
            else:
                break
            gain, x, best = best - value, trial, value
            if gain <= mp.mpf(10) ** -36 * (1 + abs(best)):
                break
        if order == 0:
            return best, [], []
        _, g, h = self.user(x)
        gradient = [p[k] * (z[k] - x[k]) if k in move else g[k] for k in range(self.dim)]
        # H - H[:, m] (H[m, m] + P)^-1 H[m, :]
        hessian = mp.matrix(h)
        if move:
            rows = mp.matrix([[h[j][k] for k in range(self.dim)] for j in move])
            system = mp.matrix([[h[j][k] + (p[k] if j == k else 0) for k in move] for j in move])
            for k in range(len(move)):
                system[k, k] += mp.mpf(10) ** -35 * (1 + system[k, k])
            hessian -= rows.T * mp.inverse(system) * rows
        return best, gradient, [[hessian[j, k] for k in range(self.dim)] for j in range(self.dim)]


class ExactPersonalProblem(ExactProblem):
    """F of a problem whose loss is `Personal` with a diagonal metric, in forty digits."""

    def __init__(self, problem: ct.Problem, centres: np.ndarray) -> None:
        loss, samples = problem.loss, problem.samples
        inner = quiet_problem(problem.users, loss.loss, problem.lam, problem.graph)
        super().__init__(inner)
        own = loss.personal_models(samples, centres)
        self.users = [ExactEnvelope(*parts) for parts in zip(self.users, samples.metric.prices, own, strict=True)]
