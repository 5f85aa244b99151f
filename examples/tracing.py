"""Tracing: OpenTelemetry follows an order from the program that sends it to the one that works on it, and on.

    python examples/tracing.py magnetar://localhost:7650

Needs `pip install 'magnetar[otel]' opentelemetry-sdk`.
"""

import sys
from uuid import uuid4

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import magnetar


def main(service_url: str) -> None:
    orders, bills = f"orders-{uuid4().hex[:8]}", f"bills-{uuid4().hex[:8]}"
    exporter = InMemorySpanExporter()  # yours sends them to a collector
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("shop")

    tracing = magnetar.Tracing(provider)
    with magnetar.Client(service_url, tracing=tracing) as client:
        consumer = client.subscribe(orders, "billing")
        to_orders, to_bills = client.create_producer(orders), client.create_producer(bills)
        with tracer.start_as_current_span("checkout"):
            to_orders.send(b"two cups")

        message = consumer.receive(timeout_millis=5000)
        with tracing.processing(message):  # what is sent here belongs to the span of the message
            to_bills.send(b"7 EUR")
            consumer.acknowledge(message)

    spans = {span.name: span for span in exporter.get_finished_spans()}
    sent = spans[f"send persistent://public/default/{orders}"]
    worked = spans[f"process persistent://public/default/{orders}"]
    billed = spans[f"send persistent://public/default/{bills}"]
    print("the message carries", message.properties()["traceparent"])
    print("spans:", *sorted(spans))
    assert sent.parent is not None
    assert sent.parent.span_id == spans["checkout"].context.span_id
    assert worked.links[0].context.span_id == sent.context.span_id, "a link, as the work is no part of the checkout"
    assert billed.parent is not None
    assert billed.parent.span_id == worked.context.span_id


if __name__ == "__main__":
    main(sys.argv[1])
