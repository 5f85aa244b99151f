"""The Transactions service of proto/wire.proto, and what Admin says of transactions: translates and calls."""

from __future__ import annotations

from ....proto import wire_pb2 as wire
from ....proto.errors import NotAllowed
from ....runtime.network import CallContext


class TransactionAdminService:
    """The rpcs of Admin about transactions."""

    async def list_transactions(
        self, request: wire.ListTransactionsRequest, context: CallContext
    ) -> wire.ListTransactionsReply:
        raise NotAllowed("transactions are not served")

    async def abort_transaction(self, request: wire.TransactionId, context: CallContext) -> wire.TransactionReply:
        raise NotAllowed("transactions are not served")

    async def detach_transaction(self, request: wire.DetachTransactionRequest, context: CallContext) -> wire.Empty:
        raise NotAllowed("transactions are not served")
