"""Transfers between accounts on four topics: both halves of a transfer count, or none of it.

    python examples/bank_transfer.py magnetar://localhost:7650
"""

import random
import sys
from collections import Counter
from uuid import uuid4

import magnetar

BANKS = 4
TRANSFERS = 40


def transfer(
    client: magnetar.Client, banks: list[magnetar.Producer], number: int, payer: int, payee: int, amount: int
) -> None:
    """Every seventh customer changes his mind after the first half."""
    with client.transaction() as txn:
        banks[payer].send(b"%d" % -amount, {"transfer": str(number)}, txn=txn)
        if number % 7 == 6:
            raise LookupError(f"transfer {number} is called off")
        banks[payee].send(b"%d" % amount, {"transfer": str(number)}, txn=txn)


def main(service_url: str) -> None:
    run = uuid4().hex[:8]
    topics = [f"bank-{number}-{run}" for number in range(BANKS)]
    rng = random.Random(7)
    called_off = 0
    with magnetar.Client(service_url) as client:
        auditor = client.subscribe(topics, "audit", initial_position=magnetar.InitialPosition.Earliest)
        banks = [client.create_producer(topic) for topic in topics]
        for number in range(TRANSFERS):
            payer, payee = rng.sample(range(BANKS), 2)
            try:
                transfer(client, banks, number, payer, payee, rng.randrange(1, 100))
            except LookupError:
                called_off += 1

        sums: Counter[str] = Counter()
        halves: Counter[str] = Counter()
        while True:
            try:
                message = auditor.receive(timeout_millis=1000)
            except magnetar.Timeout:
                break
            sums[message.properties()["transfer"]] += int(message.data())
            halves[message.properties()["transfer"]] += 1
            auditor.acknowledge(message)

    print(len(halves), "transfers,", called_off, "called off, the sum is", sum(sums.values()))
    assert len(halves) == TRANSFERS - called_off
    assert set(halves.values()) == {2}
    assert set(sums.values()) == {0}


if __name__ == "__main__":
    main(sys.argv[1])
