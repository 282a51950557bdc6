"""The hot paths of receiving: one small message straight from the connection into the buffer that waits for it.

A message that is small, whole and just what somebody waits for needs no queue, no landing and, in `receive`, not even a
Receive. Everything else takes the general way (endpoint/inbound.py), with what was read. One path for connections that
are read by system calls, one for rings in shared memory; `Inbound.attach` chooses.

`receive` is tried before a Receive is made. `read_one` serves a Receive that is posted. Both look only while the
connection is `calm`: nothing is staged, pending or backlogged, so the next bytes begin a frame. A path ends with its
connection: who still holds it finds that it is not `Inbound.direct` any more.

The next message is often like the last: `receive` compares its header as a whole with the one it expects, and accounts
for several at once (`settle`). Whatever depends on the account settles it first.
"""

from __future__ import annotations

import struct
from time import perf_counter
from typing import TYPE_CHECKING, Final

from rankmesh.endpoint.frames import TURN_BYTES
from rankmesh.endpoint.outbound import RPC, RPC_FLAG
from rankmesh.transport.ring import BELL, LINE, MASK, RING_BYTES, TAIL, TELL, WORD, RingReader, begin
from rankmesh.wire.credit import OVERHEAD, CreditIn, batch
from rankmesh.wire.header import HEADER, HEADER_BYTES, VERSION, Kind

if TYPE_CHECKING:
    from rankmesh.endpoint.inbound import Inbound
    from rankmesh.endpoint.requests import Lone
    from rankmesh.endpoint.transfers import Receive
    from rankmesh.endpoint.waiting import Waited
    from rankmesh.transport.base import Link, PolledLink
    from rankmesh.wire.parser import Parser

_unpack_from = HEADER.unpack_from
_EAGER: Final = int(Kind.EAGER)
_REQUEST: Final = int(Kind.REQUEST)
_REPLY: Final = int(Kind.REPLY)
_DATA: Final = int(Kind.DATA)
_REPLY_FLAG: Final = RPC_FLAG[_REPLY]
#: How a message's record begins in a ring: the record's word, and the header.
_PREFIX_BYTES: Final = WORD + HEADER_BYTES
_unpack_prefix = struct.Struct(f"{_PREFIX_BYTES}s").unpack_from

#: How often a waiter looks at the socket its message comes over before it looks at all connections: 1.7 us each.
MOST_SOCKET_LOOKS: Final = 12
SOCKET_LOOKS: Final = (None,) * MOST_SOCKET_LOOKS
#: How often it looks at a ring, at 0.1 us each, before it lets others run on this core: one of them may be the sender.
#: The more crowded the core is, the less often.
RING_LOOKS: Final = tuple((None,) * count for count in (2, 5, 10, 20, 40, 80))
MOST_LOOKS: Final = len(RING_LOOKS) - 1
#: How often it lets others run before it looks at the clock, and whether anybody needs the lock.
YIELDS: Final = (None,) * 8
#: After how many of those it lets other threads of this process run, which costs a system call.
ROUNDS: Final = 8
#: Seconds that letting others run takes if there are others.
CROWDED: Final = 1.2e-6
#: What may come over one connection before the others are looked at; less if a timer is due.
STREAK: Final = 32
#: A waiter that lets others run may go on for so many times Config.spin.
PATIENCE: Final = 10


class Direct:
    """What both paths have in common. All methods need the engine's lock, except `receive`, which takes it."""

    patience = 0

    def __init__(self, inbound: Inbound, credit: CreditIn, eager_limit: int) -> None:
        self._inbound = inbound
        self._router = inbound.router
        self._index = inbound.router.index
        self._engine = inbound.router.engine
        self._matcher = inbound.router.hub.matcher
        self._prompt = inbound.router.hub.prompt_services
        self._credit = credit
        self._eager_limit = eager_limit
        #: Messages like the last one that were received and are not accounted for yet.
        self._unsettled = 0
        self._expect(0, 0, 0)

    def _expect(self, group: int, tag: int, nbytes: int) -> None:
        """Make ready for messages of this group, tag and size."""
        self.settle()
        self._group, self._tag, self._nbytes = group, tag, nbytes
        self._header = HEADER.pack(VERSION, _EAGER, 0, group, tag, 0, nbytes, 0)
        self._prefix = (begin(self._header, nbytes),)
        self._batch = batch(self._credit.lane_limit, nbytes + OVERHEAD)

    def settle(self) -> None:
        """Account for what `receive` received."""
        if self._unsettled:
            count, self._unsettled = self._unsettled, 0
            self._passed(self._group, self._tag, self._nbytes, count)

    def receive(self, group: int, tag: int, view: memoryview) -> bool:
        """Look for a message for `view` that nobody else waits for. False: it did not come this way. What comes and
        does not fit is handled the general way. Written out in each path: at 2 us a message every call counts."""
        raise NotImplementedError

    def mark(self) -> int:
        return 0

    def attend(self, work: Waited) -> bool:
        """Look for a while, on behalf of a waiter. True: that was in vain, and long enough to go to sleep now; or what
        came would have woken a sleeper as soon."""
        raise NotImplementedError

    def read_one(self) -> bool:
        """Look once, on behalf of the receives that are posted. True: something came. Deals with errors itself."""
        raise NotImplementedError

    def await_reply(self, call: Lone) -> None:
        """Look for a while for the reply to a request that was sent just now; whatever else comes is dealt with too.
        Whether it came, the call knows."""
        raise NotImplementedError

    def _lone_rpc(self, kind: int, flags: int, service: int, ident: int, payload: memoryview) -> None:
        """A small request or reply came alone: it may be served right here."""
        inbound, router, nbytes = self._inbound, self._router, len(payload)
        try:
            prompt = self._prompt.get(service) if kind == _REQUEST else None
            if prompt is not None:
                prompt(router, ident, payload, False)
            else:
                router.on_rpc(flags & ~RPC | RPC_FLAG[kind], service, ident, payload, False)
        except Exception as error:  # noqa: BLE001  # see PeerRouter.failed
            router.failed(error)
        inbound.heard = True  # what follows comes last: whoever waits for the answer need not wait for it
        inbound.frames += 1
        inbound.bytes += nbytes
        engine = self._engine
        engine.heralds += 1
        leader = engine.leader
        if leader is not None and leader.yields:
            # Who leads on behalf of everybody looks first where the last two came from, if that is one connection.
            leader.hint = self if engine.last_lone is self else None
            engine.last_lone = self

    def _replied(self, call: Lone, flags: int, service: int, payload: memoryview) -> None:
        """The reply to `call` came alone."""
        inbound = self._inbound
        inbound.heard = True
        inbound.frames += 1
        inbound.bytes += len(payload)
        self._engine.spin.misses = 0
        try:
            call.replied(flags & ~RPC | _REPLY_FLAG, service, payload, False)
        except Exception as error:  # noqa: BLE001  # see PeerRouter.failed
            self._router.failed(error)

    def _passed(self, group: int, tag: int, nbytes: int, count: int = 1) -> None:
        """Messages of this size went straight into their buffers."""
        inbound = self._inbound
        inbound.heard = True
        inbound.frames += count
        inbound.bytes += count * nbytes
        if self._credit.passed((group, tag), count * (nbytes + OVERHEAD)):
            inbound.pay()

    def _put(self, group: int, tag: int, payload: memoryview) -> Receive | None:
        """Copy a message into the buffer of the only receive that waits for it, which is to be told. None: there is
        none, or the message does not just fill it."""
        receive = self._matcher.take_lone(group, self._index, tag)
        if receive is None:
            return None
        view = receive.view
        if view is None or len(view) != len(payload) or receive.wants_object or len(view) > self._eager_limit:
            self._matcher.repost(receive)
            return None
        view[:] = payload
        return receive


class SocketPath(Direct):
    def __init__(self, inbound: Inbound, link: Link, parser: Parser, credit: CreditIn, eager_limit: int) -> None:
        super().__init__(inbound, credit, eager_limit)
        self._recv = link.recv_into
        self._staging = parser.staging
        self._begins = parser.begins

    def receive(self, group: int, tag: int, view: memoryview) -> bool:  # noqa: C901  # written out for its speed
        engine, inbound, nbytes = self._engine, self._inbound, len(view)
        if not engine.lock.acquire(False):
            engine.acquire()
        try:
            if inbound.direct is not self or nbytes > self._eager_limit:
                return False
            if inbound.backlogged:  # a stream of small messages: many came with one read
                return self._matcher.untouched(group, self._index, tag) and inbound.take_staged(group, tag, view)
            if not (engine.may_look() and inbound.calm and self._matcher.untouched(group, self._index, tag)):
                return False
            if nbytes != self._nbytes or tag != self._tag or group != self._group:
                self._expect(group, tag, nbytes)
            got = self._wait()
            if got < HEADER_BYTES + nbytes:
                if got >= 0:
                    self._read(got)
                return False
            if not self._begins(self._header):
                self._read(got)
                return False
            if got > HEADER_BYTES + nbytes:
                inbound.stage(got)
                return inbound.take_staged(group, tag, view)
            if nbytes:
                view[:] = self._staging[HEADER_BYTES:got]
            self._unsettled = unsettled = self._unsettled + 1
            if unsettled >= self._batch:
                self.settle()
            engine.spin.misses = 0
            return True
        finally:
            engine.lock.release()
            if engine.deferred or engine.contenders:
                engine.after_release()

    def _wait(self) -> int:
        """Read into the staging buffer, and try a few times: how many bytes came, or -1."""
        recv, staging = self._recv, self._staging
        for _ in SOCKET_LOOKS:
            try:
                return recv(staging)
            except BlockingIOError:
                continue
            except OSError as error:
                self._router.broken(error)
                return -1
        return -1

    def attend(self, work: Waited) -> bool:
        inbound, engine = self._inbound, self._engine
        left, streak, late = MOST_SOCKET_LOOKS, STREAK, False
        end = perf_counter() + engine.spin.seconds  # far more than all looks take, if nobody else has the core
        while inbound.calm and inbound.direct is self and not (engine.deferred or engine.contenders):
            now = perf_counter()
            if not self.read_one():
                left -= 1
                if not left:
                    break
                continue
            late = now >= end
            now = perf_counter()
            if work.finished or not (streak := streak - 1) or now >= engine.timers.next:
                break
            left, end = MOST_SOCKET_LOOKS, now + engine.spin.seconds
        return late and work.finished

    def await_reply(self, call: Lone) -> None:
        inbound = self._inbound
        if not (self._engine.may_look() and inbound.calm and inbound.direct is self) or call.finished:
            return
        got = self._wait()
        if got > HEADER_BYTES:
            version, kind, flags, service, ident, _, nbytes, _ = _unpack_from(self._staging)
            whole = got == HEADER_BYTES + nbytes and version == VERSION and nbytes <= self._eager_limit
            if whole and kind == _REPLY and ident == call.ident:
                self._replied(call, flags, service, self._staging[HEADER_BYTES:got])
                return
        if got >= 0:
            self._read(got)

    def read_one(self) -> bool:
        staging = self._staging
        try:
            got = self._recv(staging)
        except BlockingIOError:
            return False
        except OSError as error:
            self._router.broken(error)
            return True
        if got > HEADER_BYTES:
            version, kind, flags, group, tag, _, nbytes, _ = _unpack_from(staging)
            whole = got == HEADER_BYTES + nbytes and version == VERSION
            if whole and kind == _EAGER and not flags:
                receive = self._put(group, tag, staging[HEADER_BYTES:got])
                if receive is not None:
                    self._passed(group, tag, nbytes)
                    receive.arrived(self._index, tag, nbytes)
                    return True
            elif whole and kind in RPC_FLAG and nbytes <= self._eager_limit:
                self._lone_rpc(kind, flags, group, tag, staging[HEADER_BYTES:got])
                return True
        self._read(got)
        return True

    def _read(self, got: int) -> None:
        try:
            self._inbound.read(got)
        except Exception as error:  # noqa: BLE001  # see PeerRouter.failed
            self._router.failed(error)


class RingPath(Direct):
    patience = PATIENCE

    def __init__(
        self, inbound: Inbound, link: PolledLink, ring: RingReader, credit: CreditIn, eager_limit: int
    ) -> None:
        super().__init__(inbound, credit, eager_limit)
        self._link = link
        self._ring = ring
        #: The last time it let others run it waited in vain, and long enough.
        self._vain = False
        #: Which of RING_LOOKS, as the core's crowdedness has it.
        self._looks = MOST_LOOKS

    def _wait(self) -> bool:
        """Look until something is there. False: in vain, or others need the lock."""
        ring = self._ring
        control, head = ring.control, ring.head
        if control[BELL]:
            control[BELL] = 0  # who polls need not be rung for; who sleeps next puts it up
        for _ in RING_LOOKS[self._looks]:
            if control[TAIL] != head:
                return True
        return self._let_others_run()

    def mark(self) -> int:
        return self._ring.head

    def _let_others_run(self) -> bool:
        """Look on until something is there, while whoever else could run on this core runs in between: where ranks
        outnumber cores, polling without that would keep the sender from sending, and sleeping costs ten times as much.
        False: in vain (`_vain`), or others need the lock, or something came over another connection."""
        engine, ring = self._engine, self._ring
        control, head = ring.control, ring.head
        self._vain = False
        courtesy, began, rounds = engine.courtesy, perf_counter(), 0
        if began >= courtesy.resumes:
            now = courtesy.let_others_run(began)
            self._looks = max(self._looks - 1, 0) if now - began > CROWDED else min(self._looks + 1, MOST_LOOKS)
            if control[TAIL] != head:
                return True
            end = began + self.patience * engine.spin.seconds
            while courtesy.resumes <= now < end:
                for _ in YIELDS:
                    now = courtesy.let_others_run(now)
                    if control[TAIL] != head:
                        return True
                rounds += 1
                if engine.contenders or (not rounds % ROUNDS and (engine.poll(0, 1) or engine.looks.any_ready())):
                    return False
        self._vain = True
        return False

    def attend(self, work: Waited) -> bool:
        inbound, engine, streak = self._inbound, self._engine, STREAK
        while inbound.calm and inbound.direct is self and not (work.finished or engine.writers or engine.deferred):
            if not self._wait():
                return self._vain
            self.read_one()
            if engine.backlog:  # that was a whole turn: others come next, and the clock
                break
            streak -= 1
            if not streak or perf_counter() >= engine.timers.next:
                break
        return False

    def await_reply(self, call: Lone) -> None:
        inbound, ring = self._inbound, self._ring
        if not (self._engine.may_look() and inbound.calm and inbound.direct is self) or call.finished:
            return
        if not self._wait():
            if self._vain:
                self._engine.spin.miss()
            return
        at = ring.front()
        if at >= 0 and ring.size > HEADER_BYTES:
            version, kind, flags, service, ident, _, nbytes, _ = _unpack_from(ring.data, at)
            whole = ring.size == HEADER_BYTES + nbytes and version == VERSION and nbytes <= self._eager_limit
            if whole and kind == _REPLY and ident == call.ident:
                self._replied(call, flags, service, self._take(at))
                return
        self._read()

    def receive(self, group: int, tag: int, view: memoryview) -> bool:  # noqa: C901  # written out for its speed
        engine, inbound, ring, nbytes = self._engine, self._inbound, self._ring, len(view)
        if not engine.lock.acquire(False):
            engine.acquire()
        try:
            if inbound.direct is not self or nbytes > self._eager_limit:
                return False
            if not (engine.may_look() and inbound.calm and self._matcher.untouched(group, self._index, tag)):
                return False
            if nbytes != self._nbytes or tag != self._tag or group != self._group:
                self._expect(group, tag, nbytes)
            control, head = ring.control, ring.head
            if control[BELL]:
                control[BELL] = 0  # as in `_wait`
            for _ in RING_LOOKS[self._looks]:
                if control[TAIL] != head:
                    break
            else:
                if not self._let_others_run():
                    if self._vain:
                        engine.spin.miss()
                    return False
            at = head & MASK
            end = at + _PREFIX_BYTES + nbytes
            if end > RING_BYTES or ring.used or _unpack_prefix(ring.data, at) != self._prefix:
                self._read()
                return False
            if nbytes:
                view[:] = ring.data[at + _PREFIX_BYTES : end]
            ring.head = head = head + (end - at + LINE - 1 & -LINE)
            if head - ring.told >= TELL:
                self._link.after_read()
            self._unsettled = unsettled = self._unsettled + 1
            if unsettled >= self._batch:
                self.settle()
            engine.spin.misses = 0
            return True
        finally:
            engine.lock.release()
            if engine.deferred or engine.contenders:
                engine.after_release()

    def read_bulk(self) -> int:
        """Receive pieces of a transfer that are here as a whole, right into their place, up to its end. How many bytes
        that were; 0: the general way deals with what there is."""
        ring, inbound, taken = self._ring, self._inbound, 0
        incoming, after_read, data = inbound.incoming, self._link.after_read, ring.data
        while taken < TURN_BYTES:
            at = ring.front()
            if at < 0 or ring.size != HEADER_BYTES:
                break
            version, kind, _, _, _, ident, nbytes, offset = _unpack_from(data, at)
            if kind != _DATA or version != VERSION:
                break
            slot = ring.slot_behind(nbytes)
            view = None if slot is None else incoming.place(ident, offset, nbytes)
            if slot is None or view is None:
                break
            view[:] = slot
            ring.pop_both()
            after_read()
            inbound.frames += 1
            taken += HEADER_BYTES + int(nbytes)
            if incoming.landed(ident, nbytes):
                break
        if taken:
            inbound.heard = True
        return taken

    def _take(self, at: int) -> memoryview:
        """The payload of the message at the front, out of the ring: what is in it may be overwritten."""
        ring = self._ring
        payload = ring.data[at + HEADER_BYTES : at + ring.size].tobytes()
        if ring.pop():
            self._link.after_read()
        return memoryview(payload)

    def read_one(self) -> bool:
        ring = self._ring
        at = ring.front()
        if at >= 0 and ring.size > HEADER_BYTES:
            version, kind, flags, group, tag, _, nbytes, _ = _unpack_from(ring.data, at)
            whole = ring.size == HEADER_BYTES + nbytes and version == VERSION
            if whole and kind == _EAGER and not flags:
                receive = self._put(group, tag, ring.data[at + HEADER_BYTES : at + ring.size])
                if receive is not None:
                    if ring.pop():
                        self._link.after_read()
                    self._passed(group, tag, nbytes)
                    receive.arrived(self._index, tag, nbytes)
                    return True
            elif whole and kind in RPC_FLAG and nbytes <= self._eager_limit:
                self._lone_rpc(kind, flags, group, tag, self._take(at))
                return True
        if at >= 0 or ring.ready():
            self._read()
            return True
        return False

    def _read(self) -> None:
        try:
            self._inbound.read()
        except Exception as error:  # noqa: BLE001  # see PeerRouter.failed
            self._router.failed(error)
