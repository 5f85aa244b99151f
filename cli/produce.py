"""`magnetar produce`: sends messages from the command line, a file or a pipe to a topic.

Also in this file, below its heading: `magnetar consume` (consume).
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import click

from ..proto.states import SUBSCRIPTION_TYPE_NUMBERS
from ..runtime.clock import SystemClock
from .common.exits import CommandFailure
from .common.output import RAW_OPTION
from .common.session import NAME_COMPLETIONS, CommandSession, with_session
from .common.units import FiniteNumber

if TYPE_CHECKING:
    from ..client.common.errors import Result
    from ..client.model.message import Message
    from .common.output import CommandOutput

def _is_text(_context: click.Context, option: click.Parameter, given: Any) -> Any:
    """Checks an option's text. Bytes of the command line that are not UTF-8 arrive as lone surrogates, which no
    message can contain."""
    for each in (given,) if isinstance(given, str) else given or ():
        try:
            each.encode()
        except UnicodeEncodeError as error:
            raise click.BadParameter(f"{each!r} is not UTF-8; send bytes with -f", param=option) from error
    return given


class _WithHint(click.Command):
    """A command whose message is an option: one that is given as an argument is answered with how."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            if "unexpected extra argument" not in error.message:
                raise
            raise click.UsageError(f"{error.message}: a message is given by -m MESSAGE", ctx) from error


@click.command(cls=_WithHint)
@click.argument("topic", shell_complete=NAME_COMPLETIONS["topic"])
@click.option("-m", "--message", "messages", multiple=True, callback=_is_text, help="A message; may be given often.")
@click.option(
    "-f", "--file", "path", type=click.Path(exists=True, dir_okay=False, allow_dash=True), help="A line each."
)
@click.option("-l", "--lines", is_flag=True, help="The lines of standard input, a message each.")
@click.option(
    "-n", "--count", type=click.IntRange(1, 10**12), default=None,
    help="Send all of it so often; {i} in -m and -k is then the number of the message, from 1.  [default: 1]",
)  # fmt: skip
@click.option(
    "-r", "--rate", type=FiniteNumber(0.001), default=None, help="Messages per second (default: all it takes)."
)
@click.option("-k", "--key", default=None, callback=_is_text, help="Key of the messages.")
@click.option(
    "-p", "--properties", multiple=True, callback=_is_text, metavar="KEY=VALUE,…", help="Properties of the messages."
)
@click.option(
    "-H", "--header", "headers", multiple=True, callback=_is_text, metavar="KEY:VALUE", help="A property of them."
)
@click.option("-c", "--compression", type=click.Choice(["none", "lz4", "zlib", "zstd", "snappy"]), default="none")
@click.option("--deliver-after", default=None, metavar="TIME", help="On shared types not before: 10s, 5m, 2h, 3d.")
@click.option("--deliver-at", type=click.IntRange(1), default=None, metavar="MS", help="… or this time, in ms UTC.")
@with_session
def produce(
    session: CommandSession,
    topic: str,
    messages: tuple[str, ...],
    path: str | None,
    lines: bool,
    count: int | None,
    rate: float | None,
    key: str | None,
    properties: tuple[str, ...],
    headers: tuple[str, ...],
    compression: str,
    deliver_after: str | None,
    deliver_at: int | None,
) -> None:
    """Send messages to a topic. Without -m and -f, each line of standard input is a message.

    \b
    Examples:
      magnetar produce orders -m hello -m world -H trace:4711
      magnetar produce orders -n 5 -m "order {i}" -k "customer-{i}"
      magnetar produce orders -m "remind me" --deliver-after 3d
      seq 1000 | magnetar produce orders --rate 100 -k customer-7
    """
    from .common import units
    from .common.output import show_progress

    given = units.parse_properties(properties) | dict(map(_header, headers))
    after_s = units.parse_duration(deliver_after, 1)
    if after_s is not None and after_s < 0:
        raise click.UsageError("--deliver-after is a time from now on, such as 10s")
    if after_s is not None and deliver_at is not None:
        raise click.UsageError("either --deliver-after or --deliver-at")
    if lines and (messages or path is not None):
        raise click.UsageError("either -m, -f or -l")
    payloads = _payloads(messages, "-" if lines else path, count or 1)
    total = len(messages) * (count or 1) if messages else None
    numbered = count is not None and bool(messages)
    with _Sending(session, topic, compression) as sending, show_progress(f"produce {topic}", total) as counted:
        options: dict[str, Any] = {"properties": given or None, "partition_key": key}
        if after_s is not None:
            options["deliver_after"] = timedelta(seconds=after_s)
        elif deliver_at is not None:
            options["deliver_at"] = deliver_at
        for sent, payload in enumerate(_paced(payloads, rate), 1):
            if numbered:
                payload = payload.replace(NUMBER_PLACEHOLDER, b"%d" % sent)
                options["partition_key"] = key and key.replace(NUMBER_PLACEHOLDER.decode(), str(sent))
            sending.send(payload, options)
            if sent % 1000 == 0 or rate:
                counted(sent)
        confirmed = sending.finish()
    session.out.print_result_text(f"{confirmed:,} messages confirmed", topic=topic, messages=confirmed)


NUMBER_PLACEHOLDER = b"{i}"
"""In a message or a key that is sent often: its number."""


def _header(text: str) -> tuple[str, str]:
    key, mark, value = text.partition(":")
    if not mark or not key.strip():
        raise click.UsageError(f"{text[:80]!r} is not KEY:VALUE")
    return key.strip(), value.strip()


def _payloads(messages: tuple[str, ...], path: str | None, count: int) -> Iterable[bytes]:
    if messages and path is not None:
        raise click.UsageError("either -m or -f")
    if messages:
        encoded = [message.encode() for message in messages]
        return chain.from_iterable(repeat(encoded, count))
    if path is None and sys.stdin.isatty():
        raise click.UsageError("what to send? -m MESSAGE, -f FILE, or lines on standard input")
    if path in (None, "-"):
        lines = map(_without_end, sys.stdin.buffer)
        return lines if count == 1 else chain.from_iterable(repeat(list(lines), count))
    text = Path(str(path))
    return chain.from_iterable(_lines(text) for _ in range(count))


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from map(_without_end, file)


def _without_end(line: bytes) -> bytes:
    """Returns the line without LF or CR LF; any other CR is a part of it."""
    return line.removesuffix(b"\n").removesuffix(b"\r") if line.endswith(b"\n") else line


def _paced(payloads: Iterable[bytes], rate: float | None) -> Iterator[bytes]:
    """Yields one payload every 1/rate seconds, on a fixed schedule: after a delay it catches up."""
    clock = SystemClock()
    start = clock.monotonic()
    for at, payload in enumerate(payloads):
        if rate is not None:
            time.sleep(max(0.0, start + at / rate - clock.monotonic()))
        yield payload


class _Sending:
    """Sends messages without waiting for each; `finish` waits for all and returns how many are stored, or raises."""

    def __init__(self, session: CommandSession, topic: str, compression: str) -> None:
        from ..client.common.errors import Result
        from ..client.model.settings import CompressionType as kinds

        by_name = {"none": kinds.NONE, "lz4": kinds.LZ4, "zlib": kinds.ZLib, "zstd": kinds.ZSTD, "snappy": kinds.SNAPPY}
        self._ok = Result.Ok
        self._confirmed = 0
        self._failures: list[Result] = []
        self._client = session.client()
        try:
            self._producer = self._client.create_producer(
                topic,
                batching_enabled=True,
                block_if_queue_full=True,
                compression_type=by_name[compression],
                send_timeout_millis=int(session.timeout_s * 1000),
            )
        except BaseException:
            self._client.close()
            raise

    def send(self, payload: bytes, options: dict[str, Any]) -> None:
        self._raise_failure()
        self._producer.send_async(payload, self._sent, **options)

    def _sent(self, result: Result, _: object) -> None:
        if result == self._ok:
            self._confirmed += 1
        else:
            self._failures.append(result)

    def finish(self) -> int:
        self._producer.flush()
        self._raise_failure()
        return self._confirmed

    def _raise_failure(self) -> None:
        if self._failures:
            name = self._failures[0].name
            unknown = ": they may be stored or not" if name == "Timeout" else ""
            why = f": {self._producer.why}" if self._producer.why else ""
            text = f"{len(self._failures)} messages failed ({name}{unknown}); {self._confirmed} are confirmed{why}"
            raise CommandFailure(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()


# ------------------------------------------------------------------------------------------------------- consume
# `magnetar consume`: messages of a subscription on standard output, acknowledged once they are printed.


SUBSCRIPTION_TYPES = {name.lower(): number for name, number in SUBSCRIPTION_TYPE_NUMBERS.items()}
POLL_MS = 200
"""Milliseconds of one receive: a Ctrl-C takes effect within it."""


@click.command()
@click.argument("topic", shell_complete=NAME_COMPLETIONS["topic"])
@click.option(
    "-s", "--subscription", default=None, shell_complete=NAME_COMPLETIONS["subscription"],
    help="Name of the subscription; made when it does not exist, and kept. Without: nothing is kept.",
)  # fmt: skip
@click.option("-n", "--count", type=click.IntRange(0), default=None, help="End after so many; 0: never (as --follow).")
@click.option(
    "-p",
    "--position",
    type=click.Choice(["earliest", "latest"], case_sensitive=False),
    default="earliest",
    show_default=True,
    help="Where a new subscription starts, and what is read without one.",
)
@click.option(
    "--from-index", "index", type=click.IntRange(0), default=None, metavar="INDEX",
    help="Without -s: begin at the message with this index in its partition.",
)  # fmt: skip
@click.option(
    "-t", "--type", "kind", type=click.Choice(list(SUBSCRIPTION_TYPES), case_sensitive=False), default=None,
    help="Of the subscription.  [default: exclusive]",
)  # fmt: skip
@click.option(
    "--filter", "wanted", default=None, metavar="FILTER",
    help="Which messages it gets, by their properties: \"region = 'eu'\".",
)  # fmt: skip
@click.option("--follow", is_flag=True, help="Go on for ever.")
@click.option(
    "--idle", type=FiniteNumber(0.1), default=2.0, show_default=True, help="End after so much silence, in s."
)
@click.option(
    "--format", "template", default=None, metavar="TEXT",
    help="How a message is printed: {data}, {key}, {id}, {topic}, {time}, {properties}, {redeliveries}; \\n, \\t.",
)  # fmt: skip
@click.option("--pipe", "program", default=None, metavar="COMMAND", help="Give each to a shell command of its own.")
@RAW_OPTION
@with_session
def consume(
    session: CommandSession,
    topic: str,
    subscription: str | None,
    count: int | None,
    position: str,
    index: int | None,
    kind: str | None,
    wanted: str | None,
    follow: bool,
    idle: float,
    template: str | None,
    program: str | None,
    raw: bool,
) -> None:
    """Receive messages of a subscription, print and acknowledge them.

    Without -s the command reads the topic from --position on. It creates no subscription then, which would retain the
    messages that come later.

    With -n the command ends after that many messages, with --follow never, else after --idle seconds without a message.

    --pipe writes the payload of each message to the standard input of a shell command, and acknowledges the message
    when that ends with 0. At any other end the command stops, and the message comes again.

    \b
    Examples:
      magnetar consume orders -s billing -n 10
      magnetar consume orders --follow
      magnetar consume orders -s europe --filter "region = 'eu'" --follow
      magnetar consume orders-partition-0 --from-index 1000 -n 10
      magnetar consume orders -s audit --follow -o json | jq .payload
      magnetar consume orders -s audit --format '{time} {key} {data}\\n'
      magnetar consume orders -s audit --pipe 'jq .total'
    """
    from ..client.model.message_id import MessageId
    from ..client.model.settings import ConsumerType, InitialPosition

    if subscription is None and kind is not None:
        raise click.UsageError("--type is of a subscription: name it with -s")
    if subscription is not None and index is not None:
        raise click.UsageError("--from-index reads without a subscription: leave -s out")
    show = _shown(session.out, template, program, raw=raw)
    for_ever = follow or count == 0
    client = session.client()
    try:
        if subscription is None:
            reader = client.create_reader(topic, getattr(MessageId, position.lower()), filter=wanted)
            if index is not None:
                reader.seek_index(index)
            receive, acknowledge = reader.read_next, None
        else:
            consumer = client.subscribe(
                topic,
                subscription,
                consumer_type=ConsumerType(SUBSCRIPTION_TYPES[kind or "exclusive"]),
                initial_position=getattr(InitialPosition, position.capitalize()),
                filter=wanted,
            )
            receive, acknowledge = consumer.receive, consumer.acknowledge
        idle_ms = None if for_ever or count else int(idle * 1000)
        _copy(receive, acknowledge, show, None if for_ever else count, idle_ms)
    finally:
        client.close()


def _copy(
    receive: Callable[[int], Message], acknowledge: Callable[[Message], None] | None, show: Callable[[Message], None],
    count: int | None, idle_ms: int | None,
) -> int:  # fmt: skip
    """Shows and acknowledges messages, until there were `count`, or none arrives for `idle_ms`. Returns the number of
    messages."""
    from ..client.common.errors import Timeout

    done, silent_ms = 0, 0
    while done != count:
        try:
            message = receive(POLL_MS)
        except Timeout:
            silent_ms += POLL_MS
            if idle_ms is not None and silent_ms >= idle_ms:
                break
            continue
        silent_ms = 0
        show(message)
        if acknowledge is not None:
            acknowledge(message)
        done += 1
    return done


TEMPLATE_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\"}
TEMPLATE_FIELDS = ("data", "key", "id", "topic", "time", "properties", "redeliveries")
_FIELD = re.compile(r"\{([A-Za-z_]+)\}|\\([ntr0\\])")


def _shown(
    out: CommandOutput, template: str | None, program: str | None, *, raw: bool
) -> Callable[[Message], None]:  # fmt: skip
    """Returns the function that processes each message before it is acknowledged. Raises UsageError if the template is
    invalid."""
    from .common.output import make_printed_message, print_consumed_message

    if template is not None and program is not None:
        raise click.UsageError("either --format or --pipe")
    if program is not None:
        return lambda message: _give(program, message)
    if template is None:
        return lambda message: print_consumed_message(make_printed_message(message), out, raw=raw)
    unknown = [found[1] for found in _FIELD.finditer(template) if found[1] and found[1] not in TEMPLATE_FIELDS]
    if unknown:
        raise click.UsageError(
            f"a message has no {{{unknown[0]}}}: {', '.join(f'{{{each}}}' for each in TEMPLATE_FIELDS)}"
        )
    return lambda message: print(format_message(template, message, raw=raw), end="", flush=True)


def format_message(template: str, message: Message, *, raw: bool = False) -> str:
    """Returns `template` with its fields replaced by the values of the message, and its escapes (`\\n`, `\\t`) replaced
    by the characters that they mean. Braces in a value are not replaced again. `raw`: control characters of a value are
    not escaped on a terminal."""
    from ..proto.pulsar_json import time_to_json
    from .common.output import make_printed_message, make_terminal_text

    found = make_printed_message(message)
    values: dict[str, Callable[[], str]] = {
        "data": lambda: found.payload.decode("utf-8", "backslashreplace"), "key": lambda: found.key,
        "id": lambda: found.message_id, "topic": lambda: found.topic,
        "time": lambda: time_to_json(found.publish_time_ms).replace("Z", "+00:00"),
        "properties": lambda: ",".join(f"{name}={value}" for name, value in found.properties.items()),
        "redeliveries": lambda: str(found.redelivery_count),
    }  # fmt: skip

    def fill(at: re.Match[str]) -> str:
        return make_terminal_text(values[at[1]](), raw=raw) if at[1] else TEMPLATE_ESCAPES[at[2]]

    return _FIELD.sub(fill, template)


def _give(program: str, message: Message) -> None:
    """Gives a message to a command of the shell. Raises CommandFailure if that does not end with 0."""
    import subprocess

    code = subprocess.run(program, shell=True, input=message.data(), check=False).returncode
    if code != 0:
        place = message.message_id()
        raise CommandFailure(
            f"the command ended with {code} at message {place}, which is not acknowledged and comes again"
        )
