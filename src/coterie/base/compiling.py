"""Compiled functions: Numba on first use only, a folder for its cache, and the time that compiling
takes.

Numba compiles a function on its first call and keeps the result in a cache on disk, so that this
happens once on a machine. That time is no time of solving: `Solution.seconds` leaves it out.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

#: Versions of Numba whose inside `inner` knows.
_KNOWN_VERSIONS = {(0, 68)}


class _Clock:
    """The time spent on compiling functions, or loading them from the cache.

    Attributes
    ----------
    spent : seconds, without a function that is being compiled now.
    depth : how many functions are being compiled, each called by the one before.
    began, collects : when the outermost of them was begun, and whether Python collected garbage
        then.
    announce, announced : is called when compiling begins, and whether it was.
    watching : whether Numba reports to this clock.
    """

    def __init__(self) -> None:
        self.spent, self.depth, self.began = 0.0, 0, 0.0
        self.announce: Callable[[], None] | None = None
        self.watching = self.collects = self.announced = False

    def start(self, compiles: bool = True) -> None:
        if self.depth == 0:
            self.began, self.collects = time.perf_counter(), gc.isenabled()
            # Compiling makes many objects and little garbage; looking for it takes a tenth of the
            # time.
            gc.disable()
        if compiles and self.announce is not None and not self.announced:
            self.announced = True
            self.announce()
        self.depth += 1

    def end(self) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.announced = False
            self.spent += time.perf_counter() - self.began
            if self.collects:
                gc.enable()


_CLOCK = _Clock()


def compiling_seconds() -> float:
    """Seconds that this process has spent on compiling, or loading what was compiled, so far."""
    return _CLOCK.spent


def when_compiling(announce: Callable[[], None] | None) -> None:
    """Call this function when compiling begins; None: call nothing."""
    _CLOCK.announce = announce


def njit(**options: Any) -> Any:
    """`numba.njit`, imported on first use; compiled code goes to a cache that can be written."""
    _find_cache()
    import numba

    _watch()
    # No compiled function is called by an address.
    compiled = numba.njit(no_cfunc_wrapper=True, **options)
    if not options.get("cache") or not _known_version():
        return compiled

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = compiled(function)
        _watch_sources(dispatcher._cache._cache_file, function)
        return dispatcher

    return decorate


def _watch_sources(cache: Any, function: Callable[..., Any]) -> None:
    """Cached code is good while no file changes that holds a function compiled into it.

    Numba looks at the file of the function itself only, and does not start where the cache names a
    class that has moved.
    """
    files, load = _sources(function, set()), cache._load_index
    cache._source_stamp = sorted((os.path.basename(name), os.path.getmtime(name),
                                  os.path.getsize(name)) for name in files)

    def load_index() -> Any:
        try:
            return load()
        except (ImportError, AttributeError):
            return {}

    cache._load_index = load_index


def _sources(function: Any, known: set[Any]) -> set[str]:
    """The files of a function and of all compiled functions that it calls."""
    known.add(function)
    names, cells = function.__code__.co_names, function.__closure__ or ()
    used = [function.__globals__.get(name) for name in names] + [one.cell_contents for one in cells]
    files = {function.__code__.co_filename}
    for callee in (getattr(one, "py_func", None) for one in used):
        if callee is not None and callee not in known:
            files |= _sources(callee, known)
    return files


def inner(**options: Any) -> Any:
    """`njit` for functions that only compiled functions call.

    They are optimised as parts of their callers only. `njit` would optimise each of them alone
    first, again as a part of each caller, and write code for calls from Python: twice the time of
    compiling. They create no arrays (Numba refuses to compile it): their callers give them memory,
    and so no references are counted. This changes what Numba does inside, so other versions than
    those it is tested with get plain `njit`.
    """
    if not _known_version():
        return njit(cache=True, **options)
    compiled = njit(pipeline_class=_pipeline(), no_cpython_wrapper=True, _nrt=False, **options)

    def decorate(function: Callable[..., Any]) -> Any:
        def refuse(*arguments: Any) -> None:
            raise TypeError(f"{function.__name__} is for compiled callers only")

        dispatcher = compiled(function)
        # No code for calls from Python is ever found, and none is made.
        dispatcher._insert, dispatcher._compile_for_args = lambda *overload: None, refuse
        return dispatcher

    return decorate


def _known_version() -> bool:
    from importlib.metadata import version

    return tuple(map(int, version("numba").split(".")[:2])) in _KNOWN_VERSIONS


@cache
def _pipeline() -> Any:
    """Numba's compiler, which keeps the code of a function as it is, for its callers, and makes it
    no machine code.
    """
    _find_cache()
    from numba.core.codegen import JITCodeLibrary
    from numba.core.compiler import Compiler

    class Kept(JITCodeLibrary):  # type: ignore[misc]
        def _optimize_final_module(self) -> None:
            """Leave it to the callers."""

        def _finalize_final_module(self) -> None:
            # But unknown to the linker, which would prefer it to the callers' own copies.
            self._finalized = True

    class Pipeline(Compiler):  # type: ignore[misc]
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            context = self.state.targetctx  # of this function alone
            # Only a name for the function.
            context.get_executable = lambda library, described, environment: object()
            if self.state.library is None:
                self.state.library = Kept(context.codegen(), "inner")

    return Pipeline


def _find_cache() -> None:
    """Name a temporary folder for the cache if neither the package's folder nor the user's can be
    written.
    """
    if "NUMBA_CACHE_DIR" in os.environ or "numba" in sys.modules:
        return
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~")
    if not any(os.access(folder, os.W_OK) for folder in (Path(__file__).parent, home)):
        import tempfile

        os.environ["NUMBA_CACHE_DIR"] = str(Path(tempfile.gettempdir(),
                                                 f"coterie-numba-{os.getuid()}"))


def _watch() -> None:
    """Have Numba report when it compiles, and when it takes its lock to compile or to load."""
    if _CLOCK.watching:
        return
    from numba.core import event

    class Reports(event.Listener):  # type: ignore[misc]
        def on_start(self, event: Any) -> None:
            _CLOCK.start(compiles=event.kind == "numba:compile")

        def on_end(self, event: Any) -> None:
            _CLOCK.end()

    for kind in ("numba:compile", "numba:compiler_lock"):
        event.register(kind, Reports())
    _CLOCK.watching = True
