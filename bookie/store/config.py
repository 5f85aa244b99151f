"""The settings of a store: each with its unit, what it bounds, and what it costs."""

from __future__ import annotations

import msgspec

from ...proto.errors import InvalidConfiguration


class StoreConfig(msgspec.Struct, frozen=True):
    """Settings of a bookie's store."""

    memtable_bytes: int = 64 << 20  # a checkpoint begins at this size; memory holds at most three times this
    checkpoint_interval_s: float = 600.0  # a checkpoint also after this long; each makes an extent per ledger touched
    journal_bytes: int = 64 << 20  # and after this much journal, which small records fill faster than the memtable
    journal_segment_bytes: int = 64 << 20  # a spare of this size is zero-filled in the background
    journal_first_segment_bytes: int = 4 << 20  # filled while the process starts: about 10 ms
    journal_block_bytes_max: int = 1 << 20  # a larger block delays its answers (0.5 ms for 1 MiB) and gains nothing
    journal_queue_bytes_max: int = 32 << 20  # of records not synced yet; past it adds are held, then BUSY
    journal_spares_max: int = 3  # recycled segments kept
    journal_direct: bool = True  # past the page cache where the file system does that; else a write and a sync
    log_bytes_max: int = 1 << 30  # an entry log is the unit of deletion
    log_allocate_bytes: int = 16 << 20  # entry logs grow in steps of this
    reserve_bytes: int = 64 << 20  # kept free for a full disk, at least; grows with the logs up to one log; at most 5 %
    log_files_open_max: int = 64  # file descriptors of the reader; reading ahead has 32 more
    index_cache_bytes: int = 16 << 20  # of extents and entry tables (8 bytes an entry); a miss is one more file read
    read_cache_bytes: int = 32 << 20  # of entries read ahead, half for single reads and half for ranges
    read_ahead_bytes: int = 256 << 10  # along the extent, when single entries are asked for
    read_chunk_bytes: int = 2 << 20  # after a range that was asked for; smaller with more readers than have room
    read_bytes_max: int = 4 << 20  # of one answer

    def __post_init__(self) -> None:
        if self.journal_first_segment_bytes > self.journal_segment_bytes:
            raise InvalidConfiguration("journal_first_segment_bytes is above journal_segment_bytes")
        if self.memtable_bytes + (8 << 20) >= self.log_bytes_max:
            raise InvalidConfiguration("log_bytes_max must hold a whole memtable and 8 MiB: a flush goes into one log")
