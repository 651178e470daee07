"""Start kits: a folder for the server and one for every site, with all that each needs.

    KITS/authority      signs the server's certificate; stays with whoever makes the kits
    KITS/server         server.toml, its certificate, and the public keys of the sites
    KITS/SITE           site.toml, the site's private key, and whom it trusts

`provision` makes them from a list of sites. Done again, it keeps what is there, adds new sites,
revokes those that are no longer listed, and renews what ends soon or is named. A kit has a unit of
systemd and a container, too, for those who run it as a service.
"""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from coterie import __version__
from coterie.base.errors import InvalidInput, require
from coterie.base.storage import private_folder, write_atomically
from coterie.federated.contract import Contract
from coterie.federated.rehearsal import flat
from coterie.federated.runtimes.cluster import toml
from coterie.federated.runtimes.keys import (
    DAYS,
    days_left,
    is_for,
    make_authority,
    make_certificates,
    make_node_keys,
)
from coterie.federated.settings import CONFIG

SERVER, SITE = "server.toml", "site.toml"
#: Days before the end of a certificate from which on everybody is warned, and it is renewed.
SOON = 30
_FILES = ("path", "models-dir", "ledger-dir")  # of a site, relative to its kit
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
_SERVER_TEXT = """\
# The server of a federation. Start it with `coterie federate start .` in this folder.

[server]
host = "0.0.0.0"  # the address at which it listens; 127.0.0.1 for this machine only
port = {port}

# Settings of every run, as for `coterie federate submit . KEY=VALUE`: see docs/flower.md.
[run]
wait = 300.0  # seconds to wait for the users
# n-users = 40  # to wait for; otherwise a run begins with those who are there
"""
_SITE_TEXT = """\
# The site {name} of a federation. In this folder, `coterie federate check .` shows what the site
# would answer, without sending anything, and `coterie federate start .` takes part.

[server]
address = {address}  # the server's name and port

# What the owner of the data allows: see "Node config" in docs/deploying.md. Files are relative to
# this folder. Nothing is answered without `data`.
[node]
{node}
# models-dir = "models"  # keep the models of this site's users, to predict without the server
# consent = "hessians"  # let second moments of few rows leave; without it users with few rows are
#                         not scored, and those with very few take no part
# budget-epsilon = 4.0  # answer with noise only, within this budget ...
# budget-delta = 1e-5
"""
#: Where a service listens for its supervisor.
HEALTH = "127.0.0.1:9190"
_UNIT = """\
# Install coterie[flower] in /opt/coterie, move this folder to /srv/coterie/{name}, owned by a user
# coterie, and link this file into /etc/systemd/system.
[Unit]
Description=coterie: {name} of a federation
After=network-online.target
Wants=network-online.target

[Service]
ExecStart=/opt/coterie/bin/coterie federate start /srv/coterie/{name} --health {health} --json-logs
User=coterie
UMask=0077
Environment=NUMBA_CACHE_DIR=/srv/coterie/{name}/state/numba
Restart=always
RestartSec=10
TimeoutStopSec=30
NoNewPrivileges=yes
PrivateTmp=yes
ProtectSystem=strict
ProtectHome=read-only
ReadWritePaths=/srv/coterie/{name}

[Install]
WantedBy=multi-user.target
"""
_COMPOSE = """\
# `docker compose up -d` in this folder. Tables that a site reads lie in this folder, too, with
# paths relative to it in site.toml.
services:
  {name}:
    build: .
    image: coterie:{version}
    user: "${{UID:-1000}}:${{GID:-1000}}"
    volumes:
      - .:/kit
{ports}    tmpfs:
      - /tmp
    read_only: true
    restart: unless-stopped
    healthcheck:
      test: ["CMD", "python", "-c",
             "import urllib.request as u; u.urlopen('http://{health}/healthz', timeout=5)"]
      interval: 30s
      start_period: 60s
"""
_DOCKERFILE = """\
FROM python:3.12-slim
RUN pip install --no-cache-dir 'coterie[flower]=={version}'
ENV HOME=/kit/state NUMBA_CACHE_DIR=/kit/state/numba PYTHONUNBUFFERED=1
WORKDIR /kit
ENTRYPOINT ["coterie", "federate", "start", "/kit", "--health", "{health}", "--json-logs"]
"""


class Kit(NamedTuple):
    """A folder made by `provision`.

    Parameters
    ----------
    folder : of the kit.
    name : "server", or that of the site.
    config : of the server, or the node configuration of the site, with absolute paths.
    address : at which the server listens, or is found.
    run : settings of every run, of a server.
    """

    folder: Path
    name: str
    config: dict[str, Any]
    address: str
    run: dict[str, Any]

    @property
    def serves(self) -> bool:
        """Whether it is the server's."""
        return (self.folder / SERVER).is_file()

    @property
    def state(self) -> Path:
        """Where Flower's files are kept."""
        return self.folder / "state"

    def warnings(self) -> list[str]:
        """A sentence about every certificate that ends soon."""
        said = []
        for file in ("server.pem", "ca.crt") if self.serves else ("ca.crt",):
            left = days_left(self.folder / file)
            if left < SOON:
                when = f"ends in {max(left, 0):.0f} days" if left > 0 else "has ended"
                said.append(f"The certificate {self.folder / file} {when}. Run `coterie federate "
                            "provision` again where the kits were made, and hand it out.")
        return said


def read_kit(folder: Path) -> Kit:
    """A kit from its configuration file.

    Raises
    ------
    InvalidInput : there is none, or it cannot be read.
    """
    folder = (folder.parent if folder.name in (SERVER, SITE) else folder).resolve()
    file = next((folder / name for name in (SERVER, SITE) if (folder / name).is_file()), None)
    if file is None:
        raise InvalidInput(f"{folder} is no start kit: it has no {SITE} or {SERVER}",
                           remedy="Give a folder that `coterie federate provision` has made")
    said = _read(file)
    server = said.get("server", {})
    if file.name == SERVER:
        address = f"{server.get('host', '0.0.0.0')}:{server.get('port', 9092)}"
        return Kit(folder, "server", server, address, said.get("run", {}))
    node = flat(said.get("node", {}))
    node |= {key: str((folder / node[key]).resolve()) for key in _FILES if node.get(key)}
    # The ledger is part of the kit, so that a copy of the kit is a backup.
    node.setdefault("ledger-dir", str(folder / "ledger"))
    return Kit(folder, folder.name, node, str(server.get("address", "")), {})


def provision(file: Path, out: Path, *, days: int = DAYS,
              renew: Collection[str] = ()) -> list[str]:
    """Write or renew the kits of all sites in a list.

    Parameters
    ----------
    file : TOML with `server`, `port`, a table `sites` with a node configuration of each, and `node`
        with what they have in common.
    out : folder of the kits.
    days : for which the server's certificate is valid.
    renew : sites that get another key, and "server" or "authority" for another certificate.

    Returns
    -------
    What was done, in sentences.

    Raises
    ------
    InvalidInput : a list, a name or a node configuration that cannot be used.
    """
    # 1. The list, checked before anything is written.
    said = _read(file)
    unknown = sorted(set(said) - {"server", "port", "node", "sites"})
    require(not unknown, f"{file} has {unknown[:1]}, which is no setting",
            "Settings are server, port, node and sites")
    names = said.get("server", [])
    names = [names] if isinstance(names, str) else list(names)
    require(names, f"{file} does not name the server", 'Give server = "fl.example.org"')
    hosts = [*names, *({"localhost", "127.0.0.1"} - set(names))]  # the server's own commands
    port, sites = int(said.get("port", 9092)), dict(said.get("sites", {}))
    require(sites, f"{file} lists no sites", "Give a table [sites.NAME] for each")
    for name, node in sites.items():
        require(_NAME.fullmatch(name) and name not in ("server", "authority"),
                f"{name!r} cannot be the name of a site", "Use letters, digits, - and _")
        Contract.of(flat({**said.get("node", {}), **node}))
    strange = sorted(set(renew) - {*sites, "server", "authority"})
    require(not strange, f"there is no site {strange[:1]} to renew", f"Sites: {', '.join(sites)}")
    # 2. The certificates.
    done: list[str] = []
    private_folder(out)
    authority, server = out / "authority", private_folder(out / "server")
    ends = (authority / "ca.crt").is_file() and days_left(authority / "ca.crt") < SOON
    trusted = make_authority(authority, days=days, renew=ends or "authority" in renew)
    own = server / "server.pem"
    if "server" in renew or not own.is_file() or days_left(own) < SOON or not is_for(own, hosts):
        make_certificates(server, hosts, days=days, authority=authority)
        done.append(f"server: a certificate for {', '.join(names)}, valid for {days} days.")
    if not (server / SERVER).is_file():
        write_atomically(server / SERVER, _SERVER_TEXT.format(port=port).encode())
    _write_deployment(server, "server", port)
    # 3. A kit for each site; owners may have changed what is there.
    public = private_folder(server / "sites")
    for name, node in sites.items():
        done += _make_site(out / name, public, name in renew)
        if not (out / name / SITE).is_file():
            text = _SITE_TEXT.format(name=name, address=toml(f"{names[0]}:{port}"), node="\n".join(
                f"{key} = {toml(value)}" for key, value in flat({
                    **said.get("node", {}), **node}).items()))
            write_atomically(out / name / SITE, text.encode())
        _write_deployment(out / name, name, None)
    for folder in (server, *(out / name for name in sites)):
        shutil.copyfile(trusted, folder / "ca.crt")
    # 4. Who is not listed any more.
    for key in sorted(public.glob("*.pub")):
        if key.stem not in sites:
            key.unlink()
            done.append(f"{key.stem}: revoked; a server that is running forgets it in seconds.")
    return done


def _make_site(folder: Path, public: Path, renew: bool) -> list[str]:
    """A key for the site, unless it has one, or its owner has sent a public key of its own."""
    private_folder(folder)
    key, known = folder / "key", public / f"{folder.name}.pub"
    if known.is_file() and not renew:
        return []
    key.unlink(missing_ok=True)
    make_node_keys(folder, ["key"])
    (folder / "key.pub").replace(known)
    return [f"{folder.name}: a {'new ' if renew else ''}key."]


def _write_deployment(kit: Path, name: str, port: int | None) -> None:
    """Write what runs a kit as a service, unless it is there: a unit of systemd, and a container.

    Parameters
    ----------
    kit : the folder of the kit.
    name : of the site, or "server".
    port : at which others connect; None for a site, to which nobody connects.
    """
    ports = "" if port is None else f'    ports:\n      - "{port}:{port}"\n'
    for file, text in ((f"coterie-{name}.service", _UNIT), ("compose.yaml", _COMPOSE),
                       ("Dockerfile", _DOCKERFILE)):
        if not (kit / file).is_file():
            write_atomically(kit / file, text.format(name=name, health=HEALTH, ports=ports,
                                                     version=__version__).encode())


def configuration(words: list[str]) -> dict[str, Any]:
    """KEY=VALUE of a run, as numbers, truth values and texts.

    Raises
    ------
    InvalidInput : a word without a sign, or a setting that does not exist.
    """
    config: dict[str, Any] = {}
    for word in words:
        key, sign, value = word.partition("=")
        require(sign and key in CONFIG, f"{word!r} is no setting of a run",
                f"Write KEY=VALUE with one of: {', '.join(CONFIG)}")
        try:
            read = tomllib.loads(f"x = {value}")["x"]
        except ValueError:  # a text without quotes
            read = value
        usual = CONFIG[key]
        config[key] = float(read) if isinstance(usual, float) and isinstance(read, int) else read
    return config


def _read(file: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{file} cannot be read: {error}",
                           remedy="Give a TOML file") from error
