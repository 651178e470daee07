"""Results of the paper's experiments as files: figures, the tables behind them, and the claims."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from coterie.experiments import paper_figures
from coterie.experiments.paper import Results, Table
from coterie.experiments.paper_claims import Claim

HEADINGS = ("number", "experiment", "claim", "paper", "here, seed 0", "over seeds", "verdict")


def write(folder: Path, results: Results, found: Sequence[Claim]) -> list[Path]:
    """claims.csv, claims.md, a CSV file for every table, a PNG and an HTML file for every figure."""
    folder.mkdir(parents=True, exist_ok=True)
    tables = results.tables()
    written = [write_table(folder / f"{name}.csv", table) for name, table in tables.items()]
    rows = [(*claim[:-1], claim.verdict.value) for claim in found]
    columns: Table = {heading: [row[k] for row in rows] for k, heading in enumerate(HEADINGS)}
    written.append(write_table(folder / "claims.csv", columns))
    (folder / "claims.md").write_text(markdown(found), encoding="utf-8")
    return [*written, folder / "claims.md", *paper_figures.save(folder, tables)]


def write_table(path: Path, table: Table) -> Path:
    """Numbers as Python writes them, so that reading them back gives the same."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(table)
        writer.writerows(zip(*table.values(), strict=True))
    return path


def markdown(found: Sequence[Claim]) -> str:
    lines = ["| | experiment | claim | paper | here, seed 0 | over seeds | verdict |", "|---|---|---|---|---|---|---|"]
    lines += [f"| {c.number} | {c.experiment} | {c.text} | {c.paper} | {c.ours} | {c.seeds} | {c.verdict.value} |"
              for c in found]
    return "\n".join(lines) + "\n"
