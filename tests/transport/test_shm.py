"""What is particular to shm://: how the memory is passed on, the bells, and what comes between them."""

from __future__ import annotations

import os
import random
import resource
import select
import socket
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic

import pytest

from forked import Child, shm_names
from leaks import descriptors
from rankmesh.config import KIB, MIB, Config
from rankmesh.testing.pump import connect_pair, is_ready, retry, transfer, wait_any
from rankmesh.transport import Address, Link, segment, shm
from rankmesh.transport.notices import MAX_SHARED
from rankmesh.transport.pulling import Puller
from rankmesh.transport.ring import BELL, FREED, HEAD, SLOT_BYTES, begin
from rankmesh.transport.segment import CELLS, MAGIC, PROOF_BYTES, SEGMENT_BYTES
from rankmesh.transport.shm import ShmLink, ShmListener, ShmTransport
from timing import scaled

SHM = ShmTransport()
CONFIG = Config()
SOON = scaled(10)
NOTICE = struct.Struct("<cQQ")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")


@pytest.fixture
def listener() -> Iterator[ShmListener]:
    door = SHM.listen(Address("shm", ""), CONFIG)
    yield door
    door.close()


@pytest.fixture
def links(listener: ShmListener) -> Iterator[tuple[ShmLink, ShmLink]]:
    near, far = connect_pair(SHM, listener.address, CONFIG, SOON, listener)
    assert isinstance(near, ShmLink)
    assert isinstance(far, ShmLink)
    yield near, far
    near.abort()
    far.abort()


def test_both_sides_find_each_others_memory(links: tuple[ShmLink, ShmLink]) -> None:
    for link in links:
        assert link.puller is not None
        assert link.puller.stands()
        assert link.pulls


@pytest.mark.parametrize("who", ["connecting", "accepting"])
def test_who_shows_no_beacon_is_not_looked_for(who: str) -> None:
    unwilling = CONFIG.override(pull=False)
    door = SHM.listen(Address("shm", ""), unwilling if who == "accepting" else CONFIG)
    near, far = connect_pair(SHM, door.address, unwilling if who == "connecting" else CONFIG, SOON, door)
    for link in (near, far):
        assert isinstance(link, ShmLink)
        assert link.puller is None
        assert not link.pulls
        link.abort()
    door.close()


def test_memory_that_the_system_does_not_show(listener: ShmListener, monkeypatch: pytest.MonkeyPatch) -> None:
    """One side can read, the other cannot."""
    stands, tried = Puller.stands, []

    def second_only(puller: Puller) -> bool:
        tried.append(puller)
        return len(tried) > 1 and stands(puller)

    monkeypatch.setattr(Puller, "stands", second_only)
    near, far = connect_pair(SHM, listener.address, CONFIG, SOON, listener)
    assert isinstance(near, ShmLink)
    assert isinstance(far, ShmLink)
    assert sorted([near.puller is None, far.puller is None]) == [False, True]
    assert (near.pulls, far.pulls) == (far.puller is not None, near.puller is not None)
    near.abort()
    far.abort()


@contextmanager
def caller(listener: ShmListener) -> Iterator[socket.socket]:
    """A socket that is connected to the listener, and has said nothing."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(SOON)
        sock.connect(f"\0rankmesh-{listener.address.host}")
        yield sock


def memory(nbytes: int = SEGMENT_BYTES, magic: bytes = MAGIC, sealed: bool = True) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    os.pwrite(fd, magic, 0)
    if sealed:
        segment.seal(fd)
    return fd


# ---------------------------------------------------------------------- how a connection comes about


def test_nothing_has_a_name_and_only_the_two_hold_it(links: tuple[ShmLink, ShmLink]) -> None:
    before = shm_names()
    assert transfer(*links, bytes(MIB), SOON) == bytes(MIB)
    assert shm_names() == before
    targets = [target for _, target in descriptors()]
    assert targets.count("/memfd:rankmesh (deleted)") == 2, "one for each mapping; those that were passed are closed"


def test_a_name_that_is_taken() -> None:
    first = SHM.listen(Address("shm", "taken"), CONFIG)
    with pytest.raises(OSError, match="in use"):
        SHM.listen(Address("shm", "taken"), CONFIG)
    first.close()
    SHM.listen(Address("shm", "taken"), CONFIG).close()


def test_too_many_connections_waiting(listener: ShmListener) -> None:
    """A Unix socket does not wait for a place in the queue: it says so, and is tried again later."""
    callers: list[Link] = []
    try:
        while len(callers) <= shm.BACKLOG:
            callers.append(SHM.connect(listener.address, CONFIG))
        with pytest.raises(OSError, match="too many connections waiting"):
            SHM.connect(listener.address, CONFIG)
    finally:
        for link in callers:
            link.abort()


Opening = Callable[[socket.socket], None]


def opening(fd: int, magic: bytes = MAGIC, proof: bytes = bytes(PROOF_BYTES)) -> Opening:
    def send(sock: socket.socket) -> None:
        socket.send_fds(sock, [magic + proof], [fd])
        os.close(fd)

    return send


WRONG_OPENINGS: dict[str, tuple[Callable[[], Opening], str]] = {
    "nothing": (lambda: lambda sock: sock.shutdown(socket.SHUT_WR), "offered no memory"),
    "no descriptor": (lambda: lambda sock: sock.sendall(MAGIC + bytes(PROOF_BYTES)), "offered no memory"),
    "too short": (lambda: opening(memory(), proof=b"short"), "offered no memory"),
    "garbage": (lambda: opening(memory(), magic=b"GET / HT"), "another layout"),
    "memory of another layout": (lambda: opening(memory(magic=b"other")), "another layout"),
    "memory of another size": (lambda: opening(memory(SEGMENT_BYTES * 2)), "another size"),
    "memory that can be resized": (lambda: opening(memory(sealed=False)), "can be resized"),
    "no memory": (lambda: opening(os.open(os.devnull, os.O_RDWR)), "Invalid argument"),
    "a proof that is not there": (lambda: opening(memory(), proof=b"x" * PROOF_BYTES), "not shared"),
}


@pytest.mark.parametrize("make, why", WRONG_OPENINGS.values(), ids=WRONG_OPENINGS)
def test_wrong_openings_are_refused(listener: ShmListener, make: Callable[[], Opening], why: str) -> None:
    with caller(listener) as sock:
        assert wait_any([listener], SOON)
        link = listener.accept()
        with pytest.raises(BlockingIOError):
            link.establish()
        make()(sock)
        with pytest.raises(OSError, match=why):
            retry(link, link.establish, SOON)
        link.abort()
        assert sock.recv(100) == b""


@contextmanager
def answering(answer: Callable[[bytes], bytes]) -> Iterator[ShmLink]:
    """A link that connects to somebody who answers its opening in this way."""
    with socket.socket(socket.AF_UNIX) as door:
        door.bind("\0rankmesh-impostor")
        door.listen()
        link = SHM.connect(Address("shm", "impostor"), CONFIG)
        assert isinstance(link, ShmLink)
        with pytest.raises(BlockingIOError):
            link.establish()
        sock, _ = door.accept()
        with sock:
            text, fds, _, _ = socket.recv_fds(sock, 100, 4)
            for fd in fds:
                os.close(fd)
            sock.sendall(answer(text))
            sock.shutdown(socket.SHUT_WR)
            yield link
        link.abort()


@pytest.mark.parametrize(
    "answer, why",
    [
        (lambda text: b"", "refused to share"),
        (lambda text: b"short", "refused to share"),
        (lambda text: bytes(2 * PROOF_BYTES), "not shared"),
        (lambda text: text[8:] + b"x" * PROOF_BYTES, "not shared"),  # what was written is repeated, and nothing read
    ],
    ids=["nothing", "too short", "wrong", "an echo"],
)
def test_wrong_answers_are_refused(answer: Callable[[bytes], bytes], why: str) -> None:
    with answering(answer) as link, pytest.raises(OSError, match=why):
        link.establish()


@needs_root
def test_another_user_is_sent_away(listener: ShmListener) -> None:
    def child() -> None:
        os.setuid(65534)
        link = SHM.connect(listener.address, CONFIG)
        with pytest.raises(OSError, match=r"refused to share|reset|pipe"):
            retry(link, link.establish, SOON)
        link.abort()

    with Child(child):
        assert wait_any([listener], SOON)
        with pytest.raises(BlockingIOError):
            listener.accept()
    near, far = connect_pair(SHM, listener.address, CONFIG, SOON, listener)
    assert transfer(near, far, b"our own user", SOON) == b"our own user"
    near.close()
    far.close()


def test_strangers_are_sent_away_one_at_a_time(listener: ShmListener, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crowd of them does not keep who drives from other connections, and those behind them get their turn."""
    with ExitStack() as stack:
        crowd = [stack.enter_context(caller(listener)) for _ in range(5)]
        ours = os.geteuid()
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: ours + 1)
            for number, sock in enumerate(crowd[:-1], start=1):
                with pytest.raises(BlockingIOError):
                    listener.accept()
                assert sock.recv(1) == b"", "this one was sent away"
                crowd[number].setblocking(False)
                with pytest.raises(BlockingIOError):
                    crowd[number].recv(1)
                crowd[number].settimeout(SOON)
                assert wait_any([listener], 0)
        link = listener.accept()
        assert link.remote.endswith(f"#{os.getpid()}")
        link.abort()


def test_a_caller_that_dies_before_its_opening(listener: ShmListener) -> None:
    with Child(lambda: SHM.connect(listener.address, CONFIG)):
        assert wait_any([listener], SOON)
        link = listener.accept()
        with pytest.raises(OSError, match="offered no memory"):
            retry(link, link.establish, SOON)
        link.abort()


def test_an_acceptor_that_dies_before_its_answer() -> None:
    with answering(lambda text: b"") as link, pytest.raises(ConnectionResetError):
        link.establish()


# ---------------------------------------------------------------------- bells and notices


def polled(links: tuple[ShmLink, ShmLink]) -> tuple[ShmLink, ShmLink, socket.socket]:
    """The first is polled; what else the second side may say goes by its socket."""
    near, far = links
    assert near.start_polling() == shm.ORDERED
    return near, far, far._sock


def fill(link: ShmLink, nbytes: int) -> None:
    """Write until there is no room."""
    try:
        while True:
            link.send(bytes(nbytes))
    except BlockingIOError:
        link.wants_write(True)


def write(link: ShmLink, data: bytes) -> None:
    assert link.send(data) == len(data)


needs_order = pytest.mark.skipif(not shm.ORDERED, reason="nothing is polled on this machine")


@needs_order
def test_nobody_rings_while_the_other_side_is_awake(links: tuple[ShmLink, ShmLink]) -> None:
    near, far, _ = polled(links)
    write(far, b"first")  # the bell is up since the connection was made
    assert is_ready(near, SOON)
    near.answer_bell()
    write(far, b"second")
    assert near.ready()
    assert not is_ready(near)
    out = memoryview(bytearray(100))
    assert near.recv_into(out) == 11
    assert not near.arm(), "nothing is there: it may sleep"
    write(far, b"third")
    assert is_ready(near, SOON)
    write(far, b"fourth")
    assert near._sock.recv(100) == b"!", "one bell, until it is answered"
    assert near.arm(), "something is there: it must not sleep"


@needs_order
def test_who_waits_for_room_is_rung_when_there_is_some(links: tuple[ShmLink, ShmLink]) -> None:
    near, far, _ = polled(links)
    fill(near, 60_000)
    assert not near.arm()
    assert not is_ready(near)
    assert far.recv_into(memoryview(bytearray(1 << 20))) > 0
    assert is_ready(near, SOON)
    assert near.ready()
    near.answer_bell()
    assert near.send(b"more") == 4


@needs_order
def test_who_writes_to_the_ring_itself_is_rung_when_there_is_room(links: tuple[ShmLink, ShmLink]) -> None:
    """It finds no room without asking for the bell, and asks before it sleeps."""
    near, far, _ = polled(links)
    assert near.writer is not None
    near.wants_write(True)
    data = memoryview(bytes(1000))
    while near.writer.put(begin(b"", len(data)), data):
        near.after_write()
    assert not near.arm()
    assert not is_ready(near)
    assert far.recv_into(memoryview(bytearray(1 << 20))) > 0
    assert is_ready(near, SOON)
    assert near.ready()


def test_who_waits_for_room_and_does_not_poll_is_rung_too(links: tuple[ShmLink, ShmLink]) -> None:
    """It never calls arm(): the write that finds no room asks for the bell."""
    near, far = links
    fill(near, 60_000)
    assert not is_ready(near)
    assert far.recv_into(memoryview(bytearray(1 << 20))) > 0
    assert is_ready(near, SOON)
    assert near.send(b"more") == 4


def test_too_many_bells_do_not_block(links: tuple[ShmLink, ShmLink]) -> None:
    """A reader that sleeps, is rung, and never answers."""
    near, far = links
    assert near.writer is not None
    for _ in range(2000):
        near.writer.control[BELL] = 1
        near.ring()
    assert transfer(near, far, b"and goes on", SOON) == b"and goes on"


@needs_order
def test_a_bell_of_a_side_that_is_gone(links: tuple[ShmLink, ShmLink]) -> None:
    near, far, _ = polled(links)
    assert near.writer is not None
    far.close()
    assert near.writer.put(begin(b"", 1), memoryview(b"x"))
    near.after_write()  # it rings, and nobody is there: this write has not failed
    with pytest.raises(BrokenPipeError):
        near.send(b"x")
    assert near.recv_into(memoryview(bytearray(1))) == 0


Notice = Callable[[socket.socket], None]


def share(sock: socket.socket, number: int, fd: int, nbytes: int) -> None:
    socket.send_fds(sock, [NOTICE.pack(b"+", number, nbytes)], [fd])
    os.close(fd)


def test_a_segment_that_is_shared_can_be_read_and_not_written(links: tuple[ShmLink, ShmLink]) -> None:
    near, far, _ = polled(links)
    fd = memory(2 * MIB, b"content")
    assert far.share(7, fd, 2 * MIB)
    near.answer_bell()
    view = near.shared[7]
    assert (view.nbytes, bytes(view[:7]), view.readonly) == (2 * MIB, b"content", True)
    os.pwrite(fd, b"changed", 0)
    assert bytes(view[:7]) == b"changed"
    os.close(fd)
    far.unshare(7)
    near.answer_bell()
    assert near.shared == {}
    assert bytes(view[:7]) == b"changed", "who still copies from it may"


def test_notices_in_pieces_between_bells(links: tuple[ShmLink, ShmLink]) -> None:
    near, _, sock = polled(links)
    fd = memory(MIB)
    notice = NOTICE.pack(b"+", 0x2121212121212121, MIB)  # full of what looks like bells
    socket.send_fds(sock, [b"!!" + notice[:3]], [fd])
    os.close(fd)
    near.answer_bell()
    for byte in notice[3:]:
        assert near.shared == {}
        sock.send(bytes([byte]))
        near.answer_bell()
    assert list(near.shared) == [0x2121212121212121]
    sock.send(b"!!!" + NOTICE.pack(b"-", 0x2121212121212121, 0) + b"!")
    near.answer_bell()
    assert near.shared == {}
    assert near.recv_into is not None
    with pytest.raises(BlockingIOError):
        near.recv_into(memoryview(bytearray(1)))


WRONG_NOTICES: dict[str, Notice] = {
    "unknown": lambda sock: sock.sendall(NOTICE.pack(b"?", 1, MIB)),
    "garbage": lambda sock: sock.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"),
    "no descriptor": lambda sock: sock.sendall(NOTICE.pack(b"+", 1, MIB)),
    "another size": lambda sock: share(sock, 1, memory(MIB), 2 * MIB),
    "no size": lambda sock: share(sock, 1, memory(0, b""), 0),
    "not sealed": lambda sock: share(sock, 1, memory(MIB, sealed=False), MIB),
    "no memory": lambda sock: share(sock, 1, os.open(os.devnull, os.O_RDONLY), MIB),
}


@pytest.mark.parametrize("send", WRONG_NOTICES.values(), ids=WRONG_NOTICES)
def test_a_wrong_notice_is_an_error_of_the_next_read(links: tuple[ShmLink, ShmLink], send: Notice) -> None:
    """And of nothing else: bells are answered by whichever thread drives."""
    near, _, sock = polled(links)
    send(sock)
    near.answer_bell()
    assert near.shared == {}
    with pytest.raises(OSError, match=r"corrupt|another size|Invalid argument"):
        near.recv_into(memoryview(bytearray(1)))


def test_descriptors_that_belong_to_nothing_are_not_collected(links: tuple[ShmLink, ShmLink]) -> None:
    near, _, sock = polled(links)
    fd = memory(MIB)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        socket.send_fds(sock, [b"!"], [fd] * (MAX_SHARED // 2))
        near.answer_bell()
    assert len(os.listdir("/proc/self/fd")) <= before + 2 * MAX_SHARED
    with pytest.raises(OSError, match="belong to nothing"):
        near.recv_into(memoryview(bytearray(1)))
    near.abort()
    assert len(os.listdir("/proc/self/fd")) < before
    os.close(fd)


def test_no_more_segments_are_mapped_than_allowed(links: tuple[ShmLink, ShmLink]) -> None:
    near, far, _ = polled(links)
    fd = memory(4096)
    for number in range(MAX_SHARED + 3):
        assert far.share(number, fd, 4096)
        near.answer_bell()
    os.close(fd)
    assert list(near.shared) == list(range(MAX_SHARED))
    with pytest.raises(BlockingIOError):
        near.recv_into(memoryview(bytearray(1)))


def test_a_process_without_descriptors_maps_nothing_and_goes_on(links: tuple[ShmLink, ShmLink]) -> None:
    """The segment is not there for it, and messages from it take the other way."""
    near, far, _ = polled(links)
    fd = memory(4096)
    assert far.share(1, fd, 4096)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(fd)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        near.answer_bell()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert near.shared == {}
    assert far.share(2, fd, 4096)
    near.answer_bell()
    assert list(near.shared) == [2]
    os.close(fd)
    assert transfer(far, near, b"on", SOON) == b"on"


def test_what_cannot_be_shared_now_is_not(links: tuple[ShmLink, ShmLink]) -> None:
    near, far, _ = polled(links)
    fd = memory(4096)
    for _ in range(100_000):
        if not far.share(1, fd, 4096):
            break
    else:
        raise AssertionError("the socket takes everything")
    far.unshare(1)  # which cannot be said either, and is no error
    near.abort()
    assert not far.share(1, fd, 4096)
    far.unshare(1)
    os.close(fd)


# ---------------------------------------------------------------------- a ring that the other side has spoilt


@pytest.mark.parametrize("word", [HEAD, FREED])
def test_a_corrupt_ring_is_an_error_of_the_next_write(links: tuple[ShmLink, ShmLink], word: int) -> None:
    """Who looks whether there is something to do is told that there is; it must not raise there."""
    near, far, _ = polled(links)
    fill(near, SLOT_BYTES)
    assert far.reader is not None
    far.reader.control[word] = (1 << 64) - 1
    assert near.ready()
    assert near.arm()
    with pytest.raises(OSError, match="corrupt"):
        near.send(bytes(SLOT_BYTES))


def test_a_closed_link_has_nothing_to_do(links: tuple[ShmLink, ShmLink]) -> None:
    """It may be closed by what another connection brought, between being listed and being looked at."""
    near, far, _ = polled(links)
    write(far, b"something")
    near.wants_write(True)
    assert near.ready()
    near.close()
    assert not near.ready()
    assert not near.arm()


def test_cells_at_their_end_do_not_keep_it_from_closing(links: tuple[ShmLink, ShmLink]) -> None:
    near, far = links
    for cell in range(CELLS):
        far.their_cells[cell] = (1 << 64) - 1
    near.close()
    assert near.fileno() == -1
    assert far.their_cells.tolist() == [0] * CELLS


# ---------------------------------------------------------------------- processes

MODES = ["polled", "as it is", "unordered"]
CORES = {"free": ((0, 1), (0, 1)), "together": ((0,), (0,))}


class Side:
    """One process's use of a link: sleeps only on its descriptor, and never for longer than a lost bell would make
    it."""

    def __init__(self, link: ShmLink, mode: str, rng: random.Random) -> None:
        self.link = link
        self.polled = mode == "polled" and link.start_polling()
        self.rng = rng
        self._poll = select.poll()
        self._poll.register(link.fileno(), link.poll_mask())

    def sleep(self) -> None:
        link = self.link
        if self.polled:
            for _ in range(self.rng.choice([0, 0, 3, 100])):
                if link.ready():
                    return
            if link.arm():
                return
        assert self._poll.poll(scaled(10) * 1000), f"nobody rang: {link}"
        if self.polled:
            link.answer_bell()

    def send(self, data: memoryview) -> None:
        link, writer = self.link, self.link.writer
        assert writer is not None
        if self.polled and len(data) < 2000 and writer.put(begin(b"", len(data)), data):
            link.after_write()
            return
        while data:
            try:
                data = data[link.send(data) :]
            except BlockingIOError:
                link.wants_write(True)
                self.sleep()
        link.wants_write(False)

    def recv(self, view: memoryview) -> None:
        while view:
            try:
                got = self.link.recv_into(view[: self.rng.randrange(1, len(view) + 1)])
            except BlockingIOError:
                self.sleep()
            else:
                assert got, "the stream ended"
                view = view[got:]


BLOCK = random.Random(2).randbytes(512 * KIB)


def exchange(side: Side, seed: int, sends_first: bool) -> None:
    """Ping-pong of one to many messages each way, so that both sides fall asleep at every point of the way."""
    rng = random.Random(seed)
    out = memoryview(bytearray(len(BLOCK)))
    for turn in range(400):
        sizes = [rng.choice([1, 64, 1000, 70_000, rng.randrange(1, 400_000)]) for _ in range(rng.choice([1, 1, 1, 5]))]
        for nbytes in sizes:
            at = rng.randrange(len(BLOCK) - nbytes)
            data = memoryview(BLOCK)[at : at + nbytes]
            if (turn % 2 == 0) == sends_first:
                side.send(data)
            else:
                side.recv(out[:nbytes])
                assert zlib.crc32(out[:nbytes]) == zlib.crc32(data), f"turn {turn} of seed {seed}"


def pin(cores: tuple[int, ...]) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {allowed[core % len(allowed)] for core in cores})


@pytest.mark.parametrize("cores", CORES.values(), ids=CORES)
@pytest.mark.parametrize("mode", MODES)
def test_two_processes_that_fall_asleep_and_wake_each_other(
    listener: ShmListener, mode: str, cores: tuple[tuple[int, ...], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bell that is lost is a side that sleeps on: it fails after its ten seconds."""
    if mode == "unordered":
        monkeypatch.setattr(shm, "ORDERED", False)
    seed = random.randrange(2**32)
    print(f"seed {seed}")

    def child() -> None:
        pin(cores[0])
        link = SHM.connect(listener.address, CONFIG)
        assert isinstance(link, ShmLink)
        retry(link, link.establish, SOON)
        exchange(Side(link, mode, random.Random(seed)), seed, True)
        link.close()

    before = os.sched_getaffinity(0)
    with Child(child):
        assert wait_any([listener], SOON)
        link = listener.accept()
        assert isinstance(link, ShmLink)
        retry(link, link.establish, SOON)
        pin(cores[1])
        try:
            exchange(Side(link, mode, random.Random(seed + 1)), seed, False)
        finally:
            os.sched_setaffinity(0, before)
            link.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_process_that_is_killed_is_noticed_at_once(
    listener: ShmListener, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode == "unordered":
        monkeypatch.setattr(shm, "ORDERED", False)

    def last_words() -> None:
        link = SHM.connect(listener.address, CONFIG)
        retry(link, link.establish, SOON)
        link.send(b"last words")
        os.kill(os.getpid(), 9)

    before = shm_names()
    with Child(last_words) as child:
        assert wait_any([listener], SOON)
        link = listener.accept()
        assert isinstance(link, ShmLink)
        retry(link, link.establish, SOON)
        side = Side(link, mode, random.Random(1))
        out = memoryview(bytearray(10))
        side.recv(out)
        assert bytes(out) == b"last words", "what was sent still arrives"
        began = monotonic()
        with pytest.raises(AssertionError, match="the stream ended"):
            side.recv(out)
        assert monotonic() - began < scaled(1)
        with pytest.raises(BrokenPipeError):
            link.send(b"x")
        link.close()
        child.killed = True
    assert shm_names() == before


def test_a_forked_child_does_not_keep_the_connection(links: tuple[ShmLink, ShmLink]) -> None:
    near, far = links
    stay, go = os.pipe()

    def child() -> None:
        os.close(go)
        os.read(stay, 1)
        near.close()  # as the collector would, at any time

    with Child(child):
        os.close(stay)
        assert transfer(near, far, b"x", SOON) == b"x"
        near._sock.close()  # as the end of the process would
        near._epoll.close()
        assert is_ready(far, SOON)
        assert far.recv_into(memoryview(bytearray(1))) == 0
        os.close(go)
    assert near._segment is not None
    assert near.writer is not None
    assert near.reader is not None
    near.writer.release()
    near.reader.release()
    near._segment.close()


def test_a_process_with_a_single_spare_descriptor_maps_nothing_and_goes_on(links: tuple[ShmLink, ShmLink]) -> None:
    """The one that comes takes it, and Python's mapping makes another: that ended the conversation."""
    near, far, _ = polled(links)
    fd = memory(MIB)
    assert far.share(3, fd, MIB)
    os.close(fd)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, hard))
    try:
        near.answer_bell()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert near.shared == {}
    fd = memory(MIB)
    assert far.share(4, fd, MIB)
    os.close(fd)
    near.answer_bell()
    assert list(near.shared) == [4]
    assert transfer(far, near, b"on", SOON) == b"on"
