"""Softmax classification."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from coterie.base.errors import InvalidInput
from coterie.base.labels import sum_zero_basis
from coterie.base.types import Array
from coterie.data.users import Block, Participants, Users
from coterie.losses.affine import AffineLoss, margins_matrix, ridge_form
from coterie.losses.base import Evaluation, Magnitudes, Samples, need_targets
from coterie.losses.linear import entropy
from coterie.losses.rows import Terms
from coterie.losses.targets import one_class_concern, refuse_targets


@dataclass(frozen=True, kw_only=True)
class Multinomial(AffineLoss):
    """log sum_c exp(t_c) - t_y with t = W' a + b in R^classes: softmax classification, targets 0,
    1, ..., classes - 1.

    Adding one number to all t_c changes nothing, so the models live in the subspace where the t_c
    sum to zero, in an orthonormal basis Q of it: t = Q' T with T of n_classes - 1 outputs. No class
    is singled out, distances between models do not depend on the order of the classes, and no
    direction is flat. A model is the (features, outputs) matrix of T in row-major order, its last
    row the intercepts.

    Parameters
    ----------
    ridge, intercept, penalize_intercept : as for every `AffineLoss`.
    n_classes : number of classes; by default one more than the largest target of all users.

    Example
    -------
    >>> import coterie as ct
    >>> users = ct.Users.from_arrays([[0.0], [1.0], [2.0]], [0, 1, 2], ["ann", "ann", "bob"])
    >>> ct.Multinomial().dim(users)  # (1 feature + 1 intercept) x (3 classes - 1)
    4
    """

    least: ClassVar[float] = 0.0

    n_classes: int | None = None

    def check_targets(self, users: Users) -> None:
        y = need_targets(self, users)
        refuse_targets(users, (y < 0) | (y != np.floor(y)), "class numbers 0, 1, 2, ...",
                       "Number the classes from 0")
        n_classes = self._classes(users)
        refuse_targets(users, y >= n_classes, f"class numbers below n_classes = {n_classes}",
                       "Raise n_classes")
        if n_classes < 2:
            raise InvalidInput("expected at least two classes, got one",
                               remedy="Give n_classes when some are unseen")

    def concerns(self, users: Users) -> list[str]:
        unseen = np.setdiff1d(np.arange(self._classes(users)), need_targets(self, users))
        return one_class_concern(users) + [
            f"No user has a sample of class {c:g}: its intercept has no optimum, so no bound can "
            "be certified; lower "
            "n_classes or number the classes without gaps." for c in unseen[:1]]

    def _classes(self, users: Participants) -> int:
        return int(need_targets(self, users.data).max()) + 1 if self.n_classes is None \
            else self.n_classes

    def dim(self, users: Participants) -> int:
        return (users.n_features + self.intercept) * (self._classes(users) - 1)

    def evaluate_block(self, block: Block, models: Array, order: int) -> Evaluation:
        a, weights = block.features, block.weights
        n, _, p = a.shape
        k = models.shape[1] // p  # outputs
        basis = sum_zero_basis(k + 1)  # Q, (k, k + 1)
        ridges = self.ridges(block, models.shape[1])
        t = (a @ models.reshape(n, p, k)) @ basis
        top = t.max(axis=2, keepdims=True)
        exps = np.exp(t - top)
        sums = exps.sum(axis=2, keepdims=True)
        hot = np.eye(k + 1)[block.targets.astype(int)]
        values = (weights * ((np.log(sums) + top)[..., 0] - (hot * t).sum(axis=2))).sum(axis=1)
        values = values + 0.5 * (ridges * models**2).sum(axis=1)
        gradients, hessians = np.empty(0), np.empty(0)
        if order > 0:  # grad = A' diag(weights) (prob - hot) Q'
            prob = exps / sums
            slopes = weights[..., None] * ((prob - hot) @ basis.T)
            gradients = (a.swapaxes(1, 2) @ slopes).reshape(n, -1) + ridges * models
        # Block (k, l) of H = A' diag(weights * C_kl) A with C = Q (diag(prob) - prob prob') Q'.
        if order > 1:
            q = prob @ basis.T
            hessians = np.zeros((n, p, k, p, k))
            for u in range(k):
                for v in range(u + 1):
                    c = weights * (prob @ (basis[u] * basis[v]) - q[..., u] * q[..., v])
                    h = (c[..., None] * a).swapaxes(1, 2) @ a
                    hessians[:, :, u, :, v] = 0.5 * (h + h.swapaxes(1, 2))
                    hessians[:, :, v, :, u] = hessians[:, :, u, :, v]
            hessians = hessians.reshape(n, p * k, p * k) + ridges[..., None] * np.eye(p * k)
        return Evaluation(values, gradients, hessians)

    def output_basis(self, outputs: int) -> Array:
        return sum_zero_basis(outputs + 1)

    def row_terms(self, block: Block, t: Array) -> Terms:
        basis, rows = sum_zero_basis(t.shape[2] + 1), np.ix_(*map(range, block.targets.shape))
        classes, y = t @ basis, block.targets.astype(int)
        top = classes.max(axis=2, keepdims=True)
        prob = np.exp(classes - top)
        sums = prob.sum(axis=2, keepdims=True)
        prob /= sums
        values = (np.log(sums) + top)[..., 0] - classes[(*rows, y)]
        mass = block.weights[..., None] * prob
        slopes = mass.copy()
        slopes[(*rows, y)] -= block.weights
        return Terms(block.weights * values, slopes @ basis.T, mass)

    def row_duals(self, block: Block, t: Array, sums: Array | None) -> tuple[Array, Array]:
        basis, weights = sum_zero_basis(t.shape[2] + 1), block.weights[..., None]
        mass = self.row_terms(block, t).mass
        hot = weights * np.eye(len(basis) + 1)[block.targets.astype(int)]
        # P + W v with W = diag(P) - P P' / w, so that the sums are right; its rows keep theirs.
        if sums is not None:
            sign, total = block.features[..., -1:], mass.sum(axis=1)
            pairs = (mass / np.maximum(weights, 1e-300)).swapaxes(1, 2) @ mass
            system = basis @ (total[:, :, None] * np.eye(total.shape[1]) - pairs) @ basis.T
            start = mass
            for _ in range(2):  # the second time removes what the first one's rounding left
                lack = sums - (sign * ((mass - hot) @ basis.T)).sum(axis=1)
                v = (np.linalg.pinv(system, hermitian=True) @ lack[..., None])[..., 0] @ basis
                moves = sign * start * v[:, None]
                mass = mass + moves - start * moves.sum(axis=2, keepdims=True) \
                    / np.maximum(weights, 1e-300)
        share = mass / np.maximum(weights, 1e-300)
        conjugates = np.where((mass >= 0).all(axis=2), -entropy(share).sum(axis=2), np.inf)
        return (mass - hot) @ basis.T, np.where(block.weights > 0, block.weights * conjugates, 0.0)

    def magnitudes_block(self, block: Block, models: Array) -> Magnitudes:
        a, weights = block.features, block.weights
        n, _, p = a.shape
        k = models.shape[1] // p
        basis, hot = sum_zero_basis(k + 1), np.eye(k + 1)[block.targets.astype(int)]
        ridges = self.ridges(block, models.shape[1])
        t = (a @ models.reshape(n, p, k)) @ basis
        terms = (np.abs(a) @ np.abs(models).reshape(n, p, k)) @ np.abs(basis)
        exps = np.exp(t - t.max(axis=2, keepdims=True))
        prob = exps / exps.sum(axis=2, keepdims=True)
        values = (weights * (np.abs(t) * (prob + hot)).sum(axis=2)).sum(axis=1) \
            + weights.sum(axis=1)
        parts = (np.abs(prob - hot), prob * (1.0 - prob) * (np.abs(t) + terms))
        slopes, inside = ((np.abs(a).swapaxes(1, 2)
                           @ (weights[..., None] * (part @ np.abs(basis).T))).reshape(n, -1)
                          for part in parts)
        slopes = slopes + ridges * np.abs(models)
        return Magnitudes(values + 0.5 * (ridges * models**2).sum(axis=1), slopes, slopes + inside)

    def lipschitz(self, samples: Samples) -> Array:
        bounds = np.empty(samples.n_users)  # ||C|| <= 1/2, so ||H|| <= ||A'A|| / 2 + ridge
        for block in samples.users.data.blocks():
            rows = self.design(block.features, block.weights > 0)
            bounds[block.index] = 0.5 * np.linalg.norm(np.sqrt(block.weights)[..., None] * rows, 2,
                                                       axis=(1, 2)) ** 2
        return (bounds + self.ridge) * (1 + 1e-12)

    def decision(self, features: Array, models: Array) -> Array:
        rows, k = self.rows(features, models)
        return np.einsum("np,npk->nk", rows, models.reshape(len(rows), -1, k)) \
            @ sum_zero_basis(k + 1)

    def predict(self, features: Array, models: Array) -> Array:
        return self.decision(features, models).argmax(axis=1).astype(float)

    def conic(self, cp: ModuleType, samples: Samples, x: Any) -> Any:
        users = samples.users.data
        k = samples.dim // (users.n_features + self.intercept)  # outputs
        outputs = cp.vstack([margins_matrix(samples, self, k, u) @ x for u in range(k)])
        t = sum_zero_basis(k + 1).T @ outputs
        hot = np.eye(k + 1)[need_targets(self, users).astype(int)].T
        phi = cp.log_sum_exp(t, axis=0) - cp.sum(cp.multiply(hot, t), axis=0)
        return (1.0 / users.counts[users.owner]) @ phi + ridge_form(cp, self.ridge,
            self.shrunk(samples.dim, k), x)
