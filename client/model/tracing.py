"""OpenTelemetry traces of a client: `Client(…, tracing=Tracing())`. Without this parameter the client does not use this
module. `Tracing` is a hook (client/model/hooks.py): the client calls it for each message.

| span | kind | from | to |
|---|---|---|---|
| `send TOPIC` | PRODUCER | `send`, `send_async`, … | the outcome of the message |
| `process TOPIC` | CONSUMER | the program receives the message | it is settled: acknowledged, given back, timed out |

**Context.** The properties of a message carry the context of its send span, as `traceparent` and `tracestate` (W3C), as
Pulsar's Java client writes it (PIP-446); `messaging.trace_parent`, of DotPulsar, is read too. Only a sampled context is
written. If the program has put a context into the properties, it stays, and the send span is of kind CLIENT and links
to it. The process span links to the context of its message and is no child of it: a message may be processed hours
later, several times, or together with others.
**What is traced.** A message that is sent while the current span is recorded; a received message that carries a sampled
context, or is received while the current span is recorded; with `every_message` all messages. At most `open_spans_max`
spans are open at once; further messages get no span and are counted (`statistics`), but carry the current context all
the same.
**Settled.** An acknowledgement ends one span, a cumulative acknowledgement the spans of all messages up to it. Neither
a negative acknowledgement nor a time-out is an error; `messaging.pulsar.acknowledgment.type` says which of them ended
the span, and the next delivery has a span of its own. When a consumer is closed, or its subscription's cursor is moved,
its spans end without this attribute.
**Copies** to a retry-letter or dead-letter topic are sent in a span of their own, whose context replaces that of the
original: the span is a child of the process span, or links to it if the program did not receive the message.
**Threads.** All methods may be called from any thread, also after a fork: there is no lock, each step is one operation
of a dict or deque. Guards: tests/client/model/test_tracing.py."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Any

from ...proto.names import TopicName
from ..common.checks import BOOLEAN_CHECK, INT32_MAX, check_parameter, make_methods_check, make_whole_number_check
from ..common.errors import OperationNotSupported, Result
from ..core.redelivery import EntrySets
from .hooks import ACKNOWLEDGE, CLOSED, CUMULATIVE, NEGATIVE, TIMEOUT, Hook, Sending, Settlement
from .message import Message, ReceivingConsumer
from .message_id import MessageId

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, SpanContext, SpanKind, TracerProvider

_LOG = logging.getLogger("magnetar.client")

OPEN_SPANS_MAX = 10_000
"""Most spans that are open at once, by default: each takes 2 KB in OpenTelemetry's SDK."""
TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
DOTPULSAR_TRACE_PROPERTIES = {"messaging.trace_parent": TRACEPARENT, "messaging.trace_state": TRACESTATE}
"""Property in which DotPulsar writes a part of the trace context → the W3C name of that part."""
MESSAGING_SYSTEM = "pulsar"
"""Value of the attribute `messaging.system`: OpenTelemetry's conventions have a name for Pulsar, which other clients of
the same topic use, too."""

_SETTLED = "messaging.pulsar.acknowledgment.type"
_SHOWN = frozenset((ACKNOWLEDGE, CUMULATIVE, NEGATIVE, TIMEOUT))
"""What that attribute says; what else ends a span is not said."""

_Key = tuple[int, int, float]
"""Ledger, entry and batch index of a message; batch index -1: the whole entry."""


class Tracing(Hook):
    """Records OpenTelemetry spans of what a client sends and receives: `Client(…, tracing=Tracing())`.

        tracing = magnetar.Tracing()
        with magnetar.Client("magnetar://localhost:7650", tracing=tracing) as client:
            …
            message = consumer.receive()
            with tracing.processing(message):       # what is done here belongs to its span
                handle(message)
                consumer.acknowledge(message)

    `tracer_provider` None: OpenTelemetry's global one. Sends are traced where the current span is recorded, received
    messages if they carry a sampled context; with `every_message` all are. At most `open_spans_max` spans are open at
    once; messages beyond that are not traced. docs/tracing.md has the spans and their cost. Several clients may share
    one object. Raises OperationNotSupported if OpenTelemetry is not installed (`pip install 'magnetar[otel]'`),
    InvalidConfiguration for a wrong parameter.
    """

    def __init__(
        self, tracer_provider: TracerProvider | None = None, *, every_message: bool = False,
        open_spans_max: int = OPEN_SPANS_MAX,
    ) -> None:  # fmt: skip
        check_parameter("tracer_provider", make_methods_check("get_tracer"), tracer_provider)
        check_parameter("every_message", BOOLEAN_CHECK, every_message)
        check_parameter("open_spans_max", make_whole_number_check(1, INT32_MAX), open_spans_max)
        try:
            from opentelemetry import context, trace
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ModuleNotFoundError as error:
            raise OperationNotSupported("tracing needs a package: pip install 'magnetar[otel]'") from error
        self._trace = trace
        self._no_context = context.Context()
        self._current = trace.get_current_span
        self._propagator = TraceContextTextMapPropagator()
        self._tracer = trace.get_tracer("magnetar", tracer_provider=tracer_provider)
        self._every = every_message
        self._room = deque(range(open_spans_max))  # an item for each span that may still be opened
        self._open_spans_max = open_spans_max
        self._not_traced = 0
        self._partitions: dict[ReceivingConsumer, ProcessSpans] = {}

    def statistics(self) -> dict[str, int]:
        """Returns counters. `open_spans`: the number of spans that are open now; `not_traced`: the number of messages
        that got no span since the beginning, because `open_spans_max` spans were open."""
        return {"open_spans": self._open_spans_max - len(self._room), "not_traced": self._not_traced}

    @contextmanager
    def processing(self, message: Message) -> Iterator[Span]:
        """Makes the process span of a received message the current span for a `with` block, and yields this span. An
        exception that leaves the block is recorded as the error of the span, and raised. For a message that is not
        traced, or is settled already, changes nothing and yields a span that records nothing."""
        spans = self._partitions.get(message.entry.consumer)
        span = None if spans is None else spans.find(message)
        if span is None:
            yield self._trace.INVALID_SPAN
            return
        try:
            with self._trace.use_span(span):
                yield span
        except BaseException as error:
            if span.is_recording():  # it is not settled
                span.set_attribute("error.type", type(error).__qualname__)
            raise

    def inject(self, properties: dict[str, str] | None = None) -> dict[str, str] | None:
        """Returns the properties with the current trace context added, if that context is sampled and the properties
        contain none; else returns the properties unchanged, None too. For messages that are sent later, as those of an
        outbox."""
        if not isinstance(properties, dict | None) or (properties and self._find_context(properties) is not None):
            return properties
        return self._with_context(self._current().get_span_context(), properties)

    # ------------------------------------------------------------------------------ hooks: sending
    def is_recording(self) -> bool:
        """Returns whether messages that are sent now are traced: the current span is recorded, or every message is
        traced."""
        return self._every or self._current().is_recording()

    def is_interested(self) -> bool:
        return self.is_recording()

    def before_send(self, sending: Sending) -> None:
        """Begins the send span of a message; none if too many are open or the sampler drops it. Writes the context of
        the span, else of the current span, into the properties if it is sampled. A context that they contain already
        stays, and the span is linked to it; that of a copy of a received message is replaced."""
        if sending.original is not None:
            self._before_copy(sending, sending.original)
            return
        known = self._find_context(sending.properties) if sending.properties else None
        kind = self._trace.SpanKind.PRODUCER if known is None else self._trace.SpanKind.CLIENT
        span = self._start("send", sending.topic, kind, known)
        if span is not None:
            sending.notes[self] = span
        if known is None:
            context = (self._current() if span is None else span).get_span_context()
            sending.properties = self._with_context(context, sending.properties) or {}

    def _before_copy(self, sending: Sending, original: Message) -> None:
        """Begins the span of a copy of a received message. Replaces the trace context in its properties by the context
        of the copy."""
        spans = self._partitions.get(original.entry.consumer)
        process = None if spans is None else spans.find(original)
        known = self._find_context(sending.properties)
        if process is None and not self._every and (known is None or not known.trace_flags.sampled):
            return
        parent = self._no_context
        if process is not None:
            parent, known = self._trace.set_span_in_context(process, parent), None
        span = self._start("send", sending.topic, self._trace.SpanKind.PRODUCER, known, parent)
        if span is None:
            return
        sending.notes[self] = span
        if span.get_span_context().trace_flags.sampled:
            for name in (TRACEPARENT, TRACESTATE, *DOTPULSAR_TRACE_PROPERTIES):
                sending.properties.pop(name, None)
            sending.properties.update(self._with_context(span.get_span_context(), None) or {})

    def sent(self, sending: Sending) -> None:
        """Ends the send span of a message."""
        span = sending.notes.pop(self, None)
        if span is None:
            return
        if sending.error is not None:
            self.fail(span, type(sending.error).__qualname__, str(sending.error))
        elif sending.result is not None and sending.result is not Result.Ok:
            self.fail(span, sending.result.name, sending.result.name)
        else:
            if (message_id := sending.message_id) is not None:
                span.set_attribute("messaging.message.id", str(message_id))
                if message_id.partition() >= 0:
                    span.set_attribute("messaging.destination.partition.id", str(message_id.partition()))
            self.end(span)

    # ------------------------------------------------------------------------------ hooks: receiving
    def before_deliver(self, message: Message) -> None:
        """Begins the process span of a message that the program receives now, if the message is traced."""
        known = self._find_context(message.properties()) if message.fields.properties else None
        if not ((known is not None and known.trace_flags.sampled) or self.is_recording()):
            return
        consumer = message.entry.consumer
        spans = self._partitions.get(consumer)
        if spans is None:
            spans = self._partitions.setdefault(consumer, ProcessSpans(self, consumer.topic, consumer.subscription))
        span = self._start("process", spans.topic, self._trace.SpanKind.CONSUMER, known)
        if span is not None:
            span.set_attributes({**spans.attributes, "messaging.message.id": str(message.message_id())})
            spans.add(message, span)

    def settled(self, settlement: Settlement) -> None:
        """Ends the process spans of messages that are settled, or can no longer be settled."""
        spans = self._partitions.get(settlement.consumer)
        if spans is None:
            return
        if settlement.how == CLOSED:
            self._partitions.pop(settlement.consumer, None)
        spans.settle(settlement)

    # ------------------------------------------------------------------------------ spans
    def _start(
        self, operation: str, topic: str, kind: SpanKind, linked: SpanContext | None, parent: Context | None = None
    ) -> Span | None:
        """Returns a new span; None if too many are open, or the sampler drops it."""
        try:
            self._room.pop()
        except IndexError:
            if not self._not_traced:
                _LOG.warning("%d spans are open: what else is sent and received is not traced", self._open_spans_max)
            self._not_traced += 1
            return None
        span = self._tracer.start_span(
            f"{operation} {topic}", parent, kind,
            {
                "messaging.system": MESSAGING_SYSTEM, "messaging.operation.name": operation,
                "messaging.operation.type": operation, "messaging.destination.name": topic,
            },
            () if linked is None else (self._trace.Link(linked),),
        )  # fmt: skip
        if span.is_recording():
            return span
        self._room.append(0)
        return None

    def end(self, span: Span) -> None:
        """Ends a span that this Tracing object began. Each span must be ended once, by `end` or by `fail`."""
        self._room.append(0)
        span.end()

    def fail(self, span: Span, kind: str, text: str) -> None:
        """Ends a span that this Tracing object began, with an error. `kind`: the value of the attribute `error.type`;
        `text`: the description of the error."""
        span.set_attribute("error.type", kind)
        span.set_status(self._trace.StatusCode.ERROR, text)
        self.end(span)

    # ------------------------------------------------------------------------------ contexts
    def _find_context(self, properties: Mapping[str, str]) -> SpanContext | None:
        """Returns the context in the properties of a message; None if there is none."""
        carrier: Mapping[str, str] = properties
        if TRACEPARENT not in properties:
            carrier = {name: properties[key] for key, name in DOTPULSAR_TRACE_PROPERTIES.items() if key in properties}
            if TRACEPARENT not in carrier:
                return None
        found = self._current(self._propagator.extract(carrier, self._no_context)).get_span_context()
        return found if found.is_valid else None

    def _with_context(self, context: SpanContext, properties: dict[str, str] | None) -> dict[str, str] | None:
        """Returns the properties with a context, if it is sampled; else unchanged."""
        if not context.trace_flags.sampled:
            return properties
        with_context = {} if properties is None else dict(properties)
        span = self._trace.NonRecordingSpan(context)
        self._propagator.inject(with_context, self._trace.set_span_in_context(span, self._no_context))
        return with_context


class ProcessSpans:
    """The open process spans of one partition's consumer: those of messages that the program has received and not
    settled yet."""

    __slots__ = ("_open", "_tracing", "attributes", "topic")

    def __init__(self, tracing: Tracing, topic: TopicName, subscription: str) -> None:
        self.topic = topic.base.full
        self.attributes: dict[str, Any] = {"messaging.destination.subscription.name": subscription}
        if topic.partition >= 0:
            self.attributes["messaging.destination.partition.id"] = str(topic.partition)
        self._tracing = tracing
        self._open: dict[_Key, Span] = {}

    def add(self, message: Message, span: Span) -> None:
        """Adds the span of a message that is delivered now. If an earlier delivery of the message has an open span,
        ends that span."""
        key = (*message.entry.position, message.batch_index)
        self._end(key)
        self._open[key] = span

    def find(self, message: Message) -> Span | None:
        """Returns the open span of a message; None if the message is not traced, or is settled."""
        return self._open.get((*message.entry.position, message.batch_index))

    def settle(self, settlement: Settlement) -> None:
        """Ends the spans of all messages that the event concerns. A message id without a batch index means all messages
        of the entry."""
        which, how = settlement.which, settlement.how if settlement.how in _SHOWN else ""
        if not self._open:
            return
        if which is None:
            self._end_all_of(settlement.entries, how)
        elif how == CUMULATIVE:
            self._end_up_to(which)
        elif isinstance(which, Message):
            self._end((*which.entry.position, which.batch_index), how)
        elif which.batch_index() >= 0:
            self._end((*which.position(), which.batch_index()), how)
        else:
            for key in list(self._open):
                if key[:2] == which.position():
                    self._end(key, how)

    def _end_up_to(self, which: Message | MessageId) -> None:
        """Ends the spans of all messages up to the message `which`, because it is acknowledged cumulatively."""
        if isinstance(which, Message):
            position, index = which.entry.position, which.batch_index
        else:
            position, index = which.position(), which.batch_index()
        last = (*position, index if index >= 0 else inf)
        for key in list(self._open):
            if key <= last:
                self._end(key, CUMULATIVE)

    def _end_all_of(self, entries: EntrySets | None, how: str) -> None:
        for key in list(self._open):
            if entries is None or (key[0] in entries and key[1] in entries[key[0]]):
                self._end(key, how)

    def _end(self, key: _Key, how: str = "") -> None:
        span = self._open.pop(key, None)
        if span is not None:
            if how:
                span.set_attribute(_SETTLED, how)
            self._tracing.end(span)
