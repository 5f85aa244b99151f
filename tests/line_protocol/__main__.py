"""A broker process that serves the line protocol as well.

    python -m tests.line_protocol --listen 127.0.0.1:0 --metadata 127.0.0.1:7640

It starts the product's broker and adds one listener. `ready lines://HOST:PORT` names the listener for lines.
"""

import argparse
import sys

from magnetar.broker.common.config import BrokerConfig
from magnetar.broker.server import Broker
from magnetar.cli.run.metrics import announce_process_ready
from magnetar.cli.run.servers import connect_metadata, disconnect, run_server, serve_for_ever
from magnetar.runtime.network import Endpoint, Serving, World
from magnetar.runtime.process import ProcessParts
from tests.line_protocol.protocol import LineProtocol

WAIT_S = 60.0
SESSION_S = 2.0
"""Seconds after SIGKILL until the next process may own the topics."""
CONFIG = BrokerConfig(listen=Endpoint("127.0.0.1", 0), ensemble_size=1, write_quorum=1, ack_quorum=1)


def main() -> int:
    options = argparse.ArgumentParser("python -m tests.line_protocol")
    options.add_argument("--listen", type=Endpoint.parse, required=True, help="HOST:PORT of the line protocol")
    options.add_argument("--metadata", type=Endpoint.parse, required=True, help="HOST:PORT")
    given = options.parse_args()

    async def run(world: World) -> None:
        async with ProcessParts(world.clock) as parts:
            store = await parts.start(
                "metadata", connect_metadata(world, given.metadata, WAIT_S, SESSION_S), disconnect
            )
            broker = await parts.start("broker", Broker.start(world, CONFIG, store), Broker.close)
            lines = world.network.serve_bytes(given.listen, LineProtocol(broker.topic_manager).serve)
            serving: Serving = await parts.start("lines", lines, lambda serving: serving.close())
            announce_process_ready(f"lines://{serving.endpoint}")
            await serve_for_ever()

    return run_server(run, "info", "text")


sys.exit(main())
