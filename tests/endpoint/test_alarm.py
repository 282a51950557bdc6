"""The alarm clock that others set for a thread that sleeps by it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from time import monotonic

import pytest

from peers import BRIEFLY, SOON, Call
from rankmesh.endpoint.alarm import Alarm
from timing import scaled


@pytest.fixture
def alarm() -> Iterator[Alarm]:
    alarm = Alarm()
    yield alarm
    alarm.close()


def test_it_goes_off_when_it_was_set_for(alarm: Alarm) -> None:
    began = monotonic()
    alarm.set(BRIEFLY)
    alarm.wait()
    assert BRIEFLY <= monotonic() - began < SOON


def test_it_goes_off_if_it_was_set_before_anybody_waited(alarm: Alarm) -> None:
    alarm.ring()
    alarm.wait()


@pytest.mark.parametrize("seconds", [1e-3, 3600.0])
def test_who_sleeps_by_it_is_woken_by_a_ring(alarm: Alarm, seconds: float) -> None:
    alarm.set(seconds)
    sleeping = Call(alarm.wait)
    alarm.ring()
    sleeping.result()


def test_it_is_put_off_without_waking_who_sleeps_by_it(alarm: Alarm) -> None:
    late = scaled(1.0)
    began = monotonic()
    alarm.set(scaled(0.5))
    sleeping = Call(alarm.wait)
    alarm.set(late)
    sleeping.result()
    assert monotonic() - began >= late


def test_it_does_not_go_off_when_it_was_stopped(alarm: Alarm) -> None:
    alarm.set(BRIEFLY)
    alarm.stop()
    sleeping = Call(alarm.wait)
    with pytest.raises(AssertionError, match="did not return"):
        sleeping.result(3 * BRIEFLY)
    alarm.set(1e-3)
    sleeping.result()


def test_that_it_went_off_is_forgotten_when_it_is_stopped(alarm: Alarm) -> None:
    alarm.ring()
    alarm.stop()
    os.set_blocking(alarm.fd, False)
    with pytest.raises(BlockingIOError):
        alarm.wait()


def test_other_programs_do_not_inherit_it(alarm: Alarm) -> None:
    assert not os.get_inheritable(alarm.fd)


def test_an_alarm_that_is_closed_says_so() -> None:
    alarm = Alarm()
    alarm.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        alarm.ring()
