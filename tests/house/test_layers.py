"""Imports point down only, and each adapter library is imported in one place."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "coterie"

#: From the bottom up. A file may import files of lower layers, and of its own layer as long as no circle arises.
#: A name stands for a file or for all files of a package that no longer name stands for.
LAYERS = [
    "errors", "_typing", "compiling", "matrices", "labels", "memory", "threads", "beside", "storage",
    "privacy.accounting", "privacy.policy", "privacy.ledger", "privacy",
    "data.validation", "data.blocks", "data.files", "data.frames", "data.io", "data.participants", "data.splitting",
    "data.users",
    "data.scaling",
    "data.columns", "data.summary", "data.declared", "data.merging", "data.rules", "data.encoding", "data",
    "privacy.release", "privacy.effective",
    "losses.newton", "losses.curvature", "losses.frame", "losses.base", "losses", "losses.checks",
    "graph.kernels", "graph.potentials", "graph.graph", "graph", "problem", "newcomers", "explanation", "solution",
    "certificates", "graph.weights", "datasets", "embeddings",
    "solvers",
    "analysis.metrics", "analysis.margins", "analysis.consensus", "analysis.path", "analysis.recovery",
    "analysis.ladder", "analysis.select", "analysis.spread", "analysis.dispersion", "analysis.noise",
    "analysis.oracle", "analysis.proposals", "analysis.partitions", "analysis.sampling", "analysis.refining",
    "analysis.search", "analysis.wide_models", "analysis.wide",
    "analysis.groups", "analysis.random_effects", "analysis", "privacy.home",
    "fitting.settings", "fitting.outliers", "fitting.units", "fitting.prepare", "fitting.oracle",
    "fitting.work", "fitting.kinds", "fitting.plan", "fitting.path", "fitting.ahead",
    "fitting.stability", "fitting.scores", "fitting.predictions",
    "fitting.proof", "fitting.result", "runs.folder",
    "federated.masks", "federated.protocol", "federated.plausible", "federated.judging",
    "federated.spans", "federated.algorithms.edges", "federated.algorithms.trust", "federated.answers",
    "federated.joining", "federated.private",
    "federated.client",
    "federated.algorithms.participation", "federated.algorithms", "federated.checkpoint",
    "federated.runtimes.in_process", "federated.settings", "federated.stages", "federated.driver", "federated.run",
    "federated.path", "federated.metrics", "federated.sources", "federated.config", "federated.introduction",
    "federated.agreement",
    "federated.runtimes.keys", "federated.runtimes.cluster", "federated.runtimes.nodes",
    "plots",
    "report",
    "runs.released", "runs.save", "fitting", "runs", "privacy.fit",
    "federated.keeping", "federated.bounds", "federated.guard", "federated.node",
    "federated.asking", "federated.together", "federated.oracle",
    "federated.fit_by_asking", "federated.fit", "federated.private_fit", "federated.entry",
    "federated.membership", "federated.runtimes",
    "federated.flower", "federated",
    "privacy.lower_bound", "privacy.recording", "privacy.reconstruction", "privacy.inference", "privacy.simulation",
    "privacy.attacked_release", "privacy.poison", "privacy.auditing", "privacy.runs",
    "baselines",
    "estimators",
    "experiments",
    "cli", "__main__",
]
LEVEL = {name: level for level, name in enumerate(LAYERS)}
#: Where each third-party adapter may be imported; a part of a library may have a home of its own.
HOMES = {
    "cvxpy": {"solvers.reference"}, "matplotlib": {"plots", "experiments"}, "plotly": {"experiments"},
    "typer": {"cli"}, "rich": {"cli"}, "polars": {"data.frames"}, "pandas": {"data.frames"},
    "zstandard": {"data.files"},
    "torch": {"embeddings"},
    "numba": {"compiling"},
    "flwr": {"federated.flower", "federated.runtimes.cluster"},
    "cryptography": {"federated.masks", "federated.runtimes.keys"},
    "psutil": {"federated.runtimes.cluster"}, "tomli_w": {"federated.runtimes.cluster"},
    "tensorboardX": {"federated.metrics"}, "mlflow": {"federated.metrics"},
    "sklearn": {"estimators"}, "sklearn.metrics": {"analysis.metrics"}, "sklearn.cluster": {"baselines.kmeans"},
    "sklearn.linear_model": {"baselines.ridge"}, "sklearn.model_selection": {"baselines.ridge"},
    "statsmodels": {"baselines.mixed_models"}, "lightgbm": {"baselines.boosting"},
    "sklearn.datasets": {"experiments.federations_data"}, "sklearn.utils.extmath": {"plots.data"},
}


def layer(module: str) -> str | None:
    """The longest name in LAYERS that stands for this module."""
    parts = module.split(".")
    names = [".".join(parts[:k]) for k in range(len(parts), 0, -1)]
    return next((name for name in names if name in LEVEL), None)


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
        own = layer(name)
        if own is None:
            wrong.append(f"{name} is in no layer")
            continue
        for target in sorted(edges[name]):
            below = layer(target)
            inside = path.name == "__init__.py" and target.startswith(name + ".")  # a package shows what it holds
            if below is not None and below != own and LEVEL[below] >= LEVEL[own] and not inside:
                wrong.append(f"{name} imports {target}, which is not below it")
        for target in imports(path):
            parts = target.split(".")
            library = next((p for k in range(len(parts), 0, -1) if (p := ".".join(parts[:k])) in HOMES), None)
            homes = HOMES[library] if library is not None else {name}
            if not any(name == home or name.startswith(home + ".") for home in homes):
                wrong.append(f"{name} imports {library}, which belongs to {sorted(homes)}")
    return wrong + cycles(edges)


def test_imports_point_down():
    assert violations(SOURCE) == []


@pytest.mark.parametrize(("files", "complaint"), [
    ({"graph/graph": "from coterie.problem import Problem", "problem": ""}, "graph.graph imports problem"),
    ({"losses/base": "def f():\n    import coterie.solvers", "solvers/__init__": ""}, "losses.base imports solvers"),
    ({"certificates": "import cvxpy"}, "certificates imports cvxpy"),
    ({"datasets": "def f():\n    from torch import nn"}, "datasets imports torch"),
    ({"estimators": "from sklearn.metrics import r2_score"}, "estimators imports sklearn.metrics"),
    ({"analysis/path": "import sklearn"}, "analysis.path imports sklearn"),
    ({"novel": "import numpy"}, "novel is in no layer"),
    ({"data/users": "from coterie.data import encoding", "data/encoding": ""}, "data.users imports data.encoding"),
    ({"baselines/a": "import coterie.baselines.b", "baselines/b": "from coterie.baselines.a import x"}, "circle: "),
])
def test_a_wrong_import_is_found(tmp_path, files, complaint):
    for name, text in files.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text + "\n")
    assert any(complaint in collected for collected in violations(tmp_path))


def test_import_is_light():
    """`import coterie` brings in NumPy and nothing slow; the rest comes when it is used."""
    code = "import sys, coterie; print(*sorted(m for m in sys.modules if '.' not in m))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "numpy" in loaded
    assert not loaded & {"numba", "scipy", "sklearn", "cvxpy", "matplotlib", "polars", "pandas", "torch", "typer",
                         "rich"}
