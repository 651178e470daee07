"""A table with a "who" column: forty shops, their sales, and which shops are similar.

    python examples/shops.py [FOLDER]      # writes shops.csv to FOLDER; `coterie fit` accepts this
                                           file

Every shop has forty days of data: price, temperature, whether it was a Saturday, and how many ice
creams were sold. There are beach shops, city shops and shops at schools; the kind of each shop is
not recorded.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import polars as pl

from coterie.estimators import PersonalizedRegressor


def table(n_shops: int = 40, n_days: int = 40, seed: int = 0) -> tuple[pl.DataFrame, np.ndarray]:
    """The table, and the kind of each shop."""
    rng = np.random.default_rng(seed)
    kind = rng.integers(0, 3, n_shops)
    #                 price  temperature  Saturday  level
    effects = np.array([[-2.0, 6.0, 40.0, 30.0],    # beach
                        [-12.0, 2.0, 15.0, 120.0],  # city
                        [-8.0, 1.0, -60.0, 110.0]])  # school
    shop = np.repeat(np.arange(n_shops), n_days)
    price = rng.uniform(1.5, 4.0, shop.size).round(2)
    temperature = rng.normal(20, 7, shop.size).round(1)
    saturday = rng.random(shop.size) < 1 / 7
    effect = effects[kind[shop]]
    sold = (effect * np.column_stack([price, temperature, saturday, np.ones(shop.size)])).sum(
        axis=1)
    frame = pl.DataFrame({"shop": [f"shop {i:02d}" for i in shop], "price": price,
                          "temperature": temperature,
                          "saturday": saturday, "sold": (sold + rng.normal(0, 25, shop.size)).round(
                              1)})
    return frame, kind


def main(folder: str = ".") -> None:
    frame, kind = table()
    path = Path(folder) / "shops.csv"
    frame.write_csv(path)

    known = frame.filter(pl.col("shop") < "shop 38")
    X, y, shops = known.drop("shop", "sold"), known["sold"], known["shop"]
    model = PersonalizedRegressor(holdout=0.2).fit(X, y, users=shops)
    print(f"{model.n_clusters_} groups among {len(model.users_)} shops, certified: "
          f"{model.gap_ < 1e-6}")
    print(f"groups are the true kinds: {len(set(zip(model.labels_, kind, strict=False))) == 3}")
    print(model.scores_)

    first = np.unique(model.labels_, return_index=True)[1]
    for group, (slopes, level) in enumerate(zip(model.coef_[first], model.intercept_[first],
                                                strict=True)):
        effects = ", ".join(f"{name} {slope:+.1f}" for name, slope in zip(X.columns, slopes,
            strict=True))
        print(f"group {group} ({(model.labels_ == group).sum()} shops): {effects}, level "
              f"{level:+.0f}")

    # Two new shops open. After five days, each gets the model of the group that fits its data.
    new = frame.filter(pl.col("shop") >= "shop 38")
    first_days = new.group_by("shop", maintain_order=True).head(5)
    later = new.join(first_days, on=new.columns, how="anti")
    before = model.score(later.drop("shop", "sold"), later["sold"], users=later["shop"])
    model.personalize(first_days.drop("shop", "sold"), first_days["sold"], users=first_days["shop"])
    after = model.score(later.drop("shop", "sold"), later["sold"], users=later["shop"])
    print(f"two new shops: R2 {before:.2f} with the pooled model, {after:.2f} with five days of "
          "data")
    print(f"The same from the command line: coterie fit {path} --user shop --target sold")


if __name__ == "__main__":
    main(*sys.argv[1:])
