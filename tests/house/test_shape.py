"""Modules, functions and classes stay small enough to be read, and what is large says why."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "coterie"

MODULE_LINES, FUNCTION_LINES, PARAMETERS, ATTRIBUTES = 600, 60, 8, 15
#: A function so decorated has as many parameters as the command has options, the compiled loop arrays, or the function
#: that it overloads.
MANY_PARAMETERS = re.compile(r"^(\w+\.)?(command|callback|njit|inner|overload)\b")


def entries(docstring: str | None) -> set[str]:
    """Names explained in the sections Parameters and Attributes of a docstring."""
    section, names = "", set()
    lines = [*(docstring or "").splitlines(), ""]
    for line, below in itertools.pairwise(lines):
        if re.fullmatch(r"-{3,}", below):
            section = line
        elif section in ("Parameters", "Attributes") and (entry := re.match(r"(\w+(?:, \w+)*)(?: :|$)", line)):
            names |= set(entry[1].split(", "))
    return names


def class_entries(tree: ast.Module) -> dict[str, set[str]]:
    """What is explained of each class, in its own docstring or in that of a class of the module derived from it."""
    collected: dict[str, set[str]] = {}
    for node in reversed([node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]):
        collected[node.name] = collected.get(node.name, set()) | entries(ast.get_docstring(node))
        for base in (ast.unparse(base) for base in node.bases):
            collected[base] = collected.get(base, set()) | collected[node.name]
    return collected


def functions(node: ast.AST, path: str, of_class: set[str], classes: dict[str, set[str]],
              ) -> list[tuple[str, ast.FunctionDef, set[str]]]:
    """All functions below a node: dotted name, node, and the names its docstring (or its class's) explains."""
    collected = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            own = of_class if child.name == "__init__" else entries(ast.get_docstring(child))
            collected.append((f"{path}.{child.name}", child, own))
            collected += functions(child, f"{path}.{child.name}", set(), classes)
        elif isinstance(child, ast.ClassDef):
            collected += functions(child, f"{path}.{child.name}", classes[child.name], classes)
        else:
            collected += functions(child, path, of_class, classes)
    return collected


def parameters(function: ast.FunctionDef) -> list[str]:
    given = function.args
    return [arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs) if arg.arg not in ("self", "cls")]


def attributes(node: ast.ClassDef, lines: list[str], explained: set[str]) -> dict[str, bool]:
    """What a class stores under a name of its own, and whether a comment on its line or a docstring explains it."""
    collected: dict[str, bool] = {}

    def store(name: str, line: int) -> None:
        collected[name] = collected.get(name, False) or name in explained or "  # " in lines[line - 1]

    for child in node.body:
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name):
            store(child.target.id, child.end_lineno or child.lineno)
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store) and \
                isinstance(child.value, ast.Name) and child.value.id == "self":
            store(child.attr, child.lineno)
    return collected


def docstring_lines(function: ast.FunctionDef) -> int:
    """The lines of a docstring, which may be as long as it takes; the steps of a function may not."""
    first = function.body[0]
    return first.end_lineno - first.lineno + 1 if ast.get_docstring(function) is not None else 0


def oversized(source: Path) -> set[str]:
    """Everything above a limit, as "kind: dotted name"."""
    collected = set()
    for path in sorted(source.rglob("*.py")):
        text = path.read_text()
        name = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        tree, lines = ast.parse(text), text.splitlines()
        classes = class_entries(tree)
        if len(lines) > MODULE_LINES:
            collected.add(f"long module: {name}")
        for function, node, explained in functions(tree, name, set(), classes):
            if node.end_lineno - node.lineno + 1 - docstring_lines(node) > FUNCTION_LINES:
                collected.add(f"long function: {function}")
            reason = any(MANY_PARAMETERS.match(ast.unparse(decorator)) for decorator in node.decorator_list)
            public = node.name == "__init__" or node.name[0] != "_"
            reason = reason or (public and set(parameters(node)) <= explained)
            if len(parameters(node)) > PARAMETERS and not reason:
                collected.add(f"many parameters: {function}")
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                stored = attributes(node, lines, classes[node.name])
                if len(stored) > ATTRIBUTES and not all(stored.values()):
                    collected.add(f"unexplained attributes: {name}.{node.name}")
    return collected


def shared_names(source: Path) -> dict[str, list[str]]:
    """Public classes of one name in several modules: a reader cannot tell which one a text means."""
    homes: dict[str, list[str]] = {}
    for path in sorted(source.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(path.relative_to(source).as_posix())
    return {name: files for name, files in homes.items() if len(files) > 1}


def test_every_class_has_a_name_of_its_own(tmp_path):
    assert shared_names(SOURCE) == {}
    (tmp_path / "a.py").write_text("class Plan: ...\nclass _Own: ...\nclass Other: ...\n")
    (tmp_path / "b.py").write_text("class Plan: ...\nclass _Own: ...\n")
    assert shared_names(tmp_path) == {"Plan": ["a.py", "b.py"]}


def test_nothing_is_too_large():
    assert oversized(SOURCE) == set()


MANY = ", ".join(f"a{k}" for k in range(9))
FIELDS = "".join(f"    a{k}: int\n" for k in range(16))
LISTED = f"Parameters\n    ----------\n    {MANY} : numbers."


@pytest.mark.parametrize(("code", "complaints"), [
    ("x = 1\n" * 600, []),
    ("x = 1\n" * 601, ["long module: a"]),
    ("def f():\n" + "    x = 1\n" * 59, []),
    ("def f():\n" + "    x = 1\n" * 60, ["long function: a.f"]),
    ('def f():\n    """F.\n\n    More.\n    """\n' + "    x = 1\n" * 59, []),
    ('def f():\n    """F.\n\n    More.\n    """\n' + "    x = 1\n" * 60, ["long function: a.f"]),
    ("class C:\n    async def f():\n" + "        x = 1\n" * 60, ["long function: a.C.f"]),
    ("if True:\n    def f():\n        def g():\n" + "            x = 1\n" * 60,
     ["long function: a.f", "long function: a.f.g"]),
    (f"def f({MANY}): ...\n", ["many parameters: a.f"]),
    (f"def f(*, {MANY}): ...\n", ["many parameters: a.f"]),
    (f"class C:\n    def f(self, {MANY.removesuffix(', a8')}): ...\n", []),
    (f"@app.command('f')\ndef f({MANY}): ...\n", []),
    (f"@njit(cache=True)\ndef f({MANY}): ...\n", []),
    (f"@inner(**_EXACT)\ndef f({MANY}): ...\n", []),
    (f"@cache\ndef f({MANY}): ...\n", ["many parameters: a.f"]),
    (f'def f({MANY}):\n    """F.\n\n    {LISTED}\n    """\n', []),
    (f'def _f({MANY}):\n    """F.\n\n    {LISTED}\n    """\n', ["many parameters: a._f"]),
    (f'def f({MANY}, b):\n    """F.\n\n    {LISTED}\n    """\n', ["many parameters: a.f"]),
    (f'class C:\n    """C.\n\n    {LISTED}\n    """\n\n    def __init__(self, {MANY}): ...\n', []),
    (f'class _C:\n    def __init__(self, {MANY}): ...\n\nclass D(_C):\n    """D.\n\n    {LISTED}\n    """\n', []),
    (f'class _C:\n    def __init__(self, {MANY}): ...\n\nclass D:\n    """D.\n\n    {LISTED}\n    """\n',
     ["many parameters: a._C.__init__"]),
    (f"class C:\n{FIELDS}", ["unexplained attributes: a.C"]),
    (f"class C:\n{FIELDS.replace('    a15: int', '')}", []),
    ("class C:\n" + FIELDS.replace("int", "int  # a number"), []),
    ("class C:\n" + FIELDS.replace("int\n", "int  # a number\n", 15), ["unexplained attributes: a.C"]),
    ("class C:\n    def f(self):\n" + "".join(f"        self.a{k} = {k}\n" for k in range(16)),
     ["unexplained attributes: a.C"]),
    ("class C:\n    def f(self):\n" + "".join(f"        self.a{k}, self.b{k} = 1, 2  # two\n" for k in range(8)), []),
])
def test_what_is_too_large_is_found(tmp_path, code, complaints):
    (tmp_path / "a.py").write_text(code)
    assert sorted(oversized(tmp_path)) == complaints
