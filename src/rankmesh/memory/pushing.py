"""Same host: registered memory that others write where it lies, without its owner (transport/pushing.py).

The owner and a peer that may write share eight words:

    0         1 while a thread of the peer's writes
    1         its permit (mapping.py)
    2 … 5     what the kernel is told: the guard and its length, an address and a length

A writer puts its word up, says where it writes, looks at its permit, makes the call, and takes both back. The owner
takes the permit back, then puts the length to 0, then waits until the word is down. Each stores before it loads, with a
full barrier between: either the writer sees that its permit is gone, or its call came before the owner's 0, and the
owner sees its word; or it comes afterwards, and writes nothing. So nothing is written after `unregister` has returned,
whoever is stopped or killed, and wherever.

A writer that is lost while it lives is waited for like any other, unless it is stopped: then it is outside the kernel.
One that hangs inside (its own bytes lie on a disk that does not answer) is waited for until the deadline. Its words are
given to somebody else when it has said that it is through with them, or when its process is gone: else it could aim
there late, and change what the next one aims at.

One thread of a peer writes at a time. What others write meanwhile, and what is to go on by itself (`async_op`), is
fetched by the owner (pulling.py); batches are streamed. A write does not overtake those before it that the owner was
asked for: as long as one of these is not answered, it is asked for, too (`Flow.changing`). So is one of a single cell:
cells are the owner's to change.

All that may write share a page of words: processes of one user, which could write into each other anyway.
"""

from __future__ import annotations

import operator
from time import monotonic
from typing import TYPE_CHECKING, Final

from rankmesh.buffers import PAGE, address_of
from rankmesh.memory.mapping import FORBIDDEN, PIECE_BYTES, Permits
from rankmesh.memory.pulling import Pulled
from rankmesh.transport.pushing import VECTOR_WORDS, Pusher, halted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rankmesh.endpoint.router import Router
    from rankmesh.transport.pulling import Puller

_VECTORS: Final = 2
_LENGTH: Final = _VECTORS + VECTOR_WORDS - 1


class PushPermits(Permits):
    """The owner's side. Methods need the engine's lock."""

    words_bytes = 4 * PAGE
    slot_words = 8

    def __init__(self, generation: int) -> None:
        """Raises OSError where there is no such memory."""
        super().__init__(generation, writable=True)

    def lost(self, router: Router) -> None:
        slot = self._slots.get(router.index, 0)
        super().lost(router)
        if slot:
            self._stop_short([slot])

    def revoke(self) -> None:
        super().revoke()
        self._stop_short(self._slots.values())

    def admit(self, admits: Callable[[int], bool]) -> None:
        super().admit(admits)
        self._stop_short([slot for slot in self._slots.values() if self._words[slot + 1] == FORBIDDEN])

    def _stop_short(self, slots: Iterable[int]) -> None:
        """Their permits are gone: the kernel is not to begin with what they have said, either."""
        with self._fence:
            pass
        for slot in slots:
            self._words[slot + _LENGTH] = 0
        with self._fence:
            pass

    def _may_write(self, process: int) -> bool:
        """Its word is up: it is inside the kernel, unless it is stopped, which it cannot be there, or gone."""
        return not halted(process)


class Pushed(Pulled):
    """The writer's side. May be used from many threads."""

    of = PushPermits

    def __init__(
        self,
        memory: memoryview,
        slot: int,
        name: str,
        generation: int,
        address: int,
        puller: Puller,
        process: int,
        guard: int,
    ) -> None:
        """`memory` is to be written, too."""
        super().__init__(memory, slot, name, generation, address, puller)
        vectors = self._words[slot + _VECTORS : slot + _VECTORS + VECTOR_WORDS]
        self._pusher: Pusher | None = Pusher(process, guard, vectors)

    def _let_go(self) -> None:
        super()._let_go()
        self._pusher = None

    def write(self, data: memoryview, offset: int, deadline: float) -> bool:
        """Copy it there, from `offset` on. False: that cannot be, or not all of it, or another thread is at it: the
        owner is to be asked."""
        slot, begun = self._slot, False
        try:
            with self._lock:
                words, pusher = self._words, self._pusher
                if self._writers or pusher is None:
                    return False
                self._writers, begun = 1, True
            to, source, nbytes = self._address + operator.index(offset), address_of(data), len(data)
            for at in range(0, nbytes, PIECE_BYTES):
                if at and monotonic() > deadline:
                    raise self.late()
                piece = min(PIECE_BYTES, nbytes - at)
                pusher.aim(to + at, piece)
                with self._lock:  # giving it back is the barrier between these stores and what follows
                    words[slot] = 1
                if words[slot + 1] != self.generation or not pusher.push(source + at, piece):
                    return False
            return True
        finally:
            if begun:  # no call here: an interrupt could come between
                words[slot + _LENGTH] = 0
                words[slot] = 0
                self._writers = 0
