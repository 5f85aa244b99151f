"""What bounds the calls of a program's code: `RateLimiter`, and `CircuitBreaker`. Both are for handlers of messages
(`Consumer.listen`) and for anything else: they know nothing of messages. All methods may be called from any thread,
but the `wait` of asyncio, which belongs to an event loop.

The rate of a RateLimiter may follow a key of a topic (`watch`), so that an operator changes it for all programs. It is
a topic, and not a policy, because whoever may consume reads it, and is told of a change at once: a policy is read by
administrators, who would have to ask again and again.

Their cores are runtime/token_bucket.py, and `BreakerCore` below its heading (breaker).
Guards: tests/client/common/test_rate_limits.py."""

from __future__ import annotations

import asyncio
import enum
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf, isfinite
from typing import Any, Protocol, TypeVar

from ...runtime.clock import SystemClock
from ...runtime.token_bucket import TokenBucket
from .checks import (
    DURATION_MS_MAX,
    NAME,
    YES_OR_NO,
    ParameterCheck,
    WrongValue,
    check_parameter,
    make_whole_number_check,
)
from .errors import OperationNotSupported, Timeout

_LOG = logging.getLogger("magnetar.client")

LOOK_S = 0.5
"""Longest sleep in seconds of one that waits: so soon it sees that the rate was changed, or that Ctrl-C was pressed."""
RATE = ParameterCheck("a number above 0 (per second)", (int, float), lambda rate: isfinite(rate) and rate > 0)
BURST = ParameterCheck("a number from 1 on, or None", (int, float), lambda n: isfinite(n) and n >= 1, True)
COUNT = ParameterCheck("a number from 0 on", (int, float), lambda n: isfinite(n) and n >= 0)
SECONDS = ParameterCheck(
    "seconds, from 0 on, or None", (int, float), lambda s: 0 <= s <= DURATION_MS_MAX / 1000, True
)  # fmt: skip


class RateView(Protocol):
    """The interface of a table view, of asyncio or blocking."""

    def for_each_and_listen(self, callback: Callable[[str, Any], object]) -> object: ...


View = TypeVar("View", bound=RateView, covariant=True)


class OpensAsyncViews(Protocol[View]):
    """The interface of an asyncio Client that `AsyncRateLimiter.watch` uses."""

    async def create_table_view(self, topic: str) -> View: ...


class OpensViews(Protocol[View]):
    """The interface of a blocking Client that `RateLimiter.watch` uses."""

    def create_table_view(self, topic: str) -> View: ...


def parse_rate(value: bytes) -> float | None:
    """Returns the rate per second that the value of a topic is, a number as text; None if it is none."""
    try:
        found = float(value)
    except ValueError:
        return None
    return found if RATE.find_error_class(found) is None else None


class SharedRateLimiter:
    """A token bucket that several threads may share: `rate` permits a second, of which at most `burst` are saved; with
    `leaky` none. The base of both RateLimiters, which wait in different ways."""

    def __init__(
        self, rate: float, *, burst: float | None = None, leaky: bool = False,
        clock: Callable[[], float] = SystemClock.monotonic,
    ) -> None:  # fmt: skip
        check_parameter("rate", RATE, rate)
        check_parameter("burst", BURST, burst)
        check_parameter("leaky", YES_OR_NO, leaky)
        if leaky and burst is not None:
            raise WrongValue("leaky is a burst of 1: give one of them")
        self._clock = clock
        self._lock = threading.Lock()
        self._burst = 1.0 if leaky else burst
        self._bucket = TokenBucket(float(rate), clock(), self._burst_at(rate))
        self._first_rate = rate

    def _burst_at(self, rate: float) -> float:
        return max(1.0, rate) if self._burst is None else self._burst

    @property
    def rate(self) -> float:
        """The rate per second. Set it to change the rate from now on."""
        return self._bucket.rate

    @rate.setter
    def rate(self, rate: float) -> None:
        check_parameter("rate", RATE, rate)
        with self._lock:
            self._bucket.set_rate(float(rate), self._clock(), self._burst_at(rate))

    def _follow(self, view: RateView, key: str) -> None:
        def change(changed: str, value: bytes) -> None:
            if changed != key:
                return
            rate = self._first_rate if not value else parse_rate(value)
            if rate is None:
                _LOG.warning("the rate %r stays %g a second: %r is no number above 0", key, self.rate, value[:80])
            else:
                _LOG.info("the rate %r is %g a second", key, rate)
                self.rate = rate

        view.for_each_and_listen(change)

    def allow(self, count: float = 1) -> bool:
        """Returns whether `count` may begin now; if so, counts them."""
        check_parameter("count", COUNT, count)
        with self._lock:
            return self._bucket.take(count, self._clock())

    def delay_s(self, count: float = 1) -> float:
        """Returns the seconds until `allow(count)` returns True, if no other caller is faster."""
        check_parameter("count", COUNT, count)
        with self._lock:
            return self._bucket.wait_s(count, self._clock())

    def _too_slow(self, timeout_s: float | None) -> Timeout:
        return Timeout(f"the rate of {self.rate:g} a second allows no more within {timeout_s:g} s")


class AsyncRateLimiter(SharedRateLimiter):
    """Limits a rate, such as calls per second: `magnetar.asyncio.RateLimiter`.

        limiter = RateLimiter(10)                # ten a second, and up to ten at once after a pause
        limiter = RateLimiter(10, leaky=True)    # one each tenth of a second
        if limiter.allow(): …                    # or refuse
        await limiter.wait()                     # or wait

    `burst`: how many may begin at once after a pause; None: as many as in a second. `leaky`: a burst of 1. The rate
    may be changed at any time (`limiter.rate = 5`): who waits sees it within half a second. Several consumers may share
    one object. A call of more than `burst` waits for a full bucket, and what follows waits for the rest."""

    _turn: asyncio.Lock | None = None

    async def watch(self, client: OpensAsyncViews[View], topic: str, key: str) -> View:
        """Follows a key of a compacted topic: its value, a number as text, is the rate from now on, and whenever it
        changes. Returns the table view that reads the topic; close it to end this. `client`: an asyncio Client.

            limiter = RateLimiter(10)
            await limiter.watch(client, "rates", "vendor")
            await producer.send(b"50", partition_key="vendor")      # an operator, of a producer of "rates"

        Without the key, and when it is deleted, the rate is that with which the limiter was made. A value that is no
        number above 0 changes nothing, and is logged. When the topic is not read any more, the last rate stays."""
        check_parameter("key", NAME, key)
        view = await client.create_table_view(topic)
        self._follow(view, key)
        return view

    async def wait(self, count: float = 1, timeout: float | None = None) -> None:
        """Waits until `count` may begin, and counts them. Callers of one event loop have their turn in order. Raises
        Timeout if that is not within `timeout` seconds; then, and if the caller is cancelled, counts nothing."""
        check_parameter("timeout", SECONDS, timeout)
        if self._turn is None:
            self._turn = asyncio.Lock()
        try:
            async with asyncio.timeout(timeout), self._turn:
                while not self.allow(count):  # noqa: ASYNC110 - it waits for time alone
                    await asyncio.sleep(min(LOOK_S, self.delay_s(count)))
        except TimeoutError:
            raise self._too_slow(timeout) from None


class RateLimiter(SharedRateLimiter):
    """Limits a rate, such as calls per second.

        limiter = magnetar.RateLimiter(10)               # ten a second, and up to ten at once after a pause
        limiter = magnetar.RateLimiter(10, leaky=True)   # one each tenth of a second
        if limiter.allow(): …                            # or refuse
        limiter.wait()                                   # or wait, in this thread

    `burst`: how many may begin at once after a pause; None: as many as in a second. `leaky`: a burst of 1. The rate
    may be changed at any time (`limiter.rate = 5`): who waits sees it within half a second. Several consumers and
    threads may share one object. A call of more than `burst` waits for a full bucket, and what follows waits for the
    rest."""

    def watch(self, client: OpensViews[View], topic: str, key: str) -> View:
        """Follows a key of a compacted topic: its value, a number as text, is the rate from now on, and whenever it
        changes. Returns the table view that reads the topic; close it to end this. `client`: a Client.

            limiter = magnetar.RateLimiter(10)
            limiter.watch(client, "rates", "vendor")
            producer.send(b"50", partition_key="vendor")            # an operator, of a producer of "rates"

        Without the key, and when it is deleted, the rate is that with which the limiter was made. A value that is no
        number above 0 changes nothing, and is logged. When the topic is not read any more, the last rate stays."""
        check_parameter("key", NAME, key)
        view = client.create_table_view(topic)
        self._follow(view, key)
        return view

    def wait(self, count: float = 1, timeout: float | None = None) -> None:
        """Waits in the calling thread until `count` may begin, and counts them. Raises Timeout if that is not within
        `timeout` seconds, and then counts nothing."""
        check_parameter("timeout", SECONDS, timeout)
        deadline = None if timeout is None else self._clock() + timeout
        never = threading.Event()
        while not self.allow(count):
            left_s = LOOK_S if deadline is None else deadline - self._clock()
            if left_s <= 0:
                raise self._too_slow(timeout)
            never.wait(min(LOOK_S, left_s, self.delay_s(count)))


# ------------------------------------------------------------------------------------------------------- breaker
# When handlers are not called because what they call fails: a circuit breaker.
#
# | state | a call may begin | to |
# |---|---|---|
# | CLOSED | yes | OPEN, after `failures` calls in a row that failed |
# | OPEN | no | HALF_OPEN, after `pause_s` |
# | HALF_OPEN | `trials` at a time | CLOSED when one of them succeeds, OPEN when one fails |
#
# A call gets a ticket when it begins. One that began before the state changed changes nothing when it ends: a call of
# before the failure says nothing about now.


class BreakerState(enum.Enum):
    """The states of a circuit breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class BreakerCore:
    """Decides whether calls may begin, from the outcomes of earlier calls."""

    def __init__(self, failures: int, pause_s: float, trials: int) -> None:
        self._failures_max, self._pause_s, self._trials_max = failures, pause_s, trials
        self._is_open = False  # or half open, when `_until` has come
        self._until = 0.0
        self._failed = self._trials = 0
        self._era = 1  # of tickets; ascends with each change of state
        self.opened = 0  # how often

    def find_state(self, now: float) -> BreakerState:
        if not self._is_open:
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if now >= self._until else BreakerState.OPEN

    def delay_s(self, now: float) -> float:
        """Returns the seconds until a call may begin; 0: now; inf: when a trial has ended."""
        if not self._is_open:
            return 0.0
        if now < self._until:
            return self._until - now
        return 0.0 if self._trials < self._trials_max else inf

    def begin_call(self, now: float) -> int:
        """Returns the ticket of a call that begins now; 0 if none may begin."""
        if self.delay_s(now) > 0:
            return 0
        self._trials += self._is_open
        return self._era

    def end_call(self, ticket: int, is_failure: bool | None, now: float) -> None:
        """Fact: the call with this ticket has ended; `is_failure` None: without an outcome."""
        if ticket != self._era:
            return
        if self._is_open:
            self._trials -= 1
            if is_failure is not None:
                self._change(is_open=is_failure, now=now)
        elif is_failure is not None:
            self._failed = self._failed + 1 if is_failure else 0
            if self._failed >= self._failures_max:
                self._change(is_open=True, now=now)

    def _change(self, *, is_open: bool, now: float) -> None:
        self._is_open = is_open
        self._until = now + self._pause_s
        self._failed = self._trials = 0
        self._era += 1
        self.opened += is_open

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        assert 0 <= self._trials <= self._trials_max, "trials are counted wrong"
        assert self._is_open or self._failed < self._failures_max, "it should be open"


class CircuitOpen(OperationNotSupported):
    """Raised by `CircuitBreaker.guard` while the breaker is open."""


class CircuitBreaker:
    """Stops calls of what fails, for a while: `Consumer.listen(…, breaker=CircuitBreaker())`.

        breaker = magnetar.CircuitBreaker(failures=5, pause=30)
        consumer.listen(call_the_vendor, breaker=breaker)

    After `failures` calls in a row that failed it is open: for `pause` seconds no call begins. Then it is half-open:
    `trials` calls begin, and their outcome closes or opens it. `counts`: the exceptions that count; others count as
    success, because what was called answered. A listener whose breaker is open begins no message and asks for no more:
    nothing is given back in a loop, and no message comes closer to the dead letters. Several listeners may share one.

    Elsewhere: `with breaker.guard(): …`, which raises CircuitOpen while it is open."""

    def __init__(
        self, failures: int = 5, pause: float = 30.0, *, trials: int = 1,
        counts: type[BaseException] | tuple[type[BaseException], ...] = Exception,
        clock: Callable[[], float] = SystemClock.monotonic,
    ) -> None:  # fmt: skip
        check_parameter("failures", make_whole_number_check(1), failures)
        check_parameter("pause", SECONDS._replace(optional=False), pause)
        check_parameter("trials", make_whole_number_check(1), trials)
        kinds = counts if isinstance(counts, tuple) else (counts,)
        check_parameter("counts", EXCEPTIONS, kinds)
        self._core = BreakerCore(failures, pause, trials)
        self._counts = kinds
        self._clock = clock
        self._lock = threading.Lock()

    @property
    def current_state(self) -> BreakerState:
        """Returns CLOSED, OPEN or HALF_OPEN."""
        with self._lock:
            return self._core.find_state(self._clock())

    @property
    def opened(self) -> int:
        """Returns how often it has opened."""
        return self._core.opened

    def delay_s(self) -> float:
        """Returns the seconds until a call may begin; 0: now; inf: when a trial that runs has ended."""
        with self._lock:
            return self._core.delay_s(self._clock())

    def begin_call(self) -> int:
        """Begins a call: returns its ticket, for `end_call`; 0 if no call may begin now."""
        with self._lock:
            return self._core.begin_call(self._clock())

    def end_call(self, ticket: int, error: BaseException | None) -> None:
        """Ends a call with what it raised; None: it succeeded."""
        self._end(ticket, error is not None and isinstance(error, self._counts))

    def abandon_call(self, ticket: int) -> None:
        """Ends a call that has no outcome: it was not made, or was cancelled."""
        self._end(ticket, None)

    def _end(self, ticket: int, is_failure: bool | None) -> None:
        with self._lock:
            self._core.end_call(ticket, is_failure, self._clock())

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Makes a `with` block a call. Raises CircuitOpen if no call may begin now."""
        ticket = self.begin_call()
        if not ticket:
            raise CircuitOpen(f"the circuit breaker is {self.current_state.value}")
        try:
            yield
        except BaseException as error:
            self.end_call(ticket, error)
            raise
        self.end_call(ticket, None)


EXCEPTIONS = ParameterCheck(
    "exceptions", (tuple,),
    lambda kinds: bool(kinds) and all(isinstance(each, type) and issubclass(each, BaseException) for each in kinds),
)  # fmt: skip
