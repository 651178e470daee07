"""Draw docs/images/report.png, the picture of the report: the top of the page, and beside it some
of its sections.

    python docs/picture.py run/report.html      # the run of the tutorial, docs/table.md
"""

from __future__ import annotations

import argparse
import io
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

OUT = Path(__file__).parent / "images" / "report.png"
SECTIONS = ("#path", ".pair")  # beside the top, from above
# Of a column in pixels, and the width of the picture.
WIDTH, HEIGHT, GAP, SHOWN = 1010, 1310, 18, 1500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, help="report.html of a run")
    page = parser.parse_args().page.resolve()
    program = shutil.which("chromium")
    with sync_playwright() as playwright, \
        playwright.chromium.launch(executable_path=program) as browser:
        tab = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light",
                               reduced_motion="reduce")
        tab.goto(page.as_uri())
        top = Image.open(io.BytesIO(tab.screenshot()))
        sections = [Image.open(io.BytesIO(tab.locator(name).first.screenshot()))
                    for name in SECTIONS]
    picture = Image.new("RGB", (2 * WIDTH, HEIGHT), top.getpixel((0, 0)))
    picture.paste(top, (0, 0))
    y = GAP
    for section in sections:
        picture.paste(section, (WIDTH + (WIDTH - section.width) // 2, y))
        y += section.height + GAP
    picture.resize((SHOWN, HEIGHT * SHOWN // (2 * WIDTH)), Image.Resampling.LANCZOS).save(OUT,
        optimize=True)


if __name__ == "__main__":
    main()
