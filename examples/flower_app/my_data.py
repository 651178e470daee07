"""A data function of a node, set by data="my_data:load" in its configuration.

It receives the configuration (the settings of the server, overridden by those of the owner in
--node-config, where its own are called args.NAME) and returns the users of this node. It can read a
database, a folder or a sensor; the data do not leave the node.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import coterie as ct


def load(config: Mapping[str, Any]) -> ct.Users:
    """Read the patients of all CSV files in `folder` (args.folder in the node's configuration): one
    file per ward, one row per visit.
    """
    rows, targets, owners = [], [], []
    for file in sorted(Path(str(config["folder"])).glob("*.csv")):
        with file.open(newline="") as lines:
            for row in csv.DictReader(lines):
                rows.append([float(row["age"]), float(row["pressure"])])
                targets.append(1.0 if row["ill"] == "yes" else -1.0)
                owners.append(f"{file.stem}/{row['patient']}")  # unique among all nodes
    return ct.Users.from_arrays(rows, targets, owners, feature_names=["age", "pressure"])
