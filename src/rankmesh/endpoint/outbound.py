"""The sending half of a conversation. All methods need the engine's lock; `send` takes it itself.

Order of a lane is the order of the stream: a message is put on the wire, eagerly or as an announcement, in the order of
the calls. A send may have to wait in one of two places, and later ones of the same lane wait behind it:

- in its lane, when the lane's credit is spent: until the receiver has taken some of what it has. Other lanes go on.
- for the peer, when there is no connection yet, or no room to announce.

A small message whose lane has credit while the peer as a whole has none is announced: it costs the receiver nothing.
"""

from __future__ import annotations

from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from rankmesh.buffers import readable
from rankmesh.endpoint.frames import BRIEF_ANSWER, MAX_ANNOUNCED, FrameSender
from rankmesh.endpoint.lanes import Frame, Lane, Transfer
from rankmesh.endpoint.sharing import Cells, Offers
from rankmesh.endpoint.transfers import Send, SendState
from rankmesh.errors import BusyError, ProtocolError, UsageError
from rankmesh.transport.ring import BELL, begin
from rankmesh.wire.credit import OVERHEAD, CreditOut
from rankmesh.wire.credit import Lane as CreditLane
from rankmesh.wire.header import DATA_LIMIT, HEADER, HEADER_BYTES, VERSION, Flag, Kind, pack
from rankmesh.wire.messages import Identity

if TYPE_CHECKING:
    from rankmesh.endpoint.router import PeerRouter
    from rankmesh.transport.base import Link, PolledLink

_pack = HEADER.pack
_EAGER: Final = int(Kind.EAGER)
RPC: Final = int(Flag.REQUEST | Flag.REPLY)
#: What a frame of this kind would be announced with.
RPC_FLAG: Final = {int(Kind.REQUEST): int(Flag.REQUEST), int(Kind.REPLY): int(Flag.REPLY)}

#: Up to this size header and payload are joined into one buffer: cheaper than a gathering system call.
JOIN_BYTES: Final = 16 * 1024
#: A gathering system call takes small buffers at about 0.1 us each, which is the copying of a KiB; a link that has none
#: takes them one by one, at several us each.
GATHER_FROM: Final = 1024
WRITE_FROM: Final = 64 * 1024
#: A grant within so many seconds is worth polling for: to be woken for it costs a quarter of a millisecond.
SOON: Final = 2e-3
#: What a waiting or announced send costs in bookkeeping, for the bound on them.
SEND_COST: Final = 512


class Outbound(FrameSender):
    """What goes to one peer."""

    def __init__(self, router: PeerRouter) -> None:
        super().__init__(router)
        self._config = router.hub.config
        self._waiting: deque[Send] = deque()
        self._stalled: dict[CreditLane, deque[Send]] = {}
        self.announced: dict[int, Send] = {}
        #: Of the last transfer or request that this side began: the next has one more.
        self.last_ident = 0
        self._like(0, 0, 0)
        #: So many messages of that kind have their credit spent already.
        self._prepaid = 0
        #: What of this side's arena the other side may copy from; and the words that take such offers back.
        self._offers: Offers | None = None
        self.cells: Cells | None = None
        self.frames = 0
        self.bytes = 0
        #: Of requests and replies that have not left, but for those that `send_rpc` queued.
        self.rpc_bytes = 0
        self._join_limit = 0
        #: Buffers of a transfer that are smaller than this are better joined before they are handed to the link.
        self.join_below = WRITE_FROM
        self._joining: memoryview | None = None
        #: The last transfer was granted so soon that whoever sends the next polls for its grant.
        self._answers_soon = True

    def attach(self, link: Link, remote: Identity, polled: PolledLink | None) -> None:
        self._open(link)
        self._remote = remote
        self._eager_limit = min(self._config.eager_bytes, remote.eager_bytes)
        self._join_limit = min(self._eager_limit, JOIN_BYTES)
        self._ring = self._offers = self.cells = None
        self.join_below = GATHER_FROM if link.drained_on_short_read else WRITE_FROM
        if polled is not None and polled.writer is not None:
            self.cells = Cells(polled.cells)
            self._offers = Offers(polled, self._router.hub.arena, self.cells)
            self._ring, self._after_write, self._fence = polled.writer, polled.after_write, polled.fence
            self._join_limit = self._eager_limit  # nothing is joined: it is written in place
        self._credit = CreditOut(remote.lane_credit, remote.peer_credit)
        self._prepaid = 0
        self.advance()

    def detach(self) -> None:
        self._close()
        self._ring = self._offers = self.cells = None

    def resume(self) -> None:
        self.paused = False
        self.advance()

    @property
    def idle(self) -> bool:
        """Everything that was started has left this process."""
        return not (self._queue or self._waiting or self._stalled or self.announced)

    @property
    def _held_back(self) -> bool:
        return bool(self._waiting or self._stalled or self.paused)

    def new_ident(self) -> int:
        self.last_ident += 1
        return self.last_ident

    # ------------------------------------------------------------------ messages

    def send_buffer(self, group: int, tag: int, data: Any, timeout: float | None) -> None:
        """Send a buffer and wait until it may be reused. The hot path: one lock, one join, one system call."""
        view = readable(data)
        nbytes = len(view)
        engine = self._engine
        if not engine.lock.acquire(False):
            engine.acquire()
        try:
            like = nbytes == self._like_nbytes and tag == self._like_tag and group == self._like_group
            if self._clear and ((like and self._prepaid) or self._prepay(group, tag, nbytes)):
                self._prepaid -= 1
                header = self._like_header
                try:
                    ring = self._ring
                    if ring is not None and ring.put(self._like_prefix, view):
                        fence = self._fence
                        fence.acquire()
                        fence.release()
                        if ring.control[BELL]:
                            self._after_write()
                        sent = HEADER_BYTES + nbytes
                    else:
                        sent = self._link_send(b"".join((header, view)))
                except OSError as error:
                    sent = self._not_sent(error, tag)
                self.spoke = True
                self.frames += 1
                self.bytes += nbytes
                if sent == HEADER_BYTES + nbytes:
                    return
                timeout = self._config.timeout if timeout is None else timeout
                send = self._send_rest(header, sent, group, tag, 0, [view], nbytes, timeout)
            else:
                timeout = self._config.timeout if timeout is None else timeout
                send = Send(self._router, "send to", group, tag, 0, [view], nbytes, timeout)
                self.start(send)
                if self._ring is not None and send.state is SendState.ANNOUNCED:
                    send.hint = self._router.inbound.direct
                    if self._answers_soon:
                        engine.spin.skip = 0  # whatever it has unlearnt elsewhere
        finally:
            engine.lock.release()
            if engine.deferred or engine.contenders:
                engine.after_release()
        send.result()

    def put(self, group: int, tag: int, view: memoryview, timeout: float) -> bool:
        """Send a small message now, as `send_buffer` does, for a caller that has the lock; `view` may be reused.
        False: it has to go as a Send (there is no connection or no credit now, others wait, or it is large)."""
        nbytes = len(view)
        like = nbytes == self._like_nbytes and tag == self._like_tag and group == self._like_group
        if not (self._clear and ((like and self._prepaid) or self._prepay(group, tag, nbytes))):
            return False
        self._prepaid -= 1
        header, sent = self._like_header, HEADER_BYTES + nbytes
        try:
            if self._ring is not None and self._ring.put(self._like_prefix, view):
                self._after_write()
            else:
                sent = self._link_send(b"".join((header, view)))
        except OSError as error:
            sent = self._not_sent(error, tag)
        self.spoke = True
        self.frames += 1
        self.bytes += nbytes
        if sent != HEADER_BYTES + nbytes:
            self._send_rest(header, sent, group, tag, 0, [memoryview(bytes(view))], nbytes, timeout)
        return True

    def _prepay(self, group: int, tag: int, nbytes: int) -> bool:
        """Make ready for small messages of this kind: the next ones often have the same group, tag and size, and need
        neither a header of their own nor a look at the credit. False: it is large, or there is no credit."""
        if nbytes > self._join_limit:
            return False
        if nbytes != self._like_nbytes or tag != self._like_tag or group != self._like_group:
            if self._prepaid:
                unspent = self._prepaid * (self._like_nbytes + OVERHEAD)
                self._credit.give_back((self._like_group, self._like_tag), unspent)
                self._prepaid = 0
            self._like(group, tag, nbytes)
        self._prepaid = self._credit.take_batch((group, tag), nbytes + OVERHEAD)
        return bool(self._prepaid)

    def _like(self, group: int, tag: int, nbytes: int) -> None:
        self._like_group, self._like_tag, self._like_nbytes = group, tag, nbytes
        self._like_header = _pack(VERSION, _EAGER, 0, group, tag, 0, nbytes, 0)
        self._like_prefix = begin(self._like_header, nbytes)

    def send(self, group: int, tag: int, flags: int, parts: list[memoryview], nbytes: int, timeout: float) -> Send:
        """Begin to send a message of several parts. Takes the lock."""
        with self._engine:
            send = Send(self._router, "send to", group, tag, flags, parts, nbytes, timeout)
            self.start(send)
            return send

    def send_rpc(
        self, kind: int, flags: int, service: int, ident: int, body: bytes | memoryview, more: bool = False
    ) -> bool:
        """Send a small request or reply, which is ours to keep: header and body in one system call if nothing waits.
        False: it has to go as a Send (there is no connection now, or it is too large). `more`: the caller has others
        for this peer, and flushes after the last."""
        nbytes = len(body)
        if nbytes > self._join_limit or self._link is None or self.paused:
            return False
        header = _pack(VERSION, kind, flags, service, ident, 0, nbytes, 0)
        size = HEADER_BYTES + nbytes
        if self._clear and self._ring is not None and self._ring.put(begin(header, nbytes), memoryview(body)):
            self._after_write()
            self.spoke = True
            self.frames += 1
            self.bytes += nbytes
            return True
        frame = b"".join((header, body))
        if self._clear and not more:
            try:
                sent = self._link_send(frame)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                self._router.broken(error)
                return False
            self.spoke = True
            if sent != size:
                self._queue.resume(Frame([memoryview(frame)[sent:]], size - sent))
                self.flush()
        else:
            full = self._queue.nbytes(Lane.RPC) + size > self._config.rpc_send_bytes
            if full and (kind != Kind.REPLY or nbytes > BRIEF_ANSWER):
                raise self._rpc_full(nbytes)
            self._queue.push(Lane.RPC, Frame([frame], size))
            self._clear = False
            if not self.blocked and not more:  # else readiness flushes
                self.flush()
        self.frames += 1
        self.bytes += nbytes
        return True

    def _rpc_full(self, nbytes: int) -> BusyError:
        return BusyError(
            f"Requests and replies to {self._router.peer} wait already, and {nbytes} bytes more would exceed "
            f"Config.rpc_send_bytes ({self._config.rpc_send_bytes})."
        )

    def _not_sent(self, error: OSError, tag: int) -> int:
        """The link took nothing: not now, or never again."""
        if isinstance(error, BlockingIOError):
            return 0
        self._router.broken(error)
        raise self._router.lost_error("send to", tag) from error

    def _send_rest(
        self,
        header: bytes,
        sent: int,
        group: int,
        tag: int,
        flags: int,
        parts: list[memoryview],
        nbytes: int,
        timeout: float,
    ) -> Send:
        """Send an eager message of which `sent` bytes have left; what the link does not take now follows later."""
        send = Send(self._router, "send to", group, tag, flags, parts, nbytes, timeout)
        send.state = SendState.EAGER
        frame = Frame([header, *parts], HEADER_BYTES + nbytes, send, nbytes)
        if sent:
            frame.advance(sent)
        self._queue.resume(frame)
        self.flush()
        return send

    def move(self, transfer: Transfer, nbytes: int) -> None:
        """Send bytes that the other side has a place for (endpoint/posted.py), in turn with other bulk transfers."""
        self._queue.push_bulk(transfer)
        self._clear = False
        self.frames += 1
        self.bytes += nbytes
        if not self.blocked:  # else readiness flushes
            self.flush()

    def joining(self) -> memoryview:
        """Memory for one DATA frame whose parts are joined: there is one such frame at a time."""
        if self._joining is None:
            self._joining = memoryview(bytearray(DATA_LIMIT))
        return self._joining

    def halt(self, transfer: Transfer) -> None:
        """From now on the memory of a transfer that was given to `move` is not read."""
        self._queue.withdraw(transfer)

    def start(self, send: Send) -> None:
        """Put a send on its way, or behind those that wait."""
        self._router.hub.check_open()
        if self._router.gone:
            raise self._router.lost_error(send.op, send.tag)
        self._check_size(send)
        waiting = len(self._waiting) + len(self.announced) + sum(map(len, self._stalled.values()))
        if waiting * SEND_COST >= self._config.send_queue_bytes:
            raise BusyError(
                f"{waiting} sends to {self._router.peer} wait already, as many as "
                f"Config.send_queue_bytes ({self._config.send_queue_bytes}) allows."
            )
        if send.flags & RPC:
            if self.rpc_bytes and self.rpc_bytes + send.nbytes > self._config.rpc_send_bytes:
                raise self._rpc_full(send.nbytes)
            self.rpc_bytes += send.nbytes
            send.counted = True
        if self._link is None:
            self._waiting.append(send)
            self._router.hub.want_link(self._router)
            return
        if self._waiting or self.paused or not self._submit(send):
            self._waiting.append(send)
        if not self.blocked:  # else readiness flushes
            self.flush()

    def only_optional(self) -> bool:
        """Whether something waits here, and all of it might as well not be sent."""
        return bool(self._waiting) and all(send.optional for send in self._waiting)

    def _check_size(self, send: Send) -> None:
        """Refuse what the other side would refuse, before a byte is sent."""
        rpc = bool(send.flags & RPC)
        limit = self._config.max_rpc_bytes if rpc else self._config.max_message_bytes
        if self._link is not None:
            limit = min(limit, self._remote.max_rpc if rpc else self._remote.max_message)
        if send.nbytes > limit:
            raise UsageError(
                f"{send.nbytes} bytes for {self._router.peer} exceed the limit of {limit}. "
                f"Send less at once, or raise Config.{'max_rpc_bytes' if rpc else 'max_message_bytes'} on both sides."
            )

    def _submit(self, send: Send) -> bool:
        """Frame a send, or put it into its lane's queue. False: there is no room to announce it."""
        lane = (send.group, send.tag or 0)
        if not send.flags & RPC and (lane in self._stalled or self._lane_full(send)):
            send.state = SendState.STALLED
            self._stalled.setdefault(lane, deque()).append(send)
            return True
        return self._frame(send)

    def _lane_full(self, send: Send) -> bool:
        """A small message waits for its lane's credit; a large one needs none."""
        lane = (send.group, send.tag or 0)
        return send.nbytes <= self._eager_limit and self._credit.lane_full(lane, send.nbytes + OVERHEAD)

    def _frame(self, send: Send) -> bool:
        """Frame a send as eager or as an announcement. False: neither is possible now."""
        rpc = send.flags & RPC
        tag = send.tag or 0
        lane = Lane.RPC if rpc else Lane.MESSAGE
        if send.nbytes <= self._eager_limit and (rpc or self._credit.take((send.group, tag), send.nbytes + OVERHEAD)):
            send.state = SendState.EAGER
            kind = Kind.REQUEST if rpc & Flag.REQUEST else Kind.REPLY if rpc else Kind.EAGER
            header = pack(kind, send.flags, send.group, tag, 0, send.nbytes)
            self._queue.push(lane, Frame([header, *send.parts], HEADER_BYTES + send.nbytes, send, send.nbytes))
        elif len(self.announced) < MAX_ANNOUNCED:
            send.ident = self.new_ident()
            send.state = SendState.ANNOUNCED
            self.announced[send.ident] = send
            self._queue.push(lane, self._announcement(send, tag))
        else:
            return False
        self.frames += 1
        self.bytes += send.nbytes
        return True

    def _announcement(self, send: Send, tag: int) -> Frame:
        offers = self._offers
        reference = b"" if offers is None or send.flags & RPC else offers.make(send)
        flags = send.flags | Flag.SHARED if reference else send.flags
        header = pack(Kind.ANNOUNCE, flags, send.group, tag, send.ident, len(reference), send.nbytes)
        return Frame([header + reference], HEADER_BYTES + len(reference))

    def advance(self) -> None:
        """Let go what waited, as far as it goes."""
        while self._waiting and self._link is not None and not self.paused:
            send = self._waiting[0]
            try:
                self._check_size(send)
            except UsageError as error:  # the other side allows less than we do
                self._waiting.popleft().fail(error)
                continue
            if not self._submit(send):
                break
            self._waiting.popleft()
        self._release_lanes()
        self.flush()

    def withdraw(self, send: Send) -> None:
        """A send is given up: from now on its buffers are not read."""
        if send.state is SendState.WAITING:
            self._waiting.remove(send)
        elif send.state is SendState.STALLED:
            lane = (send.group, send.tag or 0)
            self._stalled[lane].remove(send)
            self._release_lanes()  # what waited behind it may be smaller
            self.flush()
        elif send.state is SendState.EAGER:
            if self._queue.withdraw(send) and not send.flags & RPC:
                self._credit.give_back((send.group, send.tag or 0), send.nbytes + OVERHEAD)
        elif send.state is SendState.ANNOUNCED:
            send.state = SendState.WITHDRAWN
            if self._offers is not None:
                self._offers.take_back(send)
            self.control(Kind.WITHDRAW, send.ident)
        elif send.state is SendState.MOVING:
            self._stop_moving(send)

    def _stop_moving(self, send: Send) -> None:
        self._queue.withdraw(send)
        self.announced.pop(send.ident, None)
        self.control(Kind.ABORT, send.ident, Lane.MESSAGE)

    def done(self, send: Send) -> None:
        """The last byte of a send has left."""
        if send.ident and self.announced.pop(send.ident, None) is not None and self._waiting:
            self.advance()

    def abandon(self) -> list[Send]:
        """Forget every send and return them: the peer is gone."""
        owners = [owner for owner in self._queue.owners() if isinstance(owner, Send)]
        stalled = [send for lane in self._stalled.values() for send in lane]
        sends = {*self._waiting, *stalled, *self.announced.values(), *owners}
        self._waiting.clear()
        self._stalled.clear()
        self.announced.clear()
        self._queue.clear()
        return [send for send in sends if not send.finished]

    # ------------------------------------------------------------------ what the other side answers

    def on_credit(self, payload: memoryview) -> None:
        self._credit.returned(payload)
        self._release_lanes()
        self.flush()

    def _release_lanes(self) -> None:
        """Let go what the stalled lanes have credit for again, each in order."""
        for lane, queue in list(self._stalled.items()):
            while queue and not self._lane_full(queue[0]) and self._frame(queue[0]):
                queue.popleft()
            if not queue:
                del self._stalled[lane]

    def on_grant(self, ident: int) -> None:
        send = self.announced.get(ident)
        if send is None or send.state is SendState.MOVING:
            raise ProtocolError(f"a grant for transfer {ident}, which is not announced", reason="unknown transfer")
        self._answered(send)
        if send.state is SendState.WITHDRAWN:
            del self.announced[ident]  # they crossed; the receiver reads the WITHDRAW after its GRANT
            return
        send.state = SendState.MOVING
        if not send.nbytes:
            send.frame_sent(0)
        else:
            self._queue.push_bulk(send)
            self.flush()

    def on_refuse(self, ident: int) -> None:
        """The receiver does not want the bytes (any more): the message counts as received, or was withdrawn."""
        send = self.announced.get(ident)
        if send is None:
            return  # its last byte and the refusal crossed
        self._answered(send)
        if send.state is SendState.MOVING:
            self._stop_moving(send)
        self.announced.pop(ident, None)
        if not send.finished:
            send.finish(None)
        self.advance()

    def _answered(self, send: Send) -> None:
        self._answers_soon = monotonic() - send.began < SOON
        if self._offers is not None:
            self._offers.answered(send)

    def unshare(self, segment: int) -> None:
        """A segment of this side's arena is no more."""
        if self._offers is not None:
            self._offers.forget(segment)
