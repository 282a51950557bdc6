"""Messages between two endpoints, over every transport: order, matching, sizes, truncation, kinds, arguments."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from peers import BRIEFLY, SOON, Call, Medium, Pair, blank, is_blank, open_pair, pattern
from rankmesh import (
    ANY_TAG,
    CodecError,
    Config,
    ConfigError,
    DeadlineError,
    Endpoint,
    TruncationError,
    UsageError,
)
from rankmesh.config import KIB, MIB
from rankmesh.endpoint.messages import MAX_TAG

EAGER = Config().eager_bytes
SIZES = [0, 1, 4 * KIB, EAGER - 1, EAGER, EAGER + 1, 1 * MIB + 1, 16 * MIB]


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("posted_first", [True, False], ids=["posted", "unexpected"])
def test_content_arrives_whatever_its_size(pair: Pair, nbytes: int, posted_first: bool) -> None:
    data, out = pattern(nbytes, seed=nbytes), blank(nbytes + 8)
    if posted_first:
        receive = pair.back.irecv(out, tag=3)
        pair.there.send(data, tag=3, timeout=SOON)
        status = receive.result(SOON)
    else:
        send = pair.there.isend(data, tag=3)
        assert pair.back.probe(tag=3, timeout=SOON) == (pair.back, 3, nbytes)
        status = pair.back.recv(out, tag=3, timeout=SOON)
        send.wait(SOON)
    assert status == (pair.back, 3, nbytes)
    assert np.array_equal(out[:nbytes], data)
    assert is_blank(out[nbytes:]), "bytes beyond the message were written"


def test_order_is_kept_per_tag_whatever_the_sizes(pair: Pair) -> None:
    """Eager and announced messages of one tag, mixed, received late: nothing overtakes."""
    seed = random.randrange(2**32)
    print(f"seed = {seed}")
    rng = random.Random(seed)
    sizes = [rng.choice([0, 1, 100, EAGER, EAGER + 1, 3 * EAGER]) for _ in range(60)]
    tags = [rng.randrange(3) for _ in sizes]
    sends = [
        pair.there.isend(pattern(size, at), tag=tag) for at, (size, tag) in enumerate(zip(sizes, tags, strict=True))
    ]
    for tag in (2, 0, 1):
        for at in (at for at, of_tag in enumerate(tags) if of_tag == tag):
            out = blank(4 * EAGER)
            assert pair.back.recv(out, tag=tag, timeout=SOON).nbytes == sizes[at]
            assert np.array_equal(out[: sizes[at]], pattern(sizes[at], at)), f"message {at} of {sizes[at]} bytes"
    for send in sends:
        send.wait(SOON)


def test_first_posted_takes_first_arrived(pair: Pair) -> None:
    outs = [bytearray(1) for _ in range(4)]
    tags = (ANY_TAG, 5, ANY_TAG, 5)
    receives = [pair.back.irecv(out, tag=tag) for out, tag in zip(outs, tags, strict=True)]
    for value, tag in ((1, 5), (2, 5), (3, 5), (4, 6)):
        pair.there.send(bytes([value]), tag=tag)
    statuses = [receive.result(SOON) for receive in receives[:3]]
    assert [out[0] for out in outs[:3]] == [1, 2, 3]
    assert [status.tag for status in statuses] == [5, 5, 5]
    assert not receives[3].done(), "tag 6 went to a receive of tag 5"
    assert receives[3].cancel()
    assert pair.back.recv(outs[3], tag=ANY_TAG, timeout=SOON).tag == 6


def test_wildcard_takes_what_arrived_first(pair: Pair) -> None:
    for tag in (9, 4, 7):
        pair.there.send(bytes([tag]), tag=tag)
    pair.back.probe(tag=7, timeout=SOON)
    out = bytearray(1)
    assert [pair.back.recv(out, tag=ANY_TAG, timeout=SOON).tag for _ in range(3)] == [9, 4, 7]


def test_any_source_tells_who_it_was(medium: Medium) -> None:
    with Endpoint(medium.address, config=medium.config) as hub, open_pair(medium) as pair:
        for endpoint, value in ((pair.left, 1), (pair.right, 2)):
            endpoint.connect(hub.address, timeout=SOON).send(bytes([value]), tag=1)
        out, seen = bytearray(1), {}
        for _ in range(2):
            status = hub.recv(out, tag=1, timeout=SOON)
            seen[out[0]] = status.source.name
        assert seen == {1: "left", 2: "right"}


def test_receive_with_another_tag_leaves_the_message(pair: Pair) -> None:
    """FEATURES: in nexar a receive with another tag consumes and drops the message."""
    pair.there.send(b"wanted later", tag=1)
    pair.back.probe(tag=1, timeout=SOON)
    out = bytearray(12)
    with pytest.raises(DeadlineError):
        pair.back.recv(out, tag=2, timeout=BRIEFLY)
    assert pair.back.recv(out, tag=1, timeout=SOON).nbytes == 12
    assert out == b"wanted later"


@pytest.mark.parametrize("nbytes", [100, EAGER, EAGER + 1, 2 * MIB])
@pytest.mark.parametrize("posted_first", [True, False], ids=["posted", "unexpected"])
def test_too_small_a_buffer_is_told_and_nothing_after_it_is_misread(
    pair: Pair, nbytes: int, posted_first: bool
) -> None:
    small, after = blank(nbytes - 1), bytearray(5)
    if posted_first:
        receive = pair.back.irecv(small, tag=1)
        send = pair.there.isend(pattern(nbytes), tag=1)
    else:
        send = pair.there.isend(pattern(nbytes), tag=1)
        pair.back.probe(tag=1, timeout=SOON)
        receive = pair.back.irecv(small, tag=1)
    pair.there.isend(b"after", tag=1)
    with pytest.raises(TruncationError) as caught:
        receive.result(SOON)
    assert (caught.value.nbytes, caught.value.capacity, caught.value.tag) == (nbytes, nbytes - 1, 1)
    assert "left" in caught.value.peer
    send.wait(SOON)
    assert pair.back.recv(after, tag=1, timeout=SOON).nbytes == 5
    assert after == b"after"
    assert is_blank(small)


@pytest.mark.parametrize("nbytes", [10, EAGER + 1])
def test_buffer_receive_of_an_object_fails_and_leaves_it(pair: Pair, nbytes: int) -> None:
    obj = {"payload": b"x" * nbytes}
    sent = Call(pair.there.send_object, obj, tag=1, timeout=SOON)
    pair.back.probe(tag=1, timeout=SOON)
    with pytest.raises(UsageError, match="recv_object"):
        pair.back.recv(blank(2 * nbytes), tag=1, timeout=SOON)
    assert pair.back.recv_object(tag=1, timeout=SOON) == obj
    sent.result()


@pytest.mark.parametrize("nbytes", [10, EAGER + 1])
def test_object_receive_of_a_buffer_fails_and_leaves_it(pair: Pair, nbytes: int) -> None:
    waiting = Call(pair.back.recv_object, tag=1, timeout=SOON)
    send = pair.there.isend(pattern(nbytes), tag=1)
    with pytest.raises(UsageError, match=r"recv\(\)"):
        waiting.result()
    out = blank(nbytes)
    pair.back.recv(out, tag=1, timeout=SOON)
    assert np.array_equal(out, pattern(nbytes))
    send.wait(SOON)


@pytest.mark.parametrize("nbytes", [0, 1000, 300 * KIB])
@pytest.mark.parametrize("posted_first", [True, False], ids=["posted", "unexpected"])
def test_objects(pair: Pair, nbytes: int, posted_first: bool) -> None:
    obj: dict[str, Any] = {"name": "x", "array": pattern(nbytes).reshape(-1, 1), "nested": [1, 2.5, None, b"bytes"]}
    if posted_first:
        receiving = Call(pair.back.recv_object, tag=2, timeout=SOON)
        pair.there.send_object(obj, tag=2, timeout=SOON)
        got = receiving.result()
    else:
        sending = Call(pair.there.send_object, obj, tag=2, timeout=SOON)
        pair.back.probe(tag=2, timeout=SOON)
        got = pair.back.recv_object(tag=2, timeout=SOON)
        sending.result()
    assert np.array_equal(got.pop("array"), obj.pop("array"))
    assert got == obj


def test_both_sides_may_send_large_messages_at_once(pair: Pair) -> None:
    data, outs = [pattern(4 * MIB, 1), pattern(4 * MIB, 2)], [blank(4 * MIB), blank(4 * MIB)]
    other = Call(pair.back.sendrecv, data[1], outs[1], tag=1, timeout=SOON)
    assert pair.there.sendrecv(data[0], outs[0], tag=1, timeout=SOON) == (pair.there, 1, 4 * MIB)
    assert other.result() == (pair.back, 1, 4 * MIB)
    assert np.array_equal(outs[0], data[1])
    assert np.array_equal(outs[1], data[0])


def test_probe_waits_and_leaves_the_message(pair: Pair) -> None:
    assert pair.back.iprobe(tag=1) is None
    probing = Call(pair.back.probe, tag=1, timeout=SOON)
    pair.there.send(b"abc", tag=2)
    pair.there.send(b"abcd", tag=1)
    assert probing.result() == (pair.back, 1, 4)
    assert pair.back.iprobe(tag=1) == (pair.back, 1, 4)
    assert pair.back.iprobe(tag=3) is None
    assert pair.right.probe(tag=2, timeout=SOON) == (pair.back, 2, 3)
    out = bytearray(4)
    pair.back.recv(out, tag=1, timeout=SOON)
    assert pair.back.iprobe(tag=1) is None


def test_probe_of_an_announced_message_tells_its_size(pair: Pair) -> None:
    data = pattern(EAGER + 1)
    send = pair.there.isend(data, tag=1)
    assert pair.back.probe(tag=1, timeout=SOON).nbytes == EAGER + 1
    assert not send.done(), "a large message is not sent before it is wanted"
    pair.back.recv(blank(EAGER + 1), tag=1, timeout=SOON)
    send.wait(SOON)


def test_probe_that_runs_out_of_time(pair: Pair) -> None:
    with pytest.raises(DeadlineError) as caught:
        pair.back.probe(tag=1, timeout=BRIEFLY)
    assert caught.value.op == "probe of"
    assert vars(pair.right.hub)["probes"] == []


def test_barrier_waits_for_the_other(pair: Pair) -> None:
    for _ in range(3):
        waiting = Call(pair.there.barrier, timeout=SOON)
        pair.back.barrier(timeout=SOON)
        waiting.result()
    with pytest.raises(DeadlineError) as caught:
        pair.there.barrier(timeout=BRIEFLY)
    assert caught.value.op == "barrier with"


STRUCTURED = np.array([(1, 2.0), (3, 4.0)], dtype=[("a", "<i4"), ("b", "<f8")])


@pytest.mark.parametrize(
    "data",
    [b"bytes", bytearray(b"array"), memoryview(b"view"), np.arange(12.0).reshape(3, 4), np.float32(3), STRUCTURED],
    ids=lambda data: type(data).__name__,
)
def test_what_can_be_sent(pair: Pair, data: Any) -> None:
    expected = bytes(memoryview(data).cast("B")) if not isinstance(data, np.ndarray) else data.tobytes()
    out = blank(len(expected))
    pair.there.send(data, tag=1)
    assert pair.back.recv(out, tag=1, timeout=SOON).nbytes == len(expected)
    assert out.tobytes() == expected


def test_received_where_it_shall_lie(pair: Pair) -> None:
    """Into the middle of an array of another type."""
    out = np.zeros((4, 3), np.float64)
    pair.there.send(np.arange(6.0), tag=1)
    pair.back.recv(out[1:3], tag=1, timeout=SOON)
    assert np.array_equal(out, [[0, 0, 0], [0, 1, 2], [3, 4, 5], [0, 0, 0]])


@pytest.mark.parametrize(
    "data, reason",
    [
        (np.arange(10)[::2], "not contiguous"),
        (np.zeros((3, 3)).T[1:], "not contiguous"),
        ("text", "a str is not a buffer"),
        ({"a": 1}, "send_object"),
        (3, "not a buffer"),
        (np.array([object()]), "references"),
    ],
    ids=["strided", "transposed", "str", "dict", "int", "objects"],
)
def test_what_is_no_buffer_is_refused(inproc: Medium, data: Any, reason: str) -> None:
    with open_pair(inproc) as pair:
        for call in (pair.there.send, pair.there.isend, pair.there.recv, pair.there.irecv):
            with pytest.raises(UsageError, match=reason):
                call(data)
        assert repr(pair.left.hub.matcher) == "<Matcher 0 receives posted, 0 messages waiting>"


def test_read_only_memory_is_not_received_into(inproc: Medium) -> None:
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    with open_pair(inproc) as pair:
        for out in (b"bytes", memoryview(b"bytes"), frozen):
            with pytest.raises(UsageError, match="read-only"):
                pair.there.recv(out)
        with pytest.raises(UsageError, match="read-only"):
            pair.left.recv(b"bytes")


@pytest.mark.parametrize("tag", [-1, -2, MAX_TAG + 1, 2**80])
def test_tags_out_of_range_are_refused_by_sends(inproc: Medium, tag: int) -> None:
    with open_pair(inproc) as pair:
        for call in (pair.there.send, pair.there.isend, pair.there.send_object):
            with pytest.raises(UsageError, match="is not a tag"):
                call(b"x", tag=tag)
        with pytest.raises(UsageError, match="is not a tag"):
            pair.there.sendrecv(b"x", bytearray(1), tag=tag, recv_tag=0)
        assert repr(pair.left.hub.matcher) == "<Matcher 0 receives posted, 0 messages waiting>"


@pytest.mark.parametrize("tag", [-2, MAX_TAG + 1, 2**80])
def test_tags_out_of_range_are_refused_by_receives(inproc: Medium, tag: int) -> None:
    with open_pair(inproc) as pair:
        out = bytearray(1)
        peer = pair.there
        for call in (
            lambda: peer.recv(out, tag=tag),
            lambda: peer.irecv(out, tag=tag),
            lambda: peer.recv_object(tag=tag),
        ):
            with pytest.raises(UsageError, match="is not a tag"):
                call()
        for call in (lambda: peer.probe(tag=tag), lambda: peer.iprobe(tag=tag)):
            with pytest.raises(UsageError, match="is not a tag"):
                call()


def test_largest_tag_works(pair: Pair) -> None:
    pair.there.send(b"x", tag=MAX_TAG)
    assert pair.back.recv(bytearray(1), tag=MAX_TAG, timeout=SOON).tag == MAX_TAG


def test_message_over_the_limit_is_refused_before_a_byte_is_sent(medium: Medium) -> None:
    with open_pair(medium, max_message_bytes=MIB) as pair:
        with pytest.raises(UsageError, match="max_message_bytes"):
            pair.there.send(bytes(MIB + 1))
        pair.there.isend(bytes(MIB))
        assert pair.back.recv(bytearray(MIB), timeout=SOON).nbytes == MIB


def test_deadline_error_tells_what_is_known(pair: Pair) -> None:
    with pytest.raises(DeadlineError) as caught:
        pair.back.recv(bytearray(1), tag=7, timeout=BRIEFLY)
    error = caught.value
    assert (error.op, error.tag, error.timeout) == ("recv from", 7, BRIEFLY)
    assert "left" in error.peer
    assert BRIEFLY <= error.elapsed < SOON
    assert "is connected and was last heard" in error.known
    assert isinstance(error, TimeoutError)
    for part in (error.peer, "tag 7", "timeout="):
        assert part in str(error)


def test_deadline_of_a_send_that_nobody_receives(pair: Pair) -> None:
    with pytest.raises(DeadlineError) as caught:
        pair.there.send(pattern(EAGER + 1), tag=7, timeout=BRIEFLY)
    assert (caught.value.op, caught.value.tag) == ("send to", 7)
    assert "right" in caught.value.peer


def test_default_timeout_comes_from_config(inproc: Medium) -> None:
    with open_pair(inproc, timeout=BRIEFLY) as pair:
        with pytest.raises(DeadlineError) as caught:
            pair.there.recv(bytearray(1))
        assert caught.value.timeout == BRIEFLY


def test_message_that_has_arrived_is_received_even_without_time(pair: Pair) -> None:
    pair.there.send(b"x", tag=1)
    pair.back.probe(tag=1, timeout=SOON)
    assert pair.back.recv(bytearray(1), tag=1, timeout=0).nbytes == 1


def test_messages_survive_the_end_of_their_sender(medium: Medium) -> None:
    """What arrived before the goodbye can be received after it."""
    with Endpoint(medium.address, config=medium.config) as right:
        with Endpoint(medium.address, name="left", config=medium.config) as left:
            left.connect(right.address, timeout=SOON).send(b"legacy", tag=1)
            peer = right.accept(timeout=SOON)
        out = bytearray(6)
        assert peer.recv(out, tag=1, timeout=SOON).nbytes == 6
        assert out == b"legacy"


def test_a_burst_of_small_messages_keeps_its_order_beside_other_tags(medium: Medium) -> None:
    """A burst arrives in few reads, and is served from what was read: sizes and tags change, and one receive waits."""
    with open_pair(medium) as pair:
        last = bytearray(4)
        waiting = pair.back.irecv(last, tag=99)
        for number in range(300):
            pair.there.send(number.to_bytes(4, "little") * (1 + number % 3), tag=number % 2)
        pair.there.send(b"last", tag=99)
        for parity in (0, 1):
            for number in range(parity, 300, 2):
                out = bytearray(4 * (1 + number % 3))
                status = pair.back.recv(out, tag=parity, timeout=SOON)
                assert (status.nbytes, bytes(out)) == (len(out), number.to_bytes(4, "little") * (1 + number % 3))
        assert waiting.result(timeout=SOON).nbytes == 4
        assert last == b"last"


class Unusual:
    """What only pickle can carry."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unusual)

    __hash__ = None  # type: ignore[assignment]


def test_pickle_travels_only_where_both_sides_allow_it_and_peers_prove_themselves() -> None:
    allowing = Config(token="secret", allow_pickle=True)
    with pytest.raises(ConfigError, match="must prove who they are"):
        Endpoint("tcp://127.0.0.1:0", allow_pickle=True)
    for other, travels in ((allowing, True), (Config(token="secret"), False)):
        with Endpoint(config=allowing) as left, Endpoint(config=other) as right:
            there = left.connect(right.address, timeout=SOON)
            back = right.accept(timeout=SOON)
            if travels:
                there.send_object(Unusual(), timeout=SOON)
                assert back.recv_object(timeout=SOON) == Unusual()
            else:
                with pytest.raises(CodecError, match="Unusual"):
                    there.send_object(Unusual(), timeout=SOON)


def test_memory_of_early_messages_is_used_again(tcp: Medium) -> None:
    """A message that comes before its receive lies in a buffer of the pool, which goes back when it was received."""
    with open_pair(tcp) as pair:
        for number in range(20):
            sent = pattern(10_000 + number, number)
            pair.there.send(sent, tag=number)
            assert pair.back.probe(tag=number, timeout=SOON).nbytes == len(sent)
            out = bytearray(len(sent))
            pair.back.recv(out, tag=number, timeout=SOON)
            assert out == sent.tobytes()
        pool = pair.back.router.hub.pool
        assert pool.held == 16_384, "one buffer served them all, and is back"
