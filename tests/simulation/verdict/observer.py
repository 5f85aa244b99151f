"""The omniscient eye: sees every disk, every message between brokers and bookies, and the metadata tree, at once.

It checks the numbered invariants (docs/design/invariants.md) that nobody inside the system could. At each event:

|  1 | a ledger moves OPEN → IN_RECOVERY → CLOSED only; versions rise by one; the end of a CLOSED one stays |
|  2 | fragments: first 0, strictly rising, E different bookies each, last one ≤ last_entry + 1 when CLOSED |
|  3 | everybody who says that a ledger is CLOSED says the stored end |
|  4 | no entry acknowledged to its writer lies behind the end of its CLOSED ledger |
|  5 | when an entry is acknowledged, Qa bookies of the *committed* fragment hold it synced, byte for byte |
|  7 | when a ledger is CLOSED: Qa synced copies of each entry up to its end, less one that the seed's loser lost |
|  8 | a writer's acknowledgements come in entry order, each once |
| 12 | no acknowledgement after the ledger was CLOSED |
| 14 | a bookie answers OK to an add only after a sync of the journal with that entry |
| 15 | a bookie answers a fencing request only after a sync of the journal, or of the index and its mark, with it |
| 16 | behind a fence the journal has no add but a recovery's, or what a bookie mends of a CLOSED ledger |
| 17 | a bookie does not say "no such entry" of what it had synced when it was asked, and whose ledger exists |
| 23 | after a failed sync of a bookie's data its process moves no mark any more |
| 27 | a topic's list of ledgers: ids rise, they leave it when it says where they end, or nothing is in them |
| 28 | no receipt names a ledger that was never in the topic's committed list (topics.py); what a list names is made, |
|    | and CLOSED at that end when the list says so |
| 34 | no ledger is deleted that is in a topic's list |
| 51 | whom re-replication names in a ledger's record holds, synced, every entry of that fragment that it is to hold |

At rest, after everything was healed: 6, 7, 10 and 13 (rest.py: every ledger ends, has all its Qw copies synced, reads
to its end with what was appended), 38 and 40 with what else a client can see (history.py), and nothing is stuck: no
mark of auto-recovery, no report of damage, no bookie in limbo, and clients make progress.

Not here: 9, 11 (events inside a core: the protocol tier judges them); 18 to 20 (the enumeration of crash states); 21
and 22 by their consequence alone, 6 and 17; 24, 26 (bounds: tests/bookie); 25 (the wire refuses another name; 6 and 17
would fall); 29, 30, 31, 32 and 35 by what clients see (4, 12, history.py); 33 (test_dedup.py of
the broker's core); 36, 37, 39, 41 to 44 (tests/broker; receipts of acknowledgements are not asked for here); 45 and 50
(no matter of the cluster); 46 to 49 (rights.py, and load/roles.py).

It reads journals from the writes and syncs that reach the simulated disks (journals.py), in the order of their bytes:
what the store believes to have synced, and which of two blocks was in the disk first, play no part.
"""

import itertools
import zlib
from collections.abc import Callable, Iterable
from typing import Any

from magnetar.bookie.format import entry_log, journal
from magnetar.bookie.maintenance.repair_core import list_final_fragments
from magnetar.ledger import peer_format as adds
from magnetar.ledger import peer_format as peer
from magnetar.ledger.writer_core import Striping
from magnetar.metadata.records import (
    CLOSED,
    IN_RECOVERY,
    OPEN,
    RECORD_MAGIC,
    RECORD_VERSION,
    BookieRecord,
    CounterRecord,
    LedgerRecord,
    TopicLedger,
    TopicRecord,
    UnderReplicatedRecord,
)
from magnetar.metadata.records import decode_record as decode_record
from magnetar.metadata.store import CheckNodeVersion, DeleteNode, PutNode
from magnetar.metadata.tree import TreeJobResult
from magnetar.runtime.peer.envelope import EnvelopeKind, WrongEnvelopeMagic, decode_envelope
from magnetar.runtime.sim.disk import DiskOperation
from magnetar.runtime.sim.wires import ConnectionEnd
from magnetar.runtime.sim.world import Simulation
from tests.simulation.verdict.journals import (
    Key,
    Place,
    Synced,
    apply_power_loss,
    indexed_fences,
    journal_blocks,
    land,
    payload_crc,
    rolled_back,
    wiped,
)

STRANGER = "stranger"
"""The node of somebody whose messages need not be any."""

_MOVES = {OPEN: {OPEN, IN_RECOVERY, CLOSED}, IN_RECOVERY: {IN_RECOVERY, CLOSED}, CLOSED: {CLOSED}}


class Observer:
    """Attach before anything starts. `violations` are sentences that begin with the invariant's number."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.violations: list[str] = []
        self.records: dict[int, LedgerRecord] = {}
        self.versions: dict[int, int] = {}
        self.closed: dict[int, LedgerRecord] = {}  # also those that were deleted since
        self.acked: dict[int, list[int]] = {}  # ledger -> CRC-32 of each entry, in order
        self._unheard: dict[int, list[int]] = {}  # ledger -> that of appends whose callers went away
        self.synced: dict[str, Synced] = {}
        self.node_of: dict[str, str] = {}  # bookie uuid -> node
        self.node_at: dict[str, str] = {}  # port -> node
        self.graves: dict[str, Synced] = {}  # bookie uuid -> what it held, of those whose disk is lost
        self.lossy: str = ""  # the node whose disk lost something
        self.marks: dict[int, UnderReplicatedRecord] = {}
        self.damaged: dict[str, None] = {}  # paths of reports
        self.lists: dict[str, TopicRecord] = {}  # path -> record
        self.listed: dict[int, None] = {}  # every ledger that was in a list
        self.deleted: dict[int, None] = {}
        self.ids_given = 0
        self.adds_seen = self.fences_seen = self.within = 0
        self.on_commit: Callable[[object], None] | None = None
        """Told of every operation of the metadata, in the moment in which it is durable."""
        self.on_topic: list[Callable[[str, TopicRecord | None], None]] = []
        """Told of each topic's record that is written or deleted."""
        self.on_record: list[Callable[..., None]] = []
        """Told of each path, and whether it `exists` from now on."""
        self._fencing: dict[tuple[int, int], int] = {}
        self._adding: dict[tuple[int, int], list[int]] = {}  # entries of each ADD_MANY under way
        self._reading: dict[tuple[int, int], bool] = {}  # reads of what is synced there
        self._recovered: dict[Key, None] = {}
        simulation.wires.observe = self._message
        simulation.on_crash.append(self._crashed)

    def _violated(self, text: str) -> None:
        self.simulation.add_line(f"VIOLATION {text}")
        self.violations.append(text)

    # ------------------------------------------------------------------ disks
    def watch_disk(self, node: str) -> None:
        """Before the bookie on it starts for the first time."""
        self.synced[node] = Synced()
        disk = self.simulation.node(node).disk
        trace = disk.record

        def record(operation: DiskOperation) -> None:
            if trace is not None:
                trace(operation)
            self._operation(node, self.synced[node], operation)

        disk.record = record
        fail = disk.failed

        def failed(kind: str, path: str) -> None:
            if fail is not None:
                fail(kind, path)
            if kind == "fdatasync":
                self.synced[node].sync_failed = True

        disk.failed = failed

    def disk_lost(self, node: str, bookie: str) -> None:
        """The disk is empty: what comes is another bookie. What the former held counts for what was confirmed then."""
        self.lossy = node
        self.graves[bookie] = self.synced[node]
        self.node_of.pop(bookie, None)
        self.synced[node] = Synced()

    def disk_rolled_back(self, node: str) -> None:
        self.lossy = node
        self.synced[node].fenced_upto = self.ids_given
        rolled_back(self.synced[node])

    def damage(self, node: str) -> None:
        self.lossy = node

    def _operation(self, node: str, synced: Synced, operation: DiskOperation) -> None:
        if operation.kind == "pwrite" and ".lidx" in operation.path:
            synced.indexing.setdefault(operation.path, []).extend(indexed_fences(operation.data))
        elif operation.kind == "pwrite":
            blocks = journal_blocks(operation.data, operation.offset)
            if blocks:
                synced.pending.setdefault(operation.path, []).extend(blocks)
            elif operation.path.endswith(".jnl") and not any(operation.data):
                wiped(synced, operation.path, operation.offset)
            for block in blocks:
                for place, record in block.placed():
                    self._written(node, synced, place, record)
        elif operation.kind == "rename" and operation.path.endswith("/mark.tmp"):
            if synced.sync_failed:
                self._violated(f"23: {node} moves its mark after a failed sync")
            synced.covered = dict(synced.indexed)
            synced.marked = operation.path.rpartition("/")[0]
        elif operation.kind == "sync_directory" and operation.path == synced.marked:
            synced.fences |= synced.covered
        elif operation.kind == "fdatasync":
            synced.indexed |= dict.fromkeys(synced.indexing.pop(operation.path, ()))
            for record in land(synced, operation.path):
                if record.type == journal.RecordType.ADD:
                    synced.adds[record.ledger, record.entry] = payload_crc(record.payload)
                elif record.type == journal.RecordType.FENCE:
                    synced.fences[record.ledger] = None

    def _written(self, node: str, synced: Synced, place: Place, record: journal.JournalRecord) -> None:
        """16, whichever of two blocks is written first: what counts is their order in the file."""
        ledger, fence = record.ledger, synced.fence_written.get(record.ledger)
        if record.type == journal.RecordType.FENCE and (fence is None or place < fence):
            synced.fence_written[ledger] = fence = place
        elif record.type == journal.RecordType.ADD:
            key = ledger, record.entry
            if key in self._recovered or self._is_known(key, payload_crc(record.payload)):
                return
            synced.last_add[ledger] = max((place, key), synced.last_add.get(ledger, (place, key)))
        else:
            return
        last = synced.last_add.get(ledger)
        if fence is not None and last is not None and last[0] > fence:
            self._violated(f"16: {node} admitted {last[1]} behind the ledger's fence")

    def _is_known(self, key: Key, crc: int) -> bool:
        """Bytes that some bookie holds of a CLOSED ledger: a bookie mends its own copy without a request."""
        record = self.closed.get(key[0])
        held = [*self.synced.values(), *self.graves.values()]
        return record is not None and key[1] <= record.last_entry and any(each.adds.get(key) == crc for each in held)

    def _crashed(self, node: str, power_loss: bool) -> None:
        synced = self.synced.get(node)
        if synced is None:
            return
        synced.indexing, synced.indexed, synced.covered, synced.marked = {}, {}, {}, ""
        synced.sync_failed = False
        if power_loss:
            apply_power_loss(synced)

    # ------------------------------------------------------------------ messages
    def _message(self, end: ConnectionEnd, message: Any) -> None:
        if not isinstance(message, list) or STRANGER in (end.owner.node, end.other.owner.node):
            return
        try:
            envelope = decode_envelope(message[0])
        except WrongEnvelopeMagic:
            return
        parts = iter(message[1:])
        frames = {
            item.id: [bytes(next(parts) if frame is None else frame) for frame in item.frames]
            for item in envelope.items
        }
        for item in envelope.items:
            if envelope.kind == EnvelopeKind.REQUESTS:
                self.asked(end.other.owner.node, end.number, item.id, item.head, frames[item.id])
            elif envelope.kind == EnvelopeKind.REPLIES:
                self.answers(end.owner.node, end.number, item.id, item.head, frames[item.id])

    def asked(self, node: str, connection: int, id_: int, head: bytes, frames: list[bytes]) -> None:
        """A request on its way to the bookie on `node`."""
        request = peer.decode_request(head)
        if request.flags & peer.BookieRequestFlags.FENCE:
            self._fencing[connection, id_] = request.ledger
        if request.op is peer.BookieOperation.READ:
            target = self.synced.get(node)
            if target is not None and (request.ledger, request.entry) in target.adds:
                self._reading[connection, id_] = True
        elif request.op in (peer.BookieOperation.ADD, peer.BookieOperation.ADD_MANY):
            self._adds(connection, id_, request, frames)

    def answers(self, node: str, connection: int, id_: int, head: bytes, frames: list[bytes]) -> None:
        """The bookie on `node` answers that request."""
        self._answer(node, connection, id_, peer.decode_answer(head), frames)

    def _adds(self, connection: int, id_: int, request: peer.BookieRequestHead, frames: list[bytes]) -> None:
        entries = [request.entry]
        if request.op == peer.BookieOperation.ADD_MANY:
            entries = [entry for entry, _, _ in adds.verify_adds(request, frames, 8 << 20).entries]
            assert len(entries) == request.count, "the library sends whole entries"
            self._adding[connection, id_] = entries
        if request.flags & peer.BookieRequestFlags.RECOVERY:
            for entry in entries:
                self._recovered[request.ledger, entry] = None

    def _answer(self, node: str, connection: int, id_: int, answer: peer.BookieAnswerHead, frames: list[bytes]) -> None:
        synced = self.synced.get(node)
        if synced is None:
            return
        added = [answer.entry] if answer.op == peer.BookieOperation.ADD and answer.status == peer.Status.OK else []
        if answer.op == peer.BookieOperation.ADD_MANY:
            entries = self._adding.pop((connection, id_))
            statuses = adds.decode_add_statuses(answer, frames, len(entries))
            added = [entry for entry, status in zip(entries, statuses, strict=True) if status == peer.Status.OK]
        for entry in added:
            self.adds_seen += 1
            if (answer.ledger, entry) not in synced.adds:
                self._violated(f"14: {node} answered the add of {answer.ledger}:{entry} before a sync with it")
        held = self._reading.pop((connection, id_), False)
        missing = answer.status in (peer.Status.NO_SUCH_ENTRY, peer.Status.NO_SUCH_LEDGER)
        record = self.records.get(answer.ledger)
        after_end = record is not None and record.state == CLOSED and answer.entry > record.last_entry
        if held and missing and record is not None and not after_end:  # a disk that came back older lacks it for good
            self._violated(f"17: {node} says {answer.status.name} of {answer.ledger}:{answer.entry}, synced there")
        fenced = self._fencing.pop((connection, id_), None)
        certain = (peer.Status.OK, peer.Status.NO_SUCH_ENTRY, peer.Status.NO_SUCH_LEDGER)
        if fenced is not None and answer.status in certain:
            self.fences_seen += 1
            if fenced not in synced.fences and fenced > synced.fenced_upto:
                self._violated(f"15: {node} answered a fence of ledger {fenced} before a sync with it")

    def forgotten(self, node: str) -> None:
        """Of a request that the process on `node` made."""
        self._violated(f"a request of {node} has no outcome after its deadline")

    # ------------------------------------------------------------------ metadata
    def committed(self, operation: object, version: int) -> None:
        """An operation of a transaction, in the moment in which it is durable."""
        if isinstance(operation, CheckNodeVersion):
            return
        if self.on_commit is not None:
            self.on_commit(operation)
        path = getattr(operation, "path", "")
        value = operation.value if isinstance(operation, PutNode) else None
        for told in self.on_record:
            told(path, exists=value is not None)
        if value is not None and value[:2] == RECORD_MAGIC and value[2] > RECORD_VERSION:
            self._told(f"{path} is written by a later version")
            return
        if path.startswith("/ledgers/"):
            self._ledger(int(path.rpartition("/")[2]), path, value, version)
        elif path.startswith("/topics/") and isinstance(operation, PutNode | DeleteNode):
            self._topic(path, None if value is None else decode_record(value, TopicRecord, path))
        elif path.startswith("/underreplicated/"):
            self._mark(int(path.rpartition("/")[2]), path, value)
        elif path.startswith("/damaged/"):
            self._report(path, value)
        elif path == "/ids/ledger" and value is not None:
            self.ids_given = decode_record(value, CounterRecord, path).next
        elif path.startswith("/bookies/available/"):
            if value is not None:
                self._registered(decode_record(value, BookieRecord, path))
            self._told(f"{self._name(path)} {'leaves' if value is None else 'registers'}")
        elif path.startswith(("/brokers/", "/owners/", "/repair/auditor", "/repair/departing")):
            self._told(f"{path} is {'gone' if value is None else 'written'}")

    def _registered(self, record: BookieRecord) -> None:
        """From here on writers may use it, whether its start is over or not."""
        node = self.node_at.get(record.endpoint.rpartition(":")[2])
        if node is not None and record.bookie not in self.graves:
            self.node_of[record.bookie] = node

    def session_ended(self, done: TreeJobResult) -> None:
        for change in done.changes:
            self._told(f"{self._name(change.path)} is gone: its session ended")

    def _told(self, text: str) -> None:
        self.simulation.add_line(f"metadata: {text}")

    def _name(self, path: str) -> str:
        folder, _, name = path.rpartition("/")
        return f"{folder}/{self.node_of[name]}" if name in self.node_of else path

    def _nodes(self, bookies: Iterable[str]) -> str:
        return " ".join(self.node_of.get(bookie, bookie[:8]) for bookie in bookies)

    def _ledger(self, ledger: int, path: str, value: bytes | None, version: int) -> None:
        if value is not None:
            self._record(ledger, version, decode_record(value, LedgerRecord, path))
            return
        self.records.pop(ledger, None)
        self.versions.pop(ledger, None)
        self.deleted[ledger] = None
        self._told(f"ledger {ledger} is deleted")
        for topic, record in self.lists.items():
            if any(each.ledger_id == ledger for each in record.ledgers):
                self._violated(f"34: ledger {ledger} is deleted and in the list of {topic}")

    def _topic(self, path: str, record: TopicRecord | None) -> None:
        if record is not None:
            self._list(path, record)
        elif self.lists.pop(path, None) is not None:
            self._told(f"{path} is deleted")
        for told in self.on_topic:
            told(path, record)

    def _list(self, path: str, record: TopicRecord) -> None:
        ids = [each.ledger_id for each in record.ledgers]
        listed = self.lists[path].ledgers if path in self.lists else ()
        before = [each.ledger_id for each in listed]
        kept = [each for each in before if each in ids]
        left = [each for each in listed if each.ledger_id not in ids]  # whether anybody needed them: 38
        ended = all(each.entries >= 0 or not self.acked.get(each.ledger_id) for each in left)
        if ids != sorted({*ids}) or ids[: len(kept)] != kept or not ended:
            self._violated(f"27: the list of {path} went from {before} to {ids}")
        unmade = [each for each in ids if each not in before and each not in self.records]
        open_ = [each for each in record.ledgers if each.entries >= 0 and not self._ends(each)]
        if unmade or (open_ and not record.lost):
            self._violated(f"28: the list of {path} names {unmade}, which are not made, and as closed {open_}")
        if ids != before:
            self._told(f"{path} has ledgers {ids}")
        self.lists[path] = record
        self.listed |= dict.fromkeys(ids)

    def _ends(self, row: TopicLedger) -> bool:
        record = self.closed.get(row.ledger_id)
        return record is not None and record.last_entry + 1 == row.entries

    def _mark(self, ledger: int, path: str, value: bytes | None) -> None:
        if value is None:
            self.marks.pop(ledger, None)
            self._told(f"ledger {ledger} misses nothing any more")
            return
        mark = self.marks[ledger] = decode_record(value, UnderReplicatedRecord, path)
        missing = " ".join(f"{self._nodes([bookie])} {why}" for bookie, why in mark.bookies.items())
        self._told(f"ledger {ledger} misses copies of {missing or 'nobody'} {mark.stuck} {mark.last_error}".rstrip())

    def _report(self, path: str, value: bytes | None) -> None:
        self._told(f"{path} is {'taken back' if value is None else 'reported'}")
        if value is None:
            self.damaged.pop(path, None)
        else:
            self.damaged[path] = None

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
        self._tell_record(ledger, before, record)
        self._fragments(ledger, record)
        if before is not None:
            self._replaced(before, record)
        if record.state == CLOSED and (before is None or before.state != CLOSED):
            self.closed.setdefault(ledger, record)
            self._copies(ledger, record)
            acked = len(self.acked.get(ledger, ()))
            if acked - 1 > record.last_entry:
                self._violated(f"4: ledger {ledger} is CLOSED at {record.last_entry}, acknowledged up to {acked - 1}")

    def _tell_record(self, ledger: int, before: LedgerRecord | None, record: LedgerRecord) -> None:
        if before is None or before.state != record.state:
            end = f" at {record.last_entry}" if record.state == CLOSED else ""
            on = self._nodes(record.fragments[-1].bookies)
            self._told(f"ledger {ledger} is {record.state}{end}, on {on}")
        if before is not None and before.fragments != record.fragments:
            lies = ", ".join(f"{each.first_entry}… on {self._nodes(each.bookies)}" for each in record.fragments)
            self._told(f"ledger {ledger} lies {lies}")

    def _copies(self, ledger: int, record: LedgerRecord) -> None:
        """7, in the moment in which the ledger is CLOSED."""
        striping = Striping(record.ensemble_size, record.write_quorum, record.ack_quorum)
        for entry in range(record.last_entry + 1):
            ensemble = [each for each in record.fragments if each.first_entry <= entry][-1].bookies
            holders = [each for each in striping.slots_of_entry(entry) if self._held(ensemble[each], (ledger, entry))]
            lost = any(
                self.node_of.get(ensemble[each], self.lossy) == self.lossy for each in striping.slots_of_entry(entry)
            )
            if len(holders) < record.ack_quorum - lost:
                nodes = self._nodes(ensemble[each] for each in holders)
                self._violated(f"7: ledger {ledger} is CLOSED at {record.last_entry}, and {entry} is only at {nodes}")
                return

    def _replaced(self, before: LedgerRecord, record: LedgerRecord) -> None:
        """51, of each bookie that takes another's place in a fragment that is final
        (bookie/maintenance/repair_core.py)."""
        known = {final.first: final for final in list_final_fragments(before)}
        striping = Striping(record.ensemble_size, record.write_quorum, record.ack_quorum)
        for final in list_final_fragments(record):
            old = known.get(final.first)
            if old is None or len(old.bookies) != len(final.bookies):
                continue
            for slot, (was, bookie) in enumerate(zip(old.bookies, final.bookies, strict=True)):
                lacks = [] if was == bookie else [
                    entry for entry in range(final.first, final.last + 1)
                    if slot in striping.slots_of_entry(entry) and not self.is_durable(bookie, record.ledger_id, entry)
                ]  # fmt: skip
                if lacks:
                    self._violated(
                        f"51: ledger {record.ledger_id} names {self._nodes([bookie])} in the place of "
                        f"{self._nodes([was])} from {final.first} on, which has not synced {lacks[:5]}"
                    )

    def is_durable(self, bookie: str, ledger: int, entry: int) -> bool:
        """By what its disk has synced: in a journal, or in a log (what a journal had no room for)."""
        return self._held(bookie, (ledger, entry)) or (ledger, entry) in self._logged(self.node_of.get(bookie, ""))

    def _logged(self, node: str) -> dict[Key, None]:
        """What the durable bytes of its entry logs hold. Rarely asked for: all of them are read."""
        found: dict[Key, None] = {}
        disk = self.simulation.node(node).disk
        for path in disk.list_paths() if node in self.synced else ():
            if path.endswith(".log"):
                pages = disk.find_inode(path).durable
                data, at = bytes(pages.read(pages.size, 0)), entry_log.FIRST_RECORD_OFFSET
                while record := entry_log.verify_record_at(data, at):
                    at, ledger, entry = record
                    found[ledger, entry] = None
        return found

    def _held(self, bookie: str, key: Key) -> bool:
        synced = self.graves.get(bookie) or self.synced.get(self.node_of.get(bookie, ""))
        return synced is not None and key in synced.adds

    def ended(self, ledger: int, last_entry: int, who: str) -> None:
        """Somebody was told that the ledger is CLOSED there."""
        record = self.closed.get(ledger)
        if record is None or record.last_entry != last_entry:
            self._violated(f"3: {who} of ledger {ledger} was told {last_entry}, and it is {record}")

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
    def unheard(self, ledger: int, payload: bytes) -> None:
        """Whoever asked for an append was cancelled. It goes on, and entries after it may be answered."""
        self._unheard.setdefault(ledger, []).append(zlib.crc32(payload))

    def confirmed(self, ledger: int, entry: int, payload: bytes) -> None:
        """A writer's append was answered; so those before it have their copies."""
        acked = self.acked.setdefault(ledger, [])
        gap, unheard = entry - len(acked), self._unheard.get(ledger, [])
        if 0 < gap <= len(unheard):
            acked += unheard[:gap]
            del unheard[:gap]
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
        found: list[str] = []
        for bookie in fragment.bookies:
            node = self.node_of.get(bookie, "?")
            synced = self.graves.get(bookie) or self.synced.get(node)
            if synced is not None and synced.adds.get((record.ledger_id, entry)) == crc:
                found.append(node)
        return found
