"""What a broker says of its own process, and the settings of all brokers that change while they run.

    describe_broker(broker)                        its clock, limit of open files, settings with their sources
    parse_setting_name("maxTopicsPerNamespace")    our name of it: `max_topics`
    await change_setting(broker, name, text)       stored in the metadata; every broker applies it within a second or so
    await remove_setting(broker, name)             each broker has its own value again

Settings that change are the policies that namespaces inherit (`DYNAMIC`), and those of `RuntimeSettings`; all brokers
use them instead of those with which each was started. If Pulsar can change the same setting at run time, it is shown by
Pulsar's name; both names are accepted. A value is text; items of a list are separated by commas. What is changed is in
one record of the metadata (metadata/paths.py `BROKER_POLICIES`), which the watch of PolicyCache follows.
Guarding tests: tests/broker/rest/test_configuration.py, tests/broker/session/test_settings.py.
"""

from __future__ import annotations

import asyncio
import re
from types import CoroutineType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from ...metadata.records import PoliciesRecord
from ...proto.errors import InvalidRequest
from ...proto.policies import RETENTIONS, Policies
from ...proto.statistics import BrokerDescription, BrokerSetting
from ...proto.versions import PRODUCT
from ...runtime import logs
from ...runtime.config import list_setting_defaults, source_of
from ...runtime.descriptors import PROCESS
from ...runtime.metrics import MetricsPage
from ...runtime.metrics_server import as_text
from ...runtime.network import Endpoint
from ..common.config import DYNAMIC, NAMES, RUNTIME, BrokerConfig, RuntimeSettings
from ..node.topic_manager import TopicManager

PULSAR: dict[str, str] = {
    "auto_subscription_creation": "allowAutoSubscriptionCreation",
    "auto_topic_creation": "allowAutoTopicCreation",
    "dispatch_rate_bytes": "dispatchThrottlingRatePerTopicInByte",
    "dispatch_rate_messages": "dispatchThrottlingRatePerTopicInMsg",
    "inactive_mode": "brokerDeleteInactiveTopicsMode",
    "max_topics": "maxTopicsPerNamespace",
    "publish_rate_bytes": "maxPublishRatePerTopicInBytes",
    "publish_rate_messages": "maxPublishRatePerTopicInMessages",
    "schema_auto_update": "isAllowAutoUpdateSchemaEnabled",
    "subscribe_rate": "subscribeThrottlingRatePerConsumer",
    "subscribe_rate_period_s": "subscribeRatePeriodPerConsumerInSecond",
    "subscription_dispatch_rate_bytes": "dispatchThrottlingRatePerSubscriptionInByte",
    "subscription_dispatch_rate_messages": "dispatchThrottlingRatePerSubscriptionInMsg",
    "subscription_types": "subscriptionTypesEnabled",
}
"""Our name → Pulsar's name of a setting with the same meaning and unit."""
CHANGING = (*DYNAMIC, *RUNTIME)
"""Our names of all settings that change while brokers run."""
_OURS = {theirs: ours for ours, theirs in PULSAR.items()} | {name: name for name in CHANGING}
_LISTS = ("dead_letter_backoff_s", "subscription_types")
UNITS = {"s": "seconds", "minutes": "minutes", "mib": "MiB", "bytes": "bytes"}
"""The last word of a setting's name → the unit of its value."""
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")
SHOWN = tuple(PULSAR.get(name, name) for name in CHANGING)
PAGE_BYTES_MAX = 4 << 20
"""Most bytes of metrics in an answer. The rest is left out, and a line says so."""
TASKS_MAX, FRAMES_MAX = 2_000, 12
"""Most tasks that `describe_waiting_tasks` lists, and most calls of each task."""


# ----------------------------------------------------------------------------------------------------- changing
def parse_setting_name(name: str) -> str:
    """Returns Magnetar's name of a setting. `name`: Magnetar's or Pulsar's name of it. Raises InvalidRequest if the
    setting is unknown, or cannot be changed while brokers run."""
    if name not in _OURS:
        raise InvalidRequest(
            f"the setting {name[:100]!r} does not change while brokers run; those that do: "
            "magnetar brokers list-dynamic-config"
        )
    return _OURS[name]


def parse_setting_value(name: str, text: str) -> dict[str, Any]:
    """Parses the value `text` of the setting `name`. Returns it under its field name in Policies or RuntimeSettings, as
    a mapping with one item. Raises InvalidRequest if the value is invalid."""
    ours = parse_setting_name(name)
    kind: type[msgspec.Struct] = RuntimeSettings if ours in RUNTIME else Policies
    value = [each.strip() for each in text.split(",") if each.strip()] if ours in _LISTS else text
    try:
        found = msgspec.convert({ours: value}, kind, strict=False)
    except (msgspec.ValidationError, ValueError) as error:
        words, unit = _words_of(get_type_hints(kind)[ours]), UNITS.get(ours.rpartition("_")[2], "")
        reason = f"{name} is one of {', '.join(words)}, not {text[:100]!r}" if words else str(error)
        if unit and _NUMBER.fullmatch(text) is None and ours not in _LISTS:
            reason = f"{name} is a number of {unit}, such as 60, not {text[:100]!r}"
        raise InvalidRequest(reason) from error
    if getattr(found, ours) is None:
        raise InvalidRequest(f"{name} has no value: to remove it, magnetar brokers delete-dynamic-config --config …")
    return {ours: getattr(found, ours)}


def _words_of(hint: Any) -> list[str]:
    """Returns the words that a type allows (its Literal values); empty if the type is not a choice of words."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [word for each in get_args(hint) for word in _words_of(each)]


def find_settings_to_remove(name: str) -> tuple[str, ...]:
    """Returns the names of the settings that are removed together when the setting `name` is removed: this setting, and
    the one that can only be set together with it, if there is one."""
    ours = parse_setting_name(name)
    return next((pair for pair in RETENTIONS if ours in pair), (ours,))


async def change_setting(broker: TopicManager, name: str, text: str) -> None:
    """Changes a setting of all brokers. This broker has applied the new value when this function returns. Raises
    InvalidRequest if the setting or the value is invalid."""
    ours, given = parse_setting_name(name), parse_setting_value(name, text)
    if ours in RUNTIME:
        await broker.policies.change_runtime_setting(ours, format_setting_value(given[ours]))
    else:
        await broker.policies.change_policies(None, None, Policies(**given))


async def remove_setting(broker: TopicManager, name: str) -> None:
    """Removes the value of a setting that was set for all brokers, so that each broker uses its own configuration
    again. Raises InvalidRequest if the setting is unknown."""
    ours = parse_setting_name(name)
    if ours in RUNTIME:
        await broker.policies.change_runtime_setting(ours, None)
    else:
        await broker.policies.change_policies(None, None, Policies(), find_settings_to_remove(name))


def list_changed_settings(record: PoliciesRecord) -> dict[str, str]:
    """Returns the settings that were changed for all brokers, with their values as text. A setting that Pulsar also has
    is listed under Pulsar's name."""
    values: list[tuple[str, object]] = [(name, getattr(record.policies, name)) for name in DYNAMIC]
    values += [(name, record.properties.get(name)) for name in RUNTIME]
    return {PULSAR.get(name, name): format_setting_value(value) for name, value in values if value is not None}


def format_setting_value(value: object) -> str:
    """Returns a value of a setting as text, as Java writes such a value."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple) and not isinstance(value, Endpoint):
        return ",".join(map(str, value))
    return str(value)


# --------------------------------------------------------------------------------------------------- describing
async def describe_broker(broker: TopicManager, *, tasks: bool = False, metrics: bool = False) -> BrokerDescription:
    """Returns a description of this broker, from the memory of its process; asks no other process. `tasks`: includes
    what each task waits for; `metrics`: includes the metrics."""
    settings = list_settings(broker)
    page = await _metrics_page(broker) if metrics else ""
    return BrokerDescription(
        broker.name, PRODUCT, broker.world.clock.wall_ms(), PROCESS.limit, settings,
        describe_waiting_tasks() if tasks else "", page
    )


def list_settings(broker: TopicManager) -> tuple[BrokerSetting, ...]:
    """Returns the settings that are in force at this broker, each with the source of its value. A setting that was
    changed at run time has the source `dynamic`."""
    config, changed = broker.config, {_OURS[name] for name in list_changed_settings(broker.policies.all_brokers_record)}
    defaults, found = list_setting_defaults(BrokerConfig), list[BrokerSetting]()
    for name in config.__struct_fields__:
        value: object = getattr(config, name)
        if name in NAMES:
            value = getattr(broker.policies.defaults, name)
        elif name in RUNTIME:
            value = getattr(broker, name)
        source = "dynamic" if name in changed else source_of("broker", name, is_default=value == defaults[name])
        found.append(BrokerSetting(name, format_setting_value(value), source, name in CHANGING))
    level = "dynamic" if "log_level" in changed else "option"
    return (*found, BrokerSetting("log_level", logs.get_log_level(), level, dynamic=True))


async def _metrics_page(broker: TopicManager) -> str:
    page, size, pieces = MetricsPage(), 0, list[bytes]()
    await broker.measure(page)
    for piece in as_text(page):
        size += len(piece)
        if size > PAGE_BYTES_MAX:
            pieces.append(b"# the rest is left out: metrics_topics makes the page smaller\n")
            break
        pieces.append(piece)
        await asyncio.sleep(0)
    return b"".join(pieces).decode()


def describe_waiting_tasks() -> str:
    """Returns a text that shows where each task of this event loop waits now: its name, and the stack of its calls
    (file, line and function), the outermost first. Contains no values of variables."""
    lines = list[str]()
    tasks = sorted(asyncio.all_tasks(), key=lambda task: task.get_name())
    for task in tasks[:TASKS_MAX]:
        lines.append(task.get_name())
        call: Any = task.get_coro()
        for _ in range(FRAMES_MAX):
            if not isinstance(call, CoroutineType) or call.cr_frame is None:
                break
            frame = call.cr_frame
            file = "/".join(frame.f_code.co_filename.replace("\\", "/").split("/")[-3:])
            lines.append(f"  {file}:{frame.f_lineno} {frame.f_code.co_name}")
            call = call.cr_await
    if len(tasks) > TASKS_MAX:
        lines.append(f"{len(tasks) - TASKS_MAX} more")
    return "\n".join(lines) + "\n"
