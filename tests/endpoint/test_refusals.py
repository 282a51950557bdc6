"""Connections that are refused are told without filling the log, however many come, from wherever, for whatever."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, cast

import pytest

from attack import refused, wait_for_end
from peers import SOON
from rankmesh import Config, Endpoint
from rankmesh.endpoint.refusals import MAX_ADDRESSES, MAX_REASONS, Refusals

TOKEN = "the cluster token differs"
NOISE = "the other side does not speak rankmesh"
KNOCKS = 200


class Clock:
    """What Refusals needs of an engine: timers, which the test lets run."""

    def __init__(self) -> None:
        self._due: list[Callable[[], None]] = []

    def call_at(self, when: float, callback: Callable[[], None]) -> None:
        self._due.append(callback)

    def pass_by(self) -> None:
        due, self._due = self._due, []
        for callback in due:
            callback()

    @property
    def idle(self) -> bool:
        return not self._due


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def refusals(clock: Clock) -> Refusals:
    return Refusals(cast("Any", clock), quiet=5.0)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """What was logged since the last call."""

    def take() -> list[str]:
        told = [record.getMessage() for record in caplog.records]
        assert all(record.levelno == logging.WARNING for record in caplog.records)
        caplog.clear()
        return told

    with caplog.at_level(logging.WARNING, "rankmesh"):
        yield take


Lines = Callable[[], list[str]]


def test_the_first_is_told_at_once_and_the_rest_as_a_number(refusals: Refusals, clock: Clock, lines: Lines) -> None:
    for port in range(1, 31):
        refusals.add(f"tcp://10.0.0.7:{port}", TOKEN if port % 3 else NOISE)
    assert lines() == [f"Refused the connection from tcp://10.0.0.7:1: {TOKEN}."]
    clock.pass_by()
    assert lines() == [f"Refused more connections from tcp://10.0.0.7 within 5 s: 19 × {TOKEN}, 10 × {NOISE}."]
    refusals.add("tcp://10.0.0.7:31", NOISE)
    assert lines() == [], "it goes on: it is counted"
    clock.pass_by()
    assert lines() == [f"Refused more connections from tcp://10.0.0.7 within 5 s: 1 × {NOISE}."]
    clock.pass_by()
    assert lines() == []
    assert clock.idle, "it was quiet for so long: nothing is kept"
    refusals.add("tcp://10.0.0.7:32", TOKEN)
    assert lines() == [f"Refused the connection from tcp://10.0.0.7:32: {TOKEN}."]


@pytest.mark.parametrize("one, other", [("tcp://10.0.0.7:1", "tcp://10.0.0.8:1"), ("tls://[::1]:5", "tls://[::2]:5")])
def test_one_address_does_not_hide_another(refusals: Refusals, lines: Lines, one: str, other: str) -> None:
    refusals.add(one, NOISE)
    refusals.add(f"{one}0", NOISE)
    refusals.add(other, TOKEN)
    assert lines() == [f"Refused the connection from {one}: {NOISE}.", f"Refused the connection from {other}: {TOKEN}."]


def test_many_addresses_share_their_lines(refusals: Refusals, clock: Clock, lines: Lines) -> None:
    for _ in range(2):
        for number in range(1000):
            refusals.add(f"tcp://10.0.{number // 250}.{number % 250}:7", NOISE)
    assert len(refusals._unlogged) == len(lines()) == MAX_ADDRESSES + 1
    clock.pass_by()
    told = lines()
    assert len(told) == MAX_ADDRESSES + 1
    assert refused("\n".join(told)) == 2000 - (MAX_ADDRESSES + 1)
    assert "from other addresses within 5 s" in told[-1]
    clock.pass_by()
    assert refusals._unlogged == {}


def test_many_reasons_share_their_number(refusals: Refusals, clock: Clock, lines: Lines) -> None:
    for number in range(1000):
        refusals.add("tcp://10.0.0.7:1", f"a HELLO message of {number} bytes")
    lines()
    clock.pass_by()
    (told,) = lines()
    assert told.count("1 × a HELLO message") == MAX_REASONS
    assert f"{999 - MAX_REASONS} × other reasons" in told


def test_the_end_tells_the_rest(refusals: Refusals, clock: Clock, lines: Lines) -> None:
    for _ in range(3):
        refusals.add("shm://name#4711", NOISE)
    lines()
    refusals.close()
    assert lines() == [f"Refused more connections from shm://name within 5 s: 2 × {NOISE}."]
    clock.pass_by()
    assert lines() == []
    assert clock.idle


def test_a_knocker_does_not_fill_the_log(lines: Lines) -> None:
    with Endpoint(config=Config(shm=False)) as endpoint:
        endpoint._connector.refusals.quiet = 3600.0
        host, port = endpoint.address.removeprefix("tcp://").split(":")
        for _ in range(KNOCKS):
            with closing(socket.create_connection((host, int(port)), timeout=SOON)) as sock:
                sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
                wait_for_end(sock)
        assert len(told := lines()) == 1
        assert refused(told[0], "does not speak rankmesh") == 1
    assert len(told := lines()) == 1
    assert refused(told[0], "does not speak rankmesh") == KNOCKS - 1
