"""The initiator's side of a handshake over a blocking socket: for the fuzzers, and for the attackers in the tests."""

from __future__ import annotations

import socket
from collections.abc import Callable

from rankmesh.wire.handshake import Handshake


def receive(sock: socket.socket, nbytes: int) -> bytes:
    """Exactly so many bytes; fewer only at the end of the stream."""
    data = b""
    while len(data) < nbytes and (piece := sock.recv(nbytes - len(data))):
        data += piece
    return data


def shake(sock: socket.socket, side: Handshake, say: Callable[[bytes, bytes], object]) -> bool:
    """Go through the handshake. `say(heard, words)` sends what there is to say to what was heard, which is nothing at
    first, or something worse. False: the other side hung up. Raises what the handshake raises."""
    say(b"", side.start())
    while not side.done:
        heard = receive(sock, side.wanted)
        if len(heard) < side.wanted:
            return False
        if words := side.receive(heard):
            say(heard, words)
    return True
