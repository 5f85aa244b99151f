"""The views of a topic's insides and of the cluster's: what each shows, to whom, and that nothing hostile is markup."""

import asyncio
import json
import re
from pathlib import Path
from urllib.parse import quote, urlencode

import pytest

from magnetar.asyncio import Client
from magnetar.broker.rest.page import messages, topic_views
from magnetar.broker.session import finding
from magnetar.metadata import paths
from magnetar.metadata.records import BookieRecord, DepartingRecord, UnderReplicatedRecord
from magnetar.metadata.store import NODE_ABSENT, put_record
from tests.broker.rest.http import V2, Http, T, serving
from tests.broker.rest.test_access import ALICE, NS, SUPER, guarded, lines
from tests.broker.rest.test_page import FORM, HOSTILE, TOPIC, Elements, assert_is_harmless, token_of

__all__ = ("lines",)
MESSAGES = f"{TOPIC}/messages"


async def test_ledgers_show_their_copies_and_what_keeps_them(tmp_path: Path) -> None:
    async with serving(tmp_path) as (http, broker, _), Client(f"magnetar://{broker.endpoint}") as client:
        await http.done("PUT", T)
        await http.done("PUT", f"{T}/subscription/slow", "earliest")
        await (await client.create_producer("t")).send(b"x")
        first = (await http.get(f"{TOPIC}/ledgers?format=json"))["ledgers"][0]
        assert "slow" in first["kept"]["subscriptions"] or first["kept"]["stays"]
        whole = (await http.ask("GET", f"{TOPIC}/ledgers")).body.decode()
        assert "●" in whole
        assert first["kept"]["sentence"] in Elements(await http.ask("GET", f"{TOPIC}/ledgers")).texts
        id_ = first["copies"]["ledger_id"]
        mark = UnderReplicatedRecord(ledger_id=id_, bookies={"<b>gone": "lost"}, retry_ms=1 << 50)
        await put_record(broker.topic_manager.metadata, paths.under_replicated(id_), mark, NODE_ABSENT)
        page = await http.ask("GET", f"{TOPIC}/ledgers")
        assert "○ <code>&lt;b&gt;gone</code> lost" in page.body.decode()
        assert_is_harmless(page)


async def test_messages_are_found_by_id_time_and_subscription(tmp_path: Path) -> None:
    async with serving(tmp_path) as (http, broker, _), Client(f"magnetar://{broker.endpoint}") as client:
        await http.done("PUT", T)
        assert b"No message." in (await http.ask("GET", MESSAGES)).body
        await http.done("PUT", f"{T}/subscription/s", "earliest")
        producer = await client.create_producer("t", batching_enabled=False)
        first = await producer.send(b'{"a": [1]}', partition_key="k", properties={"p": "v"})
        last = await producer.send(b"\x00\xff")

        async def found(**query: str) -> list[dict[str, object]]:
            answer = await http.get(f"{MESSAGES}?{urlencode({**query, 'format': 'json'})}")
            listed: list[dict[str, object]] = answer["messages"]
            return listed

        id_ = f"{first.ledger_id()}:{first.entry_id()}"
        (one,) = await found(id=id_)
        assert (one["id"], one["key"], one["properties"], one["index"]) == (id_, "k", {"p": "v"}, 0)
        assert (one["way"], json.loads(str(one["payload"])), one["size"]) == ("json", {"a": [1]}, 10)
        assert [each["way"] for each in await found()] == ["hex"]
        assert [each["id"] for each in await found(subscription="s")] == [id_, f"{last.ledger_id()}:{last.entry_id()}"]
        assert [each["id"] for each in await found(time="2020-01-01T00:00")] == [id_]
        assert [each["payload"] for each in await found(id=id_, **{"as": "text"})] == ['{"a": [1]}']
        page = await http.ask("GET", f"{MESSAGES}?id={id_}")
        assert '"a": [' in "".join(Elements(page).texts)
        down = await http.ask("GET", f"{MESSAGES}?id={id_}&download=1")
        assert down.body == b'{"a": [1]}'
        assert down.headers["content-disposition"] == f'attachment; filename="{id_.replace(":", "-")}.bin"'
        assert down.headers["content-type"] == "application/octet-stream"
        assert down.headers["x-content-type-options"] == "nosniff"
        for query, status in (
            ("id=<b>", 400), ("id=1:2:3:4", 400), ("id=999999:0", 404), ("time=<b>", 400), ("subscription=none", 404),
            ("as=<b>", 400), ("subscription=s&download=1", 400),
        ):  # fmt: skip
            answer = await http.ask("GET", f"{MESSAGES}?{query}")
            assert answer.status == status, query
            assert b"<b>" not in answer.body, query


async def test_a_message_of_a_batch_has_its_index_and_what_is_large_is_cut_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path) as (http, broker, _), Client(f"magnetar://{broker.endpoint}") as client:
        producer = await client.create_producer("t", batching_max_publish_delay_ms=50)
        sent = [producer.send(b"a" * 1_000_000), producer.send(b"b" * 100)]
        ids = [await each for each in sent]
        at = f"{ids[1].ledger_id()}:{ids[1].entry_id()}"
        only = await http.get(f"{MESSAGES}?id={at}:{max(0, ids[1].batch_index())}&format=json")
        assert only["messages"][-1]["payload"] == "b" * 100
        whole = (await http.get(f"{MESSAGES}?id={ids[0].ledger_id()}:{ids[0].entry_id()}&format=json"))["messages"][0]
        assert (whole["size"], whole["cut"]) == (1_000_000, True)
        assert len(whole["payload"]) <= messages.SHOWN_PAYLOAD_BYTES_MAX
        monkeypatch.setattr(finding, "ENTRY_MESSAGES_MAX", 0)
        assert (await http.ask("GET", f"{MESSAGES}?id={at}")).status == 413


def test_payloads_are_shown_as_what_they_are() -> None:
    for payload, way, shown in (
        (b"", "", "text"), (b"plain", "", "text"), (b"[1]", "", "json"), (b"[1]", "hex", "hex"), (b"\xff", "", "hex"),
        (b"\xff", "text", "text"), (b"a\0", "", "hex"), (b"[" * 5000, "", "text"), (b"{", "json", "text"),
    ):  # fmt: skip
        assert messages.format_payload_text(payload, way, 100_000)[0] == shown, payload
    assert messages.format_payload_text("aä".encode(), "", 2) == ("text", "a"), "a letter that is cut"
    assert messages.format_payload_text(
        b"0123456789abcdefg", "hex", 100
    )[1].splitlines()[1] == f"00000010  {'67':<47}  g"


@pytest.mark.parametrize("text", [*HOSTILE, "</pre><script>alert(1)</script>", "<svg onload=alert(1)>", "\u202eevil"])
async def test_hostile_payloads_keys_and_properties_are_text(tmp_path: Path, text: str) -> None:
    async with serving(tmp_path) as (http, broker, _), Client(f"magnetar://{broker.endpoint}") as client:
        name = text if text in HOSTILE else "plain"  # the server takes no other
        producer = await client.create_producer("t", producer_name=name)
        await client.subscribe("t", name, consumer_name=name)
        await producer.send(text.encode(), partition_key=text, properties={text: text})
        page = await http.ask("GET", MESSAGES)
        assert page.status == 200
        assert_is_harmless(page)
        assert Elements(page).texts.count(text) == 4 + (name == text), "key, property, payload, producer"
        view = await http.ask("GET", f"{TOPIC}/subscription/{quote(name, safe='')}")
        assert view.status == 200
        assert_is_harmless(view)
        assert name in Elements(view).texts
        for path in (f"/ui/metadata?path={quote('/topics/' + text)}", f"/ui/metadata?path=/&after={quote(text)}"):
            assert_is_harmless(await http.ask("GET", path))


async def test_a_subscription_shows_its_cursor_its_gaps_and_its_consumers(tmp_path: Path) -> None:
    async with serving(tmp_path) as (http, broker, _), Client(f"magnetar://{broker.endpoint}") as client:
        consumer = await client.subscribe("t", "s", consumer_name="ada")
        producer = await client.create_producer("t", batching_enabled=False)
        for _ in range(4):
            await producer.send(b"x")
        got = [await consumer.receive() for _ in range(4)]
        await consumer.acknowledge(got[2])
        value = f"{TOPIC}/subscription/s?format=json"
        while not (await http.get(value))["cursor"]["gaps"]:  # noqa: ASYNC110 - acknowledgements are sent later
            await asyncio.sleep(0.01)
        page = await http.ask("GET", f"{TOPIC}/subscription/s")
        elements = Elements(page)
        assert [fields["fill-opacity"] for tag, fields in elements.tags if tag == "rect"] == [
            "0.0",
            "0.0",
            "1.0",
            "0.0",
        ]
        assert elements.texts.count("ada") == 2, "the holder of the gap, and the consumer"
        assert next(fields for tag, fields in elements.tags if tag == "svg")["role"] == "img"


async def test_the_metadata_is_walked_from_its_root(http: Http) -> None:
    await http.done("PUT", T)
    path = "/ui/metadata"
    for name in ("topics", "public", "default", "t"):
        links = [
            fields.get("href") or "" for tag, fields in Elements(await http.ask("GET", path)).tags if tag == "a"
        ]
        path = "/ui/metadata" + next(each for each in links if re.fullmatch(rf"\?path=.*/{name}", each))
    assert "TopicRecord, version 0" in (await http.ask("GET", path)).body.decode()
    assert (await http.ask("GET", "/ui/metadata?path=topics")).status == 412


async def test_a_role_sees_what_it_may_and_no_more(tmp_path: Path, lines: list[dict[str, str]]) -> None:
    """Who may only produce looks; who may consume operates and peeks; the cluster is for super users."""
    async with guarded(tmp_path) as (http, free):
        await free.done("PUT", T)
        await free.done("PUT", f"{T}/subscription/s", "earliest")
        statuses = {TOPIC: 200, f"{TOPIC}/ledgers": 200, f"{TOPIC}/subscription/s": 200, MESSAGES: 403}
        of_cluster = ("/ui/repair", "/ui/metadata", "/ui/security", "/ui/bookies", "/ui/settings")
        for path in (*statuses, *of_cluster):
            assert (await http.ask("GET", path, **ALICE)).status == 403, path
            assert (await http.ask("GET", path, **SUPER)).status == 200, path
        assert (await http.ask("POST", f"{NS}/permissions/alice", ["produce"], **SUPER)).status == 204
        lines.clear()
        for path, status in statuses.items():
            answer = await http.ask("GET", path, **ALICE)
            assert answer.status == status, path
            shown = [fields for tag, fields in Elements(answer).tags if tag in ("button", "a")]
            assert not [each for each in shown if each.get("name") == "act"], path
            assert not [each for each in shown if (each.get("href") or "").endswith("/messages")], path
        assert {each["act"] for each in lines if each["result"] == "denied"} == {"consume"}, "of the messages alone"
        value = json.loads((await http.ask("GET", f"{TOPIC}/subscription/s?format=json", **ALICE)).body)
        assert (value["cursor"], value["explained"]["why"], value["may_operate"]) == (None, None, False)
        cookie, token = token_of(await http.ask("GET", f"{TOPIC}/subscription/s", **SUPER))
        form = {"form": token, "act": "skip", "confirm": "1"}
        for path, status in ((f"{TOPIC}/subscription/s", 403), (f"{TOPIC}/ledgers", 404), ("/ui/repair", 404)):
            sent = await http.ask(
                "POST", path, raw=urlencode(form).encode(), **{"Content-Type": FORM, "Cookie": cookie, **ALICE}
            )
            assert sent.status == status, path
        assert (await http.ask("POST", f"{NS}/permissions/alice", ["consume"], **SUPER)).status == 204
        for path in statuses:
            answer = await http.ask("GET", path, **ALICE)
            assert answer.status == 200, path
        assert b'value="skip"' in (await http.ask("GET", f"{TOPIC}/subscription/s", **ALICE)).body
        assert (await http.ask("GET", f"{V2}/persistent/public/default/t/ledgers", **ALICE)).status == 200


async def test_security_names_the_caller_and_who_was_refused(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (http, _):
        assert (await http.ask("GET", "/ui/security", **ALICE)).status == 403
        found = Elements(await http.ask("GET", "/ui/security", **SUPER)).texts
        assert "client:root" in found
        assert "client:alice" in found


async def test_a_bookie_that_departs_is_no_alarm_and_one_that_is_read_only_by_itself_is(tmp_path: Path) -> None:
    async with serving(tmp_path) as (http, broker, _):
        store, name = broker.topic_manager.metadata, "ffffffff-0000-4000-8000-000000000000"
        leaving = BookieRecord(bookie=name, endpoint="127.0.0.1:1", read_only=True, free_bytes=72, total_bytes=100)
        await put_record(store, paths.bookie(name), leaving, NODE_ABSENT)

        async def alarms() -> list[str]:
            found = (await http.get("/ui?format=json"))["alarms"]
            return [text for text, _, _, code in found if code == "D03"]

        (text,) = await alarms()
        assert text == "Bookie ffffffff is read-only, with 72% of its disk free (disk_full_share says when)."
        await put_record(store, paths.departing_bookie(name), DepartingRecord(bookie=name, since_ms=1), NODE_ABSENT)
        assert await alarms() == []


async def test_repair_shows_what_bookies_say_of_it(monkeypatch: pytest.MonkeyPatch, http: Http) -> None:
    assert b"none: every ledger has its copies" in (await http.ask("GET", "/ui/repair")).body
    status = (await http.get("/ui/repair?format=json"))["status"]
    mark = {
        "ledger": 7, "missing": {"<b>gone": "lost"}, "sinceMs": 1, "attempts": 2, "stuck": "<b>no bookie",
        "lastError": "<b>error",
    }  # fmt: skip

    async def say(bookies: object, names: object, verb: str, **options: object) -> dict[str, object]:
        if verb == "under-replicated":
            return {"ledgers": [mark], "count": 1}
        return {**status, "underReplicated": 1, "enabled": False, "reasons": {"lost": 1}, "secondsToGo": 90}

    monkeypatch.setattr(topic_views, "ask_bookies", say)
    page = await http.ask("GET", "/ui/repair")
    assert_is_harmless(page)
    text = page.body.decode()
    for part in ("1 ledger misses copies.", "○ <code>&lt;b&gt;gone</code> lost", "&lt;b&gt;no bookie", "90 s"):
        assert part in text, part
    assert "Auto-recovery is disabled" in (await http.ask("GET", "/ui")).body.decode()
