"""Batches: many messages travel and are stored as one entry, and are received many at a time.

    python examples/batches.py magnetar://localhost:7650
"""

import sys
from uuid import uuid4

import magnetar

MESSAGES = 1000


def main(service_url: str) -> None:
    topic = f"batches-{uuid4().hex[:8]}"
    failures: list[magnetar.Result] = []

    def sent(result: magnetar.Result, message_id: magnetar.MessageId) -> None:
        """Is called in the client's thread, so it is short and calls nothing that waits."""
        if result != magnetar.Result.Ok:
            failures.append(result)

    with magnetar.Client(service_url) as client:
        policy = magnetar.ConsumerBatchReceivePolicy(max_num_message=250, timeout_ms=1000)
        consumer = client.subscribe(topic, "billing", batch_receive_policy=policy)
        producer = client.create_producer(
            topic,
            batching_enabled=True,
            batching_max_messages=100,
            batching_max_publish_delay_ms=10,
            block_if_queue_full=True,  # `send_async` waits for room instead of raising ProducerQueueIsFull
            compression_type=magnetar.CompressionType.ZSTD,
        )
        for number in range(MESSAGES):
            producer.send_async(f"order {number}".encode(), sent)
        producer.flush()  # returns when every message has its outcome
        assert not failures, failures

        received: list[magnetar.Message] = []
        while len(received) < MESSAGES:
            messages = consumer.batch_receive()
            assert messages, "nothing came within timeout_ms"
            received += messages
            consumer.acknowledge(messages)

    entries = {(each.message_id().ledger_id(), each.message_id().entry_id()) for each in received}
    print("received", len(received), "messages in", len(entries), "entries")
    assert [each.data() for each in received] == [f"order {number}".encode() for number in range(MESSAGES)]
    assert len(entries) < MESSAGES


if __name__ == "__main__":
    main(sys.argv[1])
