"""The bytes of records: as the docstring says, and nothing damaged gets through."""

import pytest

from magnetar.metadata import records
from magnetar.metadata.records import (
    AuditorRecord,
    BalancerRecord,
    BookieRecord,
    BrokerRecord,
    ClusterRecord,
    CookieRecord,
    CoordinatorRecord,
    CounterRecord,
    CursorRecord,
    DamagedEntriesRecord,
    DamagedRecord,
    DeletedLedgersRecord,
    DepartingRecord,
    DrainRecord,
    Fragment,
    GrantsRecord,
    Incarnation,
    IncarnationsRecord,
    LedgerRecord,
    MemberRecord,
    MetadataRecord,
    NamespaceRecord,
    OwnerRecord,
    PartitionedRecord,
    PoliciesRecord,
    RacksRecord,
    RebalanceRecord,
    RepairLockRecord,
    RepairSettingsRecord,
    RepairWorkerRecord,
    Schedule,
    ScheduleProgressRecord,
    SchedulesRecord,
    SchemaEntry,
    SchemaListRecord,
    SchemaRecord,
    StartedBrokerRecord,
    TenantRecord,
    TopicLedger,
    TopicRecord,
    TransactionsRecord,
    UnderReplicatedRecord,
    decode_record,
    encode_record,
)
from magnetar.proto.checksum import crc32c
from magnetar.proto.errors import NewerFormat
from magnetar.proto.policies import Policies

EXAMPLES: list[MetadataRecord] = [
    SchedulesRecord(schedules=(
        Schedule(name="reports", id="9f", topic_ms=1, cron="0 9 * * MON", zone="Europe/Berlin", payload=b"\x00\xff",
                 key="ключ", properties={"a": "b"}, missed="last", created_ms=7, since_ms=8),
    )),
    ScheduleProgressRecord(id="9f", decided_ms=7, firing=(8, 9), partition=2, last_ledger=3, last_entry=4, log_end=70),
    ClusterRecord(instance="c0ffee"),
    CounterRecord(next=7),
    LedgerRecord(
        ledger_id=1 << 62, state=records.CLOSED, ensemble_size=3, write_quorum=3, ack_quorum=2, key=bytes(range(20)),
        token="t", fragments=(Fragment(0, ("a", "b", "c")), Fragment(17, ("a", "d", "c"))), last_entry=20, length=4711,
        created_ms=1, properties={"topic": "persistent://público/default/t"},
    ),
    CookieRecord(bookie="b", instance="c0ffee", directories=("/journal", "/ledgers"), starts=3, journal=2, offset=4096),
    BookieRecord(bookie="b", endpoint="127.0.0.1:1", read_only=True, limbo=True, fenced_upto=9),
    BrokerRecord(name="n", endpoint="h:1"),
    OwnerRecord(broker="n", endpoint="h:1"),
    TenantRecord(admin_roles=("root",)),
    NamespaceRecord(bundles=8, auto_topic_creation=False, is_creation_set=True),
    GrantsRecord(
        roles={"etl": ("produce",)}, topics={"persistent://a/b/c": {"web": ("consume",)}},
        subscriptions={"s": ("web",)}, prefix_mode=True,
    ),
    PoliciesRecord(
        policies=Policies(retention_minutes=-1, dead_letter_backoff_s=(1.0, 2.5)), properties={"owner": "ada"}
    ),
    SchemaListRecord(
        next=3, schemas=(SchemaEntry(version=2, fingerprint=bytes(32), created_ms=1, user="é", deleted=True),)
    ),
    SchemaRecord(type=4, name="AVRO", data=b"{}", properties={"k": "v"}),
    PartitionedRecord(partitions=4),
    TopicRecord(ledgers=(TopicLedger(ledger_id=1, first_index=0), TopicLedger(ledger_id=2, first_index=9))),
    DamagedEntriesRecord(ledger_id=1, bookie="b", ranges=((0, 0), (5, 9))),
    RacksRecord(racks={"b": "/row-1/rack-é"}),
    UnderReplicatedRecord(
        ledger_id=1, bookies={"b": "lost"}, since_ms=5, attempts=2, stuck="no", last_error="é", retry_ms=9
    ),
    RepairSettingsRecord(enabled=False),
    AuditorRecord(name="b", token="t", since_ms=1),
    RepairLockRecord(worker="b", token="t"),
    RepairWorkerRecord(name="b", bytes=1 << 40, working_on={"7": (1, 2)}),
    DepartingRecord(bookie="b", since_ms=3, forget=True),
    RebalanceRecord(share=0.5, used={"b": 7}, total={"b": 9}, moves={"7": (("b", "c", 5),)}),
    DrainRecord(broker="b", endpoint="h:1", since_ms=3),
    StartedBrokerRecord(broker="b", endpoint="h:1", seen_ms=3),
    BalancerRecord(broker="b", endpoint="h:1", token="t"),
    MemberRecord(role="bookie", name="host-1", key="ab" * 32),
    CursorRecord(mark_ledger=1, mark_entry=2, properties={"k": "v"}),
    TransactionsRecord(coordinators=16),
    DeletedLedgersRecord(page=3, ranges=((12288, 12290), (12299, 12299))),
    CoordinatorRecord(epoch=3, ledger_id=1 << 62, claim="t", idle=True),
    IncarnationsRecord(incarnations=(Incarnation(number=1, token="t", revision=7, restored=True),)),
]  # fmt: skip


def place(record: MetadataRecord) -> str:
    """A path at which the record may be."""
    named = records.PATH_OF_RECORD.get(type(record))
    return "/where" if named is None else named(record)


def test_the_example_of_the_format_byte_for_byte() -> None:
    assert (
        encode_record(CounterRecord(next=7), "/ids/ledger") == b"MR\x02\x02" + bytes.fromhex("ff6f6a53") + b'{"next":7}'
    )


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda record: type(record).__name__)
def test_every_record_comes_back_as_it_was(record: MetadataRecord) -> None:
    assert decode_record(encode_record(record, place(record)), type(record), place(record)) == record


def test_every_kind_has_an_example() -> None:
    assert {type(record) for record in EXAMPLES} == set(records._KINDS.values())


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda record: type(record).__name__)
def test_a_record_cut_at_any_byte_is_damaged(record: MetadataRecord) -> None:
    data = encode_record(record, place(record))
    for size in range(len(data)):
        with pytest.raises(DamagedRecord, match=place(record)):
            decode_record(data[:size], type(record), place(record))


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda record: type(record).__name__)
def test_a_record_with_any_bit_flipped_is_damaged(record: MetadataRecord) -> None:
    data = encode_record(record, place(record))
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DamagedRecord):
            decode_record(bytes(flipped), type(record), place(record))


def test_another_kind_and_a_newer_version_are_refused_by_name() -> None:
    with pytest.raises(DamagedRecord, match="a CounterRecord, not a TopicRecord"):
        decode_record(encode_record(CounterRecord(next=1), "/where"), TopicRecord, "/where")
    data = bytearray(encode_record(CounterRecord(next=1), "/where"))
    data[2] = 3
    with pytest.raises(DamagedRecord, match=r"version 3; .* upgrade"):
        decode_record(bytes(data), CounterRecord, "/where")


def test_fields_of_a_newer_writer_are_ignored_and_missing_ones_have_their_defaults() -> None:
    def raw(body: bytes) -> bytes:
        return b"MR\x01\x08" + crc32c(body).to_bytes(4, "big") + body

    assert decode_record(raw(b'{"admin_roles":["a"],"new":1}'), TenantRecord, "/where") == TenantRecord(
        admin_roles=("a",)
    )
    for body in (b'{"admin_roles":1}', b"[]", b"", b'{"a"', b"\xff"):
        with pytest.raises(DamagedRecord):
            decode_record(raw(body), TenantRecord, "/where")


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda record: type(record).__name__)
def test_a_record_is_damaged_at_every_path_that_differs_from_its_own_in_a_bit(record: MetadataRecord) -> None:
    path = place(record)
    data = encode_record(record, path)
    for bit in range(7 * len(path)):
        at, flip = bit // 7, 1 << bit % 7
        other = path[:at] + chr(ord(path[at]) ^ flip) + path[at + 1 :]
        with pytest.raises(DamagedRecord):
            decode_record(data, type(record), other)


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda record: type(record).__name__)
def test_a_record_of_version_1_is_read_and_only_at_the_path_of_the_ledger_or_bookie_that_it_names(
    record: MetadataRecord,
) -> None:
    data = encode_record(record, "")  # the checksum of the body alone
    data = data[:2] + b"\x01" + data[3:]
    assert decode_record(data, type(record), place(record)) == record
    if type(record) in records.PATH_OF_RECORD:
        with pytest.raises(DamagedRecord, match=f"the record of {place(record)}"):
            decode_record(data, type(record), "/elsewhere")


def test_a_process_writes_the_format_that_its_cluster_had_when_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records._Written, "settled", False)
    monkeypatch.setattr(records._Written, "format", records.CLUSTER_FORMAT)
    with pytest.raises(NewerFormat, match=r"format 3; .* upgrade this process"):
        records.set_written_format(records.CLUSTER_FORMAT + 1)
    records.set_written_format(1)
    assert not any(records.may_write_feature(feature) for feature in records.Feature)
    before = encode_record(CounterRecord(next=7), "/ids/ledger")
    assert before == b"MR\x01\x02" + bytes.fromhex("2a9661f6") + b'{"next":7}', "as the Magnetar before wrote it"
    assert decode_record(before, CounterRecord, "/ids/ledger") == CounterRecord(next=7)
    records.set_written_format(2)  # raised while the process runs
    assert encode_record(CounterRecord(next=7), "/ids/ledger") == before
