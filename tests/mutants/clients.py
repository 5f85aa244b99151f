"""Defects of the SDK: where messages wait, what it tells of unknown outcomes, and what it leaves open."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from magnetar.client import pull_group
from magnetar.client.blocking import client as blocking
from magnetar.client.blocking import loop_thread as blocking_handle
from magnetar.client.connect.attachment import Attachment
from magnetar.client.consume import assignment_core, listening
from magnetar.client.consume.assignment_core import GroupEffect, GroupMember, GroupView
from magnetar.client.consume.consumer import Consumer
from magnetar.client.consume.partition_consumer import PartitionConsumer
from magnetar.client.consume.receiver_queue import ReceiverQueue
from magnetar.client.core.consumer import ConsumerCore
from magnetar.client.core.effects import ConsumerEffect, EndFlushes, ProducerEffect
from magnetar.client.core.producer import ProducerCore
from magnetar.client.core.redelivery import NackTracker
from magnetar.client.core.transaction import TransactionCore
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import MagnetarError
from tests.mutants.ledgers import Stack, put


def wake_up_dies_with_its_waiter(stack: Stack) -> None:
    """M41: a receive that is cancelled after it was woken keeps the wake-up call of another."""

    async def woken(self: ReceiverQueue) -> None:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def wake() -> None:
            if not ready.done():
                ready.set_result(None)

        self._waiting.append(wake)
        try:
            await ready
        finally:
            self._remove_waiting(wake)

    put(stack, ReceiverQueue, "_woken", woken)


def refusal_of_one_settles_its_namesakes(stack: Stack) -> None:
    """M42: a refusal is told to every message under way of that sequence id, also to one that was not judged yet."""
    honest = ProducerCore.on_refused

    def failed(self: ProducerCore, sequence_id: int, error: MagnetarError, now: float) -> list[ProducerEffect]:
        effects = honest(self, sequence_id, error, now)
        while self._entries.sent and self._entries.sent[0].sequence_id == sequence_id:
            self._settle(self._entries.sent.popleft(), error, effects)
        return effects

    put(stack, ProducerCore, "on_refused", failed)


def sent_after_the_commit(stack: Stack) -> None:
    """M43b: a producer goes on adding to a transaction whose commit waits for its operations."""

    def close_shares(self: TransactionCore) -> None:
        self._begun += sum(each.sent_messages for each in self._shares)

    put(stack, TransactionCore, "_close_shares", close_shares)


def dropped_and_not_closed(stack: Stack) -> None:
    """M43: a handle that is dropped without close goes on taking messages, which no program receives (ours)."""

    def close_soon(*_: Any) -> None:
        pass

    put(stack, blocking_handle, "close_soon", close_soon)
    put(stack, blocking, "close_soon", close_soon)


def given_back_survives_a_seek(stack: Stack) -> None:
    """M89: what was given back before a seek is asked for again after it, while the application has it."""
    honest = ConsumerCore._arrive

    def arrive(self: ConsumerCore, to: Any, effects: list[ConsumerEffect]) -> None:
        kept, self._nacks = self._nacks, NackTracker()
        honest(self, to, effects)
        self._nacks = kept

    put(stack, ConsumerCore, "_arrive", arrive)


def closed_twice_opens_twice(stack: Stack) -> None:
    """M89b: a consumer whose id is closed twice in one read opens twice, and ends when the second one fails."""
    honest = Attachment.reopen

    def on_frames(self: PartitionConsumer, frames: Sequence[wire.ServerFrame]) -> None:
        left = iter(frames)
        while (rare := self.deliveries.split_deliveries(left)) is not None:
            self._put()
            self._rare(rare.WhichOneof("kind"), rare)
        self._put()

    def reopen(self: Attachment, after_s: float) -> None:
        self._pause = None
        honest(self, after_s)

    put(stack, PartitionConsumer, "on_frames", on_frames)
    put(stack, Attachment, "reopen", reopen)


def last_acks_wait_for_the_next_owner(stack: Stack) -> None:
    """M39c: a consumer whose topic moves keeps what it has not sent, and tells it to the next owner alone."""
    put(stack, ConsumerCore, "send_last_acks", lambda self: [])


def handled_while_it_is_handled(stack: Stack) -> None:
    """M89c: a message that comes again while its handler runs, or while it waits for it, is handled a second time."""
    put(stack, listening, "identify_message", id)


def permits_before_the_handler(stack: Stack) -> None:
    """M89d: a listener gives the permit of a message back when it sorts it, and not when its handler begins."""
    put(stack, ReceiverQueue, "pop_nowait", ReceiverQueue.take_nowait)


def owners_are_asked_once(stack: Stack) -> None:
    """M98j: a member that has what an old view gave to it keeps a partition too many for ever."""
    put(stack, assignment_core, "OWNERS_REFRESH_VIEWS", 1 << 60)


def revoked_at_once(stack: Stack) -> None:
    """M98k: a view that lacks a member, as it connects again, moves its partitions to others and back."""

    def view(self: GroupMember, view: GroupView) -> list[GroupEffect]:
        self._leaving = self.owned
        return honest(self, view)

    honest = GroupMember.on_group_view
    put(stack, GroupMember, "on_group_view", view)


def interrupted_and_still_owner(stack: Stack) -> None:
    """M98l: a member that was cut off goes on as if no other one could have had its partition."""
    honest = pull_group._OwnedPartition.__init__

    def deaf(self: pull_group._OwnedPartition, lock: Consumer, wake: Callable[[], None]) -> None:
        honest(self, lock, wake)
        (partition,) = lock.partitions
        partition.on_connected = None

    put(stack, pull_group._OwnedPartition, "__init__", deaf)


def sent_is_done(stack: Stack) -> None:
    """M99v: a message with acks=none is forgotten when it is sent: no flush waits for it, and it is not sent again."""
    honest = ProducerCore._publish

    def publish(self: ProducerCore, effects: list[ProducerEffect]) -> None:
        honest(self, effects)
        if self._options.reports_when_sent:
            for batch in self._entries.sent:
                self.pending -= batch.message_count
                effects += [EndFlushes(batch.waiters)] if batch.waiters else []
            self._entries.sent.clear()

    put(stack, ProducerCore, "_publish", publish)


def first_copy_is_done(stack: Stack) -> None:
    """M99y: a message with acks=one is forgotten with its first copy: it is not sent again when its broker fails."""
    honest = ProducerCore.on_first_copy

    def first_copy(self: ProducerCore, sequence_id: int) -> list[ProducerEffect]:
        effects = honest(self, sequence_id)
        if effects:
            for batch in self._entries.sent:
                self.pending -= batch.message_count
                effects += [EndFlushes(batch.waiters)] if batch.waiters else []
            self._entries.sent.clear()
        return effects

    put(stack, ProducerCore, "on_first_copy", first_copy)
