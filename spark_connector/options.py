"""The options of format("magnetar"): they are parsed once, and checked before any work.

Names are case-insensitive (Spark's rule). An option that is unknown, has an invalid value, or contradicts another
raises InvalidConfiguration, which names the option and the valid values. `MagnetarDataSource.schema()` and the
constructors of readers and writers parse first, so a wrong option never starts a query.

Also in this file, below its heading: the access of a query to the cluster (access)."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, field
from difflib import get_close_matches
from typing import Any

from ..cli.common.profiles import load_profile
from ..client.admin import AdminClient
from ..client.aio import Client
from ..client.common.checks import CLIENT_CHECKS, CheckTable
from ..client.connect.authentication import (
    Authentication,
    AuthenticationTLS,
    AuthenticationToken,
    UnsupportedAuthentication,
    make_authentication_by_name,
)
from ..client.model.options import PRODUCER_CHECKS
from ..proto.errors import InvalidConfiguration, InvalidName, InvalidRequest, MagnetarError
from ..proto.filters import parse_filter
from ..proto.names import TopicName
from .offsets import INCARNATIONS_KEY, PROGRESS_KEY

EARLIEST_OFFSET = -2
LATEST_OFFSET = -1
"""The number for the end of a partition in the JSON form of offsets, as in Kafka."""

Offsets = dict[str, dict[int, int]]
"""Full topic name without the partition → partition number → index; a topic without partitions has partition 0."""

_ALIASES = {
    "serviceurl": "service.url",
    "topics": "topic",
    "subscribe": "topic",
    "topicspattern": "topicspattern",
    "subscribepattern": "topicspattern",
    "predefinedsubscription": "subscription",
    "includeheaders": "includeproperties",
    "txnappid": "sinkid",  # Delta's names
    "txnversion": "batchid",
    "tokenfile": "token.file",
    "tls.ca": "tls.trust.certs.file",
    "tls.cert": "tls.certificate.file",
    "tls.key": "tls.private.key.file",
    "tlstrustcertsfilepath": "tls.trust.certs.file",
    "tlscertificatefilepath": "tls.certificate.file",
    "tlsprivatekeyfilepath": "tls.private.key.file",
    "magnetar.client.tls_trust_certs_file_path": "tls.trust.certs.file",
    "magnetar.client.tls_certificate_file_path": "tls.certificate.file",
    "magnetar.client.tls_private_key_file_path": "tls.private.key.file",
    "authpluginclassname": "auth.plugin",
    "authparams": "auth.params",
    "pulsar.client.authpluginclassname": "auth.plugin",  # pulsar-spark's
    "pulsar.client.authparams": "auth.params",
    "pulsar.client.tlstrustcertsfilepath": "tls.trust.certs.file",
}
_ELSEWHERE = {
    "kafka.bootstrap.servers": "service.url",
    "bootstrap.servers": "service.url",
    "assign": "startingOffsets of a topic, which names partitions",
    "kafka.group.id": "subscription",
    "groupidprefix": "subscriptionPrefix",
    "kafkaconsumer.polltimeoutms": "pollTimeoutMs",
    "kafka.isolation.level": "nothing: a source reads what is committed",
    "kafka.security.protocol": "service.url=magnetar+ssl://… and tls.trust.certs.file",
    "kafka.ssl.truststore.location": "tls.trust.certs.file (PEM)",
    "kafka.ssl.keystore.location": "tls.certificate.file and tls.private.key.file (PEM)",
    "kafka.sasl.mechanism": "token, or auth.plugin",
    "kafka.sasl.jaas.config": "token, or auth.plugin and auth.params",
    "kafka.compression.type": "magnetar.producer.compression_type",
    "kafka.linger.ms": "magnetar.producer.batching_max_publish_delay_ms",
    "kafka.batch.size": "magnetar.producer.batching_max_allowed_size_in_bytes",
    "kafka.request.timeout.ms": "magnetar.client.operation_timeout_seconds",
    "kafka.transactional.id": "sinkId",
    "admin.url": "service.url alone",
    "username": "auth.plugin=basic and auth.params",
    "password": "auth.plugin=basic and auth.params",
}
"""Options of Kafka's source and sink, and of pulsar-spark → the option to use here instead."""
SINK_ID_MAX = 400
"""Most characters of a sink id; a coordinator accepts 512."""
BATCH_TIMEOUT_S_MIN = 10.0
_SPELLED: dict[str, str] = {}
"""Option name in small letters, as Spark passes it → the name as people write it."""


def _names(spelled: str) -> frozenset[str]:
    """Returns the names of options in small letters. `spelled`: as people write them, separated by spaces."""
    _SPELLED.update({name.lower(): name for name in spelled.split()})
    return frozenset(spelled.lower().split())


_names("topics subscribe subscribePattern includeHeaders txnAppId txnVersion checkpointLocation")  # in _ALIASES
ACCESS_OPTIONS = {
    "service.url", "token", "token.file", "tls.trust.certs.file", "tls.certificate.file", "tls.private.key.file",
    "auth.plugin", "auth.params", "profile",
}  # fmt: skip
_COMMON = ACCESS_OPTIONS | {"topic"}
_SOURCE = _names(
    "topicsPattern startingOffsets startingTimestamp startingOffsetsByTimestamp startingOffsetsByTimestampStrategy "
    "failOnDataLoss minPartitions maxRecordsPerPartition includeProperties valueFormat columns pollTimeoutMs "
    "waitForTopic topicDiscoveryInterval crypto.private.key.file schema schemaErrors filter"
)
_STREAM = _names(
    "maxOffsetsPerTrigger maxBytesPerTrigger minOffsetsPerTrigger maxTriggerDelay subscription subscriptionPrefix "
    "durableCursor"
)
_BATCH = _names("endingOffsets endingTimestamp endingOffsetsByTimestamp")
_SINK = _names("deliveryGuarantee encryption.keys crypto.public.key.file schema")
_ONCE = _names("sinkId batchId onNewCheckpoint batchTimeout sendAtEnd")  # of a sink with exactly-once
_SPARKS_OWN = {"path", "checkpointlocation", "queryname", "outputmode", "triggerinterval"}
"""Options that Spark itself adds or reads; Spark passes them to every data source."""
_PRODUCER_SETTINGS: dict[str, Callable[[str], Any]] = {
    "compression_type": str.upper,
    "batching_max_messages": int,
    "batching_max_allowed_size_in_bytes": int,
    "batching_max_publish_delay_ms": int,
    "max_pending_messages": int,
    "send_timeout_millis": int,
}
# spark_connector/sink.py
_PRODUCER_ROWS = {name: row for name, row in PRODUCER_CHECKS.items() if name != "compression_type"}
_CLIENT_SETTINGS: dict[str, Callable[[str], Any]] = {
    "operation_timeout_seconds": float, "connection_timeout_ms": int, "concurrent_lookup_requests": int,
    "listener_name": str, "memory_limit_bytes": int,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The options of a Spark query that reads topics, with defaults filled in. docs/spark.md describes them by the
    names that users write. None: the option is not set, unless the comment says otherwise."""

    access: QueryAccess
    topics: tuple[TopicName, ...]  # empty with a pattern
    pattern: str | None
    starting: Offsets | int | None  # None: the default (latest for streams, earliest for batches)
    starting_times: dict[str, dict[int, int]] | int | None  # ms since the epoch
    on_no_offset_for_time: str  # "error" | "latest"
    ending: Offsets | int
    ending_times: dict[str, dict[int, int]] | int | None
    max_offsets_per_trigger: int | None
    max_bytes_per_trigger: int | None
    min_offsets_per_trigger: int | None
    max_trigger_delay_s: float
    min_partitions: int | None
    max_records_per_partition: int | None
    fail_on_data_loss: bool
    subscription: str | None  # durable; moves with Spark's commit
    by_query: bool  # … or one that is named after the query, which its tasks make and move
    include_properties: bool
    value_as_string: bool
    kafka_columns: bool
    discovery_interval_s: float
    poll_timeout_s: float
    wait_for_topic: bool
    client: Mapping[str, Any] = field(default_factory=dict)
    private_key_file: str | None = None  # None: encrypted messages cannot be read
    by_registry: bool = False  # columns by the topics' schemas
    strict_schema: bool = True  # a payload that is not of its schema ends the query
    wanted: str | None = None  # the filter of the messages that become rows; None: all do
    identity: str = field(default="", repr=False)  # a digest of all that the query says; equal ones share a connection


@dataclass(frozen=True, slots=True)
class ExactlyOnceOptions:
    """The options of a sink that writes each batch exactly once (spark_connector/sink.py). `sink_id` and `batch_id`
    identify a batch of a sink. `adopt`: whether a query with another checkpoint may take the sink over.
    `batch_timeout_s`: seconds for which a prepared transaction of a task waits for the commit. `send_at_end`: whether a
    task keeps its rows in memory and sends them when it has all of them."""

    sink_id: str = ""  # empty: the query's; of a batch query: it is written once each time that it runs
    batch_id: int | None = None  # of a batch query; a streaming one has its own
    adopt: bool = False  # another checkpoint takes the sink over
    batch_timeout_s: float = 86_400.0  # how long what a task wrote may wait for the others
    send_at_end: bool = True


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """The options of a Spark query that writes to topics, with defaults filled in. `client`, `producer`: parameters of
    the SDK. `encryption_keys`, `public_key_file`: the names of the keys for which messages are encrypted, and the PEM
    file of the public key; empty and None: messages are not encrypted."""

    access: QueryAccess
    topic: str | None  # None: from the column `topic`
    client: Mapping[str, Any]
    producer: Mapping[str, Any]
    encryption_keys: tuple[str, ...] = ()
    public_key_file: str | None = None
    by_registry: bool = False  # columns become payloads by the topic's schema
    once: ExactlyOnceOptions | None = None  # None: at least once


def _canonical(options: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    spelled: dict[str, str] = {}
    for name, value in options.items():
        lower = name.lower()
        key = _ALIASES.get(lower, lower)
        if key == "token.file":
            key, value = "token", f"file:{value}"
        if key in found and found[key] != value:
            raise InvalidConfiguration(
                f"options {spelled[key]!r} and {name!r} mean the same and differ; set one of them"
            )
        if "-----BEGIN" in value:
            raise InvalidConfiguration(f"option {name!r} is the path of a PEM file, and never what it holds")
        found[key], spelled[key] = value, name
    return found


def _refuse_unknown(found: Mapping[str, str], allowed: set[str], kind: str) -> None:
    everything = _COMMON | _SOURCE | _STREAM | _BATCH | _SINK | _ONCE
    for name in found:
        if name in allowed or name in _SPARKS_OWN or name.startswith(("magnetar.client.", "magnetar.producer.")):
            continue
        if name in everything:
            raise InvalidConfiguration(f"option {name!r} has no meaning for a {kind}; remove it")
        known = sorted({_spelled(each) for each in allowed})
        raise InvalidConfiguration(
            f'unknown option {name!r} for format("magnetar"){_meant(name, allowed)}; known: {", ".join(known)}'
        )


def _spelled(name: str) -> str:
    return _SPELLED.get(name, name)


def _meant(name: str, allowed: Iterable[str]) -> str:
    """Returns a hint for an unknown option: its name in this connector, or the nearest allowed one; empty: there is no
    hint."""
    if name in _ELSEWHERE:
        return f"; use {_ELSEWHERE[name]}"
    if name.startswith("kafka."):
        return "; settings of Kafka's client have no meaning here: see magnetar.client.* and magnetar.producer.*"
    names = {*allowed, *(alias for alias, target in _ALIASES.items() if target in allowed)}
    by_letters = {_bare(each): each for each in sorted(names)}
    near = get_close_matches(_bare(name), by_letters, 1, 0.75)
    return f"; did you mean {_spelled(by_letters[near[0]])!r}?" if near else ""


def _bare(name: str) -> str:
    return re.sub(r"[._-]", "", name)


def _positive(found: Mapping[str, str], name: str) -> int | None:
    text = found.get(name)
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise InvalidConfiguration(f"option {name!r} must be a whole number of at least 1, not {text!r}")
    return value


def _boolean(found: Mapping[str, str], name: str, default: bool) -> bool:
    text = found.get(name, str(default)).lower()
    if text not in ("true", "false"):
        raise InvalidConfiguration(f"option {name!r} must be true or false, not {text!r}")
    return text == "true"


def _choice(found: Mapping[str, str], name: str, allowed: tuple[str, ...]) -> str:
    text = found.get(name, allowed[0]).lower()
    if text not in allowed:
        raise InvalidConfiguration(f"option {name!r} must be one of {', '.join(allowed)}, not {text!r}")
    return text


_DURATION = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?\s*$")
_UNIT_S = {"ms": 0.001, "s": 1.0, None: 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def _duration_s(found: Mapping[str, str], name: str, default: str) -> float:
    text = found.get(name, default)
    match = _DURATION.match(text)
    if match is None:
        raise InvalidConfiguration(f"option {name!r} must be a duration such as 500ms, 60s or 15m, not {text!r}")
    return float(match[1]) * _UNIT_S[match[2]]


def _topic(text: str, option: str) -> TopicName:
    try:
        name = TopicName.parse(text)
    except InvalidName as error:
        raise InvalidConfiguration(f"option {option!r}: {error}") from error
    if name.is_partition:
        raise InvalidConfiguration(
            f"option {option!r} names partition {text!r}; name the topic and choose with startingOffsets"
        )
    return name


def _per_partition(found: Mapping[str, str], name: str, what: str) -> dict[str, dict[int, int]] | None:
    """Parses the JSON form {"topic": {"0": number}}; returns it with full topic names, or None if the option is
    missing."""
    text = found.get(name)
    if text is None:
        return None
    try:
        parsed = json.loads(text)
        return {
            str(_topic(topic, name)): {int(partition): int(value) for partition, value in partitions.items()}
            for topic, partitions in parsed.items()
            # a query's own
            if topic not in (INCARNATIONS_KEY, PROGRESS_KEY) or any(each.isdigit() for each in partitions)
        }
    except (ValueError, AttributeError, TypeError) as error:
        raise InvalidConfiguration(f"option {name!r} must be {what}, not {text!r}") from error


def _filter(found: Mapping[str, str]) -> str | None:
    text = found.get("filter")
    if text is None:
        return None
    try:
        return parse_filter(text.strip()).text
    except InvalidRequest as error:
        raise InvalidConfiguration(f"option 'filter': {error.message}") from error


def _offsets(found: Mapping[str, str], name: str, *, forbid: int | None = None) -> Offsets | int | None:
    text = found.get(name)
    if text is None:
        return None
    word = {"earliest": EARLIEST_OFFSET, "latest": LATEST_OFFSET}.get(text.strip().lower())
    result = word if word is not None else _per_partition(found, name, 'earliest, latest or {"topic":{"0":23,"1":-2}}')
    values = [result] if isinstance(result, int) else [v for p in (result or {}).values() for v in p.values()]
    if forbid in values:
        side = "latest (-1) as the start" if forbid == LATEST_OFFSET else "earliest (-2) as the end"
        raise InvalidConfiguration(f"option {name!r}: a batch cannot have {side}")
    if any(value < EARLIEST_OFFSET for value in values):
        raise InvalidConfiguration(f"option {name!r}: an index below -2 does not exist")
    return result


def _times(found: Mapping[str, str], single: str, each: str) -> dict[str, dict[int, int]] | int | None:
    if single in found:
        try:
            return _time_ms(int(found[single]))
        except ValueError:
            raise InvalidConfiguration(f"option {single!r} must be ms since the epoch, not {found[single]!r}") from None
    result = _per_partition(found, each, 'times in ms, as {"topic":{"0":1700000000000}}')
    for value in [value for partitions in (result or {}).values() for value in partitions.values()]:
        try:
            _time_ms(value)
        except ValueError:
            raise InvalidConfiguration(f"option {each!r} must hold ms since the epoch, not {value}") from None
    return result


def _time_ms(value: int) -> int:
    if not 0 <= value < 1 << 63:
        raise ValueError(value)
    return value


def _settings(
    found: Mapping[str, str], prefix: str, known: Mapping[str, Callable[[str], Any]], rows: CheckTable
) -> dict[str, Any]:
    """Returns the options that start with `prefix`, checked by the SDK's own table of parameters."""
    settings: dict[str, Any] = {}
    for name, value in found.items():
        if not name.startswith(prefix):
            continue
        key = name[len(prefix) :]
        if key not in known:
            names = [prefix + each for each in known]
            raise InvalidConfiguration(f"unknown option {name!r}{_meant(name, names)}; known: {', '.join(names)}")
        try:
            parsed = settings[key] = known[key](value)
        except ValueError:
            raise InvalidConfiguration(f"option {name!r} cannot be {value!r}") from None
        row = rows.get(key)
        if row is not None and row.find_error_class(parsed) is not None:
            raise InvalidConfiguration(f"option {name!r} is {row.allowed_text}, not {value!r}")
    return settings


def _identity(found: Mapping[str, str], access: QueryAccess, *more: object) -> str:
    """Returns a digest of all options and credentials, so that a query never uses the connection of a different one."""
    said = json.dumps([sorted(found.items()), astuple(access), *more])
    return hashlib.sha256(said.encode(errors="surrogatepass")).hexdigest()


def parse_source_options(options: Mapping[str, str], *, streaming: bool) -> SourceOptions:
    """Parses the options of a query that reads topics: a streaming or a batch query. Raises InvalidConfiguration for an
    unknown option, a wrong value, or options that contradict each other. Reads the environment and the profile."""
    found = _canonical(options)
    allowed = _COMMON | _SOURCE | (_STREAM if streaming else _BATCH)
    _refuse_unknown(found, allowed, "stream" if streaming else "batch read")
    topics = tuple(_topic(part.strip(), "topic") for part in found.get("topic", "").split(",") if part.strip())
    pattern = found.get("topicspattern")
    if bool(topics) == (pattern is not None):
        raise InvalidConfiguration(
            "give exactly one of the options 'topic' (or a comma list 'topics') and 'topicsPattern'"
        )
    if pattern is not None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise InvalidConfiguration(f"option 'topicsPattern' is no regular expression: {error}") from error
    maximum, minimum = _positive(found, "maxoffsetspertrigger"), _positive(found, "minoffsetspertrigger")
    if maximum is not None and minimum is not None and minimum > maximum:
        raise InvalidConfiguration(f"minOffsetsPerTrigger ({minimum}) is above maxOffsetsPerTrigger ({maximum})")
    if "maxtriggerdelay" in found and minimum is None:
        raise InvalidConfiguration("option 'maxTriggerDelay' has a meaning only with 'minOffsetsPerTrigger'")
    ending = _offsets(found, "endingoffsets", forbid=EARLIEST_OFFSET)
    kafka = _choice(found, "columns", ("magnetar", "kafka")) == "kafka"
    by_registry = _by_registry(found)
    if by_registry and (clash := sorted({"columns", "valueformat"} & found.keys())):
        raise InvalidConfiguration(f"option {clash[0]!r} has no meaning with schema=registry; remove it")
    if "schemaerrors" in found and not by_registry:
        raise InvalidConfiguration("option 'schemaErrors' has a meaning only with schema=registry")
    who = parse_query_access(found)
    return SourceOptions(
        access=who,
        identity=_identity(found, who, streaming),
        topics=topics,
        pattern=pattern,
        starting=_offsets(found, "startingoffsets", forbid=None if streaming else LATEST_OFFSET),
        starting_times=_times(found, "startingtimestamp", "startingoffsetsbytimestamp"),
        on_no_offset_for_time=_choice(found, "startingoffsetsbytimestampstrategy", ("error", "latest")),
        ending=LATEST_OFFSET if ending is None else ending,
        ending_times=_times(found, "endingtimestamp", "endingoffsetsbytimestamp"),
        max_offsets_per_trigger=maximum,
        max_bytes_per_trigger=_positive(found, "maxbytespertrigger"),
        min_offsets_per_trigger=minimum,
        max_trigger_delay_s=_duration_s(found, "maxtriggerdelay", "15m"),
        min_partitions=_positive(found, "minpartitions"),
        max_records_per_partition=_positive(found, "maxrecordsperpartition"),
        fail_on_data_loss=_boolean(found, "failondataloss", True),
        subscription=_subscription(found),
        by_query=streaming and not {"subscription", "durablecursor"} & found.keys(),
        include_properties=_boolean(found, "includeproperties", not kafka),  # Kafka's source leaves headers out
        value_as_string=_choice(found, "valueformat", ("binary", "string")) == "string",
        kafka_columns=kafka,
        discovery_interval_s=_duration_s(found, "topicdiscoveryinterval", "60s"),
        poll_timeout_s=(_positive(found, "polltimeoutms") or 120_000) / 1000,
        wait_for_topic=_boolean(found, "waitfortopic", False),
        client=_settings(found, "magnetar.client.", _CLIENT_SETTINGS, CLIENT_CHECKS),
        private_key_file=found.get("crypto.private.key.file"),
        by_registry=by_registry,
        strict_schema=_choice(found, "schemaerrors", ("fail", "null")) == "fail",
        wanted=_filter(found),
    )


def _by_registry(found: Mapping[str, str]) -> bool:
    return "schema" in found and _choice(found, "schema", ("registry",)) == "registry"


def _subscription(found: Mapping[str, str]) -> str | None:
    """Returns the name of the durable subscription: as given, or the prefix plus the topics, so that it is the same
    after a restart; None: there is no such subscription."""
    name = found.get("subscription")
    if name is not None or not _boolean(found, "durablecursor", False):
        if "subscriptionprefix" in found:
            raise InvalidConfiguration("option 'subscriptionPrefix' needs 'durableCursor' = true and no 'subscription'")
        return name
    what = found.get("topic", found.get("topicspattern", ""))
    return found.get("subscriptionprefix", "spark-magnetar-source") + "-" + re.sub(r"[^-.\w]+", "-", what).strip("-")


def parse_sink_options(options: Mapping[str, str], *, streaming: bool = False, complete: bool = False) -> SinkOptions:
    """Parses the options of a query that writes to topics. `streaming`: whether the query is a stream. `complete`: each
    batch of the stream contains the whole result (outputMode("complete")). Raises InvalidConfiguration for an unknown
    option, a wrong value, or options that contradict each other. Reads the environment and the profile."""
    found = _canonical(options)
    _refuse_unknown(found, _COMMON | _SINK | _ONCE, "sink")
    topic = found.get("topic")
    by_registry = _by_registry(found)
    if by_registry and not topic:
        raise InvalidConfiguration("a sink with schema=registry needs the option 'topic'")
    names = tuple(name.strip() for name in found.get("encryption.keys", "").split(",") if name.strip())
    if bool(names) != ("crypto.public.key.file" in found):
        raise InvalidConfiguration("options 'encryption.keys' and 'crypto.public.key.file' go together")
    return SinkOptions(
        access=parse_query_access(found),
        topic=str(_topic(topic, "topic")) if topic else None,
        client=_settings(found, "magnetar.client.", _CLIENT_SETTINGS, CLIENT_CHECKS),
        producer=_settings(found, "magnetar.producer.", _PRODUCER_SETTINGS, _PRODUCER_ROWS),
        encryption_keys=names,
        public_key_file=found.get("crypto.public.key.file"),
        by_registry=by_registry,
        once=_exactly_once(found, streaming=streaming, complete=complete),
    )


def _exactly_once(found: Mapping[str, str], *, streaming: bool, complete: bool) -> ExactlyOnceOptions | None:
    """Returns the options of exactly-once, which is the default of streams where it is possible; None: the sink writes
    at least once."""
    transient = found.get("topic", "").startswith("non-persistent:")
    least, once = "at-least-once", "exactly-once"
    default = (once, least) if streaming and not (complete or transient) else (least, once)
    if _choice(found, "deliveryguarantee", default) == least:
        if extra := sorted(_ONCE & found.keys()):
            raise InvalidConfiguration(f"option {extra[0]!r} has a meaning only with deliveryGuarantee=exactly-once")
        return None
    if complete:
        raise InvalidConfiguration(
            "a topic cannot be overwritten: with deliveryGuarantee=exactly-once use outputMode append, or foreachBatch"
            " (docs/spark.md, Update mode)"
        )
    if transient:
        raise InvalidConfiguration("a non-persistent topic takes no transactions: use deliveryGuarantee=at-least-once")
    sink_id, batch_id = found.get("sinkid", "").strip(), found.get("batchid")
    if "sinkid" in found and not 0 < len(sink_id) <= SINK_ID_MAX:
        raise InvalidConfiguration(f"option 'sinkId' has 1 to {SINK_ID_MAX} characters, not {len(sink_id)}")
    if streaming and batch_id is not None:
        raise InvalidConfiguration("option 'batchId' has no meaning for a stream, which numbers its batches; remove it")
    if not streaming and bool(sink_id) != (batch_id is not None):
        raise InvalidConfiguration(
            "options 'sinkId' and 'batchId' go together: the number says which rows were written already; in"
            " foreachBatch it is the function's second argument"
        )
    batch_timeout_s = _duration_s(found, "batchtimeout", "24h" if streaming else "1h")
    if not batch_timeout_s >= BATCH_TIMEOUT_S_MIN:
        raise InvalidConfiguration(f"option 'batchTimeout' is at least {BATCH_TIMEOUT_S_MIN:g}s")
    return ExactlyOnceOptions(
        sink_id=sink_id,
        batch_id=None if batch_id is None else _batch_id(batch_id),
        adopt=_choice(found, "onnewcheckpoint", ("error", "adopt")) == "adopt",
        batch_timeout_s=batch_timeout_s,
        send_at_end=_boolean(found, "sendatend", True),
    )


def _batch_id(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 63):
        raise InvalidConfiguration(f"option 'batchId' must be a whole number, 0 or more, not {text!r}")
    return int(text)


# --------------------------------------------------------------------------------------------------------------- access
# The access of a query to the cluster (`QueryAccess`): its service URL and credentials, from options, from environment
# variables and from a profile.
#
# | option | environment | profile | meaning |
# |---|---|---|---|
# | `service.url` | MAGNETAR_URL | url | the service URL of the cluster |
# | `token` | MAGNETAR_TOKEN | token | a token, or its place: `file:PATH`, `env:NAME` (in a profile only the place) |
# | `tls.trust.certs.file` | MAGNETAR_TLS_CA | tls_ca | the authorities that sign the brokers' certificates |
# | `tls.certificate.file` | MAGNETAR_TLS_CERT | tls_cert | the certificate of the query |
# | `tls.private.key.file` | MAGNETAR_TLS_KEY | tls_key | the private key of that certificate |
# | `auth.plugin`, `auth.params` | | | any of the SDK's credentials, by Pulsar's names: basic, oauth2, … |
# | `profile` | MAGNETAR_PROFILE | | the name of a profile (cli/common/profiles.py) |
#
# An option overrides the environment, and both override the profile; if an option, the environment or the profile has
# any credentials, they replace all credentials of a lower one. The driver reads environment and profile when a query is
# planned.
#
# **Where credentials are.** The objects that Spark ships, prints and stores name a file or variable, and never contain
# its content: each Python process reads the content when it needs it, again for each call, so that running streams use
# a token that was renewed in its place. If an option itself is a credential, the query's tasks have it in memory; Spark
# hides the values of options with such names in plans. The connector's reprs, errors and log lines never contain a
# credential. Guard: tests/spark/test_access.py.


_ENVIRONMENT = {
    "url": "MAGNETAR_URL", "token": "MAGNETAR_TOKEN", "tls_ca": "MAGNETAR_TLS_CA", "tls_cert": "MAGNETAR_TLS_CERT",
    "tls_key": "MAGNETAR_TLS_KEY",
}  # fmt: skip
_NAMES = {
    "url": "service.url", "token": "token", "tls_ca": "tls.trust.certs.file", "tls_cert": "tls.certificate.file",
    "tls_key": "tls.private.key.file",
}  # fmt: skip
_CREDENTIALS = {"token", "tls.certificate.file", "tls.private.key.file", "auth.plugin", "auth.params"}
_PLACES = ("file:", "env:")
_TOKEN_HEAD = "eyJ"
"""The first characters of every JWT."""
SHOWN_NAME_CHARACTERS_MAX = 200
"""Most characters of a place that an error message contains; if a token was given by mistake, it is longer than a
place."""
FILE_BYTES_MAX = 1 << 20
"""Largest file from which a credential is read, in bytes; keys and chains of certificates have some thousands."""


@dataclass(frozen=True, slots=True)
class QueryAccess:
    """The service URL and the credentials of one Spark query. `token` and `params` are credentials, or name the file or
    variable that contains them (`file:PATH`, `env:NAME`); the other credentials are paths of PEM files. An empty text:
    not given. The repr does not show `token` and `params`. `client` and `admin` raise the errors of
    `authentication`."""

    url: str
    token: str = field(default="", repr=False)  # where it is (`_PLACES`), or a token
    trust: str = ""  # paths of PEM files
    certificate: str = ""
    key: str = ""
    plugin: str = ""
    params: str = field(default="", repr=False)  # of the plugin, or where they are

    def authentication(self) -> Authentication | None:
        """Returns the credentials for a client; None if there are none. A token is read again from its file or variable
        whenever a server needs it. Raises InvalidConfiguration or OperationNotSupported if the credentials are not
        valid."""
        if self.token:
            return AuthenticationToken(lambda: _secret(self.token))
        if self.plugin:
            found = make_authentication_by_name(self.plugin, _secret(self.params))
            if isinstance(found, UnsupportedAuthentication):
                raise InvalidConfiguration(f"{self.plugin}: libraries of Pulsar's C++ client are not loaded")
            return found
        return AuthenticationTLS(self.certificate, self.key) if self.certificate else None

    def client(self, **settings: Any) -> Client:
        """Returns a new asyncio client with these credentials; it connects when it is first used. `settings`: further
        parameters of `Client`. The caller must close it. Raises the errors of `authentication`."""
        trust = self.trust or None
        return Client(
            self.url, self.authentication(), stats_interval_in_seconds=0, tls_trust_certs_file_path=trust, **settings
        )

    def admin(self, timeout_s: float) -> AdminClient:
        """Returns a new admin client with these credentials, whose requests have a time-out of `timeout_s` seconds. The
        caller must close it. Raises the errors of `authentication`."""
        return AdminClient(
            self.url, timeout_s=timeout_s, authentication=self.authentication(), tls_trust_certs_file_path=self.trust
        )

    def check(self) -> None:
        """Raises InvalidConfiguration if credentials contradict each other or are incomplete, or if the SDK would
        refuse them or the service URL. Sends nothing."""
        if self.token and (self.certificate or self.plugin):
            other = "tls.certificate.file" if self.certificate else "auth.plugin"
            raise InvalidConfiguration(f"options 'token' and {other!r} are two ways to say who you are: give one")
        if self.certificate and self.plugin:
            raise InvalidConfiguration("options 'tls.certificate.file' and 'auth.plugin' are two ways: give one")
        if self.token.startswith(("/", "./", "../", "~")):
            raise InvalidConfiguration("option 'token' is a token, or where it is: a file is named file:PATH")
        if bool(self.certificate) != bool(self.key):
            raise InvalidConfiguration("options 'tls.certificate.file' and 'tls.private.key.file' go together")
        if bool(self.plugin) != bool(self.params):
            raise InvalidConfiguration("options 'auth.plugin' and 'auth.params' go together")
        try:
            self.client()  # which connects when it is used
        except MagnetarError as error:
            raise InvalidConfiguration(f"option 'service.url' and its credentials: {error.message}") from None

    def list_credential_sources(self) -> Iterator[str]:
        """Yields the names of the files and variables (`file:PATH`, `env:NAME`) that contain the credentials."""
        yield from (each for each in (self.token, self.params) if each.startswith(_PLACES))
        yield from (f"file:{each}" for each in (self.trust, self.certificate, self.key) if each)


def parse_query_access(found: dict[str, str]) -> QueryAccess:
    """Returns the QueryAccess of a query, made from its options (by their canonical names). Missing options are taken
    from the environment and the profile. Raises InvalidConfiguration if there is no service URL, or if the URL, the
    credentials or the profile are wrong."""
    profile = _profile(found)
    said = {name: value for name in ACCESS_OPTIONS if (value := found.get(name, "").strip())}
    _token_of_plugin(said)
    environment = {name: os.environ.get(variable, "") for name, variable in _ENVIRONMENT.items()}
    if environment["token"].startswith(_TOKEN_HEAD):  # the token itself: each process reads it there
        environment["token"] = f"env:{_ENVIRONMENT['token']}"
    for source in (environment, profile):
        says_who = bool(_CREDENTIALS & said.keys())
        for name, value in source.items():
            option = _NAMES[name]
            if value and option not in said and not (says_who and option in _CREDENTIALS):
                said[option] = _placed(value) if name == "token" else value
    url = said.get("service.url", "")
    if not url:
        raise InvalidConfiguration(
            "option 'service.url' is required, for example magnetar://localhost:7650; or MAGNETAR_URL, or a profile"
        )
    if "@" in url:  # a plan shows the options
        raise InvalidConfiguration("option 'service.url' has no user and password")
    access = QueryAccess(
        url, said.get("token", ""), said.get("tls.trust.certs.file", ""), said.get("tls.certificate.file", ""),
        said.get("tls.private.key.file", ""), said.get("auth.plugin", ""), said.get("auth.params", ""),
    )  # fmt: skip
    access.check()
    return access


def _profile(found: Mapping[str, str]) -> Mapping[str, str]:
    name = found.get("profile", "").strip() or os.environ.get("MAGNETAR_PROFILE", "")
    try:
        return load_profile(name)
    except RuntimeError:  # no home folder, as in many containers
        if name:
            raise InvalidConfiguration(f"profile {name!r}: there is no home folder to read it from") from None
        return {}


def _placed(source: str) -> str:
    """Returns the place of a credential as `file:PATH` or `env:NAME`. `source`: a path or env:NAME, as in a command."""
    return source if source.startswith(_PLACES) else f"file:{source}"


def _token_of_plugin(said: dict[str, str]) -> None:
    """Replaces Pulsar's parameters of a token by our option `token`."""
    if said.get("auth.plugin", "").rpartition(".")[2].lower().removeprefix("authentication") != "token":
        return
    params = said.get("auth.params", "")
    if not params.startswith(("token:", *_PLACES)):  # Spark shows it in plans unless it has one of these words
        raise InvalidConfiguration("option 'auth.params' of a token begins with token:, file: or env:")
    if "token" in said:
        raise InvalidConfiguration("options 'token' and 'auth.plugin' are two ways to say who you are: give one")
    del said["auth.plugin"], said["auth.params"]
    said["token"] = params.removeprefix("token:")


def _secret(text: str) -> str:
    """Returns the current content of the place that `text` names; `text` itself if it names none. Raises
    InvalidConfiguration if the place cannot be read."""
    if not text.startswith(_PLACES):
        return text
    found = _read_place(text)
    if found is None or not found.strip():
        kind, _, name = text.partition(":")
        what = "the environment has no variable" if kind == "env" else "there is no credential in the file"
        # perhaps the token
        shown = name if len(name) <= SHOWN_NAME_CHARACTERS_MAX and _TOKEN_HEAD not in name else "that is named"
        raise InvalidConfiguration(f"{what} {shown}: every Python process of the query needs it")
    try:
        return found.decode().strip()
    except UnicodeDecodeError:
        raise InvalidConfiguration("a credential's file is not UTF-8 text") from None


def _read_place(place: str) -> bytes | None:
    kind, _, name = place.partition(":")
    if kind == "env":
        return os.environb.get(os.fsencode(name))
    try:
        with open(name.removeprefix("//"), "rb") as file:
            return file.read(FILE_BYTES_MAX)
    except OSError:
        return None


def digest_credential_sources(places: Iterable[str]) -> str:
    """Returns a digest of the present content of the files and variables `places` (`file:PATH`, `env:NAME`). It changes
    when their content changes. A file or variable that cannot be read counts as empty."""
    found = hashlib.sha256()
    for place in places:
        content = _read_place(place) or b""
        found.update(len(content).to_bytes(8, "big") + content)
    return found.hexdigest()
