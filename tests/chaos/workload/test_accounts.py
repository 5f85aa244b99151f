"""The judge of transfers finds each class of wrong in hand-made books, and nothing in good ones."""

import random
from collections.abc import Callable

import pytest

from tests.chaos.workload.accounts import Books, Wrong, entry_of, halves, judge, label_of, leg_of

ACCOUNTS = ("ada", "bob")


def _books(seed: int = 1, transfers: int = 6) -> Books:
    """Good ones: transfers commit, abort, or end without a word; each message is moved once."""
    rng = random.Random(seed)
    books = Books(ACCOUNTS, "statement")
    for number in range(transfers):
        each = books.begin(f"teller/{number}")
        each.id = f"(0,{number})"
        payer, payee = rng.sample(ACCOUNTS, 2)
        each.sent = {leg_of(-5, f"{each.label}#0"): payer, leg_of(5, f"{each.label}#1"): payee}
        committed = number == 0 or (number != 1 and rng.random() < 0.6)
        each.told, each.status = rng.choice(((committed, None), (committed, committed), (None, committed)))
        for value, topic in each.sent.items():
            books.stored[topic].append(value)
            if committed:
                books.seen[topic].append(value)
                books.shown[topic].append(value)
    for account in ACCOUNTS:
        for at, value in enumerate(books.shown[account]):
            move = books.begin(f"mover/{account}{at}")
            move.id, move.told = f"(1,{at})", True
            entry = entry_of(account, value, f"{move.label}#0")
            move.sent, move.acknowledged = {entry: "statement"}, [(account, (1, at, 0))]
            books.taken[account].append(value)
            for each_list in (books.seen, books.shown, books.stored):
                each_list["statement"].append(entry)
    return books


def test_good_books_pass() -> None:
    for seed in range(200):
        books = _books(seed, seed % 9 + 2)
        verdict = judge(books)
        assert not verdict.counts, f"seed {seed}: {verdict}"
        assert verdict.committed + verdict.aborted == len(books.transactions)
        assert verdict.hidden == 2 * verdict.aborted
        assert not halves(books)


def test_what_is_sent_in_transactions_that_nobody_names_has_to_be_known_too() -> None:
    books = _books()
    move = next(each for label, each in books.transactions.items() if label.startswith("mover"))
    (entry,) = move.sent
    del books.transactions[move.label]
    assert set(judge(books).counts) == {Wrong.PHANTOM}
    books.processed.add(entry)
    assert not judge(books).counts


def _shown_once_less(books: Books) -> None:
    for topics in (books.shown, books.seen):
        topics["ada"].pop(0)


def _aborted_is_seen(books: Books) -> None:
    value, topic = next(iter(books.transactions["teller/1"].sent.items()))
    books.seen[topic].append(value)


def _aborted_is_taken(books: Books) -> None:
    value, topic = next(iter(books.transactions["teller/1"].sent.items()))
    books.taken[topic].append(value)


def _shown_twice(books: Books) -> None:
    for topics in (books.shown, books.seen):
        topics["ada"].append(topics["ada"][0])


def _shown_behind(books: Books) -> None:
    """A reader went on, and what was before it is shown later."""
    books.seen["ada"].pop(0)


def _entered_twice(books: Books) -> None:
    entry = books.shown["statement"][0].rpartition("|")[0] + "|mover/again#0"
    move = books.begin("mover/again")
    move.id, move.told, move.sent = "(2,0)", True, {entry: "statement"}
    for topics in (books.shown, books.seen, books.stored):
        topics["statement"].append(entry)


def _not_entered(books: Books) -> None:
    move = next(each for label, each in books.transactions.items() if label.startswith("mover"))
    (entry,) = move.sent
    move.told = False
    for topics in (books.shown, books.seen):
        topics["statement"].remove(entry)


def _told_otherwise(books: Books) -> None:
    books.transactions["teller/0"].told, books.transactions["teller/0"].status = True, False


def _never_ended(books: Books) -> None:
    books.transactions["teller/1"].told = books.transactions["teller/1"].status = None


def _stored_elsewhere(books: Books) -> None:
    books.stored["statement"].append(books.stored["ada"][0])


def _comes_again(books: Books) -> None:
    books.again["ada"].append(((1, 0, 0), books.shown["ada"][0]))


BAD: list[tuple[Callable[[Books], None], set[Wrong]]] = [
    (_shown_once_less, {Wrong.LOST, Wrong.HALF, Wrong.SUM}),
    (_aborted_is_seen, {Wrong.ABORTED_SHOWN, Wrong.UNSTABLE}),
    (_aborted_is_taken, {Wrong.ABORTED_SHOWN}),
    (_shown_twice, {Wrong.DOUBLED, Wrong.SUM}),
    (_shown_behind, {Wrong.UNSTABLE}),
    (_entered_twice, {Wrong.PROCESSED_TWICE}),
    (_not_entered, {Wrong.UNPROCESSED}),
    (_told_otherwise, {Wrong.CONTRADICTED}),
    (_never_ended, {Wrong.STUCK}),
    (_stored_elsewhere, {Wrong.PHANTOM}),
    (_comes_again, {Wrong.GIVEN_AGAIN}),
]


@pytest.mark.parametrize(("damage", "wrong"), BAD, ids=[damage.__name__[1:] for damage, _ in BAD])
def test_bad_books_are_flagged_with_their_class(damage: Callable[[Books], None], wrong: set[Wrong]) -> None:
    books = _books()
    damage(books)
    assert set(judge(books).counts) == wrong


def test_every_class_of_wrong_has_bad_books() -> None:
    assert set().union(*(wrong for _, wrong in BAD)) == set(Wrong)


def test_a_transfer_that_is_shown_by_half_is_named() -> None:
    books = _books()
    books.seen["bob"].clear()
    assert halves(books)
    assert all("bob is not shown" in line for line in halves(books))


def test_a_value_tells_its_transaction() -> None:
    leg = leg_of(-5, "teller-1/17#1")
    assert label_of(leg) == "teller-1/17"
    assert label_of(entry_of("ada", leg, "mover-2/3#0")) == "mover-2/3"
