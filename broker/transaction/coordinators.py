"""The transaction coordinators of the cluster as one broker sees them: those it owns, and the owners of the others.

    await coordinators.find_owner(number)           returns the owner; this broker becomes it if there is none
    await coordinators.load_owned_coordinator(n)    returns the running one; NotOwner if another broker owns it
    await coordinators.join_transaction(txn, topic) and ask_transaction_state, abort_if_open:
    `TransactionCoordinatorsPort` of
                                                    broker/common/transactions.py, here or over the network
    await coordinators.load_unowned_coordinators()  loads those that no broker owns and that have something to do
    await coordinators.close() | abandon_all(error) closes them in order, or stops them at once

The cluster has a fixed number of coordinators, which its first transaction sets. A coordinator has an owner as a bundle
of topics has (broker/cluster/ownership.py), under the name of a partition of Pulsar's system topic
(`coordinator_topic`). The first request loads it; a broker without transactions loads neither a coordinator nor its
code. After a crash perhaps no client sends a request. So each broker looks for coordinators without an owner, and loads
them, so that decided transactions are settled. Guards: tests/broker/grpc/test_transactions.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from ...ledger import LedgerClient
from ...metadata import paths
from ...metadata.records import BrokerRecord, CoordinatorRecord, OwnerRecord, TransactionsRecord
from ...metadata.store import MetadataStore, get_record, update_record
from ...proto.errors import (
    ConnectionLost,
    DataLost,
    MagnetarError,
    NotFound,
    NotOwner,
    TimedOut,
    Unavailable,
)
from ...proto.names import TopicName
from ...proto.states import COORDINATORS_MAX, TxnId
from ...runtime.network import World
from ..cluster.ownership import Ownership
from ..common.config import BrokerConfig, LedgerReplication
from ..common.retry import LogThrottle, SharedCallsByKey
from ..common.transactions import JoinAnswer, ReportedTransaction
from ..log.snapshot_ledger import TopicStateLedgers
from .peers import TransactionPeerClient

if TYPE_CHECKING:
    from .coordinator import PublishHalfMessages, RunningCoordinator
    from .intents_core import CoordinatorLimits
    from .peers import SettlementTransport

Answer = TypeVar("Answer")
_LOG = logging.getLogger("magnetar.broker.transactions")

ASSIGN_TOPIC = TopicName.parse("persistent://pulsar/system/transaction_coordinator_assign")
"""Pulsar's Java client looks up the partitions of this topic to find the coordinators."""


def coordinator_topic(number: int) -> TopicName:
    """Returns the partition of the system topic ASSIGN_TOPIC with the number of the coordinator. The broker that owns
    this partition owns the coordinator."""
    return ASSIGN_TOPIC.with_partition(number)


def owner_record_path(number: int) -> str:
    """Returns the path, in the metadata, of the owner record of the coordinator with this number."""
    topic = coordinator_topic(number)
    return paths.bundle_owner(topic.tenant, topic.namespace, topic.stored_local)


def coordinator_limits(config: BrokerConfig) -> CoordinatorLimits:
    """Returns the limits of a coordinator that the broker's settings demand."""
    from .intents_core import CoordinatorLimits, HalfMessageLimits

    return CoordinatorLimits(
        open_max=config.transaction_open_max, open_per_role_max=config.transaction_open_per_role_max,
        timeout_s=config.transaction_timeout_s, timeout_s_max=config.transaction_timeout_s_max,
        prepared_s_max=config.transaction_prepared_s_max, retention_s=config.transaction_result_retention_s,
        lease_s=config.transaction_lease_s,
        halves=HalfMessageLimits(
            group_max=config.transaction_halves_per_group_max, bytes_max=config.transaction_half_bytes,
            check_after_s=config.transaction_half_check_after_s, pause_s=config.transaction_half_pause_s,
            pause_s_max=config.transaction_half_pause_s_max, answer_s=config.transaction_half_answer_s,
            unknown_max=config.transaction_half_unknown_max, open_s=config.transaction_half_open_s,
            retention_s=config.transaction_result_retention_s,
        ),
    )  # fmt: skip


class TransactionCoordinators:
    """The transaction coordinators that this broker runs, and look-ups of the owners of the others. Implements
    `TransactionCoordinatorsPort` (broker/common/transactions.py) for topics. There is one object for each ownership
    session. `is_settled`: a function that returns True when the broker knows which bundles it owns; before that it
    becomes the owner of no coordinator. A method that reads or changes the metadata also raises the errors of the
    metadata."""

    def __init__(
        self, world: World, config: BrokerConfig, metadata: MetadataStore, ledgers: LedgerClient, ownership: Ownership,
        topics: SettlementTransport, publish: PublishHalfMessages, is_settled: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._world = world
        self._config = config
        self._metadata = metadata
        self._ledgers = ledgers
        self._ownership = ownership
        self._topics = topics
        self._publish = publish
        self._is_settled = is_settled
        self._count = 0
        self._loaded: dict[int, RunningCoordinator] = {}
        self._loading: SharedCallsByKey[int, RunningCoordinator] = SharedCallsByKey()
        self._owners: dict[int, str] = {}  # endpoints, as they were last found
        self._closed = False
        self._throttle = LogThrottle(world.clock)
        self.peers = TransactionPeerClient(world)

    # ------------------------------------------------------------------ finding
    async def ensure_coordinator_count(self) -> int:
        """Returns the number of coordinators of the cluster. The first call in the cluster stores the number, which
        never changes after that. Raises the errors of the metadata."""
        if not self._count:
            wanted = self._config.transaction_coordinators
            found = await update_record(
                self._metadata, paths.TRANSACTION_SETTINGS, TransactionsRecord,
                lambda known: known or TransactionsRecord(coordinators=wanted),
            )  # fmt: skip
            assert found is not None, "the record is there"
            self._count = found[0].coordinators
        return self._count

    async def read_coordinator_count(self) -> int:
        """Returns the number of coordinators of the cluster, or the number in this broker's settings if none is stored.
        Stores nothing. Raises the errors of the metadata."""
        fixed = await get_record(self._metadata, paths.TRANSACTION_SETTINGS, TransactionsRecord)
        return fixed[0].coordinators if fixed is not None else self._config.transaction_coordinators

    async def read_coordinator_owners(self) -> list[str]:
        """Returns, for each coordinator by number, the name of the broker that owns it; "" if no broker does. Changes
        nothing. Raises the errors of the metadata."""
        found = []
        for number in range(await self.read_coordinator_count()):
            owner = await get_record(self._metadata, owner_record_path(number), OwnerRecord)
            found.append(owner[0].broker if owner is not None else "")
        return found

    async def has_been_loaded(self, number: int) -> bool:
        """Returns True if any broker has ever loaded the coordinator with this number. Changes nothing. Raises NotFound
        if there is no coordinator with this number. Also raises the errors of the metadata."""
        count = await self.read_coordinator_count()
        if number >= count:
            raise NotFound(f"there is no coordinator {number}; there are {count} of them")
        return number in self._loaded or await self._metadata.get(paths.coordinator(number)) is not None

    async def find_owner(self, number: int) -> BrokerRecord:
        """Returns the broker that owns the coordinator. If no broker owns it, makes this broker the owner. Raises
        NotFound if there is no coordinator with this number; Unavailable if this broker must not become the owner of
        coordinators now; and the errors of `Ownership.find_owner_by_path`."""
        await self._check_number(number)
        if number in self._loaded:
            return self._ownership.me
        if not self._is_settled() or self._closed:
            raise Unavailable("this broker takes no coordinators at the moment; ask another one, or try again")
        return await self._ownership.find_owner_by_path(owner_record_path(number), f"coordinator {number}")

    async def _check_number(self, number: int) -> None:
        count = await self.ensure_coordinator_count()
        if not 0 <= number < min(count, COORDINATORS_MAX):
            raise NotFound(f"there is no coordinator {number}; there are {count} of them")

    def find_loaded_coordinator(self, number: int) -> RunningCoordinator | None:
        """Returns the coordinator with this number if this broker runs it, else None."""
        return self._loaded.get(number)

    async def load_owned_coordinator(self, number: int) -> RunningCoordinator:
        """Returns the running coordinator with this number. Loads it first, if necessary; becomes its owner if there is
        none. Raises NotOwner if another broker owns the coordinator; the field `owner` of the error is the endpoint of
        that broker. Raises the errors of `find_owner` and of `RunningCoordinator.load`; Unavailable if this broker gave
        the coordinator up meanwhile."""
        found = self._loaded.get(number)
        if found is not None:
            return found
        owner = await self.find_owner(number)
        if owner.name != self._ownership.me.name:
            raise NotOwner(f"coordinator {number} is at {owner.endpoint}; look it up again", owner=owner.endpoint)
        return await self._loading.run(number, lambda: self._load(number))

    async def _load(self, number: int) -> RunningCoordinator:
        await self._world.workers.load(f"{__package__}.coordinator")
        from .coordinator import RunningCoordinator
        from .log import CoordinatorLog

        config = self._config
        topic = coordinator_topic(number)
        ledgers = TopicStateLedgers(self._ledgers, config, self._replication, topic, transactions=str(number))
        log = CoordinatorLog(self._world, self._metadata, ledgers, number, config.reroute_timeout_s)
        try:
            running = await RunningCoordinator.load(
                self._world,
                log,
                coordinator_limits(config),
                self._topics,
                self._publish,
                config.close_timeout_s,
                self._remove_running,
            )
        except DataLost as error:
            if self._throttle.should_log(error):
                _LOG.error("coordinator %d cannot be loaded, and decides nothing: %s", number, error)
            raise
        if self._closed or not self._ownership.is_owned(owner_record_path(number)):
            await running.close()
            raise Unavailable(f"coordinator {number} was given up while it was loaded; look it up again")
        self._loaded[number] = running
        _LOG.info("coordinator %d is here, in epoch %d", number, running.epoch)
        return running

    async def _replication(self) -> LedgerReplication:
        config = self._config
        return LedgerReplication(config.ensemble_size, config.write_quorum, config.ack_quorum)

    def _remove_running(self, running: RunningCoordinator) -> None:
        if self._loaded.get(running.number) is running:
            del self._loaded[running.number]

    # ------------------------------------------------------------------ `TransactionCoordinatorsPort` of topics
    async def join_transaction(self, txn: TxnId, topic: TopicName, owner: str | None = None) -> JoinAnswer:
        return await self._ask_owner(
            txn.coordinator, lambda running: running.join_transaction(txn, topic.full, owner),
            lambda endpoint: self.peers.join_transaction(endpoint, txn, topic, owner),
        )  # fmt: skip

    async def ask_transaction_state(self, txn: TxnId) -> ReportedTransaction:
        return await self._facts(txn, only_tell=True)

    async def abort_if_open(self, txn: TxnId) -> ReportedTransaction:
        return await self._facts(txn, only_tell=False)

    async def _facts(self, txn: TxnId, *, only_tell: bool) -> ReportedTransaction:
        async def here(running: RunningCoordinator) -> ReportedTransaction:
            row = await running.abort_if_open(txn, only_tell=only_tell)
            sink = row.tag.sink_id if row.tag is not None else ""
            return ReportedTransaction(txn, row.state, row.owner, row.name, row.address, sink, row.age_s, row.left_s)

        return await self._ask_owner(
            txn.coordinator, here, lambda endpoint: self.peers.abort_if_open(endpoint, txn, only_tell=only_tell)
        )

    async def _ask_owner(
        self, number: int, here: Callable[[RunningCoordinator], Awaitable[Answer]],
        there: Callable[[str], Awaitable[Answer]],
    ) -> Answer:  # fmt: skip
        """Asks a coordinator: calls `here` if this broker owns it (and loads it first, if necessary), else `there` with
        the endpoint of the owner. Returns the answer."""
        running = self._loaded.get(number)
        if running is not None:
            return await here(running)
        endpoint = self._owners.get(number)
        try:
            if endpoint is not None:
                return await there(endpoint)
        except NotOwner:
            pass  # it moved
        except (ConnectionLost, TimedOut, Unavailable):
            self._owners.pop(number, None)
            raise
        owner = await self.find_owner(number)
        if owner.name == self._ownership.me.name:
            self._owners.pop(number, None)
            return await here(await self.load_owned_coordinator(number))
        self._owners[number] = owner.endpoint
        return await there(owner.endpoint)

    def join_transaction_nowait(self, txn: TxnId, topic: str, owner: str | None = None) -> bool:
        running = self._loaded.get(txn[0])
        return running is not None and running.join_transaction_nowait(txn, topic, owner)

    # ------------------------------------------------------------------ upkeep
    async def load_unowned_coordinators(self) -> None:
        """Loads the coordinators that no broker owns, except those that had nothing left to do when they were closed.
        Only logs the errors of single coordinators. Called regularly by the broker. Raises the errors of the metadata
        if the coordinators cannot be listed."""
        if not self._is_settled() or self._closed:
            return
        for number in paths.parse_coordinators(await self._metadata.children(paths.COORDINATORS)):
            if number in self._loaded:
                continue
            try:
                if await self._is_left(number):
                    await self.load_owned_coordinator(number)
            except NotOwner:
                pass  # another broker was faster
            except MagnetarError as error:
                if self._throttle.should_log(error):
                    _LOG.warning("coordinator %d has no owner and is not loaded: %s", number, error)

    async def _is_left(self, number: int) -> bool:
        owner = await get_record(self._metadata, owner_record_path(number), OwnerRecord)
        if owner is not None and owner[0].broker != self._ownership.me.name:
            return False
        found = await get_record(self._metadata, paths.coordinator(number), CoordinatorRecord)
        return found is not None and not found[0].idle

    async def abandon_coordinators_taken_over(self) -> None:
        """Called when a new metadata session begins. Stops at once those coordinators that another broker took over
        while this broker had no session. Raises the errors of the metadata."""
        for running in list(self._loaded.values()):
            if not self._ownership.is_owned(owner_record_path(running.number)) or not await running.is_owner():
                await running.abandon_epoch(NotOwner(f"coordinator {running.number} was taken over; look it up again"))

    @property
    def loaded_coordinators(self) -> Sequence[RunningCoordinator]:
        """Returns the coordinators that this broker runs now."""
        return list(self._loaded.values())

    # ------------------------------------------------------------------ ending
    async def unload_coordinator(self, path: str) -> None:
        """Closes the coordinator whose owner record is at `path`, if this broker runs it. The caller must give up the
        ownership after this call."""
        for running in self.loaded_coordinators:
            if owner_record_path(running.number) == path:
                await running.close()
                self._remove_running(running)

    async def close(self) -> None:
        """Closes all coordinators in order; afterwards none is loaded. The caller must give up the ownership of the
        coordinators after this call."""
        self._closed = True
        await self._loading.wait_idle()
        await asyncio.gather(*[running.close() for running in self.loaded_coordinators])
        await self.peers.close()

    async def abandon_all_coordinators(self, error: MagnetarError) -> None:
        """Stops all coordinators at once. Their transactions are not handed over, because other brokers may own the
        coordinators already."""
        self._closed = True
        await asyncio.gather(*[running.abandon_epoch(error) for running in self.loaded_coordinators])
        await self.peers.close()
