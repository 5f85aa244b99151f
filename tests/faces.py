"""client/blocking/faces.py: what it has, by class, and its text; `python -m tests.stubs` writes it.

A face is the base of a blocking class: the methods of the asyncio class that need no more than its loop thread, each
with the parameters and the docstring that it has there. A method that is not here is written by hand in the blocking
class, or is of asyncio alone; tests/client/blocking/test_faces.py has those.
"""

import enum
import inspect
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from magnetar.client.client import Client
from magnetar.client.consume.consumer import Consumer
from magnetar.client.consume.pull import PullConsumer
from magnetar.client.consume.ranges import Reader
from magnetar.client.consume.table_view import TableView
from magnetar.client.produce.producer import Half, Producer
from magnetar.client.transactions.transaction import Transaction

WIDTH = 120
GIVEN_MIN = 4
"""Parameters from which a method passes them on as a dictionary of exact values, as asyncio's own do."""


class Face(NamedTuple):
    """The base of one blocking class."""

    kind: type  # of asyncio
    base: str
    waits: str = ""  # coroutine methods, which the loop thread runs
    ends: str = ""  # … and goes on with, when the thread that waits is interrupted
    calls: str = ""  # plain methods of the object of this process: after a fork it is opened first
    facts: str = ""  # of the object as it was opened, also after a fork
    opens: str = ""  # a hook of the class, `_` and the name, gets the parameters
    hooks: str = ""


class Change(NamedTuple):
    """How the parameters of a blocking method differ."""

    without: str = ""
    places: tuple[tuple[str, int], ...] = ()  # positional, there
    added: tuple[tuple[str, str], ...] = ()  # that are not asyncio's, and their types; None is the default
    defaults: tuple[tuple[str, Any], ...] = ()
    also: str = ""  # … and what the docstring says besides


FACES = (
    Face(
        Client, "BlockingFacade[aio.Client], ClosedAfterWith",
        waits="sink_status commit_transaction abort_transaction transaction_status get_topic_partitions "
        "request",
        ends="commit_half rollback_half", calls="get_service_info late_replies",
        opens="__init__ create_producer subscribe create_reader pull_consumer create_table_view",
    ),
    Face(
        Producer, "ForkReopenedFacade[AsyncProducer]", waits="prepare send_many cancel flush",
        calls="producer_name last_sequence_id",
        hooks="_half: Callable[[AsyncHalf], Half]",
    ),
    Face(Half, "ProcessBoundFacade[AsyncHalf]", ends="commit rollback"),
    Face(Transaction, "ProcessBoundFacade[AsyncTransaction]", ends="commit prepare abort", facts="id state"),
    Face(
        Consumer, "ForkReopenedFacade[AsyncConsumer]",
        waits="acknowledge_cumulative reconsume_later seek seek_index commit progress position end lag assign "
        "get_last_message_id unsubscribe",
        calls="record_error", facts="subscription_name consumer_name dead_letter_policy",
    ),
    Face(
        PullConsumer, "ForkReopenedFacade[AsyncPullConsumer]",
        waits="list_partitions pull load_offset store_offset progress",
    ),
    Face(Reader, "ForkReopenedFacade[AsyncReader]", waits="seek seek_index"),
    Face(TableView, "ForkReopenedFacade[AsyncTableView]", calls="get keys values items"),
)  # fmt: skip

CHANGES = {
    "__init__": Change(without="world"),
    "create_producer": Change(defaults=(("batching_enabled", False),)),
    "subscribe": Change(
        without="is_pattern_topic",
        places=(("message_listener", 5), ("pattern_auto_discovery_period", 14)),
        added=(("message_listener", "Callable[[Consumer, Message], object] | None"),),
        also="""

`message_listener(consumer, message)` is called in another thread, in order; at most `message_listener_threads`
listeners of all consumers and readers of this client run at the same time. The event listener has its own
thread too.""",
    ),
    "create_reader": Change(
        places=(("reader_listener", 4),),
        added=(("reader_listener", "Callable[[Reader, Message], object] | None"),),
        also="\n\n`reader_listener(reader, message)` is called in a thread of its own.",
    ),
}
TYPES = (("Topics", "aio.Topics"), ("TransactionPort", "Transaction"), ("Listener", "Callable[[str, Any], object]"))
"""What a type of asyncio is called there."""

MARK = f"# {'-' * 103} written\n"
"""What follows this line of the module is written; the imports are above it."""


def parameters_of(name: str, method: Any) -> list[inspect.Parameter]:
    """Returns what the blocking method takes, with `self`."""
    change = CHANGES.get(name, Change())
    signature = inspect.signature(getattr(method, "fget", method))
    found = {name: each.replace(annotation=_type(each.annotation)) for name, each in signature.parameters.items()}
    positional = [each for each in found.values() if each.kind is each.POSITIONAL_OR_KEYWORD]
    keyword = [each for each in found.values() if each.kind is each.KEYWORD_ONLY]
    for new, kind in change.added:
        found[new] = inspect.Parameter(new, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=kind)
    for moved, place in change.places:
        keyword = [each for each in keyword if each.name != moved]
        positional.insert(place, found[moved].replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD))
    defaults = dict(change.defaults)
    return [
        each.replace(default=defaults.get(each.name, each.default)) for each in (*positional, *keyword)
        if each.name not in change.without.split()
    ]  # fmt: skip


def text(module: str) -> str:
    """The text of the module, written anew."""
    return "\n\n".join([module.partition(MARK)[0] + MARK, *map(_class, FACES)])


def head_of(verb: str, name: str, parameters: Sequence[inspect.Parameter], returned: str) -> str:
    """The lines of a `def` to its colon: one, or one for each parameter."""
    shown, keyword = list[str](), False
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY and not keyword:
            if not any(other.kind is other.VAR_POSITIONAL for other in parameters):
                shown.append("*")
            keyword = True
        star = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        kind = "" if each.name == "self" or each.annotation is each.empty else f": {each.annotation}"
        default = "" if each.default is each.empty else f" = {_value(each.default)}"
        shown.append(f"{star}{each.name}{kind}{default}")
    line = f"    {verb} {name}({', '.join(shown)}) -> {returned}:"
    if len(line) <= WIDTH:
        return line
    return f"    {verb} {name}(\n" + "".join(f"        {each},\n" for each in shown) + f"    ) -> {returned}:"


def doc_of(text: str, indent: str) -> str:
    """The lines of a docstring."""
    lines = text.splitlines()
    shown = f'"""{text}"""' if len(lines) == 1 and len(f'{indent}"""{text}"""') <= WIDTH else f'"""{text}\n"""'
    return "\n".join(f"{indent}{line}".rstrip() for line in shown.splitlines())


def _value(default: Any) -> str:
    if isinstance(default, enum.Enum):
        return f"{type(default).__name__}.{default.name}"
    return f'"{default}"' if type(default) is str else repr(default)


def _class(face: Face) -> str:
    of = face.kind.__name__
    parts = [f'class {of}Facade({face.base}):\n'
             f'    """The methods of the blocking {of} that only call or await those of the asyncio {of}.\n'
             '    They raise the same exceptions; those that wait also raise those of BlockingFacade."""\n']
    hooks = [f"    {face.hooks}\n"] if face.hooks else []
    for name in face.opens.split():
        made = inspect.signature(vars(face.kind)[name]).return_annotation
        hooks.append(f"    _{name.strip('_')}: Callable[[dict[str, Any]], {made}]\n")
    parts += ["".join(hooks)] if hooks else []
    listed = {name: how for how in ("waits", "ends", "calls", "facts", "opens") for name in getattr(face, how).split()}
    assert set(listed) <= vars(face.kind).keys(), f"asyncio's {of} has what its face lists"
    parts += [_member(name, member, listed[name]) for name, member in vars(face.kind).items() if name in listed]
    return "\n".join(parts)


def _member(name: str, member: Any, how: str) -> str:
    parameters = parameters_of(name, member)
    returned = _type(inspect.signature(getattr(member, "fget", member)).return_annotation)
    head = ("    @property\n" if isinstance(member, property) else "") + head_of("def", name, parameters, returned)
    told = f"{inspect.getdoc(member)}{CHANGES.get(name, Change()).also}"
    doc = "" if name == "__init__" else f"{doc_of(told, ' ' * 8)}\n"
    call = _call(name, parameters[1:], how, isinstance(member, property))
    call = f"self._half({call})" if returned == "Half" else call
    return f"{head}\n{doc}        {'' if returned == 'None' else 'return '}{call}\n"


def _call(name: str, parameters: list[inspect.Parameter], how: str, is_property: bool) -> str:
    if how == "opens":
        return f"self._{name.strip('_')}(copy_parameters(locals()))"
    has_txn = any(each.name == "txn" for each in parameters)
    values = [f"{each.name}={each.name}" if each.kind is each.KEYWORD_ONLY else each.name for each in parameters]
    arguments = ", ".join(values).replace("txn=txn", "txn=asyncio_transaction_of(txn)")
    if len(parameters) >= GIVEN_MIN:
        arguments = (
            '**{**copy_parameters(locals()), "txn": asyncio_transaction_of(txn)}'
            if has_txn
            else "**copy_parameters(locals())"
        )
    of = "self._inner" if how == "facts" else "self._current()"
    call = f"{of}.{name}" if is_property else f"{of}.{name}({arguments})"
    return {"waits": f"self._run({call})", "ends": f"self._finish({call})"}.get(how, call)


def _type(annotation: Any) -> Any:
    for theirs, ours in TYPES:
        annotation = annotation if annotation is inspect.Parameter.empty else re.sub(rf"\b{theirs}\b", ours, annotation)
    return annotation
