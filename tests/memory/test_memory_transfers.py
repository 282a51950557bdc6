"""Reads and writes of every shape, over every transport, against numpy."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peers import SOON, Call, Medium, blank, is_blank, pattern, router_of
from rankmesh import BusyError, Config, DeadlineError, OutOfBounds, StaleRegion, UsageError
from rankmesh.memory.operations import COST
from rankmesh.memory.region import MAX_NOTICES
from regions import Sides, Uses, open_sides

SIZES = [1, 64, 4096, 15_000, 16_384, 65_536, 70_001, 3_000_001]
MEMORY = 1 << 16


@pytest.fixture(scope="module")
def near() -> Iterator[Sides]:
    with open_sides(Medium("inproc://", Config())) as both:
        yield both


@pytest.mark.parametrize("nbytes", SIZES)
def test_read_and_write_of_every_size(sides: Sides, nbytes: int) -> None:
    memory = pattern(nbytes + 100)
    sides.register(memory)
    remote = sides.peer.open("kv")
    out = blank(nbytes + 20)
    remote.read(out[10:-10], 37)
    assert (out[10:-10] == memory[37 : 37 + nbytes]).all()
    assert is_blank(out[:10])
    assert is_blank(out[-10:])
    data = pattern(nbytes, 1)
    assert remote.write(data, 41) is None
    assert (memory[41 : 41 + nbytes] == data).all(), "a completed write is applied"
    assert (memory[:41] == pattern(nbytes + 100)[:41]).all()
    assert (memory[41 + nbytes :] == pattern(nbytes + 100)[41 + nbytes :]).all()
    assert sides.owner.memory.stats()["transfers"] == 0


def outcome(call: Any, pieces: list[Any], async_op: bool) -> Any:
    work = call(pieces, async_op=async_op)
    return work.result(SOON) if async_op else work


def structure_with_references() -> np.ndarray[Any, Any]:
    array = np.zeros(2, [("step", "i4"), ("extra", "O")])
    array["extra"] = None, "text"
    return array


@pytest.mark.parametrize("async_op", [False, True], ids=["awaited", "async"])
@pytest.mark.parametrize("count, nbytes", [(2, 100), (2, 100_000), (300, 8192)], ids=["small", "streamed", "frames"])
@pytest.mark.parametrize(
    "bad",
    [np.array([None, "text"], object), structure_with_references(), np.arange(64)[::-1]],
    ids=["objects", "structure", "backwards"],
)
def test_a_batch_with_what_cannot_be_moved_is_refused_as_a_whole(
    sides: Sides, bad: np.ndarray[Any, Any], count: int, nbytes: int, async_op: bool
) -> None:
    """However large the others are, and whoever would find out. An object's memory is a pointer."""
    memory = pattern(4 << 20)
    sides.register(memory)
    remote, before = sides.peer.open("kv"), bad.copy()
    good = [(blank(nbytes), index * nbytes) for index in range(count)]
    for call in (remote.write_batch, remote.read_batch):
        with pytest.raises(UsageError):
            outcome(call, [*good, (bad, count * nbytes)], async_op)
    assert bad.tolist() == before.tolist()
    assert all(is_blank(out) for out, _ in good)
    assert (memory == pattern(4 << 20)).all()
    remote.write(b"it goes on", 0)
    assert memory[:10].tobytes() == b"it goes on"


def test_nothing_is_read_into_what_is_empty(sides: Sides) -> None:
    """A reply was put into memory that is read-only, of which there was nothing to write to."""
    sides.register(pattern(1000))
    remote = sides.peer.open("kv")
    out = blank(5)
    remote.read_batch([(np.empty(0), 3), (out, 7), (np.empty((5, 0), np.float32), 1000), (b"", 0), (bytearray(), 1)])
    assert (out == pattern(1000)[7:12]).all()
    remote.read(np.empty((0, 3)), 1000)
    remote.read(b"", 0)
    assert remote.read_batch([]) is None
    assert remote.write_batch([]) is None


def test_many_at_once_and_out_of_order(sides: Sides) -> None:
    memory = pattern(8 << 20)
    sides.register(memory)
    remote = sides.peer.open("kv")
    sizes = [10, 5 << 20, 3000, 1 << 20, 64, 70_000] * 5
    outs = [blank(size) for size in sizes]
    works = [remote.read(out, 1000 * at, async_op=True) for at, out in enumerate(outs)]
    for at, (work, out) in reversed(list(enumerate(zip(works, outs, strict=True)))):
        assert work.result(SOON) is out
        assert (out == memory[1000 * at : 1000 * at + len(out)]).all()
        assert work.done()


def test_a_burst_leaves_in_few_system_calls(tcp: Medium) -> None:
    with open_sides(tcp) as sides:
        memory = pattern(1 << 20)
        sides.register(memory)
        remote = sides.peer.open("kv")
        remote.read(bytearray(8))
        calls = [0]
        link = router_of(sides.peer).link
        assert link is not None
        outbound = router_of(sides.peer).outbound
        for name in ("_link_send", "_link_sendmsg"):
            inner = getattr(outbound, name)

            def count(data: Any, inner: Any = inner) -> int:
                calls[0] += 1
                return int(inner(data))

            setattr(outbound, name, count)
        outs = [blank(128) for _ in range(2000)]
        works = [remote.read(out, 128 * at, async_op=True) for at, out in enumerate(outs)]
        for at, (work, out) in enumerate(zip(works, outs, strict=True)):
            work.wait(SOON)
            assert (out == memory[128 * at : 128 * at + 128]).all()
        assert calls[0] < 2000 / 4, f"{calls[0]} system calls for 2000 reads"


def test_more_than_the_window_waits_its_turn(inproc: Medium) -> None:
    """While the owner stands still, 4 MiB of requests and answers are under way, and no more."""
    with open_sides(inproc) as sides:
        memory = pattern(16_000)
        sides.register(memory)
        remote = sides.peer.open("kv")
        (flow,) = sides.user.memory._flows.values()
        outs = [blank(12_000) for _ in range(1000)]
        with sides.owner.hub.engine:
            works = [remote.read(out, async_op=True) for out in outs]
            under_way = (4 << 20) // (12_000 + COST)
            assert len(router_of(sides.peer).requests) == under_way
            assert len(flow._waiting) == 1000 - under_way
            assert works[-1].cancel()
        for work, out in zip(works[:-1], outs[:-1], strict=True):
            work.wait(SOON)
            assert (out == memory[:12_000]).all()
        assert is_blank(outs[-1])


@pytest.mark.parametrize("nbytes", [64, 4096, 12_000])
@pytest.mark.parametrize("where", ["inproc", "tcp"])
def test_blocking_reads_and_writes_of_ones_own(where: str, nbytes: int, request: pytest.FixtureRequest) -> None:
    with open_sides(request.getfixturevalue(where)) as sides:
        memory = pattern(1 << 16)
        sides.register(memory)
        own = sides.owner.memory.open(sides.owner, "kv")
        out = blank(nbytes)
        for _ in range(3):
            assert (own.read(out, 100, timeout=SOON) == memory[100 : 100 + nbytes]).all()
            own.write(pattern(nbytes, 1), 100, timeout=SOON)
            assert (memory[100 : 100 + nbytes] == pattern(nbytes, 1)).all()


def test_from_many_threads(sides: Sides) -> None:
    memory = np.zeros(8 << 16, np.uint8)
    sides.register(memory)
    remote = sides.peer.open("kv")

    def work(at: int) -> None:
        mine = pattern(1 << 16, at)
        for nbytes in (1 << 16, 100, 30_000, 1 << 16):
            remote.write(mine[:nbytes], at << 16, timeout=SOON)
            out = blank(nbytes)
            remote.read(out, at << 16, timeout=SOON)
            assert (out == mine[:nbytes]).all()

    for call in [Call(work, at) for at in range(8)]:
        call.result()


def test_a_region_of_ones_own(sides: Sides) -> None:
    memory = pattern(1 << 20)
    sides.user.memory.register("own", memory)
    own = sides.user.memory.open(sides.user, "own")
    out = blank(1 << 20)
    own.read(out)
    assert (out == memory).all()
    own.write(pattern(1 << 20, 1))
    assert (memory == pattern(1 << 20, 1)).all()
    own.write_batch([(b"abc", 0), (b"def", 100)])
    assert bytes(memory[:3]) + bytes(memory[100:103]) == b"abcdef"


def test_await(inproc: Medium) -> None:
    with open_sides(inproc) as sides:
        sides.register(pattern(1 << 20))
        remote = sides.peer.open("kv")

        async def body() -> None:
            out = blank(1 << 20)
            got, none = await asyncio.gather(remote.read(out, async_op=True), remote.write(b"x", 0, async_op=True))
            assert got is out
            assert none is None

        asyncio.run(body())


# --- bounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [-1, 93, 100, 101, 1 << 62, 1 << 63, 1 << 64, -(1 << 70)])
def test_out_of_bounds(near: Sides, offset: int) -> None:
    memory = pattern(100)
    region = near.owner.memory.register("bounds", memory)
    remote = near.peer.open("bounds")
    out = blank(8)
    attempts: Uses = (
        lambda: remote.read(out, offset),
        lambda: remote.write(bytes(8), offset),
        lambda: remote.read_batch([(out[:4], 0), (out, offset)]),
        lambda: remote.write_batch([(bytes(4), 0), (bytes(8), offset)]),
        lambda: remote.read(out.reshape(2, 4), offset, stride=50),
        lambda: remote.fetch_add(offset, 1),
    )
    for use in attempts:
        with pytest.raises(OutOfBounds):
            use()
    assert is_blank(out)
    assert (memory == pattern(100)).all()
    region.unregister()


def test_empty_transfers(near: Sides) -> None:
    region = near.owner.memory.register("empty", bytearray(8))
    remote = near.peer.open("empty")
    remote.read(bytearray(), 8)
    remote.write(b"", 8, notify="told")
    assert region.wait_notification("told", SOON).key == "told"
    remote.read_batch([])
    remote.write_batch([])
    assert remote[3:3].shape == (0,)
    region.unregister()


def test_buffers_that_cannot_be_used(near: Sides) -> None:
    region = near.owner.memory.register("buffers", bytearray(64))
    remote = near.peer.open("buffers")
    readonly = np.zeros((4, 4), np.uint8)
    readonly.flags.writeable = False
    for out in (b"12345678", readonly, readonly[:, ::2], np.zeros(8, np.uint8)[::-1], "text", np.array([None])):
        with pytest.raises(UsageError):
            remote.read(out)
        with pytest.raises(UsageError):
            remote.read_batch([(bytearray(2), 0), (out, 8)])
    for data in (np.zeros(8, np.uint8)[::-1], "text", np.array([None])):
        with pytest.raises(UsageError):
            remote.write(data)
    with pytest.raises(UsageError, match="two or more dimensions"):
        remote.read(bytearray(8), stride=4)
    region.unregister()


# --- batches, strides, slices, against numpy --------------------------------------------------------------------------

pieces = st.lists(st.tuples(st.integers(0, MEMORY - 1), st.integers(0, 3000)), max_size=40)
local_strides = st.sampled_from([1, 2, 3])


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=pieces, stride=local_strides, seed=st.integers(0, 1000))
def test_batches_are_what_numpy_says(near: Sides, pieces: list[tuple[int, int]], stride: int, seed: int) -> None:
    memory = pattern(MEMORY, seed)
    region = near.owner.memory.register("batch", memory)
    try:
        remote = near.peer.open("batch")
        pieces = [(offset, min(nbytes, MEMORY - offset)) for offset, nbytes in pieces]
        outs = [blank(nbytes * stride)[::stride] for _, nbytes in pieces]
        remote.read_batch([(out, offset) for out, (offset, _) in zip(outs, pieces, strict=True)])
        for out, (offset, nbytes) in zip(outs, pieces, strict=True):
            assert (out == memory[offset : offset + nbytes]).all()
        expected = memory.copy()
        data = [pattern(nbytes * stride, at)[::stride] for at, (_, nbytes) in enumerate(pieces)]
        for (offset, nbytes), one in zip(pieces, data, strict=True):
            expected[offset : offset + nbytes] = one
        remote.write_batch([(one, offset) for one, (offset, _) in zip(data, pieces, strict=True)])
        assert (memory == expected).all()
    finally:
        region.unregister()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_slices_are_what_numpy_says(near: Sides, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    dtype = data.draw(st.sampled_from(["u1", "<f4", "<i8", ">u2", "S3"]))
    memory = (
        np.frombuffer(pattern(int(np.prod(shape)) * np.dtype(dtype).itemsize).tobytes(), dtype).reshape(shape).copy()
    )
    region = near.owner.memory.register("slices", memory)
    try:
        remote = near.peer.open("slices")
        index = tuple(data.draw(one_index(extent)) for extent in shape[: data.draw(st.integers(0, len(shape)))])
        if data.draw(st.booleans()):
            index = (*index, ...)
        got, expected = remote[index], memory[index]
        assert np.shape(got) == np.shape(expected)
        assert np.array_equal(np.asarray(got).view("V"), np.asarray(expected).view("V"))
        replacement = np.zeros(np.shape(expected), dtype) if data.draw(st.booleans()) else np.zeros((), dtype)[()]
        changed = memory.copy()
        changed[index] = replacement
        remote[index] = replacement
        assert memory.tobytes() == changed.tobytes()
    finally:
        region.unregister()


def one_index(extent: int) -> st.SearchStrategy[Any]:
    steps = st.integers(1, 4)
    bounds = st.one_of(st.none(), st.integers(-extent - 2, extent + 2))
    return st.one_of(st.integers(-extent, extent - 1), st.builds(slice, bounds, bounds, st.one_of(st.none(), steps)))


def test_indices_that_are_not_basic(near: Sides) -> None:
    region = near.owner.memory.register("index", np.zeros((4, 4)))
    remote = near.peer.open("index")
    for index in ([0, 1], np.array([1]), True, None, 1.5, "x"):
        with pytest.raises(UsageError, match="indexed by ints, slices"):
            _ = remote[index]
    with pytest.raises(UsageError, match=r"negative stride .* Index with positive steps, and turn around"):
        _ = remote[::-1]
    for outside in (4, -5, (0, 4), (0, 0, 0)):
        with pytest.raises(OutOfBounds):
            _ = remote[outside]
    assert region.array.sum() == 0
    region.unregister()


@pytest.mark.parametrize("rows", [3, 400, 40_000])
def test_rows_of_a_paged_cache(sides: Sides, rows: int) -> None:
    """Rows of a 2-D block, strided on both sides."""
    cache = np.arange(rows * 64, dtype=np.int32).reshape(rows, 64)
    sides.register(cache)
    remote = sides.peer.open("kv")
    wide = np.zeros((rows, 48), np.int32)
    remote.read(wide[:, 8:24], 4 * 10, stride=4 * 64)
    assert (wide[:, 8:24] == cache[:, 10:26]).all()
    assert not wide[:, :8].any()
    assert not wide[:, 24:].any()
    wide[:] = -7
    remote.write(wide[:, 1:5], 4 * 60, stride=4 * 64)
    assert (cache[:, 60:] == -7).all()
    assert (cache[:, :60] == np.arange(rows * 64).reshape(rows, 64)[:, :60]).all()
    remote.write_batch([(wide[:2, :4], 0, 256), (np.int32(5), 4 * 30)])
    assert (cache[:2, :4] == -7).all()
    assert cache[0, 30] == 5


def test_a_batch_is_refused_as_a_whole(sides: Sides) -> None:
    """The owner finds the last of 5,000 pieces out of bounds: not one of the others was written."""
    memory = pattern(MEMORY)
    sides.register(memory)
    remote = sides.peer.open("kv")
    remote.nbytes = 1 << 40  # as if this side had not looked
    outs = [blank(100) for _ in range(5000)]
    offsets = [at * 10 for at in range(4999)] + [MEMORY - 99]
    with pytest.raises(OutOfBounds, match="piece 4999"):
        remote.write_batch(list(zip(outs, offsets, strict=True)))
    with pytest.raises(OutOfBounds):
        remote.read_batch(list(zip(outs, offsets, strict=True)))
    with pytest.raises(OutOfBounds):
        remote.read(np.zeros((1000, 64), np.uint8), MEMORY - 100 * 999, stride=100)
    assert (memory == pattern(MEMORY)).all()
    assert all(is_blank(out) for out in outs)
    remote.write_batch(list(zip(outs[:-1], offsets[:-1], strict=True)))
    assert is_blank(memory[: 10 * 4998 + 100])


def test_pages_of_every_kind_in_one_batch(sides: Sides) -> None:
    """Pages of one array in no order, arrays of their own, other dtypes and dimensions, strides, and small ones."""
    memory = pattern(4 * MEMORY)
    sides.register(memory)
    remote = sides.peer.open("kv")
    cache = blank(600 * 4096).reshape(600, 4096)
    wide = np.zeros((300, 2048), np.int16)
    outs = [
        *(cache[page] for page in np.random.default_rng(5).permutation(600)[:300]),
        *(blank(size) for size in (1, 1023, 1024, 1025, 70_000)),
        *(np.zeros((8, 128), np.float32) for _ in range(20)),
        *(wide[row, ::2] for row in range(300)),
    ]
    places = np.cumsum([0, *(out.nbytes for out in outs)]) % (3 * MEMORY)
    pieces = [(out, int(place)) for out, place in zip(outs, places[:-1], strict=True)]
    remote.read_batch(pieces)
    assert all(out.tobytes() == memory[place : place + out.nbytes].tobytes() for out, place in pieces)
    assert not wide[:, 1::2].any()
    memory[:] = 0
    remote.write_batch(pieces)
    expected = np.zeros_like(memory)
    for out, place in pieces:
        expected[place : place + out.nbytes] = np.frombuffer(out.tobytes(), np.uint8)
    assert (memory == expected).all()


def test_pages_that_overlap_end_as_the_last_one_has_them(sides: Sides) -> None:
    sides.register(pattern(MEMORY))
    out = blank(2000 * 16 + 4096)
    places = [MEMORY - 4096 - 7 * at for at in range(2000)]
    sides.peer.open("kv").read_batch([(out[16 * at :][:4096], place) for at, place in enumerate(places)])
    expected, memory = blank(len(out)), pattern(MEMORY)
    for at, place in enumerate(places):
        expected[16 * at :][:4096] = memory[place : place + 4096]
    assert (out == expected).all()


def test_a_page_that_is_read_only_spoils_no_other(sides: Sides) -> None:
    """One of 1,000 cannot be read into: not one of the others is. The connection goes on."""
    sides.register(pattern(MEMORY))
    remote = sides.peer.open("kv")
    outs = [blank(4096) for _ in range(1000)]
    outs[700].flags.writeable = False
    with pytest.raises(UsageError, match="read-only"):
        remote.read_batch([(out, 0) for out in outs])
    del outs[700]
    remote.read(blank(MEMORY), 0)  # behind whatever came for the batch
    assert all(is_blank(out) for out in outs)


def test_more_pieces_than_a_request_takes(near: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankmesh.memory.remote.MAX_PIECES", 1 << 10)  # to make a table of 2 ** 20 takes seconds
    region = near.owner.memory.register("many", bytearray(8))
    with pytest.raises(UsageError, match="1025 pieces are too many for one request"):
        near.peer.open("many").write_batch([(b"x", 0)] * ((1 << 10) + 1))
    region.unregister()


def test_a_hundred_thousand_pieces(sides: Sides) -> None:
    memory = np.zeros(200_000, np.uint8)
    sides.register(memory)
    sides.peer.open("kv").write_batch([(b"\x01", 2 * at) for at in range(100_000)])
    assert (memory[::2] == 1).all()
    assert not memory[1::2].any()


# --- cells ------------------------------------------------------------------------------------------------------------


def test_cells(sides: Sides) -> None:
    signed = sides.register(np.zeros(4, np.int64), "signed")
    sides.register(np.zeros(4, np.uint64), "unsigned")
    one, other = sides.peer.open("signed"), sides.peer.open("unsigned")
    assert [one.fetch_add(8, 5), one.fetch_add(8, -7), one.fetch_add(8, 0)] == [0, 5, -2]
    assert [one.compare_and_swap(8, 1, 9), one.compare_and_swap(8, -2, 9), one.fetch_add(8, 0)] == [-2, -2, 9]
    assert [signed.fetch_add(8, 1), signed.compare_and_swap(8, 10, 11), signed.array.tolist()] == [9, 10, [0, 11, 0, 0]]
    assert [other.fetch_add(24, -1), other.fetch_add(24, 2), other.fetch_add(24, 0)] == [0, (1 << 64) - 1, 1]
    assert one.fetch_add(0, 1, async_op=True).result(SOON) == 0
    for bad in (1, 4, 12):
        with pytest.raises(UsageError, match="multiple of 8"):
            one.fetch_add(bad, 1)
    with pytest.raises(OutOfBounds):
        one.fetch_add(32, 1)
    with pytest.raises(UsageError, match="64 bits"):
        one.fetch_add(0, 1 << 64)
    sides.register(memoryview(bytearray(65))[1:], "crooked")
    with pytest.raises(UsageError, match="multiple of 8"):
        sides.peer.open("crooked").fetch_add(0, 1)


def test_cells_are_changed_one_after_the_other(sides: Sides) -> None:
    region = sides.register(np.zeros(1, np.int64))
    remote = sides.peer.open("kv")

    def swap() -> None:
        for _ in range(30):
            old = remote.fetch_add(0, 0)
            while (seen := remote.compare_and_swap(0, old, old + 1)) != old:
                old = seen

    calls = [Call(lambda: [remote.fetch_add(0, 1) for _ in range(100)]) for _ in range(4)]
    swaps = [Call(swap) for _ in range(2)]
    for _ in range(100):
        region.fetch_add(0, 1)
    olds = [old for call in calls for old in call.result()]
    for swapping in swaps:
        swapping.result()
    assert len(set(olds)) == 400, "no two saw the same value"
    assert region.array[0] == 4 * 100 + 2 * 30 + 100


# --- notifications ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [8, 3 << 20])
def test_a_notification_is_seen_after_the_bytes(sides: Sides, nbytes: int) -> None:
    memory = np.zeros(nbytes, np.uint8)
    region = sides.register(memory)
    remote = sides.peer.open("kv")
    for turn in range(1, 6):
        seen = Call(lambda: (region.wait_notification("page", SOON), memory.copy()))
        remote.write(np.full(nbytes, turn, np.uint8), notify="page")
        told, copied = seen.result()
        assert (told.key, told.source) == ("page", sides.back)
        assert (copied == turn).all()


def test_notifications_are_counted_and_keys_are_apart(near: Sides) -> None:
    region = near.owner.memory.register("keys", bytearray(16))
    remote = near.peer.open("keys")
    for key in ("7", 7, "7", -7, "é"):
        remote.write_batch([(b"x", 0)], notify=key)
    for key in ("7", "7", 7, -7, "é"):
        assert region.wait_notification(key, 0.0).key == key
    for key in ("7", 7):
        with pytest.raises(DeadlineError, match="wait for notification"):
            region.wait_notification(key, 0.01)
    waiting = region.wait_notification("later", SOON, async_op=True)
    given_up = region.wait_notification("later", SOON, async_op=True)
    assert given_up.cancel()
    remote.write(b"y", notify="later")
    assert waiting.result(SOON).key == "later"
    with pytest.raises(UsageError):
        remote.write(b"y", notify=1.5)  # type: ignore[arg-type]  # what a caller might do
    still = Call(region.wait_notification, "never", SOON)
    region.unregister()
    with pytest.raises(StaleRegion):
        still.result()


def test_notifications_that_nobody_takes_are_bounded(near: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_NOTICES > 1000
    monkeypatch.setattr("rankmesh.memory.region.MAX_NOTICES", 3)
    memory = bytearray(8)
    region = near.owner.memory.register("notices", memory)
    remote = near.peer.open("notices")
    for _ in range(3):
        remote.write(b"a", notify="key")
    with pytest.raises(BusyError, match=r"nobody takes them\. Go on when some of them have been taken"):
        remote.write(b"b", notify="key")
    assert memory[0] == ord("a"), "refused before a byte was written"
    region.wait_notification("key", SOON)
    remote.write(b"c", notify="key")
    region.unregister()


@pytest.mark.parametrize("each", [64, 3_000, 30_000, 600_000])
@pytest.mark.parametrize("shape", ["flat", "rows", "every other"])
def test_batches_of_bytes_of_any_shape(sides: Sides, shape: str, each: int) -> None:
    """Flat arrays of bytes are handed on as they are, and received into; others are not taken for such."""
    count = min((600_000 if shape == "every other" else 3_000_000) // each, 2_000)
    region = sides.register(blank(count * each))
    data = np.arange(count * each, dtype=np.uint32).astype(np.uint8).reshape(count, each)

    def shaped(array: np.ndarray[Any, np.dtype[np.uint8]]) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
        if shape == "every other":
            return [np.repeat(row, 2)[::2] for row in array]
        return [row.copy() if shape == "flat" else row.reshape(4, -1).copy() for row in array]

    remote = sides.peer.open("kv")
    remote.write_batch([(row, each * at) for at, row in enumerate(shaped(data))])
    assert (region.array == data.reshape(-1)).all()
    into = shaped(np.zeros_like(data))
    remote.read_batch([(row, each * at) for at, row in enumerate(into)])
    assert all((mine.reshape(-1) == theirs).all() for mine, theirs in zip(into, data, strict=True))


@pytest.mark.parametrize("wrong", [0, 499, 999])
def test_a_batch_is_not_read_into_what_is_read_only(sides: Sides, wrong: int) -> None:
    memory = pattern(1000 * 2048)
    sides.register(memory)
    remote = sides.peer.open("kv")
    outs = [blank(2048) for _ in range(1000)]
    outs[wrong].flags.writeable = False
    with pytest.raises(UsageError, match="read-only"):
        remote.read_batch([(out, 2048 * at) for at, out in enumerate(outs)])
    assert (remote.read(blank(2048), 2048) == memory[2048:4096]).all(), "the connection goes on"
    assert all(map(is_blank, outs))
