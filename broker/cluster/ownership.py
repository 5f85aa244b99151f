"""Ownership of bundles of topics: an ephemeral record with the name of the broker that owns the bundle.

The first broker that is asked for a bundle without an owner decides which broker gets it. Brokers of one group
(`share_group`) share the bundles. The broker that is asked chooses a broker of its group (bundles_core.py). It takes
the bundle itself, or *assigns* it to the other broker: it creates the owner record with the other's name. A broker that
reads a record with its own name, and does not own the bundle, takes the bundle by a record of its own session. Without
a group, a broker takes each bundle for which it is asked. Guard: tests/broker/cluster/test_share_group.py.

A broker gives a bundle away (`Ownership.move_bundle`) by the same record:

    1. it gives up the bundle: it loads no topic of the bundle any more, and look-ups at this broker wait
    2. it closes the topics, so that their ledgers are closed and their cursors stored
    3. one commit replaces its record by the assignment to the new owner
    4. the new owner takes the bundle when the first client asks for one of the topics

Two brokers never own the bundle at the same time: the new owner does not take it before step 3, and the old one serves
no topic of it after step 2. The bundle can be taken whichever broker dies at whichever step. An assignment ends with
the session of the broker that made it. An assignment to a broker that is not registered any more is replaced by the
next broker that is asked. If the commit of step 3 failed, this broker replaces its own record when it is asked again.
Guard: tests/broker/cluster/test_moves.py.

Transaction coordinators have owners in the same way (`Ownership.find_owner_by_path`), by the same rules.

Ownership only prevents that brokers compete for topics; fencing and the topic's list make the data safe (ledger
protocol §3.2). The record ends with its broker's session, and the next broker that is asked takes the bundle. Answers
name only registered brokers, with their registered addresses.

When the metadata session is lost, the broker continues to serve its topics, because fencing protects the data, and
claims no bundle. In the next session `Ownership.reclaim_bundles` takes each bundle again that no other broker has, and
gives up the others. Another broker may have owned such a bundle in between: the topics' lists show that
(`TopicManager.resume_ownership`).

One request for a bundle runs at a time. So a record with this broker's name, of which the broker does not know, is
certainly an assignment or a record of an earlier session; no other request is just creating it. (To delete a record
that is being created would let another broker take the bundle, while this broker believes that it owns it.) Guard:
tests/broker/cluster/test_ownership.py.

A namespace is split by one commit that doubles the number in its record (`Catalog.split_bundles`). No owner record
changes, and no topic closes: the owner of a bundle owns its parts, which inherit its record until it divides them
(`Ownership.divide_bundles`: one commit replaces its record by one for each part). It does so when it is told, or asked
for a topic. So a topic has at each moment at most one bundle with an owner record, of whatever number:

    a record is created where there was none   in a commit that checks the version of the namespace's record, whose
                                               number of bundles was just read, and is that of the bundle
    a record of a part is created              also after a look for records of the bundles that it came from: there was
                                               none, and none can come any more
    a record is replaced                       by its broker, its heir, or one that finds the heir gone: in one commit

A broker that knows an old number asks for an old bundle: it finds the record that the parts inherit, which is right; or
none, and then the number in the metadata (`BundlesChanged`). It does not take the bundle. Nor does one that takes its
bundles again in a new session: what was split meanwhile it takes in parts. The name of a bundle says the number, so it
never means two ranges. Guarding tests: tests/broker/cluster/test_split.py.

`LastReadServerLists` has the brokers and bookies of the cluster as the metadata lists them, or, while the metadata does
not answer, as it listed them last.

    found = await members.read_lists(store)  returns after at most twice METADATA_ANSWER_WAIT_S
    found.away_ms                            0, or when the metadata answered last: the lists are as of then, or older
    found.late                               the lists are old, but the metadata answered less than
                                             METADATA_SILENCE_S_MAX ago

The lists are for the view of operators, who need it most while the metadata does not answer. A broker reads them every
SERVER_LISTS_REFRESH_S, so that it knows them before it is asked. No decision uses them: ownership and the placement of
ledgers read the metadata itself. Guarding tests: tests/broker/session/test_summaries.py.

A registration ends with the session of its broker, whether the broker closed or died. The `StartedBrokerRecord`
distinguishes the two: the commit that registers a broker writes it, and the commit with which the broker closes in
order deletes it. So a broker that has this record and is not registered has *died*, or has lost the metadata. Operators
see it (`RegisteredServers.died`) until it registers again, or an operator says that it is gone
(`delete_broker_record`). A broker with a random name has another name after a restart: it counts as back when a broker
with a random name is registered at its address. `LastReadServerLists.update_last_seen_records` deletes the records of
such brokers, and the oldest records above DEAD_BROKER_RECORDS_MAX. A broker of an earlier release has no such record,
and is never listed as died. Guarding tests: tests/broker/cluster/test_died.py.

Also in this file, below its heading: the registered brokers and bookies, and the orders to drain, read on demand
(cluster_view).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import msgspec

from ...metadata import paths
from ...metadata.records import (
    BookieRecord,
    BrokerRecord,
    DamagedRecord,
    DrainRecord,
    Feature,
    NamespaceRecord,
    OwnerRecord,
    StartedBrokerRecord,
    encode_record,
    may_write_feature,
)
from ...metadata.session import MetadataResponsiveness
from ...metadata.store import (
    NODE_ABSENT,
    CheckNodeVersion,
    CommitOperation,
    DeleteNode,
    MetadataStore,
    PutNode,
    VersionedValue,
    check_format_after_registration,
    commit_in_parts,
    get_readable_record,
    get_record,
    read_readable_records,
    update_record,
)
from ...proto.errors import BadVersion, MagnetarError, NodeExists, NotAllowed, NotFound, Unavailable
from ...proto.names import NamespaceName, TopicName
from ...runtime.clock import Clock
from ...runtime.tasks import run_to_end
from ..common.retry import SharedCallsByKey
from .bundles_core import (
    BrokerLoadReport,
    BundlePlacement,
    find_topic_bundle_number,
    list_bundle_parts,
    make_bundle_name,
    parse_bundle_name,
)
from .isolation_core import BrokerIsolation, IsolationTracker

_LOG = logging.getLogger("magnetar.broker")

# -------------------------------------------------------------------------------------------------- cluster_view
# The registered brokers and bookies, and the orders to drain, read on demand.


_RANDOM_NAME = re.compile(r"broker-[0-9a-f]{8}")


def make_random_broker_name(rng: random.Random) -> str:
    """Returns a name for a broker whose configuration has none."""
    return f"broker-{rng.randbytes(4).hex()}"


async def list_brokers(store: MetadataStore) -> list[BrokerRecord]:
    """Returns the records of the registered brokers. Leaves out records that cannot be parsed. Raises the errors of the
    metadata."""
    return list((await read_readable_records(store, paths.BROKERS, BrokerRecord)).values())


async def list_bookies(store: MetadataStore) -> list[BookieRecord]:
    """Returns the records of the registered bookies. Leaves out records that cannot be parsed. Raises the errors of the
    metadata."""
    return list((await read_readable_records(store, paths.AVAILABLE_BOOKIES, BookieRecord)).values())


async def list_drain_orders(store: MetadataStore) -> list[DrainRecord]:
    """Returns the orders to drain a broker that are stored in the metadata, including orders to brokers that do not
    run. Raises the errors of the metadata."""
    return list((await read_readable_records(store, paths.DRAINING_BROKERS, DrainRecord)).values())


async def request_broker_drain(store: MetadataStore, broker: BrokerRecord, now_ms: int) -> None:
    """Stores the order that the broker drains. `now_ms`: the present time (ms since the epoch), which is stored with
    the order. The order applies until `cancel_broker_drain`. Idempotent. For a broker with a random name, which has
    another name after a restart, the order also contains its address. Raises the errors of the metadata."""
    endpoint = broker.endpoint if _RANDOM_NAME.fullmatch(broker.name) else ""
    order = DrainRecord(broker=broker.name, endpoint=endpoint, since_ms=now_ms)
    await update_record(store, paths.draining_broker(broker.name), DrainRecord, lambda found: found or order)


def accepts_assigned_bundles(broker: BrokerRecord) -> bool:
    """Returns True if the broker is of a release that takes bundles that others assign to it, and that drains."""
    return broker.format >= Feature.ASSIGNMENTS.value[0]


def check_can_drain(broker: BrokerRecord, registered: Sequence[BrokerRecord]) -> None:
    """Raises NotAllowed if the broker cannot drain. That is so if its release is older and does not read orders to
    drain. It is also so if no other broker of its group could get its bundles, and some brokers are of older releases,
    which do not take assigned bundles. `registered`: all brokers."""
    if not accepts_assigned_bundles(broker):
        raise NotAllowed(
            f"broker {broker.name!r} ({_version(broker)}) does not know how to drain: stop it by SIGTERM, which gives "
            "its topics up, or upgrade it first"
        )
    others = [each for each in registered if each.name != broker.name]
    old = [each for each in others if not accepts_assigned_bundles(each)]  # of whatever group: they may say none
    heirs = [each for each in others if each.group == broker.group and not each.draining and each not in old]
    if old and not heirs:
        older = ", ".join(sorted(f"{each.name!r} ({_version(each)})" for each in old)[:5])
        raise NotAllowed(
            f"nothing can be given to the other brokers, {older}: upgrade one of them first, or stop broker "
            f"{broker.name!r} by SIGTERM, which gives its topics up"
        )


def _version(broker: BrokerRecord) -> str:
    return f"version {broker.version}" if broker.version else "an older version"


async def cancel_broker_drain(store: MetadataStore, name: str) -> bool:
    """Deletes the order to drain the broker. If the broker has a random name, also deletes an order that it got under
    an earlier name. Returns True if there was an order. Raises the errors of the metadata."""
    running = {each.name: each for each in await list_brokers(store)}
    endpoint = running[name].endpoint if name in running else ""
    ended = [
        each.broker for each in await list_drain_orders(store)
        if each.broker == name or (endpoint and each.endpoint == endpoint and each.broker not in running)
    ]  # fmt: skip
    for broker in ended:
        await store.commit([DeleteNode(paths.draining_broker(broker))])
    return bool(ended)


DEAD_BROKER_RECORDS_MAX = 100
"""The largest number of records of brokers that are not registered. Each is one more read for a broker."""


async def list_dead_brokers(store: MetadataStore, started: Sequence[str], registered: Sequence[BrokerRecord]) -> (
    list[tuple[StartedBrokerRecord, int]]
):
    """Returns the records, with their versions, of the brokers that have died, sorted by name. `started`: the segments
    below `paths.STARTED_BROKERS`, which the caller must have read before the `registered` brokers: one that registers
    meanwhile is then in none of the two, or in both. Raises the errors of the metadata."""
    names = {each.name for each in registered}
    paths_ = [f"{paths.STARTED_BROKERS}/{each}" for each in started if paths.decode_segment(each) not in names]
    found = [await get_readable_record(store, path, StartedBrokerRecord) for path in paths_]
    return [each for each in found if each is not None]  # None: it has closed in order meanwhile


def has_broker_restarted(died: StartedBrokerRecord, registered: Sequence[BrokerRecord]) -> bool:
    """Returns True if the broker of the record `died` has a random name, and runs again as one of the `registered`
    brokers, under another random name at the same address."""
    return _RANDOM_NAME.fullmatch(died.broker) is not None and any(
        each.endpoint == died.endpoint and _RANDOM_NAME.fullmatch(each.name) for each in registered
    )


async def delete_broker_record(store: MetadataStore, name: str) -> None:
    """Deletes the record of a broker that has died and will not come back. Raises NotAllowed if the broker is
    registered; NotFound if it has no such record; BadVersion if the broker starts or is forgotten at the same moment;
    and the errors of the metadata."""
    path = paths.started_broker(name)
    found = await get_readable_record(store, path, StartedBrokerRecord)
    if await store.get(paths.broker(name)) is not None:
        raise NotAllowed(f"broker {name!r} is registered; only one that is not can be forgotten: stop it first")
    if found is None:
        raise NotFound(f"no broker {name!r} has died: 'magnetar status' names those that have")
    await store.commit([DeleteNode(path, found[1])])


async def list_bundle_owners(store: MetadataStore, namespace: NamespaceName) -> dict[str, OwnerRecord]:
    """Returns the owner records of the bundles of a namespace, by the name of the bundle. Bundles without an owner are
    left out. Raises the errors of the metadata."""
    folder = paths.bundle_owner(namespace.tenant, namespace.namespace, "").rstrip("/")
    found = {name: await get_readable_record(store, f"{folder}/{name}", OwnerRecord)
             for name in await store.children(folder)}  # fmt: skip
    return {name: each[0] for name, each in found.items() if each is not None}


# ----------------------------------------------------------------------------------------------------- ownership


class BundlesChanged(Unavailable):
    """Raised when a broker asks for a bundle of a namespace that has been split since, and that has no owner."""

    def __init__(self, path: str, bundles: int) -> None:
        super().__init__(f"{path}: the namespace was split and has {bundles} bundles; try again")
        self.bundles = bundles


PARTS_DIVIDED_AT_ONCE = 64
"""Most parts into which one commit divides a bundle."""
OWNERSHIP_ATTEMPTS_MAX = 10
"""Attempts to read or create an owner record: one fails only if a broker took or released the bundle in between."""


FindIsolation = Callable[[NamespaceName], Awaitable[BrokerIsolation | None]]
"""Returns which brokers may own the bundles of a namespace; None: any broker. Raises the errors of the metadata."""


async def _find_no_isolation(_: NamespaceName) -> BrokerIsolation | None:
    return None


def select_available(registered: Sequence[BrokerRecord], group: str) -> list[BrokerRecord]:
    """Returns the registered brokers of the group that may get bundles, by name."""
    able = [each for each in registered if each.group == group and not each.draining]
    return sorted(filter(accepts_assigned_bundles, able), key=lambda each: each.name)


LISTED_BROKER_VALID_S = 0.005
"""Seconds, for each broker above BROKERS_LISTED_ANEW_MAX, for which a listing of the brokers decides where bundles
without an owner are placed: 5 s for a thousand brokers, which would read 200 kB each from the metadata for each bundle.
For as long the owner of a bundle is answered again: a client that comes late to an owner that has changed is told so
there, and looks it up again."""
BROKERS_LISTED_ANEW_MAX = 20
REMEMBERED_ANSWERS_MAX = 10_000


class _Division(NamedTuple):
    """A commit that divides a bundle, and whose outcome is not known yet."""

    path: str  # of the bundle
    bundles: int  # of which the parts are


class _NumberOfBundles(NamedTuple):
    """What the number of a namespace's bundles is checked by. `splits`: how often it was doubled."""

    checks: Sequence[CommitOperation]
    splits: int


BUNDLE_MOVE_WAIT_S = 1.0
"""Seconds that the opening of a topic waits at its next owner for the end of the move; then its client looks it up."""


class Ownership:
    """Keeps the list of bundles that this broker owns, takes bundles and gives them away, and finds the owners of other
    bundles. `me`: the registration of this broker; `lost`: True when the ownership has ended, so that this broker owns
    nothing any more; `leaving`: how many bundles are being given up, while their topics close; `on_divided`: a function
    that is called when the parts of a bundle have taken its place, with the path of its owner record and the number of
    bundles of which the parts are. A method that reads or changes the metadata also raises the errors of the metadata.
    """

    def __init__(
        self, store: MetadataStore, me: BrokerRecord, rng: random.Random, clock: Clock,
        find_isolation: FindIsolation = _find_no_isolation,
    ) -> None:  # fmt: skip
        """Makes an Ownership without bundles. `rng`: for the choice of brokers; `find_isolation`: asked for the
        namespace of a bundle, and not for coordinators, which any broker may own."""
        self._store = store
        self._isolation_of = find_isolation
        self._isolation = IsolationTracker()
        self.me = me
        self._clock = clock
        self._placement = BundlePlacement(rng)
        self._owned: dict[str, float] = {}  # when this broker took each (monotonic seconds)
        self._asking: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by path of the owner record
        self._questions: dict[str, Callable[[], bool]] = {}  # by path of the owner record
        # waits for their end, by path of the owner record
        self._moves: SharedCallsByKey[str, BrokerRecord] = SharedCallsByKey()
        self._dividing: dict[str, _Division] = {}  # by path of a part
        self._listings: SharedCallsByKey[None, list[BrokerRecord]] = SharedCallsByKey()
        self._listed: list[BrokerRecord] = []
        self._listed_s = -math.inf
        self._answers: dict[str, tuple[BrokerRecord, float]] = {}  # by path: an owner, and until when it is answered
        self._registering = asyncio.Lock()
        self.on_divided: Callable[[str, int], None] = lambda _path, _bundles: None
        self.lost = False
        self.leaving = 0  # bundles that are being given up: their topics close

    async def register_broker(self) -> None:
        """Registers this broker in the metadata, so that other brokers and clients can find it, and writes its
        StartedBrokerRecord as soon as the cluster's format has such records. Must be called once in each metadata
        session. Raises NewerFormat if the upgrade of the cluster was finished meanwhile, and this broker is older, and
        the errors of the metadata."""
        async with self._registering:
            await self._register(self.me)
        await self._list_recent_brokers()
        await check_format_after_registration(self._store)

    async def _register(self, me: BrokerRecord) -> None:
        path = paths.broker(me.name)
        operations: list[CommitOperation] = [
            DeleteNode(path),
            PutNode(path, encode_record(me, path), NODE_ABSENT, ephemeral=True),
        ]
        if may_write_feature(Feature.STARTED_BROKERS):
            path = paths.started_broker(me.name)
            record = StartedBrokerRecord(broker=me.name, endpoint=me.endpoint, seen_ms=self._clock.wall_ms())
            operations.append(PutNode(path, encode_record(record, path)))
        await self._store.commit(operations)
        self.me = me

    async def store_draining(self, draining: bool) -> None:
        """Stores in the registration of this broker whether it drains. Writes nothing if the registration says so
        already. Raises the errors of the metadata."""
        async with self._registering:
            if self.me.draining != draining:
                await self._register(msgspec.structs.replace(self.me, draining=draining))

    async def report_load(self, busy_percent: int) -> None:
        """Stores the load of this broker in its registration, if it differs enough from the stored load.
        `busy_percent`: the share of one processor core that the broker uses. Raises the errors of the metadata."""
        async with self._registering:
            load = BrokerLoadReport(busy_percent, len(self._owned))
            if load.differs_enough_to_report(self.me):
                await self._register(msgspec.structs.replace(
                    self.me, busy_percent=load.busy_percent, bundles=load.bundles, report=self.me.report + 1
                ))  # fmt: skip

    @staticmethod
    def owner_record_path(topic: TopicName, policies: NamespaceRecord) -> str:
        """Returns the path, in the metadata, of the owner record of the bundle to which the topic belongs. `policies`:
        the record of the topic's namespace."""
        return _path_of(topic, find_topic_bundle_number(topic, policies.bundles), policies.bundles)

    def make_owner_check(self, path: str) -> Callable[[], bool]:
        """Returns a function without arguments that returns True if this broker owns the bundle whose owner record is
        at `path`, as far as the broker knows (its metadata session may be lost already). All topics of a bundle get the
        same function."""
        found = self._questions.get(path)
        if found is None:
            found = self._questions[path] = partial(self.is_owned, path)
        return found

    async def find_owner(
        self, topic: TopicName, policies: NamespaceRecord, *, opens: bool = False
    ) -> BrokerRecord:
        """Returns the broker that serves the topic. If the topic's bundle has no owner, this broker takes the bundle,
        or assigns it to another broker of its group. `policies`: the record of the topic's namespace. `opens`: a client
        wants to open the topic here. If the owner drains, it has probably sent the client to this broker, so this call
        then waits up to BUNDLE_MOVE_WAIT_S until the bundle has a new owner. Raises Unavailable if the owner is
        shutting down, or the owner record keeps changing. Raises the errors of the metadata, too."""
        path = self.owner_record_path(topic, policies)
        return self.me if self.is_owned(path) else await self.find_owner_by_path(path, f"topic {topic}", opens=opens)

    async def find_owner_by_path(self, path: str, what: str, *, opens: bool = False) -> BrokerRecord:
        """Returns the owner of the object whose owner record is at `path`, in the same way, and with the same errors,
        as `find_owner`. `what`: the name of the object in texts of errors; `opens`: as in `find_owner`."""
        if self.is_owned(path):
            return self.me
        began_s = self._clock.monotonic()
        if not opens and path in self._answers and began_s < self._answers[path][1]:
            return self._answers[path][0]
        owner = await self._find_owner(path, what)
        if owner.name != self.me.name and self._listing_valid_s > 0:
            self._remember_answer(path, owner, began_s + self._listing_valid_s)
        if opens and self._may_move(owner):
            owner = await self._moves.run(path, lambda: self._wait_for_move(path, what))
        return owner

    @property
    def _listing_valid_s(self) -> float:
        return LISTED_BROKER_VALID_S * max(0, len(self._listed) - BROKERS_LISTED_ANEW_MAX)

    def _remember_answer(self, path: str, owner: BrokerRecord, until_s: float) -> None:
        if len(self._answers) >= REMEMBERED_ANSWERS_MAX:
            self._answers.clear()
        self._answers[path] = owner, until_s

    async def _find_owner(self, path: str, what: str) -> BrokerRecord:
        async with self._asking[path]:
            return await self._ask(path, what)

    def _may_move(self, owner: BrokerRecord) -> bool:
        """Whether the owner drains, and may be giving what it owns to this broker."""
        return owner.draining and owner.name != self.me.name and not self.me.draining

    async def _wait_for_move(self, path: str, what: str) -> BrokerRecord:
        """Returns the owner of the object at `path` when that does not drain; after BUNDLE_MOVE_WAIT_S the one that it
        is."""
        revision = await self._store.revision()
        owner = await self._find_owner(path, what)
        try:
            async with asyncio.timeout(BUNDLE_MOVE_WAIT_S):
                if self._may_move(owner):
                    async for _ in self._store.watch(path, revision):
                        owner = await self._find_owner(path, what)
                        if not self._may_move(owner):
                            break
        except TimeoutError:
            _LOG.info("%s: %s drains, and has not given it away after %s s", what, owner.name, BUNDLE_MOVE_WAIT_S)
        return owner

    def is_owned(self, path: str) -> bool:
        """Returns True if this broker owns the object whose owner record is at `path`, and its metadata session is not
        lost."""
        return path in self._owned and not self.lost

    def measure_owned_s(self, path: str) -> float:
        """Returns for how many seconds this broker has owned the object at `path`; 0.0 if it does not own it."""
        return self._clock.monotonic() - self._owned[path] if path in self._owned else 0.0

    async def _ask(self, path: str, what: str) -> BrokerRecord:
        for _ in range(OWNERSHIP_ATTEMPTS_MAX):
            if self.is_owned(path):
                return self.me
            found = await get_record(self._store, path, OwnerRecord)
            if (division := self._dividing.get(path)) is not None:  # the record may be of the commit that divides
                await self._divide(division.path, division.bundles)
            if division is not None or self.is_owned(path):
                continue
            if found is None:
                number = await self._check_number_of_bundles(path)
                if (owner := await self._find_owner_before_split(path, what, number.splits)) is not None:
                    if owner.name == self.me.name:
                        continue
                    return owner
                chosen = await self._choose(path)
                if await self._write_owner(path, chosen, NODE_ABSENT, number.checks):
                    return chosen
                continue
            record, version = found
            if record.broker == self.me.name and not record.assigned_by:
                await self._store.delete(path, version)  # a record of this broker's earlier session
                continue
            owner = await self._registered(record)
            if owner is not None and (owner.name != self.me.name or not self.me.draining):
                if owner.name != self.me.name or await self._write_owner(path, self.me, version):
                    return owner
                continue
            if not record.assigned_by:
                raise Unavailable(
                    f"broker {record.broker} owns {what} and is going away; try again", broker=record.broker
                )
            chosen = await self._choose(path)  # it was assigned to a broker that went, or to this one, which drains
            if await self._write_owner(path, chosen, version):
                return chosen
        raise Unavailable(f"the owner of {what} changes all the time; try again")

    async def _check_number_of_bundles(self, path: str) -> _NumberOfBundles:
        """Returns what a commit must check that creates the owner record at `path`. Raises BundlesChanged if the
        namespace has another number of bundles by now."""
        place = paths.parse_bundle_owner(path)
        if place is None:
            return _NumberOfBundles((), 0)  # of a coordinator
        name = NamespaceName.parse(place[0])
        record_path = paths.namespace(name.tenant, name.namespace)
        found = await get_record(self._store, record_path, NamespaceRecord)
        if found is None:
            return _NumberOfBundles((CheckNodeVersion(record_path, NODE_ABSENT),), 0)
        if found[0].bundles != parse_bundle_name(place[1])[1]:
            raise BundlesChanged(path, found[0].bundles)
        return _NumberOfBundles((CheckNodeVersion(record_path, found[1]),), found[0].splits)

    async def _find_record_before_split(self, path: str, splits: int) -> tuple[str, VersionedValue] | None:
        """Returns (path, node) of the owner record that the bundle at `path` inherits; None if there is none. `splits`:
        of the namespace."""
        folder, _, bundle = path.rpartition("/")
        for split in range(1, splits + 1):
            number, bundles = parse_bundle_name(bundle)
            before = f"{folder}/{make_bundle_name(number >> split, bundles >> split)}"
            if (node := await self._store.get(before)) is not None:
                return before, node
        return None

    async def _find_owner_before_split(self, path: str, what: str, splits: int) -> BrokerRecord | None:
        """Returns the owner of the bundle from which the one at `path` came; None if that has none. If it is this
        broker, divides that bundle. Also returns this broker if the caller must look for a record at `path` again."""
        found = await self._find_record_before_split(path, splits)
        if found is None:
            return None
        try:
            owner = await self._find_owner(found[0], what)
        except BundlesChanged:  # it was divided or released at this moment
            return self.me
        if owner.name == self.me.name:
            await self._divide(found[0], parse_bundle_name(path.rpartition("/")[2])[1])
        return owner

    async def divide_bundles(self, name: NamespaceName, record: NamespaceRecord) -> None:
        """Divides the bundles of a namespace that this broker has owned since before a split. `record`: that of the
        namespace, as it was just read. Topics stay loaded."""
        for path in self.list_owned_bundle_paths(name):
            await self._divide(path, record.bundles)

    async def _divide(self, path: str, bundles: int) -> None:
        """Divides the bundle at `path`, if this broker owns it, and it is not one of `bundles` bundles already."""
        async with self._asking[path]:
            parts = _list_part_paths(path, bundles)
            while path in self._owned and not self.lost and len(parts) > 1:
                if len(parts) > PARTS_DIVIDED_AT_ONCE:
                    bundles //= 2
                    parts = _list_part_paths(path, bundles)
                    continue
                await run_to_end(self._replace_by_parts(path, parts, bundles))
                return

    async def _replace_by_parts(self, path: str, parts: Sequence[str], bundles: int) -> None:
        values = [self._make_own_record(part) for part in parts]
        found = await get_record(self._store, path, OwnerRecord)
        if found is None and parts[0] in self._dividing and await self._has_value(parts[0], values[0]):
            self._take_parts(path, parts, bundles)  # an earlier attempt got no answer
            return
        if found is None or found[0].broker != self.me.name or found[0].assigned_by:
            return  # of a session that was lost: `reclaim_bundles` decides
        self._dividing.update(dict.fromkeys(parts, _Division(path, bundles)))
        operations = [PutNode(part, value, NODE_ABSENT, ephemeral=True)
                      for part, value in zip(parts, values, strict=True)]  # fmt: skip
        try:
            await self._store.commit([DeleteNode(path, found[1]), *operations])
        except BadVersion:  # this broker's session was lost, or ends: who asks next decides
            self._forget_division(parts)
            return
        except MagnetarError as error:
            if error.definite:
                self._forget_division(parts)
                raise
            if not await self._has_value(parts[0], values[0]):
                raise
        self._take_parts(path, parts, bundles)

    async def _has_value(self, path: str, value: bytes) -> bool:
        node = await self._store.get(path)
        return node is not None and node.value == value

    def _forget_division(self, parts: Sequence[str]) -> None:
        for part in parts:
            self._dividing.pop(part, None)

    def _take_parts(self, path: str, parts: Sequence[str], bundles: int) -> None:
        taken_s = self._owned.pop(path)
        self._owned.update(dict.fromkeys(parts, taken_s))
        self._forget_division(parts)
        self.on_divided(path, bundles)

    def _make_own_record(self, path: str) -> bytes:
        return encode_record(OwnerRecord(broker=self.me.name, endpoint=self.me.endpoint), path)

    async def _choose(self, path: str) -> BrokerRecord:
        """Returns the broker that should own the object without an owner at `path`: this one if there is no better."""
        if not self.me.group and not self.me.draining:
            isolation = await self._find_isolation(path)
            if isolation is None or isolation.is_primary(self.me):
                return self.me
        return await self.choose_next_owner(path) or self.me

    async def _find_isolation(self, path: str) -> BrokerIsolation | None:
        place = paths.parse_bundle_owner(path)
        return None if place is None else await self._isolation_of(NamespaceName.parse(place[0]))

    async def choose_next_owner(self, path: str, *, others: bool = False) -> BrokerRecord | None:
        """Returns the broker of the group that should own the object whose owner record is at `path`; None if no broker
        takes it, and this one may keep it. `others` True: this broker is not chosen. Raises Unavailable if the
        namespace's policy of isolation allows none of the brokers, and the errors of the metadata."""
        registered = await (list_brokers(self._store) if others else self._list_recent_brokers())
        group = {each.name: each for each in registered if each.group == self.me.group}
        group[self.me.name] = msgspec.structs.replace(self.me, bundles=len(self._owned))
        if others:
            del group[self.me.name]
        available = select_available(list(group.values()), self.me.group)
        isolation = await self._find_isolation(path)
        if isolation is not None:
            allowed = isolation.select_allowed(available)
            may_stay = isolation.is_primary(self.me) or isolation.is_fallback(self.me)
            if not allowed and (others or not may_stay):
                raise _say_none_allowed(path, isolation, available)
            available = allowed
        chosen = self._placement.choose_broker(path, available, self._clock.monotonic())
        return self.me if chosen is not None and chosen.name == self.me.name else chosen

    async def check_may_own(self, name: NamespaceName, broker: BrokerRecord) -> None:
        """Raises NotAllowed if the policy of isolation of the namespace does not let the broker get a bundle now, and
        the errors of the metadata."""
        isolation = await self._isolation_of(name)
        if isolation is None or isolation.is_primary(broker):
            return
        allowed = await self.find_allowed_brokers(name, await list_brokers(self._store), broker.group)
        if allowed is not None and broker.name not in allowed:
            has = ",".join(broker.labels) or "no labels"
            raise NotAllowed(f"broker {broker.name!r} has {has}; namespace {name} asks for brokers with {isolation}")

    async def find_allowed_brokers(
        self, name: NamespaceName, registered: Sequence[BrokerRecord], group: str
    ) -> frozenset[str] | None:
        """Returns the names of those registered brokers of the group that may get a bundle of the namespace now; None
        if its policies ask for no labels. Raises the errors of the metadata."""
        isolation = await self._isolation_of(name)
        if isolation is None:
            return None
        return frozenset(each.name for each in isolation.select_allowed(select_available(registered, group)))

    async def list_misplaced_bundles(self) -> list[str]:
        """Returns the paths of the owner records of the bundles that this broker must give away, because the policy of
        isolation of their namespaces does not let it own them, and lets another broker that is available. Leaves out
        those of a namespace whose policies are damaged. Raises the errors of the metadata."""
        owned = dict[str, BrokerIsolation]()
        for path in self.owner_record_paths:
            try:
                isolation = await self._find_isolation(path)
            except DamagedRecord:  # told by each load of a topic there
                continue
            if isolation is not None and not isolation.is_primary(self.me):
                owned[path] = isolation
        if not owned:
            return []
        available = select_available(await list_brokers(self._store), self.me.group)
        return self._isolation.find_misplaced(owned, self.me, available, self._clock.monotonic())
    async def _list_recent_brokers(self) -> list[BrokerRecord]:
        """Returns the brokers that are registered, or were so a moment ago (LISTED_BROKER_VALID_S): in a large cluster
        one listing places all bundles of a broker that has died. A bundle that is assigned to a broker that has left
        meanwhile is placed again, by a new listing, when its owner is asked for next."""
        began_s = self._clock.monotonic()
        if began_s - self._listed_s >= self._listing_valid_s:
            self._listed = await self._listings.run(None, lambda: list_brokers(self._store))
            self._listed_s = began_s
        return self._listed

    async def has_other_brokers_in_group(self) -> bool:
        """Returns True if another broker of the group is registered and does not drain, so that it may get the bundles
        of this broker. Raises the errors of the metadata."""
        return any(
            each.group == self.me.group and each.name != self.me.name and not each.draining
            for each in await list_brokers(self._store)
        )

    async def _write_owner(
        self, path: str, owner: BrokerRecord, version: int, checks: Sequence[CommitOperation] = ()
    ) -> bool:
        """Makes the owner record, in place of the one of that version (NODE_ABSENT: there is none). Returns False if
        another broker changed the record before, if one of the `checks` of its commit failed, or if it is not known
        whether the record is written."""
        given = "" if owner.name == self.me.name else self.me.name
        value = encode_record(OwnerRecord(broker=owner.name, endpoint=owner.endpoint, assigned_by=given), path)
        try:
            if version == NODE_ABSENT:
                await self._store.commit([*checks, PutNode(path, value, NODE_ABSENT, ephemeral=True)])
            else:  # a new node: an ephemeral one stays in the session that made it
                await self._store.commit([DeleteNode(path, version), PutNode(path, value, NODE_ABSENT, ephemeral=True)])
        except (NodeExists, BadVersion):
            return False
        except MagnetarError as error:
            if error.definite or not error.retryable:
                raise
            node = await self._store.get(path)  # unknown: decided by content
            if node is None or node.value != value:
                return False
        if not given:
            self._owned[path] = self._clock.monotonic()
        return True

    async def reclaim_bundles(self) -> None:
        """Takes the bundles of this broker again, in a new metadata session. A bundle that another broker owns by now
        is given up. Raises Unavailable if the owner record of a bundle keeps changing, and the errors of the metadata.
        After any error the caller must repeat the call."""
        reclaimed = set[str]()
        while left := [path for path in self._owned if path not in reclaimed]:  # what is divided meanwhile, too
            for path in left:
                reclaimed.add(path)
                async with self._asking[path]:  # a division of it ends before
                    await self._reclaim_bundle(path)

    async def _reclaim_bundle(self, path: str) -> None:
        try:
            if path in self._owned and not await self._reclaim_path(path):
                del self._owned[path]
        except BundlesChanged as changed:
            self._take_parts(path, _list_part_paths(path, changed.bundles), changed.bundles)

    async def _reclaim_path(self, path: str) -> bool:
        mine = self._make_own_record(path)
        for _ in range(OWNERSHIP_ATTEMPTS_MAX):
            node = await self._store.get(path)
            if node is not None and node.value != mine:
                return False
            there: Sequence[CommitOperation]
            if node is None:
                number = await self._check_number_of_bundles(path)
                before = await self._find_record_before_split(path, number.splits)
                if before is not None and before[1].value != self._make_own_record(before[0]):
                    return False
                there = [*number.checks, *([DeleteNode(before[0], before[1].version)] if before else [])]
            else:
                there = [DeleteNode(path, node.version)]  # of the session that was lost
            try:
                await self._store.commit([*there, PutNode(path, mine, NODE_ABSENT, ephemeral=True)])
            except BadVersion:
                continue
            return True
        raise Unavailable(f"the owner of bundle {path} changes all the time; try again")

    async def _registered(self, owner: OwnerRecord) -> BrokerRecord | None:
        if owner.broker == self.me.name:
            return self.me
        found = await get_record(self._store, paths.broker(owner.broker), BrokerRecord)
        if found is None:
            self._listed_s = -math.inf
            return None
        return found[0]

    def list_owned_bundle_paths(self, namespace: NamespaceName) -> list[str]:
        """Returns the paths of the owner records of those bundles of a namespace that this broker owns."""
        folder = f"{paths.bundle_owner(namespace.tenant, namespace.namespace, '')}"
        return sorted(path for path in self._owned if path.startswith(folder))

    async def release_bundle(self, path: str, unload: Callable[[], Awaitable[None]]) -> None:
        """Gives up the bundle whose owner record is at `path`: from now on none of its topics is loaded at this broker.
        Calls `unload`, which closes the loaded topics, and then deletes the owner record, so that another broker can
        own the bundle. If `unload` raises, the error is raised, and the bundle stays this broker's unless another
        broker has taken it. Runs to its end even if the caller is cancelled. Meanwhile, look-ups of its topics at this
        broker wait. Raises the errors of the metadata, too."""
        async with self._asking[path]:  # a lookup of its topics waits, and finds the next owner
            await run_to_end(self._release(path, unload))

    async def _release(self, path: str, unload: Callable[[], Awaitable[None]]) -> None:
        with self._leave(path):
            await self._unload(path, unload)
            await self._store.commit([DeleteNode(path)])

    async def _unload(self, path: str, unload: Callable[[], Awaitable[None]]) -> None:
        """Calls `unload`. If it fails, takes the bundle again, some topics of which may still be loaded, unless another
        broker has it; and raises the error."""
        try:
            await unload()
        except BaseException:
            try:
                if not self.lost and await self._reclaim_path(path):
                    self._owned[path] = self._clock.monotonic()
            except MagnetarError as error:  # the broker that is asked for the bundle next decides
                _LOG.warning("bundle %s is neither unloaded nor taken again: %s", path, error)
            raise

    @contextmanager
    def _leave(self, path: str) -> Iterator[None]:
        self._owned.pop(path, None)
        self.leaving += 1
        try:
            yield
        finally:
            self.leaving -= 1

    async def move_bundle(self, path: str, heir: BrokerRecord, unload: Callable[[], Awaitable[None]]) -> bool:
        """Gives the bundle whose owner record is at `path` to the broker `heir`, in the order of steps at the head of
        this module. `unload`: a function that closes the loaded topics of the bundle. Runs to its end even if the
        caller is cancelled. Returns False, and does nothing, if this broker has given the bundle up meanwhile. Raises
        the error of `unload`; then the bundle stays this broker's unless another broker has taken it. Raises the errors
        of the metadata, too."""
        async with self._asking[path]:  # a look-up of its topics here waits, and finds the next owner
            if path not in self._owned:
                return False
            await run_to_end(self._move(path, heir, unload))
            return True

    async def _move(self, path: str, heir: BrokerRecord, unload: Callable[[], Awaitable[None]]) -> None:
        with self._leave(path):
            await self._unload(path, unload)
            found = await get_record(self._store, path, OwnerRecord)
            if found is not None and found[0].broker == self.me.name:  # else another has it: the session was lost
                await self._write_owner(path, heir, found[1])

    @property
    def owner_record_paths(self) -> list[str]:
        """Returns the paths of the owner records of all bundles and coordinators that this broker owns."""
        return list(self._owned)

    async def close(self) -> None:
        """Gives up every bundle, and deletes the registration of this broker and its StartedBrokerRecord. The caller
        must have unloaded all topics before. Raises the errors of the metadata."""
        self.lost = True
        owned = list(self._owned)
        self._owned.clear()
        mine = (paths.broker(self.me.name), paths.started_broker(self.me.name))
        await commit_in_parts(self._store, [*map(DeleteNode, mine), *map(DeleteNode, owned)])


def _say_none_allowed(path: str, isolation: BrokerIsolation, available: Sequence[BrokerRecord]) -> Unavailable:
    namespace = (paths.parse_bundle_owner(path) or (path, ""))[0]
    return Unavailable(
        f"namespace {namespace} asks for brokers with {isolation}, and none of the {len(available)} that may get its "
        "bundles has them: start such a broker, or change the policy ('magnetar namespaces get-broker-isolation')",
        labels=",".join(isolation.primary),
    )  # fmt: skip


def _list_part_paths(path: str, bundles: int) -> list[str]:
    """Returns the paths of the owner records of the parts of a bundle, in a namespace with `bundles` bundles; [path] if
    it is one of them; [] if it is none from which these came."""
    folder, _, bundle = path.rpartition("/")
    return [f"{folder}/{each}" for each in list_bundle_parts(bundle, bundles)]


def _path_of(topic: TopicName, number: int, bundles: int) -> str:
    return paths.bundle_owner(topic.tenant, topic.namespace, make_bundle_name(number, bundles))


METADATA_ANSWER_WAIT_S = 2.0
"""Seconds to wait for the lists: a thousand records take one."""
METADATA_SILENCE_S_MAX = 5.0
"""Seconds without an answer from which the metadata is called away; before, it is late. It is asked each second."""
SERVER_LISTS_REFRESH_S = 60.0
"""Seconds between two readings by a broker that is not asked: of 100 brokers and 100 bookies, 350 reads a second."""


class RegisteredServers(NamedTuple):
    """The registered brokers and bookies, and the brokers that have died. `away_ms`: since when the metadata does not
    answer (ms since the epoch); 0 if the lists were read just now, or `late` is True. `late`: True if the lists are
    those of an earlier read, although the metadata answered a call in the last METADATA_SILENCE_S_MAX seconds."""

    brokers: tuple[BrokerRecord, ...] = ()
    bookies: tuple[BookieRecord, ...] = ()
    away_ms: int = 0
    late: bool = False
    died: tuple[StartedBrokerRecord, ...] = ()


class LastReadServerLists:
    """The lists of registered brokers and bookies, and of brokers that have died, that this broker has read last. They
    stay known when a metadata session is lost."""

    def __init__(self, clock: Clock, use: MetadataResponsiveness) -> None:
        self._clock = clock
        self._use = use
        self._last = RegisteredServers()
        self._seen: dict[str, int] = {}  # broker that has a StartedBrokerRecord → when it was seen as registered

    async def read_lists(self, store: MetadataStore | None) -> RegisteredServers:
        """Reads and returns the lists of registered brokers and bookies. If that fails, or takes longer than
        METADATA_ANSWER_WAIT_S seconds, tries once more, unless the metadata has been silent for METADATA_SILENCE_S_MAX
        seconds. If it fails again, logs the error at debug level, and returns the lists that were read last: marked
        `late`, or with `away_ms` set after that silence. `store`: the metadata; None while there is no session: nothing
        is asked then."""
        for _ in range(2):
            try:
                if store is not None:
                    async with asyncio.timeout(METADATA_ANSWER_WAIT_S):
                        return await self._read(store)
            except (MagnetarError, TimeoutError) as error:
                _LOG.debug("the lists of brokers and bookies are not read: %s", error or "too slow")
            if self._use.silent_s >= METADATA_SILENCE_S_MAX:
                break
        if self._use.silent_s < METADATA_SILENCE_S_MAX:
            return self._last._replace(late=True)
        return self._last._replace(away_ms=max(1, self._clock.wall_ms() - round(1000 * self._use.silent_s)))

    async def _read(self, store: MetadataStore) -> RegisteredServers:
        started = await store.children(paths.STARTED_BROKERS)
        brokers, bookies = await list_brokers(store), await list_bookies(store)
        died = tuple(
            self._as_last_seen(each) for each, _ in await list_dead_brokers(store, started, brokers)
            if not has_broker_restarted(each, brokers)
        )  # fmt: skip
        now_ms = self._clock.wall_ms()
        names = set(map(paths.decode_segment, started))
        self._seen = {name: at for name, at in self._seen.items() if name in names}
        self._seen.update((each.name, now_ms) for each in brokers if each.name in names)
        self._last = RegisteredServers(tuple(brokers), tuple(bookies), died=died)
        return self._last

    def _as_last_seen(self, record: StartedBrokerRecord) -> StartedBrokerRecord:
        return msgspec.structs.replace(record, seen_ms=max(record.seen_ms, self._seen.get(record.broker, 0)))

    async def update_last_seen_records(self, store: MetadataStore) -> None:
        """Called periodically. Stores when this broker saw a broker last that has died since, so that others know it
        too. Deletes the records of brokers with random names that are back, and the oldest ones above
        DEAD_BROKER_RECORDS_MAX. What another broker changes meanwhile stays as that one has it. Raises the errors of
        the metadata."""
        started = await store.children(paths.STARTED_BROKERS)
        brokers = await list_brokers(store)
        died = await list_dead_brokers(store, started, brokers)
        died.sort(key=lambda each: each[0].seen_ms, reverse=True)
        for number, (record, version) in enumerate(died):
            path, seen = paths.started_broker(record.broker), self._as_last_seen(record)
            with contextlib.suppress(BadVersion):
                if number >= DEAD_BROKER_RECORDS_MAX or has_broker_restarted(record, brokers):
                    await store.commit([DeleteNode(path, version)])
                elif seen != record:
                    await store.put(path, encode_record(seen, path), version)
