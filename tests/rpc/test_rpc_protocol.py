"""The bytes of requests and replies: they come back whole, and whatever else comes is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.errors import CodecError, InvalidMessage
from rankmesh.rpc import protocol
from rankmesh.rpc.protocol import ALIGNMENT, NAME_LIMIT, TRACE_LIMIT, Bit, Kind, Why

VALUES: list[Any] = [None, 1, "text", b"bytes", [1, 2], {"a": (1, 2)}, np.arange(5), {"deep": [np.ones((2, 3))]}]


def joined(parts: list[Any]) -> memoryview:
    return memoryview(bytearray(b"".join(parts)))


@pytest.mark.parametrize("value", VALUES, ids=str)
@pytest.mark.parametrize("name", ["f", "é" * 100])
def test_request_comes_back_whole(value: Any, name: str) -> None:
    for kwargs in ({}, {"key": value}):
        body = protocol.arguments((value, 7), kwargs, False)
        parts, nbytes = protocol.request(Kind.CALL, body, name.encode(), 2.5, Bit.RETRY, b"trace")
        payload = joined(parts)
        assert len(payload) == nbytes
        kind, flags, key, trace, body_at, seconds = protocol.read_request(payload)
        assert (kind, flags & ~Bit.PACKED, key.decode(), trace, seconds) == (
            Kind.CALL, Bit.RETRY, name, b"trace", 2.5,
        )  # fmt: skip
        assert not flags & Bit.PACKED or body_at % ALIGNMENT == 0
        args, named = protocol.read_arguments(flags, payload[body_at:], False)
        np.testing.assert_equal([args, named], [[value, 7], kwargs])


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_reply_comes_back_whole(value: Any) -> None:
    parts, nbytes = protocol.reply(Kind.RESULT, protocol.item(value, False), Bit.IDEMPOTENT, 9)
    payload = joined(parts)
    assert len(payload) == nbytes
    kind, flags, body_at, number = protocol.read_reply(payload)
    assert (kind, flags & ~Bit.PACKED, number) == (Kind.RESULT, Bit.IDEMPOTENT, 9)
    np.testing.assert_equal(protocol.read_item(flags, payload[body_at:], False), value)


def test_plain_calls_begin_as_all_others_do() -> None:
    body = protocol.arguments((1, "x"), {}, False)
    whole, _ = protocol.request(Kind.CALL, body, b"name", 3.0)
    assert protocol.plain_prefix(Kind.CALL, b"name", 3.0) + body.parts[0] == b"".join(whole)
    for flags, prefix in protocol.PLAIN_RESULT.items():
        item = protocol.item("x", False)
        assert prefix + item.parts[0] == b"".join(protocol.reply(Kind.RESULT, item, flags)[0])


def test_failure_is_never_too_large() -> None:
    body = protocol.failure(
        Why.RAISED, "m" * 10**6 + "\udc80", "t" * 10**6, "b" * 10**6 + "the end\udc80", ["n" * 10**6]
    )
    assert len(body) < 16 * 1024
    told = protocol.read_failure(body[protocol.REPLY.size :])
    assert told.traceback.endswith("the end\\udc80")
    assert told.message.endswith("…")


@pytest.mark.parametrize(
    "head",
    [
        (Kind.CALL, 0, NAME_LIMIT + 1, 0, 2000, 1.0),
        (Kind.CALL, 0, 1, TRACE_LIMIT + 1, 2000, 1.0),
        (Kind.CALL, 0, 10, 0, 16, 1.0),
        (Kind.CALL, 0, 10, 10, 30, 1.0),
        (Kind.CALL, 0, 1, 0, 65_000, 1.0),
        (Kind.CALL, 0, 1, 0, 17, math.nan),
        (Kind.CALL, 0, 1, 0, 17, -1.0),
    ],
)
def test_request_whose_parts_do_not_fit_is_refused(head: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidMessage, match="do not fit"):
        protocol.read_request(memoryview(protocol.REQUEST.pack(*head) + bytes(3000)))


@given(st.binary(max_size=200))
def test_whatever_comes_is_read_or_refused(data: bytes) -> None:
    view = memoryview(data)
    try:
        _, flags, _, _, body_at, _ = protocol.read_request(view)
        protocol.read_arguments(flags, view[body_at:], False)
    except (InvalidMessage, CodecError):
        pass
    try:
        _, flags, body_at, _ = protocol.read_reply(view)
        protocol.read_item(flags, view[body_at:], False)
    except (InvalidMessage, CodecError):
        pass
    for read in (protocol.read_failure, protocol.read_amount, protocol.read_release):
        try:
            read(view)
        except InvalidMessage:
            pass


def test_signals_are_requests() -> None:
    for body, kind in (
        (protocol.signal(Kind.CANCEL), Kind.CANCEL),
        (protocol.credit(77), Kind.CREDIT),
        (protocol.release([1, 2]), Kind.RELEASE),
    ):
        head = protocol.read_request(memoryview(body))
        assert head[0] == kind
    assert protocol.read_amount(memoryview(protocol.credit(77))[16:]) == 77
    assert protocol.read_release(memoryview(protocol.release([1, 2]))[16:]) == [1, 2]
