"""Settings of security: one TOML file, which `--security FILE` names.

    [tls]
    certificate = "broker.pem"      # paths are relative to this file
    key = "broker-key.pem"

    [token]
    secret_key = "token.key"

    [authorization]
    super_users = ["admin"]

    [broker]
    token = "broker.token"

Each section is a class of this module, and each setting is a field of its class; the table of docs/settings.md is made
from them. The sections [token], [oidc], [basic] and [certificate] are the ways in which callers authenticate, and a
broker needs at least one. The kind of a caller's credentials decides which section applies; a token whose `iss` is one
of the issuers belongs to [oidc]. With `ca` of [tls], brokers present their certificate of [tls] to each other. With
[members], the metadata service admits only members, and the connections between brokers and bookies are encrypted with
keys. A file that only `magnetar metadata` and `magnetar bookie` read needs no other section than [members]. An unknown
name, or a value of a wrong type, raises InvalidConfiguration.

Secrets (`Secret`, `read_secret`) are read from files and the environment, and never shown.

A file with a secret may be readable only by its owner, who must be the user of this process or root; otherwise it is
refused, as by ssh. The error text contains the command that corrects the mode.

Also in this file, below its heading: a value that is made from a secret's source, and made again when its file changes
(watched).
"""

from __future__ import annotations

import base64
import binascii
import hmac
import logging
import os
import stat
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from ..proto.errors import InvalidConfiguration, MagnetarError
from ..runtime.access import TlsFiles
from ..runtime.clock import Clock

SECRET_BYTES_MAX = 64 << 10
"""Most bytes of a file or variable: a key of RSA 16,384 has about 13,000."""
SHOWN_NAME_CHARACTERS_MAX = 80
"""Characters of a file's name that an error shows; tokens are longer."""


class Secret:
    """Secret bytes, such as a key or a password, that no repr, error or log line shows. Cannot be pickled."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = value

    def reveal_bytes(self) -> bytes:
        """Returns the secret as plain bytes."""
        return self._value

    def __eq__(self, other: object) -> bool:
        """Compares in constant time."""
        return isinstance(other, Secret) and hmac.compare_digest(self._value, other._value)

    def __hash__(self) -> int:
        return hash(self._value)

    def __repr__(self) -> str:
        return "<secret>"

    def __reduce__(self) -> str:
        raise TypeError("a secret is not pickled")


def read_secret(source: str) -> Secret:
    """Returns the secret that `source` names: the path of a file, `file:PATH`, `env:NAME` (the text of an environment
    variable) or `data:;base64,…`. Raises InvalidConfiguration if it cannot be read."""
    if source.startswith("env:"):
        name = source.removeprefix("env:")
        value = os.environ.get(name, "")
        if not value:
            raise InvalidConfiguration(f"the environment has no variable {name}")
        return Secret(value.encode())
    if source.startswith("data:"):
        head, separator, body = source.partition(",")
        if not separator or not head.endswith(";base64"):
            raise InvalidConfiguration("a secret given inline begins with data:;base64,")
        try:
            return Secret(base64.b64decode(body, validate=True))
        except binascii.Error as error:
            raise InvalidConfiguration("a secret given inline is not base64") from error
    return Secret(read_private_file(source.removeprefix("file:").removeprefix("//")))


def describe_secret_source(source: str) -> str:
    """Returns a text for errors and logs that names the source of a secret. If the source may be the secret itself,
    because a user wrote it in place of its path, the text does not show it."""
    if source.startswith("data:"):
        return "the secret given inline"
    name = os.path.basename(source)
    if len(name) <= SHOWN_NAME_CHARACTERS_MAX and not name.startswith("eyJ"):
        return source
    return f"the file with a name of {len(name)} characters (write the path of a secret, never the secret itself)"


def read_private_file(path: str, bytes_max: int = SECRET_BYTES_MAX) -> bytes:
    """Returns the content of a file that only its owner may read. Raises InvalidConfiguration if other users may read
    it (the error text contains the command that corrects this), or if it belongs to another user than this one or root.
    Also raises it if the file cannot be read, is empty, or has more than `bytes_max` bytes."""
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            if stat.S_IMODE(found.st_mode) & 0o077:
                raise InvalidConfiguration(f"others may read the secret in {path}: chmod 600 {path}")
            if found.st_uid not in (os.geteuid(), 0):
                raise InvalidConfiguration(f"the secret in {path} belongs to another user: chown it, or copy it")
            data = file.read(bytes_max + 1)
    except OSError as error:
        raise InvalidConfiguration(f"{describe_secret_source(path)} cannot be read: {error.strerror}") from None
    if not data or len(data) > bytes_max:
        raise InvalidConfiguration(
            f"{describe_secret_source(path)} is empty or has more than {bytes_max} bytes: it is no secret"
        )
    return data


# ------------------------------------------------------------------------------------------------------- watched
# A value that is made of a secret's source, and made anew when its file changes.
#
# The file is looked at when the value is asked for, at most every FILE_CHECK_INTERVAL_S: no task, no thread. A change
# is another inode, modification time or size. A file that cannot be used keeps the value before in use, and the log
# says so once; at the start the error goes to the caller.


T = TypeVar("T")

FILE_CHECK_INTERVAL_S = 2.0

_LOG = logging.getLogger("magnetar.security")


class WatchedValue(Generic[T]):
    """A value that the function `load` makes from the content of `source` (a source as for `read_secret`), and makes
    again when the content changes. `version` is incremented with each new value. The constructor calls `load`, and
    raises its error."""

    def __init__(self, source: str, load: Callable[[], T], clock: Clock) -> None:
        self.version = 0
        self._source = source
        self._load = load
        self._clock = clock
        self._stamp = _stamp(source)
        self._value = load()
        self._look_at = clock.monotonic() + FILE_CHECK_INTERVAL_S

    def load_current(self) -> T:
        """Returns the current value. If FILE_CHECK_INTERVAL_S seconds have passed since the last check, first checks
        whether the source has changed, and loads the new value. If it cannot be loaded, logs the error, and the old
        value stays."""
        now = self._clock.monotonic()
        if now >= self._look_at:
            self._look_at = now + FILE_CHECK_INTERVAL_S
            self._reload()
        return self._value

    def _reload(self) -> None:
        stamp = _stamp(self._source)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._value = self._load()
        except MagnetarError as error:
            _LOG.error("%s has changed and is not used, what it said before stays: %s", self._source, error)
            return
        self.version += 1
        _LOG.info("%s has changed and is used from now on", self._source)


def _stamp(source: str) -> object:
    try:
        found = os.stat(source.removeprefix("file:").removeprefix("//"))
    except (OSError, ValueError):
        return None  # `env:` and `data:` do not change
    return found.st_ino, found.st_mtime_ns, found.st_size


SETTINGS_BYTES_MAX = 1 << 20
CLOCK_SKEW_S_MAX = 3600
ISSUERS_MAX = 5

TOKEN_ALGORITHMS = (
    "HS256", "HS384", "HS512", "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512"
)  # fmt: skip
"""Of tokens. Those that begin with HS are of a secret key, the others of a public one."""


@dataclass(frozen=True, slots=True)
class TlsSection:
    """The settings for TLS of the listeners: their certificate, and which client certificates they accept."""

    certificate: str = ""  # PEM; it is read again when the file changes, as are the other two
    key: str = ""  # of that certificate
    ca: str = ""  # set: each caller needs a certificate of this authority
    require_client_certificate: bool = True  # no: who has none shows who it is in another way; gRPC asks for none then


@dataclass(frozen=True, slots=True)
class CertificateSection:
    """The settings for callers that authenticate by a client certificate. Requires `ca` of the section [tls]."""

    cluster: str = ""  # of the URI magnetar://CLUSTER/role/NAME; empty: certificates with such a URI are refused
    common_name: bool = True  # of a certificate without a URI it is the role


@dataclass(frozen=True, slots=True)
class TokenSection:
    """The settings for callers that authenticate by a JSON Web Token, as with Pulsar's token provider."""

    secret_key: str = field(default="", repr=False)  # HMAC: a file, env:NAME, or data:;base64,…; or
    public_key: str = ""  # … RSA or EC, likewise; a file of several keys takes tokens of each
    algorithm: str = ""  # the only one that is taken; empty: each that the key can verify
    role_claim: str = "sub"  # which says the role
    audience_claim: str = "aud"  # which is compared with `audience`
    audience: str = ""  # empty: not checked
    clock_skew_s: int = 0  # a token counts so much longer than its `exp` says; up to an hour
    revoked: str = ""  # a file of ids (jti) and roles whose tokens are refused, one a line; empty: none are


@dataclass(frozen=True, slots=True)
class BasicSection:
    """The settings for callers that authenticate by user and password, over TLS or from this machine."""

    file: str = ""  # of `htpasswd -B`: bcrypt, $apr1$ and {SHA}


@dataclass(frozen=True, slots=True)
class OidcSection:
    """The settings for callers that authenticate by a token of OpenID Connect."""

    issuers: tuple[str, ...] = ()  # their URLs, at most five
    audiences: tuple[str, ...] = ()  # a token names one of them
    role_claim: str = "sub"  # which says the role
    clock_skew_s: int = 0  # as in [token]
    require_https: bool = True  # no: also http:// to this machine, for tests
    ca: str = ""  # who signs the issuers' certificates; empty: the system's authorities


@dataclass(frozen=True, slots=True)
class AuthenticationSection:
    """The settings for callers without credentials: the role that they get."""

    anonymous_role: str = ""  # their role, never that of a super user; empty: they are refused


@dataclass(frozen=True, slots=True)
class AuthorizationSection:
    """The settings for authorization: the roles that may do everything."""

    super_users: tuple[str, ...] = ()  # roles that may do everything


@dataclass(frozen=True, slots=True)
class BrokerSection:
    """The settings for the credentials with which this broker authenticates at other brokers."""

    token: str = field(default="", repr=False)  # of one of the super users
    ca: str = ""  # with [tls]: who signs the brokers' certificates


@dataclass(frozen=True, slots=True)
class MembersSection:
    """The settings for the certificates with which the processes of the cluster identify each other; the metadata
    service verifies them."""

    folder: str = ""  # has ROLE.pem and ROLE-key.pem of the processes of this machine
    ca: str = ""  # who signs the members' certificates
    cluster: str = ""  # the name of the cluster in them


@dataclass(frozen=True, slots=True)
class ZookeeperSection:
    """The settings for a cluster whose metadata is stored in ZooKeeper. With credentials, or with a certificate that
    all processes share, only this identity can access the nodes that the processes create."""

    ca: str = ""  # who signs its certificates: the connection is TLS, and the host's name is compared
    certificate: str = ""  # a client certificate, where ZooKeeper asks for one
    key: str = ""  # … and its key
    credentials: str = ""  # a file, or env:NAME, with user:password of ZooKeeper's scheme `digest`


@dataclass(frozen=True, slots=True)
class EtcdSection:
    """The settings for a cluster whose metadata is stored in etcd. What the user may read and write is decided by
    etcd's roles."""

    ca: str = ""  # who signs its certificates: the connection is TLS, and the host's name is compared
    certificate: str = ""  # a client certificate, where etcd asks for one
    key: str = ""  # … and its key
    credentials: str = ""  # a file, or env:NAME, with user:password of a user of etcd


@dataclass(frozen=True, slots=True)
class AuditSection:
    """The settings for the audit log: where administrative operations and refused requests are logged."""

    file: str = ""  # empty: with the server's log


SECURITY_SECTIONS: dict[str, type[Any]] = {
    "tls": TlsSection, "certificate": CertificateSection, "token": TokenSection, "basic": BasicSection,
    "oidc": OidcSection, "authentication": AuthenticationSection, "authorization": AuthorizationSection,
    "broker": BrokerSection, "members": MembersSection, "zookeeper": ZookeeperSection,
    "etcd": EtcdSection, "audit": AuditSection,
}  # fmt: skip
HEADER_SECTIONS = ("token", "oidc", "basic")
AUTHENTICATION_SECTIONS = (*HEADER_SECTIONS, "certificate")
"""The sections by which callers authenticate: with the header `authorization`, and all."""


def list_sections(names: Sequence[str]) -> str:
    """Returns at least two sections as a text: "[token], [oidc] or [basic]"."""
    return f"[{'], ['.join(names[:-1])}] or [{names[-1]}]"


_PATHS = {("tls", "certificate"), ("tls", "key"), ("tls", "ca"), ("token", "secret_key"), ("token", "public_key"),
          ("token", "revoked"),
          ("basic", "file"), ("oidc", "ca"), ("broker", "token"), ("broker", "ca"),
          ("members", "folder"), ("members", "ca"), ("audit", "file"), ("zookeeper", "ca"),
          ("zookeeper", "certificate"), ("zookeeper", "key"), ("zookeeper", "credentials"),
          ("etcd", "ca"), ("etcd", "certificate"), ("etcd", "key"), ("etcd", "credentials")}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SecuritySettings:
    """The sections of the security file. A section that the file does not have is None, or has its defaults if all its
    settings are optional."""

    tls: TlsSection | None = None
    certificate: CertificateSection | None = None
    token: TokenSection | None = None
    basic: BasicSection | None = None
    oidc: OidcSection | None = None
    authentication: AuthenticationSection = AuthenticationSection()
    authorization: AuthorizationSection = AuthorizationSection()
    broker: BrokerSection = BrokerSection()
    members: MembersSection | None = None
    zookeeper: ZookeeperSection | None = None
    etcd: EtcdSection | None = None
    audit: AuditSection = AuditSection()

    @property
    def authenticates_callers(self) -> bool:
        """Returns whether the file has a section by which callers can authenticate."""
        return any(getattr(self, name) for name in AUTHENTICATION_SECTIONS)

    @property
    def tls_files(self) -> TlsFiles | None:
        """Returns the files for TLS of the listeners; None if the file has no section [tls]."""
        if self.tls is None:
            return None
        return TlsFiles(
            self.tls.certificate, self.tls.key, self.tls.ca, optional=not self.tls.require_client_certificate
        )

    @classmethod
    def load(cls, path: str) -> SecuritySettings:
        """Returns the settings in the file at `path`. Raises InvalidConfiguration if the file cannot be read, if a
        setting is unknown or wrong, or if settings contradict each other."""
        try:
            with open(path, "rb") as file:
                text = file.read(SETTINGS_BYTES_MAX).decode()
            found = tomllib.loads(text)
        except OSError as error:
            raise InvalidConfiguration(f"{path} cannot be read: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidConfiguration(f"{path} is not TOML: {error}") from error
        folder = Path(path).absolute().parent
        return _checked(cls(**{name: _section(path, folder, name, value) for name, value in found.items()}), path)


def _section(path: str, folder: Path, name: str, value: object) -> Any:
    kind = SECURITY_SECTIONS.get(name)
    if kind is None or not isinstance(value, dict):
        raise InvalidConfiguration(f"{path}: {name!r} is no section; there are [{'], ['.join(SECURITY_SECTIONS)}]")
    known = {each.name: type(each.default) for each in fields(kind)}
    for key, given in value.items():
        if key not in known:
            raise InvalidConfiguration(f"{path}: [{name}] has no {key!r}; it has {', '.join(known)}")
        wanted = list if known[key] is tuple else known[key]
        texts = isinstance(given, list) and all(isinstance(each, str) and each for each in given)
        if type(given) is not wanted or (wanted is list and not texts):
            shape = "a list of texts" if wanted is list else wanted.__name__
            raise InvalidConfiguration(f"{path}: {key} of [{name}] is {shape}")
    return kind(**{key: _value(folder, (name, key), given) for key, given in value.items()})


def _value(folder: Path, of: tuple[str, str], given: Any) -> Any:
    if isinstance(given, list):
        return tuple(given)
    if of not in _PATHS or not given or given.startswith(("env:", "data:", "file:")):
        return given
    return str(folder / given)


def _checked(settings: SecuritySettings, path: str) -> SecuritySettings:
    for wrong in _faults(settings):
        raise InvalidConfiguration(f"{path}: {wrong}")
    return settings


def _faults(settings: SecuritySettings) -> Iterator[str]:
    tls, token, members = settings.tls, settings.token, settings.members
    if members is not None and not (members.folder and members.ca and members.cluster):
        yield "[members] needs folder, ca and cluster"
    for name, section in (("zookeeper", settings.zookeeper), ("etcd", settings.etcd)):
        if section is not None:
            yield from _store_faults(name, section)
    if tls is not None and not (tls.certificate and tls.key):
        yield "[tls] needs certificate and key"
    if members is not None and tls is None and not settings.authenticates_callers:
        return  # of a bookie or the metadata service
    if not settings.authenticates_callers:
        yield f"nothing says who may call: it needs a section {list_sections(AUTHENTICATION_SECTIONS)}"
    if settings.basic is not None and not settings.basic.file:
        yield "[basic] needs file"
    if tls is not None and not tls.require_client_certificate:
        if not (tls.ca and any(getattr(settings, name) for name in HEADER_SECTIONS)):
            yield (
                "require_client_certificate = false of [tls] is for callers who have a certificate of `ca`, and others "
                f"of {list_sections(HEADER_SECTIONS)}"
            )
        if not settings.broker.token:
            yield "[broker] needs token: without require_client_certificate brokers are not asked for a certificate"
    if settings.certificate is not None and not (tls and tls.ca):
        yield "[certificate] needs `ca` of [tls], whose certificates callers have"
    if token is not None:
        yield from _token_faults(token)
    if (oidc := settings.oidc) is not None:
        if not (1 <= len(oidc.issuers) <= ISSUERS_MAX and oidc.audiences and oidc.role_claim):
            yield f"[oidc] needs 1 to {ISSUERS_MAX} issuers, audiences, and a role_claim"
        if not 0 <= oidc.clock_skew_s <= CLOCK_SKEW_S_MAX:
            yield f"clock_skew_s of [oidc] is 0 to {CLOCK_SKEW_S_MAX}"
    if settings.authentication.anonymous_role in settings.authorization.super_users:
        yield "the anonymous role is no super user"
    if not settings.broker.token and settings.certificate is None:
        yield "[broker] needs token, which this broker shows to the others"


def _store_faults(name: str, section: ZookeeperSection | EtcdSection) -> Iterator[str]:
    if not section.ca:
        yield f"[{name}] needs ca: credentials and data are sent over TLS"
    if section.credentials.startswith("data:"):
        yield f"credentials of [{name}] are a file or env:NAME, not the secret itself"
    if bool(section.certificate) != bool(section.key):
        yield f"[{name}] has a certificate and its key: give both"


def _token_faults(token: TokenSection) -> Iterator[str]:
    if bool(token.secret_key) == bool(token.public_key):
        yield "[token] needs one of secret_key and public_key"
    if token.algorithm and token.algorithm not in TOKEN_ALGORITHMS:
        yield f"algorithm of [token] is one of {', '.join(TOKEN_ALGORITHMS)}"
    if token.algorithm and token.algorithm.startswith("HS") != bool(token.secret_key):
        other = "public_key" if token.secret_key else "secret_key"
        yield f"[token] with algorithm {token.algorithm} needs a {other}"
    if not token.role_claim or not token.audience_claim:
        yield "role_claim and audience_claim of [token] are names"
    if not 0 <= token.clock_skew_s <= CLOCK_SKEW_S_MAX:
        yield f"clock_skew_s of [token] is 0 to {CLOCK_SKEW_S_MAX}"
