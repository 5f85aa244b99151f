"""Who waits is woken: no message stays in the client beside somebody who waits, whatever ended another's wait."""

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest

from magnetar.client.blocking.consumer import take_message_blocking
from magnetar.client.client import Client
from magnetar.client.common.errors import AlreadyClosed, Timeout
from magnetar.client.consume.receiver_queue import BatchReceiver, ConsumerBatchReceivePolicy, ReceiverQueue
from magnetar.client.core.levels import LevelQueues, LevelTurns
from magnetar.client.model.settings import InitialPosition
from tests.client.consume.test_partition_consumer import filled
from tests.client.fake_broker import FakeBroker
from tests.client.simulated import simulate


class Letter:
    """As much of a message as an inbox looks at."""

    def __init__(self, payload: bytes) -> None:
        self.payload, self.permits = payload, 0
        self.entry = SimpleNamespace(consumer=SimpleNamespace(on_message_put_back=lambda _: None))


def letters(*payloads: bytes) -> list[Any]:
    return [Letter(each) for each in payloads]


class WatchedInbox(ReceiverQueue):
    def __init__(self) -> None:
        super().__init__()
        self.waited = threading.Event()

    def call_when_message_waits(self, wake: Callable[[], object]) -> None:
        super().call_when_message_waits(wake)
        self.waited.set()


@contextmanager
def interrupted_when(happens: threading.Event) -> Iterator[None]:
    """Ctrl-C for the main thread, as soon as that happened; the block ends with KeyboardInterrupt."""
    main = threading.main_thread().ident
    assert main == threading.get_ident()
    assert main is not None

    def press() -> None:
        if happens.wait(10):
            signal.pthread_kill(main, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=press)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        thread.join(20)
        signal.signal(signal.SIGINT, before)


class Handler:
    """Counts what was granted, as a partition's consumer does."""

    def __init__(self) -> None:
        self.lock, self.granted, self.attended = threading.Lock(), 0, 0

    def on_taken(self, message: Any) -> None:
        with self.lock:
            self.granted += message.permits
            message.permits = -message.permits
        self.attended = self.granted

    def on_dequeue_interrupted(self) -> None:
        self.attended = self.granted


@pytest.mark.parametrize("levels", [0, 3])
def test_ctrl_c_at_any_moment_of_a_receive_loses_no_message_and_no_permit(levels: int) -> None:
    queues = LevelQueues[Any](LevelTurns(3, (8, 4, 1)), lambda each: int(each.payload) % 3) if levels else None
    inbox, consumer, seed = ReceiverQueue(queues), Handler(), Random(7)
    messages = [Letter(b"%d" % i) for i in range(400_000)]
    for message in messages:
        message.permits, message.entry = 1, SimpleNamespace(consumer=consumer, broker_clock_ms=None)
    inbox.put(messages)  # type: ignore[arg-type]
    got, interrupts, armed = [None] * len(messages), 0, False

    def press(*_: object) -> None:
        if armed:
            raise KeyboardInterrupt
        signal.setitimer(signal.ITIMER_REAL, 0.0001)

    before, count = signal.signal(signal.SIGALRM, press), 0
    try:
        while interrupts < (100 if levels else 300) and count < len(messages):
            signal.setitimer(signal.ITIMER_REAL, seed.uniform(0.0001, 0.0005))
            try:
                while True:
                    armed = True
                    got[count] = inbox.take_nowait()  # type: ignore[call-overload]
                    armed = False
                    count += got[count] is not None
                    if got[count - 1] is None or count == len(messages):
                        break
            except KeyboardInterrupt:
                armed, interrupts = False, interrupts + 1
                count += got[count] is not None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    while (message := inbox.take_nowait()) is not None:
        got[count], count = message, count + 1  # type: ignore[call-overload]
    assert interrupts > 50
    came: list[Any] = [each for each in got if each is not None]
    if levels:
        came.sort(key=lambda each: int(each.payload))
    assert [each.payload for each in came] == [each.payload for each in messages]
    assert consumer.granted == consumer.attended == len(messages)


@pytest.mark.parametrize("timeout_s", [None, 60.0])
def test_ctrl_c_ends_a_receive_and_the_next_one_gets_the_message(timeout_s: float | None) -> None:
    inbox = WatchedInbox()
    with interrupted_when(inbox.waited):
        take_message_blocking(inbox, timeout_s)
    assert not inbox._waiting
    inbox.waited.clear()
    threading.Thread(target=lambda: inbox.waited.wait(10) and inbox.put(letters(b"one"))).start()
    assert take_message_blocking(inbox, 5.0).payload == b"one"


class RobbedInbox(ReceiverQueue):
    """A message comes whenever somebody waits; another receiver takes the first one."""

    robbed = False

    def call_when_message_waits(self, wake: Callable[[], object]) -> None:
        super().call_when_message_waits(wake)
        self.put(letters(b"other's" if not self.robbed else b"ours"))

    def take_nowait(self) -> Any:
        if self.messages and not self.robbed:
            self.robbed = True
            super().take_nowait()
            return None
        return super().take_nowait()


def test_a_receive_for_which_another_one_was_too_fast_waits_again() -> None:
    inbox = RobbedInbox()
    assert take_message_blocking(inbox, 5.0).payload == b"ours"
    assert not inbox._waiting


def test_what_a_receive_was_woken_for_goes_to_another_thread_when_ctrl_c_ends_it() -> None:
    inbox = WatchedInbox()
    got: list[bytes] = []
    with interrupted_when(inbox.waited):
        take_message_blocking(inbox, None)
    other = threading.Thread(target=lambda: got.append(take_message_blocking(inbox, 5.0).payload))
    inbox.waited.clear()
    other.start()
    assert inbox.waited.wait(5)
    inbox.put(letters(b"one"))
    other.join(10)
    assert got == [b"one"]


async def test_a_wake_up_of_a_cancelled_receive_goes_to_the_next_who_waits() -> None:
    inbox = ReceiverQueue()
    first, second = (asyncio.ensure_future(inbox.take_message(None)) for _ in range(2))
    await asyncio.sleep(0)
    inbox.put(letters(b"one"))  # wakes the first
    first.cancel()
    async with asyncio.timeout(30):
        assert (await second).payload == b"one"
    assert first.cancelled()


async def test_a_wake_up_that_meets_a_time_out_goes_to_the_next_who_waits() -> None:
    inbox = ReceiverQueue()
    loop = asyncio.get_running_loop()
    first = asyncio.ensure_future(inbox.take_message(0.01))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(inbox.take_message(None))
    await asyncio.sleep(0)
    loop.call_later(0.01, lambda: inbox.put(letters(b"one")))  # in the turn in which the time is over
    outcomes = await asyncio.wait_for(asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED), 30)
    assert outcomes[0]
    if not first.done() or not isinstance(first.exception(), Timeout):
        second.cancel()
        return
    async with asyncio.timeout(30):
        assert (await second).payload == b"one"


async def test_a_full_batch_that_nobody_waits_for_any_more_goes_back() -> None:
    inbox = ReceiverQueue()
    inbox.put(letters(b"one", b"two", b"three"))
    batch = BatchReceiver(inbox, monotonic)
    assert len(await batch.receive(ConsumerBatchReceivePolicy(2))) == 2
    batch.put_back()  # Ctrl-C came between its end and the caller
    late = BatchReceiver(inbox, monotonic)
    late.put_back()
    await late.receive(ConsumerBatchReceivePolicy(2))
    assert [each.payload for each in inbox.messages] == [b"one", b"two", b"three"]


@pytest.mark.parametrize("seed", range(20))
def test_receives_that_are_cancelled_lose_no_message_and_no_wake_up(seed: int) -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        rng = Random(seed)
        consumer = await client.subscribe("t", "s", initial_position=InitialPosition.Earliest, receiver_queue_size=5)
        got: list[bytes] = []

        async def receive() -> None:
            while len(got) < 60:
                if rng.random() < 0.3:
                    batch = asyncio.ensure_future(consumer.batch_receive())
                    await asyncio.wait({batch}, timeout=rng.random() * 0.02)
                    if batch.done() or not batch.cancel():
                        got.extend(each.data() for each in await batch)
                    continue
                taking = asyncio.ensure_future(consumer.receive())
                await asyncio.wait({taking}, timeout=rng.choice([0, rng.random() * 0.02]))
                if taking.done() or not taking.cancel():
                    got.append((await taking).data())

        patient = [asyncio.ensure_future(consumer.receive()) for _ in range(3)]
        workers = [asyncio.ensure_future(receive()) for _ in range(3)]
        for i in range(63):
            await filled_one(client, i)
        async with asyncio.timeout(60):
            await asyncio.gather(*workers)
            got.extend([(await each).data() for each in patient])
        assert sorted(got) == sorted(b"%d" % i for i in range(63))

    async def filled_one(client: Client, i: int) -> None:
        producer = await client.create_producer("t")
        await producer.send(b"%d" % i)
        await producer.close()

    simulate(body, seed=seed)


@pytest.mark.run_by.with_args(simulate)
async def test_who_waits_for_a_consumer_whose_close_is_interrupted_learns_its_end(
    client: Client, broker: FakeBroker, /
) -> None:
    await filled(client, 1)
    consumer = await client.subscribe("t", "s")
    waiting = asyncio.ensure_future(consumer.receive())
    await asyncio.sleep(0.1)
    closing = asyncio.ensure_future(consumer.close())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(AlreadyClosed):
        async with asyncio.timeout(5):
            await waiting
    await consumer.close()


PROGRAM = """
import signal, sys, magnetar
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs in the background
client = magnetar.Client(sys.argv[1])
consumer = client.subscribe("ctrl-c", "s")
for name in ("receive", "batch_receive", "read_next"):
    receive = getattr(consumer, name, None) or client.create_reader("ctrl-c", magnetar.MessageId.latest).read_next
    try:
        print("waiting", flush=True)
        while not receive():
            pass
    except KeyboardInterrupt:
        print("caught", flush=True)
    found = receive()
    while not found:
        found = receive()
    print(found[0].data() if isinstance(found, list) else found.data(), flush=True)
client.close()
print("over", flush=True)
"""


def test_a_program_that_catches_ctrl_c_receives_on(fake: tuple[str, FakeBroker]) -> None:
    url, _ = fake
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, url], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    stop = threading.Timer(60, program.kill)
    stop.start()
    try:
        for i in range(3):
            assert program.stdout.readline() == "waiting\n"
            program.send_signal(signal.SIGINT)
            assert program.stdout.readline() == "caught\n"
            send(url, b"%d" % i)
            assert program.stdout.readline() == f"{b'%d' % i}\n"
        assert program.stdout.readline() == "over\n"
        assert program.wait(10) == 0
    finally:
        stop.cancel()
        program.kill()
        program.wait()


def send(url: str, content: bytes) -> None:
    import magnetar

    with magnetar.Client(url) as client:
        client.create_producer("ctrl-c").send(content)
