"""Losses are asked for their traits: few places ask for the type of one."""

from __future__ import annotations

import ast
from pathlib import Path

import coterie  # noqa: F401  # every loss is defined
from coterie.losses import Loss

SOURCE = Path(__file__).parents[2] / "src" / "coterie"

MOST = 18


def kinds(kind: type = Loss) -> set[str]:
    """The names of all classes of losses that are derived from this one."""
    return {kind.__name__}.union(*(kinds(each) for each in kind.__subclasses__()))


def asks(source: Path, names: set[str]) -> list[str]:
    """Where the type of a loss is asked, in whatever spelling: as "file:line"."""
    found = []
    for path in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and \
                    node.func.id in ("isinstance", "issubclass") and len(node.args) == 2:
                asked, what = node.args[1], ast.unparse(node.args[0])
                of_loss = what == "loss" or what.endswith(".loss")
            elif isinstance(node, ast.Compare):
                asked, of_loss = node.comparators[0], False
            elif isinstance(node, ast.MatchClass):
                asked, of_loss = node.cls, False
            else:
                continue
            mentioned = {each.id for each in ast.walk(asked) if isinstance(each, ast.Name)} | {
                each.attr for each in ast.walk(asked) if isinstance(each, ast.Attribute)}
            if of_loss or mentioned & names:
                found.append(f"{path.relative_to(source).as_posix()}:{node.lineno if hasattr(node, 'lineno') else ''}")
    return found


def test_few_places_ask_for_the_type_of_a_loss():
    assert len(asks(SOURCE, kinds())) <= MOST, asks(SOURCE, kinds())


def test_a_type_that_is_asked_for_is_found(tmp_path):
    (tmp_path / "a.py").write_text(
        "isinstance(loss, str)\n"
        "isinstance(problem.loss, Personal)\n"
        "isinstance(inner, (int, ct.Huber))\n"
        "type(plain) is not Squared\n"
        "type(plain) in (Squared, Huber)\n"
        "issubclass(kind, LinearLoss)\n"
        "match plain:\n    case Poisson():\n        pass\n"
        "isinstance(users, Users)\ntype(users) is Users\nloss.task == 'counts'\n")
    assert {"Loss", "Squared", "Personal", "WithRidge"} <= kinds()
    assert [int(place.split(":")[1]) for place in asks(tmp_path, kinds())] == [*range(1, 7), 8]
