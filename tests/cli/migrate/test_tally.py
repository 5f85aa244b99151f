"""Progress as it is counted: rates, lags and what is left."""

from magnetar.cli.migrate.copying import CopyProgress, CopyTotals
from magnetar.cli.migrate.migrate import format_progress_line
from magnetar.proto.names import Position, TopicName


def tally() -> CopyProgress:
    return CopyProgress(TopicName.parse("orders"))


def test_a_lag_of_entries_is_told_in_messages_by_the_batches_that_came() -> None:
    one = tally()
    one.set_lag(4, entries=True)
    assert one.lag == 4, "no batch is known yet"
    one.add(Position(1, 0), 100, 1000)
    one.set_lag(3, entries=True)
    assert one.lag == 300
    one.set_lag(3, entries=False)
    assert one.lag == 3


def test_a_lag_is_known_when_that_of_every_partition_is() -> None:
    one, other = tally(), tally()
    one.set_lag(5, entries=False)
    totals = CopyTotals([one, other])
    assert totals.lag is None
    assert "lag unknown" in format_progress_line("orders", totals, 0.0)
    other.set_lag(7, entries=False)
    assert totals.lag == 12


def test_the_rate_is_that_of_the_last_seconds() -> None:
    one = tally()
    one.set_lag(1000, entries=False)
    totals = CopyTotals([one])
    assert totals.rate(0.0) == 0
    assert totals.remaining_time_s(0.0) is None
    one.add(Position(1, 0), 400, 1)
    assert totals.rate(2.0) == 200
    assert totals.remaining_time_s(200.0) == 3
    one.complete = True
    assert format_progress_line("orders", totals, 2.0) == "orders: 400 copied, complete"


def test_why_nothing_is_copied_is_told_until_something_is() -> None:
    one = tally()
    one.note = "the source is away"
    assert "waits: the source is away" in format_progress_line("orders", CopyTotals([one]), 0.0)
    one.add(Position(1, 0), 1, 1)
    assert "waits" not in format_progress_line("orders", CopyTotals([one]), 1.0)
