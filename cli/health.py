"""`magnetar health`: asks a running server whether it is ready, or alive. For probes that run a command.

Exit codes: 0 it is; 1 it is not, does not answer, or answers anything else; 2 usage. The reasons are on standard error.
A probe over HTTP (Kubernetes' httpGet) needs no such command and costs less: this one starts an interpreter.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click

from .common.exits import OK, Failure
from .common.units import FiniteNumber

if TYPE_CHECKING:
    from http.client import HTTPConnection

DEFAULT_URL = "http://127.0.0.1:8080"
"""Where `magnetar standalone` serves REST, and answers there."""
ANSWER_BYTES_MAX = 16 << 10
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
"""Addresses at which a server listens, and where it is reached."""


@click.command()
@click.option(
    "--http", "url", default=None, metavar="URL",
    help=f"Of the server: its --health address, or a broker's REST (default: MAGNETAR_HEALTH, else {DEFAULT_URL}).",
)  # fmt: skip
@click.option("--live", is_flag=True, help="Ask whether its event loop runs (/livez), not whether it serves (/readyz).")
@click.option("--started", is_flag=True, help="Ask whether it has started, ready or not (/startz).")
@click.option("--tls-ca", envvar="MAGNETAR_TLS_CA", default="", metavar="FILE", help="Who signs its certificate.")
@click.option(
    "--timeout", "timeout_s", type=FiniteNumber(0.1, 600), default=4.0, show_default=True,
    help="Seconds to wait for its answer.",
)  # fmt: skip
def health(url: str | None, live: bool, started: bool, tls_ca: str, timeout_s: float) -> int:
    """Ask a server whether it is ready: exit code 0, or 1 and the reasons.

    \b
    Examples:
      magnetar health
      magnetar health --http http://127.0.0.1:7670 --live
      magnetar health --http https://broker-1:8443 --tls-ca ca.pem
    """
    where = url or _url_of_environment() or DEFAULT_URL
    parts = urlsplit(where)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise click.UsageError(f"--http: {where!r} is not http://HOST:PORT or https://HOST:PORT")
    if live and started:
        raise click.UsageError("--live or --started, not both")
    path = parts.path.rstrip("/") or ("/livez" if live else "/startz" if started else "/readyz")
    status, text = _ask(where, path, tls_ca, timeout_s)
    if status == 200:
        click.echo(text)
        return OK
    raise Failure(f"{where}{'' if parts.path.rstrip('/') else path} answers {status}: {text}")


def _url_of_environment() -> str:
    given = os.environ.get("MAGNETAR_HEALTH", "")
    host, colon, port = given.rpartition(":")
    if not given:
        return ""
    return f"http://{ANY_ADDRESS.get(host, host) if colon else '127.0.0.1'}:{port}"


def _ask(where: str, path: str, tls_ca: str, timeout_s: float) -> tuple[int, str]:
    """Returns the status and the text of the answer. Raises Failure if there is none."""
    from http.client import HTTPException

    try:
        connection = _connection(where, tls_ca, timeout_s)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read(ANSWER_BYTES_MAX).decode("utf-8", "replace").strip()
        finally:
            connection.close()
    except (OSError, ValueError, HTTPException) as error:
        raise Failure(f"{where} does not answer: {error}") from error


def _connection(where: str, tls_ca: str, timeout_s: float) -> HTTPConnection:
    from http.client import HTTPConnection, HTTPSConnection

    parts = urlsplit(where)
    assert parts.hostname is not None, "it was checked"
    if parts.scheme == "http":
        return HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
    import ssl

    context = ssl.create_default_context(cafile=tls_ca or None)
    return HTTPSConnection(parts.hostname, parts.port, timeout=timeout_s, context=context)
