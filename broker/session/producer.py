"""A producer of any protocol: takes entries, and answers through a port; credit bounds what it has in flight.

    session = await ProducerSession.open(broker, options, port, caller)      or a typed error
    session.publish(entry)       at once; the port gets the outcome later, in the order of the publishes
    await session.close()        what is in flight is answered first
    session.leave()              at once: the connection is lost

**Credit** (bytes). The broker grants `session.credit` at opening. A publish costs its length and ENTRY_COST_BYTES, and
may be sent while the credit is above zero, so one entry may overdraw it. The cost of an entry that has its outcome is
owed to the producer; the port gets credit when a quarter of the grant is owed. A publish without credit closes the
session (BackPressure). So what one producer has in flight is bounded, and no other producer waits for it.

**The gate** (broker/topic/producer.py). While a backlog quota or a publish rate blocks the topic's producers, new
entries wait here, in order, bounded by the credit; it has no outcome yet, so it frees no credit, and nothing is granted
meanwhile. An entry that still waits here when the producer is closed was never published. While the memory of the
process is tight (runtime/budget.py `CallerMemory`) none is kept: the producer is closed (BackPressure), its
client opens it again, without credit until the gate opens, and sends again what has no answer.

**Transactions.** An entry whose transaction the topic has not joined yet waits here while the topic joins it, and the
later entries of the producer wait after it, in order; other producers go on. A join that is refused fails that entry
alone (broker/topic/transactions.py). Guarding tests: tests/broker/grpc/test_connect.py,
tests/broker/topic/test_transactions.py.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Protocol

import msgspec

from ...proto.errors import BackPressure, ConnectionLost, InvalidName, MagnetarError, TopicTerminated, Unavailable
from ...proto.names import NAME_BYTES_MAX, Position, TopicName, check_producer_name
from ...proto.operations import Permission
from ...proto.schema import SchemaInfo
from ...proto.states import ENTRY_COST_BYTES, AccessMode, TopicState
from ...runtime.budget import MemoryBudget
from ...runtime.files import Buffer
from ...runtime.network import CallContext
from ..cluster.schema_registry import SchemaPolicies
from ..common.config import MESSAGE_BYTES_LIMIT, BrokerConfig
from ..node.topic_manager import TopicManager
from ..topic.producer import PublishOutcomePort, TopicProducer
from ..topic.topic import Topic
from ..topic.transactions import TransactionEventToAwait

_LOG = logging.getLogger("magnetar.broker.session")

METADATA_BYTES_LIMIT = (10 << 10) - 512
"""Bytes of an entry besides its payload: Pulsar's clients compare the payload alone with the largest size that they are
told, and take frames of 10 KiB more."""

CREDIT_RETURN_DIVISOR = 4
"""Credit is returned when this fraction (1 / CREDIT_RETURN_DIVISOR) of the grant is owed: one frame for thousands of
small entries."""


def compute_metadata_bytes_max(config: BrokerConfig) -> int:
    """Returns how many bytes an entry may have in addition to a payload of `max_message_bytes`: as many as a ledger
    entry has room for, but at most METADATA_BYTES_LIMIT."""
    return max(0, min(METADATA_BYTES_LIMIT, MESSAGE_BYTES_LIMIT - config.max_message_bytes))


class ProducerOptions(msgspec.Struct, frozen=True):
    """The options with which a producer is opened. `topic`: the full name of its topic. The comments of the fields say
    what each of them means."""

    topic: str
    name: str = ""  # empty: the broker names it
    access_mode: AccessMode = AccessMode.SHARED
    properties: dict[str, str] = {}
    instance: str = ""  # a random id of the client's producer object: its next connection replaces its last one
    connection: int = 0  # counts the instance's connections: an earlier one never replaces a later one
    initial_subscription: str = ""  # created at the earliest message before the producer is opened
    topic_epoch: int = 0  # that this producer had when it was exclusive last; 0: none
    schema: SchemaInfo | None = None  # None: bytes
    room: int = 0  # bytes of an entry beside max_message_bytes, where that bounds payloads alone
    existing_only: bool = False  # TopicNotFound rather than a new topic
    acks: str = "quorum"  # what the client waits for; "one": a first copy; "none": nothing, so it need not learn more

    def check(self) -> None:
        """Raises InvalidName if a name in the options is invalid or too long."""
        if self.name:
            check_producer_name(self.name)
        check_name_size("instance", self.instance)


class ProducerPort(PublishOutcomePort, Protocol):
    """The interface through which a producer session sends answers to its client. The handlers of the protocols
    implement it, and the session calls it. None of its methods is called after `on_closed`."""

    def send_receipt(self, sequence_id: int, position: Position, index: int) -> None:
        """Sends the receipt of the entry with this sequence id, which is stored at `position`. `index`: the index of
        the entry's last message in the topic."""
        ...

    def send_provisional_receipt(self, sequence_id: int) -> None:
        """Tells a client that opened its producer with acks=one that one bookie has the entry with this sequence id,
        and all earlier ones. The receipt, or the failure, is sent later."""
        ...

    def grant_credit(self, size: int) -> None:
        """Called when the client may publish `size` more bytes."""
        ...


class ProducerSession:
    """An open producer at the broker, for any protocol. `open` creates it. The docstring of this module shows how it is
    used."""

    __slots__ = (
        "_awaiting", "_freed", "_grant", "_memory", "_opened", "_owed", "_port", "_waiting", "producer",
        "schema_version", "topic",
    )  # fmt: skip

    def __init__(self, topic: Topic, port: ProducerPort, grant: int, memory: MemoryBudget) -> None:
        self.topic = topic
        self._memory = memory  # counts the cost of the entries without an outcome
        self._port = port
        self._opened = False
        self._grant = grant
        self._freed = 0  # bytes of credit that the producer has left
        self._owed = 0  # bytes of credit to be returned that the port has not got yet
        self._waiting: deque[bytes] | None = None  # entries that wait for the gate, or for the first one's transaction
        self._awaiting = False  # the first entry waits for a transaction
        self.schema_version: int | None = None  # of its messages
        self.producer: TopicProducer

    @classmethod
    async def open(
        cls, broker: TopicManager, options: ProducerOptions, port: ProducerPort, caller: CallContext
    ) -> ProducerSession:
        """Opens a producer with these `options`, and returns its session. Raises InvalidRequest, InvalidName,
        Unauthorized, TopicTerminated, IncompatibleSchema, InvalidSchema, NotAllowed, ProducerBusy, ProducerFenced,
        NotOwner or BacklogQuotaExceeded if the producer may not be opened; or an error of loading the topic or of
        `SubscriptionRegistry.subscribe`. If this method raises or is cancelled, the broker keeps nothing of the
        producer. The port is not called before this method returns."""
        options.check()
        topic_name, principal = TopicName.parse(options.topic), caller.principal
        await broker.access.check_permission(principal, Permission.PRODUCE, topic=topic_name)
        if first := options.initial_subscription:
            await broker.access.check_permission(principal, Permission.CONSUME, topic=topic_name, subscription=first)
        topic = await broker.load_topic(topic_name, create=not options.existing_only, publishes=True)
        if topic.log.state is TopicState.TERMINATED:
            raise TopicTerminated(f"topic {topic.name} is terminated: it can be read and not written", topic=topic.name)
        id_ = broker.allocate_client_id()
        name = options.name or f"{broker.name}-{broker.world.rng.randbytes(4).hex()}-{id_}"
        session = cls(topic, port, broker.config.pending_bytes, broker.memory.requests)
        session.producer = TopicProducer(
            id_, name, options.access_mode, topic, session, address=caller.peer, instance=options.instance,
            size_max=topic.applied.max_message_bytes, connection=options.connection, epoch=options.topic_epoch,
            principal=principal, client=caller.client, since_ms=broker.world.clock.wall_ms(),
            properties=options.properties, room=options.room, acks=options.acks,
        )  # fmt: skip
        rules = SchemaPolicies.from_policies(topic.applied)
        session.schema_version = await broker.schemas.register_producer_schema(
            topic_name, options.schema, rules, principal.name
        )
        if options.initial_subscription:
            await topic.registry.subscribe(options.initial_subscription, topic.log.shape.start_position)
        try:
            await topic.producers.join(session.producer)
            if session.producer.close_error is not None:
                raise session.producer.close_error
            # revoked meanwhile, perhaps
            await broker.access.check_permission(principal, Permission.PRODUCE, topic=topic_name)
        except BaseException:
            session.leave()
            raise
        session._grant_first()
        _LOG.debug(
            "%s: producer %r is open: %s, %s, %s", topic.name, name, caller.principal, caller.peer, caller.client
        )
        return session

    def _grant_first(self) -> None:
        self._opened = True
        if self.topic.gate.must_wait:
            self._owed = self._grant
            self.topic.gate.queue_waiting_publish(self._step)
        else:
            self._freed = self._grant

    # ------------------------------------------------------------------ what it was given
    @property
    def name(self) -> str:
        return self.producer.name

    @property
    def credit(self) -> int:
        """How many bytes the client may publish now. If the number is 0 or less, the client must wait for
        `ProducerPort.grant_credit`."""
        return self._freed

    @property
    def last_sequence_id(self) -> int:
        """The highest sequence id of this producer that is stored in the topic; -1 if none is known."""
        return self.producer.last_sequence_id

    @property
    def max_message_bytes(self) -> int:
        """The largest size, in bytes, that the topic accepts for a message."""
        return self.topic.applied.max_message_bytes

    @property
    def topic_epoch(self) -> int:
        """The topic's epoch in which this producer got exclusive access; 0 if it never did."""
        return self.producer.epoch

    # ------------------------------------------------------------------ publishing
    def publish(self, entry: Buffer) -> None:
        """Publishes an entry, whose outcome is reported to the port later. `entry`: its client-part (proto/entry.py),
        which is copied before this method returns. Closes the producer with BackPressure if it has no credit, or if the
        entry would have to wait while memory is short. Does nothing if the producer is closed."""
        if self.producer.close_error is not None:
            return
        if self._freed <= 0:
            self.producer.close(
                BackPressure(f"producer {self.name!r} of topic {self.topic.name} published without credit")
            )
            return
        cost = len(entry) + ENTRY_COST_BYTES
        self._freed -= cost
        self._memory.held += cost
        topic = self.topic
        if not (self._waiting or topic.gate.limited or topic.maintenance.quota is not None):
            if (published := self.producer.publish(entry)) is not True:
                self._not_published(entry, published)
        elif self._waiting or topic.gate.must_wait:
            if self._memory.held > self._memory.tight:
                self._memory.held -= cost
                self.producer.close(BackPressure("memory is short: publish again when the topic takes publishes"))
                return
            if self._waiting is None:
                self._waiting = deque()
            self._waiting.append(bytes(entry))
            if not self._awaiting:
                topic.gate.queue_waiting_publish(self._step)
        else:
            self._publish(entry)

    def _publish(self, entry: Buffer) -> None:
        """Publishes an entry while publish rates or a backlog quota are set: counts the entry against the rates, or
        refuses it because of the quota."""
        topic, producer = self.topic, self.producer
        why, counts = (
            topic.maintenance.why_publish_refused() if topic.maintenance.quota is not None else None,
            topic.gate.limited,
        )
        before = topic.log.next_index if counts else 0
        published = producer.publish(entry) if why is None else producer.refuse_entry(entry, why)
        if counts and not isinstance(published, TransactionEventToAwait):
            topic.gate.count_published(topic.log.next_index - before, len(entry))
        if published is not True:
            self._not_published(entry, published)

    def _not_published(self, entry: Buffer, published: bool | TransactionEventToAwait) -> None:
        """Called after `TopicProducer.publish` did not give the entry to the log. If the entry must wait for a
        transaction, queues it as the first waiting one. Otherwise it has its outcome already; gives its credit back."""
        if isinstance(published, TransactionEventToAwait):
            self._awaiting = True
            if self._waiting is None:
                self._waiting = deque()
            self._waiting.appendleft(bytes(entry))
            self.topic.transactions.call_when_publishable(published, self._go_on)
        else:
            self.on_bytes_freed(len(entry))

    def _go_on(self, error: MagnetarError | None) -> None:
        """Called when the transaction for which the first waiting entry waits was joined or has ended: publishes the
        waiting entries. With `error`, first refuses the first one."""
        self._awaiting = False
        if error is not None and self._waiting:
            entry = self._waiting.popleft()
            self.producer.refuse_entry(entry, error)
            self.on_bytes_freed(len(entry))
        if self._waiting:
            self.topic.gate.queue_waiting_publish(self._step)
        else:
            self._grant_owed()

    def _step(self) -> bool:
        """Called when the gate is open: publishes the first waiting entry. Returns True if more entries can be
        published now."""
        if self._awaiting:
            return False
        if self._waiting:
            self._publish(self._waiting.popleft())
        if not self._waiting:
            self._grant_owed()
        return bool(self._waiting) and not self._awaiting

    def _grant_owed(self) -> None:
        if self._owed and self.producer.close_error is None:
            if self.topic.gate.must_wait:
                self.topic.gate.queue_waiting_publish(self._step)
                return
            owed, self._owed = self._owed, 0
            self._freed += owed
            self._port.grant_credit(owed)

    # ------------------------------------------------------------------ as the producer's outlet
    def on_bytes_freed(self, size: int) -> None:
        cost = size + ENTRY_COST_BYTES
        self._owed += cost
        self._memory.held -= cost
        if self._owed * CREDIT_RETURN_DIVISOR >= self._grant:
            self._grant_owed()

    def on_stored(self, size: int, sequence_id: int, position: Position, index: int) -> None:
        cost = size + ENTRY_COST_BYTES
        self._owed += cost
        self._memory.held -= cost
        if self._owed * CREDIT_RETURN_DIVISOR >= self._grant:
            self._grant_owed()
        self._port.send_receipt(sequence_id, position, index)

    def on_first_copy(self, sequence_id: int) -> None:
        self._port.send_provisional_receipt(sequence_id)

    def on_duplicate(self, sequence_id: int) -> None:
        self._port.on_duplicate(sequence_id)

    def on_failed(self, sequence_id: int, error: MagnetarError) -> None:
        self._port.on_failed(sequence_id, error)

    def on_publish_waiting(self, error: MagnetarError) -> None:
        if self._opened:
            self._port.on_publish_waiting(error)

    def on_closed(self, error: MagnetarError) -> None:
        if self._opened:
            self.leave()
            self._port.on_closed(error)

    # ------------------------------------------------------------------ ending
    async def close(self) -> None:
        """Closes the producer in order. Refuses the entries that wait with Unavailable, waits until the published
        entries have their outcomes, and removes the producer from the topic."""
        waiting = self._drop_waiting()
        for entry in waiting:
            self.producer.refuse_entry(entry, Unavailable(f"topic {self.topic.name}: the producer was closed before"))
        try:
            await self.producer.wait_idle()
        finally:
            self.leave()

    def leave(self) -> None:
        """Ends the producer at once, as after a lost connection. Entries that wait are dropped; those that were given
        to the log may still be stored, but their outcomes are not reported. Idempotent."""
        if self._opened:
            why = self.producer.close_error or "its client has closed it, or is gone"
            _LOG.debug("%s: producer %r is closed: %s", self.topic.name, self.producer.name, why)
        self._opened = False
        self._drop_waiting()
        self.topic.producers.leave(self.producer)
        self.producer.close(ConnectionLost("the producer has left"))

    def _drop_waiting(self) -> deque[bytes]:
        self.topic.gate.remove_waiting_publish(self._step)
        waiting, self._waiting = self._waiting or deque(), None
        self._memory.held -= sum(map(len, waiting)) + ENTRY_COST_BYTES * len(waiting)
        return waiting


def check_name_size(kind: str, name: str) -> None:
    """Raises InvalidName if `name` has more than NAME_BYTES_MAX bytes in UTF-8. `kind`: which kind of name it is, for
    the error text."""
    if len(name.encode()) > NAME_BYTES_MAX:
        raise InvalidName(f"{kind} name of {len(name)} characters is too long", size=len(name), limit=NAME_BYTES_MAX)
