"""`produce` and `consume` as people and pipes use them."""

import json
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from magnetar import Client, ConsumerDeadLetterPolicy, ConsumerType, InitialPosition
from magnetar.cli.admin import messages
from tests.support.processes import Result

pytestmark = pytest.mark.processes
Cli = Callable[..., Result]


def test_what_is_produced_is_consumed_in_order(cli: Cli) -> None:
    assert "3 messages" in cli("produce", "talk", "-m", "one", "-m", "two", "-m", "drei ☃").out
    assert cli("consume", "talk", "-s", "s", "-n", "3").out == "one\ntwo\ndrei ☃\n"


def test_consume_without_a_subscription_reads_all_and_leaves_none(cli: Cli) -> None:
    cli("topics", "create-partitioned-topic", "glanced-parts", "-p", "2")
    for topic in ("glanced", "glanced-parts"):
        cli("produce", topic, "-m", "one", "-m", "two")
        for _ in range(2):
            assert sorted(cli("consume", topic, "-n", "2").out.split()) == ["one", "two"]
        assert cli("consume", topic, "-p", "latest", "--idle", "0.3").out == ""
        assert "(no subscriptions" in cli("topics", "subscriptions", topic).out
        assert "name it with -s" in cli("consume", topic, "-t", "shared", code=2).err
    assert "name of the subscription" in cli("consume", "--help").out.lower()


def test_consume_with_a_filter_gets_what_is_wanted_with_and_without_a_subscription(cli: Cli) -> None:
    for text, region in (("one", "us"), ("two", "eu"), ("three", "us"), ("four", "eu")):
        cli("produce", "filtered", "-m", text, "-p", f"region={region}")
    assert cli("consume", "filtered", "-n", "2", "--filter", "region = 'eu'").out == "two\nfour\n"
    assert cli("consume", "filtered", "-s", "s", "-n", "2", "--filter", "region = 'eu'").out == "two\nfour\n"
    assert "at character 9" in cli("consume", "filtered", "-s", "s", "--filter", "region =", code=2).err
    assert "it has the filter" in cli("consume", "filtered", "-s", "s", "--filter", "region = 'us'", code=5).err


def test_consume_begins_at_an_index(cli: Cli) -> None:
    cli("produce", "begun-at", *(part for word in ("zero", "one", "two", "three") for part in ("-m", word)))
    assert cli("consume", "begun-at", "--from-index", "2", "-n", "2").out == "two\nthree\n"
    assert cli("consume", "begun-at", "--from-index", "3", "--idle", "0.5").out == "three\n"
    assert "leave -s out" in cli("consume", "begun-at", "-s", "s", "--from-index", "2", code=2).err


def test_lines_of_a_pipe_and_of_a_file_are_messages(cli: Cli, tmp_path: Path) -> None:
    cli("produce", "lines", stdin="a\nb\n")
    file = tmp_path / "lines"
    file.write_bytes(b"c\r\nd\xff\n")
    cli("produce", "lines", "-f", str(file), "-c", "zstd")
    found = [json.loads(line) for line in cli("consume", "lines", "-s", "s", "-n", "4", "-o", "json").out.splitlines()]
    assert [message.get("payload") for message in found] == ["a", "b", "c", None]
    assert found[3]["payloadBase64"] == "ZP8="


def test_a_line_loses_its_end_and_nothing_else(cli: Cli, tmp_path: Path) -> None:
    """LF or CR LF; a CR that is a part of the line stays, also where the last line has no end."""
    data, payloads = b"a\r\nb\r\r\n\n\r\nc\rd\n\r\r\n e \r", [b"a", b"b\r", b"", b"", b"c\rd", b"\r", b" e \r"]
    file = tmp_path / "lines"
    file.write_bytes(data)
    cli("produce", "line-ends", "-f", str(file))
    cli("produce", "line-ends", stdin=data.decode())
    shown = cli("consume", "line-ends", "-s", "s", "-n", "14", "-o", "json").out.splitlines()
    assert [json.loads(line)["payload"].encode() for line in shown] == payloads * 2


def test_keys_properties_and_ids_are_shown_in_json(cli: Cli) -> None:
    cli("produce", "rich", "-m", "x", "-k", "customer-7", "-p", "a=1,b=2")
    (line,) = cli("consume", "rich", "-s", "s", "-n", "1", "-o", "json").out.splitlines()
    message = json.loads(line)
    assert message["key"] == "customer-7"
    assert message["properties"] == {"a": "1", "b": "2"}
    assert message["topic"] == "persistent://public/default/rich"
    assert len(message["messageId"].split(":")) == 4


def test_a_delayed_message_waits_on_a_shared_subscription_and_stats_say_so(cli: Cli) -> None:
    cli("produce", "later", "-m", "far", "--deliver-after", "3d")
    cli("produce", "later", "-m", "near", "--deliver-after", "3s")
    cli("produce", "later", "-m", "now")
    assert cli("consume", "later", "-s", "s", "-t", "shared", "-n", "2").out == "now\nnear\n"
    stats = json.loads(cli("topics", "stats", "later", "-o", "json").out)
    assert stats["subscriptions"]["s"]["msgDelayed"] == 1
    assert stats["subscriptions"]["s"]["msgBacklog"] == 1
    assert cli("consume", "later", "-s", "s", "-n", "1").out == "far\n", "Exclusive gets it at once"


def test_without_a_count_consume_ends_when_nothing_more_comes(cli: Cli) -> None:
    cli("produce", "quiet", "-m", "only", "-n", "5")
    assert cli("consume", "quiet", "-s", "s", "--idle", "1").out == "only\n" * 5
    assert cli("consume", "quiet", "-s", "s", "--idle", "1").out == "", "acknowledged messages do not come again"


def test_a_new_subscription_at_latest_sees_only_what_comes_after(cli: Cli) -> None:
    cli("produce", "late", "-m", "before")
    assert cli("consume", "late", "-s", "s", "-p", "latest", "--idle", "1").out == ""
    cli("produce", "late", "-m", "after")
    assert cli("consume", "late", "-s", "s", "-n", "1").out == "after\n"


def test_nothing_to_send_is_a_usage_error(cli: Cli) -> None:
    assert "either -m or -f" in cli("produce", "t", "-m", "x", "-f", "-", code=2).err


# ---------------------------------------------------------------------------------------------------- made and shown
def test_messages_that_are_sent_often_have_numbers(cli: Cli) -> None:
    cli("produce", "numbered", "-n", "3", "-m", "order {i}", "-m", '{"i": {i}}', "-k", "customer-{i}")
    cli("produce", "numbered", "-m", "{i} stays")
    cli("produce", "numbered", "-n", "1", stdin="{i} of a line stays\n")
    found = cli("consume", "numbered", "-n", "8", "--format", "{key}|{data}\\n").out.splitlines()
    assert found == [
        "customer-1|order 1", 'customer-2|{"i": 2}', "customer-3|order 3", 'customer-4|{"i": 4}', "customer-5|order 5",
        'customer-6|{"i": 6}', "|{i} stays", "|{i} of a line stays",
    ]  # fmt: skip


def test_lines_and_headers(cli: Cli) -> None:
    cli("produce", "headed", "-l", "-H", "trace: a:b", "-H", "x:", "-p", "y=1", stdin="one\ntwo\n")
    (line,) = cli("consume", "headed", "-n", "1", "-o", "json").out.splitlines()
    assert json.loads(line)["properties"] == {"trace": "a:b", "x": "", "y": "1"}
    assert cli("consume", "headed", "-n", "2", "--format", "{data} {properties}\\t").out == (
        "one y=1,trace=a:b,x=\ttwo y=1,trace=a:b,x=\t"
    )
    for wrong in (("-l", "-m", "x"), ("-m", "x", "-H", "none"), ("-m", "x", "-H", ":v")):
        cli("produce", "headed", *wrong, code=2, stdin="x\n")


def test_a_format_has_the_fields_of_a_message_and_no_others(cli: Cli) -> None:
    cli("produce", "shaped", "-m", "{key} {data} \\n", "-k", "{topic}")
    template = "{key}\\\\{data}\\0{ x }{topic} {redeliveries} {time} {id}\\n"
    done = cli("consume", "shaped", "-n", "1", "--format", template)
    key, _, rest = done.out.partition("\\")
    data, _, rest = rest.partition("\0")
    assert (key, data) == ("{topic}", "{key} {data} \\n"), "what a message contains is no template"
    assert rest.startswith("{ x }persistent://public/default/shaped 0 20")
    assert rest.endswith(":-1:0\n") or rest.count(":") >= 3
    assert "no {dta}" in cli("consume", "shaped", "-n", "1", "--format", "{dta}", code=2).err
    cli("consume", "shaped", "-n", "1", "--format", "{data}", "--pipe", "cat", code=2)


def test_a_command_gets_each_message_and_what_it_fails_at_comes_again(url: str, cli: Cli, tmp_path: Path) -> None:
    from tests.support.processes import run_cli

    cli("produce", "piped-on", "-m", "one", "-m", "two", "-m", "bad", "-m", "three")
    program = 'read -r line || :; echo "<$line>"; test "$line" != bad'
    done = run_cli("consume", "piped-on", "-s", "s", "-n", "4", "--pipe", program, MAGNETAR_URL=url)
    assert (done.code, done.out) == (1, "<one>\n<two>\n<bad>\n")
    assert "ended with 1" in done.err
    assert "comes again" in done.err
    assert cli("consume", "piped-on", "-s", "s", "-n", "2").out == "bad\nthree\n"


def test_find_ends_with_another_code_if_it_found_none_and_did_not_look_at_everything(cli: Cli, url: str) -> None:
    cli("produce", "sought", "-m", "x", "-k", "here")
    assert "looked at 1 message" in cli("topics", "find", "sought", "--key", "here").err
    nothing = cli("topics", "find", "sought", "--key", "none", code=4)
    assert nothing.err == "magnetar: looked at 1 message of persistent://public/default/sought: none of them fits\n"
    with Client(url) as client:
        producer = client.create_producer("sought")
        with client.transaction() as txn:
            producer.send(b"hidden", partition_key="none", txn=txn)
            unsure = cli("topics", "find", "sought", "--key", "none", "-o", "json", code=6)
            assert json.loads(unsure.err)["exitCode"] == 6
            assert "none of them fits; 1 more message" in unsure.err
            cli("topics", "find", "sought", "--key", "here")
    cli("topics", "find", "sought", "--key", "none")


def test_trace_says_which_letter_a_message_became(cli: Cli, cli_json: Callable[..., Any], url: str) -> None:
    """It goes to the retry topic, and from there to the dead-letter topic; another message is acknowledged only."""
    full = "persistent://public/default/failing"
    with Client(url) as client:
        producer = client.create_producer("failing", batching_enabled=False)
        consumer = client.subscribe(
            "failing", "billing", consumer_type=ConsumerType.Shared, enable_retry=True,
            initial_position=InitialPosition.Earliest, dead_letter_policy=ConsumerDeadLetterPolicy(1),
        )  # fmt: skip
        ids = [producer.send(each) for each in (b"bad", b"good")]
        bad, good = (f"{each.ledger_id()}:{each.entry_id()}" for each in ids)
        taken = {(message := consumer.receive(30_000)).data(): message for _ in range(2)}
        consumer.acknowledge(taken[b"good"])
        for kind, state in (("RETRY", "retried"), ("DLQ", "dead letter")):
            consumer.reconsume_later(taken[b"bad"], timedelta(0))
            row, ends = {"state": "delivered"}, time.monotonic() + 30
            while row["state"] == "delivered" and time.monotonic() < ends:  # its acknowledgement is under way
                (row,) = cli_json("topics", "trace", "failing", bad)["subscriptions"]
            assert (row["state"], row["letter"]["topic"]) == (state, f"{full}-billing-{kind}")
            assert row["letter"]["index"] == 0
            (letter,) = [json.loads(line) for line in cli(
                "topics", "find", f"failing-billing-{kind}", "--text", "bad", "-o", "jsonl"
            ).out.splitlines()]  # fmt: skip
            assert row["letter"]["messageId"] == letter["messageId"]
            if kind == "RETRY":
                taken[b"bad"] = consumer.receive(30_000)
        assert not row["letter"]["redriven"]
        cli("topics", "create-subscription", "failing-billing-DLQ", "-s", "redrive", "-m", "earliest")
        (group,) = cli_json("topics", "letters", "failing-billing-DLQ")
        assert (group["letters"], group["wentBack"]) == (1, 0)
        (gone,) = cli_json("topics", "redrive", "failing-billing-DLQ", "--yes")
        assert (gone["letters"], gone["where"], gone["complete"]) == (1, f"{full}-billing-RETRY", True)
        (group,) = cli_json("topics", "letters", "failing-billing-DLQ")
        assert (group["letters"], group["wentBack"]) == (1, 1)
        (row,) = cli_json("topics", "trace", "failing", bad)["subscriptions"]
        assert row["letter"]["redriven"]
        (row,) = cli_json("topics", "trace", "failing", good)["subscriptions"]
        assert (row["state"], row["letter"]) == ("acknowledged", None)
        assert "dead letter" in cli("topics", "trace", "failing", bad).out


def test_trace_finds_the_letter_of_a_message_that_is_deleted_and_says_what_it_did_not_look_at(
    cli: Cli, cli_json: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cli("produce", "trimmed", "-m", "newer")
    cli("topics", "create-subscription", "trimmed", "-s", "it's")
    origin = "REAL_TOPIC=persistent://public/default/trimmed,REAL_SUBSCRIPTION=it's"
    for id_ in ("1:5:-1:2", "1:51:-1:2"):  # as Pulsar's Java client writes it; the entry was never here
        cli("produce", "trimmed-it's-DLQ", "-m", "x", "-p", f"{origin},ORIGIN_MESSAGE_ID={id_}")
    for id_, index in (("1:5", 0), ("1:51:-1:2", 1)):
        (row,) = cli_json("topics", "trace", "trimmed", id_)["subscriptions"]
        assert (row["state"], row["letter"]["index"]) == ("dead letter", index)
    assert cli_json("topics", "trace", "trimmed", "1:5:-1:3")["subscriptions"] == []
    monkeypatch.setattr(messages, "LETTER_SEARCHES_MAX", 0)
    assert "not looked at: persistent://public/default/trimmed-it's-DLQ" in cli("topics", "trace", "trimmed", "1:5").err


def test_letters_are_counted_by_their_errors_and_each_group_has_the_filter_that_takes_it(cli: Cli) -> None:
    dead = "counted-s-DLQ"
    cli("topics", "create", dead)
    assert "(no letters)" in cli("topics", "letters", dead).out
    for error in ("ValueError", "it's odd", "ValueError", ""):
        told = ["-H", f"ERROR:{error}", "-H", f"ERROR_MESSAGE:about {error}"] if error else []
        cli("produce", dead, "-m", "x", *told)
    rows = json.loads(cli("topics", "letters", dead, "-o", "json").out)
    assert {each["group"]: each["letters"] for each in rows} == {"ValueError": 2, "(none told)": 1, "it's odd": 1}
    assert rows[0]["message"] == "about ValueError"
    assert rows[0]["oldest"] <= rows[0]["newest"]
    for row in rows:
        found = cli("topics", "find", dead, "--where", row["where"], "-o", "jsonl").out.splitlines()
        assert len(found) == row["letters"]
        assert json.loads(found[0])["messageId"] == row["sample"]
    cli("topics", "letters", dead, "--group-by", "subscription", "--where", rows[0]["where"])


def test_letters_of_very_many_errors_are_counted_together_past_a_bound() -> None:
    groups = dict[str | None, messages._LetterGroup]()
    for number in range(messages.GROUPS_MAX + 5):
        messages._group_of(groups, "ERROR", f"e{number}").letters += 1
    assert len(groups) == messages.GROUPS_MAX + 1
    assert groups[""].letters == 5
