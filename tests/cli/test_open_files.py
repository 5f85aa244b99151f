"""Servers whose descriptors strangers have taken all: none ends, and what they acknowledge is there."""

import contextlib
import os
import resource
import socket
from pathlib import Path

import pytest

import magnetar
from magnetar.cli.common.processes import Cluster, Process
from magnetar.runtime.network import Endpoint

pytestmark = pytest.mark.processes


def taken(process: Process) -> list[socket.socket]:
    """Lets the process have 50 files more, and connects to its port until no connection is accepted."""
    used = len(os.listdir(f"/proc/{process.pid}/fd"))
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (used + 50, used + 50))
    host, port = Endpoint.parse(process.address)
    found = []
    for _ in range(200):
        stranger = socket.socket()
        stranger.setblocking(False)
        with contextlib.suppress(OSError):
            stranger.connect((host, port))
        found.append(stranger)
    return found


def test_a_cluster_whose_descriptors_strangers_take_goes_on(tmp_path: Path) -> None:
    """As many connections as each of its processes may have files, to a bookie, the broker and the metadata."""
    environment = {f"MAGNETAR_BROKER_{each}": "1" for each in ("ENSEMBLE_SIZE", "WRITE_QUORUM", "ACK_QUORUM")}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        with Cluster(tmp_path, bookies=1, brokers=1) as cluster, magnetar.Client(cluster.url) as client:
            producer = client.create_producer("first")
            producer.send(b"before")
            processes = (*cluster.bookies, *cluster.brokers, cluster.metadata)
            strangers = [each for process in processes for each in taken(process)]
            try:
                other = client.create_producer("second")
                for each in range(200):
                    producer.send(bytes(20_000) + b"%d" % each)
                    other.send(b"%d" % each)
                assert all(process.is_running for process in processes)
                consumer = client.subscribe("second", "all", initial_position=magnetar.InitialPosition.Earliest)
                assert [consumer.receive(20_000).data() for _ in range(200)] == [b"%d" % each for each in range(200)]
            finally:
                for each in strangers:
                    each.close()
            assert all(process.is_running for process in processes)
