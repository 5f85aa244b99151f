"""What every administering command has: a server's address, an output, and the admin client.

`--url` (or `MAGNETAR_URL`) is a service URL as the SDK takes it (client/connect/service_url.py). Who calls is said by
`--token` or by `--tls-cert`; a secret itself is never an argument, which other users of the machine would see.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from .output import Output

if TYPE_CHECKING:
    from ...client.admin import Admin
    from ...client.blocking.client import Client
    from ...client.connect.authentication import Authentication

DEFAULT_URL = "magnetar://127.0.0.1:7650"


class Session:
    """A command's server and output; `admin` connects at its first use, `close` ends it."""

    def __init__(
        self, url: str, out: Output, timeout_s: float, token: str = "", trust: str = "", certificate: str = "",
        key: str = "",
    ) -> None:  # fmt: skip
        from ...client.connect.authentication import caller_access
        from ...client.connect.service_url import parse_service_url

        self.url, self.out, self.timeout_s = url, out, timeout_s
        self._trust = trust
        self._authentication = _authentication(token, certificate, key)
        # raises before any request
        caller_access(parse_service_url(url), self._authentication, {"tls_trust_certs_file_path": trust})
        self._admin: Admin | None = None
        self.operator: Any = None  # who asks the bookies (cli/storage/operator.py)

    @property
    def admin(self) -> Admin:
        if self._admin is None:
            from ...client.admin import Admin

            self._admin = Admin(
                self.url, timeout_s=self.timeout_s, authentication=self._authentication,
                tls_trust_certs_file_path=self._trust,
            )  # fmt: skip
        return self._admin

    def client(self) -> Client:
        """A client for messages; it is the caller's to close."""
        from ...client.blocking.client import Client

        return Client(
            self.url, self._authentication, operation_timeout_seconds=max(1, int(self.timeout_s)),
            tls_trust_certs_file_path=self._trust or None,
        )  # fmt: skip

    def close(self) -> None:
        if self._admin is not None:
            self._admin.close()


def _authentication(token: str, certificate: str, key: str) -> Authentication | None:
    """UsageError: the values contradict each other. A token is read again for each connection."""
    from ...client.connect.authentication import AuthenticationTLS, AuthenticationToken

    if token and (certificate or key):
        raise click.UsageError("--token and --tls-cert are two ways to say who you are: give one")
    if bool(certificate) != bool(key):
        raise click.UsageError("--tls-cert and --tls-key belong together: give both")
    if token:
        return AuthenticationToken(lambda: read_token(token))
    return AuthenticationTLS(certificate, key) if certificate else None


def read_token(source: str) -> str:
    """`source`: `env:NAME`, or a file's path, with or without `file:`. InvalidConfiguration."""
    from ...proto.errors import InvalidConfiguration

    if source.startswith("env:"):
        value = os.environ.get(source.removeprefix("env:"))
        if not value:
            raise InvalidConfiguration(f"--token {source}: the environment has no such variable")
        return value
    path = source.removeprefix("file:")
    try:
        with open(path, encoding="ascii") as file:
            return file.read(TOKEN_MAX).strip()
    except (OSError, ValueError) as error:
        raise InvalidConfiguration(f"--token {path} cannot be read as a token: {type(error).__name__}") from error


TOKEN_MAX = 16 << 10
"""Characters of a token that are read."""

YES = click.option("-y", "--yes", is_flag=True, help="Do not ask.")


def confirm(what: str, yes: bool) -> None:
    """Asks a person before data are lost for good. No: code 130. Without a terminal there is no answer: code 2."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"{what}? There is no terminal to ask at: give --yes")
    click.confirm(f"{what}?", abort=True, err=True)


def connected(function: Callable[..., None]) -> Callable[..., None]:
    """Adds --url, -o, --timeout, --token and --tls-… to a command and gives it its Session first."""

    @click.option("--url", envvar="MAGNETAR_URL", default=DEFAULT_URL, show_default=True, help="The server.")
    @click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
    @click.option("--timeout", type=click.FloatRange(0.1), default=30.0, show_default=True, help="Seconds.")
    @click.option("--token", envvar="MAGNETAR_TOKEN", default="", metavar="FILE|env:NAME", help="Where your token is.")
    @click.option("--tls-ca", envvar="MAGNETAR_TLS_CA", default="", metavar="FILE", help="Who signs its certificate.")
    @click.option("--tls-cert", envvar="MAGNETAR_TLS_CERT", default="", metavar="FILE", help="Your certificate.")
    @click.option("--tls-key", envvar="MAGNETAR_TLS_KEY", default="", metavar="FILE", help="Its private key.")
    @wraps(function)
    def command(*args: Any, **options: Any) -> None:
        url, output, timeout_s = options.pop("url"), Output(options.pop("output")), options.pop("timeout")
        who = [options.pop(name) for name in ("token", "tls_ca", "tls_cert", "tls_key")]
        session = Session(url, output, timeout_s, *who)
        try:
            function(session, *args, **options)
        finally:
            session.close()

    return command
