"""Parsers of bytes that strangers send or that other programs wrote, each with valid samples to begin from.

A target takes any bytes and returns, or raises one of its typed errors. Another exception is a defect.
Where a checksum would hide the parser behind it, the target makes it right after the mutation.
"""

import contextlib
import json
import struct
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError
from pyroaring import BitMap

from magnetar.bookie.format.journal import crc32c
from magnetar.broker.common.config import BrokerConfig
from magnetar.broker.grpc import translate
from magnetar.broker.log import compaction_core as compacted
from magnetar.broker.subscription import cursor_format as cursor
from magnetar.broker.subscription.acks import parse_entry_ids
from magnetar.broker.subscription.core.cursor_state import (
    CursorChunkKey,
    CursorChunkKind,
    CursorState,
    bitmap_memory_bytes,
    count_contiguous_ranges,
    find_end_of_contiguous,
)
from magnetar.broker.topic import dedup
from magnetar.proto import entry, policies
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.entry_pb2 import MessageMetadata
from magnetar.proto.errors import MagnetarError
from magnetar.proto.names import Position
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.grpc.messages import find_bytes_field_tags, measure_item_to_parse
from magnetar.runtime.peer import envelope
from magnetar.security import basic
from magnetar.security import token as revoked
from magnetar.security.oidc import parse_issuer_keys
from magnetar.security.settings import SecuritySettings, TokenSection
from magnetar.security.token import TokenVerifier
from magnetar.spark_connector.offsets import parse_incarnations, parse_offset
from tests.fuzz import http2_targets, pulsar_targets

TYPED = (
    MagnetarError, cursor.DamagedCursorState, compacted.DamagedCompactedLedger, dedup.DamagedDedupSnapshot
)  # fmt: skip


class Target(NamedTuple):
    samples: Callable[[], list[bytes]]
    run: Callable[[bytes], object]
    errors: tuple[type[Exception], ...] = TYPED


# ---------------------------------------------------------------------------------- entries
def _entries() -> list[bytes]:
    one = MessageMetadata(producer_name="p", sequence_id=1, publish_time=1, partition_key="k")
    many = MessageMetadata(producer_name="p", sequence_id=1, publish_time=1)
    batch = entry.encode_batch(many, entry.encode_plain_items([b"a", b"bc", b""]), 3)
    return [entry.encode_entry(one, b"payload"), batch, entry.encode_broker_part(7, 1) + batch]


def _entry(data: bytes) -> None:
    start = data.find(entry.MAGIC_CLIENT)
    if start >= 0 and len(data) >= start + 6:
        checksum = struct.pack(">I", crc32c(data[start + 6 :]))
        data = data[: start + 2] + checksum + data[start + 6 :]
    entry.count_declared_messages(data)
    for parse in (entry.parse_stored_head, entry.split_broker_part):
        _tried(parse, data)
    _, header = entry.parse_entry(data)
    entry.find_distinct_keys(header.metadata, header.payload_offset, data)
    entry.decode_message_columns(header, data)


def _tried(parse: Callable[[bytes], object], data: bytes) -> None:
    with contextlib.suppress(*TYPED):
        parse(data)


# ---------------------------------------------------------------------------------- peers
def _envelopes() -> list[bytes]:
    items = [(1, b"head", [b"frame", bytes(5000)]), (2, b"", [])]
    return [bytes(envelope.encode_envelope(kind, bytes(16), items)[0]) for kind in envelope.EnvelopeKind]


# ---------------------------------------------------------------------------------- frames of clients
_COPIED = find_bytes_field_tags(wire.ClientFrames)


def _frames() -> list[bytes]:
    bits = BitMap([1, 2, 3, 70_000]).serialize()
    acked = wire.AckedEntry(ledger_id=1, entry_id=2, batch_indexes=[1, 5], batch_bits=b"\x03")
    sets = wire.EntrySet(ledger_id=1, entries=bits)
    frames = [
        wire.ClientFrame(id=1, open_producer=wire.OpenProducer(topic="t", properties={"a": "b"})),
        wire.ClientFrame(id=2, subscribe=wire.Subscribe(topic="t", subscription="s", type=1)),
        wire.ClientFrame(id=2, ack=wire.Ack(request_id=1, entries=[acked], ledgers=[sets])),
        wire.ClientFrame(id=2, redeliver=wire.Redeliver(ledgers=[sets])),
        wire.ClientFrame(id=1, publish=b"entry"),
        wire.ClientFrame(id=2, permits=1000),
    ]
    return [wire.ClientFrames(items=[each]).SerializeToString() for each in frames] + [
        wire.ClientFrames(items=frames).SerializeToString()
    ]


def _frame(data: bytes) -> None:
    offset = 0
    while offset < len(data):
        offset, _ = measure_item_to_parse(data, offset, _COPIED)
    for frame in wire.ClientFrames.FromString(data).items:
        kind = frame.WhichOneof("kind")
        if kind == "open_producer":
            translate.parse_producer_options(frame.open_producer, BrokerConfig()).check()
        elif kind == "subscribe":
            translate.parse_subscribe_options(frame.subscribe)
        elif kind == "ack":
            list(translate._check_ack(frame.ack))
            list(translate.parse_acked_entries(frame.ack.entries))
            for each in translate.parse_entry_sets(frame.ack.ledgers):
                _bitmap(each.entries)


def _bitmap(data: bytes) -> None:
    """With what the broker does to a set: it walks only what is in a topic."""
    found = parse_entry_ids(data)
    there = BitMap(range(100_000))
    len(found), bitmap_memory_bytes(found), len(found - there), len(there & found), len(there | found)
    count_contiguous_ranges(found & there)
    if found:
        find_end_of_contiguous(found, found.min()), found.max()


# ---------------------------------------------------------------------------------- text
_KEY = "data:;base64,c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0LXNlY3JldCE="


@cache
def _verifier() -> TokenVerifier:
    return TokenVerifier(TokenSection(secret_key=_KEY, algorithm="HS256"), SystemClock())


def _token(data: bytes) -> None:
    """Once as it came, and once as the claims of a token that is signed rightly."""
    import base64
    import hashlib
    import hmac

    text = data.decode("latin-1")
    _tried(lambda _: _verifier().verify(text), data)
    part = lambda each: base64.urlsafe_b64encode(each).rstrip(b"=")
    signed = part(b'{"alg":"HS256","typ":"JWT"}') + b"." + part(data)
    secret = base64.b64decode(_KEY.partition(",")[2])
    _verifier().verify((signed + b"." + part(hmac.digest(secret, signed, hashlib.sha256))).decode())


def _tokens() -> list[bytes]:
    import jwt

    return [
        b'{"sub": "ada", "exp": 99999999999, "nbf": 1, "aud": ["a"], "jti": "x"}', b'{"sub": ["a", "b"], "exp": 1e400}',
        jwt.encode({"sub": "ada"}, "s" * 40, algorithm="HS256").encode(), b"a.b.c", b"..", b'{"sub": ' + b"[" * 3000,
    ]  # fmt: skip


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="magnetar-fuzz-"))


def _settings(data: bytes) -> None:
    path = _folder() / "security.toml"
    path.write_bytes(data)
    SecuritySettings.load(str(path))


def _revoked(data: bytes) -> None:
    path = _folder() / "revoked.txt"
    path.write_bytes(data)
    revoked.read_revocations(str(path))


def _jwks(data: bytes) -> None:
    with contextlib.suppress(ValueError, RecursionError):  # as runtime/tcp/http_client.py, which asks for an object
        document = json.loads(data)
        if isinstance(document, dict):
            parse_issuer_keys(document)


_HTPASSWD = b"# users\nada:$2y$05$" + b"a" * 53 + b"\nbob:$apr1$r31.....$HqJZimcKQFAMYayBlzkrA/\n"
_JWKS = (
    b'{"keys": [{"kty": "EC", "crv": "P-256", "kid": "a", "alg": "ES256", "use": "sig",'
    b' "x": "f83OJ3D2xF1Bg8vub9tLe1gHMzV76e8Tus9uPHvRVEU", "y": "x_FEzRu9m36HLN_tue659LNpXW6pCyStikYjKIWI5a0"},'
    b' {"kty": "RSA", "kid": "b", "n": "AQAB", "e": "AQAB"}, {"kty": "oct", "k": "AAAA"}, 7]}'
)
_TOML = b"""[tls]
certificate = "a"
key = "b"
[token]
secret_key = "k"
algorithm = "HS256"
clock_skew_s = 5
[authorization]
super_users = ["admin"]
[broker]
token = "t"
"""


def _json(data: bytes) -> None:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return
    parse_offset(found)
    parse_incarnations(found)


# ---------------------------------------------------------------------------------- what brokers store
def _states() -> list[bytes]:
    key = CursorChunkKey(CursorChunkKind.HOLES, 1, 0)
    marker = cursor.encode_marker(Position(7, 3), {}, 1)
    chunk = cursor.encode_cursor_chunk(key, 1, BitMap([5, 9]).serialize())
    snapshot = b"".join(struct.pack(">I", len(each)) + each for each in marker)
    return [snapshot, *marker, *chunk, BitMap([5, 9]).serialize(), struct.pack(">qII", 1, 8, 1) + b"\x05"]


def _state(data: bytes) -> None:
    for piece in (data, data[4:]):
        _tried(cursor.decode_piece, piece)
    for kind in CursorChunkKind:
        _tried(
            lambda body, kind=kind: cursor.decode_chunk_into_state(
                CursorState(Position(0, 0)), CursorChunkKey(kind, 1, 0), body
            ),
            data,
        )
    _tried(cursor.decode_marker, data)
    cursor.decode_snapshot(data)


def _rows() -> list[bytes]:
    table = compacted.encode_survivor_table([compacted.SurvivingEntriesRow(1, 10, 0, 10, 0, BitMap([1, 2]))])
    return [compacted.decode_survivor_table_piece(table[0])[2]]


def _dedup(data: bytes) -> None:
    dedup.decode_snapshot([dedup.DedupSnapshotPiece(1, 0, 1, data)])


TARGETS: dict[str, Target] = {
    "entry": Target(_entries, _entry),
    "peer-envelope": Target(
        _envelopes, envelope.decode_envelope, (envelope.MalformedEnvelope, envelope.WrongEnvelopeMagic)
    ),
    "frames": Target(_frames, _frame, (MagnetarError, DecodeError)),
    "bitmap": Target(lambda: [BitMap(range(0, 9000, 2)).serialize(), BitMap([1, 1 << 30]).serialize(),
                              _run_set(), b""], _bitmap),
    "token": Target(_tokens, _token),
    "htpasswd": Target(lambda: [_HTPASSWD, b"a:{SHA}VBPuJHI7uixaa6LQGWx4s+5GKNE=\r\n"], basic.parse_htpasswd),
    "revoked": Target(lambda: [b"# ids\n0a1b\n\norders\n", b"x"], _revoked),
    "jwks": Target(lambda: [_JWKS, b'{"keys": []}', b"[]"], _jwks),
    "settings": Target(lambda: [_TOML], _settings),
    "policies": Target(lambda: [b"{}", b'{"retention_minutes": 3, "deduplication": true}', b"[" * 5000],
                       lambda data: policies.decode_policies(data.decode("latin-1"))),
    "offsets": Target(lambda: [b'{"persistent://t/n/topic": {"0": 23, "1": 42}}', b'{"a": 1}', b"[]"], _json),
    "cursor": Target(_states, _state),
    "compacted": Target(_rows, compacted.decode_survivor_table_rows),
    "dedup": Target(lambda: [b'{"ledger":1,"entry":2,"producers":[["p",1,"",0]]}', b"{}"], _dedup),
    "http2-requests": Target(http2_targets.requests, http2_targets.run_requests),
    "http2-answers": Target(http2_targets.answers, http2_targets.run_answers),
    "pulsar-frames": Target(pulsar_targets.frames, pulsar_targets.run_frames),
    "schemas": Target(pulsar_targets.schemas, pulsar_targets.run_schemas),
    "avro-payload": Target(pulsar_targets.payloads, pulsar_targets.run_payload),
    "rest-body": Target(pulsar_targets.bodies, pulsar_targets.run_body),
}  # fmt: skip


def _run_set() -> bytes:
    everything: Any = BitMap(range(1 << 20))
    everything.run_optimize()
    return everything.serialize()  # type: ignore[no-any-return]
