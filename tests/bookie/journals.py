"""Journal files made block by block on a simulated disk, and what a reader finds in them."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from magnetar.bookie.format.journal import (
    BLOCK_ALIGNMENT_BYTES,
    BLOCK_HEADER_BYTES,
    JOURNAL_MAGIC,
    FileHeader,
    JournalRecord,
    RecordType,
    encode_block_header,
    encode_file_header,
    encode_first_block,
    encode_record,
    round_up_to_alignment,
)
from magnetar.bookie.store.replay import JournalPosition, JournalReader, journal_file_name
from magnetar.runtime.sim.disk import SimDisk, SimFiles

UUID = bytes(range(16))
DIRECTORY = "/journal"


def adds(rng: random.Random, count: int, size_max: int = 3000) -> list[JournalRecord]:
    return [
        JournalRecord(RecordType.ADD, 1, rng.getrandbits(40),
            rng.randbytes(rng.randrange(size_max))) for _ in range(count)
    ]


def block_bytes(
    records: Sequence[JournalRecord], salt: int, number: int, sequence: int, offset: int, synced: int | None = None
) -> bytes:
    """One padded block, as the journal writes it; `synced` None: up to where it begins."""
    synced = offset if synced is None else synced
    pieces = [(encode_record(r.type, r.ledger, r.entry, (r.payload,))[0], r.payload) for r in records]
    body = b"".join(header + payload for header, payload in pieces)
    head = encode_block_header(salt, number, sequence, offset, synced, [header for header, _ in pieces], len(body))
    data = head + body
    return data + bytes(round_up_to_alignment(len(data)) - len(data))


@dataclass
class Written:
    """A journal file: where each block begins, its meaningful bytes (padding is none), and its records."""

    number: int
    path: str
    salt: int
    header: bytes = b""
    end: int = BLOCK_ALIGNMENT_BYTES
    blocks: list[tuple[int, int, list[JournalRecord]]] = field(default_factory=list)


class Journals:
    """A folder of journals of one bookie."""

    def __init__(self, seed: int = 1) -> None:
        self.rng = random.Random(seed)
        self.disk = SimDisk()
        self.files = SimFiles(self.disk)
        self.files.make_directories(DIRECTORY)
        self.journals: list[Written] = []

    def begin(self, *, size: int = 64 << 10, number: int | None = None, uuid: bytes = UUID) -> Written:
        """The journal after the newest one, in a file that is full of stale blocks of another use."""
        last = self.journals[-1] if self.journals else None
        number = number or (last.number + 1 if last else 1)
        written = Written(number, f"{DIRECTORY}/{journal_file_name(number)}", self.rng.getrandbits(64))
        stale, salt = b"", self.rng.getrandbits(64)
        while len(stale) < size - BLOCK_ALIGNMENT_BYTES:
            stale += block_bytes(adds(self.rng, 1), salt, number + 7, 0, BLOCK_ALIGNMENT_BYTES + len(stale))
        header = encode_file_header(FileHeader(JOURNAL_MAGIC, uuid, number, last.end if last else 0, written.salt))
        written.header = header
        file = self.files.open(written.path, create=True)
        file.pwrite([encode_first_block(header), stale[: size - BLOCK_ALIGNMENT_BYTES]], 0)
        self.journals.append(written)
        return written

    def write(self, records: Sequence[JournalRecord], synced: int | None = None) -> int:
        """One block at the end of the newest journal; where it begins. `synced` None: all before it is."""
        journal = self.journals[-1]
        data = block_bytes(records, journal.salt, journal.number, len(journal.blocks), journal.end, synced)
        self.files.open(journal.path).pwrite([data], journal.end)
        meaningful = BLOCK_HEADER_BYTES + sum(
            len(encode_record(*r[:3], (r.payload,))[0]) + len(r.payload) for r in records
        )
        journal.blocks.append((journal.end, meaningful, list(records)))
        journal.end += len(data)
        return journal.end - len(data)

    def overwrite(self, path: str, offset: int, data: bytes) -> None:
        self.files.open(path).pwrite([data], offset)

    def records(self) -> list[JournalRecord]:
        return [record for journal in self.journals for _, _, records in journal.blocks for record in records]

    def reader(self, start: JournalPosition | None = None, uuid: bytes = UUID) -> JournalReader:
        return JournalReader(
            self.files, DIRECTORY, uuid, start or JournalPosition(self.journals[0].number, BLOCK_ALIGNMENT_BYTES)
        )


def read_all(reader: JournalReader, bytes_max: int = 1 << 20) -> list[JournalRecord]:
    found = []
    while not reader.finished:
        for block in reader.read_blocks(bytes_max):
            found += block.records.rows()
    return found
