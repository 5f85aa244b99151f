"""The tree on etcd without a connection: random commits, lists and watches against the plain model of a tree."""

import random
from collections.abc import Callable, Sequence

import pytest

from magnetar.metadata import etcd_core as core
from magnetar.metadata.session import MAX_REQUEST_BYTES, MAX_TXN_OPS
from magnetar.metadata.store import (
    ANY_VERSION,
    NO_SPACE_FIELD,
    NODE_ABSENT,
    CheckNodeVersion,
    CommitOperation,
    DeleteNode,
    NodeChanged,
    PutNode,
)
from magnetar.metadata.tree_core import CommitJob
from magnetar.proto import etcd_pb2 as etcd
from magnetar.proto.errors import (
    BadVersion,
    ConnectionLost,
    InternalError,
    InvalidConfiguration,
    InvalidRequest,
    MagnetarError,
    MessageTooLarge,
    OutcomeUnknown,
    SessionExpired,
    Unavailable,
)
from magnetar.runtime.network import find_rpc
from tests.metadata.etcd_model import EtcdModel
from tests.metadata.stores import EtcdBackend
from tests.metadata.test_model import Model
from tests.support.etcd import why_no_etcd

PATHS = ["/a", "/a/b", "/a/b/c", "/a-b", "/a0", "/d/e", "/é"]
LIMITS = core.EtcdLimits(MAX_TXN_OPS, MAX_REQUEST_BYTES)
KEYS = core.TreeKeys("/m")
LEASES = {"s1": 7, "s2": 8}


class Tree:
    """Two sessions of a tree on the model of etcd."""

    def __init__(self) -> None:
        self.etcd = EtcdModel()
        self.blind = self.read = 0
        for session in LEASES:
            self.open(session)

    def open(self, session: str) -> None:
        lease = LEASES[session]
        self.etcd.grant(lease)
        request = etcd.TxnRequest()
        put = request.success.add().request_put
        put.key, put.lease = KEYS.session_key(lease), lease
        self.etcd.txn(request)

    def commit(
        self, operations: Sequence[CommitOperation], session: str = "s1", meanwhile: Callable[[], object] = lambda: None
    ) -> list[int]:
        """As metadata/etcd.py does it. `meanwhile`: called between the read and the transaction."""
        planner = core.CommitPlanner(KEYS, LEASES[session], LIMITS)
        blind = planner.plan_blind_commit(operations)
        if blind is not None:
            LIMITS.check(blind.request)
            versions = planner.read_blind_answer(operations, blind, self.etcd.txn(blind.request))
            if versions is not None:
                self.blind += 1
                return versions
        while True:
            self.read += 1
            plan = planner.plan_read_commit(operations, self._found(planner, operations))
            meanwhile()
            if planner.read_planned_answer(self.etcd.txn(plan.request)):
                return [version for version in plan.versions if version is not None]

    def _found(
        self, planner: core.CommitPlanner, operations: Sequence[CommitOperation]
    ) -> dict[str, core.StoredVersion | None]:
        found = {}
        for paths, request in planner.read_requests(operations):
            for path, each in zip(paths, self.etcd.txn(request).responses, strict=True):
                stored = core.parse_stored_version(each.response_range)
                node = core.parse_node(self.etcd.range(core.node_range(KEYS.main_key(path))))
                assert (stored is None) == (node is None)
                found[path] = None if node is None else node[0]
                assert stored is None or stored.is_second or stored == found[path]
        return found

    def nodes(self) -> dict[str, tuple[bytes, int, int]]:
        """All nodes by path: value, version, lease."""
        found: dict[str, tuple[bytes, int, int]] = {}
        for key, pair in self.etcd.pairs.items():
            if not key.startswith(b"/m/"):
                continue
            path = KEYS.path_of_key(key)
            assert path not in found, f"{path} is stored at one key"
            node = core.parse_node(etcd.RangeResponse(kvs=[pair]))
            assert node is not None
            found[path] = (node[1], node[0].version, pair.lease)
        return found

    def children(self, prefix: str, page_keys: int) -> list[str]:
        listing = core.ChildrenListing(KEYS, prefix, page_keys)
        while listing.request is not None:
            listing.receive(self.etcd.range(listing.request))
        return sorted(listing.names)

    def list_nodes(self, folder: str, page_keys: int) -> list[str]:
        names, request = list[str](), core.make_page_range(KEYS, folder, "", page_keys)
        while True:
            page = core.parse_page(KEYS, folder, self.etcd.range(request))
            names += page.nodes
            if not page.following:
                return names
            request = core.make_page_range(KEYS, folder, names[-1] if page.nodes else "", page_keys)
            if not page.nodes:
                request.key = page.following


def _random_commit(rng: random.Random) -> list[CommitOperation]:
    def one() -> CommitOperation:
        path, expected = rng.choice(PATHS), rng.choice([ANY_VERSION, ANY_VERSION, NODE_ABSENT, NODE_ABSENT, 0, 0, 1, 2])
        match rng.randrange(4):
            case 0:
                return DeleteNode(path, expected)
            case 1:
                return CheckNodeVersion(path, expected)
        return PutNode(path, rng.randbytes(3), expected, rng.random() < 0.3)

    return [one() for _ in range(rng.choice([1, 1, 1, 2, 3, 6]))]


def _children(nodes: dict[str, object], prefix: str) -> list[str]:
    above = "/" if prefix == "/" else prefix + "/"
    return sorted({path[len(above) :].partition("/")[0] for path in nodes if path.startswith(above)})


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_committed_the_tree_on_etcd_is_the_model(seed: int) -> None:
    rng = random.Random(seed)
    tree, model = Tree(), Model()
    watch, started = core.TreeWatch(KEYS, "/", 1), 0
    heard: dict[str, int] = {}
    for _ in range(300):
        if rng.random() < 0.03:
            session = rng.choice(list(LEASES))
            tree.etcd.revoke(LEASES[session])
            with pytest.raises(SessionExpired):
                tree.commit([PutNode("/never", b"")], session)
            model.end(session)
            tree.open(session)
        session, operations = rng.choice(list(LEASES)), _random_commit(rng)
        wanted = model.commit(CommitJob(operations, session))
        try:
            assert tree.commit(operations, session) == wanted
        except BadVersion:
            assert wanted is None
        assert tree.nodes() == {
            path: (value, version, LEASES[owner] if owner else 0)
            for path, (value, version, owner) in model.nodes.items()
        }
        prefix = rng.choice(["/", "/a", "/a/b", "/d", "/nothing"])
        assert tree.children(prefix, rng.choice([1, 2, 3, 100])) == _children(dict(model.nodes), prefix)
        above = "/" if prefix == "/" else prefix + "/"
        direct = sorted(path[len(above) :] for path in model.nodes if path.startswith(above))
        assert tree.list_nodes(prefix, rng.choice([1, 2, 3, 100])) == [each for each in direct if "/" not in each]
        if rng.random() < 0.3:
            for answer in tree.etcd.watch(watch.make_request().create_request, started):
                for change in watch.receive(answer):
                    assert change.version in (NODE_ABSENT, 0, heard.get(change.path, NODE_ABSENT) + 1), (
                        "each version in turn"
                    )
                    heard[change.path] = change.version
            started = tree.etcd.revision
            assert {path: version for path, version in heard.items() if version != NODE_ABSENT} == {
                path: version for path, (_, version, _) in model.nodes.items()
            }
    assert tree.blind > 20
    assert tree.read > 20, "both ways were tried"


@pytest.mark.parametrize("seed", range(5))
def test_a_commit_that_another_writer_overtakes_is_planned_again(seed: int) -> None:
    rng = random.Random(seed)
    tree, model = Tree(), Model()
    for _ in range(200):
        others = [_random_commit(rng)]

        def overtake(others: list[list[CommitOperation]] = others) -> None:
            while others:
                operations = others.pop()
                try:
                    assert tree.commit(operations, "s2") == model.commit(CommitJob(operations, "s2"))
                except BadVersion:
                    assert model.commit(CommitJob(operations, "s2")) is None

        path = rng.choice(PATHS)
        twice = [PutNode(path, b"x"), PutNode(path, b"y"), DeleteNode(path), PutNode(path, b"z", NODE_ABSENT)]
        twice = twice[: rng.randrange(2, 5)]
        versions = tree.commit(twice, "s1", overtake)
        assert versions == model.commit(CommitJob(twice, "s1"))


@pytest.mark.parametrize("seed", range(5))
def test_commits_that_are_sent_together_do_what_each_does_alone(seed: int) -> None:
    rng = random.Random(seed)
    together, alone = Tree(), Tree()
    planner = core.CommitPlanner(KEYS, LEASES["s1"], LIMITS)
    merged = 0
    for _ in range(200):
        queue, operations_of = core.CommitQueue[core.QueuedCommit](LIMITS), {}
        for _ in range(rng.randrange(1, 5)):
            operations = _random_commit(rng)
            if rng.random() < 0.7:
                operations = [PutNode(rng.choice(PATHS), rng.randbytes(3))]
            plan = planner.plan_blind_commit(operations)
            if plan is not None:
                commit = core.QueuedCommit(plan.request, frozenset(operation.path for operation in operations))
                queue.waiting.append(commit)
                operations_of[id(commit)] = operations, plan
        while queue.waiting:
            group = queue.take()
            named = [path for commit in group for path in commit.paths]
            assert len(named) == len(set(named)), "no node twice"
            requests = [commit.request for commit in group]
            answer = together.etcd.txn(core.merge_requests(requests))
            results: list[object] = []
            for commit in group:
                try:
                    results.append(alone.commit(operations_of[id(commit)][0]))
                except BadVersion:
                    results.append(None)
            if answer.succeeded:
                merged += len(group) > 1
                for commit, own, result in zip(group, core.split_answer(requests, answer), results, strict=True):
                    operations, plan = operations_of[id(commit)]
                    assert planner.read_blind_answer(operations, plan, own) == result
            else:
                assert None in results
                for commit, result in zip(group, results, strict=True):
                    try:
                        assert together.commit(operations_of[id(commit)][0]) == result
                    except BadVersion:
                        assert result is None
            assert together.nodes() == alone.nodes()
    assert merged > 10


def _watched(tree: Tree, prefix: str, after: int) -> list[NodeChanged]:
    watch = core.TreeWatch(KEYS, prefix, after)
    answers = tree.etcd.watch(watch.make_request().create_request)
    return [change for answer in answers for change in watch.receive(answer)]


def test_a_watch_hears_each_change_of_a_commit_that_writes_a_node_twice() -> None:
    tree = Tree()
    tree.commit([PutNode("/w/a", b"")])
    begun = tree.etcd.revision
    tree.commit([PutNode("/w/a", b"1"), PutNode("/ww", b""), PutNode("/w/a", b"2")])
    tree.commit([DeleteNode("/w/a"), PutNode("/w/a", b"", NODE_ABSENT)])
    tree.commit([PutNode("/w/a", b"3")])
    tree.commit([DeleteNode("/w/a"), PutNode("/w/a", b"4", NODE_ABSENT)])
    tree.commit([DeleteNode("/w/a")])
    heard = [(change.version, change.revision - begun) for change in _watched(tree, "/w", begun)]
    assert heard == [(1, 1), (2, 1), (-1, 2), (0, 2), (1, 3), (-1, 4), (0, 4), (-1, 5)]


def test_a_watch_from_before_a_compaction_is_told_and_one_from_it_misses_nothing() -> None:
    tree = Tree()
    tree.commit([PutNode("/w", b"")])
    before = tree.etcd.revision
    tree.commit([DeleteNode("/w")])
    tree.etcd.compact(tree.etcd.revision)
    watch = core.TreeWatch(KEYS, "/w", before)
    for answer in tree.etcd.watch(watch.make_request().create_request):
        watch.receive(answer)
    assert watch.is_compacted, "the deletion at the revision of the compaction is not kept"
    watch.skip_to(tree.etcd.revision)
    seen = tree.etcd.revision
    tree.commit([PutNode("/w", b"")])
    assert _watched(tree, "/w", seen) == [NodeChanged("/w", 0, seen + 1)]


def test_a_commit_beyond_the_limits_of_etcd_is_refused_before_it_is_sent() -> None:
    tree = Tree()
    allowed = LIMITS.part_operations
    for kind in (lambda path: PutNode(path, b"", NODE_ABSENT), DeleteNode, lambda path: PutNode(path, b"")):
        assert len(tree.commit([kind(f"/n/{at}") for at in range(allowed)])) == allowed
    with pytest.raises(InvalidRequest, match="--max-txn-ops"):
        tree.commit([PutNode(f"/n/{at}", b"") for at in range(allowed + 1)])
    with pytest.raises(MessageTooLarge, match="--max-request-bytes"):
        tree.commit([PutNode("/large/1", bytes(1 << 20)), PutNode("/large/2", bytes(1 << 20))])
    assert tree.commit([PutNode("/n/0", b"")] * 1024) == list(range(1, 1025)), "of one node any number"
    assert tree.nodes()["/n/0"][1] == 1024


def test_what_etcd_says_becomes_an_error_of_its_own_and_the_rest_stays_unknown() -> None:
    for text, kind in (
        ("etcdserver: mvcc: database space exceeded", OutcomeUnknown),
        ("etcdserver: request is too large", MessageTooLarge),
        ("etcdserver: requested lease not found", SessionExpired),
        ("etcdserver: mvcc: required revision has been compacted", Unavailable),
    ):
        assert type(core.translate_refusal(InternalError(f"127.0.0.1:2379: {text}"))) is kind
    for unknown in ("etcdserver: request timed out", "etcdserver: leader changed", "etcdserver: no leader"):
        error: MagnetarError = ConnectionLost(unknown)
        assert core.translate_refusal(error) is error
        assert not error.definite


def test_what_a_full_etcd_refuses_is_not_done_if_there_was_no_revision_since_and_unknown_otherwise() -> None:
    full = core.translate_refusal(InternalError("127.0.0.1:2379: etcdserver: mvcc: database space exceeded"))
    assert core.is_full(full)
    assert not full.definite
    refused = core.decide_full(full, before=7, now=7)
    assert isinstance(refused, Unavailable)
    assert "etcdctl alarm disarm" in str(refused)
    assert NO_SPACE_FIELD in refused.fields
    assert core.decide_full(full, before=7, now=8) is full
    assert not core.is_full(ConnectionLost("etcdserver: no leader"))


@pytest.mark.skipif(why_no_etcd() is not None, reason=str(why_no_etcd()))
async def test_the_model_answers_as_a_real_etcd_does() -> None:
    rng = random.Random(3)
    backend = EtcdBackend()
    try:
        store = await backend.store()
        real, model = find_rpc("etcdserverpb.KV", "Txn"), EtcdModel()
        root = backend.address.root.encode()
        keys = [root + key for key in (b"/a", b"/a\0", b"/b", b"/c")]
        for number in range(300):
            request = _random_txn(rng, keys)
            try:
                expected: etcd.TxnResponse | None = model.txn(request)
            except ValueError:
                expected = None
            try:
                answer = await store._call(real, request)
            except MagnetarError:
                answer = None
            assert _without_revisions(answer) == _without_revisions(expected), f"{number}: {request}"
    finally:
        await backend.close()


def _random_txn(rng: random.Random, keys: list[bytes]) -> etcd.TxnRequest:
    request = etcd.TxnRequest()
    for _ in range(rng.randrange(3)):
        key = rng.choice(keys)
        compare = request.compare.add(target=etcd.Compare.VERSION, key=key, version=rng.randrange(3))
        compare.result = rng.choice([etcd.Compare.EQUAL, etcd.Compare.GREATER])
        if rng.random() < 0.3:
            compare.range_end = key + b"\1"
    for branch in (request.success, request.failure):
        for _ in range(rng.randrange(3)):
            key, kind = rng.choice(keys), rng.randrange(3)
            end = key + b"\1" if rng.random() < 0.3 else b""
            operation = branch.add()
            if kind == 0:
                operation.request_range.CopyFrom(etcd.RangeRequest(key=key, range_end=end))
            elif kind == 1:
                operation.request_put.CopyFrom(etcd.PutRequest(key=key, value=rng.randbytes(2)))
            else:
                operation.request_delete_range.CopyFrom(etcd.DeleteRangeRequest(key=key, range_end=end))
    return request


def _without_revisions(answer: etcd.TxnResponse | None) -> object:
    """The revisions of a real etcd also count other trees."""
    if answer is None:
        return None
    parts: list[object] = [answer.succeeded]
    for each in answer.responses:
        found = each.response_range
        pairs = [(pair.key, pair.value, pair.version) for pair in found.kvs]
        parts.append((each.WhichOneof("response"), found.count, pairs, each.response_delete_range.deleted))
    return parts


def test_the_cluster_of_the_first_answer_is_that_of_the_session_and_another_is_named_with_both_servers() -> None:
    identity = core.EtcdClusterIdentity()
    identity.check_answer(7, "etcd1:2379")
    identity.check_answer(7, "etcd2:2379")
    both = r"etcd3:2379 is a server of another etcd cluster \(8\) than etcd1:2379"
    with pytest.raises(InvalidConfiguration, match=both):
        identity.check_answer(8, "etcd3:2379")
    identity.check_answer(7, "etcd3:2379")
