"""Who is who in a secured simulation: its members, the tokens of its roles, and the worlds of its processes.

    metadata   takes members alone; a ticket `Member ROLE/NAME` is in the place of a certificate
    peers      have keys, each in a record of a live session (metadata/members.py)
    brokers    ask for tokens, as in production (security/authenticator.py), by their own clock, which is virtual

Every key, token and settings' value is made from the seed's own streams, so a seed is the same each time.
"""

import base64
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jwt

from magnetar.client.connect.authentication import AuthenticationToken
from magnetar.metadata.members import Members
from magnetar.metadata.store import MetadataStore
from magnetar.proto.errors import Unauthenticated
from magnetar.runtime.access import Caller, CallerAccess, ListenerAccess, Principal, PrincipalKind
from magnetar.runtime.network import World
from magnetar.runtime.peer.sockets import MemberNetwork
from magnetar.runtime.sim.world import EPOCH_MS, Simulation
from magnetar.security.authenticator import SecuredNetwork
from magnetar.security.members import MemberGuard
from magnetar.security.settings import AuthorizationSection, BrokerSection, SecuritySettings, TokenSection
from tests.simulation.options import Options

ADMIN_ROLE = "admin"
BROKER_ROLE = "brokers"
APP = "app"
"""The role of the load: it keeps its rights."""
CHANGING = "changing"
"""The role whose rights are taken and given back."""
STRANGER_ROLE = "stranger"
"""A role without grants."""
READING = "reading"
"""A role that may consume, and not produce."""
OWNER, THIEF = "owner", "thief"
"""A role that runs transactions, and one that knows their ids (load/owners.py)."""

KEY, OTHER_KEY = b"the key of this cluster's tokens", b"the key of the tokens of another"
LATE_RATE = 0.1
"""Of the renewals of a token: the program brings the old one once more, though it has expired."""


class MemberTickets(MemberGuard):
    """The guard of the metadata: as that of certificates, with tickets in their place."""

    async def authenticate(self, caller: Caller) -> Principal:
        scheme, _, name = caller.authorization.partition(" ")
        if scheme != "Member":
            raise Unauthenticated("the metadata are for members")
        return Principal(name, PrincipalKind.MEMBER, "ticket")


class Security:
    """Of one simulation."""

    def __init__(self, simulation: Simulation, options: Options) -> None:
        self._simulation = simulation
        self._rng = simulation.random_generator("tokens")
        # Where the servers' clocks are hours off, a token that expires would be refused all the while.
        self.clocks_agree = not {"clock-jump", "clock-skew"} & set(options.times)
        self._life_s = self._rng.choice((3.0, 7.0, 20.0)) if self.clocks_agree else 0.0
        self._members: dict[object, Members] = {}
        self._settings = SecuritySettings(
            token=TokenSection(secret_key=_inline(KEY)),
            authorization=AuthorizationSection(super_users=(ADMIN_ROLE, BROKER_ROLE)),
            broker=BrokerSection(token=_inline(self.token(BROKER_ROLE).encode())),
        )

    # ------------------------------------------------------------------ tokens
    def token(self, role: str, life_s: float = 0.0, key: bytes = KEY) -> str:
        """0: it does not expire."""
        claims: dict[str, Any] = {"sub": role}
        if life_s:
            claims["exp"] = int(EPOCH_MS / 1000 + self._simulation.loop.elapsed_s + life_s)
        return jwt.encode(claims, key, "HS256")

    def of(self, role: str) -> AuthenticationToken:
        """What a program of that role brings: a function that renews its token, mostly in time."""
        if not self._life_s:
            return AuthenticationToken(self.token(role))
        return AuthenticationToken(self._renewing(role))

    def _renewing(self, role: str) -> Callable[[], str]:
        ends_s, token = -1.0, ""

        def current() -> str:
            nonlocal ends_s, token
            now_s = self._simulation.loop.elapsed_s
            if now_s >= ends_s - 1.0 and not (token and now_s < ends_s + 1.0 and self._rng.random() < LATE_RATE):
                token, ends_s = self.token(role, self._life_s), now_s + self._life_s
            return token

        return current

    # ------------------------------------------------------------------ worlds
    @property
    def listener(self) -> ListenerAccess:
        """Of the metadata."""
        return ListenerAccess(MemberTickets("simulated", self._simulation.world("metadata").clock))

    def member(self, world: World) -> World:
        """The world of a process that brings its ticket to the metadata."""
        if isinstance(world.network, MemberNetwork):
            return world
        node = _owner(world).node
        role = node.partition("-")[0]
        name = f"{role if role in ('bookie', 'broker') else 'operator'}/{node}"
        access = CallerAccess(authorization=lambda: f"Member {name}")
        return replace(world, network=MemberNetwork(world.network, ListenerAccess(), access))

    async def joined(self, world: World, session: Callable[[World], Any]) -> World:
        """The world of a process that has keys among the peers: the same keys as long as it lives."""
        owner, world = _owner(world), self.member(world)
        found = self._members.get(owner)
        if found is None:
            role = owner.node.partition("-")[0]

            async def open_session() -> MetadataStore:
                store: MetadataStore = await session(world)
                return store

            starting = Members.start(
                world, open_session, role if role in ("bookie", "broker") else "operator", owner.node
            )
            found = self._members[owner] = await starting
        return found.make_world_with_member_keys(world)

    def broker(self, world: World) -> World:
        """The world of a broker, whose listener asks for tokens."""
        return replace(world, network=SecuredNetwork(world.network, self._settings, world.clock, world.workers))


def _owner(world: World) -> Any:
    network: Any = world.network
    while isinstance(network, MemberNetwork):
        network = network._inner
    return network._owner


def _inline(secret: bytes) -> str:
    return "data:;base64," + base64.b64encode(secret).decode()
