"""`coterie federate` for those who operate a federation: provision, start, submit, status."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.base.errors import InvalidInput
from coterie.base.storage import locked, private_folder
from coterie.cli import base
from coterie.cli.base import Arg, Opt, console, error, grid, interruptible, say
from coterie.cli.federate import (
    check_folder,
    command,
    groups_in,
    in_words_of,
    show,
    show_newcomers,
)
from coterie.federated.session import Round
from coterie.federated.settings import Deployment, complete

_Sites = Annotated[Path, Arg(help="The list of sites, a TOML file.", metavar="SITES")]
_Kits = Annotated[Path, Opt(help="Folder for the start kits.")]
_Days = Annotated[int, Opt(help="For how many days the server's certificate is valid.", min=1)]
_Renew = Annotated[list[str] | None, Opt(
    help="A site that gets another key, or server or authority for another certificate; may be "
         "repeated.")]
_Kit = Annotated[Path, Arg(help="The folder of a start kit.", metavar="KIT")]
_Health = Annotated[str, Opt(
    help="HOST:PORT at which /healthz and /metrics are served; nowhere if omitted.")]
_JsonLogs = Annotated[bool, Opt("--json-logs", help="One JSON object for each line.")]
_Changes = Annotated[list[str] | None, Arg(help="Settings of the run, as KEY=VALUE.",
                                           metavar="KEY=VALUE")]
_Timeout = Annotated[float, Opt(help="Time limit of the run in seconds.")]


@command.command()
def provision(sites: _Sites, out: _Kits = Path("kits"), days: _Days = 365,
              renew: _Renew = None) -> None:
    """Make a start kit for the server and one for every site: keys, certificates, configuration.

    SITES names the server, and every site with what its owner allows. Done again, the same command
    keeps what is there, makes kits of new sites, revokes the keys of sites that are not listed any
    more, and renews certificates that end within 30 days.

    Example: coterie federate provision sites.toml --out kits
    """
    from coterie.federated.runtimes.kits import provision as make

    done = make(sites, out, days=days, renew=renew or ())
    for sentence in done or ["Nothing had to be done."]:
        say(sentence)
    say(f"Kits in {out}: hand {out / 'server'} to the server, and every other folder to its site. "
        f"Keep {out / 'authority'} to yourself.")


@command.command()
def start(kit: _Kit, health: _Health = "", json_logs: _JsonLogs = False) -> None:
    """Run the server, or take part as a site, until this is stopped.

    KIT is a folder made by `coterie federate provision`. A site that cannot take part yet tries
    again.

    Example: coterie federate start kits/altona
    """
    from coterie.federated.runtimes.kits import read_kit
    from coterie.federated.runtimes.supervisor import Service

    Service(read_kit(kit), health, json_logs).run()


@command.command()
def submit(kit: _Kit, changes: _Changes = None, timeout: _Timeout = 3600.0,
           overwrite: base.Overwrite = False) -> None:
    """Begin a run, at the server; what it finds is shown at the end, and kept in KIT/run.

    With join=RUN newcomers join a finished run. An interrupted run is continued by the same
    command.

    Example: coterie federate submit kits/server n-users=40
    """
    from coterie.federated.runtimes.kits import configuration
    from coterie.federated.runtimes.supervisor import read_json

    server = _server(kit)
    own = server.kit
    config = complete({"out": str(own.folder / "run"), "sites": str(server.registry),
                       **configuration([f"{key}={json.dumps(value)}" for key, value
                                        in own.run.items()]), **configuration(changes or [])})
    out, joins = Path(config["out"]).resolve(), bool(config["join"])
    if joins:
        out = out if changes and any(word.startswith("out=") for word in changes) \
            else own.folder / "joined"
        config["join"] = str(Path(config["join"]).resolve())
    config["out"] = str(out)
    Deployment.of(config)  # refused before Flower is asked
    private_folder(out)
    if not joins:
        with locked(out), in_words_of("out=FOLDER"):
            check_folder(out, overwrite)
    result = "joined.csv" if joins else "run.json"
    for name in (result, "rounds.jsonl", "error.txt", "status.json"):
        (out / name).unlink(missing_ok=True)
    began, warned = time.monotonic(), 0
    with interruptible(": the run goes on at the server; `flwr stop` ends it."), \
            console.status("Submitting ...") as shown:
        server.submit(config)
        shown.update("Waiting for the users ...")
        for line in server.follow(out, timeout, result):
            shown.update(str(Round(**line)))
            say(str(Round(**line)), style="dim")
            texts = read_json(out / "status.json").get("warnings", [])
            for text in texts[warned:]:
                say(text, to=error)
            warned = len(texts)
    if joins:
        show_newcomers(groups_in(out / result), out / result)
    else:
        show(out, time.monotonic() - began)


@command.command()
def status(kit: _Kit, as_json: base.Json = False) -> None:
    """Sites, when they were last seen, the round, and who is awaited; at a site what left it.

    Example: coterie federate status kits/server
    """
    from coterie.federated.runtimes.kits import read_kit
    from coterie.federated.runtimes.supervisor import figures_of_ledger, read_json

    own = read_kit(kit)
    if not own.serves:
        figures = figures_of_ledger(own)
        if as_json:
            typer.echo(json.dumps(figures))
        else:
            _show_site(own, figures)
        return
    server = _server(kit)
    sites, run = server.sites(), read_json(own.folder / "run" / "status.json")
    if as_json:
        typer.echo(json.dumps({"sites": [site._asdict() for site in sites], "run": dict(run)}))
        return
    console.print(grid("Sites", ("site", "status", "last seen", "users", ""), [
        (site.name, site.status, site.seen[:19] or "never", f"{site.users:,}",
         site.refused or ("awaited" if site.awaited else "")) for site in sites],
        right=("users",), fixed=("site", "status", "last seen")))
    stage = str(run.get("stage", "no run yet"))
    said = read_json(own.folder / "run" / "run.json") if stage == "done" else {}
    say(f"Last run       {said.get('sentence') or stage}")


def _show_site(own: Any, figures: dict[str, float]) -> None:
    """What left a site."""
    if not figures:
        say(f"{own.name}: no answer left this site.")
        return
    say(f"{own.name}: {figures['coterie_answers_total']:,.0f} answers left, "
        f"{figures['coterie_refusals_total']:,.0f} were refused; `coterie federate log "
        f"{own.config['ledger-dir']}` shows each.")
    if "coterie_budget_epsilon_left" in figures:
        say(f"Of the budget, epsilon = {figures['coterie_budget_epsilon_left']:.3g} is left.")


def _server(kit: Path) -> Any:
    """The server of a kit, whose certificates are looked at."""
    from coterie.federated.runtimes.kits import read_kit
    from coterie.federated.runtimes.supervisor import Server

    own = read_kit(kit)
    if not own.serves:
        raise InvalidInput(f"{kit} is the kit of a site", remedy="Give that of the server")
    if not (own.state / "flwr" / "config.toml").is_file():
        raise InvalidInput("the server was never started",
                           remedy=f"Run `coterie federate start {kit}` in another terminal")
    for text in own.warnings():
        say(text, to=error)
    return Server(own)
