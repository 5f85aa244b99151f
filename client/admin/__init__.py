"""Administration: AdminClient (asyncio), Admin (blocking), and the values that they answer.

    with magnetar.admin.Admin("magnetar://localhost:7650") as admin:
        admin.create_topic("flights", partitions=4)
        for part in admin.parts("flights"):
            print(admin.topic_stats(part).end_index)

Answers are frozen dataclasses (client/admin/values.py), never messages of a wire format: a Transport
(client/admin/operations.py) makes them, over gRPC now. `errors` are what the operations raise, `Policies` and
`SchemaInfo` what some of them take.
"""

from __future__ import annotations

from ...proto import errors as errors
from ...proto.policies import Policies as Policies
from ...proto.schema import SchemaInfo as SchemaInfo
from .blocking import Admin as Admin
from .client import AdminClient as AdminClient
from .operations import Operation as Operation
from .operations import Transport as Transport
from .values import BacklogAnalysis as BacklogAnalysis
from .values import BacklogQuotaState as BacklogQuotaState
from .values import Blocked as Blocked
from .values import BookieInfo as BookieInfo
from .values import BrokerInfo as BrokerInfo
from .values import CompactionState as CompactionState
from .values import CompactionStatus as CompactionStatus
from .values import ConsumerStats as ConsumerStats
from .values import DrainingSlot as DrainingSlot
from .values import KeyDistribution as KeyDistribution
from .values import LedgerState as LedgerState
from .values import LedgerStats as LedgerStats
from .values import LedgerStays as LedgerStays
from .values import LostOfSubscription as LostOfSubscription
from .values import LostRange as LostRange
from .values import NamespaceInfo as NamespaceInfo
from .values import OrphanLedger as OrphanLedger
from .values import Orphans as Orphans
from .values import PendingOfTransaction as PendingOfTransaction
from .values import Permissions as Permissions
from .values import ProducerStats as ProducerStats
from .values import SchemaTest as SchemaTest
from .values import SkippedLost as SkippedLost
from .values import SlotRange as SlotRange
from .values import StoredMessage as StoredMessage
from .values import SubscriptionStats as SubscriptionStats
from .values import SubscriptionType as SubscriptionType
from .values import TenantInfo as TenantInfo
from .values import TopicInternalStats as TopicInternalStats
from .values import TopicOffsets as TopicOffsets
from .values import TopicSchema as TopicSchema
from .values import TopicState as TopicState
from .values import TopicStats as TopicStats
from .values import TopicTransactions as TopicTransactions
from .values import TransactionHere as TransactionHere
from .values import Unloaded as Unloaded
