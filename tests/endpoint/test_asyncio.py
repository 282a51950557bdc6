"""Work in asyncio: awaited without blocking the loop, cancelled with its task."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Any

import numpy as np
import pytest

from peers import BRIEFLY, SOON, Call, Pair, blank, is_blank, pattern
from rankmesh import CancelledError, DeadlineError, Work
from rankmesh.config import KIB, MIB


async def ticks(seconds: list[float]) -> None:
    """Notes how long each turn of the loop took."""
    last = monotonic()
    while True:
        await asyncio.sleep(0.005)
        seconds.append(monotonic() - last)
        last = monotonic()


def run(main: Any) -> Any:
    return asyncio.run(asyncio.wait_for(main, SOON))


def test_loop_goes_on_while_a_work_is_awaited(pair: Pair) -> None:
    async def main() -> None:
        turns: list[float] = []
        ticking = asyncio.create_task(ticks(turns))
        out = blank(10)
        receive = pair.back.irecv(out, tag=1)
        asyncio.get_running_loop().call_later(0.3, lambda: pair.there.send(pattern(10), tag=1))
        status = await receive
        ticking.cancel()
        assert status == (pair.back, 1, 10)
        assert np.array_equal(out, pattern(10))
        assert len(turns) >= 10, "the loop stood still"

    run(main())


def test_large_messages_both_ways(pair: Pair) -> None:
    async def main() -> None:
        outs = [blank(2 * MIB), blank(2 * MIB)]
        works: list[Work[Any]] = [
            pair.back.irecv(outs[0], tag=1),
            pair.there.irecv(outs[1], tag=1),
            pair.there.isend(pattern(2 * MIB, 0), tag=1),
            pair.back.isend(pattern(2 * MIB, 1), tag=1),
        ]
        for work in works:
            await work
        for seed, out in enumerate(outs):
            assert np.array_equal(out, pattern(2 * MIB, seed))

    run(main())


def test_many_awaits_at_once(pair: Pair) -> None:
    count = 300

    async def receive(tag: int) -> int:
        out = bytearray(4)
        status = await pair.back.irecv(out, tag=tag)
        assert status.tag == tag
        return int.from_bytes(out, "little")

    async def send(tag: int) -> None:
        await pair.there.isend((7 * tag).to_bytes(4, "little"), tag=tag)

    async def main() -> None:
        receives = [asyncio.create_task(receive(tag)) for tag in range(count)]
        await asyncio.gather(*(send(tag) for tag in reversed(range(count))))
        assert await asyncio.gather(*receives) == [7 * tag for tag in range(count)]

    run(main())


@pytest.mark.parametrize("nbytes", [10, 200 * KIB])
def test_cancelling_the_task_cancels_the_operation(pair: Pair, nbytes: int) -> None:
    out = blank(nbytes)

    async def main() -> None:
        receive = pair.back.irecv(out, tag=1)

        async def wait() -> None:
            await receive

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert receive.done()
        with pytest.raises(CancelledError):
            await receive

    run(main())
    later = blank(nbytes)
    send = pair.there.isend(pattern(nbytes), tag=1)
    pair.back.recv(later, tag=1, timeout=SOON)
    send.wait(SOON)
    assert np.array_equal(later, pattern(nbytes))
    assert is_blank(out)


def test_timeout_of_the_operation_counts(pair: Pair) -> None:
    async def main() -> None:
        receive = pair.back.irecv(bytearray(1), tag=1, timeout=BRIEFLY)
        with pytest.raises(DeadlineError) as caught:
            await receive
        assert caught.value.timeout == BRIEFLY
        assert caught.value.tag == 1

    run(main())


def test_wait_for_gives_up_the_operation(pair: Pair) -> None:
    async def main() -> None:
        receive = pair.back.irecv(bytearray(1), tag=1)

        async def wait() -> None:
            await receive

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wait(), BRIEFLY)
        assert receive.done()

    run(main())
    assert pair.right.hub.matcher.posted() == []


def test_finished_work_is_awaited_at_once(pair: Pair) -> None:
    async def main() -> None:
        pair.there.send(b"abc", tag=1)
        receive = pair.back.irecv(bytearray(3), tag=1)
        receive.wait(SOON)
        assert (await receive).nbytes == 3
        assert (await receive).nbytes == 3

    run(main())


def test_two_tasks_may_await_one_work(pair: Pair) -> None:
    async def main() -> None:
        receive = pair.back.irecv(bytearray(3), tag=1)

        async def wait() -> int:
            return (await receive).nbytes

        tasks = [asyncio.create_task(wait()) for _ in range(3)]
        await asyncio.sleep(0)
        pair.there.send(b"abc", tag=1)
        assert await asyncio.gather(*tasks) == [3, 3, 3]

    run(main())


def test_threads_and_tasks_share_an_endpoint(pair: Pair) -> None:
    """A thread that waits does not keep tasks from their messages, and the other way round."""
    waiting = Call(pair.back.recv, bytearray(1), tag=99, timeout=SOON)

    async def main() -> None:
        out = bytearray(4)
        for number in range(50):
            receive = pair.back.irecv(out, tag=1)
            pair.there.send(number.to_bytes(4, "little"), tag=1)
            await receive
            assert int.from_bytes(out, "little") == number

    run(main())
    assert waiting.running
    pair.there.send(b"x", tag=99)
    assert waiting.result().nbytes == 1
