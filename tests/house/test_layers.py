"""Rooms are layers: imports point up the list of rooms only, and each adapter library is imported in one place."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "coterie"

#: From the bottom up: a file imports files of its own room, where no circle arises, and of rooms above it in this list.
ROOMS = ["base", "data", "losses", "problem", "solvers", "convex", "groups", "fitting", "output", "federated", "faces",
         "lab"]
#: What the room `faces` consists of: the estimators, the command, and the names that users import.
FACES = {"estimators", "cli", "__main__", "_aliases", "datasets", "embeddings", "plots", "report"}
LEVEL = {name: level for level, name in enumerate(ROOMS)}
#: Where each third-party adapter may be imported; a part of a library may have a home of its own.
HOMES = {
    "cvxpy": {"solvers.reference"}, "matplotlib": {"output.plots", "lab.experiments"}, "plotly": {"lab.experiments"},
    "typer": {"cli", "lab.commands"}, "rich": {"cli", "lab.commands"},
    "polars": {"data.frames"}, "pandas": {"data.frames"},
    "zstandard": {"data.files"},
    "torch": {"embeddings"},
    "numba": {"base.compiling"},
    "flwr": {"federated.flower", "federated.runtimes.cluster"},
    "cryptography": {"federated.runtimes.keys"},
    "psutil": {"federated.runtimes.cluster"}, "tomli_w": {"federated.runtimes.cluster"},
    "tensorboardX": {"federated.entry"}, "mlflow": {"federated.entry"},
    "sklearn": {"estimators"}, "sklearn.metrics": {"convex.choice"}, "sklearn.cluster": {"lab.baselines.clusters"},
    "sklearn.linear_model": {"lab.baselines.central"}, "sklearn.model_selection": {"lab.baselines.central"},
    "statsmodels": {"lab.baselines.central"}, "lightgbm": {"lab.baselines.central"},
    "sklearn.datasets": {"lab.experiments.federations_data"}, "sklearn.utils.extmath": {"output.plots.base"},
}


def room(module: str) -> str | None:
    """The room of a module."""
    first = module.split(".")[0]
    return "faces" if first in FACES else first if first in LEVEL and first != "faces" else None


def modules(source: Path) -> dict[str, Path]:
    """Every file by its dotted name without "coterie.", packages by theirs; not the top one."""
    collected = {}
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            collected[name] = path
    return collected


def imports(path: Path) -> set[str]:
    """All modules and names a file imports, wherever in the file it does so."""
    collected = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            collected |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            collected |= {f"{node.module}.{alias.name}" for alias in node.names}
    return collected


def graph(source: Path) -> dict[str, set[str]]:
    """What each file imports of the others."""
    known, edges = modules(source), {}
    for name, path in known.items():
        edges[name] = set()
        for target in imports(path):
            inner = target.removeprefix("coterie.")
            while target.startswith("coterie.") and inner and inner not in known:
                inner = inner.rpartition(".")[0]  # a name of a module, not a module
            if target.startswith("coterie.") and inner and inner != name:
                edges[name].add(inner)
    return edges


def cycles(edges: dict[str, set[str]]) -> list[str]:
    """Files that import each other, directly or through others."""
    wrong, done = [], set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        if name in above:
            wrong.append("circle: " + " -> ".join((*above[above.index(name):], name)))
        elif name not in done:
            for target in sorted(edges[name]):
                visit(target, (*above, name))
            done.add(name)

    for name in edges:
        visit(name, ())
    return wrong


def violations(source: Path) -> list[str]:
    edges, wrong = graph(source), []
    for name, path in modules(source).items():
        own = room(name)
        if own is None:
            wrong.append(f"{name} is in no room")
            continue
        for target in sorted(edges[name]):
            other = room(target)
            if other is not None and LEVEL[other] > LEVEL[own]:
                wrong.append(f"{name} imports {target}, whose room is not above its own")
        for target in imports(path):
            parts = target.split(".")
            library = next((p for k in range(len(parts), 0, -1) if (p := ".".join(parts[:k])) in HOMES), None)
            homes = HOMES[library] if library is not None else {name}
            if not any(name == home or name.startswith(home + ".") for home in homes):
                wrong.append(f"{name} imports {library}, which belongs to {sorted(homes)}")
    return wrong + cycles(edges)


def test_imports_point_up_the_list():
    assert violations(SOURCE) == []


@pytest.mark.parametrize(("files", "complaint"), [
    ({"data/users": "from coterie.problem.problem import Problem", "problem/problem": ""},
     "data.users imports problem.problem"),
    ({"losses/base": "def f():\n    import coterie.solvers", "solvers/__init__": ""}, "losses.base imports solvers"),
    ({"fitting/fit": "from coterie import plots", "plots": ""}, "fitting.fit imports plots"),
    ({"estimators": "import coterie.lab.attacks", "lab/attacks": ""}, "estimators imports lab.attacks"),
    ({"problem/certificates": "import cvxpy"}, "problem.certificates imports cvxpy"),
    ({"datasets": "def f():\n    from torch import nn"}, "datasets imports torch"),
    ({"estimators": "from sklearn.metrics import r2_score"}, "estimators imports sklearn.metrics"),
    ({"convex/path": "import sklearn"}, "convex.path imports sklearn"),
    ({"novel": "import numpy"}, "novel is in no room"),
    ({"faces": "import numpy"}, "faces is in no room"),
    ({"lab/a": "import coterie.lab.b", "lab/b": "from coterie.lab.a import x"}, "circle: "),
])
def test_a_wrong_import_is_found(tmp_path, files, complaint):
    for name, text in files.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text + "\n")
    assert any(complaint in collected for collected in violations(tmp_path))


@pytest.mark.parametrize(("command", "loaded"), [("fit", False), ("federate", False), ("audit", True)])
def test_the_command_loads_the_lab_only_for_the_commands_of_the_lab(command, loaded):
    code = (f"import sys\nfrom coterie.cli import app\napp(['{command}', '--help'], standalone_mode=False)\n"
            "print(any(name.startswith('coterie.lab') for name in sys.modules))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == str(loaded)


def test_import_is_light():
    """`import coterie` brings in NumPy and nothing slow; the rest comes when it is used."""
    code = "import sys, coterie; print(*sorted(m for m in sys.modules if '.' not in m))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "numpy" in loaded
    assert not loaded & {"numba", "scipy", "sklearn", "cvxpy", "matplotlib", "polars", "pandas", "torch", "typer",
                         "rich"}
