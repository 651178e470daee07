"""`coterie certify`: a run proved again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from coterie.base.labels import groups_of, many
from coterie.base.storage import json_ready
from coterie.cli import options
from coterie.cli.base import app, console
from coterie.output import runs


@app.command("certify")
def run_certify(
    run: options.RunFolder,
    data: Annotated[Path | None, typer.Argument(help="The table of the run; by default the file of "
                                                     "the run.")
                    ] = None,
    threads: options.Threads = None, quiet: options.Quiet = False, as_json: options.Json = False,
) -> None:
    """Certify the models of a run again, from its table.

    RUN is the folder of a run of `coterie fit`, DATA its table (by default the file of the run).
    The problem is built again from the table, the run's settings and its weights; a lower bound on
    its optimum is computed independently of the values stored in the run.

    Example: coterie certify run data.csv
    """
    saved = runs.load_run(run)
    proof = saved.certify(data)
    claims = saved.info
    if as_json:
        print(json.dumps(json_ready({
            "certified": proof.certified, "gap": proof.relative_gap, "n_clusters": proof.n_clusters,
            "objective": proof.objective, "bound": proof.bound, "same_data": proof.same_data,
            "same_claims": proof.same_claims, "same_models": proof.same_models,
                                     "claimed_gap": claims["gap"]})))
    else:
        if proof.same_data is False:
            console.print("This file differs from the file of the run.", style="yellow",
                          soft_wrap=True)
        if not proof.same_claims:
            console.print("The groups differ from those in run.json and models.csv: run.json "
                          f"claims {many(claims['n_clusters'], 'group')} at lam = "
                          f"{claims['lam']:g}.", style="yellow", soft_wrap=True)
        if not proof.same_models:
            console.print("The models in models.csv are not those of these groups.", style="yellow",
                          soft_wrap=True)
        found = groups_of(proof.n_clusters, len(saved.names), "among")
        console.print(f"{found[0].upper()}{found[1:]} at lam = {saved.lam:g}: {proof}.",
                      soft_wrap=True, highlight=False)
        what = " for the released statistics" if "privacy" in claims else ""
        console.print(f"Certified: no other models are better{what} by more than the tolerance."
                      if proof.certified else
                      "Not certified to the tolerance of the run.", soft_wrap=True)
    if not proof.holds:
        raise typer.Exit(1)
