"""Finished parts of an interrupted run, kept in its folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from coterie.base.errors import InvalidInput
from coterie.base.storage import pack, unpack, write_atomically


class StoredParts(MutableMapping[str, Any]):
    """Finished parts of a run as files in the folder `progress`, each written atomically.

    Parameters
    ----------
    run : the run folder.
    asked : what the run was asked for; a run is continued only with the same.
    resume : whether to continue the parts that are there; otherwise they are removed.

    Raises
    ------
    InvalidInput : there is nothing to continue, or it was asked for something else.
    """

    def __init__(self, run: Path, asked: Mapping[str, Any], *, resume: bool) -> None:
        self.folder = run / "progress"
        text = json.dumps(asked, sort_keys=True, default=str)
        if resume and "asked" in self and self["asked"] != text:
            raise InvalidInput(f"{run} holds a run of other data or settings",
                               remedy="Give the same ones, or start again without --resume")
        if resume and "asked" not in self:
            raise InvalidInput(f"there is no interrupted run to continue in {run}",
                               remedy="Leave out --resume")
        if not resume:
            self.remove()
        self["asked"] = text

    def remove(self) -> None:
        """Delete all parts."""
        # First: what an interrupt leaves of the others is not continued.
        self._file("asked").unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _file(self, key: str) -> Path:
        return self.folder / f"{key.replace(': ', '-').replace(' ', '-')}.coterie"

    def __getitem__(self, key: str) -> Any:
        if not self._file(key).exists():
            raise KeyError(key)
        return unpack(self._file(key).read_bytes(), str(self._file(key)))["value"]

    def __setitem__(self, key: str, value: Any) -> None:
        write_atomically(self._file(key), pack({"value": value}))

    def __delitem__(self, key: str) -> None:
        self._file(key).unlink()

    def __iter__(self) -> Iterator[str]:
        return (file.stem for file in self.folder.glob("*.coterie"))

    def __len__(self) -> int:
        return sum(1 for _ in self)
