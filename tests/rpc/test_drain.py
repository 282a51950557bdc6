"""Brief functions share a thread; one that takes long this time holds up nobody."""

from __future__ import annotations

import random
import threading

import pytest

from calls import Served
from peers import SOON
from rankmesh import Work
from rankmesh.rpc import drain
from timing import wait_until


@pytest.fixture(autouse=True)
def anything_is_brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine nothing is: what is tested is what happens to those that count as brief."""
    monkeypatch.setattr("rankmesh.rpc.server.BRIEF", SOON)


def in_flight(served: Served, count: int, name: str = "pooled") -> list[Work[int]]:
    return [served.peer.call_async(name, number, timeout=SOON) for number in range(count)]


def test_many_at_once_get_their_own_answers(served: Served) -> None:
    for count in (1, 2, drain.BATCH - 1, drain.BATCH, 5 * drain.BATCH):
        assert [work.result() for work in in_flight(served, count)] == list(range(count))


def test_one_that_takes_long_holds_up_nobody(served: Served) -> None:
    served.peer.call("pooled", 0, timeout=SOON)
    gates = [threading.Event() for _ in range(3)]

    def sometimes_slow(number: int) -> int:
        if number < len(gates):
            gates[number].wait(SOON)
        return number

    served.server.rpc.register(sometimes_slow)
    served.peer.call("sometimes_slow", 7, timeout=SOON)  # now it counts as brief
    works = in_flight(served, 100, "sometimes_slow")
    others = in_flight(served, 100)
    assert [work.result() for work in works[3:]] == list(range(3, 100))
    assert [work.result() for work in others] == list(range(100))
    assert not any(work.done() for work in works[:3])
    for number in (2, 0, 1):
        gates[number].set()
        assert works[number].result() == number
    assert [work.result() for work in in_flight(served, 10, "sometimes_slow")[3:]] == list(range(3, 10))


def test_answers_that_are_ready_do_not_wait_for_one_that_is_not(served: Served) -> None:
    gate = threading.Event()
    served.server.rpc.register(lambda: gate.wait(SOON), "slow")
    try:
        gate.set()
        assert served.peer.call("slow", timeout=SOON)
        served.peer.call("pooled", 0, timeout=SOON)
        gate.clear()
        works = [*in_flight(served, 3), served.peer.call_async("slow", timeout=SOON), *in_flight(served, 3)]
        assert [work.result() for work in works[:3] + works[4:]] == [0, 1, 2] * 2
        assert not works[3].done()
    finally:
        gate.set()
    assert works[3].result()


def test_brief_ones_that_raise_or_are_given_up(served: Served) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)

    def odd(number: int) -> int:
        if number % 3 == 0:
            raise ValueError(number)
        return number

    served.server.rpc.register(odd)
    with pytest.raises(ValueError, match="0"):
        served.peer.call("odd", 0, timeout=SOON)
    works = in_flight(served, 200, "odd")
    cancelled = set(rng.sample(range(200), 40))
    for number in cancelled:
        works[number].cancel()
    for number, work in enumerate(works):
        if number in cancelled:
            continue
        if number % 3 == 0:
            with pytest.raises(ValueError, match=str(number)):
                work.result()
        else:
            assert work.result() == number
    wait_until(lambda: served.server.rpc.statistics()["serving"] == 0, SOON)
