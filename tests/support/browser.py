"""A page in headless Chromium, driven by Playwright."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NASTY = "<script>alert(1)</script>"  # a name of a user or a column that must stay text


class Tab:
    """One page, opened from a file with the network off."""

    def __init__(self, browser: Browser, file: Path, *, width: int = 1280, dark: bool = False,
                 still: bool = False) -> None:
        self.file = file
        self.context = browser.new_context(
            offline=True, viewport={"width": width, "height": 900}, is_mobile=width < 600,
            color_scheme="dark" if dark else "light", reduced_motion="reduce" if still else "no-preference")
        self.page = self.context.new_page()
        self.page.set_default_timeout(20_000)
        self._problems: list[tuple[str, str]] = []
        self._watch()
        self.seconds = self.load()

    def _watch(self) -> None:
        """Keep everything that should not happen: errors, warnings, dialogs, and requests that leave the machine."""
        keep = self._problems.append
        self.page.on("pageerror", lambda error: keep(("pageerror", error.message)))
        self.page.on("console", lambda line: keep(("console", line.text))
                     if line.type in ("error", "warning", "assert") else None)
        self.page.on("requestfailed", lambda request: keep(("requestfailed", request.url)))
        self.page.on("request", lambda request: keep(("request", request.url))
                     if not request.url.startswith(("file:", "data:", "blob:")) else None)
        self.page.on("dialog", lambda dialog: (keep(("dialog", dialog.message)), dialog.dismiss()))

    def load(self) -> float:
        start = time.monotonic()
        self.page.goto(self.file.as_uri())
        return time.monotonic() - start

    def size(self, width: int, height: int = 900) -> None:
        self.page.set_viewport_size({"width": width, "height": height})

    def value(self, code: str) -> Any:
        return self.page.evaluate(code)

    def text(self, selector: str) -> str | None:
        return self.page.text_content(selector)

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_text_contents()

    def numbers(self, selector: str, name: str) -> list[float]:
        """What elements say of themselves under that name."""
        return self.page.locator(selector).evaluate_all(f"(nodes) => nodes.map((node) => Number(node.dataset.{name}))")

    def click(self, selector: str) -> None:
        """A real press of the mouse in the middle of the first that matches."""
        self.page.locator(selector).first.click()

    def focus(self, selector: str) -> None:
        self.page.focus(selector)

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def type(self, text: str) -> None:
        self.page.keyboard.insert_text(text)

    def download(self, name: str) -> tuple[str, bytes]:
        """Press a download button; the file's name and what is in it."""
        with self.page.expect_download() as download:
            self.click(f'[data-download="{name}"]')
        return download.value.suggested_filename, Path(download.value.path()).read_bytes()

    def pdf(self) -> bytes:
        return self.page.pdf(print_background=True)

    def problems(self) -> list[tuple[str, str]]:
        """Everything that should not have happened so far, as (kind of event, text)."""
        self.page.wait_for_timeout(20)
        return list(self._problems)

    def close(self) -> None:
        self.context.close()
