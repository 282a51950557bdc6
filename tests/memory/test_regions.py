"""Registering, finding, describing, allowing and taking back regions."""

from __future__ import annotations

import itertools
import mmap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peers import BRIEFLY, FAULTY, SOON, Call, Medium, pattern, router_of
from rankmesh import (
    AccessDenied,
    BusyError,
    ClosedError,
    DeadlineError,
    Endpoint,
    OutOfBounds,
    PeerLost,
    RegionNotFound,
    RegionWatch,
    StaleRegion,
    UsageError,
)
from rankmesh.config import MIB
from rankmesh.memory import finding, watching
from rankmesh.testing.faults import FaultTransport
from rankmesh.testing.world import run_world
from regions import Sides, Uses, open_sides
from timing import scaled, wait_until


@pytest.fixture
def near(inproc: Medium) -> Iterator[Sides]:
    with open_sides(inproc) as both:
        yield both


class Tensor:
    """What torch's CPU tensors offer, as far as it is used: DLPack, and no buffer."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


# --- what can be registered -------------------------------------------------------------------------------------------


def test_dtype_and_shape_travel(near: Sides) -> None:
    region = near.register(np.arange(24, dtype=">i4").reshape(2, 3, 4), access="r")
    remote = near.peer.open("kv")
    assert (remote.name, remote.nbytes, remote.dtype, remote.shape) == ("kv", 96, np.dtype(">i4"), (2, 3, 4))
    assert (remote.access, remote.generation, remote.mapped) == ("r", region.generation, False)
    assert remote.info == near.peer.regions()[0]


def test_every_kind_of_buffer(near: Sides) -> None:
    content = pattern(4096)
    mapped = mmap.mmap(-1, 4096)
    mapped[:] = content.tobytes()
    buffers = {
        "array": content.copy(),
        "bytearray": bytearray(content),
        "memoryview": memoryview(bytearray(content)),
        "mmap": mapped,
        "tensor": Tensor(content.copy()),
        "structured": content.copy().view([("a", "<u4"), ("b", "<f4", 3)]),
        "float64": content.copy().view(np.float64).reshape(8, 64),
    }
    for name, buffer in buffers.items():
        region = near.owner.memory.register(name, buffer)
        remote = near.peer.open(name)
        out = np.empty(4096, np.uint8)
        remote.read(out)
        assert (out == content).all(), name
        remote.write(b"\xff" * 8, 16)
        assert region.array.reshape(-1).view(np.uint8)[16:24].tolist() == [255] * 8, name
        region.unregister()
    mapped.close()  # nothing refers to it any more


@pytest.mark.parametrize("where", ["same_host", "tcp", "inproc"])
def test_a_file_is_read_and_written_through_its_mapping(
    where: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    path, content = tmp_path / "weights", pattern(1 << 20)
    path.write_bytes(content.tobytes())
    with (
        open_sides(request.getfixturevalue(where)) as sides,
        path.open("r+b") as file,
        mmap.mmap(file.fileno(), 0) as shared,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as fixed,
    ):
        sides.register(shared)
        sides.register(fixed, "fixed", access="r")
        with pytest.raises(UsageError, match='access="r"'):
            sides.register(fixed, "refused")
        remote, same = sides.peer.open("kv"), sides.peer.open("fixed")
        for nbytes in (100, 4096, 700_000):
            assert (remote.read(np.empty(nbytes, np.uint8), 5000) == content[5000 : 5000 + nbytes]).all()
            content[3000 : 3000 + nbytes] = pattern(nbytes, nbytes)
            remote.write(pattern(nbytes, nbytes), 3000)
            assert (same.read(np.empty(nbytes, np.uint8), 3000) == pattern(nbytes, nbytes)).all()
        with pytest.raises(AccessDenied):
            same.write(b"x")
        sides.owner.memory.unregister("kv", timeout=SOON)
        sides.owner.memory.unregister("fixed", timeout=SOON)
        shared.flush()
        assert path.read_bytes() == content.tobytes()


def test_a_region_keeps_its_buffer_alive(near: Sides) -> None:
    near.register(pattern(1 << 20))
    out = np.empty(1 << 20, np.uint8)
    near.peer.open("kv").read(out)
    assert (out == pattern(1 << 20)).all()


@pytest.mark.parametrize(
    "name, buffer, options, message",
    [
        ("", bytearray(8), {}, "not empty"),
        ("n" * 300, bytearray(8), {}, "at most 255"),
        ("taken", bytearray(8), {}, "already"),
        ("x", b"read-only", {}, 'is read-only, .* Register it with access="r"'),
        ("x", bytearray(8), {"access": "x"}, "access= is"),
        ("x", bytearray(), {}, "no bytes"),
        ("x", np.zeros((4, 4))[:, ::2], {}, "not contiguous. Register the whole"),
        ("x", np.array([object()]), {}, "Python objects"),
        ("x", bytearray(8), {"allow": [object()]}, "allow= names"),
    ],
)
def test_what_is_refused(near: Sides, name: str, buffer: Any, options: dict[str, Any], message: str) -> None:
    near.owner.memory.register("taken", bytearray(8))
    with pytest.raises(UsageError, match=message):
        near.owner.memory.register(name, buffer, **options)
    assert list(near.owner.memory.regions) == ["taken"]


def test_read_only_memory_can_be_read(near: Sides) -> None:
    near.owner.memory.register("kv", b"constant", "r")
    out = bytearray(8)
    assert near.peer.open("kv").read(out) is out
    assert out == b"constant"


# --- access -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("access, reads, writes", [("r", True, False), ("w", False, True), ("rw", True, True)])
@pytest.mark.parametrize("nbytes", [16, 1 << 20])
def test_access_is_checked(sides: Sides, access: str, reads: bool, writes: bool, nbytes: int) -> None:
    memory = pattern(nbytes)
    region = sides.register(memory, access=access)
    remote = sides.peer.open("kv")
    before = memory.copy()
    if reads:
        remote.read(np.empty(nbytes, np.uint8))
    else:
        with pytest.raises(AccessDenied, match="registered with access 'w'") as caught:
            remote.read(np.empty(nbytes, np.uint8))
        assert caught.value.region == "kv"
    if writes:
        remote.write(pattern(nbytes, 1))
        assert (memory == pattern(nbytes, 1)).all()
    else:
        with pytest.raises(AccessDenied):
            remote.write(pattern(nbytes, 1))
        with pytest.raises(AccessDenied):
            remote.fetch_add(0, 1)
        assert (memory == before).all()
    assert region.moving == set()


def test_allow_list(near: Sides) -> None:
    with Endpoint("inproc://", name="other") as other:
        stranger = other.connect(near.owner.address, timeout=SOON)
        near.register(bytearray(8), "by peer", allow=[near.back])
        near.register(bytearray(8), "by name", allow=["user"])
        near.register(bytearray(8), "nobody", allow=[])
        open_to_all = near.register(bytearray(8), "all")
        for name in ("by peer", "by name"):
            near.peer.open(name).read(bytearray(8))
            with pytest.raises(AccessDenied, match="does not allow it to this peer"):
                stranger.open(name)
        with pytest.raises(AccessDenied):
            near.peer.open("nobody")
        assert [info.name for info in stranger.regions()] == ["all"]
        assert [info.name for info in near.peer.regions()] == ["by peer", "by name", "all"]
        handle = stranger.open("all")
        open_to_all.allow(["user"])
        attempts: Uses = (lambda: handle.read(bytearray(8)), lambda: handle.write(b"x"), lambda: handle.fetch_add(0, 1))
        for use in attempts:
            with pytest.raises(AccessDenied):
                use()
        near.peer.open("all").write(b"allowed!")
        assert bytes(open_to_all.array) == b"allowed!"


# --- finding them -----------------------------------------------------------------------------------------------------


def test_an_unknown_name_is_told_with_those_like_it(sides: Sides) -> None:
    sides.register(bytearray(8), "kv-pages")
    with pytest.raises(RegionNotFound, match="no region 'kv-page'") as caught:
        sides.peer.open("kv-page")
    assert (caught.value.region, caught.value.nearest) == ("kv-page", ("kv-pages",))
    assert isinstance(caught.value, LookupError)


def test_names_that_are_not_allowed_are_not_told(near: Sides) -> None:
    near.register(bytearray(8), "kv-pages", allow=["somebody else"])
    near.register(bytearray(8), "kv-paged")
    with pytest.raises(RegionNotFound) as caught:
        near.peer.open("kv-page")
    assert caught.value.nearest == ("kv-paged",)
    assert "kv-pages" not in str(caught.value)


def test_a_region_registered_after_connecting_is_found(sides: Sides) -> None:
    with pytest.raises(RegionNotFound):
        sides.peer.open("kv")
    sides.register(bytearray(b"late"))
    out = bytearray(4)
    sides.peer.open("kv").read(out)
    assert out == b"late"


def test_open_waits_until_it_appears(sides: Sides) -> None:
    waiting = Call(sides.peer.open, "kv", wait=True, timeout=SOON)
    with pytest.raises(DeadlineError):
        sides.peer.open("another", wait=True, timeout=BRIEFLY)
    assert waiting.running
    sides.register(bytearray(b"here"))
    out = bytearray(4)
    waiting.result().read(out)
    assert out == b"here"


def test_who_waits_for_a_region_and_is_not_allowed_is_refused(near: Sides) -> None:
    waiting = Call(near.peer.open, "kv", wait=True, timeout=SOON)
    wait_until(lambda: "kv" in near.owner.memory._server._awaited, 10)
    near.register(bytearray(8), allow=["somebody else"])
    with pytest.raises(AccessDenied, match="does not allow it to this peer"):
        waiting.result()


def test_who_waits_no_longer_is_forgotten(sides: Sides) -> None:
    for _ in range(3):
        with pytest.raises(DeadlineError):
            sides.peer.open("kv", wait=True, timeout=BRIEFLY)
    wait_until(lambda: not sides.owner.memory._server._awaited, 10, "the owner learns that nobody waits")
    sides.register(bytearray(8))
    assert sides.peer.open("kv").nbytes == 8


def test_open_that_waits_fails_when_the_owner_closes(inproc: Medium) -> None:
    with open_sides(inproc) as sides:
        waiting = Call(sides.peer.open, "kv", wait=True, timeout=SOON)
        sides.peer.regions()
        sides.owner.abort()
        with pytest.raises(PeerLost):
            waiting.result()


def test_watch(sides: Sides) -> None:
    sides.register(bytearray(8), "first")
    with sides.user.memory.watch(sides.peer) as watch:
        event = watch.next(SOON)
        assert (event.kind, event.info.name) == ("added", "first")
        with pytest.raises(DeadlineError):
            watch.next(BRIEFLY)
        waiting = Call(watch.next, SOON)
        region = sides.register(np.zeros(3, np.float32), "second")
        event = waiting.result()
        assert (event.kind, event.info.name, event.info.dtype) == ("added", "second", np.dtype(np.float32))
        region.unregister()
        event = watch.next(SOON)
        assert (event.kind, event.info.name) == ("removed", "second")
    with pytest.raises(ClosedError, match=r"^The watch for regions of .* was closed here\. Watch anew\.$"):
        watch.next(SOON)


def events_of(watch: RegionWatch) -> Iterator[tuple[str, str]]:
    for event in watch:
        yield event.kind, event.info.name


def test_who_watches_sees_what_it_may_open_and_nothing_else(near: Sides) -> None:
    """In the list that comes first, and in what comes and goes."""
    near.register(bytearray(1), "hidden", allow=[])
    near.register(bytearray(1), "mine", allow=[near.back])
    near.register(bytearray(1), "all")
    with near.user.memory.watch(near.peer) as watch:
        events = events_of(watch)
        assert [next(events), next(events)] == [("added", "mine"), ("added", "all")]
        secret = near.register(bytearray(1), "secret", allow=["somebody else"])
        near.register(bytearray(1), "told", allow=["user"])
        secret.unregister()
        near.owner.memory.unregister("hidden")
        near.owner.memory.unregister("told")
        assert [next(events), next(events)] == [("added", "told"), ("removed", "told")]


def test_who_watches_sees_what_becomes_allowed_and_forbidden(near: Sides) -> None:
    """It was told that a region is removed which it had never seen."""
    region = near.register(bytearray(1), allow=[])
    with near.user.memory.watch(near.peer) as watch:
        events = events_of(watch)
        region.allow(None)
        assert next(events) == ("added", "kv")
        region.allow([near.back])
        region.allow(["somebody else"])
        assert next(events) == ("removed", "kv")
        region.unregister()
        region.allow(None)  # nobody can open it any more
        near.register(bytearray(1), "next")
        assert next(events) == ("added", "next")


def test_watch_ends_with_its_owner(inproc: Medium) -> None:
    with open_sides(inproc) as sides:
        watch = sides.user.memory.watch(sides.peer)
        waiting = Call(watch.next, SOON)
        sides.owner.abort()
        with pytest.raises(PeerLost):
            waiting.result()
        with pytest.raises(PeerLost):
            watch.next(SOON)


def test_who_waits_in_vain_learns_that_there_is_no_such_region(near: Sides) -> None:
    """It was told that the owner had not taken part."""
    with pytest.raises(DeadlineError, match=r"has no region 'kv', and registered none within .*Register it") as caught:
        near.peer.open("kv", wait=True, timeout=scaled(0.5))
    assert (caught.value.op, caught.value.timeout) == ("open region 'kv' at", scaled(0.5))


def test_an_owner_that_does_not_answer_has_not_taken_part(faults: FaultTransport) -> None:
    """It did not say that there is no such region."""
    with open_sides(FAULTY) as sides:
        sides.peer.regions()
        answers = next(link for link in faults.links if link.accepted)
        answers.stall()
        with pytest.raises(DeadlineError, match="it has not taken part"):
            sides.peer.open("kv", wait=True, timeout=BRIEFLY)
        answers.resume()


def test_who_asks_a_lost_owner_is_told_what_for(inproc: Medium) -> None:
    with open_sides(inproc) as sides:
        sides.owner.abort()
        wait_until(lambda: bool(router_of(sides.peer).gone), 10)
        with pytest.raises(PeerLost, match=r"during list regions at it.* close this side, or go on") as caught:
            sides.peer.regions()
        assert caught.value.op == "list regions at"
        with pytest.raises(PeerLost, match="during watch regions at it"):
            sides.user.memory.watch(sides.peer)


# --- generations ------------------------------------------------------------------------------------------------------


def uses(nbytes: int) -> list[Any]:
    return [
        lambda remote: remote.read(np.empty(nbytes, np.uint8)),
        lambda remote: remote.write(np.zeros(nbytes, np.uint8)),
        lambda remote: remote.write(np.zeros(nbytes, np.uint8), notify="key"),
        lambda remote: remote.read_batch([(np.empty(nbytes // 2, np.uint8), 0), (bytearray(8), nbytes - 8)]),
        lambda remote: remote.write_batch([(bytes(nbytes // 2), 0), (bytes(8), nbytes - 8)]),
        lambda remote: remote[0:8],
        lambda remote: remote.fetch_add(0, 1),
        lambda remote: remote.compare_and_swap(0, 0, 1),
    ]


@pytest.mark.parametrize("again", [False, True], ids=["unregistered", "registered anew"])
@pytest.mark.parametrize("nbytes", [64, 1 << 20])
def test_a_stale_handle_touches_nothing(sides: Sides, again: bool, nbytes: int) -> None:
    old, new = pattern(nbytes), pattern(nbytes, 1)
    sides.register(old)
    remote = sides.peer.open("kv")
    sides.owner.memory.unregister("kv")
    if again:
        sides.register(new)
    for use in uses(nbytes):
        with pytest.raises(StaleRegion) as caught:
            use(remote)
        assert caught.value.region == "kv"
    assert (old == pattern(nbytes)).all()
    assert (new == pattern(nbytes, 1)).all()
    if again:
        out = np.empty(nbytes, np.uint8)
        sides.peer.open("kv").read(out)
        assert (out == new).all()


def test_generations_of_two_owners_are_far_apart(inproc: Medium) -> None:
    """One that restarts gives no number again, however many regions either had: old handles would reach new regions."""
    begun = []
    for _ in range(8):
        with Endpoint(inproc.address) as owner:
            begun.append(owner.memory.register("kv", bytearray(8)).generation)
    begun.sort()
    assert begun[0] > 1
    assert begun[-1] < 1 << 63
    assert min(later - earlier for earlier, later in itertools.pairwise(begun)) > 1 << 32


def test_a_restarted_owner_makes_handles_stale(tcp: Medium) -> None:
    with Endpoint("tcp://127.0.0.1:0", name="user", config=tcp.config) as user:
        with Endpoint("tcp://127.0.0.1:0", name="owner", config=tcp.config) as first:
            address = first.address
            first.memory.register("kv", bytearray(8))
            remote = user.connect(address, timeout=SOON).open("kv")
            first.abort()
            with pytest.raises(PeerLost):
                remote.read(bytearray(8), timeout=SOON)
        with Endpoint(address, name="owner", config=tcp.config) as second:
            second.memory.register("kv", bytearray(8))
            peer = user.connect(address, timeout=SOON)
            with pytest.raises(StaleRegion, match="has taken its place"):
                remote.write(b"wrong")
            peer.open("kv").write(b"right")
            assert bytes(second.memory.regions["kv"].array) == b"right\0\0\0"


def test_unregister_gives_the_name_and_the_memory_back(near: Sides) -> None:
    region = near.register(bytearray(8))
    region.unregister()
    assert near.owner.memory.regions == {}
    with pytest.raises(StaleRegion):
        _ = region.array
    with pytest.raises(StaleRegion):
        region.fetch_add(0, 1)
    with pytest.raises(UsageError, match="no region 'kv'"):
        near.owner.memory.unregister("kv")
    near.register(bytearray(8))


def test_memory_is_let_go_after_all_kinds_of_use(sides: Sides) -> None:
    """Nothing here refers to it after `unregister`: an mmap that something refers to cannot be closed."""
    memory = mmap.mmap(-1, 4 * MIB)
    region = sides.register(memory)
    remote = sides.peer.open("kv")
    large, small = bytearray(3 * MIB), bytearray(100)
    remote.write(large, 4096)
    remote.read(large, 8192)
    remote.read(small)
    remote.write(small)
    remote.read_batch([(small, at) for at in range(0, 64_000, 100)])
    remote.write_batch([(small, at) for at in range(0, 64_000, 100)], notify="all")
    region.wait_notification("all", SOON)
    remote.fetch_add(8, 1)
    for begin in (remote.write, remote.read):
        work = begin(large, async_op=True)
        work.cancel()
    region.unregister(abort=True, timeout=SOON)
    memory.close()
    large.clear()  # nor can a buffer change its size that something refers to


def test_a_small_read_or_write_of_oneself_is_not_waited_for_in_vain(near: Sides) -> None:
    """The answer came before anybody was there to take it."""
    region = near.register(bytearray(b"abcdefgh"))
    mine, out = near.owner.memory.open(near.owner, "kv"), bytearray(4)
    mine.read(out, offset=2, timeout=SOON)
    assert out == b"cdef"
    mine.write(b"XY", offset=6, timeout=SOON)
    assert region.array.tobytes() == b"abcdefXY"


def test_a_refused_write_to_oneself_leaves_nothing(near: Sides) -> None:
    near.register(bytes(MIB), access="r")
    mine = near.owner.memory.open(near.owner, "kv")
    for _ in range(3):
        with pytest.raises(AccessDenied):
            mine.write(bytes(MIB))
    assert mine._flow.router.arrivals.posted == {}


def test_the_owners_own_cells_are_checked(near: Sides) -> None:
    region = near.register(np.zeros(4, np.int64))
    for offset in (-8, 32, 1 << 70):
        with pytest.raises(OutOfBounds):
            region.fetch_add(offset, 1)
    near.register(bytes(8), "r", access="r")
    with pytest.raises(AccessDenied):
        near.owner.memory.regions["r"].compare_and_swap(0, 0, 1)
    assert not region.array.any()
    with pytest.raises(UsageError, match="another endpoint"):
        near.user.memory.unregister(region)
    near.owner.close()
    with pytest.raises(ClosedError):
        _ = region.array
    with pytest.raises(ClosedError):
        region.fetch_add(0, 1)


def test_keys_that_nobody_waits_for_are_forgotten(near: Sides) -> None:
    region = near.register(bytearray(8))
    remote = near.peer.open("kv")
    for key in range(20):
        with pytest.raises(DeadlineError):
            region.wait_notification(key, 0.001)
        awaited = [region.wait_notification(key, SOON, async_op=True) for _ in range(2)]
        for work in awaited:
            remote.write(b"x", notify=key)
            assert work.result(SOON).key == key
    assert region.waiters == {}
    assert region.notices == {}


def test_a_watcher_that_is_behind_is_told_and_forgotten(near: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "MAX_EVENTS", 2)
    watch = near.user.memory.watch(near.peer)
    for name in "abcd":
        near.register(bytearray(1), name)
    wait_until(lambda: not near.owner.memory._server._watchers, 10, "the end of the watch at its owner")
    assert [watch.next().info.name, watch.next().info.name] == ["a", "b"]
    with pytest.raises(BusyError, match="events"):
        watch.next()


@pytest.mark.parametrize("close", [Endpoint.close, Endpoint.abort])
def test_an_owner_that_closes_takes_its_memory_back(tcp: Medium, close: Callable[[Endpoint], None]) -> None:
    """Also from a write under way, whose bytes will never come."""
    with open_sides(tcp) as sides:
        memory = mmap.mmap(-1, 64 * MIB)
        region = sides.register(memory)
        remote = sides.peer.open("kv")
        works = [remote.write(bytes(64 * MIB), async_op=True), remote.read(bytearray(64 * MIB), async_op=True)]
        wait_until(lambda: region.moving or all(work.done() for work in works), 10)
        close(sides.owner)
        region.unregister(timeout=SOON)
        assert region.idle
        for work in works:
            try:
                work.result(SOON)
            except PeerLost:  # or it was done before
                pass
        memory.close()


def test_a_wrong_name_is_compared_with_some_names_only(near: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "COMPARED", 5)
    for at in range(10):
        near.register(bytearray(1), f"kv{at}")
    with pytest.raises(RegionNotFound) as caught:
        near.peer.open("kv8x")
    assert set(caught.value.nearest) < {f"kv{at}" for at in range(5)}


def test_an_allow_list_is_no_text(near: Sides) -> None:
    with pytest.raises(UsageError, match=r"\['user'\]"):
        near.register(bytearray(1), allow="user")
    assert near.owner.memory.regions == {}


def test_one_of_two_that_register_a_name_at_once(near: Sides) -> None:
    together = threading.Barrier(8)

    def register() -> bool:
        together.wait(SOON)
        try:
            near.register(bytearray(8))
        except UsageError:
            return False
        return True

    calls = [Call(register) for _ in range(8)]
    assert sum(call.result() for call in calls) == 1


def test_offsets_and_strides_are_whole(near: Sides) -> None:
    region = near.register(bytearray(64))
    remote = near.peer.open("kv")
    table: Any = np.zeros((2, 8), np.uint8)
    wrong: Any = 0.5
    attempts: Uses = (
        lambda: remote.read(bytearray(8), wrong),
        lambda: remote.write(bytes(8), wrong),
        lambda: remote.read_batch([(bytearray(8), wrong), (bytearray(8), 8)]),
        lambda: remote.write_batch([(bytes(8), 8), (bytes(8), wrong)]),
        lambda: remote.read(table, stride=wrong + 16),
        lambda: remote.write(table, stride=wrong),
        lambda: remote.read_batch([(table, 0, wrong)]),
        lambda: remote.write_batch([(table, wrong, 8)]),
        lambda: remote.fetch_add(wrong, 1),
        lambda: remote.fetch_add(0, wrong),
        lambda: remote.compare_and_swap(0, 0, wrong),
        lambda: region.fetch_add(wrong, 1),
        lambda: region.fetch_add(0, wrong),
    )
    for use in attempts:
        with pytest.raises(UsageError, match=r"is a whole number, and not .*Pass an int"):
            use()
    assert not region.array.any()


@pytest.mark.filterwarnings("error")
def test_numpy_numbers_in_cells_do_not_overflow(near: Sides) -> None:
    region = near.register(np.full(32, -1, np.int64))
    both: tuple[Any, ...] = (near.peer.open("kv"), region)
    for cells in both:
        assert cells.fetch_add(np.int8(120), np.int64(3)) == -1
        assert cells.compare_and_swap(np.int8(120), np.int8(2), np.int8(-1)) == 2
        with pytest.raises(OutOfBounds):
            cells.fetch_add(np.uint64(2**64 - 8), 1)
    assert (region.array == -1).all()


def test_nothing_works_after_close(inproc: Medium) -> None:
    with open_sides(inproc) as sides:
        region = sides.register(bytearray(8))
        remote = sides.peer.open("kv")
        waiting = Call(region.wait_notification, "key", SOON)
        sides.user.close()
        sides.owner.close()
        attempts: Uses = (lambda: remote.read(bytearray(8)), lambda: sides.register(bytearray(8), "x"))
        for use in attempts:
            with pytest.raises(ClosedError):
                use()
        with pytest.raises(ClosedError):
            waiting.result()


# --- ranks ------------------------------------------------------------------------------------------------------------


def test_ranks_use_each_others_memory_and_their_own() -> None:
    def body(mesh: Any) -> None:
        region = mesh.memory.register("cells", np.zeros(mesh.size, np.int64))
        mesh.barrier()
        for rank in range(mesh.size):
            remote = mesh.memory.open(rank, "cells")
            remote.write(np.int64(mesh.rank + 1), 8 * mesh.rank, notify=mesh.rank)
        for rank in range(mesh.size):
            assert region.wait_notification(rank, SOON).source == rank
        assert region.array.tolist() == [rank + 1 for rank in range(mesh.size)]
        assert [info.name for info in mesh.memory.list((mesh.rank + 1) % mesh.size)] == ["cells"]
        for bad in (mesh.size, -1, "rank"):
            with pytest.raises(UsageError):
                mesh.memory.open(bad, "cells")
        mesh.barrier()

    run_world(3, body)


def test_ranks_are_numpys_numbers_too() -> None:
    """As for messages."""

    def body(mesh: Any) -> None:
        other = 1 - mesh.rank
        region = mesh.memory.register("kv", bytearray(8), "rw", allow=[np.int64(other)])
        mesh.barrier()
        mesh.memory.open(np.int64(other), "kv").write(b"x", notify="there")
        assert region.wait_notification("there", SOON).source == other
        assert [info.name for info in mesh.memory.list(np.uint8(other))] == ["kv"]
        with pytest.raises(AccessDenied):
            mesh.memory.open(np.int64(mesh.rank), "kv")
        with pytest.raises(UsageError, match="no rank 2"):
            mesh.memory.open(np.int64(2), "kv")
        mesh.barrier()

    run_world(2, body)
