"""The token of a source goes to the address that the operator gave, and to no other."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from magnetar.cli.migrate.copying import SourceRestClient
from magnetar.proto.errors import Unavailable
from magnetar.proto.names import TopicName
from magnetar.runtime.access import CallerAccess

TOPIC = TopicName.parse("acme/shop/orders")
ANSWERS = {"stats": {"subscriptions": {}}, "internalStats": {"cursors": {}}}


@contextmanager
def source(to: str = "", code: int = 307) -> Iterator[tuple[str, list[str]]]:
    """An HTTP service and the authorizations that it saw; `to`: it redirects there once per question."""
    seen: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("Authorization", ""))
            target = to.replace("HERE", f"127.0.0.1:{self.server.server_address[1]}")  # type: ignore[str-bytes-safe]
            if target and not self.path.endswith("?again"):
                self.send_response(code)
                self.send_header("Location", f"{target}{self.path}?again")
                self.end_headers()
                return
            body = json.dumps(ANSWERS[self.path.partition("?")[0].rpartition("/")[2]]).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def asked(url: str) -> SourceRestClient:
    return SourceRestClient(url, CallerAccess(authorization=lambda: "Bearer secret"), 5.0)


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
async def test_a_redirect_to_another_address_is_refused_and_gets_no_token(code: int) -> None:
    with source() as (other, seen), source(other, code) as (url, _):
        with pytest.raises(Unavailable, match="--admin-url"):
            await asked(url).list_subscriptions(TOPIC)
        assert not seen


async def test_a_redirect_within_the_address_is_followed() -> None:
    with source("http://HERE") as (url, seen):
        assert await asked(url).list_subscriptions(TOPIC) == []
        assert set(seen) == {"Bearer secret"}
        assert len(seen) == 4
