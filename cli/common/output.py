"""The output of commands, in the form that `-o` names: the one place where answers are written. Progress is on stderr.

| kind | what is written |
|---|---|
| `table` | for people (rich, imported only for them); in a pipe it keeps its columns and has no colours |
| `wide` | a table with the other fields of the records too, each as wide as it needs |
| `json` | one document |
| `jsonl` | one object a line: of a list each record, for streams |
| `yaml` | one document |
| `name` | the names alone, one a line: the first column of a table |

All have the same records, so that a script can use what a person sees.

YAML (`-o yaml`) is written in block style, for the values that JSON has. A text is plain only if every reader of YAML
1.1 and 1.2 takes it as the same text. Any other text is in double quotes with JSON's escapes, so `yes`, `1e3`, `: ` and
line ends stay what they are. `tests/cli/test_yaml.py` reads the output back.

Also in this file, below its heading: how messages are shown (messages).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Protocol

import click

if TYPE_CHECKING:
    from rich.progress import Progress

    from ...client.admin import StoredMessage
    from ...client.model.message_id import MessageId


PLAIN_YAML_TEXT = re.compile(r"[A-Za-z/_](?:[\w./@+() -]|:(?=[\w/]))*", re.ASCII)
"""Begins with no sign and no digit, has no `: ` and no ` #`: neither a number, nor a time, nor a mark of YAML."""
AMBIGUOUS_YAML_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})
"""Texts that some reader takes for another value, in small letters."""
UNPRINTABLE = r"[^\x20-\x7e\u00a1-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
"""What YAML 1.1 does not take as it is, even in quotes. Compiled at the first use: that takes 4 ms."""


def format_yaml_lines(value: object) -> Iterator[str]:
    """Yields the lines of a value as YAML, without line ends. Raises TypeError for a value that JSON cannot
    represent."""
    match value:
        case Mapping() if value:
            for name, each in value.items():
                if isinstance(each, Mapping | list | tuple) and each:
                    yield f"{_scalar(str(name))}:"
                    yield from (f"  {line}" for line in format_yaml_lines(each))
                else:
                    yield f"{_scalar(str(name))}: {_scalar(each)}"
        case list() | tuple() if value:
            for each in value:
                first, *others = format_yaml_lines(each)
                yield f"- {first}"
                yield from (f"  {line}" for line in others)
        case _:
            yield _scalar(value)


def _scalar(value: object) -> str:
    match value:
        case str() if (
            PLAIN_YAML_TEXT.fullmatch(value) and value == value.strip() and value.lower() not in AMBIGUOUS_YAML_WORDS
        ):
            return value
        case str():
            return re.sub(UNPRINTABLE, lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))
        case float() if value != value or value in (float("inf"), -float("inf")):
            return {"nan": ".nan", "inf": ".inf", "-inf": "-.inf"}[repr(value)]
        case float():
            mantissa, mark, exponent = repr(value).partition("e")
            return f"{mantissa}{'' if '.' in mantissa else '.0'}{mark}{exponent}"  # 1e+16 is a text in YAML 1.1
        case _:
            return json.dumps(list(value) if isinstance(value, tuple) else value)


CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def escape_controls(text: str) -> str:
    """Returns the text with its control characters (except tabs and line ends) and marks of text direction replaced by
    escapes such as `\\x1b`. Clients choose names and properties, and a terminal would obey such characters in them."""
    return CONTROL_CHARACTERS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


CellValue = object
OutputRow = Mapping[str, CellValue]
STREAM_FIRST_ROWS = 200


OUTPUT_KINDS = ("table", "wide", "json", "jsonl", "yaml", "name")
OUTPUT_OPTION = click.option(
    "-o",
    "--output",
    type=click.Choice(OUTPUT_KINDS),
    default="table",
    show_default=True,
    help="How the answer is written.",
)


class CommandOutput:
    """Prints the results of one command in the format that the user chose. `kind` is the format, one of OUTPUT_KINDS.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind

    @property
    def is_structured(self) -> bool:
        """Returns whether the output is for programs: a document without any other text, and not a table."""
        return self.kind not in ("table", "wide")

    def print_rows(self, rows: Sequence[OutputRow], columns: Sequence[str], *, empty: str = "none") -> None:
        """Prints a list of records. A table shows only `columns`, in this order; `wide` adds the other fields of the
        first record, and all other formats contain all fields. The format `name` prints the first column only. Instead
        of a table without rows, the text `empty` is printed."""
        if self.kind == "name":
            self._print_first(rows, columns)
        elif self.is_structured:
            self.print_document(list(rows))
        elif not rows:
            print(f"({empty})")
        else:
            self._table(rows, columns)

    def print_row_stream(self, rows: Iterable[OutputRow], columns: Sequence[str], *, empty: str = "none") -> None:
        """Prints a list of records of any length, record by record as they arrive. The first STREAM_FIRST_ROWS rows of
        a table determine the widths of its columns. `columns` and `empty` are those of `print_rows`."""
        if self.kind == "name":
            self._print_first(rows, columns)
        elif self.kind == "json":
            print_rows_as_json(rows)
        elif self.is_structured:
            self._stream_items(rows)
        else:
            print_rows_as_table(iter(rows), columns, empty)

    def print_names(self, names: Sequence[str], *, empty: str = "none") -> None:
        """Prints a list of names: one name per line, or as a JSON or YAML list. Without names a table is replaced by
        the text `empty`."""
        if self.is_structured:
            self.print_document(list(names))
        else:
            print("\n".join(names) if names else f"({empty})")

    def print_record(self, record: OutputRow) -> None:
        """Prints one record: in a table one line for each field, in JSON or YAML one object."""
        if self.is_structured:
            self.print_document(record)
            return
        width = max(map(len, record), default=0)
        for name, value in record.items():
            print(f"{name:<{width}}  {format_field(name, value)}")

    def print_result_text(self, text: str, **record: CellValue) -> None:
        """Prints the sentence `text` that says what a command did, for a command that has no other result. `record`:
        fields for the other formats; the first field is the name of the changed object."""
        if self.kind == "name":
            self.print_document(record)
        elif self.is_structured:
            self.print_document({"done": text, **record})
        else:
            print(text)

    def print_document(self, value: CellValue) -> None:
        """Prints a value that is the whole output of the command. The format `name` prints only the names that the
        value contains (`list_names_in_document`). Raises TypeError for a value that JSON cannot represent."""
        match self.kind:
            case "name":
                for name in list_names_in_document(value):
                    print(name)
            case "jsonl":
                for each in value if isinstance(value, list) else [value]:
                    self.print_streamed_value(each)
            case "yaml":

                print("\n".join(format_yaml_lines(value)))
            case _:
                print(json.dumps(value, indent=2, ensure_ascii=False))

    def print_streamed_value(self, value: CellValue) -> None:
        """Prints one value of a list without an end at once, as a line of JSON or as an item of a YAML list."""
        match self.kind:
            case "name":
                self.print_document(value)
            case "yaml":

                print("\n".join(format_yaml_lines([value])), flush=True)
            case _:
                print(json.dumps(value, ensure_ascii=False), flush=True)

    def _stream_items(self, rows: Iterable[OutputRow]) -> None:
        found = False
        for row in rows:
            self.print_streamed_value(row)
            found = True
        if self.kind == "yaml" and not found:
            print("[]")

    def _print_first(self, rows: Iterable[OutputRow], columns: Sequence[str]) -> None:
        for row in rows:
            print(row.get(columns[0]))

    def _table(self, rows: Sequence[OutputRow], columns: Sequence[str]) -> None:
        if self.kind == "wide":
            columns = [*columns, *(name for name in rows[0] if name not in columns and _fits(rows[0][name]))]
        if self.kind == "wide" or not sys.stdout.isatty() or len(rows) > WRAPPED_ROWS_MAX:
            print_plain_table(rows, columns)
            return
        from rich import box
        from rich.console import Console
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for column in columns:
            numeric = all(isinstance(row.get(column), int | float) for row in rows)
            table.add_column(column, justify="right" if numeric else "left")
        for row in rows:
            table.add_row(*(format_field(column, row.get(column)) for column in columns))
        console = Console(highlight=False)
        with console.capture() as captured:  # rich would end the process when the reader of a pipe has closed it
            console.print(table)
        print(captured.get(), end="")


def _fits(value: CellValue) -> bool:
    """Whether a value is shown in a cell: no record, and no list of records."""
    return not isinstance(value, Mapping) and not (
        isinstance(value, list | tuple) and any(isinstance(each, Mapping | list | tuple) for each in value)
    )


def list_names_in_document(value: CellValue) -> Iterator[str]:
    """Yields the names that a document contains: of a list, the names of its items; of a mapping of records, its keys;
    of a single record, the value of its first field."""
    match value:
        case Mapping() if value and all(isinstance(each, Mapping) for each in value.values()):
            yield from map(str, value)
        case Mapping():
            yield from list_names_in_document(next(iter(value.values()), []))
        case list() | tuple():
            for each in value:
                yield from list_names_in_document(each)
        case _:
            yield str(value)


# --------------------------------------------------------------------------------------------------------- watch
CLEAR_SCREEN = "\x1b[H\x1b[2J"


def print_repeatedly(out: CommandOutput, every_s: float, answer: Callable[[], None]) -> None:
    """Calls `answer` every `every_s` seconds until Ctrl-C, and prints what `answer` prints. On a terminal, each table
    replaces the table before; other formats are printed one after the other. If `answer` fails with an error that may
    end by itself, such as a restart of the server, prints the error and continues; any other error is raised. An exit
    code that is part of an answer (`magnetar status` with an alarm) does not end it."""
    import io
    import time
    from contextlib import redirect_stdout, suppress

    from ...proto.errors import MagnetarError

    on_terminal = sys.stdout.isatty() and not out.is_structured

    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return on_terminal

    mark = CLEAR_SCREEN if on_terminal else ""
    while True:
        screen = Screen()  # the whole answer first: a screen that is half old misleads
        try:
            with redirect_stdout(screen), suppress(SystemExit):
                answer()
        except MagnetarError as error:
            if not error.retryable:
                raise
            print(f"magnetar: {error.message}", file=sys.stderr)
        else:
            print(mark, screen.getvalue(), sep="", end="", flush=True)
            mark = CLEAR_SCREEN if on_terminal else {"yaml": "---\n"}.get(out.kind, "" if out.is_structured else "\n")
        time.sleep(every_s)


WRAPPED_ROWS_MAX = 500
"""Rows up to which a table on a terminal is fitted into its width: for 5,000 that takes seconds."""


def print_plain_table(rows: Sequence[OutputRow], columns: Sequence[str]) -> None:
    """Prints a table in which no cell is shortened or wrapped, for output to a pipe and for very long tables. `rows`
    must be complete, because the widest cell of a column sets its width."""
    cells = [[format_field(column, row.get(column)).replace("\n", " ") for column in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    numeric = [all(isinstance(row.get(column), (int, float)) for row in rows) for column in columns]
    form = "   ".join(f"{{:{'>' if right else '<'}{width}}}" for width, right in zip(widths, numeric, strict=True))
    rule = "─" * (sum(widths) + 3 * (len(widths) - 1))
    print("\n".join((form.format(*columns), rule, *(form.format(*each) for each in cells))))


def print_rows_as_json(rows: Iterable[OutputRow]) -> None:
    """Prints rows as a JSON array as they arrive, one object on each line."""
    before = "["
    for row in rows:
        print(before, json.dumps(row, ensure_ascii=False), sep="\n", end="")
        before = ","
    print("\n]" if before == "," else "[]")


def print_rows_as_table(rows: Iterator[OutputRow], columns: Sequence[str], empty: str) -> None:
    """Prints a table row by row as the rows arrive. The first STREAM_FIRST_ROWS rows determine the widths of the
    columns; longer cells of later rows are not shortened. Without rows, prints the text `empty`."""
    first = list(islice(rows, STREAM_FIRST_ROWS))
    if not first:
        print(f"({empty})")
        return
    widths = [max(len(column), *(len(format_field(column, row.get(column))) for row in first)) for column in columns]
    numeric = [all(isinstance(row.get(column), int | float | None) for row in first) for column in columns]

    def line(cells: Iterable[str]) -> str:
        put = zip(cells, widths, numeric, strict=True)
        return "  ".join(text.rjust(width) if right else text.ljust(width) for text, width, right in put).rstrip()

    print(line(columns))
    print("  ".join("─" * width for width in widths))
    for row in chain(first, rows):
        print(line(format_field(column, row.get(column)) for column in columns))


TIME_FIELDS = frozenset((
    "certificateEndsMs", "createdMs", "earliestMsgPublishTimeInBacklog", "expires_ms", "sinceMs", "tokenEndsMs",
))  # fmt: skip
"""Fields with a time in ms since the epoch (0: none), which a table shows as a time in UTC."""


def format_field(name: str, value: CellValue) -> str:
    """Returns the value of the field `name` as text for a cell of a table: for a field of TIME_FIELDS a time in UTC
    ("-" for 0), else as `format_cell`."""
    if name not in TIME_FIELDS or not isinstance(value, int):
        return format_cell(value)
    from ...proto.pulsar_json import time_to_json

    return time_to_json(value) if value else "-"


def format_cell(value: CellValue) -> str:
    """Returns a value as text for a cell of a table: "-" for None and for an empty list or mapping. Control characters
    of texts are escaped."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}" if abs(value) >= 10_000 else str(value)
        case float():
            return f"{value:,.1f}"
        case dict():
            return ", ".join(f"{escape_controls(str(name))} {format_cell(each)}" for name, each in value.items()) or "-"
        case tuple() if hasattr(value, "_fields"):  # such as a position
            return str(value)
        case list() | tuple():
            return ", ".join(map(format_cell, value)) or "-"
        case _:
            return escape_controls(str(value))


class ProgressCounter(Protocol):
    """The function that `show_progress` gives to its `with` block. The block calls it to set how many steps are
    completed."""

    def __call__(self, done: int) -> None:
        """Sets the number of steps that are completed, counted from the beginning."""
        ...


@contextmanager
def show_progress(what: str, total: int | None, *, shown: bool = True) -> Iterator[ProgressCounter]:
    """While the `with` block runs, shows a progress bar on stderr, if `shown` and if stderr is a terminal. Yields the
    ProgressCounter that updates the bar. `total`: the number of steps; None if it is unknown."""
    if not shown or not sys.stderr.isatty():
        yield lambda done: None
        return
    with make_progress_bar() as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def make_progress_bar() -> Progress:
    """Returns a progress bar that is drawn on stderr. It is drawn while a `with` block with it runs."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))


# ------------------------------------------------------------------------------------------------------ messages
# How messages are shown: their text, one a line; with `-o wide` after id, time, key and properties; with `-o json` or
# jsonl one JSON object a line, so that streams can be piped; with `-o name` their ids.
#
# A payload that is not UTF-8 is `payloadBase64` in JSON, and escaped (`\\xff`) in text. Control characters of a payload
# are escaped on a terminal, unless --raw is given.


@dataclass(frozen=True, slots=True)
class PrintedMessage:
    """A message as `magnetar consume`, `peek` and other commands print it. Messages of the SDK and messages that the
    admin client reads are converted to this form."""

    topic: str
    message_id: str  # ledger:entry:partition:batch
    key: str
    properties: Mapping[str, str]
    publish_time_ms: int
    redelivery_count: int
    payload: bytes


def make_printed_message(message: Any) -> PrintedMessage:
    """Returns the PrintedMessage for a message of the SDK."""
    return PrintedMessage(
        message.topic_name(),
        format_message_id(message.message_id()),
        message.partition_key(),
        message.properties(),
        message.publish_timestamp(),
        message.redelivery_count(),
        message.data(),
    )


def format_message_id(message_id: MessageId) -> str:
    """Returns the id as `ledger:entry:partition:batch`, the form that commands print and accept. A partition or batch
    index of -1 means that there is none."""
    parts = (message_id.ledger_id(), message_id.entry_id(), message_id.partition(), message_id.batch_index())
    return ":".join(map(str, parts))


def make_printed_stored_message(message: StoredMessage) -> PrintedMessage:
    """Returns the PrintedMessage for a stored message that the admin client returned."""
    place = format_message_id(message.message_id)
    return PrintedMessage(
        message.topic, place, message.key, message.properties, message.publish_time_ms, 0, message.payload
    )


RAW_OPTION = click.option("--raw", is_flag=True, help="Control characters as they are, also on a terminal.")


def make_terminal_text(text: str, *, raw: bool = False) -> str:
    """Returns a text that a producer chose, as it is printed. If stdout is a terminal, which would obey control
    characters, they are escaped (`escape_controls`). Otherwise, and if `raw`, the text is unchanged."""
    return text if raw or not sys.stdout.isatty() else escape_controls(text)


def print_consumed_message(
    message: PrintedMessage, out: CommandOutput, *, described: bool = False, raw: bool = False
) -> None:
    """Prints a message in the format of `out`. `described`: in a table too, the id, time, key and properties come
    before the payload, as with `-o wide`. `raw`: control characters of the payload are not escaped on a terminal."""
    if out.is_structured:
        out.print_streamed_value(message.message_id if out.kind == "name" else make_message_record(message))
    else:
        before = _describe_message(message) if described or out.kind == "wide" else ""
        payload = make_terminal_text(message.payload.decode("utf-8", "backslashreplace"), raw=raw)
        print(before + payload, flush=True)


def _describe_message(message: PrintedMessage) -> str:
    """Returns what `-o wide` prints before the payload: the id, the publish time, the key and the properties."""
    from ...proto.pulsar_json import time_to_json

    named = {**({"key": message.key} if message.key else {}), **message.properties}
    sent = time_to_json(message.publish_time_ms)
    cells = (message.message_id, sent, *(f"{name}={value}" for name, value in named.items()))
    return escape_controls("  ".join(cells)) + "  "


def make_message_record(message: PrintedMessage) -> dict[str, object]:
    """Returns the message as a record for JSON and YAML. The payload is in the field `payload` if it is UTF-8, else in
    `payloadBase64`."""
    record: dict[str, object] = {
        "topic": message.topic,
        "messageId": message.message_id,
        "key": message.key,
        "properties": dict(message.properties),
        "publishTime": message.publish_time_ms,
        "redeliveryCount": message.redelivery_count,
    }
    try:
        record["payload"] = message.payload.decode()
    except UnicodeDecodeError:
        from base64 import b64encode

        record["payloadBase64"] = b64encode(message.payload).decode()
    return record
