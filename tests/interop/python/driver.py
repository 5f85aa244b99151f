"""A driver of one client: `python driver.py MODULE URL`, MODULE `magnetar` (the SDK) or `pulsar` (the official client).

It reads a command of JSON from each line of stdin and prints its answer as one line, as tests/interop/drivers.py says.
"""

import datetime
import hashlib
import importlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

WAIT_MS = 20_000
KEY_NAME = "interop"
LONG = 1000

Command = dict[str, Any]


class Driver:
    def __init__(self, module: str, url: str) -> None:
        self.pulsar: Any = importlib.import_module(module)
        self.schemas: Any = importlib.import_module(f"{module}.schema")
        quiet = {"logger": self.pulsar.ConsoleLogger(self.pulsar.LoggerLevel.Error)} if module == "pulsar" else {}
        self.client = self.pulsar.Client(url, **quiet)
        self.kept: tuple[Any, Any] | None = None
        fields = {"a": self.schemas.Integer(required=True), "b": self.schemas.String()}
        self.order = type("Order", (self.schemas.Record,), fields)

    def options(self, command: Command) -> Command:
        """What a producer and a consumer of this command have in common."""
        found: Command = {}
        if "keys" in command:
            found["crypto_key_reader"] = self.pulsar.CryptoKeyReader(*command["keys"])
        if "schema" in command:
            found["schema"] = {
                "JSON": lambda: self.schemas.JsonSchema(self.order),
                "AVRO": lambda: self.schemas.AvroSchema(self.order),
                "STRING": self.schemas.StringSchema,
            }[command["schema"]]()
        return found

    def content(self, command: Command, message: Command) -> Any:
        text = message["text"] * message.get("times", 1)
        if "schema" not in command:
            return text.encode()
        return text if command["schema"] == "STRING" else self.order(a=len(text), b=text)

    def produce(self, command: Command) -> Command:
        producer = self.client.create_producer(
            command["topic"],
            batching_enabled=command.get("batching", False), batching_max_publish_delay_ms=50,
            chunking_enabled=command.get("chunking", False),
            compression_type=getattr(self.pulsar.CompressionType, command.get("compression", "NONE")),
            encryption_key=KEY_NAME if "keys" in command else None,
            **self.options(command),
        )  # fmt: skip
        failed: list[Any] = []
        for message in command["messages"]:
            producer.send_async(
                self.content(command, message),
                lambda result, _id: None if result == self.pulsar.Result.Ok else failed.append(result),
                properties=message.get("properties"),
                partition_key=message.get("key"),
                ordering_key=message.get("ordering_key"),
                event_timestamp=message.get("event_time"),
                deliver_after=datetime.timedelta(milliseconds=ms) if (ms := message.get("deliver_after_ms")) else None,
            )
        producer.flush()
        producer.close()
        assert not failed, str(failed)
        return {"sent": len(command["messages"])}

    def subscribe(self, command: Command, **more: Any) -> Any:
        return self.client.subscribe(
            command["topic"], command["subscription"], getattr(self.pulsar.ConsumerType, command["type"]),
            initial_position=self.pulsar.InitialPosition.Earliest, **self.options(command), **more,
        )  # fmt: skip

    def consume(self, command: Command) -> Command:
        actions = self.pulsar.ConsumerCryptoFailureAction
        consumer = self.subscribe(
            command, crypto_failure_action=actions.CONSUME if command.get("undecrypted") else actions.FAIL
        )
        found = []
        for _ in range(command["count"]):
            message = consumer.receive(WAIT_MS)
            found.append(self.described(command, message))
            if message.message_id().batch_index() not in command.get("left", ()):
                consumer.acknowledge(message)
        consumer.close()
        return {"messages": found}

    def described(self, command: Command, message: Any) -> Command:
        content = message.data()
        if command.get("schema") in ("JSON", "AVRO"):
            value = message.value()
            assert value.a == len(value.b), (value.a, value.b)
            content = value.b.encode()
        return {
            "text": content.decode(errors="replace") if len(content) < LONG else hashlib.sha256(content).hexdigest(),
            "key": message.partition_key(),
            "ordering_key": message.ordering_key(),
            "properties": message.properties(),
            "event_time": message.event_timestamp() or 0,
            "batch_index": message.message_id().batch_index(),
            "age_ms": int(time.time() * 1000) - message.publish_timestamp(),
        }

    def dead_letter(self, command: Command) -> Command:
        letters = self.subscribe({**command, "topic": command["letters"], "subscription": "check", "type": "Shared"})
        policy = self.pulsar.ConsumerDeadLetterPolicy(1, command["letters"])
        consumer = self.subscribe(command, dead_letter_policy=policy, negative_ack_redelivery_delay_ms=100)
        for _ in range(2 * command["count"]):
            consumer.negative_acknowledge(consumer.receive(WAIT_MS))
        found = []
        deadline = time.monotonic() + WAIT_MS / 1000
        while len(found) < command["count"] and time.monotonic() < deadline:
            for each, keep in ((consumer, False), (letters, True)):
                try:
                    message = each.receive(100)
                except self.pulsar.Timeout:
                    continue
                if keep:
                    found.append(message.data().decode())
        letters.close()
        consumer.close()
        return {"letters": found}

    def open(self, command: Command) -> Command:
        by_index = {"batch_index_ack_enabled": True, "properties": {"magnetar.index_acks": "true"}}
        consumer = self.subscribe(command, **(by_index if command.get("by_index") else {}))
        self.kept = self.client.create_producer(command["topic"]), consumer
        return {}

    def send(self, command: Command) -> Command:
        assert self.kept is not None
        for text in command["texts"]:
            self.kept[0].send(text.encode())
        return {}

    def receive(self, command: Command) -> Command:
        """Until all of these texts came; what was acknowledged before may come again."""
        assert self.kept is not None
        missing, came = set(command["texts"]), []
        while missing:
            message = self.kept[1].receive(WAIT_MS)
            self.kept[1].acknowledge(message)
            came.append(message.data().decode())
            missing.discard(came[-1])
        return {"came": came}

    def examples(self, command: Command) -> Command:
        """What the client's documentation shows first, each once."""
        shown: dict[str, Callable[[str], None]] = {
            "producer and consumer": self.show_consumer, "reader": self.show_reader, "table view": self.show_table_view,
            "multi-topics": self.show_topics, "pattern": self.show_pattern, "listener": self.show_listener,
        }  # fmt: skip
        for number, example in enumerate(shown.values()):
            example(f"{command['topic']}-{number}")
        return {"ran": sorted(shown)}

    def show_consumer(self, topic: str) -> None:
        consumer = self.client.subscribe(topic, "my-sub")
        producer = self.client.create_producer(topic)
        for number in range(10):
            producer.send(b"hello-%d" % number)
        for number in range(10):
            message = consumer.receive(WAIT_MS)
            assert message.data() == b"hello-%d" % number
            consumer.acknowledge(message)

    def show_reader(self, topic: str) -> None:
        self.client.create_producer(topic).send(b"one")
        reader = self.client.create_reader(topic, self.pulsar.MessageId.earliest)
        assert reader.has_message_available()
        assert reader.read_next(WAIT_MS).data() == b"one"
        assert not reader.has_message_available()

    def show_table_view(self, topic: str) -> None:
        producer = self.client.create_producer(topic)
        for number in range(6):
            producer.send(b"%d" % number, partition_key=f"k{number % 2}")
        view = self.client.create_table_view(topic)
        assert (len(view), view.get("k0"), view.get("k1")) == (2, b"4", b"5")
        view.close()

    def show_topics(self, topic: str) -> None:
        self.both(topic, [f"persistent://public/default/{topic}-a", f"persistent://public/default/{topic}-b"])

    def show_pattern(self, topic: str) -> None:
        for each in "ab":
            self.client.create_producer(f"{topic}-{each}").close()
        self.both(topic, re.compile(f"persistent://public/default/{topic}-.*"))

    def both(self, topic: str, topics: Any) -> None:
        consumer = self.client.subscribe(topics, "my-sub", initial_position=self.pulsar.InitialPosition.Earliest)
        for each in "ab":
            self.client.create_producer(f"{topic}-{each}").send(each.encode())
        assert {consumer.receive(WAIT_MS).data() for _ in "ab"} == {b"a", b"b"}
        consumer.close()

    def show_listener(self, topic: str) -> None:
        found: list[bytes] = []

        def listen(consumer: Any, message: Any) -> None:
            found.append(message.data())
            consumer.acknowledge(message)

        consumer = self.client.subscribe(topic, "my-sub", message_listener=listen)
        self.client.create_producer(topic).send(b"heard")
        deadline = time.monotonic() + WAIT_MS / 1000
        while not found and time.monotonic() < deadline:
            time.sleep(0.01)
        assert found == [b"heard"]
        consumer.close()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the official client logs to stdout
    driver = Driver(*sys.argv[1:])
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(driver, command["do"])(command)
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
