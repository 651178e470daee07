"""Start kits: what is made for the server and the sites, renewed and revoked, and how it is watched."""

from __future__ import annotations

import datetime
import json
import re
import shutil
import stat
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from support.grid import Nodes, someone  # noqa: F401  # a fixture of all tests

import coterie as ct
from coterie.base.errors import CoterieError, Incompatible, InvalidInput, Refused
from coterie.datasets import clustered
from coterie.federated import entry, sources
from coterie.federated.node import Node
from coterie.federated.private.ledger import LoggedAnswer, NodeLedger
from coterie.federated.settings import Deployment, complete, for_nodes

kits = pytest.importorskip("coterie.federated.runtimes.kits", reason="the extra flower is not installed",
                           exc_type=ImportError)
from coterie.federated.runtimes import keys, supervisor, warm  # noqa: E402  # needs the extra

pytestmark = pytest.mark.flower
SITES = """\
server = "fl.example.org"
port = 9093
[node]
data = "csv"
user = "ward"
target = "days"
[sites]
altona.path = "rows.csv"
barmbek.path = "rows.csv"
barmbek.args.unit = "east"
"""


@pytest.fixture
def made(tmp_path) -> Path:
    """Kits of two sites."""
    (tmp_path / "sites.toml").write_text(SITES)
    kits.provision(tmp_path / "sites.toml", tmp_path / "kits")
    return tmp_path / "kits"


def again(made: Path, text: str = SITES, **options: Any) -> list[str]:
    (made.parent / "sites.toml").write_text(text)
    return list(kits.provision(made.parent / "sites.toml", made, **options))


def rows(folder: Path, name: str = "rows.csv") -> Path:
    lines = [f"north {k % 3},{k % 7},{k % 7 + 0.37 * (k % 11):.2f}" for k in range(90)]
    (folder / name).write_text("\n".join(["ward,age,days", *lines]))
    return folder / name


def test_a_kit_has_all_that_a_site_needs(made):
    site, server = kits.read_kit(made / "barmbek" / "site.toml"), kits.read_kit(made / "server")
    assert (site.name, site.address, site.serves) == ("barmbek", "fl.example.org:9093", False)
    assert site.config == {"data": "csv", "user": "ward", "target": "days", "args.unit": "east",
                           "path": str(made / "barmbek" / "rows.csv"), "ledger-dir": str(made / "barmbek" / "ledger")}
    assert (server.serves, server.address, server.run) == (True, "0.0.0.0:9093", {"wait": 300.0})
    for private in (made / "barmbek" / "key", made / "server" / "server.key", made / "authority" / "ca.key"):
        assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert sorted(file.name for file in (made / "server" / "sites").iterdir()) == ["altona.pub", "barmbek.pub"]
    assert not (made / "server" / "ca.key").exists()
    assert {(made / name / "ca.crt").read_bytes() for name in ("server", "altona", "authority")} == {
        (made / "altona" / "ca.crt").read_bytes()}


def test_the_certificate_is_signed_and_for_the_names(made):
    from cryptography import x509

    trusted, own = (x509.load_pem_x509_certificate((made / "server" / name).read_bytes())
                    for name in ("ca.crt", "server.pem"))
    own.verify_directly_issued_by(trusted)
    with pytest.raises(ValueError, match=r"."):
        trusted.verify_directly_issued_by(own)  # the other way round it is not
    assert keys.is_for(made / "server" / "server.pem", ["fl.example.org", "localhost", "127.0.0.1"])
    assert not keys.is_for(made / "server" / "server.pem", ["fl.example.org"])
    for name in ("authority", "subject"):  # newer versions of Python insist on both
        assert name in str([one.oid._name for one in own.extensions]).lower()


def test_the_same_list_changes_nothing_and_owners_keep_their_changes(made):
    before = {file: file.read_bytes() for file in made.rglob("*") if file.is_file()}
    assert again(made) == []
    assert {file: file.read_bytes() for file in made.rglob("*") if file.is_file()} == before
    (made / "altona" / "site.toml").write_text('[server]\naddress = "x:1"\n[node]\ndata = "csv"\npath = "/else.csv"\n')
    again(made)
    assert kits.read_kit(made / "altona").config["path"] == "/else.csv"


def test_sites_come_and_are_revoked_and_keys_renewed(made):
    first = (made / "server" / "sites" / "altona.pub").read_text()
    assert again(made, SITES + 'climstadt.path = "rows.csv"\n') == ["climstadt: a key."]
    said = again(made, SITES.replace("barmbek.path", "# ").replace("barmbek.args", "# "))
    assert [sentence[:17] for sentence in said] == ["barmbek: revoked;", "climstadt: revoke"]
    assert [file.stem for file in (made / "server" / "sites").iterdir()] == ["altona"]
    assert (made / "server" / "sites" / "altona.pub").read_text() == first
    assert again(made, renew=["altona"])[0] == "altona: a new key."
    assert (made / "server" / "sites" / "altona.pub").read_text() != first


def test_an_owner_may_send_a_public_key_instead(made):
    (made / "server" / "sites" / "own.pub").write_text((made / "server" / "sites" / "altona.pub").read_text())
    assert again(made, SITES + 'own.path = "rows.csv"\n') == []
    assert not (made / "own" / "key").exists()  # the private one stays with its owner
    assert (made / "own" / "site.toml").exists()


def test_certificates_that_end_soon_are_announced_and_renewed(made):
    assert kits.read_kit(made / "server").warnings() == []
    again(made, days=365, renew=["server"])
    assert 364 < keys.days_left(made / "server" / "server.pem") < 365
    again(made, days=29, renew=["server"])
    (said,) = kits.read_kit(made / "server").warnings()
    assert re.search(r"server.pem ends in 29 days. Run `coterie federate provision` again", said)
    assert again(made) == ["server: a certificate for fl.example.org, valid for 365 days."]  # without being asked
    assert kits.read_kit(made / "server").warnings() == []
    before = (made / "altona" / "ca.crt").read_bytes()
    again(made, renew=["authority"])
    assert (made / "altona" / "ca.crt").read_bytes() != before
    from cryptography import x509

    x509.load_pem_x509_certificate((made / "server" / "server.pem").read_bytes()).verify_directly_issued_by(
        x509.load_pem_x509_certificate((made / "altona" / "ca.crt").read_bytes()))  # the key is the same


@pytest.mark.parametrize(("text", "options", "words"), [
    (SITES.replace("[node]", "[nodes]"), {}, "nodes.*Settings are server, port, node and sites"),
    (SITES.replace('"fl.example.org"', "[]"), {}, 'does not name the server. Give server = "fl.example.org"'),
    (SITES.replace("altona.path", "altona.pth"), {}, "'pth', which is no setting.*path"),
    (SITES.replace("altona", '"../altona"'), {}, "cannot be the name of a site"),
    (SITES, {"renew": ["altoona"]}, "no site .*altoona.* to renew. Sites: altona, barmbek"),
    (SITES, {"days": 0, "renew": ["server"]}, "days must be between 1 and 3650, got 0"),
    ("server = ", {}, "cannot be read"),
])
def test_a_list_that_cannot_be_used_is_refused(made, text, options, words):
    before = (made / "server" / "server.pem").read_bytes()
    with pytest.raises(InvalidInput, match=words):
        again(made, text, **options)
    assert (made / "server" / "server.pem").read_bytes() == before


def test_a_folder_that_is_no_kit_and_settings_that_do_not_exist(tmp_path):
    with pytest.raises(InvalidInput, match=r"is no start kit.*coterie federate provision"):
        kits.read_kit(tmp_path)
    assert kits.configuration(["n-users=4", "wait=3", "out=a b", "split=true"]) == {
        "n-users": 4, "wait": 3.0, "out": "a b", "split": True}
    with pytest.raises(InvalidInput, match="'n-user=4' is no setting of a run"):
        kits.configuration(["n-user=4"])


# For supervisors


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_units_are_valid(made, tmp_path):
    for kit, name in ((made / "server", "server"), (made / "altona", "altona")):
        unit = (kit / f"coterie-{name}.service").read_text()
        program = str(Path(sys.executable).with_name("coterie"))
        good = unit.replace("/opt/coterie/bin/coterie", program).replace("User=coterie", "User=daemon")
        for text, valid in ((good, True), (good.replace("Restart=always", "Restrat=always"), False)):
            (tmp_path / "coterie.service").write_text(text)
            done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(tmp_path / "coterie.service")],
                                  capture_output=True, text=True, timeout=60)
            own = [line for line in done.stderr.splitlines() if "coterie.service" in line]
            assert (done.returncode == 0 and not own) == valid, done.stderr


COMPOSE = shutil.which("docker-compose")


@pytest.mark.skipif(COMPOSE is None, reason="docker-compose is not installed")
def test_compose_files_are_valid(made):
    for name in ("server", "altona"):
        file = made / name / "compose.yaml"
        for text, valid in ((file.read_text(), True), (file.read_text().replace("volumes:", "volume:"), False)):
            file.write_text(text)
            done = subprocess.run([str(COMPOSE), "-f", str(file), "config"], capture_output=True, text=True, timeout=60)
            assert (done.returncode == 0) == valid, done.stderr
            assert not valid or ("9093" in done.stdout) == (name == "server")


def fetched(port: int, page: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{page}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_health_and_figures_of_a_site(made):
    text = (made / "altona" / "site.toml").read_text()
    (made / "altona" / "site.toml").write_text(text + "budget-epsilon = 4.0\nbudget-delta = 1e-5\n")
    kit, port = kits.read_kit(made / "altona"), supervisor.free_port()
    with NodeLedger(kit.config["ledger-dir"], budget=2.0) as ledger:
        ledger.log([LoggedAnswer("run", 0, "w", "facts", 5, 70, "q"), LoggedAnswer("run", 1, "w", "facts", 5, 30, "r"),
                    LoggedAnswer("run", 1, "w", "local", 0, 0, "", "not allowed")])
        ledger.release("w", "summary", 0.5, lambda: b"x")
        spent = ledger.spending(1e-5)["w"]
    service = supervisor.Service(kit, f"127.0.0.1:{port}")
    with service._endpoint():
        assert fetched(port, "healthz") == (503, "it is starting\n")
        service.trouble = ""
        assert fetched(port, "healthz") == (200, "ok\n")
        assert fetched(port, "other")[0] == 404
        code, page = fetched(port, "metrics")
    figures = dict(line.rsplit(" ", 1) for line in page.splitlines())
    assert code == 200
    assert figures["coterie_answers_total"] == "2"
    assert figures["coterie_refusals_total"] == "1"
    assert figures['coterie_bytes_total{direction="up"}'] == "100"
    assert float(figures["coterie_budget_epsilon_left"]) == pytest.approx(4.0 - spent, rel=1e-4)
    assert 0 < spent < 4
    with pytest.raises(InvalidInput, match="health must be HOST:PORT, got 'here'"):
        supervisor.Service(kit, "here")


def test_figures_of_a_run(tmp_path):
    assert supervisor.figures_of_run(tmp_path) == {}
    lines = [{"asked": 3, "answered": 2, "bytes_up": 10, "bytes_down": 4}] * 2
    (tmp_path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "status.json").write_text(json.dumps({"refused": {"a": "why"}, "awaited": ["b", "c"]}))
    assert list(supervisor.figures_of_run(tmp_path).values()) == [2, 6, 4, 1, 2, 20, 8]


def test_logs_are_json_on_request(made, capsys):
    kit = kits.read_kit(made / "altona")
    words = [sys.executable, "-c", "print('\\x1b[92mINFO \\x1b[0m:      SuperNode ID: 7'); print(); print('plain')"]
    for json_logs in (True, False):
        service = supervisor.Service(kit, json_logs=json_logs)
        service._start(words)
        service.process.wait(20)
        end = time.monotonic() + 10
        while time.monotonic() < end and not (said := capsys.readouterr().out).count("plain"):
            time.sleep(0.05)
        assert service.trouble == ""  # it has seen that the node is in
        lines = said.splitlines()
        if json_logs:
            assert [json.loads(line)["message"] for line in lines[:2]] == ["SuperNode ID: 7", "altona takes part."]
            assert {json.loads(line)["site"] for line in lines} == {"altona"}
            datetime.datetime.fromisoformat(json.loads(lines[0])["time"])
        else:
            assert lines[0].endswith("INFO    altona: SuperNode ID: 7")


def test_a_ledger_is_restored_with_its_kit(made, tmp_path):
    """A copy of the folder is a backup: what is spent stays spent, and the same question has the same answer."""
    kit = kits.read_kit(made / "altona")
    with NodeLedger(kit.config["ledger-dir"], budget=1.0) as ledger:
        ledger.release("w", "summary", 0.9, lambda: b"first")
    shutil.copytree(made / "altona", tmp_path / "copy" / "altona")
    shutil.rmtree(made / "altona")
    shutil.copytree(tmp_path / "copy" / "altona", made / "altona")
    with NodeLedger(kits.read_kit(made / "altona").config["ledger-dir"], budget=1.0) as ledger:
        assert ledger.release("w", "summary", 0.9, lambda: b"second") == b"first"
        with pytest.raises(Refused, match="budget of the user is spent"):
            ledger.release("w", "other", 0.9, lambda: b"third")
    with NodeLedger(tmp_path / "new", budget=1.0) as ledger:  # a ledger that is lost is a new budget
        assert ledger.release("w", "other", 0.9, lambda: b"third") == b"third"


# What the server says, on a Grid in this process

NAMES = {"100": "altona", "101": "barmbek", "102": "climstadt"}


def runtime_on(nodes: Nodes, status: Path, **changes: Any) -> tuple[Any, Deployment]:
    from coterie.federated.flower import FlowerRuntime

    config = complete({"out": str(status.parent / "out"), "wait": 2.0, "average": "off", **changes})
    return FlowerRuntime(nodes, for_nodes(config), deadline=5.0, poll=0.001, sites=NAMES,
                         status=status), Deployment.of(config)


def test_sites_have_names_in_messages_and_in_the_status(tmp_path, caplog):
    file = rows(tmp_path)
    own = {"data": "csv", "path": str(file), "user": "ward", "target": "days", "ledger-dir": str(tmp_path / "l")}
    status = tmp_path / "status.json"
    runtime, deployment = runtime_on(Nodes([own, {**own, "path": str(tmp_path / "gone.csv")}]), status,
                                     **{"n-users": 5})
    with pytest.raises(Incompatible, match=r"3 of 5 users came .* Start the other nodes \(climstadt\).* "
                                           r"Nodes said: barmbek: The data of this node"):
        entry.serve(runtime, deployment)
    said = json.loads(status.read_text())
    assert said["users"] == {"altona": 3}
    assert said["awaited"] == ["climstadt"]
    assert said["refused"].keys() == {"barmbek"}
    assert "barmbek cannot take part" in caplog.text
    assert not re.search(r"node \d", caplog.text)


def test_who_is_not_scored_without_consent_is_said_at_the_start(tmp_path, caplog):
    own = {"data": "csv", "path": str(rows(tmp_path)), "user": "ward", "target": "days"}
    for consent in ("", "hessians"):
        caplog.clear()
        few = {**own, "ledger-dir": str(tmp_path / f"l{consent}"), "consent": consent, "holdout": 0.05}
        runtime, deployment = runtime_on(Nodes([few]), tmp_path / f"status{consent}", holdout=0.05,
                                         out=str(tmp_path / f"out{consent}"))
        found = entry.serve(runtime, deployment)
        unscored = re.search('3 of 3 users hold out no rows.*consent = "hessians"', caplog.text)
        assert (unscored is None) == bool(consent)
        assert (found.scores.n_rows == 0) == (not consent)


def test_errors_of_ours_are_a_sentence_in_flowers_log(caplog):
    from coterie.federated.flower import logger

    def failed(error: Exception) -> str:
        caplog.clear()
        try:
            raise error
        except type(error) as raised:
            logger.error("%s raised an exception", "ServerApp", exc_info=raised)
        return caplog.text

    logger.addHandler(caplog.handler)
    try:
        said = failed(InvalidInput("lam is missing", remedy="Give it"))
        assert "lam is missing. Give it." in said
        assert "Traceback" not in said
        assert "Traceback" in failed(ZeroDivisionError("a defect"))
    finally:
        logger.removeHandler(caplog.handler)
    assert issubclass(InvalidInput, CoterieError)


def test_a_private_run_takes_user_and_target_from_the_nodes(tmp_path):
    own = {"data": "csv", "path": str(rows(tmp_path)), "user": "ward", "target": "days", "columns": "age=number",
           "budget-epsilon": 20.0, "budget-delta": 1e-5, "ledger-dir": str(tmp_path / "ledger")}
    runtime, deployment = runtime_on(Nodes([own]), tmp_path / "s", epsilon=20.0, clip="age=0:10, days=0:10")
    found = entry.serve(runtime, deployment)
    assert (found.recipe.user, found.recipe.target) == ("ward", "days")
    file = rows(tmp_path, "south.csv")
    file.write_text(file.read_text().replace("north", "south"))
    other = {**own, "path": str(file), "target": "age", "columns": "days=number", "ledger-dir": str(tmp_path / "other")}
    runtime, deployment = runtime_on(Nodes([own, other]), tmp_path / "s", epsilon=20.0, clip="age=0:10, days=0:10",
                                     out=str(tmp_path / "out2"))
    with pytest.raises(InvalidInput, match=r"different columns as target: 'age', 'days'. Give all nodes the same"):
        entry.serve(runtime, deployment)


# Rows that a node keeps as numbers


def test_a_node_reads_its_table_once(tmp_path):
    file, read = rows(tmp_path), list[str]()

    class Reader(sources.TableReader):
        def __call__(self, path: Path, separator: str) -> Any:
            read.append(path.name)
            return super().__call__(path, separator)

    own = {"data": "csv", "path": str(file), "user": "ward", "target": "days", "ledger-dir": str(tmp_path / "l")}
    asked, config = list[Any](), list[Any]()

    def spoil(node: int, message: Any, answer: Any) -> Any:
        if "queries" in message.content:
            asked.append(dict(message.content["queries"]))
            config.append(dict(message.content["config"]))
        return answer()

    grid = Nodes([own])
    grid.spoil = spoil
    runtime, deployment = runtime_on(grid, tmp_path / "s")
    entry.serve(runtime, deployment)

    def answered() -> Any:
        return Node(config[0], own, Reader()).answer(asked[0])

    first = answered()
    assert len(first.replies) == 3
    assert read == []  # the run has left the numbers
    (kept,) = (tmp_path / "l" / "rows").iterdir()
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    kept.write_bytes(kept.read_bytes()[:-9] + bytes(9))  # damaged
    assert answered() == first
    assert read == ["rows.csv"]
    assert answered() == first
    assert read == ["rows.csv"]
    file.write_text(file.read_text().replace("north 0,0,0.00", "north 0,6,0.00"))
    other = answered()
    assert read == ["rows.csv"] * 2
    assert other.replies != first.replies  # what is kept is of the file as it is
    assert len(list((tmp_path / "l" / "rows").iterdir())) == 1


# Less waiting


def test_a_loop_looks_sooner_after_something_happened(monkeypatch):
    now, slept = [100.0], list[float]()
    monkeypatch.setattr(warm.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(warm.time, "sleep", slept.append)
    clock = warm._Clock(0.25)
    clock.sleep(3)  # nothing has happened yet
    clock.sleep(0.5)  # a message is being answered
    for seconds in (0, 4, 100):
        now[0] = 100.0 + seconds
        clock.sleep(3)
    assert slept == [3, 0.2, 0.2, 1.0, 3]
    assert clock.perf_counter is time.perf_counter


def test_programs_find_ours_first(tmp_path):
    env = warm.environment(tmp_path / "bin", {"PATH": "/usr/bin"})
    assert shutil.which("flower-superexec", path=env["PATH"]) == str(tmp_path / "bin" / "flower-superexec")
    done = subprocess.run(["flower-superexec", "--version"], env={**env, "FLWR_TELEMETRY_ENABLED": "0"},
                          capture_output=True, text=True, timeout=120)
    assert "Flower version" in done.stdout, done.stderr


def test_a_copy_of_a_process_ends_with_its_code():
    code = ("import os, sys\nfrom coterie.federated.runtimes import warm\n"
            "warm._PROGRAMS['x'] = ('sys', 'exit')\n"
            "pid = os.fork()\nif not pid:\n    warm._child(['x'])\n"
            "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "0\n"
    done = subprocess.run([sys.executable, "-c", code.replace("('sys', 'exit')", "('os', 'abort_')")],
                          capture_output=True, text=True, timeout=60)
    assert done.stdout == "1\n"


def test_a_seeded_federation_is_not_warned_about_consent(caplog):
    ct.federate(clustered("squared", n_users=6, samples=6, seed=0).users)
    assert "consent" not in caplog.text  # there is no owner who could give it
