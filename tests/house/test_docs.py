"""The documentation says what the code does: its blocks run, its tables match, its links lead somewhere."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import io
import os
import re
import runpy
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

import coterie as ct

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "README.md", *sorted(DOCS.glob("*.md")))}
README = PAGES["README.md"].read_text()
BESIDE = (ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md")


class Block(NamedTuple):
    """One fenced block of a page."""

    line: int
    language: str
    body: str
    warns: str | None  # part of the warning it is to show
    prints: str | None  # the ```text block right after it


def blocks(page: str) -> list[Block]:
    fences = list(re.finditer(r"^```(\w+)\n(.*?)^```$", page, re.M | re.S))
    assert len(fences) * 2 == page.count("```"), "a fence without a language, indented, or not closed"
    collected = []
    for k, fence in enumerate(fences):
        after = fences[k + 1] if k + 1 < len(fences) else None
        shown = after and after[1] == "text" and not page[fence.end(): after.start()].strip()
        note = re.search(r"<!-- warns: (.*) -->\n$", page[: fence.start()])
        collected.append(Block(page.count("\n", 0, fence.start()) + 2, fence[1], fence[2], note and note[1],
                           after[2] if after and shown else None))
    return collected


NUMBER = re.compile(r"[-+]?\d+\.?\d*(?:e[-+]?\d+)?")


def same(shown: str, printed: str) -> bool:
    """Equal texts up to white space, their numbers to 1e-6: the last digits depend on the machine."""
    a, b = (re.sub(r"\bin [\d.]+ s\b", "", text) for text in (shown, printed))  # seconds differ from run to run
    words = [re.sub(r"\s+", "", NUMBER.sub("#", text)) for text in (a, b)]
    numbers = [[float(n) for n in NUMBER.findall(text)] for text in (a, b)]
    return words[0] == words[1] and numbers[0] == pytest.approx(numbers[1], rel=1e-6, abs=1e-6)


def run_page(page: str, name: str) -> int:
    """Run a page's python blocks in one namespace; AssertionError says which fails. Returns how many ran."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    python = [block for block in blocks(page) if block.language == "python"]
    for block in python:
        where, out = f"{name}, block at line {block.line}", io.StringIO()
        with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(out):
            warnings.simplefilter("always")
            try:
                exec(compile(block.body, where, "exec", dont_inherit=True), namespace)
            except Exception as error:
                raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
        messages = [str(warning.message) for warning in caught]
        if block.warns is None:
            assert not messages, f"{where} warns: {messages}"
        else:
            assert any(block.warns in message for message in messages), f"{where} does not warn of {block.warns!r}"
        if block.prints is not None and not same(block.prints, out.getvalue()):
            raise AssertionError(f"{where} prints:\n{out.getvalue()}")
    return len(python)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A working directory with the shops' table, and LOSSES as they were afterwards: a page enters one of its own."""
    monkeypatch.chdir(tmp_path)
    shops = runpy.run_path(str(ROOT / "examples" / "shops.py"))
    shops["table"]()[0].write_csv("shops.csv")
    before = dict(ct.LOSSES)
    yield tmp_path
    ct.LOSSES.clear()
    ct.LOSSES.update(before)


LONG = ("docs/algorithm-1.md", "docs/estimators.md", "docs/federations.md", "docs/plots.md",  # to run
        "docs/embeddings.md")  # needs torch

WITHOUT_CODE = ("docs/reference.md", "docs/public-tables.md", "docs/flower.md", "docs/operating.md")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in PAGES])
def test_every_python_block_runs_and_prints_what_the_page_shows(name, elsewhere):
    ran = run_page(PAGES[name].read_text(), name)
    assert ran or name in WITHOUT_CODE


@pytest.mark.parametrize(("page", "complaint"), [
    ("```python\nx = 1\n```\n\n```python\nprint(y)\n```\n", "page, block at line 6: NameError"),
    ("```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n", "prints:\n2"),
    ("```python\nprint(0.5)\n```\n\n```text\n0.50001\n```\n", "prints"),
    ("```python\nprint('one user')\n```\n\n```text\none loser\n```\n", "prints"),
    ("```python\nimport warnings\nwarnings.warn('careful')\n```\n", "warns: .'careful'"),
    ("<!-- warns: careful -->\n```python\nx = 1\n```\n", "does not warn of 'careful'"),
    ("```\nx = 1\n```\n", "without a language"),
    ("    ```python\n    x = 1\n    ```\n", "indented"),
])
def test_a_broken_page_is_found(page, complaint, elsewhere):
    with pytest.raises(AssertionError, match=complaint):
        run_page(page, "page")


def test_blocks_share_a_page_and_rounding_is_forgiven(elsewhere):
    assert run_page("```python\nx = 0.5\n```\n\n```python\nprint(x + 1e-12,\n 'in 1.2 s')\n```\n\n"
                    "```text\n0.5\nin 3.4 s\n```\n", "page") == 2


def test_the_first_page_shows_what_make_demo_prints(tmp_path):
    page = PAGES["docs/index.md"].read_text()
    shown = next(block.body for block in blocks(page) if "groups among 60 users" in block.body)
    done = subprocess.run([sys.executable, "-m", "coterie", "demo", "--out", "demo"], cwd=tmp_path, timeout=120,
                          capture_output=True, encoding="utf-8", check=True)
    printed = re.sub(r"^Compiling .*\n", "", done.stdout, flags=re.M)  # only where nothing compiled it before
    assert same(shown, printed), done.stdout
    assert not same(shown.replace("20 of kind 2", "19 of kind 2"), printed)
    assert not same(shown, printed.replace("57.64", "57.65"))


def test_the_tutorial_shows_what_fit_prints(elsewhere):
    page = PAGES["docs/table.md"].read_text()
    command, shown = next((block.body, block.prints) for block in blocks(page) if "coterie fit" in block.body)
    done = subprocess.run([sys.executable, "-m", "coterie", *command.split()[1:]], timeout=120,
                          capture_output=True, encoding="utf-8", check=True)
    assert same(shown, done.stdout), done.stdout
    assert not same(shown.replace("27 of 40", "28 of 40"), done.stdout)
    assert (command, shown) in [(block.body.splitlines(keepends=True)[-1].partition("   #")[0] + "\n", block.prints)
                                for block in blocks(README)]  # the README shows the same
    clusters = [[float(cell) for cell in line.split(",")] for line in Path("run/clusters.csv").read_text().split()[1:]]
    assert [[float(cell) for cell in cells] for cells in rows(page)[1:]] == [
        pytest.approx(row, abs=0.05) for row in clusters]
    assert page.split("```text\n")[1].startswith("\n".join(Path("shops.csv").read_text().splitlines()[:3]))


# Tables against the code


def rows(page: str) -> list[list[str]]:
    """The cells of all table rows of a page, without the lines under headings."""
    lines = [line.strip() for line in page.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if set(line) - set("|-: ")]


def reference_row(name: str) -> str:
    """The row of a public name: the first line of its docstring, for a loss what follows the formula."""
    thing = getattr(ct, name)
    text = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
    if thing in ct.LOSSES.values():
        text = text.partition(": ")[2]
        text = text[:1].upper() + text[1:]
    return f"| `{name}` | {text} |"


def reference_mistakes(page: str) -> list[str]:
    lines = page.splitlines()
    tables = {"ALGORITHMS", "LOSSES", "SOLVERS"}  # dictionaries have no docstring of their own
    missing = [f"missing: {reference_row(name)}" for name in ct.__all__
               if name not in tables and reference_row(name) not in lines]
    missing += [f"missing: {name}" for name in tables if not any(line.startswith(f"| `{name}` |") for line in lines)]
    names = re.split(r"^## Modules", page, flags=re.M)[0]
    gone = [f"not in coterie.__all__: {cells[0]}" for cells in rows(names)
            if len(cells) == 2 and cells[1] and re.fullmatch(r"`[A-Z]\w+`", cells[0])
            and cells[0].strip("`") not in ct.__all__]
    return missing + gone


def test_the_reference_has_every_public_name():
    assert reference_mistakes(PAGES["docs/reference.md"].read_text()) == []


@pytest.mark.parametrize(("old", "new", "complaint"), [
    ("| `solve` |", "| `solves` |", f"missing: {reference_row('solve')}"),
    ("Least squares.", "Best squares.", f"missing: {reference_row('Squared')}"),
    ("| `SOLVERS` |", "|", "missing: SOLVERS"),
    ("| `Graph` |", "| `Solvent` | for paint |\n| `Graph` |", "not in coterie.__all__: `Solvent`"),
])
def test_a_wrong_reference_is_found(old, new, complaint):
    page = PAGES["docs/reference.md"].read_text()
    assert old in page
    assert complaint in reference_mistakes(page.replace(old, new))


def undocumented(pages: str) -> set[str]:
    """Public names without a directive on the API pages, and directives of names that do not exist."""
    named = re.findall(r"^::: ([\w.]+)$", pages, re.M)
    missing = {f"coterie.{name}" for name in ct.__all__} - {re.sub(r"\.estimators\.", ".", name) for name in named}
    return missing | {name for name in named if not hasattr(*_split(name))}


def _split(name: str) -> tuple[object, str]:
    module, _, attribute = name.rpartition(".")
    return importlib.import_module(module), attribute


def test_the_api_pages_have_every_public_name():
    pages = "".join(path.read_text() for path in sorted((DOCS / "api").glob("*.md")))
    assert undocumented(pages) == set()
    assert undocumented(pages.replace("::: coterie.solve\n", "")) == {"coterie.solve"}
    assert undocumented(pages + "::: coterie.plots.plot\n") == {"coterie.plots.plot"}


def loss_mistakes(page: str) -> list[str]:
    """Names and classes of the loss tables against LOSSES; every setting must be explained somewhere on the page."""
    described = {cells[0]: cells[1] for cells in rows(page) if len(cells) == 4 and cells[0] != "name"}
    expected = {f"`{name}`": f"`{kind.__name__}`" for name, kind in ct.LOSSES.items()}
    wrong = [f"{name}: expected {expected.get(name)}, the page has {described.get(name)}"
             for name in sorted(expected.keys() | described.keys()) if expected.get(name) != described.get(name)]
    settings = {field.name for kind in ct.LOSSES.values() for field in dataclasses.fields(kind)}
    prose = re.sub(r"^```.*?^```$", "", page, flags=re.M | re.S)
    unsaid = [name for name in sorted(settings) if not re.search(f"`{name}[`=]", prose)]
    return wrong + [f"setting {name} is not explained" for name in unsaid]


def test_the_losses_page_has_every_loss():
    assert loss_mistakes(PAGES["docs/losses.md"].read_text()) == []


def test_a_wrong_losses_page_is_found(monkeypatch):
    page = PAGES["docs/losses.md"].read_text()
    assert loss_mistakes(page.replace("| `huber` |", "| `hubert` |")) != []
    assert loss_mistakes(page.replace("| `Poisson` |", "| `Fish` |")) == [
        "`poisson`: expected `Poisson`, the page has `Fish`"]
    assert loss_mistakes(page.replace("`delta`", "it")) == ["setting delta is not explained"]
    monkeypatch.setitem(ct.LOSSES, "another", ct.Squared)
    assert loss_mistakes(page) == ["`another`: expected `Squared`, the page has None"]


def command_mistakes(page: str) -> list[str]:
    """Exit codes against the command's docstring; options and defaults against the command itself."""
    from typer.main import get_command

    from coterie import cli

    codes = dict(re.findall(r"(\d+) ([^;.]+)[;.]", cli.base.CODES))
    shown = {cells[0]: cells[1] for cells in rows(page) if len(cells) == 2 and cells[0].isdigit()}
    wrong = [] if codes == shown and codes else [f"exit codes: expected {codes}, the page has {shown}"]
    commands = dict(get_command(cli.app).commands)  # type: ignore[attr-defined]
    for name, group in list(commands.items()):
        commands |= {f"{name} {part}": command for part, command in getattr(group, "commands", {}).items()}
    for name, command in commands.items():
        section = re.search(rf"^## `coterie {name}`\n(.*?)(?=^## |\Z)", page, re.M | re.S)
        options = {cells[0]: cells[1] for cells in rows(section[1] if section else "") if cells[0].startswith("`--")}
        real = {f"`{option.opts[0]}`": f"`{option.default}`" for option in command.params
                if option.name != "help" and option.opts[0].startswith("--") and not option.hidden}
        if options != real:
            wrong.append(f"{name}: expected {real}, the page has {options}")
    return wrong


def test_the_command_page_has_options_and_exit_codes():
    assert command_mistakes(PAGES["docs/cli.md"].read_text()) == []


@pytest.mark.parametrize(("old", "new", "complaint"), [
    ("| 3 |", "| 4 |", "exit codes"),
    ("| 130 | interrupted |", "", "exit codes"),
    ("| `0.09` |", "| `0.9` |", "demo: expected"),
    ("## `coterie demo`", "## `coterie memo`", "demo: expected"),
])
def test_a_wrong_command_page_is_found(old, new, complaint):
    page = PAGES["docs/cli.md"].read_text()
    assert old in page
    assert complaint in command_mistakes(page.replace(old, new))[0]


def unknown_tests(page: str) -> set[str]:
    code = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    return set(re.findall(r"`(test_\w+)`", page)) - set(re.findall(r"def (test_\w+)", code))


def test_tests_named_in_the_docs_exist():
    page = PAGES["docs/conventions.md"].read_text()
    tests = (ROOT / "tests" / "house" / "test_conventions.py").read_text()
    assert set(re.findall(r"def (test_\w+)", tests)) == set(re.findall(r"`(test_\w+)`", page))
    assert unknown_tests("".join(path.read_text() for path in PAGES.values())) == set()
    assert unknown_tests("see `test_of_patience`") == {"test_of_patience"}


def unknown_files(page: str) -> set[str]:
    """Files and folders of the repository that a page names and that are not there."""
    return {name for name in re.findall(r"`((?:src|tests|docs|benchmarks|examples)/[\w./-]+)`", page)
            if not (ROOT / name).exists()}


def test_files_named_in_the_docs_exist():
    pages = "".join(path.read_text() for path in (*PAGES.values(), *BESIDE))
    assert unknown_files(pages) == set()
    assert "`src/" in pages
    assert unknown_files("`tests/house/test_docs.py`, `tests/test_of_time.py`") == {"tests/test_of_time.py"}


def dependencies(settings: str) -> list[str]:
    """Names of all libraries in pyproject.toml, without versions and extras, except coterie itself."""
    project = tomllib.loads(settings)["project"]
    wanted = [project["dependencies"], *project["optional-dependencies"].values()]
    names = {re.match(r"[\w-]+", entry)[0] for entries in wanted for entry in entries}
    return sorted(names - {"coterie"})


def explained(page: str) -> list[str]:
    """Names in the first column of the table of dependencies, where the second column says something."""
    table = page.split("## Why each dependency is there")[1].split("\n## ")[0]
    return sorted(re.findall(r"^\| `([\w-]+)` \| \w.* \|$", table, re.M))


def test_every_dependency_is_explained():
    settings, page = (ROOT / "pyproject.toml").read_text(), (ROOT / "CONTRIBUTING.md").read_text()
    assert explained(page) == dependencies(settings)
    assert explained(re.sub(r"(?m)^\| `numba`.*\n", "", page)) != dependencies(settings)
    assert explained(page) != dependencies(settings.replace('"numpy>', '"novel>=1", "numpy>'))


def unmapped(page: str) -> set[str]:
    """Folders and files of the package that the map of CONTRIBUTING does not name, and names that do not exist."""
    rooms = " ".join(cells[0] for cells in rows(page))
    files = page.partition("Single files beside the rooms")[2].partition("Outside the package")[0]
    named = set(re.findall(r"`(\w+(?:/|\.py))`", f"{rooms} {files}"))
    real = {path.name + "/" * path.is_dir() for path in (ROOT / "src" / "coterie").iterdir()
            if path.suffix == ".py" or (path / "__init__.py").exists()} - {"__init__.py"}
    return named ^ real


def test_the_map_has_every_room():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert unmapped(page) == set()
    assert unmapped(page.replace("| `groups/` |", "| `walks/` |")) == {"groups/", "walks/"}


# Links, words and versions


def anchors(path: Path) -> set[str]:
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)
    titles = [re.sub(r"[^\w\s-]", "", title.lower()).strip() for title in re.findall(r"^#+ (.*)$", text, re.M)]
    return {re.sub(r"\s+", "-", title) for title in titles}


def broken_links(path: Path) -> list[str]:
    """Relative links of a page that lead nowhere."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", link):
            continue
        target, _, anchor = link.partition("#")
        there = path.parent / target if target else path
        if not there.exists() or (anchor and anchor not in anchors(there)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("path", [*PAGES.values(), *BESIDE], ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    assert broken_links(path) == []


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "b.md").write_text("# Here it is\n")
    page = tmp_path / "a.md"
    page.write_text("[x](b.md) [y](c.md) [z](b.md#here-it-is) [v](b.md#there) [w](https://example.org) ![p](p.png)\n")
    assert broken_links(page) == ["c.md", "b.md#there", "p.png"]


# Written so that this file does not match itself.
FORBIDDEN = re.compile(r"(?i:\bissue #?[0-9]+)|\bTOD[O]\b|\bFIXM[E]\b|/wor[k]/")
SKIPPED = {"site", "demo", "dist", "reproduction", "__pycache__"}


def forbidden(root: Path) -> list[str]:
    """Traces of how the project was made, in any text file that belongs to it."""
    collected = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED and (name == ".ci" or name[0] != ".")]
        for path in (Path(folder, name) for name in files if name != ".git"):  # a file in a linked work tree
            with contextlib.suppress(UnicodeDecodeError):  # a picture
                words = FORBIDDEN.findall(path.read_text(encoding="utf-8"))
                collected += [f"{path.relative_to(root).as_posix()}: {word}" for word in words]
    return sorted(collected)


def test_no_file_speaks_of_how_it_was_made():
    assert forbidden(ROOT) == []


def test_forbidden_words_are_found(tmp_path):
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("# TO" + "DO later, see Issue" + " #12\n# FIX" + "ME\n")
    (tmp_path / "b.md").write_text("in /wor" + "k/main, and no issue at all with todos\n")
    (tmp_path / "c.png").write_bytes(b"\x89PNG\xff")
    assert [line.split(": ")[0] for line in forbidden(tmp_path)] == ["b.md", "src/a.py", "src/a.py", "src/a.py"]


def site_mistakes(settings: str) -> list[str]:
    """Pages outside the navigation, and anything a reader's browser would fetch from elsewhere."""
    site = yaml.safe_load(settings)
    parts = [part if isinstance(part, list) else [entry] for entry in site["nav"] for part in entry.values()]
    listed = {page for part in parts for entry in part for page in entry.values()}
    wrong = [f"not in the navigation: {path.name}" for path in PAGES.values()
             if path.parent == DOCS and path.name not in listed]
    wrong += [f"remote: {link}" for link in re.findall(r"https?://\S+", settings)]
    shim = [path for path in site.get("extra", {}).get("polyfills", []) if "iframe-worker" in path]
    here = "offline" not in site["plugins"] or (shim and (DOCS / shim[0]).exists())  # else the plugin takes unpkg's
    wrong += [] if site["theme"]["font"] is False and here else ["remote: fonts or scripts"]
    return wrong + ([] if site["strict"] else ["not strict"])


def test_the_site_is_whole_and_needs_no_network():
    settings = (ROOT / "mkdocs.yml").read_text()
    assert site_mistakes(settings) == []
    assert site_mistakes(settings.replace("      - Data: data.md\n", "")) == ["not in the navigation: data.md"]
    assert site_mistakes(settings.replace("style.css", "https://example.org/style.css")) != []
    assert site_mistakes(settings.replace("font: false", "font: {}")) == ["remote: fonts or scripts"]
    assert site_mistakes(settings.replace("iframe-worker.js", "other.js")) == ["remote: fonts or scripts"]
    assert site_mistakes(settings.replace("iframe-worker.js", "iframe-worker.ts")) == ["remote: fonts or scripts"]
    assert site_mistakes(settings.replace("strict: true", "strict: false")) == ["not strict"]


def test_one_version_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == ct.__version__
    assert citation["license"] == "Apache-2.0"
    assert [author["family-names"] for author in citation["references"][0]["authors"]] == [
        "Armacki", "Bajovic", "Jakovetic", "Kar"]
    assert re.search(r"^## (Unreleased|\[?\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.M)


def badge_mistakes(page: str, settings: str) -> list[str]:
    """Badges of the README against pyproject.toml: they are static, so nothing else keeps them true."""
    project, badges = tomllib.loads(settings), re.findall(r"^\[!\[([^]]+)\]\((\S+)\)\]", page, re.M)
    oldest = re.match(r">=(\d\.\d+)$", project["project"]["requires-python"])
    true = {f"Licence: {project['project']['license'].replace('-', ' ')}",
            "Typed" if project["tool"]["mypy"]["strict"] and (ROOT / "src/coterie/py.typed").exists() else ""}
    versions = f"Python {oldest[1] if oldest else '?'} to "
    wrong = [name for name, _ in badges if name not in true and not name.startswith(versions)]
    return wrong + [link for _, link in badges if not link.startswith("https://img.shields.io/badge/")]


def test_badges_are_true():
    settings = (ROOT / "pyproject.toml").read_text()
    assert badge_mistakes(README, settings) == []
    assert "[![Typed]" in README
    assert badge_mistakes(README, settings.replace('">=3.11"', '">=3.12"')) == ["Python 3.11 to 3.13"]
    assert badge_mistakes(README.replace("[![Typed]", "[![Build: passing]"), settings) == ["Build: passing"]


def long_lines(text: str) -> list[str]:
    """Lines above 120 characters; rows of tables cannot be wrapped."""
    return [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|")]


def test_lines_are_short():
    for path in (*PAGES.values(), *BESIDE):
        assert long_lines(path.read_text()) == [], path.name
    assert long_lines("x" * 121) != []
