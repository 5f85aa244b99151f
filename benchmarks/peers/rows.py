"""What is compared: the sides of each row, the first one ours, and the figures whose ratios are told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from . import kafka, perf, receives, sends, share, spark
from .apart import Apart, Fleet, Together
from .kafka_server import delete_topic, make_topic
from .maven import Missing
from .servers import Servers
from .turns import Load

OURS = "magnetar"
PERF, PULSAR = "Pulsar, pulsar-perf", "Pulsar, Python client"
KAFKA, SHARE = "Kafka, confluent-kafka", "Kafka, share group"
SPARK = "Spark's Kafka connector"
SMALL = 50
"""Producers of small-sends."""
RATE = 1000.0
"""Single sends a second of `latency`."""


@dataclass(frozen=True)
class Plan:
    """What the command line says."""

    rounds: int = 5
    seconds: float = 10.0
    pause_s: float = 3.0
    messages: int = 2_000_000
    """Of a backlog that is read."""
    rows: int = 1_000_000
    """Of Spark."""
    cores: float | None = None
    """What all sides share of the processors; None: all."""


class Figure(NamedTuple):
    name: str
    unit: str
    less_is_better: bool = False


MSG_S, ROWS_S = Figure("msg_s", "messages/s"), Figure("rows_s", "rows/s")
P50, P99 = Figure("p50_ms", "p50 ms", True), Figure("p99_ms", "p99 ms", True)

Open = Callable[[Servers, Plan], Load]


class Side(NamedTuple):
    name: str
    open: Open
    """Starts what it needs of servers and processes, all of which end with the row; Missing."""


class Row(NamedTuple):
    title: str
    figures: tuple[Figure, ...]
    sides: tuple[Side, ...]


def _apart(servers: Servers, make: Callable[..., Load], *arguments: object) -> Apart:
    return servers.stack.enter_context(Apart(make, *arguments))


# ------------------------------------------------------------------------------------------------- sending
def _ours(make: Callable[..., Load], *arguments: object, bookies: int = 1) -> Open:
    return lambda servers, plan: _apart(servers, make, servers.ours(bookies).url, *arguments)


def _perf(make: Callable[..., Load], *arguments: object, bookies: int = 1, **more: object) -> Open:
    return lambda servers, plan: make(servers.pulsar(bookies), *arguments, **more)


def _kafka(make: Callable[..., Load], *arguments: object) -> Open:
    return lambda servers, plan: _apart(servers, make, servers.kafka(), *arguments)


def _half(servers: Servers, plan: Plan) -> Load:
    return _apart(servers, sends.Half, servers.ours().url, 1024, plan.seconds)


def _perf_half(servers: Servers, plan: Plan) -> Load:
    return perf.half(servers.pulsar(), 1024, plan.seconds)


def _service(api: str, servers: Servers) -> str:
    if api == "magnetar":
        return servers.ours().url
    try:
        import pulsar  # noqa: F401
    except ImportError as error:
        raise Missing("pulsar-client is missing: pip install '.[peers]'") from error
    return servers.pulsar().url


def _singles(api: str) -> Open:
    return lambda servers, plan: _apart(servers, sends.Singles, api, _service(api, servers), 1024, RATE)


def _small(api: str) -> Open:
    topics = [f"small-{number}" for number in range(SMALL)]
    return lambda servers, plan: _apart(servers, sends.Small, api, _service(api, servers), 1024, topics)


def _small_processes(api: str, servers: Servers, plan: Plan) -> Load:
    url = _service(api, servers)
    made = [Apart(sends.Small, api, url, 1024, [f"small-{number}"]) for number in range(SMALL)]
    for each in made:  # all are on their way before the first one is waited for
        servers.stack.callback(each.close)
    for each in made:
        each.made()
    return Fleet(made)


# ----------------------------------------------------------------------------------------------- receiving
def _roundtrip(servers: Servers, plan: Plan) -> Load:
    url = servers.ours().url
    return Together(_apart(servers, sends.Produce, url, 1024, "roundtrip"), _apart(servers, receives.Receive, url))


def _roundtrip_of_kafka(servers: Servers, plan: Plan) -> Load:
    url = servers.kafka()
    producer = _apart(servers, kafka.Produce, url, 1024, "roundtrip", False)
    before, after = (lambda n: make_topic(url, f"roundtrip-{n}")), (lambda n: delete_topic(url, f"roundtrip-{n}"))
    return Together(producer, _apart(servers, kafka.Receive, url), before, after)


def _backlog(make: Callable[..., Load], where: Callable[[Servers], str]) -> Open:
    return lambda servers, plan: _apart(servers, make, where(servers), 1024, plan.messages)


def _our_url(servers: Servers) -> str:
    return servers.ours().url


def _kafka_url(servers: Servers) -> str:
    return servers.kafka()


def _catchup_of_perf(servers: Servers, plan: Plan) -> Load:
    return perf.CatchUp(servers.pulsar(), 1024, plan.messages)


# --------------------------------------------------------------------------------------------------- Spark
def _spark(make: Callable[..., Load], servers: Servers, plan: Plan) -> Load:
    return _apart(servers, make, spark.Ours(servers.ours().url), 100, plan.rows)


def _spark_of_kafka(make: Callable[..., Load], servers: Servers, plan: Plan) -> Load:
    try:
        found = spark.connector()
    except ImportError as error:
        raise Missing("PySpark is missing: pip install '.[spark]'") from error
    return _apart(servers, make, spark.Kafka(servers.kafka(), found), 100, plan.rows)


def _produce(size: int) -> tuple[Side, ...]:
    return (
        Side(OURS, _ours(sends.Produce, size)),
        Side(PERF, _perf(perf.Produce, size)),
        Side(KAFKA, _kafka(kafka.Produce, size)),
    )


ROWS = {
    "small-sends": Row(
        "50 producers of one client, one send after another, default settings", (MSG_S,),
        (Side(OURS, _small("magnetar")), Side(PULSAR, _small("pulsar"))),
    ),
    "small-sends-processes": Row(
        "the same from 50 processes", (MSG_S,),
        (Side(OURS, partial(_small_processes, "magnetar")), Side(PULSAR, partial(_small_processes, "pulsar"))),
    ),
    "latency": Row(
        "1,000 sends/s of 1 KB, not batched", (P50, P99),
        (
            Side(OURS, _singles("magnetar")), Side(PULSAR, _singles("pulsar")),
            Side(PERF, _perf(perf.Produce, 1024, rate=RATE, batches=False)),
            Side(KAFKA, _kafka(kafka.Singles, 1024, RATE)),
        ),
    ),
    "latency-half": Row(
        "latency at half of what each can produce, 1 KB", (P50, P99), (Side(OURS, _half), Side(PERF, _perf_half)),
    ),
    "produce": Row("produce 1 KB, one copy", (MSG_S,), _produce(1024)),
    "produce-100": Row("produce 100 B, one copy", (MSG_S,), _produce(100)),
    "produce-3": Row(
        "produce 1 KB, three copies, two synced", (MSG_S,),
        (Side(OURS, _ours(sends.Produce, 1024, bookies=3)), Side(PERF, _perf(perf.Produce, 1024, bookies=3))),
    ),
    "roundtrip": Row(
        "produce and consume 1 KB at once: consumed", (MSG_S,),
        (
            Side(OURS, _roundtrip), Side(PERF, _perf(perf.RoundTrip, 1024)), Side(KAFKA, _roundtrip_of_kafka),
        ),
    ),
    "catchup": Row(
        "a backlog of 1 KB", (MSG_S,),
        (
            Side(OURS, _backlog(receives.CatchUp, _our_url)), Side(PERF, _catchup_of_perf),
            Side(KAFKA, _backlog(kafka.CatchUp, _kafka_url)),
        ),
    ),
    "shared": Row(
        "4 consumers share a backlog of 1 KB, each message acknowledged", (MSG_S,),
        (
            Side(OURS, _backlog(receives.Shared, _our_url)),
            Side(SHARE, _backlog(share.Share, _kafka_url)),
        ),
    ),
    "spark-read": Row(
        "Spark reads 100 B", (ROWS_S,),
        (Side(OURS, partial(_spark, spark.Read)), Side(SPARK, partial(_spark_of_kafka, spark.Read))),
    ),
    "spark-write": Row(
        "Spark writes 100 B", (ROWS_S,),
        (Side(OURS, partial(_spark, spark.Write)), Side(SPARK, partial(_spark_of_kafka, spark.Write))),
    ),
}  # fmt: skip
