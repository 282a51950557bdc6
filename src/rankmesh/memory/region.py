"""Regions: memory that its owner lets others read and write, and the owner's handle of it.

A region is known to others by its name when they open it, and by its generation from then on: a number of 63 bits that
no other region of this owner has, before or after it (owners begin at random). So a handle can never reach another
region's bytes. All methods that others may call take the engine's lock; those below "for the server" need it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from rankmesh.buffers import address_of, array_over, is_tensor, readable
from rankmesh.codec.dtypes import parse
from rankmesh.endpoint.peer import Peer
from rankmesh.endpoint.ranks import Ranks
from rankmesh.endpoint.router import Router
from rankmesh.endpoint.work import Work
from rankmesh.errors import CodecError, RankmeshError, StaleRegion, UsageError
from rankmesh.memory.layout import Pages, whole
from rankmesh.memory.protocol import (
    BLOCK_BYTES,
    CELL,
    PIECE_BYTES,
    Ask,
    Bit,
    Description,
    Why,
    describe_dtype,
    encode_key,
)

if TYPE_CHECKING:
    from rankmesh.memory.mapping import Permits
    from rankmesh.memory.moving import Moving
    from rankmesh.memory.server import MemoryServer

ACCESS: Final = ("r", "w", "rw")
#: Notifications that may wait in one region for somebody to take them; more are refused, before a byte is written.
MAX_NOTICES: Final = 65_536
_WORD: Final = (1 << 64) - 1


class Refusal(Exception):
    """Why a request is not served: told to whoever asked."""

    def __init__(self, why: Why, message: str, names: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.why = why
        self.message = message
        self.names = names


class Notification(NamedTuple):
    """A write that told of itself: under which key, and who wrote: a rank, as the mesh or the group counts by which the
    region was registered, or a Peer that has none there."""

    key: str | int
    source: Any


class Awaited(Work[Notification]):
    """Somebody waits for a notification."""

    def __init__(self, region: Region, key: str | int, timeout: float) -> None:
        what = f"wait for notification {key!r} in region {region.name!r}"
        super().__init__(region.server.engine, what, None, None, timeout)
        self.key = key
        self._region = region

    def _give_up(self, error: RankmeshError) -> None:
        self._region.withdraw(self)
        self.fail(error)


class Region:
    """Memory of this process that others may read and write. `MemoryAgent.register()` and `.allocate()` make them."""

    def __init__(
        self,
        server: MemoryServer,
        name: str,
        buffer: Any,
        access: str,
        generation: int,
        shared: Permits | None = None,
    ) -> None:
        if access not in ACCESS:
            raise UsageError(f"access= is 'r', 'w' or 'rw', not {access!r}. Pass one of these.")
        self.server = server
        self.name = name
        self.access = access
        self.readable = "r" in access
        self.writable = "w" in access
        self.generation = generation
        #: The memory, as bytes; and what keeps it alive.
        self.view = _bytes_of(buffer, self.writable)
        self.buffer: Any = buffer
        self.nbytes = len(self.view)
        if not self.nbytes:
            raise UsageError(f"Region {name!r} would have no bytes. Register memory that is not empty.")
        self.dtype, self.shape = _describe(buffer, self.nbytes)
        self.address = address_of(self.view)
        self._aligned = self.address % 8 == 0
        #: By which same-host peers map it, or read it where it lies: made when the first of these opens it.
        self.shared: Permits | None = shared
        self.mappable = shared is not None
        #: Transfers under way, by which it is kept.
        self.moving: set[Moving] = set()
        self.stale = False
        #: Who may use it: router indexes, ranks and names; None: everybody.
        self.allowed: frozenset[Any] | None = None
        #: Whom numbers mean in `allow`, and in notifications: the mesh's ranks, or the group's, it was registered by.
        self.ranks: Ranks | None = None
        self.notices: dict[bytes, deque[Any]] = {}
        self._notices = 0
        self.waiters: dict[bytes, deque[Awaited]] = {}

    # ------------------------------------------------------------------ for users

    @property
    def array(self) -> np.ndarray[Any, Any]:
        """The memory as an array of the region's dtype and shape."""
        self._check_live()
        return np.frombuffer(self.view, np.uint8).view(self.dtype).reshape(self.shape)

    def wait_notification(self, key: str | int, timeout: float | None = None, *, async_op: bool = False) -> Any:
        """Wait until somebody has written here with `notify=key`, and take that notification: a Notification, or with
        `async_op` a Work for it. The bytes are here when it is."""
        encoded = encode_key(key)
        seconds = self.server.hub.config.timeout if timeout is None else timeout
        with self.server.engine:
            self._check_live()
            awaited = Awaited(self, key, seconds)
            waiting = self.notices.get(encoded)
            if waiting:
                awaited.finish(Notification(key, waiting.popleft()))
                self._notices -= 1
                if not waiting:
                    del self.notices[encoded]
            else:
                self.waiters.setdefault(encoded, deque()).append(awaited)
        return awaited if async_op else awaited.result()

    def fetch_add(self, offset: int, value: int) -> int:
        """As `RemoteRegion.fetch_add`, for the owner."""
        with self.server.engine:
            return self.signed(self._own(lambda: self.add(whole(offset), word(value))))

    def compare_and_swap(self, offset: int, expected: int, desired: int) -> int:
        """As `RemoteRegion.compare_and_swap`, for the owner."""
        with self.server.engine:
            return self.signed(self._own(lambda: self.swap(whole(offset), word(expected), word(desired))))

    def allow(self, who: Iterable[Peer | int | str] | None) -> None:
        """Only these may open and use the region from now on (None: everybody): Peers, names of peers, or ranks, of the
        group by which it was registered. A name is what a peer with the token calls itself: any can take it. Transfers
        under way of those that may no longer are ended: they fail with AccessDenied. Watchers see the region come and
        go as they may open it."""
        if isinstance(who, str):
            raise UsageError(f"allow= is a list of Peers, ranks or names, not the text {who!r}. Pass [{who!r}].")
        chosen = None if who is None else frozenset(_identify(one, self.ranks) for one in who)
        with self.server.engine:
            self.server.readmit(self, chosen)
            for moving in [each for each in self.moving if not self.admits(self.server.main_of(each.router))]:
                moving.abort(Why.DENIED, "its owner does not allow it to this peer any more")
            if self.shared is not None and not self.stale:
                routers = self.server.hub.routers
                self.shared.admit(lambda index: index in routers and self.admits(routers[index]))

    def unregister(self, *, abort: bool = False, timeout: float | None = None) -> None:
        """As `MemoryAgent.unregister`."""
        self.server.unregister(self, abort, timeout)

    def __repr__(self) -> str:
        state = "unregistered" if self.stale else f"{len(self.moving)} transfers under way"
        return f"<Region {self.name!r}: {self.nbytes} bytes, {self.access!r}, {state}>"

    # ------------------------------------------------------------------ for the server, with the lock

    def describe(self) -> Description:
        dtype = describe_dtype(self.dtype)
        return Description(self.name, self.nbytes, dtype, self.shape, self.access, self.generation, self.mappable)

    def _check_live(self) -> None:
        """Raises StaleRegion or ClosedError once the memory is no longer here."""
        if self.stale:
            raise self.stale_error()
        self.server.hub.check_open()

    def stale_error(self) -> StaleRegion:
        return StaleRegion(f"Region {self.name!r} was unregistered here.", region=self.name, hint="Register it again.")

    def admits(self, router: Router) -> bool:
        allowed, peer = self.allowed, router.peer
        return allowed is None or not allowed.isdisjoint({("peer", router.index), ("rank", peer.rank), peer.name})

    def name_of(self, router: Router) -> Any:
        """How the region's owner knows the one behind a router."""
        return router.peer if self.ranks is None else self.ranks.name(router)

    @property
    def idle(self) -> bool:
        """Nobody moves bytes of it."""
        return not self.moving and not (self.shared is not None and self.shared.busy)

    def release(self) -> None:
        """The memory is the caller's again: nothing here refers to it."""
        if self.shared is not None:
            self.shared.close()
        self.buffer = None
        self.view = memoryview(b"")

    def parts(self, ask: Ask, payload: memoryview) -> Iterable[memoryview]:
        """The memory that a request names, as views in its order: everything is checked here. Raises Refusal."""
        if not ask.bits & Bit.BATCH:
            self._check(ask.offset, ask.nbytes)
            return (self.view[ask.offset : ask.offset + ask.nbytes],)
        start = 32 + ask.key
        strided = bool(ask.bits & Bit.STRIDED)
        end = start + ask.pieces * (BLOCK_BYTES if strided else PIECE_BYTES)
        if end > len(payload):
            raise Refusal(Why.INVALID, f"the request names {ask.pieces} pieces and brings fewer")
        table = np.frombuffer(payload[start:end], "<u8").reshape(ask.pieces, 4 if strided else 2)
        self._check_table(table, ask.nbytes)
        if strided:
            return self._blocks(table.tolist())
        starts, lengths = table[:, 0], table[:, 1]
        length = int(lengths[0]) if len(lengths) else 0
        if len(lengths) >= Pages.FEWEST and 0 < length <= Pages.LARGEST and (lengths == length).all():
            return Pages(self.view, starts.astype(np.intp), length)
        return map(self.view.__getitem__, map(slice, starts.tolist(), (starts + lengths).tolist()))

    def _check(self, offset: int, nbytes: int) -> None:
        if offset < 0 or offset + nbytes > self.nbytes:
            raise Refusal(Why.BOUNDS, f"bytes {offset} … {offset + nbytes} do not all lie in its {self.nbytes}")

    def _check_table(self, table: np.ndarray[Any, Any], nbytes: int) -> None:
        """No sum or product below can overflow: each is bounded before it is made."""
        most = np.uint64(self.nbytes)
        if (table[:, :2] > most).any():
            raise Refusal(Why.BOUNDS, f"a piece does not lie in its {self.nbytes} bytes")
        offset, length = table[:, 0], table[:, 1]
        room = most - offset
        bad = length > room
        total: Any = length
        if table.shape[1] == 4:
            stride, count = table[:, 2], table[:, 3]
            more = np.maximum(count, 1) - np.uint64(1)
            if ((length == 0) & (more > 0)).any():  # so many steps for no byte: nothing else bounds them
                raise Refusal(Why.INVALID, "a piece repeats a stretch of no bytes")
            bad |= (more > 0) & (stride > 0) & (more > (room - np.minimum(length, room)) // np.maximum(stride, 1))
            if not bad.any() and (count > np.uint64(max(nbytes, 1)) // np.maximum(length, 1)).any():
                raise Refusal(Why.INVALID, f"a piece alone has more than the {nbytes} bytes of the whole request")
            total = length * count
        if bad.any():
            at = int(np.argmax(bad))
            raise Refusal(Why.BOUNDS, f"piece {at} ({_show(table[at])}) does not lie in its {self.nbytes} bytes")
        if float(total.sum(dtype=np.float64)) > 2.0**63 or int(total.sum(dtype=np.uint64)) != nbytes:
            raise Refusal(Why.INVALID, f"its pieces do not add up to the {nbytes} bytes of the request")

    def _blocks(self, table: list[list[int]]) -> Iterator[memoryview]:
        view = self.view
        for offset, length, stride, count in table:
            for at in range(offset, offset + stride * count, stride) if stride else (offset,) * count:
                yield view[at : at + length]

    # ------------------------------------------------------------------ cells and notifications

    def _cell(self, offset: int) -> int:
        self._check(offset, CELL.size)
        if offset % 8 or not self._aligned:
            raise Refusal(Why.INVALID, f"the cell at byte {offset} does not lie at a multiple of 8 in memory")
        return int(CELL.unpack_from(self.view, offset)[0])

    def add(self, offset: int, value: int) -> int:
        """The old value, as it lies there."""
        old = self._cell(offset)
        CELL.pack_into(self.view, offset, (old + value) & _WORD)
        return old

    def swap(self, offset: int, expected: int, desired: int) -> int:
        """The old value, as it lies there."""
        old = self._cell(offset)
        if old == expected & _WORD:
            CELL.pack_into(self.view, offset, desired & _WORD)
        return old

    def signed(self, value: int) -> int:
        """A cell's value as the region's dtype has it."""
        return as_signed(value, self.dtype)

    def _own(self, action: Any) -> int:
        self._check_live()
        try:
            if not self.writable:
                raise Refusal(Why.DENIED, f"it is registered with access {self.access!r}")
            return int(action())
        except Refusal as refusal:
            raise self.server.local_error(self, refusal) from None

    def check_notice(self) -> None:
        """There is room for one more. Raises Refusal."""
        if self._notices >= MAX_NOTICES:
            raise Refusal(Why.FULL, f"{MAX_NOTICES} notifications wait there already, and nobody takes them")

    def notify(self, key: bytes, source: Any) -> None:
        """The bytes are here: whoever waits for them learns it, or will."""
        waiters = self.waiters.get(key)
        if waiters:
            awaited = waiters[0]
            self.withdraw(awaited)
            awaited.finish(Notification(awaited.key, source))
            return
        self.notices.setdefault(key, deque()).append(source)
        self._notices += 1

    def withdraw(self, awaited: Awaited) -> None:
        """It waits no longer. Of a key that nobody waits for nothing is kept: there may be one for every page."""
        key = encode_key(awaited.key)
        waiters = self.waiters[key]
        waiters.remove(awaited)
        if not waiters:
            del self.waiters[key]


def word(value: int) -> int:
    """What goes into a cell: 64 bits, negative numbers in two's complement. Raises UsageError."""
    number = whole(value, "A cell's value")
    if not -(1 << 63) <= number < 1 << 64:
        raise UsageError(f"{number} does not fit into 64 bits. Pass a smaller number.")
    return number & _WORD


def as_signed(value: int, dtype: np.dtype[Any]) -> int:
    """A 64-bit word as a signed number, unless the region's dtype says otherwise."""
    return value if value < 1 << 63 or dtype.kind == "u" else value - (1 << 64)


def _identify(one: Peer | int | str, ranks: Ranks | None) -> Any:
    """How an entry of an allow-list is looked for: a rank as the mesh counts."""
    if isinstance(one, Peer):
        return ("peer", one.router.index)
    if isinstance(one, int | np.integer):
        return ("rank", int(one) if ranks is None else ranks.router(int(one)).peer.rank)
    if isinstance(one, str):
        return one
    raise UsageError(f"allow= names Peers, ranks or names of peers, not {one!r}. Pass these.")


def _bytes_of(buffer: Any, writes: bool) -> memoryview:
    view = readable(buffer, "Register the whole of which it is a part; a copy would be other memory.")
    if writes and view.readonly:
        raise UsageError(
            f"This {type(buffer).__qualname__} is read-only, and access= lets others write to it. Register it with "
            'access="r", or pass memory that can be written to.'
        )
    return view


def _describe(buffer: Any, nbytes: int) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """dtype and shape, as far as the buffer tells; otherwise bytes."""
    plain = np.dtype(np.uint8), (nbytes,)
    try:
        if isinstance(buffer, memoryview):
            array = np.asarray(buffer)
        elif hasattr(buffer, "__dlpack__"):  # arrays of numpy's, too
            array = array_over(buffer)
        else:
            return plain
        return _dtype_of(buffer, array), array.shape
    except (CodecError, TypeError, ValueError):  # numpy has no dtype for it: bytes will do
        return plain


def numpy_of(tensor: Any) -> np.ndarray[Any, Any]:
    """A tensor's elements, by numpy's name for them. Raises CodecError or ValueError where it has none."""
    array = array_over(tensor)
    return array.view(_dtype_of(tensor, array))


def _dtype_of(buffer: Any, array: np.ndarray[Any, Any]) -> np.dtype[Any]:
    """Some of torch's dtypes numpy has by ml_dtypes only. Raises CodecError or ValueError for those it has not."""
    name = str(buffer.dtype).removeprefix("torch.") if is_tensor(buffer) else array.dtype.name
    return array.dtype if name == array.dtype.name else parse(name.encode())


def _show(row: np.ndarray[Any, Any]) -> str:
    return " ".join(
        f"{name} {value}" for name, value in zip(("offset", "length", "stride", "count"), row.tolist(), strict=False)
    )
