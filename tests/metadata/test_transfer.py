"""A tree that moves from one store to another, and what an export and an import refuse."""

import base64
import json
import re
from pathlib import Path

import msgspec
import pytest

import magnetar
from magnetar.cli.common.processes import Processes, find_free_port
from magnetar.metadata import paths
from magnetar.metadata.records import ClusterRecord, CounterRecord, encode_record
from magnetar.metadata.store import DeleteNode, MetadataStore, PutNode, allocate_ids, get_record
from magnetar.metadata.transfer import ExportedNode, ExportHead, export_tree, import_tree, parse_export
from magnetar.proto.errors import AlreadyExists, Busy, InvalidRequest, NewerFormat
from tests.metadata.stores import KINDS, Backend, SqliteBackend, _backend
from tests.support.etcd import EtcdCluster, why_no_etcd
from tests.support.processes import Process, run_cli

CLUSTER = encode_record(ClusterRecord(instance="ab" * 16, format=1), paths.CLUSTER)


async def _fill(store: MetadataStore) -> dict[str, bytes]:
    await allocate_ids(store, 7)
    nodes = {paths.CLUSTER: CLUSTER, "/topics/a/b/c": b"\x00\xff", "/topics/a/b": b"above", "/large": bytes(1 << 20)}
    nodes |= {f"/ledgers/{number:020d}": b"%d" % number for number in range(300)}
    for path, value in nodes.items():
        await store.put(path, value)
    await store.put("/owners/t/n/0", b"mine", ephemeral=True)
    counter = await store.get(paths.LEDGER_IDS)
    assert counter is not None
    return nodes | {paths.LEDGER_IDS: counter.value}


def _targets() -> list[str]:
    return [kind for kind in KINDS if kind != "simulated"]


@pytest.mark.parametrize("kind", _targets())
async def test_a_tree_moves_to_each_store_and_back_and_is_the_same(kind: str, tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    first, second = SqliteBackend(tmp_path / "first"), _backend(kind, tmp_path / "second")
    try:
        store = await first.store()
        nodes = await _fill(store)
        lines = await export_tree(store)
        assert json.loads(lines[0]) == {"format": 1, "cluster": "ab" * 16, "nodes": len(nodes)}
        target = await second.store()
        await import_tree(target, parse_export(lines, "export")[1])
        assert await _read(target, nodes) == nodes
        assert await target.children("/owners") == [], "an ephemeral stays where its session is"
        assert await export_tree(target) == lines
        counter = await get_record(target, paths.LEDGER_IDS, CounterRecord)
        assert counter is not None
        assert await allocate_ids(target, 1) == range(counter[0].next, counter[0].next + 1), "no id comes twice"
        with pytest.raises(AlreadyExists, match="not empty"):
            await import_tree(target, parse_export(lines, "export")[1])
    finally:
        await first.close()
        await second.close()


async def _read(store: MetadataStore, nodes: dict[str, bytes]) -> dict[str, bytes]:
    found = {}
    for path in nodes:
        node = await store.get(path)
        assert node is not None, path
        found[path] = node.value
    return found


async def test_an_export_of_a_cluster_that_runs_is_refused(tmp_path: Path) -> None:
    backend: Backend = SqliteBackend(tmp_path)
    store = await backend.store()
    try:
        with pytest.raises(InvalidRequest, match="no cluster"):
            await export_tree(store)
        await store.put(paths.CLUSTER, CLUSTER)
        for path in (f"{paths.BROKERS}/b1", f"{paths.AVAILABLE_BOOKIES}/u1"):
            await store.put(path, b"", ephemeral=True)
            with pytest.raises(Busy, match="is registered"):
                await export_tree(store)
            await store.commit([DeleteNode(path)])
    finally:
        await backend.close()


async def test_a_file_that_is_cut_or_of_another_kind_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    backend = SqliteBackend(tmp_path)
    store = await backend.store()
    try:
        await store.put(paths.CLUSTER, CLUSTER)
        await store.put("/a", b"")
        lines = await export_tree(store)
    finally:
        await backend.close()
    wrong = [
        [], [b"{}"], [b"garbage"], lines[:-1], [*lines, lines[-1]], [lines[0], b'{"path":"/a"}', lines[-1]],
        [lines[0], b'{"path":"a","value":""}', lines[-1]], [lines[0], b'{"path":"/a","value":"!"}', lines[-1]],
        [lines[0], lines[-1], lines[1]], [lines[0], lines[-1], lines[-1]],
    ]  # fmt: skip
    for each in wrong:
        with pytest.raises(InvalidRequest):
            parse_export(each, "export")
    with pytest.raises(InvalidRequest, match="export, line 2"):
        parse_export([lines[0], b'{"path":"a","value":""}', lines[-1]], "export")
    with pytest.raises(NewerFormat):
        parse_export([lines[0].replace(b'"format":1', b'"format":2'), *lines[1:]], "export")
    assert parse_export(lines, "export")[1][-1] == PutNode(paths.CLUSTER, CLUSTER, -1)


def test_the_ephemeral_paths_are_those_that_the_page_of_paths_names() -> None:
    told = re.findall(r"^    (/.+?)\s{2,}\w+Record \(ephemeral\)", paths.__doc__ or "", re.M)
    assert {re.sub(r"/<.*", "", path) for path in told} == set(paths.EPHEMERAL_FOLDERS)


@pytest.mark.processes
def test_the_commands_move_the_tree_of_a_service_and_leave_no_half_file(tmp_path: Path, started: Processes) -> None:
    service = started.start("metadata", "metadata", "--listen", "127.0.0.1:0", "--data", str(tmp_path / "data"))
    where = ("--metadata", service.wait_ready().removeprefix("metadata://"))
    nodes = [ExportedNode("/a", "eA=="), ExportedNode(paths.CLUSTER, base64.b64encode(CLUSTER).decode())]
    lines = [msgspec.json.encode(each) + b"\n" for each in (ExportHead(1, "ab" * 16, 2), *nodes)]
    (tmp_path / "in").write_bytes(b"".join(lines))
    made = run_cli("metadata", "import", str(tmp_path / "in"), *where, "-o", "json")
    assert json.loads(made.out) == [{"cluster": "ab" * 16, "nodes": 2}]
    again = run_cli("metadata", "import", str(tmp_path / "in"), *where)
    assert again.code == 1
    assert "not empty" in again.err
    assert run_cli("metadata", "export", str(tmp_path / "out"), *where).code == 0
    assert (tmp_path / "out").read_bytes() == (tmp_path / "in").read_bytes()
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o600, "the keys of ledgers are in it"
    assert run_cli("metadata", "export", str(tmp_path / "out"), *where).code == 2, "it exists"
    missing = run_cli("metadata", "import", str(tmp_path / "none"))
    assert missing.code == 2
    nobody = run_cli("metadata", "export", str(tmp_path / "tree"), "--metadata", "etcd://127.0.0.1:1/m")
    assert nobody.code == 1
    assert not (tmp_path / "tree").exists(), "no empty file is left"


@pytest.mark.processes
@pytest.mark.skipif(why_no_etcd() is not None, reason=str(why_no_etcd()))
def test_a_cluster_moves_to_etcd_and_back_and_every_acknowledged_message_is_there(
    tmp_path: Path, started: Processes
) -> None:
    """By the steps of docs/operations.md."""
    settings = tmp_path / "settings.toml"
    settings.write_text("[broker]\nensemble_size = 1\nwrite_quorum = 1\nack_quorum = 1\n")
    sent: list[bytes] = []

    def serve(where: str) -> None:
        """Starts the cluster, publishes, reads all that was ever published, and stops it."""
        options = ("--metadata", where, "--listen", "127.0.0.1:0")
        data = ("--data", str(tmp_path / "bookie"))
        # as in an update: a bookie is known by its place
        bookie = started.start("bookie", "bookie", "--metadata", where, "--listen", f"127.0.0.1:{port}", *data)
        bookie.wait_ready()
        broker = started.start("broker", "broker", *options, "--config", str(settings))
        with magnetar.Client(broker.wait_ready()) as client:
            producer = client.create_producer("t")
            for number in range(len(sent), len(sent) + 20):
                producer.send(b"%d" % number)
                sent.append(b"%d" % number)
            consumer = client.subscribe("t", f"s{len(sent)}", initial_position=magnetar.InitialPosition.Earliest)
            assert [consumer.receive(30_000).data() for _ in sent] == sent
        for process in (broker, bookie):
            assert process.stop() == 0

    def move(source: str, target: str) -> None:
        file = str(tmp_path / f"tree{len(sent)}")
        for command in (("export", file, "--metadata", source), ("import", file, "--metadata", target)):
            done = run_cli("metadata", *command)
            assert done.code == 0, done.err
        nodes = [json.loads(line)["path"] for line in Path(file).read_bytes().splitlines()[1:]]
        (id_,) = [path.rpartition("/")[2] for path in nodes if path.startswith(paths.COOKIES)]
        done = run_cli("bookies", "accept-metadata", id_, "--metadata", target, "--yes")
        assert done.code == 0, done.err

    port = find_free_port("127.0.0.1")
    first, second = (_start_service(started, tmp_path, name) for name in ("first", "second"))
    with EtcdCluster(tmp_path / "etcd") as etcd:
        serve(first)
        move(first, etcd.url)
        serve(etcd.url)
        move(etcd.url, second)
        serve(second)
    assert len(sent) == 60


def _start_service(started: Processes, directory: Path, name: str) -> str:
    service: Process = started.start(name, "metadata", "--listen", "127.0.0.1:0", "--data", str(directory / name))
    return service.wait_ready().removeprefix("metadata://")
