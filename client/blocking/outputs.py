"""`Output`s of blocking programs, for the asyncio client below."""

from __future__ import annotations

from typing import Any

from ..produce.producer import Producer as AsyncProducer
from ..transactions.output import Output
from .producer import Producer


def inner_output(output: Any) -> Any:
    """Returns the output with the asyncio producer in place of the blocking one; anything else as it is."""
    if type(output) is not Output or not isinstance(output.producer, Producer):
        return output
    inner: AsyncProducer = output.producer.inner()
    return Output(
        output.value, output.partition_key, output.ordering_key, output.properties, output.event_timestamp,
        output.deliver_at, output.deliver_after, inner,
    )  # fmt: skip
