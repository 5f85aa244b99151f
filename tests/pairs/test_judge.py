"""The judge of the pairs finds each fault in a history that has it, and none in one that has none."""

import pytest

from tests.pairs.judge import Got, Outcome, Sent, View, judge, stale


def messages(count: int = 6) -> list[Sent]:
    return [
        Sent(number, f"text {number}", "ab"[number % 2], {"n": str(number)}, Outcome.STORED) for number in range(count)
    ]


def got(each: Sent, **other: object) -> Got:
    return Got(**{"text": each.text, "key": each.key, "properties": each.properties, **other})  # type: ignore[arg-type]


def faults(sent: list[Sent], found: list[Got], **view: object) -> list[str]:
    return [fault.partition(":")[0] for fault in judge(sent, [View("v", got=found, **view)])]  # type: ignore[arg-type]


def test_a_history_that_keeps_all_promises_has_no_fault() -> None:
    sent = messages()
    sent[2].outcome, sent[3].outcome = Outcome.REFUSED, Outcome.UNKNOWN
    assert not faults(sent, [got(sent[at]) for at in (1, 0, 4, 5)]), "keys are apart"
    assert not faults(sent, [got(each) for each in sent if each.number != 2])
    assert not stale(sent, "table", {"a": "text 4", "b": "text 5"})


@pytest.mark.parametrize(
    ("fault", "order", "options"),
    [
        ("lost", [0, 1, 2, 3, 4], {}),
        ("doubled", [0, 1, 2, 3, 4, 5, 1], {}),
        ("disorder", [2, 0, 1, 3, 4, 5], {}),
        ("lost", [0, 1, 2, 3, 4, 5], {"times": {3: 2}}),
        ("lost", [0, 1, 2, 3, 4], {"newest": True}),
        ("", [4, 5], {"newest": True}),
        ("", [0, 1, 2, 0, 1, 2, 3, 4, 5], {"once": False}),
        ("", [0, 2, 3, 4, 5], {"lacks": {1}}),
    ],
)
def test_what_is_lost_doubled_or_out_of_order_is_found(
    fault: str, order: list[int], options: dict[str, object]
) -> None:
    sent = messages()
    assert faults(sent, [got(sent[at]) for at in order], **options) == ([fault] if fault else [])


def test_what_is_torn_or_was_refused_is_found() -> None:
    sent = messages(2)
    sent[1].outcome = Outcome.REFUSED
    assert faults(sent, [got(sent[0], text="text"), got(sent[1])]) == ["torn", "phantom"]
    assert faults(sent, [got(sent[0], key="c")]) == ["torn"]
    assert faults(sent, [got(sent[0], text=None)]) == ["torn"], "null is not empty"
    assert faults(sent, [got(sent[0]), Got("", "a", {})]) == ["phantom"]
    sent[0].properties["p"] = "q"
    assert faults(sent, [got(sent[0], properties={"n": "0"})]) == ["torn"]


def test_dead_letters_are_those_that_had_to_be() -> None:
    sent = messages(3)
    view = View("v", got=[got(each) for each in sent])
    for dead, found in (([0], []), ([], ["not dead"]), ([0, 1], ["not dead"])):
        letters = View("dead", got=[got(sent[at]) for at in dead])
        assert [fault.partition(":")[0] for fault in judge(sent, [view], letters, {0})] == found


@pytest.mark.parametrize(
    ("items", "found"),
    [({"a": "text 4"}, ["stale"]), ({"a": "text 4", "b": "text 3"}, ["stale"]), ({"a": "", "b": "text 5"}, ["stale"]),
     ({"a": "text 4", "b": "text 5", "c": "x"}, ["phantom"])],
)  # fmt: skip
def test_a_table_has_the_newest_of_each_key(items: dict[str, str], found: list[str]) -> None:
    sent = messages() if "c" not in items else [*messages(), Sent(6, "x", "c", {"n": "6"}, Outcome.REFUSED)]
    assert [fault.partition(":")[0] for fault in stale(sent, "table", items)] == found
