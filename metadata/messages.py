"""The tree's values as messages of proto/wire.proto, for both ends of the metadata service."""

from __future__ import annotations

from collections.abc import Sequence

from ..proto import wire_pb2 as wire
from ..proto.errors import InvalidRequest
from ..runtime.network import rpc
from .store import ABSENT, Changed, Check, Delete, Operation, Put, Reset

GET = rpc("Metadata", "Get")
CHILDREN = rpc("Metadata", "Children")
COMMIT = rpc("Metadata", "Commit")
SESSION = rpc("Metadata", "Session")
BACKUP = rpc("Metadata", "Backup")


def commit_request(operations: Sequence[Operation], session: str) -> wire.CommitRequest:
    return wire.CommitRequest(operations=[_to_wire(operation) for operation in operations], session=session)


def _to_wire(operation: Operation) -> wire.Operation:
    match operation:
        case Put(path, value, expected, ephemeral):
            return wire.Operation(
                kind=wire.Operation.PUT, path=path, value=value, expected=expected, ephemeral=ephemeral
            )
        case Delete(path, expected):
            return wire.Operation(kind=wire.Operation.DELETE, path=path, expected=expected)
        case Check(path, expected):
            return wire.Operation(kind=wire.Operation.CHECK, path=path, expected=expected)


def operations_of(request: wire.CommitRequest) -> list[Operation]:
    """The operations of a commit. Raises InvalidRequest for a kind that this version does not know."""
    return [_from_wire(operation) for operation in request.operations]


def _from_wire(operation: wire.Operation) -> Operation:
    if operation.kind == wire.Operation.PUT:
        return Put(operation.path, operation.value, operation.expected, operation.ephemeral)
    if operation.kind == wire.Operation.DELETE:
        return Delete(operation.path, operation.expected)
    if operation.kind == wire.Operation.CHECK:
        return Check(operation.path, operation.expected)
    raise InvalidRequest(f"{operation.path}: operation of unknown kind {operation.kind}")


def watch_events(watch_id: int, news: Sequence[Changed] | Reset, revision: int) -> wire.SessionReply:
    """Returns one reply with a watch's changes; with them the watch has seen everything up to `revision`."""
    if isinstance(news, Reset):
        events = wire.WatchEvents(watch_id=watch_id, revision=revision, reset=True)
    else:
        events = wire.WatchEvents(watch_id=watch_id, revision=revision, events=[_event(change) for change in news])
    return wire.SessionReply(events=events)


def _event(change: Changed) -> wire.TreeEvent:
    kind = wire.TreeEvent.DELETE if change.version == ABSENT else wire.TreeEvent.PUT
    return wire.TreeEvent(kind=kind, path=change.path, version=change.version, revision=change.revision)


def news_of(message: wire.WatchEvents) -> list[Changed | Reset]:
    if message.reset:
        return [Reset(message.revision)]
    return [Changed(event.path, event.version, event.revision) for event in message.events]
