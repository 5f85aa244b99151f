"""Defects of the metadata on etcd (`metadata/etcd_core.py`), and of what is read there."""

from __future__ import annotations

from magnetar.ledger import bookies
from magnetar.metadata import etcd_core
from magnetar.metadata.etcd_core import CommitPlanner, TreeWatch
from magnetar.metadata.store import NodeChanged
from magnetar.proto import etcd_pb2 as etcd
from magnetar.proto.errors import MagnetarError, Unavailable
from tests.mutants.ledgers import Stack, put


def unanswered_is_refused(stack: Stack) -> None:
    """M26c: a commit that etcd does not answer counts as not done, and is sent again."""
    honest = etcd_core.translate_refusal

    def translate(error: MagnetarError) -> MagnetarError:
        found = honest(error)
        return found if found.definite else Unavailable(found.message)

    put(stack, etcd_core, "translate_refusal", translate)


def changes_are_read_at_once(stack: Stack) -> None:
    """M30p: all processes of a large cluster read a changed bookie at the moment in which they hear of it."""
    put(stack, bookies, "choose_read_delay", lambda processes, rng: 0.0)


def commit_outlives_its_session(stack: Stack) -> None:
    """M26d: a commit is done although the lease of its session has ended."""
    honest = CommitPlanner._begin

    def begin(self: CommitPlanner) -> etcd.TxnRequest:
        request = honest(self)
        request.compare[0].result, request.compare[0].version = etcd.Compare.GREATER, -1
        return request

    put(stack, CommitPlanner, "_begin", begin)


def compaction_is_passed_over(stack: Stack) -> None:
    """M26e: a watch whose history was compacted goes on after the compaction, and its reader lists nothing again."""
    honest = TreeWatch.receive

    def receive(self: TreeWatch, answer: etcd.WatchResponse) -> list[NodeChanged]:
        changes = honest(self, answer)
        if self.is_compacted:
            self.is_compacted, self.seen = False, answer.compact_revision
        return changes

    put(stack, TreeWatch, "receive", receive)


def watch_begins_after_what_was_seen(stack: Stack) -> None:
    """M26f: a watch begins at the revision after the last one seen: etcd keeps no deletion of a compacted revision."""
    honest = TreeWatch.make_request

    def make_request(self: TreeWatch) -> etcd.WatchRequest:
        request = honest(self)
        request.create_request.start_revision = self.seen + 1
        return request

    put(stack, TreeWatch, "make_request", make_request)


def reads_are_serializable(stack: Stack) -> None:
    """M26m: a server of etcd answers reads from its own state, also one that is cut off from the others."""
    honest = etcd_core.node_range

    def read(key: bytes) -> etcd.RangeRequest:
        request = honest(key)
        request.serializable = True
        return request

    put(stack, etcd_core, "node_range", read)


def full_is_refused(stack: Stack) -> None:
    """M26g: whatever a full etcd answers with NOSPACE counts as not done, also the commit that filled it."""
    put(stack, etcd_core, "decide_full", lambda error, before, now: Unavailable(error.message))
