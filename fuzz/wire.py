"""A seeded mutation fuzzer for everything that reads a peer's bytes.

    python fuzz/wire.py --seconds 60 --seed 7              all targets in turn
    python fuzz/wire.py --target parser --seconds 60
    python fuzz/wire.py --target parser --replay 0108…     one input again

Each target says how to make an input, how to run it, and which errors the input may cause. Anything else is a finding:
another exception, a result that differs from a plain reference, memory out of proportion to the input, a process that
grows. A finding is printed as the target's name and the input in hex, which is all that `--replay` needs: a run draws
its choices (where the stream is split, how payloads are consumed) from the input itself.

An input that behaves unlike any before it (see `_behaviour`) joins the target's pool and is mutated again.
"""

from __future__ import annotations

import argparse
import gc
import re
import resource
import sys
import time
import traceback
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random, SystemRandom
from typing import Final

import msgspec

import corpus
from rankmesh import codec
from rankmesh.errors import CodecError, ConnectError, ProtocolError
from rankmesh.wire.credit import CreditOut
from rankmesh.wire.handshake import LONGEST
from rankmesh.wire.header import DATA_LIMIT, HEADER, HEADER_BYTES, VERSION
from rankmesh.wire.messages import (
    TEXT_LIMIT,
    Closing,
    Goodbye,
    IdleAnswer,
    IdleAsk,
    Lost,
    decode_control,
    decode_identity,
    encode,
)
from rankmesh.wire.parser import Parser

#: The first TRACED of every PERIOD executions are traced for memory, which makes them several times slower. In one go,
#: because starting and stopping tracemalloc leaks some bytes every time.
TRACED: Final = 256
PERIOD: Final = 16 * TRACED
#: What a run may allocate beside its input: a parser's two buffers, the largest payload, and the harness itself.
PEAK_BYTES: Final = 4 * DATA_LIMIT
#: What the process may grow by once it has warmed up.
GROWTH_BYTES: Final = 64 * 1024 * 1024
WARM_UP: Final = 2 * PERIOD
#: Inputs and behaviours a target remembers: the fuzzer must not be what grows.
POOL: Final = 256
BEHAVIOURS: Final = 4 * POOL
#: Address space beyond what the process has at the start: an absurd length becomes a MemoryError, not a dead machine.
ADDRESS_SPACE: Final = 2 * 1024**3

PAYLOAD_LIMIT: Final = corpus.LIMITS.payloads()


class Finding(Exception):
    """An input that did what no input may do."""

    def __init__(self, target: str, data: bytes, cause: str) -> None:
        super().__init__(f"{cause}\ntarget {target}, input of {len(data)} bytes:\n{data.hex()}")
        self.target, self.data, self.cause = target, data, cause


@dataclass
class Target:
    name: str
    make: corpus.Maker
    run: Callable[[bytes, Random], object]
    allowed: tuple[type[Exception], ...]
    mutate: Callable[[Random, bytes], bytes] = corpus.mutate
    pool: list[bytes] = field(default_factory=list)
    seen: set[object] = field(default_factory=set)
    executions: int = 0

    def draw(self, random: Random) -> bytes:
        """The next input: valid (rarely), garbage (rarely), else a mutation of something valid or interesting."""
        chance = random.random()
        if chance < 0.05:
            return corpus.garbage(random)
        data = random.choice(self.pool) if self.pool and chance < 0.5 else self.make(random)
        return data if chance > 0.95 else self.mutate(random, data)

    def execute(self, data: bytes) -> None:
        """Run one input. Raises Finding."""
        self.executions += 1
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        try:
            outcome: object = self.run(data, Random(zlib.crc32(data)))
        except self.allowed as error:
            outcome = _behaviour(error)
        except Exception:  # noqa: BLE001  every other exception is what this program is for
            raise Finding(self.name, data, traceback.format_exc()) from None
        allocated = tracemalloc.get_traced_memory()[1] - before
        if allocated > PEAK_BYTES + 8 * len(data):
            raise Finding(self.name, data, f"allocated {allocated} bytes")
        if outcome not in self.seen and len(self.seen) < BEHAVIOURS:
            self.seen.add(outcome)
            if len(self.pool) < POOL:
                self.pool.append(data)


def _behaviour(error: Exception) -> object:
    """What makes two failures different: where it was raised, and its text without numbers and quotations."""
    *_, (_, line) = traceback.walk_tb(error.__traceback__)
    return type(error), line, re.sub(r"[0-9]+|`[^`]*`|'[^']*'", "#", str(error))[:80]


# --- frames -----------------------------------------------------------------------------------------------------------

Frames = list[tuple[tuple[int, ...], bytes]]


def _reference(stream: bytes) -> tuple[Frames, str]:
    """The plain way to read a stream that is all there: its frames, and how it ends."""
    found: Frames = []
    while len(stream) >= HEADER_BYTES:
        header = HEADER.unpack_from(stream)
        version, kind, nbytes = header[0], header[1], header[6]
        if version != VERSION or nbytes > PAYLOAD_LIMIT.get(kind, -1):
            return found, "refused"
        if len(stream) < HEADER_BYTES + nbytes:
            return found, "cut off"
        found.append((header, stream[HEADER_BYTES : HEADER_BYTES + nbytes]))
        stream = stream[HEADER_BYTES + nbytes :]
    return found, "cut off" if stream else "complete"


class _Stream:
    """A link that has all its bytes and hands them out in random pieces."""

    def __init__(self, data: bytes, random: Random) -> None:
        self.data, self.random, self.at = data, random, 0
        # pieces of one byte are worth their time in short streams only
        self.most = max(random.choice((1, 39, 40, 41, 1000, 1 << 20)), len(data) // 256)

    def fill(self, parser: Parser) -> int:
        """Put the next piece where it belongs, and leave it to the caller to tell the parser."""
        target = parser.target()
        assert isinstance(target, memoryview), "nothing is scattered here"
        if not target.nbytes:
            raise AssertionError("an empty target: recv_into would take it for the end of the stream")
        size = min(target.nbytes, len(self.data) - self.at, self.random.randint(1, self.most))
        target[:size] = self.data[self.at : self.at + size]
        self.at += size
        return size


def _payload(parser: Parser, stream: _Stream, nbytes: int) -> bytes | None:
    """Consume a payload in one of the ways there are. None: it was dropped, or the stream ended."""
    way = stream.random.randrange(4)
    if way == 0 and (view := parser.take()) is not None:
        return bytes(view)
    place = bytearray(nbytes)
    if way == 1:
        parser.drop()
    else:
        parser.into(memoryview(place))
    while parser.pending and (size := stream.fill(parser)):
        assert parser.feed(size) is None, "a header in the middle of a payload, or before it was asked for"
        if way == 3 and stream.random.random() < 0.2:
            parser.divert()
            way = 1
    return None if way == 1 or parser.pending else bytes(place)


def run_parser(data: bytes, random: Random) -> object:
    expected, end = _reference(data)
    parser, stream = Parser(PAYLOAD_LIMIT), _Stream(data, random)
    count = 0
    try:
        while True:
            header = parser.next_header()
            while header is None and (size := stream.fill(parser)):
                header = parser.feed(size)
            if header is None:
                break
            payload = _payload(parser, stream, header[6])
            if parser.pending:
                break
            assert header == expected[count][0], f"frame {count}: {header} instead of {expected[count][0]}"
            assert payload in (None, expected[count][1]), f"the payload of frame {count} differs"
            count += 1
    except ProtocolError:
        assert end == "refused", f"refused, although the stream is {end}"
        raise
    finally:
        assert count == len(expected), f"{count} frames instead of {len(expected)}"
    assert parser.at_boundary() == (end == "complete"), f"at_boundary() on a stream that is {end}"
    return end, min(count, 4)


# --- handshakes -------------------------------------------------------------------------------------------------------


#: The same two sides every time: an input can only be replayed against the nonces it was made for.
_INITIATOR, _ACCEPTOR = corpus.make_identity(Random(1)), corpus.make_identity(Random(2))


def _pair() -> corpus.Sides:
    return corpus.sides(Random(0), _INITIATOR, _ACCEPTOR)


def run_acceptor(data: bytes, _: Random) -> object:
    pair = _pair()
    corpus.feed(pair.acceptor, data)
    assert pair.acceptor.wanted <= LONGEST
    if pair.acceptor.undecided:
        assert pair.acceptor.remote == pair.initiator.identity, "a forged identity was believed"
    return pair.acceptor.wanted, pair.acceptor.undecided


def run_initiator(data: bytes, _: Random) -> object:
    pair = _pair()
    pair.initiator.start()
    corpus.feed(pair.initiator, data)
    assert pair.initiator.wanted <= LONGEST
    if pair.initiator.done:
        assert pair.initiator.remote == pair.acceptor.identity, "a forged identity was believed"
    return pair.initiator.wanted, pair.initiator.done


def run_insider(data: bytes, _: Random) -> object:
    """One who knows the token proves any bytes as its identity."""
    pair = _pair()
    stream = corpus.auth_stream(pair, data[: LONGEST - 40])
    acceptor = _pair().acceptor
    corpus.feed(acceptor, stream)
    assert acceptor.remote is not None
    assert acceptor.remote.uid == pair.initiator.identity.uid
    return acceptor.undecided


def make_insider(random: Random) -> bytes:
    """Identities that get past the comparison of uids."""
    return encode(msgspec.structs.replace(corpus.make_identity(random), uid=_INITIATOR.uid))


# --- payloads ---------------------------------------------------------------------------------------------------------


def _shown(text: str) -> bool:
    """It may be shown to a user: no line breaks, no escape sequences, not too long."""
    return len(text) <= TEXT_LIMIT and text.isprintable()


def run_control(data: bytes, _: Random) -> object:
    message = decode_control(memoryview(data))
    match message:
        case Goodbye(reason) | Lost(_, reason):
            assert _shown(reason)
        case Closing() | IdleAsk() | IdleAnswer():
            pass
    assert decode_control(memoryview(encode(message))) == message
    return type(message)


def run_identity(data: bytes, _: Random) -> object:
    found = decode_identity(data)
    assert len(found.uid) == 16
    assert all(map(_shown, (found.name, found.host, found.run, *found.addresses)))
    assert not found.eager_bytes or found.eager_bytes < min(found.lane_credit, found.peer_credit)
    assert decode_identity(encode(found)) == found
    return found.allow_pickle


def run_credit(data: bytes, _: Random) -> object:
    sender = CreditOut(lane_limit=1 << 16, peer_limit=1 << 18)
    for group in range(4):
        for tag in range(-2, 6):
            sender.take((group, tag), 4096)
    spent = sender.used
    try:
        sender.returned(memoryview(data))
    finally:
        assert 0 <= sender.used <= spent
        assert sender.used == sum(sender.lanes.values())
        assert all(sender.lanes.values()), "an entry for a lane without outstanding bytes"
    return len(sender.lanes)


def make_object(random: Random) -> bytes:
    return b"".join(codec.encode(corpus.value(random)))


def run_codec(data: bytes, _: Random) -> object:
    """What was decoded can be encoded again, and is then decoded to something that encodes alike."""
    found = codec.decode(data)
    again = b"".join(codec.encode(found))
    assert b"".join(codec.encode(codec.decode(again))) == again
    return type(found)


TARGETS: Final = (
    Target("parser", corpus.frames, run_parser, (ProtocolError,), corpus.mutate_frames),
    Target("acceptor", lambda _: corpus.initiator_stream(_pair()), run_acceptor, (ProtocolError, ConnectError)),
    Target("initiator", lambda _: corpus.acceptor_stream(_pair()), run_initiator, (ProtocolError, ConnectError)),
    Target("insider", make_insider, run_insider, (ProtocolError,)),
    Target("control", corpus.control, run_control, (ProtocolError,)),
    Target("identity", corpus.identity, run_identity, (ProtocolError,)),
    Target("credit", corpus.credit, run_credit, (ProtocolError,)),
    Target("codec", make_object, run_codec, (CodecError,)),
)


# --- the loop ---------------------------------------------------------------------------------------------------------


def process_bytes() -> tuple[int, int]:
    """Of this process: address space, and what of it is resident."""
    pages = Path("/proc/self/statm").read_text().split()
    return int(pages[0]) * resource.getpagesize(), int(pages[1]) * resource.getpagesize()


def _trace(wanted: bool) -> None:
    if wanted is not tracemalloc.is_tracing():
        (tracemalloc.start if wanted else tracemalloc.stop)()


def fuzz(targets: tuple[Target, ...], random: Random, seconds: float) -> int:
    """Run the targets in turn for that long. The number of executions; raises Finding."""
    deadline = time.monotonic() + seconds
    executions, warm = 0, 0
    try:
        while time.monotonic() < deadline:
            _trace(executions % PERIOD < TRACED)
            for target in targets:
                target.execute(target.draw(random))
            executions += len(targets)
            if not warm and executions > WARM_UP:
                warm = process_bytes()[1]
    finally:
        _trace(False)
    gc.collect()
    growth = process_bytes()[1] - warm
    if warm and growth > GROWTH_BYTES:
        raise Finding("all", b"", f"the process grew by {growth} bytes in {executions} executions")
    return executions


def main(arguments: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description="Fuzz everything that reads a peer's bytes.")
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument("--seed", type=int, default=None, help="default: a new one, printed")
    options.add_argument("--target", choices=[target.name for target in TARGETS], help="default: all")
    options.add_argument("--replay", metavar="HEX", help="run one input of --target again")
    given = options.parse_args(arguments)
    if given.replay is not None and given.target is None:
        options.error("--replay needs --target.")

    targets = tuple(target for target in TARGETS if given.target in (None, target.name))
    seed = SystemRandom().randrange(2**32) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    try:
        if given.replay is not None:
            _trace(True)
            targets[0].execute(bytes.fromhex(given.replay))
        else:
            fuzz(targets, Random(seed), given.seconds)
    except Finding as finding:
        print(f"FINDING with seed {seed}\n{finding}", flush=True)
        return 1
    finally:
        _trace(False)
    for target in targets:
        print(f"{target.name:10} {target.executions:9,} executions, {len(target.seen):4} behaviours, no finding")
    return 0


if __name__ == "__main__":
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (process_bytes()[0] + ADDRESS_SPACE, hard))
    sys.exit(main())
