"""recover: a standalone server is killed under load and started again on the same directory."""

from __future__ import annotations

import threading
import time

from ..harness import Options, Run, Usage, server
from ..messaging import TOPIC, Sending, _producer, payloads

LOAD_BYTES = 1 << 30


def recover(options: Options) -> Run:
    """Seconds from the start of the process to the first new ack, after 1 GiB was produced and a kill -9 under load."""
    import magnetar

    with server(options.bookies) as running:
        client = magnetar.Client(running.url)
        client.subscribe(TOPIC, "keeps").close()  # without a subscription, what a ledger holds that ended is trimmed
        sending = Sending(_producer(client, send_timeout_millis=5000), payloads(options.size, options.seed))
        stored = LOAD_BYTES // 256 if options.rehearses else LOAD_BYTES
        sending.run(messages=stored // options.size)
        load = threading.Thread(target=sending.run, kwargs={"seconds": 1.0}, daemon=True)
        load.start()
        time.sleep(0.5)
        running.kill()
        acked = sending.acked
        load.join(30)
        client.close()
        begin = time.perf_counter()
        ready = running.start()
        with magnetar.Client(running.url) as again:
            again.create_producer(TOPIC).send(b"again")
            elapsed = time.perf_counter() - begin
            reader = again.create_reader(TOPIC, magnetar.MessageId.earliest, receiver_queue_size=5000)
            found = 0
            while reader.has_message_available():
                reader.read_next(30_000)
                found += 1
        assert found >= acked + 1, f"{acked} messages were acknowledged before the kill, {found - 1} are there"
        return Run(
            elapsed,
            detail={"ready_s": round(ready, 3), "acked": acked, "found": found},
            processes={"server": Usage(running.pid, from_start=True).read()},
        )
