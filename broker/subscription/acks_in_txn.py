"""Acknowledgements in transactions: a request is gathered, judged and made pending, and its transaction settled.

    for _ in acks.gather(entries, sets, wanted): …     in steps; nothing is changed
    acks.pend(member, txn, wanted)                     in one step, or TransactionConflict and no trace
    acks.settle(txn, committed=…)                      in one step; idempotent

An abort gives back what the transaction had pending, and counts it as given back once, so that a message whose
transactions always fail reaches its dead-letter limit. On types that deliver in log order everything after it that is
not acknowledged is delivered again as well, without being counted: order is kept. On Shared the rest stays where it is,
but for a batch of which a part was pending: its holder gives it back, as after a negative acknowledgement of that part,
and all of it that is not acknowledged is delivered again.

Order of keys (Key_Shared): a pending entry is like an acknowledged one, so its key goes on, and may change hands. After
an abort it precedes everything of its key that is not delivered yet. Who needs the effects of a key in order, whatever
aborts, puts the messages of a key into one transaction after the other: waits for the end of each. The same holds for
the next active consumer of Failover, when transactions of the last one are still open.
Guarding tests: tests/broker/subscription/test_acks_in_transactions.py,
tests/broker/subscription/core/test_dispatch_walk.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from pyroaring import BitMap

from ...proto.errors import MagnetarError
from ...proto.model import AckedEntry, EntrySet
from ...proto.names import Position
from ...proto.transactions import TxnId
from ..common.refusals import AckRefusal
from .acks import Acks, entries_of
from .core import pending_acks
from .core.cursor_state import NOWHERE, Partial, TxnAcks
from .core.pending_acks import ENTRIES_MAX, Clash, Conflict, Settled
from .core.policies.policy import Member

STEP_ENTRIES = 100
"""Entries that are gathered in one step: some tenths of a millisecond."""


class AcksInTxn(Acks):
    """The acknowledgements in transactions of one subscription. See the module."""

    __slots__ = ()

    # ------------------------------------------------------------------ gathering
    def gather(self, entries: Iterable[AckedEntry], sets: Iterable[EntrySet], wanted: TxnAcks) -> Iterator[None]:
        """Gathers acknowledgements into `wanted`, in steps. InvalidRequest: one is past the end, or does not parse.
        TransactionConflict: it is trimmed."""
        entries = iter(entries)
        while some := list(islice(entries, STEP_ENTRIES)):
            for position, bits in some:
                self._check_there(position)
                wanted.add(position, self._checked(position, bits) if bits else 0)
            yield
        for each in sets:
            found = entries_of(each.entries)
            if found:
                self._check_there(Position(each.ledger_id, found.min()))
                self._check_there(Position(each.ledger_id, found.max()))
                wanted.entries[each.ledger_id] = wanted.entries.get(each.ledger_id, BitMap()) | found
            yield

    def _check_there(self, position: Position) -> None:
        if not self._exists(position):
            raise _conflict(Clash(Conflict.ACKNOWLEDGED, position))

    # ------------------------------------------------------------------ pending
    def pend(
        self, member: Member, txn: TxnId, wanted: TxnAcks, cumulative: AckedEntry | None, memory_bytes_max: int, *,
        rest: bool = False,
    ) -> bool:  # fmt: skip
        """Makes all of it pending in the transaction; False: it was. `rest`: the client counts the messages of an entry
        itself (`_exact`), and repeats nothing. TransactionConflict, InvalidRequest, BackPressure: nothing has changed.
        """
        cursor, dispatcher = self._cursor, self._dispatcher
        if rest and (clash := pending_acks.twice(cursor, txn, wanted)) is not None:
            raise _conflict(clash)
        asked, named = wanted, NOWHERE
        if cumulative is not None or wanted.parts or member.unshown or cursor.has_parts:
            asked = self._exact(member, wanted, rest=rest)
        if cumulative is not None:
            named = cumulative.position
            self._add_cumulative(member, cumulative, asked)
        new = pending_acks.judge(cursor, txn, asked, named)
        if isinstance(new, Clash):
            raise _conflict(new)
        if not new:
            return False
        before = cursor.pending.entries if cursor.pending is not None else 0
        entries = before + sum(map(len, new.entries.values())) + len(new.parts)
        if entries > ENTRIES_MAX or cursor.memory_bytes > memory_bytes_max:
            raise AckRefusal.TOO_MANY_PENDING.error()
        pending_acks.pend(cursor, txn, new)
        for ledger_id, each in new.entries.items():
            if len(each) > 1:
                dispatcher.acked_set(member, ledger_id, each)
            else:
                dispatcher.acked(member, Position(ledger_id, each.min()))
        for position, part in new.parts.items():
            if cursor.is_done(position):
                dispatcher.acked(member, position)
            else:
                dispatcher.acked_messages(member, position, part.bits.bit_count())
        if new.up_to != NOWHERE:
            dispatcher.acked_up_to(max(new.up_to, cursor.mark))
        return True

    def _exact(self, member: Member, wanted: TxnAcks, *, rest: bool) -> TxnAcks:
        """Returns the acknowledgements message by message where not all of an entry is meant, and as an entry where all
        of it is. `rest`: a whole entry means what is left of it, else all of its messages, and one of them may be
        acknowledged already."""
        cursor, exact = self._cursor, TxnAcks({id_: each.copy() for id_, each in wanted.entries.items()})
        touched = dict.fromkeys(pending_acks.touched_in(cursor, exact.entries))
        touched |= dict.fromkeys(each for each in member.unshown if exact.holds(each))
        for position in touched:
            bits = self._shown(member, position) if rest else (1 << self._size(member, position)) - 1
            if bits:
                exact.entries[position[0]].discard(position[1])
                exact.parts[position] = Partial(bits, self._size(member, position))
        for position, part in wanted.parts.items():
            if not wanted.holds(position):
                self._add_part(member, position, part.bits, exact)
        exact.entries = {ledger_id: each for ledger_id, each in exact.entries.items() if each}
        return exact

    def _add_part(self, member: Member, position: Position, bits: int, exact: TxnAcks) -> None:
        size = self._size(member, position)
        everything = (1 << size) - 1
        bits = bits & everything if size else bits
        if bits == everything and size and not self._cursor.hidden(position):
            exact.add(position)
        elif bits:
            exact.parts[position] = Partial(bits, size)

    def _add_cumulative(self, member: Member, acked: AckedEntry, exact: TxnAcks) -> None:
        """Adds a cumulative acknowledgement. NotAllowed, InvalidRequest: as in a plain one."""
        position, bits = acked
        self._check_there(position)
        exact.up_to = position
        if bits:
            length, size = self._checked(position, bits).bit_length(), self._size(member, position)
            if not size or length < size:
                exact.up_to = self._shape.before(position)
                exact.parts[position] = Partial((1 << length) - 1, size)

    # ------------------------------------------------------------------ the end of a transaction
    def settle(self, txn: TxnId, *, committed: bool) -> Settled | None:
        """Settles the transaction: what was pending in it is acknowledged, or free and returned, for the caller to give
        back. None: nothing was pending."""
        cursor, settled = self._cursor, pending_acks.settle(self._cursor, txn, committed=committed)
        if settled is None:
            return None
        if committed:
            for position in settled.acks.parts:
                if cursor.is_acked(position):
                    self._dispatcher.acked(None, position)
        return settled


def _conflict(clash: Clash) -> MagnetarError:
    return AckRefusal.CONFLICT.error(f"entry {clash.position} {clash.why.value}", position=clash.position)
