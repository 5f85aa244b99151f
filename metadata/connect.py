"""Opens a session with the metadata service, of either kind. Each kind is imported at its first use: kazoo with the
first session of a ZooKeeper, gRPC with the first session of `magnetar metadata`.
"""

from __future__ import annotations

from ..proto.errors import InvalidConfiguration
from ..runtime.network import Endpoint
from ..runtime.world import World
from .address import Address
from .store import MetadataStore


async def connect(world: World, address: Address, timeout_s: float = 10.0) -> MetadataStore:
    """Opens a store. Tries for `timeout_s`, then Unavailable; a lasting error (no kazoo, another protocol) at once."""
    if isinstance(address, Endpoint):
        from .remote import connect_metadata

        return await connect_metadata(world, address, timeout_s)
    try:
        from .zookeeper.store import connect_zookeeper
    except ModuleNotFoundError as error:
        if error.name != "kazoo":
            raise
        raise InvalidConfiguration(
            f"{address} is a ZooKeeper, and kazoo is not installed: pip install 'magnetar[zookeeper]'"
        ) from error
    return await connect_zookeeper(world, address, timeout_s)
