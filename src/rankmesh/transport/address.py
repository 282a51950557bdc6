"""Addresses: `scheme://host:port`, or `scheme://name` where names are not of the network.

    tcp://127.0.0.1:7000   tls://node7.example:0   tcp://[fe80::1%eth0]:7   inproc://store   inproc://

Port 0 and the empty name ask a listener to choose. Pure: nothing is looked up here, so a host name is never loopback.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final, Literal, Self

from rankmesh.errors import ConfigError

#: How the rest of an address is written: with host and port, or with one name.
Form = Literal["host:port", "name"]

#: Known schemes. `register_transport` adds to it.
FORMS: Final[dict[str, Form]] = {"inproc": "name", "shm": "name", "tcp": "host:port", "tls": "host:port"}

MAX_PORT: Final = 65535

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
_NAME = re.compile(r"[A-Za-z0-9._-]*")
_HOST_AND_PORT = re.compile(r"(?:\[(?P<ipv6>[^\[\]]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>[0-9]+)")


@dataclass(frozen=True, slots=True)
class Address:
    """Where something listens. `str()` gives the text that `parse()` takes."""

    scheme: str
    host: str
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ConfigError for what is not an address of a known scheme."""
        scheme, separator, rest = text.partition("://")
        if not separator:
            raise ConfigError(
                f"{text!r} is not an address. Write it as scheme://host:port, such as tcp://127.0.0.1:7000."
            )
        form = FORMS.get(scheme)
        if form is None:
            raise ConfigError(f"{text!r} has the unknown scheme {scheme!r}. Use one of {', '.join(sorted(FORMS))}.")
        return cls(scheme, *_PARSERS[form](text, rest))

    def __str__(self) -> str:
        if self.is_name:
            return f"{self.scheme}://{self.host}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

    @property
    def ip(self) -> IPv4Address | IPv6Address | None:
        """The numeric host, IPv4 also where it is written as IPv6 (`::ffff:10.0.0.1`); None for a name."""
        try:
            ip = ip_address(self.host)
        except ValueError:
            return None
        return (ip.ipv4_mapped or ip) if isinstance(ip, IPv6Address) else ip

    @property
    def is_wildcard(self) -> bool:
        """Every interface: an address to listen on, but not one to connect to."""
        return self.ip is not None and self.ip.is_unspecified

    @property
    def is_name(self) -> bool:
        """Of no network: there is nothing to look up."""
        return FORMS.get(self.scheme) == "name"

    @property
    def is_loopback(self) -> bool:
        """Reachable from this host only."""
        return self.is_name or (self.ip is not None and self.ip.is_loopback)

    def with_scheme(self, scheme: str) -> Self:
        return replace(self, scheme=scheme)


def check_scheme(scheme: str) -> None:
    """Raises ConfigError unless `scheme` can stand in front of `://`."""
    if not _SCHEME.fullmatch(scheme):
        raise ConfigError(f"{scheme!r} cannot be a scheme. Use lower-case letters, digits, '+', '-' and '.'.")


def _parse_host_and_port(text: str, rest: str) -> tuple[str, int]:
    match = _HOST_AND_PORT.fullmatch(rest)
    if match is None:
        raise ConfigError(f"{text!r} has no host and port. Write host:port, [IPv6]:port, or port 0 for any free port.")
    ipv6, host, port = match.group("ipv6", "host", "port")
    if ipv6 is not None:
        try:
            IPv6Address(ipv6)
        except ValueError as error:
            raise ConfigError(f"{text!r} has no IPv6 address between its brackets: {error}. Correct it.") from error
    if int(port) > MAX_PORT:
        raise ConfigError(f"{text!r} has the port {port}. Use a port from 0 to {MAX_PORT}.")
    return ipv6 or host, int(port)


def _parse_name(text: str, rest: str) -> tuple[str, int]:
    if not _NAME.fullmatch(rest):
        raise ConfigError(f"{text!r} has a name of unusual characters. Use letters, digits, '.', '_' and '-'.")
    return rest, 0


_PARSERS: Final = {"host:port": _parse_host_and_port, "name": _parse_name}
