"""The embedded store: where ranks find each other. A small key-value service over an Endpoint, for one cluster's life.

The server keeps keys and values in memory, bounded in bytes, and answers from the progress engine. Reads can wait: a
waiting read is answered when its keys are there, or at its deadline with what is there by then, so that the client
can tell what is missing. Everybody who reaches it has proved to know the cluster token.
"""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic
from typing import Any, Final, Self, TypeVar

import msgspec

from rankmesh.config import MIB, Config
from rankmesh.endpoint import Endpoint, Peer
from rankmesh.endpoint.router import PeerRouter, Router
from rankmesh.endpoint.timers import Timer
from rankmesh.errors import DeadlineError, RankmeshError, RemoteError

#: The number of this service on the wire.
SERVICE: Final = 1
#: Keys and values held at most: a world of 10,000 ranks needs about 3 MiB.
STORE_BYTES: Final = 64 * MIB
#: A read that waits is answered after this many seconds at the latest.
LONGEST_WAIT: Final = 24 * 3600.0
#: A read's reply travels a little longer than the wait it reports on.
GRACE: Final = 2.0


class Set(msgspec.Struct, tag="set", frozen=True):
    """Set a key. `claim`: only if it is not there; the answer is what is there in the end."""

    key: str
    value: bytes
    claim: bool = False


class Swap(msgspec.Struct, tag="swap", frozen=True):
    """Set a key if its value is the expected one; the answer holds what is there in the end."""

    key: str
    expected: bytes
    value: bytes


class Add(msgspec.Struct, tag="add", frozen=True):
    """Add to a counter; the answer is its new value."""

    key: str
    amount: int


class Get(msgspec.Struct, tag="get", frozen=True):
    """Wait until all keys are there, at most `timeout` seconds; the answer holds those that are."""

    keys: list[str]
    timeout: float


class Delete(msgspec.Struct, tag="delete", frozen=True):
    key: str


class Keys(msgspec.Struct, tag="keys", frozen=True):
    """The keys that begin with a prefix."""

    prefix: str


T = TypeVar("T")
Ask = Set | Swap | Add | Get | Delete | Keys

_asks = msgspec.msgpack.Decoder(Ask)
_encode = msgspec.msgpack.Encoder().encode


class _Waiter:
    """A read that waits for keys."""

    def __init__(self, router: PeerRouter, ident: int, ask: Get) -> None:
        self.router = router
        self.ident = ident
        self.keys = ask.keys
        self.missing: set[str] = set()
        self.timer: Timer | None = None


class StoreServer:
    """Hosts the store on an address. `address` is where clients connect."""

    def __init__(self, address: str, config: Config, *, advertise: str | None = None) -> None:
        self._values: dict[str, bytes] = {}
        self._nbytes = 0
        self._waiters: dict[str, set[_Waiter]] = {}
        self._endpoint = Endpoint(
            address, name="store", config=config, advertise=advertise, services={SERVICE: self._handle}
        )

    @property
    def address(self) -> str:
        return self._endpoint.address

    @property
    def clients(self) -> int:
        """How many are connected."""
        return len(self._endpoint.peers)

    def close(self) -> None:
        self._endpoint.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<StoreServer at {self.address}: {len(self._values)} keys, {self.clients} clients>"

    # ------------------------------------------------------------------ with the engine's lock

    def _handle(self, router: Router, ident: int, payload: memoryview, owned: bool) -> None:
        assert isinstance(router, PeerRouter)
        try:
            ask: Ask = _asks.decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            _answer(router, ident, f"the request cannot be read: {error}", failed=True)
            return
        match ask:
            case Set():
                self._set(router, ident, ask)
            case Swap(key, expected, value):
                self._swap(router, ident, key, expected, value)
            case Add(key, amount):
                self._add(router, ident, key, amount)
            case Get():
                self._get(router, ident, ask)
            case Delete(key):
                self._nbytes -= len(key) + len(self._values[key]) if key in self._values else 0
                _answer(router, ident, self._values.pop(key, None) is not None)
            case Keys(prefix):
                _answer(router, ident, sorted(key for key in self._values if key.startswith(prefix)))

    def _set(self, router: PeerRouter, ident: int, ask: Set) -> None:
        if ask.claim and ask.key in self._values:
            _answer(router, ident, self._values[ask.key])
        elif self._put(ask.key, ask.value):
            _answer(router, ident, ask.value)
        else:
            _answer(router, ident, _full(), failed=True)

    def _swap(self, router: PeerRouter, ident: int, key: str, expected: bytes, value: bytes) -> None:
        if self._values.get(key) != expected or self._put(key, value):
            _answer(router, ident, {key: self._values[key]} if key in self._values else {})
        else:
            _answer(router, ident, _full(), failed=True)

    def _add(self, router: PeerRouter, ident: int, key: str, amount: int) -> None:
        try:
            value = int(self._values.get(key, b"0")) + amount
        except ValueError:
            _answer(router, ident, f"{key!r} is not a counter", failed=True)
            return
        if self._put(key, b"%d" % value):
            _answer(router, ident, value)
        else:
            _answer(router, ident, _full(), failed=True)

    def _put(self, key: str, value: bytes) -> bool:
        old = self._values.get(key)
        nbytes = self._nbytes + len(value) + (len(key) if old is None else -len(old))
        if nbytes > STORE_BYTES:
            return False
        self._nbytes = nbytes
        self._values[key] = value
        for waiter in self._waiters.pop(key, ()):
            waiter.missing.discard(key)
            if not waiter.missing:
                self._serve(waiter)
        return True

    def _get(self, router: PeerRouter, ident: int, ask: Get) -> None:
        waiter = _Waiter(router, ident, ask)
        waiter.missing = {key for key in ask.keys if key not in self._values}
        if not waiter.missing or not ask.timeout > 0:  # nan is not either
            self._serve(waiter)
            return
        for key in waiter.missing:
            self._waiters.setdefault(key, set()).add(waiter)
        waiter.timer = router.engine.call_at(monotonic() + min(ask.timeout, LONGEST_WAIT), lambda: self._expire(waiter))

    def _expire(self, waiter: _Waiter) -> None:
        for key in waiter.missing:
            others = self._waiters.get(key, set())
            others.discard(waiter)
            if not others:
                self._waiters.pop(key, None)
        self._serve(waiter)

    def _serve(self, waiter: _Waiter) -> None:
        if waiter.timer is not None:
            waiter.timer.cancel()
        _answer(waiter.router, waiter.ident, {key: self._values[key] for key in waiter.keys if key in self._values})


def _full() -> str:
    return f"the store is full ({STORE_BYTES} bytes)"


def _answer(router: PeerRouter, ident: int, value: Any, failed: bool = False) -> None:
    body = value.encode() if failed else _encode(value)
    router.reply(ident, [memoryview(body)], len(body), failed)


class StoreClient:
    """The store, as one of its clients sees it. Every call raises PeerLost or DeadlineError when the store does not
    answer."""

    def __init__(self, endpoint: Endpoint, peer: Peer) -> None:
        self._endpoint = endpoint
        self._peer = peer

    def set(self, key: str, value: bytes, timeout: float | None = None) -> None:
        self._ask(Set(key, value), bytes, timeout)

    def claim(self, key: str, value: bytes, timeout: float | None = None) -> bytes:
        """Set the key unless it is there already; return what is there in the end."""
        return self._ask(Set(key, value, claim=True), bytes, timeout)

    def swap(self, key: str, expected: bytes, value: bytes, timeout: float | None = None) -> bytes | None:
        """Set the key if its value is the expected one; return what is there in the end, None for nothing."""
        return self._ask(Swap(key, expected, value), dict[str, bytes], timeout).get(key)

    def add(self, key: str, amount: int, timeout: float | None = None) -> int:
        return self._ask(Add(key, amount), int, timeout)

    def get(self, key: str, timeout: float | None = None) -> bytes:
        """Wait for a key. Raises DeadlineError when it does not appear."""
        found = self.get_many([key], timeout)
        if key not in found:
            raise DeadlineError(
                f"The key {key!r} did not appear in the store in time.", op="store get", known="the store answers"
            )
        return found[key]

    def get_many(self, keys: Iterable[str], timeout: float | None = None) -> dict[str, bytes]:
        """Wait until all keys are there; return those that are there by the deadline."""
        timeout = self._endpoint.config.timeout if timeout is None else timeout
        return self._ask(Get(list(keys), timeout), dict[str, bytes], timeout + GRACE)

    def delete(self, key: str, timeout: float | None = None) -> bool:
        return self._ask(Delete(key), bool, timeout)

    def keys(self, prefix: str = "", timeout: float | None = None) -> list[str]:
        return self._ask(Keys(prefix), list[str], timeout)

    def _ask(self, ask: Ask, kind: type[T], timeout: float | None) -> T:
        reply = self._endpoint.request(
            self._peer, SERVICE, _encode(ask), f"store {ask.__class__.__name__.lower()} at", timeout
        )
        if reply.failed:
            text = bytes(reply.payload).decode(errors="replace")
            raise RemoteError(
                f"The store refused: {text}.", remote_type="StoreError", remote_message=text, peer=str(self._peer)
            )
        try:
            return msgspec.msgpack.decode(reply.payload, type=kind)
        except msgspec.MsgspecError as error:
            raise RankmeshError(
                f"The store's answer cannot be read: {error}. Run the same version of rankmesh everywhere."
            ) from error
