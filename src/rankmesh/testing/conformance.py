"""What every transport must do. Subclass LinkConformance in a test module, name an address, and run pytest:

    class TestMyTransport(LinkConformance):
        address = "my://127.0.0.1:0"

Each test holds one promise of transport/base.py against a real connection. Random data comes from a seed that is
printed; set `seed` to repeat a failure.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from random import Random, SystemRandom

from rankmesh.config import KIB, MIB, Config
from rankmesh.testing.pump import NOTHING, Pump, connect_pair, establish, is_ready, retry, run, transfer, wait_any
from rankmesh.transport import Address, Link, Listener, Transport, transport_for

#: No transport may swallow more than this while nobody reads: socket buffers are far smaller.
PIPE_LIMIT = 64 * MIB
#: Seconds in which a link that is full must stay so, before a test believes it.
QUIET = 0.05


class LinkConformance:
    """The suite. A subclass sets `address`, and whatever else differs."""

    #: Where to listen: port 0 or the empty name, so that tests can run side by side.
    address: str
    config: Config = Config()
    #: Seconds that any wait may take.
    timeout: float = 10.0
    #: How much the large transfer moves.
    bulk_bytes: int = 32 * MIB
    seed: int | None = None

    def transport(self) -> Transport:
        return transport_for(Address.parse(self.address))

    @contextmanager
    def listener(self) -> Iterator[Listener]:
        listener = self.transport().listen(Address.parse(self.address), self.config)
        try:
            yield listener
        finally:
            listener.close()

    @contextmanager
    def pair(self) -> Iterator[tuple[Link, Link]]:
        links = connect_pair(self.transport(), Address.parse(self.address), self.config, self.timeout)
        try:
            yield links
        finally:
            for link in links:
                link.close()

    def rng(self) -> Random:
        seed = SystemRandom().randrange(2**32) if self.seed is None else self.seed
        print(f"seed = {seed}")
        return Random(seed)

    def fill(self, link: Link, rng: Random) -> bytes:
        """Send until the link blocks and is not ready for a while, and return what it took.

        The kernel moves bytes on meanwhile, and may take a few more before it says so (TCP_NOTSENT_LOWAT): that a full
        link blocks is proved in here, and cannot be proved again afterwards.
        """
        taken = bytearray()
        deadline = time.monotonic() + self.timeout
        link.wants_write(True)
        for cut in cycle((0, 100)):
            data = memoryview(rng.randbytes(64 * KIB))
            try:
                taken += data[: link.sendmsg([data[:cut], data[cut:]]) if cut else link.send(data)]
            except BlockingIOError:
                if not is_ready(link, QUIET):
                    break
            assert len(taken) < PIPE_LIMIT, "the link takes bytes without bound while nobody reads them"
            assert time.monotonic() < deadline, "the link is ready, but takes nothing"
        link.wants_write(False)
        return bytes(taken)

    def read_to_end(self, link: Link) -> bytes:
        arrived, view = bytearray(), memoryview(bytearray(64 * KIB))
        while count := retry(link, lambda: link.recv_into(view), self.timeout):
            arrived += view[:count]
        return bytes(arrived)

    # -- bytes --------------------------------------------------------------------------------------------------------

    def test_a_link_describes_itself(self) -> None:
        with self.pair() as links:
            for link in links:
                assert isinstance(link, Link)
                assert link.channels >= 1
                assert isinstance(link.drained_on_short_read, bool)
                assert link.loopback is True
                assert link.fileno() >= 0
                assert link.remote in repr(link)
            near, far = links
            assert near.local == far.remote
            assert near.remote == far.local

    def test_bytes_arrive_in_order_both_ways(self) -> None:
        rng = self.rng()
        with self.pair() as (near, far):
            for size in (1, 2, 1000, 65_537):
                there, back = rng.randbytes(size), rng.randbytes(size)
                assert transfer(near, far, there, self.timeout) == there
                assert transfer(far, near, back, self.timeout) == back

    def test_a_reader_may_take_what_it_likes(self) -> None:
        rng = self.rng()
        data = rng.randbytes(5000)
        arrived = memoryview(bytearray(len(data)))
        with self.pair() as (near, far):
            few = iter(lambda: rng.randint(1, 7), 0)
            run([Pump(near, outgoing=data), Pump(far, incoming=arrived, chunks=few)], self.timeout)
        assert arrived == data

    def test_many_buffers_of_one_call(self) -> None:
        """More than the kernel takes at once (IOV_MAX = 1024), some empty: a prefix is taken, in order."""
        rng = self.rng()
        sizes = [*(rng.choice((0, 1, 40, 700)) for _ in range(3000)), *[0] * 1100, 300_000]
        buffers = [rng.randbytes(size) for size in sizes]
        data = b"".join(buffers)
        arrived = memoryview(bytearray(len(data)))
        with self.pair() as (near, far):
            reader = Pump(far, incoming=arrived)
            while any(buffers):
                try:
                    taken = near.sendmsg(buffers)
                except BlockingIOError:
                    reader.step()
                    continue
                assert taken > 0
                while taken > 0:
                    buffers[0], taken = buffers[0][taken:], taken - len(buffers[0])
                    if not buffers[0]:
                        del buffers[0]
            run([Pump(near), reader], self.timeout)
        assert arrived == data

    def test_empty_buffers_do_nothing(self) -> None:
        with self.pair() as (near, far):
            assert near.send(b"") == 0
            assert near.sendmsg([]) == 0
            assert near.sendmsg([b"", b""]) == 0
            assert transfer(near, far, b"x", self.timeout) == b"x"
            run([Pump(near, outgoing=b"y")], self.timeout)
            assert is_ready(far, self.timeout)
            assert far.recv_into(memoryview(bytearray(0))) == 0
            assert self.receive(far, 1) == b"y"

    def test_a_buffer_may_change_as_soon_as_send_returns(self) -> None:
        rng = self.rng()
        with self.pair() as (near, far):
            expected = bytearray()
            for _ in range(8):
                buffer = bytearray(rng.randbytes(30_000))
                for take in (near.send, lambda data: near.sendmsg([data[:10], data[10:]])):
                    try:
                        expected += buffer[: take(memoryview(buffer))]
                    except BlockingIOError:
                        pass
                    buffer[:] = bytes(len(buffer))
            run([Pump(near), Pump(far, incoming=(arrived := memoryview(bytearray(len(expected)))))], self.timeout)
            assert arrived == expected

    def test_a_large_transfer_in_random_pieces(self) -> None:
        rng = self.rng()
        data = memoryview(rng.randbytes(self.bulk_bytes))
        arrived = memoryview(bytearray(self.bulk_bytes))
        sizes = [1, 40, 4000, 70_000, 300_000, 2_000_000]
        with self.pair() as (near, far):
            source = Pump(near, outgoing=data, chunks=iter(lambda: rng.randint(1, rng.choice(sizes)), 0))
            target = Pump(far, incoming=arrived, chunks=iter(lambda: rng.randint(1, rng.choice(sizes)), 0))
            run([source, target], self.timeout * 6)
        assert hashlib.sha256(arrived).digest() == hashlib.sha256(data).digest()

    def test_both_directions_at_once_in_one_thread(self) -> None:
        rng = self.rng()
        there, back = (memoryview(rng.randbytes(self.bulk_bytes // 8)) for _ in range(2))
        here, away = (memoryview(bytearray(self.bulk_bytes // 8)) for _ in range(2))
        with self.pair() as (near, far):
            run([Pump(near, outgoing=there, incoming=here), Pump(far, outgoing=back, incoming=away)], self.timeout * 3)
        assert (away, here) == (there, back)

    def test_sender_and_receiver_in_different_threads(self) -> None:
        """Each side waits for its own readiness only: a wake-up that is lost between threads ends in a deadline."""
        rng = self.rng()
        data = memoryview(rng.randbytes(self.bulk_bytes // 4))
        arrived = memoryview(bytearray(len(data)))
        sizes = [rng.choice((1, 100, 5000, 100_000)) for _ in range(1000)]
        with self.pair() as (near, far), ThreadPoolExecutor(2) as threads:
            # The sender waits for an answer, and so goes on serving a link that still holds the tail.
            sender = Pump(near, outgoing=data, incoming=memoryview(bytearray(1)), chunks=cycle(sizes))
            source = threads.submit(run, [sender], self.timeout * 3)
            target = threads.submit(self.receive_and_answer, far, arrived, sizes[::-1])
            source.result()
            target.result()
        assert arrived == data

    # -- readiness ----------------------------------------------------------------------------------------------------

    def test_an_idle_link_blocks_and_is_not_ready(self) -> None:
        with self.pair() as (near, far):
            for link in (near, far):
                assert self.blocks(partial(link.recv_into, memoryview(bytearray(10))))
                assert not is_ready(link)

    def test_a_link_is_ready_until_it_is_read_empty(self) -> None:
        with self.pair() as (near, far):
            run([Pump(near, outgoing=b"0123456789")], self.timeout)
            assert is_ready(far, self.timeout)
            first = self.receive(far, 1)
            assert not far.drained_on_short_read or is_ready(far), "not ready, although there is more to read"
            assert first + self.receive(far, 2) == b"012"
            while not self.blocks(lambda: far.recv_into(memoryview(bytearray(100)))):
                pass
            assert not is_ready(far), "ready, although there is nothing to read"

    def test_a_full_link_blocks_and_is_ready_when_there_is_room(self) -> None:
        rng = self.rng()
        with self.pair() as (near, far):
            taken = self.fill(near, rng)
            arrived = memoryview(bytearray(len(taken)))
            # Not what was refused before: other bytes, as when a control frame overtakes bulk data.
            run([Pump(near, outgoing=b"other"), Pump(far, incoming=arrived)], self.timeout)
            assert arrived == taken
            assert self.receive(far, 5) == b"other"
            near.wants_write(True)
            assert is_ready(near, self.timeout)
            near.wants_write(False)
            assert not is_ready(near)

    def test_what_was_taken_goes_out_without_further_sends(self) -> None:
        """A link that keeps bytes of its own asks to be served until they are out, although nobody wants to write."""
        with self.pair() as (near, far):
            taken = self.fill(near, self.rng())
            reader = Pump(far, incoming=memoryview(bytearray(len(taken))))
            while not reader.done:
                if is_ready(near):
                    near.recv_into(NOTHING)
                elif not reader.step():
                    assert wait_any([near, far], self.timeout), "the rest does not come"
            assert reader.incoming == taken

    # -- the end ------------------------------------------------------------------------------------------------------

    def test_close_delivers_what_was_sent_and_then_ends(self) -> None:
        with self.pair() as (near, far):
            taken = self.fill(near, self.rng())
            near.close()
            assert self.read_to_end(far) == taken
            assert far.recv_into(memoryview(bytearray(10))) == 0
            assert is_ready(far)

    def test_close_delivers_what_was_sent_although_bytes_are_unread_here(self) -> None:
        """A socket that is closed with bytes unread resets the connection, and its send queue is lost."""
        with self.pair() as (near, far):
            taken = self.fill(near, self.rng())
            run([Pump(far, outgoing=b"never read")], self.timeout)
            assert is_ready(near, self.timeout)
            near.close()
            assert self.read_to_end(far) == taken

    def test_shutdown_write_ends_one_direction(self) -> None:
        rng = self.rng()
        answer = rng.randbytes(100_000)
        arrived = memoryview(bytearray(len(answer) - 1))
        with self.pair() as (near, far):
            run([Pump(near, outgoing=b"question"), Pump(far, outgoing=answer[:20_000])], self.timeout)
            first = self.receive(near, 1)
            near.shutdown_write()
            assert self.read_to_end(far) == b"question"
            assert isinstance(self.failure(near, lambda: near.send(b"more")), BrokenPipeError)
            run([Pump(far, outgoing=answer[20_000:]), Pump(near, incoming=arrived)], self.timeout)
            far.close()
            assert self.read_to_end(near) == b""
        assert first + bytes(arrived) == answer

    def test_abort_breaks_the_other_side(self) -> None:
        with self.pair() as (near, far):
            near.abort()
            view = memoryview(bytearray(10))
            assert isinstance(self.failure(far, lambda: far.recv_into(view)), ConnectionError)
            assert isinstance(self.failure(far, lambda: far.send(b"x")), ConnectionError)

    def test_sending_to_a_closed_side_fails(self) -> None:
        with self.pair() as (near, far):
            near.close()
            far.wants_write(True)
            assert isinstance(self.failure(far, lambda: far.send(b"x" * 1000)), ConnectionError)

    def test_a_closed_link_stays_closed(self) -> None:
        for first in ("close", "abort"):
            with self.pair() as links:
                for link in links:
                    getattr(link, first)()
                    link.close()
                    link.abort()
                    assert link.fileno() == -1
                    for operation in (link.send, link.recv_into):
                        error = self.failure(link, partial(operation, memoryview(bytearray(1))))
                        assert not isinstance(error, ConnectionError), "closed by this side is not broken by the other"

    def test_descriptors_are_freed(self) -> None:
        with self.pair():
            pass  # what is opened once for all
        before = os.listdir("/proc/self/fd")
        for end in ("close", "abort"):
            for _ in range(10):
                with self.pair() as (near, far):
                    near.send(b"unread")
                    getattr(far, end)()
        assert os.listdir("/proc/self/fd") == before

    # -- listening and connecting -------------------------------------------------------------------------------------

    def test_a_listener_is_ready_while_connections_wait(self) -> None:
        transport = self.transport()
        with self.listener() as listener:
            assert not wait_any([listener], 0)
            assert self.blocks(listener.accept)
            near = [transport.connect(transport.resolve(listener.address)[0], self.config) for _ in range(3)]
            far = []
            for _ in near:
                assert wait_any([listener], self.timeout)
                far.append(listener.accept())
            assert self.blocks(listener.accept)
            establish([*near, *far], self.timeout)
            assert {link.local for link in near} == {link.remote for link in far}
            for link in (*near, *far):
                link.close()

    def test_nobody_listens(self) -> None:
        with self.listener() as listener:
            address = listener.address
        self.assert_refused(address)

    def test_a_closed_listener_refuses(self) -> None:
        transport = self.transport()
        with self.listener() as listener:
            waiting = transport.connect(listener.address, self.config)
            try:
                listener.close()
                listener.close()
                assert listener.fileno() == -1
                self.assert_refused(listener.address)
                error = self.failure(waiting, lambda: self.establish_and_read(waiting))
                assert isinstance(error, ConnectionError)
            finally:
                waiting.abort()

    # -- steps --------------------------------------------------------------------------------------------------------

    def receive(self, link: Link, nbytes: int) -> bytes:
        arrived = bytearray(nbytes)
        run([Pump(link, incoming=memoryview(arrived))], self.timeout)
        return bytes(arrived)

    def receive_and_answer(self, link: Link, view: memoryview, sizes: list[int]) -> None:
        run([Pump(link, incoming=view, chunks=cycle(sizes))], self.timeout * 3)
        run([Pump(link, outgoing=b"!")], self.timeout)

    def blocks(self, operation: Callable[[], object]) -> bool:
        try:
            operation()
        except BlockingIOError:
            return True
        return False

    def failure(self, link: Link, operation: Callable[[], int]) -> OSError:
        """Repeat an operation until it fails as a broken connection does, and return the error."""
        try:
            while True:
                result = retry(link, operation, self.timeout)
                assert result, f"{link} came to an orderly end, but should have failed"
        except OSError as error:
            return error

    def establish_and_read(self, link: Link) -> int:
        link.establish()
        return link.recv_into(memoryview(bytearray(1)))

    def assert_refused(self, address: Address) -> None:
        try:
            link = self.transport().connect(address, self.config)
        except OSError:
            return
        error = self.failure(link, lambda: self.establish_and_read(link))
        link.abort()
        assert isinstance(error, ConnectionRefusedError)
