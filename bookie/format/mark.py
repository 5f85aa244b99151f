"""The mark's bytes: the one commit point of the store.

    mark = file header (format/journal.py: magic "MGN-MARK", number = count of marks written)
           | journal id u64 | journal offset u64 | log id u64 | log end u64 | index end u64
           | ledgers generation u64 | ledgers end u64
           | cold log id u64 | cold log end u64 | cold index end u64 | last log id u64
           | crc32c u32 (of the 88 bytes before)

156 bytes, big-endian. It says: everything in the journal before (journal id, offset) is in entry logs, indexes and the
ledger index; of the ledger index that generation and so many bytes count. Two logs may be open: the hot one, to which
checkpoints flush, and the cold one, to which compaction moves; of each and its index exactly so many bytes count. All
other logs up to the last log id are closed and count whole. Log id 0: none is open (log ids begin with 1, hot and cold
ones are of one sequence). What is after an end, or in a log above the last, was written by a checkpoint or a move
that did not end: its records are still in the journal, or in the logs that were to be moved.
Written to a temporary name, synced, renamed, directory synced; never goes backwards.

A mark of 124 bytes, with a checksum of the first seven numbers, is of a store without a cold log; its last log is the
open one. A reader refuses a mark of another length or with a wrong checksum (DamagedFile): it was synced before its
name. Example: CheckpointMark(1, 4096, 0, 0, 0, 1, 64) is the mark of a new store: eleven u64, the last four 0, and
their checksum.

Also in this file, each below its heading: the bytes of a small file that holds one record (note); the cookie's bytes
(cookie).
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple, TypeVar

import msgspec

from ...metadata.records import LedgerGenerations
from ...proto import versions
from ...proto.versions import NOTE, StoredFormat, check_format
from .journal import FILE_HEADER_BYTES, DamagedFile, FileHeader, crc32c, decode_file_header, encode_file_header

MARK_MAGIC = versions.MARK.magic
_BODY = struct.Struct(">11Q")
_BODY_WITHOUT_COLD = struct.Struct(">7Q")
_CRC = struct.Struct(">I")
MARK_FILE_BYTES = FILE_HEADER_BYTES + _BODY.size + _CRC.size


class OpenLogEnds(NamedTuple):
    """An entry log that is being written: its number, and the committed lengths, in bytes, of its log file and its
    index file. Number 0: no log is open."""

    number: int
    log_end: int
    index_end: int


class CheckpointMark(NamedTuple):
    """The commit point of a bookie's store: how many bytes of the journal, of the entry logs, of their indexes and of
    the ledger index are committed.

    Everything in the journal before `offset` of its file `journal` is committed. `log` and the ends after it belong to
    the hot log, which gets new entries; the cold log gets the entries that compaction moves. Log number 0: no such log
    is open. `last_log` is the highest number of a log that counts."""

    journal: int
    offset: int
    log: int
    log_end: int
    index_end: int
    ledgers_generation: int
    ledgers_end: int
    cold_log: int = 0
    cold_end: int = 0
    cold_index_end: int = 0
    last_log: int = 0

    @property
    def hot_open_log(self) -> OpenLogEnds:
        """The hot log and its committed ends; number 0: no hot log is open."""
        return OpenLogEnds(self.log, self.log_end, self.index_end)

    @property
    def cold_open_log(self) -> OpenLogEnds:
        """The cold log and its committed ends; number 0: no cold log is open."""
        return OpenLogEnds(self.cold_log, self.cold_end, self.cold_index_end)

    @property
    def open_log_numbers(self) -> tuple[int, int]:
        """(number of the hot log, number of the cold log); 0: no such log is open."""
        return self.log, self.cold_log

    def with_open_logs(self, hot: OpenLogEnds, cold: OpenLogEnds, last: int) -> CheckpointMark:
        """Returns a copy of the mark with these two open logs, and with `last` as the highest number of a log that
        counts."""
        return self._replace(
            log=hot.number, log_end=hot.log_end, index_end=hot.index_end,
            cold_log=cold.number, cold_end=cold.log_end, cold_index_end=cold.index_end, last_log=last,
        )  # fmt: skip

    @property
    def position(self) -> tuple[int, int]:
        """Returns (journal id, offset): the journal before this position is not needed any more. The position never
        decreases."""
        return self.journal, self.offset


def encode_checkpoint_mark(mark: CheckpointMark, uuid: bytes, count: int) -> bytes:
    """Encodes the content of a mark file and returns it. `uuid` is the bookie's, 16 bytes; `count` is how many marks
    the store has written, this one included."""
    body = _BODY.pack(*mark)
    return encode_file_header(FileHeader(MARK_MAGIC, uuid, count)) + body + _CRC.pack(crc32c(body))


def decode_checkpoint_mark(data: bytes, uuid: bytes, path: str) -> tuple[CheckpointMark, int]:
    """Decodes a checkpoint mark. Returns the mark, and how many marks the store has written so far. Raises DamagedFile
    or NewerFormat; `path` is named in the error text."""
    count = int.from_bytes(data[28:36], "big")
    decode_file_header(data, MARK_MAGIC, uuid, count, path)
    known = {FILE_HEADER_BYTES + body.size + _CRC.size: body for body in (_BODY, _BODY_WITHOUT_COLD)}
    body = known.get(len(data))
    if body is None:
        raise DamagedFile(path, len(data), f"{len(data)} bytes long, not {MARK_FILE_BYTES}")
    end = FILE_HEADER_BYTES + body.size
    if crc32c(data[FILE_HEADER_BYTES:end]) != _CRC.unpack_from(data, end)[0]:
        raise DamagedFile(path, FILE_HEADER_BYTES, "checksum of the mark does not match")
    mark = CheckpointMark(*body.unpack_from(data, FILE_HEADER_BYTES))
    return (mark if body is _BODY else mark._replace(last_log=mark.log)), count


# ---------------------------------------------------------------------------------------------------------- note
# The bytes of a small file that holds one record: the cookie, the losses that a start found, the scrubber's position.
#
#     note = magic 8 bytes | version u16 | length u32 | body (JSON, `length` bytes) | crc32c u32 (of all before)
#
# Big-endian. Written anew each time: to a temporary name, synced, renamed, directory synced. Unknown fields of the body
# are ignored, missing ones have their defaults. A reader refuses any damage. The version is 1, and 2 for the cookies of
# a bookie with a journal or ledgers in other directories: an older Magnetar would take its `data` for all that it has.
# Example: `encode_checksummed_json(b"MGN-TEST", {"a": 1})` is `4d474e2d54455354 0001 00000007 {"a":1} <crc32c>`.


_HEAD = struct.Struct(">8sHI")

N = TypeVar("N")


def encode_checksummed_json(magic: bytes, note: object, version: int = NOTE.version) -> bytes:
    """Encodes the content of a small file: the object `note` as JSON, with a magic of 8 bytes and a checksum. Returns
    the bytes, which `decode_checksummed_json` decodes."""
    body = msgspec.json.encode(note)
    data = _HEAD.pack(magic, version, len(body)) + body
    return data + _CRC.pack(crc32c(data))


def decode_checksummed_json(data: bytes, magic: bytes, kind: type[N], path: str, form: StoredFormat = NOTE) -> N:
    """Decodes the content of a small file of JSON that has a magic and a checksum, and returns an object of class
    `kind`. Raises DamagedFile or NewerFormat, if it is of a later version than `form` has; `path` is named in the error
    text."""
    if len(data) < _HEAD.size:
        raise DamagedFile(path, 0, f"{len(data)} bytes are too few for a {kind.__name__.lower()}")
    found, version, length = _HEAD.unpack_from(data)
    if found != magic:
        raise DamagedFile(path, 0, f"not a {kind.__name__.lower()}")
    end = _HEAD.size + length
    if len(data) != end + _CRC.size or crc32c(data[:end]) != _CRC.unpack_from(data, end)[0]:
        raise DamagedFile(path, 0, f"checksum of the {kind.__name__.lower()} does not match")
    check_format(form, version, path)
    try:
        return msgspec.json.decode(data[_HEAD.size : end], type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedFile(path, _HEAD.size, str(error)) from error

# -------------------------------------------------------------------------------------------------------- cookie
# The cookie's bytes: which bookie owns a data directory. The metadata has the same facts (CookieRecord).
#
#     cookie = note with magic "MGN-COOK"
#     body   = {"bookie": uuid text, "instance": cluster instance, "directories": [place, …], "starts": count,
#               "ledgers": [[first ledger id, number of directories], …], "journal": path, "paths": [path, …],
#               "number": n, "role": text}
#
# The last five only with several directories (store/directories.py). `role` is "" for the cookie of `data`.
# `starts` counts the starts that were completed; a cookie without it counts 0. Written anew at each start. A reader
# refuses any damage: it never guesses the owner of a directory (ledger protocol §2.7).
# Example: `MGN-COOK 0001 0000003f {"bookie":"b","instance":"i","directories":["h:/d"],"starts":2} <crc32c>`.


COOKIE_MAGIC = versions.COOKIE.magic


class DirectoryRole(enum.Enum):
    """What a directory of a bookie is for: `data` has its identity, and may have all the rest."""

    DATA = ""
    JOURNAL = "journal"
    LEDGERS = "ledgers"


class Cookie(msgspec.Struct, frozen=True, omit_defaults=True):
    """The content of a cookie file, which says to which bookie and cluster a data directory belongs: the bookie's uuid
    as text, the cluster's instance id, the bookie's directories, and the number of completed starts (0: an older
    Magnetar did not count them). `ledgers`: how its ledgers are mapped to directories (store/directories.py)."""

    bookie: str
    instance: str
    directories: tuple[str, ...]
    starts: int = 0
    ledgers: LedgerGenerations = ()
    journal: str = ""  # path of the journal of a directory, if that is elsewhere; for those who inspect it
    paths: tuple[str, ...] = ()  # of its ledgers directories, in the cookie of `data`; for those who inspect it
    number: int = 0  # of a ledgers directory
    role: DirectoryRole = DirectoryRole.DATA


def encode_cookie(cookie: Cookie) -> bytes:
    several = cookie.ledgers or cookie.journal or cookie.role is not DirectoryRole.DATA
    return encode_checksummed_json(COOKIE_MAGIC, cookie, version=versions.COOKIE.version if several else 1)


def decode_cookie(data: bytes, path: str) -> Cookie:
    """Decodes the content of a cookie file and returns the cookie. Raises DamagedFile or NewerFormat; `path` is named
    in the error text."""
    return decode_checksummed_json(data, COOKIE_MAGIC, Cookie, path, versions.COOKIE)
