"""The fit to all rows, computed beside the fit without the held-out rows.

Both search for groups among the same users. The second one then needs the kind of models, which the
first one chooses. The kind that its own search suggests is mostly the one, so the path is solved
for this one without waiting. If another one is chosen, what was computed for the first one is not
used.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import numpy as np

from coterie.base.machine import Beside, begin_beside
from coterie.data.users import Users
from coterie.fitting.kinds import Sharing
from coterie.fitting.plan import PathPlan, by_groups, plan_likely
from coterie.fitting.settings import Settings
from coterie.fitting.work import Work
from coterie.losses import Loss
from coterie.losses.rows import too_wide

# Numbers in the Hessians of all users up to which two fits have room at the same time.
_ROOM = 2**25


class Ahead:
    """A fit to all rows that is under way beside this process.

    Parameters
    ----------
    inner : the users with all rows, in the solver's units.
    loss : of their models.
    settings : of the fit.
    work : where its finished parts go; what is there is not computed again.
    finish : computes what follows from a plan, and keeps it in the work that it is given.
    """

    def __init__(self, inner: Users, loss: Loss, settings: Settings, work: Work,
                 finish: Callable[[PathPlan, Work], Any]) -> None:
        self.settings, self.work = settings, work
        large = inner.n_users * loss.dim(inner) ** 2 > _ROOM
        possible = not large and by_groups(inner, settings) and not too_wide(loss,
            loss.prepare(inner))
        known = work.get("groups")

        def compute(parts: MutableMapping[str, Any]) -> None:
            if known is not None:
                parts["groups"] = known
            silent = Work(parts=parts)
            finish(plan_likely(inner, loss, settings, silent), silent)
            parts["end"] = True

        self.beside: Beside | None = begin_beside(compute) if possible \
            and work.get("kind") is None else None

    def deliver(self, like: Sharing | None) -> None:
        """Wait for the parts that are of use, and keep them.

        Parameters
        ----------
        like : what users share without the held-out rows, if that was chosen.
        """
        if self.beside is None or not self._keep("groups") or not self.beside.wait_for("kind"):
            return
        shared = self.beside.parts["kind"]
        likely = shared["kind"], len(np.unique(np.asarray(shared["labels"])))
        if self.settings.lam != "auto" or (like is not None and likely
                                           == (like.kind, like.n_groups)):
            self.beside.wait_for("end")
            for name in [name for name in self.beside.parts if name not in ("groups", "end")]:
                self._keep(name)

    def _keep(self, name: str) -> bool:
        """Wait for a part and keep it; False if it never comes."""
        assert self.beside is not None
        if not self.beside.wait_for(name):
            return False
        self.beside.warn_again(name)
        self.work.keep(name, self.beside.parts[name])
        return True

    def end(self) -> None:
        """End what is under way; the groups are kept if they are known."""
        if self.beside is not None:
            self.beside.end()
            if "groups" in self.beside.parts and self.work.get("groups") is None:
                self._keep("groups")
