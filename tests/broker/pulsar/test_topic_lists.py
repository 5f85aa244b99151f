"""Watchers of topics by a pattern, as Pulsar's Java client uses them."""

import asyncio
import sys
from typing import Any

import pytest

from magnetar.broker.pulsar import lookup
from magnetar.broker.pulsar.lookup import hash_topic_names
from magnetar.proto import pulsar_pb2 as pulsar
from magnetar.proto.errors import InvalidRequest, NotAllowed
from magnetar.runtime.network import Endpoint, World
from tests.broker.pulsar.raw import Raw, simulate

pytestmark = pytest.mark.run_by.with_args(simulate)

pytest.importorskip("re2", reason="patterns are matched by google-re2, which is optional")
NS = "persistent://public/default"
PATTERN = f"{NS}/orders-.*"


async def watch(
    raw: Raw, number: int = 1, pattern: str = PATTERN, namespace: str = "public/default", **more: Any
) -> Any:
    asked = pulsar.CommandWatchTopicList(
        request_id=number, watcher_id=number, namespace=namespace, topics_pattern=pattern, **more
    )
    raw.send(watch_topic_list=asked)
    return await raw.next("watch_topic_list_success", "error")


async def unwatch(raw: Raw, number: int = 1) -> None:
    raw.send(watch_topic_list_close=pulsar.CommandWatchTopicListClose(request_id=9, watcher_id=number))
    await raw.next("success")


async def closed(*raws: Raw) -> None:
    """Their watchers end with them."""
    for raw in raws:
        await raw.stream.close()
    await asyncio.sleep(5)


async def test_topics_that_match_are_told_and_each_change_of_them_until_the_watcher_is_closed(
    world: World, endpoint: Endpoint, /
) -> None:
    raw, other = await Raw.connected(world, endpoint), await Raw.connected(world, endpoint)
    await other.open_producer(1, f"{NS}/orders-1")
    await other.open_producer(2, f"{NS}/other")
    first = await watch(raw)
    assert (list(first.topic), first.topics_hash) == ([f"{NS}/orders-1"], hash_topic_names([f"{NS}/orders-1"]))
    await other.open_producer(3, f"{NS}/another")
    await other.open_producer(4, f"{NS}/orders-2")
    update = await raw.next("watch_topic_update")
    both = [f"{NS}/orders-1", f"{NS}/orders-2"]
    assert (list(update.new_topics), list(update.deleted_topics)) == (both[1:], [])
    assert (update.watcher_id, update.topics_hash) == (1, hash_topic_names(both))
    assert not (await watch(raw, 2, topics_hash=update.topics_hash)).topic, "the client has them"
    await unwatch(raw, 1)
    await other.open_producer(5, f"{NS}/orders-3")
    assert (await raw.next("watch_topic_update")).watcher_id == 2
    await unwatch(raw, 2)
    await unwatch(raw, 2)
    assert list((await watch(raw, 1)).topic) == [*both, f"{NS}/orders-3"]
    await closed(raw, other)


async def test_a_second_watcher_of_an_id_and_wrong_ones_are_refused_and_the_connection_goes_on(
    world: World, endpoint: Endpoint, /
) -> None:
    raw = await Raw.connected(world, endpoint)
    await watch(raw, 1)
    assert (await watch(raw, 1)).error == pulsar.ServiceNotReady
    for pattern in ("(", "a" * 2000, "(?=x)", "(a{500}){500}", "\x00["):
        assert (await watch(raw, 2, pattern)).error == pulsar.NotAllowedError, pattern
    for namespace in ("", "a/b/c/d", "public/none"):
        assert (await watch(raw, 2, namespace=namespace)).HasField("error"), namespace
    assert not (await watch(raw, 3)).topic
    for number in range(10, 110):
        answer = await watch(raw, number)
    assert answer.error == pulsar.NotAllowedError
    await closed(raw)


def test_a_pattern_costs_no_more_than_its_names_are_long() -> None:
    matches = lookup.compile_topic_pattern("persistent://public/default/(a|a)*(a|a)*(a|a)*b")
    assert not matches(f"{NS}/" + "a" * 100_000)
    assert matches(f"{NS}/ab")


def test_without_the_library_patterns_are_refused_and_the_flag_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lookup.supports_topic_patterns()
    monkeypatch.setitem(sys.modules, "re2", None)
    with pytest.raises(NotAllowed, match="google-re2"):
        lookup.compile_topic_pattern("x")
    monkeypatch.undo()
    with pytest.raises(InvalidRequest, match="no pattern"):
        lookup.compile_topic_pattern("(")
