
from magnetar.broker.subscription.core.key_shared import CHUNKED_MAX, Shared
from magnetar.broker.subscription.core.policy import Member, SubscriptionOptions
from magnetar.proto.names import Position
from tests.broker.subscription.core.shapes import Item


def test_chunks_of_a_message_go_to_one_consumer_while_it_is_there_and_able() -> None:
    policy = Shared(SubscriptionOptions())
    members = [Member(number, f"c{number}", 0) for number in range(3)]
    for member in members:
        member.permits = 1000
        policy.add_member(member)

    def pick(entry_id: int, uuid: str = "") -> Member:
        picked = policy.pick(Item(Position(1, entry_id), chunk_of=uuid), False)
        assert isinstance(picked, Member)
        return picked

    holder = pick(0, "u")
    assert {pick(number).id for number in range(1, 100)} == {0, 1, 2}
    assert [pick(number, "u") for number in range(100, 110)] == [holder] * 10
    holder.permits = 0
    assert pick(110, "u") is not holder, "nobody waits for it: that one gives the chunk back"
    holder.permits = 5
    assert pick(110, "u") is holder
    policy.remove_member(holder)
    other = pick(0, "u")
    assert [pick(number, "u") for number in range(100, 110)] == [other] * 10
    for number in range(CHUNKED_MAX + 5):
        pick(number, f"u{number}")
    assert len(policy._chunked) == CHUNKED_MAX
