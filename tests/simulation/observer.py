"""The omniscient eye: sees every disk, every message between brokers and bookies, and the metadata tree, at once.

It checks the numbered invariants of reference §6.1 that nobody inside the system could:

|  1 | a ledger moves OPEN → IN_RECOVERY → CLOSED only; versions rise by one; the end of a CLOSED one stays |
|  2 | fragments: first 0, strictly rising, E different bookies each, last one ≤ last_entry + 1 when CLOSED |
|  4 | no entry acknowledged to its writer lies behind the end of its CLOSED ledger |
|  5 | when an entry is acknowledged, Qa bookies of the *committed* fragment hold it synced, byte for byte |
|  8 | a writer's acknowledgements come in entry order, each once |
| 12 | no acknowledgement after the ledger was CLOSED |
| 14 | a bookie answers OK to an add only after a sync of the journal with that entry |
| 15 | a bookie answers a fencing request only after a sync of the journal with that fence |
| 16 | behind a fence the journal has no add that is not a recovery's |

It reads journals from the writes and syncs that reach the simulated disks, with the format module alone: what the store
believes to have synced plays no part.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from dataclasses import dataclass, field
from typing import Any

from magnetar.bookie.format import adds, journal, peer
from magnetar.metadata.records import CLOSED, IN_RECOVERY, OPEN, LedgerRecord
from magnetar.metadata.records import decode as decode_record
from magnetar.metadata.store import Delete, Put
from magnetar.runtime.envelope import Kind, WrongMagic, decode
from magnetar.runtime.sim.disk import Operation
from magnetar.runtime.sim.wires import End
from magnetar.runtime.sim.world import Simulation

_BLOCK = struct.Struct(">IQQQIII")
_MOVES = {OPEN: {OPEN, IN_RECOVERY, CLOSED}, IN_RECOVERY: {IN_RECOVERY, CLOSED}, CLOSED: {CLOSED}}
Key = tuple[int, int]


@dataclass(slots=True)
class Synced:
    """What one bookie's disk certainly holds, from the syncs of its journals."""

    adds: dict[Key, int] = field(default_factory=dict)  # (ledger, entry) -> CRC-32 of the entry's payload
    fences: dict[int, None] = field(default_factory=dict)
    pending: dict[str, list[journal.Record]] = field(default_factory=dict)
    fence_written: dict[int, None] = field(default_factory=dict)
    unsynced_fences: dict[int, None] = field(default_factory=dict)  # written by a life that was killed before the sync
    replayed: dict[int, None] = field(default_factory=dict)  # of those, what a mark that is not yet durable covers
    marked: str = ""  # the folder of that mark


class Observer:
    """Attach before anything starts. `violations` are sentences that begin with the invariant's number."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.violations: list[str] = []
        self.records: dict[int, LedgerRecord] = {}
        self.versions: dict[int, int] = {}
        self.closed: dict[int, LedgerRecord] = {}  # also those that were deleted since
        self.acked: dict[int, list[int]] = {}  # ledger -> CRC-32 of each entry, in order
        self.synced: dict[str, Synced] = {}
        self.node_of: dict[str, str] = {}  # bookie uuid -> node
        self.adds_seen = self.fences_seen = 0
        self._fencing: dict[tuple[int, int], int] = {}
        self._adding: dict[tuple[int, int], list[int]] = {}  # entries of each ADD_MANY under way
        self._recovered: dict[Key, None] = {}
        simulation.wires.observe = self._message
        simulation.on_crash.append(self._crashed)

    def _violated(self, text: str) -> None:
        self.simulation.note(f"VIOLATION {text}")
        self.violations.append(text)

    # ------------------------------------------------------------------ disks
    def watch_disk(self, node: str) -> None:
        """Before the bookie on it starts for the first time."""
        synced = self.synced[node] = Synced()
        disk = self.simulation.node(node).disk
        trace = disk.record

        def record(operation: Operation) -> None:
            if trace is not None:
                trace(operation)
            self._operation(node, synced, operation)

        disk.record = record

    def _operation(self, node: str, synced: Synced, operation: Operation) -> None:
        if operation.kind == "pwrite":
            records = _journal_records(operation.data)
            if records:
                synced.pending.setdefault(operation.path, []).extend(records)
                for record in records:
                    self._written(node, synced, record)
        elif operation.kind == "rename" and operation.path.endswith("/mark.tmp"):
            synced.replayed = dict(synced.unsynced_fences)
            synced.marked = operation.path.rpartition("/")[0]
        elif operation.kind == "sync_directory" and synced.replayed and operation.path == synced.marked:
            synced.fences |= synced.replayed  # a start replayed them, and its checkpoint put them into the ledger index
            synced.replayed = {}
            synced.unsynced_fences = {}
        elif operation.kind == "fdatasync":
            for record in synced.pending.pop(operation.path, ()):
                if record.type == journal.RecordType.ADD:
                    synced.adds[record.ledger, record.entry] = _payload_crc(record.payload)
                elif record.type == journal.RecordType.FENCE:
                    synced.fences[record.ledger] = None

    def _written(self, node: str, synced: Synced, record: journal.Record) -> None:
        if record.type == journal.RecordType.FENCE:
            synced.fence_written[record.ledger] = None
        elif record.type == journal.RecordType.ADD and record.ledger in synced.fence_written:
            key = record.ledger, record.entry
            if key not in self._recovered:
                self._violated(f"16: {node} admitted {key} behind the ledger's fence")

    def _crashed(self, node: str, power_loss: bool) -> None:
        synced = self.synced.get(node)
        if synced is None:
            return
        synced.replayed = {}
        if power_loss:
            synced.pending.clear()
            synced.fence_written = dict(synced.fences)
        synced.unsynced_fences = {each: None for each in synced.fence_written if each not in synced.fences}

    # ------------------------------------------------------------------ messages
    def _message(self, end: End, message: Any) -> None:
        if not isinstance(message, list):
            return
        try:
            envelope = decode(message[0])
        except WrongMagic:
            return
        parts = iter(message[1:])
        frames = {
            item.id: [bytes(next(parts) if frame is None else frame) for frame in item.frames]
            for item in envelope.items
        }
        for item in envelope.items:
            if envelope.kind == Kind.REQUESTS:
                request = peer.decode_request(item.head)
                if request.flags & peer.Flags.FENCE:
                    self._fencing[end.number, item.id] = request.ledger
                if request.op in (peer.Op.ADD, peer.Op.ADD_MANY):
                    self._adds(end.number, item.id, request, frames[item.id])
            elif envelope.kind == Kind.REPLIES:
                self._answer(end.owner.node, end.number, item.id, peer.decode_answer(item.head), frames[item.id])

    def _adds(self, connection: int, id_: int, request: peer.RequestHead, frames: list[bytes]) -> None:
        entries = [request.entry]
        if request.op == peer.Op.ADD_MANY:
            entries = [entry for entry, _, _ in adds.open_adds(request, frames, 8 << 20).entries]
            assert len(entries) == request.count, "the library sends whole entries"
            self._adding[connection, id_] = entries
        if request.flags & peer.Flags.RECOVERY:
            for entry in entries:
                self._recovered[request.ledger, entry] = None

    def _answer(
        self, node: str, connection: int, id_: int, answer: peer.AnswerHead, frames: list[bytes]
    ) -> None:
        synced = self.synced.get(node)
        if synced is None:
            return
        added = [answer.entry] if answer.op == peer.Op.ADD and answer.status == peer.Status.OK else []
        if answer.op == peer.Op.ADD_MANY:
            entries = self._adding.pop((connection, id_))
            statuses = adds.decode_statuses(answer, frames, len(entries))
            added = [entry for entry, status in zip(entries, statuses, strict=True) if status == peer.Status.OK]
        for entry in added:
            self.adds_seen += 1
            if (answer.ledger, entry) not in synced.adds:
                self._violated(f"14: {node} answered the add of {answer.ledger}:{entry} before a sync with it")
        fenced = self._fencing.pop((connection, id_), None)
        certain = (peer.Status.OK, peer.Status.NO_SUCH_ENTRY, peer.Status.NO_SUCH_LEDGER)
        if fenced is not None and answer.status in certain:
            self.fences_seen += 1
            if fenced not in synced.fences:
                self._violated(f"15: {node} answered a fence of ledger {fenced} before a sync with it")

    # ------------------------------------------------------------------ metadata
    def committed(self, operation: object, version: int) -> None:
        """An operation of a transaction, in the moment in which it is durable."""
        path = getattr(operation, "path", "")
        if not path.startswith("/ledgers/"):
            return
        ledger = int(path.rpartition("/")[2])
        if isinstance(operation, Delete):
            self.records.pop(ledger, None)
            self.versions.pop(ledger, None)
        elif isinstance(operation, Put):
            self._record(ledger, version, decode_record(operation.value, LedgerRecord, path))

    def _record(self, ledger: int, version: int, record: LedgerRecord) -> None:
        before = self.records.get(ledger)
        if before is not None:
            if record.state not in _MOVES[before.state]:
                self._violated(f"1: ledger {ledger} went from {before.state} to {record.state}")
            if version != self.versions[ledger] + 1:
                self._violated(f"1: ledger {ledger} went from version {self.versions[ledger]} to {version}")
            if before.state == CLOSED and (before.last_entry, before.length) != (record.last_entry, record.length):
                self._violated(f"1: the end of CLOSED ledger {ledger} moved from {before} to {record}")
        self.records[ledger], self.versions[ledger] = record, version
        self._fragments(ledger, record)
        if record.state == CLOSED:
            self.closed.setdefault(ledger, record)
            acked = len(self.acked.get(ledger, ()))
            if acked - 1 > record.last_entry:
                self._violated(f"4: ledger {ledger} is CLOSED at {record.last_entry}, acknowledged up to {acked - 1}")

    def _fragments(self, ledger: int, record: LedgerRecord) -> None:
        firsts = [fragment.first_entry for fragment in record.fragments]
        sound = firsts[0] == 0 and all(a < b for a, b in itertools.pairwise(firsts))
        for fragment in record.fragments:
            sound = sound and len(dict.fromkeys(fragment.bookies)) == len(fragment.bookies) == record.ensemble_size
        if record.state == CLOSED:
            sound = sound and firsts[-1] <= record.last_entry + 1
        if not sound:
            self._violated(f"2: ledger {ledger} has fragments {record.fragments} and ends at {record.last_entry}")

    # ------------------------------------------------------------------ acknowledgements
    def confirmed(self, ledger: int, entry: int, payload: bytes) -> None:
        """A writer's append was answered."""
        acked = self.acked.setdefault(ledger, [])
        if entry != len(acked):
            self._violated(f"8: entry {entry} of ledger {ledger} is acknowledged after {len(acked) - 1}")
            return
        crc = zlib.crc32(payload)
        acked.append(crc)
        record = self.records.get(ledger)
        if record is None:
            return  # deleted by now
        if record.state == CLOSED and entry > record.last_entry:
            self._violated(f"12: {ledger}:{entry} is acknowledged after the ledger was CLOSED at {record.last_entry}")
        holders = self._holders(record, entry, crc)
        if len(holders) < record.ack_quorum:
            self._violated(f"5: {ledger}:{entry} is acknowledged, but synced only at {holders} of {record.fragments}")

    def _holders(self, record: LedgerRecord, entry: int, crc: int) -> list[str]:
        fragment = [fragment for fragment in record.fragments if fragment.first_entry <= entry][-1]
        nodes = [self.node_of.get(bookie, "?") for bookie in fragment.bookies]
        return [
            node
            for node in nodes
            if node in self.synced and self.synced[node].adds.get((record.ledger_id, entry)) == crc
        ]


def _payload_crc(stored: bytes) -> int:
    return zlib.crc32(memoryview(stored)[peer.ENTRY_HEADER.size :])


def _journal_records(data: bytes) -> list[journal.Record]:
    """The records of all blocks in a write; none when it is not a write of journal blocks."""
    found: list[journal.Record] = []
    offset = 0
    while offset + journal.BLOCK_HEADER_BYTES <= len(data):
        magic, *rest = _BLOCK.unpack_from(data, offset)
        if magic != journal.BLOCK_MAGIC:
            break
        header = journal.BlockHeader(*rest)
        start = offset + journal.BLOCK_HEADER_BYTES
        records = journal.decode_records(header, data[start : start + header.length])
        found += [] if records is None else records.rows()
        offset += header.padded_bytes
    return found
