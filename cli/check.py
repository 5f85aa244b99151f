"""`magnetar check publish TOPIC`: a deep probe, which publishes a message to the topic and receives it, as a program
does.

It measures three times: until producer and reader are open, until the receipt of the message (its copies are stored
then), and until the reader gets it. The reader reads only new messages, and leaves no subscription. The message has the
property PROBE_NAME; consumers of the topic get it too, so a probe should have a topic of its own.
Guarding tests: tests/cli/test_check.py.

`magnetar health`: asks a running server whether it is ready, or alive. For probes that run a command.

Exit codes: 0 it is; 1 it is not, does not answer, or answers anything else; 2 usage. The reasons are on standard error.
A probe over HTTP (Kubernetes' httpGet) needs no such command and costs less: this one starts an interpreter.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

import click

from ..runtime.clock import SystemClock
from .common.exits import FAILED, OK, CommandFailure
from .common.lazy import LazyCommand, LazyGroup
from .common.output import OUTPUT_KINDS
from .common.session import CommandSession, session_command
from .common.units import FiniteNumber, Interval

if TYPE_CHECKING:
    from http.client import HTTPConnection

    from ..client.blocking.consumer import Reader


DEFAULT_URL = "http://127.0.0.1:8080"
"""Where `magnetar standalone` serves REST, and answers there."""
ANSWER_BYTES_MAX = 16 << 10
READINESS_POLL_S = 0.25
"""Seconds between two questions whether a server is ready."""
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
@click.option(
    "--wait", "wait_s", type=FiniteNumber(0, 86_400), default=0.0, metavar="SECONDS",
    help="Until it is ready, at most so long, as after a restart.",
)  # fmt: skip
def health(url: str | None, live: bool, started: bool, tls_ca: str, timeout_s: float, wait_s: float) -> int:
    """Ask a server whether it is ready. Exit code 0: it is; 1: it is not, and the reasons are printed.

    \b
    Examples:
      magnetar health
      magnetar health --http http://127.0.0.1:7670 --live
      magnetar health --http http://127.0.0.1:7670 --wait 60
      magnetar health --http https://broker-1:8443 --tls-ca ca.pem
    """
    where = url or _url_of_environment() or DEFAULT_URL
    parts = urlsplit(where)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise click.UsageError(f"--http: {where!r} is not http://HOST:PORT or https://HOST:PORT")
    if live and started:
        raise click.UsageError("--live or --started, not both")
    path = parts.path.rstrip("/") or ("/livez" if live else "/startz" if started else "/readyz")
    clock = SystemClock()
    end_s = clock.monotonic() + wait_s
    while True:
        try:
            text = _ask_if_ready(where, path, tls_ca, timeout_s, "" if parts.path.rstrip("/") else path)
        except CommandFailure:
            if clock.monotonic() >= end_s:
                raise
            time.sleep(READINESS_POLL_S)
        else:
            click.echo(text)
            return OK


def _ask_if_ready(where: str, path: str, tls_ca: str, timeout_s: float, shown: str) -> str:
    """Returns the answer of a server that is ready. Raises CommandFailure if it is not, or does not answer."""
    status, text = _ask(where, path, tls_ca, timeout_s)
    if status != 200:
        raise CommandFailure(f"{where}{shown} answers {status}: {text}")
    return text


def _url_of_environment() -> str:
    given = os.environ.get("MAGNETAR_HEALTH", "")
    host, colon, port = given.rpartition(":")
    if not given:
        return ""
    return f"http://{ANY_ADDRESS.get(host, host) if colon else '127.0.0.1'}:{port}"


def _ask(where: str, path: str, tls_ca: str, timeout_s: float) -> tuple[int, str]:
    """Returns the status and the text of the answer. Raises CommandFailure if there is none."""
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
        raise CommandFailure(f"{where} does not answer: {error}") from error


def _connection(where: str, tls_ca: str, timeout_s: float) -> HTTPConnection:
    from http.client import HTTPConnection, HTTPSConnection

    parts = urlsplit(where)
    assert parts.hostname is not None, "it was checked"
    if parts.scheme == "http":
        return HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
    import ssl

    context = ssl.create_default_context(cafile=tls_ca or None)
    return HTTPSConnection(parts.hostname, parts.port, timeout=timeout_s, context=context)


PROBE_NAME = "magnetar-probe"
WARNING_LATENCY_S, CRITICAL_LATENCY_S = 1.0, 5.0
NAGIOS_EXIT_CODES = {"ok": 0, "warning": 1, "critical": 2}
"""Exit codes that Nagios reads."""

check = LazyGroup(
    "check",
    {"publish": LazyCommand(".check", "publish", "Publish a message to a topic and receive it: is all of it quick?")},
    help="Probes for monitoring.\n\nExample: magnetar check publish probes -o nagios",
)


class ProbeTimes(NamedTuple):
    """The times in seconds that a probe (publishing one message and receiving it) has measured: until producer and
    reader are open, then until the receipt, then until the reader has the message. If `error` is set, the probe failed,
    and times that were not measured are 0."""

    connect_s: float = 0.0
    publish_s: float = 0.0
    deliver_s: float = 0.0
    error: str = ""

    @property
    def total_s(self) -> float:
        """Returns the seconds for publishing and delivery together, without connecting."""
        return self.publish_s + self.deliver_s

    def judge_times(self, warn_s: float, critical_s: float) -> str:
        """Returns "critical" if the probe failed or took `critical_s` or longer, "warning" if it took `warn_s` or
        longer, else "ok"."""
        if self.error or self.total_s >= critical_s:
            return "critical"
        return "warning" if self.total_s >= warn_s else "ok"


def probe_topic(session: CommandSession, topic: str) -> ProbeTimes:
    """Publishes one message to the topic, receives it, and returns the measured times. Raises MagnetarError if a step
    fails; TimedOut or the SDK's Timeout if the message is not delivered within the session's time-out."""
    from ..client.model.message_id import MessageId

    clock = SystemClock()
    nonce, began = secrets.token_hex(8), clock.monotonic()
    client = session.client()
    try:
        reader = client.create_reader(topic, MessageId.latest, reader_name=f"{PROBE_NAME}-{nonce}")
        timeout_ms = int(session.timeout_s * 1000)
        producer = client.create_producer(topic, batching_enabled=False, send_timeout_millis=timeout_ms)
        opened = clock.monotonic()
        producer.send(PROBE_NAME.encode(), properties={PROBE_NAME: nonce})
        sent = clock.monotonic()
        _receive(reader, nonce, session.timeout_s)
        return ProbeTimes(opened - began, sent - opened, clock.monotonic() - sent)
    finally:
        client.close()


def _receive(reader: Reader, nonce: str, timeout_s: float) -> None:
    """Reads until the probe's own message. Raises TimedOut."""
    from ..proto.errors import TimedOut

    clock = SystemClock()
    deadline = clock.monotonic() + timeout_s
    while (left_s := deadline - clock.monotonic()) > 0:
        if reader.read_next(timeout_millis=max(1, int(left_s * 1000))).properties().get(PROBE_NAME) == nonce:
            return
    raise TimedOut(f"the message was stored, and not delivered within {timeout_s:g} s")


def format_nagios_line(topic: str, took: ProbeTimes, state: str, warn_s: float, critical_s: float) -> str:
    """Returns the result of a probe as one line for Nagios, with its performance data. `state` is the result of
    `ProbeTimes.judge_times`. `warn_s` and `critical_s`: its limits in seconds."""
    if took.error:
        return f"MAGNETAR CRITICAL - {topic}: {' '.join(took.error.split())}".replace("|", "/")
    text = f"published in {took.publish_s:.3f} s, delivered in {took.deliver_s:.3f} s"
    numbers = (
        f"total={took.total_s:.6f}s;{warn_s:g};{critical_s:g};0 connect={took.connect_s:.6f}s "
        f"publish={took.publish_s:.6f}s deliver={took.deliver_s:.6f}s"
    )
    return f"MAGNETAR {state.upper()} - {topic}: {text}|{numbers}"


def format_prometheus_page(topic: str, took: ProbeTimes) -> str:
    """Returns the result of a probe as metrics for the textfile collector of Prometheus' node_exporter."""
    label = topic.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    lines = [
        "# HELP magnetar_check_publish_up Whether a message was published and received.",
        "# TYPE magnetar_check_publish_up gauge", f'magnetar_check_publish_up{{topic="{label}"}} {int(not took.error)}',
    ]  # fmt: skip
    if not took.error:
        lines += [
            "# HELP magnetar_check_publish_seconds How long each step of the probe took.",
            "# TYPE magnetar_check_publish_seconds gauge",
        ]
        for step, value in (("connect", took.connect_s), ("publish", took.publish_s), ("deliver", took.deliver_s)):
            lines.append(f'magnetar_check_publish_seconds{{topic="{label}",step="{step}"}} {value:.6f}')
    return "\n".join(lines)


@session_command(
    click.option("--warn", "warn_s", type=Interval(), default=WARNING_LATENCY_S, show_default=True, metavar="TIME",
                 help="Publish and delivery together; from here on -o nagios warns."),
    click.option("--critical", "critical_s", type=Interval(), default=CRITICAL_LATENCY_S, show_default=True,
        metavar="TIME",
                 help="… and from here on the check has failed."),
)  # fmt: skip
def publish(session: CommandSession, topic: str, warn_s: float, critical_s: float) -> None:
    """Publish a message to a topic and receive it: whether that works, and how long it takes.

    The message is stored in its copies when it is published. Consumers of the topic get it too: probe a topic of its
    own, with a short retention. Exit code 0, or 1 if it fails or takes as long as --critical; with -o nagios 0, 1
    (warning), 2 (critical). -o prometheus is a page for the textfile collector of node_exporter.

    \b
    Examples:
      magnetar check publish probes
      magnetar check publish probes -o nagios --warn 200ms --critical 2s
      magnetar check publish probes -o prometheus
    """
    from ..proto.errors import MagnetarError

    kind = session.out.kind
    try:
        took = probe_topic(session, topic)
    except MagnetarError as error:
        if kind not in ("nagios", "prometheus"):
            raise
        took = ProbeTimes(error=str(error))
    state = took.judge_times(warn_s, critical_s)
    if kind == "nagios":
        click.echo(format_nagios_line(topic, took, state, warn_s, critical_s))
        sys.exit(NAGIOS_EXIT_CODES[state])
    if kind == "prometheus":
        click.echo(format_prometheus_page(topic, took))
    elif kind in ("text", "table", "wide"):
        click.echo(f"{state}: published in {took.publish_s:.3f} s, delivered in {took.deliver_s:.3f} s "
                   f"(connected in {took.connect_s:.3f} s)")  # fmt: skip
    else:
        session.out.print_record({
            "topic": topic, "state": state, "connectSeconds": took.connect_s, "publishSeconds": took.publish_s,
            "deliverSeconds": took.deliver_s,
        })  # fmt: skip
    sys.exit(FAILED if state == "critical" else OK)


for _option in publish.params:  # the form of its answer is one more than those of other commands
    if _option.name == "output":
        _option.type = click.Choice(("text", "json", "prometheus", "nagios", *OUTPUT_KINDS))
        _option.default, _option.help = "text", "How the answer is written."
