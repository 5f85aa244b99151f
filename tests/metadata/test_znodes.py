"""How keys lie in a ZooKeeper and what a commit becomes, alone: against a model that executes the steps."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.metadata import znodes_core as znodes
from magnetar.metadata import zookeeper_connection as connection
from magnetar.metadata.session import MetadataAccess
from magnetar.metadata.store import ANY_VERSION, NODE_ABSENT, CheckNodeVersion, CommitOperation, DeleteNode, PutNode
from magnetar.metadata.tree_core import check_operations, check_version
from magnetar.metadata.znodes_core import (
    CheckZnodeVersion,
    CreateZnode,
    DeleteZnode,
    FolderContent,
    NodeVersionAndOwner,
    SetZnodeValue,
    ZnodeStep,
    ZookeeperCommitPlan,
    plan_zookeeper_commit,
)
from magnetar.metadata.zookeeper import ZookeeperStore
from magnetar.proto.errors import BadVersion, InvalidName, InvalidRequest, MessageTooLarge

ME, OTHER = 7, 8


@pytest.mark.parametrize(
    ("path", "znode"),
    [
        ("/a", "/=a"),
        ("/ledgers/00000000000000000001", "/ledgers/=00000000000000000001"),
        ("/topics/public/de%2Ffault/t", "/topics/public/de%2Ffault/=t"),
        ("/=a/=b", r"/\3d;a/=\3d;b"),
        ("/a\\b/é", r"/a\5c;b/=é"),
        ("/😀/\ue000", r"/\1f600;/=\e000;"),
    ],
)
def test_a_key_is_one_znode_that_zookeeper_allows_and_back(path: str, znode: str) -> None:
    assert znodes.value_znode_path(path) == znode
    assert znodes.node_path_of_znode(znode) == path


SEGMENT = st.text(min_size=1, max_size=4).filter(lambda text: "/" not in text)


@given(st.lists(SEGMENT, min_size=1, max_size=4))
def test_every_key_comes_back_from_its_znode_and_is_found_in_its_folder(segments: list[str]) -> None:
    path = "/" + "/".join(segments)
    try:
        check_operations([CheckNodeVersion(path, ANY_VERSION)])
    except InvalidName:
        return
    assert znodes.node_path_of_znode(znodes.value_znode_path(path)) == path
    above, _, last = znodes.value_znode_path(path).rpartition("/")
    assert FolderContent.from_names([last]).values == [segments[-1]]
    assert above == (znodes.folder_znode_paths(path) or [""])[-1]
    for depth, folder in enumerate(znodes.folder_znode_paths(path), 1):
        assert folder == znodes.folder_znode_path("/" + "/".join(segments[:depth]))
        assert znodes.node_path_of_znode(folder) is None
        assert FolderContent.from_names([folder.rpartition("/")[2]]).below == [segments[depth - 1]]


def _apply(
    steps: list[ZnodeStep], nodes: dict[str, NodeVersionAndOwner | None]
) -> dict[str, NodeVersionAndOwner | None]:
    """What ZooKeeper does with a transaction; None: a step does not hold."""
    after = dict(nodes)
    for step in steps:
        node = after.get(step.path)
        match step:
            case CreateZnode():
                assert node is None, f"{step} on {node}"
                after[step.path] = NodeVersionAndOwner(0, ME if step.ephemeral else 0)
            case SetZnodeValue() | DeleteZnode() | CheckZnodeVersion():
                assert node is not None, f"{step} on nothing"
                assert node.version == step.version
                if isinstance(step, SetZnodeValue):
                    after[step.path] = node._replace(version=node.version + 1)
                elif isinstance(step, DeleteZnode):
                    after[step.path] = None
    return after


def _model(
    operations: list[CommitOperation], nodes: dict[str, NodeVersionAndOwner | None]
) -> tuple[list[int], dict[str, NodeVersionAndOwner | None]]:
    """What metadata/store.py promises."""
    after, versions = dict(nodes), []
    for operation in operations:
        node = after[operation.path]
        check_version(operation.path, operation.expected, NODE_ABSENT if node is None else node.version)
        if isinstance(operation, PutNode):
            owner = ME if operation.ephemeral else 0
            node = after[operation.path] = NodeVersionAndOwner(0 if node is None else node.version + 1, owner)
        elif isinstance(operation, DeleteNode):
            node = after[operation.path] = None
        versions.append(NODE_ABSENT if node is None else node.version)
    return versions, after


PATHS = st.sampled_from(["/a", "/b"])
EXPECTED = st.sampled_from([ANY_VERSION, ANY_VERSION, NODE_ABSENT, 0, 1, 2])
OPERATIONS = st.lists(
    st.one_of(
        st.builds(PutNode, PATHS, st.binary(max_size=1), EXPECTED, st.booleans()),
        st.builds(DeleteNode, PATHS, EXPECTED),
        st.builds(CheckNodeVersion, PATHS, EXPECTED),
    ),
    min_size=1,
    max_size=6,
)
NODE = st.none() | st.builds(NodeVersionAndOwner, st.integers(0, 3), st.sampled_from([0, ME, OTHER]))


@given(OPERATIONS, NODE, NODE)
def test_the_steps_of_a_plan_do_what_the_commit_promises(
    operations: list[CommitOperation], a: NodeVersionAndOwner | None, b: NodeVersionAndOwner | None
) -> None:
    found = {"/a": a, "/b": b}
    try:
        versions, after = _model(operations, found)
    except BadVersion as refused:
        with pytest.raises(type(refused)):
            plan_zookeeper_commit(operations, found, ME)
        return
    planned = plan_zookeeper_commit(operations, found, ME)
    assert planned.versions == versions
    assert _apply(planned.steps, found) == after


@given(OPERATIONS, NODE, NODE, NODE)
def test_a_plan_fails_when_a_node_it_stands_on_was_changed(
    operations: list[CommitOperation],
    a: NodeVersionAndOwner | None,
    b: NodeVersionAndOwner | None,
    later: NodeVersionAndOwner | None,
) -> None:
    """Or does what the commit promises all the same: at the versions of now."""
    found = {"/a": a, "/b": b}
    try:
        planned = plan_zookeeper_commit(operations, found, ME)
    except BadVersion:
        return
    now: dict[str, NodeVersionAndOwner | None] = {"/a": later, "/b": b}
    version = NODE_ABSENT if later is None else later.version
    if (
        not planned.steps
        or "/a" not in {each.path for each in operations}
        or version == (a.version if a else NODE_ABSENT)
    ):
        return
    with pytest.raises(AssertionError):
        _apply(planned.steps, now)


def test_absence_alone_needs_no_transaction_and_is_proved_beside_a_write() -> None:
    nothing = {"/a": None, "/b": None}
    assert plan_zookeeper_commit(
        [DeleteNode("/a"), CheckNodeVersion("/b", NODE_ABSENT)], nothing, ME
    ) == ZookeeperCommitPlan([], [NODE_ABSENT, NODE_ABSENT])
    assert plan_zookeeper_commit([PutNode("/a", b"x"), CheckNodeVersion("/b", NODE_ABSENT)], nothing, ME).steps == [
        CreateZnode("/a", b"x", ephemeral=False), CreateZnode("/b", b"", ephemeral=False), DeleteZnode("/b", 0)
    ]  # fmt: skip


def test_a_node_far_on_does_not_change_its_kind() -> None:
    far = {"/a": NodeVersionAndOwner(znodes.REPLACED_ZNODE_VERSION_MAX, 0)}
    assert plan_zookeeper_commit([PutNode("/a", b"")], far, ME).versions == [znodes.REPLACED_ZNODE_VERSION_MAX + 1]
    with pytest.raises(InvalidRequest, match="delete it first"):
        plan_zookeeper_commit([PutNode("/a", b"", ephemeral=True)], far, ME)
    assert plan_zookeeper_commit(
        [DeleteNode("/a"), PutNode("/a", b"", NODE_ABSENT, ephemeral=True)], far, ME
    ).versions == [
        NODE_ABSENT,
        0,
    ]


# -------------------------------------------------------------------------------------------- size
ROOT = "/magnetar/é"
ACCESS = {
    "open": (MetadataAccess(), None),
    "certificate": (MetadataAccess(certificate="c.pem"), None),
    "credentials": (MetadataAccess(), f"{'ü' * 40}:secret"),
}


@pytest.mark.parametrize("access", ACCESS)
def test_a_commit_is_refused_if_zookeeper_would_close_the_connection_and_not_much_before(access: str) -> None:
    acl = connection._access_list(*ACCESS[access])
    steps: list[ZnodeStep] = [
        CreateZnode(f"/topics/é{number}", b"x" * number, ephemeral=False) for number in range(500)
    ]
    steps += [SetZnodeValue("/a", b"value", 1), DeleteZnode("/b", 2), CheckZnodeVersion("/c", 3)]
    request = connection.MultiRequest(tuple(connection._request(ROOT, step, acl) for step in steps))
    sent = 4 + 4 + len(request.serialize())  # its number and its kind, then its bytes
    line = SimpleNamespace(access_list_bytes=connection.access_list_size_bytes(acl))

    def check(limit: int) -> None:
        address = SimpleNamespace(root=ROOT, jute_maxbuffer=limit)
        ZookeeperStore._check_size(cast("Any", SimpleNamespace(_line=line, _address=address)), steps)

    with pytest.raises(MessageTooLarge):
        check(sent - 1)
    check(sent + sent // 10)
