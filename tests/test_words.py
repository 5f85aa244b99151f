"""Words that do not come back: the documents and the prose of the code are plain technical English.

`WORDS` has the words, each with its reason and what to write instead; `OLD_CLASSES` the class names that were replaced.
Read are the documents (docs/settings.md and docs/errors.md are made from the code, and not read twice), and of the
product's modules docstrings, comments and string literals.

A word that is used in a permitted sense is in `PERMITTED`, with its phrase.
"""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests import layout
from tests.docs.documents import DOCUMENTS

WORDS = {
    r"behind": "it means lagging in English: write after, beyond or past for a position, lags for lag",
    r"nobody|no one": "write who it is: no client, no consumer, no reader",
    r"whoever": "write who it is: the client that …",
    r"somebody|someone": "write who it is: a client, an operator, a caller",
    r"heeds?|heeded": "write applies, obeys, handles",
    r"doomed": "write pending deletion",
    r"laid down|lays down|lay down|laid out": "write stored, configured, set",
    r"hears?|heard|overheard": "a machine receives",
    r"is not there|are not there": "write is missing, does not exist, is down",
    r"what (?:it|he|they) (?:has|have) not": "write what it lacks, what is missing",
    r"houses?|halls?": "write repository, package",
    r"lobby|lobbies": "the stream that all producers and consumers of a client share",
    r"seats?|seated|seating": "write registration, registers",
    r"graves?|bury|buries|buried|burials?|burying": "write dead-letter, delete, tombstone",
    r"door|doors": "write entry point, method",
    r"rooms": "write packages, modules",
    r"the fate of|whose fate": "write the outcome of",
    r"at hand": "write in memory, read ahead",
    r"(?<!ends )lies (?:in|on|at|before|after|behind|between|beside|below|above)": "write is in, is at",
    r"stands? (?:in|on|at|before|after|behind|between|beside|below|above|for|there|still)": "write is in, is at, means",
}
"""Word (as a regular expression, whole words, any case) -> why not, and what to write."""

PERMITTED: dict[str, tuple[tuple[str, str], ...]] = {
    "behind": (),
}
"""Word -> (path, phrase): where it means lagging, or is a name."""

OLD_CLASSES = {
    "Lobby": "BrokerStream",
    "Seating": "ProducerRegistry",
    "Seat": "ProducerRegistration",
    "AtHand": "ReadAheadBuffer",
    "Letters": "DeadLetterProducer",
    "Lanes": "PartitionConsumers",
    "Growth": "PartitionsWatcher",
    "Inbox": "ReceiverQueue",
    "Sending": "PendingQueue",
    "Assembling": "ChunkAssembler",
    "Acknowledging": "AckSender",
    "Reasons": "ErrorLogThrottle",
    "Patience": "LogThrottle",
    "PolicyBook": "PolicyCache",
    "OwnedTopics": "TopicManager",
    "TopicLife": "TopicMaintenance",
    "TopicFeed": "TopicWatcher",
    "Volatile": "NonPersistent",
    "Outgoing": "InternalProducer",
    "Traffic": "TopicStatistics",
    "HeldBack": "BackoffQueue",
    "LedgerChain": "ManagedLedger",
    "LedgerList": "ManagedLedgerRecord",
    "Terms": "SubscriptionOptions",
    "Numbers": "SequenceRange",
    "Keeper": "CheckpointScheduler",
    "Burial": "TombstoneWriter",
    "Mender": "EntryRepairer",
    "Upkeep": "DiskMonitor",
    "Ahead": "ReadAhead",
    "Trouble": "BookieHealth",
    "Facts": "StateLog",
    "Losses": "DataLossLog",
    "Succession": "ReconnectingStore",
    "Line": "ZooKeeperConnection",
}
"""Class name that was replaced -> the field's name for it."""

GENERATED = {"docs/settings.md", "docs/errors.md"}


@cache
def _texts() -> tuple[tuple[str, str], ...]:
    """(place, text) of all that is read."""
    found = []
    for module in layout.modules():
        pieces = [*module.prose, *_literals(module)]
        found += [(f"{module.path}:{line}", text) for line, text in pieces]
    for document in [*DOCUMENTS, "TESTING.md"]:
        if document not in GENERATED:
            found.append((document, (layout.ROOT / document).read_text(encoding="utf-8")))
    return tuple(found)


def _literals(module: layout.Module) -> list[tuple[int, str]]:
    """String literals that are no docstrings."""
    nodes = module.nodes
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    return [
        (node.lineno, node.value)
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
    ]


def _uses(word: str, text: str, phrases: tuple[str, ...] = ()) -> int:
    plain = re.sub(r"\s*\n[\s#]*", " ", text)
    for phrase in phrases:
        plain = plain.replace(phrase, "")
    return len(re.findall(rf"\b(?:{word})\b", plain, re.I))


@pytest.mark.parametrize("word", WORDS)
def test_a_word_does_not_come_back(word: str) -> None:
    permitted = PERMITTED.get(word, ())
    places = [
        place for place, text in _texts()
        if _uses(word, text, tuple(phrase for path, phrase in permitted if path == place.partition(":")[0]))
    ]  # fmt: skip
    assert not places, f"{word}: {WORDS[word]}"


@pytest.mark.parametrize("word", PERMITTED)
def test_what_is_permitted_is_used(word: str) -> None:
    assert word in WORDS
    for path, phrase in PERMITTED[word]:
        pieces = [text for place, text in _texts() if place.partition(":")[0] == path]
        assert any(phrase in text and _uses(word, phrase) for text in pieces), f"{path}: {phrase}"


def test_no_class_has_its_old_name() -> None:
    classes = {
        node.name: module.path
        for module in layout.modules()
        for node in module.nodes
        if isinstance(node, ast.ClassDef)
    }
    old = {f"{classes[name]}: {name}: {OLD_CLASSES[name]}" for name in OLD_CLASSES.keys() & classes.keys()}
    assert not old


def test_a_word_is_seen_in_any_case_across_lines_and_not_inside_a_name() -> None:
    assert _uses("behind", "Behind it, and\n# behind that") == 2
    assert _uses("is not there", "what is not\n    # there") == 1
    assert _uses("behind", "`fall_behind` and behindhand") == 0
    assert _uses("behind", "one that is behind", ("that is behind",)) == 0
