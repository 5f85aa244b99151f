"""The page by plain HTTP: its views, and the walls of it."""

import asyncio
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote, urlencode

import pytest

from magnetar.asyncio import Client
from magnetar.broker.rest.page import application, messages, topic_views
from magnetar.metadata import paths
from magnetar.metadata.records import StartedBrokerRecord, encode_record
from magnetar.proto.statistics import BookieInfo, ClusterSummary, DiedBroker
from tests.broker.rest.http import V2, Answer, Http, T, serving
from tests.broker.rest.test_access import ALICE, SUPER, AnonymousNames, guarded

FORM = "application/x-www-form-urlencoded"
HOSTILE = (
    "<img src=x onerror=alert(1)>", "\"'><script>alert(1)<script>", "{{7*7}}", "{%raw%}", "א&lt;", "javascript:1",
    "a b&c=d#e?f", "x" * 200,
)  # fmt: skip
TOPIC = "/ui/topics/persistent/public/default/t"
STILL = ("/ui/metadata", f"{TOPIC}/messages")
"""Views that are as of their loading."""
VIEWS = (
    "/ui", "/ui/", "/ui/topics", "/ui/brokers", "/ui/bookies", "/ui/repair", "/ui/security", "/ui/settings",
    f"{TOPIC}/ledgers", f"{TOPIC}/tail", *STILL, TOPIC,
)  # fmt: skip


class Elements(HTMLParser):
    """The elements of a page, as a browser would make them."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.tags = list[tuple[str, dict[str, str | None]]]()
        self.texts = list[str]()
        self.feed(answer.body.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def token_of(answer: Answer) -> tuple[str, str]:
    """The cookie and the form token of an answer with a form."""
    values = [fields["value"] for tag, fields in Elements(answer).tags if tag == "input" and fields["name"] == "form"]
    assert values[0] is not None
    return answer.headers["set-cookie"].partition(";")[0], values[0]


async def post(http: Http, path: str, fields: dict[str, str], **headers: str) -> Answer:
    return await http.ask("POST", path, raw=urlencode(fields).encode(), **{"Content-Type": FORM, **headers})


async def test_each_view_is_a_page_and_its_value_as_json(http: Http) -> None:
    await http.done("PUT", T)
    await http.done("PUT", f"{T}/subscription/s", "latest")
    for path in VIEWS:
        found = await http.ask("GET", path)
        assert found.status == 200, (path, found.body)
        assert found.headers["content-type"].startswith("text/html")
        assert [tag for tag, _ in Elements(found).tags].count("h1") == 1
        assert isinstance(await http.get(f"{path}?format=json"), dict)
    value = await http.get("/ui/topics/persistent/public/default/t?format=json")
    assert [each["stats"]["name"] for each in value["subscriptions"]] == ["s"]
    assert value["subscriptions"][0]["why"]["sentences"] == ["It has delivered everything."]
    assert "It has delivered everything." in (await http.ask("GET", TOPIC)).body.decode()


def test_what_needs_somebody_is_what_status_says() -> None:
    full = BookieInfo("12345678-90", "h:1", read_only=False, rack="/r", free_bytes=14, total_bytes=100)
    died = DiedBroker("three", "h:3", 1_000)
    found = topic_views._alarms(ClusterSummary(brokers=(), silent=("two",), bookies=(full,), died=(died,)), 61_000, ())
    assert [(each.text, each.code) for each in found] == [
        ("Broker two is registered and does not answer.", "D01"),
        ("Broker three (h:3) is not seen since 1970-01-01 00:00:01 UTC (1 min ago): it died, or closed while the "
         "metadata was away. Start it again, or forget it if it was removed, or is back at another address.", "D19"),
        ("The disk of bookie 12345678 has 14% left; at 5 % it is read-only.", "D04"),
    ]


async def test_a_broker_that_died_is_on_the_page_and_forgotten_by_rest(tmp_path: Path) -> None:
    async with serving(tmp_path) as (http, broker, _):
        path = paths.started_broker("gone")
        record = StartedBrokerRecord(broker="gone", endpoint="h:1", seen_ms=1)
        await broker.topic_manager.metadata.put(path, encode_record(record, path))
        for view in ("/ui/", "/ui/brokers"):
            assert b"magnetar brokers forget" in (await http.ask("GET", view)).body
        await http.done("DELETE", "/admin/v3/brokers/gone")
        assert b"magnetar brokers forget" not in (await http.ask("GET", "/ui/brokers")).body
        assert (await http.ask("DELETE", "/admin/v3/brokers/gone")).status == 404


async def test_topics_are_found_sorted_and_paged(http: Http) -> None:
    for number in range(103):
        await http.done("PUT", f"{V2}/persistent/public/default/many-{number:03}")
        await http.ask("GET", f"{V2}/persistent/public/default/many-{number:03}/stats")
    first = await http.ask("GET", "/ui/topics?q=many")
    links = [fields for tag, fields in Elements(first).tags if tag == "a" and fields.get("rel") == "next"]
    second = await http.ask("GET", f"/ui/topics{links[0]['href']}")
    assert "many-099" in first.body.decode()
    assert "many-100" not in first.body.decode()
    assert "many-102" in second.body.decode()
    assert "many-099" not in second.body.decode()
    assert b'aria-sort="descending"' in (await http.ask("GET", "/ui/topics?sort=backlog")).body
    wrong = await http.ask("GET", "/ui/topics?sort=<script>")
    assert wrong.status == 412
    assert b"<script>" not in wrong.body.replace(b'<script type="module"', b"")


async def test_a_partitioned_topic_leads_to_its_partitions(http: Http) -> None:
    await http.done("PUT", f"{T}/partitions", 2)
    found = Elements(await http.ask("GET", TOPIC))
    links = [fields.get("href") for tag, fields in found.tags if tag == "a"]
    assert "/ui/topics/persistent/public/default/t-partition-1" in links


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_names_are_text(name: str, http: Http) -> None:
    topic = quote(name, safe="")
    await http.done("PUT", f"{V2}/persistent/public/default/{topic}")
    await http.done("PUT", f"{V2}/persistent/public/default/{topic}/subscription/{topic}", "latest")
    own = Elements(await http.ask("GET", f"/ui/topics/persistent/public/default/{topic}"))
    assert name in own.texts, "the name of the subscription"
    for path in (f"persistent/public/default/{topic}", f"persistent/public/default/{topic}/ledgers", f"?q={topic}"):
        answer = await http.ask("GET", f"/ui/topics/{path}".replace("/?", "?"))
        assert answer.status == 200
        assert f"persistent://public/default/{name}" in Elements(answer).texts
        assert_is_harmless(answer)


def assert_is_harmless(answer: Answer) -> None:
    """Only elements of ours, no script of its own in any attribute, and no address elsewhere."""
    page = Elements(answer)
    assert {tag for tag, _ in page.tags} <= KNOWN
    assert [tag for tag, _ in page.tags].count("script") == 1
    for _, fields in page.tags:
        assert not [each for each in fields if each.startswith("on") or each == "style"]
        target = fields.get("href") or fields.get("src") or fields.get("action") or ""
        assert target.startswith(("/ui", "?", "#", "data:,")) or not target


KNOWN = {
    "html", "head", "meta", "title", "link", "script", "body", "a", "header", "strong", "nav", "ul", "li", "div",
    "button", "form", "input", "label", "main", "h1", "h2", "h3", "section", "article", "dl", "dt", "dd", "p", "bdi",
    "table", "caption", "thead", "tbody", "tr", "th", "td", "footer", "span", "code", "svg", "rect", "details",
    "summary", "pre", "select", "option", "meter", "abbr",
}  # fmt: skip


@pytest.mark.parametrize("at_ms", [253402300800000, 1 << 62, (1 << 64) - 1])
async def test_a_time_that_no_calendar_has_is_shown_as_its_number(at_ms: int) -> None:
    assert topic_views.moment(at_ms) == f"{at_ms} ms"


async def test_a_document_that_is_nested_deep_is_not_indented() -> None:
    nested = b"[" * 900 + b",".join([b"1"] * 30_000) + b"]" * 900
    way, text = messages.format_payload_text(nested, "", 65_536)
    assert (way, len(text)) == ("text", len(nested))
    assert messages.format_payload_text(b'{"a": [1]}', "", 65_536)[0] == "json"


async def test_each_answer_has_the_headers_of_the_walls(http: Http) -> None:
    paths = (
        "/ui", "/ui/login", "/ui/nothing", "/ui/static/page.js", "/ui/static/../views.py", "/ui?format=json",
    )  # fmt: skip
    for path in paths:
        found = await http.ask("GET", path)
        for name, value in application.SECURITY_HEADERS.items():
            assert found.headers[name.lower()] == value, path
    assert (await http.ask("GET", "/ui/static/..%2fwalls.py")).status == 404
    assert (await http.ask("DELETE", "/ui")).status == 405


async def test_a_name_of_a_stranger_opens_nothing(http: Http) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example", "", "localhost.evil.example:80", "[::1", "a@b"):
        assert (await http.ask("GET", "/ui/topics?format=json", Host=host)).status in (400, 421), host
    for host in ("localhost:1", "127.0.0.1", "[::1]:80"):
        assert (await http.ask("GET", "/ui/topics", Host=host)).status == 200, host


async def test_a_form_of_another_site_or_browser_is_refused(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (http, _):
        cookie, token = token_of(await http.ask("GET", "/ui/login"))
        good = {"form": token, "token": "root"}
        for headers in (
            {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"},
            {"Sec-Fetch-Site": "same-site"},
        ):  # fmt: skip
            assert (await post(http, "/ui/login", good, Cookie=cookie, **headers)).status == 403, headers
        assert (await post(http, "/ui/login", good)).status == 403, "no cookie"
        assert (await post(http, "/ui/login", {**good, "form": "0" * 64}, Cookie=cookie)).status == 403
        assert (await post(http, "/ui/login", {**good, "form": "ä"}, Cookie=cookie)).status == 403
        assert (await post(http, "/ui/login", good, Cookie=f"{cookie}x")).status == 403
        as_json = await http.ask("POST", "/ui/login", good, Cookie=cookie)
        assert as_json.status == 415
        long = await post(http, "/ui/login", {**good, "token": "x" * 70_000}, Cookie=cookie)
        assert long.status == 413
        done = await post(http, "/ui/login", good, Cookie=cookie, **{"Sec-Fetch-Site": "same-origin"})
        assert (done.status, done.headers["location"]) == (303, "/ui/")


async def test_a_caller_logs_in_sees_what_it_may_and_logs_out(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (http, free):
        await free.done("PUT", T)
        asked = await http.ask("GET", "/ui/topics?q=a%20b")
        assert (asked.status, asked.headers["location"]) == (303, "/ui/login?next=%2Fui%2Ftopics%3Fq%3Da%2520b")
        assert (await http.ask("GET", "/ui/topics?format=json")).status == 401
        assert (await http.ask("GET", "/ui/topics", **SUPER)).status == 200, "as over REST"
        assert (await http.ask("GET", "/ui/topics", **ALICE)).status == 403

        cookie, token = token_of(await http.ask("GET", "/ui/login"))
        wrong = await post(http, "/ui/login", {"form": token, "token": "wrong"}, Cookie=cookie)
        assert wrong.status == 401
        assert b"bring a token" in wrong.body
        done = await post(
            http, "/ui/login", {"form": token, "token": "root", "next": "//evil.example/ui/"}, Cookie=cookie
        )
        assert (done.status, done.headers["location"]) == (303, "/ui/")
        own, *attributes = done.headers["set-cookie"].split("; ")
        assert {"HttpOnly", "SameSite=strict", "Path=/ui"} <= set(attributes)
        assert own != cookie, "a login has a cookie of its own"
        page = await http.ask("GET", "/ui/", Cookie=own)
        assert page.status == 200
        token = re.findall(r'name="form" value="(\w+)"', page.body.decode())[0]
        assert (await http.ask("GET", "/ui/", Cookie=cookie)).status == 303
        assert (await post(http, "/ui/logout", {"form": token}, Cookie=own)).status == 303
        assert (await http.ask("GET", "/ui/", Cookie=own)).status == 303


async def test_who_is_no_super_user_lands_where_it_has_rights_and_sees_no_other_name(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (http, free):
        for topic in ("t", "secret"):
            await free.done("PUT", f"{V2}/persistent/public/default/{topic}")
        alone = await http.ask("GET", "/ui/", **ALICE)
        assert alone.status == 200
        assert b"public/default" not in alone.body
        await free.done("POST", f"{T}/permissions/alice", ["consume"])
        seen = await http.ask("GET", "/ui/", **ALICE)
        assert TOPIC in [fields.get("href") for tag, fields in Elements(seen).tags if tag == "a"]
        assert b"secret" not in seen.body
        assert b"secret" not in (await http.ask("GET", "/ui/?namespace=public/default", **ALICE)).body
        named = await http.ask("GET", "/ui/?topic=public/default/t", **ALICE)
        assert (named.status, named.headers["location"]) == (303, TOPIC)
        assert (await http.ask("GET", named.headers["location"], **ALICE)).status == 200
        await free.done("POST", f"{V2}/namespaces/public/default/permissions/alice", ["produce"])
        found = json.loads((await http.ask("GET", "/ui/?format=json", **ALICE)).body)
        assert found == {"namespaces": ["public/default"], "topics": [], "namespace": ""}
        assert b"secret" in (await http.ask("GET", "/ui/?namespace=public/default", **ALICE)).body
        assert_is_harmless(await http.ask("GET", f"/ui/?namespace={quote(HOSTILE[1], safe='')}", **ALICE))


async def test_who_is_refused_may_log_out_and_open_a_topic(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (http, _):
        refused = await http.ask("GET", "/ui/brokers", **ALICE)
        assert refused.status == 403
        assert "alice" in Elements(refused).texts, "of Log out"
        assert [fields for tag, fields in Elements(refused).tags if tag == "form" and fields["action"] == "/ui/logout"]
        assert [fields for tag, fields in Elements(refused).tags if tag == "input" and fields["name"] == "topic"]


async def test_a_backlog_is_changed_only_after_a_preview(tmp_path: Path) -> None:
    async with serving(tmp_path) as (http, broker, _), Client(f"magnetar://{broker.endpoint}") as client:
        await http.done("PUT", T)
        await http.done("PUT", f"{T}/subscription/a%3Fb", "earliest")
        producer = await client.create_producer("t")
        for _ in range(3):
            await producer.send(b"x")
        view = f"{TOPIC}/subscription/a%3Fb"
        assert f'href="{view}"'.encode() in (await http.ask("GET", TOPIC)).body
        cookie, token = token_of(await http.ask("GET", view))

        async def backlog() -> int:
            found = await http.get(f"{view}?format=json")
            return int(found["explained"]["stats"]["backlog"])

        form = {"form": token, "act": "skip"}
        preview = await post(http, view, form, Cookie=cookie)
        assert preview.status == 200
        assert b"all 3 messages" in preview.body
        assert await backlog() == 3
        assert (await post(http, view, {**form, "confirm": "1"})).status == 403
        assert await backlog() == 3
        done = await post(http, view, {**form, "confirm": "1"}, Cookie=cookie)
        assert (done.status, done.headers["location"]) == (303, view)
        assert await backlog() == 0
        again = {"form": token, "act": "reset", "reset": "2020-01-01T00:00"}
        assert b"2020-01-01 00:00:00 UTC" in (await post(http, view, again, Cookie=cookie)).body
        assert (await post(http, view, {**again, "confirm": "1"}, Cookie=cookie)).status == 303
        assert await backlog() == 3
        old = {"form": token, "act": "expire", "expire": "3600"}
        assert b"older than 3600 s" in (await post(http, view, old, Cookie=cookie)).body
        assert (await post(http, view, {**old, "confirm": "1"}, Cookie=cookie)).status == 303
        assert await backlog() == 3
        for wrong in ({"act": "delete"}, {"act": "expire", "expire": "-1"}, {"act": "reset", "reset": "<b>"}, {}):
            assert (await post(http, view, {"form": token, **wrong}, Cookie=cookie)).status == 400, wrong
        assert (await http.ask("GET", f"{TOPIC}/subscription/none")).status == 404


async def test_a_live_view_sends_what_changed_and_ends_with_its_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application, "LIVE_REFRESH_S", 0.05)
    monkeypatch.setattr(application, "LIVE_STREAMS_MAX", 1)
    async with serving(tmp_path) as (http, _, _), asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(http.endpoint.host, http.endpoint.port)
        writer.write(f"GET /ui/topics?live=1 HTTP/1.1\r\nHost: {http.endpoint}\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"text/event-stream" in head
        assert b"frame-ancestors" in head
        first = await _event(reader)
        assert first["id"] == "live"
        assert "default/t<" not in first["html"]
        assert (await http.ask("GET", "/ui?live=1")).status == 503, "one stream is open"
        await http.done("PUT", T)
        await http.ask("GET", f"{T}/stats")
        while "default/t<" not in (await _event(reader))["html"]:
            pass
        writer.close()
        while await _live_status(http) == 503:
            pass


async def test_live_views_that_are_asked_for_in_one_moment_are_bounded(tmp_path: Path) -> None:
    async with serving(tmp_path) as (http, _, _), asyncio.timeout(30):
        await http.ask("GET", "/ui")
        where = http.endpoint.host, http.endpoint.port
        pairs = [await asyncio.open_connection(*where) for _ in range(application.LIVE_STREAMS_MAX + 20)]
        for _, writer in pairs:
            writer.write(f"GET /ui?live=1 HTTP/1.1\r\nHost: {http.endpoint}\r\n\r\n".encode())
        live = 0
        for reader, writer in pairs:
            head = await reader.readuntil(b"\r\n\r\n")
            live += head.startswith(b"HTTP/1.1 200") and b"retry" in await reader.read(100)
            writer.close()
        assert live == application.LIVE_STREAMS_MAX


async def test_a_live_view_has_the_rights_of_who_the_caller_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(application, "LIVE_REFRESH_S", 0.05)
    async with guarded(tmp_path, AnonymousNames()) as (http, free), asyncio.timeout(30):
        cookie, token = token_of(await http.ask("GET", "/ui/login"))
        done = await post(http, "/ui/login", {"form": token, "token": "root"}, Cookie=cookie)
        own = done.headers["set-cookie"].split("; ")[0]
        page = await http.ask("GET", "/ui/topics", Cookie=own)
        assert (await http.ask("GET", "/ui/topics")).status == 403, "a guest sees no topics"
        reader, writer = await asyncio.open_connection(http.endpoint.host, http.endpoint.port)
        writer.write(f"GET /ui/topics?live=1 HTTP/1.1\r\nHost: {http.endpoint}\r\nCookie: {own}\r\n\r\n".encode())
        await _event(reader)
        token = re.findall(r'name="form" value="(\w+)"', page.body.decode())[0]
        assert (await post(http, "/ui/logout", {"form": token}, Cookie=own)).status == 303
        await free.done("PUT", T)
        while (line := await reader.readline()) not in (b"", b"0\r\n"):  # the last chunk
            assert b"default/t<" not in line
        writer.close()


async def _live_status(http: Http) -> int:
    """The status of a live view on a connection of its own, which is closed at once."""
    reader, writer = await asyncio.open_connection(http.endpoint.host, http.endpoint.port)
    writer.write(f"GET /ui?live=1 HTTP/1.1\r\nHost: {http.endpoint}\r\n\r\n".encode())
    line = await reader.readline()
    writer.close()
    return int(line.split()[1])


async def _event(reader: asyncio.StreamReader) -> dict[str, str]:
    while True:
        line = await reader.readline()
        assert line
        if line.startswith(b"data: "):
            found: dict[str, str] = json.loads(line[6:])
            return found


async def test_the_end_of_the_server_ends_live_views(tmp_path: Path) -> None:
    async with serving(tmp_path) as (http, broker, _), asyncio.timeout(20):
        reader, writer = await asyncio.open_connection(http.endpoint.host, http.endpoint.port)
        writer.write(f"GET /ui?live=1 HTTP/1.1\r\nHost: {http.endpoint}\r\n\r\n".encode())
        await _event(reader)
        broker.rest.shut_down()
        await reader.read()
        writer.close()


def test_numbers_are_shown_with_their_units() -> None:
    assert [topic_views.size(each) for each in (0, 999, 1500, 2e6)] == ["0 B", "999 B", "1.5 kB", "2.0 MB"]
    assert topic_views.number(1234567) == "1\u202f234\u202f567"
    assert [topic_views.age(1, 1 + each * 1000) for each in (5, 120, 7200, 200_000)] == ["5 s", "2 min", "2 h", "2 d"]
    assert topic_views.topic_path("persistent://a/b/c/d?") == "persistent/a/b/c%2Fd%3F"
