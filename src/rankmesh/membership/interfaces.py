"""Which address a rank advertises, so that its peers can reach it.

Rules:

1. What the user says (`Config.interface`) counts, and if it fits nothing that is an error: never a silent substitute.
2. Otherwise it is the source address the kernel would use towards the rendezvous: peers reach the rendezvous, so
   they and we share that network. No packet is sent to find out.
3. Loopback is advertised only if the rendezvous was *given* as loopback. A host name that /etc/hosts maps to 127.0.1.1
   (Debian does so for the host's own name) means another address to everybody else: there the default route decides.
4. Never 0.0.0.0, never a link-local address, never an interface that is down.
5. The choice is logged with its reason and the alternatives, because a wrong one is the commonest failure of all.
"""

from __future__ import annotations

import ctypes
import logging
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final

from rankmesh.errors import ConfigError, JoinError
from rankmesh.membership.environment import is_loopback

_log = logging.getLogger("rankmesh")

#: Addresses of documentation networks (RFC 5737, RFC 3849): hardly anybody has them, so the default route leads there.
_ANYWHERE: Final = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
_LOOPBACK: Final = {socket.AF_INET: "127.0.0.1", socket.AF_INET6: "::1"}

_IFF_UP: Final = 0x1
_IFF_LOOPBACK: Final = 0x8
_IFF_RUNNING: Final = 0x40


@dataclass(frozen=True, slots=True)
class Interface:
    """One address of one network interface."""

    name: str
    address: str
    #: Bits of the network part.
    prefix: int
    up: bool
    loopback: bool

    @property
    def ip(self) -> IPv4Address | IPv6Address:
        return ip_address(self.address)

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET if self.ip.version == 4 else socket.AF_INET6

    def __str__(self) -> str:
        return f"{self.name} {self.address}/{self.prefix}{'' if self.up else ' (down)'}"


@dataclass(frozen=True, slots=True)
class Choice:
    """The address to advertise, and why."""

    address: str
    interface: str
    reason: str
    #: The other addresses of this host that could have been taken.
    alternatives: tuple[Interface, ...]

    def __str__(self) -> str:
        others = ", ".join(map(str, self.alternatives)) or "none"
        return f"{self.address} on {self.interface}: {self.reason} (alternatives: {others})"


class _SockAddr(ctypes.Structure):
    _fields_ = (("family", ctypes.c_ushort), ("data", ctypes.c_ubyte * 26))


class _IfAddrs(ctypes.Structure):
    """`struct ifaddrs` of Linux, as far as it is read here."""


_IfAddrs._fields_ = (
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SockAddr)),
    ("netmask", ctypes.POINTER(_SockAddr)),
)

#: Where the address lies in `_SockAddr.data`: behind the port, and in IPv6 also behind the flow label.
_ADDRESS_BYTES: Final = {int(socket.AF_INET): slice(2, 6), int(socket.AF_INET6): slice(6, 22)}


def list_interfaces() -> list[Interface]:
    """Every IPv4 and IPv6 address of this host, in the kernel's order."""
    libc = ctypes.CDLL(None, use_errno=True)
    head = ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(head)) != 0:
        raise JoinError(
            f"The network interfaces cannot be listed (errno {ctypes.get_errno()}). Pass the address to advertise."
        )
    found = []
    try:
        entry = head
        while entry:  # type: ignore[truthy-bool]  # a null pointer is false
            item = entry.contents
            if item.address and item.netmask and (where := _ADDRESS_BYTES.get(item.address.contents.family)):
                mask = bytes(item.netmask.contents.data[where])
                found.append(
                    Interface(
                        name=item.name.decode(),
                        address=str(ip_address(bytes(item.address.contents.data[where]))),
                        prefix=int.from_bytes(mask, "big").bit_count(),
                        up=item.flags & _IFF_UP != 0 and item.flags & _IFF_RUNNING != 0,
                        loopback=item.flags & _IFF_LOOPBACK != 0,
                    )
                )
            entry = item.next
    finally:
        libc.freeifaddrs(head)
    return found


def route_to(host: str, port: int) -> str:
    """The address others know us by on the way to `host`. Looks the name up; sends nothing.

    Loopback only if `host` was given as such, or if this host has no other network at all."""
    try:
        resolved = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise JoinError(
            f"The rendezvous host {host!r} cannot be resolved: {error}. Check the name, or give its address."
        ) from error
    ours = {i.address for i in list_interfaces()}
    for family, _, _, _, target in resolved:
        # If the rendezvous is here, its own address is the one everybody knows; the kernel might name another.
        source = str(target[0]) if target[0] in ours else _source_towards(family, target)
        if source is not None:
            remote = not ip_address(source).is_loopback or is_loopback(host)
            return source if remote else _source_towards(family, (_ANYWHERE[family], port)) or source
    raise JoinError(f"There is no route from this host to the rendezvous {host!r}. Check the network or the address.")


def _source_towards(family: int, target: tuple[object, ...]) -> str | None:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(target)
        except OSError:
            return None  # no route: the caller says what that means
        return str(probe.getsockname()[0]).partition("%")[0]


def choose(interfaces: Sequence[Interface], spec: str, route_source: str, family: int = socket.AF_UNSPEC) -> Choice:
    """Choose the address to advertise. Pure.

    `spec` is `Config.interface`; `route_source` is what `route_to(rendezvous)` said; `family` restricts what `spec` may
    match to IPv4 or IPv6. Of several matches the route's address is taken if it is among them, otherwise the first by
    the order of `spec`, then by the kernel's."""
    usable = [i for i in interfaces if i.up and not i.ip.is_link_local and not i.ip.is_unspecified]
    if not spec.strip():
        return _by_route(usable, route_source)
    includes, excludes = _parse(spec)
    allowed = [
        i
        for i in usable
        if family in (socket.AF_UNSPEC, i.family) and not any(_matches(pattern, i) for pattern in excludes)
    ]
    if includes:
        ranked = [i for pattern in includes for i in allowed if _matches(pattern, i)]
    else:
        ranked = [i for i in allowed if not i.loopback]
    if not ranked:
        there = ", ".join(map(str, interfaces)) or "no interface at all"
        raise ConfigError(
            f"Config.interface={spec!r} fits no usable address of this host. There is: {there}. Name one of these."
        )
    by_route = next((i for i in ranked if i.address == route_source), None)
    chosen = by_route or ranked[0]
    reason = f"interface={spec!r} asks for it" + (", and the route to the rendezvous leads there" if by_route else "")
    return _choice(chosen, reason, usable)


def choose_address(spec: str, host: str, port: int) -> Choice:
    """Choose the address to advertise to those who meet at the rendezvous `host`, and log it."""
    choice = choose(list_interfaces(), spec, route_to(host, port))
    _log.info("advertising %s", choice)
    return choice


def _by_route(usable: Sequence[Interface], source: str) -> Choice:
    if ip_address(source).is_loopback:
        name = next((i.name for i in usable if i.loopback), "lo")
        address = _LOOPBACK[socket.AF_INET if ip_address(source).version == 4 else socket.AF_INET6]
        others = tuple(i for i in usable if not i.loopback)
        return Choice(address, name, "the rendezvous is on the loopback interface of this host", others)
    chosen = next((i for i in usable if i.address == source), None)
    if chosen is None:
        there = ", ".join(map(str, usable)) or "none"
        raise ConfigError(
            f"The route to the rendezvous starts at {source}, which no usable interface has ({there}). "
            "Set Config.interface to one of these."
        )
    return _choice(chosen, "the route to the rendezvous starts there", usable)


def _choice(chosen: Interface, reason: str, usable: Iterable[Interface]) -> Choice:
    others = tuple(i for i in usable if i is not chosen and not i.loopback)
    return Choice(chosen.address, chosen.name, reason, others)


_Pattern = str | IPv4Network | IPv6Network


def _parse(spec: str) -> tuple[list[_Pattern], list[_Pattern]]:
    """(what is asked for, what is excluded)."""
    includes: list[_Pattern] = []
    excludes: list[_Pattern] = []
    for item in (part.strip() for part in spec.split(",")):
        text = item.removeprefix("^")
        if not text:
            raise ConfigError(
                f"Config.interface={spec!r} has an empty item. Separate names, globs, ^excludes and networks by commas."
            )
        (excludes if item.startswith("^") else includes).append(_pattern(text, spec))
    return includes, excludes


def _pattern(text: str, spec: str) -> _Pattern:
    if "/" not in text and ":" not in text and not text.replace(".", "").isdigit():
        return text
    try:
        return ip_network(text, strict=False)
    except ValueError as error:
        raise ConfigError(
            f"{text!r} in Config.interface={spec!r} is not a network: {error}. Write it like 10.0.0.0/8."
        ) from error


def _matches(pattern: _Pattern, interface: Interface) -> bool:
    if isinstance(pattern, str):
        return fnmatchcase(interface.name, pattern)
    return interface.ip.version == pattern.version and interface.ip in pattern
