"""Stored bytes of a namespace and of a tenant in sum over brokers: who counts what, and when a limit is reached.

A *place* is a namespace (`acme/orders`) or a tenant (`acme`) with a limit. The owner of a bundle counts all topics of
the bundle: those that it has loaded by their logs, idle ones by their lists of ledgers in the metadata, which it reads
once (`StoredHere.list_unread`). It reports the sum of each bundle to the leader, with the shares of rates
(shares_core.py), and the leader answers the sum of each place (`StoredSums`). Nothing is written to the metadata.

| a bundle | counts |
|---|---|
| its owner has read its idle topics | as the owner reported last |
| its owner has died, or has just got it and still reads | as the owner before it reported last |
| no broker reports it to this leader | as the leader reads in the lists of ledgers, REPORTS_AWAITED_S later |
| it was divided, and one part was reported | the rest counts what is left of the whole |

So a bundle never counts twice, and moves, deaths and splits lose no bytes. A sum is *complete* if each hash of each
namespace of the place is in a bundle that counts. An incomplete sum never lets producers go on that wait.

**What a broker decides by** (`StoredHere.estimate`): the sum of the last answer, and by how many bytes its own bundles
have grown since. So a broker that has no leader stops by what it knows; it then misses what other brokers write. At a
broker that never had an answer only its own bundles count.

**The bound.** A sum is above its limit by at most what all producers publish from a measurement to the answers:
MEASURE_INTERVAL_S, and two reports; with a death, the open ledgers of idle topics count when they are loaded again.

What is not counted: copies (a byte counts once), cursors, compacted ledgers, indexes, non-persistent topics.
Guarding tests: tests/broker/cluster/test_stored.py (with a simulation), tests/broker/cluster/test_stored_limits.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple, Protocol

from ...proto.applied import AppliedPolicies, StoragePolicy
from ...proto.states import BacklogQuotaState
from .bundles_core import HASH_RANGE, compute_bundle_number, make_bundle_name, parse_bundle_name

MEASURE_INTERVAL_S = 1.0
"""Seconds between two measurements of what a broker stores, with up to TOPICS_PER_INTERVAL loaded topics …"""
TOPICS_PER_INTERVAL = 10_000
"""… of limited places: one more interval for each so many, as a measurement of them takes about 20 ms."""
RESEND_S = 10.0
"""Seconds after which a bundle is reported again although nothing changed: a new leader knows it then."""
BUNDLES_PER_REPORT_MAX = 1000
"""Bundles in a report; the others are in the next ones. About 60 bytes each."""
PLACES_MAX = 1000
"""Places of which a report asks the sums, in the order of their names; of others a broker knows its own bytes alone."""
REPORTS_AWAITED_S = 15.0
"""Seconds for which the leader waits for reports of a place before it reads the lists of ledgers of what is missing:
each owner has reported all of its bundles once."""
READ_AGAIN_S = 3600.0
"""Seconds after which the leader reads the topics of a bundle again that no broker reports: its owner may be of an
older release."""
NAMESPACES_LISTED_S = 60.0
"""Seconds between two listings of a limited tenant's namespaces: a new one is missing for so long, unless its bundles
are reported."""
PLACES_KEPT_S = 60.0
"""Seconds after which the leader forgets a place that no report asks for."""

_ACTIONS = {
    "producer_request_hold": BacklogQuotaState.STORAGE_HOLD,
    "producer_exception": BacklogQuotaState.STORAGE_REFUSE,
}


class StoredBundle(NamedTuple):
    """A bundle: its namespace (tenant/namespace), and its name."""

    namespace: str
    bundle: str


class PlaceBytes(NamedTuple):
    """What the leader knows of a place: the sum of the bytes that it stores, and whether nothing is missing in it."""

    bytes: int
    complete: bool


class StorageLimit(NamedTuple):
    """A limit of stored bytes, and what happens at the limit."""

    bytes: int
    policy: StoragePolicy


def list_storage_limits(namespace: str, applied: AppliedPolicies) -> dict[str, StorageLimit]:
    """Returns the limits of stored bytes that bound a namespace, by place: its own, and that of its tenant."""
    found = {
        namespace: StorageLimit(applied.namespace_storage_bytes, applied.namespace_storage_policy),
        namespace.partition("/")[0]: StorageLimit(applied.tenant_storage_bytes, applied.tenant_storage_policy),
    }
    return {place: limit for place, limit in found.items() if limit.bytes}


def is_in_place(namespace: str, place: str) -> bool:
    """Returns True if the namespace is the place, or is of the tenant that is the place."""
    return place in (namespace, namespace.partition("/")[0])


def find_hash_range(bundle: str) -> tuple[int, int]:
    """Returns the hashes of a bundle: the first one, and the one after the last. Raises ValueError if the text is no
    name of a bundle."""
    parse_bundle_name(bundle)
    low, _, high = bundle.partition("_")
    end = int(high, 16)
    return int(low, 16), end + (end == HASH_RANGE - 1)


# -------------------------------------------------------------------------------------------------------- leader


class _Row(NamedTuple):
    """What a range of hashes counts, and until when: for ever if its owner has reported it."""

    bytes: int
    until_s: float = math.inf


class StoredSums:
    """The sums of places, at the leader. `now`: monotonic seconds. The owner calls, from time to time, what is below
    "the survey", and reads what it is told to."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[tuple[int, int], _Row]] = {}  # by namespace and range of hashes
        self._namespaces: dict[str, tuple[frozenset[str], float]] = {}  # of tenants, and when they were listed
        self._asked_s: dict[str, tuple[float, float]] = {}  # when a place was asked for, first and last

    def take_report(self, bundles: Mapping[StoredBundle, int]) -> None:
        """Counts what the owner of the bundles has reported."""
        for (namespace, bundle), size in bundles.items():
            self._put(namespace, find_hash_range(bundle), _Row(size))

    def _put(self, namespace: str, at: tuple[int, int], row: _Row) -> None:
        """Counts `row` for a range; of rows that overlap it, what is outside of it keeps the rest of their bytes."""
        rows = self._rows.setdefault(namespace, {})
        if at in rows:
            rows[at] = row
            return
        low, high = at
        for (start, end), old in [each for each in rows.items() if each[0][0] < high and low < each[0][1]]:
            del rows[start, end]
            outside = [each for each in ((start, min(end, low)), (max(start, high), end)) if each[0] < each[1]]
            if outside:
                left, width = max(0, old.bytes - row.bytes), sum(stop - first for first, stop in outside)
                rows.update(((first, stop), old._replace(bytes=left * (stop - first) // width))
                            for first, stop in outside)  # fmt: skip
        rows[at] = row

    def sum_place(self, place: str, now: float) -> PlaceBytes:
        """Returns the sum of the place, which is asked for from now on."""
        self._asked_s[place] = self._asked_s.get(place, (now, now))[0], now
        names, complete = self._list_namespaces(place)
        total = 0
        for name in names:
            rows = self._rows.get(name, {})
            total += sum(row.bytes for row in rows.values())
            complete = complete and sum(end - start for start, end in rows) == HASH_RANGE
        return PlaceBytes(total, complete)

    def _list_namespaces(self, place: str) -> tuple[Collection[str], bool]:
        """Returns the namespaces of the place, and whether they were listed."""
        if "/" in place:
            return (place,), True
        known = self._namespaces.get(place)
        if known is None:
            return [name for name in self._rows if is_in_place(name, place)], False
        return known[0].union(name for name in self._rows if is_in_place(name, place)), True

    # ------------------------------------------------------------------ the survey
    def list_tenants_to_list(self, now: float) -> list[str]:
        """Returns the tenants that were asked for, and whose namespaces have to be listed."""
        return [
            place for place in self._asked_s
            if "/" not in place and now - self._namespaces.get(place, ((), -math.inf))[1] >= NAMESPACES_LISTED_S
        ]  # fmt: skip

    def set_namespaces(self, tenant: str, names: Iterable[str], now: float) -> None:
        """Sets the namespaces of a tenant; forgets the rows of others that it had."""
        found = frozenset(names)
        self._namespaces[tenant] = found, now
        for name in [name for name in self._rows if is_in_place(name, tenant) and name not in found]:
            del self._rows[name]

    def list_incomplete_namespaces(self, now: float) -> list[str]:
        """Returns the namespaces of the places asked for of which bundles have to be read: no broker has reported them
        since the place was asked for REPORTS_AWAITED_S ago, or they were read READ_AGAIN_S ago."""
        found = set[str]()
        for place, (asked_s, _) in self._asked_s.items():
            if now - asked_s >= REPORTS_AWAITED_S:
                found.update(self._list_namespaces(place)[0])
        return sorted(
            name for name in found
            if sum(end - start for (start, end), row in self._rows.get(name, {}).items() if now < row.until_s)
            < HASH_RANGE
        )  # fmt: skip

    def list_bundles_to_read(self, namespace: str, bundles: int, now: float) -> list[str]:
        """Returns those of the `bundles` bundles of a namespace that have to be read. A bundle of which a part counts
        is one."""
        rows = self._rows.get(namespace, {})
        found = list[str]()
        for number in range(bundles):
            low, high = find_hash_range(name := make_bundle_name(number, bundles))
            counted = sum(
                max(0, min(end, high) - max(start, low)) for (start, end), row in rows.items() if now < row.until_s
            )
            if counted < high - low:
                found.append(name)
        return found

    def on_bundles_read(self, namespace: str, bundles: Mapping[str, int], now: float) -> None:
        """Counts what the lists of ledgers say of bundles, unless their owner has reported them meanwhile."""
        if not bundles:
            return
        count = parse_bundle_name(next(iter(bundles)))[1]
        for name in bundles.keys() & set(self.list_bundles_to_read(namespace, count, now)):
            self._put(namespace, find_hash_range(name), _Row(bundles[name], now + READ_AGAIN_S))

    def forget_places(self, now: float) -> None:
        """Forgets the places that were not asked for in PLACES_KEPT_S, and the rows that only they need."""
        gone = [place for place, (_, asked_s) in self._asked_s.items() if now - asked_s > PLACES_KEPT_S]
        for place in gone:
            del self._asked_s[place]
            self._namespaces.pop(place, None)
        if gone:
            kept = self._asked_s
            self._rows = {
                name: rows for name, rows in self._rows.items() if name in kept or name.partition("/")[0] in kept
            }

    def check(self) -> None:
        """Raises AssertionError if a rule of this object does not hold."""
        for name, rows in self._rows.items():
            ranges = sorted(rows)
            assert all(before[1] <= after[0] for before, after in pairwise(ranges)), (
                f"a hash of {name} counts twice"
            )
            assert all(0 <= start < end <= HASH_RANGE for start, end in ranges), f"{name} has a range that is none"
            assert all(row.bytes >= 0 for row in rows.values()), f"{name} stores less than nothing"


# -------------------------------------------------------------------------------------------------------- broker


class StoredTopic(Protocol):
    """A topic that a broker has loaded, as far as its bytes count."""

    @property
    def stored_bytes(self) -> int:
        """The bytes of its log; after it has ended, those that it had then."""

    @property
    def is_ended(self) -> bool:
        """Whether it is not served any more."""

    @property
    def is_going(self) -> bool:
        """Whether it is being deleted; with `is_ended`, whether it was deleted."""

    def set_storage_state(self, state: BacklogQuotaState | None) -> None:
        """Called when a limit of stored bytes is reached, or is not reached any more."""


class _Bundle:
    """A bundle that this broker owns: its loaded topics, and the bytes of its idle topics, both by full name.
    `is_read`: whether the idle ones are known."""

    __slots__ = ("idle", "is_read", "loaded")

    def __init__(self, *, is_read: bool = False) -> None:
        self.loaded: dict[str, StoredTopic] = {}
        self.idle: dict[str, int] = {}
        self.is_read = is_read

    def measure(self) -> int:
        """Returns the bytes of all topics. Those that have ended are idle from now on, or deleted."""
        total = 0
        for full, topic in list(self.loaded.items()):
            size = topic.stored_bytes
            if topic.is_ended:
                del self.loaded[full]
                if not topic.is_going:
                    self.idle[full] = size
            else:
                total += size
        return total + sum(self.idle.values())


class StoredReport(NamedTuple):
    """A report of a broker: what bundles store that the leader does not know yet; all that was measured; the places of
    which the sums are asked."""

    bundles: Mapping[StoredBundle, int]
    measured: dict[StoredBundle, int]
    places: tuple[str, ...]


class StoredHere:
    """What one broker stores of limited places, and what it decides by. `limits`: the places with a limit that bound
    bundles of this broker; `rows`: what each bundle of them stores, as measured last; those of which idle topics are
    not read yet are missing."""

    def __init__(self) -> None:
        self.limits: dict[str, StorageLimit] = {}
        self.rows: dict[StoredBundle, int] = {}
        self.reached: dict[str, int] = {}  # how often the limit of a place was reached
        self._bundles: dict[StoredBundle, _Bundle] = {}
        self._counts: dict[str, set[int]] = {}  # by namespace: in how many bundles it is divided, as owned bundles say
        self._new: dict[str, StoredTopic] = {}  # loaded since the last measurement
        self._touched: set[str] | None = None  # loaded since lists of ledgers are being read
        self._sent: dict[StoredBundle, tuple[int, float]] = {}  # what the leader knows, and since when
        self._answers: dict[str, PlaceBytes] = {}
        self._rows_answered: dict[StoredBundle, int] = {}  # `rows` in the last report that was answered
        self._states: dict[str, BacklogQuotaState] = {}  # of places whose limit is reached

    # ------------------------------------------------------------------ what is here
    def set_owned(self, limits: Mapping[str, StorageLimit], owned: Collection[StoredBundle]) -> None:
        """Sets the limits, and the bundles of this broker that they bound. A bundle that was divided leaves its topics
        to its parts."""
        self.limits = dict(limits)
        if self._bundles.keys() == set(owned):
            return
        before, self._bundles = self._bundles, {}
        gone = {bundle: each for bundle, each in before.items() if bundle not in owned}
        self._counts = {}
        for bundle in owned:
            self._counts.setdefault(bundle.namespace, set()).add(parse_bundle_name(bundle.bundle)[1])
            kept = before.get(bundle)
            self._bundles[bundle] = kept or _Bundle(is_read=_is_part(bundle, gone))
        self.rows = {bundle: size for bundle, size in self.rows.items() if bundle in self._bundles}
        for each in gone.values():
            for full, topic in each.loaded.items():
                if (home := self._find(full)) is not None:
                    home.loaded[full] = topic
                else:
                    topic.set_storage_state(None)
            for full, size in each.idle.items():
                if (home := self._find(full)) is not None:
                    home.idle[full] = size

    def list_missing_namespaces(self, owned: Iterable[StoredBundle]) -> set[str]:
        """Returns the namespaces with bundles that `set_owned` has not had: their loaded topics have to be given to
        `on_loaded`."""
        return {bundle.namespace for bundle in owned if bundle not in self._bundles}

    def _find(self, full: str) -> _Bundle | None:
        """Returns the bundle of a topic; None if it is not one of `set_owned`."""
        namespace = _find_namespace(full)
        for count in self._counts.get(namespace, ()):
            name = make_bundle_name(compute_bundle_number(full, count), count)
            if (found := self._bundles.get(StoredBundle(namespace, name))) is not None:
                return found
        return None

    def on_loaded(self, full: str, topic: StoredTopic) -> None:
        """Called when a topic was loaded; its full name is `full`. Limits that are reached hold for it at once."""
        if self._touched is not None:
            self._touched.add(full)
        self._new[full] = topic
        topic.set_storage_state(self.find_state(_find_namespace(full)))

    def measure(self) -> Iterator[None]:
        """Measures all bundles, one at each step: the caller may pause between them."""
        new, self._new = self._new, {}
        for full, topic in new.items():
            if (home := self._find(full)) is not None:
                home.idle.pop(full, None)
                home.loaded[full] = topic
        for bundle, each in list(self._bundles.items()):
            size = each.measure()
            if each.is_read:
                self.rows[bundle] = size
            yield

    def forget_new(self) -> None:
        """Forgets what was loaded since the last measurement; called while nothing is limited."""
        self._new.clear()

    @property
    def loaded_topics(self) -> int:
        """Returns the number of loaded topics of limited places, as measured last."""
        return sum(len(each.loaded) for each in self._bundles.values())

    def list_unread(self) -> list[StoredBundle]:
        """Returns the bundles of which the lists of ledgers of idle topics have to be read."""
        return [bundle for bundle, each in self._bundles.items() if not each.is_read]

    def begin_reading(self) -> None:
        """Called before lists of ledgers are read: what is loaded, now or later, is known better than they say."""
        self._touched = set(self._new).union(*(each.loaded for each in self._bundles.values() if not each.is_read))

    def give_up_reading(self) -> None:
        """Called when the lists of ledgers cannot be read: they are read again."""
        self._touched = None

    def end_reading(self, bundles: Iterable[StoredBundle], topics: Mapping[str, int]) -> None:
        """Called with the bytes of each topic, by its full name, when the lists of ledgers of `bundles` are read."""
        touched, self._touched = self._touched or set(), None
        for full, size in topics.items():
            home = self._find(full)
            if home is not None and not home.is_read and full not in touched:
                home.idle.setdefault(full, size)
        for bundle in bundles:
            if bundle in self._bundles:
                self._bundles[bundle].is_read = True

    # ------------------------------------------------------------------ the report
    def make_report(self, now: float) -> StoredReport:
        """Returns the next report: the bundles that changed, and those that were not reported for RESEND_S, at most
        BUNDLES_PER_REPORT_MAX; those first that were reported longest ago."""
        due = list[tuple[float, StoredBundle]]()
        for bundle, size in self.rows.items():
            known, at_s = self._sent.get(bundle, (-1, -math.inf))
            if known != size or now - at_s >= RESEND_S:
                due.append((at_s, bundle))
        due.sort()
        sent = {bundle: self.rows[bundle] for _, bundle in due[:BUNDLES_PER_REPORT_MAX]}
        return StoredReport(sent, dict(self.rows), tuple(sorted(self.limits)[:PLACES_MAX]))

    def on_answered(self, report: StoredReport, answer: Mapping[str, PlaceBytes], now: float) -> None:
        """Called with the leader's answer to a report; a leader of an older release answers no place."""
        self._sent.update((bundle, (size, now)) for bundle, size in report.bundles.items())
        self._sent = {bundle: each for bundle, each in self._sent.items() if bundle in self.rows}
        for place, found in answer.items():
            before = self._answers.get(place)
            total = found.bytes if found.complete or before is None else max(found.bytes, before.bytes)
            self._answers[place] = PlaceBytes(total, found.complete)
        self._answers = {place: each for place, each in self._answers.items() if place in self.limits}
        if answer:
            self._rows_answered = report.measured

    # ------------------------------------------------------------------ decisions
    def sum_own(self, place: str) -> int:
        """Returns the bytes of the place at this broker."""
        return sum(size for bundle, size in self.rows.items() if is_in_place(bundle.namespace, place))

    def estimate(self, place: str) -> int:
        """Returns how many bytes the place stores, as far as this broker knows."""
        answer = self._answers.get(place)
        if answer is None:
            return self.sum_own(place)
        then = self._rows_answered
        grown = sum(
            size - then[bundle] for bundle, size in self.rows.items()
            if bundle in then and is_in_place(bundle.namespace, place)
        )  # fmt: skip
        return max(0, answer.bytes + grown)

    def is_complete(self, place: str) -> bool:
        """Returns True if the last answer counts all of the place."""
        answer = self._answers.get(place)
        return answer is not None and answer.complete

    def find_state(self, namespace: str) -> BacklogQuotaState | None:
        """Returns what happens to publishes in a namespace; None: they are taken. To refuse is stronger than to wait.
        """
        states = {self._states.get(namespace), self._states.get(namespace.partition("/")[0])}
        for each in (BacklogQuotaState.STORAGE_REFUSE, BacklogQuotaState.STORAGE_HOLD):
            if each in states:
                return each
        return None

    def decide(self) -> dict[str, BacklogQuotaState | None]:
        """Decides which limits are reached. Returns the places that changed: their topics have to be told (`tell`)."""
        before = self._states
        after = {
            place: _ACTIONS[limit.policy] for place, limit in self.limits.items()
            if self.estimate(place) >= limit.bytes
        }  # fmt: skip
        if after == before:
            return {}
        self._states = after
        changed = {
            place: after.get(place) for place in before.keys() | after.keys() if before.get(place) != after.get(place)
        }
        for place, state in changed.items():
            self.reached[place] = self.reached.get(place, 0) + (state is not None)
        return changed

    def tell(self, changed: Collection[str]) -> Iterator[None]:
        """Tells the loaded topics of the places `changed` what happens to publishes, one at each step: the caller may
        pause between them."""
        for bundle, each in list(self._bundles.items()):
            if bundle.namespace in changed or bundle.namespace.partition("/")[0] in changed:
                for topic in list(each.loaded.values()):
                    topic.set_storage_state(self.find_state(bundle.namespace))
                    yield
        for full, topic in list(self._new.items()):
            topic.set_storage_state(self.find_state(_find_namespace(full)))
            yield

    def check(self) -> None:
        """Raises AssertionError if a rule of this object does not hold."""
        for bundle, each in self._bundles.items():
            assert not each.loaded.keys() & each.idle.keys(), f"a topic of {bundle} counts twice"
            for full in (*each.loaded, *each.idle):
                assert self._find(full) is each, f"{full} is not of {bundle}"
        assert self.rows.keys() <= self._bundles.keys(), "a bundle is reported that this broker does not own"


def _is_part(bundle: StoredBundle, others: Mapping[StoredBundle, _Bundle]) -> bool:
    """Returns True if the bundle is a part of one of `others` that was read."""
    low, high = find_hash_range(bundle.bundle)
    for other, each in others.items():
        if each.is_read and other.namespace == bundle.namespace:
            start, end = find_hash_range(other.bundle)
            if start <= low and high <= end:
                return True
    return False


def _find_namespace(full: str) -> str:
    """Returns the namespace (tenant/namespace) of the full name of a topic."""
    tenant, namespace = full.split("/", 4)[2:4]
    return f"{tenant}/{namespace}"
