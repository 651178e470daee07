"""Imports point down only, and each adapter library is imported in one place."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "coterie"

#: A module may import modules of lower layers, and of its own package.
LAYERS = [
    {"errors", "kernels", "local"},
    {"packing"},
    {"inputs"},
    {"users", "graph", "files"},
    {"losses"},
    {"problem"},
    {"joining"},
    {"solution"},
    {"certificates", "checks", "datasets", "units", "weights"},
    {"tables"},
    {"solvers"},
    {"path"},
    {"recovery"},
    {"select"},
    {"groups"},
    {"planning"},
    {"fitting"},
    {"runs"},
    {"federated"},
    {"baselines"},
    {"estimators", "plots"},
    {"report"},
    {"experiments"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
#: Where each third-party adapter may be imported.
HOMES = {
    "cvxpy": {"solvers"}, "matplotlib": {"plots", "experiments"}, "plotly": {"experiments"}, "typer": {"cli"},
    "rich": {"cli"}, "polars": {"inputs"}, "numba": {"kernels", "solvers"}, "flwr": {"federated"},
    "cryptography": {"federated"}, "tensorboardX": {"federated"}, "mlflow": {"federated"},
}


def imports(path: Path) -> set[str]:
    """All modules a file imports, wherever in the file it does so."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import"
            found |= {f"{node.module}.{alias.name}" if node.module == "coterie" else str(node.module)
                      for alias in node.names}
    return found


def violations(source: Path) -> list[str]:
    wrong = []
    for path in sorted(source.rglob("*.py")):
        name = path.relative_to(source).parts[0].removesuffix(".py")
        if name == "__init__":
            continue
        if name not in LEVEL:
            wrong.append(f"{name} is in no layer")
            continue
        for target in imports(path):
            top, _, rest = target.partition(".")
            if top == "coterie":
                below = rest.split(".")[0]
                if below in LEVEL and below != name and LEVEL[below] >= LEVEL[name]:
                    wrong.append(f"{name} imports {below}, which is not below it")
            elif name not in HOMES.get(top, {name}):
                wrong.append(f"{name} imports {top}, which belongs to {sorted(HOMES[top])}")
    return wrong


def test_imports_point_down():
    assert violations(SOURCE) == []


@pytest.mark.parametrize(("module", "line", "complaint"), [
    ("graph", "from coterie.problem import Problem", "graph imports problem"),
    ("losses/base", "def f():\n    import coterie.solvers", "losses imports solvers"),
    ("certificates", "import cvxpy", "certificates imports cvxpy"),
    ("novel", "import numpy", "novel is in no layer"),
    ("users", "from coterie import kernels, graph", "users imports graph"),
])
def test_a_wrong_import_is_found(tmp_path, module, line, complaint):
    path = tmp_path / f"{module}.py"
    path.parent.mkdir(exist_ok=True)
    path.write_text(line + "\n")
    assert any(complaint in found for found in violations(tmp_path))


def test_no_module_is_too_long():
    for path in SOURCE.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 450, path.name


def test_import_is_light():
    """`import coterie` brings in NumPy and nothing slow; the rest comes when it is used."""
    code = "import sys, coterie; print(*sorted(m for m in sys.modules if '.' not in m))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "numpy" in loaded
    assert not loaded & {"numba", "scipy", "sklearn", "cvxpy", "matplotlib", "polars", "pandas", "typer", "rich"}
