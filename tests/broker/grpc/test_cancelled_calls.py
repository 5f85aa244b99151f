"""A call that is cancelled at any of its awaits (its client went away) leaves nothing half done.

Each verb is cancelled at its first await, then at its second, and so on until one ends before. After each the topic
serves as ever: producers and consumers that were connected go on or are told, and the metadata says what memory says.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from functools import partial
from typing import Any

import pytest

from magnetar.broker.node.topic_manager import TopicManager
from magnetar.metadata import paths
from magnetar.proto.errors import MagnetarError, NotFound, NotOwner, TopicTerminated, Unavailable
from magnetar.proto.names import NamespaceName, TopicName
from tests.broker.grpc.test_services import TOPIC, Deployment

NAME = TopicName.parse(TOPIC)
CURSORS = paths.cursors(NAME.tenant, NAME.namespace, NAME.stored_local)
AWAITS_MAX = 200

Verb = Callable[[TopicManager], Coroutine[Any, Any, Any]]


class CancelledAt:
    """Runs a coroutine, and cancels its task when it waits for the n-th time."""

    def __init__(self, work: Coroutine[Any, Any, Any], awaits: int) -> None:
        self._work = work
        self._left = awaits

    def __await__(self) -> Generator[Any, Any, None]:
        steps = self._work.__await__()
        step = partial(steps.send, None)
        while True:
            try:
                waited_for = step()
            except StopIteration:
                return
            if self._left == 0:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            self._left -= 1
            try:
                step = partial(steps.send, (yield waited_for))
            except BaseException as error:
                step = partial(steps.throw, error)


async def cancelled(work: Coroutine[Any, Any, Any], awaits: int) -> bool:
    """False: it ended before its n-th await."""

    async def run() -> None:
        await CancelledAt(work, awaits)

    task = asyncio.create_task(run())
    await asyncio.wait((task,))
    if task.cancelled():
        return True
    task.result()
    return False


async def unload(broker: TopicManager) -> None:
    await broker.unload_topic(NAME)


async def unload_namespace(broker: TopicManager) -> None:
    await broker.unload_namespace(NamespaceName.parse("public/default"))


async def delete(broker: TopicManager) -> None:
    await broker.delete_topic(NAME, force=True)


async def unsubscribe(broker: TopicManager) -> None:
    await (await broker.load_topic(NAME)).registry.unsubscribe("s", force=True)


async def subscribe(broker: TopicManager) -> None:
    await (await broker.load_topic(NAME)).registry.subscribe("another")


async def trim(broker: TopicManager) -> None:
    await (await broker.load_topic(NAME)).truncate_topic()


async def terminate(broker: TopicManager) -> None:
    await (await broker.load_topic(NAME)).log.terminate()


async def set_properties(broker: TopicManager) -> None:
    topic = await broker.load_topic(NAME)
    await topic.registry.set_properties(topic.find_subscription("s"), {"a": "b"})


VERBS: tuple[Verb, ...] = (unload, unload_namespace, delete, unsubscribe, subscribe, trim, terminate, set_properties)


async def retried(attempt: Callable[[], Awaitable[Any]]) -> Any:
    async with asyncio.timeout(10):
        while True:
            try:
                return await attempt()
            except (Unavailable, NotOwner):
                await asyncio.sleep(0.005)


async def serves(deployment: Deployment) -> None:
    """Who comes now is served, and the subscriptions in memory are those of the metadata."""
    try:
        producer = await retried(lambda: deployment.producer(name=""))
    except TopicTerminated:
        await retried(lambda: deployment.broker.topic_manager.delete_topic(NAME, force=True))
        return
    consumer = await retried(lambda: deployment.consumer())
    await producer.send(b"after")
    delivery = await consumer.receive()
    await consumer.ack(delivery, cumulative=True)
    topic = await deployment.broker.topic_manager.load_topic(NAME)
    stored = set(await deployment.running.sessions[0].children(CURSORS))
    assert {paths.decode_segment(each) for each in stored} == {
        name for name, each in topic.subscriptions.items() if each.is_durable
    }
    assert topic.find_subscription("s").store is not None
    await consumer.close()
    await producer.close()


async def told_or_served(deployment: Deployment, producer: Any, consumer: Any) -> None:
    """Who was connected gets what is published next, or hears that its topic ended here."""
    try:
        await producer.send(b"to all")
        await consumer.receive()
    except MagnetarError:
        for each in (producer, consumer):
            with pytest.raises(MagnetarError):
                await each.next("none of these kinds")


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
async def test_a_call_that_is_cancelled_at_any_of_its_awaits_leaves_nothing_half_done(deployment: Deployment,
    verb: Verb) -> None:
    for awaits in range(AWAITS_MAX):
        producer, consumer = await deployment.producer(), await deployment.consumer()
        await producer.send(b"before")
        await consumer.receive()
        try:
            over = not await cancelled(verb(deployment.broker.topic_manager), awaits)
        except NotFound:
            over = True
        if verb in (unload, unload_namespace, delete):
            await told_or_served(deployment, producer, consumer)
        await producer.close()
        await consumer.close()
        await serves(deployment)
        if over:
            assert awaits > 0, "it was cancelled nowhere"
            return
    raise AssertionError("it waits too often to be tried everywhere")
