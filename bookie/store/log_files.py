"""The files of the entry logs: names, index heads, deletion, and reading by offset. Written by store/log_writer.py."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import pairwise

from ...runtime.files import File, Files, join
from ..format import entry_log, index
from ..format.framing import FILE_HEADER_BYTES, Damaged, decode_file_header
from . import disk
from .index import Place

LOG_SUFFIX = ".log"
INDEX_SUFFIX = ".idx"


def log_name(number: int) -> str:
    return f"{number:016d}{LOG_SUFFIX}"


def index_name(number: int) -> str:
    return f"{number:016d}{INDEX_SUFFIX}"


def places_of(log: int, group_offset: int, extents: list[index.Extent]) -> Iterator[Place]:
    offset = group_offset + index.GROUP_HEADER_BYTES + len(extents) * index.HEAD_BYTES
    for extent in extents:
        yield Place(log, extent, offset)
        offset += extent.table_bytes


def read_index(files: Files, directory: str, number: int, uuid: bytes, end: int | None) -> list[Place]:
    """All extents of a log. `end`: where its index ends (from the mark); None: with the file."""
    path = join(directory, index_name(number))
    file = files.open(path, write=False)
    try:
        decode_file_header(file.pread(FILE_HEADER_BYTES, 0), index.MAGIC, uuid, number, path)
        end = file.size() if end is None else end
        if file.size() < end:
            raise Damaged(path, file.size(), f"the file ends here and should be {end} bytes long")
        places: list[Place] = []
        offset = FILE_HEADER_BYTES
        while offset < end:
            header = index.decode_group_header(file.pread(index.GROUP_HEADER_BYTES, offset))
            extents = None
            if header is not None and offset + header.heads_bytes + header.tables_bytes <= end:
                extents = index.decode_heads(header, file.pread(index.GROUP_HEADER_BYTES + header.heads_bytes, offset))
            if header is None or extents is None:
                raise Damaged(path, offset, "group of the index does not match its checksum")
            places += places_of(number, offset, extents)
            offset += index.GROUP_HEADER_BYTES + header.heads_bytes + header.tables_bytes
        return places
    finally:
        file.close()


def numbers(files: Files, directory: str) -> list[int]:
    """Of all logs or indexes that have a name here, ascending."""
    found = {
        int(name.partition(".")[0])
        for name in files.list_directory(directory)
        if name.endswith((LOG_SUFFIX, INDEX_SUFFIX))
    }
    return sorted(found)


def remove(files: Files, directory: str, number: int) -> None:
    """The log first: an index without a log is finished by the next start, a log without an index is damage."""
    for name in (log_name(number), index_name(number)):
        path = join(directory, name)
        if files.exists(path):
            files.remove(path)
    disk.sync_directory(files, directory)


class LogReader:
    """Reads from logs by offset, in a worker; keeps at most `open_max` files open."""

    def __init__(self, files: Files, directory: str, open_max: int) -> None:
        self._files = files
        self._directory = directory
        self._open_max = open_max
        self._open: OrderedDict[str, File] = OrderedDict()

    def read_table(self, place: Place) -> index.Table | None:
        """None: damaged."""
        data = self._file(index_name(place.log)).pread(place.extent.table_bytes, place.table_offset)
        return index.decode_table(place.extent, data)

    def read_records(self, place: Place, offsets: list[int]) -> list[bytes | None]:
        """One read of the records between neighbouring offsets (relative to the extent); None for a damaged one."""
        base = offsets[0]
        data = self._file(log_name(place.log)).pread(offsets[-1] - base, place.extent.start + base)
        return [entry_log.decode_record(data, start - base, end - base) for start, end in pairwise(offsets)]

    def forget(self, log: int) -> None:
        for name in (log_name(log), index_name(log)):
            file = self._open.pop(name, None)
            if file is not None:
                file.close()

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def _file(self, name: str) -> File:
        file = self._open.get(name)
        if file is None:
            file = self._open[name] = self._files.open(join(self._directory, name), write=False)
            if len(self._open) > self._open_max:
                self._open.popitem(last=False)[1].close()
        else:
            self._open.move_to_end(name)
        return file
