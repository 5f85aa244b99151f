"""Requests and replies over topics: `Client.request`, which waits for the reply to a message, and `Client.serve`, whose
handler makes the replies.

    server = await client.serve("prices", quote)              quote(message) -> bytes, on a Shared subscription
    reply = await client.request("prices", b"ACME", 2.0)      the Message that quote's bytes became

| property of a request | |
|---|---|
| `reply_to` | the non-persistent topic to which the reply goes: one for each client and namespace |
| `correlation_id` | of this request; the reply has the same |
| `deadline` | ms since the epoch, by the requester's clock: the handler does not begin later |

A reply has the property `error`, the class of an exception, and `error_message`, its text, if the handler raised it.

**Not durable.** A request is at least once in its topic, but a reply is stored nowhere. If the requester, the server or
the broker of the reply topic fails in between, the requester gets Timeout, and does not know whether the handler ran. A
request that needs its answer after a crash needs two topics. **Deadline.** The broker delivers no request past its
deadline (proto/expiry.py), and a server does not begin one. A reply that comes after its requester gave up (a time-out,
a cancelled call) is dropped and counted (`late_replies`); if its client is closed, the broker drops it. **Order at the
server.** It opens the producer of the reply topic; runs the handler; sends the reply; acknowledges the request. So a
request whose server dies is handled by another one, perhaps a second time. If the reply topic cannot be reached, the
server tries again for REPLY_TOPIC_WAIT_S, or until the deadline. If its role may not produce there, the handler does
not run: the error is logged, and the request is negatively acknowledged, for another server. **Whom a server answers.**
The requester chooses `reply_to`, so it must be a reply topic of the request's namespace. Otherwise the request is
acknowledged and counted (`malformed`): no requester makes a server write elsewhere. Guards:
tests/client/consume/test_requests.py."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...proto.errors import MagnetarError
from ...proto.expiry import EXPIRES_AT_PROPERTY
from ...proto.names import TopicName, parse_number
from ...runtime.network import World
from ...runtime.tasks import Tasks
from ..common.checks import WrongMessageType, shorten_value
from ..common.errors import AuthorizationError, MessageTooBig, PulsarException, Timeout, translate_error
from ..common.loggers import is_cancelled, log_foreign_error
from ..model.message import Message
from ..produce.producer import Producer
from .consumer import Consumer
from .dead_letters import describe_error
from .listening import ListenerStatistics, Listening, ListenOptions

_LOG = logging.getLogger("magnetar.client")

REPLY_TO_PROPERTY, CORRELATION_ID_PROPERTY, DEADLINE_PROPERTY = "reply_to", "correlation_id", "deadline"
ERROR_PROPERTY, ERROR_MESSAGE_PROPERTY = "error", "error_message"
REPLY_TOPIC_PREFIX = "reply-"
"""With this the local name of a reply topic begins."""
REPLY_TOPIC_WAIT_S = 5.0
"""Seconds for which a server tries to reach a reply topic: a client needs that long to find its topic's new broker."""
REPLY_RETRY_S = 0.2
"""Seconds between two of these attempts."""
REPLY_TOPICS_MAX = 1000
"""Reply topics of which a server keeps a producer; that which is used least recently is closed."""

OpenTopic = Callable[[TopicName], Coroutine[Any, Any, Any]]


class RequestFailed(PulsarException):
    """Raised by `Client.request` when the handler raised an exception. `error_class` is the name of its class, and
    `error_message` its text."""

    def __init__(self, message: str = "", error_class: str = "", error_message: str = "") -> None:
        super().__init__(message)
        self.error_class, self.error_message = error_class, error_message


# ----------------------------------------------------------------------------------------------------- requester
class ReplyReceiver:
    """Receives the replies of a client in one namespace through `consumer`, and passes them to the requests that wait.
    `late`: how many replies came for which no request waited."""

    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer
        self.late = 0
        self._waiting: dict[str, asyncio.Future[Message]] = {}
        self._tasks = Tasks()
        self._error: PulsarException | None = None
        self._tasks.spawn(self._follow(), f"replies of {consumer.topic()}")

    @property
    def is_over(self) -> bool:
        """Returns whether the consumer has ended: no reply is received any more."""
        return self._error is not None

    async def wait_connected(self) -> None:
        """Waits until the broker of the reply topic has the subscription, or the consumer has ended (`is_over`); raises
        nothing then. Replies that are sent before are lost."""
        while not self.is_over and not self.consumer.is_connected():
            await self.consumer.partitions[0].requests.wait_state_changed()

    def expect_reply(self, correlation_id: str) -> asyncio.Future[Message]:
        """Returns a future of the reply with this id; it gets the message, RequestFailed, or the error that ends the
        consumer. Raises that error if the consumer has ended. The caller must call `discard_reply` in the end."""
        if self._error is not None:
            raise self._error
        found = self._waiting[correlation_id] = asyncio.get_running_loop().create_future()
        return found

    def discard_reply(self, correlation_id: str) -> None:
        """Fact: no caller waits for the reply with this id any more. Its future is cancelled."""
        waiting = self._waiting.pop(correlation_id, None)
        if waiting is not None and not waiting.cancel():
            waiting.exception()  # was looked at

    async def _follow(self) -> None:
        """Takes replies until the consumer ends; then all that wait get its error."""
        error: PulsarException = PulsarException("the client does not receive replies any more")
        try:
            while True:
                try:
                    message = await self.consumer.receive()
                    self._on_reply(message)
                    self.consumer.acknowledge_soon(message)
                except PulsarException as failed:
                    if self.consumer.inbox.is_closed:
                        error = failed
                        return
                    _LOG.warning("%s: a reply is not read: %s", self.consumer.topic(), failed)
        except Exception as failed:
            error = translate_error(failed)
            raise
        finally:
            self._error = error
            for each in self._waiting.values():
                if not each.done():
                    each.set_exception(type(error)(error.message))

    def _on_reply(self, message: Message) -> None:
        properties = message.properties()
        waiting = self._waiting.get(properties.get(CORRELATION_ID_PROPERTY, ""))
        if waiting is None or waiting.done():
            self.late += 1
        elif ERROR_PROPERTY in properties:
            name, text = properties[ERROR_PROPERTY], properties.get(ERROR_MESSAGE_PROPERTY, "")
            waiting.set_exception(RequestFailed(f"the handler raised {name}: {text}", name, text))
        else:
            waiting.set_result(message)


class Requester:
    """Sends the requests of one client, and waits for their replies. Opens one consumer of replies per namespace, and
    one producer per topic, when they are first needed."""

    def __init__(self, world: World, open_consumer: OpenTopic, open_producer: OpenTopic) -> None:
        """Makes the requester. `open_consumer(topic)` and `open_producer(topic)` open a consumer or a producer, which
        the client closes when it is closed."""
        self._world = world
        self._open_consumer, self._open_producer = open_consumer, open_producer
        self._producers: dict[TopicName, Producer] = {}
        self._replies: dict[str, ReplyReceiver] = {}  # by namespace
        self._opening: defaultdict[TopicName | str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def late_replies(self) -> int:
        """Returns how many replies came for which no caller waited any more."""
        return sum(each.late for each in self._replies.values())

    async def request(
        self, topic: TopicName, payload: bytes, timeout_s: float, properties: dict[str, str] | None, key: str | None
    ) -> Message:
        """Sends a request, waits for its reply and returns it. Raises Timeout if none comes within `timeout_s` seconds
        (the request may have been handled), RequestFailed if the handler raised, or the error with which the producer
        of the request or the consumer of the replies fails."""
        deadline_ms = str(self._world.clock.wall_ms() + round(timeout_s * 1000))
        id_ = self._world.rng.randbytes(8).hex()
        try:
            async with asyncio.timeout(timeout_s):
                replies, producer = await self._open(topic)
                reply = replies.expect_reply(id_)
                try:
                    named = {
                        REPLY_TO_PROPERTY: replies.consumer.topic(),
                        CORRELATION_ID_PROPERTY: id_,
                        DEADLINE_PROPERTY: deadline_ms,
                    }
                    await producer.send(payload, {**(properties or {}), **named, EXPIRES_AT_PROPERTY: deadline_ms}, key)
                    return await reply
                finally:
                    replies.discard_reply(id_)
        except PulsarException:
            raise
        except TimeoutError:
            text = f"no reply of {topic} within {timeout_s:g} s: no server may be there, or the request may be handled"
            raise Timeout(text) from None

    async def _open(self, topic: TopicName) -> tuple[ReplyReceiver, Producer]:
        return await self._open_replies(str(topic.namespace_name)), await self._open_topic(topic)

    async def _open_replies(self, namespace: str) -> ReplyReceiver:
        async with self._opening[namespace]:
            if (replies := self._replies.get(namespace)) is not None:
                await replies.wait_connected()
            if replies is None or replies.is_over:
                name = f"{REPLY_TOPIC_PREFIX}{self._world.rng.randbytes(16).hex()}"
                late = replies.late if replies is not None else 0
                replies = ReplyReceiver(await self._open_consumer(TopicName.parse(f"non-persistent://{namespace}/{name}")))
                replies.late = late
                self._replies[namespace] = replies
            return replies

    async def _open_topic(self, topic: TopicName) -> Producer:
        """Returns the producer of a topic. A topic that is away holds up no requests of others."""
        async with self._opening[topic]:
            producer = self._producers.get(topic)
            if producer is None or producer.is_over:
                producer = self._producers[topic] = await self._open_producer(topic)
            return producer


# -------------------------------------------------------------------------------------------------------- server
class ReceivedRequest(NamedTuple):
    """The properties of a request: the topic to which the reply goes (`reply_to`), the id that the reply must have
    (`correlation_id`), and the time until which the handler may begin, in ms since the epoch (`deadline_ms`)."""

    reply_to: TopicName
    correlation_id: str
    deadline_ms: int

    @classmethod
    def parse(cls, properties: dict[str, str], topic: TopicName) -> ReceivedRequest | None:
        """Returns the ReceivedRequest that the properties of a message of `topic` describe. Returns None if they are
        not those of a request, or the reply topic is not in the namespace of `topic`."""
        id_, deadline = properties.get(CORRELATION_ID_PROPERTY), parse_number(properties.get(DEADLINE_PROPERTY, ""))
        try:
            reply_to = TopicName.parse(properties.get(REPLY_TO_PROPERTY, ""))
        except MagnetarError:
            return None
        known = not reply_to.persistent and reply_to.local.startswith(REPLY_TOPIC_PREFIX) and reply_to.partition < 0
        if not known or reply_to.namespace_name != topic.namespace_name or not id_ or deadline is None:
            return None
        return cls(reply_to, id_, deadline)


@dataclass(slots=True)
class RequestServerStatistics(ListenerStatistics):
    """The counters of a server of requests: those of its listener, and what became of the requests."""

    answered: int = 0  # requests whose reply was sent
    raised: int = 0  # … of these: with the error of the handler
    expired: int = 0  # requests that were not handled: their deadline had passed
    unanswered: int = 0  # requests whose reply topic could not be reached
    malformed: int = 0  # messages that are no requests of their namespace


class _ReplyProducer:
    """The producer of one reply topic, if it is open."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.producer: Producer | None = None


class RequestServer(Listening):
    """A running server of requests, which `Client.serve` returns. `stop`, or the end of an `async with` block, ends it
    and closes its consumer."""

    _counted: RequestServerStatistics

    def __init__(
        self, consumer: Consumer, handler: Callable[[Message], Any], options: ListenOptions, open_producer: OpenTopic
    ) -> None:
        super().__init__(consumer, handler, options)
        self._counted = RequestServerStatistics()
        self._open_producer = open_producer
        self._producers: OrderedDict[TopicName, _ReplyProducer] = OrderedDict()
        self._leaving = Tasks()

    def statistics(self) -> RequestServerStatistics:
        """Returns the counters since the server began, with the numbers of running handlers and waiting messages now.
        Each call returns the same object."""
        super().statistics()
        return self._counted

    # ------------------------------------------------------------------------------ one request
    async def _call(self, argument: Message, span: Any) -> None:
        """Answers one request. What this raises gives the request back."""
        consumer: Any = argument.entry.consumer
        request = ReceivedRequest.parse(argument.properties(), consumer.topic)
        if request is None:
            self._counted.malformed += 1
            _LOG.warning("%s: %r is no request of this namespace", self._consumer.title(), argument)
            return
        if self._is_late(request):
            self._counted.expired += 1
            return
        if not await self._reach(request, None, {}):  # no work for what cannot be answered
            return
        await self._answer(request, *await self._handle_request(argument, span))

    async def _handle_request(self, message: Message, span: Any) -> tuple[bytes, dict[str, str]]:
        """Calls the handler. Returns the payload of the reply and its properties."""
        try:
            found = await super()._call(message, span)
            if found is not None and not isinstance(found, bytes):
                raise WrongMessageType(f"a handler returns bytes or None, not {shorten_value(found)}")
            return found or b"", {}
        except BaseException as error:
            if is_cancelled(error) or isinstance(error, GeneratorExit):
                raise
            log_foreign_error(error, f"{self._consumer.title()}: the handler of {message!r}")
            return b"", self._tell(error)

    def _tell(self, error: BaseException) -> dict[str, str]:
        self._counted.raised += 1
        failure = describe_error(error, "", traceback=False)
        return {ERROR_PROPERTY: failure.error, ERROR_MESSAGE_PROPERTY: failure.message}

    async def _answer(self, request: ReceivedRequest, payload: bytes, properties: dict[str, str]) -> None:
        try:
            sent = await self._reach(request, payload, properties)
        except MessageTooBig as error:  # a non-persistent topic takes no chunks
            log_foreign_error(error, f"{self._consumer.title()}: a reply")
            sent = await self._reach(request, b"", self._tell(error))
        self._counted.answered += sent

    # ------------------------------------------------------------------------------ the reply topic
    async def _reach(self, request: ReceivedRequest, payload: bytes | None, properties: dict[str, str]) -> bool:
        """Opens the producer of the reply topic and sends the reply, if there is a payload. Tries again while the topic
        is away. Returns False if it stays away. Raises AuthorizationError if the role of this
        server may not produce there, MessageTooBig if the payload is."""
        give_up_at = self._now() + REPLY_TOPIC_WAIT_S
        while True:
            try:
                producer = await self._find_producer(request.reply_to)
                if payload is not None:
                    await producer.send(payload, {**properties, CORRELATION_ID_PROPERTY: request.correlation_id})
                return True
            except MessageTooBig:
                raise
            except AuthorizationError as error:
                raise AuthorizationError(
                    f"this server may not produce to the reply topic {request.reply_to}: grant its role the right to"
                    f" produce in the namespace {request.reply_to.namespace_name} ({error.message})"
                ) from error
            except MagnetarError as error:
                if self._now() >= give_up_at or self._is_late(request):
                    self._counted.unanswered += 1
                    _LOG.warning("%s: %s is not reached: %s", self._consumer.title(), request.reply_to, error)
                    return False
            await asyncio.sleep(REPLY_RETRY_S)

    def _is_late(self, request: ReceivedRequest) -> bool:
        return request.deadline_ms <= self._world.clock.wall_ms()

    async def _find_producer(self, topic: TopicName) -> Producer:
        found = self._producers.setdefault(topic, _ReplyProducer())
        self._producers.move_to_end(topic)
        while len(self._producers) > REPLY_TOPICS_MAX:
            _, oldest = self._producers.popitem(last=False)
            if oldest.producer is not None:
                self._leaving.spawn(_close(oldest.producer), "end of a producer of replies")
        async with found.turn:
            if found.producer is None or found.producer.is_over:
                found.producer = await self._open_producer(topic)
            return found.producer

    # ------------------------------------------------------------------------------ the end
    async def stop(self, timeout: float | None = None) -> None:
        """Stops the server: no further handler is called, and requests that wait go to other servers. Running handlers
        have `timeout` seconds (None: `stop_timeout`) to end. Then closes the consumer and the producers of replies.
        Raises InvalidConfiguration for a wrong `timeout`."""
        await super().stop(timeout)
        if self._consumer.is_closing:
            return  # it calls this method
        producers, self._producers = self._producers, OrderedDict()
        await asyncio.gather(*(_close(each.producer) for each in producers.values() if each.producer is not None))
        await self._leaving.drain()
        await self._consumer.close()


async def _close(producer: Producer) -> None:
    try:
        await producer.close()
    except PulsarException as error:
        _LOG.info("%s did not end in order: %s", producer.title(), error)
