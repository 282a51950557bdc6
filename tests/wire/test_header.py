"""The header's layout is what two versions of rankmesh have in common: it is pinned here, byte for byte."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.errors import ProtocolError
from rankmesh.wire.header import (
    CONTROL_LIMIT,
    DATA_LIMIT,
    HEADER,
    HEADER_BYTES,
    REFERENCE_BYTES,
    VERSION,
    Flag,
    Header,
    Kind,
    Limits,
    explain,
    pack,
)

LIMITS = Limits(eager=1000, message=10_000, rpc=5_000)


def test_layout() -> None:
    packed = pack(
        Kind.DATA, flags=0x0102, group=0x03040506, tag=-2, ident=7, nbytes=0x08090A0B0C0D0E0F, extra=2**64 - 1
    )
    assert packed.hex(" ", 1) == (
        "01 0d 02 01 06 05 04 03 "
        "fe ff ff ff ff ff ff ff "
        "07 00 00 00 00 00 00 00 "
        "0f 0e 0d 0c 0b 0a 09 08 "
        "ff ff ff ff ff ff ff ff"
    )
    assert len(packed) == HEADER_BYTES == 40


def test_numbers_on_the_wire() -> None:
    assert {kind.name: kind.value for kind in Kind} == {
        "PING": 1, "CREDIT": 2, "CONTROL": 3, "GOODBYE": 4,
        "EAGER": 8, "ANNOUNCE": 9, "GRANT": 10, "REFUSE": 11, "WITHDRAW": 12, "DATA": 13, "ABORT": 14,
        "REQUEST": 16, "REPLY": 17,
    }  # fmt: skip
    assert {flag.name: flag.value for flag in Flag} == {"OBJECT": 1, "REQUEST": 2, "REPLY": 4, "ERROR": 8, "SHARED": 16}
    assert VERSION == 1


@given(
    st.sampled_from(Kind),
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(-(2**63), 2**63 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
)
def test_round_trip(kind: Kind, flags: int, group: int, tag: int, ident: int, nbytes: int, extra: int) -> None:
    header = Header(*HEADER.unpack(pack(kind, flags, group, tag, ident, nbytes, extra)))
    assert (header.version, header.kind, header.flags, header.group) == (VERSION, kind, flags, group)
    assert (header.tag, header.ident, header.nbytes, header.extra) == (tag, ident, nbytes, extra)


@pytest.mark.parametrize(
    "field, value",
    [
        ("flags", 2**16),
        ("group", 2**32),
        ("group", -1),
        ("tag", 2**63),
        ("ident", 2**64),
        ("nbytes", -1),
        ("extra", 2**64),
    ],
)
def test_a_number_that_does_not_fit_is_refused_not_wrapped(field: str, value: int) -> None:
    with pytest.raises(struct.error):
        pack(Kind.EAGER, **{field: value})


def test_every_kind_has_a_payload_limit() -> None:
    none = [Kind.PING, Kind.ANNOUNCE, Kind.GRANT, Kind.REFUSE, Kind.WITHDRAW, Kind.ABORT]
    small = [Kind.CREDIT, Kind.CONTROL, Kind.GOODBYE]
    eager = [Kind.EAGER, Kind.REQUEST, Kind.REPLY]
    expected = dict.fromkeys(none, 0) | dict.fromkeys(small, CONTROL_LIMIT) | dict.fromkeys(eager, 1000)
    assert LIMITS.payloads() == expected | {Kind.ANNOUNCE: REFERENCE_BYTES, Kind.DATA: DATA_LIMIT}
    assert set(LIMITS.payloads()) == set(Kind)


@pytest.mark.parametrize(
    "header, reason, words",
    [
        (Header(2, Kind.PING, 0, 0, 0, 0, 0, 0), "wrong frame version", ["version 2", "instead of 1"]),
        (Header(VERSION, 0, 0, 0, 0, 0, 0, 0), "unknown frame kind", ["kind 0"]),
        (Header(VERSION, 255, 0, 0, 0, 0, 2**64 - 1, 0), "unknown frame kind", ["kind 255"]),
        (Header(VERSION, Kind.EAGER, 0, 0, 0, 0, 1001, 0), "frame too large", ["EAGER", "1001", "1000"]),
        (Header(VERSION, Kind.PING, 0, 0, 0, 0, 1, 0), "frame too large", ["PING", "limit of 0"]),
        # what speaks another version is told so, whatever else is wrong with it
        (Header(9, 255, 0, 0, 0, 0, 2**64 - 1, 0), "wrong frame version", ["version 9"]),
    ],
)
def test_explain(header: Header, reason: str, words: list[str]) -> None:
    error = explain(header, LIMITS.payloads())
    assert type(error) is ProtocolError
    assert error.reason == reason
    for word in words:
        assert word in str(error)
