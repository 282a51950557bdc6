"""Typed messages: what went in comes out, and whatever else arrives is a ProtocolError."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rankmesh.errors import ProtocolError
from rankmesh.wire.credit import OVERHEAD, CreditIn, CreditOut
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

# what str.isprintable takes: no control, format, surrogate, private or unassigned characters, and no separator but ` `
texts = st.text(st.characters(exclude_categories=["C", "Z"], include_characters=" "), max_size=50)
uids = st.binary(min_size=16, max_size=16)
sizes = st.integers(0, 2**64 - 1)
controls: st.SearchStrategy[Control] = st.one_of(
    st.builds(Goodbye, texts, st.booleans()),
    st.builds(Lost, uids, texts),
    st.builds(IdleAsk),
    st.builds(IdleAnswer, st.booleans()),
)


@st.composite
def identities(draw: st.DrawFn) -> Identity:
    eager = draw(st.just(0) | st.integers(1, 2**62))
    credit = st.integers(2 * (eager + OVERHEAD) if eager else 0, 2**64 - 1)
    return Identity(
        uid=draw(uids),
        name=draw(texts),
        host=draw(texts),
        pid=draw(st.integers(0, 2**31)),
        addresses=tuple(draw(st.lists(texts, max_size=4))),
        rank=draw(st.none() | st.integers(0, 2**31)),
        run=draw(texts),
        eager_bytes=eager,
        lane_credit=draw(credit),
        peer_credit=draw(credit),
        max_message=draw(sizes),
        max_rpc=draw(sizes),
        allow_pickle=draw(st.booleans()),
    )


@given(controls)
def test_control_messages_come_out_as_they_went_in(message: Control) -> None:
    found = decode_control(memoryview(encode(message)))
    assert type(found) is type(message)
    assert found == message


@given(identities())
def test_identities_come_out_as_they_went_in(identity: Identity) -> None:
    assert decode_identity(encode(identity)) == identity


@pytest.mark.parametrize(
    "message, fields",
    [
        (Goodbye("bye"), {"type": "goodbye", "reason": "bye", "failed": False}),
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


UNPRINTABLE = {
    "line feed": "\n",
    "return": "\r",
    "escape": "\x1b[2J",
    "bell": "\x07",
    "null": "\0",
    "delete": "\x7f",
    "C1 control": "\x9b31m",
    "right to left": "\u202e",
    "line separator": "\u2028",
    "no width": "\u200b",
    "wide space": "\u3000",
    "private": "\ue000",
    "unassigned": "\U000e0080",
}


@pytest.mark.parametrize("unprintable", [*UNPRINTABLE.values(), "\ud800"], ids=[*UNPRINTABLE.keys(), "surrogate"])
def test_plain_replaces_what_cannot_be_shown(unprintable: str) -> None:
    shown = "?" + unprintable[1:]
    assert plain(f"be{unprintable}fore") == f"be{shown}fore"


def test_plain_leaves_other_text_and_cuts_it() -> None:
    assert plain("") == ""
    assert plain("rank 3: 漢字, é, 😀, \ufffd!") == "rank 3: 漢字, é, 😀, \ufffd!"
    assert plain("é" * TEXT_LIMIT) == "é" * TEXT_LIMIT
    assert plain("\n" * TEXT_LIMIT + "x") == "?" * TEXT_LIMIT


@given(st.text(max_size=50), st.sampled_from([1, 50]))
@example("surrogates, as file names have: \udcff", 1)
def test_whatever_plain_gives_may_travel(text: str, times: int) -> None:
    """Whatever an exception or a file name says can be a reason: this side cannot be made to send what is refused."""
    sent = plain(text * times)
    assert len(sent) == min(len(text) * times, TEXT_LIMIT)
    assert plain(sent) == sent
    for message in (Goodbye(sent), Lost(b"u" * 16, sent)):
        assert decode_control(memoryview(encode(message))) == message


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
    "field missing": msgspec.msgpack.encode({"type": "lost", "uid": b"u" * 16}),
    "uid too short": msgspec.msgpack.encode({"type": "lost", "uid": b"u" * 15, "reason": "cut"}),
    "uid too long": msgspec.msgpack.encode({"type": "lost", "uid": b"u" * 17, "reason": "cut"}),
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
    "too long an address": {"addresses": ["tcp://h:1", "x" * (TEXT_LIMIT + 1)]},
    "run too long": {"run": "x" * (TEXT_LIMIT + 1)},
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


@pytest.mark.parametrize(
    "field, longest", [("name", 256), ("host", 256), ("run", TEXT_LIMIT), ("addresses", TEXT_LIMIT)]
)
def test_the_longest_texts_of_an_identity(field: str, longest: int) -> None:
    value = ["漢" * longest] * 32 if field == "addresses" else "漢" * longest
    found = decode_identity(msgspec.msgpack.encode(FIELDS | {field: value}))
    assert getattr(found, field) == (tuple(value) if field == "addresses" else value)


@pytest.mark.parametrize("unprintable", UNPRINTABLE.values(), ids=UNPRINTABLE.keys())
def test_no_text_of_a_peer_can_write_to_the_terminal(unprintable: str) -> None:
    text = f"be{unprintable}fore"
    for field in ("name", "host", "run", "addresses"):
        value = ["tcp://h:1", text] if field == "addresses" else text
        with pytest.raises(ProtocolError) as refused:
            decode_identity(msgspec.msgpack.encode(FIELDS | {field: value}))
        assert refused.value.reason == "malformed identity"
        assert str(refused.value).isprintable()
    for fields in ({"type": "goodbye", "reason": text}, {"type": "lost", "uid": b"u" * 16, "reason": text}):
        with pytest.raises(ProtocolError) as refused:
            decode_control(memoryview(msgspec.msgpack.encode(fields)))
        assert refused.value.reason == "malformed control message"
        assert str(refused.value).isprintable()


@pytest.mark.parametrize("fields", [{"type": "goodbye"}, {"type": "lost", "uid": b"u" * 16}])
def test_the_longest_reason(fields: dict[str, Any]) -> None:
    """In characters, not in bytes."""
    found = decode_control(memoryview(msgspec.msgpack.encode(fields | {"reason": "漢" * TEXT_LIMIT})))
    assert isinstance(found, (Goodbye, Lost))
    assert found.reason == "漢" * TEXT_LIMIT
    with pytest.raises(ProtocolError, match="at most 512 characters"):
        decode_control(memoryview(msgspec.msgpack.encode(fields | {"reason": "x" * (TEXT_LIMIT + 1)})))


EAGER = 1000
ENOUGH = 2 * (EAGER + OVERHEAD)


@pytest.mark.parametrize(
    "eager, lane, peer, fits",
    [
        (EAGER, ENOUGH, ENOUGH, True),
        (EAGER, ENOUGH - 1, ENOUGH, False),
        (EAGER, ENOUGH, ENOUGH - 1, False),
        (EAGER, 2**64 - 1, 0, False),
        (2**64 - 1, 2**64 - 1, 2**64 - 1, False),
        (1, 2, 2, False),  # a message costs more than its bytes
        (0, 0, 0, True),  # no eager messages
    ],
)
def test_credit_holds_two_eager_messages(eager: int, lane: int, peer: int, fits: bool) -> None:
    """Or the lanes to that peer would wait for credit that never comes."""
    limits = {"eager_bytes": eager, "lane_credit": lane, "peer_credit": peer}
    if fits:
        found = decode_identity(msgspec.msgpack.encode(FIELDS | limits))
        assert {name: getattr(found, name) for name in limits} == limits
        return
    with pytest.raises(ProtocolError, match="credit holds two eager messages") as refused:
        decode_identity(msgspec.msgpack.encode(FIELDS | limits))
    assert refused.value.reason == "malformed identity"


@given(st.integers(1, 1 << 20), st.integers(0, 1000))
def test_with_the_least_credit_an_eager_message_always_leaves_in_the_end(eager: int, spare: int) -> None:
    """The rule is what makes credit's promise true: the receiver may keep back what is not yet due."""
    limit = 2 * (eager + OVERHEAD) + spare
    sender, receiver = CreditOut(limit, limit), CreditIn(limit, limit)
    for cost in (OVERHEAD, eager + OVERHEAD) * 5:
        assert sender.take((0, 0), cost)
        receiver.arrived(cost)
        if receiver.consumed((0, 0), cost):
            for payload in receiver.pay():
                sender.returned(memoryview(payload))


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


@given(controls | identities(), st.data())
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
