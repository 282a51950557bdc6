"""Every error rankmesh raises, in one tree.

    RankmeshError
    ├── ConfigError (ValueError)        a setting or an argument cannot work
    ├── UsageError (ValueError)         a call that cannot be right: wrong buffer, rank, tag, kind of receive
    ├── ClosedError                     this side closed the object, or the process forked
    ├── BusyError                       a bound in bytes is reached and waiting was not asked for
    ├── CancelledError                  this side cancelled the operation
    ├── DeadlineError (TimeoutError)    time ran out; says on what, since when, what is known of the peer
    ├── TruncationError                 the receive buffer was smaller than the message
    ├── CodecError (ValueError)         an object cannot be encoded, or bytes are not an encoded object
    ├── JoinError                       the world did not come together; names who is missing or in the way
    ├── PeerError                       something the other side did, or that happened to it
    │   ├── ConnectError                no connection could be made, or it was refused
    │   ├── PeerLost                    the peer died, fell silent or left while it was needed
    │   ├── TransferAborted             the sender gave up in the middle of a message
    │   └── ProtocolError               the peer's bytes break the protocol
    ├── RemoteError                     the peer's code raised; carries its type and traceback
    ├── DesyncError                     ranks disagree on which collective they are in
    ├── EpochChanged                    the world changed under the operation
    └── InternalError                   a defect in rankmesh

Local and remote causes are different types; closed, broken and late are different types. An error's message is made
from its attributes, ends with one sentence on what to do, and survives pickling with all attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


class RankmeshError(Exception):
    """The root of the tree. Subclasses take keyword attributes, listed in `__slots__`-like annotations."""

    #: What the reader should do; subclasses override it, instances may with `hint=`.
    hint: str = ""

    def __init__(self, message: str = "", **attributes: Any) -> None:
        super().__init__(message)
        self.message = message
        for name, value in attributes.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip() if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), dict(self.__dict__)))


def _rebuild(kind: type[RankmeshError], attributes: dict[str, Any]) -> RankmeshError:
    error = kind.__new__(kind)
    Exception.__init__(error, attributes.get("message", ""))
    error.__dict__.update(attributes)
    return error


class ConfigError(RankmeshError, ValueError):
    """A setting or an argument cannot work."""


class UsageError(RankmeshError, ValueError):
    """The call cannot be right as it stands."""


class ClosedError(RankmeshError):
    """This side closed the object, or the process forked and is the child."""


class BusyError(RankmeshError):
    """A bound in bytes is reached."""

    hint = "Wait for earlier operations, or raise the bound named here in Config."


class CancelledError(RankmeshError):
    """This side cancelled the operation; its buffer is no longer touched."""


class DeadlineError(RankmeshError, TimeoutError):
    """Time ran out. Attributes: op, peer, tag, elapsed, timeout, known."""

    op: str = ""
    peer: str = ""
    tag: int | None = None
    elapsed: float = 0.0
    timeout: float | None = None
    known: str = ""
    hint = "Pass a larger timeout=, or see why the peer does not take part."


class TruncationError(RankmeshError):
    """The message was larger than the buffer. Attributes: nbytes, capacity, peer, tag."""

    nbytes: int = 0
    capacity: int = 0
    peer: str = ""
    tag: int | None = None
    hint = "Use probe() to learn the size first, or receive into a larger buffer."


class CodecError(RankmeshError, ValueError):
    """An object cannot travel, or bytes are not an encoded object."""


class JoinError(RankmeshError):
    """The world did not come together. Attributes: missing (ranks), size."""

    missing: tuple[int, ...] = ()
    size: int = 0


class PeerError(RankmeshError):
    """Something the other side did, or that happened to it. Attributes: peer, rank, host, pid, op, tag, reason."""

    peer: str = ""
    rank: int | None = None
    host: str = ""
    pid: int | None = None
    op: str = ""
    tag: int | None = None
    reason: str = ""


class ConnectError(PeerError):
    """No connection could be made, or the other side refused it. Attribute: address."""

    address: str = ""


class PeerLost(PeerError):
    """The peer died, fell silent or left while this operation needed it."""

    hint = "Look at that process's output; close this mesh, or go on with the remaining peers."


class TransferAborted(PeerError):
    """The sender gave up in the middle of this message (it was cancelled or ran out of time there)."""


class ProtocolError(PeerError):
    """The peer's bytes break the protocol; its connection is closed."""


class RemoteError(RankmeshError):
    """The peer's code raised. Attributes: remote_type, remote_message, remote_traceback, peer."""

    remote_type: str = ""
    remote_message: str = ""
    remote_traceback: str = ""
    peer: str = ""


class DesyncError(RankmeshError):
    """Ranks disagree on which collective they are in. Attribute: calls (rank → call)."""

    calls: Mapping[int, str] = MappingProxyType({})


class EpochChanged(RankmeshError):
    """The world changed under the operation. Attributes: old, new."""

    old: int = 0
    new: int = 0


class InternalError(RankmeshError):
    """A defect in rankmesh."""

    hint = "Please report it with this message and the traceback."
