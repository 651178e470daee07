"""Arrays, numbers and texts as bytes that tell when they were changed: no pickle, nothing that runs on loading."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import fields, is_dataclass
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
