"""The address a rank advertises is one its peers can reach."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from ipaddress import ip_address

import pytest

from rankmesh.errors import ConfigError, JoinError
from rankmesh.membership.interfaces import Interface, choose, choose_address, list_interfaces, route_to
from timing import scaled

LO = Interface("lo", "127.0.0.1", 8, up=True, loopback=True)
LO6 = Interface("lo", "::1", 128, up=True, loopback=True)
ETH0 = Interface("eth0", "10.0.0.5", 24, up=True, loopback=False)
ETH1 = Interface("eth1", "192.168.7.5", 24, up=True, loopback=False)
ETH1_SIX = Interface("eth1", "fd00::5", 64, up=True, loopback=False)
ETH1_LINK = Interface("eth1", "fe80::5", 64, up=True, loopback=False)
DOCKER = Interface("docker0", "172.17.0.1", 16, up=True, loopback=False)
DOWN = Interface("eth9", "10.9.0.5", 24, up=False, loopback=False)
HOST = [LO, LO6, DOCKER, ETH0, ETH1, ETH1_SIX, ETH1_LINK, DOWN]


@pytest.mark.parametrize(
    "spec, route, expected",
    [
        ("", "10.0.0.5", ETH0),
        ("", "fd00::5", ETH1_SIX),
        ("", "127.0.0.1", LO),
        ("", "127.0.1.1", LO),
        ("", "::1", LO6),
        ("eth1", "10.0.0.5", ETH1),
        ("eth*", "192.168.7.5", ETH1),
        ("eth*", "127.0.0.1", ETH0),
        ("eth1,eth0", "127.0.0.1", ETH1),
        ("eth1,eth0", "10.0.0.5", ETH0),
        ("192.168.0.0/16", "10.0.0.5", ETH1),
        ("192.168.7.5", "10.0.0.5", ETH1),
        ("fd00::/8", "10.0.0.5", ETH1_SIX),
        ("^docker*", "127.0.0.1", ETH0),
        ("^docker*,^eth0", "10.0.0.5", ETH1),
        ("^10.0.0.0/8", "172.17.0.1", DOCKER),
        (" eth* , ^eth0 ", "10.0.0.5", ETH1),
        ("lo", "10.0.0.5", LO),
    ],
)
def test_choice(spec: str, route: str, expected: Interface) -> None:
    choice = choose(HOST, spec, route)
    assert (choice.address, choice.interface) == (expected.address, expected.name)
    assert expected not in choice.alternatives
    assert not any(other.loopback or not other.up for other in choice.alternatives)
    assert (repr(spec) if spec.strip() else "rendezvous") in choice.reason


def test_the_family_restricts_what_matches() -> None:
    assert choose(HOST, "eth1", "10.0.0.5", socket.AF_INET6).address == "fd00::5"
    assert choose(HOST, "eth1", "10.0.0.5", socket.AF_INET).address == "192.168.7.5"


@pytest.mark.parametrize("spec", ["wlan*", "10.77.0.0/16", "eth9", "eth0,^eth*", "^*"])
def test_what_fits_nothing_is_an_error_that_lists_what_there_is(spec: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(HOST, spec, "10.0.0.5")
    message = str(caught.value)
    assert repr(spec) in message
    for interface in HOST:
        assert f"{interface.name} {interface.address}/{interface.prefix}" in message
    assert "eth9 10.9.0.5/24 (down)" in message


@pytest.mark.parametrize("spec", ["eth0,,eth1", "^", "10.0.0.0/33", "1.2.3", "fd00::/x"])
def test_a_spec_that_means_nothing_is_an_error(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"Config\.interface"):
        choose(HOST, spec, "10.0.0.5")


def test_a_route_from_nowhere_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"10\.1\.1\.1"):
        choose(HOST, "", "10.1.1.1")


def test_this_host_has_a_loopback_interface() -> None:
    there = list_interfaces()
    assert any(i.name == "lo" and i.address == "127.0.0.1" and i.prefix == 8 and i.loopback and i.up for i in there)
    names = {name for _, name in socket.if_nameindex()}
    assert {i.name for i in there} <= names


def test_the_route_to_loopback_is_loopback() -> None:
    assert route_to("127.0.0.1", 7000) == "127.0.0.1"
    assert ip_address(route_to("localhost", 7000)).is_loopback


def test_an_unknown_name_is_a_join_error_that_names_it() -> None:
    with pytest.raises(JoinError, match=r"nosuchhost\.invalid"):
        route_to("nosuchhost.invalid", 7000)


def test_a_host_name_that_hosts_maps_to_loopback_is_not_advertised_as_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian maps the host's own name to 127.0.1.1, while other hosts get its real address from DNS."""

    def resolve(host: str, port: int, **_: object) -> list[object]:
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.1.1", port))]

    elsewhere = [i for i in list_interfaces() if i.up and not i.loopback and i.ip.version == 4]
    if not elsewhere:
        pytest.skip("this host has no network but loopback")
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert route_to("thishost", 7000) in {i.address for i in elsewhere}


def test_the_choice_is_logged_with_reason_and_alternatives(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="rankmesh"):
        choice = choose_address("", "127.0.0.1", 7000)
    (record,) = caplog.records
    assert record.name == "rankmesh"
    assert choice.address in record.getMessage()
    assert choice.reason in record.getMessage()
    assert "alternatives: " in record.getMessage()


@pytest.fixture
def namespace() -> Iterator[str]:
    """A host of its own: a network namespace with a way to 10.77.1.0/24, and an interface that leads nowhere."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and ip")
    name = f"rankmesh-{uuid.uuid4().hex[:8]}"
    ip = ["ip", "-n", name]
    if subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode != 0:
        pytest.skip("network namespaces cannot be made here")
    try:
        for words in (
            "link set lo up",
            "link add nowhere type veth peer name nowhere-peer",
            "addr add 10.66.0.1/24 dev nowhere",
            "link set nowhere up",
            "link set nowhere-peer up",
            "link add wire type veth peer name wire-peer",
            "addr add 10.77.1.2/24 dev wire",
            "addr add 10.77.1.3/24 dev wire",
            "link set wire up",
            "link set wire-peer up",
        ):
            subprocess.run([*ip, *words.split()], check=True, capture_output=True)
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


def choose_in(namespace: str, spec: str, host: str) -> list[str]:
    code = (
        "import json, sys; from rankmesh.membership.interfaces import choose_address as c;"
        "r = c(sys.argv[1], sys.argv[2], 7000); print(json.dumps([r.address, r.interface]))"
    )
    command = ["ip", "netns", "exec", namespace, sys.executable, "-c", code, spec, host]
    output = subprocess.run(command, check=True, capture_output=True, timeout=scaled(30)).stdout
    words: list[str] = json.loads(output)
    return words


def test_beside_an_unreachable_interface_the_route_decides(namespace: str) -> None:
    assert choose_in(namespace, "", "10.77.1.1") == ["10.77.1.2", "wire"]
    assert choose_in(namespace, "", "10.77.1.3") == [
        "10.77.1.3",
        "wire",
    ]  # the rendezvous is here, on that very address
    assert choose_in(namespace, "nowhere", "10.77.1.1") == ["10.66.0.1", "nowhere"]
    assert choose_in(namespace, "10.77.1.3/32", "10.77.1.1") == [
        "10.77.1.3",
        "wire",
    ]  # a second address of one interface
