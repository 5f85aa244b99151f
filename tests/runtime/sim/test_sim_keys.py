"""Simulated peers with keys refuse as real ones do (tests/runtime/peer/test_keys.py)."""

from collections.abc import Sequence

import pytest

from magnetar.proto import errors
from magnetar.runtime.access import Principal, PrincipalKind
from magnetar.runtime.network import Endpoint, KeyPair, PeerClientKeys, PeerRequest, PeerServerKeys
from magnetar.runtime.sim.world import Simulation

ANY = Endpoint("127.0.0.1", 0)
SERVER_ID = bytes(range(16))


class Gate:
    def __init__(self) -> None:
        self.names: dict[str, str] = {}

    async def admit(self, key: str) -> bool:
        return key in self.names

    def find_principal(self, key: str) -> Principal | None:
        name = self.names.get(key)
        return None if name is None else Principal(name, PrincipalKind.MEMBER)


def service(requests: Sequence[PeerRequest]) -> None:
    for request in requests:
        request.reply(request.principal.name.encode() if request.principal else b"?")


async def start(simulation: Simulation, gate: Gate, *, keys: bool = True) -> tuple[Endpoint, KeyPair]:
    network = simulation.world("server").network
    own = network.generate_keys()

    async def begin() -> Endpoint:
        access = PeerServerKeys(own, gate) if keys else None
        return (await network.serve_peers(ANY, SERVER_ID, service, access)).endpoint

    return await simulation.spawn("server", begin()), own


async def ask(simulation: Simulation, endpoint: Endpoint, access: PeerClientKeys, times: int = 1) -> bytes:
    async def run() -> bytes:
        peer = simulation.world("client").network.connect_peer(endpoint, SERVER_ID, access)
        for _ in range(times):
            found = (await peer.request(b"", timeout_s=30)).head
        return bytes(found)

    return await simulation.spawn("client", run())


def test_a_member_is_served_and_named() -> None:
    async def main() -> None:
        gate = Gate()
        endpoint, server = await start(simulation, gate)
        own = simulation.world("client").network.generate_keys()
        gate.names[own.public] = "broker/a"
        assert await ask(simulation, endpoint, PeerClientKeys(server.public, own), times=2) == b"broker/a"

    simulation = Simulation(seed=1)
    simulation.run(main())


@pytest.mark.parametrize("case", ["stranger", "clear", "server in clear", "another's key"])
def test_every_other_one_is_unauthorized(case: str) -> None:
    async def main() -> None:
        gate = Gate()
        endpoint, server = await start(simulation, gate, keys=case != "server in clear")
        own: KeyPair | None = simulation.world("client").network.generate_keys()
        assert own is not None
        gate.names["aa" * 32] = "broker/a"
        if case == "server in clear":
            gate.names[own.public] = "broker/a"
        if case == "clear":
            own = None
        if case == "another's key":  # its public key, without the secret
            own = KeyPair("aa" * 32, bytes(32))
        with pytest.raises(errors.Unauthorized):
            await ask(simulation, endpoint, PeerClientKeys(server.public, own))

    simulation = Simulation(seed=1)
    simulation.run(main())


def test_a_server_with_another_key_is_not_used() -> None:
    async def main() -> None:
        gate = Gate()
        endpoint, _ = await start(simulation, gate)
        own = simulation.world("client").network.generate_keys()
        gate.names[own.public] = "broker/a"
        with pytest.raises(errors.ConnectionLost):
            await ask(simulation, endpoint, PeerClientKeys("bb" * 32, own))

    simulation = Simulation(seed=1)
    simulation.run(main())
