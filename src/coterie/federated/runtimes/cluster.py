"""SuperLink and SuperNodes on this machine: a complete Flower deployment, or its simulation,
started and stopped.

Everything is bound to loopback, secured with keys made for the occasion, and lives in one folder.
Whatever is started here is stopped here, by its process id, also when something fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from coterie.base.errors import Incompatible, MissingExtra
from coterie.base.storage import open_private, private_folder, write_atomically
from coterie.federated.runtimes.keys import make_certificates, make_node_keys
from coterie.federated.runtimes.warm import WARM, environment

try:
    import psutil
    import tomli_w
except ImportError as error:  # pragma: no cover - depends on what is installed
    raise MissingExtra("psutil and tomli-w", "flower", "Starting Flower") from error

#: What keeps Flower to itself: no telemetry, no look for updates, nothing installed at run time.
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
         "RAY_USAGE_STATS_ENABLED": "0",
         "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
         # Beside other work, nodes that give way to everything hardly get on.
         "RAY_worker_niceness": "0"}
# Set by notebooks and by some continuous integration.
_COLOURS = ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE")
# Seconds without news after which Flower is asked how the run is: that costs a process.
_QUIET_FOR = 30.0
#: Waits until the process that started the cluster has ended, even if it was killed, and ends what
#: carries its mark.
_WATCH = '''
import psutil, sys
sys.stdin.buffer.read()
for signal in ("terminate", "kill"):
    left = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("COTERIE_CLUSTER") == sys.argv[1]:
                getattr(process, signal)()
                left.append(process)
        except psutil.Error:
            pass
    psutil.wait_procs(left, timeout=3.0)
'''


class Link:
    """Commands to a SuperLink, and the runs that it is given.

    Parameters
    ----------
    folder : for Flower's own files, logs and the app.
    extra : of coterie, that must be installed.
    """

    def __init__(self, folder: str | os.PathLike[str], extra: str = "flower") -> None:
        self.folder, self.extra, self.run = Path(folder).resolve(), extra, ""
        # What Flower's commands print is read, so it must not be coloured.
        kept = {name: text for name, text in os.environ.items() if name not in _COLOURS}
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        self.env = {**kept, **QUIET, "FLWR_HOME": str(self.folder / "flwr"), "OMP_NUM_THREADS": "1",
                    "PATH": programs}
        self.virtual = 0

    def prepare(self) -> None:
        """Make the folder, and the programs that Flower finds first."""
        for name in ("flwr", "flower-superlink", "flower-supernode"):
            if shutil.which(name, path=self.env["PATH"]) is None:
                raise MissingExtra("flwr", self.extra, "Running on Flower")
        private_folder(self.folder)
        private_folder(self.folder / "flwr")
        self.env = environment(self.folder / "bin", self.env)

    def connect(self, address: str, **trust: Any) -> None:
        """Say where the SuperLink is."""
        (self.folder / "flwr" / "config.toml").write_text(tomli_w.dumps({"superlink": {
            "default": "local", "local": {"address": address, **trust}}}))

    def register(self, keys: Sequence[Path]) -> list[str]:
        """Let the owners of these public keys in; the numbers of their nodes."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # each is a process of a second
            said = list(pool.map(lambda key: self.command(
                "supernode", "register", str(key), "local", "--format", "json"), keys))
        return [str(json.loads(text[text.index("{"):])["node-id"]) for text in said]

    def check_processes(self) -> None:
        """Refuse to go on where a process that was started here has ended."""

    def tail(self, name: str, lines: int = 8) -> str:
        """The end of a process's log."""
        file = self.folder / f"{name}.log"
        return (" | ".join(file.read_text(errors="replace").splitlines()[-lines:]) if file.exists()
                else "")

    def command(self, *words: str, check: bool = True) -> str:
        """Run `flwr ...` against this SuperLink."""
        done = subprocess.run(["flwr", *words], env=self.env, cwd=self.folder, capture_output=True,
                              text=True, timeout=300, check=False)
        if check and done.returncode:
            raise Incompatible(f"`flwr {' '.join(words)}` failed: "
                               f"{(done.stdout + done.stderr).strip()[-800:]}")
        return done.stdout

    # -- a run

    def submit(self, config: Mapping[str, Any]) -> None:
        """Submit the app and its configuration to the SuperLink."""
        self.submit_app(write_app(self.folder / "app", config))

    def submit_app(self, app: Path) -> None:
        """Submit the Flower app in this folder; for `follow` it writes its files as coterie's own
        app does.
        """
        words = ["run", str(app), "local"]
        if self.virtual:
            words += ["--federation-config", f"num-supernodes={self.virtual} "
                      "client-resources-num-cpus=1"]
        text = self.command(*words, "--format", "json")
        answer = json.loads(text[text.index("{"):])
        if "run-id" not in answer:
            raise Incompatible("Flower refuses the app: "
                               f"{str(answer.get('error-message', text)).strip()}")
        self.run = str(answer["run-id"])

    def ended(self) -> str | None:
        """How Flower says the run ended: "completed", "failed", ...; None while it runs."""
        text = self.command("list", "--run-id", self.run, "local", "--format", "json", check=False)
        try:
            status = str(json.loads(text[text.index("{"):])["runs"][0]["status"])
        except (ValueError, KeyError, IndexError):
            return None
        return status.partition(":")[2] if status.startswith("finished") else None

    def follow(self, out: Path, timeout: float, result: str = "run.json") -> Iterator[
        dict[str, Any]]:
        """The rounds of a run as they happen, until it has written its result, the file of this
        name.

        Raises
        ------
        Incompatible : the run fails, a process ends, or the time is over.
        """
        seen, limit, look = 0, time.monotonic() + timeout, time.monotonic() + _QUIET_FOR
        while True:
            done = (out / result).exists()
            lines = ((out / "rounds.jsonl").read_text().splitlines()
                     if (out / "rounds.jsonl").exists() else [])
            for line in lines[seen:]:
                # a line still being written is read next time.
                with contextlib.suppress(ValueError):
                    one = json.loads(line)
                    seen, look = seen + 1, time.monotonic() + _QUIET_FOR
                    yield one
            if done:
                return
            if (out / "error.txt").exists():
                raise Incompatible((out / "error.txt").read_text())
            self.check_processes()
            if time.monotonic() > look:  # nothing new for long: has it died?
                how = self.ended()
                if (how is not None and not (out / result).exists()
                    and not (out / "error.txt").exists()):
                    text = self.command("log", self.run, "local", "--show", check=False)[-1500:]
                    raise Incompatible(f"The run ended ({how}) without a result. Its last log "
                                       f"lines: {text}")
                look = time.monotonic() + _QUIET_FOR
            if time.monotonic() > limit:
                raise Incompatible(f"The run did not end within {timeout:g} s. The SuperLink says: "
                                   f"{self.tail('superlink')}")
            time.sleep(0.1)


class Cluster(Link):
    """A SuperLink, and SuperNodes with the given configurations; or virtual ones, by the simulation
    engine.

    Parameters
    ----------
    folder : for keys, logs and Flower's own files; created if needed.
    nodes : the node configuration of every SuperNode.
    virtual : number of nodes of the simulation engine, instead of SuperNodes.
    secure : whether to use TLS and registered keys.

    Example
    -------
    >>> out = Path("run").resolve()
    >>> with Cluster("cluster", virtual=5) as cluster:
    ...     cluster.submit(complete({"data": "dataset", "dataset": "ellipses", "split": True,
    ...                              "out": str(out)}))
    ...     rounds = list(cluster.follow(out, timeout=600))
    """

    def __init__(self, folder: str | os.PathLike[str], nodes: Sequence[Mapping[str, Any]] = (), *,
                 virtual: int = 0, secure: bool = True) -> None:
        super().__init__(folder, "flower-sim" if virtual else "flower")
        self.configs, self.virtual, self.secure = [dict(node) for node in nodes], virtual, \
            secure and not virtual
        self.env["COTERIE_CLUSTER"] = uuid.uuid4().hex
        self.watch: subprocess.Popen[bytes] | None = None
        self.port = 0
        self.link: subprocess.Popen[bytes] | None = None
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        self.keys: list[Path] = []

    # -- start and stop

    def __enter__(self) -> Self:
        self.prepare()
        try:
            self.watch = subprocess.Popen([sys.executable, "-I", "-c", _WATCH,
                                           self.env["COTERIE_CLUSTER"]],
                                          stdin=subprocess.PIPE, start_new_session=True)
            self.port = free_port()
            if self.secure:
                certificates = make_certificates(self.folder / "keys")
                self.keys = [certificates / f"node-{k}" for k in range(len(self.configs))]
                make_node_keys(certificates, [key.name for key in self.keys if not key.exists()])
                trust: dict[str, Any] = {"root-certificates": str(certificates / "ca.crt")}
            else:
                trust = {"insecure": True}
            self.connect(f"127.0.0.1:{self.port}", **trust)
            self.start_link()
            self.register([Path(f"{key}.pub") for key in self.keys])
            for k in range(len(self.configs)):
                self.start_node(k)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """End every process started here, and those they started."""
        end([*self.nodes.values(), *([self.link] if self.link is not None else [])])
        self.nodes, self.link = {}, None
        if self.watch is not None and self.watch.stdin is not None:
            self.watch.stdin.close()
            self.watch.wait(10.0)
            self.watch = None

    def start_link(self) -> None:
        options = ["--host", "127.0.0.1", "--port", str(self.port),
                   "--disable-runtime-dependency-installation"]
        options += (["--simulation"] if self.virtual
                    else ["--database", str(self.folder / "superlink.db")])
        if self.secure:
            keys = self.folder / "keys"
            options += ["--ssl-ca-certfile", str(keys / "ca.crt"), "--ssl-certfile",
                        str(keys / "server.pem"), "--ssl-keyfile", str(keys / "server.key"),
                        "--enable-supernode-auth"]
        else:
            options += ["--insecure"]
        self.link = self._start("superlink", ["flower-superlink", *options])
        wait(lambda: listens(self.port), 60, lambda: self._alive(self.link, "superlink"))

    def start_node(self, number: int) -> None:
        """Start a SuperNode, or start one again that has ended."""
        config = self.folder / f"node-{number}.toml"
        write_atomically(config, tomli_w.dumps(self.configs[number]).encode())
        options = ["--superlink", f"127.0.0.1:{self.port}", "--port", str(free_port()),
                   "--node-config", str(config)]
        if self.secure:
            options += ["--root-certificates", str(self.folder / "keys" / "ca.crt"),
                        "--auth-supernode-private-key", str(self.keys[number])]
        else:
            options += ["--insecure"]
        self.nodes[number] = self._start(f"node-{number}", [sys.executable, "-m", WARM,
                                                            "flower-supernode", *options])

    def kill_node(self, number: int) -> None:
        """End a node at once, as a power failure does."""
        end([self.nodes.pop(number)], at_once=True)

    def restart_node(self, number: int, seconds: float = 120.0) -> None:
        """Start a node again; for up to a minute a SuperLink refuses a key it believes online, so
        keep trying.
        """
        file, limit = self.folder / f"node-{number}.log", time.monotonic() + seconds
        while time.monotonic() < limit:
            before = file.stat().st_size if file.exists() else 0
            self.start_node(number)
            while time.monotonic() < limit:
                said = file.read_bytes()[before:]
                if b"SuperNode ID:" in said:
                    return
                if b"Exit Code:" in said or self.nodes[number].poll() is not None:
                    break
                time.sleep(0.2)
            end([self.nodes.pop(number)], at_once=True)  # one that was refused does not always end
            time.sleep(5.0)
        raise Incompatible(f"Node {number} did not come back within {seconds:g} s: "
                           f"{self.tail(f'node-{number}')}")

    def kill_link(self) -> None:
        """End the SuperLink at once, as a power failure does; the nodes stay, and wait for it."""
        if self.link is not None:
            end([self.link], at_once=True)
        self.link = None

    def _start(self, name: str, command: list[str]) -> subprocess.Popen[bytes]:
        with open_private(self.folder / f"{name}.log", "ab") as file:
            return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT,
                                    stdin=subprocess.DEVNULL, env=self.env, cwd=self.folder,
                                    start_new_session=True, umask=0o077)

    def _alive(self, process: subprocess.Popen[bytes] | None, name: str) -> None:
        if process is not None and process.poll() is not None:
            raise Incompatible(f"{name} ended with code {process.returncode}. Its last log lines: "
                               f"{self.tail(name)}")

    def check_processes(self) -> None:
        for name, process in (("superlink", self.link),
                              *((f"node-{k}", node) for k, node in self.nodes.items())):
            self._alive(process, name)


def write_app(folder: Path, config: Mapping[str, Any], *, name: str = "coterie-app",
              about: str = "Personalised federated learning that finds its own groups",
              server: str = "coterie.federated.flower:server",
              client: str = "coterie.federated.flower:client") -> Path:
    """Write a Flower app with this run configuration; the code comes with coterie, unless other
    apps are named.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(tomli_w.dumps(
        {"build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
         "project": {"name": name, "version": "1.0.0",
                     "description": about, "license": "Apache-2.0", "dependencies": []},
         "tool": {"hatch": {"build": {"targets": {"wheel": {"packages": ["."]}}}}, "flwr": {"app": {
             "publisher": "coterie", "components": {"serverapp": server, "clientapp": client},
             "config": dict(config)}}}}), encoding="utf-8")
    return folder


def toml(value: Any) -> str:
    """A value as TOML writes it."""
    return tomli_w.dumps({"value": value}).partition(" = ")[2].rstrip("\n")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait(ready: Callable[[], bool], seconds: float, check: Callable[[], None]) -> None:
    end_at = time.monotonic() + seconds
    while not ready():
        check()
        if time.monotonic() > end_at:
            raise Incompatible(f"Nothing was ready within {seconds:g} s.")
        time.sleep(0.1)


def end(processes: Sequence[subprocess.Popen[bytes]], at_once: bool = False) -> None:
    """End processes and all they started, some of which Flower and Ray put into sessions of their
    own.
    """
    known = family(process.pid for process in processes)
    if not at_once:
        for process in processes:
            process.terminate()
        _wait(processes, known, 3.0)
    limit = time.monotonic() + 5.0
    while (left := alive(known)) and time.monotonic() < limit:
        known |= family(process.pid for process in left)
        for one in alive(known):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        _wait(processes, known, 0.5)
    for process in processes:
        process.wait(5.0)


def _wait(processes: Sequence[subprocess.Popen[bytes]], known: set[psutil.Process],
          seconds: float) -> None:
    """Wait until all have ended, at most so many seconds."""
    limit = time.monotonic() + seconds
    while any(process.poll() is None for process in processes) or alive(known):
        if time.monotonic() > limit:
            return
        time.sleep(0.05)


def family(pids: Iterable[int]) -> set[psutil.Process]:
    """These processes and their descendants, those that have ended left out."""
    members: set[psutil.Process] = set()
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            members |= {process, *process.children(recursive=True)}
    return members


def alive(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended; a process that got the number of an ended one is not mistaken for
    it.
    """
    def runs(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return False

    return [process for process in processes if runs(process)]
