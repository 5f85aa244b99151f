"""Every request of proto/wire.proto with the values that the wire can carry and nobody should send.

Each method of each service, and each item of each stream, is sent a valid request with one field at a time made
extreme: the ends of the number types, unknown enum values, not-a-number, empty and very long text, bitmaps that name
2^32 entries for a few bytes, 50,000 elements. It has to end in success or in a typed error, without holding the event
loop, and another client is served after each of them. What is measured is the time that the thread computes within one
step of the loop, so a busy machine does not count; the bound is ten times what the rule says
(runtime/alarm.py).
"""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import Awaitable, Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from pyroaring import BitMap

from magnetar.proto import wire_pb2 as wire
from magnetar.proto.checksum import encode_varint
from magnetar.proto.errors import ConnectionLost, InternalError, MagnetarError, from_wire
from magnetar.proto.names import LATEST
from magnetar.runtime.network import Endpoint, find_rpc
from tests.compiled import COMPILED
from tests.support.cluster import Cluster, TestConsumer, TestProducer, client_part, cluster
from tests.support.steps import Steps, slowness

STEP_S = 0.05
"""Ten times the rule."""
WORK_S = 1.5
"""In all, of one request."""
TOPIC = "persistent://public/default/extreme"
CASES_A_COLLECTION = 25
MANY = 50_000
BIG = 5 << 20
F = FieldDescriptor


def bombs() -> list[bytes]:
    """Bitmaps: all of 2^32 in 900 KB of runs, one container in 8 bytes of them, values without runs, and garbage."""
    every, one, odd = BitMap(), BitMap(), BitMap(range(1, 1 << 20, 2))
    every.add_range(0, 1 << 32)
    one.add_range(0, 1 << 16)
    for each in (every, one):
        each.run_optimize()
    return [every.serialize(), one.serialize(), odd.serialize(), BitMap([0, (1 << 32) - 1]).serialize(), b"\xff" * 100]


NUMBERS = {
    F.CPPTYPE_INT32: [0, -1, 1, (1 << 31) - 1, -(1 << 31)],
    F.CPPTYPE_INT64: [0, -1, 1, (1 << 31) - 1, LATEST[0], -(1 << 63)],
    F.CPPTYPE_UINT32: [0, 1, (1 << 31) - 1, (1 << 32) - 1],
    F.CPPTYPE_UINT64: [0, 1, (1 << 31) - 1, 1 << 63, (1 << 64) - 1],
    F.CPPTYPE_DOUBLE: [0.0, -1.0, math.nan, math.inf, -math.inf, 1e308, 5e-324],
    F.CPPTYPE_ENUM: [-1, 99, (1 << 31) - 1],
    F.CPPTYPE_BOOL: [True],
}
SIZES = [100_000, BIG]


def values(field: FieldDescriptor) -> Iterator[Any]:
    """Of one element of it."""
    if field.cpp_type in NUMBERS:
        yield from NUMBERS[field.cpp_type]
    elif field.type == F.TYPE_BYTES:
        yield from (b"", *bombs(), *(b"\x00" * size for size in SIZES), client_part("p", 0, b"x")[:-1])
    elif field.type == F.TYPE_STRING:
        yield from ("", "\0", "..", "persistent://a/b", "[" * 10_000, "/" * SIZES[-1], "x" * SIZES[0])


def plain(field: FieldDescriptor) -> Any:
    if field.type == F.TYPE_STRING:
        return "x"
    return b"x" if field.type == F.TYPE_BYTES else 1


def extremes(
    valid: Message, *, deep: bool = True, only: Collection[str] | None = None
) -> Iterator[tuple[str, Message]]:
    """(what is extreme, the request): one field at a time, of all or of those in `only`."""
    for field in valid.DESCRIPTOR.fields:
        name = field.name
        if only is not None and name not in only:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for count in (MANY // 10, MANY):
                each = _copy(valid)
                getattr(each, name).update({f"{number}": "" for number in range(count)})
                yield f"{name} × {count}", each
        elif field.is_repeated:
            yield from _repeated(valid, field)
        elif field.message_type is not None:
            each = _copy(valid)
            getattr(each, name).SetInParent()
            yield f"{name} empty", each
            for what, part in extremes(getattr(valid, name)) if deep else ():
                each = _copy(valid)
                getattr(each, name).CopyFrom(part)
                yield f"{name}.{what}", each
        else:
            for value in values(field):
                each = _copy(valid)
                setattr(each, name, value)
                yield f"{name} = {str(value)[:20]}", each


def _repeated(valid: Message, field: FieldDescriptor) -> Iterator[tuple[str, Message]]:
    name = field.name
    for count in (1, MANY // 10, MANY):
        each = _copy(valid)
        several = getattr(each, name)
        if field.message_type is None:
            several.extend([plain(field)] * count if count > 1 else list(values(field))[-1:])
        else:
            for number in range(count):
                part = several.add()
                if part.DESCRIPTOR.fields_by_name.get("entry_id") is not None:
                    part.ledger_id, part.entry_id = 1, number
        yield f"{name} × {count}", each
    if field.message_type is not None:
        for what, part in extremes(getattr(_copy(valid), name).add(), deep=False):
            for count in (1, 2000):
                each = _copy(valid)
                getattr(each, name).extend([part] * (count if part.ByteSize() < 500 else 1))
                yield f"{name}.{what} × {count}", each


def _copy(message: Any) -> Any:
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


# ------------------------------------------------------------------------------------------------ what is valid
def valid(method: str, kind: type[Message], topic: str) -> Message:
    request = kind()
    fields = request.DESCRIPTOR.fields_by_name
    if "topic" in fields:
        request.topic = topic  # type: ignore[attr-defined]
    if "subscription" in fields:
        request.subscription = "s"  # type: ignore[attr-defined]
    if "namespace" in fields and not method.endswith("Policies"):
        request.namespace = "extreme/ns"  # type: ignore[attr-defined]
    if "name" in fields:
        of_tenant = "Tenant" in method or method == "ListNamespaces"
        of_namespace = "Namespace" in method and not of_tenant
        request.name = (  # type: ignore[attr-defined]
            "s" if "topic" in fields else "extreme" if of_tenant else "extreme/ns" if of_namespace else topic
        )
    return request


def method_names(service: str, *, streaming: bool) -> list[str]:
    methods = wire.DESCRIPTOR.services_by_name[service].methods
    return [method.name for method in methods if method.client_streaming is streaming]


# ------------------------------------------------------------------------------------------------ the bench
class Bench:
    """Raw bytes to a broker, the longest step of the loop meanwhile, and another client beside it."""

    def __init__(self, running: Cluster, endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
        self.running = running
        self.channel = grpc.aio.insecure_channel(
            str(endpoint), options=[("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        )
        self.wrong: list[str] = []
        self.cases = 0
        self.steps = Steps(monkeypatch)

    async def beside(self) -> Bench:
        broker, topic = self.running.brokers[0], "persistent://public/default/beside"
        self.producer = await TestProducer(self.running.world, broker, topic).opened()
        self.consumer = await TestConsumer(self.running.world, broker, topic, permits=100_000).ready()
        return self

    async def try_each(self, what: str, send: Callable[[bytes], Awaitable[None]], valid: Message) -> None:
        for case, request in extremes(valid):
            data = request.SerializeToString()
            await self.judge(f"{what}: {case}", lambda data=data: send(data))

    async def judge(self, case: str, send: Callable[[], Awaitable[None]], work_s: float = WORK_S) -> None:
        """What is wrong is so twice: once may be the machine's."""
        if await self._problem(send, work_s) and (problem := await self._problem(send, work_s)):
            self.wrong.append(f"{case}: {problem}")

    async def _problem(self, send: Callable[[], Awaitable[None]], work_s: float) -> str:
        self.cases += 1
        if self.cases % CASES_A_COLLECTION == 0:
            gc.collect()
        await asyncio.sleep(0)
        self.steps.clear()
        problem = ""
        try:
            async with asyncio.timeout(20):
                await send()
        except MagnetarError as error:
            if isinstance(error, InternalError):
                problem = str(error)
        except Exception as error:
            problem = f"{type(error).__name__} {str(error)[:300]}"
        steps = self.steps
        slower = slowness() if steps.longest > STEP_S or steps.all > work_s else 1.0
        if steps.longest > STEP_S * slower or steps.all > work_s * slower:
            problem = f"{steps.longest:.3f} s in one step, {steps.all:.3f} s in all, in {steps.where}"
        self.producer.publish(b"x")
        await self.producer.next("receipt")
        await self.consumer.receive_payloads(1)
        return problem

    async def call(self, path: str, data: bytes) -> None:
        try:
            await self.channel.unary_unary(path)(data, timeout=20)
        except grpc.aio.AioRpcError as error:
            raise typed(error) from error

    async def stream(self, path: str, *envelopes: bytes) -> None:
        """Sends all of them, and reads to the end."""
        call = self.channel.stream_stream(path)()
        try:
            for each in (*envelopes, b""):
                await call.write(each)
            await call.done_writing()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the server's end says why
        try:
            while await call.read() is not grpc.aio.EOF:
                pass
            if await call.code() is not grpc.StatusCode.OK:
                raise typed(call, await call.code(), await call.details(), await call.trailing_metadata())
        except grpc.aio.AioRpcError as error:
            raise typed(error) from error
        finally:
            call.cancel()


def typed(error: Any, *known: Any) -> Exception:
    """The MagnetarError that the server meant; else what gRPC made of it."""
    for key, value in (known[2] if known else error.trailing_metadata()) or ():
        if key == "magnetar-error-bin":
            return from_wire(wire.Error.FromString(value))
    code, details = known[:2] if known else (error.code(), error.details())
    if (code, details) == (grpc.StatusCode.INTERNAL, "Internal error from Core"):
        return ConnectionLost(details)  # the caller's own gRPC: the end met the caller's first operations
    return AssertionError(f"no typed error: {code} {details}")


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    gc.collect()
    gc.freeze()  # else each collection looks through what other tests left
    async with cluster(tmp_path) as running:
        bench = await Bench(running, running.brokers[0].endpoint, monkeypatch).beside()
        yield bench
        bench.steps.close()
        await bench.channel.close(0)


async def filled(bench: Bench, topic: str) -> list[Any]:
    producer = await TestProducer(bench.running.world, bench.running.brokers[0], topic, "filler").opened()
    receipts = [await producer.send(*[b"%d" % number] * 10) for number in range(20)]
    await producer.close()
    return receipts


def envelope(*items: Message) -> bytes:
    return b"".join(b"\x0a" + encode_varint(len(data := item.SerializeToString())) + data for item in items)


# ------------------------------------------------------------------------------------------------ single calls
of_sources = pytest.mark.skipif(COMPILED, reason="what serves them is not compiled")


@pytest.mark.parametrize("service", [
    "Broker", pytest.param("Admin", marks=of_sources), pytest.param("Transactions", marks=of_sources),
])  # fmt: skip
async def test_no_single_call_holds_the_broker_or_fails_without_a_type(bench: Bench, service: str) -> None:
    for kind, name in (("Tenant", "extreme"), ("Namespace", "extreme/ns")):
        request = getattr(wire, f"{kind}Spec")(name=name)
        await bench.call(find_rpc("Admin", f"Create{kind}").path, request.SerializeToString())
    for method in method_names(service, streaming=False):
        target, topic = find_rpc(service, method), f"{TOPIC}-{method.lower()}"
        request = valid(method, target.request, topic)
        if "topic" in request.DESCRIPTOR.fields_by_name or getattr(request, "name", "") == topic:
            await filled(bench, topic)
            await (await TestConsumer(bench.running.world, bench.running.brokers[0], topic).ready()).close()
        await bench.try_each(method, lambda data, path=target.path: bench.call(path, data), request)
    assert not bench.wrong, "\n".join(bench.wrong)


# ------------------------------------------------------------------------------------------------ streams
def items_of(method: str, topic: str, receipts: list[Any]) -> Iterator[tuple[str, list[Message], Message]]:
    """(kind, what goes before it, a valid item) of each kind of item of the stream."""
    last = receipts[-1]
    id_ = wire.MessageId(ledger_id=last.ledger_id, entry_id=last.entry_id, partition=-1, batch_index=-1)
    acked = wire.AckedEntry(ledger_id=last.ledger_id, entry_id=0)
    subscribe = wire.Subscribe(topic=topic, subscription="s", durable=True, type=wire.Subscribe.SHARED)
    open_ = wire.OpenProducer(topic=topic, producer_name="p")
    if method != "Connect":
        request = find_rpc("Broker", method).request.DESCRIPTOR.fields_by_name["items"].message_type._concrete_class
        yield "item", [], valid(method, request, topic)
        return
    of_kind: dict[str, Any] = {
        "open_producer": open_, "subscribe": subscribe, "ack": wire.Ack(entries=[acked], request_id=1),
        "redeliver": wire.Redeliver(), "seek": wire.Seek(request_id=1, message_id=id_),
    }  # fmt: skip
    for field in wire.ClientFrame.DESCRIPTOR.fields:
        first: list[Message] = [wire.ClientFrame(id=1, subscribe=subscribe), wire.ClientFrame(id=1, permits=10)]
        if field.name == "publish":
            first = [wire.ClientFrame(id=1, open_producer=open_)]
        item = wire.ClientFrame(id=1)
        if field.name in of_kind:
            getattr(item, field.name).CopyFrom(of_kind[field.name])
        yield field.name, [] if field.name in ("subscribe", "open_producer") else first, item


@pytest.mark.parametrize("method", method_names("Broker", streaming=True))
async def test_no_item_of_a_stream_holds_the_broker_or_fails_without_a_type(bench: Bench, method: str) -> None:
    receipts, path = await filled(bench, TOPIC), find_rpc("Broker", method).path
    for kind, before, item in items_of(method, TOPIC, receipts):
        begin = envelope(*before) if before else b""
        for case, request in extremes(item, only=(kind, "id") if kind != "item" else None):
            wanted = envelope(request)
            sent = [each for each in (begin, wanted) if each]
            await bench.judge(f"{method}: {case}", lambda sent=sent: bench.stream(path, *sent))
    for case, flood in floods(method, TOPIC, receipts):
        work_s = 5.0 if method == "Connect" else WORK_S
        await bench.judge(f"{method}: {case}", lambda flood=flood: bench.stream(path, *flood), work_s)
    assert not bench.wrong, "\n".join(bench.wrong)


def floods(method: str, topic: str, receipts: list[Any]) -> Iterator[tuple[str, list[bytes]]]:
    """As many of the smallest items as an envelope may have, and as many entries as one has."""
    if method == "Connect":
        entries = [wire.ClientFrame(id=1, publish=client_part("p", number, b"x")) for number in range(8000)]
        opening = wire.ClientFrame(id=1, open_producer=wire.OpenProducer(topic=topic, producer_name="p"))
        yield "8,000 entries", [envelope(opening), envelope(*entries)]
        openings = [wire.ClientFrame(id=id_ + 1, open_producer=opening.open_producer) for id_ in range(5000)]
        yield "5,000 openings", [envelope(*openings)]
        yield "20,000 ids", [envelope(*(wire.ClientFrame(id=id_, permits=1) for id_ in range(20_000)))]
    empty = 50_000 if method == "Read" else 250_000  # there each one is answered
    yield f"{empty} empty items", [b"\x0a\x00" * empty]
    for kind, before, item in items_of(method, topic, receipts):
        if kind not in ("subscribe", "open_producer", "id"):
            if kind in ("permits", "unsubscribe", "last_message_id", "close"):
                setattr(item, kind, 1)
            data = envelope(item)
            count = 500 if kind == "seek" else min(20_000, 500_000 // len(data))  # each is stored
            yield f"{count} × {kind}", [*([envelope(*before)] if before else []), data * count]
