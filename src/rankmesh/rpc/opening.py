"""Streams and channels, as the side that opens them sees them: a request, and the replies that belong to it."""

from __future__ import annotations

from rankmesh.endpoint.router import Router
from rankmesh.errors import ClosedError, InvalidMessage
from rankmesh.rpc.client import Outgoing
from rankmesh.rpc.protocol import (
    SERVICE,
    Body,
    Kind,
    credit,
    malformed,
    read_amount,
    read_reply,
    request,
    signal,
)
from rankmesh.rpc.streams import Inbox, Outbox


class Opened(Outgoing):
    """A stream under way. Methods need the lock, but for `abandon` and `end`, which take it."""

    what = "stream of"

    def __init__(self, router: Router, name: str, timeout: float) -> None:
        super().__init__(router, name, timeout)
        self.inbox = Inbox(router, self._pay)
        self.outbox = Outbox(router, self._send_item)

    def _pay(self, amount: int) -> None:
        self.tell(credit(amount))

    def _send_item(self, body: Body, number: int) -> None:
        self.transmit(*request(Kind.ITEM, body, seconds=number))

    def replied(self, flags: int, service: int, payload: memoryview, owned: bool) -> None:
        if service != SERVICE:
            self.over(self.unserved(payload))
            return
        try:
            kind, flags, body_at, number = read_reply(payload)
            body = payload[body_at:]
            if kind == Kind.ITEM:
                self.inbox.put(number, flags, body, owned)
            elif kind == Kind.END:
                self.inbox.end_after(number)
            elif kind == Kind.FAILURE:
                self.inbox.end_after(number, self.failure(body))
            elif kind == Kind.CREDIT:
                self.outbox.credit(read_amount(body))
            else:
                raise malformed(f"a reply of kind {kind} to a stream")
        except InvalidMessage as error:
            self.leave()
            self.over(error)
            return
        if self.inbox.ended:
            self.over(None)

    def over(self, error: BaseException | None) -> None:
        """Nothing more comes or goes."""
        self.router.requests.pop(self.ident, None)
        self.finished = True
        self.inbox.end(error)
        self.outbox.end(error or ClosedError(f"The other side has ended the {self.what} {self.name!r}."))

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        self.over(self._error or error)

    def abandon(self) -> None:
        """This side wants no more of it."""
        with self._engine:
            self.inbox.clear()
            if not self.finished:
                self.leave()
                self.over(ClosedError(f"This side closed the {self.what} {self.name!r}."))

    def end(self) -> None:
        """This side sends nothing more."""
        with self._engine:
            self.outbox.end(ClosedError(f"This side has ended what it sends to {self.name!r}."))
            if not self.finished:
                self.tell(signal(Kind.END, self.outbox.number))


class OpenedChannel(Opened):
    what = "channel of"
