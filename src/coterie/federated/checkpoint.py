"""A run on disk: its state, replaced whole after every round, and a journal of the rounds so far.

The state file holds a checksum of its contents, arrays as .npz and everything else as JSON; it is written beside the
old one and put in its place in one step, so that whatever happens there is one whole file. The journal grows by a line
a round; the state says how long it is, and lines beyond that, of a round that did not end, are cut off on loading.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coterie.errors import InvalidInput

_MAGIC = b"coterie checkpoint 1\n"


def pack(values: dict[str, Any]) -> bytes:
    """Nested dictionaries of arrays, numbers, texts and lists as bytes."""
    arrays: dict[str, Any] = {}
    plain = json.dumps(_split(values, "", arrays), allow_nan=True)
    stream = io.BytesIO()
    np.savez(stream, **{f"a{k}": array for k, array in enumerate(arrays.values())},
             plain=np.frombuffer(plain.encode(), dtype=np.uint8))
    body = stream.getvalue()
    return _MAGIC + hashlib.sha256(body).digest() + body


def _split(value: Any, place: str, arrays: dict[str, Any]) -> Any:
    if isinstance(value, np.ndarray):
        arrays[place] = value
        return {"": len(arrays) - 1}
    if is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, dict):
        return {key: _split(item, f"{place}/{key}", arrays) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_split(item, f"{place}/{k}", arrays) for k, item in enumerate(value)]
    return value.item() if isinstance(value, np.generic) else value


def unpack(data: bytes, name: str = "checkpoint") -> dict[str, Any]:
    """What `pack` packed; refuses bytes that were changed."""
    head = len(_MAGIC) + 32
    if not data.startswith(_MAGIC) or hashlib.sha256(data[head:]).digest() != data[len(_MAGIC):head]:
        raise InvalidInput(f"{name} is damaged, or not a checkpoint of this version",
                           remedy="Begin the run again in another directory")
    with np.load(io.BytesIO(data[head:]), allow_pickle=False) as saved:
        plain = json.loads(saved["plain"].tobytes())

        def join(value: Any) -> Any:
            if isinstance(value, dict) and set(value) == {""}:
                return saved[f"a{value['']}"]
            if isinstance(value, dict):
                return {key: join(item) for key, item in value.items()}
            return [join(item) for item in value] if isinstance(value, list) else value

        return join(plain)


class Checkpoint:
    """A directory with `state.coterie` and `rounds.jsonl`."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.state, self.journal = self.directory / "state.coterie", self.directory / "rounds.jsonl"

    def load(self) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
        """The saved state and the journal's lines that belong to it; None where nothing was saved yet."""
        if not self.state.exists():
            return None
        saved = unpack(self.state.read_bytes(), str(self.state))
        length = int(saved["journal"])
        text = self.journal.read_bytes() if self.journal.exists() else b""
        if len(text) < length:
            raise InvalidInput(f"{self.journal} is shorter than the state beside it says",
                               remedy="Begin the run again in another directory")
        if len(text) > length:
            with self.journal.open("r+b") as file:
                file.truncate(length)
        return saved, [json.loads(line) for line in text[:length].splitlines()]

    def save(self, state: dict[str, Any], lines: list[dict[str, Any]]) -> None:
        """Append lines to the journal, then put the new state in place of the old one."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with self.journal.open("ab") as file:
            for line in lines:
                file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
            length = file.tell()
        new = self.state.with_suffix(".new")
        with new.open("wb") as file:
            file.write(pack({**state, "journal": length}))
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self.state)
