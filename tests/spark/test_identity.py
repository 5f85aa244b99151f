"""What outlives one call carries the identity of what it is of: the topic's incarnation, and all that the query says.

Readers are called as Spark calls them, in this process: the connections of one process are what is shared wrongly.
"""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

pytest.importorskip("pyspark", reason="the extra `spark` is not installed")

import magnetar
from magnetar.admin import Admin
from magnetar.proto.errors import DataLost, MagnetarError, TopicNotFound
from magnetar.spark_connector import ranges
from magnetar.spark_connector.datasource import MagnetarDataSource
from magnetar.spark_connector.ranges import get_query_connection
from tests.client.model.keys import files

pytestmark = pytest.mark.spark


@pytest.fixture
def topic() -> str:
    return f"identity-{uuid4().hex[:12]}"


@pytest.fixture
def admin(url: str) -> Any:
    with Admin(url) as connected:
        yield connected


def batch(url: str, topic: str, *columns: str, **options: str) -> list[Any]:
    """The rows of a batch query."""
    source = MagnetarDataSource({"service.url": url, "topic": topic, **options})
    reader = source.reader(source.schema())
    tasks = [pickle.loads(pickle.dumps(task)) for task in reader.partitions()]
    found = [row for task in tasks for part in reader.read(task) for row in part.to_pylist()]
    return [row[columns[0]] if len(columns) == 1 else row for row in found]


class Stream:
    """A streaming query: a reader for each start, and the checkpoint's last offset as text."""

    def __init__(self, url: str, topic: str, **options: str) -> None:
        given = {"service.url": url, "topic": topic, "startingOffsets": "earliest", "durableCursor": "false", **options}
        self.source = MagnetarDataSource(given)
        self.at = ""
        self.start()

    def start(self) -> None:
        """Again, from its checkpoint."""
        self.reader = self.source.streamReader(self.source.schema())

    def trigger(self) -> list[Any]:
        """The values of a batch."""
        begin = json.loads(self.at) if self.at else self.reader.initialOffset()
        end = json.loads(json.dumps(self.reader.latestOffset(begin, self.reader.getDefaultReadLimit())))
        found = self.run(begin, end)
        self.at = json.dumps(end)
        return found

    def run(self, begin: dict[str, Any], end: dict[str, Any]) -> list[Any]:
        tasks = [pickle.loads(pickle.dumps(task)) for task in self.reader.partitions(begin, end)]
        return [value for task in tasks for part in self.reader.read(task) for value in part["value"].to_pylist()]


def send(client: Any, topic: str, values: list[Any], **settings: Any) -> None:
    producer = client.create_producer(topic, **settings)
    for value in values:
        producer.send(value)
    producer.close()


def numbered(count: int, prefix: str = "") -> list[bytes]:
    return [f"{prefix}{number}".encode() for number in range(count)]


def anew(admin: Any, topic: str, partitions: int = 0) -> None:
    admin.delete_topic(topic, force=True)
    admin.create_topic(topic, partitions=partitions)


# ------------------------------------------------------------------------------ what a query says
def test_a_query_without_the_key_does_not_read_by_that_of_another(
    url: str, client: Any, topic: str, tmp_path: Path
) -> None:
    files(tmp_path)
    key = {"crypto.private.key.file": str(tmp_path / "a-private.pem")}
    keys = magnetar.CryptoKeyReader(str(tmp_path / "a-public.pem"), "")
    send(client, topic, numbered(5), encryption_key="a", crypto_key_reader=keys)
    for _ in range(2):
        assert batch(url, topic, "value", **key) == numbered(5)
        with pytest.raises(MagnetarError, match="it is encrypted"):
            batch(url, topic, "value")


def test_a_key_file_is_known_by_what_it_says(url: str, client: Any, topic: str, tmp_path: Path) -> None:
    """The same path, another key: neither the old one is used on, nor is what it could not read refused for ever."""
    files(tmp_path)
    files(tmp_path, "b")
    here = tmp_path / "key.pem"
    keys = magnetar.CryptoKeyReader(str(tmp_path / "a-public.pem"), "")
    send(client, topic, numbered(5), encryption_key="a", crypto_key_reader=keys)
    for name, reads in (("b-private.pem", False), ("a-private.pem", True), ("b-private.pem", False)):
        here.write_bytes((tmp_path / name).read_bytes())
        if reads:
            assert batch(url, topic, "value", **{"crypto.private.key.file": str(here)}) == numbered(5)
            continue
        with pytest.raises(MagnetarError, match="it is encrypted"):
            batch(url, topic, "value", **{"crypto.private.key.file": str(here)})


@pytest.mark.parametrize(
    ("name", "value"),
    [("magnetar.client.operation_timeout_seconds", "7"), ("pollTimeoutMs", "9000"), ("topicDiscoveryInterval", "1s"),
     ("waitForTopic", "true"), ("schema", "registry"), ("crypto.private.key.file", "/a")],
)  # fmt: skip
def test_queries_that_differ_in_an_option_share_no_connection(url: str, name: str, value: str) -> None:
    from magnetar.spark_connector.options import parse_source_options

    given = {"service.url": url, "topic": "any"}
    one, other = (parse_source_options(each, streaming=True) for each in (given, {**given, name: value}))
    assert get_query_connection(one) is get_query_connection(one)
    assert get_query_connection(one) is not get_query_connection(other)


def test_a_process_keeps_the_connections_of_its_last_queries_and_those_that_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from magnetar.spark_connector.options import parse_source_options

    def connect(topic: str) -> ranges.QueryConnection:
        given = {"service.url": "magnetar://localhost:1", "topic": topic}
        return get_query_connection(parse_source_options(given, streaming=True))

    kept: dict[tuple[int, str], ranges.QueryConnection] = {}
    monkeypatch.setattr(ranges, "_OF_PROCESS", kept)
    queries = [connect(f"t{number}") for number in range(ranges.CACHED_CONNECTIONS_MAX)]
    assert list(kept.values()) == queries
    queries[0].reads = 1
    newest = connect("one more")
    assert list(kept.values()) == [queries[0], *queries[2:], newest], "the one that was used longest ago is closed"
    for each in kept.copy().values():
        each.close()
    assert not kept


# ------------------------------------------------------------------------------ batches
def test_a_batch_has_the_partitions_of_the_moment_when_it_is_planned(
    url: str, client: Any, admin: Any, topic: str
) -> None:
    admin.create_topic(topic, partitions=2)
    send(client, topic, numbered(20))
    assert len(batch(url, topic, "value")) == 20
    admin.update_topic(topic, partitions=5)
    for number in range(5):
        send(client, f"{topic}-partition-{number}", numbered(6))
    assert len(batch(url, topic, "value")) == 50


def test_a_batch_follows_a_topic_from_and_to_partitions(url: str, client: Any, admin: Any, topic: str) -> None:
    admin.create_topic(topic)
    send(client, topic, numbered(4))
    assert batch(url, topic, "value") == numbered(4)
    anew(admin, topic, partitions=2)
    send(client, f"{topic}-partition-1", numbered(3, "new-"))
    assert batch(url, topic, "value") == numbered(3, "new-")
    anew(admin, topic)
    send(client, topic, numbered(2, "last-"))
    assert batch(url, topic, "value") == numbered(2, "last-")


def test_a_batch_by_a_pattern_has_the_topics_of_the_moment(url: str, client: Any, topic: str) -> None:
    pattern = {"topicsPattern": f"{topic}.*"}
    for count in (1, 2, 3):
        send(client, f"{topic}-{count}", numbered(1))
        source = MagnetarDataSource({"service.url": url, **pattern})
        assert len(source.reader(source.schema()).partitions()) == count


class XY(magnetar.schema.Record):
    x = magnetar.schema.Integer(required=True)
    y = magnetar.schema.Integer(required=True)


class YX(magnetar.schema.Record):
    y = magnetar.schema.Integer(required=True)
    x = magnetar.schema.Integer(required=True)


def test_a_topic_made_anew_is_decoded_by_its_own_schema(url: str, client: Any, admin: Any, topic: str) -> None:
    options = {"schema": "registry"}
    send(client, topic, [XY(x=1, y=100)], schema=magnetar.schema.AvroSchema(XY))
    assert [(row["x"], row["y"]) for row in batch(url, topic, **options)] == [(1, 100)]
    anew(admin, topic)
    send(client, topic, [YX(x=1, y=100)], schema=magnetar.schema.AvroSchema(YX))
    assert [(row["x"], row["y"]) for row in batch(url, topic, **options)] == [(1, 100)]


# ------------------------------------------------------------------------------ streams
FEWER, AS_MANY, MORE, MANY_MORE = 3, 10, 11, 40


@pytest.mark.parametrize("count", [0, FEWER, AS_MANY, MORE, MANY_MORE])
def test_a_topic_made_anew_under_a_stream_is_told_and_then_read_from_its_beginning(
    url: str, client: Any, admin: Any, topic: str, count: int
) -> None:
    stream, careless = Stream(url, topic), Stream(url, topic, failOnDataLoss="false")
    send(client, topic, numbered(10))
    assert stream.trigger() == careless.trigger() == numbered(10)
    anew(admin, topic)
    if count:
        send(client, topic, numbered(count, "new-"))
    for restarts in (False, True):
        if restarts:
            stream.start()
        with pytest.raises(DataLost, match=f"{topic}.*deleted and made anew.*failOnDataLoss=false"):
            stream.trigger()
    careless.start()
    assert careless.trigger() == numbered(count, "new-")
    send(client, topic, [b"later"])
    assert careless.trigger() == [b"later"]


@pytest.mark.parametrize("careless", [False, True])
def test_a_topic_made_anew_between_the_plan_and_the_read_is_not_read_as_the_old_one(
    url: str, client: Any, admin: Any, topic: str, careless: bool
) -> None:
    stream = Stream(url, topic, failOnDataLoss=str(not careless).lower())
    begin = stream.reader.initialOffset() if client.create_producer(topic).close() is None else {}
    send(client, topic, numbered(10))
    end = stream.reader.latestOffset(begin, stream.reader.getDefaultReadLimit())
    tasks = stream.reader.partitions(begin, end)
    anew(admin, topic)
    send(client, topic, numbered(20, "new-"))
    reading: Callable[[], list[Any]] = lambda: [
        value for task in tasks for part in stream.reader.read(task) for value in part["value"].to_pylist()
    ]
    for attempt in (reading, lambda: stream.run(begin, end)):  # the task, and the batch of a restarted query
        if careless:
            assert attempt() == []
        else:
            with pytest.raises(DataLost, match="made anew"):
                attempt()
    if careless:
        stream.at = json.dumps(end)
        assert stream.trigger() == numbered(20, "new-")


def test_an_old_checkpoint_goes_on_and_takes_the_incarnation(url: str, client: Any, admin: Any, topic: str) -> None:
    stream = Stream(url, topic)
    send(client, topic, numbered(10))
    stream.at = json.dumps({f"persistent://public/default/{topic}": {"0": 4}})
    assert stream.trigger() == numbered(10)[4:]
    assert json.loads(stream.at)[f"persistent://public/default/{topic}"] == {"0": 10}
    anew(admin, topic)
    send(client, topic, numbered(20))
    with pytest.raises(DataLost, match="made anew"):
        stream.trigger()


def test_partitions_that_are_added_are_no_new_incarnation(url: str, client: Any, admin: Any, topic: str) -> None:
    admin.create_topic(topic, partitions=2)
    send(client, topic, numbered(20))
    stream = Stream(url, topic, topicDiscoveryInterval="0s")
    assert len(stream.trigger()) == 20
    admin.update_topic(topic, partitions=4)
    for number in range(4):
        send(client, f"{topic}-partition-{number}", numbered(5))
    assert len(stream.trigger()) == 20
    stream.start()
    assert stream.trigger() == []


def test_a_stream_that_has_nothing_new_keeps_its_text(url: str, client: Any, topic: str) -> None:
    stream = Stream(url, topic)
    send(client, topic, numbered(3))
    stream.trigger()
    before = stream.at
    assert stream.trigger() == []
    assert stream.at == before


# ------------------------------------------------------------------------------ the broker's side
def test_a_broker_reads_and_advances_only_what_it_was_asked_for(url: str, client: Any, admin: Any, topic: str) -> None:
    """An index of the old topic acknowledges nothing of the new one."""
    client.subscribe(topic, "keep").close()
    send(client, topic, numbered(10))
    before = admin.offsets(topic)
    assert before.incarnation > 0
    admin.advance_subscription(topic, "keep", 5, incarnation=before.incarnation)
    anew(admin, topic)
    client.subscribe(topic, "keep").close()
    send(client, topic, numbered(10))
    after = admin.offsets(topic)
    assert after.incarnation > before.incarnation
    with pytest.raises(TopicNotFound, match="made anew"):
        admin.advance_subscription(topic, "keep", 5, incarnation=before.incarnation)
    with pytest.raises(TopicNotFound, match="made anew"):
        admin.offsets(topic, subscription="other", incarnation=before.incarnation)
    assert admin.subscriptions(topic) == ["keep"]
    assert admin.offsets(topic, subscription="keep").subscription_index == 0
    with pytest.raises(magnetar.TopicNotFound, match="made anew"):
        list(client.read_range(topic, 0, 5, incarnation=before.incarnation))
    assert len(list(client.read_range(topic, 0, 5, incarnation=after.incarnation))) > 0
