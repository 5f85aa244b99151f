"""A browser for the tests of the page; and `python -m tests.page`: the screenshots of docs/page.md.

    async with browsing() as browser:                     Chromium of the system, by playwright
        async with visiting(browser, url) as page:        … and at the end: no error, no foreign request

Without either, the tests are skipped with WHAT_TO_INSTALL.
"""

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.layout import ROOT

WHAT_TO_INSTALL = (
    "the page is tested in Chromium: apt-get install chromium, and pip install 'magnetar[page-tests]' "
    "(`python -m tests.chromium` does both as root)"
)
IMAGES = ROOT / "docs" / "images"
WAIT_MS = 15_000


def chromium() -> str:
    """Returns the path of the system's Chromium; "" if there is none."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or ""


def is_there() -> bool:
    """Returns whether the tests in a browser can run."""
    return bool(chromium()) and find_spec("playwright") is not None


@asynccontextmanager
async def browsing() -> AsyncIterator[Any]:
    from playwright.async_api import async_playwright

    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def visiting(browser: Any, url: str, **options: Any) -> AsyncIterator[Any]:
    """A tab. At its end the browser must have reported no error (of the policy of content neither), and have asked no
    other server than that of `url`; a dialog is an error."""
    context = await browser.new_context(**options)
    context.set_default_timeout(WAIT_MS)
    page = await context.new_page()
    wrong = list[str]()
    page.on("console", lambda each: wrong.append(each.text) if each.type in ("error", "warning") else None)
    page.on("pageerror", lambda each: wrong.append(str(each)))
    page.on("dialog", lambda each: wrong.append(f"a dialog: {each.message}"))
    page.on("request", lambda each: None if each.url.startswith((url, "data:,")) else wrong.append(each.url))
    try:
        yield page
        assert wrong == []
    finally:
        await context.close()


async def take_screenshots(folder: Path) -> None:
    """Writes a light and a dark picture of the overview and of a topic."""
    from magnetar.asyncio import Client
    from tests.broker.rest.http import serving

    with tempfile.TemporaryDirectory() as data:
        async with (
            serving(Path(data)) as (_, broker, _),
            Client(f"magnetar://{broker.endpoint}") as client,
            browsing() as browser,
        ):
            for name, count in (("orders", 500), ("payments", 120), ("mails", 3)):
                consumer = await client.subscribe(name, "billing")
                producer = await client.create_producer(name)
                for number in range(count):
                    await producer.send(b"%d" % number)
                if name == "orders":
                    await consumer.close()  # a subscription that waits for a consumer
            for scheme in ("light", "dark"):
                size = {"width": 1200, "height": 900}
                async with visiting(browser, broker.http_url, color_scheme=scheme, viewport=size) as page:
                    for name, path in (("overview", "/ui/"), ("topic", "/ui/topics/persistent/public/default/orders")):
                        await page.goto(broker.http_url + path)
                        await page.screenshot(path=str(folder / f"page-{name}-{scheme}.png"))


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    asyncio.run(take_screenshots(IMAGES))
