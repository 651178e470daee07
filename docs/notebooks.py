"""Run the notebooks of the documentation and store what they show; with --check, compare with what
is stored.

    python docs/notebooks.py [--check] [name ...]

Printed texts are compared up to white space, their numbers to 1e-6; of pictures, only that they are
there.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent / "notebooks"
NUMBER = re.compile(r"[-+]?\d+\.?\d*(?:e[-+]?\d+)?")


def shown(cell: Any) -> list[tuple[str, str, list[float]]]:
    """What a cell shows: the kind of each output, its words, and its numbers."""
    collected = []
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        text = output.get("text") or ("" if "image/png" in data else data.get("text/html")
                                      or data["text/plain"])
        text = re.sub(r"\b[\d.]+ s\b", "s", text)  # seconds differ from run to run
        words = re.sub(r"\s+", "", NUMBER.sub("#", text))
        collected.append((output["output_type"], words,
                          [float(number) for number in NUMBER.findall(text)]))
    return collected


def same(first: Any, second: Any) -> bool:
    """Whether two runs of a cell show the same."""
    a, b = shown(first), shown(second)
    return [entry[:2] for entry in a] == [entry[:2] for entry in b] and all(
        abs(x - y) <= 1e-6 * max(1.0, abs(x)) for one, two in zip(a, b, strict=True)
        for x, y in zip(one[2], two[2], strict=True))


def run(path: Path) -> tuple[Any, Any]:
    """A notebook as stored, and as it is after a run in an empty kernel; a cell that raises ends
    the run.
    """
    stored, fresh = nbformat.read(path, as_version=4), nbformat.read(path, as_version=4)
    for k, cell in enumerate(fresh.cells):
        cell["id"] = f"{path.stem}-{k}"  # the same in every run
    client = NotebookClient(fresh, timeout=300, kernel_name="python3", record_timing=False,
                            coalesce_streams=True,
                            extra_arguments=["--log-level=ERROR"],
                            resources={"metadata": {"path": str(HERE)}})
    client.execute()
    outputs = [output for cell in fresh.cells for output in cell.get("outputs", [])]
    warned = [output["text"] for output in outputs if output.get("name") == "stderr"]
    if warned:
        raise RuntimeError(f"{path.name} warns: {warned[0]}")
    fresh.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python",
                                     "name": "python3"},
                      "language_info": {"name": "python"}}
    return stored, fresh


def check(path: Path, stored: Any, fresh: Any) -> int:
    """The number of cells that show something else than what is stored, each of which is printed.
    """
    changed = [k for k, (old, new) in enumerate(zip(stored.cells, fresh.cells, strict=True))
               if not same(old, new)]
    for k in changed:
        print(f"{path.name}, cell {k} shows something else than what is "
              f"stored:\n{shown(fresh.cells[k])}")
    return len(changed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of storing")
    parser.add_argument("names", nargs="*", help="notebooks, such as table; all if none is given")
    given = parser.parse_args()
    changed = 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MPLCONFIGDIR"] = folder  # no fonts and styles of the person who runs it
        for path in [HERE / f"{name}.ipynb" for name in given.names] \
            or sorted(HERE.glob("*.ipynb")):
            start = time.perf_counter()
            stored, fresh = run(path)
            print(f"{path.name}: {time.perf_counter() - start:.1f} s", flush=True)
            if given.check:
                changed += check(path, stored, fresh)
            else:
                nbformat.write(fresh, path)
    if changed:
        print("Run `make notebooks` and look at the differences.")
    return int(changed > 0)


if __name__ == "__main__":
    sys.exit(main())
