"""The access of a query to the cluster (`QueryAccess`): its service URL and credentials, from options, from environment
variables and from a profile.

| option | environment | profile | meaning |
|---|---|---|---|
| `service.url` | MAGNETAR_URL | url | the service URL of the cluster |
| `token` | MAGNETAR_TOKEN | token | a token, or its place: `file:PATH`, `env:NAME` (in a profile only the place) |
| `tls.trust.certs.file` | MAGNETAR_TLS_CA | tls_ca | the authorities that sign the brokers' certificates |
| `tls.certificate.file` | MAGNETAR_TLS_CERT | tls_cert | the certificate of the query |
| `tls.private.key.file` | MAGNETAR_TLS_KEY | tls_key | the private key of that certificate |
| `auth.plugin`, `auth.params` | | | any of the SDK's credentials, by Pulsar's names: basic, oauth2, … |
| `profile` | MAGNETAR_PROFILE | | the name of a profile (cli/common/profiles.py) |

An option overrides the environment, and both override the profile; if an option, the environment or the profile has any
credentials, they replace all credentials of a lower one. The driver reads environment and profile when a query is
planned.

**Where credentials are.** The objects that Spark ships, prints and stores name a file or variable, and never contain
its content: each Python process reads the content when it needs it, again for each call, so that running streams use a
token that was renewed in its place. If an option itself is a credential, the query's tasks have it in memory; Spark
hides the values of options with such names in plans. The connector's reprs, errors and log lines never contain a
credential. Guard: tests/spark/test_access.py."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..cli.common.profiles import load_profile
from ..client.admin import AdminClient
from ..client.aio import Client
from ..client.connect.authentication import (
    Authentication,
    AuthenticationTLS,
    AuthenticationToken,
    UnsupportedAuthentication,
    make_authentication_by_name,
)
from ..proto.errors import InvalidConfiguration, MagnetarError

OPTIONS = {
    "service.url", "token", "token.file", "tls.trust.certs.file", "tls.certificate.file", "tls.private.key.file",
    "auth.plugin", "auth.params", "profile",
}  # fmt: skip
_ENVIRONMENT = {
    "url": "MAGNETAR_URL", "token": "MAGNETAR_TOKEN", "tls_ca": "MAGNETAR_TLS_CA", "tls_cert": "MAGNETAR_TLS_CERT",
    "tls_key": "MAGNETAR_TLS_KEY",
}  # fmt: skip
_NAMES = {
    "url": "service.url", "token": "token", "tls_ca": "tls.trust.certs.file", "tls_cert": "tls.certificate.file",
    "tls_key": "tls.private.key.file",
}  # fmt: skip
_CREDENTIALS = {"token", "tls.certificate.file", "tls.private.key.file", "auth.plugin", "auth.params"}
_PLACES = ("file:", "env:")
_TOKEN_HEAD = "eyJ"
"""The first characters of every JWT."""
NAME_MAX = 200
"""Most characters of a place that an error message contains; if a token was given by mistake, it is longer than a
place."""
FILE_BYTES_MAX = 1 << 20
"""Largest file from which a credential is read, in bytes; keys and chains of certificates have some thousands."""


@dataclass(frozen=True, slots=True)
class QueryAccess:
    """The service URL and the credentials of one Spark query. `token` and `params` are credentials, or name the file or
    variable that contains them (`file:PATH`, `env:NAME`); the other credentials are paths of PEM files. An empty text:
    not given. The repr does not show `token` and `params`. `client` and `admin` raise the errors of
    `authentication`."""

    url: str
    token: str = field(default="", repr=False)  # where it is (`_PLACES`), or a token
    trust: str = ""  # paths of PEM files
    certificate: str = ""
    key: str = ""
    plugin: str = ""
    params: str = field(default="", repr=False)  # of the plugin, or where they are

    def authentication(self) -> Authentication | None:
        """Returns the credentials for a client; None if there are none. A token is read again from its file or variable
        whenever a server needs it. Raises InvalidConfiguration or OperationNotSupported if the credentials are not
        valid."""
        if self.token:
            return AuthenticationToken(lambda: _secret(self.token))
        if self.plugin:
            found = make_authentication_by_name(self.plugin, _secret(self.params))
            if isinstance(found, UnsupportedAuthentication):
                raise InvalidConfiguration(f"{self.plugin}: libraries of Pulsar's C++ client are not loaded")
            return found
        return AuthenticationTLS(self.certificate, self.key) if self.certificate else None

    def client(self, **settings: Any) -> Client:
        """Returns a new asyncio client with these credentials; it connects when it is first used. `settings`: further
        parameters of `Client`. The caller must close it."""
        trust = self.trust or None
        return Client(
            self.url, self.authentication(), stats_interval_in_seconds=0, tls_trust_certs_file_path=trust, **settings
        )

    def admin(self, timeout_s: float) -> AdminClient:
        """Returns a new admin client with these credentials, whose requests have the time-out `timeout_s`. The caller
        must close it."""
        return AdminClient(
            self.url, timeout_s=timeout_s, authentication=self.authentication(), tls_trust_certs_file_path=self.trust
        )

    def check(self) -> None:
        """Raises InvalidConfiguration if credentials contradict each other or are incomplete, or if the SDK would
        refuse them or the service URL. Sends nothing."""
        if self.token and (self.certificate or self.plugin):
            other = "tls.certificate.file" if self.certificate else "auth.plugin"
            raise InvalidConfiguration(f"options 'token' and {other!r} are two ways to say who you are: give one")
        if self.certificate and self.plugin:
            raise InvalidConfiguration("options 'tls.certificate.file' and 'auth.plugin' are two ways: give one")
        if self.token.startswith(("/", "./", "../", "~")):
            raise InvalidConfiguration("option 'token' is a token, or where it is: a file is named file:PATH")
        if bool(self.certificate) != bool(self.key):
            raise InvalidConfiguration("options 'tls.certificate.file' and 'tls.private.key.file' go together")
        if bool(self.plugin) != bool(self.params):
            raise InvalidConfiguration("options 'auth.plugin' and 'auth.params' go together")
        try:
            self.client()  # which connects when it is used
        except MagnetarError as error:
            raise InvalidConfiguration(f"option 'service.url' and its credentials: {error.message}") from None

    def list_credential_sources(self) -> Iterator[str]:
        """Yields the names of the files and variables (`file:PATH`, `env:NAME`) that contain the credentials."""
        yield from (each for each in (self.token, self.params) if each.startswith(_PLACES))
        yield from (f"file:{each}" for each in (self.trust, self.certificate, self.key) if each)


def parse_query_access(found: dict[str, str]) -> QueryAccess:
    """Returns the QueryAccess of a query, made from its options (by their canonical names). Missing options are taken
    from the environment and the profile. Raises InvalidConfiguration if there is no service URL, or if the URL, the
    credentials or the profile are wrong."""
    profile = _profile(found)
    said = {name: value for name in OPTIONS if (value := found.get(name, "").strip())}
    _token_of_plugin(said)
    environment = {name: os.environ.get(variable, "") for name, variable in _ENVIRONMENT.items()}
    if environment["token"].startswith(_TOKEN_HEAD):  # the token itself: each process reads it there
        environment["token"] = f"env:{_ENVIRONMENT['token']}"
    for source in (environment, profile):
        says_who = bool(_CREDENTIALS & said.keys())
        for name, value in source.items():
            option = _NAMES[name]
            if value and option not in said and not (says_who and option in _CREDENTIALS):
                said[option] = _placed(value) if name == "token" else value
    url = said.get("service.url", "")
    if not url:
        raise InvalidConfiguration(
            "option 'service.url' is required, for example magnetar://localhost:7650; or MAGNETAR_URL, or a profile"
        )
    if "@" in url:  # a plan shows the options
        raise InvalidConfiguration("option 'service.url' has no user and password")
    access = QueryAccess(
        url, said.get("token", ""), said.get("tls.trust.certs.file", ""), said.get("tls.certificate.file", ""),
        said.get("tls.private.key.file", ""), said.get("auth.plugin", ""), said.get("auth.params", ""),
    )  # fmt: skip
    access.check()
    return access


def _profile(found: Mapping[str, str]) -> Mapping[str, str]:
    name = found.get("profile", "").strip() or os.environ.get("MAGNETAR_PROFILE", "")
    try:
        return load_profile(name)
    except RuntimeError:  # no home folder, as in many containers
        if name:
            raise InvalidConfiguration(f"profile {name!r}: there is no home folder to read it from") from None
        return {}


def _placed(source: str) -> str:
    """Returns the place of a credential as `file:PATH` or `env:NAME`. `source`: a path or env:NAME, as in a command."""
    return source if source.startswith(_PLACES) else f"file:{source}"


def _token_of_plugin(said: dict[str, str]) -> None:
    """Replaces Pulsar's parameters of a token by our option `token`."""
    if said.get("auth.plugin", "").rpartition(".")[2].lower().removeprefix("authentication") != "token":
        return
    params = said.get("auth.params", "")
    if not params.startswith(("token:", *_PLACES)):  # Spark shows it in plans unless it has one of these words
        raise InvalidConfiguration("option 'auth.params' of a token begins with token:, file: or env:")
    if "token" in said:
        raise InvalidConfiguration("options 'token' and 'auth.plugin' are two ways to say who you are: give one")
    del said["auth.plugin"], said["auth.params"]
    said["token"] = params.removeprefix("token:")


def _secret(text: str) -> str:
    """Returns the current content of the place that `text` names; `text` itself if it names none. Raises
    InvalidConfiguration if the place cannot be read."""
    if not text.startswith(_PLACES):
        return text
    found = _read_place(text)
    if found is None or not found.strip():
        kind, _, name = text.partition(":")
        what = "the environment has no variable" if kind == "env" else "there is no credential in the file"
        shown = name if len(name) <= NAME_MAX and _TOKEN_HEAD not in name else "that is named"  # perhaps the token
        raise InvalidConfiguration(f"{what} {shown}: every Python process of the query needs it")
    try:
        return found.decode().strip()
    except UnicodeDecodeError:
        raise InvalidConfiguration("a credential's file is not UTF-8 text") from None


def _read_place(place: str) -> bytes | None:
    kind, _, name = place.partition(":")
    if kind == "env":
        return os.environb.get(os.fsencode(name))
    try:
        with open(name.removeprefix("//"), "rb") as file:
            return file.read(FILE_BYTES_MAX)
    except OSError:
        return None


def digest_credential_sources(places: Iterable[str]) -> str:
    """Returns a digest of the present content of the files and variables `places` (`file:PATH`, `env:NAME`). It changes
    when their content changes. A file or variable that cannot be read counts as empty."""
    found = hashlib.sha256()
    for place in places:
        content = _read_place(place) or b""
        found.update(len(content).to_bytes(8, "big") + content)
    return found.hexdigest()
