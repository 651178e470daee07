"""Targets that are too far from all others to be of the same kind, such as a slipped decimal point
or a code for "missing": one of them would decide the scale of all targets, the groups and the
models of its group.

    far:  |y_j - median| > 1000 r,      r = the largest |y_j - median| after the 1 % largest, at
                                        least one

Rows with such targets are left out, as rows without a target are, and a sentence says which. Real
heavy tails do not reach so far: of a million lognormal numbers with a deviation of 2 in the
logarithm, the largest is at 150 r. A single target that is not as far, but has most of the
variance, is kept and reported.
"""

from __future__ import annotations

import numpy as np

from coterie.base.types import Indices
from coterie.data.users import Users
from coterie.data.validation import show
from coterie.fitting.settings import Settings

_FAR = 1000.0  # times the distance r
_MOST = 0.5  # share of the sum of squares that one target may have
_FEW = 20  # rows below which one target may have most of the variance


def without_far_targets(users: Users, settings: Settings) -> tuple[Users, list[str]]:
    """Leave out rows whose targets are far from all others, unless the loss is named and not
    robust.

    Parameters
    ----------
    users : their data in the units given.
    settings : of the fit.

    Returns
    -------
    The users, and what to tell their owner, one sentence each. A user who would have no rows left
    keeps all.
    """
    y = users.targets
    if y is None or settings.task not in ("regression", "counts") or len(y) < 3:
        return users, []
    distances = np.abs(y - np.median(y))
    ranks = np.sort(distances)
    reference = ranks[-1 - max(1, len(y) // 100)]
    if settings.loss in ("auto", "huber") and reference > 0 and ranks[-1] > _FAR * reference:
        far = distances > _FAR * reference
        left = users.counts - np.bincount(users.owner[far], minlength=users.n_users)
        far &= left[users.owner] > 0
        if far.any():
            return users.keep_rows(~far), \
                [_left_out(users, np.flatnonzero(far),
                           "poisson" if settings.task == "counts" else "squared")]
    if ranks[-1] == 0 or len(y) < _FEW or settings.loss == "huber" or settings.task == "counts":
        return users, []
    share = 1.0 / float(((distances / ranks[-1]) ** 2).sum())
    if share > _MOST:
        row = int(distances.argmax())
        return users, [f"One target has {share:.0%} of the variance of all: {_row(users, row)}. It "
                       "decides "
                       "the models of its group; if it is not right, correct it or leave the cell "
                       "empty. If it is, "
                       "--loss huber limits its influence."]
    return users, []


def _left_out(users: Users, far: Indices, loss: str) -> str:
    shown = "; ".join(_row(users, row) for row in far[:3]) + "; ..." * (len(far) > 3)
    what = "1 target is" if len(far) == 1 else f"{len(far)} targets are"
    return (f"{what} more than {_FAR:g} times as far from the median as 99% of the others, and "
            f"left out: {shown}. "
            f"Correct the cell or leave it empty; --loss {loss} uses all targets as they are.")


def _row(users: Users, row: int) -> str:
    assert users.targets is not None
    owner = int(users.owner[row])
    number = row - users.offsets[owner] + 1
    return (f"{users.targets[row]:g} (user {show(users.names[owner])}, row {number} of its "
            f"{users.counts[owner]} rows)")
