"""Losses computed from users' samples, laid out in dense blocks of users with equally many rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from coterie.base.errors import Incompatible
from coterie.base.machine import in_parts, require_memory
from coterie.base.types import Array, Flags, Indices, Ints
from coterie.data.users import Block, Participants, Users
from coterie.losses.base import DualBounds, Evaluation, Loss, Magnitudes, Samples
from coterie.losses.frame import Frame
from coterie.losses.newton import solve_scaled

_COPIES = 4  # of all Hessians at a time, in a solver
_ROUGH_STEPS = 4  # Newton steps to a rough bound
_PART = 2**19  # numbers in the rows of the users that are computed at a time


@dataclass(frozen=True, eq=False)
class BlockSamples(Samples):
    """Users' data in the form a loss computes on: padded blocks of the loss's own design matrix."""

    users: Users
    blocks: tuple[Block, ...]  # in local coordinates, where there is a frame

    @cached_property
    def positions(self) -> tuple[Indices, Indices]:
        """(n_users,) the number of each user's block, and the user's row in it."""
        numbers, rows = np.empty((2, self.n_users), dtype=np.intp)
        for k, block in enumerate(self.blocks):
            numbers[block.index], rows[block.index] = k, np.arange(len(block.index))
        return numbers, rows

    @cached_property
    def flat(self) -> tuple[Array, Array, Array, Ints]:
        """The first four numbers of `Flat`: rows, targets, weights and starts."""
        counts = np.asarray(self.users.counts, dtype=np.int64)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        rows = np.empty((starts[-1], self.dim))
        targets, weights = np.empty(starts[-1]), np.empty(starts[-1])
        for block in self.blocks:
            real = block.weights > 0
            at = (starts[block.index][:, None] + np.arange(real.shape[1]))[real]
            rows[at], targets[at] = block.features[real], block.targets[real]
            weights[at] = block.weights[real]
        return rows, targets, weights, starts


def in_blocks(loss: Loss, samples: Samples) -> BlockSamples:
    """The samples as blocks; refuses those that another kind of loss prepared."""
    if not isinstance(samples, BlockSamples):
        raise Incompatible(f"{type(loss).__name__} is computed from users' samples, and these were "
                           "prepared by a loss "
                           "that needs none. Prepare them with the loss that is evaluated.")
    return samples


class Terms(NamedTuple):
    """The losses of the rows of users who have equally many."""

    values: Array  # (n, m) w phi(t)
    slopes: Array  # (n, m, k) w phi'(t)
    mass: Array  # (n, m, 1) w phi''(t), or for softmax (n, m, C) w times the probabilities


class BlockLoss(Loss):
    """A loss that is computed from users' samples, one block of users at a time.

    A class says `dim` and `evaluate_block`, and `check_targets` where not every target will do.
    Padding rows of a block have weight 0 and must not change the result.

    Example
    -------
    >>> import numpy as np
    >>> import coterie as ct
    >>> from coterie.losses import BlockLoss, Evaluation
    >>> class HalfSquares(BlockLoss):
    ...     def dim(self, users):
    ...         return users.n_features
    ...     def evaluate_block(self, block, models, order):
    ...         gaps = models[:, None, :] - block.features
    ...         values = 0.5 * (block.weights * (gaps**2).sum(axis=2)).sum(axis=1)
    ...         gradients = (block.weights[..., None] * gaps).sum(axis=1)
    ...         hessians = np.tile(np.eye(models.shape[1]), (len(models), 1, 1))
    ...         return Evaluation(values, gradients, hessians)
    >>> users = ct.Users.from_arrays([[0.0], [2.0], [4.0]], user=["ann", "bob", "bob"])
    >>> loss = HalfSquares()
    >>> loss.values(loss.prepare(users), np.zeros((2, 1))).tolist()
    [0.0, 5.0]
    """

    # ---- of losses that can be wide, in `coterie.losses.rows`: t = A x are the outputs of rows

    @property
    def free_intercept(self) -> bool:
        """Whether there is an intercept that the ridge does not cover."""
        return False

    def output_basis(self, outputs: int) -> Array | None:
        """(outputs, classes) the outputs as combinations of classes; None for one output."""
        return None

    def row_terms(self, block: Block, t: Array) -> Terms:
        """The losses of rows with outputs t (n, m, outputs)."""
        raise self._no_outputs()

    def row_duals(self, block: Block, t: Array, sums: Array | None) -> tuple[Array, Array]:
        """alpha (n, m, outputs) near the slopes of rows with outputs t, and the terms (n, m) of the
        conjugate there.

        Parameters
        ----------
        block : the rows.
        t : their outputs.
        sums : (n, outputs) what sum_j sign alpha_j must be; None where alpha can be the slopes
            themselves.
        """
        raise self._no_outputs()

    def _no_outputs(self) -> Incompatible:
        return Incompatible(f"{type(self).__name__} has no outputs of rows: use `evaluate`.")

    def design(self, features: Array, real: Flags, local: bool = False) -> Array:
        """The rows the loss computes on.

        Parameters
        ----------
        features : (..., p).
        real : (...) marks rows that are samples, not padding.
        local : whether the features are in local coordinates, in which an intercept has the sign
            +1.
        """
        return features

    def check_targets(self, users: Users) -> None:
        """Raise InvalidInput where a target is outside the loss's domain."""

    @abstractmethod
    def evaluate_block(self, block: Block, models: Array, order: int) -> Evaluation:
        """Values, gradients and Hessians of the users of one block; derivatives above `order` may
        be left empty.

        Parameters
        ----------
        block : n users with m rows each, after `design`.
        models : (n, dim) their models, in the same order.
        order : 0 for values only, 1 for gradients too, 2 for Hessians too.
        """

    def frame(self, users: Users) -> Frame | None:
        """Local coordinates for users whose numbers are very large or very small; None where there
        are none.
        """
        return None

    def magnitudes_block(self, block: Block, models: Array) -> Magnitudes | None:
        """`magnitudes` of the users of one block; None where the loss does not know them."""
        return None

    def coordinates(self, samples: Samples) -> Frame | None:
        return samples.frame

    def prepare(self, users: Participants) -> BlockSamples:
        """The users' data as blocks: the same object as before, as long as somebody keeps it."""
        data: Users = users.data
        parameters = getattr(self, "__dataclass_params__", None)
        if parameters is None or not parameters.frozen or type(self).__hash__ is object.__hash__:
            return self._prepare(data)  # a loss that may change
        samples = data.prepared.get(self)
        if samples is None:
            samples = data.prepared[self] = self._prepare(data)
        return samples

    def _prepare(self, data: Users) -> BlockSamples:
        data.require_samples()
        self.check_targets(data)
        frame, blocks = self.frame(data), []
        for block in data.blocks():
            real = block.weights > 0
            if frame is not None:
                block = block._replace(features=frame.rows(block.features, block.index, real),
                                       targets=frame.targets(block.targets, block.index, real),
                                       units=frame.units(block.index))
            blocks.append(block._replace(features=self.design(block.features, real,
                frame is not None)))
        return BlockSamples(data, self.dim(data), tuple(blocks), frame=frame)

    def evaluate(self, samples: Samples, models: Array, order: int = 2,
                 users: Indices | None = None) -> Evaluation:
        frame = samples.frame
        if frame is None:
            return self.evaluate_local(samples, models, order, users)
        who = np.arange(samples.n_users) if users is None else users
        f, g, h = self.evaluate_local(samples, frame.enter(models, who), order, users)
        return Evaluation(f, frame.gradients(g, who) if order > 0 else g,
                          frame.hessians(h, who) if order > 1 else h)

    def magnitudes(self, samples: Samples, models: Array,
                   users: Indices | None = None) -> Magnitudes:
        samples = in_blocks(self, samples)
        n = samples.n_users if users is None else len(users)
        out = Magnitudes(np.empty(n), np.empty(models.shape), np.empty(models.shape))
        unknown = list[slice]()
        for block, rows, who in self._chosen(samples, users):
            def part(some: slice, block: Block = block, rows: Indices = rows,
                     who: Indices | None = who) -> None:
                piece = slice_users(block, some) if who is None else take_users(block, who[some])
                result = self.magnitudes_block(piece, models[rows[some]])
                if result is None:
                    unknown.append(some)
                    return
                for full, values in zip(out, result, strict=True):
                    full[rows[some]] = values

            in_parts(part, len(rows), _part_of(block))
        return super().magnitudes(samples, models, users) if unknown else out

    def rough_bounds(self, samples: Samples, slopes: Array, start: Array, about: Array,
                     enough: float) -> DualBounds:
        curved = self.curvatures(samples)
        if self.wide(samples) or not (curved > 0).all():
            return super().rough_bounds(samples, slopes, start, about, enough)
        frame, who = self.coordinates(samples), np.arange(samples.n_users)
        u, centre, z = slopes, about, start
        if frame is not None:
            u, centre, z = frame.slopes(slopes, who), frame.enter(about, who), \
                frame.enter(start, who)
        settled = np.zeros(len(who), dtype=bool)
        for _ in range(_ROUGH_STEPS):
            with np.errstate(over="ignore", invalid="ignore"):
                f, g, h = self.evaluate_local(samples, z, 2)
                slack = float(((u - g) ** 2 / (2.0 * curved)).sum())
            if slack <= enough * np.abs(f).sum():
                return self._dual_bound(samples, z, u, centre, curved, who, settled)
            units = np.sqrt(np.maximum(np.einsum("nii->ni", h), 1e-300))
            z = z + solve_scaled(h, units, np.full(len(z), 1e-15), u - g)
        return super().rough_bounds(samples, slopes, start, about, enough)

    def evaluate_local(self, samples: Samples, models: Array, order: int = 2,
                       users: Indices | None = None) -> Evaluation:
        samples = in_blocks(self, samples)
        if users is not None and len(users) == samples.n_users \
            and (users == np.arange(len(users))).all():
            users = None  # everyone, in order
        if order > 1:
            _require_hessians(*models.shape)
        if users is None and len(samples.blocks) == 1 and samples.blocks[0].features.size <= 2 \
            * _PART:
            return self.evaluate_block(samples.blocks[0], models, order)  # nothing to gather
        n, d = models.shape
        out = Evaluation(np.empty(n), np.empty((n if order > 0 else 0, d)),
                         np.empty((n if order > 1 else 0, d, d)))
        for block, rows, who in self._chosen(samples, users):
            def part(some: slice, block: Block = block, rows: Indices = rows,
                     who: Indices | None = who) -> None:
                piece = slice_users(block, some) if who is None else take_users(block, who[some])
                result = self.evaluate_block(piece, models[rows[some]], order)
                for full, values in zip(out[: order + 1], result[: order + 1], strict=True):
                    full[rows[some]] = values

            in_parts(part, len(rows), _part_of(block))
        return out

    def _chosen(self, samples: BlockSamples,
                users: Indices | None) -> Iterator[tuple[Block, Indices, Indices | None]]:
        """Every block, where its users stand in the result, and which of its users are meant; None
        for all.
        """
        numbers = None if users is None else samples.positions[0][users]
        for k, block in enumerate(samples.blocks):
            if users is None:
                yield block, block.index, None
            elif (rows := np.flatnonzero(numbers == k)).size:
                yield block, rows, samples.positions[1][users[rows]]


def _part_of(block: Block) -> int:
    """How many users of a block are computed at a time: what fits into a cache, and many enough to
    pay.
    """
    return max(1, _PART // max(block.features[0].size, 1)) if len(block.features) else 1


def _require_hessians(n: int, dim: int) -> None:
    require_memory(8.0 * _COPIES * n * dim**2, f"Second derivatives of {n:,} users with models of "
                                               f"{dim:,} coordinates",
                   "Standardise the features and use a ridge > 0 if users have fewer rows than "
                   "that, or use fewer "
                   "features, such as the first principal components, or fewer classes")


def slice_users(block: Block, rows: slice) -> Block:
    """The users in these rows of a block, without copies."""
    return Block(block.index[rows], block.features[rows], block.targets[rows], block.weights[rows],
                 None if block.units is None else block.units[rows])


def take_users(block: Block, rows: Indices) -> Block:
    """The users in these rows of a block."""
    return Block(block.index[rows], block.features[rows], block.targets[rows], block.weights[rows],
                 None if block.units is None else block.units[rows])
