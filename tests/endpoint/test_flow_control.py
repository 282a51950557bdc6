"""A receiver that does not receive: its sender waits, memory stays bounded, and everything else goes on."""

from __future__ import annotations

from time import monotonic
from typing import Any

import numpy as np
import pytest

from peers import BRIEFLY, SOON, Call, Medium, blank, open_pair, pattern, router_of
from rankmesh import BusyError, DeadlineError, Endpoint
from rankmesh.config import KIB, MIB
from rankmesh.wire.credit import OVERHEAD
from timing import scaled, wait_until

CREDIT: dict[str, Any] = {"eager_bytes": 4 * KIB, "lane_credit_bytes": 16 * KIB, "peer_credit_bytes": 64 * KIB}


def unreceived(endpoint: Endpoint) -> int:
    """Bytes that lie here and wait for a receive."""
    with endpoint.hub.engine:
        return sum(message.nbytes for message in endpoint.hub.matcher.unexpected() if message.payload is not None)


@pytest.mark.parametrize("nbytes", [0, 1, 1000, 4 * KIB])
def test_sender_stops_at_the_credit_of_its_lane(medium: Medium, nbytes: int) -> None:
    with open_pair(medium, **CREDIT) as pair:
        sent = CREDIT["lane_credit_bytes"] // (nbytes + OVERHEAD)
        for at in range(sent):
            pair.there.send(pattern(nbytes, at), tag=1, timeout=SOON)
        with pytest.raises(DeadlineError):
            pair.there.send(pattern(nbytes), tag=1, timeout=BRIEFLY)
        assert unreceived(pair.right) == sent * nbytes
        pair.back.probe(tag=1, timeout=SOON)
        for at in range(sent):
            out = blank(nbytes)
            assert pair.back.recv(out, tag=1, timeout=SOON).nbytes == nbytes
            assert np.array_equal(out, pattern(nbytes, at))
        pair.there.send(pattern(nbytes, 99), tag=1, timeout=SOON)
        assert pair.back.recv(blank(nbytes), tag=1, timeout=SOON).nbytes == nbytes


def test_other_tags_control_and_peers_go_on(medium: Medium) -> None:
    """FEATURES: nexar's one full tag blocks all."""
    silence = scaled(0.7)
    # Longer than silence is tolerated, over one transport: the heartbeat is the same on all.
    lasting = 1.5 * silence if medium.address.startswith("tcp") else 0.1
    settings = {**CREDIT, "heartbeat_interval": silence / 10, "heartbeat_timeout": silence}
    third_config = medium.config.override(**settings)
    with open_pair(medium, **settings) as pair, Endpoint(medium.address, config=third_config) as third:
        other = pair.right.connect(third.address, timeout=SOON)
        flood = [pair.there.isend(pattern(4 * KIB, at), tag=1) for at in range(100)]
        stuck = Call(pair.there.send, pattern(100, 5), tag=1, timeout=SOON)
        assert not all(send.done() for send in flood)
        out: Any = bytearray(100)
        began = monotonic()
        while monotonic() - began < lasting:
            pair.there.send(bytes(100), tag=2, timeout=SOON)
            pair.back.recv(out, tag=2, timeout=SOON)
            send = pair.there.isend(bytes(10 * KIB), tag=3)
            pair.back.recv(bytearray(10 * KIB), tag=3, timeout=SOON)
            send.wait(SOON)
            pair.back.send(b"back", tag=1, timeout=SOON)
            pair.there.recv(out, tag=1, timeout=SOON)
            other.send(b"third", tag=1, timeout=SOON)
            third.recv(out, tag=1, timeout=SOON)
        assert stuck.running
        assert unreceived(pair.right) <= CREDIT["lane_credit_bytes"]
        for at in range(100):
            out = blank(4 * KIB)
            pair.back.recv(out, tag=1, timeout=SOON)
            assert np.array_equal(out, pattern(4 * KIB, at))
        pair.back.recv(out, tag=1, timeout=SOON)
        stuck.result()


def test_all_lanes_of_a_peer_together_are_bounded(medium: Medium) -> None:
    with open_pair(medium, **CREDIT) as pair:
        sends = [pair.there.isend(pattern(4 * KIB, tag), tag=tag) for tag in range(100)]
        pair.back.probe(tag=99, timeout=SOON)
        assert unreceived(pair.right) <= CREDIT["peer_credit_bytes"]
        for tag in reversed(range(100)):
            out = blank(4 * KIB)
            pair.back.recv(out, tag=tag, timeout=SOON)
            assert np.array_equal(out, pattern(4 * KIB, tag))
        for send in sends:
            send.wait(SOON)


def test_one_more_send_than_the_queue_holds_is_refused(medium: Medium) -> None:
    with open_pair(medium, **CREDIT, send_queue_bytes=10 * 512) as pair:
        sends = [pair.there.isend(pattern(10 * KIB, at), tag=1) for at in range(10)]
        with pytest.raises(BusyError, match="send_queue_bytes") as caught:
            pair.there.isend(pattern(10 * KIB), tag=1)
        assert "right" in str(caught.value)
        for at, send in enumerate(sends):
            out = blank(10 * KIB)
            pair.back.recv(out, tag=1, timeout=SOON)
            assert np.array_equal(out, pattern(10 * KIB, at))
            send.wait(SOON)
        wait_until(lambda: router_of(pair.there).outbound.idle, 5)
        pair.there.isend(pattern(10 * KIB), tag=1).cancel()


def test_finished_tags_leave_nothing_behind(inproc: Medium) -> None:
    """FEATURES: nexar never frees the channels of finished tags."""
    count = 20_000
    with open_pair(inproc, peer_credit_bytes=4 * MIB, lane_credit_bytes=MIB) as pair:
        there, back = router_of(pair.there), router_of(pair.back)

        def receive() -> None:
            out = bytearray(8)
            for tag in range(count):
                pair.back.recv(out, tag=tag, timeout=SOON)
                assert int.from_bytes(out, "little") == tag

        receiving = Call(receive)
        for tag in range(count):
            pair.there.send(tag.to_bytes(8, "little"), tag=tag, timeout=SOON)
        receiving.result(2 * SOON)
        assert vars(pair.right.hub.matcher)["_posted"] == vars(pair.right.hub.matcher)["_unexpected"] == {}
        lanes, owed = there.outbound._credit.lanes, back.inbound._credit
        wait_until(lambda: len(lanes) == len(owed.owed), 5)  # else: lanes that the receiver owes nothing for
        assert len(lanes) <= pair.left.config.peer_credit_bytes // 4 // OVERHEAD + 1
        for table in (there.outbound.announced, there.outbound._stalled, back.inbound.incoming._announced):
            assert table == {}
        assert back.inbound.incoming._incoming == {}
