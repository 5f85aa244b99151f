"""The summary of an entry: which properties the messages of a batch have, in at most SUMMARY_BYTES_MAX bytes.

    builder = SummaryBuilder(("tag",))               at a producer, one for each batch
    builder.add_message(message.properties)
    metadata.summary = builder.encode()              empty: no summary, so every filter may match

    may_match(parse_filter("tag = 'a'").root, parse_summary(metadata.summary))       at a broker

    summary = u8 version | u8 names | name* | u8 kind | values
    name    = u8 flags (PRESENT 1: some message has it; ABSENT 2: some message lacks it) | u8 size | UTF-8
    values  = (kind HASHES_FORM) u32*, ascending, distinct, at most EXACT_HASHES_MAX of them
            | (kind BLOOM_FORM) a Bloom filter of BLOOM_BITS_PER_VALUE a value, one number: the rest of the summary

Big-endian. A value is the Murmur3 32-bit hash (seed 0) of `name NUL value` in UTF-8. The field is 50002 of the entry's
metadata: a client that does not know it passes over it. The summary covers the names that the producer declares
(`filter_properties`). A property that is longer than a filter reads counts as absent, as in `proto/filters.py`.

Rule: a summary never hides a message. `may_match` is True for every entry with a message for which the expression is
TRUE. Two values may have the same hash, so a missing hash proves that a value is *not* there, and a present one proves
nothing:

- `=` and IN with texts or booleans, and LIKE without `%`, look for the hashes. The flags say whether a property occurs.
- NOT is pushed inwards to the comparisons. A negated comparison only needs a message that has the property.
- Other comparisons (numbers, `<`, LIKE, two names) only need a message that has the property. Fields of the message
  itself may have any value.
- A summary that cannot be parsed, or has another version, says nothing: every filter may match.

`find_candidates` makes the same decision for any evidence, not only for one entry: the index of a ledger answers with
the set of blocks that may have a match (broker/log/key_index_core.py).

Guarding tests: tests/proto/test_summary.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, reduce
from operator import and_, or_
from struct import Struct
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import mmh3

from .filters import (
    BOOLEANS,
    VALUE_CHARACTERS_MAX,
    And,
    Compare,
    FilterNode,
    FilterValue,
    In,
    IsNull,
    Like,
    Literal,
    Name,
    Not,
    Operand,
    Or,
    read_number,
)

SUMMARY_VERSION = 1
SUMMARIZED_NAMES_MAX = 16
"""Names that a summary covers, as many as a filter may have."""
EXACT_HASHES_MAX = 32
"""Distinct values that are listed one by one; more of them become a Bloom filter."""
BLOOM_BITS_PER_VALUE = 10
BLOOM_PROBES = 7
"""Bits and probes of a value in a Bloom filter: one absent value of a hundred is taken for a present one."""
SUMMARY_BYTES_MAX = 256
"""A larger summary is left out: it would cost more than it saves."""
NAME_BYTES_MAX = 255
HASHES_FORM, BLOOM_FORM = 0, 1
PRESENT, ABSENT = 1, 2
_U32 = Struct(">I")
_HASHES_KNOWN_MAX = 4096
_KNOWN_CHARACTERS_MAX = 100


def hash_property(name: str, value: str) -> int:
    """Returns the 32-bit hash of a property in a summary and in the index of a ledger."""
    found: int = mmh3.hash(f"{name}\0{value}".encode("utf-8", "surrogatepass"), 0, False)
    return found


class _PropertyHashes(dict[tuple[str, str], int]):
    """The hashes of properties, cached: a producer's messages have the same few values again and again."""

    def __missing__(self, pair: tuple[str, str]) -> int:
        if len(self) >= _HASHES_KNOWN_MAX:
            self.clear()
        found = self[pair] = hash_property(*pair)
        return found


_KNOWN_HASHES = _PropertyHashes()


def find_hash(name: str, value: str) -> int:
    """Returns `hash_property` of the property, from the cache unless the value is long."""
    return _KNOWN_HASHES[name, value] if len(value) < _KNOWN_CHARACTERS_MAX else hash_property(name, value)


def _make_mask(value: int, bits: int) -> int:
    """Returns a number with the bits that a 32-bit hash sets in a Bloom filter of so many bits; bit 0 is the lowest one
    of the last byte."""
    step, mask = (value * 0x9E3779B1 >> 7) | 1, 0
    for _ in range(BLOOM_PROBES):
        mask |= 1 << value % bits
        value += step
    return mask


# ------------------------------------------------------------------------------------------------------- building
class SummaryBuilder:
    """Collects the properties of the messages of one batch. `names`: the properties that the summary covers. They must
    have passed `check_names`."""

    __slots__ = ("_names", "_values")

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._values: set[tuple[str | None, ...]] = set()  # of each message, in the order of the names

    def add_message(self, properties: Mapping[str, str]) -> None:
        """Adds the properties of one message."""
        self._values.add(tuple(map(properties.get, self._names)))

    def encode(self) -> bytes:
        """Returns the encoded summary; b"" if it would be larger than SUMMARY_BYTES_MAX."""
        names, hashes = list[bytes](), set[int]()
        for name, values in zip(self._names, zip(*self._values, strict=True), strict=True):
            present = {each for each in values if each is not None and len(each) <= VALUE_CHARACTERS_MAX}
            flags = PRESENT * bool(present) | ABSENT * any(each not in present for each in values)
            hashes.update(find_hash(name, each) for each in present)
            encoded = name.encode()
            names.append(bytes((flags, len(encoded))) + encoded)
        head = bytes((SUMMARY_VERSION, len(names))) + b"".join(names)
        room = SUMMARY_BYTES_MAX - len(head) - 1
        if len(hashes) <= EXACT_HASHES_MAX and 4 * len(hashes) <= room:
            return b"".join((head, bytes((HASHES_FORM,)), *map(_U32.pack, sorted(hashes))))
        size = (BLOOM_BITS_PER_VALUE * len(hashes) + 7) // 8
        return b"" if size > room else b"".join((head, bytes((BLOOM_FORM,)), _make_bloom_filter(hashes, size)))


def _make_bloom_filter(hashes: Iterable[int], size: int) -> bytes:
    found = 0
    for value in hashes:
        found |= _make_mask(value, 8 * size)
    return found.to_bytes(size, "big")


def check_names(names: Sequence[str]) -> str | None:
    """Returns a text that says what is wrong with the names that a summary should cover; None if they can be covered.
    """
    if len(set(names)) > SUMMARIZED_NAMES_MAX:
        return f"at most {SUMMARIZED_NAMES_MAX} different properties are summarized, not {len(set(names))}"
    long = [name for name in names if not 0 < len(name.encode("utf-8", "surrogatepass")) <= NAME_BYTES_MAX]
    return f"the name of a summarized property has 1 to {NAME_BYTES_MAX} bytes" if long else None


# -------------------------------------------------------------------------------------------------------- reading
class EntrySummary:
    """A summary that was read: the evidence of `find_candidates` for the messages of one entry. Each method `may_…`
    returns whether a message of the entry may be so; False is certain."""

    __slots__ = ("_bits", "_bloom", "_flags", "_hashes")

    everything, nothing = True, False

    def __init__(self, flags: Mapping[str, int], hashes: frozenset[int], bloom: bytes) -> None:
        self._flags, self._hashes = flags, hashes
        self._bits, self._bloom = 8 * len(bloom), int.from_bytes(bloom, "big")

    @property
    def names(self) -> frozenset[str]:
        """Returns the properties that the summary covers."""
        return frozenset(self._flags)

    def may_equal(self, name: Name, text: str) -> bool:
        if name.is_system or name.name not in self._flags:
            return True
        return bool(self._flags[name.name] & PRESENT) and self._has(find_hash(name.name, text))

    def may_exist(self, name: Name) -> bool:
        return name.is_system or bool(self._flags.get(name.name, PRESENT) & PRESENT)

    def may_lack(self, name: Name) -> bool:
        return name.is_system or bool(self._flags.get(name.name, ABSENT) & ABSENT)

    def may_be_between(self, name: Name, low: float, high: float) -> bool:
        return True

    def _has(self, value: int) -> bool:
        if not self._bits:
            return value in self._hashes
        mask = _make_mask(value, self._bits)
        return self._bloom & mask == mask


@lru_cache(maxsize=4096)
def parse_summary(summary: bytes) -> EntrySummary | None:
    """Reads a summary. Returns None if `summary` is empty, damaged, or of another version. Results are cached."""
    try:
        if (
            len(summary) > SUMMARY_BYTES_MAX
            or summary[0] != SUMMARY_VERSION
            or not 0 < summary[1] <= SUMMARIZED_NAMES_MAX
        ):
            return None
        flags, at = dict[str, int](), 2
        for _ in range(summary[1]):
            end = at + 2 + summary[at + 1]
            flags[summary[at + 2 : end].decode()] = summary[at]
            at = end
        kind, values = summary[at], summary[at + 1 :]
    except (IndexError, UnicodeDecodeError):
        return None
    if kind == BLOOM_FORM and values:
        return EntrySummary(flags, frozenset(), values)
    if kind != HASHES_FORM or len(values) % 4:
        return None
    return EntrySummary(flags, frozenset(number for (number,) in _U32.iter_unpack(values)), b"")


def may_match(expression: FilterNode, summary: EntrySummary | None) -> bool:
    """Returns False if the expression is certainly TRUE for no message of the entry that has this summary; else True.
    None: the entry has no summary."""
    return summary is None or find_candidates(expression, summary)


# ------------------------------------------------------------------------------------------------------- deciding
class Combinable(Protocol):
    """The type of the answers of a `FilterEvidence`: a bool for one entry, or a set of blocks. `&` is the intersection,
    `|` the union."""

    def __and__(self, other: Any, /) -> Self: ...
    def __or__(self, other: Any, /) -> Self: ...


T = TypeVar("T", bound=Combinable)
T_co = TypeVar("T_co", bound=Combinable, covariant=True)


class FilterEvidence(Protocol[T_co]):
    """What is known of some messages without looking at them; `EntrySummary` and the key index of a ledger implement
    it. Each answer may include too much, and never too little. `everything` and `nothing` are the answers "anywhere"
    and "nowhere"."""

    @property
    def everything(self) -> T_co: ...
    @property
    def nothing(self) -> T_co: ...
    def may_equal(self, name: Name, text: str) -> T_co:
        """Returns where a message may have this text as its property or field."""

    def may_exist(self, name: Name) -> T_co:
        """Returns where a message may have the property or field."""

    def may_lack(self, name: Name) -> T_co:
        """Returns where a message may lack the property or field, or have a value that is too long for a filter."""

    def may_be_between(self, name: Name, low: float, high: float) -> T_co:
        """Returns where a message may have a number from `low` to `high` (inclusive) as the field of a system name."""


class _Bounds(NamedTuple):
    low: float = float("-inf")
    high: float = float("inf")


def find_candidates(expression: FilterNode, evidence: FilterEvidence[T]) -> T:
    """Returns where the expression may be TRUE for a message, by the evidence: an answer of its type. Elsewhere it is
    certainly not TRUE."""
    return _find_true(expression, evidence)


def _find_true(node: FilterNode, evidence: FilterEvidence[T]) -> T:
    if isinstance(node, Not):
        return _find_false(node.part, evidence)
    if isinstance(node, And):
        return reduce(and_, (_find_true(part, evidence) for part in node.parts))
    if isinstance(node, Or):
        return reduce(or_, (_find_true(part, evidence) for part in node.parts))
    if isinstance(node, IsNull):
        return evidence.may_lack(node.operand) if isinstance(node.operand, Name) else evidence.everything
    if isinstance(node, In):
        return reduce(or_, (_find_equal(node.operand, Literal(value), evidence) for value in node.values))
    if isinstance(node, Like):
        return _find_equal(node.operand, Literal(node.parts[0]), evidence) if node.is_whole else _find_comparable(
            evidence, node.operand
        )
    if node.operator == "=":
        return _find_equal(node.left, node.right, evidence) & _find_in_bounds(node, evidence)
    return _find_comparable(evidence, node.left, node.right) & _find_in_bounds(node, evidence)


def _find_false(node: FilterNode, evidence: FilterEvidence[T]) -> T:
    if isinstance(node, Not):
        return _find_true(node.part, evidence)
    if isinstance(node, And):
        return reduce(or_, (_find_false(part, evidence) for part in node.parts))
    if isinstance(node, Or):
        return reduce(and_, (_find_false(part, evidence) for part in node.parts))
    if isinstance(node, Compare):
        found = _find_comparable(evidence, node.left, node.right)
        if node.operator == "=":
            return found
        return found & _find_in_bounds(Compare("<=", node.right, node.left), evidence)  # NOT a < b is b <= a
    return _find_comparable(evidence, node.operand)


def _find_comparable(evidence: FilterEvidence[T], *operands: Operand) -> T:
    """Returns where all operands may have a value: elsewhere what compares them is NULL."""
    return reduce(and_, (evidence.may_exist(each) for each in operands if isinstance(each, Name)), evidence.everything)


def _find_equal(left: Operand, right: Operand, evidence: FilterEvidence[T]) -> T:
    if isinstance(left, Literal):
        left, right = right, left
    if not isinstance(left, Name) or not isinstance(right, Literal):
        return _find_comparable(evidence, left, right)
    texts = _list_texts(right.value)
    if texts is None:
        return evidence.may_exist(left)
    return reduce(or_, (evidence.may_equal(left, text) for text in texts), evidence.nothing)


def _list_texts(value: FilterValue) -> list[str] | None:
    """Returns all texts of a property that equal the value of a literal; None if they cannot be listed (a number)."""
    if isinstance(value, bool):
        return [text for text, truth in BOOLEANS.items() if truth is value]
    return [value] if isinstance(value, str) else None


def _find_in_bounds(node: Compare, evidence: FilterEvidence[T]) -> T:
    """Returns where a field of the message may be in the bounds that a comparison with a number sets it."""
    name, bounds = _read_bounds(node)
    return evidence.everything if name is None else evidence.may_be_between(name, *bounds)


def _read_bounds(node: Compare) -> tuple[Name | None, _Bounds]:
    left, right = node.left, node.right
    if isinstance(left, Name) and isinstance(right, Literal):
        name, number, is_upper = left, right.value, True
    elif isinstance(left, Literal) and isinstance(right, Name):
        name, number, is_upper = right, left.value, False
    else:
        return None, _Bounds()
    limit = None if isinstance(number, str | bool) else read_number(number)
    if limit is None or not name.is_system:
        return None, _Bounds()
    if node.operator == "=":
        return name, _Bounds(limit, limit)
    return name, _Bounds(high=limit) if is_upper else _Bounds(low=limit)
