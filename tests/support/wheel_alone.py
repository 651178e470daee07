"""Run by `make package` in an environment with the wheel of coterie and nothing else that it does not need itself.

Everything imports without extras, except the adapters of Flower; the command runs, and says what a table needs.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import coterie
from coterie.base.errors import MissingExtra

#: Modules that need an extra at once: they are loaded only by who uses it.
ADAPTERS = {"coterie.federated.flower", *(f"coterie.federated.runtimes.{name}"
                                          for name in ("cluster", "keys", "kits", "supervisor"))}
COTERIE = str(Path(sys.executable).with_name("coterie"))


def run(*arguments: str, code: int = 0) -> str:
    done = subprocess.run([COTERIE, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == code, (arguments, done)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout + done.stderr


def main() -> None:
    for library in ("polars", "matplotlib", "flwr", "cvxpy", "pytest"):
        assert importlib.util.find_spec(library) is None, f"{library} is installed: the environment is not empty"
    modules = [module.name for module in pkgutil.walk_packages(coterie.__path__, "coterie.")
               if not module.name.endswith("__main__")]
    adapters = {}
    for name in modules:
        try:
            importlib.import_module(name)
        except MissingExtra as error:
            adapters[name] = str(error)
    assert set(adapters) == ADAPTERS, adapters
    assert all("pip install 'coterie[flower" in text for text in adapters.values()), adapters
    assert run("--version") == f"coterie {coterie.__version__}\n"
    shutil.rmtree("demo", ignore_errors=True)
    shown = run("demo", "--out", "demo")
    assert "3 groups among 60 users" in shown, shown
    assert "pip install 'coterie[plots]'" in shown, shown
    assert "<html" in Path("demo/report.html").read_text(encoding="utf-8")
    assert not Path("demo/separators.png").exists()
    assert "tables" in run("doctor")
    Path("table.csv").write_text("who,x,y\na,1,2\nb,2,3\n")
    assert "pip install 'coterie[tables]'" in run("fit", "table.csv", "--user", "who", "--target", "y", code=3)
    print(f"The wheel of coterie {coterie.__version__} works alone on Python {sys.version.split()[0]}: "
          f"{len(modules)} modules, coterie demo, coterie doctor.")


if __name__ == "__main__":
    main()
