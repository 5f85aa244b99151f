
import contextlib
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.proto.compression import UNCOMPRESSED_BYTES_MAX, Compression, compress, decompress
from magnetar.proto.errors import CorruptEntry

KINDS = [kind for kind in Compression if kind]


@given(st.sampled_from(list(Compression)), st.binary(max_size=5000))
def test_every_codec_gives_back_what_it_took(kind: Compression, payload: bytes) -> None:
    assert decompress(kind, compress(kind, payload), len(payload)) == payload


@given(st.binary(min_size=1, max_size=5000))
def test_a_zlib_stream_without_its_end_is_read_as_java_writes_it(payload: bytes) -> None:
    stream = zlib.compressobj()
    flushed = stream.compress(payload) + stream.flush(zlib.Z_SYNC_FLUSH)
    assert decompress(Compression.ZLIB, flushed, len(payload)) == payload
    for declared in (len(payload) - 1, len(payload) + 1):
        with pytest.raises(CorruptEntry):
            decompress(Compression.ZLIB, flushed, declared)


@given(st.sampled_from(KINDS), st.binary(max_size=500), st.integers(0, 2000))
def test_another_declared_size_is_refused(kind: Compression, payload: bytes, declared: int) -> None:
    if declared == len(payload):
        return
    with pytest.raises(CorruptEntry):
        decompress(kind, compress(kind, payload), declared)


@given(st.sampled_from(KINDS), st.binary(max_size=300), st.integers(0, 3000))
def test_noise_unfolds_to_its_declared_size_or_is_refused(kind: Compression, noise: bytes, declared: int) -> None:
    with contextlib.suppress(CorruptEntry):
        assert len(decompress(kind, noise, declared)) == declared


@pytest.mark.parametrize("kind", KINDS)
def test_a_bomb_costs_no_more_memory_than_it_declares(kind: Compression) -> None:
    bomb = compress(kind, bytes(32 << 20))
    tracemalloc.start()
    with pytest.raises(CorruptEntry):
        decompress(kind, bomb, 1000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("declared", [-1, UNCOMPRESSED_BYTES_MAX + 1, 1 << 40])
def test_a_size_above_the_limit_is_refused_before_anything_is_allocated(kind: Compression, declared: int) -> None:
    with pytest.raises(CorruptEntry):
        decompress(kind, compress(kind, b"x"), declared)


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(CorruptEntry):
        decompress(9, b"x", 1)
