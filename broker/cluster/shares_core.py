"""Limits in sum over brokers: which part of a limit each broker may use. All numbers are parts of a limit, 0 to 1.

A *limit* is a text that all brokers build in the same way (`broker/topic/statistics.py` `SharedRate`), such as the
publish rate of a namespace. Each broker measures how much of each limit it uses, and reports to the leader what it
wants (`HeldShares.make_report`). The leader answers what the broker may use (`ShareGrants.grant_shares`), and the
broker uses that (`HeldShares.on_granted`). Limits are values of policies that each broker reads itself: a share is a
part of the limit, so that a changed policy holds at once and in sum, and the leader need not know it.

| what a broker may use | when |
|---|---|
| the whole limit | it is the only registered broker |
| what the leader granted | it has had an answer to a report of the last SHRINK_AFTER_S |
| REST_SHARE / n, of a limit that it has not reported | … n: the number of registered brokers |
| the smaller one of that and 1 / n | no answer for SHRINK_AFTER_S |
| 1 / n | no answer for GROW_AFTER_S: the leader is away, or there is none |

**The bound.** The leader counts for each broker the most that it may use until its next report: the larger one of what
it was granted last and of what it said that it holds (an answer may be lost); 1 / n, if that is more, from the time on
at which it might have fallen back (SILENT_AFTER_S < GROW_AFTER_S); REST_SHARE / n if it reports and does not name the
limit. It grants a broker no more than what the others leave. So a share grows only after another one is known to have
shrunk, and the sum is at most 1. Exceptions, each bounded:

- A broker has REST_SHARE / n of each limit in any case: the sum exceeds 1 by at most REST_SHARE.
- A broker that starts while there is no leader, and others still use what an earlier one granted: 1 / n, for less than
  GROW_AFTER_S.
- A broker that has just joined: brokers that have fallen back keep 1 / n of the older n until they read the list of
  brokers again (BROKERS_READ_S): the sum is at most 1 + 1 / n for so long. One that was alone, and had no limit, uses
  the whole limit for so long after it gets one.
- A broker that serves on without its registration (its metadata session is lost): 1 / n each.
- Several leaders grant their own reporters only what the others leave, who count as silent: the sum stays within 1. For
  the first GROW_AFTER_S a new leader lets no share grow before it has heard all registered brokers.
- Calls that are lost, or take longer than a second, for SILENT_AFTER_S and more: a broker may fall back before the
  others have shrunk. The sum is then at most 1 + 2 / n in the simulation of a network that loses most calls.
- A report that lies about what is wanted takes away no more than the fair share of others. One that lies about what is
  held delays others. A broker that uses more than its share exceeds the limit by that: no one can stop it.

Each broker has a token bucket of its share, which saves up one second's worth: after a pause, the sum of a second is up
to twice the limit, as with any rate here.

**Fairness.** Shares are max-min fair: no broker gets more than it wants (HEADROOM included) while another one gets less
than it wants and less than an equal part. What is left over is divided equally among the brokers that report the limit.
Guarding tests: tests/broker/cluster/test_shares.py; the simulation is tests/broker/cluster/test_shares_simulation.py.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from heapq import nlargest
from typing import NamedTuple

from .stored_core import StoredHere, StoredSums

REPORT_INTERVAL_S = 1.0
"""Seconds between two reports of a broker that uses a limit."""
IDLE_REPORT_INTERVAL_S = 2.0
"""… of a broker that uses none: the leader must hear it, or it counts 1 / n for it."""
SHRINK_AFTER_S = 6.0
"""Seconds without an answer after which a broker uses 1 / n at most: above 1 / n it no longer counts on its grant."""
SILENT_AFTER_S = 5.0
"""Seconds without a report after which the leader counts at least 1 / n for a broker: before it grows to that, the
others have reported once more, and have shrunk."""
GROW_AFTER_S = 12.0
"""Seconds without an answer after which a broker uses 1 / n, also if it was granted less. Longer than SHRINK_AFTER_S
and the longest time between two settings of the rates, 4 s without metadata and leader: first all with more shrink."""
BROKERS_READ_S = 2.0
"""Seconds between two readings of the list of registered brokers, by the leader and by each broker that uses a limit.
"""
REST_SHARE = 0.05
"""The part of a limit that all brokers have together of a limit that they do not use; each begins with its part of
that. More: a broker that begins to publish is slow for less long, and the others have less."""
HEADROOM = 1.1
"""A broker wants so many times what it uses, so that it does not wait as soon as it uses a little more."""
FORGET_WANTED = 0.25
"""What a broker wanted counts a quarter after each report."""
HELD_AHEAD_S = 3.0
"""A broker says what it holds within so many seconds without an answer: the leader counts that it falls back before it
does."""
SURVEY_INTERVAL_S = 0.25
"""Seconds for which the leader keeps what it found out about all brokers: which are silent, and what is fair."""
WANTED_MIN = 1e-3
"""A broker that wants a smaller part of a limit does not report the limit: it gets no more than REST_SHARE / n."""
LIMITS_PER_REPORT_MAX = 1000
"""Limits in a report, those that are wanted most; of the others a broker uses REST_SHARE / n."""


class WantedShare(NamedTuple):
    """What a broker says of one limit: the part that it wants, and the part that it holds, which it may use until it
    has an answer."""

    wanted: float
    held: float


class GrantedShare(NamedTuple):
    """What the leader answers for one limit: the part that the broker may use; what all brokers want together; how many
    brokers want it."""

    share: float
    wanted: float
    brokers: int


class ShareReport(NamedTuple):
    """A report of a broker. `run` is of its process, and `number` counts its reports: a report that comes late, after a
    later one, is ignored."""

    broker: str
    run: str
    number: int
    limits: Mapping[str, WantedShare]


def clamp_share(value: float) -> float:
    """Returns `value` within 0 and 1; 0 if it is not a number."""
    return min(max(value, 0.0), 1.0) if math.isfinite(value) else 0.0


def divide_fairly(wanted: Mapping[str, float], least: float, room: float) -> dict[str, float]:
    """Divides `room` among those in `wanted`, max-min fair: each gets at least `least`, and at most what it wants; what
    is left over then is divided equally. The sum of the result is `room`, or more only if `least` for each is more."""
    shares = dict.fromkeys(wanted, least)
    left = room - least * len(wanted)
    waiting = sorted(wanted, key=lambda name: (wanted[name], name))
    for at, name in enumerate(waiting):
        if left <= 0:
            return shares
        more = min(max(0.0, wanted[name] - least), left / (len(waiting) - at))
        shares[name] += more
        left -= more
    for name in waiting:
        shares[name] += max(0.0, left) / len(waiting)
    return shares


# -------------------------------------------------------------------------------------------------------- leader


class _Reporter:
    """What the leader knows of a broker that has reported: its last report, and the limits in it."""

    __slots__ = ("heard_s", "limits", "number", "run")

    def __init__(self, run: str) -> None:
        self.run = run
        self.number = -1
        self.heard_s = -math.inf
        self.limits: set[str] = set()


class _Limit:
    """What the leader knows of a limit, by the brokers that report it: what each wants, and the most that each may use
    until its next report (`counted`, with the sum `total`). `fair`: what is fair, as of `surveyed_s`; `wanted_total`:
    what all want, as of then."""

    __slots__ = ("counted", "fair", "surveyed_s", "total", "wanted", "wanted_total")

    def __init__(self) -> None:
        self.wanted: dict[str, float] = {}
        self.counted: dict[str, float] = {}
        self.total = self.wanted_total = 0.0
        self.fair: dict[str, float] = {}
        self.surveyed_s = -math.inf

    def count(self, broker: str, share: float) -> None:
        """Notes the most that the broker may use."""
        self.total += share - self.counted.get(broker, 0.0)
        self.counted[broker] = share

    def forget(self, broker: str) -> None:
        """Forgets a broker that does not report the limit any more."""
        del self.wanted[broker]
        self.total -= self.counted.pop(broker)


class ShareGrants:
    """The shares that the leader has granted. `now`: monotonic seconds; the time at which it began to lead. `brokers`:
    the number n of brokers, those that are registered and others that have just reported."""

    def __init__(self, now: float) -> None:
        self._since_s = now
        self._reporters: dict[str, _Reporter] = {}
        self._limits: dict[str, _Limit] = {}
        self._registered: frozenset[str] = frozenset()
        self._silent: tuple[float, set[str]] = (-math.inf, set())  # when it was found out, and who is silent
        self.brokers = 1

    def set_registered(self, brokers: Iterable[str], now: float) -> None:
        """Sets the names of the registered brokers. Forgets others that have not reported for GROW_AFTER_S."""
        self._registered = frozenset(brokers)
        for name in [name for name, each in self._reporters.items() if name not in self._registered]:
            if now - self._reporters[name].heard_s > GROW_AFTER_S:
                self._forget(name)
        self._count_brokers()

    def _count_brokers(self) -> None:
        """Called when brokers have come or gone."""
        self.brokers = max(1, len(self._registered.union(self._reporters)))
        self._silent = (-math.inf, set())

    def _forget(self, broker: str) -> None:
        for limit in self._reporters.pop(broker).limits:
            self._leave(limit, broker)

    def _leave(self, limit: str, broker: str) -> None:
        found = self._limits[limit]
        found.forget(broker)
        if not found.counted:
            del self._limits[limit]

    def grant_shares(self, report: ShareReport, now: float) -> dict[str, GrantedShare] | None:
        """Returns what the broker may use of each limit in its report; None if the report is older than another one of
        the broker. Limits above LIMITS_PER_REPORT_MAX are left out."""
        broker, reporter = report.broker, self._reporters.get(report.broker)
        if reporter is None or reporter.run != report.run:
            if reporter is not None:
                self._forget(broker)
            reporter = self._reporters[broker] = _Reporter(report.run)
            self._count_brokers()
        if report.number <= reporter.number:
            return None
        reporter.number, reporter.heard_s = report.number, now
        limits = dict(list(report.limits.items())[:LIMITS_PER_REPORT_MAX])
        for limit in reporter.limits - limits.keys():
            self._leave(limit, broker)
        reporter.limits = set(limits)
        silent = self._find_silent(now)
        silent.discard(broker)
        return {limit: self._grant(broker, limit, given, silent, now) for limit, given in limits.items()}

    def _find_silent(self, now: float) -> set[str]:
        """Returns the brokers that may have fallen back to 1 / n, or are about to, as of SURVEY_INTERVAL_S ago."""
        if not 0 <= now - self._silent[0] < SURVEY_INTERVAL_S:
            self._silent = now, {
                name for name in self._registered.union(self._reporters)
                if (found := self._reporters.get(name)) is None or now - found.heard_s > SILENT_AFTER_S
            }  # fmt: skip
        return self._silent[1]

    def _grant(self, broker: str, limit: str, given: WantedShare, silent: set[str], now: float) -> GrantedShare:
        found, held = self._limits.setdefault(limit, _Limit()), clamp_share(given.held)
        found.wanted[broker] = clamp_share(given.wanted)
        if not 0 <= now - found.surveyed_s < SURVEY_INTERVAL_S or broker not in found.fair:
            self._survey(found, silent, now)
        own = found.counted.get(broker, 0.0)
        if self._may_grow(now):
            share = min(found.fair[broker], 1.0 - self._count_others(broker, found, silent))
        else:  # brokers that have not reported yet may hold the rest
            share = min(held, 1.0 - (found.total - own))
        share = max(share, REST_SHARE / self.brokers)
        found.count(broker, max(share, held))
        return GrantedShare(share, found.wanted_total, len(found.wanted))

    def _may_grow(self, now: float) -> bool:
        return now - self._since_s > GROW_AFTER_S or self._registered.issubset(self._reporters)

    def _survey(self, found: _Limit, silent: set[str], now: float) -> None:
        """Finds out what is fair for each broker that reports the limit. Adds up the sums anew: rounding does not add
        up over time."""
        n = self.brokers
        wanted = {name: each for name, each in found.wanted.items() if name not in silent}
        room = 1.0 - len(silent) / n - REST_SHARE / n * (n - len(silent) - len(wanted))
        found.fair = divide_fairly(wanted, REST_SHARE / n, room)
        found.total, found.wanted_total = sum(found.counted.values()), sum(found.wanted.values())
        found.surveyed_s = now

    def _count_others(self, broker: str, found: _Limit, silent: Collection[str]) -> float:
        """Returns the most that all other brokers may use of the limit now."""
        n, counted = self.brokers, found.counted
        total, named = found.total - counted.get(broker, 0.0), len(counted) - (broker in counted)
        for name in silent:  # 1 / n at least
            if name != broker:
                total += max(0.0, 1.0 / n - counted.get(name, 0.0))
                named += name not in counted
        return total + REST_SHARE / n * (n - 1 - named)

    def sum_counted(self, limit: str, now: float) -> float:
        """Returns the most that all brokers may use of the limit until their next reports."""
        return self._count_others("", self._limits.get(limit) or _Limit(), self._find_silent(now)) + (
            REST_SHARE / self.brokers
        )

    def check(self) -> None:
        """Raises AssertionError if a rule of this object does not hold."""
        assert self.brokers == max(1, len(self._registered.union(self._reporters))), "brokers are miscounted"
        for limit, found in self._limits.items():
            assert found.counted, f"{limit} is kept without a broker that reports it"
            assert found.counted.keys() == found.wanted.keys(), f"of {limit} is wanted what is not counted"
            assert abs(found.total - sum(found.counted.values())) < 1e-6, f"the sum of {limit} is wrong"
            assert all(limit in self._reporters[name].limits for name in found.counted), f"{limit} is not reported"
        for name, reporter in self._reporters.items():
            assert all(name in self._limits[limit].counted for limit in reporter.limits), f"{name} is not counted"


# -------------------------------------------------------------------------------------------------------- broker


class HeldShares:
    """The shares of one broker, and what it wants. `broker`: its name; `run`: a text of its process; `now`: monotonic
    seconds. `brokers`: the number of registered brokers, which the owner keeps current; 0: not known yet."""

    def __init__(self, broker: str, run: str, now: float) -> None:
        self._broker = broker
        self._run = run
        self._number = self._number_answered = 0
        self._answered_s = now  # when the last report was sent that was answered
        self._sent_s = now
        self._granted: dict[str, GrantedShare] = {}
        self._wanted: dict[str, float] = {}
        self.brokers = 0

    def get_share(self, limit: str, now: float) -> float:
        """Returns the part of the limit that this broker may use now: above 0, and at most 1."""
        n = max(1, self.brokers)
        if self.brokers == 1:
            return 1.0
        silent_s = now - self._answered_s
        if silent_s >= GROW_AFTER_S:
            return 1.0 / n
        granted = self._granted.get(limit)
        share = REST_SHARE / n if granted is None else max(granted.share, REST_SHARE / n)
        return min(share, 1.0 / n) if silent_s >= SHRINK_AFTER_S else share

    def get_granted(self, limit: str) -> GrantedShare | None:
        """Returns what the leader answered last for the limit; None if it was not asked for."""
        return self._granted.get(limit)

    def begin_without_leader(self) -> None:
        """Called when there is no leader: a broker that has had no answer since it began uses 1 / n at once, as the
        others do or soon will."""
        if self._number_answered == 0:
            self._answered_s = -math.inf

    def seconds_without_answer(self, now: float) -> float:
        """Returns how long ago the last report was sent that the leader answered, in seconds."""
        return now - self._answered_s

    def note_use(self, limit: str, used: float, throttled: bool) -> None:
        """Notes how much of the limit was used since the last report (1: all of it), and whether something waited for
        it. What waits wants everything: the leader divides that fairly."""
        kept = FORGET_WANTED * self._wanted.get(limit, 0.0)
        wanted = 1.0 if throttled else max(clamp_share(HEADROOM * used), kept)
        if wanted >= WANTED_MIN:
            self._wanted[limit] = wanted
        else:
            self._wanted.pop(limit, None)

    def keep_limits(self, limits: Collection[str]) -> None:
        """Forgets all limits but those in `limits`."""
        for limit in self._wanted.keys() - set(limits):
            del self._wanted[limit]

    @property
    def wants_any(self) -> bool:
        """Returns True if this broker wants a part of any limit."""
        return bool(self._wanted)

    def make_report(self, now: float) -> ShareReport:
        """Returns the next report to the leader. What is not in it is given back at once."""
        named = nlargest(LIMITS_PER_REPORT_MAX, self._wanted, key=lambda limit: (self._wanted[limit], limit))
        held = {
            limit: WantedShare(
                self._wanted[limit], max(self.get_share(limit, now), self.get_share(limit, now + HELD_AHEAD_S))
            )
            for limit in named
        }
        self._granted = {limit: share for limit, share in self._granted.items() if limit in held}
        self._number += 1
        self._sent_s = now
        return ShareReport(self._broker, self._run, self._number, held)

    def on_granted(self, report: ShareReport, granted: Mapping[str, GrantedShare]) -> None:
        """Notes the leader's answer to the report that was made last; the answer to another one is ignored."""
        if report.number == self._number:
            self._answered_s, self._number_answered = self._sent_s, self._number
            self._granted = {limit: granted[limit] for limit in report.limits if limit in granted}


# --------------------------------------------------------------------------------------------------------- state


class LimitUse(NamedTuple):
    """What a broker measured of one limit until its last report: the tokens spent and the waits since the limit was
    set, and the part of the limit that was used."""

    spent: float
    throttled: int
    used: float


class SharingState:
    """What a broker knows of limits in sum over brokers. `held`: its own shares; `grants`: those that it granted, None
    unless it is the leader; `uses`: what it measured, by limit; `answered` and `failed` count its reports. `stored`:
    what it stores of limited places; `sums`: what all brokers store, None unless it is the leader or alone."""

    __slots__ = ("answered", "failed", "grants", "held", "stored", "sums", "uses")

    def __init__(self, broker: str, run: str, now: float) -> None:
        self.held = HeldShares(broker, run, now)
        self.grants: ShareGrants | None = None
        self.uses: dict[str, LimitUse] = {}
        self.answered = self.failed = 0
        self.stored = StoredHere()
        self.sums: StoredSums | None = None

    def statistics(self) -> dict[str, int]:
        """Returns, by the metric's name: `leader`, 1 if this broker divides the limits, else 0; `limits`, how many of
        them hold here; `reports` and `reports_failed`, those that were answered, and those that were not."""
        return {
            "leader": int(self.grants is not None), "limits": len(self.uses) + len(self.stored.limits),
            "reports": self.answered, "reports_failed": self.failed,
        }  # fmt: skip
