"""Administration: AdminClient (asyncio), Admin (blocking), and the classes of the values that their methods return.

    with magnetar.admin.Admin("magnetar://localhost:7650") as admin:
        admin.create_topic("flights", partitions=4)
        for part in admin.parts("flights"):
            print(admin.topic_stats(part).end_index)

Values are frozen dataclasses (proto/statistics.py), never messages of a wire format: a Transport makes them
(client/admin/grpc_transport.py: over gRPC). `errors` contains the exceptions that the methods raise; `Policies` and
`SchemaInfo` are types of parameters."""

from __future__ import annotations

from ...proto import errors as errors
from ...proto import operations as operations
from ...proto import statistics as values  # noqa: F401
from ...proto.operations import Operation as Operation
from ...proto.policies import Policies as Policies
from ...proto.schema import SchemaInfo as SchemaInfo
from ...proto.statistics import *  # noqa: F403
from .blocking import Admin as Admin
from .client import AdminClient as AdminClient
from .grpc_transport import FindResult as FindResult
from .grpc_transport import StoredMessage as StoredMessage
from .grpc_transport import Transport as Transport
