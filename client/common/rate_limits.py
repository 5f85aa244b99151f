"""Limits for the calls of a program's code: `RateLimiter` and `CircuitBreaker`. `Consumer.listen` uses them for the
handlers of messages; a program may use them for any other calls. All methods may be called from any thread, except
`AsyncRateLimiter.wait`, which must be called in an event loop.

The rate of a RateLimiter may follow a key of a topic (`watch`), so that an operator can change it for all programs. The
rate is in a topic and not in a policy, because every consumer may read a topic and gets each change at once. Only
administrators can read a policy, and they would have to ask for it repeatedly.

The core of a RateLimiter is runtime/token_bucket.py, that of a CircuitBreaker is `BreakerCore`.
Guards: tests/client/common/test_rate_limits.py.

Also in this file, under the heading "memory_limits": the limits of a client's memory for messages.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf, isfinite
from threading import Lock
from typing import Any, Protocol, TypeVar

from ...runtime.clock import SystemClock
from ...runtime.token_bucket import TokenBucket
from .checks import (
    BOOLEAN_CHECK,
    DURATION_MS_MAX,
    NAME_CHECK,
    ParameterCheck,
    WrongValue,
    check_parameter,
    make_whole_number_check,
)
from .errors import OperationNotSupported, Timeout

_LOG = logging.getLogger("magnetar.client")

RATE_POLL_S = 0.5
"""Longest sleep in seconds within a wait: after each sleep it is noticed that the rate was changed, or that Ctrl-C was
pressed."""
RATE_CHECK = ParameterCheck("a number above 0 (per second)", (int, float), lambda rate: isfinite(rate) and rate > 0)
BURST_CHECK = ParameterCheck("a number from 1 on, or None", (int, float), lambda n: isfinite(n) and n >= 1, True)
COUNT_CHECK = ParameterCheck("a number from 0 on", (int, float), lambda n: isfinite(n) and n >= 0)
SECONDS_CHECK = ParameterCheck(
    "seconds, from 0 on, or None", (int, float), lambda s: 0 <= s <= DURATION_MS_MAX / 1000, True
)  # fmt: skip


class RateTableView(Protocol):
    """The interface of a table view, of the asyncio or the blocking client, that a RateLimiter uses.
    `for_each_and_listen` calls `callback(key, value)` for each key now, and again after each change."""

    def for_each_and_listen(self, callback: Callable[[str, Any], object]) -> object: ...


View = TypeVar("View", bound=RateTableView, covariant=True)


class AsyncTableViewOpener(Protocol[View]):
    """The interface of an asyncio Client that `AsyncRateLimiter.watch` uses."""

    async def create_table_view(self, topic: str) -> View: ...


class TableViewOpener(Protocol[View]):
    """The interface of a blocking Client that `RateLimiter.watch` uses."""

    def create_table_view(self, topic: str) -> View: ...


def parse_rate(value: bytes) -> float | None:
    """Parses the text of a number as a rate per second, and returns the rate; None if the text is not a number above
    0."""
    try:
        found = float(value)
    except ValueError:
        return None
    return found if RATE_CHECK.find_error_class(found) is None else None


class SharedRateLimiter:
    """Base class of both RateLimiters: a token bucket that several threads may share. It gets `rate` permits a second
    and keeps at most `burst` of them. `burst` None: the permits of one second; with `leaky` one permit. `clock`: a
    monotonic clock, in seconds. Raises InvalidConfiguration for a wrong argument."""

    def __init__(
        self, rate: float, *, burst: float | None = None, leaky: bool = False,
        clock: Callable[[], float] = SystemClock.monotonic,
    ) -> None:  # fmt: skip
        check_parameter("rate", RATE_CHECK, rate)
        check_parameter("burst", BURST_CHECK, burst)
        check_parameter("leaky", BOOLEAN_CHECK, leaky)
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
        """Returns the rate per second. Setting this property changes the rate from now on; raises InvalidConfiguration
        for a value that is not above 0."""
        return self._bucket.rate

    @rate.setter
    def rate(self, rate: float) -> None:
        check_parameter("rate", RATE_CHECK, rate)
        with self._lock:
            self._bucket.set_rate(float(rate), self._clock(), self._burst_at(rate))

    def _follow(self, view: RateTableView, key: str) -> None:
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
        """Takes `count` permits and returns True; returns False, and takes none, if there are too few now. `count`
        calls may begin after True. Raises InvalidConfiguration if `count` is not a number from 0 on."""
        check_parameter("count", COUNT_CHECK, count)
        with self._lock:
            return self._bucket.try_spend_tokens(count, self._clock())

    def delay_s(self, count: float = 1) -> float:
        """Returns the seconds until `allow(count)` returns True, if no other caller takes the permits; 0: now. Raises
        InvalidConfiguration if `count` is not a number from 0 on."""
        check_parameter("count", COUNT_CHECK, count)
        with self._lock:
            return self._bucket.seconds_until_tokens(count, self._clock())

    def _too_slow(self, timeout_s: float | None) -> Timeout:
        return Timeout(f"the rate of {self.rate:g} a second allows no more within {timeout_s:g} s")


class AsyncRateLimiter(SharedRateLimiter):
    """Limits the rate of calls, for asyncio: `magnetar.asyncio.RateLimiter`.

        limiter = RateLimiter(10)                # ten a second, and up to ten at once after a pause
        limiter = RateLimiter(10, leaky=True)    # one each tenth of a second
        if limiter.allow(): …                    # or refuse
        await limiter.wait()                     # or wait

    `burst`: how many calls may begin at once after a pause; None: as many as in a second. `leaky`: a burst of 1. The
    rate may be changed at any time (`limiter.rate = 5`); calls of `wait` that wait then notice it within half a second.
    Several consumers may share one object. `wait(count)` with more than `burst` waits until `burst` permits are there;
    later calls wait for the permits that were missing."""

    _turn: asyncio.Lock | None = None

    async def watch(self, client: AsyncTableViewOpener[View], topic: str, key: str) -> View:
        """Makes the rate follow a key of a compacted topic: the value of the key, a number as text, is the rate from
        now on. Returns the table view that reads the topic; closing the view ends this. `client`: an asyncio Client.

            limiter = RateLimiter(10)
            await limiter.watch(client, "rates", "vendor")
            await producer.send(b"50", partition_key="vendor")      # an operator, of a producer of "rates"

        Without the key, and when it is deleted, the rate is that with which the limiter was made. A value that is no
        number above 0 changes nothing, and is logged. When the topic is not read any more, the last rate stays. Raises
        InvalidConfiguration if `key` is no name, and the errors of `create_table_view`."""
        check_parameter("key", NAME_CHECK, key)
        view = await client.create_table_view(topic)
        self._follow(view, key)
        return view

    async def wait(self, count: float = 1, timeout: float | None = None) -> None:
        """Waits until there are `count` permits, and takes them. Calls in one event loop are served in order. Raises
        Timeout if there are too few within `timeout` seconds (None: waits without a limit). Takes none then, and none
        if the caller is cancelled. Raises InvalidConfiguration for a wrong parameter."""
        check_parameter("timeout", SECONDS_CHECK, timeout)
        if self._turn is None:
            self._turn = asyncio.Lock()
        try:
            async with asyncio.timeout(timeout), self._turn:
                while not self.allow(count):  # noqa: ASYNC110 - it waits for time alone
                    await asyncio.sleep(min(RATE_POLL_S, self.delay_s(count)))
        except TimeoutError:
            raise self._too_slow(timeout) from None


class RateLimiter(SharedRateLimiter):
    """Limits the rate of calls, for programs without asyncio.

        limiter = magnetar.RateLimiter(10)               # ten a second, and up to ten at once after a pause
        limiter = magnetar.RateLimiter(10, leaky=True)   # one each tenth of a second
        if limiter.allow(): …                            # or refuse
        limiter.wait()                                   # or wait, in this thread

    `burst`: how many calls may begin at once after a pause; None: as many as in a second. `leaky`: a burst of 1. The
    rate may be changed at any time (`limiter.rate = 5`); calls of `wait` that wait then notice it within half a second.
    Several consumers and threads may share one object. `wait(count)` with more than `burst` waits until `burst` permits
    are there; later calls wait for the permits that were missing."""

    def watch(self, client: TableViewOpener[View], topic: str, key: str) -> View:
        """Makes the rate follow a key of a compacted topic: the value of the key, a number as text, is the rate from
        now on. Returns the table view that reads the topic; closing the view ends this. `client`: a blocking Client.

            limiter = magnetar.RateLimiter(10)
            limiter.watch(client, "rates", "vendor")
            producer.send(b"50", partition_key="vendor")            # an operator, of a producer of "rates"

        Without the key, and when it is deleted, the rate is that with which the limiter was made. A value that is no
        number above 0 changes nothing, and is logged. When the topic is not read any more, the last rate stays. Raises
        InvalidConfiguration if `key` is no name, and the errors of `create_table_view`."""
        check_parameter("key", NAME_CHECK, key)
        view = client.create_table_view(topic)
        self._follow(view, key)
        return view

    def wait(self, count: float = 1, timeout: float | None = None) -> None:
        """Waits in the calling thread until there are `count` permits, and takes them. Raises Timeout, and takes none,
        if there are too few within `timeout` seconds; None: waits for ever. Raises InvalidConfiguration for a wrong
        parameter."""
        check_parameter("timeout", SECONDS_CHECK, timeout)
        deadline = None if timeout is None else self._clock() + timeout
        never = threading.Event()
        while not self.allow(count):
            left_s = RATE_POLL_S if deadline is None else deadline - self._clock()
            if left_s <= 0:
                raise self._too_slow(timeout)
            never.wait(min(RATE_POLL_S, left_s, self.delay_s(count)))


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
    """The states of a circuit breaker. CLOSED: calls may begin. OPEN: no call may begin. HALF_OPEN: some calls may
    begin, as trials, whose outcome decides the next state."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class BreakerCore:
    """The core of a circuit breaker: decides from the outcomes of earlier calls whether calls may begin. It opens after
    `failures` failures in a row; after `pause_s` seconds at most `trials` calls may run at once as trials. `opened`:
    how often it has opened. `now`: seconds of a monotonic clock."""

    def __init__(self, failures: int, pause_s: float, trials: int) -> None:
        self._failures_max, self._pause_s, self._trials_max = failures, pause_s, trials
        self._is_open = False  # or half open, when `_until` has come
        self._until = 0.0
        self._failed = self._trials = 0
        self._era = 1  # of tickets; ascends with each change of state
        self.opened = 0  # how often

    def find_state(self, now: float) -> BreakerState:
        """Returns the state at the time `now`."""
        if not self._is_open:
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if now >= self._until else BreakerState.OPEN

    def delay_s(self, now: float) -> float:
        """Returns the seconds until a call may begin; 0: now; inf: not before a running trial has ended."""
        if not self._is_open:
            return 0.0
        if now < self._until:
            return self._until - now
        return 0.0 if self._trials < self._trials_max else inf

    def begin_call(self, now: float) -> int:
        """Begins a call, and returns its ticket for `end_call`; returns 0 if no call may begin at the time `now`."""
        if self.delay_s(now) > 0:
            return 0
        self._trials += self._is_open
        return self._era

    def end_call(self, ticket: int, is_failure: bool | None, now: float) -> None:
        """Fact: the call with this ticket has ended. `is_failure` None: it has no outcome. Changes nothing if the state
        has changed since the call began."""
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
    """Raised by `CircuitBreaker.guard` if no call may begin: the breaker is open, or half-open with all its trials
    running."""


class CircuitBreaker:
    """Refuses calls for a while after several failures in a row: `Consumer.listen(…, breaker=CircuitBreaker())`.

        breaker = magnetar.CircuitBreaker(failures=5, pause=30)
        consumer.listen(call_the_vendor, breaker=breaker)

    After `failures` failed calls in a row the breaker is open: for `pause` seconds no call begins. Then it is
    half-open: up to `trials` calls may run at once. The first success closes the breaker, the first failure opens it
    again. `counts`: the exceptions that count as failures; with any other exception the call counts as a success. While
    the breaker is open, a listener handles no message and requests no more, so that no message is redelivered or
    becomes a dead letter because of it. Several listeners may share one breaker.

    Other code calls `with breaker.guard(): …`, which raises CircuitOpen if no call may begin. Raises
    InvalidConfiguration for a wrong argument."""

    def __init__(
        self, failures: int = 5, pause: float = 30.0, *, trials: int = 1,
        counts: type[BaseException] | tuple[type[BaseException], ...] = Exception,
        clock: Callable[[], float] = SystemClock.monotonic,
    ) -> None:  # fmt: skip
        check_parameter("failures", make_whole_number_check(1), failures)
        check_parameter("pause", SECONDS_CHECK._replace(optional=False), pause)
        check_parameter("trials", make_whole_number_check(1), trials)
        kinds = counts if isinstance(counts, tuple) else (counts,)
        check_parameter("counts", EXCEPTIONS_CHECK, kinds)
        self._core = BreakerCore(failures, pause, trials)
        self._counts = kinds
        self._clock = clock
        self._lock = threading.Lock()

    @property
    def current_state(self) -> BreakerState:
        """Returns the present state: CLOSED, OPEN or HALF_OPEN."""
        with self._lock:
            return self._core.find_state(self._clock())

    @property
    def opened(self) -> int:
        """Returns how often the breaker has opened since it was made."""
        return self._core.opened

    def delay_s(self) -> float:
        """Returns the seconds until a call may begin; 0: now; inf: not before a running trial has ended."""
        with self._lock:
            return self._core.delay_s(self._clock())

    def begin_call(self) -> int:
        """Begins a call, and returns its ticket; returns 0 if no call may begin now. The ticket must be passed once, to
        `end_call` or `abandon_call`."""
        with self._lock:
            return self._core.begin_call(self._clock())

    def end_call(self, ticket: int, error: BaseException | None) -> None:
        """Records that the call with this ticket has ended. `error`: the exception that it raised; None: it
        succeeded."""
        self._end(ticket, error is not None and isinstance(error, self._counts))

    def abandon_call(self, ticket: int) -> None:
        """Records that the call with this ticket has no outcome, because it was not made or was cancelled."""
        self._end(ticket, None)

    def _end(self, ticket: int, is_failure: bool | None) -> None:
        with self._lock:
            self._core.end_call(ticket, is_failure, self._clock())

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Counts a `with` block as one call, which fails if the block raises an exception of `counts`. Raises
        CircuitOpen, and does not run the block, if no call may begin now."""
        ticket = self.begin_call()
        if not ticket:
            raise CircuitOpen(f"the circuit breaker is {self.current_state.value}")
        try:
            yield
        except BaseException as error:
            self.end_call(ticket, error)
            raise
        self.end_call(ticket, None)


EXCEPTIONS_CHECK = ParameterCheck(
    "exceptions", (tuple,),
    lambda kinds: bool(kinds) and all(isinstance(each, type) and issubclass(each, BaseException) for each in kinds),
)  # fmt: skip


# -------------------------------------------------------------------------------------------------------- memory_limits
# The limits of a client's memory for messages: of received messages, in the receiver queues of all its consumers
# (`ReceiveMemoryLimit`, `ReceiveMemoryClaim`), and of messages that its producers send (`SendMemoryLimit`).
#
# The broker counts messages, not bytes: it sends as many messages as it has permits for, and a permit that was granted
# cannot be withdrawn. So each partition's consumer has a *window*, the number of messages that may be in flight or in
# its queue, and *claims* memory: its window times the average size of its messages, which it learns from the messages
# that arrive. The first window is FIRST_WINDOW_MESSAGES, counted with ASSUMED_MESSAGE_BYTES each. A window may grow to
# the size of the receiver queue, as long as the claim is at most half of the memory that other consumers do not claim.
# So all claims together stay below the limit, a new consumer finds memory, and consumers that all read get equal shares
# in the end. A claim shrinks as the consumer's messages are read.
#
# A window is never below one message, so that each consumer gets at least one entry at a time and no consumer waits for
# another; so the limit may be exceeded by at most one entry per consumer. Sizes are averages: the limit is also
# exceeded, until the messages are read, by a burst of messages larger than before, and by first messages above
# ASSUMED_MESSAGE_BYTES. Incomplete chunked messages have a limit of their own (max_pending_chunked_message). The size
# of an entry is its decompressed size, which it declares.
#
# **Compressed entries.** An entry of 2 KB may declare 64 MiB, and a window of such entries arrives before their size is
# known. So an entry that declares LARGE_ENTRY_BYTES or more is counted by itself (`decompressed_bytes`) until the
# application takes it. It is decompressed when there is room below the limit, or when its partition's consumer has no
# other entry of that size. Until then it stays compressed, and so do those after it (client/consume/deliveries.py).
#
# All methods must be called in the event loop. Guard: tests/client/consume/test_receive_memory.py.

# --------------------------------------------------------------------------------------------------- send_memory
# The memory of the messages that producers of one client have sent and that have no outcome yet: a joint bound in
# bytes of payload.
#
# It exists when the program gave `memory_limit_bytes`; without, messages alone are bounded, as in Pulsar's Python
# client. Producers and receiver queues (rate_limits.py) share the limit: either uses what the other does not, and
# half at least. So together they have the limit, and at most half of it more while the one gives back what the other
# did not use. A message is taken when nothing is pending, however long it is.
#
# All is safe from any thread; what waits is told, in any thread, when a quarter of the limit is free.
# Guards: tests/client/produce/test_send_memory.py.


class SendMemoryLimit:
    """The memory budget for messages without an outcome, which all producers of one client share. `limit_bytes`: the
    client's memory limit; `reserved_bytes`: bytes of the messages without an outcome; `claimed()` returns the bytes
    that receiver queues claim. All methods may be called from any thread."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.reserved_bytes = 0
        self.claimed: Callable[[], float] = lambda: 0.0  # by receiver queues
        self._lock = Lock()
        self._waiting: deque[Callable[[], object]] = deque()

    @property
    def current_limit_bytes(self) -> float:
        """Returns how many bytes the producers may use now: the client's memory limit minus the bytes that receiver
        queues claim, but at least half of the limit."""
        return self.limit_bytes - min(self.claimed(), self.limit_bytes / 2)

    def reserve(self, size: int) -> bool:
        """Reserves memory for `size` bytes and returns True. Returns False, and reserves nothing, if too little memory
        is free. If nothing is reserved, any size is accepted."""
        with self._lock:
            if self.reserved_bytes and self.reserved_bytes + size > self.current_limit_bytes:
                return False
            self.reserved_bytes += size
            return True

    def release(self, size: int) -> None:
        """Releases `size` reserved bytes. If there is room then, calls the functions of `call_when_memory_is_free` in
        this thread."""
        waiting: deque[Callable[[], object]] = deque()
        with self._lock:
            self.reserved_bytes -= size
            if self._waiting and self.has_room:
                waiting, self._waiting = self._waiting, waiting
        for call in waiting:
            call()

    @property
    def has_room(self) -> bool:
        """Returns whether at least a quarter of `current_limit_bytes` is free, or nothing is reserved."""
        return not self.reserved_bytes or self.reserved_bytes <= self.current_limit_bytes * 3 / 4

    def call_when_memory_is_free(self, call: Callable[[], object]) -> None:
        """Registers the function `call`, which is called once, in any thread, when a `release` leaves room
        (`has_room`). The caller must try `reserve` again after this, because memory may be free already."""
        with self._lock:  # or it would be lost to a `release` that takes the others at this moment
            self._waiting.append(call)


# ------------------------------------------------------------------------------------------------ memory_limits


DEFAULT_RECEIVE_BYTES = 64 << 20
"""Memory limit of the receiver queues, in bytes, if the program does not set `memory_limit_bytes`."""
MESSAGE_OVERHEAD_BYTES = 400
"""Approximate memory of a message in addition to its payload, in bytes: objects and metadata."""
FIRST_WINDOW_MESSAGES = 64
"""Messages of a consumer's first window. More than most chunked messages have chunks: a Shared subscription sends all
chunks of a message to one consumer, if that has permits for them. Less than a queue, because the first messages may be
large."""
ASSUMED_MESSAGE_BYTES = 16 << 10
"""Bytes that are counted for a message before any message of the consumer has arrived."""
LARGE_ENTRY_BYTES = 1 << 20
"""Decompressed size in bytes from which on an entry is large. A batch of our client has an eighth of that by
default."""
NEWEST_SIZE_WEIGHT = 1 / 4
"""Weight of the messages that arrived last in the average message size."""


class ReceiveMemoryLimit:
    """The memory limit for received messages, which the receiver queues of all consumers of one client share. Must be
    used in the client's event loop. `limit_bytes` 0: there is no limit. `claimed_bytes`: the claims of all consumers.
    `decompressed_bytes`: bytes of decompressed large entries that wait for the application. `producers`: the limit
    object of the client's producers, with which the bytes are shared; None: they have no limit."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes  # 0: none
        self.producers: SendMemoryLimit | None = None  # they share the limit
        self.claimed_bytes = 0.0
        self.decompressed_bytes = 0  # of large entries that wait for their application

    def compute_window_messages(self, claimed: float, message_bytes: float, wanted: int) -> int:
        """Returns how many messages a consumer may have in flight and in its queue together: at least 1, at most
        `wanted`. `message_bytes`: the average size of a message; `claimed`: the bytes that this consumer claims now.
        Must be called only if there is a limit."""
        sent = 0.0 if self.producers is None else min(self.producers.reserved_bytes, self.limit_bytes / 2)
        room = max(0.0, self.limit_bytes - sent - (self.claimed_bytes - claimed)) / 2
        return max(1, min(wanted, int(room / message_bytes)))

    def has_room(self, size: int) -> bool:
        """Returns whether the memory limit has room for `size` more bytes of decompressed entries."""
        return not self.limit_bytes or self.decompressed_bytes + size <= self.limit_bytes


class ReceiveMemoryClaim:
    """The share of a client's ReceiveMemoryLimit that the consumer of one partition claims. Its `window` is the number
    of messages that this consumer may have in flight and in its queue together."""

    def __init__(self, memory: ReceiveMemoryLimit, queue_size: int) -> None:
        self._memory = memory
        self._bytes = 0.0
        self._message_bytes = 0.0  # 0: not known
        self.window = 0
        self.resize_queue(queue_size)

    def resize_queue(self, queue_size: int) -> None:
        """Sets `window` and the claim for a receiver queue of `queue_size` messages, or for fewer if the limit does not
        allow so many."""
        self._wanted = max(1, queue_size)
        if not self._memory.limit_bytes:
            self.window = self._wanted
        elif self._message_bytes:
            self.window = self._memory.compute_window_messages(self._bytes, self._message_bytes, self._wanted)
            self._claim(self.window * self._message_bytes)
        else:
            self.window = self._memory.compute_window_messages(
                self._bytes, ASSUMED_MESSAGE_BYTES, min(self._wanted, FIRST_WINDOW_MESSAGES)
            )
            self._claim(self.window * ASSUMED_MESSAGE_BYTES)

    def count_received(self, entry_bytes: int, messages: int, circulating: int) -> bool:
        """Counts `messages` received messages of `entry_bytes` bytes together, and adjusts the average message size and
        the claim. `circulating`: the number of messages that are in flight or in the queue. Returns True if the window
        has changed."""
        if not self._memory.limit_bytes or messages <= 0:
            return False
        size = entry_bytes / messages + MESSAGE_OVERHEAD_BYTES
        known = self._message_bytes
        self._message_bytes = size if not known else known + (size - known) * NEWEST_SIZE_WEIGHT
        window = self._memory.compute_window_messages(self._bytes, self._message_bytes, self._wanted)
        changed = window == self._wanted != self.window or abs(window - self.window) * 4 > self.window
        if changed:
            self.window = window
        claimed, self._bytes = self._bytes, max(self.window, circulating) * self._message_bytes
        self._memory.claimed_bytes += self._bytes - claimed
        return changed

    def release(self) -> None:
        """Releases the whole claim, because the consumer is closed."""
        self._claim(0.0)

    def _claim(self, now: float) -> None:
        self._memory.claimed_bytes += now - self._bytes
        self._bytes = now
