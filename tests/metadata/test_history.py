"""The history of changes, alone: a watch that resumes hears everything or is told to list again."""

import random

import pytest

from magnetar.metadata.store import NodeChanged, WatchReset
from magnetar.metadata.tree_core import ChangeHistory, is_at_or_below


def test_what_comes_after_a_revision_is_all_that_came_after_it() -> None:
    history = ChangeHistory(7)
    history.append(8, [NodeChanged("/a", 0, 8), NodeChanged("/b", 0, 8)])
    history.append(9, [])
    history.append(10, [NodeChanged("/a/x", 0, 10), NodeChanged("/ab", 0, 10)])
    assert history.changes_since("/a", 7) == [NodeChanged("/a", 0, 8), NodeChanged("/a/x", 0, 10)]
    assert history.changes_since("/a", 8) == history.changes_since("/a", 9) == [NodeChanged("/a/x", 0, 10)]
    assert history.changes_since("/", 10) == []
    assert history.changes_since("/", 6) == WatchReset(10)
    assert history.changes_since("/", 11) == WatchReset(10)
    history.check()


def test_a_revision_is_not_skipped() -> None:
    history = ChangeHistory(3)
    with pytest.raises(AssertionError, match="revision 5 after 3"):
        history.append(5, [])


@pytest.mark.parametrize("seed", range(20))
def test_any_watcher_at_any_speed_hears_everything_or_reset(seed: int) -> None:
    rng = random.Random(seed)
    history = ChangeHistory(0, changes_max=rng.randint(1, 30))
    everything: list[NodeChanged] = []
    seen = dict.fromkeys(("/", "/a", "/a/b", "/c"), 0)
    heard: dict[str, list[NodeChanged]] = {prefix: [] for prefix in seen}
    for revision in range(1, 300):
        changes = [
            NodeChanged(rng.choice(["/a", "/a/b", "/ab", "/c/d"]), 0, revision) for _ in range(rng.randint(0, 3))
        ]
        history.append(revision, changes)
        everything += changes
        history.check()
        for prefix in seen:
            if rng.random() < 0.3:
                news = history.changes_since(prefix, seen[prefix])
                if isinstance(news, WatchReset):
                    assert seen[prefix] < history.floor
                    heard[prefix] = [
                        c for c in everything if is_at_or_below(prefix, c.path) and c.revision <= news.revision
                    ]
                else:
                    heard[prefix] += news
                seen[prefix] = history.revision
    for prefix, news in heard.items():
        assert news == [c for c in everything if is_at_or_below(prefix, c.path) and c.revision <= seen[prefix]]
