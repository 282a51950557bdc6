"""Same host: registered memory is written where it lies, by the writer alone; and nothing is written any more once it
was taken back."""

from __future__ import annotations

import mmap
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from peers import BRIEFLY, SOON, Medium, blank, pattern, router_of
from rankmesh import AccessDenied, ClosedError, Config, DeadlineError, OutOfBounds, PeerLost, StaleRegion, UsageError
from rankmesh.config import KIB, MIB
from rankmesh.memory import mapping, pushing
from rankmesh.memory.mapping import PIECE_BYTES, has_words
from rankmesh.memory.pulling import Pulled
from rankmesh.memory.pushing import Pushed, PushPermits
from rankmesh.memory.remote import RemoteRegion
from rankmesh.transport.pushing import Pusher, halted
from ranks import Mesh, Ranks, Talk, attempt
from regions import Sides, open_sides
from timing import scaled, wait_until

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="rings are polled on x86 only")

NBYTES = 2 * PIECE_BYTES + 100 * KIB
Push = Callable[[Pusher, int, int], bool]
genuine: Push = Pusher.push


@pytest.fixture
def near(same_host: Medium) -> Iterator[Sides]:
    with open_sides(same_host) as both:
        yield both


def frames(sides: Sides) -> int:
    return sides.peer.stats()["frames_sent"]  # type: ignore[no-any-return]


def permits(region: Any) -> PushPermits:
    assert isinstance(region.shared, PushPermits)
    return region.shared


class Held:
    """Every push waits, when all but the call is done, until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.went: list[bool] = []

        def push(pusher: Pusher, source: int, nbytes: int) -> bool:
            self.begun.set()
            assert self.go_on.wait(SOON)
            self.went.append(genuine(pusher, source, nbytes))
            return self.went[-1]

        monkeypatch.setattr(Pusher, "push", push)


def test_writes_need_nothing_of_the_owner(near: Sides) -> None:
    region = near.register(blank(NBYTES))
    remote = near.peer.open("kv")
    before, data = frames(near), pattern(NBYTES - 5)
    assert remote.write(data, 5) is None
    assert (region.array[5:] == data).all()
    assert (region.array[:5] == blank(5)).all()
    remote.write(b"as small as this", 1)
    assert bytes(region.array[1:17]) == b"as small as this"
    assert (region.array[17:100] == data[12:95]).all()
    offset: Any = np.int64(PIECE_BYTES - 1000)
    remote.write(bytearray(pattern(70 * KIB, 3)), offset)
    assert (region.array[PIECE_BYTES - 1000 :][: 70 * KIB] == pattern(70 * KIB, 3)).all()
    assert frames(near) == before, "not a frame was sent"
    with near.owner.hub.engine:  # nor does it matter what the owner does
        remote.write(pattern(MIB, 4))
    assert (region.array[:MIB] == pattern(MIB, 4)).all()
    assert not any(permits(region)._words[slot] for slot in permits(region)._slots.values())


def test_a_notification_comes_after_the_bytes(near: Sides) -> None:
    region = near.register(blank(8 * MIB))
    remote = near.peer.open("kv")
    for at in range(8):
        remote.write(pattern(MIB, at), at * MIB, notify=at)
        assert region.wait_notification(at, SOON).key == at
        assert (region.array[at * MIB : (at + 1) * MIB] == pattern(MIB, at)).all()


def test_many_threads_with_one_handle(near: Sides) -> None:
    """One of them writes by itself, the others have it fetched; all of it arrives."""
    region = near.register(blank(16 * MIB))
    remote = near.peer.open("kv")

    def write(at: int) -> None:
        for turn in range(10):
            remote.write(pattern(MIB, at + turn), at * MIB)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, range(16)))
    for at in range(16):
        assert (region.array[at * MIB : (at + 1) * MIB] == pattern(MIB, at + 9)).all()


def test_out_of_bounds_and_access(near: Sides) -> None:
    region = near.register(pattern(MIB))
    remote = near.peer.open("kv")
    for offset in (-1, 1, MIB, 1 << 63):
        with pytest.raises(OutOfBounds):
            remote.write(blank(MIB), offset)
    assert (region.array == pattern(MIB)).all()
    near.register(pattern(MIB), "r", access="r")
    readable = near.peer.open("r")
    assert type(readable._permit) is Pulled
    with pytest.raises(AccessDenied):
        readable.write(blank(MIB))


def test_a_peer_that_may_no_longer(near: Sides) -> None:
    region = near.register(pattern(MIB))
    remote = near.peer.open("kv")
    region.allow([])
    with pytest.raises(AccessDenied):
        remote.write(blank(MIB))
    assert (region.array == pattern(MIB)).all()
    region.allow([near.back])
    before = frames(near)
    remote.write(blank(MIB))
    assert (region.array == blank(MIB)).all()
    assert frames(near) == before


def test_a_write_ends_in_time(near: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    region = near.register(np.full(NBYTES, 7, np.uint8))
    remote = near.peer.open("kv")
    monkeypatch.setattr("rankmesh.memory.pushing.monotonic", lambda: 1e18)
    with pytest.raises(DeadlineError):
        remote.write(np.ones(NBYTES, np.uint8), timeout=BRIEFLY)
    assert (region.array[PIECE_BYTES:] == 7).all(), "nothing after the piece in which time ran out"
    region.unregister(timeout=SOON)


@pytest.mark.parametrize("why", ["no such call", "no guard"])
def test_where_it_cannot_be_the_owner_is_asked(why: str, near: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    if why == "no guard":
        monkeypatch.setattr("rankmesh.memory.finding.guard", lambda: 0)
    else:
        monkeypatch.setattr("rankmesh.transport.pushing.system_call", lambda _: None)
    region = near.register(blank(MIB))
    remote, before = near.peer.open("kv"), frames(near)
    assert type(remote._permit) is (Pulled if why == "no guard" else Pushed)
    remote.write(pattern(MIB))
    assert (region.array == pattern(MIB)).all()
    assert frames(near) > before


def test_bytes_that_are_not_there(near: Sides, tmp_path: Path) -> None:
    """A file that was cut off."""
    path = tmp_path / "cut"
    path.write_bytes(bytes(MIB))
    region = near.register(np.full(MIB, 7, np.uint8))
    remote = near.peer.open("kv")
    with path.open("r+b") as file:
        memory = mmap.mmap(file.fileno(), MIB)
        file.truncate(4096)
    with pytest.raises(UsageError, match="a file was cut off"):
        remote.write(memory)
    assert (region.array[4096:] == 7).all(), "what is not there is not written"


# ------------------------------------------------------------------ taken back meanwhile


def write_held(near: Sides, held: Held, remote: RemoteRegion, pool: ThreadPoolExecutor) -> Any:
    written = pool.submit(remote.write, np.ones(MIB, np.uint8))
    assert held.begun.wait(SOON)
    return written


def test_unregister_waits_for_who_writes(near: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what it may not wait for any longer is not written: it was revoked before the kernel was called."""
    memory = np.full(MIB, 7, np.uint8)
    region = near.register(memory)
    remote, held = near.peer.open("kv"), Held(monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        written = write_held(near, held, remote, pool)
        with pytest.raises(DeadlineError, match="still under way"):
            region.unregister(timeout=BRIEFLY)
        ended = pool.submit(region.unregister, timeout=SOON)
        assert not ended.done()
        held.go_on.set()
        ended.result(SOON)
        with pytest.raises(StaleRegion, match="unregistered"):
            written.result(SOON)
    assert held.went == [False]
    assert (memory == 7).all()


def test_unregister_need_not_wait_for_who_is_stopped(near: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    """One who is stopped is outside the kernel, and finds its permit revoked when it goes on."""
    memory = np.full(MIB, 7, np.uint8)
    region = near.register(memory)
    remote, held = near.peer.open("kv"), Held(monkeypatch)
    asked: list[int] = []

    def stopped(process: int) -> bool:
        asked.append(process)
        return True

    monkeypatch.setattr(pushing, "halted", stopped)
    with ThreadPoolExecutor(1) as pool:
        written = write_held(near, held, remote, pool)
        region.unregister(timeout=SOON)
        held.go_on.set()
        with pytest.raises(StaleRegion):
            written.result(SOON)
    assert set(asked) == {os.getpid()}
    assert held.went == [False]
    assert (memory == 7).all()


def test_a_writer_that_is_lost_and_lives_is_waited_for(same_host: Medium, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = np.full(MIB, 7, np.uint8)
    with open_sides(same_host) as sides:
        region = sides.register(memory)
        remote, held = sides.peer.open("kv"), Held(monkeypatch)
        with ThreadPoolExecutor(1) as pool:
            written = write_held(sides, held, remote, pool)
            sides.user.abort()
            wait_until(lambda: router_of(sides.back).gone, 10, "the writer is lost")
            assert not region.idle
            with pytest.raises(DeadlineError, match="still under way"):
                region.unregister(timeout=BRIEFLY)
            held.go_on.set()
            with pytest.raises(ClosedError):
                written.result(SOON)
        region.unregister(timeout=SOON)
    assert held.went == [False]
    assert (memory == 7).all()


def test_who_closes_waits_for_who_writes(same_host: Medium, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = np.full(MIB, 7, np.uint8)
    with open_sides(same_host) as sides, ThreadPoolExecutor(2) as pool:
        region = sides.register(memory)
        remote, held = sides.peer.open("kv"), Held(monkeypatch)
        shared = permits(region)
        written = write_held(sides, held, remote, pool)
        closed = pool.submit(sides.owner.abort)
        wait_until(lambda: not any(shared._words[slot + 1] for slot in shared._processes), 10, "it was revoked")
        assert not closed.done()
        held.go_on.set()
        closed.result(SOON)
        with pytest.raises(PeerLost):
            written.result(SOON)
    assert held.went == [False]
    assert (memory == 7).all()


def test_a_handle_closed_in_the_middle(near: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its words are nobody else's until the write has ended."""
    region = near.register(np.full(MIB, 7, np.uint8))
    remote, held = near.peer.open("kv"), Held(monkeypatch)
    with ThreadPoolExecutor(1) as pool:
        written = write_held(near, held, remote, pool)
        remote.close()
        assert permits(region)._slots, "they are still this peer's"
        held.go_on.set()
        written.result(SOON)
    assert (region.array == 1).all()
    near.peer.open("kv").close()
    wait_until(lambda: not permits(region)._slots, 10, "they were given back")
    region.unregister(timeout=SOON)


def test_while_a_thread_writes_others_ask_the_owner(near: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one set of words."""
    region = near.register(blank(2 * MIB))
    remote, held = near.peer.open("kv"), Held(monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        written = write_held(near, held, remote, pool)
        pool.submit(remote.write, pattern(MIB), MIB).result(SOON)
        assert (region.array[MIB:] == pattern(MIB)).all()
        assert [permits(region)._words[slot] for slot in permits(region)._slots.values()] == [1]
        held.go_on.set()
        written.result(SOON)
    assert (region.array[:MIB] == 1).all()


def test_a_handle_closed_just_before(near: Sides) -> None:
    """What a thread has begun to write may be with words that are another's by now: it keeps its hands off them."""
    region = near.register(np.full(MIB, 7, np.uint8))
    with near.peer.open("kv") as remote:
        stale = remote._pushed
    assert stale is not None
    wait_until(lambda: not permits(region)._slots, 10, "they were given back")
    remote = near.peer.open("kv")
    assert remote._pushed is not stale
    (slot,) = permits(region)._slots.values()
    before = list(permits(region)._words[slot : slot + 8])
    assert not stale.write(memoryview(bytes(100)), 0, 1e18)
    assert list(permits(region)._words[slot : slot + 8]) == before
    remote.write(np.ones(MIB, np.uint8))
    assert (region.array == 1).all()


def test_words_of_the_lost_are_kept_as_long_as_they_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who lives, and was lost, may still aim there."""
    shared = PushPermits(5)
    dead: set[int] = set()
    monkeypatch.setattr(mapping, "gone", dead.__contains__)

    def slot_of(process: int) -> int:
        router: Any = SimpleNamespace(index=process, polled=SimpleNamespace(process=process))
        slot = shared.slot(router)
        shared.lost(router)
        return slot

    slots = [slot_of(process) for process in range(1, 256)]
    assert len(set(slots)) == 255
    assert slot_of(256) == 0, "there are none left"
    dead |= {7, 9}
    assert sorted([slot_of(257), slot_of(258)]) == sorted([slots[6], slots[8]])
    assert slot_of(259) == 0
    assert not shared.busy
    shared.close()


def test_words_of_who_closes_are_given_back(same_host: Medium) -> None:
    with open_sides(same_host) as sides:
        region = sides.register(blank(MIB))
        sides.peer.open("kv").write(pattern(MIB))
        assert permits(region)._slots
        sides.user.close()
        wait_until(lambda: router_of(sides.back).gone, 10)
        assert not permits(region)._slots
        assert not permits(region)._late


def test_a_stale_handle_holds_no_descriptor(near: Sides) -> None:
    near.register(pattern(MIB), "other")
    near.peer.open("other").write(blank(MIB))
    before, handles = len(os.listdir("/proc/self/fd")), []
    for _ in range(5):
        region = near.register(pattern(MIB))
        handles.append(near.peer.open("kv"))
        handles[-1].write(blank(MIB))
        region.unregister(timeout=SOON)
        with pytest.raises(StaleRegion):
            handles[-1].write(blank(MIB))
    near.register(pattern(MIB))
    near.peer.open("kv").close()  # which lets go of what is gone
    near.owner.memory.unregister("kv")
    assert len(os.listdir("/proc/self/fd")) <= before


def test_an_owner_that_cannot_look_at_the_writer_lets_it_only_read(near: Sides) -> None:
    """It could not tell a writer that is gone from one that it cannot see (another container)."""
    link = router_of(near.back).polled
    assert link is not None
    link.puller = None
    region = near.register(blank(MIB))
    remote = near.peer.open("kv")
    assert type(remote._permit) is Pulled
    remote.write(pattern(100))
    assert (region.array[:100] == pattern(100)).all()


@pytest.mark.parametrize("field", ["address", "guard"])
@pytest.mark.parametrize("value", [-1, 1 << 62 | 1])
def test_an_owner_that_says_nonsense(near: Sides, field: str, value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    offer = near.owner.memory._server._offer
    monkeypatch.setattr(
        near.owner.memory._server, "_offer", lambda *args: msgspec.structs.replace(offer(*args), **{field: value})
    )
    region = near.register(blank(MIB))
    remote = near.peer.open("kv")
    assert remote._permit is None
    remote.write(pattern(MIB))
    assert (region.array == pattern(MIB)).all()


# ------------------------------------------------------------------ beside what the owner is asked for


def test_a_write_does_not_overtake_those_before_it(near: Sides) -> None:
    """Whether they are fetched, streamed, or in the request."""
    region = near.register(blank(MIB))
    remote = near.peer.open("kv")
    for turn in range(20):
        works = [
            remote.write(np.full(MIB, 1, np.uint8), async_op=True),
            remote.write_batch([(np.full(MIB, 2, np.uint8), 0)], async_op=True),
            remote.write(np.full(100, 3, np.uint8), async_op=True),
        ]
        remote.write(np.full(MIB, 4 + turn, np.uint8))
        for work in works:
            work.result(SOON)
        assert (region.array == 4 + turn).all()
    before = frames(near)
    remote.write(blank(MIB))
    assert frames(near) == before, "all are answered: it is written directly again"


def test_nor_one_that_was_given_up(near: Sides) -> None:
    """Nobody knows when the owner is through with it."""
    region = near.register(blank(MIB))
    remote = near.peer.open("kv")
    with near.owner.hub.engine:
        work = remote.write(np.full(100, 1, np.uint8), async_op=True)
        with pytest.raises(DeadlineError):
            work.result(BRIEFLY)
        with pytest.raises(DeadlineError):
            remote.write(np.full(100, 2, np.uint8), timeout=BRIEFLY)
    remote.write(np.full(100, 3, np.uint8))
    assert (region.array[:100] == 3).all()


def test_cells_are_the_owners_to_change(near: Sides) -> None:
    region = near.register(np.zeros(MIB // 8, np.uint64))
    remote, before = near.peer.open("kv"), frames(near)
    remote.write(np.array([5], np.uint64), 8)
    assert frames(near) > before
    assert remote.fetch_add(8, 1) == 5
    assert region.array[1] == 6


@pytest.mark.parametrize("key", [3.5, "x" * 10_000])
def test_a_bad_key_is_found_before_a_byte_is_written(near: Sides, key: Any) -> None:
    region = near.register(np.full(MIB, 7, np.uint8))
    remote = near.peer.open("kv")
    with pytest.raises(UsageError):
        remote.write(blank(MIB), notify=key)
    assert (region.array == 7).all()


def test_a_peer_that_shows_words_which_are_not_there(near: Sides) -> None:
    pages = memoryview(bytearray(PushPermits.words_bytes))
    assert has_words(pages, 8, PushPermits)
    assert has_words(pages, len(pages) // 8 - 8, PushPermits)
    assert not has_words(pages, len(pages) // 8 - 7, PushPermits)
    assert not has_words(pages, 0, PushPermits)
    assert not has_words(pages[:4096], 8, PushPermits)


# ------------------------------------------------------------------ processes


def _stopping(mesh: Mesh, talk: Talk) -> None:
    """Rank 1 stops itself when all but the call is done; rank 0 takes its memory back meanwhile."""
    if mesh.rank == 0:
        memory = np.full(MIB, 7, np.uint8)
        region = mesh.memory.register("kv", memory)
        mesh.barrier(timeout=scaled(20))
        talk.recv()
        outcome = attempt(lambda: region.unregister(timeout=scaled(20)))
        memory[:] = 8
        talk.send(outcome)
        talk.recv()
        talk.send(bool((memory == 8).all()))
        return
    mesh.barrier(timeout=scaled(20))
    remote = mesh.memory.open(0, "kv")

    def push(pusher: Pusher, source: int, nbytes: int) -> bool:
        os.kill(os.getpid(), signal.SIGSTOP)
        return genuine(pusher, source, nbytes)

    Pusher.push = push  # type: ignore[method-assign, assignment]
    talk.send("begins")
    talk.send(attempt(lambda: remote.write(np.ones(MIB, np.uint8))))


@pytest.mark.parametrize("ends", [signal.SIGCONT, signal.SIGKILL])
def test_a_writer_that_is_stopped_just_before_it_writes(nursery: None, ends: signal.Signals) -> None:
    """Long before anybody would be given up for being silent."""
    with Ranks(2, _stopping, Config(heartbeat_timeout=scaled(100))) as ranks:
        assert ranks.hear(1) == "begins"
        wait_until(lambda: halted(ranks.pid(1)), 20, "it is stopped")
        ranks.say(0, True)
        assert ranks.hear(0).error is None, "unregister returned"
        ranks.signal(1, ends)
        if ends == signal.SIGCONT:
            assert isinstance(ranks.hear(1).error, StaleRegion)
        else:
            assert ranks.exit_code(1) == -signal.SIGKILL
        ranks.say(0, True)
        assert ranks.hear(0) is True, "what was put there since is untouched"
