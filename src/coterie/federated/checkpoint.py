"""A run on disk: its state, replaced after every round, and a journal of the rounds so far.

The state file holds a checksum of its contents, arrays as .npz and everything else as JSON, and is
written atomically: so there is always one complete file. The journal grows by one line per round;
the state says how long it is, and lines beyond that, of a round that did not end, are cut off on
loading.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.base.errors import InvalidInput
from coterie.base.storage import open_private, pack, private_folder, unpack, write_atomically


class Checkpoint:
    """A directory with `state.coterie` and `rounds.jsonl`."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.state, self.journal = self.directory / "state.coterie", self.directory / "rounds.jsonl"

    def load(self) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
        """The saved state and the journal's lines that belong to it; None where nothing was saved
        yet.
        """
        if not self.state.exists():
            return None
        saved = unpack(self.state.read_bytes(), str(self.state))
        length = int(saved["journal"])
        text = self.journal.read_bytes() if self.journal.exists() else b""
        if len(text) < length:
            raise InvalidInput(f"{self.journal} is shorter than the state file next to it says",
                               remedy="Start the run again in another directory")
        if len(text) > length:
            with self.journal.open("r+b") as file:
                file.truncate(length)
        return saved, [json.loads(line) for line in text[:length].splitlines()]

    def save(self, state: dict[str, Any], lines: list[dict[str, Any]]) -> None:
        """Append lines to the journal, then replace the state."""
        private_folder(self.directory)
        with open_private(self.journal, "ab") as file:
            for line in lines:
                file.write(json.dumps(line).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
            length = file.tell()
        write_atomically(self.state, pack({**state, "journal": length}), durable=True)


def digest(*arrays: npt.NDArray[Any] | None) -> str:
    """A short name for these numbers, the same for the same ones."""
    sums = hashlib.sha256()
    for array in arrays:
        sums.update(b"none" if array is None else np.ascontiguousarray(array).tobytes())
    return sums.hexdigest()[:16]
