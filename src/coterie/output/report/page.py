"""One self-contained HTML file from a document of plain JSON types.

The page needs nothing but itself: style and script are in it, and its policy lets it load nothing
and run only that script. Data goes in as JSON that no text inside can end, and reaches the screen
as text, never as markup.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from coterie.base.storage import json_ready, write_atomically

#: The script's parts in the order in which they run.
SCRIPTS = ("basics.js", "model.js", "path.js", "map.js", "people.js", "curves.js",
           "coefficients.js", "evidence.js", "proof.js", "page.js")
#: The parts are modules, so that a linter sees which names each one needs; as one script they need
#: no import or export.
_MODULE = re.compile(r"^import [^;]*;\n|^export (?=\w)", re.M)
#: What could end the element the JSON is in, or a line of script, inside a text of it.
_UNSAFE = str.maketrans({c: f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"})


def render(document: Mapping[str, Any]) -> str:
    """Make the page of a document; parts that are None or missing are not shown.

    Parameters
    ----------
    document : what `gather` returns. The coefficients of a group are in the order of `names`; with
        `outputs`, they are a (names, outputs) matrix, row by row.

    Returns
    -------
    str
        One HTML file that needs nothing else.

    Example
    -------
    >>> page = render({"title": "Three shops", "users": ["a", "b", "c"]})
    >>> "<title>Three shops</title>" in page
    True
    """
    style = _asset("page.css")
    # One function around all parts: nothing of theirs is visible to anything else.
    script = ("(() => {\n\"use strict\";\n" + _MODULE.sub("", "\n".join(map(_asset, SCRIPTS)))
              + "\n})();\n")
    policy = (f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
              "img-src data: blob:; base-uri 'none'; form-action 'none'")
    parts = {"policy": html.escape(policy), "style": style, "script": script,
             "title": html.escape(str(document.get("title") or "coterie")),
             "document": _json(_packed(document))}
    # One pass, so that a text that looks like a placeholder stays a text.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("page.html"))


def write(document: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write the page of a document atomically: a reader sees the complete old file or the complete
    new one.

    Parameters
    ----------
    document : what `gather` returns.
    path : the file.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    OSError
        If the file cannot be written; an old one is then unchanged.

    Example
    -------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write({"title": "Three shops"}, f"{folder}/report.html").name
    'report.html'
    """
    path = Path(path)
    write_atomically(path, render(document).encode("utf-8", "replace"), shared=True)
    return path


def _asset(name: str) -> str:
    return resources.files("coterie.output.report").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _json(value: Any) -> str:
    return json.dumps(json_ready(value), allow_nan=False, separators=(",", ":")).translate(_UNSAFE)


def _packed(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with its large arrays as base64; coefficients are one row for each cluster in
    `which`.
    """
    packed = dict(document)
    if packed.get("labels"):
        packed["labels"] = _pack(packed["labels"],
                                 "<u4" if np.max(packed["labels"], initial=0) > 65535 else "<u2")
    for part, names in (("map", ("points", "samples")),
                        ("scores", ("points", "alone", "together"))):
        if packed.get(part):
            packed[part] = {name: _pack(value, "<f4") if name in names and value else value
                            for name, value in packed[part].items()}
    if packed.get("coefficients"):
        table = dict(packed["coefficients"])
        for name in ("clusters", "standardized"):
            rows = [cluster for clusters in table.get(name) or () for cluster in clusters]
            table[name] = _pack(rows, "<f4") if rows else None
        packed["coefficients"] = table
    return packed


def _pack(values: Any, kind: str) -> dict[str, Any]:
    """An array as base64 of little-endian numbers; None becomes nan."""
    array = np.array(values, dtype=float if kind == "<f4" else np.int64)
    with np.errstate(over="ignore"):
        data = array.astype(kind)
    return {"kind": kind[1:], "shape": list(array.shape),
            "data": base64.b64encode(data.tobytes()).decode()}
