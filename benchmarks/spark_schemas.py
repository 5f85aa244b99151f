"""schema-spark-read: typed columns in local[2], of ten fields, against a server process: JSON and Avro."""

from __future__ import annotations

import json
from typing import Any

from .harness import Options, Run, measured, server
from .messaging import Sending
from .spark import WARM_UP_ROWS, session, stream_to_noop

DIFFERENT = 1000
"""Payloads: they repeat."""
FIELDS: list[dict[str, Any]] = [
    {"name": "id", "type": "long"},
    {"name": "customer", "type": "string"},
    {"name": "country", "type": "string"},
    {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["SALE", "RETURN"]}},
    {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
    {"name": "paid", "type": "boolean"},
    {"name": "items", "type": "int"},
    {"name": "price", "type": "double"},
    {"name": "discount", "type": ["null", "double"], "default": None},
    {"name": "note", "type": ["null", "string"], "default": None},
]
DEFINITION = json.dumps({"type": "record", "name": "Order", "fields": FIELDS}).encode()


def orders(seed: int) -> list[dict[str, Any]]:
    return [
        {
            "id": seed * 1_000_000_000 + number, "customer": f"customer {number:06}", "country": "DE", "kind": "SALE",
            "at": 1_795_482_123_004 + number, "paid": number % 3 > 0, "items": number % 50, "price": number * 1.25,
            "discount": None if number % 4 else 0.05, "note": None if number % 5 else "by express, please",
        }
        for number in range(DIFFERENT)
    ]  # fmt: skip


def schema_spark_read(options: Options) -> Run:
    """`value` is that of JSON; `detail` has both."""
    import magnetar
    from magnetar.client.model.composite_schemas import PreEncodedSchema, make_avro_encoder
    from magnetar.proto.schema import SchemaInfo, SchemaType

    encode = make_avro_encoder(json.loads(DEFINITION))
    given = {
        "json": (SchemaType.JSON, [json.dumps(each, separators=(",", ":")).encode() for each in orders(options.seed)]),
        "avro": (SchemaType.AVRO, [encode(each) for each in orders(options.seed)]),
    }
    spark, run = session(), Run(0.0)
    with server(options.bookies) as running, magnetar.Client(running.url) as client:
        for name, (type_, contents) in given.items():
            for topic, rows in ((f"warm-up-{name}", WARM_UP_ROWS), (name, options.messages)):
                client.subscribe(topic, "keep", initial_position=magnetar.InitialPosition.Earliest).close()
                producer = client.create_producer(
                    topic, schema=PreEncodedSchema(SchemaInfo(type=type_, data=DEFINITION, name="Order")),
                    batching_enabled=True, block_if_queue_full=True, max_pending_messages=20_000,
                )  # fmt: skip
                Sending(producer, contents).run(messages=rows)
        with measured(run, tree=True, server=running.pid):
            for name, (_, contents) in given.items():
                stream_to_noop(spark, running.url, f"warm-up-{name}", schema="registry")
                rows, seconds = stream_to_noop(spark, running.url, name, schema="registry")
                assert rows == options.messages, f"{rows} rows were read, {options.messages} are there"
                run.detail |= {
                    f"{name}_rows_per_s": rows / seconds, f"{name}_add_batch_s": seconds,
                    f"{name}_bytes_per_row": sum(map(len, contents)) / len(contents),
                }  # fmt: skip
    run.value = run.detail["json_rows_per_s"]
    return run
