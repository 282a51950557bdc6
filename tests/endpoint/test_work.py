"""Work: the handle of an operation, for threads and callbacks. (asyncio: test_asyncio.py.)"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from time import monotonic

import pytest

from peers import BRIEFLY, SOON, Call
from rankmesh import CancelledError, DeadlineError, UsageError, Work
from rankmesh.endpoint.progress import Engine
from timing import wait_until


class Somebody:
    """What a Work says of whom it waits for."""

    def known(self, now: float) -> str:
        return "It was seen yesterday."

    def __str__(self) -> str:
        return "somebody"


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine("test", 100e-6)
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture
def work(engine: Engine) -> Work[int]:
    return Work(engine, "wait for", Somebody(), 7, SOON)


def finish(engine: Engine, work: Work[int], value: int) -> None:
    with engine:
        work.finish(value)


def test_value(engine: Engine, work: Work[int]) -> None:
    assert not work.done()
    waiting = Call(work.result)
    finish(engine, work, 5)
    assert waiting.result() == 5
    assert work.done()
    work.wait()
    assert work.result() == 5
    assert work.cancel() is False


def test_error_is_raised_to_everyone_who_asks(engine: Engine, work: Work[int]) -> None:
    waiting = Call(work.wait)
    with engine:
        work.fail(UsageError("no such thing"))
    for ask in (waiting.result, work.wait, work.result):
        with pytest.raises(UsageError, match="no such thing"):
            ask()


def test_first_end_counts(engine: Engine, work: Work[int]) -> None:
    finish(engine, work, 1)
    with engine:
        work.fail(UsageError("too late"))
    assert work.result() == 1


def test_timeout_cancels_and_tells(work: Work[int]) -> None:
    with pytest.raises(DeadlineError) as caught:
        work.result(timeout=BRIEFLY)
    error = caught.value
    assert (error.op, error.peer, error.tag, error.timeout) == ("wait for", "somebody", 7, BRIEFLY)
    assert error.known == "It was seen yesterday."
    assert error.elapsed >= BRIEFLY
    assert "wait for somebody, tag 7 did not complete within 0.1 s" in str(error)
    assert work.done()
    with pytest.raises(DeadlineError):
        work.result(timeout=SOON)


def test_own_timeout_counts_from_the_start(engine: Engine) -> None:
    work: Work[int] = Work(engine, "wait", None, None, BRIEFLY)
    with pytest.raises(DeadlineError) as caught:
        work.wait()
    assert caught.value.timeout == BRIEFLY
    assert caught.value.tag is None


def test_cancel_wakes_whoever_waits(work: Work[int]) -> None:
    waiting = Call(work.result)
    wait_until(lambda: work.parker is not None, 5, "a waiter")
    assert work.cancel() is True
    with pytest.raises(CancelledError, match="wait for somebody, tag 7 was cancelled"):
        waiting.result()


@pytest.mark.parametrize("waiters", [2, 5])
def test_many_threads_may_wait_for_one_work(engine: Engine, work: Work[int], waiters: int) -> None:
    other: Work[int] = Work(engine, "lead", None, None, SOON)
    leading = Call(other.result)
    waiting = [Call(work.result) for _ in range(waiters)]
    began = monotonic()
    finish(engine, work, 3)
    assert [call.result() for call in waiting] == [3] * waiters
    assert leading.running
    finish(engine, other, 4)
    assert leading.result() == 4
    assert monotonic() - began < SOON / 2, "a waiter was only freed by its deadline"


def test_many_threads_may_wait_for_one_work_that_one_of_them_drives(engine: Engine, work: Work[int]) -> None:
    waiting = [Call(work.result, timeout=SOON) for _ in range(3)]
    wait_until(lambda: work.parker is not None, 5, "a waiter")
    finish(engine, work, 3)
    assert [call.result(SOON / 2) for call in waiting] == [3, 3, 3]


def test_callbacks_run_once_in_order_and_without_the_lock(engine: Engine, work: Work[int]) -> None:
    seen: list[tuple[int, int]] = []
    for number in range(3):
        work.add_done_callback(lambda done, number=number: seen.append((number, done.result())))  # type: ignore[misc]
    work.add_done_callback(lambda _: engine.call_soon(lambda: None))  # takes the lock
    finish(engine, work, 9)
    wait_until(lambda: len(seen) == 3, 5)
    assert seen == [(0, 9), (1, 9), (2, 9)]


def test_callback_added_late_runs_at_once(engine: Engine, work: Work[int]) -> None:
    finish(engine, work, 9)
    seen: list[Work[int]] = []
    work.add_done_callback(seen.append)
    assert seen == [work]


def test_callback_that_raises_is_logged_and_spoils_nothing(
    engine: Engine, work: Work[int], caplog: pytest.LogCaptureFixture
) -> None:
    def boom(_: Work[int]) -> None:
        raise ZeroDivisionError("by a user")

    seen = threading.Event()
    work.add_done_callback(boom)
    work.add_done_callback(lambda _: seen.set())
    with caplog.at_level(logging.ERROR, logger="rankmesh"):
        finish(engine, work, 1)
        assert seen.wait(SOON)
    assert "A callback of a Work raised." in caplog.text
    assert "by a user" in caplog.text


def test_callback_may_wait_for_other_work(engine: Engine, work: Work[int]) -> None:
    """Whoever runs it does not hold the lead."""
    other: Work[int] = Work(engine, "other", None, None, SOON)
    got: list[int] = []
    work.add_done_callback(lambda _: got.append(other.result(SOON)))
    waiting = Call(Work[int](engine, "third", None, None, 5 * BRIEFLY).wait)
    ending = Call(finish, engine, work, 1)
    finish(engine, other, 2)
    ending.result()
    wait_until(lambda: got == [2], 5)
    with pytest.raises(DeadlineError):
        waiting.result()


def test_repr_is_a_status_line(engine: Engine, work: Work[int]) -> None:
    assert repr(work) == "<Work wait for somebody, tag 7: pending>"
    finish(engine, work, 1)
    assert repr(work) == "<Work wait for somebody, tag 7: done>"
    failed: Work[int] = Work(engine, "fail", None, None, SOON)
    with engine:
        failed.fail(UsageError("no"))
    assert repr(failed) == "<Work fail: failed>"
    given_up: Work[int] = Work(engine, "give up", None, None, SOON)
    given_up.cancel()
    assert repr(given_up) == "<Work give up: cancelled>"
