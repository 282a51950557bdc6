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
    ├── FunctionNotFound (LookupError)  the peer has no function of that name; names the nearest
    ├── InvalidMessage (ValueError)     a call's arguments do not fit its function, or its bytes are no call or reply
    ├── RegionError                     a region of registered memory cannot be used as asked
    │   ├── RegionNotFound (LookupError)    the peer has no region of that name; names the nearest
    │   ├── StaleRegion                     the region was unregistered or registered anew, or its owner restarted
    │   ├── AccessDenied (PermissionError)  the region does not allow this access, or not to this peer
    │   └── OutOfBounds (IndexError)        the bytes asked for do not lie within the region
    ├── PeerError                       something the other side did, or that happened to it
    │   ├── ConnectError                no connection could be made, or it was refused
    │   │   └── NoConnection            a call found no connection, and none could be made
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

import builtins
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, cast


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


class FunctionNotFound(RankmeshError, LookupError):
    """The peer has no function of that name. Attributes: function, nearest (registered names like it), peer."""

    function: str = ""
    nearest: tuple[str, ...] = ()
    peer: str = ""
    hint = "Register the function there, or correct the name."


class InvalidMessage(RankmeshError, ValueError):
    """Arguments that do not fit a function, or bytes that are no call or reply. Attributes: function, peer, reason."""

    function: str = ""
    peer: str = ""
    reason: str = ""
    hint = "Pass what the function's signature and type hints say."


class RegionError(RankmeshError):
    """A region of registered memory cannot be used as asked. Attributes: region (its name), peer (its owner)."""

    region: str = ""
    peer: str = ""


class RegionNotFound(RegionError, LookupError):
    """The peer has no region of that name. Attribute: nearest (registered names like it)."""

    nearest: tuple[str, ...] = ()
    hint = "Register it there, correct the name, or open it with wait=True."


class StaleRegion(RegionError):
    """The region was unregistered or registered anew, or its owner restarted: this handle is worth nothing now."""

    hint = "Open the region again."


class AccessDenied(RegionError, PermissionError):
    """The region does not allow this kind of access, or not to this peer."""

    hint = "Register the region with the access= and allow= that are needed."


class OutOfBounds(RegionError, IndexError):
    """The bytes asked for do not all lie within the region; none was moved. Attribute: nbytes (the region's size)."""

    nbytes: int = 0
    hint = "Correct the offset or the length."


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


class NoConnection(ConnectError):
    """A call found no connection to its peer, and none could be made: it was not sent."""


class PeerLost(PeerError):
    """The peer died, fell silent or left while this operation needed it."""

    hint = "Look at that process's output; close this side, or go on with the remaining peers."


class TransferAborted(PeerError):
    """The sender gave up in the middle of this message (it was cancelled or ran out of time there)."""


class ProtocolError(PeerError):
    """The peer's bytes break the protocol; its connection is closed."""


class RemoteError(RankmeshError):
    """The peer's code raised. Attributes: remote_type, remote_message, remote_traceback, peer. One that stands for a
    builtin exception is an instance of that too (see `remote_error`)."""

    remote_type: str = ""
    remote_message: str = ""
    remote_traceback: str = ""
    peer: str = ""


class DesyncError(RankmeshError):
    """Ranks disagree on which collective they are in. Attribute: calls (rank → call)."""

    calls: Mapping[int, str] = MappingProxyType({})
    hint = "Let all ranks call the same collectives in the same order; this group can only be closed."


class EpochChanged(RankmeshError):
    """The world changed under the operation. Attributes: old, new."""

    old: int = 0
    new: int = 0


class InternalError(RankmeshError):
    """A defect in rankmesh."""

    hint = "Please report it with this message and the traceback."


def remote_error(remote_type: str, message: str, **attributes: Any) -> RemoteError:
    """A RemoteError that is also a `remote_type`, where that is a builtin exception which can be made from a text."""
    kind = _remote_kind(remote_type)
    try:
        return kind(message, remote_type=remote_type, **attributes)
    except TypeError:  # UnicodeDecodeError and the like need more than a text
        return RemoteError(message, remote_type=remote_type, **attributes)


@cache
def _remote_kind(remote_type: str) -> type[RemoteError]:
    """The class for one builtin exception. Those that end programs or loops here are no errors of the caller's."""
    builtin = getattr(builtins, remote_type, object)
    plain = isinstance(builtin, type) and issubclass(builtin, Exception)
    if not plain or issubclass(builtin, StopIteration | StopAsyncIteration | BaseExceptionGroup):
        return RemoteError
    made = type(remote_type, (RemoteError, builtin), {"__module__": __name__, "__reduce__": _reduce_remote})
    made.__doc__ = f"The peer's code raised {remote_type}."
    return cast("type[RemoteError]", made)


def _reduce_remote(error: RemoteError) -> tuple[Any, ...]:
    return (_rebuild_remote, (error.remote_type, dict(error.__dict__)))


def _rebuild_remote(remote_type: str, attributes: dict[str, Any]) -> RankmeshError:
    return _rebuild(_remote_kind(remote_type), attributes)
