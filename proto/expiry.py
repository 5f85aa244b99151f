"""The expiry of single messages: from a given time on, no consumer needs the message, and the broker does not deliver
it.

    property  magnetar.expires_at = "<ms since the epoch>"          of the message; any client may set it
    field     MessageMetadata.expiry_runs = (first, count, ms)*     of a batch: the messages of it that expire

- The property decides. If a message is alone in its entry, the property is in the entry's head, where a broker reads
  it.
- In a batch a broker does not look at single messages. The SDK's producer repeats the times in `expiry_runs`, for runs
  of messages that follow each other and expire at the same time; a message that is in no run never expires. Pulsar's
  clients skip the field. A batch that one of them makes has no such field, so brokers deliver its messages: such a
  client must send messages that expire without batching.
- A value that is no number from 1 to 2**63-1 counts as absent, and runs that contradict the batch count as absent.
- A message in chunks is judged by its consumer alone, when all chunks have arrived (`EntryExpiry.is_chunk`).
- A copy in a dead-letter topic does not expire: its property has the name EXPIRED_AT_PROPERTY
  (`make_dead_letter_properties`).

Guarding tests: tests/proto/test_expiry.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any, NamedTuple

from .entry import MANY_PROPERTIES, Buffer, decode_text
from .names import parse_number

EXPIRES_AT_PROPERTY = "magnetar.expires_at"
"""Property of a message: the time from which on it is not delivered, in ms since the epoch."""
EXPIRED_AT_PROPERTY = "magnetar.expired_at"
"""The same property in a dead letter, which is kept until somebody looks at it."""
EXPIRY_RUNS_MAX = 64
"""Most runs of a batch: half a kilobyte. A producer closes a batch that would need more."""
_NAME = EXPIRES_AT_PROPERTY.encode()
TIME_MS_MAX = (1 << 63) - 1
_DIGITS_MAX = 19


class ExpiryRun(NamedTuple):
    """Messages of a batch that follow each other and expire at the same time: `messages` of them, from the index
    `first` on, at `at_ms` (ms since the epoch)."""

    first: int
    messages: int
    at_ms: int


class EntryExpiry:
    """When the messages of one entry expire. `runs`: which of them, and when. `is_chunk`: the entry is a part of a
    message in chunks. `first_ms`: when the first of them does. `told_ms`: the broker's time when it judged the entry
    last, which it tells to the consumer; 0: it has not."""

    __slots__ = ("first_ms", "is_chunk", "runs", "told_ms")

    def __init__(self, runs: tuple[ExpiryRun, ...], *, is_chunk: bool = False) -> None:
        self.runs = runs
        self.first_ms = min(run.at_ms for run in runs)
        self.is_chunk = is_chunk
        self.told_ms = 0

    def find_expired_bits(self, now_ms: int) -> int:
        """Returns which messages of the entry have expired at `now_ms` (ms since the epoch, inclusive), as bits (bit i:
        message i). A chunk never counts as expired by itself."""
        if now_ms < self.first_ms or self.is_chunk:
            return 0
        bits = 0
        for first, count, at_ms in self.runs:
            if at_ms <= now_ms:
                bits |= (1 << count) - 1 << first
        return bits


def parse_expires_at(value: str | None) -> int:
    """Returns the value of the property EXPIRES_AT_PROPERTY in ms since the epoch; 0 if it is absent or no number from
    1 to TIME_MS_MAX."""
    found = parse_number(value) if value and len(value) <= _DIGITS_MAX else None
    return found if found is not None and found <= TIME_MS_MAX else 0


def find_entry_expiry(metadata: Any, entry: Buffer, payload_offset: int, *, batched: bool) -> EntryExpiry | None:
    """Returns when the messages of an entry expire; None if none of them does. `metadata`: its MessageMetadata, which
    is encoded before `payload_offset` of the entry. A search in those bytes comes first, because it costs less than a
    look at each property. `batched`: whether `metadata` has the field num_messages_in_batch."""
    if batched:
        return _of_batch(metadata) if metadata.expiry_runs else None
    if not metadata.properties:
        return None
    if (entry if type(entry) is bytes else bytes(entry[:payload_offset])).find(_NAME, 0, payload_offset) < 0:
        return None
    at_ms = 0
    for pair in islice(metadata.properties, MANY_PROPERTIES):
        if pair.key == EXPIRES_AT_PROPERTY:
            at_ms = parse_expires_at(decode_text(pair.value))
    return EntryExpiry((ExpiryRun(0, 1, at_ms),), is_chunk=metadata.num_chunks_from_msg > 1) if at_ms else None


def _of_batch(metadata: Any) -> EntryExpiry | None:
    numbers: list[int] = list(islice(metadata.expiry_runs, 3 * EXPIRY_RUNS_MAX + 1))
    if len(numbers) % 3 or len(numbers) > 3 * EXPIRY_RUNS_MAX:
        return None
    runs, end = [], 0
    for first, count, at_ms in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True):
        if first < end or count < 1 or not 0 < at_ms <= TIME_MS_MAX:
            return None
        runs.append(ExpiryRun(first, count, at_ms))
        end = first + count
    return EntryExpiry(tuple(runs)) if end <= metadata.num_messages_in_batch else None


def add_expiry_run(runs: list[ExpiryRun], index: int, at_ms: int) -> None:
    """Adds the message `index` of a batch, which expires at `at_ms`, to the runs of the batch. `index` must be greater
    than those that were added before."""
    if runs and extends_last_run(runs, index, at_ms):
        runs[-1] = runs[-1]._replace(messages=runs[-1].messages + 1)
    else:
        runs.append(ExpiryRun(index, 1, at_ms))


def extends_last_run(runs: list[ExpiryRun], index: int, at_ms: int) -> bool:
    """Returns whether `add_expiry_run` would add the message to the last run. There must be one."""
    first, count, last_ms = runs[-1]
    return first + count == index and last_ms == at_ms


def make_dead_letter_properties(properties: Mapping[str, str]) -> dict[str, str]:
    """Returns the properties of the copy of a message in a dead-letter topic, where it does not expire:
    EXPIRES_AT_PROPERTY gets the name EXPIRED_AT_PROPERTY."""
    return {EXPIRED_AT_PROPERTY if key == EXPIRES_AT_PROPERTY else key: value for key, value in properties.items()}
