"""What type checkers and editors see of AdminClient and Admin is what the classes have."""

from tests.stubs import outdated


def test_the_stubs_are_what_the_classes_have() -> None:
    assert [*outdated()] == [], "python -m tests.stubs writes them"
