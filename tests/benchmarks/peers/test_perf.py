"""What pulsar-perf of Pulsar 4.0.8 prints is read: its lines are recorded ones."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from benchmarks.peers import perf

PRODUCED = """\
[main] INFO org.apache.pulsar.testclient.PerformanceProducer - Throughput produced:  334092 msg ---  32010.1 msg/s ---    250.1 Mbit/s  --- failure      0.0 msg/s --- Latency: mean:   0.000 ms - med:   0.000 - 95pct:   0.000 - 99pct:   0.000 - 99.9pct:   0.000 - 99.99pct:   0.000 - Max:   0.000
[main] INFO org.apache.pulsar.testclient.PerformanceProducer - Throughput produced:  881978 msg ---  50989.2 msg/s ---    398.4 Mbit/s  --- failure      0.0 msg/s --- Latency: mean: 310.903 ms - med: 334.473 - 95pct: 494.597 - 99pct: 557.275 - 99.9pct: 623.379 - 99.99pct: 623.383 - Max: 623.431
[perf-client-shutdown] INFO org.apache.pulsar.testclient.PerformanceProducer - Aggregated throughput stats --- 1302249 records sent --- 41525.986 msg/s --- 324.422 Mbit/s 
[perf-client-shutdown] INFO org.apache.pulsar.testclient.PerformanceProducer - Aggregated latency stats --- Latency: mean: 257.001 ms - med: 255.188 - 95pct: 478.685 - 99pct: 530.139 - 99.9pct: 623.359 - 99.99pct: 623.383 - 99.999pct: 623.383 - Max: 623.431
"""  # noqa: E501, W291
CONSUMED = "[main] INFO org.apache.pulsar.testclient.PerformanceConsumer - Throughput received:   19614 msg --- 1961.298  msg/s --- 15.323 Mbit/s  --- Latency: mean: 197.342 ms - med: 47 - 95pct: 928 - 99pct: 1372 - 99.9pct: 1427 - 99.99pct: 1428 - Max: 1434"  # noqa: E501
SECOND = "[pulsar-timer-7-1] INFO org.apache.pulsar.client.impl.ConsumerStatsRecorderImpl - [persistent://public/default/t] [x] [jHeLs] Prefetched messages: 0 --- Consume throughput received: 81750.05 msgs/s --- 638.67 Mbit/s --- Ack sent rate: 81750.05 ack/s --- Failed messages: 0 --- batch messages: 0 ---Failed acks: 0"  # noqa: E501


def test_ten_seconds_of_a_producer_are_read_and_its_total_is_not() -> None:
    found = [perf.interval(line) for line in PRODUCED.splitlines()]
    assert found == [(32010.1, 0.0, 0.0), (50989.2, 334.473, 557.275), None, None]


def test_ten_seconds_of_a_consumer_are_read() -> None:
    assert perf.interval(CONSUMED) == (1961.298, 47.0, 1372.0)
    assert perf.second(CONSUMED) is None


def test_seconds_of_a_consumer_are_read() -> None:
    assert perf.second(SECOND) == 81750.05
    assert perf.interval(SECOND) is None


def test_the_first_ten_seconds_are_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def recorded(url: str, *arguments: object) -> Iterator[Iterator[str]]:
        yield iter(PRODUCED.splitlines())

    monkeypatch.setattr(perf, "lines", recorded)
    assert perf.intervals("pulsar://…", 3.0, "produce") == [(50989.2, 334.473, 557.275)]
    with pytest.raises(RuntimeError, match="pulsar-perf ended early"):
        perf.intervals("pulsar://…", 20.0, "produce")


def test_rates_are_their_mean_and_latencies_their_median() -> None:
    told = perf.figures([perf.Interval(10.0, 1.0, 5.0), perf.Interval(20.0, 2.0, 9.0), perf.Interval(60.0, 3.0, 6.0)])
    assert told == {"msg_s": 30.0, "p50_ms": 2.0, "p99_ms": 6.0}


def test_a_backlog_that_ends_in_the_warm_up_is_too_small() -> None:
    assert perf.warm([1.0, 2.0, 3.0, 100.0, 200.0]) == 150.0
    with pytest.raises(RuntimeError, match="more --messages are needed"):
        perf.warm([1.0, 2.0, 3.0])
