"""A data function of a node: data="my_data:load" in its configuration.

It gets the configuration (what the server tells, and over it what the node's owner wrote in --node-config) and returns
the users of this node. It may read a database, a folder, a sensor; what it returns does not leave the node.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import coterie as ct


def load(config: Mapping[str, Any]) -> ct.Users:
    """The patients of all CSV files in `folder`: a file a ward, a row a visit."""
    rows, targets, owners = [], [], []
    for file in sorted(Path(str(config["folder"])).glob("*.csv")):
        with file.open(newline="") as lines:
            for row in csv.DictReader(lines):
                rows.append([float(row["age"]), float(row["pressure"])])
                targets.append(1.0 if row["ill"] == "yes" else -1.0)
                owners.append(f"{file.stem}/{row['patient']}")  # a name that no other node uses
    return ct.Users.from_arrays(rows, targets, owners, feature_names=["age", "pressure"])
