
from hypothesis import given
from hypothesis import strategies as st

from magnetar.proto.names import choose_partition_of_key, compute_key_slot, hash_key


def test_hashes_are_murmur3_x86_32_with_seed_0() -> None:
    """Published vectors of the algorithm."""
    assert hash_key("") == 0
    assert hash_key(b"test") == 0xBA6BD213 & 0x7FFFFFFF
    assert hash_key("Hello, world!") == 0xC0363E43 & 0x7FFFFFFF


def test_a_slot_is_pulsars_so_that_a_sticky_consumer_gets_the_keys_whose_slots_it_asks_for() -> None:
    """Pulsar 4.0.8: Murmur3 with its sign bit masked, modulo 65536; 0 means "no slot", and is 1."""
    assert compute_key_slot("test") == 0xD213
    assert [compute_key_slot(f"key-shared-{number}") for number in range(3)] == [30051, 9321, 34195]
    zero = next(key for number in range(1 << 20) if not hash_key(key := f"{number}") % 65536)
    assert compute_key_slot(zero) == 1


@given(st.text(), st.integers(1, 1000))
def test_a_key_has_one_partition_and_one_slot(key: str, partitions: int) -> None:
    assert 0 <= choose_partition_of_key(key, partitions) < partitions
    assert choose_partition_of_key(key, partitions) == choose_partition_of_key(key.encode(), partitions)
    assert 1 <= compute_key_slot(key) <= 65535
