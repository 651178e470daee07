"""Six hospitals with a table each, which no other hospital may see.

    python make_tables.py [FOLDER]      # writes altona.csv, ..., farmsen.csv to FOLDER

Every hospital has five wards, and every ward records for how many days its patients stay. Wards are
of two kinds, which nobody has recorded: in some, old patients stay longer, in the others those who
are admitted at night. Hospitals write things down in different ways: each knows insurances of its
own, and some do not measure everybody's pressure.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np

HOSPITALS = ("altona", "barmbek", "climstadt", "duvenstedt", "eilbek", "farmsen")
INSURANCES = (("public", "private"), ("public", "student"), ("public", "private", "none"),
              ("public", "none"),
              ("public", "private", "student"), ("public", "foreign"))


def kind_of(hospital: int, ward: int) -> int:
    """Which of the two kinds a ward is of."""
    return (hospital + ward) % 2


def write_tables(folder: str | Path = ".", *, wards: int = 5, patients: int = 40,
                 seed: int = 0) -> list[Path]:
    """One CSV file for each hospital, one row for each patient."""
    rng, files = np.random.default_rng(seed), []
    for k, (hospital, insurances) in enumerate(zip(HOSPITALS, INSURANCES, strict=True)):
        file = Path(folder) / f"{hospital}.csv"
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(["ward", "age", "pressure", "night", "insurance", "days"])
            for ward in range(wards):
                for _ in range(patients):
                    age, pressure, night = rng.normal(60, 15), rng.normal(130, 18), \
                        rng.random() < 0.3
                    insurance = rng.choice(insurances)
                    days = 9 + 0.02 * (pressure - 130) + (insurance == "private") + rng.normal(0, 1)
                    days += -3 * night if kind_of(k, ward) else 0.15 * (age - 60)
                    # Two hospitals do not measure everybody's pressure.
                    known = k % 3 != 1 or rng.random() > 0.2
                    writer.writerow([f"{hospital} {ward + 1}", round(age),
                                     f"{pressure:.0f}" if known else "",
                                     "yes" if night else "no", insurance, f"{days:.1f}"])
        files.append(file)
    return files


if __name__ == "__main__":
    for file in write_tables(*sys.argv[1:]):
        print(file)
