"""Positions of durable subscriptions, from the REST of the source to the destination.

At the destination a subscription begins at the message that was copied from after the source's mark-delete position.
What consumers acknowledged out of order after that position comes again. One that exists is moved forward only. The
destination is asked by bisection for the place, so all that was acknowledged must be copied before.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import urllib.error
import urllib.request
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urlsplit

from ...client.admin import AdminClient
from ...client.client import Client
from ...client.model.message_id import MessageId
from ...proto.errors import AlreadyExists, InvalidRequest, TopicNotFound, Unauthenticated, Unauthorized, Unavailable
from ...proto.names import Position, TopicName
from ...runtime.access import CallerAccess
from .destination import PRODUCER, index_after

ANSWER_BYTES_MAX = 64 << 20


class _SameOrigin(urllib.request.HTTPRedirectHandler):
    """Follows a redirect to another path. One to another address is refused: it would be sent the token."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if urlsplit(newurl)[:2] != urlsplit(req.full_url)[:2]:
            raise Unavailable(
                f"the source redirects to {'://'.join(urlsplit(newurl)[:2])}, which is not asked, as it would get the "
                "token: give that address as --admin-url, or one that serves every topic"
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class SourceSubscription(NamedTuple):
    """A durable subscription at the source."""

    name: str
    mark: Position  # all up to there is acknowledged
    properties: dict[str, str]


class SourceAdmin:
    """The HTTP service of the source: `url` is http://HOST:8080."""

    def __init__(self, url: str, access: CallerAccess, timeout_s: float) -> None:
        """Makes the client of the source's REST. Raises InvalidRequest."""
        if not url.startswith(("http://", "https://")):
            raise InvalidRequest(f"--admin-url {url!r} begins with http:// or https://")
        self._url = url.rstrip("/")
        self._access = access
        self._timeout_s = timeout_s

    async def subscriptions(self, topic: TopicName) -> list[SourceSubscription]:
        """Returns the durable subscriptions of one partition. Raises Unavailable, TopicNotFound, Unauthorized."""
        stats = await asyncio.to_thread(self._get, topic, "stats")
        cursors = (await asyncio.to_thread(self._get, topic, "internalStats"))["cursors"]
        marks = {unquote(name): each["markDeletePosition"] for name, each in cursors.items()}
        return [
            SourceSubscription(name, _position(marks[name]), dict(each.get("subscriptionProperties") or {}))
            for name, each in sorted(stats["subscriptions"].items())
            if each.get("isDurable", each.get("durable", True)) and name in marks and name != PRODUCER
        ]

    def _get(self, topic: TopicName, what: str) -> Any:
        name = f"{topic.tenant}/{topic.namespace}/{quote(topic.stored_local, safe='')}"
        asked = urllib.request.Request(f"{self._url}/admin/v2/persistent/{name}/{what}")
        if self._access.authorization is not None and (value := self._access.authorization()):
            asked.add_header("Authorization", value)
        handlers: list[urllib.request.BaseHandler] = [_SameOrigin()]
        if self._url.startswith("https://"):
            trust = ssl.create_default_context(cafile=(self._access.tls.ca if self._access.tls else "") or None)
            handlers.append(urllib.request.HTTPSHandler(context=trust))
        try:
            with urllib.request.build_opener(*handlers).open(asked, timeout=self._timeout_s) as answer:
                return json.loads(answer.read(ANSWER_BYTES_MAX))
        except urllib.error.HTTPError as error:
            kind = {401: Unauthenticated, 403: Unauthorized, 404: TopicNotFound}.get(error.code, Unavailable)
            raise kind(f"the source's {what} of {topic}: HTTP {error.code} from {self._url}") from error
        except (OSError, ValueError) as error:
            raise Unavailable(f"the source's HTTP service at {self._url} cannot be asked: {error}") from error


def _position(text: str) -> Position:
    ledger_id, _, entry_id = text.partition(":")
    return Position(int(ledger_id), int(entry_id))


async def copy_subscriptions(
    source: SourceAdmin, client: Client, admin: AdminClient, topic: TopicName
) -> list[dict[str, object]]:
    """Copies the subscriptions of one partition, as far as each was acknowledged; returns a record of each."""
    found: list[dict[str, object]] = []
    for each in await source.subscriptions(topic):
        offsets = await admin.offsets(topic.full)
        index = await index_after(client, topic, offsets.earliest_index, offsets.end_index, each.mark)
        with suppress(AlreadyExists):
            await admin.create_subscription(topic.full, each.name, MessageId.earliest, each.properties)
        await admin.advance_subscription(topic.full, each.name, index)
        found.append({"topic": topic.full, "subscription": each.name, "backlog": offsets.end_index - index})
    return found
