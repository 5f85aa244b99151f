"""What every archive of tests/upgrade/ holds: `write` puts it into a server, `check` reads all of it back.

`write` is for the version that makes an archive; later ones only check. What a new version can store besides goes into
its own archive, and into a part of `check` that is for archives from that version on.
"""

import time

import magnetar
from magnetar.admin import Admin, CompactionState
from magnetar.proto.policies import Policies

CONFIG = """
[broker]
roll_entries = 40
cursor_snapshot_bytes = 0
delayed_seal_entries = 10
dedup_snapshot_entries = 5
[bookie.store]
journal_segment_bytes = 262144
journal_first_segment_bytes = 262144
log_allocate_bytes = 65536
reserve_bytes = 65536
"""
"""Small files, and everything in ledgers early."""
FAR_MS = 4_102_444_800_000
"""The year 2100."""
PLAIN = [f"message {n}".encode() for n in range(100)]
ACKED = (3, 4, 50, 99)
DELAYED = 25


def write(url: str) -> None:
    with Admin(url) as admin, magnetar.Client(url) as client:
        keep = Policies(retention_minutes=-1, retention_mib=-1, max_producers=77)
        admin.set_namespace_policies("public/default", keep)
        admin.create_tenant("acme")
        admin.create_namespace("acme/shop", bundles=8, default_partitions=2)
        admin.create_topic("acme/shop/parts", partitions=2)
        _write_plain(client)
        _write_delayed(client, admin)
        _write_deduplicated(client, admin)
        _write_compacted(client, admin)


def _write_plain(client: magnetar.Client) -> None:
    """Batches and lone entries over three ledgers, properties and keys; a cursor with holes."""
    consumer = client.subscribe("plain", "holes", magnetar.ConsumerType.Shared)
    with client.create_producer("plain", "p") as producer:
        for n, payload in enumerate(PLAIN):
            producer.send(payload, properties={"n": str(n)}, partition_key=f"k{n % 7}")
    found = [consumer.receive(10_000) for _ in PLAIN]
    for n in ACKED:
        consumer.acknowledge(found[n])
    time.sleep(2)  # the acks are stored after a second
    consumer.close()


def _write_delayed(client: magnetar.Client, admin: Admin) -> None:
    """Messages for the year 2100, in a bucket on disk."""
    client.subscribe("later", "s", magnetar.ConsumerType.Shared).close()
    with client.create_producer("later") as producer:
        for n in range(DELAYED):
            producer.send(str(n).encode(), deliver_at=FAR_MS + n)
    _until("a bucket of delayed messages", lambda: admin.topic_stats("later").subscriptions[0].delayed_buckets > 0)


def _write_deduplicated(client: magnetar.Client, admin: Admin) -> None:
    admin.create_topic("once")
    admin.set_topic_policies("once", Policies(deduplication=True))
    with client.create_producer("once", "named") as producer:
        for n in range(12):
            producer.send(str(n).encode(), sequence_id=100 + n)


def _write_compacted(client: magnetar.Client, admin: Admin) -> None:
    with client.create_producer("prices") as producer:
        for n in range(30):
            producer.send(str(n).encode(), partition_key=f"k{n % 3}")
    admin.compact("prices")
    _until("a compaction", lambda: admin.compaction_status("prices").state is CompactionState.SUCCESS)


def _until(what: str, done: object) -> None:
    assert callable(done)
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.1)


def check(url: str) -> None:
    with Admin(url) as admin, magnetar.Client(url) as client:
        assert admin.tenants() == ["acme", "public"]
        assert (admin.namespace("acme/shop").bundles, admin.partitions("acme/shop/parts")) == (8, 2)
        policies = admin.namespace_policies("public/default")
        assert (policies.retention_minutes, policies.max_producers) == (-1, 77)
        _check_plain(client, admin)
        _check_delayed(client, admin)
        _check_deduplicated(client, admin)
        assert _read(client, "prices", compacted=True) == [b"27", b"28", b"29"]
        assert [int(each) for each in _read(client, "prices")] == list(range(30))


def _read(client: magnetar.Client, topic: str, *, compacted: bool = False) -> list[bytes]:
    reader = client.create_reader(topic, magnetar.MessageId.earliest, is_read_compacted=compacted)
    found = []
    while reader.has_message_available():
        found.append(reader.read_next(10_000).data())
    reader.close()
    return found


def _check_plain(client: magnetar.Client, admin: Admin) -> None:
    assert _read(client, "plain") == PLAIN
    assert len(admin.topic_internal_stats("plain").ledgers) >= 3
    assert admin.topic_stats("plain").subscriptions[0].backlog == len(PLAIN) - len(ACKED)
    consumer = client.subscribe("plain", "holes", magnetar.ConsumerType.Shared)
    found = [consumer.receive(10_000) for _ in range(len(PLAIN) - len(ACKED))]
    left = [n for n in range(len(PLAIN)) if n not in ACKED]
    assert sorted(int(each.properties()["n"]) for each in found) == left
    assert {each.partition_key() for each in found} == {f"k{n}" for n in range(7)}
    consumer.close()


def _check_delayed(client: magnetar.Client, admin: Admin) -> None:
    """All are there, and none is due."""
    (subscription,) = admin.topic_stats("later").subscriptions
    assert subscription.backlog == DELAYED
    consumer = client.subscribe("later", "s", magnetar.ConsumerType.Shared)
    _until("the delays", lambda: admin.topic_stats("later").subscriptions[0].delayed == DELAYED)
    assert admin.topic_stats("later").subscriptions[0].delayed_buckets > 0
    consumer.close()


def _check_deduplicated(client: magnetar.Client, admin: Admin) -> None:
    before = admin.topic_stats("once").end_index
    assert before == 12
    with client.create_producer("once", "named") as producer:
        assert producer.last_sequence_id() == 111
        producer.send(b"again", sequence_id=111)
    assert admin.topic_stats("once").end_index == before, "what was stored is not stored again"
