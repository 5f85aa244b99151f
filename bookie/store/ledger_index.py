"""The ledger index on disk: keys, fence bits, LACs and facts (format/ledger_index.py), appended per checkpoint.

`append` appends what changed and syncs; a grown file that is mostly outdated (`_OUTDATED_MAX`) is written anew
as the next generation instead. Neither counts before the mark names generation and end; `committed` then removes the
old generation. `load` reads exactly what the mark names; damage there stops the start with file and offset.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...runtime.files import Files, join
from ..format import ledger_index
from ..format.framing import FILE_HEADER_BYTES, Damaged, FileHeader, decode_file_header, encode_file_header
from ..format.ledger_index import State
from . import disk

SUFFIX = ".lidx"
_OUTDATED_MAX = 4
"""A file is rewritten when it has more than this many times the records that are alive,"""
_REWRITE_BYTES_MIN = 1 << 20
"""and is larger than this."""


def name(generation: int) -> str:
    return f"{generation:016d}{SUFFIX}"


class LedgerIndexFile:
    def __init__(self, files: Files, directory: str, uuid: bytes, generation: int, end: int) -> None:
        self._files = files
        self._directory = directory
        self._uuid = uuid
        self.generation = generation
        self.end = end

    def load(self) -> list[State]:
        path = join(self._directory, name(self.generation))
        if not self._files.exists(path):
            raise Damaged(path, 0, "the ledger index is missing, and the mark names it")
        data = disk.read_file(self._files, path)
        decode_file_header(data, ledger_index.MAGIC, self._uuid, self.generation, path)
        if len(data) < self.end:
            raise Damaged(path, len(data), f"the file ends here and should be {self.end} bytes long")
        return list(ledger_index.decode_all(data[: self.end], path))

    def outdated(self, alive: int) -> bool:
        return self.end > _REWRITE_BYTES_MIN and self.end > _OUTDATED_MAX * alive * ledger_index.RECORD_BYTES

    def append(self, changed: Sequence[State]) -> tuple[int, int]:
        """(generation, end) for the mark."""
        path = join(self._directory, name(self.generation))
        data = b"".join(map(ledger_index.encode, changed))
        file = self._files.open(path)
        try:
            disk.write(self._files, file, [data], self.end)
            disk.sync(self._files, file)
        finally:
            file.close()
        return self.generation, self.end + len(data)

    def rewrite(self, everything: Sequence[State]) -> tuple[int, int]:
        """The next generation with everything; (generation, end) for the mark."""
        generation = self.generation + 1
        header = encode_file_header(FileHeader(ledger_index.MAGIC, self._uuid, generation))
        data = header + b"".join(map(ledger_index.encode, everything))
        disk.replace(self._files, self._directory, name(generation), data)
        return generation, len(data)

    def committed(self, generation: int, end: int) -> None:
        """The mark names them; other generations are removed."""
        old, self.generation, self.end = self.generation, generation, end
        if old != generation:
            self.tidy()

    def tidy(self) -> None:
        changed = False
        for other in self._files.list_directory(self._directory):
            if other != name(self.generation):
                self._files.remove(join(self._directory, other))
                changed = True
        if changed:
            disk.sync_directory(self._files, self._directory)


def create(files: Files, directory: str, uuid: bytes) -> LedgerIndexFile:
    """Generation 1, empty."""
    new = LedgerIndexFile(files, directory, uuid, 0, FILE_HEADER_BYTES)
    generation, end = new.rewrite([])
    return LedgerIndexFile(files, directory, uuid, generation, end)
