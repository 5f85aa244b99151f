"""What asyncio's classes can do, the blocking ones can: the same methods, parameters, defaults and docstrings.

What differs is in the tables, with its reason. That client/blocking/faces.py is as the asyncio classes are:
tests/client/admin/test_stubs.py.
"""

from __future__ import annotations

import asyncio
import inspect
import typing

import pytest

import magnetar
from magnetar.client import client as aio
from magnetar.client.blocking.client import Client, TableView
from magnetar.client.blocking.consumer import Consumer, Listening, PullConsumer, Reader
from magnetar.client.blocking.loop_thread import (
    ForkReopenedFacade,
    ProcessBoundFacade,
    asyncio_transaction_of,
    shared_loop_thread,
)
from magnetar.client.blocking.producer import Half, Producer, Transaction
from magnetar.client.consume.listening import Listening as AsyncListening
from magnetar.proto import errors as wire_errors
from tests import faces
from tests.docs.reference import members

PAIRS = (
    (aio.Client, Client), (aio.Producer, Producer), (aio.Consumer, Consumer), (aio.Reader, Reader),
    (aio.TableView, TableView), (aio.Transaction, Transaction), (aio.Half, Half), (AsyncListening, Listening),
    (aio.PullConsumer, PullConsumer),
)  # fmt: skip

OF_ASYNCIO = {
    "opened by its client": "Producer.open Consumer.open PullConsumer.open Reader.open TableView.open",
    "what the client is made of": (
        "Client.connections Client.transactions Client.transaction_now Producer.connections "
        "Producer.partitions TableView.partitions TableView.inbox"
    ),
    "of its owner alone, which closes and logs it": (
        "Producer.abort Producer.is_over Producer.title Producer.check Consumer.abort Consumer.is_over Consumer.title "
        "Consumer.check Reader.abort Reader.is_over TableView.abort TableView.is_over Listening.abort "
        "PullConsumer.abort PullConsumer.is_over Consumer.is_closing"
    ),
    "of a query, whose workers run in asyncio": "Client.batch_transaction Client.commit_batch",
    "logged at the interval": "Client.statistics Producer.statistics Consumer.statistics",
    "in the loop, without a wait; a blocking program has send_async": (
        "Producer.send_nowait Producer.enqueue Producer.encode_for_later Producer.send_copy Producer.wait_for_room"
    ),
    "a step of acknowledging and receiving": (
        "Consumer.change_topics Consumer.consumer_of Consumer.acknowledge_soon Consumer.negative_acknowledge_soon "
        "Consumer.acknowledge_in Consumer.acknowledge_cumulative_nowait Consumer.start_again Reader.on_taken "
        "Reader.has_more Consumer.negative_acknowledge_now Consumer.has_listener Consumer.wait_available "
        "Reader.wait_available"
    ),
    "what a producer and a consumer say to a transaction": (
        "Transaction.begin_now Transaction.is_unfinished Transaction.begin_operation Transaction.allow_sends "
        "Transaction.cancel_operation Transaction.register_cumulative_ack Transaction.on_stored "
        "Transaction.on_refused Transaction.on_acknowledged Transaction.wait_redeliverable"
    ),
}
"""Members that asyncio's classes alone have, by the reason."""
OF_BLOCKING = {
    "the asyncio object": (
        "Client.inner Producer.inner Consumer.inner PullConsumer.inner Reader.inner TableView.inner Transaction.inner"
    ),
    "Pulsar's, without an event loop": (
        "Producer.send_async Consumer.pause_message_listener Consumer.resume_message_listener"
    ),
    "why a send failed, which has a Result and no exception": "Producer.why",
    "attributes there": "Half.id Half.group Half.check_key Half.state",
}
DIFFERENT = {
    "Client.__init__": ("world", "is for tests"),
    "Client.create_producer": ("batching_enabled", "has Pulsar's default"),
    "Client.subscribe": (
        "message_listener pattern_auto_discovery_period is_pattern_topic",
        "are in the places that they have in `pulsar.Client`; `pulsar.asyncio` has other parameters",
    ),
    "Client.create_reader": ("reader_listener", "asyncio has no listeners"),
    "Producer.send": ("disable_replication", "has Pulsar's default, which means the same"),
}
"""Parameters that differ."""


def named(table: dict[str, str]) -> list[str]:
    return [name for names in table.values() for name in names.split()]


def public(kind: type) -> dict[str, object]:
    return {name: inspect.getattr_static(kind, name) for name, _ in members(kind)}


def parameters(method: object) -> list[tuple[str, object, object]]:
    found = getattr(method, "fget", None) or method
    assert inspect.isfunction(found)
    return [(each.name, each.kind, each.default) for each in inspect.signature(found).parameters.values()]


def differing(theirs: object, ours: object) -> set[str]:
    """Names of the parameters that are in one alone, or have another kind, default or place among the common ones."""
    one, other = parameters(theirs), parameters(ours)
    common = {each[0] for each in one} & {each[0] for each in other}
    different = {each[0] for each in {*one} ^ {*other}}
    same = common - different
    assert [each for each in one if each[0] in same] == [each for each in other if each[0] in same], "their order"
    return different


def test_each_public_member_of_an_asyncio_class_is_on_the_blocking_one_and_the_other_way_round() -> None:
    theirs = {f"{aio_kind.__name__}.{name}" for aio_kind, _ in PAIRS for name in public(aio_kind)}
    ours = {f"{kind.__name__}.{name}" for _, kind in PAIRS for name in public(kind)}
    assert sorted(theirs - ours) == sorted(named(OF_ASYNCIO)), "a method is missing: tests/faces.py, or by hand"
    assert sorted(ours - theirs) == sorted(named(OF_BLOCKING))


@pytest.mark.parametrize(("theirs", "ours"), PAIRS, ids=[kind.__name__ for _, kind in PAIRS])
def test_a_blocking_method_has_the_parameters_and_a_docstring(theirs: type, ours: type) -> None:
    members_of_both = public(theirs).keys() & public(ours).keys()
    for name in {*members_of_both, "__init__"} if ours is Client else members_of_both:
        full = f"{ours.__name__}.{name}"
        there, here = inspect.getattr_static(theirs, name), inspect.getattr_static(ours, name)
        assert differing(there, here) == {*DIFFERENT.get(full, ("", ""))[0].split()}, full
        assert isinstance(there, property) == isinstance(here, property), full
        assert not inspect.iscoroutinefunction(here), full
    for name, member in public(ours).items():
        assert inspect.getdoc(member), f"{ours.__name__}.{name} has a docstring"
    with pytest.raises(TypeError, match=r"^Client\.__init__\(\) missing"):
        Client()  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", [kind for _, kind in PAIRS], ids=lambda kind: kind.__name__)
def test_the_types_of_a_blocking_method_are_known_when_the_program_runs(kind: type) -> None:
    for name, member in public(kind).items():
        hints = typing.get_type_hints(getattr(member, "fget", member))
        assert "return" in hints, f"{kind.__name__}.{name}"
    assert typing.get_type_hints(Client.create_producer)["return"] is Producer
    assert typing.get_type_hints(Producer.send_many)["txn"] == Transaction | None


def test_a_docstring_of_a_face_is_the_one_of_asyncio() -> None:
    kinds = dict(PAIRS)
    for face in faces.FACES:
        for name in " ".join((face.waits, face.ends, face.calls, face.facts, face.opens)).split():
            if name != "__init__":
                there, here = (inspect.getdoc(getattr(kind, name)) for kind in (face.kind, kinds[face.kind]))
                assert there is not None
                assert here is not None
                assert here.startswith(there), f"{face.kind.__name__}.{name} is not overridden by hand"


def handle() -> ForkReopenedFacade[aio.Consumer]:
    """One without its object, in the loop thread."""
    made = ForkReopenedFacade[aio.Consumer].__new__(ForkReopenedFacade)
    made._thread = shared_loop_thread()
    return made


def test_an_error_of_the_wire_reaches_a_program_as_the_sdks() -> None:
    async def fails() -> None:
        raise wire_errors.NotOwner("moved")

    with pytest.raises(magnetar.ServiceUnitNotReady, match="moved") as raised:
        handle()._run(fails())
    assert isinstance(raised.value.__cause__, wire_errors.NotOwner)


def test_a_method_in_a_callback_raises_interrupted_and_leaves_no_coroutine_that_is_not_awaited() -> None:
    waits = asyncio.sleep(0)

    async def callback() -> None:
        with pytest.raises(magnetar.Interrupted):
            handle()._run(waits)

    shared_loop_thread().run(callback())
    assert inspect.getcoroutinestate(waits) == inspect.CORO_CLOSED


def test_what_is_no_transaction_is_refused_also_a_half_message() -> None:
    for wrong in (object(), ProcessBoundFacade(object()), 5):
        with pytest.raises(magnetar.InvalidMessage, match="txn is a transaction of this client"):
            asyncio_transaction_of(wrong)  # type: ignore[call-overload]
