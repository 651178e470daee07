"""What MkDocs does with the pages: notebooks become pages, and formulas become MathML, which needs
no script.
"""

from __future__ import annotations

import base64
import html
import itertools
import json
import re
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

PRINTED = re.compile(r'(<div class="language-text highlight"><pre>.*?<code>)(.*?)(</code>)', re.S)
TABLE_ROW = re.compile(r"^(?:.*[│┃┏┡└━─].*|\s*\S.*?(?: {2,}\S.*?){2,}|\s*\S.*? {20,}\S.*)$", re.M)
ARITHMATEX = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.S)


class Docstrings(griffe.Extension):
    """The docstrings in the form that griffe reads; types are in the signatures."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = numpydoc(obj.docstring.value, str(getattr(obj, "returns", "")))


def numpydoc(docstring: str, returns: str) -> str:
    """A docstring with every description in a line of its own.

        name : description     ->  name, and the description below it
        a flat text (Returns)  ->  the type `returns`, and the text below it
        Example                ->  Examples
        <a, b>                 ->  the same with brackets that are no HTML
    """
    section, lines, written = "", docstring.splitlines(), []
    for line, below in itertools.pairwise([*lines, ""]):
        if re.fullmatch("-{3,}", below):
            section = line
        entry = re.fullmatch(r"(\**\w[\w.]*(?:, \**\w+)*) : (.*)", line)
        if section in ("Parameters", "Attributes", "Raises", "Returns") and entry:
            written += [entry[1], f"    {entry[2]}"]
        elif section == "Returns" and re.match(r"[^\s-]", line) and line != section \
            and not below.startswith(" "):
            flat = written[-1].startswith("---")
            written += [returns] * (flat and line != returns) \
                + [line if line == returns else f"    {line}"]
        else:
            written.append(line)
    text = re.sub(r"^Example\n-------$", "Examples\n--------", "\n".join(written), flags=re.M)
    return re.sub(r"<([^<>\n]+,[^<>\n]+)>", r"⟨\1⟩", text)


def on_files(files: Files, config: Any, **kwargs: Any) -> Files:
    """Add a page, and a file for each picture, for every notebook."""
    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        cells = json.loads(Path(notebook.abs_src_path).read_text(encoding="utf-8"))["cells"]
        stem = notebook.src_uri.removesuffix(".ipynb")
        page, pictures = render(cells, stem.rpartition("/")[2])
        files.append(File.generated(config, f"{stem}.md", content=page))
        for name, picture in pictures.items():
            files.append(File.generated(config, f"{stem.rpartition('/')[0]}/{name}",
                                        content=picture))
    return files


def render(cells: list[dict[str, Any]], name: str) -> tuple[str, dict[str, bytes]]:
    """The Markdown of a notebook's cells with their outputs, and its pictures by file name."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in cells:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                picture = f"{name}-{len(pictures) + 1}.png"
                pictures[picture] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![Figure {len(pictures)}]({picture})")
            elif "text/html" in data:
                table = re.sub(r"\n\s*\n", "\n", "".join(data["text/html"]))
                parts.append(f'<div class="output">{table}</div>')
            else:
                text = "".join(output.get("text") or data["text/plain"])
                parts.append(f"```text\n{text.rstrip()}\n```")
    parts.insert(1, f"This page is a notebook: [download it]({name}.ipynb) and run it in Jupyter.")
    return "\n\n".join(parts) + "\n", pictures


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Lead links to notebooks to their pages; a page of a notebook links to its own file."""
    if page.file.src_uri.startswith("notebooks/"):
        return markdown
    return re.sub(r"(\]\([\w/.-]*notebooks/[\w-]+)\.ipynb\)", r"\1.md)", markdown)


def on_page_content(content: str, **kwargs: Any) -> str:
    """Turn the formulas that arithmatex marks into MathML, and keep the rows of printed tables in
    one line.
    """
    def mathml(match: re.Match[str]) -> str:
        formula = html.unescape(match[2]).strip()
        drawn = convert(formula, display="block" if match[1] == "div" else "inline")
        # Norms as high as their line.
        return drawn.replace("<mo>&#x02016;", '<mo stretchy="false">&#x02016;')

    def rows(match: re.Match[str]) -> str:
        return match[1] + TABLE_ROW.sub(r'<span class="row">\g<0></span>', match[2]) + match[3]

    return PRINTED.sub(rows, ARITHMATEX.sub(mathml, content))
