"""The metadata service during a restore: it answers for `/members` alone, so that bookies know an operator.

    async with asking(world, endpoint, copy, scratch) as server: ...       cli/storage/metadata_copies.py

Bookies take an operator's requests by its key in `/members`. While the metadata is restored its service is stopped, so
the command that restores serves a scratch copy of the tree at the service's address until the bookies have answered. To
the processes of the cluster this service differs from no service in one point: each may show its key.

| request | answer |
|---|---|
| read, list or write at `/members` | as ever: a member's certificate is needed, which writes its own role's keys |
| read `/cluster` | as it is in the copy. It is how a client asks for the tree's revision |
| any other read or write, a backup | Unavailable: as without a service. Who asks keeps what it knows, and asks again |
| a new session | opened; it ends with the command |
| a session of the stopped service | Unavailable: whether it goes on is not known here |
| a watch | has the changes of the scratch copy: keys of members |

So nothing is registered, owned, created or deleted by what is said here, and no bookie compares the scratch copy with
the metadata that it saw. Nothing that is written outlives the command: the scratch copy is deleted.
Guarded by tests/metadata/test_members_only.py, tests/security/test_secured_restore.py.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ..proto import wire_pb2 as wire
from ..proto.errors import Unavailable
from ..runtime.network import CallContext, Endpoint
from ..runtime.world import World
from . import backup, paths
from .core.rules import below
from .messages import operations_of
from .server import MetadataServer, MetadataService


class MembersOnly(MetadataService):
    """The table in the module's docstring."""

    async def get(self, request: wire.GetRequest, context: CallContext) -> wire.GetReply:
        _check(request.path, paths.CLUSTER)
        return await super().get(request, context)

    async def children(self, request: wire.GetRequest, context: CallContext) -> wire.Names:
        _check(request.path)
        return await super().children(request, context)

    async def commit(self, request: wire.CommitRequest, context: CallContext) -> wire.CommitReply:
        for each in operations_of(request):
            _check(each.path)
        return await super().commit(request, context)

    async def backup(self, request: wire.BackupRequest, context: CallContext) -> wire.BackupReply:
        raise _away("a backup")

    async def _open(self, first: wire.SessionRequest, address: str) -> tuple[str, float]:
        session = first.open.session
        if session and not self._store.has_session(session):
            raise _away(f"session {session}")
        return await super()._open(first, address)


def _check(path: str, *others: str) -> None:
    if not below(paths.MEMBERS, path) and path not in others:
        raise _away(path)


def _away(what: str) -> Unavailable:
    return Unavailable(f"{what}: the metadata is being restored, and only its members are known meanwhile")


@asynccontextmanager
async def asking(world: World, endpoint: Endpoint, copy: str, scratch: str) -> AsyncIterator[MetadataServer]:
    """Serves the file `scratch`, made from `copy`, at `endpoint`, and deletes it then. Busy: the port is taken."""
    backup.remove(scratch)
    backup.restore(copy, scratch, 0, secrets.token_hex(8))
    try:
        server = await MetadataServer.start(world, endpoint, scratch, service=MembersOnly)
        try:
            yield server
        finally:
            await server.close()
    finally:
        backup.remove(scratch)
