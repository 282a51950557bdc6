"""From a stream of bytes to frames, without I/O and without touching payload bytes.

The caller's loop, for a connection:

    n = link.recv_into(parser.target())      # where the next bytes belong
    parser.received(n)
    while (header := parser.next_header()):  # None: more bytes are needed
        ...                                  # exactly one of the three, for every header with nbytes > 0:
        view = parser.take()                 #   the payload (valid until the next target()); None: not all is here
        parser.into(view)                    #   put it there: what is here is copied, the rest is received in place
        parser.drop()                        #   read past it

`into` and `drop` answer True when the payload is complete. Otherwise the caller goes on with `target()` and
`received()` until `pending` is False, and then asks for the next header; the header in question stays in `header`.

Small frames arrive many at a time in the staging buffer, and one read serves them all. The part of a payload that is
not there yet is received straight into its place. After a DATA frame only the next header is asked for so
that the bytes of the next piece can go to their place too.
"""

from __future__ import annotations

from typing import Final, Protocol

from rankmesh.errors import InternalError
from rankmesh.wire.header import HEADER, HEADER_BYTES, VERSION, Header, Kind, explain

STAGING_BYTES: Final = 64 * 1024
#: What is skipped is read in pieces of this size.
SINK_BYTES: Final = 64 * 1024

_unpack_from = HEADER.unpack_from
_DATA: Final = int(Kind.DATA)
_EAGER: Final = int(Kind.EAGER)


class Place(Protocol):
    """Where a payload goes, if that is not one view: cut and filled like one."""

    nbytes: int

    def receive(self) -> int:
        """For whoever reads the stream: put what has come there, and say how much that was."""
        ...

    def __getitem__(self, key: slice, /) -> Place: ...
    def __setitem__(self, key: slice, value: memoryview, /) -> None: ...


class Parser:
    """See the module's text. `payload_limit` maps the known kinds to their largest payload."""

    __slots__ = (
        "_end",
        "_fill",
        "_limit",
        "_pos",
        "_sink",
        "_skip",
        "_staging",
        "_view",
        "begins",
        "header",
        "pending",
    )

    def __init__(self, payload_limit: dict[int, int]) -> None:
        self._limit = payload_limit
        self._staging = bytearray(STAGING_BYTES)
        self._view = memoryview(self._staging)
        #: Whether `staging` begins with these bytes.
        self.begins: Final = self._staging.startswith
        self._pos = 0
        self._end = 0
        self._fill: memoryview | Place | None = None
        self._skip = 0
        self._sink: memoryview | None = None
        self.header: tuple[int, ...] = ()
        #: A payload is being received; no header can be asked for until it is complete.
        self.pending = False

    def target(self) -> memoryview | Place:
        """Where the next bytes of the stream belong: a view, or the rest of a Place that `into` was given."""
        fill = self._fill
        if fill is not None:
            return fill
        if self._skip:
            if self._sink is None:
                self._sink = memoryview(bytearray(SINK_BYTES))
            return self._sink[: self._skip]
        pos, end = self._pos, self._end
        if pos == end:
            self._pos = self._end = 0
            if self.header and self.header[1] == _DATA:
                return self._view[:HEADER_BYTES]
            return self._view
        if pos:
            rest = end - pos
            self._view[:rest] = bytes(self._view[pos:end])
            self._pos, self._end, end = 0, rest, rest
        if end < HEADER_BYTES and self.header and self.header[1] == _DATA:
            return self._view[end:HEADER_BYTES]
        return self._view[end:]

    def received(self, nbytes: int) -> None:
        """Account for bytes that were put into `target()`."""
        fill = self._fill
        if fill is not None:
            if nbytes == fill.nbytes:
                self._fill = None
                self.pending = False
            else:
                self._fill = fill[nbytes:]
        elif self._skip:
            self._skip -= nbytes
            self.pending = self._skip > 0
        else:
            self._end += nbytes

    def feed(self, nbytes: int) -> tuple[int, ...] | None:
        """`received(nbytes)`, and the next header if no payload is pending and it is all here: the hot path's one
        step."""
        if self._fill is not None or self._skip:
            self.received(nbytes)
            return None
        self._end = end = self._end + nbytes
        pos = self._pos
        if end - pos < HEADER_BYTES:
            return None
        header = _unpack_from(self._staging, pos)
        limit = self._limit.get(header[1])
        if limit is None or header[6] > limit or header[0] != VERSION:
            raise explain(header, self._limit)
        self._pos = pos + HEADER_BYTES
        self.header = header
        return header

    def next_header(self) -> tuple[int, ...] | None:
        """The next header, checked, or None while it is not all here. Fields as in `Header`."""
        return self.feed(0)

    def take(self) -> memoryview | None:
        """The payload within the staging buffer, if all of it is here."""
        pos = self._pos
        end = pos + self.header[6]
        if end > self._end:
            return None
        self._pos = end
        return self._view[pos:end]

    def into(self, view: memoryview | Place) -> bool:
        """Receive the payload into `view`, which has exactly its size."""
        pos = self._pos
        nbytes = self.header[6]
        if view.nbytes != nbytes:
            raise InternalError(f"a payload of {nbytes} bytes was given a place of {view.nbytes}.")
        here = self._end - pos
        if here >= nbytes:
            if nbytes:
                view[:] = self._view[pos : pos + nbytes]
            self._pos = pos + nbytes
            return True
        if here:
            view[:here] = self._view[pos : self._end]
            view = view[here:]
        self._pos = self._end
        self._fill = view
        self.pending = True
        return False

    def take_eager(self, group: int, tag: int, view: memoryview) -> bool:
        """Copy the next frame's payload into `view`, if that frame is all here and is an EAGER one without flags, of
        just this group, tag and size. Otherwise nothing happens."""
        nbytes = len(view)
        pos = self._pos
        start = pos + HEADER_BYTES
        end = start + nbytes
        if end > self._end or self.pending:
            return False
        header = _unpack_from(self._staging, pos)
        version, kind, flags, of_group, of_tag, _, size, _ = header
        if size != nbytes or of_tag != tag or of_group != group or kind != _EAGER or flags or version != VERSION:
            return False
        if nbytes:
            view[:] = self._view[start:end]
        self._pos = end
        self.header = header
        return True

    def drop(self) -> bool:
        """Read past the payload."""
        here = min(self._end - self._pos, self.header[6])
        self._pos += here
        self._skip = self.header[6] - here
        self.pending = self._skip > 0
        return not self.pending

    def forget(self) -> None:
        """The frame that ended was the last of its transfer: more than the next header may be asked for."""
        self.header = ()

    def divert(self) -> None:
        """Drop what is still to come of the pending payload: its place is no longer to be written to."""
        if self._fill is not None:
            self._skip = self._fill.nbytes
            self._fill = None

    @property
    def buffered(self) -> bool:
        """A complete header is waiting in the staging buffer."""
        return not self.pending and self._end - self._pos >= HEADER_BYTES

    @property
    def staging(self) -> memoryview:
        """Where bytes go while nothing else is asked for."""
        return self._view

    def at_rest(self) -> bool:
        """Nothing is pending or staged, and no transfer is under way: the next bytes go to the start of `staging`. Who
        reads there itself must call `target()` and then `feed()` what it does not deal with."""
        return not self.pending and self._pos == self._end and not (self.header and self.header[1] == _DATA)

    def at_boundary(self) -> bool:
        """The stream ended between two frames: nothing is cut off."""
        return not self.pending and self._pos == self._end

    def __repr__(self) -> str:
        state = f"payload of {Header(*self.header)}" if self.pending else f"{self._end - self._pos} bytes waiting"
        return f"<Parser {state}>"
