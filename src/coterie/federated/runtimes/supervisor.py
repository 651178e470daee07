"""A start kit at work: the SuperLink or a SuperNode, watched and started again, with its health.

The server lets in who has a key in `sites`, also while it runs, and forgets whose key is removed. A
site that the server still counts as online, because it was killed a moment ago, waits and tries
again. On request there is an HTTP endpoint with `/healthz`, and `/metrics` in the text format of
Prometheus.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from coterie.base.errors import InvalidInput, require
from coterie.base.storage import private_folder, write_atomically
from coterie.federated.contract import Contract
from coterie.federated.private.ledger import FILE, NodeLedger
from coterie.federated.runtimes.cluster import Link, end, free_port, listens, toml
from coterie.federated.runtimes.keys import days_left
from coterie.federated.runtimes.kits import Kit
from coterie.federated.runtimes.warm import WARM

_AGAIN = 10.0  # seconds between two starts of a SuperNode
_LOOK = 2.0  # seconds between two looks at what runs, and at the keys of sites
_FRESH = 10.0  # seconds for which an answer of Flower, which costs a process, is kept
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
#: Lines about single requests, of which there are several in a second.
_ROUTINE = re.compile(r"uvicorn\.access.*\" 200$")
_LEVEL = re.compile(r"\b(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b[ :]*")


class SiteStatus(NamedTuple):
    """What the server knows of a site.

    Parameters
    ----------
    name : of the site.
    status : "online", "offline", or "registered" if it never came.
    seen : when it was last seen, as Flower writes times; empty for never.
    users : how many it holds in the last run.
    awaited : whether the run waits for it.
    refused : why it takes no part; empty if it does.
    """

    name: str
    status: str
    seen: str
    users: int
    awaited: bool
    refused: str


class Server(Link):
    """The SuperLink of a kit: its sites and runs."""

    def __init__(self, kit: Kit) -> None:
        super().__init__(kit.state)
        self.kit, self._nodes = kit, (-_FRESH, dict[str, dict[str, str]]())
        self.registry = kit.state / "sites.json"

    @property
    def known(self) -> dict[str, dict[str, str]]:
        """Key and number of the node of every site that was let in."""
        return dict(read_json(self.registry))

    def nodes(self, fresh: bool = True) -> dict[str, dict[str, str]]:
        """What Flower says of every node, by its number; if not `fresh`, at most a while ago."""
        when, said = self._nodes
        if fresh or time.monotonic() - when > _FRESH:
            text = self.command("supernode", "list", "local", "--format", "json")
            said = {str(node["node-id"]): node for node in json.loads(text[text.index("{"):])[
                "nodes"] if node["status"] in ("online", "offline", "registered")}
            self._nodes = time.monotonic(), said
        return said

    def let_in(self) -> list[str]:
        """Register whose key is in the kit, and forget the others; what was done."""
        wanted = {file.stem: file.read_text(encoding="utf-8")
                  for file in sorted((self.kit.folder / "sites").glob("*.pub"))}
        there, known, done = self.nodes(), self.known, []
        for name, site in list(known.items()):
            if site["key"] != wanted.get(name) or site["node"] not in there:
                if site["node"] in there:
                    self.command("supernode", "unregister", site["node"], "local")
                    done.append(f"The former key of {name} is not let in any more.")
                del known[name]
        new = [name for name in wanted if name not in known]
        numbers = self.register([self.kit.folder / "sites" / f"{name}.pub" for name in new])
        known |= {name: {"key": wanted[name], "node": number}
                  for name, number in zip(new, numbers, strict=True)}
        write_atomically(self.registry, json.dumps(known).encode())
        return [*done, *(f"{name} may take part." for name in new)]

    def sites(self, fresh: bool = True) -> list[SiteStatus]:
        """What is known of every site."""
        said, nodes = read_json(self.kit.folder / "run" / "status.json"), self.nodes(fresh)
        found = []
        for name, site in self.known.items():
            node = nodes.get(site["node"], {"status": "unknown"})
            online = node["status"] == "online"
            seen = _now() if online else str(node.get("offline-at", ""))
            found.append(SiteStatus(name, node["status"], "" if seen == "N/A" else seen,
                                    int(said.get("users", {}).get(name, 0)),
                                    name in said.get("awaited", ()),
                                    str(said.get("refused", {}).get(name, ""))))
        return found


class Service:
    """Runs a kit until it is told to stop.

    Parameters
    ----------
    kit : of the server, or of a site.
    health : HOST:PORT of the endpoint; none if empty.
    json_logs : whether every line is a JSON object.
    """

    def __init__(self, kit: Kit, health: str = "", json_logs: bool = False) -> None:
        self.kit, self.json_logs = kit, json_logs
        self.link = Server(kit) if kit.serves else Link(kit.state)
        self.trouble = "it is starting"  # why it is not ready; empty if it is
        self.refused = ""
        self.process: subprocess.Popen[bytes] | None = None
        host, _, port = health.rpartition(":")
        require(not health or port.isdigit(), f"health must be HOST:PORT, got {health!r}",
                "Use for example 127.0.0.1:9190")
        self.endpoint = (host or "127.0.0.1", int(port)) if health else None

    # -- the work

    def run(self) -> None:
        """Start, watch, and start again, until SIGTERM or Ctrl-C."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        if not self.kit.serves:
            Contract.of(self.kit.config).require_data(False)
        private_folder(self.kit.state)
        self.link.prepare()
        for text in self.kit.warnings():
            self.say(text, "WARNING")
        with self._endpoint():
            try:
                self._serve() if isinstance(self.link, Server) else self._take_part()
            except KeyboardInterrupt:
                self.say("Stopped.")
            finally:
                if self.process is not None:
                    end([self.process])

    def _serve(self) -> None:
        """The SuperLink, and whom it lets in."""
        link, folder = self.link, self.kit.folder
        assert isinstance(link, Server)
        host, _, port = self.kit.address.rpartition(":")
        require(not listens(int(port)), f"something listens at port {port} already",
                f"Stop it, or set another port in {folder / 'server.toml'}")
        local = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        link.connect(f"{local}:{port}", **{"root-certificates": str(folder / "ca.crt")})
        self._start(["flower-superlink", "--host", host, "--port", port, "--database",
                     str(self.kit.state / "state.db"), "--disable-runtime-dependency-installation",
                     "--enable-supernode-auth", "--ssl-ca-certfile", str(folder / "ca.crt"),
                     "--ssl-certfile", str(folder / "server.pem"),
                     "--ssl-keyfile", str(folder / "server.key")])
        assert self.process is not None
        keys, ready = "", False
        while self.process.poll() is None:
            if ready := ready or listens(int(port)):
                now = repr([(file.name, file.stat().st_mtime_ns)
                            for file in sorted((folder / "sites").glob("*.pub"))])
                if now != keys:  # also the first time
                    for text in link.let_in():
                        self.say(text)
                    keys, self.trouble = now, ""
                    self.say("The server is ready.")
            time.sleep(_LOOK if ready else 0.1)
        raise InvalidInput(f"the SuperLink ended with code {self.process.returncode}",
                           remedy="Its last lines say why")

    def _take_part(self) -> None:
        """A SuperNode, started again whenever it ends."""
        folder = self.kit.folder
        node = self.kit.state / "node.toml"
        write_atomically(node, "".join(f"{json.dumps(key)} = {toml(value)}\n" for key, value
                                       in self.kit.config.items()).encode())
        while True:
            self._start([sys.executable, "-m", WARM, "flower-supernode", "--superlink",
                         self.kit.address, "--port", str(free_port()), "--node-config", str(node),
                         "--root-certificates", str(folder / "ca.crt"),
                         "--auth-supernode-private-key", str(folder / "key")])
            assert self.process is not None
            while self.process.poll() is None and not self.refused:
                time.sleep(0.2)
            end([self.process])
            self.trouble = self.refused or "its SuperNode ended"
            self.say(f"{self.kit.name} takes no part now: {self.trouble}. It tries again in "
                     f"{_AGAIN:g} seconds.", "WARNING")
            time.sleep(_AGAIN)

    def _start(self, words: list[str]) -> None:
        self.refused = ""
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                        stdin=subprocess.DEVNULL, env=self.link.env,
                                        cwd=self.kit.folder, start_new_session=True, umask=0o077)
        threading.Thread(target=self._listen, args=(self.process,), daemon=True).start()

    # -- what it says

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        """Pass on what a process says, and note what it says of itself."""
        assert process.stdout is not None
        with process.stdout as lines:
            for raw in lines:
                line = _COLOURS.sub("", raw.decode(errors="replace")).rstrip()
                level = _LEVEL.search(line[:40])
                text = line if level is None else line[level.end():].strip()
                if text and not _ROUTINE.search(text):
                    self._hear(text, level.group(1) if level else "INFO")

    def _hear(self, text: str, level: str) -> None:
        """One line of a process."""
        self.say(text, level)
        if text.startswith("SuperNode ID:"):
            self.trouble = ""
            self.say(f"{self.kit.name} takes part.")
        if "Exit Code: 305" in text:
            self.refused = ("the server does not let it in, because it counts it as online for up "
                            "to a minute after it was stopped, or because its key was revoked")

    def say(self, text: str, level: str = "INFO") -> None:
        """A line of the log."""
        line = json.dumps({"time": _now(), "level": level, "site": self.kit.name,
                           "message": text}) if self.json_logs else \
            f"{_now()} {level:7} {self.kit.name}: {text}"
        print(line, flush=True)

    @contextlib.contextmanager
    def _endpoint(self) -> Iterator[None]:
        """The HTTP endpoint, as long as the block lasts."""
        if self.endpoint is None:
            yield
            return
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                pages = {"/healthz": service.health, "/metrics": service.metrics}
                code, text = pages.get(self.path, lambda: (404, "not found\n"))()
                self.send_response(code)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format: str, *args: Any) -> None:
                """Scrapes are no news."""

        server = ThreadingHTTPServer(self.endpoint, Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()

    def health(self) -> tuple[int, str]:
        """Whether it works: an HTTP status and a sentence."""
        return (503, f"{self.trouble}\n") if self.trouble else (200, "ok\n")

    def metrics(self) -> tuple[int, str]:
        """Its figures, as Prometheus reads them."""
        figures = {"coterie_up": float(not self.trouble),
                   "coterie_certificate_days": days_left(self.kit.folder / (
                       "server.pem" if self.kit.serves else "ca.crt"))}
        if isinstance(self.link, Server):
            with contextlib.suppress(Exception):  # Flower does not answer: coterie_up says so
                sites = self.link.sites(fresh=False)
                figures |= {f'coterie_sites{{status="{status}"}}': sum(
                    site.status == status for site in sites)
                    for status in ("online", "offline", "registered")}
            figures |= figures_of_run(self.kit.folder / "run")
        else:
            figures |= figures_of_ledger(self.kit)
        return 200, "".join(f"{name} {value:g}\n" for name, value in figures.items())


def figures_of_run(out: Path) -> dict[str, float]:
    """What the last run of a server took."""
    with contextlib.suppress(OSError, ValueError):
        rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
        said = read_json(out / "status.json")
        return {"coterie_rounds_total": len(rounds),
                "coterie_questions_total": sum(line["asked"] for line in rounds),
                "coterie_answers_total": sum(line["answered"] for line in rounds),
                "coterie_refusals_total": len(said.get("refused", ())),
                "coterie_awaited_sites": len(said.get("awaited", ())),
                'coterie_bytes_total{direction="up"}': sum(line["bytes_up"] for line in rounds),
                'coterie_bytes_total{direction="down"}': sum(line["bytes_down"]
                                                             for line in rounds)}
    return {}


def figures_of_ledger(kit: Kit) -> dict[str, float]:
    """What left a site, and what is left of its budget."""
    folder = Path(kit.config["ledger-dir"])
    if not (folder / FILE).is_file():
        return {}
    with NodeLedger(folder) as ledger:
        left, size, refused = ledger.totals()
        figures: dict[str, float] = {"coterie_answers_total": left,
                                     "coterie_refusals_total": refused,
                                     'coterie_bytes_total{direction="up"}': size}
        if "budget-epsilon" in kit.config:
            spent = max(ledger.spending(float(kit.config["budget-delta"])).values(), default=0.0)
            figures["coterie_budget_epsilon_left"] = float(kit.config["budget-epsilon"]) - spent
    return figures


def read_json(file: Path) -> Mapping[str, Any]:
    """A JSON object; an empty one where there is no such file."""
    with contextlib.suppress(OSError, ValueError):
        said = json.loads(file.read_text(encoding="utf-8"))
        return said if isinstance(said, dict) else {}
    return {}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(" ", "seconds")
