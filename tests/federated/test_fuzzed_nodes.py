"""Whatever a server says, a node gives no traceback, and with a budget nothing that depends on rows but releases."""

from __future__ import annotations

import json
import logging
from typing import Any

import numpy as np
import polars as pl
import pytest

from coterie.data.columns import Column
from coterie.data.encoding import Recipe
from coterie.federated import node as nodes
from coterie.federated.agreement import Agreement
from coterie.federated.node import Node
from coterie.federated.protocol.messages import FIELDS, KINDS, BadMessage, Message, Query, decode
from coterie.federated.sources import TableReader
from coterie.fitting.units import Units, make_loss

WARDS = ("east", "north", "south", "west")
#: What a number, a text or anything else of an agreement may be replaced by.
ODD = (None, True, False, 0, 1, -1, 7, 10**9, 2**63, 10**400, 0.5, 1e-320, 1e150, 1e308, float("inf"), float("nan"), "",
       "x", "\0", "\u202e\u0301", "age", "sex", "y", "ward", "f", "m", "1e5", "number", "category", "flag", "date",
       "duration", "regression", "classification", "counts", "clustering", "__class__", "a" * 2_000, [], [[]], [1, "a"],
       ["f", "f"], {}, {"a": 1}, [None], ["f", "m", "q"], list("abcdefghijklmnopqrstuvwxyz"), [[[[[[[[]]]]]]]])


@pytest.fixture(scope="module")
def owners(tmp_path_factory) -> list[dict[str, Any]]:
    """Nodes with the same declared columns and other rows: other values, fewer rows, cells that are odd."""
    folder, rng, owners = tmp_path_factory.mktemp("fuzzed"), np.random.default_rng(0), list[dict[str, Any]]()
    frame = pl.DataFrame({"ward": np.repeat(WARDS, 50), "age": rng.integers(20, 90, 200).astype(str),
                          "sex": rng.choice(["f", "m"], 200), "when": np.repeat("2020-01-31", 200),
                          "y": rng.choice(["0", "1"], 200)})
    odd = pl.DataFrame({"ward": [*WARDS, *WARDS], "age": ["1,5", "?", "1e400", "1.234", "x", "007", "", "-0"],
                        "sex": ["f", "q", "", "1", "1.0", "TRUE", "F", "[1]"],
                        "when": ["2020-01-01", "x", "", "9999-12-31", "0001-01-01", "3", "2020-02-30", "a"],
                        "y": ["0", "x", "", "3", "-1", "1e9", "1.0", "nan"]})
    for k, one in enumerate((frame, odd)):
        one.write_csv(folder / f"{k}.csv")
        owners.append({"data": "csv", "path": str(folder / f"{k}.csv"), "user": "ward", "target": "y",
                       "columns": "age=number, sex=f|m|q, when", "ledger-dir": str(folder / f"ledger {k}"),
                       "models-dir": str(folder / f"models {k}")})
    return owners


def honest() -> dict[str, Any]:
    columns = (Column(name="age", kind="number", fill=40.0), Column(name="sex", kind="category", levels=("f", "m")))
    recipe = Recipe(user="ward", target="y", task="regression", classes=(), class_kind="str", columns=columns, notes=())
    units = Units(task="regression", loss=make_loss("regression", "squared", 1e-3, 0), n_classes=0, mean=np.zeros(3),
                  scale=np.ones(3), centre=0.0, spread=1.0, feature_names=recipe.feature_names)
    return json.loads(Agreement(names=WARDS, features=recipe.feature_names, run="r", recipe=recipe, units=units,
                                task="regression").to_json())


def mutated(value: Any, rng: np.random.Generator, share: float) -> Any:
    """With some parts replaced, left out or doubled."""
    if rng.random() < share:
        return ODD[rng.integers(len(ODD))]
    if isinstance(value, dict):
        kept = {key: mutated(part, rng, share) for key, part in value.items() if rng.random() > 0.2 * share}
        return kept | ({"odd": 1} if rng.random() < 0.2 * share else {})
    if isinstance(value, list):
        parts = [mutated(part, rng, share) for part in value]
        return parts + parts[:1] if parts and rng.random() < share else parts
    return value


DIM = 4
FIELDS_OF = {
    "release": {"stage": np.array(1), "mu": np.array(1e-6), "settings": np.array([0]), "centre": np.zeros(4),
                "scale": np.ones(4)},
    "home": {"centre": np.zeros(DIM), "covariance": np.eye(DIM)[np.triu_indices(DIM)][None], "noise": np.array(1.0)},
    "gradient": {"model": np.zeros(DIM)}, "expand": {"model": np.zeros(DIM), "rank": np.array(-1)},
    "summary": {"centre": np.zeros(DIM), "covariance": np.eye(DIM)[np.triu_indices(DIM)][None], "step": np.array(1.0),
                "rank": np.array(1)},
    "around": {"centre": np.zeros((2, 1, DIM)), "covariance": np.tile(np.eye(DIM)[np.triu_indices(DIM)], (2, 1, 1))},
    "certify": {"model": np.zeros(DIM), "slope": np.zeros(DIM), "anchor": np.zeros(DIM)},
    "train": {"model": np.zeros(DIM), "steps": np.array(3), "rate": np.array(0.1)},
    "prox": {"centre": np.zeros(DIM), "t": np.array(1.0)}, "local": {"ridge": np.array(1.0)}}


def odd_array(array: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    shapes = [(), (0,), (1,), (4,), (2, 5), (10,), (1, 10), (2, 1, 4), (57, 2), (300,), array.shape, array.shape]
    out = np.zeros(shapes[rng.integers(len(shapes))])
    values = [0, 1, -1, 2, 1e-9, 1e-300, 1e30, 1e300, np.inf, -np.inf, np.nan, 0.5, 2**31 - 1]
    out[...] = rng.choice(values, size=out.shape)
    return out if rng.random() < 0.7 or not np.isfinite(out).all() else np.clip(out, -9, 9).astype(np.int32)


def query(rng: np.random.Generator, private: bool) -> bytes:
    kind = ("release", "home")[rng.integers(2)] if private and rng.random() < 0.8 else KINDS[rng.integers(len(KINDS))]
    fields = dict(FIELDS_OF.get(kind, {}))
    for name in list(fields):
        if rng.random() < 0.25:
            fields[name] = odd_array(fields[name], rng)
        elif rng.random() < 0.05:
            del fields[name]
    if rng.random() < 0.05:
        fields[FIELDS[rng.integers(len(FIELDS))]] = odd_array(np.zeros(3), rng)
    try:
        text = Query(kind, int(rng.integers(3)), fields).encode()
    except BadMessage:
        return b"CT"
    if rng.random() < 0.05:  # damaged on its way
        text = text[:rng.integers(len(text) + 1)] + bytes(rng.integers(0, 256, 3, dtype=np.uint8).tolist())
    return text


def said(rng: np.random.Generator) -> dict[str, Any]:
    """What a server says, of which much is as it should be, so that the rest is reached."""
    share = rng.choice([0.0, 0.01, 0.05, 0.3])
    agreed = mutated(honest(), rng, share)
    text = json.dumps(agreed) if rng.random() < 0.97 else "[" * 100_000
    told = {"seed": 0, "held-out": 0.0, "epsilon": 1.0, "task": "auto"}
    return {key: mutated(value, rng, share) for key, value in told.items()} | {"agreement": text, "run": "r"}


def outcome(config: dict[str, Any], told: dict[str, Any], asked: bytes, read: TableReader) -> Any:
    """What leaves: of releases the shape, of all else every word."""
    introduced = Node(told | {"agreement": ""}, config, read).introduce()
    replies = Node(told, config, read).answer({json.dumps(name): asked for name in WARDS})
    shapes = {key: (decode(reply).kind, {name: array.shape for name, array in decode(reply).arrays.items()}, len(reply))
              for key, reply in replies.replies.items()}
    return introduced, shapes, replies.refusals


def fuzz(owners, cases: int, seed: int, **more: Any) -> tuple[int, int]:
    """How many cases were answered, and of how many the outcome was another for other rows."""
    readers, answered, told_apart = [TableReader() for _ in owners], 0, 0
    for case in range(cases):
        rng = np.random.default_rng([seed, case])
        told, asked = said(rng), query(rng, bool(more))
        seen = [outcome(owner | more, told, asked, read) for owner, read in zip(owners, readers, strict=True)]
        answered += bool(seen[0][1])
        told_apart += seen[0] != seen[1]
    return answered, told_apart


BUDGET = {"budget-epsilon": 50.0, "budget-delta": 1e-5}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(nodes, "_STEP", 1e-6)
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("cases", [60, pytest.param(5_000, marks=pytest.mark.slow)])
def test_with_a_budget_no_message_tells_tables_apart(owners, cases):
    answered, told_apart = fuzz(owners, cases, 1, **BUDGET)
    assert told_apart == 0
    assert answered > cases / 20  # the twin: the fuzz reaches what is behind the checks


@pytest.mark.parametrize("cases", [60, pytest.param(5_000, marks=pytest.mark.slow)])
def test_without_a_budget_no_message_gives_a_traceback(owners, cases):
    answered, told_apart = fuzz([{**owner, "allow": ""} for owner in owners], cases, 2)
    assert answered > 0
    assert told_apart > 0  # the twin: there the outcome is a fact of the rows


def test_the_fuzz_sees_what_depends_on_rows(owners, monkeypatch):
    """The twin: a node that says how many rows it has."""
    honest_answer = Node.answer

    def talks(self, queries):
        replies = honest_answer(self, queries)
        return replies._replace(refusals=dict.fromkeys(queries, self.own["path"]))

    monkeypatch.setattr(Node, "answer", talks)
    assert fuzz(owners, 5, 3, **BUDGET)[1] == 5


def test_a_message_is_what_was_encoded():
    made = Message("gradient", 1, {"model": np.arange(3.0)})
    assert decode(made.encode()).arrays["model"].tolist() == [0.0, 1.0, 2.0]
