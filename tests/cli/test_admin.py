"""Administration against a real server: what is made is listed, shown, changed and deleted."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

import magnetar
from magnetar.proto.policies import POLICIES
from tests.support.processes import Result

pytestmark = pytest.mark.processes
Cli = Callable[..., Result]
Json = Callable[..., Any]


def test_a_tenant_from_its_making_to_its_end(cli: Cli, cli_json: Json) -> None:
    cli("tenants", "create", "acme", "-r", "alice,bob")
    assert "acme" in cli_json("tenants", "list")
    assert cli_json("tenants", "get", "acme") == {"adminRoles": ["alice", "bob"], "allowedClusters": []}
    cli("tenants", "update", "acme", "-r", "carol", "-c", "elsewhere")
    assert cli_json("tenants", "get", "acme")["adminRoles"] == ["carol"]
    refused = cli("namespaces", "create", "acme/shop", code=1)
    assert "may not use cluster 'standalone', only elsewhere" in refused.err
    cli("tenants", "update", "acme")
    cli("namespaces", "create", "acme/shop")
    assert "no role was granted anything" in cli("namespaces", "permissions", "acme/shop").out
    cli("namespaces", "grant-permission", "acme/shop", "-r", "billing", "-a", "consume")
    cli("topics", "create", "acme/shop/orders")
    cli("topics", "grant-permission", "acme/shop/orders", "-r", "web", "-a", "produce,consume")
    cli("namespaces", "grant-subscription-permission", "acme/shop", "-s", "bills", "-r", "billing,audit")
    cli("namespaces", "set-subscription-auth-mode", "acme/shop", "-m", "Prefix")
    assert cli_json("namespaces", "permissions", "acme/shop") == [{"role": "billing", "actions": "consume"}]
    assert cli_json("topics", "permissions", "acme/shop/orders") == [{"role": "web", "actions": "produce, consume"}]
    cli("namespaces", "revoke-subscription-permission", "acme/shop", "-s", "bills", "-r", "audit")
    listed = cli_json("namespaces", "subscription-permission", "acme/shop")
    assert listed == [{"subscription": "bills", "roles": "billing"}]
    assert cli_json("namespaces", "get-subscription-auth-mode", "acme/shop") == {"subscriptionAuthMode": "Prefix"}
    cli("namespaces", "revoke-permission", "acme/shop", "-r", "billing")
    cli("topics", "revoke-permission", "acme/shop/orders", "-r", "web")
    assert cli_json("namespaces", "permissions", "acme/shop") == []
    assert cli_json("topics", "permissions", "acme/shop/orders") == []
    unknown = cli("namespaces", "grant-permission", "acme/shop", "-r", "x", "-a", "fly", code=2)
    assert "actions are produce" in unknown.err
    cli("topics", "delete", "acme/shop/orders", "-y")
    assert cli_json("tenants", "stats", "acme") == [{"namespace": "acme/shop", "topics": 0}]
    cli("tenants", "delete", "acme", "-y", code=5)
    cli("namespaces", "delete", "acme/shop", "-y")
    cli("tenants", "delete", "acme", "-y")
    assert "acme" not in cli_json("tenants", "list")


def test_a_namespace_and_its_policies(cli: Cli, cli_json: Json) -> None:
    cli("namespaces", "create", "public/policies", "--retention-time", "2h", "--bundles", "8")
    assert "public/policies" in cli_json("namespaces", "list", "public")
    cli("namespaces", "update", "public/policies", "--retention-size", "1G", "-ttl", "10m", "--default-partitions", "2")
    found = cli_json("namespaces", "policies", "public/policies")
    assert found["bundles"] == 8
    assert (found["retention_minutes"], found["retention_mib"]) == (120, 1024)
    assert (found["message_ttl_s"], found["default_partitions"]) == (600, 2)
    assert cli_json("namespaces", "policies", "public/policies", "--applied")["max_unacked_per_consumer"] == 50_000
    cli("namespaces", "update", "public/policies", "-e", "2", "-w", "3", "-a", "2", code=2)
    cli("namespaces", "delete", "public/policies", "-y")


def test_persistence_is_set_shown_removed_and_its_risks_are_told(cli: Cli, cli_json: Json) -> None:
    fields = ("ensemble_size", "write_quorum", "ack_quorum")
    cli("namespaces", "create", "public/copies")
    assert "give all" in cli("namespaces", "set-persistence", "public/copies", "-e", "3", code=2).err
    wrong = ("--bookkeeper-ensemble", "2", "--bookkeeper-write-quorum", "3", "--bookkeeper-ack-quorum", "2")
    assert "must hold" in cli("namespaces", "set-persistence", "public/copies", *wrong, code=2).err
    done = cli("namespaces", "set-persistence", "public/copies", "-e", "3", "-w", "2", "-a", "1")
    assert "lost with one disk" in done.err
    assert "fewer copies" in done.err, "standalone has one bookie"
    assert "next ledger" in done.out
    assert tuple(cli_json("namespaces", "get-persistence", "public/copies")[each] for each in fields) == (3, 2, 1)
    cli("namespaces", "set-persistence", "public/copies", "-e", "2")
    assert tuple(cli_json("namespaces", "get-persistence", "public/copies")[each] for each in fields) == (2, 2, 1)
    cli("produce", "public/copies/t", "-m", "a")
    internal = cli_json("topics", "stats-internal", "public/copies/t")
    assert (internal["replication"], internal["wantedReplication"], internal["degraded"]) == ("1/1/1", "2/2/1", True)
    assert [ledger["stays"] for ledger in internal["ledgers"]] == ["it is the last of the list, or it is written"]
    cli("namespaces", "remove-persistence", "public/copies")
    assert set(cli_json("namespaces", "get-persistence", "public/copies").values()) == {None}
    applied = cli_json("namespaces", "get-persistence", "public/copies", "--applied")
    assert tuple(applied[each] for each in fields) == (1, 1, 1)


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
    "auto-subscription-creation": (["--disable"], {"auto_subscription_creation": False}),
    "subscription-types-enabled": (["-t", "Shared,Failover"], {"subscription_types": ["Shared", "Failover"]}),
    "schema-compatibility-strategy": (["-c", "FORWARD"], {"schema_compatibility": "forward"}),
    "schema-validation-enforce": (["--enable"], {"schema_validation_enforced": True}),
    "is-allow-auto-update-schema": (["--disable"], {"schema_auto_update": False}),
}  # fmt: skip


def test_every_policy_is_set_shown_inherited_and_removed(cli: Cli, cli_json: Json) -> None:
    assert set(SET) == {verb.name for verb in POLICIES}
    cli("namespaces", "create", "public/laid")
    cli("topics", "create", "public/laid/t", "-p", "2")
    for verb in POLICIES:
        options, wanted = SET[verb.name]
        at_namespace = verb.name_at("namespaces")
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


def test_a_whole_namespace_is_cleared_unsubscribed_and_unloaded(cli: Cli, cli_json: Json) -> None:
    cli("namespaces", "create", "public/whole")
    assert len(cli_json("namespaces", "bundles", "public/whole")) == 32
    cli("namespaces", "set-auto-topic-creation", "public/whole", "--enable", "-t", "partitioned", "-n", "2")
    assert cli_json("namespaces", "get-auto-topic-creation", "public/whole") == {"enabled": True, "partitions": 2}
    cli("produce", "public/whole/auto", "-m", "x")
    cli("namespaces", "set-auto-topic-creation", "public/whole", "--disable")
    cli("topics", "create-subscription", "public/whole/none", "-s", "s", code=4)
    cli("namespaces", "remove-auto-topic-creation", "public/whole")
    assert cli_json("namespaces", "get-auto-topic-creation", "public/whole") == {"enabled": True, "partitions": 0}
    cli("namespaces", "set-auto-topic-creation", "public/whole", "-t", "partitioned", code=2)
    cli("topics", "create-subscription", "public/whole/auto", "-s", "s", "-m", "earliest")
    assert cli_json("topics", "stats", "public/whole/auto")["msgBacklog"] == 1
    assert cli_json("namespaces", "clear-backlog", "public/whole", "-s", "s", "-f")["topics"] == 2
    assert cli_json("topics", "stats", "public/whole/auto")["msgBacklog"] == 0
    bundle = cli_json("topics", "bundle-range", "public/whole/auto")[0]["bundle"]
    assert cli_json("namespaces", "unload", "public/whole", "-b", bundle)["bundles"] == 1
    cli("namespaces", "unload", "public/whole", "-b", "none", code=2)
    assert cli_json("namespaces", "unsubscribe", "public/whole", "-s", "s", "-y")["topics"] == 2
    assert cli_json("topics", "subscriptions", "public/whole/auto") == []
    for verb in (("clear-backlog", "-f"), ("unload",), ("unsubscribe", "-s", "s", "-y")):
        cli("namespaces", verb[0], "public/nowhere", *verb[1:], code=4)


def test_a_subscription_has_properties_and_a_policy_of_its_own_among_them(cli: Cli, cli_json: Json) -> None:
    cli("topics", "create", "with-properties", "-p", "2")
    cli("topics", "create-subscription", "with-properties", "-s", "s", "-p", "owner=ada")
    read = ("topics", "get-subscription-properties", "with-properties", "-s", "s")
    assert {(row["property"], row["value"]) for row in cli_json(*read)} == {("owner", "ada")}
    update = ("topics", "update-subscription-properties", "with-properties", "-s")
    cli(*update, "s", "-p", "dead-letter.backoff-s=1,60,a=b")
    cli("topics", "unload", "with-properties")
    found = {(row["property"], row["value"]) for row in cli_json(*read)}
    assert found == {("dead-letter.backoff-s", "1,60"), ("a", "b")}
    wrong = "dead-letter.max-redeliver-count=many"
    assert "whole number" in cli(*update, "s", "-p", wrong, code=2).err
    cli(*update, "none", "-p", "a=b", code=4)
    cli(*update, "s", code=2)
    cli(*update, "s", "--clear")
    assert cli_json(*read) == []


def test_users_note_properties_of_a_topic_and_of_a_namespace(cli: Cli, cli_json: Json) -> None:
    cli("topics", "create", "noted")
    cli("namespaces", "create", "public/noted")
    for group, place, note, remove in (
        ("topics", "noted", "update-properties", "remove-properties"),
        ("namespaces", "public/noted", "set-properties", "remove-property"),
    ):
        cli(group, note, place, "-p", "owner=ada", "-p", "tier=1=2")
        read = (group, "get-properties", place)
        assert cli_json(*read) == [{"property": "owner", "value": "ada"}, {"property": "tier", "value": "1=2"}]
        cli(group, remove, place, "-k", "owner", "-k", "never")
        assert [row["property"] for row in cli_json(*read)] == ["tier"]
        cli(group, note, place, code=2)
        cli(group, note, place, "-p", "=empty", code=2)
        cli(group, note, "nowhere" if group == "topics" else "public/nowhere", "-p", "a=b", code=4)
    cli("namespaces", "clear-properties", "public/noted")
    assert cli_json("namespaces", "get-properties", "public/noted") == []


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


def test_a_partitioned_topic_from_its_making_to_its_end(cli: Cli, cli_json: Json) -> None:
    cli("topics", "create-partitioned-topic", "wide", "-p", "3")
    assert "persistent://public/default/wide" in cli_json("topics", "list", "public/default")
    assert len(cli_json("topics", "lookup", "wide")) == 3
    cli("topics", "update", "wide", "-p", "4")
    cli("topics", "update", "wide", "-p", "2", code=2)
    cli("produce", "wide", "-m", "a", "-n", "20")
    assert sum(each["end"] for each in cli_json("topics", "offsets", "wide")) == 20
    stats = cli_json("topics", "stats", "wide")
    assert (stats["partitions"], stats["msgInCounter"]) == (4, 20)
    internal = cli_json("topics", "stats-internal", "wide")
    assert len(internal) == 4
    assert sum(len(part["ledgers"]) for part in internal.values()) >= 1, "a ledger begins with the first message"
    cli("topics", "delete", "wide", "--force", "--yes")
    cli("topics", "stats", "wide", code=4)


def test_a_subscription_is_made_peeked_skipped_moved_and_deleted(cli: Cli, cli_json: Json) -> None:
    cli("topics", "create", "subscribed")
    cli("subscriptions", "create", "subscribed", "-s", "billing", "-m", "earliest")
    cli("produce", "subscribed", *(part for n in range(10) for part in ("-m", f"m{n}")), "-p", "colour=red")
    assert cli_json("subscriptions", "list", "subscribed") == ["billing"]
    assert cli_json("subscriptions", "stats", "subscribed", "-s", "billing")["msgBacklog"] == 10
    peek = cli("subscriptions", "peek", "subscribed", "-s", "billing", "-n", "3", "-o", "json").out
    peeked = [json.loads(line) for line in peek.splitlines()]
    assert [message["payload"] for message in peeked] == ["m0", "m1", "m2"]
    assert peeked[0]["properties"] == {"colour": "red"}
    cli("topics", "skip", "subscribed", "-s", "billing", "-n", "4")
    assert cli("topics", "peek-messages", "subscribed", "-s", "billing").out == "m4\n"
    cli("topics", "clear-backlog", "subscribed", "-s", "billing")
    assert cli_json("subscriptions", "stats", "subscribed", "-s", "billing")["msgBacklog"] == 0
    cli("topics", "reset-cursor", "subscribed", "-s", "billing", "-t", "1h")
    assert cli_json("subscriptions", "stats", "subscribed", "-s", "billing")["msgBacklog"] == 10
    cli("subscriptions", "reset", "subscribed", "-s", "billing", "-m", "latest")
    cli("subscriptions", "delete", "subscribed", "-s", "billing", "-y")
    assert cli_json("topics", "subscriptions", "subscribed") == []
    cli("subscriptions", "stats", "subscribed", "-s", "billing", code=4)


def test_an_unloaded_topic_comes_back_and_a_terminated_one_takes_no_more(cli: Cli) -> None:
    cli("produce", "sealed", "-m", "one")
    cli("topics", "unload", "sealed")
    assert cli("consume", "sealed", "-s", "reader", "-n", "1").out == "one\n"
    cli("topics", "trim", "sealed")
    cli("topics", "terminate", "sealed", "-y")
    refused = cli("produce", "sealed", "-m", "two", code=1)
    assert "terminated" in refused.err.lower()


def test_brokers_and_bookies_are_listed(cli: Cli, cli_json: Json) -> None:
    (broker,) = cli_json("brokers", "list")
    assert broker["endpoint"].startswith("127.0.0.1:")
    (bookie,) = cli_json("bookies", "list")
    assert not bookie["readOnly"]
    assert bookie["totalBytes"] > bookie["freeBytes"] > 0
    assert bookie["id"] in cli("bookies", "list").out


def test_tables_show_what_json_has(cli: Cli) -> None:
    cli("produce", "shown", "-m", "x")
    table = cli("topics", "stats", "shown").out
    assert "msgInCounter" in table
    assert "shown" in table
    assert "topics" in cli("namespaces", "stats", "public/default").out or "topic" in table


def test_a_topic_is_looked_into_and_cleared_with_pulsar_admins_verbs(cli: Cli, cli_json: Json) -> None:
    cli("topics", "create", "looked-into")
    for name in ("a", "b"):
        cli("topics", "create-subscription", "looked-into", "-s", name, "-m", "earliest")
    for text in ("first", "second", "third"):
        cli("produce", "looked-into", "-m", text)
    assert "first" in cli("topics", "examine-messages", "looked-into", "-i", "earliest", "-m", "1").out
    assert "second" in cli("topics", "examine-messages", "looked-into", "-i", "latest", "-m", "2").out
    assert "3 messages" in cli("topics", "examine-messages", "looked-into", "-m", "4", code=4).err
    last = cli_json("topics", "last-message-id", "looked-into")[0]["lastMessageId"].split(":")
    assert "third" in cli("topics", "get-message-by-id", "looked-into", "-l", last[0], "-e", last[1]).out
    cli("topics", "get-message-by-id", "looked-into", "-l", last[0], "-e", "99", code=4)
    assert cli_json("topics", "analyze-backlog", "looked-into", "-s", "a")[0]["messages"] == 3
    stats = cli_json("topics", "stats", "looked-into", "--get-precise-backlog")
    assert stats["subscriptions"]["a"]["msgBacklog"] == 3
    assert stats["subscriptions"]["a"]["earliestMsgPublishTimeInBacklog"] > 0
    assert stats["backlogSize"] > 0
    cli("topics", "expire-messages", "looked-into", "-s", "a", "-t", "1h")
    cli("topics", "expire-messages", "looked-into", "-s", "a", "-m", f"{last[0]}:{int(last[1]) - 1}")
    assert cli_json("topics", "analyze-backlog", "looked-into", "-s", "a")[0]["messages"] == 1
    cli("topics", "reset-cursor", "looked-into", "-s", "a", "-m", f"{last[0]}:{int(last[1]) - 1}", "-e")
    assert "third" in cli("topics", "peek-messages", "looked-into", "-s", "a").out
    assert "entries of all" in cli("topics", "expire-messages-all-subscriptions", "looked-into", "-t", "1d").out
    cli("topics", "expire-messages", "looked-into", "-s", "a", code=2)
    cli("topics", "truncate", "looked-into", "-y")
    assert cli_json("topics", "stats", "looked-into")["msgBacklog"] == 0


def test_ledgers_that_nobody_refers_to_are_shown(cli: Cli, cli_json: Json) -> None:
    assert cli_json("ledgers", "orphans") == []
    assert cli_json("ledgers", "orphans", "--delete") == []


def test_a_topic_is_compacted_and_says_so(cli: Cli, cli_json: Json) -> None:
    for value in ("1", "2", "3"):
        cli("produce", "compacted", "-m", value, "-k", "key")
    assert cli_json("topics", "compaction-status", "compacted")[0]["state"] == "NOT_RUN"
    cli("topics", "compact", "compacted")
    (found,) = cli_json("topics", "compaction-status", "compacted", "-w")
    assert (found["state"], found["messages"], found["dueBytes"]) == ("SUCCESS", 1, 0)


def test_an_open_transaction_names_who_began_it_and_what_waits_for_it(cli: Cli, cli_json: Json, url: str) -> None:
    with magnetar.Client(url) as client:
        consumer = client.subscribe("txn-in", "s", initial_position=magnetar.InitialPosition.Earliest)
        orders = client.create_producer("txn-out")
        client.create_producer("txn-in").send(b"1")
        txn = client.transaction(timeout=300)
        orders.send(b"2", txn=txn)
        consumer.acknowledge(consumer.receive(timeout_millis=10_000), txn=txn)
        orders.send(b"3")
        [row] = [each for each in cli_json("transactions", "list") if each["txn"] == str(txn.id)]
        assert row["state"] == "OPEN"
        assert row["address"]
        shown = cli_json("transactions", "show", str(txn.id))
        at = {each["topic"].rpartition("/")[2]: each for each in shown["at"]}
        assert (at["txn-out"]["holds"], at["txn-out"]["waiting"], at["txn-out"]["entries"]) == (True, 2, 1)
        assert at["txn-in"]["pending"] == {"s": {"entries": 1, "upTo": ""}}
        found = cli_json("topics", "stats", "txn-out")["transactions"]
        assert (found["open"], found["oldest"], found["oldestAddress"]) == (1, str(txn.id), row["address"])
        assert found["waiting"] == 2
        assert row["address"] in cli("topics", "stats", "txn-out").out
        assert "s: 1" in cli("transactions", "show", str(txn.id)).out
        cli("transactions", "abort", str(txn.id))
        assert cli_json("transactions", "show", str(txn.id))["reason"] == "admin"
    aborted = cli_json("topics", "stats", "txn-out")["transactions"]
    assert (aborted["open"], aborted["aborted"], aborted["abortedEntries"], aborted["oldest"]) == (0, 1, 1, "")
    assert aborted["abortedBytes"] > 0


def test_a_topic_is_deleted_by_force_from_under_an_open_transaction_and_not_from_under_a_prepared_one(
    cli: Cli, cli_json: Json, url: str
) -> None:
    with magnetar.Client(url) as client:
        going, staying = client.create_producer("txn-going"), client.create_producer("txn-staying")
        txn = client.transaction(timeout=300)
        for producer in (going, staying):
            producer.send(b"1", txn=txn)
        prepared = client.transaction(timeout=300)
        going.send(b"2", txn=prepared)
        prepared.prepare(until=300)
        going.close()
        for options in ((), ("--force",)):
            refused = cli("topics", "delete", "txn-going", "--yes", *options, code=5)
            assert str(prepared.id) in refused.err
            assert "magnetar transactions abort" in refused.err
        assert cli_json("transactions", "show", str(txn.id))["state"] == "OPEN"
        cli("transactions", "abort", str(prepared.id))
        refused = cli("topics", "delete", "txn-going", "--yes", code=5)
        assert str(txn.id) in refused.err
        assert "by force" in refused.err
        cli("topics", "delete", "txn-going", "--yes", "--force")
        with pytest.raises(magnetar.TransactionAborted, match="deleted by force"):
            txn.commit()
    assert cli_json("topics", "stats", "txn-staying")["transactions"]["aborted"] == 1
