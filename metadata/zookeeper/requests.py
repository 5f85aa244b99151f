"""Requests that kazoo lacks, in ZooKeeper's bytes; metadata/zookeeper/connection.py sends them.
Imports kazoo.

    AddWatch, RemoveWatches   a persistent recursive watch (ZooKeeper 3.6), and its end
    CreateFolder              a container: ZooKeeper deletes it some time after its last child (3.5.1)
    Multi                     a transaction whose answer names the step that failed

Each has kazoo's form of a request: its number, its bytes, and how its answer is read.
Guarded by the conformance suite against a real server, tests/metadata/zookeeper/test_zookeeper.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kazoo.protocol.serialization import Create as CreateRequest
from kazoo.protocol.serialization import MultiHeader, SetData, int_struct, read_string, stat_struct, write_string

EPHEMERAL, CONTAINER = 1, 4
RECURSIVE = 1  # AddWatchMode.PERSISTENT_RECURSIVE
ANY_WATCH = 3  # WatcherType.Any


@dataclass(frozen=True, slots=True)
class AddWatch:
    """Begins a persistent recursive watch on a znode."""

    path: str
    type: ClassVar[int] = 106

    def serialize(self) -> bytes:
        return bytes(write_string(self.path) + int_struct.pack(RECURSIVE))

    @staticmethod
    def deserialize(buffer: bytes, offset: int) -> None:
        return None


@dataclass(frozen=True, slots=True)
class RemoveWatches:
    """Ends the watches on a znode."""

    path: str
    type: ClassVar[int] = 18

    def serialize(self) -> bytes:
        return bytes(write_string(self.path) + int_struct.pack(ANY_WATCH))

    @staticmethod
    def deserialize(buffer: bytes, offset: int) -> None:
        return None


@dataclass(frozen=True, slots=True)
class CreateFolder:
    """Makes a container, with an access list."""

    path: str
    acl: Any
    type: ClassVar[int] = 19  # createContainer

    def serialize(self) -> bytes:
        return bytes(CreateRequest(self.path, b"", self.acl, CONTAINER).serialize())

    @staticmethod
    def deserialize(buffer: bytes, offset: int) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Multi:
    """A transaction. Its answer: the error code of each step, 0 for one that held."""

    requests: tuple[Any, ...]
    type: ClassVar[int] = 14

    def serialize(self) -> bytes:
        steps = [bytes(MultiHeader(each.type, False, -1).serialize()) + each.serialize() for each in self.requests]
        return b"".join([*steps, bytes(MultiHeader(-1, True, -1).serialize())])

    @staticmethod
    def deserialize(buffer: bytes, offset: int) -> list[int]:
        codes: list[int] = []
        header, offset = MultiHeader.deserialize(buffer, offset)
        while not header.done:
            code = 0
            if header.type == CreateRequest.type:
                _, offset = read_string(buffer, offset)
            elif header.type == SetData.type:
                offset += stat_struct.size
            elif header.type == -1:
                code = int_struct.unpack_from(buffer, offset)[0]
                offset += int_struct.size
            codes.append(code)
            header, offset = MultiHeader.deserialize(buffer, offset)
        return codes
