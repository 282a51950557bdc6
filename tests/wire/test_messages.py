"""Typed messages: what went in comes out, and whatever else arrives is a ProtocolError."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.errors import ProtocolError
from rankmesh.wire.credit import OVERHEAD
from rankmesh.wire.messages import (
    TEXT_LIMIT,
    Control,
    Goodbye,
    Identity,
    IdleAnswer,
    IdleAsk,
    Lost,
    decode_control,
    decode_identity,
    encode,
    plain,
)

FIELDS: dict[str, Any] = {
    "uid": b"0123456789abcdef",
    "name": "alice",
    "host": "node-1",
    "pid": 4321,
    "eager_bytes": 65536,
    "lane_credit": 1 << 20,
    "peer_credit": 1 << 24,
    "max_message": 1 << 32,
    "max_rpc": 1 << 30,
}
OPTIONAL: dict[str, Any] = {"addresses": (), "rank": None, "run": "", "allow_pickle": False}

any_texts = st.text(st.characters(), max_size=50)
texts = any_texts.map(plain)
sizes = st.integers(0, 2**64 - 1)
controls: st.SearchStrategy[Control] = st.one_of(
    st.builds(Goodbye, texts),
    st.builds(Lost, st.binary(min_size=16, max_size=16), texts),
    st.builds(IdleAsk),
    st.builds(IdleAnswer, st.booleans()),
)


@st.composite
def limits(draw: st.DrawFn) -> dict[str, int]:
    """Credit that holds two eager messages, or no eager messages."""
    eager = draw(st.just(0) | st.integers(1, 2**62))
    credit = st.integers(2 * (eager + OVERHEAD) if eager else 0, 2**64 - 1)
    return {"eager_bytes": eager, "lane_credit": draw(credit), "peer_credit": draw(credit)}


def with_limits(identity: dict[str, Any], credit: dict[str, int]) -> Identity:
    return Identity(**identity, **credit)


identities = st.builds(
    with_limits,
    st.fixed_dictionaries(
        {
    uid=st.binary(min_size=16, max_size=16),
    name=texts,
    host=texts,
    pid=st.integers(0, 2**31),
    addresses=st.lists(texts, max_size=32).map(tuple),
    rank=st.none() | st.integers(0, 2**31),
    run=texts,
    eager_bytes=sizes,
    lane_credit=sizes,
    peer_credit=sizes,
    max_message=sizes,
    max_rpc=sizes,
    allow_pickle=st.booleans(),
)


@given(controls)
def test_control_messages_come_out_as_they_went_in(message: Control) -> None:
    found = decode_control(memoryview(encode(message)))
    assert type(found) is type(message)
    assert found == message


@given(identities)
def test_identities_come_out_as_they_went_in(identity: Identity) -> None:
    assert decode_identity(encode(identity)) == identity


@pytest.mark.parametrize(
    "message, fields",
    [
        (Goodbye("bye"), {"type": "goodbye", "reason": "bye"}),
        (Lost(b"u" * 16, "cut"), {"type": "lost", "uid": b"u" * 16, "reason": "cut"}),
        (IdleAsk(), {"type": "idle?"}),
        (IdleAnswer(True), {"type": "idle!", "agreed": True}),
    ],
)
def test_control_messages_on_the_wire(message: Control, fields: dict[str, Any]) -> None:
    assert msgspec.msgpack.decode(encode(message)) == fields


def test_an_identity_on_the_wire() -> None:
    """What an older version does not send has a default here."""
    assert msgspec.msgpack.decode(encode(Identity(**FIELDS))) == FIELDS
    found = decode_identity(msgspec.msgpack.encode(FIELDS))
    assert {name: getattr(found, name) for name in FIELDS | OPTIONAL} == FIELDS | OPTIONAL


def test_fields_of_a_later_version_are_passed_over() -> None:
    assert decode_control(memoryview(msgspec.msgpack.encode({"type": "idle?", "since": [1, {"a": b""}]}))) == IdleAsk()
    assert decode_identity(msgspec.msgpack.encode(FIELDS | {"colour": "red"})) == Identity(**FIELDS)


GOODBYE = encode(Goodbye("bye"))
DEEP = b"\x91" * 60_000  # arrays in arrays: fits into a CONTROL frame, and no stack is deep enough for it
MALFORMED = {
    "nothing": b"",
    "nil": b"\xc0",
    "number": b"\x01",
    "unused code": b"\xc1",
    "array": b"\x90",
    "empty map": b"\x80",
    "trailing": GOODBYE + b"\x00",
    "two messages": GOODBYE * 2,
    "not UTF-8": b"\x82\xa4type\xa7goodbye\xa6reason\xa2\xff\xfe",
    "type not UTF-8": b"\x81\xa4type\xa2\xff\xfe",
    "surrogate": b"\x82\xa4type\xa7goodbye\xa6reason\xa3\xed\xa0\x80",
    "no type": msgspec.msgpack.encode({"reason": "bye"}),
    "unknown type": msgspec.msgpack.encode({"type": "hello"}),
    "type a number": msgspec.msgpack.encode({"type": 1}),
    "field of a wrong type": msgspec.msgpack.encode({"type": "goodbye", "reason": 1}),
    "field missing": msgspec.msgpack.encode({"type": "lost", "uid": b""}),
    "key a number": b"\x82\xa4type\xa7goodbye\x01\x02",
    "array of 4 G": b"\xdd\xff\xff\xff\xff",
    "map of 4 G": b"\xdf\xff\xff\xff\xff\xa4type\xa7goodbye",
    "text of 4 G": b"\x82\xa4type\xa7goodbye\xa6reason\xdb\xff\xff\xff\xff",
    "skipped array of 4 G": b"\x82\xa4type\xa7goodbye\xa1z\xdd\xff\xff\xff\xff",
    "deep": DEEP,
    "deep and skipped": b"\x82\xa4type\xa7goodbye\xa1z" + DEEP,
    "extension for a text": b"\x82\xa4type\xa7goodbye\xa6reason\xd6\xff\x00\x00\x00\x00",
}


@pytest.mark.parametrize("payload", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_control_message_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError) as refused:
        decode_control(memoryview(payload))
    assert type(refused.value) is ProtocolError
    assert refused.value.reason == "malformed control message"
    assert refused.value.__cause__ is not None


@pytest.mark.parametrize("cut", range(len(GOODBYE)))
def test_a_control_message_cut_off_anywhere_is_refused(cut: int) -> None:
    with pytest.raises(ProtocolError):
        decode_control(memoryview(GOODBYE[:cut]))


BAD_FIELDS: dict[str, dict[str, Any]] = {
    "uid too short": {"uid": b"x" * 15},
    "uid too long": {"uid": b"x" * 17},
    "uid a text": {"uid": "x" * 16},
    "name too long": {"name": "x" * 257},
    "host too long": {"host": "x" * 257},
    "too many addresses": {"addresses": ["tcp://h:1"] * 33},
    "address not a text": {"addresses": [1]},
    "addresses a text": {"addresses": "tcp://h:1"},
    "negative eager": {"eager_bytes": -1},
    "negative lane credit": {"lane_credit": -1},
    "negative peer credit": {"peer_credit": -1},
    "negative message": {"max_message": -1},
    "negative rpc": {"max_rpc": -1},
    "pid a text": {"pid": "1"},
    "pid a float": {"pid": 1.0},
    "rank a bool": {"rank": True},
    "pickle a number": {"allow_pickle": 1},
}


@pytest.mark.parametrize("changes", BAD_FIELDS.values(), ids=BAD_FIELDS.keys())
def test_an_identity_with_a_bad_field_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError) as refused:
        decode_identity(msgspec.msgpack.encode(FIELDS | changes))
    assert refused.value.reason == "malformed identity"


@pytest.mark.parametrize("field", FIELDS)
def test_an_identity_without_a_field_is_refused(field: str) -> None:
    with pytest.raises(ProtocolError, match=field):
        decode_identity(msgspec.msgpack.encode({name: value for name, value in FIELDS.items() if name != field}))


@pytest.mark.parametrize("payload", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_identity_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError) as refused:
        decode_identity(payload)
    assert refused.value.reason == "malformed identity"


@given(st.binary(max_size=200))
def test_garbage_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_control(memoryview(payload))
    with pytest.raises(ProtocolError):
        decode_identity(payload)


@given(controls | identities, st.data())
def test_a_changed_byte_gives_a_valid_message_or_a_protocol_error(
    message: Control | Identity, data: st.DataObject
) -> None:
    changed = bytearray(encode(message))
    changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        found: Control | Identity = (
            decode_identity(bytes(changed)) if isinstance(message, Identity) else decode_control(memoryview(changed))
        )
    except ProtocolError:
        return
    assert isinstance(found, (Identity, Goodbye, Lost, IdleAsk, IdleAnswer))
