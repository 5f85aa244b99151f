"""tracing: what OpenTelemetry costs a client for each message of --size bytes, processor time of its process.

Clients of three kinds take turns on one server, in one run: without tracing, with it and no recorded span, and with a
span around all sends, so that each send and each received message has its own (a null exporter).
"""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import nullcontext
from statistics import median
from typing import Any

from .harness import Options, Run, measured, server
from .messaging import PENDING, payloads

ROUNDS = 6
MESSAGES = 20_000
"""Of each kind in a round."""


def tracing(options: Options) -> Run:
    """Microseconds of a recorded send span and a recorded process span together: medians of the rounds."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

    import magnetar

    class Null(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(Null()))
    tracer = provider.get_tracer("benchmark")
    count = min(MESSAGES, options.messages)
    contents = payloads(options.size, options.seed)
    took: dict[str, list[float]] = defaultdict(list)

    def turn(kind: str, client: Any, number: int) -> None:
        topic = f"tracing-{kind}-{number}"
        consumer = client.subscribe(topic, "s")
        producer = client.create_producer(
            topic, batching_enabled=True, block_if_queue_full=True, max_pending_messages=PENDING
        )
        with tracer.start_as_current_span("all") if kind == "recorded" else nullcontext():
            at = time.process_time()
            for sent in range(count):
                producer.send_async(contents[sent % len(contents)], None)
            producer.flush()
            took[f"send_{kind}"].append((time.process_time() - at) / count * 1e6)
        at = time.process_time()
        for _ in range(count):
            consumer.acknowledge(consumer.receive(60_000))
        took[f"process_{kind}"].append((time.process_time() - at) / count * 1e6)
        consumer.close()
        producer.close()

    with server(options.bookies) as running:
        kinds = {"none": None, "idle": magnetar.Tracing(provider), "recorded": magnetar.Tracing(provider)}
        clients = {kind: magnetar.Client(running.url, tracing=each) for kind, each in kinds.items()}
        run = Run(0.0)
        with measured(run, server=running.pid):
            for number in range(2 if options.rehearses else 1 + ROUNDS):
                for kind, client in clients.items():
                    turn(kind, client, number)
        for client in clients.values():
            client.close()
    found = {name: round(median(each[1:]), 2) for name, each in took.items()}
    spans = {
        part: round(found[f"{part}_recorded"] - found[f"{part}_none"], 1) for part in ("send", "process")
    }  # fmt: skip
    run.value = sum(spans.values())
    run.detail = {"messages": count, **{f"{name}_us": each for name, each in found.items()}, "span_us": spans}
    return run
