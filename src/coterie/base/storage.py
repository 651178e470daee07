"""Files and the values in them: atomic writes, values as JSON has them, arrays as checksummed
bytes, and symmetric matrices as their upper triangles.

Nothing is pickled, so that nothing runs on loading.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from coterie.base.errors import InvalidInput
from coterie.base.types import Array

_MAGIC = b"coterie checkpoint 1\n"
# What begins a formula, after apostrophes and blanks.
_FORMULA = re.compile("'*\\s*[=+\\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")


def write_atomically(path: str | os.PathLike[str], data: bytes, *, durable: bool = False,
                     shared: bool = False) -> None:
    """Write a file in one step: readers see the old content or the new content, never a part of it.

    Only its owner can read it (0600), since answers and checkpoints are personal data, unless it is
    a result: these are the user's to share, and follow the umask.

    Parameters
    ----------
    path : the file; missing folders are created.
    data : its new content.
    durable : whether to wait until the data is on the disk, so that it also survives a power
        failure.
    shared : whether who may read it, and the folders that it needs, follows the umask.

    Raises
    ------
    OSError : the file cannot be written; the old one is then unchanged.

    Example
    -------
    >>> write_atomically("results/run.json", b"{}")
    """
    path = Path(path)
    new = path.with_name(path.name + ".new")
    if shared:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.unlink(missing_ok=True)  # what an interrupted run left may be private
    else:
        private_folder(path.parent)
        open_private(new, "wb").close()
    new.write_bytes(data)
    if durable:
        with new.open("r+b") as file:
            os.fsync(file.fileno())
    os.replace(new, path)


def private_folder(path: str | os.PathLike[str]) -> Path:
    """A folder that only its owner can open (0700) if it is created here; missing folders above it
    follow the umask.
    """
    path = Path(path)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return path


LOCK = ".lock"


@contextmanager
def locked(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Hold a folder for one run: a second one meanwhile, also of another process, is refused.

    The system gives the lock back when its process ends, however it ends. A folder that was created
    for nothing is removed again.

    Raises
    ------
    InvalidInput : another run writes there; with its process.

    Example
    -------
    >>> with locked("results"):
    ...     write_atomically("results/run.json", b"{}")
    """
    try:
        import fcntl
    except ImportError:  # pragma: no cover - without POSIX locks
        yield
        return
    new = not Path(folder).exists()
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(folder) / LOCK
    with open_private(path, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            raise InvalidInput(f"another run writes into {folder} (process {file.read() or '?'})",
                               remedy="Wait until it has ended, or name another folder") from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            if new and not any(Path(folder).iterdir()):
                Path(folder).rmdir()


def open_private(path: str | os.PathLike[str], mode: str = "wb") -> IO[Any]:
    """Open a file for writing that only its owner can read (0600), also where it was there before.
    """

    def opener(name: str, flags: int) -> int:
        number = os.open(name, flags, 0o600)
        if os.name == "posix":
            os.fchmod(number, 0o600)
        return number

    return open(path, mode, opener=opener, encoding=None if "b" in mode else "utf-8")


def safe_cell(value: Any) -> Any:
    """A cell of a CSV file that no spreadsheet takes for a formula: an apostrophe before texts that
    look like one.

    Numbers, also as texts, stay as they are. `plain_cell` gives the text back.

    Example
    -------
    >>> safe_cell("=1+1"), safe_cell("ann"), safe_cell("-5"), safe_cell("'=1+1")
    ("'=1+1", 'ann', '-5', "''=1+1")
    """
    if not isinstance(value, str) or not _FORMULA.match(value):
        return value
    try:
        float(value)
    except ValueError:
        return f"'{value}"
    return value


def plain_cell(text: str) -> str:
    """The text that `safe_cell` was given.

    Example
    -------
    >>> plain_cell("'=1+1"), plain_cell("''=1+1"), plain_cell("'ann")
    ('=1+1', "'=1+1", "'ann")
    """
    return text[1:] if text.startswith("'") and _FORMULA.match(text) else text


def json_ready(value: Any) -> Any:
    """The same value in the types that JSON has: nan and the infinities become None.

    Parameters
    ----------
    value : numbers, texts, arrays, mappings and sequences, nested as deep as needed; anything else
        becomes its text.

    Returns
    -------
    None, bool, int, float, str, and lists and dictionaries of these.

    Example
    -------
    >>> json_ready({"gap": float("inf"), "models": np.array([[1.0, np.nan]])})
    {'gap': None, 'models': [[1.0, None]]}
    """
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        finite = np.isfinite(value)
        if not finite.all():
            value = value.astype(object)
            value[~finite] = None
        return value.tolist()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): json_ready(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, np.ndarray)):
        return [json_ready(item) for item in value]
    return str(value)


def pack(values: dict[str, Any]) -> bytes:
    """Nested dictionaries of arrays, numbers, texts and lists as bytes."""
    arrays: dict[str, Any] = {}
    plain = json.dumps(_split(values, "", arrays), allow_nan=True)
    stream = io.BytesIO()
    np.savez(stream, **{f"a{k}": array for k, array in enumerate(arrays.values())},
             plain=np.frombuffer(plain.encode(), dtype=np.uint8))
    body = stream.getvalue()
    return _MAGIC + hashlib.sha256(body).digest() + body


def _split(value: Any, key_path: str, arrays: dict[str, Any]) -> Any:
    if isinstance(value, np.ndarray):
        arrays[key_path] = value
        return {"": len(arrays) - 1}
    if is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, dict):
        return {key: _split(item, f"{key_path}/{key}", arrays) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_split(item, f"{key_path}/{k}", arrays) for k, item in enumerate(value)]
    return value.item() if isinstance(value, np.generic) else value


def unpack(data: bytes, name: str = "checkpoint") -> dict[str, Any]:
    """What `pack` packed; refuses bytes that were changed."""
    head = len(_MAGIC) + 32
    if not data.startswith(_MAGIC) or hashlib.sha256(data[head:]).digest() != data[
        len(_MAGIC):head]:
        raise InvalidInput(f"{name} is damaged, or not a checkpoint of this version",
                           remedy="Begin the run again in another directory")
    def join(value: Any, saved: Any) -> Any:
        if isinstance(value, dict) and set(value) == {""}:
            return saved[f"a{value['']}"]
        if isinstance(value, dict):
            return {key: join(item, saved) for key, item in value.items()}
        return [join(item, saved) for item in value] if isinstance(value, list) else value

    try:
        with np.load(io.BytesIO(data[head:]), allow_pickle=False) as saved:
            unpacked = join(json.loads(saved["plain"].tobytes()), saved)
            if not isinstance(unpacked, dict):
                raise TypeError("it holds no values by name")
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OSError, EOFError,
            zipfile.BadZipFile, zlib.error) as error:
        raise InvalidInput(f"{name} holds something else than a checkpoint: {error}",
                           remedy="Begin the run again in another directory") from error
    return unpacked


def triangle(matrices: Array) -> Array:
    """(n, d (d + 1) / 2) the upper triangles of symmetric matrices, row by row."""
    rows, columns = np.triu_indices(matrices.shape[-1])
    return np.asarray(matrices[..., rows, columns])


def square(triangles: Array, dim: int) -> Array:
    """(n, d, d) the symmetric matrices of their upper triangles."""
    out = np.empty((*triangles.shape[:-1], dim, dim))
    rows, columns = np.triu_indices(dim)
    out[..., rows, columns] = triangles
    out[..., columns, rows] = triangles
    return out


_SAME = "Install the same version of coterie on the server and at the nodes"


def packed(arrays: Sequence[Array]) -> Array:
    """Arrays of numbers as one: how many, and each with its number of axes and its shape."""
    parts = [np.array([float(len(arrays))])]
    for array in arrays:
        parts += [np.array([array.ndim, *array.shape], dtype=float),
                  np.asarray(array, dtype=float).ravel()]
    return np.concatenate(parts)


def unpacked(numbers: Array) -> list[Array]:
    """The arrays that `packed` was given.

    Raises
    ------
    InvalidInput : numbers that are no arrays.
    """
    out, at = list[Array](), 0

    def take(count: int) -> Array:
        nonlocal at
        if at + count > numbers.size:
            raise InvalidInput("the numbers of a question end too early", remedy=_SAME)
        part = numbers[at:at + count]
        at += count
        return part

    def size(number: float) -> int:
        if not 0 <= number <= numbers.size or number != int(number):
            raise InvalidInput(f"a question has {number:g} arrays or axes", remedy=_SAME)
        return int(number)

    for _ in range(size(take(1)[0])):
        shape = [size(axis) for axis in take(min(size(take(1)[0]), 3))]
        out.append(take(int(np.prod(shape, dtype=object))).reshape(shape))
    return out
