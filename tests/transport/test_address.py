from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.errors import ConfigError
from rankmesh.transport import Address, register_transport, transport_for, unregister_transport
from rankmesh.transport.inproc import InprocTransport
from rankmesh.transport.tcp import TcpTransport

VALID = {
    "tcp://127.0.0.1:7000": Address("tcp", "127.0.0.1", 7000),
    "tcp://[::1]:0": Address("tcp", "::1", 0),
    "tcp://[fe80::1%eth0]:7": Address("tcp", "fe80::1%eth0", 7),
    "tcp://[::ffff:10.0.0.1]:65535": Address("tcp", "::ffff:10.0.0.1", 65535),
    "tls://node-7.rack_2.example:7": Address("tls", "node-7.rack_2.example", 7),
    "inproc://store": Address("inproc", "store"),
    "inproc://": Address("inproc", ""),
}


@pytest.mark.parametrize("text", VALID)
def test_parse_and_str_are_inverse(text: str) -> None:
    assert Address.parse(text) == VALID[text]
    assert str(Address.parse(text)) == text


INVALID = {
    "127.0.0.1:7000": "Write it as scheme://host:port",
    "": "Write it as scheme://host:port",
    "ftp://127.0.0.1:21": "unknown scheme 'ftp'. Use one of inproc, shm, tcp, tls",
    "TCP://127.0.0.1:21": "unknown scheme 'TCP'",
    "tcp://127.0.0.1": "no host and port",
    "tcp://:7000": "no host and port",
    "tcp://::1:7000": "no host and port",
    "tcp://[::1]": "no host and port",
    "tcp://127.0.0.1:": "no host and port",
    "tcp://127.0.0.1:-1": "no host and port",
    "tcp://127.0.0.1:7 ": "no host and port",
    "tcp://127.0.0.1:7\n": "no host and port",
    "tcp://127.0.0.1:7/path": "no host and port",
    "tcp://user@127.0.0.1:7": "no host and port",
    "tcp://127.0.0.1:65536": "port from 0 to 65535",
    "tcp://127.0.0.1:99999999999999999999": "port from 0 to 65535",
    "tcp://127.0.0.1:٣": "no host and port",
    "tcp://[127.0.0.1]:7": "IPv6 address",
    "tcp://[nonsense]:7": "IPv6 address",
    "inproc://a/b": "name of unusual characters",
}


@pytest.mark.parametrize("text", INVALID)
def test_what_is_not_an_address_is_refused_with_the_reason(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Address.parse(text)
    assert INVALID[text] in str(caught.value)
    assert repr(text) in str(caught.value)


@given(st.text(max_size=40) | st.from_regex(r"(tcp|tls|inproc)://.{0,30}"))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        address = Address.parse(text)
    except ConfigError:
        return
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    "text,wildcard,loopback",
    [
        ("tcp://0.0.0.0:7", True, False),
        ("tcp://[::]:7", True, False),
        ("tcp://[::ffff:0.0.0.0]:7", True, False),
        ("tcp://127.0.0.1:7", False, True),
        ("tcp://127.255.3.4:7", False, True),
        ("tcp://[::1]:7", False, True),
        ("tcp://[::ffff:127.0.0.1]:7", False, True),
        ("tls://10.0.0.1:7", False, False),
        ("tcp://[fe80::1%eth0]:7", False, False),
        ("tcp://localhost:7", False, False),  # a name is only a name until it is resolved
        ("inproc://x", False, True),
        ("inproc://", False, True),
    ],
)
def test_kinds_of_hosts(text: str, wildcard: bool, loopback: bool) -> None:
    address = Address.parse(text)
    assert (address.is_wildcard, address.is_loopback) == (wildcard, loopback)


def test_a_scheme_has_one_transport() -> None:
    tcp = transport_for(Address.parse("tcp://127.0.0.1:0"))
    assert isinstance(tcp, TcpTransport)
    assert transport_for(Address.parse("tcp://[::1]:1")) is tcp


def test_a_transport_of_ones_own() -> None:
    mine = InprocTransport()
    with pytest.raises(ConfigError, match="unknown scheme 'mine'"):
        transport_for(Address("mine", "x"))
    register_transport("mine", lambda: mine, form="name")
    try:
        assert transport_for(Address.parse("mine://x")) is mine
        with pytest.raises(ConfigError, match="'mine' is taken"):
            register_transport("mine", lambda: mine)
    finally:
        unregister_transport("mine")
    with pytest.raises(ConfigError, match="unknown scheme 'mine'"):
        Address.parse("mine://x")
    with pytest.raises(ConfigError, match="not registered"):
        unregister_transport("mine")
    with pytest.raises(ConfigError, match="cannot be a scheme"):
        register_transport("My scheme", lambda: mine)
