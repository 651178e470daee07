"""The documentation site: notebooks become pages, formulas become MathML, and the search works from disk."""

from __future__ import annotations

import base64
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
HOOKS = runpy.run_path(str(DOCS / "hooks.py"))


def cells(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def stale(notebook: list[dict]) -> list[str]:
    """What a notebook lacks that was stored by `make notebooks`: runs in order, without errors and warnings."""
    code = [cell for cell in notebook if cell["cell_type"] == "code"]
    outputs = [output for cell in code for output in cell["outputs"]]
    wrong = [f"cell {k} is number {cell['execution_count']}" for k, cell in enumerate(code, 1)
             if cell["execution_count"] != k]
    wrong += [output["output_type"] for output in outputs if output["output_type"] == "error"]
    wrong += ["a warning" for output in outputs if output.get("name") == "stderr"]
    return wrong + ["no picture"] * (not any("image/png" in output.get("data", {}) for output in outputs))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_as_they_ran(path):
    assert stale(cells(path)) == []


def test_a_stale_notebook_is_found():
    notebook = [{"cell_type": "code", "source": "x", "execution_count": None, "outputs": [
        {"output_type": "error"}, {"output_type": "stream", "name": "stderr", "text": "careful"}]}]
    assert stale(notebook) == ["cell 1 is number None", "error", "a warning", "no picture"]


def absent(names: list[str], settings: str, gallery: str) -> list[str]:
    """Notebooks without a page in the navigation, a link in the gallery, or a thumbnail."""
    listed = re.findall(r"notebooks/([\w-]+)\.md", settings)
    shown = re.findall(r"\(notebooks/([\w-]+)\.ipynb\)", gallery)
    return [name for name in names if name not in listed or name not in shown
            or not (DOCS / "images" / "gallery" / f"{name}.png").exists()]


def test_every_notebook_is_shown():
    names = [path.stem for path in NOTEBOOKS]
    settings, gallery = (ROOT / "mkdocs.yml").read_text(), (DOCS / "gallery.md").read_text()
    assert len(names) >= 6
    assert absent(names, settings, gallery) == []
    assert absent(["another"], settings, gallery) == ["another"]
    assert absent(names[:1], settings.replace(f"notebooks/{names[0]}.md", ""), gallery) == names[:1]


def test_a_notebook_becomes_a_page():
    picture = base64.b64encode(b"dots").decode()
    page, pictures = HOOKS["render"]([
        {"cell_type": "markdown", "source": ["# Title\n", "\n", "Text"]},
        {"cell_type": "code", "source": "print(1)", "outputs": [
            {"output_type": "stream", "name": "stdout", "text": ["1\n", "2\n"]},
            {"output_type": "display_data", "data": {"image/png": picture, "text/plain": "<Figure>"}},
            {"output_type": "execute_result", "data": {"text/html": "<b>\n\n</b>", "text/plain": "b"}}]},
    ], "name")
    assert page.startswith("# Title\n\nText\n\nThis page is a notebook: [download it](name.ipynb)")
    assert "```python\nprint(1)\n```\n\n```text\n1\n2\n```\n\n![Figure 1](name-1.png)\n\n" in page
    assert page.endswith('<div class="output"><b>\n</b></div>\n')
    assert pictures == {"name-1.png": b"dots"}


def test_rows_of_printed_tables_stay_in_one_line():
    lines = ["RMSE on test rows, mean over users", "         groups   smooth", "coterie    1.03     1.11",
             "splines                             1.01", "Held out  RMSE on rows: a sentence.", "│ 1 │ 2 │"]
    start = '<div class="language-text highlight"><pre><span></span><code>'
    page = HOOKS["on_page_content"](f"{start}{chr(10).join(lines)}\n</code></pre></div>")
    assert re.findall('<span class="row">(.*)</span>', page) == [lines[k] for k in (2, 3, 5)]
    assert re.sub('<span class="row">(.*)</span>', r"\1", page) == f"{start}{chr(10).join(lines)}\n</code></pre></div>"
    code = "<pre><code>a    b    c</code></pre>"
    assert HOOKS["on_page_content"](code) == code


def test_docstrings_get_the_form_that_griffe_reads():
    text = """Do it.

Parameters
----------
first : what is done, with <a, b>.
other, third
    The rest.

Returns
-------
(n,) numbers,
in order.

Raises
------
InvalidInput : if not.

Example
-------
>>> 1 : 2
"""
    assert HOOKS["numpydoc"](text, "Array") == """Do it.

Parameters
----------
first
    what is done, with ⟨a, b⟩.
other, third
    The rest.

Returns
-------
Array
    (n,) numbers,
    in order.

Raises
------
InvalidInput
    if not.

Examples
--------
>>> 1 : 2"""
    kept = "Get.\n\nReturns\n-------\nJoined\n    The models."
    assert HOOKS["numpydoc"](kept, "Joined") == kept
    assert HOOKS["numpydoc"]("Get.\n\nReturns\n-------\nJoined", "Joined") == "Get.\n\nReturns\n-------\nJoined"


def formulas(page: str) -> list[str]:
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page, flags=re.M | re.S)
    return re.findall(r"\$\$\n(.*?)\n\$\$|\$([^$\n]+)\$", text, re.S)


def undrawn(formula: str) -> bool:
    """Whether something of a formula is left as it was written, such as an unknown command or environment."""
    drawn = HOOKS["on_page_content"](rf'<div class="arithmatex">\[{formula}\]</div>')
    return not drawn.startswith("<math") or bool(re.search(r"[\\$]|&(?!#x)|&#x00026;", re.sub("<[^>]*>", "", drawn)))


def test_every_formula_is_drawn():
    pages = [path.read_text() for path in sorted(DOCS.glob("*.md"))]
    pages += ["".join(cell["source"]) for path in NOTEBOOKS for cell in cells(path) if cell["cell_type"] == "markdown"]
    written = [block or inline for page in pages for block, inline in formulas(page)]
    assert len(written) > 20
    assert [formula for formula in written if undrawn(formula)] == []
    assert undrawn(r"\begin{aligned} a &= b \end{aligned}")
    assert undrawn(r"\unknowncommand x")


@pytest.mark.slow
def test_a_changed_output_of_a_notebook_is_found():
    pytest.importorskip("nbclient")
    same = runpy.run_path(str(DOCS / "notebooks.py"))["same"]

    def cell(text):
        return {"outputs": [{"output_type": "stream", "name": "stdout", "text": text}]}

    assert same(cell("gap 0.5 after 3.1 s"), cell("gap  0.5000000001 after 2 s\n"))
    assert not same(cell("gap 0.5"), cell("gap 0.6"))
    assert not same(cell("3 groups"), cell("3 kinds"))
    assert not same(cell("3 groups"), {"outputs": []})
    assert not same(cell("3"), cell("3 4"))


@pytest.mark.browser
def test_the_search_works_from_disk(tmp_path, browser):
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"],
                   cwd=ROOT, check=True, timeout=300)
    page = browser.new_page()
    fetched: list[str] = []
    page.on("request", lambda request: fetched.append(request.url))
    page.goto((tmp_path / "site" / "index.html").as_uri() + "?q=certificate")
    page.wait_for_selector(".md-search-result__link", timeout=60_000)
    assert "certificate" in page.inner_text(".md-search-result__list").lower()
    assert [url for url in fetched if not url.startswith(("file:", "data:", "blob:"))] == []
