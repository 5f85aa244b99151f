"""Requests and replies: a server quotes prices, at a rate that an operator changes while it runs.

    python examples/request_reply.py magnetar://localhost:7650
"""

import sys
from time import monotonic
from typing import Any
from uuid import uuid4

import magnetar

PRICES = {b"ACME": b"17", b"MAGNETAR": b"42"}


def ask(client: Any, topic: str, name: bytes, timeout: float) -> str:
    """The price, or why there is none."""
    try:
        payload: bytes = client.request(topic, name, timeout).data()
        return payload.decode()
    except magnetar.RequestFailed as error:
        return error.error_class
    except magnetar.Timeout as error:
        return str(error)


def main(service_url: str) -> None:
    topic = f"quotes-{uuid4().hex[:8]}"
    limiter = magnetar.RateLimiter(1)  # a second, until an operator says otherwise

    def quote(message: Any) -> bytes:
        return PRICES[message.data()]

    with magnetar.Client(service_url) as client:
        limiter.watch(client, f"{topic}-rates", "quotes")
        with client.create_producer(f"{topic}-rates") as operator:
            operator.send(b"1000", partition_key="quotes")
        limiter.wait()
        with client.serve(topic, quote, threads=4, rate=limiter):
            begin = monotonic()
            for _ in range(10):
                assert client.request(topic, b"MAGNETAR", timeout=30).data() == b"42"
            print(f"10 replies in {monotonic() - begin:.2f} s")
            failed = ask(client, topic, b"UNKNOWN", 30)
            print("the server raised", failed)
            assert failed == "KeyError"
        late = ask(client, topic, b"ACME", 0.5)
        print(late)
        assert late.startswith("no reply"), "the server was stopped"


if __name__ == "__main__":
    main(sys.argv[1])
