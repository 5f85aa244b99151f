"""Administration: AdminClient (asyncio), Admin (blocking), and the values that they answer.

    with magnetar.admin.Admin("magnetar://localhost:7650") as admin:
        admin.create_topic("flights", partitions=4)
        for part in admin.parts("flights"):
            print(admin.topic_stats(part).end_index)

Answers are frozen dataclasses (proto/statistics.py), never messages of a wire format: a Transport
(client/admin/transport.py) makes them, over gRPC now. `errors` are what the operations raise, `Policies` and
`SchemaInfo` what some of them take.
"""

from __future__ import annotations

from ...proto import errors as errors
from ...proto import statistics as values  # noqa: F401
from ...proto.operation import Operation as Operation
from ...proto.policies import Policies as Policies
from ...proto.schema import SchemaInfo as SchemaInfo
from ...proto.states import BacklogQuotaState as BacklogQuotaState
from ...proto.states import Blocked as Blocked
from ...proto.states import CompactionState as CompactionState
from ...proto.states import KeyDistribution as KeyDistribution
from ...proto.states import LedgerState as LedgerState
from ...proto.states import SubscriptionType as SubscriptionType
from ...proto.states import TopicState as TopicState
from ...proto.statistics import BacklogAnalysis as BacklogAnalysis
from ...proto.statistics import BookieInfo as BookieInfo
from ...proto.statistics import BrokerInfo as BrokerInfo
from ...proto.statistics import CompactionStatus as CompactionStatus
from ...proto.statistics import ConsumerStats as ConsumerStats
from ...proto.statistics import DrainingSlot as DrainingSlot
from ...proto.statistics import LedgerStats as LedgerStats
from ...proto.statistics import LedgerStays as LedgerStays
from ...proto.statistics import LostOfSubscription as LostOfSubscription
from ...proto.statistics import LostRange as LostRange
from ...proto.statistics import NamespaceInfo as NamespaceInfo
from ...proto.statistics import OrphanLedger as OrphanLedger
from ...proto.statistics import Orphans as Orphans
from ...proto.statistics import PendingOfTransaction as PendingOfTransaction
from ...proto.statistics import Permissions as Permissions
from ...proto.statistics import ProducerStats as ProducerStats
from ...proto.statistics import SchemaTest as SchemaTest
from ...proto.statistics import SkippedLost as SkippedLost
from ...proto.statistics import SlotRange as SlotRange
from ...proto.statistics import SubscriptionStats as SubscriptionStats
from ...proto.statistics import TenantInfo as TenantInfo
from ...proto.statistics import TopicInternalStats as TopicInternalStats
from ...proto.statistics import TopicOffsets as TopicOffsets
from ...proto.statistics import TopicSchema as TopicSchema
from ...proto.statistics import TopicStats as TopicStats
from ...proto.statistics import TopicTransactions as TopicTransactions
from ...proto.statistics import TransactionHere as TransactionHere
from ...proto.statistics import Unloaded as Unloaded
from .blocking import Admin as Admin
from .client import AdminClient as AdminClient
from .stored_messages import StoredMessage as StoredMessage
from .transport import Transport as Transport
