"""Headless Chromium for the tests of pages."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NASTY = "<script>alert(1)</script>"  # a name of a user or a column that must stay text


class Browser:
    """Headless Chromium over the DevTools protocol, spoken through two pipes: no port, no driver, no network."""

    def __init__(self, program: str, folder: Path) -> None:
        pipes = [os.pipe(), os.pipe()]
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (pipes[0][0], pipes[1][1])]
        # The browser reads commands from descriptor 3 and answers on 4.
        move = "import os, sys; os.dup2({}, 3); os.dup2({}, 4); os.execvp(sys.argv[1], sys.argv[1:])".format(*theirs)
        options = ["--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run",
                   "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update",
                   "--disable-sync", "--window-size=1280,900", f"--user-data-dir={folder / 'profile'}"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", move, program, *options], pass_fds=theirs, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for end in (*theirs, pipes[0][0], pipes[1][1]):
            os.close(end)
        self.to, self.back = pipes[0][1], pipes[1][0]
        self.numbers, self.rest, self.events = itertools.count(1), b"", []
        self.downloads = folder / "downloads"

    def __enter__(self) -> Browser:
        try:
            self.call("Browser.setDownloadBehavior", behavior="allowAndName", downloadPath=str(self.downloads),
                      eventsEnabled=True)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(AssertionError, OSError, subprocess.TimeoutExpired):
            self.call("Browser.close")
            self.process.wait(5)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # the group it leads, which is only its own
        self.process.wait()
        os.close(self.to)
        os.close(self.back)

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def read(self, seconds: float = 30.0) -> dict[str, Any]:
        """The next message; events are kept as well."""
        end = time.monotonic() + seconds
        while b"\0" not in self.rest:
            assert select.select([self.back], [], [], max(0.0, end - time.monotonic()))[0], "the browser says nothing"
            piece = os.read(self.back, 1 << 20)
            assert piece, "the browser is gone"
            self.rest += piece
        line, _, self.rest = self.rest.partition(b"\0")
        message = json.loads(line)
        if "method" in message:
            self.events.append(message)
        return message

    def wait(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The first event of that kind, come or to come, and no longer kept."""
        while True:
            for k, event in enumerate(self.events):
                if event["method"] == method and event.get("sessionId") == session and \
                        params.items() <= event["params"].items():
                    return self.events.pop(k)["params"]
            self.read()


class Tab:
    """One page, opened from a file with the network off."""

    def __init__(self, browser: Browser, file: Path, *, width: int = 1280, dark: bool = False,
                 still: bool = False) -> None:
        self.browser, self.file = browser, file
        self.target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = browser.call("Target.attachToTarget", targetId=self.target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
        self.size(width)
        self.call("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"}])
        self.seconds = self.load()

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **params)

    def load(self) -> float:
        start = time.monotonic()
        self.call("Page.navigate", url=self.file.as_uri())
        self.browser.wait("Page.loadEventFired", self.session)
        return time.monotonic() - start

    def size(self, width: int, height: int = 900) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                  mobile=width < 600)

    def value(self, code: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        return self.value(f"document.querySelector({json.dumps(selector)}).textContent")

    def texts(self, selector: str) -> list[str]:
        return self.value(f"[...document.querySelectorAll({json.dumps(selector)})].map((node) => node.textContent)")

    def numbers(self, selector: str, name: str) -> list[float]:
        """What elements say of themselves under that name."""
        every = f"[...document.querySelectorAll({json.dumps(selector)})]"
        return self.value(f"{every}.map((node) => Number(node.dataset.{name}))")

    def click(self, selector: str) -> None:
        """A real press of the mouse in the middle of what is there."""
        where = self.value(f"""(() => {{
            const node = document.querySelector({json.dumps(selector)});
            node.scrollIntoView({{block: "center", behavior: "instant"}});
            const box = node.getBoundingClientRect();
            return {{x: box.x + box.width / 2, y: box.y + box.height / 2}};
        }})()""")
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="none" if kind == "mouseMoved" else "left",
                      clickCount=int(kind != "mouseMoved"), **where)

    def focus(self, selector: str) -> None:
        self.value(f"document.querySelector({json.dumps(selector)}).focus()")

    def press(self, *keys: str) -> None:
        codes = {"ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "Enter": 13, "Tab": 9, "Escape": 27}
        for key in keys:
            more = {"text": "\r"} if key == "Enter" else {}
            for kind in ("keyDown", "keyUp"):
                self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key],
                          **more)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def download(self, name: str) -> tuple[str, bytes]:
        """Press a download button; the file's name and what is in it."""
        self.click(f'[data-download="{name}"]')
        begun = self.browser.wait("Browser.downloadWillBegin")
        self.browser.wait("Browser.downloadProgress", guid=begun["guid"], state="completed")
        return begun["suggestedFilename"], (self.browser.downloads / begun["guid"]).read_bytes()

    def picture(self, *, whole: bool = True) -> bytes:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(shot["data"])

    def problems(self) -> list[Any]:
        """Everything that should not have happened: errors, warnings, dialogs, and requests that leave the machine."""
        self.value("new Promise((done) => setTimeout(done, 20))")
        found = []
        for event in (e for e in self.browser.events if e.get("sessionId") == self.session):
            method, params = event["method"], event["params"]
            url = params.get("request", {}).get("url", "")
            if (method in ("Runtime.exceptionThrown", "Page.javascriptDialogOpening", "Network.loadingFailed")
                    or (method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"))
                    or (method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"))
                    or (method == "Network.requestWillBeSent" and not url.startswith(("file:", "data:", "blob:")))):
                found.append((method, params))
        return found

    def close(self) -> None:
        self.browser.call("Target.closeTarget", targetId=self.target)
        self.browser.events.clear()
