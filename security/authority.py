"""The files of a secured cluster: an authority, certificates of the broker and of the members, a key that signs tokens,
and tokens.

Keys are EC on P-256; their files have mode 0600. The authority's key only signs certificates, and must not be stored on
the servers.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
from pathlib import Path
from typing import Any, NamedTuple

from ..proto.errors import AlreadyExists, InvalidConfiguration, Unauthenticated
from ..runtime.disk import SystemFiles
from .members import METADATA, ROLES, make_member_name, make_member_uri
from .settings import Secret, SecuritySettings, read_private_file
from .token import REVOCATION_FILE_HEADER, create_token, verify_claims

AUTHORITY_DAYS = 3650
CERTIFICATE_DAYS = 90
TOKEN_LIFETIME_S = 90 * 86_400.0
OPERATOR = "admin"
MEMBERS = "members"
BROKER = "broker"
FILES_NOT_ON_SERVERS = (
    "ca-key.pem", "token-key.pem", f"{OPERATOR}.token", f"{MEMBERS}/operator.pem", f"{MEMBERS}/operator-key.pem",
)  # fmt: skip
"""Keys that sign, and what makes its holder a super user or an operator: no server reads them."""
REVOKED_FILE = "revoked.txt"
SECURITY_FILES = (
    *FILES_NOT_ON_SERVERS, "ca.pem", "token-public.pem", "broker.pem", "broker-key.pem", f"{BROKER}.token",
    "security.toml",
    REVOKED_FILE, *(f"{MEMBERS}/{role}{end}" for role in ROLES if role != "operator" for end in (".pem", "-key.pem")),
)  # fmt: skip


class CreatedFiles(NamedTuple):
    """The folder in which `create_authority_files` created files, and the names of these files."""

    folder: Path
    files: list[str]


def create_authority_files(folder: Path, hosts: list[str], now: datetime.datetime, cluster: str = "") -> CreatedFiles:
    """Creates all files of a secured cluster (SECURITY_FILES) in a new or empty folder. Returns the folder and the
    names of the files. `hosts`: the names and addresses for the certificates of the broker and of the metadata service,
    at least one. `now`: the current time, in UTC. `cluster`: the cluster's name in the members' certificates; a random
    name if it is empty. Raises AlreadyExists if the folder is not empty, InvalidConfiguration if a host or the cluster
    is not a valid name, or if the packages of `magnetar[security]` are missing; OSError if a file cannot be written."""
    names, cluster = [_name(host) for host in hosts], cluster or f"cluster-{secrets.token_hex(4)}"
    make_member_uri(cluster, METADATA, make_member_name(hosts[0]))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise AlreadyExists(f"{folder} is not empty: give a new folder, which no key is lost in")
    authority_key, token_key = _new_key(), _new_key()
    authority = _authority(authority_key, now)
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
    _write(folder / REVOKED_FILE, REVOCATION_FILE_HEADER.encode(), 0o644)
    _write(folder / "security.toml", _SETTINGS.replace("CLUSTER", cluster).encode(), 0o644)
    (folder / MEMBERS).mkdir(mode=0o700)
    for role in ROLES:
        issue_member_certificate(
            folder, role, OPERATOR if role == "operator" else make_member_name(hosts[0]), hosts, now
        )
    return CreatedFiles(folder, sorted(str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()))


def has_all_files(folder: Path) -> bool:
    """Returns True if the folder has every file that `create_authority_files` creates, False if it has none of them.
    Raises AlreadyExists if it has only some of them."""
    missing = [name for name in SECURITY_FILES if not (folder / name).is_file()]
    if missing and len(missing) < len(SECURITY_FILES):
        raise AlreadyExists(f"{folder} has no {missing[0]}, but other files: bring it back, or give a new folder")
    return not missing


def copy_server_files(folder: Path, servers: Path) -> list[str]:
    """Copies the files that servers need from `folder` to the folder `servers`, and creates that folder if it is
    missing. Running servers load changed files. The tokens that were revoked in either folder are revoked in `servers`
    afterwards. Returns the names of the files that were missing in `servers` or had another content. Raises
    AlreadyExists if `servers` has files of another authority, OSError if a file cannot be read or written."""
    if (servers / "ca.pem").exists() and not _shares_authority(folder, servers):
        raise AlreadyExists(f"{servers} has files of another authority than {folder}: give an empty folder")
    (servers / MEMBERS).mkdir(mode=0o700, parents=True, exist_ok=True)
    written = []
    for name in sorted(set(SECURITY_FILES) - set(FILES_NOT_ON_SERVERS)):
        source, target = folder / name, servers / name
        data = source.read_bytes() if name != REVOKED_FILE else _united(source, target)
        if not target.exists() or target.read_bytes() != data:
            _replace(target, data, source.stat().st_mode & 0o777)
            written.append(name)
    return written


def _united(source: Path, target: Path) -> bytes:
    """Returns what is revoked in either place: an operator may have revoked something at a server, in a hurry."""
    lines = source.read_bytes().splitlines(keepends=True)
    there = target.read_bytes().splitlines(keepends=True) if target.exists() else []
    return b"".join([*lines, *(line for line in there if line not in lines)])


def _shares_authority(folder: Path, servers: Path) -> bool:
    from cryptography import x509

    ours, theirs = (x509.load_pem_x509_certificates((each / "ca.pem").read_bytes()) for each in (folder, servers))
    return bool(set(ours) & set(theirs))


_SETTINGS = f"""# Paths are relative to this file. See docs/security.md.
[tls]
certificate = "broker.pem"
key = "broker-key.pem"

[token]
public_key = "token-public.pem"
algorithm = "ES256"
revoked = "revoked.txt"

[authorization]
super_users = ["{OPERATOR}", "{BROKER}"]

[broker]
token = "{BROKER}.token"
ca = "ca.pem"

[members]
folder = "{MEMBERS}"
ca = "ca.pem"
cluster = "CLUSTER"
"""


def issue_broker_certificate(
    folder: Path, hosts: list[str], now: datetime.datetime, days: int = CERTIFICATE_DAYS
) -> list[str]:
    """Issues a new certificate for brokers (`broker.pem`) and its key, signed by the authority in the folder, and
    replaces the files. The certificate is valid until `days` days after `now` (UTC). Running brokers use it for the
    next connection. If `hosts` is empty, the certificate has the hosts of the certificate before. Returns the names of
    the written files. Raises InvalidConfiguration if the folder has no authority, if no hosts are known, or if a host
    is not a valid name; OSError if a file cannot be written."""
    names = [_name(host) for host in hosts] or _names_before(folder / "broker.pem")
    return _issue(folder, "broker", str(names[0].value), names, now, days)


def _names_before(path: Path) -> list[Any]:
    from cryptography import x509

    try:
        read = x509.load_pem_x509_certificate(path.read_bytes())
        names: Any = read.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound) as error:
        raise InvalidConfiguration(f"{path} names no hosts: give them (--host)") from error
    return list(names)


def issue_member_certificate(
    folder: Path, role: str, name: str, hosts: list[str], now: datetime.datetime, days: int = CERTIFICATE_DAYS
) -> list[str]:
    """Issues a new certificate and its key for the member `role`/`name` of the cluster, in the members' folder, and
    replaces the files. The certificate is valid until `days` days after `now` (UTC). Returns the names of the written
    files. Raises InvalidConfiguration if the settings in the folder are wrong or do not name the cluster, if the role,
    the name or a host is not valid, or if the folder has no authority; OSError if a file cannot be written.

    `hosts`: the hosts of the metadata service. Other members only make calls: their certificates contain no hosts, so
    that none of them can pretend to be the metadata service.
    """
    from cryptography import x509

    members = SecuritySettings.load(str(folder / "security.toml")).members
    if members is None:
        raise InvalidConfiguration(f"{folder}/security.toml has no [members], which names the cluster")
    names = [_name(host) for host in hosts] if role == METADATA else []
    names.append(x509.UniformResourceIdentifier(make_member_uri(members.cluster, role, name)))
    return _issue(folder, f"{MEMBERS}/{role}", name, names, now, days)


def add_authority(folder: Path, now: datetime.datetime) -> list[str]:
    """Creates another authority, valid from `now` (UTC), which issues all certificates from now on. Puts its
    certificate into `ca.pem`, before the certificates of the older authorities, which stay valid, and replaces
    `ca-key.pem`. Returns the names of the written files. Raises InvalidConfiguration if the packages of
    `magnetar[security]` are missing, OSError if a file cannot be read or written."""
    key, before = _new_key(), (folder / "ca.pem").read_bytes()
    _replace(folder / "ca.pem", _pem(_authority(key, now)) + before, 0o644)
    _replace(folder / "ca-key.pem", _private_pem(key), 0o600)
    return ["ca.pem", "ca-key.pem"]


def create_token_key(folder: Path) -> list[str]:
    """Creates another key, which signs all tokens from now on, and replaces `token-key.pem`. Older tokens stay valid,
    because `token-public.pem` also contains the older keys. Returns the names of the written files. Raises
    InvalidConfiguration if the packages of `magnetar[security]` are missing, OSError if a file cannot be read or
    written."""
    key, before = _new_key(), (folder / "token-public.pem").read_bytes()
    _replace(folder / "token-public.pem", _public_pem(key) + before, 0o644)
    _replace(folder / "token-key.pem", _private_pem(key), 0o600)
    return ["token-public.pem", "token-key.pem"]


def find_tokens_of_older_keys(folder: Path) -> list[str]:
    """Returns the roles whose token in the folder (`broker.token`, `admin.token`) is not signed by the newest key of
    `token-public.pem`. A missing token file is left out. Raises OSError if a file cannot be read, ValueError if
    `token-public.pem` begins with no public key."""
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    newest, found = load_pem_public_key(_newest(folder / "token-public.pem")), []
    for role in (BROKER, OPERATOR):
        if (path := folder / f"{role}.token").is_file():
            try:
                verify_claims(path.read_text().strip(), newest, ["ES256"])
            except Unauthenticated:
                found.append(role)
    return found


def remove_older_signers(path: Path) -> None:
    """Removes all certificates or keys except the newest from the file `path` (`ca.pem` or `token-public.pem`). What
    the removed ones have signed is not valid any more. Raises OSError if the file cannot be read or written."""
    _replace(path, _newest(path), 0o644)


def _newest(path: Path) -> bytes:
    first, end, _ = path.read_bytes().partition(b"\n-----END ")
    kind = first.partition(b"-----BEGIN ")[2].partition(b"-----")[0]
    return first + end + kind + b"-----\n"


def _authority(key: Any, now: datetime.datetime) -> Any:
    """Returns the certificate of a new authority with a name of its own: of two authorities with one name, TLS would
    try only one.
    """
    return _certificate(f"magnetar authority {secrets.token_hex(4)}", None, key, None, key, now, AUTHORITY_DAYS)


def _issue(
    folder: Path, stem: str, subject: str, names: list[Any], now: datetime.datetime, days: int
) -> list[str]:  # fmt: skip
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    try:
        key: Any = serialization.load_pem_private_key(read_private_file(str(folder / "ca-key.pem")), None)
        authority = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    except (OSError, ValueError, TypeError) as error:
        raise InvalidConfiguration(f"{folder} has no authority: ca.pem and ca-key.pem of `security init`") from error
    if authority.public_key() != key.public_key():
        raise InvalidConfiguration(f"{folder}/ca-key.pem is not the key of the first certificate of ca.pem")
    own = _new_key()
    _replace(folder / f"{stem}-key.pem", _private_pem(own), 0o600)
    _replace(folder / f"{stem}.pem", _pem(_certificate(subject, names, own, authority, key, now, days)), 0o644)
    return [f"{stem}.pem", f"{stem}-key.pem"]


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
    """Returns a signed certificate. `hosts` None: that of an authority itself."""
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
    """Creates a file durably. Raises FileExistsError if it exists."""
    _write_content(path, data, mode)
    SystemFiles().sync_directory(str(path.parent))


def _write_content(path: Path, data: bytes, mode: int) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_secret(path: Path, data: bytes, *, over: bool = False) -> None:
    """Writes `data` to a file with mode 0600, durably. If the file exists, raises AlreadyExists; with `over`, replaces
    the file atomically instead. Raises InvalidConfiguration if the file cannot be written."""
    try:
        (_replace if over else _write)(path, data, 0o600)
    except FileExistsError:
        raise AlreadyExists(f"{path} exists already: name a new file, or give --replace") from None
    except OSError as error:
        raise InvalidConfiguration(f"{path} cannot be written: {error.strerror}") from error


def _replace(path: Path, data: bytes, mode: int) -> None:
    """Replaces a file atomically and durably: a reader, also one after a power loss, sees the old one or the new one.
    """
    temporary = path.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    _write_content(temporary, data, mode)
    os.replace(temporary, path)
    SystemFiles().sync_directory(str(path.parent))
