"""Cancelled and timed-out operations, at every stage: the buffer is the caller's again, and the stream goes on.

The link of the sender is stalled where the stage demands it, so that each stage is reached for sure.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from peers import BRIEFLY, FAULTY, SOON, Call, Pair, blank, is_blank, open_pair, pattern, router_of
from rankmesh import CancelledError, Config, DeadlineError, TransferAborted, Work
from rankmesh.config import KIB, MIB
from rankmesh.testing.faults import FaultLink, FaultTransport
from rankmesh.wire.header import HEADER_BYTES
from timing import wait_until

EAGER = Config().eager_bytes
LARGE = 4 * MIB

#: How an operation is given up, and what its Work raises then.
GiveUp = Callable[[Work[Any]], None]


def cancel(work: Work[Any]) -> None:
    assert work.cancel() is True
    with pytest.raises(CancelledError):
        work.result()
    assert work.cancel() is False


def run_out(work: Work[Any]) -> None:
    with pytest.raises(DeadlineError):
        work.wait(timeout=BRIEFLY)


@pytest.fixture(params=[cancel, run_out], ids=["cancel", "timeout"])
def give_up(request: pytest.FixtureRequest) -> GiveUp:
    way: GiveUp = request.param
    return way


@pytest.fixture
def faulty_pair(faults: FaultTransport) -> Iterator[Pair]:
    with open_pair(FAULTY) as pair:
        yield pair
        check_nothing_remains(pair)


def sender_link(faults: FaultTransport) -> FaultLink:
    return next(link for link in faults.links if not link.accepted)


def stall_after(link: FaultLink, nbytes: int) -> None:
    link.stall(after_bytes=link.sent + nbytes)


def wait_stalled(link: FaultLink) -> None:
    wait_until(lambda: "stalled" in repr(link), 10, "the stall")


def check_nothing_remains(pair: Pair) -> None:
    """No transfer, receive or message is left on either side."""
    for endpoint, peer in ((pair.left, pair.there), (pair.right, pair.back)):
        router = router_of(peer)
        for half in (router.outbound, router.inbound):
            wait_until(lambda half=half: half.idle, 10, f"{endpoint} to be idle")  # type: ignore[misc]
        assert repr(endpoint.hub.matcher) == "<Matcher 0 receives posted, 0 messages waiting>"


def check_stream_goes_on(pair: Pair, tag: int) -> None:
    """Small and large messages, both ways, on the same tag."""
    for here, there in ((pair.there, pair.back), (pair.back, pair.there)):
        for nbytes in (10, EAGER + 1):
            out = blank(nbytes)
            send = here.isend(pattern(nbytes, 77), tag=tag)
            there.recv(out, tag=tag, timeout=SOON)
            send.wait(SOON)
            assert np.array_equal(out, pattern(nbytes, 77))


# ---------------------------------------------------------------------- receives


@pytest.mark.parametrize("nbytes", [10, EAGER + 1])
def test_receive_given_up_before_its_message_comes(pair: Pair, give_up: GiveUp, nbytes: int) -> None:
    out, later = blank(nbytes), blank(nbytes)
    give_up(pair.back.irecv(out, tag=1))
    send = pair.there.isend(pattern(nbytes), tag=1)
    pair.back.recv(later, tag=1, timeout=SOON)
    send.wait(SOON)
    assert np.array_equal(later, pattern(nbytes)), "the message went to the receive that was given up"
    assert is_blank(out)
    check_stream_goes_on(pair, tag=1)
    check_nothing_remains(pair)


@pytest.mark.parametrize("nbytes", [EAGER, LARGE], ids=["eager", "large"])
def test_receive_given_up_in_the_middle_of_its_message(
    faults: FaultTransport, faulty_pair: Pair, give_up: GiveUp, nbytes: int
) -> None:
    pair, link = faulty_pair, sender_link(faults)
    data, out = pattern(nbytes), blank(nbytes)
    stall_after(link, 2 * HEADER_BYTES + 20_000)
    receive = pair.back.irecv(out, tag=1)
    send = pair.there.isend(data, tag=1)
    wait_stalled(link)
    wait_until(lambda: out[0] == data[0] and not is_blank(out[:10_000]), 10, "the first bytes")
    give_up(receive)
    out[:] = 0xA5
    link.resume()
    send.wait(SOON)
    check_stream_goes_on(pair, tag=1)
    assert is_blank(out), "a buffer was written to after its receive was given up"


def test_object_receive_given_up_in_the_middle(faults: FaultTransport, faulty_pair: Pair) -> None:
    pair, link = faulty_pair, sender_link(faults)
    stall_after(link, 2 * HEADER_BYTES + 20_000)
    sending = Call(pair.there.send_object, pattern(LARGE), tag=1, timeout=SOON)
    wait_until(lambda: pair.back.iprobe(tag=1) is not None, 10)
    with pytest.raises(DeadlineError):
        pair.back.recv_object(tag=1, timeout=BRIEFLY)
    link.resume()
    sending.result()
    check_stream_goes_on(pair, tag=1)


# ---------------------------------------------------------------------- sends


@pytest.mark.parametrize("nbytes", [EAGER + 1, LARGE])
def test_send_given_up_while_announced(pair: Pair, give_up: GiveUp, nbytes: int) -> None:
    data = pattern(nbytes)
    send = pair.there.isend(data, tag=1)
    pair.back.probe(tag=1, timeout=SOON)
    give_up(send)
    data[:] = 0
    wait_until(lambda: pair.back.iprobe(tag=1) is None, 10, "the withdrawal")
    check_stream_goes_on(pair, tag=1)
    check_nothing_remains(pair)


def test_large_send_given_up_in_the_middle_of_its_data(
    faults: FaultTransport, faulty_pair: Pair, give_up: GiveUp
) -> None:
    pair, link = faulty_pair, sender_link(faults)
    data, out = pattern(LARGE), blank(LARGE)
    stall_after(link, 2 * HEADER_BYTES + 1_500_000)
    receive = pair.back.irecv(out, tag=1)
    send = pair.there.isend(data, tag=1)
    wait_stalled(link)
    give_up(send)
    data[:] = 0
    link.resume()
    with pytest.raises(TransferAborted) as caught:
        receive.result(SOON)
    assert (caught.value.op, caught.value.tag) == ("recv from", 1)
    assert "left" in caught.value.peer
    assert caught.value.reason
    arrived = int(str(caught.value).partition("after ")[2].split()[0])
    assert 1_000_000 <= arrived < LARGE
    assert np.array_equal(out[:arrived], pattern(LARGE)[:arrived]), "bytes were sent from memory given back"
    assert is_blank(out[arrived:])
    check_stream_goes_on(pair, tag=1)


def test_small_send_given_up_in_the_middle_arrives_whole(
    faults: FaultTransport, faulty_pair: Pair, give_up: GiveUp
) -> None:
    """A frame that has begun is finished, from a copy."""
    pair, link = faulty_pair, sender_link(faults)
    data, out = pattern(EAGER), blank(EAGER)
    stall_after(link, 20_000)
    send = pair.there.isend(data, tag=1)
    wait_stalled(link)
    give_up(send)
    data[:] = 0
    link.resume()
    pair.back.recv(out, tag=1, timeout=SOON)
    assert np.array_equal(out, pattern(EAGER))
    check_stream_goes_on(pair, tag=1)


def test_small_sends_given_up_before_they_began_never_arrive(
    faults: FaultTransport, faulty_pair: Pair, give_up: GiveUp
) -> None:
    """Behind a frame that is stuck; their credit comes back."""
    pair, link = faulty_pair, sender_link(faults)
    stall_after(link, 20_000)
    first = pair.there.isend(pattern(EAGER, 1), tag=1)
    behind = [(data, pair.there.isend(data, tag=1)) for data in (pattern(EAGER, 2), pattern(100, 3))]
    last = pair.there.isend(b"last", tag=1)
    wait_stalled(link)
    credit = router_of(pair.there).outbound._credit
    used = credit.used
    for data, send in behind:
        give_up(send)
        data[:] = 0
    assert credit.used < used
    link.resume()
    out = blank(EAGER)
    assert pair.back.recv(out, tag=1, timeout=SOON).nbytes == EAGER
    assert np.array_equal(out, pattern(EAGER, 1))
    assert pair.back.recv(out, tag=1, timeout=SOON).nbytes == 4
    for send in (first, last):
        send.wait(SOON)
    check_stream_goes_on(pair, tag=1)


# ---------------------------------------------------------------------- both at once


@pytest.mark.parametrize("nbytes", [3 * EAGER, 100], ids=["large next", "small next"])
def test_withdrawal_that_crosses_a_grant_posts_the_receive_anew(
    faults: FaultTransport, faulty_pair: Pair, nbytes: int
) -> None:
    pair, link = faulty_pair, sender_link(faults)
    send, out = pair.there.isend(pattern(2 * EAGER, 1), tag=1), blank(3 * EAGER)
    pair.back.probe(tag=1, timeout=SOON)
    link.stall()
    first = pair.back.irecv(out, tag=1)  # grants; the sender cannot hear it
    second = pair.back.irecv(blank(4), tag=1)
    assert send.cancel()
    link.resume()
    assert not first.done()
    sent = pair.there.isend(pattern(nbytes, 2), tag=1)
    assert first.result(SOON).nbytes == nbytes
    assert np.array_equal(out[:nbytes], pattern(nbytes, 2))
    assert is_blank(out[nbytes:])
    pair.there.send(b"next", tag=1)
    assert second.result(SOON).nbytes == 4, "the receive lost its place"
    sent.wait(SOON)
    check_stream_goes_on(pair, tag=1)


@pytest.mark.parametrize("size", [10, 50 * KIB, 300 * KIB])
def test_object_receive_whose_message_was_withdrawn_takes_one_of_another_size(
    faults: FaultTransport, faulty_pair: Pair, size: int
) -> None:
    pair, link = faulty_pair, sender_link(faults)
    sending = Call(pair.there.send_object, pattern(2 * EAGER), tag=1, timeout=5 * BRIEFLY)
    pair.back.probe(tag=1, timeout=SOON)
    link.stall()
    receiving = Call(pair.back.recv_object, tag=1, timeout=SOON)
    with pytest.raises(DeadlineError):
        sending.result()
    link.resume()
    pair.there.send_object(pattern(size, 5), tag=1, timeout=SOON)
    assert np.array_equal(receiving.result(), pattern(size, 5))


def test_both_give_up_at_once(faults: FaultTransport, faulty_pair: Pair) -> None:
    """The receiver's refusal and the sender's abort cross, in the middle of the data."""
    pair, link = faulty_pair, sender_link(faults)
    data, out = pattern(LARGE), blank(LARGE)
    stall_after(link, 2 * HEADER_BYTES + 1_500_000)
    receive = pair.back.irecv(out, tag=1)
    send = pair.there.isend(data, tag=1)
    wait_stalled(link)
    cancel(send)
    cancel(receive)
    data[:], out[:] = 0, 0xA5
    link.resume()
    check_stream_goes_on(pair, tag=1)
    assert is_blank(out)


class Interrupted(Exception):
    """What the test's signal handler raises."""


@pytest.fixture
def alarm() -> Iterator[None]:
    """A signal handler that raises, shortly."""

    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("verb", ["recv", "send"])
@pytest.mark.usefixtures("alarm")
def test_call_that_a_signal_interrupts_gives_its_buffer_back(pair: Pair, verb: str) -> None:
    """As with Ctrl-C: what the handler raises comes out, and the message goes to the next receive."""
    data, out = pattern(EAGER + 1), blank(EAGER + 1)
    router = router_of(pair.back)

    def waits() -> bool:
        """The call sleeps. (An exception in the middle of reading or writing would cost the connection.)"""
        under_way: list[Work[Any]] = [*pair.right.hub.matcher.posted(), *router.outbound.announced.values()]
        return any(work.parker is not None for work in under_way)

    def interrupt() -> None:
        wait_until(waits, 10)
        signal.pthread_kill(main, signal.SIGUSR1)

    main = threading.get_ident()
    interrupting = Call(interrupt)
    wait: dict[str, Callable[[], object]] = {
        "recv": lambda: pair.back.recv(out, tag=1, timeout=SOON),
        "send": lambda: pair.back.send(data, tag=1, timeout=SOON),
    }
    with pytest.raises(Interrupted):
        wait[verb]()
    interrupting.result()
    data[:] = 0
    wait_until(lambda: pair.there.iprobe(tag=1) is None, 10, "the withdrawal")
    check_stream_goes_on(pair, tag=1)
    check_nothing_remains(pair)
    assert is_blank(out)


def test_deadline_is_looked_at_only_once_the_wire_was(pair: Pair) -> None:
    """A wait without time still takes what has come by then."""
    receive = pair.back.irecv(bytearray(1), tag=1)
    pair.there.send(b"x", tag=1)
    pair.there.send(b"y", tag=2)
    pair.back.probe(tag=2, timeout=SOON)
    receive.wait(timeout=0)
