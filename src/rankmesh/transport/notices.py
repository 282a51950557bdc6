"""What a link over shared memory says on its socket besides bells: which segments of an arena the other side may map.

    "+", number, bytes    with a descriptor: this segment may be mapped, and read
    "*", number, bytes    likewise, and written to
    "-", number, 0        it is no more: let go of it

Notices come between bells, in as many pieces as the kernel likes, and a descriptor with whichever piece it likes, but
in order. The other side is not trusted: a segment is mapped only if it is sealed memory of the size it is said to have,
and there are bounds on how many are mapped and on how many descriptors wait for their notice.
"""

from __future__ import annotations

import errno
import mmap
import os
import socket
import struct
from collections import deque
from collections.abc import Iterable
from typing import Final

from rankmesh.transport.ring import corrupt
from rankmesh.transport.segment import check

#: A bell, as it passes over the socket.
BELL_BYTE: Final = b"!"
#: Segments of one peer's that are mapped here at once.
MAX_SHARED: Final = 64
_NOTICE = struct.Struct("<cQQ")
_SHARED, _WRITABLE, _UNSHARED = b"+", b"*", b"-"
#: This process has no room for one more: it goes without that segment, as where the descriptor itself was lost. (Python
#: makes a descriptor of its own for each mapping.)
_EXHAUSTED: Final = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_PROTECTION: Final = {_SHARED: mmap.PROT_READ, _WRITABLE: mmap.PROT_READ | mmap.PROT_WRITE}


class Notices:
    """Both directions of one link."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        #: Segments of the other side's that are mapped here.
        self.shared: dict[int, memoryview] = {}
        self._text = b""
        #: Descriptors that came, in order, for the notices they came with; -1: this process could open no more.
        self._descriptors: deque[int] = deque()

    def share(self, segment: int, fd: int, nbytes: int, writable: bool) -> bool:
        """False: not now, or never again; or too many descriptors are on their way."""
        notice = _NOTICE.pack(_WRITABLE if writable else _SHARED, segment, nbytes)
        try:
            return socket.send_fds(self._sock, [notice], [fd]) == len(notice)
        except OSError:
            return False

    def unshare(self, segment: int) -> None:
        try:
            self._sock.send(_NOTICE.pack(_UNSHARED, segment, 0))
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            pass  # the other side keeps its mapping until the connection ends: memory, but nothing wrong

    def take(self, text: bytes, descriptors: Iterable[int], cut: bool) -> None:
        """What came, bells and all; `cut`: one descriptor or more was lost, because this process could open no more.
        Raises OSError for what is wrong."""
        self._descriptors += descriptors
        if cut:
            self._descriptors.append(-1)
        text = (self._text + text).lstrip(BELL_BYTE)
        while len(text) >= _NOTICE.size:
            self._noticed(*_NOTICE.unpack_from(text))
            text = text[_NOTICE.size :].lstrip(BELL_BYTE)
        self._text = text
        if len(self._descriptors) > MAX_SHARED:
            raise corrupt("descriptors that belong to nothing")

    def _noticed(self, what: bytes, segment: int, nbytes: int) -> None:
        if what == _UNSHARED:
            self.shared.pop(segment, None)
            return
        if what not in _PROTECTION or not nbytes or not self._descriptors:
            raise corrupt(f"a notice {what!r} of segment {segment} with {nbytes} bytes")
        fd = self._descriptors.popleft()
        if fd < 0:
            return
        try:
            check(fd, nbytes)
            if len(self.shared) < MAX_SHARED:
                self.shared[segment] = memoryview(mmap.mmap(fd, nbytes, prot=_PROTECTION[what]))
        except OSError as error:
            if error.errno not in _EXHAUSTED:
                raise
        finally:
            os.close(fd)

    def close(self) -> None:
        """Let go of everything but the socket, which is the link's."""
        self.shared.clear()
        for fd in self._descriptors:
            if fd >= 0:
                os.close(fd)
        self._descriptors.clear()
