"""What every administering command has: a server's address, an output, and the admin client.

`--url` (or `MAGNETAR_URL`) is a service URL as the SDK takes it (client/service_url.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from .output import Output

if TYPE_CHECKING:
    from ...client.admin import Admin

DEFAULT_URL = "magnetar://127.0.0.1:7650"


class Session:
    """A command's server and output; `admin` connects at its first use, `close` ends it."""

    def __init__(self, url: str, out: Output, timeout_s: float) -> None:
        from ...client.connect.service_url import parse_service_url

        parse_service_url(url)  # raises before any request
        self.url, self.out, self.timeout_s = url, out, timeout_s
        self._admin: Admin | None = None

    @property
    def admin(self) -> Admin:
        if self._admin is None:
            from ...client.admin import Admin

            self._admin = Admin(self.url, timeout_s=self.timeout_s)
        return self._admin

    def close(self) -> None:
        if self._admin is not None:
            self._admin.close()


YES = click.option("-y", "--yes", is_flag=True, help="Do not ask.")


def confirm(what: str, yes: bool) -> None:
    """Asks a person before data are lost for good. No: code 130. Without a terminal there is no answer: code 2."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"{what}? There is no terminal to ask at: give --yes")
    click.confirm(f"{what}?", abort=True, err=True)


def connected(function: Callable[..., None]) -> Callable[..., None]:
    """Adds --url, -o and --timeout to a command and gives it its Session first."""

    @click.option("--url", envvar="MAGNETAR_URL", default=DEFAULT_URL, show_default=True, help="The server.")
    @click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
    @click.option("--timeout", type=click.FloatRange(0.1), default=30.0, show_default=True, help="Seconds.")
    @wraps(function)
    def command(*args: Any, **options: Any) -> None:
        session = Session(options.pop("url"), Output(options.pop("output")), options.pop("timeout"))
        try:
            function(session, *args, **options)
        finally:
            session.close()

    return command
