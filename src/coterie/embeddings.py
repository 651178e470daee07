"""Embeddings as the input of personal heads: from arrays, tensors and files, and from an encoder
with a cache.

    rows  = extract(encoder, images, cache="embeddings/")    # (n, d), computed once
    users = from_arrays(rows, labels, user)                  # for ct.Problem, fit and the
                                                             estimators

An encoder is any `torch.nn.Module` that maps a batch of n inputs to (n, d) numbers. torch is the
extra `torch`; it is imported when `extract` is called, and no other module imports it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from coterie.base.errors import InvalidInput, located, require_extra
from coterie.base.storage import pack, unpack, write_atomically
from coterie.data.files import row_place
from coterie.data.frames import check_lists, read_parquet
from coterie.data.users import Users
from coterie.data.validation import show, suggest

#: Rows in one file of the cache. An interrupted extraction continues at the first missing file.
CHUNK = 2048
#: Rows of a file of the cache that are encoded again, to see that the encoder still gives them.
_PROBED = 4

Floats = npt.NDArray[np.floating[Any]]


def from_arrays(embeddings: Any, target: Any = None, user: Any = None, *,
                normalize: bool = False) -> Users:
    """Users whose features are embeddings, one row per sample.

    Parameters
    ----------
    embeddings : (n, d) an array, a torch tensor on any device, or the path of a .npy file.
    target : (n,) the same, or None. Classes are 0, 1, ... for `Multinomial`, -1 and +1 for
        `Logistic`.
    user : (n,) the same, or a list of names: the owner of each row; None makes every row a separate
        user.
    normalize : whether rows are scaled to length 1; a row of zeros stays as it is.

    Returns
    -------
    Users, with features named e0, e1, ...

    Raises
    ------
    InvalidInput : shapes that do not match, or a number that is missing or infinite; with its user
        and row.

    Example
    -------
    >>> rows = np.eye(3, 4, dtype=np.float32)
    >>> from_arrays(rows, [0, 1, 1], ["ann", "bob", "ann"])
    Users(2 users, 3 samples, 4 features, targets)
    """
    rows = _matrix(_array(embeddings))
    names = [f"e{j}" for j in range(rows.shape[1])]
    users = Users.from_arrays(rows, _array(target), _array(user), feature_names=names)
    return _normalize_users(users) if normalize else users


def load(path: str | PathLike[str], *, embedding: str = "embedding", target: str | None = "target",
         user: str = "user", normalize: bool = False) -> Users:
    """Users from one file with embeddings, targets and users: Parquet or .npz.

    Parameters
    ----------
    path : the file.
    embedding : in a Parquet file a column of lists of d numbers; in a .npz file an array (n, d). A
        Parquet file without this column has its embeddings in all columns that are neither `target`
        nor `user`.
    target : the column or array of targets, or None.
    user : the column or array that names the owner of each row.
    normalize : as for `from_arrays`.

    Returns
    -------
    Users, with features named e0, e1, ... (.npz), embedding[0], embedding[1], ... (lists), or by
    their columns.

    Raises
    ------
    InvalidInput : a column or array that is not there, lists of different lengths, or a number that
        is missing or infinite; with its row.
    MissingExtra : polars, for a Parquet file, is not installed.

    Example
    -------
    >>> import pathlib, polars, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "rows.parquet")
    >>> polars.DataFrame({"user": ["ann", "bob"], "target": [0, 1],
    ...                   "embedding": [[0.5, 1.0], [2.0, 0.0]]}).write_parquet(path)
    >>> load(path).feature_names
    ('embedding[0]', 'embedding[1]')
    """
    if Path(path).suffix.lower() == ".npz":
        arrays = _read_npz(path)
        for name in (embedding, user, *(() if target is None else (target,))):
            if name not in arrays:
                raise InvalidInput(f"There is no array {show(name)}", where=str(path),
                                   remedy=suggest(name, arrays))
        return from_arrays(arrays[embedding], None if target is None else arrays[target],
                           arrays[user], normalize=normalize)
    frame = read_parquet(path)
    names = [name for name in frame.columns if name.startswith(f"{embedding}[")]
    with located(row_place(path)):
        if embedding in frame.columns:
            check_lists(frame[embedding])
        users = Users.from_frame(frame, user=user, target=target, features=names or None)
    return _normalize_users(users) if normalize else users


def extract(encoder: Any, inputs: Any, *, batch_size: int = 256,
            cache: str | PathLike[str] | None = None, device: Any = None, normalize: bool = False,
            progress: Callable[[int, int], object] | None = None) -> Floats:
    """The embeddings of inputs by a torch encoder, computed once.

    The encoder runs in evaluation mode, without gradients and with the same random numbers every
    time, and is left as it was. The cache has a file for every `CHUNK` rows, named by a hash of
    these inputs and of the encoder: its modules, their settings, all parameters and buffers. So
    another encoder or other inputs never get it. The hash does not see the code of modules: a few
    rows of each file are encoded again, and if they differ, the file is replaced.

    Parameters
    ----------
    encoder : a `torch.nn.Module` that maps a batch of n inputs to (n, d) numbers.
    inputs : an array or tensor (n, ...), or a sequence of n of one shape, such as a torch dataset;
        of tuples, the first item is taken. Fractions get the precision of the encoder.
    batch_size : number of inputs that are encoded at once.
    cache : a folder, created if it is missing, whose files only their owner can read; None for no
        cache.
    device : where the encoder runs, such as "cuda"; None for where it is. It is moved back
        afterwards.
    normalize : as for `from_arrays`; files hold rows as they are.
    progress : called with the number of rows done and of all rows, after each `CHUNK` rows.

    Returns
    -------
    (n, d) embeddings as float32, or float64 where the encoder has them.

    Raises
    ------
    InvalidInput : inputs that the encoder cannot take, an output of another shape, or a NaN; with
        its row.
    MissingExtra : torch is not installed.

    Example
    -------
    >>> import torch
    >>> encoder = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.ReLU())
    >>> extract(encoder, np.ones((100, 8, 8))).shape
    (100, 16)
    """
    torch = _check_inputs(encoder, inputs, batch_size)
    n, parts = len(inputs), []
    with _freeze(torch, encoder, device):
        through = _Encoder(torch, encoder, batch_size)
        encode = through.encode if cache is None else partial(
            _encode_once, Path(cache), _hash_encoder(torch, encoder), through)
        for start in range(0, n, CHUNK):
            rows = through.tensor(inputs, start, min(start + CHUNK, n))
            parts.append(encode(rows, start))
            if progress is not None:
                progress(min(start + CHUNK, n), n)
    embeddings = np.concatenate(parts)
    return _normalize(embeddings) if normalize else embeddings


def _check_inputs(encoder: Any, inputs: Any, batch_size: int) -> Any:
    """Refuse what `extract` cannot work with; returns torch."""
    with require_extra("torch", "torch", "Extracting embeddings with an encoder"):
        import torch
    if not isinstance(encoder, torch.nn.Module):
        raise InvalidInput(f"encoder must be a torch.nn.Module, got {type(encoder).__name__}",
                           remedy="Use from_arrays for embeddings that are computed already")
    if not hasattr(inputs, "__len__") or len(inputs) == 0:
        raise InvalidInput("inputs must be an array or a sequence with at least one row",
                           remedy="Pass (n, ...)")
    if batch_size < 1:
        raise InvalidInput(f"batch_size must be at least 1, got {batch_size!r}", remedy="Omit it")
    return torch


# ---- arrays

def _array(values: Any) -> Any:
    """Tensors and .npy files as arrays, everything else as it is."""
    if isinstance(values, (str, PathLike)):
        return _read_npy(values)
    if not hasattr(values, "detach"):
        return values
    tensor = values.detach().cpu()
    kind = str(tensor.dtype)  # NumPy has no bfloat16 and no fractions of eight bits
    small = "float" in kind and kind not in ("torch.float32", "torch.float64")
    return (tensor.float() if small else tensor).numpy()


def _matrix(rows: Any) -> npt.NDArray[Any]:
    array = np.asarray(rows)
    if array.ndim != 2:
        raise InvalidInput(f"embeddings must have shape (n, d), got {array.shape}",
                           remedy="Average or flatten other dimensions: "
                                  "embeddings.reshape(len(embeddings), -1)")
    return array


def _read_npy(path: str | PathLike[str]) -> Any:
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InvalidInput(f"The file cannot be read as an array of numbers or texts: {error}",
                           where=str(path),
                           remedy="Save it with numpy.save, texts not as objects") from error


def _read_npz(path: str | PathLike[str]) -> dict[str, Any]:
    archive = _read_npy(path)
    with archive:
        try:
            return {name: archive[name] for name in archive.files}
        except ValueError as error:
            raise InvalidInput(f"An array of the file cannot be read: {error}", where=str(path),
                               remedy="Save names as texts, not as objects: "
                                      "user=numpy.array(names, str)") from error


def _normalize(rows: Floats) -> Floats:
    """rows / ||rows||, rows of zeros as they are."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(lengths > 0, lengths, 1)


def _normalize_users(users: Users) -> Users:
    return replace(users, features=np.asarray(_normalize(users.features), dtype=np.float64))


# ---- encoders

@contextmanager
def _freeze(torch: Any, encoder: Any, device: Any) -> Iterator[None]:
    """The encoder in evaluation mode, without gradients, on a device and with its own random
    numbers; then as before.
    """
    modes = [(module, module.training) for module in encoder.modules()]
    home = next((p.device for p in encoder.parameters()), None)
    try:
        encoder.eval()
        if device is not None:
            encoder.to(device)
        used = next((p.device for p in encoder.parameters()), torch.device("cpu"))
        with torch.no_grad(), torch.random.fork_rng(devices=[used] if used.type == "cuda" else []):
            yield
    finally:
        if device is not None and home is not None:
            encoder.to(home)
        for module, training in modes:
            module.training = training


@dataclass(frozen=True)
class _Encoder:
    """A frozen encoder, with the inputs as tensors and the outputs checked."""

    torch: Any
    module: Any
    batch_size: int

    @property
    def weight(self) -> Any:
        """The first parameter with fractions, or None: inputs get its precision and go to its
        device.
        """
        return next((p for p in self.module.parameters() if p.is_floating_point()), None)

    def tensor(self, inputs: Any, start: int, stop: int) -> Any:
        """A range of the inputs as one tensor."""
        if hasattr(inputs, "shape"):
            rows = inputs[start:stop]
            rows = np.ascontiguousarray(rows) if isinstance(rows, np.ndarray) else rows
            return self.torch.as_tensor(rows)
        items = (inputs[i] for i in range(start, stop))
        tensors = [self.torch.as_tensor(item[0] if isinstance(item, tuple) else item)
                   for item in items]
        for k, tensor in enumerate(tensors):
            if tensor.shape != tensors[0].shape:
                raise InvalidInput(f"Inputs must have one shape, got {tuple(tensors[0].shape)} and "
                                   f"{tuple(tensor.shape)}", where=f"row {start + k}",
                                   remedy="Resize or pad them")
        return self.torch.stack(tensors)

    def encode(self, rows: Any, start: int) -> Floats:
        """The embeddings of a tensor whose first row is row `start` of the inputs."""
        self.torch.manual_seed(0)
        batches = range(0, len(rows), self.batch_size)
        embeddings = np.concatenate([self._batch(rows[k:k + self.batch_size], start + k)
                                     for k in batches])
        embeddings = embeddings if embeddings.dtype.kind == "f" else embeddings.astype(np.float32)
        finite = np.isfinite(embeddings).all(axis=1)
        if not finite.all():
            raise InvalidInput("An embedding has a missing value (NaN) or an infinite value",
                               where=f"row {start + int(finite.argmin())}",
                               remedy="Check this input, and that the training of the encoder has "
                                      "not diverged")
        return embeddings

    def _batch(self, batch: Any, start: int) -> Any:
        where, weight = f"rows {start} to {start + len(batch) - 1}", self.weight
        if weight is not None:
            batch = batch.to(weight.device,
                             weight.dtype if batch.is_floating_point() else batch.dtype)
        try:
            output = self.module(batch)
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            first = str(error).partition("\n")[0]
            raise InvalidInput(f"The encoder cannot take inputs of shape {tuple(batch.shape)} and "
                               f"type {batch.dtype}: {first}", where=where,
                               remedy="Try it on one batch: encoder(inputs[:2])") from error
        shape = tuple(getattr(output, "shape", ()))
        if len(shape) != 2 or shape[0] != len(batch):
            raise InvalidInput(f"The encoder must return a tensor of shape ({len(batch)}, d), got "
                               f"{shape or type(output).__name__}", where=where,
                               remedy="Wrap it in a module that averages or flattens, and returns "
                                      "one tensor")
        return _array(output)


def _encode_once(folder: Path, identity: Any, encoder: _Encoder, rows: Any, start: int) -> Floats:
    """The embeddings of a tensor: those in the folder, or computed and stored there.

    The folder has one file for each encoder and chunk of inputs.
    """
    digest = identity.copy()
    _hash_tensor(digest, rows)
    path = folder / f"{digest.hexdigest()}.embeddings"
    embeddings = _read_stored(path, encoder, rows, start)
    if embeddings is None:
        embeddings = encoder.encode(rows, start)
        write_atomically(path, pack({"embeddings": embeddings}))
    return embeddings


def _read_stored(path: Path, encoder: _Encoder, rows: Any, start: int) -> Floats | None:
    """The embeddings in a file; None if there is none, if it is damaged, or if the encoder gives
    others.
    """
    try:
        stored: Floats = unpack(path.read_bytes(), path.name)["embeddings"]
    except (FileNotFoundError, InvalidInput):
        return None
    probed = np.unique(np.linspace(0, len(rows) - 1, _PROBED).astype(np.int64))
    again, weight = encoder.encode(rows[probed], start), encoder.weight
    # Rounding depends on the batch: a third of sqrt(eps), relative to the largest number.
    eps = (float(np.finfo(again.dtype).eps) if weight is None
           else encoder.torch.finfo(weight.dtype).eps)
    if stored.shape != (len(rows), again.shape[1]):
        return None
    error, size = np.abs(again - stored[probed]).max(), np.abs(stored).max()
    return stored if float(error) <= np.sqrt(eps) / 3 * float(size) else None


def _hash_encoder(torch: Any, encoder: Any) -> Any:
    """A hash of an encoder but for its code: modules, their settings, parameters and buffers."""
    digest = hashlib.sha256(b"coterie embeddings 1")
    plain = (type(None), bool, int, float, str, tuple, list, torch.dtype)
    for name, module in encoder.named_modules():
        settings = [f"{key}={value!r}" for key, value in sorted(vars(module).items())
                    if isinstance(value, plain) and key != "training" and not key.startswith("_")]
        kind = type(module)
        digest.update(repr((name, kind.__module__, kind.__qualname__, module.extra_repr(),
                            settings)).encode())
    for name, value in {**encoder.state_dict(), **dict(encoder.named_buffers())}.items():
        digest.update(repr(name).encode())
        if torch.is_tensor(value):
            _hash_tensor(digest, value)
        else:
            digest.update(repr(value).encode())
    return digest


def _hash_tensor(digest: Any, tensor: Any) -> None:
    """Type, shape and numbers of a tensor."""
    digest.update(repr((str(tensor.dtype), tuple(tensor.shape))).encode())
    digest.update(np.ascontiguousarray(_array(tensor)).tobytes())
