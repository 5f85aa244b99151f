"""What is wrong of calls whose parameters no table of options has: typed, and nothing was sent or made."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import magnetar
from magnetar.client.client import Client
from magnetar.client.model.record import Array, Map, Record
from magnetar.client.transactions.coordinators import Batch
from magnetar.proto import names
from tests.client.fake_broker import FakeBroker
from tests.client.simulated import simulate

pytestmark = pytest.mark.run_by.with_args(simulate)

HIGH = "\ud800"
ID = magnetar.MessageId


@pytest.mark.parametrize("call", [
    *(lambda of, bad=bad: of["client"].commit_batch(bad, []) for bad in (5, None, "b", ("s", "q", 1))),
    *(lambda of, bad=bad: of["client"].batch_transaction(bad) for bad in (5, None, "b")),
    *(lambda of, bad=bad: of["client"].commit_batch(bad, []) for bad in (
        Batch(5, "q", 1), Batch("s", None, 1), Batch("s", "q", "1"), Batch("s", "q", -1), Batch("s", "q", 1 << 64),  # type: ignore[arg-type]
        Batch(HIGH, "q", 1), Batch("s", HIGH, 1), Batch("s", "q", True), Batch("s", "q", 1, b"r"), Batch("", "q", 1),  # type: ignore[arg-type]
        Batch("s", "q", 1, "r", "yes"),  # type: ignore[arg-type]
    )),
    *(lambda of, bad=bad: of["client"].commit_batch(Batch("s", "q", 1), bad) for bad in (None, 5, "x", [5])),
    *(lambda of, bad=bad: of["client"].sink_status(bad) for bad in (None, 5, b"s", "", HIGH, [])),
    *(lambda of, bad=bad: of["client"].half(bad, group="g") for bad in (None, 5, True, "x", [5])),
    *(lambda of, bad=bad: of["producer"].send_many(bad) for bad in (None, 5, True)),
    *(lambda of, bad=bad: of["view"].for_each(bad) for bad in (None, 5, "f")),
    *(lambda of, bad=bad: of["view"].for_each_and_listen(bad) for bad in (None, 5, "f")),
    lambda of: of["consumer"].acknowledge(ID(7, 1, 1, -1)), lambda of: of["consumer"].acknowledge([ID(7, 1, 1, -1)]),
    lambda of: of["consumer"].acknowledge_cumulative(ID(7, 1, 1, -1)),
])  # fmt: skip
async def test_a_wrong_call_is_refused_with_a_type(
    client: Client, broker: FakeBroker, /, call: Callable[[dict[str, Any]], Awaitable[Any]]
) -> None:
    of = {
        "client": client, "producer": await client.create_producer("t"),
        "consumer": await client.subscribe("t", "s"), "view": await client.create_table_view("t"),
    }  # fmt: skip
    with pytest.raises((magnetar.InvalidConfiguration, magnetar.InvalidMessage)):
        await call(of)
    assert not broker.received


@pytest.mark.parametrize("kind", [Array, Map])
@pytest.mark.parametrize("element", [5, None, "x", object, int, b"", [], Record, magnetar])
def test_elements_that_are_none(kind: Any, element: Any) -> None:
    if element is Record:
        kind(element)
    else:
        with pytest.raises(TypeError) as raised:
            kind(element)
        assert isinstance(raised.value, magnetar.InvalidConfiguration)


async def test_a_message_is_not_pickled_and_says_what_is(client: Client, broker: FakeBroker, /) -> None:
    consumer = await client.subscribe("t", "s")
    await (await client.create_producer("t")).send(b"x")
    message = await consumer.receive(1000)
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="serialize") as raised:
            copied(message)
        assert isinstance(raised.value, magnetar.InvalidMessage)
    assert pickle.loads(pickle.dumps(message.message_id())) == message.message_id()


def test_half_a_character_as_a_key_ends_no_process() -> None:
    for of in (names.hash_key, names.compute_key_slot, lambda key: names.choose_partition_of_key(key, 3)):
        with pytest.raises(UnicodeEncodeError):
            of(HIGH)
    code = "import magnetar; from magnetar.proto.names import hash_key; hash_key('\\ud800')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert ended.returncode == 1, "not a signal"
