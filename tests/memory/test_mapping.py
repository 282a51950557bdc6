"""Same host: allocated regions are mapped, and nobody copies to or from one that was taken back."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from forked import Child
from peers import BRIEFLY, SOON, Call, Medium, blank, pattern, router_of
from rankmesh import AccessDenied, BusyError, ClosedError, DeadlineError, OutOfBounds, PeerLost, StaleRegion, UsageError
from rankmesh.buffers import MID_PAGE, PAGE
from rankmesh.memory import mapping as mapping_file
from rankmesh.memory.mapping import PIECE_BYTES, Mapping, SharedMemory
from rankmesh.memory.operations import Query
from rankmesh.memory.remote import RemoteRegion
from regions import Sides, Uses, open_sides
from timing import wait_until

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="rings are polled on x86 only")


@pytest.fixture
def near(same_host: Medium) -> Iterator[Sides]:
    with open_sides(same_host) as both:
        yield both


def mapping_of(remote: RemoteRegion) -> Mapping:
    assert isinstance(remote._permit, Mapping)
    return remote._permit


def frames(sides: Sides) -> int:
    return sides.peer.stats()["frames_sent"]  # type: ignore[no-any-return]  # stats are Any


def test_bytes_begin_in_mid_page(near: Sides) -> None:
    """See MID_PAGE."""
    region = near.owner.memory.allocate("kv", 5000, np.uint8)
    mapping = mapping_of(near.peer.open("kv"))
    for array in (region.array, np.frombuffer(mapping.view(0, 5000), np.uint8)):
        assert array.ctypes.data % PAGE == MID_PAGE


def test_reads_and_writes_are_copies(near: Sides) -> None:
    region = near.owner.memory.allocate("kv", (1000, 5000), np.float32)
    assert not region.array.any()
    remote = near.peer.open("kv")
    assert (remote.mapped, remote.info.mappable, remote.shape) == (True, True, (1000, 5000))
    region.array[:] = np.arange(region.array.size).reshape(region.shape)
    before = frames(near)
    out = np.empty_like(region.array)
    remote.read(out)
    assert (out == region.array).all()
    remote.write(np.float32(-1), 400)
    assert region.array[0, 100] == -1
    assert (remote[3:7, ::2] == region.array[3:7, ::2]).all()
    remote[5] = 9
    assert (region.array[5] == 9).all()
    block = np.full((10, 8), 3, np.float32)[:, ::2]
    remote.write(block, 40, stride=20_000)
    assert (region.array[:10, 10:14] == 3).all()
    pieces = [np.empty(7, np.float32) for _ in range(100)]
    remote.read_batch([(piece, 28 * at) for at, piece in enumerate(pieces)])
    assert (np.concatenate(pieces) == region.array.reshape(-1)[:700]).all()
    work = remote.read(out, async_op=True)
    assert work.done()
    assert work.result() is out
    assert frames(near) == before, "not a frame was sent"
    attempts: Uses = (lambda: remote.read(out, 4), lambda: remote.write(out, -4), lambda: remote.read_batch([(out, 4)]))
    for use in attempts:
        with pytest.raises(OutOfBounds):
            use()


def test_cells_and_notifications_go_to_the_owner(near: Sides) -> None:
    region = near.owner.memory.allocate("kv", 4, np.int64)
    remote = near.peer.open("kv")
    assert [remote.fetch_add(8, 2), remote.compare_and_swap(8, 2, 5), region.fetch_add(8, 1)] == [0, 2, 5]
    seen = Call(lambda: (region.wait_notification(1, SOON).source, region.array.tolist()))
    remote.write(np.arange(4), notify=1)
    assert seen.result() == (near.back, [0, 1, 2, 3])
    work = remote.write(np.arange(4), notify=1, async_op=True)
    work.wait(SOON)


def test_access(near: Sides) -> None:
    readable = near.owner.memory.allocate("r", 100, access="r")
    remote = near.peer.open("r")
    assert remote.mapped
    readable.array[:] = 5
    out = blank(100)
    remote.read(out)
    assert (out == 5).all()
    with pytest.raises(AccessDenied):
        remote.write(b"x")
    with pytest.raises(TypeError):  # the memory itself is mapped read-only
        mapping_of(remote).view(0, 1)[0] = 1
    assert readable.shared is not None
    with pytest.raises(PermissionError):  # and nobody who has its descriptor can map it otherwise
        mmap.mmap(readable.shared.fd, 4096)
    near.owner.memory.allocate("w", 100, access="w")
    writer = near.peer.open("w")
    assert not writer.mapped
    writer.write(b"x")
    with pytest.raises(AccessDenied):
        writer.read(out)


def test_nobody_maps_what_is_not_allowed(near: Sides) -> None:
    region = near.owner.memory.allocate("kv", 100, allow=[])
    with pytest.raises(AccessDenied):
        near.peer.open("kv")
    polled = router_of(near.peer).polled
    assert polled is not None
    assert polled.shared == {}
    region.allow(None)
    remote = near.peer.open("kv")
    remote.write(b"x")
    region.allow([])
    attempts: Uses = (lambda: remote.write(b"y"), lambda: remote.read(bytearray(1)))
    for use in attempts:
        with pytest.raises(AccessDenied, match="forbidden"):
            use()
    assert bytes(region.array[:1]) == b"x"
    region.allow([near.back])
    remote.write(b"z")
    assert near.peer.open("kv").read(bytearray(1)) == b"z"


def test_a_stale_mapping_is_not_used(near: Sides) -> None:
    region = near.owner.memory.allocate("kv", 100)
    memory = region.array
    remote = near.peer.open("kv")
    region.unregister()
    near.owner.memory.allocate("kv", 100)
    attempts: Uses = (lambda: remote.read(bytearray(1)), lambda: remote.write(b"x"), lambda: remote[0:1])
    for use in attempts:
        with pytest.raises(StaleRegion):
            use()
    assert not memory.any()
    again = near.peer.open("kv")
    again.write(b"x")
    assert near.owner.memory.regions["kv"].array[0] == ord("x")


def test_unregister_waits_for_a_writer(near: Sides) -> None:
    """A writer is held up between its look at the permit and its copy."""
    region = near.owner.memory.allocate("kv", 2 * PIECE_BYTES)
    memory = region.array
    remote = near.peer.open("kv")
    mapping = mapping_of(remote)
    source = iter([memoryview(b"1" * PIECE_BYTES), memoryview(b"2" * PIECE_BYTES)])
    unregister: list[Call[None]] = []

    def parts() -> Iterator[memoryview]:
        yield next(source)
        with pytest.raises(DeadlineError):
            region.unregister(timeout=BRIEFLY)
        unregister.append(Call(region.unregister, timeout=SOON))
        assert unregister[0].running
        yield next(source)

    with pytest.raises(StaleRegion):
        mapping.write(parts(), [mapping.view(0, 2 * PIECE_BYTES)], 1e18)
    unregister[0].result()
    assert (memory[:PIECE_BYTES] == ord("1")).all()


def test_a_read_that_was_overtaken_is_no_read(near: Sides) -> None:
    region = near.owner.memory.allocate("kv", 8)
    mapping = mapping_of(near.peer.open("kv"))

    def parts() -> Iterator[memoryview]:
        region.unregister(timeout=SOON)
        yield memoryview(bytearray(8))

    with pytest.raises(StaleRegion):
        mapping.read(parts(), [mapping.view(0, 8)], 1e18)


def test_a_copy_without_an_owner_says_that_it_is_lost(same_host: Medium, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its permit goes with the connection, but that is not what is wrong."""
    with open_sides(same_host) as sides:
        sides.owner.memory.allocate("kv", 8)
        remote = sides.peer.open("kv")
        genuine = Mapping.read

        def read(mapping: Mapping, *args: Any) -> None:
            sides.owner.abort()
            wait_until(lambda: bool(router_of(sides.peer).gone), 10)
            genuine(mapping, *args)

        monkeypatch.setattr(Mapping, "read", read)
        with pytest.raises(PeerLost, match="during copy of region 'kv' of it"):
            remote.read(blank(8))


def test_handles_share_a_mapping_and_give_it_back(near: Sides) -> None:
    region = near.owner.memory.allocate("kv", 8)
    first, second = near.peer.open("kv"), near.peer.open("kv")
    assert first._permit is second._permit
    assert region.shared is not None
    first.close()
    assert not first.mapped
    first.write(b"x")
    assert second.mapped
    assert region.shared.mapped_by(router_of(near.back))
    with second:
        pass
    wait_until(lambda: region.shared is not None and not region.shared.mapped_by(router_of(near.back)), 10)
    third = near.peer.open("kv")
    assert third.mapped
    third.write(b"z")
    assert bytes(region.array[:1]) == b"z"


def test_a_handle_closed_in_the_middle_of_a_write(near: Sides) -> None:
    """Its words stay its own until the write is over: they are what `unregister` waits for."""
    region = near.owner.memory.allocate("kv", 2 * PIECE_BYTES)
    remote = near.peer.open("kv")
    mapping = mapping_of(remote)

    def parts() -> Iterator[memoryview]:
        yield memoryview(b"1" * PIECE_BYTES)
        remote.close()
        remote.read(bytearray(8))  # the owner has heard of it
        with pytest.raises(DeadlineError):
            region.unregister(timeout=BRIEFLY)
        yield memoryview(b"2" * PIECE_BYTES)

    with pytest.raises(StaleRegion):
        mapping.write(parts(), [mapping.view(0, 2 * PIECE_BYTES)], 1e18)
    region.unregister(timeout=SOON)


def test_a_handle_closed_while_another_is_opened(near: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer names the words of the mapping that is closed meanwhile."""
    region = near.owner.memory.allocate("kv", 8)
    first = near.peer.open("kv")
    complete = Query.complete

    def then_close(query: Query) -> Any:
        answer = complete(query)
        first.close()
        return answer

    monkeypatch.setattr(Query, "complete", then_close)
    second = near.peer.open("kv")
    assert not first.mapped
    assert second.mapped
    second.write(b"x")
    assert bytes(region.array[:1]) == b"x"
    second.close()
    wait_until(lambda: region.shared is not None and not region.shared.mapped_by(router_of(near.back)), 10)


def test_mappings_of_regions_that_are_gone_are_let_go(near: Sides) -> None:
    handles = []
    for name in ("a", "b", "c"):
        region = near.owner.memory.allocate(name, 8)
        handles.append(near.peer.open(name))
        region.unregister(timeout=SOON)
    (flow,) = near.user.memory._flows.values()
    assert [mapping._name for mapping in flow._mappings.values()] == ["c"], "those before it went when it was opened"
    for handle in handles:
        with pytest.raises(StaleRegion):
            handle.write(b"x")


@pytest.mark.parametrize("kept", [True, False], ids=["handle kept", "handle dropped"])
def test_the_memory_of_an_unregistered_region_is_freed(near: Sides, kept: bool) -> None:
    """It stayed mapped at its users, all of it, until they opened another region of this owner."""
    region = near.owner.memory.allocate("kv", 1 << 20)
    remote: RemoteRegion | None = near.peer.open("kv")
    assert remote is not None
    mapped = weakref.ref(mapping_of(remote)._data.obj)
    near.owner.memory._server._tell_gone(region)  # a word that is not true changes nothing
    near.user.memory.list(near.peer)
    remote.write(b"x")
    assert remote.mapped
    if not kept:
        remote = None
    assert mapped() is not None
    region.unregister(timeout=SOON)
    wait_until(lambda: mapped() is None, 10, "the end of the mapping")
    (flow,) = near.user.memory._flows.values()
    assert not flow.needed
    if remote is not None:
        with pytest.raises(StaleRegion):
            remote.read(bytearray(8))


def test_a_mapping_that_is_let_go_in_the_middle_of_a_batch(near: Sides) -> None:
    near.owner.memory.allocate("kv", 64)
    mapping = mapping_of(near.peer.open("kv"))

    def parts() -> Iterator[memoryview]:
        mapping.close()
        yield memoryview(bytearray(8))

    with pytest.raises(StaleRegion):
        mapping.read(parts(), mapping.views([(0, 4, 8, 2)]), 1e18)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("where", ["same_host", "tcp", "inproc"])
def test_numpy_offsets_do_not_overflow(where: str, request: pytest.FixtureRequest) -> None:
    """Neither where they lie beyond the region nor within, where the end of what is moved is beyond their type: the
    bytes went nowhere."""
    with open_sides(request.getfixturevalue(where)) as sides:
        memory = sides.owner.memory.allocate("kv", 1000).array
        remote = sides.peer.open("kv")
        offsets: tuple[Any, ...] = (np.int64(2**63 - 1), np.uint64(2**64 - 1), np.int64(993))
        for offset in offsets:
            with pytest.raises(OutOfBounds):
                remote.read(bytearray(8), offset)
            with pytest.raises(OutOfBounds):
                remote.write(bytes(8), offset)
        high: Any = np.int8(120)
        wide: Any = np.uint8(250)
        memory[120:320] = pattern(200)
        out = blank(200)
        assert (remote.read(out, high) == pattern(200)).all()
        rows = blank(400).reshape(4, 100)
        remote.read(rows, high, stride=high)
        assert all((row == memory[120 * at :][:100]).all() for at, row in enumerate(rows, 1))
        remote.write(pattern(200, 1), high)
        assert (memory[120:320] == pattern(200, 1)).all()
        assert not memory[320:].any()
        remote.write(np.full((4, 100), 7, np.uint8), high, stride=wide - 50)
        assert [memory[at : at + 100].tolist() for at in (120, 320, 520, 720)] == [[7] * 100] * 4
        assert np.count_nonzero(memory == 7) < 410
        remote.write_batch([(bytes(200), high), (np.full((3, 50), 9, np.uint8), wide, high)])
        assert [memory[at : at + 50].tolist() for at in (250, 370, 490)] == [[9] * 50] * 3
        remote.read_batch([(out, high), (rows, high, high)])
        assert (out == memory[120:320]).all()
        assert (rows[3] == memory[480:580]).all()


def test_a_forked_child_copies_nothing(near: Sides) -> None:
    """Its copy of the handle would write under the parent's words."""
    region = near.owner.memory.allocate("kv", 8)
    remote = near.peer.open("kv")

    def child() -> None:
        attempts: Uses = (lambda: remote.read(bytearray(1)), lambda: remote.write(b"y"))
        for use in attempts:
            with pytest.raises(ClosedError, match="fork"):
                use()

    with Child(child):
        pass
    remote.write(b"x")
    assert bytes(region.array[:1]) == b"x"


def test_a_dead_writer_holds_up_nobody_and_a_lost_one_is_waited_for(
    same_host: Medium, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who was lost because it was stopped goes on in the middle of a piece: its word was taken down, `unregister`
    returned, and megabytes of what was the owner's alone by then were overwritten."""
    with open_sides(same_host) as sides:
        region = sides.owner.memory.allocate("kv", 8)
        mapping = mapping_of(sides.peer.open("kv"))
        mapping._words[mapping._slot] = 1  # in the middle of a write
        with pytest.raises(DeadlineError, match="Unregister it again with abort=True"):
            region.unregister(timeout=BRIEFLY)
        with pytest.raises(DeadlineError, match="middle of writing there: end it or let it go on, and unregister"):
            region.unregister(timeout=BRIEFLY, abort=True)
        sides.user.abort()
        with pytest.raises(DeadlineError):
            region.unregister(abort=True, timeout=BRIEFLY)
        monkeypatch.setattr(mapping_file, "gone", lambda process: process == os.getpid())
        region.unregister(timeout=SOON)
        with pytest.raises(StaleRegion):
            mapping.write([memoryview(b"x")], [mapping.view(0, 1)], 1e18)


def test_words_of_a_lost_peer_are_given_to_nobody_else_while_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    class Router:
        polled = SimpleNamespace(process=1234)

        def __init__(self, index: int) -> None:
            self.index = index

    dead: set[int] = set()
    monkeypatch.setattr(mapping_file, "gone", dead.__contains__)
    shared = SharedMemory(10, 77, writable=True)
    routers = [Router(index) for index in range(300)]
    slots = [shared.slot(router) for router in routers]  # type: ignore[arg-type]  # only this matters of a router
    given = [slot for slot in slots if slot]
    assert len(set(given)) == len(given) == 255
    shared.lost(routers[0])  # type: ignore[arg-type]
    assert shared.slot(routers[299]) == 0  # type: ignore[arg-type]
    shared.closed_by(routers[1])  # type: ignore[arg-type]
    assert shared.slot(routers[299]) == slots[1]  # type: ignore[arg-type]
    assert shared.slot(routers[298]) == 0  # type: ignore[arg-type]
    dead.add(1234)
    assert shared.slot(routers[298]) == slots[0]  # type: ignore[arg-type]
    shared.close()


def test_over_sockets_nothing_is_mapped(tcp: Medium) -> None:
    with open_sides(tcp) as sides:
        region = sides.owner.memory.allocate("kv", 1 << 20)
        remote = sides.peer.open("kv")
        assert (remote.mapped, remote.info.mappable) == (False, True)
        remote.write(pattern(1 << 20))
        assert (region.array == pattern(1 << 20)).all()


NOTHING_TO_ALLOCATE: list[tuple[Any, Any, str]] = [
    (0, np.uint8, "has 0 bytes"),
    ((3, 0), np.uint8, "has 0 bytes"),
    (4, "V0", "has 0 bytes"),
    (4, object, "are references to memory of this process"),
    (4, np.dtypes.StringDType(), "are references to memory of this process"),
    (4, np.dtype((np.int32, (2,))), "Pass int32 as dtype=, and the whole shape as shape="),
    (4, "nonsense", "is one of numpy's, and not 'nonsense'"),
    (4, torch.bfloat16, "is one of numpy's, and not torch.bfloat16"),
    (2.5, np.uint8, r"a whole number or several, and not 2\.5"),
    ((2, 2.5), np.uint8, "a whole number or several"),
    (None, np.uint8, "a whole number or several, and not None"),
    ("ab", np.uint8, "a whole number or several"),
    (-5, np.uint8, "negative extent"),
    ((-1, -1), np.uint8, "negative extent"),
    ((1 << 40, 1 << 40), np.uint8, "no more than there are"),
]


@pytest.mark.parametrize("shape, dtype, message", NOTHING_TO_ALLOCATE)
def test_what_cannot_be_allocated(near: Sides, shape: Any, dtype: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        near.owner.memory.allocate("x", shape, dtype)
    assert near.owner.memory.regions == {}


def test_an_allocated_region_needs_an_access(near: Sides) -> None:
    with pytest.raises(UsageError, match="access= is"):
        near.owner.memory.allocate("x", 8, access="q")


@pytest.mark.parametrize("shape", [np.int8(100), np.array([2, 50]), (np.int8(20), np.int8(20)), range(2, 4), ()])
def test_shapes_of_numpys_numbers_do_not_overflow(near: Sides, shape: Any) -> None:
    """2 ** 17 by 2 ** 17 of int32 were no bytes."""
    region = near.owner.memory.allocate("kv", shape)
    assert region.shape == region.array.shape == np.empty(shape, np.uint8).shape
    assert near.peer.open("kv").nbytes == np.empty(shape, np.uint8).nbytes
    with pytest.raises(UsageError, match="has 36893488147419103232 bytes"):
        near.owner.memory.allocate("x", (np.int64(1 << 33), np.int64(1 << 32)))


def test_a_mapping_copies_what_numpy_says() -> None:
    shared = SharedMemory(1000, 5, writable=True)

    class Router:
        index, polled = 1, None

    slot = shared.slot(Router())  # type: ignore[arg-type]  # only the index matters
    memory = memoryview(mmap.mmap(shared.fd, shared.nbytes))
    mapping = Mapping(memory, slot, "kv", 1000, 5)
    data = pattern(300)
    mapping.write(
        [data.data[:7], data.data[7:100], memoryview(b""), data.data[100:]],
        mapping.views([(0, 50, 0, 1), (100, 10, 20, 20), (900, 50, 0, 1)]),
        1e18,
    )
    expected = np.zeros(1000, np.uint8)
    expected[:50], expected[900:950] = data[:50], data[250:]
    for at in range(20):
        expected[100 + 20 * at : 110 + 20 * at] = data[50 + 10 * at : 60 + 10 * at]
    assert (np.frombuffer(shared.data, np.uint8) == expected).all()
    shared.close()


@pytest.mark.parametrize("key", [1.5, "k" * 300, b"bytes"], ids=["float", "long", "bytes"])
@pytest.mark.parametrize("mapped", [True, False])
def test_a_wrong_key_is_found_before_a_byte_is_written(near: Sides, mapped: bool, key: Any) -> None:
    memory = near.owner.memory
    region = memory.allocate("kv", 1 << 17) if mapped else near.register(blank(1 << 17) * 0)
    remote = near.peer.open("kv")
    assert remote.mapped == mapped
    block = np.ones((4, 100), np.uint8)
    attempts: Uses = (
        lambda: remote.write(block, notify=key),
        lambda: remote.write(block, notify=key, async_op=True),
        lambda: remote.write(block, stride=200, notify=key),
        lambda: remote.write_batch([(block, 0)], notify=key),
    )
    for use in attempts:
        with pytest.raises(UsageError, match="key"):
            use()
    assert not region.array.any()


@pytest.mark.parametrize("mapped", [True, False])
def test_bytes_are_there_although_nobody_can_be_notified(
    near: Sides, mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `write` says: this side writes them itself, and only then asks."""
    monkeypatch.setattr("rankmesh.memory.region.MAX_NOTICES", 1)
    region = near.owner.memory.allocate("kv", 1 << 17) if mapped else near.register(blank(1 << 17))
    remote = near.peer.open("kv")
    remote.write(blank(100), notify="key")
    with pytest.raises(BusyError, match=r"refuses to write region 'kv'.* Go on when some of them have been taken"):
        remote.write(pattern(100), notify="key")
    assert (region.array[:100] == pattern(100)).all()


def test_notifications_have_numpys_numbers_as_keys(near: Sides) -> None:
    region = near.owner.memory.allocate("kv", 8)
    key: Any = np.int64(3)
    near.peer.open("kv").write(b"x", notify=key)
    assert region.wait_notification(3, SOON).key == 3
    near.peer.open("kv").write(b"x", notify=3)
    assert region.wait_notification(key, SOON).key == 3


def test_what_goes_wrong_with_a_copy_is_its_works_error(near: Sides) -> None:
    """Whoever begins many at once does not want to be interrupted by one of them."""
    region = near.owner.memory.allocate("kv", 64)
    remote = near.peer.open("kv")
    region.unregister()
    begun = (
        remote.read(bytearray(8), async_op=True),
        remote.write(b"x", async_op=True),
        remote.write(b"x", notify="key", async_op=True),
        remote.read_batch([(bytearray(8), 0)], async_op=True),
        remote.write_batch([(b"x", 0)], async_op=True),
    )
    for work in begun:
        assert work.done()
        assert isinstance(work.error, StaleRegion)
        with pytest.raises(StaleRegion):
            work.result()


def test_a_copy_ends_in_time(near: Sides) -> None:
    """Between two pieces, that is: what is smaller than one is copied in any case."""
    memory = near.owner.memory.allocate("kv", 2 * PIECE_BYTES + 1).array
    remote = near.peer.open("kv")
    data, out = np.ones(2 * PIECE_BYTES + 1, np.uint8), np.ones(2 * PIECE_BYTES + 1, np.uint8)
    attempts: Uses = (lambda: remote.read(out, timeout=0.0), lambda: remote.write(data, timeout=0.0))
    for use in attempts:
        with pytest.raises(DeadlineError, match="copy of region 'kv' did not end in time"):
            use()
    assert memory[-1] == 0
    assert out[-1] == 1
    remote.write(data[:100], 1000, timeout=0.0)
    assert (remote.read(np.zeros(100, np.uint8), 1000, timeout=0.0) == 1).all()
