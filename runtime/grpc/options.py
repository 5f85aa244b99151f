"""Settings of gRPC's channels and servers."""

from __future__ import annotations

from ..network import MESSAGE_BYTES_MAX

_BOTH: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    # A dead peer is noticed after 10 + 5 s, also without traffic.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
]
SERVER_OPTIONS = [
    *_BOTH,
    ("grpc.so_reuseport", 0),  # a taken port is an error, not half of the connections
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
]
CHANNEL_OPTIONS = [
    *_BOTH,
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),  # a channel is a connection, not a share of one
    ("grpc.enable_http_proxy", 0),
]
