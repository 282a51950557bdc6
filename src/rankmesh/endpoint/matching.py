"""Which receive takes which message. Pure: no I/O, no clock, no lock.

A message has a group, a source (the peer's index in this endpoint) and a tag. A receive names a group, and a source
and a tag or a wildcard for either. Rules:

- The first posted receive that fits takes the first message that fits, "first" in the order of posting and of arrival.
- Messages of one (group, source, tag) are taken in the order in which they arrived.
- A message without a receive waits in the unexpected queue. The credit rules bound its bytes; nothing here drops one.
- Wildcards match tags >= 0 only: negative tags are rankmesh's own.
- A key without entries is deleted: finished tags cost nothing.

Exact receives are found in one dictionary step. Wildcards cost up to four, and only where wildcard receives are posted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final, Generic, Protocol, TypeVar

ANY_SOURCE: Final = -1
ANY_TAG: Final = -1

Key = tuple[int, int, int]


class Matchable(Protocol):
    """What a posted receive, or a waiting message, shows to the matcher. `order` is the matcher's to set."""

    group: int
    source: int
    match_tag: int
    order: int


R = TypeVar("R", bound=Matchable)
M = TypeVar("M", bound=Matchable)


class Matcher(Generic[R, M]):
    """Posted receives (R) and unexpected messages (M) of one endpoint."""

    def __init__(self) -> None:
        #: A lone receive stands for itself: most wait alone, and a queue for each would cost more than the match.
        self._posted: dict[Key, R | deque[R]] = {}
        self._unexpected: dict[Key, deque[M]] = {}
        self._wildcards = 0
        self._order = 0

    # ------------------------------------------------------------------ receives

    def post(self, receive: R) -> None:
        """Wait for a message. The caller has looked for an unexpected one first."""
        self._order += 1
        receive.order = self._order
        key = (receive.group, receive.source, receive.match_tag)
        entry = self._posted.get(key)
        if entry is None:
            self._posted[key] = receive
        elif isinstance(entry, deque):
            entry.append(receive)
        else:
            self._posted[key] = deque((entry, receive))
        if key[1] < 0 or key[2] == ANY_TAG:
            self._wildcards += 1

    def repost(self, receive: R) -> None:
        """Put back a receive whose message was withdrawn, at its old place."""
        key = (receive.group, receive.source, receive.match_tag)
        queue = self._queue(key)
        at = next((i for i, other in enumerate(queue) if other.order > receive.order), len(queue))
        queue.insert(at, receive)
        self._posted[key] = queue
        if key[1] < 0 or key[2] == ANY_TAG:
            self._wildcards += 1

    def take_posted(self, group: int, source: int, tag: int) -> R | None:
        """The receive that a message arriving now goes to."""
        key = (group, source, tag)
        if self._wildcards and tag >= 0:
            keys = (key, (group, ANY_SOURCE, tag), (group, source, ANY_TAG), (group, ANY_SOURCE, ANY_TAG))
            fitting = [k for k in keys if k in self._posted]
            if not fitting:
                return None
            key = min(fitting, key=lambda k: self._queue(k)[0].order)
            if key[1] < 0 or key[2] == ANY_TAG:
                self._wildcards -= 1
        entry = self._posted.pop(key, None)
        if entry.__class__ is not deque:
            return entry  # type: ignore[return-value]  # None, or the only receive
        receive: R = entry.popleft()
        if entry:
            self._posted[key] = entry
        return receive

    def take_lone(self, group: int, source: int, tag: int) -> R | None:
        """`take_posted` where it is a single step: no wildcard is posted, and at most one receive of this key."""
        if self._wildcards:
            return None
        entry = self._posted.pop((group, source, tag), None)
        if entry.__class__ is deque:
            self._posted[group, source, tag] = entry
            return None
        return entry  # type: ignore[return-value]  # None, or the receive

    def untouched(self, group: int, source: int, tag: int) -> bool:
        """Nothing waits under this key or a wildcard: neither a receive nor a message."""
        if not (self._posted or self._unexpected):
            return True
        key = (group, source, tag)
        return not self._wildcards and key not in self._unexpected and key not in self._posted

    def free(self, group: int, source: int, tag: int) -> bool:
        """No receive waits that a message of this key could go to."""
        return not self._wildcards and (group, source, tag) not in self._posted

    def unpost(self, receive: R) -> bool:
        """Forget a receive. False: it is not posted (any more)."""
        key = (receive.group, receive.source, receive.match_tag)
        queue = self._queue(key)
        if receive not in queue:
            return False
        queue.remove(receive)
        if queue:
            self._posted[key] = queue
        else:
            del self._posted[key]
        if key[1] < 0 or key[2] == ANY_TAG:
            self._wildcards -= 1
        return True

    def posted(self, source: int | None = None, group: int | None = None) -> list[R]:
        """The posted receives, in order; only those that name `source` or `group` where given."""
        found = (
            receive
            for key in self._posted
            if source in (None, key[1]) and group in (None, key[0])
            for receive in self._queue(key)
        )
        return sorted(found, key=lambda receive: receive.order)

    def _queue(self, key: Key) -> deque[R]:
        """The receives of a key, whichever way they are kept."""
        entry = self._posted.get(key)
        if entry is None:
            return deque()
        return entry if isinstance(entry, deque) else deque((entry,))

    # ------------------------------------------------------------------ messages

    def keep(self, message: M) -> None:
        """Put a message for which no receive is posted into the unexpected queue."""
        self._order += 1
        message.order = self._order
        key = (message.group, message.source, message.match_tag)
        queue = self._unexpected.get(key)
        if queue is None:
            self._unexpected[key] = deque((message,))
        else:
            queue.append(message)

    def peek(self, group: int, source: int, tag: int) -> M | None:
        """The message that a receive posted now would take, left where it is."""
        if source >= 0 and tag != ANY_TAG:
            queue = self._unexpected.get((group, source, tag))
            return queue[0] if queue else None
        fitting = (
            queue[0]
            for (g, s, t), queue in self._unexpected.items()
            if t >= 0 and g == group and source in (ANY_SOURCE, s) and tag in (ANY_TAG, t)
        )
        return min(fitting, key=lambda message: message.order, default=None)

    def take(self, group: int, source: int, tag: int) -> M | None:
        """Like `peek`, and take it out."""
        message = self.peek(group, source, tag)
        if message is not None:
            self.discard(message)
        return message

    def discard(self, message: M) -> bool:
        """Take a message out. False: it is not here (any more)."""
        key = (message.group, message.source, message.match_tag)
        queue = self._unexpected.get(key)
        if queue is None or message not in queue:
            return False
        if queue[0] is message:
            queue.popleft()
        else:
            queue.remove(message)
        if not queue:
            del self._unexpected[key]
        return True

    def unexpected(self) -> Iterator[M]:
        for queue in list(self._unexpected.values()):
            yield from list(queue)

    def __repr__(self) -> str:
        receives = len(self.posted())
        messages = sum(map(len, self._unexpected.values()))
        return f"<Matcher {receives} receives posted, {messages} messages waiting>"
