"""The whole tree as lines of JSON, to move it from one metadata store to another.

    {"format":1,"cluster":"<instance id>","nodes":N}         the first line
    {"path":"/topics/…","value":"<base64>"}                  a node; N of them, /cluster last

Versions of nodes begin at 0 again: records that must not be confused have tokens of their own, which are in the values.
Ephemerals (paths.py `EPHEMERAL_FOLDERS`) are left out: they end with their sessions. /cluster is written last, so a
target in which an import ended half-way is no cluster; it is not empty either, so a second import refuses it. Guarded
by tests/metadata/test_transfer.py. """

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Iterable, Iterator

import msgspec

from ..proto.errors import AlreadyExists, Busy, InvalidRequest
from ..proto.versions import METADATA_EXPORT, check_format
from . import paths
from .records import ClusterRecord
from .store import NODE_ABSENT, MetadataStore, NodeUpdate, PutNode, VersionedValue, get_record, update_nodes
from .tree_core import check_operations, is_at_or_below

PART_BYTES_MAX = 256 << 10
"""Bytes of values that one commit of an import has, unless a single one is larger: well below any store's limit."""


class ExportHead(msgspec.Struct, frozen=True):
    """The first line of an export: the version of its format, the id of the cluster, and how many nodes follow."""

    format: int
    cluster: str
    nodes: int


class ExportedNode(msgspec.Struct, frozen=True):
    """A line of an export: a node of the tree. `value` is in base64."""

    path: str
    value: str


async def export_tree(store: MetadataStore) -> list[bytes]:
    """Returns the lines of an export of the tree: an ExportHead, then one ExportedNode for each node that is not
    ephemeral. Raises Busy if a broker or bookie is registered, or if the tree changed meanwhile; InvalidRequest if the
    tree has no cluster; and the errors of `get_record`."""
    for folder, what in ((paths.BROKERS, "broker"), (paths.AVAILABLE_BOOKIES, "bookie")):
        if names := await store.children(folder):
            raise Busy(f"{what} {names[0]} is registered: stop brokers and bookies, and wait for their sessions' ends")
    cluster = await get_record(store, paths.CLUSTER, ClusterRecord)
    if cluster is None:
        raise InvalidRequest("the metadata has no cluster: nothing to export")
    begun = await store.revision()
    nodes = [node async for node in _walk(store, "/")]
    nodes.sort(key=lambda node: node.path == paths.CLUSTER)
    if await store.revision() != begun:
        raise Busy("the metadata changed while it was exported: stop what still writes to it, and export again")
    head = ExportHead(METADATA_EXPORT.version, cluster[0].instance, len(nodes))
    return [msgspec.json.encode(each) for each in (head, *nodes)]


async def _walk(store: MetadataStore, prefix: str) -> AsyncIterator[ExportedNode]:
    """Yields the nodes below `prefix` that are not ephemeral."""
    for name in await store.children(prefix):
        path = f"{'' if prefix == '/' else prefix}/{name}"
        if any(is_at_or_below(each, path) for each in paths.EPHEMERAL_FOLDERS):
            continue
        node = await store.get(path)
        if node is not None:
            yield ExportedNode(path, base64.b64encode(node.value).decode())
        async for below in _walk(store, path):
            yield below


def parse_export(lines: Iterable[bytes], where: str) -> tuple[ExportHead, list[PutNode]]:
    """Parses an export. Returns (its head, the operations with which `import_tree` writes its nodes). Raises
    InvalidRequest if the export is malformed or not complete; the error names the line. Raises NewerFormat if a later
    Magnetar wrote it. `where`: the name of the file, for errors."""
    numbered = enumerate(lines, 1)
    try:
        _, first = next(numbered)
        head = msgspec.json.decode(first, type=ExportHead)
    except (StopIteration, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"{where} is no export of the metadata: {error or 'it is empty'}") from error
    check_format(METADATA_EXPORT, head.format, where)
    puts = [_parse_node(line, f"{where}, line {number}") for number, line in numbered]
    if len(puts) != head.nodes or not puts or puts[-1].path != paths.CLUSTER:
        raise InvalidRequest(f"{where} has {len(puts)} nodes of {head.nodes}: it was cut, or put together")
    if len({put.path for put in puts}) < len(puts):
        raise InvalidRequest(f"{where} has a node twice")
    return head, puts


def _parse_node(line: bytes, where: str) -> PutNode:
    try:
        node = msgspec.json.decode(line, type=ExportedNode)
        put = PutNode(node.path, base64.b64decode(node.value, validate=True), NODE_ABSENT)
        check_operations([put])
    except (msgspec.MsgspecError, ValueError, InvalidRequest) as error:
        raise InvalidRequest(f"{where} is no node: {error}") from error
    return put


async def import_tree(store: MetadataStore, puts: list[PutNode]) -> None:
    """Writes `puts`, the nodes of an export, into an empty store. Raises AlreadyExists if the store is not empty, and
    then has written nothing; AlreadyExists if another process gave one of these nodes another value meanwhile, and the
    errors of `MetadataStore.children` and `update_nodes`: then the target must be emptied."""
    if names := await store.children("/"):
        raise AlreadyExists(f"the target is not empty: it has /{names[0]}; give another path, or an empty store")
    for part in _parts(puts, store.part_operations):
        await update_nodes(store, [_creation(put) for put in part])


def _creation(put: PutNode) -> NodeUpdate:
    def create(current: VersionedValue | None) -> bytes:
        if current is not None and current.value != put.value:
            raise AlreadyExists(f"{put.path} was written by another process during the import; empty the target")
        return put.value

    return NodeUpdate(put.path, create, absent=True)


def _parts(puts: list[PutNode], operations: int) -> Iterator[list[PutNode]]:
    part: list[PutNode] = []
    size = 0
    for put in puts:
        alone = put.path == paths.CLUSTER
        if part and (alone or len(part) == operations or size + len(put.value) > PART_BYTES_MAX):
            yield part
            part, size = [], 0
        part.append(put)
        size += len(put.value)
    if part:
        yield part
