"""Administration against a real server: what is made is listed, shown, changed and deleted."""

from collections.abc import Callable
from typing import Any

import pytest

from magnetar.proto.policies import POLICIES
from tests.support.processes import Result

pytestmark = pytest.mark.processes
Cli = Callable[..., Result]
Json = Callable[..., Any]


# what each policy is set to, by its options, and what stands there then
SET = {
    "retention": (["-t", "2h", "-s", "10G"], {"retention_minutes": 120, "retention_mib": 10240}),
    "unsubscribed-retention": (["-t", "7d", "-s", "1G"], {"unsubscribed_minutes": 10_080, "unsubscribed_mib": 1024}),
    "message-ttl": (["--messageTTL", "10m"], {"message_ttl_s": 600}),
    "backlog-quota": (
        ["-l", "1G", "-lt", "1h", "-p", "producer_exception", "--no-delayed"],
        {"backlog_quota_bytes": 1 << 30, "backlog_quota_s": 3600, "backlog_quota_policy": "producer_exception",
         "backlog_quota_counts_delayed": False}),
    "deduplication": (["--enable"], {"deduplication": True}),
    "deduplication-snapshot-interval": (["-i", "2m"], {"dedup_snapshot_s": 120}),
    "max-message-size": (["-m", "64K"], {"max_message_bytes": 65536}),
    "delayed-delivery": (["--disable", "--maxDelay", "1d", "-t", "1s"],
                         {"delayed_delivery": False, "max_delay_ms": 86_400_000, "delayed_tick_ms": 1000}),
    "publish-rate": (["-m", "100", "-b", "-1"], {"publish_rate_messages": 100, "publish_rate_bytes": 0}),
    "dispatch-rate": (["-md", "100", "-bd", "5"], {"dispatch_rate_messages": 100, "dispatch_rate_bytes": 5}),
    "subscription-dispatch-rate": (
        ["-md", "100"], {"subscription_dispatch_rate_messages": 100, "subscription_dispatch_rate_bytes": None}),
    "max-producers": (["-p", "3"], {"max_producers": 3}),
    "max-consumers": (["-c", "3"], {"max_consumers": 3}),
    "max-consumers-per-subscription": (["-c", "3"], {"max_consumers_per_subscription": 3}),
    "max-subscriptions-per-topic": (["-s", "3"], {"max_subscriptions": 3}),
    "max-unacked-messages-per-consumer": (["-c", "3"], {"max_unacked_per_consumer": 3}),
    "max-unacked-messages-per-subscription": (["-c", "3"], {"max_unacked_per_subscription": 3}),
    "inactive-topic-policies": (["-t", "1h", "-m", "delete_when_subscriptions_caught_up"],
                                {"inactive_s": 3600, "inactive_mode": "delete_when_subscriptions_caught_up"}),
    "subscription-expiration-time": (["-t", "7d"], {"subscription_expiration_s": 604_800}),
    "compaction-threshold": (["-t", "100M"], {"compaction_threshold_bytes": 100 << 20}),
    "persistence": (["-e", "1", "-w", "1", "-a", "1"], {"ensemble_size": 1, "write_quorum": 1, "ack_quorum": 1}),
    "dead-letter-policy": (["-c", "3", "-t", "dead", "-b", "1s,1m"],
                           {"dead_letter_max_redeliver_count": 3, "dead_letter_topic": "dead",
                            "dead_letter_backoff_s": [1.0, 60.0]}),
    "subscribe-rate": (["-sr", "10", "-st", "1m"], {"subscribe_rate": 10, "subscribe_rate_period_s": 60}),
    "max-topics-per-namespace": (["-t", "7"], {"max_topics": 7}),
    "max-topics-per-tenant": (["-t", "7"], {"max_tenant_topics": 7}),
    "resource-group": (["-rgn", "batch"], {"resource_group": "batch"}),
    "max-storage-per-namespace": (
        ["-l", "10G", "-p", "producer_exception"],
        {"namespace_storage_bytes": 10 << 30, "namespace_storage_policy": "producer_exception"}),
    "max-storage-per-tenant": (
        ["-l", "1000"], {"tenant_storage_bytes": 1000, "tenant_storage_policy": None}),
    "namespace-publish-rate": (
        ["-m", "100", "-b", "-1"], {"namespace_publish_rate_messages": 100, "namespace_publish_rate_bytes": 0}),
    "namespace-dispatch-rate": (
        ["-md", "100", "-bd", "5"], {"namespace_dispatch_rate_messages": 100, "namespace_dispatch_rate_bytes": 5}),
    "tenant-publish-rate": (
        ["-m", "100"], {"tenant_publish_rate_messages": 100, "tenant_publish_rate_bytes": None}),
    "tenant-dispatch-rate": (
        ["-md", "100", "-bd", "5"], {"tenant_dispatch_rate_messages": 100, "tenant_dispatch_rate_bytes": 5}),
    "auto-subscription-creation": (["--disable"], {"auto_subscription_creation": False}),
    "subscription-types-enabled": (["-t", "Shared,Failover"], {"subscription_types": ["Shared", "Failover"]}),
    "schema-compatibility-strategy": (["-c", "FORWARD"], {"schema_compatibility": "forward"}),
    "schema-validation-enforce": (["--enable"], {"schema_validation_enforced": True}),
    "is-allow-auto-update-schema": (["--disable"], {"schema_auto_update": False}),
    "broker-isolation": (["-p", "tier=gold,zone=a", "-f", "*", "-m", "2"],
                         {"primary_broker_labels": ["tier=gold", "zone=a"], "fallback_broker_labels": ["*"],
                          "primary_brokers_min": 2}),
    "bookie-affinity-group": (["-pg", "fast,big", "-sg", "slow"],
                              {"primary_bookie_groups": ["fast", "big"], "secondary_bookie_groups": ["slow"]}),
    "key-index": (["-i", "keys"], {"key_index": "keys"}),
    "durability": (["-d", "disk"], {"durability": "disk"}),
}  # fmt: skip


def test_every_policy_is_set_shown_inherited_and_removed(cli: Cli, cli_json: Json) -> None:
    assert set(SET) == {verb.name for verb in POLICIES}
    cli("namespaces", "create", "public/laid")
    cli("resourcegroups", "create", "batch")
    cli("topics", "create", "public/laid/t", "-p", "2")
    for verb in POLICIES:
        options, wanted = SET[verb.name]
        at_namespace = verb.name_at("namespaces")
        if verb.levels == ("tenants",):
            cli("tenants", f"set-{verb.name}", "public", *options)
            assert cli_json("tenants", f"get-{verb.name}", "public") == wanted
            cli("namespaces", f"set-{verb.name}", "public/laid", *options, code=2)
            cli("tenants", f"remove-{verb.name}", "public")
            assert set(cli_json("tenants", f"get-{verb.name}", "public").values()) == {None}
            continue
        if verb.levels == ("namespaces",):
            cli("namespaces", f"set-{at_namespace}", "public/laid", *options)
            assert cli_json("namespaces", f"get-{at_namespace}", "public/laid") == wanted
            cli("topics", f"set-{verb.name}", "public/laid/t", *options, code=2)
            continue
        cli("namespaces", f"set-{at_namespace}", "public/laid", *options)
        assert cli_json("namespaces", f"get-{at_namespace}", "public/laid") == wanted
        inherited = cli_json("topics", f"get-{verb.name}", "public/laid/t")
        assert set(inherited.values()) == {None}, "nothing is laid down at the topic itself"
        applied = cli_json("topics", f"get-{verb.name}", "public/laid/t-partition-1", "--applied")
        assert {name: value for name, value in wanted.items() if value is not None}.items() <= applied.items()
        cli("namespaces", f"remove-{at_namespace}", "public/laid")
        assert set(cli_json("namespaces", f"get-{at_namespace}", "public/laid").values()) == {None}
        cli("topics", f"set-{verb.name}", "public/laid/t", *options)
        assert cli_json("topics", f"get-{verb.name}", "public/laid/t") == wanted
    assert "nothing to set" in cli("topics", "set-retention", "public/laid/t", code=2).err
    cli("topics", "set-max-producers", "public/laid/none", "-p", "1", code=4)


def test_a_subscription_has_properties_and_a_policy_of_its_own_among_them(cli: Cli, cli_json: Json) -> None:
    cli("topics", "create", "with-properties", "-p", "2")
    cli("topics", "create-subscription", "with-properties", "-s", "s", "-p", "owner=ada")
    read = ("topics", "get-subscription-properties", "with-properties", "-s", "s")
    assert {(row["property"], row["value"]) for row in cli_json(*read)} == {("owner", "ada")}
    update = ("topics", "update-subscription-properties", "with-properties", "-s")
    cli(*update, "s", "-p", "dead-letter.backoff-s=1,60,a=b")
    broker = cli_json("brokers", "list")[0]["name"]
    assert f"moved to {broker}" in cli("topics", "unload", "with-properties", "--to", broker).out
    assert "no broker 'nowhere'" in cli("topics", "unload", "with-properties", "--to", "nowhere", code=4).err
    cli("topics", "unload", "with-properties")
    found = {(row["property"], row["value"]) for row in cli_json(*read)}
    assert found == {("dead-letter.backoff-s", "1,60"), ("a", "b")}
    wrong = "dead-letter.max-redeliver-count=many"
    assert "whole number" in cli(*update, "s", "-p", wrong, code=2).err
    cli(*update, "none", "-p", "a=b", code=4)
    cli(*update, "s", code=2)
    cli(*update, "s", "--clear")
    assert cli_json(*read) == []


def test_a_topic_tells_of_its_partitions_places_and_bytes(cli: Cli, cli_json: Json) -> None:
    cli("produce", "told", "-m", "x")
    metadata = cli_json("topics", "get-partitioned-topic-metadata", "told")
    assert metadata == {"topic": "persistent://public/default/told", "partitions": 0}
    first = cli_json("topics", "get-message-id", "told", "-d", "1h")[0]["messageId"].rpartition(":")[0]
    assert first.endswith(":0")
    sizes = [cli_json("topics", "get-backlog-size", "told", "-m", place)[0]["bytes"] for place in ("earliest", first)]
    assert sizes[0] > sizes[1] == 0
    cli("topics", "create", "told-parted", "-p", "2")
    cli("topics", "examine-messages", "told-parted", code=4)
    cli("produce", "told-parted", "-m", "only", "-k", "k")
    assert "only" in cli("topics", "examine-messages", "told-parted").out, "of the partition that has one"
    cli("topics", "get-message-id", "nowhere", "-d", "1h", code=4)
    cli("topics", "get-message-id", "told", "-d", "yesterday", code=2)
    cli("topics", "create", "non-persistent://public/default/fleeting", "-p", "2")
    assert "non-persistent://public/default/fleeting" in cli_json("topics", "list", "public/default")


def test_ledgers_that_nobody_refers_to_are_shown(cli: Cli, cli_json: Json) -> None:
    assert cli_json("ledgers", "orphans") == []
    assert cli_json("ledgers", "orphans", "--delete") == []
