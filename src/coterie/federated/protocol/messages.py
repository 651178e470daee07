"""What is sent between the server and the users: queries, replies, and their binary form.

A message is a kind, a round and named arrays of numbers; nothing else is sent. Many messages of one
kind are kept as a `Batch`, one row per user, so that thousands of users are asked and reply without
a loop; a batch reads as a mapping from users to single messages. The binary form is fixed and
versioned, holds plain little-endian numbers, and ends in a checksum:

    "CT"  version  kind  round  n_fields  { field  type  n_axes  axes... }  numbers...  crc32
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from coterie.base.errors import CoterieError
from coterie.base.storage import square as square
from coterie.base.storage import triangle as triangle
from coterie.base.types import Ints

Array = npt.NDArray[Any]
Fields = Mapping[str, Array]

VERSION = 2
#: What can be asked; the position in the list is the code in the binary form, so new kinds go to
#: the end.
KINDS = ("describe", "local", "expand", "gradient", "prox", "train", "certify", "score", "pdmm",
         "moments", "join", "facts", "summary", "evidence", "around", "release", "home", "average")
#: Names of fields; likewise.
FIELDS = ("model", "anchor", "share", "value",
          "gradient", "hessian", "factor", "diagonal", "rank", "centre", "t", "point", "steps",
          "rate", "slope", "conjugate", "residual", "zero", "lack", "score", "count", "ridge",
          "means", "m2", "models", "who", "difference", "dual", "dual_at", "update", "step",
          "beyond", "settings", "neighbours", "radii", "others", "quiet", "wake", "wake_model",
          "tails", "hat", "hit", "curvature", "stiffness", "sign", "size", "rounding", "target",
          "scatter", "covariance", "noise", "fitted", "alone", "together", "scores", "worse",
          "values", "evidence", "information", "stage", "mu", "scale", "released", "basis", "core")
TYPES: tuple[np.dtype[Any], ...] = (np.dtype("<f8"), np.dtype("<i4"))
_HEAD = struct.Struct("<2sBBIB")
_MAGIC = b"CT"
FRAME = _HEAD.size + 4
_AXES = 3  # most axes of an array


#: How the reason of a refusal begins that is a node's own decision; asking again does not change
#: it.
REFUSES = "its node refuses: "


class BadMessage(CoterieError):
    """Bytes or arrays that are no message of this protocol; the text says why."""


@dataclass(frozen=True, eq=False)
class Message:
    """Named arrays of numbers, of one kind, in one round."""

    kind: str
    round: int
    arrays: Fields

    @property
    def numbers(self) -> int:
        return sum(array.size for array in self.arrays.values())

    def encode(self) -> bytes:
        """The wire form."""
        head = [_HEAD.pack(_MAGIC, VERSION, KINDS.index(self.kind), self.round, len(self.arrays))]
        body = []
        for name, array in self.arrays.items():
            kind = 1 if array.dtype.kind in "iub" else 0
            if kind and array.size and not -(1 << 31) <= int(array.min()) <= int(
                array.max()) < 1 << 31:
                raise BadMessage(f"The field {name!r} holds an integer that is too large for a "
                                 "message.")
            head.append(struct.pack(f"<BBB{array.ndim}I", FIELDS.index(name), kind, array.ndim,
                                    *array.shape))
            body.append(np.ascontiguousarray(array, dtype=TYPES[kind]).tobytes())
        data = b"".join(head + body)
        return data + struct.pack("<I", zlib.crc32(data))


# What the server asks of one user, and what it replies: their fields are named in `SCHEMAS`.
Query: TypeAlias = Message
Reply: TypeAlias = Message


def decode(data: bytes, most: int = 1 << 30) -> Message:
    """A message from its wire form; raises `BadMessage` on anything else."""
    if len(data) > most:
        raise BadMessage(f"A message of {len(data):,} bytes is longer than the {most:,} allowed.")
    if len(data) < FRAME or data[:2] != _MAGIC:
        raise BadMessage("These bytes are not a coterie message.")
    _, version, kind, turn, n_fields = _HEAD.unpack_from(data)
    if version != VERSION:
        raise BadMessage(f"The message has version {version}, and this coterie speaks version "
                         f"{VERSION}. "
                         "Install the same version of coterie on the server and at the users.")
    if zlib.crc32(data[:-4]) != struct.unpack_from("<I", data, len(data) - 4)[0]:
        raise BadMessage("The message was damaged on its way: its checksum does not fit.")
    try:
        specs, at = [], _HEAD.size
        for _ in range(n_fields):
            name, dtype, axes = struct.unpack_from("<BBB", data, at)
            if axes > _AXES:
                raise BadMessage(f"A field of the message has {axes} axes, and at most {_AXES} are "
                                 "allowed.")
            shape = struct.unpack_from(f"<{axes}I", data, at + 3)
            specs.append((FIELDS[name], TYPES[dtype], shape))
            at += 3 + 4 * axes
        arrays: dict[str, Array] = {}
        for label, numbers, shape in specs:
            size = 1
            for axis in shape:
                size *= axis
            end = at + size * numbers.itemsize
            if end > len(data) - 4 or label in arrays:
                raise BadMessage("The message is shorter than its fields say, or names one twice.")
            arrays[label] = np.frombuffer(data, numbers, size, at).reshape(shape)
            at = end
        if at != len(data) - 4:
            raise BadMessage("The message is longer than its fields say.")
        return Message(KINDS[kind], turn, arrays)
    except (struct.error, IndexError, ValueError) as error:
        raise BadMessage(
            "The message names a kind, a field or a type that does not exist.") from error


class Ragged(NamedTuple):
    """Any number of rows per user: user k has rows offsets[k] : offsets[k + 1]."""

    values: Array
    offsets: Ints

    @classmethod
    def of(cls, values: Array, counts: npt.NDArray[Any]) -> Ragged:
        return cls(values, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))

    @property
    def counts(self) -> Ints:
        return np.diff(self.offsets)

    @property
    def owner(self) -> Ints:
        """The index of the user each row belongs to."""
        return np.repeat(np.arange(len(self.offsets) - 1), self.counts)

    def take(self, indices: Ints) -> Ragged:
        counts = self.counts[indices]
        rows = np.repeat(self.offsets[indices] - np.concatenate([[0], np.cumsum(counts)[:-1]]),
                         counts)
        return Ragged.of(self.values[rows + np.arange(len(rows))], counts)

    def rows(self, index: int) -> Array:
        return self.values[self.offsets[index]:self.offsets[index + 1]]


@dataclass(frozen=True, eq=False)
class Batch(Mapping[int, Message]):
    """Messages of one kind to or from many users; as a mapping, one message per user."""

    kind: str
    round: int
    users: Ints  # (n,) ascending
    arrays: Fields = field(default_factory=dict)  # one row per user
    ragged: Mapping[str, Ragged] = field(default_factory=dict)  # any number of rows per user
    shared: Fields = field(default_factory=dict)  # the same for all of them: one broadcast

    def __len__(self) -> int:
        return len(self.users)

    def __iter__(self) -> Iterator[int]:
        return iter(self.users.tolist())

    def __getitem__(self, user: int) -> Message:
        k = int(np.searchsorted(self.users, user))
        if k == len(self.users) or self.users[k] != user:
            raise KeyError(user)
        arrays = {**self.shared, **{name: rows[k] for name, rows in self.arrays.items()}}
        arrays |= {name: part.rows(k) for name, part in self.ragged.items() if part.counts[k]}
        return Message(self.kind, self.round, arrays)

    def take(self, indices: Ints) -> Batch:
        """The messages at these positions of the batch."""
        arrays = {name: rows[indices] for name, rows in self.arrays.items()}
        ragged = {name: part.take(indices) for name, part in self.ragged.items()}
        return Batch(self.kind, self.round, self.users[indices], arrays, ragged, self.shared)

    def traffic(self) -> Iterator[tuple[str, Ints, Ints, int, int]]:
        """The size of every field when sent, the frames of the messages last: its name, numbers and
        bytes of each user, and numbers and bytes of what all of them share.
        """
        none = np.zeros(len(self), dtype=np.int64)
        for name, array in self.arrays.items():
            size = field_size(array.shape[1:], array.dtype)
            yield name, none + int(np.prod(array.shape[1:])), none + size, 0, 0
        for name, part in self.ragged.items():
            numbers = part.counts * int(np.prod(part.values.shape[1:]))
            sizes = 3 + 4 * part.values.ndim + numbers * _width(part.values.dtype)
            yield name, numbers, np.where(part.counts > 0, sizes, 0), 0, 0
        for name, array in self.shared.items() if len(self) else ():
            yield name, none, none, array.size, field_size(array.shape, array.dtype)
        yield "frame", none, none + FRAME, 0, 0


def _width(dtype: np.dtype[Any]) -> int:
    return TYPES[1 if dtype.kind in "iub" else 0].itemsize


def field_size(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    """The number of bytes of a field when sent."""
    return 3 + 4 * len(shape) + int(np.prod(shape)) * _width(dtype)


class Schema(NamedTuple):
    """The fields of a kind of query and of its reply.

    The form of a field: "1" a number, "d" a model's worth, "h" a Hessian's triangle, "p" one for
    each feature, "s" the settings of PDMM, "m" several numbers; with "*" before it, any number of
    rows of that form; with "=" first, it is shared by all users of a round; with "?" before all
    that, it may be absent.
    """

    query: Mapping[str, str]
    reply: Mapping[str, str]


_MODEL = {"model": "d"}
SCHEMAS: dict[str, Schema] = {
    "describe": Schema({}, {"count": "1", "means": "p", "m2": "p", "target": "*1"}),
    "local": Schema({"ridge": "=1"}, {"model": "d", "hessian": "h", "count": "1"}),
    # Hessians of wide models come in parts (see `algorithms.forms`); the count is that of the
    # vectors the server has.
    "expand": Schema({**_MODEL, "anchor": "*d", "rank": "=1", "count": "?1"}, {
        "value": "1", "gradient": "d", "share": "*1", "hessian": "*h", "factor": "*d",
        "sign": "*1", "diagonal": "*1",
        "basis": "*d", "core": "*1"}),
    "gradient": Schema(_MODEL, {"gradient": "d", "value": "1", "curvature": "1", "stiffness": "1"}),
    "prox": Schema({"centre": "d", "t": "1"}, {"point": "d", "value": "1", "curvature": "1"}),
    "train": Schema({**_MODEL, "steps": "1", "rate": "=1"}, {"point": "d"}),
    # At the end of a fit with the models that users get, and with those to judge.
    "certify": Schema({**_MODEL, "slope": "d", "anchor": "d", "covariance": "=*h", "noise": "*1",
                       "point": "?d", "fitted": "?d", "alone": "?d", "together": "?d",
                       "settings": "=?m"}, {
        "value": "1", "conjugate": "1", "residual": "1", "size": "1", "rounding": "1",
        "lack": "*d", "scores": "?m", "worse": "?1"}),
    "moments": Schema({}, {"count": "m", "means": "m", "scatter": "m"}),
    # The questions of a fit, about all rows and those that are not held out.
    "facts": Schema({}, {"count": "m", "means": "m", "m2": "m", "target": "m"}),
    "summary": Schema({"centre": "=d", "covariance": "=m", "step": "=1", "rank": "=1"}, {
        "model": "m", "values": "m", "gradient": "m", "hessian": "m", "information": "m",
        "size": "m"}),
    "evidence": Schema({"covariance": "=m", "step": "=m", "rank": "=1", "centre": "m"}, {
        "evidence": "m", "gradient": "m"}),
    "around": Schema({"covariance": "=m", "centre": "m"}, {
        "values": "m", "gradient": "m"}),
    # What an average asks of a part of the rows (see `coterie.fitting.columns`).
    "average": Schema({"stage": "=1", "rank": "=1", "settings": "=m", "who": "?1", "models": "?m"},
                      {"count": "?1", "values": "m", "means": "?m", "gradient": "?m",
                       "hessian": "?m"}),
    "join": Schema({"models": "=*d", "covariance": "=*h", "noise": "=1"}, {"who": "1",
                                                                           "model": "*d"}),
    # A noisy release, and what a user needs to finish its model at home; it answers only that it
    # has it.
    "release": Schema({"stage": "=1", "mu": "=1", "settings": "=m", "centre": "=m", "scale": "=m"},
                      {"released": "m"}),
    "home": Schema({"centre": "d", "covariance": "=m", "noise": "=1"}, {"who": "1"}),
    "score": Schema(_MODEL, {"score": "1", "hit": "1", "count": "1"}),
    "pdmm": Schema({
        "step": "1", "settings": "=s", "models": "=*d", "who": "=*1", "update": "*1",
        "dual_at": "*1", "dual": "*d",
        "beyond": "*d", "quiet": "*1", "wake": "*1", "wake_model": "*d",
        # All a user must know, when it begins or has missed a round:
        "point": "*d", "others": "*d", "difference": "*d", "hat": "*d", "neighbours": "*1",
        "radii": "*1",
        "tails": "*1",
    }, {"model": "*d", "value": "*1", "curvature": "*1", "stiffness": "*1", "difference": "*d"}),
}
#: What may be +inf: the value of a loss or a conjugate that is not finite.
MAY_BE_INFINITE = {("certify", name) for name in ("conjugate", "value", "residual", "size",
                                                  "rounding")} | {
    (kind, "values") for kind in ("summary", "around")}


def misfit(message: Message, kind: str, dim: int, side: str = "reply") -> str | None:
    """Why a message is no reply (or query) of this kind for models of length dim; None if it is
    one.
    """
    if message.kind != kind:
        return f"it is of kind {message.kind!r}, and {kind!r} was asked"
    schema: Mapping[str, str] = getattr(SCHEMAS[kind], side)
    for name in message.arrays:
        if name not in schema:
            return f"it has a field {name!r}, which is not part of {kind!r}"
    rows: dict[str, tuple[int, ...]] = {"1": (), "d": (dim,), "h": (dim * (dim + 1) // 2,),
                                        "s": (6,)}
    for name, form in schema.items():
        array, absent = message.arrays.get(name), form.startswith(("*", "?")) \
            or form in ("=*h", "=?m")
        form = form.removeprefix("?")
        if array is None:
            if absent:
                continue
            return f"its field {name!r} is missing"
        shape, several = array.shape, "*" in form
        if form[-1] in rows and ((several and not shape) or shape[several:] != rows[form[-1]]):
            expected = f"rows of shape {rows[form[-1]]} were" if several \
                else f"{rows[form[-1]]} was"
            return f"its field {name!r} has shape {shape}, and {expected} expected"
        if array.dtype.kind == "f" and not np.isfinite(array).all() and name != "scores":
            worst = array[~np.isfinite(array)]
            if (kind, name) not in MAY_BE_INFINITE or not (worst == np.inf).all():
                return f"its field {name!r} holds {worst.flat[0]}"
    return None


def gather(messages: Sequence[tuple[int, Message]], side: str = "reply") -> Batch:
    """One batch of single messages of one kind, each known to fit its schema; users in ascending
    order.
    """
    messages = sorted(messages, key=lambda pair: pair[0])
    first = messages[0][1]
    schema: Mapping[str, str] = getattr(SCHEMAS[first.kind], side)
    arrays, ragged, shared = {}, {}, {}
    for name, form in schema.items():
        parts = [message.arrays.get(name) for _, message in messages]
        if form.startswith("?") and parts[0] is None:
            continue
        form = form.removeprefix("?")
        if form.startswith("="):
            if parts[0] is not None:
                shared[name] = parts[0]
        elif not form.startswith("*"):
            arrays[name] = np.stack([part for part in parts if part is not None])
        elif any(part is not None for part in parts):
            counts = [0 if part is None else len(part) for part in parts]
            ragged[name] = Ragged.of(np.concatenate([part for part in parts if part is not None]),
                                     np.array(counts))
    users = np.array([user for user, _ in messages], dtype=np.int64)
    return Batch(first.kind, first.round, users, arrays, ragged, shared)


def merge(parts: list[Batch]) -> Batch | None:
    """Merge batches of one kind, in ascending order of users; the first reply of a user counts."""
    if len(parts) <= 1:
        return parts[0] if parts else None
    pairs: dict[int, Message] = {}
    for part in parts:
        for user, message in part.items():
            pairs.setdefault(user, message)
    return gather(list(pairs.items()))


def flags(n: int, at: Any) -> npt.NDArray[np.bool_]:
    """(n,) which are at these positions."""
    out = np.zeros(n, dtype=bool)
    out[at] = True
    return out


def put(array: Array, at: Any, values: Any) -> Array:
    """A copy in which these rows are replaced."""
    out = array.copy()
    out[at] = values
    return out


def digest(*arrays: Array | None) -> str:
    """A short name for these numbers, the same for the same ones."""
    sums = hashlib.sha256()
    for array in arrays:
        sums.update(b"none" if array is None else np.ascontiguousarray(array).tobytes())
    return sums.hexdigest()[:16]
