"""Neighbour exchange: each rank sends to some, and receives from some, all at once.

Idea. The pairs are the ranks' own business: a halo of a grid (grid.py), the edges of a graph. One round: whatever a
rank sends and receives is under way at the same time, so no order of calls can deadlock.

What is sent differs from pair to pair, so it is no part of what all ranks must say alike. Each message begins with its
word: what it holds. Where that is not what is received, DesyncError says both. Of a large message the word goes ahead,
so that the rest is received where it shall lie.

Cost: a message for each edge, of a large array two, one after the other; one round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from rankmesh.buffers import EMPTY, readable
from rankmesh.collectives.arguments import Operand, flat_input, flat_output, operand
from rankmesh.collectives.calls import Call, Signature
from rankmesh.collectives.plan import Copy, Receive, Round, Send, Span
from rankmesh.collectives.running import Collective, Context, Piece, _Receiving
from rankmesh.collectives.space import Part, Space
from rankmesh.config import KIB
from rankmesh.errors import UsageError

if TYPE_CHECKING:
    from rankmesh.collectives.starting import Options, Running

#: Bytes of a word. A kind's name has up to 72 (kinds.py), a number of elements up to 19.
WORD: Final = 96
#: Up to so many bytes are received with their word, and copied: they are sent at once if they can be (running.py).
_TOGETHER: Final = 16 * KIB - WORD


def round_of(rank: int, sends: list[int], receives: list[int]) -> Round:
    """Over a block for each rank in `sends`, then one for each in `receives`."""
    out: dict[int, Span] = {to: (at, at + 1) for at, to in enumerate(sends)}
    into: dict[int, Span] = {source: (at, at + 1) for at, source in enumerate(receives, len(sends))}
    return Round(
        tuple(Send(to, (span,)) for to, span in out.items() if to != rank),
        tuple(Receive(source, (span,)) for source, span in into.items() if source != rank),
        (Copy(out[rank], into[rank]),) if rank in out and rank in into else (),
    )


def exchange(group: Running, sends: Mapping[int, Any], receives: Mapping[int, Any], options: Options) -> Any:
    """See Collectives.neighbor_exchange."""
    this, space, words = laid_out(group, sends, receives)
    context = group._context
    timeout = context.hub.config.timeout if options.timeout is None else options.timeout
    with context.hub.engine:
        call = context.next_call(Signature("neighbor_exchange", algorithm="direct"))
        work = NeighborExchange(context, call, this, space, words, lambda: receives, timeout)
        context.begin(work)
    return work if options.async_op else work.result()


def laid_out(group: Running, sends: Mapping[int, Any], receives: Mapping[int, Any]) -> tuple[Round, Space, Words]:
    """Checked, and as blocks."""
    for rank in (*sends, *receives):
        if not 0 <= rank < group.size:
            raise UsageError(f"There is no rank {rank} in a group of {group.size}. Correct sends or receives.")
    given = {to: operand(array) for to, array in sends.items()}
    wanted = {source: operand(array) for source, array in receives.items()}
    own = group.rank
    if (given[own].what if own in given else None) != (wanted[own].what if own in wanted else None):
        raise UsageError(f"Rank {own} sends to itself what it does not receive from itself. Correct sends or receives.")
    targets = [flat_output(one.array, "receives") for one in wanted.values()]
    sources = [flat_input(one.array) for one in given.values()]
    sources = [flat.copy() if _touches(flat, targets) else flat for flat in sources]  # else it could change on the way
    words = Words(given, wanted)
    space = Space(*(Part(flat, [flat.size]) for flat in (*sources, *targets)), words.part)
    return round_of(own, list(sends), list(receives)), space, words


def _touches(flat: Any, targets: list[Any]) -> bool:
    return any(np.may_share_memory(flat, target) for target in targets)


class Words:
    """What is said of each message. Those that are sent lie in blocks behind those of `round_of`."""

    def __init__(self, given: Mapping[int, Operand], wanted: Mapping[int, Operand]) -> None:
        first = len(given) + len(wanted)
        said = b"".join(map(_word, given.values()))
        self.part = Part(np.frombuffer(said, np.uint8), [WORD] * len(given))
        self.to: dict[int, Span] = {rank: (at, at + 1) for at, rank in enumerate(given, first)}
        self.expected = {rank: _word(one) for rank, one in wanted.items()}


def _word(one: Operand) -> bytes:
    return one.what.encode("ascii").ljust(WORD)


def _text(word: bytes) -> str:
    return word.decode("ascii", "replace").rstrip()


class NeighborExchange(Collective):
    """Sends a word with each message, and looks at each word that comes."""

    def __init__(
        self,
        context: Context,
        call: Call,
        this: Round,
        space: Space,
        words: Words,
        conclude: Callable[[], Any],
        timeout: float,
    ) -> None:
        super().__init__(context, call, (this,), space, None, conclude, timeout)
        self._words = words
        #: Messages that begin with a word, in memory of their own: what follows it, and where it belongs.
        self._coming: dict[Piece, tuple[memoryview, memoryview]] = {}

    def _send(self, send: Send, pieces: list[Piece]) -> None:
        word = self._words.to[send.to]
        if len(self._space.memory(send.spans[0])) <= _TOGETHER:
            super()._send(Send(send.to, (word, *send.spans)), pieces)
            return
        self._open += 1
        super()._send(Send(send.to, (word,)), pieces)
        if not self.finished:
            super()._send(send, pieces)

    def _receiving(self, receive: Receive) -> _Receiving:
        target = self._space.memory(receive.spans[0])
        rest = target if len(target) <= _TOGETHER else EMPTY
        came = readable(np.empty(WORD + _TOGETHER, np.uint8))  # whatever comes first can be read
        first = _Receiving(self, receive.source, self.context.routers[receive.source], came)
        first.expected = WORD + len(rest)
        self._coming[first] = came, rest
        if rest is target:
            return first
        assert isinstance(self._pieces, list), "a round begins"
        self._open += 1
        self._pieces.append(first)
        self.context.hub.post(first)
        if receive.source in self.doubts:  # it was there, and another one: what follows it has no place
            return _Receiving(self, receive.source, first.router, EMPTY)
        return super()._receiving(receive)

    def piece_ended(self, piece: Piece) -> None:
        if isinstance(piece, _Receiving) and piece in self._coming and piece._error is None and not self.finished:
            came, rest = self._coming.pop(piece)
            said, expected = bytes(came[:WORD]), self._words.expected[piece.rank]
            if said != expected:
                did = f"sent {_text(said)} where {_text(expected)} were expected"
                self.context.disagree(self, piece.rank, did)
                return
            rest[:] = came[WORD : WORD + len(rest)]
        super().piece_ended(piece)
