"""The administrative operations on brokers, namespaces, policies and topics, in plain values: the same for gRPC and
REST.

Tenants, namespaces and lists of topics come from the metadata, and any broker answers. Operations on a loaded topic are
answered by its owner; another broker raises NotOwner, with the owner's address in the field `owner`. Deleting a
partitioned topic, or a namespace by force, and unloading a namespace ask the other brokers
(`call_operation_at_broker`).
Guarding tests: tests/broker/grpc/test_services.py, tests/broker/grpc/test_namespace_verbs.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from google.protobuf.message import Message

from ...metadata.records import BrokerRecord, GrantsRecord, PartitionedRecord
from ...metadata.records import LostRange as LostRecord
from ...proto import operations as op
from ...proto.errors import (
    BadVersion,
    Busy,
    DataLost,
    InvalidRequest,
    MagnetarError,
    NotAllowed,
    NotFound,
    NotOwner,
    Unavailable,
)
from ...proto.names import MessageId, NamespaceName, Position, TopicName, check_resource_group_name
from ...proto.operations import Operation, find_answer_type
from ...proto.policies import (
    NAMESPACE_LEVEL,
    POLICY_NAMES,
    RESOURCE_GROUP_FIELDS,
    TENANT_LEVEL,
    TOPIC_LEVEL,
    Policies,
    check_level,
    check_properties,
)
from ...proto.statistics import (
    RESOURCE_GROUP_RATES,
    BrokerInfo,
    ForgottenTransaction,
    LostOfSubscription,
    LostRange,
    ResourceGroup,
    SkippedLost,
    Unloaded,
)
from ...proto.translation import convert_reply, make_request
from ...runtime.alarm import EventLoopSlices
from ...runtime.network import Endpoint, World, find_rpc
from ...runtime.tasks import run_together
from ..cluster.bundles_core import compute_bundle_number
from ..cluster.ownership import (
    accepts_assigned_bundles,
    cancel_broker_drain,
    check_can_drain,
    delete_broker_record,
    request_broker_drain,
)
from ..common.config import UNCHANGEABLE_SETTINGS, make_policies_with_all_values, resolve_policies_in_force
from ..common.refusals import check_incarnation
from ..node.topic_manager import TopicManager
from ..subscription.core.cursor import Cursor
from ..topic.topic import Topic

# ------------------------------------------------------------------------------------------------- other_brokers
# Calls an administrative operation of another broker: the same request as a client's, with the rights of this broker.
#
# The caller must have checked the rights of its own caller before.


T = TypeVar("T")
FORWARD_TIMEOUT_S = 30.0
"""Seconds that a request to another broker may take."""


def make_operation_request(operation: Operation[Any], arguments: Mapping[str, object]) -> Message:
    """Returns the gRPC request message that calls the operation with these arguments. Raises InvalidRequest if an
    argument does not fit the field of the message."""
    kind: type[Message] = find_rpc(operation.service, operation.name).request
    return make_request(kind, arguments, operation.name)


def parse_operation_reply(operation: Operation[T], reply: object) -> T:
    """Returns the gRPC reply message of an operation as a plain Python value. Returns a `reply` that is not a message
    unchanged."""
    if isinstance(reply, Message):
        kind = find_answer_type(operation.name, MessageId=MessageId, StoredMessage=Any)
        reply = convert_reply(kind, reply, operation.of_reply, {MessageId: MessageId.from_wire})
    return cast(T, reply)


async def call_operation_at_broker(
    world: World, endpoint: str, operation: Operation[T], *, timeout_s: float = FORWARD_TIMEOUT_S, **arguments: object
) -> T:
    """Calls an operation at the broker at `endpoint` (HOST:PORT), with the rights of this broker. Returns the answer as
    a plain Python value. Raises the error that the other broker answers, or the error of the connection; TimedOut after
    `timeout_s` seconds; InvalidRequest if an argument does not fit the request; ValueError if `endpoint` is no address.
    """
    channel = world.network.connect(Endpoint.parse(endpoint))
    try:
        target = find_rpc(operation.service, operation.name)
        reply = await channel.call(target, make_operation_request(operation, arguments), timeout_s=timeout_s)
        return parse_operation_reply(operation, reply)
    finally:
        await channel.close()


# ------------------------------------------------------------------------------------------------ administration


_LOG = logging.getLogger("magnetar.broker")
OWNERS_AT_ONCE = 64
"""Owners of bundles that are asked for at a time. A namespace has 32 bundles unless it was split."""
BROKER_LIST_TIMEOUT_S = 5.0
"""Seconds to wait for another broker's list of topics in memory: a broker that hangs must not delay the whole list."""


def count_lost_messages(cursor: Cursor, ranges: Sequence[LostRecord]) -> int:
    """Returns how many messages in the lost `ranges` the subscription misses, because it has not acknowledged them. The
    number is an estimate if a range is acknowledged in part. Returns -1 if it is not known which entries a range
    contains."""
    total = 0
    for each in ranges:
        if each.last_entry < 0:
            return -1
        entries = each.last_entry - each.first_entry + 1
        left = sum(
            not cursor.is_acked(Position(each.ledger_id, each.first_entry + at)) for at in range(entries)
        )
        total += -(-(each.end_index - each.first_index) * left // entries)
    return total


def _check_policy_names(names: Sequence[str]) -> None:
    """Raises InvalidRequest if there is no policy with one of these names."""
    unknown = sorted(set(names) - set(POLICY_NAMES))
    if unknown:
        some = ", ".join(name[:100] for name in unknown[:3])
        raise InvalidRequest(f"there is no policy {some}; there are {', '.join(POLICY_NAMES)}")


def may_get_bundles(broker: BrokerRecord) -> bool:
    """Returns True if bundles may be given to this broker: it is not being drained, and its release accepts them."""
    return not broker.draining and accepts_assigned_bundles(broker)


class Administration:
    """The administrative operations on brokers, namespaces, policies and topics. The services of all protocols call
    them, after they have checked the caller's permission. A method that needs the ownership session raises Unavailable
    if this broker has none. A method that reads or changes the metadata raises the errors of the metadata."""

    def __init__(self, broker: TopicManager) -> None:
        self._broker = broker

    async def load_topic(self, name: TopicName) -> Topic:
        """Loads an existing topic at this broker, if it is not loaded yet, and returns it. Raises TopicNotFound if it
        does not exist; NotOwner if another broker owns it; and the other errors of `TopicManager.load_topic`."""
        await self._broker.catalog.count_existing_partitions(name)
        return await self._broker.load_topic(name)

    async def _ask(self, broker: BrokerRecord, operation: Operation[T], **arguments: Any) -> T:
        return await call_operation_at_broker(self._broker.world, broker.endpoint, operation, **arguments)

    async def _other_brokers(self) -> list[BrokerRecord]:
        return [each for each in await self._broker.list_brokers() if each.name != self._broker.name]

    # ------------------------------------------------------------------ brokers
    async def list_brokers(self) -> list[BrokerInfo]:
        """Returns a description of each registered broker. Only that of this broker contains how many topics are
        loaded, and how many bundles are owned. Raises Unavailable without an ownership session, and the errors of the
        metadata."""
        broker, found = self._broker, list[BrokerInfo]()
        for each in await broker.list_brokers():
            counts = (len(broker.loaded), broker.owned_object_count) if each.name == broker.name else (0, 0)
            found.append(BrokerInfo(each.name, each.endpoint, *counts, each.draining, each.labels))
        return found

    async def drain_broker(self, name: str) -> None:
        """Stores the request to drain a broker; the broker then gives its bundles to other brokers. Returns before it
        has done so. Raises NotFound if no broker of that name is registered. Raises NotAllowed if its release does not
        know such requests, or if the other brokers are of releases that do not accept bundles. Raises the errors of the
        metadata, too."""
        brokers = await self._broker.list_brokers()
        found = next((each for each in brokers if each.name == name), None)
        if found is None:
            raise NotFound(f"no broker {name!r} is registered; 'magnetar brokers list' shows them")
        check_can_drain(found, brokers)
        await request_broker_drain(self._broker.metadata, found, self._broker.world.clock.wall_ms())

    async def undrain_broker(self, name: str) -> None:
        """Removes the request to drain a broker, even if the broker is not running. Does nothing if a registered broker
        is not to drain. Raises NotFound if there is neither such a request nor a registered broker of that name. Raises
        the errors of the metadata, too."""
        if await cancel_broker_drain(self._broker.metadata, name):
            return
        if all(each.name != name for each in await self._broker.list_brokers()):
            raise NotFound(f"no broker {name!r} is registered, and none of that name is to drain")

    async def forget_broker(self, name: str) -> None:
        """Deletes the record of a broker that has died and will not come back, so that it is not listed any more.
        Raises NotFound if no broker of that name has died; NotAllowed if a broker of that name is registered;
        BadVersion if its record changes at the same moment. Raises the errors of the metadata, too."""
        await delete_broker_record(self._broker.metadata, name)

    # ------------------------------------------------------------------ namespaces
    async def delete_namespace(self, name: NamespaceName, *, force: bool) -> None:
        """Deletes a namespace, its policies and its schemas. With `force`, first deletes its topics. Raises Busy if the
        namespace has topics and `force` is False; TransactionsOpen if a topic is part of prepared transactions;
        NotFound if the namespace does not exist; and, with `force`, the errors of `delete_topic`. Raises the errors of
        the metadata, too."""
        catalog, in_memory = self._broker.catalog, await self._non_persistent(name, partitions=False)
        if force:
            for topic in [*await catalog.list_topics(name, partitions=False), *sorted(in_memory)]:
                await self.delete_topic(TopicName.parse(topic), force=True)
        elif in_memory:
            raise Busy(f"namespace {name} has non-persistent topics in use; delete them first, or use force")
        if not await catalog.list_topics(name, partitions=False):
            await self._release_empty_bundles(name)
        await catalog.delete_namespace(name)
        await self._broker.schemas.delete_namespace_schemas(name)

    async def _release_empty_bundles(self, name: NamespaceName) -> None:
        """Makes each broker give up its bundles of a namespace without topics. Otherwise these bundles would be owned,
        and moved by each drain, long after the namespace is deleted. A broker that does not answer keeps its bundles
        until its session ends."""
        try:
            await self.unload_namespace(name, here=False)
        except MagnetarError as error:
            _LOG.info("bundles of namespace %s, which is being deleted, are not given up: %s", name, error)

    async def _find_destination(self, named: str, name: NamespaceName) -> BrokerRecord:
        """Returns the broker with this name or address. Raises NotFound; NotAllowed if it may get no bundles, or none
        of the namespace `name`."""
        for each in await self._broker.list_brokers():
            if named in (each.name, each.endpoint):
                if may_get_bundles(each):
                    await self._broker.check_may_own(name, each)
                    return each
                why = "drains" if each.draining else "is of an older release"
                raise NotAllowed(f"broker {each.name!r} {why}: no bundle is given to it")
        raise NotFound(f"no broker {named!r} is registered; 'magnetar brokers list' shows them")

    async def unload_namespace(
        self, name: NamespaceName, bundle: str = "", *, here: bool, destination: str = ""
    ) -> Unloaded:
        """Unloads the topics of one bundle of a namespace, or of all of its bundles if `bundle` is empty. `here`: only
        at this broker; else at every broker. `destination`: the name or address of the broker that gets the bundles;
        those that it owns already stay there. Returns how many topics were unloaded, and how many bundles were given
        up. Raises NotFound if no such destination is registered; NotAllowed if it may get no bundles; InvalidRequest if
        the namespace has no such bundle; and the errors of the metadata.

        Each bundle is given up once, by the broker that owns it at the beginning of this call; a broker that becomes
        its owner meanwhile is not asked. An owner that is no longer registered is not asked either. The brokers work at
        the same time, and each gives up one bundle after the other. If a broker fails, its error is raised after the
        others have finished.
        """
        heir = await self._find_destination(destination, name) if destination else None
        if here and heir is None:
            return Unloaded(*await self._broker.unload_namespace(name, bundle))
        if here and heir is not None:
            is_there = heir.name == self._broker.name
            return Unloaded(0, 0) if is_there else Unloaded(*await self._broker.move_bundles(name, bundle, heir))
        bundles_of: dict[str, list[str]] = {}
        for each, owner in (await self._broker.list_bundle_owners(name, bundle)).items():
            bundles_of.setdefault(owner.broker, []).append(each)
        endpoints = {each.name: each.endpoint for each in await self._broker.list_brokers()}
        endpoints.setdefault(self._broker.name, "")
        asked = (
            self.unload_bundles(name, owner, endpoints[owner], bundles, destination)
            for owner, bundles in bundles_of.items() if owner in endpoints and (heir is None or owner != heir.name)
        )  # fmt: skip
        done = list[Unloaded]()
        errors = list[BaseException]()
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(answer, BaseException):
                errors.append(answer)
            else:
                done += answer
        if errors:
            raise errors[0]
        return Unloaded(sum(each.topics for each in done), sum(each.bundles for each in done))

    async def unload_bundles(
        self, name: NamespaceName, owner: str, endpoint: str, bundles: Sequence[str], destination: str
    ) -> list[Unloaded]:
        """Makes the broker `owner`, at the address `endpoint`, give up these bundles, one after the other.
        `destination`: the name or address of the broker that gets them; empty: any. Returns what was unloaded with each
        bundle. Raises the errors of `unload_namespace` and `call_operation_at_broker`; then the bundles after the
        failed one are not given up."""
        if owner == self._broker.name:
            return [await self.unload_namespace(name, each, here=True, destination=destination) for each in bundles]
        asked: dict[str, Any] = {"namespace": str(name), "here": True, "destination": destination}
        return [
            await call_operation_at_broker(self._broker.world, endpoint, op.UNLOAD_NAMESPACE, bundle=each, **asked)
            for each in bundles
        ]

    async def split_bundles(
        self, name: NamespaceName, bundles: int = 0, *, bundle: str = "", here: bool = False
    ) -> int:
        """Doubles the number of a namespace's bundles, until there are `bundles`; 0: once. Then lets the owner of each
        bundle divide it; one that does not answer does so when it is asked for a topic. No topic moves or closes.
        Returns the number of bundles. `bundle`: the name of one, of which there are to be twice as many; `here`: only
        divides the bundles of this broker, if the namespace was split before. Raises InvalidRequest if the namespace
        has no such bundle, and the errors of `Catalog.split_bundles`."""
        present = await self._broker.divide_bundles(name, bundle)
        if here:
            return present
        if bundle:
            bundles = 2 * present
        record = await self._broker.catalog.split_bundles(name, bundles)
        owners = {each.broker for each in (await self._broker.list_bundle_owners(name)).values()}

        async def divide(owner: BrokerRecord) -> None:
            try:
                asked: dict[str, Any] = {"name": str(name), "here": True}
                await call_operation_at_broker(self._broker.world, owner.endpoint, op.SPLIT_BUNDLES, **asked)
            except MagnetarError as error:
                _LOG.info("broker %s divides its bundles of namespace %s later: %s", owner.name, name, error)

        others = [each for each in await self._broker.list_brokers() if each.name in owners - {self._broker.name}]
        await run_together([divide(each) for each in others], "split-bundles")
        return record.bundles

    # ------------------------------------------------------------------ permissions
    async def get_permissions(self, namespace: str, topic: str) -> GrantsRecord:
        """Returns the permissions that are granted on a namespace, or on one topic; those of a topic do not include the
        ones of its namespace. Raises InvalidRequest unless exactly one of the two is given; NotFound if it does not
        exist. Raises the errors of the metadata, too."""
        name, of_topic = await self._place(namespace, topic)
        record = await self._broker.grants.read_grants_record(name)
        return GrantsRecord(roles=record.topics.get(of_topic.full, {})) if of_topic is not None else record

    async def change_permissions(
        self, namespace: str, topic: str, change: Callable[[GrantsRecord, str], GrantsRecord]
    ) -> None:
        """Changes the permissions on a namespace or a topic. `change`: a function that gets the present permissions of
        the namespace and the full name of the topic ("" for the namespace itself), and returns the new permissions of
        the namespace. Raises InvalidRequest unless exactly one of the two is given; NotFound if it does not exist; and
        the errors of `change`. Raises the errors of the metadata, too."""
        name, of_topic = await self._place(namespace, topic)
        full = of_topic.full if of_topic is not None else ""
        await self._broker.grants.change_grants(name, lambda record: change(record, full))

    # ------------------------------------------------------------------ policies
    async def _place(self, namespace: str, topic: str) -> tuple[NamespaceName, TopicName | None]:
        """Returns the parsed name of an existing namespace, and of the topic if one is given; for a partition, the name
        of its partitioned topic. Raises NotFound if it does not exist; InvalidRequest unless exactly one of `namespace`
        and `topic` is given."""
        if bool(namespace) == bool(topic):
            raise InvalidRequest("it is about a namespace or a topic: name one of the two")
        if topic:
            name = TopicName.parse(topic).base
            await self._broker.catalog.count_existing_partitions(name)
            return name.namespace_name, name
        await self._broker.catalog.get_namespace(NamespaceName.parse(namespace))
        return NamespaceName.parse(namespace), None

    async def get_policies(self, namespace: str, topic: str, *, applied: bool) -> Policies:
        """Returns the policies that are set for a namespace or a topic; if neither is given, those that are set for all
        brokers. With `applied`, returns all policies that are in force there, including inherited ones; if neither is
        given, those in force at this broker. Raises InvalidRequest if both are given; NotFound if the namespace or
        topic does not exist. Raises the errors of the metadata, too."""
        defaults = self._broker.policies.defaults
        if not namespace and not topic:
            if applied:
                return make_policies_with_all_values(defaults)
            return await self._broker.policies.read_uninherited_policies(None, None)
        place, name = await self._place(namespace, topic)
        found = await self._broker.policies.read_uninherited_policies(place, name)
        if not applied:
            return found
        levels = [found] if name is None else [
            await self._broker.policies.read_uninherited_policies(place, None), found
        ]
        levels.insert(0, await self._broker.policies.read_tenant_policies(place.tenant))
        return make_policies_with_all_values(resolve_policies_in_force(defaults, *levels))

    async def get_tenant_policies(self, tenant: str, *, applied: bool) -> Policies:
        """Returns the policies that are set for a tenant; with `applied`, all that are in force there. Raises
        TenantNotFound if it does not exist, and the errors of the metadata."""
        await self._broker.catalog.get_tenant(tenant)
        found = await self._broker.policies.read_tenant_policies(tenant)
        if not applied:
            return found
        return make_policies_with_all_values(resolve_policies_in_force(self._broker.policies.defaults, found))

    async def change_tenant_policies(self, tenant: str, given: Policies, removed: Sequence[str]) -> None:
        """Sets the policies `given` for a tenant, and unsets those with the names `removed`. Raises InvalidRequest if a
        policy is unknown, or is not one of tenants; TenantNotFound if it does not exist. Raises the errors of the
        metadata, too."""
        _check_policy_names(removed)
        await self._broker.catalog.get_tenant(tenant)
        await self._broker.policies.change_tenant_policies(tenant, check_level(given, TENANT_LEVEL), tuple(removed))

    async def get_resource_group(self, name: str) -> ResourceGroup:
        """Returns the rates of a resource group. Raises NotFound if there is none, and the errors of the metadata."""
        found = await self._broker.policies.read_resource_group(check_resource_group_name(name))
        if found is None:
            raise NotFound(f"there is no resource group {name!r}")
        return ResourceGroup(name, *(getattr(found, field) or 0 for field in RESOURCE_GROUP_FIELDS))

    async def set_resource_group(self, name: str, rates: Mapping[str, int]) -> None:
        """Makes a resource group, or changes one. `rates`: those that are set, by the fields of ResourceGroup; 0: no
        limit. Others stay as they are. Raises InvalidName, InvalidRequest, and the errors of the metadata."""
        fields = dict(zip(RESOURCE_GROUP_RATES, RESOURCE_GROUP_FIELDS, strict=True))
        given = Policies(**{fields[rate]: value for rate, value in rates.items()})  # type: ignore[arg-type]
        await self._broker.policies.change_resource_group(check_resource_group_name(name), given)

    async def delete_resource_group(self, name: str) -> None:
        """Deletes a resource group. Reads a record for each namespace. Raises NotFound if there is none; Busy if a
        namespace has it; and the errors of the metadata."""
        catalog, policies = self._broker.catalog, self._broker.policies
        await self.get_resource_group(name)
        for tenant in await catalog.list_tenants():
            for each in await catalog.list_namespaces(tenant):
                own = await policies.read_uninherited_policies(NamespaceName.parse(each), None)
                if own.resource_group == name:
                    raise Busy(f"namespace {each} is in resource group {name!r}: remove it from the group first")
        await policies.delete_resource_group(name)

    async def _check_resource_group(self, given: Policies) -> None:
        """Raises InvalidRequest if `given` names a resource group that does not exist."""
        group = given.resource_group
        if group and await self._broker.policies.read_resource_group(check_resource_group_name(group)) is None:
            raise InvalidRequest(f"there is no resource group {group!r}: create it first", setting="resource_group")

    async def change_policies(self, namespace: str, topic: str, given: Policies, removed: Sequence[str]) -> None:
        """Sets the policies `given` for a namespace or a topic, and unsets the policies with the names `removed`, which
        are then inherited again. If neither a namespace nor a topic is given, changes the policies of all brokers.
        Raises InvalidRequest if a policy is unknown, cannot be set there, or contradicts another; NotFound if the
        namespace or topic does not exist. Raises the errors of the metadata, too."""
        _check_policy_names(removed)
        if not namespace and not topic:
            await self._change_brokers(given, removed)
            return
        place, name = await self._place(namespace, topic)
        check_level(given, NAMESPACE_LEVEL if name is None else TOPIC_LEVEL)
        await self._check_resource_group(given)
        await self._broker.policies.change_policies(place, name, given, tuple(removed))

    async def _change_brokers(self, given: Policies, removed: Sequence[str]) -> None:
        """Changes the policies of all brokers. Raises InvalidRequest if one of the policies cannot be changed while a
        broker runs."""
        fixed = [each for each in UNCHANGEABLE_SETTINGS if each in removed or getattr(given, each) is not None]
        if fixed:
            raise InvalidRequest(f"{fixed[0]} does not change while brokers run: set it where each of them starts")
        await self._broker.policies.change_policies(None, None, given, tuple(removed))

    async def properties(self, namespace: str, topic: str) -> dict[str, str]:
        """Returns the properties of a namespace or a topic. Raises InvalidRequest unless exactly one of the two is
        given; NotFound if it does not exist. Raises the errors of the metadata, too."""
        return await self._broker.policies.read_properties(*await self._place(namespace, topic))

    async def change_properties(
        self, namespace: str, topic: str, given: Mapping[str, str], removed: Sequence[str], *, clear: bool
    ) -> None:  # fmt: skip
        """Changes the properties of a namespace or a topic. Removes the properties with the names `removed` (all of
        them if `clear`), and then sets the properties `given`. Raises InvalidRequest if there are then too many
        properties, or they are too long; NotFound if the namespace or topic does not exist. Raises the errors of the
        metadata, too."""
        place, name = await self._place(namespace, topic)

        def changed(before: dict[str, str]) -> dict[str, str]:
            left = {} if clear else {key: value for key, value in before.items() if key not in gone}
            return check_properties({**left, **given})

        gone = set(removed)
        await self._broker.policies.change_properties(place, name, changed)

    # ------------------------------------------------------------------ topics
    async def list_topics(self, name: NamespaceName, *, partitions: bool) -> list[str]:
        """Returns the sorted full names of the stored topics of a namespace, and of the non-persistent topics that
        brokers have in memory. `partitions`: lists the partitions instead of the partitioned topics. Leaves out the
        non-persistent topics of brokers that do not answer within BROKER_LIST_TIMEOUT_S seconds. Raises TenantNotFound
        or NamespaceNotFound if the namespace does not exist. Raises the errors of the metadata, too."""
        stored = await self._broker.catalog.list_topics(name, partitions=partitions)
        return sorted([*stored, *await self._non_persistent(name, partitions=partitions)])

    async def list_owned_topics(self, name: NamespaceName, after: str) -> list[str]:
        """Returns the sorted full names of the namespace's topics that this broker owns: partitions, and topics without
        partitions. Begins after the name `after`. Looks up the owner of each bundle that has topics; this broker may
        thereby become the owner of a bundle without one. Returns an empty list if the namespace does not exist. Raises
        the errors of `TopicManager.find_owner`."""
        broker = self._broker
        try:
            stored = await broker.catalog.list_topics(name, partitions=True)
            bundles = (await broker.catalog.get_namespace(name)).bundles  # read now: parts may have other owners
        except NotFound:
            return []
        of_bundle: dict[int, list[str]] = {}
        turns = EventLoopSlices(broker.world.clock)
        for each in {*stored, *await self.list_loaded_non_persistent_topics(name)}:
            if each > after:
                of_bundle.setdefault(compute_bundle_number(each, bundles), []).append(each)
            if turns.is_slice_used_up:
                await turns.begin_slice()
        owned, several = list[str](), [*of_bundle.values()]
        for start in range(0, len(several), OWNERS_AT_ONCE):  # each is a question to the metadata: not one by one
            part = several[start : start + OWNERS_AT_ONCE]
            owners = await asyncio.gather(*(broker.find_owner(TopicName.parse(names[0])) for names in part))
            for names, owner in zip(part, owners, strict=True):
                if owner.name == broker.name:
                    owned += names
        return sorted(owned)

    async def list_loaded_non_persistent_topics(self, name: NamespaceName) -> set[str]:
        """Returns the full names of the non-persistent topics of a namespace that are loaded at this broker."""
        found, turns = set[str](), EventLoopSlices(self._broker.world.clock)
        for topic in list(self._broker.loaded.values()):
            if not topic.name.persistent and topic.name.namespace_name == name:
                found.add(topic.name.full)
            if turns.is_slice_used_up:
                await turns.begin_slice()
        return found

    async def _non_persistent(self, name: NamespaceName, *, partitions: bool) -> set[str]:
        """Returns the full names of the namespace's non-persistent topics at all brokers. Leaves out those of a broker
        that does not answer in time."""
        stored = set(await self._broker.catalog.list_non_persistent_topics(name, partitions=partitions))
        found, others = await self.list_loaded_non_persistent_topics(name), await self._other_brokers()
        asked = {"namespace": str(name), "in_memory_here": True}
        answers = await asyncio.gather(
            *(self._ask(other, op.LIST_TOPICS, timeout_s=BROKER_LIST_TIMEOUT_S, **asked) for other in others),
            return_exceptions=True,
        )
        for other, answer in zip(others, answers, strict=True):
            if isinstance(answer, MagnetarError):
                _LOG.info("non-persistent topics of broker %s are not listed: %s", other.name, answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found.update(answer)
        if not partitions:
            found = {full for full in found if TopicName.parse(full).base.full not in stored}
        return stored | found

    async def delete_topic(self, topic: TopicName, *, force: bool, incarnation: int = 0) -> None:
        """Deletes a topic with all of its partitions, each at its owner. `incarnation`: the one that is meant; 0: any.
        Raises Busy if the topic is in use and `force` is False; TransactionsOpen if the topic is part of prepared
        transactions, or of open ones and `force` is False. Raises TopicNotFound if it does not exist, or has another
        incarnation; and the errors of `TopicManager.delete_topic` and `call_operation_at_broker`.

        All partitions are checked before the first one is deleted, so that nothing is deleted if one may not be. A
        topic of the same name that is created meanwhile is not deleted.
        """
        catalog = self._broker.catalog
        ended = await self._partitioned(topic)
        if ended is None:
            await self._delete_one(topic, force=force, incarnation=incarnation)
            return
        check_incarnation(topic, ended.created_ms, incarnation)
        there = dict[int, int]()
        for number in range(ended.partitions):
            with contextlib.suppress(NotFound):  # an earlier attempt got so far
                there[number] = await self.check_delete(topic.with_partition(number), force=force)
        for number, which in there.items():
            with contextlib.suppress(NotFound):
                await self._delete_one(topic.with_partition(number), force=force, incarnation=which)
        while (still := await catalog.make_partition_count_check(topic, ended)) is not None:
            with contextlib.suppress(BadVersion):  # it is gone, grew, or is another one: asked again
                await self._broker.grants.delete_topic_grants(topic, still)
                await self._broker.schemas.delete_schemas_with_topic(
                    topic, partial(catalog.delete_partitioned_record, topic, still)
                )

    async def _partitioned(self, topic: TopicName) -> PartitionedRecord | None:
        """Returns the record of a partitioned topic; None if the topic has no partitions. Raises TopicNotFound if the
        topic does not exist."""
        partitions = await self._broker.catalog.count_existing_partitions(topic)
        return await self._broker.catalog.get_partitioned_record(
            topic
        ) if partitions and not topic.is_partition else None

    async def _delete_one(self, topic: TopicName, *, force: bool, incarnation: int) -> None:
        owner = await self._broker.find_owner(topic)
        if owner.name == self._broker.name:
            await self._broker.delete_topic(topic, force=force, incarnation=incarnation)
        else:
            await self._ask(owner, op.DELETE_TOPIC, name=topic.full, force=force, incarnation=incarnation)

    async def check_delete(self, topic: TopicName, *, force: bool) -> int:
        """`force`: as in `delete_topic`. Returns the incarnation of the topic that `delete_topic` would delete now; 0
        if it is not known. Raises the error that `delete_topic` would raise now for this topic. The partitions of a
        partitioned topic are not checked."""
        if (partitioned := await self._partitioned(topic)) is not None:
            return partitioned.created_ms
        owner = await self._broker.find_owner(topic)
        if owner.name == self._broker.name:
            return await self._broker.check_topic_deletable(topic, force=force)
        return await self._ask(owner, op.CHECK_DELETE, name=topic.full, force=force)

    async def unload_topic(self, name: TopicName) -> None:
        """Unloads the topic if it is loaded at this broker. Raises NotOwner if another broker owns the topic;
        TopicNotFound if it does not exist; and the errors of `TopicManager.unload_topic`."""
        await self._check_here(name)
        await self._broker.unload_topic(name)

    async def _check_here(self, name: TopicName) -> None:
        """Raises NotOwner if another broker owns the topic; TopicNotFound if it does not exist."""
        if name.full not in self._broker.loaded:
            await self._broker.catalog.count_existing_partitions(name)
            owner = await self._broker.find_owner(name)
            if owner.name != self._broker.name:
                raise NotOwner(f"topic {name} is served by {owner.endpoint}; look it up again", owner=owner.endpoint)

    async def skip_lost(self, name: TopicName, ledger_id: int = -1, *, force: bool) -> SkippedLost:
        """Marks the lost entries of a topic as skipped, so that readers and subscriptions continue after them. Works
        even if the topic cannot be loaded. `ledger_id`: only the lost entries of this ledger; -1: of all. `force`: also
        skips entries that a bookie may have which does not answer. Returns the skipped ranges, and how many messages
        each subscription misses. Raises NotOwner if another broker owns the topic; TopicNotFound if it does not exist;
        InvalidRequest if it is not persistent; and the errors of `TopicManager.skip_lost`."""
        await self._check_here(name)
        if not name.persistent:
            raise InvalidRequest(f"topic {name} stores nothing that could be lost")
        cursors = await self._cursors(name)
        ranges = await self._broker.skip_lost(name, only=ledger_id, force=force)
        if ranges and not cursors:  # it did not open before
            cursors = await self._cursors(name)
        lost = (
            LostRange(each.ledger_id, each.first_entry, each.last_entry, each.first_index, each.end_index, each.forced)
            for each in ranges
        )
        missed = (
            LostOfSubscription(each, count_lost_messages(cursor, ranges)) for each, cursor in sorted(cursors.items())
        )
        return SkippedLost(tuple(lost), tuple(missed), await self._forgotten(name))

    async def _forgotten(self, name: TopicName) -> tuple[ForgottenTransaction, ...]:
        """Returns the transactions of the topic whose outcomes are lost; () if the topic cannot be loaded."""
        try:
            topic = await self._broker.load_topic(name, create=False)
            return tuple(await topic.transactions.decide_forgotten_transactions(committed=None))
        except (DataLost, Unavailable) as error:
            _LOG.warning("topic %s does not open: %s", name, error)
            return ()

    async def decide_forgotten_transactions(self, name: TopicName, outcome: str) -> SkippedLost:
        """Ends the transactions of a topic whose outcomes are lost: `outcome` is "commit", which shows their messages,
        or "abort", which hides them for ever. Skips no entries. Returns the transactions that it ended. Raises
        InvalidRequest if `outcome` is something else; NotOwner if another broker owns the topic; TopicNotFound if it
        does not exist; and the errors of `TopicManager.load_topic`."""
        if outcome not in ("commit", "abort"):
            raise InvalidRequest(f"{outcome[:100]!r} is no outcome: commit or abort")
        await self._check_here(name)
        topic = await self._broker.load_topic(name, create=False)
        found = await topic.transactions.decide_forgotten_transactions(committed=outcome == "commit")
        return SkippedLost((), (), tuple(found))

    async def _cursors(self, name: TopicName) -> dict[str, Cursor]:
        """Returns the cursors of the durable subscriptions, by name. Empty if the topic cannot be loaded."""
        try:
            topic = await self._broker.load_topic(name, create=False)
        except NotOwner:
            raise
        except (DataLost, Unavailable) as error:
            _LOG.warning("topic %s does not open: %s", name, error)
            return {}
        return {each.name: each.cursor for each in topic.subscriptions.values() if each.is_durable}

    async def start_compaction(self, name: TopicName) -> None:
        """Starts a compaction of the topic, and returns without waiting for its end. Raises Busy if a compaction of the
        topic is running, and the errors of `load_topic`."""
        topic = await self.load_topic(name)
        if not topic.compaction.start():
            raise Busy(f"topic {topic.name} is being compacted; see compaction-status", topic=topic.name)
