"""Limits in sum over brokers: each broker measures, reports and obeys, and the leader divides.

The leader is the broker that balances (broker/session/balancing.py: `BalancerRecord`). Every REPORT_INTERVAL_S a broker
with topics of a limited namespace or tenant (`TopicManager.shared_rates`)

1. notes how much of each limit it has used, and whether something waited for it; and what its bundles store, if their
   namespace or tenant has a limit of stored bytes (broker/session/storing.py);
2. reports that to the leader, by one call on a connection that stays open, and gets its shares, and what all store;
3. sets its token buckets to the shares, and tells topics if a limit of stored bytes is reached. Between two reports
   nothing is done but to count in these buckets.

Nothing is written to the metadata; the list of brokers is read every BROKERS_READ_S while there is a limit, else every
LEADER_READ_S. A broker without limited topics reports every IDLE_REPORT_INTERVAL_S, so that the leader need not keep a
part for it. What holds while a call fails, the leader is away, or is of an older release:
broker/cluster/shares_core.py. Guarding test: tests/broker/cluster/test_shared_limits.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ...metadata import paths
from ...metadata.records import BalancerRecord
from ...metadata.store import get_readable_record
from ...proto import operations as op
from ...proto.errors import InvalidRequest, MagnetarError, Unavailable
from ...proto.statistics import (
    GrantedLimit,
    SharedLimit,
    SharesAnswer,
    StoredBundleBytes,
    WantedLimit,
)
from ...runtime.network import Channel, Endpoint, find_rpc
from ..cluster.shares_core import (
    BROKERS_READ_S,
    IDLE_REPORT_INTERVAL_S,
    LIMITS_PER_REPORT_MAX,
    REPORT_INTERVAL_S,
    SHRINK_AFTER_S,
    GrantedShare,
    HeldShares,
    LimitUse,
    ShareGrants,
    ShareReport,
    WantedShare,
)
from ..cluster.stored_core import PlaceBytes, StoredReport, StoredSums
from ..common.retry import LogThrottle
from ..node.topic_manager import TopicManager
from ..topic.statistics import SharedRate
from .storing import StorageMeter, answer_own_report, answer_stored_bytes, describe_storage_limits

_LOG = logging.getLogger("magnetar.broker")

REPORT_TIMEOUT_S = 1.0
"""Seconds to wait for the leader's answer: as long as between two reports."""
FIRST_READ_AGAIN_S = 0.2
"""Seconds until a broker that has just started tries again to find out how many brokers there are."""
LEADER_READ_S = 10.0
"""Seconds for which a broker believes that the leader is the same; after a failed call it reads the record again."""
WAITING_SHARE = 0.8
"""A limit for which something waited is used up if so much of the share was used: else what waited did so for the other
limit, of messages or of bytes."""


class MeasuredLimit(NamedTuple):
    """One limit of a SharedRate, in messages or in bytes: its text, its value, and its number in the rate's pairs."""

    name: str
    limit: int
    number: int


def list_limits(rate: SharedRate) -> Iterator[MeasuredLimit]:
    """Yields the limits of the rate that are set."""
    for number, (name, limit) in enumerate(zip(rate.names, rate.limits, strict=True)):
        if limit:
            yield MeasuredLimit(name, limit, number)


def grant_limits(broker: TopicManager, report: ShareReport) -> dict[str, GrantedShare]:
    """Returns what the leader grants for a report. Raises Unavailable if this broker is not the leader, or has answered
    a later report of the same broker; InvalidRequest if the report has too many limits, or names no broker."""
    grants = broker.sharing.grants
    if grants is None:
        raise Unavailable("this broker does not divide limits; read again which one does")
    if not report.broker or len(report.limits) > LIMITS_PER_REPORT_MAX:
        raise InvalidRequest(f"a report names a broker and at most {LIMITS_PER_REPORT_MAX} limits")
    granted = grants.grant_shares(report, broker.world.clock.monotonic())
    if granted is None:
        raise Unavailable("a later report of this broker was answered before")
    return granted


def answer_report(
    broker: TopicManager, name: str, run: str, number: int, limits: Sequence[WantedLimit],
    stored: Sequence[StoredBundleBytes] = (), places: Sequence[str] = (),
) -> SharesAnswer:  # fmt: skip
    """Returns the leader's answer to another broker's report. Raises the errors of `grant_limits` and
    `answer_stored_bytes`."""
    wanted = {each.limit: WantedShare(each.wanted, each.held) for each in limits}
    granted = grant_limits(broker, ShareReport(name, run, number, wanted))
    shares = tuple(GrantedLimit(limit, *each) for limit, each in granted.items())
    return SharesAnswer(shares, tuple(answer_stored_bytes(broker, stored, places) if stored or places else ()))


# -------------------------------------------------------------------------------------------------------- status


def describe_shared_limits(broker: TopicManager) -> tuple[SharedLimit, ...]:
    """Returns the limits in sum over brokers that bound topics of this broker, sorted by place and policy."""
    now, found = broker.world.clock.monotonic(), list[SharedLimit]()
    for rates in broker.shared_rates:
        for rate in (rates.publish, rates.dispatch):
            found += (_describe(broker, rate, each, now) for each in list_limits(rate))
    found += describe_storage_limits(broker)
    return tuple(sorted(found, key=lambda each: (each.place, each.policy)))


def _describe(broker: TopicManager, rate: SharedRate, measured: MeasuredLimit, now: float) -> SharedLimit:
    held, use = broker.sharing.held, broker.sharing.uses.get(measured.name)
    granted = held.get_granted(measured.name)
    return SharedLimit(
        rate.place, rate.policies[measured.number], measured.limit, broker.name, held.get_share(measured.name, now),
        0.0 if use is None else use.used, 0.0 if granted is None else granted.wanted,
        0 if granted is None else granted.brokers, rate.rate.throttled, explain_share(held, measured.name, now),
    )  # fmt: skip


def explain_share(held: HeldShares, limit: str, now: float) -> str:
    """Returns a sentence that says why a broker has its share of the limit."""
    silent_s, granted = held.seconds_without_answer(now), held.get_granted(limit)
    if held.brokers == 1:
        return "this is the only broker, and has the whole limit"
    if silent_s >= SHRINK_AFTER_S:
        since = "none has divided limits yet" if silent_s > 1e9 else f"no answer of the leader for {silent_s:.0f} s"
        return f"{since}: each of {held.brokers} brokers has an equal part at most"
    if granted is None:
        return "this broker has asked for nothing: it uses little of the limit, or began a moment ago"
    if granted.wanted > 1:
        return f"{granted.brokers} brokers want {granted.wanted:.2g} times the limit together: it is divided fairly"
    return f"all {granted.brokers} brokers that use the limit have what they want"


# -------------------------------------------------------------------------------------------------------- driver


class LimitSharer:
    """Measures what this broker uses of limits in sum over brokers, reports it, and sets the rates to its shares."""

    def __init__(self, broker: TopicManager) -> None:
        self._broker = broker
        self._state = broker.sharing
        self.storage = StorageMeter(broker)
        self._clock = broker.world.clock
        self._measured_s = self._clock.monotonic()
        self._brokers_read_s = float("-inf")
        self._leader: BalancerRecord | None = None
        self._leader_read_s = float("-inf")
        self._channel: Channel | None = None
        self._channel_to = ""
        self._throttle = LogThrottle(self._clock)

    async def run(self) -> None:
        """Measures and reports until the task is cancelled. Errors are logged."""
        try:
            while True:
                try:
                    await self.exchange()
                except (MagnetarError, TimeoutError) as error:
                    self._state.failed += 1
                    self._leader_read_s = float("-inf")
                    if self._throttle.should_log(error):
                        _LOG.info("limits in sum over brokers: an equal part is used, as far as granted: %s", error)
                await asyncio.sleep(self._choose_pause_s())
        finally:
            self._state.grants = self._state.sums = None
            await self.storage.close()
            await self._close_channel()

    def _choose_pause_s(self) -> float:
        if not self._state.held.brokers:
            return FIRST_READ_AGAIN_S
        return REPORT_INTERVAL_S if self._is_limited else IDLE_REPORT_INTERVAL_S

    @property
    def _is_limited(self) -> bool:
        return bool(self._broker.shared_rates or self._state.stored.limits)

    async def exchange(self) -> None:
        """Measures, reports once, sets the rates and tells topics what is reached, also if the report fails; without
        metadata it goes on with the leader and the list of brokers that it knows. Raises the errors of the metadata and
        of the call; TimeoutError if there is no answer in REPORT_TIMEOUT_S."""
        self._measure()
        try:
            try:
                await self.storage.measure()
            except (MagnetarError, TimeoutError) as error:
                _LOG.debug("the limits of stored bytes stay as they were: %r", error)
            try:
                async with asyncio.timeout(REPORT_TIMEOUT_S):
                    await self._read_brokers()
            except (MagnetarError, TimeoutError) as error:
                _LOG.debug("the brokers are not listed: %r", error)
            self.storage.begin_reading()
            async with asyncio.timeout(2 * REPORT_TIMEOUT_S):
                await self._report()
        finally:
            now = self._clock.monotonic()
            for rates in self._broker.shared_rates:
                rates.publish.update_share(now)
                rates.dispatch.update_share(now)
            await self.storage.decide()

    def _measure(self) -> None:
        now = self._clock.monotonic()
        took_s, self._measured_s = max(now - self._measured_s, 1e-3), now
        uses = dict[str, LimitUse]()
        for rates in self._broker.shared_rates:
            for rate in (rates.publish, rates.dispatch):
                uses.update((each.name, self._measure_limit(rate, each, took_s, now)) for each in list_limits(rate))
        self._state.uses = uses
        self._state.held.keep_limits(uses.keys())

    def _measure_limit(self, rate: SharedRate, measured: MeasuredLimit, took_s: float, now: float) -> LimitUse:
        spent, throttled = rate.rate.count_spent()[measured.number], rate.rate.throttled
        before = self._state.uses.get(measured.name, LimitUse(0.0, 0, 0.0))
        used = max(0.0, spent - before.spent) / took_s / measured.limit
        held = self._state.held
        used_up = (
            rate.rate.available_tokens(now)[measured.number] <= 0
            or used >= WAITING_SHARE * held.get_share(measured.name, now)
        )  # fmt: skip
        held.note_use(measured.name, used, throttled > before.throttled and used_up)
        return LimitUse(spent, throttled, used)

    async def _read_brokers(self) -> None:
        """Reads the list of brokers if it is old, and takes or gives up the part of the leader."""
        broker, state, now = self._broker, self._state, self._clock.monotonic()
        if not broker.balancing.leads:
            state.grants = None
            state.sums = state.sums if state.held.brokers == 1 else None
        counts = self._is_limited or broker.balancing.leads
        if now - self._brokers_read_s < (BROKERS_READ_S if counts else LEADER_READ_S) or not broker.has_session:
            return
        names = {paths.decode_segment(each) for each in await broker.metadata.children(paths.BROKERS)} | {broker.name}
        self._brokers_read_s, state.held.brokers = now, len(names)
        if broker.balancing.leads or len(names) == 1:
            state.sums = state.sums or StoredSums()
        if broker.balancing.leads:
            state.grants = state.grants or ShareGrants(now)
            state.grants.set_registered(names, now)

    async def _report(self) -> None:
        held, state, now = self._state.held, self._state, self._clock.monotonic()
        if held.brokers <= 1:
            if state.sums is not None:
                alone = state.stored.make_report(now)
                state.stored.on_answered(alone, answer_own_report(state.sums, alone, now), now)
            return
        if state.grants is not None and state.sums is not None:
            report, stored = held.make_report(now), state.stored.make_report(now)
            held.on_granted(report, grant_limits(self._broker, report))
            state.stored.on_answered(stored, answer_own_report(state.sums, stored, now), now)
        else:
            leader = await self._find_leader()
            if leader is None:
                held.begin_without_leader()
                return
            now = self._clock.monotonic()
            report, stored = held.make_report(now), state.stored.make_report(now)
            answer = await self._ask(leader, report, stored)
            held.on_granted(
                report, {each.limit: GrantedShare(each.share, each.wanted, each.brokers) for each in answer.shares}
            )
            sums = {each.place: PlaceBytes(each.bytes, each.complete) for each in answer.stored}
            state.stored.on_answered(stored, sums, now)
        state.answered += 1

    async def _find_leader(self) -> BalancerRecord | None:
        now = self._clock.monotonic()
        if self._leader is None or now - self._leader_read_s > LEADER_READ_S:
            try:
                async with asyncio.timeout(REPORT_TIMEOUT_S):
                    found = await get_readable_record(self._broker.metadata, paths.BALANCER, BalancerRecord)
            except (MagnetarError, TimeoutError):
                if self._leader is None:
                    raise
            else:
                self._leader, self._leader_read_s = None if found is None else found[0], now
        leader = self._leader
        return None if leader is None or leader.broker == self._broker.name else leader

    async def _ask(self, leader: BalancerRecord, report: ShareReport, stored: StoredReport) -> SharesAnswer:
        await self._broker.world.workers.load(f"{__package__}.administration")  # a broker alone needs none of it
        from .administration import make_operation_request, parse_operation_reply

        request = make_operation_request(
            op.SHARE_LIMITS,
            {
                "broker": report.broker, "run": report.run, "number": report.number,
                "limits": [WantedLimit(limit, *each) for limit, each in report.limits.items()],
                "stored": [StoredBundleBytes(*bundle, size) for bundle, size in stored.bundles.items()],
                "places": stored.places,
            },
        )  # fmt: skip
        try:
            if self._channel is None or self._channel_to != leader.endpoint:
                await self._close_channel()
                self._channel = self._broker.world.network.connect(Endpoint.parse(leader.endpoint))
                self._channel_to = leader.endpoint
            async with asyncio.timeout(REPORT_TIMEOUT_S):
                target = find_rpc(op.SHARE_LIMITS.service, op.SHARE_LIMITS.name)
                reply = await self._channel.call(target, request, timeout_s=REPORT_TIMEOUT_S)
        except ValueError as error:  # its record has no valid address
            raise Unavailable(f"the leader's address is not valid: {error}") from error
        except BaseException:
            await self._close_channel()
            raise
        return parse_operation_reply(op.SHARE_LIMITS, reply)

    async def _close_channel(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()
