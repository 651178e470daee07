"""The bytes of a table: from a file or from standard input, packed or not."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
import sys
import zlib
from os import PathLike
from pathlib import Path
from typing import Any

from coterie.base.errors import InvalidInput, MissingExtra

#: In place of a path: standard input.
STANDARD_INPUT = "-"
#: How packed files start, and how their names end.
PACKED = {b"\x1f\x8b": ".gz", b"BZh": ".bz2", b"\xfd7zXZ\x00": ".xz", b"\x28\xb5\x2f\xfd": ".zst"}
# What was read from standard input: it can be read once only.
_input: tuple[Any, bytes] | None = None


def is_input(path: str | PathLike[str]) -> bool:
    """Whether this stands for standard input."""
    return str(path) == STANDARD_INPUT


def read_bytes(path: str | PathLike[str]) -> bytes:
    """The bytes of a file, or of standard input, which are kept for the next call.

    Raises
    ------
    InvalidInput : there is no file, or it cannot be opened.
    """
    global _input
    if is_input(path):
        if _input is None or _input[0] is not sys.stdin:
            _input = (sys.stdin, sys.stdin.buffer.read())
        return _input[1]
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise InvalidInput("The file cannot be opened: "
                           f"{getattr(error, 'strerror', None) or error}", where=str(path),
                           remedy="Check the path and who may read it") from error


def start_of(path: str | PathLike[str]) -> bytes:
    """The first bytes of a file; none where there is no file."""
    if is_input(path):
        return read_bytes(path)[:8]
    try:
        with Path(path).open("rb") as file:
            return file.read(8)
    except PermissionError as error:
        raise InvalidInput(f"The file cannot be opened: {error.strerror}", where=str(path),
                           remedy="Check who may read it") from error
    except (OSError, ValueError):
        return b""


def fingerprint(path: str | PathLike[str]) -> str:
    """SHA-256 of the file's bytes."""
    if is_input(path):
        return hashlib.sha256(read_bytes(path)).hexdigest()
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError) as error:
        raise InvalidInput("There is no file to read at this path", where=str(path),
                           remedy="Check the path") from error


def kind_of_name(path: str | PathLike[str]) -> str:
    """How the name ends, such as .csv, without the ending of a packed file."""
    name = Path(path)
    return (name.with_suffix("") if name.suffix.lower() in PACKED.values() else name).suffix.lower()


def is_packed(start: bytes) -> bool:
    """Whether a file that starts like this is packed."""
    return any(start.startswith(mark) for mark in PACKED)


def unpack(path: str | PathLike[str], raw: bytes) -> bytes:
    """The bytes of a file, unpacked where it is packed with gzip, bzip2, xz or zstd.

    Raises
    ------
    InvalidInput : the packed file is damaged.
    MissingExtra : zstandard, for files packed with zstd, is not installed.
    """
    ending = next((ending for mark, ending in PACKED.items() if raw.startswith(mark)), "")
    unpackers = {".gz": gzip.decompress, ".bz2": bz2.decompress, ".xz": lzma.decompress,
                 ".zst": _unpack_zstd}
    try:
        return unpackers[ending](raw) if ending else raw
    except (EOFError, OSError, ValueError, zlib.error, lzma.LZMAError) as error:
        raise InvalidInput("The compressed file cannot be read: it is damaged or cut short",
                           where=str(path), remedy="Copy or download it again") from error


def _unpack_zstd(raw: bytes) -> bytes:
    try:
        import zstandard
    except ImportError as error:
        raise MissingExtra("zstandard", "tables", "Reading files packed with zstd") from error
    parts = []
    try:
        while raw:  # a file may be several frames, one after the other
            frame = zstandard.ZstdDecompressor().decompressobj()
            parts.append(frame.decompress(raw))
            if not frame.eof:
                raise EOFError
            raw = frame.unused_data
    except zstandard.ZstdError as error:
        raise EOFError from error
    return b"".join(parts)
