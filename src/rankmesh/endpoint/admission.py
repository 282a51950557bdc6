"""A connection on its way in: the transport's own set-up, then the handshake, within a deadline and a few KiB.

Nothing of a peer is parsed here but the handshake, and never a byte more than it asks for is read. All methods need
the engine's lock.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any

from rankmesh.errors import ConnectError, RankmeshError
from rankmesh.wire.handshake import LONGEST, NONCE_BYTES, Handshake, Refusal, Refused
from rankmesh.wire.messages import Identity

if TYPE_CHECKING:
    from rankmesh.endpoint.progress import Engine
    from rankmesh.transport.base import Link


class Closed(ConnectError):
    """The other side ended the connection before the handshake was through."""

    def __init__(self) -> None:
        super().__init__(
            "the other side closed the connection during the handshake", reason="closed during the handshake"
        )


class Admission:
    """Drives one link to the end of its handshake.

    `progressed(admission)` is called when the remote uid becomes known, when the acceptor must decide, and when it
    is done; `failed(admission, error)` when it failed, timed out or was refused. Exactly one of done and failed
    happens.
    """

    def __init__(
        self,
        engine: Engine,
        link: Link,
        *,
        initiator: bool,
        token: str,
        identity: Identity,
        shortcut: bytes,
        timeout: float,
        progressed: Callable[[Admission], None],
        failed: Callable[[Admission, Exception], None],
    ) -> None:
        self.link = link
        self.handshake = Handshake(
            initiator=initiator, token=token, identity=identity, nonce=os.urandom(NONCE_BYTES), shortcut=shortcut
        )
        self.began = monotonic()
        #: Whether the other side has said anything.
        self.spoke = False
        self.over = False
        self._engine = engine
        self._progressed = progressed
        self._failed = failed
        self._established = False
        self._refused: Exception | None = None
        self._out = b""
        self._in = memoryview(bytearray(LONGEST))
        self._got = 0
        self._timeout = timeout
        self._timer = engine.call_at(self.began + timeout, self._expire)
        self._mask = link.poll_mask()
        engine.watch(link.fileno(), self._mask, self.ready)

    def ready(self, mask: int = 0) -> None:
        """The link can do something: go on."""
        try:
            self._advance()
        except BlockingIOError:
            self._rewatch()
        except (OSError, RankmeshError) as error:
            self._fail_with(error)

    def accept(self) -> None:
        """The acceptor's owner says yes."""
        self._out += self.handshake.accept()
        self.ready()

    def refuse(self, code: Refusal, reason: str) -> None:
        """The acceptor's owner says no: the other side is told, then the connection ends."""
        self._fail_with(Refused(reason, code=code, reason=reason))

    def drop(self, abort: bool = True) -> None:
        """End it without a word; nobody is told."""
        self._close(abort)

    def release(self) -> Link:
        """Done: hand the link over to the conversation."""
        self._engine.unwatch(self.link.fileno())
        self._timer.cancel()
        self.over = True
        return self.link

    def _advance(self) -> None:
        if not self._established:
            self.link.establish()
            self._established = True
            if self.handshake.initiator:
                self._out = self.handshake.start()
        while not self.over:
            self._send()
            handshake = self.handshake
            if handshake.done:
                self._progressed(self)
                return
            if handshake.undecided:
                self._progressed(self)  # which decides
                continue
            knew = handshake.remote_uid
            self._out += handshake.receive(self._read())
            if handshake.remote_uid != knew:
                self._progressed(self)

    def _send(self) -> None:
        while self._out:
            self._out = self._out[self.link.send(self._out) :]

    def _read(self) -> bytes:
        wanted = self.handshake.wanted
        while self._got < wanted:
            got = self.link.recv_into(self._in[self._got : wanted])
            if not got:
                raise Closed
            self.spoke = True
            self._got += got
        self._got = 0
        return bytes(self._in[:wanted])

    def _rewatch(self) -> None:
        if self.over:
            return
        if self._established:
            self.link.wants_write(bool(self._out))
        mask = self.link.poll_mask()
        if mask != self._mask:
            self._mask = mask
            self._engine.modify(self.link.fileno(), mask)

    def _expire(self) -> None:
        said = "nothing" if not self.spoke else "too little"
        self._fail_with(
            ConnectError(f"the other side said {said} within {self._timeout:g} s", reason="handshake deadline")
        )

    def _fail_with(self, error: Exception) -> None:
        if self.over:
            return
        if not self.handshake.initiator and self._established and isinstance(error, RankmeshError):
            self._tell(error)
        self._close(abort=False)
        self._failed(self, error)

    def _tell(self, error: Any) -> None:
        """Say why, if the link takes it at once; a refused connection is not worth waiting for."""
        code = Refusal(error.code) if isinstance(error, Refused) else Refusal.PROTOCOL
        out = Handshake.refuse(code, getattr(error, "reason", "") or error.message)
        try:
            while out:
                out = out[self.link.send(out) :]
        except OSError:
            pass  # it cannot be told; the closed connection says enough

    def _close(self, abort: bool) -> None:
        if self.over:
            return
        self.release()
        if abort:
            self.link.abort()
        else:
            self.link.close()
