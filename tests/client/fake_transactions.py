"""The broker in memory, with coordinators: what a transaction wrote is hidden until it commits, what it acknowledged is
pending; presumed abort. It misbehaves on request."""

from dataclasses import dataclass, field
from typing import Any

from pyroaring import BitMap

from magnetar.broker.subscription.core.cursor_state import bit_indexes
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.entry import parse_header
from magnetar.proto.errors import (
    BackPressure,
    MagnetarError,
    NotOwner,
    OutcomeUnknown,
    SinkFenced,
    TransactionAborted,
    TransactionConflict,
    TransactionEnded,
    TransactionFenced,
    TransactionForgotten,
    Unavailable,
    to_wire,
)
from magnetar.proto.states import TxnId, TxnState
from magnetar.runtime.network import Endpoint
from tests.client.fake_broker import LEDGER, FakeBroker, FakeConsumer, FakeProducer, Subscription, Topic

OPEN, PREPARED, COMMITTED, ABORTED = wire.OPEN, wire.PREPARED, wire.COMMITTED, wire.ABORTED


@dataclass
class Known:
    """A transaction, at its coordinator."""

    name: str = ""
    holder: int = 0
    sink: wire.SinkTag | None = None
    state: int = OPEN
    reason: str = ""
    joined: set[str] = field(default_factory=set)
    entries: dict[str, list[int]] = field(default_factory=dict)
    ends: list[wire.EndItem] = field(default_factory=list)
    sent: dict[tuple[str, str], dict[tuple[int, int], int]] = field(default_factory=dict)


class TransactionalBroker(FakeBroker):
    """`lose_ends`: so many requests for an end are done and not answered; `drop_ends`: not done either. `refuse_ends`:
    errors for the next ends, of one item each. `unavailable`: every coordinator is away. `full`: coordinators that have
    no room."""

    def __init__(self, partitions: dict[str, int] | None = None, *, coordinators: int = 4) -> None:
        super().__init__(partitions)
        self.coordinators = coordinators
        self.lease_ms = 60_000
        self.known: dict[TxnId, Known] = {}
        self.begins: list[wire.BeginRequest] = []
        self.end_requests: list[int] = []  # items of each
        self.finds = 0
        self.lose_ends = 0
        self.drop_ends = 0
        self.moved = 0  # so many requests are answered by NotOwner
        self.moved_items = 0  # so many transactions, one by one
        self.unavailable = False
        self.full: set[int] = set()
        self.refuse_ends: list[MagnetarError] = []
        self.forgets = False
        self.pending: dict[tuple[str, int], dict[int, dict[TxnId, int]]] = {}  # topic, id(sub) → entry → txn → bits
        self.in_txn: dict[str, dict[int, TxnId]] = {}  # topic → entry → txn
        self.ack_requests: list[wire.Ack] = []
        self.sinks: dict[str, wire.SinkReply] = {}
        self.lose_batches = 0  # so many commits of a batch are done and not answered
        self._holders: dict[str, int] = {}
        self._last = 0

    @property
    def services(self) -> list[tuple[str, object]]:
        return [("Broker", self), ("Transactions", self)]

    # ------------------------------------------------------------------------------ coordinators
    async def find(self, request: Any, context: Any) -> wire.CoordinatorReply:
        self.finds += 1
        if self.unavailable:
            raise Unavailable("no coordinator")
        return wire.CoordinatorReply(here=True, coordinators=self.coordinators)

    def _check(self) -> None:
        if self.unavailable:
            raise Unavailable("no coordinator")
        if self.moved:
            self.moved -= 1
            raise NotOwner("the coordinator moved")

    async def begin(self, request: Any, context: Any) -> wire.BeginReply:
        self._check()
        self.begins.append(request)
        if request.coordinator in self.full:
            raise BackPressure("it has no room")
        holder = 0
        if request.name:
            latest = self._holders.get(request.name, 0)
            if request.holder and request.holder != latest:
                raise TransactionFenced("a later holder")
            holder = request.holder or latest + 1
            self._holders[request.name] = holder
            for known in self.known.values():
                if known.name == request.name and known.holder < holder and known.state == OPEN:
                    known.state, known.reason = ABORTED, "fenced"
        sink = request.sink if request.HasField("sink") else None
        if sink is not None and self._has_batch(sink):
            return wire.BeginReply(already=True)
        first = TxnId.from_parts(request.coordinator, 1, self._last)
        count = request.count or 1
        for number in range(count):
            self.known[TxnId.from_parts(request.coordinator, 1, self._last + number)] = Known(
                request.name, holder, sink
            )
        self._last += count
        return wire.BeginReply(
            first=wire.TransactionId(most=first.most, least=first.least), count=count, lease_ms=self.lease_ms,
            holder=holder,
        )  # fmt: skip

    async def end(self, request: Any, context: Any) -> wire.EndReply:
        if self.drop_ends:
            self.drop_ends -= 1
            raise Unavailable("dropped on purpose")
        self._check()
        self.end_requests.append(len(request.items))
        reply = wire.EndReply(items=[self._end_one(each) for each in request.items])
        if self.lose_ends:
            self.lose_ends -= 1
            raise Unavailable("the answer is lost on purpose")
        return reply

    def _end_one(self, item: wire.EndItem) -> wire.TransactionReply:
        txn = TxnId(item.txn.most, item.txn.least)
        known = self.known.get(txn)
        reply = wire.TransactionReply(txn=item.txn)
        if self.refuse_ends:
            reply.error.CopyFrom(to_wire(self.refuse_ends.pop(0)))
            return reply
        if known is None:
            reply.state = ABORTED
            return reply
        known.ends.append(item)
        if known.state == OPEN and item.verb == wire.EndItem.PREPARE:
            known.state = PREPARED
        elif known.state == PREPARED and item.verb == wire.EndItem.PREPARE:
            pass
        elif known.state in (OPEN, PREPARED):
            if known.name and known.holder != self._holders[known.name]:
                reply.error.CopyFrom(to_wire(TransactionFenced("a later holder")))
                return reply
            self.settle(txn, committed=item.verb == wire.EndItem.COMMIT)
        elif known.state == ABORTED and item.verb != wire.EndItem.ABORT:
            if known.reason == "fenced":
                reply.error.CopyFrom(to_wire(TransactionFenced("a later holder")))
                return reply
            reply.error.CopyFrom(to_wire(TransactionAborted("it is aborted", reason=known.reason)))
            return reply
        reply.state = known.state  # type: ignore[assignment]
        return reply

    def expire(self, txn: TxnId) -> None:
        """Its time is over."""
        self.known[txn].reason = "timeout"
        self.settle(txn, committed=False)

    def settle(self, txn: TxnId, *, committed: bool) -> None:
        known = self.known[txn]
        known.state = COMMITTED if committed else ABORTED
        for topic in self.topics.values():
            for subscription in topic.subscriptions.values():
                pending = self.pending.get((topic.name, id(subscription)), {})
                for entry_id in [each for each, holders in pending.items() if txn in holders]:
                    bits = pending[entry_id].pop(txn)
                    if not committed:
                        subscription.redeliver = sorted({*subscription.redeliver, entry_id})
                        for consumer in subscription.consumers:
                            consumer.unacked.pop(entry_id, None)
                    else:
                        acked = subscription.acked.setdefault(entry_id, set())
                        acked.update(bit_indexes(bits))
                        if len(acked) == topic.headers[entry_id].num_messages:
                            subscription.done.add(entry_id)
                self.dispatch(topic, subscription)

    # ------------------------------------------------------------------------------ sinks
    def _has_batch(self, sink: wire.SinkTag) -> bool:
        stored = self.sinks.get(sink.sink_id)
        if stored is None or (stored.query_id != sink.query_id and sink.adopt):
            return False
        if stored.query_id != sink.query_id:
            raise SinkFenced(f"another query writes {sink.sink_id}: onNewCheckpoint=adopt")
        return sink.batch <= stored.batch

    async def commit_batch(self, request: Any, context: Any) -> wire.CommitBatchReply:
        self._check()
        sink, txns = request.sink, [TxnId(each.txn.most, each.txn.least) for each in request.items]
        assert {txn.coordinator for txn in txns} <= {request.coordinator}, "a batch has one coordinator"
        if sink.sink_id and self._has_batch(sink):
            return wire.CommitBatchReply(already=True)
        known = [self.known[txn] for txn in txns]
        if known and all(each.state == COMMITTED for each in known):
            return wire.CommitBatchReply()
        if any(each.state not in (OPEN, PREPARED) for each in known):
            raise TransactionAborted("one of them is aborted", reason="timeout")
        for txn in txns:
            self.settle(txn, committed=True)
        if sink.sink_id:
            self.sinks[sink.sink_id] = wire.SinkReply(known=True, query_id=sink.query_id, batch=sink.batch)
            for txn, each in self.known.items():
                tag = each.sink
                if tag and each.state in (OPEN, PREPARED) and tag.sink_id == sink.sink_id and tag.batch <= sink.batch:
                    self.settle(txn, committed=False)
        if self.lose_batches:
            self.lose_batches -= 1
            raise OutcomeUnknown("the answer is lost on purpose")
        return wire.CommitBatchReply()

    async def sink_status(self, request: Any, context: Any) -> wire.SinkReply:
        self._check()
        return self.sinks.get(request.sink_id) or wire.SinkReply(batch=-1)

    # ------------------------------------------------------------------------------ statuses
    async def status(self, request: Any, context: Any) -> wire.StatusReply:
        self._check()
        items = []
        for each in request.txns:
            known = self.known.get(TxnId(each.most, each.least))
            if self.moved_items:
                self.moved_items -= 1
                items.append(wire.TransactionReply(txn=each, error=to_wire(NotOwner("the coordinator moved"))))
            elif self.forgets:
                items.append(wire.TransactionReply(txn=each, error=to_wire(TransactionForgotten("long ago"))))
            else:
                items.append(wire.TransactionReply(txn=each, state=ABORTED if known is None else known.state))  # type: ignore[arg-type]
        return wire.StatusReply(items=items)

    # ------------------------------------------------------------------------------ topics
    def _of_producer(self, producer: FakeProducer, kind: str, frame: Any) -> bool:
        if kind == "publish":
            metadata = parse_header(frame.publish).metadata
            if metadata.HasField("txnid_most_bits"):
                txn = TxnId(metadata.txnid_most_bits, metadata.txnid_least_bits)
                known = self.known.get(txn)
                if known is None or known.state != OPEN:
                    self.publish_errors.insert(0, TransactionEnded(f"{txn} has ended"))
                else:
                    known.joined.add(producer.topic.name)
                    if not self.publish_errors:
                        entry_id = len(producer.topic.entries)
                        sent = known.sent.setdefault((producer.topic.name, metadata.producer_name), {})
                        number = (metadata.sequence_id, metadata.chunk_id)
                        if number in sent:  # it was stored, and its receipt was lost
                            self.received.append((metadata.sequence_id, 0))
                            producer.say(receipt=wire.Receipt(
                                sequence_id=metadata.sequence_id, ledger_id=LEDGER, entry_id=sent[number], index=0,
                            ))  # fmt: skip
                            return False
                        sent[number] = entry_id
                        known.entries.setdefault(producer.topic.name, []).append(entry_id)
                        self.in_txn.setdefault(producer.topic.name, {})[entry_id] = txn
        return super()._of_producer(producer, kind, frame)

    def end_of(self, topic: Topic) -> int:
        of = self.in_txn.get(topic.name, {})
        undecided = (e for e, txn in of.items() if self.known[txn].state in (OPEN, PREPARED))
        return min(undecided, default=len(topic.entries))

    def is_hidden(self, topic: Topic, subscription: Subscription, entry_id: int) -> bool:
        txn = self.in_txn.get(topic.name, {}).get(entry_id)
        if txn is not None and self.known[txn].state == ABORTED:
            return True
        gone = {*subscription.acked.get(entry_id, ()), *self.pending_of(topic, subscription, entry_id)}
        return len(gone) == topic.headers[entry_id].num_messages

    def pending_of(self, topic: Topic, subscription: Subscription, entry_id: int) -> set[int]:
        holders = self.pending.get((topic.name, id(subscription)), {}).get(entry_id, {})
        return {each for bits in holders.values() for each in bit_indexes(bits)}

    def _of_consumer(self, me: FakeConsumer, kind: str, frame: Any) -> bool:
        if kind != "ack" or not frame.ack.HasField("txn"):
            return super()._of_consumer(me, kind, frame)
        ack = frame.ack
        self.ack_requests.append(ack)
        assert ack.request_id, "an acknowledgement in a transaction is answered"
        txn = TxnId(ack.txn.most, ack.txn.least)
        error: MagnetarError | None = None
        known = self.known.get(txn)
        if known is None or known.state != OPEN:
            error = TransactionEnded(f"{txn} has ended")
        else:
            known.joined.add(me.topic.name)
            error = self._pend(me, txn, ack)
        me.say(done=wire.Done(request_id=ack.request_id, error=None if error is None else to_wire(error)))
        return False

    def _pend(self, me: FakeConsumer, txn: TxnId, ack: wire.Ack) -> MagnetarError | None:
        whole = [(1 << header.num_messages) - 1 for header in me.topic.headers]
        acked = [sum(1 << bit for bit in me.subscription.acked.get(each, ())) for each in range(len(whole))]
        for each in me.subscription.done:
            acked[each] = whole[each]
        wanted: dict[int, int] = {}
        cumulative = ack.kind == wire.Ack.CUMULATIVE
        for ledger in ack.ledgers:
            wanted.update((each, whole[each]) for each in BitMap.deserialize(ledger.entries))
        for entry in ack.entries:
            if cumulative:
                wanted.update((each, whole[each] & ~acked[each]) for each in range(entry.entry_id + 1))
                if entry.batch_indexes:
                    wanted[entry.entry_id] &= (2 << entry.batch_indexes[0]) - 1
            else:
                wanted[entry.entry_id] = int.from_bytes(entry.batch_bits, "little") or whole[entry.entry_id]
        pending = self.pending.setdefault((me.topic.name, id(me.subscription)), {})
        for entry_id, bits in wanted.items():
            if bits & acked[entry_id]:
                return TransactionConflict(f"a message of entry {entry_id} is acknowledged")
            if any(bits & held for whose, held in pending.get(entry_id, {}).items() if whose != txn):
                return TransactionConflict(f"a message of entry {entry_id} is pending")
        for entry_id, bits in wanted.items():
            holders = pending.setdefault(entry_id, {})
            holders[txn] = holders.get(txn, 0) | bits
            gone = acked[entry_id]
            for held in holders.values():
                gone |= held
            if gone == whole[entry_id]:
                me.unacked.pop(entry_id, None)
        return None

    # ------------------------------------------------------------------------------ what a test looks at
    def visible(self, topic: str) -> list[bytes]:
        """Payload bytes of the entries that a read-committed reader gets, in order."""
        found = self.topic(topic)
        of = self.in_txn.get(topic, {})
        return [
            found.entries[e] for e in range(self.end_of(found))
            if e not in of or self.known[of[e]].state == COMMITTED
        ]  # fmt: skip

    def state_of(self, txn: TxnId) -> TxnState:
        return TxnState(self.known[txn].state)


__all__ = ["Endpoint", "TransactionalBroker"]
