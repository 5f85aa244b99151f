from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TransactionState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OPEN: _ClassVar[TransactionState]
    PREPARED: _ClassVar[TransactionState]
    COMMITTED: _ClassVar[TransactionState]
    ABORTED: _ClassVar[TransactionState]

class ForgottenOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NOT_FORGOTTEN: _ClassVar[ForgottenOutcome]
    DISCARDED: _ClassVar[ForgottenOutcome]
OPEN: TransactionState
PREPARED: TransactionState
COMMITTED: TransactionState
ABORTED: TransactionState
NOT_FORGOTTEN: ForgottenOutcome
DISCARDED: ForgottenOutcome

class Error(_message.Message):
    __slots__ = ("code", "message", "fields")
    class FieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    fields: _containers.ScalarMap[str, str]
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., fields: _Optional[_Mapping[str, str]] = ...) -> None: ...

class MessageId(_message.Message):
    __slots__ = ("ledger_id", "entry_id", "partition", "batch_index")
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRY_ID_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    BATCH_INDEX_FIELD_NUMBER: _ClassVar[int]
    ledger_id: int
    entry_id: int
    partition: int
    batch_index: int
    def __init__(self, ledger_id: _Optional[int] = ..., entry_id: _Optional[int] = ..., partition: _Optional[int] = ..., batch_index: _Optional[int] = ...) -> None: ...

class Position(_message.Message):
    __slots__ = ("ledger_id", "entry_id")
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRY_ID_FIELD_NUMBER: _ClassVar[int]
    ledger_id: int
    entry_id: int
    def __init__(self, ledger_id: _Optional[int] = ..., entry_id: _Optional[int] = ...) -> None: ...

class Empty(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("topic", "listener")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    LISTENER_FIELD_NUMBER: _ClassVar[int]
    topic: str
    listener: str
    def __init__(self, topic: _Optional[str] = ..., listener: _Optional[str] = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("owner", "here")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    HERE_FIELD_NUMBER: _ClassVar[int]
    owner: str
    here: bool
    def __init__(self, owner: _Optional[str] = ..., here: bool = ...) -> None: ...

class PartitionsRequest(_message.Message):
    __slots__ = ("topic", "create")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    CREATE_FIELD_NUMBER: _ClassVar[int]
    topic: str
    create: bool
    def __init__(self, topic: _Optional[str] = ..., create: bool = ...) -> None: ...

class PartitionsReply(_message.Message):
    __slots__ = ("partitions", "owner")
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    partitions: int
    owner: LookupReply
    def __init__(self, partitions: _Optional[int] = ..., owner: _Optional[_Union[LookupReply, _Mapping]] = ...) -> None: ...

class ClientFrames(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[ClientFrame]
    def __init__(self, items: _Optional[_Iterable[_Union[ClientFrame, _Mapping]]] = ...) -> None: ...

class ServerFrames(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[ServerFrame]
    def __init__(self, items: _Optional[_Iterable[_Union[ServerFrame, _Mapping]]] = ...) -> None: ...

class ClientFrame(_message.Message):
    __slots__ = ("id", "open_producer", "publish", "subscribe", "permits", "ack", "redeliver", "seek", "unsubscribe", "last_message_id", "close", "probe", "commit", "progress")
    ID_FIELD_NUMBER: _ClassVar[int]
    OPEN_PRODUCER_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBE_FIELD_NUMBER: _ClassVar[int]
    PERMITS_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    REDELIVER_FIELD_NUMBER: _ClassVar[int]
    SEEK_FIELD_NUMBER: _ClassVar[int]
    UNSUBSCRIBE_FIELD_NUMBER: _ClassVar[int]
    LAST_MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    id: int
    open_producer: OpenProducer
    publish: bytes
    subscribe: Subscribe
    permits: int
    ack: Ack
    redeliver: Redeliver
    seek: Seek
    unsubscribe: int
    last_message_id: int
    close: int
    probe: int
    commit: Commit
    progress: int
    def __init__(self, id: _Optional[int] = ..., open_producer: _Optional[_Union[OpenProducer, _Mapping]] = ..., publish: _Optional[bytes] = ..., subscribe: _Optional[_Union[Subscribe, _Mapping]] = ..., permits: _Optional[int] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., redeliver: _Optional[_Union[Redeliver, _Mapping]] = ..., seek: _Optional[_Union[Seek, _Mapping]] = ..., unsubscribe: _Optional[int] = ..., last_message_id: _Optional[int] = ..., close: _Optional[int] = ..., probe: _Optional[int] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., progress: _Optional[int] = ...) -> None: ...

class ServerFrame(_message.Message):
    __slots__ = ("id", "producer_opened", "receipt", "failed", "credit", "subscribed", "delivery", "deliveries", "done", "last", "end_of_topic", "active", "closed", "waits", "probed", "progress", "first_copy")
    ID_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_OPENED_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIBED_FIELD_NUMBER: _ClassVar[int]
    DELIVERY_FIELD_NUMBER: _ClassVar[int]
    DELIVERIES_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    END_OF_TOPIC_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    WAITS_FIELD_NUMBER: _ClassVar[int]
    PROBED_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    FIRST_COPY_FIELD_NUMBER: _ClassVar[int]
    id: int
    producer_opened: ProducerOpened
    receipt: Receipt
    failed: PublishFailed
    credit: int
    subscribed: Subscribed
    delivery: Delivery
    deliveries: Deliveries
    done: Done
    last: LastMessageId
    end_of_topic: Empty
    active: bool
    closed: Error
    waits: Error
    probed: Probed
    progress: Progress
    first_copy: int
    def __init__(self, id: _Optional[int] = ..., producer_opened: _Optional[_Union[ProducerOpened, _Mapping]] = ..., receipt: _Optional[_Union[Receipt, _Mapping]] = ..., failed: _Optional[_Union[PublishFailed, _Mapping]] = ..., credit: _Optional[int] = ..., subscribed: _Optional[_Union[Subscribed, _Mapping]] = ..., delivery: _Optional[_Union[Delivery, _Mapping]] = ..., deliveries: _Optional[_Union[Deliveries, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ..., last: _Optional[_Union[LastMessageId, _Mapping]] = ..., end_of_topic: _Optional[_Union[Empty, _Mapping]] = ..., active: bool = ..., closed: _Optional[_Union[Error, _Mapping]] = ..., waits: _Optional[_Union[Error, _Mapping]] = ..., probed: _Optional[_Union[Probed, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., first_copy: _Optional[int] = ...) -> None: ...

class OpenProducer(_message.Message):
    __slots__ = ("topic", "producer_name", "access_mode", "properties", "instance", "connection", "initial_subscription", "topic_epoch", "schema", "hears_waits", "existing_only", "waits_for_nothing", "hears_first_copies", "copies")
    class AccessMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        SHARED: _ClassVar[OpenProducer.AccessMode]
        EXCLUSIVE: _ClassVar[OpenProducer.AccessMode]
        WAIT_FOR_EXCLUSIVE: _ClassVar[OpenProducer.AccessMode]
        EXCLUSIVE_WITH_FENCING: _ClassVar[OpenProducer.AccessMode]
    SHARED: OpenProducer.AccessMode
    EXCLUSIVE: OpenProducer.AccessMode
    WAIT_FOR_EXCLUSIVE: OpenProducer.AccessMode
    EXCLUSIVE_WITH_FENCING: OpenProducer.AccessMode
    class PropertiesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_NAME_FIELD_NUMBER: _ClassVar[int]
    ACCESS_MODE_FIELD_NUMBER: _ClassVar[int]
    PROPERTIES_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    INITIAL_SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    TOPIC_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    HEARS_WAITS_FIELD_NUMBER: _ClassVar[int]
    EXISTING_ONLY_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_NOTHING_FIELD_NUMBER: _ClassVar[int]
    HEARS_FIRST_COPIES_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    topic: str
    producer_name: str
    access_mode: OpenProducer.AccessMode
    properties: _containers.ScalarMap[str, str]
    instance: str
    connection: int
    initial_subscription: str
    topic_epoch: int
    schema: SchemaInfo
    hears_waits: bool
    existing_only: bool
    waits_for_nothing: bool
    hears_first_copies: bool
    copies: bool
    def __init__(self, topic: _Optional[str] = ..., producer_name: _Optional[str] = ..., access_mode: _Optional[_Union[OpenProducer.AccessMode, str]] = ..., properties: _Optional[_Mapping[str, str]] = ..., instance: _Optional[str] = ..., connection: _Optional[int] = ..., initial_subscription: _Optional[str] = ..., topic_epoch: _Optional[int] = ..., schema: _Optional[_Union[SchemaInfo, _Mapping]] = ..., hears_waits: bool = ..., existing_only: bool = ..., waits_for_nothing: bool = ..., hears_first_copies: bool = ..., copies: bool = ...) -> None: ...

class ProducerOpened(_message.Message):
    __slots__ = ("producer_name", "last_sequence_id", "max_message_size", "credit", "topic_epoch", "schema_version", "redrives_to_one")
    PRODUCER_NAME_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    TOPIC_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_VERSION_FIELD_NUMBER: _ClassVar[int]
    REDRIVES_TO_ONE_FIELD_NUMBER: _ClassVar[int]
    producer_name: str
    last_sequence_id: int
    max_message_size: int
    credit: int
    topic_epoch: int
    schema_version: bytes
    redrives_to_one: bool
    def __init__(self, producer_name: _Optional[str] = ..., last_sequence_id: _Optional[int] = ..., max_message_size: _Optional[int] = ..., credit: _Optional[int] = ..., topic_epoch: _Optional[int] = ..., schema_version: _Optional[bytes] = ..., redrives_to_one: bool = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("sequence_id", "ledger_id", "entry_id", "index", "duplicate")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRY_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    ledger_id: int
    entry_id: int
    index: int
    duplicate: bool
    def __init__(self, sequence_id: _Optional[int] = ..., ledger_id: _Optional[int] = ..., entry_id: _Optional[int] = ..., index: _Optional[int] = ..., duplicate: bool = ...) -> None: ...

class PublishFailed(_message.Message):
    __slots__ = ("sequence_id", "error")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    error: Error
    def __init__(self, sequence_id: _Optional[int] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class Subscribe(_message.Message):
    __slots__ = ("topic", "subscription", "type", "initial_position", "consumer_name", "durable", "start", "start_inclusive", "properties", "priority_level", "subscription_properties", "read_compacted", "existing_only", "instance", "key_shared", "many_topics", "schema", "redelivery_order", "isolation", "incarnation", "says_last", "start_time_ms", "acknowledges")
    class Type(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        EXCLUSIVE: _ClassVar[Subscribe.Type]
        SHARED: _ClassVar[Subscribe.Type]
        FAILOVER: _ClassVar[Subscribe.Type]
        KEY_SHARED: _ClassVar[Subscribe.Type]
    EXCLUSIVE: Subscribe.Type
    SHARED: Subscribe.Type
    FAILOVER: Subscribe.Type
    KEY_SHARED: Subscribe.Type
    class InitialPosition(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        LATEST: _ClassVar[Subscribe.InitialPosition]
        EARLIEST: _ClassVar[Subscribe.InitialPosition]
    LATEST: Subscribe.InitialPosition
    EARLIEST: Subscribe.InitialPosition
    class Isolation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        READ_COMMITTED: _ClassVar[Subscribe.Isolation]
        READ_UNCOMMITTED: _ClassVar[Subscribe.Isolation]
    READ_COMMITTED: Subscribe.Isolation
    READ_UNCOMMITTED: Subscribe.Isolation
    class RedeliveryOrder(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        ANY: _ClassVar[Subscribe.RedeliveryOrder]
        KEY: _ClassVar[Subscribe.RedeliveryOrder]
    ANY: Subscribe.RedeliveryOrder
    KEY: Subscribe.RedeliveryOrder
    class PropertiesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class SubscriptionPropertiesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    INITIAL_POSITION_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_NAME_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    START_INCLUSIVE_FIELD_NUMBER: _ClassVar[int]
    PROPERTIES_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_LEVEL_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_PROPERTIES_FIELD_NUMBER: _ClassVar[int]
    READ_COMPACTED_FIELD_NUMBER: _ClassVar[int]
    EXISTING_ONLY_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    KEY_SHARED_FIELD_NUMBER: _ClassVar[int]
    MANY_TOPICS_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REDELIVERY_ORDER_FIELD_NUMBER: _ClassVar[int]
    ISOLATION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SAYS_LAST_FIELD_NUMBER: _ClassVar[int]
    START_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGES_FIELD_NUMBER: _ClassVar[int]
    topic: str
    subscription: str
    type: Subscribe.Type
    initial_position: Subscribe.InitialPosition
    consumer_name: str
    durable: bool
    start: MessageId
    start_inclusive: bool
    properties: _containers.ScalarMap[str, str]
    priority_level: int
    subscription_properties: _containers.ScalarMap[str, str]
    read_compacted: bool
    existing_only: bool
    instance: str
    key_shared: KeySharedPolicy
    many_topics: bool
    schema: SchemaInfo
    redelivery_order: Subscribe.RedeliveryOrder
    isolation: Subscribe.Isolation
    incarnation: int
    says_last: bool
    start_time_ms: int
    acknowledges: bool
    def __init__(self, topic: _Optional[str] = ..., subscription: _Optional[str] = ..., type: _Optional[_Union[Subscribe.Type, str]] = ..., initial_position: _Optional[_Union[Subscribe.InitialPosition, str]] = ..., consumer_name: _Optional[str] = ..., durable: bool = ..., start: _Optional[_Union[MessageId, _Mapping]] = ..., start_inclusive: bool = ..., properties: _Optional[_Mapping[str, str]] = ..., priority_level: _Optional[int] = ..., subscription_properties: _Optional[_Mapping[str, str]] = ..., read_compacted: bool = ..., existing_only: bool = ..., instance: _Optional[str] = ..., key_shared: _Optional[_Union[KeySharedPolicy, _Mapping]] = ..., many_topics: bool = ..., schema: _Optional[_Union[SchemaInfo, _Mapping]] = ..., redelivery_order: _Optional[_Union[Subscribe.RedeliveryOrder, str]] = ..., isolation: _Optional[_Union[Subscribe.Isolation, str]] = ..., incarnation: _Optional[int] = ..., says_last: bool = ..., start_time_ms: _Optional[int] = ..., acknowledges: bool = ...) -> None: ...

class SchemaInfo(_message.Message):
    __slots__ = ("type", "data", "name", "properties")
    class PropertiesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TYPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROPERTIES_FIELD_NUMBER: _ClassVar[int]
    type: int
    data: bytes
    name: str
    properties: _containers.ScalarMap[str, str]
    def __init__(self, type: _Optional[int] = ..., data: _Optional[bytes] = ..., name: _Optional[str] = ..., properties: _Optional[_Mapping[str, str]] = ...) -> None: ...

class KeySharedPolicy(_message.Message):
    __slots__ = ("mode", "ranges", "allow_out_of_order_delivery")
    class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        AUTO_SPLIT: _ClassVar[KeySharedPolicy.Mode]
        STICKY: _ClassVar[KeySharedPolicy.Mode]
    AUTO_SPLIT: KeySharedPolicy.Mode
    STICKY: KeySharedPolicy.Mode
    MODE_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    ALLOW_OUT_OF_ORDER_DELIVERY_FIELD_NUMBER: _ClassVar[int]
    mode: KeySharedPolicy.Mode
    ranges: _containers.RepeatedCompositeFieldContainer[SlotRange]
    allow_out_of_order_delivery: bool
    def __init__(self, mode: _Optional[_Union[KeySharedPolicy.Mode, str]] = ..., ranges: _Optional[_Iterable[_Union[SlotRange, _Mapping]]] = ..., allow_out_of_order_delivery: bool = ...) -> None: ...

class SlotRange(_message.Message):
    __slots__ = ("first", "last")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    first: int
    last: int
    def __init__(self, first: _Optional[int] = ..., last: _Optional[int] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("kind", "entries", "request_id", "ledgers", "txn")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        INDIVIDUAL: _ClassVar[Ack.Kind]
        CUMULATIVE: _ClassVar[Ack.Kind]
    INDIVIDUAL: Ack.Kind
    CUMULATIVE: Ack.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LEDGERS_FIELD_NUMBER: _ClassVar[int]
    TXN_FIELD_NUMBER: _ClassVar[int]
    kind: Ack.Kind
    entries: _containers.RepeatedCompositeFieldContainer[AckedEntry]
    request_id: int
    ledgers: _containers.RepeatedCompositeFieldContainer[EntrySet]
    txn: TransactionId
    def __init__(self, kind: _Optional[_Union[Ack.Kind, str]] = ..., entries: _Optional[_Iterable[_Union[AckedEntry, _Mapping]]] = ..., request_id: _Optional[int] = ..., ledgers: _Optional[_Iterable[_Union[EntrySet, _Mapping]]] = ..., txn: _Optional[_Union[TransactionId, _Mapping]] = ...) -> None: ...

class EntrySet(_message.Message):
    __slots__ = ("ledger_id", "entries")
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    ledger_id: int
    entries: bytes
    def __init__(self, ledger_id: _Optional[int] = ..., entries: _Optional[bytes] = ...) -> None: ...

class AckedEntry(_message.Message):
    __slots__ = ("ledger_id", "entry_id", "batch_indexes", "batch_bits")
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRY_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_INDEXES_FIELD_NUMBER: _ClassVar[int]
    BATCH_BITS_FIELD_NUMBER: _ClassVar[int]
    ledger_id: int
    entry_id: int
    batch_indexes: _containers.RepeatedScalarFieldContainer[int]
    batch_bits: bytes
    def __init__(self, ledger_id: _Optional[int] = ..., entry_id: _Optional[int] = ..., batch_indexes: _Optional[_Iterable[int]] = ..., batch_bits: _Optional[bytes] = ...) -> None: ...

class Redeliver(_message.Message):
    __slots__ = ("entries", "ledgers", "uncounted", "request_id", "failures")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    LEDGERS_FIELD_NUMBER: _ClassVar[int]
    UNCOUNTED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[Position]
    ledgers: _containers.RepeatedCompositeFieldContainer[EntrySet]
    uncounted: bool
    request_id: int
    failures: _containers.RepeatedCompositeFieldContainer[Failure]
    def __init__(self, entries: _Optional[_Iterable[_Union[Position, _Mapping]]] = ..., ledgers: _Optional[_Iterable[_Union[EntrySet, _Mapping]]] = ..., uncounted: bool = ..., request_id: _Optional[int] = ..., failures: _Optional[_Iterable[_Union[Failure, _Mapping]]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("ledger_id", "entry_id", "error", "message", "traceback", "consumer")
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRY_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TRACEBACK_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    ledger_id: int
    entry_id: int
    error: str
    message: str
    traceback: str
    consumer: str
    def __init__(self, ledger_id: _Optional[int] = ..., entry_id: _Optional[int] = ..., error: _Optional[str] = ..., message: _Optional[str] = ..., traceback: _Optional[str] = ..., consumer: _Optional[str] = ...) -> None: ...

class Seek(_message.Message):
    __slots__ = ("request_id", "message_id", "publish_time_ms", "index")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    message_id: MessageId
    publish_time_ms: int
    index: int
    def __init__(self, request_id: _Optional[int] = ..., message_id: _Optional[_Union[MessageId, _Mapping]] = ..., publish_time_ms: _Optional[int] = ..., index: _Optional[int] = ...) -> None: ...

class Deliveries(_message.Message):
    __slots__ = ("ledger_id", "entry_ids", "entries")
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRY_IDS_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    ledger_id: int
    entry_ids: _containers.RepeatedScalarFieldContainer[int]
    entries: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, ledger_id: _Optional[int] = ..., entry_ids: _Optional[_Iterable[int]] = ..., entries: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Subscribed(_message.Message):
    __slots__ = ("consumer_name", "compacted_end_index", "incarnation", "start", "filter", "level")
    CONSUMER_NAME_FIELD_NUMBER: _ClassVar[int]
    COMPACTED_END_INDEX_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    consumer_name: str
    compacted_end_index: int
    incarnation: int
    start: MessageId
    filter: str
    level: int
    def __init__(self, consumer_name: _Optional[str] = ..., compacted_end_index: _Optional[int] = ..., incarnation: _Optional[int] = ..., start: _Optional[_Union[MessageId, _Mapping]] = ..., filter: _Optional[str] = ..., level: _Optional[int] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("request_id", "index", "note")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    index: int
    note: bytes
    def __init__(self, request_id: _Optional[int] = ..., index: _Optional[int] = ..., note: _Optional[bytes] = ...) -> None: ...

class Probed(_message.Message):
    __slots__ = ("request_id", "end_index", "why")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    END_INDEX_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    end_index: int
    why: str
    def __init__(self, request_id: _Optional[int] = ..., end_index: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("request_id", "earliest_index", "position", "end_index", "note", "incarnation")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EARLIEST_INDEX_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    END_INDEX_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    earliest_index: int
    position: int
    end_index: int
    note: bytes
    incarnation: int
    def __init__(self, request_id: _Optional[int] = ..., earliest_index: _Optional[int] = ..., position: _Optional[int] = ..., end_index: _Optional[int] = ..., note: _Optional[bytes] = ..., incarnation: _Optional[int] = ...) -> None: ...

class Delivery(_message.Message):
    __slots__ = ("ledger_id", "entry_id", "redelivery_count", "acked_batch_indexes", "entry", "broker_ms", "failure")
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRY_ID_FIELD_NUMBER: _ClassVar[int]
    REDELIVERY_COUNT_FIELD_NUMBER: _ClassVar[int]
    ACKED_BATCH_INDEXES_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    BROKER_MS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    ledger_id: int
    entry_id: int
    redelivery_count: int
    acked_batch_indexes: _containers.RepeatedScalarFieldContainer[int]
    entry: bytes
    broker_ms: int
    failure: Failure
    def __init__(self, ledger_id: _Optional[int] = ..., entry_id: _Optional[int] = ..., redelivery_count: _Optional[int] = ..., acked_batch_indexes: _Optional[_Iterable[int]] = ..., entry: _Optional[bytes] = ..., broker_ms: _Optional[int] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("request_id", "error", "start")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    error: Error
    start: MessageId
    def __init__(self, request_id: _Optional[int] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., start: _Optional[_Union[MessageId, _Mapping]] = ...) -> None: ...

class LastMessageId(_message.Message):
    __slots__ = ("request_id", "id", "index", "mark_delete")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    MARK_DELETE_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    id: MessageId
    index: int
    mark_delete: MessageId
    def __init__(self, request_id: _Optional[int] = ..., id: _Optional[_Union[MessageId, _Mapping]] = ..., index: _Optional[int] = ..., mark_delete: _Optional[_Union[MessageId, _Mapping]] = ...) -> None: ...

class ReadRequests(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[ReadRequest]
    def __init__(self, items: _Optional[_Iterable[_Union[ReadRequest, _Mapping]]] = ...) -> None: ...

class ReadReplies(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[ReadReply]
    def __init__(self, items: _Optional[_Iterable[_Union[ReadReply, _Mapping]]] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("request_id", "topic", "first_index", "end_index", "bytes_max", "incarnation")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    END_INDEX_FIELD_NUMBER: _ClassVar[int]
    BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    topic: str
    first_index: int
    end_index: int
    bytes_max: int
    incarnation: int
    def __init__(self, request_id: _Optional[int] = ..., topic: _Optional[str] = ..., first_index: _Optional[int] = ..., end_index: _Optional[int] = ..., bytes_max: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class ReadReply(_message.Message):
    __slots__ = ("request_id", "entry", "done")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    entry: Delivery
    done: ReadDone
    def __init__(self, request_id: _Optional[int] = ..., entry: _Optional[_Union[Delivery, _Mapping]] = ..., done: _Optional[_Union[ReadDone, _Mapping]] = ...) -> None: ...

class ReadDone(_message.Message):
    __slots__ = ("next_index", "error")
    NEXT_INDEX_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    next_index: int
    error: Error
    def __init__(self, next_index: _Optional[int] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class WatchTopicsRequests(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[WatchTopicsRequest]
    def __init__(self, items: _Optional[_Iterable[_Union[WatchTopicsRequest, _Mapping]]] = ...) -> None: ...

class WatchTopicsReplies(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[WatchTopicsReply]
    def __init__(self, items: _Optional[_Iterable[_Union[WatchTopicsReply, _Mapping]]] = ...) -> None: ...

class WatchTopicsRequest(_message.Message):
    __slots__ = ("namespace", "after_revision")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    AFTER_REVISION_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    after_revision: int
    def __init__(self, namespace: _Optional[str] = ..., after_revision: _Optional[int] = ...) -> None: ...

class WatchTopicsReply(_message.Message):
    __slots__ = ("topics", "added", "removed", "revision")
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    topics: Names
    added: str
    removed: str
    revision: int
    def __init__(self, topics: _Optional[_Union[Names, _Mapping]] = ..., added: _Optional[str] = ..., removed: _Optional[str] = ..., revision: _Optional[int] = ...) -> None: ...

class OffsetsRequest(_message.Message):
    __slots__ = ("topic", "publish_times_ms", "subscription", "aborted_first", "aborted_end", "incarnation")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_TIMES_MS_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIRST_FIELD_NUMBER: _ClassVar[int]
    ABORTED_END_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    topic: str
    publish_times_ms: _containers.RepeatedScalarFieldContainer[int]
    subscription: str
    aborted_first: int
    aborted_end: int
    incarnation: int
    def __init__(self, topic: _Optional[str] = ..., publish_times_ms: _Optional[_Iterable[int]] = ..., subscription: _Optional[str] = ..., aborted_first: _Optional[int] = ..., aborted_end: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class OffsetsReply(_message.Message):
    __slots__ = ("earliest_index", "end_index", "by_time", "bytes", "subscription_index", "aborted", "incarnation")
    EARLIEST_INDEX_FIELD_NUMBER: _ClassVar[int]
    END_INDEX_FIELD_NUMBER: _ClassVar[int]
    BY_TIME_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_INDEX_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    earliest_index: int
    end_index: int
    by_time: _containers.RepeatedScalarFieldContainer[int]
    bytes: int
    subscription_index: int
    aborted: int
    incarnation: int
    def __init__(self, earliest_index: _Optional[int] = ..., end_index: _Optional[int] = ..., by_time: _Optional[_Iterable[int]] = ..., bytes: _Optional[int] = ..., subscription_index: _Optional[int] = ..., aborted: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class AdvanceSubscriptionRequest(_message.Message):
    __slots__ = ("topic", "subscription", "index", "incarnation")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    topic: str
    subscription: str
    index: int
    incarnation: int
    def __init__(self, topic: _Optional[str] = ..., subscription: _Optional[str] = ..., index: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class TransactionId(_message.Message):
    __slots__ = ("most", "least")
    MOST_FIELD_NUMBER: _ClassVar[int]
    LEAST_FIELD_NUMBER: _ClassVar[int]
    most: int
    least: int
    def __init__(self, most: _Optional[int] = ..., least: _Optional[int] = ...) -> None: ...

class FindCoordinator(_message.Message):
    __slots__ = ("coordinator", "listener")
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    LISTENER_FIELD_NUMBER: _ClassVar[int]
    coordinator: int
    listener: str
    def __init__(self, coordinator: _Optional[int] = ..., listener: _Optional[str] = ...) -> None: ...

class CoordinatorReply(_message.Message):
    __slots__ = ("owner", "here", "coordinators")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    HERE_FIELD_NUMBER: _ClassVar[int]
    COORDINATORS_FIELD_NUMBER: _ClassVar[int]
    owner: str
    here: bool
    coordinators: int
    def __init__(self, owner: _Optional[str] = ..., here: bool = ..., coordinators: _Optional[int] = ...) -> None: ...

class BeginRequest(_message.Message):
    __slots__ = ("coordinator", "count", "timeout_ms", "name", "sink", "holder")
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SINK_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    coordinator: int
    count: int
    timeout_ms: int
    name: str
    sink: SinkTag
    holder: int
    def __init__(self, coordinator: _Optional[int] = ..., count: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., name: _Optional[str] = ..., sink: _Optional[_Union[SinkTag, _Mapping]] = ..., holder: _Optional[int] = ...) -> None: ...

class SinkTag(_message.Message):
    __slots__ = ("sink_id", "query_id", "batch", "run", "adopt")
    SINK_ID_FIELD_NUMBER: _ClassVar[int]
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    ADOPT_FIELD_NUMBER: _ClassVar[int]
    sink_id: str
    query_id: str
    batch: int
    run: str
    adopt: bool
    def __init__(self, sink_id: _Optional[str] = ..., query_id: _Optional[str] = ..., batch: _Optional[int] = ..., run: _Optional[str] = ..., adopt: bool = ...) -> None: ...

class BeginReply(_message.Message):
    __slots__ = ("first", "count", "lease_ms", "already", "holder")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    ALREADY_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    first: TransactionId
    count: int
    lease_ms: int
    already: bool
    holder: int
    def __init__(self, first: _Optional[_Union[TransactionId, _Mapping]] = ..., count: _Optional[int] = ..., lease_ms: _Optional[int] = ..., already: bool = ..., holder: _Optional[int] = ...) -> None: ...

class Participant(_message.Message):
    __slots__ = ("topic", "entries", "last")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    topic: str
    entries: int
    last: Position
    def __init__(self, topic: _Optional[str] = ..., entries: _Optional[int] = ..., last: _Optional[_Union[Position, _Mapping]] = ...) -> None: ...

class EndItem(_message.Message):
    __slots__ = ("txn", "verb", "participants", "prepared_ms", "visible")
    class Verb(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        COMMIT: _ClassVar[EndItem.Verb]
        ABORT: _ClassVar[EndItem.Verb]
        PREPARE: _ClassVar[EndItem.Verb]
    COMMIT: EndItem.Verb
    ABORT: EndItem.Verb
    PREPARE: EndItem.Verb
    TXN_FIELD_NUMBER: _ClassVar[int]
    VERB_FIELD_NUMBER: _ClassVar[int]
    PARTICIPANTS_FIELD_NUMBER: _ClassVar[int]
    PREPARED_MS_FIELD_NUMBER: _ClassVar[int]
    VISIBLE_FIELD_NUMBER: _ClassVar[int]
    txn: TransactionId
    verb: EndItem.Verb
    participants: _containers.RepeatedCompositeFieldContainer[Participant]
    prepared_ms: int
    visible: bool
    def __init__(self, txn: _Optional[_Union[TransactionId, _Mapping]] = ..., verb: _Optional[_Union[EndItem.Verb, str]] = ..., participants: _Optional[_Iterable[_Union[Participant, _Mapping]]] = ..., prepared_ms: _Optional[int] = ..., visible: bool = ...) -> None: ...

class EndRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[EndItem]
    def __init__(self, items: _Optional[_Iterable[_Union[EndItem, _Mapping]]] = ...) -> None: ...

class TransactionReply(_message.Message):
    __slots__ = ("txn", "state", "error", "settlement", "forgotten")
    TXN_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SETTLEMENT_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    txn: TransactionId
    state: TransactionState
    error: Error
    settlement: Settlement
    forgotten: ForgottenOutcome
    def __init__(self, txn: _Optional[_Union[TransactionId, _Mapping]] = ..., state: _Optional[_Union[TransactionState, str]] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., settlement: _Optional[_Union[Settlement, _Mapping]] = ..., forgotten: _Optional[_Union[ForgottenOutcome, str]] = ...) -> None: ...

class EndReply(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[TransactionReply]
    def __init__(self, items: _Optional[_Iterable[_Union[TransactionReply, _Mapping]]] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("txns",)
    TXNS_FIELD_NUMBER: _ClassVar[int]
    txns: _containers.RepeatedCompositeFieldContainer[TransactionId]
    def __init__(self, txns: _Optional[_Iterable[_Union[TransactionId, _Mapping]]] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[TransactionReply]
    def __init__(self, items: _Optional[_Iterable[_Union[TransactionReply, _Mapping]]] = ...) -> None: ...

class CommitBatchRequest(_message.Message):
    __slots__ = ("sink", "items", "coordinator")
    SINK_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    sink: SinkTag
    items: _containers.RepeatedCompositeFieldContainer[EndItem]
    coordinator: int
    def __init__(self, sink: _Optional[_Union[SinkTag, _Mapping]] = ..., items: _Optional[_Iterable[_Union[EndItem, _Mapping]]] = ..., coordinator: _Optional[int] = ...) -> None: ...

class CommitBatchReply(_message.Message):
    __slots__ = ("already",)
    ALREADY_FIELD_NUMBER: _ClassVar[int]
    already: bool
    def __init__(self, already: bool = ...) -> None: ...

class SinkRequest(_message.Message):
    __slots__ = ("coordinator", "sink_id")
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    SINK_ID_FIELD_NUMBER: _ClassVar[int]
    coordinator: int
    sink_id: str
    def __init__(self, coordinator: _Optional[int] = ..., sink_id: _Optional[str] = ...) -> None: ...

class SinkReply(_message.Message):
    __slots__ = ("known", "query_id", "batch")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    known: bool
    query_id: str
    batch: int
    def __init__(self, known: bool = ..., query_id: _Optional[str] = ..., batch: _Optional[int] = ...) -> None: ...

class HalfMessage(_message.Message):
    __slots__ = ("topic", "entry")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    topic: str
    entry: bytes
    def __init__(self, topic: _Optional[str] = ..., entry: _Optional[bytes] = ...) -> None: ...

class HalfRequest(_message.Message):
    __slots__ = ("half", "group", "check_key", "messages", "check_after_ms")
    HALF_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    CHECK_KEY_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    CHECK_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    half: TransactionId
    group: str
    check_key: str
    messages: _containers.RepeatedCompositeFieldContainer[HalfMessage]
    check_after_ms: int
    def __init__(self, half: _Optional[_Union[TransactionId, _Mapping]] = ..., group: _Optional[str] = ..., check_key: _Optional[str] = ..., messages: _Optional[_Iterable[_Union[HalfMessage, _Mapping]]] = ..., check_after_ms: _Optional[int] = ...) -> None: ...

class HalfReply(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: TransactionState
    def __init__(self, state: _Optional[_Union[TransactionState, str]] = ...) -> None: ...

class EndHalfRequest(_message.Message):
    __slots__ = ("half", "verb", "check", "why")
    class Verb(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        COMMIT: _ClassVar[EndHalfRequest.Verb]
        ROLLBACK: _ClassVar[EndHalfRequest.Verb]
        UNKNOWN: _ClassVar[EndHalfRequest.Verb]
        FAILED: _ClassVar[EndHalfRequest.Verb]
    COMMIT: EndHalfRequest.Verb
    ROLLBACK: EndHalfRequest.Verb
    UNKNOWN: EndHalfRequest.Verb
    FAILED: EndHalfRequest.Verb
    HALF_FIELD_NUMBER: _ClassVar[int]
    VERB_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    half: TransactionId
    verb: EndHalfRequest.Verb
    check: int
    why: str
    def __init__(self, half: _Optional[_Union[TransactionId, _Mapping]] = ..., verb: _Optional[_Union[EndHalfRequest.Verb, str]] = ..., check: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class WatchHalvesItems(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[WatchHalvesItem]
    def __init__(self, items: _Optional[_Iterable[_Union[WatchHalvesItem, _Mapping]]] = ...) -> None: ...

class WatchHalvesItem(_message.Message):
    __slots__ = ("group",)
    GROUP_FIELD_NUMBER: _ClassVar[int]
    group: str
    def __init__(self, group: _Optional[str] = ...) -> None: ...

class HalfChecks(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[HalfCheck]
    def __init__(self, items: _Optional[_Iterable[_Union[HalfCheck, _Mapping]]] = ...) -> None: ...

class HalfCheck(_message.Message):
    __slots__ = ("half", "check", "check_key", "unknown", "age_ms", "answer_ms", "messages")
    HALF_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    CHECK_KEY_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_MS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    half: TransactionId
    check: int
    check_key: str
    unknown: int
    age_ms: int
    answer_ms: int
    messages: _containers.RepeatedCompositeFieldContainer[HalfMessage]
    def __init__(self, half: _Optional[_Union[TransactionId, _Mapping]] = ..., check: _Optional[int] = ..., check_key: _Optional[str] = ..., unknown: _Optional[int] = ..., age_ms: _Optional[int] = ..., answer_ms: _Optional[int] = ..., messages: _Optional[_Iterable[_Union[HalfMessage, _Mapping]]] = ...) -> None: ...

class JoinItem(_message.Message):
    __slots__ = ("txn", "topic", "owner")
    TXN_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    txn: TransactionId
    topic: str
    owner: str
    def __init__(self, txn: _Optional[_Union[TransactionId, _Mapping]] = ..., topic: _Optional[str] = ..., owner: _Optional[str] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[JoinItem]
    def __init__(self, items: _Optional[_Iterable[_Union[JoinItem, _Mapping]]] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[TransactionReply]
    def __init__(self, items: _Optional[_Iterable[_Union[TransactionReply, _Mapping]]] = ...) -> None: ...

class Settlement(_message.Message):
    __slots__ = ("txn", "topic", "committed", "entries", "last")
    TXN_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    txn: TransactionId
    topic: str
    committed: bool
    entries: int
    last: Position
    def __init__(self, txn: _Optional[_Union[TransactionId, _Mapping]] = ..., topic: _Optional[str] = ..., committed: bool = ..., entries: _Optional[int] = ..., last: _Optional[_Union[Position, _Mapping]] = ...) -> None: ...

class SettleRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Settlement]
    def __init__(self, items: _Optional[_Iterable[_Union[Settlement, _Mapping]]] = ...) -> None: ...

class SettleReply(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Done]
    def __init__(self, items: _Optional[_Iterable[_Union[Done, _Mapping]]] = ...) -> None: ...

class AbortOpenItem(_message.Message):
    __slots__ = ("txn", "only_tell")
    TXN_FIELD_NUMBER: _ClassVar[int]
    ONLY_TELL_FIELD_NUMBER: _ClassVar[int]
    txn: TransactionId
    only_tell: bool
    def __init__(self, txn: _Optional[_Union[TransactionId, _Mapping]] = ..., only_tell: bool = ...) -> None: ...

class AbortOpenRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[AbortOpenItem]
    def __init__(self, items: _Optional[_Iterable[_Union[AbortOpenItem, _Mapping]]] = ...) -> None: ...

class AbortOpenReply(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[AbortOpenDone]
    def __init__(self, items: _Optional[_Iterable[_Union[AbortOpenDone, _Mapping]]] = ...) -> None: ...

class AbortOpenDone(_message.Message):
    __slots__ = ("found", "error")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    found: TransactionInfo
    error: Error
    def __init__(self, found: _Optional[_Union[TransactionInfo, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class DescribeCursorRequest(_message.Message):
    __slots__ = ("topic", "name", "buckets")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    name: str
    buckets: int
    def __init__(self, topic: _Optional[str] = ..., name: _Optional[str] = ..., buckets: _Optional[int] = ...) -> None: ...

class CursorBucket(_message.Message):
    __slots__ = ("first", "first_index", "entries", "acknowledged", "pending", "delayed")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    DELAYED_FIELD_NUMBER: _ClassVar[int]
    first: Position
    first_index: int
    entries: int
    acknowledged: int
    pending: int
    delayed: int
    def __init__(self, first: _Optional[_Union[Position, _Mapping]] = ..., first_index: _Optional[int] = ..., entries: _Optional[int] = ..., acknowledged: _Optional[int] = ..., pending: _Optional[int] = ..., delayed: _Optional[int] = ...) -> None: ...

class CursorGap(_message.Message):
    __slots__ = ("first", "entries", "consumer", "published_ms")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_MS_FIELD_NUMBER: _ClassVar[int]
    first: Position
    entries: int
    consumer: str
    published_ms: int
    def __init__(self, first: _Optional[_Union[Position, _Mapping]] = ..., entries: _Optional[int] = ..., consumer: _Optional[str] = ..., published_ms: _Optional[int] = ...) -> None: ...

class DescribeCursorReply(_message.Message):
    __slots__ = ("mark_delete", "end", "buckets", "gaps")
    MARK_DELETE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    GAPS_FIELD_NUMBER: _ClassVar[int]
    mark_delete: Position
    end: Position
    buckets: _containers.RepeatedCompositeFieldContainer[CursorBucket]
    gaps: _containers.RepeatedCompositeFieldContainer[CursorGap]
    def __init__(self, mark_delete: _Optional[_Union[Position, _Mapping]] = ..., end: _Optional[_Union[Position, _Mapping]] = ..., buckets: _Optional[_Iterable[_Union[CursorBucket, _Mapping]]] = ..., gaps: _Optional[_Iterable[_Union[CursorGap, _Mapping]]] = ...) -> None: ...

class DescribeLedgersRequest(_message.Message):
    __slots__ = ("topic", "after", "limit")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    topic: str
    after: int
    limit: int
    def __init__(self, topic: _Optional[str] = ..., after: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class LedgerCopies(_message.Message):
    __slots__ = ("ledger_id", "state", "quorum", "entries", "bytes", "created_ms", "closed_ms", "bookies", "missing")
    class MissingEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    QUORUM_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CREATED_MS_FIELD_NUMBER: _ClassVar[int]
    CLOSED_MS_FIELD_NUMBER: _ClassVar[int]
    BOOKIES_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    ledger_id: int
    state: str
    quorum: str
    entries: int
    bytes: int
    created_ms: int
    closed_ms: int
    bookies: _containers.RepeatedScalarFieldContainer[str]
    missing: _containers.ScalarMap[str, str]
    def __init__(self, ledger_id: _Optional[int] = ..., state: _Optional[str] = ..., quorum: _Optional[str] = ..., entries: _Optional[int] = ..., bytes: _Optional[int] = ..., created_ms: _Optional[int] = ..., closed_ms: _Optional[int] = ..., bookies: _Optional[_Iterable[str]] = ..., missing: _Optional[_Mapping[str, str]] = ...) -> None: ...

class DescribeLedgersReply(_message.Message):
    __slots__ = ("ledgers",)
    LEDGERS_FIELD_NUMBER: _ClassVar[int]
    ledgers: _containers.RepeatedCompositeFieldContainer[LedgerCopies]
    def __init__(self, ledgers: _Optional[_Iterable[_Union[LedgerCopies, _Mapping]]] = ...) -> None: ...

class ConnectedRole(_message.Message):
    __slots__ = ("role", "kind", "method", "credential_id", "expires_ms", "producers", "consumers")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    CREDENTIAL_ID_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_MS_FIELD_NUMBER: _ClassVar[int]
    PRODUCERS_FIELD_NUMBER: _ClassVar[int]
    CONSUMERS_FIELD_NUMBER: _ClassVar[int]
    role: str
    kind: str
    method: str
    credential_id: str
    expires_ms: int
    producers: int
    consumers: int
    def __init__(self, role: _Optional[str] = ..., kind: _Optional[str] = ..., method: _Optional[str] = ..., credential_id: _Optional[str] = ..., expires_ms: _Optional[int] = ..., producers: _Optional[int] = ..., consumers: _Optional[int] = ...) -> None: ...

class RefusedCaller(_message.Message):
    __slots__ = ("caller", "refusals")
    CALLER_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    caller: str
    refusals: int
    def __init__(self, caller: _Optional[str] = ..., refusals: _Optional[int] = ...) -> None: ...

class DescribeSecurityReply(_message.Message):
    __slots__ = ("broker", "roles", "refused")
    BROKER_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    broker: str
    roles: _containers.RepeatedCompositeFieldContainer[ConnectedRole]
    refused: _containers.RepeatedCompositeFieldContainer[RefusedCaller]
    def __init__(self, broker: _Optional[str] = ..., roles: _Optional[_Iterable[_Union[ConnectedRole, _Mapping]]] = ..., refused: _Optional[_Iterable[_Union[RefusedCaller, _Mapping]]] = ...) -> None: ...

class DescribeMetadataRequest(_message.Message):
    __slots__ = ("node", "after", "limit")
    NODE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    node: str
    after: str
    limit: int
    def __init__(self, node: _Optional[str] = ..., after: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class DescribeMetadataReply(_message.Message):
    __slots__ = ("path", "kind", "version", "record", "damage", "children", "next")
    PATH_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    DAMAGE_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    path: str
    kind: str
    version: int
    record: str
    damage: str
    children: _containers.RepeatedScalarFieldContainer[str]
    next: str
    def __init__(self, path: _Optional[str] = ..., kind: _Optional[str] = ..., version: _Optional[int] = ..., record: _Optional[str] = ..., damage: _Optional[str] = ..., children: _Optional[_Iterable[str]] = ..., next: _Optional[str] = ...) -> None: ...

class DescribeBrokerRequest(_message.Message):
    __slots__ = ("tasks", "metrics")
    TASKS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    tasks: bool
    metrics: bool
    def __init__(self, tasks: bool = ..., metrics: bool = ...) -> None: ...

class BrokerSetting(_message.Message):
    __slots__ = ("name", "value", "source", "dynamic")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DYNAMIC_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    source: str
    dynamic: bool
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ..., source: _Optional[str] = ..., dynamic: bool = ...) -> None: ...

class DescribeBrokerReply(_message.Message):
    __slots__ = ("name", "version", "clock_ms", "open_files_max", "settings", "tasks", "metrics")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CLOCK_MS_FIELD_NUMBER: _ClassVar[int]
    OPEN_FILES_MAX_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    clock_ms: int
    open_files_max: int
    settings: _containers.RepeatedCompositeFieldContainer[BrokerSetting]
    tasks: str
    metrics: str
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., clock_ms: _Optional[int] = ..., open_files_max: _Optional[int] = ..., settings: _Optional[_Iterable[_Union[BrokerSetting, _Mapping]]] = ..., tasks: _Optional[str] = ..., metrics: _Optional[str] = ...) -> None: ...

class ChangeSettingRequest(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class BrokerSummariesRequest(_message.Message):
    __slots__ = ("here",)
    HERE_FIELD_NUMBER: _ClassVar[int]
    here: bool
    def __init__(self, here: bool = ...) -> None: ...

class TopicRow(_message.Message):
    __slots__ = ("name", "owner", "rate_in", "rate_out", "throughput_in", "throughput_out", "storage_bytes", "backlog", "oldest_ms", "producers", "consumers", "subscriptions", "slowest", "slowest_backlog")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    RATE_IN_FIELD_NUMBER: _ClassVar[int]
    RATE_OUT_FIELD_NUMBER: _ClassVar[int]
    THROUGHPUT_IN_FIELD_NUMBER: _ClassVar[int]
    THROUGHPUT_OUT_FIELD_NUMBER: _ClassVar[int]
    STORAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_FIELD_NUMBER: _ClassVar[int]
    OLDEST_MS_FIELD_NUMBER: _ClassVar[int]
    PRODUCERS_FIELD_NUMBER: _ClassVar[int]
    CONSUMERS_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    SLOWEST_FIELD_NUMBER: _ClassVar[int]
    SLOWEST_BACKLOG_FIELD_NUMBER: _ClassVar[int]
    name: str
    owner: str
    rate_in: float
    rate_out: float
    throughput_in: float
    throughput_out: float
    storage_bytes: int
    backlog: int
    oldest_ms: int
    producers: int
    consumers: int
    subscriptions: int
    slowest: str
    slowest_backlog: int
    def __init__(self, name: _Optional[str] = ..., owner: _Optional[str] = ..., rate_in: _Optional[float] = ..., rate_out: _Optional[float] = ..., throughput_in: _Optional[float] = ..., throughput_out: _Optional[float] = ..., storage_bytes: _Optional[int] = ..., backlog: _Optional[int] = ..., oldest_ms: _Optional[int] = ..., producers: _Optional[int] = ..., consumers: _Optional[int] = ..., subscriptions: _Optional[int] = ..., slowest: _Optional[str] = ..., slowest_backlog: _Optional[int] = ...) -> None: ...

class NamespaceSums(_message.Message):
    __slots__ = ("name", "topics", "subscriptions", "producers", "consumers", "rate_in", "rate_out", "throughput_in", "throughput_out", "storage_bytes", "backlog", "in_memory")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    PRODUCERS_FIELD_NUMBER: _ClassVar[int]
    CONSUMERS_FIELD_NUMBER: _ClassVar[int]
    RATE_IN_FIELD_NUMBER: _ClassVar[int]
    RATE_OUT_FIELD_NUMBER: _ClassVar[int]
    THROUGHPUT_IN_FIELD_NUMBER: _ClassVar[int]
    THROUGHPUT_OUT_FIELD_NUMBER: _ClassVar[int]
    STORAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_FIELD_NUMBER: _ClassVar[int]
    IN_MEMORY_FIELD_NUMBER: _ClassVar[int]
    name: str
    topics: int
    subscriptions: int
    producers: int
    consumers: int
    rate_in: float
    rate_out: float
    throughput_in: float
    throughput_out: float
    storage_bytes: int
    backlog: int
    in_memory: int
    def __init__(self, name: _Optional[str] = ..., topics: _Optional[int] = ..., subscriptions: _Optional[int] = ..., producers: _Optional[int] = ..., consumers: _Optional[int] = ..., rate_in: _Optional[float] = ..., rate_out: _Optional[float] = ..., throughput_in: _Optional[float] = ..., throughput_out: _Optional[float] = ..., storage_bytes: _Optional[int] = ..., backlog: _Optional[int] = ..., in_memory: _Optional[int] = ...) -> None: ...

class BrokerSummary(_message.Message):
    __slots__ = ("name", "endpoint", "version", "since_ms", "loop_busy", "connections", "degraded", "total", "namespaces", "by_traffic", "by_backlog", "by_age", "token_ends_ms", "full", "certificate_ends_ms", "draining", "balances", "hot_topics")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SINCE_MS_FIELD_NUMBER: _ClassVar[int]
    LOOP_BUSY_FIELD_NUMBER: _ClassVar[int]
    CONNECTIONS_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    BY_TRAFFIC_FIELD_NUMBER: _ClassVar[int]
    BY_BACKLOG_FIELD_NUMBER: _ClassVar[int]
    BY_AGE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ENDS_MS_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_ENDS_MS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    BALANCES_FIELD_NUMBER: _ClassVar[int]
    HOT_TOPICS_FIELD_NUMBER: _ClassVar[int]
    name: str
    endpoint: str
    version: str
    since_ms: int
    loop_busy: float
    connections: int
    degraded: int
    total: NamespaceSums
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceSums]
    by_traffic: _containers.RepeatedCompositeFieldContainer[TopicRow]
    by_backlog: _containers.RepeatedCompositeFieldContainer[TopicRow]
    by_age: _containers.RepeatedCompositeFieldContainer[TopicRow]
    token_ends_ms: int
    full: _containers.RepeatedScalarFieldContainer[str]
    certificate_ends_ms: int
    draining: bool
    balances: bool
    hot_topics: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., endpoint: _Optional[str] = ..., version: _Optional[str] = ..., since_ms: _Optional[int] = ..., loop_busy: _Optional[float] = ..., connections: _Optional[int] = ..., degraded: _Optional[int] = ..., total: _Optional[_Union[NamespaceSums, _Mapping]] = ..., namespaces: _Optional[_Iterable[_Union[NamespaceSums, _Mapping]]] = ..., by_traffic: _Optional[_Iterable[_Union[TopicRow, _Mapping]]] = ..., by_backlog: _Optional[_Iterable[_Union[TopicRow, _Mapping]]] = ..., by_age: _Optional[_Iterable[_Union[TopicRow, _Mapping]]] = ..., token_ends_ms: _Optional[int] = ..., full: _Optional[_Iterable[str]] = ..., certificate_ends_ms: _Optional[int] = ..., draining: bool = ..., balances: bool = ..., hot_topics: _Optional[_Iterable[str]] = ...) -> None: ...

class BrokerSummariesReply(_message.Message):
    __slots__ = ("brokers", "silent", "bookies", "metadata_away_ms", "refusing", "late", "metadata_late", "died", "metadata_total_bytes", "metadata_free_bytes", "metadata_certificate_ends_ms", "metadata_backup_ms", "metadata_backup_every_ms", "metadata_backup_failure", "metadata_refusal")
    BROKERS_FIELD_NUMBER: _ClassVar[int]
    SILENT_FIELD_NUMBER: _ClassVar[int]
    BOOKIES_FIELD_NUMBER: _ClassVar[int]
    METADATA_AWAY_MS_FIELD_NUMBER: _ClassVar[int]
    REFUSING_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    METADATA_LATE_FIELD_NUMBER: _ClassVar[int]
    DIED_FIELD_NUMBER: _ClassVar[int]
    METADATA_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    METADATA_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    METADATA_CERTIFICATE_ENDS_MS_FIELD_NUMBER: _ClassVar[int]
    METADATA_BACKUP_MS_FIELD_NUMBER: _ClassVar[int]
    METADATA_BACKUP_EVERY_MS_FIELD_NUMBER: _ClassVar[int]
    METADATA_BACKUP_FAILURE_FIELD_NUMBER: _ClassVar[int]
    METADATA_REFUSAL_FIELD_NUMBER: _ClassVar[int]
    brokers: _containers.RepeatedCompositeFieldContainer[BrokerSummary]
    silent: _containers.RepeatedScalarFieldContainer[str]
    bookies: _containers.RepeatedCompositeFieldContainer[BookieStatus]
    metadata_away_ms: int
    refusing: _containers.RepeatedScalarFieldContainer[str]
    late: _containers.RepeatedScalarFieldContainer[str]
    metadata_late: bool
    died: _containers.RepeatedCompositeFieldContainer[DiedBroker]
    metadata_total_bytes: int
    metadata_free_bytes: int
    metadata_certificate_ends_ms: int
    metadata_backup_ms: int
    metadata_backup_every_ms: int
    metadata_backup_failure: str
    metadata_refusal: str
    def __init__(self, brokers: _Optional[_Iterable[_Union[BrokerSummary, _Mapping]]] = ..., silent: _Optional[_Iterable[str]] = ..., bookies: _Optional[_Iterable[_Union[BookieStatus, _Mapping]]] = ..., metadata_away_ms: _Optional[int] = ..., refusing: _Optional[_Iterable[str]] = ..., late: _Optional[_Iterable[str]] = ..., metadata_late: bool = ..., died: _Optional[_Iterable[_Union[DiedBroker, _Mapping]]] = ..., metadata_total_bytes: _Optional[int] = ..., metadata_free_bytes: _Optional[int] = ..., metadata_certificate_ends_ms: _Optional[int] = ..., metadata_backup_ms: _Optional[int] = ..., metadata_backup_every_ms: _Optional[int] = ..., metadata_backup_failure: _Optional[str] = ..., metadata_refusal: _Optional[str] = ...) -> None: ...

class DiedBroker(_message.Message):
    __slots__ = ("name", "endpoint", "seen_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    SEEN_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    endpoint: str
    seen_ms: int
    def __init__(self, name: _Optional[str] = ..., endpoint: _Optional[str] = ..., seen_ms: _Optional[int] = ...) -> None: ...

class TopicPageRequest(_message.Message):
    __slots__ = ("prefix", "contains", "sort", "after", "limit", "here")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    CONTAINS_FIELD_NUMBER: _ClassVar[int]
    SORT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    HERE_FIELD_NUMBER: _ClassVar[int]
    prefix: str
    contains: str
    sort: str
    after: str
    limit: int
    here: bool
    def __init__(self, prefix: _Optional[str] = ..., contains: _Optional[str] = ..., sort: _Optional[str] = ..., after: _Optional[str] = ..., limit: _Optional[int] = ..., here: bool = ...) -> None: ...

class TopicPageReply(_message.Message):
    __slots__ = ("topics", "next", "found", "silent")
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    FOUND_FIELD_NUMBER: _ClassVar[int]
    SILENT_FIELD_NUMBER: _ClassVar[int]
    topics: _containers.RepeatedCompositeFieldContainer[TopicRow]
    next: str
    found: int
    silent: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, topics: _Optional[_Iterable[_Union[TopicRow, _Mapping]]] = ..., next: _Optional[str] = ..., found: _Optional[int] = ..., silent: _Optional[_Iterable[str]] = ...) -> None: ...

class SetSubscriptionFilterRequest(_message.Message):
    __slots__ = ("topic", "name", "filter")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    topic: str
    name: str
    filter: str
    def __init__(self, topic: _Optional[str] = ..., name: _Optional[str] = ..., filter: _Optional[str] = ...) -> None: ...

class SubscriptionFilterReply(_message.Message):
    __slots__ = ("filter", "judged", "filtered", "filtered_entries", "shown_unwanted", "filtered_unread")
    FILTER_FIELD_NUMBER: _ClassVar[int]
    JUDGED_FIELD_NUMBER: _ClassVar[int]
    FILTERED_FIELD_NUMBER: _ClassVar[int]
    FILTERED_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    SHOWN_UNWANTED_FIELD_NUMBER: _ClassVar[int]
    FILTERED_UNREAD_FIELD_NUMBER: _ClassVar[int]
    filter: str
    judged: int
    filtered: int
    filtered_entries: int
    shown_unwanted: int
    filtered_unread: int
    def __init__(self, filter: _Optional[str] = ..., judged: _Optional[int] = ..., filtered: _Optional[int] = ..., filtered_entries: _Optional[int] = ..., shown_unwanted: _Optional[int] = ..., filtered_unread: _Optional[int] = ...) -> None: ...

class TryFilterRequest(_message.Message):
    __slots__ = ("topic", "filter", "messages")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    topic: str
    filter: str
    messages: int
    def __init__(self, topic: _Optional[str] = ..., filter: _Optional[str] = ..., messages: _Optional[int] = ...) -> None: ...

class TryFilterReply(_message.Message):
    __slots__ = ("messages", "wanted", "entries", "unwanted_entries", "mixed_entries", "unread")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    UNWANTED_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    MIXED_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    UNREAD_FIELD_NUMBER: _ClassVar[int]
    messages: int
    wanted: int
    entries: int
    unwanted_entries: int
    mixed_entries: int
    unread: int
    def __init__(self, messages: _Optional[int] = ..., wanted: _Optional[int] = ..., entries: _Optional[int] = ..., unwanted_entries: _Optional[int] = ..., mixed_entries: _Optional[int] = ..., unread: _Optional[int] = ...) -> None: ...

class WhyStuckReply(_message.Message):
    __slots__ = ("stuck", "blocked", "sentences")
    STUCK_FIELD_NUMBER: _ClassVar[int]
    BLOCKED_FIELD_NUMBER: _ClassVar[int]
    SENTENCES_FIELD_NUMBER: _ClassVar[int]
    stuck: bool
    blocked: str
    sentences: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, stuck: bool = ..., blocked: _Optional[str] = ..., sentences: _Optional[_Iterable[str]] = ...) -> None: ...

class KeptLedger(_message.Message):
    __slots__ = ("ledger_id", "bytes", "messages", "stays", "subscriptions", "sentence")
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    STAYS_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    ledger_id: int
    bytes: int
    messages: int
    stays: str
    subscriptions: _containers.RepeatedScalarFieldContainer[str]
    sentence: str
    def __init__(self, ledger_id: _Optional[int] = ..., bytes: _Optional[int] = ..., messages: _Optional[int] = ..., stays: _Optional[str] = ..., subscriptions: _Optional[_Iterable[str]] = ..., sentence: _Optional[str] = ...) -> None: ...

class WhyKeptReply(_message.Message):
    __slots__ = ("ledgers",)
    LEDGERS_FIELD_NUMBER: _ClassVar[int]
    ledgers: _containers.RepeatedCompositeFieldContainer[KeptLedger]
    def __init__(self, ledgers: _Optional[_Iterable[_Union[KeptLedger, _Mapping]]] = ...) -> None: ...

class SkipLostRequest(_message.Message):
    __slots__ = ("topic", "ledger_id", "force", "forgotten")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    topic: str
    ledger_id: int
    force: bool
    forgotten: str
    def __init__(self, topic: _Optional[str] = ..., ledger_id: _Optional[int] = ..., force: bool = ..., forgotten: _Optional[str] = ...) -> None: ...

class SkipLostReply(_message.Message):
    __slots__ = ("ranges", "subscriptions", "forgotten")
    RANGES_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    ranges: _containers.RepeatedCompositeFieldContainer[LostRange]
    subscriptions: _containers.RepeatedCompositeFieldContainer[LostOfSubscription]
    forgotten: _containers.RepeatedCompositeFieldContainer[ForgottenTransaction]
    def __init__(self, ranges: _Optional[_Iterable[_Union[LostRange, _Mapping]]] = ..., subscriptions: _Optional[_Iterable[_Union[LostOfSubscription, _Mapping]]] = ..., forgotten: _Optional[_Iterable[_Union[ForgottenTransaction, _Mapping]]] = ...) -> None: ...

class ForgottenTransaction(_message.Message):
    __slots__ = ("txn", "first", "entries", "bytes")
    TXN_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    txn: TransactionId
    first: Position
    entries: int
    bytes: int
    def __init__(self, txn: _Optional[_Union[TransactionId, _Mapping]] = ..., first: _Optional[_Union[Position, _Mapping]] = ..., entries: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class LostRange(_message.Message):
    __slots__ = ("ledger_id", "first_entry", "last_entry", "first_index", "end_index", "forced")
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_ENTRY_FIELD_NUMBER: _ClassVar[int]
    LAST_ENTRY_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    END_INDEX_FIELD_NUMBER: _ClassVar[int]
    FORCED_FIELD_NUMBER: _ClassVar[int]
    ledger_id: int
    first_entry: int
    last_entry: int
    first_index: int
    end_index: int
    forced: bool
    def __init__(self, ledger_id: _Optional[int] = ..., first_entry: _Optional[int] = ..., last_entry: _Optional[int] = ..., first_index: _Optional[int] = ..., end_index: _Optional[int] = ..., forced: bool = ...) -> None: ...

class LostOfSubscription(_message.Message):
    __slots__ = ("name", "messages")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    name: str
    messages: int
    def __init__(self, name: _Optional[str] = ..., messages: _Optional[int] = ...) -> None: ...

class GetSchemaRequest(_message.Message):
    __slots__ = ("topic", "version", "incarnation")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    topic: str
    version: bytes
    incarnation: int
    def __init__(self, topic: _Optional[str] = ..., version: _Optional[bytes] = ..., incarnation: _Optional[int] = ...) -> None: ...

class SchemaReply(_message.Message):
    __slots__ = ("version", "schema", "created_ms", "user", "deleted")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    CREATED_MS_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    DELETED_FIELD_NUMBER: _ClassVar[int]
    version: bytes
    schema: SchemaInfo
    created_ms: int
    user: str
    deleted: bool
    def __init__(self, version: _Optional[bytes] = ..., schema: _Optional[_Union[SchemaInfo, _Mapping]] = ..., created_ms: _Optional[int] = ..., user: _Optional[str] = ..., deleted: bool = ...) -> None: ...

class SchemasReply(_message.Message):
    __slots__ = ("schemas",)
    SCHEMAS_FIELD_NUMBER: _ClassVar[int]
    schemas: _containers.RepeatedCompositeFieldContainer[SchemaReply]
    def __init__(self, schemas: _Optional[_Iterable[_Union[SchemaReply, _Mapping]]] = ...) -> None: ...

class SchemaRequest(_message.Message):
    __slots__ = ("topic", "schema")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    topic: str
    schema: SchemaInfo
    def __init__(self, topic: _Optional[str] = ..., schema: _Optional[_Union[SchemaInfo, _Mapping]] = ...) -> None: ...

class TestSchemaReply(_message.Message):
    __slots__ = ("refused", "compatibility")
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_FIELD_NUMBER: _ClassVar[int]
    refused: str
    compatibility: str
    def __init__(self, refused: _Optional[str] = ..., compatibility: _Optional[str] = ...) -> None: ...

class Name(_message.Message):
    __slots__ = ("name", "precise_backlog")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PRECISE_BACKLOG_FIELD_NUMBER: _ClassVar[int]
    name: str
    precise_backlog: bool
    def __init__(self, name: _Optional[str] = ..., precise_backlog: bool = ...) -> None: ...

class Names(_message.Message):
    __slots__ = ("names", "more", "nodes")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    more: bool
    nodes: _containers.RepeatedCompositeFieldContainer[GetReply]
    def __init__(self, names: _Optional[_Iterable[str]] = ..., more: bool = ..., nodes: _Optional[_Iterable[_Union[GetReply, _Mapping]]] = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("name", "force", "incarnation")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    name: str
    force: bool
    incarnation: int
    def __init__(self, name: _Optional[str] = ..., force: bool = ..., incarnation: _Optional[int] = ...) -> None: ...

class DeleteCheck(_message.Message):
    __slots__ = ("incarnation",)
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    def __init__(self, incarnation: _Optional[int] = ...) -> None: ...

class TenantSpec(_message.Message):
    __slots__ = ("name", "admin_roles", "allowed_clusters")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADMIN_ROLES_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_CLUSTERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    admin_roles: _containers.RepeatedScalarFieldContainer[str]
    allowed_clusters: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., admin_roles: _Optional[_Iterable[str]] = ..., allowed_clusters: _Optional[_Iterable[str]] = ...) -> None: ...

class NamespaceSpec(_message.Message):
    __slots__ = ("name", "bundles", "auto_topic_creation_off", "default_partitions", "is_creation_set")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BUNDLES_FIELD_NUMBER: _ClassVar[int]
    AUTO_TOPIC_CREATION_OFF_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    IS_CREATION_SET_FIELD_NUMBER: _ClassVar[int]
    name: str
    bundles: int
    auto_topic_creation_off: bool
    default_partitions: int
    is_creation_set: bool
    def __init__(self, name: _Optional[str] = ..., bundles: _Optional[int] = ..., auto_topic_creation_off: bool = ..., default_partitions: _Optional[int] = ..., is_creation_set: bool = ...) -> None: ...

class PoliciesRequest(_message.Message):
    __slots__ = ("namespace", "topic", "applied")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    topic: str
    applied: bool
    def __init__(self, namespace: _Optional[str] = ..., topic: _Optional[str] = ..., applied: bool = ...) -> None: ...

class PoliciesReply(_message.Message):
    __slots__ = ("policies",)
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    policies: str
    def __init__(self, policies: _Optional[str] = ...) -> None: ...

class ResourceGroupSpec(_message.Message):
    __slots__ = ("name", "publish_rate_messages", "publish_rate_bytes", "dispatch_rate_messages", "dispatch_rate_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_RATE_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_RATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_RATE_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_RATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    publish_rate_messages: int
    publish_rate_bytes: int
    dispatch_rate_messages: int
    dispatch_rate_bytes: int
    def __init__(self, name: _Optional[str] = ..., publish_rate_messages: _Optional[int] = ..., publish_rate_bytes: _Optional[int] = ..., dispatch_rate_messages: _Optional[int] = ..., dispatch_rate_bytes: _Optional[int] = ...) -> None: ...

class TenantPoliciesRequest(_message.Message):
    __slots__ = ("name", "applied")
    NAME_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    name: str
    applied: bool
    def __init__(self, name: _Optional[str] = ..., applied: bool = ...) -> None: ...

class ChangeTenantPoliciesRequest(_message.Message):
    __slots__ = ("name", "set", "remove")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SET_FIELD_NUMBER: _ClassVar[int]
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    name: str
    set: str
    remove: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., set: _Optional[str] = ..., remove: _Optional[_Iterable[str]] = ...) -> None: ...

class ChangePoliciesRequest(_message.Message):
    __slots__ = ("namespace", "topic", "set", "remove")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SET_FIELD_NUMBER: _ClassVar[int]
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    topic: str
    set: str
    remove: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, namespace: _Optional[str] = ..., topic: _Optional[str] = ..., set: _Optional[str] = ..., remove: _Optional[_Iterable[str]] = ...) -> None: ...

class PlaceRequest(_message.Message):
    __slots__ = ("namespace", "topic")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    topic: str
    def __init__(self, namespace: _Optional[str] = ..., topic: _Optional[str] = ...) -> None: ...

class PropertiesReply(_message.Message):
    __slots__ = ("properties",)
    class PropertiesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    PROPERTIES_FIELD_NUMBER: _ClassVar[int]
    properties: _containers.ScalarMap[str, str]
    def __init__(self, properties: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ChangePropertiesRequest(_message.Message):
    __slots__ = ("namespace", "topic", "set", "remove", "clear")
    class SetEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SET_FIELD_NUMBER: _ClassVar[int]
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    CLEAR_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    topic: str
    set: _containers.ScalarMap[str, str]
    remove: _containers.RepeatedScalarFieldContainer[str]
    clear: bool
    def __init__(self, namespace: _Optional[str] = ..., topic: _Optional[str] = ..., set: _Optional[_Mapping[str, str]] = ..., remove: _Optional[_Iterable[str]] = ..., clear: bool = ...) -> None: ...

class PermissionsRequest(_message.Message):
    __slots__ = ("namespace", "topic")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    topic: str
    def __init__(self, namespace: _Optional[str] = ..., topic: _Optional[str] = ...) -> None: ...

class PermissionsReply(_message.Message):
    __slots__ = ("roles", "subscriptions", "prefix_mode")
    class RolesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Names
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Names, _Mapping]] = ...) -> None: ...
    class SubscriptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Names
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Names, _Mapping]] = ...) -> None: ...
    ROLES_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_MODE_FIELD_NUMBER: _ClassVar[int]
    roles: _containers.MessageMap[str, Names]
    subscriptions: _containers.MessageMap[str, Names]
    prefix_mode: bool
    def __init__(self, roles: _Optional[_Mapping[str, Names]] = ..., subscriptions: _Optional[_Mapping[str, Names]] = ..., prefix_mode: bool = ...) -> None: ...

class ChangePermissionsRequest(_message.Message):
    __slots__ = ("namespace", "topic", "grant", "revoke", "grant_subscription", "revoke_subscription", "prefix_mode")
    class Grant(_message.Message):
        __slots__ = ("role", "actions")
        ROLE_FIELD_NUMBER: _ClassVar[int]
        ACTIONS_FIELD_NUMBER: _ClassVar[int]
        role: str
        actions: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, role: _Optional[str] = ..., actions: _Optional[_Iterable[str]] = ...) -> None: ...
    class OfSubscription(_message.Message):
        __slots__ = ("subscription", "roles")
        SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
        ROLES_FIELD_NUMBER: _ClassVar[int]
        subscription: str
        roles: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, subscription: _Optional[str] = ..., roles: _Optional[_Iterable[str]] = ...) -> None: ...
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    REVOKE_FIELD_NUMBER: _ClassVar[int]
    GRANT_SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    REVOKE_SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PREFIX_MODE_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    topic: str
    grant: ChangePermissionsRequest.Grant
    revoke: str
    grant_subscription: ChangePermissionsRequest.OfSubscription
    revoke_subscription: ChangePermissionsRequest.OfSubscription
    prefix_mode: bool
    def __init__(self, namespace: _Optional[str] = ..., topic: _Optional[str] = ..., grant: _Optional[_Union[ChangePermissionsRequest.Grant, _Mapping]] = ..., revoke: _Optional[str] = ..., grant_subscription: _Optional[_Union[ChangePermissionsRequest.OfSubscription, _Mapping]] = ..., revoke_subscription: _Optional[_Union[ChangePermissionsRequest.OfSubscription, _Mapping]] = ..., prefix_mode: bool = ...) -> None: ...

class UnloadNamespaceRequest(_message.Message):
    __slots__ = ("namespace", "bundle", "here", "destination")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    HERE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    bundle: str
    here: bool
    destination: str
    def __init__(self, namespace: _Optional[str] = ..., bundle: _Optional[str] = ..., here: bool = ..., destination: _Optional[str] = ...) -> None: ...

class SplitBundlesRequest(_message.Message):
    __slots__ = ("name", "bundles", "here", "bundle")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BUNDLES_FIELD_NUMBER: _ClassVar[int]
    HERE_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    name: str
    bundles: int
    here: bool
    bundle: str
    def __init__(self, name: _Optional[str] = ..., bundles: _Optional[int] = ..., here: bool = ..., bundle: _Optional[str] = ...) -> None: ...

class SplitBundlesReply(_message.Message):
    __slots__ = ("namespace", "bundles")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    BUNDLES_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    bundles: int
    def __init__(self, namespace: _Optional[str] = ..., bundles: _Optional[int] = ...) -> None: ...

class UnloadNamespaceReply(_message.Message):
    __slots__ = ("topics", "bundles")
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    BUNDLES_FIELD_NUMBER: _ClassVar[int]
    topics: int
    bundles: int
    def __init__(self, topics: _Optional[int] = ..., bundles: _Optional[int] = ...) -> None: ...

class ListBundlesRequest(_message.Message):
    __slots__ = ("namespace", "here")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HERE_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    here: bool
    def __init__(self, namespace: _Optional[str] = ..., here: bool = ...) -> None: ...

class BundleRow(_message.Message):
    __slots__ = ("namespace", "bundle", "broker", "endpoint", "topics", "rate_in", "rate_out", "throughput_in", "throughput_out")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    BROKER_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    RATE_IN_FIELD_NUMBER: _ClassVar[int]
    RATE_OUT_FIELD_NUMBER: _ClassVar[int]
    THROUGHPUT_IN_FIELD_NUMBER: _ClassVar[int]
    THROUGHPUT_OUT_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    bundle: str
    broker: str
    endpoint: str
    topics: int
    rate_in: float
    rate_out: float
    throughput_in: float
    throughput_out: float
    def __init__(self, namespace: _Optional[str] = ..., bundle: _Optional[str] = ..., broker: _Optional[str] = ..., endpoint: _Optional[str] = ..., topics: _Optional[int] = ..., rate_in: _Optional[float] = ..., rate_out: _Optional[float] = ..., throughput_in: _Optional[float] = ..., throughput_out: _Optional[float] = ...) -> None: ...

class ListBundlesReply(_message.Message):
    __slots__ = ("bundles", "silent")
    BUNDLES_FIELD_NUMBER: _ClassVar[int]
    SILENT_FIELD_NUMBER: _ClassVar[int]
    bundles: _containers.RepeatedCompositeFieldContainer[BundleRow]
    silent: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, bundles: _Optional[_Iterable[_Union[BundleRow, _Mapping]]] = ..., silent: _Optional[_Iterable[str]] = ...) -> None: ...

class BalanceBrokersRequest(_message.Message):
    __slots__ = ("dry_run",)
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    dry_run: bool
    def __init__(self, dry_run: bool = ...) -> None: ...

class BundleMoveRow(_message.Message):
    __slots__ = ("namespace", "bundle", "source", "target", "load")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    bundle: str
    source: str
    target: str
    load: float
    def __init__(self, namespace: _Optional[str] = ..., bundle: _Optional[str] = ..., source: _Optional[str] = ..., target: _Optional[str] = ..., load: _Optional[float] = ...) -> None: ...

class BrokerLoadRow(_message.Message):
    __slots__ = ("broker", "before", "after")
    BROKER_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    broker: str
    before: float
    after: float
    def __init__(self, broker: _Optional[str] = ..., before: _Optional[float] = ..., after: _Optional[float] = ...) -> None: ...

class BalanceBrokersReply(_message.Message):
    __slots__ = ("moves", "brokers")
    MOVES_FIELD_NUMBER: _ClassVar[int]
    BROKERS_FIELD_NUMBER: _ClassVar[int]
    moves: _containers.RepeatedCompositeFieldContainer[BundleMoveRow]
    brokers: _containers.RepeatedCompositeFieldContainer[BrokerLoadRow]
    def __init__(self, moves: _Optional[_Iterable[_Union[BundleMoveRow, _Mapping]]] = ..., brokers: _Optional[_Iterable[_Union[BrokerLoadRow, _Mapping]]] = ...) -> None: ...

class MeasuredBundleRow(_message.Message):
    __slots__ = ("path", "load", "topics", "sessions", "owned_s", "misplaced")
    PATH_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    OWNED_S_FIELD_NUMBER: _ClassVar[int]
    MISPLACED_FIELD_NUMBER: _ClassVar[int]
    path: str
    load: float
    topics: int
    sessions: int
    owned_s: float
    misplaced: bool
    def __init__(self, path: _Optional[str] = ..., load: _Optional[float] = ..., topics: _Optional[int] = ..., sessions: _Optional[int] = ..., owned_s: _Optional[float] = ..., misplaced: bool = ...) -> None: ...

class MeasureLoadReply(_message.Message):
    __slots__ = ("score", "load", "window_s", "bundles", "crowded")
    SCORE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    BUNDLES_FIELD_NUMBER: _ClassVar[int]
    CROWDED_FIELD_NUMBER: _ClassVar[int]
    score: float
    load: float
    window_s: float
    bundles: _containers.RepeatedCompositeFieldContainer[MeasuredBundleRow]
    crowded: _containers.RepeatedCompositeFieldContainer[CrowdedBundleRow]
    def __init__(self, score: _Optional[float] = ..., load: _Optional[float] = ..., window_s: _Optional[float] = ..., bundles: _Optional[_Iterable[_Union[MeasuredBundleRow, _Mapping]]] = ..., crowded: _Optional[_Iterable[_Union[CrowdedBundleRow, _Mapping]]] = ...) -> None: ...

class CrowdedBundleRow(_message.Message):
    __slots__ = ("path", "why", "hot_topic")
    PATH_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    HOT_TOPIC_FIELD_NUMBER: _ClassVar[int]
    path: str
    why: str
    hot_topic: str
    def __init__(self, path: _Optional[str] = ..., why: _Optional[str] = ..., hot_topic: _Optional[str] = ...) -> None: ...

class HotTopicRow(_message.Message):
    __slots__ = ("topic", "why", "advice")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    topic: str
    why: str
    advice: str
    def __init__(self, topic: _Optional[str] = ..., why: _Optional[str] = ..., advice: _Optional[str] = ...) -> None: ...

class BalanceStatusRequest(_message.Message):
    __slots__ = ("here",)
    HERE_FIELD_NUMBER: _ClassVar[int]
    here: bool
    def __init__(self, here: bool = ...) -> None: ...

class BrokerScoreRow(_message.Message):
    __slots__ = ("broker", "score", "moving")
    BROKER_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    MOVING_FIELD_NUMBER: _ClassVar[int]
    broker: str
    score: float
    moving: int
    def __init__(self, broker: _Optional[str] = ..., score: _Optional[float] = ..., moving: _Optional[int] = ...) -> None: ...

class BalanceStatusReply(_message.Message):
    __slots__ = ("is_on", "leader", "moves", "failed", "brokers", "moving", "splits", "hot_topics")
    IS_ON_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    BROKERS_FIELD_NUMBER: _ClassVar[int]
    MOVING_FIELD_NUMBER: _ClassVar[int]
    SPLITS_FIELD_NUMBER: _ClassVar[int]
    HOT_TOPICS_FIELD_NUMBER: _ClassVar[int]
    is_on: bool
    leader: str
    moves: int
    failed: int
    brokers: _containers.RepeatedCompositeFieldContainer[BrokerScoreRow]
    moving: _containers.RepeatedCompositeFieldContainer[BundleMoveRow]
    splits: int
    hot_topics: _containers.RepeatedCompositeFieldContainer[HotTopicRow]
    def __init__(self, is_on: bool = ..., leader: _Optional[str] = ..., moves: _Optional[int] = ..., failed: _Optional[int] = ..., brokers: _Optional[_Iterable[_Union[BrokerScoreRow, _Mapping]]] = ..., moving: _Optional[_Iterable[_Union[BundleMoveRow, _Mapping]]] = ..., splits: _Optional[int] = ..., hot_topics: _Optional[_Iterable[_Union[HotTopicRow, _Mapping]]] = ...) -> None: ...

class WantedShareRow(_message.Message):
    __slots__ = ("limit", "wanted", "held")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    limit: str
    wanted: float
    held: float
    def __init__(self, limit: _Optional[str] = ..., wanted: _Optional[float] = ..., held: _Optional[float] = ...) -> None: ...

class StoredBundleRow(_message.Message):
    __slots__ = ("namespace", "bundle", "bytes")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    bundle: str
    bytes: int
    def __init__(self, namespace: _Optional[str] = ..., bundle: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class ShareLimitsRequest(_message.Message):
    __slots__ = ("broker", "run", "number", "limits", "stored", "places")
    BROKER_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    broker: str
    run: str
    number: int
    limits: _containers.RepeatedCompositeFieldContainer[WantedShareRow]
    stored: _containers.RepeatedCompositeFieldContainer[StoredBundleRow]
    places: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, broker: _Optional[str] = ..., run: _Optional[str] = ..., number: _Optional[int] = ..., limits: _Optional[_Iterable[_Union[WantedShareRow, _Mapping]]] = ..., stored: _Optional[_Iterable[_Union[StoredBundleRow, _Mapping]]] = ..., places: _Optional[_Iterable[str]] = ...) -> None: ...

class GrantedShareRow(_message.Message):
    __slots__ = ("limit", "share", "wanted", "brokers")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    BROKERS_FIELD_NUMBER: _ClassVar[int]
    limit: str
    share: float
    wanted: float
    brokers: int
    def __init__(self, limit: _Optional[str] = ..., share: _Optional[float] = ..., wanted: _Optional[float] = ..., brokers: _Optional[int] = ...) -> None: ...

class StoredPlaceRow(_message.Message):
    __slots__ = ("place", "bytes", "complete")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    place: str
    bytes: int
    complete: bool
    def __init__(self, place: _Optional[str] = ..., bytes: _Optional[int] = ..., complete: bool = ...) -> None: ...

class ShareLimitsReply(_message.Message):
    __slots__ = ("shares", "stored")
    SHARES_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    shares: _containers.RepeatedCompositeFieldContainer[GrantedShareRow]
    stored: _containers.RepeatedCompositeFieldContainer[StoredPlaceRow]
    def __init__(self, shares: _Optional[_Iterable[_Union[GrantedShareRow, _Mapping]]] = ..., stored: _Optional[_Iterable[_Union[StoredPlaceRow, _Mapping]]] = ...) -> None: ...

class SharedLimitsRequest(_message.Message):
    __slots__ = ("here",)
    HERE_FIELD_NUMBER: _ClassVar[int]
    here: bool
    def __init__(self, here: bool = ...) -> None: ...

class SharedLimitRow(_message.Message):
    __slots__ = ("place", "policy", "limit", "broker", "share", "used", "wanted", "brokers", "throttled", "why")
    PLACE_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    BROKER_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    BROKERS_FIELD_NUMBER: _ClassVar[int]
    THROTTLED_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    place: str
    policy: str
    limit: int
    broker: str
    share: float
    used: float
    wanted: float
    brokers: int
    throttled: int
    why: str
    def __init__(self, place: _Optional[str] = ..., policy: _Optional[str] = ..., limit: _Optional[int] = ..., broker: _Optional[str] = ..., share: _Optional[float] = ..., used: _Optional[float] = ..., wanted: _Optional[float] = ..., brokers: _Optional[int] = ..., throttled: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class SharedLimitsReply(_message.Message):
    __slots__ = ("limits", "silent")
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    SILENT_FIELD_NUMBER: _ClassVar[int]
    limits: _containers.RepeatedCompositeFieldContainer[SharedLimitRow]
    silent: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, limits: _Optional[_Iterable[_Union[SharedLimitRow, _Mapping]]] = ..., silent: _Optional[_Iterable[str]] = ...) -> None: ...

class ListTopicsRequest(_message.Message):
    __slots__ = ("namespace", "partitions", "in_memory_here", "after", "limit")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    IN_MEMORY_HERE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    partitions: bool
    in_memory_here: bool
    after: str
    limit: int
    def __init__(self, namespace: _Optional[str] = ..., partitions: bool = ..., in_memory_here: bool = ..., after: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class NamespaceStatsRequest(_message.Message):
    __slots__ = ("namespace", "after", "brief")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    BRIEF_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    after: str
    brief: bool
    def __init__(self, namespace: _Optional[str] = ..., after: _Optional[str] = ..., brief: bool = ...) -> None: ...

class NamespaceStatsReply(_message.Message):
    __slots__ = ("topics", "next", "here", "brokers", "brief_topics")
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    HERE_FIELD_NUMBER: _ClassVar[int]
    BROKERS_FIELD_NUMBER: _ClassVar[int]
    BRIEF_TOPICS_FIELD_NUMBER: _ClassVar[int]
    topics: _containers.RepeatedCompositeFieldContainer[TopicStatsReply]
    next: str
    here: str
    brokers: _containers.RepeatedScalarFieldContainer[str]
    brief_topics: _containers.RepeatedCompositeFieldContainer[BriefTopicStats]
    def __init__(self, topics: _Optional[_Iterable[_Union[TopicStatsReply, _Mapping]]] = ..., next: _Optional[str] = ..., here: _Optional[str] = ..., brokers: _Optional[_Iterable[str]] = ..., brief_topics: _Optional[_Iterable[_Union[BriefTopicStats, _Mapping]]] = ...) -> None: ...

class BriefTopicStats(_message.Message):
    __slots__ = ("name", "messages_in", "messages_out", "storage_bytes", "rate_in", "rate_out", "throughput_in", "throughput_out", "backlogs")
    class BacklogsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_IN_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_OUT_FIELD_NUMBER: _ClassVar[int]
    STORAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RATE_IN_FIELD_NUMBER: _ClassVar[int]
    RATE_OUT_FIELD_NUMBER: _ClassVar[int]
    THROUGHPUT_IN_FIELD_NUMBER: _ClassVar[int]
    THROUGHPUT_OUT_FIELD_NUMBER: _ClassVar[int]
    BACKLOGS_FIELD_NUMBER: _ClassVar[int]
    name: str
    messages_in: int
    messages_out: int
    storage_bytes: int
    rate_in: float
    rate_out: float
    throughput_in: float
    throughput_out: float
    backlogs: _containers.ScalarMap[str, int]
    def __init__(self, name: _Optional[str] = ..., messages_in: _Optional[int] = ..., messages_out: _Optional[int] = ..., storage_bytes: _Optional[int] = ..., rate_in: _Optional[float] = ..., rate_out: _Optional[float] = ..., throughput_in: _Optional[float] = ..., throughput_out: _Optional[float] = ..., backlogs: _Optional[_Mapping[str, int]] = ...) -> None: ...

class TopicSpec(_message.Message):
    __slots__ = ("name", "partitions")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    partitions: int
    def __init__(self, name: _Optional[str] = ..., partitions: _Optional[int] = ...) -> None: ...

class ConsumerStats(_message.Message):
    __slots__ = ("name", "address", "permits", "unacked", "delivered_messages", "delivered_bytes", "redelivered_messages", "blocked", "priority_level", "slots", "role", "connected_ms", "acked_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PERMITS_FIELD_NUMBER: _ClassVar[int]
    UNACKED_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_BYTES_FIELD_NUMBER: _ClassVar[int]
    REDELIVERED_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    BLOCKED_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_LEVEL_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_MS_FIELD_NUMBER: _ClassVar[int]
    ACKED_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    permits: int
    unacked: int
    delivered_messages: int
    delivered_bytes: int
    redelivered_messages: int
    blocked: bool
    priority_level: int
    slots: _containers.RepeatedCompositeFieldContainer[SlotRange]
    role: str
    connected_ms: int
    acked_ms: int
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., permits: _Optional[int] = ..., unacked: _Optional[int] = ..., delivered_messages: _Optional[int] = ..., delivered_bytes: _Optional[int] = ..., redelivered_messages: _Optional[int] = ..., blocked: bool = ..., priority_level: _Optional[int] = ..., slots: _Optional[_Iterable[_Union[SlotRange, _Mapping]]] = ..., role: _Optional[str] = ..., connected_ms: _Optional[int] = ..., acked_ms: _Optional[int] = ...) -> None: ...

class HeldKey(_message.Message):
    __slots__ = ("slot", "key", "consumer", "address", "since_ms", "following_entries")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    CONSUMER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SINCE_MS_FIELD_NUMBER: _ClassVar[int]
    FOLLOWING_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    slot: int
    key: str
    consumer: str
    address: str
    since_ms: int
    following_entries: int
    def __init__(self, slot: _Optional[int] = ..., key: _Optional[str] = ..., consumer: _Optional[str] = ..., address: _Optional[str] = ..., since_ms: _Optional[int] = ..., following_entries: _Optional[int] = ...) -> None: ...

class DrainingSlot(_message.Message):
    __slots__ = ("slot", "unacked_entries", "blocked_attempts")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    UNACKED_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    BLOCKED_ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    unacked_entries: int
    blocked_attempts: int
    def __init__(self, slot: _Optional[int] = ..., unacked_entries: _Optional[int] = ..., blocked_attempts: _Optional[int] = ...) -> None: ...

class SubscriptionStats(_message.Message):
    __slots__ = ("backlog_bytes", "oldest_ms", "dispatch_throttled", "name", "type", "backlog", "unacked", "durable", "mark_delete", "read_position", "acked_ranges", "consumers", "blocked", "active_consumer", "blocked_on_unacked", "replay_entries", "key_shared_mode", "allow_out_of_order_delivery", "draining", "drained_total", "delayed", "delayed_buckets", "delayed_memory_bytes", "pending_transactions", "pending_entries", "held_keys", "filter", "judged", "filtered", "filtered_entries", "shown_unwanted", "expired", "filtered_unread")
    BACKLOG_BYTES_FIELD_NUMBER: _ClassVar[int]
    OLDEST_MS_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_THROTTLED_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_FIELD_NUMBER: _ClassVar[int]
    UNACKED_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    MARK_DELETE_FIELD_NUMBER: _ClassVar[int]
    READ_POSITION_FIELD_NUMBER: _ClassVar[int]
    ACKED_RANGES_FIELD_NUMBER: _ClassVar[int]
    CONSUMERS_FIELD_NUMBER: _ClassVar[int]
    BLOCKED_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_CONSUMER_FIELD_NUMBER: _ClassVar[int]
    BLOCKED_ON_UNACKED_FIELD_NUMBER: _ClassVar[int]
    REPLAY_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    KEY_SHARED_MODE_FIELD_NUMBER: _ClassVar[int]
    ALLOW_OUT_OF_ORDER_DELIVERY_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    DRAINED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DELAYED_FIELD_NUMBER: _ClassVar[int]
    DELAYED_BUCKETS_FIELD_NUMBER: _ClassVar[int]
    DELAYED_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PENDING_TRANSACTIONS_FIELD_NUMBER: _ClassVar[int]
    PENDING_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    HELD_KEYS_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    JUDGED_FIELD_NUMBER: _ClassVar[int]
    FILTERED_FIELD_NUMBER: _ClassVar[int]
    FILTERED_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    SHOWN_UNWANTED_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    FILTERED_UNREAD_FIELD_NUMBER: _ClassVar[int]
    backlog_bytes: int
    oldest_ms: int
    dispatch_throttled: int
    name: str
    type: str
    backlog: int
    unacked: int
    durable: bool
    mark_delete: Position
    read_position: Position
    acked_ranges: int
    consumers: _containers.RepeatedCompositeFieldContainer[ConsumerStats]
    blocked: str
    active_consumer: str
    blocked_on_unacked: bool
    replay_entries: int
    key_shared_mode: str
    allow_out_of_order_delivery: bool
    draining: _containers.RepeatedCompositeFieldContainer[DrainingSlot]
    drained_total: int
    delayed: int
    delayed_buckets: int
    delayed_memory_bytes: int
    pending_transactions: int
    pending_entries: int
    held_keys: _containers.RepeatedCompositeFieldContainer[HeldKey]
    filter: str
    judged: int
    filtered: int
    filtered_entries: int
    shown_unwanted: int
    expired: int
    filtered_unread: int
    def __init__(self, backlog_bytes: _Optional[int] = ..., oldest_ms: _Optional[int] = ..., dispatch_throttled: _Optional[int] = ..., name: _Optional[str] = ..., type: _Optional[str] = ..., backlog: _Optional[int] = ..., unacked: _Optional[int] = ..., durable: bool = ..., mark_delete: _Optional[_Union[Position, _Mapping]] = ..., read_position: _Optional[_Union[Position, _Mapping]] = ..., acked_ranges: _Optional[int] = ..., consumers: _Optional[_Iterable[_Union[ConsumerStats, _Mapping]]] = ..., blocked: _Optional[str] = ..., active_consumer: _Optional[str] = ..., blocked_on_unacked: bool = ..., replay_entries: _Optional[int] = ..., key_shared_mode: _Optional[str] = ..., allow_out_of_order_delivery: bool = ..., draining: _Optional[_Iterable[_Union[DrainingSlot, _Mapping]]] = ..., drained_total: _Optional[int] = ..., delayed: _Optional[int] = ..., delayed_buckets: _Optional[int] = ..., delayed_memory_bytes: _Optional[int] = ..., pending_transactions: _Optional[int] = ..., pending_entries: _Optional[int] = ..., held_keys: _Optional[_Iterable[_Union[HeldKey, _Mapping]]] = ..., filter: _Optional[str] = ..., judged: _Optional[int] = ..., filtered: _Optional[int] = ..., filtered_entries: _Optional[int] = ..., shown_unwanted: _Optional[int] = ..., expired: _Optional[int] = ..., filtered_unread: _Optional[int] = ...) -> None: ...

class ProducerStats(_message.Message):
    __slots__ = ("name", "address", "messages", "bytes", "last_sequence_id", "role", "connected_ms", "acks")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_MS_FIELD_NUMBER: _ClassVar[int]
    ACKS_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    messages: int
    bytes: int
    last_sequence_id: int
    role: str
    connected_ms: int
    acks: str
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., messages: _Optional[int] = ..., bytes: _Optional[int] = ..., last_sequence_id: _Optional[int] = ..., role: _Optional[str] = ..., connected_ms: _Optional[int] = ..., acks: _Optional[str] = ...) -> None: ...

class TopicStatsReply(_message.Message):
    __slots__ = ("name", "owner", "messages_in", "bytes_in", "messages_out", "bytes_out", "storage_bytes", "earliest_index", "end_index", "producers", "subscriptions", "partitions", "rate_in", "rate_out", "throughput_in", "throughput_out", "dropped", "quota", "expired_entries", "evicted_entries", "publish_throttled", "terminated", "created_ms", "published_ms", "unsubscribed", "transactions", "durability", "key_index", "unindexed_ledgers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_IN_FIELD_NUMBER: _ClassVar[int]
    BYTES_IN_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_OUT_FIELD_NUMBER: _ClassVar[int]
    BYTES_OUT_FIELD_NUMBER: _ClassVar[int]
    STORAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    EARLIEST_INDEX_FIELD_NUMBER: _ClassVar[int]
    END_INDEX_FIELD_NUMBER: _ClassVar[int]
    PRODUCERS_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    PARTITIONS_FIELD_NUMBER: _ClassVar[int]
    RATE_IN_FIELD_NUMBER: _ClassVar[int]
    RATE_OUT_FIELD_NUMBER: _ClassVar[int]
    THROUGHPUT_IN_FIELD_NUMBER: _ClassVar[int]
    THROUGHPUT_OUT_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    QUOTA_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    EVICTED_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_THROTTLED_FIELD_NUMBER: _ClassVar[int]
    TERMINATED_FIELD_NUMBER: _ClassVar[int]
    CREATED_MS_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_MS_FIELD_NUMBER: _ClassVar[int]
    UNSUBSCRIBED_FIELD_NUMBER: _ClassVar[int]
    TRANSACTIONS_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    KEY_INDEX_FIELD_NUMBER: _ClassVar[int]
    UNINDEXED_LEDGERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    owner: str
    messages_in: int
    bytes_in: int
    messages_out: int
    bytes_out: int
    storage_bytes: int
    earliest_index: int
    end_index: int
    producers: _containers.RepeatedCompositeFieldContainer[ProducerStats]
    subscriptions: _containers.RepeatedCompositeFieldContainer[SubscriptionStats]
    partitions: int
    rate_in: float
    rate_out: float
    throughput_in: float
    throughput_out: float
    dropped: int
    quota: str
    expired_entries: int
    evicted_entries: int
    publish_throttled: int
    terminated: bool
    created_ms: int
    published_ms: int
    unsubscribed: str
    transactions: TopicTransactions
    durability: str
    key_index: str
    unindexed_ledgers: int
    def __init__(self, name: _Optional[str] = ..., owner: _Optional[str] = ..., messages_in: _Optional[int] = ..., bytes_in: _Optional[int] = ..., messages_out: _Optional[int] = ..., bytes_out: _Optional[int] = ..., storage_bytes: _Optional[int] = ..., earliest_index: _Optional[int] = ..., end_index: _Optional[int] = ..., producers: _Optional[_Iterable[_Union[ProducerStats, _Mapping]]] = ..., subscriptions: _Optional[_Iterable[_Union[SubscriptionStats, _Mapping]]] = ..., partitions: _Optional[int] = ..., rate_in: _Optional[float] = ..., rate_out: _Optional[float] = ..., throughput_in: _Optional[float] = ..., throughput_out: _Optional[float] = ..., dropped: _Optional[int] = ..., quota: _Optional[str] = ..., expired_entries: _Optional[int] = ..., evicted_entries: _Optional[int] = ..., publish_throttled: _Optional[int] = ..., terminated: bool = ..., created_ms: _Optional[int] = ..., published_ms: _Optional[int] = ..., unsubscribed: _Optional[str] = ..., transactions: _Optional[_Union[TopicTransactions, _Mapping]] = ..., durability: _Optional[str] = ..., key_index: _Optional[str] = ..., unindexed_ledgers: _Optional[int] = ...) -> None: ...

class TopicTransactions(_message.Message):
    __slots__ = ("last_stable", "stable_index", "open", "oldest", "oldest_ms", "aborted_entries", "aborted_bytes", "committed", "aborted")
    LAST_STABLE_FIELD_NUMBER: _ClassVar[int]
    STABLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    OLDEST_FIELD_NUMBER: _ClassVar[int]
    OLDEST_MS_FIELD_NUMBER: _ClassVar[int]
    ABORTED_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    ABORTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    last_stable: Position
    stable_index: int
    open: int
    oldest: TransactionId
    oldest_ms: int
    aborted_entries: int
    aborted_bytes: int
    committed: int
    aborted: int
    def __init__(self, last_stable: _Optional[_Union[Position, _Mapping]] = ..., stable_index: _Optional[int] = ..., open: _Optional[int] = ..., oldest: _Optional[_Union[TransactionId, _Mapping]] = ..., oldest_ms: _Optional[int] = ..., aborted_entries: _Optional[int] = ..., aborted_bytes: _Optional[int] = ..., committed: _Optional[int] = ..., aborted: _Optional[int] = ...) -> None: ...

class LedgerStats(_message.Message):
    __slots__ = ("ledger_id", "entries", "bytes", "first_index", "state", "bookies", "stays", "key_index")
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BOOKIES_FIELD_NUMBER: _ClassVar[int]
    STAYS_FIELD_NUMBER: _ClassVar[int]
    KEY_INDEX_FIELD_NUMBER: _ClassVar[int]
    ledger_id: int
    entries: int
    bytes: int
    first_index: int
    state: str
    bookies: _containers.RepeatedScalarFieldContainer[str]
    stays: str
    key_index: str
    def __init__(self, ledger_id: _Optional[int] = ..., entries: _Optional[int] = ..., bytes: _Optional[int] = ..., first_index: _Optional[int] = ..., state: _Optional[str] = ..., bookies: _Optional[_Iterable[str]] = ..., stays: _Optional[str] = ..., key_index: _Optional[str] = ...) -> None: ...

class TopicInternalStatsReply(_message.Message):
    __slots__ = ("state", "ledgers", "last_confirmed", "cache_bytes", "pending_adds", "replication", "wanted_replication", "degraded")
    STATE_FIELD_NUMBER: _ClassVar[int]
    LEDGERS_FIELD_NUMBER: _ClassVar[int]
    LAST_CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PENDING_ADDS_FIELD_NUMBER: _ClassVar[int]
    REPLICATION_FIELD_NUMBER: _ClassVar[int]
    WANTED_REPLICATION_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    state: str
    ledgers: _containers.RepeatedCompositeFieldContainer[LedgerStats]
    last_confirmed: Position
    cache_bytes: int
    pending_adds: int
    replication: str
    wanted_replication: str
    degraded: bool
    def __init__(self, state: _Optional[str] = ..., ledgers: _Optional[_Iterable[_Union[LedgerStats, _Mapping]]] = ..., last_confirmed: _Optional[_Union[Position, _Mapping]] = ..., cache_bytes: _Optional[int] = ..., pending_adds: _Optional[int] = ..., replication: _Optional[str] = ..., wanted_replication: _Optional[str] = ..., degraded: bool = ...) -> None: ...

class SubscriptionSpec(_message.Message):
    __slots__ = ("topic", "name", "position", "properties")
    class PropertiesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    PROPERTIES_FIELD_NUMBER: _ClassVar[int]
    topic: str
    name: str
    position: MessageId
    properties: _containers.ScalarMap[str, str]
    def __init__(self, topic: _Optional[str] = ..., name: _Optional[str] = ..., position: _Optional[_Union[MessageId, _Mapping]] = ..., properties: _Optional[_Mapping[str, str]] = ...) -> None: ...

class DeleteSubscriptionRequest(_message.Message):
    __slots__ = ("topic", "name", "force")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    topic: str
    name: str
    force: bool
    def __init__(self, topic: _Optional[str] = ..., name: _Optional[str] = ..., force: bool = ...) -> None: ...

class ResetSubscriptionRequest(_message.Message):
    __slots__ = ("topic", "name", "message_id", "publish_time_ms", "exclude")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_FIELD_NUMBER: _ClassVar[int]
    topic: str
    name: str
    message_id: MessageId
    publish_time_ms: int
    exclude: bool
    def __init__(self, topic: _Optional[str] = ..., name: _Optional[str] = ..., message_id: _Optional[_Union[MessageId, _Mapping]] = ..., publish_time_ms: _Optional[int] = ..., exclude: bool = ...) -> None: ...

class FindOrphansRequest(_message.Message):
    __slots__ = ("remove", "unexplained")
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    UNEXPLAINED_FIELD_NUMBER: _ClassVar[int]
    remove: bool
    unexplained: bool
    def __init__(self, remove: bool = ..., unexplained: bool = ...) -> None: ...

class OrphanLedger(_message.Message):
    __slots__ = ("ledger_id", "topic", "subscription", "created_ms", "deleted", "unexplained")
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    CREATED_MS_FIELD_NUMBER: _ClassVar[int]
    DELETED_FIELD_NUMBER: _ClassVar[int]
    UNEXPLAINED_FIELD_NUMBER: _ClassVar[int]
    ledger_id: int
    topic: str
    subscription: str
    created_ms: int
    deleted: bool
    unexplained: bool
    def __init__(self, ledger_id: _Optional[int] = ..., topic: _Optional[str] = ..., subscription: _Optional[str] = ..., created_ms: _Optional[int] = ..., deleted: bool = ..., unexplained: bool = ...) -> None: ...

class OrphansReply(_message.Message):
    __slots__ = ("orphans", "missing")
    ORPHANS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    orphans: _containers.RepeatedCompositeFieldContainer[OrphanLedger]
    missing: _containers.RepeatedCompositeFieldContainer[OrphanLedger]
    def __init__(self, orphans: _Optional[_Iterable[_Union[OrphanLedger, _Mapping]]] = ..., missing: _Optional[_Iterable[_Union[OrphanLedger, _Mapping]]] = ...) -> None: ...

class ExpireMessagesRequest(_message.Message):
    __slots__ = ("topic", "name", "older_than_s", "message_id")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    OLDER_THAN_S_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    topic: str
    name: str
    older_than_s: float
    message_id: MessageId
    def __init__(self, topic: _Optional[str] = ..., name: _Optional[str] = ..., older_than_s: _Optional[float] = ..., message_id: _Optional[_Union[MessageId, _Mapping]] = ...) -> None: ...

class ExpireMessagesReply(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: int
    def __init__(self, entries: _Optional[int] = ...) -> None: ...

class ExamineMessagesRequest(_message.Message):
    __slots__ = ("topic", "from_latest", "number")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    FROM_LATEST_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    topic: str
    from_latest: bool
    number: int
    def __init__(self, topic: _Optional[str] = ..., from_latest: bool = ..., number: _Optional[int] = ...) -> None: ...

class GetMessageRequest(_message.Message):
    __slots__ = ("topic", "ledger_id", "entry_id")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRY_ID_FIELD_NUMBER: _ClassVar[int]
    topic: str
    ledger_id: int
    entry_id: int
    def __init__(self, topic: _Optional[str] = ..., ledger_id: _Optional[int] = ..., entry_id: _Optional[int] = ...) -> None: ...

class ListTransactionsRequest(_message.Message):
    __slots__ = ("coordinator", "txn", "limit")
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    TXN_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    coordinator: int
    txn: TransactionId
    limit: int
    def __init__(self, coordinator: _Optional[int] = ..., txn: _Optional[_Union[TransactionId, _Mapping]] = ..., limit: _Optional[int] = ...) -> None: ...

class TransactionInfo(_message.Message):
    __slots__ = ("txn", "state", "owner", "name", "sink", "age_ms", "remaining_ms", "topics", "reason", "address", "timeout_ms")
    TXN_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SINK_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    txn: TransactionId
    state: TransactionState
    owner: str
    name: str
    sink: SinkTag
    age_ms: int
    remaining_ms: int
    topics: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    address: str
    timeout_ms: int
    def __init__(self, txn: _Optional[_Union[TransactionId, _Mapping]] = ..., state: _Optional[_Union[TransactionState, str]] = ..., owner: _Optional[str] = ..., name: _Optional[str] = ..., sink: _Optional[_Union[SinkTag, _Mapping]] = ..., age_ms: _Optional[int] = ..., remaining_ms: _Optional[int] = ..., topics: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ..., address: _Optional[str] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class ListTransactionsReply(_message.Message):
    __slots__ = ("items", "open", "prepared", "unsettled", "epoch", "committed", "aborted", "next_least", "done_below", "loading_ms", "loaded_ms", "ledger_id", "ledger_entries", "ledger_bytes")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    UNSETTLED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    NEXT_LEAST_FIELD_NUMBER: _ClassVar[int]
    DONE_BELOW_FIELD_NUMBER: _ClassVar[int]
    LOADING_MS_FIELD_NUMBER: _ClassVar[int]
    LOADED_MS_FIELD_NUMBER: _ClassVar[int]
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    LEDGER_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    LEDGER_BYTES_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[TransactionInfo]
    open: int
    prepared: int
    unsettled: int
    epoch: int
    committed: int
    aborted: int
    next_least: int
    done_below: int
    loading_ms: int
    loaded_ms: int
    ledger_id: int
    ledger_entries: int
    ledger_bytes: int
    def __init__(self, items: _Optional[_Iterable[_Union[TransactionInfo, _Mapping]]] = ..., open: _Optional[int] = ..., prepared: _Optional[int] = ..., unsettled: _Optional[int] = ..., epoch: _Optional[int] = ..., committed: _Optional[int] = ..., aborted: _Optional[int] = ..., next_least: _Optional[int] = ..., done_below: _Optional[int] = ..., loading_ms: _Optional[int] = ..., loaded_ms: _Optional[int] = ..., ledger_id: _Optional[int] = ..., ledger_entries: _Optional[int] = ..., ledger_bytes: _Optional[int] = ...) -> None: ...

class DetachTransactionRequest(_message.Message):
    __slots__ = ("txn", "topic")
    TXN_FIELD_NUMBER: _ClassVar[int]
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    txn: TransactionId
    topic: str
    def __init__(self, txn: _Optional[_Union[TransactionId, _Mapping]] = ..., topic: _Optional[str] = ...) -> None: ...

class ListHalvesRequest(_message.Message):
    __slots__ = ("coordinator", "half", "group", "limit")
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    HALF_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    coordinator: int
    half: TransactionId
    group: str
    limit: int
    def __init__(self, coordinator: _Optional[int] = ..., half: _Optional[_Union[TransactionId, _Mapping]] = ..., group: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class HalfInfo(_message.Message):
    __slots__ = ("half", "state", "owner", "group", "check_key", "age_ms", "unknown", "members", "bytes", "topics", "reason")
    class State(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        WAITING: _ClassVar[HalfInfo.State]
        ASKED: _ClassVar[HalfInfo.State]
        COMMITTING: _ClassVar[HalfInfo.State]
        ENDING: _ClassVar[HalfInfo.State]
        PARKED: _ClassVar[HalfInfo.State]
    WAITING: HalfInfo.State
    ASKED: HalfInfo.State
    COMMITTING: HalfInfo.State
    ENDING: HalfInfo.State
    PARKED: HalfInfo.State
    HALF_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    CHECK_KEY_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    half: TransactionId
    state: HalfInfo.State
    owner: str
    group: str
    check_key: str
    age_ms: int
    unknown: int
    members: int
    bytes: int
    topics: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    def __init__(self, half: _Optional[_Union[TransactionId, _Mapping]] = ..., state: _Optional[_Union[HalfInfo.State, str]] = ..., owner: _Optional[str] = ..., group: _Optional[str] = ..., check_key: _Optional[str] = ..., age_ms: _Optional[int] = ..., unknown: _Optional[int] = ..., members: _Optional[int] = ..., bytes: _Optional[int] = ..., topics: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ...) -> None: ...

class ListHalvesReply(_message.Message):
    __slots__ = ("items", "open", "parked", "bytes")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    PARKED_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[HalfInfo]
    open: int
    parked: int
    bytes: int
    def __init__(self, items: _Optional[_Iterable[_Union[HalfInfo, _Mapping]]] = ..., open: _Optional[int] = ..., parked: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class ChangeHalfRequest(_message.Message):
    __slots__ = ("half", "verb")
    class Verb(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        COMMIT: _ClassVar[ChangeHalfRequest.Verb]
        ROLLBACK: _ClassVar[ChangeHalfRequest.Verb]
        PARK: _ClassVar[ChangeHalfRequest.Verb]
        REVIVE: _ClassVar[ChangeHalfRequest.Verb]
    COMMIT: ChangeHalfRequest.Verb
    ROLLBACK: ChangeHalfRequest.Verb
    PARK: ChangeHalfRequest.Verb
    REVIVE: ChangeHalfRequest.Verb
    HALF_FIELD_NUMBER: _ClassVar[int]
    VERB_FIELD_NUMBER: _ClassVar[int]
    half: TransactionId
    verb: ChangeHalfRequest.Verb
    def __init__(self, half: _Optional[_Union[TransactionId, _Mapping]] = ..., verb: _Optional[_Union[ChangeHalfRequest.Verb, str]] = ...) -> None: ...

class TopicTransactionRequest(_message.Message):
    __slots__ = ("topic", "txn")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    TXN_FIELD_NUMBER: _ClassVar[int]
    topic: str
    txn: TransactionId
    def __init__(self, topic: _Optional[str] = ..., txn: _Optional[_Union[TransactionId, _Mapping]] = ...) -> None: ...

class TopicTransactionReply(_message.Message):
    __slots__ = ("known", "first", "entries", "bytes", "holds", "waiting", "subscriptions")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    known: bool
    first: Position
    entries: int
    bytes: int
    holds: bool
    waiting: int
    subscriptions: _containers.RepeatedCompositeFieldContainer[PendingOfTransaction]
    def __init__(self, known: bool = ..., first: _Optional[_Union[Position, _Mapping]] = ..., entries: _Optional[int] = ..., bytes: _Optional[int] = ..., holds: bool = ..., waiting: _Optional[int] = ..., subscriptions: _Optional[_Iterable[_Union[PendingOfTransaction, _Mapping]]] = ...) -> None: ...

class PendingOfTransaction(_message.Message):
    __slots__ = ("name", "entries", "up_to")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    UP_TO_FIELD_NUMBER: _ClassVar[int]
    name: str
    entries: int
    up_to: Position
    def __init__(self, name: _Optional[str] = ..., entries: _Optional[int] = ..., up_to: _Optional[_Union[Position, _Mapping]] = ...) -> None: ...

class MessageIdByTimeRequest(_message.Message):
    __slots__ = ("topic", "publish_time_ms")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_TIME_MS_FIELD_NUMBER: _ClassVar[int]
    topic: str
    publish_time_ms: int
    def __init__(self, topic: _Optional[str] = ..., publish_time_ms: _Optional[int] = ...) -> None: ...

class BacklogSizeRequest(_message.Message):
    __slots__ = ("topic", "position")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    topic: str
    position: MessageId
    def __init__(self, topic: _Optional[str] = ..., position: _Optional[_Union[MessageId, _Mapping]] = ...) -> None: ...

class BacklogSizeReply(_message.Message):
    __slots__ = ("bytes",)
    BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    def __init__(self, bytes: _Optional[int] = ...) -> None: ...

class AnalyzeBacklogReply(_message.Message):
    __slots__ = ("entries", "messages", "acknowledged", "bytes", "complete", "unwanted_entries", "unwanted_messages")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    UNWANTED_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    UNWANTED_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    entries: int
    messages: int
    acknowledged: int
    bytes: int
    complete: bool
    unwanted_entries: int
    unwanted_messages: int
    def __init__(self, entries: _Optional[int] = ..., messages: _Optional[int] = ..., acknowledged: _Optional[int] = ..., bytes: _Optional[int] = ..., complete: bool = ..., unwanted_entries: _Optional[int] = ..., unwanted_messages: _Optional[int] = ...) -> None: ...

class SkipMessagesRequest(_message.Message):
    __slots__ = ("topic", "name", "messages")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    topic: str
    name: str
    messages: int
    def __init__(self, topic: _Optional[str] = ..., name: _Optional[str] = ..., messages: _Optional[int] = ...) -> None: ...

class PeekMessagesRequest(_message.Message):
    __slots__ = ("topic", "name", "messages")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    topic: str
    name: str
    messages: int
    def __init__(self, topic: _Optional[str] = ..., name: _Optional[str] = ..., messages: _Optional[int] = ...) -> None: ...

class PeekMessagesReply(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[Delivery]
    def __init__(self, entries: _Optional[_Iterable[_Union[Delivery, _Mapping]]] = ...) -> None: ...

class FindMessagesRequest(_message.Message):
    __slots__ = ("topic", "key", "property", "text", "where", "since_ms", "until_ms", "before_index", "limit", "dry_run", "acknowledged_by")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PROPERTY_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    WHERE_FIELD_NUMBER: _ClassVar[int]
    SINCE_MS_FIELD_NUMBER: _ClassVar[int]
    UNTIL_MS_FIELD_NUMBER: _ClassVar[int]
    BEFORE_INDEX_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_BY_FIELD_NUMBER: _ClassVar[int]
    topic: str
    key: str
    property: str
    text: str
    where: str
    since_ms: int
    until_ms: int
    before_index: int
    limit: int
    dry_run: bool
    acknowledged_by: str
    def __init__(self, topic: _Optional[str] = ..., key: _Optional[str] = ..., property: _Optional[str] = ..., text: _Optional[str] = ..., where: _Optional[str] = ..., since_ms: _Optional[int] = ..., until_ms: _Optional[int] = ..., before_index: _Optional[int] = ..., limit: _Optional[int] = ..., dry_run: bool = ..., acknowledged_by: _Optional[str] = ...) -> None: ...

class TraceMessageRequest(_message.Message):
    __slots__ = ("topic", "ledger_id", "entry_id", "batch_index")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRY_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_INDEX_FIELD_NUMBER: _ClassVar[int]
    topic: str
    ledger_id: int
    entry_id: int
    batch_index: int
    def __init__(self, topic: _Optional[str] = ..., ledger_id: _Optional[int] = ..., entry_id: _Optional[int] = ..., batch_index: _Optional[int] = ...) -> None: ...

class MessageState(_message.Message):
    __slots__ = ("subscription", "state", "detail")
    SUBSCRIPTION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    subscription: str
    state: str
    detail: str
    def __init__(self, subscription: _Optional[str] = ..., state: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class TraceMessageReply(_message.Message):
    __slots__ = ("stored", "subscriptions")
    STORED_FIELD_NUMBER: _ClassVar[int]
    SUBSCRIPTIONS_FIELD_NUMBER: _ClassVar[int]
    stored: str
    subscriptions: _containers.RepeatedCompositeFieldContainer[MessageState]
    def __init__(self, stored: _Optional[str] = ..., subscriptions: _Optional[_Iterable[_Union[MessageState, _Mapping]]] = ...) -> None: ...

class CancelDelayedRequest(_message.Message):
    __slots__ = ("topic", "ledger_id", "entry_id", "batch_index")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRY_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_INDEX_FIELD_NUMBER: _ClassVar[int]
    topic: str
    ledger_id: int
    entry_id: int
    batch_index: int
    def __init__(self, topic: _Optional[str] = ..., ledger_id: _Optional[int] = ..., entry_id: _Optional[int] = ..., batch_index: _Optional[int] = ...) -> None: ...

class CancelDelayedReply(_message.Message):
    __slots__ = ("cancelled", "acknowledged")
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    cancelled: _containers.RepeatedScalarFieldContainer[str]
    acknowledged: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, cancelled: _Optional[_Iterable[str]] = ..., acknowledged: _Optional[_Iterable[str]] = ...) -> None: ...

class TopicName(_message.Message):
    __slots__ = ("topic",)
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    topic: str
    def __init__(self, topic: _Optional[str] = ...) -> None: ...

class ScheduleName(_message.Message):
    __slots__ = ("topic", "name")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    topic: str
    name: str
    def __init__(self, topic: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class PauseScheduleRequest(_message.Message):
    __slots__ = ("topic", "name", "paused")
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    topic: str
    name: str
    paused: bool
    def __init__(self, topic: _Optional[str] = ..., name: _Optional[str] = ..., paused: bool = ...) -> None: ...

class CreateScheduleRequest(_message.Message):
    __slots__ = ("topic", "name", "cron", "every_ms", "at_ms", "zone", "payload", "key", "properties", "missed")
    class PropertiesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TOPIC_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    CRON_FIELD_NUMBER: _ClassVar[int]
    EVERY_MS_FIELD_NUMBER: _ClassVar[int]
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PROPERTIES_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    topic: str
    name: str
    cron: str
    every_ms: int
    at_ms: int
    zone: str
    payload: bytes
    key: str
    properties: _containers.ScalarMap[str, str]
    missed: str
    def __init__(self, topic: _Optional[str] = ..., name: _Optional[str] = ..., cron: _Optional[str] = ..., every_ms: _Optional[int] = ..., at_ms: _Optional[int] = ..., zone: _Optional[str] = ..., payload: _Optional[bytes] = ..., key: _Optional[str] = ..., properties: _Optional[_Mapping[str, str]] = ..., missed: _Optional[str] = ...) -> None: ...

class ScheduleStats(_message.Message):
    __slots__ = ("name", "cron", "every_ms", "at_ms", "zone", "payload", "key", "properties", "missed", "status", "paused", "created_ms", "next_ms", "last_ms", "fired", "dropped")
    class PropertiesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    CRON_FIELD_NUMBER: _ClassVar[int]
    EVERY_MS_FIELD_NUMBER: _ClassVar[int]
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PROPERTIES_FIELD_NUMBER: _ClassVar[int]
    MISSED_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    CREATED_MS_FIELD_NUMBER: _ClassVar[int]
    NEXT_MS_FIELD_NUMBER: _ClassVar[int]
    LAST_MS_FIELD_NUMBER: _ClassVar[int]
    FIRED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    name: str
    cron: str
    every_ms: int
    at_ms: int
    zone: str
    payload: bytes
    key: str
    properties: _containers.ScalarMap[str, str]
    missed: str
    status: str
    paused: bool
    created_ms: int
    next_ms: int
    last_ms: int
    fired: int
    dropped: int
    def __init__(self, name: _Optional[str] = ..., cron: _Optional[str] = ..., every_ms: _Optional[int] = ..., at_ms: _Optional[int] = ..., zone: _Optional[str] = ..., payload: _Optional[bytes] = ..., key: _Optional[str] = ..., properties: _Optional[_Mapping[str, str]] = ..., missed: _Optional[str] = ..., status: _Optional[str] = ..., paused: bool = ..., created_ms: _Optional[int] = ..., next_ms: _Optional[int] = ..., last_ms: _Optional[int] = ..., fired: _Optional[int] = ..., dropped: _Optional[int] = ...) -> None: ...

class SchedulesReply(_message.Message):
    __slots__ = ("schedules",)
    SCHEDULES_FIELD_NUMBER: _ClassVar[int]
    schedules: _containers.RepeatedCompositeFieldContainer[ScheduleStats]
    def __init__(self, schedules: _Optional[_Iterable[_Union[ScheduleStats, _Mapping]]] = ...) -> None: ...

class FoundEntry(_message.Message):
    __slots__ = ("ledger_id", "entry_id", "entry", "acked_batch_indexes", "acknowledged")
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRY_ID_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    ACKED_BATCH_INDEXES_FIELD_NUMBER: _ClassVar[int]
    ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    ledger_id: int
    entry_id: int
    entry: bytes
    acked_batch_indexes: _containers.RepeatedScalarFieldContainer[int]
    acknowledged: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ledger_id: _Optional[int] = ..., entry_id: _Optional[int] = ..., entry: _Optional[bytes] = ..., acked_batch_indexes: _Optional[_Iterable[int]] = ..., acknowledged: _Optional[_Iterable[int]] = ...) -> None: ...

class FindMessagesReply(_message.Message):
    __slots__ = ("entries", "before_index", "messages", "bytes", "unread", "why", "waiting", "skipped", "ledgers", "unindexed_ledgers", "tells_acknowledged")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    BEFORE_INDEX_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    UNREAD_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    LEDGERS_FIELD_NUMBER: _ClassVar[int]
    UNINDEXED_LEDGERS_FIELD_NUMBER: _ClassVar[int]
    TELLS_ACKNOWLEDGED_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[FoundEntry]
    before_index: int
    messages: int
    bytes: int
    unread: int
    why: str
    waiting: int
    skipped: int
    ledgers: int
    unindexed_ledgers: int
    tells_acknowledged: bool
    def __init__(self, entries: _Optional[_Iterable[_Union[FoundEntry, _Mapping]]] = ..., before_index: _Optional[int] = ..., messages: _Optional[int] = ..., bytes: _Optional[int] = ..., unread: _Optional[int] = ..., why: _Optional[str] = ..., waiting: _Optional[int] = ..., skipped: _Optional[int] = ..., ledgers: _Optional[int] = ..., unindexed_ledgers: _Optional[int] = ..., tells_acknowledged: bool = ...) -> None: ...

class CompactionStatusReply(_message.Message):
    __slots__ = ("state", "step", "error", "looked_at", "to_look_at", "rounds", "ledger_id", "horizon", "messages", "entries", "bytes", "end_index", "compacted_ms", "due_bytes")
    STATE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LOOKED_AT_FIELD_NUMBER: _ClassVar[int]
    TO_LOOK_AT_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    LEDGER_ID_FIELD_NUMBER: _ClassVar[int]
    HORIZON_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    END_INDEX_FIELD_NUMBER: _ClassVar[int]
    COMPACTED_MS_FIELD_NUMBER: _ClassVar[int]
    DUE_BYTES_FIELD_NUMBER: _ClassVar[int]
    state: str
    step: str
    error: str
    looked_at: int
    to_look_at: int
    rounds: int
    ledger_id: int
    horizon: Position
    messages: int
    entries: int
    bytes: int
    end_index: int
    compacted_ms: int
    due_bytes: int
    def __init__(self, state: _Optional[str] = ..., step: _Optional[str] = ..., error: _Optional[str] = ..., looked_at: _Optional[int] = ..., to_look_at: _Optional[int] = ..., rounds: _Optional[int] = ..., ledger_id: _Optional[int] = ..., horizon: _Optional[_Union[Position, _Mapping]] = ..., messages: _Optional[int] = ..., entries: _Optional[int] = ..., bytes: _Optional[int] = ..., end_index: _Optional[int] = ..., compacted_ms: _Optional[int] = ..., due_bytes: _Optional[int] = ...) -> None: ...

class BrokerStatus(_message.Message):
    __slots__ = ("name", "endpoint", "topics", "bundles", "draining", "labels")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    TOPICS_FIELD_NUMBER: _ClassVar[int]
    BUNDLES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    name: str
    endpoint: str
    topics: int
    bundles: int
    draining: bool
    labels: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., endpoint: _Optional[str] = ..., topics: _Optional[int] = ..., bundles: _Optional[int] = ..., draining: bool = ..., labels: _Optional[_Iterable[str]] = ...) -> None: ...

class BrokersReply(_message.Message):
    __slots__ = ("brokers",)
    BROKERS_FIELD_NUMBER: _ClassVar[int]
    brokers: _containers.RepeatedCompositeFieldContainer[BrokerStatus]
    def __init__(self, brokers: _Optional[_Iterable[_Union[BrokerStatus, _Mapping]]] = ...) -> None: ...

class BookieStatus(_message.Message):
    __slots__ = ("id", "endpoint", "read_only", "rack", "free_bytes", "total_bytes", "group")
    ID_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    READ_ONLY_FIELD_NUMBER: _ClassVar[int]
    RACK_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    id: str
    endpoint: str
    read_only: bool
    rack: str
    free_bytes: int
    total_bytes: int
    group: str
    def __init__(self, id: _Optional[str] = ..., endpoint: _Optional[str] = ..., read_only: bool = ..., rack: _Optional[str] = ..., free_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., group: _Optional[str] = ...) -> None: ...

class BookiesReply(_message.Message):
    __slots__ = ("bookies",)
    BOOKIES_FIELD_NUMBER: _ClassVar[int]
    bookies: _containers.RepeatedCompositeFieldContainer[BookieStatus]
    def __init__(self, bookies: _Optional[_Iterable[_Union[BookieStatus, _Mapping]]] = ...) -> None: ...

class MetadataDisk(_message.Message):
    __slots__ = ("total_bytes", "free_bytes", "certificate_ends_ms", "backup_ms", "backup_every_ms", "backup_failure")
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_ENDS_MS_FIELD_NUMBER: _ClassVar[int]
    BACKUP_MS_FIELD_NUMBER: _ClassVar[int]
    BACKUP_EVERY_MS_FIELD_NUMBER: _ClassVar[int]
    BACKUP_FAILURE_FIELD_NUMBER: _ClassVar[int]
    total_bytes: int
    free_bytes: int
    certificate_ends_ms: int
    backup_ms: int
    backup_every_ms: int
    backup_failure: str
    def __init__(self, total_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., certificate_ends_ms: _Optional[int] = ..., backup_ms: _Optional[int] = ..., backup_every_ms: _Optional[int] = ..., backup_failure: _Optional[str] = ...) -> None: ...

class BackupRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class BackupReply(_message.Message):
    __slots__ = ("path", "revision", "bytes")
    PATH_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    path: str
    revision: int
    bytes: int
    def __init__(self, path: _Optional[str] = ..., revision: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("path", "after", "limit", "values", "nodes")
    PATH_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    path: str
    after: str
    limit: int
    values: bool
    nodes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, path: _Optional[str] = ..., after: _Optional[str] = ..., limit: _Optional[int] = ..., values: bool = ..., nodes: _Optional[_Iterable[str]] = ...) -> None: ...

class GetReply(_message.Message):
    __slots__ = ("exists", "value", "version", "revision", "ephemeral")
    EXISTS_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    EPHEMERAL_FIELD_NUMBER: _ClassVar[int]
    exists: bool
    value: bytes
    version: int
    revision: int
    ephemeral: bool
    def __init__(self, exists: bool = ..., value: _Optional[bytes] = ..., version: _Optional[int] = ..., revision: _Optional[int] = ..., ephemeral: bool = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("operations", "session")
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    operations: _containers.RepeatedCompositeFieldContainer[Operation]
    session: str
    def __init__(self, operations: _Optional[_Iterable[_Union[Operation, _Mapping]]] = ..., session: _Optional[str] = ...) -> None: ...

class Operation(_message.Message):
    __slots__ = ("kind", "path", "value", "expected", "ephemeral")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PUT: _ClassVar[Operation.Kind]
        DELETE: _ClassVar[Operation.Kind]
        CHECK: _ClassVar[Operation.Kind]
    PUT: Operation.Kind
    DELETE: Operation.Kind
    CHECK: Operation.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    EPHEMERAL_FIELD_NUMBER: _ClassVar[int]
    kind: Operation.Kind
    path: str
    value: bytes
    expected: int
    ephemeral: bool
    def __init__(self, kind: _Optional[_Union[Operation.Kind, str]] = ..., path: _Optional[str] = ..., value: _Optional[bytes] = ..., expected: _Optional[int] = ..., ephemeral: bool = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ("versions", "revision")
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedScalarFieldContainer[int]
    revision: int
    def __init__(self, versions: _Optional[_Iterable[int]] = ..., revision: _Optional[int] = ...) -> None: ...

class SessionRequests(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[SessionRequest]
    def __init__(self, items: _Optional[_Iterable[_Union[SessionRequest, _Mapping]]] = ...) -> None: ...

class SessionReplies(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[SessionReply]
    def __init__(self, items: _Optional[_Iterable[_Union[SessionReply, _Mapping]]] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("open", "watch", "unwatch", "ping", "close")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    WATCH_FIELD_NUMBER: _ClassVar[int]
    UNWATCH_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    open: OpenSession
    watch: WatchRequest
    unwatch: int
    ping: int
    close: Empty
    def __init__(self, open: _Optional[_Union[OpenSession, _Mapping]] = ..., watch: _Optional[_Union[WatchRequest, _Mapping]] = ..., unwatch: _Optional[int] = ..., ping: _Optional[int] = ..., close: _Optional[_Union[Empty, _Mapping]] = ...) -> None: ...

class OpenSession(_message.Message):
    __slots__ = ("session", "timeout_s")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    session: str
    timeout_s: float
    def __init__(self, session: _Optional[str] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("watch_id", "prefix", "after_revision")
    WATCH_ID_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    AFTER_REVISION_FIELD_NUMBER: _ClassVar[int]
    watch_id: int
    prefix: str
    after_revision: int
    def __init__(self, watch_id: _Optional[int] = ..., prefix: _Optional[str] = ..., after_revision: _Optional[int] = ...) -> None: ...

class SessionReply(_message.Message):
    __slots__ = ("opened", "events", "pong", "closed")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    opened: SessionOpened
    events: WatchEvents
    pong: int
    closed: Error
    def __init__(self, opened: _Optional[_Union[SessionOpened, _Mapping]] = ..., events: _Optional[_Union[WatchEvents, _Mapping]] = ..., pong: _Optional[int] = ..., closed: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class SessionOpened(_message.Message):
    __slots__ = ("session", "timeout_s", "revision")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    session: str
    timeout_s: float
    revision: int
    def __init__(self, session: _Optional[str] = ..., timeout_s: _Optional[float] = ..., revision: _Optional[int] = ...) -> None: ...

class WatchEvents(_message.Message):
    __slots__ = ("watch_id", "events", "revision", "reset")
    WATCH_ID_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    watch_id: int
    events: _containers.RepeatedCompositeFieldContainer[TreeEvent]
    revision: int
    reset: bool
    def __init__(self, watch_id: _Optional[int] = ..., events: _Optional[_Iterable[_Union[TreeEvent, _Mapping]]] = ..., revision: _Optional[int] = ..., reset: bool = ...) -> None: ...

class TreeEvent(_message.Message):
    __slots__ = ("kind", "path", "version", "revision")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PUT: _ClassVar[TreeEvent.Kind]
        DELETE: _ClassVar[TreeEvent.Kind]
    PUT: TreeEvent.Kind
    DELETE: TreeEvent.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    kind: TreeEvent.Kind
    path: str
    version: int
    revision: int
    def __init__(self, kind: _Optional[_Union[TreeEvent.Kind, str]] = ..., path: _Optional[str] = ..., version: _Optional[int] = ..., revision: _Optional[int] = ...) -> None: ...
