"""`magnetar.asyncio`: the names of `pulsar.asyncio`.

    from magnetar.asyncio import Client

It is registered under that name by the package's `__init__`, on first use: a file of that name in the repository's root
would shadow the standard library for whatever is started there.
"""

from __future__ import annotations

from .batch_receive import ConsumerBatchReceivePolicy
from .client import Client
from .consumer import Consumer
from .errors import PulsarException, Result
from .events import ConsumerEventListener
from .message import Message
from .message_id import MessageId
from .producer import Producer
from .reader import Reader
from .settings import ConsumerKeySharedPolicy
from .table_view import TableView

__all__ = [
    "Client",
    "Consumer",
    "ConsumerBatchReceivePolicy",
    "ConsumerEventListener",
    "ConsumerKeySharedPolicy",
    "Message",
    "MessageId",
    "Producer",
    "PulsarException",
    "Reader",
    "Result",
    "TableView",
]
