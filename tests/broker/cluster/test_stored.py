"""Stored bytes in sum over brokers: the cores alone, and in simulated time with brokers that die and join, other
leaders, idle topics, moves and splits."""

from __future__ import annotations

import random

import pytest

from magnetar.broker.cluster import stored_core
from magnetar.broker.cluster.bundles_core import compute_bundle_number, list_bundle_parts, make_bundle_name
from magnetar.broker.cluster.stored_core import (
    BUNDLES_PER_REPORT_MAX,
    PLACES_KEPT_S,
    READ_AGAIN_S,
    REPORTS_AWAITED_S,
    RESEND_S,
    PlaceBytes,
    StorageLimit,
    StoredBundle,
    StoredHere,
    StoredSums,
    list_storage_limits,
)
from magnetar.proto.applied import AppliedPolicies
from magnetar.proto.states import BacklogQuotaState

NAMESPACE = "acme/orders"
HALVES = [StoredBundle(NAMESPACE, make_bundle_name(number, 2)) for number in range(2)]
LIMIT = StorageLimit(1000, "producer_request_hold")


class Loaded:
    """A topic that a broker has loaded."""

    def __init__(self, size: int = 0) -> None:
        self.stored_bytes = size
        self.is_ended = self.is_going = False
        self.state: BacklogQuotaState | None = None

    def set_storage_state(self, state: BacklogQuotaState | None) -> None:
        self.state = state


def topic_in(bundle: int, bundles: int = 2, namespace: str = NAMESPACE, after: int = 0) -> str:
    names = (f"persistent://{namespace}/t{number}" for number in range(after, 10_000))
    return next(name for name in names if compute_bundle_number(name, bundles) == bundle)


def here_with(*bundles: StoredBundle, limits: dict[str, StorageLimit] | None = None) -> StoredHere:
    """A broker that owns the bundles and knows that they have no idle topics."""
    here = StoredHere()
    here.set_owned({NAMESPACE: LIMIT} if limits is None else limits, bundles)
    here.begin_reading()
    here.end_reading(bundles, {})
    return here


def measure(here: StoredHere) -> None:
    for _ in here.measure():
        here.check()
    here.check()


def decide(here: StoredHere) -> dict[str, BacklogQuotaState | None]:
    changed = here.decide()
    for _ in here.tell(changed):
        here.check()
    return changed


# -------------------------------------------------------------------------------------------------------- leader


def test_a_sum_is_complete_when_each_hash_counts() -> None:
    sums = StoredSums()
    sums.take_report({HALVES[0]: 5})
    assert sums.sum_place(NAMESPACE, 0.0) == PlaceBytes(5, complete=False)
    sums.take_report({HALVES[1]: 7})
    assert sums.sum_place(NAMESPACE, 0.0) == PlaceBytes(12, complete=True)
    sums.take_report({HALVES[1]: 3})
    assert sums.sum_place(NAMESPACE, 0.0) == PlaceBytes(8, complete=True)
    assert sums.sum_place("acme/others", 0.0) == PlaceBytes(0, complete=False)


def test_the_parts_of_a_bundle_count_instead_of_it_and_what_is_left_until_then_of_the_rest() -> None:
    sums = StoredSums()
    sums.take_report({HALVES[0]: 100, HALVES[1]: 1})
    quarters = [StoredBundle(NAMESPACE, each) for each in list_bundle_parts(HALVES[0].bundle, 8)]
    assert len(quarters) == 4
    sums.take_report({quarters[1]: 40})
    sums.check()
    assert abs(sums.sum_place(NAMESPACE, 0.0).bytes - 101) <= 1
    assert sums.sum_place(NAMESPACE, 0.0).complete
    sums.take_report({quarters[0]: 1, quarters[1]: 40, quarters[2]: 2, quarters[3]: 3})
    sums.check()
    assert sums.sum_place(NAMESPACE, 0.0) == PlaceBytes(47, complete=True)
    sums.take_report({HALVES[0]: 60})
    assert sums.sum_place(NAMESPACE, 0.0) == PlaceBytes(61, complete=True)
    sums.check()


def test_a_tenant_is_complete_with_all_its_namespaces() -> None:
    sums = StoredSums()
    assert not sums.sum_place("acme", 0.0).complete
    assert sums.list_tenants_to_list(0.0) == ["acme"]
    sums.set_namespaces("acme", [NAMESPACE, "acme/others"], 0.0)
    assert sums.list_tenants_to_list(1.0) == []
    sums.take_report(dict.fromkeys(HALVES, 4))
    assert sums.sum_place("acme", 0.0) == PlaceBytes(8, complete=False)
    whole = make_bundle_name(0, 1)
    sums.take_report({StoredBundle("acme/others", whole): 1, StoredBundle("acme/new", whole): 2})
    assert sums.sum_place("acme", 0.0) == PlaceBytes(11, complete=True), "a new one counts before it is listed"
    sums.set_namespaces("acme", [NAMESPACE], 0.0)
    assert sums.sum_place("acme", 0.0) == PlaceBytes(8, complete=True)


def test_the_leader_reads_what_no_broker_reports_and_a_report_replaces_that() -> None:
    sums = StoredSums()
    sums.take_report({HALVES[0]: 5})
    sums.sum_place(NAMESPACE, 0.0)
    assert sums.list_incomplete_namespaces(REPORTS_AWAITED_S - 1) == []
    assert sums.list_incomplete_namespaces(REPORTS_AWAITED_S) == [NAMESPACE]
    assert sums.list_bundles_to_read(NAMESPACE, 2, 20.0) == [HALVES[1].bundle]
    sums.on_bundles_read(NAMESPACE, {HALVES[0].bundle: 99, HALVES[1].bundle: 50}, 20.0)
    assert sums.sum_place(NAMESPACE, 20.0) == PlaceBytes(55, complete=True), "the owner knows better"
    assert sums.list_incomplete_namespaces(30.0) == []
    assert sums.list_bundles_to_read(NAMESPACE, 2, 20.0 + READ_AGAIN_S) == [HALVES[1].bundle]
    sums.take_report({HALVES[1]: 51})
    assert sums.list_bundles_to_read(NAMESPACE, 2, 20.0 + READ_AGAIN_S) == []
    assert sums.sum_place(NAMESPACE, 20.0).bytes == 56
    assert sums.list_bundles_to_read(NAMESPACE, 4, 20.0) == []


def test_the_leader_forgets_what_no_report_asks_for() -> None:
    sums = StoredSums()
    sums.take_report(dict.fromkeys(HALVES, 4))
    sums.sum_place(NAMESPACE, 0.0)
    sums.forget_places(PLACES_KEPT_S)
    assert sums.sum_place(NAMESPACE, PLACES_KEPT_S).bytes == 8
    sums.forget_places(3 * PLACES_KEPT_S)
    assert sums.sum_place(NAMESPACE, 3 * PLACES_KEPT_S).bytes == 0


# -------------------------------------------------------------------------------------------------------- broker


def test_limits_are_those_of_the_namespace_and_of_its_tenant() -> None:
    applied = AppliedPolicies(
        namespace_storage_bytes=5, tenant_storage_bytes=6, tenant_storage_policy="producer_exception"
    )
    assert list_storage_limits(NAMESPACE, applied) == {
        NAMESPACE: StorageLimit(5, "producer_request_hold"), "acme": StorageLimit(6, "producer_exception"),
    }  # fmt: skip
    assert list_storage_limits(NAMESPACE, AppliedPolicies()) == {}


def test_a_bundle_counts_its_loaded_topics_and_those_that_left_memory() -> None:
    here, topic, other = here_with(HALVES[0]), Loaded(10), Loaded(3)
    name, second = topic_in(0), topic_in(0, after=200)
    here.on_loaded(name, topic)
    here.on_loaded(second, other)
    measure(here)
    assert here.rows == {HALVES[0]: 13}
    topic.is_ended = True
    measure(here)
    assert here.rows == {HALVES[0]: 13}, "it is idle, and its bytes are stored"
    other.is_ended = other.is_going = True
    measure(here)
    assert here.rows == {HALVES[0]: 10}, "a deleted one stores nothing"
    again = Loaded(12)
    here.on_loaded(name, again)
    measure(here)
    assert here.rows == {HALVES[0]: 12}, "a topic counts once"


def test_a_topic_that_is_loaded_and_deleted_between_two_measurements_stores_nothing() -> None:
    here, name = StoredHere(), topic_in(0)
    here.set_owned({NAMESPACE: LIMIT}, [HALVES[0]])
    here.begin_reading()
    here.end_reading([HALVES[0]], {name: 100})
    measure(here)
    assert here.rows == {HALVES[0]: 100}
    topic = Loaded(100)
    here.on_loaded(name, topic)
    topic.is_ended = topic.is_going = True
    measure(here)
    assert here.rows == {HALVES[0]: 0}


def test_a_bundle_is_not_reported_before_its_idle_topics_are_read() -> None:
    here, name, loaded = StoredHere(), topic_in(0), Loaded(7)
    here.set_owned({NAMESPACE: LIMIT}, [HALVES[0]])
    here.on_loaded(name, loaded)
    measure(here)
    assert here.rows == {}
    assert here.list_unread() == [HALVES[0]]
    here.begin_reading()
    ends = topic_in(0, after=300)
    deleted = Loaded(50)
    here.on_loaded(ends, deleted)
    deleted.is_ended = deleted.is_going = True
    measure(here)
    here.end_reading([HALVES[0]], {name: 5, ends: 50, topic_in(0, after=600): 30, topic_in(1): 1000})
    measure(here)
    assert here.rows == {HALVES[0]: 37}, "what was loaded meanwhile is known better than the list says"


def test_a_divided_bundle_leaves_its_topics_to_its_parts_and_nothing_is_read_again() -> None:
    here, loaded, idle = here_with(HALVES[0]), Loaded(7), Loaded(11)
    names = topic_in(0, 4), topic_in(1, 4)
    here.on_loaded(names[0], loaded)
    here.on_loaded(names[1], idle)
    measure(here)
    idle.is_ended = True
    measure(here)
    parts = [StoredBundle(NAMESPACE, each) for each in list_bundle_parts(HALVES[0].bundle, 4)]
    here.set_owned({NAMESPACE: LIMIT}, parts)
    assert here.list_unread() == []
    measure(here)
    assert here.rows == dict(zip(parts, (7, 11), strict=True))
    here.set_owned({NAMESPACE: LIMIT}, parts[1:])
    measure(here)
    assert here.rows == {parts[1]: 11}, "a part that has moved away does not count here"
    here.set_owned({NAMESPACE: LIMIT}, [*parts[1:], HALVES[1]])
    assert here.list_unread() == [HALVES[1]]


def test_only_what_changed_is_reported_and_all_of_it_after_a_while() -> None:
    here, topic = here_with(*HALVES), Loaded(10)
    here.on_loaded(topic_in(0), topic)
    measure(here)
    report = here.make_report(0.0)
    assert report.bundles == {HALVES[0]: 10, HALVES[1]: 0}
    assert report.places == (NAMESPACE,)
    assert here.make_report(0.5).bundles == report.bundles, "it was not answered"
    here.on_answered(report, {NAMESPACE: PlaceBytes(10, complete=True)}, 1.0)
    assert here.make_report(1.0).bundles == {}
    topic.stored_bytes = 11
    measure(here)
    assert here.make_report(2.0).bundles == {HALVES[0]: 11}
    assert here.make_report(1.0 + RESEND_S).bundles == {HALVES[0]: 11, HALVES[1]: 0}


def test_a_large_broker_reports_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_core, "BUNDLES_PER_REPORT_MAX", 3)
    assert BUNDLES_PER_REPORT_MAX > 3
    bundles = [StoredBundle(NAMESPACE, make_bundle_name(number, 8)) for number in range(8)]
    here, seen = here_with(*bundles), set[StoredBundle]()
    measure(here)
    for at in range(3):
        report = here.make_report(float(at))
        here.on_answered(report, {}, float(at))
        seen |= report.bundles.keys()
    assert seen == set(bundles)


def test_a_limit_that_is_reached_holds_loaded_topics_and_those_that_are_loaded_later() -> None:
    here, topic, late, last = here_with(*HALVES), Loaded(400), Loaded(), Loaded()
    here.on_loaded(topic_in(0), topic)
    measure(here)
    here.on_answered(here.make_report(0.0), {NAMESPACE: PlaceBytes(999, complete=True)}, 0.0)
    assert decide(here) == {}
    topic.stored_bytes = 401
    measure(here)
    assert decide(here) == {NAMESPACE: BacklogQuotaState.STORAGE_HOLD}, "what grew here since the answer counts"
    assert topic.state is BacklogQuotaState.STORAGE_HOLD
    here.on_loaded(topic_in(1), late)
    assert late.state is BacklogQuotaState.STORAGE_HOLD
    topic.stored_bytes = 300
    measure(here)
    assert decide(here) == {NAMESPACE: None}
    assert topic.state is late.state is None
    here.on_answered(here.make_report(1.0), {NAMESPACE: PlaceBytes(2000, complete=False)}, 1.0)
    here.set_owned({NAMESPACE: StorageLimit(1000, "producer_exception")}, HALVES)
    here.on_loaded(topic_in(0, after=900), last)
    assert decide(here) == {NAMESPACE: BacklogQuotaState.STORAGE_REFUSE}
    assert topic.state is last.state is BacklogQuotaState.STORAGE_REFUSE
    here.set_owned({}, [])
    assert decide(here) == {NAMESPACE: None}
    assert topic.state is None
    assert here.reached == {NAMESPACE: 2}


def test_an_incomplete_sum_lets_no_producer_go_on() -> None:
    here, topic = here_with(*HALVES), Loaded(10)
    here.on_loaded(topic_in(0), topic)
    measure(here)
    here.on_answered(here.make_report(0.0), {NAMESPACE: PlaceBytes(1500, complete=True)}, 0.0)
    decide(here)
    here.on_answered(here.make_report(1.0), {NAMESPACE: PlaceBytes(10, complete=False)}, 1.0)
    assert decide(here) == {}
    assert here.estimate(NAMESPACE) == 1500
    assert not here.is_complete(NAMESPACE)
    here.on_answered(here.make_report(2.0), {NAMESPACE: PlaceBytes(10, complete=True)}, 2.0)
    assert decide(here) == {NAMESPACE: None}


def test_to_refuse_is_stronger_than_to_wait_and_a_tenant_bounds_its_namespaces() -> None:
    limits = {NAMESPACE: StorageLimit(10, "producer_request_hold"), "acme": StorageLimit(10, "producer_exception")}
    here, topic = here_with(*HALVES, limits=limits), Loaded(10)
    here.on_loaded(topic_in(0), topic)
    measure(here)
    decide(here)
    assert topic.state is BacklogQuotaState.STORAGE_REFUSE
    assert here.find_state("acme/others") is BacklogQuotaState.STORAGE_REFUSE
    assert here.find_state("other/orders") is None


def test_a_bundle_that_comes_or_goes_does_not_change_what_a_broker_knows_of_the_sum() -> None:
    here, topic = here_with(HALVES[0]), Loaded(400)
    here.on_loaded(topic_in(0), topic)
    measure(here)
    here.on_answered(here.make_report(0.0), {NAMESPACE: PlaceBytes(900, complete=True)}, 0.0)
    here.set_owned({NAMESPACE: LIMIT}, HALVES)
    here.begin_reading()
    here.end_reading([HALVES[1]], {topic_in(1): 500})
    measure(here)
    assert here.estimate(NAMESPACE) == 900
    here.set_owned({NAMESPACE: LIMIT}, HALVES[1:])
    measure(here)
    assert here.estimate(NAMESPACE) == 900


# ---------------------------------------------------------------------------------------------------- simulation


class Disk:
    """A topic as it is stored: its bytes, and those of them that its list of ledgers says."""

    def __init__(self) -> None:
        self.size = self.listed = 0


class Served:
    """A topic at its owner."""

    def __init__(self, disk: Disk) -> None:
        self._disk, self._last = disk, 0
        self.is_ended = self.is_going = False
        self.state: BacklogQuotaState | None = None

    @property
    def stored_bytes(self) -> int:
        return self._last if self.is_ended else self._disk.size

    def set_storage_state(self, state: BacklogQuotaState | None) -> None:
        self.state = state

    def publish(self, size: int) -> int:
        published = size if self.state is None else 0
        self._disk.size += published
        return published

    def close(self, *, listed: bool) -> None:
        self._last, self.is_ended = self._disk.size, True
        if listed:
            self._disk.listed = self._disk.size


class Cluster:
    """Brokers, bundles and topics; each step is a second. `owners`: the broker of each bundle."""

    def __init__(self, seed: int, limit: int, brokers: int = 3, topics: int = 24) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.bundles = 4
        self.disks = {f"persistent://{NAMESPACE}/t{number}": Disk() for number in range(topics)}
        self.limits = {NAMESPACE: StorageLimit(limit, "producer_request_hold")}
        self.here = {f"b{number}": StoredHere() for number in range(brokers)}
        self.served: dict[str, dict[str, Served]] = {name: {} for name in self.here}
        self.reading: dict[str, tuple[list[StoredBundle], dict[str, int]]] = {}
        self.owners: dict[str, str] = {}
        self.leader, self.sums = "b0", StoredSums()
        self.made = brokers

    def bundle_of(self, full: str) -> str:
        return make_bundle_name(compute_bundle_number(full, self.bundles), self.bundles)

    def owner(self, full: str) -> str:
        return self.owners.setdefault(self.bundle_of(full), self.rng.choice(sorted(self.here)))

    def load(self, full: str) -> Served:
        name = self.owner(full)
        found = self.served[name].get(full)
        if found is None:
            found = self.served[name][full] = Served(self.disks[full])
            self.here[name].on_loaded(full, found)
        return found

    def close_bundle(self, bundle: str, *, listed: bool) -> None:
        name = self.owners.pop(bundle, None)
        for full in [full for full in self.served.get(name or "", ()) if self.bundle_of(full) == bundle]:
            self.served[name or ""].pop(full).close(listed=listed)

    # -------------------------------------------------------------- what happens
    def idle(self) -> None:
        for topics in self.served.values():
            if topics:
                topics.pop(self.rng.choice(sorted(topics))).close(listed=True)

    def delete(self) -> None:
        full = self.rng.choice(sorted(self.disks))
        topic = self.load(full)
        topic.is_going = True
        topic.close(listed=True)
        del self.served[self.owner(full)][full]
        self.disks[full] = Disk()

    def move(self) -> None:
        bundle = make_bundle_name(self.rng.randrange(self.bundles), self.bundles)
        self.close_bundle(bundle, listed=True)
        self.owners[bundle] = self.rng.choice(sorted(self.here))

    def split(self) -> None:
        if self.bundles < 32:
            self.bundles *= 2
            self.owners = {part: name for bundle, name in self.owners.items()
                           for part in list_bundle_parts(bundle, self.bundles)}  # fmt: skip

    def die(self) -> None:
        if len(self.here) > 2:
            name = self.rng.choice(sorted(self.here))
            for bundle in [bundle for bundle, owner in self.owners.items() if owner == name]:
                self.close_bundle(bundle, listed=False)
            del self.here[name], self.served[name]
            self.reading.pop(name, None)
            if name == self.leader:
                self.lead()

    def join(self) -> None:
        self.made += 1
        self.here[f"b{self.made}"], self.served[f"b{self.made}"] = StoredHere(), {}

    def lead(self) -> None:
        self.leader, self.sums = self.rng.choice(sorted(self.here)), StoredSums()

    # -------------------------------------------------------------- a second
    def second(self, *, lost: float = 0.0) -> None:
        self.now += 1
        for name, here in self.here.items():
            owned = [StoredBundle(NAMESPACE, bundle) for bundle, owner in self.owners.items() if owner == name]
            missing = here.list_missing_namespaces(owned)
            for full, topic in self.served[name].items() if missing else ():
                here.on_loaded(full, topic)
            here.set_owned(self.limits if owned else {}, owned)
            measure(here)
            if self.rng.random() >= lost:
                report = here.make_report(self.now)
                self.sums.take_report(report.bundles)
                answer = {place: self.sums.sum_place(place, self.now) for place in report.places}
                here.on_answered(report, answer, self.now)
            decide(here)
            self._read(name, here)
        self._survey()
        self.sums.check()

    def _read(self, name: str, here: StoredHere) -> None:
        """Reads lists of ledgers, which takes some seconds."""
        if name in self.reading and self.rng.random() < 0.5:
            here.end_reading(*self.reading.pop(name))
        elif name not in self.reading and (unread := here.list_unread()):
            here.begin_reading()
            names = {each.bundle for each in unread}
            self.reading[name] = unread, {
                full: disk.listed for full, disk in self.disks.items() if self.bundle_of(full) in names
            }  # fmt: skip

    def _survey(self) -> None:
        for namespace in self.sums.list_incomplete_namespaces(self.now):
            found = dict.fromkeys(self.sums.list_bundles_to_read(namespace, self.bundles, self.now), 0)
            for full, disk in self.disks.items():
                if self.bundle_of(full) in found:
                    found[self.bundle_of(full)] += disk.listed
            self.sums.on_bundles_read(namespace, found, self.now)

    @property
    def stored(self) -> int:
        return sum(disk.size for disk in self.disks.values())


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_every_broker_knows_the_sum_when_it_is_quiet(seed: int) -> None:
    cluster = Cluster(seed, limit=10**9)
    once = [cluster.delete, cluster.move, cluster.split, cluster.die, cluster.join, cluster.lead]
    happenings = [cluster.idle] * 4 + once
    for _ in range(150):
        for full in cluster.rng.sample(sorted(cluster.disks), 6):
            cluster.load(full).publish(cluster.rng.randrange(1000))
        cluster.rng.choice(happenings)()
        cluster.second(lost=0.2)
    for full in cluster.disks:  # the open ledgers of brokers that died
        cluster.load(full)
    for _ in range(int(REPORTS_AWAITED_S + RESEND_S)):
        cluster.second()
    assert cluster.stored > 0
    for name in set(cluster.owners.values()):
        assert cluster.here[name].estimate(NAMESPACE) == cluster.stored
        assert cluster.here[name].is_complete(NAMESPACE)


@pytest.mark.parametrize("seed", range(8))
def test_a_sum_exceeds_its_limit_by_what_is_published_in_three_seconds_at_most(seed: int) -> None:
    rate, limit = 6 * 1000, 100_000
    cluster = Cluster(seed, limit)
    happenings = [cluster.idle] * 3 + [cluster.move, cluster.split, cluster.join, cluster.delete]
    for full in cluster.disks:
        cluster.load(full)
    for _ in range(10):
        cluster.second()
    held = released = 0
    for _ in range(200):
        before = cluster.stored
        for full in cluster.rng.sample(sorted(cluster.disks), 6):
            cluster.load(full).publish(1000)
        held += cluster.stored < before + rate
        cluster.rng.choice(happenings)()
        released += cluster.stored < limit <= before
        cluster.second()
        assert cluster.stored <= limit + 3 * rate
    assert held > 20, "the limit is reached"
    assert released, "a deletion lets producers go on"


@pytest.mark.parametrize("seed", range(8))
def test_deaths_and_other_leaders_let_no_producer_go_on_above_the_limit_for_long(seed: int) -> None:
    rate, limit = 6 * 1000, 100_000
    cluster = Cluster(seed, limit)
    for full in cluster.disks:
        cluster.load(full)
    for at in range(300):
        for full in cluster.rng.sample(sorted(cluster.disks), 6):
            cluster.load(full).publish(1000)
        if at % 20 == 19:
            cluster.rng.choice([cluster.die, cluster.join, cluster.lead, cluster.move])()
        cluster.second(lost=0.2)
        for full in cluster.disks:
            cluster.load(full)  # clients of all topics come again: open ledgers of the dead count
    assert limit <= cluster.stored <= limit + 6 * rate
