"""The results of the paper's experiments as files: figures, their data, and the claims."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from coterie.base.storage import safe_cell
from coterie.lab.experiments import paper_figures
from coterie.lab.experiments.paper import Results, Table
from coterie.lab.experiments.paper_claims import Claim

HEADINGS = ("number", "experiment", "claim", "paper", "here, seed 0", "over seeds", "verdict")


def write(folder: Path, results: Results, checked: Sequence[Claim]) -> list[Path]:
    """Write claims.csv, claims.md, a CSV file per table, and a PNG and an HTML file per figure.

    Parameters
    ----------
    folder
        The folder for the files; created if needed.
    results
        The results of `reproduce`.
    checked
        The claims of `claims(results)`.

    Returns
    -------
    list[Path]
        The files.

    Raises
    ------
    MissingExtra
        If Matplotlib or plotly is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tables = results.tables()
    written = [write_table(folder / f"{name}.csv", table) for name, table in tables.items()]
    rows = [(*claim[:-1], claim.verdict.value) for claim in checked]
    columns: Table = {heading: [row[k] for row in rows] for k, heading in enumerate(HEADINGS)}
    written.append(write_table(folder / "claims.csv", columns))
    (folder / "claims.md").write_text(markdown(checked), encoding="utf-8")
    return [*written, folder / "claims.md", *paper_figures.save(folder, tables)]


def write_table(path: Path, table: Table) -> Path:
    """Write a table as CSV, with numbers in Python's notation, which is exact."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(map(safe_cell, table))
        writer.writerows(map(safe_cell, row) for row in zip(*table.values(), strict=True))
    return path


def markdown(checked: Sequence[Claim]) -> str:
    """The claims as a Markdown table."""
    lines = ["| | experiment | claim | paper | here, seed 0 | over seeds | verdict |",
             "|---|---|---|---|---|---|---|"]
    lines += [f"| {c.number} | {c.experiment} | {c.text} | {c.paper} | {c.ours} | {c.seeds} | "
              f"{c.verdict.value} |"
              for c in checked]
    return "\n".join(lines) + "\n"
