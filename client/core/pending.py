"""Entries of one producer that have no outcome yet, oldest first: published over this connection, then not published.

An entry is published while the credit is above zero, and costs its length and ENTRY_COST_BYTES. Answers come in the
order of the publishes. A message in chunks is several entries that share its sequence id; the last one has the
callback. Guards: tests/client/core/test_producer_walk.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ...proto.entry import Encrypt, parse_header, with_schema_version
from ...proto.errors import MagnetarError, MessageTooLarge
from ...proto.model import ENTRY_COST_BYTES
from ...proto.names import Position
from ..common.errors import CryptoError
from .batcher import Batch, Callback, encode, metadata_of
from .chunking import split
from .effects import InvalidContent
from .transaction import InTransaction


class PendingEntries:
    """The entries of one producer that have no outcome yet."""

    __slots__ = ("credit", "sent", "unsent")

    def __init__(self) -> None:
        self.sent: deque[Batch] = deque()
        self.unsent: deque[Batch] = deque()
        self.credit = 0

    def __bool__(self) -> bool:
        return bool(self.sent or self.unsent)

    @property
    def oldest(self) -> Batch | None:
        return self.sent[0] if self.sent else self.unsent[0] if self.unsent else None

    @property
    def youngest(self) -> Batch | None:
        return self.unsent[-1] if self.unsent else self.sent[-1] if self.sent else None

    def add(self, batch: Batch, entries: Sequence[bytes], now: float) -> None:
        """Adds a batch. `entries`: what it became; several are the chunks of its message."""
        batch.items = []
        places: list[Position] | None = [] if len(entries) > 1 else None
        for entry in entries[:-1]:
            chunk = Batch(batch.sequence_id)
            chunk.message, chunk.entry, chunk.chunks, chunk.born = batch.message, entry, places, now
            chunk.txn = batch.txn
            self.unsent.append(chunk)
        batch.entry, batch.chunks, batch.born = entries[-1], places, now
        self.unsent.append(batch)

    def next(self) -> Batch:
        """Takes the next batch to publish. Call it while there is one, and credit above zero."""
        batch = self.unsent.popleft()
        self.credit -= len(batch.entry) + ENTRY_COST_BYTES
        batch.connections += 1
        self.sent.append(batch)
        return batch

    def disconnected(self) -> None:
        """Makes all of them unsent: they are published again, in order."""
        self.credit = 0
        self.unsent.extendleft(reversed(self.sent))
        self.sent.clear()

    def renumber(self, before: bytes, now: bytes) -> None:
        """Gives the waiting entries another schema number: the producer's topic was made anew. Those that name the old
        one are all unsent: the connection is new."""
        assert not self.sent, "nothing was published over this connection"
        for batch in self.unsent:
            if parse_header(batch.entry, verify=False).metadata.schema_version == before:
                batch.entry = with_schema_version(batch.entry, now)

    def pop_message(self) -> list[Batch]:
        """Removes and returns the oldest batch, with the other chunks of its message."""
        popped: list[Batch] = []
        while not popped or not popped[-1].callbacks:
            popped.append((self.sent or self.unsent).popleft())
        return popped

    def pop_all(self) -> list[Batch]:
        popped = [*self.sent, *self.unsent]
        self.sent.clear()
        self.unsent.clear()
        return popped

    def check(self) -> None:
        batches = [*self.sent, *self.unsent]
        sequence = [batch.sequence_id for batch in batches if batch.callbacks and not batch.goes_back]
        assert sequence == sorted(set(sequence)), "entries under way are in the order of their sequence ids"
        assert all(batch.connections for batch in self.sent), "what is sent was published"


def entries_of(
    batch: Batch, producer_name: str, wall_ms: int, compression: int, bytes_max: int, *, chunks_of: str | None,
    encrypt: Encrypt | None = None, schema_version: bytes = b"",
) -> list[bytes] | MagnetarError:  # fmt: skip
    """Encodes the entries of a batch, at most `bytes_max` each; several, its chunks, when `chunks_of` names the
    message. An error: MessageTooLarge, CryptoError, or InvalidContent."""
    if batch.entry:
        return [batch.entry]
    if batch.message is not None and batch.message.encrypt is not None:
        encrypt = batch.message.encrypt
    try:
        if chunks_of is not None and batch.message is not None:
            metadata = metadata_of(batch, producer_name, wall_ms, compression, schema_version)
            return split(metadata, batch.message.payload, bytes_max, chunks_of, encrypt)
        entry = encode(batch, producer_name, wall_ms, compression, encrypt, schema_version)
    except (MessageTooLarge, CryptoError) as error:
        return error
    except Exception as cause:
        return invalid(cause)
    size = len(entry)
    if compression:  # a broker takes nothing that unfolds to more than an entry may have: its readers unfold it
        size = max(size, len(batch.message.payload) if batch.message is not None else sum(map(len, batch.items)))
    if size > bytes_max:
        return MessageTooLarge(f"an entry of {size} bytes; the limit is {bytes_max}", size=size, limit=bytes_max)
    return [entry]


# ------------------------------------------------------------------------------------ outcomes
def invalid(cause: Exception) -> InvalidContent:
    error = InvalidContent(f"the message cannot be encoded: {cause}")
    error.__cause__ = cause
    return error


def uncertain(error: MagnetarError) -> MagnetarError:
    """Returns the error for an entry that was published before: it may be stored, so the error is not definite."""
    if not error.definite:
        return error
    changed = type(error)(error.message)
    changed.definite = False  # type: ignore[misc]
    return changed


def lone(callback: Callback, txn: InTransaction | None, payload_bytes: int = 0) -> Batch:
    """Represents a message that was never put into a batch."""
    batch = Batch(-1)
    batch.payload_bytes = payload_bytes
    batch.txn = txn
    batch.callbacks.append(callback)
    return batch
