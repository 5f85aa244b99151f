"""The wire form of the effects of a consumer's core: the kinds of ClientFrames, in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...proto import wire_pb2 as wire
from ..core.acks import WHOLE, AckGroup
from ..core.effects import ConsumerEffect, Grant, Redeliver, SendAcks, SendSeek
from ..core.redelivery import EntrySets
from ..model.message_id import MessageId
from ..model.start import at_message

ACK_BYTES = 128 << 10
"""Most bytes of one request: a quarter of what a broker takes (runtime/network.py `REQUEST_BYTES_MAX`)."""


def frames_of(effect: ConsumerEffect, *, durable: bool, inclusive: bool) -> Iterator[dict[str, Any]]:
    """Yields the frames of an effect. `durable`, `inclusive`: what a seek needs to know."""
    match effect:
        case Grant(messages):
            yield {"permits": messages}
        case SendAcks(group, request_id):
            for ack in acks_of(group, request_id):
                yield {"ack": ack}
        case Redeliver(entries, counted, request_id):
            sets = entry_sets(entries) if entries is not None else ()
            yield {"redeliver": wire.Redeliver(ledgers=sets, uncounted=not counted, request_id=request_id)}
        case SendSeek(request_id, to):
            yield {"seek": _seek(request_id, to, exact=durable or inclusive, inclusive=inclusive)}


def _seek(request_id: int, to: MessageId | int, *, exact: bool, inclusive: bool) -> wire.Seek:
    """Returns the request. A subscription that lasts is moved to exactly that message (`at_message`), and nothing is
    left out here: others may move its cursor back at any time. A reader's place is its own: it leaves out what is
    before (`Start`)."""
    seek = wire.Seek(request_id=request_id)
    if isinstance(to, MessageId):
        seek.message_id.CopyFrom((at_message(to, inclusive=inclusive) if exact else to).to_wire())
    else:
        seek.publish_time_ms = to
    return seek


def acks_of(group: AckGroup, request_id: int = 0) -> list[wire.Ack]:
    """Returns the requests of a group, in order; the last of them is answered."""
    acks: list[wire.Ack] = []
    if group.cumulative is not None:
        (ledger_id, entry_id), last = group.cumulative
        entry = wire.AckedEntry(
            ledger_id=ledger_id, entry_id=entry_id, batch_indexes=() if last == WHOLE else (last,)
        )
        acks.append(wire.Ack(kind=wire.Ack.CUMULATIVE, entries=[entry]))
    if group.whole or group.parts:
        parts = [
            wire.AckedEntry(
                ledger_id=ledger_id, entry_id=entry_id, batch_bits=bits.to_bytes((bits.bit_length() + 7) // 8, "little")
            )
            for (ledger_id, entry_id), bits in group.parts.items()
        ]
        some = {ledger_id: each for ledger_id, each in group.whole.items() if len(each) > 1}
        parts += [
            wire.AckedEntry(ledger_id=ledger_id, entry_id=each.min())
            for ledger_id, each in group.whole.items() if len(each) == 1
        ]  # fmt: skip
        acks += _individual(parts, entry_sets(some))
    if acks:
        acks[-1].request_id = request_id
    return acks


def _individual(parts: list[wire.AckedEntry], sets: list[wire.EntrySet]) -> Iterator[wire.Ack]:
    """Yields as many acks as it takes: a broker refuses requests above REQUEST_BYTES_MAX."""
    ack, size = wire.Ack(kind=wire.Ack.INDIVIDUAL), 0
    every: list[wire.AckedEntry | wire.EntrySet] = [*parts, *sets]
    for each in every:
        more = each.ByteSize() + 8
        if size and size + more > ACK_BYTES:
            yield ack
            ack, size = wire.Ack(kind=wire.Ack.INDIVIDUAL), 0
        if isinstance(each, wire.AckedEntry):
            ack.entries.append(each)
        else:
            ack.ledgers.append(each)
        size += more
    yield ack


def entry_sets(sets: EntrySets) -> list[wire.EntrySet]:
    found = []
    for ledger_id, entries in sets.items():
        entries.run_optimize()
        found.append(wire.EntrySet(ledger_id=ledger_id, entries=entries.serialize()))
    return found
