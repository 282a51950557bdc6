"""After fork(): the child's copies are dead, the parent and its peers notice nothing."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable

import numpy as np
import pytest

from peers import SOON, Call, Medium, Pair, blank, open_pair, pattern, router_of
from rankmesh import ClosedError, Endpoint
from rankmesh.config import MIB
from timing import scaled, wait_until

# Python 3.12 warns of every fork() in a process with threads, and here that is what is tested.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


def in_child(body: Callable[[], None]) -> None:
    """Run `body` in a forked child; fail with its traceback if it raises."""
    with tempfile.TemporaryFile() as report:
        pid = os.fork()
        if pid == 0:
            code = 0
            try:
                body()
            except BaseException:  # noqa: BLE001  # reported to the parent, and the child must end here
                code = 1
                os.write(report.fileno(), traceback.format_exc().encode())
            finally:
                sys.stdout.flush()
                os._exit(code)
        ended: list[int] = []

        def reaped() -> bool:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                ended.append(status)
            return bool(found)

        try:
            wait_until(reaped, 20, "the end of the child")
        except AssertionError:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            raise
        report.seek(0)
        assert ended == [0], report.read().decode()


def check_traffic(pair: Pair) -> None:
    for here, there in ((pair.there, pair.back), (pair.back, pair.there)):
        for nbytes in (10, MIB):
            out = blank(nbytes)
            receive = there.irecv(out, tag=5)
            here.send(pattern(nbytes, 3), tag=5, timeout=SOON)
            receive.wait(SOON)
            assert np.array_equal(out, pattern(nbytes, 3))


def test_child_gets_closed_error_from_everything(pair: Pair) -> None:
    receive = pair.there.irecv(bytearray(1), tag=1)

    def child() -> None:
        out = bytearray(1)
        for call in (
            lambda: pair.there.send(b"x"),
            lambda: pair.there.send(bytes(MIB)),
            lambda: pair.there.isend(b"x"),
            lambda: pair.there.recv(out),
            lambda: pair.there.irecv(out),
            lambda: pair.there.send_object({}),
            pair.there.recv_object,
            pair.there.probe,
            pair.there.iprobe,
            pair.there.barrier,
            lambda: pair.left.recv(out),
            lambda: pair.left.connect(pair.right.address),
            pair.left.accept,
            pair.left.close,
            pair.left.abort,
            receive.wait,
            receive.cancel,
        ):
            with pytest.raises(ClosedError, match="fork"):
                call()

    in_child(child)
    check_traffic(pair)
    pair.back.send(b"x", tag=1)
    receive.wait(SOON)


def test_end_of_the_child_is_not_seen(pair: Pair) -> None:
    """Its exit does not touch the connections."""

    for _ in range(3):
        in_child(lambda: None)
        check_traffic(pair)


def test_fork_while_others_wait_and_send(pair: Pair) -> None:
    """The lock may be held by a thread that the child does not have."""
    stop = threading.Event()

    def traffic() -> int:
        out, count = bytearray(1000), 0
        while not stop.is_set():
            pair.there.send(bytes(1000), tag=1, timeout=SOON)
            pair.back.recv(out, tag=1, timeout=SOON)
            count += 1
        return count

    waiting = Call(pair.there.recv, bytearray(1), tag=2, timeout=SOON)
    busy = Call(traffic)

    def child() -> None:
        with pytest.raises(ClosedError):
            pair.there.send(b"x")

    try:
        for _ in range(5):
            in_child(child)
    finally:
        stop.set()
    assert busy.result() > 0
    pair.back.send(b"x", tag=2)
    waiting.result()
    check_traffic(pair)


def test_child_may_make_endpoints_of_its_own(tcp: Medium) -> None:
    """Descriptors that the child opens are not closed by what it inherited."""
    with open_pair(tcp) as pair:

        def child() -> None:
            with open_pair(tcp) as own:
                out = bytearray(1)
                own.there.send(b"x", tag=1)
                own.back.recv(out, tag=1, timeout=scaled(5))
                assert out == b"x"

        in_child(child)
        check_traffic(pair)


def test_numbers_of_inherited_descriptors_are_not_used_again(tcp: Medium) -> None:
    """The collector closes inherited sockets whenever it likes: their numbers must not belong to others by then."""
    with open_pair(tcp) as pair:

        def child() -> None:
            opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(40)]
            for peer in (pair.there, pair.back):
                link = router_of(peer).link
                assert link is not None
                link.close()  # as the collector would
            for fd in opened:
                os.fstat(fd)

        in_child(child)
        check_traffic(pair)


def test_a_child_of_the_child_keeps_what_that_has_opened(pair: Pair) -> None:
    """Found: a number that the child had closed, and used for a file of its own, was given up again in its child."""

    def child() -> None:
        for endpoint in (pair.left, pair.right):  # as daemons close all that they have inherited
            os.close(endpoint.hub.engine.background.descriptor)
        opened = [os.open("/", os.O_RDONLY) for _ in range(100)]

        def grandchild() -> None:
            assert all(stat.S_ISDIR(os.fstat(fd).st_mode) for fd in opened)

        in_child(grandchild)

    in_child(child)
    check_traffic(pair)


def test_parent_that_ends_is_noticed_although_a_child_lives_on(tcp: Medium) -> None:
    """The child holds no copy of the parent's sockets."""
    with Endpoint(tcp.address, name="right") as right:
        left = Endpoint(tcp.address, name="left")
        left.connect(right.address, timeout=SOON)
        peer = right.accept(timeout=SOON)
        go_on, done = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(done)
            os.read(go_on, 1)
            os._exit(0)
        try:
            left.abort()
            wait_until(lambda: not peer.connected, 5, "the end of the parent's side")
        finally:
            os.close(done)
            os.close(go_on)
            os.waitpid(pid, 0)
