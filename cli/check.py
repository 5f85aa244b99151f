"""`magnetar check publish TOPIC`: a deep probe: a message goes to the topic and comes back, all the way as a program's.

What is measured: the connection with both ends open, the receipt of the message (which is stored in its copies then),
and its delivery to a reader. The reader reads new messages alone and leaves nothing behind; the message has the
property PROBE, and consumers of the topic get it too: probe a topic of its own.
Guarding tests: tests/cli/test_check.py.
"""

from __future__ import annotations

import secrets
import sys
from typing import TYPE_CHECKING, NamedTuple

import click

from ..runtime.clock import SystemClock
from .common.exits import FAILED, OK
from .common.lazy import LazyCommand, LazyGroup
from .common.output import KINDS
from .common.session import Session, session_command
from .common.units import Interval

if TYPE_CHECKING:
    from ..client.blocking.consumer import Reader

PROBE = "magnetar-probe"
WARN_S, CRITICAL_S = 1.0, 5.0
NAGIOS = {"ok": 0, "warning": 1, "critical": 2}
"""Exit codes that Nagios reads."""

check = LazyGroup(
    "check",
    {"publish": LazyCommand(".check", "publish", "Publish a message to a topic and receive it: is all of it quick?")},
    help="Probes for monitoring.\n\nExample: magnetar check publish probes -o nagios",
)


class ProbeTimes(NamedTuple):
    """The times that a probe measured, in seconds. If `error` is set, the probe failed, and times that were not
    measured are 0."""

    connect_s: float = 0.0
    publish_s: float = 0.0
    deliver_s: float = 0.0
    error: str = ""

    @property
    def total_s(self) -> float:
        return self.publish_s + self.deliver_s

    def judge(self, warn_s: float, critical_s: float) -> str:
        if self.error or self.total_s >= critical_s:
            return "critical"
        return "warning" if self.total_s >= warn_s else "ok"


def probe(session: Session, topic: str) -> ProbeTimes:
    """Publishes one message and receives it. Raises MagnetarError, TimedOut too."""
    from ..client.model.message_id import MessageId

    clock = SystemClock()
    nonce, began = secrets.token_hex(8), clock.monotonic()
    client = session.client()
    try:
        reader = client.create_reader(topic, MessageId.latest, reader_name=f"{PROBE}-{nonce}")
        timeout_ms = int(session.timeout_s * 1000)
        producer = client.create_producer(topic, batching_enabled=False, send_timeout_millis=timeout_ms)
        opened = clock.monotonic()
        producer.send(PROBE.encode(), properties={PROBE: nonce})
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
        if reader.read_next(timeout_millis=max(1, int(left_s * 1000))).properties().get(PROBE) == nonce:
            return
    raise TimedOut(f"the message was stored, and not delivered within {timeout_s:g} s")


def nagios_line(topic: str, took: ProbeTimes, state: str, warn_s: float, critical_s: float) -> str:
    """Returns the line that Nagios shows, with its performance data."""
    if took.error:
        return f"MAGNETAR CRITICAL - {topic}: {' '.join(took.error.split())}".replace("|", "/")
    text = f"published in {took.publish_s:.3f} s, delivered in {took.deliver_s:.3f} s"
    numbers = (
        f"total={took.total_s:.6f}s;{warn_s:g};{critical_s:g};0 connect={took.connect_s:.6f}s "
        f"publish={took.publish_s:.6f}s deliver={took.deliver_s:.6f}s"
    )
    return f"MAGNETAR {state.upper()} - {topic}: {text}|{numbers}"


def prometheus_page(topic: str, took: ProbeTimes) -> str:
    """Returns a page for node_exporter's textfile collector."""
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
    click.option("--warn", "warn_s", type=Interval(), default=WARN_S, show_default=True, metavar="TIME",
                 help="Publish and delivery together; from here on -o nagios warns."),
    click.option("--critical", "critical_s", type=Interval(), default=CRITICAL_S, show_default=True, metavar="TIME",
                 help="… and from here on the check has failed."),
)  # fmt: skip
def publish(session: Session, topic: str, warn_s: float, critical_s: float) -> None:
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
        took = probe(session, topic)
    except MagnetarError as error:
        if kind not in ("nagios", "prometheus"):
            raise
        took = ProbeTimes(error=str(error))
    state = took.judge(warn_s, critical_s)
    if kind == "nagios":
        click.echo(nagios_line(topic, took, state, warn_s, critical_s))
        sys.exit(NAGIOS[state])
    if kind == "prometheus":
        click.echo(prometheus_page(topic, took))
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
        _option.type = click.Choice(("text", "json", "prometheus", "nagios", *KINDS))
        _option.default, _option.help = "text", "How the answer is written."
