"""Requests to running bookies (bookie/admin.py) over the peers' network; a broker lists their addresses.

Also in this file, below its heading: the identity of an operator's command in a secured cluster (operator).
"""

from __future__ import annotations

import asyncio
import json
import os
import uuid as uuids
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from click.core import ParameterSource

from ..common.exits import CommandFailure
from ..common.profiles import load_context
from ..common.session import WATCH_FLAGS, CommandSession, with_session
from ..run.servers import METADATA_HELP, connect_metadata, parse_metadata_address

if TYPE_CHECKING:
    from ...metadata.members import Members
    from ...metadata.store import MetadataStore
    from ...runtime.network import Peer, PeerClientKeys, World

class BookiePeer:
    """The connection of an operator to a registered bookie, over the network of the cluster's members. It is made at
    the first `ask`, and ended by `close`. `ask` must be called in one event loop only."""

    def __init__(self, id_: str, endpoint: str, timeout_s: float, operator: OperatorOptions | None = None) -> None:
        self.id = id_
        self._operator = operator
        self._members: Members | None = None
        self.endpoint = endpoint
        self._timeout_s = timeout_s
        self._peer: Peer | None = None

    async def ask(self, verb: str, **options: object) -> dict[str, Any]:
        """Sends the request `verb` to the bookie and returns its answer. If the bookie answers with an error, raises it
        as an exception of the same class. Raises Busy if the bookie has too many requests, and CommandFailure if it
        refuses the request, as an older version does. Raises NotFound if it is not registered any more, TimedOut or
        ConnectionLost if it does not answer, and, at the first request, the errors of `make_operator_world`."""
        from ...ledger.peer_format import Status, decode_answer, encode_admin_request
        from ...proto import errors

        if self._peer is None:
            self._peer = await self._connected()
        request = json.dumps({"verb": verb, **options}).encode()
        reply = await self._peer.request(encode_admin_request(), (request,), timeout_s=self._timeout_s)
        status = decode_answer(reply.head).status
        if status is Status.BUSY:
            raise errors.Busy(f"bookie {self.id} answers as many questions as it can; ask again")
        if status is not Status.OK or not reply.frames:
            raise CommandFailure(f"bookie {self.id} did not answer {verb!r}: {status.name}; its log says why")
        answer = json.loads(bytes(reply.frames[0]))
        assert isinstance(answer, dict)
        if "error" in answer and "message" in answer and answer.keys() == {"error", "message"}:
            raise getattr(errors, answer["error"], errors.MagnetarError)(f"bookie {self.id}: {answer['message']}")
        return answer

    async def _connected(self) -> Peer:
        from ...metadata import paths
        from ...metadata.records import BookieRecord
        from ...proto.errors import NotFound
        from ...runtime.network import NO_PEER_KEYS, PeerClientKeys

        world, self._members = await (self._operator or OperatorOptions()).make_operator_world()
        access = NO_PEER_KEYS
        if self._members is not None:
            found = await self._members.read_record(paths.bookie(self.id), BookieRecord)
            if found is None:
                raise NotFound(f"bookie {self.id} is not registered any more")
            access = PeerClientKeys(found.key)
        return self._reach(world, access)

    def connect_as_member(self, world: World, key: str) -> None:
        """Chooses the bookie process to ask, by its public key `key`, and the member of the cluster as which to ask, by
        `world`. Must be called before `ask`. With it, an operator can ask many bookies without a registration for
        each."""
        from ...runtime.network import PeerClientKeys

        self._peer = self._reach(world, PeerClientKeys(key))

    def _reach(self, world: World, access: PeerClientKeys) -> Peer:
        from ...runtime.network import Endpoint

        return world.network.connect_peer(Endpoint.parse(self.endpoint), uuids.UUID(self.id).bytes, access)

    async def close(self) -> None:
        """Ends the connection and the registration of the operator, if they were made."""
        if self._peer is not None:
            await self._peer.close()
        if self._members is not None:
            await self._members.close()


def find_bookies(session: CommandSession, wanted: str | None, timeout_s: float | None = None) -> list[BookiePeer]:
    """Returns the registered bookies; if `wanted` is not None, only the bookie whose id begins with `wanted`.
    `timeout_s`: how many seconds to wait for their answers, if that must be longer than the session's time-out. Raises
    NotFound if there is no such bookie, CommandFailure if `wanted` fits several, and the errors of the admin client, by
    which a broker is asked for the bookies."""
    from ...proto.errors import NotFound

    listed = session.admin.bookies()
    chosen = [each for each in listed if wanted is None or each.id.startswith(wanted)]
    if not chosen:
        what = "no bookie is registered" if wanted is None else f"no registered bookie's id begins with {wanted!r}"
        raise NotFound(f"{what}; 'magnetar bookies list' shows those that are there")
    if wanted is not None and len(chosen) > 1:
        raise CommandFailure(f"{len(chosen)} bookies' ids begin with {wanted!r}; give more of it")
    wait_s = timeout_s or session.timeout_s
    return [BookiePeer(each.id, each.endpoint, wait_s, session.operator) for each in chosen]


def ask_bookies(peers: list[BookiePeer], verb: str, **options: object) -> list[dict[str, Any]]:
    """Sends the request `verb` to all bookies at the same time. Returns their answers in the order of `peers`, and
    closes the connections. Raises the first error of `BookiePeer.ask`."""

    async def ask() -> list[dict[str, Any]]:
        try:
            return list(await asyncio.gather(*(peer.ask(verb, **options) for peer in peers)))
        finally:
            for peer in peers:
                await peer.close()

    return asyncio.run(ask())


def ask_reachable_bookies(
    session: CommandSession, verb: str, errors: list[Exception] | None = None
) -> dict[str, dict[str, Any]]:
    """Sends the request `verb` to all registered bookies, and returns the answers by bookie id. Leaves out bookies that
    do not answer within the session's time-out, or do not support the request, and adds the reasons to `errors`. Raises
    NotFound if no bookie is registered, and the errors of the admin client, by which a broker is asked for them."""
    from ...proto.errors import MagnetarError, TimedOut

    async def ask(peer: BookiePeer) -> tuple[str, dict[str, Any]] | None:
        try:
            async with asyncio.timeout(session.timeout_s):
                return peer.id, await peer.ask(verb)
        except (MagnetarError, CommandFailure, TimeoutError) as error:
            if errors is not None:
                late = TimedOut(f"bookie {peer.id} did not answer within {session.timeout_s:g} s")
                errors.append(late if isinstance(error, TimeoutError) else error)
            return None
        finally:
            await peer.close()

    async def ask_all() -> dict[str, dict[str, Any]]:
        return dict(filter(None, await asyncio.gather(*map(ask, find_bookies(session, None)))))

    return asyncio.run(ask_all())


# ------------------------------------------------------------------------------------------------------ operator
# The identity of an operator's command in a secured cluster: a member with the role `operator`, for as long as it
# runs.
#
# Bookies take administrators' requests from brokers and operators alone. The command shows its certificate to the
# metadata service, writes a key of its own there, and reads the bookie's; both end with it.


OPERATOR_ROLE = "operator"
SESSION_TIMEOUT_S = 10.0


def resolve_context_option(context: click.Context, parameter: click.Parameter, given: str | None) -> str | None:
    """Returns the value of the option --security or --metadata. Takes the first that is set: the option itself, its
    environment variable, the context, the default; None if none of them is set. If a context is given by an option, it
    has priority over the variable. Raises InvalidConfiguration if the context is missing or invalid."""
    source = context.get_parameter_source(str(parameter.name))
    typed = context.get_parameter_source("profile") is ParameterSource.COMMANDLINE
    beaten = (ParameterSource.DEFAULT, ParameterSource.ENVIRONMENT) if typed else (ParameterSource.DEFAULT,)
    if context.resilient_parsing or source not in beaten:
        return given
    named = context.params.get("profile") or os.environ.get("MAGNETAR_CONTEXT") or os.environ.get("MAGNETAR_PROFILE")
    default = given if source is ParameterSource.DEFAULT else parameter.get_default(context)
    return load_context(named or "")[1].get(str(parameter.name).rstrip("_"), default)


SECURITY_OPTION = click.option(
    "--security", envvar="MAGNETAR_SECURITY", type=click.Path(dir_okay=False), default=None, metavar="FILE",
    callback=resolve_context_option,
    help="Of a cluster whose bookies take members alone: who you are (section [members]).",
)  # fmt: skip
METADATA_OPTION = click.option(
    "--metadata", "metadata_", envvar="MAGNETAR_METADATA", default="127.0.0.1:7640", show_default=True,
    help=f"With --security. {METADATA_HELP}", callback=resolve_context_option,
)  # fmt: skip


class OperatorOptions(NamedTuple):
    """The options --security and --metadata of a command that sends requests to bookies as an operator. Without
    `security` the command has no key, and its requests are not encrypted. `timeout_s`: for how many seconds to wait for
    the metadata."""

    security: str | None = None
    metadata: str = ""
    timeout_s: float = SESSION_TIMEOUT_S

    async def make_operator_world(self) -> tuple[World, Members | None]:
        """Returns a world (runtime/network.py) with which bookies accept this command as an operator, and the list of
        the cluster's members, which the caller must close. Without `security`, returns None in place of the list.
        Raises Unavailable if the metadata does not answer, InvalidConfiguration if the settings are invalid, UsageError
        if the address of the metadata is."""
        from ...metadata.members import Members
        from ...runtime.process import make_system_world
        from ...security.members import read_own_member_name
        from ..run.servers import get_members_section, make_member_world

        world = make_system_world()
        section = get_members_section(self.security)
        if section is None:
            return world, None
        world = make_member_world(world, self.security, OPERATOR_ROLE)
        address = parse_metadata_address(self.metadata, self.security)

        async def session() -> MetadataStore:
            return await connect_metadata(world, address, self.timeout_s, SESSION_TIMEOUT_S)

        members = await Members.start(world, session, OPERATOR_ROLE, read_own_member_name(section, OPERATOR_ROLE))
        return members.make_world_with_member_keys(world), members


def with_operator_options(function: Callable[..., None], *watched: str) -> Callable[..., None]:
    """Decorates a command that sends requests to bookies. Adds what `with_session` adds, and the options --security and
    --metadata."""

    @wraps(function)
    def command(session: CommandSession, *args: Any, **options: Any) -> None:
        session.operator = OperatorOptions(options.pop("security"), options.pop("metadata_"), session.timeout_s)
        function(session, *args, **options)

    return with_session(SECURITY_OPTION(METADATA_OPTION(command)), *watched)


def with_operator_and_watch_options(function: Callable[..., None]) -> Callable[..., None]:
    """Decorates a command that only reads from bookies. Adds what `with_operator_options` adds, and the option
    --watch."""
    return with_operator_options(function, *WATCH_FLAGS)
