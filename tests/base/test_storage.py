"""Files are replaced in one step, and values become what JSON has."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from coterie.base.storage import json_ready, write_atomically


def test_a_file_is_created_with_its_folders_and_replaced(tmp_path):
    path = tmp_path / "a" / "b.txt"
    for data in (b"first", b"second"):
        write_atomically(path, data, durable=data == b"second")
        assert path.read_bytes() == data
    assert [file.name for file in path.parent.iterdir()] == ["b.txt"]


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "b.txt"
    write_atomically(path, b"old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"


def test_a_plain_write_is_not_atomic(tmp_path):
    """The twin: a file that is opened for writing has lost its old content before the new one is there."""
    path = tmp_path / "b.txt"
    path.write_bytes(b"old")
    with path.open("wb"):
        assert path.read_bytes() != b"old"


def test_values_become_what_json_has():
    value = {"a": np.array([[1.0, np.nan], [np.inf, 2.0]]), 3: (1, np.float32(0.5), {"x": -np.inf}), "p": Path("x"),
             "t": True, "n": None, "i": np.int64(4), "e": np.empty(0), "s": np.array(["u"], dtype=object)}
    ready = json_ready(value)
    assert ready == {"a": [[1.0, None], [None, 2.0]], "3": [1, 0.5, {"x": None}], "p": "x", "t": True, "n": None,
                     "i": 4, "e": [], "s": ["u"]}
    json.dumps(ready, allow_nan=False)
    with pytest.raises(ValueError, match="JSON compliant"):
        json.dumps({"a": np.nan}, allow_nan=False)
