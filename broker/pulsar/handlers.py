"""The producers, consumers and topic watchers of one connection, and the commands for them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING

from ...proto import pulsar_pb2 as pulsar
from ...proto.errors import InvalidRequest
from . import lookup, topic_lists
from .consumer import ConsumerHandler
from .producer import ProducerHandler

if TYPE_CHECKING:
    from .connection import PulsarConnection

Command = pulsar.BaseCommand
Take = Callable[[Command, memoryview], Iterator[None] | None]


class HandlerTable:
    """The handlers of a connection, by the ids that the client assigns. `command_handlers`: the function that handles a
    command, by the type of the command."""

    def __init__(self, connection: PulsarConnection) -> None:
        self._connection = connection
        self.producers: dict[int, ProducerHandler] = {}
        self.consumers: dict[int, ConsumerHandler] = {}
        self._lists = topic_lists.TopicWatchers(connection)
        self.command_handlers: dict[int, Take] = {
            Command.SEND: self._send, Command.FLOW: self._flow, Command.ACK: self._ack,
            Command.REDELIVER_UNACKNOWLEDGED_MESSAGES: self._redeliver, Command.PRODUCER: self._open_producer,
            Command.SUBSCRIBE: self._subscribe, Command.CLOSE_PRODUCER: self._close_producer,
            Command.CLOSE_CONSUMER: self._close_consumer, Command.UNSUBSCRIBE: self._of_consumer,
            Command.SEEK: self._of_consumer, Command.GET_LAST_MESSAGE_ID: self._of_consumer,
            Command.CONSUMER_STATS: self._of_consumer,
            Command.WATCH_TOPIC_LIST: lambda command, rest: self._lists.start_watch(command.watch_topic_list),
            Command.WATCH_TOPIC_LIST_CLOSE: lambda command,
            rest: self._lists.stop_watch(command.watch_topic_list_close),
        }  # fmt: skip

    def list_handlers(self) -> list[ProducerHandler | ConsumerHandler]:
        return [*self.producers.values(), *self.consumers.values()]

    def take_closings(self) -> list[Awaitable[object]]:
        """Removes all handlers and returns awaitables that end them."""
        every = self.list_handlers()
        self.producers.clear()
        self.consumers.clear()
        return [self._lists.close(), *[handler.leave() for handler in every]]

    # ------------------------------------------------------------------ producers
    def _open_producer(self, command: Command, rest: memoryview) -> None:
        asked = command.producer
        known = self.producers.get(asked.producer_id)
        if known is not None and (not known.is_open or known.epoch >= asked.epoch):
            known.answer_repeated_open(asked.request_id)
            return
        if known is not None:
            known.on_replaced()
        if self._has_ids(asked.request_id):
            handler = self.producers[asked.producer_id] = ProducerHandler(self._connection, asked)
            handler.start_opening()

    def _has_ids(self, request_id: int) -> bool:
        limit = self._connection.broker.config.connection_ids
        if len(self.producers) + len(self.consumers) < limit:
            return True
        text = f"a connection carries {limit} producers and consumers, and no more"
        self._connection.send_error(request_id, InvalidRequest(text))
        return False

    def _send(self, command: Command, rest: memoryview) -> None:
        handler = self.producers.get(command.send.producer_id)
        if handler is not None:
            handler.publish(command.send, rest)
        # else it was closed while this was on its way: the client sends it again to the next one

    def _close_producer(self, command: Command, rest: memoryview) -> None:
        asked = command.close_producer
        handler = self.producers.pop(asked.producer_id, None)
        if handler is None:
            self._connection.send_success(asked.request_id)
        else:
            self._connection.start_uncancelled_cleanup(handler.close(asked.request_id))

    def remove_producer(self, handler: ProducerHandler) -> None:
        if self.producers.get(handler.id) is handler:
            del self.producers[handler.id]

    # ------------------------------------------------------------------ consumers
    def _subscribe(self, command: Command, rest: memoryview) -> None:
        asked = command.subscribe
        known = self.consumers.get(asked.consumer_id)
        if known is not None and not known.has_sought:
            known.answer_repeated_open(asked.request_id)
        elif known is not None or self._has_ids(asked.request_id):
            handler = self.consumers[asked.consumer_id] = ConsumerHandler(self._connection, asked, known)
            handler.start_opening()

    def _flow(self, command: Command, rest: memoryview) -> None:
        handler = self.consumers.get(command.flow.consumer_id)
        if handler is not None:
            handler.add_permits(command.flow.messagePermits)

    def _ack(self, command: Command, rest: memoryview) -> Iterator[None] | None:
        handler = self.consumers.get(command.ack.consumer_id)
        return handler.ack(command.ack) if handler is not None else None

    def _redeliver(self, command: Command, rest: memoryview) -> Iterator[None] | None:
        asked = command.redeliver_unacknowledged_messages
        handler = self.consumers.get(asked.consumer_id)
        return handler.redeliver(asked) if handler is not None else None

    def _close_consumer(self, command: Command, rest: memoryview) -> None:
        asked = command.close_consumer
        handler = self.consumers.pop(asked.consumer_id, None)
        if handler is None:
            self._connection.send_success(asked.request_id)
        else:
            self._connection.start_uncancelled_cleanup(handler.close(asked.request_id))

    def _of_consumer(self, command: Command, rest: memoryview) -> None:
        asked = getattr(command, Command.Type.Name(command.type).lower())
        handler = self.consumers.get(asked.consumer_id)
        self._connection.start_request(lookup.answer_consumer_request(self._connection, command.type, asked, handler))

    def remove_consumer(self, handler: ConsumerHandler) -> None:
        if self.consumers.get(handler.id) is handler:
            del self.consumers[handler.id]
