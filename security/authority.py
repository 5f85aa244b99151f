"""The files of a secured broker: an authority of the cluster, a certificate per host, a key of tokens, first tokens.

Keys are EC on P-256; their files have mode 0600. The authority's key issues further certificates and does nothing else:
it is kept off the servers.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from pathlib import Path
from typing import Any, NamedTuple

from ..proto.errors import AlreadyExists, InvalidConfiguration
from .secrets import Secret, read_private
from .token import create_token

AUTHORITY_DAYS = 3650
CERTIFICATE_DAYS = 90
TOKEN_LIFETIME_S = 90 * 86_400.0
OPERATOR = "admin"
BROKER = "broker"


class Made(NamedTuple):
    folder: Path
    files: list[str]


def initialize(folder: Path, hosts: list[str], now: datetime.datetime) -> Made:
    """Makes all files in an empty or new folder. AlreadyExists; InvalidConfiguration: a host is no name or address."""
    names = [_name(host) for host in hosts]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise AlreadyExists(f"{folder} is not empty: give a new folder, which no key is lost in")
    authority_key, token_key = _new_key(), _new_key()
    authority = _certificate("magnetar authority", None, authority_key, None, authority_key, now, AUTHORITY_DAYS)
    _write(folder / "ca-key.pem", _private_pem(authority_key))
    _write(folder / "ca.pem", _pem(authority), 0o644)
    broker_key = _new_key()
    certificate = _certificate(hosts[0], names, broker_key, authority, authority_key, now, CERTIFICATE_DAYS)
    _write(folder / "broker-key.pem", _private_pem(broker_key))
    _write(folder / "broker.pem", _pem(certificate), 0o644)
    _write(folder / "token-key.pem", _private_pem(token_key))
    _write(folder / "token-public.pem", _public_pem(token_key), 0o644)
    now_ms = int(now.timestamp() * 1000)
    for role in (OPERATOR, BROKER):
        made = create_token(Secret(_private_pem(token_key)), "ES256", role, now_ms, TOKEN_LIFETIME_S)
        _write(folder / f"{role}.token", made.encode() + b"\n")
    _write(folder / "security.toml", _SETTINGS.encode(), 0o644)
    return Made(folder, sorted(each.name for each in folder.iterdir()))


_SETTINGS = f"""# Paths are relative to this file. See docs/security.md.
[tls]
certificate = "broker.pem"
key = "broker-key.pem"

[token]
public_key = "token-public.pem"
algorithm = "ES256"

[authorization]
super_users = ["{OPERATOR}", "{BROKER}"]

[broker]
token = "{BROKER}.token"
ca = "ca.pem"
"""


def issue(folder: Path, hosts: list[str], now: datetime.datetime, days: int = CERTIFICATE_DAYS) -> list[str]:
    """A new `broker.pem` and its key, for the hosts, of the authority in the folder; brokers use them from the next
    connection on. Returns the names of the files."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    names = [_name(host) for host in hosts]
    try:
        key: Any = serialization.load_pem_private_key(read_private(str(folder / "ca-key.pem")), None)
        authority = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    except (OSError, ValueError, TypeError) as error:
        raise InvalidConfiguration(f"{folder} has no authority: ca.pem and ca-key.pem of `security init`") from error
    own = _new_key()
    certificate = _certificate(hosts[0], names, own, authority, key, now, days)
    _replace(folder / "broker-key.pem", _private_pem(own), 0o600)
    _replace(folder / "broker.pem", _pem(certificate), 0o644)
    return ["broker.pem", "broker-key.pem"]


def _name(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    labels = host.removeprefix("*.").split(".")
    if not host.isascii() or len(host) > 253 or not all(each and each.replace("-", "").isalnum() for each in labels):
        raise InvalidConfiguration(f"{host!r} is neither a host's name nor an address")
    return x509.DNSName(host)


def _new_key() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise InvalidConfiguration("security needs more packages: pip install 'magnetar[security]'") from error
    return ec.generate_private_key(ec.SECP256R1())


def _certificate(
    name: str, hosts: list[Any] | None, key: Any, issuer: Any, issuer_key: Any, now: datetime.datetime, days: int
) -> Any:
    """`hosts` None: an authority's own."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.x509.oid import NameOID

    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    is_authority = hosts is None
    builder = (
        x509.CertificateBuilder().subject_name(subject).issuer_name(issuer.subject if issuer is not None else subject)
        .public_key(key.public_key()).serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1)).not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(is_authority, 0 if is_authority else None), critical=True)
    )  # fmt: skip
    if hosts is not None:
        builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _pem(certificate: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    found: bytes = certificate.public_bytes(Encoding.PEM)
    return found


def _private_pem(key: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    found: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return found


def _public_pem(key: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    found: bytes = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return found


def _write(path: Path, data: bytes, mode: int = 0o600) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)


def _replace(path: Path, data: bytes, mode: int) -> None:
    """A reader sees the old file or the new one."""
    temporary = path.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    _write(temporary, data, mode)
    os.replace(temporary, path)
