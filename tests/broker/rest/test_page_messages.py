"""Messages on the page: a search and its bounds, who may search, and what is published again."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

import magnetar
from magnetar.asyncio import Client
from magnetar.broker.rest.page import application, messages
from magnetar.broker.session import finding
from magnetar.proto.names import choose_partition_of_key
from magnetar.schema import JsonSchema, Record, String, StringSchema
from tests.broker.rest.http import V2, Answer, Http, T, serving
from tests.broker.rest.test_access import ALICE, NS, SUPER, guarded, lines
from tests.broker.rest.test_page import (
    HOSTILE,
    TOPIC,
    Elements,
    _event,
    _live_status,
    assert_is_harmless,
    post,
    token_of,
)
from tests.client.model.keys import Keys

__all__ = ("lines",)
MESSAGES = f"{TOPIC}/messages"


class Thing(Record):
    name = String()


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
            "waiting": 0, "skipped": 0,
        }  # fmt: skip
        assert indexes(await searched(http, key="k1", until="2020-01-01T00:00")) == []
        assert indexes(await searched(http, text="order 29", since="2020-01-01T00:00"))[-1] == 29
        assert indexes(await searched(http, text="order 29", since="2120-01-01T00:00")) == []
        first = await searched(http, until="2120-01-01T00:00")
        assert indexes(first) == [*range(299, 299 - messages.FOUND_MESSAGES_MAX, -1)]
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
            ("SEARCHED_MESSAGES_MAX", 10, "it has looked at 10 messages"),
            ("SEARCHED_BYTES_MAX", 1 << 17, "it has read 0 MiB"),
            ("SEARCH_S_MAX", -1.0, "it took -1 s"),
        ):  # fmt: skip
            with monkeypatch.context() as bounds:
                bounds.setattr(finding, name, value)
                bounds.setattr(finding, "WINDOW_MESSAGES_MAX", 5)
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
        monkeypatch.setattr(finding, "WINDOW_BYTES_MAX", 1 << 15)
        assert (await searched(http, key="0"))["progress"]["messages"] == 60, "windows of large messages are smaller"


async def test_what_cannot_be_searched_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with topic_with_client(tmp_path) as (http, client):
        chunked = await client.create_producer("t", batching_enabled=False, chunking_enabled=True)
        await chunked.send(b"needle" * 1_500_000)
        assert (await searched(http, text="needle"))["progress"]["unread"] >= 2
        producer = await client.create_producer("t", batching_enabled=True)
        await asyncio.gather(*(producer.send(b"needle") for _ in range(5)))
        assert len((await searched(http, text="needle"))["messages"]) == 5
        monkeypatch.setattr(finding, "ENTRY_MESSAGES_MAX", 0)
        assert (await searched(http, key="none"))["progress"]["unread"] >= 7


async def test_few_searches_run_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with topic_with_client(tmp_path) as (http, _):
        monkeypatch.setattr(finding, "SEARCHES_AT_ONCE_MAX", 0)
        assert (await http.ask("GET", f"{MESSAGES}?key=0")).status == 429
        assert (await http.ask("GET", MESSAGES)).status == 200


async def test_wrong_searches_are_refused(tmp_path: Path) -> None:
    async with topic_with_client(tmp_path) as (http, _):
        wrong = (
            "key=a&id=1:1", "key=a&before=<b>", "since=<b>", "text=" + "x" * 1001, "key=a&subscription=s", "where=a+b",
        )  # fmt: skip
        for query in wrong:
            answer = await http.ask("GET", f"{MESSAGES}?{query}")
            assert answer.status == 400, query
            assert b"<b>" not in answer.body


@pytest.mark.parametrize("text", [*HOSTILE, "</title><script>alert(1)</script>"])
async def test_hostile_searches_and_what_they_find_are_text(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "FOUND_MESSAGES_MAX", 1)
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


# ---------------------------------------------------------------------------------------------------- published again
async def pressed(http: Http, path: str, fields: dict[str, str], **headers: str) -> tuple[Answer, dict[str, str]]:
    """Presses a button of a message. Returns the preview, and the fields of its form."""
    cookie, token = token_of(await http.ask("GET", path, **headers))
    headers = {"Cookie": cookie, **headers}
    preview = await post(http, path, {"form": token, **fields}, **headers)
    hidden = [fields for tag, fields in Elements(preview).tags if tag == "input" and fields.get("type") == "hidden"]
    return preview, {str(each["name"]): str(each["value"]) for each in hidden} | {"cookie": cookie}


async def confirmed(http: Http, path: str, fields: dict[str, str], **headers: str) -> Answer:
    fields = dict(fields)
    return await post(http, path, fields, Cookie=fields.pop("cookie"), **headers)


async def test_a_search_counts_what_entries_unfold_to(tmp_path: Path) -> None:
    async with topic_with_client(tmp_path) as (http, client):
        producer = await client.create_producer(
            "t", batching_enabled=False, compression_type=magnetar.CompressionType.ZLib
        )
        for _ in range(20):
            await producer.send(bytes(4 << 20))
        progress = (await searched(http, text="nothing"))["progress"]
        assert progress["bytes"] > finding.SEARCHED_BYTES_MAX
        assert progress["before"] > 0, "it goes on from there"
        found = (await searched(http, text="\0"))["messages"]
        assert [each["size"] for each in found][:2] == [4 << 20, 4 << 20]


@pytest.mark.parametrize("batching", [False, True])
async def test_a_message_is_published_again_as_what_it_was_and_once_for_a_preview(
    tmp_path: Path, batching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_resend, publish_again, published = application.plan_resend, application.resend_message, list[object]()

    async def publish(*arguments: Any) -> Any:
        published.append(arguments)
        return await publish_again(*arguments)

    async def slow(*arguments: Any) -> Any:
        plan = await plan_resend(*arguments)
        await asyncio.sleep(0.1)
        return plan

    async with topic_with_client(tmp_path) as (http, client):
        options = {"batching_enabled": batching, "compression_type": magnetar.CompressionType.ZLib}
        producer = await client.create_producer("t", schema=StringSchema(), **options)
        about = {"partition_key": "k", "ordering_key": "o", "properties": {"a": "b"}, "event_timestamp": 7}
        await asyncio.gather(producer.send("first", **about), producer.send("second"))
        old = (await searched(http, key="k"))["messages"][0]
        preview, form = await pressed(http, MESSAGES, {"act": "resend", "id": old["id"]})
        assert preview.status == 200
        assert b"at the end of persistent://public/default/t" in preview.body
        assert b"It becomes the newest of its key" in preview.body
        assert len((await searched(http, key="k"))["messages"]) == 1, "a preview publishes nothing"
        monkeypatch.setattr(application, "plan_resend", slow)
        monkeypatch.setattr(application, "resend_message", publish)
        twice = Http(f"http://{http.endpoint}")
        done = [*await asyncio.gather(*(confirmed(each, MESSAGES, form) for each in (http, twice)))]
        await twice.close()
        done.append(await confirmed(http, MESSAGES, form))
        assert [each.status for each in done] == [303, 303, 303]
        assert len(published) == 1
        new, same = (await searched(http, key="k"))["messages"]
        assert same == old, "one more, though the form was sent twice"
        assert (new["payload"], new["properties"], new["index"]) == ("first", {"a": "b"}, 2)
        page = (await http.ask("GET", done[2].headers["location"])).body.decode()
        assert f'<a href="{MESSAGES}?id={new["id"]}">{new["id"]}</a>' in page
        reader = await client.create_reader("t", magnetar.MessageId.earliest, schema=StringSchema())
        got = [await reader.read_next() for _ in range(3)]
        assert [each.value() for each in got] == ["first", "second", "first"]
        assert (got[2].partition_key(), got[2].ordering_key(), got[2].event_timestamp()) == ("k", "o", 7)


async def test_a_dead_letter_goes_back_to_its_partition_and_counts_from_the_start(tmp_path: Path) -> None:
    async with topic_with_client(tmp_path) as (http, client):
        await http.done("PUT", f"{V2}/persistent/public/default/p/partitions", 3)
        producer = await client.create_producer("t-DLQ")
        letter = {
            "REAL_TOPIC": "persistent://public/default/p", "REAL_SUBSCRIPTION": "s", "ORIGIN_MESSAGE_ID": "(1,2,-1,-1)",
            "REDELIVERY_COUNT": "3", "DEAD_LETTER_REASON": "r", "RECONSUMETIMES": "3", "mine": "kept",
        }  # fmt: skip
        await producer.send(b"x", partition_key="key", properties=letter)
        letters = "/ui/topics/persistent/public/default/t-DLQ/messages"
        for times in (1, 2):
            id_ = (await http.get(f"{letters}?key=key&format=json"))["messages"][0]["id"]
            preview, form = await pressed(http, letters, {"act": "redrive", "id": id_})
            assert (preview.status, b"Only its subscription" in preview.body) == (200, True), preview.body
            done = await confirmed(http, letters, form)
            assert done.status == 303, done.body
            page = (await http.ask("GET", done.headers["location"])).body.decode()
            (where,) = re.findall(r'href="(/ui/topics/[^"]*p-partition-\d/messages\?id=[\d:]+)"', page)
            assert f"p-partition-{choose_partition_of_key('key', 3)}/" in where, "as its producer would"
            (back,) = (await http.get(f"{where}&format=json"))["messages"]
            ledger, entry, *_ = id_.split(":")
            assert back["properties"].pop("REDRIVEN_LETTER_ID").startswith(f"({ledger},{entry},-1,")
            assert back["properties"] == {
                "REDRIVEN_TO": "persistent://public/default/p/s", "mine": "kept",
                "REDRIVEN_ORIGIN_MESSAGE_ID": "(1,2,-1,-1)", "REDRIVEN": str(times),
            }  # fmt: skip
            await producer.send(b"x", partition_key="key", properties={**letter, "REDRIVEN": str(times)})


async def test_what_cannot_be_published_again_is_refused_and_says_why(tmp_path: Path) -> None:
    async with topic_with_client(tmp_path) as (http, client):
        producer = await client.create_producer("t", batching_enabled=False, chunking_enabled=True)
        for properties in ({}, {"REAL_TOPIC": "<b>"}, {"REAL_TOPIC": "persistent://public/default/none"}):
            await producer.send(b"x", properties=properties)
        found = (await searched(http, until="2120-01-01T00:00"))["messages"]
        await producer.send(b"x" * 6_000_000)
        chunk = (await http.get(f"{MESSAGES}?format=json"))["messages"][0]
        for act, id_, status, why in (
            ("redrive", found[2]["id"], 409, b"no dead letter"), ("redrive", found[1]["id"], 409, b"no dead letter"),
            ("redrive", found[0]["id"], 404, b"does not exist"), ("resend", chunk["id"], 409, b"a chunk"),
            ("resend", "999999:0", 404, b"has no message"), ("resend", "<b>", 400, b"LEDGER:ENTRY"),
            ("delete", found[0]["id"], 400, b"resend or redrive"),
        ):  # fmt: skip
            answer, _ = await pressed(http, MESSAGES, {"act": act, "id": id_})
            assert (answer.status, why in answer.body) == (status, True), (act, id_, answer.body)
            assert_is_harmless(answer)
        assert [each["acts"] for each in found] == [["resend", "redrive"], ["resend"], ["resend"]]


async def test_a_schema_goes_along_and_is_not_forced_on_a_topic(tmp_path: Path) -> None:
    async with topic_with_client(tmp_path) as (http, client):
        for topic, schema in (("text", StringSchema()), ("bytes", None)):
            await client.create_producer(topic, **({"schema": schema} if schema else {}))
        await client.create_producer("json", schema=JsonSchema(Thing))
        letters = await client.create_producer("t", batching_enabled=False, schema=StringSchema())
        for target in ("text", "json"):
            await letters.send("x", partition_key=target, properties={
                "REAL_TOPIC": f"persistent://public/default/{target}"
            })  # fmt: skip
        for target, status in (("text", 303), ("json", 409)):
            id_ = (await searched(http, key=target))["messages"][0]["id"]
            _, form = await pressed(http, MESSAGES, {"act": "redrive", "id": id_})
            assert (await confirmed(http, MESSAGES, form)).status == status, target


async def test_who_may_not_publish_there_gets_no_button_and_a_stranger_no_form(
    tmp_path: Path, lines: list[dict[str, str]]
) -> None:
    async with guarded(tmp_path) as (http, free):
        await free.done("PUT", T)
        (broker,) = (await free.get("/admin/v3/brokers/summaries"))["brokers"]
        async with Client(f"magnetar://{broker['endpoint']}") as client:
            await (await client.create_producer("t")).send(b"x", partition_key="k")
        id_ = (await searched(free, key="k"))["messages"][0]["id"]
        fields = {"act": "resend", "id": id_}
        assert (await http.ask("POST", f"{NS}/permissions/alice", ["consume"], **SUPER)).status == 204
        page = await http.ask("GET", MESSAGES, **ALICE)
        assert page.status == 200
        assert not [each for tag, each in Elements(page).tags if tag == "button" and each.get("name") == "act"]
        cookie, token = token_of(await http.ask("GET", MESSAGES, **SUPER))
        assert (await post(http, MESSAGES, {"form": token, **fields}, Cookie=cookie, **ALICE)).status == 403
        sure = {"form": token, **fields, "confirm": "1", "once": "0" * 32}
        assert (await post(http, MESSAGES, sure, Cookie=cookie, **ALICE)).status == 403
        assert (await post(http, MESSAGES, sure, **SUPER)).status == 403, "no cookie"
        for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
            assert (await post(http, MESSAGES, sure, Cookie=cookie, **headers, **SUPER)).status == 403
        assert len((await searched(free, key="k"))["messages"]) == 1
        assert (await http.ask("POST", f"{NS}/permissions/alice", ["produce", "consume"], **SUPER)).status == 204
        lines.clear()
        assert (await post(http, MESSAGES, sure, Cookie=cookie, **ALICE)).status == 303
        new = (await searched(free, key="k"))["messages"][0]["id"]
        (line,) = [each for each in lines if each["act"] == "http.Page/resend"]
        wanted = {"on": "persistent://public/default/t", "result": "done", "id": id_, "new": new}
        assert {name: line[name] for name in wanted} == wanted


async def test_an_encrypted_message_is_published_again_as_it_is_and_never_searched(tmp_path: Path) -> None:
    async with topic_with_client(tmp_path) as (http, client):
        keys = Keys("a")
        zlib = magnetar.CompressionType.ZLib
        options = {"encryption_keys": ["a"], "crypto_key_reader": keys, "compression_type": zlib}
        producer = await client.create_producer("t", batching_enabled=False, **options)
        await producer.send(b"secret " * 100, partition_key="k", properties={"a": "b"})
        found = await searched(http, text="secret")
        assert (found["messages"], found["progress"]["unread"]) == ([], 1)
        (old,) = (await searched(http, key="k"))["messages"]
        preview, form = await pressed(http, MESSAGES, {"act": "resend", "id": old["id"]})
        assert b"It is encrypted, and stays so." in preview.body
        assert (await confirmed(http, MESSAGES, form)).status == 303
        reader = await client.create_reader("t", magnetar.MessageId.earliest, crypto_key_reader=keys)
        for _ in range(2):
            got = await reader.read_next()
            assert (got.data(), got.partition_key(), got.properties()) == (b"secret " * 100, "k", {"a": "b"})
        batch = await client.create_producer("t", batching_max_publish_delay_ms=100, **options)
        await asyncio.gather(*(batch.send(b"x") for _ in range(3)))
        (last,) = (await http.get(f"{MESSAGES}?format=json"))["messages"]
        refused, _ = await pressed(http, MESSAGES, {"act": "resend", "id": last["id"]})
        assert (refused.status, b"encrypted in one batch" in refused.body) == (409, True)


# --------------------------------------------------------------------------------------------------------------- tail
TAIL = f"{TOPIC}/tail"


async def test_the_tail_has_the_newest_messages_within_its_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with topic_with_client(tmp_path) as (http, client):
        assert indexes(await http.get(f"{TAIL}?format=json")) == []
        producer = await client.create_producer("t", batching_max_publish_delay_ms=20)
        await asyncio.gather(*(producer.send(b"x" * 1000) for _ in range(120)))
        found = await http.get(f"{TAIL}?format=json")
        assert indexes(found) == [*range(119, 119 - messages.TAIL_MESSAGES_MAX, -1)]
        assert found["end_index"] == 120
        assert sum(len(each["payload"]) for each in found["messages"]) <= messages.TAIL_PAYLOAD_BYTES_MAX
        monkeypatch.setattr(messages, "TAIL_READ_BYTES_MAX", 10_000)
        assert 1 <= len(indexes(await http.get(f"{TAIL}?format=json"))) <= 10, "fewer where they are large"
        monkeypatch.setattr(messages, "TAIL_READ_BYTES_MAX", 1)
        assert indexes(await http.get(f"{TAIL}?format=json")) == [119]


async def test_the_tail_follows_while_it_is_open_and_costs_the_same_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application, "LIVE_REFRESH_S", 0.02)
    reads = list[int]()
    read = finding._search_window

    async def counted(*given: Any) -> Any:
        reads.append(given[3][1] - given[3][0])
        return await read(*given)

    monkeypatch.setattr(finding, "_search_window", counted)
    async with topic_with_client(tmp_path) as (http, client), asyncio.timeout(60):
        producer = await client.create_producer("t")
        await producer.send(b"nobody looks")
        assert reads == [], "no work for a topic that nobody looks at"
        reader, writer = await asyncio.open_connection(http.endpoint.host, http.endpoint.port)
        writer.write(f"GET {TAIL}?live=1 HTTP/1.1\r\nHost: {http.endpoint}\r\n\r\n".encode())
        longest = 0
        for number in range(5):
            await asyncio.gather(*(producer.send(b"round %d" % number) for _ in range(messages.TAIL_MESSAGES_MAX)))
            while f"round {number}" not in (html := (await _event(reader))["html"]):
                pass
            assert html.count("<pre") <= messages.TAIL_MESSAGES_MAX
            longest = max(longest, len(html))
        assert longest < 64_000
        assert max(reads) <= messages.TAIL_MESSAGES_MAX
        writer.close()
        await writer.wait_closed()
        while await _live_status(http) == 503:
            pass
        before = len(reads)
        await asyncio.sleep(0.2)  # ten turns, if it went on
        assert len(reads) <= before + 1, "it ends with its reader"


@pytest.mark.parametrize("text", HOSTILE)
async def test_a_hostile_tail_is_text(tmp_path: Path, text: str) -> None:
    async with topic_with_client(tmp_path) as (http, client):
        producer = await client.create_producer("t")
        await producer.send(text.encode(), partition_key=text, properties={text: text})
        page = await http.ask("GET", TAIL)
        assert_is_harmless(page)
        assert Elements(page).texts.count(text) == 4, "key, property and its value, payload"


async def test_the_tail_is_of_who_may_consume_and_ends_when_that_is_revoked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application, "LIVE_REFRESH_S", 0.02)
    async with guarded(tmp_path) as (http, free), asyncio.timeout(60):
        await free.done("PUT", T)
        assert (await http.ask("POST", f"{NS}/permissions/alice", ["produce"], **SUPER)).status == 204
        for query in ("", "?format=json"):
            assert (await http.ask("GET", f"{TAIL}{query}", **ALICE)).status == 403, query
        reader, writer = await asyncio.open_connection(http.endpoint.host, http.endpoint.port)
        assert (await http.ask("POST", f"{NS}/permissions/alice", ["consume"], **SUPER)).status == 204
        writer.write(
            f"GET {TAIL}?live=1 HTTP/1.1\r\nHost: {http.endpoint}\r\nAuthorization: Bearer alice\r\n\r\n".encode()
        )
        await _event(reader)
        assert (await http.ask("DELETE", f"{NS}/permissions/alice", **SUPER)).status == 204
        await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.close()
