"""Requests to running bookies (bookie/admin/verbs.py) over the peers' network; a broker lists their addresses."""

from __future__ import annotations

import asyncio
import json
import uuid as uuids
from typing import TYPE_CHECKING, Any

from ..common.exits import Failure

if TYPE_CHECKING:
    from ...metadata.members import Members
    from ...runtime.network import Peer
    from ...runtime.peer.keys import PeerCalling
    from ...runtime.world import World
    from ..common.session import Session
    from .operator import Operator


class BookiePeer:
    """A registered bookie. Call `ask` from the session's event loop."""

    def __init__(self, id_: str, endpoint: str, timeout_s: float, operator: Operator | None = None) -> None:
        self.id = id_
        self._operator = operator
        self._members: Members | None = None
        self.endpoint = endpoint
        self._timeout_s = timeout_s
        self._peer: Peer | None = None

    async def ask(self, verb: str, **options: object) -> dict[str, Any]:
        """Returns the bookie's answer. Raises the error that it answers with, by its class; Failure when it knows no
        verbs."""
        from ...ledger.format.peer import Status, decode_answer, encode_admin
        from ...proto import errors

        if self._peer is None:
            self._peer = await self._connected()
        request = json.dumps({"verb": verb, **options}).encode()
        reply = await self._peer.request(encode_admin(), (request,), timeout_s=self._timeout_s)
        status = decode_answer(reply.head).status
        if status is Status.BUSY:
            raise errors.Busy(f"bookie {self.id} answers as many questions as it can; ask again")
        if status is not Status.OK or not reply.frames:
            raise Failure(f"bookie {self.id} did not answer {verb!r}: {status.name}; its log says why")
        answer = json.loads(bytes(reply.frames[0]))
        assert isinstance(answer, dict)
        if "error" in answer and "message" in answer and answer.keys() == {"error", "message"}:
            raise getattr(errors, answer["error"], errors.MagnetarError)(f"bookie {self.id}: {answer['message']}")
        return answer

    async def _connected(self) -> Peer:
        from ...metadata import paths
        from ...metadata.records import BookieRecord
        from ...proto.errors import NotFound
        from ...runtime.peer.keys import CLEAR, PeerCalling
        from .operator import Operator

        world, self._members = await (self._operator or Operator()).join()
        access = CLEAR
        if self._members is not None:
            found = await self._members.record(paths.bookie(self.id), BookieRecord)
            if found is None:
                raise NotFound(f"bookie {self.id} is not registered any more")
            access = PeerCalling(found.key)
        return self._reach(world, access)

    def join(self, world: World, key: str) -> None:
        """Connects as the member that `world` is, to the process that has `key`: of one operator that asks many."""
        from ...runtime.peer.keys import PeerCalling

        self._peer = self._reach(world, PeerCalling(key))

    def _reach(self, world: World, access: PeerCalling) -> Peer:
        from ...runtime.network import Endpoint

        return world.network.peer(Endpoint.parse(self.endpoint), uuids.UUID(self.id).bytes, access)

    async def close(self) -> None:
        if self._peer is not None:
            await self._peer.close()
        if self._members is not None:
            await self._members.close()


def find(session: Session, wanted: str | None, timeout_s: float | None = None) -> list[BookiePeer]:
    """The registered bookies, or the one whose id begins with `wanted`. NotFound when there is none.

    `timeout_s`: of their answers, where that is longer than the session's.
    """
    from ...proto.errors import NotFound

    listed = session.admin.bookies()
    chosen = [each for each in listed if wanted is None or each.id.startswith(wanted)]
    if not chosen:
        what = "no bookie is registered" if wanted is None else f"no registered bookie's id begins with {wanted!r}"
        raise NotFound(f"{what}; 'magnetar bookies list' shows those that are there")
    if wanted is not None and len(chosen) > 1:
        raise Failure(f"{len(chosen)} bookies' ids begin with {wanted!r}; give more of it")
    wait_s = timeout_s or session.timeout_s
    return [BookiePeer(each.id, each.endpoint, wait_s, session.operator) for each in chosen]


def ask_each(peers: list[BookiePeer], verb: str, **options: object) -> list[dict[str, Any]]:
    """Returns the answers of all, requested at the same time; raises the first error."""

    async def ask() -> list[dict[str, Any]]:
        try:
            return list(await asyncio.gather(*(peer.ask(verb, **options) for peer in peers)))
        finally:
            for peer in peers:
                await peer.close()

    return asyncio.run(ask())


def answers(session: Session, verb: str) -> dict[str, dict[str, Any]]:
    """Returns by id what each registered bookie answers; those that do not answer, or not this command, are left out.
    """
    from ...proto.errors import MagnetarError

    async def ask(peer: BookiePeer) -> tuple[str, dict[str, Any]] | None:
        try:
            return peer.id, await peer.ask(verb)
        except (MagnetarError, Failure):
            return None
        finally:
            await peer.close()

    async def ask_all() -> dict[str, dict[str, Any]]:
        return dict(filter(None, await asyncio.gather(*map(ask, find(session, None)))))

    return asyncio.run(ask_all())
