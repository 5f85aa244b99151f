"""What consumers say is done: the cursor hears of it, and then, of what is new, the dispatcher.

What was trimmed is done already; what lies behind the last entry is nobody's, and whoever names it made a mistake
(InvalidRequest); what is named before it counts. Sets of entries cost what the smaller of the set and of what is
outstanding costs, not what they hold. Guarding tests: tests/broker/subscription/test_acks.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyroaring import BitMap

from ...proto import wire_pb2 as wire
from ...proto.names import Position
from ..common.refusals import AckRefusal
from ..log.core.log_shape import LogShape
from .core.cursor import BATCH_INDEXES_MAX, Cursor, bits_of
from .core.dispatch import Dispatcher
from .core.policies.policy import Member


class Acks:
    """`member`: whose consumer says so; None: the broker itself."""

    __slots__ = ("_cursor", "_dispatcher", "_shape")

    def __init__(self, shape: LogShape, cursor: Cursor, dispatcher: Dispatcher) -> None:
        self._shape = shape
        self._cursor = cursor
        self._dispatcher = dispatcher

    def over(self, shape: LogShape) -> None:
        self._shape = shape

    def ack(self, member: Member | None, entries: Sequence[wire.AckedEntry]) -> None:
        """Each entry, or some messages of it."""
        for acked in entries:
            position = Position(acked.ledger_id, acked.entry_id)
            if not self._exists(position):
                continue
            if acked.batch_indexes or acked.batch_bits:
                self._ack_batch(member, position, self._bits_of(acked))
            elif self._cursor.ack(position):
                self._dispatcher.acked(member, position)

    def _ack_batch(self, member: Member | None, position: Position, bits: int) -> None:
        cursor = self._cursor
        held = member.outstanding.get(position, 0) if member is not None else 0
        before = cursor.acked_count(position)
        if cursor.ack_bits(position, bits, held if not before else 0):
            self._dispatcher.acked(member, position)
        elif member is not None:
            self._dispatcher.acked_messages(member, position, cursor.acked_count(position) - before)

    def ack_set(self, member: Member | None, ledger_id: int, entries: bytes) -> None:
        """Many whole entries of one ledger, as a roaring bitmap."""
        wanted = entries_of(entries)
        span = self._shape.span(ledger_id)
        last = span.last_entry if span is not None else -1
        beyond: Position | None = None
        if wanted and wanted.max() > last:
            beyond = Position(ledger_id, wanted.max())
            wanted.remove_range(last + 1, beyond.entry_id + 1)
        new = self._cursor.ack_set(ledger_id, wanted)
        if new:
            self._dispatcher.acked_set(member, ledger_id, new)
        if beyond is not None:
            self._exists(beyond)

    def ack_cumulative(self, member: Member | None, acked: wire.AckedEntry) -> None:
        """Everything up to and with it, or up to a message of it."""
        position = Position(acked.ledger_id, acked.entry_id)
        if not self._exists(position):
            return
        if acked.batch_indexes or acked.batch_bits:
            held = member.outstanding.get(position, 0) if member is not None else 0
            size = held if not self._cursor.acked_count(position) else 0
            self._cursor.ack_cumulative_batch(position, self._bits_of(acked).bit_length() - 1, size)
            self._dispatcher.acked_up_to(self._cursor.mark)
        else:
            self.give_up(position)

    def give_up(self, mark: Position) -> None:
        """Everything up to the mark is done."""
        self._cursor.ack_cumulative(mark)
        self._dispatcher.acked_up_to(self._cursor.mark)

    def _bits_of(self, acked: wire.AckedEntry) -> int:
        """Those of its messages that are acknowledged. InvalidRequest: more than its ledger has messages.

        So an index of a few bytes costs no more memory than the ledger's messages need, and nobody is told that
        something was acknowledged which was not.
        """
        span = self._shape.span(acked.ledger_id)
        messages = min(BATCH_INDEXES_MAX, span.end_index - span.first_index if span is not None else 0)
        highest = max(max(acked.batch_indexes, default=-1), _highest(acked.batch_bits))
        if highest >= messages:
            raise AckRefusal.NO_SUCH_MESSAGES.error(
                f"the ledger of {acked.ledger_id}:{acked.entry_id} has no {highest + 1} messages"
            )
        return bits_of(acked.batch_indexes) | int.from_bytes(acked.batch_bits, "little")

    def _exists(self, position: Position) -> bool:
        """False: trimmed, or a ledger that is none of ours; beyond the end it is the caller's fault."""
        if self._shape.readable(position):
            return True
        if position > self._shape.last:
            raise AckRefusal.BEYOND_END.error(f"entry {position} is after the last one of the topic", position=position)
        return False


def entries_of(data: bytes) -> BitMap:
    """InvalidRequest."""
    try:
        return BitMap.deserialize(data)
    except (ValueError, IndexError, MemoryError) as error:
        raise AckRefusal.NOT_A_SET.error(f"{len(data)} bytes are not a set of entries: {error}") from error


def _highest(bits: bytes) -> int:
    """The largest index in a bit set; -1: none."""
    used = bits.rstrip(b"\0")
    return 8 * len(used) - 9 + used[-1].bit_length() if used else -1


def marked(entries: Sequence[wire.AckedEntry]) -> int:
    """How many messages their indexes reach over: what it costs to take them."""
    return sum(max(max(each.batch_indexes, default=0), 8 * len(each.batch_bits)) for each in entries)
