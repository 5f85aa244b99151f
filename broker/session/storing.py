"""Measures what this broker stores of namespaces and tenants with a limit of stored bytes, and makes it obey.

    meter = StorageMeter(broker)
    await meter.measure()              finds out which bundles of this broker are limited, and measures them
    await meter.decide()               tells the topics which limits are reached
    meter.begin_reading()              starts the reads of lists of ledgers that are due, in a task

`LimitSharer` (broker/session/sharing.py) calls them around its report, which the leader answers by
`answer_stored_bytes`. What decides is broker/cluster/stored_core.py. Two sorts of lists are read: those of the idle
topics of bundles that this broker has got; and, by the leader, those of bundles that no broker reports.
Guarding test: tests/broker/cluster/test_stored_limits.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator, Sequence

from ...metadata import paths
from ...metadata.records import DamagedRecord, TopicRecord
from ...metadata.store import iterate_nodes, read_readable_records
from ...proto.errors import InvalidRequest, MagnetarError, NamespaceNotFound, TenantNotFound, Unavailable
from ...proto.names import NamespaceName
from ...proto.states import BacklogQuotaState
from ...proto.statistics import SharedLimit, StoredBundleBytes, StoredPlaceBytes
from ...runtime.alarm import EventLoopSlices
from ...runtime.tasks import Tasks
from ..cluster.bundles_core import compute_bundle_number, make_bundle_name, parse_bundle_name
from ..cluster.stored_core import (
    BUNDLES_PER_REPORT_MAX,
    MEASURE_INTERVAL_S,
    PLACES_MAX,
    TOPICS_PER_INTERVAL,
    PlaceBytes,
    StorageLimit,
    StoredBundle,
    StoredReport,
    StoredSums,
    list_storage_limits,
)
from ..common.retry import LogThrottle
from ..node.topic_manager import TopicManager

_LOG = logging.getLogger("magnetar.broker")

LISTS_READ_AT_ONCE = 50
"""Lists of ledgers that are read at a time."""
POLICIES_WAIT_S = 1.0
"""Seconds to wait for the policies of namespaces that are not known yet; then the limits stay as they were."""


async def read_stored_bytes(broker: TopicManager, namespace: str, bundles: Collection[str]) -> dict[str, int]:
    """Reads how many bytes each persistent topic in these bundles of a namespace stores, as its list of ledgers says:
    an open ledger counts nothing. Returns them by full name. Leaves out topics whose record is damaged. Raises the
    errors of the metadata."""
    name, metadata = NamespaceName.parse(namespace), broker.metadata
    counts, found = {parse_bundle_name(each)[1] for each in bundles}, dict[str, int]()
    turns, folder = EventLoopSlices(broker.world.clock), paths.topics(name.tenant, name.namespace)
    async for segments in iterate_nodes(metadata, folder):
        wanted = dict[str, str]()
        for segment in segments:
            full = f"persistent://{namespace}/{paths.decode_segment(segment)}"
            if any(make_bundle_name(compute_bundle_number(full, count), count) in bundles for count in counts):
                wanted[segment] = full
            if turns.is_slice_used_up:
                await turns.begin_slice()
        names = list(wanted)
        for start in range(0, len(names), LISTS_READ_AT_ONCE):
            some = names[start : start + LISTS_READ_AT_ONCE]
            for segment, record in (await read_readable_records(metadata, folder, TopicRecord, some)).items():
                found[wanted[segment]] = sum(each.size for each in record.ledgers)
    return found


# -------------------------------------------------------------------------------------------------------- leader


def answer_stored_bytes(
    broker: TopicManager, bundles: Sequence[StoredBundleBytes], places: Sequence[str]
) -> list[StoredPlaceBytes]:
    """Counts what another broker reports of its bundles, and returns the sums of the places. Raises InvalidRequest if
    the report is too large or names what is no bundle; Unavailable if this broker does not add up."""
    sums = broker.sharing.sums
    if len(bundles) > BUNDLES_PER_REPORT_MAX or len(places) > PLACES_MAX:
        raise InvalidRequest(f"a report has at most {BUNDLES_PER_REPORT_MAX} bundles and {PLACES_MAX} places")
    if sums is None:
        raise Unavailable("this broker does not divide limits; read again which one does")
    for each in bundles:
        try:
            parse_bundle_name(each.bundle)
        except ValueError as error:
            raise InvalidRequest(f"a report names a bundle that is none: {each.bundle[:100]!r}") from error
    sums.take_report({StoredBundle(each.namespace, each.bundle): each.bytes for each in bundles})
    now = broker.world.clock.monotonic()
    return [StoredPlaceBytes(place, *sums.sum_place(place, now)) for place in places]


def answer_own_report(sums: StoredSums, report: StoredReport, now: float) -> dict[str, PlaceBytes]:
    """Returns the leader's answer to its own report."""
    sums.take_report(report.bundles)
    return {place: sums.sum_place(place, now) for place in report.places}


# -------------------------------------------------------------------------------------------------------- status


def describe_storage_limits(broker: TopicManager) -> Iterator[SharedLimit]:
    """Yields the limits of stored bytes that bound bundles of this broker."""
    here = broker.sharing.stored
    for place, limit in here.limits.items():
        own, total = here.sum_own(place) / limit.bytes, here.estimate(place) / limit.bytes
        yield SharedLimit(
            place, f"{'namespace' if '/' in place else 'tenant'}_storage_bytes", limit.bytes, broker.name,
            own + max(0.0, 1.0 - total), own, total, 0, here.reached.get(place, 0),
            _explain(place, limit, here.estimate(place), is_complete=here.is_complete(place)),
        )  # fmt: skip


def _explain(place: str, limit: StorageLimit, total: int, *, is_complete: bool) -> str:
    known = "all brokers store" if is_complete else "as far as is known, brokers store"
    if total < limit.bytes:
        return f"{known} {total} bytes of {place}: {limit.bytes - total} are left"
    happens = "producers wait" if limit.policy == "producer_request_hold" else "publishes are refused"
    return f"{known} {total} bytes of {place}: {happens} until retention or deletion has brought it below the limit"


# -------------------------------------------------------------------------------------------------------- driver


class StorageMeter:
    """Measures what this broker stores of limited places, reads lists of ledgers, and tells topics what is reached."""

    def __init__(self, broker: TopicManager) -> None:
        self._broker = broker
        self._here = broker.sharing.stored
        self._clock = broker.world.clock
        self._measured_s = float("-inf")
        self._names: dict[str, NamespaceName] = {}
        self._reads = Tasks()
        self._throttle = LogThrottle(self._clock)

    async def close(self) -> None:
        """Ends the reads of lists of ledgers."""
        await self._reads.close()

    async def measure(self) -> None:
        """Measures what this broker stores, if the last measurement is old enough. Raises Unavailable without an
        ownership session; TimeoutError if policies cannot be read in POLICIES_WAIT_S; the errors of the metadata."""
        here, now = self._here, self._clock.monotonic()
        if now - self._measured_s < MEASURE_INTERVAL_S * (1 + here.loaded_topics // TOPICS_PER_INTERVAL):
            return
        async with asyncio.timeout(POLICIES_WAIT_S):
            limits, owned = await self._find_limited_bundles()
        self._measured_s = now
        if not limits and not here.limits:
            here.forget_new()
            return
        if missing := here.list_missing_namespaces(owned):
            for full, topic in list(self._broker.loaded.items()):
                if topic.name.persistent and str(topic.name.namespace_name) in missing:
                    here.on_loaded(full, topic)
        here.set_owned(limits, owned)
        turns = EventLoopSlices(self._clock)
        for _ in here.measure():
            if turns.is_slice_used_up:
                await turns.begin_slice()

    async def _find_limited_bundles(self) -> tuple[dict[str, StorageLimit], list[StoredBundle]]:
        """Returns the limits of the bundles that this broker owns, and these bundles."""
        broker, names = self._broker, dict[str, NamespaceName]()
        limits, owned = dict[str, StorageLimit](), list[StoredBundle]()
        by_namespace = dict[str, bool]()
        for namespace, bundle in broker.list_owned_bundles():
            if namespace not in by_namespace:
                name = names[namespace] = self._names.get(namespace) or NamespaceName.parse(namespace)
                found = list_storage_limits(namespace, await broker.policies.get_applied_namespace_policies(name))
                by_namespace[namespace] = bool(found)
                limits.update(found)
            if by_namespace[namespace]:
                owned.append(StoredBundle(namespace, bundle))
        self._names = names
        return limits, owned

    async def decide(self) -> None:
        """Decides which limits are reached, logs what changed, and tells the loaded topics; all of them also if the
        caller is cancelled meanwhile."""
        changed = self._here.decide()
        for place, state in changed.items():
            if isinstance(state, BacklogQuotaState):
                _LOG.warning("%s: %s (%d bytes)", place, state.value, self._here.estimate(place))
            else:
                _LOG.info("%s: the limit of stored bytes is met again", place)
        steps, turns = self._here.tell(changed), EventLoopSlices(self._clock)
        try:
            for _ in steps if changed else ():
                if turns.is_slice_used_up:
                    await turns.begin_slice()
        finally:
            for _ in steps if changed else ():
                pass

    # ------------------------------------------------------------------ lists of ledgers
    def begin_reading(self) -> None:
        """Starts the reads that are due, unless earlier ones run."""
        if not len(self._reads) and self._broker.has_session and (self._here.list_unread() or self._has_survey()):
            self._reads.spawn(self._read(), "lists of ledgers for limits of stored bytes")

    def _has_survey(self) -> bool:
        sums, now = self._broker.sharing.sums, self._clock.monotonic()
        return sums is not None and bool(sums.list_tenants_to_list(now) or sums.list_incomplete_namespaces(now))

    async def _read(self) -> None:
        try:
            await self.read_idle_topics()
            await self.survey()
        except MagnetarError as error:
            if self._throttle.should_log(error):
                _LOG.info("what idle topics store is not known yet: %s", error)

    async def read_idle_topics(self) -> None:
        """Reads the lists of ledgers of the idle topics of this broker's bundles that it does not know yet. Raises the
        errors of the metadata."""
        here, bundles, done = self._here, self._here.list_unread(), False
        if not bundles:
            return
        here.begin_reading()
        try:
            topics = dict[str, int]()
            for namespace in sorted({each.namespace for each in bundles}):
                names = {each.bundle for each in bundles if each.namespace == namespace}
                topics |= await read_stored_bytes(self._broker, namespace, names)
            here.end_reading(bundles, topics)
            done = True
        finally:
            if not done:
                here.give_up_reading()

    async def survey(self) -> None:
        """Reads, as the leader, what bundles store that no broker reports. Does nothing at another broker. Raises the
        errors of the metadata."""
        sums, broker = self._broker.sharing.sums, self._broker
        if sums is None:
            return
        sums.forget_places(self._clock.monotonic())
        for tenant in sums.list_tenants_to_list(self._clock.monotonic()):
            try:
                names = [str(each) for each in await broker.catalog.list_namespaces(tenant)]
            except TenantNotFound:
                names = []
            sums.set_namespaces(tenant, names, self._clock.monotonic())
        for namespace in sums.list_incomplete_namespaces(self._clock.monotonic()):
            try:
                record = await broker.catalog.get_cached_namespace(NamespaceName.parse(namespace), reload=True)
            except (TenantNotFound, NamespaceNotFound, DamagedRecord):
                continue
            bundles = sums.list_bundles_to_read(namespace, record.bundles, self._clock.monotonic())
            found = dict.fromkeys(bundles, 0)
            for full, size in (await read_stored_bytes(broker, namespace, set(bundles))).items():
                found[make_bundle_name(compute_bundle_number(full, record.bundles), record.bundles)] += size
            sums.on_bundles_read(namespace, found, self._clock.monotonic())
