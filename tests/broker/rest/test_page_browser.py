"""The page in a real browser: with and without its script, with hostile names, live, by keyboard, behind a login."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import pytest_asyncio

from magnetar.asyncio import Client
from magnetar.broker.rest.page.messages import TAIL_MESSAGES_MAX
from tests.broker.rest.http import V2, T, serving
from tests.broker.rest.test_access import guarded
from tests.broker.rest.test_page import HOSTILE, STILL, TOPIC, VIEWS
from tests.page import WHAT_TO_INSTALL, browsing, is_there, visiting

pytestmark = [
    pytest.mark.browser, pytest.mark.skipif(not is_there(), reason=WHAT_TO_INSTALL),
    pytest.mark.asyncio(loop_scope="module"),
]  # fmt: skip
DARK, LIGHT = "rgb(13, 17, 23)", "rgb(255, 255, 255)"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Any]:
    """One Chromium for all tests here: it takes seconds to start. Each test has its own cookies and tabs."""
    async with browsing() as browser:
        yield browser


async def test_each_view_works_with_and_without_javascript(tmp_path: Path, browser: Any) -> None:
    async with serving(tmp_path) as (http, broker, _):
        await http.done("PUT", T)
        await http.done("PUT", f"{T}/subscription/s", "latest")
        for script in (True, False):
            async with visiting(browser, broker.http_url, java_script_enabled=script) as page:
                for path in VIEWS:
                    answer = await page.goto(broker.http_url + path)
                    assert answer.status == 200
                    assert await page.locator("h1").is_visible()
                    assert await page.locator("#pause").is_visible() is (script and path not in STILL)
                for scheme, ground in (("light", LIGHT), ("dark", DARK)):  # all have the same style sheet
                    await page.emulate_media(color_scheme=scheme)
                    shown = await page.locator("body").evaluate("each => getComputedStyle(each).backgroundColor")
                    assert shown == ground
                await page.get_by_role("link", name="Topics").click()
                await page.get_by_label("Name contains").fill("default/t")
                await page.get_by_role("button", name="Search").click()
                await page.get_by_role("link", name="persistent://public/default/t").click()
                assert page.url.endswith(TOPIC)


async def test_hostile_names_run_nothing(tmp_path: Path, browser: Any) -> None:
    async with serving(tmp_path) as (http, broker, _):
        names = [quote(each, safe="") for each in HOSTILE]
        for name in names:
            await http.done("PUT", f"{V2}/persistent/public/default/{name}")
            await http.done("PUT", f"{V2}/persistent/public/default/{name}/subscription/{name}", "latest")
        async with visiting(browser, broker.http_url) as page:
            for name in names:
                async with page.expect_response(lambda each: "live=1" in each.url):
                    await page.goto(f"{broker.http_url}/ui/topics/persistent/public/default/{name}")
                await page.goto(f"{broker.http_url}/ui/topics?q={name}")
                assert await page.locator("tbody tr").count() == 1
                assert await page.locator("img").count() == 0


async def test_a_view_changes_by_itself_and_keeps_the_focus(tmp_path: Path, browser: Any) -> None:
    async with serving(tmp_path) as (http, broker, _):
        await http.done("PUT", T)
        await http.get(f"{T}/stats")
        async with visiting(browser, broker.http_url) as page:
            await page.goto(f"{broker.http_url}/ui/topics")
            await page.get_by_role("link", name="persistent://public/default/t").focus()
            other = f"{V2}/persistent/public/default/a-new-one"
            await http.done("PUT", other)
            await http.get(f"{other}/stats")
            await page.get_by_role("link", name="persistent://public/default/a-new-one").wait_for(timeout=5_000)
            focused = await page.evaluate("document.activeElement.textContent")
            assert focused == "persistent://public/default/t"
            await page.get_by_role("button", name="Pause").click()
            assert await page.get_by_role("button", name="Pause", pressed=True).is_visible()


async def test_the_page_is_read_and_used_without_a_mouse(tmp_path: Path, browser: Any) -> None:
    async with serving(tmp_path) as (http, broker, _):
        await http.done("PUT", T)
        await http.get(f"{T}/stats")
        async with visiting(browser, broker.http_url) as page:
            await page.goto(f"{broker.http_url}/ui/topics?sort=backlog")
            reached = list[str]()
            for _ in range(5):
                await page.keyboard.press("Tab")
                reached.append(await page.evaluate("document.activeElement.textContent"))
            assert reached == ["Skip to the content", "Overview", "Topics", "Brokers", "Bookies"]
            tree = await page.locator("body").aria_snapshot()
            for part in (
                "navigation \"Views\"", "heading \"Topics\" [level=1]", "search:", "searchbox \"Name contains\"",
                "region \"Topics\"", "table \"Topics\"", "columnheader \"Topic\"", "rowheader \"persistent://public",
            ):  # fmt: skip
                assert part in tree, tree
            assert await page.locator("th[aria-sort=descending]").inner_text() == "Backlog"


@pytest.mark.parametrize("script", [True, False])
async def test_a_user_logs_in_and_out(tmp_path: Path, browser: Any, script: bool) -> None:
    async with guarded(tmp_path) as (http, _):
        url = f"http://{http.endpoint}"
        async with visiting(browser, url, java_script_enabled=script) as page:
            await page.goto(f"{url}/ui/brokers")
            await page.get_by_label("Token").fill("root")
            await page.get_by_role("button", name="Log in").click()
            await page.wait_for_url(f"{url}/ui/brokers")
            assert await page.evaluate("document.cookie") == ""
            await page.get_by_role("button", name="Log out").click()
            await page.get_by_label("Token").wait_for()
            await page.goto(f"{url}/ui/")
            assert "/ui/login" in page.url


@pytest.mark.parametrize("script", [True, False])
async def test_messages_and_the_cursor_of_a_subscription_are_read_without_colour(
    tmp_path: Path, browser: Any, script: bool
) -> None:
    async with (
        serving(tmp_path) as (_, broker, _),
        Client(f"magnetar://{broker.endpoint}") as client,
    ):  # fmt: skip
        consumer = await client.subscribe("t", "s", consumer_name="ada")
        producer = await client.create_producer("t", batching_enabled=False)
        for text in HOSTILE[:4]:
            await producer.send(text.encode(), partition_key=text, properties={text: text})
        got = [await consumer.receive() for _ in range(4)]
        await consumer.acknowledge(got[2])
        async with visiting(browser, broker.http_url, java_script_enabled=script) as page:
            await page.goto(f"{broker.http_url}{TOPIC}")
            await page.get_by_role("link", name="Messages").click()
            await page.get_by_label("or the backlog of subscription").fill("s")
            await page.get_by_role("button", name="Find").click()
            assert await page.get_by_role("article").count() == 3
            assert await page.locator("pre").first.inner_text() == HOSTILE[0]
            assert await page.locator("img").count() == 0
            async with page.expect_download() as started:
                await page.get_by_role("link", name="Download").first.click()
            assert (await (await started.value).path()).read_bytes() == HOSTILE[0].encode()
            await page.goto(f"{broker.http_url}{TOPIC}/subscription/s")
            tree = await page.locator("main").aria_snapshot()
            for part in (
                "img \"Entries from mark-delete to the end, dark where they are acknowledged\"",
                "table \"Largest gaps: not acknowledged, before entries that are\"", "table \"Consumers\"",
                "button \"Skip the backlog …\"",
            ):  # fmt: skip
                assert part in tree, tree
            await page.goto(f"{broker.http_url}{TOPIC}/ledgers")
            assert (
                'table "Ledgers, the oldest first, and what keeps them"' in await page.locator("main").aria_snapshot()
            )


@pytest.mark.parametrize("script", [True, False])
async def test_a_letter_is_searched_and_sent_back(tmp_path: Path, browser: Any, script: bool) -> None:
    async with serving(tmp_path) as (http, broker, _), Client(f"magnetar://{broker.endpoint}") as client:
        await http.done("PUT", T)
        letters = await client.create_producer("t-DLQ", batching_enabled=False)
        text = HOSTILE[0]
        for _ in range(2):
            await letters.send(text.encode(), partition_key=text, properties={
                "REAL_TOPIC": "persistent://public/default/t", text: text
            })  # fmt: skip
        async with visiting(browser, broker.http_url, java_script_enabled=script) as page:
            await page.goto(f"{broker.http_url}/ui/topics/persistent/public/default/t-DLQ/messages")
            await page.get_by_label("Key").fill(text)
            await page.get_by_label("and text in the payload").fill("onerror")
            await page.get_by_role("button", name="Search backwards").click()
            assert await page.get_by_role("article").count() == 2
            assert "That is all of them." in await page.get_by_role("status").first.inner_text()
            await page.get_by_role("button", name="Send back to its topic …").first.click()
            assert "at the end of persistent://public/default/t:" in await page.get_by_role("alert").inner_text()
            await page.get_by_role("button", name="Do it").click()
            await page.get_by_role("status").get_by_role("link").click()
            assert page.url.startswith(f"{broker.http_url}{TOPIC}/messages?id=")
            assert await page.locator("pre").inner_text() == text
            assert await page.locator("img").count() == 0


async def test_a_tail_that_stays_open_follows_and_does_not_grow(tmp_path: Path, browser: Any) -> None:
    async with serving(tmp_path) as (http, broker, _), Client(f"magnetar://{broker.endpoint}") as client:
        await http.done("PUT", T)
        producer = await client.create_producer("t", batching_enabled=False)
        async with visiting(browser, broker.http_url) as page:
            await page.goto(f"{broker.http_url}{TOPIC}")
            await page.get_by_role("link", name="Tail").click()
            for number in range(2):
                sent = [producer.send(f"{HOSTILE[0]} {number}".encode()) for _ in range(100)]
                await asyncio.gather(*sent)
                await page.get_by_text(f"{HOSTILE[0]} {number}").first.wait_for()
                await page.get_by_role("row", name=f" {100 * number + 99} ").wait_for()
                assert await page.locator("tbody tr").count() == TAIL_MESSAGES_MAX
            assert await page.locator("img").count() == 0
