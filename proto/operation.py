"""What a row of the table of operations says (proto/operations.py).

Annotations are not postponed here: a named tuple would compile each of them again, at the start of every command.
"""

from enum import Enum
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Permission(Enum):
    """What a caller needs."""

    OPERATE = "a super user"
    MANAGE = "an administrator of the tenant, or a super user"
    PRODUCE = "`produce` on the topic"
    CONSUME = "`consume` on the topic, and the subscription's list"
    LOOKUP = "`produce` or `consume` on the topic"
    SHOWN = "every caller; the answer has what it may see"
    OWN = "every caller, for what its role began; of another role's it is told what it is told of what does not exist"


class On(Enum):
    """The object that a permission is for: the field of the request names it."""

    NOTHING = "the cluster"
    TENANT = "tenant"
    NAMESPACE = "namespace"
    TOPIC = "topic"
    PLACE = "namespace or topic"  # fields `namespace` and `topic`; both empty: the cluster, for super users


class Rule(NamedTuple):
    """The permission that a request needs, and the field of it that names the place."""

    permission: Permission
    on: On = On.NOTHING
    field: str = ""
    subscription: str = ""  # the field that names it; where it is empty in a request that changes: all, which is MANAGE


class AskedOf(Enum):
    """The broker that can answer an operation."""

    ANY = "any broker"
    OWNER = "the owner of the argument `topic`: a partition, or a topic without partitions"
    COORDINATOR = "the broker that has the coordinator of the transaction; any other one names it"


class Take(NamedTuple):
    """A field of a request: a keyword of the method, an option of the verb, a parameter of the route's query."""

    name: str
    kind: type[bool] | type[int] | type[str]  # its default is that of the type
    help: str = ""  # of the option


class Part(NamedTuple):
    """A name in the path of a route that is a field of the request."""

    name: str
    field: str
    number: str = ""  # what an error calls the number that it is; empty: it is text
    least: int = 0


class Http(NamedTuple):
    """A route, below the path of the topic, namespace or tenant that the operation is about, or of itself. {N} and {T}
    are the paths of a namespace and a topic, {S} that of a subscription."""

    method: str
    path: str
    summary: str
    busy: int = 409  # the status of what is in use
    answer: str = ""  # how the document calls what is answered; empty: 204
    name: str = ""  # of its handler, in the document; empty: that of the operation
    parts: tuple[Part, ...] = ()
    fixed: tuple[tuple[str, object], ...] = ()  # fields of the request that the route says
    body: tuple[str, str] = ("", "")  # the field that the body's object of texts is, and how the document calls it


class Cli(NamedTuple):
    """A verb of the command line. In what is printed `{place}` is the topic by its full name, or the namespace or
    tenant, and `{subscription}` what -s names."""

    words: str  # "topics trim"
    line: str  # of the group's help
    text: str  # of its own help
    example: str  # the words after those of the verb
    done: str = ""  # what is printed; empty: the answer
    confirm: str = ""  # what is asked first, because it cannot be undone
    empty: str = "none"  # what is printed of an answer that is an empty list


class Operation(NamedTuple, Generic[T]):
    """A row. T is the type of the answer."""

    name: str
    rule: Rule
    asked_of: AskedOf = AskedOf.ANY
    service: str = "Admin"
    of_reply: str = ""  # the field that is the answer; empty: the whole reply, or its first field
    takes: tuple[Take, ...] = ()  # fields of the request besides the place
    method: str = ""  # of AdminClient, where that follows from the row
    help: str = ""  # its docstring
    routes: tuple[Http, ...] = ()
    cli: Cli | None = None
    request: str = ""  # messages of wire.proto, of a row whose rpc wire.proto does not list
    reply: str = ""


def of_topic(permission: Permission, field: str = "name", subscription: str = "") -> Rule:
    return Rule(permission, On.TOPIC, field, subscription)
