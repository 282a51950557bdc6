"""Frames and the link that takes them: the lower half of `Outbound`. All methods need the engine's lock."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING, Final

from rankmesh.endpoint.lanes import Frame, Lane, OutQueue
from rankmesh.transport.ring import INLINE_MOST
from rankmesh.wire.header import DATA_LIMIT, HEADER_BYTES, Kind, pack
from rankmesh.wire.messages import Control, encode

if TYPE_CHECKING:
    from rankmesh.endpoint.router import PeerRouter
    from rankmesh.transport.base import Link
    from rankmesh.transport.ring import RingWriter

#: Bytes read or written for one connection before the others get their turn.
TURN_BYTES: Final = 4 * 1024 * 1024
#: And seconds written: frames that are made of many small pieces take long, and hold few bytes.
TURN_SECONDS: Final = 0.003
#: The first piece of a transfer through a ring is smaller: the receiver begins to copy when it is there.
FIRST_PIECE: Final = DATA_LIMIT // 4
#: Announcements a sender may have open at its peer: each costs the receiver a few hundred bytes.
MAX_ANNOUNCED: Final = 65_536
#: Answers that may wait for a peer which does not read, by lane: to all it may have announced, and to its requests.
MAX_UNREAD: Final = {Lane.CONTROL: 2 * MAX_ANNOUNCED, Lane.RPC: 16_384}
#: Answers of up to so many bytes are bounded by that alone: there is always room to say that a result has none.
BRIEF_ANSWER: Final = 1024


class FrameSender:
    """What waits for one connection, in the order of its lanes, and how it leaves."""

    def __init__(self, router: PeerRouter) -> None:
        self._router = router
        self._engine = router.engine
        self._link: Link | None = None
        self._queue = OutQueue()
        #: The link's ring, if it is one that may be written to directly.
        self._ring: RingWriter | None = None
        #: Rings for its reader.
        self._after_write: Callable[[], None]
        #: The link took no more; it is watched for writing.
        self.blocked = False
        #: There is a connection and nothing waits: a small message may go out at once.
        self._clear = False
        #: While the other side is asked whether the connection may be closed, nothing is sent on it.
        self.paused = False
        #: Set by traffic, cleared by the heartbeat.
        self.spoke = False
        #: How much of what was written the reader of the ring had taken when it was last asked.
        self._taken = 0

    @property
    def _held_back(self) -> bool:
        """Whether anything waits that is not in the queue."""
        raise NotImplementedError

    def _open(self, link: Link) -> None:
        self._link = link
        self._link_send = link.send
        self._link_sendmsg = link.sendmsg
        self._set_blocked(False)
        self.paused = False
        self.spoke = True
        self._taken = 0

    def _close(self) -> None:
        self._link = None
        self._set_blocked(False)
        self._clear = False
        self._queue.clear()

    def pause(self) -> None:
        """Send nothing until told otherwise: the other side is asked whether the connection may be closed."""
        self.paused = True
        self._clear = False

    @property
    def flushed(self) -> bool:
        """Nothing is about to leave, but for what the other side has to make room for, or to grant, before."""
        return not self._queue

    # ------------------------------------------------------------------ frames of our own

    def control(self, kind: Kind, ident: int, lane: Lane = Lane.CONTROL) -> None:
        if self._link is not None:
            self._push(lane, Frame([pack(kind, ident=ident)], HEADER_BYTES))

    def payload(self, kind: Kind, payload: bytes, lane: Lane = Lane.CONTROL) -> None:
        if self._link is not None:
            header = pack(kind, nbytes=len(payload))
            self._push(lane, Frame([header + payload], HEADER_BYTES + len(payload)))

    def _push(self, lane: Lane, frame: Frame) -> None:
        self._queue.push(lane, frame)
        if not self.blocked:  # else readiness flushes
            self.flush()
        elif lane is Lane.CONTROL:
            self.check_unread(lane)

    def check_unread(self, lane: Lane) -> None:
        """Who asks for answers and does not read them must not fill our memory."""
        if self._queue.waiting(lane) > MAX_UNREAD[lane]:
            self._router.lose(f"it reads nothing: {MAX_UNREAD[lane]} answers wait for it")

    def message(self, message: Control, kind: Kind = Kind.CONTROL, lane: Lane = Lane.CONTROL) -> None:
        self.payload(kind, encode(message), lane)

    def ping(self) -> None:
        """Show life, unless something is about to go out anyway."""
        if not self._queue:
            self.control(Kind.PING, 0)

    def herald(self) -> None:
        """Something will be sent in a moment: if the other side of a ring sleeps, it is woken for it now."""
        if self._ring is not None:
            try:
                self._after_write()
            except OSError as error:
                self._router.unwritable(error)

    def is_read(self) -> bool:
        """Whether the other side has taken something out of the ring since this was asked last: it lives, though it may
        have found no time to say so between two pieces."""
        before = self._taken
        if self._ring is not None:
            self._taken = self._ring.taken()
        return self._taken != before

    # ------------------------------------------------------------------ the link

    def flush(self) -> None:
        """Hand to the link what it takes."""
        if self._ring is not None:
            try:
                goes_on = self._write_pieces(self._ring)
            except OSError as error:  # the other side spoilt the ring
                self._router.unwritable(error)
                return
            if goes_on:
                self._clear = False
                self._watch_writes(True)
                self._wake_leader()
                return
        budget, end = TURN_BYTES, monotonic() + TURN_SECONDS
        while self._link is not None:
            buffers = self._queue.commit()
            if not buffers:
                self._watch_writes(False)
                self._clear = not self._held_back
                return
            self._clear = False
            try:
                sent = self._link_sendmsg(buffers) if len(buffers) > 1 else self._link_send(buffers[0])
            except BlockingIOError:
                self._watch_writes(True)
                return
            except OSError as error:
                self._router.unwritable(error)
                return
            self.spoke = True
            self._queue.advance(sent)
            budget -= sent
            if budget <= 0 or monotonic() > end:
                self._watch_writes(True)  # readiness brings us back, after the others
                return

    def _write_pieces(self, ring: RingWriter) -> bool:
        """Write pieces of a transfer straight into the slots of a ring, while it is all that waits. True: there is more
        of it, for which there is no slot, or which comes after the others' turn."""
        queue, written = self._queue, 0
        while (transfer := queue.lone_transfer) is not None:
            if written >= TURN_BYTES or not ring.has_slot():
                ring.lacks_slot = True
                return True
            piece = transfer.next_piece(DATA_LIMIT if transfer.sent else FIRST_PIECE)
            offset, pieces, size = piece
            header = pack(Kind.DATA, ident=transfer.ident, nbytes=size, extra=offset)
            if len(pieces) != 1 or size <= INLINE_MOST or not ring.put_both(header, pieces[0]):
                if pieces:
                    queue.commit_piece(transfer, piece)
                break
            self._after_write()
            self.spoke = True
            written += size
            if size == transfer.left:
                queue.forget(transfer)  # before its owner is told, who may go on to the next
            transfer.frame_sent(size)
        return False

    def _wake_leader(self) -> None:
        """If another thread leads, it sleeps, and knows nothing yet of what is to be written."""
        engine, polled = self._engine, self._router.polled
        if engine.leader is not None and engine.leading_thread != get_ident() and polled is not None and polled.arm():
            engine.waker.release()

    def _watch_writes(self, wanted: bool) -> None:
        if self.blocked != wanted and self._link is not None:
            self._set_blocked(wanted)
            self._link.wants_write(wanted)
            self._router.engine.modify(self._link.fileno(), self._link.poll_mask())

    def _set_blocked(self, blocked: bool) -> None:
        self.blocked = blocked
        if blocked:
            self._engine.writers.add(self)
        else:
            self._engine.writers.discard(self)
