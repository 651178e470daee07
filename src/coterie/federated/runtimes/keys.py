"""Certificates and keys of a deployed federation, made with the `cryptography` library that Flower brings.

    ca.crt, ca.key          an authority of the federation's own; keep the key away from the server
    server.pem, server.key  the SuperLink's certificate, for the host names and addresses given
    NAME, NAME.pub          a SuperNode's key pair: the private one goes to its owner, the public one is registered
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from coterie.errors import InvalidInput, MissingExtra

_DAYS = 365


def make_certificates(folder: str | os.PathLike[str], hosts: Iterable[str] = ("localhost", "127.0.0.1")) -> Path:
    """An authority, and a certificate of the server signed by it; an authority already there is used again."""
    x509, ec, hashes, serialization, name_oid = _library()
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC)

    def builder(name: str, key: Any) -> Any:
        subject = x509.Name([x509.NameAttribute(name_oid.COMMON_NAME, name)])
        return (x509.CertificateBuilder().subject_name(subject).public_key(key.public_key())
                .serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(minutes=5))
                .not_valid_after(now + datetime.timedelta(days=_DAYS)))

    if (place / "ca.key").exists():
        authority_key = serialization.load_pem_private_key((place / "ca.key").read_bytes(), None)
        authority = x509.load_pem_x509_certificate((place / "ca.crt").read_bytes())
    else:
        authority_key = ec.generate_private_key(ec.SECP384R1())
        made = builder("coterie federation", authority_key)
        subject = x509.Name([x509.NameAttribute(name_oid.COMMON_NAME, "coterie federation")])
        usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
        authority = (made.issuer_name(subject).add_extension(x509.BasicConstraints(True, None), True)
                     .add_extension(usage, True).sign(authority_key, hashes.SHA384()))
        _private(place / "ca.key", authority_key)
        (place / "ca.crt").write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    key = ec.generate_private_key(ec.SECP384R1())
    known = list(hosts)
    if not known:
        raise InvalidInput("a certificate needs a host", remedy="Give the name or address the nodes will connect to")
    names = x509.SubjectAlternativeName([_host(x509, host) for host in known])
    certificate = (builder(known[0], key).issuer_name(authority.subject)
                   .add_extension(names, False).add_extension(x509.BasicConstraints(False, None), True)
                   .sign(authority_key, hashes.SHA384()))
    _private(place / "server.key", key)
    (place / "server.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return place


def make_node_keys(folder: str | os.PathLike[str], names: Iterable[str]) -> list[Path]:
    """A key pair for every node, as `ssh-keygen -t ecdsa -b 384` makes them; the paths of the private ones."""
    _, ec, _, serialization, _ = _library()
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    made = []
    for name in names:
        if not name or "/" in name or name.startswith("."):
            raise InvalidInput(f"{name!r} cannot be the name of a key file", remedy="Use letters and digits")
        if (place / name).exists():
            raise InvalidInput(f"there is a key {place / name} already", remedy="Take another name, or remove it first")
        key = ec.generate_private_key(ec.SECP384R1())
        _private(place / name, key, serialization.PrivateFormat.OpenSSH)
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        (place / f"{name}.pub").write_bytes(public + b"\n")
        made.append(place / name)
    return made


def _private(path: Path, key: Any, form: Any = None) -> None:
    """A private key that only its owner may read."""
    _, _, _, serialization, _ = _library()
    data = key.private_bytes(serialization.Encoding.PEM, form or serialization.PrivateFormat.PKCS8,
                             serialization.NoEncryption())
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)


def _host(x509: Any, host: str) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _library() -> Any:
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError as error:
        raise MissingExtra("cryptography", "flower", "Making keys") from error
    return x509, ec, hashes, serialization, NameOID
