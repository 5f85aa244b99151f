"""The client libraries of a run: the SDK, and Pulsar's own for Python and Java, on the same cluster and topics.

All are used as `magnetar` is: `others` gives what makes clients with `create_producer` and `subscribe`. ERRORS and
TIMEOUTS are what any of them raises. Python's runs in this process, Java's in one of its own
(tests/interop/java/src/ChaosDriver.java, which Maven builds). Each says `disturbed` when it has lost a connection, as
happens on a busy machine without a fault too: what was not acknowledged comes again then.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, Self

import pulsar

import magnetar
from magnetar.cli.common.processes import add_parent_death_signal
from tests.interop.drivers import build_java

ANSWER_S = 120.0
"""Longer than any request of a client may take: its process is stuck."""


class JavaError(Exception):
    """What Java's client answered, or that its process ended."""


class JavaTimeout(Exception):
    """No message came in time."""


ERRORS = (magnetar.PulsarException, pulsar.PulsarException, JavaError)
TIMEOUTS = (magnetar.Timeout, pulsar.Timeout, JavaTimeout)
OK = (magnetar.Result.Ok, pulsar.Result.Ok)
QUEUE_IS_FULL = (magnetar.ProducerQueueIsFull, pulsar.ProducerQueueIsFull)
ENDED = (magnetar.AuthorizationError, magnetar.AlreadyClosed, pulsar.AuthorizationError, pulsar.AlreadyClosed)
"""A producer has to be opened again."""

Maker = Callable[[Callable[[], None]], Any]
"""Makes a client; gets what to call when it has lost a connection."""


def types_of(client: Any) -> Any:
    """The module of the types that the client takes."""
    return pulsar if isinstance(client, pulsar.Client) else magnetar


def others(names: Sequence[str], url: str, folder: Path) -> list[Maker]:
    """Of each of these libraries, beside the SDK. Java's runs transactions. Unavailable: Java or Maven is not here."""
    makers: list[Maker] = []
    if "python" in names:
        makers.append(lambda disturbed: python_client(url, disturbed))
    if "java" in names:
        command = [*build_java(folder, "info"), "ChaosDriver", url]
        makers.append(lambda disturbed: JavaClient(command, folder, disturbed))
    return makers


class Reconnects(logging.Handler):
    """Says when a client logs that it connects again: the SDK's consumers, and Pulsar's client whatever it loses."""

    def __init__(self, words: str, disturbed: Callable[[], None]) -> None:
        super().__init__(logging.INFO)
        self._words, self._disturbed = words, disturbed

    def emit(self, record: logging.LogRecord) -> None:
        if self._words in record.getMessage():
            self._disturbed()


def python_client(url: str, disturbed: Callable[[], None]) -> Any:
    logger = logging.getLogger("pulsar.chaos")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.handlers = [Reconnects("econnect", disturbed)]
    return pulsar.Client(url, logger=logger)


# ---------------------------------------------------------------------------------- Java
class _Place(NamedTuple):
    ledger: int
    entry: int
    batch: int

    def ledger_id(self) -> int:
        return self.ledger

    def entry_id(self) -> int:
        return self.entry

    def batch_index(self) -> int:
        return self.batch


class JavaClient:
    """The part of a client's interface that a run uses, over the driver's pipe."""

    def __init__(self, command: list[str], folder: Path, disturbed: Callable[[], None]) -> None:
        self.disturbed = disturbed
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._lock = threading.Lock()
        with (folder / "java.stderr").open("ab") as errors:
            self.process = subprocess.Popen(
                add_parent_death_signal(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._reader = threading.Thread(target=self._read, name="java answers", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            answer = json.loads(line)
            with self._lock:
                waiting = self._waiting.pop(answer["id"])
            waiting.set_result(answer)
        with self._lock:
            left, self._waiting = self._waiting, {}
        for each in left.values():
            each.set_result({"error": "the process of Java's client has ended"})

    def begin(self, do: str, answered: bool = True, **given: object) -> Future[dict[str, Any]]:
        """The answer is a dict; with `error` when it failed. Not `answered`: there is none."""
        future: Future[dict[str, Any]] = Future()
        assert self.process.stdin is not None
        with self._lock:
            number = next(self._numbers)
            if answered:
                self._waiting[number] = future
            try:
                self.process.stdin.write(json.dumps({"id": number, "do": do, **given}) + "\n")
                self.process.stdin.flush()
            except OSError as error:
                self._waiting.pop(number, None)
                raise JavaError("the process of Java's client has ended") from error
        return future

    def ask(self, do: str, **given: object) -> dict[str, Any]:
        answer = self.begin(do, **given).result(ANSWER_S)
        if "error" in answer:
            raise JavaError(answer["error"])
        return answer

    def create_producer(self, topic: str, *, producer_name: str, **_: object) -> JavaProducer:
        return JavaProducer(self, self.ask("producer", topic=topic, name=producer_name)["handle"])

    def subscribe(
        self, topic: str, name: str, *, consumer_type: Any, batch_index_ack_enabled: bool, **_: object
    ) -> JavaConsumer:  # fmt: skip
        answer = self.ask(
            "subscribe", topic=topic, subscription=name, type=consumer_type.name, index_acks=batch_index_ack_enabled
        )
        return JavaConsumer(self, answer["handle"])

    def transaction(self, timeout: float) -> JavaTransaction:
        answer = self.ask("begin", timeout_ms=round(timeout * 1000))
        return JavaTransaction(self, answer["handle"], answer["txn"])

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(ANSWER_S)
        self._reader.join(ANSWER_S)


class JavaTransaction:
    """`state`: what its client was told; OPEN when that is nothing, and who wants to know asks the coordinator."""

    def __init__(self, client: JavaClient, handle: int, id_: str) -> None:
        self._client, self.handle, self.id = client, handle, id_
        self.state = magnetar.TransactionState.OPEN
        self._is_ended = False

    def commit(self) -> None:
        self._end("commit", magnetar.TransactionState.COMMITTED)

    def abort(self) -> None:
        self._end("abort", magnetar.TransactionState.ABORTED)

    def _end(self, verb: str, state: magnetar.TransactionState) -> None:
        self._is_ended = True
        self._client.ask(verb, handle=self.handle)
        self.state = state

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._is_ended:
            return
        if kind is None:
            self.commit()
        else:
            with contextlib.suppress(JavaError):
                self.abort()


def _handle_of(txn: JavaTransaction | None) -> dict[str, int]:
    return {} if txn is None else {"txn": txn.handle}


class JavaProducer:
    def __init__(self, client: JavaClient, handle: int) -> None:
        self._client, self._handle = client, handle

    def send_async(
        self, content: bytes, callback: Callable[[Any, Any], None], partition_key: str,
        txn: JavaTransaction | None = None,
    ) -> None:  # fmt: skip
        def outcome(answered: Future[dict[str, Any]]) -> None:
            at = answered.result().get("at")
            if at is None:
                callback(None, None)
            else:
                callback(magnetar.Result.Ok, _Place(*at))

        given = {"key": partition_key, "value": content.decode(), **_handle_of(txn)}
        future = self._client.begin("send", handle=self._handle, **given)
        future.add_done_callback(outcome)

    def flush(self) -> None:
        self._client.ask("flush", handle=self._handle)


class JavaMessage:
    def __init__(self, answer: dict[str, Any]) -> None:
        self.number: int = answer["message"]
        self._at, self._value, self._redelivery = _Place(*answer["at"]), answer["value"], answer["redelivery"]

    def message_id(self) -> _Place:
        return self._at

    def data(self) -> bytes:
        return str(self._value).encode()

    def redelivery_count(self) -> int:
        return int(self._redelivery)


class JavaConsumer:
    def __init__(self, client: JavaClient, handle: int) -> None:
        self._client, self._handle, self._lost = client, handle, 0

    def receive(self, timeout_millis: int) -> JavaMessage:
        answer = self._client.ask("receive", handle=self._handle, timeout_ms=timeout_millis)
        if answer["lost"] != self._lost:
            self._lost = answer["lost"]
            self._client.disturbed()
        if "message" not in answer:
            raise JavaTimeout
        return JavaMessage(answer)

    def acknowledge(self, messages: JavaMessage | list[JavaMessage], *, txn: JavaTransaction | None = None) -> None:
        """In a transaction it waits for the receipts."""
        if txn is None:
            assert isinstance(messages, JavaMessage)
            self._client.begin("ack", answered=False, handle=self._handle, message=messages.number)
            return
        assert isinstance(messages, list)
        answers = [
            self._client.begin("ack", handle=self._handle, message=each.number, txn=txn.handle) for each in messages
        ]
        for each in [answer.result(ANSWER_S) for answer in answers]:
            if "error" in each:
                raise JavaError(each["error"])

    def negative_acknowledge(self, message: JavaMessage) -> None:
        self._client.begin("nack", answered=False, handle=self._handle, message=message.number)

    def close(self) -> None:
        self._client.ask("close", handle=self._handle)
