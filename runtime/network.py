"""The network as the services see it: gRPC between clients, brokers and metadata; peers between broker and bookie.

Three transports, each real (runtime/grpc/client.py and server.py on our HTTP/2, runtime/peer/client.py on ZeroMQ,
runtime/tcp/listening.py on TCP) and simulated (runtime/sim/world.py), implement the protocols of this module.

**gRPC.** A service is described by its descriptor in proto/wire.proto. A handler is an object with one method per rpc,
in snake case. A unary one is `async def lookup(self, request, context) -> reply`, a streaming one `async def
produce(self, stream, context) -> None`. Errors that a handler raises reach the caller as the same `MagnetarError`
(status plus `magnetar-error-bin`). A handler is not cancelled when its caller disconnects: a unary one runs to its end,
a streaming one gets the error from its stream.
*Coalescing*: each stream message is an envelope with one repeated field `items`. `Stream.send` queues one item; once in
a turn of the loop all queued items (up to about 1 MiB) are sent as one gRPC message. `receive` returns all items that
have arrived. So the cost of a gRPC message is paid per turn of the loop, not per entry.

**Peers.** A request has a short `head` (struct-packed, the service's own format) and payload `frames` that are not
copied; so has the answer. Requests are pipelined and matched by id. All requests of one turn of the event loop are one
multipart message that names the server's identity (16 bytes); a server with another identity answers WrongIdentity and
reads no more of it. Every request has a deadline. If an answer is missing, the request fails with TimedOut or
ConnectionLost, and its outcome is unknown.

Also in this file, each below its heading: the world as one value (world); the keys of peer connections (keys).
"""

from __future__ import annotations

import ipaddress
import random
from asyncio import CancelledError, Future
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from google.protobuf.message import Message

from ..proto.errors import MagnetarError
from ..proto.names import parse_number
from .access import (
    LOCAL_PRINCIPAL,
    NO_CREDENTIALS,
    OPEN_ACCESS,
    Caller,
    CallerAccess,
    Guard,
    ListenerAccess,
    Principal,
    TlsFiles,
)
from .clock import Clock
from .files import Buffer, Files
from .tasks import Workers

# ----------------------------------------------------------------------------------------------------------------- keys
# The keys of peer connections (CURVE), and the gate of a peer server, which says whose key it takes.
#
# Without keys a connection is in clear (`NO_PEER_KEYS`). Security of this design: docs/security.md.

NO_PUBLIC_KEY = "00" * 32
"""Key that no server has."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """The two keys of a process for its peer connections (CURVE): the public one, 64 hexadecimal digits, and the secret
    one. They are created when the process starts; the secret key is never stored."""

    public: str  # 64 hexadecimal digits
    secret: bytes = field(repr=False)  # 32 bytes


class PeerAdmission(Protocol):
    """Decides which processes may connect to a peer server. The server calls it. A process is identified by its public
    key, as 64 hexadecimal digits."""

    async def admit(self, key: str) -> bool:
        """Returns whether a client with this public key may connect. Raises a MagnetarError if that cannot be decided
        now; the client may try again."""
        ...

    def find_principal(self, key: str) -> Principal | None:
        """Returns the principal of the member that has this public key; None if no member has it any more. Called for
        each message."""
        ...


@dataclass(frozen=True, slots=True)
class PeerServerKeys:
    """The keys of a peer server, and its gate. The server accepts only clients that know its public key and that the
    gate admits."""

    own: KeyPair
    gate: PeerAdmission


@dataclass(frozen=True, slots=True)
class PeerClientKeys:
    """The keys of the client of a peer connection (`own`; None: in clear), and the public key that its server must have
    (`server`)."""

    server: str = ""  # empty: it registered none
    own: KeyPair | None = None  # None: in clear. A network with keys puts its own here (runtime/peer/sockets.py)


NO_PEER_KEYS = PeerClientKeys()
"""A peer connection without keys."""


# -------------------------------------------------------------------------------------------------------------- network

MESSAGE_BYTES_MAX = 16 << 20
"""Largest accepted gRPC message and peer frame; an entry is at most 5 MiB, an envelope about 1 MiB more."""

REQUEST_BYTES_MAX = 512 << 10
"""Largest request to a broker that is no publish, and largest envelope of such requests: parsing one of the smallest
parts only takes the event loop 5 ms (measured: 9 ms a MiB). A client splits what is larger into several requests.
Entries and the records of the metadata have MESSAGE_BYTES_MAX."""

COALESCE_BYTES = 1 << 20
"""Size at which a flusher closes an envelope (measured: larger ones stall the receiver, smaller ones cost calls)."""

STREAM_QUEUE_BYTES = 8 << 20
"""Bound of the queue in one direction of a stream; above it `send` waits (back-pressure)."""


SLOWED_RECEIVE_S = 0.01
"""Seconds between two multiparts when a peer server is slowed down: 100 MB/s of requests that are refused. A fence of
another process waits one such pause for each connection before its own."""


class Endpoint(NamedTuple):
    """An address of a server: a host and a port. Its text is HOST:PORT, with brackets around an IPv6 address."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Returns whether only this machine can reach the endpoint, because its host is a loopback address or
        "localhost"."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """Returns the endpoint in the text HOST:PORT or [IPv6]:PORT. Raises ValueError if there is no host, or the port
        is not a number from 0 to 65535."""
        host, _, digits = text.rpartition(":")
        port = parse_number(digits)
        if not host or port is None or port > 65535:
            raise ValueError(f"{text!r} is not HOST:PORT")
        return cls(host.strip("[]"), port)


def find_caller_network(peer: str) -> str:
    """Returns the network to which a limit per address applies. For `peer` (HOST:PORT) with an IPv4 address, or an IPv6
    address that maps one, it is the IPv4 address; for another IPv6 address its /64 network, because one host can use
    all addresses of such a network. A host that is not an IP address is returned as it is."""
    host = peer.rpartition(":")[0].strip("[]")
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Address(int(address) >> 64 << 64))


Out = TypeVar("Out", contravariant=True)
In = TypeVar("In", covariant=True)
Req = TypeVar("Req", bound=Message)
Rep = TypeVar("Rep", bound=Message)


@dataclass(frozen=True, slots=True)
class Rpc(Generic[Req, Rep]):
    """The description of one rpc (remote operation) of a service. `request` and `reply` are the classes of its
    messages; for a streaming rpc, of the envelopes that contain its items."""

    path: str  # "/magnetar.wire.Broker/Lookup"
    request: type[Req]
    reply: type[Rep]
    streaming: bool
    is_plain: bool = False  # a stream of messages as they are, without envelopes: of gRPC itself, or of etcd

    @property
    def request_bytes_max(self) -> int:
        """Returns the maximum size of a request in bytes; for a streaming rpc, of an envelope of requests."""
        large = self.path.endswith("/Connect") or "/magnetar.wire.Metadata/" in self.path
        return MESSAGE_BYTES_MAX if large else REQUEST_BYTES_MAX


@dataclass(frozen=True, slots=True)
class CallContext:
    """The caller of a call, as the handler of the call gets it."""

    peer: str  # address of the caller, for logs and statistics
    principal: Principal = LOCAL_PRINCIPAL
    client: str = ""  # name and version of a client of Pulsar, as it says; empty over gRPC


Pieces = tuple[Buffer, ...]
"""The bytes of an item, in pieces that never change: a long one is written from where it is."""


class Stream(Protocol[Out, In]):
    """An end of a bidirectional stream of items; `GrpcStream` and `SimStream` implement it. An item may be given as its
    bytes, or as `Pieces` of them. Once the stream has ended, every method that sends or waits raises the error with
    which it ended, in most cases ConnectionLost."""

    def send_nowait(self, item: Out) -> None:
        """Queues an item. Never waits, whatever the size of the queue."""
        ...

    async def send(self, item: Out) -> None:
        """Queues an item. First waits while more than STREAM_QUEUE_BYTES are queued, or less while the memory of the
        process is short."""
        ...

    async def wait_drained(self, bytes_max: int = STREAM_QUEUE_BYTES) -> None:
        """Waits until at most `bytes_max` bytes are in the queue of this stream."""
        ...

    @property
    def queued_bytes(self) -> int:
        """Returns how many bytes wait in the queue of this stream."""
        ...

    @property
    def sent_bytes(self) -> int:
        """Returns how many bytes have left the queue since the stream began. This number plus `queued_bytes` is the
        offset of the next item."""
        ...

    async def wait_sent(self, offset: int) -> None:
        """Waits until the first `offset` bytes of the stream have left the queue. Raises the error with which the
        stream breaks."""
        ...

    async def receive(self) -> Sequence[In]:
        """Waits for items, and returns all that have arrived: at least one. Raises EndOfStream when the other end has
        closed the stream normally, else the MagnetarError with which it broke. One reader may wait at a time; a
        cancelled reader loses no item."""
        ...

    async def close(self) -> None:
        """Closes the stream. At a client: ends its direction after the queued items, and waits until the server ends
        the other one. At a server: does nothing."""
        ...

    def cancel(self) -> None:
        """Ends both directions now; `receive` raises ConnectionLost afterwards."""
        ...


class EndOfStream(Exception):
    """Raised by `Stream.receive` when the other end has closed the stream normally, without an error."""


class Channel(Protocol):
    """A client's channel to one server; `GrpcChannel` and `SimChannel` implement it. The connection is made when it is
    first needed, and again after it has broken."""

    @property
    def endpoint(self) -> Endpoint: ...
    async def call(self, rpc: Rpc[Req, Rep], request: Req, *, timeout_s: float) -> Rep:
        """Calls a unary rpc and returns its reply. Raises the error of the handler. If no connection can be made,
        raises Unavailable, or UntrustedServer if the certificate of the server cannot be verified; nothing was sent
        then. Raises TimedOut if there is no reply within `timeout_s` seconds, ConnectionLost if the connection breaks
        or the channel is closed. Raises MessageTooLarge if the request or the reply is larger than MESSAGE_BYTES_MAX,
        WrongProtocol if the server does not speak gRPC or does not have the rpc."""
        ...

    def stream(self, rpc: Rpc[Any, Any]) -> Stream[Any, Any]:
        """Opens a stream of the rpc `rpc`, and returns it at once; the connection may be made later. If it cannot be
        made, the stream ends with Unavailable, UntrustedServer or WrongProtocol, as `call` does. Raises ConnectionLost
        if the channel is closed."""
        ...

    async def is_answering(self, timeout_s: float) -> bool:
        """Returns whether the server answers a ping within `timeout_s` seconds. If there is no connection, waits for
        `timeout_s`, and returns whether there is one then."""
        ...

    async def close(self) -> None:
        """Closes the channel. Calls in progress, streams and later calls fail with ConnectionLost."""
        ...


class RunningServer(Protocol):
    """A listener (server socket) that is listening."""

    @property
    def endpoint(self) -> Endpoint:
        """Returns the endpoint at which the listener listens, with the actual port."""
        ...

    async def close(self, grace_s: float = 0.0) -> None:
        """Stops accepting. Connections or calls that are open may continue for `grace_s` seconds, and are then ended.
        Returns when all has ended, and the port is free. A second call does nothing."""
        ...


class RunningByteServer(RunningServer, Protocol):
    """A listener for connections that carry bytes (`ByteStream`)."""

    @property
    def is_encrypted(self) -> bool:
        """Returns whether callers of this listener must use TLS."""
        ...


class RunningPeerServer(RunningServer, Protocol):
    """A listener for requests of peers: other processes of the cluster."""

    @property
    def key(self) -> str:
        """Returns the public key of this listener, which its clients must know; "" if its connections are not
        encrypted."""
        ...

    def receive_slowly(self, slow: bool) -> None:
        """With `slow`, receives only one multipart message every SLOWED_RECEIVE_S seconds, from each connection in
        turn; without, receives normally again. While the server is slow, senders must store the requests that they
        cannot send. A request that ends the overload still arrives, and a live connection still answers heartbeats."""
        ...


class PeerRequest(Protocol):
    """A request of a peer, as the server receives it. `head` and `frames` are those of `Peer.request`. The server must
    call `reply` exactly once."""

    head: bytes
    frames: Sequence[Buffer]

    @property
    def connection(self) -> Hashable:
        """Returns a value that identifies the connection of this request. All requests of one connection have the same
        value."""
        ...

    @property
    def is_local(self) -> bool:
        """Returns whether the request was sent from this machine: from a loopback address, or from another address of
        this machine."""
        ...

    @property
    def principal(self) -> Principal | None:
        """Returns the authenticated sender of the request; LOCAL_PRINCIPAL if the connection is not encrypted; None if
        the sender is no longer a member of the cluster. Must be read before `reply` is called."""
        ...

    def reply(self, head: bytes, frames: Sequence[Buffer] = ()) -> None:
        """Sends the answer to this request. May be called later, but only in the event loop, and only once. Answers of
        one turn of the loop are sent together."""
        ...


class PeerReply(NamedTuple):
    """The answer of a peer to a request: its head and its frames."""

    head: bytes
    frames: Sequence[Buffer]


class AnswerListener(Protocol):
    """Receives the outcome of a request that was sent with `Peer.send_request`. The peer calls exactly one of the
    methods, once, in the event loop; the method must not raise."""

    def on_answered(self, head: bytes, frames: Sequence[Buffer]) -> None:
        """Called with the answer: its head and its frames."""
        ...

    def on_failed(self, error: BaseException) -> None:
        """Called when there will be no answer, with the error: one of those that `Peer.request` names."""
        ...


def notify_asker_of_answer(asker: AnswerListener, answer: Future[PeerReply]) -> None:
    """Passes the outcome of a request to `asker`. `answer` is the future that `Peer.request` returned; it must be done.
    If it was cancelled, `asker` gets CancelledError."""
    error = CancelledError() if answer.cancelled() else answer.exception()
    if error is not None:
        asker.on_failed(error)
    else:
        asker.on_answered(*answer.result())


PeerService = Callable[[Sequence[PeerRequest]], None]
"""Called with all requests of one turn. Must not wait and must not raise."""


class Peer(Protocol):
    """The client end of a connection to another process of the cluster: the server at `endpoint` with a given identity
    (16 bytes). The connection is made at the first request."""

    @property
    def endpoint(self) -> Endpoint: ...
    def request(self, head: bytes, frames: Sequence[Buffer] = (), *, timeout_s: float) -> Future[PeerReply]:
        """Sends a request, which consists of `head` and `frames`, and returns a future of the answer. Never raises, and
        does not wait. The future fails with TimedOut after `timeout_s` seconds, ConnectionLost, WrongIdentity,
        WrongProtocol, Unauthorized (this process is no member, or only one of the two ends has keys) or BackPressure
        (the queue is full; nothing was sent)."""
        ...

    def send_request(
        self, asker: AnswerListener, head: bytes, frames: Sequence[Buffer], *, timeout_s: float
    ) -> MagnetarError | None:
        """Sends a request like `request`, but without a future: when the answer arrives, a method of `asker` is called
        in the same turn of the loop. Returns None if the request was accepted. Otherwise returns an error
        (BackPressure: the queue is full; ConnectionLost: this end is closed): then nothing was sent, and `asker` is not
        called."""
        ...

    def statistics(self) -> dict[str, int]:
        """Returns the counters of this connection by name, such as `requests` and `in_flight`."""
        ...

    async def close(self) -> None:
        """Closes the connection. Requests without an answer fail with ConnectionLost, and so do later ones."""
        ...


ProvideBuffer = Callable[[], memoryview]
"""Returns memory for at least one byte. Called when bytes have arrived, so that a reader that waits needs no buffer."""


MustWakeReader = Callable[[int], bool]
"""Called with the size of each piece that has arrived in the memory of `room`. Returns whether the reader must be woken
now: most pieces of a large frame are of no use to it alone. Must not raise."""


class ByteStream(Protocol):
    """One end of a TCP connection that carries bytes, for a protocol that divides them into frames itself. `TcpStream`
    and `SimByteStream` implement it."""

    @property
    def peer(self) -> str:
        """Returns the address of the other end, for logs and statistics."""
        ...

    @property
    def caller(self) -> Caller:
        """Returns the address and the verified certificate of the other end, which are known before any byte is read.
        """
        ...

    @property
    def guard(self) -> Guard | None:
        """Returns the guard of the listener, with which the service must authenticate the caller. None: there is no
        guard, and every caller is LOCAL_PRINCIPAL."""
        ...

    def on_caller_authenticated(self) -> None:
        """Must be called by the service when it has authenticated the caller: from then on, the connection is not
        closed to make room for newer ones. Raises ConnectionLost if the caller's address has as many connections as it
        may have."""
        ...

    async def read_into(self, room: ProvideBuffer, enough: MustWakeReader | None = None) -> int:
        """Waits for bytes, and writes them into the memory that the function `room` returns. Returns how many bytes
        were read; 0 if the other end has closed the connection. Raises ConnectionLost if the connection is lost. Only
        one reader may read at a time.

        With `enough`, continues to read: calls `enough` with the size of each piece until it returns True, and returns
        the size of the last piece. A cancelled reader loses no bytes; with `enough`, pieces that `enough` was told of
        count as read."""
        ...

    def write_nowait(self, data: bytes) -> None:
        """Queues the bytes for sending, and never waits. On a broken connection the bytes are lost: the next read
        raises ConnectionLost."""
        ...

    @property
    def queued_bytes(self) -> int:
        """Returns the number of bytes that were written and that this process has not passed to the system yet."""
        ...

    def limit_queue(self, bytes_max: int) -> None:
        """Sets the number of queued bytes above which `wait_drained` waits. The default is STREAM_QUEUE_BYTES."""
        ...

    async def wait_drained(self) -> None:
        """If the queue of this connection is above its limit, waits until it is well below. Raises ConnectionLost if
        the connection is lost."""
        ...

    async def close(self) -> None:
        """Closes the connection after the queued bytes were sent, or after a second at most. May be called twice; never
        raises."""
        ...


ByteService = Callable[[ByteStream], Awaitable[None]]
"""Called for each connection, which is closed when the call returns or raises. Cancelled when the server closes."""


class Network(Protocol):
    """The network as a process uses it: makes connections, and starts listeners. `SystemNetwork` is the real one,
    `SimNetwork` the simulated one."""

    async def serve(
        self, endpoint: Endpoint, services: Sequence[tuple[str, object]], access: ListenerAccess = OPEN_ACCESS
    ) -> RunningServer:
        """Starts a gRPC server, and returns it when it listens. Each service is (name in proto/wire.proto, handler).
        `access`: the rules for callers. Port 0 means a free port. Raises Busy if the port is taken,
        InvalidConfiguration if a TLS file cannot be used.
        """
        ...

    def connect(self, endpoint: Endpoint, access: CallerAccess = NO_CREDENTIALS) -> Channel:
        """Returns a channel to the gRPC server at `endpoint`; the connection is made later. `access`: the credentials,
        and the files for TLS. Raises InvalidConfiguration if a TLS file cannot be used, or if credentials would leave
        this machine without encryption."""
        ...

    async def serve_bytes(
        self, endpoint: Endpoint, service: ByteService, access: ListenerAccess = OPEN_ACCESS
    ) -> RunningByteServer:
        """Starts a listener for TCP connections, or TLS ones, and returns it. `service` is called for each connection.
        Port 0 means a free port. Raises Busy if the port is taken, InvalidConfiguration if a TLS file cannot be used.
        Of the limits in `access`, only `connections` and `streams_per_address` apply."""
        ...

    async def connect_bytes(self, endpoint: Endpoint, tls: TlsFiles | None = None) -> ByteStream:
        """Makes a TCP connection, and returns it. With `tls`, verifies the certificate and the name of the other end by
        `ca` or the system's authorities. Raises Unavailable if no process listens there, UntrustedServer if the
        certificate is not trusted, InvalidConfiguration if a TLS file cannot be used."""
        ...

    async def serve_peers(
        self, endpoint: Endpoint, identity: bytes, service: PeerService, access: PeerServerKeys | None = None
    ) -> RunningPeerServer:
        """Starts a listener for requests of peers, and returns it. `identity`: of this server, 16 bytes. `service` is
        called with the requests of each turn of the loop. Without `access`, connections are not encrypted. Raises Busy
        if the port is taken."""
        ...

    def connect_peer(self, endpoint: Endpoint, identity: bytes, access: PeerClientKeys = NO_PEER_KEYS) -> Peer:
        """Returns the client end of a connection to the peer server at `endpoint` with this `identity` (16 bytes). The
        connection is made at the first request. With `access.own`, the connection is encrypted, and only a server with
        the key `access.server` is accepted."""
        ...

    def generate_keys(self) -> KeyPair:
        """Creates and returns the keys of this process for its peer connections. Raises InvalidConfiguration if the
        ZeroMQ library of this machine does not support CURVE."""
        ...


HEALTH_SERVICE = "grpc.health.v1.Health"
REFLECTION_SERVICES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
"""Services of gRPC itself, by their full names: proto/health.proto, proto/reflection.proto."""
ETCD = "etcdserverpb."
"""How the full names of etcd's services begin: proto/etcd.proto."""


def find_rpc(service: str, method: str) -> Rpc[Any, Any]:
    """Returns the description of the rpc `method` of `service` in proto/wire.proto, with the classes of its messages.
    For "Admin", also finds the rpcs that rows of proto/operations.py define. A service of gRPC itself, or of
    etcd, is given by its full name. Raises KeyError if there is no such service or method."""
    from google.protobuf.message_factory import GetMessageClass

    from ..proto import wire_pb2

    if "." in service:
        one = _standard_service(service).methods_by_name[method]
        return Rpc(
            f"/{service}/{method}", GetMessageClass(one.input_type), GetMessageClass(one.output_type),
            one.client_streaming or one.server_streaming, is_plain=True,
        )  # fmt: skip
    of = wire_pb2.DESCRIPTOR.services_by_name[service]
    if method not in of.methods_by_name:
        from ..proto.operations import OPERATIONS

        row = OPERATIONS[method]
        return Rpc(f"/{of.full_name}/{method}", getattr(wire_pb2, row.request), getattr(wire_pb2, row.reply), False)
    descriptor = of.methods_by_name[method]
    return Rpc(
        f"/{descriptor.containing_service.full_name}/{method}",
        GetMessageClass(descriptor.input_type),
        GetMessageClass(descriptor.output_type),
        descriptor.client_streaming,
    )


def _standard_service(service: str) -> Any:
    """Returns the descriptor of a service of gRPC itself, or of etcd."""
    from ..proto import health_pb2, reflection_pb2

    if service.startswith(ETCD):
        from ..proto import etcd_pb2

        return etcd_pb2.DESCRIPTOR.services_by_name[service.removeprefix(ETCD)]
    file = health_pb2 if service == HEALTH_SERVICE else reflection_pb2
    return file.DESCRIPTOR.services_by_name[service.rpartition(".")[2]]


def list_rpc_names(service: str) -> list[str]:
    """Returns the names of all rpcs (methods) of a service in proto/wire.proto, or of a service of gRPC itself or of
    etcd by its full name. For "Admin", includes the rpcs that only the table of operations (proto/operations.py)
    defines. Raises KeyError if there is no such service."""
    from ..proto import wire_pb2

    if "." in service:
        return [each.name for each in _standard_service(service).methods]
    listed = [each.name for each in wire_pb2.DESCRIPTOR.services_by_name[service].methods]
    if service == "Admin":  # a bookie has none, and does not load the table
        from ..proto.operations import OPERATIONS

        listed += [each.name for each in OPERATIONS.values() if each.request]
    return listed


# --------------------------------------------------------------------------------------------------------- world
# The world as one value: all that a process, real or simulated, reaches outside itself.


@dataclass(frozen=True, slots=True)
class World:
    """The environment of a process: its clock, random numbers, disk, threads and network. All other code uses these
    only through its World, so that a simulation can replace them. `make_system_world` of runtime/process.py returns the
    real one, `Simulation.world` of runtime/sim/world.py a simulated one."""

    clock: Clock
    rng: random.Random
    files: Files
    workers: Workers
    network: Network
    own_token_ends_ms: Callable[[], int] = lambda: 0
    """When the token with which this process calls others ends, in ms since the epoch; 0: it has none, or no end."""
