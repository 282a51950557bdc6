"""Ctrl-C: raised in the program's code and where a thread sleeps, put off elsewhere, and nothing is lost by it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from random import Random
from types import FrameType
from typing import Any

import numpy as np
import pytest

from rankmesh import Config, Endpoint, Mesh
from rankmesh.endpoint import interrupts
from ranks import Ranks, Talk
from timing import scaled, wait_until

MIB = 1024 * 1024


def run_in(
    path: str, source: str, call: Callable[[], Any] | None = None, close: Callable[[], Any] | None = None
) -> Callable[[], Any]:
    """A function of a file at that path, which evaluates the source."""
    scope: dict[str, Any] = {"call": call, "close": close, "here": sys._getframe}
    exec(compile(f"def function():\n    return {source}", path, "exec"), scope)  # noqa: S102  # that path is its name
    function: Callable[[], Any] = scope["function"]
    return function


ENGINE, STEM = (os.path.join(interrupts._PACKAGE, *part) for part in (("endpoint", "x.py"), ("launch", "x.py")))
NUMPY, USERS = os.path.join(os.path.dirname(np.__file__), "x.py"), "/home/somebody/train.py"


@pytest.mark.parametrize(
    "innermost, callers, raises",
    [
        (USERS, [], True),
        (NUMPY, [], True),
        (ENGINE, [], False),
        (NUMPY, [ENGINE], False),
        (USERS, [ENGINE], True),  # a user's function that a collective calls
        (NUMPY, [USERS, ENGINE], True),
        (STEM, [], True),
        (USERS, [STEM], True),
        (ENGINE, [USERS, STEM], False),
    ],
)
def test_where_an_interrupt_is_raised(innermost: str, callers: list[str], raises: bool) -> None:
    function = run_in(innermost, "here()")
    for path in callers:
        function = run_in(path, "call()", function)
    frame: FrameType = function()
    assert interrupts._may_raise(frame) is raises


def test_it_is_raised_where_a_thread_sleeps() -> None:
    function = run_in(ENGINE, "here()")
    assert not interrupts._may_raise(function())
    interrupts.sleeps(function)
    try:
        assert interrupts._may_raise(function())
    finally:
        interrupts._sleeps.remove(function.__code__)


def test_the_handler_is_there_as_long_as_an_endpoint() -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with Endpoint(None, name="one"):
        with Endpoint(None, name="two"):
            assert signal.getsignal(signal.SIGINT) is interrupts._interrupt
        assert signal.getsignal(signal.SIGINT) is interrupts._interrupt
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_programs_own_handler_stays() -> None:
    def own(number: int, frame: FrameType | None) -> None:
        """The program's."""

    signal.signal(signal.SIGINT, own)
    try:
        with Endpoint(None, name="one"):
            assert signal.getsignal(signal.SIGINT) is own
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_what_waits_for_a_message_is_interrupted_at_once() -> None:
    with Endpoint("tcp://127.0.0.1:0", name="waits") as endpoint:
        timer = threading.Timer(0.05, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            endpoint.recv(bytearray(1), timeout=scaled(20))
        timer.join()


def test_one_that_is_put_off_until_the_last_endpoint_is_closed_is_raised_once() -> None:
    """Python's own handler is back then: it does not say that it has raised, and the signal was sent for ever."""
    endpoint = Endpoint("tcp://127.0.0.1:0", name="closes")
    kill_and_close = run_in(ENGINE, "(call(), close())", partial(os.kill, os.getpid(), signal.SIGINT), endpoint.close)
    again = threading.Event()
    with pytest.raises(KeyboardInterrupt):
        wait_forever(kill_and_close, again)
    wait_until(lambda: not interrupts._sender, 10, "the end of the sender")
    assert not again.wait(0.05), "and no other interrupt comes"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def wait_forever(first: Callable[[], Any], event: threading.Event) -> None:
    first()
    event.wait(scaled(20))


def _reads(mesh: Mesh, talk: Talk, nbytes: int, times: int) -> None:
    if mesh.rank == 0:
        mesh.memory.register("kv", np.arange(nbytes, dtype=np.uint8))
        talk.recv()
        return
    assert signal.getsignal(signal.SIGINT) is interrupts._interrupt
    seed = int.from_bytes(os.urandom(4))
    remote, rng = mesh.memory.open(0, "kv", wait=True), Random(seed)
    out, expected = np.empty(nbytes, np.uint8), np.arange(nbytes, dtype=np.uint8)
    for turn in range(times):
        timer = threading.Timer(rng.uniform(0.0005, 0.01), os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            while True:
                remote.read(out)
        except KeyboardInterrupt:
            timer.join()
        out.fill(0)
        remote.read(out, timeout=scaled(10))
        assert np.array_equal(out, expected), (seed, turn)
    talk.send(times)


@pytest.mark.usefixtures("nursery")
@pytest.mark.parametrize("nbytes", [4096, 8 * MIB])
@pytest.mark.parametrize("shm", [True, False], ids=["shm", "tcp"])
def test_reads_that_are_interrupted_do_no_harm(shm: bool, nbytes: int) -> None:
    """Half of the interrupts of large reads over TCP lost the connection, and the owner was said to have broken the
    protocol; after some ten of small ones the engine's lock was held for ever."""
    with Ranks(2, _reads, Config(shm=shm, pull=False), (nbytes, 60)) as ranks:
        assert ranks.hear(1, scaled(40)) == 60
        ranks.say(0)
