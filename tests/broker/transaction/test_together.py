"""Questions of one request: one wait for all of their answers."""

import asyncio

from magnetar.broker.transaction.peers import CoordinatorRequestBatch
from magnetar.proto.errors import NotOwner, TimedOut
from magnetar.proto.states import TxnState


async def test_the_answers_are_in_the_order_of_the_questions_whatever_came_first() -> None:
    together = CoordinatorRequestBatch()
    first, second, third = together.add_request(), together.add_request(), together.add_request()
    second.answer(NotOwner("elsewhere"))
    waiting = asyncio.ensure_future(together.wait_answers(10.0))
    await asyncio.sleep(0)
    third.answer(TxnState.ABORTED)
    assert not waiting.done(), "the first has no answer"
    first.answer(TxnState.COMMITTED)
    results = await waiting
    assert results[0] is TxnState.COMMITTED
    assert isinstance(results[1], NotOwner)
    assert results[2] is TxnState.ABORTED


async def test_what_is_answered_at_once_is_not_waited_for() -> None:
    together = CoordinatorRequestBatch()
    together.add_request().answer(TxnState.COMMITTED)
    assert await together.wait_answers(0.0) == [TxnState.COMMITTED]
    assert await CoordinatorRequestBatch().wait_answers(0.0) == []


async def test_one_without_an_answer_in_time_is_unknown_and_an_answer_that_comes_later_changes_nothing() -> None:
    together = CoordinatorRequestBatch()
    first, late = together.add_request(), together.add_request()
    first.answer(TxnState.COMMITTED)
    results = await together.wait_answers(0.001)
    assert results[0] is TxnState.COMMITTED
    assert isinstance(results[1], TimedOut)
    late.answer(TxnState.COMMITTED)
    late.answer(TxnState.ABORTED)
    assert late.result is TxnState.COMMITTED, "the first answer counts"
