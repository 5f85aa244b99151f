"""The requests of a relay to the cluster (`RelaySender`): asks for the partitions of topics, opens one producer per
destination, and publishes rows.

Each call returns at once; later the client's loop thread puts the result, a fact, into the relay's queue. `close` alone
waits. A group of rows becomes one entry: its messages are added one after the other, nothing closes their batch before
the last one, and that producer has nothing else in flight.

**Schemas.** A row names the schema of its value. All rows of a group have the same schema, and the group is sent by a
producer that was opened with it: so the topic has that schema, and the messages name its version. If the next group has
another schema, a new producer is opened in place of the old one; this does not fence the producer of another relay. A
destination is first opened without a schema; if its topic does not accept such a producer, with the schema that the
topic has.

A flight (client/outbox/destination_core.py) is a cluster transaction: the groups of each destination are sent one after
the other, all destinations at the same time, and then the transaction commits. These transactions have a name, that of
the relay's producers: the first transaction of a relay aborts a transaction that an older relay left open, so that
topics do not wait for its time-out."""

from __future__ import annotations

import asyncio
import json
import logging
from base64 import b64decode
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from ...proto.errors import MagnetarError, Unauthorized
from ...proto.names import TopicName
from ..admin.client import AdminClient
from ..blocking.client import Client
from ..blocking.loop_thread import shared_loop_thread
from ..common.errors import (
    AlreadyClosed,
    IncompatibleSchema,
    InvalidMessage,
    PulsarException,
    Result,
    translate_error,
)
from ..core.transaction import TransactionState
from ..model.composite_schemas import AutoPublishSchema, PreEncodedSchema
from ..model.message_id import MessageId
from ..model.schema import BytesSchema, Schema
from ..model.settings import ProducerAccessMode, ProducerSettings
from ..produce.entry_writer import Extras
from ..produce.producer import Producer
from ..transactions.transaction import Transaction, Transactions
from .destination_core import ClaimedRow, EntriesByDestination, RelayEffect, RelaySettings, RowsOutcome
from .relay_core import RelayCore
from .rows import DeduplicationOff, RowKeyEncoding, parse_schema

_LOG = logging.getLogger("magnetar.outbox")
RelayFact = Callable[[RelayCore, float], list[RelayEffect]]

FLIGHT_TIMEOUT_S = 60.0
"""Time-out of a flight's transaction, in seconds. After a crash of the relay, readers of its topics wait at most that
long."""
ABORT_TIMEOUT_S = 2.0
"""Longest time in seconds for which a relay that ends waits for the abort of its flight."""
ENDLESS_DELAY_MS = 3_600_000
"""Batch delay in ms that is so long that time never closes a batch: the last row of a group closes it."""

_OF_THE_ROW = {Result.MessageTooBig, Result.InvalidMessage, Result.NotAllowedError, Result.InvalidConfiguration}
"""Results by which a topic refuses an entry because of its content (docs/design/refusals.md)."""


class RelaySender:
    """Sends one relay's requests to the cluster: asks for topics, opens producers and publishes rows. `Relay` calls it
    from its thread."""

    def __init__(self, client: Client, name: str, settings: RelaySettings, tell: Callable[[RelayFact], None]) -> None:
        """Makes a sender. `name`: the name of all its producers. `tell(fact)` is called with each result in the
        client's loop thread; a fact is a function that calls a method `on_…` of the RelayCore."""
        self._client = client
        self._name = name
        self._settings = settings
        self._tell = tell
        self._producers: dict[str, Producer] = {}
        self._schemas: dict[str, str | None] = {}  # with which they were opened; empty: that of the topic
        self._admin: AdminClient | None = None
        self._closed = False
        self._transaction: Transaction | None = None
        self._named = False  # the transactions' name is this sender's

    # ------------------------------------------------------------------------------ topics
    def start_resolving_topic(self, topic: str) -> None:
        """Asks the cluster for the partitions of the topic, and whether its deduplication is on; returns at once.
        Reports the answer as `on_topic_resolved` or `on_topic_resolve_failed`."""
        shared_loop_thread().start_in_background(self._resolve(topic))

    async def _resolve(self, topic: str) -> None:
        try:
            partitions = await self._client.inner().connections.fetch_partition_count(TopicName.parse(topic))
            await self._check_deduplication(topic)
        except Exception as error:
            wrong = error if isinstance(error, MagnetarError) else translate_error(error)
            self._tell(lambda core, now: core.on_topic_resolve_failed(topic, wrong, now))
        else:
            self._tell(lambda core, now: core.on_topic_resolved(topic, partitions, now))

    async def _check_deduplication(self, topic: str) -> None:
        if self._closed:
            raise AlreadyClosed("the relay has ended")  # an admin client that is made now is not closed any more
        if self._admin is None:
            info = self._client.get_service_info()
            self._admin = AdminClient(
                info.service_url, authentication=info.authentication,
                tls_trust_certs_file_path=info.tls_trust_certs_file_path or "",
            )  # fmt: skip
        try:
            applied = await self._admin.topic_policies(topic, applied=True)
        except Unauthorized as error:
            text = f"the policy deduplication of {topic} cannot be read: {error.message}; the relay's role needs it"
            raise type(error)(text) from error
        if not applied.deduplication:
            namespace = TopicName.parse(topic).namespace_name
            raise DeduplicationOff(
                f"{topic} does not deduplicate: what is sent again after a crash would be there twice. Turn it on:"
                f" magnetar namespaces set-deduplication {namespace} --enable (or for the topic:"
                f" magnetar topics set-deduplication {topic} --enable)"
            )

    # ------------------------------------------------------------------------------ producers
    def open(self, destination: str) -> None:
        """Replaces the producer of a destination by a new one; returns at once. Reports the outcome as `on_opened` or
        `on_producer_open_failed`."""
        shared_loop_thread().start_in_background(self._open(destination))

    async def _open(self, destination: str) -> None:
        before = self._producers.pop(destination, None)
        if before is not None:
            before.abort()
        try:
            try:
                producer, schema = await self.open_producer(destination), None
            except IncompatibleSchema:  # it takes no messages without a schema
                producer, schema = await self.open_producer(destination, AutoPublishSchema()), ""
        except Exception as error:
            text = translate_error(error).message
            self._tell(lambda core, now: core.on_producer_open_failed(destination, text, now))
            return
        if self._closed:
            producer.abort()
            return
        self._producers[destination], self._schemas[destination] = producer, schema
        last = producer.last_sequence_id()
        self._tell(lambda core, now: core.on_opened(destination, last, now))

    async def open_producer(self, destination: str, schema: Schema | None = None) -> Producer:
        """Opens the producer of a destination, waits until it is open, and returns it. Fences the producer of this name
        that was open before: no message of that one can be stored after this returns. `schema` None: bytes. Raises the
        errors of `Client.create_producer`."""
        return await self._client.inner().create_producer(
            destination, schema=schema or BytesSchema(), **self._options()
        )

    def _options(self) -> dict[str, Any]:
        return {
            "producer_name": self._name, "send_timeout_millis": 0,
            "access_mode": ProducerAccessMode.ExclusiveWithFencing,
            "max_pending_messages": self._settings.rows_per_entry + 1, "batching_enabled": True,
            "batching_max_messages": self._settings.rows_per_entry + 1,
            "batching_max_allowed_size_in_bytes": 2 * self._settings.bytes_per_entry,
            "batching_max_publish_delay_ms": ENDLESS_DELAY_MS,
        }  # fmt: skip

    async def _open_as(self, destination: str, text: str | None) -> None:
        """Replaces the producer of a destination, which must have nothing in flight, by one with the schema `text`.
        Raises ValueError if the schema is not valid, IncompatibleSchema, or another error of opening a producer; then
        the old producer stays."""
        before = self._producers[destination]
        schema = BytesSchema() if text is None else PreEncodedSchema(parse_schema(text))
        settings = ProducerSettings(schema=schema, **self._options())
        inner, epoch = self._client.inner(), before.partitions[0].core.epoch
        producer = await Producer.open(inner.connections, TopicName.parse(destination), settings, epoch)
        before.abort()
        if self._closed:
            producer.abort()
        self._producers[destination], self._schemas[destination] = producer, text

    # ------------------------------------------------------------------------------ rows
    def send(self, destination: str, rows: Sequence[ClaimedRow]) -> None:
        """Sends `rows` to `destination`, whose producer must be open, as one entry; returns at once. Reports
        `on_group_outcome` when all rows have outcomes."""
        self._send(destination, rows, lambda outcome, text: self._settled(destination, outcome, text))

    def _send(
        self, destination: str, rows: Sequence[ClaimedRow], tell: Callable[[RowsOutcome, str], None],
        txn: Transaction | None = None,
    ) -> None:  # fmt: skip
        if rows[0].value_schema != self._schemas[destination]:
            shared_loop_thread().start_in_background(self._send_as(destination, rows, tell, txn))
        else:
            self._publish(destination, rows, tell, txn)

    async def _send_as(
        self, destination: str, rows: Sequence[ClaimedRow], tell: Callable[[RowsOutcome, str], None],
        txn: Transaction | None,
    ) -> None:  # fmt: skip
        """Sends `rows` through a producer that is first opened again with the schema of the rows."""
        try:
            await self._open_as(destination, rows[0].value_schema)
        except Exception as error:
            wrong = translate_error(error) if isinstance(error, MagnetarError) else error
            refused = isinstance(wrong, ValueError | IncompatibleSchema | InvalidMessage)
            tell(RowsOutcome.ROW_REFUSED if refused else RowsOutcome.PUT_OFF, f"{type(wrong).__name__}: {wrong}")
        else:
            self._publish(destination, rows, tell, txn)

    def _publish(
        self, destination: str, rows: Sequence[ClaimedRow], tell: Callable[[RowsOutcome, str], None],
        txn: Transaction | None,
    ) -> None:  # fmt: skip
        producer = self._producers[destination]
        group = _Group(len(rows), producer, tell)
        try:
            extras = [_extras(row)._replace(txn=txn) for row in rows]
        except (ValueError, RecursionError) as error:  # another program wrote the row; nothing is sent
            group.report(RowsOutcome.ROW_REFUSED, f"the row cannot be read: {error}")
            return
        added = 0
        try:
            for row, extra in zip(rows, extras, strict=True):
                partition = producer.enqueue(row.value, group.on_row_outcome, extra)
                added += 1
        except Exception as error:  # a row that is told nothing is claimed for ever
            if added:  # those before it are sent
                partition.flush_soon()
            refused = not isinstance(error, PulsarException) or error.error() in _OF_THE_ROW
            text = f"{type(error).__name__}: {error}"
            if refused and added and txn is not None:  # which is aborted: what is sent of it is sent again
                group.end_at(added, text)
            else:  # without one the producer is opened anew, and says how far those before it came
                group.report(RowsOutcome.ROW_REFUSED if refused and not added else RowsOutcome.PUT_OFF, text)
            return
        partition.flush_soon()

    def _settled(self, destination: str, outcome: RowsOutcome, text: str) -> None:
        self._tell(lambda core, now: core.on_group_outcome(destination, outcome, text, now))

    # ------------------------------------------------------------------------------ flights
    def send_in_transaction(self, parts: EntriesByDestination) -> None:
        """Sends the entries `parts` in one cluster transaction and commits it; returns at once. Reports
        `on_transaction_outcome`."""
        shared_loop_thread().start_in_background(self._send_flight(parts))

    async def _send_flight(self, parts: EntriesByDestination) -> None:
        try:
            landed = await self._run_transaction(parts)
        except Exception as error:  # a fault of ours must not leave the relay waiting
            _LOG.exception("%s: a transaction of the outbox", self._name)
            landed = _TransactionOutcome(RowsOutcome.UNKNOWN, repr(error), ())
        finally:
            self._transaction = None
        self._tell(lambda core, now: core.on_transaction_outcome(*landed, now))

    async def _run_transaction(self, parts: EntriesByDestination) -> _TransactionOutcome:
        try:
            txn = self._transaction = await self._begin()
        except PulsarException as error:
            return _TransactionOutcome(RowsOutcome.PUT_OFF, error.message, ())
        found = await asyncio.gather(*(self._groups(name, each, txn) for name, each in parts.items()))
        failed = [each for each in found if each.outcome is not RowsOutcome.STORED]
        if failed:
            await txn.abort()  # also when no broker answers: it was never committed
            return _worst(failed)
        try:
            await txn.commit()
        except PulsarException as error:
            is_known = txn.state is TransactionState.ABORTED
            return _TransactionOutcome(RowsOutcome.PUT_OFF if is_known else RowsOutcome.UNKNOWN, error.message, ())
        return _TransactionOutcome(RowsOutcome.STORED, "", ())

    async def _begin(self) -> Transaction:
        """Begins a transaction under the name of the producers. The first one takes the name from its earlier holder;
        if a later relay takes the name afterwards, beginning fails, and the name is taken again only after the database
        has confirmed that the shard is still ours."""
        home = Transactions.for_client(self._client.inner().connections)
        if not self._named:
            home.coordinators.discard_holder_number(self._name)
        self._named = False
        txn = await Transaction(home, FLIGHT_TIMEOUT_S, self._name)
        self._named = True
        return txn

    async def _groups(
        self, destination: str, groups: Sequence[Sequence[ClaimedRow]], txn: Transaction
    ) -> _TransactionOutcome:
        """Sends the groups of one destination one after the other, until one is not stored."""
        for rows in groups:
            answered: asyncio.Future[tuple[RowsOutcome, str]] = asyncio.get_running_loop().create_future()
            self._send(destination, rows, partial(_answer, answered), txn)
            outcome, text = await answered
            if outcome is not RowsOutcome.STORED:
                return _TransactionOutcome(outcome, text, (destination,) if outcome is RowsOutcome.PUT_OFF else ())
        return _TransactionOutcome(RowsOutcome.STORED, "", ())

    # ------------------------------------------------------------------------------ the end
    def close(self) -> None:
        """Closes the producers at once; the outcome of rows in flight stays unknown. Waits for the abort of the open
        cluster transaction, for ABORT_TIMEOUT_S seconds at most. No call may follow."""
        self._closed = True
        shared_loop_thread().run(self._close())

    async def _close(self) -> None:
        if self._transaction is not None:
            with suppress(TimeoutError, PulsarException):  # its commit goes on; or its time-out aborts it
                async with asyncio.timeout(ABORT_TIMEOUT_S):
                    await self._transaction.abort()
        for producer in self._producers.values():
            producer.abort()
        self._producers.clear()
        if self._admin is not None:
            await self._admin.close()


class _TransactionOutcome(NamedTuple):
    """The outcome of a cluster transaction, or of its part in one destination."""

    outcome: RowsOutcome
    error: str
    failed: tuple[str, ...]
    """Destinations whose producers are over."""


def _worst(failed: Sequence[_TransactionOutcome]) -> _TransactionOutcome:
    """Returns the outcome of a cluster transaction that failed. If some destinations must be retried, the outcome names
    all of them. Otherwise it is the outcome of the refused row."""
    off = [each for each in failed if each.outcome is not RowsOutcome.ROW_REFUSED]
    if not off:
        return failed[0]
    return off[0]._replace(failed=tuple(name for each in off for name in each.failed))


def _answer(to: asyncio.Future[tuple[RowsOutcome, str]], outcome: RowsOutcome, text: str) -> None:
    if not to.done():
        to.set_result((outcome, text))


class _Group:
    """Collects the outcomes of the rows of one group; `report` passes on only the first outcome of the group."""

    __slots__ = ("_left", "_producer", "_refusal", "_results", "_rows", "_tell", "_told")

    def __init__(self, rows: int, producer: Producer, tell: Callable[[RowsOutcome, str], None]) -> None:
        self._rows = self._left = rows
        self._producer = producer
        self._tell = tell
        self._results: set[Result] = set()
        self._refusal = ""  # why a row, and what follows it, was not sent
        self._told = False

    def on_row_outcome(self, result: Result, _message_id: MessageId) -> None:
        self._results.add(result)
        self._left -= 1
        if not self._left:
            self._tell_all()

    def end_at(self, rows: int, refusal: str) -> None:
        """Shortens the group to its first `rows` rows, because the next one was refused. The group reports when these
        have their outcomes."""
        self._left -= self._rows - rows
        self._refusal = refusal
        if not self._left:
            self._tell_all()

    def _tell_all(self) -> None:
        if self._results == {Result.Ok}:
            self.report(RowsOutcome.ROW_REFUSED if self._refusal else RowsOutcome.STORED, self._refusal)
            return
        why = self._producer.partitions[0].why or ", ".join(each.name for each in self._results)
        refused = self._results <= _OF_THE_ROW and not self._producer.is_over
        self.report(RowsOutcome.ROW_REFUSED if refused else RowsOutcome.PUT_OFF, why)

    def report(self, outcome: RowsOutcome, text: str) -> None:
        if not self._told:
            self._told = True
            self._tell(outcome, text)


def _extras(row: ClaimedRow) -> Extras:
    """Returns the message fields of a row beyond its value. Raises ValueError if `properties` is no JSON object."""
    properties: Any = json.loads(row.properties) if row.properties else None
    if not isinstance(properties, dict | None):
        raise ValueError("properties is no JSON object")
    is_bytes = row.key_form == RowKeyEncoding.BYTES
    return Extras(
        properties, None if is_bytes else row.key, sequence_id=row.seq, event_timestamp=row.event_time,
        deliver_at=row.deliver_at, key_bytes=b64decode(row.key or "", validate=True) if is_bytes else None,
        null_key=row.key_form == RowKeyEncoding.NULL,
    )  # fmt: skip
