"""A broker whose callers say their role in clear, so that tests try what each may do, without tokens."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from magnetar.metadata.sqlite import SqliteStore
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import Unauthenticated
from magnetar.runtime.access import NO_CREDENTIALS, Caller, CallerAccess, ListenerAccess, Principal, PrincipalKind
from magnetar.runtime.network import Channel, Endpoint, Network, RunningServer, World, find_rpc
from magnetar.runtime.process import make_system_world
from tests.support.cluster import Cluster, TestConsumer, TestProducer

ROOT = "root"


class RoleGuard:
    """`Role NAME` is the role NAME; `root` is a super user."""

    async def authenticate(self, caller: Caller) -> Principal:
        scheme, _, role = caller.authorization.partition(" ")
        if scheme != "Role":
            raise Unauthenticated("say your role")
        return Principal(role, PrincipalKind.CLIENT, "test", is_super=role == ROOT)

    def authorize(self, principal: Principal, path: str) -> None:
        return

    def why_lapsed(self, principal: Principal) -> str:
        return ""


class RoleNetwork:
    """Listeners ask for roles, and calls bring this one."""

    def __init__(self, inner: Network, role: str) -> None:
        self._inner = inner
        self._role = role
        self.serve_bytes, self.connect_bytes = inner.serve_bytes, inner.connect_bytes
        self.serve_peers, self.connect_peer = inner.serve_peers, inner.connect_peer

    async def serve(
        self, endpoint: Endpoint, services: Sequence[tuple[str, object]], access: ListenerAccess | None = None
    ) -> RunningServer:
        return await self._inner.serve(endpoint, services, ListenerAccess(RoleGuard()))

    def connect(self, endpoint: Endpoint, access: CallerAccess = NO_CREDENTIALS) -> Channel:
        return self._inner.connect(endpoint, CallerAccess(authorization=lambda: f"Role {self._role}"))


class Roles:
    """A hand for each thing that a caller with a role does."""

    def __init__(self, running: Cluster) -> None:
        self.running = running
        self.broker = running.brokers[0]
        self._channels: dict[tuple[str, Endpoint], Channel] = {}

    def world(self, role: str) -> World:
        return replace(self.running.world, network=RoleNetwork(self.running.world.network._inner, role))  # type: ignore[attr-defined]

    async def call(self, role: str, path: str, request: Any = None) -> Any:
        """`path`: "Admin.DeleteTopic"."""
        at = role, self.broker.endpoint
        if at not in self._channels:
            self._channels[at] = self.world(role).network.connect(self.broker.endpoint)
        service, _, method = path.partition(".")
        return await self._channels[at].call(find_rpc(service, method), request or wire.Empty(), timeout_s=20.0)

    async def producer(self, role: str, topic: str, name: str = "", **options: Any) -> TestProducer:
        return await TestProducer(self.world(role), self.broker, topic, name or f"p-{role}", **options).opened()

    async def consumer(self, role: str, topic: str, subscription: str = "s", **options: Any) -> TestConsumer:
        return await TestConsumer(self.world(role), self.broker, topic, subscription, **options).ready()

    async def tenant(self, name: str, *admins: str) -> None:
        await self.call(ROOT, "Admin.CreateTenant", wire.TenantSpec(name=name, admin_roles=admins))
        await self.call(ROOT, "Admin.CreateNamespace", wire.NamespaceSpec(name=f"{name}/orders"))

    async def grant(self, role: str, *actions: str, namespace: str = "", topic: str = "", by: str = ROOT) -> None:
        grant = wire.ChangePermissionsRequest.Grant(role=role, actions=actions)
        asked = wire.ChangePermissionsRequest(namespace=namespace, topic=topic, grant=grant)
        await self.call(by, "Admin.ChangePermissions", asked)

    async def revoke(self, role: str, *, namespace: str = "", topic: str = "") -> None:
        asked = wire.ChangePermissionsRequest(namespace=namespace, topic=topic, revoke=role)
        await self.call(ROOT, "Admin.ChangePermissions", asked)

    async def list_for(self, subscription: str, *roles: str, namespace: str = "acme/orders") -> None:
        listed = wire.ChangePermissionsRequest.OfSubscription(subscription=subscription, roles=roles)
        asked = wire.ChangePermissionsRequest(namespace=namespace, grant_subscription=listed)
        await self.call(ROOT, "Admin.ChangePermissions", asked)

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()


@asynccontextmanager
async def roles(folder: Path, *, brokers: int = 1, **changes: object) -> AsyncIterator[Roles]:
    inner = make_system_world(1)
    world = replace(inner, network=RoleNetwork(inner.network, ROOT))
    store = await SqliteStore.open(world, str(folder / "metadata.sqlite"))
    running = Cluster(world, folder, store)
    try:
        await running.add_bookie()
        for _ in range(brokers):
            await running.add_broker(**changes)
        found = Roles(running)
        await found.tenant("acme", "acme-admin")
        await found.tenant("other", "other-admin")
        yield found
        await found.close()
    finally:
        await running.close()
        await store.close()
