"""The members of a secured cluster: the keys of `/members`, kept by a watch.

    members = await Members.start(world, open_session, "bookie", "host-1")    writes our key, and reads those of others
    world = members.make_world_with_member_keys(world)            its network has our keys, and asks peers for theirs
    await members.close()

Each process makes a pair of keys at its start, and writes the public one to `/members/<role>/<key>`, an ephemeral of a
session of its own: a restart renews the key, and a dead process' key is refused once its session ends. Who may write
there is decided by the metadata service (its certificates; tree_core.py), or by ZooKeeper's access lists: the
metadata is the root of trust, and no key is in a file.

- *A new member* is known before its first message: a key that is not in the table is looked up once more, by one
  listing for all that ask meanwhile, and at most one every MEMBER_LIST_INTERVAL_S. So strangers cost the metadata
  nothing more.
- *Without metadata* the last known table decides; a key that is not in it is not admitted, and may come again.
- *A lost session* is followed by another one, and our key is written again with it. Meanwhile the others serve the
  connections that this process has, for DEPARTED_MEMBER_VALID_S: a broker without a session serves its topics on for so
  long (`session_lost_grace_s`), and fencing protects the data. A new connection needs a key that is in the table.
Guarded by tests/metadata/test_members.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import replace

from ..proto.errors import MagnetarError, SessionExpired, Unavailable
from ..runtime.access import NO_CREDENTIALS, OPEN_ACCESS, Principal, PrincipalKind
from ..runtime.network import PeerServerKeys, World
from ..runtime.peer.sockets import MemberNetwork
from ..runtime.tasks import Supervisor, run_to_end
from . import paths, records
from .store import (
    ANY_VERSION,
    NODE_ABSENT,
    DeleteNode,
    MetadataStore,
    PutNode,
    VersionedValue,
    get_record,
    group_changes,
)

MEMBER_LIST_INTERVAL_S = 0.25
MEMBER_LIST_RETRY_S = 0.5
DEPARTED_MEMBER_VALID_S = 30.0
"""When the key of a process is deleted, its open connections are served for this many seconds more."""

_LOG = logging.getLogger("magnetar.members")

OpenMetadataSession = Callable[[], Awaitable[MetadataStore]]


class Members:
    """The members of a secured cluster: writes the public key of this process to the metadata, and knows the keys of
    the other members. It is the PeerAdmission of this process's peer server, which asks `admit` whether a caller may
    connect. Made by `start`."""

    def __init__(self, world: World, open_session: OpenMetadataSession, role: str, name: str) -> None:
        self.keys = world.network.generate_keys()
        self._clock = world.clock
        self._open_session = open_session
        self._record = records.MemberRecord(role=role, name=name, key=self.keys.public)
        self._known: dict[str, Principal] = {}
        self._gone: dict[str, tuple[Principal, float]] = {}  # key → until when its connections are served
        self._session: MetadataStore | None = None
        self._looking = asyncio.Lock()
        self._table = asyncio.Lock()  # one read at a time, so that what was read later is also applied later
        self._looks = 0
        self._looked = 0.0
        self._listed = asyncio.Event()
        self._background = Supervisor()

    @classmethod
    async def start(cls, world: World, open_session: OpenMetadataSession, role: str, name: str) -> Members:
        """Writes this process's key to the metadata, reads the keys of the other members, and returns the object, which
        then follows changes in the background until `close`. `role` and `name` are those of this process. Raises the
        errors of `open_session` and of the first requests to the metadata."""
        members = cls(world, open_session, role, name)
        try:
            await members._open_keyed()
        except BaseException:
            await run_to_end(members.close())
            raise
        members._background.start_supervised("members", members._follow)
        return members

    def make_world_with_member_keys(self, world: World) -> World:
        """Returns a copy of `world` whose network proves this process's key to peers, and asks for theirs. If the
        network has certificates, the copy uses them too."""
        network = world.network
        if not isinstance(network, MemberNetwork):
            network = MemberNetwork(network, OPEN_ACCESS, NO_CREDENTIALS)
        return replace(world, network=network.with_peer_keys(PeerServerKeys(self.keys, self)))

    async def read_record(self, path: str, cls: type[records.R]) -> records.R | None:
        """Returns the record of class `cls` at `path`, read in this process's own metadata session; None if there is no
        record. Raises Unavailable if there is no session, and the errors of `get_record`."""
        found = await get_record(self._living(), path, cls)
        return None if found is None else found[0]

    def list_keys(self, role: str) -> list[str]:
        """Returns the public keys of the known members with this role, sorted."""
        return sorted(key for key, each in self._known.items() if each.name.startswith(f"{role}/"))

    # ------------------------------------------------------------------------------ the gate
    async def admit(self, key: str) -> bool:
        """Returns whether the public key belongs to a member. If the key is not known, first lists the members again,
        at most once in MEMBER_LIST_INTERVAL_S seconds, so the call may wait for so long. Raises Unavailable if the
        metadata does not answer this listing."""
        if key not in self._known:
            try:
                await self._list_again()
            except MagnetarError as error:
                raise Unavailable(f"who has that key is not known: {error.message}") from error
        return key in self._known

    def find_principal(self, key: str) -> Principal | None:
        """Returns the principal of the member with this public key. For DEPARTED_MEMBER_VALID_S seconds after the
        member has left, still returns its principal, so that its open connections go on. Returns None for any other
        key."""
        return self._known.get(key) or self._leaving(key)

    def _leaving(self, key: str) -> Principal | None:
        principal, until = self._gone.get(key, (None, 0.0))
        return principal if self._clock.monotonic() < until else None

    def _left(self, keys: Iterable[str]) -> None:
        """Records that the members with these keys have left. Their connections are served for DEPARTED_MEMBER_VALID_S
        seconds more."""
        now = self._clock.monotonic()
        self._gone = {key: left for key, left in self._gone.items() if now < left[1]}
        for key in keys:
            self._gone[key] = self._known[key], now + DEPARTED_MEMBER_VALID_S

    async def _list_again(self) -> None:
        """Lists the members again: once for all callers that wait, and at most once in MEMBER_LIST_INTERVAL_S
        seconds."""
        looks = self._looks
        async with self._looking:
            if self._looks != looks:
                return  # another one began after we asked
            wait_s = self._looked + MEMBER_LIST_INTERVAL_S - self._clock.monotonic()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            self._looks += 1
            self._looked = self._clock.monotonic()
            await self._list(self._living())

    # ------------------------------------------------------------------------------ the table
    def _living(self) -> MetadataStore:
        """Returns the current metadata session. Raises Unavailable if there is none."""
        if self._session is None:
            raise Unavailable("there is no metadata session")
        return self._session

    async def _open_keyed(self) -> None:
        """Opens a metadata session, writes this process's key in it, and lists the members."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        self._session = await self._open_session()
        path = paths.member(self._record.role, self.keys.public)
        put = PutNode(path, records.encode_record(self._record, path), NODE_ABSENT, ephemeral=True)
        await self._session.commit([DeleteNode(path, ANY_VERSION), put])
        await self._list(self._session)

    async def _follow(self) -> None:
        """Follows changes of the members until the task is cancelled. Lists them again when the watch breaks, and opens
        another session when the session is lost, or refuses the watch for good."""
        while True:
            session = self._living()
            watching = asyncio.ensure_future(self._watch(session))
            lost = asyncio.ensure_future(session.wait_session_lost())
            try:
                await asyncio.wait((watching, lost), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in (watching, lost):
                    each.cancel()
                await asyncio.gather(watching, lost, return_exceptions=True)
            while True:
                try:
                    await self._open_keyed()
                    break
                except MagnetarError as error:
                    _LOG.warning("no session for this process' key: %s", error)
                    await asyncio.sleep(MEMBER_LIST_RETRY_S)

    async def _watch(self, session: MetadataStore) -> None:
        while True:
            try:
                revision = await session.revision()
                await self._list(session)
                async with aclosing(group_changes(session.watch(paths.MEMBERS, revision))) as groups:
                    async for changed in groups:
                        await self._refresh(session, changed)
            except SessionExpired:
                return
            except MagnetarError as error:
                _LOG.warning("the watch on members broke, listing again: %s", error)
                await asyncio.sleep(MEMBER_LIST_RETRY_S)
                if not error.retryable:  # perhaps in another session
                    return

    async def _list(self, session: MetadataStore) -> None:
        async with self._table:
            found: dict[str, Principal] = {}
            for role in await session.children(paths.MEMBERS):
                for key, node in (await session.read_nodes(f"{paths.MEMBERS}/{role}")).items():
                    if (principal := self._parse(role, key, node)) is not None:
                        found[key] = principal
            self._left(self._known.keys() - found.keys())
            self._known = found

    async def _refresh(self, session: MetadataStore, changed: set[str]) -> None:
        keys = defaultdict[str, list[str]](list)
        for path in sorted(changed):
            role, _, key = path.removeprefix(f"{paths.MEMBERS}/").partition("/")
            keys[role].append(key)
        async with self._table:
            for role, some in keys.items():
                nodes = await session.read_nodes(f"{paths.MEMBERS}/{role}", some)
                found = {key: self._parse(role, key, node) for key, node in nodes.items()}
                for key in some:
                    self._apply(key, found.get(key))

    def _apply(self, key: str, principal: Principal | None) -> None:
        if principal is not None:
            self._known[key] = principal
            return
        self._left(self._known.keys() & {key})
        self._known.pop(key, None)

    @staticmethod
    def _parse(role: str, key: str, node: VersionedValue) -> Principal | None:
        """Returns the member with this role and key; None if the record is damaged, or does not match its path. The
        role in the path counts, because only processes with this role may write there."""
        path = paths.member(role, key)
        try:
            record = records.decode_record(node.value, records.MemberRecord, path)
        except ValueError as error:
            _LOG.error("a member is not admitted, its record is damaged: %s", error)
            return None
        if (record.role, record.key) != (role, key):
            _LOG.error("a member is not admitted, the record at %s is of another one", path)
            return None
        return Principal(f"{record.role}/{record.name}", PrincipalKind.MEMBER, "key")

    async def close(self) -> None:
        """Leaves the cluster: stops following changes, and ends the metadata session, which deletes this process's key.
        May be called again."""
        await self._background.close()
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def statistics(self) -> dict[str, int]:
        return {"members": len(self._known), "member_looks": self._looks}
