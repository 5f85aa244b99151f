"""Half messages in blocking code: the same outcomes, checks in threads, callbacks that must not wait, Ctrl-C, forks."""

import threading
import time

import pytest

import magnetar
from magnetar.proto.states import TxnId


def shown(client: magnetar.Client, topic: str) -> list[bytes]:
    """All that is there, up to a message that is sent now: it is shown when all before it is decided everywhere."""
    client.create_producer(topic).send(b"last")
    reader = client.create_reader(topic, magnetar.MessageId.earliest)
    found = []
    while (data := reader.read_next(10_000).data()) != b"last" or reader.has_message_available():
        found.append(data)
    return [each for each in found if each != b"last"]


def wait_for(client: magnetar.Client, half: TxnId, state: magnetar.TransactionState) -> None:
    deadline = time.monotonic() + 20
    while client.transaction_status(half) is not state:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_half_is_published_or_dropped(url: str) -> None:
    with magnetar.Client(url) as client:
        one, two = client.create_producer("one"), client.create_producer("two")
        half = one.prepare(b"yes", {"a": "b"}, "key", group="g", check_key="1")
        assert (half.state.name, half.group, half.check_key) == ("PREPARED", "g", "1")
        half.commit()
        assert half.state is magnetar.TransactionState.COMMITTED
        dropped = one.prepare(b"no", group="g")
        dropped.rollback()
        with pytest.raises(magnetar.TransactionAborted):
            dropped.commit()
        both = client.half([magnetar.Output(b"1", producer=one), magnetar.Output(b"2", producer=two)], group="g")
        client.commit_half(str(both.id))
        assert shown(client, "one") == [b"yes", b"1"]
        assert shown(client, "two") == [b"2"]


def test_a_check_may_use_the_client_and_decides_for_a_program_that_is_silent(url: str) -> None:
    with magnetar.Client(url) as client, magnetar.Client(url) as shop:
        known = client.create_producer("known")
        known.send(b"order-17")

        @client.on_check(group="blocking")
        def check(half: magnetar.HalfCheck) -> magnetar.Decision:
            is_known = half.check_key.encode() in shown(client, "known")  # it blocks, and is not in the loop's thread
            return magnetar.Decision.COMMIT if is_known else magnetar.Decision.ROLLBACK

        producer = shop.create_producer("silent")
        yes = producer.prepare(b"17", group="blocking", check_key="order-17", check_after=0.1)
        no = producer.prepare(b"18", group="blocking", check_key="order-18", check_after=0.1)
        wait_for(shop, yes.id, magnetar.TransactionState.COMMITTED)
        wait_for(shop, no.id, magnetar.TransactionState.ABORTED)
        assert shown(shop, "silent") == [b"17"]


def test_a_coroutine_function_and_a_second_one_are_refused(url: str) -> None:
    async def check(half: magnetar.HalfCheck) -> magnetar.Decision:
        return magnetar.Decision.UNKNOWN

    with magnetar.Client(url) as client:
        with pytest.raises(magnetar.InvalidConfiguration, match="coroutine"):
            client.on_check(group="g")(check)
        client.on_check(group="g")(lambda half: magnetar.Decision.UNKNOWN)
        with pytest.raises(ValueError, match="one function"):
            client.on_check(group="g")(lambda half: magnetar.Decision.UNKNOWN)


def test_a_blocking_end_inside_a_callback_is_refused(url: str) -> None:
    with magnetar.Client(url) as client:
        producer = client.create_producer("callback")
        half = producer.prepare(b"x", group="g")
        errors: list[BaseException] = []
        done = threading.Event()

        def callback(result: object, message_id: object) -> None:
            for work in (half.commit, half.rollback, lambda: producer.prepare(b"y", group="g")):
                try:
                    work()
                except magnetar.Interrupted as error:
                    errors.append(error)
            done.set()

        producer.send_async(b"z", callback)
        assert done.wait(20)
        assert len(errors) == 3
        half.rollback()
