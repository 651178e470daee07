"""Every message that the page of errors shows is raised by the code, word for word."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import coterie as ct
from coterie.base import errors
from coterie.datasets import clustered, ellipses
from coterie.estimators import PersonalizedClassifier
from coterie.federated.private.ledger import NodeLedger
from coterie.federated.runtimes.in_process import LocalNodes
from coterie.fitting import Settings
from coterie.losses.blocks import _require_hessians
from coterie.output.runs import fit_table
from coterie.output.runs.save import check_free

PAGE = Path(__file__).parents[2] / "docs" / "faq.md"
X, Y, WHO = np.arange(8.0).reshape(4, 2), [1.0, -1.0, 1.0, -1.0], ["a", "a", "b", "b"]


def table(header: str = "shop,price,sold", row: Callable[[int], str] = "{0},{1},{2}".format, *, n: int = 24,
          user: str = "shop", **options: Any) -> None:
    """Fit a table whose row i holds what `row` makes of a shop, a price and a number sold."""
    lines = [row(f"shop {i % 4}", i, (i * i) % 5 + 0.5) for i in range(n)]
    Path("sales.csv").write_text("\n".join([header, *lines]) + "\n")
    fit_table("sales.csv", user=user, target="sold", **options)


def odd(number: int, usual: str, other: str) -> Callable[..., str]:
    """A row like `usual`, but like `other` where the price is `number`."""
    return lambda shop, price, sold: (other if price == number else usual).format(shop, price, sold)


def solve(loss: Any = None, lam: Any = 0.1, users: ct.Users | None = None, **options: Any) -> None:
    ct.solve(ct.Problem(users or ellipses(users_per_cluster=2).users, loss or ct.SquaredHinge(), lam=lam), **options)


def predict(users: Any, **settings: Any) -> None:
    data = clustered("logistic", n_users=4, n_clusters=1, samples=10).users
    names = np.array([1, 2, 3, 4])[data.owner]
    model = PersonalizedClassifier(lam=0.1, weights="unit", **settings).fit(data.features, data.targets, users=names)
    model.predict(data.features[:1], users=users)


def finished(folder: str) -> None:
    Path(folder).mkdir()
    Path(folder, "run.json").write_text('{"format": 1, "coterie": "0"}')
    check_free(folder)


def without(library: str, action: Callable[[], object]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, library, None)
        action()


def over_budget() -> None:
    with NodeLedger(None, budget=0.5) as ledger:
        ledger.release("a", "first", 0.4, bytes)
        ledger.release("a", "second", 0.4, bytes)


#: What raises each message of the page.
CASES: dict[str, Callable[[], object]] = {
    "column": lambda: table(user="shp"),
    "user": lambda: table(row=lambda shop, price, sold: f"{shop if price % 3 == 0 else ''},{price},{sold}"),
    "ragged": lambda: table(row=odd(3, "{0},{1},{2}", "{0},1,5,{2}")),
    "texts": lambda: table("shop,note,sold", lambda shop, price, sold: f"{shop},note {price} {sold},{sold}"),
    "numbers": lambda: table(row=odd(3, "{0},{1},{2}", "{0},unknown,{2}")),
    "target": lambda: table(row=lambda shop, price, sold: f"{shop},{price},{sold if price % 3 == 0 else ''}"),
    "one value": lambda: table(row="{0},{1},5".format),
    "classes": lambda: table(n=60, row="{0},{2},{1}".format, task="classification"),
    "nothing": lambda: table("shop,sold", "{0},{2}".format),
    "finished": lambda: finished("run"),
    "nan": lambda: ct.Users.from_arrays([[0.0, 1.0], [2.0, np.nan], [4.0, 5.0], [6.0, 7.0]], Y, WHO),
    "text": lambda: ct.Users.from_arrays([[0.0, "red"], [2.0, "red"], [4.0, "blue"], [6.0, "red"]], Y, WHO),
    "lengths": lambda: ct.Users.from_arrays(X, Y, WHO[:3]),
    "signs": lambda: solve(ct.Logistic(), users=ct.Users.from_arrays(X, [0.0, 1.0, 0.0, 1.0], WHO)),
    "no target": lambda: solve(ct.Logistic(), users=ct.Users.from_arrays(X, None, WHO)),
    "class": lambda: solve(ct.Logistic),
    "lam": lambda: solve(lam=-1.0),
    "rows": lambda: table(task="regression"),
    "loss": lambda: table(row="{0},{2},{1}".format, settings=Settings(loss="logistic"), task="regression"),
    "tolerance": lambda: solve(ct.SquaredHinge(ridge=1e-3), 0.05, ellipses().users, tol=1e-17,
                               solver=ct.Fast(max_iter=1)),
    "one class": lambda: solve(users=ct.Users.from_arrays(X, [1.0, 1.0, 1.0, -1.0], WHO)),
    "unknown": lambda: predict([9], unknown="error"),
    "types": lambda: predict(["1"]),
    "pooled": lambda: predict(None),
    "memory": lambda: _require_hessians(2000, 20_000),
    "extra": lambda: without("cvxpy", lambda: solve(solver="reference")),
    "nodes": lambda: LocalNodes([ct.Users.from_arrays(X, Y, WHO)]).gather(5, 1.0),
    "budget": over_budget,
}


def message(action: Callable[[], object]) -> str:
    """What an action raises or warns of, as Python shows it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            action()
        except ct.CoterieError as error:
            return f"{type(error).__name__}: {error}"
    assert caught, "nothing is raised, and nothing is warned of"
    return f"{caught[0].category.__name__}: {caught[0].message}"


def without_gap(text: str) -> str:
    """A message without its gap, which depends on the solver."""
    return re.sub(r"gap \S+ at", "gap # at", text)


def shown(page: str) -> set[str]:
    """The messages of the page: its text blocks that begin with the name of a class."""
    texts = re.findall(r"^```text\n(\w+: [^`]*?(?:`[\w-]+`[^`]*?)*)\n```$", page, re.M)
    return {without_gap(" ".join(text.split())) for text in texts}


def test_the_page_shows_what_the_code_raises(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    raised = {without_gap(message(action)) for action in CASES.values()}
    page = PAGE.read_text()
    assert shown(page) == raised
    assert shown(page.replace("Did you mean 'shop'", "Did you mean 'shape'")) != raised
    assert len(raised) == len(CASES)


def test_every_class_is_explained():
    classes = {name for name, thing in vars(errors).items() if isinstance(thing, type) and issubclass(
        thing, (ct.CoterieError, ct.CoterieWarning, ct.Interrupted))} - {"CoterieError"}
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.M)) == classes
