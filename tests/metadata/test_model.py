"""The tree against a dictionary: any sequence of commits, ends of sessions and full reads (Hypothesis)."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from magnetar.metadata.store import (
    ANY_VERSION,
    NODE_ABSENT,
    CheckNodeVersion,
    CommitOperation,
    DeleteNode,
    NodeChanged,
    PutNode,
    WatchReset,
)
from magnetar.metadata.tree import EndSession, MetadataTree, OpenSession, StoredNode
from magnetar.metadata.tree_core import ChangeHistory, CommitJob, TreeJobResult
from magnetar.proto.errors import BadVersion

PATHS = ["/a", "/a/b", "/a/b/c", "/a-b", "/a0", "/d/e", "/é"]
SESSIONS = ["s1", "s2"]
_paths = st.sampled_from(PATHS)
_versions = st.integers(ANY_VERSION, 3)
_operations = st.one_of(
    st.builds(PutNode, _paths, st.binary(max_size=3), _versions, st.booleans()),
    st.builds(DeleteNode, _paths, _versions),
    st.builds(CheckNodeVersion, _paths, _versions),
)
_commits = st.builds(CommitJob, st.lists(_operations, min_size=1, max_size=4), st.sampled_from(SESSIONS))


class Model:
    """What metadata/store.py says, in the plainest words."""

    def __init__(self) -> None:
        self.nodes: dict[str, tuple[bytes, int, str | None]] = {}
        self.revision = 0

    def commit(self, commit: CommitJob) -> list[int] | None:
        nodes = dict(self.nodes)
        versions = []
        for operation in commit.operations:
            found = nodes[operation.path][1] if operation.path in nodes else NODE_ABSENT
            if operation.expected not in (ANY_VERSION, found):
                return None
            versions.append(self._do(nodes, operation, found, commit.session))
        self.nodes = nodes
        self.revision += 1
        return versions

    def _do(
        self, nodes: dict[str, tuple[bytes, int, str | None]], what: CommitOperation, found: int, session: str
    ) -> int:
        if isinstance(what, PutNode):
            nodes[what.path] = (what.value, found + 1, session if what.ephemeral else None)
            return found + 1
        if isinstance(what, DeleteNode):
            nodes.pop(what.path, None)
            return NODE_ABSENT
        return found

    def end(self, session: str) -> None:
        gone = [path for path, (_, _, owner) in self.nodes.items() if owner == session]
        for path in gone:
            del self.nodes[path]
        self.revision += bool(gone)


class TreeAgainstModel(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.tree = MetadataTree(":memory:")
        self.model = Model()
        self.history = ChangeHistory(0, changes_max=20)
        self.mirror: dict[str, int] = {}  # what a watcher knows: path → version
        self.seen = 0

    def _apply(self, *jobs: Any) -> list[Any]:
        outcomes = self.tree.apply(jobs)
        for outcome in outcomes:
            if isinstance(outcome, TreeJobResult) and outcome.revision > self.history.revision:
                self.history.append(outcome.revision, outcome.changes)
        return outcomes

    @rule(commits=st.lists(_commits, min_size=1, max_size=5))
    def commit(self, commits: list[CommitJob]) -> None:
        for commit, outcome in zip(commits, self._apply(*commits), strict=True):
            expected = self.model.commit(commit)
            if expected is None:
                assert isinstance(outcome, BadVersion)
            else:
                assert isinstance(outcome, TreeJobResult)
                assert (outcome.versions, outcome.revision) == (expected, self.model.revision)

    @rule(session=st.sampled_from(SESSIONS))
    def open_session(self, session: str) -> None:
        self._apply(OpenSession(session, 3.0))
        assert (session, 3.0) in self.tree.sessions()

    @rule(session=st.sampled_from(SESSIONS))
    def end_session(self, session: str) -> None:
        self._apply(EndSession(session))
        self.model.end(session)
        assert session not in dict(self.tree.sessions())

    @rule(prefix=st.sampled_from([*PATHS, "/", "/d"]))
    def children(self, prefix: str) -> None:
        start = prefix.rstrip("/") + "/"
        below = {path[len(start) :].split("/")[0] for path in self.model.nodes if path.startswith(start)}
        assert self.tree.children(prefix) == sorted(below)

    @rule()
    def watcher_looks(self) -> None:
        news = self.history.changes_since("/", self.seen)
        if isinstance(news, WatchReset):
            self.mirror = {path: version for path, (_, version, _) in self.model.nodes.items()}
        else:
            for change in news:
                self._hear(change)
        self.seen = self.history.revision
        assert self.mirror == {path: version for path, (_, version, _) in self.model.nodes.items()}

    def _hear(self, change: NodeChanged) -> None:
        if change.version == NODE_ABSENT:
            del self.mirror[change.path]
        else:
            self.mirror[change.path] = change.version

    @invariant()
    def the_tree_is_the_model(self) -> None:
        if not hasattr(self, "tree"):
            return
        assert self.tree.revision == self.history.revision == self.model.revision
        self.history.check()
        for path in PATHS:
            expected = self.model.nodes.get(path)
            node = None if expected is None else StoredNode(expected[0], expected[1], expected[2] is not None)
            assert self.tree.get(path) == node

    def teardown(self) -> None:
        if hasattr(self, "tree"):
            self.tree.close()


TestTree = TreeAgainstModel.TestCase
TestTree.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
