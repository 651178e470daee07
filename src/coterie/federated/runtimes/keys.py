"""Certificates and keys of a deployed federation, made with the `cryptography` library that Flower
brings.

    ca.crt, ca.key          the federation's own certificate authority; keep the key away from the
                            server
    server.pem, server.key  the SuperLink's certificate, for the host names and addresses given
    NAME, NAME.pub          a SuperNode's key pair: the private key goes to its owner, the public
                            one is registered
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from coterie.base.errors import InvalidInput, MissingExtra, require
from coterie.base.storage import private_folder

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
        load_pem_private_key,
    )
except ImportError as error:  # pragma: no cover - depends on what is installed
    raise MissingExtra("cryptography", "flower", "Making keys") from error

DAYS = 365
_AUTHORITY = "coterie federation"
_LONGER = 10  # times as long as the server's certificate, the authority's is valid


def make_authority(folder: str | os.PathLike[str], *, days: int = DAYS,
                   renew: bool = False) -> Path:
    """Write a certificate authority, unless the folder has one.

    Parameters
    ----------
    folder : created if needed.
    days : for which a server's certificate is valid; the authority's own is for ten times as long.
    renew : whether to write another certificate of the same key, which also those trust who have
        the first one.

    Returns
    -------
    The certificate.
    """
    folder = private_folder(folder)
    file = folder / "ca.crt"
    if (folder / "ca.key").exists():
        key: Any = load_pem_private_key((folder / "ca.key").read_bytes(), None)
    else:
        key, renew = ec.generate_private_key(ec.SECP384R1()), True
        _write_private(folder / "ca.key", key)
    if renew:
        usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
        file.write_bytes(_signed(_AUTHORITY, key, key, [(x509.BasicConstraints(True, None), True),
                                                        (usage, True)], _LONGER * days))
    return file


def make_certificates(folder: str | os.PathLike[str],
                      hosts: Iterable[str] = ("localhost", "127.0.0.1"), *, days: int = DAYS,
                      authority: str | os.PathLike[str] | None = None) -> Path:
    """Write a server certificate, signed by a certificate authority that is made if needed.

    Parameters
    ----------
    folder : created if needed.
    hosts : names and addresses of the server.
    days : for which the certificate is valid.
    authority : the folder of the certificate authority, if it is another one.

    Returns
    -------
    The folder.

    Raises
    ------
    InvalidInput : no host is given, or no day.
    """
    folder, known = private_folder(folder), list(hosts)
    require(known,
            "a certificate needs a host", "Give the name or address the nodes will connect to")
    require(1 <= days <= 3650, f"days must be between 1 and 3650, got {days}", "Use 365")
    trusted = make_authority(folder if authority is None else authority, days=days)
    authority_key: Any = load_pem_private_key(trusted.with_name("ca.key").read_bytes(), None)
    key = ec.generate_private_key(ec.SECP384R1())
    names = x509.SubjectAlternativeName([_general_name(host) for host in known])
    certificate = _signed(known[0], key, authority_key,
                          [(names, False), (x509.BasicConstraints(False, None), True)], days)
    _write_private(folder / "server.key", key)
    (folder / "server.pem").write_bytes(certificate)
    return folder


def days_left(certificate: Path) -> float:
    """For how many days a certificate is valid."""
    try:
        ends = x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc
    except (OSError, ValueError) as error:
        raise InvalidInput(f"the certificate {certificate} cannot be read: {error}",
                           remedy="Run `coterie federate provision` again") from error
    return (ends - datetime.datetime.now(datetime.UTC)).total_seconds() / 86_400


def is_for(certificate: Path, hosts: Iterable[str]) -> bool:
    """Whether a certificate is for exactly these hosts."""
    extensions = x509.load_pem_x509_certificate(certificate.read_bytes()).extensions
    names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return set(names) == {_general_name(host) for host in hosts}


def make_node_keys(folder: str | os.PathLike[str], names: Iterable[str]) -> list[Path]:
    """Write a key pair for every node, as `ssh-keygen -t ecdsa -b 384` does.

    Parameters
    ----------
    folder : created if needed.
    names : of the nodes, and so of the files.

    Returns
    -------
    The files of the private keys.

    Raises
    ------
    InvalidInput : a name that cannot be a file's, or a key that exists already.
    """
    folder, keys = Path(folder), []
    private_folder(folder)
    for name in names:
        require(name and "/" not in name and not name.startswith("."),
                f"{name!r} cannot be the name of a key file", "Use letters and digits")
        if (folder / name).exists():
            raise InvalidInput(f"there is a key {folder / name} already",
                               remedy="Use another name, or remove it first")
        key = ec.generate_private_key(ec.SECP384R1())
        _write_private(folder / name, key, PrivateFormat.OpenSSH)
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        (folder / f"{name}.pub").write_bytes(public + b"\n")
        keys.append(folder / name)
    return keys


def _signed(name: str, key: Any, authority_key: Any, extensions: list[tuple[Any, bool]],
            days: int) -> bytes:
    """A certificate of this name and key as PEM; extensions with whether they are critical."""
    def common_name(text: str) -> Any:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    now = datetime.datetime.now(datetime.UTC)
    builder = (x509.CertificateBuilder().subject_name(common_name(name)).issuer_name(
        common_name(_AUTHORITY)).public_key(key.public_key()).serial_number(
            x509.random_serial_number()).not_valid_before(now - datetime.timedelta(
                minutes=5)).not_valid_after(now + datetime.timedelta(days=days)))
    identity = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    for extension, critical in [
            *extensions, (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
            (identity, False)]:
        builder = builder.add_extension(extension, critical)
    return builder.sign(authority_key, hashes.SHA384()).public_bytes(Encoding.PEM)


def _write_private(path: Path, key: Any, form: Any = PrivateFormat.PKCS8) -> None:
    """Write a private key that only its owner may read."""
    data = key.private_bytes(Encoding.PEM, form, NoEncryption())
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)


def _general_name(host: str) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
