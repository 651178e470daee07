"""The server's side of a deployed federation: fit, run, or run a path. It holds no part of the
algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from coterie.base.errors import interruptible
from coterie.base.storage import json_ready, write_atomically
from coterie.data.files import fingerprint
from coterie.federated.agreement import Agreement, Carrier, agree, read_aside, write_aside
from coterie.federated.config import RunConfig, resolved
from coterie.federated.fit import Carriage, fit_federation
from coterie.federated.path import run_path
from coterie.federated.private.federation import fit_privately
from coterie.federated.run import run_federation
from coterie.federated.session import Round
from coterie.fitting.result import Fit, TableSource
from coterie.fitting.settings import Settings
from coterie.problem.solution import Solution


def serve(runtime: Carrier, config: RunConfig,
          progress: Callable[[Round], None] | None = None) -> Fit | Solution:
    """Wait for the users, agree, run, certify; a run with a checkpoint continues where it was.

    Parameters
    ----------
    runtime : finds the users and carries the queries.
    config : the run configuration.
    progress : called after every round.

    Raises
    ------
    Incompatible : users who did not come, or nodes whose data do not fit together.
    InvalidInput : settings that cannot be used.
    Interrupted : on Ctrl-C, or when Flower stops the run; started again, it continues.
    """
    settings = config.settings
    if config.fit is not None:
        return _serve_fit(runtime, config, config.fit, progress)
    agreement = _agreement(runtime, config)
    runtime.use(agreement)
    federation = settings.federation(agreement.participants, agreement.make_loss())
    path = None if settings.lams is None else run_path(federation, settings, runtime, progress)
    best = run_federation(federation, settings, runtime, progress) if path is None else path.best()
    assert best.account is not None
    aside = {**agreement.refused, **best.account.aside}
    return replace(best, account=replace(best.account, agreement=agreement, path=path, aside=aside))


@interruptible()
def _serve_fit(runtime: Carrier, config: RunConfig, settings: Settings,
               progress: Callable[[Round], None] | None) -> Fit:
    """Choose everything, as `coterie fit` does."""
    run = config.settings
    carriage = Carriage(participation=run.participation, seed=run.seed, checkpoint=run.checkpoint,
                        n_users=config.server.n_users, wait=config.server.wait, progress=progress)
    fitted = (fit_federation(runtime, config.data, settings, carriage) if config.privacy is None
              else fit_privately(runtime, config.data, settings, config.privacy, carriage))
    assert fitted.account is not None
    agreement = Agreement.from_json(_agreed(config).read_text(encoding="utf-8"))
    return replace(fitted, account=replace(fitted.account, agreement=agreement))


def _agreed(config: RunConfig) -> Path:
    """Where the agreement is kept."""
    assert config.settings.checkpoint is not None
    return Path(config.settings.checkpoint) / "federation.json"


def _agreement(runtime: Carrier, config: RunConfig) -> Agreement:
    """Settled at the first start, and kept for later ones."""
    file = _agreed(config)
    if file.exists():
        return replace(Agreement.from_json(file.read_text(encoding="utf-8")),
                       refused=read_aside(file.parent))
    agreement = agree(runtime, config.data, config.server.n_users, config.server.wait)
    write_aside(file.parent, agreement.refused)
    write_atomically(file, agreement.to_json().encode(), durable=True)
    return agreement


def join(runtime: Carrier, config: RunConfig, file: Path,
         progress: Callable[[Round], None] | None = None) -> None:
    """Let newcomers join a finished run, and write who joined which group."""
    from coterie.federated.membership import join_run, write_newcomers
    from coterie.output.runs.load import load_run

    run = load_run(config.server.join)
    write_newcomers(join_run(runtime, run, wait=config.server.wait, progress=progress), run, file)


def describe(found: Fit | Solution) -> str:
    """What was found and what it took, in a line or two."""
    return str(found) if isinstance(found, Solution) else f"{found.why} {found.account}"


def write(found: Fit | Solution, out: Path, config: Mapping[str, Any]) -> None:
    """The results as a run folder.

    Of a table with its recipe, and models in the table's own units; of a fit as `coterie fit`
    writes it, with the page.
    """
    # Brings in the report, which a node's process has no use for.
    from coterie.output.runs import save

    if isinstance(found, Fit):
        _write_fit(found, out, resolved(config))
        return
    assert found.account is not None
    path, agreement = found.account.path, found.account.agreement
    recipe, units, columns, shown = agreement.recipe, agreement.units, None, None
    more: dict[str, Any] = {}
    if path is not None:
        columns = {"lam": path.lams.tolist(), "n_clusters": path.n_clusters.tolist(),
                   "gap": path.gaps.tolist(), "held_out_loss": path.scores.tolist(),
                   "n_rounds": [one.n_rounds for one in path.runs],
                   "bytes": [one.ledger.bytes for one in path.runs]}
    if recipe is not None and units is not None:
        coefficients = units.coefficients(found.models)
        models = coefficients.reshape(len(coefficients), -1)
        first = np.unique(found.labels, return_index=True)[1]
        shown = save.Shown(models, models[first], save.model_columns(units, recipe.classes))
        more = {"task": recipe.task, "notes": list(recipe.notes), "recipe": recipe.to_json(),
                "units": json_ready(units.state())}
    save.write(out, found, config, shown=shown, path=columns, more=more)


def _write_fit(fitted: Fit, out: Path, config: Mapping[str, Any]) -> None:
    from coterie.output.runs.save import write_run

    if fitted.recipe is not None:
        # A file is the table of all only where nodes take their parts of it.
        file = (str(config["path"]) if config["split"] and Path(str(config["path"])).is_file()
                else "")
        names = {name: str(config[name])
                 for name in ("user", "target", "features", "drop", "separator")}
        fitted = replace(fitted, table=TableSource(data=file, fingerprint=fingerprint(file) if file
                                                   else "", **names))
    write_run(fitted, out)
