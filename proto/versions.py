"""The versions that this Magnetar writes: of the product, of each wire protocol, of each stored format.

One row is one format; the module that reads it documents its layout. All stored data has its version, so that a
Magnetar refuses data of a later one (`check_format`) rather than misread it; it reads every version up to its own. A
head keeps its layout up to its checksum in every version, so that damage is told from a later version. A row's
version grows when an older Magnetar could not read the new data; fields that readers may ignore (JSON, protobuf)
need no new one. Guard: tests/upgrade/ opens what earlier versions wrote.

A magic of two letters does not name a format by itself. "MD" begins a snapshot of deduplication and a bucket of delayed
messages, "MK" an entry of a key index. "MC" begins a cursor's entry and a compacted ledger's, "MX" the outcomes of a
topic and a coordinator's record. Each is read only from a ledger that the metadata record of its owner names; the
ledger's properties name that owner too.

Not in this table: the stored entry (proto/entry.py) and the serialized message id, whose bytes are Pulsar's and never
change, and Spark's offsets, whose file has Spark's own version.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

PRODUCT = "0.1.0"


class StoredFormat(NamedTuple):
    """A row of the table of formats: a format's name, its version, and the magic of its files."""

    name: str
    version: int
    magic: bytes = b""  # the first bytes of a bookie's file


GRPC = StoredFormat("gRPC services", 1)  # proto/wire.proto: fields are added, never changed, so no message carries it
PEER_ENVELOPE = StoredFormat("peer envelope", 1)  # runtime/peer/envelope.py
PEER = StoredFormat("peer protocol", 1)  # ledger/peer_format.py
WIRE_FORMATS = (GRPC, PEER_ENVELOPE, PEER)

JOURNAL = StoredFormat("bookie journal", 1, b"MGN-JRNL")
ENTRY_LOG = StoredFormat("bookie entry log", 1, b"MGN-ELOG")
INDEX = StoredFormat("bookie index", 1, b"MGN-INDX")
LEDGER_INDEX = StoredFormat("bookie ledger index", 1, b"MGN-LIDX")
LABELS = StoredFormat("bookie ledger labels", 1, b"MGN-LABL")
MARK = StoredFormat("bookie mark", 1, b"MGN-MARK")
NOTE = StoredFormat("bookie note", 1)  # bookie/format/mark.py: losses, scrub, collection, revisions seen
COOKIE = StoredFormat("bookie cookie", 2, b"MGN-COOK")  # bookie/format/mark.py; 2: of several directories
CURSOR = StoredFormat("cursor", 3)  # broker/subscription/cursor_format.py
DEDUPLICATION = StoredFormat("deduplication snapshot", 1)  # broker/topic/dedup.py
OUTCOMES = StoredFormat("outcomes of transactions", 1)  # broker/topic/outcomes.py
DELAYS = StoredFormat("bucket of delayed messages", 1)  # broker/subscription/delays.py
COMPACTED = StoredFormat("compacted ledger", 1)  # broker/log/compaction_core.py
KEY_INDEX = StoredFormat("key index of a ledger", 1)  # broker/log/key_index_core.py
COORDINATOR = StoredFormat("coordinator of transactions", 1)  # broker/transaction/log.py
METADATA_RECORD = StoredFormat("metadata record", 2)  # metadata/records.py
METADATA_FILE = StoredFormat("metadata file", 1)  # metadata/tree.py, and its backups
METADATA_EXPORT = StoredFormat("metadata export", 1)  # metadata/transfer.py
HOLDINGS = StoredFormat("holdings of a bookie", 1)  # bookie/holdings.py
BOOKIE_FILES = (JOURNAL, ENTRY_LOG, INDEX, LEDGER_INDEX, LABELS, MARK)
STORAGE_FORMATS = (
    *BOOKIE_FILES, NOTE, COOKIE, CURSOR, DEDUPLICATION, OUTCOMES, DELAYS, COMPACTED, KEY_INDEX, COORDINATOR,
    METADATA_RECORD, METADATA_FILE, METADATA_EXPORT, HOLDINGS,
)


def describe_newer_format(form: StoredFormat, found: int, where: str) -> str:
    """Returns the error text that says that a later Magnetar wrote the data at `where`, with version `found` of the
    format."""
    return (
        f"{where}: {form.name} of format version {found}; Magnetar {PRODUCT} reads up to {form.version}. "
        "A later Magnetar wrote it: upgrade this one to that version or a later one"
    )


def check_format(form: StoredFormat, found: int, where: str) -> None:
    """Raises NewerFormat if the version `found` is later than this Magnetar knows. `where` names the data in the error
    text: a path, or a ledger and its topic."""
    if found > form.version:
        from .errors import NewerFormat

        raise NewerFormat(describe_newer_format(form, found, where), version=found, known=form.version)


def is_compiled() -> bool:
    """Returns whether the modules of the data path are compiled to C (setup.py has their list)."""
    found = find_spec("magnetar.proto.checksum")
    return found is not None and not str(found.origin).endswith(".py")


def build_kind() -> str:
    """Returns "compiled" if this process runs compiled modules, otherwise "pure Python"."""
    return "compiled" if is_compiled() else "pure Python"


def format_version_text() -> str:
    """Returns the text that `magnetar --version` prints."""

    def listed(forms: tuple[StoredFormat, ...]) -> str:
        return ", ".join(f"{form.name} {form.version}" for form in forms)

    return f"magnetar {PRODUCT} ({build_kind()})\nwire: {listed(WIRE_FORMATS)}\nstorage: {listed(STORAGE_FORMATS)}"
