"""Same host: registered memory is read where it lies, by whoever receives; and nothing is moved that was taken back."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from peers import BRIEFLY, SOON, Medium, blank, pattern, router_of
from rankmesh import AccessDenied, DeadlineError, PeerLost, StaleRegion, UsageError, Work
from rankmesh.buffers import address_of
from rankmesh.config import KIB, MIB
from rankmesh.memory import finding
from rankmesh.memory.mapping import PIECE_BYTES, Permits, has_words
from rankmesh.memory.protocol import REQUEST, SERVICE, Bit, Op
from rankmesh.memory.pulling import TURN_BYTES, Pulled
from rankmesh.memory.remote import RemoteRegion
from rankmesh.transport.pulling import Beacon, Puller
from rankmesh.wire.header import Kind
from regions import GiveUp, Sides, open_sides
from timing import wait_until

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="rings are polled on x86 only")

NBYTES = 2 * PIECE_BYTES + 100 * KIB
Pull = Callable[[Puller, int, int, int], bool]
genuine: Pull = Puller.pull
genuine_read: Pull = Puller.pull_surely


@pytest.fixture
def near(same_host: Medium) -> Iterator[Sides]:
    with open_sides(same_host) as both:
        yield both
        wait_until(lambda: both.owner.memory.stats()["transfers"] == 0, 10, "the end of everything under way")
        cells = router_of(both.peer).outbound.cells
        assert cells is None or len(cells._free) == len(router_of(both.peer).polled.cells)  # type: ignore[union-attr]


def pulled(remote: RemoteRegion) -> Pulled:
    assert isinstance(remote._permit, Pulled)
    return remote._permit


def asking(sides: Sides) -> RemoteRegion:
    """A handle that has the owner fetch what it writes (see test_memory_pushing.py for what it does by itself)."""
    remote = sides.peer.open("kv")
    remote._pushed = None
    return remote


def sent(sides: Sides) -> int:
    """Bytes of messages, requests and transfers."""
    return sides.peer.stats()["bytes_sent"] + sides.back.stats()["bytes_sent"]  # type: ignore[no-any-return]


def test_reads_need_nothing_of_the_owner(near: Sides) -> None:
    data = pattern(NBYTES)
    near.register(data)
    remote = near.peer.open("kv")
    assert (remote.mapped, remote.info.mappable) == (False, False)
    frames = near.peer.stats()["frames_sent"]
    out = blank(NBYTES)
    assert remote.read(out) is out
    assert (out == data).all()
    part = blank(70 * KIB)
    remote.read(part, 12_345)
    assert (part == data[12_345 : 12_345 + len(part)]).all()
    small = blank(100)
    remote.read(small, 8)
    assert (small == data[8:108]).all()
    remote.read(blank(0), 8)
    assert near.peer.stats()["frames_sent"] == frames, "not a frame was sent"
    work = remote.read(out, async_op=True)
    work.result(SOON)
    assert near.peer.stats()["frames_sent"] > frames, "what goes on by itself is asked for"


def test_writes_are_fetched(near: Sides) -> None:
    region = near.register(blank(NBYTES))
    remote = asking(near)
    before, data = sent(near), pattern(NBYTES - 5)
    remote.write(data, 5)
    assert (region.array[5:] == data).all()
    assert (region.array[:5] == blank(5)).all()
    works = [remote.write(pattern(MIB, at), at * MIB, async_op=True, notify=at) for at in range(8)]
    for at in range(8):
        region.wait_notification(at, SOON)
        assert (region.array[at * MIB : (at + 1) * MIB] == pattern(MIB, at)).all(), "seen only after the bytes are"
    for work in works:
        work.result(SOON)
    assert sent(near) - before < 100 * KIB, "the bytes did not go over the connection"


def test_more_writes_at_once_than_there_are_cells(near: Sides) -> None:
    """The others are streamed."""
    region = near.register(blank(200 * 64 * KIB))
    remote = near.peer.open("kv")
    works = [remote.write(pattern(64 * KIB, at), at * 64 * KIB, async_op=True) for at in range(200)]
    for work in works:
        work.result(SOON)
    for at in range(200):
        assert (region.array[at * 64 * KIB : (at + 1) * 64 * KIB] == pattern(64 * KIB, at)).all()


@pytest.mark.parametrize("which", ["owner", "user"])
def test_who_does_not_want_it_is_left_alone(which: str, same_host: Medium, monkeypatch: pytest.MonkeyPatch) -> None:
    config = same_host.config.override(pull=False)
    with open_sides(same_host) as sides, type(sides.owner)(same_host.address, name="other", config=config) as other:
        owner, user = (other, sides.user) if which == "owner" else (sides.owner, other)
        reads: list[int] = []

        def read(puller: Puller, into: int, address: int, nbytes: int) -> bool:
            reads.append(address)
            return False

        for way in ("pull", "pull_surely"):
            monkeypatch.setattr(Puller, way, read)
        data = pattern(NBYTES)
        region = owner.memory.register("kv2", data)
        remote = user.connect(owner.address, timeout=SOON).open("kv2")
        assert remote._permit is None
        out = blank(NBYTES)
        remote.read(out)
        assert (out == data).all()
        remote.write(pattern(NBYTES, 3))
        assert (region.array == pattern(NBYTES, 3)).all()
        assert not reads


def test_a_read_that_was_overtaken_is_no_read(near: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    region = near.register(pattern(NBYTES))
    remote = near.peer.open("kv")

    def overtaken(puller: Puller, into: int, address: int, nbytes: int) -> bool:
        if not region.stale:
            region.unregister(timeout=SOON)
        return genuine_read(puller, into, address, nbytes)

    monkeypatch.setattr(Puller, "pull_surely", overtaken)
    with pytest.raises(StaleRegion, match="unregistered"):
        remote.read(blank(MIB))
    monkeypatch.undo()
    near.register(pattern(NBYTES, 7))
    with pytest.raises(StaleRegion):
        remote.read(blank(MIB))
    out = blank(NBYTES)
    near.peer.open("kv").read(out)
    assert (out == pattern(NBYTES, 7)).all()


def test_unregister_takes_the_descriptor_back(near: Sides) -> None:
    near.register(pattern(MIB), "other")
    near.peer.open("other").read(blank(MIB))
    before = len(os.listdir("/proc/self/fd"))
    for at in range(20):
        region = near.register(pattern(MIB))
        with near.peer.open("kv") as remote:
            out = blank(MIB)
            remote.read(out)
            assert (out == pattern(MIB)).all()
            if at % 2:
                region.unregister(timeout=SOON)
        if not at % 2:
            region.unregister(timeout=SOON)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_peer_that_may_no_longer(near: Sides) -> None:
    region = near.register(pattern(MIB))
    remote = near.peer.open("kv")
    region.allow([])
    with pytest.raises(AccessDenied):
        remote.read(blank(MIB))
    with pytest.raises(AccessDenied):
        remote.write(blank(MIB))
    region.allow([near.back])
    out = blank(MIB)
    remote.read(out)
    assert (out == pattern(MIB)).all()


def test_access(near: Sides) -> None:
    near.register(pattern(MIB), "r", access="r")
    region = near.register(pattern(MIB), "w", access="w")
    readable, writer = near.peer.open("r"), near.peer.open("w")
    out = blank(MIB)
    readable.read(out)
    assert (out == pattern(MIB)).all()
    with pytest.raises(AccessDenied):
        readable.write(out)
    assert writer._permit is None, "who may only write has no address"
    with pytest.raises(AccessDenied):
        writer.read(out)
    writer.write(pattern(MIB, 2))
    assert (region.array == pattern(MIB, 2)).all()


def test_what_cannot_be_read_is_asked_for(near: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    near.register(pattern(MIB))
    remote = near.peer.open("kv")
    monkeypatch.setattr(Puller, "pull_surely", lambda *_: False)
    before, out = sent(near), blank(MIB)
    remote.read(out)
    assert (out == pattern(MIB)).all()
    assert sent(near) - before > MIB


def test_another_process_by_now(near: Sides) -> None:
    """What was read of a process that is not the owner does not count."""
    near.register(pattern(MIB))
    remote, beacon = near.peer.open("kv"), Beacon()
    pulled(remote).renew(Puller(os.getpid(), (beacon.address, beacon.value ^ 1)))
    for asked in (True, False):
        before, out = sent(near), blank(MIB)
        remote.read(out)
        assert (out == pattern(MIB)).all()
        assert (sent(near) - before > MIB) == asked, "the next one knows the owner's beacon"


def test_a_read_ends_in_time(near: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    near.register(pattern(NBYTES))
    remote = near.peer.open("kv")
    monkeypatch.setattr("rankmesh.memory.pulling.monotonic", lambda: 1e18)
    with pytest.raises(DeadlineError):
        remote.read(blank(NBYTES), timeout=BRIEFLY)


def test_many_threads_with_one_handle(near: Sides) -> None:
    data = pattern(16 * MIB)
    near.register(data)
    remote = near.peer.open("kv")

    def read(at: int) -> bool:
        out = blank(MIB)
        return all((remote.read(out, at * MIB) == data[at * MIB : (at + 1) * MIB]).all() for _ in range(20))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(read, range(16)))
    assert len(pulled(remote)._idle) <= 8


def test_only_so_many_regions_have_a_descriptor(near: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "MOST_PULLED", 2)
    for at in range(3):
        near.register(pattern(MIB, at), f"kv{at}")
    near.register(pattern(1000), "small")
    remotes = [near.peer.open(f"kv{at}") for at in range(3)]
    assert [isinstance(remote._permit, Pulled) for remote in remotes] == [True, True, False]
    for at, remote in enumerate(remotes):
        out = blank(MIB)
        remote.read(out)
        assert (out == pattern(MIB, at)).all()
    assert near.peer.open("small")._permit is None


def test_no_descriptors_left(near: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **__: Any) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("rankmesh.memory.mapping.anonymous", none)
    near.register(pattern(MIB))
    out = blank(MIB)
    near.peer.open("kv").read(out)
    assert (out == pattern(MIB)).all()


# ------------------------------------------------------------------ writes that end otherwise


def at_second_piece(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> list[int]:
    """Do something while an owner is in the middle of a write's second piece. Where its pieces began is returned."""
    begun: list[int] = []

    def pull(puller: Puller, into: int, address: int, nbytes: int) -> bool:
        if nbytes == TURN_BYTES:
            begun.append(address)
            if len(begun) == 2:
                action()
        return genuine(puller, into, address, nbytes)

    monkeypatch.setattr(Puller, "pull", pull)
    return begun


def test_a_write_that_was_taken_back(near: Sides, give_up: GiveUp, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer gives up, and puts something else there, while the owner is in the middle of the second piece."""
    region = near.register(np.full(4 * TURN_BYTES, 7, np.uint8))
    remote, data = asking(near), np.full(4 * TURN_BYTES, 1, np.uint8)
    begun: list[Work[Any]] = []

    def reuse() -> None:
        wait_until(lambda: bool(begun), 10)
        give_up(begun[0])
        data[:] = 99

    pieces = at_second_piece(monkeypatch, reuse)
    begun.append(remote.write(data, async_op=True))
    wait_until(lambda: not region.moving and begun[0].done(), 10)
    assert len(pieces) == 2, "nothing was read afterwards"
    first, second, rest = np.split(region.array, [TURN_BYTES, 2 * TURN_BYTES])
    assert (first == 1).all()
    assert not second.any(), "what the writer put there since is not shown to anybody"
    assert (rest == 7).all()
    monkeypatch.undo()
    remote.write(data)
    assert (region.array == 99).all()


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint64])
def test_offsets_of_any_kind(near: Sides, kind: Any) -> None:
    region = near.register(pattern(NBYTES))
    remote, out = near.peer.open("kv"), blank(MIB)
    remote.read(out, kind(12_345))
    assert (out == pattern(NBYTES)[12_345 : 12_345 + MIB]).all()
    remote.write(blank(MIB), kind(5))
    assert (region.array[5 : 5 + MIB] == blank(MIB)).all()


def test_a_handle_closed_in_the_middle_of_a_read(near: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handle goes on without."""
    near.register(pattern(MIB))
    remote = near.peer.open("kv")

    def pull(puller: Puller, into: int, address: int, nbytes: int) -> bool:
        remote.close()
        return genuine_read(puller, into, address, nbytes)

    monkeypatch.setattr(Puller, "pull_surely", pull)
    out = blank(MIB)
    remote.read(out)
    assert (out == pattern(MIB)).all()


def test_connections_rest_although_regions_are_open(same_host: Medium) -> None:
    with open_sides(same_host, idle_timeout=0.2) as sides:
        data = pattern(MIB)
        region = sides.register(data)
        remote, out = sides.peer.open("kv"), blank(MIB)
        for turn in range(3):
            wait_until(lambda: router_of(sides.peer).link is None, 20, "the connection is given up")
            for each in range(2):
                data[:8] = turn, each, *range(6)
                out[:] = 0
                remote.read(out)
                assert (out == data).all()
            remote.write(pattern(MIB, turn))
            assert (region.array == pattern(MIB, turn)).all()
        assert isinstance(remote._permit, Pulled)


def test_words_of_those_who_are_gone_are_used_again() -> None:
    permits = Permits(5)
    for index in range(1000):
        router: Any = SimpleNamespace(index=index)
        slot = permits.slot(router)
        assert slot > 0
        assert permits._words[slot + 1] == 5
        permits.lost(router)
        assert not permits._words[slot + 1]
    permits.close()


def test_a_write_that_does_not_leave_at_once_is_streamed(near: Sides) -> None:
    """By another connection, perhaps: what was offered on this one would mean nothing there."""
    region = near.register(blank(MIB))
    remote, outbound = near.peer.open("kv"), router_of(near.peer).outbound
    before = sent(near)
    with near.user.hub.engine:
        outbound.paused = True
    work = remote.write(pattern(MIB), async_op=True)
    assert work._offer is None
    with near.user.hub.engine:
        outbound.resume()
    work.result(SOON)
    assert (region.array == pattern(MIB)).all()
    assert sent(near) - before >= MIB


def test_a_write_that_was_given_up_before_the_owner_saw_it(near: Sides) -> None:
    region = near.register(np.full(MIB, 7, np.uint8))
    remote = asking(near)
    with near.owner.hub.engine, pytest.raises(DeadlineError):
        remote.write(blank(MIB), timeout=BRIEFLY)
    remote.read(blank(100), async_op=True).result(SOON)  # asked for afterwards, and answered
    assert (region.array == 7).all()


def test_writes_take_turns(near: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    region = near.register(blank(16 * TURN_BYTES))
    remote = near.peer.open("kv")
    data = [np.full(8 * TURN_BYTES, each, np.uint8) for each in (1, 2)]
    begun: list[Work[Any]] = []
    order: list[int] = []

    def pull(puller: Puller, into: int, address: int, nbytes: int) -> bool:
        if nbytes == TURN_BYTES:
            wait_until(lambda: len(begun) == 2, 10)
            order.append(next(at for at, each in enumerate(data) if 0 <= address - each.ctypes.data < each.nbytes))
        return genuine(puller, into, address, nbytes)

    monkeypatch.setattr(Puller, "pull", pull)
    begun += (remote.write(each, at * 8 * TURN_BYTES, async_op=True) for at, each in enumerate(data))
    for work in begun:
        work.result(SOON)
    assert sorted(order) == [0] * 8 + [1] * 8
    assert order.index(1) < 8, "the second did not wait for the whole first"
    assert (region.array == np.repeat([1, 2], 8 * TURN_BYTES)).all()


def test_unregister_ends_a_write(near: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = mmap.mmap(-1, 4 * TURN_BYTES)
    memory = np.frombuffer(buffer, np.uint8)
    memory[:] = 7
    region = near.register(buffer)
    remote = asking(near)
    engine, server = near.owner.hub.engine, near.owner.memory._server
    end = partial(engine.call_at, 0.0, lambda: server.remove(region, abort=True))
    pieces = at_second_piece(monkeypatch, end)
    with pytest.raises(StaleRegion, match="unregistered"):
        remote.write(np.ones(4 * TURN_BYTES, np.uint8))
    region.unregister(timeout=SOON)
    assert 2 <= len(pieces) < 4
    assert (memory[-TURN_BYTES:] == 7).all()
    del memory
    buffer.close()


def test_a_writer_that_is_lost(same_host: Medium, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_sides(same_host) as sides:
        region = sides.register(np.full(4 * TURN_BYTES, 7, np.uint8))
        remote = sides.peer.open("kv")
        begun: list[Work[Any]] = []

        def leave() -> None:
            wait_until(lambda: bool(begun), 10)
            sides.user.abort()

        pieces = at_second_piece(monkeypatch, leave)
        begun.append(remote.write(np.ones(4 * TURN_BYTES, np.uint8), async_op=True))
        wait_until(lambda: region.idle and len(pieces) == 2, 10)
        assert (region.array[2 * TURN_BYTES :] == 7).all()
        region.unregister(timeout=SOON)


def test_bytes_that_cannot_be_read(near: Sides, tmp_path: Path) -> None:
    """A file that was cut off: whoever touches it is killed, but nobody has to."""
    path = tmp_path / "cut"
    path.write_bytes(bytes(MIB))
    region = near.register(np.full(MIB, 7, np.uint8))
    remote = asking(near)
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), MIB)
        file.truncate(4096)
    with pytest.raises(UsageError, match="a file was cut off"):
        remote.write(memory)
    assert (region.array == 7).all()
    remote.write(blank(MIB))
    assert (region.array == blank(MIB)).all()


def test_bytes_that_are_not_there_from_the_first_on(near: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a device: nobody is asked to fetch them."""

    def populate(address: int, nbytes: int) -> None:
        raise OSError(errno.EINVAL, "no plain memory")

    monkeypatch.setattr("rankmesh.memory.remote.populate", populate)
    monkeypatch.setattr(Puller, "reaches", lambda *_: False)
    region = near.register(blank(MIB))
    remote = near.peer.open("kv")
    assert remote._permit is None
    before = sent(near)
    remote.write(pattern(MIB))
    assert (region.array == pattern(MIB)).all()
    assert sent(near) - before >= MIB


# ------------------------------------------------------------------ by hand


BAD: dict[str, tuple[int, bytes]] = {
    "no source": (MIB, b""),
    "half a source": (MIB, bytes(12)),
    "more than a source": (MIB, bytes(32)),
    "an unknown cell": (MIB, (4096).to_bytes(8, "little") + (64).to_bytes(8, "little") + bytes(8)),
    "nothing": (0, bytes(24)),
}


@pytest.mark.parametrize("case", BAD)
def test_what_breaks_the_protocol_ends_that_connection(same_host: Medium, case: str) -> None:
    with open_sides(same_host) as sides:
        region = sides.register(pattern(MIB))
        nbytes, source = BAD[case]
        sides.peer.open("kv")
        router = router_of(sides.peer)
        body = REQUEST.pack(Op.WRITE, Bit.PULLED, 0, 0, region.generation, 0, nbytes) + source
        with sides.user.hub.engine:
            router.outbound.send_rpc(int(Kind.REQUEST), 0, SERVICE, router.outbound.new_ident(), body)
        with pytest.raises(PeerLost):
            sides.peer.recv(bytearray(1), timeout=SOON)
        assert (region.array == pattern(MIB)).all()
        assert region.idle


def test_an_address_that_is_none(near: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read but what the writer points to in its own memory; and of what it has not, it is told."""
    region = near.register(pattern(MIB))
    remote = asking(near)
    monkeypatch.setattr("rankmesh.memory.pulling.address_of", lambda view: 4096 if view.readonly else address_of(view))
    with pytest.raises(UsageError, match="cannot be read where they lie"):
        remote.write(bytes(MIB))
    assert (region.array == pattern(MIB)).all()


def test_a_peer_that_shows_words_which_are_not_there() -> None:
    page = memoryview(bytearray(4096))
    assert has_words(page, 2)
    assert not has_words(page, 0)
    assert not has_words(page, 511)
    assert not has_words(page[:100], 2)
