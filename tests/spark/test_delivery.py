"""Exactly once without Spark: writes, commits and aborts in every order, over a broker in memory with coordinators."""

import itertools
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="the extra `spark` is not installed")

import pyarrow as pa

from magnetar.client.common.errors import SinkFenced, TransactionAborted
from magnetar.proto.errors import InvalidConfiguration
from magnetar.proto.states import TxnId, TxnState
from magnetar.spark_connector import sink
from magnetar.spark_connector.options import parse_sink_options
from magnetar.spark_connector.sink import MagnetarStreamWriter, MagnetarWriter, TaskReport, make_stream_writer
from tests.client.conftest import served
from tests.client.fake_transactions import TransactionalBroker

TOPIC = "persistent://public/default/t"


@pytest.fixture
def broker() -> Iterator[TransactionalBroker]:
    found = TransactionalBroker({"parts": 3})
    with served(found) as address:
        found.url = address  # type: ignore[attr-defined]
        yield found


@pytest.fixture
def spark_says(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The properties of the task that runs here."""
    told = {"sql.streaming.queryId": "query-1", "streaming.sql.batchId": "0"}
    monkeypatch.setattr(sink.TaskContext, "get", lambda: SimpleNamespace(getLocalProperty=told.get))
    return told


def options(broker: Any, **more: str) -> dict[str, str]:
    return {"service.url": broker.url, "topic": "t", "deliveryGuarantee": "exactly-once", **more}


def stream(broker: Any, **more: str) -> MagnetarStreamWriter:
    """As Spark has it for a batch: pickled for the tasks; the one that commits is made anew."""
    writer = MagnetarStreamWriter(parse_sink_options(options(broker, **more), streaming=True))
    return pickle.loads(pickle.dumps(writer))  # type: ignore[no-any-return]


def rows(*values: str) -> Iterator[pa.RecordBatch]:
    for value in values:
        yield pa.RecordBatch.from_pydict({"value": pa.array([value.encode()], pa.binary())})


def write(writer: Any, *values: str) -> Any:
    message = writer.write(rows(*values))
    assert isinstance(message, TaskReport)
    return pickle.loads(pickle.dumps(message))


def seen(broker: TransactionalBroker) -> str:
    return "".join(chr(entry[-1]) for entry in broker.visible(TOPIC))


def undecided(broker: TransactionalBroker) -> list[TxnId]:
    return [txn for txn, each in broker.known.items() if each.entries and each.state in (TxnState.OPEN, 1)]


def test_rows_count_when_the_batch_is_committed_and_once(broker: Any, spark_says: dict[str, str]) -> None:
    one, two = write(stream(broker), "a"), write(stream(broker), "b")
    assert seen(broker) == ""
    stream(broker).commit([one, two], 0)
    assert seen(broker) == "ab"
    again = write(stream(broker), "a")
    assert (again.is_already, again.rows, again.txn) == (True, 0, None)
    stream(broker).commit([again], 0)
    stream(broker).commit([one, two], 0)
    spark_says["streaming.sql.batchId"] = "1"
    stream(broker).commit([write(stream(broker), "c")], 1)
    assert seen(broker) == "abc"
    assert not undecided(broker)


CALLS = ("commit", "abort", "other run", "abort of the other run")


@pytest.mark.parametrize("order", list(itertools.permutations(CALLS)), ids=lambda order: "-".join(order))
def test_in_every_order_the_batch_counts_once_or_not_at_all(
    broker: Any, spark_says: dict[str, str], order: tuple[str, ...]
) -> None:
    """Two runs of a batch; each call comes twice, and an abort has messages that are None."""
    mine, others = write(stream(broker), "a"), write(stream(broker), "a")
    for call in [each for each in order for _ in range(2)]:
        messages = [others if "other" in call else mine]
        try:
            if "abort" in call:
                stream(broker).abort([None, *messages], 0)
            else:
                stream(broker).commit(messages, 0)
        except TransactionAborted:
            assert seen(broker) == ""
    tried = sorted(order.index(each) for each in ("commit", "other run"))
    ended_first = order.index("abort") < order.index("commit") and (
        order.index("abort of the other run") < order.index("other run")
    )
    assert seen(broker) == ("" if ended_first else "a"), tried
    stream(broker).commit([write(stream(broker), "a")], 0)
    assert seen(broker) == "a"
    assert not undecided(broker)


def test_what_other_tries_wrote_is_aborted_by_the_commit(broker: Any, spark_says: dict[str, str]) -> None:
    zombie, counted = write(stream(broker), "z"), write(stream(broker), "a")
    stream(broker).commit([counted], 0)
    assert seen(broker) == "a"
    assert broker.state_of(TxnId.parse(zombie.txn)) is TxnState.ABORTED


def test_a_task_whose_transaction_is_gone_fails_the_commit_and_nothing_counts(
    broker: Any, spark_says: dict[str, str]
) -> None:
    kept, gone = write(stream(broker), "a"), write(stream(broker), "b")
    broker.expire(TxnId.parse(gone.txn))
    with pytest.raises(TransactionAborted):
        stream(broker).commit([kept, gone], 0)
    stream(broker).abort([kept, gone, None], 0)
    assert seen(broker) == ""
    assert not undecided(broker)


def test_a_commit_whose_answer_is_lost_is_found(broker: Any, spark_says: dict[str, str]) -> None:
    broker.lose_batches = 1
    stream(broker).commit([write(stream(broker), "a")], 0)
    assert seen(broker) == "a"


def test_an_abort_never_raises(broker: Any, spark_says: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    message = write(stream(broker), "a")
    short = {"magnetar.client.operation_timeout_seconds": "0.2"}
    broker.unavailable = True
    stream(broker, **short).abort([message, None], 0)
    broker.unavailable = False
    stream(broker, **short).abort([], 0)
    assert broker.state_of(TxnId.parse(message.txn)) is TxnState.PREPARED


def test_another_query_under_the_same_sink_is_refused_or_adopts(broker: Any, spark_says: dict[str, str]) -> None:
    spark_says["streaming.sql.batchId"] = "5"
    stream(broker, sinkId="s").commit([write(stream(broker, sinkId="s"), "a")], 5)
    spark_says |= {"sql.streaming.queryId": "query-2", "streaming.sql.batchId": "0"}
    with pytest.raises(SinkFenced, match="onNewCheckpoint=adopt"):
        write(stream(broker, sinkId="s"), "b")
    adopting = {"sinkId": "s", "onNewCheckpoint": "adopt"}
    stream(broker, **adopting).commit([write(stream(broker, **adopting), "b")], 0)
    assert seen(broker) == "ab"


def test_a_task_without_rows_prepares_nothing_and_its_batch_is_noted(broker: Any, spark_says: dict[str, str]) -> None:
    empty = write(stream(broker))
    assert (empty.rows, empty.txn, empty.is_already) == (0, None, False)
    stream(broker).commit([empty], 0)
    assert broker.sinks["spark-query-1"].batch == 0


@pytest.mark.parametrize("send_at_end", ["true", "false"])
def test_rows_are_kept_until_the_input_of_the_task_ends(
    broker: Any, spark_says: dict[str, str], monkeypatch: pytest.MonkeyPatch, send_at_end: str
) -> None:
    monkeypatch.setattr("magnetar.spark_connector.sink.KEPT_BYTES_MAX", 64)
    small, tall = "x", "y" * 100
    stored: list[int] = []

    def input_() -> Iterator[pa.RecordBatch]:
        for value in (small, small, tall, small):
            yield from rows(value)
            stored.append(len(broker.topic(TOPIC).entries) if TOPIC in broker.topics else -1)

    writer = stream(broker, sendAtEnd=send_at_end)
    message = writer.write(input_())
    writer.commit([message], 0)
    assert (stored[1] == -1) is (send_at_end == "true"), "no producer before the rows are too many"
    assert stored[2] >= 0, "past the limit rows are sent as they come"
    assert len(broker.visible(TOPIC)) >= 1


def test_a_transaction_that_waited_long_for_its_first_row_is_begun_again(
    broker: Any, spark_says: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("magnetar.spark_connector.sink.UNUSED_TRANSACTION_S", -1.0)
    stream(broker).commit([write(stream(broker), "a")], 0)
    assert seen(broker) == "a"
    assert len(broker.begins) == 2


def test_a_batch_query_counts_once_by_its_number_and_all_or_nothing_without(
    broker: Any, spark_says: dict[str, str]
) -> None:
    spark_says.clear()
    numbered = MagnetarWriter(parse_sink_options(options(broker, sinkId="s", batchId="3")))
    for _ in range(2):
        numbered.commit([write(numbered, "a"), write(numbered, "b")])
    assert seen(broker) == "ab"
    for _ in range(2):
        free = MagnetarWriter(parse_sink_options(options(broker)))
        messages = [write(free, "c"), write(free, "d")]
        assert seen(broker).count("c") == _
        free.commit(messages)
    assert seen(broker) == "abcdcd"
    failed = MagnetarWriter(parse_sink_options(options(broker)))
    failed.abort([write(failed, "e"), None])
    assert seen(broker) == "abcdcd"
    assert not undecided(broker)


def test_at_least_once_has_no_transaction(broker: Any, spark_says: dict[str, str]) -> None:
    writer = stream(broker, deliveryGuarantee="at-least-once")
    message = write(writer, "a")
    writer.abort([message], 0)
    writer.commit([message], 0)
    assert seen(broker) == "a"
    assert not broker.begins


def test_what_cannot_be_exactly_once_is_refused(broker: Any, spark_says: dict[str, str]) -> None:
    from pyspark.sql.types import StringType, StructType

    with pytest.raises(InvalidConfiguration, match="outputMode"):
        make_stream_writer(options(broker), StructType().add("value", StringType()), True)
    spark_says.clear()
    with pytest.raises(InvalidConfiguration, match="micro-batches"):
        write(stream(broker), "a")
