"""Pulling: messages by index, without a subscription, with offsets that the program keeps.

    python examples/pulling.py magnetar://localhost:7650
"""

import sys
import tempfile
from pathlib import Path
from uuid import uuid4

import magnetar


def main(service_url: str) -> None:
    topic = f"pulling-{uuid4().hex[:8]}"
    with magnetar.Client(service_url) as client, tempfile.TemporaryDirectory() as folder:
        consumer = client.subscribe(topic, "board")
        with client.create_producer(topic) as producer:
            for number in range(6):
                message_id = producer.send(f"order {number}".encode(), properties={"even": str(number % 2 == 0)})
        print("stored:", message_id)

        offsets = magnetar.FileOffsetStore(str(Path(folder) / "offsets"))
        with client.pull_consumer(topic, offsets=offsets) as pull:
            index = pull.load_offset()
            found = pull.pull(index, max_messages=4)
            print(found.status, [message.data() for message in found.messages], "go on at", found.next_index)
            pull.store_offset(found.next_index)
            assert pull.load_offset() == 4

            wanted = pull.pull(0, filter="even = TRUE")
            assert [message.data() for message in wanted.messages] == [b"order 0", b"order 2", b"order 4"]
            assert pull.pull(6).status is magnetar.PullStatus.NO_NEW
            assert pull.pull(99).status is magnetar.PullStatus.OUT_OF_RANGE
        offsets.close()

        message = consumer.receive(now=True)  # asks the broker, and does not wait
        consumer.commit(message.index() + 1, note=b"checkpoint 1")
        (place,) = consumer.progress().values()
        print("position", place.position, "of", place.end, "with the note", place.note)
        assert (place.position, place.lag, place.note) == (1, 5, b"checkpoint 1")


if __name__ == "__main__":
    main(sys.argv[1])
