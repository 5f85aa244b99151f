"""Members of a secured cluster: whose keys are known, when, and who may write what."""

import asyncio

import pytest

from magnetar.metadata import paths, records
from magnetar.metadata.members import DEPARTED_MEMBER_VALID_S, MEMBER_LIST_INTERVAL_S, MEMBER_LIST_RETRY_S, Members
from magnetar.metadata.remote import RemoteStore, connect_metadata
from magnetar.metadata.store import NODE_ABSENT, MetadataStore, PutNode, VersionedValue
from magnetar.metadata.tree_core import may_role_write
from magnetar.proto.errors import Unauthorized, Unavailable
from magnetar.runtime.sim.world import Simulation
from tests.metadata.stores import SimulatedBackend

STRANGER = "ab" * 32


class Cluster:
    """The metadata service and members, each on a machine of its own."""

    def __init__(self) -> None:
        self.simulation = Simulation(seed=1)
        self.backend = SimulatedBackend(self.simulation)

    async def member(self, node: str, role: str) -> Members:
        if self.backend.server is None:
            await self.backend.store()
        server = self.backend.server
        assert server is not None
        world = self.simulation.world(node)

        async def session() -> MetadataStore:
            return await connect_metadata(world, server.endpoint, 10.0)

        return await self.simulation.spawn(node, Members.start(world, session, role, node))



def test_members_know_each_other_at_once_and_no_stranger() -> None:
    async def main() -> None:
        one = await cluster.member("b1", "bookie")
        two = await cluster.member("br", "broker")
        found = await cluster.simulation.spawn("b1", one.admit(two.keys.public))
        principal = one.find_principal(two.keys.public)
        assert (found, principal and principal.name) == (True, "broker/br")
        assert not await cluster.simulation.spawn("b1", one.admit(STRANGER))

    cluster = Cluster()
    cluster.simulation.run(main())


def test_the_key_of_a_dead_process_opens_nothing_when_its_session_ends_and_that_of_a_closed_one_at_once() -> None:
    async def main() -> None:
        one = await cluster.member("b1", "bookie")
        dead, closed = await cluster.member("b2", "bookie"), await cluster.member("b3", "bookie")
        await asyncio.sleep(1)
        assert one.find_principal(dead.keys.public)
        assert one.find_principal(closed.keys.public)
        cluster.simulation.crash("b2")
        await cluster.simulation.spawn("b3", closed.close())
        await asyncio.sleep(1)
        assert not await cluster.simulation.spawn("b1", one.admit(closed.keys.public))
        assert await cluster.simulation.spawn("b1", one.admit(dead.keys.public))
        await asyncio.sleep(10)
        assert not await cluster.simulation.spawn("b1", one.admit(dead.keys.public))
        assert one.find_principal(dead.keys.public), "the connections that it has are served"
        await asyncio.sleep(DEPARTED_MEMBER_VALID_S)
        assert one.find_principal(dead.keys.public) is None
        assert one.find_principal(closed.keys.public) is None

    cluster = Cluster()
    cluster.simulation.run(main())


def test_without_metadata_the_known_members_stay_and_others_may_come_again() -> None:
    async def main() -> None:
        one, two = await cluster.member("b1", "bookie"), await cluster.member("br", "broker")
        await asyncio.sleep(1)
        cluster.simulation.crash("metadata")
        await asyncio.sleep(1)
        assert await cluster.simulation.spawn("b1", one.admit(two.keys.public))
        with pytest.raises(Unavailable):
            await cluster.simulation.spawn("b1", one.admit(STRANGER))
        await asyncio.sleep(60)
        assert one.find_principal(two.keys.public)

    cluster = Cluster()
    cluster.simulation.run(main())


def test_a_member_that_lost_its_session_shows_its_key_again() -> None:
    async def main() -> None:
        one, two = await cluster.member("b1", "bookie"), await cluster.member("br", "broker")
        cluster.simulation.wires.partition_nodes("br", "metadata")
        await asyncio.sleep(20)
        assert not await cluster.simulation.spawn("b1", one.admit(two.keys.public))
        cluster.simulation.wires.heal_partition()
        await asyncio.sleep(20)
        assert await cluster.simulation.spawn("b1", one.admit(two.keys.public))

    cluster = Cluster()
    cluster.simulation.run(main())


def test_strangers_that_knock_cost_one_listing_now_and_then() -> None:
    async def main() -> None:
        one = await cluster.member("b1", "bookie")
        before = one.statistics()["member_looks"]

        async def knock() -> None:
            for _ in range(20):
                await asyncio.gather(*(one.admit(f"{number:064x}") for number in range(50)))

        began = cluster.simulation.loop.time()
        await cluster.simulation.spawn("b1", knock())
        passed = cluster.simulation.loop.time() - began
        assert one.statistics()["member_looks"] - before <= passed / MEMBER_LIST_INTERVAL_S + 2

    cluster = Cluster()
    cluster.simulation.run(main())


def test_a_record_of_another_role_or_key_than_its_path_admits_no_process() -> None:
    async def main() -> None:
        one = await cluster.member("b1", "bookie")
        store = await cluster.backend.store()
        assert isinstance(store, RemoteStore)
        wrong = {
            paths.member("bookie", "01" * 32): records.MemberRecord(role="operator", name="x", key="01" * 32),
            paths.member("broker", "02" * 32): records.MemberRecord(role="broker", name="x", key="03" * 32),
        }
        puts = [PutNode(path, records.encode_record(record, path), NODE_ABSENT) for path, record in wrong.items()]
        await cluster.simulation.spawn(
            "client-0", store.commit([*puts, PutNode(paths.member("broker", STRANGER), b"bad")])
        )
        for key in ("01" * 32, "02" * 32, "03" * 32, STRANGER):
            assert not await cluster.simulation.spawn("b1", one.admit(key))

    cluster = Cluster()
    cluster.simulation.run(main())


async def hold_next_listing(members: Members, role: str) -> tuple[asyncio.Event, asyncio.Event]:
    """Holds what the next listing of the members of this role finds. Returns (it is held, let it go on)."""
    held, release = asyncio.Event(), asyncio.Event()
    session = members._living()
    read = session.read_nodes

    async def hold(folder: str) -> dict[str, VersionedValue]:
        found = await read(folder)
        if folder == f"{paths.MEMBERS}/{role}" and not held.is_set():
            held.set()
            await release.wait()
        return found

    session.read_nodes = hold  # type: ignore[method-assign]
    return held, release


def test_a_listing_that_began_before_a_member_left_does_not_admit_it_again() -> None:
    async def main() -> None:
        one, two = await cluster.member("b1", "bookie"), await cluster.member("br", "broker")
        await asyncio.sleep(1)
        held, release = await hold_next_listing(one, "broker")
        listing = cluster.simulation.spawn("b1", one.admit(STRANGER))
        await held.wait()
        await cluster.simulation.spawn("br", two.close())
        await asyncio.sleep(1)
        release.set()
        assert not await listing
        await asyncio.sleep(1)
        assert not await cluster.simulation.spawn("b1", one.admit(two.keys.public))

    cluster = Cluster()
    cluster.simulation.run(main())


def test_a_listing_that_began_before_a_member_registered_does_not_drop_it() -> None:
    async def main() -> None:
        one, _ = await cluster.member("b1", "bookie"), await cluster.member("br", "broker")
        await asyncio.sleep(1)
        held, release = await hold_next_listing(one, "bookie")
        listing = cluster.simulation.spawn("b1", one.admit(STRANGER))
        await held.wait()
        three = await cluster.member("b3", "bookie")
        await asyncio.sleep(1)
        release.set()
        assert not await listing
        await asyncio.sleep(DEPARTED_MEMBER_VALID_S + 1)
        assert one.find_principal(three.keys.public)

    cluster = Cluster()
    cluster.simulation.run(main())


def test_a_watch_that_is_refused_opens_sessions_with_pauses() -> None:
    async def main() -> None:
        await cluster.backend.store()
        assert cluster.backend.server is not None
        endpoint, world = cluster.backend.server.endpoint, cluster.simulation.world("b1")
        opened = []

        async def refuse() -> int:
            raise Unauthorized("this watch is refused")

        async def session() -> MetadataStore:
            store = await connect_metadata(world, endpoint, 10.0)
            store.revision = refuse  # type: ignore[method-assign]
            opened.append(store)
            return store

        members = await cluster.simulation.spawn("b1", Members.start(world, session, "bookie", "b1"))
        await asyncio.sleep(10)
        assert 2 <= len(opened) <= 10 / MEMBER_LIST_RETRY_S + 1
        await cluster.simulation.spawn("b1", members.close())

    cluster = Cluster()
    cluster.simulation.run(main())


@pytest.mark.parametrize(
    ("role", "may", "may_not"),
    [
        ("operator", ("/topics/a", "/bookies/cookies/x", "/members/operator/k"), ("/members/broker/k", "/members")),
        ("broker", ("/topics/a", "/owners/a", "/ledgers/1", "/bookies/racks", "/members/broker/k"),
         ("/bookies/available/x", "/bookies/cookies/x", "/members/operator/k", "/members/brokers/k")),
        ("bookie", ("/bookies/available/x", "/ledgers/1", "/repair/locks/1", "/members/bookie/k"),
         ("/topics/a", "/owners/a", "/policies/a", "/grants/a", "/members/operator/k", "/ledgersx", "/tenants/t")),
        ("metadata", (), ("/topics/a", "/members/metadata/k/x")),
        ("", (), ("/topics/a", "/members/operator/k", "/ledgers/1")),
    ],
)  # fmt: skip
def test_a_role_writes_what_it_needs(role: str, may: tuple[str, ...], may_not: tuple[str, ...]) -> None:
    assert all(may_role_write(role, each, lasting=not each.startswith("/members/")) for each in may)
    keys = [each for each in may if each.startswith("/members/")]
    assert not [each for each in keys if may_role_write(role, each)], "no key stays after the session of its process"
    assert not [each for each in may_not if may_role_write(role, each) or may_role_write(role, each, lasting=False)]
