"""The released statistics of a private run, in its folder: what its certificate is about.

They are the problem that was solved, as second moments (`coterie.federated.private.effective`).
They have left the users already, within the budget, so whoever has the folder can certify the run
again without any row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coterie.base.errors import InvalidInput
from coterie.base.storage import pack, unpack, write_atomically
from coterie.data.condensed import Condensed
from coterie.fitting.kinds import kind_of
from coterie.fitting.proof import RunCertificate
from coterie.losses import Loss, Personal, Squared
from coterie.problem.problem import Problem

FILE = "released.coterie"


def write_released(problem: Problem, folder: Path) -> None:
    """Write the released statistics of a solved problem."""
    users, loss = problem.users.data, problem.loss.own_loss
    assert isinstance(users, Condensed)
    assert isinstance(loss, Squared)
    write_atomically(folder / FILE,
                     pack({"features": users.features, "targets": users.targets,
                           "offsets": users.offsets, "sizes": users.sizes, "ridge": loss.ridge}))


def certify_released(run: Any) -> RunCertificate:
    """Certify a private run (`coterie.output.runs.load.Run`) again from its released statistics.

    Raises
    ------
    InvalidInput : the file is missing or damaged.
    """
    file = run.folder / FILE
    if not file.exists():
        raise InvalidInput(f"{run.folder} holds no {FILE}", remedy="Run it again")
    try:
        saved = unpack(file.read_bytes(), str(file))
        p = saved["features"].shape[1]
        users = Condensed(saved["features"], saved["targets"], saved["offsets"], tuple(run.names),
                          tuple(f"z{k}" for k in range(p)), saved["sizes"])
        loss: Loss = Squared(ridge=float(saved["ridge"]), penalize_intercept=True)
        if run.covariance is not None:
            loss = Personal(loss, covariance=run.covariance,
                            scale="rows" if run.scale is None else run.scale)
        problem = Problem(users, loss, run.lam, run.graph)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInput(f"{file} is damaged: {error}", remedy="Run it again") from error
    same = (run.info["n_clusters"] == run.n_clusters and run.info["lam"] == run.lam
            and run.info.get("kind") == kind_of(loss, run.labels))
    return RunCertificate.of(problem, run.solved, run.settings.tol, same_claims=same)
