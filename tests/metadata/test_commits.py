"""Commits of one batch: each finds what those before it left, and a refused one leaves nothing."""

from magnetar.metadata.store import ANY_VERSION, NODE_ABSENT, CheckNodeVersion, DeleteNode, NodeChanged, PutNode
from magnetar.metadata.tree_core import CommitGroup, CommitJob, TreeJobResult, list_commit_paths
from magnetar.proto.errors import BadVersion, NodeExists


def test_each_commit_finds_the_nodes_as_those_before_it_left_them() -> None:
    batch = CommitGroup({"/a": 4}, 10)
    assert batch.add(CommitJob([PutNode("/a", b"1", 4)], "")) == TreeJobResult([5], 11, [NodeChanged("/a", 5, 11)])
    assert batch.add(CommitJob([PutNode("/a", b"2", 5)], "")) == TreeJobResult([6], 12, [NodeChanged("/a", 6, 12)])
    assert isinstance(batch.add(CommitJob([PutNode("/a", b"3", 5)], "")), BadVersion)
    assert batch.nodes == {"/a": ("/a", b"2", 6, 12, None)}
    assert batch.revision == 12


def test_a_refused_commit_leaves_nothing_of_its_operations() -> None:
    batch = CommitGroup({"/a": 0}, 10)
    refused = batch.add(CommitJob([PutNode("/b", b"1", NODE_ABSENT), DeleteNode("/a"), CheckNodeVersion("/c", 7)], ""))
    assert isinstance(refused, BadVersion)
    assert (batch.nodes, batch.revision) == ({}, 10)
    done = batch.add(CommitJob([PutNode("/a", b"2", 0), PutNode("/b", b"3", NODE_ABSENT)], ""))
    assert isinstance(done, TreeJobResult)
    assert (done.versions, done.revision) == ([1, 0], 11)


def test_a_node_that_was_deleted_is_absent_for_the_next_commit() -> None:
    batch = CommitGroup({"/a": 3}, 0)
    batch.add(CommitJob([DeleteNode("/a", 3)], ""))
    assert batch.nodes == {"/a": None}
    assert isinstance(batch.add(CommitJob([DeleteNode("/a", 3)], "")), BadVersion)
    assert batch.add(CommitJob([DeleteNode("/a", ANY_VERSION)], "")) == TreeJobResult([NODE_ABSENT], 2)
    batch.add(CommitJob([PutNode("/a", b"again", NODE_ABSENT)], ""))
    assert isinstance(batch.add(CommitJob([PutNode("/a", b"twice", NODE_ABSENT)], "")), NodeExists)


def test_the_paths_of_a_batch_are_named_once() -> None:
    commits = [CommitJob([PutNode("/a", b""), CheckNodeVersion("/b", 1)], ""), CommitJob([DeleteNode("/a")], "")]
    assert list(list_commit_paths(commits)) == ["/a", "/b"]
