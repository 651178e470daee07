"""Problems in forty digits: the judge of what floating point claims (mpmath; small problems only)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mpmath as mp
import numpy as np

import coterie as ct

mp.mp.dps = 40
Vector = list[mp.mpf]


def exact(values: object) -> Vector:
    return [mp.mpf(float(v)) for v in np.ravel(values)]


def _margin_function(loss: ct.Loss) -> Callable[[mp.mpf, mp.mpf], tuple[mp.mpf, mp.mpf, mp.mpf]]:
    """phi, phi' and phi'' of a margin and a target, from the formulas of docs/losses.md."""
    name = type(loss).__name__

    def phi(t: mp.mpf, y: mp.mpf) -> tuple[mp.mpf, mp.mpf, mp.mpf]:
        if name == "SquaredHinge":
            left = max(1 - y * t, mp.mpf(0))
            return left**2, -2 * y * left, mp.mpf(2 if left > 0 else 0)
        if name == "Logistic":
            p = 1 / (1 + mp.exp(y * t))
            return mp.log1p(mp.exp(-y * t)), -y * p, p * (1 - p)
        if name == "Squared":
            return (t - y) ** 2 / 2, t - y, mp.mpf(1)
        if name == "Huber":
            delta = mp.mpf(float(loss.delta))
            r = t - y
            if abs(r) <= delta:
                return r**2 / 2, r, mp.mpf(1)
            return delta * (abs(r) - delta / 2), delta * mp.sign(r), mp.mpf(0)
        assert name == "Poisson"
        return mp.exp(t) - y * t, mp.exp(t) - y, mp.exp(t)

    return phi


class ExactUser:
    """f of one user: value, gradient and Hessian."""

    def __init__(self, loss: ct.Loss, rows: np.ndarray, targets: np.ndarray | None, n_classes: int) -> None:
        self.loss, self.name = loss, type(loss).__name__
        self.rows = [exact(row) for row in rows]
        self.targets = None if targets is None else exact(targets)
        self.points = self.name in ("SquaredDistance", "HuberDistance")
        self.outputs = n_classes - 1 if self.name == "Multinomial" else 1
        if not self.points and loss.intercept:
            sign = mp.mpf(loss.intercept_sign)
            self.rows = [[*row, sign] for row in self.rows]
        self.dim = len(self.rows[0]) * self.outputs
        if not self.points:
            self.ridge = [mp.mpf(float(loss.ridge))] * self.dim
            if loss.intercept and not loss.penalize_intercept:
                self.ridge[-self.outputs:] = [mp.mpf(0)] * self.outputs
        if self.name == "Multinomial":
            helmert = [[mp.mpf(1)] * (r + 1) + [mp.mpf(-(r + 1))] + [mp.mpf(0)] * (self.outputs - r - 1)
                       for r in range(self.outputs)]
            self.basis = [[v / mp.sqrt(sum(u * u for u in row)) for v in row] for row in helmert]

    def __call__(self, x: Vector, order: int = 2) -> tuple[mp.mpf, Vector, list[Vector]]:
        f, g = mp.mpf(0), [mp.mpf(0)] * self.dim
        h = [[mp.mpf(0)] * self.dim for _ in range(self.dim)]
        terms = self._points if self.points else self._classes if self.name == "Multinomial" else self._margins
        for value, gradient, hessian in terms(x, order):
            f += value / len(self.rows)
            if order:
                g = [a + b / len(self.rows) for a, b in zip(g, gradient, strict=True)]
                h = [[a + b / len(self.rows) for a, b in zip(u, v, strict=True)]
                     for u, v in zip(h, hessian, strict=True)]
        if not self.points:
            f += sum(c * v * v for c, v in zip(self.ridge, x, strict=True)) / 2
            for k, c in enumerate(self.ridge):
                g[k] += c * x[k]
                h[k][k] += c
        return f, g, h

    def _margins(self, x: Vector, order: int):
        phi = _margin_function(self.loss)
        for a, y in zip(self.rows, self.targets, strict=True):
            value, slope, bend = phi(mp.fdot(a, x), y)
            yield value, [slope * v for v in a], [[bend * u * v for v in a] for u in a] if order else []

    def _points(self, x: Vector, order: int):
        delta = mp.mpf(float(getattr(self.loss, "delta", mp.inf)))
        for a in self.rows:
            gap = [u - v for u, v in zip(x, a, strict=True)]
            r = mp.sqrt(sum(v * v for v in gap))
            near = r <= delta
            pull = mp.mpf(1) if near else delta / r
            value = r * r / 2 if near else delta * (r - delta / 2)
            yield value, [pull * v for v in gap], [
                [pull * ((1 if j == k else 0) - (0 if near else gap[j] * gap[k] / (r * r)))
                 for k in range(self.dim)] for j in range(self.dim)] if order else []

    def _classes(self, x: Vector, order: int):
        k, q = self.outputs, self.basis
        for a, y in zip(self.rows, self.targets, strict=True):
            out = [sum(v * x[p * k + u] for p, v in enumerate(a)) for u in range(k)]
            t = [sum(q[u][c] * out[u] for u in range(k)) for c in range(k + 1)]
            top = max(t)
            exps = [mp.exp(v - top) for v in t]
            prob = [v / sum(exps) for v in exps]
            value = mp.log(sum(exps)) + top - t[int(y)]
            rest = [p - (1 if c == int(y) else 0) for c, p in enumerate(prob)]
            slope = [mp.fdot(q[u], rest) for u in range(k)]
            mean = [mp.fdot(q[u], prob) for u in range(k)]
            bend = [[sum(q[u][c] * q[v][c] * prob[c] for c in range(k + 1)) - mean[u] * mean[v] for v in range(k)]
                    for u in range(k)]
            index = [(p, u) for p in range(len(a)) for u in range(k)]
            yield value, [a[p] * slope[u] for p, u in index], [
                [a[p] * a[r] * bend[u][v] for r, v in index] for p, u in index] if order else []


class ExactProblem:
    """F in forty digits."""

    def __init__(self, problem: ct.Problem) -> None:
        users, loss = problem.users, problem.loss
        n_classes = problem.dim // (users.n_features + loss.intercept) + 1 if isinstance(loss, ct.Multinomial) else 2
        parts = [slice(a, b) for a, b in zip(users.offsets[:-1], users.offsets[1:], strict=True)]
        points = isinstance(loss, (ct.SquaredDistance, ct.HuberDistance))
        self.users = [ExactUser(loss, users.features[part], None if points else users.targets[part], n_classes)
                      for part in parts]
        self.edges = [(int(i), int(j), mp.mpf(problem.lam) * mp.mpf(float(w)))
                      for (i, j), w in zip(problem.graph.edges, problem.graph.weights, strict=True) if w > 0]
        self.dim = problem.dim

    def objective(self, models: Sequence[Vector]) -> mp.mpf:
        losses = sum(user(x, 0)[0] for user, x in zip(self.users, models, strict=True))
        return losses + sum(r * mp.sqrt(sum((a - b) ** 2 for a, b in zip(models[i], models[j], strict=True)))
                            for i, j, r in self.edges)

    def improved(self, models: np.ndarray, steps: int = 30) -> mp.mpf:
        """F after Newton's method on one model for each set of equal models: no optimum is larger."""
        labels = np.unique(models + 0.0, axis=0, return_inverse=True)[1].ravel().tolist()
        first = [labels.index(c) for c in range(max(labels) + 1)]
        w = [exact(models[i]) for i in first]
        best = self.objective([w[c] for c in labels])
        for _ in range(steps):
            step = self._step(w, labels)
            if step is None:
                break
            for halvings in range(30):
                size = mp.mpf(2) ** -halvings
                trial = [[a + size * b for a, b in zip(x, d, strict=True)] for x, d in zip(w, step, strict=True)]
                value = self.objective([trial[c] for c in labels])
                if value < best:
                    break
            else:
                break
            gain, w, best = best - value, trial, value
            if gain < mp.mpf(10) ** -30 * abs(best):
                break
        return best

    def _step(self, w: list[Vector], labels: list[int]) -> list[Vector] | None:
        k, d = len(w), self.dim
        g, h = mp.matrix(k * d, 1), mp.matrix(k * d, k * d)
        for user, c in zip(self.users, labels, strict=True):
            _, gradient, hessian = user(w[c])
            for p in range(d):
                g[c * d + p] += gradient[p]
                for q in range(d):
                    h[c * d + p, c * d + q] += hessian[p][q]
        for i, j, r in self.edges:
            a, b = labels[i], labels[j]
            gap = [u - v for u, v in zip(w[a], w[b], strict=True)]
            length = mp.sqrt(sum(v * v for v in gap))
            if a == b or length == 0:
                continue
            for p in range(d):
                g[a * d + p] += r * gap[p] / length
                g[b * d + p] -= r * gap[p] / length
                for q in range(d):
                    bend = r / length * ((1 if p == q else 0) - gap[p] * gap[q] / length**2)
                    for s, t, sign in ((a, a, 1), (b, b, 1), (a, b, -1), (b, a, -1)):
                        h[s * d + p, t * d + q] += sign * bend
        units = [mp.sqrt(h[m, m]) if h[m, m] > 0 else mp.mpf(1) for m in range(k * d)]
        for m in range(k * d):
            for n in range(k * d):
                h[m, n] /= units[m] * units[n]
            h[m, m] += mp.mpf(10) ** -30
            g[m] /= units[m]
        try:
            flat = [-v / u for v, u in zip(mp.lu_solve(h, g), units, strict=True)]
        except ZeroDivisionError:
            return None
        return [flat[c * d:(c + 1) * d] for c in range(k)]
