"""The schemas of topics, in the metadata. Every broker may change them; brokers cache only definitions, which never
change.

    number = await registry.register_schema(topic, info, rules, user=role)    returns the version of the schema
    await registry.check_consumer_schema(topic, info, rules, user, idle=…)    raises if it cannot read the topic
    found = await registry.get_schema(topic)                                  returns the newest schema, or a version

A topic and its partitions share their schemas; a persistent and a non-persistent topic of one name do not. The list of
versions is one record, and each definition another one. A commit writes the list and a new definition together. Of
concurrent changes one wins by compare-and-set, and the other is checked against it; if both add equal schemas, both get
the same version. A version number is never used again, so a definition may be cached by its number for ever.

Deleted versions do not count in compatibility checks, and still decode messages written with them (in Pulsar they do
not); `force` deletes the definitions, too. Schemas are deleted with their topic. Differences from Pulsar:
docs/schemas.md.
Guarding tests: tests/broker/cluster/test_registry.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from msgspec.structs import replace

from ...metadata import paths
from ...metadata.records import SchemaEntry, SchemaListRecord, SchemaRecord
from ...metadata.store import NODE_ABSENT, CommitOperation, DeleteNode, MetadataStore, get_record, make_put_operation
from ...proto.applied import AppliedPolicies
from ...proto.errors import (
    BadVersion,
    Busy,
    IncompatibleSchema,
    MagnetarError,
    NotAllowed,
    OutcomeUnknown,
    SchemaNotFound,
)
from ...proto.names import NamespaceName, TopicName
from ...proto.schema import Compatibility, SchemaInfo, SchemaType, SchemaVersion
from ...runtime.network import World
from ..common.retry import LastMetadataAnswers

if TYPE_CHECKING:
    from .schema_core import CheckedSchemaDefinition

SCHEMA_VERSIONS_MAX = 1000
"""Most versions of a topic: their list is one record of the metadata."""
REGISTER_ATTEMPTS_MAX = 50
"""Attempts to change the list of versions, while others change it too."""
SCHEMAS_READ_AT_ONCE = 20
THREAD_SCHEMA_BYTES = 16 << 10
"""If the definitions to compare have more bytes together, they are compared in a thread."""
COMPARED_BYTES_MAX = 4 << 20
"""Most bytes of all versions that are listed at once, or compared with a new schema in a transitive mode."""
CACHED_SCHEMAS_MAX, CACHED_SCHEMA_BYTES_MAX = 256, 64 << 10
"""Most definitions in the cache, and most bytes of one: clients ask for the same ones again and again."""

T = TypeVar("T")
_Known = tuple[str, int, bytes]
"""Path, time and hash of a definition: a topic that is deleted and created again has other definitions at the same
paths."""
_Rule = Callable[
    [Compatibility, "CheckedSchemaDefinition", Sequence[tuple[int, "CheckedSchemaDefinition"]]], str | None
]
_UNTYPED = (SchemaType.NONE, SchemaType.AUTO_CONSUME)


class SchemaPolicies(NamedTuple):
    """The policies of a topic that affect its schemas (proto/policies.py). `compatibility`: the rule for new schemas;
    `auto_update`: whether producers may register new schemas; `enforced`: whether a producer without a schema is
    refused if the topic has one."""

    compatibility: Compatibility = Compatibility.FULL
    auto_update: bool = True
    enforced: bool = False  # whether a producer without a schema is refused if the topic has one

    @classmethod
    def from_policies(cls, applied: AppliedPolicies) -> SchemaPolicies:
        """Returns the policies that affect schemas, out of the policies in force for a topic."""
        return cls(applied.schema_compatibility, applied.schema_auto_update, applied.schema_validation_enforced)


class SchemaRegistry:
    """Stores the schemas of topics in the metadata, and checks new schemas against them. A method that reads or changes
    the metadata also raises the errors of the metadata."""

    def __init__(self, world: World, store: MetadataStore) -> None:
        self._world = world
        self._store = store
        self._definitions: dict[_Known, SchemaInfo] = {}  # the oldest goes first
        self._lists: LastMetadataAnswers[TopicName, tuple[SchemaListRecord, int]] = LastMetadataAnswers()

    # ------------------------------------------------------------------ asking
    async def get_schema(self, topic: TopicName, version: int | None = None) -> SchemaVersion:
        """Returns the newest schema of the topic that is not deleted. If `version` is given, returns the schema of that
        version, even if it is deleted. Raises SchemaNotFound if there is no such schema. Raises the errors of the
        metadata, too."""
        record, _ = await self._list(topic)
        entries = [e for e in record.schemas if (not e.deleted if version is None else e.version == version)]
        if not entries:
            what = "no schema" if version is None else f"no schema version {version}"
            raise SchemaNotFound(f"topic {topic.base} has {what}", topic=topic.base)
        return (await self._versions(topic, entries[-1:]))[0]

    async def list_versions(self, topic: TopicName) -> list[SchemaVersion]:
        """Returns the schemas of the topic that are not deleted, ordered by version. Raises SchemaNotFound if the topic
        has none, NotAllowed if their definitions together are too large for one answer. Raises the errors of the
        metadata, too."""
        record, _ = await self._list(topic)
        if not (live := _live(record)):
            raise SchemaNotFound(f"topic {topic.base} has no schema", topic=topic.base)
        return await self._together(topic, live, "ask for each by its number")

    async def find_schema_version(self, topic: TopicName, info: SchemaInfo) -> int:
        """Returns the version of the topic's schema that is equal to `info`; deleted versions do not count. Raises
        InvalidSchema if `info` is not a valid schema, SchemaNotFound if no version is equal to it. Raises the errors of
        the metadata, too."""
        asked = await self._defined(info)
        record, _ = await self._list(topic)
        for each in _live(record):
            if each.fingerprint == asked.fingerprint:
                return each.version
        raise SchemaNotFound(f"topic {topic.base} has no such schema", topic=topic.base)

    async def why_schema_refused(self, topic: TopicName, info: SchemaInfo, mode: Compatibility) -> str | None:
        """Returns the reason why the schema could not be registered for the topic under the compatibility `mode`; None
        if it could. Registers nothing. Raises InvalidSchema if `info` is not a valid schema, or the schemas have too
        many types to compare; SchemaNotFound if the topic's schemas are deleted meanwhile; NotAllowed if there are too
        many bytes to compare. Raises the errors of the metadata, too."""
        asked = await self._defined(info)
        record, _ = await self._list(topic)
        live = _live(record)
        if any(each.fingerprint == asked.fingerprint for each in live):
            return None
        return await self._refusal(topic, mode, asked, live)

    # ------------------------------------------------------------------ producers and consumers
    async def register_producer_schema(
        self, topic: TopicName, info: SchemaInfo | None, rules: SchemaPolicies, user: str
    ) -> int | None:
        """Registers a producer's schema `info` for the topic, as `register_schema` does, and returns its version;
        returns None if the producer has no schema. Raises IncompatibleSchema if the topic's policy forbids the schema,
        or demands one; else the errors of `register_schema`. Raises the errors of the metadata, too."""
        if info is not None and info.type not in _UNTYPED:
            return await self.register_schema(topic, info, rules, user=user)
        if rules.enforced and _live((await self._last_list(topic))[0]):
            raise IncompatibleSchema(f"topic {topic.base} has a schema, and takes no producer without one", topic=topic)
        return None

    async def check_consumer_schema(
        self, topic: TopicName, info: SchemaInfo | None, rules: SchemaPolicies, user: str, *, idle: bool
    ) -> None:
        """Checks that a consumer with the schema `info` (None: it has none, which is accepted) can read the topic's
        messages. `rules`: the policies of the topic. `idle`: the topic has no messages and no producers; if an idle
        topic has no schema, the consumer's schema is registered for it. Raises IncompatibleSchema if the consumer
        cannot read the messages, InvalidSchema if its schema is not valid; NotAllowed if there are too many bytes to
        compare; and the errors of `register_schema` if it is registered. Raises the errors of the metadata, too."""
        if info is None or info.type in _UNTYPED:
            return
        asked = await self._defined(info)
        live = _live((await self._last_list(topic))[0])
        if not live and idle:
            await self.register_schema(topic, info, rules, user=user)
        elif not live and rules.compatibility is not Compatibility.ALWAYS_COMPATIBLE:
            raise IncompatibleSchema(
                f"topic {topic.base} is in use without a schema: consume bytes, or upload one first", topic=topic
            )
        elif not any(each.fingerprint == asked.fingerprint for each in live):
            wanted = live if rules.compatibility.transitive else live[-1:]
            from .schema_core import why_consumer_cannot_read

            known = await self._known(topic, wanted)
            why = await self._compared(known, asked, why_consumer_cannot_read, rules.compatibility)
            if why is not None:
                raise IncompatibleSchema(f"topic {topic.base}: the consumer's schema: {why}", topic=topic)

    # ------------------------------------------------------------------ changing
    async def register_schema(
        self, topic: TopicName, info: SchemaInfo, rules: SchemaPolicies, *, user: str, by_hand: bool = False
    ) -> int:
        """Registers the schema `info` for the topic, under the policies `rules`, and returns its version; if an equal
        schema is registered already, returns the version of that. `user`: the role that is stored with it; `by_hand`:
        an operator registers the schema, which is allowed even where producers may not register schemas. Raises
        IncompatibleSchema if the policies forbid it; InvalidSchema if it is not valid; NotAllowed if the topic has
        SCHEMA_VERSIONS_MAX versions, or there are too many bytes to compare; OutcomeUnknown if it may be registered
        after REGISTER_ATTEMPTS_MAX attempts. Raises the errors of the metadata, too."""
        asked = await self._defined(info)
        last: MagnetarError | None = None
        for attempt in range(REGISTER_ATTEMPTS_MAX):
            record, revision = await (self._list(topic) if attempt or by_hand else self._last_list(topic))
            live = _live(record)
            if same := next((each for each in live if each.fingerprint == asked.fingerprint), None):
                return same.version
            if not (rules.auto_update or by_hand):
                raise IncompatibleSchema(
                    f"topic {topic.base} has no such schema, and schema_auto_update is off: an operator uploads it "
                    "with 'magnetar schemas upload'", topic=topic,
                )  # fmt: skip
            if why := await self._refusal(topic, rules.compatibility, asked, live):
                raise IncompatibleSchema(f"topic {topic.base}: {why}", topic=topic)
            try:
                return await self._put(topic, record, revision, asked, user)
            except MagnetarError as error:  # another one was faster, or it may be written: read again
                last = error
                if not error.retryable:
                    raise
            await asyncio.sleep(min(0.5, 0.005 * attempt))
        raise OutcomeUnknown(f"the schema of topic {topic.base} may be registered: {last}", topic=topic) from last

    async def _put(
        self, topic: TopicName, record: SchemaListRecord, revision: int, new: CheckedSchemaDefinition, user: str
    ) -> int:
        if len(record.schemas) >= SCHEMA_VERSIONS_MAX:
            raise NotAllowed(
                f"topic {topic.base} has {SCHEMA_VERSIONS_MAX} versions of its schema: delete them with force",
                topic=topic,
            )
        number, now_ms = record.next, self._world.clock.wall_ms()
        entry = SchemaEntry(version=number, fingerprint=new.fingerprint, created_ms=now_ms, user=user)
        given = new.info
        changed = SchemaListRecord(next=number + 1, schemas=(*record.schemas, entry))
        versions = await self._store.commit([
            make_put_operation(_path(topic), changed, revision),
            make_put_operation(_path(topic, number), SchemaRecord(
                type=given.type, name=given.name, data=given.data, properties=given.properties
            ), NODE_ABSENT),
        ])  # fmt: skip
        self._lists.store_answer(topic.base, (changed, versions[0]))
        return number

    async def delete_schemas(self, topic: TopicName, *, force: bool) -> int | None:
        """Marks all versions of the topic's schema as deleted. If `force` is True, also deletes their definitions.
        Returns the number of the newest version; None if the topic had no schema. Raises OutcomeUnknown if others
        change the schemas during each of REGISTER_ATTEMPTS_MAX attempts. Raises the errors of the metadata, too."""
        for _ in range(REGISTER_ATTEMPTS_MAX):
            record, revision = await self._list(topic)
            if not record.schemas:
                return None
            left = () if force else tuple(replace(each, deleted=True) for each in record.schemas)
            operations: list[CommitOperation] = [
                make_put_operation(_path(topic), replace(record, schemas=left), revision)
            ]
            operations += [DeleteNode(_path(topic, each.version)) for each in record.schemas if force]
            try:
                await self._store.commit(operations)
            except MagnetarError as error:
                if not error.retryable:
                    raise
                continue
            return record.schemas[-1].version
        raise OutcomeUnknown(f"the schemas of topic {topic.base} may be deleted: others change them", topic=topic)

    async def delete_schemas_with_topic(
        self, topic: TopicName, commit: Callable[[Sequence[CommitOperation]], Awaitable[None]]
    ) -> None:
        """Calls `commit`, which deletes a topic, with the operations that delete the topic's schemas in the same
        commit. If the schemas stayed, a later topic of this name could give one of their version numbers to another
        schema. The schemas of a non-persistent topic are not deleted, because such a topic ends whenever it is unused.
        Raises the errors of `commit`, such as BadVersion if the topic itself has changed; Busy if its schemas change
        during each of REGISTER_ATTEMPTS_MAX attempts. Raises the errors of the metadata, too."""
        for _ in range(REGISTER_ATTEMPTS_MAX):
            try:
                await commit(await self._deletes(topic) if topic.persistent else ())
            except BadVersion as error:
                if error.fields.get("path") != _path(topic):
                    raise
                continue
            finally:
                self._lists.discard(topic.base)
            return
        raise Busy(f"the schemas of topic {topic.base} change all the time; delete it again", topic=topic)

    async def _deletes(self, topic: TopicName) -> list[CommitOperation]:
        """Returns the operations that delete all schemas of a topic; they fail with BadVersion if one is registered
        meanwhile."""
        record, revision = await self._list(topic)
        if revision == NODE_ABSENT:
            return []
        return [
            DeleteNode(_path(topic), revision),
            *[DeleteNode(_path(topic, each.version)) for each in record.schemas],
        ]

    async def delete_namespace_schemas(self, name: NamespaceName) -> None:
        """Deletes the schemas that remain after a namespace was deleted: schemas of topics that never existed, and of
        non-persistent topics. Raises OutcomeUnknown if others keep changing them. Raises the errors of the metadata,
        too."""
        for each in await self._store.children(paths.schemas_of_namespace(name.tenant, name.namespace)):
            domain, _, local = paths.decode_segment(each).rpartition("/")
            await self._delete_versions(TopicName.parse(f"{domain or 'persistent'}://{name}/{local}"))

    async def _delete_versions(self, topic: TopicName) -> None:
        for _ in range(REGISTER_ATTEMPTS_MAX):
            if not (deletes := await self._deletes(topic)):
                return
            try:
                await self._store.commit(deletes)
            except MagnetarError as error:
                if not error.retryable:
                    raise
        raise OutcomeUnknown(f"the schemas of topic {topic.base} may be deleted: others change them", topic=topic)

    # ------------------------------------------------------------------ the records
    async def _last_list(self, topic: TopicName) -> tuple[SchemaListRecord, int]:
        """Returns the list of versions; while the metadata does not answer, the last known list. For producers and
        consumers."""
        return await self._lists.read_or_get_last(topic.base, lambda: self._list(topic))

    async def _list(self, topic: TopicName) -> tuple[SchemaListRecord, int]:
        found = await get_record(self._store, _path(topic), SchemaListRecord)
        return (SchemaListRecord(), NODE_ABSENT) if found is None else found

    async def _versions(self, topic: TopicName, entries: Sequence[SchemaEntry]) -> list[SchemaVersion]:
        """Reads versions, without those that are deleted meanwhile. Raises SchemaNotFound if none is left."""
        found: list[SchemaInfo | None] = []
        for start in range(0, len(entries), SCHEMAS_READ_AT_ONCE):
            some = entries[start : start + SCHEMAS_READ_AT_ONCE]
            found += await asyncio.gather(*[self._definition(topic, each) for each in some])
        versions = [
            SchemaVersion(
                version=e.version, info=info, created_ms=e.created_ms, user=e.user, deleted=e.deleted
            )
            for e, info in zip(entries, found, strict=True) if info is not None
        ]  # fmt: skip
        if entries and not versions:
            raise SchemaNotFound(f"the schema of topic {topic.base} was deleted just now", topic=topic.base)
        return versions

    async def _definition(self, topic: TopicName, entry: SchemaEntry) -> SchemaInfo | None:
        path = _path(topic, entry.version)
        key = (path, entry.created_ms, entry.fingerprint)
        known = self._definitions.get(key)
        if known is None and (found := await get_record(self._store, path, SchemaRecord)) is not None:
            record = found[0]
            known = SchemaInfo(
                type=SchemaType(record.type), data=record.data, name=record.name, properties=record.properties
            )
            if len(known.data) <= CACHED_SCHEMA_BYTES_MAX:
                self._definitions[key] = known
            if len(self._definitions) > CACHED_SCHEMAS_MAX:
                del self._definitions[next(iter(self._definitions))]
        return known

    # ------------------------------------------------------------------ comparing
    async def _refusal(
        self, topic: TopicName, mode: Compatibility, asked: CheckedSchemaDefinition, live: Sequence[SchemaEntry]
    ) -> str | None:
        from .schema_core import why_incompatible

        known = await self._known(topic, live if mode.transitive else live[-1:])
        return await self._compared(known, asked, why_incompatible, mode)

    async def _known(self, topic: TopicName, entries: Sequence[SchemaEntry]) -> list[SchemaVersion]:
        return await self._together(topic, entries, "use a mode that is not transitive, or delete them")

    async def _together(self, topic: TopicName, entries: Sequence[SchemaEntry], instead: str) -> list[SchemaVersion]:
        """Returns these versions. Raises NotAllowed, whose text advises to do `instead`, if their definitions together
        are too large."""
        found: list[SchemaVersion] = []
        size = 0
        for start in range(0, len(entries), SCHEMAS_READ_AT_ONCE):
            some = await self._versions(topic, entries[start : start + SCHEMAS_READ_AT_ONCE])
            found += some
            size += sum(len(each.info.data) for each in some)
            if size > COMPARED_BYTES_MAX and len(entries) > 1:
                raise NotAllowed(
                    f"the versions of topic {topic.base} have over {COMPARED_BYTES_MAX} bytes together: {instead}",
                    topic=topic,
                )
        return found

    async def _compared(
        self, known: list[SchemaVersion], asked: CheckedSchemaDefinition, rule: _Rule, mode: Compatibility
    ) -> str | None:
        from .schema_core import CheckedSchemaDefinition

        def work() -> str | None:
            return rule(mode, asked, [(each.version, CheckedSchemaDefinition.parse(each.info)) for each in known])

        return await self._run(work, len(asked.info.data) + sum(len(each.info.data) for each in known))

    async def _defined(self, info: SchemaInfo) -> CheckedSchemaDefinition:
        """Checks and parses a schema; the first call imports the code for this. Raises InvalidSchema."""
        await self._world.workers.load(f"{__package__}.schema_core")
        from .schema_core import CheckedSchemaDefinition

        return await self._run(lambda: CheckedSchemaDefinition.parse(info), len(info.data))

    async def _run(self, work: Callable[[], T], size: int) -> T:
        """Runs `work`, in a worker thread if the schema is large, and returns its result. A caller that is cancelled
        waits until the thread has finished `work`."""
        if size <= THREAD_SCHEMA_BYTES:
            return work()
        worker = self._world.workers.start("schema")
        try:
            return await worker.run(work)
        finally:
            await worker.close()


def _live(record: SchemaListRecord) -> list[SchemaEntry]:
    return [each for each in record.schemas if not each.deleted]


def _path(topic: TopicName, version: int | None = None) -> str:
    """Returns the path of the topic's schemas. A non-persistent topic has another path than a persistent topic of the
    same name, because a permission on one of them is none on the other."""
    local = topic.base.local
    where = (topic.tenant, topic.namespace, local if topic.persistent else f"non-persistent/{local}")
    return paths.schemas(*where) if version is None else paths.schema(*where, version)
