"""Lines whole, prefixed and bounded."""

from __future__ import annotations

import os
import selectors
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankmesh.launch.output import LINE_BYTES, SINK_BYTES, TAIL_LINES, LineSplitter, Multiplexer, Stream, Tail


def split(*chunks: bytes) -> list[bytes]:
    splitter = LineSplitter()
    lines = [line for chunk in chunks for line in splitter.feed(chunk)]
    return lines + splitter.finish()


@pytest.mark.parametrize(
    "chunks, lines",
    [
        ([b""], []),
        ([b"a\nb\n"], [b"a", b"b"]),
        ([b"a", b"b", b"\n", b"c"], [b"ab", b"c"]),
        ([b"\n\n"], [b"", b""]),
        ([b"a\r\nb\r", b"\nc\r\n"], [b"a", b"b", b"c"]),
        ([b"\r 10%\r 20%", b"\r 30%\n"], [b" 10%", b" 20%", b" 30%"]),
        ([b"a\r"], [b"a"]),
        ([b"\xff\xfe\x00\x1b[31m\n"], [b"\xff\xfe\x00\x1b[31m"]),
    ],
)
def test_lines(chunks: list[bytes], lines: list[bytes]) -> None:
    assert split(*chunks) == lines


@given(st.lists(st.binary(max_size=20)), st.integers(1, 7))
def test_how_the_bytes_arrive_does_not_matter(parts: list[bytes], step: int) -> None:
    whole = b"\n".join(parts)
    assert split(*(whole[i : i + step] for i in range(0, len(whole), step))) == split(whole)


@given(st.lists(st.binary(max_size=20).map(lambda b: b.replace(b"\n", b"").replace(b"\r", b"")), min_size=1))
def test_lines_that_end_by_newline_pass_unchanged(lines: list[bytes]) -> None:
    assert split(b"".join(line + b"\n" for line in lines)) == lines


def test_an_endless_line_comes_in_pieces_and_nothing_is_lost() -> None:
    splitter = LineSplitter()
    seen = 0
    for _ in range(64):
        for line in splitter.feed(b"x" * 10_000):
            assert len(line) == LINE_BYTES
            seen += len(line)
    assert seen >= 64 * 10_000 - LINE_BYTES
    assert seen + sum(map(len, splitter.finish())) == 64 * 10_000


def test_the_tail_keeps_the_last_lines_and_not_too_much_of_each() -> None:
    tail = Tail()
    tail.add([b"line %d" % i for i in range(100)])
    assert tail.text() == [f"line {i}" for i in range(100 - TAIL_LINES, 100)]
    tail.add([b"\xff" * 1_000_000])
    assert set(tail.text()[-1]) == {"�"}
    assert len(tail.text()[-1]) < 10_000


@pytest.fixture
def selector() -> Iterator[selectors.BaseSelector]:
    with selectors.PollSelector() as selector:
        yield selector


def pipe_stream(output: Multiplexer, sink_fd: int, prefix: bytes) -> int:
    """A stream into the sink; returns the end to write to, which does not block."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    stream = Stream(os.fdopen(reader, "rb", 0), output.sink(sink_fd), lambda line: prefix + line + b"\n", None)
    output.add(stream)
    return writer


def pump(selector: selectors.BaseSelector, output: Multiplexer) -> int:
    """Attend to what is ready now; how much that was."""
    ready = selector.select(0)
    for key, _ in ready:
        output.handle(key.data)
    return len(ready)


def test_a_reader_that_stops_reading_stops_the_ranks_and_memory_stays_bounded(selector: selectors.BaseSelector) -> None:
    output = Multiplexer(selector)
    out_reader, out_writer = os.pipe()
    rank = pipe_stream(output, out_writer, b"[0] ")
    written = 0
    for _ in range(10_000):
        try:
            written += os.write(rank, b"y" * 1000 + b"\n")
        except BlockingIOError:
            if not pump(selector, output):
                break  # the rank is blocked, and so is the sink
        pump(selector, output)
    pending = output.sink(out_writer).nbytes
    assert SINK_BYTES <= pending <= SINK_BYTES + 128 * 1024
    assert written < SINK_BYTES + 512 * 1024  # the rest are the buffers of two pipes
    os.close(rank)
    received = bytearray()
    while output.reading or output.writing or selector.select(0):
        while pump(selector, output) and output.writing:
            pass
        received += os.read(out_reader, 1 << 20)
    os.close(out_writer)
    while data := os.read(out_reader, 1 << 20):
        received += data
    os.close(out_reader)
    assert len(received) == written // 1001 * 1005 or received.endswith(b"\n")
    assert all(line == b"[0] " + b"y" * 1000 for line in received.splitlines()[:-1])


def test_a_reader_that_went_away_is_reported(selector: selectors.BaseSelector) -> None:
    output = Multiplexer(selector)
    out_reader, out_writer = os.pipe()
    rank = pipe_stream(output, out_writer, b"")
    os.close(out_reader)
    os.write(rank, b"hello\n")
    while not output.broken:
        assert pump(selector, output)
    assert output.broken == "Broken pipe"
    assert not output.writing
    os.close(rank)
    output.close_streams()
    os.close(out_writer)


def test_lines_of_two_streams_do_not_interleave(selector: selectors.BaseSelector) -> None:
    output = Multiplexer(selector)
    out_reader, out_writer = os.pipe()
    ranks = [pipe_stream(output, out_writer, b"[%d] " % rank) for rank in range(2)]
    for piece in (b"a", b"b", b"c\n", b"last"):
        for rank in ranks:
            os.write(rank, piece)
            pump(selector, output)
    for rank in ranks:
        os.close(rank)
    while output.reading or output.writing:
        pump(selector, output)
    os.close(out_writer)
    text = os.read(out_reader, 1 << 16)
    os.close(out_reader)
    assert sorted(text.splitlines()) == [b"[0] abc", b"[0] last", b"[1] abc", b"[1] last"]
