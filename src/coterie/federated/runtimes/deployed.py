"""What a start kit has for those who run it as a service: a unit of systemd, and a container."""

from __future__ import annotations

from pathlib import Path

from coterie import __version__
from coterie.base.storage import write_atomically

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


def write_deployment(kit: Path, name: str, port: int | None) -> None:
    """Write the files, unless they are there.

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
