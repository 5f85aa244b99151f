"""Log lines about slow publishes, which took longer than `slow_publish_s` from their arrival to their confirmation. A
line says how long each step took.

    WARNING magnetar.broker.slow: slow publish topic=… producer=… trace=… ledger=7 entry=12 entries=3 arrived=…Z
        ledger_ms=None room_ms=None bookies={"…": {"sent_ms": 2, "stored_ms": 812}, "…": {}} confirmed_ms=813

With `--log-format json` these are members of the line. Milliseconds count from the arrival: the entry was queued in the
log, after the gate of its topic (`arrived` is the time of day).

| name | when |
|---|---|
| `ledger_ms` | a new ledger took entries: until then there was none, or the end of the last was being found |
| `room_ms` | the ledger had room again: too much was at bookies that had not answered |
| `bookies` | each was sent the entry, and had stored it (below) |
| `confirmed_ms` | the ack quorum had stored it, and everything before it |

A bookie with `{}` has stored it in less than `slow_publish_s`, one with `"stored": false` not before the confirmation.

`trace` is the trace id of the first message in the entry that carries a context (`traceparent`), and is left out where
none does, or the payload is encrypted.
**Cost.** Publishes that are confirmed together are in the order of their arrival: only the first one is compared, and
nothing more is done if it is in time. One line describes the first slow entry, and `entries` is the number of slow
ones. A broker writes LINES_MAX lines in LINES_S seconds; `left_out` says how many were not written.
Guards: tests/broker/log/test_slow_publishes.py.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ...ledger import LedgerWriter
from ...proto.entry import decode_message_columns, decode_properties, parse_header
from ...proto.errors import CorruptEntry
from ...proto.names import TopicName
from ...runtime.clock import Clock
from .unfolding import is_entry_slow_to_parse

if TYPE_CHECKING:
    from .appender import Publish

_LOG = logging.getLogger("magnetar.broker.slow")

LINES_MAX, LINES_S = 10, 10.0
TRACE_KEYS = ("traceparent", "messaging.trace_parent")


class SlowPublishLog:
    """Writes log lines about slow publishes, for all topics of a broker. `slow_s`: a publish that takes longer than so
    many seconds is slow; 0: none is reported."""

    def __init__(self, clock: Clock, slow_s: float) -> None:
        self.slow_s = slow_s
        self._clock = clock
        self._since, self._lines, self._left_out = clock.monotonic(), 0, 0

    def report(
        self, topic: TopicName, writer: LedgerWriter | None, confirmed: Sequence[Publish], now_s: float, *,
        ledger_s: float, room_s: float,
    ) -> None:  # fmt: skip
        """Writes a log line about publishes that are confirmed together, of which the first is slow. `now_s`: the
        present time; `ledger_s`: when a new ledger began to accept entries; `room_s`: when the ledger had room again
        (all in monotonic seconds; 0: that did not happen)."""
        if now_s - self._since >= LINES_S:
            self._since, self._lines = now_s, 0
        if self._lines >= LINES_MAX:
            self._left_out += 1
            return
        self._lines += 1
        first = confirmed[0]
        began_s = first.arrived_s

        def after_ms(at_s: float) -> int | None:
            return round((at_s - began_s) * 1000) if at_s > began_s else None

        bookies: dict[str, dict[str, int | bool]] = {}
        for slot, bookie in first.sent.items():
            bookies[bookie] = {} if slot in first.acks else {"stored": False}
        for late in () if writer is None else writer.late_bookie_answers():
            if late.bookie in bookies and late.first_entry <= first.entry <= late.last_entry:
                bookies[late.bookie] = {
                    "sent_ms": round((late.sent_s - began_s) * 1000),
                    "stored_ms": round((late.answered_s - began_s) * 1000),
                }
        facts: dict[str, object] = {"topic": str(topic), "producer": first.name}
        if trace := find_trace_id(b"".join(first.frames)):
            facts["trace"] = trace
        facts |= {
            "ledger": -1 if writer is None else writer.ledger_id, "entry": first.entry,
            "entries": sum(now_s - each.arrived_s > self.slow_s for each in confirmed),
            "arrived": datetime.fromtimestamp(first.timestamp_ms / 1000, UTC).isoformat(timespec="milliseconds"),
            "ledger_ms": after_ms(ledger_s), "room_ms": after_ms(room_s), "bookies": bookies,
            "confirmed_ms": after_ms(now_s),
        }  # fmt: skip
        if self._left_out:
            facts["left_out"], self._left_out = self._left_out, 0
        _LOG.warning("slow publish", extra=facts)


def find_trace_id(entry: bytes) -> str:
    """Returns the trace id of the first message in a stored entry that has a trace context; empty if none has."""
    with suppress(CorruptEntry):
        header = parse_header(entry, verify=False)
        contexts = [decode_properties(header.metadata)]
        if header.batched and not header.metadata.encryption_keys and not is_entry_slow_to_parse(header.metadata):
            contexts += map(decode_properties, decode_message_columns(header, entry)[0])
        for properties in contexts:
            for key in TRACE_KEYS:
                parts = properties.get(key, "").split("-")
                if len(parts) >= 4 and len(parts[1]) == 32:
                    return parts[1]
    return ""
