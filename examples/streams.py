"""Totals by customer, exactly once, though the program fails and starts again: `magnetar.streams`.

    python examples/streams.py magnetar://localhost:7650
"""

import sys
from uuid import uuid4

import magnetar
from magnetar import streams

ORDERS = 300
CUSTOMERS = ("Ada", "Grace", "Edsger")


class PowerCut(Exception):
    """What happens to programs."""


def make_app(run: str, fails_at: int) -> streams.App:
    """The app, which fails at one of its calls."""
    app, calls = streams.App("totals"), 0

    @app.step(f"orders-{run}", f"bills-{run}", state=f"totals-{run}")
    def bill(message: magnetar.Message, context: streams.Context) -> bytes:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise PowerCut
        customer = message.partition_key()
        total = context.state[customer] = context.state.get(customer, 0) + int(message.data())
        return b"%d so far" % total

    return app


def main(service_url: str) -> None:
    run = uuid4().hex[:8]
    with magnetar.Client(service_url) as client:
        with client.create_producer(f"orders-{run}", batching_enabled=True) as shop:
            for number in range(ORDERS):
                shop.send_async(b"%d" % number, None, partition_key=CUSTOMERS[number % 3])
            shop.flush()
        for fails_at in (120, 0):
            try:
                make_app(run, fails_at).start(service_url, idle_timeout_ms=1000)
            except PowerCut:
                print("the program failed, and starts again")
        with client.create_table_view(f"totals-{run}") as view:
            totals = {customer: int(view.get(customer)) for customer in CUSTOMERS}
    assert totals == {name: sum(range(at, ORDERS, 3)) for at, name in enumerate(CUSTOMERS)}
    print(f"every order counts once: {totals}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "magnetar://localhost:7650")
