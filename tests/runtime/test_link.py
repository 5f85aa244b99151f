"""Frames between a process and its parent, in whatever pieces they come."""

import struct

import pytest

from magnetar.runtime.parent import FRAME_BYTES_MAX, LinkFrame, LinkFrameDecoder, LinkFrameKind, encode_frame

SENT = [
    LinkFrame(LinkFrameKind.READY, 0, b'{"url": "x"}'),
    LinkFrame(LinkFrameKind.ASK, 7),
    LinkFrame(LinkFrameKind.PAGE, 7, b"\n" * 1000),
]


@pytest.mark.parametrize("size", [1, 4, 9, 10, 1000, 10_000])
def test_frames_come_whole_and_in_order(size: int) -> None:
    data, frames = b"".join(map(encode_frame, SENT)), LinkFrameDecoder()
    came = [frame for at in range(0, len(data), size) for frame in frames.decode_frames(data[at : at + size])]
    assert came == SENT


@pytest.mark.parametrize("data", [struct.pack(">IBI", FRAME_BYTES_MAX + 1, 1, 0), struct.pack(">IBI", 5, 99, 0)])
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        list(LinkFrameDecoder().decode_frames(data))
