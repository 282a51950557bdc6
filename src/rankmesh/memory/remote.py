"""RemoteRegion: another's memory, as its reader and writer has it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from rankmesh.buffers import address_of, is_tensor
from rankmesh.endpoint.outbound import JOIN_BYTES
from rankmesh.endpoint.work import Work
from rankmesh.errors import OutOfBounds, RankmeshError, UsageError
from rankmesh.memory.layout import Batch, Block, indexed, local, rows, whole
from rankmesh.memory.mapping import Mapping
from rankmesh.memory.operations import COST, Operation, Read, Swap, Write, ask_small
from rankmesh.memory.protocol import CELL, MAX_PIECES, REQUEST, SWAP, Bit, Op, RegionInfo, encode_key
from rankmesh.memory.pulling import Pulled
from rankmesh.memory.pushing import Pushed
from rankmesh.memory.rails import STRIPED_FROM, striped
from rankmesh.memory.region import as_signed, numpy_of, word
from rankmesh.memory.streaming import StreamedRead, StreamedWrite
from rankmesh.transport.pulling import Puller, populate

if TYPE_CHECKING:
    from rankmesh.memory.flow import Flow
    from rankmesh.memory.mapping import Permit
    from rankmesh.memory.rails import Rails

_pack: Final = REQUEST.pack
_READ: Final = int(Op.READ)
_WRITE: Final = int(Op.WRITE)
Pieces = Iterable[tuple[Any, int] | tuple[Any, int, int]]


class RemoteRegion:
    """A region of another endpoint, or of this one. `MemoryAgent.open()` makes them.

    Offsets and strides are bytes; only `remote[…]` counts items. Every method takes `timeout` in seconds (None:
    Config.timeout); with `async_op=True` it returns a Work at once, and the buffers belong to that until it is done. A
    handle may be used from many threads. One whose region was unregistered, or registered anew, raises StaleRegion.
    What is read while somebody writes it may be old in part and new in part; cells are not, as long as they are written
    by themselves.
    """

    def __init__(self, flow: Flow, rails: Rails, info: RegionInfo, permit: Permit | None) -> None:
        self._flow = flow
        self._rails = rails
        self._permit = permit
        mapping = permit if isinstance(permit, Mapping) else None
        #: The mapping, where it may be used for that.
        self._read_through = mapping if "r" in info.access else None
        self._write_through = mapping if info.access == "rw" else None
        #: Reads it where it lies, and writes there.
        self._pulled = permit if isinstance(permit, Pulled) else None
        self._pushed = permit if isinstance(permit, Pushed) else None
        if permit is not None:
            permit.handles += 1
        self._timeout = flow.router.hub.config.timeout
        #: Up to this size bytes travel in the request or the reply.
        self._inline = min(JOIN_BYTES, flow.router.hub.config.eager_bytes) - 1024
        self.info = info
        self.name = info.name
        self.nbytes = info.nbytes
        self.dtype = info.dtype
        self.shape = info.shape
        self.access = info.access
        self.generation = info.generation

    @property
    def mapped(self) -> bool:
        """Its memory is mapped here: reads and writes are plain copies, made by the calling thread, also those with
        `async_op`."""
        return isinstance(self._permit, Mapping)

    @property
    def peer(self) -> Any:
        """Whose region it is."""
        return self._flow.router.peer

    # ------------------------------------------------------------------ reading

    def read(
        self,
        out: Any,
        offset: int = 0,
        *,
        stride: int | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Read into `out`, from byte `offset` on; return `out`. With `stride`, row i of `out` is read from
        offset + i * stride. `out` may be a strided array."""
        if type(offset) is not int:
            offset = whole(offset)
        parts = local(out, writes=True)
        through = self._read_through
        if through is not None and stride is None:
            nbytes = sum(map(len, parts))
            self._check(offset, nbytes)
            return self._copy(through.read, out, parts, (through.view(offset, nbytes),), None, timeout, async_op)
        if stride is None and isinstance(parts, tuple) and not async_op:
            nbytes = len(parts[0])
            pulled = self._pulled
            if pulled is not None:
                self._check(offset, nbytes)
                if self._is_moved(pulled.read, parts[0], offset, timeout):
                    return out
                if (polled := self._flow.router.polled) is not None and polled.puller is not None:
                    pulled.renew(polled.puller)
            if nbytes <= self._inline and 0 <= offset <= self.nbytes - nbytes:  # the hot path
                body = _pack(_READ, 0, 0, 0, self.generation, offset, nbytes)
                seconds = self._timeout if timeout is None else timeout
                return ask_small(Read, COST + nbytes, self._flow, self.name, body, seconds, out, parts, nbytes)
        if stride is not None:
            batch = self._batch_of(parts, [rows(out, sum(map(len, parts)), offset, stride)])
            return self._read_batch(out, batch, timeout, async_op)
        nbytes = sum(map(len, parts))
        self._check(offset, nbytes)
        if nbytes >= STRIPED_FROM and isinstance(parts, tuple):
            work = self._striped(parts[0], offset, out, timeout, reads=True)
            if work is not None:
                return work if async_op else work.result()
        body = _pack(_READ, 0 if nbytes <= self._inline else Bit.STREAMED, 0, 0, self.generation, offset, nbytes)
        return self._run_read(body, out, parts, nbytes, timeout, async_op)

    def read_batch(self, pieces: Pieces, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Read any number of (out, offset) or (out, offset, stride) in one request: all of them, or none."""
        batch = Batch(self.nbytes, self._outside).gather(pieces, writes=True)
        return self._read_batch(None, batch, timeout, async_op)

    def _read_batch(self, out: Any, batch: Batch, timeout: float | None, async_op: bool) -> Any:
        through = self._read_through
        if through is not None:
            views = through.views(batch.blocks())
            return self._copy(through.read, out, batch.parts, views, None, timeout, async_op)
        count, table = self._table(batch)
        nbytes = batch.nbytes
        streamed = nbytes > self._inline
        bits = batch.bits | (Bit.STREAMED if streamed else 0)
        body = _pack(_READ, bits, 0, count, self.generation, 0, nbytes) + table
        parts = (streamed and batch.later) or batch.parts
        return self._run_read(body, out, parts, nbytes, timeout, async_op)

    def _run_read(
        self, body: bytes, out: Any, parts: Iterable[memoryview], nbytes: int, timeout: float | None, async_op: bool
    ) -> Any:
        kind = Read if nbytes <= self._inline else StreamedRead
        timeout = self._timeout if timeout is None else timeout
        return self._run(kind(self._flow, self.name, body, timeout, out, parts, nbytes), async_op)

    def _is_moved(
        self, move: Callable[[memoryview, int, float], bool], view: memoryview, offset: int, timeout: float | None
    ) -> bool:
        """Read or write where it lies. False: that cannot be."""
        flow = self._flow
        flow.check(self.name)
        done = move(view, offset, monotonic() + (self._timeout if timeout is None else timeout))
        flow.check(self.name)
        return done

    # ------------------------------------------------------------------ writing

    def write(
        self,
        data: Any,
        offset: int = 0,
        *,
        stride: int | None = None,
        notify: str | int | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Write `data` to byte `offset` and on; when that is done, the bytes are there. With `stride`, row i goes to
        offset + i * stride. `notify`: whoever waits there for this key learns of it, after the bytes are there.

        Where this side writes the bytes itself, on one host, the notification follows them: if it alone is refused
        (BusyError: too many wait there), or this fails in between, the bytes are there without it. Writes with
        `async_op` are not ordered with later ones: a `write(b"", notify=key)` may overtake them. Wait for their Works
        first, or let one `write_batch` carry both."""
        key = None if notify is None else encode_key(notify)
        if type(offset) is not int:
            offset = whole(offset)
        parts = local(data, writes=False)
        if stride is not None:
            batch = self._batch_of(parts, [rows(data, sum(map(len, parts)), offset, stride)])
            return self._write_batch(batch, key, timeout, async_op)
        nbytes = sum(map(len, parts))
        self._check(offset, nbytes)
        through, pushed = self._write_through, self._pushed
        if (
            pushed is not None
            and not async_op
            and isinstance(parts, tuple)
            and nbytes > CELL.size
            and not self._flow.changing
            and self._is_moved(pushed.write, parts[0], offset, timeout)
        ):
            return None if key is None else self._notify(key, timeout)
        if through is None and nbytes <= self._inline and key is None and not async_op:  # the hot path
            body = b"".join((_pack(_WRITE, 0, 0, 0, self.generation, offset, nbytes), *parts))
            seconds = self._timeout if timeout is None else timeout
            return ask_small(Write, COST + len(body), self._flow, self.name, body, seconds)
        if through is not None:
            views = (through.view(offset, nbytes),)
            return self._copy(through.write, None, parts, views, key, timeout, async_op)
        if nbytes >= STRIPED_FROM and key is None and isinstance(parts, tuple) and pushed is None:
            work = self._striped(parts[0], offset, None, timeout, reads=False)
            if work is not None:
                return work if async_op else work.result()
        return self._run_write(parts, b"", 0, 0, offset, nbytes, key, timeout, async_op)

    def write_batch(
        self, pieces: Pieces, *, notify: str | int | None = None, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """Write any number of (data, offset) or (data, offset, stride) in one request, which is checked as a whole
        before a byte is written. `notify`: as for `write`."""
        key = None if notify is None else encode_key(notify)
        batch = Batch(self.nbytes, self._outside).gather(pieces, writes=False)
        return self._write_batch(batch, key, timeout, async_op)

    def _write_batch(self, batch: Batch, key: bytes | None, timeout: float | None, async_op: bool) -> Any:
        through = self._write_through
        if through is not None:
            views = through.views(batch.blocks())
            return self._copy(through.write, None, batch.parts, views, key, timeout, async_op)
        count, table = self._table(batch)
        parts = batch.later or batch.parts
        return self._run_write(parts, table, batch.bits, count, 0, batch.nbytes, key, timeout, async_op)

    def _run_write(
        self,
        parts: Iterable[memoryview],
        table: bytes,
        bits: int,
        pieces: int,
        offset: int,
        nbytes: int,
        key: bytes | None,
        timeout: float | None,
        async_op: bool,
    ) -> Any:
        if key is None:
            key = b""
        else:
            bits |= Bit.NOTIFY
        streamed = nbytes + len(table) + len(key) > self._inline and nbytes > 0
        head = _pack(
            Op.WRITE, bits | (Bit.STREAMED if streamed else 0), len(key), pieces, self.generation, offset, nbytes
        )
        timeout = self._timeout if timeout is None else timeout
        if streamed:
            body = b"".join((head, key, table)) if key or table else head
            fetchable = self._fetchable(parts)
            return self._run(StreamedWrite(self._flow, self.name, body, timeout, parts, nbytes, fetchable), async_op)
        return self._run(Write(self._flow, self.name, b"".join((head, key, table, *parts)), timeout), async_op)

    def _fetchable(self, parts: Iterable[memoryview]) -> bool:
        """Whether the owner can fetch these bytes. If so they are in memory now: it has other things to do than to wait
        for a disk of ours."""
        polled = self._flow.router.polled
        if polled is None or not polled.pulls or not isinstance(parts, tuple):
            return False
        address = address_of(parts[0])
        try:
            populate(address, len(parts[0]))
        except OSError as error:
            if error.errno == errno.EFAULT:
                raise UsageError(
                    "Some of the bytes to be written are not there: a file was cut off that they are mapped from. Map "
                    "it anew, or pass other memory."
                ) from error
            return Puller(os.getpid()).reaches(address)
        return True

    def _striped(self, view: memoryview, offset: int, value: Any, timeout: float | None, reads: bool) -> Any:
        """A large transfer over several connections; None: there is one."""
        seconds = self._timeout if timeout is None else timeout
        flows = self._rails.flows(len(view), seconds)
        if len(flows) < 2:
            return None
        op = Op.READ if reads else Op.WRITE

        def make(flow: Flow, at: int, length: int) -> Operation:
            body = _pack(op, Bit.STREAMED, 0, 0, self.generation, offset + at, length)
            part = (view[at : at + length],)
            if reads:
                return StreamedRead(flow, self.name, body, seconds, None, part, length)
            return StreamedWrite(flow, self.name, body, seconds, part, length)

        return striped(flows, "read" if reads else "write", self.name, seconds, value, len(view), make)

    # ------------------------------------------------------------------ items

    def __getitem__(self, index: Any) -> Any:
        """A copy of what a numpy-style index (ints, slices, `...`) means."""
        meant = indexed(index, self.shape, self.dtype)
        out = np.empty(meant.shape, self.dtype)
        if meant.blocks:
            self._read_batch(out, self._batch_of(local(out, writes=True), meant.blocks), None, async_op=False)
        return out[()] if meant.item else out

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write to what a numpy-style index means; `value` is broadcast and cast as numpy does it."""
        meant = indexed(index, self.shape, self.dtype)
        if meant.blocks:
            data = np.empty(meant.shape, self.dtype)
            data[...] = numpy_of(value) if is_tensor(value) else value
            self._write_batch(self._batch_of(local(data, writes=False), meant.blocks), None, None, async_op=False)

    def fetch_add(self, offset: int, value: int, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Add to the 64-bit cell at byte `offset` (a multiple of 8), wrapping around; return its old value. Cells are
        changed one after the other, by the owner, whoever asks."""
        operands = CELL.pack(word(value))
        return self._change(Op.FETCH_ADD, offset, operands, timeout, async_op)

    def compare_and_swap(
        self, offset: int, expected: int, desired: int, *, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """Set the 64-bit cell at byte `offset` to `desired` if it is `expected`; return its old value."""
        operands = SWAP.pack(word(expected), word(desired))
        return self._change(Op.COMPARE_AND_SWAP, offset, operands, timeout, async_op)

    def _change(self, op: Op, offset: int, operands: bytes, timeout: float | None, async_op: bool) -> Any:
        offset = whole(offset)
        self._check(offset, CELL.size)
        if offset % CELL.size:
            raise UsageError(f"A cell lies at a multiple of 8 bytes, and not at {offset}. Pass such an offset.")
        body = _pack(op, 0, 0, 0, self.generation, offset, CELL.size) + operands
        timeout = self._timeout if timeout is None else timeout
        swap = Swap(self._flow, self.name, body, timeout, lambda value: as_signed(value, self.dtype))
        return self._run(swap, async_op)

    # ------------------------------------------------------------------ what they have in common

    def _run(self, operation: Operation, async_op: bool) -> Any:
        if async_op:
            operation.begin()
            return operation
        return operation.complete()

    def _copy(
        self,
        move: Callable[[Iterable[memoryview], Iterable[memoryview], float], None],
        out: Any,
        parts: Iterable[memoryview],
        blocks: Iterable[memoryview],
        key: bytes | None,
        timeout: float | None,
        async_op: bool,
    ) -> Any:
        """A read or write through the mapping: done when this returns. A notification follows as a request."""
        seconds = self._timeout if timeout is None else timeout
        error: RankmeshError | None = None
        try:
            self._flow.check(self.name)
            try:
                move(parts, blocks, monotonic() + seconds)
            finally:  # where the connection is gone, that is what is wrong, and not the permit that went with it
                self._flow.check(self.name)
        except RankmeshError as raised:
            if not async_op:
                raise
            error = raised
        if key is not None and error is None:
            return self._notify(key, timeout, async_op)
        if not async_op:
            return out
        router = self._flow.router
        work: Work[Any] = Work(router.engine, f"copy of region {self.name!r} of", router.peer, None, seconds)
        if error is None:
            work.finish(out)
        else:
            work.fail(error)
        return work

    def _notify(self, key: bytes, timeout: float | None, async_op: bool = False) -> Any:
        """Bytes were written without the owner, and it is to know."""
        seconds = self._timeout if timeout is None else timeout
        body = _pack(Op.NOTIFY, Bit.NOTIFY, len(key), 0, self.generation, 0, 0) + key
        return self._run(Write(self._flow, self.name, body, seconds), async_op)

    def _batch_of(self, parts: Iterable[memoryview], blocks: Iterable[Block]) -> Batch:
        """Blocks of the region, and the caller's memory for them."""
        batch = Batch(self.nbytes, self._outside)
        for block in blocks:
            batch.add(block)
        batch.parts.extend(parts)
        return batch

    @staticmethod
    def _table(batch: Batch) -> tuple[int, bytes]:
        count, table = batch.pack()
        if count > MAX_PIECES:
            raise UsageError(f"{count} pieces are too many for one request. Pass at most {MAX_PIECES} at once.")
        return count, table

    def _check(self, offset: int, nbytes: int) -> None:
        """The owner checks too; this saves the way there."""
        if not 0 <= offset <= self.nbytes - nbytes:
            raise self._outside(f"{nbytes} bytes at {offset}")

    def _outside(self, what: str) -> OutOfBounds:
        return OutOfBounds(
            f"{what} do not all lie in region {self.name!r} of {self.peer}, which has {self.nbytes} bytes.",
            region=self.name,
            peer=str(self.peer),
            nbytes=self.nbytes,
        )

    def close(self) -> None:
        """Let go of the mapping, if there is one: the handle goes on without."""
        with self._flow.router.engine:
            permit, self._permit = self._permit, None
            self._read_through = self._write_through = self._pulled = self._pushed = None
            if permit is not None:
                permit.handles -= 1
                self._flow.sweep()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<RemoteRegion {self.name!r} of {self.peer}: {self.nbytes} bytes, {self.access!r}>"
