"""Who sends and who receives in a scene: the SDK for asyncio, its blocking face and Pulsar's client, Spark, the outbox.

Each sends a message and says what it was told (`judge.Outcome`), and turns what it receives into a `judge.Got`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, cast

import magnetar
from magnetar.schema import AvroSchema, Integer, Record, String
from tests.pairs.judge import Got, Outcome, Sent

DELAY_S = 0.3
REFUSALS = (
    magnetar.MessageTooBig, magnetar.TransactionAborted, magnetar.ProducerBlockedQuotaExceededException,
    magnetar.TopicNotFound,
)  # fmt: skip


class Body(Record):
    """What a message says, where its topic has a schema."""

    number = Integer(required=True)
    text = String()


def _later_body() -> type[Body]:
    class Later(Record):
        text = String()
        number = Integer(required=True)
        more = String(default="", required_default=True)

    Later.__name__ = "Body"
    return cast(type[Body], Later)


LaterBody = _later_body()
"""Its next version: the fields in another order, and one more."""


def value_of(message: Sent, typed: bool, body: type[Body] = Body) -> Any:
    if message.text is None:
        return None
    return body(number=message.number, text=message.text) if typed else message.text.encode()


def got_of(message: Any, typed: bool) -> Got:
    """Of a message of the SDK, or of Pulsar's client, which has the same methods."""
    text: str | None
    if message.has_null_value():
        text = None
    elif typed:
        text = message.value().text
    else:
        text = message.data().decode(errors="replace")
    return Got(text, message.partition_key(), dict(message.properties()))


def told(message: Sent, error: BaseException | None) -> None:
    """Notes an outcome."""
    if error is None:
        message.outcome = Outcome.STORED
    elif isinstance(error, REFUSALS):
        message.outcome, message.why = Outcome.REFUSED, f"{type(error).__name__}: {error}"
    elif isinstance(error, magnetar.OutcomeUnknown | magnetar.Timeout):
        message.outcome, message.why = Outcome.UNKNOWN, f"{type(error).__name__}: {error}"
    else:
        raise error


async def send_each(
    producer: Any, messages: Sequence[Sent], *, typed: bool, batch: bool, ids: bool = False, txn: Any = None,
    delayed: Callable[[Sent], bool] = lambda _: False, body: type[Body] = Body,
) -> None:  # fmt: skip
    """With the SDK for asyncio: one after the other, or as batches. `ids`: each has its number as its sequence id."""

    async def send(message: Sent) -> None:
        try:
            await outcome_of(producer, message, value_of(message, typed, body), ids, txn, delayed(message))
        except magnetar.PulsarException as error:
            told(message, error)
        else:
            told(message, None)

    if batch:
        await asyncio.gather(*map(send, messages))
        return
    for message in messages:
        await send(message)


def priority_of(message: Sent) -> int:
    """Of three levels: a key has one of them, and so its order."""
    return {"a": 0, "b": 1}.get(message.key, 2)


def outcome_of(producer: Any, message: Sent, value: Any, ids: bool, txn: Any, delayed: bool) -> Any:
    options: dict[str, Any] = {"sequence_id": message.number + 1} if ids else {}
    if delayed:
        options["deliver_after"] = timedelta(seconds=DELAY_S)
    if producer.settings.levels:
        options["priority"] = priority_of(message)
    return producer.send(
        value, message.properties, message.key, txn=txn, event_timestamp=message.number + 1,
        **options,
    )  # fmt: skip


# ------------------------------------------------------------------------------------ blocking clients
class Blocking:
    """The blocking SDK, or Pulsar's client: the same names. Its calls run in threads."""

    def __init__(self, module: Any, url: str, keys: tuple[str, str] | None, typed: bool) -> None:
        self.module = module
        options = {"logger": module.ConsoleLogger(module.LoggerLevel.Error)} if module is not magnetar else {}
        self.client = module.Client(url, **options)
        self.keys = None if keys is None else module.CryptoKeyReader(*keys)
        self.schema = _schema_of(module) if typed else None
        self.typed = typed

    async def send(self, topic: str, messages: Sequence[Sent], options: dict[str, Any], delayed: set[int]) -> None:
        await asyncio.to_thread(self._send, topic, messages, options, delayed)

    def _send(self, topic: str, messages: Sequence[Sent], options: dict[str, Any], delayed: set[int]) -> None:
        own = {**options, **self._own("encryption_key" in options)}
        if "compression_type" in own:
            own["compression_type"] = getattr(self.module.CompressionType, own["compression_type"].name)
        if "batching_type" in own:
            own["batching_type"] = getattr(self.module.BatchingType, own["batching_type"].name)
        producer = self.client.create_producer(topic, **own)
        for message in messages:
            more: dict[str, Any] = (
                {"deliver_after": timedelta(seconds=DELAY_S)} if message.number in delayed else {}
            )
            if "levels" in options:
                more["priority"] = priority_of(message)

            def done(result: Any, _: Any, message: Sent = message) -> None:
                if result == self.module.Result.Ok:
                    message.outcome = Outcome.STORED
                else:
                    message.outcome, message.why = Outcome.UNKNOWN, str(result)

            producer.send_async(
                self._value(message), done, properties=message.properties, partition_key=message.key,
                event_timestamp=message.number + 1, **more,
            )  # fmt: skip
        producer.flush()
        producer.close()

    def _value(self, message: Sent) -> Any:
        if message.text is None or not self.typed:
            return value_of(message, False)
        return _body_of(self.module)(number=message.number, text=message.text)

    def _own(self, encrypts: bool = True) -> dict[str, Any]:
        options: dict[str, Any] = {"crypto_key_reader": self.keys} if self.keys is not None and encrypts else {}
        return {**options, "schema": self.schema} if self.schema is not None else options

    async def subscribe(
        self, topic: str, name: str, heard: Callable[[Got], None], type_: str, **options: Any
    ) -> Any:  # fmt: skip
        """Calls `heard` for each message, and acknowledges it."""

        def listener(consumer: Any, message: Any) -> None:
            heard(got_of(message, self.typed))
            consumer.acknowledge(message)

        return await asyncio.to_thread(
            self.client.subscribe, topic, name, getattr(self.module.ConsumerType, type_), message_listener=listener,
            initial_position=self.module.InitialPosition.Earliest, **self._own(), **options,
        )  # fmt: skip

    async def close(self) -> None:
        await asyncio.to_thread(self.client.close)


@cache
def _body_of(module: Any) -> Any:
    if module is magnetar:
        return Body
    record = module.schema

    class PulsarBody(record.Record):  # type: ignore[name-defined,misc]
        _avro_namespace = None
        number = record.Integer(required=True)
        text = record.String()

    PulsarBody.__name__ = "Body"
    return PulsarBody


def _schema_of(module: Any) -> Any:
    return AvroSchema(Body) if module is magnetar else module.schema.AvroSchema(_body_of(module))


# ------------------------------------------------------------------------------------ the outbox
async def send_by_outbox(
    url: str, topic: str, messages: Sequence[Sent], folder: Path, typed: bool, delayed: set[int]
) -> None:
    """In one transaction of a database; a relay brings them to the topic, and all are stored when no row is left."""
    await asyncio.to_thread(_by_outbox, url, topic, messages, folder, typed, delayed)


def _by_outbox(
    url: str, topic: str, messages: Sequence[Sent], folder: Path, typed: bool, delayed: set[int]
) -> None:  # fmt: skip
    import time

    from sqlalchemy import MetaData, create_engine

    from magnetar.client.outbox.destination_core import RelaySettings
    from magnetar.client.outbox.relay import OutboxAdmin, Relay
    from magnetar.client.outbox.tables import SQLAlchemyOutbox

    engine = create_engine(f"sqlite:///{folder / 'outbox.db'}")
    metadata = MetaData()
    outbox = SQLAlchemyOutbox(metadata)
    metadata.create_all(engine)
    with engine.begin() as connection:
        for message in messages:
            at = int((time.time() + DELAY_S) * 1000) if message.number in delayed else None
            schema = {"schema": AvroSchema(LaterBody)} if typed else {}
            outbox.send(
                connection, topic, value_of(message, typed, LaterBody), key=message.key, properties=message.properties,
                event_time=message.number + 1, deliver_at=at, **schema,
            )  # fmt: skip
    settings = RelaySettings(retry_first_s=0.05, back_off_last_s=0.5, stop_s=5.0)
    with magnetar.Client(url) as client:
        relay = Relay(client, engine, outbox, name="shop", settings=settings)
        relay.start()
        try:
            admin, deadline = OutboxAdmin(engine, outbox), time.monotonic() + 30
            while admin.rows():
                assert relay.error is None, relay.error
                assert time.monotonic() < deadline, (relay.statistics(), relay.lag())
                relay.wait_ready(0.02)
                time.sleep(0.01)
        finally:
            relay.stop()
    engine.dispose()
    for message in messages:
        told(message, None)


# ------------------------------------------------------------------------------------ Spark
async def send_by_spark(
    spark: Any, url: str, topic: str, messages: Sequence[Sent], keys: tuple[str, str] | None, typed: bool, tries: int
) -> None:
    """One batch query, run again when it fails: at least once. By the schema of a topic a row of a record always has a
    value (docs/spark.md): a message without one becomes an empty text."""
    named = "key binary, properties map<string,string>"
    columns = f"value binary, {named}"
    rows: list[tuple[Any, ...]] = [
        (None if each.text is None else each.text.encode(), each.key.encode(), each.properties) for each in messages
    ]
    options = {"service.url": url, "topic": topic}
    if typed:
        for each in messages:
            each.text = each.text or ""
        columns = "number int, text string, __key binary, __properties map<string,string>"
        rows = [(each.number, each.text, each.key.encode(), each.properties) for each in messages]
        options["schema"] = "registry"
    if keys is not None:
        options |= {"encryption.keys": "a", "crypto.public.key.file": keys[0]}

    def write() -> None:
        frame = spark.createDataFrame(rows, columns).coalesce(1)
        frame.write.format("magnetar").mode("append").options(**options).save()

    for left in reversed(range(tries)):
        try:
            await asyncio.to_thread(write)
            break
        except Exception:  # of Java's: a server is away
            if not left:
                raise
    for message in messages:
        told(message, None)


async def read_by_spark(
    spark: Any, url: str, topic: str, keys: tuple[str, str] | None, typed: bool, skip: bool
) -> list[Got]:
    """`skip`: passes over what makes no row."""
    prefix = "__" if typed else ""

    def text(row: Any) -> str | None:
        if typed:
            return None if row.number is None else row.text
        return None if row.value is None else bytes(row.value).decode(errors="replace")

    def read() -> list[Got]:
        reader = spark.read.format("magnetar").option("service.url", url).option("topic", topic)
        options = {"crypto.private.key.file": keys[1]} if keys is not None else {}
        options |= {"failOnDataLoss": "false"} if skip else {}
        options |= {"schema": "registry"} if typed else {}
        rows = reader.options(**options).load().orderBy(f"{prefix}partition", f"{prefix}offset").collect()
        return [
            Got(text(row), bytes(row[f"{prefix}key"] or b"").decode(errors="replace"), dict(row[f"{prefix}properties"]))
            for row in rows
        ]

    return await asyncio.to_thread(read)
