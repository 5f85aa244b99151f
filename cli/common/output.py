"""The output of commands: tables for people (rich, imported only for them), JSON for programs, progress on stderr.

A table has the same records as the JSON list, so that a script can use what a person sees. In a pipe a table
keeps its columns and has no colours.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress

    from ...client.admin import StoredMessage
    from ...client.model.message_id import MessageId

Value = object
Row = Mapping[str, Value]
STREAM_FIRST_ROWS = 200


class Output:
    """Prints the output of a command. `kind`: "table" or "json"."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    @property
    def json(self) -> bool:
        return self.kind == "json"

    def print_rows(self, rows: Sequence[Row], columns: Sequence[str], *, empty: str = "none") -> None:
        """Prints a list of records. `columns`: those of the table, in order; JSON contains all fields."""
        if self.json:
            self.print_document(list(rows))
        elif not rows:
            print(f"({empty})")
        else:
            self._table(rows, columns)

    def print_stream(self, rows: Iterable[Row], columns: Sequence[str], *, empty: str = "none") -> None:
        """Prints rows of a list of any length as they arrive. The first rows of a table decide the widths of its
        columns."""
        if self.json:
            stream_json(rows)
        else:
            stream_table(iter(rows), columns, empty)

    def print_names(self, names: Sequence[str], *, empty: str = "none") -> None:
        """Prints a list of names: one per line, or a JSON array."""
        if self.json:
            self.print_document(list(names))
        else:
            print("\n".join(names) if names else f"({empty})")

    def print_record(self, record: Row) -> None:
        """Prints one record: one line per field, or a JSON object."""
        if self.json:
            self.print_document(record)
            return
        width = max(map(len, record), default=0)
        for name, value in record.items():
            print(f"{name:<{width}}  {format_cell(value)}")

    def print_done(self, text: str, **record: Value) -> None:
        """Prints what a command without a result has done."""
        if self.json:
            self.print_document({"done": text, **record})
        else:
            print(text)

    def print_document(self, value: Value) -> None:
        print(json.dumps(value, indent=2, ensure_ascii=False))

    def _table(self, rows: Sequence[Row], columns: Sequence[str]) -> None:
        if not sys.stdout.isatty() or len(rows) > ROWS_WRAPPED:
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
            table.add_row(*(format_cell(row.get(column)) for column in columns))
        console = Console(highlight=False)
        with console.capture() as captured:  # rich would end the process when the reader of a pipe has closed it
            console.print(table)
        print(captured.get(), end="")


ROWS_WRAPPED = 500
"""Rows up to which a table on a terminal is fitted into its width: for 5,000 that takes seconds."""


def print_plain_table(rows: Sequence[Row], columns: Sequence[str]) -> None:
    """Prints a table whose lines are as long as they are, as a pipe wants it."""
    cells = [[" ".join(format_cell(row.get(column)).split("\n")) for column in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    numeric = [all(isinstance(row.get(column), int | float) for row in rows) for column in columns]
    form = "   ".join(f"{{:{'>' if right else '<'}{width}}}" for width, right in zip(widths, numeric, strict=True))
    rule = "─" * (sum(widths) + 3 * (len(widths) - 1))
    print("\n".join((form.format(*columns), rule, *(form.format(*each) for each in cells))))


def stream_json(rows: Iterable[Row]) -> None:
    """Prints rows as a JSON array, one object per line."""
    before = "["
    for row in rows:
        print(before, json.dumps(row, ensure_ascii=False), sep="\n", end="")
        before = ","
    print("\n]" if before == "," else "[]")


def stream_table(rows: Iterator[Row], columns: Sequence[str], empty: str) -> None:
    first = list(islice(rows, STREAM_FIRST_ROWS))
    if not first:
        print(f"({empty})")
        return
    widths = [max(len(column), *(len(format_cell(row.get(column))) for row in first)) for column in columns]
    numeric = [all(isinstance(row.get(column), int | float | None) for row in first) for column in columns]

    def line(cells: Iterable[str]) -> str:
        put = zip(cells, widths, numeric, strict=True)
        return "  ".join(text.rjust(width) if right else text.ljust(width) for text, width, right in put).rstrip()

    print(line(columns))
    print("  ".join("─" * width for width in widths))
    for row in chain(first, rows):
        print(line(format_cell(row.get(column)) for column in columns))


def format_cell(value: Value) -> str:
    """Formats a value for a table."""
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}" if abs(value) >= 10_000 else str(value)
        case float():
            return f"{value:,.1f}"
        case list() | tuple():
            return ", ".join(map(format_cell, value)) or "-"
        case _:
            return str(value)


class Counter(Protocol):
    """Updates a progress bar."""

    def __call__(self, done: int) -> None:
        """Sets the number of items that are done."""
        ...


@contextmanager
def show_progress(what: str, total: int | None, *, shown: bool = True) -> Iterator[Counter]:
    """Shows a progress bar on stderr if that is a terminal; yields the Counter that updates it."""
    if not shown or not sys.stderr.isatty():
        yield lambda done: None
        return
    with progress_bar() as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def progress_bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True))


# ------------------------------------------------------------------------------------------------------ messages
# How messages are shown: their text, one a line; with `-o json` one JSON object a line, so that streams can be piped.
#
# A payload that is not UTF-8 is `payloadBase64` in JSON, and escaped (`\\xff`) in text.


@dataclass(frozen=True, slots=True)
class PrintedMessage:
    """The fields of a message that are printed, whichever client it came from."""

    topic: str
    message_id: str  # ledger:entry:partition:batch
    key: str
    properties: Mapping[str, str]
    publish_time_ms: int
    redelivery_count: int
    payload: bytes


def printed_message_of(message: Any) -> PrintedMessage:
    """Converts a message of the SDK to a PrintedMessage."""
    return PrintedMessage(
        message.topic_name(),
        id_text(message.message_id()),
        message.partition_key(),
        message.properties(),
        message.publish_timestamp(),
        message.redelivery_count(),
        message.data(),
    )


def id_text(message_id: MessageId) -> str:
    parts = (message_id.ledger_id(), message_id.entry_id(), message_id.partition(), message_id.batch_index())
    return ":".join(map(str, parts))


def printed_stored_message(message: StoredMessage) -> PrintedMessage:
    """Converts a stored message, as the admin client returns it, to a PrintedMessage."""
    place = id_text(message.message_id)
    return PrintedMessage(
        message.topic, place, message.key, message.properties, message.publish_time_ms, 0, message.payload
    )


def print_message(message: PrintedMessage, out: Output) -> None:
    print(as_json(message) if out.json else message.payload.decode("utf-8", "backslashreplace"), flush=True)


def as_json(message: PrintedMessage) -> str:
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
    return json.dumps(record, ensure_ascii=False)
