"""The schemas of topics, as clients and operators ask for them; any broker answers.

Guarding tests: tests/broker/protocols/grpc/test_schemas.py.
"""

from __future__ import annotations

from typing import NamedTuple

from ...proto.names import TopicName
from ...proto.schema import Compatibility, SchemaInfo, SchemaVersion
from ..node.topic_manager import TopicManager
from ..schema.registry import SchemaRules


class Tested(NamedTuple):
    """Whether a schema could be registered, and the rule that decided."""

    refused: str  # why it could not be registered; empty: it could
    compatibility: Compatibility  # the rule


class Schemas:
    """The operations on the schemas of topics."""

    def __init__(self, broker: TopicManager) -> None:
        self._broker = broker

    async def get(self, topic: TopicName, version: int | None = None, incarnation: int = 0) -> SchemaVersion:
        """Returns the newest schema, or that version. SchemaNotFound. TopicNotFound: `topic` is of another incarnation
        than the caller means, before the schema was read or after it: a number means something in one of them alone."""
        check = self._broker.catalog.check_incarnation
        await check(topic, incarnation)
        found = await self._broker.schemas.get(topic, version)
        await check(topic, incarnation)
        return found

    async def all(self, topic: TopicName) -> list[SchemaVersion]:
        """Returns the versions that are not deleted, in their order. SchemaNotFound: there is none."""
        return await self._broker.schemas.all(topic)

    async def put(self, topic: TopicName, info: SchemaInfo, user: str, *, by_hand: bool = True) -> int:
        """Registers a schema; returns its version. The topic need not exist, its namespace does. `by_hand`: not by a
        producer, so also where `schema_auto_update` is off. Raises IncompatibleSchema, InvalidRequest, NotAllowed."""
        rules = await self._rules(topic)
        return await self._broker.schemas.register(topic, info, rules, user=user, by_hand=by_hand)

    async def find(self, topic: TopicName, info: SchemaInfo) -> int:
        """Returns the version of the topic's schema that equals `info`. Raises SchemaNotFound, InvalidRequest."""
        return await self._broker.schemas.find(topic, info)

    async def test(self, topic: TopicName, info: SchemaInfo) -> Tested:
        """Whether it could be registered. InvalidRequest."""
        mode = (await self._rules(topic)).compatibility
        return Tested(await self._broker.schemas.refused(topic, info, mode) or "", mode)

    async def delete(self, topic: TopicName, *, force: bool) -> int | None:
        """Deletes all versions; returns the newest of them; None: there were none."""
        return await self._broker.schemas.delete(topic, force=force)

    async def _rules(self, topic: TopicName) -> SchemaRules:
        await self._broker.catalog.known_namespace(topic.namespace_name)
        return SchemaRules.of(await self._broker.policies.applied(topic))
