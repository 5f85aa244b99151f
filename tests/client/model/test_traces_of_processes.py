"""A trace over processes: the context of what one process sends is that to which the span of another one links."""

import json
import subprocess
import sys

import pytest

import magnetar
from magnetar.cli.common.processes import Processes
from tests.client.model.test_tracing import EARLIEST, Recorded, trace

pytestmark = pytest.mark.processes

PROCESSES = """
import json, sys
import magnetar
from tests.client.model.test_tracing import EARLIEST, Recorded

recorded = Recorded()
tracing = magnetar.Tracing(recorded.provider)
with magnetar.Client(sys.argv[1], tracing=tracing) as client:
    consumer = client.subscribe("orders", "billing", initial_position=EARLIEST)
    bills = client.create_producer("bills")
    message = consumer.receive(20_000)
    with tracing.processing(message):
        bills.send(message.data())
        consumer.acknowledge(message)
[process] = recorded.all("process")
[send] = recorded.all("send")
print(json.dumps({"link": process.links[0].context.span_id, "trace": process.links[0].context.trace_id,
    "span": process.context.span_id, "parent": send.parent.span_id, "sent": send.context.span_id}))
"""


def test_a_context_crosses_from_process_to_process_and_back(started: Processes, recorded: Recorded) -> None:
    url = started.start("standalone", "standalone", "--port", "0", "--data", "data").wait_ready()
    with magnetar.Client(url, tracing=magnetar.Tracing(recorded.provider)) as client:
        bills = client.subscribe("bills", "s", initial_position=EARLIEST)
        with recorded.tracer.start_as_current_span("order"):
            client.create_producer("orders").send(b"tea")
        done = subprocess.run(
            [sys.executable, "-c", PROCESSES, url], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        bills.acknowledge(bills.receive(20_000))
    send = recorded.one("send").get_span_context()
    assert (found["link"], found["trace"]) == (send.span_id, send.trace_id)
    assert found["parent"] == found["span"]
    assert recorded.one("process").links[0].context.span_id == found["sent"]
    assert recorded.one("process").kind is trace.SpanKind.CONSUMER


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()
