"""`coterie doctor`: what is installed, and what the machine has."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import coterie
from coterie.base.machine import free_memory, memory_of, n_threads, usable_cores
from coterie.base.storage import json_ready
from coterie.cli import base as options
from coterie.cli.base import app, console, grid, say

_CORE = ("numpy", "scipy", "numba", "scikit-learn", "typer", "rich")
_GPU_LIBRARIES = ("torch", "cupy", "cupy-cuda12x", "cupy-cuda13x")
_NOT_SHOWN = ("dev", "all", "browser", "cli")  # for development, or made of others
_GIB = 2**30


@app.command()
def doctor(as_json: options.Json = False) -> None:
    """Show versions, extras that are installed or missing, processors, memory, GPU, and the cache
    of compiled code.

    Example: coterie doctor
    """
    info = inspect()
    if as_json:
        print(json.dumps(json_ready(info), indent=1))
        return
    console.print(grid(f"coterie {info['coterie']}", ("", ""), _facts(info), show_header=False))
    console.print(grid("Extras", ("extra", "installed", "missing"), [
        (name, ", ".join(f"{key} {value}" for key, value in libraries.items() if value),
         ", ".join(key for key, value in libraries.items() if not value))
        for name, libraries in info["extras"].items()]))
    for remedy in info["remedies"]:
        say(remedy)


def inspect() -> dict[str, Any]:
    """Everything that `coterie doctor` shows."""
    extras, cache = installed_extras(), compiled_cache()
    missing = [name for name, libraries in extras.items() if None in libraries.values()]
    remedies = ([f"To add what is missing: pip install 'coterie[{','.join(missing)}]'"] if missing
                else [])
    if not cache["writable"]:
        remedies.append("Compiled code cannot be kept, so every start compiles again. Set "
                        "NUMBA_CACHE_DIR to a folder that you may write to.")
    return {"coterie": coterie.__version__, "python": platform.python_version(),
            "platform": platform.platform(), "versions": {name: _version(name) for name in _CORE},
            "extras": extras, "cores": os.cpu_count(), "usable_cores": usable_cores(),
            "threads": n_threads(),
            "memory": {"total": memory_of("SC_PHYS_PAGES"), "free": free_memory()},
            "gpus": _gpus(), "gpu_libraries": {name: _version(name) for name in _GPU_LIBRARIES},
            "compiled_code": cache, "remedies": remedies}


def installed_extras() -> dict[str, dict[str, str | None]]:
    """The libraries of each extra, with their versions; None for those that are not installed."""
    try:
        wanted = metadata.requires("coterie") or []
    except metadata.PackageNotFoundError:  # run from its source
        return {}
    parts: dict[str, list[str]] = {}
    for requirement in wanted:
        extra = re.search(r"""extra\s*==\s*["']([\w-]+)["']""", requirement)
        if extra is not None:
            parts.setdefault(extra[1], []).append(re.split(r"[\s;<>=!~(]", requirement,
                                                           maxsplit=1)[0])

    def libraries(extra: str) -> dict[str, str | None]:
        collected: dict[str, str | None] = {}
        for part in parts.get(extra, []):
            name, _, inner = part.partition("[")
            if name == "coterie":
                for other in inner.rstrip("]").split(","):
                    collected |= libraries(other)
            else:
                collected[name] = _version(name)
        return collected

    return {extra: libraries(extra) for extra in parts if extra not in _NOT_SHOWN}


def compiled_cache() -> dict[str, Any]:
    """Where numba keeps compiled code, and whether it can be written there."""
    given = os.environ.get("NUMBA_CACHE_DIR")
    folder = Path(given) if given else Path(coterie.__file__).parent / "solvers" / "__pycache__"
    existing = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    return {"folder": str(folder), "writable": existing.is_dir() and os.access(existing, os.W_OK)}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> list[str]:
    """Name, memory and driver of each GPU, as nvidia-smi says; none where it is not installed or
    does not answer.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run([program, "--query-gpu=name,memory.total,driver_version",
                               "--format=csv,noheader"],
                              capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _facts(info: dict[str, Any]) -> list[tuple[str, str]]:
    memory, cache = info["memory"], info["compiled_code"]
    total = "" if memory["total"] is None else f"{memory['total'] / _GIB:.1f} GiB, "
    libraries = ", ".join(f"{name} {version}" for name, version in info["gpu_libraries"].items()
                          if version)
    return [("Python", f"{info['python']} ({sys.executable})"), ("system", info["platform"]),
            *((name, version or "missing") for name, version in info["versions"].items()),
            ("cores", f"{info['cores']}, of which {info['usable_cores']} may be used; "
                      f"{info['threads']} threads"),
            ("memory", f"{total}{memory['free'] / _GIB:.1f} GiB free"),
            ("GPU", "; ".join(info["gpus"]) or "none found"),
            ("GPU libraries", libraries or "none installed"),
            ("compiled code",
             f"{cache['folder']} ({'can' if cache['writable'] else 'cannot'} be written to)")]
