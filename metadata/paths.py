"""Every path of the metadata tree, in one place. Names in paths are percent-encoded, so they hold no '/'.

    /cluster                                    ClusterRecord: instance id, format
    /ids/ledger                                 CounterRecord: next ledger id (taken in blocks, never reused)
    /ledgers/<id, 20 digits>                    LedgerRecord
    /deleted/<page, 20 digits>                  DeletedLedgersRecord: the ledgers that were deleted (ledger/client.py)
    /incarnations                               IncarnationsRecord: read-only; not in a ZooKeeper, and in no listing
    /bookies/cookies/<uuid>                     CookieRecord
    /bookies/available/<uuid>                   BookieRecord (ephemeral)
    /bookies/racks                              RacksRecord: racks of bookies, which override what they register
    /damaged/<ledger id, 20 digits>/<uuid>      DamagedEntriesRecord: a ledger's entries that are damaged at a bookie
    /underreplicated/<ledger id, 20 digits>     UnderReplicatedRecord: a ledger that misses copies
    /repair/settings                            RepairSettingsRecord
    /repair/auditor                             AuditorRecord (ephemeral): the process that looks for missing copies
    /repair/locks/<ledger id, 20 digits>        RepairLockRecord (ephemeral): the worker that repairs a ledger
    /repair/workers/<name>                      RepairWorkerRecord (ephemeral): the progress of a worker
    /repair/departing/<uuid>                    DepartingRecord: a bookie whose copies move to others
    /repair/rebalance                           RebalanceRecord: copies move from full bookies to emptier ones
    /brokers/<name>                             BrokerRecord (ephemeral)
    /balancer                                   BalancerRecord (ephemeral): the broker that balances the others
    /draining/<name>                            DrainRecord: a broker that drains until an operator ends it
    /started/<name>                             StartedBrokerRecord: a broker that registered and has not closed
    /members/<role>/<key>                       MemberRecord (ephemeral): a process of a secured cluster, by its key
    /owners/<tenant>/<namespace>/<bundle>       OwnerRecord (ephemeral): which broker serves a bundle of topics
    /tenants/<tenant>                           TenantRecord
    /namespaces/<tenant>/<namespace>            NamespaceRecord
    /partitioned/<tenant>/<ns>/<topic>          PartitionedRecord
    /volatile/<tenant>/<ns>/<topic>             PartitionedRecord of a non-persistent topic; it has no other record
    /topics/<tenant>/<ns>/<topic>               TopicRecord: the list of ledgers (topics and single partitions)
    /policies/@brokers                          PoliciesRecord of all brokers: what changed while they run
    /policies/@groups/<name>                    PoliciesRecord of a resource group: rates of its namespaces together
    /policies/<tenant>                          PoliciesRecord of a tenant
    /policies/<tenant>/<ns>                     PoliciesRecord of a namespace
    /policies/<tenant>/<ns>/<topic>             PoliciesRecord of a topic, or of all partitions of a topic
    /grants/<tenant>/<ns>                       GrantsRecord: what roles may do in a namespace and its topics
    /schedules/<tenant>/<ns>/<topic>            SchedulesRecord: of a topic, or of all partitions of a topic
    /scheduled/<tenant>/<ns>/<topic>/<name>     ScheduleProgressRecord: how far a schedule has come
    /schemas/<tenant>/<ns>/<topic>              SchemaListRecord: of a topic, or of all partitions of a topic
    /schemas/<tenant>/<ns>/<topic>/<version>    SchemaRecord
    /cursors/<tenant>/<ns>/<topic>/<sub>        CursorRecord
    /transactions/settings                      TransactionsRecord: how many coordinators there are
    /transactions/coordinators/<number>         CoordinatorRecord: who has it, and its ledger
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import quote, unquote

from ..proto.names import parse_number

CLUSTER = "/cluster"
LEDGER_IDS = "/ids/ledger"
INCARNATIONS = "/incarnations"
LEDGERS = "/ledgers"
DELETED_LEDGERS = "/deleted"
COOKIES = "/bookies/cookies"
AVAILABLE_BOOKIES = "/bookies/available"
BOOKIES_ROOT = "/bookies"
RACKS = "/bookies/racks"
DAMAGED_LEDGERS = "/damaged"
UNDER_REPLICATED_LEDGERS = "/underreplicated"
REPAIR_SETTINGS = "/repair/settings"
REPAIR_AUDITOR = "/repair/auditor"
REPAIR_LOCKS = "/repair/locks"
REPAIR_WORKERS = "/repair/workers"
DEPARTING_BOOKIES = "/repair/departing"
REBALANCE = "/repair/rebalance"
BROKERS = "/brokers"
BALANCER = "/balancer"
DRAINING_BROKERS = "/draining"
STARTED_BROKERS = "/started"
MEMBERS = "/members"
BUNDLE_OWNERS = "/owners"
TENANTS = "/tenants"
NAMESPACES = "/namespaces"
PARTITIONED = "/partitioned"
VOLATILE = "/volatile"
TOPICS = "/topics"
CURSORS = "/cursors"
POLICIES = "/policies"
BROKER_POLICIES = "/policies/@brokers"
"""A path that belongs to no tenant, because `encode_segment` encodes an @."""
RESOURCE_GROUPS = "/policies/@groups"
"""Likewise."""
GRANTS = "/grants"
SCHEMAS = "/schemas"
SCHEDULES = "/schedules"
SCHEDULED_TOPICS = "/scheduled"
TRANSACTION_SETTINGS = "/transactions/settings"
COORDINATORS = "/transactions/coordinators"


EPHEMERAL_FOLDERS = (
    AVAILABLE_BOOKIES, REPAIR_AUDITOR, REPAIR_LOCKS, REPAIR_WORKERS, BROKERS, BALANCER, MEMBERS, BUNDLE_OWNERS,
)  # fmt: skip
"""The nodes whose records end with the session of a process, and the folders of such nodes."""


@lru_cache(maxsize=4096)
def encode_segment(name: str) -> str:
    """Encodes any non-empty text as one segment of a metadata path, and returns it. `decode_segment` does the reverse.
    Also encodes the texts "." and "..", which are not allowed as segments."""
    encoded = quote(name, safe="-=:.,;_~ ")
    return encoded.replace(".", "%2E") if encoded in (".", "..") else encoded


def decode_segment(segment_: str) -> str:
    """Returns the name that `encode_segment` encoded as this segment of a path."""
    return unquote(segment_)


def ledger(ledger_id: int) -> str:
    """Returns the path of the record of a ledger."""
    return f"{LEDGERS}/{ledger_id:020d}"


def ledger_id(segment_: str) -> int:
    """Returns the ledger id that is written in a segment of a path. Raises ValueError if the segment is not one that
    `ledger` makes."""
    if len(segment_) != 20 or not segment_.isascii() or not segment_.isdigit():
        raise ValueError(f"{segment_!r} is no ledger id of 20 digits")
    return int(segment_)


def deleted_ledgers(page: int) -> str:
    """Returns the path of the record that lists the deleted ledgers among the ids of one page. A page is a fixed number
    of consecutive ids (ledger/client.py)."""
    return f"{DELETED_LEDGERS}/{page:020d}"


def cookie(bookie: str) -> str:
    """Returns the path of the cookie record of a bookie. `bookie`: its uuid."""
    return f"{COOKIES}/{bookie}"


def bookie(bookie_: str) -> str:
    """Returns the path at which a running bookie is registered. `bookie_`: its uuid."""
    return f"{AVAILABLE_BOOKIES}/{bookie_}"


def damaged_copies(ledger_id_: int) -> str:
    """Returns the folder of the reports about damaged copies of a ledger."""
    return f"{DAMAGED_LEDGERS}/{ledger_id_:020d}"


def damaged_copies_of_bookie(ledger_id_: int, bookie_: str) -> str:
    """Returns the path of a bookie's report about its damaged copies of a ledger."""
    return f"{damaged_copies(ledger_id_)}/{bookie_}"


def under_replicated(ledger_id_: int) -> str:
    """Returns the path of the repair mark of a ledger that lacks copies."""
    return f"{UNDER_REPLICATED_LEDGERS}/{ledger_id_:020d}"


def repair_lock(ledger_id_: int) -> str:
    """Returns the path of the lock of the worker that repairs a ledger."""
    return f"{REPAIR_LOCKS}/{ledger_id_:020d}"


def repair_worker(worker: str) -> str:
    """Returns the path at which a repair worker is registered."""
    return f"{REPAIR_WORKERS}/{encode_segment(worker)}"


def departing_bookie(bookie_: str) -> str:
    """Returns the path of the record that marks a bookie as being emptied, before it is removed."""
    return f"{DEPARTING_BOOKIES}/{bookie_}"


def broker(broker_: str) -> str:
    """Returns the path at which a running broker is registered."""
    return f"{BROKERS}/{encode_segment(broker_)}"


def draining_broker(broker_: str) -> str:
    """Returns the path of the order to drain a broker."""
    return f"{DRAINING_BROKERS}/{encode_segment(broker_)}"


def started_broker(broker_: str) -> str:
    """Returns the path of the record which says that a broker has started and has not closed. It outlives the broker's
    session, so it shows whether a broker that is not registered died or closed."""
    return f"{STARTED_BROKERS}/{encode_segment(broker_)}"


def member(role: str, key: str) -> str:
    """Returns the path of the record of a member of the cluster. `role`: "broker", "bookie" or "operator"; `key`: its
    public key, 64 hexadecimal digits."""
    return f"{MEMBERS}/{role}/{key}"


def bundle_owner(tenant_: str, namespace_: str, bundle: str) -> str:
    """Returns the path of the owner record of a bundle of a namespace. `bundle`: its name, such as
    0x00000000_0x40000000."""
    return f"{BUNDLE_OWNERS}/{encode_segment(tenant_)}/{encode_segment(namespace_)}/{bundle}"


def parse_bundle_owner(path: str) -> tuple[str, str] | None:
    """Returns (tenant/namespace, bundle) from the path of the owner record of a bundle; None if `path` is not such a
    path."""
    root, _, tail = path.partition(f"{BUNDLE_OWNERS}/")
    parts = tail.split("/")
    if root or len(parts) != 3 or "_" not in parts[2]:
        return None
    return f"{decode_segment(parts[0])}/{decode_segment(parts[1])}", parts[2]


def tenant(tenant_: str) -> str:
    """Returns the path of the record of a tenant."""
    return f"{TENANTS}/{encode_segment(tenant_)}"


def namespaces(tenant_: str) -> str:
    """Returns the folder of the records of a tenant's namespaces."""
    return f"{NAMESPACES}/{encode_segment(tenant_)}"


def namespace(tenant_: str, namespace_: str) -> str:
    """Returns the path of the record of a namespace."""
    return f"{namespaces(tenant_)}/{encode_segment(namespace_)}"


def partitioned_topics(tenant_: str, namespace_: str, *, persistent: bool = True) -> str:
    """Returns the folder of the records of a namespace's partitioned topics. `persistent`: False for non-persistent
    topics, whose records are in another folder."""
    return f"{PARTITIONED if persistent else VOLATILE}/{encode_segment(tenant_)}/{encode_segment(namespace_)}"


def partitioned_topic(tenant_: str, namespace_: str, topic_: str, *, persistent: bool = True) -> str:
    """Returns the path of the record of a partitioned topic. `persistent`: False for non-persistent topics, whose
    records are in another folder."""
    return f"{partitioned_topics(tenant_, namespace_, persistent=persistent)}/{encode_segment(topic_)}"


def topics(tenant_: str, namespace_: str) -> str:
    """Returns the folder of the records of a namespace's topics and partitions."""
    return f"{TOPICS}/{encode_segment(tenant_)}/{encode_segment(namespace_)}"


def topic(tenant_: str, namespace_: str, topic_: str) -> str:
    """Returns the path of the record of a topic or partition. `topic_`: its name in the namespace; for a partition with
    the suffix."""
    return f"{TOPICS}/{encode_segment(tenant_)}/{encode_segment(namespace_)}/{encode_segment(topic_)}"


def cursors(tenant_: str, namespace_: str, topic_: str) -> str:
    """Returns the folder of the cursor records of a topic."""
    return f"{CURSORS}/{encode_segment(tenant_)}/{encode_segment(namespace_)}/{encode_segment(topic_)}"


def cursor(tenant_: str, namespace_: str, topic_: str, subscription: str) -> str:
    """Returns the path of the cursor record of a subscription."""
    return f"{cursors(tenant_, namespace_, topic_)}/{encode_segment(subscription)}"


def grants(tenant_: str, namespace_: str) -> str:
    """Returns the path of the record of the access rights of a namespace."""
    return f"{GRANTS}/{encode_segment(tenant_)}/{encode_segment(namespace_)}"


def resource_group(name: str) -> str:
    """Returns the path of the record of a resource group."""
    return f"{RESOURCE_GROUPS}/{encode_segment(name)}"


def tenant_policies(tenant_: str) -> str:
    """Returns the path of the record of a tenant's policies. Below it are those of its namespaces."""
    return f"{POLICIES}/{encode_segment(tenant_)}"


def namespace_policies(tenant_: str, namespace_: str) -> str:
    """Returns the path of the record of a namespace's policies. Below it are the records of its topics' policies."""
    return f"{POLICIES}/{encode_segment(tenant_)}/{encode_segment(namespace_)}"


def topic_policies(tenant_: str, namespace_: str, topic_: str) -> str:
    """Returns the path of the record of a topic's policies; `topic_` must be without the suffix of a partition."""
    return f"{namespace_policies(tenant_, namespace_)}/{encode_segment(topic_)}"


def schemas_of_namespace(tenant_: str, namespace_: str) -> str:
    """Returns the folder below which the schemas of a namespace's topics are stored."""
    return f"{SCHEMAS}/{encode_segment(tenant_)}/{encode_segment(namespace_)}"


def schemas(tenant_: str, namespace_: str, topic_: str) -> str:
    """Returns the path of the list of a topic's schema versions. Below it is a record for each version. `topic_` must
    be without the suffix of a partition."""
    return f"{schemas_of_namespace(tenant_, namespace_)}/{encode_segment(topic_)}"


def schema(tenant_: str, namespace_: str, topic_: str, version: int) -> str:
    """Returns the path of the record of one version of a topic's schema; `topic_` must be without the suffix of a
    partition."""
    return f"{schemas(tenant_, namespace_, topic_)}/{version}"


def schedules_of_namespace(tenant_: str, namespace_: str) -> str:
    """Returns the folder of the schedule records of a namespace's topics."""
    return f"{SCHEDULES}/{encode_segment(tenant_)}/{encode_segment(namespace_)}"


def schedules(tenant_: str, namespace_: str, topic_: str) -> str:
    """Returns the path of the record of a topic's schedules; `topic_` must be without the suffix of a partition."""
    return f"{schedules_of_namespace(tenant_, namespace_)}/{encode_segment(topic_)}"


def schedule_progress_of_topic(tenant_: str, namespace_: str, topic_: str) -> str:
    """Returns the folder of the progress records of a topic's schedules; `topic_` must be without the suffix of a
    partition."""
    return f"{SCHEDULED_TOPICS}/{encode_segment(tenant_)}/{encode_segment(namespace_)}/{encode_segment(topic_)}"


def schedule_progress(tenant_: str, namespace_: str, topic_: str, name: str) -> str:
    """Returns the path of the progress record of one schedule of a topic."""
    return f"{schedule_progress_of_topic(tenant_, namespace_, topic_)}/{encode_segment(name)}"


def coordinator(number: int) -> str:
    """Returns the path of the record of the transaction coordinator with this number."""
    return f"{COORDINATORS}/{number}"


def parse_coordinators(names: Iterable[str]) -> list[int]:
    """Returns the numbers of the coordinators whose records have these names below COORDINATORS. Leaves out names that
    `coordinator` does not make: another program may have made such a node."""
    numbers = ((name, parse_number(name)) for name in names)
    return [number for name, number in numbers if number is not None and str(number) == name]
