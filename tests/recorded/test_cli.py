"""Every verb of administration prints what is written in cli.txt, and its help what is in help.txt."""

import asyncio
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from magnetar.cli.common.lazy import LazyGroup
from magnetar.cli.main import root
from tests.recorded.recording import Recording, scene
from tests.support.processes import run_here

GROUPS = (
    "tenants", "resourcegroups", "namespaces", "topics", "subscriptions", "transactions", "schedules", "schemas",
    "spark", "brokers",
)  # fmt: skip
SCHEMA = '{"type": "JSON", "schema": "{\\"type\\": \\"record\\", \\"name\\": \\"R\\", \\"fields\\": []}"}'
HELP = re.compile(r"^ +(-h, )?--help +Show this message and exit\.\n?", re.M)
"""A line that depends on who asked before: click keeps the option."""
COMMANDS = """
tenants list
tenants list -o json
tenants create acme -r ops,dev -c standalone
tenants create acme
tenants create "a b"
tenants get acme
tenants get acme -o json
tenants get none
tenants get none -o json
tenants update acme
tenants stats acme
tenants stats public
tenants stats public --sum
tenants delete acme
tenants delete acme -y
tenants delete acme -y
resourcegroups list
resourcegroups create batch -mp 100 -bd 1000
resourcegroups create batch
resourcegroups create slow -mp -7
resourcegroups list -o json
resourcegroups get batch
resourcegroups get none
resourcegroups update batch -bp 5000 -bd -1
resourcegroups get batch -o json
resourcegroups update none -mp 1
namespaces set-resource-group public/default -rgn none
namespaces set-resource-group public/default -rgn batch
resourcegroups delete batch -y
namespaces remove-resource-group public/default
resourcegroups delete batch -y
resourcegroups delete batch -y
tenants create acme
namespaces create acme/shop
topics create acme/shop/orders
tenants delete acme -y
tenants delete acme --force -y
tenants stats acme
namespaces list
namespaces list none
namespaces create public/shop -t 2h -s 1G -b 8 --default-partitions 2
namespaces create public/shop
namespaces create none/shop
namespaces policies public/shop
namespaces policies public/shop -o json
namespaces policies --applied
namespaces get public/default
namespaces update public/shop
namespaces update public/shop -ttl 10m --no-auto-topic-creation
namespaces update public/shop -e 2 -w 3 -a 2
namespaces topics
namespaces stats public/default
namespaces stats public/default -o json
namespaces stats public/default --sum
namespaces bundles public/shop
namespaces set-auto-topic-creation public/shop --enable -t partitioned -n 4
namespaces set-auto-topic-creation public/shop -t partitioned
namespaces get-auto-topic-creation public/shop
namespaces remove-auto-topic-creation public/shop
namespaces get-properties public/shop
namespaces set-properties public/shop -p owner=ada -p tier=1
namespaces set-properties public/shop
namespaces get-properties public/shop
namespaces get-properties public/shop -o json
namespaces remove-property public/shop -k owner -k none
namespaces clear-properties public/shop
namespaces grant-permission public/shop -r web -a produce,consume
namespaces grant-permission public/shop -r web -a fly
namespaces permissions public/shop
namespaces permissions public/shop -o json
namespaces revoke-permission public/shop -r web
namespaces permissions public/shop
namespaces grant-subscription-permission public/shop -s billing -r web,app
namespaces subscription-permission public/shop
namespaces revoke-subscription-permission public/shop -s billing -r web
namespaces set-subscription-auth-mode public/shop -m Prefix
namespaces get-subscription-auth-mode public/shop
namespaces set-max-producers-per-topic public/shop -p 5
namespaces get-max-producers-per-topic public/shop
namespaces remove-max-producers-per-topic public/shop
namespaces set-retention public/shop
namespaces set-retention public/shop -t 3d -s 10G -o json
namespaces set-persistence public/shop -e 3 -w 2 -a 1
namespaces set-dead-letter-policy public/shop -c 3 -b rocketmq
namespaces get-dead-letter-policy public/shop -o json
namespaces set-backlog-quota public/shop -l none
topics list
topics list --partitions -o json
topics list public/none
topics create plain
topics create plain
topics create wide -p 2 -o json
topics create wide -p -1
topics update wide -p 3
topics update plain -p 3
topics stats orders
topics stats orders -o json
topics stats orders -o wide
subscriptions stats orders -o wide
topics stats bills --get-precise-backlog
topics stats wide --per-partition -o json
topics stats wide
topics stats none
topics stats-internal orders
topics stats-internal orders -o json
topics stats-internal wide
topics lookup wide
topics get-partitioned-topic-metadata wide
topics get-partitioned-topic-metadata none
topics bundle-range wide
topics offsets orders
topics subscriptions orders
topics subscriptions wide
topics create-subscription orders -s s1
topics create-subscription orders -s s2 -m earliest -p a=b
topics create-subscription orders -s s2
topics create-subscription orders -s s3 -m sometime
topics create-subscription wide -s s1 -o json
topics get-subscription-properties orders -s s2
topics update-subscription-properties orders -s s2 -p c=d -p e=f
topics update-subscription-properties orders -s s2
topics update-subscription-properties orders -s s2 --clear
topics peek-messages orders -s s2 -n 2
topics peek-messages orders -s s2 -n 2 -o json
topics skip orders -s s2 -n 1 -y
topics skip orders -s s2
topics clear-backlog orders -s s2 -y
topics reset-cursor orders -s s2 -m earliest
topics reset-cursor orders -s s2
topics reset-cursor orders -s s2 -t 1000
topics expire-messages orders -s s2 -t 1h -y
topics expire-messages orders -s s2
topics expire-messages orders -s s2 -t 0
topics expire-messages orders -s s2 -m earliest -o json -y
topics expire-messages-all-subscriptions orders -t 1h -y
topics examine-messages orders -i earliest -m 2
topics examine-messages orders -m 99
topics find orders --key none
topics find orders --key none --dry-run
topics find orders --where price=
topics find orders -n 1
topics trace orders {ledger}:0
topics trace orders here
topics cancel-delayed orders {ledger}:0
topics cancel-delayed orders here
schedules list orders
schedules create orders nightly --cron "30 2 * * *" --zone Europe/Berlin -m close -k k -p a=b
schedules create orders nightly --every 10s
schedules create orders never --cron "0 0 30 2 *"
schedules create orders both --cron "* * * * *" --every 10s
schedules pause orders nightly
schedules show orders none
schedules run-now orders none
schedules resume orders nightly
schedules delete orders nightly -y
schedules delete orders nightly -y
topics redrive nowhere -y
topics letters nowhere
topics get-message-by-id orders -l {ledger} -e 0
topics get-message-by-id orders -l {ledger} -e 999
topics get-message-id orders -d 1000
topics get-message-id orders -d then
topics get-backlog-size orders
topics last-message-id orders
topics last-message-id wide
topics analyze-backlog orders -s s2
topics analyze-backlog orders -s s2 -o json
topics ledgers orders
topics ledgers wide -o json
subscriptions cursor orders -s billing --buckets 2
subscriptions cursor orders -s none
subscriptions filter set orders -s s2 --filter "region = 'eu'"
subscriptions filter set orders -s s2 --filter "region ="
subscriptions filter show orders -s s2
subscriptions filter set orders -s s2
subscriptions filter try orders --filter "region = 'eu'" -o json
metadata show --node /tenants
metadata show --node tenants
topics unsubscribe orders -s s1 -y
topics unsubscribe orders -s s1 -y
topics unsubscribe orders -s billing -y
topics unsubscribe orders -s s2
topics get-properties orders
topics update-properties orders -p owner=ada
topics get-properties orders
topics remove-properties orders -k owner
topics grant-permission orders -r web -a produce
topics permissions orders
topics revoke-permission orders -r web
topics set-message-ttl orders -ttl 10m
topics get-message-ttl orders
topics get-message-ttl orders --applied
topics remove-message-ttl orders
topics set-persistence orders -e 3
topics compact orders
subscriptions list orders
subscriptions create orders -s s5 -m earliest
subscriptions stats orders
subscriptions stats orders -o json
subscriptions stats orders -s billing
subscriptions stats orders -s none
subscriptions peek orders -s s5
subscriptions skip orders -s s5 --all -y
subscriptions clear-backlog orders -s s5 -y
subscriptions reset orders -s s5 -m earliest
subscriptions properties orders -s s5
subscriptions set-properties orders -s s5 -p a=b -o json
subscriptions delete orders -s s5 -y
spark queries
spark forget 6e1d5c1c-0d0e-4a3b-9a51-2f1c5a4f8f0e -y
spark forget 6e1d5c1c-0d0e-4a3b-9a51-2f1c5a4f8f0e
brokers list
brokers list -o json
brokers security
brokers balance --dry-run
brokers balance-status
brokers shared-limits
tenants set-tenant-publish-rate public -m 100
tenants get-tenant-publish-rate public
tenants get-tenant-publish-rate public --applied -o json
brokers shared-limits --here
tenants set-tenant-publish-rate nowhere -m 100
tenants remove-tenant-publish-rate public
brokers drain none
brokers undrain none
brokers forget none
brokers list-dynamic-config
brokers update-dynamic-config --config metrics_topics --value none
brokers update-dynamic-config --config metrics_topics --value some
brokers update-dynamic-config -c listen -v h:1
brokers update-dynamic-config -c maxTopicsPerNamespace -v 0 -o json
brokers get-all-dynamic-config
brokers get-runtime-config --changed
brokers delete-dynamic-config --config metrics_topics
brokers delete-dynamic-config --config maxTopicsPerNamespace -o json
brokers delete-dynamic-config --config none
brokers get-all-dynamic-config -o json
transactions list -o json
transactions list -c {coordinator} -o json
transactions list -c 99
transactions show {txn} -o json
transactions show (1,5)
transactions show none
transactions status
transactions halves list -o json
transactions halves list --parked
transactions halves show {half} -o json
transactions halves park {half}
transactions halves revive {half}
transactions halves commit {half}
transactions halves rollback {half} -y
transactions halves rollback {other} -y
transactions halves show {other}
transactions detach {txn} none -y
transactions abort {txn} -y
transactions abort {txn} -o json -y
schemas upload plain -f -
schemas get plain
schemas get plain -v 9
schemas get plain -a -o json
schemas list plain
schemas compatibility plain -f -
schemas extract plain -c none:None
schemas delete plain
schemas get none
schemas delete plain -f -o json -y
topics unload wide
topics trim orders
topics skip-lost orders
topics skip-lost orders -y
topics skip-lost orders -y -o json
topics skip-lost orders -y --forgotten abort
topics skip-lost orders -y --forgotten abort --force
topics truncate orders
topics truncate orders -y
topics compaction-status orders -w -o json
topics terminate wide -y
topics terminate orders
topics delete plain
topics delete plain -y
topics delete orders -y
topics delete wide -f -y -o json
namespaces unload public/default
namespaces unload public/default -b none
namespaces split-bundles public/default --bundles 3
namespaces split-bundles public/default
namespaces clear-backlog public/default -s billing -f
namespaces clear-backlog public/none -f
namespaces unsubscribe public/default -s none -y
namespaces delete public/default -y
namespaces delete public/shop -y
topics lst
"""


async def test_every_verb_of_administration_prints_what_is_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, called = Recording("cli.txt", tmp_path), set[str]()
    async with scene(tmp_path, monkeypatch) as it:
        names = {name: f"({each.replace('/', ',')})" if "/" in each else each for name, each in it.names.items()}
        url = f"magnetar://{it.broker.endpoint}"
        for line in COMMANDS.strip().splitlines():
            words = [word.format(**names) for word in shlex.split(line.replace("(", r"\(").replace(")", r"\)"))]
            stdin = SCHEMA if "-" in words else ""
            done = await asyncio.to_thread(run_here, *words, stdin=stdin, MAGNETAR_URL=url)
            text = f"{done.code}\n{done.out}" + (f"--- stderr\n{done.err}" if done.err else "")
            for name, value in names.items():
                text = text.replace(value, f"{{{name}}}") if "(" in value else text
            of_tables = (
                (r"HOST:PORT +[\d,]+", "HOST:PORT AGE"), (r"(?: +[\d,]+\.\d){4}", " RATES"),
                (r"(?: +[\d,]+\.\d)+$", " RATE"), (r"open for \d+ s", "open for AGE"),
            )  # fmt: skip
            for pattern, mask in of_tables:
                text = re.sub(pattern, mask, recording.masked(text), flags=re.M)
            recording.add(line, text)
            called.add(_resolved(words))
    missing = [" ".join(path) for path, _ in verbs() if path[0] != "brokers" and " ".join(path) not in called]
    assert [each for each in missing if not re.search(r" (set|get|remove)-", each)] == [], "verbs that are not called"
    recording.check()


def test_the_help_of_every_verb_is_what_is_written_down(tmp_path: Path) -> None:
    recording = Recording("help.txt", tmp_path)
    shared: list[str] = []
    for path, command in verbs(groups=True):
        text = command.get_help(click.Context(command, info_name=" ".join(("magnetar", *path)), max_content_width=120))
        text = HELP.sub("", text)
        if not shared and not isinstance(command, click.Group):
            shared = text[text.index("  --url ") :].splitlines()
        at = text.find("\n".join(shared)) if shared else -1
        recording.add(" ".join(path), text if at < 0 else f"{text[:at]}  … the options of all of them")
        if isinstance(command, LazyGroup):
            spellings = "\n".join(f"{ours} = {verb}" for ours, verb in command.aliases.items())
            recording.add(f"{' '.join(path)}: other spellings", spellings)
    recording.check()


def verbs(
    group: click.Group = root, path: tuple[str, ...] = (), *, groups: bool = False
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """The verbs of administration with their words; `groups`: and the groups that they are in."""
    context = click.Context(group)
    for name in group.list_commands(context):
        if not path and name not in GROUPS:
            continue
        command = group.get_command(context, name)
        assert command is not None
        if groups or not isinstance(command, click.Group):
            yield (*path, name), command
        if isinstance(command, click.Group):
            yield from verbs(command, (*path, name), groups=groups)


def _resolved(words: list[str]) -> str:
    """The words of the verb that a line calls, as it is listed."""
    group: click.Command = root
    found: list[str] = []
    for word in words:
        if not isinstance(group, LazyGroup):
            break
        name = group.aliases.get(word, word)
        command = group.get_command(click.Context(group), name)
        if command is None:
            break
        found.append(name)
        group = command
    return " ".join(found)
