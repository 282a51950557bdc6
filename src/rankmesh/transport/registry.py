"""Which transport carries which scheme. A transport's module is imported when its scheme is first used."""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib import import_module
from typing import Final

from rankmesh.errors import ConfigError
from rankmesh.transport.address import FORMS, Address, Form, check_scheme
from rankmesh.transport.base import Transport

Factory = Callable[[], Transport]


def _from_module(name: str) -> Factory:
    """A module of this package offers its transport by a function `transport()`."""

    def load() -> Transport:
        found: Transport = import_module(f"rankmesh.transport.{name}").transport()
        return found

    return load


# Lazily, so that `ssl` (10 ms and 5 MB) is only loaded by programs that use tls://.
_factories: Final[dict[str, Factory]] = {name: _from_module(name) for name in ("inproc", "shm", "tcp", "tls")}
_transports: Final[dict[str, Transport]] = {}
_lock: Final = threading.Lock()


def register_transport(scheme: str, factory: Factory, *, form: Form = "host:port") -> None:
    """Let addresses of `scheme` be carried by what `factory()` returns; it is called once, at the first use.

    `form` says how such addresses are written. Raises ConfigError if the scheme is taken.
    """
    check_scheme(scheme)
    with _lock:
        if scheme in _factories:
            raise ConfigError(f"The scheme {scheme!r} is taken. Choose another, or unregister_transport() it first.")
        FORMS[scheme] = form
        _factories[scheme] = factory


def unregister_transport(scheme: str) -> None:
    """Forget a scheme; links and listeners that exist go on."""
    with _lock:
        if scheme not in _factories:
            raise ConfigError(
                f"The scheme {scheme!r} is not registered. Registered are {', '.join(sorted(_factories))}."
            )
        FORMS.pop(scheme)
        _factories.pop(scheme)
        _transports.pop(scheme, None)


def transport_for(address: Address) -> Transport:
    """The one transport of the address's scheme. Raises ConfigError if nothing carries it."""
    transport = _transports.get(address.scheme)
    if transport is not None:
        return transport
    with _lock:
        factory = _factories.get(address.scheme)
        if factory is None:
            raise ConfigError(
                f"{address} has the unknown scheme {address.scheme!r}. Use one of {', '.join(sorted(_factories))}."
            )
        if address.scheme not in _transports:
            _transports[address.scheme] = factory()
        return _transports[address.scheme]
