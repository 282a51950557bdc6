"""The ranks' lines, whole, prefixed and bounded.

Rules:

1. Lines of different ranks never interleave: a line is written when it is complete. A line without an end is shown
   when its stream closes, and in pieces of LINE_BYTES if it grows longer.
2. A carriage return ends a line too: a progress bar that redraws itself becomes a line per redraw.
3. Bytes pass through as they are; nothing is decoded on the way.
4. Nothing here blocks: a sink that takes no more (a paused terminal, a slow pipe) stops the reading of the streams that
   feed it at SINK_BYTES, and by that the ranks, while signals and exits are still attended to.
"""

from __future__ import annotations

import os
import re
import select
import selectors
from collections import deque
from collections.abc import Callable, Iterable
from typing import IO, Final

from rankmesh.errors import ConfigError

#: The longest piece of a line that is held back for its end.
LINE_BYTES: Final = 64 * 1024
#: Bytes a sink may have waiting before its streams are no longer read.
SINK_BYTES: Final = 1024 * 1024
#: How much of a rank's standard error is kept for the report.
TAIL_LINES: Final = 20
TAIL_LINE_BYTES: Final = 2048

_READ_BYTES: Final = 64 * 1024
# A carriage return at the very end may be the first half of \r\n: it waits for the next byte.
_LINE_END = re.compile(rb"\r\n|\n|\r(?=[^\n])", re.DOTALL)


class LineSplitter:
    """Cuts a stream of bytes into lines, without their ends. Pure, and bounded by LINE_BYTES."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes; give the lines they complete."""
        rest = self._rest
        lines: list[bytes] = []
        searched = max(0, len(rest) - 1)  # up to a carriage return that waits for its successor
        rest += data
        start = 0
        if b"\n" in data or b"\r" in data or rest[searched : searched + 1] == b"\r":
            for end in _LINE_END.finditer(rest, searched):
                # "\rprogress\rprogress": what stands between a line's end and a carriage return may be nothing.
                if end.start() > start or end[0] != b"\r":
                    lines.append(bytes(rest[start : end.start()]))
                start = end.end()
        while len(rest) - start > LINE_BYTES:
            lines.append(bytes(rest[start : start + LINE_BYTES]))
            start += LINE_BYTES
        self._rest = rest[start:]
        return lines

    def finish(self) -> list[bytes]:
        """The stream has closed: give what is left."""
        rest, self._rest = bytes(self._rest.removesuffix(b"\r")), bytearray()
        return [rest] if rest else []


class Tail:
    """The last lines of a stream."""

    __slots__ = ("_lines",)

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=TAIL_LINES)

    def add(self, lines: Iterable[bytes]) -> None:
        self._lines.extend(line[:TAIL_LINE_BYTES] for line in lines)

    def text(self) -> list[str]:
        return [line.decode(errors="replace") for line in self._lines]


class Sink:
    """Where lines go: the launcher's own standard output or error. Never blocks."""

    __slots__ = ("_pending", "broken", "fd", "nbytes")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._pending: deque[memoryview] = deque()
        self.nbytes = 0
        #: Why it takes nothing any more; what comes is then dropped.
        self.broken = ""

    def put(self, data: bytes) -> None:
        if data and not self.broken:
            self._pending.append(memoryview(data))
            self.nbytes += len(data)

    def write_some(self) -> None:
        """Write once. To be called when the descriptor polls writable: PIPE_BUF bytes then go without blocking."""
        data = self._pending.popleft()
        chunk = data[: select.PIPE_BUF]
        try:
            written = os.write(self.fd, chunk)
        except BlockingIOError:
            written = 0
        except OSError as error:
            # The reader or the terminal is gone, or the disk is full: the supervisor ends the ranks and says so.
            self.broken = error.strerror or str(error)
            self._pending.clear()
            self.nbytes = 0
            return
        self.nbytes -= written
        if written < len(data):
            self._pending.appendleft(data[written:])


class Stream:
    """One output stream of one rank, on its way to a sink."""

    __slots__ = ("_format", "_log", "_pipe", "_splitter", "sink", "tail")

    def __init__(
        self, pipe: IO[bytes], sink: Sink, format_line: Callable[[bytes], bytes], log: IO[bytes] | None
    ) -> None:
        self._pipe = pipe
        self._splitter = LineSplitter()
        self._format = format_line
        self._log = log
        self.sink = sink
        self.tail = Tail()

    @property
    def fd(self) -> int:
        return self._pipe.fileno()

    def read_some(self) -> bool:
        """Read once and pass lines on; False at the end of the stream. To be called when `fd` polls readable."""
        data = os.read(self.fd, _READ_BYTES)
        if self._log is not None:
            try:
                self._log.write(data)
            except OSError as error:
                raise ConfigError(
                    f"The log {self._log.name} cannot be written: {error}. Choose another --log-dir."
                ) from error
        self._pass_on(self._splitter.feed(data))
        return bool(data)

    def close(self) -> None:
        self._pass_on(self._splitter.finish())
        self._pipe.close()
        if self._log is not None:
            self._log.close()

    def _pass_on(self, lines: list[bytes]) -> None:
        self.tail.add(lines)
        self.sink.put(b"".join(map(self._format, lines)))


class Multiplexer:
    """Moves lines from all streams to their sinks, on the caller's selector."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._streams: list[Stream] = []
        self._sinks: dict[tuple[int, int], Sink] = {}
        #: Sinks whose streams are not read until they have room again.
        self._full: set[Sink] = set()

    def sink(self, fd: int) -> Sink:
        """The sink for a descriptor; one for all that lead to the same file (2>&1), or their lines would interleave."""
        stat = os.fstat(fd)
        return self._sinks.setdefault((stat.st_dev, stat.st_ino), Sink(fd))

    def add(self, stream: Stream) -> None:
        self._streams.append(stream)
        if stream.sink not in self._full:
            self._selector.register(stream.fd, selectors.EVENT_READ, stream)

    @property
    def reading(self) -> bool:
        return bool(self._streams)

    @property
    def writing(self) -> bool:
        return any(sink.nbytes for sink in self._sinks.values())

    @property
    def blocked(self) -> bool:
        """A sink takes so little that its streams are not read."""
        return bool(self._full)

    @property
    def broken(self) -> str:
        """Why a sink takes nothing any more; empty if all do."""
        return next((sink.broken for sink in self._sinks.values() if sink.broken), "")

    def handle(self, item: Stream | Sink) -> None:
        """The selector says that this stream or sink is ready."""
        if isinstance(item, Sink):
            item.write_some()
            self._attend(item)
        elif item in self._streams and item.sink not in self._full:  # or it was closed or paused in this very round
            if not item.read_some():
                self._close(item)
            self._attend(item.sink)

    def put(self, fd: int, data: bytes) -> None:
        """Write something of the launcher's own, between lines of the ranks."""
        sink = self.sink(fd)
        sink.put(data)
        self._attend(sink)

    def close_streams(self) -> None:
        """Stop reading, though somebody may still hold the other end."""
        for stream in tuple(self._streams):
            self._close(stream)
            self._attend(stream.sink)

    def _close(self, stream: Stream) -> None:
        if stream.sink not in self._full:
            self._selector.unregister(stream.fd)
        self._streams.remove(stream)
        stream.close()

    def _attend(self, sink: Sink) -> None:
        """Watch the sink while it has something to write, and its streams while it has room."""
        watched = sink.fd in self._selector.get_map()
        if sink.nbytes and not watched:
            self._selector.register(sink.fd, selectors.EVENT_WRITE, sink)
        elif watched and not sink.nbytes:
            self._selector.unregister(sink.fd)
        if sink not in self._full and sink.nbytes >= SINK_BYTES:
            self._full.add(sink)
            for stream in self._streams_of(sink):
                self._selector.unregister(stream.fd)
        elif sink in self._full and sink.nbytes < SINK_BYTES // 2:
            self._full.remove(sink)
            for stream in self._streams_of(sink):
                self._selector.register(stream.fd, selectors.EVENT_READ, stream)

    def _streams_of(self, sink: Sink) -> list[Stream]:
        return [stream for stream in self._streams if stream.sink is sink]
