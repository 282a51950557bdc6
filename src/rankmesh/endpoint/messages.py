"""The verbs of messages, once, for Peer, Endpoint and Mesh: checks of arguments, then the router or the hub.

Who the other side is, is the caller's to find: a router for sends, an index for receives. A verb that waits takes
`timeout` in seconds (None: Config.timeout). A call that timed out has given its buffer back; whether a timed-out
send arrived is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from rankmesh import codec
from rankmesh.buffers import EMPTY, overlap, readable, writable
from rankmesh.endpoint.matching import ANY_SOURCE, ANY_TAG
from rankmesh.endpoint.transfers import Probe, Receive, Status
from rankmesh.endpoint.work import Work
from rankmesh.errors import UsageError
from rankmesh.wire.header import Flag

if TYPE_CHECKING:
    from rankmesh.endpoint.hub import Hub
    from rankmesh.endpoint.router import Router

#: Users' tags are 0 … MAX_TAG; negative ones are rankmesh's own.
MAX_TAG: Final = 2**62 - 1
_OBJECT: Final = int(Flag.OBJECT)
#: Makes a Status without NamedTuple's Python-level constructor.
new_status = tuple.__new__


class Messages:
    """The messages of one group: its tag space, and how a source is called in a Status."""

    def __init__(self, hub: Hub, group: int, sources: Mapping[int, Any], anyone: Any) -> None:
        self._hub = hub
        self.group = group
        self._sources = sources
        #: Stands for "any source" in messages of errors.
        self._anyone = anyone
        self._timeout = hub.config.timeout

    def send(self, router: Router, data: Any, tag: int, timeout: float | None) -> None:
        if not 0 <= tag <= MAX_TAG:
            raise bad_tag(tag)
        router.outbound.send_buffer(self.group, tag, data, timeout)

    def isend(self, router: Router, data: Any, tag: int, timeout: float | None) -> Work[None]:
        view = readable(data)
        if not 0 <= tag <= MAX_TAG:
            raise bad_tag(tag)
        return router.outbound.send(
            self.group, tag, 0, [view], view.nbytes, self._timeout if timeout is None else timeout
        )

    def send_object(self, router: Router, obj: Any, tag: int, timeout: float | None) -> None:
        if not 0 <= tag <= MAX_TAG:
            raise bad_tag(tag)
        pickle = self._hub.config.allow_pickle and router.peer.may_unpickle
        parts = [memoryview(part) for part in codec.encode(obj, allow_pickle=pickle)]
        nbytes = sum(part.nbytes for part in parts)
        timeout = self._timeout if timeout is None else timeout
        router.outbound.send(self.group, tag, _OBJECT, parts, nbytes, timeout).result()

    def recv(self, peer: Any, router: Router | None, out: Any, tag: int, timeout: float | None) -> Status:
        """`router`: of the one it comes from; None: from anyone."""
        view = writable(out)
        if not ANY_TAG <= tag <= MAX_TAG:
            raise bad_tag(tag)
        source = ANY_SOURCE
        if router is not None:
            source = router.index
            direct = router.inbound.direct
            if direct is not None and tag >= 0 and direct.receive(self.group, tag, view):
                return new_status(Status, (self._sources.get(source), tag, len(view)))
        return self.await_message(peer, source, view, tag, timeout)

    def await_message(
        self, peer: Any, source: int, view: memoryview, tag: int, timeout: float | None, op: str = "recv from"
    ) -> Status:
        """The rest of `recv`, where looking for the message directly was no use."""
        return Receive(
            self._hub,
            op,
            self._anyone if peer is None else peer,
            self.group,
            source,
            tag,
            view,
            False,
            self._sources,
            self._timeout if timeout is None else timeout,
        ).complete()

    def irecv(self, peer: Any, source: int, out: Any, tag: int, timeout: float | None) -> Work[Status]:
        view = writable(out)
        if not ANY_TAG <= tag <= MAX_TAG:
            raise bad_tag(tag)
        receive = self._receive("recv from", peer, source, view, tag, False, timeout)
        receive.post()
        return receive

    def recv_object(self, peer: Any, source: int, tag: int, timeout: float | None) -> Any:
        if not ANY_TAG <= tag <= MAX_TAG:
            raise bad_tag(tag)
        receive = self._receive("recv_object from", peer, source, None, tag, True, timeout)
        receive.complete()
        return codec.decode(receive.payload, allow_pickle=self._hub.config.allow_pickle)

    def sendrecv(
        self, to: Router, peer: Any, source: int, data: Any, out: Any, tag: int, recv_tag: int, timeout: float | None
    ) -> Status:
        """Post the receive, send, then wait for the receive: both sides may do so at once without a deadlock."""
        sent, received = readable(data), writable(out)
        if overlap(sent, received):
            raise UsageError(
                "sendrecv() was given data and out that share memory: what comes would be mixed into what is sent. "
                "Pass an out of its own, or a copy of the data."
            )
        receive = self.irecv(peer, source, received, recv_tag, timeout)
        try:
            self.send(to, sent, tag, timeout)
        except BaseException:
            receive.cancel()
            raise
        return receive.result()

    def probe(self, peer: Any, source: int, tag: int, timeout: float | None) -> Status:
        if not ANY_TAG <= tag <= MAX_TAG:
            raise bad_tag(tag)
        timeout = self._timeout if timeout is None else timeout
        return Probe(self._hub, "probe of", peer, self.group, source, tag, self._sources, timeout).complete()

    def iprobe(self, source: int, tag: int) -> Status | None:
        if not ANY_TAG <= tag <= MAX_TAG:
            raise bad_tag(tag)
        with self._hub.engine:
            self._hub.check_open()
            self._hub.engine.turn()
            message = self._hub.matcher.peek(self.group, source, tag)
        return None if message is None else Status(self._sources.get(message.source), message.match_tag, message.nbytes)

    def signal(self, router: Router, tag: int, timeout: float | None) -> None:
        """An empty message under a tag of our own."""
        router.outbound.send_buffer(self.group, tag, EMPTY, timeout)

    def await_signal(self, op: str, peer: Any, source: int, tag: int, timeout: float | None) -> None:
        self._receive(op, peer, source, EMPTY, tag, False, timeout).complete()

    def expect_signal(self, op: str, peer: Any, source: int, tag: int, timeout: float | None) -> Work[Status]:
        """Like `await_signal`, without waiting."""
        receive = self._receive(op, peer, source, EMPTY, tag, False, timeout)
        receive.post()
        return receive

    def _receive(
        self,
        op: str,
        peer: Any,
        source: int,
        view: memoryview | None,
        tag: int,
        wants_object: bool,
        timeout: float | None,
    ) -> Receive:
        return Receive(
            self._hub,
            op,
            self._anyone if peer is None else peer,
            self.group,
            source,
            tag,
            view,
            wants_object,
            self._sources,
            self._timeout if timeout is None else timeout,
        )


def bad_tag(tag: int) -> UsageError:
    return UsageError(
        f"{tag} is not a tag: tags are integers from 0 to {MAX_TAG}, and ANY_TAG for receives. Choose one of those."
    )
