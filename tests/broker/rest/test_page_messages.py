"""Messages on the page: a search and its bounds, who may search, and what is published again."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from magnetar.asyncio import Client
from magnetar.broker.rest.page import messages
from tests.broker.rest.http import Http, T, serving
from tests.broker.rest.test_access import ALICE, NS, SUPER, guarded, lines
from tests.broker.rest.test_page import HOSTILE, TOPIC, Elements, assert_is_harmless

__all__ = ("lines",)
MESSAGES = f"{TOPIC}/messages"


@asynccontextmanager
async def topic_with_client(folder: Path) -> AsyncIterator[tuple[Http, Client]]:
    async with serving(folder) as (http, broker, _), Client(f"magnetar://{broker.endpoint}") as client:
        await http.done("PUT", T)
        yield http, client


async def searched(http: Http, **query: str) -> dict[str, Any]:
    found: dict[str, Any] = await http.get(f"{MESSAGES}?{urlencode({**query, 'format': 'json'})}")
    return found


def indexes(found: dict[str, Any]) -> list[int]:
    return [each["index"] for each in found["messages"]]


@pytest.mark.parametrize("batching", [False, True])
async def test_messages_are_searched_by_key_property_text_and_time_the_newest_first(
    tmp_path: Path, batching: bool
) -> None:
    async with topic_with_client(tmp_path) as (http, client):
        producer = await client.create_producer("t", batching_enabled=batching)
        sent = [
            producer.send(b"order %d" % each, partition_key=f"k{each % 3}", properties={"n": str(each), "a b": "c=d"})
            for each in range(300)
        ]
        await asyncio.gather(*sent)
        assert indexes(await searched(http, key="k1", property="n=100")) == [100]
        assert indexes(await searched(http, text="order 29")) == [299, 298, 297, 296, 295, 294, 293, 292, 291, 290, 29]
        assert indexes(await searched(http, property="n", text="der 7", key="k0")) == [78, 75, 72]
        assert indexes(await searched(http, property="a b=c=d", text="order 1 ")) == []
        everything = await searched(http, text="none of them")
        assert everything["progress"] == {
            "messages": 300, "bytes": everything["progress"]["bytes"], "before": 0, "why": "", "unread": 0,
        }  # fmt: skip
        assert indexes(await searched(http, key="k1", until="2020-01-01T00:00")) == []
        assert indexes(await searched(http, text="order 29", since="2020-01-01T00:00"))[-1] == 29
        assert indexes(await searched(http, text="order 29", since="2120-01-01T00:00")) == []
        first = await searched(http, until="2120-01-01T00:00")
        assert indexes(first) == [*range(299, 299 - messages.FOUND_MAX, -1)]
        found, before = indexes(first), first["progress"]["before"]
        while before:
            page = await searched(http, until="2120-01-01T00:00", before=str(before))
            found, before = found + indexes(page), page["progress"]["before"]
        assert found == [*range(299, -1, -1)], "each message once, over all pages"


async def test_a_search_is_bounded_and_goes_on_by_its_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with topic_with_client(tmp_path) as (http, client):
        producer = await client.create_producer("t", batching_enabled=False)
        await asyncio.gather(*(producer.send(b"x" * 10_000, partition_key=str(each)) for each in range(60)))
        for name, value, why in (
            ("FIND_MESSAGES", 10, "it has looked at 10 messages"), ("FIND_BYTES", 1 << 17, "it has read 0 MiB"),
            ("FIND_S", -1.0, "it took -1 s"),
        ):  # fmt: skip
            with monkeypatch.context() as bounds:
                bounds.setattr(messages, name, value)
                bounds.setattr(messages, "WINDOW_MESSAGES", 5)
                path, pages = f"{MESSAGES}?key=0&as=text", 0
                while True:
                    page = (await http.ask("GET", path)).body.decode()
                    pages += 1
                    if not (link := re.search(r'href="(\?key=0[^"]*before=\d+)"', page)):
                        break
                    assert why in page
                    path = MESSAGES + link[1].replace("&amp;", "&")
                assert pages > 2, name
                assert "1 found" in page
                assert "That is all of them." in page
        monkeypatch.setattr(messages, "WINDOW_BYTES", 1 << 15)
        assert (await searched(http, key="0"))["progress"]["messages"] == 60, "windows of large messages are smaller"


async def test_what_cannot_be_searched_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with topic_with_client(tmp_path) as (http, client):
        chunked = await client.create_producer("t", batching_enabled=False, chunking_enabled=True)
        await chunked.send(b"needle" * 1_500_000)
        assert (await searched(http, text="needle"))["progress"]["unread"] >= 2
        producer = await client.create_producer("t", batching_enabled=True)
        await asyncio.gather(*(producer.send(b"needle") for _ in range(5)))
        assert len((await searched(http, text="needle"))["messages"]) == 5
        monkeypatch.setattr(messages, "MESSAGES_MAX", 0)
        assert (await searched(http, key="none"))["progress"]["unread"] >= 7


async def test_few_searches_run_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with topic_with_client(tmp_path) as (http, _):
        monkeypatch.setattr(messages, "FINDS_MAX", 0)
        assert (await http.ask("GET", f"{MESSAGES}?key=0")).status == 503
        assert (await http.ask("GET", MESSAGES)).status == 200
    searches = messages.Searches()
    monkeypatch.setattr(messages, "FINDS_MAX", 2)
    with searches.running("a"):
        for topic, runs in (("a", False), ("b", True)):
            try:
                with searches.running(topic):
                    assert runs
            except messages.BadRequest:
                assert not runs


async def test_wrong_searches_are_refused(tmp_path: Path) -> None:
    async with topic_with_client(tmp_path) as (http, _):
        for query in ("key=a&id=1:1", "key=a&before=<b>", "since=<b>", "text=" + "x" * 1001, "key=a&subscription=s"):
            answer = await http.ask("GET", f"{MESSAGES}?{query}")
            assert answer.status == 400, query
            assert b"<b>" not in answer.body


@pytest.mark.parametrize("text", [*HOSTILE, "</title><script>alert(1)</script>"])
async def test_hostile_searches_and_what_they_find_are_text(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "FOUND_MAX", 1)
    async with topic_with_client(tmp_path) as (http, client):
        producer = await client.create_producer("t", batching_enabled=False)
        name = text.partition("=")[0]
        for _ in range(2):
            await producer.send(text.encode(), partition_key=text, properties={name: text})
        query = {"key": text, "property": name, "text": text}
        page = await http.ask("GET", f"{MESSAGES}?{urlencode(query)}")
        assert_is_harmless(page)
        assert text in Elements(page).texts
        again = next(
            fields["href"] for tag, fields in Elements(page).tags if tag == "a" and "before=" in (fields["href"] or "")
        )
        more = await http.ask("GET", f"{MESSAGES}{again}")
        assert_is_harmless(more)
        assert b"1 found" in more.body


async def test_a_search_shows_nothing_to_who_may_not_consume(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (http, free):
        await free.done("PUT", T)
        assert (await http.ask("POST", f"{NS}/permissions/alice", ["produce"], **SUPER)).status == 204
        assert (await http.ask("GET", f"{MESSAGES}?key=a", **ALICE)).status == 403
        assert (await http.ask("POST", f"{NS}/permissions/alice", ["consume"], **SUPER)).status == 204
        assert (await http.ask("GET", f"{MESSAGES}?key=a", **ALICE)).status == 200


async def test_a_search_is_answered_by_a_broker_that_does_not_own_the_topic(tmp_path: Path) -> None:
    async with serving(tmp_path, brokers=2) as (http, _, running):
        owner = running.brokers[1]
        async with Client(f"magnetar://{owner.endpoint}") as client:
            await (await client.create_producer("t")).send(b"x", partition_key="k")
        assert [*owner.topic_manager.loaded], "it took the topic"
        assert [each["payload"] for each in (await searched(http, key="k"))["messages"]] == ["x"]
