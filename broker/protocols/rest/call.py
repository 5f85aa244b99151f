"""A request as its handler sees it: names, body and query as values, the operations with its caller's rights.

    await call.admin(op.CREATE_TOPIC, name=call.topic.full)     as over gRPC: authorized, audited
    await call.each_partition(op.COMPACT)                       of the topic, or of each partition

A partition whose owner is another broker is asked there, with the rights of this broker; the caller's were looked at
here before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from ....proto.errors import NotFound, NotOwner
from ....proto.names import NamespaceName, TopicName
from ....proto.operation import Operation
from ....runtime.network import CallContext
from ...node.topic_manager import TopicManager
from ...session.other_brokers import answered, ask, request_for
from ..grpc.checked import Checked, authorize
from .errors import BadRequest
from .measure import Measure
from .stats import Meters

T = TypeVar("T")


@dataclass(slots=True)
class Call:
    """A request as its handler sees it."""

    broker: TopicManager
    services: Mapping[str, Checked]
    context: CallContext
    names: Mapping[str, str]
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    measure: Measure
    meters: Meters

    # ------------------------------------------------------------------ names
    @property
    def namespace(self) -> NamespaceName:
        """Returns the namespace of the path. Raises InvalidName."""
        return NamespaceName.parse(f"{self.names['tenant']}/{self.names['namespace']}")

    @property
    def topic(self) -> TopicName:
        """Returns the topic of the path. Raises InvalidName."""
        tenant, namespace, local = (self.names[each] for each in ("tenant", "namespace", "topic"))
        return TopicName.parse(f"{self.names['domain']}://{tenant}/{namespace}/{local}")

    def check_cluster(self) -> None:
        """Raises NotFound if the path names another cluster."""
        if self.names["cluster"] != self.broker.config.cluster:
            raise NotFound(f"there is no cluster {self.names['cluster'][:100]!r}")

    # ------------------------------------------------------------------ what it brings
    def json(self, kind: type[T]) -> T:
        """The body. BadRequest: it is no JSON, or of another type."""
        return self.decoded(self.body, kind)

    def decoded(self, data: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(data, type=kind, strict=False)  # numbers in quotes, as with Pulsar
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise BadRequest(f"the body is not what this request takes: {error}") from error

    @property
    def is_empty(self) -> bool:
        return self.body.strip() in (b"", b"null")

    def flag(self, name: str) -> bool:
        """Returns a flag of the query. Raises BadRequest."""
        text = self.query.get(name, "").lower()
        if text not in ("", "true", "false"):
            raise BadRequest(f"the parameter {name} is true or false, not {text[:40]!r}")
        return text == "true"

    def number(self, text: str, what: str, *, least: int = 0) -> int:
        """Parses a number. BadRequest: it is none. 412: it is less than `least`, or has more than 64 bits."""
        try:
            if not re.fullmatch(r"[-+]?[0-9]{1,30}", text):
                raise ValueError
            found = int(text)
        except ValueError:
            raise BadRequest(f"{what} is a number, not {text[:40]!r}") from None
        if not least <= found < 1 << 63:
            raise BadRequest(f"{what} is {least} or more, and below 2^63, not {found}", 412)
        return found

    # ------------------------------------------------------------------ the operations
    async def admin(self, operation: Operation[T], **arguments: object) -> T:
        """The answer of this broker. What it raises; NotOwner: another broker has the topic."""
        handler = self.services[operation.service].values[operation.name]
        return answered(operation, await handler(request_for(operation, arguments), self.context))

    async def authorize(self, operation: Operation[Any], **arguments: object) -> None:
        """Raises Unauthorized if the caller may not call the operation with that."""
        path = f"{operation.service}.{operation.name}"
        await authorize(path, request_for(operation, arguments), self.context, self.broker.access)

    async def partitions(self) -> list[TopicName]:
        """Returns the partitions of the topic; none if it has none, or is one. Raises TopicNotFound. Ask for rights
        first."""
        if self.topic.is_partition:
            return []
        count = await self.broker.catalog.existing_partitions(self.topic)
        return [self.topic.with_partition(number) for number in range(count)]

    async def one_partition(self, operation: Operation[Any], what: str, **arguments: object) -> None:
        """405: the topic of the call has partitions. Unauthorized."""
        await self.authorize(operation, **{operation.rule.field: self.topic.full}, **arguments)
        if await self.partitions():
            raise BadRequest(f"topic {self.topic} has partitions: {what}", 405)

    async def each_partition(self, operation: Operation[T], **arguments: object) -> list[T]:
        """Returns the answer of the topic, or of each of its partitions, in order. The first error ends it: what was
        asked before is done."""
        field = operation.rule.field
        await self.authorize(operation, **{field: self.topic.full}, **arguments)
        partitions = await self.partitions()
        if not partitions:
            return [await self.admin(operation, **{field: self.topic.full}, **arguments)]
        return [await self.anywhere(operation, each, **arguments) for each in partitions]

    async def anywhere(self, operation: Operation[T], topic: TopicName, **arguments: object) -> T:
        """Returns the answer of the topic's owner."""
        asked: dict[str, Any] = {operation.rule.field: topic.full, **arguments}
        try:
            return await self.admin(operation, **asked)
        except NotOwner:
            return await ask(self.broker.world, (await self.broker.lookup(topic)).endpoint, operation, **asked)

    async def at_coordinator(self, operation: Operation[T], **arguments: Any) -> T:
        """Returns the answer of the broker that has the coordinator of transactions that is asked for."""
        try:
            return await self.admin(operation, **arguments)
        except NotOwner as error:
            endpoint = error.fields.get("owner", "")
            if not endpoint:
                raise
            return await ask(self.broker.world, endpoint, operation, **arguments)
