"""What every administering command stands on: a server, a way to print, and calls that find a topic's owner.

`--url` (or `MAGNETAR_URL`) is a service URL as the SDK takes it (client/connect/service_url.py); its addresses are
tried in turn until one answers. Calls about a topic go to the broker that owns it: it is looked up first, and again
when it has moved meanwhile (NotOwner).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import click

from .exits import Failure
from .output import Output

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from ...runtime.network import Channel, Endpoint, Rpc

T = TypeVar("T")

DEFAULT_URL = "magnetar://127.0.0.1:7650"
LOOKUPS_MAX = 5
"""How often a topic that moves is looked up before we give up; a take-over is done within one or two."""


class Session:
    """One command's connections; `close` ends them. Synchronous outside, one event loop inside."""

    def __init__(self, url: str, out: Output, timeout_s: float) -> None:
        self.url, self.out, self.timeout_s = url, out, timeout_s
        from ...client.connect.service_url import parse_service_url

        self._endpoints = parse_service_url(url)
        self._runner: asyncio.Runner | None = None
        self._channels: dict[Endpoint, Channel] = {}

    def call(self, method: str, request: Message, *, service: str = "Admin") -> Any:
        """An rpc that any broker answers."""
        return self._run(self._any(service, method, request))

    def topic_call(self, topic: str, method: str, request: Message, *, service: str = "Admin") -> Any:
        """An rpc that only the owner of `topic` (a partition, or a topic without partitions) answers."""
        return self._run(self._owner(topic, service, method, request))

    def partitions(self, topic: str) -> int:
        """How many partitions the topic has; 0: it is not partitioned (or a partition). Makes nothing."""
        from ...proto import wire_pb2 as wire

        reply = self.call("Partitions", wire.PartitionsRequest(topic=topic), service="Broker")
        assert isinstance(reply, wire.PartitionsReply)
        return reply.partitions

    def parts(self, topic: str) -> list[str]:
        """The full names behind a topic: its partitions, or itself."""
        from ...proto.names import TopicName

        name = TopicName.parse(topic)
        if name.is_partition:
            return [name.full]
        return [str(name.with_partition(i)) for i in range(self.partitions(name.full))] or [name.full]

    def owner(self, topic: str) -> str:
        from ...proto import wire_pb2 as wire

        return str(self.call("Lookup", wire.LookupRequest(topic=topic), service="Broker").owner)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Something else that has to be awaited, in the session's event loop."""
        found: T = self._run(coroutine)
        return found

    async def ask(self, endpoint: str, target: Rpc[Any, Any], request: Message, timeout_s: float) -> Any:
        """An rpc of one broker, by its HOST:PORT."""
        from ...runtime.network import Endpoint

        return await self._channel(Endpoint.parse(endpoint)).call(target, request, timeout_s=timeout_s)

    def close(self) -> None:
        if self._runner is not None:
            self._runner.run(self._close_channels())
            self._runner.close()

    async def _close_channels(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    def _run(self, coroutine: Any) -> Any:
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(coroutine)

    def _channel(self, endpoint: Endpoint) -> Channel:
        from ...runtime.process import real_world

        if endpoint not in self._channels:
            self._channels[endpoint] = real_world().network.connect(endpoint)
        return self._channels[endpoint]

    async def _any(self, service: str, method: str, request: Message) -> Any:
        from ...client.connect.first_contact import how_unreached, no_server
        from ...proto.errors import ConnectionLost, Unavailable
        from ...runtime.network import rpc

        failure: Unavailable | ConnectionLost | None = None
        for endpoint in self._endpoints:
            try:
                return await self._channel(endpoint).call(rpc(service, method), request, timeout_s=self.timeout_s)
            except (Unavailable, ConnectionLost) as error:
                failure = error
        assert failure is not None, "a service URL names at least one broker"
        if how_unreached(failure) is None:
            raise failure
        raise no_server(failure, self._endpoints)

    async def _owner(self, topic: str, service: str, method: str, request: Message) -> Any:
        from ...proto import wire_pb2 as wire
        from ...proto.errors import NotOwner
        from ...runtime.network import Endpoint, rpc

        for attempt in range(LOOKUPS_MAX):
            found = await self._any("Broker", "Lookup", wire.LookupRequest(topic=topic))
            try:
                channel = self._channel(Endpoint.parse(found.owner))
                return await channel.call(rpc(service, method), request, timeout_s=self.timeout_s)
            except NotOwner as error:
                failure = error
                await asyncio.sleep(0.1 * 2**attempt)
        raise Failure(f"{topic} kept moving between brokers; try again") from failure


YES = click.option("-y", "--yes", is_flag=True, help="Do not ask.")


def confirm(what: str, yes: bool) -> None:
    """Asks a person before something is lost for good. No: code 130. Without a terminal nobody can be asked: code 2."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"{what}? There is no terminal to ask at: give --yes")
    click.confirm(f"{what}?", abort=True, err=True)


def connected(function: Callable[..., None]) -> Callable[..., None]:
    """Adds --url, -o and --timeout to a command and gives it its Session first."""

    @click.option("--url", envvar="MAGNETAR_URL", default=DEFAULT_URL, show_default=True, help="The server.")
    @click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
    @click.option("--timeout", type=click.FloatRange(0.1), default=30.0, show_default=True, help="Seconds.")
    @wraps(function)
    def command(*args: Any, **options: Any) -> None:
        session = Session(options.pop("url"), Output(options.pop("output")), options.pop("timeout"))
        try:
            function(session, *args, **options)
        finally:
            session.close()

    return command
